// What the kernels that merge partial results are given, and where the host finds them.
#pragma once

#include <cstdint>

#include "hopper_attention/types.h"
#include "kernels/fast_divmod.h"

namespace hopper_attention {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeVectorBytes = 16;  // one load of a thread

// 16-byte loads of a thread of merge_kernel in flight: 8 x 256 threads x 3 blocks are 96 KiB for each SM, almost
// four times what its share of the bandwidth of an H200 needs for a latency of 0.8 us.
inline constexpr int kMergeLoads = 8;

// combine_kernel reads so many parts at a time.
inline constexpr int kCombineParts = 8;

// The most parts that merge_kernel takes. It reads all of them at once, also those without keys; with more parts it
// pays to look at their LSEs first.
inline constexpr int kMaxMergedParts = 4;

// In elements, from one batch, query or head to the next.
struct RowStrides {
  std::int64_t batch = 0;
  std::int64_t query = 0;
  std::int64_t head = 0;
};

// Results of attention over some keys: a row of out and a log-sum-exp for each (batch, query, head).
struct StateView {
  void* out = nullptr;
  float* lse = nullptr;
  RowStrides out_stride;
  RowStrides lse_stride;
};

// Rows in the order (batch, query, head), as many in each block; a row is cut into vectors, one for a thread.
struct RowGrid {
  int rows = 0;  // in all blocks
  int rows_per_block = 0;
  FastDivmod queries;
  FastDivmod heads;
  FastDivmod vectors;  // of a row
};

struct MergeParams {
  StateView parts[kMaxMergedParts];
  StateView merged;
  RowGrid grid;
  int count = 0;  // of parts
};

struct CombineParams {
  StateView first;  // part 0
  std::int64_t out_part_stride = 0;
  std::int64_t lse_part_stride = 0;
  StateView merged;
  RowGrid grid;
  FastDivmod group;  // vectors of a block; slice i of its threads reads parts i, i + slices, ...
  int slices = 1;    // slices * group <= kMergeThreads
  int count = 0;     // of parts
};

// How many vectors a thread of merge_kernel has at most.
constexpr int merge_units(int parts) { return kMergeLoads / (parts <= 2 ? 2 : kMaxMergedParts); }

// __global__ functions for cudaLaunchKernelExC, with kMergeThreads threads. `parts` is 1 to kMaxMergedParts; input and
// output are the same type, or the input is float32.
void const* merge_kernel(DataType input, DataType output, int parts);  // of MergeParams
void const* combine_kernel(DataType output);                           // of CombineParams, for float32 parts

}  // namespace hopper_attention
