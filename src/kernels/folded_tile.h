// Parts of a tile of few rows that follow from the tile alone (fixed_parts()), as they leave the mainloop: one CTA
// merges those that it computes one after the other in registers, as the combine kernel would if several CTAs had them.
#pragma once

#include "kernels/cute.h"

#include "kernels/merged_row.h"
#include "kernels/output_rows.h"
#include "kernels/thread_columns.h"

namespace hopper_attention {

// O of a part divided by its sum, in place: what a merge takes in of it. `output` is a columns_view().
template <int kColumns, class Output>
__device__ __forceinline__ void divide_by_sums(PartEnd (&ends)[kColumns], Output&& output) {
  CUTE_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    RowEnd const end = row_end(ends[c].exponent, ends[c].sum);
    CUTE_UNROLL
    for (int r = 0; r < size<1>(output); ++r) { output(c, r) = end.scaled(output(c, r)); }
    ends[c] = {end.lse(), 1.0F};
  }
}

template <class Traits>
class FoldedTile {
 public:
  static constexpr int kColumns = columns_of_thread(Traits::kQueryRows);

  __device__ __forceinline__ FoldedTile() {}

  // Takes in the next part, after divide_by_sums(). There is no other before it if it `begins` the tile: until then
  // nothing has been set, which would take instructions in every call.
  template <class Output>
  __device__ __forceinline__ void add(bool begins, PartEnd const (&ends)[kColumns], Output const& output) {
    if (begins) {
      parts_in_group_ = 0;
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) { group_[c] = all_[c] = MergedRow<kValues>::none(); }
    }
    if (parts_in_group_ == kPartsOfGroup) { finish_group(); }
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      float values[kValues];
      CUTE_UNROLL
      for (int r = 0; r < kValues; ++r) { values[r] = output(c, r); }
      group_[c].add(ends[c].exponent, ends[c].sum, values);
    }
    ++parts_in_group_;
  }

  // What all parts leave.
  template <class Output>
  __device__ __forceinline__ void finish(PartEnd (&ends)[kColumns], Output&& output) {
    finish_group();
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      ends[c] = {all_[c].top, all_[c].sum};
      CUTE_UNROLL
      for (int r = 0; r < kValues; ++r) { output(c, r) = all_[c].column(r); }
    }
  }

 private:
  static constexpr int kValues = Traits::kProductColumns / 32;  // of a column of a columns_view()

  __device__ __forceinline__ void finish_group() {
    parts_in_group_ = 0;
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      all_[c].add(group_[c]);
      group_[c] = MergedRow<kValues>::none();
    }
  }

  MergedRow<kValues> group_[kColumns];
  MergedRow<kValues> all_[kColumns];
  int parts_in_group_;
};

}  // namespace hopper_attention
