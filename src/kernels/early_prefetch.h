// Brings the first keys and values of a CTA into L2 while the kernel before still runs.
//
// Only where there are more tiles than CTAs, which then start one by one as those of the kernel before end and memory
// is no longer busy. Clusters, which start beside it, would take from it what they gain.
#pragma once

#include "kernels/cute.h"

#include "kernels/dependent_launch.h"
#include "kernels/params.h"
#include "kernels/schedule.h"
#include "kernels/schedule_layout.h"
#include "kernels/sequences.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

using namespace cute;

// What is read here only chooses what is fetched, from memory that the tensors have.
template <class Traits>
class EarlyPrefetch {
 public:
  // The last keys, which come first, of the tile of the CTA's index, in the order of the schedule where tiles are
  // drawn. One warp.
  __device__ __forceinline__ static void fetch(AttentionParams const& params, int lane) {
    ClusterParams const& cluster = params.cluster;
    PageParams const& pages = params.load.pages;
    if (Traits::kGathers && pages.gathered()) { return; }  // there are no boxes
    Tile const tile = cluster.tile(blockIdx.x);
    int batch = tile.batch;
    if (Traits::kDrawn && cluster.draws()) {
      int const stride = schedule_stride(params.sequences.batch);
      int const fact = HintLoad::load(where_is(cluster.metadata, stride, kPlacesAndCuts));
      int const drawn = HintLoad::load(where_is(cluster.metadata, stride, kSequenceAt) + batch);
      if (cluster.by_schedule && cuts_tiles(params.schedule, fact, kCutsWholeTiles)) { return; }
      batch = clamped(drawn, 0, params.sequences.batch - 1);
    }
    Sequence const sequence = sequence_at<HintLoad>(params.sequences, batch);
    bool const paged = pages.table != nullptr;
    int const box_keys = paged ? pages.box_keys : Traits::kKeys;
    int const head_k = params.load.groups_per_head_k.quotient(tile.head);
    CUTE_NO_UNROLL
    for (int i = lane; i * box_keys < kKeys; i += 32) {
      int const key = sequence.len.k - 1 - i * box_keys;
      if (key < 0) { return; }
      if (!paged) {
        int const first = max_of(0, key - box_keys + 1);
        ClippedBox const box(sequence.k_row + first, key + 1 - first, params.load.copies);
        fetch_slabs(params.load, [&](CUtensorMap const& map, int c) {
          SM90_TMA_LOAD_5D::PREFETCH::copy(&map, c, box.y, box.x, head_k, sequence.k_batch);
        });
        continue;
      }
      int const place = sequence.k_row + key;
      int const index = pages.size.quotient(place);
      if (index >= pages.width) { return; }
      int const page = HintLoad::load(pages.table + batch * pages.stride + index);
      int const row = pages.size.remainder(place) & ~(box_keys - 1);
      if (page < 0 || page >= pages.pages) { continue; }
      fetch_slabs(params.load,
                  [&](CUtensorMap const& map, int c) { SM90_TMA_LOAD_4D::PREFETCH::copy(&map, c, row, head_k, page); });
    }
  }

 private:
  static constexpr int kKeys = Traits::kStages / 2 * Traits::kKeys;  // as many as the ring takes

  // Calls `fetch(map, column)` for each column slab of K and of V.
  template <class Fetch>
  __device__ __forceinline__ static void fetch_slabs(LoadParams const& load, Fetch fetch) {
    CUTE_NO_UNROLL
    for (int c = 0; c < Traits::kHeadDim; c += Traits::kSlabColumns) { fetch(load.k, c); }
    CUTE_NO_UNROLL
    for (int c = 0; c < Traits::kHeadDimV; c += Traits::kSlabColumnsV) { fetch(load.v, c); }
  }
};

}  // namespace hopper_attention
