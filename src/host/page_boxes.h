// How a kernel reads keys that lie in pages.
#pragma once

#include <numeric>

#include "hopper_attention/forward.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

// Keys of a page that a TMA box brings: at least as many as the swizzle's pattern has rows, and as divide pages and
// blocks; no more where a block must hold what it has of a page before a window's first key. 1: rows are gathered.
inline int keys_of_box(Problem const& problem, TileConfig const& tile) {
  constexpr int kLeast = 8;
  int const most = has_one_block(tile) ? kMostKeysOfWindowBox : 64;
  int const keys = std::gcd(std::gcd(problem.page_size, tile.keys), most);
  return keys < kLeast ? 1 : keys;
}

inline bool gathers_keys(Problem const& problem, TileConfig const& tile) {
  return problem.keys == KeyLayout::kPaged && keys_of_box(problem, tile) == 1;
}

}  // namespace hopper_attention
