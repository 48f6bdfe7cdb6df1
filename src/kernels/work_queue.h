// The items of work of a CTA: the scheduler warp publishes them, all other warps read each of them.
#pragma once

#include "kernels/cute.h"

#include "kernels/left_part.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/start_role.h"
#include "kernels/tile_sources.h"
#include "kernels/tile_work.h"
#include "kernels/work_source.h"

namespace hopper_attention {

// Lanes that write an item: one, or one for each slab where slabs skip blocks. Each arrives at work_full for what it
// has written, since racecheck sees no order that comes from a __syncwarp; it takes a little longer, but the scheduler
// is ahead of those who wait.
template <class Traits>
inline constexpr int kWritersOfWork = Traits::kSkips ? Traits::kConsumerWarpgroups : 1;

// Behind such an item there is time to find the next.
template <class Traits>
__device__ __forceinline__ bool takes_long(TileWork const& work) {
  constexpr int kLongItem = 8;  // blocks
  return work.range.blocks() >= kLongItem || (Traits::kInParts && work.part == TilePart::kLast);
}

// Whether items may be parts of tiles, which those that leave them merge.
template <class Traits, class Source>
inline constexpr bool kLeavesParts = Traits::kMergesJointly && requires(Source source) { source.begun(); };

// Behind its last use: TMA brings keys to where the copy was.
template <class Traits>
__device__ __forceinline__ void leave_schedule_copy() {
  if constexpr (Traits::kCopyInRing) { cutlass::arch::fence_view_async_shared(); }
}

// Of the last one, no more than that it is. All lanes of a warp; what they have written is read behind work_full.
template <class Traits>
__device__ __forceinline__ void write_work(AttentionParams const& params, typename Traits::SharedStorage& shared,
                                           int slot, TileWork const& work) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) {
    if (work.last) {
      shared.work[slot].last = true;
    } else {
      shared.work[slot] = work;
    }
  }
  if constexpr (Traits::kSkips) {
    __syncwarp();
    if (lane < Traits::kConsumerWarpgroups && !work.last) {
      shared.slabs[slot][lane] = slab_range(params, Traits::kKeys, shared.work[slot], lane);
    }
  }
}

// Publishes the items of `source`, one after the other, and that there are no more. False, and nothing is published, if
// the first one was a guess that is not confirmed behind the wait for the kernel before. `begun`: the first one has
// been published.
template <class Traits, class Source, class Draw>
__device__ __forceinline__ bool publish(AttentionParams const& params, typename Traits::SharedStorage& shared,
                                        Source& source, Draw draw, bool begun) {
  // An item that has been drawn is one that no other CTA can take, so the last ones are drawn late: behind a long one
  // there is time to find the next when all of its loads have been issued, since the blocks that are on their way last
  // longer. 256 tiles of up to 4 MB take 143 us so, and 162 if each is drawn when the one before it is done.
  constexpr int kSlots = Traits::kWorkSlots;
  uint32_t loads_phase = 0;
  int const lane = static_cast<int>(threadIdx.x % 32);
  RingState<kSlots> write;
  WorkItem item;
  bool behind_long_item = false;
  [[maybe_unused]] bool is_first = true;
  if constexpr (Traits::kMergesJointly) {
    if (lane == 0) { shared.parts_left = 0; }
  }
  if (begun) {
    if (shared.work[write.slot].last) { return true; }
    behind_long_item = shared.work[write.slot].announces_loads;
    ++write;
  }
  do {
    wait_barrier(shared.work_empty[write.slot], write.phase ^ 1);
    if (Traits::kDrawn && Source::kDraws && behind_long_item) {
      wait_barrier(shared.loads_issued, loads_phase);
      loads_phase ^= 1;
    }
    TileWork work;
    Sequence drawn;  // apart from `work`, whose other fields then need no register before it is known
    Sequence& sequence = Source::kDraws ? drawn : work.sequence;
    bool ends_soon = false;
    do {
      ends_soon = source.next(item, sequence, draw);
      work.last = item.place < 0;
      if (!work.last) {
        if constexpr (requires { source.work(item, sequence); }) {
          work = source.work(item, sequence);
        } else {
          work = tile_work(params, Traits::kConsumerWarpgroups, Traits::kKeys, item, sequence);
        }
      }
      if constexpr (requires { source.is_guess(); }) {
        if (source.is_guess()) {
          start_role<Traits>(params);
          if (!source.confirm(item, sequence)) { return false; }
          leave_schedule_copy<Traits>();
        }
      }
    } while (!work.last && (work.queries.last < work.queries.first || (Traits::kDecode && !params.takes(sequence))));
    behind_long_item = ends_soon && takes_long<Traits>(work);
    work.announces_loads = Traits::kDrawn && Source::kDraws && behind_long_item;
    __syncwarp();  // every lane has waited, then one writes
    if constexpr (kLeavesParts<Traits, Source>) {
      if (lane == 0 && !work.last && work.slot >= 0 && shared.parts_left < kMostPartsLeft) {
        shared.left()[shared.parts_left++] = {work, source.arriving(item)};
      }
    }
    write_work<Traits>(params, shared, write.slot, work);
    if (lane < kWritersOfWork<Traits>) { arrive_barrier(shared.work_full[write.slot]); }
    if constexpr (kLeavesParts<Traits, Source>) {
      if (lane == 0 && is_first) { source.begun(); }
      is_first = false;
    }
    __syncwarp();
    ++write;
  } while (item.place >= 0);
  return true;
}

template <class Traits>
using WorkState = RingState<Traits::kWorkSlots>;

// The next item of this CTA.
template <class Traits>
__device__ __forceinline__ TileWork const& wait_work(typename Traits::SharedStorage& shared,
                                                     WorkState<Traits> const& read) {
  wait_barrier(shared.work_full[read.slot], read.phase);
  return shared.work[read.slot];
}

// All lanes of a warp.
template <class Traits>
__device__ __forceinline__ void release_work(typename Traits::SharedStorage& shared, WorkState<Traits> const& read) {
  __syncwarp();
  if (threadIdx.x % 32 == kActingLane) { arrive_barrier(shared.work_empty[read.slot]); }
}

// Calls `body(work)` for every item of this CTA. All lanes of a warp.
template <class Traits, class Body>
__device__ __forceinline__ void for_each_work(typename Traits::SharedStorage& shared, Body body) {
  for (WorkState<Traits> read;; ++read) {
    TileWork const& work = wait_work<Traits>(shared, read);
    if (work.last) { break; }
    body(work);
    release_work<Traits>(shared, read);
  }
}

}  // namespace hopper_attention
