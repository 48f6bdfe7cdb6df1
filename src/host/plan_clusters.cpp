// Calls of few queries: does each tile get thread blocks of its own, which merge in shared memory, and how many?
#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "host/plan_request.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {
namespace {

// Clusters of more than 8 blocks are not portable: a card with SMs switched off may have no GPC with 16 of them.
constexpr int kPortableCluster = 8;
constexpr int kSmsForLargestCluster = 132;

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

// Of K and V for a block, where all tiles are taken at once by clusters of `size`: beyond, a schedule that balances
// them is better where lengths differ (4 of up to 14k keys, 64/8, d64 27.2 -> 19.6 us). It takes up to 2 us, and 5 more
// if it has to be made first. Tiles with a block each are so many that they read as fast as all.
std::int64_t most_bytes_at_once(PlanRequest const& request, int size) {
  std::int64_t const kb = !request.problem.has_metadata ? 3072 : size > 1 ? 512 : 1024;
  return kb << 10;
}
// Where several clusters take each, which are all SMs: four of 64k keys, 8/1 heads, behind a bound of 128k take 39 us
// so and 44 or 49 by a schedule, one of 64k beside three of 1k 23.4 and 22.1, one of 100k 32.2 and 26.3. Clusters of 2
// take 3 us longer than a schedule's if sequences are short.
constexpr std::int64_t kMostBytesAtOnceOfSeveral = std::int64_t{2560} << 10;

// And for which blocks are added until each SM has as many as it holds: of head dim 64, one alone reads half as fast as
// two. With shorter shares more is lost, since the blocks of the next call have no room beside them.
constexpr std::int64_t kBytesWorthMoreReaders = std::int64_t{384} << 10;

// The share of a block may be so many times kMostBytesOfShare where no tile is longer than another.
constexpr int kSharesOfOneSequence = 4;

// Four ninths of the SMs read nearly as fast as all; where an SM holds two blocks, of which one reads half as fast as
// both, as many blocks as SMs do.
bool leaves_most_idle(PlanRequest const& request, std::int64_t ctas, int per_sm = 1) {
  std::int64_t const sms = request.available_sms();
  return per_sm == 1 ? 9 * ctas < 4 * sms : 2 * ctas <= sms;
}

// A cluster runs within a group of SMs (GPC) and leaves some of them over: 132 SMs hold 66 clusters of 2, 30 of 4, 15
// of 8 and 7 of 16.
int sms_in_clusters(PlanRequest const& request, int size) {
  int const sms = request.available_sms();
  return size <= 2 ? sms : sms * 7 / 8;
}
int most_ctas_in_clusters(PlanRequest const& request, TileConfig const& tile, int size) {
  return sms_in_clusters(request, size) * tile.per_sm;
}

int most_cluster(PlanRequest const& request) {
  return request.device.sm_count < kSmsForLargestCluster ? kPortableCluster : kMostCluster;
}

// A cluster for each tile.
bool runs_at_once(PlanRequest const& request, TileConfig const& tile, int size) {
  return size * request.tiles_of_few() <= most_ctas_in_clusters(request, tile, size);
}

// Whether the clusters of two calls run beside each other. Where they do not, half of the next call's would wait for
// this one's to end, and then run on SMs with neighbours.
bool clusters_leave_room(PlanRequest const& request, TileConfig const& tile, int size, std::int64_t ctas) {
  return size == 1 || 2 * ctas <= most_ctas_in_clusters(request, tile, size);
}

// Each block merges its own columns of the tile.
bool shares_columns(TileConfig const& tile, int size) { return tile.head_dim_v % (size * kMergeColumns) == 0; }

int forced_cluster(PlanRequest const& request, TileConfig const& tile, bool may_share) {
  int const size = request.forced.cluster;
  require(std::has_single_bit(static_cast<unsigned>(size)) && size <= kMostCluster,
          "cluster: must be a power of 2 up to ", kMostCluster, ", ", size, " was forced");
  require(may_share || size == 1, "cluster: ", request.rows_of_sequence(), " rows are more than ", kMostMergeRows,
          ", or num_splits is 1");
  require(shares_columns(tile, size), "cluster: the ", tile.head_dim_v, " columns of the tile cannot be shared by ",
          size, " blocks, ", kMergeColumns, " at a time");
  return size;
}

// Why a tile is not shared by twice as many blocks; nullptr: it may be. Blocks are added while most of the SMs are idle
// and each has keys to read.
char const* limit_of_cluster(PlanRequest const& request, TileConfig const& tile, int size, int per_sm = 1) {
  if (size >= request.blocks_of_tile(tile)) { return "more blocks would have no keys"; }
  if (!leaves_most_idle(request, size * request.tiles_of_few(), per_sm)) {
    return "enough SMs read to be nearly as fast as all";
  }
  return reason_against_cluster(request, tile, 2 * size);
}

int widest_cluster(PlanRequest const& request, TileConfig const& tile, int per_sm = 1) {
  int size = 1;
  while (limit_of_cluster(request, tile, size, per_sm) == nullptr) { size *= 2; }
  return size;
}

// Of K and V that the longest tile leaves to each of `blocks`.
std::int64_t share_bytes(PlanRequest const& request, TileConfig const& tile, int blocks) {
  return ceil_div<std::int64_t>(request.blocks_of_tile(tile), blocks) * request.bytes_of_block(tile);
}

// How many blocks take a tile: some clusters of some blocks each.
struct TileShare {
  int size = 1;
  int clusters = 1;

  int blocks() const { return size * clusters; }
};

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

// What the blocks of all tiles read in a us.
double bytes_per_us(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  std::int64_t const tiles = request.tiles_of_few();
  std::int64_t const blocks = share.blocks() * tiles;
  double const by_blocks = static_cast<double>(blocks) * (tile.per_sm > 1 ? kOneOfTwoBytesPerUs : kBlockBytesPerUs);
  if (share.size > kPortableCluster && share.clusters == 1 && tiles <= std::ssize(kLargeClustersBytesPerUs)) {
    return std::min(kLargeClustersBytesPerUs[tiles - 1], by_blocks);
  }
  std::int64_t const sms = request.available_sms();
  bool const may_pair = tile.per_sm > 1 && share.clusters == 1;  // on an SM
  bool const are_few = share.size < kPortableCluster ? 3 * blocks <= 2 * sms : 7 * blocks <= 4 * sms;
  bool const are_all = !may_pair && 6 * blocks >= 5 * sms;
  double const together = are_few || are_all ? kCardBytesPerUs : may_pair ? kUnevenPairsBytesPerUs : kUnevenBytesPerUs;
  return std::min(together, by_blocks);
}

double us_of_tiles(PlanRequest const& request, TileConfig const& tile, TileShare const& share, std::int64_t blocks) {
  bool const by_one = share.clusters == 1 || blocks <= kFewBlocksOfShare * share.size;
  double const ends = by_one ? kEndsOfOneUs : share.size == 2 ? kEndsOfPairsUs : kEndsOfSeveralUs;
  double const bytes = static_cast<double>(request.tiles_of_few() * blocks * request.bytes_of_block(tile));
  return ends + bytes / bytes_per_us(request, tile, by_one ? TileShare{share.size, 1} : share);
}

// Over tiles as long as may be, and a quarter, a sixteenth and a 64th as long: a bound may be what the page table has
// room for.
template <class UsOf>
double us_of_lengths(PlanRequest const& request, TileConfig const& tile, UsOf us_of) {
  double us = 0;
  for (int times = 1; times <= 64; times *= 4) {
    us += us_of(ceil_div<std::int64_t>(request.blocks_of_tile(tile), times));
  }
  return us;
}
double us_of_share(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  return us_of_lengths(request, tile, [&](std::int64_t blocks) { return us_of_tiles(request, tile, share, blocks); });
}

// The same where a schedule cuts tiles that are alike, if that pays, and otherwise a cluster takes each.
double us_by_schedule(PlanRequest const& request, TileConfig const& tile) {
  TileShare const one{widest_cluster(request, tile, tile.per_sm), 1};
  return us_of_lengths(request, tile, [&](std::int64_t blocks) {
    double const bytes = static_cast<double>(request.tiles_of_few() * blocks * request.bytes_of_block(tile));
    bool const cuts = cutting_pays_if_alike(request, tile, one.size, blocks);
    return kScheduleUs + (cuts ? kEndsOfUnitsUs + bytes / kCardBytesPerUs : us_of_tiles(request, tile, one, blocks));
  });
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

TileShare share_of_tile(PlanRequest const& request, TileConfig const& tile, bool may_share) {
  testing::ForcedPlan const& forced = request.forced;
  if (forced.cluster > 0 && !request.problem.batch_invariant) {
    int const size = forced_cluster(request, tile, may_share);
    return {size, size > 1 ? std::max(1, forced.num_splits / size) : 1};
  }
  std::int64_t const tiles = request.tiles_of_few();
  if (!may_share || tiles > request.most_ctas(tile)) { return {}; }
  int size = widest_cluster(request, tile);
  // One that is longer than the others is not to be read by as few blocks as suffice for all of them.
  auto const is_too_long = [&](std::int64_t share) {
    return share > most_bytes_at_once(request, size) / tile.per_sm ||
           (share > kBytesWorthMoreReaders && leaves_most_idle(request, size * tiles, tile.per_sm));
  };
  while (is_too_long(share_bytes(request, tile, size)) && reason_against_cluster(request, tile, 2 * size) == nullptr) {
    size *= 2;
  }
  return best_share(request, tile, {size, 1});
}

bool may_share_tiles(PlanRequest const& request) {
  return request.problem.num_splits != 1 && !request.problem.batch_invariant &&
         request.rows_of_sequence() <= kMostMergeRows;
}

// What stopped share_of_tile from taking more blocks for a tile.
std::string reason_for_share(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  if (request.forced.cluster > 0 && !request.problem.batch_invariant) { return "forced"; }
  if (request.problem.num_splits == 1) { return "as asked"; }
  if (request.problem.batch_invariant) {
    return concat("no sequence has more than the ", kFixedSplitKeys, " keys of one part");
  }
  if (!may_share_tiles(request)) {
    return concat("a sequence has more query rows than the ", kMostMergeRows, " that blocks can merge");
  }
  if (request.tiles_of_few() > request.most_ctas(tile)) { return "there are more tiles than blocks"; }
  int const num_splits = request.problem.num_splits;
  if (share.clusters > 1) {
    bool const by_splits = num_splits != 0 && share.size * (share.clusters + 1) > num_splits;
    return by_splits ? "num_splits allows no more" : "more would not all run at once";
  }
  return limit_of_cluster(request, tile, share.size);
}

}  // namespace

char const* reason_against_cluster(PlanRequest const& request, TileConfig const& tile, int size) {
  int const num_splits = request.problem.num_splits;
  if (size > most_cluster(request)) { return "no larger cluster runs on this card"; }
  if (num_splits != 0 && size > num_splits) { return "num_splits allows no more"; }
  if (!shares_columns(tile, size)) { return "more blocks cannot share the columns of a tile"; }
  return runs_at_once(request, tile, size) ? nullptr : "larger clusters would not all run at once";
}

bool cutting_pays_if_alike(PlanRequest const& request, TileConfig const& tile, int size) {
  return cutting_pays_if_alike(request, tile, size, request.blocks_of_tile(tile));
}

namespace {

// With batch_invariant, of tiles that may have several parts: blocks that share each tile, whose parts follow from it
// alone, one each or a group of them each; 0: a schedule is better. A block for each part takes the least time. One for
// each group reads 4,096 keys, which is as fast as memory allows where there are as many as suffice for that.
int cluster_for_fixed_parts(PlanRequest const& request, TileConfig const& tile) {
  testing::ForcedPlan const& forced = request.forced;
  bool const is_forced =
      request.forces_tile() || forced.packed_heads != 0 || forced.heads_per_pass != 0 || forced.cluster != 0;
  if (request.decode_use() != TileUse::kFewRows || request.problem.mask.cp_world > 1 || is_forced) { return 0; }
  // Of any sequence: one that is shorter may see more keys, the whole of a chunk instead of the begin of one.
  std::int64_t const blocks = ceil_div<std::int64_t>(request.most_keys_of_tile(tile), tile.keys);
  int const parts = fixed_parts(static_cast<int>(blocks), kFixedSplitKeys / tile.keys);
  int const groups = ceil_div(parts, kPartsOfGroup);
  auto const size_for = [](int count) { return static_cast<int>(std::bit_ceil(static_cast<unsigned>(count))); };
  auto const fits = [&](int size) {
    return size <= most_cluster(request) && shares_columns(tile, size) && runs_at_once(request, tile, size);
  };
  if (fits(size_for(parts))) { return size_for(parts); }
  bool const suffice = !leaves_most_idle(request, groups * request.tiles_of_few(), tile.per_sm);
  return suffice && fits(size_for(groups)) ? size_for(groups) : 0;
}

}  // namespace

bool fits_one_split(PlanRequest const& request, TileConfig const& tile) {
  return request.problem.mask.cp_world <= 1 && request.most_keys_of_tile(tile) <= kFixedSplitKeys;
}

namespace {

// Whether clusters of `share`, as long as tiles are alike, are as good as what a schedule would choose.
bool is_balanced(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  bool const one = request.problem.batch == 1;
  if (!one && share.clusters == 1) { return !cutting_pays_if_alike(request, tile, share.size); }
  // Without metadata the call would have to make the schedule first.
  return !request.problem.has_metadata || us_of_share(request, tile, share) <= us_by_schedule(request, tile);
}

}  // namespace

// Thread blocks that share each tile, where there is one for each sequence and group of heads and all of them run at
// once, or are short, or are drawn; 0: a schedule is better. Sequences that are much longer than the others would leave
// most of the card idle, which is bounded by what a block may have to read.
int cluster_size(PlanRequest const& request) {
  Problem const& problem = request.problem;
  testing::ForcedPlan const& forced = request.forced;
  bool const forces_splits = forced.num_splits >= 2 && forced.cluster <= 0;
  if (!request.decodes() || forces_splits || forced.ctas > 0 || forced.cluster < 0) { return 0; }
  if (request.mixes_decode_tiles()) { return 0; }
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  if (problem.batch_invariant && !fits_one_split(request, tile)) { return cluster_for_fixed_parts(request, tile); }
  TileShare const share = share_of_tile(request, tile, may_share_tiles(request));
  if (forced.cluster > 0) { return share.size; }  // 1 with batch_invariant, whose tiles are whole here
  if (request.forces_tile() || forced.packed_heads != 0 || forced.heads_per_pass != 0) { return 0; }

  std::int64_t const tiles = request.tiles_of_few();
  std::int64_t const blocks = request.blocks_of_tile(tile);
  if (tiles > request.most_ctas(tile)) {
    bool const in_any_order = blocks <= kMostBlocksOfShortTile || (problem.batch_invariant && !problem.ragged);
    return in_any_order || (problem.ragged && whole_tiles_suffice(request)) ? 1 : 0;
  }
  if (problem.batch_invariant) { return 1; }
  std::int64_t const bytes = share_bytes(request, tile, share.blocks());
  if (problem.num_splits == 1) { return bytes <= kMostBytesOfShare ? share.size : 0; }
  // A schedule could use the SMs that few clusters leave idle.
  bool const most_idle = leaves_most_idle(request, share.blocks() * tiles);
  bool const one = problem.batch == 1;
  bool const several = share.clusters > 1 && share.size > 2;
  std::int64_t const most =
      one         ? kSharesOfOneSequence * kMostBytesOfShare / (most_idle ? 2 : 1)
      : most_idle ? kMostBytesOfShare / 2
                  : std::max(most_bytes_at_once(request, share.size), several ? kMostBytesAtOnceOfSeveral : 0);
  return bytes <= most && is_balanced(request, tile, share) ? share.size : 0;
}

// Long tiles that are more than the blocks of the grid, where a schedule has their order.
bool draws_tiles(PlanRequest const& request) {
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  return request.problem.ragged && request.tiles_of_few() > request.most_ctas(tile) &&
         request.blocks_of_tile(tile) > kMostBlocksOfShortTile;
}

namespace {

// Of a call whose schedule decides between clusters of `size` and units.
int ctas_by_schedule(PlanRequest const& request, TileConfig const& tile, int size) {
  if (size > 1) {
    int const clusters = most_ctas_in_clusters(request, tile, size) / size;
    // A larger one has a GPC to itself. Times are as if each half of the card took at most half of what memory gives:
    // units for seven GPCs are done later than for six (docs/performance-notes.md, step 204).
    int const even = clusters - clusters % 2;
    return size * (size > kPortableCluster && even >= request.tiles_of_few() ? even : clusters);
  }
  bool const alone = request.tiles_of_few() <= request.available_sms();  // none shares its SM with another
  return alone ? std::min(request.most_ctas(tile), request.available_sms()) : request.most_ctas(tile);
}

}  // namespace

FewReaders readers_of_few(Problem problem, DeviceInfo const& device) {
  problem.seqlen_q = 1;
  problem.seqlen_k = 1 << 24;
  problem.num_splits = 0;
  problem.sm_margin = 0;
  problem.mask = {};
  testing::ForcedPlan const forced;
  PlanRequest const request{problem, device, forced};
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  FewReaders readers{.ctas = request.most_ctas(tile)};
  if (problem.batch_invariant) { return readers; }
  if (request.tiles_of_few() <= readers.ctas) { readers.cluster = widest_cluster(request, tile, tile.per_sm); }
  int const ctas = ctas_by_schedule(request, tile, readers.cluster);
  if (request.decode_use() == TileUse::kFewRows) { readers.of_few_tiles = ctas; }
  return readers;
}

void leave_clusters_to_schedule(PlanRequest const& request, Plan& plan) {
  testing::ForcedPlan const& forced = request.forced;
  bool const is_forced = forced.cluster != 0 || forced.num_splits >= 2 || forced.ctas > 0 || request.forces_tile();
  if (!request.problem.ragged || plan.kernels.size() != 1 || is_forced) { return; }
  KernelPlan& kernel = plan.kernels.front();
  std::int64_t const tiles = request.tiles_of_few();
  if (plan.fixed_splits) {
    // A block merges the parts of whole tiles as the combine kernel would. That of 64 rows has no registers for it.
    plan.draws_if_whole = kernel.may_split && request.decode_use() == TileUse::kFewRows;
    if (plan.draws_if_whole) {
      because(plan, "tiles",
              "drawn whole, the longest first, if none is so long that the schedule shares out its parts");
    }
    return;
  }
  plan.draws_if_whole = tiles > request.most_ctas(kernel.tile);
  if (plan.draws_if_whole) {
    because(plan, "tiles", "drawn whole, the longest first",
            kernel.may_split ? ", if none is so long that the schedule cuts it" : "");
    return;
  }
  int const size = may_share_tiles(request) ? widest_cluster(request, kernel.tile, kernel.tile.per_sm) : 1;
  plan.cluster_if_alike = size;
  // Where two blocks have room on an SM, those of the next call would begin beside this one's, on some SMs two of them.
  plan.next_starts_early = kernel.tile.per_sm == 1 && clusters_leave_room(request, kernel.tile, size, size * tiles);
  int const ctas = ctas_by_schedule(request, kernel.tile, size);
  kernel.ctas = size > 1 ? ctas : std::min(kernel.ctas, ctas);
  if (kernel.may_split) { kernel.partial_slots = 2 * std::int64_t{kernel.ctas}; }
  because(plan, "tiles", size > 1 ? concat("each by a cluster of ", size, " blocks") : "each by a block",
          kernel.may_split ? " if the schedule finds no sequence much longer than the others" : "");
}

void plan_clusters(PlanRequest const& request, Plan& plan) {
  take_scheduled_packing(request, plan);
  KernelPlan& kernel = choose_kernel(request, plan, request.decode_use(), false);
  int const most = request.most_ctas(kernel.tile);
  TileShare const share = share_of_tile(request, kernel.tile, may_share_tiles(request));
  int const of_tile = share.clusters;
  std::int64_t const ctas = kernel.most_tiles * plan.cluster * of_tile;
  kernel.ctas = static_cast<int>(plan.cluster * of_tile > 1 ? ctas : std::min<std::int64_t>(ctas, most));
  because(plan, "grid", counted(kernel.ctas, "block"), " of ", kernel.threads, " threads for ",
          plan.listed ? "up to " : "", counted(kernel.most_tiles, "tile"));
  if (of_tile > 1) {
    kernel.may_split = true;
    kernel.partial_rows = static_cast<int>(request.rows_of_sequence());
    kernel.partial_slots = kernel.most_tiles * of_tile;
  }
  // A combine kernel lets the next call begin: one of 32k keys takes 12.6 us instead of 14.4, though clusters of that
  // call have no room before this one's end.
  plan.starts_early = of_tile > 1 || clusters_leave_room(request, kernel.tile, plan.cluster, kernel.ctas);
  plan.num_splits = plan.cluster * of_tile;
  std::string const reason = reason_for_share(request, kernel.tile, share);
  because(plan, "splits",
          plan.fixed_splits && plan.cluster > 1
              ? concat("those of few queries with more than ", kFixedSplitKeys,
                       " keys, in parts that follow from these, each tile by a cluster of ", plan.cluster,
                       " blocks, which merge them in shared memory")
          : plan.cluster == 1 ? concat("1: ", reason)
          : of_tile == 1
              ? concat("each tile by a cluster of ", plan.cluster,
                       " blocks, which merge their parts in shared memory: ", reason)
              : concat("each tile by ", of_tile, " clusters of ", plan.cluster,
                       " blocks, which merge their parts in shared memory, and a kernel those of clusters: ", reason));
  choose_workspace(request.problem, plan);
}

}  // namespace hopper_attention
