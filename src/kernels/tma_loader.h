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
  static constexpr uint64_t kHintKeys = Traits::kDecode ? kStream : kKeep;

  static constexpr int kBoxesAtOnce = 4;  // one by one, each would wait for the registers of the one before

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
    int page = page_of(work, range.end - 1);
    for (int n = range.end - 1; n >= range.begin - 1; --n) {
      if (n >= range.begin) {
        load_k(work, n, page, write);
        ++write;
      }
      if (n + 1 < range.end) {
        if (!paged()) { load_v(work, n + 1, page, write); }
        ++write;
      }
      page = page_of(work, n - 1);
    }
  }

  // Slots of the ring behind a tile's keys and values are for its O. The warp that loads keys hands them over to the
  // consumers, who wait for it: nobody else may wait for these slots, since they would go on without it, and it could
  // miss a pass of the ring.
  __device__ __forceinline__ void leave_output(State& write) const {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kOutputSlots; ++i, ++write) {
      wait_barrier(shared.empty[write.slot], write.phase ^ 1);
      if (lane == kActingLane) { arrive_barrier(shared.full[write.slot]); }
    }
  }

  // Zeroes the rows of V outside the keys that the tile sees: their probabilities are 0, but 0 x NaN is NaN. Called by
  // one warp, which walks the ring beside the loading warp; with pages it loads the values as well.
  __device__ __forceinline__ void finish_values(TileWork const& work, State& read, uint32_t& landed_phases) const {
    BlockRange const range = work.range;
    ++read;  // K of the last block
    if (!paged()) {
      for (int n = range.end - 1; n >= range.begin; --n) { hide(work, n, read, landed_phases); }
      return;
    }
    State hidden = read;  // how far rows are hidden, behind the loads
    State last = read;    // V of the last block
    int to_hide = range.end - 1;
    int next = page_of(work, range.end - 1);
    for (int n = range.end - 1; n >= range.begin; --n) {
      int const page = next;
      next = page_of(work, n - 1);
      if (n > range.begin) { ++read; }  // K n - 1
      // A slot may become free only when consumers have had the blocks before.
      while (to_hide > n && !__all_sync(0xffffffff, test_barrier(shared.empty[read.slot], read.phase ^ 1))) {
        hide(work, to_hide--, hidden, landed_phases);
      }
      load_v(work, n, page, read);
      last = read;
      ++read;
    }
    while (to_hide >= range.begin) { hide(work, to_hide--, hidden, landed_phases); }
    // The slots of O follow, for which this warp does not wait (see leave_output()). Until its last block has been
    // read, it could take a pass of the ring for the next; consumers cannot be a pass ahead, since they need its next
    // values.
    if constexpr (Traits::kOutputSlots > 0) { wait_barrier(shared.empty[last.slot], last.phase); }
  }

 private:
  __device__ __forceinline__ bool paged() const { return Traits::kPages && params.pages.table != nullptr; }

  // Page of the box of block n that this lane brings: a box has 8 keys or more, so that lanes have at most one. TMA
  // delivers zeros for a page that does not exist.
  __device__ __forceinline__ int page_of(TileWork const& work, int n) const {
    return paged() ? find_pages<Traits::kKeys>(params.pages, work, n, lane).id[0] : 0;
  }

  // Block n of V, whose slot follows `read`: hides its rows, if it has any to hide, and moves on to the next block.
  __device__ __forceinline__ void hide(TileWork const& work, int n, State& read, uint32_t& landed_phases) const {
    if (n > work.range.begin) { ++read; }  // K n - 1
    if (work.hides_rows(n, Traits::kKeys)) {
      wait_barrier(shared.landed[read.slot], landed_phases >> read.slot & 1);
      landed_phases ^= 1U << read.slot;
      KeyInterval const keep = work.rows_to_keep(n, Traits::kKeys);
      zero_rows(shared.ring[read.slot], 0, keep.begin);
      zero_rows(shared.ring[read.slot], keep.end, Traits::kKeys);
      tma_store_fence();  // ordinary stores before the reads of WGMMA
      __syncwarp();
      if (lane == kActingLane) { arrive_barrier(shared.full[read.slot]); }
    }
    ++read;
  }

  // Idle rows of a packed slab are not written; boxes of the tensor map hold whole queries.
  __device__ __forceinline__ uint32_t query_bytes() const {
    return params.query_rows * Traits::kHeadDim * static_cast<uint32_t>(sizeof(Element));
  }

  __device__ __forceinline__ void load_k(TileWork const& work, int n, int page, State const& write) const {
    wait_barrier(shared.empty[write.slot], write.phase ^ 1);
    uint64_t& arrival = shared.full[write.slot];
    if (lane == kActingLane) { expect_bytes(arrival, Traits::kBytesK); }
    __syncwarp();
    load_block<Traits::kHeadDim, Traits::kSlabColumns>(params.k, arrival, shared.ring[write.slot], work, n, page);
  }

  __device__ __forceinline__ void load_v(TileWork const& work, int n, int page, State const& write) const {
    wait_barrier(shared.empty[write.slot], write.phase ^ 1);
    uint64_t& arrival = work.hides_rows(n, Traits::kKeys) ? shared.landed[write.slot] : shared.full[write.slot];
    if (lane == kActingLane) { expect_bytes(arrival, Traits::kBytesV); }
    __syncwarp();
    load_block<Traits::kHeadDimV, Traits::kSlabColumnsV>(params.v, arrival, shared.ring[write.slot], work, n, page);
  }

  // Block n into a ring slot, column slab by column slab: one box of all keys, or one for each piece of a page.
  template <int kColumns, int kSlabColumns>
  __device__ __forceinline__ void load_block(CUtensorMap const& map, uint64_t& arrival, Element* slot,
                                             TileWork const& work, int n, int page) const {
    int const place = work.sequence.k_row + work.first_key(n, Traits::kKeys);
    if (!paged()) {
      if (lane == kActingLane) {
        CUTE_UNROLL
        for (int c = 0; c < kColumns; c += kSlabColumns) {
          SM90_TMA_LOAD_4D::copy(&map, &arrival, kHintKeys, slot + c * Traits::kKeys, c, place, work.head_k,
                                 work.sequence.k_batch);
        }
      }
      return;
    }
    // Box by box, with operands that are the same in all lanes: had each lane a box of its own, the hardware, which
    // takes them from registers of the warp, would look for the next lane before each box.
    PageParams const& p = params.pages;
    int const own_row = p.size.remainder(place + lane * p.box_keys);
    int const head = work.head_k;
    CUTE_NO_UNROLL
    for (int first = 0; first * p.box_keys < Traits::kKeys; first += kBoxesAtOnce) {
      int page_of_box[kBoxesAtOnce];
      int row[kBoxesAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kBoxesAtOnce; ++i) {
        page_of_box[i] = __shfl_sync(0xffffffff, page, first + i);
        row[i] = __shfl_sync(0xffffffff, own_row, first + i);
      }
      if (!cute::elect_one_sync()) { continue; }
      CUTE_UNROLL
      for (int i = 0; i < kBoxesAtOnce; ++i) {
        int const key = (first + i) * p.box_keys;
        if (key >= Traits::kKeys) { break; }
        CUTE_UNROLL
        for (int c = 0; c < kColumns; c += kSlabColumns) {
          SM90_TMA_LOAD_4D::copy(&map, &arrival, kHintKeys, slot + key * kSlabColumns + c * Traits::kKeys, c, row[i],
                                 head, page_of_box[i]);
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
