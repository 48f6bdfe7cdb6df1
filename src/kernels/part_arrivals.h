// Which CTA leaves the last part of a tile in the workspace. That one merges them, so that no kernel has to follow.
//
// The words that parts are counted in lie in the workspace, which may hold anything before a call. So a count is worth
// something only with the tag of its call, which follows from a number that the calls of a workspace count up: the CTA
// that is the last to have read it does so, as the schedule's counter tells, which is 0 between calls. Any first number
// will do. What calls before have left behind has another tag, and anything else would have to be a tag of 54 bits by
// chance. But calls of another kind may write what they like over the number, and the same each time, while they leave
// the words alone: so whoever counts the last part of a tile takes the count back, and a number that returns finds
// none.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// Words of the workspace: the number of the call, then one for each slot, of which a tile has that of its first part.
HA_HOST_DEVICE constexpr std::int64_t word_of_slot(std::int64_t slot) { return 1 + slot; }
HA_HOST_DEVICE constexpr std::int64_t arrival_words(std::int64_t slots) { return word_of_slot(slots); }

// An item that may be a part of a tile, and the number of the call. Which parts there are is found when this one is
// done: the way to the first item is longer than it takes to find them.
struct ArrivingPart {
  Chunks chunks;
  int tile_begin;  // units of the list
  int tile_end;
  std::uint64_t call;

  HA_HOST_DEVICE constexpr TileParts parts() const { return parts_of_tile(chunks, tile_begin, tile_end); }
};

// Parts that whoever leaves the last of them merges.
struct MergeStep {
  TileParts parts;
  int counted_in;  // the slot whose word counts them
  bool ends_tile;  // otherwise the result takes the place of the first part
};

// A tile in many parts is merged in two steps, so that several CTAs share what is to be read: one sequence of 16k keys
// beside 15 of 1k takes 15.4 instead of 21.0 us. What is merged with the part in `slot`, and what is left then.
inline constexpr int kPartsOfStep = 8;
inline constexpr int kMostPartsOfOneStep = 16;

HA_HOST_DEVICE constexpr MergeStep first_merge(TileParts const& all, int slot) {
  if (all.count <= kMostPartsOfOneStep) { return {all, all.first_slot, true}; }
  TileParts const group = all.group(all.part_in(slot) / kPartsOfStep, kPartsOfStep);
  return {group, group.first_slot, false};
}
HA_HOST_DEVICE constexpr MergeStep last_merge(TileParts const& all) {
  return {all.groups(kPartsOfStep), all.slot(1), true};
}

// A count of parts with the tag of call `number` above it.
struct TaggedCount {
  static constexpr int kCountBits = 10;
  static constexpr std::uint64_t kMostCounted = (std::uint64_t{1} << kCountBits) - 1;

  // An odd factor, so that numbers have different tags, and words that are filled alike are none.
  HA_HOST_DEVICE static constexpr std::uint64_t none(std::uint64_t number) {
    return (number * 0x9e3779b97f4a7c15U + 0x3c6ef372fe94f82bU) << kCountBits;
  }
  HA_HOST_DEVICE static constexpr bool is_of(std::uint64_t none, std::uint64_t word) {
    return (word & ~kMostCounted) == none;
  }
  HA_HOST_DEVICE static constexpr int count(std::uint64_t word) { return static_cast<int>(word & kMostCounted); }
};

#if defined(__CUDACC__)

__device__ __forceinline__ void fence_of_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The number of this call, behind the wait for the kernel before.
__device__ __forceinline__ std::uint64_t number_of_call(std::uint64_t const* arrivals) {
  std::uint64_t number;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(number) : "l"(arrivals) : "memory");
  return number;
}

// By one lane of each CTA, which has read `number`. `counter` of the schedule is 0 before and behind.
__device__ __forceinline__ void leave_number(std::uint64_t* arrivals, std::uint64_t number, int* counter) {
  fence_of_device();
  unsigned const last = gridDim.x - 1;
  if (atomicInc(reinterpret_cast<unsigned*>(counter), last) != last) { return; }
  fence_of_device();
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(arrivals), "l"(number + 1) : "memory");
}

// Behind the last part: none have come.
__device__ __forceinline__ void forget_parts(std::uint64_t* word, std::uint64_t number) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(TaggedCount::none(number)) : "memory");
}

// Counts a part; how many have come before it. By the lane of a warp that `counts`, if one does; the others go along,
// since ptxas keeps nothing in uniform registers behind a loop that some lanes leave.
__device__ __forceinline__ int count_part(std::uint64_t* word, std::uint64_t number, bool counts) {
  auto* const counted = reinterpret_cast<unsigned long long*>(word);
  unsigned long long const none = TaggedCount::none(number);
  unsigned long long found = counts ? atomicAdd(counted, 1ULL) : none;
  while (__any_sync(0xffffffff, !TaggedCount::is_of(none, found))) {
    // The first one, unless another one is; what was added to any other word is lost with it.
    if (counts) {
      unsigned long long const other = found + 1;
      found = atomicCAS(counted, other, none + 1);
      found = found == other ? none : TaggedCount::is_of(none, found) ? atomicAdd(counted, 1ULL) : found - 1;
    }
  }
  return TaggedCount::count(found);
}

#endif

}  // namespace hopper_attention
