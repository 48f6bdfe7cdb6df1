// Compile-time facts of one attention kernel: types, layouts, threads, registers, shared memory.
#pragma once

#include "kernels/cute.h"

#include "hopper_attention/types.h"
#include "kernels/cluster_tiles.h"
#include "kernels/few_tiles.h"
#include "kernels/guessed_work.h"
#include "kernels/left_part.h"
#include "kernels/paired_tiles.h"
#include "kernels/ring_order.h"
#include "kernels/softmax.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_work.h"
#include "kernels/wgmma_shapes.h"
#include "kernels/work_source.h"

namespace hopper_attention {

using namespace cute;

template <class Element_, TileConfig kTile_>
struct AttentionTraits {
  using Element = Element_;
  static constexpr TileConfig kTile = kTile_;

  static constexpr int kKeys = kTile.keys;
  static constexpr bool kOneBlock = has_one_block(kTile);
  static constexpr int kSlabKeys = keys_of_slab(kTile);
  static constexpr int kSlabSteps = steps_of_slab(kTile);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kHeadDimV = kTile.head_dim_v;
  static constexpr int kStages = kTile.stages;
  static constexpr int kSlabColumns = slab_columns(kHeadDim);
  static constexpr int kSlabColumnsV = slab_columns(kHeadDimV);

  // Few rows are the columns of S^T and O^T.
  static constexpr bool kSwapped = kTile.rows < kSlabRows;
  static constexpr int kQueryRows = kSwapped ? kTile.rows : kSlabRows;  // of a warpgroup
  static constexpr int kConsumerWarpgroups = kTile.rows / kQueryRows;
  static constexpr int kConsumerWarps = kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup;
  static constexpr int kThreads = (kConsumerWarpgroups + 1) * cutlass::NumThreadsPerWarpGroup;
  static constexpr bool kListed = kTile.calls != Calls::kDense;  // lengths on the device
  static constexpr bool kPages = kListed && kTile.calls != Calls::kWhole;
  static constexpr bool kByIndex = kTile.calls == Calls::kByIndex;
  static constexpr bool kGathers = kPages && !kByIndex;  // keys of pages that are too small for boxes
  static constexpr bool kDrawn = kListed && !kByIndex;   // CTAs may draw their tiles
  static constexpr bool kPaired = kTile.calls == Calls::kPaired;
  static constexpr bool kRanked = may_rank_tiles(kTile);
  static constexpr bool kMixed = is_mixed(kTile.calls);  // computes tiles of few rows as kernels for these do
  static constexpr bool kInParts = kTile.calls == Calls::kInParts;                    // that follow from the tile alone
  static constexpr bool kParts = kPages && !kPaired && kTile.calls != Calls::kUncut;  // of tiles

  // Registers of a thread after setmaxnreg; together at most what the CTA was launched with: 168 a thread for three
  // warpgroups, 128 for four or for two CTAs of two, 96 for five. The scheduler warp needs the producers'.
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 4   ? 112
                                            : kConsumerWarpgroups == 3 ? 160
                                            : kConsumerWarpgroups == 2 ? (kListed ? 232 : 240)
                                            : kTile.per_sm == 1        ? 240
                                            : kSwapped                 ? 160
                                                                       : 200;
  static constexpr int kProducerRegisters = kConsumerWarpgroups >= 3        ? 32
                                            : kConsumerWarpgroups == 2      ? (kListed ? 40 : 24)
                                            : kTile.per_sm == 1 || kSwapped ? 96
                                                                            : 56;

  // While one warpgroup computes exponentials, the others multiply.
  static constexpr bool kPingPong = kConsumerWarpgroups >= 2;
  // Two of four at a time, where a tile's only block leaves nothing to multiply meanwhile but other tiles': 0.92 of the
  // time with a window of 128, all in one cycle 0.96.
  static constexpr int kTurnCycles = kOneBlock && kConsumerWarpgroups == 4 ? 2 : 1;
  // Four warpgroups only where is_in_turns() says so: causal 256 tokens 0.89, 512 0.92, 2k 0.97 of the time. Three are
  // 3 to 5 % slower so.
  static constexpr bool kTurnsInSomeTiles = kConsumerWarpgroups == 4 && !kOneBlock;
  // O is rescaled only by warps in which the maximum of a row has moved (FlashAttention-4): 1.02 to 1.05 of the speed
  // with head dims from 128 on. With 64 there is so little of O that it costs as much as it saves, but where capped
  // blocks have voted on it anyway.
  static constexpr bool kRescalesSeldom = kHeadDimV > 64 && !kSwapped;

  // How far scores may exceed the maximum that is kept before it moves, in exponents of 2. The largest probability is
  // exactly 1 only where it has moved, so this bounds what one that is rounded weighs: with 8, one-hot queries and keys
  // of head dim 160 had 1.29 times the RMS error of plain PyTorch.
  // fp16 has no normal numbers below 2^-14: without headroom, small probabilities beside a large one would lose their
  // digits. The largest becomes 2^15, half of what fp16 holds. bf16 has the range of fp32.
  static constexpr bool kHalf = is_same_v<Element, cutlass::half_t>;
  static constexpr int kSlack = kRescalesSeldom || kTile.calls == Calls::kCapped ? 5 : 0;
  static constexpr int kHeadroom = kHalf ? 15 : 0;
  static constexpr BlockReductions kReductions{
      // With head dim 128 1.01 of the speed, with 256 as fast, with 64 0.99: a branch for rows without a score above 0.
      .max_by_integers = kHeadDimV > 64 && !kSwapped,
      // With head dim 64, where ptxas puts the rescaling of O behind the sums then, 0.975 of the speed.
      .sums_by_itself = kHeadDimV > 64,
      // Where blocks of head dim 64 follow, their loop has 0.985 of the speed then.
      .first_begins_sum = kHeadDimV > 64 || kOneBlock};
  using Softmax = OnlineSoftmax<kHeadroom - (kHalf ? kSlack : 0), kSlack, kReductions>;

  // Blocks that need no mask have softcap as a polynomial where their scores allow it.
  static constexpr bool kCapsByPolynomial = kTile.calls == Calls::kCapped;

  // A tile's first block without a mask has code of its own: full attention 1.03 of the speed at 512 tokens with head
  // dim 64; with 128 1.01, and causal 0.99.
  static constexpr bool kStartsPlain = kHeadDim <= 64 && !kOneBlock;

  // One copy of the step, which masks every block: with two beside the code for few rows, ptxas spills where heads are
  // widest.
  static constexpr bool kMasksAll = kMixed && kHeadDimV > 192;

  // How many of a thread's two rows of exponentials fit under O += P V; the others hide the rescaling of O and the
  // rounding of P. Figures in docs/performance-notes.md.
  static constexpr int kRowsUnderPv = kHeadDimV <= 64 ? 0 : kHeadDimV <= 128 ? 1 : 2;

  // Tiles for few queries: K and V are read by one tile of each head, O is stored from registers, and the CTAs of a
  // cluster may share a tile's keys.
  static constexpr bool kDecode = kConsumerWarpgroups == 1;
  static constexpr int kMergeRows = most_merge_rows(kTile);
  // Where columns of V are the rows of O^T, of which a WGMMA has 64, those behind the last are whatever lies behind its
  // slot, and nobody reads what becomes of them.
  static constexpr int kProductColumns = kSwapped ? ceil_div(kHeadDimV, kSlabRows) * kSlabRows : kHeadDimV;
  using ClusterTiles = conditional_t<kTile.rows == kMostSomeRows, SeveralTilesEach, OneTileEach>;

  // Slabs visit only what they see. In a square tile they would skip nothing, and finding that out takes 1 to 4 % of
  // the time at 512 tokens.
  static constexpr bool kSkips = slabs_skip_blocks(kTile);
  static_assert(kSkips || !kTurnsInSomeTiles, "is_in_turns() goes by what the first slab visits");

  template <int kColumns>
  using AtomK = conditional_t<kColumns == 64, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
  template <int kColumns>
  using AtomMn = conditional_t<kColumns == 64, GMMA::Layout_MN_SW128_Atom<Element>, GMMA::Layout_MN_SW64_Atom<Element>>;

  // kRows: of a tile that has them as columns.
  template <int kRows>
  static constexpr auto select_qk() {
    if constexpr (kRows < kSlabRows) {
      return GMMA::ss_op_selector<Element, Element, float, Shape<Int<kKeys>, Int<kRows>, Int<kHeadDim>>>();
    } else {
      return select_mma_qk<Element, kSlabKeys, kHeadDim>();
    }
  }
  template <int kRows>
  static constexpr auto select_pv() {
    if constexpr (kRows < kSlabRows) {
      return GMMA::ss_op_selector<Element, Element, float, Shape<Int<kProductColumns>, Int<kRows>, Int<kKeys>>,
                                  GMMA::Major::MN, GMMA::Major::K>();
    } else {
      return GMMA::rs_op_selector<Element, Element, float, Shape<Int<kSlabRows>, Int<kHeadDimV>, Int<kKeysOfStep>>,
                                  GMMA::Major::K, GMMA::Major::MN>();
    }
  }
  template <int kRows>
  using MmaQkOf = decltype(make_tiled_mma(select_qk<kRows>()));
  template <int kRows>
  using MmaPvOf = decltype(make_tiled_mma(select_pv<kRows>()));
  using MmaQk = MmaQkOf<kQueryRows>;
  using MmaPv = MmaPvOf<kQueryRows>;

  // A ring slot holds one block of K or of V. Where V is narrower, slots of two sizes leave room for more keys.
  static constexpr bool kPairs = !kDecode && kHeadDimV < kHeadDim;
  using Order = RingOrder<kPairs, kStages>;
  // Slabs behind a tile's last query compute nothing. skip_pairs() goes by slots in the order of steps.
  static constexpr bool kMayIdle = kConsumerWarpgroups > 1 && !kPairs;
  static constexpr int kElementsK = kKeys * kHeadDim;
  static constexpr int kElementsV = kKeys * kHeadDimV;
  static constexpr int kSlotElements = kPairs ? kElementsV : max_of(kElementsK, kElementsV);  // with pairs those of V
  static constexpr int kRingElements = kPairs ? kStages / 2 * (kElementsK + kElementsV) : kStages * kSlotElements;
  CUTE_HOST_DEVICE static constexpr int ring_offset(int slot) {
    return kPairs ? (slot >> 1) * (kElementsK + kElementsV) + (slot & 1) * kElementsK : slot * kSlotElements;
  }

  template <class Layout>
  CUTE_HOST_DEVICE static constexpr auto with_slots(Layout tile) {
    auto const slots = [] {
      if constexpr (kPairs) {
        return make_layout(Shape<_2, Int<kStages / 2>>{}, Stride<_0, Int<kElementsK + kElementsV>>{});
      } else {
        return make_layout(Int<kStages>{}, Int<kSlotElements>{});
      }
    }();
    return make_composed_layout(tile.layout_a(), tile.offset(), append(tile.layout_b(), slots));
  }

  using LayoutQ = decltype(tile_to_shape(AtomK<kSlabColumns>{}, Shape<Int<kQueryRows>, Int<kHeadDim>>{}));
  using LayoutO = decltype(tile_to_shape(AtomK<kSlabColumnsV>{}, Shape<Int<kSlabRows>, Int<kHeadDimV>>{}));
  // Of K and V, what a slab reads.
  static constexpr int kKeysOfProduct = kSlabSteps * kKeysOfStep;
  using LayoutK = decltype(with_slots(tile_to_shape(AtomK<kSlabColumns>{}, Shape<Int<kSlabKeys>, Int<kHeadDim>>{})));
  // V as an operand of P V: (kProductColumns, keys), keys first within a column slab, as TMA writes it.
  using LayoutVt = decltype(with_slots(
      tile_to_shape(AtomMn<kSlabColumnsV>{}, Shape<Int<kProductColumns>, Int<kKeysOfProduct>>{}, Step<_2, _1>{})));

  // P of a tile of few rows, as second operand of O^T = V^T P^T. Two take turns: while a fast warp writes the next one,
  // the product of a slow one may still read.
  template <int kRows>
  CUTE_HOST_DEVICE static constexpr auto layout_p() {
    auto const one = tile_to_shape(AtomK<64>{}, Shape<Int<kRows>, Int<kKeys>>{});
    return make_composed_layout(one.layout_a(), one.offset(),
                                append(one.layout_b(), make_layout(_2{}, Int<kRows * kKeys>{})));
  }
  static constexpr int kColumnRows = kSwapped ? kQueryRows : kMixed ? kMostFewRows : 0;  // of such a tile
  static constexpr int kElementsP = kColumnRows > 0 ? kColumnRows * kKeys : 8;

  static constexpr int kSlabElementsQ = kQueryRows * kHeadDim;
  // Decode has O in shared memory in float32 where a cluster merges it.
  static constexpr int kSlabElementsO = (kDecode ? 2 * kMergeRows : kSlabRows) * kHeadDimV;
  static constexpr int kBytesQ = kSlabElementsQ * sizeof(Element);
  static constexpr int kBytesK = kElementsK * sizeof(Element);
  static constexpr int kBytesV = kElementsV * sizeof(Element);

  static constexpr int kSharedLimit = 228 * 1024 / kTile.per_sm - 1024;
  static constexpr int kEndFloats = kSwapped ? 2 : 1;
  static constexpr int kEndsOfTile = kEndFloats * kQueryRows;
  static constexpr int kPartsEnds = kDecode ? kEndFloats * kMostCluster * kMergeRows : kMixed ? 2 * kColumnRows : 1;
  // Of O of a tile of few rows, on its way to memory: rows begin in different banks.
  static constexpr int kPitchO = kProductColumns + kPieceBytes / int(sizeof(Element));
  static constexpr int kElementsO = kDecode ? kSlabElementsO : kMixed ? kColumnRows * kPitchO : 8;
  static constexpr int kBytesOfColumns =  // but for O of decode
      kColumnRows == 0 ? 0 : 16 * kColumnRows + 4 * kElementsP + (kMixed ? kElementsO * int(sizeof(Element)) : 0);
  static constexpr int kBarrierBytes = kPartsEnds * 4 + (kSwapped ? 768 : 1024) + kBytesOfColumns;  // and work items
  // Where other CTAs of the cluster leave what their warps have of a tile: O as their threads hold it, in float32, and
  // maxima and sums of the rows.
  static constexpr int kOutputVectors = kSlabElementsO / (4 * cutlass::NumThreadsPerWarpGroup);  // of a thread
  struct PartOfWarp {
    float4 output[kOutputVectors][32];
    float2 ends[kRowsOfWarp];
  };
  struct ExchangeStorage {
    PartOfWarp parts[most_parts_of_owner(kConsumerWarps)];
    uint64_t full[kConsumerWarps];   // all parts of this warp's rows
    uint64_t empty[kConsumerWarps];  // their owner has read what this warp sent
  };
  struct NoExchange {};
  static constexpr int kExchangeBytes = kPaired ? int(sizeof(ExchangeStorage)) : 0;

  // Where there is room for a second Q, the next tile's is loaded early, and O takes the place of its tile's Q.
  // Elsewhere O takes slots of the ring, which the producers leave free in front of the next tile's keys. Tiles of a
  // cluster merge O in a buffer of its own.
  static constexpr bool kRoomForTwo = kConsumerWarpgroups * (kBytesQ + kSlabElementsO * int(sizeof(Element))) +
                                          kRingElements * int(sizeof(Element)) + kExchangeBytes + kBarrierBytes <=
                                      kSharedLimit;
  // Few rows: while a tile is computed, the next one's Q arrives.
  static constexpr bool kRoomForNextQ =
      kSwapped && 2 * kBytesQ + (kSlabElementsO + kRingElements) * int(sizeof(Element)) + kBarrierBytes <= kSharedLimit;
  static constexpr int kQueryBuffers = (kDecode ? kRoomForNextQ : kRoomForTwo) ? 2 : 1;
  static constexpr int kSlabsOfSlot = max_of(1, kSlotElements / kSlabElementsO);
  static constexpr int kSlotsOfO = kDecode || kQueryBuffers == 2 ? 0 : ceil_div(kConsumerWarpgroups, kSlabsOfSlot);
  static_assert(!kPairs || kSlotsOfO <= 1, "with pairs O takes one slot of V");
  static constexpr int kOutputSlots = kPairs ? 2 * kSlotsOfO : kSlotsOfO;  // that the ring moves on by
  // How many items the scheduler is ahead. Items of one query are short; items of dense calls are shared out
  // beforehand. Where CTAs draw their tiles, each one ahead is one that no other CTA can take: two, and three for tiles
  // so short that one is done before the next has been drawn and its keys have come (192x128: causal 512 1.03 of the
  // speed). The values' warp of paged keys may be no further ahead of the slots of O.
  static constexpr int kWorkSlots = kDecode || !kListed                                     ? 4
                                    : (kSkips || kOneBlock) && kOutputSlots == 0 && !kMixed ? 3
                                                                                            : 2;
  // Of the schedule, how many places are near at a time.
  static constexpr int kPlacesNear = kConsumerWarpgroups >= 3 ? 1 : 32;
  using Few = conditional_t<kTile.calls == Calls::kMixedMany, FewAlone, FewAsMany>;
  static constexpr bool kHasState = !kDecode && kListed && !kPaired;
  static constexpr int kBytesOfState = kHasState ? int(sizeof(WorkSourceState<kPlacesNear, Few>)) : 8;
  static constexpr int kBytesOfRanks = kPaired || kRanked ? kMostRankedSequences * int(sizeof(RankedSequence)) : 8;
  static constexpr int kBytesOfSource = kDecode ? 8 : max_of(kBytesOfState, kBytesOfRanks);
  // The first item is found while the kernel before still runs, from a copy of the schedule, by the scheduler warp if
  // it has registers for that. The copy lies in the place of P, or of the first keys.
  static constexpr bool kMayGuess = kDecode && !kByIndex && kProducerRegisters >= 96;
  // Elsewhere by another warp (publish_early()): the producers' of queries. In the kernel that has no other calls than
  // those of a schedule, the first of the consumers', whose instructions are the first to arrive: 0.92 of the time of
  // steps of 25 us, where the producers' has 0.97. In other kernels calls that guess nothing would take 1.09 so, since
  // what consumers do then begins 3,000 instructions later.
  static constexpr bool kGuessesEarly = kHasState;
  static constexpr bool kConsumerGuesses = kGuessesEarly && kMixed;
  static constexpr bool kCopyInRing = !kSwapped;
  static_assert(schedule_words(schedule_stride(kMostGuessedSequences)) * int(sizeof(int)) <=
                (kCopyInRing ? kRingElements : 2 * kElementsP) * int(sizeof(Element)));
  struct EarlyItem {
    uint64_t may_start;  // the kernel before has ended
    uint64_t known;      // whether the first item has been published
    bool published;
  };
  struct NoEarlyItem {};
  // Each role of the warps waits for the kernel before by itself.
  static constexpr bool kRolesStart = kDecode || kGuessesEarly;
  // Those that leave the parts of a tile merge them.
  static constexpr bool kMergesJointly = kDecode && !kByIndex && !kInParts;
  // The first scores of the next tile under the epilogue: 1.03 of the speed with head dim 64 at 512 tokens, 0.99 with
  // 128. Tiles of one block have no registers for it.
  static constexpr bool kScoresEarly = kQueryBuffers == 2 && kHeadDim <= 64 && !kMixed && !kOneBlock;

  struct SharedStorage {
    alignas(1024) Element ring[kRingElements];
    alignas(1024) Element q[kQueryBuffers][kConsumerWarpgroups][kSlabElementsQ];
    alignas(1024) Element o[kElementsO];
    alignas(kColumnRows > 0 ? 1024 : 16) Element p[2][kElementsP];
    uint64_t q_full[kQueryBuffers][kConsumerWarpgroups];
    uint64_t q_empty[kQueryBuffers][kConsumerWarpgroups];
    uint64_t full[kStages];    // a block of K or V can be read
    uint64_t empty[kStages];   // every consumer warp is done with it
    uint64_t landed[kStages];  // a block of V has arrived, but some of its rows are still to be hidden
    alignas(16) float across_warps[max_of(1, kColumnRows)][cutlass::NumWarpsPerWarpGroup];
    uint64_t loads_issued;  // all keys of a long item: the next may be drawn
    uint64_t parts_full;    // all CTAs of the cluster have sent their parts of this one's columns
    uint64_t parts_empty;   // and have merged theirs
    alignas(16) float parts_ends[kPartsEnds];
    TileWork work[kWorkSlots];
    SlabRange slabs[kSkips ? kWorkSlots : 1][kConsumerWarpgroups];
    int parts_left;                          // of left()
    alignas(8) char source[kBytesOfSource];  // what the scheduler warp remembers
    uint64_t work_full[kWorkSlots];
    uint64_t work_empty[kWorkSlots];  // every warp is done with it
    [[no_unique_address]] conditional_t<kPaired, ExchangeStorage, NoExchange> exchange;
    [[no_unique_address]] conditional_t<kGuessesEarly, EarlyItem, NoEarlyItem> early;

    __device__ __forceinline__ Element* slot(int index) { return ring + ring_offset(index); }
    // A CTA that leaves parts shares no tile with its cluster, so that ends are those of one tile.
    __device__ __forceinline__ LeftPart* left() { return reinterpret_cast<LeftPart*>(parts_ends + kEndsOfTile); }
    // Which nobody else touches before the first item is known.
    __device__ __forceinline__ int* schedule_copy() {
      if constexpr (kCopyInRing) {
        return reinterpret_cast<int*>(ring);
      } else {
        return reinterpret_cast<int*>(p);
      }
    }
  };

  static_assert(!kMergesJointly ||
                kEndsOfTile * sizeof(float) + kMostPartsLeft * sizeof(LeftPart) <= kPartsEnds * sizeof(float));
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kSharedLimit, "tile does not fit in shared memory");
  static_assert(kDecode || kHeadDimV <= kHeadDim, "O does not fit in the place of Q");
  static_assert(kOutputSlots == 0 || kSlabElementsO <= kSlotElements, "O of a warpgroup does not fit in a slot");
  static_assert(!kDecode || kRoomForTwo, "other CTAs write their parts while this one still reads Q");
  static_assert(!kPages || kOutputSlots == 0 || kWorkSlots == 2,
                "the warp that loads values would overwrite slots that the one of keys has not handed over");
  static_assert(!kMixed || (kKeys % kSlabRows == 0 && !kPairs), "its keys are rows of a WGMMA where queries are few");
  static_assert(!kMixed || kWorkSlots == 2, "the warpgroup that skips a tile is at most one item ahead");
  static_assert(!kPairs || !kSkips,
                "skip_pairs() and the V behind the first block that is visited go by slots in the "
                "order of steps");
  static_assert(kTile.rows % kQueryRows == 0 && kConsumerWarpgroups >= 1 && kConsumerWarpgroups <= 4);
  static_assert(!kOneBlock || (kHeadDim == kSlabColumns && kHeadDimV == kSlabColumnsV && !kMixed && !kDecode),
                "a slab's keys are rows behind each other");
  static_assert(kStages >= 4, "K n-1 and V n are in flight while K n and V n+1 are read");
};

}  // namespace hopper_attention
