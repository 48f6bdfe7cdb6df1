// Consumer warpgroups: O / row sum and the log-sum-exp of one slab of query rows -> global memory.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_merge.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
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

  // Divides by the row sums and writes `here` of out and LSE, or the partial result of a part of a tile. O goes through
  // `slab`, which may be written again after wait_stores().
  template <class Output>
  __device__ __forceinline__ void store(TileWork const& work, Element* slab, Softmax& softmax, Output& tOrO,
                                        SlabRows const& here = {}) const {
    ThreadRows const rows(thread, work.queries.first + warpgroup * params.packing.queries_per_slab);
    if (Traits::kParts && work.slot >= 0) {
      store_partial(work, rows, softmax, tOrO);
      sync_warpgroup(warpgroup);  // no warp multiplies by Q any more
    } else if constexpr (Traits::kDecode) {
      store_from_registers(work, rows, softmax, tOrO);
    } else {
      RowEnd ends[kRowsPerThread];
      finish(work, rows, softmax, tOrO, ends);
      cute::Tensor tOrO_half = make_tensor<Element>(tOrO.layout());
      cutlass::NumericArrayConverter<Element, float, decltype(size(tOrO))::value> const round;
      *reinterpret_cast<cutlass::Array<Element, decltype(size(tOrO))::value>*>(tOrO_half.data()) =
          round(*reinterpret_cast<cutlass::Array<float, decltype(size(tOrO))::value> const*>(tOrO.data()));
      store_rows(work, rows, here, slab, tOrO_half);
      if (params.epilogue.lse != nullptr) { store_lse_of_rows(work, rows, here, ends); }  // O is on its way meanwhile
    }
  }

  // This CTA's part of the tile to the CTAs of its cluster.
  template <class Output>
  __device__ __forceinline__ void send(ClusterMerge<Traits> const& merge, Softmax const& softmax, Output& tOrO,
                                       int row_count) const {
    ThreadRows const rows(thread, 0);
    auto const output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      RowEnd const end = end_of_row(softmax, r);
      int const row = rows.row(r);
      if (row >= row_count) { continue; }
      for (int owner = thread % 4; owner < merge.parts(); owner += 4) { merge.send_end(owner, row, {end.lse(), 1.0F}); }
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); c += 2) {
        merge.send_pair(row, rows.column + c / 2 * 8, row_count, end.scaled(output(r, c)),
                        end.scaled(output(r, c + 1)));
      }
    }
  }

  // Whatever was stored from shared memory has been read; call before that memory is written again.
  __device__ __forceinline__ void wait_stores() const {
    if (thread == 0) { tma_store_wait<0>(); }
  }

 private:
  // The end of the thread's row r, whose sink has no part in it yet. All threads.
  __device__ __forceinline__ RowEnd end_of_row(Softmax const& softmax, int r) const {
    return row_end(softmax.exponent(r), softmax.sum_of_row(r, params.softmax));
  }

  // With the sink. Writes the LSE.
  __device__ __forceinline__ RowEnd end_with_sink(TileWork const& work, ThreadRows const& rows, OutputRow const& id,
                                                  RowEnd end) const {
    EpilogueParams const& p = params.epilogue;
    if (p.sinks != nullptr) { end = end_row(end.exponent, end.sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
    if (rows.column == 0) { store_lse(params, work, id, end); }
    return end;
  }

  // Row by row, each would be a chain of dependent instructions behind the other's. Which rows they are is asked only
  // where sinks or the LSE need it.
  template <class Output>
  __device__ __forceinline__ void finish(TileWork const& work, ThreadRows const& rows, Softmax const& softmax,
                                         Output& tOrO, RowEnd (&ends)[kRowsPerThread]) const {
    EpilogueParams const& p = params.epilogue;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) { ends[r] = end_of_row(softmax, r); }
    if (p.sinks != nullptr) {
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) {
        OutputRow const id = output_row(params, work, rows.first_query, rows.row(r));
        if (!id.exists) { continue; }
        ends[r] = end_row(ends[r].exponent, ends[r].sum, sink_log2(p.sinks, p.sinks_type, id.head));
      }
    }
    auto output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) { output(r, c) = ends[r].scaled(output(r, c)); }
    }
  }

  // What is the same for the rows of a slab is taken once: each row by itself took 6 % of the time at 512 tokens.
  __device__ __forceinline__ void store_lse_of_rows(TileWork const& work, ThreadRows const& rows, SlabRows const& here,
                                                    RowEnd const (&ends)[kRowsPerThread]) const {
    if (rows.column != 0) { return; }
    EpilogueParams const& p = params.epilogue;
    FastDivmod const& heads = params.packing.heads;
    int const first = work.sequence.q_row + rows.first_query;
    int const existing =
        min_of(min_of(work.queries.last + 1 - rows.first_query, params.packing.queries_per_slab), p.rows - first);
    float* const slab = p.lse + work.sequence.q_batch * p.lse_stride_batch +
                        static_cast<std::int64_t>(work.head * heads.divisor) * p.lse_stride_head + first;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const query = heads.quotient(rows.row(r));
      int const head = rows.row(r) - query * heads.divisor;
      if (query < existing && here.holds(rows.row(r))) {
        slab[head * p.lse_stride_head + query] = ends[r].lse() * kLn2;
      }
    }
  }

  // The sink is left to who merges the parts.
  template <class Output>
  __device__ __forceinline__ void store_partial(TileWork const& work, ThreadRows const& rows, Softmax const& softmax,
                                                Output& tOrO) const {
    EpilogueParams const& p = params.epilogue;
    auto output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      RowEnd const end = end_of_row(softmax, r);
      int const row = warpgroup * kSlabRows + rows.row(r);
      if (!output_row(params, work, rows.first_query, rows.row(r)).exists || row >= p.partial.rows) { continue; }
      std::int64_t const index = static_cast<std::int64_t>(work.slot) * p.partial.rows + row;
      if (rows.column == 0) { p.partial.lse[index] = end.lse(); }
      float* const to = p.partial.out + index * p.head_dim_v;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); c += 2) {
        int const column = rows.column + c / 2 * 8;
        if (column < p.head_dim_v) {
          *reinterpret_cast<float2*>(to + column) = make_float2(end.scaled(output(r, c)), end.scaled(output(r, c + 1)));
        }
      }
    }
  }

  // Few rows: pairs of columns, without a way through shared memory.
  template <class Output>
  __device__ __forceinline__ void store_from_registers(TileWork const& work, ThreadRows const& rows,
                                                       Softmax const& softmax, Output& tOrO) const {
    auto output = rows_view(tOrO);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      RowEnd end = end_of_row(softmax, r);
      OutputRow const id = output_row(params, work, rows.first_query, rows.row(r));
      if (!id.exists) { continue; }
      end = end_with_sink(work, rows, id, end);
      Element* const to = output_pointer<Element>(params, work, id) + rows.column;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); c += 2) {
        if (rows.column + c / 2 * 8 < params.epilogue.head_dim_v) {
          store_pair(params, to + c / 2 * 8, end.scaled(output(r, c)), end.scaled(output(r, c + 1)));
        }
      }
    }
  }

  // Through shared memory by TMA; row by row where it cannot, or would write rows that belong to others.
  template <class Output>
  __device__ __forceinline__ void store_rows(TileWork const& work, ThreadRows const& rows, SlabRows const& here,
                                             Element* slab, Output& tOrO) const {
    EpilogueParams const& p = params.epilogue;
    cute::Tensor sO = make_tensor(make_smem_ptr(slab), typename Traits::LayoutO{});  // (64, Dv)
    auto const copy_atom = Copy_Atom<SM90_U32x4_STSM_N, Element>{};
    auto const tiled_copy = make_tiled_copy_C(copy_atom, typename Traits::MmaPv{});
    auto const thread_copy = tiled_copy.get_thread_slice(thread);
    cute::Tensor from = thread_copy.retile_S(tOrO);
    cute::Tensor to = thread_copy.partition_D(sO);

    sync_warpgroup(warpgroup);  // no warp multiplies by Q any more
    copy(tiled_copy, from, to);
    tma_store_fence();
    sync_warpgroup(warpgroup);
    int const queries = work.queries.last + 1 - rows.first_query;
    int const all = params.packing.queries_per_slab;
    int const row = work.sequence.q_row + rows.first_query;
    int const batch = work.sequence.q_batch;
    auto const store = [&](int a, int b, int c) __attribute__((always_inline)) {
      if (thread != 0) { return; }
      CUTE_UNROLL
      for (int column = 0; column < Traits::kHeadDimV; column += Traits::kSlabColumnsV) {
        SM90_TMA_STORE_5D::copy(&p.out_map, slab + column * kSlabRows, column, 0, a, b, c);
      }
      tma_store_arrive();
    };
    ClippedBox const box(batch * p.rows + row, queries, p.copies);
    if (Traits::kListed && here.all() && p.copies > 0 && queries > 0 && box.exact) {
      store(box.y, box.x, work.head);
    } else if (p.out_by_tma && here.all() && p.copies == 0 && (queries >= all || (p.clip_by_tma && queries > 0))) {
      store(row, work.head, batch);  // with only some of its queries it is the last slab of its sequence
    } else {
      copy_rows(work, rows, here, sO);
      sync_warpgroup(warpgroup);  // before one thread says that the slab is free
    }
  }

  // Pieces of 16 bytes of the rows that exist, a thread always the same piece of a row; element by element where out is
  // not aligned for more. Several rows at once: where each waits for the one before, 52 rows of head dim 256 take
  // 3.6 us longer.
  template <class SharedOutput>
  __device__ __forceinline__ void copy_rows(TileWork const& work, ThreadRows const& rows, SlabRows const& here,
                                            SharedOutput const& sO) const {
    EpilogueParams const& p = params.epilogue;
    constexpr int kPiece = kPieceBytes / sizeof(Element);
    constexpr int kPieces = Traits::kHeadDimV / kPiece;
    constexpr int kRowsAtOnce = cutlass::NumThreadsPerWarpGroup / kPieces;  // of a warpgroup
    int const queries = min_of(work.queries.last + 1 - rows.first_query, params.packing.queries_per_slab);
    int const count = min_of(queries * params.packing.heads.divisor, here.end);
    int const first = here.begin + thread / kPieces;
    int const column = thread % kPieces * kPiece;
    if (thread / kPieces >= kRowsAtOnce || column >= p.head_dim_v) { return; }
    if (p.out_by_tma) {
      constexpr int kBatch = 4;
      CUTE_NO_UNROLL
      for (int row = first; row < count; row += kBatch * kRowsAtOnce) {
        uint4 pieces[kBatch];
        uint4* targets[kBatch];
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          OutputRow const id = output_row(params, work, rows.first_query, row + i * kRowsAtOnce);
          auto* const target = reinterpret_cast<uint4*>(output_pointer<Element>(params, work, id) + column);
          targets[i] = id.exists && row + i * kRowsAtOnce < count ? target : nullptr;
          pieces[i] = *reinterpret_cast<uint4 const*>(&sO(min_of(row + i * kRowsAtOnce, count - 1), column));
        }
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          if (targets[i] != nullptr) { *targets[i] = pieces[i]; }
        }
      }
    } else {
      CUTE_NO_UNROLL
      for (int row = first; row < count; row += kRowsAtOnce) {
        OutputRow const id = output_row(params, work, rows.first_query, row);
        if (!id.exists) { continue; }
        auto* const target = output_pointer<Element>(params, work, id) + column;
        CUTE_UNROLL
        for (int c = 0; c < kPiece; ++c) { target[c] = sO(row, column + c); }
      }
    }
  }
};

}  // namespace hopper_attention
