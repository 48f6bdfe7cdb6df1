// Calls that differ in nothing but where their tensors lie, as those of a model's layers do: what was found out about
// one holds for all of them. Only whether tensors share memory has to be asked again.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>

#include "hopper_attention/append.h"
#include "hopper_attention/forward.h"
#include "host/tensor_rules.h"

namespace hopper_attention {

// All fields: a new one does not compile until it has a name here, which the tie then needs as well.
inline auto fields(Arguments const& args) {
  auto const& [q, k, v, out, softmax_lse, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table,
               cache_batch_idx, cache_leftpad, cu_seqlens_k_new, cp_tot_seqused_k, seqlen_k_new, seqused_k_all,
               max_seqlen_q, max_seqlen_k, cp_world_size, cp_rank, scheduler_metadata, workspace, softmax_scale, causal,
               window_left, window_right, attention_chunk, softcap, num_splits, sm_margin, batch_invariant] = args;
  return std::tie(q, k, v, out, softmax_lse, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table,
                  cache_batch_idx, cache_leftpad, cu_seqlens_k_new, cp_tot_seqused_k, seqlen_k_new, seqused_k_all,
                  max_seqlen_q, max_seqlen_k, cp_world_size, cp_rank, scheduler_metadata, workspace, softmax_scale,
                  causal, window_left, window_right, attention_chunk, softcap, num_splits, sm_margin, batch_invariant);
}

inline auto fields(AppendArguments const& args) {
  auto const& [k_new, v_new, k_cache, v_cache, seqused_k, seqused_k_all, cu_seqlens_k_new, page_table, cache_batch_idx,
               rotary_cos, rotary_sin, q, q_rotated, cu_seqlens_q, rotary_seqlens, rotary_interleaved,
               rotate_q_per_position] = args;
  return std::tie(k_new, v_new, k_cache, v_cache, seqused_k, seqused_k_all, cu_seqlens_k_new, page_table,
                  cache_batch_idx, rotary_cos, rotary_sin, q, q_rotated, cu_seqlens_q, rotary_seqlens,
                  rotary_interleaved, rotate_q_per_position);
}

// Whether every rule about one tensor says the same of both.
inline bool is_alike(Tensor const& a, Tensor const& b) {
  if (a.rank != b.rank || a.rank > kMaxRank) { return false; }
  if (!a.given()) { return true; }
  auto const address = [](Tensor const& t) { return reinterpret_cast<std::uintptr_t>(t.data); };
  bool const as_aligned = (address(a) ^ address(b)) % kMostAlignment == 0;
  if (!as_aligned || (a.data == nullptr) != (b.data == nullptr) || a.dtype != b.dtype || a.device != b.device) {
    return false;
  }
  std::int64_t differing = 0;  // without branches: nearly all that are compared are equal
  for (int dim = 0; dim < a.rank; ++dim) {
    differing |= (a.shape[dim] ^ b.shape[dim]) | (a.stride[dim] ^ b.stride[dim]);
  }
  return differing == 0;
}

template <class Value>
bool is_alike(Value const& a, Value const& b) {
  return a == b;
}

// Whether validate() and plan() say the same of both calls, but for tensors that share memory.
template <class Call>
bool is_same_call(Call const& a, Call const& b) {
  return std::apply(
      [&b](auto const&... of_a) {
        return std::apply([&](auto const&... of_b) { return (is_alike(of_a, of_b) && ...); }, fields(b));
      },
      fields(a));
}

// What the tensors of a call span that may share memory.
using CallBytes = std::array<std::int64_t, 17>;
using AppendBytes = std::array<std::int64_t, 14>;
CallBytes spanned_bytes(Arguments const& args);
AppendBytes spanned_bytes(AppendArguments const& args);

// The part of validate() that asks for shared memory, of a call that is the same as one which passed it. bytes: of
// either.
void check_overlaps(Arguments const& args, CallBytes const& bytes);
void check_overlaps(AppendArguments const& args, AppendBytes const& bytes);

}  // namespace hopper_attention
