// How many heads run together: so few that all tiles of each read its K and V at once, or that these stay in L2 until
// they are read again, and so many that all blocks get the same work.
#pragma once

#include <cstdint>
#include <vector>

namespace hopper_attention {

struct TileOrder {
  int heads_per_pass = 1;
  double imbalance = 1.0;  // work of the busiest block over the mean; 1 where it was not computed
  bool at_once = false;    // so few that all tiles of each run at once
};

struct TileOrderProblem {
  int sequence_heads;  // batch * head groups
  int sharing;         // head groups that read the same K and V; the answer is a multiple
  int in_l2;           // head groups whose K and V fit in L2
  int ctas;
  bool descending;          // as in make_scheduler_params()
  double memory_share = 0;  // of the call's time, what memory takes to bring all tensors once
  std::vector<int> work;    // of the tile of each query block, in any unit
};

// Tries the widths around `in_l2` against the schedule itself (tile_at(), static over the blocks). A width that does
// not fit in L2 is worth taking only for a better balance. Where the tiles of so many heads take rounds of the grid, or
// most of one, and memory takes much of the call's time, so few heads are taken that all tiles of each run at once.
// Problems of very many tiles are balanced at any width and are not computed.
TileOrder choose_tile_order(TileOrderProblem const& problem);

}  // namespace hopper_attention
