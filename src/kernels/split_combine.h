// Merges the partial results of tiles that several CTAs have computed parts of.
//
// Source of the method: FlashDecoding (Dao et al. 2023); the list of parts follows from the schedule alone.
#pragma once

#include "kernels/cute.h"

#include "kernels/dependent_launch.h"
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
    float const shrink = exp2f(top - higher);
    CUTE_UNROLL
    for (float& x : columns) { x *= shrink; }
    sum *= shrink;
    top = higher;
  }
};

// Several warps share a row where a tile has many parts; they add up in shared memory in a fixed order.
template <int kColumns>  // of a lane: head dims up to 32 * kColumns
__global__ void __launch_bounds__(kSplitCombineThreads, 4)
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
    PartedTile const parted = find_parted_tile(task, params.sequences, found,
                                               static_cast<int>(blockIdx.x) - (second ? params.task[0].candidates : 0));
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
  int warps_per_row = 1;
  while (warps_per_row < kSplitCombineWarps && warps_per_row * 4 < tile.parts) { warps_per_row *= 2; }
  int const rows_at_once = kSplitCombineWarps / warps_per_row;
  int const share_of_row = warp % warps_per_row;
  int const end = min_of(task.partial.rows, static_cast<int>(blockIdx.y + 1) * params.rows_per_block);

  for (int first = blockIdx.y * params.rows_per_block; first < end; first += rows_at_once) {
    int const row = first + warp / warps_per_row;
    int const slab_row = row % kSlabRows;
    int const query_in_slab = params.packed_heads.quotient(slab_row);
    int const query = queries.first + row / kSlabRows * task.packing.queries_per_slab + query_in_slab;
    int const head = tile.head * params.packed_heads.divisor + slab_row - query_in_slab * params.packed_heads.divisor;
    int const row_of_q = sequence.q_row + query;
    bool const exists =
        row < end && query_in_slab < task.packing.queries_per_slab && query <= queries.last && row_of_q < params.rows;

    MergedRow<kColumns> merged;
    constexpr int kPartsAtOnce = 16 / kColumns;  // whose ends and columns a warp waits for together
    CUTE_NO_UNROLL
    for (int part = share_of_row; exists && part < tile.parts; part += warps_per_row * kPartsAtOnce) {
      float exponents[kPartsAtOnce];
      float4 values[kPartsAtOnce][kColumns / 4];
      float higher = merged.top;
      CUTE_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {
        bool const is_there = part + i * warps_per_row < tile.parts;
        std::int64_t const from =
            static_cast<std::int64_t>(tile.slot(is_there ? part + i * warps_per_row : part)) * task.partial.rows + row;
        exponents[i] = is_there ? task.partial.lse[from] : -INFINITY;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; c += 4) {
          int const column = c * 32 + lane * 4;
          values[i][c / 4] =
              is_there && column < params.head_dim_v
                  ? *reinterpret_cast<float4 const*>(task.partial.out + from * params.head_dim_v + column)
                  : float4{};
        }
      }
      CUTE_UNROLL
      for (float exponent : exponents) { higher = max_or_nan(higher, exponent); }
      if (higher == -INFINITY) { continue; }
      merged.raise(higher);
      CUTE_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {
        float const weight = exp2f(exponents[i] - higher);
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
            float const weight = exp2f(shared_top[other] - higher);
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

    float top = merged.top;
    float sum = merged.sum;
    bool const empty = top == -INFINITY;
    float scale = empty ? 0.0F : 1.0F / sum;
    if (params.sinks != nullptr) {
      float const sink = sink_log2(params.sinks, params.sinks_type, head);
      float const higher = fmaxf(top, sink);
      float const shrink = higher == -INFINITY ? 0.0F : exp2f(top - higher);
      sum = sum * shrink + (higher == -INFINITY ? 0.0F : exp2f(sink - higher));
      scale = empty ? 0.0F : shrink / sum;
      top = higher;
    }
    std::int64_t const offset =
        sequence.q_batch * params.out_stride_batch + row_of_q * params.out_stride_row + head * params.out_stride_head;
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      int const column = c / 4 * 128 + lane * 4 + c % 4;
      if (column < params.head_dim_v) {
        float const value = merged.columns[c] * scale;
        if (params.dtype == DataType::kBFloat16) {
          static_cast<cutlass::bfloat16_t*>(params.out)[offset + column] = cutlass::bfloat16_t(value);
        } else {
          static_cast<cutlass::half_t*>(params.out)[offset + column] = cutlass::half_t(value);
        }
      }
    }
    if (params.lse != nullptr && lane == 0) {
      params.lse[sequence.q_batch * params.lse_stride_batch + head * params.lse_stride_head + row_of_q] =
          top == -INFINITY ? -INFINITY : (top + log2f(sum)) * kLn2;
    }
  }
}

}  // namespace hopper_attention
