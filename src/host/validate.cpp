// Arguments -> Problem. Finds every error of a caller before any CUDA call; messages start with the argument's name.
#include <array>
#include <cmath>
#include <cstdint>

#include "hopper_attention/forward.h"
#include "host/memory_overlap.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kHeadDimStep = 8;  // 16 bytes, the unit of TMA
constexpr std::int64_t kTmaAlignment = 16;
constexpr std::int64_t kMaxSpanBytes = std::int64_t{1} << 40;  // what a stride of a tensor map can hold
// Sums of two positions and a window stay within 32 bits in visible().
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 29;
constexpr std::int64_t kMaxTiles = std::int64_t{1} << 30;
constexpr std::int64_t kSmallestTileRows = 64;
constexpr std::int64_t kMaxSplits = 256;

using DimNames = std::array<char const*, 4>;
constexpr DimNames kQueryDims{"batch", "seqlen_q", "heads_q", "head_dim"};
constexpr DimNames kKeyDims{"batch", "seqlen_k", "heads_k", "head_dim"};
constexpr DimNames kLseDims{"batch", "heads_q", "seqlen_q", ""};

struct Named {
  char const* name;
  Tensor const& tensor;
};

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

void require_device_of_q(Named t, Tensor const& q) {
  require(t.tensor.device == q.device, t.name, ": must be on the device of q, ", DeviceName{q.device}, ", but is on ",
          DeviceName{t.tensor.device}, "; move it there");
}

void require_size(Named t, DimNames const& names, int dim, std::int64_t size, char const* reason) {
  require(t.tensor.shape[dim] == size, t.name, ": dim ", dim, " (", names[dim], ") must be ", size, ", ", reason,
          ", found shape ", ShapeText{t.tensor});
}

// None negative or 0, and an address range that a tensor can have. Strides of dims of size 1 say nothing.
void require_strides(Named t, DimNames const& names) {
  Tensor const& tensor = t.tensor;
  std::int64_t const bytes = element_bytes(tensor.dtype);
  for (int dim = 0; dim < tensor.rank; ++dim) {
    std::int64_t const size = tensor.shape[dim];
    std::int64_t const stride = tensor.stride[dim];
    if (size <= 1) { continue; }
    require(stride >= 0, t.name, ": stride of dim ", dim, " (", names[dim], ") is ", stride,
            ", negative strides are not supported; pass a contiguous copy");
    require(stride != 0, t.name, ": stride of dim ", dim, " (", names[dim], ") is 0 over ", size,
            " elements: an expanded dim is not supported; pass a contiguous copy");
    require(stride <= kMaxSpanBytes / bytes / size, t.name, ": stride ", stride, " of dim ", dim, " (", names[dim],
            ") over ", size, " elements spans more than 2^40 bytes, which TMA cannot address");
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

// q, k and v are read by TMA: base and strides in units of 16 bytes.
void require_readable_by_tma(Named t, DimNames const& names) {
  Tensor const& tensor = t.tensor;
  if (is_empty(tensor)) { return; }
  require_unit_last_stride(t);
  require_strides(t, names);
  require_memory(t, kTmaAlignment);
  std::int64_t const bytes = element_bytes(tensor.dtype);
  for (int dim = 0; dim + 1 < tensor.rank; ++dim) {
    require(tensor.shape[dim] <= 1 || tensor.stride[dim] * bytes % kTmaAlignment == 0, t.name, ": stride of dim ", dim,
            " (", names[dim], ") must be a multiple of ", kTmaAlignment / bytes, " elements (16 bytes), found ",
            tensor.stride[dim], "; pass a contiguous copy");
  }
}

void require_writable(Named t, DimNames const& names) {
  if (is_empty(t.tensor)) { return; }
  require_unit_last_stride(t);
  require_strides(t, names);
  require_memory(t, element_bytes(t.tensor.dtype));
  require(elements_are_distinct(t.tensor), t.name, ": elements share memory (shape ", ShapeText{t.tensor},
          "); pass a tensor in which every element has its own address");
}

void require_contiguous(Named t) {
  if (is_empty(t.tensor)) { return; }
  std::int64_t expected = 1;
  for (int dim = t.tensor.rank - 1; dim >= 0; --dim) {
    require(t.tensor.shape[dim] == 1 || t.tensor.stride[dim] == expected, t.name,
            ": must be contiguous, but the stride of dim ", dim, " is ", t.tensor.stride[dim], " instead of ",
            expected);
    expected *= t.tensor.shape[dim];
  }
  require_memory(t, element_bytes(t.tensor.dtype));
}

void require_disjoint(Named written, Named other) {
  Overlap const found = overlap(written.tensor, other.tensor);
  require(found != Overlap::kShared, written.name, ": shares memory with ", other.name,
          ", which the kernel uses while it writes; pass separate memory");
  require(found == Overlap::kNone, written.name, ": it cannot be excluded that it shares memory with ", other.name,
          " (their address ranges cross and the strides are too irregular); pass separate memory");
}

void check_inputs(Arguments const& args) {
  require_rank({"q", args.q}, 4, "(batch, seqlen_q, heads_q, head_dim)");
  require_rank({"k", args.k}, 4, "(batch, seqlen_k, heads_k, head_dim)");
  require_rank({"v", args.v}, 4, "(batch, seqlen_k, heads_k, head_dim_v)");
  require<InvalidType>(is_half(args.q.dtype), "q: dtype must be bf16 or fp16, found ", dtype_name(args.q.dtype));
  require(args.q.device >= 0, "q: must be on a CUDA device, but is on the CPU; move it to a Hopper GPU");
  for (Named const t : {Named{"k", args.k}, Named{"v", args.v}}) {
    require<InvalidType>(t.tensor.dtype == args.q.dtype, t.name, ": dtype must be that of q, ",
                         dtype_name(args.q.dtype), ", found ", dtype_name(t.tensor.dtype));
    require_device_of_q(t, args.q);
    require_size(t, kKeyDims, 0, args.q.shape[0], "as in q");
  }
  require_size({"k", args.k}, kKeyDims, 3, args.q.shape[3], "as in q");
  require_size({"v", args.v}, kKeyDims, 1, args.k.shape[1], "as in k");
  require_size({"v", args.v}, kKeyDims, 2, args.k.shape[2], "as in k");
}

void check_outputs(Arguments const& args) {
  Tensor const& q = args.q;
  Named const out{"out", args.out};
  require_rank(out, 4, "(batch, seqlen_q, heads_q, head_dim_v)");
  require<InvalidType>(out.tensor.dtype == q.dtype, "out: dtype must be that of q, ", dtype_name(q.dtype), ", found ",
                       dtype_name(out.tensor.dtype));
  require_device_of_q(out, q);
  for (int dim = 0; dim < 3; ++dim) { require_size(out, kQueryDims, dim, q.shape[dim], "as in q"); }
  require_size(out, kQueryDims, 3, args.v.shape[3], "as in v");
  require_writable(out, kQueryDims);

  if (!args.softmax_lse.given()) { return; }
  Named const lse{"softmax_lse", args.softmax_lse};
  require_rank(lse, 3, "(batch, heads_q, seqlen_q)");
  require<InvalidType>(lse.tensor.dtype == DataType::kFloat32, "softmax_lse: dtype must be fp32, found ",
                       dtype_name(lse.tensor.dtype));
  require_device_of_q(lse, q);
  require_size(lse, kLseDims, 0, q.shape[0], "as in q");
  require_size(lse, kLseDims, 1, q.shape[2], "as in q");
  require_size(lse, kLseDims, 2, q.shape[1], "as in q");
  require_contiguous(lse);
}

void check_sinks(Arguments const& args) {
  if (!args.sinks.given()) { return; }
  Named const sinks{"sinks (s_aux)", args.sinks};
  require_rank(sinks, 1, "(heads_q,)");
  require<InvalidType>(is_half(sinks.tensor.dtype) || sinks.tensor.dtype == DataType::kFloat32, sinks.name,
                       ": dtype must be bf16, fp16 or fp32, found ", dtype_name(sinks.tensor.dtype));
  require_device_of_q(sinks, args.q);
  require(sinks.tensor.shape[0] == args.q.shape[2], sinks.name, ": must have one value for each head of q, ",
          args.q.shape[2], ", found ", sinks.tensor.shape[0]);
  require_contiguous(sinks);
}

void check_overlaps(Arguments const& args) {
  std::array const inputs{Named{"q", args.q}, Named{"k", args.k}, Named{"v", args.v},
                          Named{"sinks (s_aux)", args.sinks}};
  Named const out{"out", args.out};
  Named const lse{"softmax_lse", args.softmax_lse};
  for (Named const input : inputs) {
    if (!input.tensor.given()) { continue; }
    require_disjoint(out, input);
    if (lse.tensor.given()) { require_disjoint(lse, input); }
  }
  if (lse.tensor.given()) { require_disjoint(out, lse); }
}

void check_shape(ProblemShape const& shape) {
  require<InvalidType>(is_half(shape.dtype), "dtype: must be bf16 or fp16, found ", dtype_name(shape.dtype));
  struct Extent {
    char const* name;
    std::int64_t value;
  };
  for (Extent const extent : {Extent{"batch", shape.batch},
                              {"seqlen_q", shape.seqlen_q},
                              {"seqlen_k", shape.seqlen_k},
                              {"heads of q", shape.heads_q},
                              {"heads of k", shape.heads_k}}) {
    require(extent.value >= 0 && extent.value <= kMaxExtent, extent.name, ": must be between 0 and ", kMaxExtent,
            ", found ", extent.value);
  }
  require(shape.heads_k > 0, "k: heads must be at least 1, found 0");
  require(shape.heads_q % shape.heads_k == 0, "q: heads must be a multiple of the heads of k and v: found ",
          shape.heads_q, " and ", shape.heads_k);
  for (Extent const dim : {Extent{"q: head_dim", shape.head_dim}, {"v: head_dim", shape.head_dim_v}}) {
    require(dim.value > 0 && dim.value % kHeadDimStep == 0, dim.name, " must be a positive multiple of ", kHeadDimStep,
            ", found ", dim.value, "; pad with zeros");
    require<NotImplemented>(dim.value <= kMaxHeadDim, dim.name, " must be at most ", kMaxHeadDim, ", found ",
                            dim.value);
  }
  std::int64_t const row_tiles = (shape.seqlen_q + kSmallestTileRows - 1) / kSmallestTileRows;
  std::int64_t const heads = shape.batch * shape.heads_q;  // both at most 2^29
  require(row_tiles == 0 || heads <= kMaxTiles / row_tiles,
          "q: batch * heads * seqlen_q / 64 must be at most 2^30, found ", heads, " * ", row_tiles,
          "; split the batch");
}

float checked_scale(Arguments const& args, std::int64_t head_dim) {
  if (!args.softmax_scale) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim))); }
  auto const scale = static_cast<float>(*args.softmax_scale);
  require(std::isfinite(scale), "softmax_scale: must be a finite float32, found ", *args.softmax_scale);
  // The kernel takes the row maximum of the scores before it scales them.
  require(scale >= 0.0F, "softmax_scale: must not be negative, found ", *args.softmax_scale, "; negate q instead");
  return scale;
}

float checked_softcap(Arguments const& args, float scale) {
  auto const softcap = static_cast<float>(args.softcap);
  require(std::isfinite(softcap) && args.softcap >= 0.0, "softcap: must be finite and not negative (0 is off), found ",
          args.softcap);
  if (args.softcap == 0.0) { return 0.0F; }
  require(std::isnormal(softcap) && std::isfinite(scale / softcap), "softcap: ", args.softcap,
          " is too small beside softmax_scale ", scale, "; 0 is off");
  return softcap;
}

void check_options(Arguments const& args) {
  require(args.window_left >= -1, "window_size: left must be -1 (unlimited) or at least 0, found ", args.window_left);
  require(args.window_right >= -1, "window_size: right must be -1 (unlimited) or at least 0, found ",
          args.window_right);
  require(args.attention_chunk >= 0, "attention_chunk: must be at least 0 (0 is off), found ", args.attention_chunk);
  require(args.num_splits >= 0 && args.num_splits <= kMaxSplits, "num_splits: must be 0 (chosen by the plan) to ",
          kMaxSplits, ", found ", args.num_splits);
  require(args.sm_margin >= 0 && args.sm_margin <= kMaxExtent, "sm_margin: must be at least 0, found ", args.sm_margin);
}

// Masks that mean the same become the same value, and every number in it is bounded by a sequence length.
MaskParams canonical_mask(Arguments const& args, std::int64_t seqlen_q, std::int64_t seqlen_k) {
  MaskParams mask;
  std::int64_t const right = args.causal ? 0 : args.window_right;
  if (args.window_left >= 0 && args.window_left < seqlen_k - 1) { mask.left = static_cast<int>(args.window_left); }
  if (right >= 0 && right < seqlen_q - 1) { mask.right = static_cast<int>(right); }
  // The diagonals of all queries lie in [seqlen_k - seqlen_q, seqlen_k). If one chunk holds them and all keys, it cuts
  // nothing. A query before the first key lies in the chunk before and sees nothing; with causal it never does.
  bool const all_in_first_chunk = args.attention_chunk >= seqlen_k && (seqlen_q <= seqlen_k || right == 0);
  if (args.attention_chunk > 0 && !all_in_first_chunk) {
    std::int64_t const longest = seqlen_q > seqlen_k ? seqlen_q : seqlen_k;
    mask.chunk = static_cast<int>(args.attention_chunk < longest ? args.attention_chunk : longest);
  }
  return mask;
}

}  // namespace

Problem make_problem(ProblemShape const& shape, Arguments const& options) {
  check_shape(shape);
  check_options(options);
  float const scale = checked_scale(options, shape.head_dim);
  return {
      .dtype = shape.dtype,
      .batch = static_cast<int>(shape.batch),
      .seqlen_q = static_cast<int>(shape.seqlen_q),
      .seqlen_k = static_cast<int>(shape.seqlen_k),
      .heads_q = static_cast<int>(shape.heads_q),
      .heads_k = static_cast<int>(shape.heads_k),
      .head_dim = static_cast<int>(shape.head_dim),
      .head_dim_v = static_cast<int>(shape.head_dim_v),
      .mask = canonical_mask(options, shape.seqlen_q, shape.seqlen_k),
      .softmax_scale = scale,
      .softcap = checked_softcap(options, scale),
      .has_sinks = shape.has_sinks,
      .num_splits = static_cast<int>(options.num_splits),
      .sm_margin = static_cast<int>(options.sm_margin),
      .batch_invariant = options.batch_invariant,
  };
}

Problem validate(Arguments const& args) {
  check_inputs(args);
  Problem const problem = make_problem({.dtype = args.q.dtype,
                                        .batch = args.q.shape[0],
                                        .seqlen_q = args.q.shape[1],
                                        .seqlen_k = args.k.shape[1],
                                        .heads_q = args.q.shape[2],
                                        .heads_k = args.k.shape[2],
                                        .head_dim = args.q.shape[3],
                                        .head_dim_v = args.v.shape[3],
                                        .has_sinks = args.sinks.given()},
                                       args);
  require_readable_by_tma({"q", args.q}, kQueryDims);
  require_readable_by_tma({"k", args.k}, kKeyDims);
  require_readable_by_tma({"v", args.v}, kKeyDims);
  check_outputs(args);
  check_sinks(args);
  check_overlaps(args);
  return problem;
}

}  // namespace hopper_attention
