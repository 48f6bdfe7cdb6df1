// Parts of a tile that CTAs have left in the workspace -> out and LSE, by the one that leaves the last.
//
// Source of the method: the "last block" reduction of threadFenceReduction (CUDA samples); stream-K (Osama et al. 2023)
// merges the parts of a tile in the kernel that computes them, too.
#pragma once

#include "kernels/cute.h"

#include "kernels/merge_parts.h"
#include "kernels/merged_row.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/part_arrivals.h"
#include "kernels/sink.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

// The consumer warpgroup of a tile of few queries, when it has written its part.
template <class Traits>
class LastMerge {
 public:
  __device__ __forceinline__ LastMerge(AttentionParams const& params, typename Traits::SharedStorage& shared,
                                       int thread)
      : params_(params), shared_(shared), thread_(thread) {}

  __device__ __forceinline__ void operator()(TileWork const& work, ArrivingPart const& part) const {
    TileParts const all = part.parts();
    MergeStep step = first_merge(all, work.slot);
    CUTE_NO_UNROLL
    while (is_last(step, part.call)) {
      merge(work, step);
      if (step.ends_tile) { return; }
      step = last_merge(all);
    }
  }

 private:
  static constexpr int kColumns = Traits::kHeadDimV <= 128 ? 4 : 8;     // of a lane
  static constexpr int kLanes = Traits::kHeadDimV <= 64 ? 16 : 32;      // of a row
  static constexpr int kRowsAtOnce = Traits::kHeadDimV == 128 ? 2 : 1;  // of a lane

  __device__ __forceinline__ int column() const { return thread_ % kLanes * 4; }

  // Whether all other parts have arrived, and can be read. Then the count is taken back: a number of the call may come
  // again.
  __device__ __forceinline__ bool is_last(MergeStep const& step, std::uint64_t call) const {
    sync_warpgroup(0);  // all rows are written
    fence_of_device();
    std::uint64_t* const counted = params_.epilogue.partial.arrivals + word_of_slot(step.counted_in);
    bool const have_all_come = count_part(counted, call, thread_ == 0) + 1 == step.parts.count;
    if (thread_ == 0) {
      shared_.merges = have_all_come;
      if (have_all_come) { forget_parts(counted, call); }
    }
    fence_of_device();
    sync_warpgroup(0);
    return __all_sync(0xffffffff, shared_.merges);
  }

  __device__ __forceinline__ void merge(TileWork const& work, MergeStep const& step) const {
    TileParts const& parts = step.parts;
    PartialParams const& partial = params_.epilogue.partial;
    constexpr int kStep = cutlass::NumThreadsPerWarpGroup / kLanes;  // rows of all warps
    int const queries = work.queries.last - work.queries.first + 1;
    int const rows_of_tile = min_of(queries * params_.packing.heads.divisor, partial.rows);
    int const row_of_lane = thread_ % 32 / kLanes;
    CUTE_NO_UNROLL
    for (int first = __shfl_sync(0xffffffff, thread_ / 32, 0) * (32 / kLanes); first < rows_of_tile;
         first += kStep * kRowsAtOnce) {
      int rows[kRowsAtOnce];
      MergedRow<kColumns> merged[kRowsAtOnce];
      CUTE_UNROLL
      for (int r = 0; r < kRowsAtOnce; ++r) {
        rows[r] = min_of(first + row_of_lane + r * kStep, rows_of_tile - 1);
        merged[r] = MergedRow<kColumns>::none();
      }
      CUTE_NO_UNROLL
      for (int begin = 0; begin < parts.count; begin += kPartsOfGroup) {
        MergedRow<kColumns> groups[kRowsAtOnce];
        CUTE_UNROLL
        for (auto& group : groups) { group = MergedRow<kColumns>::none(); }
        merge_group<kLanes>(partial, parts, params_.epilogue.head_dim_v, rows, column(), begin, groups);
        CUTE_UNROLL
        for (int r = 0; r < kRowsAtOnce; ++r) { merged[r].add(groups[r]); }
      }
      __syncwarp();  // all lanes have read what may be overwritten
      CUTE_UNROLL
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (first + row_of_lane + r * kStep >= rows_of_tile) { continue; }
        if (step.ends_tile) {
          store(work, rows[r], merged[r]);
        } else {
          store_part(parts.first_slot, rows[r], merged[r]);
        }
      }
    }
  }

  // As SwappedEpilogue leaves a part.
  __device__ __forceinline__ void store_part(int slot, int row, MergedRow<kColumns> const& merged) const {
    PartialParams const& partial = params_.epilogue.partial;
    RowEnd const end = row_end(merged.top, merged.sum);
    std::int64_t const index = static_cast<std::int64_t>(slot) * partial.rows + row;
    store_row(partial.out + index * params_.epilogue.head_dim_v, merged, end);
    if (column() == 0) { partial.lse[index] = end.lse(); }
  }

  __device__ __forceinline__ void store(TileWork const& work, int row, MergedRow<kColumns> const& merged) const {
    using Element = typename Traits::Element;
    OutputRow const id = output_row(params_, work, work.queries.first, row);
    if (!id.exists) { return; }
    EpilogueParams const& p = params_.epilogue;
    RowEnd end = row_end(merged.top, merged.sum);
    if (p.sinks != nullptr) { end = end_row(end.exponent, end.sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
    store_row(output_pointer<Element>(params_, work, id), merged, end);
    if (column() == 0) { store_lse(params_, work, id, end); }
  }

  // The lane's columns.
  template <class T>
  __device__ __forceinline__ void store_row(T* row, MergedRow<kColumns> const& merged, RowEnd const& end) const {
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 4) {
      int const first = c * kLanes + column();
      if (first < params_.epilogue.head_dim_v) { store_columns(row + first, merged, c, end); }
    }
  }

  AttentionParams const& params_;
  typename Traits::SharedStorage& shared_;
  int thread_;
};

}  // namespace hopper_attention
