// Which scores of a block are of keys that their rows see.
#pragma once

#include "kernels/cute.h"

#include "kernels/block_range.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"

namespace hopper_attention {

// The keys that each row of a thread sees. Taken once for a tile: they are 200 instructions, a quarter of a masked
// step, which would stand in front of its first WGMMA. In two parts: masks that divide have branches and are taken
// before the tile's first product, the others run under it.
struct ThreadKeys {
  KeyInterval row[kRowsPerThread];
  int first_of_slab;  // key of a block that the slab reads first

  ThreadKeys() = default;
  __device__ __forceinline__ ThreadKeys(MaskParams const& mask, SeqlenQK len, Packing const& packing,
                                        ThreadRows const& thread) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      row[r] = {0, 0};
      if (divides(mask)) { row[r] = visible(mask, thread.query(packing, r), len); }
    }
  }

  // Without branches, which would wait for the product.
  __device__ __forceinline__ void complete(MaskParams const& mask, SeqlenQK len, Packing const& packing,
                                           ThreadRows const& thread) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      KeyInterval const simple = visible({.left = mask.left, .right = mask.right}, thread.query(packing, r), len);
      row[r].begin = divides(mask) ? row[r].begin : simple.begin;
      row[r].end = divides(mask) ? row[r].end : simple.end;
    }
  }

  // Rows that no query is in see nothing: what lies there may be anything.
  __device__ __forceinline__ void hide_absent(Packing const& packing, QueryRange const& queries,
                                              ThreadRows const& thread) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const query = packing.heads.quotient(thread.row(r));
      bool const exists = query < packing.queries_per_slab && thread.first_query + query <= queries.last;
      row[r].end = exists ? row[r].end : 0;
    }
  }
};

// Of a thread's scores in a row, how many have a column before `x`: columns 0, 1, 8, 9, 16, 17, ...
__device__ __forceinline__ int scores_before(int x) { return x / 8 * 2 + min_of(x % 8, 2); }

// Bits [begin, end) of a word, which both may lie outside of.
__device__ __forceinline__ unsigned bits_between(int begin, int end) {
  int const first = max_of(begin, 0);
  unsigned bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(max_of(end - first, 0)));
  return bits;
}

// Scores of keys outside the row's interval become -inf, whatever they were. `first_key` is the key of the thread's
// first column. A bit for each score, 32 to a word: tests of constant bits take half the instructions of comparisons.
template <class Scores>
__device__ __forceinline__ void apply_mask(Scores& scores, ThreadKeys const& keys, int first_key) {
  auto rows = rows_view(scores);
  constexpr int kScores = decltype(size<1>(rows))::value;
  constexpr int kColumns = kScores * 4;
  constexpr int kWordBits = 32;
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    int const begin = scores_before(min_of(max_of(keys.row[r].begin - first_key, 0), kColumns));
    int const end = scores_before(min_of(max_of(keys.row[r].end - first_key, 0), kColumns));
    CUTE_UNROLL
    for (int first = 0; first < kScores; first += kWordBits) {
      unsigned const visible_bits = bits_between(begin - first, end - first);
      CUTE_UNROLL
      for (int c = first; c < min_of(first + kWordBits, kScores); ++c) {
        if ((visible_bits >> (c - first) & 1U) == 0) { rows(r, c) = -INFINITY; }
      }
    }
  }
}

// The same where the rows of a warp mostly see all columns but a few at both ends, `kEnd` at most: then only these are
// compared. `first_key` is the key of the first column, and `column` the thread's first one. A branch, for blocks
// behind which no product is on its way.
template <int kEnd, class Scores>
__device__ __forceinline__ void apply_mask_of_ends(Scores& scores, ThreadKeys const& keys, int first_key, int column) {
  auto rows = rows_view(scores);
  constexpr int kScores = decltype(size<1>(rows))::value;
  constexpr int kScoresOfEnd = kEnd / 4;
  int const last_end = first_key + kScores * 4 - kEnd;  // where the columns at the right end begin
  bool sees_middle = true;
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    sees_middle = sees_middle && keys.row[r].begin <= first_key + kEnd && keys.row[r].end >= last_end;
  }
  if (!__all_sync(0xffffffff, sees_middle)) {
    apply_mask(scores, keys, first_key + column);
    return;
  }
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < kScoresOfEnd; ++c) {
      int const key = column + c / 2 * 8 + c % 2;
      float& left = rows(r, c);
      float& right = rows(r, kScores - kScoresOfEnd + c);
      left = first_key + key >= keys.row[r].begin ? left : -INFINITY;
      right = last_end + key < keys.row[r].end ? right : -INFINITY;
    }
  }
}

}  // namespace hopper_attention
