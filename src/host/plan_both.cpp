// One kernel for sequences of few queries and of many, where two would wait for each other: when, and which.
#include <cstdint>

#include "host/plan_request.h"
#include "host/schedule_shape.h"
#include "kernels/lanes.h"

namespace hopper_attention {
namespace {

// Rounds of tiles of few and of many queries for which there is a kernel for both. With more of few, an item of that
// kernel costs more than another kernel, with more of many, larger tiles are faster: 2k queries beside 8 on 16k, 32/8
// heads, four rounds of many, take 216 us so and 185 in two kernels (docs/performance-notes.md, steps 237 and 284).
struct MixedRounds {
  double few;
  double many;
};
constexpr MixedRounds kMixedRounds{5, 3};
// Where two blocks of decode share an SM, one reads little more than half as fast, and tiles of 192 rows have blocks of
// as many keys.
constexpr MixedRounds kMixedRoundsOfPairs{3, 0.75};
// Where blocks have fewer keys than those of the kernel for many queries (head dims 192 and 256), tiles of prompts take
// up to 1.1 of its time, and the ring holds less of what few queries read.
constexpr MixedRounds kMixedRoundsOfNarrowBlocks{3, 3};
// Where it computes tiles of few queries as those of many, which read no faster than they compute: 16 singles on 1k
// keys beside a prompt of 100, 8/1 heads, head dim 256, take 16.7 us in one kernel and 25.2 in two, with 16/8 heads 55
// and 49 (docs/performance-notes.md, step 289).
constexpr MixedRounds kMixedRoundsAlike{0.3, 0.5};

MixedRounds const& mixed_rounds(PlanRequest const& request) {
  TileRow const* const both = row_for_both(request.problem);
  bool const narrow = both->tile.keys < request.tile_row(TileUse::kRagged).tile.keys;
  bool const pairs = request.tile_row(request.decode_use()).tile.per_sm > 1;
  return !computes_few_apart(request.problem) ? kMixedRoundsAlike
         : narrow                             ? kMixedRoundsOfNarrowBlocks
         : pairs                              ? kMixedRoundsOfPairs
                                              : kMixedRounds;
}

// Key blocks that a tile of few queries may have, up to which two kernels or pairs share the tiles of a step as well by
// its bounds: with 24 to 32 of them in even parts took 0.97 of their time, with more 0.81, and 0.93 where all sequences
// have as many queries (docs/performance-notes.md, steps 275, 280 and 285).
constexpr std::int64_t kFewBlocksOfStep = 32;

bool are_keys_few(PlanRequest const& request) {
  return request.blocks_of_tile(request.tile_row(request.decode_use()).tile) <= kFewBlocksOfStep;
}

// Whether one kernel for many queries may take what is meant for two.
bool may_be_for_both(PlanRequest const& request) {
  return !request.problem.batch_invariant && !request.forces_splits() && !request.forces_tile();
}

// Whether q is packed and all of its rows count, so that they say what sequences may have.
bool rows_are_known(Problem const& problem) { return problem.packed_q && !problem.seqused_q; }

// The kernel that may be taken for both classes: nullptr if there is none. Of more tiles of few queries than SMs, a
// scheduler that has not all sequences near finds each by its number.
TileRow const* row_that_may_mix(PlanRequest const& request) {
  Problem const& problem = request.problem;
  if (computes_few_apart(problem)) {
    bool const by_number = problem.batch > kLanes && request.tiles_of_few() > request.device.sm_count;
    bool const has_other = row_of_use(problem, TileUse::kMixedMany) != nullptr;
    return special_row(request, by_number && has_other ? TileUse::kMixedMany : TileUse::kMixed);
  }
  return may_be_for_both(request) ? &request.tile_row(request.many_use()) : nullptr;
}

}  // namespace

bool are_mostly_prompts(PlanRequest const& request) {
  constexpr std::int64_t kMostRounds = 6;
  Problem const& problem = request.problem;
  bool const is_known = problem.ragged && rows_are_known(problem) && problem.num_splits == 0;
  if (!is_known || !may_be_for_both(request) || problem.batch == 1) { return false; }
  bool const is_short =
      request.full_tiles(request.tile_row(request.many_use()).tile) <= kMostRounds * request.device.sm_count;
  std::int64_t const batch = problem.batch;
  return is_short && has_quarter_of_rows(problem) && problem.total_q * request.scheduled_packing() > batch * kSlabRows;
}

TileRow const* mixed_row(PlanRequest const& request) {
  Problem const& problem = request.problem;
  TileRow const* const row = row_that_may_mix(request);
  if (row == nullptr || !problem.ragged || problem.num_splits != 0) { return nullptr; }
  // Short prompts alone, of a tile for few queries each: 200 of 8 queries on 215 keys, 8/1 heads, took 28 us in it.
  bool const one_class = !problem.packed_q && !problem.seqused_q && request.rows_of_sequence() <= kSlabRows;
  if (one_class) { return nullptr; }
  MixedRounds const& most = mixed_rounds(request);
  double const sms = request.device.sm_count;
  double const few = static_cast<double>(request.tiles_of_few()) / sms;
  double const many = static_cast<double>(request.full_tiles(row->tile, problem.batch)) / sms;
  // Of one sequence whose keys are not known, if tiles of fewer rows than others have need no second round.
  bool const may_part = rows_are_known(problem) && !are_keys_few(request);
  bool const one_round = request.full_tiles(row->tile) <= request.device.sm_count;
  if (problem.batch == 1 && !(may_part && one_round)) { return nullptr; }
  if (!is_mixed(row->use)) {
    bool const may_have_few = problem.batch > 1 && rows_are_known(problem);
    if (!may_have_few || queries_are_known(problem)) { return nullptr; }
    if (are_mostly_prompts(request)) { return row; }
  }
  return few <= most.few && many <= most.many ? row : nullptr;
}

bool may_cut_mixed(PlanRequest const& request, TileRow const& mixed) {
  int const keys = request.tile_row(TileUse::kRagged).tile.keys;
  return request.most_keys_of_tile(mixed.tile) > std::int64_t{kWorthCuttingMixed} * keys;
}

bool may_be_mixed(PlanRequest const& request) {
  // Where most sequences seem to be prompts, more of them than those for which kMixedRoundsAlike allows it.
  constexpr double kMostRoundsOfPrompts = 1;
  bool const apart = computes_few_apart(request.problem);
  double const rounds = apart ? mixed_rounds(request).few : kMostRoundsOfPrompts;
  bool const few_enough = static_cast<double>(request.tiles_of_few()) <= rounds * request.device.sm_count;
  return few_enough && row_that_may_mix(request) != nullptr;
}

bool cuts_step_evenly(PlanRequest const& request) {
  Problem const& problem = request.problem;
  bool const is_forced = request.forces_work() || request.forced.cluster != 0;
  bool const is_step = problem.batch > 1 && rows_are_known(problem) && !request.decodes();
  if (!problem.has_metadata || !is_step || is_forced || mixed_row(request) == nullptr) { return false; }
  return !are_keys_few(request);
}

}  // namespace hopper_attention
