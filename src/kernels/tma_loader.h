// Producer warps: queries, keys and values from global into shared memory by TMA.
#pragma once

#include "kernels/cute.h"

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

  LoadParams const& params;
  SharedStorage& shared;

  // One slab for each consumer warpgroup, as soon as that warpgroup has left its slab of the tile before.
  __device__ __forceinline__ void load_queries(TileWork const& work, uint32_t phase) const {
    CUTE_UNROLL
    for (int w = 0; w < Traits::kConsumerWarpgroups; ++w) {
      wait_barrier(shared.q_empty[w], phase ^ 1);
      expect_bytes(shared.q_full[w], query_bytes());
      int const query = work.queries.first + w * work.queries_per_slab;
      CUTE_UNROLL
      for (int c = 0; c < Traits::kHeadDim; c += Traits::kSlabColumns) {
        SM90_TMA_LOAD_5D::copy(&params.q, &shared.q_full[w], kStream, shared.q[w] + c * kSlabRows, c, 0, query,
                               work.tile.head, work.tile.batch);
      }
    }
  }

  // Keys one block ahead of values, so that S of block n - 1 starts under P V of block n.
  __device__ __forceinline__ void load_keys_values(TileWork const& work, State& write) const {
    BlockRange const& range = work.range;
    load_k(work, range.end - 1, write);
    ++write;
    for (int n = range.end - 1; n > range.begin; --n) {
      load_k(work, n - 1, write);
      ++write;
      load_v(work, n, write);
      ++write;
    }
    load_v(work, range.begin, write);
    ++write;
  }

  // Zeroes the rows of V outside the keys that the tile sees: their probabilities are 0, but 0 x NaN is NaN. Called by
  // one warp, which walks the ring beside the loading warp.
  __device__ __forceinline__ void hide_values(TileWork const& work, State& read, uint32_t& landed_phases) const {
    BlockRange const& range = work.range;
    ++read;  // K of the last block
    for (int n = range.end - 1; n >= range.begin; --n) {
      if (n > range.begin) { ++read; }  // K n - 1
      if (work.hides_rows(n, Traits::kKeys)) {
        wait_barrier(shared.landed[read.slot], landed_phases >> read.slot & 1);
        landed_phases ^= 1U << read.slot;
        KeyInterval const keep = work.rows_to_keep(n, Traits::kKeys);
        zero_rows(shared.ring[read.slot], 0, keep.begin);
        zero_rows(shared.ring[read.slot], keep.end, Traits::kKeys);
        tma_store_fence();  // ordinary stores before the reads of WGMMA
        __syncwarp();
        if (threadIdx.x % 32 == 0) { arrive_barrier(shared.full[read.slot]); }
      }
      ++read;
    }
  }

 private:
  // Idle rows of a packed slab are not written; boxes of the tensor map hold whole queries.
  __device__ __forceinline__ uint32_t query_bytes() const {
    return params.query_rows * Traits::kHeadDim * static_cast<uint32_t>(sizeof(Element));
  }

  __device__ __forceinline__ void load_k(TileWork const& work, int n, State const& write) const {
    wait_barrier(shared.empty[write.slot], write.phase ^ 1);
    expect_bytes(shared.full[write.slot], Traits::kBytesK);
    CUTE_UNROLL
    for (int c = 0; c < Traits::kHeadDim; c += Traits::kSlabColumns) {
      SM90_TMA_LOAD_4D::copy(&params.k, &shared.full[write.slot], kKeep, shared.ring[write.slot] + c * Traits::kKeys, c,
                             work.first_key(n, Traits::kKeys), work.head_k, work.tile.batch);
    }
  }

  __device__ __forceinline__ void load_v(TileWork const& work, int n, State const& write) const {
    wait_barrier(shared.empty[write.slot], write.phase ^ 1);
    uint64_t& arrival = work.hides_rows(n, Traits::kKeys) ? shared.landed[write.slot] : shared.full[write.slot];
    expect_bytes(arrival, Traits::kBytesV);
    CUTE_UNROLL
    for (int c = 0; c < Traits::kHeadDimV; c += Traits::kSlabColumnsV) {
      SM90_TMA_LOAD_4D::copy(&params.v, &arrival, kKeep, shared.ring[write.slot] + c * Traits::kKeys, c,
                             work.first_key(n, Traits::kKeys), work.head_k, work.tile.batch);
    }
  }

  // Rows [begin, end) of a block of V. The swizzle permutes 16-byte pieces within a row, so a row of zeros stays in
  // place.
  __device__ __forceinline__ void zero_rows(Element* block, int begin, int end) const {
    constexpr int kPieces = Traits::kSlabColumnsV * sizeof(Element) / 16;
    for (int c = 0; c < Traits::kHeadDimV; c += Traits::kSlabColumnsV) {
      uint4* slab = reinterpret_cast<uint4*>(block + c * Traits::kKeys);
      for (int i = begin * kPieces + threadIdx.x % 32; i < end * kPieces; i += 32) { slab[i] = uint4{0, 0, 0, 0}; }
    }
  }
};

}  // namespace hopper_attention
