#include "host/tensor_rules.h"

#include <algorithm>
#include <array>

#include "host/memory_overlap.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

constexpr std::int64_t kMaxSpanBytes = std::int64_t{1} << 40;  // what a stride of a tensor map can hold

// None negative, and an address range that a tensor can have. Strides of dims of size 1 say nothing.
void require_strides(Named t, DimNames const& names, Expanded expanded) {
  Tensor const& tensor = t.tensor;
  std::int64_t const bytes = element_bytes(tensor.dtype);
  for (int dim = 0; dim < tensor.rank; ++dim) {
    std::int64_t const size = tensor.shape[dim];
    std::int64_t const stride = tensor.stride[dim];
    if (size <= 1) { continue; }
    require(stride >= 0, t.name, ": stride of dim ", dim, " (", names[dim], ") is ", stride,
            ", negative strides are not supported; pass a contiguous copy");
    require(stride != 0 || expanded == Expanded::kAllowed, t.name, ": stride of dim ", dim, " (", names[dim],
            ") is 0 over ", size, " elements: an expanded dim is not supported; pass a contiguous copy");
    require(stride <= kMaxSpanBytes / bytes / size, t.name, ": stride ", stride, " of dim ", dim, " (", names[dim],
            ") over ", size, " elements spans more than 2^40 bytes, the most that can be addressed");
  }
}

void require_unit_last_stride(Named t) {
  int const last = t.tensor.rank - 1;
  require(t.tensor.shape[last] == 1 || t.tensor.stride[last] == 1, t.name,
          ": stride of the last dim must be 1 element, found ", t.tensor.stride[last], "; pass a contiguous copy");
}

void require_memory(Named t, std::int64_t alignment) {
  require(t.tensor.data != nullptr, t.name, ": the data pointer of a tensor of shape ", ShapeText{t.tensor},
          " is null");
  require(reinterpret_cast<std::uintptr_t>(t.tensor.data) % alignment == 0, t.name,
          ": the address must be a multiple of ", alignment, " bytes, found ", t.tensor.data,
          " (a view that starts within such a unit?); pass a copy");
}

}  // namespace

bool is_half(DataType type) { return type == DataType::kBFloat16 || type == DataType::kFloat16; }

bool is_empty(Tensor const& tensor) {
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.shape[dim] == 0) { return true; }
  }
  return false;
}

void require_rank(Named t, int rank, char const* layout) {
  require(t.tensor.given(), t.name, ": a tensor of shape ", layout, " is required, none was given");
  require(t.tensor.rank == rank, t.name, ": must have shape ", layout, ", found ", t.tensor.rank,
          " dims: ", ShapeText{t.tensor});
  for (int dim = 0; dim < rank; ++dim) {
    require(t.tensor.shape[dim] >= 0 && t.tensor.shape[dim] <= kMaxExtent, t.name, ": dim ", dim,
            " must be between 0 and ", kMaxExtent, ", found ", t.tensor.shape[dim]);
  }
}

void require_dtype(Named t, DataType dtype) {
  require<InvalidType>(t.tensor.dtype == dtype, t.name, ": dtype must be ", dtype_name(dtype), ", found ",
                       dtype_name(t.tensor.dtype));
}

void require_dtype_of(Named t, Named other) {
  require<InvalidType>(t.tensor.dtype == other.tensor.dtype, t.name, ": dtype must be that of ", other.name, ", ",
                       dtype_name(other.tensor.dtype), ", found ", dtype_name(t.tensor.dtype));
}

void require_cuda(Named t) {
  require(t.tensor.device >= 0, t.name, ": must be on a CUDA device, but is on the CPU; move it to a Hopper GPU");
}

void require_device_of(Named t, Named other) {
  require(t.tensor.device == other.tensor.device, t.name, ": must be on the device of ", other.name, ", ",
          DeviceName{other.tensor.device}, ", but is on ", DeviceName{t.tensor.device}, "; move it there");
}

void require_size(Named t, DimNames const& names, int dim, std::int64_t size, char const* source) {
  require(t.tensor.shape[dim] == size, t.name, ": dim ", dim, " (", names[dim], ") must be ", size, ", as in ", source,
          ", found shape ", ShapeText{t.tensor});
}

void require_vectors(Named t, DimNames const& names, std::int64_t bytes, Expanded expanded) {
  Tensor const& tensor = t.tensor;
  if (is_empty(tensor)) { return; }
  require_unit_last_stride(t);
  require_strides(t, names, expanded);
  require_memory(t, bytes);
  std::int64_t const step = bytes / element_bytes(tensor.dtype);
  for (int dim = 0; dim + 1 < tensor.rank; ++dim) {
    require(tensor.shape[dim] <= 1 || tensor.stride[dim] % step == 0, t.name, ": stride of dim ", dim, " (", names[dim],
            ") must be a multiple of ", step, " elements (", bytes, " bytes), found ", tensor.stride[dim],
            "; pass a contiguous copy");
  }
}

void require_readable_by_tma(Named t, DimNames const& names) {
  require_vectors(t, names, kTmaAlignment, Expanded::kRefused);
}

void require_writable(Named t, DimNames const& names) {
  if (is_empty(t.tensor)) { return; }
  require_unit_last_stride(t);
  require_strides(t, names, Expanded::kRefused);
  require_memory(t, element_bytes(t.tensor.dtype));
  require_distinct(t);
}

void require_contiguous(Named t, std::int64_t alignment) {
  if (is_empty(t.tensor)) { return; }
  std::int64_t expected = 1;
  for (int dim = t.tensor.rank - 1; dim >= 0; --dim) {
    require(t.tensor.shape[dim] == 1 || t.tensor.stride[dim] == expected, t.name,
            ": must be contiguous, but the stride of dim ", dim, " is ", t.tensor.stride[dim], " instead of ",
            expected);
    expected *= t.tensor.shape[dim];
  }
  require_memory(t, alignment == 0 ? element_bytes(t.tensor.dtype) : alignment);
}

void require_rows(Named t, DimNames const& names) {
  if (is_empty(t.tensor)) { return; }
  require_unit_last_stride(t);
  require_strides(t, names, Expanded::kAllowed);
  require_memory(t, element_bytes(t.tensor.dtype));
}

void require_elements(Named t, DimNames const& names) {
  if (is_empty(t.tensor)) { return; }
  require_strides(t, names, Expanded::kAllowed);
  require_memory(t, element_bytes(t.tensor.dtype));
}

void require_distinct(Named t) {
  require(elements_are_distinct(t.tensor), t.name, ": elements share memory (shape ", ShapeText{t.tensor},
          "); pass a tensor in which every element has its own address");
}

void require_disjoint(Named written, Named other) {
  Overlap const found = overlap(written.tensor, other.tensor);
  require(found != Overlap::kShared, written.name, ": shares memory with ", other.name,
          ", which the kernel uses while it writes; pass separate memory");
  require(found == Overlap::kNone, written.name, ": it cannot be excluded that it shares memory with ", other.name,
          " (their address ranges cross and the strides are too irregular); pass separate memory");
}

void require_disjoint(Named written, std::initializer_list<Named> others) {
  for (Named const& other : others) {
    if (other.tensor.given()) { require_disjoint(written, other); }
  }
}

}  // namespace hopper_attention
