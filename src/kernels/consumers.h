// Consumer warpgroups: item after item, the main loop, then what ends a tile or a part of one.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_merge.h"
#include "kernels/epilogue.h"
#include "kernels/folded_tile.h"
#include "kernels/joint_merge.h"
#include "kernels/mainloop.h"
#include "kernels/params.h"
#include "kernels/start_role.h"
#include "kernels/swapped_epilogue.h"
#include "kernels/swapped_mainloop.h"
#include "kernels/tile_exchange.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"
#include "kernels/work_queue.h"

namespace hopper_attention {

// Tiles of at most 32 rows. Where these may have no more than 16, they are computed as such a tile is: 2k queries
// beside 8 single ones on 16k keys, 8/1 heads, take 54 us so, and 60 with 32 columns for each query.
template <class Traits>
__device__ __forceinline__ void consume_swapped(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  ClusterMerge<Traits> merge(params, shared, thread);
  [[maybe_unused]] FoldedTile<Traits> folded;
  RingState<Traits::kStages> read;
  RingState<Traits::kQueryBuffers> q;
  start_role<Traits>(params);
  auto const compute = [&](TileWork const& work, auto rows) __attribute__((always_inline)) {
    constexpr int kRows = decltype(rows)::value;
    SwappedMainloop<Traits, kRows> mainloop(params, shared, thread);
    SwappedEpilogue<Traits, kRows> const epilogue{params, shared, thread};
    TilePart const part = Traits::kInParts ? work.part : TilePart::kWhole;
    if (begins_tile(part)) { wait_barrier(shared.q_full[q.slot][0], q.phase); }
    mainloop.mma(work, q.slot, read, [&]() {
      if (thread == 0 && ends_tile(part)) { arrive_barrier(shared.q_empty[q.slot][0]); }
    });
    PartEnd ends[columns_of_thread(kRows)];
    if constexpr (Traits::kInParts) {
      mainloop.finish(ends);
      if (part != TilePart::kWhole) { divide_by_sums(ends, mainloop.output()); }
      if (is_folded(part)) {
        folded.add(begins_tile(part), ends, mainloop.output());
        if (!ends_tile(part)) {
          sync_warpgroup(0);  // all have their ends, before the next part's maxima take the place of these
          return;
        }
        folded.finish(ends, mainloop.output());
      }
      ++q;
    } else {
      ++q;
      mainloop.finish(ends);
    }
    if (work.in_cluster) {
      merge(work, [&](int row_count) { epilogue.send(merge, ends, mainloop.output(), row_count); });
    } else if (work.slot >= 0) {
      epilogue.store_part(work, ends, mainloop.output());
    } else {
      epilogue.store(work, ends, mainloop.output());
    }
  };
  for_each_work<Traits>(shared, [&](TileWork const& work) __attribute__((always_inline)) {
    if constexpr (Traits::kQueryRows > kMostFewRows) {
      int const rows = (work.queries.last + 1 - work.queries.first) * params.packing.heads.divisor;
      if (__shfl_sync(0xffffffff, rows, 0) <= kMostFewRows) {
        compute(work, Int<kMostFewRows>{});
        return;
      }
    }
    compute(work, Int<Traits::kQueryRows>{});
  });
  if constexpr (Traits::kMergesJointly) { JointMerge<Traits>(params, shared, thread)(); }
  if (may_share_tiles<Traits>(params)) { merge.finish(); }
}

// A tile of at most 16 rows in a kernel for many. Warpgroup 0 computes it as kernels for few rows do, while the others
// give back the slots of its keys. `after_scores` is called as soon as no thread of the warpgroup needs Q any more.
template <class Traits, class AfterScores>
__device__ __forceinline__ void compute_few_rows(CollectiveMainloop<Traits> const& of_many, TileWork const& work,
                                                 int q_slot, RingState<Traits::kStages>& read,
                                                 AfterScores after_scores) {
  if (of_many.warpgroup > 0) {
    if (!work.range.empty()) { of_many.skip_tile(work, false_type{}, read); }
    if constexpr (Traits::kQueryBuffers == 1) {
      sync_warpgroup(of_many.warpgroup);  // all have seen Q arrive
      after_scores();
    }
    return;
  }
  SwappedMainloop<Traits, kMostFewRows> mainloop(of_many.params, of_many.shared, of_many.thread);
  SwappedEpilogue<Traits, kMostFewRows> const epilogue{of_many.params, of_many.shared, of_many.thread};
  mainloop.mma(work, q_slot, read, after_scores);
  PartEnd ends[columns_of_thread(kMostFewRows)];
  mainloop.finish(ends);
  if (work.slot >= 0) {
    epilogue.store_part(work, ends, mainloop.output());
  } else {
    epilogue.store(work, ends, mainloop.output());
  }
}

template <class Traits>
__device__ __forceinline__ void consume(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;
  int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  Turns<Traits> const turns{warpgroup};
  CollectiveMainloop<Traits> const mainloop{params, shared, warpgroup, thread, turns};
  CollectiveEpilogue<Traits> const epilogue{params, shared, warpgroup, thread};
  ClusterMerge<Traits> merge(params, shared, thread);
  TileExchange<Traits> exchange(params, shared, warpgroup);
  // Wider heads have none left, nor has a block of more keys.
  constexpr bool kItemInRegisters = Traits::kHeadDimV <= 192 && !Traits::kOneBlock;
  constexpr bool kTwoBuffers = Traits::kQueryBuffers == 2;
  constexpr bool kOutputInRing = Traits::kOutputSlots > 0;

  cute::Tensor tSrS = partition_fragment_C(typename Traits::MmaQk{}, Shape<Int<kSlabRows>, Int<Traits::kSlabKeys>>{});
  cute::Tensor tOrO = partition_fragment_C(typename Traits::MmaPv{}, Shape<Int<kSlabRows>, Int<Traits::kHeadDimV>>{});
  start_role<Traits>(params);
  turns.setup();
  RingState<Traits::kStages> read;
  RingState<Traits::kQueryBuffers> q;

  RingState<Traits::kStages> output;  // slots of the tile before
  bool none_before = true;            // that has left anything to be given back
  ThreadKeys seen;
  // Waits for Q also for work without keys: O may take its place, so the slab must be this tile's.
  auto const begin = [&](TileWork const& work, SlabRange const& slab, auto in_turns) __attribute__((always_inline)) {
    if (!work.last) { wait_barrier(shared.q_full[q.slot][warpgroup], q.phase); }
    // Blocks that are skipped may need the slots that O of the tile before is in.
    bool const skips_far = Traits::kSkips && !work.last && !slab.empty() && work.range.end - slab.end > 1;
    if (kOutputInRing && skips_far) { mainloop.release_output(output, !none_before); }
    seen = mainloop.issue_first_scores(work, slab, in_turns, q.slot, read, tSrS);
    if (kOutputInRing && !skips_far) { mainloop.release_output(output, !none_before); }
  };
  auto const release_q = [&](int buffer) __attribute__((always_inline)) {
    sync_warpgroup(warpgroup);
    if (thread == 0) { arrive_barrier(shared.q_empty[buffer][warpgroup]); }
  };

  WorkState<Traits> items;
  // Whether this warpgroup's slab lies behind the tile's last query. Of 192 rows, sequences of 32 queries have one that
  // does not.
  auto const is_idle = [&](TileWork const& item) __attribute__((always_inline)) {
    return Traits::kMayIdle && lies_behind(item, warpgroup, params.packing.queries_per_slab);
  };
  // What this warpgroup's slab visits of an item.
  auto const slab_of = [&](WorkState<Traits> const& item) __attribute__((always_inline)) {
    if constexpr (Traits::kSkips) {
      return shared.slabs[item.slot][warpgroup];
    } else {
      SlabRange all = shared.work[item.slot].range.of_all_slabs();
      if (is_idle(shared.work[item.slot])) { all.end = all.begin; }
      return all;
    }
  };
  auto const takes_turns = [&](WorkState<Traits> const& item) __attribute__((always_inline)) {
    if constexpr (Traits::kTurnsInSomeTiles) {
      return is_in_turns(shared.work[item.slot].range, shared.slabs[item.slot][0], Traits::kConsumerWarpgroups);
    } else {
      return true_type{};
    }
  };
  TileWork const* work = &wait_work<Traits>(shared, items);
  if constexpr (Traits::kScoresEarly) {
    begin(*work, slab_of(items), takes_turns(items));
    mainloop.wait_first_scores(tSrS);
  }
  while (!work->last) {
    int const buffer = q.slot;
    // The tile before has O in the other buffer, whose store is done long ago.
    auto const after_tile_before = [&]() __attribute__((always_inline)) {
      if (kTwoBuffers && thread == 0 && !none_before) {
        epilogue.wait_stores();
        arrive_barrier(shared.q_empty[buffer ^ 1][warpgroup]);
      }
    };
    if constexpr (Traits::kMixed) {
      int const rows = (work->queries.last + 1 - work->queries.first) * params.packing.heads.divisor;
      if (__shfl_sync(0xffffffff, rows, 0) <= kMostFewRows) {
        wait_barrier(shared.q_full[buffer][warpgroup], q.phase);
        after_tile_before();
        if constexpr (kOutputInRing) { mainloop.release_output(output, !none_before); }
        compute_few_rows(mainloop, *work, buffer, read, [&]() __attribute__((always_inline)) {
          if (!kTwoBuffers && thread == 0) { arrive_barrier(shared.q_empty[buffer][warpgroup]); }
        });
        if constexpr (kOutputInRing) { mainloop.skip_output(read); }
        none_before = kOutputInRing;
        ++q;
        release_work<Traits>(shared, items);
        ++items;
        work = &wait_work<Traits>(shared, items);
        continue;
      }
    }
    TileWork at_start;
    if constexpr (kItemInRegisters) { at_start = read_at_once(*work); }
    TileWork const& now = kItemInRegisters ? at_start : *work;
    SlabRange const visited = slab_of(items);
    auto const in_turns = takes_turns(items);
    if constexpr (Traits::kOneBlock) { forget(tSrS); }
    if constexpr (!Traits::kScoresEarly) {
      begin(now, visited, in_turns);
      mainloop.wait_first_scores(tSrS);
    }
    TileWork finished;  // the same, read again under the last product: before, there are no registers for all of it
    typename Traits::Softmax softmax(params.softmax);
    auto const after_scores = [&]() __attribute__((always_inline)) {
      if constexpr (!kTwoBuffers) { release_q(buffer); }
      finished = read_at_once(*work);
    };
    if (!visited.empty()) {
      mainloop.mma(now, visited, in_turns, seen, buffer, read, softmax, tSrS, tOrO, after_tile_before, after_scores);
    } else {
      clear(tOrO);
      after_tile_before();
      after_scores();
      if (Traits::kMayIdle && !finished.range.empty()) { mainloop.skip_tile(finished, in_turns, read); }
    }
    none_before = false;
    ++q;
    WorkState<Traits> const item = items;
    ++items;
    if constexpr (Traits::kScoresEarly) {
      work = &wait_work<Traits>(shared, items);
      begin(*work, slab_of(items), takes_turns(items));
    }
    typename Traits::Element* slab = shared.q[buffer][warpgroup];
    if constexpr (kOutputInRing) {
      output = read;
      slab = mainloop.wait_output(read);
      read.advance(Traits::kOutputSlots);
    }
    if (Traits::kDecode && finished.in_cluster) {
      if constexpr (Traits::kDecode) {
        merge(finished, [&](int row_count) { epilogue.send(merge, softmax, tOrO, row_count); });
      }
    } else {
      SlabRows here;
      if constexpr (Traits::kPaired) {
        if (finished.in_cluster) { here = exchange(softmax, tOrO); }
      }
      if (!here.empty() && !is_idle(finished)) {
        epilogue.store(finished, slab, softmax, tOrO, here);
      } else {
        sync_warpgroup(warpgroup);  // no warp multiplies by Q any more
      }
    }
    release_work<Traits>(shared, item);
    if constexpr (Traits::kScoresEarly) {
      mainloop.wait_first_scores(tSrS);
    } else {
      work = &wait_work<Traits>(shared, items);
    }
  }
  epilogue.wait_stores();
  if constexpr (Traits::kMergesJointly) { JointMerge<Traits>(params, shared, thread)(); }
  if constexpr (Traits::kDecode) {
    if (may_share_tiles<Traits>(params)) { merge.finish(); }
  }
  if constexpr (Traits::kPaired) { exchange.finish(); }
}

}  // namespace hopper_attention
