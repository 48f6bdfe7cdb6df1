// Brings the schedule and the lengths near, before a warp looks for its work in them.
#pragma once

#include "kernels/params.h"
#include "kernels/schedule.h"
#include "kernels/schedule_layout.h"
#include "kernels/sequences.h"

namespace hopper_attention {

// Starts to bring `count` integers into L1, all lanes of a warp together, so that reading them one after the other
// waits for memory once. More than 32 lines are left to be read as needed.
__device__ __forceinline__ void warm(int const* numbers, int count) {
  constexpr int kLine = 32;  // integers
  int const i = static_cast<int>(threadIdx.x % 32) * kLine;
  if (numbers != nullptr && i < count) {
    [[maybe_unused]] int unused;  // nothing waits for it
    asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(unused) : "l"(numbers + i));
  }
}

// The pages of a sequence.
__device__ __forceinline__ void warm_pages(PageParams const& pages, int batch) {
  if (pages.table != nullptr) { warm(pages.table + batch * pages.stride, pages.width); }
}

__device__ __forceinline__ void warm_lengths(SequenceParams const& sequences) {
  warm(sequences.cu_seqlens_q, sequences.batch + 1);
  warm(sequences.cu_seqlens_k, sequences.batch + 1);
  warm(sequences.seqused_q, sequences.batch);
  warm(sequences.seqused_k, sequences.batch);
}

// What finding work reads: the schedule and the lengths.
__device__ __forceinline__ void warm_schedule(ScheduleParams const& schedule, SequenceParams const& sequences) {
  if (schedule.metadata == nullptr) { return; }
  warm(schedule.metadata, schedule_words(schedule.stride));
  warm_lengths(sequences);
}

}  // namespace hopper_attention
