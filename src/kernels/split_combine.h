// Merges the partial results of tiles that several CTAs have computed parts of. The list of parts follows from the
// schedule alone.
#pragma once

#include "kernels/cute.h"

#include "kernels/dependent_launch.h"
#include "kernels/merged_row.h"
#include "kernels/output_rows.h"
#include "kernels/parted_tile.h"
#include "kernels/sink.h"
#include "kernels/softmax.h"
#include "kernels/split_combine_params.h"
#include "kernels/warm_schedule.h"

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

// Adds a group of parts of a row, the first of them `begin`.
template <int kColumns>
__device__ __forceinline__ void merge_group(SplitCombineParams const& params, PartialParams const& partial,
                                            PartedTile const& tile, int row, int begin, MergedRow<kColumns>& group) {
  constexpr int kAtOnce = 16 / kColumns;  // whose ends and columns a warp waits for together
  static_assert(kPartsOfGroup % kAtOnce == 0);
  int const lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int first = 0; first < kPartsOfGroup; first += kAtOnce) {
    float lses[kAtOnce];
    float values[kAtOnce][kColumns];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const part = begin + first + i;
      int const from = tile.slot(part) * partial.rows + row;
      lses[i] = part < tile.parts ? partial.lse[from] : 0.0F;
      float const* const columns = partial.out + static_cast<std::int64_t>(from) * params.head_dim_v + lane * 4;
      CUTE_UNROLL
      for (int c = 0; c < kColumns; c += 4) {
        bool const has = part < tile.parts && c * 32 + lane * 4 < params.head_dim_v;
        float4 const four = has ? *reinterpret_cast<float4 const*>(columns + c * 32) : float4{};
        values[i][c] = four.x;
        values[i][c + 1] = four.y;
        values[i][c + 2] = four.z;
        values[i][c + 3] = four.w;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + first + i < tile.parts) { group.add(lses[i], 1.0F, values[i]); }
    }
  }
}

// A warp has a row at a time, a lane four columns of 128. Several warps share a row where a tile has many parts; they
// add up in shared memory in a fixed order. Where rows are many, instructions are what takes the time: 16,384 rows of
// two parts took 17 us with 430 instructions for each.
template <KernelFamily kFamily, int kColumns>  // split_combine_columns()
__global__ void __launch_bounds__(kSplitCombineThreads, split_combine_blocks(kColumns))
    split_combine_kernel(__grid_constant__ SplitCombineParams const params) {
  __shared__ float shared_out[kSplitCombineWarps][32 * kColumns];
  __shared__ float shared_sum[kSplitCombineWarps];
  __shared__ float shared_top[kSplitCombineWarps];
  bool const second = static_cast<int>(blockIdx.x) >= params.task[0].candidates;
  SplitCombineTask const& task = params.task[second ? 1 : 0];
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  // By one warp: blocks are many, and all of their warps would be in each other's way.
  __shared__ PartedTile shared_tile;
  __shared__ Sequence shared_sequence;
  if (warp == 0) {
    Sequence found{};
    warm_schedule(task.schedule, params.sequences);
    int const candidate = static_cast<int>(blockIdx.x) - (second ? params.task[0].candidates : 0);
    PartedTile const parted = find_parted_tile<kFamily>(task, params.sequences, found, candidate);
    if (lane == 0) {
      shared_tile = parted;
      shared_sequence = found;
    }
  }
  __syncthreads();
  PartedTile const tile = shared_tile;
  Sequence const sequence = shared_sequence;
  // The next kernel may be set up as soon as all blocks are here: none of them can lack room for its CTAs.
  if (params.next_starts_early || tile.place >= 0) { start_dependents(); }
  // The schedule and the lengths are older than the parts. Blocks without a tile make room for others, but for one, so
  // that this kernel ends last.
  if (tile.place >= 0 || blockIdx.x + blockIdx.y == 0) { wait_for_prerequisites(); }
  if (tile.place < 0) { return; }

  QueryRange const queries = query_range(task.packing, task.slabs, tile.m, sequence.len.q);
  int const packed_heads = params.packed_heads.divisor;
  int const existing = min_of(queries.last + 1, params.rows - sequence.q_row);  // queries of the tile end here
  std::int64_t const out_of_tile = sequence.q_batch * params.out_stride_batch +
                                   static_cast<std::int64_t>(tile.head * packed_heads) * params.out_stride_head;
  int warps_per_row = 1;
  while (warps_per_row < kSplitCombineWarps && warps_per_row * kPartsOfGroup < tile.parts) { warps_per_row *= 2; }
  int const rows_at_once = kSplitCombineWarps / warps_per_row;
  int const share_of_row = warp % warps_per_row;
  int const pieces = tile.shares * static_cast<int>(gridDim.y);
  int const piece = tile.share * static_cast<int>(gridDim.y) + static_cast<int>(blockIdx.y);
  int const end = (piece + 1) * task.partial.rows / pieces;

  for (int first = piece * task.partial.rows / pieces; first < end; first += rows_at_once) {
    int const row = first + warp / warps_per_row;
    int const slab = row / kSlabRows;
    int const query_in_slab = params.packed_heads.quotient(row - slab * kSlabRows);
    int const query = queries.first + slab * task.packing.queries_per_slab + query_in_slab;
    int const head = row - slab * kSlabRows - query_in_slab * packed_heads;  // of the packed ones
    bool const exists = row < end && query_in_slab < task.packing.queries_per_slab && query < existing;

    auto merged = MergedRow<kColumns>::none();
    CUTE_NO_UNROLL
    for (int before = 0; before < tile.parts; before += warps_per_row * kPartsOfGroup) {
      int const begin = before + share_of_row * kPartsOfGroup;
      auto group = MergedRow<kColumns>::none();
      if (exists) { merge_group(params, task.partial, tile, row, begin, group); }
      if (warps_per_row == 1) {
        merged.add(group);
        continue;  // there is no other
      }
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) { shared_out[warp][c * 32 + lane] = group.columns[c]; }
      if (lane == 0) {
        shared_sum[warp] = group.sum;
        shared_top[warp] = group.top;
      }
      __syncthreads();
      CUTE_NO_UNROLL
      for (int i = 0; share_of_row == 0 && i < warps_per_row && before + i * kPartsOfGroup < tile.parts; ++i) {
        MergedRow<kColumns> other;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) { other.columns[c] = shared_out[warp + i][c * 32 + lane]; }
        other.sum = shared_sum[warp + i];
        other.top = shared_top[warp + i];
        merged.add(other);
      }
      __syncthreads();
    }
    if (share_of_row != 0) { continue; }
    if (!exists) { continue; }

    RowEnd ended = row_end(merged.top, merged.sum);
    if (params.sinks != nullptr) {
      float const sink = sink_log2(params.sinks, params.sinks_type, tile.head * packed_heads + head);
      ended = end_row(ended.exponent, ended.sum, sink);
    }
    std::int64_t const offset =
        out_of_tile + (sequence.q_row + query) * params.out_stride_row + head * params.out_stride_head + lane * 4;
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 4) {
      if (c * 32 + lane * 4 >= params.head_dim_v) { continue; }
      if (params.dtype == DataType::kBFloat16) {
        store_columns(static_cast<cutlass::bfloat16_t*>(params.out) + offset + c * 32, merged, c, ended);
      } else {
        store_columns(static_cast<cutlass::half_t*>(params.out) + offset + c * 32, merged, c, ended);
      }
    }
    if (params.lse != nullptr && lane == 0) {
      params.lse[sequence.q_batch * params.lse_stride_batch +
                 (tile.head * packed_heads + head) * params.lse_stride_head + sequence.q_row + query] =
          ended.lse() * kLn2;
    }
  }
}

}  // namespace hopper_attention
