// What the host hands to the kernel that makes the schedule.
#pragma once

#include "hopper_attention/types.h"
#include "kernels/even_parts.h"
#include "kernels/schedule.h"
#include "kernels/schedule_layout.h"
#include "kernels/sequence_work.h"

namespace hopper_attention {

struct ScheduleKernelParams {
  SequenceParams sequences;
  MaskParams mask;
  FastTileShape prefill;
  FastTileShape decode;
  EvenParts even_parts;
  FewReaders readers;
  int* metadata;  // as schedule.h lays it out
};

inline constexpr int kScheduleThreads = 1024;  // of a CTA, at most; the last warp takes no sequences
inline constexpr int kScheduleBuckets = 256;   // of the sort: a CTA has at least as many threads
inline constexpr int kScheduleCluster = 8;     // CTAs that share a large batch
inline constexpr int kMostPlacesOfOneCta = 512;

struct ScheduleGrid {
  int ctas;  // 1 or kScheduleCluster
  int threads;
};

// A thread takes one sequence where there are enough threads. What a sequence takes are instructions of its SM, so that
// a large batch is shared by several; a small one is faster without waiting for other CTAs.
inline ScheduleGrid schedule_grid(int batch) {
  int const ctas = batch <= kMostPlacesOfOneCta ? 1 : kScheduleCluster;
  int const wanted = ceil_div(ceil_div(batch, ctas), 32) * 32;
  return {ctas, min_of(kScheduleThreads, max_of(kScheduleBuckets, wanted) + 32)};
}

}  // namespace hopper_attention
