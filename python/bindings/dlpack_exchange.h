// The part of the DLPack C exchange API that this module reads, after dlpack.h 1.3 (https://github.com/dmlc/dlpack,
// Apache-2.0; torch carries a copy as ATen/dlpack.h). Layout is ABI: fields may be neither moved nor renamed in
// meaning.
#pragma once

#include <cstdint>

#include <nanobind/ndarray.h>

namespace hopper_attention::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr char const* kTypeAttribute = "__dlpack_c_exchange_api__";
inline constexpr char const* kCapsuleName = "dlpack_exchange_api";

using DLTensor = nanobind::dlpack::dltensor;  // the layout of DLTensor

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* prev_api;  // the table of an older major version; null if there is none
};

// A static table of a framework, found on the type of its tensors. Functions return 0, or -1 with a Python exception
// set.
struct ExchangeApi {
  ExchangeApiHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);  // may be null; `out` borrows from the object
  int (*current_work_stream)(DeviceType device_type, std::int32_t device_id, void** out_current_stream);
};

}  // namespace hopper_attention::dlpack
