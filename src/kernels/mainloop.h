// Consumer warpgroups: S = Q K^T, online softmax, O += P V, for one slab of 64 query rows.
//
// Source of the schedule: FlashAttention-3 (Shah et al. 2024), sections 3.1 and 3.2, written anew.
#pragma once

#include "kernels/cute.h"

#include "kernels/capped_block.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/scores.h"
#include "kernels/softcap.h"
#include "kernels/softmax.h"
#include "kernels/tile_config.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

// Issues C = A B or C += A B over all steps of K, as one group of asynchronous WGMMAs. A may be in registers.
template <GMMA::ScaleOut kFirst, class Mma, class A, class B, class C>
__device__ __forceinline__ void gemm_async(Mma& mma, A const& a, B const& b, C& c) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = kFirst;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

// Ends the life of what an accumulator holds: its next product begins at 0, which the compiler does not see. Registers
// of S are then free for P and O.
template <class Accumulator>
__device__ __forceinline__ void forget(Accumulator& acc) {
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) { asm("" : "=f"(acc(i))); }
}

// What a block needs between S and the softmax. Kinds are types: a branch for each block, behind which softmax and the
// wait for O += P V are one basic block, has that wait in front of the softmax (0.90 of FlashAttention-3's speed
// instead of 1.0). OnlineSoftmax::finish_row() keeps it behind.
struct PlainBlock {
  static constexpr bool kCapped = false;  // softcap, before the mask
  static constexpr bool kMasked = false;  // not every row sees every key
};
struct MaskedBlock {
  static constexpr bool kCapped = false;
  static constexpr bool kMasked = true;
};
struct CappedBlock {
  static constexpr bool kCapped = true;
  static constexpr bool kMasked = false;
};
struct CappedMaskedBlock {
  static constexpr bool kCapped = true;
  static constexpr bool kMasked = true;
};

template <class Traits>
struct CollectiveMainloop {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using Softmax = typename Traits::Softmax;
  using State = RingState<Traits::kStages>;
  // The left half of a block, in steps of the product P V.
  static constexpr int kNarrowKeys = Traits::kDecode ? Traits::kKeys : ceil_div(Traits::kKeys, 32) * 16;
  // Registers for one reciprocal of four scores, and for a loop over capped blocks that are not masked.
  static constexpr bool kRoomForSoftcap = Traits::kHeadDimV <= 128;
  // Descriptors of Q are made anew for each block, where no registers are left to keep them.
  static constexpr bool kForgetsQueries = Traits::kCapsByPolynomial;

  AttentionParams const& params;
  SharedStorage& shared;
  int warpgroup;
  int thread;  // in the warpgroup
  Turns<Traits> turns;

  __device__ __forceinline__ void wait(State const& state) const { wait_barrier(shared.full[state.slot], state.phase); }

  __device__ __forceinline__ void release(State const& state) const {
    if (thread % 32 == 0) { arrive_barrier(shared.empty[state.slot]); }
  }

  // Blocks of the tile that this slab does not visit are taken from the ring and given back, slot by slot. Each takes
  // its turn, too, in a tile that is computed in turns.
  __device__ __forceinline__ void skip_slot(State& read) const {
    wait(read);
    __syncwarp();  // all lanes have waited, then one gives it back
    release(read);
    ++read;
  }
  __device__ __forceinline__ void skip_turn(auto in_turns) const {
    turns.wait(in_turns);
    turns.pass(in_turns);
  }
  // K of a block and V of the one to its right.
  __device__ __forceinline__ void skip_pairs(int count, auto in_turns, State& read) const {
    CUTE_NO_UNROLL
    for (; count > 0; --count) {
      skip_turn(in_turns);
      skip_slot(read);
      skip_slot(read);
    }
  }
  __device__ __forceinline__ void skip_tile(TileWork const& work, auto in_turns, State& read) const {
    skip_slot(read);
    skip_pairs(work.range.blocks() - 1, in_turns, read);
    skip_slot(read);
    if constexpr (Traits::kOneBlock) { skip_turn(in_turns); }
  }

  // Where O takes slots of the ring, they follow the tile's keys and values. This warpgroup's part of them, once nobody
  // reads what they held. With pairs O is in the slot of V, and that of K is given back at once.
  __device__ __forceinline__ Element* wait_output(State slots) const {
    Element* slab = nullptr;
    if constexpr (Traits::kPairs) { skip_slot(slots); }
    CUTE_UNROLL
    for (int i = 0; i < Traits::kSlotsOfO; ++i, ++slots) {
      wait(slots);
      if (warpgroup / Traits::kSlabsOfSlot == i) {
        slab = shared.slot(slots.slot) + warpgroup % Traits::kSlabsOfSlot * Traits::kSlabElementsO;
      }
    }
    return slab;
  }

  // Gives those with O back to the producers as soon as it has been read from them.
  __device__ __forceinline__ void release_output(State slots, bool taken) const {
    tma_store_wait<0>();
    if constexpr (Traits::kPairs) { ++slots; }
    CUTE_UNROLL
    for (int i = 0; i < Traits::kSlotsOfO; ++i, ++slots) {
      if (taken && thread % 32 == 0) { arrive_barrier(shared.empty[slots.slot]); }
    }
  }

  // The same at once, for a tile that has its O elsewhere.
  __device__ __forceinline__ void skip_output(State& read) const {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kOutputSlots; ++i) { skip_slot(read); }
  }

  // Issues S of the first block that the slab visits, and finds meanwhile what its rows see; blocks of the tile to the
  // right of it are skipped. Where the slab visits none, S is of what lies in the slots, and nobody uses it: a product
  // inside a branch would be waited for at the branch's end.
  template <class Scores>
  __device__ __forceinline__ ThreadKeys issue_first_scores(TileWork const& work, SlabRange const& slab, auto in_turns,
                                                           int buffer, State& read, Scores& tSrS) const {
    typename Traits::MmaQk mma_qk;
    auto const thread_qk = mma_qk.get_thread_slice(thread);
    ThreadRows rows = thread_rows(work);
    ThreadKeys seen(params.mask, work.sequence.len, params.packing, rows);
    if (!work.last && !slab.empty()) {
      if constexpr (Traits::kSkips) {
        if (int const blocks = work.range.end - slab.end; blocks > 0) {
          skip_slot(read);
          skip_pairs(blocks - 1, in_turns, read);
        }
      }
      wait(read);
    }
    seen.first_of_slab = first_key(work);
    gemm_async<GMMA::ScaleOut::Zero>(mma_qk, queries(thread_qk, buffer),
                                     keys(thread_qk, seen.first_of_slab)(_, _, _, read.slot), tSrS);
    asm volatile("" : "+r"(rows.first_query), "+r"(rows.slab_row));  // or the limits would be taken before the product
    seen.complete(params.mask, work.sequence.len, params.packing, rows);
    if constexpr (Traits::kCapsByPolynomial) { seen.hide_absent(params.packing, work.queries, rows); }
    return seen;
  }

  template <class Scores>
  __device__ __forceinline__ void wait_first_scores(Scores& tSrS) const {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
  }

  // Accumulates tOrO (64 x head_dim_v, unscaled) and the softmax state over the key blocks in `range`, the slab's part
  // of the tile's, right to left. The first block's scores must have been issued. `after_first` is called once they
  // have been used, `after_scores` as soon as Q is not needed any more.
  template <class Scores, class Output, class AfterFirst, class AfterScores>
  __device__ __forceinline__ void mma(TileWork const& work, SlabRange const& range, auto in_turns,
                                      ThreadKeys const& seen, int buffer, State& read, Softmax& softmax, Scores& tSrS,
                                      Output& tOrO, AfterFirst after_first, AfterScores after_scores) const {
    // (Dv, keys, slots)
    Element* const values = shared.slot(Traits::kPairs ? 1 : 0) + seen.first_of_slab * Traits::kSlabColumnsV;
    cute::Tensor sVt = make_tensor(make_smem_ptr(values), typename Traits::LayoutVt{});

    typename Traits::MmaQk mma_qk;
    typename Traits::MmaPv mma_pv;
    auto const thread_qk = mma_qk.get_thread_slice(thread);
    auto const thread_pv = mma_pv.get_thread_slice(thread);
    cute::Tensor tSrK = keys(thread_qk, seen.first_of_slab);      // (MMA, 1, D / 16, slots)
    cute::Tensor tOrV = thread_pv.partition_fragment_B(sVt);      // (MMA, 1, keys / 16, slots)
    cute::Tensor tOrP = make_tensor<Element>(operand_of_slab());  // (8, 1, keys / 16)

    ThreadRows const rows = thread_rows(work);

    // Scores of block n -> row maxima.
    auto const update_max = [&](auto& scores, int n, auto kind) __attribute__((always_inline)) {
      if constexpr (kind.kCapped) {
        apply_softcap<kRoomForSoftcap && !kind.kMasked ? 4 : 1>(scores, params.softmax.softcap_inner);
      }
      int const first_key = work.first_key(n, Traits::kKeys) + seen.first_of_slab;
      if constexpr (kind.kMasked && Traits::kOneBlock) {
        apply_mask_of_ends<8>(scores, seen, first_key, rows.column);
      } else if constexpr (kind.kMasked) {
        apply_mask(scores, seen, first_key + rows.column);
      }
      softmax.update_max(scores);
    };
    auto const convert = [&](auto& scores) __attribute__((always_inline)) {
      constexpr int kScores = decltype(size(scores))::value;
      constexpr int kAtOnce = kScores % 8 == 0 ? 8 : 4;  // values of a step of P V, or of half of one
      cutlass::NumericArrayConverter<Element, float, kAtOnce> const round;
      CUTE_UNROLL
      for (int i = 0; i < kScores; i += kAtOnce) {
        auto const& from = *reinterpret_cast<cutlass::Array<float, kAtOnce> const*>(&scores.data()[i]);
        *reinterpret_cast<cutlass::Array<Element, kAtOnce>*>(&tOrP.data()[i]) = round(from);
      }
      if constexpr (Traits::kOneBlock) {
        CUTE_UNROLL
        for (int i = kScores; i < size(tOrP); ++i) { tOrP.data()[i] = Element(0); }
      }
    };

    // The first block: nothing to overlap with yet.
    auto const start = [&](auto& scores, int n, auto kind) __attribute__((always_inline)) {
      update_max(scores, n, kind);
      softmax.template exponentiate<0, kRowsPerThread, true>(scores, softmax.scaled());
      convert(scores);
    };
    // At the diagonal and at the end of the keys, the rows of a warp often see no more than its left half.
    auto const start_masked = [&](int n, auto kind) __attribute__((always_inline)) {
      if constexpr (kNarrowKeys < Traits::kKeys) {
        int const end = max_of(seen.row[0].end, seen.row[1].end) - work.first_key(n, Traits::kKeys);
        if (__all_sync(0xffffffff, end <= kNarrowKeys)) {
          cute::Tensor left = leading_columns<kNarrowKeys>(tSrS);
          start(left, n, kind);
          CUTE_UNROLL
          for (int k = kNarrowKeys / 16; k < size<2>(tOrP); ++k) { clear(tOrP(_, _, k)); }
          return;
        }
      }
      start(tSrS, n, kind);
    };

    // P of the block -> tOrP, once O += P V of the block before has read it. `rows_done`: how many of the thread's rows
    // have their probabilities.
    auto const finish_block = [&](State const& v, auto rows_done,
                                  auto const& has_moved) __attribute__((always_inline)) {
      auto const rescale = [&]() __attribute__((always_inline)) {
        if (has_moved()) { softmax.rescale_output(tOrO); }
      };
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
      release(v);
      if constexpr (Traits::kRescalesSeldom) { rescale(); }
      softmax.template exponentiate<decltype(rows_done)::value, kRowsPerThread>(tSrS, softmax.scaled());
      convert(tSrS);
      if constexpr (!Traits::kRescalesSeldom) { rescale(); }
    };

    bool narrow = true;  // the form of the last capped block
    // S of block n is issued first; O += P V of block n + 1 runs under its softmax.
    auto const step = [&](int n, auto kind) __attribute__((always_inline)) {
      State const k = Traits::Order::k_of_step(read);
      State const v = Traits::Order::v_of_step(read);
      // Descriptors of Q in front of the turn: behind it they were 4 % of a step.
      int q_buffer = buffer;
      if constexpr (kForgetsQueries) { asm volatile("" : "+r"(q_buffer)); }
      cute::Tensor tSrQ = queries(thread_qk, q_buffer);  // (MMA, 1, D / 16)
      wait(k);
      turns.wait(in_turns);
      gemm_async<GMMA::ScaleOut::Zero>(mma_qk, tSrQ, tSrK(_, _, _, k.slot), tSrS);  // S = Q @ K_n.T
      wait(v);
      gemm_async<GMMA::ScaleOut::One>(mma_pv, tOrP, tOrV(_, _, _, v.slot), tOrO);  // O += P @ V_(n+1)
      turns.pass(in_turns);
      warpgroup_wait<1>();
      warpgroup_fence_operand(tSrS);
      release(k);
      if constexpr (kind.kCapped && !kind.kMasked && Traits::kCapsByPolynomial) {
        bool const moved = cap_and_exponentiate<kRoomForSoftcap ? 4 : 1>(softmax, tSrS, seen, params.softmax, narrow);
        finish_block(v, Int<kRowsPerThread>{}, [&]() { return moved; });
      } else {
        update_max(tSrS, n, kind);
        softmax.template exponentiate<0, Traits::kRowsUnderPv>(tSrS, softmax.scaled());
        if constexpr (Traits::kRowsUnderPv > 0) { softmax.finish_row(Traits::kRowsUnderPv - 1); }
        finish_block(v, Int<Traits::kRowsUnderPv>{}, [&]() { return !Traits::kRescalesSeldom || softmax.has_moved(); });
      }
    };

    bool const skips_blocks = Traits::kSkips && range.end < work.range.end;
    auto const all_blocks = [&](auto plain, auto masked) __attribute__((always_inline)) {
      int n = range.end - 1;
      if constexpr (Traits::kOneBlock) {
        forget(tOrO);
      } else {
        clear(tOrO);
      }
      release(read);
      ++read;
      if constexpr (Traits::kOneBlock) {
        turns.wait(in_turns);
        start(tSrS, n, masked);
        turns.pass(in_turns);
      } else if (Traits::kStartsPlain && range.full_begin <= n && n < range.full_end) {
        start(tSrS, n, plain);
      } else {
        start_masked(n, masked);
      }
      after_first();
      if (skips_blocks) {
        skip_turn(in_turns);
        skip_slot(read);
      }
      --n;
      if constexpr (Traits::kOneBlock) {
        return;
      } else if constexpr (is_same_v<decltype(plain), decltype(masked)>) {
        for (; n >= range.begin; --n) { step(n, masked); }
      } else {
        // The masked blocks at the right edge, those without a mask, and the masked ones at the left edge, with one
        // copy of the masked step.
        for (int masked_end = range.full_end;; masked_end = range.begin) {
          for (; n >= masked_end; --n) { step(n, masked); }
          if (n < range.begin) { break; }
          for (; n >= range.full_begin; --n) { step(n, plain); }
        }
      }
    };
    auto const capped_blocks = [&]() __attribute__((always_inline)) {
      constexpr bool kUnmasked = kRoomForSoftcap || Traits::kCapsByPolynomial;
      all_blocks(conditional_t<kUnmasked, CappedBlock, CappedMaskedBlock>{}, CappedMaskedBlock{});
    };
    constexpr Calls kCalls = Traits::kTile.calls;
    if constexpr (kCalls == Calls::kCapped) {
      capped_blocks();
    } else if constexpr (kCalls == Calls::kAll) {
      if (params.softmax.softcap_inner == 0.0F) {
        all_blocks(PlainBlock{}, MaskedBlock{});
      } else {
        capped_blocks();
      }
    } else {
      all_blocks(conditional_t<Traits::kMasksAll, MaskedBlock, PlainBlock>{}, MaskedBlock{});
    }

    after_scores();
    wait(read);
    constexpr auto kFirst = Traits::kOneBlock ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    gemm_async<kFirst>(mma_pv, tOrP, tOrV(_, _, _, read.slot), tOrO);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tOrO);
    release(read);
    ++read;
  }

 private:
  // P of a slab as first operand: 8 values of each step.
  __device__ __forceinline__ static constexpr auto operand_of_slab() {
    return Layout<Shape<Shape<_2, _2, _2>, _1, Int<Traits::kSlabSteps>>>{};
  }
  // In a tile's only block. It need not be where the pattern of the swizzle begins, which goes by addresses.
  __device__ __forceinline__ int first_key(TileWork const& work) const {
    if constexpr (Traits::kOneBlock) {
      int const query = work.queries.first + warpgroup * params.packing.queries_per_slab;
      return first_key_of_slab(work.range, params.mask, query, work.sequence.len,
                               Traits::kKeys - Traits::kKeysOfProduct);
    } else {
      return 0;
    }
  }
  __device__ __forceinline__ ThreadRows thread_rows(TileWork const& work) const {
    return {thread, work.queries.first + warpgroup * params.packing.queries_per_slab};
  }
  template <class ThreadMma>
  __device__ __forceinline__ auto queries(ThreadMma const& thread_qk, int buffer) const {
    return thread_qk.partition_fragment_A(
        make_tensor(make_smem_ptr(shared.q[buffer][warpgroup]), typename Traits::LayoutQ{}));  // (64, D)
  }
  template <class ThreadMma>
  __device__ __forceinline__ auto keys(ThreadMma const& thread_qk, int first) const {
    Element* const block = shared.slot(0) + first * Traits::kSlabColumns;
    return thread_qk.partition_fragment_B(
        make_tensor(make_smem_ptr(block), typename Traits::LayoutK{}));  // (keys, D, slots)
  }
};

}  // namespace hopper_attention
