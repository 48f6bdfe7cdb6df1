// The consumer warpgroup of tiles with at most 32 query rows: S^T = K Q^T, online softmax down the columns, O^T += V^T
// P^T. The keys take the rows of the WGMMA and the queries its columns, of which there may be 16 or 32 instead of 64
// rows: with 16 a block takes a quarter of the instructions that a tile of 64 rows needs, and most of a short call is
// the time in which instructions arrive for the first time.
//
// Source of the method: operands swapped as in XQA (mha_sm90.cu of TensorRT-LLM and FlashInfer); the online softmax is
// that of softmax.h.
#pragma once

#include "kernels/cute.h"

#include "kernels/mainloop.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/softcap.h"
#include "kernels/softmax.h"
#include "kernels/thread_columns.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

// For one tile, of whose rows the first kRows may hold queries.
template <class Traits, int kRows>
class SwappedMainloop {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using State = RingState<Traits::kStages>;
  using MmaQk = typename Traits::template MmaQkOf<kRows>;
  using MmaPv = typename Traits::template MmaPvOf<kRows>;
  static constexpr int kColumns = columns_of_thread(kRows);
  static_assert(kRows <= Traits::kQueryRows && (kRows == 16 || kRows == 32));

  // O^T, without the division by the sums of its columns.
  using Output = decltype(partition_fragment_C(MmaPv{}, Shape<Int<Traits::kProductColumns>, Int<kRows>>{}));

  __device__ __forceinline__ SwappedMainloop(AttentionParams const& params, SharedStorage& shared, int thread)
      : params_(params), shared_(shared), thread_(thread), place_(thread) {}

  // Accumulates the key blocks of `work`, right to left, into output(); Q is in buffer `q_slot`. `after_scores` is
  // called as soon as no thread needs Q any more.
  template <class AfterScores>
  __device__ __forceinline__ void mma(TileWork const& work, int q_slot, State& read, AfterScores after_scores) {
    clear(output_);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      max_[c] = params_.softmax.lowest_score;
      sum_[c] = 0.0F;
    }
    if (work.range.empty()) {
      sync_warpgroup(0);  // all have seen Q arrive: its barrier must not run ahead of one that waits
      after_scores();
    } else if (Traits::kByIndex || Traits::kMixed || params_.softmax.softcap_inner == 0.0F) {
      all_blocks(work, q_slot, read, after_scores, false_type{});
    } else {
      all_blocks(work, q_slot, read, after_scores, true_type{});
    }
  }

  __device__ __forceinline__ auto output() { return columns_view<kColumns>(output_); }

  // What the thread's columns end with. All threads of the warpgroup, once for a tile; the caller syncs them before the
  // next one.
  __device__ __forceinline__ void finish(PartEnd (&ends)[kColumns]) {
    float4 warps[kColumns];
    across_keys(sum_, [](float a, float b) { return a + b; }, warps);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      float const sum = sum_with(max_[c], (warps[c].x + warps[c].y) + (warps[c].z + warps[c].w), params_.softmax);
      ends[c] = {exponent_with(exponent(max_[c]), sum), sum};
    }
  }

 private:
  // The log2 of what a column's sum and its O are to be multiplied by.
  __device__ __forceinline__ float exponent(float max) const {
    return exponent_of(max, params_.softmax.scale_log2, Traits::kHeadroom);
  }

  __device__ __forceinline__ void wait(State const& state) const {
    wait_barrier(shared_.full[state.slot], state.phase);
  }

  __device__ __forceinline__ void release(State const& state) const {
    if (thread_ % 32 == 0) { arrive_barrier(shared_.empty[state.slot]); }
  }

  // Combines each column's values over all lanes of a warp that hold some of it, and gives those of the four warps.
  // With every step a lane keeps half of the columns, until it has one. A caller syncs the warpgroup before the next
  // call.
  template <class Combine>
  __device__ __forceinline__ void across_keys(float const (&values)[kColumns], Combine combine,
                                              float4 (&warps)[kColumns]) {
    static_assert(kColumns <= 8 && cutlass::NumWarpsPerWarpGroup == 4);
    float own[kColumns];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) { own[c] = values[c]; }
    int column = 0;  // of the thread's, the first that this lane keeps
    int count = kColumns;
    CUTE_UNROLL
    for (int lanes = 16; lanes >= 4; lanes /= 2) {
      bool const upper = count > 1 && (thread_ & lanes) != 0;
      count = max_of(1, count / 2);
      if (upper) { column += count; }
      CUTE_UNROLL
      for (int c = 0; c < count; ++c) {
        float const other = own[lanes == 4 && kColumns == 4 ? c : c + count];
        float const theirs = __shfl_xor_sync(0xffffffff, upper ? own[c] : other, lanes);
        own[c] = combine(upper ? other : own[c], theirs);
      }
    }
    shared_.across_warps[place_.column(column)][thread_ / 32] = own[0];  // where lanes have the same, by both
    sync_warpgroup(0);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      warps[c] = *reinterpret_cast<float4 const*>(shared_.across_warps[place_.column(c)]);
    }
  }

  // The keys that the thread's columns see. Each lane finds those of one column.
  __device__ __forceinline__ void find_keys(TileWork const& work) {
    int const row = thread_ % kRows;
    KeyInterval const own =
        visible(params_.mask, work.queries.first + params_.packing.heads.quotient(row), work.sequence.len);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      keys_[c].begin = __shfl_sync(0xffffffff, own.begin, place_.column(c));
      keys_[c].end = __shfl_sync(0xffffffff, own.end, place_.column(c));
    }
  }

  template <class AfterScores, class Capped>
  __device__ __forceinline__ void all_blocks(TileWork const& work, int q_slot, State& read, AfterScores after_scores,
                                             Capped) {
    cute::Tensor sQ = local_tile(make_tensor(make_smem_ptr(shared_.q[q_slot][0]), typename Traits::LayoutQ{}),
                                 Shape<Int<kRows>, Int<Traits::kHeadDim>>{}, make_coord(_0{}, _0{}));  // (rows, D)
    cute::Tensor sK = make_tensor(make_smem_ptr(shared_.slot(0)), typename Traits::LayoutK{});    // (keys, D, slots)
    cute::Tensor sVt = make_tensor(make_smem_ptr(shared_.slot(0)), typename Traits::LayoutVt{});  // (Dv, keys, slots)
    cute::Tensor sP = make_tensor(make_smem_ptr(shared_.p[0]), Traits::template layout_p<kRows>());  // (rows, keys, 2)
    MmaQk mma_qk;
    MmaPv mma_pv;
    auto const thread_qk = mma_qk.get_thread_slice(thread_);
    auto const thread_pv = mma_pv.get_thread_slice(thread_);
    cute::Tensor tSrK = thread_qk.partition_fragment_A(sK);   // (MMA, keys / 64, D / 16, slots)
    cute::Tensor tSrQ = thread_qk.partition_fragment_B(sQ);   // (MMA, 1, D / 16)
    cute::Tensor tOrV = thread_pv.partition_fragment_A(sVt);  // (MMA, Dv / 64, keys / 16, slots)
    cute::Tensor tOrP = thread_pv.partition_fragment_B(sP);   // (MMA, 1, keys / 16, 2)
    cute::Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<Traits::kKeys>, Int<kRows>>{});  // (MMA, keys / 64, 1)
    cute::Tensor tSrX = make_tensor_like(tSrS);     // scores or probabilities of the block that is worked on
    auto scores = columns_view<kColumns>(tSrX);     // (columns of a thread, keys / 32)
    auto output = columns_view<kColumns>(output_);  // (columns of a thread, Dv / 32)

    TransposedRow const to(thread_);
    float shrink[kColumns];
    float offset[kColumns];
    // S of a block -> tSrX, -inf where a column does not see the key; column maxima, and what O and the sums shrink by.
    auto const update_max = [&](int first_key) __attribute__((always_inline)) {
      auto const from = columns_view<kColumns>(tSrS);
      float block[kColumns];
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
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
      float4 warps[kColumns];
      across_keys(block, [](float a, float b) { return fmaxf(a, b); }, warps);
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        float const before = max_[c];
        max_[c] = fmaxf(fmaxf(fmaxf(warps[c].x, warps[c].y), fmaxf(warps[c].z, warps[c].w)), before);
        offset[c] = exponent(max_[c]);
        shrink[c] = exp2_approx(exponent(before) - offset[c]);
      }
    };
    // Scores and maxima -> P, in shared memory; O and the sums shrink.
    auto const exponentiate = [&]() __attribute__((always_inline)) {
      turn_ ^= 1;
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
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
        store_transposed<Element, kColumns>(r, scores,
                                            [&](int c) { return &sP(to.row + c * 4, to.column + r / 2 * 64, turn_); });
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
  float max_[kColumns];  // of the scores, unscaled
  float sum_[kColumns];  // of this thread's keys until finish()
  KeyInterval keys_[kColumns];
  int turn_ = 0;  // buffer of P
};

}  // namespace hopper_attention
