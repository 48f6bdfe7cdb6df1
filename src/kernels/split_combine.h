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

// Several warps share a row where a tile has many parts; they add up in shared memory in a fixed order.
template <int kColumns>  // of a lane: head dims up to 32 * kColumns
__global__ void __launch_bounds__(kSplitCombineThreads, 4)
    split_combine_kernel(__grid_constant__ SplitCombineParams const params) {
  __shared__ float shared_out[kSplitCombineWarps][32 * kColumns];
  __shared__ float shared_sum[kSplitCombineWarps];
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

    float accumulator[kColumns];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) { accumulator[c] = 0.0F; }
    float top = -INFINITY;
    float sum = 0.0F;
    if (exists) {
      auto const lse_of = [&](int part) {
        return task.partial.lse[static_cast<std::int64_t>(tile.slot(part)) * task.partial.rows + row];
      };
      for (int part = lane; part < tile.parts; part += 32) { top = fmaxf(top, lse_of(part)); }
      CUTE_UNROLL
      for (int step = 16; step > 0; step /= 2) { top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step)); }
      if (top != -INFINITY) {
#pragma unroll(16 / kColumns)
        for (int part = share_of_row; part < tile.parts; part += warps_per_row) {
          float const weight = exp2f(lse_of(part) - top);
          sum += weight;
          float const* const from =
              task.partial.out +
              (static_cast<std::int64_t>(tile.slot(part)) * task.partial.rows + row) * params.head_dim_v;
          CUTE_UNROLL
          for (int c = 0; c < kColumns; c += 4) {
            int const column = c * 32 + lane * 4;
            if (column < params.head_dim_v) {
              float4 const value = *reinterpret_cast<float4 const*>(from + column);
              accumulator[c] += weight * value.x;
              accumulator[c + 1] += weight * value.y;
              accumulator[c + 2] += weight * value.z;
              accumulator[c + 3] += weight * value.w;
            }
          }
        }
      }
    }
    if (warps_per_row > 1) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) { shared_out[warp][c * 32 + lane] = accumulator[c]; }
      if (lane == 0) { shared_sum[warp] = sum; }
      __syncthreads();
      if (share_of_row == 0) {
        for (int other = warp + 1; other < warp + warps_per_row; ++other) {
          CUTE_UNROLL
          for (int c = 0; c < kColumns; ++c) { accumulator[c] += shared_out[other][c * 32 + lane]; }
          sum += shared_sum[other];
        }
      }
      __syncthreads();
      if (share_of_row != 0) { continue; }
    }
    if (!exists) { continue; }

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
        float const value = accumulator[c] * scale;
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
