// combine and merge_states: tensors in, one launch.
#include <cstdint>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "bindings.h"
#include "hopper_attention/combine.h"
#include "tensor_argument.h"

namespace hopper_attention::python {
namespace {

Stream work_stream(std::optional<std::uintptr_t> stream, TensorArgument const& argument) {
  return stream ? reinterpret_cast<Stream>(*stream) : argument.current_stream();
}

void run_combine(nb::handle out_partial, nb::handle lse_partial, nb::handle out, nb::handle lse,
                 std::optional<std::uintptr_t> stream) {
  TensorArgument const parts_argument("out_partial", out_partial);
  TensorArgument const logs_argument("lse_partial", lse_partial);
  TensorArgument const out_argument("out", out);
  TensorArgument const lse_argument("lse", lse);
  CombineArguments const args{
      .out_partial = parts_argument.tensor(),
      .lse_partial = logs_argument.tensor(),
      .out = out_argument.tensor(),
      .lse = lse_argument.tensor(),
  };
  Stream const where = work_stream(stream, parts_argument);
  nb::gil_scoped_release const released;
  hopper_attention::combine(args, where);
}

void run_merge_states(nb::handle out_a, nb::handle lse_a, nb::handle out_b, nb::handle lse_b, nb::handle out,
                      nb::handle lse, std::optional<std::uintptr_t> stream) {
  TensorArgument const out_a_argument("out_a", out_a);
  TensorArgument const lse_a_argument("lse_a", lse_a);
  TensorArgument const out_b_argument("out_b", out_b);
  TensorArgument const lse_b_argument("lse_b", lse_b);
  TensorArgument const out_argument("out", out);
  TensorArgument const lse_argument("lse", lse);
  MergeArguments const args{
      .out_a = out_a_argument.tensor(),
      .lse_a = lse_a_argument.tensor(),
      .out_b = out_b_argument.tensor(),
      .lse_b = lse_b_argument.tensor(),
      .out = out_argument.tensor(),
      .lse = lse_argument.tensor(),
  };
  Stream const where = work_stream(stream, out_a_argument);
  nb::gil_scoped_release const released;
  hopper_attention::merge_states(args, where);
}

}  // namespace

void bind_combine(nb::module_& module) {
  module.def(
      "combine", &run_combine, nb::arg("out_partial").none(), nb::arg("lse_partial").none(), nb::arg("out").none(),
      nb::arg("lse").none(), nb::arg("stream").none() = nb::none(),
      nb::sig("def combine(out_partial: object, lse_partial: object, out: object, lse: object, "
              "stream: int | None = None) -> None"),
      "CUDA tensors out_partial (S, B, M, H, D) and lse_partial (S, B, M, H), float32, into out (B, M, H, D) and lse\n"
      "(B, M, H) float32, on `stream` (default: the current stream of out_partial's framework).");
  module.def(
      "merge_states", &run_merge_states, nb::arg("out_a").none(), nb::arg("lse_a").none(), nb::arg("out_b").none(),
      nb::arg("lse_b").none(), nb::arg("out").none(), nb::arg("lse").none(), nb::arg("stream").none() = nb::none(),
      nb::sig("def merge_states(out_a: object, lse_a: object, out_b: object, lse_b: object, out: object, lse: object, "
              "stream: int | None = None) -> None"),
      "CUDA tensors out_a, out_b (B, M, H, D) and lse_a, lse_b (B, H, M) float32, or without B, into out and lse of\n"
      "the same shapes, on `stream` (default: the current stream of out_a's framework).");
}

}  // namespace hopper_attention::python
