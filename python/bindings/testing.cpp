// Forced plans, and a stand-in for the GPU that records the last launch.
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "hopper_attention/testing.h"
#include "tensor_argument.h"

namespace hopper_attention::python {
namespace {

using testing::ForcedPlan;

struct Recording {
  std::mutex mutex;
  DeviceInfo device;
  std::int64_t launches = 0;
  Arguments args;
  Plan plan;
  Stream stream = nullptr;
};

Recording& recording() {
  static Recording instance;
  return instance;
}

void record_launch(Plan const& plan, Problem const& /*problem*/, Arguments const& args, Stream stream) {
  Recording& r = recording();
  std::lock_guard const lock(r.mutex);
  ++r.launches;
  r.args = args;
  r.plan = plan;
  r.stream = stream;
}

void count_launch(Plan const& /*plan*/, Problem const& /*problem*/, Arguments const& /*args*/, Stream /*stream*/) {
  ++recording().launches;
}

DeviceInfo const& recorded_device(int /*ordinal*/) { return recording().device; }

void stub_backend(std::optional<DeviceInfo> device, bool timed) {
  Recording& r = recording();
  std::lock_guard const lock(r.mutex);
  r.launches = 0;
  count_host_memory_as_cuda(device && timed);
  if (device) {
    r.device = *device;
    testing::set_backend({.launch = timed ? count_launch : record_launch, .device_info = recorded_device});
  } else {
    testing::set_backend({});
  }
}

nb::object tensor_dict(Tensor const& tensor) {
  if (!tensor.given()) { return nb::none(); }
  nb::dict result;
  nb::list shape;
  nb::list stride;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    shape.append(tensor.shape[dim]);
    stride.append(tensor.stride[dim]);
  }
  result["data"] = reinterpret_cast<std::uintptr_t>(tensor.data);
  result["dtype"] = dtype_text(tensor.dtype);
  result["device"] = tensor.device;
  result["shape"] = nb::tuple(shape);
  result["stride"] = nb::tuple(stride);
  return result;
}

nb::dict last_launch() {
  Recording& r = recording();
  std::lock_guard const lock(r.mutex);
  Arguments const& args = r.args;
  nb::dict result;
  result["q"] = tensor_dict(args.q);
  result["k"] = tensor_dict(args.k);
  result["v"] = tensor_dict(args.v);
  result["out"] = tensor_dict(args.out);
  result["softmax_lse"] = tensor_dict(args.softmax_lse);
  result["sinks"] = tensor_dict(args.sinks);
  result["cu_seqlens_q"] = tensor_dict(args.cu_seqlens_q);
  result["cu_seqlens_k"] = tensor_dict(args.cu_seqlens_k);
  result["seqused_q"] = tensor_dict(args.seqused_q);
  result["seqused_k"] = tensor_dict(args.seqused_k);
  result["page_table"] = tensor_dict(args.page_table);
  result["cache_batch_idx"] = tensor_dict(args.cache_batch_idx);
  result["cache_leftpad"] = tensor_dict(args.cache_leftpad);
  result["cu_seqlens_k_new"] = tensor_dict(args.cu_seqlens_k_new);
  result["cp_tot_seqused_k"] = tensor_dict(args.cp_tot_seqused_k);
  result["scheduler_metadata"] = tensor_dict(args.scheduler_metadata);
  result["workspace"] = tensor_dict(args.workspace);
  result["seqlen_k_new"] = args.seqlen_k_new;
  result["seqused_k_all"] = args.seqused_k_all;
  result["max_seqlen_q"] = args.max_seqlen_q;
  result["max_seqlen_k"] = args.max_seqlen_k;
  result["cp_world_size"] = args.cp_world_size;
  result["cp_rank"] = args.cp_rank;
  result["softmax_scale"] = nb::cast(args.softmax_scale);
  result["causal"] = args.causal;
  result["window_left"] = args.window_left;
  result["window_right"] = args.window_right;
  result["attention_chunk"] = args.attention_chunk;
  result["softcap"] = args.softcap;
  result["num_splits"] = args.num_splits;
  result["sm_margin"] = args.sm_margin;
  result["batch_invariant"] = args.batch_invariant;
  result["stream"] = reinterpret_cast<std::uintptr_t>(r.stream);
  result["plan"] = nb::cast(r.plan);
  return result;
}

}  // namespace

void bind_testing(nb::module_& module) {
  nb::class_<ForcedPlan>(module, "ForcedPlan",
                         "For tests: choices that the plan would not make; 0 leaves a choice open.")
      .def(
          "__init__",
          [](ForcedPlan* self, int rows, int keys, int stages, int packed_heads, int heads_per_pass, int ctas,
             int num_splits, int cluster) {
            new (self) ForcedPlan{.tile = {.rows = rows, .keys = keys, .stages = stages},
                                  .packed_heads = packed_heads,
                                  .heads_per_pass = heads_per_pass,
                                  .ctas = ctas,
                                  .num_splits = num_splits,
                                  .cluster = cluster};
          },
          nb::kw_only(), nb::arg("rows") = 0, nb::arg("keys") = 0, nb::arg("stages") = 0, nb::arg("packed_heads") = 0,
          nb::arg("heads_per_pass") = 0, nb::arg("ctas") = 0, nb::arg("num_splits") = 0, nb::arg("cluster") = 0);
  module.def("force_plan", &testing::force_plan, nb::arg("forced").none(),
             "For tests: applies to calls of forward() on this thread until called again; None ends it. Returns what "
             "was in force before.");
  module.def("cached_plans", &testing::cached_plans, "For tests: plans that forward() keeps.");
  module.def(
      "stub_backend", &stub_backend, nb::arg("device").none(), nb::kw_only(), nb::arg("timed") = false,
      "For tests: forward() plans for `device` and records its launch instead of making it; None brings the GPU back.\n"
      "timed: for the host time of a call, launches are counted only, and tensors in host memory count as tensors of\n"
      "device 0.");
  module.def("launches", [] { return recording().launches; }, "For tests: launches recorded since stub_backend().");
  module.def("last_launch", &last_launch, "For tests: what the last recorded launch was given.");
}

}  // namespace hopper_attention::python
