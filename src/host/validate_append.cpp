// Finds every error of a caller of append(), before any CUDA call; messages start with the argument's name in
// flash_attn_with_kvcache.
#include <array>
#include <cstdint>

#include "hopper_attention/append.h"
#include "host/memory_overlap.h"
#include "host/require.h"
#include "host/same_call.h"
#include "host/tensor_rules.h"
#include "host/validate_lengths.h"

namespace hopper_attention {
namespace {

constexpr std::int64_t kColumnStep = 8;  // 16 bytes
constexpr std::int64_t kMaxColumns = 256;
constexpr std::int64_t kVectorBytes = 16;
static_assert(kVectorBytes <= kMostAlignment);
constexpr std::int64_t kMaxRows = std::int64_t{1} << 29;

constexpr DimNames kTokens{"batch", "tokens", "heads", "head_dim"};
constexpr DimNames kPackedTokens{"tokens", "heads", "head_dim"};
constexpr DimNames kSlots{"batch", "seqlen", "heads_k", "head_dim"};
constexpr DimNames kPages{"pages", "page_size", "heads_k", "head_dim"};
constexpr DimNames kPageTable{"batch", "pages of a sequence"};
constexpr DimNames kAngles{"positions", "rotary_dim / 2"};
constexpr char const* kQueryLayout = "(batch, seqlen_q, heads_q, head_dim)";
constexpr char const* kPackedQueryLayout = "(tokens, heads_q, head_dim), with cu_seqlens_q";

void require_head_dim(Named t) {
  std::int64_t const columns = t.tensor.shape[t.tensor.rank - 1];
  require(columns > 0 && columns % kColumnStep == 0, t.name, ": head_dim must be a positive multiple of ", kColumnStep,
          ", found ", columns, "; pad with zeros");
  require<NotImplemented>(columns <= kMaxColumns, t.name, ": head_dim must be at most ", kMaxColumns, ", found ",
                          columns);
}

// (batch, tokens, heads, head_dim), or (tokens, heads, head_dim).
void require_countable_rows(Named t) {
  std::int64_t rows = 1;
  if (is_empty(t.tensor)) { return; }
  for (int dim = 0; dim + 1 < t.tensor.rank; ++dim) {
    require(rows <= kMaxRows / t.tensor.shape[dim], t.name, ": at most 2^29 rows are possible, found shape ",
            ShapeText{t.tensor}, "; split the call");
    rows *= t.tensor.shape[dim];
  }
}

void check_caches(AppendArguments const& args) {
  Named const k{"k_cache", args.k_cache};
  Named const v{"v_cache", args.v_cache};
  bool const paged = args.page_table.given();
  DimNames const& names = paged ? kPages : kSlots;
  char const* const layout =
      paged ? "(pages, page_size, heads_k, head_dim)" : "(batch_cache, seqlen_cache, heads_k, head_dim)";
  require_rank(k, 4, layout);
  require<InvalidType>(is_half(k.tensor.dtype), "k_cache: dtype must be bf16 or fp16, found ",
                       dtype_name(k.tensor.dtype));
  require_cuda(k);
  require_rank(v, 4, layout);
  require_dtype_of(v, k);
  require_device_of(v, k);
  for (int dim = 0; dim < 3; ++dim) { require_size(v, names, dim, k.tensor.shape[dim], "k_cache"); }
  require(k.tensor.shape[2] > 0, "k_cache: heads must be at least 1, found 0");
  for (Named const& t : {k, v}) {
    require_head_dim(t);
    require_vectors(t, names, kVectorBytes);
    require_distinct(t);
  }
}

// Returns the batch.
std::int64_t check_new(AppendArguments const& args) {
  bool const packed = args.cu_seqlens_k_new.given();
  int const rank = packed ? 3 : 4;
  DimNames const& names = packed ? kPackedTokens : kTokens;
  char const* const layout =
      packed ? "(tokens, heads_k, head_dim), with cu_seqlens_k_new" : "(batch, seqlen_new, heads_k, head_dim)";
  Named const k{"k", args.k_new};
  Named const v{"v", args.v_new};
  Named const cache{"k_cache", args.k_cache};
  require_rank(k, rank, layout);
  require_rank(v, rank, layout);
  for (int dim = 0; dim < rank - 2; ++dim) { require_size(v, names, dim, k.tensor.shape[dim], "k"); }
  struct Pair {
    Named source;
    Named cache;
  };
  for (Pair const& pair : {Pair{k, cache}, Pair{v, {"v_cache", args.v_cache}}}) {
    require_dtype_of(pair.source, cache);
    require_device_of(pair.source, cache);
    for (int dim = 2; dim < 4; ++dim) {
      require_size(pair.source, names, rank - 4 + dim, pair.cache.tensor.shape[dim], pair.cache.name);
    }
    require_countable_rows(pair.source);
    require_vectors(pair.source, names, kVectorBytes);
  }
  if (!packed) { return k.tensor.shape[0]; }
  Named const starts{"cu_seqlens_k_new", args.cu_seqlens_k_new};
  require_rank(starts, 1, "(batch + 1,)");
  std::int64_t const batch = starts.tensor.shape[0] - 1;
  require(batch >= 0, "cu_seqlens_k_new: must have shape (batch + 1,), found (0,)");
  check_length_tensor(starts, 1, batch, "cu_seqlens_k_new", cache);
  return batch;
}

void check_places(AppendArguments const& args, std::int64_t batch) {
  bool const same = args.seqused_k_all != -1;
  require(args.seqused_k.given() || same, "cache_seqlens: is needed to append k, none was given");
  require(!args.seqused_k.given() || !same, "cache_seqlens: was given as a tensor and as a number; pass one of them");
  Named const cache{"k_cache", args.k_cache};
  for (Named const& t : {Named{"cache_seqlens", args.seqused_k},
                         {"cache_batch_idx", args.cache_batch_idx},
                         {"rotary_seqlens", args.rotary_seqlens}}) {
    check_length_tensor(t, 0, batch, "k", cache);
  }
  if (!args.page_table.given()) {
    require(args.cache_batch_idx.given() || args.k_cache.shape[0] == batch, "k_cache: dim 0 (batch) must be ", batch,
            ", as in k, without cache_batch_idx, found shape ", ShapeText{args.k_cache});
    return;
  }
  require(!args.cache_batch_idx.given(),
          "cache_batch_idx: was given with page_table, which already picks the pages; pass one of them");
  Named const table{"page_table", args.page_table};
  require_rank(table, 2, "(batch, pages of a sequence)");
  require_dtype(table, DataType::kInt32);
  require_device_of(table, cache);
  require_size(table, kPageTable, 0, batch, "k");
  require_rows(table, kPageTable);
}

void check_tables(AppendArguments const& args) {
  Named const cos{"rotary_cos", args.rotary_cos};
  Named const sin{"rotary_sin", args.rotary_sin};
  require_rank(cos, 2, "(positions, rotary_dim / 2)");
  require_rank(sin, 2, "(positions, rotary_dim / 2)");
  require<InvalidType>(cos.tensor.dtype == args.k_cache.dtype || cos.tensor.dtype == DataType::kFloat32,
                       "rotary_cos: dtype must be fp32 or that of k_cache, ", dtype_name(args.k_cache.dtype),
                       ", found ", dtype_name(cos.tensor.dtype));
  require_dtype_of(sin, cos);
  require(cos.tensor.shape[0] > 0, "rotary_cos: has no positions, 1 or more are needed");
  require(2 * cos.tensor.shape[1] <= args.k_cache.shape[3], "rotary_cos: covers ", 2 * cos.tensor.shape[1],
          " columns, but head_dim is ", args.k_cache.shape[3]);
  for (int dim = 0; dim < 2; ++dim) { require_size(sin, kAngles, dim, cos.tensor.shape[dim], "rotary_cos"); }
  for (Named const& t : {cos, sin}) {
    require_device_of(t, {"k_cache", args.k_cache});
    require_rows(t, kAngles);
  }
}

// Attention reads q after the append, or q_rotated in its place.
void check_queries(AppendArguments const& args, std::int64_t batch) {
  bool const packed = args.cu_seqlens_q.given();
  int const rank = packed ? 3 : 4;
  DimNames const& names = packed ? kPackedTokens : kTokens;
  Named const q{"q", args.q};
  Named const cache{"k_cache", args.k_cache};
  require_rank(q, rank, packed ? kPackedQueryLayout : kQueryLayout);
  require_dtype_of(q, cache);
  require_device_of(q, cache);
  if (packed) {
    check_length_tensor({"cu_seqlens_q", args.cu_seqlens_q}, 1, batch, "k", cache);
  } else {
    require_size(q, names, 0, batch, "k");
  }
  require_size(q, names, rank - 1, args.k_cache.shape[3], "k_cache");
  require(q.tensor.shape[rank - 2] % args.k_cache.shape[2] == 0,
          "q: heads must be a multiple of the heads of k_cache: found ", q.tensor.shape[rank - 2], " and ",
          args.k_cache.shape[2]);
  require_countable_rows(q);
  require_vectors(q, names, kVectorBytes);
}

void check_rotated(AppendArguments const& args) {
  bool const packed = args.cu_seqlens_q.given();
  int const rank = packed ? 3 : 4;
  Named const rotated{"q_rotated", args.q_rotated};
  require_rank(rotated, rank, packed ? kPackedQueryLayout : kQueryLayout);
  require_dtype_of(rotated, {"k_cache", args.k_cache});
  require_device_of(rotated, {"k_cache", args.k_cache});
  for (int dim = 0; dim < rank; ++dim) {
    require(rotated.tensor.shape[dim] == args.q.shape[dim], "q_rotated: must have the shape of q, ", ShapeText{args.q},
            ", found ", ShapeText{rotated.tensor});
  }
  require_vectors(rotated, packed ? kPackedTokens : kTokens, kVectorBytes);
  require_distinct(rotated);
}

// Whether the caches are the same pages, of which V counts from another one on than K: where an engine keeps pages of K
// and of V by turns, and the ids in its tables count both. A page of K is then a page of V or apart from all of them.
bool are_same_pages(AppendArguments const& args) {
  Tensor const& k = args.k_cache;
  Tensor const& v = args.v_cache;
  if (!args.page_table.given()) { return false; }
  for (int dim = 0; dim < 4; ++dim) {
    if (k.stride[dim] != v.stride[dim] || (dim > 0 && k.shape[dim] != v.shape[dim])) { return false; }
  }
  Tensor page = k;
  page.shape[0] = 1;
  AddressRange const first = address_range(page);
  std::int64_t const step = k.stride[0] * element_bytes(k.dtype);
  std::int64_t const between = address_range(v).begin - first.begin;
  return step > 0 && first.end - first.begin <= step && between != 0 && between % step == 0;
}

constexpr NamedMember<AppendArguments> kRotated{"q_rotated", &AppendArguments::q_rotated};
constexpr NamedMember<AppendArguments> kKeys{"k_cache", &AppendArguments::k_cache};
constexpr NamedMember<AppendArguments> kValues{"v_cache", &AppendArguments::v_cache};

// What is written, and what is read.
template <class... Member>
constexpr auto members_with(Member... written) {
  return std::array{written...,
                    NamedMember<AppendArguments>{"k", &AppendArguments::k_new},
                    NamedMember<AppendArguments>{"v", &AppendArguments::v_new},
                    NamedMember<AppendArguments>{"q", &AppendArguments::q},
                    NamedMember<AppendArguments>{"rotary_cos", &AppendArguments::rotary_cos},
                    NamedMember<AppendArguments>{"rotary_sin", &AppendArguments::rotary_sin},
                    NamedMember<AppendArguments>{"cache_seqlens", &AppendArguments::seqused_k},
                    NamedMember<AppendArguments>{"page_table", &AppendArguments::page_table},
                    NamedMember<AppendArguments>{"cache_batch_idx", &AppendArguments::cache_batch_idx},
                    NamedMember<AppendArguments>{"cu_seqlens_k_new", &AppendArguments::cu_seqlens_k_new},
                    NamedMember<AppendArguments>{"cu_seqlens_q", &AppendArguments::cu_seqlens_q},
                    NamedMember<AppendArguments>{"rotary_seqlens", &AppendArguments::rotary_seqlens}};
}

constexpr auto kMembers = members_with(kRotated, kKeys, kValues);
constexpr auto kWithoutValues = members_with(kRotated, kKeys);
constexpr auto kWithoutKeys = members_with(kRotated, kValues);

}  // namespace

AppendBytes spanned_bytes(AppendArguments const& args) { return spanned_bytes(args, kMembers); }

void check_overlaps(AppendArguments const& args, AppendBytes const& bytes) {
  AddressRange const keys = address_range(args.k_cache, bytes[1]);
  if (keys.crosses(address_range(args.v_cache, bytes[2])) && are_same_pages(args)) {
    require_written_apart<kWithoutValues, 2>(args, spanned_bytes(args, kWithoutValues));
    require_written_apart<kWithoutKeys, 2>(args, spanned_bytes(args, kWithoutKeys));
  } else {
    require_written_apart<kMembers, 3>(args, bytes);
  }
}

void validate(AppendArguments const& args) {
  check_caches(args);
  std::int64_t const batch = check_new(args);
  check_places(args, batch);
  bool const rotary = args.rotary_cos.given();
  require(rotary == args.rotary_sin.given(), rotary ? "rotary_sin" : "rotary_cos",
          ": rotary_cos and rotary_sin must be given together");
  if (rotary) { check_tables(args); }
  if (rotary || args.q.given()) { check_queries(args, batch); }
  if (rotary) {
    check_rotated(args);
  } else {
    require(!args.q_rotated.given(), "q_rotated: was given without rotary_cos; only rotary embedding writes queries");
  }
  check_overlaps(args, spanned_bytes(args));
}

}  // namespace hopper_attention
