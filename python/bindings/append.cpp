// append: new keys and values into a cache, with rotary embedding, in one launch.
#include <cstdint>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "bindings.h"
#include "hopper_attention/append.h"
#include "tensor_argument.h"

namespace hopper_attention::python {
namespace {

void run_append(nb::handle k_new, nb::handle v_new, nb::handle k_cache, nb::handle v_cache, nb::handle seqused_k,
                std::int64_t seqused_k_all, nb::handle cu_seqlens_k_new, nb::handle page_table,
                nb::handle cache_batch_idx, nb::handle rotary_cos, nb::handle rotary_sin, nb::handle q,
                nb::handle q_rotated, nb::handle cu_seqlens_q, nb::handle rotary_seqlens, bool rotary_interleaved,
                bool rotate_q_per_position, std::optional<std::uintptr_t> stream) {
  TensorArgument const k_new_argument("k", k_new);
  TensorArgument const v_new_argument("v", v_new);
  TensorArgument const k_cache_argument("k_cache", k_cache);
  TensorArgument const v_cache_argument("v_cache", v_cache);
  TensorArgument const seqused_k_argument("cache_seqlens", seqused_k);
  TensorArgument const cu_seqlens_k_new_argument("cu_seqlens_k_new", cu_seqlens_k_new);
  TensorArgument const page_table_argument("page_table", page_table);
  TensorArgument const cache_batch_idx_argument("cache_batch_idx", cache_batch_idx);
  TensorArgument const rotary_cos_argument("rotary_cos", rotary_cos);
  TensorArgument const rotary_sin_argument("rotary_sin", rotary_sin);
  TensorArgument const q_argument("q", q);
  TensorArgument const q_rotated_argument("q_rotated", q_rotated);
  TensorArgument const cu_seqlens_q_argument("cu_seqlens_q", cu_seqlens_q);
  TensorArgument const rotary_seqlens_argument("rotary_seqlens", rotary_seqlens);
  AppendArguments const args{
      .k_new = k_new_argument.tensor(),
      .v_new = v_new_argument.tensor(),
      .k_cache = k_cache_argument.tensor(),
      .v_cache = v_cache_argument.tensor(),
      .seqused_k = seqused_k_argument.tensor(),
      .seqused_k_all = seqused_k_all,
      .cu_seqlens_k_new = cu_seqlens_k_new_argument.tensor(),
      .page_table = page_table_argument.tensor(),
      .cache_batch_idx = cache_batch_idx_argument.tensor(),
      .rotary_cos = rotary_cos_argument.tensor(),
      .rotary_sin = rotary_sin_argument.tensor(),
      .q = q_argument.tensor(),
      .q_rotated = q_rotated_argument.tensor(),
      .cu_seqlens_q = cu_seqlens_q_argument.tensor(),
      .rotary_seqlens = rotary_seqlens_argument.tensor(),
      .rotary_interleaved = rotary_interleaved,
      .rotate_q_per_position = rotate_q_per_position,
  };
  Stream const work_stream = stream ? reinterpret_cast<Stream>(*stream) : k_cache_argument.current_stream();
  nb::gil_scoped_release const released;
  hopper_attention::append(args, work_stream);
}

}  // namespace

void bind_append(nb::module_& module) {
  module.def(
      "append", &run_append, nb::arg("k_new").none(), nb::arg("v_new").none(), nb::arg("k_cache").none(),
      nb::arg("v_cache").none(), nb::kw_only(), nb::arg("seqused_k").none() = nb::none(), nb::arg("seqused_k_all") = -1,
      nb::arg("cu_seqlens_k_new").none() = nb::none(), nb::arg("page_table").none() = nb::none(),
      nb::arg("cache_batch_idx").none() = nb::none(), nb::arg("rotary_cos").none() = nb::none(),
      nb::arg("rotary_sin").none() = nb::none(), nb::arg("q").none() = nb::none(),
      nb::arg("q_rotated").none() = nb::none(), nb::arg("cu_seqlens_q").none() = nb::none(),
      nb::arg("rotary_seqlens").none() = nb::none(), nb::arg("rotary_interleaved") = true,
      nb::arg("rotate_q_per_position") = false, nb::arg("stream").none() = nb::none(),
      nb::sig("def append(k_new: object, v_new: object, k_cache: object, v_cache: object, *, "
              "seqused_k: object | None = None, seqused_k_all: int = -1, cu_seqlens_k_new: object | None = None, "
              "page_table: object | None = None, cache_batch_idx: object | None = None, "
              "rotary_cos: object | None = None, rotary_sin: object | None = None, q: object | None = None, "
              "q_rotated: object | None = None, cu_seqlens_q: object | None = None, "
              "rotary_seqlens: object | None = None, rotary_interleaved: bool = True, "
              "rotate_q_per_position: bool = False, stream: int | None = None) -> None"),
      "Appends k_new (B, Sn, Hk, D) and v_new (B, Sn, Hk, Dv), or (Tn, Hk, ...) with cu_seqlens_k_new (B + 1,), in\n"
      "place to k_cache (Bc, S, Hk, D) and v_cache (Bc, S, Hk, Dv), or (pages, page size, Hk, ...) with page_table\n"
      "(B, n). Key j of sequence b goes to slot seqused_k[b] + j (seqused_k (B,), or seqused_k_all for all sequences;\n"
      "one of them is needed) of row cache_batch_idx[b] (default b) or of its pages; what does not fit is dropped.\n"
      "cache_leftpad has no part in it: slots count from the start of the sequence's memory.\n"
      "\n"
      "With rotary_cos and rotary_sin (positions, rotary_dim / 2) new keys are rotated on the way, at "
      "rotary_seqlens[b]\n"
      "(default seqused_k[b]) + j, and q (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q, goes to q_rotated of the "
      "same\n"
      "shape: at rotary_seqlens[b] + i with rotate_q_per_position (causal, windowed or chunked attention), else at\n"
      "rotary_seqlens[b]. Rows of a packed q outside all sequences are left as they are in q_rotated. Without "
      "rotary_cos\n"
      "q_rotated must be None, and q is not read: it is only made sure that it is not in the caches.\n"
      "\n"
      "One launch on `stream` (default: the current stream of the framework of k_cache); neither synchronises nor\n"
      "allocates. Lengths and indices are int32 on the device, read there and clamped. Raises ValueError, TypeError "
      "or\n"
      "NotImplementedError, naming the argument of flash_attn_with_kvcache, before anything is written.");
}

}  // namespace hopper_attention::python
