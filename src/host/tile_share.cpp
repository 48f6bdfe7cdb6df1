#include "host/tile_share.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <string>

#include "host/page_boxes.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {
namespace {

// What a call of few tiles takes, by the times of 870 calls with one sequence of 8k to 128k keys on an H200
// (docs/performance-notes.md, step 205): its start and end, and as long as K and V are read.
// Where a cluster takes each tile; where several do, whose parts a kernel merges, of which those of 2 leave the most.
constexpr double kEndsOfOneUs = 6.4;
constexpr double kEndsOfSeveralUs = 7.6;
constexpr double kEndsOfPairsUs = 9.5;
// Where a schedule cuts them into units, and what asking it takes.
constexpr double kEndsOfUnitsUs = 14;
constexpr double kScheduleUs = 0.7;
// What all SMs read. Clusters that fill neither half of the card nor nearly all of it lie unevenly over its GPCs. What
// a block reads that is alone on its SM, and in a kernel that has room for two there.
constexpr double kCardBytesPerUs = 4.45e6;
constexpr double kUnevenBytesPerUs = 3.95e6;
constexpr double kUnevenPairsBytesPerUs = 3.75e6;
constexpr double kBlockBytesPerUs = 72e3;
constexpr double kOneOfTwoBytesPerUs = 42e3;
// And one to seven clusters of 16, which have a GPC each. Each half of the card has four of these and reads half of
// what all do, and nobody but the hardware chooses them: two clusters may read as fast as three, four not as all SMs.
constexpr double kLargeClustersBytesPerUs[] = {1.2e6, 2.4e6, 2.6e6, 3.2e6, 4.1e6, 4.2e6, 4.15e6};

// Of K and V for a block, for which more are added until each SM has as many as it holds: of head dim 64, one alone
// reads half as fast as two. With shorter shares more is lost, since the blocks of the next call have no room beside
// them.
constexpr std::int64_t kBytesWorthMoreReaders = std::int64_t{384} << 10;

// Of a tile of 17 to 32 rows. One of 28 rows on 186 keys takes 7.3 us by one block and 8.3 by two.
constexpr std::int64_t kKeysReadWhileMerging = 384;

// What all blocks read together where several need the same keys, most of them from L2: 100 to 120 blocks with two to
// seven tiles for each group of heads took 200 to 280 MB in 31 to 40 us.
constexpr double kSharedBytesPerUs = 6.5e6;
// A block with the tile of 64 rows, which its instructions bound.
constexpr double kBlockOf64RowsBytesPerUs = 45e3;

// Of tiles of more than 16 rows, by the times of 88 calls, each with up to 24 shares (docs/performance-notes.md, step
// 295). What a block takes for 128 keys at least where it is alone on its SM: with head dim 96 0.95 us, with 128 1.0.
// Where two share one, what the second adds.
constexpr int kKeysOfLongStep = 128;
constexpr double kUsOfLongStep = 0.97;
constexpr double kSecondOfTwoBytesPerUs = 20e3;
// What a row adds where several clusters take a tile, whose parts a kernel merges: two clusters of two take 4 us
// longer than one of four with 40 rows, 8 with 64.
constexpr double kUsOfRowOfPairs = 0.08;
constexpr double kUsOfRowOfClusters = 0.06;

// Of a block whose keys are gathered, in the tile of 17 to 32 rows: with head dim 128 and pages of one key, of five
// slots 51 GB/s, where six read 61 (docs/performance-notes.md, step 292). With fewer key blocks than these in a tile,
// merging takes longer than a second block saves.
constexpr double kGatheringBlockBytesPerUs = 51e3;
constexpr int kBlocksWorthTwoGatherers = 12;

constexpr int kSmsForLargestCluster = 132;

int sms_in_clusters(PlanRequest const& request, int size) {
  int const sms = request.available_sms();
  return size <= 2 ? sms : sms * 7 / 8;
}

// Whether blocks whose keys are gathered, which wait for memory with fewer bytes on the way than others, are too few to
// read as fast as all.
bool gather_slowly(PlanRequest const& request, TileConfig const& tile, std::int64_t ctas) {
  bool const fewer_slots = kMostFewRows < tile.rows && tile.rows <= kMostSomeRows && tile.per_sm == 1;
  bool const is_long = request.blocks_of_tile(tile) >= kBlocksWorthTwoGatherers;
  return fewer_slots && is_long && gathers_keys(request.problem, tile) &&
         static_cast<double>(ctas) * kGatheringBlockBytesPerUs < kCardBytesPerUs;
}

// Why a tile is not shared by twice as many blocks; nullptr: it may be. Blocks are added while most of the SMs are idle
// and each has keys to read.
char const* limit_of_cluster(PlanRequest const& request, TileConfig const& tile, int size, int per_sm = 1) {
  std::int64_t const blocks = request.blocks_of_tile(tile);
  if (size >= blocks) { return "more blocks would have no keys"; }
  if (request.rows_of_few() > kMostFewRows && blocks * tile.keys <= kKeysReadWhileMerging) {
    return "merging would take longer than reading so few keys";
  }
  std::int64_t const ctas = size * request.tiles_of_few();
  if (!leaves_most_idle(request, ctas, per_sm) && !gather_slowly(request, tile, ctas)) {
    return "enough SMs read to be nearly as fast as all";
  }
  return reason_against_cluster(request, tile, 2 * size);
}

int forced_cluster(PlanRequest const& request, TileConfig const& tile) {
  int const size = request.forced.cluster;
  require(std::has_single_bit(static_cast<unsigned>(size)) && size <= kMostCluster,
          "cluster: must be a power of 2 up to ", kMostCluster, ", ", size, " was forced");
  bool const can_merge = may_share_tiles(request, tile) && request.rows_of_few() <= most_merge_rows(tile, size);
  require(can_merge || size == 1, "cluster: ", request.rows_of_few(), " rows are more than ",
          most_merge_rows(tile, size), ", or num_splits is 1");
  require(shares_columns(tile, size), "cluster: the ", tile.head_dim_v, " columns of the tile cannot be shared by ",
          size, " blocks, ", kMergeColumns, " at a time");
  return size;
}

// Of tiles that have `blocks` each.
bool cutting_pays_if_alike(PlanRequest const& request, TileConfig const& tile, int size, std::int64_t blocks) {
  std::int64_t const tiles = request.tiles_of_few();
  if (request.problem.num_splits == 1 || tiles * blocks > kMaxTiles) { return false; }
  std::int64_t const units = std::max<std::int64_t>(blocks, kLeastUnitsOfFewQueries);
  int const ctas = request.most_ctas(tile);
  int const cutting = units_of_cutting(may_merge_parts(request.problem, tile), request.problem.batch_invariant);
  return cutting_pays({tiles, tiles * units, static_cast<int>(units)}, size, ctas, enough_readers(ctas, false),
                      cutting);
}

// K and V of all sequences.
double bytes_of_keys(PlanRequest const& request, TileConfig const& tile, std::int64_t blocks) {
  return static_cast<double>(request.groups_of_few() * blocks * request.bytes_of_block(tile));
}

// What the blocks of all tiles read if memory does not bound it.
double bytes_of_blocks_per_us(PlanRequest const& request, TileConfig const& tile, std::int64_t blocks) {
  double const of_one = tile.per_sm > 1 ? kOneOfTwoBytesPerUs : kBlockBytesPerUs;
  if (tile.rows <= kMostFewRows) { return static_cast<double>(blocks) * of_one; }
  bool const long_steps = tile.per_sm == 1 && tile.keys == kKeysOfLongStep;
  double const by_steps = static_cast<double>(request.bytes_of_block(tile)) / kUsOfLongStep;
  std::int64_t const first = std::min<std::int64_t>(blocks, request.available_sms());
  return static_cast<double>(first) * (long_steps ? std::min(of_one, by_steps) : of_one) +
         static_cast<double>(blocks - first) * kSecondOfTwoBytesPerUs;
}

// Until these are read from memory, and by the blocks of all tiles.
double us_of_reading(PlanRequest const& request, TileConfig const& tile, TileShare const& share,
                     std::int64_t blocks_of_tile) {
  std::int64_t const tiles = request.tiles_of_few();
  std::int64_t const blocks = share.blocks() * tiles;
  double const bytes = bytes_of_keys(request, tile, blocks_of_tile);
  double const bytes_of_tiles = bytes * static_cast<double>(tiles) / static_cast<double>(request.groups_of_few());
  double by_blocks = bytes_of_blocks_per_us(request, tile, blocks);
  if (request.several_tiles > 0) { by_blocks = std::min(by_blocks, kSharedBytesPerUs); }
  if (share.size > kPortableCluster && share.clusters == 1 && tiles <= std::ssize(kLargeClustersBytesPerUs)) {
    return bytes_of_tiles / std::min(kLargeClustersBytesPerUs[tiles - 1], by_blocks);
  }
  std::int64_t const sms = request.available_sms();
  bool const may_pair = tile.per_sm > 1 && share.clusters == 1;  // on an SM
  bool const are_few = share.size < kPortableCluster ? 3 * blocks <= 2 * sms : 7 * blocks <= 4 * sms;
  bool const are_all = !may_pair && 6 * blocks >= 5 * sms;
  double const together = are_few || are_all ? kCardBytesPerUs : may_pair ? kUnevenPairsBytesPerUs : kUnevenBytesPerUs;
  return std::max(bytes / together, bytes_of_tiles / by_blocks);
}

// Over the lengths of us_of_share().
template <class UsOf>
double us_of_lengths(PlanRequest const& request, TileConfig const& tile, UsOf us_of) {
  double us = 0;
  for (int times = 1; times <= 64; times *= 4) {
    us += us_of(ceil_div<std::int64_t>(request.blocks_of_tile(tile), times));
  }
  return us;
}

// Instead of one cluster several smaller ones, where tiles are so few that this is faster.
TileShare best_share(PlanRequest const& request, TileConfig const& tile, TileShare const& one) {
  int const num_splits = request.problem.num_splits;
  TileShare best = one;
  double least = us_of_share(request, tile, best);
  for (int size = kPortableCluster; size >= 2; size /= 2) {
    std::int64_t const fitting = sms_in_clusters(request, size) / (size * request.tiles_of_few());
    TileShare const share{
        size, static_cast<int>(num_splits == 0 ? fitting : std::min<std::int64_t>(fitting, num_splits / size))};
    if (share.clusters < 2 || share.blocks() > request.blocks_of_tile(tile) || !shares_columns(tile, size)) {
      continue;
    }
    double const us = us_of_share(request, tile, share);
    if (us < least) {
      least = us;
      best = share;
    }
  }
  return best;
}

}  // namespace

bool leaves_most_idle(PlanRequest const& request, std::int64_t ctas, int per_sm) {
  std::int64_t const sms = request.available_sms();
  return per_sm == 1 ? 9 * ctas < 4 * sms : 2 * ctas <= sms;
}

int most_ctas_in_clusters(PlanRequest const& request, TileConfig const& tile, int size) {
  return sms_in_clusters(request, size) * tile.per_sm;
}

int most_cluster(PlanRequest const& request) {
  return request.device.sm_count < kSmsForLargestCluster ? kPortableCluster : kMostCluster;
}

bool runs_at_once(PlanRequest const& request, TileConfig const& tile, int size) {
  return size * request.tiles_of_few() <= most_ctas_in_clusters(request, tile, size);
}

bool shares_columns(TileConfig const& tile, int size) { return tile.head_dim_v % (size * kMergeColumns) == 0; }

int widest_cluster(PlanRequest const& request, TileConfig const& tile, int per_sm) {
  int size = 1;
  while (limit_of_cluster(request, tile, size, per_sm) == nullptr) { size *= 2; }
  return size;
}

std::int64_t most_bytes_at_once(PlanRequest const& request, TileShare const& share) {
  bool const several = share.clusters > 1 && share.size > 2;
  std::int64_t const kb = !request.problem.has_metadata ? 3072 : several ? 2560 : share.size > 1 ? 512 : 1024;
  return kb << 10;
}

std::int64_t share_bytes(PlanRequest const& request, TileConfig const& tile, int blocks) {
  return ceil_div<std::int64_t>(request.blocks_of_tile(tile), blocks) * request.bytes_of_block(tile);
}

bool may_share_tiles(PlanRequest const& request, TileConfig const& tile) {
  return request.problem.num_splits != 1 && !request.problem.batch_invariant &&
         request.rows_of_few() <= most_merge_rows(tile);
}

TileShare share_of_tile(PlanRequest const& request, TileConfig const& tile) {
  testing::ForcedPlan const& forced = request.forced;
  if (forced.cluster > 0 && !request.problem.batch_invariant) {
    int const size = forced_cluster(request, tile);
    return {size, size > 1 ? std::max(1, forced.num_splits / size) : 1};
  }
  std::int64_t const tiles = request.tiles_of_few();
  if (!may_share_tiles(request, tile) || tiles > request.most_ctas(tile)) { return {}; }
  int size = widest_cluster(request, tile);
  // One that is longer than the others is not to be read by as few blocks as suffice for all of them.
  auto const is_too_long = [&](std::int64_t share) {
    return share > most_bytes_at_once(request, {size, 1}) / tile.per_sm ||
           (share > kBytesWorthMoreReaders && leaves_most_idle(request, size * tiles, tile.per_sm));
  };
  while (is_too_long(share_bytes(request, tile, size)) && reason_against_cluster(request, tile, 2 * size) == nullptr) {
    size *= 2;
  }
  return best_share(request, tile, {size, 1});
}

std::string reason_for_share(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  if (request.forced.cluster > 0 && !request.problem.batch_invariant) { return "forced"; }
  if (request.problem.num_splits == 1) { return "as asked"; }
  if (request.problem.batch_invariant) {
    return concat("no sequence has more than the ", kFixedSplitKeys, " keys of one part");
  }
  if (!may_share_tiles(request, tile)) {
    return concat("a sequence has more query rows than the ", most_merge_rows(tile), " that blocks can merge");
  }
  if (request.tiles_of_few() > request.most_ctas(tile)) { return "there are more tiles than blocks"; }
  int const num_splits = request.problem.num_splits;
  if (share.clusters > 1) {
    bool const by_splits = num_splits != 0 && share.size * (share.clusters + 1) > num_splits;
    return by_splits ? "num_splits allows no more" : "more would not all run at once";
  }
  return limit_of_cluster(request, tile, share.size);
}

double us_of_tiles(PlanRequest const& request, TileConfig const& tile, TileShare const& share, std::int64_t blocks) {
  bool const by_one = share.clusters == 1 || blocks <= kFewBlocksOfShare * share.size;
  double ends = by_one ? kEndsOfOneUs : share.size == 2 ? kEndsOfPairsUs : kEndsOfSeveralUs;
  if (!by_one && tile.rows > kMostFewRows) {
    std::int64_t const rows = std::min<std::int64_t>(request.rows_of_few(), tile.rows);
    ends += static_cast<double>(rows) * (share.size == 2 ? kUsOfRowOfPairs : kUsOfRowOfClusters);
  }
  return ends + us_of_reading(request, tile, by_one ? TileShare{share.size, 1} : share, blocks);
}

double us_of_whole_tiles_of_few(PlanRequest const& request) {
  TileRow const& row = request.tile_row(TileUse::kDecode);
  // Of a full tile, whatever the bound on queries is.
  std::int64_t const keys =
      request.most_keys_of_queries(tile_shape(row.tile, request.scheduled_packing(), false).queries);
  std::int64_t const blocks = ceil_div<std::int64_t>(keys, row.tile.keys);
  double const us_of_block = row.cost == kUnknownCost
                                 ? static_cast<double>(request.bytes_of_block(row.tile)) / kBlockOf64RowsBytesPerUs
                                 : row.cost.block * 1e-3;
  double const of_memory = bytes_of_keys(request, row.tile, blocks) / kCardBytesPerUs;
  double const whole = kEndsOfOneUs + std::max(of_memory, static_cast<double>(blocks) * us_of_block);
  double const cut = kScheduleUs + kEndsOfUnitsUs + of_memory;
  return request.problem.ragged && request.problem.num_splits != 1 ? std::min(whole, cut) : whole;
}

double us_of_share(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  return us_of_lengths(request, tile, [&](std::int64_t blocks) { return us_of_tiles(request, tile, share, blocks); });
}

double us_by_schedule(PlanRequest const& request, TileConfig const& tile) {
  TileShare const one{widest_cluster(request, tile, tile.per_sm), 1};
  return us_of_lengths(request, tile, [&](std::int64_t blocks) {
    if (!cutting_pays_if_alike(request, tile, one.size, blocks)) {
      return kScheduleUs + us_of_tiles(request, tile, one, blocks);
    }
    return kScheduleUs + kEndsOfUnitsUs + bytes_of_keys(request, tile, blocks) / kCardBytesPerUs;
  });
}

char const* reason_against_cluster(PlanRequest const& request, TileConfig const& tile, int size) {
  int const num_splits = request.problem.num_splits;
  if (size > most_cluster(request)) { return "no larger cluster runs on this card"; }
  if (num_splits != 0 && size > num_splits) { return "num_splits allows no more"; }
  if (!shares_columns(tile, size)) { return "more blocks cannot share the columns of a tile"; }
  // Of a call that has tiles of many queries, too, those of few are full.
  std::int64_t const rows = std::min<std::int64_t>(request.rows_of_few(), tile.rows);
  if (rows > most_merge_rows(tile, size)) { return "more blocks cannot merge so many rows"; }
  return runs_at_once(request, tile, size) ? nullptr : "larger clusters would not all run at once";
}

bool cutting_pays_if_alike(PlanRequest const& request, TileConfig const& tile, int size) {
  return cutting_pays_if_alike(request, tile, size, request.blocks_of_tile(tile));
}

}  // namespace hopper_attention
