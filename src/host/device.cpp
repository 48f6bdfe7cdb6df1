// Facts of the installed CUDA devices.
#include <cuda_runtime.h>

#include <array>
#include <mutex>
#include <string>

#include "hopper_attention/forward.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kComputeMajor = 9;
constexpr int kComputeMinor = 0;
constexpr int kVersionsPerMajor = 1000;

struct Version {
  int value;  // 1000 * major + 10 * minor

  friend std::ostream& operator<<(std::ostream& out, Version version) {
    return out << version.value / kVersionsPerMajor << '.' << version.value % kVersionsPerMajor / 10;
  }
};

// A runtime runs on every driver of its own major version (CUDA minor version compatibility).
Version least_driver(int runtime) { return {runtime / kVersionsPerMajor * kVersionsPerMajor}; }

// The driver release that came with CUDA x.0.
char const* least_release(int runtime) {
  constexpr int kCuda12 = 12;
  constexpr int kCuda13 = 13;
  switch (runtime / kVersionsPerMajor) {
    case kCuda12:
      return " (release 525 or newer)";
    case kCuda13:
      return " (release 580 or newer)";
    default:
      return "";
  }
}

void require_driver() {
  CudaVersions const versions = cuda_versions();
  Version const least = least_driver(versions.runtime);
  require<CudaError>(versions.driver != 0, "no NVIDIA driver was found: one for CUDA ", least, " or newer",
                     least_release(versions.runtime), " is required");
  require<CudaError>(versions.driver >= least.value, "the NVIDIA driver is too old: found one for CUDA ",
                     Version{versions.driver}, ", CUDA ", least, " or newer", least_release(versions.runtime),
                     " is required");
}

void check(cudaError_t error, char const* what) {
  if (error == cudaSuccess) { return; }
  cudaGetLastError();  // a later call must not report this error again
  raise<CudaError>(what, ": ", cudaGetErrorString(error));
}

// 0 if the driver does not say.
int number(cudaDeviceAttr attribute, int ordinal) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, ordinal) == cudaSuccess) { return value; }
  cudaGetLastError();
  return 0;
}

// Two transfers a clock. Only speed depends on it: an H200's, if it is not known.
double memory_gbs(int ordinal) {
  double const clocks_per_us = number(cudaDevAttrMemoryClockRate, ordinal) * 1e-3;
  double const bytes_of_clock = 2.0 * number(cudaDevAttrGlobalMemoryBusWidth, ordinal) / 8;
  double const found = clocks_per_us * bytes_of_clock * 1e-3;
  return found > 0 ? found : DeviceInfo{}.memory_gbs;
}

DeviceInfo query_device(int ordinal) {
  require_driver();
  int count = 0;
  cudaError_t const error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) {
    cudaGetLastError();
    raise<CudaError>("no CUDA device was found: a Hopper GPU (compute capability 9.0) is required");
  }
  check(error, "the CUDA devices could not be counted");
  require<CudaError>(ordinal < count, "cuda:", ordinal, " does not exist: found ", count, " CUDA devices");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "the properties of a CUDA device could not be read");
  return {.name = properties.name,
          .sm_count = properties.multiProcessorCount,
          .compute_major = properties.major,
          .compute_minor = properties.minor,
          .l2_bytes = properties.l2CacheSize,
          .memory_gbs = memory_gbs(ordinal)};
}

}  // namespace

CudaVersions cuda_versions() {
  CudaVersions versions;
  // Both leave their number at 0 when they fail, which is the answer then.
  if (cudaRuntimeGetVersion(&versions.runtime) != cudaSuccess) { cudaGetLastError(); }
  if (cudaDriverGetVersion(&versions.driver) != cudaSuccess) { cudaGetLastError(); }
  return versions;
}

DeviceInfo const& device_info(int ordinal) {
  require(ordinal >= 0 && ordinal < kMaxDevices, "device: must be between 0 and ", kMaxDevices - 1, ", found ",
          ordinal);
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceInfo, kMaxDevices> devices;
  std::call_once(once[ordinal], [ordinal] { devices[ordinal] = query_device(ordinal); });
  return devices[ordinal];
}

void require_supported_device(int ordinal) {
  DeviceInfo const& device = device_info(ordinal);
  require<CudaError>(device.compute_major == kComputeMajor && device.compute_minor == kComputeMinor,
                     "the kernels need a Hopper GPU (compute capability 9.0): cuda:", ordinal, " is ", device.name,
                     " with compute capability ", device.compute_major, ".", device.compute_minor);
}

}  // namespace hopper_attention
