// What the host hands to the kernel that makes the schedule.
#pragma once

#include "kernels/schedule.h"

namespace hopper_attention {

// Where sequences are at most kMostFewTiles, all with few queries, and their tiles, of all head groups, at most half as
// many as the CTAs of a call, units are rounded up to whole chunks of the call. A chunk then lies in one tile; one that
// ends in the next tile is two items, and its CTA is done last. Tiles are cut in proportion to the blocks that they
// have nevertheless; whether to cut follows from the rounded sums.
struct FewTiles {
  int ctas = 0;  // 0: units are not rounded
  int head_groups = 1;
  int least_units = 1;  // of a chunk
};
inline constexpr int kMostFewTiles = 32;  // a lane of a warp for each

struct ScheduleKernelParams {
  SequenceParams sequences;
  MaskParams mask;
  TileShape prefill;
  TileShape decode;
  FewTiles few_tiles;
  int* metadata;  // as schedule.h lays it out
};

inline constexpr int kScheduleThreads = 1024;  // of a CTA, at most
inline constexpr int kScheduleBuckets = 256;   // of the sort: a CTA has at least as many threads
inline constexpr int kScheduleCluster = 8;     // CTAs that share a large batch

struct ScheduleGrid {
  int ctas;  // 1 or kScheduleCluster
  int threads;
};

// A thread takes one sequence where there are enough threads. What a sequence takes are instructions of its SM, so that
// a large batch is shared by several; a small one is faster without waiting for other CTAs.
inline ScheduleGrid schedule_grid(int batch) {
  constexpr int kMostOfOneCta = 512;
  int const ctas = batch <= kMostOfOneCta ? 1 : kScheduleCluster;
  int const wanted = ceil_div(ceil_div(batch, ctas), 32) * 32;
  return {ctas, min_of(kScheduleThreads, max_of(kScheduleBuckets, wanted))};
}

}  // namespace hopper_attention
