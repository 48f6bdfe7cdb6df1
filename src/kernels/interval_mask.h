// The one mask: a query sees an interval of keys.
#pragma once

#include "hopper_attention/types.h"
#include "kernels/host_device.h"

namespace hopper_attention {

// Queries and keys of one sequence. With context parallelism `k` keys are here, of `k_total` on all ranks. Without
// arguments nothing is set: for an array of 32 that are read later, defaults would be 70 instructions.
struct SeqlenQK {
  int q;
  int k;
  int k_total;

  SeqlenQK() = default;
  HA_HOST_DEVICE constexpr SeqlenQK(int queries, int keys) : SeqlenQK(queries, keys, keys) {}
  HA_HOST_DEVICE constexpr SeqlenQK(int queries, int keys, int keys_of_all)
      : q(queries), k(keys), k_total(keys_of_all) {}

  HA_HOST_DEVICE constexpr bool operator==(SeqlenQK const&) const = default;
};

struct KeyInterval {
  int begin;
  int end;

  HA_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  HA_HOST_DEVICE constexpr int length() const { return empty() ? 0 : end - begin; }
};

// Whether finding what a query sees takes divisions. They are more code than all else, which most calls only jump over.
HA_HOST_DEVICE constexpr bool divides(MaskParams const& mask) { return mask.chunk != 0 || mask.cp_world != 1; }

// The steps of visible(), of a query at position `diagonal`. Keys of its window, which may lie outside the sequence.
HA_HOST_DEVICE constexpr KeyInterval keys_of_window(MaskParams const& mask, int diagonal, SeqlenQK len) {
  int const begin = mask.left == kUnlimited ? 0 : diagonal - mask.left;
  int const end = mask.right == kUnlimited ? len.k_total : min_of(len.k_total, diagonal + mask.right + 1);
  return {begin, end};
}

// Those of them that are in its chunk and on this rank.
HA_HOST_DEVICE constexpr KeyInterval keys_of_chunk_and_rank(MaskParams const& mask, int diagonal, SeqlenQK len,
                                                            KeyInterval keys) {
  if (mask.chunk != 0) {
    int const first = floor_div(diagonal, mask.chunk) * mask.chunk;
    keys = {max_of(keys.begin, first), min_of(keys.end, first + mask.chunk)};
  }
  if (mask.cp_world != 1) {  // positions -> local keys: the first whose position is not before
    keys = {floor_div(keys.begin - mask.cp_rank + mask.cp_world - 1, mask.cp_world),
            min_of(len.k, floor_div(keys.end - mask.cp_rank + mask.cp_world - 1, mask.cp_world))};
  }
  return keys;
}

// Those of them that exist.
HA_HOST_DEVICE constexpr KeyInterval keys_that_exist(KeyInterval keys) {
  int const end = max_of(keys.end, 0);
  return {min_of(max_of(keys.begin, 0), end), end};
}

// Keys [begin, end) that query `row` may see. Causal, window, chunk and the end of the sequence are all such intervals;
// both ends never decrease with the row. An empty interval has begin == end.
HA_HOST_DEVICE constexpr KeyInterval visible(MaskParams const& mask, int row, SeqlenQK len) {
  int const diagonal = row + len.k_total - len.q;  // the last query sees the last key
  KeyInterval keys = keys_of_window(mask, diagonal, len);
  if (divides(mask)) { keys = keys_of_chunk_and_rank(mask, diagonal, len, keys); }
  return keys_that_exist(keys);
}

// visible() of two rows, with one jump over the divisions.
struct SeenByTwo {
  KeyInterval first;
  KeyInterval last;
};
HA_HOST_DEVICE constexpr SeenByTwo visible(MaskParams const& mask, int first_row, int last_row, SeqlenQK len) {
  int const offset = len.k_total - len.q;
  SeenByTwo seen{keys_of_window(mask, first_row + offset, len), keys_of_window(mask, last_row + offset, len)};
  if (divides(mask)) {
    seen = {keys_of_chunk_and_rank(mask, first_row + offset, len, seen.first),
            keys_of_chunk_and_rank(mask, last_row + offset, len, seen.last)};
  }
  return {keys_that_exist(seen.first), keys_that_exist(seen.last)};
}

// What the rows [first_row, last_row] see together.
HA_HOST_DEVICE constexpr KeyInterval seen_by_rows(MaskParams const& mask, int first_row, int last_row, SeqlenQK len) {
  auto const [first, last] = visible(mask, first_row, last_row, len);
  return {first.begin, last.end};
}

// Whether tiles get longer along the queries, or are alike but for the first one, which may have fewer slabs
// (query_range()). With a limit on the left alone they get shorter.
HA_HOST_DEVICE constexpr bool first_tiles_are_shortest(MaskParams const& mask) {
  return mask.right != kUnlimited || mask.left == kUnlimited;
}

}  // namespace hopper_attention
