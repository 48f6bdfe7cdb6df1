// Merges the partial results of tiles that several CTAs have computed parts of. The list of parts follows from the
// schedule alone.
#pragma once

#include "kernels/cute.h"

#include "kernels/dependent_launch.h"
#include "kernels/merge_parts.h"
#include "kernels/merged_row.h"
#include "kernels/output_rows.h"
#include "kernels/parted_tile.h"
#include "kernels/sink.h"
#include "kernels/softmax.h"
#include "kernels/split_combine_params.h"
#include "kernels/warm_schedule.h"

namespace hopper_attention {

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
  while (warps_per_row < kSplitCombineWarps && warps_per_row * kPartsOfGroup < tile.parts.count) { warps_per_row *= 2; }
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
    for (int before = 0; before < tile.parts.count; before += warps_per_row * kPartsOfGroup) {
      int const begin = before + share_of_row * kPartsOfGroup;
      int const rows[] = {row};
      MergedRow<kColumns> groups[] = {MergedRow<kColumns>::none()};
      if (exists) { merge_group(task.partial, tile.parts, params.head_dim_v, rows, lane * 4, begin, groups); }
      MergedRow<kColumns> const& group = groups[0];
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
      for (int i = 0; share_of_row == 0 && i < warps_per_row && before + i * kPartsOfGroup < tile.parts.count; ++i) {
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
