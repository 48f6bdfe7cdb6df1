// The CTAs of a cluster compute the keys of one tile. Each merges the rows of some of its consumer warps, in registers,
// with what the same warps of the others send it: these hold the same rows and columns of O.
//
// Source of the method: FlashDecoding (Dao et al. 2023); distributed shared memory: CUDA C++ Programming Guide.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_memory.h"
#include "kernels/output_rows.h"
#include "kernels/paired_tiles.h"
#include "kernels/ring.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"

namespace hopper_attention {

using namespace cute;

// A consumer warpgroup's part in it. All CTAs have set up their barriers.
template <class Traits>
class TileExchange {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Softmax = typename Traits::Softmax;

  __device__ __forceinline__ TileExchange(AttentionParams const& params, SharedStorage& shared, int warpgroup)
      : params_(params),
        shared_(shared),
        warpgroup_(warpgroup),
        warp_(cutlass::canonical_warp_idx_sync() - cutlass::NumWarpsPerWarpGroup),
        lane_(static_cast<int>(threadIdx.x % 32)),
        rank_(static_cast<int>(block_rank_in_cluster())),
        owner_(ctas() - 1 - params.pairs.warps.quotient(warp_)) {}

  // All CTAs of the cluster come here for the same tile. Which rows of the warpgroup's slab this one now has for all
  // keys.
  template <class Output>
  __device__ __forceinline__ SlabRows operator()(Softmax& softmax, Output& tOrO) {
    if (owner_ == rank_) {
      take(softmax, tOrO);
    } else {
      send(softmax, tOrO);
    }
    ++exchanged_;
    int const first = (ctas() - 1 - rank_) * warps();
    return {row_of(first), row_of(first + warps())};
  }

  // Other CTAs do not touch this one's shared memory any more: it may end. What is taken has arrived; of what was sent
  // its owner still tells that it was read.
  __device__ __forceinline__ void finish() const {
    if (owner_ != rank_) { wait_until_read(); }
  }

 private:
  __device__ __forceinline__ int ctas() const { return params_.pairs.size.ctas.divisor; }
  __device__ __forceinline__ int warps() const { return params_.pairs.warps.divisor; }  // of an owner

  // In the slab, of the first row of a warp.
  __device__ __forceinline__ int row_of(int warp) const {
    int const in_slab = warp - warpgroup_ * cutlass::NumWarpsPerWarpGroup;
    return clamped(in_slab, 0, cutlass::NumWarpsPerWarpGroup) * kRowsOfWarp;
  }

  // Where what `sender` has of the rows of this warp lies in the shared memory of their owner.
  __device__ __forceinline__ int place_of(int sender) const {
    int const others_before = sender < owner_ ? sender : sender - 1;
    return others_before * warps() + params_.pairs.warps.remainder(warp_);
  }

  __device__ __forceinline__ void wait_until_read() const {
    if (exchanged_ > 0) { wait_barrier_of_cluster(shared_.exchange.empty[warp_], (exchanged_ - 1) & 1); }
  }

  template <class Output>
  __device__ __forceinline__ void send(Softmax const& softmax, Output const& tOrO) const {
    wait_until_read();
    uint32_t const there = address_in_cluster(&shared_, owner_);
    uint32_t const barrier = there + offset_in_shared(&shared_, &shared_.exchange.full[warp_]);
    auto& place = shared_.exchange.parts[place_of(rank_)];
    ThreadRows const rows(lane_, 0);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float const sum = softmax.sum_of_row(r, params_.softmax);
      if (rows.column == 0) {
        store_async(there + offset_in_shared(&shared_, &place.ends[rows.row(r)]), barrier, softmax.row_max[r], sum);
      }
    }
    uint32_t const output = there + offset_in_shared(&shared_, &place.output[0][lane_]);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kOutputVectors; ++i) {
      store_async(output + i * sizeof(place.output[0]), barrier,
                  {tOrO(4 * i), tOrO(4 * i + 1), tOrO(4 * i + 2), tOrO(4 * i + 3)});
    }
  }

  template <class Output>
  __device__ __forceinline__ void take(Softmax& softmax, Output& tOrO) const {
    int const others = ctas() - 1;
    if (lane_ == 0) { expect_bytes(shared_.exchange.full[warp_], others * sizeof(shared_.exchange.parts[0])); }
    wait_barrier_of_cluster(shared_.exchange.full[warp_], exchanged_ & 1);
    ThreadRows const rows(lane_, 0);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float top = softmax.row_max[r];
      CUTE_NO_UNROLL
      for (int i = 0; i < others; ++i) { top = fmaxf(top, place_of_other(i).ends[rows.row(r)].x); }
      softmax.raise_max(r, top);
    }
    softmax.rescale_output(tOrO);
    CUTE_NO_UNROLL
    for (int i = 0; i < others; ++i) {
      auto const& place = place_of_other(i);
      float weight[kRowsPerThread];
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) {
        float2 const end = place.ends[rows.row(r)];
        weight[r] = softmax.weight(r, end.x);
        softmax.row_sum[r] += rows.column == 0 ? weight[r] * end.y : 0.0F;
      }
      CUTE_UNROLL
      for (int v = 0; v < Traits::kOutputVectors; ++v) {
        float4 const part = place.output[v][lane_];
        tOrO(4 * v) += weight[0] * part.x;
        tOrO(4 * v + 1) += weight[0] * part.y;
        tOrO(4 * v + 2) += weight[1] * part.z;
        tOrO(4 * v + 3) += weight[1] * part.w;
      }
    }
    __syncwarp();
    if (lane_ < ctas() && lane_ != rank_) { arrive_in_cluster(shared_.exchange.empty[warp_], lane_); }
  }

  // Of the CTAs but this one, its owner.
  __device__ __forceinline__ auto const& place_of_other(int i) const {
    return shared_.exchange.parts[place_of(i < rank_ ? i : i + 1)];
  }

  AttentionParams const& params_;
  SharedStorage& shared_;
  int warpgroup_;
  int warp_;  // of the CTA's consumers
  int lane_;
  int rank_;           // in the cluster
  int owner_;          // of the rows of this warp
  int exchanged_ = 0;  // tiles
};

}  // namespace hopper_attention
