// Two CTAs of a cluster compute the keys of one tile: the second merges what the first has computed with its own part,
// in registers. A thread of one CTA holds the same rows and columns of O as that thread of the other one.
//
// Source of the method: FlashDecoding (Dao et al. 2023); distributed shared memory: CUDA C++ Programming Guide.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_memory.h"
#include "kernels/ring.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

// A consumer warpgroup's part in it. Both CTAs have set up their barriers.
template <class Traits>
class TileExchange {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Softmax = typename Traits::Softmax;

  __device__ __forceinline__ TileExchange(AttentionParams const& params, SharedStorage& shared, int warpgroup,
                                          int thread)
      : params_(params), shared_(shared), warpgroup_(warpgroup), thread_(thread) {}

  // To the second CTA, once it has read what was sent before.
  template <class Output>
  __device__ __forceinline__ void send(Softmax const& softmax, Output const& tOrO) {
    if (exchanged_ > 0) { wait_barrier_of_cluster(shared_.exchange.empty[warpgroup_], (exchanged_ - 1) & 1); }
    ++exchanged_;
    uint32_t const there = address_in_cluster(&shared_, kSecond);
    uint32_t const barrier = there + offset_in_shared(&shared_, &shared_.exchange.full[warpgroup_]);
    ThreadRows const rows(thread_, 0);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float const sum = softmax.sum_of_row(r, params_.softmax);
      if (rows.column == 0) {
        uint32_t const end = there + offset_in_shared(&shared_, &shared_.exchange.ends[warpgroup_][rows.row(r)]);
        store_async(end, barrier, softmax.row_max[r], sum);
      }
    }
    uint32_t const output = there + offset_in_shared(&shared_, &shared_.exchange.output[warpgroup_][0][thread_]);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kOutputVectors; ++i) {
      store_async(output + i * sizeof(shared_.exchange.output[0][0]), barrier,
                  {tOrO(4 * i), tOrO(4 * i + 1), tOrO(4 * i + 2), tOrO(4 * i + 3)});
    }
    sync_warpgroup(warpgroup_);  // no warp multiplies by Q any more
  }

  // What the first CTA has sent.
  template <class Output>
  __device__ __forceinline__ void take(Softmax& softmax, Output& tOrO) {
    constexpr int kBytes = sizeof(shared_.exchange.output[0]) + sizeof(shared_.exchange.ends[0]);
    if (thread_ == 0) { expect_bytes(shared_.exchange.full[warpgroup_], kBytes); }
    wait_barrier_of_cluster(shared_.exchange.full[warpgroup_], exchanged_ & 1);
    ++exchanged_;
    ThreadRows const rows(thread_, 0);
    float weight[kRowsPerThread];
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float2 const end = shared_.exchange.ends[warpgroup_][rows.row(r)];
      weight[r] = softmax.merge_row(r, end.x, rows.column == 0 ? end.y : 0.0F);
    }
    softmax.rescale_output(tOrO);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kOutputVectors; ++i) {
      float4 const part = shared_.exchange.output[warpgroup_][i][thread_];
      tOrO(4 * i) += weight[0] * part.x;
      tOrO(4 * i + 1) += weight[0] * part.y;
      tOrO(4 * i + 2) += weight[1] * part.z;
      tOrO(4 * i + 3) += weight[1] * part.w;
    }
    sync_warpgroup(warpgroup_);
    if (thread_ == 0) { arrive_in_cluster(shared_.exchange.empty[warpgroup_], kFirst); }
  }

  // The other CTA does not touch this one's shared memory any more: it may end. What the second CTA takes has arrived;
  // the first one is still told that it was read.
  __device__ __forceinline__ void finish(bool sends) const {
    if (sends && exchanged_ > 0) { wait_barrier_of_cluster(shared_.exchange.empty[warpgroup_], (exchanged_ - 1) & 1); }
  }

 private:
  static constexpr int kFirst = 0;  // CTA of the cluster
  static constexpr int kSecond = 1;

  AttentionParams const& params_;
  SharedStorage& shared_;
  int warpgroup_;
  int thread_;
  int exchanged_ = 0;  // tiles
};

}  // namespace hopper_attention
