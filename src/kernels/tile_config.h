// The tile of every kernel: the only place where tile sizes stand. The planner chooses from this table and the kernels are
// instantiated from it.
#pragma once

#include <array>

#include "hopper_attention/types.h"

namespace hopper_attention {

// Why one head dim can have several tiles. A mask that cuts blocks wants square tiles, full attention wide ones.
enum class MaskClass : std::uint8_t { kFull, kMasked };

struct TileRow {
  MaskClass mask;
  TileConfig tile;
  char const* why;
};

// Rows of one head dim and mask class stand once. Figures: TFLOP/s, bf16, 16k tokens, H200 (docs/performance-notes.md).
inline constexpr std::array kTiles{
    TileRow{MaskClass::kFull, {192, 128, 64, 64, 4}, "three warpgroups hide the exponentials of d 64"},
    TileRow{MaskClass::kMasked, {192, 128, 64, 64, 4}, "three warpgroups hide the exponentials of d 64"},
    TileRow{MaskClass::kFull, {128, 128, 128, 128, 5}, "two warpgroups; O has its own buffer"},
    TileRow{MaskClass::kMasked, {128, 128, 128, 128, 5}, "square: a causal tile wastes half a block"},
};

// The smallest head dims with a row that hold (head_dim, head_dim_v); nullptr if none does.
constexpr TileRow const* find_tile(int head_dim, int head_dim_v, MaskClass mask) {
  TileRow const* best = nullptr;
  for (TileRow const& row : kTiles) {
    TileConfig const& t = row.tile;
    if (row.mask != mask || t.head_dim < head_dim || t.head_dim_v < head_dim_v) { continue; }
    if (best == nullptr || t.head_dim + t.head_dim_v < best->tile.head_dim + best->tile.head_dim_v) { best = &row; }
  }
  return best;
}

}  // namespace hopper_attention
