// How calls with a schedule cut their work: what the schedule of a step and all of its layers' calls must agree on. It
// follows from the heads, the head dims and batch invariance alone.
#pragma once

#include "hopper_attention/forward.h"
#include "kernels/part_arrivals.h"
#include "kernels/schedule.h"
#include "kernels/schedule_layout.h"
#include "kernels/schedule_params.h"
#include "kernels/sequence_work.h"
#include "kernels/tile_config.h"

namespace hopper_attention {

// Keys of the longest tile in one part, if parts do not depend on the batch (fixed_parts()). Batches of 32 and more of
// such tiles are as fast as without batch invariance, and need no schedule.
inline constexpr int kFixedSplitKeys = 4096;

// Key blocks that a thread block takes at least: fewer cost more to merge than to compute.
inline constexpr int kLeastUnits = 2;

// A cluster that takes a tile of so many key blocks for each of its thread blocks is done before others could help.
inline constexpr int kFewBlocksOfShare = 4;

// Key blocks of a tile that a thread block computes about as fast as parts of it are merged.
inline constexpr int kFewBlocksOfTile = 12;

// Units of a tile of few queries, at least: where all blocks read as fast as memory allows, one of few keys takes about
// as long as so many.
inline constexpr int kLeastUnitsOfFewQueries = 4;

// The row of dense calls with the same tile, whose cost was measured; nullptr if there is none.
constexpr TileRow const* dense_row(TileConfig tile) {
  tile.calls = Calls::kDense;
  for (TileRow const& row : kTiles) {
    if (row.tile == tile) { return &row; }
  }
  return nullptr;
}

// Units of a tile of many queries for what it takes beside its blocks, by the costs of dense calls with the same tile.
// Without them a chunk of many short tiles is late: with 924 queries on 7.5k keys, 536 on 4k and 34 short sequences,
// 96/8 heads, it ended 210 us behind the others.
constexpr int units_of_ends(TileConfig const& tile) {
  TileRow const* const row = dense_row(tile);
  if (row == nullptr || row->cost.block == 0) { return 1; }
  return (row->cost.tile + row->cost.block / 2) / row->cost.block;
}

// Whether two kernels compute tiles of the same size, which decides bits.
constexpr bool same_size(TileConfig const& a, TileConfig const& b) { return a.rows == b.rows && a.keys == b.keys; }

// Whether a packed q has a quarter of the rows that its sequences could have, so that most may be about as long as the
// longest. With fewer, most may have single queries beside a prompt.
inline bool has_quarter_of_rows(Problem const& problem) {
  return 4 * problem.total_q >= std::int64_t{problem.batch} * problem.seqlen_q;
}

// Query rows of a sequence. Of one sequence alone, at most as many as q has, whatever the bound on its length is.
inline int query_rows_of_sequence(Problem const& problem) {
  return static_cast<int>(problem.packed_q && problem.batch == 1 ? problem.total_q : problem.seqlen_q);
}

// Whether the bound on queries may be relied on: of a q that is not packed its shape says it; of a packed one it is
// believed if there are just as many rows as it allows. Otherwise it may be too small, and all rows are written
// nevertheless.
inline bool bound_on_queries_holds(Problem const& problem) {
  return !problem.packed_q || problem.total_q == std::int64_t{problem.batch} * problem.seqlen_q;
}

// Whether a tile of so many queries holds those of any sequence, so that each has one tile.
inline bool each_has_one_tile(Problem const& problem, int queries) {
  return problem.seqlen_q <= queries && bound_on_queries_holds(problem);
}

// Whether several tiles of a sequence are as many as hold its queries, whatever the bound on these is.
inline bool has_packed_tiles(Problem const& problem) { return problem.packed_q && problem.batch > 1; }

// Whether tiles are known but for how many of them sequences have, since there is one, or several that are alike.
inline bool tiles_are_known(Problem const& problem) {
  return (problem.batch == 1 || !problem.ragged) && !problem.seqused_q && problem.mask.cp_world <= 1;
}

// Query heads that share a tile: as many of a K/V head's as fit in a slab together.
constexpr int scheduled_packing(int heads_q, int heads_k) {
  int const ratio = heads_q / heads_k;
  int packed = min_of(max_of(1, ratio), kSlabRows);
  while (ratio % packed != 0) { --packed; }
  return packed;
}

// The smallest tile for sequences with up to `rows` query rows: the fewer it has, the faster it reads.
constexpr TileUse few_rows_use(std::int64_t rows) {
  return rows <= kMostFewRows ? TileUse::kFewRows : rows <= kMostSomeRows ? TileUse::kSomeRows : TileUse::kDecode;
}

// The tile that holds the sequences which a schedule counts as those with few queries. Splits of fixed size are for all
// with up to 64 rows, of which those with up to 16 have a kernel of their own: a split has as many keys in both. Where
// two blocks share an SM, the tile of 32 rows has four slots for keys and values, too few beside prompts: 32 sequences
// of 4 queries beside one of 2,242, 32/4 heads, head dim 64, take 120 us with it and 103 among the prompts.
inline TileUse few_queries_use(int head_dim, int head_dim_v, int packed_heads, bool fixed_splits) {
  TileRow const* const some = find_tile(head_dim, head_dim_v, TileUse::kSomeRows);
  int const rows = some != nullptr && some->tile.per_sm == 1 ? kMostSomeRows : kMostFewRows;
  bool const holds = !fixed_splits && packed_heads <= rows;
  return holds ? few_rows_use(rows) : TileUse::kDecode;
}

// Tiles of `tile` as the schedule counts them. Prefill tiles are never cut by fixed splits: there are enough of them.
constexpr TileShape tile_shape(TileConfig const& tile, int packed_heads, bool fixed_splits) {
  bool const decode = family_of(tile) == KernelFamily::kDecode;
  return {rows_of_slab(tile) / packed_heads * slabs_of(tile), tile.keys,
          fixed_splits ? (decode ? kFixedSplitKeys / tile.keys : 1 << 30) : 0,
          decode && !fixed_splits ? kLeastUnitsOfFewQueries : 1, decode || fixed_splits ? 0 : units_of_ends(tile)};
}

// The row of a use that not all head dims have: nullptr where only a tile for larger ones holds them.
inline TileRow const* row_of_use(Problem const& problem, TileUse use) {
  TileRow const* const row = find_tile(problem.head_dim, problem.head_dim_v, use);
  TileRow const* const usual = find_tile(problem.head_dim, problem.head_dim_v, TileUse::kRagged);
  bool const fits = row != nullptr && usual != nullptr && row->tile.head_dim == usual->tile.head_dim &&
                    row->tile.head_dim_v == usual->tile.head_dim_v;
  return fits ? row : nullptr;
}

// The kernel for sequences of few queries and of many, whose tiles of many may be in even parts (EvenParts): one that
// computes tiles of few rows as kernels for these do, or, where the head dims have none, that for many.
inline TileRow const* row_for_both(Problem const& problem) {
  TileRow const* const both = row_of_use(problem, TileUse::kMixed);
  return both != nullptr ? both : find_tile(problem.head_dim, problem.head_dim_v, TileUse::kRagged);
}

// Whether that kernel computes tiles of few rows in another way than those of many.
inline bool computes_few_apart(Problem const& problem) {
  TileRow const* const row = row_for_both(problem);
  return row != nullptr && is_mixed(row->use);
}

// What chunks of equal work take beside a block's share of all, in units: of more columns of O there is more to merge
// (docs/performance-notes.md, steps 279 and 288).
constexpr int units_of_chunks(int head_dim_v) { return head_dim_v > 192 ? 22 : 16; }

// Of metadata that any call may be given.
inline EvenParts even_parts(Problem const& problem, FewReaders const& readers) {
  int const packed = scheduled_packing(problem.heads_q, problem.heads_k);
  EvenParts even{readers.by_schedule, problem.heads_q / packed, kLeastUnits, kSlabRows / packed};
  even.many_queries = FastDivmod(even.queries_of_one);
  // Then no step is cut but of sequences that have one tile each.
  if (readers.of_parts == 0) { return even; }
  TileConfig const& tile = row_for_both(problem)->tile;
  even.many_ctas = readers.of_parts;
  even.many_queries = FastDivmod(tile_shape(tile, packed, false).queries);
  even.units_of_chunks = units_of_chunks(problem.head_dim_v);
  return even;
}

// Whether a kernel that is alone in its call merges parts of its tiles itself. It counts its CTAs in the schedule,
// which only calls with lengths on the device have; parts that follow from a tile alone are merged in an order of their
// own.
constexpr bool may_merge_parts(Problem const& problem, TileConfig const& tile) {
  return problem.ragged && !problem.batch_invariant && family_of(tile) == KernelFamily::kDecode;
}

inline bool has_prefill(Plan const& plan) { return plan.kernels.front().family == KernelFamily::kPrefill; }

// Whether a kernel of a plan without clusters has its tiles from the schedule, which it looks for its work in.
inline bool takes_schedule(Plan const& plan, KernelPlan const& kernel) {
  return plan.listed && !kernel.ranked && kernel.tile.calls != Calls::kPaired;
}

// Which of the sequences a kernel looks through.
inline Places places_of(Plan const& plan, KernelPlan const& kernel) {
  if (plan.kernels.size() == 1 || !has_prefill(plan)) { return Places::kAll; }
  return kernel.family == KernelFamily::kPrefill ? Places::kPrefill : Places::kDecode;
}

// Of a prefill and a decode kernel the first has its CTAs at once, those of the other start where it leaves SMs. Of two
// decode kernels that goes for the one of fewer rows; the other one mostly finds nothing.
inline CardShare card_share(Plan const& plan, KernelPlan const& kernel) {
  if (plan.kernels.size() == 1 || !has_prefill(plan) || kernel.least_queries > 0) { return CardShare::kAll; }
  bool const is_first = (kernel.family == KernelFamily::kDecode) == plan.decode_first;
  if (!is_first) { return CardShare::kTakes; }
  return plan.decode_first ? CardShare::kLeaves : CardShare::kFirst;
}

// Whether the first query of a sequence as long as the bounds allow sees nearly as many keys as the last one, so that
// its tiles take about the same time.
inline bool tiles_are_even(Problem const& problem) {
  if (problem.seqlen_q == 0) { return true; }
  SeqlenQK const len{problem.seqlen_q, problem.seqlen_k};
  KeyInterval const first = visible(problem.mask, 0, len);
  KeyInterval const last = visible(problem.mask, problem.seqlen_q - 1, len);
  return 4LL * (first.end - first.begin) >= 3LL * (last.end - last.begin);
}

// Whether tiles of many queries may be in even parts: not where a call may have other queries than metadata know. The
// kernels for softcap, whose tiles are as large as those of kRagged, may have them, too.
inline bool may_part_many(Plan const& plan, KernelPlan const& kernel, Problem const& problem) {
  bool const are_known = problem.ragged && problem.packed_q && !problem.seqused_q;
  TileRow const* const row = row_for_both(problem);
  if (!are_known || row == nullptr || kernel.family != KernelFamily::kPrefill) { return false; }
  if (is_mixed(row->tile.calls)) { return is_mixed(kernel.tile.calls); }
  bool const same_tile = same_size(kernel.tile, row->tile);
  return same_tile && (plan.for_both || problem.batch == 1);
}

// Of `sequences`, counted for each head group, that all have the same work.
inline int cuts_if_alike(SequenceWork const& work, std::int64_t sequences, int ctas) {
  bool const pays = cutting_pays({sequences * work.tiles, sequences * work.sum(), work.units}, 1, ctas);
  return pays ? kCutsWholeTiles | kCutsClusters : 0;
}

// What a kernel is told about the schedule of the step, but for where it lies.
inline ScheduleParams schedule_params(Plan const& plan, KernelPlan const& kernel, Problem const& problem) {
  TileShape const shape = tile_shape(kernel.tile, plan.packed_heads, plan.fixed_splits);
  ScheduleParams p;
  p.batch = problem.batch;
  p.stride = schedule_stride(problem.batch);
  p.places = places_of(plan, kernel);
  p.alike = sequence_work(shape, problem.mask, {problem.seqlen_q, problem.seqlen_k});
  p.alike_units = p.alike.sum();
  p.cuts_alike = cuts_if_alike(p.alike, std::int64_t{p.batch} * (problem.heads_q / plan.packed_heads), kernel.ctas);
  int const head_groups = problem.heads_q / plan.packed_heads;
  p.share = card_share(plan, kernel);
  p.head_groups = FastDivmod(head_groups);
  p.ctas = kernel.ctas;
  p.may_split = kernel.may_split;
  p.always_split = plan.forces_splits;
  p.bound_by_memory = kernel.family == KernelFamily::kDecode;
  p.even_tiles = tiles_are_even(problem);
  p.ends = shape.ends;
  p.fixed_splits = plan.fixed_splits;
  p.least_units = plan.fixed_splits ? 1 : kLeastUnits;
  p.max_splits = plan.max_splits;
  if (problem.ragged && kernel.family == KernelFamily::kPrefill) {
    TileRow const* const counted = find_tile(problem.head_dim, problem.head_dim_v, TileUse::kRagged);
    int const queries = min_of(shape.queries, tile_shape(counted->tile, plan.packed_heads, false).queries);
    if (!each_has_one_tile(problem, queries)) {
      p.resized = {slabs_of(counted->tile), FastDivmod(slabs_of(kernel.tile))};
      // Of these some that are counted may not exist, and a last round would seem to be short: four chunks of 512
      // queries on 16k keys, 32/8 heads, whose 512 tiles fill four rounds, were cut, and took 963 us instead of 871.
      p.even_tiles = p.even_tiles && !p.resized.on();
    }
  }
  p.most_tiles = static_cast<int>(kernel.most_tiles / head_groups);
  p.most_units = static_cast<int>(kernel.most_units / head_groups);
  p.ctas_beside = kernel.leaves;
  p.mixed = plan.for_both;
  p.parts_many = may_part_many(plan, kernel, problem);
  int const least = kernel.family == KernelFamily::kDecode ? plan.readers_beside_prefill : plan.chunks_beside_decode;
  p.least_ctas = clamped(least, 1, kernel.ctas + kernel.leaves);
  p.prefill_at_par = plan.prefill_at_par;
  return p;
}

// Of a plan with clusters: how many share a tile. More than one leave their results in slots of the workspace.
constexpr int clusters_of_tile(KernelPlan const& kernel) {
  return kernel.may_split ? static_cast<int>(kernel.partial_slots / kernel.most_tiles) : 1;
}

// Whether the thread blocks of a cluster share two tiles.
constexpr bool is_paired(KernelPlan const& kernel) { return kernel.tile.calls == Calls::kPaired; }

// Thread blocks of the clusters that share the tiles of a kernel for few queries, 0 or 1 without clusters.
inline int cluster_of(Plan const& plan, KernelPlan const& kernel) {
  return kernel.family == KernelFamily::kDecode ? max_of(plan.cluster, plan.cluster_if_alike) : 0;
}

// The rows that a kernel's slabs hold: no more than CTAs of a cluster can merge.
inline Packing packing_of(Plan const& plan, KernelPlan const& kernel) {
  int const cluster = cluster_of(plan, kernel);
  int const rows = rows_of_slab(kernel.tile);
  return make_packing(plan.packed_heads, cluster > 1 ? min_of(rows, most_merge_rows(kernel.tile, cluster)) : rows);
}

constexpr std::int64_t aligned_bytes(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Of the workspace: partial results in float32, and their LSE.
constexpr std::int64_t partial_out_bytes(KernelPlan const& kernel, int head_dim_v) {
  return aligned_bytes(kernel.partial_slots * kernel.partial_rows * head_dim_v * 4);
}
constexpr std::int64_t partial_lse_bytes(KernelPlan const& kernel) {
  return aligned_bytes(kernel.partial_slots * kernel.partial_rows * 4);
}
// In which CTAs count parts.
constexpr std::int64_t arrivals_bytes(KernelPlan const& kernel) {
  return kernel.merges_parts ? aligned_bytes(arrival_words(kernel.partial_slots) * 8) : 0;
}
constexpr std::int64_t partial_bytes(KernelPlan const& kernel, int head_dim_v) {
  return partial_out_bytes(kernel, head_dim_v) + partial_lse_bytes(kernel) + arrivals_bytes(kernel);
}

}  // namespace hopper_attention
