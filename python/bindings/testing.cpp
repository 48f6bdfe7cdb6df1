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
  std::int64_t appends = 0;
  AppendArguments append_args;
  Stream append_stream = nullptr;
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

void record_append(AppendArguments const& args, Stream stream) {
  Recording& r = recording();
  std::lock_guard const lock(r.mutex);
  ++r.appends;
  r.append_args = args;
  r.append_stream = stream;
}

void count_append(AppendArguments const& /*args*/, Stream /*stream*/) { ++recording().appends; }

void replace_backend(std::optional<DeviceInfo> const& device, testing::Backend const& backend) {
  Recording& r = recording();
  std::lock_guard const lock(r.mutex);
  r.launches = 0;
  r.appends = 0;
  if (device) { r.device = *device; }
  testing::set_backend(device ? backend : testing::Backend{});
}

void stub_backend(std::optional<DeviceInfo> const& device) {
  replace_backend(device, {.launch = record_launch, .device_info = recorded_device, .append = record_append});
}

void time_backend(std::optional<DeviceInfo> const& device) {
  replace_backend(device, {.launch = count_launch, .device_info = recorded_device, .append = count_append});
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

nb::dict last_append() {
  Recording& r = recording();
  std::lock_guard const lock(r.mutex);
  AppendArguments const& args = r.append_args;
  nb::dict result;
  result["k"] = tensor_dict(args.k_new);
  result["v"] = tensor_dict(args.v_new);
  result["k_cache"] = tensor_dict(args.k_cache);
  result["v_cache"] = tensor_dict(args.v_cache);
  result["seqused_k"] = tensor_dict(args.seqused_k);
  result["seqused_k_all"] = args.seqused_k_all;
  result["cu_seqlens_k_new"] = tensor_dict(args.cu_seqlens_k_new);
  result["page_table"] = tensor_dict(args.page_table);
  result["cache_batch_idx"] = tensor_dict(args.cache_batch_idx);
  result["rotary_cos"] = tensor_dict(args.rotary_cos);
  result["rotary_sin"] = tensor_dict(args.rotary_sin);
  result["q"] = tensor_dict(args.q);
  result["q_rotated"] = tensor_dict(args.q_rotated);
  result["cu_seqlens_q"] = tensor_dict(args.cu_seqlens_q);
  result["rotary_seqlens"] = tensor_dict(args.rotary_seqlens);
  result["rotary_interleaved"] = args.rotary_interleaved;
  result["rotate_q_per_position"] = args.rotate_q_per_position;
  result["stream"] = reinterpret_cast<std::uintptr_t>(r.append_stream);
  return result;
}

}  // namespace

void bind_testing(nb::module_& module) {
  nb::class_<ForcedPlan>(module, "ForcedPlan",
                         "For tests: choices that the plan would not make; 0 leaves a choice open.")
      .def(
          "__init__",
          [](ForcedPlan* self, int rows, int keys, int stages, int packed_heads, int heads_per_pass, int ctas,
             int num_splits, int cluster, bool one_tile) {
            new (self) ForcedPlan{.tile = {.rows = rows, .keys = keys, .stages = stages},
                                  .packed_heads = packed_heads,
                                  .heads_per_pass = heads_per_pass,
                                  .ctas = ctas,
                                  .num_splits = num_splits,
                                  .cluster = cluster,
                                  .one_tile = one_tile};
          },
          nb::kw_only(), nb::arg("rows") = 0, nb::arg("keys") = 0, nb::arg("stages") = 0, nb::arg("packed_heads") = 0,
          nb::arg("heads_per_pass") = 0, nb::arg("ctas") = 0, nb::arg("num_splits") = 0, nb::arg("cluster") = 0,
          nb::arg("one_tile") = false);
  module.def("force_plan", &testing::force_plan, nb::arg("forced").none(),
             "For tests: applies to calls of forward() on this thread until called again; None ends it. Returns what "
             "was in force before.");
  module.def("cached_plans", &testing::cached_plans, "For tests: plans that forward() keeps.");
  module.def("stub_backend", &stub_backend, nb::arg("device").none(),
             "For tests: forward() plans for `device`, and launches, also those of append(), are recorded instead of "
             "made; None\n"
             "brings the GPU back.");
  module.def("time_backend", &time_backend, nb::arg("device").none(),
             "For the host time of a call: as stub_backend(), but launches are only counted.");
  module.def("count_host_memory_as_cuda", &count_host_memory_as_cuda, nb::arg("counts"),
             "For tests: whether tensors in host memory count as tensors of CUDA device 0.");
  module.def(
      "launches", [] { return recording().launches; },
      "For tests: launches of attention since the backend was replaced.");
  module.def("appends", [] { return recording().appends; }, "For tests: launches of append(), likewise.");
  module.def("last_append", &last_append, "For tests: what the last recorded append was given.");
  module.def("last_launch", &last_launch, "For tests: what the last recorded launch was given.");
}

}  // namespace hopper_attention::python
