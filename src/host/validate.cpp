// Arguments -> Problem. Finds every error of a caller before any CUDA call; messages start with the argument's name.
#include <array>
#include <cstdint>

#include "hopper_attention/forward.h"
#include "host/problem.h"
#include "host/require.h"
#include "host/same_call.h"
#include "host/tensor_rules.h"
#include "host/validate_lengths.h"

namespace hopper_attention {
namespace {

constexpr std::int64_t kWorkspaceAlignment = 16;
static_assert(kWorkspaceAlignment <= kMostAlignment && kTmaAlignment <= kMostAlignment);

// A tensor's dims: how many, their names, and the shape as messages write it.
struct Dims {
  int rank;
  DimNames names;
  char const* text;
};

constexpr Dims kDenseQuery{4, {"batch", "seqlen_q", "heads_q", "head_dim"}, "(batch, seqlen_q, heads_q, head_dim)"};
constexpr Dims kPackedQuery{3, {"total_q", "heads_q", "head_dim"}, "(total_q, heads_q, head_dim) with cu_seqlens_q"};
constexpr Dims kDenseKeys{4,
                          {"batch", "seqlen_k", "heads_k", "head_dim"},
                          "(batch, seqlen_k, heads_k, head_dim) without cu_seqlens_k and page_table"};
constexpr Dims kPackedKeys{3, {"total_k", "heads_k", "head_dim"}, "(total_k, heads_k, head_dim) with cu_seqlens_k"};
constexpr Dims kPagedKeys{
    4, {"pages", "page_size", "heads_k", "head_dim"}, "(pages, page_size, heads_k, head_dim) with page_table"};
constexpr Dims kDenseLse{3, {"batch", "heads_q", "seqlen_q"}, "(batch, heads_q, seqlen_q)"};
constexpr Dims kPackedLse{2, {"heads_q", "total_q"}, "(heads_q, total_q) with cu_seqlens_q"};

Dims const& query_dims(Layout const& layout) { return layout.packed_q ? kPackedQuery : kDenseQuery; }

Dims const& key_dims(Layout const& layout) {
  return layout.keys == KeyLayout::kDense ? kDenseKeys : layout.keys == KeyLayout::kVarlen ? kPackedKeys : kPagedKeys;
}

Layout check_inputs(Arguments const& args) {
  Named const q{"q", args.q};
  Dims const& expected_q = args.cu_seqlens_q.given() ? kPackedQuery : kDenseQuery;
  require_rank(q, expected_q.rank, expected_q.text);
  Layout const layout = layout_of(args);
  Dims const& expected_k = key_dims(layout);
  require_rank({"k", args.k}, expected_k.rank, expected_k.text);
  require_rank({"v", args.v}, expected_k.rank, expected_k.text);
  require<InvalidType>(is_half(args.q.dtype), "q: dtype must be bf16 or fp16, found ", dtype_name(args.q.dtype));
  require_cuda(q);
  for (Named const t : {Named{"k", args.k}, Named{"v", args.v}}) {
    require_dtype_of(t, q);
    require_device_of(t, q);
    if (layout.keys == KeyLayout::kDense && !args.cache_batch_idx.given()) {
      require_size(t, expected_k.names, 0, layout.batch, layout.batch_source);
    }
  }
  int const last = expected_k.rank - 1;
  require_size({"k", args.k}, expected_k.names, last, columns_of(args.q), "q");
  for (int dim = 0; dim < last; ++dim) { require_size({"v", args.v}, expected_k.names, dim, args.k.shape[dim], "k"); }
  check_lengths(args, layout);
  return layout;
}

void check_out(Arguments const& args, Layout const& layout) {
  Named const out{"out", args.out};
  Dims const& expected = query_dims(layout);
  int const last = expected.rank - 1;
  require_rank(out, expected.rank,
               layout.packed_q ? "(total_q, heads_q, head_dim_v)" : "(batch, seqlen_q, heads_q, head_dim_v)");
  require_dtype_of(out, {"q", args.q});
  require_device_of(out, {"q", args.q});
  for (int dim = 0; dim < last; ++dim) { require_size(out, expected.names, dim, args.q.shape[dim], "q"); }
  require_size(out, expected.names, last, columns_of(args.v), "v");
  require_writable(out, expected.names);
}

void check_lse(Arguments const& args, Layout const& layout) {
  if (!args.softmax_lse.given()) { return; }
  Named const lse{"softmax_lse", args.softmax_lse};
  Dims const& expected = layout.packed_q ? kPackedLse : kDenseLse;
  require_rank(lse, expected.rank, expected.text);
  require_dtype(lse, DataType::kFloat32);
  require_device_of(lse, {"q", args.q});
  if (!layout.packed_q) { require_size(lse, expected.names, 0, args.q.shape[0], "q"); }
  require_size(lse, expected.names, expected.rank - 2, heads_of(args.q), "q");
  require_size(lse, expected.names, expected.rank - 1, args.q.shape[args.q.rank - 3], "q");
  require_contiguous(lse);
}

void check_sinks(Arguments const& args) {
  if (!args.sinks.given()) { return; }
  Named const sinks{"sinks (s_aux)", args.sinks};
  require_rank(sinks, 1, "(heads_q,)");
  require<InvalidType>(is_half(sinks.tensor.dtype) || sinks.tensor.dtype == DataType::kFloat32, sinks.name,
                       ": dtype must be bf16, fp16 or fp32, found ", dtype_name(sinks.tensor.dtype));
  require_device_of(sinks, {"q", args.q});
  require(sinks.tensor.shape[0] == heads_of(args.q), sinks.name, ": must have one value for each head of q, ",
          heads_of(args.q), ", found ", sinks.tensor.shape[0]);
  require_contiguous(sinks);
}

void check_workspace(Arguments const& args) {
  if (!args.workspace.given()) { return; }
  Named const workspace{"workspace", args.workspace};
  require_dtype(workspace, DataType::kUInt8);
  require(workspace.tensor.rank == 1, "workspace: must have shape (bytes,), found ", ShapeText{workspace.tensor});
  require_device_of(workspace, {"q", args.q});
  require_contiguous(workspace, kWorkspaceAlignment);
}

// What is written, and what is read.
constexpr std::size_t kWritten = 3;
constexpr std::array<NamedMember<Arguments>, std::tuple_size_v<CallBytes>> kMembers{
    {{"out", &Arguments::out},
     {"softmax_lse", &Arguments::softmax_lse},
     {"workspace", &Arguments::workspace},
     {"q", &Arguments::q},
     {"k", &Arguments::k},
     {"v", &Arguments::v},
     {"sinks (s_aux)", &Arguments::sinks},
     {"cu_seqlens_q", &Arguments::cu_seqlens_q},
     {"cu_seqlens_k", &Arguments::cu_seqlens_k},
     {"seqused_q", &Arguments::seqused_q},
     {"seqused_k", &Arguments::seqused_k},
     {"page_table", &Arguments::page_table},
     {"cache_batch_idx", &Arguments::cache_batch_idx},
     {"cache_leftpad", &Arguments::cache_leftpad},
     {"cu_seqlens_k_new", &Arguments::cu_seqlens_k_new},
     {"cp_tot_seqused_k", &Arguments::cp_tot_seqused_k},
     {"scheduler_metadata", &Arguments::scheduler_metadata}}};

}  // namespace

CallBytes spanned_bytes(Arguments const& args) { return spanned_bytes(args, kMembers); }

// Nothing that is written is also read, or written in another place.
void check_overlaps(Arguments const& args, CallBytes const& bytes) {
  require_written_apart<kMembers, kWritten>(args, bytes);
}

Problem validate(Arguments const& args) {
  Layout const layout = check_inputs(args);
  std::int64_t const capacity = key_capacity(args, layout.keys);
  Problem const problem = make_problem({.dtype = args.q.dtype,
                                        .batch = layout.batch,
                                        .seqlen_q = bound_on_queries(args),
                                        .seqlen_k = bound_on_keys(args, capacity),
                                        .heads_q = heads_of(args.q),
                                        .heads_k = heads_of(args.k),
                                        .head_dim = columns_of(args.q),
                                        .head_dim_v = columns_of(args.v),
                                        .has_sinks = args.sinks.given(),
                                        .page_size = layout.keys == KeyLayout::kPaged ? args.k.shape[1] : 0},
                                       args, layout.packed_q ? args.q.shape[0] : layout.batch * args.q.shape[1],
                                       layout.keys == KeyLayout::kVarlen ? args.k.shape[0] : 0);
  require_readable_by_tma({"q", args.q}, query_dims(layout).names);
  require_readable_by_tma({"k", args.k}, key_dims(layout).names);
  require_readable_by_tma({"v", args.v}, key_dims(layout).names);
  check_out(args, layout);
  check_lse(args, layout);
  check_sinks(args);
  check_workspace(args);
  check_overlaps(args, spanned_bytes(args));
  return problem;
}

Problem validate(ScheduleArguments const& args) {
  Problem const problem = make_problem(args.shape, args.options);
  Named const metadata{"out (metadata)", args.metadata};
  require(metadata.tensor.given(), metadata.name, ": a tensor is required, none was given");
  require(metadata.tensor.device >= 0, metadata.name, ": must be on a CUDA device, but is on the CPU");
  check_metadata(metadata, args.shape.batch, metadata);
  check_length_tensors(args.options, args.shape.batch, "batch_size", metadata);
  for (Named const lengths : {Named{"cu_seqlens_q", args.options.cu_seqlens_q},
                              {"cu_seqlens_k", args.options.cu_seqlens_k},
                              {"seqused_q", args.options.seqused_q},
                              {"seqused_k", args.options.seqused_k},
                              {"cache_leftpad", args.options.cache_leftpad},
                              {"cu_seqlens_k_new", args.options.cu_seqlens_k_new},
                              {"cp_tot_seqused_k", args.options.cp_tot_seqused_k}}) {
    if (lengths.tensor.given()) { require_disjoint(metadata, lengths); }
  }
  return problem;
}

}  // namespace hopper_attention
