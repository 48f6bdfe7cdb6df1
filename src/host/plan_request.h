// What the files of the plan share: what is asked, what follows from it alone, and who plans which kind of call.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "hopper_attention/forward.h"
#include "hopper_attention/testing.h"
#include "host/schedule_shape.h"
#include "host/text.h"
#include "kernels/host_device.h"
#include "kernels/sequence_work.h"
#include "kernels/tile_config.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

inline constexpr int kElementBytes = 2;
inline constexpr std::int64_t kMaxTiles = std::int64_t{1} << 30;  // the scheduler counts in int

// Of what memory could bring by its clock and width, what kernels read: 4,400 to 4,550 GB/s of an H200's 4,917, 3,060
// to 3,110 of an H100's 3,352.
inline constexpr double kReadShare = 0.905;

// Of K and V that a decode tile, or the share of a thread block in it, may have to read so that no schedule is needed
// to balance them: an SM reads 65 to 75 GB/s, so the longest sequence among short ones may take 55 to 65 us.
inline constexpr std::int64_t kMostBytesOfShare = std::int64_t{4} << 20;

// Tiles of few queries with at most so many key blocks are alike enough to be taken in turn.
inline constexpr int kMostBlocksOfShortTile = 4;

constexpr int threads_of(TileConfig const& tile) {
  constexpr int kWarpgroupThreads = 128;
  return (slabs_of(tile) + 1) * kWarpgroupThreads;
}

struct PlanRequest {
  Problem const& problem;
  DeviceInfo const& device;
  testing::ForcedPlan const& forced;
  // Of few queries: tiles of all sequences and one group of heads, where they may be more than one for each sequence
  // (take_several_tiles()); else 0.
  std::int64_t several_tiles = 0;

  int ratio() const { return problem.heads_q / problem.heads_k; }
  int available_sms() const { return max_of(1, device.sm_count - problem.sm_margin); }
  int most_ctas(TileConfig const& tile) const { return forced.ctas > 0 ? forced.ctas : available_sms() * tile.per_sm; }
  // Of K and V of heads that run together, where those of a head take `kv_bytes`; at most a share of L2 that may be
  // more than all of it.
  std::int64_t bytes_together(std::int64_t kv_bytes, double most_of_l2) const;
  double read_bytes_per_us() const { return kReadShare * 1e3 * device.memory_gbs; }

  // How calls with a schedule, and all calls of few queries, pack heads.
  int scheduled_packing() const { return hopper_attention::scheduled_packing(problem.heads_q, problem.heads_k); }
  int scheduled_groups() const { return problem.heads_q / scheduled_packing(); }

  // Tiles of a call of few queries: one or more for each sequence and group of heads.
  std::int64_t groups_of_few() const { return std::int64_t{problem.batch} * scheduled_groups(); }
  std::int64_t tiles_of_few() const { return several_tiles > 0 ? several_tiles * scheduled_groups() : groups_of_few(); }

  // Few enough queries that one slab holds those of all heads of a K/V head.
  std::int64_t rows_of_sequence() const { return std::int64_t{problem.seqlen_q} * scheduled_packing(); }
  // That a tile of few queries has.
  std::int64_t rows_of_few() const { return several_tiles > 0 ? kMostSomeRows : rows_of_sequence(); }
  bool decodes() const { return several_tiles > 0 || (rows_of_sequence() <= kSlabRows && !has_short_prompts()); }
  // Sequences with more rows than the tiles for few queries that read fast hold, on so few keys that what a tile takes
  // beside them counts. A tile of 64 rows that has an SM for itself computes, starts and ends one after the other: 256
  // sequences of 64 queries and keys, 16 heads, d128, 144 us, by a tile of 128x128 86; on 1k 578 and 542.
  bool has_short_prompts() const;
  TileUse decode_use() const;
  // Whether some sequences may have so few query rows that they take another tile than decode_use(), since their tile
  // must not depend on how many others may have.
  bool mixes_decode_tiles() const;
  TileUse many_use() const { return problem.softcap == 0.0F ? TileUse::kRagged : TileUse::kCapped; }

  // Tiles if all rows of q are of one sequence, or of several with full tiles, or all but `apart` of a packed q. More
  // than that is not known of one, and the tile must not depend on max_seqlen_q.
  std::int64_t full_tiles(TileConfig const& tile, std::int64_t apart = 0) const;

  // Of the longest sequence that there may be: tiles, and their key blocks, or parts that do not depend on the batch.
  SequenceWork work_of_sequence(TileConfig const& tile) const;
  // Key blocks that a tile of few queries may have, a bound on their keys, and a block's bytes of K and V.
  std::int64_t blocks_of_tile(TileConfig const& tile) const;
  std::int64_t most_keys_of_tile(TileConfig const& tile) const;
  std::int64_t most_keys_of_queries(int queries) const;
  std::int64_t bytes_of_block(TileConfig const& tile) const;

  // Rows of kTiles for the head dims. The first raises NotImplemented if there is none, the second, for the forced
  // tile, InvalidArgument if none of these uses (of any, where none is given) agrees.
  TileRow const& tile_row(TileUse use) const;
  TileRow const& forced_row(std::initializer_list<TileUse> uses) const;
  bool forces_tile() const { return forced.tile != TileConfig{}; }
  bool forces_splits() const { return forced.num_splits >= 2; }
  // What a block has to do: by its tile, by parts of tiles, or by how many blocks there are.
  bool forces_work() const { return forces_tile() || forces_splits() || forced.ctas > 0; }
  // Whether the forced tile, if any, agrees.
  bool allows(TileConfig const& tile) const;
  bool holds(TileConfig const& tile) const {
    return tile.calls == Calls::kAll || (tile.calls == Calls::kCapped) == (problem.softcap != 0.0F);
  }
};

// The kernel for many queries: its tile, whether the schedule may cut tiles, and in how many parts
// each tile is where these follow from their index.
struct PrefillChoice {
  TileUse use = TileUse::kRagged;
  bool may_split = false;
  int parts = 1;
};

// plan_dense.cpp: a tile follows from its index. plan_alike: with lengths on the device that cannot but be the same, or
// whose order saves little; the tile is that of other lengths, if they have no kernel for both classes.
void plan_dense(PlanRequest const& request, Plan& plan);
// Of an SM, for a sequence of the problem, with its share of the time that SMs are idle.
double us_of_sequence(PlanRequest const& request, TileRow const& row, int packed_heads);
void plan_alike(PlanRequest const& request, Plan& plan, PrefillChoice const& prefill);

// plan_pairs.cpp: the thread blocks of a cluster share two tiles, with the packing of the plan. us_of_pairs: of the
// call; infinite if there are more tiles than SMs, more sequences than have ranks, or no tile that is worth sharing.
double us_of_pairs(PlanRequest const& request, TileRow const& row, int packed_heads);
int size_of_clusters(PlanRequest const& request, TileRow const& row, int packed_heads);
void plan_pairs(PlanRequest const& request, Plan& plan, TileRow const& row);
// Of `tiles`, as many of each of the lengths in `blocks` (of keys), the most first, with clusters of `size`; infinite
// if they would not all run at once, or no tile is worth sharing.
double us_with_clusters(PlanRequest const& request, TileRow const& row, std::vector<int> const& blocks,
                        std::int64_t tiles, int size);
// The kernel alone, the first of a plan, with clusters of `size`. `at_once`: tiles that its grid has room for, the
// others are taken in turn.
KernelPlan& add_pairs(PlanRequest const& request, Plan& plan, TileRow const& row, int size,
                      std::int64_t at_once = kMaxTiles);

// plan_clusters.cpp: thread blocks that share each tile of few queries; 0: not so. The plan has it in `cluster`, and in
// `listed` whether tiles are drawn in the order of the schedule.
int cluster_size(PlanRequest const& request);
bool draws_tiles(PlanRequest const& request);
// One part holds every tile of few queries with batch_invariant, so that none is cut.
bool fits_one_split(PlanRequest const& request, TileConfig const& tile);
void plan_clusters(PlanRequest const& request, Plan& plan);
// For a plan with a schedule, whose bound on the lengths is too long for clusters: what the sequences really have may
// not be. An engine's bound is what a page table has room for.
void leave_clusters_to_schedule(PlanRequest const& request, Plan& plan);
// Of calls of few queries whose schedule decides between whole tiles, clusters and units.
FewReaders readers_of_few(Problem problem, DeviceInfo const& device);
// Thread blocks for few queries that read as fast as all while prefill has the other SMs.
int readers_beside_prefill(PlanRequest const& request, TileConfig const& tile);
// The same if each were as slow as the slowest of them.
int slow_readers_beside_prefill(PlanRequest const& request, TileConfig const& tile);
// Thread blocks for many queries that take as long for a unit each as memory takes to bring as many units of few.
int prefill_at_par(PlanRequest const& request, TileConfig const& few);

// plan_several.cpp: the request, with several tiles of 32 rows for a sequence and group of heads where these take less
// time than what else there is.
PlanRequest take_several_tiles(PlanRequest const& request, Plan& plan);

// plan_prefill.cpp
PrefillChoice choose_prefill(PlanRequest const& request);
// The same where a schedule shares the tiles out, which may then cut those of fewer rows, too.
PrefillChoice choose_scheduled(PlanRequest const& request, PrefillChoice const& choice);
// Of a few sequences whose tiles are whole and few, so that blocks find them by themselves (plan_in_order).
bool needs_no_schedule(PlanRequest const& request, PrefillChoice const& choice);
void plan_in_order(PlanRequest const& request, Plan& plan, PrefillChoice const& choice);
// The kernel alone, the first; `at_once` as in add_pairs().
KernelPlan& add_in_order(PlanRequest const& request, Plan& plan, TileUse use, std::int64_t at_once = kMaxTiles);
// Of a use that a head dim need not have; nullptr if it has none or it must not be taken.
TileRow const* special_row(PlanRequest const& request, TileUse use);
// That of tiles with one block, if it holds what the mask leaves to a tile. It depends neither on other sequences nor
// on bounds, so that it is for batch_invariant, too.
TileRow const* window_row(PlanRequest const& request);
// Microseconds of the call, but for what every call takes.
double us_of_choice(PlanRequest const& request, PrefillChoice const& choice);
// Keys that a full tile of a packed q may see, whatever max_seqlen_q is.
std::int64_t keys_of_full_tile(PlanRequest const& request, TileConfig const& tile);
// Microseconds of a tile that sees `keys`.
double us_of_tile(TileRow const& row, double keys);
void plan_equal_parts(PlanRequest const& request, Plan& plan, PrefillChoice const& choice);
bool whole_tiles_fill_grid(PlanRequest const& request);
// Whether so few sequences may have few queries, on so few keys, that tiles for many take less time for these than
// further kernels.
bool takes_few_queries_along(PlanRequest const& request, PrefillChoice const& choice);
// What they take of all SMs in such tiles.
double us_of_few_along(PlanRequest const& request, TileRow const& row);
// How many queries each sequence has is known without reading a length, but for rows of a packed q that belong to none.
bool queries_are_known(Problem const& problem);
// For sequences that are all alike: what the kernels would decide.
bool splitting_pays(PlanRequest const& request);

// plan_classes.cpp: few prompts or chunks beside sequences of few queries; both kernels find their tiles by themselves.
struct ClassesChoice {
  int blocks_of_many = 1;  // thread blocks that share a tile of many queries
  int blocks_of_few = 1;   // and one of few
  bool has_few = true;     // some sequence may have few queries
  bool few_first = false;
  bool draws = false;  // tiles of few queries, more than thread blocks, in the order of a schedule
};
std::optional<ClassesChoice> choose_classes(PlanRequest const& request);
void plan_classes(PlanRequest const& request, Plan& plan, ClassesChoice const& choice);

// plan_both.cpp: one kernel for sequences of few queries and of many.
// The kernel for prompts and single queries, where two of them would wait for each other longer than it is slower than
// they are: nullptr if it is not to be taken. Prompts have all queries but one of each sequence. Calls with a bound on
// parts keep two kernels.
TileRow const* mixed_row(PlanRequest const& request);
// Whether a tile may be so long that the schedule wants to cut it, whose units are blocks of kRagged.
bool may_cut_mixed(PlanRequest const& request, TileRow const& mixed);
// Whether a step of a few rounds of tiles of prompts has so many rows that most sequences seem to be prompts: a quarter
// of those that there could be, and in the mean more than a tile for few queries holds. Of a step without others,
// kernels for few queries take 8 to 13 us to find that out, and a kernel for many is faster than two up to that bound,
// also where some sequences have few (docs/performance-notes.md, step 289).
bool are_mostly_prompts(PlanRequest const& request);
// Whether a step of so many sequences may have the kernel for both classes, whatever its prompts are.
bool may_be_mixed(PlanRequest const& request);
// Whether metadata are there, which cut each long tile by itself, for a step of prompts beside sequences of few queries
// that may have such tiles: one kernel takes both then, and nothing is shared out by bounds.
bool cuts_step_evenly(PlanRequest const& request);

// plan_listed.cpp: a schedule shares the tiles out.
// Whether packed q and k have just the rows of sequences that are all as long as they may be, and no tile is to be cut:
// then a schedule has nothing to find out. Sequences may still be shorter, and rows count for none.
bool lengths_are_known(PlanRequest const& request);
// Whether tiles are so short that finding them in a schedule takes longer than its order saves: of sequences of at most
// two blocks of keys, or where each has one tile, of any length, or all have about as many, as prompts have.
bool order_saves_little(PlanRequest const& request, PrefillChoice const& choice);
bool whole_tiles_suffice(PlanRequest const& request);
void plan_listed(PlanRequest const& request, Plan& plan, PrefillChoice const& prefill);

// Packing, workspace and one kernel of a plan that is not dense. choose_kernel leaves it to the caller to explain the
// grid, which it may still change.
void take_scheduled_packing(PlanRequest const& request, Plan& plan);
void choose_workspace(Problem const& problem, Plan& plan);
KernelPlan& choose_kernel(PlanRequest const& request, Plan& plan, TileUse use, bool may_split);
void explain_grid(Plan& plan, KernelPlan const& kernel);

// The row of the same tile with the costs that were measured: without softcap, as dense calls have it.
TileRow const& measured_row(TileRow const& row);

template <class... Parts>
void because(Plan& plan, char const* decision, Parts const&... parts) {
  plan.reasons.push_back(concat(decision, ": ", parts...));
}

std::string megabytes(std::int64_t bytes);
std::string microseconds(double us);
std::string counted(std::int64_t number, char const* noun);  // "1 tile", "2 tiles"

}  // namespace hopper_attention
