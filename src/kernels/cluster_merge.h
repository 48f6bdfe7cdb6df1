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

// What the one consumer warpgroup of a tile of few queries does after its part.
template <class Traits>
class ClusterMerge {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;

  __device__ __forceinline__ ClusterMerge(AttentionParams const& params, SharedStorage& shared, int thread)
      : params_(params), shared_(shared), thread_(thread) {}

  __device__ __forceinline__ int parts() const { return params_.cluster.size; }
  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) % parts(); }
  __device__ __forceinline__ int columns() const { return Traits::kHeadDimV / parts(); }  // of an owner

  // All CTAs of the cluster come here for the same tile. `send(rows)` calls send_lse() and send_pair() for the tile's
  // rows, of which the swapped form has multiples of 8, divided by their sums and without the sink.
  template <class Send>
  __device__ __forceinline__ void operator()(TileWork const& work, Send send) {
    int const existing =
        min_of((work.queries.last + 1 - work.queries.first) * params_.packing.heads.divisor, Traits::kMergeRows);
    int const rows = Traits::kSwapped ? ceil_div(existing, 8) * 8 : existing;
    if (merged_ == 0) {
      cute::cluster_wait();  // the barriers of the others are set up
    } else {
      wait_until_read();
    }
    if (thread_ == 0) { expect_bytes(shared_.parts_full, parts() * rows * (columns() + 1) * sizeof(float)); }
    send(rows);
    wait_barrier_of_cluster(shared_.parts_full, merged_ & 1);
    merge(work, existing, rows);
    sync_warpgroup(0);
    if (thread_ < parts()) { arrive_in_cluster(shared_.parts_empty, thread_); }
    ++merged_;
  }

  // The LSE of a row, as an exponent of 2, to one of the owners.
  __device__ __forceinline__ void send_lse(int owner, int row, int rows, float lse) const {
    uint32_t const there = address_in_cluster(&shared_, owner);
    store_async(there + offset_of(shared_.parts_lse + rank() * rows + row), there + offset_of(&shared_.parts_full),
                lse);
  }

  // Two values that lie side by side: (row, column) and (row, column + 1), in the swapped form (row + 1, column).
  __device__ __forceinline__ void send_pair(int row, int column, int rows, float a, float b) const {
    int const owner = column * parts() / Traits::kHeadDimV;
    uint32_t const there = address_in_cluster(&shared_, owner);
    store_async(there + offset_of(received(rank(), row, column - owner * columns(), rows)),
                there + offset_of(&shared_.parts_full), a, b);
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
  __device__ __forceinline__ uint32_t offset_of(void const* member) const {
    return cute::cast_smem_ptr_to_uint(member) - cute::cast_smem_ptr_to_uint(&shared_);
  }

  __device__ __forceinline__ float* received(int part, int row, int column, int rows) const {
    int const within = Traits::kSwapped ? column * rows + row : row * columns() + column;
    return reinterpret_cast<float*>(shared_.o) + part * rows * columns() + within;
  }

  __device__ __forceinline__ void wait_until_read() const {
    wait_barrier_of_cluster(shared_.parts_empty, (merged_ - 1) & 1);
  }

  // Two columns of a row at a time, its parts in their order. There is an even number of parts.
  __device__ __forceinline__ void merge(TileWork const& work, int existing, int rows) const {
    EpilogueParams const& p = params_.epilogue;
    int const pairs = columns() / 2;
    CUTE_NO_UNROLL
    for (int i = thread_; i < existing * pairs; i += cutlass::NumThreadsPerWarpGroup) {
      int const row = i / pairs;
      int const column = (i - row * pairs) * 2;
      int const column_of_out = rank() * columns() + column;
      OutputRow const id = output_row(params_, work, work.queries.first, row);
      if (!id.exists || column_of_out >= p.head_dim_v) { continue; }
      float const* const lse = shared_.parts_lse + row;
      float top = -INFINITY;
      for (int part = 0; part < parts(); part += 2) {
        top = fmaxf(top, fmaxf(lse[part * rows], lse[(part + 1) * rows]));
      }
      float sum = 0.0F;
      float2 out{0.0F, 0.0F};
      auto const add = [&](int part) {
        float const weight = top == -INFINITY ? 0.0F : exp2_approx(lse[part * rows] - top);
        sum += weight;
        out.x += weight * *received(part, row, column, rows);
        out.y += weight * *received(part, row, column + 1, rows);
      };
      for (int part = 0; part < parts(); part += 2) {
        add(part);
        add(part + 1);
      }
      RowEnd end = end_row(top, sum);
      if (p.sinks != nullptr) { end = end_row(top, sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
      store_pair(params_, output_pointer<Element>(params_, work, id) + column_of_out, end.scaled(out.x),
                 end.scaled(out.y));
      if (column_of_out == 0) { store_lse(params_, work, id, end); }
    }
  }

  AttentionParams const& params_;
  SharedStorage& shared_;
  int thread_;
  int merged_ = 0;  // tiles
};

}  // namespace hopper_attention
