// Finds every error of a caller of combine() and merge_states(), before any CUDA call; messages start with the
// argument's name.
#include <cstdint>
#include <initializer_list>

#include "hopper_attention/combine.h"
#include "host/memory_overlap.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

constexpr int kColumnStep = 8;
constexpr int kMaxColumns = 512;
constexpr std::int64_t kVectorBytes = 16;
constexpr std::int64_t kVectorColumns = 4;  // of a store of combine(), whatever its dtype
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;
constexpr std::int64_t kMaxSpan = std::int64_t{1} << 44;  // elements; sums of five such offsets stay within 2^48

struct Named {
  char const* name;
  Tensor const& tensor;
};

// What a message says of a shape: which tensor it has to match, and its dims.
struct Expected {
  std::initializer_list<std::int64_t> shape;
  char const* reason;
};

bool is_float(DataType type) {
  return type == DataType::kFloat32 || type == DataType::kBFloat16 || type == DataType::kFloat16;
}

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
    require(t.tensor.shape[dim] >= 0 && t.tensor.shape[dim] <= kMaxRows, t.name, ": dim ", dim,
            " must be between 0 and ", kMaxRows, ", found ", t.tensor.shape[dim]);
  }
}

void require_cuda(Named t) {
  require(t.tensor.device >= 0, t.name, ": must be on a CUDA device, but is on the CPU; move it to a Hopper GPU");
}

void require_float(Named t) {
  require<InvalidType>(is_float(t.tensor.dtype), t.name, ": dtype must be fp32, bf16 or fp16, found ",
                       dtype_name(t.tensor.dtype));
}

void require_float32(Named t) {
  require<InvalidType>(t.tensor.dtype == DataType::kFloat32, t.name, ": dtype must be fp32, found ",
                       dtype_name(t.tensor.dtype));
}

// Device and shape: those of `model`, named `model_name`.
void require_like(Named t, Named model, Expected const& expected) {
  require(t.tensor.device == model.tensor.device, t.name, ": must be on the device of ", model.name, ", ",
          DeviceName{model.tensor.device}, ", but is on ", DeviceName{t.tensor.device}, "; move it there");
  int dim = 0;
  for (std::int64_t const size : expected.shape) {
    require(t.tensor.shape[dim] == size, t.name, ": dim ", dim, " must be ", size, ", ", expected.reason,
            ", found shape ", ShapeText{t.tensor});
    ++dim;
  }
}

// Free, but not negative, and of an address range that a tensor can have. Strides of dims of size 1 say nothing.
void require_strides(Named t) {
  for (int dim = 0; dim < t.tensor.rank; ++dim) {
    std::int64_t const size = t.tensor.shape[dim];
    std::int64_t const stride = t.tensor.stride[dim];
    if (size <= 1) { continue; }
    require(stride >= 0, t.name, ": stride of dim ", dim, " is ", stride,
            ", negative strides are not supported; pass a contiguous copy");
    require(stride <= kMaxSpan / size, t.name, ": stride ", stride, " of dim ", dim, " over ", size,
            " elements spans more than 2^44 elements");
  }
}

void require_memory(Named t, std::int64_t alignment) {
  require(t.tensor.data != nullptr, t.name, ": the data pointer of a tensor of shape ", ShapeText{t.tensor},
          " is null");
  require(reinterpret_cast<std::uintptr_t>(t.tensor.data) % alignment == 0, t.name,
          ": the address must be a multiple of ", alignment, " bytes, found ", t.tensor.data,
          " (a view that starts within such a unit?); pass a copy");
}

// Rows can be read or written in vectors of so many bytes.
void require_vectors(Named t, std::int64_t vector_bytes) {
  if (is_empty(t.tensor)) { return; }
  int const last = t.tensor.rank - 1;
  require(t.tensor.stride[last] == 1, t.name, ": stride of the last dim must be 1 element, found ",
          t.tensor.stride[last], "; pass a contiguous copy");
  require_strides(t);
  require_memory(t, vector_bytes);
  std::int64_t const columns = vector_bytes / element_bytes(t.tensor.dtype);
  for (int dim = 0; dim < last; ++dim) {
    require(t.tensor.shape[dim] <= 1 || t.tensor.stride[dim] % columns == 0, t.name, ": stride of dim ", dim,
            " must be a multiple of ", columns, " elements (", vector_bytes, " bytes), found ", t.tensor.stride[dim],
            "; pass a contiguous copy");
  }
}

void require_values(Named t) {
  if (is_empty(t.tensor)) { return; }
  require_strides(t);
  require_memory(t, element_bytes(t.tensor.dtype));
}

void require_distinct(Named t) {
  require(elements_are_distinct(t.tensor), t.name, ": elements share memory (shape ", ShapeText{t.tensor},
          "); pass a tensor in which every element has its own address");
}

void require_disjoint(Named written, std::initializer_list<Named> others) {
  for (Named const& other : others) {
    Overlap const found = overlap(written.tensor, other.tensor);
    require(found != Overlap::kShared, written.name, ": shares memory with ", other.name,
            ", which the kernel uses while it writes; pass separate memory");
    require(found == Overlap::kNone, written.name, ": it cannot be excluded that it shares memory with ", other.name,
            " (their address ranges cross and the strides are too irregular); pass separate memory");
  }
}

// The same elements at the same addresses.
bool is_same_view(Tensor const& a, Tensor const& b) {
  if (a.data != b.data) { return false; }
  for (int dim = 0; dim < a.rank; ++dim) {
    if (a.shape[dim] > 1 && a.stride[dim] != b.stride[dim]) { return false; }
  }
  return true;
}

void require_columns(Named t) {
  std::int64_t const columns = t.tensor.shape[t.tensor.rank - 1];
  require(columns > 0 && columns % kColumnStep == 0, t.name, ": the last dim must be a positive multiple of ",
          kColumnStep, ", found ", columns, "; pad with zeros");
  require<NotImplemented>(columns <= kMaxColumns, t.name, ": the last dim must be at most ", kMaxColumns, ", found ",
                          columns);
}

void require_rows(Named t, std::int64_t batch, std::int64_t queries, std::int64_t heads) {
  bool const fits = batch == 0 || queries == 0 || heads <= kMaxRows / batch / queries;
  require(fits, t.name, ": at most 2^30 rows are possible, found ", batch, " * ", queries, " * ", heads,
          "; split the batch");
}

}  // namespace

void validate(CombineArguments const& args) {
  Named const parts{"out_partial", args.out_partial};
  Named const logs{"lse_partial", args.lse_partial};
  Named const out{"out", args.out};
  Named const lse{"lse", args.lse};
  require_rank(parts, 5, "(parts, batch, queries, heads, head_dim)");
  require_float32(parts);
  require_cuda(parts);
  require_columns(parts);
  auto const& shape = parts.tensor.shape;
  require_rows(parts, shape[1], shape[2], shape[3]);
  require_vectors(parts, kVectorBytes);

  require_rank(logs, 4, "(parts, batch, queries, heads)");
  require_float32(logs);
  require_like(logs, parts, {{shape[0], shape[1], shape[2], shape[3]}, "as in out_partial"});
  require_values(logs);

  require_rank(out, 4, "(batch, queries, heads, head_dim)");
  require_float(out);
  require_like(out, parts, {{shape[1], shape[2], shape[3], shape[4]}, "as in out_partial"});
  require_vectors(out, kVectorColumns * element_bytes(out.tensor.dtype));
  require_distinct(out);

  require_rank(lse, 3, "(batch, queries, heads)");
  require_float32(lse);
  require_like(lse, parts, {{shape[1], shape[2], shape[3]}, "as in out_partial"});
  require_values(lse);
  require_distinct(lse);

  require_disjoint(out, {parts, logs});
  require_disjoint(lse, {parts, logs, out});
}

void validate(MergeArguments const& args) {
  Named const a{"out_a", args.out_a};
  Named const b{"out_b", args.out_b};
  Named const lse_a{"lse_a", args.lse_a};
  Named const lse_b{"lse_b", args.lse_b};
  Named const out{"out", args.out};
  Named const lse{"lse", args.lse};
  bool const packed = args.out_a.rank == 3;
  char const* const out_layout = packed ? "(tokens, heads, head_dim)" : "(batch, queries, heads, head_dim)";
  char const* const lse_layout = packed ? "(heads, tokens)" : "(batch, heads, queries)";
  int const rank = packed ? 3 : 4;
  require_rank(a, rank, out_layout);
  require_float(a);
  require_cuda(a);
  require_columns(a);
  auto const& shape = a.tensor.shape;
  require_rows(a, packed ? 1 : shape[0], shape[rank - 3], shape[rank - 2]);
  require_vectors(a, kVectorBytes);

  for (Named const& t : {b, out}) {
    require_rank(t, rank, out_layout);
    require<InvalidType>(t.tensor.dtype == a.tensor.dtype, t.name, ": dtype must be that of out_a, ",
                         dtype_name(a.tensor.dtype), ", found ", dtype_name(t.tensor.dtype));
    if (packed) {
      require_like(t, a, {{shape[0], shape[1], shape[2]}, "as in out_a"});
    } else {
      require_like(t, a, {{shape[0], shape[1], shape[2], shape[3]}, "as in out_a"});
    }
    require_vectors(t, kVectorBytes);
  }
  for (Named const& t : {lse_a, lse_b, lse}) {
    require_rank(t, rank - 1, lse_layout);
    require_float32(t);
    if (packed) {
      require_like(t, a, {{shape[1], shape[0]}, "as in out_a"});
    } else {
      require_like(t, a, {{shape[0], shape[2], shape[1]}, "as in out_a"});
    }
    require_values(t);
  }

  require_distinct(out);
  require_distinct(lse);
  require_disjoint(out, {b, lse_a, lse_b});
  if (!is_same_view(out.tensor, a.tensor)) { require_disjoint(out, {a}); }
  require_disjoint(lse, {a, b, lse_b, out});
  if (!is_same_view(lse.tensor, lse_a.tensor)) { require_disjoint(lse, {lse_a}); }
}

}  // namespace hopper_attention
