// Do strided views share memory? The result is written while the inputs are read: it must be known before the launch.
#pragma once

#include <cstdint>

#include "hopper_attention/types.h"

namespace hopper_attention {

constexpr int element_bytes(DataType type) {
  switch (type) {
    case DataType::kBFloat16:
    case DataType::kFloat16:
      return 2;
    case DataType::kFloat32:
    case DataType::kInt32:
      return 4;
    case DataType::kUInt8:
      return 1;
    case DataType::kUnsupported:
      break;
  }
  return 0;
}

// The bytes from the first element of a view to the end of its last; empty for a view without elements.
struct AddressRange {
  std::intptr_t begin = 0;
  std::intptr_t end = 0;

  bool crosses(AddressRange const& other) const { return begin < other.end && other.begin < end; }
};

// The size of that range.
inline std::int64_t spanned_bytes(Tensor const& tensor) {
  std::int64_t last = 0;  // element
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.shape[dim] <= 0) { return 0; }
    last += (tensor.shape[dim] - 1) * tensor.stride[dim];
  }
  return (last + 1) * element_bytes(tensor.dtype);
}

// `bytes`: what it spans.
inline AddressRange address_range(Tensor const& tensor, std::int64_t bytes) {
  if (bytes == 0) { return {}; }
  auto const begin = reinterpret_cast<std::intptr_t>(tensor.data);
  return {begin, begin + bytes};
}
inline AddressRange address_range(Tensor const& tensor) { return address_range(tensor, spanned_bytes(tensor)); }

enum class Overlap : std::uint8_t {
  kNone,
  kShared,   // some byte belongs to both
  kUnknown,  // the strides are too odd to decide within the bound on the work
};

// Views may interleave in one allocation (slices of a packed tensor); only bytes of elements count, not the range they
// span. Strides must be non-negative and every view at most 2^48 elements from its first to its last element.
//
// Exact: a byte is shared if and only if the difference of the two addresses is a sum of stride * x over integer
// ranges of x, which is searched from the largest stride to the smallest. Strides of ordinary views leave at most a
// few values of x at each level. Source of the formulation: numpy's solve_may_share_memory.
Overlap overlap(Tensor const& a, Tensor const& b);

// Whether the elements of one view provably have an address each: every stride is larger than all that the smaller
// strides span. Every slice, transpose or reshape of a contiguous tensor passes.
bool elements_are_distinct(Tensor const& tensor);

}  // namespace hopper_attention
