// forward: tensors and values in, one launch.
#include <cstdint>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "bindings.h"
#include "tensor_argument.h"

namespace hopper_attention::python {
namespace {

void run_forward(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle softmax_lse, nb::handle sinks,
                 std::optional<double> softmax_scale, bool causal, std::int64_t window_left, std::int64_t window_right,
                 std::int64_t attention_chunk, double softcap, std::int64_t num_splits, std::int64_t sm_margin,
                 bool batch_invariant, std::optional<std::uintptr_t> stream) {
  TensorArgument const q_argument("q", q);
  TensorArgument const k_argument("k", k);
  TensorArgument const v_argument("v", v);
  TensorArgument const out_argument("out", out);
  TensorArgument const lse_argument("softmax_lse", softmax_lse);
  TensorArgument const sinks_argument("s_aux", sinks);
  Arguments const args{
      .q = q_argument.tensor(),
      .k = k_argument.tensor(),
      .v = v_argument.tensor(),
      .out = out_argument.tensor(),
      .softmax_lse = lse_argument.tensor(),
      .sinks = sinks_argument.tensor(),
      .softmax_scale = softmax_scale,
      .causal = causal,
      .window_left = window_left,
      .window_right = window_right,
      .attention_chunk = attention_chunk,
      .softcap = softcap,
      .num_splits = num_splits,
      .sm_margin = sm_margin,
      .batch_invariant = batch_invariant,
  };
  Stream const work_stream = stream ? reinterpret_cast<Stream>(*stream) : q_argument.current_stream();
  nb::gil_scoped_release const released;
  hopper_attention::forward(args, work_stream);
}

}  // namespace

void bind_forward(nb::module_& module) {
  module.def(
      "forward", &run_forward, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("out").none(),
      nb::arg("softmax_lse").none() = nb::none(), nb::arg("sinks").none() = nb::none(),
      nb::arg("softmax_scale").none() = nb::none(), nb::arg("causal") = false, nb::arg("window_left") = -1,
      nb::arg("window_right") = -1, nb::arg("attention_chunk") = 0, nb::arg("softcap") = 0.0, nb::arg("num_splits") = 1,
      nb::arg("sm_margin") = 0, nb::arg("batch_invariant") = false, nb::arg("stream").none() = nb::none(),
      nb::sig("def forward(q: object, k: object, v: object, out: object, softmax_lse: object | None = None, "
              "sinks: object | None = None, softmax_scale: float | None = None, causal: bool = False, "
              "window_left: int = -1, window_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, "
              "num_splits: int = 1, sm_margin: int = 0, batch_invariant: bool = False, stream: int | None = None) "
              "-> None"),
      "Dense attention of CUDA tensors q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) into out (B, Sq, Hq, Dv)\n"
      "and, if given, softmax_lse (B, Hq, Sq) float32, on `stream` (default: the current stream of q's framework).");
  module.def(
      "has_exchange_api", [](nb::handle type) { return exchange_api(type) != nullptr; }, nb::arg("type"),
      nb::sig("def has_exchange_api(type: type) -> bool"),
      "Whether tensors of `type` come in through the DLPack C exchange API (else through nb::ndarray, 30 times "
      "slower).");
}

}  // namespace hopper_attention::python
