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
  static constexpr int kColumns = Traits::kHeadDimV <= 128 ? 4 : 8;  // of a lane
  static constexpr int kLanes = Traits::kHeadDimV <= 64 ? 16 : 32;   // of a row
  static constexpr int kRowsOfWarp = 32 / kLanes;                    // that its lanes have next to each other
  static constexpr int kStep = cutlass::NumThreadsPerWarpGroup / kLanes;
  // Of a lane, whose parts it waits for together. Several spill in some kernels of other head dims.
  static constexpr int kMostRowsAtOnce = Traits::kHeadDimV == 128 ? 4 : 1;
  static constexpr int kRowsAtOnce = min_of(ceil_div(Traits::kTile.rows, kStep), kMostRowsAtOnce);

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

  // A lane has columns of kRowsAtOnce rows. Of several, what these are to be multiplied by it finds for one of the
  // warp's rows, while their parts are on the way, and the warp shares that.
  __device__ __forceinline__ void merge(TileWork const& work, MergeStep const& step) const {
    TileParts const& parts = step.parts;
    PartialParams const& partial = params_.epilogue.partial;
    int const queries = work.queries.last - work.queries.first + 1;
    int const rows_of_tile = min_of(queries * params_.packing.heads.divisor, partial.rows);
    int thread = thread_;
    asm volatile("" : "+r"(thread));  // or what follows from it would be kept in registers through the tiles
    int const lane = thread % 32;
    int const row_of_lane = lane / kLanes;
    int const column = lane % kLanes * 4;
    // Row r of the lane's is `first + row_of_lane + r * kStep`.
    int const owned = kRowsAtOnce == 1 ? row_of_lane : lane % (kRowsAtOnce * kRowsOfWarp);
    int const owned_row = owned % kRowsOfWarp + owned / kRowsOfWarp * kStep;
    CUTE_NO_UNROLL
    for (int first = __shfl_sync(0xffffffff, thread / 32, 0) * kRowsOfWarp; first < rows_of_tile;
         first += kStep * kRowsAtOnce) {
      RowTotals totals = RowTotals::none();
      float columns[kRowsAtOnce][kColumns] = {};
      CUTE_NO_UNROLL
      for (int begin = 0; begin < parts.count; begin += kPartsOfGroup) {
        if constexpr (kRowsAtOnce == 1) {
          using Parts = PartsOfRow<kLanes, kColumns>;
          int const row = min_of(first + row_of_lane, rows_of_tile - 1);
          auto group = MergedRow<kColumns>::none();
          CUTE_UNROLL
          for (int i = begin; i < begin + kPartsOfGroup; i += Parts::kAtOnce) {
            Parts found;
            found.load(partial, parts, params_.epilogue.head_dim_v, row, column, i);
            found.add_to(group, parts, i);
          }
          totals.add(group.totals.top, group.totals.sum).apply(columns[0], group.columns);
          continue;
        }
        float values[kRowsAtOnce][kPartsOfGroup][kColumns];
        float lses[kPartsOfGroup];
        CUTE_UNROLL
        for (int i = 0; i < kPartsOfGroup; ++i) {
          if (begin + i >= parts.count) { break; }
          int const slot = parts.slot(begin + i) * partial.rows;
          lses[i] = __ldcg(partial.lse + slot + min_of(first + owned_row, rows_of_tile - 1));
          CUTE_UNROLL
          for (int r = 0; r < kRowsAtOnce; ++r) {
            if (r > 0 && first + r * kStep >= rows_of_tile) { break; }
            load(slot + min_of(first + row_of_lane + r * kStep, rows_of_tile - 1), column, values[r][i]);
          }
        }
        RowTotals group = RowTotals::none();
        RowFactors factors[kPartsOfGroup];
        CUTE_UNROLL
        for (int i = 0; i < kPartsOfGroup; ++i) {
          if (begin + i >= parts.count) { break; }
          factors[i] = group.add(lses[i], 1.0F);
        }
        RowFactors const of_group = totals.add(group.top, group.sum);
        CUTE_UNROLL
        for (int r = 0; r < kRowsAtOnce; ++r) {
          if (r > 0 && first + r * kStep >= rows_of_tile) { break; }
          int const owner = r * kRowsOfWarp + row_of_lane;
          float of_row[kColumns] = {};
          CUTE_UNROLL
          for (int i = 0; i < kPartsOfGroup; ++i) {
            if (begin + i >= parts.count) { break; }
            from_owner(owner, factors[i]).apply(of_row, values[r][i]);
          }
          from_owner(owner, of_group).apply(columns[r], of_row);
        }
      }
      __syncwarp();  // all lanes have read what may be overwritten
      CUTE_UNROLL
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (r > 0 && first + r * kStep >= rows_of_tile) { break; }
        int const owner = r * kRowsOfWarp + row_of_lane;
        MergedRow<kColumns> merged{{}, {from_owner(owner, totals.top), from_owner(owner, totals.sum)}};
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) { merged.columns[c] = columns[r][c]; }
        int const row = first + row_of_lane + r * kStep;
        if (row >= rows_of_tile) { continue; }
        if (step.ends_tile) {
          store(work, row, column, merged);
        } else {
          store_part(parts.first_slot, row, column, merged);
        }
      }
    }
  }

  // What the lane has that owns the row.
  __device__ __forceinline__ static float from_owner(int owner, float x) {
    return kRowsAtOnce == 1 ? x : __shfl_sync(0xffffffff, x, owner);
  }
  __device__ __forceinline__ static RowFactors from_owner(int owner, RowFactors const& factors) {
    return {from_owner(owner, factors.shrink), from_owner(owner, factors.weight)};
  }

  // The lane's columns of a row of the workspace. Past L1, which may hold what was there before.
  __device__ __forceinline__ void load(int row, int column, float (&values)[kColumns]) const {
    int const head_dim_v = params_.epilogue.head_dim_v;
    float const* const from = params_.epilogue.partial.out + static_cast<std::int64_t>(row) * head_dim_v + column;
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 4) {
      bool const has = c * kLanes + column < head_dim_v;
      float4 const four = has ? __ldcg(reinterpret_cast<float4 const*>(from + c * kLanes)) : float4{};
      values[c] = four.x;
      values[c + 1] = four.y;
      values[c + 2] = four.z;
      values[c + 3] = four.w;
    }
  }

  // As SwappedEpilogue leaves a part.
  __device__ __forceinline__ void store_part(int slot, int row, int column, MergedRow<kColumns> const& merged) const {
    PartialParams const& partial = params_.epilogue.partial;
    RowEnd const end = row_end(merged.totals.top, merged.totals.sum);
    std::int64_t const index = static_cast<std::int64_t>(slot) * partial.rows + row;
    store_row(partial.out + index * params_.epilogue.head_dim_v, column, merged, end);
    if (column == 0) { partial.lse[index] = end.lse(); }
  }

  __device__ __forceinline__ void store(TileWork const& work, int row, int column,
                                        MergedRow<kColumns> const& merged) const {
    using Element = typename Traits::Element;
    OutputRow const id = output_row(params_, work, work.queries.first, row);
    if (!id.exists) { return; }
    EpilogueParams const& p = params_.epilogue;
    RowEnd end = row_end(merged.totals.top, merged.totals.sum);
    if (p.sinks != nullptr) { end = end_row(end.exponent, end.sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
    store_row(output_pointer<Element>(params_, work, id), column, merged, end);
    if (column == 0) { store_lse(params_, work, id, end); }
  }

  // The lane's columns.
  template <class T>
  __device__ __forceinline__ void store_row(T* row, int column, MergedRow<kColumns> const& merged,
                                            RowEnd const& end) const {
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 4) {
      int const first = c * kLanes + column;
      if (first < params_.epilogue.head_dim_v) { store_columns(row + first, merged, c, end); }
    }
  }

  AttentionParams const& params_;
  typename Traits::SharedStorage& shared_;
  int thread_;
};

}  // namespace hopper_attention
