// Attention results over disjoint sets of keys -> the result over all of them.
//
// A state is what attention over some keys leaves for a row: out and the log-sum-exp (natural log) of its scores. With
// states (o_s, L_s):
//
//   L = ln sum_s exp(L_s),   o = sum_s exp(L_s - L) o_s.
//
// L_s = -inf or +inf means that part s has no keys; its o_s may then hold anything. A row without keys in any part
// gives 0 and -inf. An L_s that is NaN makes its row NaN.
//
// Dimension letters: S parts, B batch, M queries, H heads, D columns: a multiple of 8, up to 512. Rows of out tensors
// have unit stride and start at multiples of 16 bytes (of 4 elements for the out of combine()); their other strides,
// and all strides of LSEs, are free and not negative.
#pragma once

#include "hopper_attention/errors.h"
#include "hopper_attention/types.h"

namespace hopper_attention {

// All tensors are required and on one device.
struct CombineArguments {
  Tensor out_partial;  // (S, B, M, H, D) float32
  Tensor lse_partial;  // (S, B, M, H) float32
  Tensor out;          // (B, M, H, D) float32, bf16 or fp16; written; overlaps no other tensor
  Tensor lse;          // (B, M, H) float32; written; overlaps no other tensor
};

// All tensors are required and on one device; without B if out_a has three dims.
struct MergeArguments {
  Tensor out_a;  // (B, M, H, D) float32, bf16 or fp16
  Tensor lse_a;  // (B, H, M) float32
  Tensor out_b;  // as out_a
  Tensor lse_b;  // as lse_a
  Tensor out;    // as out_a; written; may be out_a, otherwise overlaps no other tensor
  Tensor lse;    // as lse_a; written; may be lse_a, otherwise overlaps no other tensor
};

// Raise InvalidArgument, InvalidType or NotImplemented for what the kernels cannot take. No CUDA call.
HOPPER_ATTENTION_EXPORT void validate(CombineArguments const& args);
HOPPER_ATTENTION_EXPORT void validate(MergeArguments const& args);

// Validate and launch one kernel on `stream` of the device of the tensors; nothing if there are no rows. Neither
// synchronise nor allocate. Sums run in a fixed order: the same inputs give the same bits. Raise CudaError if the
// device cannot run the kernels or the launch fails.
HOPPER_ATTENTION_EXPORT void combine(CombineArguments const& args, Stream stream);
HOPPER_ATTENTION_EXPORT void merge_states(MergeArguments const& args, Stream stream);

}  // namespace hopper_attention
