// What each kernel is told, and the launches of a call: up to four. What follows from the plan is written once, in
// prepare_launches(); each call adds what its tensors say.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "hopper_attention/forward.h"
#include "host/cluster_params.h"
#include "host/cuda_launch.h"
#include "host/kernel_table.h"
#include "host/launches.h"
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

// k or v, or (pages, page size, H, D), as (D, S, H, B), in boxes of `keys`.
TensorMapShape key_map(Batched const& t, int tile_head_dim, int keys) {
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

PageParams page_params(TileConfig const& tile, Problem const& problem) {
  // A box has at least as many rows as the swizzle's pattern, or one: then rows are gathered.
  constexpr int kLeastBoxKeys = 8;
  PageParams pages;
  if (problem.keys != KeyLayout::kPaged) { return pages; }
  pages.size = FastDivmod(problem.page_size);
  int const box_keys = std::gcd(std::gcd(problem.page_size, tile.keys), 64);
  pages.box_keys = box_keys < kLeastBoxKeys ? 1 : box_keys;
  return pages;
}

void set_tensors(PageParams& pages, Arguments const& args) {
  pages.table = integers(args.page_table);
  pages.stride = args.page_table.stride[0];
  pages.width = static_cast<int>(args.page_table.shape[1]);
  pages.pages = static_cast<int>(args.k.shape[0]);
  pages.k = row_source(args.k);
  pages.v = row_source(args.v);
}

// What the boxes of a kernel's tensor maps are made of.
struct BoxShape {
  TileConfig tile;
  int packed_heads;
  int queries;
};

void set_tensors(LoadParams& load, BoxShape const& box, Arguments const& args) {
  bool const paged = args.page_table.given();
  if (paged) { set_tensors(load.pages, args); }
  DataType const dtype = args.q.dtype;
  load.q = make_tensor_map(
      {args.q.data, dtype, query_map(Batched(args.q), box.tile.head_dim, box.packed_heads, box.queries)});
  // Without keys there is nothing to load, and no tensor to describe.
  Batched const k(args.k);
  if (k.extent(0) > 0 && k.extent(1) > 0) {
    int const keys = paged ? load.pages.box_keys : box.tile.keys;
    load.k = make_tensor_map({args.k.data, dtype, key_map(k, box.tile.head_dim, keys)});
    load.v = make_tensor_map({args.v.data, dtype, key_map(Batched(args.v), box.tile.head_dim_v, keys)});
  }
}

struct OutputStrides {
  std::int64_t batch, row, head;
};

OutputStrides output_strides(Tensor const& out) {
  int const row = out.rank - 3;  // 0: packed sequences
  return {row == 0 ? 0 : out.stride[0], out.stride[row], out.stride[row + 1]};
}

// (B, H, S), or (H, T) of packed sequences.
OutputStrides lse_strides(Problem const& problem, Arguments const& args) {
  std::int64_t const rows = problem.packed_q ? args.q.shape[0] : args.q.shape[1];
  return {rows * problem.heads_q, 1, rows};
}

void set_tensors(EpilogueParams& epilogue, BoxShape const& box, Problem const& problem, Arguments const& args) {
  Tensor const& out = args.out;
  epilogue.out_by_tma = fits_tma(out);
  if (epilogue.out_by_tma) {
    epilogue.out = make_tensor_map(
        {out.data, args.q.dtype, query_map(Batched(out), box.tile.head_dim_v, box.packed_heads, box.queries)});
  }
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
  epilogue.rows = static_cast<int>(problem.packed_q ? args.q.shape[0] : args.q.shape[1]);
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

ScheduleParams schedule_params(Plan const& plan, KernelPlan const& kernel, Problem const& problem) {
  TileShape const shape = tile_shape(kernel.tile, plan.packed_heads, plan.fixed_splits);
  ScheduleParams p;
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

int queries_per_box(KernelPlan const& kernel, Problem const& problem, Packing const& packing) {
  // A tile of few queries brings no more than there are.
  return kernel.family == KernelFamily::kDecode ? std::min(packing.queries_per_slab, std::max(1, problem.seqlen_q))
                                                : packing.queries_per_slab;
}

// All but what tensors say.
AttentionParams attention_params(Plan const& plan, KernelPlan const& kernel, Problem const& problem) {
  Packing const packing = packing_of(plan, kernel);
  AttentionParams p{};
  p.load.pages = page_params(kernel.tile, problem);
  p.load.groups_per_head_k = FastDivmod(problem.heads_q / problem.heads_k / plan.packed_heads);
  p.load.query_rows = static_cast<std::uint32_t>(plan.packed_heads * queries_per_box(kernel, problem, packing));
  p.load.queries_per_slab = packing.queries_per_slab;
  p.epilogue.clip_by_tma = !problem.ragged;
  p.epilogue.head_dim_v = problem.head_dim_v;
  p.softmax = softmax_params(problem);
  p.packing = packing;
  p.mask = problem.mask;
  p.listed = plan.listed;
  p.least_queries = kernel.least_queries;
  p.most_queries = kernel.most_queries;
  p.cluster = cluster_params(plan, kernel, problem.heads_q);
  if (p.cluster.on()) {
    // All else follows from the index of a block.
  } else if (plan.listed) {
    p.schedule = schedule_params(plan, kernel, problem);
    p.sharing = problem.heads_q / problem.heads_k / plan.packed_heads;
    p.keys_in_l2 = plan.keys_in_l2;
  } else {
    int const queries_per_tile = packing.queries_per_slab * slabs_of(kernel.tile);
    p.scheduler = make_scheduler_params(problem.batch, problem.heads_q / plan.packed_heads,
                                        ceil_div(problem.seqlen_q, queries_per_tile), plan.heads_per_pass,
                                        first_tiles_are_shortest(problem.mask), kernel.ctas);
  }
  if (problem.keys == KeyLayout::kPaged) { p.alignment.unit = p.load.pages.box_keys; }
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

// How the schedule kernel counts tiles.
struct ScheduledTiles {
  TileShape prefill;
  TileShape decode;
};

ScheduledTiles scheduled_tiles(Problem const& problem, bool fixed_splits) {
  int const packed = scheduled_packing(problem.heads_q, problem.heads_k);
  auto const shape = [&](TileUse use) {
    TileRow const* const row = find_tile(problem.head_dim, problem.head_dim_v, use);
    require<NotImplemented>(row != nullptr, "head_dim: no kernel holds head dims (", problem.head_dim, ", ",
                            problem.head_dim_v, ") of q and v");
    return tile_shape(row->tile, packed, fixed_splits);
  };
  return {shape(TileUse::kRagged), shape(few_queries_use(problem.head_dim, problem.head_dim_v, packed, fixed_splits))};
}

struct CombineLaunch {
  SplitCombineParams params;
  std::array<std::size_t, 2> kernels;  // of the plan, whose parts the tasks merge
  int tasks;
  LaunchShape shape;
};

// None where no tile can be in parts.
std::optional<CombineLaunch> combine_launch(Plan const& plan, Problem const& problem) {
  CombineLaunch launch{};
  SplitCombineParams& p = launch.params;
  p.packed_heads = make_packing(plan.packed_heads).heads;
  p.dtype = problem.dtype;
  p.head_dim_v = problem.head_dim_v;
  int rows = 0;
  std::int64_t candidates = 0;
  for (std::size_t i = 0; i < plan.kernels.size(); ++i) {
    KernelPlan const& kernel = plan.kernels[i];
    if (!kernel.may_split || kernel.shares_parts) { continue; }
    launch.kernels[launch.tasks] = i;
    SplitCombineTask& task = p.task[launch.tasks++];
    task.schedule = schedule_params(plan, kernel, problem);
    task.packing = packing_of(plan, kernel);
    task.slabs = slabs_of(kernel.tile);
    task.cluster = cluster_params(plan, kernel, problem.heads_q);
    task.candidates =
        static_cast<int>(plan.fixed_splits || task.cluster.on() ? kernel.most_tiles : kernel.partial_slots / 2 - 1);
    candidates += task.candidates;
    rows = std::max(rows, kernel.partial_rows);
  }
  if (candidates == 0) { return std::nullopt; }
  // Many parts want a block for each row; many rows want few blocks that find nothing to do.
  constexpr std::int64_t kMostBlocks = 2048;
  p.rows_per_block =
      static_cast<int>(std::max<std::int64_t>(1, ceil_div<std::int64_t>(rows * candidates, kMostBlocks)));
  launch.shape = {
      .grid = dim3(static_cast<unsigned>(candidates), static_cast<unsigned>(ceil_div(rows, p.rows_per_block))),
      .threads = kSplitCombineThreads,
      .start = Start::kOverlap};
  return launch;
}

struct KernelLaunch {
  AttentionParams params;
  void const* function;
  LaunchShape shape;
  BoxShape box;
  std::size_t kernel;  // of the plan
};

std::vector<KernelLaunch> kernel_launches(Plan const& plan, Problem const& problem) {
  std::vector<KernelLaunch> launches;
  bool decodes = false;
  bool const decode_first = plan.kernels.size() > 1 && card_share(plan, plan.kernels[1]) == CardShare::kLeaves;
  for (std::size_t n = 0; n < plan.kernels.size(); ++n) {
    std::size_t const i = decode_first ? plan.kernels.size() - 1 - n : n;
    KernelPlan const& kernel = plan.kernels[i];
    KernelEntry const& entry = find_kernel(kernel.family, plan.dtype, kernel.tile);
    // Two decode kernels draw from one counter.
    bool const decodes_again = decodes && kernel.family == KernelFamily::kDecode;
    KernelLaunch& launch = launches.emplace_back();
    launch.params = attention_params(plan, kernel, problem);
    launch.params.wait_at_start = n == 0;  // kernels after it start when it has waited
    launch.function = entry.function;
    launch.shape = {.grid = dim3(static_cast<unsigned>(kernel.ctas)),
                    .threads = entry.threads,
                    .shared_bytes = entry.shared_bytes,
                    .start = plan.starts_early && !decodes_again ? Start::kOverlap : Start::kAfter,
                    .cluster = std::max(1, cluster_of(plan))};
    launch.box = {kernel.tile, plan.packed_heads, queries_per_box(kernel, problem, launch.params.packing)};
    launch.kernel = i;
    decodes = decodes || kernel.family == KernelFamily::kDecode;
  }
  return launches;
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
  set_tensors(params.load, launch.box, args);
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
  p.rows = static_cast<int>(problem.packed_q ? args.q.shape[0] : args.q.shape[1]);
  for (int i = 0; i < launch.tasks; ++i) {
    SplitCombineTask& task = p.task[i];
    task.partial = workspace.partial[launch.kernels[i]];
    set_schedule(task.schedule, task.cluster, plan, problem, workspace.metadata);
  }
  launch_kernel(split_combine_function(problem.head_dim_v), on_device(launch.shape, args.q.device), &p, stream,
                "the launch of the combine kernel failed");
}

}  // namespace

struct Launches {
  std::optional<ScheduledTiles> schedule;  // where the call makes it
  std::vector<KernelLaunch> kernels;       // in the order of their start
  std::optional<CombineLaunch> combine;
};

std::shared_ptr<Launches const> prepare_launches(Plan const& plan, Problem const& problem) {
  auto launches = std::make_shared<Launches>();
  launches->kernels = kernel_launches(plan, problem);
  if (plan.makes_schedule) { launches->schedule = scheduled_tiles(problem, plan.fixed_splits); }
  launches->combine = combine_launch(plan, problem);
  return launches;
}

void start(Launches const& launches, Plan const& plan, Problem const& problem, Arguments const& args, Stream stream) {
  if (plan.kernel == KernelFamily::kNone) { return; }
  Workspace const workspace = divide_workspace(plan, problem, args);
  SequenceParams const sequences = sequences_of_call(problem, args);
  DeviceGuard const guard(args.q.device);
  if (launches.schedule) {
    launch_schedule(
        {sequences, problem.mask, launches.schedule->prefill, launches.schedule->decode, workspace.metadata},
        args.q.device, stream);
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
  ScheduledTiles const tiles = scheduled_tiles(problem, args.options.batch_invariant);
  launch_schedule({sequences, problem.mask, tiles.prefill, tiles.decode, static_cast<int*>(args.metadata.data)},
                  args.metadata.device, stream);
}

}  // namespace hopper_attention
