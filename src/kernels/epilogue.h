// Consumer warpgroups: O / row sum and the log-sum-exp of one slab of query rows -> global memory.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

// The sink of query head `head` as an exponent of 2.
__device__ __forceinline__ float sink_log2(EpilogueParams const& params, int head) {
  float sink = 0.0F;
  switch (params.sinks_type) {
    case DataType::kBFloat16:
      sink = static_cast<cutlass::bfloat16_t const*>(params.sinks)[head];
      break;
    case DataType::kFloat16:
      sink = static_cast<cutlass::half_t const*>(params.sinks)[head];
      break;
    default:
      sink = static_cast<float const*>(params.sinks)[head];
  }
  return sink * kLog2e;
}

template <class Traits>
struct CollectiveEpilogue {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using Softmax = typename Traits::Softmax;

  PrefillParams const& params;
  SharedStorage& shared;
  int warpgroup;
  int thread;  // in the warpgroup

  // Divides by the row sums and writes out and LSE. The slab of `work` must not be read by the producers any more.
  template <class Output>
  __device__ __forceinline__ void store(TileWork const& work, Softmax& softmax, Output& tOrO) const {
    ThreadRows const rows(thread, work.queries.first + warpgroup * work.queries_per_slab);
    finalize(work, rows, softmax, tOrO);

    cute::Tensor tOrO_half = make_tensor<Element>(tOrO.layout());
    cutlass::NumericArrayConverter<Element, float, decltype(size(tOrO))::value> const round;
    *reinterpret_cast<cutlass::Array<Element, decltype(size(tOrO))::value>*>(tOrO_half.data()) =
        round(*reinterpret_cast<cutlass::Array<float, decltype(size(tOrO))::value> const*>(tOrO.data()));

    if (params.epilogue.out_by_tma) {
      store_by_tma(work, tOrO_half);
    } else {
      store_elements(work, rows, tOrO_half);
    }
  }

  // Whatever was stored from shared memory has been read; call before that memory is written again.
  __device__ __forceinline__ void wait_stores() const {
    if (thread == 0) { tma_store_wait<0>(); }
  }

 private:
  struct RowIdentity {
    int query;
    int head;
    bool exists;  // not past the last query, not an idle row of a packed slab
  };

  __device__ __forceinline__ RowIdentity identify(TileWork const& work, ThreadRows const& rows, int r) const {
    FastDivmod const& heads = params.packing.heads;
    int const query_in_slab = heads.quotient(rows.row(r));
    int const query = rows.first_query + query_in_slab;
    return {query, work.tile.head * heads.divisor + rows.row(r) - query_in_slab * heads.divisor,
            query < params.len.q && query_in_slab < work.queries_per_slab};
  }

  // A row that saw no key gives 0 and LSE -inf, with a sink 0 and the sink.
  template <class Output>
  __device__ __forceinline__ void finalize(TileWork const& work, ThreadRows const& rows, Softmax& softmax,
                                           Output& tOrO) const {
    auto output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float sum = softmax.row_sum[r];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      bool const empty = softmax.row_max[r] == -INFINITY;
      float exponent = empty ? -INFINITY : softmax.exponent(r);  // the LSE is exponent + log2(sum)
      RowIdentity const id = identify(work, rows, r);
      float scale = empty ? 0.0F : 1.0F / sum;
      if (params.epilogue.sinks != nullptr && id.exists) {
        float const sink = sink_log2(params.epilogue, id.head);
        float const top = fmaxf(exponent, sink);
        float const shrink =
            top == -INFINITY ? 0.0F : exp2f(exponent - top);  // exact also where the sink leaves next to nothing
        sum = sum * shrink + (top == -INFINITY ? 0.0F : exp2f(sink - top));
        scale = empty ? 0.0F : shrink / sum;
        exponent = top;
      }
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) { output(r, c) = empty ? 0.0F : output(r, c) * scale; }
      if (params.epilogue.lse != nullptr && id.exists && rows.column == 0) {
        int64_t const row =
            (static_cast<int64_t>(work.tile.batch) * params.epilogue.heads_q + id.head) * params.len.q + id.query;
        params.epilogue.lse[row] = exponent == -INFINITY ? -INFINITY : (exponent + log2f(sum)) * kLn2;
      }
    }
  }

  template <class Output>
  __device__ __forceinline__ void store_by_tma(TileWork const& work, Output& tOrO) const {
    Element* slab = Traits::output_slab(shared, warpgroup);
    cute::Tensor sO = make_tensor(make_smem_ptr(slab), typename Traits::LayoutO{});  // (64, Dv)
    auto const copy_atom = Copy_Atom<SM90_U32x4_STSM_N, Element>{};
    auto const tiled_copy = make_tiled_copy_C(copy_atom, typename Traits::MmaPv{});
    auto const thread_copy = tiled_copy.get_thread_slice(thread);
    cute::Tensor from = thread_copy.retile_S(tOrO);
    cute::Tensor to = thread_copy.partition_D(sO);

    wait_stores();
    sync_warpgroup(warpgroup);
    copy(tiled_copy, from, to);
    tma_store_fence();
    sync_warpgroup(warpgroup);
    if (thread == 0) {
      int const query = work.queries.first + warpgroup * work.queries_per_slab;
      CUTE_UNROLL
      for (int c = 0; c < Traits::kHeadDimV; c += Traits::kSlabColumnsV) {
        SM90_TMA_STORE_5D::copy(&params.epilogue.out, slab + c * kSlabRows, c, 0, query, work.tile.head,
                                work.tile.batch);
      }
      tma_store_arrive();
    }
  }

  // For outputs whose strides TMA cannot express.
  template <class Output>
  __device__ __forceinline__ void store_elements(TileWork const& work, ThreadRows const& rows, Output& tOrO) const {
    EpilogueParams const& p = params.epilogue;
    auto output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      RowIdentity const id = identify(work, rows, r);
      if (!id.exists) { continue; }
      Element* row = static_cast<Element*>(p.out_pointer) + work.tile.batch * p.out_stride_batch +
                     id.query * p.out_stride_row + id.head * p.out_stride_head;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) {
        int const column = rows.column + c / 2 * 8 + c % 2;
        if (column < p.head_dim_v) { row[column] = output(r, c); }
      }
    }
  }
};

}  // namespace hopper_attention
