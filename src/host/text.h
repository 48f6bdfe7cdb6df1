// Text for messages and plans.
#pragma once

#include <sstream>
#include <string>

#include "hopper_attention/types.h"

namespace hopper_attention {

template <class... Parts>
std::string concat(Parts const&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

constexpr char const* dtype_name(DataType type) {
  switch (type) {
    case DataType::kBFloat16:
      return "bf16";
    case DataType::kFloat16:
      return "fp16";
    case DataType::kFloat32:
      return "fp32";
    case DataType::kInt32:
      return "int32";
    case DataType::kUInt8:
      return "uint8";
    case DataType::kUnsupported:
      break;
  }
  return "another dtype";
}

constexpr char const* family_name(KernelFamily family) {
  switch (family) {
    case KernelFamily::kPrefill:
      return "prefill";
    case KernelFamily::kDecode:
      return "decode";
    case KernelFamily::kNone:
      break;
  }
  return "none";
}

// "cuda:1" or "the CPU".
struct DeviceName {
  int ordinal;

  friend std::ostream& operator<<(std::ostream& out, DeviceName device) {
    if (device.ordinal < 0) { return out << "the CPU"; }
    return out << "cuda:" << device.ordinal;
  }
};

// "(2, 512, 16, 128)". Holds a reference: for the message in which it is written.
struct ShapeText {
  Tensor const& tensor;

  friend std::ostream& operator<<(std::ostream& out, ShapeText shape) {
    out << '(';
    for (int dim = 0; dim < shape.tensor.rank && dim < kMaxRank; ++dim) {
      out << (dim == 0 ? "" : ", ") << shape.tensor.shape[dim];
    }
    return out << (shape.tensor.rank == 1 ? ",)" : ")");
  }
};

inline std::ostream& operator<<(std::ostream& out, TileConfig const& tile) {
  return out << tile.rows << " rows x " << tile.keys << " keys for head dims up to (" << tile.head_dim << ", "
             << tile.head_dim_v << "), " << tile.stages << " stages";
}

}  // namespace hopper_attention
