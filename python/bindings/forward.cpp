// forward: tensors and values in, launches out.
#include <cstdint>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "bindings.h"
#include "tensor_argument.h"

namespace hopper_attention::python {
namespace {

// Calls `allocate(bytes, q)`, which returns a uint8 tensor, with the GIL held. The tensor lives as long as this.
class Workspace {
 public:
  Workspace(nb::handle allocate, nb::handle q) : allocate_(allocate), q_(q) {}

  Tensor make(std::int64_t bytes) {
    nb::gil_scoped_acquire const held;
    made_ = allocate_(bytes, q_);
    return TensorArgument("workspace", made_).tensor();
  }

 private:
  nb::handle allocate_;
  nb::handle q_;
  nb::object made_;
};

enum class Until { kChecked, kLaunched };

template <Until kUntil>
void run(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle softmax_lse, nb::handle sinks,
         std::optional<double> softmax_scale, bool causal, std::int64_t window_left, std::int64_t window_right,
         std::int64_t attention_chunk, double softcap, std::int64_t num_splits, std::int64_t sm_margin,
         bool batch_invariant, std::optional<std::uintptr_t> stream, nb::handle workspace, nb::handle allocate,
         nb::handle cu_seqlens_q, nb::handle cu_seqlens_k, nb::handle seqused_q, nb::handle seqused_k,
         nb::handle page_table, nb::handle cache_batch_idx, nb::handle cache_leftpad, nb::handle cu_seqlens_k_new,
         nb::handle cp_tot_seqused_k, nb::handle scheduler_metadata, std::int64_t seqlen_k_new,
         std::int64_t seqused_k_all, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, std::int64_t cp_world_size,
         std::int64_t cp_rank) {
  TensorArgument const q_argument("q", q);
  TensorArgument const k_argument("k", k);
  TensorArgument const v_argument("v", v);
  TensorArgument const out_argument("out", out);
  TensorArgument const lse_argument("softmax_lse", softmax_lse);
  TensorArgument const sinks_argument("s_aux", sinks);
  TensorArgument const workspace_argument("workspace", workspace);
  TensorArgument const cu_seqlens_q_argument("cu_seqlens_q", cu_seqlens_q);
  TensorArgument const cu_seqlens_k_argument("cu_seqlens_k", cu_seqlens_k);
  TensorArgument const seqused_q_argument("seqused_q", seqused_q);
  TensorArgument const seqused_k_argument("seqused_k", seqused_k);
  TensorArgument const page_table_argument("page_table", page_table);
  TensorArgument const cache_batch_idx_argument("cache_batch_idx", cache_batch_idx);
  TensorArgument const cache_leftpad_argument("cache_leftpad", cache_leftpad);
  TensorArgument const cu_seqlens_k_new_argument("cu_seqlens_k_new", cu_seqlens_k_new);
  TensorArgument const cp_tot_seqused_k_argument("cp_tot_seqused_k", cp_tot_seqused_k);
  TensorArgument const metadata_argument("scheduler_metadata", scheduler_metadata);
  Arguments const args{
      .q = q_argument.tensor(),
      .k = k_argument.tensor(),
      .v = v_argument.tensor(),
      .out = out_argument.tensor(),
      .softmax_lse = lse_argument.tensor(),
      .sinks = sinks_argument.tensor(),
      .cu_seqlens_q = cu_seqlens_q_argument.tensor(),
      .cu_seqlens_k = cu_seqlens_k_argument.tensor(),
      .seqused_q = seqused_q_argument.tensor(),
      .seqused_k = seqused_k_argument.tensor(),
      .page_table = page_table_argument.tensor(),
      .cache_batch_idx = cache_batch_idx_argument.tensor(),
      .cache_leftpad = cache_leftpad_argument.tensor(),
      .cu_seqlens_k_new = cu_seqlens_k_new_argument.tensor(),
      .cp_tot_seqused_k = cp_tot_seqused_k_argument.tensor(),
      .seqlen_k_new = seqlen_k_new,
      .seqused_k_all = seqused_k_all,
      .max_seqlen_q = max_seqlen_q,
      .max_seqlen_k = max_seqlen_k,
      .cp_world_size = cp_world_size,
      .cp_rank = cp_rank,
      .scheduler_metadata = metadata_argument.tensor(),
      .workspace = workspace_argument.tensor(),
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
  if constexpr (kUntil == Until::kChecked) {
    check_call(args);
  } else {
    Stream const work_stream = stream ? reinterpret_cast<Stream>(*stream) : q_argument.current_stream();
    Workspace made(allocate, q);
    nb::gil_scoped_release const released;
    if (allocate.is_none()) {
      hopper_attention::forward(args, work_stream);
    } else {
      hopper_attention::forward(args, work_stream, [&made](std::int64_t bytes) { return made.make(bytes); });
    }
  }
}

constexpr char const* kParameters =
    "(q: object, k: object, v: object, out: object, softmax_lse: object | None = None, sinks: object | None = None, "
    "softmax_scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1, "
    "attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, sm_margin: int = 0, "
    "batch_invariant: bool = False, stream: int | None = None, workspace: object | None = None, "
    "allocate: object | None = None, cu_seqlens_q: object | None = None, cu_seqlens_k: object | None = None, "
    "seqused_q: object | None = None, seqused_k: object | None = None, page_table: object | None = None, "
    "cache_batch_idx: object | None = None, cache_leftpad: object | None = None, "
    "cu_seqlens_k_new: object | None = None, cp_tot_seqused_k: object | None = None, "
    "scheduler_metadata: object | None = None, seqlen_k_new: int = 0, seqused_k_all: int = -1, "
    "max_seqlen_q: int = -1, max_seqlen_k: int = -1, cp_world_size: int = 1, cp_rank: int = 0) -> None";

template <class Function>
void define(nb::module_& module, char const* name, Function function, char const* doc) {
  std::string const signature = std::string("def ") + name + kParameters;
  module.def(name, function, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("out").none(),
             nb::arg("softmax_lse").none() = nb::none(), nb::arg("sinks").none() = nb::none(),
             nb::arg("softmax_scale").none() = nb::none(), nb::arg("causal") = false, nb::arg("window_left") = -1,
             nb::arg("window_right") = -1, nb::arg("attention_chunk") = 0, nb::arg("softcap") = 0.0,
             nb::arg("num_splits") = 1, nb::arg("sm_margin") = 0, nb::arg("batch_invariant") = false,
             nb::arg("stream").none() = nb::none(), nb::arg("workspace").none() = nb::none(),
             nb::arg("allocate").none() = nb::none(), nb::arg("cu_seqlens_q").none() = nb::none(),
             nb::arg("cu_seqlens_k").none() = nb::none(), nb::arg("seqused_q").none() = nb::none(),
             nb::arg("seqused_k").none() = nb::none(), nb::arg("page_table").none() = nb::none(),
             nb::arg("cache_batch_idx").none() = nb::none(), nb::arg("cache_leftpad").none() = nb::none(),
             nb::arg("cu_seqlens_k_new").none() = nb::none(), nb::arg("cp_tot_seqused_k").none() = nb::none(),
             nb::arg("scheduler_metadata").none() = nb::none(), nb::arg("seqlen_k_new") = 0,
             nb::arg("seqused_k_all") = -1, nb::arg("max_seqlen_q") = -1, nb::arg("max_seqlen_k") = -1,
             nb::arg("cp_world_size") = 1, nb::arg("cp_rank") = 0, nb::sig(signature.c_str()), doc);
}

}  // namespace

void bind_forward(nb::module_& module) {
  define(
      module, "forward", &run<Until::kLaunched>,
      "Attention of CUDA tensors q (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q; k and v (B, Sk, Hk, D / Dv),\n"
      "(Tk, Hk, D / Dv) with cu_seqlens_k, or (pages, page size, Hk, D / Dv) with page_table; into out, as q with Dv,\n"
      "and, if given, softmax_lse (B, Hq, Sq) or (Hq, Tq) float32; on `stream` (default: the current stream of q's\n"
      "framework). Tensors of lengths are int32: cu_* (B + 1,), page_table (B, n), all others (B,). -1 for\n"
      "seqused_k_all is not given, for max_seqlen_* what the shapes allow. allocate(bytes, q) is called at most once,\n"
      "if a workspace is needed and not given, and returns a uint8 tensor on the device of q.");
  define(module, "check", &run<Until::kChecked>,
         "Raises what forward() would raise for these arguments, and does nothing else.");
  module.def(
      "has_exchange_api", [](nb::handle type) { return exchange_api(type) != nullptr; }, nb::arg("type"),
      nb::sig("def has_exchange_api(type: type) -> bool"),
      "Whether tensors of `type` come in through the DLPack C exchange API (else through nb::ndarray, 30 times "
      "slower).");
}

}  // namespace hopper_attention::python
