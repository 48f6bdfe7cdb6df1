// The consumer warpgroup of tiles with at most 16 query rows: S^T = K Q^T, online softmax down the columns, O^T += V^T
// P^T. The keys take the rows of the WGMMA and the queries its columns, so that no multiplication is spent on idle rows
// and a thread holds few scores: a block takes a quarter of the instructions that a tile of 64 rows needs, and most of
// a short call is the time in which instructions arrive for the first time.
//
// Source of the method: operands swapped as in FlashInfer's XQA and FlashMLA; the online softmax is that of softmax.h.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_merge.h"
#include "kernels/mainloop.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/scores.h"
#include "kernels/softmax.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

// Rows of the tile, which are columns here, of which a thread holds some scores and some of O.
inline constexpr int kColumnsPerThread = 4;

// An accumulator of 64 m x 16 as (column, row) of this thread: (4, 2 m).
template <class Accumulator>
__device__ __forceinline__ auto columns_view(Accumulator& acc) {
  constexpr int kTiles = decltype(size(acc))::value / 8;
  return make_tensor(acc.data(),
                     Layout<Shape<Shape<_2, _2>, Shape<_2, Int<kTiles>>>, Stride<Stride<_1, _4>, Stride<_2, _8>>>{});
}

// Where the thread's column c and its row r of a columns_view() lie in the accumulator.
struct ThreadColumns {
  int first_column;
  int first_row;

  __device__ __forceinline__ explicit ThreadColumns(int thread)
      : first_column(thread % 4 * 2), first_row(thread / 32 * 16 + thread % 32 / 4) {}

  __device__ __forceinline__ int column(int c) const { return first_column + c / 2 * 8 + c % 2; }
  __device__ __forceinline__ int row(int r) const { return first_row + r % 2 * 8 + r / 2 * 64; }
};

template <class Traits>
class SwappedMainloop {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using State = RingState<Traits::kStages>;
  static constexpr int kRows = Traits::kTile.rows;
  static_assert(kRows == 16);

  // O^T, without the division by the sums of its columns.
  using Output = decltype(partition_fragment_C(typename Traits::MmaPv{}, Shape<Int<Traits::kHeadDimV>, Int<kRows>>{}));

  __device__ __forceinline__ SwappedMainloop(AttentionParams const& params, SharedStorage& shared, int thread)
      : params_(params), shared_(shared), thread_(thread), place_(thread) {}

  // Accumulates the key blocks of `work`, right to left, into output(). `after_scores` is called as soon as Q is not
  // needed any more.
  template <class AfterScores>
  __device__ __forceinline__ void mma(TileWork const& work, State& read, AfterScores after_scores) {
    clear(output_);
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      max_[c] = -INFINITY;
      sum_[c] = 0.0F;
    }
    if (work.range.empty()) {
      after_scores();
    } else if (params_.softmax.softcap_inner == 0.0F) {
      all_blocks(work, read, after_scores, false_type{});
    } else {
      all_blocks(work, read, after_scores, true_type{});
    }
  }

  __device__ __forceinline__ auto output() const { return columns_view(output_); }

  // Of all columns that the thread holds, without their sinks. All threads of the warpgroup, once for a tile.
  __device__ __forceinline__ void finish(RowEnd (&ends)[kColumnsPerThread]) {
    across_keys(sum_, [](float a, float b) { return a + b; });
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      ends[c] = end_row(max_[c] == -INFINITY ? -INFINITY : exponent(max_[c]), sum_[c]);
    }
  }

 private:
  // The log2 of what a column's sum and its O are to be multiplied by.
  __device__ __forceinline__ float exponent(float max) const {
    return max * params_.softmax.scale_log2 - Traits::Softmax::kHeadroomOf;
  }

  __device__ __forceinline__ void wait(State const& state) const {
    wait_barrier(shared_.full[state.slot], state.phase);
  }

  __device__ __forceinline__ void release(State const& state) const {
    if (thread_ % 32 == 0) { arrive_barrier(shared_.empty[state.slot]); }
  }

  // Combines each column's values over all threads that hold some of it. Two buffers take turns, so that the next call
  // may write while a slow warp still reads.
  template <class Combine>
  __device__ __forceinline__ void across_keys(float (&values)[kColumnsPerThread], Combine combine) {
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      CUTE_UNROLL
      for (int step = 4; step < 32; step *= 2) {
        values[c] = combine(values[c], __shfl_xor_sync(0xffffffff, values[c], step));
      }
    }
    auto& buffer = shared_.across_warps[exchange_ % 2];
    ++exchange_;
    CUTE_UNROLL
    for (int pair = 0; pair < kColumnsPerThread; pair += 2) {
      if (thread_ % 32 < 4) {
        *reinterpret_cast<float2*>(&buffer[thread_ / 32][place_.column(pair)]) =
            make_float2(values[pair], values[pair + 1]);
      }
    }
    sync_warpgroup(0);
    CUTE_UNROLL
    for (int pair = 0; pair < kColumnsPerThread; pair += 2) {
      float2 all = *reinterpret_cast<float2 const*>(&buffer[0][place_.column(pair)]);
      CUTE_UNROLL
      for (int warp = 1; warp < cutlass::NumWarpsPerWarpGroup; ++warp) {
        float2 const more = *reinterpret_cast<float2 const*>(&buffer[warp][place_.column(pair)]);
        all = make_float2(combine(all.x, more.x), combine(all.y, more.y));
      }
      values[pair] = all.x;
      values[pair + 1] = all.y;
    }
  }

  // The keys that the thread's columns see. Each lane finds those of one column.
  __device__ __forceinline__ void find_keys(TileWork const& work) {
    int const row = thread_ % kRows;
    KeyInterval const own =
        visible(params_.mask, work.queries.first + params_.packing.heads.quotient(row), work.sequence.len);
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      keys_[c].begin = __shfl_sync(0xffffffff, own.begin, place_.column(c));
      keys_[c].end = __shfl_sync(0xffffffff, own.end, place_.column(c));
    }
  }

  template <class AfterScores, class Capped>
  __device__ __forceinline__ void all_blocks(TileWork const& work, State& read, AfterScores after_scores, Capped) {
    cute::Tensor sQ = make_tensor(make_smem_ptr(shared_.q[0][0]), typename Traits::LayoutQ{});    // (16, D)
    cute::Tensor sK = make_tensor(make_smem_ptr(shared_.ring[0]), typename Traits::LayoutK{});    // (keys, D, slots)
    cute::Tensor sVt = make_tensor(make_smem_ptr(shared_.ring[0]), typename Traits::LayoutVt{});  // (Dv, keys, slots)
    cute::Tensor sP = make_tensor(make_smem_ptr(shared_.p[0]), typename Traits::LayoutP{});       // (16, keys, 2)
    typename Traits::MmaQk mma_qk;
    typename Traits::MmaPv mma_pv;
    auto const thread_qk = mma_qk.get_thread_slice(thread_);
    auto const thread_pv = mma_pv.get_thread_slice(thread_);
    cute::Tensor tSrK = thread_qk.partition_fragment_A(sK);   // (MMA, keys / 64, D / 16, slots)
    cute::Tensor tSrQ = thread_qk.partition_fragment_B(sQ);   // (MMA, 1, D / 16)
    cute::Tensor tOrV = thread_pv.partition_fragment_A(sVt);  // (MMA, Dv / 64, keys / 16, slots)
    cute::Tensor tOrP = thread_pv.partition_fragment_B(sP);   // (MMA, 1, keys / 16, 2)
    cute::Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<Traits::kKeys>, Int<kRows>>{});  // (MMA, keys / 64, 1)
    find_keys(work);

    float before[kColumnsPerThread];
    // Scores of block n -> column maxima.
    auto const update_max = [&](int n) __attribute__((always_inline)) {
      auto scores = columns_view(tSrS);
      int const first_key = work.first_key(n, Traits::kKeys);
      CUTE_UNROLL
      for (int c = 0; c < kColumnsPerThread; ++c) {
        before[c] = max_[c];
        CUTE_UNROLL
        for (int r = 0; r < size<1>(scores); ++r) {
          if constexpr (Capped{}) { scores(c, r) = softcapped(scores(c, r), params_.softmax.softcap_inner); }
          int const key = first_key + place_.row(r);
          bool const sees =
              static_cast<unsigned>(key - keys_[c].begin) < static_cast<unsigned>(keys_[c].end - keys_[c].begin);
          if (!sees) { scores(c, r) = -INFINITY; }
          max_[c] = fmaxf(max_[c], scores(c, r));
        }
      }
      across_keys(max_, [](float a, float b) { return fmaxf(a, b); });
    };
    // Column maxima and scores -> P, in shared memory, and what O and the sums shrink by.
    auto const exponentiate = [&]() __attribute__((always_inline)) {
      turn_ ^= 1;
      auto scores = columns_view(tSrS);
      auto output = columns_view(output_);
      CUTE_UNROLL
      for (int c = 0; c < kColumnsPerThread; ++c) {
        float const offset = max_[c] == -INFINITY ? 0.0F : exponent(max_[c]);
        float const shrink = exp2_approx(exponent(before[c]) - offset);
        sum_[c] *= shrink;
        CUTE_UNROLL
        for (int r = 0; r < size<1>(output); ++r) { output(c, r) *= shrink; }
        CUTE_UNROLL
        for (int r = 0; r < size<1>(scores); ++r) {
          float const p = exp2_approx(scores(c, r) * params_.softmax.scale_log2 - offset);
          sum_[c] += p;
          sP(place_.column(c), place_.row(r), turn_) = Element(p);
        }
      }
      tma_store_fence();  // ordinary stores before the reads of WGMMA
      sync_warpgroup(0);
    };

    int n = work.range.end - 1;
    wait(read);
    gemm_async<GMMA::ScaleOut::Zero>(mma_qk, tSrK(_, _, _, read.slot), tSrQ, tSrS);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    release(read);
    ++read;
    update_max(n);
    exponentiate();
    for (--n; n >= work.range.begin; --n) {
      State const k = read;
      ++read;
      State const v = read;
      ++read;
      wait(k);
      gemm_async<GMMA::ScaleOut::Zero>(mma_qk, tSrK(_, _, _, k.slot), tSrQ, tSrS);  // S^T = K_n @ Q^T
      wait(v);
      gemm_async<GMMA::ScaleOut::One>(mma_pv, tOrV(_, _, _, v.slot), tOrP(_, _, _, turn_),
                                      output_);  // O^T += V_(n+1)^T @ P^T
      warpgroup_wait<1>();
      warpgroup_fence_operand(tSrS);
      release(k);
      update_max(n);
      warpgroup_wait<0>();
      warpgroup_fence_operand(output_);
      release(v);
      exponentiate();
    }
    after_scores();
    wait(read);
    gemm_async<GMMA::ScaleOut::One>(mma_pv, tOrV(_, _, _, read.slot), tOrP(_, _, _, turn_), output_);
    warpgroup_wait<0>();
    warpgroup_fence_operand(output_);
    release(read);
    ++read;
  }

  AttentionParams const& params_;
  SharedStorage& shared_;
  int thread_;
  ThreadColumns place_;
  Output output_;
  float max_[kColumnsPerThread];  // of the scores, unscaled
  float sum_[kColumnsPerThread];  // of this thread's keys until finish()
  KeyInterval keys_[kColumnsPerThread];
  int exchange_ = 0;
  int turn_ = 0;  // buffer of P
};

// Writes out and LSE of a tile, or the partial result of a part of it.
template <class Traits>
struct SwappedEpilogue {
  using Element = typename Traits::Element;
  using Mainloop = SwappedMainloop<Traits>;

  AttentionParams const& params;
  int thread;

  __device__ __forceinline__ void store(TileWork const& work, Mainloop& mainloop) const {
    ThreadColumns const place(thread);
    EpilogueParams const& p = params.epilogue;
    RowEnd ends[kColumnsPerThread];
    mainloop.finish(ends);
    auto const output = mainloop.output();
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      RowEnd end = ends[c];
      int const row = place.column(c);
      OutputRow const id = output_row(params, work, work.queries.first, row);
      if (!id.exists) { continue; }
      if (work.slot >= 0) {
        if (row >= p.partial.rows) { continue; }
        std::int64_t const index = static_cast<std::int64_t>(work.slot) * p.partial.rows + row;
        if (place.first_row == 0) { p.partial.lse[index] = end.lse(); }
        each_row(place, output, c, end, [&](int d, float value) { p.partial.out[index * p.head_dim_v + d] = value; });
        continue;
      }
      if (p.sinks != nullptr) { end = end_row(end.exponent, end.sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
      if (place.first_row == 0) { store_lse(params, work, id, end); }
      Element* const to = output_pointer<Element>(params, work, id);
      each_row(place, output, c, end, [&](int d, float value) { to[d] = Element(value); });
    }
  }

  // This CTA's part of the tile to the CTAs of its cluster.
  __device__ __forceinline__ void send(ClusterMerge<Traits> const& merge, Mainloop& mainloop, int rows) const {
    ThreadColumns const place(thread);
    RowEnd ends[kColumnsPerThread];
    mainloop.finish(ends);
    auto const output = mainloop.output();
    int const owner = place.first_row % 8 + thread / 32 * 8;
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; c += 2) {
      int const row = place.column(c);
      if (row >= rows) { continue; }
      if (owner < merge.parts()) {
        merge.send_lse(owner, row, rows, ends[c].lse());
        merge.send_lse(owner, row + 1, rows, ends[c + 1].lse());
      }
      CUTE_UNROLL
      for (int r = 0; r < size<1>(output); ++r) {
        merge.send_pair(row, place.row(r), rows, ends[c].scaled(output(c, r)), ends[c + 1].scaled(output(c + 1, r)));
      }
    }
  }

 private:
  template <class Output, class Store>
  __device__ __forceinline__ void each_row(ThreadColumns const& place, Output const& output, int c, RowEnd const& end,
                                           Store store) const {
    CUTE_UNROLL
    for (int r = 0; r < size<1>(output); ++r) {
      if (place.row(r) < params.epilogue.head_dim_v) { store(place.row(r), end.scaled(output(c, r))); }
    }
  }
};

}  // namespace hopper_attention
