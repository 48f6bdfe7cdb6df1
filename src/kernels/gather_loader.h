// Producer warps: keys and values of small pages from global into shared memory, row by row.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_work.h"

namespace hopper_attention {

using namespace cute;

// Pages of the rows of one block that this lane knows: row lane, lane + 32, ...
template <int kKeys>
struct BlockPages {
  int id[ceil_div(kKeys, 32)];
};

// -1 where the tile does not see the key or the table has no entry; other entries are what the table says, which need
// not be a page that exists. Called for blocks before the first one, too.
template <int kKeys>
__device__ __forceinline__ BlockPages<kKeys> find_pages(PageParams const& p, TileWork const& work, int n, int lane) {
  // Read once, not for each box: what is read from shared memory counts as changed after every barrier and copy.
  KeyInterval const seen = work.range.keys;
  int const first = work.first_key(n, kKeys);
  int const row = work.sequence.k_row + first;
  // By all lanes, also by those that bring no box (kActingLane).
  int const batch = static_cast<int const volatile&>(work.sequence.batch);
  int const* const table = p.table + batch * p.stride;
  bool const in_range = n >= work.range.begin;
  BlockPages<kKeys> pages;
  CUTE_UNROLL
  for (int i = 0; i < ceil_div(kKeys, 32); ++i) {
    int const box = (i * 32 + lane) * p.box_keys;
    int const key = first + box;
    int const index = p.size.quotient(row + box);
    pages.id[i] = -1;
    if (in_range && box < kKeys && key < seen.end && key + p.box_keys > seen.begin && index < p.width) {
      pages.id[i] = table[index];
    }
  }
  return pages;
}

// Brings 16-byte pieces by cp.async where TMA would need a box for every few rows: 1,150 GB/s with pages of one key.
// Rows that no query of the tile sees, or whose page does not exist, are filled with zeros and not read, so that no
// values have to be hidden afterwards. One warp loads the keys and another one the values.
//
// The hardware announces these copies, but not to WGMMA: when those of all lanes have arrived, landed[slot] is
// complete, and a third warp, which has no copies under way that its fence would wait for, announces the block.
template <class Traits>
class GatherLoader {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using State = RingState<Traits::kStages>;

  static constexpr int kArrivals = 32;  // that complete landed[slot]

  LoadParams const& params;
  SharedStorage& shared;
  int lane;

  // In the order of TmaLoader: keys one block ahead of values. All lanes of a warp.
  __device__ __forceinline__ void load_keys(TileWork const& work, State& write) const {
    int const last = work.range.end - 1;
    Pages next = pages_of(work, last);
    for (int n = last; n >= work.range.begin; --n) {
      Pages const pages = next;
      if constexpr (!Traits::kOneBlock) { next = pages_of(work, n - 1); }  // long before they are needed
      State const k = Order::k_alone(write, n == last);
      copy_block<Traits::kHeadDim, Traits::kSlabColumns>(params.pages.k, work, n, pages, k);
    }
    ++write;  // V of the first block
  }

  __device__ __forceinline__ void load_values(TileWork const& work, State& write) const {
    Pages next = pages_of(work, work.range.end - 1);
    ++write;  // K of the last block
    State v;
    for (int n = work.range.end - 1; n >= work.range.begin; --n) {
      Pages const pages = next;
      if constexpr (!Traits::kOneBlock) { next = pages_of(work, n - 1); }
      v = Order::v_alone(write, n == work.range.begin);
      copy_block<Traits::kHeadDimV, Traits::kSlabColumnsV>(params.pages.v, work, n, pages, v);
    }
    // As in TmaLoader::finish_values().
    if constexpr (Traits::kOutputSlots > 0) { wait_barrier(shared.empty[v.slot], v.phase); }
  }

  // By one lane of a warp that gathers nothing.
  __device__ __forceinline__ void announce(TileWork const& work, State& read, uint32_t& landed_phases) const {
    auto const announce_slot = [&](State const& at) {
      wait_barrier(shared.landed[at.slot], landed_phases >> at.slot & 1);
      landed_phases ^= 1U << at.slot;
      tma_store_fence();  // ordinary stores before the reads of WGMMA
      arrive_barrier(shared.full[at.slot]);
    };
    int const blocks = work.range.blocks();
    CUTE_NO_UNROLL
    for (int i = 0; i <= blocks; ++i) {  // steps
      if (i < blocks) { announce_slot(Order::k_of_step(read, i > 0)); }
      if (i > 0) { announce_slot(Order::v_of_step(read, i < blocks)); }
    }
  }

 private:
  using Order = typename Traits::Order;
  using Pages = BlockPages<Traits::kKeys>;

  // How many groups of rows overlap their shuffles: more spill a producer's registers. With all eight, the next
  // shuffles are under the copies before: one of 64 blocks reads 61 GB/s instead of 51, with head dim 128 and pages of
  // one key.
  static constexpr int kUnroll = Traits::kDecode && Traits::kProducerRegisters >= 96           ? 8
                                 : Traits::kDecode                                             ? 4
                                 : Traits::kConsumerWarpgroups == 2 && Traits::kHeadDim <= 192 ? 2
                                                                                               : 1;

  __device__ __forceinline__ Pages pages_of(TileWork const& work, int n) const {
    return find_pages<Traits::kKeys>(params.pages, work, n, lane);
  }

  // Block n into the ring slot, column slab by column slab. A lane brings the same piece of every slab and row.
  template <int kColumns, int kSlabColumns>
  __device__ __forceinline__ void copy_block(RowSource const& source, TileWork const& work, int n, Pages const& pages,
                                             State const& write) const {
    constexpr int kPieceColumns = kPieceBytes / sizeof(Element);
    constexpr int kPieces = kSlabColumns / kPieceColumns;
    constexpr int kRows = 32 / kPieces;  // that the warp brings at once
    int const piece = lane % kPieces;
    int const row = lane / kPieces;
    int const columns = source.head_dim - piece * kPieceColumns;
    int const first_byte = piece * kPieceBytes - kExists;
    auto const* const head = static_cast<Element const*>(source.data) + work.head_k * source.stride_head;
    int const first_row = work.sequence.k_row + work.first_key(n, Traits::kKeys) + lane;
    uint32_t const slot = cast_smem_ptr_to_uint(shared.slot(write.slot));
    wait_barrier(shared.empty[write.slot], write.phase ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < ceil_div(Traits::kKeys, 32); ++i) {
      auto const own_row = row_address(source, head, first_row + i * 32, pages.id[i]);
      _Pragma("unroll kUnroll") for (int r = 0; r < min_of(32, Traits::kKeys - i * 32); r += kRows) {
        auto const address = __shfl_sync(0xffffffff, own_row, r + row);
        bool const exists = static_cast<uint32_t>(address) != 0;
        uint32_t const target =
            slot + (i * 32 + r + row) * kPieces * kPieceBytes + swizzled_piece(r + row, piece, kPieces) * kPieceBytes;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; c += kSlabColumns) {
          copy_piece(target + c * Traits::kKeys * sizeof(Element), address + first_byte + c * sizeof(Element),
                     exists && c < columns);
        }
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(&shared.landed[write.slot]);
  }

  // Rows lie at multiples of 16 bytes: the address of a row that is read has this bit set; the lower half of any other
  // one is 0.
  static constexpr int kExists = 1;

  // Of the row at place `row` in its sequence's pages.
  __device__ __forceinline__ unsigned long long row_address(RowSource const& source, Element const* head, int row,
                                                            int page) const {
    PageParams const& p = params.pages;
    auto const address = reinterpret_cast<unsigned long long>(head) +
                         (page * source.stride_page + p.size.remainder(row) * source.stride_row) * sizeof(Element);
    return page >= 0 && page < p.pages ? address | kExists : 0;
  }

  // Zeros, without reading, where nothing exists.
  __device__ __forceinline__ static void copy_piece(uint32_t target, unsigned long long from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2, %3;\n" ::"r"(target), "l"(from), "n"(kPieceBytes),
                 "r"(exists ? kPieceBytes : 0)
                 : "memory");
  }
};

}  // namespace hopper_attention
