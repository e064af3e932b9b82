// Prefill and mixed attention over a paged cache: some CTAs, chosen by the plan, begin with decode
// items, then all work on prefill items.
#include "attention_decode.cuh"
#include "attention_prefill.cuh"

struct Maps {  // tensor maps of queries, keys and values, for TMA
  TensorMap of[3];
};

extern "C" __global__ void __launch_bounds__(prefill::kThreads, 1)
    attention_prefill(const __grid_constant__ AttentionParams p,
                      const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared[];
  await_previous_kernel();
  // evenly over the grid: neighbours in it share a GPC's way to memory
  const int decode_ctas = p.plan[DECODE_CTAS], grid = gridDim.x, cta = blockIdx.x;
  const int before = cta * decode_ctas / grid;
  if (before < (cta + 1) * decode_ctas / grid) {
    const int team = threadIdx.x / decode::kTeamThreads;
    if (team < TEAMS) decode::run(p, shared, decode_ctas * TEAMS, before * TEAMS + team);
    __syncthreads();
  }
  prefill::run(p, maps.of, shared);
}
