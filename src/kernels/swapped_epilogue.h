// Of tiles with at most 32 query rows: what the mainloop leaves in registers, O^T and the ends of its columns, -> out
// and LSE, the workspace, or the CTAs of the cluster that merge it.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_merge.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/sink.h"
#include "kernels/thread_columns.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

using namespace cute;

// Writes a tile or a part of one, or sends this CTA's part of it to where it is merged.
// kRows: of the tile's, the first that may hold queries.
template <class Traits, int kRows>
struct SwappedEpilogue {
  using Element = typename Traits::Element;
  static constexpr int kColumns = columns_of_thread(kRows);

  AttentionParams const& params;
  typename Traits::SharedStorage& shared;
  int thread;

  // A whole tile: through shared memory, so that rows leave in pieces of 16 bytes. `output` is a columns_view().
  template <class Output>
  __device__ __forceinline__ void store(TileWork const& work, PartEnd const (&parts)[kColumns],
                                        Output const& output) const {
    ThreadColumns const place(thread);
    EpilogueParams const& p = params.epilogue;
    RowEnd ends[kColumns];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) { ends[c] = row_end(parts[c].exponent, parts[c].sum); }
    if (p.sinks != nullptr) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        OutputRow const id = output_row(params, work, work.queries.first, place.column(c));
        if (!id.exists) { continue; }
        ends[c] = end_row(ends[c].exponent, ends[c].sum, sink_log2(p.sinks, p.sinks_type, id.head));
      }
    }
    Element* const rows = reinterpret_cast<Element*>(shared.o);  // (rows, Dv), padded
    TransposedRow const to(thread);
    CUTE_UNROLL
    for (int r = 0; r < size<1>(output); r += 2) {
      store_transposed<Element, kColumns>(
          r, [&](int c, int of) { return ends[c].scaled(output(c, of)); },
          [&](int c) { return rows + (to.row + c * 4) * kPitch + to.column + r / 2 * 64; });
    }
    if (place.first_row == 0) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        *reinterpret_cast<float2*>(&shared.parts_ends[place.column(c) * 2]) =
            make_float2(ends[c].exponent, ends[c].sum);
      }
    }
    TileWork const item = work;  // by all lanes, before some have nothing to write (kActingLane)
    asm volatile("" ::: "memory");
    sync_warpgroup(0);
    write(item, rows);
  }

  // A part of a tile to the workspace, from registers: eight lanes write 32 bytes of a row.
  template <class Output>
  __device__ __forceinline__ void store_part(TileWork const& work, PartEnd const (&parts)[kColumns],
                                             Output const& output) const {
    ThreadColumns const place(thread);
    PartialParams const& partial = params.epilogue.partial;
    int const head_dim_v = params.epilogue.head_dim_v;
    RowEnd ends[kColumns];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) { ends[c] = row_end(parts[c].exponent, parts[c].sum); }
    int const slot = work.slot;  // by all lanes, before some have nothing to write (kActingLane)
    asm volatile("" ::: "memory");
    sync_warpgroup(0);  // all have their ends, before the next tile's maxima take the place of these
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      int const row = place.column(c);
      if (row >= partial.rows) { continue; }
      std::int64_t const index = static_cast<std::int64_t>(slot) * partial.rows + row;
      float* const to = partial.out + index * head_dim_v;
      CUTE_UNROLL
      for (int r = 0; r < size<1>(output); ++r) {
        int const column = place.row(r);
        if (column < head_dim_v) { to[column] = ends[c].scaled(output(c, r)); }
      }
      if (place.first_row == 0) { partial.lse[index] = ends[c].lse(); }
    }
  }

  // This CTA's part of the tile to those of its cluster that merge it.
  template <class Output>
  __device__ __forceinline__ void send(ClusterMerge<Traits> const& to, PartEnd const (&ends)[kColumns],
                                       Output const& output, int rows) const {
    ThreadColumns const place(thread);
    int const owner = place.first_row % 8 + thread / 32 * 8;
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 2) {
      int const row = place.column(c);
      if (row >= rows) { continue; }
      if (owner < to.parts()) {
        to.send_end(owner, row, ends[c]);
        to.send_end(owner, row + 1, ends[c + 1]);
      }
      CUTE_UNROLL
      for (int r = 0; r < size<1>(output); ++r) {
        int const column = place.row(r);
        if (Traits::kProductColumns > Traits::kHeadDimV && column >= Traits::kHeadDimV) { continue; }
        to.send_pair(row, column, rows, output(c, r), output(c + 1, r));
      }
    }
  }

 private:
  static constexpr int kPiece = 16 / sizeof(Element);
  static constexpr int kPieces = Traits::kHeadDimV / kPiece;  // of a row
  static constexpr int kPitch = Traits::kPitchO;
  static_assert(kRows * kPitch <= Traits::kElementsO);

  __device__ __forceinline__ void write(TileWork const& work, Element const* rows) const {
    EpilogueParams const& p = params.epilogue;
    int const existing = min_of((work.queries.last + 1 - work.queries.first) * params.packing.heads.divisor, kRows);
    CUTE_NO_UNROLL
    for (int i = thread; i < existing * kPieces; i += cutlass::NumThreadsPerWarpGroup) {
      int const row = i / kPieces;
      int const column = i % kPieces * kPiece;
      OutputRow const id = output_row(params, work, work.queries.first, row);
      if (!id.exists || column >= p.head_dim_v) { continue; }
      Element* const to = output_pointer<Element>(params, work, id) + column;
      Element const* const from = rows + row * kPitch + column;
      if (p.out_by_tma) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(from);
      } else {
        CUTE_NO_UNROLL
        for (int c = 0; c < kPiece; ++c) { to[c] = from[c]; }
      }
      if (column == 0 && p.lse != nullptr) {
        store_lse(params, work, id, {0.0F, shared.parts_ends[row * 2], shared.parts_ends[row * 2 + 1]});
      }
    }
  }
};

}  // namespace hopper_attention
