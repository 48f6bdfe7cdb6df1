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

// A team of lanes has a row at a time. Several teams share a row where a tile has many parts; they add up in shared
// memory in a fixed order. 16,384 rows of two parts took 17 us with 430 instructions of a warp for each row.
template <KernelFamily kFamily, CombineShape kShape>
__global__ void __launch_bounds__(kSplitCombineThreads, kShape.blocks)
    split_combine_kernel(__grid_constant__ SplitCombineParams const params) {
  constexpr int kLanes = kShape.lanes;
  constexpr int kColumns = kShape.columns;
  using Parts = PartsOfRow<kLanes, kColumns>;
  constexpr int kTeams = kSplitCombineThreads / kLanes;
  __shared__ float shared_out[kTeams][kColumns][kLanes];
  __shared__ float shared_sum[kTeams];
  __shared__ float shared_top[kTeams];
  int const blocks_of_first = params.task[0].candidates * params.task[0].blocks;
  bool const second = static_cast<int>(blockIdx.x) >= blocks_of_first;
  SplitCombineTask const& task = params.task[second ? 1 : 0];
  int const index = static_cast<int>(blockIdx.x) - (second ? blocks_of_first : 0);
  int const block = index / task.candidates;  // of the candidate
  int const candidate = index - block * task.candidates;
  int const lane = threadIdx.x % kLanes;  // of the team
  int const team = threadIdx.x / kLanes;
  // The next kernel may be set up as soon as all blocks are here: none of them can lack room for its CTAs.
  if (params.next_starts_early) { start_dependents(); }
  // By one warp: blocks are many, and all of their warps would be in each other's way.
  __shared__ PartedTile shared_tile;
  __shared__ Sequence shared_sequence;
  if (threadIdx.x < 32) {
    Sequence found{};
    warm_schedule(task.schedule, params.sequences);
    PartedTile const parted = find_parted_tile<kFamily>(task, params.sequences, found, candidate);
    if (threadIdx.x == 0) {
      shared_tile = parted;
      shared_sequence = found;
    }
  }
  __syncthreads();
  PartedTile const tile = shared_tile;
  Sequence const sequence = shared_sequence;
  if (tile.place >= 0) { start_dependents(); }  // otherwise it may at the end
  // The schedule and the lengths are older than the parts. Blocks without a tile make room for others, but for one, so
  // that this kernel ends last.
  if (tile.place >= 0 || blockIdx.x == 0) { wait_for_prerequisites(); }
  if (tile.place < 0) { return; }

  QueryRange const queries = query_range(task.packing, task.slabs, tile.m, sequence.len.q);
  int const packed_heads = params.packed_heads.divisor;
  int const existing = min_of(queries.last + 1, params.rows - sequence.q_row);  // queries of the tile end here
  std::int64_t const out_of_tile = sequence.q_batch * params.out_stride_batch +
                                   static_cast<std::int64_t>(tile.head * packed_heads) * params.out_stride_head;
  int teams_of_row = 1;
  while (teams_of_row < kTeams && teams_of_row * kPartsOfGroup < tile.parts.count) { teams_of_row *= 2; }
  int const rows_at_once = kTeams / teams_of_row;
  int const share_of_row = team % teams_of_row;
  int const pieces = tile.shares * task.blocks;
  int const piece = tile.share * task.blocks + block;
  int const rows = min_of(rows_of_queries(task.packing, existing - queries.first), task.partial.rows);
  int const end = (piece + 1) * rows / pieces;

  for (int first = piece * rows / pieces; first < end; first += rows_at_once) {
    int const row = first + team / teams_of_row;
    int const slab = row / kSlabRows;
    int const query_in_slab = params.packed_heads.quotient(row - slab * kSlabRows);
    int const query = queries.first + slab * task.packing.queries_per_slab + query_in_slab;
    int const head = row - slab * kSlabRows - query_in_slab * packed_heads;  // of the packed ones
    bool const exists = row < end && query_in_slab < task.packing.queries_per_slab && query < existing;

    auto merged = MergedRow<kColumns>::none();
    CUTE_NO_UNROLL
    for (int before = 0; before < tile.parts.count; before += teams_of_row * kPartsOfGroup) {
      int const begin = before + share_of_row * kPartsOfGroup;
      int const end_of_group = exists ? min_of(begin + kPartsOfGroup, tile.parts.count) : begin;
      auto group = MergedRow<kColumns>::none();
      CUTE_UNROLL
      for (int i = 0; i < kPartsOfGroup; i += Parts::kAtOnce) {
        if (begin + i >= end_of_group) { break; }
        Parts found;
        found.load(task.partial, tile.parts, params.head_dim_v, row, lane * 4, begin + i);
        found.add_to(group, tile.parts, begin + i);
      }
      if (teams_of_row == 1) {
        merged.add(group);
        continue;  // there is no other
      }
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) { shared_out[team][c][lane] = group.columns[c]; }
      if (lane == 0) {
        shared_sum[team] = group.sum;
        shared_top[team] = group.top;
      }
      __syncthreads();
      CUTE_NO_UNROLL
      for (int i = 0; share_of_row == 0 && i < teams_of_row && before + i * kPartsOfGroup < tile.parts.count; ++i) {
        MergedRow<kColumns> other;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) { other.columns[c] = shared_out[team + i][c][lane]; }
        other.sum = shared_sum[team + i];
        other.top = shared_top[team + i];
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
      if (c * kLanes + lane * 4 >= params.head_dim_v) { continue; }
      if (params.dtype == DataType::kBFloat16) {
        store_columns(static_cast<cutlass::bfloat16_t*>(params.out) + offset + c * kLanes, merged, c, ended);
      } else {
        store_columns(static_cast<cutlass::half_t*>(params.out) + offset + c * kLanes, merged, c, ended);
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
