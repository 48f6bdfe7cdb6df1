// What the host hands to the combine kernel.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace hopper_attention {

// One kernel family whose tiles may be in parts.
struct SplitCombineTask {
  ScheduleParams schedule;
  PartialParams partial;
  Packing packing;
  int slabs = 0;
  int candidates = 0;     // blocks of the grid's x axis that look for a tile in parts
  ClusterParams cluster;  // of the attention kernel
};

struct SplitCombineParams {
  SplitCombineTask task[2];  // prefill and decode
  SequenceParams sequences;
  FastDivmod packed_heads;
  void* out;
  std::int64_t out_stride_batch, out_stride_row, out_stride_head;
  float* lse;
  std::int64_t lse_stride_batch, lse_stride_head;
  void const* sinks;
  DataType sinks_type;
  DataType dtype;
  int head_dim_v;
  int rows;  // of q in one batch entry
  int rows_per_block;
};

inline constexpr int kSplitCombineWarps = 8;
inline constexpr int kSplitCombineThreads = 32 * kSplitCombineWarps;

}  // namespace hopper_attention
