// Rows of a tile whose keys were computed in parts, merged in an order that follows from the number of parts alone: the
// same bits whether the combine kernel merges them, the CTAs of a cluster, or one CTA those that it has computed.
//
// Source of the method: FlashDecoding (Dao et al. 2023), with parts taken in one after the other in the order of the
// keys, in groups of kPartsOfGroup, so that several warps can each merge a group.
#pragma once

#include "kernels/cute.h"

#include "kernels/softmax.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

// What some parts of a tile, or all, leave of a row: O, of which a thread has some columns, and `sum` are to be
// multiplied by 2^top. A row of which a part is NaN is NaN.
template <int kColumns>
struct MergedRow {
  float columns[kColumns];
  float top;
  float sum;

  __device__ __forceinline__ static MergedRow none() { return {{}, -INFINITY, 0.0F}; }

  // Parts behind those so far, of which `values` is O and `total` the sum, both to be multiplied by 2^exponent: of one
  // part, O divided by its sum, 1 and its log-sum-exp. Parts without keys change nothing, and what is added to nothing
  // stays as it is, but for the sign of zeros. Each operation is rounded as it stands here: kernels must not differ in
  // what the compiler contracts.
  __device__ __forceinline__ void add(float exponent, float total, float const (&values)[kColumns]) {
    float const higher = max_or_nan(top, exponent);
    float const base = higher == -INFINITY ? 0.0F : higher;
    float const shrink = exp2_approx(top - base);
    float const weight = exp2_approx(exponent - base);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) { columns[c] = __fmaf_rn(weight, values[c], __fmul_rn(columns[c], shrink)); }
    sum = __fmaf_rn(weight, total, __fmul_rn(sum, shrink));
    top = higher;
  }
  __device__ __forceinline__ void add(MergedRow const& others) { add(others.top, others.sum, others.columns); }

  // O with one sign of zero, however parts were grouped.
  __device__ __forceinline__ float column(int c) const { return __fadd_rn(columns[c], 0.0F); }
};

}  // namespace hopper_attention
