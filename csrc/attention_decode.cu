// Decode attention over a paged cache: one CTA of TEAMS teams per SM, units distributed evenly.
#include "attention_decode.cuh"

extern "C" __global__ void __launch_bounds__(decode::kTeamThreads* TEAMS, 1)
    attention_decode(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) char shared[];
  await_previous_kernel();
  const int team = threadIdx.x / decode::kTeamThreads;
  decode::run(p, shared, gridDim.x * TEAMS, blockIdx.x * TEAMS + team);
}
