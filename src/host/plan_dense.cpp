// Calls whose tiles follow from their index, since all sequences are alike, as long as the rows allow, or short: which
// tile, how many heads share it, and in which order do the tiles run?
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "host/plan_request.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "host/tile_order.h"
#include "kernels/block_range.h"

namespace hopper_attention {
namespace {

// What a tile of several heads takes of what its costs say, where its slabs may skip blocks: they end close to each
// other, and not 64 keys apart, so that warpgroups wait less for each other. The plan is within 0.65 % of the fastest
// tile in the mean of 102 calls with 2 to 32 heads of q for each of k; 1.0 % without.
constexpr double kPackedShare = 0.98;
constexpr std::int64_t kTilesToCost = 1024;   // of a head; more are sampled
constexpr std::int64_t kRoundsToBalance = 8;  // of the grid; after more, an order without idle SMs is found
// Of an SM, for a tile that is worth a thread block of its own: what starting one takes is 1 % of it.
constexpr double kLongTileUs = 300;
// What kernels that share tiles take longer than those of dense calls, which have no code for pages: 512 tokens, 8/1
// heads, d128 took 10.6 us in clusters of 4 and 9.8 in whole tiles.
constexpr double kMoreCodeUs = 0.5;

struct Candidate {
  TileRow const* row = nullptr;
  int packed_heads = 1;
  double busy_us = 0;  // of an SM, for a sequence
  double us = 0;       // with its share of the time that SMs are idle
};

std::string percent(double share) { return concat(static_cast<int>(share * 100.0 + 0.5), " %"); }

// Query blocks of a head.
std::int64_t m_blocks(Problem const& problem, TileConfig const& tile, int packed_heads) {
  require(packed_heads <= rows_of_slab(tile), "packed_heads: ", packed_heads, " heads do not fit the ",
          rows_of_slab(tile), " rows of the tile");
  std::int64_t const queries_per_tile = std::int64_t{slabs_of(tile)} * (rows_of_slab(tile) / packed_heads);
  return ceil_div<std::int64_t>(problem.seqlen_q, queries_per_tile);
}

// A block at least, where rows of K or V are no multiple of 32 bytes, which TMA brings more slowly: with tiles for head
// dims up to 96 and 128, whose rows are several boxes, a block of 128x128 takes 1,712 ns for head dim 72 and 1,246 for
// 80.
int least_block_ns(Problem const& problem, TileConfig const& tile) {
  constexpr double kNsOfRow = 6.7;
  auto const slow_rows = [&](int head_dim) { return head_dim * kElementBytes % 32 != 0 ? tile.keys : 0; };
  bool const several_boxes = 64 < tile.head_dim && tile.head_dim <= 128;
  int const rows = slow_rows(problem.head_dim) + slow_rows(problem.head_dim_v);
  return several_boxes ? static_cast<int>(rows * kNsOfRow) : 0;
}

// Nanoseconds of an SM for the tile of query block m.
int tile_ns(Problem const& problem, TileRow const& row, Packing const& packing, int m) {
  QueryRange const queries = query_range(packing, slabs_of(row.tile), m, problem.seqlen_q);
  SeqlenQK const len{problem.seqlen_q, problem.seqlen_k};
  BlockRange const range = block_range(problem.mask, queries.first, queries.last, len, row.tile.keys);
  TileCost cost = row.cost == kUnknownCost ? TileCost{} : row.cost;  // of a tile that was forced
  cost.block = max_of(cost.block, least_block_ns(problem, row.tile));
  auto const ns = [&](std::int64_t blocks_of_slabs) {
    std::int64_t const all = blocks_of_slabs * cost.block / slabs_of(row.tile) + cost.tile;
    return static_cast<int>(std::min<std::int64_t>(all, std::numeric_limits<int>::max()));
  };
  if (!slabs_skip_blocks(row.tile)) {
    int const slabs = ceil_div(queries.last + 1 - queries.first, packing.queries_per_slab);  // that are not idle
    return ns(std::int64_t{slabs} * range.blocks());
  }
  std::int64_t blocks = 0;  // of slabs
  for (int slab = 0; slab < slabs_of(row.tile); ++slab) {
    QueryRange const rows = queries_of_slab(packing, queries, slab);
    blocks += slab_range(range, problem.mask, rows.first, rows.last, len, row.tile.keys).blocks();
  }
  return ns(blocks);
}

std::vector<int> work_of_tiles(Problem const& problem, TileRow const& row, int packed_heads) {
  Packing const packing = make_packing(packed_heads, rows_of_slab(row.tile));
  std::vector<int> work;
  for (int m = 0; m < m_blocks(problem, row.tile, packed_heads); ++m) {
    work.push_back(tile_ns(problem, row, packing, m));
  }
  return work;
}

std::int64_t kv_bytes_of_head(Problem const& problem) {
  return std::int64_t{problem.seqlen_k} * (problem.head_dim + problem.head_dim_v) * kElementBytes;
}

// Groups of heads that share tiles, whose K and V may run together. With head dim 128 causal 4k to 16k take 1 to 1.4 %
// less time with as many as about fill L2 than with those that leave room there, with 256 as long
// (docs/performance-notes.md, step 182).
std::int64_t groups_in_l2(PlanRequest const& request, int packed_heads) {
  constexpr double kMostOfL2 = 1.1;
  Problem const& problem = request.problem;
  std::int64_t const all = std::int64_t{problem.batch} * (problem.heads_q / packed_heads);
  std::int64_t const kv_bytes = kv_bytes_of_head(problem);
  if (kv_bytes == 0) { return all; }
  return std::min(all, request.bytes_together(kv_bytes, kMostOfL2) / kv_bytes * (request.ratio() / packed_heads));
}

// Of the time that blocks are busy, what memory takes to bring all tensors once.
double memory_share(PlanRequest const& request, std::vector<int> const& work, int packed_heads, int ctas) {
  Problem const& problem = request.problem;
  double const q_bytes = 1.0 * problem.seqlen_q * (problem.head_dim + problem.head_dim_v) * kElementBytes;
  double const kv_bytes = static_cast<double>(kv_bytes_of_head(problem));
  double const bytes = problem.batch * (problem.heads_q * q_bytes + problem.heads_k * kv_bytes);
  double const ns_of_group = std::accumulate(work.begin(), work.end(), 0.0);
  double const busy_us = ns_of_group * 1e-3 * problem.batch * (problem.heads_q / packed_heads) / ctas;
  return busy_us == 0 ? 0.0 : std::min(1.0, bytes / request.read_bytes_per_us() / busy_us);
}

// Of a call's tiles in turn on `ctas` thread blocks. What memory takes is left at 0: a tile, and with it bits, must not
// depend on it.
TileOrderProblem order_problem(PlanRequest const& request, TileRow const& row, int packed_heads, int ctas) {
  Problem const& problem = request.problem;
  std::int64_t const all = std::int64_t{problem.batch} * (problem.heads_q / packed_heads);
  return {.sequence_heads = static_cast<int>(all),
          .sharing = request.ratio() / packed_heads,
          .in_l2 = static_cast<int>(groups_in_l2(request, packed_heads)),
          .ctas = ctas,
          .descending = first_tiles_are_shortest(problem.mask),
          .work = work_of_tiles(problem, row, packed_heads)};
}

// What a sequence takes with this tile. Where the grid takes few tiles in turn, what the busiest SM has counts, so that
// the batch and the card decide, too; calls with batch_invariant do not come here, since their tiles are those of a
// schedule. An sm_margin does not decide: it only steers.
Candidate candidate(PlanRequest const& request, TileRow const& row, int packed_heads) {
  Problem const& problem = request.problem;
  Packing const packing = make_packing(packed_heads, rows_of_slab(row.tile));
  std::int64_t const count = m_blocks(problem, row.tile, packed_heads);
  std::int64_t const samples = std::min(count, kTilesToCost);
  double ns = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    ns += tile_ns(problem, row, packing, static_cast<int>((2 * i + 1) * count / (2 * samples)));
  }
  std::int64_t const tiles_of_sequence = count * (problem.heads_q / packed_heads);
  std::int64_t const tiles = tiles_of_sequence * problem.batch;
  if (tiles == 0) { return {&row, packed_heads}; }
  double const share_of_sm = 1.0 / row.tile.per_sm;  // of a block
  double const busy_us =
      ns / static_cast<double>(samples) * static_cast<double>(tiles_of_sequence) * share_of_sm * 1e-3;
  std::int64_t const slots = std::int64_t{max_of(1, request.device.sm_count)} * row.tile.per_sm;
  if (row.use == TileUse::kPaired) {
    double const of_call = us_of_pairs(request, row, packed_heads) + kMoreCodeUs;
    return {&row, packed_heads, busy_us, of_call * static_cast<double>(slots) / problem.batch};
  }
  if (tiles > kRoundsToBalance * slots) { return {&row, packed_heads, busy_us, busy_us}; }
  auto const ctas = static_cast<int>(std::min(tiles, slots));
  double const balance = choose_tile_order(order_problem(request, row, packed_heads, ctas)).imbalance;
  return {&row, packed_heads, busy_us, busy_us * balance * static_cast<double>(slots) / ctas};
}

// What candidates are compared by.
double expected_us(PlanRequest const& request, Candidate const& candidate) {
  if (candidate.row == nullptr) { return std::numeric_limits<double>::infinity(); }
  bool const skips = slabs_skip_blocks(candidate.row->tile) && request.problem.mask.right != kUnlimited;
  return candidate.us * (candidate.packed_heads > 1 && skips ? kPackedShare : 1.0);
}

std::vector<TileRow const*> candidate_rows(PlanRequest const& request) {
  if (request.forces_tile()) { return {&request.forced_row({})}; }
  if (request.decodes()) { return {&request.tile_row(request.decode_use())}; }
  if (request.many_use() == TileUse::kCapped) { return {&request.tile_row(TileUse::kCapped)}; }
  TileConfig const& first = request.tile_row(TileUse::kDense).tile;
  std::vector<TileRow const*> rows;
  for (TileRow const& row : kTiles) {
    bool const fits = row.tile.head_dim == first.head_dim && row.tile.head_dim_v == first.head_dim_v;
    bool const of_use = row.use == TileUse::kDense || row.use == TileUse::kPaired ||
                        (row.use == TileUse::kDecode && row.cost != kUnknownCost && !request.has_short_prompts());
    if (of_use && fits) { rows.push_back(&row); }
  }
  return rows;
}

// Query heads that may share a tile.
std::vector<int> candidate_packings(PlanRequest const& request) {
  int const g = request.ratio();
  if (int const forced = request.forced.packed_heads; forced != 0) {
    require(forced == 1 || (forced == g && g <= kSlabRows), "packed_heads: must be 1 or the ", g,
            " heads of q for each of k (at most ", kSlabRows, "), ", forced, " was forced");
    return {forced};
  }
  if (request.decodes()) { return {request.scheduled_packing()}; }
  return g == 1 || g > kSlabRows ? std::vector{1} : std::vector{1, g};
}

void explain_packing(PlanRequest const& request, Plan& plan, std::vector<Candidate> const& best_of_packing) {
  int const g = request.ratio();
  if (request.forced.packed_heads != 0) {
    because(plan, "packing", plan.packed_heads, " heads share a tile: forced");
  } else if (g == 1) {
    because(plan, "packing", "off: every head of q has its own head of k");
  } else if (request.decodes()) {
    because(plan, "packing", plan.packed_heads, " heads of q for each of k share a tile, which holds all queries");
  } else if (g > kSlabRows) {
    because(plan, "packing", "off: ", g, " heads of q for each of k are more than the ", kSlabRows, " rows of a slab");
  } else if (best_of_packing.size() == 1) {
    because(plan, "packing", g, " heads share a tile: most sequences have fewer queries than the longest");
  } else {
    auto const us = [&](int i) {
      return microseconds(expected_us(request, best_of_packing[static_cast<std::size_t>(i)]));
    };
    std::string const times = concat(us(0), " us without, ", us(1), " us packed");
    if (plan.packed_heads > 1) {
      because(plan, "packing", g, " heads share a tile: ", times);
    } else {
      because(plan, "packing", "off: ", times);
    }
  }
}

// Tile and packing together: a window, or few queries, want tiles whose rows are few queries of many heads.
Candidate choose_tile(PlanRequest const& request, Plan& plan, std::vector<TileRow const*> const& rows,
                      std::vector<int> const& packings) {
  Problem const& problem = request.problem;
  Candidate best;
  std::vector<Candidate> best_of_packing;
  std::string others;
  auto const is_better = [&](Candidate const& found, Candidate const& than) {
    return found.row != nullptr && (than.row == nullptr || expected_us(request, found) < expected_us(request, than));
  };
  for (int const packed_heads : packings) {
    Candidate best_here;
    for (TileRow const* const row : rows) {
      bool const holds = !has_one_block(row->tile) || one_block_holds(row->tile, problem.mask, packed_heads);
      if (!holds) { continue; }
      Candidate const found = candidate(request, *row, packed_heads);
      if (std::isinf(found.us) && rows.size() > 1) { continue; }  // pairs that are not for such a call
      others += concat(others.empty() ? "" : ", ", row->tile.rows, "x", row->tile.keys,
                       row->use == TileUse::kPaired ? " shared" : "", packed_heads > 1 ? " packed " : " ",
                       microseconds(expected_us(request, found)));
      if (is_better(found, best_here)) { best_here = found; }
    }
    if (is_better(best_here, best)) { best = best_here; }
    best_of_packing.push_back(best_here);
  }
  require(best.row != nullptr, "tile: its only block does not hold what the mask leaves: ", request.forced.tile,
          " was forced");
  TileConfig const& tile = best.row->tile;
  plan.packed_heads = best.packed_heads;
  because(plan, "tile", tile, ": ",
          request.forces_tile()               ? "forced"
          : request.decodes()                 ? concat("few queries: ", best.row->why)
          : best.row->use == TileUse::kDecode ? "few tiles: the longest of 64 rows end before those of more rows"
                                              : best.row->why,
          request.forces_tile() || request.decodes()
              ? std::string()
              : concat("; microseconds of an SM for a sequence, idle time included: ", others));
  explain_packing(request, plan, best_of_packing);
  plan.tiles = m_blocks(problem, tile, best.packed_heads) * (problem.heads_q / best.packed_heads) * problem.batch;
  require(plan.tiles <= kMaxTiles, "q: the problem has ", plan.tiles, " tiles, at most ", kMaxTiles,
          " are possible; split the batch");
  return best;
}

// Tiles in turn are shared out beforehand, and blocks that compute a few parts in a thousand faster run ahead of the
// others. Where K and V of a head stay in L2 that costs nothing; where they do not, blocks that are thousands of keys
// apart read them from memory again: a pair of tokens takes 10 % longer with 16 heads of 256k tokens than with 16k.
// Blocks of one tile each start in order as others end, so that these are together again with each tile. Where no tiles
// share keys, there is nothing to keep together.
bool blocks_drift_apart(PlanRequest const& request, Plan const& plan, Candidate const& chosen) {
  Problem const& problem = request.problem;
  int const available = request.most_ctas(chosen.row->tile);
  bool const in_turn = plan.tiles > available && request.forced.ctas == 0 && problem.sm_margin == 0;
  bool const share_keys = plan.tiles > std::int64_t{problem.batch} * problem.heads_k;
  if (!in_turn || !share_keys || kv_bytes_of_head(problem) <= request.device.l2_bytes) { return false; }
  return chosen.busy_us * problem.batch / static_cast<double>(plan.tiles) >= kLongTileUs;
}

KernelPlan choose_grid(PlanRequest const& request, Plan& plan, TileConfig const& tile, bool alone) {
  int const available = request.most_ctas(tile);
  int const sm_margin = request.problem.sm_margin;
  std::int64_t const ctas = alone ? plan.tiles : std::min<std::int64_t>(plan.tiles, available);
  KernelPlan const kernel{family_of(tile), tile, static_cast<int>(ctas), threads_of(tile)};
  because(plan, "grid", kernel.ctas, " blocks of ", kernel.threads, " threads for ", plan.tiles, " tiles: ",
          request.forced.ctas > 0   ? std::string("forced")
          : plan.tiles <= available ? std::string("one tile each")
          : alone ? std::string("one long tile each, in order as SMs are free, so that all read the same keys from L2")
                  : concat(tile.per_sm, " on each SM, which take tiles in turn"),
          sm_margin > 0 ? concat(", sm_margin ", sm_margin, " leaves SMs free") : "");
  return kernel;
}

void choose_order(PlanRequest const& request, Plan& plan, Candidate const& chosen, int ctas, bool alone) {
  Problem const& problem = request.problem;
  std::int64_t const all = std::int64_t{problem.batch} * (problem.heads_q / plan.packed_heads);
  if (request.forced.heads_per_pass > 0) {
    plan.heads_per_pass = static_cast<int>(std::min<std::int64_t>(all, request.forced.heads_per_pass));
    because(plan, "order", plan.heads_per_pass, " of ", all, " head groups at a time: forced");
    return;
  }
  int const sharing = request.ratio() / plan.packed_heads;  // groups that read the same K and V
  std::int64_t const kv_bytes = kv_bytes_of_head(problem);
  std::int64_t const fitting = groups_in_l2(request, plan.packed_heads);
  if (alone) {
    plan.heads_per_pass = sharing;  // of one K/V head, which L2 does not hold
    because(plan, "order", plan.heads_per_pass, " of ", all, " head groups at a time, in the same direction");
    return;
  }
  TileOrderProblem problem_of_order = order_problem(request, *chosen.row, chosen.packed_heads, ctas);
  double const share = memory_share(request, problem_of_order.work, chosen.packed_heads, ctas);
  problem_of_order.memory_share = share;
  TileOrder const order = choose_tile_order(problem_of_order);
  plan.heads_per_pass = order.heads_per_pass;
  because(plan, "order", plan.heads_per_pass, " of ", all, " head groups at a time: ",
          order.at_once
              ? concat("so few that all tiles of each run at once, since memory takes ", percent(share), " of the time")
              : concat("K and V of one head take ", megabytes(kv_bytes), ", those of ", fitting,
                       " groups may run together by what L2 holds"),
          "; the busiest block has ", percent(order.imbalance), " of the mean work");
}

// `chosen` tells what tiles cost.
void run_whole_tiles(PlanRequest const& request, Plan& plan, TileConfig const& tile, Candidate const& chosen) {
  because(plan, "splits", request.problem.num_splits == 1 ? "1: as asked" : "1: whole tiles use the SMs as well");
  bool const alone = blocks_drift_apart(request, plan, chosen);
  KernelPlan const kernel = choose_grid(request, plan, tile, alone);
  choose_order(request, plan, chosen, kernel.ctas, alone);
  because(plan, "workspace", "0 bytes: nothing is merged afterwards");
  plan.kernels.push_back(kernel);
}

}  // namespace

double us_of_sequence(PlanRequest const& request, TileRow const& row, int packed_heads) {
  return candidate(request, row, packed_heads).us;
}

void plan_alike(PlanRequest const& request, Plan& plan, PrefillChoice const& prefill) {
  TileRow const& row = request.tile_row(prefill.use);
  // What a tile costs is known of the longest sequence alone.
  bool const are_as_long = bound_on_queries_holds(request.problem);
  std::vector<int> const packings =
      are_as_long ? candidate_packings(request) : std::vector{request.scheduled_packing()};
  run_whole_tiles(request, plan, row.tile, choose_tile(request, plan, {&measured_row(row)}, packings));
}

void plan_dense(PlanRequest const& request, Plan& plan) {
  Candidate const chosen = choose_tile(request, plan, candidate_rows(request), candidate_packings(request));
  if (chosen.row->use == TileUse::kPaired) {
    plan_pairs(request, plan, *chosen.row);
  } else {
    run_whole_tiles(request, plan, chosen.row->tile, chosen);
  }
}

}  // namespace hopper_attention
