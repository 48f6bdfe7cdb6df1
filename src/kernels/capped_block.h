// Softcap and softmax of a block that needs no mask, in the cheapest form that its scores allow.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/scores.h"
#include "kernels/softcap.h"
#include "kernels/softmax.h"

namespace hopper_attention {

// Scores -> probabilities. One form for all rows of the warp, so that branches are uniform; rows without a query have
// no say. tanh leaves scores in their order: the maxima of what it takes say what it gives. What follows the maxima is
// short: nothing else runs under it, and decisions that took maxima as tanh and compared row by row were 10 % of the
// time. `kSharing`: see apply_softcap(). No wait for a product may be on one side of a branch alone: warps of a
// warpgroup wait by the same instruction.
template <int kSharing, class Softmax, class Scores>
__device__ __forceinline__ void cap_and_exponentiate(Softmax& softmax, Scores& scores, ThreadKeys const& seen,
                                                     SoftmaxParams const& params) {
  CapPolynomials const& polynomials = params.cap_polynomials;
  float const none[kRowsPerThread] = {-INFINITY, -INFINITY};
  float largest[kRowsPerThread] = {-INFINITY, -INFINITY};
  float capped[kRowsPerThread];
  auto const holds_for_all = [&](auto const& holds) __attribute__((always_inline)) {
    bool all = true;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { all = all & ((seen.row[r].end <= 0) | holds(r)); }
    return __all_sync(0xffffffff, all);
  };
  auto const cap_largest = [&](auto const& polynomial) __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { capped[r] = polynomial.tanh_of(largest[r]); }
  };
  auto const take = [&](auto const& exponent_less) __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { softmax.update_max(r, capped[r]); }
    softmax.template exponentiate<0, kRowsPerThread>(scores, exponent_less);
  };

  raise_if_positive(scores, largest);
  cap_largest(polynomials.narrow);
  CUTE_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) { asm volatile("" : "+f"(capped[r])); }  // under the vote, not behind it
  bool narrow = holds_for_all([&](int r) { return polynomials.narrow.surely_serves(largest[r]); });
  bool wide = false;
  if (!narrow) {
    wide = holds_for_all([&](int r) { return polynomials.wide.surely_serves(largest[r]); });
    bool const none_too_large =
        holds_for_all([&](int r) { return largest[r] <= fmaxf(polynomials.narrow.most, polynomials.wide.most); });
    if (!wide && none_too_large) {
      mend_negative(scores, none, largest);
      narrow = holds_for_all([&](int r) { return polynomials.narrow.serves(largest[r], softmax.row_max[r]); });
      wide = holds_for_all([&](int r) { return polynomials.wide.serves(largest[r], softmax.row_max[r]); });
      cap_largest(polynomials.narrow);
    }
  }
  if (narrow) {
    take(polynomials.narrow);
  } else if (wide) {
    cap_largest(polynomials.wide);
    take(polynomials.wide);
  } else {
    apply_softcap<kSharing>(scores, params.softcap_inner);
    capped[0] = capped[1] = -INFINITY;
    raise_maxima(scores, capped);  // taken again: keeping tanh of the earlier maxima spills
    take(softmax.scaled());
  }
}

}  // namespace hopper_attention
