// Parts of a tile that the CTAs of a cluster have computed -> out and LSE, without global memory in between. Each CTA
// owns some columns of the tile; every CTA writes its part of them into the owner's shared memory.
//
// Source of the method: FlashDecoding (Dao et al. 2023); distributed shared memory: CUDA C++ Programming Guide.
#pragma once

#include "kernels/cute.h"

#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

// Where `pointer` of this CTA's shared memory lies in that of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in_cluster(void const* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(cute::cast_smem_ptr_to_uint(pointer)), "r"(rank));
  return address;
}

// Stores whose bytes `barrier`, in the same CTA as `address`, counts.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float a) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(a),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float a, float b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(a), "f"(b), "r"(barrier)
               : "memory");
}

// wait_barrier() for what other CTAs of the cluster have written or read.
__device__ __forceinline__ void wait_barrier_of_cluster(uint64_t& barrier, uint32_t phase) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(cute::cast_smem_ptr_to_uint(&barrier)), "r"(phase)
        : "memory");
  }
}

__device__ __forceinline__ void arrive_in_cluster(uint64_t& barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in_cluster(&barrier, rank))
               : "memory");
}

// The one consumer warpgroup of a decode tile.
template <class Traits>
class ClusterMerge {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;

  __device__ __forceinline__ ClusterMerge(AttentionParams const& params, SharedStorage& shared, int thread)
      : params_(params), shared_(shared), thread_(thread) {}

  // `tOrO` and `softmax`: this CTA's part. All CTAs of the cluster come here for the same tile.
  template <class Output>
  __device__ __forceinline__ void operator()(TileWork const& work, typename Traits::Softmax const& softmax,
                                             Output const& tOrO) {
    int const rows =
        min_of((work.queries.last + 1 - work.queries.first) * params_.packing.heads.divisor, Traits::kMergeRows);
    if (merged_ == 0) {
      cute::cluster_wait();  // the barriers of the others are set up
    } else {
      wait_until_read();
    }
    if (thread_ == 0) { expect_bytes(shared_.parts_full, parts() * rows * (columns() + 1) * sizeof(float)); }
    send(rows, softmax, tOrO);
    wait_barrier_of_cluster(shared_.parts_full, merged_ & 1);
    merge(work, rows);
    sync_warpgroup(0);
    if (thread_ < parts()) { arrive_in_cluster(shared_.parts_empty, thread_); }
    ++merged_;
  }

  // Other CTAs do not touch this one's shared memory any more: it may end.
  __device__ __forceinline__ void finish() const {
    if (merged_ == 0) {
      cute::cluster_wait();
    } else {
      wait_until_read();
    }
  }

 private:
  __device__ __forceinline__ int parts() const { return params_.cluster.size; }
  __device__ __forceinline__ int columns() const { return Traits::kHeadDimV / parts(); }  // of an owner
  __device__ __forceinline__ float* received() const {                                    // (parts, rows, columns)
    return reinterpret_cast<float*>(Traits::output_slab(shared_, 0));
  }

  __device__ __forceinline__ void wait_until_read() const {
    wait_barrier_of_cluster(shared_.parts_empty, (merged_ - 1) & 1);
  }

  // Divided by the row sums; without the sink, which is taken once.
  template <class Output>
  __device__ __forceinline__ void send(int rows, typename Traits::Softmax const& softmax, Output const& tOrO) const {
    ThreadRows const mine(thread_, 0);
    int const rank = static_cast<int>(blockIdx.x) % parts();
    auto const output = rows_view(tOrO);
    auto const offset_of = [&](void const* member) {
      return cute::cast_smem_ptr_to_uint(member) - cute::cast_smem_ptr_to_uint(&shared_);
    };
    uint32_t const barrier = offset_of(&shared_.parts_full);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      RowEnd const end = end_row(softmax.seen(r) ? softmax.exponent(r) : -INFINITY, softmax.sum_of_row(r));
      int const row = mine.row(r);
      if (row >= rows) { continue; }
      int const place = rank * rows + row;
      for (int owner = thread_ % 4; owner < parts(); owner += 4) {
        uint32_t const there = address_in_cluster(&shared_, owner);
        store_async(there + offset_of(shared_.parts_lse + place), there + barrier, end.lse());
      }
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); c += 2) {
        int const column = mine.column + c / 2 * 8;
        int const owner = column * parts() / Traits::kHeadDimV;
        uint32_t const there = address_in_cluster(&shared_, owner);
        store_async(there + offset_of(received() + place * columns() + column - owner * columns()), there + barrier,
                    end.scaled(output(r, c)), end.scaled(output(r, c + 1)));
      }
    }
  }

  // Two columns of a row at a time, its parts in their order. There is an even number of parts.
  __device__ __forceinline__ void merge(TileWork const& work, int rows) const {
    EpilogueParams const& p = params_.epilogue;
    int const pairs = columns() / 2;
    int const first_column = static_cast<int>(blockIdx.x) % parts() * columns();
    CUTE_NO_UNROLL
    for (int i = thread_; i < rows * pairs; i += cutlass::NumThreadsPerWarpGroup) {
      int const row = i / pairs;
      int const column = first_column + (i - row * pairs) * 2;
      OutputRow const id = output_row(params_, work, work.queries.first, row);
      if (!id.exists || column >= p.head_dim_v) { continue; }
      float const* const lse = shared_.parts_lse + row;
      float const* const from = received() + row * columns() + column - first_column;
      float top = -INFINITY;
      for (int part = 0; part < parts(); part += 2) {
        top = fmaxf(top, fmaxf(lse[part * rows], lse[(part + 1) * rows]));
      }
      float sum = 0.0F;
      float2 out{0.0F, 0.0F};
      auto const add = [&](int part) {
        float const weight = top == -INFINITY ? 0.0F : exp2_approx(lse[part * rows] - top);
        float2 const value = *reinterpret_cast<float2 const*>(from + part * rows * columns());
        sum += weight;
        out.x += weight * value.x;
        out.y += weight * value.y;
      };
      for (int part = 0; part < parts(); part += 2) {
        add(part);
        add(part + 1);
      }
      RowEnd end = end_row(top, sum);
      if (p.sinks != nullptr) { end = end_row(top, sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
      store_pair(params_, output_pointer<Element>(params_, work, id) + column, end.scaled(out.x), end.scaled(out.y));
      if (column == 0) { store_lse(params_, work, id, end); }
    }
  }

  AttentionParams const& params_;
  SharedStorage& shared_;
  int thread_;
  int merged_ = 0;  // tiles
};

}  // namespace hopper_attention
