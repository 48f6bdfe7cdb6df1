#include "host/validate_lengths.h"

#include <algorithm>
#include <cstdint>

#include "host/problem.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

constexpr DimNames kPageTableDims{"batch", "pages of a sequence"};

// (batch,) or, for offsets, (batch + 1,).
struct LengthTensor {
  Named named;
  std::int64_t extra;
};

void check_pages(Arguments const& args, Layout const& layout) {
  Named const table{"page_table", args.page_table};
  require_rank(table, 2, "(batch, pages of a sequence)");
  require_dtype(table, DataType::kInt32);
  require_device_of(table, {"q", args.q});
  require_size(table, kPageTableDims, 0, layout.batch, layout.batch_source);
  require_rows(table, kPageTableDims);
  std::int64_t const page_size = args.k.shape[1];
  require(page_size > 0, "k: dim 1 (page_size) must be at least 1, found 0");
  require(table.tensor.shape[1] <= kMaxExtent / page_size, "page_table: ", table.tensor.shape[1],
          " pages of a sequence * page size ", page_size, " must be at most ", kMaxExtent, " keys");
  require(args.seqused_k.given() || args.seqused_k_all >= 0,
          "seqused_k: is needed with page_table, since pages do not say how many keys count");
}

void check_numbers(Arguments const& args) {
  require(args.seqlen_k_new >= 0, "seqlen_k_new: must be at least 0, found ", args.seqlen_k_new);
  require(args.seqlen_k_new == 0 || !args.cu_seqlens_k_new.given(),
          "cu_seqlens_k_new: must not be given together with seqlen_k_new, ", args.seqlen_k_new);
  require(args.seqused_k_all >= -1, "seqused_k: must be at least 0, found ", args.seqused_k_all);
  require(args.seqused_k_all == -1 || !args.seqused_k.given(), "seqused_k: a tensor and one length for all sequences, ",
          args.seqused_k_all, ", must not be given together");
  require(args.seqused_k_all == -1 || !args.cu_seqlens_k.given(),
          "seqused_k: must be a tensor with cu_seqlens_k, found one length for all sequences, ", args.seqused_k_all);
  require(args.max_seqlen_q >= -1, "max_seqlen_q: must be at least 0, or -1 for what the shapes allow, found ",
          args.max_seqlen_q);
  require(args.max_seqlen_k >= -1, "max_seqlen_k: must be at least 0, or -1 for what the shapes allow, found ",
          args.max_seqlen_k);
  if (args.cp_tot_seqused_k.given()) {
    require(args.cp_world_size > 1, "cp_tot_seqused_k: has no meaning with cp_world_size 1; leave it out");
  } else {
    require(args.cp_world_size <= 1, "cp_tot_seqused_k: is needed with cp_world_size ", args.cp_world_size);
  }
}

}  // namespace

void check_length_tensor(Named t, std::int64_t extra, std::int64_t batch, char const* batch_source,
                         Named on_device_of) {
  if (!t.tensor.given()) { return; }
  require_rank(t, 1, extra == 0 ? "(batch,)" : "(batch + 1,)");
  require_dtype(t, DataType::kInt32);
  require_device_of(t, on_device_of);
  require(t.tensor.shape[0] == batch + extra, t.name, ": must have ", extra == 0 ? "batch" : "batch + 1", " elements, ",
          batch + extra, " for the batch of ", batch_source, ", found ", t.tensor.shape[0]);
  require_contiguous(t);
}

Layout layout_of(Arguments const& args) {
  Layout layout;
  layout.packed_q = args.cu_seqlens_q.given();
  if (layout.packed_q) {
    require_rank({"cu_seqlens_q", args.cu_seqlens_q}, 1, "(batch + 1,)");
    require(args.cu_seqlens_q.shape[0] >= 1, "cu_seqlens_q: must have batch + 1 elements, at least 1, found 0");
    layout.batch = args.cu_seqlens_q.shape[0] - 1;
    layout.batch_source = "cu_seqlens_q";
  } else {
    layout.batch = args.q.shape[0];
  }
  if (args.page_table.given()) {
    layout.keys = KeyLayout::kPaged;
    require(!args.cu_seqlens_k.given(),
            "cu_seqlens_k: must not be given together with page_table; lengths of pages come from seqused_k");
  } else if (args.cu_seqlens_k.given()) {
    layout.keys = KeyLayout::kVarlen;
  }
  require(layout.keys == KeyLayout::kDense || !args.cache_batch_idx.given(),
          "cache_batch_idx: must not be given together with ",
          layout.keys == KeyLayout::kPaged ? "page_table, which says where keys are" : "cu_seqlens_k");
  return layout;
}

void check_length_tensors(Arguments const& args, std::int64_t batch, char const* batch_source, Named on_device_of) {
  for (LengthTensor const& t : {LengthTensor{{"cu_seqlens_q", args.cu_seqlens_q}, 1},
                                {{"cu_seqlens_k", args.cu_seqlens_k}, 1},
                                {{"seqused_q", args.seqused_q}, 0},
                                {{"seqused_k", args.seqused_k}, 0},
                                {{"cache_batch_idx", args.cache_batch_idx}, 0},
                                {{"cache_leftpad", args.cache_leftpad}, 0},
                                {{"cu_seqlens_k_new", args.cu_seqlens_k_new}, 1},
                                {{"cp_tot_seqused_k", args.cp_tot_seqused_k}, 0}}) {
    check_length_tensor(t.named, t.extra, batch, batch_source, on_device_of);
  }
  check_numbers(args);
}

void check_lengths(Arguments const& args, Layout const& layout) {
  if (has_lengths_on_device(args) || args.cache_batch_idx.given()) {
    check_length_tensors(args, layout.batch, layout.batch_source, {"q", args.q});
  } else {
    check_numbers(args);
  }
  if (layout.keys == KeyLayout::kPaged) { check_pages(args, layout); }
  if (args.scheduler_metadata.given()) {
    check_metadata({"scheduler_metadata", args.scheduler_metadata}, layout.batch, {"q", args.q});
  }
}

std::int64_t key_capacity(Arguments const& args, KeyLayout keys) {
  switch (keys) {
    case KeyLayout::kVarlen:
      return args.k.shape[0];
    case KeyLayout::kPaged:
      return args.page_table.shape[1] * args.k.shape[1];
    case KeyLayout::kDense:
      break;
  }
  return args.k.shape[1];
}

std::int64_t bound_on_queries(Arguments const& args) {
  if (!args.cu_seqlens_q.given()) { return args.q.shape[1]; }
  return args.max_seqlen_q >= 0 ? std::min(args.max_seqlen_q, args.q.shape[0]) : args.q.shape[0];
}

std::int64_t bound_on_keys(Arguments const& args, std::int64_t capacity) {
  std::int64_t bound = capacity;
  if (args.seqused_k_all >= 0 && !args.cu_seqlens_k_new.given()) {
    bound = std::min(std::min(args.seqused_k_all, capacity) + std::min(args.seqlen_k_new, capacity), capacity);
  }
  bool const is_length = !has_lengths_on_device(args);
  return is_length || args.max_seqlen_k < 0 ? bound : std::min(bound, args.max_seqlen_k);
}

void check_metadata(Named metadata, std::int64_t batch, Named on_device_of) {
  require_rank(metadata, 1, "(1 + 4 * batch rounded up to 4,)");
  require_dtype(metadata, DataType::kInt32);
  require_device_of(metadata, on_device_of);
  std::int64_t const least = schedule_size(batch);
  require(metadata.tensor.shape[0] >= least, metadata.name, ": must have at least ", least, " elements for ", batch,
          " sequences, found ", metadata.tensor.shape[0]);
  require_contiguous(metadata);
}

}  // namespace hopper_attention
