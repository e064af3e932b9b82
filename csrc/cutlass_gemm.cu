// Persistent GEMMs of CUTLASS's headers behind a C interface: what the kernels of
// smkern/kernels/cute are held against, and how CUDA C++ with those headers is built and called.
//
// out[m, n] = a[m, k] w[n, k]^T in bf16, fp32 sums. X is the operand on the matrix unit's row
// side: a, or w where a variant is swapped, whose result is then stored transposed. CTAs take
// whole tiles in turn, so none waits for another's; those of a cluster share their copies.

#include <cuda_runtime_api.h>

#include "cute/tensor.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace {

using cute::Int;
using cute::Shape;

struct Call {
  void const *a, *w;
  void *out;
  int m, n, k;
  long long a_stride, w_stride, out_stride;  // elements between rows
  int sm_count, max_active_clusters, swizzle;
  void *workspace;
  cudaStream_t stream;
};

// Statuses: 0, CUTLASS's as they are, the runtime's errors below 0.
int status_of(cutlass::Status status) {
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? static_cast<int>(status) : -static_cast<int>(error);
}

using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;

template <int kRows, int kColumns, int kClusterX, int kClusterY, class Mainloop, bool kSwap = false>
struct Gemm {
  using Element = cutlass::bfloat16_t;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using OutLayout = cute::conditional_t<kSwap, ColumnMajor, RowMajor>;
  using Tile = Shape<Int<kRows>, Int<kColumns>, Int<64>>;
  using Cluster = Shape<Int<kClusterX>, Int<kClusterY>, Int<1>>;
  using Stores = cute::conditional_t<cute::is_same_v<Mainloop, Cooperative>,
                                     cutlass::epilogue::TmaWarpSpecializedCooperative,
                                     cutlass::epilogue::TmaWarpSpecialized>;
  static constexpr int kAlign = 8;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, OutLayout, kAlign,
      Element, OutLayout, kAlign, Stores>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename Epilogue::SharedStorage))>;
  using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlign, Element,
      ColumnMajor, kAlign, float, Tile, Cluster, Stages, Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Collective,
                                                      Epilogue, cutlass::gemm::PersistentScheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Device::Arguments arguments(Call const &c) {
    auto const *x = static_cast<Element const *>(kSwap ? c.w : c.a);
    auto const *y = static_cast<Element const *>(kSwap ? c.a : c.w);
    typename Kernel::StrideA const x_stride{kSwap ? c.w_stride : c.a_stride, Int<1>{}, 0};
    typename Kernel::StrideB const y_stride{kSwap ? c.a_stride : c.w_stride, Int<1>{}, 0};
    typename Kernel::StrideD out_stride{};
    cute::get<kSwap ? 1 : 0>(out_stride) = c.out_stride;
    typename Device::Arguments found{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {kSwap ? c.n : c.m, kSwap ? c.m : c.n, c.k, 1},
        {x, x_stride, y, y_stride},
        {{1.0f, 0.0f}, nullptr, out_stride, static_cast<Element *>(c.out), out_stride}};
    found.hw_info.sm_count = c.sm_count;
    found.hw_info.max_active_clusters = c.max_active_clusters;
    found.scheduler.max_swizzle_size = c.swizzle;
    return found;
  }

  static int ctas(Call const &c) {
    dim3 const grid = Device::get_grid_shape(arguments(c), c.workspace);
    return static_cast<int>(grid.x * grid.y * grid.z);
  }

  static long long workspace_bytes(Call const &c) {
    return static_cast<long long>(Device::get_workspace_size(arguments(c)));
  }

  static int run(Call const &c) {
    auto const wanted = arguments(c);
    if (auto const status = Device::can_implement(wanted); status != cutlass::Status::kSuccess) {
      return status_of(status);
    }
    Device gemm;
    auto const status = gemm.initialize(wanted, c.workspace, c.stream);
    return status_of(status == cutlass::Status::kSuccess ? gemm.run(c.stream) : status);
  }

  // How many clusters run at once on the SMs of a stream.
  static int clusters(cudaStream_t stream, int *found) {
    auto const *kernel = reinterpret_cast<void const *>(cutlass::device_kernel<Kernel>);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kClusterX;
    attribute.val.clusterDim.y = kClusterY;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kClusterX, kClusterY, 1);
    config.blockDim = dim3(Kernel::MaxThreadsPerBlock, 1, 1);
    config.dynamicSmemBytes = Kernel::SharedStorageSize;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveClusters(found, kernel, &config);
    }
    cudaGetLastError();  // it is told here, not by the next call
    return -static_cast<int>(error);
  }
};

struct Variant {
  char const *name;  // rows of X, columns of Y, elements of K; CTAs of a cluster
  int cluster_size;
  int (*run)(Call const &);
  int (*ctas)(Call const &);
  long long (*workspace_bytes)(Call const &);
  int (*clusters)(cudaStream_t, int *);
};

template <class G>
constexpr Variant variant(char const *name) {
  return {name, cute::size(typename G::Cluster{}), G::run, G::ctas, G::workspace_bytes, G::clusters};
}

constexpr Variant kVariants[] = {
    variant<Gemm<128, 256, 2, 1, Cooperative>>("128x256x64:cooperative:2x1"),
    variant<Gemm<128, 256, 1, 2, Cooperative>>("128x256x64:cooperative:1x2"),
    variant<Gemm<128, 256, 1, 1, Cooperative>>("128x256x64:cooperative:1x1"),
    variant<Gemm<256, 128, 2, 1, Cooperative>>("256x128x64:cooperative:2x1"),
    variant<Gemm<128, 128, 2, 1, Pingpong>>("128x128x64:pingpong:2x1"),
    variant<Gemm<128, 128, 1, 1, Pingpong>>("128x128x64:pingpong:1x1"),
    variant<Gemm<64, 256, 1, 2, Pingpong>>("64x256x64:pingpong:1x2"),
    variant<Gemm<64, 256, 1, 1, Pingpong>>("64x256x64:pingpong:1x1"),
    variant<Gemm<128, 64, 2, 1, Pingpong, true>>("128x64x64:pingpong:2x1:swap"),
    variant<Gemm<128, 64, 1, 1, Pingpong, true>>("128x64x64:pingpong:1x1:swap"),
};
constexpr int kCount = sizeof(kVariants) / sizeof(kVariants[0]);

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int smkern_cutlass_count() { return kCount; }

char const *smkern_cutlass_name(int which) { return kVariants[which].name; }

int smkern_cutlass_cluster_size(int which) { return kVariants[which].cluster_size; }

int smkern_cutlass_clusters(int which, void *stream, int *found) {
  return kVariants[which].clusters(static_cast<cudaStream_t>(stream), found);
}

int smkern_cutlass_ctas(int which, Call const *call) { return kVariants[which].ctas(*call); }

long long smkern_cutlass_workspace_bytes(int which, Call const *call) {
  return kVariants[which].workspace_bytes(*call);
}

int smkern_cutlass_run(int which, Call const *call) { return kVariants[which].run(*call); }

char const *smkern_cutlass_error(int status) {
  return status < 0 ? cudaGetErrorString(static_cast<cudaError_t>(-status))
                    : cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));
}

}  // extern "C"
#pragma GCC visibility pop
