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
  int candidates = 0;     // where a tile in parts is looked for
  int blocks = 1;         // that share what a candidate has to merge
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

inline constexpr int kSplitCombineThreads = 256;

// How the rows of a tile are merged.
struct CombineShape {
  int lanes;    // that share a row
  int columns;  // of a lane
  int blocks;   // of an SM at once
};

// Where rows are many, instructions are what takes the time, fewer for each row the more columns a lane has. Behind
// tiles of few queries, blocks that need more registers would take SMs from the next call: its kernel starts early, and
// two of its blocks may share an SM while others have none (head dim 96: 404 instead of 344 us).
constexpr CombineShape combine_shape(KernelFamily family, int head_dim_v) {
  if (family == KernelFamily::kDecode) { return head_dim_v <= 128 ? CombineShape{32, 4, 4} : CombineShape{32, 8, 3}; }
  return {head_dim_v <= 64 ? 8 : head_dim_v <= 128 ? 16 : 32, 8, 3};
}

}  // namespace hopper_attention
