// Consumer warpgroups: O / row sum and the log-sum-exp of one slab of query rows -> global memory.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/sink.h"
#include "kernels/softmax.h"
#include "kernels/thread_rows.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

template <class Traits>
struct CollectiveEpilogue {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using Softmax = typename Traits::Softmax;

  AttentionParams const& params;
  SharedStorage& shared;
  int warpgroup;
  int thread;  // in the warpgroup

  // Divides by the row sums and writes out and LSE, or the partial result of a part of a tile. The slab of `work` must
  // not be read by the producers any more.
  template <class Output>
  __device__ __forceinline__ void store(TileWork const& work, Softmax& softmax, Output& tOrO) const {
    ThreadRows const rows(thread, work.queries.first + warpgroup * params.packing.queries_per_slab);
    if (work.slot >= 0) {
      finalize(work, rows, softmax, tOrO, true_type{});
      store_partial(work, rows, tOrO);
      return;
    }
    finalize(work, rows, softmax, tOrO, false_type{});

    cute::Tensor tOrO_half = make_tensor<Element>(tOrO.layout());
    cutlass::NumericArrayConverter<Element, float, decltype(size(tOrO))::value> const round;
    *reinterpret_cast<cutlass::Array<Element, decltype(size(tOrO))::value>*>(tOrO_half.data()) =
        round(*reinterpret_cast<cutlass::Array<float, decltype(size(tOrO))::value> const*>(tOrO.data()));
    store_rows(work, rows, tOrO_half);
  }

  // Whatever was stored from shared memory has been read; call before that memory is written again.
  __device__ __forceinline__ void wait_stores() const {
    if (thread == 0) { tma_store_wait<0>(); }
  }

 private:
  struct RowIdentity {
    int row;  // of q, out and LSE
    int head;
    bool exists;  // not past the last query, not an idle row of a packed slab
  };

  __device__ __forceinline__ RowIdentity identify(TileWork const& work, ThreadRows const& rows, int slab_row) const {
    FastDivmod const& heads = params.packing.heads;
    int const query_in_slab = heads.quotient(slab_row);
    int const query = rows.first_query + query_in_slab;
    int const row = work.sequence.q_row + query;
    bool const exists =
        query < work.sequence.len.q && query_in_slab < params.packing.queries_per_slab && row < params.epilogue.rows;
    return {row, work.head * heads.divisor + slab_row - query_in_slab * heads.divisor, exists};
  }

  // A row that saw no key gives 0 and LSE -inf, with a sink 0 and the sink. A part leaves the sink to the combine
  // kernel.
  template <class Output, class IsPart>
  __device__ __forceinline__ void finalize(TileWork const& work, ThreadRows const& rows, Softmax& softmax, Output& tOrO,
                                           IsPart is_part) const {
    EpilogueParams const& p = params.epilogue;
    auto output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float sum = softmax.row_sum[r];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      bool const empty = softmax.row_max[r] == -INFINITY;
      float exponent = empty ? -INFINITY : softmax.exponent(r);  // the LSE is exponent + log2(sum)
      RowIdentity const id = identify(work, rows, rows.row(r));
      float scale = empty ? 0.0F : 1.0F / sum;
      if (!is_part && p.sinks != nullptr && id.exists) {
        float const sink = sink_log2(p.sinks, p.sinks_type, id.head);
        float const top = fmaxf(exponent, sink);
        float const shrink =
            top == -INFINITY ? 0.0F : exp2f(exponent - top);  // exact also where the sink leaves next to nothing
        sum = sum * shrink + (top == -INFINITY ? 0.0F : exp2f(sink - top));
        scale = empty ? 0.0F : shrink / sum;
        exponent = top;
      }
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) { output(r, c) = empty ? 0.0F : output(r, c) * scale; }
      if (!id.exists || rows.column != 0) { continue; }
      float const lse = exponent == -INFINITY ? -INFINITY : exponent + log2f(sum);
      if constexpr (is_part) {
        if (partial_row(r, rows) < p.partial.rows) { p.partial.lse[partial_index(work, r, rows)] = lse; }
      } else if (p.lse != nullptr) {
        p.lse[work.sequence.q_batch * p.lse_stride_batch + id.head * p.lse_stride_head + id.row] = lse * kLn2;
      }
    }
  }

  __device__ __forceinline__ int partial_row(int r, ThreadRows const& rows) const {
    return warpgroup * kSlabRows + rows.row(r);
  }

  __device__ __forceinline__ int64_t partial_index(TileWork const& work, int r, ThreadRows const& rows) const {
    return static_cast<int64_t>(work.slot) * params.epilogue.partial.rows + partial_row(r, rows);
  }

  template <class Output>
  __device__ __forceinline__ void store_partial(TileWork const& work, ThreadRows const& rows, Output& tOrO) const {
    EpilogueParams const& p = params.epilogue;
    auto output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (!identify(work, rows, rows.row(r)).exists || partial_row(r, rows) >= p.partial.rows) { continue; }
      float* const row = p.partial.out + partial_index(work, r, rows) * p.head_dim_v;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); c += 2) {
        int const column = rows.column + c / 2 * 8;
        if (column < p.head_dim_v) {
          *reinterpret_cast<float2*>(row + column) = make_float2(output(r, c), output(r, c + 1));
        }
      }
    }
  }

  // Through shared memory: a slab whose rows all exist by TMA, the others row by row.
  template <class Output>
  __device__ __forceinline__ void store_rows(TileWork const& work, ThreadRows const& rows, Output& tOrO) const {
    EpilogueParams const& p = params.epilogue;
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
    bool const all_exist = rows.first_query + params.packing.queries_per_slab <= work.sequence.len.q;
    if (p.out_by_tma && (p.clip_by_tma || all_exist)) {
      if (thread == 0) {
        CUTE_UNROLL
        for (int c = 0; c < Traits::kHeadDimV; c += Traits::kSlabColumnsV) {
          SM90_TMA_STORE_5D::copy(&p.out, slab + c * kSlabRows, c, 0, work.sequence.q_row + rows.first_query, work.head,
                                  work.sequence.q_batch);
        }
        tma_store_arrive();
      }
    } else {
      copy_rows(work, rows, sO);
    }
  }

  // Pieces of 16 bytes of the rows that exist; element by element where out is not aligned for more.
  template <class SharedOutput>
  __device__ __forceinline__ void copy_rows(TileWork const& work, ThreadRows const& rows,
                                            SharedOutput const& sO) const {
    EpilogueParams const& p = params.epilogue;
    constexpr int kPiece = 16 / sizeof(Element);
    constexpr int kPieces = Traits::kHeadDimV / kPiece;
    CUTE_NO_UNROLL
    for (int i = thread; i < kSlabRows * kPieces; i += cutlass::NumThreadsPerWarpGroup) {
      int const slab_row = i / kPieces;
      int const column = i % kPieces * kPiece;
      RowIdentity const id = identify(work, rows, slab_row);
      if (!id.exists || column >= p.head_dim_v) { continue; }
      Element* const target = static_cast<Element*>(p.out_pointer) + work.sequence.q_batch * p.out_stride_batch +
                              id.row * p.out_stride_row + id.head * p.out_stride_head + column;
      Element const* const source = &sO(slab_row, column);
      if (p.out_by_tma) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4 const*>(source);
      } else {
        CUTE_UNROLL
        for (int c = 0; c < kPiece; ++c) { target[c] = source[c]; }
      }
    }
  }
};

}  // namespace hopper_attention
