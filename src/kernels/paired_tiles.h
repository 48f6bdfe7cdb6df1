// Tiles of which the two CTAs of a cluster share two, so that both have as much to do.
#pragma once

#include "kernels/fast_divmod.h"
#include "kernels/host_device.h"

namespace hopper_attention {

// Tiles that follow from their index, two for each cluster of two CTAs: one and its mirror image, of a head group the
// first and the last, the second and the last but one. Clusters take pairs in turn.
struct PairedTiles {
  int count = 0;  // of a head group in a sequence
  int pairs = 0;  // of all
  int clusters = 0;
  int blocks_of_ends = 0;  // what starting and ending a tile takes beside its blocks of keys: as long as so many
  FastDivmod pairs_of_group;
  FastDivmod head_groups;
};

// Of a long tile and a short one, in blocks: how many of the long one the CTA takes that has the short one, so that
// both end at once. 0: none, since they are about as long as each other. `ends`: of what a short tile takes beside its
// blocks, if there is one.
HA_HOST_DEVICE constexpr int blocks_to_share(int long_blocks, int short_blocks, int ends) {
  return max_of(0, (long_blocks - short_blocks - ends) / 2);
}

}  // namespace hopper_attention
