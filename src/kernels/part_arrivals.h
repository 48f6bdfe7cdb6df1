// Who merges the parts of a tile that CTAs have left in the workspace, and when: those that left them, each some of its
// rows, so that no kernel has to follow.
//
// A CTA waits for the other parts of a tile only when all CTAs of the grid have begun, so that no wait depends on an SM
// that is not free, and when it has left all of its own, so that no two wait for each other. Those that come earlier go
// on; if none has waited, the one that comes last merges alone.
//
// The words that parts are counted in lie in the workspace, which may hold anything before a call. So a count is worth
// something only with the tag of its call, which follows from a number that the calls of a workspace count up: the CTA
// that is the last to have read it does so, as a counter of the schedule tells, which is 0 between calls. That also
// says that all have begun. Any first number will do. What calls before have left behind has another tag, and anything
// else would have to be a tag of 37 bits by chance. But calls of another kind may write what they like over the number,
// and the same each time, while they leave the words alone: so the last to have seen all parts of a tile takes the
// counts back, and a number that returns finds none.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// Words of the workspace: the number of the call, then one for each slot, of which a tile has that of its first part.
HA_HOST_DEVICE constexpr std::int64_t word_of_slot(std::int64_t slot) { return 1 + slot; }
HA_HOST_DEVICE constexpr std::int64_t arrival_words(std::int64_t slots) { return word_of_slot(slots); }

// An item that is a part of a tile, and the number of the call. Which parts there are is found when this one is done:
// the way to the first item is longer than it takes to find them.
struct ArrivingPart {
  Chunks chunks;
  int tile_begin;  // units of the list
  int tile_end;
  std::uint64_t call;

  HA_HOST_DEVICE constexpr TileParts parts() const { return parts_of_tile(chunks, tile_begin, tile_end); }
};

// A grid that counts parts has no more CTAs.
inline constexpr int kMostPartsOfTile = 511;

// Counts of a tile: parts that have come, CTAs among theirs that wait for all of them, and those of these that have
// seen all. Above them is the tag of call `number`.
struct ArrivalCounts {
  static constexpr int kBits = 9;  // of each
  static constexpr int kMost = (1 << kBits) - 1;
  static_assert(kMostPartsOfTile <= kMost);
  static constexpr std::uint64_t kPart = 1;
  static constexpr std::uint64_t kWaiter = std::uint64_t{1} << kBits;
  static constexpr std::uint64_t kSeen = std::uint64_t{1} << 2 * kBits;
  static constexpr std::uint64_t kAll = (std::uint64_t{1} << 3 * kBits) - 1;

  // An odd factor, so that numbers have different tags, and words that are filled alike are none.
  HA_HOST_DEVICE static constexpr std::uint64_t none(std::uint64_t number) {
    return (number * 0x9e3779b97f4a7c15U + 0x3c6ef372fe94f82bU) << 3 * kBits;
  }
  HA_HOST_DEVICE static constexpr bool is_of(std::uint64_t none, std::uint64_t word) { return (word & ~kAll) == none; }

  HA_HOST_DEVICE static constexpr int parts(std::uint64_t word) { return static_cast<int>(word & kMost); }
  HA_HOST_DEVICE static constexpr int waiters(std::uint64_t word) { return static_cast<int>(word >> kBits & kMost); }
  HA_HOST_DEVICE static constexpr int seen(std::uint64_t word) { return static_cast<int>(word >> 2 * kBits & kMost); }
};

// Rows of a tile that a CTA merges: rank, rank + shares, rank + 2 * shares, ... None if there are no shares.
struct ShareOfRows {
  int rank = 0;
  int shares = 0;
};

// Of one that has counted its part of `parts`, and itself if it waits. `before`, `now`: the word before that, and when
// it has seen all parts come, or has not waited.
HA_HOST_DEVICE constexpr ShareOfRows share_of_rows(bool waits, std::uint64_t before, std::uint64_t now, int parts) {
  if (parts < 1 || ArrivalCounts::parts(now) < parts) { return {}; }
  int const waiters = ArrivalCounts::waiters(now);
  if (waits) { return {ArrivalCounts::waiters(before), waiters}; }
  return {0, waiters == 0 ? 1 : 0};
}

#if defined(__CUDACC__)

__device__ __forceinline__ void fence_of_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The number of this call, behind the wait for the kernel before.
__device__ __forceinline__ std::uint64_t number_of_call(std::uint64_t const* arrivals) {
  std::uint64_t number;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(number) : "l"(arrivals) : "memory");
  return number;
}

// By one lane of each CTA, which has read `number`: the last one leaves the next. `counter`, of the schedule, is 0
// before and behind; nobody draws from it.
__device__ __forceinline__ void count_cta(std::uint64_t* arrivals, std::uint64_t number, int* counter) {
  fence_of_device();
  unsigned const last = gridDim.x - 1;
  if (atomicInc(reinterpret_cast<unsigned*>(counter), last) != last) { return; }
  fence_of_device();
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(arrivals), "l"(number + 1) : "memory");
}

// Of the counts of a tile.
__device__ __forceinline__ std::uint64_t load_counts(std::uint64_t const* word) {
  std::uint64_t counts;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(counts) : "l"(word) : "memory");
  return counts;
}
__device__ __forceinline__ void store_counts(std::uint64_t* word, std::uint64_t counts) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(counts) : "memory");
}

// Adds to the counts of a tile; what they were before. By the lanes of a warp that `count`; the others go along, since
// ptxas keeps nothing in uniform registers behind a loop that some lanes leave.
__device__ __forceinline__ std::uint64_t add_to_counts(std::uint64_t* word, std::uint64_t none, std::uint64_t added,
                                                       bool counts) {
  auto* const counted = reinterpret_cast<unsigned long long*>(word);
  unsigned long long const more = added;
  unsigned long long found = counts ? atomicAdd(counted, more) : none;
  while (__any_sync(0xffffffff, !ArrivalCounts::is_of(none, found))) {
    // The first one, unless another one is; what was added to any other word is lost with it.
    if (counts && !ArrivalCounts::is_of(none, found)) {
      unsigned long long const other = found + more;
      found = atomicCAS(counted, other, none + more);
      found = found == other ? none : ArrivalCounts::is_of(none, found) ? atomicAdd(counted, more) : found - more;
    }
  }
  return found;
}

#endif

}  // namespace hopper_attention
