// Calls whose tiles a schedule shares out: which kernels, may they cut tiles, and what does that take of the workspace?
#include <algorithm>
#include <cstdint>
#include <string>

#include "host/plan_request.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "host/tile_share.h"

namespace hopper_attention {
namespace {

// Of tiles that blocks have beforehand, by index: none is so long that the order matters more than the 3 to 12 us that
// finding each in a schedule takes. 31 calls of drafts with 17 to 192 rows, one tile each, took 0.79 of the time, 35 of
// prompts 0.88; chunks of several tiles on keys of different lengths would take up to 1.6 (docs/performance-notes.md,
// step 293).
constexpr std::int64_t kKeysOfShortTile = 1024;
// So are those of sequences of so many key blocks, however many queries each has: 120 calls of ragged prompts took 0.74
// of the time; with three blocks 0.96, with more 1.1 (step 296).
constexpr int kBlocksOfShortSequence = 2;

// A sequence of the decode kernel is one tile as metadata count them; of the others each may end with a tile that is
// not full, and resized ones may be one more. `queries`: of a tile, and of one that metadata count.
std::int64_t most_tiles_of_group(Problem const& problem, KernelFamily family, int queries, bool resized) {
  if (family == KernelFamily::kDecode) { return problem.batch; }
  std::int64_t const full = problem.packed_q ? problem.total_q / queries + problem.batch
                                             : std::int64_t{problem.batch} * ceil_div(problem.seqlen_q, queries);
  return full + (resized ? problem.batch : 0);
}

// Whether all sequences have so few keys that tiles follow from their index, however many queries each has. A block
// takes little time for tiles that do not exist, unless these are many. `queries` of a tile.
bool are_short_sequences(PlanRequest const& request, PrefillChoice const& choice, int queries) {
  constexpr int kMostTilesOverExisting = 4;
  Problem const& problem = request.problem;
  TileConfig const& tile = request.tile_row(choice.use).tile;
  if (problem.seqlen_k > kBlocksOfShortSequence * tile.keys) { return false; }
  // Which of two kernels it is must not follow from the bound on queries, if their tiles differ.
  TileRow const* const mixed = mixed_row(request);
  if (mixed != nullptr && !same_size(mixed->tile, tile)) { return false; }
  std::int64_t const tiles = problem.batch * std::int64_t{ceil_div(problem.seqlen_q, queries)};
  std::int64_t const of_all_heads = tiles * request.scheduled_groups();
  if (of_all_heads > kMaxTiles) { return false; }
  // In two rounds, blocks that rank tiles are as fast, since they take none that does not exist.
  if (of_all_heads > request.device.sm_count && needs_no_schedule(request, choice)) { return false; }
  if (!problem.packed_q) { return true; }
  // For single queries there are other kernels.
  bool const may_be_few = problem.num_splits != 1 && !has_quarter_of_rows(problem);
  return !may_be_few && tiles <= kMostTilesOverExisting * (problem.total_q / queries + problem.batch);
}

// Of a plan that cuts no tile.
std::string reason_for_whole_tiles(PlanRequest const& request, Plan const& plan, TileUse prefill) {
  if (plan.fixed_splits) {
    return request.decodes() ? concat("no sequence has more than the ", kFixedSplitKeys, " keys of one part")
                             : std::string("with batch_invariant, tiles of many queries are never cut");
  }
  if (request.problem.num_splits == 1) { return "as asked"; }
  if (!request.decodes() && prefill == TileUse::kSmallGrid) { return "whole tiles of fewer rows keep more SMs busy"; }
  if (request.decodes() ? whole_tiles_suffice(request) : whole_tiles_fill_grid(request)) {
    return request.decodes() ? "there are more tiles than blocks, and none of them can be long"
                             : "whole tiles keep the blocks busy, and cutting some pays for no keys";
  }
  return "there are more pieces than can be counted";
}

// Of a K/V head, by the longest sequence that there may be: the kernels count the heads of others by their own lengths.
// Lengths from 1 to 8k take 760 us on an H100 with 0.4 of L2 and 677 with 0.8 where 16 heads have K and V of their own,
// and as long with 32/8 heads. With 1.1 of it head dims of 96 and 192 take up to 6 % longer
// (docs/performance-notes.md, step 212).
int keys_in_l2(PlanRequest const& request) {
  constexpr double kMostOfL2 = 0.8;
  Problem const& problem = request.problem;
  std::int64_t const bytes_of_key = std::int64_t{problem.head_dim + problem.head_dim_v} * kElementBytes;
  return static_cast<int>(request.bytes_together(problem.seqlen_k * bytes_of_key, kMostOfL2) / bytes_of_key);
}

void choose_splits(PlanRequest const& request, Plan& plan, TileUse prefill) {
  Problem const& problem = request.problem;
  bool may_split = false;
  for (KernelPlan const& kernel : plan.kernels) { may_split = may_split || kernel.may_split; }
  plan.forces_splits = request.forces_splits();
  int const bound = plan.forces_splits ? request.forced.num_splits : problem.num_splits;
  plan.max_splits = plan.fixed_splits ? 0 : bound;
  plan.keys_in_l2 = keys_in_l2(request);
  plan.num_splits = may_split ? (plan.fixed_splits || bound == 0 ? plan.kernels.back().ctas : bound) : 1;
  KernelPlan const& last = plan.kernels.back();
  bool const evenly = last.family == KernelFamily::kDecode || may_part_many(plan, last, problem);
  std::string const otherwise = concat(plan.cluster_if_alike > 0 || plan.draws_if_whole ? "otherwise " : "",
                                       evenly ? "each tile is whole or in even parts, or " : "");
  because(plan, "splits",
          !may_split          ? concat("1: ", reason_for_whole_tiles(request, plan, prefill))
          : plan.fixed_splits ? concat("those of few queries with more than ", kFixedSplitKeys,
                                       " keys, in parts that follow from these")
          : bound == 0
              ? concat(otherwise, "every block gets the same number of key blocks")
              : concat(otherwise, "every block gets the same number of key blocks, a tile at most ", bound, " parts"));
}

}  // namespace

// More tiles than thread blocks, none of which can be long, and which balance if they are alike. With batch_invariant
// none is cut because others are shorter.
bool whole_tiles_suffice(PlanRequest const& request) {
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  std::int64_t const blocks = request.blocks_of_tile(tile);
  bool const is_short = request.problem.batch_invariant ? blocks * request.bytes_of_block(tile) <= kMostBytesOfShare
                                                        : blocks <= kFewBlocksOfTile;
  return request.tiles_of_few() > request.most_ctas(tile) && is_short && !cutting_pays_if_alike(request, tile, 1);
}

void choose_workspace(Problem const& problem, Plan& plan) {
  std::int64_t parts = 0;
  std::int64_t partial = 0;
  for (KernelPlan const& kernel : plan.kernels) {
    if (kernel.shares_parts) { continue; }
    partial += partial_bytes(kernel, problem.head_dim_v);
    parts += kernel.partial_slots;
  }
  std::int64_t const schedule = plan.makes_schedule ? aligned_bytes(schedule_size(problem.batch) * 4) : 0;
  plan.workspace_bytes = partial + schedule;
  because(plan, "workspace", megabytes(plan.workspace_bytes), ": ", parts, " parts of tiles",
          schedule > 0 ? concat(", ", schedule, " bytes for the schedule") : "");
}

bool lengths_are_known(PlanRequest const& request) {
  Problem const& problem = request.problem;
  bool const known =
      bound_on_queries_holds(problem) && !problem.seqused_q && problem.keys_known && problem.mask.cp_world <= 1;
  bool const is_forced = request.forces_splits() || request.forces_tile();
  if (!problem.ragged || !known || problem.batch_invariant || request.decodes() || is_forced) { return false; }
  // Some of so many heads share a tile, which only a schedule has, and one block holds a window of no others.
  if (request.ratio() > kSlabRows && window_row(request) != nullptr) { return false; }
  return problem.num_splits == 1 || whole_tiles_fill_grid(request);
}

bool order_saves_little(PlanRequest const& request, PrefillChoice const& choice) {
  Problem const& problem = request.problem;
  bool const is_forced = request.forces_splits() || request.forces_tile();
  bool const has_lengths = problem.ragged && problem.batch > 1 && !problem.seqused_q;
  if (!has_lengths || problem.batch_invariant || request.decodes() || is_forced || choice.may_split) { return false; }
  // Some of so many heads share a tile, which only a schedule has.
  if (request.ratio() > kSlabRows) { return false; }
  TileConfig const& tile = request.tile_row(choice.use).tile;
  int const queries = tile_shape(tile, request.scheduled_packing(), false).queries;
  if (are_short_sequences(request, choice, queries)) { return true; }
  if (!bound_on_queries_holds(problem)) { return false; }
  bool const are_prompts = problem.mask.right == 0 && 4LL * problem.seqlen_q >= 3LL * problem.seqlen_k;
  bool const are_alike = each_has_one_tile(problem, queries) || are_prompts;
  return are_alike && request.most_keys_of_tile(tile) <= kKeysOfShortTile;
}

void take_scheduled_packing(PlanRequest const& request, Plan& plan) {
  plan.packed_heads = request.scheduled_packing();
  because(plan, "packing",
          plan.packed_heads == 1 ? std::string("off")
                                 : concat(plan.packed_heads, " heads of q for each of k share a tile"));
}

KernelPlan& choose_kernel(PlanRequest const& request, Plan& plan, TileUse use, bool may_split) {
  Problem const& problem = request.problem;
  bool const decode = use == TileUse::kDecode || use == TileUse::kFewRows || use == TileUse::kSomeRows;
  KernelFamily const family = decode ? KernelFamily::kDecode : KernelFamily::kPrefill;
  bool const decodes = request.decodes();
  bool const forced = request.forces_tile();
  TileRow const* row = &request.tile_row(use);
  if (forced) {
    bool const some = use == TileUse::kSomeRows || (use == TileUse::kFewRows && !plan.fixed_splits);
    row = some     ? &request.forced_row({use, TileUse::kSomeRows, TileUse::kDecode})
          : decode ? &request.forced_row({use, TileUse::kDecode})
                   : &request.forced_row({use});
  }
  // Of the same size, so that nothing else depends on it.
  if (plan.fixed_splits && row->tile.rows <= kMostFewRows) {
    row = find_tile(row->tile.head_dim, row->tile.head_dim_v, TileUse::kFewRowsInParts);
  }
  KernelPlan kernel{family, row->tile, request.most_ctas(row->tile), threads_of(row->tile)};
  TileShape const shape = tile_shape(kernel.tile, plan.packed_heads, plan.fixed_splits);
  bool const resized = problem.ragged && (use == TileUse::kSmallGrid || use == TileUse::kSmallParts || is_mixed(use) ||
                                          use == TileUse::kShort || use == TileUse::kWindow);
  // As metadata count them.
  TileShape const counted =
      resized ? tile_shape(request.tile_row(TileUse::kRagged).tile, plan.packed_heads, false) : shape;
  int const queries = min_of(shape.queries, counted.queries);
  int const groups = problem.heads_q / plan.packed_heads;
  bool const several = request.several_tiles > 0;
  kernel.packed_tiles = several && has_packed_tiles(problem);
  if (several && !kernel.packed_tiles) {
    kernel.tiles_of_group = static_cast<int>(request.several_tiles / problem.batch);
  }
  kernel.most_tiles =
      (several ? request.several_tiles : most_tiles_of_group(problem, family, queries, resized)) * groups;
  require(kernel.most_tiles <= kMaxTiles, "q: the problem has up to ", kernel.most_tiles, " tiles, at most ", kMaxTiles,
          " are possible; split the batch");

  int const blocks = ceil_div(std::max(problem.seqlen_k, 1), counted.keys) + 1;
  std::int64_t const units = counted.fixed_split > 0 ? fixed_parts(blocks, counted.fixed_split)
                                                     : std::max(blocks, counted.least_units) + counted.ends;
  // Even parts of tiles (EvenParts) have more units than blocks.
  bool const may_be_even = (decode || may_part_many(plan, kernel, problem)) && problem.ragged && !plan.fixed_splits;
  kernel.most_units = std::min(kMaxTiles, kernel.most_tiles * units * (may_be_even ? kUnitsOfPart : 1));
  // More units than can be counted are not shared out. With lengths on the device the kernels decide so.
  kernel.may_split = may_split && (problem.ragged || plan.fixed_splits || kernel.most_tiles * units <= kMaxTiles);
  kernel.ctas =
      static_cast<int>(std::min<std::int64_t>(kernel.ctas, kernel.most_tiles * (kernel.may_split ? units : 1)));
  if (kernel.may_split) {
    kernel.partial_rows = decode
                              ? static_cast<int>(std::min<std::int64_t>(kernel.tile.rows, request.rows_of_sequence()))
                              : kernel.tile.rows;
    // A block cuts at most two tiles.
    kernel.partial_slots = plan.fixed_splits ? kernel.most_units : 2 * std::int64_t{kernel.ctas};
  }
  bool const is_second = decode && !plan.kernels.empty();
  bool const one_of_two =
      !decodes && !plan.for_both && (is_second || (plan.listed && problem.ragged && kernel.may_split));
  because(plan, "tile",
          use == TileUse::kFewRows && request.mixes_decode_tiles() ? "sequences with up to 16 query rows: "
          : !one_of_two                                            ? ""
          : decode                                                 ? "sequences with few queries: "
                                                                   : "the others: ",
          family_name(family), " ", kernel.tile, ": ", forced ? "forced" : row->why);
  plan.tiles += kernel.most_tiles;
  return plan.kernels.emplace_back(kernel);
}

void explain_grid(Plan& plan, KernelPlan const& kernel) {
  because(plan, "grid", counted(kernel.ctas, "block"), " of ", kernel.threads, " threads for up to ",
          counted(kernel.most_tiles, "tile"));
}

namespace {

KernelPlan& add_kernel(PlanRequest const& request, Plan& plan, TileUse use, bool may_split) {
  KernelPlan& kernel = choose_kernel(request, plan, use, may_split);
  explain_grid(plan, kernel);
  return kernel;
}

// One kernel, or one for the sequences with up to 16 rows and one for those with more: both look through all of them,
// one after the other, and leave parts of tiles in the same slots.
void add_decode_kernels(PlanRequest const& request, Plan& plan, bool may_split) {
  TileUse const use = request.decode_use();
  if (!request.mixes_decode_tiles()) {
    KernelPlan const& kernel = choose_kernel(request, plan, use, may_split);
    leave_clusters_to_schedule(request, plan);
    explain_grid(plan, kernel);
    return;
  }
  int const most_queries = kMostFewRows / plan.packed_heads;
  KernelPlan& few = add_kernel(request, plan, TileUse::kFewRows, may_split);
  few.most_queries = most_queries;
  few.shares_parts = true;
  plan.tiles -= few.most_tiles;  // those of the other one
  add_kernel(request, plan, use, may_split).least_queries = most_queries + 1;
}

// Parts that a tile of 64 rows may have in the mean, so that its blocks merge them: one warp adds up all parts of a
// row, where the combine kernel has several for it. Four tiles of 1.8k to 17.7k keys, head dim 256, in up to 55 parts
// took 31.6 us instead of 26.2.
constexpr std::int64_t kMostPartsOfManyRows = 32;

// A kernel beside another one leaves it to the combine kernel.
void choose_who_merges(PlanRequest const& request, Plan& plan) {
  KernelPlan& kernel = plan.kernels.front();
  bool const alone = plan.kernels.size() == 1;
  bool const few_parts =
      kernel.tile.rows <= kMostSomeRows || kernel.ctas <= kMostPartsOfManyRows * request.tiles_of_few();
  kernel.merges_parts = alone && kernel.may_split && may_merge_parts(request.problem, kernel.tile) && few_parts &&
                        kernel.ctas <= kMostPartsOfTile;
  if (kernel.merges_parts) {
    because(plan, "merging", "by the blocks that leave parts of a tile, each some of its rows");
  }
}

// Sequences that may have many queries, where all have one at least and one has as many as the bound if that can be.
std::int64_t most_prompts(PlanRequest const& request) {
  Problem const& problem = request.problem;
  int const few = max_of(1, request.tile_row(request.decode_use()).tile.rows / request.scheduled_packing());
  std::int64_t const beyond_one = std::max<std::int64_t>(0, problem.total_q - problem.batch);
  std::int64_t const of_longest = std::max(0, problem.seqlen_q - 1);
  std::int64_t const of_others = of_longest <= beyond_one ? beyond_one - of_longest : beyond_one;
  return std::min<std::int64_t>(problem.batch, 1 + of_others / few);
}

// Of prefill in front of decode: a grid that leaves a quarter of the SMs from the start. Blocks without work, or that
// leave their SM to decode, hold it for 4 us: 23 queries of 40/8 heads and eight single ones take 16.8 us so, 19.5 with
// all SMs in the grid. Where there are more tiles than half of the SMs, they may have more work than decode, and the
// time of 40 such steps was 0.998, with up to 1.24 of it.
void leave_sms_to_decode(PlanRequest const& request, KernelPlan& prefill, std::int64_t tiles) {
  int const sms = request.available_sms();
  if (2 * tiles > sms || request.forced.ctas > 0) { return; }
  // Each prompt may have a tile that is not full.
  std::int64_t const partly_full = request.problem.packed_q ? most_prompts(request) * request.scheduled_groups() : 0;
  std::int64_t const wanted = std::max<std::int64_t>(tiles + partly_full, ceil_div(3 * sms, 4));
  int const ctas = static_cast<int>(std::min<std::int64_t>(prefill.ctas, wanted));
  prefill.leaves = prefill.ctas - ctas;
  prefill.ctas = ctas;
  if (prefill.may_split) { prefill.partial_slots = 2 * std::int64_t{ctas}; }
}

// Decode is bound by memory, which it does not need all SMs for. So it may go first, where one of its blocks takes a
// whole SM or all of its tiles are short, and prefill beside it on what it leaves. Not where prefill has one round of
// tiles, or of chunks of equal work: these would begin at two times, and decode, with two or three rounds of its own,
// has fewer blocks for them.
void choose_order(PlanRequest const& request, Plan& plan) {
  bool const fills_sm = plan.kernels[1].tile.per_sm == 1;
  // Prompts have all queries but one of each sequence.
  std::int64_t const prompts = request.full_tiles(plan.kernels[0].tile, request.problem.batch);
  plan.decode_first = (fills_sm || !plan.kernels[1].may_split) && prompts > request.device.sm_count;
  int const slow_readers = slow_readers_beside_prefill(request, plan.kernels[1].tile);
  // Parts that do not depend on the batch count as one unit whatever they have, as whole tiles of prefill do.
  plan.readers_beside_prefill =
      plan.fixed_splits ? slow_readers : readers_beside_prefill(request, plan.kernels[1].tile);
  plan.chunks_beside_decode = request.most_ctas(plan.kernels[0].tile) - slow_readers;
  plan.prefill_at_par = prefill_at_par(request, plan.kernels[1].tile);
  if (!plan.decode_first) { leave_sms_to_decode(request, plan.kernels[0], prompts); }
  because(plan, "order",
          plan.decode_first ? "sequences with few queries first, on the SMs that their bytes need; the others beside "
                              "them, then on all SMs"
          : fills_sm        ? "sequences with few queries behind the others, of which each SM has at most one tile"
                            : "sequences with few queries behind the others: two of their blocks share an SM");
}

void explain_grid_beside_decode(Plan& plan) {
  KernelPlan const& prefill = plan.kernels[0];
  because(plan, "grid", "of many queries ", counted(prefill.ctas, "block"), " of ", prefill.threads,
          " threads for up to ", counted(prefill.most_tiles, "tile"),
          prefill.leaves > 0 ? ": those of few queries have the other SMs from the start" : "");
}

}  // namespace

void plan_listed(PlanRequest const& request, Plan& plan, PrefillChoice const& choice) {
  take_scheduled_packing(request, plan);
  PrefillChoice prefill = choose_scheduled(request, choice);
  bool const forced = plan.fixed_splits || request.forces_splits();
  bool const splits = request.problem.num_splits != 1 || forced;
  TileRow const& few = request.tile_row(request.decode_use());
  bool const one_split = plan.fixed_splits && fits_one_split(request, few.tile);
  if (request.decodes()) {
    add_decode_kernels(request, plan, splits && !one_split && (forced || !whole_tiles_suffice(request)));
  } else {
    TileRow const* const mixed = mixed_row(request);
    bool const cuts = mixed != nullptr && may_cut_mixed(request, *mixed);
    // Whole tiles of a kernel for many queries alone are those of other calls.
    if (mixed != nullptr && (cuts || is_mixed(mixed->use))) { prefill = {mixed->use, cuts}; }
    bool const wants_another =
        request.problem.ragged && splits && mixed == nullptr &&
        (plan.fixed_splits || (!queries_are_known(request.problem) && !takes_few_queries_along(request, prefill)));
    bool const beside_decode = wants_another && !are_mostly_prompts(request);
    plan.for_both = mixed != nullptr || (wants_another && !beside_decode);
    KernelPlan const& kernel = choose_kernel(request, plan, prefill.use, prefill.may_split);
    if (!beside_decode) { explain_grid(plan, kernel); }
    if (splits && !beside_decode) {
      because(plan, "kernels",
              mixed != nullptr && is_mixed(mixed->use)
                  ? concat("one: it computes tiles of up to ", kMostFewRows, " rows as those for few queries do")
              : mixed == nullptr && plan.for_both
                  ? std::string("one: for so many rows of q, most sequences seem to have many queries")
              : plan.for_both
                  ? std::string("one: sequences with few queries are few, or for so many rows of q they seem to be")
              : queries_are_known(request.problem)
                  ? concat("one: every sequence has ", request.problem.seqlen_q, " queries")
                  : std::string("one: sequences with few queries are too few, and too short, for another"));
    }
    if (beside_decode) {
      // Tiles of so few blocks, as in a short window, are not worth a combine kernel.
      bool const all_short = request.blocks_of_tile(few.tile) <= kMostBlocksOfShortTile;
      add_decode_kernels(request, plan, splits && !one_split && (forced || !all_short));
      choose_order(request, plan);
      explain_grid_beside_decode(plan);
    }
  }
  choose_splits(request, plan, prefill.use);
  choose_who_merges(request, plan);
  choose_workspace(request.problem, plan);
}

}  // namespace hopper_attention
