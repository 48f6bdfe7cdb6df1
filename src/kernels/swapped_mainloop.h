// The consumer warpgroup of tiles with at most 16 query rows: S^T = K Q^T, online softmax down the columns, O^T += V^T
// P^T. The keys take the rows of the WGMMA and the queries its columns, of which there may be 16 instead of 64 rows: a
// block takes a quarter of the instructions that a tile of 64 rows needs, and most of a short call is the time in which
// instructions arrive for the first time.
//
// Source of the method: operands swapped as in XQA (mha_sm90.cu of TensorRT-LLM and FlashInfer); the online softmax is
// that of softmax.h.
#pragma once

#include "kernels/cute.h"

#include "kernels/mainloop.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/scores.h"
#include "kernels/softmax.h"
#include "kernels/thread_columns.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

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

  // Accumulates the key blocks of `work`, right to left, into output(); Q is in buffer `q_slot`. `after_scores` is
  // called as soon as no thread needs Q any more.
  template <class AfterScores>
  __device__ __forceinline__ void mma(TileWork const& work, int q_slot, State& read, AfterScores after_scores) {
    clear(output_);
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      max_[c] = params_.softmax.lowest_score;
      sum_[c] = 0.0F;
    }
    if (work.range.empty()) {
      sync_warpgroup(0);  // all have seen Q arrive: its barrier must not run ahead of one that waits
      after_scores();
    } else if (Traits::kByIndex || params_.softmax.softcap_inner == 0.0F) {
      all_blocks(work, q_slot, read, after_scores, false_type{});
    } else {
      all_blocks(work, q_slot, read, after_scores, true_type{});
    }
  }

  __device__ __forceinline__ auto output() { return columns_view(output_); }

  // What the thread's columns end with. All threads of the warpgroup, once for a tile; the caller syncs them before the
  // next one.
  __device__ __forceinline__ void finish(PartEnd (&ends)[kColumnsPerThread]) {
    float4 warps[kColumnsPerThread];
    across_keys(sum_, [](float a, float b) { return a + b; }, warps);
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      float const sum = sum_with(max_[c], (warps[c].x + warps[c].y) + (warps[c].z + warps[c].w), params_.softmax);
      ends[c] = {exponent_with(exponent(max_[c]), sum), sum};
    }
  }

 private:
  // The log2 of what a column's sum and its O are to be multiplied by.
  __device__ __forceinline__ float exponent(float max) const {
    return exponent_of(max, params_.softmax.scale_log2, Traits::Softmax::kHeadroomOf);
  }

  __device__ __forceinline__ void wait(State const& state) const {
    wait_barrier(shared_.full[state.slot], state.phase);
  }

  __device__ __forceinline__ void release(State const& state) const {
    if (thread_ % 32 == 0) { arrive_barrier(shared_.empty[state.slot]); }
  }

  // Combines each column's values over all lanes of a warp that hold some of it, and gives those of the four warps.
  // With every step a lane keeps half of the columns, so that the last one combines one value. A caller syncs the
  // warpgroup before the next call.
  template <class Combine>
  __device__ __forceinline__ void across_keys(float const (&values)[kColumnsPerThread], Combine combine,
                                              float4 (&warps)[kColumnsPerThread]) {
    static_assert(kColumnsPerThread == 4 && cutlass::NumWarpsPerWarpGroup == 4);
    auto const exchanged = [&](float mine, float theirs, int lanes) {
      return combine(mine, __shfl_xor_sync(0xffffffff, theirs, lanes));
    };
    bool const right = (thread_ & 16) != 0;
    float const first = exchanged(right ? values[2] : values[0], right ? values[0] : values[2], 16);
    float const second = exchanged(right ? values[3] : values[1], right ? values[1] : values[3], 16);
    bool const odd = (thread_ & 8) != 0;
    float own = exchanged(odd ? second : first, odd ? first : second, 8);
    own = exchanged(own, own, 4);
    shared_.across_warps[place_.column((right ? 2 : 0) + (odd ? 1 : 0))][thread_ / 32] = own;  // by two lanes
    sync_warpgroup(0);
    CUTE_UNROLL
    for (int c = 0; c < kColumnsPerThread; ++c) {
      warps[c] = *reinterpret_cast<float4 const*>(shared_.across_warps[place_.column(c)]);
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
  __device__ __forceinline__ void all_blocks(TileWork const& work, int q_slot, State& read, AfterScores after_scores,
                                             Capped) {
    cute::Tensor sQ = make_tensor(make_smem_ptr(shared_.q[q_slot][0]), typename Traits::LayoutQ{});  // (16, D)
    cute::Tensor sK = make_tensor(make_smem_ptr(shared_.slot(0)), typename Traits::LayoutK{});       // (keys, D, slots)
    cute::Tensor sVt = make_tensor(make_smem_ptr(shared_.slot(0)), typename Traits::LayoutVt{});  // (Dv, keys, slots)
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
    cute::Tensor tSrX = make_tensor_like(tSrS);  // scores or probabilities of the block that is worked on
    auto scores = columns_view(tSrX);            // (4, keys / 32)
    auto output = columns_view(output_);         // (4, Dv / 32)

    float shrink[kColumnsPerThread];
    float offset[kColumnsPerThread];
    // S of a block -> tSrX, -inf where a column does not see the key; column maxima, and what O and the sums shrink by.
    auto const update_max = [&](int first_key) __attribute__((always_inline)) {
      auto const from = columns_view(tSrS);
      float block[kColumnsPerThread];
      CUTE_UNROLL
      for (int c = 0; c < kColumnsPerThread; ++c) {
        unsigned const seen = static_cast<unsigned>(keys_[c].end - keys_[c].begin);
        int const first = first_key + place_.row(0) - keys_[c].begin;
        block[c] = -INFINITY;
        CUTE_UNROLL
        for (int r = 0; r < size<1>(scores); ++r) {
          float x = from(c, r);
          if constexpr (Capped{}) { x = softcapped(x, params_.softmax.softcap_inner); }
          scores(c, r) = static_cast<unsigned>(first + place_.row(r) - place_.row(0)) < seen ? x : -INFINITY;
          block[c] = fmaxf(block[c], scores(c, r));
        }
      }
      float4 warps[kColumnsPerThread];
      across_keys(block, [](float a, float b) { return fmaxf(a, b); }, warps);
      CUTE_UNROLL
      for (int c = 0; c < kColumnsPerThread; ++c) {
        float const before = max_[c];
        max_[c] = fmaxf(fmaxf(fmaxf(warps[c].x, warps[c].y), fmaxf(warps[c].z, warps[c].w)), before);
        offset[c] = exponent(max_[c]);
        shrink[c] = exp2_approx(exponent(before) - offset[c]);
      }
    };
    // Where this lane's row of the matrices that store_transposed() takes lies: they are (8 queries, 8 keys).
    int const p_row = thread_ % 8 + thread_ / 16 % 2 * 8;
    int const p_key = thread_ / 32 * 16 + thread_ / 8 % 2 * 8;
    // Scores and maxima -> P, in shared memory; O and the sums shrink.
    auto const exponentiate = [&]() __attribute__((always_inline)) {
      turn_ ^= 1;
      CUTE_UNROLL
      for (int c = 0; c < kColumnsPerThread; ++c) {
        CUTE_UNROLL
        for (int r = 0; r < size<1>(output); ++r) { output(c, r) *= shrink[c]; }
        sum_[c] *= shrink[c];
        CUTE_UNROLL
        for (int r = 0; r < size<1>(scores); ++r) {
          scores(c, r) = exp2_approx(scores(c, r) * params_.softmax.scale_log2 - offset[c]);
          sum_[c] += scores(c, r);
        }
      }
      CUTE_UNROLL
      for (int r = 0; r < size<1>(scores); r += 2) {
        uint32_t matrices[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          matrices[i] = packed_pair<Element>(scores(i / 2 * 2, r + i % 2), scores(i / 2 * 2 + 1, r + i % 2));
        }
        store_transposed(&sP(p_row, p_key + r / 2 * 64, turn_), matrices);
      }
      tma_store_fence();  // ordinary stores before the reads of WGMMA
      sync_warpgroup(0);
    };

    // The same in all lanes, as ptxas sees: descriptors of slots are then made by the uniform pipe.
    auto const uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    int const begin = uniform(work.range.begin);
    int const origin = uniform(work.range.origin);
    read.slot = uniform(read.slot);
    read.phase = uniform(static_cast<int>(read.phase));
    int n = uniform(work.range.end) - 1;
    wait(read);
    gemm_async<GMMA::ScaleOut::Zero>(mma_qk, tSrK(_, _, _, read.slot), tSrQ, tSrS);
    find_keys(work);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    release(read);
    ++read;
    update_max(origin + n * Traits::kKeys);
    // S of the next block runs under the exponentials of this one, O^T += V^T P^T of this one under the maxima of the
    // next. Nothing is under way from one turn to the next: ptxas would wait for each WGMMA.
    auto const multiply = [&]() __attribute__((always_inline)) {  // O^T += V_n^T @ P^T
      wait(read);
      gemm_async<GMMA::ScaleOut::One>(mma_pv, tOrV(_, _, _, read.slot), tOrP(_, _, _, turn_), output_);
    };
    auto const finish_multiply = [&](State const& v) __attribute__((always_inline)) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(output_);
      release(v);
    };
    for (; n > begin; --n) {
      State const k = read;
      wait(k);
      gemm_async<GMMA::ScaleOut::Zero>(mma_qk, tSrK(_, _, _, k.slot), tSrQ, tSrS);  // S^T = K_(n-1) @ Q^T
      exponentiate();
      ++read;
      multiply();
      warpgroup_wait<1>();
      warpgroup_fence_operand(tSrS);
      release(k);
      update_max(origin + (n - 1) * Traits::kKeys);
      finish_multiply(read);
      ++read;
    }
    exponentiate();
    after_scores();
    multiply();
    finish_multiply(read);
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
  int turn_ = 0;  // buffer of P
};

}  // namespace hopper_attention
