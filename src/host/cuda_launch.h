// What every launch needs: errors as exceptions, the right device, a kernel that is allowed its shared memory.
#pragma once

#include <cuda_runtime.h>

namespace hopper_attention {

// Raises CudaError "what: reason".
void check(cudaError_t error, char const* what);

// Makes `device` current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Lets `function` use `shared_bytes` of dynamic shared memory on the current device, which must be `device`; also loads
// it. Does so once for each function and device.
void prepare_kernel(void const* function, int shared_bytes, int device);

// How a kernel starts relative to the one before it on its stream.
enum class Start {
  kAfter,    // when that one has finished
  kOverlap,  // as soon as all blocks of that one have signalled it or ended (programmatic dependent launch)
};

struct LaunchShape {
  int device = 0;  // the current one
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;
  Start start = Start::kAfter;
  int cluster = 1;  // CTAs of a cluster
};

// Launches `function(params)`, prepared if it is the first time. Raises CudaError naming `what`.
void launch_kernel(void const* function, LaunchShape const& shape, void* params, cudaStream_t stream, char const* what);

}  // namespace hopper_attention
