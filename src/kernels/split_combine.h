// Merges the partial results of tiles that several CTAs have computed parts of.
//
// Source of the method: FlashDecoding (Dao et al. 2023); the list of parts follows from the schedule alone.
#pragma once

#include "kernels/cute.h"

#include "kernels/dependent_launch.h"
#include "kernels/output_rows.h"
#include "kernels/parted_tile.h"
#include "kernels/sink.h"
#include "kernels/softmax.h"
#include "kernels/split_combine_params.h"
#include "kernels/warm_schedule.h"

namespace hopper_attention {

// What some parts of a tile, or all, leave of a row: O, of which a lane has some columns, and `sum` are to be
// multiplied by 2^top. A row of which a part is NaN is NaN.
template <int kColumns>
struct MergedRow {
  float columns[kColumns] = {};
  float top = -INFINITY;
  float sum = 0.0F;

  // Relative to 2^higher from now on: `higher` is at least `top`, and not -inf.
  __device__ __forceinline__ void raise(float higher) {
    float const shrink = exp2_approx(top - higher);
    CUTE_UNROLL
    for (float& x : columns) { x *= shrink; }
    sum *= shrink;
    top = higher;
  }
};

// Four columns of a row of out; one by one where out is not aligned for more.
template <class Element>
__device__ __forceinline__ void store_columns(Element* to, float const* values, float scale) {
  constexpr int kCount = 4;
  cutlass::AlignedArray<Element, kCount> rounded;
  CUTE_UNROLL
  for (int c = 0; c < kCount; ++c) { rounded[c] = Element(values[c] * scale); }
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(rounded) == 0) {
    *reinterpret_cast<cutlass::AlignedArray<Element, kCount>*>(to) = rounded;
  } else {
    CUTE_UNROLL
    for (int c = 0; c < kCount; ++c) { to[c] = rounded[c]; }
  }
}

// A warp has a row at a time, a lane four columns of 128. Several warps share a row where a tile has many parts; they
// add up in shared memory in a fixed order. Where rows are many, instructions are what takes the time: 16,384 rows of
// two parts took 17 us with 430 instructions for each.
template <KernelFamily kFamily, int kColumns>  // of a lane: head dims up to 32 * kColumns
__global__ void __launch_bounds__(kSplitCombineThreads, kSplitCombineBlocks)
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
  float const* const parts = task.partial.out + lane * 4;
  int warps_per_row = 1;
  while (warps_per_row < kSplitCombineWarps && warps_per_row * 4 < tile.parts) { warps_per_row *= 2; }
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

    MergedRow<kColumns> merged;
    constexpr int kPartsAtOnce = 16 / kColumns;  // whose ends and columns a warp waits for together
    CUTE_NO_UNROLL
    for (int part = share_of_row; exists && part < tile.parts; part += warps_per_row * kPartsAtOnce) {
      float exponents[kPartsAtOnce];
      float4 values[kPartsAtOnce][kColumns / 4];
      CUTE_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {
        bool const is_there = part + i * warps_per_row < tile.parts;
        int const from = tile.slot(part + i * warps_per_row) * task.partial.rows + row;
        exponents[i] = is_there ? task.partial.lse[from] : -INFINITY;
        float const* const columns = parts + static_cast<std::int64_t>(from) * params.head_dim_v;
        CUTE_UNROLL
        for (int c = 0; c < kColumns / 4; ++c) {
          bool const has = is_there && c * 128 + lane * 4 < params.head_dim_v;
          values[i][c] = has ? *reinterpret_cast<float4 const*>(columns + c * 128) : float4{};
        }
      }
      float higher = merged.top;
      CUTE_UNROLL
      for (float exponent : exponents) { higher = max_or_nan(higher, exponent); }
      if (higher == -INFINITY) { continue; }
      merged.raise(higher);
      CUTE_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {
        float const weight = exp2_approx(exponents[i] - higher);
        merged.sum += weight;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; c += 4) {
          merged.columns[c] += weight * values[i][c / 4].x;
          merged.columns[c + 1] += weight * values[i][c / 4].y;
          merged.columns[c + 2] += weight * values[i][c / 4].z;
          merged.columns[c + 3] += weight * values[i][c / 4].w;
        }
      }
    }
    if (warps_per_row > 1) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) { shared_out[warp][c * 32 + lane] = merged.columns[c]; }
      if (lane == 0) {
        shared_sum[warp] = merged.sum;
        shared_top[warp] = merged.top;
      }
      __syncthreads();
      if (share_of_row == 0) {
        float higher = merged.top;
        for (int other = warp + 1; other < warp + warps_per_row; ++other) {
          higher = max_or_nan(higher, shared_top[other]);
        }
        if (higher != -INFINITY) {
          merged.raise(higher);
          for (int other = warp + 1; other < warp + warps_per_row; ++other) {
            float const weight = exp2_approx(shared_top[other] - higher);
            CUTE_UNROLL
            for (int c = 0; c < kColumns; ++c) { merged.columns[c] += weight * shared_out[other][c * 32 + lane]; }
            merged.sum += weight * shared_sum[other];
          }
        }
      }
      __syncthreads();
      if (share_of_row != 0) { continue; }
    }
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
        store_columns(static_cast<cutlass::bfloat16_t*>(params.out) + offset + c * 32, merged.columns + c, ended.scale);
      } else {
        store_columns(static_cast<cutlass::half_t*>(params.out) + offset + c * 32, merged.columns + c, ended.scale);
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
