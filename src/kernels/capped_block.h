// Softcap and softmax of a block that needs no mask, in the cheapest form that its scores allow.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/scores.h"
#include "kernels/softcap.h"
#include "kernels/softmax.h"

namespace hopper_attention {

// Scores -> probabilities. One form for all rows of the warp, so that branches are uniform; rows without a query have
// no say. tanh leaves scores in their order: the maxima of what it takes say what it gives. In most blocks no maximum
// moves, which the columns of each thread say by themselves. What decides is short: nothing else runs under it.
// `narrow`: whether the block before had the narrow polynomial, then whether this one has. `kSharing`: see
// apply_softcap(). No wait for a product may be on one side of a branch alone: warps of a warpgroup wait by the same
// instruction. Whether a maximum has moved.
template <int kSharing, class Softmax, class Scores>
__device__ __forceinline__ bool cap_and_exponentiate(Softmax& softmax, Scores& scores, ThreadKeys const& seen,
                                                     SoftmaxParams const& params, bool& narrow) {
  CapPolynomials const& polynomials = params.cap_polynomials;
  auto const holds_for_all = [&](auto const& holds) __attribute__((always_inline)) {
    bool all = true;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { all = all & ((seen.row[r].end <= 0) | holds(r)); }
    return __all_sync(0xffffffff, all);
  };
  int in_thread[kRowsPerThread] = {__float_as_int(-INFINITY), __float_as_int(-INFINITY)};
  raise_in_thread(scores, in_thread);
  narrow = narrow && holds_for_all([&](int r) {
             float const most = __int_as_float(max_of(in_thread[r], 0));  // NaN stays NaN
             return (most <= polynomials.narrow.most) & (softmax.row_max[r] >= polynomials.narrow.least_tanh) &
                    softmax.keeps_max(polynomials.narrow(most, softmax.offset[r]));
           });
  bool wide = false;
  bool moved = false;
  float largest[kRowsPerThread];
  float capped[kRowsPerThread];
  auto const cap_largest = [&](auto const& polynomial) __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { capped[r] = polynomial.tanh_of(largest[r]); }
  };
  auto const update_maxima = [&]() __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { softmax.update_max(r, capped[r]); }
    moved = softmax.has_moved();
  };
  if (!narrow) {
    raise_over_quad(in_thread);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { largest[r] = __int_as_float(in_thread[r]); }
    float const none[kRowsPerThread] = {-INFINITY, -INFINITY};
    cap_largest(polynomials.narrow);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { asm volatile("" : "+f"(capped[r])); }  // under the vote, not behind it
    narrow = holds_for_all([&](int r) { return polynomials.narrow.surely_serves(largest[r]); });
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
    if (narrow) { update_maxima(); }
  }
  if (narrow) {
    softmax.template exponentiate<0, kRowsPerThread>(scores, polynomials.narrow);
  } else if (wide) {
    cap_largest(polynomials.wide);
    update_maxima();
    softmax.template exponentiate<0, kRowsPerThread>(scores, polynomials.wide);
  } else {
    apply_softcap<kSharing>(scores, params.softcap_inner);
    capped[0] = capped[1] = -INFINITY;
    raise_maxima(scores, capped);  // taken again: keeping tanh of the earlier maxima spills
    update_maxima();
    softmax.template exponentiate<0, kRowsPerThread>(scores, softmax.scaled());
  }
  return moved;
}

}  // namespace hopper_attention
