// What the driver runs: small calls over all functions and ways through the kernels.
#pragma once

#include <string>
#include <vector>

#include "hopper_attention/types.h"

namespace driver {

enum class Keys { kDense, kPacked, kPaged };

// What the device is told wrongly: which tensor, and what stands in each of its elements instead of the truth.
enum class Lying {
  kNothing,
  kCuSeqlensQ,
  kCuSeqlensK,
  kSequsedK,
  kPageTable,
  kCacheBatchIdx,
  kCacheLeftpad,
  kMetadata
};
enum class Lie { kLargest, kSmallest, kMinusOne, kMillionMore, kRandom };

// One call of attention, alone or after an append. Lengths count keys after the append.
struct Case {
  std::string why;
  std::vector<int> queries;
  std::vector<int> keys;
  int heads_q = 4;
  int heads_k = 2;
  int head_dim = 128;
  int head_dim_v = 128;
  hopper_attention::DataType dtype = hopper_attention::DataType::kBFloat16;
  Keys layout = Keys::kDense;
  bool packed_q = false;  // else all sequences have as many queries
  bool used = false;      // dense keys: lengths on the device, and rows behind them
  int page_size = 16;
  bool batch_idx = false;
  int leftpad = 0;
  bool causal = false;
  int window_left = -1;
  int window_right = -1;
  int chunk = 0;
  double softcap = 0.0;
  bool sizes_of_q = false;  // scores of three sizes, and negative ones, each for as many rows as a warp has
  bool sinks = false;
  bool lse = true;
  int cp_world = 1;
  int num_splits = 1;
  int sm_margin = 0;
  bool clusters = true;        // thread blocks may share a tile of few queries and merge it among themselves
  bool several_tiles = false;  // of 32 rows may be taken for a sequence instead of a larger one
  int shares_tiles = 0;  // thread blocks that share two tiles, also of calls so short that the plan would not do it
  bool metadata = false;
  bool batch_invariant = false;
  int append = 0;  // keys that each sequence appends
  bool rotary = false;
  bool interleaved = false;
  Lying lying = Lying::kNothing;  // then any result is right that nothing out of bounds went into
  Lie lie = Lie::kLargest;
};

// combine() of `parts` parts, or, if 0, merge_states() of two.
struct MergeCase {
  std::string why;
  int parts = 0;
  int batch = 2;
  int queries = 5;
  int heads = 3;
  int columns = 64;
  hopper_attention::DataType dtype = hopper_attention::DataType::kBFloat16;
};

std::vector<Case> const& attention_cases();
std::vector<Case> const& malformed_cases();
std::vector<MergeCase> const& merge_cases();

}  // namespace driver
