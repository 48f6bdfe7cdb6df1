// The first item of a CTA for many queries, found while the kernel before still runs (guessed_work.h).
#pragma once

#include "kernels/cute.h"

#include "kernels/guessed_work.h"
#include "kernels/params.h"
#include "kernels/schedule.h"
#include "kernels/start_role.h"
#include "kernels/tile_work.h"
#include "kernels/work_queue.h"
#include "kernels/work_source.h"

namespace hopper_attention {

// No PlacesAndCuts.
inline constexpr int kNoFact = -1;

// Whether the kernel before is likely to run long enough. Others let this one begin no earlier than they end.
template <class Traits>
__device__ __forceinline__ bool may_guess(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  // While this comes the warp of keys is through its wait, if there is nothing to wait for.
  int const fact = load_hint(where_is(params.schedule.metadata, params.schedule.stride, kPlacesAndCuts));
  return __all_sync(0xffffffff, (fact != kNoFact) & !test_barrier(shared.early.may_start, 0));
}

// Finds it in a copy of the schedule, and publishes it, or that there is none, when the kernel before has ended, if all
// that was read is still the same. What compares has run once by then, so that its instructions are there.
template <class Traits>
__device__ __forceinline__ bool publish_guess(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  using Source = WorkSource<Traits::kPlacesNear, typename Traits::Few, HintLoad>;
  using State = typename Source::State;
  constexpr int kSlabs = Traits::kConsumerWarpgroups;
  int const lane = static_cast<int>(threadIdx.x % 32);
  ScheduleCopy const copy(params.schedule, shared.schedule_copy());
  auto& state = *reinterpret_cast<State*>(shared.source);
  Source source(params, copy.words(), state, kSlabs, Traits::kKeys);
  bool publishes = true;
  bool holds = false;
  CUTE_NO_UNROLL
  for (bool is_guess = true;; is_guess = false) {
    if (!is_guess) { start(params); }
    holds = copy.refresh();
    if (is_guess) {
      if (lane == 0) { new (&state) State(Schedule(params.schedule, copy.words(), may_part_in_prefill_kernel)); }
      __syncwarp();
      WorkItem item;
      Sequence sequence;
      bool const ends_soon =
          source.next(item, sequence, [](Draws const& draws) { return draws.item(static_cast<int>(blockIdx.x), 0); });
      TileWork work;
      work.last = item.place < 0;
      if (!work.last) {
        work = tile_work(params, kSlabs, Traits::kKeys, item, sequence);
        publishes = work.queries.first <= work.queries.last;
        work.announces_loads = ends_soon && takes_long<Traits>(work);
      }
      write_work<Traits>(params, shared, 0, work);
    }
    holds = source.lengths_hold() && holds;
    if (!is_guess) { break; }
  }
  leave_schedule_copy<Traits>();
  __syncwarp();
  publishes = publishes && holds;
  if (publishes && lane < kWritersOfWork<Traits>) { arrive_barrier(shared.work_full[0]); }
  return publishes;
}

// Not by the scheduler warp, which has no registers for this and for the items that follow: it goes on behind the first
// one, or begins with it if nothing has been published. All lanes of a warp that waits for no item yet.
template <class Traits>
__device__ __forceinline__ void publish_early(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  // By consumers a guess takes no longer than what it saves, whatever runs before.
  bool const guesses = Traits::kConsumerGuesses || may_guess<Traits>(params, shared);
  bool const publishes = guesses && publish_guess<Traits>(params, shared);
  if (threadIdx.x % 32 == 0) { shared.early.published = publishes; }
  arrive_barrier(shared.early.known);
  __syncwarp();
}

}  // namespace hopper_attention
