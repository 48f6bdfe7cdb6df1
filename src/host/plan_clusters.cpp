// Calls of few queries: does each tile get thread blocks of its own, which merge in shared memory, and how many?
#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "host/plan_request.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

// Clusters of more than 8 blocks are not portable: a card with SMs switched off may have no GPC with 16 of them.
constexpr int kPortableCluster = 8;
constexpr int kSmsForLargestCluster = 132;

// Tiles with at most so many key blocks are alike enough to be taken in turn.
constexpr int kMostBlocksOfShortTile = 4;

// Four ninths of the SMs read nearly as fast as all.
bool leaves_most_idle(PlanRequest const& request, std::int64_t ctas) { return 9 * ctas < 4 * request.available_sms(); }

// A cluster runs within a group of SMs (GPC) and leaves some of them over: 132 SMs hold 66 clusters of 2, 30 of 4, 15
// of 8 and 7 of 16.
int most_ctas_in_clusters(PlanRequest const& request, TileConfig const& tile, int size) {
  int const sms = request.available_sms();
  return (size <= 2 ? sms : sms * 7 / 8) * tile.per_sm;
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

// Blocks are added while most of the SMs are idle and each has keys to read.
int widest_cluster(PlanRequest const& request, TileConfig const& tile, std::int64_t tiles, std::int64_t blocks) {
  int const num_splits = request.problem.num_splits;
  int const possible = request.device.sm_count < kSmsForLargestCluster ? kPortableCluster : kMostCluster;
  int const most = num_splits == 0 ? possible : std::min(possible, num_splits);
  int size = 1;
  while (2 * size <= most && shares_columns(tile, 2 * size) && size < blocks &&
         leaves_most_idle(request, size * tiles) &&
         2 * size * tiles <= most_ctas_in_clusters(request, tile, 2 * size)) {
    size *= 2;
  }
  return size;
}

}  // namespace

// Thread blocks that share each tile, where there is one for each sequence and group of heads and all of them run at
// once or are short; 0: a schedule is better. Sequences that are much longer than the others would leave most of the
// card idle, which is bounded by what a block may have to read.
int cluster_size(PlanRequest const& request) {
  Problem const& problem = request.problem;
  testing::ForcedPlan const& forced = request.forced;
  if (!request.decodes() || problem.batch_invariant || forced.num_splits >= 2 || forced.ctas > 0 ||
      forced.cluster < 0) {
    return 0;
  }
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  bool const may_share = problem.num_splits != 1 && request.rows_of_sequence() <= kMostMergeRows;
  if (forced.cluster > 0) { return forced_cluster(request, tile, may_share); }
  if (request.forces_tile() || forced.packed_heads != 0 || forced.heads_per_pass != 0) { return 0; }

  std::int64_t const tiles = std::int64_t{problem.batch} * request.scheduled_groups();
  std::int64_t const blocks = request.blocks_of_tile(tile);
  if (tiles > request.most_ctas(tile)) { return blocks <= kMostBlocksOfShortTile ? 1 : 0; }
  int const size = may_share ? widest_cluster(request, tile, tiles, blocks) : 1;
  // A schedule could use the SMs that few clusters leave idle, if it may split.
  bool const most_idle = leaves_most_idle(request, size * tiles) && problem.num_splits != 1;
  std::int64_t const bytes = ceil_div<std::int64_t>(blocks, size) * request.bytes_of_block(tile);
  return bytes <= (most_idle ? kMostBytesOfShare / 2 : kMostBytesOfShare) ? size : 0;
}

void plan_clusters(PlanRequest const& request, Plan& plan) {
  take_scheduled_packing(request, plan);
  KernelPlan& kernel = add_kernel(request, plan, KernelFamily::kDecode, false);
  int const most = request.most_ctas(kernel.tile);
  kernel.ctas = plan.cluster > 1 ? static_cast<int>(kernel.most_tiles * plan.cluster) : std::min(kernel.ctas, most);
  // Half of the clusters of the next call would wait for this one's to end, and then run on SMs with neighbours.
  plan.starts_early = plan.cluster == 1 || 2 * kernel.ctas <= most_ctas_in_clusters(request, kernel.tile, plan.cluster);
  plan.num_splits = plan.cluster;
  because(plan, "splits",
          plan.cluster == 1 ? std::string("1: ") + (request.problem.num_splits == 1 ? "as asked" : "one is enough")
                            : concat("each tile by a cluster of ", plan.cluster,
                                     " blocks, which merge their parts in shared memory"));
  because(plan, "workspace", "0 bytes: nothing is merged afterwards");
}

}  // namespace hopper_attention
