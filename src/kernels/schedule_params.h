// What the host hands to the kernel that makes the schedule.
#pragma once

#include "kernels/schedule.h"

namespace hopper_attention {

struct ScheduleKernelParams {
  SequenceParams sequences;
  MaskParams mask;
  TileShape prefill;
  TileShape decode;
  int* metadata;  // as schedule.h lays it out
};

inline constexpr int kScheduleThreads = 1024;

// Threads for a batch: each takes one sequence where there are enough.
inline int schedule_threads(int batch) { return min_of(kScheduleThreads, max_of(256, ceil_div(batch, 32) * 32)); }

}  // namespace hopper_attention
