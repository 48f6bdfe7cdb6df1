// Finds every error of a caller of append(), before any CUDA call; messages start with the argument's name in
// flash_attn_with_kvcache.
#include <cstdint>
#include <initializer_list>

#include "hopper_attention/append.h"
#include "host/memory_overlap.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

constexpr std::int64_t kColumnStep = 8;  // 16 bytes
constexpr std::int64_t kMaxColumns = 256;
constexpr std::int64_t kVectorBytes = 16;
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 29;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 29;
constexpr std::int64_t kMaxSpan = std::int64_t{1} << 44;  // elements; sums of four such offsets stay within 2^46

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

void require_size(Named t, int dim, char const* dim_name, std::int64_t size, char const* reason) {
  require(t.tensor.shape[dim] == size, t.name, ": dim ", dim, " (", dim_name, ") must be ", size, ", ", reason,
          ", found shape ", ShapeText{t.tensor});
}

void require_device_of_cache(Named t, Tensor const& k_cache) {
  require(t.tensor.device == k_cache.device, t.name, ": must be on the device of k_cache, ", DeviceName{k_cache.device},
          ", but is on ", DeviceName{t.tensor.device}, "; move it there");
}

void require_dtype_of_cache(Named t, Tensor const& k_cache) {
  require<InvalidType>(t.tensor.dtype == k_cache.dtype, t.name, ": dtype must be that of k_cache, ",
                       dtype_name(k_cache.dtype), ", found ", dtype_name(t.tensor.dtype));
}

void require_memory(Named t, std::int64_t alignment) {
  require(t.tensor.data != nullptr, t.name, ": the data pointer of a tensor of shape ", ShapeText{t.tensor},
          " is null");
  require(reinterpret_cast<std::uintptr_t>(t.tensor.data) % alignment == 0, t.name,
          ": the address must be a multiple of ", alignment, " bytes, found ", t.tensor.data,
          " (a view that starts within such a unit?); pass a copy");
}

// Unit last stride; the others free, but not negative, multiples of `step` elements, and of an address range that a
// tensor can have. Strides of dims of size 1 say nothing.
void require_strides(Named t, std::int64_t step) {
  int const last = t.tensor.rank - 1;
  require(t.tensor.shape[last] == 1 || t.tensor.stride[last] == 1, t.name,
          ": stride of the last dim must be 1 element, found ", t.tensor.stride[last], "; pass a contiguous copy");
  for (int dim = 0; dim < last; ++dim) {
    std::int64_t const size = t.tensor.shape[dim];
    std::int64_t const stride = t.tensor.stride[dim];
    if (size <= 1) { continue; }
    require(stride >= 0, t.name, ": stride of dim ", dim, " is ", stride,
            ", negative strides are not supported; pass a contiguous copy");
    require(stride <= kMaxSpan / size, t.name, ": stride ", stride, " of dim ", dim, " over ", size,
            " elements spans more than 2^44 elements");
    require(stride % step == 0, t.name, ": stride of dim ", dim, " must be a multiple of ", step,
            " elements (16 bytes), found ", stride, "; pass a contiguous copy");
  }
}

// Read or written in vectors of 16 bytes.
void require_vectors(Named t) {
  if (is_empty(t.tensor)) { return; }
  require_strides(t, kColumnStep);
  require_memory(t, kVectorBytes);
}

void require_distinct(Named t) {
  require(is_empty(t.tensor) || elements_are_distinct(t.tensor), t.name, ": elements share memory (shape ",
          ShapeText{t.tensor}, "); pass a tensor in which every element has its own address");
}

void require_disjoint(Named written, std::initializer_list<Named> others) {
  for (Named const& other : others) {
    if (!other.tensor.given()) { continue; }
    Overlap const found = overlap(written.tensor, other.tensor);
    require(found != Overlap::kShared, written.name, ": shares memory with ", other.name,
            ", which the kernel uses while it writes; pass separate memory");
    require(found == Overlap::kNone, written.name, ": it cannot be excluded that it shares memory with ", other.name,
            " (their address ranges cross and the strides are too irregular); pass separate memory");
  }
}

void require_head_dim(Named t) {
  std::int64_t const columns = t.tensor.shape[t.tensor.rank - 1];
  require(columns > 0 && columns % kColumnStep == 0, t.name, ": head_dim must be a positive multiple of ", kColumnStep,
          ", found ", columns, "; pad with zeros");
  require<NotImplemented>(columns <= kMaxColumns, t.name, ": head_dim must be at most ", kMaxColumns, ", found ",
                          columns);
}

// (batch, tokens, heads, head_dim), or (tokens, heads, head_dim).
void require_rows(Named t) {
  std::int64_t rows = 1;
  if (is_empty(t.tensor)) { return; }
  for (int dim = 0; dim + 1 < t.tensor.rank; ++dim) {
    require(rows <= kMaxRows / t.tensor.shape[dim], t.name, ": at most 2^29 rows are possible, found shape ",
            ShapeText{t.tensor}, "; split the call");
    rows *= t.tensor.shape[dim];
  }
}

// (size,) int32, if given.
void check_integers(Named t, std::int64_t size, char const* layout, Tensor const& k_cache) {
  if (!t.tensor.given()) { return; }
  require_rank(t, 1, layout);
  require<InvalidType>(t.tensor.dtype == DataType::kInt32, t.name, ": dtype must be int32, found ",
                       dtype_name(t.tensor.dtype));
  require_device_of_cache(t, k_cache);
  require(t.tensor.shape[0] == size, t.name, ": must have ", size, " elements, ", layout,
          " with the batch of k, found ", t.tensor.shape[0]);
  require(size <= 1 || t.tensor.stride[0] == 1, t.name, ": must be contiguous, found stride ", t.tensor.stride[0]);
  if (size > 0) { require_memory(t, sizeof(std::int32_t)); }
}

constexpr char const* kOneEach = "(batch,)";
constexpr char const* kStarts = "(batch + 1,)";

void check_caches(AppendArguments const& args) {
  Named const k{"k_cache", args.k_cache};
  Named const v{"v_cache", args.v_cache};
  bool const paged = args.page_table.given();
  char const* const layout =
      paged ? "(pages, page_size, heads_k, head_dim)" : "(batch_cache, seqlen_cache, heads_k, head_dim)";
  require_rank(k, 4, layout);
  require<InvalidType>(is_half(k.tensor.dtype), "k_cache: dtype must be bf16 or fp16, found ",
                       dtype_name(k.tensor.dtype));
  require(k.tensor.device >= 0, "k_cache: must be on a CUDA device, but is on the CPU; move it to a Hopper GPU");
  require_rank(v, 4, layout);
  require_dtype_of_cache(v, k.tensor);
  require_device_of_cache(v, k.tensor);
  char const* const dims[] = {paged ? "pages" : "batch", paged ? "page_size" : "seqlen", "heads_k"};
  for (int dim = 0; dim < 3; ++dim) { require_size(v, dim, dims[dim], k.tensor.shape[dim], "as in k_cache"); }
  require(k.tensor.shape[2] > 0, "k_cache: heads must be at least 1, found 0");
  for (Named const& t : {k, v}) {
    require_head_dim(t);
    require_vectors(t);
    require_distinct(t);
  }
}

// Returns the batch.
std::int64_t check_new(AppendArguments const& args) {
  bool const packed = args.cu_seqlens_k_new.given();
  int const rank = packed ? 3 : 4;
  char const* const layout =
      packed ? "(tokens, heads_k, head_dim), with cu_seqlens_k_new" : "(batch, seqlen_new, heads_k, head_dim)";
  Named const k{"k", args.k_new};
  Named const v{"v", args.v_new};
  require_rank(k, rank, layout);
  require_rank(v, rank, layout);
  for (int dim = 0; dim < rank - 2; ++dim) {
    require_size(v, dim, dim + 3 == rank ? "tokens" : "batch", k.tensor.shape[dim], "as in k");
  }
  struct Pair {
    Named source;
    Tensor const& cache;
    char const* reason;
  };
  for (Pair const& pair : {Pair{k, args.k_cache, "as in k_cache"}, Pair{v, args.v_cache, "as in v_cache"}}) {
    require_dtype_of_cache(pair.source, args.k_cache);
    require_device_of_cache(pair.source, args.k_cache);
    require_size(pair.source, rank - 2, "heads_k", pair.cache.shape[2], pair.reason);
    require_size(pair.source, rank - 1, "head_dim", pair.cache.shape[3], pair.reason);
    require_rows(pair.source);
    require_vectors(pair.source);
  }
  if (!packed) { return k.tensor.shape[0]; }
  Named const starts{"cu_seqlens_k_new", args.cu_seqlens_k_new};
  require_rank(starts, 1, kStarts);
  require(starts.tensor.shape[0] >= 1, "cu_seqlens_k_new: must have shape (batch + 1,), found (0,)");
  check_integers(starts, starts.tensor.shape[0], kStarts, args.k_cache);
  return starts.tensor.shape[0] - 1;
}

void check_lengths(AppendArguments const& args, std::int64_t batch) {
  bool const same = args.seqused_k_all != -1;
  require(args.seqused_k.given() || same, "cache_seqlens: is needed to append k, none was given");
  require(!args.seqused_k.given() || !same, "cache_seqlens: was given as a tensor and as a number; pass one of them");
  check_integers({"cache_seqlens", args.seqused_k}, batch, kOneEach, args.k_cache);
  check_integers({"cache_batch_idx", args.cache_batch_idx}, batch, kOneEach, args.k_cache);
  check_integers({"rotary_seqlens", args.rotary_seqlens}, batch, kOneEach, args.k_cache);
  if (!args.page_table.given()) {
    require(args.cache_batch_idx.given() || args.k_cache.shape[0] == batch, "k_cache: dim 0 (batch) must be ", batch,
            ", as in k, without cache_batch_idx, found shape ", ShapeText{args.k_cache});
    return;
  }
  require(!args.cache_batch_idx.given(),
          "cache_batch_idx: was given with page_table, which already picks the pages; pass one of them");
  Named const table{"page_table", args.page_table};
  require_rank(table, 2, "(batch, pages of a sequence)");
  require<InvalidType>(table.tensor.dtype == DataType::kInt32, "page_table: dtype must be int32, found ",
                       dtype_name(table.tensor.dtype));
  require_device_of_cache(table, args.k_cache);
  require_size(table, 0, "batch", batch, "as in k");
  if (is_empty(table.tensor)) { return; }
  require_strides(table, 1);
  require_memory(table, sizeof(std::int32_t));
}

void check_tables(AppendArguments const& args) {
  Named const cos{"rotary_cos", args.rotary_cos};
  Named const sin{"rotary_sin", args.rotary_sin};
  require_rank(cos, 2, "(positions, rotary_dim / 2)");
  require_rank(sin, 2, "(positions, rotary_dim / 2)");
  require<InvalidType>(cos.tensor.dtype == args.k_cache.dtype || cos.tensor.dtype == DataType::kFloat32,
                       "rotary_cos: dtype must be fp32 or that of k_cache, ", dtype_name(args.k_cache.dtype),
                       ", found ", dtype_name(cos.tensor.dtype));
  require<InvalidType>(sin.tensor.dtype == cos.tensor.dtype, "rotary_sin: dtype must be that of rotary_cos, ",
                       dtype_name(cos.tensor.dtype), ", found ", dtype_name(sin.tensor.dtype));
  require(cos.tensor.shape[0] > 0, "rotary_cos: has no positions, 1 or more are needed");
  require(2 * cos.tensor.shape[1] <= args.k_cache.shape[3], "rotary_cos: covers ", 2 * cos.tensor.shape[1],
          " columns, but head_dim is ", args.k_cache.shape[3]);
  require_size(sin, 0, "positions", cos.tensor.shape[0], "as in rotary_cos");
  require_size(sin, 1, "rotary_dim / 2", cos.tensor.shape[1], "as in rotary_cos");
  for (Named const& t : {cos, sin}) {
    require_device_of_cache(t, args.k_cache);
    if (is_empty(t.tensor)) { continue; }
    require_strides(t, 1);
    require_memory(t, element_bytes(t.tensor.dtype));
  }
}

void check_queries(AppendArguments const& args, std::int64_t batch) {
  bool const packed = args.cu_seqlens_q.given();
  int const rank = packed ? 3 : 4;
  char const* const layout =
      packed ? "(tokens, heads_q, head_dim), with cu_seqlens_q" : "(batch, seqlen_q, heads_q, head_dim)";
  Named const q{"q", args.q};
  Named const rotated{"q_rotated", args.q_rotated};
  for (Named const& t : {q, rotated}) {
    require_rank(t, rank, layout);
    require_dtype_of_cache(t, args.k_cache);
    require_device_of_cache(t, args.k_cache);
  }
  if (packed) {
    check_integers({"cu_seqlens_q", args.cu_seqlens_q}, batch + 1, kStarts, args.k_cache);
  } else {
    require_size(q, 0, "batch", batch, "as in k");
  }
  require_size(q, rank - 1, "head_dim", args.k_cache.shape[3], "as in k_cache");
  require(q.tensor.shape[rank - 2] % args.k_cache.shape[2] == 0,
          "q: heads must be a multiple of the heads of k_cache: found ", q.tensor.shape[rank - 2], " and ",
          args.k_cache.shape[2]);
  for (int dim = 0; dim < rank; ++dim) {
    require(rotated.tensor.shape[dim] == q.tensor.shape[dim], "q_rotated: must have the shape of q, ",
            ShapeText{q.tensor}, ", found ", ShapeText{rotated.tensor});
  }
  require_rows(q);
  require_vectors(q);
  require_vectors(rotated);
  require_distinct(rotated);
}

void check_overlaps(AppendArguments const& args) {
  Named const k{"k", args.k_new};
  Named const v{"v", args.v_new};
  Named const k_cache{"k_cache", args.k_cache};
  Named const v_cache{"v_cache", args.v_cache};
  Named const q{"q", args.q};
  Named const cos{"rotary_cos", args.rotary_cos};
  Named const sin{"rotary_sin", args.rotary_sin};
  require_disjoint(k_cache, {v_cache, k, v, q, cos, sin});
  require_disjoint(v_cache, {k, v, q, cos, sin});
  if (!args.q_rotated.given()) { return; }
  require_disjoint({"q_rotated", args.q_rotated}, {q, k, v, k_cache, v_cache, cos, sin});
}

}  // namespace

void validate(AppendArguments const& args) {
  check_caches(args);
  std::int64_t const batch = check_new(args);
  check_lengths(args, batch);
  bool const rotary = args.rotary_cos.given();
  require(rotary == args.rotary_sin.given(), rotary ? "rotary_sin" : "rotary_cos",
          ": rotary_cos and rotary_sin must be given together");
  if (rotary) {
    check_tables(args);
    check_queries(args, batch);
  } else {
    require(!args.q.given() && !args.q_rotated.given(), args.q.given() ? "q" : "q_rotated",
            ": was given without rotary_cos; only rotary embedding writes queries");
  }
  check_overlaps(args);
}

}  // namespace hopper_attention
