// Facts of cards, versions, and making a card ready.
#include <cstdint>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bindings.h"

namespace hopper_attention::python {
namespace {

std::string device_text(DeviceInfo const& device) {
  return "DeviceInfo(name='" + device.name + "', sm_count=" + std::to_string(device.sm_count) +
         ", compute capability " + std::to_string(device.compute_major) + "." + std::to_string(device.compute_minor) +
         ", l2_bytes=" + std::to_string(device.l2_bytes) +
         ", memory_gbs=" + std::to_string(static_cast<std::int64_t>(device.memory_gbs)) + ")";
}

}  // namespace

void bind_device(nb::module_& module) {
  nb::class_<DeviceInfo>(module, "DeviceInfo", "The facts of a card that decisions depend on.")
      .def(
          "__init__",
          [](DeviceInfo* self, std::string name, int sm_count, int compute_major, int compute_minor,
             std::int64_t l2_bytes, double memory_gbs) {
            new (self) DeviceInfo{std::move(name), sm_count, compute_major, compute_minor, l2_bytes, memory_gbs};
          },
          nb::arg("name"), nb::arg("sm_count"), nb::arg("compute_major") = 9, nb::arg("compute_minor") = 0,
          nb::arg("l2_bytes") = 50 << 20, nb::arg("memory_gbs") = DeviceInfo{}.memory_gbs)
      .def_ro("name", &DeviceInfo::name)
      .def_ro("sm_count", &DeviceInfo::sm_count)
      .def_ro("compute_major", &DeviceInfo::compute_major)
      .def_ro("compute_minor", &DeviceInfo::compute_minor)
      .def_ro("l2_bytes", &DeviceInfo::l2_bytes)
      .def_ro("memory_gbs", &DeviceInfo::memory_gbs)
      .def("__repr__", &device_text);
  module.def(
      "device_info", [](int ordinal) { return device_info(ordinal); }, nb::arg("ordinal"),
      "Facts of CUDA device `ordinal`; RuntimeError without driver or device.");
  module.def(
      "device_info", [](std::string const& name) { return device_info(name); }, nb::arg("name"),
      "Facts of a card by name (\"H100\", \"H200\"); needs no GPU.");
  module.def("require_supported_device", &require_supported_device, nb::arg("ordinal"),
             nb::call_guard<nb::gil_scoped_release>(),
             "RuntimeError, saying what is needed and what was found, unless device `ordinal` can run the kernels.");
  module.def("warmup", &warmup, nb::arg("ordinal"), nb::call_guard<nb::gil_scoped_release>(),
             "Loads every built kernel on device `ordinal`.");
  module.def(
      "cuda_versions",
      [] {
        CudaVersions const versions = cuda_versions();
        return std::pair(versions.runtime, versions.driver);
      },
      "(runtime linked in, installed driver) as 1000 * major + 10 * minor; driver 0: none.");
}

}  // namespace hopper_attention::python
