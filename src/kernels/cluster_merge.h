// Parts of a tile that the CTAs of a cluster have computed -> out and LSE, without global memory in between. Each CTA
// owns some columns of the tile; every CTA writes its part of them into the owner's shared memory.
//
// Source of the method: FlashDecoding (Dao et al. 2023); distributed shared memory: CUDA C++ Programming Guide.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_memory.h"
#include "kernels/merged_row.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

// What the one consumer warpgroup of a tile of few queries does after its part, where CTAs of a cluster share the tile.
template <class Traits>
class ClusterMerge {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;

  __device__ __forceinline__ ClusterMerge(AttentionParams const& params, SharedStorage& shared, int thread)
      : params_(params), shared_(shared), thread_(thread) {}

  __device__ __forceinline__ int parts() const { return params_.cluster.size; }

  // All CTAs of the cluster come here for the same tile. `send(rows)` calls send_end() and send_pair() for the tile's
  // rows, of which the swapped form has multiples of 8.
  template <class Send>
  __device__ __forceinline__ void operator()(TileWork const& work, Send send) {
    int const existing =
        min_of((work.queries.last + 1 - work.queries.first) * params_.packing.heads.divisor, Traits::kMergeRows);
    int const rows = Traits::kSwapped ? ceil_div(existing, 8) * 8 : existing;
    wait_for_others();
    if (thread_ == 0) { expect_bytes(shared_.parts_full, parts() * rows * (columns() + kEndFloats) * sizeof(float)); }
    send(rows);
    wait_barrier_of_cluster(shared_.parts_full, merged_ & 1);
    if constexpr (Traits::kInParts) {
      merge_in_order(work, existing, rows);
    } else {
      merge(work, existing, rows);
    }
    sync_warpgroup(0);
    if (thread_ < parts()) { arrive_in_cluster(shared_.parts_empty, thread_); }
    ++merged_;
  }

  // The end of a row to one of the owners; in the form of 64 rows its sum is 1.
  __device__ __forceinline__ void send_end(int owner, int row, PartEnd const& end) const {
    uint32_t const there = address_in_cluster(&shared_, owner);
    uint32_t const to = there + offset_of(end_of(row, rank()));
    uint32_t const barrier = there + offset_of(&shared_.parts_full);
    if constexpr (Traits::kSwapped) {
      store_async(to, barrier, end.exponent, end.sum);
    } else {
      store_async(to, barrier, end.exponent);
    }
  }

  // Two values that lie side by side: (row, column) and (row, column + 1), in the swapped form (row + 1, column).
  __device__ __forceinline__ void send_pair(int row, int column, int rows, float a, float b) const {
    int const owner = column * parts() / Traits::kHeadDimV;
    uint32_t const there = address_in_cluster(&shared_, owner);
    store_async(there + offset_of(received(rank(), row, column - owner * columns(), rows)),
                there + offset_of(&shared_.parts_full), a, b);
  }

  // Other CTAs do not touch this one's shared memory any more: it may end.
  __device__ __forceinline__ void finish() const { wait_for_others(); }

 private:
  static constexpr int kEndFloats = Traits::kEndFloats;
  static constexpr int kEndsAtOnce = kMergeParts;  // parts whose ends a thread reads together

  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) & (parts() - 1); }
  __device__ __forceinline__ int part_bits() const { return log2_of(parts()); }
  __device__ __forceinline__ int columns() const { return Traits::kHeadDimV >> part_bits(); }  // of an owner

  // Before the first tile for their barriers to be set up, later for their having read what this CTA sent.
  __device__ __forceinline__ void wait_for_others() const {
    if (merged_ == 0) {
      cute::cluster_wait();
    } else {
      wait_barrier_of_cluster(shared_.parts_empty, (merged_ - 1) & 1);
    }
  }

  __device__ __forceinline__ uint32_t offset_of(void const* member) const { return offset_in_shared(&shared_, member); }

  __device__ __forceinline__ float* end_of(int row, int part) const {
    return shared_.parts_ends + (row * max_of(kEndsAtOnce, parts()) + part) * kEndFloats;
  }

  __device__ __forceinline__ float* received(int part, int row, int column, int rows) const {
    int const within = Traits::kSwapped ? column * rows + row : row * columns() + column;
    return reinterpret_cast<float*>(shared_.o) + part * rows * columns() + within;
  }

  // The ends of parts first, ..., first + 3 of a row; of parts that there are not as of those without keys.
  __device__ __forceinline__ void read_ends(int row, int first, PartEnd (&ends)[kEndsAtOnce]) const {
    if constexpr (Traits::kSwapped) {
      CUTE_UNROLL
      for (int i = 0; i < kEndsAtOnce; i += 2) {
        float4 const two = *reinterpret_cast<float4 const*>(end_of(row, first + i));
        bool const exist = first + i < parts();
        ends[i] = {exist ? two.x : -INFINITY, two.y};
        ends[i + 1] = {exist ? two.z : -INFINITY, two.w};
      }
    } else {
      float4 const all = *reinterpret_cast<float4 const*>(end_of(row, first));
      bool const more = first + 2 < parts();
      ends[0] = {all.x, 1.0F};
      ends[1] = {all.y, 1.0F};
      ends[2] = {more ? all.z : -INFINITY, 1.0F};
      ends[3] = {more ? all.w : -INFINITY, 1.0F};
    }
  }

  // Of a part, in what is relative to 2^top.
  __device__ __forceinline__ static float weight(PartEnd const& end, float top) {
    return end.exponent == -INFINITY ? 0.0F : exp2_approx(end.exponent - top);
  }

  // A thread has four columns of a row of up to four parts, and neighbouring lanes the next parts, so that what is done
  // one after the other is short. Parts are added in the same order always.
  __device__ __forceinline__ void merge(TileWork const& work, int existing, int rows) const {
    int const group_bits = max_of(part_bits() - log2_of(kEndsAtOnce), 0);  // divisions would take as long as all else
    int const groups = 1 << group_bits;
    int const group = thread_ & (groups - 1);
    int const row_bits = rows > 1 ? log2_of(rows - 1) + 1 : 0;
    int const row = (thread_ >> group_bits) & ((1 << row_bits) - 1);
    int const quads_at_once = cutlass::NumThreadsPerWarpGroup >> (group_bits + row_bits);
    OutputRow const id = output_row(params_, work, work.queries.first, row);
    bool const exists = row < existing && id.exists;
    CUTE_NO_UNROLL
    for (int first = 0; first * kMergeColumns < columns(); first += quads_at_once) {  // the same in all lanes
      int const column = (first + (thread_ >> (group_bits + row_bits))) * kMergeColumns;
      PartEnd ends[kEndsAtOnce];
      float top = -INFINITY;
      float sum = 0.0F;
      float4 out{0.0F, 0.0F, 0.0F, 0.0F};
      bool const adds = exists && column < columns();
      if (adds) {
        read_ends(row, group * kEndsAtOnce, ends);
        top = fmaxf(fmaxf(ends[0].exponent, ends[1].exponent), fmaxf(ends[2].exponent, ends[3].exponent));
      }
      for (int lanes = 1; lanes < groups; lanes *= 2) { top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, lanes)); }
      if (adds) {
        CUTE_UNROLL
        for (int i = 0; i < kEndsAtOnce; ++i) {
          float const share = weight(ends[i], top);
          if (share == 0.0F) { continue; }  // what it multiplies may be anything
          float4 const more = four_columns(group * kEndsAtOnce + i, row, column, rows);
          sum += share * ends[i].sum;
          out.x += share * more.x;
          out.y += share * more.y;
          out.z += share * more.z;
          out.w += share * more.w;
        }
      }
      for (int lanes = 1; lanes < groups; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, lanes);
        out.x += __shfl_xor_sync(0xffffffff, out.x, lanes);
        out.y += __shfl_xor_sync(0xffffffff, out.y, lanes);
        out.z += __shfl_xor_sync(0xffffffff, out.z, lanes);
        out.w += __shfl_xor_sync(0xffffffff, out.w, lanes);
      }
      int const column_of_out = rank() * columns() + column;
      if (adds && group == 0 && column_of_out < params_.epilogue.head_dim_v) {
        write(work, id, row, column_of_out, top, sum, out);
      }
    }
  }

  // Parts that follow from the tile alone, or groups of them, as merged_row.h says: a thread has four columns of a row.
  __device__ __forceinline__ void merge_in_order(TileWork const& work, int existing, int rows) const {
    int const group = work.part == TilePart::kPart ? kPartsOfGroup : 1;
    int const row_bits = log2_of(rows);  // 8 or 16
    CUTE_NO_UNROLL
    for (int i = thread_; i < columns() / kMergeColumns << row_bits; i += cutlass::NumThreadsPerWarpGroup) {
      int const row = i & (rows - 1);
      int const column = (i >> row_bits) * kMergeColumns;
      int const column_of_out = rank() * columns() + column;
      OutputRow const id = output_row(params_, work, work.queries.first, row);
      if (row >= existing || !id.exists || column_of_out >= params_.epilogue.head_dim_v) { continue; }
      auto all = MergedRow<kMergeColumns>::none();
      auto so_far = MergedRow<kMergeColumns>::none();
      CUTE_NO_UNROLL
      for (int part = 0; part < parts(); ++part) {
        float2 const end = *reinterpret_cast<float2 const*>(end_of(row, part));
        float4 const four = four_columns(part, row, column, rows);
        so_far.add(end.x, end.y, {four.x, four.y, four.z, four.w});
        if ((part & (group - 1)) == group - 1) {
          all.add(so_far);
          so_far = MergedRow<kMergeColumns>::none();
        }
      }
      all.add(so_far);
      float4 const out{all.column(0), all.column(1), all.column(2), all.column(3)};
      write(work, id, row, column_of_out, all.top, all.sum, out);
    }
  }

  __device__ __forceinline__ float4 four_columns(int part, int row, int column, int rows) const {
    float const* const from = received(part, row, column, rows);
    if constexpr (Traits::kSwapped) {
      return {from[0], from[rows], from[2 * rows], from[3 * rows]};
    } else {
      return *reinterpret_cast<float4 const*>(from);
    }
  }

  // Four columns of a row.
  __device__ __forceinline__ void write(TileWork const& work, OutputRow const& id, int row, int column, float top,
                                        float sum, float4 const& out) const {
    EpilogueParams const& p = params_.epilogue;
    RowEnd end = row_end(top, sum);
    if (work.slot >= 0) {
      std::int64_t const index = static_cast<std::int64_t>(work.slot) * p.partial.rows + row;
      if (row >= p.partial.rows) { return; }
      *reinterpret_cast<float4*>(p.partial.out + index * p.head_dim_v + column) =
          make_float4(end.scaled(out.x), end.scaled(out.y), end.scaled(out.z), end.scaled(out.w));
      if (column == 0) { p.partial.lse[index] = end.lse(); }
      return;
    }
    if (p.sinks != nullptr) { end = end_row(top, sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
    cutlass::AlignedArray<Element, kMergeColumns> four;
    four[0] = Element(end.scaled(out.x));
    four[1] = Element(end.scaled(out.y));
    four[2] = Element(end.scaled(out.z));
    four[3] = Element(end.scaled(out.w));
    Element* const to = output_pointer<Element>(params_, work, id) + column;
    if (p.out_by_tma) {
      *reinterpret_cast<cutlass::AlignedArray<Element, kMergeColumns>*>(to) = four;
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kMergeColumns; ++i) { to[i] = four[i]; }
    }
    if (column == 0) { store_lse(params_, work, id, end); }
  }

  AttentionParams const& params_;
  SharedStorage& shared_;
  int thread_;
  int merged_ = 0;  // tiles
};

}  // namespace hopper_attention
