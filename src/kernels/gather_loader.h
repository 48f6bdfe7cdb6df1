// Producer warp: keys and values of small pages from global into shared memory, row by row.
#pragma once

#include "kernels/cute.h"

#include "kernels/page_ids.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_work.h"

namespace hopper_attention {

using namespace cute;

// Brings 16-byte pieces by cp.async where TMA would need a box for every few rows: 1,150 GB/s with pages of one key.
// Rows that no query of the tile sees, or whose page does not exist, are filled with zeros and not read, so that no
// values have to be hidden afterwards. All lanes of one warp.
//
// The hardware cannot announce these copies to WGMMA: this warp waits for them, fences, and arrives. Blocks are
// announced in the order of the ring, late enough that kInFlight of them are under way; but before the warp waits for
// others, they get everything that they may be waiting for.
template <class Traits>
class GatherLoader {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;

  __device__ __forceinline__ GatherLoader(LoadParams const& params, SharedStorage& shared, int lane)
      : params_(params), shared_(shared), lane_(lane) {}

  // Keys one block ahead of values, as TmaLoader does.
  __device__ __forceinline__ void load_keys_values(TileWork const& work) {
    BlockRange const range = work.range;
    Pages current = pages_of(work, range.end - 1);
    Pages next = pages_of(work, range.end - 2);
    load_k(work, range.end - 1, current);
    for (int n = range.end - 1; n > range.begin; --n) {
      Pages const ahead = pages_of(work, n - 2);  // long before they are needed
      load_k(work, n - 1, next);
      load_v(work, n, current);
      current = next;
      next = ahead;
    }
    load_v(work, range.begin, current);
  }

  // To be called before this warp waits for a barrier that others complete: announces blocks until it is.
  __device__ __forceinline__ void before_wait(uint64_t& barrier, uint32_t phase) {
    while (in_flight_ > 0 && !__all_sync(0xffffffff, test_barrier(barrier, phase))) { announce_oldest(); }
  }

  __device__ __forceinline__ void finish() {
    while (in_flight_ > 0) { announce_oldest(); }
  }

 private:
  using Pages = BlockPages<Traits::kKeys>;

  // How many groups of rows overlap their shuffles: more spill a producer's registers.
  static constexpr int kUnroll = Traits::kConsumerWarpgroups == 1                              ? 4
                                 : Traits::kConsumerWarpgroups == 2 && Traits::kHeadDim <= 192 ? 2
                                                                                               : 1;

  // The consumers work on the other slots.
  static constexpr int kInFlight = Traits::kStages / 2;

  __device__ __forceinline__ Pages pages_of(TileWork const& work, int n) const {
    return find_pages<Traits::kKeys>(params_.pages, work, n, lane_);
  }

  __device__ __forceinline__ void load_k(TileWork const& work, int n, Pages const& pages) {
    wait_for_slot();
    copy_block<Traits::kHeadDim, Traits::kSlabColumns>(params_.pages.k, work, n, pages);
    commit();
  }

  __device__ __forceinline__ void load_v(TileWork const& work, int n, Pages const& pages) {
    wait_for_slot();
    copy_block<Traits::kHeadDimV, Traits::kSlabColumnsV>(params_.pages.v, work, n, pages);
    commit();
  }

  __device__ __forceinline__ void wait_for_slot() {
    uint64_t& empty = shared_.empty[write_.slot];
    before_wait(empty, write_.phase ^ 1);
    wait_barrier(empty, write_.phase ^ 1);
  }

  __device__ __forceinline__ void commit() {
    cp_async_fence();
    ++write_;
    if (++in_flight_ > kInFlight) { announce_oldest(); }
  }

  __device__ __forceinline__ void announce_oldest() {
    wait_oldest();
    tma_store_fence();  // ordinary stores before the reads of WGMMA
    __syncwarp();
    if (lane_ == 0) { arrive_barrier(shared_.full[oldest_]); }
    oldest_ = oldest_ + 1 == Traits::kStages ? 0 : oldest_ + 1;
    --in_flight_;
  }

  // All but the youngest in_flight - 1 groups of this thread's copies: a number that the instruction must hold.
  template <int kYounger = kInFlight>
  __device__ __forceinline__ void wait_oldest() const {
    if (in_flight_ > kYounger) {
      cp_async_wait<kYounger>();
    } else if constexpr (kYounger > 0) {
      wait_oldest<kYounger - 1>();
    }
  }

  // Block n into the ring slot, column slab by column slab. A lane brings the same piece of every slab and row.
  template <int kColumns, int kSlabColumns>
  __device__ __forceinline__ void copy_block(RowSource const& source, TileWork const& work, int n, Pages const& pages) {
    constexpr int kPieceColumns = kPieceBytes / sizeof(Element);
    constexpr int kPieces = kSlabColumns / kPieceColumns;
    constexpr int kRows = 32 / kPieces;  // that the warp brings at once
    int const piece = lane_ % kPieces;
    int const row = lane_ / kPieces;
    int const columns = source.head_dim - piece * kPieceColumns;
    uint32_t const slot = cast_smem_ptr_to_uint(shared_.ring[write_.slot]);
    CUTE_UNROLL
    for (int i = 0; i < ceil_div(Traits::kKeys, 32); ++i) {
      auto const own_row = row_address(source, work, n, i * 32 + lane_, pages.id[i]);
      _Pragma("unroll kUnroll") for (int r = 0; r < min_of(32, Traits::kKeys - i * 32); r += kRows) {
        auto const address = __shfl_sync(0xffffffff, own_row, r + row);
        uint32_t const target =
            slot + (i * 32 + r + row) * kPieces * kPieceBytes + swizzled_piece(r + row, piece, kPieces) * kPieceBytes;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; c += kSlabColumns) {
          copy_piece(target + c * Traits::kKeys * sizeof(Element),
                     address + (c + piece * kPieceColumns) * sizeof(Element), address != 0 && c < columns);
        }
      }
    }
  }

  // Of row `row` of block n; 0 for a row that is not read.
  __device__ __forceinline__ unsigned long long row_address(RowSource const& source, TileWork const& work, int n,
                                                            int row, int page) const {
    PageParams const& p = params_.pages;
    if (page < 0 || page >= p.pages) { return 0; }
    int const row_of_page = p.size.remainder(work.sequence.k_row + work.first_key(n, Traits::kKeys) + row);
    return reinterpret_cast<unsigned long long>(static_cast<Element const*>(source.data) + page * source.stride_page +
                                                row_of_page * source.stride_row + work.head_k * source.stride_head);
  }

  // Zeros, without reading, where nothing exists.
  __device__ __forceinline__ static void copy_piece(uint32_t target, unsigned long long from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2, %3;\n" ::"r"(target), "l"(from), "n"(kPieceBytes),
                 "r"(exists ? kPieceBytes : 0)
                 : "memory");
  }

  LoadParams const& params_;
  SharedStorage& shared_;
  int lane_;
  RingState<Traits::kStages> write_;
  int oldest_ = 0;     // slot of the first block in flight
  int in_flight_ = 0;  // blocks
};

}  // namespace hopper_attention
