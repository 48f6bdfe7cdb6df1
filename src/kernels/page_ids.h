// Which boxes of pages hold the keys of a block: entries of the page table, spread over the lanes of a warp.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/tile_work.h"

namespace hopper_attention {

using namespace cute;

// The boxes of a tile's blocks, which a warp brings from right to left: each lane knows page and row of one, and
// together they know those of as many blocks as there are lanes for, a window. Finding out is then shared by several
// blocks.
template <int kKeys>
class BoxWindow {
 public:
  __device__ __forceinline__ BoxWindow(PageParams const& params, TileWork const& work, int lane)
      : params_(params), work_(work), lane_(lane), first_(work.range.end) {}

  // Before each block, called with the one to its right or the end of the range: asks for the next window's pages a
  // block before they are needed, for the first one's at once.
  __device__ __forceinline__ void look_ahead(int n) {
    if (n == first_ + 1 || n == work_.range.end) { find(first_ - params_.blocks_at_once); }
  }
  // The block that is brought next.
  __device__ __forceinline__ void reach(int n) {
    if (n < first_) {
      first_ -= params_.blocks_at_once;
      page_ = next_page_;
      row_ = next_row_;
    }
    lane_of_block_ = (n - first_) * params_.boxes;
  }

  // Of the block's box i, by all lanes. TMA delivers zeros for a page that does not exist.
  __device__ __forceinline__ int page(int i) const { return __shfl_sync(0xffffffff, page_, lane_of_block_ + i); }
  __device__ __forceinline__ int row(int i) const { return __shfl_sync(0xffffffff, row_, lane_of_block_ + i); }

 private:
  // Page -1 where the tile sees no key of the box or the table has no entry. Windows may begin before the first block.
  __device__ __forceinline__ void find(int first) {
    KeyInterval const seen = work_.range.keys;
    int const key = work_.first_key(first, kKeys) + lane_ * params_.box_keys;
    int const place = work_.sequence.k_row + key;
    int const index = params_.size.quotient(place);
    // By all lanes, also by those that bring no box (kActingLane).
    int const batch = static_cast<int const volatile&>(work_.sequence.batch);
    bool const exists = key < seen.end && key + params_.box_keys > seen.begin && index < params_.width;
    next_page_ = exists ? params_.table[batch * params_.stride + index] : -1;
    next_row_ = place - index * params_.size.divisor;
  }

  PageParams const& params_;
  TileWork const& work_;
  int lane_;
  int first_;  // block of the window
  int page_;
  int row_;
  int next_page_;  // of the window to the left
  int next_row_;
  int lane_of_block_;
};

}  // namespace hopper_attention
