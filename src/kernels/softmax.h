// Online softmax of the two rows that a thread holds in a WGMMA accumulator.
//
// Source of the method: Milakov and Gimelshein 2018 (online normalizer), Dao 2023 (FlashAttention-2: unscaled
// accumulator), with the scale folded into exponents of 2 and the row sum reduced over the quad once, at the end.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"

namespace hopper_attention {

using namespace cute;

inline constexpr int kRowsPerThread = 2;  // row and row + 8 of a 64-row accumulator
inline constexpr float kLn2 = 0.693147180559945309F;
inline constexpr float kLog2e = 1.44269504088896341F;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Largest error 2^-22, absolute between 0.5 and 2, elsewhere relative. log2f is a polynomial of 30 instructions.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// These let NaN through, as fmaxf and fminf do not.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

// The exponent of 2 that belongs to a row maximum. Its product is rounded by itself: contracted with what is subtracted
// from it, two exponents of one maximum would differ by the rounding error, and sums drift by that in each block.
__device__ __forceinline__ float exponent_of(float max, float scale_log2, int headroom) {
  return __fmul_rn(max, scale_log2) - static_cast<float>(headroom);
}

// The sum of a row: 0 without keys. NaN where it is 0 beside a maximum: of scores from 2^34 on the exponents of 2 are
// rounded by more than 2^7, and the largest term is no longer near 1.
__device__ __forceinline__ float sum_with(float max, float sum, SoftmaxParams const& params) {
  return sum == 0.0F && max > params.lowest_score ? NAN : sum;
}

// A 64 x N accumulator ((2, 2, N / 8), 1, 1) as (row, column) of this thread: (2, (2, N / 8)).
template <class Accumulator>
__device__ __forceinline__ auto rows_view(Accumulator& acc) {
  constexpr int kGroups = decltype(size(acc))::value / 4;
  return make_tensor(acc.data(), Layout<Shape<_2, Shape<_2, Int<kGroups>>>, Stride<_2, Stride<_1, _4>>>{});
}

// What `of_two` makes of a value of each of the four threads that hold a row.
template <class Value, class OfTwo>
__device__ __forceinline__ Value over_quad(Value x, OfTwo of_two) {
  x = of_two(x, __shfl_xor_sync(0xffffffff, x, 1));
  return of_two(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float max_of_quad(float x) {
  return over_quad(x, [](float a, float b) { return fmaxf(a, b); });
}

// As integers, positive floats are in order, negative ones in reverse, and the maximum of three integers is one
// instruction, that of three floats two. The largest of this thread's columns of each row, or less than 0, whatever
// that is, if all are.
template <class Scores>
__device__ __forceinline__ void raise_in_thread(Scores const& scores, int (&largest)[kRowsPerThread]) {
  auto const rows = rows_view(scores);
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(rows); c += 2) {
      largest[r] = __vimax3_s32(largest[r], __float_as_int(rows(r, c)), __float_as_int(rows(r, c + 1)));
    }
  }
}

__device__ __forceinline__ void raise_over_quad(int (&largest)[kRowsPerThread]) {
  CUTE_UNROLL
  for (int& most : largest) {
    most = over_quad(most, [](int a, int b) { return max_of(a, b); });
  }
}

// The same as raise_maxima(), right where what comes out is not negative.
template <class Scores>
__device__ __forceinline__ void raise_if_positive(Scores const& scores, float (&max)[kRowsPerThread]) {
  int largest[kRowsPerThread] = {__float_as_int(max[0]), __float_as_int(max[1])};
  raise_in_thread(scores, largest);
  raise_over_quad(largest);
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) { max[r] = __int_as_float(largest[r]); }
}

// Mends what came out negative: all of the row's scores are then, and `before` was. All threads.
template <class Scores>
__device__ __forceinline__ void mend_negative(Scores const& scores, float const (&before)[kRowsPerThread],
                                              float (&max)[kRowsPerThread]) {
  if (!__any_sync(0xffffffff, (__float_as_int(max[0]) | __float_as_int(max[1])) < 0)) { return; }
  auto const rows = rows_view(scores);
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    unsigned nearest = __float_as_uint(before[r]);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(rows); c += 2) {
      nearest = __vimin3_u32(nearest, __float_as_uint(rows(r, c)), __float_as_uint(rows(r, c + 1)));
    }
    nearest = over_quad(nearest, [](unsigned a, unsigned b) { return min(a, b); });
    if (__float_as_int(max[r]) < 0) { max[r] = __uint_as_float(nearest); }
  }
}

// Raises `max` of a thread's rows by a block of scores; NaN raises it to NaN, or not at all if its sign is set. All
// threads.
template <class Scores>
__device__ __forceinline__ void raise_maxima(Scores const& scores, float (&max)[kRowsPerThread]) {
  float const before[kRowsPerThread] = {max[0], max[1]};
  raise_if_positive(scores, max);
  mend_negative(scores, before, max);
}

// The first columns of a 64 x N accumulator.
template <int kColumns, class Accumulator>
__device__ __forceinline__ auto leading_columns(Accumulator& acc) {
  return make_tensor(acc.data(), make_layout(Int<kColumns / 2>{}));
}

// The same accumulator as A operand of the next WGMMA: (8 values of 16 columns, 1, N / 16).
template <class Accumulator>
__device__ __forceinline__ auto operand_view(Accumulator& acc) {
  constexpr int kSteps = decltype(size(acc))::value / 8;
  return make_tensor(acc.data(),
                     Layout<Shape<Shape<_2, _2, _2>, _1, Int<kSteps>>, Stride<Stride<_1, _2, _4>, _0, _8>>{});
}

// How a block is reduced to the maximum and the sum of each row; what is fastest depends on what else a step does.
struct BlockReductions {
  bool max_by_integers = false;  // raise_maxima()
  // Before it is added to the blocks before: small probabilities of many keys, added one by one to a sum near 1, are
  // each rounded to a multiple of 2^-23.
  bool sums_by_itself = false;
  bool first_begins_sum = false;  // instead of being added to 0
};

// kHeadroom: probabilities are held as 2^kHeadroom times their value, sums and O likewise, until the division at the
// end. kSlack: the maximum moves only when scores exceed it by more than that, in exponents of 2, so that probabilities
// reach 2^(kHeadroom + kSlack); with 0 it always moves.
template <int kHeadroom, int kSlack, BlockReductions kReductions>
struct OnlineSoftmax {
  float scale_log2;               // scores -> exponents of 2
  float row_max[kRowsPerThread];  // of the scores, at least lowest_score; up to kSlack exponents of 2 below the maximum
  float row_sum[kRowsPerThread];  // of this thread's columns
  float offset[kRowsPerThread];   // exponent of 2 that becomes 1
  float rescale[kRowsPerThread];  // by how much the last update shrank O

  __device__ __forceinline__ explicit OnlineSoftmax(SoftmaxParams const& params) : scale_log2(params.scale_log2) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      row_max[r] = params.lowest_score;
      row_sum[r] = 0.0F;
      offset[r] = 0.0F;
      rescale[r] = 1.0F;
    }
  }

  // The log2 of what row_sum and O are to be multiplied by.
  __device__ __forceinline__ float exponent(int r) const { return exponent_of(row_max[r], scale_log2, kHeadroom); }

  // Of all columns, as sum_with(). All threads.
  __device__ __forceinline__ float sum_of_row(int r, SoftmaxParams const& params) const {
    float sum = row_sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    return sum_with(row_max[r], sum, params);
  }

  // Takes a block of scores into the row maxima.
  template <class Scores>
  __device__ __forceinline__ void update_max(Scores const& scores) {
    float const before[kRowsPerThread] = {row_max[0], row_max[1]};
    if constexpr (kReductions.max_by_integers) {
      raise_maxima(scores, row_max);
    } else {
      auto const rows = rows_view(scores);
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < size<1>(rows); ++c) { row_max[r] = fmaxf(row_max[r], rows(r, c)); }
        row_max[r] = max_of_quad(row_max[r]);
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { move_from(r, before[r]); }
  }

  // The same for a block whose maximum of row r is known.
  __device__ __forceinline__ void update_max(int r, float block_max) {
    float const before = row_max[r];
    row_max[r] = fmaxf(before, block_max);
    move_from(r, before);
  }

  // Whether row r's maximum stays where it is in a block whose scores are, as scaled() has them, at most `exponent`.
  __device__ __forceinline__ static bool keeps_max(float exponent) {
    return exponent <= static_cast<float>(kHeadroom + kSlack);
  }

  // Takes in row r of other keys: first the largest of their maxima; then, what O of keys with a maximum is to be
  // multiplied by. O of these is left to rescale_output().
  __device__ __forceinline__ void raise_max(int r, float other_max) {
    float const before = exponent(r);
    row_max[r] = fmaxf(row_max[r], other_max);
    rescale[r] = exp2_approx(before - exponent(r));
    row_sum[r] *= rescale[r];
  }
  __device__ __forceinline__ float weight(int r, float other_max) const {
    return exp2_approx(exponent_of(other_max, scale_log2, kHeadroom) - exponent(r));
  }

  // The exponent of 2 of a score, less that of what becomes 1.
  __device__ __forceinline__ auto scaled() const {
    return [this](float score, float offset) { return score * scale_log2 - offset; };
  }

  // Scores of the rows [kBegin, kEnd) -> probabilities relative to the row maximum so far, in place. `exponent_less`:
  // scaled(), or that of other scores. kIsFirst: no block was before.
  template <int kBegin, int kEnd, bool kIsFirst = false, class Scores, class ExponentLess>
  __device__ __forceinline__ void exponentiate(Scores& scores, ExponentLess const& exponent_less) {
    constexpr bool kFirst = kIsFirst && kReductions.first_begins_sum;
    constexpr bool kBegins = kFirst || kReductions.sums_by_itself;
    auto rows = rows_view(scores);
    CUTE_UNROLL
    for (int r = kBegin; r < kEnd; ++r) {
      float sum = kBegins ? 0.0F : row_sum[r];
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows); ++c) {
        rows(r, c) = exp2_approx(exponent_less(rows(r, c), offset[r]));
        sum = kBegins && c == 0 ? rows(r, c) : sum + rows(r, c);
      }
      row_sum[r] = kReductions.sums_by_itself && !kFirst ? row_sum[r] + sum : sum;
    }
  }

  // Ends a basic block once the probabilities of row r are computed; the branch is never taken. ptxas moves a wait for
  // WGMMAs up to the first stall of its basic block, and the exponentials would not run under O += P V.
  __device__ __forceinline__ void finish_row(int r) const {
    if (row_sum[r] < 0.0F) { __nanosleep(0); }
  }

  // Whether a row of the warp has: a factor of 1 changes no bit of O.
  __device__ __forceinline__ bool has_moved() const {
    return __any_sync(0xffffffff, rescale[0] != 1.0F || rescale[1] != 1.0F);
  }

  template <class Accumulator>
  __device__ __forceinline__ void rescale_output(Accumulator& output) const {
    auto rows = rows_view(output);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows); ++c) { rows(r, c) *= rescale[r]; }
    }
  }

 private:
  // The maximum of row r was `before`, and is now row_max.
  __device__ __forceinline__ void move_from(int r, float before) {
    bool moves = true;
    if constexpr (kSlack > 0) {
      moves = (row_max[r] - before) * scale_log2 > static_cast<float>(kSlack);
      row_max[r] = moves ? row_max[r] : before;
    }
    offset[r] = exponent(r);
    rescale[r] = moves ? exp2_approx(exponent_of(before, scale_log2, kHeadroom) - offset[r]) : 1.0F;
    row_sum[r] *= rescale[r];
  }
};

}  // namespace hopper_attention
