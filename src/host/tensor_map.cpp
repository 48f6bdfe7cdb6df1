#include "host/tensor_map.h"

#include <cuda_runtime.h>

#include <string>

#include "hopper_attention/errors.h"
#include "host/tensor_map_cache.h"

namespace hopper_attention {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// Taken from the runtime's driver entry point, so that the library does not link libcuda.
EncodeFunction encode_function() {
  static EncodeFunction const function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw CudaError("the driver has no cuTensorMapEncodeTiled: a driver for CUDA 12 or later is needed");
    }
    return reinterpret_cast<EncodeFunction>(entry);
  }();
  return function;
}

CUtensorMap encode(DataType dtype, void* data, TensorMapShape const& shape) {
  constexpr std::uint64_t kElementBytes = 2;
  CUtensorMap map;
  std::array<std::uint64_t, TensorMapShape::kRank> stride_bytes{};
  std::array<std::uint32_t, TensorMapShape::kRank> element_strides{1, 1, 1, 1, 1};
  for (int i = 1; i < shape.rank; ++i) {
    // The stride of a dimension of extent 1 means nothing, but the driver checks it.
    stride_bytes[i - 1] = shape.extent[i] == 1 ? 16 : shape.stride[i] * kElementBytes;
  }
  CUtensorMapDataType const type =
      dtype == DataType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMapSwizzle const swizzle = shape.box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  // Promotion to 256 bytes makes a quarter more requests to L2 (ncu) and costs a decode call 5 % of its bandwidth.
  CUresult const result = encode_function()(
      &map, type, shape.rank, data, shape.extent.data(), stride_bytes.data(), shape.box.data(), element_strides.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::string text =
        "the driver refused a tensor map (error " + std::to_string(result) + "): extents, strides in bytes, box:";
    for (int i = 0; i < shape.rank; ++i) {
      text += " (" + std::to_string(shape.extent[i]) + ", " +
              std::to_string(i == 0 ? kElementBytes : stride_bytes[i - 1]) + ", " + std::to_string(shape.box[i]) + ")";
    }
    throw CudaError(text);
  }
  return map;
}

}  // namespace

CUtensorMap const& make_tensor_map(TensorMapKey const& key) {
  thread_local TensorMapCache cache;
  return cache.get(key, [&] { return encode(key.dtype, key.data, key.shape); });
}

}  // namespace hopper_attention
