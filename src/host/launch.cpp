// Plan + arguments -> what each kernel is told, and the launches of a call: up to four.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <numeric>

#include "hopper_attention/forward.h"
#include "host/cluster_params.h"
#include "host/cuda_launch.h"
#include "host/kernel_table.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "host/tensor_map.h"
#include "host/workspace.h"
#include "kernels/params.h"
#include "kernels/schedule_params.h"
#include "kernels/split_combine_params.h"
#include "kernels/support_kernels.h"

namespace hopper_attention {
namespace {

std::uint64_t extent(Tensor const& t, int dim) { return static_cast<std::uint64_t>(t.shape[dim]); }
std::uint64_t stride(Tensor const& t, int dim) { return static_cast<std::uint64_t>(t.stride[dim]); }

// q or out, (B, S, H, D) or (T, H, D), with the same four dims.
Tensor with_batch(Tensor const& t) {
  if (t.rank == 4) { return t; }
  Tensor result = t;
  result.rank = 4;
  for (int dim = 0; dim < 3; ++dim) {
    result.shape[dim + 1] = t.shape[dim];
    result.stride[dim + 1] = t.stride[dim];
  }
  result.shape[0] = 1;
  result.stride[0] = 0;
  return result;
}

// (B, S, H, D) of q or out as (D, packed heads, S, head groups, B), in boxes of one slab with `queries` queries.
TensorMapShape query_map(Tensor const& t, int tile_head_dim, int packed_heads, int queries) {
  auto const heads = static_cast<std::uint64_t>(packed_heads);
  return {.extent = {extent(t, 3), heads, extent(t, 1), extent(t, 2) / heads, extent(t, 0)},
          .stride = {1, stride(t, 2), stride(t, 1), stride(t, 2) * heads, stride(t, 0)},
          .box = {static_cast<std::uint32_t>(slab_columns(tile_head_dim)), static_cast<std::uint32_t>(heads),
                  static_cast<std::uint32_t>(queries), 1, 1}};
}

// (B, S, H, D) of k or v, or (pages, page size, H, D), as (D, S, H, B), in boxes of `keys`.
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

PageParams page_params(TileConfig const& tile, Arguments const& args) {
  // A box has at least as many rows as the swizzle's pattern, or one: then rows are gathered.
  constexpr int kLeastBoxKeys = 8;
  PageParams pages;
  if (!args.page_table.given()) { return pages; }
  int const size = static_cast<int>(args.k.shape[1]);
  pages.table = integers(args.page_table);
  pages.stride = args.page_table.stride[0];
  pages.width = static_cast<int>(args.page_table.shape[1]);
  pages.size = FastDivmod(size);
  pages.pages = static_cast<int>(args.k.shape[0]);
  int const box_keys = std::gcd(std::gcd(size, tile.keys), 64);
  pages.box_keys = box_keys < kLeastBoxKeys ? 1 : box_keys;
  pages.k = row_source(args.k);
  pages.v = row_source(args.v);
  return pages;
}

LoadParams load_params(Plan const& plan, KernelPlan const& kernel, Problem const& problem, Arguments const& args,
                       Packing const& packing, int queries_per_box) {
  TileConfig const& tile = kernel.tile;
  LoadParams load{};
  load.pages = page_params(tile, args);
  load.q = make_tensor_map(plan.dtype, args.q.data,
                           query_map(with_batch(args.q), tile.head_dim, plan.packed_heads, queries_per_box));
  // Without keys there is nothing to load, and no tensor to describe.
  Tensor const k = with_batch(args.k);
  Tensor const v = with_batch(args.v);
  if (k.shape[0] > 0 && k.shape[1] > 0) {
    int const keys = load.pages.table != nullptr ? load.pages.box_keys : tile.keys;
    load.k = make_tensor_map(plan.dtype, k.data, key_map(k, tile.head_dim, keys));
    load.v = make_tensor_map(plan.dtype, v.data, key_map(v, tile.head_dim_v, keys));
  }
  load.groups_per_head_k = FastDivmod(problem.heads_q / problem.heads_k / plan.packed_heads);
  load.query_rows = static_cast<std::uint32_t>(plan.packed_heads * queries_per_box);
  load.queries_per_slab = packing.queries_per_slab;
  return load;
}

struct OutputStrides {
  std::int64_t batch, row, head;
};

OutputStrides output_strides(Tensor const& out) {
  Tensor const t = with_batch(out);
  return {t.stride[0], t.stride[1], t.stride[2]};
}

// (B, H, S), or (H, T) of packed sequences.
OutputStrides lse_strides(Problem const& problem, Arguments const& args) {
  std::int64_t const rows = problem.packed_q ? args.q.shape[0] : args.q.shape[1];
  return {rows * problem.heads_q, 1, rows};
}

EpilogueParams epilogue_params(Plan const& plan, KernelPlan const& kernel, Problem const& problem,
                               Arguments const& args, PartialParams const& partial, int queries_per_box) {
  Tensor const& out = args.out;
  EpilogueParams epilogue{};
  epilogue.out_by_tma = fits_tma(out);
  if (epilogue.out_by_tma) {
    epilogue.out = make_tensor_map(
        plan.dtype, out.data, query_map(with_batch(out), kernel.tile.head_dim_v, plan.packed_heads, queries_per_box));
  }
  epilogue.clip_by_tma = !problem.ragged;
  epilogue.out_pointer = out.data;
  OutputStrides const strides = output_strides(out);
  epilogue.out_stride_batch = strides.batch;
  epilogue.out_stride_row = strides.row;
  epilogue.out_stride_head = strides.head;
  epilogue.lse = static_cast<float*>(args.softmax_lse.data);
  OutputStrides const lse = lse_strides(problem, args);
  epilogue.lse_stride_batch = lse.batch;
  epilogue.lse_stride_head = lse.head;
  epilogue.sinks = args.sinks.data;
  epilogue.sinks_type = args.sinks.dtype;
  epilogue.head_dim_v = problem.head_dim_v;
  epilogue.rows = static_cast<int>(problem.packed_q ? args.q.shape[0] : args.q.shape[1]);
  epilogue.partial = partial;
  return epilogue;
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
    next += partial_bytes(kernel, problem.head_dim_v);
  }
  for (std::size_t i = 0; i < plan.kernels.size(); ++i) {
    if (plan.kernels[i].shares_parts) { parts.partial[i] = parts.partial[plan.kernels.size() - 1]; }
  }
  return parts;
}

ScheduleParams schedule_params(Plan const& plan, KernelPlan const& kernel, Problem const& problem, int* metadata) {
  TileShape const shape = tile_shape(kernel.tile, plan.packed_heads, plan.fixed_splits);
  ScheduleParams p;
  p.metadata = problem.ragged ? metadata : nullptr;
  p.batch = problem.batch;
  p.places = places_of(plan, kernel);
  p.alike = sequence_work(shape, problem.mask, {problem.seqlen_q, problem.seqlen_k});
  int const head_groups = problem.heads_q / plan.packed_heads;
  p.share = card_share(plan, kernel);
  p.head_groups = FastDivmod(head_groups);
  p.ctas = kernel.ctas;
  p.may_split = kernel.may_split;
  p.always_split = plan.forces_splits;
  p.bound_by_memory = kernel.family == KernelFamily::kDecode;
  p.fixed_splits = plan.fixed_splits;
  p.least_units = plan.fixed_splits ? 1 : kLeastUnits;
  p.max_splits = plan.max_splits;
  p.most_tiles = static_cast<int>(kernel.most_tiles / head_groups);
  p.most_units = static_cast<int>(kernel.most_units / head_groups);
  return p;
}

Packing packing_of(Plan const& plan, KernelPlan const& kernel) {
  int const rows = rows_of_slab(kernel.tile);
  return make_packing(plan.packed_heads, cluster_of(plan) > 1 ? std::min(rows, kMostMergeRows) : rows);
}

AttentionParams attention_params(Plan const& plan, KernelPlan const& kernel, Problem const& problem,
                                 Arguments const& args, Workspace const& workspace, PartialParams const& partial) {
  Packing const packing = packing_of(plan, kernel);
  int const queries_per_tile = packing.queries_per_slab * slabs_of(kernel.tile);
  bool const longest_last = problem.mask.right != kUnlimited;
  // A tile of few queries brings no more than there are.
  int const queries_per_box = kernel.family == KernelFamily::kDecode
                                  ? std::min(packing.queries_per_slab, std::max(1, problem.seqlen_q))
                                  : packing.queries_per_slab;
  AttentionParams p{};
  p.load = load_params(plan, kernel, problem, args, packing, queries_per_box);
  p.epilogue = epilogue_params(plan, kernel, problem, args, partial, queries_per_box);
  p.sequences = sequences_of_call(problem, args);
  p.softmax = softmax_params(problem);
  p.packing = packing;
  p.mask = problem.mask;
  p.listed = plan.listed;
  p.least_queries = kernel.least_queries;
  p.most_queries = kernel.most_queries;
  p.cluster = cluster_params(plan, kernel, problem.heads_q, workspace.metadata);
  if (p.cluster.on()) {
    // All else follows from the index of a block.
  } else if (plan.listed) {
    p.schedule = schedule_params(plan, kernel, problem, workspace.metadata);
    p.sharing = problem.heads_q / problem.heads_k / plan.packed_heads;
    p.keys_in_l2 = plan.keys_in_l2;
  } else {
    p.scheduler = make_scheduler_params(problem.batch, problem.heads_q / plan.packed_heads,
                                        ceil_div(problem.seqlen_q, queries_per_tile), plan.heads_per_pass, longest_last,
                                        kernel.ctas);
  }
  if (args.page_table.given()) { p.alignment.unit = p.load.pages.box_keys; }
  return p;
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

ScheduleKernelParams schedule_kernel_params(Problem const& problem, SequenceParams const& sequences, bool fixed_splits,
                                            int* metadata) {
  int const packed = scheduled_packing(problem.heads_q, problem.heads_k);
  auto const shape = [&](TileUse use) {
    TileRow const* const row = find_tile(problem.head_dim, problem.head_dim_v, use);
    require<NotImplemented>(row != nullptr, "head_dim: no kernel holds head dims (", problem.head_dim, ", ",
                            problem.head_dim_v, ") of q and v");
    return tile_shape(row->tile, packed, fixed_splits);
  };
  return {sequences, problem.mask, shape(TileUse::kRagged),
          shape(few_queries_use(problem.head_dim, problem.head_dim_v, packed, fixed_splits)), metadata};
}

void launch_combine(Plan const& plan, Problem const& problem, Arguments const& args, Workspace const& workspace,
                    Stream stream) {
  Packing const packing = make_packing(plan.packed_heads);
  SplitCombineParams p{};
  p.sequences = sequences_of_call(problem, args);
  p.packed_heads = packing.heads;
  p.out = args.out.data;
  OutputStrides const out = output_strides(args.out);
  p.out_stride_batch = out.batch;
  p.out_stride_row = out.row;
  p.out_stride_head = out.head;
  p.lse = static_cast<float*>(args.softmax_lse.data);
  OutputStrides const lse = lse_strides(problem, args);
  p.lse_stride_batch = lse.batch;
  p.lse_stride_head = lse.head;
  p.sinks = args.sinks.data;
  p.sinks_type = args.sinks.dtype;
  p.dtype = problem.dtype;
  p.head_dim_v = problem.head_dim_v;
  p.rows = static_cast<int>(problem.packed_q ? args.q.shape[0] : args.q.shape[1]);
  int tasks = 0;
  int rows = 0;
  std::int64_t candidates = 0;
  for (std::size_t i = 0; i < plan.kernels.size(); ++i) {
    KernelPlan const& kernel = plan.kernels[i];
    if (!kernel.may_split || kernel.shares_parts) { continue; }
    SplitCombineTask& task = p.task[tasks++];
    task.schedule = schedule_params(plan, kernel, problem, workspace.metadata);
    task.partial = workspace.partial[i];
    task.queries_per_slab = packing_of(plan, kernel).queries_per_slab;
    task.slabs = slabs_of(kernel.tile);
    task.cluster = cluster_params(plan, kernel, problem.heads_q, workspace.metadata);
    bool const of_clusters = task.cluster.on();
    if (of_clusters) { task.schedule.metadata = nullptr; }
    task.candidates =
        static_cast<int>(plan.fixed_splits || of_clusters ? kernel.most_tiles : kernel.partial_slots / 2 - 1);
    candidates += task.candidates;
    rows = std::max(rows, kernel.partial_rows);
  }
  if (candidates == 0) { return; }
  // Many parts want a block for each row; many rows want few blocks that find nothing to do.
  constexpr std::int64_t kMostBlocks = 2048;
  p.rows_per_block =
      static_cast<int>(std::max<std::int64_t>(1, ceil_div<std::int64_t>(rows * candidates, kMostBlocks)));
  launch_kernel(
      split_combine_function(problem.head_dim_v),
      {.device = args.q.device,
       .grid = dim3(static_cast<unsigned>(candidates), static_cast<unsigned>(ceil_div(rows, p.rows_per_block))),
       .threads = kSplitCombineThreads,
       .start = Start::kOverlap},
      &p, stream, "the launch of the combine kernel failed");
}

}  // namespace

void launch(Plan const& plan, Problem const& problem, Arguments const& args, Stream stream) {
  if (plan.kernel == KernelFamily::kNone) { return; }
  Workspace const workspace = divide_workspace(plan, problem, args);
  DeviceGuard const guard(args.q.device);
  if (plan.makes_schedule) {
    launch_schedule(
        schedule_kernel_params(problem, sequences_of_call(problem, args), plan.fixed_splits, workspace.metadata),
        args.q.device, stream);
  }
  bool may_split = false;
  bool first = true;
  bool decodes = false;
  bool const decode_first = plan.kernels.size() > 1 && card_share(plan, plan.kernels[1]) == CardShare::kLeaves;
  for (std::size_t n = 0; n < plan.kernels.size(); ++n) {
    std::size_t const i = decode_first ? plan.kernels.size() - 1 - n : n;
    KernelPlan const& kernel = plan.kernels[i];
    KernelEntry const& entry = find_kernel(kernel.family, plan.dtype, kernel.tile);
    AttentionParams params = attention_params(plan, kernel, problem, args, workspace, workspace.partial[i]);
    params.wait_at_start = first;  // kernels after it start when it has waited
    // Two decode kernels draw from one counter.
    bool const decodes_again = decodes && kernel.family == KernelFamily::kDecode;
    launch_kernel(entry.function,
                  {.device = args.q.device,
                   .grid = dim3(static_cast<unsigned>(kernel.ctas)),
                   .threads = entry.threads,
                   .shared_bytes = entry.shared_bytes,
                   .start = plan.starts_early && !decodes_again ? Start::kOverlap : Start::kAfter,
                   .cluster = std::max(1, cluster_of(plan))},
                  &params, stream, "the launch of the attention kernel failed");
    first = false;
    decodes = decodes || kernel.family == KernelFamily::kDecode;
    may_split = may_split || kernel.may_split;
  }
  if (may_split) { launch_combine(plan, problem, args, workspace, stream); }
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
  launch_schedule(
      schedule_kernel_params(problem, sequences, args.options.batch_invariant, static_cast<int*>(args.metadata.data)),
      args.metadata.device, stream);
}

}  // namespace hopper_attention
