// Calls of few queries: does each tile get thread blocks of its own, which merge in shared memory, and how many?
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "host/plan_request.h"
#include "host/schedule_shape.h"
#include "host/tile_share.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {
namespace {

// The share of a block may be so many times kMostBytesOfShare where no tile is longer than another.
constexpr int kSharesOfOneSequence = 4;

// Whether the clusters of two calls run beside each other. Where they do not, half of the next call's would wait for
// this one's to end, and then run on SMs with neighbours.
bool clusters_leave_room(PlanRequest const& request, TileConfig const& tile, int size, std::int64_t ctas) {
  return size == 1 || 2 * ctas <= most_ctas_in_clusters(request, tile, size);
}

// Whether clusters of `share`, as long as tiles are alike, are as good as what a schedule would choose.
bool is_balanced(PlanRequest const& request, TileConfig const& tile, TileShare const& share) {
  bool const one = request.problem.batch == 1;
  if (!one && share.clusters == 1) { return !cutting_pays_if_alike(request, tile, share.size); }
  // Without metadata the call would have to make the schedule first.
  return !request.problem.has_metadata || us_of_share(request, tile, share) <= us_by_schedule(request, tile);
}

// With batch_invariant, of tiles that may have several parts: blocks that share each tile, whose parts follow from it
// alone, one each or a group of them each; 0: a schedule is better. A block for each part takes the least time. One for
// each group reads 4,096 keys, which is as fast as memory allows where there are as many as suffice for that.
int cluster_for_fixed_parts(PlanRequest const& request, TileConfig const& tile) {
  testing::ForcedPlan const& forced = request.forced;
  bool const is_forced =
      request.forces_tile() || forced.packed_heads != 0 || forced.heads_per_pass != 0 || forced.cluster != 0;
  if (request.decode_use() != TileUse::kFewRows || request.problem.mask.cp_world > 1 || is_forced) { return 0; }
  // Of any sequence: one that is shorter may see more keys, the whole of a chunk instead of the begin of one.
  std::int64_t const blocks = ceil_div<std::int64_t>(request.most_keys_of_tile(tile), tile.keys);
  int const parts = fixed_parts(static_cast<int>(blocks), kFixedSplitKeys / tile.keys);
  int const groups = ceil_div(parts, kPartsOfGroup);
  auto const size_for = [](int count) { return static_cast<int>(std::bit_ceil(static_cast<unsigned>(count))); };
  auto const fits = [&](int size) {
    return size <= most_cluster(request) && shares_columns(tile, size) && runs_at_once(request, tile, size);
  };
  if (fits(size_for(parts))) { return size_for(parts); }
  bool const suffice = !leaves_most_idle(request, groups * request.tiles_of_few(), tile.per_sm);
  return suffice && fits(size_for(groups)) ? size_for(groups) : 0;
}

}  // namespace

bool fits_one_split(PlanRequest const& request, TileConfig const& tile) {
  return request.problem.mask.cp_world <= 1 && request.most_keys_of_tile(tile) <= kFixedSplitKeys;
}

// Thread blocks that share each tile, where all tiles of the call run at once, or are short, or are drawn; 0: a
// schedule is better. Sequences that are much longer than the others would leave most of the card idle, which is
// bounded by what a block may have to read.
int cluster_size(PlanRequest const& request) {
  Problem const& problem = request.problem;
  testing::ForcedPlan const& forced = request.forced;
  bool const forces_chunks = request.forces_splits() && forced.cluster <= 0;
  if (!request.decodes() || forces_chunks || forced.ctas > 0 || forced.cluster < 0) { return 0; }
  if (request.mixes_decode_tiles()) { return 0; }
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  if (problem.batch_invariant && !fits_one_split(request, tile)) { return cluster_for_fixed_parts(request, tile); }
  TileShare const share = share_of_tile(request, tile);
  if (forced.cluster > 0) { return share.size; }         // 1 with batch_invariant, whose tiles are whole here
  if (request.several_tiles > 0) { return share.size; }  // take_several_tiles() has compared
  if (request.forces_tile() || forced.packed_heads != 0 || forced.heads_per_pass != 0) { return 0; }

  std::int64_t const tiles = request.tiles_of_few();
  std::int64_t const blocks = request.blocks_of_tile(tile);
  if (tiles > request.most_ctas(tile)) {
    bool const in_any_order = blocks <= kMostBlocksOfShortTile || (problem.batch_invariant && !problem.ragged);
    return in_any_order || (problem.ragged && whole_tiles_suffice(request)) ? 1 : 0;
  }
  if (problem.batch_invariant) { return 1; }
  std::int64_t const bytes = share_bytes(request, tile, share.blocks());
  if (problem.num_splits == 1) { return bytes <= kMostBytesOfShare ? share.size : 0; }
  // A schedule could use the SMs that few clusters leave idle.
  bool const most_idle = leaves_most_idle(request, share.blocks() * tiles);
  bool const one = problem.batch == 1;
  std::int64_t const most = one         ? kSharesOfOneSequence * kMostBytesOfShare / (most_idle ? 2 : 1)
                            : most_idle ? kMostBytesOfShare / 2
                                        : most_bytes_at_once(request, share);
  return bytes <= most && is_balanced(request, tile, share) ? share.size : 0;
}

// Long tiles that are more than the blocks of the grid, where a schedule has their order.
bool draws_tiles(PlanRequest const& request) {
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  // A schedule has no order of several tiles of a sequence.
  return request.problem.ragged && request.several_tiles == 0 && request.tiles_of_few() > request.most_ctas(tile) &&
         request.blocks_of_tile(tile) > kMostBlocksOfShortTile;
}

namespace {

// Of a call whose schedule decides between clusters of `size` and units.
int ctas_by_schedule(PlanRequest const& request, TileConfig const& tile, int size) {
  if (size > 1) {
    int const clusters = most_ctas_in_clusters(request, tile, size) / size;
    // A larger one has a GPC to itself. Times are as if each half of the card took at most half of what memory gives:
    // units for seven GPCs are done later than for six (docs/performance-notes.md, step 204).
    int const even = clusters - clusters % 2;
    return size * (size > kPortableCluster && even >= request.tiles_of_few() ? even : clusters);
  }
  bool const alone = request.tiles_of_few() <= request.available_sms();  // none shares its SM with another
  return alone ? std::min(request.most_ctas(tile), request.available_sms()) : request.most_ctas(tile);
}

// Thread blocks that read all that memory gives while each reads `bytes` of it in a microsecond. Never more than three
// quarters: the others are for prefill.
int readers_of(PlanRequest const& request, TileConfig const& tile, double bytes) {
  int const most = ceil_div(3 * request.most_ctas(tile), 4);
  double const sms = std::ceil(request.read_bytes_per_us() / bytes);
  return sms * tile.per_sm < most ? static_cast<int>(sms) * tile.per_sm : most;
}

}  // namespace

// Of 132 SMs 70 on an H200, 48 on an H100, whose memory is slower. 25 steps of prompts beside 32/8 heads of few queries
// take 0.93 of the time so that they take on an H200 with 99: memory gives as much, and prefill has more SMs
// (docs/performance-notes.md, step 239).
int readers_beside_prefill(PlanRequest const& request, TileConfig const& tile) {
  constexpr double kBytesOfSmPerUs = 64e3;
  return readers_of(request, tile, kBytesOfSmPerUs);
}

int slow_readers_beside_prefill(PlanRequest const& request, TileConfig const& tile) {
  constexpr double kBytesOfSlowestPerUs = 45e3;
  return readers_of(request, tile, kBytesOfSlowestPerUs);
}

int prefill_at_par(PlanRequest const& request, TileConfig const& few) {
  // Than alone: 69 random steps take 0.961 of the time so, 0.966 with 1.12 and 0.972 with 1.
  constexpr double kSlower = 1.25;
  TileRow const* const row = dense_row(request.tile_row(TileUse::kRagged).tile);
  if (row == nullptr) { return request.device.sm_count; }
  double const us_of_block = kSlower * row->cost.block / 1e3;
  return static_cast<int>(us_of_block * request.read_bytes_per_us() / static_cast<double>(request.bytes_of_block(few)));
}

FewReaders readers_of_few(Problem problem, DeviceInfo const& device) {
  problem.seqlen_q = 1;
  problem.seqlen_k = 1 << 24;
  problem.num_splits = 0;
  problem.sm_margin = 0;
  problem.mask = {};
  testing::ForcedPlan const forced;
  PlanRequest const request{problem, device, forced};
  TileConfig const tile = request.tile_row(request.decode_use()).tile;
  FewReaders readers{.ctas = request.most_ctas(tile),
                     .beside_prefill = slow_readers_beside_prefill(request, tile),
                     .of_many = device.sm_count};
  if (problem.batch_invariant) { return readers; }
  if (request.tiles_of_few() <= readers.ctas) { readers.cluster = widest_cluster(request, tile, tile.per_sm); }
  readers.by_schedule = ctas_by_schedule(request, tile, readers.cluster);
  TileRow const* const parts = row_for_both(problem);
  if (parts != nullptr && may_be_mixed(request)) { readers.of_parts = request.most_ctas(parts->tile); }
  return readers;
}

void leave_clusters_to_schedule(PlanRequest const& request, Plan& plan) {
  bool const is_forced = request.forces_work() || request.forced.cluster != 0;
  if (!request.problem.ragged || plan.kernels.size() != 1 || is_forced) { return; }
  KernelPlan& kernel = plan.kernels.front();
  std::int64_t const tiles = request.tiles_of_few();
  if (plan.fixed_splits) {
    // A block merges the parts of whole tiles as the combine kernel would. That of 64 rows has no registers for it.
    plan.draws_if_whole = kernel.may_split && request.decode_use() == TileUse::kFewRows;
    if (plan.draws_if_whole) {
      because(plan, "tiles",
              "drawn whole, the longest first, if none is so long that the schedule shares out its parts");
    }
    return;
  }
  plan.draws_if_whole = tiles > request.most_ctas(kernel.tile);
  if (plan.draws_if_whole) {
    because(plan, "tiles", "drawn whole, the longest first",
            kernel.may_split ? ", if none is so long that the schedule cuts it" : "");
    return;
  }
  int const size = may_share_tiles(request, kernel.tile) ? widest_cluster(request, kernel.tile, kernel.tile.per_sm) : 1;
  plan.cluster_if_alike = size;
  // Where two blocks have room on an SM, those of the next call would begin beside this one's, on some SMs two of them.
  plan.next_starts_early = kernel.tile.per_sm == 1 && clusters_leave_room(request, kernel.tile, size, size * tiles);
  int const ctas = ctas_by_schedule(request, kernel.tile, size);
  kernel.ctas = size > 1 ? ctas : std::min(kernel.ctas, ctas);
  if (kernel.may_split) { kernel.partial_slots = 2 * std::int64_t{kernel.ctas}; }
  because(plan, "tiles", size > 1 ? concat("each by a cluster of ", size, " blocks") : "each by a block",
          kernel.may_split ? " if the schedule finds no sequence much longer than the others" : "");
}

void plan_clusters(PlanRequest const& request, Plan& plan) {
  take_scheduled_packing(request, plan);
  KernelPlan& kernel = choose_kernel(request, plan, request.decode_use(), false);
  int const most = request.most_ctas(kernel.tile);
  TileShare const share = share_of_tile(request, kernel.tile);
  int const of_tile = share.clusters;
  std::int64_t const ctas = kernel.most_tiles * plan.cluster * of_tile;
  kernel.ctas = static_cast<int>(plan.cluster * of_tile > 1 ? ctas : std::min<std::int64_t>(ctas, most));
  because(plan, "grid", counted(kernel.ctas, "block"), " of ", kernel.threads, " threads for ",
          plan.listed || kernel.packed_tiles ? "up to " : "", counted(kernel.most_tiles, "tile"));
  if (of_tile > 1) {
    kernel.may_split = true;
    kernel.partial_rows = static_cast<int>(request.rows_of_few());
    kernel.partial_slots = kernel.most_tiles * of_tile;
  }
  // A combine kernel lets the next call begin: one of 32k keys takes 12.6 us instead of 14.4, though clusters of that
  // call have no room before this one's end.
  plan.starts_early = of_tile > 1 || clusters_leave_room(request, kernel.tile, plan.cluster, kernel.ctas);
  plan.num_splits = plan.cluster * of_tile;
  std::string const reason = reason_for_share(request, kernel.tile, share);
  because(plan, "splits",
          plan.fixed_splits && plan.cluster > 1
              ? concat("those of few queries with more than ", kFixedSplitKeys,
                       " keys, in parts that follow from these, each tile by a cluster of ", plan.cluster,
                       " blocks, which merge them in shared memory")
          : plan.cluster == 1 ? concat("1: ", reason)
          : of_tile == 1
              ? concat("each tile by a cluster of ", plan.cluster,
                       " blocks, which merge their parts in shared memory: ", reason)
              : concat("each tile by ", of_tile, " clusters of ", plan.cluster,
                       " blocks, which merge their parts in shared memory, and a kernel those of clusters: ", reason));
  choose_workspace(request.problem, plan);
}

}  // namespace hopper_attention
