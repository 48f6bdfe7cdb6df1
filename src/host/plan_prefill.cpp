// Calls of many queries whose tiles are not those of dense calls: which tile, and are tiles whole, with a schedule or
// without, shared by the blocks of a cluster, cut where the schedule says, or all in as many parts?
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "host/plan_request.h"
#include "host/ranked_tiles.h"
#include "host/schedule_shape.h"

namespace hopper_attention {
namespace {

// What it takes to merge equal parts, in a kernel of its own.
constexpr double kMergeUs = 9;
// Until the first item of a schedule is known, longer than where tiles follow from their index.
constexpr double kScheduleUs = 4;
// The same in blocks of keys, which chunks of sequences that are not known take longer than their share of all work.
constexpr int kMergeBlocks = 16;
// What calls take longer by a decode kernel and a combine kernel that find nothing to do: 8 to 12 us.
constexpr double kIdleKernelsUs = 12;
// What a tile for many queries may take that has few, and is not cut, or half as long as the call if that is more.
constexpr double kMostUsAlong = 40;
// Of a tile of one query that is computed among windows of one block: until the scheduler warp has found the next one.
constexpr double kUsOfDrawnTile = 6;
// Of the keys that sequences may have, what those that are not known have at least in the mean, as is supposed.
constexpr double kLeastShareOfKeys = 0.25;
// And those with few queries, which a tile for many takes along.
constexpr double kMeanShareOfKeys = 0.5;
// Of a block that starts when another one has ended, until it has keys: 192 tiles of up to 458 keys, 64/8 heads, took
// 16.5 us instead of the 14.1 of 128 tiles of more rows, 144 of up to 827 keys 15.2 instead of 19.4.
constexpr double kUsOfLaterBlock = 3;
// Rounds of whole tiles of few sequences that need no schedule. Of one sequence, in 2.6 rounds, blocks of one tile each
// took 1.04 of the time of persistent ones, which draw their tiles and load the next one's keys early.
constexpr std::int64_t kMostRoundsInOrder = 2;
// With more rounds of whole tiles the last one counts little.
constexpr std::int64_t kMostSmallRounds = 4;

double rounds_of(PlanRequest const& request, TileRow const& row) {
  return static_cast<double>(request.full_tiles(row.tile)) / request.device.sm_count;
}

// Of the call, with whole tiles that take as long as the longest. Of one sequence whose tiles are up to two rounds,
// each with as many keys more than the one before as it has queries, the shortest comes behind the longest that another
// one comes behind. An sm_margin does not count: it only steers.
double us_of_whole_tiles(PlanRequest const& request, TileRow const& row) {
  double const rounds = rounds_of(request, row);
  double const keys = static_cast<double>(keys_of_full_tile(request, row.tile));
  double const longest = us_of_tile(row, keys);
  bool const rise = request.problem.batch == 1 && tiles_rise_to_the_last(request.problem);
  if (rounds <= 1 || rounds > 2 || !rise) { return std::ceil(rounds) * longest; }
  int const queries = query_rows_of_sequence(request.problem);
  int const of_tile = tile_shape(row.tile, request.scheduled_packing(), false).queries;
  double const shortest = us_of_tile(row, std::max(0.0, keys - std::max(0, queries - of_tile)));
  double const first_of_two = longest - (2 - rounds) / rounds * (longest - shortest);
  return std::max(longest, first_of_two + kUsOfLaterBlock + shortest);
}

// The same of sequences that are not known. Where tiles are of any length up to the longest, as those of prompts, tiles
// behind the first round take half as long.
double us_of_unknown_tiles(PlanRequest const& request, TileRow const& row) {
  Problem const& problem = request.problem;
  double const longest = us_of_tile(row, static_cast<double>(keys_of_full_tile(request, row.tile)));
  double const rounds = rounds_of(request, row);
  std::int64_t const rows = problem.packed_q ? problem.total_q : problem.seqlen_q;
  bool const of_any_length = tiles_rise_to_the_last(problem) && 2 * rows >= problem.seqlen_k;
  return longest * (of_any_length ? 1 + std::max(0.0, rounds - 1) / 2 : std::ceil(rounds));
}

// Whether a block for each tile can find it without a schedule, where tiles are whole.
bool tiles_are_found_in_order(PlanRequest const& request, TileConfig const& tile) {
  Problem const& problem = request.problem;
  bool const is_found = may_rank_tiles(tile) || (problem.batch == 1 && tiles_are_known(problem));
  int const packed_heads = request.scheduled_packing();
  return is_found && tiles_have_ranks(problem, tile, packed_heads) &&
         most_tiles(problem, tile, packed_heads) <= kMostRoundsInOrder * request.device.sm_count;
}

// With larger tiles in chunks of equal work, of `keys` each in the mean, and the time it takes to merge these.
double us_of_chunks(PlanRequest const& request, double keys) {
  TileRow const& row = request.tile_row(request.many_use());
  return rounds_of(request, row) * us_of_tile(row, keys) + kWorthCutting * measured_row(row).cost.block * 1e-3;
}

// The same of sequences that are not known: they may have few of the keys that there may be, and none may be cut. What
// is chosen instead may then lose little, however long one of them is.
double us_of_chunks_at_best(PlanRequest const& request) {
  TileRow const& row = request.tile_row(request.many_use());
  double const keys = static_cast<double>(keys_of_full_tile(request, row.tile));
  double const mean_us = us_of_tile(row, keys) * kLeastShareOfKeys;
  return rounds_of(request, row) * mean_us + kMergeBlocks * measured_row(row).cost.block * 1e-3 + kScheduleUs +
         kIdleKernelsUs;
}

// Whether tiles of kShort end sooner than those of kWhole. What sequences have is not known: they count as if all had
// as many queries and keys as in the mean, which does not depend on max_seqlen_q. Not where heads share a tile: the
// queries of its slabs are then close to each other, and narrow blocks leave out little (32 sequences of 512, 32/8
// heads, took 1.07 of the time).
bool short_tiles_end_sooner(PlanRequest const& request, TileRow const& narrow) {
  TileRow const& wide = request.tile_row(TileUse::kWhole);
  if (request.forces_tile()) { return !request.allows(wide.tile); }
  if (!request.problem.packed_q || request.problem.total_k == 0 || request.scheduled_packing() > 1) { return false; }
  Problem mean = request.problem;
  mean.seqlen_q = ceil_div(mean.total_q, max_of(1, mean.batch));
  mean.seqlen_k = ceil_div(mean.total_k, max_of(1, mean.batch));
  PlanRequest const of_mean{mean, request.device, request.forced};
  auto const us = [&](TileRow const& row) { return us_of_sequence(of_mean, measured_row(row), 1); };
  return us(narrow) < us(wide);
}

// Whether whole tiles of kSmallGrid end sooner than those of kRagged, whole or in chunks, which may leave many SMs idle
// in the only round of the grid or in the last one.
bool small_tiles_end_sooner(PlanRequest const& request, TileRow const& small, bool asks_for_splits) {
  TileRow const& large = request.tile_row(TileUse::kRagged);
  if (request.forces_tile()) { return !request.allows(large.tile); }
  if (request.full_tiles(small.tile) > kMostSmallRounds * request.device.sm_count) { return false; }
  double const chunks = us_of_chunks(request, static_cast<double>(keys_of_full_tile(request, large.tile)));
  bool const ranked = !tiles_are_known(request.problem) && tiles_are_found_in_order(request, small.tile);
  auto const us = [&](TileRow const& row) {
    return ranked ? us_of_unknown_tiles(request, row) : us_of_whole_tiles(request, row);
  };
  double const otherwise = asks_for_splits ? std::min(us(large), chunks) : us(large);
  double const launches = kScheduleUs + (asks_for_splits && request.problem.packed_q ? kIdleKernelsUs : 0);
  return us(small) <= otherwise + (ranked ? launches : 0);
}

// Whether a call ends sooner if the blocks of a cluster share two tiles than with whole ones as chosen, or in chunks,
// which a schedule shares out.
bool pairs_end_sooner(PlanRequest const& request, TileRow const& paired, PrefillChoice const& chosen,
                      bool asks_for_splits) {
  TileRow const& whole = request.tile_row(chosen.use);
  if (!tiles_have_ranks(request.problem, paired.tile, request.scheduled_packing())) { return false; }
  if (request.forces_tile()) { return !request.allows(whole.tile); }
  double const us = us_of_pairs(request, paired, request.scheduled_packing());
  if (!tiles_are_known(request.problem)) {
    return us < us_of_unknown_tiles(request, whole) && (!asks_for_splits || us < us_of_chunks_at_best(request));
  }
  double const chunks =
      us_of_chunks(request, static_cast<double>(keys_of_full_tile(request, request.tile_row(TileUse::kRagged).tile)));
  return us < us_of_whole_tiles(request, whole) && (!asks_for_splits || us < chunks + kScheduleUs);
}

// For a call whose tiles are known and about as long as each other, so that no schedule has to share them out: of one
// sequence, or of several that are alike.
PrefillChoice choose_equal_parts(PlanRequest const& request, PrefillChoice const& otherwise) {
  Problem const& problem = request.problem;
  bool const decided = problem.ragged || problem.keys == KeyLayout::kPaged || splitting_pays(request);
  if (!tiles_are_known(problem) || request.forces_work() || !decided || problem.batch_invariant) { return otherwise; }

  TileRow const& large = request.tile_row(request.many_use());
  TileShape shape = tile_shape(large.tile, request.scheduled_packing(), false);
  shape.ends = 0;  // us_of_tile() adds them
  SequenceWork const work = sequence_work(shape, problem.mask, {query_rows_of_sequence(problem), problem.seqlen_k});
  double const mean_blocks = static_cast<double>(work.sum()) / max_of(1, work.tiles);
  double least_us = us_of_chunks(request, mean_blocks * large.tile.keys);
  if (problem.num_splits > 1) {  // a chunk that begins anywhere may cut a tile once more
    least_us = std::max(
        least_us, us_of_tile(large, static_cast<double>(work.units) * large.tile.keys / (problem.num_splits - 1)));
  }
  TileRow const& row_otherwise = request.tile_row(otherwise.use);
  least_us = std::min(least_us, otherwise.use == TileUse::kPaired
                                    ? us_of_pairs(request, row_otherwise, request.scheduled_packing())
                                    : us_of_whole_tiles(request, row_otherwise));
  PrefillChoice best = otherwise;
  for (TileRow const* const row : {&large, special_row(request, TileUse::kSmallParts)}) {
    if (row == nullptr) { continue; }
    std::int64_t const blocks = ceil_div<std::int64_t>(keys_of_full_tile(request, row->tile), row->tile.keys);
    std::int64_t parts = std::min(
        request.most_ctas(row->tile) / std::max<std::int64_t>(1, request.full_tiles(row->tile)), blocks / kLeastUnits);
    if (problem.num_splits > 1) { parts = std::min<std::int64_t>(parts, problem.num_splits); }
    if (parts < 2 || blocks <= kFewBlocksOfTile) { continue; }
    double const us = us_of_tile(*row, static_cast<double>(ceil_div(blocks, parts) * row->tile.keys)) + kMergeUs;
    if (us < least_us) {
      least_us = us;
      best = {row->use, true, static_cast<int>(parts)};
    }
  }
  return best;
}

// The row of another tile than the usual one: nullptr if there is none, or it is not to be taken.
TileRow const* other_row(PlanRequest const& request, TileUse use) {
  TileRow const* const row = row_of_use(request.problem, use);
  bool const taken = row != nullptr && request.problem.softcap == 0.0F && !request.forces_splits();
  return taken && request.allows(row->tile) ? row : nullptr;
}

// Of a tile for many queries that has few, on such a share of the keys that there may be.
double us_of_tile_along(PlanRequest const& request, TileRow const& row, double share_of_keys) {
  double const most = static_cast<double>(request.most_keys_of_tile(row.tile));
  double const us = us_of_tile(row, std::min(most, share_of_keys * request.problem.seqlen_k));
  return has_one_block(row.tile) ? std::max(us, kUsOfDrawnTile) : us;
}

}  // namespace

std::int64_t keys_of_full_tile(PlanRequest const& request, TileConfig const& tile) {
  if (!request.problem.packed_q) { return request.most_keys_of_tile(tile); }
  return request.most_keys_of_queries(tile_shape(tile, request.scheduled_packing(), false).queries);
}

double us_of_tile(TileRow const& row, double keys) {
  TileCost const cost = measured_row(row).cost;
  return (keys / row.tile.keys * cost.block + cost.tile) * 1e-3;
}

TileRow const* special_row(PlanRequest const& request, TileUse use) {
  return request.problem.batch_invariant ? nullptr : other_row(request, use);
}

TileRow const* window_row(PlanRequest const& request) {
  TileRow const* const row = other_row(request, TileUse::kWindow);
  bool const holds = row != nullptr && one_block_holds(row->tile, request.problem.mask, request.scheduled_packing());
  return holds ? row : nullptr;
}

bool queries_are_known(Problem const& problem) {
  std::int64_t const rows = std::int64_t{problem.batch} * problem.seqlen_q;
  return !problem.seqused_q && (!problem.packed_q || problem.total_q >= rows);
}

bool splitting_pays(PlanRequest const& request) {
  bool const decodes = request.decodes();
  TileConfig const tile = request.tile_row(decodes ? request.decode_use() : request.many_use()).tile;
  ScheduleParams params;
  params.batch = request.problem.batch;
  params.alike = request.work_of_sequence(tile);
  params.alike_units = params.alike.sum();
  params.head_groups = FastDivmod(request.scheduled_groups());
  params.ctas = request.most_ctas(tile);
  params.may_split = true;
  params.bound_by_memory = decodes;
  params.cuts_alike = cuts_if_alike(params.alike, std::int64_t{params.batch} * request.scheduled_groups(), params.ctas);
  params.even_tiles = tiles_are_even(request.problem);
  // More units than can be counted are not shared out.
  std::int64_t const units = std::int64_t{params.batch} * params.alike.tiles * params.alike.units;
  if (request.blocks_of_tile(tile) <= 1 || units * request.scheduled_groups() > kMaxTiles) { return false; }
  return Schedule(params).by_units();
}

// Tiles so short that cutting them saves less than merging takes, or, where how many there are is known, so many that
// cutting some pays for no keys: those of one sequence alone are so many that none can be longer than two blocks'
// shares of all work.
bool whole_tiles_fill_grid(PlanRequest const& request) {
  Problem const& problem = request.problem;
  TileConfig const tile = request.tile_row(request.many_use()).tile;
  int const ctas = request.most_ctas(tile);
  SequenceWork const work = request.work_of_sequence(tile);
  // Where SMs have several tiles, the longest first, the last ones are short: three prompts and chunks of up to 2,500
  // keys, 32/8 heads, took 72 us whole and 80 to 85 in chunks.
  bool const several_each = 2 * request.full_tiles(tile) >= 3LL * request.device.sm_count;
  int const worth_cutting = several_each ? kWorthCutting + kWorthCutting / 3 : kWorthCutting;
  if (request.most_keys_of_tile(tile) <= std::int64_t{worth_cutting} * tile.keys) { return true; }
  std::int64_t const sequences = std::int64_t{request.scheduled_groups()} * problem.batch;
  bool const many = 2LL * work.tiles * request.scheduled_groups() >= ctas;
  return many && queries_are_known(problem) &&
         !leave_grid_idle(work.tiles * sequences, std::int64_t{work.sum()} * sequences, work.units, ctas,
                          tiles_are_even(problem));
}

PrefillChoice choose_prefill(PlanRequest const& request) {
  Problem const& problem = request.problem;
  bool const forced = request.forces_splits();
  bool const asks_for_splits = (problem.num_splits != 1 || forced) && !problem.batch_invariant;
  bool const may_split = asks_for_splits && (forced || !whole_tiles_fill_grid(request));
  bool const with_pages = problem.keys == KeyLayout::kPaged;
  PrefillChoice choice{may_split || with_pages ? TileUse::kRagged : TileUse::kWhole, may_split};
  if (request.many_use() == TileUse::kCapped) { choice.use = TileUse::kCapped; }
  if (TileRow const* const window = window_row(request)) { return {window->use, false}; }
  // Not where tiles may be cut, which depends on max_seqlen_q.
  bool const whole = choice.use == TileUse::kWhole && !asks_for_splits;
  TileRow const* const narrow = whole ? special_row(request, TileUse::kShort) : nullptr;
  if (narrow != nullptr && short_tiles_end_sooner(request, *narrow)) { choice.use = narrow->use; }
  TileRow const* const small = special_row(request, TileUse::kSmallGrid);
  // Not `may_split`, which depends on max_seqlen_q.
  if (small != nullptr && small_tiles_end_sooner(request, *small, asks_for_splits)) { choice = {small->use, false}; }
  TileRow const* const paired = special_row(request, TileUse::kPaired);
  if (paired != nullptr && pairs_end_sooner(request, *paired, choice, asks_for_splits)) {
    choice = {paired->use, false};
  }
  return asks_for_splits ? choose_equal_parts(request, choice) : choice;
}

double us_of_choice(PlanRequest const& request, PrefillChoice const& choice) {
  TileRow const& row = request.tile_row(choice.use);
  if (choice.use == TileUse::kPaired) { return us_of_pairs(request, row, request.scheduled_packing()); }
  if (choice.parts > 1) {
    std::int64_t const blocks = ceil_div<std::int64_t>(keys_of_full_tile(request, row.tile), row.tile.keys);
    return us_of_tile(row, static_cast<double>(ceil_div<std::int64_t>(blocks, choice.parts) * row.tile.keys)) +
           kMergeUs;
  }
  double const whole = us_of_whole_tiles(request, row);
  if (!choice.may_split) { return whole; }
  return kScheduleUs +
         std::min(whole, us_of_chunks(request, static_cast<double>(keys_of_full_tile(request, row.tile))));
}

PrefillChoice choose_scheduled(PlanRequest const& request, PrefillChoice const& choice) {
  Problem const& problem = request.problem;
  TileRow const* const parts = special_row(request, TileUse::kSmallParts);
  bool const is_small = choice.use == TileUse::kSmallGrid && parts != nullptr;
  // Sequences that are alike have no metadata, whose units are what tiles of other rows share.
  bool const may_cut = problem.ragged && problem.num_splits != 1 && !whole_tiles_fill_grid(request);
  return is_small && may_cut ? PrefillChoice{parts->use, true} : choice;
}

double us_of_few_along(PlanRequest const& request, TileRow const& row) {
  Problem const& problem = request.problem;
  // Sequences without which there could not be so many rows.
  int const most_rows = request.tile_row(request.decode_use()).tile.rows;
  std::int64_t const of_few = std::int64_t{problem.batch} * (most_rows / request.scheduled_packing());
  std::int64_t const others =
      problem.packed_q ? std::max<std::int64_t>(0, problem.total_q - of_few) / max_of(1, problem.seqlen_q) : 0;
  std::int64_t const few = std::max<std::int64_t>(0, problem.batch - others) * request.scheduled_groups();
  return us_of_tile_along(request, row, kMeanShareOfKeys) * static_cast<double>(few) / request.device.sm_count;
}

bool takes_few_queries_along(PlanRequest const& request, PrefillChoice const& choice) {
  if (choice.may_split || request.forces_tile()) { return false; }
  TileRow const& row = request.tile_row(choice.use);
  double const most_us = std::max(kMostUsAlong, us_of_unknown_tiles(request, row) / 2);
  return us_of_tile_along(request, row, 1) <= most_us && us_of_few_along(request, row) <= kIdleKernelsUs;
}

bool needs_no_schedule(PlanRequest const& request, PrefillChoice const& choice) {
  Problem const& problem = request.problem;
  if (request.decodes() || request.forces_work() || problem.batch_invariant) { return false; }
  // A block for each tile leaves no SM free.
  bool const by_index = problem.batch == 1 && tiles_are_known(problem);
  if (by_index && problem.sm_margin > 0) { return false; }
  TileRow const& row = request.tile_row(choice.use);
  bool const whole = !choice.may_split && choice.parts == 1 && choice.use != TileUse::kPaired;
  // Sequences with few queries on many keys are for a decode kernel, or one that cuts them.
  bool const all_whole = problem.num_splits == 1 || tiles_are_known(problem) ||
                         takes_few_queries_along(request, choice) ||
                         us_of_unknown_tiles(request, row) <= us_of_chunks_at_best(request);
  return whole && all_whole && tiles_are_found_in_order(request, row.tile);
}

KernelPlan& add_in_order(PlanRequest const& request, Plan& plan, TileUse use, std::int64_t at_once) {
  KernelPlan& kernel = choose_kernel(request, plan, use, false);
  plan.tiles = std::max<std::int64_t>(1, most_tiles(request.problem, kernel.tile, plan.packed_heads));
  kernel.most_tiles = plan.tiles;
  kernel.ranked = !tiles_are_known(request.problem) || request.problem.batch > 1;
  std::int64_t const most = request.most_ctas(kernel.tile);
  kernel.ctas = static_cast<int>(kernel.ranked ? std::min({kernel.most_tiles, most, at_once}) : kernel.most_tiles);
  plan.heads_per_pass = request.problem.batch * request.scheduled_groups();
  explain_grid(plan, kernel);
  because(plan, "splits", request.problem.num_splits == 1 ? "1: as asked" : "1: whole tiles use the SMs as well");
  because(plan, "order",
          kernel.ranked ? "the longest tiles first, then the shortest for the blocks that had these"
                        : "a block for each tile, the longest first, as SMs are free");
  return kernel;
}

void plan_in_order(PlanRequest const& request, Plan& plan, PrefillChoice const& choice) {
  take_scheduled_packing(request, plan);
  add_in_order(request, plan, choice.use);
  choose_workspace(request.problem, plan);
}

void plan_equal_parts(PlanRequest const& request, Plan& plan, PrefillChoice const& choice) {
  take_scheduled_packing(request, plan);
  KernelPlan& kernel = choose_kernel(request, plan, choice.use, true);
  kernel.most_tiles = plan.tiles = std::max<std::int64_t>(1, request.full_tiles(kernel.tile));
  kernel.equal_parts = choice.parts;
  kernel.ctas = static_cast<int>(kernel.most_tiles * choice.parts);
  kernel.partial_slots = kernel.ctas;
  plan.heads_per_pass = request.problem.batch * request.scheduled_groups();
  plan.num_splits = choice.parts;
  explain_grid(plan, kernel);
  because(plan, "splits", choice.parts, " parts of each tile, a block for each; sequences of up to ",
          kFewBlocksOfTile * kernel.tile.keys, " keys stay whole");
  choose_workspace(request.problem, plan);
}

}  // namespace hopper_attention
