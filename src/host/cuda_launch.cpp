#include "host/cuda_launch.h"

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "hopper_attention/errors.h"

namespace hopper_attention {

void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

namespace {

// Then it is always current. Asking which device is costs 32 ns on an H200's host.
bool is_only_device() {
  static bool const only = [] {
    int count = 0;
    bool const known = cudaGetDeviceCount(&count) == cudaSuccess;
    if (!known) { cudaGetLastError(); }
    return known && count == 1;
  }();
  return only;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  if (device == 0 && is_only_device()) { return; }
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (device != before_) { check(cudaSetDevice(device), "cudaSetDevice"); }
  changed_ = device != before_;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) { cudaSetDevice(before_); }
}

void prepare_kernel(void const* function, int shared_bytes, int device) {
  static std::mutex mutex;
  static std::set<std::pair<void const*, int>> prepared;
  std::lock_guard const lock(mutex);
  if (prepared.contains({function, device})) { return; }
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "the kernel could not be loaded");
  // Clusters of more than 8.
  check(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "the kernel could not be loaded");
  prepared.insert({function, device});
}

namespace {

// `function` on a device, as the driver knows it.
struct LoadedKernel {
  void const* function = nullptr;
  int device = 0;
  cudaFunction_t handle = nullptr;
};

// cudaLaunchKernelExC looks its function up in every call: 0.3 us on an H200's host. Of one thread, so without locks;
// and its first look binds the device's context to the thread, which the driver's launch needs. Trivially destructible:
// a thread may still launch while its thread-local objects are destroyed.
cudaFunction_t loaded(void const* function, LaunchShape const& shape) {
  constexpr std::size_t kPlaces = 128;  // more kernels than a process uses; two in one place are looked up in turn
  thread_local constinit std::array<LoadedKernel, kPlaces> kernels{};
  LoadedKernel& kernel = kernels[(reinterpret_cast<std::uintptr_t>(function) / 16 + shape.device) % kPlaces];
  if (kernel.function != function || kernel.device != shape.device) {
    prepare_kernel(function, shape.shared_bytes, shape.device);
    cudaFunction_t handle = nullptr;
    check(cudaGetFuncBySymbol(&handle, function), "the kernel could not be loaded");
    kernel = {function, shape.device, handle};
  }
  return kernel.handle;
}

// Taken from the runtime's driver entry point, so that the library does not link libcuda. Null: the driver has none.
decltype(&cuLaunchKernelEx) driver_launch() {
  static auto* const function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    constexpr unsigned kSince = 11080;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &entry, kSince, cudaEnableDefault, &found);
    bool const there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<decltype(&cuLaunchKernelEx)>(entry) : nullptr;
  }();
  return function;
}

// What a launch says of `shape` beside its sizes, and how many attributes that takes. The driver's and the runtime's
// differ in names only.
template <class Attribute, class Value, class Id>
unsigned set_attributes(LaunchShape const& shape, Attribute (&attributes)[2], Value Attribute::* value, Id overlap,
                        Id cluster) {
  unsigned count = 0;
  if (shape.start == Start::kOverlap) {
    attributes[count].id = overlap;
    (attributes[count++].*value).programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cluster;
    (attributes[count++].*value).clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  return count;
}

// False: not started.
bool launch_by_driver(cudaFunction_t kernel, LaunchShape const& shape, void** params, cudaStream_t stream) {
  auto* const launch = driver_launch();
  if (launch == nullptr) { return false; }
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config{};
  config.gridDimX = shape.grid.x;
  config.gridDimY = shape.grid.y;
  config.gridDimZ = shape.grid.z;
  config.blockDimX = static_cast<unsigned>(shape.threads);
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs =
      set_attributes(shape, attributes, &CUlaunchAttribute::value,
                     CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  return launch(&config, kernel, params, nullptr) == CUDA_SUCCESS;
}

cudaError_t launch_by_runtime(void const* function, LaunchShape const& shape, void** params, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs =
      set_attributes(shape, attributes, &cudaLaunchAttribute::val, cudaLaunchAttributeProgrammaticStreamSerialization,
                     cudaLaunchAttributeClusterDimension);
  return cudaLaunchKernelExC(&config, function, params);
}

}  // namespace

void launch_kernel(void const* function, LaunchShape const& shape, void* params, cudaStream_t stream,
                   char const* what) {
  void* arguments[] = {params};
  if (launch_by_driver(loaded(function, shape), shape, arguments, stream)) { return; }
  // The runtime starts it, where another library has taken the thread's context away, or says why not.
  check(launch_by_runtime(function, shape, arguments, stream), what);
}

}  // namespace hopper_attention
