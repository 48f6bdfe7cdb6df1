// Plan -> kernel parameters and tensor maps -> one kernel launch.
#include <cuda_runtime.h>

#include <cmath>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "hopper_attention/forward.h"
#include "host/kernel_table.h"
#include "host/tensor_map.h"
#include "kernels/params.h"

namespace hopper_attention {
namespace {

void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// Makes `device` current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) { check(cudaSetDevice(device), "cudaSetDevice"); }
    changed_ = device != before_;
  }
  ~DeviceGuard() {
    if (changed_) { cudaSetDevice(before_); }
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Lets `kernel` use its shared memory on `device`; also loads it. Once for each kernel and device.
void prepare_kernel(KernelEntry const& kernel, int device) {
  static std::mutex mutex;
  static std::set<std::pair<void const*, int>> prepared;
  std::lock_guard const lock(mutex);
  if (prepared.contains({kernel.function, device})) { return; }
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
        "the attention kernel could not be loaded");
  prepared.insert({kernel.function, device});
}

std::uint64_t extent(Tensor const& t, int dim) { return static_cast<std::uint64_t>(t.shape[dim]); }
std::uint64_t stride(Tensor const& t, int dim) { return static_cast<std::uint64_t>(t.stride[dim]); }

// (B, S, H, D) of q or out as (D, packed heads, S, head groups, B), in boxes of one slab.
TensorMapShape query_map(Tensor const& t, int tile_head_dim, Packing const& packing) {
  auto const heads = static_cast<std::uint64_t>(packing.heads.divisor);
  return {.extent = {extent(t, 3), heads, extent(t, 1), extent(t, 2) / heads, extent(t, 0)},
          .stride = {1, stride(t, 2), stride(t, 1), stride(t, 2) * heads, stride(t, 0)},
          .box = {static_cast<std::uint32_t>(slab_columns(tile_head_dim)), static_cast<std::uint32_t>(heads),
                  static_cast<std::uint32_t>(packing.queries_per_slab), 1, 1}};
}

// (B, S, H, D) of k or v as (D, S, H, B), in boxes of one block.
TensorMapShape key_map(Tensor const& t, int tile_head_dim, int keys) {
  return {.rank = 4,
          .extent = {extent(t, 3), extent(t, 1), extent(t, 2), extent(t, 0), 1},
          .stride = {1, stride(t, 1), stride(t, 2), stride(t, 0), 1},
          .box = {static_cast<std::uint32_t>(slab_columns(tile_head_dim)), static_cast<std::uint32_t>(keys), 1, 1, 1}};
}

bool fits_tma(Tensor const& t) {
  constexpr int kAlignment = 16;
  constexpr int kElementBytes = 2;
  if (reinterpret_cast<std::uintptr_t>(t.data) % kAlignment != 0) { return false; }
  for (int i = 0; i + 1 < t.rank; ++i) {
    if (t.shape[i] > 1 && t.stride[i] * kElementBytes % kAlignment != 0) { return false; }
  }
  return true;
}

SoftmaxParams softmax_params(Problem const& problem) {
  double const log2e = 1.0 / std::log(2.0);
  // A scale of 0 makes all keys equal; the smallest normal number does the same and keeps -inf * scale defined.
  double const scale = problem.softmax_scale == 0.0F ? std::ldexp(1.0, -100) : problem.softmax_scale;
  if (problem.softcap == 0.0F) { return {static_cast<float>(scale * log2e), 0.0F}; }
  return {static_cast<float>(problem.softcap * log2e), static_cast<float>(scale / problem.softcap)};
}

LoadParams load_params(Plan const& plan, Problem const& problem, Arguments const& args, Packing const& packing) {
  TileConfig const& tile = plan.tile;
  LoadParams load{};
  load.q = make_tensor_map(plan.dtype, args.q.data, query_map(args.q, tile.head_dim, packing));
  // Without keys there is nothing to load, and no tensor to describe.
  if (problem.seqlen_k > 0) {
    load.k = make_tensor_map(plan.dtype, args.k.data, key_map(args.k, tile.head_dim, tile.keys));
    load.v = make_tensor_map(plan.dtype, args.v.data, key_map(args.v, tile.head_dim_v, tile.keys));
  }
  load.groups_per_head_k = FastDivmod(problem.heads_q / problem.heads_k / plan.packed_heads);
  load.query_rows = static_cast<std::uint32_t>(plan.packed_heads * packing.queries_per_slab);
  return load;
}

EpilogueParams epilogue_params(Plan const& plan, Problem const& problem, Arguments const& args,
                               Packing const& packing) {
  Tensor const& out = args.out;
  EpilogueParams epilogue{};
  epilogue.out_by_tma = fits_tma(out);
  if (epilogue.out_by_tma) {
    epilogue.out = make_tensor_map(plan.dtype, out.data, query_map(out, plan.tile.head_dim_v, packing));
  }
  epilogue.out_pointer = out.data;
  epilogue.out_stride_batch = out.stride[0];
  epilogue.out_stride_row = out.stride[1];
  epilogue.out_stride_head = out.stride[2];
  epilogue.lse = static_cast<float*>(args.softmax_lse.data);
  epilogue.sinks = args.sinks.data;
  epilogue.sinks_type = args.sinks.dtype;
  epilogue.heads_q = problem.heads_q;
  epilogue.head_dim_v = problem.head_dim_v;
  return epilogue;
}

PrefillParams prefill_params(Plan const& plan, Problem const& problem, Arguments const& args) {
  Packing const packing = make_packing(plan.packed_heads);
  int const queries_per_tile = packing.queries_per_slab * (plan.tile.rows / kSlabRows);
  bool const longest_last = problem.mask.right != kUnlimited;
  return {
      .load = load_params(plan, problem, args, packing),
      .epilogue = epilogue_params(plan, problem, args, packing),
      .scheduler = make_scheduler_params(problem.batch, problem.heads_q / plan.packed_heads,
                                         ceil_div(problem.seqlen_q, queries_per_tile), plan.heads_per_pass,
                                         longest_last, plan.ctas),
      .softmax = softmax_params(problem),
      .packing = packing,
      .mask = problem.mask,
      .len = {problem.seqlen_q, problem.seqlen_k},
  };
}

}  // namespace

void warmup(int ordinal) {
  require_supported_device(ordinal);
  DeviceGuard const guard(ordinal);
  for (auto const& unit : kernel_table()) {
    for (KernelEntry const& kernel : unit) { prepare_kernel(kernel, ordinal); }
  }
}

void launch(Plan const& plan, Problem const& problem, Arguments const& args, Stream stream) {
  if (plan.kernel == KernelFamily::kNone) { return; }
  KernelEntry const& kernel = find_kernel(plan.kernel, plan.dtype, plan.tile);
  DeviceGuard const guard(args.q.device);
  prepare_kernel(kernel, args.q.device);

  PrefillParams params = prefill_params(plan, problem, args);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.ctas));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  config.stream = stream;
  void* arguments[] = {&params};
  check(cudaLaunchKernelExC(&config, kernel.function, arguments), "the launch of the attention kernel failed");
}

}  // namespace hopper_attention
