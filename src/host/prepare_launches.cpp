// What the kernels of a plan are told in every call: all that follows from the plan and the problem, not from tensors.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "host/cluster_params.h"
#include "host/kernel_table.h"
#include "host/page_boxes.h"
#include "host/prepared_launches.h"
#include "host/ranked_tiles.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "host/tile_list.h"
#include "kernels/cap_polynomial.h"
#include "kernels/lanes.h"
#include "kernels/params.h"
#include "kernels/split_combine_params.h"

namespace hopper_attention {
namespace {

SoftmaxParams softmax_params(Problem const& problem) {
  double const log2e = 1.0 / std::log(2.0);
  // A scale of 0 makes all keys equal; the smallest normal number does the same and keeps -inf * scale defined.
  double const scale = problem.softmax_scale == 0.0F ? std::ldexp(1.0, -100) : problem.softmax_scale;
  bool const capped = problem.softcap != 0.0F;
  double const scale_log2 = (capped ? problem.softcap : scale) * log2e;
  return {.scale_log2 = static_cast<float>(scale_log2),
          .softcap_inner = capped ? static_cast<float>(scale / problem.softcap) : 0.0F,
          .lowest_score = static_cast<float>(-std::ldexp(1.0, 126) / std::max(1.0, scale_log2)),
          .cap_polynomials = capped ? cap_polynomials(scale, problem.softcap) : CapPolynomials{}};
}

PageParams page_params(TileConfig const& tile, Problem const& problem) {
  PageParams pages;
  if (problem.keys != KeyLayout::kPaged) { return pages; }
  pages.size = FastDivmod(problem.page_size);
  pages.box_keys = keys_of_box(problem, tile);
  pages.boxes = tile.keys / pages.box_keys;
  pages.blocks_at_once = std::max(1, kLanes / pages.boxes);
  return pages;
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
  } else if (is_paired(kernel) || kernel.ranked) {
    p.ranked = ranked_tiles(plan, kernel, problem);
    if (is_paired(kernel)) { p.pairs = paired_tiles(kernel); }
  } else if (takes_schedule(plan, kernel)) {
    p.schedule = schedule_params(plan, kernel, problem);
    p.sharing = problem.heads_q / problem.heads_k / plan.packed_heads;
    p.keys_in_l2 = plan.keys_in_l2;
  } else {
    p.scheduler = tile_list(plan, kernel, problem);
    p.parts = equal_parts(kernel);
  }
  if (problem.keys == KeyLayout::kPaged) { p.alignment.unit = p.load.pages.box_keys; }
  return p;
}

// How many blocks share the rows of a candidate. Borders between chunks, and tiles in equal parts, have about as much
// to merge each, so that the blocks of a task are to be on the SMs at once; two thirds of them take as long, half of
// them longer. Candidates of few rows want fewer, those of a second task the fewest, which mostly merges nothing. Of
// other tiles few are in parts.
int blocks_of_candidate(SplitCombineTask const& task, bool few_merge, int rows, int at_once, bool is_first) {
  constexpr int kSms = 132;
  constexpr int kBlocksForFew = 2048;
  int const for_all = few_merge ? kBlocksForFew : rows > kSlabRows ? at_once * kSms : is_first ? 2 * kSms : kSms;
  return std::clamp(for_all / max_of(1, task.candidates), 1, rows);
}

// None where no tile can be in parts.
std::optional<CombineLaunch> combine_launch(Plan const& plan, Problem const& problem) {
  CombineLaunch launch{};
  SplitCombineParams& p = launch.params;
  p.packed_heads = make_packing(plan.packed_heads).heads;
  p.dtype = problem.dtype;
  p.head_dim_v = problem.head_dim_v;
  p.next_starts_early = plan.next_starts_early;
  std::int64_t blocks = 0;
  for (std::size_t i = 0; i < plan.kernels.size(); ++i) {
    KernelPlan const& kernel = plan.kernels[i];
    if (!kernel.may_split || kernel.shares_parts || kernel.merges_parts) { continue; }
    launch.kernels[launch.tasks] = i;
    if (kernel.family == KernelFamily::kPrefill) { launch.family = KernelFamily::kPrefill; }
    SplitCombineTask& task = p.task[launch.tasks++];
    task.schedule = schedule_params(plan, kernel, problem);
    task.packing = packing_of(plan, kernel);
    task.mask = problem.mask;
    task.slabs = slabs_of(kernel.tile);
    task.keys = kernel.tile.keys;
    task.cluster = cluster_params(plan, kernel, problem.heads_q);
    task.parts = equal_parts(kernel);
    if (task.parts.on()) { task.tiles = tile_list(plan, kernel, problem); }
    bool const borders = !plan.fixed_splits && !task.cluster.on() && !task.parts.on();
    task.candidates = static_cast<int>(borders ? kernel.partial_slots / 2 - 1 : kernel.most_tiles);
    task.blocks = blocks_of_candidate(task, !borders && !task.parts.on(), kernel.partial_rows,
                                      combine_shape(launch.family, problem.head_dim_v).blocks, launch.tasks == 1);
    blocks += std::int64_t{task.candidates} * task.blocks;
  }
  if (blocks == 0) { return std::nullopt; }
  launch.shape = {
      .grid = dim3(static_cast<unsigned>(blocks)), .threads = kSplitCombineThreads, .start = Start::kOverlap};
  return launch;
}

std::vector<KernelLaunch> kernel_launches(Plan const& plan, Problem const& problem) {
  std::vector<KernelLaunch> launches;
  bool decodes = false;
  for (std::size_t n = 0; n < plan.kernels.size(); ++n) {
    std::size_t const i = plan.decode_first ? plan.kernels.size() - 1 - n : n;
    KernelPlan const& kernel = plan.kernels[i];
    KernelEntry const& entry = find_kernel(kernel.family, plan.dtype, kernel.tile);
    // Two decode kernels draw from one counter.
    bool const decodes_again = decodes && kernel.family == KernelFamily::kDecode;
    KernelLaunch& launch = launches.emplace_back();
    launch.params = attention_params(plan, kernel, problem);
    launch.params.wait_at_start = n == 0;  // kernels after it start when it has waited
    // No combine kernel follows, which would let the next call begin.
    launch.params.signals = !kernel.merges_parts || plan.next_starts_early;
    launch.function = entry.function;
    launch.shape = {.grid = dim3(static_cast<unsigned>(kernel.ctas)),
                    .threads = entry.threads,
                    .shared_bytes = entry.shared_bytes,
                    .start = plan.starts_early && !decodes_again ? Start::kOverlap : Start::kAfter,
                    .cluster = is_paired(kernel) ? kernel.blocks_of_pair : std::max(1, cluster_of(plan, kernel))};
    launch.box = {kernel.tile, plan.packed_heads, queries_per_box(kernel, problem, launch.params.packing)};
    bool const is_prefill = kernel.family == KernelFamily::kPrefill;
    // The blocks of a call's first kernel begin with items of their own, which they need not draw.
    launch.params.guesses = n == 0 && launch.shape.start == Start::kOverlap && problem.ragged &&
                            problem.batch <= kMostGuessedSequences && takes_schedule(plan, kernel) &&
                            (is_prefill ? !plan.makes_schedule : launch.params.cluster.by_schedule);
    launch.kernel = i;
    decodes = decodes || kernel.family == KernelFamily::kDecode;
  }
  return launches;
}

}  // namespace

ScheduleKernelParams schedule_kernel_params(Problem const& problem, FewReaders const& readers) {
  int const packed = scheduled_packing(problem.heads_q, problem.heads_k);
  bool const fixed_splits = problem.batch_invariant;
  auto const shape = [&](TileUse use) {
    TileRow const* const row = find_tile(problem.head_dim, problem.head_dim_v, use);
    require<NotImplemented>(row != nullptr, "head_dim: no kernel holds head dims (", problem.head_dim, ", ",
                            problem.head_dim_v, ") of q and v");
    return tile_shape(row->tile, packed, fixed_splits);
  };
  ScheduleKernelParams p{};
  p.mask = problem.mask;
  p.prefill = shape(TileUse::kRagged);
  p.decode = shape(few_queries_use(problem.head_dim, problem.head_dim_v, packed, fixed_splits));
  p.even_parts = even_parts(problem, readers);
  p.readers = readers;
  return p;
}

std::shared_ptr<Launches const> prepare_launches(Plan const& plan, Problem const& problem) {
  auto launches = std::make_shared<Launches>();
  launches->kernels = kernel_launches(plan, problem);
  if (plan.makes_schedule) { launches->schedule = schedule_kernel_params(problem, plan.readers); }
  launches->combine = combine_launch(plan, problem);
  return launches;
}

}  // namespace hopper_attention
