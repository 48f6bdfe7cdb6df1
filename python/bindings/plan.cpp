// Plans and the kernels they choose from.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "rotated_query.h"

namespace hopper_attention::python {

char const* dtype_text(DataType dtype) {
  switch (dtype) {
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kFloat16:
      return "float16";
    case DataType::kFloat32:
      return "float32";
    case DataType::kInt32:
      return "int32";
    case DataType::kUInt8:
      return "uint8";
    case DataType::kUnsupported:
      break;
  }
  return "unsupported";
}

char const* family_text(KernelFamily family) {
  switch (family) {
    case KernelFamily::kPrefill:
      return "prefill";
    case KernelFamily::kDecode:
      return "decode";
    case KernelFamily::kNone:
      break;
  }
  return "none";
}

DataType parse_dtype(std::string const& text) {
  for (DataType const dtype : {DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32}) {
    if (text == dtype_text(dtype)) { return dtype; }
  }
  return DataType::kUnsupported;
}

namespace {

constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;  // more than that no call takes

char const* calls_text(TileConfig const& tile) {
  switch (tile.calls) {
    case Calls::kAll:
      return "all";
    case Calls::kCapped:
      return "capped";
    case Calls::kUncapped:
      return "uncapped";
    case Calls::kMixed:
      return "mixed";
    case Calls::kMixedMany:
      return "mixed, many";
    case Calls::kUncut:
      return "uncut";
    case Calls::kWhole:
      return "whole";
    case Calls::kDense:
      return "dense";
    case Calls::kPaired:
      return "paired";
    case Calls::kByIndex:
      return "by index";
    case Calls::kInParts:
      return "in parts";
  }
  return "";
}

std::string tile_text(TileConfig const& tile) {
  return "Tile(rows=" + std::to_string(tile.rows) + ", keys=" + std::to_string(tile.keys) +
         ", head_dim=" + std::to_string(tile.head_dim) + ", head_dim_v=" + std::to_string(tile.head_dim_v) +
         ", stages=" + std::to_string(tile.stages) + ", calls='" + calls_text(tile) + "')";
}

std::string plan_text(Plan const& plan) {
  return std::string("Plan(kernel='") + family_text(plan.kernel) + "', dtype='" + dtype_text(plan.dtype) +
         "', tile=" + tile_text(plan.tile) + ", num_splits=" + std::to_string(plan.num_splits) +
         ", ctas=" + std::to_string(plan.ctas) + ", workspace_bytes=" + std::to_string(plan.workspace_bytes) + ")";
}

Plan make_plan(DeviceInfo const& device, std::string const& dtype, std::int64_t batch, std::int64_t seqlen_q,
               std::int64_t seqlen_k, std::int64_t heads_q, std::int64_t heads_k, std::int64_t head_dim,
               std::int64_t head_dim_v, bool has_sinks, bool causal, std::int64_t window_left,
               std::int64_t window_right, std::int64_t attention_chunk, double softcap, std::int64_t num_splits,
               std::int64_t sm_margin, bool batch_invariant, std::int64_t page_size, bool ragged,
               std::optional<std::int64_t> total_q, std::optional<std::int64_t> total_k, bool has_metadata,
               bool rotary) {
  ProblemShape const shape{
      .dtype = parse_dtype(dtype),
      .batch = batch,
      .seqlen_q = seqlen_q,
      .seqlen_k = seqlen_k,
      .heads_q = heads_q,
      .heads_k = heads_k,
      .head_dim = head_dim,
      .head_dim_v = head_dim_v,
      .has_sinks = has_sinks,
      .page_size = page_size,
  };
  Arguments options;
  options.causal = causal;
  options.window_left = window_left;
  options.window_right = window_right;
  options.attention_chunk = attention_chunk;
  options.softcap = softcap;
  options.num_splits = num_splits;
  options.sm_margin = sm_margin;
  options.batch_invariant = batch_invariant;
  // Of tensors of lengths make_problem() only counts which ones are given.
  Tensor given;
  given.rank = 1;
  if (total_q) { options.cu_seqlens_q = given; }
  if (total_q && page_size == 0) { options.cu_seqlens_k = given; }
  if (ragged) { options.seqused_k = given; }
  if (has_metadata) { options.scheduler_metadata = given; }
  Problem problem = make_problem(shape, options);
  if (total_q) { problem.total_q = static_cast<int>(std::clamp<std::int64_t>(*total_q, 0, kMaxRows)); }
  if (total_k && total_q && page_size == 0) {
    problem.total_k = static_cast<int>(std::clamp<std::int64_t>(*total_k, 0, kMaxRows));
    problem.keys_known = !ragged && *total_k >= batch * seqlen_k;
  }
  Plan made = hopper_attention::plan(problem, device);
  if (rotary) {
    std::int64_t const query_bytes = std::min(total_q.value_or(batch * seqlen_q), kMaxRows) * heads_q * head_dim * 2;
    made.workspace_bytes = workspace_with_rotated_query(made.workspace_bytes, query_bytes);
    made.reasons.push_back("workspace: " + std::to_string(made.workspace_bytes) + " bytes with the rotated q, " +
                           std::to_string(query_bytes) + " bytes, behind it");
  }
  return made;
}

void bind_tile(nb::module_& module) {
  nb::class_<TileConfig>(module, "Tile",
                         "The shape of one tile of work: query rows x keys of a block, head dims, ring stages.")
      .def_ro("rows", &TileConfig::rows)
      .def_ro("keys", &TileConfig::keys)
      .def_ro("head_dim", &TileConfig::head_dim)
      .def_ro("head_dim_v", &TileConfig::head_dim_v)
      .def_ro("stages", &TileConfig::stages)
      .def_ro("slab_keys", &TileConfig::slab_keys,
              "Of a tile with one block: the keys that 64 rows read of it. 0: tiles have several blocks.")
      .def_prop_ro(
          "calls", &calls_text,
          "What its kernel has the code for: 'all' calls, all with softcap ('capped'), all without it\n"
          "('uncapped'); of these those whose tiles are never cut ('uncut'), without pages ('whole'), 'dense'\n"
          "ones, those of which the blocks of a cluster share tiles ('paired'), or which computes tiles of few rows "
          "as\n"
          "kernels for these do ('mixed'); of few rows those without softcap\n"
          "whose tiles follow from their index ('by index'), and all with batch_invariant, in which tiles are in\n"
          "parts that follow from them alone ('in parts').")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](TileConfig const& tile) { return nb::hash(nb::str(tile_text(tile).c_str())); })
      .def("__repr__", &tile_text);
}

void bind_kernel_info(nb::module_& module) {
  nb::class_<KernelInfo>(module, "KernelInfo", "A kernel that this build contains.")
      .def_prop_ro("family", [](KernelInfo const& kernel) { return family_text(kernel.family); })
      .def_prop_ro("dtype", [](KernelInfo const& kernel) { return dtype_text(kernel.dtype); })
      .def_ro("tile", &KernelInfo::tile)
      .def("__repr__", [](KernelInfo const& kernel) {
        return std::string("KernelInfo(family='") + family_text(kernel.family) + "', dtype='" +
               dtype_text(kernel.dtype) + "', tile=" + tile_text(kernel.tile) + ")";
      });
  module.def("built_kernels", &built_kernels, "The kernels of this build; empty in a host-only build.");
}

}  // namespace

void bind_plan(nb::module_& module) {
  bind_tile(module);
  bind_kernel_info(module);
  nb::class_<Plan>(module, "Plan", "What was decided for a call, and why. print() explains it.")
      .def_prop_ro(
          "kernel", [](Plan const& plan) { return family_text(plan.kernel); }, "Kernel family.")
      .def_prop_ro("dtype", [](Plan const& plan) { return dtype_text(plan.dtype); })
      .def_ro("tile", &Plan::tile)
      .def_ro("packed_heads", &Plan::packed_heads, "Query heads of one K/V head that share a tile.")
      .def_ro("num_splits", &Plan::num_splits)
      .def_ro("tiles", &Plan::tiles)
      .def_ro("ctas", &Plan::ctas, "Thread blocks of the persistent grid.")
      .def_ro("threads", &Plan::threads, "Threads of a block.")
      .def_ro("heads_per_pass", &Plan::heads_per_pass,
              "Head groups whose tiles run together, so that K and V stay in L2.")
      .def_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_ro("reasons", &Plan::reasons, "One line for each decision.")
      .def("explain", &Plan::explain, "The plan as text for a person.")
      .def("__str__", &Plan::explain)
      .def("__repr__", &plan_text);
  module.def(
      "plan", &make_plan, nb::arg("device"), nb::kw_only(), nb::arg("dtype"), nb::arg("batch"), nb::arg("seqlen_q"),
      nb::arg("seqlen_k"), nb::arg("heads_q"), nb::arg("heads_k"), nb::arg("head_dim"), nb::arg("head_dim_v"),
      nb::arg("has_sinks") = false, nb::arg("causal") = false, nb::arg("window_left") = -1,
      nb::arg("window_right") = -1, nb::arg("attention_chunk") = 0, nb::arg("softcap") = 0.0, nb::arg("num_splits") = 0,
      nb::arg("sm_margin") = 0, nb::arg("batch_invariant") = false, nb::arg("page_size") = 0, nb::arg("ragged") = false,
      nb::arg("total_q").none() = nb::none(), nb::arg("total_k").none() = nb::none(), nb::arg("has_metadata") = false,
      nb::arg("rotary") = false,
      "The plan of a call of this shape on `device`; needs no GPU. ragged: lengths are on the device, seqlen_* are\n"
      "bounds. total_q, total_k: rows of a packed q, which is ragged, too, and of its k. rotary: workspace_bytes have\n"
      "room for the rotated q.");
}

}  // namespace hopper_attention::python
