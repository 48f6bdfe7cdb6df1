// Text for messages and plans.
#pragma once

#include <concepts>
#include <sstream>
#include <string>
#include <string_view>

#include "hopper_attention/types.h"

namespace hopper_attention {

// Words and numbers without a stream, which costs 300 ns: a plan writes twenty texts, and an engine whose bound on the
// lengths grows makes a plan at every step.
template <class Part>
void append_text(std::string& text, Part const& part) {
  if constexpr (std::convertible_to<Part const&, std::string_view>) {
    text += std::string_view(part);
  } else if constexpr (std::same_as<Part, int> || std::same_as<Part, std::int64_t>) {
    text += std::to_string(part);
  } else {
    std::ostringstream stream;
    stream << part;
    text += stream.str();
  }
}

template <class... Parts>
std::string concat(Parts const&... parts) {
  std::string text;
  (append_text(text, parts), ...);
  return text;
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
