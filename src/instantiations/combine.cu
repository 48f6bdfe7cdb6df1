// The kernels behind combine() and merge_states(): bound by memory, so all that counts is loads in flight.
#include "kernels/combine_params.h"
#include "kernels/combine_states.h"

namespace hopper_attention {
namespace {

// For each SM, as many as leave the registers for all loads of a thread: 80.
constexpr int kMergeBlocks = 3;
constexpr int kCombineBlocks = 3;

struct RowIndex {
  int batch;
  int query;
  int head;
};

__device__ __forceinline__ RowIndex row_index(RowGrid const& grid, int row) {
  int const token = grid.heads.quotient(row);
  int const batch = grid.queries.quotient(token);
  return {batch, token - batch * grid.queries.divisor, row - token * grid.heads.divisor};
}

__device__ __forceinline__ std::int64_t offset(RowStrides const& stride, RowIndex const& row) {
  return row.batch * stride.batch + row.query * stride.query + row.head * stride.head;
}

// The vector that a thread works on. One outside the block's rows or behind the last row takes the place of the block's
// first row, so that it can be loaded without a branch, and is not stored.
struct Unit {
  int row;
  int vector;
  bool stored;
};

__device__ __forceinline__ Unit unit_at(RowGrid const& grid, int index) {
  int const first = static_cast<int>(blockIdx.x) * grid.rows_per_block;
  int const local = grid.vectors.quotient(index);
  bool const stored = local < grid.rows_per_block && first + local < grid.rows;
  return {stored ? first + local : first, index - local * grid.vectors.divisor, stored};
}

// Parts are read once: they need not stay in a cache.
template <class T>
__device__ __forceinline__ uint4 load_vector(T const* source) {
  return __ldcs(reinterpret_cast<uint4 const*>(source));
}

// Loads under a predicate: as branches, each would wait for the one before it.
__device__ __forceinline__ uint4 load_vector_if(bool wanted, float const* source) {
  uint4 raw = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w)
               : "l"(source), "r"(static_cast<int>(wanted)));
  return raw;
}

__device__ __forceinline__ float load_lse_if(bool wanted, float const* source) {
  float lse = minus_infinity();
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.f32 %0, [%1];}"
               : "+f"(lse)
               : "l"(source), "r"(static_cast<int>(wanted)));
  return lse;
}

// Up to kParts parts of a row, all of them in registers. out may be the out of a part, and lse its lse.
template <class Input, class Output, int kParts>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks) merge(__grid_constant__ MergeParams const params) {
  constexpr int kColumns = kMergeVectorBytes / static_cast<int>(sizeof(Input));
  constexpr int kUnits = merge_units(kParts);
  Unit units[kUnits];
  float lses[kUnits][kParts];
  uint4 vectors[kUnits][kParts];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    units[u] = unit_at(params.grid, u * kMergeThreads + static_cast<int>(threadIdx.x));
    RowIndex const row = row_index(params.grid, units[u].row);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      StateView const& part = params.parts[i];
      lses[u][i] = part.lse[offset(part.lse_stride, row)];
      auto const* const out = static_cast<Input const*>(part.out) + offset(part.out_stride, row);
      vectors[u][i] = load_vector(out + units[u].vector * kColumns);
    }
  }
  // All threads of a row are in this block: when its LSE is written, each of them has read it.
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    // The views of parts that are not there show the last one that is.
#pragma unroll
    for (int i = 1; i < kParts; ++i) { lses[u][i] = i < params.count ? lses[u][i] : minus_infinity(); }
    MergeWeights<kParts> const weights(lses[u]);
    float acc[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float values[kColumns];
      unpack(vectors[u][i], values, static_cast<Input const*>(nullptr));
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        acc[column] = add_weighted(acc[column], weights.weight[i], values[column]);
      }
    }
    if (!units[u].stored) { continue; }
    RowIndex const row = row_index(params.grid, units[u].row);
    StateView const& merged = params.merged;
    store(static_cast<Output*>(merged.out) + offset(merged.out_stride, row) + units[u].vector * kColumns, acc);
    if (units[u].vector == 0) { merged.lse[offset(merged.lse_stride, row)] = weights.lse(); }
  }
}

// Any number of float32 parts. Each slice of the block's threads merges every slices-th part, kCombineParts at a time,
// and reads out only of those with keys; then the slices are merged, in their order.
template <class Output>
__global__ void __launch_bounds__(kMergeThreads, kCombineBlocks) combine(__grid_constant__ CombineParams const params) {
  constexpr int kColumns = kMergeVectorBytes / static_cast<int>(sizeof(float));
  __shared__ float4 slice_acc[kMergeThreads];
  __shared__ float2 slice_sum[kMergeThreads];  // maximum, total

  int const thread = static_cast<int>(threadIdx.x);
  int const slice = params.group.quotient(thread);
  int const index = thread - slice * params.group.divisor;
  Unit const unit = unit_at(params.grid, index);
  RowIndex const row = row_index(params.grid, unit.row);
  StateView const& first = params.first;
  float const* lse = first.lse + offset(first.lse_stride, row) + slice * params.lse_part_stride;
  float const* out = static_cast<float const*>(first.out) + offset(first.out_stride, row) + unit.vector * kColumns +
                     slice * params.out_part_stride;
  // To the next part of this slice; behind the last part the pointers are not followed.
  std::int64_t const lse_step = params.slices * params.lse_part_stride;
  std::int64_t const out_step = params.slices * params.out_part_stride;

  RunningMerge<kColumns> merge;
  bool const works = unit.stored && slice < params.slices;
  for (int begin = slice; works && begin < params.count; begin += kCombineParts * params.slices) {
    float lses[kCombineParts];
#pragma unroll
    for (int i = 0; i < kCombineParts; ++i) {
      lses[i] = load_lse_if(begin + i * params.slices < params.count, lse);
      lse += lse_step;
    }
    float largest = minus_infinity();
#pragma unroll
    for (int i = 0; i < kCombineParts; ++i) {
      lses[i] = part_lse(lses[i]);
      largest = fmaxf(largest, lses[i]);
    }
    float const maximum = merge.raise_maximum(largest);
    uint4 vectors[kCombineParts];
#pragma unroll
    for (int i = 0; i < kCombineParts; ++i) { lses[i] = part_weight(lses[i], maximum); }
#pragma unroll
    for (int i = 0; i < kCombineParts; ++i) {
      vectors[i] = load_vector_if(lses[i] != 0.0F, out);
      out += out_step;
    }
#pragma unroll
    for (int i = 0; i < kCombineParts; ++i) {
      float values[kColumns];
      unpack(vectors[i], values, static_cast<float const*>(nullptr));
      merge.total += lses[i];
      // Without a look at the weight: what was not loaded is 0, and predicates are few.
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        merge.acc[column] = fmaf(lses[i], values[column], merge.acc[column]);
      }
    }
  }

  if (params.slices > 1) {
    slice_acc[thread] = make_float4(merge.acc[0], merge.acc[1], merge.acc[2], merge.acc[3]);
    slice_sum[thread] = make_float2(merge.maximum, merge.total);
    __syncthreads();
    if (slice > 0) { return; }
    for (int other = 1; other < params.slices; ++other) {
      int const from = other * params.group.divisor + thread;
      float2 const sum = slice_sum[from];
      float4 const acc = slice_acc[from];
      float const weight = part_weight(sum.x, merge.raise_maximum(sum.x));
      merge.add(weight, sum.y, {acc.x, acc.y, acc.z, acc.w});
    }
  }
  if (!works) { return; }
  merge.normalise();
  StateView const& merged = params.merged;
  store(static_cast<Output*>(merged.out) + offset(merged.out_stride, row) + unit.vector * kColumns, merge.acc);
  if (unit.vector == 0) { merged.lse[offset(merged.lse_stride, row)] = merge.lse(); }
}

template <class Input, class Output>
void const* merge_of(int parts) {
  return parts <= 2 ? reinterpret_cast<void const*>(&merge<Input, Output, 2>)
                    : reinterpret_cast<void const*>(&merge<Input, Output, kMaxMergedParts>);
}

}  // namespace

void const* merge_kernel(DataType input, DataType output, int parts) {
  if (input == DataType::kBFloat16) { return reinterpret_cast<void const*>(&merge<__nv_bfloat16, __nv_bfloat16, 2>); }
  if (input == DataType::kFloat16) { return reinterpret_cast<void const*>(&merge<__half, __half, 2>); }
  if (output == DataType::kBFloat16) { return merge_of<float, __nv_bfloat16>(parts); }
  if (output == DataType::kFloat16) { return merge_of<float, __half>(parts); }
  return merge_of<float, float>(parts);
}

void const* combine_kernel(DataType output) {
  if (output == DataType::kBFloat16) { return reinterpret_cast<void const*>(&combine<__nv_bfloat16>); }
  if (output == DataType::kFloat16) { return reinterpret_cast<void const*>(&combine<__half>); }
  return reinterpret_cast<void const*>(&combine<float>);
}

}  // namespace hopper_attention
