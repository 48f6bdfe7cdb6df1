// The one mask: a query sees an interval of keys.
#pragma once

#include "hopper_attention/types.h"
#include "kernels/host_device.h"

namespace hopper_attention {

struct SeqlenQK {
  int q;
  int k;
};

struct KeyInterval {
  int begin;
  int end;

  HA_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
};

// Keys [begin, end) that query `row` may see. Causal, window, chunk and the end of the sequence are all such intervals;
// both ends never decrease with the row. An empty interval has begin == end.
HA_HOST_DEVICE constexpr KeyInterval visible(MaskParams const& mask, int row, SeqlenQK len) {
  int const diagonal = row + len.k - len.q;  // the last query sees the last key
  int begin = mask.left == kUnlimited ? 0 : diagonal - mask.left;
  int end = mask.right == kUnlimited ? len.k : min_of(len.k, diagonal + mask.right + 1);
  if (mask.chunk != 0) {
    int const first = floor_div(diagonal, mask.chunk) * mask.chunk;
    begin = max_of(begin, first);
    end = min_of(end, first + mask.chunk);
  }
  end = max_of(end, 0);
  return {min_of(max_of(begin, 0), end), end};
}

}  // namespace hopper_attention
