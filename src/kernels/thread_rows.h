// Which queries a consumer thread holds in its accumulators.
#pragma once

#include "kernels/tile_geometry.h"

namespace hopper_attention {

// Where a consumer thread's scores lie: its queries, and its first column in a block.
struct ThreadRows {
  int slab_row;     // of its first row; the second is 8 below
  int first_query;  // of the slab
  int column;

  __device__ __forceinline__ ThreadRows(int thread, int first_query_) : first_query(first_query_) {
    int const lane = thread % 32;
    slab_row = thread / 32 * 16 + lane / 4;
    column = lane % 4 * 2;
  }

  __device__ __forceinline__ int row(int r) const { return slab_row + 8 * r; }
  __device__ __forceinline__ int query(Packing const& packing, int r) const {
    return first_query + packing.heads.quotient(row(r));
  }
};

}  // namespace hopper_attention
