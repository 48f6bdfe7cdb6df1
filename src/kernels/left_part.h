// What a CTA remembers of a part that it leaves in the workspace.
#pragma once

#include "kernels/part_arrivals.h"
#include "kernels/tile_work.h"

namespace hopper_attention {

struct LeftPart {
  TileWork work;
  ArrivingPart part;
  // Of its tile, when all parts have come.
  TileParts parts;
  ShareOfRows share;
};

// That of the tile which its chunk begins in the middle of, and that of the one which it ends in the middle of.
inline constexpr int kMostPartsLeft = 2;

}  // namespace hopper_attention
