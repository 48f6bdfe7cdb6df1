// Shape and options -> Problem: the rules that need no tensor, and the canonical form of masks.
#include "host/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "host/require.h"
#include "host/tensor_rules.h"
#include "kernels/schedule_layout.h"

namespace hopper_attention {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kHeadDimStep = 8;  // 16 bytes, the unit of TMA
constexpr std::int64_t kMaxTiles = std::int64_t{1} << 30;
constexpr std::int64_t kMaxBatch = (std::int64_t{1} << PlacesAndCuts::kPlacesBits) - 1;  // metadata count so many
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;
constexpr std::int64_t kSmallestTileRows = 64;
constexpr std::int64_t kMaxSplits = 256;
constexpr std::int64_t kMaxRanks = std::int64_t{1} << 16;

// 64-row tiles that the queries of one head can fill. Packed sequences have a tile that is not full each.
std::int64_t most_row_tiles(ProblemShape const& shape, std::int64_t total_q, bool packed_q) {
  std::int64_t const of_batch = shape.batch * ((shape.seqlen_q + kSmallestTileRows - 1) / kSmallestTileRows);
  return packed_q ? std::min(of_batch, total_q / kSmallestTileRows + shape.batch) : of_batch;
}

void check_shape(ProblemShape const& shape, std::int64_t total_q, bool packed_q) {
  require<InvalidType>(is_half(shape.dtype), "dtype: must be bf16 or fp16, found ", dtype_name(shape.dtype));
  struct Extent {
    char const* name;
    std::int64_t value;
  };
  for (Extent const extent : {Extent{"batch", shape.batch},
                              {"seqlen_q", shape.seqlen_q},
                              {"seqlen_k", shape.seqlen_k},
                              {"heads of q", shape.heads_q},
                              {"heads of k", shape.heads_k},
                              {"page_size", shape.page_size}}) {
    require(extent.value >= 0 && extent.value <= kMaxExtent, extent.name, ": must be between 0 and ", kMaxExtent,
            ", found ", extent.value);
  }
  require(shape.heads_k > 0, "k: heads must be at least 1, found 0");
  require(shape.heads_q % shape.heads_k == 0, "q: heads must be a multiple of the heads of k and v: found ",
          shape.heads_q, " and ", shape.heads_k, "; heads are the last dim but one");
  for (Extent const dim : {Extent{"q: head_dim", shape.head_dim}, {"v: head_dim", shape.head_dim_v}}) {
    require(dim.value > 0 && dim.value % kHeadDimStep == 0, dim.name, " must be a positive multiple of ", kHeadDimStep,
            ", found ", dim.value, "; pad with zeros");
    require<NotImplemented>(dim.value <= kMaxHeadDim, dim.name, " must be at most ", kMaxHeadDim, ", found ",
                            dim.value);
  }
  require(shape.batch <= kMaxBatch, "batch: must be at most ", kMaxBatch, ", found ", shape.batch);
  std::int64_t const row_tiles = most_row_tiles(shape, total_q, packed_q);
  require(row_tiles == 0 || shape.heads_q <= kMaxTiles / row_tiles,
          "q: batch * heads * seqlen_q / 64 must be at most 2^30, found ", shape.heads_q, " heads * ", row_tiles,
          "; split the batch");
  require(total_q <= kMaxRows, "q: batch * seqlen_q must be at most 2^30, found ", total_q, "; split the batch");
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
  require(args.cp_world_size >= 1 && args.cp_world_size <= kMaxRanks, "cp_world_size: must be 1 to ", kMaxRanks,
          ", found ", args.cp_world_size);
  require(args.cp_rank >= 0 && args.cp_rank < args.cp_world_size, "cp_rank: must be 0 to ", args.cp_world_size - 1,
          " (cp_world_size - 1), found ", args.cp_rank);
}

// Masks that mean the same become the same value, and every number in it is bounded by a sequence length. The tile
// follows from the mask; where lengths are on the device, no bound on them may change it, since the bits of a sequence
// would follow from its neighbours' lengths. With context parallelism the keys of other ranks are not known either.
MaskParams canonical_mask(Arguments const& args, std::int64_t seqlen_q, std::int64_t seqlen_k, bool ragged) {
  MaskParams mask;
  std::int64_t const right = args.causal ? 0 : args.window_right;
  std::int64_t const longest_q = ragged ? kMaxExtent : seqlen_q;
  std::int64_t const longest_k = ragged ? kMaxExtent : seqlen_k;
  if (args.window_left >= 0 && args.window_left < longest_k - 1) { mask.left = static_cast<int>(args.window_left); }
  if (right >= 0 && right < longest_q - 1) { mask.right = static_cast<int>(right); }
  // The diagonals of all queries lie in [seqlen_k - seqlen_q, seqlen_k). If one chunk holds them and all keys, it cuts
  // nothing. A query before the first key lies in the chunk before and sees nothing; with causal it never does.
  bool const no_query_before_keys = !ragged && seqlen_q <= seqlen_k;
  bool const all_in_first_chunk = args.attention_chunk >= longest_k && (no_query_before_keys || right == 0);
  if (args.attention_chunk > 0 && !all_in_first_chunk) {
    mask.chunk = static_cast<int>(std::min(args.attention_chunk, std::max(longest_q, longest_k)));
  }
  mask.cp_world = static_cast<int>(args.cp_world_size);
  mask.cp_rank = static_cast<int>(args.cp_rank);
  return mask;
}

}  // namespace

bool has_lengths_on_device(Arguments const& args) {
  return args.cu_seqlens_q.given() || args.cu_seqlens_k.given() || args.seqused_q.given() || args.seqused_k.given() ||
         args.cache_leftpad.given() || args.cu_seqlens_k_new.given() || args.cp_tot_seqused_k.given();
}

Problem make_problem(ProblemShape const& shape, Arguments const& options, std::int64_t total_q, std::int64_t total_k) {
  bool const packed_q = options.cu_seqlens_q.given();
  bool const ragged = has_lengths_on_device(options) || options.cp_world_size > 1;
  check_shape(shape, total_q, packed_q);
  check_options(options);
  float const scale = checked_scale(options, shape.head_dim);
  // Of other calls it decides nothing, and a plan for each number of them would be made for nothing.
  bool const decides = packed_q && options.cu_seqlens_k.given() && options.num_splits == 1 && !options.batch_invariant;
  return {
      .dtype = shape.dtype,
      .batch = static_cast<int>(shape.batch),
      .seqlen_q = static_cast<int>(shape.seqlen_q),
      .seqlen_k = static_cast<int>(shape.seqlen_k),
      .total_q = static_cast<int>(total_q),
      .total_k = decides ? static_cast<int>(std::clamp<std::int64_t>(total_k, 0, kMaxRows)) : 0,
      .ragged = ragged,
      .packed_q = packed_q,
      .seqused_q = options.seqused_q.given(),
      .keys_known =
          options.cu_seqlens_k.given() && !options.seqused_k.given() && total_k >= shape.batch * shape.seqlen_k,
      .keys = shape.page_size > 0            ? KeyLayout::kPaged
              : options.cu_seqlens_k.given() ? KeyLayout::kVarlen
                                             : KeyLayout::kDense,
      .page_size = static_cast<int>(shape.page_size),
      .has_metadata = options.scheduler_metadata.given(),
      .heads_q = static_cast<int>(shape.heads_q),
      .heads_k = static_cast<int>(shape.heads_k),
      .head_dim = static_cast<int>(shape.head_dim),
      .head_dim_v = static_cast<int>(shape.head_dim_v),
      .mask = canonical_mask(options, shape.seqlen_q, shape.seqlen_k, ragged),
      .softmax_scale = scale,
      .softcap = checked_softcap(options, scale),
      .has_sinks = shape.has_sinks,
      .num_splits = static_cast<int>(options.num_splits),
      .sm_margin = static_cast<int>(options.sm_margin),
      .batch_invariant = options.batch_invariant,
  };
}

Problem make_problem(ProblemShape const& shape, Arguments const& options) {
  auto const within = [](std::int64_t extent) { return std::clamp<std::int64_t>(extent, 0, kMaxExtent); };
  std::int64_t const rows = within(shape.batch) * within(shape.seqlen_q);
  // A packed q has no more rows than a tensor can have, whatever the bound on its sequences.
  // Nothing is known of a packed k.
  return make_problem(shape, options, options.cu_seqlens_q.given() ? std::min(rows, kMaxExtent) : rows, -1);
}

}  // namespace hopper_attention
