// Which row of out and of the LSE a row of a tile is, and what ends a row of softmax.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/sink.h"
#include "kernels/softmax.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_work.h"

namespace hopper_attention {

struct OutputRow {
  int row;  // of q, out and LSE
  int head;
  bool exists;  // not past the tile's last query, not an idle row of a packed slab
};

// Row `slab_row` of the slab whose first query is `first_query`.
__device__ __forceinline__ OutputRow output_row(AttentionParams const& params, TileWork const& work, int first_query,
                                                int slab_row) {
  FastDivmod const& heads = params.packing.heads;
  int const query_in_slab = heads.quotient(slab_row);
  int const query = first_query + query_in_slab;
  int const row = work.sequence.q_row + query;
  bool const exists =
      query <= work.queries.last && query_in_slab < params.packing.queries_per_slab && row < params.epilogue.rows;
  return {row, work.head * heads.divisor + slab_row - query_in_slab * heads.divisor, exists};
}

// Of a warpgroup's slab, those that this CTA stores: fewer where the CTAs of a cluster merge some each.
struct SlabRows {
  int begin = 0;
  int end = kSlabRows;

  __device__ __forceinline__ bool empty() const { return begin >= end; }
  __device__ __forceinline__ bool all() const { return begin == 0 && end == kSlabRows; }
  __device__ __forceinline__ bool holds(int row) const { return begin <= row && row < end; }
};

// What a part of a tile leaves of a row: its O is to be multiplied by 2^exponent, as `sum`, the sum of its
// probabilities. The exponent is -inf where the row sees no key of the part, or scores of -inf alone.
struct PartEnd {
  float exponent;
  float sum;
};

// A row of softmax as exponents of 2: its terms are 2^exponent times `sum`; exponent is -inf where it saw no key, or
// scores of -inf alone.
struct RowEnd {
  float scale;  // what the row's O is to be multiplied by
  float exponent;
  float sum;

  __device__ __forceinline__ float scaled(float x) const {
    return scale == 0.0F ? 0.0F : x * scale;
  }  // also if x is NaN
  __device__ __forceinline__ float lse() const {
    return exponent == -INFINITY ? -INFINITY : exponent + log2_approx(sum);
  }
};

// The exponent of a row whose maximum gives `exponent`: -inf where the sum is 0; NaN where the sum is, since a maximum
// leaves NaN out and may be far below that of other parts.
__device__ __forceinline__ float exponent_with(float exponent, float sum) {
  return sum > 0.0F ? exponent : sum - INFINITY;
}
__device__ __forceinline__ RowEnd row_end(float exponent, float sum) {
  return {sum > 0.0F ? reciprocal_approx(sum) : sum, exponent_with(exponent, sum), sum};
}

// A row with the sink of its query head in the denominator: without keys 0 and the sink, and -inf as LSE where the sink
// is that. Exact also where the sink leaves next to nothing of the row: approximations that flush to zero lose results
// below 2^-126, which bf16 can hold.
__device__ __forceinline__ RowEnd end_row(float exponent, float sum, float sink) {
  float const top = max_or_nan(exponent, sink);
  if (top == -INFINITY) { return row_end(exponent, sum); }
  float const shrink = exp2f(exponent - top);
  sum = __fmaf_rn(sum, shrink, exp2f(sink - top));  // in every kernel: they must not differ in what is contracted
  return {shrink / sum, top, sum};
}

template <class Element>
__device__ __forceinline__ Element* output_pointer(AttentionParams const& params, TileWork const& work,
                                                   OutputRow const& id) {
  EpilogueParams const& p = params.epilogue;
  return static_cast<Element*>(p.out) + work.sequence.q_batch * p.out_stride_batch + id.row * p.out_stride_row +
         id.head * p.out_stride_head;
}

__device__ __forceinline__ void store_lse(AttentionParams const& params, TileWork const& work, OutputRow const& id,
                                          RowEnd const& end) {
  EpilogueParams const& p = params.epilogue;
  if (p.lse == nullptr) { return; }
  p.lse[work.sequence.q_batch * p.lse_stride_batch + id.head * p.lse_stride_head + id.row] = end.lse() * kLn2;
}

// Two columns of a row of out; one by one where out is not aligned for more.
template <class Element>
__device__ __forceinline__ void store_pair(AttentionParams const& params, Element* to, float a, float b) {
  cutlass::AlignedArray<Element, 2> pair;
  pair[0] = Element(a);
  pair[1] = Element(b);
  if (params.epilogue.out_by_tma) {
    *reinterpret_cast<cutlass::AlignedArray<Element, 2>*>(to) = pair;
  } else {
    to[0] = pair[0];
    to[1] = pair[1];
  }
}

}  // namespace hopper_attention
