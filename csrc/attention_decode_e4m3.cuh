// Four e4m3 in a register become f16 pairs, by either of two ways that use different pipes.
//
// sm_90 has no mma.sync of e4m3 (ptxas makes conversions and a 16-bit product of it). With all 256
// conversions of 64 keys by its instruction, an SM took some 2000 cycles for them, at 16 SMs as at
// 48: 8 cycles each. So keys go that way, and values by three plain integer instructions a pair.
#pragma once
#include "attention_decode_copy.cuh"

#ifndef SHIFTED_TILES  // of a step's four tiles of 16 keys, those whose keys are shifted, too
#define SHIFTED_TILES 0
#endif

namespace decode {

// By conversion: bytes 0, 1 and bytes 2, 3. Halves of a register spare the shift that e4m3_to_f16
// costs.
__device__ __forceinline__ void unpack4(u32& low, u32& high, u32 x) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x));
}

// What shifted values are to be multiplied by: the difference of the exponents' biases is 15 - 7.
constexpr float kShiftedUnit = 256.0f;

// By shifts: bytes SELECTOR & 3 and SELECTOR >> 8 & 3 as f16 2^-8 their size, exactly, subnormals
// too: exponent and mantissa seven bits up, the sign at the top. The selector's nibbles with bit 3
// fill a byte with a sign, so that one shift brings the sign to the top as well; what lies between is
// masked. NaN becomes 480: finite, as other large values are.
template <u32 SELECTOR>
__device__ __forceinline__ u32 shift_pair(u32 x) {
  u32 spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(x), "n"(SELECTOR));
  return (spread << 7) & 0xbf80bf80u;
}
// Bytes 0, 1 and bytes 2, 3, as unpack4 has them.
__device__ __forceinline__ void shift_low_high(u32& low, u32& high, u32 x) {
  low = shift_pair<0x9180>(x);
  high = shift_pair<0xb3a2>(x);
}
// Bytes 0, 2 and bytes 1, 3.
__device__ __forceinline__ void shift_even_odd(u32& even, u32& odd, u32 x) {
  even = shift_pair<0xa280>(x);
  odd = shift_pair<0xb391>(x);
}

}  // namespace decode
