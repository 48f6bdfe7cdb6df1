// TMA descriptors: strided global tensors as boxes that land swizzled in shared memory.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "hopper_attention/types.h"

namespace hopper_attention {

// Dimensions from the innermost (stride 1) outwards; unused ones have extent 1. Strides and boxes count elements.
struct TensorMapShape {
  static constexpr int kRank = 5;
  int rank = kRank;
  std::array<std::uint64_t, kRank> extent{1, 1, 1, 1, 1};
  std::array<std::uint64_t, kRank> stride{1, 1, 1, 1, 1};
  std::array<std::uint32_t, kRank> box{1, 1, 1, 1, 1};

  // Without branches: nearly all that are compared are equal.
  friend bool operator==(TensorMapShape const& a, TensorMapShape const& b) {
    std::uint64_t differing = static_cast<std::uint64_t>(a.rank ^ b.rank);
    for (int dim = 0; dim < kRank; ++dim) {
      differing |= (a.extent[dim] ^ b.extent[dim]) | (a.stride[dim] ^ b.stride[dim]) | (a.box[dim] ^ b.box[dim]);
    }
    return differing == 0;
  }
};

// All that goes into a map.
struct TensorMapKey {
  void* data = nullptr;
  DataType dtype = DataType::kUnsupported;
  TensorMapShape shape;

  friend bool operator==(TensorMapKey const&, TensorMapKey const&) = default;
};

// The descriptor of a 16-bit tensor at `key.data`; the swizzle follows from box[0] (64 columns: 128 bytes, 32: 64
// bytes). Reads outside the extents give zeros, writes are dropped. Raises CudaError if the driver refuses. A map that
// this thread has made before is not encoded again. The result is valid until the thread's next call.
CUtensorMap const& make_tensor_map(TensorMapKey const& key);

}  // namespace hopper_attention
