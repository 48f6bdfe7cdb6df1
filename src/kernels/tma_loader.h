// Producer warps: queries, keys and values from global into shared memory by TMA.
#pragma once

#include "kernels/cute.h"

#include "kernels/page_ids.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_work.h"

namespace hopper_attention {

using namespace cute;

template <class Traits>
struct TmaLoader {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using State = RingState<Traits::kStages>;

  static constexpr uint64_t kStream = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_FIRST);  // read by one tile
  static constexpr uint64_t kKeep = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);     // read by many tiles
  // Of single queries most keys are read once: 64 of them on 3.2k keys, 8/1 heads, 43 instead of 50 us.
  static constexpr uint64_t kHintKeys = Traits::kDecode || Traits::kMixed ? kStream : kKeep;

  // Of 16 keys: all of a block of 80. One by one, each would wait for the registers of the one before.
  static constexpr int kBoxesAtOnce = Traits::kKeys / 16 % 5 == 0 ? 5 : 4;

  LoadParams const& params;
  SharedStorage& shared;
  int lane;

  // One slab for each consumer warpgroup, as soon as that warpgroup has left its slab of the tile before.
  __device__ __forceinline__ void load_queries(TileWork const& work,
                                               RingState<Traits::kQueryBuffers> const& write) const {
    if (lane != kActingLane) { return; }
    Sequence const& sequence = work.sequence;
    CUTE_UNROLL
    for (int w = 0; w < Traits::kConsumerWarpgroups; ++w) {
      uint64_t& arrival = shared.q_full[write.slot][w];
      wait_barrier(shared.q_empty[write.slot][w], write.phase ^ 1);
      if (w > 0 && lies_behind(work, w, params.queries_per_slab)) {
        arrive_barrier(arrival);
        continue;
      }
      expect_bytes(arrival, query_bytes());
      int const row = sequence.q_row + work.queries.first + w * params.queries_per_slab;
      CUTE_UNROLL
      for (int c = 0; c < Traits::kHeadDim; c += Traits::kSlabColumns) {
        SM90_TMA_LOAD_5D::copy(&params.q, &arrival, kStream, shared.q[write.slot][w] + c * Traits::kQueryRows, c, 0,
                               row, work.head, sequence.q_batch);
      }
    }
  }

  // Keys one block ahead of values, so that S of block n - 1 starts under P V of block n. All lanes of a warp. With
  // pages the values are left to the warp that hides them: a block then is many boxes.
  __device__ __forceinline__ void load_keys_values(TileWork const& work, State& write) const {
    BlockRange const range = work.range;
    if (paged()) {
      Boxes boxes(params.pages, work, lane);
      for (int n = range.end; n > range.begin;) {
        boxes.look_ahead(n--);
        State const k = Order::k_alone(write, n + 1 == range.end);
        uint64_t& arrival = take_k_slot(k);
        boxes.reach(n);
        load_boxes<Traits::kHeadDim, Traits::kSlabColumns>(params.k, arrival, k, work.head_k, boxes);
      }
      ++write;  // V of the first block
      return;
    }
    for (int n = range.end - 1; n >= range.begin - 1; --n) {
      bool const has_k = n >= range.begin;
      bool const has_v = n + 1 < range.end;
      if (has_k) {
        State const k = Order::k_of_step(write, has_v);
        load_block<Traits::kHeadDim, Traits::kSlabColumns>(params.k, take_k_slot(k), k, work, n);
      }
      if (has_v) {
        State const v = Order::v_of_step(write, has_k);
        load_block<Traits::kHeadDimV, Traits::kSlabColumnsV>(params.v, take_v_slot(work, n + 1, v), v, work, n + 1);
      }
    }
  }

  // The kOutputSlots of the ring behind a tile's keys and values are for its O. The warp that loads keys hands them
  // over to the consumers, who wait for it: nobody else may wait for these slots, since they would go on without it,
  // and it could miss a pass of the ring.
  __device__ __forceinline__ void leave_output(State& write) const {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kOutputSlots; ++i, ++write) {
      wait_barrier(shared.empty[write.slot], write.phase ^ 1);
      if (lane == kActingLane) { arrive_barrier(shared.full[write.slot]); }
    }
  }

  // Zeroes the rows of V outside the keys that the tile sees, where they do not arrive so: their probabilities are 0,
  // but 0 x NaN is NaN. Called by one warp, which walks the ring beside the loading warp; with pages it loads the
  // values as well.
  __device__ __forceinline__ void finish_values(TileWork const& work, State& read, uint32_t& landed_phases) const {
    BlockRange const range = work.range;
    ++read;  // K of the last block
    if (!paged()) {
      for (int n = range.end - 1; n >= range.begin; --n) { hide(work, n, read, landed_phases); }
      return;
    }
    State hidden = read;  // how far rows are hidden, behind the loads
    State v;
    int to_hide = range.end - 1;
    Boxes boxes(params.pages, work, lane);
    for (int n = range.end; n > range.begin;) {
      boxes.look_ahead(n--);
      v = Order::v_alone(read, n == range.begin);
      // A slot may become free only when consumers have had the blocks before.
      while (to_hide > n && !__all_sync(0xffffffff, test_barrier(shared.empty[v.slot], v.phase ^ 1))) {
        hide(work, to_hide--, hidden, landed_phases);
      }
      uint64_t& arrival = take_v_slot(work, n, v);
      boxes.reach(n);
      load_boxes<Traits::kHeadDimV, Traits::kSlabColumnsV>(params.v, arrival, v, work.head_k, boxes);
    }
    while (to_hide >= range.begin) { hide(work, to_hide--, hidden, landed_phases); }
    // The slots of O follow, for which this warp does not wait (see leave_output()). Until its last block has been
    // read, it could take a pass of the ring for the next; consumers cannot be a pass ahead, since they need its next
    // values.
    if constexpr (Traits::kOutputSlots > 0) { wait_barrier(shared.empty[v.slot], v.phase); }
  }

 private:
  using Order = typename Traits::Order;
  using Boxes = BoxWindow<Traits::kKeys>;
  static_assert(!Traits::kPages || Traits::kKeys <= 128 || Traits::kOneBlock,
                "a window has at least two blocks, also of boxes of 8 keys, or the only one");

  __device__ __forceinline__ bool paged() const { return Traits::kPages && params.pages.table != nullptr; }

  // Block n of keys in memory of the sequence's own. It begins at the first key that the tile sees, or behind it.
  __device__ __forceinline__ ClippedBox box_of(TileWork const& work, int n) const {
    int const first = work.first_key(n, Traits::kKeys);
    return {work.sequence.k_row + first, work.range.keys.end - first, params.copies};
  }

  // Whether rows of block n that the tile must not see arrive as they are in memory.
  __device__ __forceinline__ bool hides_rows(TileWork const& work, int n) const {
    return paged() ? work.hides_rows_of_pages(n, Traits::kKeys) : !box_of(work, n).exact;
  }

  // Block n of V, whose slot follows `read`: hides its rows, if it has any to hide, and moves on to the next block.
  __device__ __forceinline__ void hide(TileWork const& work, int n, State& read, uint32_t& landed_phases) const {
    State const v = Order::v_alone(read, n == work.range.begin);
    if (hides_rows(work, n)) {
      wait_barrier(shared.landed[v.slot], landed_phases >> v.slot & 1);
      landed_phases ^= 1U << v.slot;
      KeyInterval const keep = work.rows_to_keep(n, Traits::kKeys);
      zero_rows(shared.slot(v.slot), 0, keep.begin);
      zero_rows(shared.slot(v.slot), keep.end, Traits::kKeys);
      tma_store_fence();  // ordinary stores before the reads of WGMMA
      __syncwarp();
      if (lane == kActingLane) { arrive_barrier(shared.full[v.slot]); }
    }
  }

  // Idle rows of a packed slab are not written; boxes of the tensor map hold whole queries.
  __device__ __forceinline__ uint32_t query_bytes() const {
    return params.query_rows * Traits::kHeadDim * static_cast<uint32_t>(sizeof(Element));
  }

  // The slot of the ring that block n of K or V goes to, once it is empty, and the barrier that its bytes arrive at.
  __device__ __forceinline__ uint64_t& take_k_slot(State const& write) const {
    return take_slot(write, shared.full[write.slot], Traits::kBytesK);
  }
  __device__ __forceinline__ uint64_t& take_v_slot(TileWork const& work, int n, State const& write) const {
    return take_slot(write, hides_rows(work, n) ? shared.landed[write.slot] : shared.full[write.slot], Traits::kBytesV);
  }
  __device__ __forceinline__ uint64_t& take_slot(State const& write, uint64_t& arrival, uint32_t bytes) const {
    wait_barrier(shared.empty[write.slot], write.phase ^ 1);
    if (lane == kActingLane) { expect_bytes(arrival, bytes); }
    __syncwarp();
    return arrival;
  }

  // Block n into a ring slot, column slab by column slab: a box each, of all keys up to the last that the tile sees.
  template <int kColumns, int kSlabColumns>
  __device__ __forceinline__ void load_block(CUtensorMap const& map, uint64_t& arrival, State const& write,
                                             TileWork const& work, int n) const {
    if (lane != kActingLane) { return; }
    Element* const slot = shared.slot(write.slot);
    ClippedBox const box = box_of(work, n);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += kSlabColumns) {
      SM90_TMA_LOAD_5D::copy(&map, &arrival, kHintKeys, slot + c * Traits::kKeys, c, box.y, box.x, work.head_k,
                             work.sequence.k_batch);
    }
  }

  // The block that `boxes` has reached: a box for each piece of a page and column slab.
  template <int kColumns, int kSlabColumns>
  __device__ __forceinline__ void load_boxes(CUtensorMap const& map, uint64_t& arrival, State const& write, int head,
                                             Boxes const& boxes) const {
    // Box by box, with operands that are the same in all lanes: had each lane a box of its own, the hardware, which
    // takes them from registers of the warp, would look for the next lane before each box.
    PageParams const& p = params.pages;
    Element* const slot = shared.slot(write.slot);
    CUTE_NO_UNROLL
    for (int first = 0; first < p.boxes; first += kBoxesAtOnce) {
      int page[kBoxesAtOnce];
      int row[kBoxesAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kBoxesAtOnce; ++i) {
        page[i] = boxes.page(first + i);
        row[i] = boxes.row(first + i);
      }
      if (!cute::elect_one_sync()) { continue; }
      CUTE_UNROLL
      for (int i = 0; i < kBoxesAtOnce; ++i) {
        if (first + i >= p.boxes) { break; }
        int const key = (first + i) * p.box_keys;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; c += kSlabColumns) {
          SM90_TMA_LOAD_4D::copy(&map, &arrival, kHintKeys, slot + key * kSlabColumns + c * Traits::kKeys, c, row[i],
                                 head, page[i]);
        }
      }
    }
  }

  // Rows [begin, end) of a block of V. The swizzle permutes 16-byte pieces within a row, so a row of zeros stays in
  // place.
  __device__ __forceinline__ void zero_rows(Element* block, int begin, int end) const {
    constexpr int kPieces = Traits::kSlabColumnsV * sizeof(Element) / kPieceBytes;
    auto* const pieces = reinterpret_cast<uint4*>(block);
    CUTE_NO_UNROLL
    for (int i = begin * kPieces + lane; i < end * kPieces; i += 32) {
      CUTE_UNROLL
      for (int slab = 0; slab < Traits::kHeadDimV / Traits::kSlabColumnsV; ++slab) {
        pieces[slab * kPieces * Traits::kKeys + i] = uint4{0, 0, 0, 0};
      }
    }
  }
};

}  // namespace hopper_attention
