// The launches of a call: what prepare_launches() has written down, and what the tensors of this call add to it.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "hopper_attention/forward.h"
#include "host/cluster_params.h"
#include "host/cuda_launch.h"
#include "host/plan_request.h"
#include "host/prepared_launches.h"
#include "host/schedule_shape.h"
#include "host/tensor_map.h"
#include "host/workspace.h"
#include "kernels/params.h"
#include "kernels/schedule_params.h"
#include "kernels/split_combine_params.h"
#include "kernels/support_kernels.h"

namespace hopper_attention {
namespace {

// q, k, v or out, (B, S, H, D) or (T, H, D), with the same four dims.
class Batched {
 public:
  explicit Batched(Tensor const& t) : t_(t), absent_(4 - t.rank) {}

  std::uint64_t extent(int dim) const {
    return dim < absent_ ? 1 : static_cast<std::uint64_t>(t_.shape[dim - absent_]);
  }
  std::uint64_t stride(int dim) const {
    return dim < absent_ ? 0 : static_cast<std::uint64_t>(t_.stride[dim - absent_]);
  }

 private:
  Tensor const& t_;
  int absent_;
};

// q or out as (D, packed heads, S, head groups, B), in boxes of one slab with `queries` queries.
TensorMapShape query_map(Batched const& t, int tile_head_dim, int packed_heads, int queries) {
  auto const heads = static_cast<std::uint64_t>(packed_heads);
  return {.extent = {t.extent(3), heads, t.extent(1), t.extent(2) / heads, t.extent(0)},
          .stride = {1, t.stride(2), t.stride(1), t.stride(2) * heads, t.stride(0)},
          .box = {static_cast<std::uint32_t>(slab_columns(tile_head_dim)), static_cast<std::uint32_t>(heads),
                  static_cast<std::uint32_t>(queries), 1, 1}};
}

// Whether the rows of all batches are as far from each other as those of one.
bool are_in_one_dim(Batched const& t) {
  return t.extent(0) == 1 || (t.extent(1) > 1 && t.stride(0) == t.extent(1) * t.stride(1));
}

// Where a ClippedBox may begin.
std::uint64_t clipped_extent(std::uint64_t rows, int copies) { return rows + 1 - static_cast<std::uint64_t>(copies); }

// out whose rows are in one dim, in boxes of one slab that may be clipped: (D, packed heads, B * S + 1 - copies,
// copies, head groups).
TensorMapShape clipped_query_map(Batched const& t, int tile_head_dim, int packed_heads, int queries, int copies) {
  auto const heads = static_cast<std::uint64_t>(packed_heads);
  return {.extent = {t.extent(3), heads, clipped_extent(t.extent(0) * t.extent(1), copies),
                     static_cast<std::uint64_t>(copies), t.extent(2) / heads},
          .stride = {1, t.stride(2), t.stride(1), t.stride(1), t.stride(2) * heads},
          .box = {static_cast<std::uint32_t>(slab_columns(tile_head_dim)), static_cast<std::uint32_t>(heads), 1,
                  static_cast<std::uint32_t>(queries), 1}};
}

// k or v in boxes of `keys` that may be clipped: (D, S + 1 - copies, copies, H, B).
TensorMapShape key_map(Batched const& t, int tile_head_dim, int keys, int copies) {
  return {.extent = {t.extent(3), clipped_extent(t.extent(1), copies), static_cast<std::uint64_t>(copies), t.extent(2),
                     t.extent(0)},
          .stride = {1, t.stride(1), t.stride(1), t.stride(2), t.stride(0)},
          .box = {static_cast<std::uint32_t>(slab_columns(tile_head_dim)), 1, static_cast<std::uint32_t>(keys), 1, 1}};
}

// k or v, (pages, page size, H, D), as (D, page size, H, pages), in boxes of `keys`.
TensorMapShape page_map(Batched const& t, int tile_head_dim, int keys) {
  return {.rank = 4,
          .extent = {t.extent(3), t.extent(1), t.extent(2), t.extent(0), 1},
          .stride = {1, t.stride(1), t.stride(2), t.stride(0), 1},
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

int const* integers(Tensor const& t) { return static_cast<int const*>(t.data); }

SequenceParams sequence_params(Problem const& problem, Arguments const& args) {
  SequenceParams p;
  p.cu_seqlens_q = integers(args.cu_seqlens_q);
  p.cu_seqlens_k = integers(args.cu_seqlens_k);
  p.seqused_q = integers(args.seqused_q);
  p.seqused_k = integers(args.seqused_k);
  p.cu_seqlens_k_new = integers(args.cu_seqlens_k_new);
  p.cache_batch_idx = integers(args.cache_batch_idx);
  p.cache_leftpad = integers(args.cache_leftpad);
  p.cp_tot_seqused_k = integers(args.cp_tot_seqused_k);
  p.batch = problem.batch;
  p.seqlen_k_new = static_cast<int>(args.seqlen_k_new);
  return p;
}

// Where the lengths of a call lie, and what memory bounds them.
SequenceParams sequences_of_call(Problem const& problem, Arguments const& args) {
  SequenceParams p = sequence_params(problem, args);
  Tensor const& k = args.k;
  p.seqlen_q = static_cast<int>(problem.packed_q ? args.q.shape[0] : args.q.shape[1]);
  p.capacity_k = static_cast<int>(problem.keys == KeyLayout::kPaged    ? args.page_table.shape[1] * k.shape[1]
                                  : problem.keys == KeyLayout::kVarlen ? k.shape[0]
                                                                       : k.shape[1]);
  p.cache_batches = static_cast<int>(k.shape[0]);
  p.seqused_k_all = args.seqused_k_all >= 0 ? clamped(args.seqused_k_all, 0, p.capacity_k) : p.capacity_k;
  return p;
}

RowSource row_source(Tensor const& t) {
  return {t.data, t.stride[0], t.stride[1], t.stride[2], static_cast<int>(t.shape[3])};
}

void set_tensors(PageParams& pages, Arguments const& args) {
  pages.table = integers(args.page_table);
  pages.stride = args.page_table.stride[0];
  pages.width = static_cast<int>(args.page_table.shape[1]);
  pages.pages = static_cast<int>(args.k.shape[0]);
  pages.k = row_source(args.k);
  pages.v = row_source(args.v);
}

void set_tensors(LoadParams& load, BoxShape const& box, Problem const& problem, Arguments const& args) {
  bool const paged = problem.keys == KeyLayout::kPaged;
  if (paged) { set_tensors(load.pages, args); }
  DataType const dtype = args.q.dtype;
  load.q = make_tensor_map(
      {args.q.data, dtype, query_map(Batched(args.q), box.tile.head_dim, box.packed_heads, box.queries)});
  // Without keys there is nothing to load, and no tensor to describe.
  Batched const k(args.k);
  if (k.extent(0) > 0 && k.extent(1) > 0) {
    int const keys = paged ? load.pages.box_keys : box.tile.keys;
    load.copies = static_cast<int>(std::min<std::uint64_t>(k.extent(1), static_cast<std::uint64_t>(keys)));
    auto const map = [&](Batched const& t, int head_dim) {
      return paged ? page_map(t, head_dim, keys) : key_map(t, head_dim, keys, load.copies);
    };
    load.k = make_tensor_map({args.k.data, dtype, map(k, box.tile.head_dim)});
    load.v = make_tensor_map({args.v.data, dtype, map(Batched(args.v), box.tile.head_dim_v)});
  }
}

void set_tensors(ResultParams& results, Problem const& problem, Arguments const& args) {
  Tensor const& out = args.out;
  int const row = out.rank - 3;  // 0: packed sequences
  results.out = out.data;
  results.out_stride_batch = row == 0 ? 0 : out.stride[0];
  results.out_stride_row = out.stride[row];
  results.out_stride_head = out.stride[row + 1];
  std::int64_t const rows = problem.packed_q ? args.q.shape[0] : args.q.shape[1];
  results.rows = static_cast<int>(rows);
  results.lse = static_cast<float*>(args.softmax_lse.data);  // (B, H, S), or (H, T) of packed sequences
  results.lse_stride_batch = rows * problem.heads_q;
  results.lse_stride_head = rows;
  results.sinks = args.sinks.data;
  results.sinks_type = args.sinks.dtype;
}

void set_tensors(EpilogueParams& epilogue, BoxShape const& box, Problem const& problem, Arguments const& args) {
  set_tensors(static_cast<ResultParams&>(epilogue), problem, args);
  epilogue.out_by_tma = fits_tma(args.out);
  if (!epilogue.out_by_tma) { return; }
  Batched const out(args.out);
  std::uint64_t const rows = out.extent(0) * out.extent(1);
  bool const clipped = !epilogue.clip_by_tma && are_in_one_dim(out);
  epilogue.copies = clipped ? static_cast<int>(std::min<std::uint64_t>(rows, box.queries)) : 0;
  int const head_dim = box.tile.head_dim_v;
  epilogue.out_map =
      make_tensor_map({args.out.data, args.q.dtype,
                       clipped ? clipped_query_map(out, head_dim, box.packed_heads, box.queries, epilogue.copies)
                               : query_map(out, head_dim, box.packed_heads, box.queries)});
}

// The workspace: the schedule if this call makes it, then the partial results of each kernel.
struct Workspace {
  int* metadata = nullptr;
  std::array<PartialParams, 3> partial{};
};

Workspace divide_workspace(Plan const& plan, Problem const& problem, Arguments const& args) {
  Workspace parts;
  parts.metadata = static_cast<int*>(args.scheduler_metadata.data);
  if (plan.workspace_bytes == 0) { return parts; }
  Tensor const& workspace = args.workspace;
  require_workspace(plan, workspace);
  auto* next = static_cast<std::byte*>(workspace.data);
  if (plan.makes_schedule) {
    parts.metadata = reinterpret_cast<int*>(next);
    next += aligned_bytes(schedule_size(problem.batch) * std::int64_t{sizeof(int)});
  }
  for (std::size_t i = 0; i < plan.kernels.size(); ++i) {
    KernelPlan const& kernel = plan.kernels[i];
    if (!kernel.may_split || kernel.shares_parts) { continue; }
    parts.partial[i] = {reinterpret_cast<float*>(next),
                        reinterpret_cast<float*>(next + partial_out_bytes(kernel, problem.head_dim_v)),
                        kernel.partial_rows};
    if (kernel.merges_parts) {
      parts.partial[i].arrivals = reinterpret_cast<std::uint64_t*>(
          next + partial_out_bytes(kernel, problem.head_dim_v) + partial_lse_bytes(kernel));
    }
    next += partial_bytes(kernel, problem.head_dim_v);
  }
  for (std::size_t i = 0; i < plan.kernels.size(); ++i) {
    if (plan.kernels[i].shares_parts) { parts.partial[i] = parts.partial[plan.kernels.size() - 1]; }
  }
  return parts;
}

void launch_schedule(ScheduleKernelParams params, int device, Stream stream) {
  ScheduleGrid const grid = schedule_grid(params.sequences.batch);
  launch_kernel(schedule_function(grid.ctas),
                {.device = device,
                 .grid = dim3(static_cast<unsigned>(grid.ctas)),
                 .threads = grid.threads,
                 .start = Start::kOverlap},
                &params, stream, "the launch of the schedule kernel failed");
}

LaunchShape on_device(LaunchShape shape, int device) {
  shape.device = device;
  return shape;
}

// Where a kernel and the combine kernel look for the schedule of the step.
void set_schedule(ScheduleParams& schedule, ClusterParams& cluster, Plan const& plan, Problem const& problem,
                  int* metadata) {
  if (plan.listed && problem.ragged && !cluster.on()) { schedule.metadata = metadata; }
  set_metadata(cluster, plan, metadata);
}

void start_kernel(KernelLaunch const& launch, Plan const& plan, Problem const& problem, Arguments const& args,
                  SequenceParams const& sequences, Workspace const& workspace, Stream stream) {
  AttentionParams params = launch.params;
  set_tensors(params.load, launch.box, problem, args);
  set_tensors(params.epilogue, launch.box, problem, args);
  params.epilogue.partial = workspace.partial[launch.kernel];
  params.sequences = sequences;
  set_schedule(params.schedule, params.cluster, plan, problem, workspace.metadata);
  launch_kernel(launch.function, on_device(launch.shape, args.q.device), &params, stream,
                "the launch of the attention kernel failed");
}

void start_combine(CombineLaunch const& launch, Plan const& plan, Problem const& problem, Arguments const& args,
                   SequenceParams const& sequences, Workspace const& workspace, Stream stream) {
  SplitCombineParams p = launch.params;
  p.sequences = sequences;
  set_tensors(p, problem, args);
  for (int i = 0; i < launch.tasks && i < std::ssize(p.task); ++i) {
    SplitCombineTask& task = p.task[i];
    task.partial = workspace.partial[launch.kernels[i]];
    set_schedule(task.schedule, task.cluster, plan, problem, workspace.metadata);
  }
  launch_kernel(split_combine_function(launch.family, problem.head_dim_v), on_device(launch.shape, args.q.device), &p,
                stream, "the launch of the combine kernel failed");
}

}  // namespace

void start(Launches const& launches, Plan const& plan, Problem const& problem, Arguments const& args, Stream stream) {
  if (plan.kernel == KernelFamily::kNone) { return; }
  Workspace const workspace = divide_workspace(plan, problem, args);
  SequenceParams const sequences = sequences_of_call(problem, args);
  DeviceGuard const guard(args.q.device);
  if (launches.schedule) {
    ScheduleKernelParams params = *launches.schedule;
    params.sequences = sequences;
    params.metadata = workspace.metadata;
    launch_schedule(params, args.q.device, stream);
  }
  for (KernelLaunch const& kernel : launches.kernels) {
    start_kernel(kernel, plan, problem, args, sequences, workspace, stream);
  }
  if (launches.combine) { start_combine(*launches.combine, plan, problem, args, sequences, workspace, stream); }
}

void launch(Plan const& plan, Problem const& problem, Arguments const& args, Stream stream) {
  start(*prepare_launches(plan, problem), plan, problem, args, stream);
}

void make_schedule(ScheduleArguments const& args, Stream stream) {
  Problem const problem = validate(args);
  if (problem.batch == 0) { return; }
  require_supported_device(args.metadata.device);
  SequenceParams sequences = sequence_params(problem, args.options);
  sequences.cache_batch_idx = nullptr;  // which sequence of the cache it is changes no length
  // The tensors that bound the lengths are not known here: a call clamps to them.
  constexpr int kUnbounded = 1 << 29;
  sequences.seqlen_q = args.options.cu_seqlens_q.given() ? kUnbounded : problem.seqlen_q;
  sequences.capacity_k = kUnbounded;
  sequences.seqused_k_all =
      args.options.seqused_k_all >= 0 ? clamped(args.options.seqused_k_all, 0, kUnbounded) : problem.seqlen_k;
  DeviceGuard const guard(args.metadata.device);
  int const device = args.metadata.device;
  ScheduleKernelParams params = schedule_kernel_params(problem, readers_of_few(problem, device_info(device)));
  params.sequences = sequences;
  params.metadata = static_cast<int*>(args.metadata.data);
  launch_schedule(params, device, stream);
}

}  // namespace hopper_attention
