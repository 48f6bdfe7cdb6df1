// New keys and values -> a K/V cache, in place, before attention over it; with rotary embedding of new keys and of q.
//
// Dimension letters: B batch, Sq / Sn queries / new keys of a sequence, Tq / Tn those of all sequences, Bc sequences
// and S slots of the cache, Hq / Hk heads of q / of k and v, D head dim of q and k, Dv head dim of v: multiples of 8,
// up to 256.
//
// New key j of sequence b goes to slot seqused_k[b] + j of the sequence. Slots count from the start of its memory, also
// where attention starts at a slot behind it (cache_leftpad). What does not fit in the cache is dropped.
//
// Rotary embedding (Su et al. 2021): at position p, columns (x, y) become (x cos[p] - y sin[p], y cos[p] + x sin[p]),
// in fp32, rounded once. Pairs are columns (2i, 2i + 1) if interleaved, else (i, i + R / 2); columns from R on are
// copied, with R = rotary dim = twice the columns of cos. Key j is at position rotary_seqlens[b] + j, query i at
// rotary_seqlens[b] + i or, with rotate_q_per_position off, at rotary_seqlens[b]. Positions outside the table take its
// first or last row.
#pragma once

#include <cstdint>
#include <functional>

#include "hopper_attention/errors.h"
#include "hopper_attention/forward.h"
#include "hopper_attention/types.h"

namespace hopper_attention {

// Nothing in it is trusted. int32 tensors are read by the kernel alone, which clamps what it finds there. Rows of float
// tensors have unit stride and start at multiples of 16 bytes (those of cos and sin: of an element); other strides are
// free and not negative. All tensors are on one device.
struct AppendArguments {
  Tensor k_new;    // (B, Sn, Hk, D), or (Tn, Hk, D) with cu_seqlens_k_new; bf16 or fp16; required
  Tensor v_new;    // as k_new with Dv; required
  Tensor k_cache;  // (Bc, S, Hk, D), or (pages, page size, Hk, D) with page_table; dtype of k_new; written; required
  Tensor v_cache;  // as k_cache with Dv; written; required; the two may interleave in one tensor, but share no element,
                   // or be the same pages if they start a whole number of pages apart: page ids then pick other pages
                   // for K than for V

  Tensor seqused_k;                 // (B,) int32: keys of each sequence before the append; negative counts as 0
  std::int64_t seqused_k_all = -1;  // instead of seqused_k, the same for all sequences; -1: not given
  Tensor cu_seqlens_k_new;          // (B + 1,) int32: where each sequence starts in k_new and v_new
  Tensor page_table;       // (B, pages of a sequence) int32, last stride 1; page ids outside the cache drop writes
  Tensor cache_batch_idx;  // (B,) int32: row of the cache, not with pages; a row outside drops writes

  // Rotary embedding: cos, sin, q and q_rotated. Without it q alone may be given: the kernel does not read it, but
  // attention does so after the append, and it is made sure that it does not overlap the caches.
  Tensor rotary_cos;  // (positions, R / 2), R <= D; dtype of k_new or fp32
  Tensor rotary_sin;  // as rotary_cos
  Tensor q;           // (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q; dtype of k_new
  Tensor q_rotated;   // as q; written, but for rows of a packed q outside all sequences; overlaps no other tensor

  Tensor cu_seqlens_q;    // (B + 1,) int32: where each sequence starts in q
  Tensor rotary_seqlens;  // (B,) int32: position of the first new key; default: seqused_k, within 0 and the slots there
                          // are
  bool rotary_interleaved = true;
  bool rotate_q_per_position = false;  // attention is causal, windowed or in chunks
};

// Raises InvalidArgument, InvalidType or NotImplemented for what the kernel cannot take. No CUDA call.
HOPPER_ATTENTION_EXPORT void validate(AppendArguments const& args);

// Validates and launches one kernel on `stream` of the device of the cache; none if there is nothing to write. Neither
// synchronises nor allocates. Without rotary embedding bits are copied. Raises CudaError if the device cannot run the
// kernel or the launch fails.
HOPPER_ATTENTION_EXPORT void append(AppendArguments const& args, Stream stream);

// The launch of append() alone, for `args` that passed validate().
HOPPER_ATTENTION_EXPORT void launch_append(AppendArguments const& args, Stream stream);

// append(), then forward() over the same cache, of q_rotated in place of `attention.q` where it is given. Whatever
// either would raise before its launch is raised before anything is written. allocate: as for forward().
HOPPER_ATTENTION_EXPORT void append_and_forward(AppendArguments const& args, Arguments const& attention, Stream stream,
                                                std::function<Tensor(std::int64_t bytes)> const& allocate);

}  // namespace hopper_attention
