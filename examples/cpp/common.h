// What the examples share: tensors for the library, memory on the device, and why a GPU cannot be used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "hopper_attention/forward.h"

#if defined(WITH_CUDA_RUNTIME)
#include <cuda_runtime_api.h>
#endif

namespace example {

namespace ha = hopper_attention;

// A contiguous tensor on device 0.
inline ha::Tensor tensor(void* data, ha::DataType dtype, std::vector<std::int64_t> const& shape) {
  ha::Tensor t{.data = data, .dtype = dtype, .device = 0, .rank = static_cast<int>(shape.size())};
  std::int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

// An address that only looks like device memory, for what never reads it: checks and plans.
inline void* address(std::uintptr_t gigabytes) { return reinterpret_cast<void*>(gigabytes << 30); }

inline float from_bfloat16(std::uint16_t bits) {
  std::uint32_t const wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  static_assert(sizeof(value) == sizeof(wide));
  __builtin_memcpy(&value, &wide, sizeof(value));
  return value;
}

// Exact for values that bf16 holds.
inline std::uint16_t to_bfloat16(float value) {
  std::uint32_t wide;
  __builtin_memcpy(&wide, &value, sizeof(wide));
  return static_cast<std::uint16_t>(wide >> 16);
}

#if defined(WITH_CUDA_RUNTIME)
inline void check(cudaError_t error) {
  if (error != cudaSuccess) { throw ha::CudaError(cudaGetErrorString(error)); }
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::vector<T> const& values) : bytes_(values.size() * sizeof(T)) {
    check(cudaMalloc(&data_, bytes_));
    write(values);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(DeviceArray const&) = delete;
  DeviceArray& operator=(DeviceArray const&) = delete;

  void* data() const { return data_; }
  void write(std::vector<T> const& values) { check(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice)); }
  std::vector<T> on_host() const {
    std::vector<T> values(bytes_ / sizeof(T));
    check(cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// Why nothing can be run on a GPU here; empty if it can.
inline std::string why_not() {
  if (ha::built_kernels().empty()) { return "this build of hopper_attention has no kernels"; }
  try {
    ha::require_supported_device(0);
  } catch (ha::CudaError const& error) { return error.what(); }
  return {};
}
#else
inline std::string why_not() { return "this example was compiled without the CUDA runtime"; }
#endif

}  // namespace example
