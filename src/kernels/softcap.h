// Softcap of any score; cap_polynomial.h has a faster form for those that are not large.
#pragma once

#include "kernels/cute.h"

#include "kernels/softmax.h"

namespace hopper_attention {

// score -> tanh(score * inner), to be scaled by softcap with the softmax, as 1 - 2 / (exp(2x) + 1). Its absolute error
// is below 1e-6, where tanh.approx has 5e-4, which the LSE would show.
__device__ __forceinline__ float softcapped(float score, float inner) {
  return 1.0F - 2.0F * reciprocal_approx(exp2_approx(score * (2.0F * kLog2e * inner)) + 1.0F);
}

// The same for all scores of a thread. The exponential unit is what limits a capped block: one reciprocal serves
// kSharing = 4 scores, 1 / a = b (c d) / (a b c d), where there are registers for it. They are of one row, and of a
// block that needs no mask: bits of a score must not depend on memory that its query does not see.
template <int kSharing, class Scores>
__device__ __forceinline__ void apply_softcap(Scores& scores, float inner) {
  constexpr float kMostExponent = 26.0F;  // tanh is 1 - 3e-8 there, and the product of four stays finite
  float const exponent = 2.0F * kLog2e * inner;
  static_assert(kSharing == 1 || kSharing == 4);
  auto rows = rows_view(scores);
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(rows); c += kSharing) {
      if constexpr (kSharing == 1) {
        rows(r, c) = softcapped(rows(r, c), inner);
      } else {
        float d[4];
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) { d[j] = exp2_approx(min_or_nan(rows(r, c + j) * exponent, kMostExponent)) + 1.0F; }
        float const d01 = d[0] * d[1];
        float const d23 = d[2] * d[3];
        float const two = -2.0F * reciprocal_approx(d01 * d23);
        float const of01 = two * d23;
        float const of23 = two * d01;
        rows(r, c) = fmaf(of01, d[1], 1.0F);
        rows(r, c + 1) = fmaf(of01, d[0], 1.0F);
        rows(r, c + 2) = fmaf(of23, d[3], 1.0F);
        rows(r, c + 3) = fmaf(of23, d[2], 1.0F);
      }
    }
  }
}

}  // namespace hopper_attention
