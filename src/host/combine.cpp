// Partial results -> kernel parameters -> one launch.
#include "hopper_attention/combine.h"

#include <algorithm>

#include "hopper_attention/forward.h"
#include "host/cuda_launch.h"
#include "host/memory_overlap.h"
#include "kernels/combine_params.h"

namespace hopper_attention {
namespace {

// Blocks for each SM that are worth having before their threads get more than one vector.
constexpr std::int64_t kBlocksPerSm = 4;

constexpr std::int64_t ceil_div_64(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct RowShape {
  std::int64_t batch;
  std::int64_t queries;
  std::int64_t heads;
  std::int64_t columns;

  std::int64_t rows() const { return batch * queries * heads; }
};

RowGrid row_grid(RowShape const& shape, int vector_columns) {
  return {.rows = static_cast<int>(shape.rows()),
          .queries = FastDivmod(static_cast<int>(shape.queries)),
          .heads = FastDivmod(static_cast<int>(shape.heads)),
          .vectors = FastDivmod(static_cast<int>(shape.columns) / vector_columns)};
}

int vector_columns(DataType type) { return kMergeVectorBytes / element_bytes(type); }

// (B, M, H, D) with (B, M, H), the last dims of both.
StateView view(Tensor const& out, Tensor const& lse) {
  int const o = out.rank - 4;
  int const l = lse.rank - 3;
  return {.out = out.data,
          .lse = static_cast<float*>(lse.data),
          .out_stride = {out.stride[o], out.stride[o + 1], out.stride[o + 2]},
          .lse_stride = {lse.stride[l], lse.stride[l + 1], lse.stride[l + 2]}};
}

// (B, M, H, D) with (B, H, M), or (M, H, D) with (H, M).
StateView transposed_view(Tensor const& out, Tensor const& lse) {
  bool const packed = out.rank == 3;
  int const o = packed ? 0 : 1;
  int const l = packed ? 0 : 1;
  return {.out = out.data,
          .lse = static_cast<float*>(lse.data),
          .out_stride = {packed ? 0 : out.stride[0], out.stride[o], out.stride[o + 1]},
          .lse_stride = {packed ? 0 : lse.stride[0], lse.stride[l + 1], lse.stride[l]}};
}

template <class Params>
void start(void const* kernel, Params& params, int device, Stream stream, char const* what) {
  DeviceGuard const guard(device);
  RowGrid const& grid = params.grid;
  auto const blocks = static_cast<unsigned>(ceil_div_64(grid.rows, grid.rows_per_block));
  launch_kernel(kernel, {.device = device, .grid = dim3(blocks), .threads = kMergeThreads}, &params, stream, what);
}

// All parts of a row in the registers of one thread for each vector of it.
void start_merge(MergeParams& params, RowShape const& shape, DataType input, DataType output, int device,
                 Stream stream) {
  for (int i = params.count; i < kMaxMergedParts; ++i) { params.parts[i] = params.parts[params.count - 1]; }
  params.grid = row_grid(shape, vector_columns(input));
  int const vectors = params.grid.vectors.divisor;
  std::int64_t const block_passes = std::int64_t{device_info(device).sm_count} * kBlocksPerSm * kMergeThreads;
  std::int64_t const units =
      std::clamp<std::int64_t>(ceil_div_64(shape.rows() * vectors, block_passes), 1, merge_units(params.count));
  params.grid.rows_per_block = static_cast<int>(units) * kMergeThreads / vectors;
  start(merge_kernel(input, output, params.count), params, device, stream, "the launch of the merge kernel failed");
}

}  // namespace

void merge_states(MergeArguments const& args, Stream stream) {
  validate(args);
  Tensor const& a = args.out_a;
  int const first = a.rank - 3;
  RowShape const shape{first == 0 ? 1 : a.shape[0], a.shape[first], a.shape[first + 1], a.shape[first + 2]};
  if (shape.rows() == 0) { return; }
  require_supported_device(a.device);
  MergeParams params{.parts = {transposed_view(args.out_a, args.lse_a), transposed_view(args.out_b, args.lse_b)},
                     .merged = transposed_view(args.out, args.lse),
                     .count = 2};
  start_merge(params, shape, a.dtype, a.dtype, a.device, stream);
}

void combine(CombineArguments const& args, Stream stream) {
  validate(args);
  Tensor const& parts = args.out_partial;
  RowShape const shape{parts.shape[1], parts.shape[2], parts.shape[3], parts.shape[4]};
  if (shape.rows() == 0) { return; }
  require_supported_device(parts.device);
  int const count = static_cast<int>(parts.shape[0]);
  StateView const first = view(parts, args.lse_partial);
  StateView const merged = view(args.out, args.lse);
  if (count > 0 && count <= kMaxMergedParts) {
    MergeParams params{.merged = merged, .count = count};
    for (int i = 0; i < count; ++i) {
      params.parts[i] = first;
      params.parts[i].out = static_cast<float*>(first.out) + i * parts.stride[0];
      params.parts[i].lse = first.lse + i * args.lse_partial.stride[0];
    }
    start_merge(params, shape, DataType::kFloat32, args.out.dtype, parts.device, stream);
    return;
  }
  CombineParams params{.first = first,
                       .out_part_stride = parts.stride[0],
                       .lse_part_stride = args.lse_partial.stride[0],
                       .merged = merged,
                       .grid = row_grid(shape, vector_columns(DataType::kFloat32)),
                       .count = count};
  // As many slices as give each the parts of one pass, while a block has threads for a row of each.
  int const vectors = params.grid.vectors.divisor;
  int const wanted = static_cast<int>(std::clamp<std::int64_t>(ceil_div_64(count, kCombineParts), 1, kCombineParts));
  params.grid.rows_per_block = std::max(1, kMergeThreads / (wanted * vectors));
  int const group = params.grid.rows_per_block * vectors;
  params.group = FastDivmod(group);
  params.slices = std::min(wanted == 1 ? 1 : kMergeThreads / group, std::max(count, 1));
  start(combine_kernel(args.out.dtype), params, parts.device, stream, "the launch of the combine kernel failed");
}

}  // namespace hopper_attention
