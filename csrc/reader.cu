// Measures peak read bandwidth: threads that only load 16 bytes at a time.
//
// Compiled when a bench first needs it, with -DTHREADS, -DCTAS_PER_SM and -DLOADS; it includes
// nothing, so nvrtc compiles it as it stands.

#ifndef THREADS
#define THREADS 1024
#endif
#ifndef CTAS_PER_SM
#define CTAS_PER_SM 2
#endif
#ifndef LOADS
#define LOADS 8
#endif

// 16 bytes, past L1: nothing is read twice.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 value;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address));
  return value;
}

// Read data[0 .. vectors) once. The LOADS loads of a turn are a grid apart, so that each is one
// stretch of memory for the grid as a whole. At 2,048 threads an SM a thread has 32 registers, which
// hold 4 to 6 loads: the others of the turn follow as these return.
// More passes than one read the same data again, which measures L2 where it holds them.
// `sink` is written only if `impossible` is set and all the data is zero; it keeps the loads.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
stream_read(const uint4* __restrict__ data, unsigned long long vectors, unsigned* sink,
            unsigned impossible, unsigned passes) {
  const unsigned long long stride = gridDim.x * THREADS;
  const uint4* const end = data + vectors;
  unsigned seen = 0;
#pragma unroll 1
  for (; passes; --passes) {
    const uint4* at = data + blockIdx.x * THREADS + threadIdx.x;
    for (; at + (LOADS - 1) * stride < end; at += LOADS * stride) {
      uint4 value[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) value[i] = load_once(at + i * stride);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) seen |= value[i].x | value[i].y | value[i].z | value[i].w;
    }
    for (; at < end; at += stride) {
      const uint4 value = load_once(at);
      seen |= value.x | value.y | value.z | value.w;
    }
  }
  if (impossible && seen == 0) *sink = 1;
}
