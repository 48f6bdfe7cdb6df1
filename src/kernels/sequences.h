// Lengths and places of the sequences of a batch, read on the device and clamped to the memory there is.
#pragma once

#include "kernels/host_device.h"
#include "kernels/interval_mask.h"

namespace hopper_attention {

// Pointers are null where a call does not give the tensor; the plain numbers apply instead.
struct SequenceParams {
  int const* cu_seqlens_q = nullptr;      // (batch + 1)
  int const* cu_seqlens_k = nullptr;      // (batch + 1)
  int const* seqused_q = nullptr;         // (batch)
  int const* seqused_k = nullptr;         // (batch)
  int const* cu_seqlens_k_new = nullptr;  // (batch + 1)
  int const* cache_batch_idx = nullptr;   // (batch)
  int const* cache_leftpad = nullptr;     // (batch)
  int const* cp_tot_seqused_k = nullptr;  // (batch)
  int batch = 0;
  int seqlen_q = 0;       // of every sequence, or rows of q in all with cu_seqlens_q
  int capacity_k = 0;     // keys that a sequence has room for, or rows of k in all with cu_seqlens_k
  int seqused_k_all = 0;  // keys of every sequence without seqused_k
  int seqlen_k_new = 0;
  int cache_batches = 0;  // sequences that k and v hold, with cache_batch_idx
};

struct Sequence {
  int batch;  // of q, out and LSE
  SeqlenQK len;
  int q_row;    // of q, out and LSE, where it begins: 0 for a dense batch
  int q_batch;  // coordinate of q's batch dim: 0 for packed sequences
  int k_row;    // the same of k and v; with pages the first key's place in the pages
  int k_batch;
  int k_memory;  // keys from the first one on after which memory ends, so that TMA delivers zeros

  HA_HOST_DEVICE constexpr bool operator==(Sequence const&) const = default;
};

// How lengths are read.
struct PlainLoad {
  HA_HOST_DEVICE static constexpr int load(int const* number) { return *number; }
};

template <class Load = PlainLoad>
HA_HOST_DEVICE constexpr int load_or(int const* numbers, int i, int otherwise) {
  return numbers != nullptr ? Load::load(numbers + i) : otherwise;
}

// What a cache has beside the lengths. Apart, so that a batch without it does not walk through its instructions:
// finding work takes issue slots and cache from the warps that compute.
template <class Load>
HA_HOST_DEVICE constexpr void apply_cache_params(SequenceParams const& p, Sequence& s) {
  int const b = s.batch;
  int const new_begin = load_or<Load>(p.cu_seqlens_k_new, b, 0);
  int const new_end = load_or<Load>(p.cu_seqlens_k_new, b + 1, p.seqlen_k_new);
  int const pad = load_or<Load>(p.cache_leftpad, b, 0);
  int const cache = load_or<Load>(p.cache_batch_idx, b, b);
  int const total_k = load_or<Load>(p.cp_tot_seqused_k, b, 0);
  long long const more = max_of(0, clamped(static_cast<long long>(new_end) - new_begin, 0, 1 << 30));
  s.len.k = clamped(s.len.k + more, 0, s.k_memory);
  if (p.cache_leftpad != nullptr) {
    int const hidden = clamped(pad, 0, s.k_memory);
    s.k_row += hidden;
    s.k_memory -= hidden;
    s.len.k = max_of(0, s.len.k - hidden);
  }
  if (p.cache_batch_idx != nullptr) {
    s.k_batch = cache;
    if (cache < 0 || cache >= p.cache_batches) { s.len.k = 0; }
  }
  s.len.k_total = p.cp_tot_seqused_k != nullptr ? clamped(total_k, 0, 1 << 29) : s.len.k;
}

// Loads come before anything that waits for one of them.
template <class Load = PlainLoad>
HA_HOST_DEVICE constexpr Sequence sequence_at(SequenceParams const& p, int b) {
  int const q_begin = load_or<Load>(p.cu_seqlens_q, b, 0);
  int const q_end = load_or<Load>(p.cu_seqlens_q, b + 1, p.seqlen_q);
  int const k_begin = load_or<Load>(p.cu_seqlens_k, b, 0);
  int const k_end = load_or<Load>(p.cu_seqlens_k, b + 1, p.seqused_k_all);
  int const used_q = load_or<Load>(p.seqused_q, b, p.seqlen_q);
  int const used_k = load_or<Load>(p.seqused_k, b, -1);

  Sequence s{};
  s.batch = b;
  s.q_batch = p.cu_seqlens_q != nullptr ? 0 : b;
  s.q_row = clamped(q_begin, 0, p.seqlen_q);
  s.len.q = clamped(used_q, 0, clamped(q_end, s.q_row, p.seqlen_q) - s.q_row);
  s.k_batch = p.cu_seqlens_k != nullptr ? 0 : b;
  s.k_row = clamped(k_begin, 0, p.capacity_k);
  s.k_memory = p.capacity_k - s.k_row;
  s.len.k = p.seqused_k != nullptr ? clamped(used_k, 0, s.k_memory) : clamped(k_end, s.k_row, p.capacity_k) - s.k_row;
  s.len.k_total = s.len.k;
  bool const plain = p.cu_seqlens_k_new == nullptr && p.cache_leftpad == nullptr && p.cache_batch_idx == nullptr &&
                     p.cp_tot_seqused_k == nullptr && p.seqlen_k_new == 0;
  if (!plain) { apply_cache_params<Load>(p, s); }
  return s;
}

}  // namespace hopper_attention
