// The one mask: a query sees an interval of keys.
#pragma once

#include "hopper_attention/types.h"
#include "kernels/host_device.h"

namespace hopper_attention {

// Queries and keys of one sequence. With context parallelism `k` keys are here, of `k_total` on all ranks.
struct SeqlenQK {
  int q;
  int k;
  int k_total = k;
};

struct KeyInterval {
  int begin;
  int end;

  HA_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
};

// Keys [begin, end) that query `row` may see. Causal, window, chunk and the end of the sequence are all such intervals;
// both ends never decrease with the row. An empty interval has begin == end.
HA_HOST_DEVICE constexpr KeyInterval visible(MaskParams const& mask, int row, SeqlenQK len) {
  int const diagonal = row + len.k_total - len.q;  // the last query sees the last key
  int begin = mask.left == kUnlimited ? 0 : diagonal - mask.left;
  int end = mask.right == kUnlimited ? len.k_total : min_of(len.k_total, diagonal + mask.right + 1);
  if (mask.chunk != 0) {
    int const first = floor_div(diagonal, mask.chunk) * mask.chunk;
    begin = max_of(begin, first);
    end = min_of(end, first + mask.chunk);
  }
  if (mask.cp_world != 1) {  // positions -> local keys: the first whose position is not before
    begin = floor_div(begin - mask.cp_rank + mask.cp_world - 1, mask.cp_world);
    end = min_of(len.k, floor_div(end - mask.cp_rank + mask.cp_world - 1, mask.cp_world));
  }
  end = max_of(end, 0);
  return {min_of(max_of(begin, 0), end), end};
}

// Whether tiles get longer along the queries, or are alike but for the first one, which may have fewer slabs
// (query_range()). With a limit on the left alone they get shorter.
HA_HOST_DEVICE constexpr bool first_tiles_are_shortest(MaskParams const& mask) {
  return mask.right != kUnlimited || mask.left == kUnlimited;
}

}  // namespace hopper_attention
