// How sequences lie in the tensors of a call, and the checks of the tensors that say so. Their contents stay unread:
// the kernels clamp what they find.
#pragma once

#include <cstdint>

#include "hopper_attention/forward.h"
#include "host/tensor_rules.h"

namespace hopper_attention {

struct Layout {
  bool packed_q = false;  // (Tq, Hq, D)
  KeyLayout keys = KeyLayout::kDense;
  std::int64_t batch = 0;
  char const* batch_source = "q";  // the tensor that `batch` was read from
};

inline std::int64_t heads_of(Tensor const& tensor) { return tensor.shape[tensor.rank - 2]; }
inline std::int64_t columns_of(Tensor const& tensor) { return tensor.shape[tensor.rank - 1]; }

// A tensor of lengths, if it is given: (batch,) or, with `extra` 1, offsets (batch + 1,).
void check_length_tensor(Named t, std::int64_t extra, std::int64_t batch, char const* batch_source, Named on_device_of);

// Which layout the given tensors ask for. Needs the rank of q alone to be right.
Layout layout_of(Arguments const& args);

// All tensors and numbers of lengths but those of the schedule, for q, k and v of that layout.
void check_lengths(Arguments const& args, Layout const& layout);

// Every given tensor of lengths, for `batch` sequences, and the numbers beside them.
void check_length_tensors(Arguments const& args, std::int64_t batch, char const* batch_source, Named on_device_of);

// Keys that a sequence has room for; with cu_seqlens_k those of all sequences.
std::int64_t key_capacity(Arguments const& args, KeyLayout keys);

// What no sequence exceeds; where nothing about lengths is on the device, the length itself.
std::int64_t bound_on_queries(Arguments const& args);
std::int64_t bound_on_keys(Arguments const& args, std::int64_t capacity);

// scheduler_metadata or the metadata that make_schedule() writes.
void check_metadata(Named metadata, std::int64_t batch, Named on_device_of);

}  // namespace hopper_attention
