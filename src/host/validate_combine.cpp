// Finds every error of a caller of combine() and merge_states(), before any CUDA call; messages start with the
// argument's name.
#include <cstdint>
#include <initializer_list>

#include "hopper_attention/combine.h"
#include "host/memory_overlap.h"
#include "host/require.h"
#include "host/tensor_rules.h"

namespace hopper_attention {
namespace {

constexpr int kColumnStep = 8;
constexpr int kMaxColumns = 512;
constexpr std::int64_t kVectorBytes = 16;
constexpr std::int64_t kVectorColumns = 4;  // of a store of combine(), whatever its dtype
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;

constexpr DimNames kParts{"parts", "batch", "queries", "heads", "head_dim"};
constexpr DimNames kRows{"batch", "queries", "heads", "head_dim"};
constexpr DimNames kPackedRows{"tokens", "heads", "head_dim"};
constexpr DimNames kTransposed{"batch", "heads", "queries"};
constexpr DimNames kPackedTransposed{"heads", "tokens"};

bool is_float(DataType type) { return type == DataType::kFloat32 || is_half(type); }

void require_float(Named t) {
  require<InvalidType>(is_float(t.tensor.dtype), t.name, ": dtype must be fp32, bf16 or fp16, found ",
                       dtype_name(t.tensor.dtype));
}

// Device and shape: those of `model`.
void require_like(Named t, DimNames const& names, Named model, std::initializer_list<std::int64_t> shape) {
  require_device_of(t, model);
  int dim = 0;
  for (std::int64_t const size : shape) { require_size(t, names, dim++, size, model.name); }
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

void require_countable_rows(Named t, std::int64_t batch, std::int64_t queries, std::int64_t heads) {
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
  require_dtype(parts, DataType::kFloat32);
  require_cuda(parts);
  require_columns(parts);
  auto const& shape = parts.tensor.shape;
  require_countable_rows(parts, shape[1], shape[2], shape[3]);
  require_vectors(parts, kParts, kVectorBytes);

  require_rank(logs, 4, "(parts, batch, queries, heads)");
  require_dtype(logs, DataType::kFloat32);
  require_like(logs, kParts, parts, {shape[0], shape[1], shape[2], shape[3]});
  require_elements(logs, kParts);

  require_rank(out, 4, "(batch, queries, heads, head_dim)");
  require_float(out);
  require_like(out, kRows, parts, {shape[1], shape[2], shape[3], shape[4]});
  require_vectors(out, kRows, kVectorColumns * element_bytes(out.tensor.dtype));
  require_distinct(out);

  require_rank(lse, 3, "(batch, queries, heads)");
  require_dtype(lse, DataType::kFloat32);
  require_like(lse, kRows, parts, {shape[1], shape[2], shape[3]});
  require_elements(lse, kRows);
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
  DimNames const& names = packed ? kPackedRows : kRows;
  DimNames const& lse_names = packed ? kPackedTransposed : kTransposed;
  int const rank = packed ? 3 : 4;
  require_rank(a, rank, out_layout);
  require_float(a);
  require_cuda(a);
  require_columns(a);
  auto const& shape = a.tensor.shape;
  require_countable_rows(a, packed ? 1 : shape[0], shape[rank - 3], shape[rank - 2]);
  require_vectors(a, names, kVectorBytes);

  for (Named const& t : {b, out}) {
    require_rank(t, rank, out_layout);
    require_dtype_of(t, a);
    if (packed) {
      require_like(t, names, a, {shape[0], shape[1], shape[2]});
    } else {
      require_like(t, names, a, {shape[0], shape[1], shape[2], shape[3]});
    }
    require_vectors(t, names, kVectorBytes);
  }
  for (Named const& t : {lse_a, lse_b, lse}) {
    require_rank(t, rank - 1, lse_layout);
    require_dtype(t, DataType::kFloat32);
    if (packed) {
      require_like(t, lse_names, a, {shape[1], shape[0]});
    } else {
      require_like(t, lse_names, a, {shape[0], shape[2], shape[1]});
    }
    require_elements(t, lse_names);
  }

  require_distinct(out);
  require_distinct(lse);
  require_disjoint(out, {b, lse_a, lse_b});
  if (!is_same_view(out.tensor, a.tensor)) { require_disjoint(out, {a}); }
  require_disjoint(lse, {a, b, lse_b, out});
  if (!is_same_view(lse.tensor, lse_a.tensor)) { require_disjoint(lse, {lse_a}); }
}

}  // namespace hopper_attention
