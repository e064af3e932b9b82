// Output in e4m3 with a scale for each 128 columns of a token, where OUT8 is set.
//
// The bits are those of 16-bit output that is quantized afterwards
// (smkern/kernels/fp8/rows_triton.py): values are rounded to 16 bits first, a scale is the largest
// magnitude / 448, and values are multiplied by its inverse.
#pragma once
#include "attention.cuh"

constexpr int kScaled = 128;  // columns that share a scale

// The larger of two pairs' 16-bit magnitudes; NaN's are the largest, as bits.
__device__ __forceinline__ u32 larger(u32 most, u32 pair) {
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(most), "r"(pair & 0x7fff7fffu));
  return r;
}

// A pair's larger 16 bits.
__device__ __forceinline__ u32 larger_half(u32 pair) { return max(pair & 0xffffu, pair >> 16); }

__device__ __forceinline__ float2 unpack2(u32 pair) {
  float2 r;
  if constexpr (FP16)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(r.x), "=f"(r.y)
        : "r"(pair));
  else
    r = make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  return r;
}

// A block's scale by its largest magnitude, 16 bits: NaN where it is not finite, 1 where it is
// below 2^-100.
struct BlockScale {
  float scale, inverse;
  __device__ __forceinline__ explicit BlockScale(u32 magnitude) {
    const float most = unpack2(magnitude).x;
    scale = most < 0x1p-100f ? 1.0f : __fdiv_rn(most, 448.0f);
    if (magnitude >= (FP16 ? 0x7c00u : 0x7f80u)) scale = __int_as_float(0x7fffffff);
    inverse = __frcp_rn(scale);
  }
};

// A pair in e4m3, in the low 16 bits.
__device__ __forceinline__ u32 to_e4m3(u32 pair, float inverse) {
  const float2 x = unpack2(pair);
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(r)
      : "f"(x.y * inverse), "f"(x.x * inverse));
  return r;
}

// A block's scale: of the columns from `column` on of a token's [heads * D].
__device__ __forceinline__ void store_scale(const AttentionParams& p, int token, int column,
                                            float scale) {
  p.out_scale[token * p.scale_token + column / kScaled * p.scale_block] = scale;
}

// 4 dims of a row from every lane of a warp, which together have the columns of one scale.
__device__ __forceinline__ void store_quad(const AttentionParams& p, int token, int head, int dim,
                                           u32 low, u32 high) {
  static_assert(D % kScaled == 0 || kScaled % D == 0);
  u32 most = larger_half(larger(low & 0x7fff7fffu, high));
  asm("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(most));
  const BlockScale block(most);
  *(u32*)(p.out + token * p.out_token + head * p.out_head + dim) =
      to_e4m3(low, block.inverse) | to_e4m3(high, block.inverse) << 16;
  const int column = head * D + dim;
  if (column % kScaled == 0) store_scale(p, token, column, block.scale);
}
