// How many thread blocks take a tile of few queries: a model of what that takes, and what bounds it.
#pragma once

#include <cstdint>
#include <string>

#include "host/plan_request.h"

namespace hopper_attention {

// Clusters of more than 8 blocks are not portable: a card with SMs switched off may have no GPC with 16 of them.
inline constexpr int kPortableCluster = 8;

// How many blocks take a tile: some clusters of some blocks each.
struct TileShare {
  int size = 1;
  int clusters = 1;

  int blocks() const { return size * clusters; }
};

// Four ninths of the SMs read nearly as fast as all; where an SM holds two blocks, of which one reads half as fast as
// both, as many blocks as SMs do.
bool leaves_most_idle(PlanRequest const& request, std::int64_t ctas, int per_sm = 1);

// A cluster runs within a group of SMs (GPC) and leaves some of them over: 132 SMs hold 66 clusters of 2, 30 of 4, 15
// of 8 and 7 of 16.
int most_ctas_in_clusters(PlanRequest const& request, TileConfig const& tile, int size);
int most_cluster(PlanRequest const& request);
// A cluster for each tile.
bool runs_at_once(PlanRequest const& request, TileConfig const& tile, int size);
// Each block merges its own columns of the tile.
bool shares_columns(TileConfig const& tile, int size);
int widest_cluster(PlanRequest const& request, TileConfig const& tile, int per_sm = 1);

// Of K and V for a block, where all tiles are taken at once: beyond, a schedule that balances them is better where
// lengths differ (4 of up to 14k keys, 64/8, d64 27.2 -> 19.6 us). It takes up to 2 us, and 5 more if it has to be made
// first. Tiles with a block each are so many that they read as fast as all. So do several clusters for each tile: four
// of 64k keys, 8/1 heads, behind a bound of 128k take 39 us by these and 44 or 49 by a schedule, one of 64k beside
// three of 1k 23.4 and 22.1, one of 100k 32.2 and 26.3. Those of 2 take 3 us longer than a schedule's if sequences are
// short.
std::int64_t most_bytes_at_once(PlanRequest const& request, TileShare const& share);
// Of K and V that the longest tile leaves to each of `blocks`.
std::int64_t share_bytes(PlanRequest const& request, TileConfig const& tile, int blocks);

bool may_share_tiles(PlanRequest const& request, TileConfig const& tile);
// One cluster for each tile, or several smaller ones where tiles are so few that this is faster.
TileShare share_of_tile(PlanRequest const& request, TileConfig const& tile);
// What stopped share_of_tile from taking more blocks for a tile.
std::string reason_for_share(PlanRequest const& request, TileConfig const& tile, TileShare const& share);

// Why tiles are not shared by clusters of `size` blocks; nullptr: they may be.
char const* reason_against_cluster(PlanRequest const& request, TileConfig const& tile, int size);
// Whether tiles that are all as long as they may be had better be cut than taken by `size` blocks each.
bool cutting_pays_if_alike(PlanRequest const& request, TileConfig const& tile, int size);

// What tiles of so many key blocks each take, in us.
double us_of_tiles(PlanRequest const& request, TileConfig const& tile, TileShare const& share, std::int64_t blocks);

// The same of a tile of 64 rows for each sequence and group of heads, as long as may be, a block for each or cut where
// a schedule can say so.
double us_of_whole_tiles_of_few(PlanRequest const& request);

// What tiles take that are as long as may be, and a quarter, a sixteenth and a 64th as long, together: a bound may be
// what the page table has room for. The same where a schedule cuts tiles that are alike, if that pays, and otherwise a
// cluster takes each.
double us_of_share(PlanRequest const& request, TileConfig const& tile, TileShare const& share);
double us_by_schedule(PlanRequest const& request, TileConfig const& tile);

}  // namespace hopper_attention
