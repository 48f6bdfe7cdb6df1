// make_schedule: the metadata of a step.
#include <cstdint>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "tensor_argument.h"

namespace hopper_attention::python {
namespace {

void run_make_schedule(nb::handle metadata, std::string const& dtype, std::int64_t batch, std::int64_t seqlen_q,
                       std::int64_t seqlen_k, std::int64_t heads_q, std::int64_t heads_k, std::int64_t head_dim,
                       std::int64_t head_dim_v, std::int64_t page_size, nb::handle seqused_k,
                       std::int64_t seqused_k_all, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k_new,
                       nb::handle cache_leftpad, std::int64_t seqlen_k_new, bool causal, std::int64_t window_left,
                       std::int64_t window_right, std::int64_t attention_chunk, std::int64_t num_splits,
                       std::int64_t sm_margin, bool batch_invariant, std::optional<std::uintptr_t> stream) {
  TensorArgument const metadata_argument("out", metadata);
  TensorArgument const seqused_k_argument("cache_seqlens", seqused_k);
  TensorArgument const cu_seqlens_q_argument("cu_seqlens_q", cu_seqlens_q);
  TensorArgument const cu_seqlens_k_new_argument("cu_seqlens_k_new", cu_seqlens_k_new);
  TensorArgument const cache_leftpad_argument("cache_leftpad", cache_leftpad);
  ScheduleArguments const args{
      .shape =
          {
              .dtype = parse_dtype(dtype),
              .batch = batch,
              .seqlen_q = seqlen_q,
              .seqlen_k = seqlen_k,
              .heads_q = heads_q,
              .heads_k = heads_k,
              .head_dim = head_dim,
              .head_dim_v = head_dim_v,
              .page_size = page_size,
          },
      .options =
          {
              .cu_seqlens_q = cu_seqlens_q_argument.tensor(),
              .seqused_k = seqused_k_argument.tensor(),
              .cache_leftpad = cache_leftpad_argument.tensor(),
              .cu_seqlens_k_new = cu_seqlens_k_new_argument.tensor(),
              .seqlen_k_new = seqlen_k_new,
              .seqused_k_all = seqused_k_all,
              .causal = causal,
              .window_left = window_left,
              .window_right = window_right,
              .attention_chunk = attention_chunk,
              .num_splits = num_splits,
              .sm_margin = sm_margin,
              .batch_invariant = batch_invariant,
          },
      .metadata = metadata_argument.tensor(),
  };
  Stream const work_stream = stream ? reinterpret_cast<Stream>(*stream) : metadata_argument.current_stream();
  nb::gil_scoped_release const released;
  hopper_attention::make_schedule(args, work_stream);
}

}  // namespace

void bind_schedule(nb::module_& module) {
  module.def("schedule_size", &schedule_size, nb::arg("batch"),
             "How many int32 the metadata of `batch` sequences take: 1 + 4 * batch rounded up to a multiple of 4.");
  module.def(
      "make_schedule", &run_make_schedule, nb::arg("metadata").none(), nb::kw_only(), nb::arg("dtype"),
      nb::arg("batch"), nb::arg("seqlen_q"), nb::arg("seqlen_k"), nb::arg("heads_q"), nb::arg("heads_k"),
      nb::arg("head_dim"), nb::arg("head_dim_v"), nb::arg("page_size") = 0, nb::arg("seqused_k").none() = nb::none(),
      nb::arg("seqused_k_all") = -1, nb::arg("cu_seqlens_q").none() = nb::none(),
      nb::arg("cu_seqlens_k_new").none() = nb::none(), nb::arg("cache_leftpad").none() = nb::none(),
      nb::arg("seqlen_k_new") = 0, nb::arg("causal") = false, nb::arg("window_left") = -1, nb::arg("window_right") = -1,
      nb::arg("attention_chunk") = 0, nb::arg("num_splits") = 0, nb::arg("sm_margin") = 0,
      nb::arg("batch_invariant") = false, nb::arg("stream").none() = nb::none(),
      nb::sig("def make_schedule(metadata: object, *, dtype: str, batch: int, seqlen_q: int, seqlen_k: int, "
              "heads_q: int, heads_k: int, head_dim: int, head_dim_v: int, page_size: int = 0, "
              "seqused_k: object | None = None, seqused_k_all: int = -1, cu_seqlens_q: object | None = None, "
              "cu_seqlens_k_new: object | None = None, cache_leftpad: object | None = None, seqlen_k_new: int = 0, "
              "causal: bool = False, window_left: int = -1, window_right: int = -1, attention_chunk: int = 0, "
              "num_splits: int = 0, sm_margin: int = 0, batch_invariant: bool = False, stream: int | None = None) "
              "-> None"),
      "Writes the schedule of a step to `metadata`, an int32 CUDA tensor of schedule_size(batch) or more elements, on\n"
      "`stream` (default: the current stream of its framework). seqlen_q and seqlen_k are bounds, or the lengths "
      "where\n"
      "no tensor gives them. page_size 0: no pages. Neither synchronises nor allocates.");
}

}  // namespace hopper_attention::python
