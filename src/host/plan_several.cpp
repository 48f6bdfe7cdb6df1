// Sequences with more query rows than the tile of 32 holds: several such tiles for each, which the blocks of clusters
// share and merge in shared memory, instead of one of 64 rows or those for many queries?
#include <algorithm>
#include <cstdint>

#include "host/plan_request.h"
#include "host/ranked_tiles.h"
#include "host/schedule_shape.h"
#include "host/tile_share.h"

namespace hopper_attention {
namespace {

// Rows of a sequence in the mean: with more, in so many tiles that read the same keys, it was not measured.
constexpr int kMostMeanRows = 512;
// Of K and V for a block. With more, a schedule that balances tiles is better where lengths differ: 42 and 25k keys,
// 10/2 heads, took 59 us in clusters of 4 that had 3 MiB each, and 28 in chunks.
constexpr std::int64_t kMostBytesOfBlock = std::int64_t{1} << 20;

// What the model of decode (us_of_tiles()), which was made for tiles of 16 rows, misses for 32: a block alone starts
// and ends sooner than a cluster, and merging takes as long as there are columns. By 320 calls of 33 to 600 rows
// (docs/performance-notes.md, step 253).
constexpr double kSavedWithoutMergingUs = 1.8;
constexpr double kUsOfMergingColumn = 2.0 / 128;
// And for 64 rows: a cluster takes so much longer to start, and to merge them.
constexpr double kUsOf64Rows = 1.6;
// What calls of many queries take beside their tiles, where these are whole, and where clusters or equal parts share
// them.
constexpr double kEndsOfWholeUs = 4;
constexpr double kEndsUs = 1;

// How many there would be of all sequences and one group of heads; 0: none. Without a schedule, which counts other
// tiles. Of a packed q they do not depend on the bound on its queries.
std::int64_t tiles_that_fit(PlanRequest const& request) {
  Problem const& problem = request.problem;
  testing::ForcedPlan const& forced = request.forced;
  bool const is_forced =
      forced.one_tile || request.forces_tile() || forced.packed_heads != 0 || forced.heads_per_pass != 0;
  int const packed_heads = request.scheduled_packing();
  bool const has_more = request.rows_of_sequence() > kMostSomeRows && packed_heads <= kMostSomeRows;
  bool const forces_pairs = forced.cluster != 0 && request.rows_of_sequence() > kSlabRows;
  if (!has_more || is_forced || forces_pairs || problem.batch_invariant) { return 0; }
  std::int64_t const queries = problem.packed_q ? problem.total_q : std::int64_t{problem.batch} * problem.seqlen_q;
  std::int64_t const tiles = most_tiles(problem, request.tile_row(TileUse::kSomeRows).tile, packed_heads);
  bool const are_few = queries * packed_heads <= std::int64_t{problem.batch} * kMostMeanRows;
  return are_few && tiles <= request.device.sm_count ? tiles / request.scheduled_groups() : 0;
}

double us_of_several(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  double const us = us_of_tiles(request, tile, share, request.blocks_of_tile(tile));
  double const merging = share.clusters * kUsOfMergingColumn * tile.head_dim_v;
  return share.blocks() == 1 ? us - kSavedWithoutMergingUs : us + merging;
}

// By one tile of 64 rows for each sequence and group of heads: by a block, or cut, or by the blocks of clusters.
double us_of_one_tile_each(PlanRequest const& request) {
  double const us = us_of_whole_tiles_of_few(request);
  // Of a full tile, whatever the bound on queries is.
  Problem problem = request.problem;
  problem.seqlen_q = kSlabRows / request.scheduled_packing();
  PlanRequest const full{problem, request.device, request.forced};
  TileConfig const& tile = full.tile_row(TileUse::kDecode).tile;
  TileShare const share = share_of_tile(full, tile);
  return share.blocks() == 1 ? us : std::min(us, us_of_several(full, tile, share) + kUsOf64Rows);
}

// So, or by those for many queries.
double us_otherwise(PlanRequest const& request) {
  if (request.decodes()) { return us_of_one_tile_each(request); }
  PrefillChoice const choice = choose_prefill(request);
  bool const whole = choice.use != TileUse::kPaired && choice.parts == 1;
  return us_of_choice(request, choice) + (whole ? kEndsOfWholeUs : kEndsUs);
}

}  // namespace

PlanRequest take_several_tiles(PlanRequest const& request, Plan& plan) {
  PlanRequest several = request;
  several.several_tiles = tiles_that_fit(request);
  if (several.several_tiles == 0 || cluster_size(several) == 0) { return request; }
  if (request.forced.cluster > 0) { return several; }
  // An sm_margin only steers: which tile a sequence has decides bits.
  Problem problem = request.problem;
  problem.sm_margin = 0;
  PlanRequest const otherwise{problem, request.device, request.forced};
  PlanRequest const compared{problem, request.device, request.forced, several.several_tiles};
  TileConfig const tile = compared.tile_row(compared.decode_use()).tile;
  TileShare const share = share_of_tile(compared, tile);
  if (share_bytes(compared, tile, share.blocks()) > kMostBytesOfBlock) { return request; }
  double const us = us_of_several(compared, tile, share);
  double const other_us = us_otherwise(otherwise);
  bool const is_faster = us < other_us;
  because(plan, "rows", is_faster ? "in " : "not in ", several.tiles_of_few(), " tiles of ", kMostSomeRows,
          " rows: if all sequences are as long as may be, ", microseconds(us), " us so, ", microseconds(other_us),
          " us otherwise");
  return is_faster ? several : request;
}

}  // namespace hopper_attention
