// What the host hands to the combine kernel.
#pragma once

#include "kernels/params.h"

namespace hopper_attention {

// One kernel family whose tiles may be in parts.
struct SplitCombineTask {
  ScheduleParams schedule;
  PartialParams partial;
  Packing packing;
  MaskParams mask;
  int slabs = 0;
  int keys = 1;           // of a block
  int candidates = 0;     // blocks of the grid's x axis that look for a tile in parts
  ClusterParams cluster;  // of the attention kernel
  SchedulerParams tiles;  // in equal parts
  EqualParts parts;
};

struct SplitCombineParams : ResultParams {
  SplitCombineTask task[2];  // prefill and decode
  SequenceParams sequences;
  FastDivmod packed_heads;
  DataType dtype;
  bool next_starts_early = true;  // also where a block has nothing to merge
};

inline constexpr int kSplitCombineWarps = 8;
inline constexpr int kSplitCombineThreads = 32 * kSplitCombineWarps;

// Columns of a row that a lane has, for head dims up to 128 or 256, and blocks of an SM at once.
constexpr int split_combine_columns(int head_dim_v) { return head_dim_v <= 128 ? 4 : 8; }
constexpr int split_combine_blocks(int columns) { return columns == 4 ? 4 : 3; }

}  // namespace hopper_attention
