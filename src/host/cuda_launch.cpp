#include "host/cuda_launch.h"

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

DeviceGuard::DeviceGuard(int device) {
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

void launch_kernel(void const* function, LaunchShape const& shape, void* params, cudaStream_t stream,
                   char const* what) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.start == Start::kOverlap) {
    cudaLaunchAttribute& overlap = attributes[count++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[count++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {params};
  check(cudaLaunchKernelExC(&config, function, arguments), what);
}

}  // namespace hopper_attention
