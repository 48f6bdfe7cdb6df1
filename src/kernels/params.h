// What the host hands to a kernel.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <limits>

#include "hopper_attention/types.h"
#include "kernels/cap_polynomial.h"
#include "kernels/fast_divmod.h"
#include "kernels/interval_mask.h"
#include "kernels/paired_tiles.h"
#include "kernels/schedule.h"
#include "kernels/sequence_work.h"
#include "kernels/sequences.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {

// K or V in pages, for kernels that gather rows: strides in elements.
struct RowSource {
  void const* data = nullptr;
  std::int64_t stride_page = 0, stride_row = 0, stride_head = 0;
  int head_dim = 0;  // of the tensor: at most the tile's
};

// Pages of K and V. Without a table, a block is one box of the sequence's own memory.
struct PageParams {
  int const* table = nullptr;  // (batch, width)
  std::int64_t stride = 0;     // of a sequence's row
  int width = 0;               // pages of a sequence
  FastDivmod size;             // keys of a page
  int pages = 0;               // that exist
  int box_keys = 0;            // keys that one TMA box brings: a divisor of the page size and of the tile's keys
  int boxes = 0;               // of a block
  int blocks_at_once = 1;      // for whose boxes a warp has lanes
  RowSource k, v;

  // Boxes of one row are not brought by TMA.
  HA_HOST_DEVICE constexpr bool gathered() const { return table != nullptr && box_keys == 1; }
};

struct LoadParams {
  CUtensorMap q;  // (D, packed heads, Sq, head groups, B), box (64, packed heads, queries per slab, 1, 1)
  // (D, Sk + 1 - copies, copies, Hk, B), box (64, 1, keys of a block, 1, 1), see ClippedBox; pages: (D, page size, Hk,
  // pages), box (64, box keys, 1, 1).
  CUtensorMap k;
  CUtensorMap v;  // the same with Dv
  int copies;
  PageParams pages;
  FastDivmod groups_per_head_k;  // head groups that read one K/V head
  std::uint32_t query_rows;      // rows of a slab that a box of q fills: packed heads x queries
  int queries_per_slab;
};

struct SoftmaxParams {
  float scale_log2;     // softmax scale * log2(e): scores -> exponents of 2; with softcap, softcap * log2(e)
  float softcap_inner;  // softmax scale / softcap, 0 without softcap
  float lowest_score;   // what maxima begin with, so that they and their exponents of 2 are finite: -inf less itself is
                        // NaN. Scores below count as -inf.
  CapPolynomials cap_polynomials{};  // of softcap
};

// Results of parts of tiles, to be merged by the combine kernel, or by the CTAs that leave them.
struct PartialParams {
  float* out = nullptr;               // (slots, rows, Dv), divided by the row sum
  float* lse = nullptr;               // (slots, rows), as exponents of 2
  int rows = 0;                       // of a tile that can hold a query
  std::uint64_t* arrivals = nullptr;  // part_arrivals.h; null: the combine kernel merges
};

// Where the results of a call go, and the sinks that are added to the sums of their rows. Strides in elements.
struct ResultParams {
  void* out;
  std::int64_t out_stride_batch, out_stride_row, out_stride_head;
  float* lse;                                      // nullptr: not wanted
  std::int64_t lse_stride_batch, lse_stride_head;  // rows are contiguous
  void const* sinks;
  DataType sinks_type;
  int head_dim_v;  // of the tensor: at most the tile's
  int rows;        // of q in one batch entry: no row outside is written
};

struct EpilogueParams : ResultParams {
  // Used when out_by_tma: as q, with Dv; with copies (Dv, packed heads, B * Sq + 1 - copies, copies, head groups), box
  // (64, packed heads, 1, queries per slab, 1), see ClippedBox.
  CUtensorMap out_map;
  bool out_by_tma;   // base and strides are multiples of 16 bytes
  bool clip_by_tma;  // rows past a sequence are past the tensor, too: TMA leaves them out
  int copies;        // of a row in out_map; 0: the rows of several batches are not equally far from each other
  PartialParams partial;
};

inline constexpr int kMostGuessedSequences = 128;  // of a schedule that is read twice

// Clusters of CTAs that share a tile, one or more for each sequence and head group; where there are fewer CTAs than
// tiles, they take them in turn, or draw them in the order of the schedule. Off with size 0. by_schedule: all this is
// so only if the lengths in the schedule say that it is best (cuts_tiles()); with size 0 tiles are drawn if none is
// cut. head_groups is known in any case.
struct ClusterParams {
  int size = 0;
  bool by_schedule = false;
  int of_tile = 1;   // clusters that share a tile; more than one leave their results to the combine kernel
  int few_keys = 0;  // of a sequence whose tiles the first of several clusters takes alone
  int at_once = 0;   // tiles that the grid takes in a round
  int tiles = 0;
  bool every_other = false;    // CTA takes a tile
  bool fetches_early = false;  // CTAs fetch their first keys while the kernel before runs
  bool own_first = true;       // where tiles are drawn, each CTA begins with that of its index
  int longest_part = 0;        // where tiles are in fixed_parts(): blocks of the longest one that is not
  FastDivmod ctas_of_tile;     // size * of_tile
  FastDivmod tiles_of_group;   // of a sequence and head group that have clusters of their own
  bool packed = false;         // as many as hold the queries that it has; else tiles_of_group
  FastDivmod head_groups;
  int* metadata = nullptr;  // of the schedule, where tiles are drawn

  HA_HOST_DEVICE constexpr bool on() const { return size > 0 && !by_schedule; }
  HA_HOST_DEVICE constexpr bool draws() const { return metadata != nullptr; }
  HA_HOST_DEVICE constexpr int first_tile(int cta) const {
    if (every_other) { return cta % 2 == 0 ? cta / 2 : tiles; }
    return ctas_of_tile.quotient(cta);
  }
  // Where each sequence and head group has one.
  HA_HOST_DEVICE constexpr Tile tile(int index) const {
    int const batch = head_groups.quotient(index);
    return {.m = 0, .head = index - batch * head_groups.divisor, .batch = batch};
  }
  // Of the workspace, which takes the result of the CTA's cluster; -1: it is the whole tile.
  HA_HOST_DEVICE constexpr int slot(int cta) const { return of_tile > 1 ? cta >> log2_of(size) : -1; }
  HA_HOST_DEVICE constexpr bool first_takes_all(SeqlenQK len) const { return of_tile > 1 && len.k <= few_keys; }
};

// Tiles that follow from their index and are all in as many parts, one for each CTA.
struct EqualParts {
  FastDivmod of_tile;
  int few_keys = 0;  // of a sequence whose tiles the first CTA of each takes alone

  HA_HOST_DEVICE constexpr bool on() const { return of_tile.divisor > 1; }
  HA_HOST_DEVICE constexpr bool first_takes_all(SeqlenQK len) const { return len.k <= few_keys; }
};

struct AttentionParams {
  LoadParams load;
  EpilogueParams epilogue;
  SchedulerParams scheduler;  // of calls whose tiles follow from their index
  EqualParts parts;           // of these tiles
  RankedTileParams ranked;    // of few sequences, whose tiles are found by their rank
  PairedTiles pairs;          // of these, where the CTAs of a cluster share two
  ScheduleParams schedule;    // of all others
  SequenceParams sequences;
  SoftmaxParams softmax;
  Packing packing;
  MaskParams mask;
  BlockAlignment alignment;  // unit: of pages; its shift is the sequence's
  int keys_in_l2 = 1;        // of one head: keys whose K and V are to run together (PlanRequest::bytes_together())
  int sharing = 1;           // head groups that read the same K and V
  bool listed = false;       // work comes from `schedule`, not from `scheduler`
  int least_queries = 0;     // of the sequences that this kernel takes; the others of its list are another one's
  int most_queries = std::numeric_limits<int>::max();
  ClusterParams cluster;
  bool wait_at_start = false;  // for the kernel before, whose results are read
  bool guesses = false;        // what the schedule says is read while the kernel before runs (guessed_work.h)
  bool signals = true;         // that the next kernel may be set up; otherwise only if the schedule cuts tiles

  HA_HOST_DEVICE constexpr bool takes(Sequence const& sequence) const {
    return least_queries <= sequence.len.q && sequence.len.q <= most_queries;
  }
};

}  // namespace hopper_attention
