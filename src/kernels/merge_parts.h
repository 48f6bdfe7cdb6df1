// Rows of a tile whose parts lie in the workspace, read and merged by the lanes of a warp.
#pragma once

#include "kernels/cute.h"

#include "kernels/merged_row.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/tile_geometry.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// Four columns of a row of out, from `first` of the merged ones; one by one where out is not aligned for more.
template <class Element, int kColumns>
__device__ __forceinline__ void store_columns(Element* to, MergedRow<kColumns> const& merged, int first,
                                              RowEnd const& end) {
  constexpr int kCount = 4;
  cutlass::AlignedArray<Element, kCount> rounded;
  CUTE_UNROLL
  for (int c = 0; c < kCount; ++c) { rounded[c] = Element(end.scaled(merged.column(first + c))); }
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(rounded) == 0) {
    *reinterpret_cast<cutlass::AlignedArray<Element, kCount>*>(to) = rounded;
  } else {
    CUTE_UNROLL
    for (int c = 0; c < kCount; ++c) { to[c] = rounded[c]; }
  }
}

// Some parts of a row, as each of kLanes lanes reads them: four columns, and with 8 also those 4 * kLanes further on.
// kAtOnce: whose ends and columns a warp waits for together.
template <int kLanes, int kColumns, int kAtOnce_ = 16 / kColumns>
struct PartsOfRow {
  static constexpr int kAtOnce = kAtOnce_;
  static_assert(kPartsOfGroup % kAtOnce == 0);

  float lses[kAtOnce];
  float values[kAtOnce][kColumns];

  // Those from `first` on; `column`: the lane's first. Past L1, which may hold what was there before.
  __device__ __forceinline__ void load(PartialParams const& partial, TileParts const& parts, int head_dim_v, int row,
                                       int column, int first) {
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const from = parts.slot(first + i) * partial.rows + row;
      bool const exists = first + i < parts.count;
      lses[i] = exists ? __ldcg(partial.lse + from) : 0.0F;
      float const* const columns = partial.out + static_cast<std::int64_t>(from) * head_dim_v + column;
      CUTE_UNROLL
      for (int c = 0; c < kColumns; c += 4) {
        bool const has = exists && c * kLanes + column < head_dim_v;
        float4 const four = has ? __ldcg(reinterpret_cast<float4 const*>(columns + c * kLanes)) : float4{};
        values[i][c] = four.x;
        values[i][c + 1] = four.y;
        values[i][c + 2] = four.z;
        values[i][c + 3] = four.w;
      }
    }
  }

  __device__ __forceinline__ void add_to(MergedRow<kColumns>& group, TileParts const& parts, int first) const {
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < parts.count) { group.add(lses[i], 1.0F, values[i]); }
    }
  }
};

}  // namespace hopper_attention
