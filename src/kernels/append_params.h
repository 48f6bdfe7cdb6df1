// What the append kernel is given, and where the host finds it.
#pragma once

#include <cstdint>

#include "hopper_attention/types.h"
#include "kernels/fast_divmod.h"

namespace hopper_attention {

inline constexpr int kAppendThreads = 256;
inline constexpr int kAppendVectorBytes = 16;
inline constexpr int kMaxTokensPerBlock = 32;

// In elements, from one sequence (or page), token or head to the next.
struct TokenStrides {
  std::int64_t sequence = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
};

// One tensor to move: the rows of its tokens, one for each head, cut into vectors. A block takes a few tokens and
// heads.
struct AppendJob {
  void const* source = nullptr;
  void* destination = nullptr;
  TokenStrides source_stride;
  TokenStrides destination_stride;
  int tokens = 0;  // of all sequences
  int heads = 0;
  int tokens_per_block = 1;
  FastDivmod heads_per_block;
  FastDivmod head_blocks;       // blocks that share their tokens
  FastDivmod vectors;           // of a row
  FastDivmod seqlen;            // tokens of a sequence, where starts is null
  int const* starts = nullptr;  // (batch + 1,): where each sequence starts among the tokens
  bool rotate = false;
  bool to_cache = true;  // otherwise to the place of the same token in the destination
};

// Where new tokens go.
struct CacheParams {
  int const* seqused = nullptr;  // (batch,); null: seqused_all
  int seqused_all = 0;
  int capacity = 0;                 // slots of a sequence
  int rows = 0;                     // sequences of the cache, or pages
  int const* batch_idx = nullptr;   // (batch,); null: the sequence itself
  int const* page_table = nullptr;  // null: no pages
  std::int64_t page_table_stride = 0;
  FastDivmod page_size;
};

struct RotaryParams {
  void const* cos = nullptr;
  void const* sin = nullptr;
  std::int64_t cos_stride = 0;  // from one position to the next, in elements
  std::int64_t sin_stride = 0;
  int positions = 0;
  int half = 0;                  // pairs of columns
  int const* seqlens = nullptr;  // (batch,); null: the length of the cache before the append
  bool float32 = false;          // cos and sin; otherwise of the element type
  bool interleaved = false;
  bool per_position = false;  // of q; new keys always are
  bool by_vector = false;     // all that a vector needs of cos, sin and its partner columns are aligned vectors
};

inline constexpr int kAppendJobs = 3;  // k, v, q

struct AppendParams {
  AppendJob jobs[kAppendJobs];
  int first_block[kAppendJobs] = {};  // of each job
  int batch = 0;
  CacheParams cache;
  RotaryParams rotary;
};

// __global__ function for cudaLaunchKernelExC with kAppendThreads threads, of AppendParams; for bf16 and fp16.
void const* append_kernel(DataType dtype);

}  // namespace hopper_attention
