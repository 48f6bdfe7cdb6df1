// What happens to a block of scores before the softmax: softcap, then the mask.
#pragma once

#include "kernels/cute.h"

#include "kernels/block_range.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"

namespace hopper_attention {

// scores -> tanh(scores * inner), to be scaled by softcap with the softmax. 1 - 2 / (exp(2x) + 1) has an absolute error
// of 1e-7, where tanh.approx has 5e-4, which the LSE would show.
template <class Scores>
__device__ __forceinline__ void apply_softcap(Scores& scores, float inner) {
  float const exponent = 2.0F * kLog2e * inner;
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) {
    scores(i) = 1.0F - 2.0F * reciprocal_approx(exp2_approx(scores(i) * exponent) + 1.0F);
  }
}

// The keys that each row of a thread sees. Taken before WGMMAs are issued: ptxas moves the wait for them in front of
// any branch.
struct ThreadKeys {
  KeyInterval row[kRowsPerThread];

  __device__ __forceinline__ ThreadKeys(MaskParams const& mask, SeqlenQK len, Packing const& packing,
                                        ThreadRows const& thread) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { row[r] = visible(mask, thread.query(packing, r), len); }
  }
};

// Scores of keys outside the row's interval become -inf, whatever they were. `first_key` is the key of the thread's
// first column.
template <class Scores>
__device__ __forceinline__ void apply_mask(Scores& scores, ThreadKeys const& keys, int first_key) {
  auto rows = rows_view(scores);
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    int const begin = keys.row[r].begin - first_key;
    unsigned const length = keys.row[r].end - keys.row[r].begin;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(rows); ++c) {
      int const column = c / 2 * 8 + c % 2;
      if (static_cast<unsigned>(column - begin) >= length) { rows(r, c) = -INFINITY; }
    }
  }
}

}  // namespace hopper_attention
