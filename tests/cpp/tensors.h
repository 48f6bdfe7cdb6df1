// Arguments of a valid call, for tests that change one thing. No memory is touched: addresses are invented.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "hopper_attention/forward.h"

namespace hopper_attention {

inline constexpr std::uintptr_t kMiB = std::uintptr_t{1} << 20;

inline Tensor contiguous(std::uintptr_t address, DataType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor tensor;
  tensor.data = reinterpret_cast<void*>(address);
  tensor.dtype = dtype;
  tensor.device = 0;
  for (std::int64_t const size : shape) { tensor.shape[++tensor.rank] = size; }
  ++tensor.rank;
  std::int64_t stride = 1;
  for (int dim = tensor.rank - 1; dim >= 0; --dim) {
    tensor.stride[dim] = stride;
    stride *= tensor.shape[dim];
  }
  return tensor;
}

struct CallShape {
  std::int64_t batch = 2;
  std::int64_t seqlen_q = 5;
  std::int64_t seqlen_k = 7;
  std::int64_t heads_q = 4;
  std::int64_t heads_k = 2;
  std::int64_t head_dim = 64;
  std::int64_t head_dim_v = 64;
  DataType dtype = DataType::kBFloat16;
};

// Every tensor in a MiB of its own.
inline Arguments valid_call(CallShape const& s = {}) {
  Arguments args;
  args.q = contiguous(1 * kMiB, s.dtype, {s.batch, s.seqlen_q, s.heads_q, s.head_dim});
  args.k = contiguous(2 * kMiB, s.dtype, {s.batch, s.seqlen_k, s.heads_k, s.head_dim});
  args.v = contiguous(3 * kMiB, s.dtype, {s.batch, s.seqlen_k, s.heads_k, s.head_dim_v});
  args.out = contiguous(4 * kMiB, s.dtype, {s.batch, s.seqlen_q, s.heads_q, s.head_dim_v});
  args.softmax_lse = contiguous(5 * kMiB, DataType::kFloat32, {s.batch, s.heads_q, s.seqlen_q});
  args.sinks = contiguous(6 * kMiB, DataType::kFloat32, {s.heads_q});
  return args;
}

inline Tensor lengths_at(std::uintptr_t address, std::int64_t count) {
  return contiguous(address, DataType::kInt32, {count});
}

// Three packed sequences: 20 rows of q, 30 of k and v.
inline Arguments varlen_call() {
  Arguments args;
  args.q = contiguous(1 * kMiB, DataType::kBFloat16, {20, 4, 64});
  args.k = contiguous(2 * kMiB, DataType::kBFloat16, {30, 2, 64});
  args.v = contiguous(3 * kMiB, DataType::kBFloat16, {30, 2, 64});
  args.out = contiguous(4 * kMiB, DataType::kBFloat16, {20, 4, 64});
  args.softmax_lse = contiguous(5 * kMiB, DataType::kFloat32, {4, 20});
  args.sinks = contiguous(6 * kMiB, DataType::kFloat32, {4});
  args.cu_seqlens_q = lengths_at(7 * kMiB, 4);
  args.cu_seqlens_k = lengths_at(8 * kMiB, 4);
  return args;
}

// The same queries on 12 pages of 16 keys, 5 for each sequence.
inline Arguments paged_call() {
  Arguments args = varlen_call();
  args.cu_seqlens_k = {};
  args.k = contiguous(2 * kMiB, DataType::kBFloat16, {12, 16, 2, 64});
  args.v = contiguous(3 * kMiB, DataType::kBFloat16, {12, 16, 2, 64});
  args.page_table = contiguous(8 * kMiB, DataType::kInt32, {3, 5});
  args.seqused_k = lengths_at(9 * kMiB, 3);
  return args;
}

// One query for each of 3 sequences on a cache of 8 sequences with 100 slots.
inline Arguments cache_call() {
  Arguments args = valid_call({.batch = 3, .seqlen_q = 1, .seqlen_k = 100});
  args.k = contiguous(2 * kMiB, DataType::kBFloat16, {8, 100, 2, 64});
  args.v = contiguous(3 * kMiB, DataType::kBFloat16, {8, 100, 2, 64});
  args.cache_batch_idx = lengths_at(8 * kMiB, 3);
  args.seqused_k = lengths_at(9 * kMiB, 3);
  return args;
}

}  // namespace hopper_attention
