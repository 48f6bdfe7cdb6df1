// Calls of about as many tiles as the card has SMs, some long and some short, as those of one causal prompt of a
// tensor-parallel group: two thread blocks of a cluster share two tiles, so that none waits for the longest.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "host/plan_request.h"
#include "host/ranked_tiles.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "kernels/block_range.h"
#include "kernels/paired_tiles.h"

namespace hopper_attention {
namespace {

// From the last product of a tile that two blocks share until both parts are merged; where the first block has a tile
// before, part of it is hidden.
constexpr double kExchangeUs = 2;
constexpr double kExchangeAloneUs = 2.5;
// What starting clusters and finding pairs takes longer than starting blocks and finding tiles.
constexpr double kStartUs = 0.8;

int blocks_of_tile(Problem const& problem, TileConfig const& tile, Packing const& packing, int m) {
  SeqlenQK const len{query_rows_of_sequence(problem), problem.seqlen_k};
  QueryRange const queries = query_range(packing, slabs_of(tile), m, len.q);
  return block_range(problem.mask, queries.first, queries.last, len, tile.keys).blocks();
}

// Key blocks of the tiles of a sequence, the most first; of sequences that are not known, of all `tiles`, with as many
// as there may be, under a causal mask evenly down to one.
std::vector<int> blocks_of_tiles(PlanRequest const& request, TileConfig const& tile, int packed_heads,
                                 std::int64_t tiles) {
  Problem const& problem = request.problem;
  Packing const packing = make_packing(packed_heads, rows_of_slab(tile));
  int const queries = packing.queries_per_slab * slabs_of(tile);
  std::vector<int> blocks;
  if (!tiles_are_known(problem)) {
    auto const most = static_cast<int>(ceil_div<std::int64_t>(request.most_keys_of_queries(queries), tile.keys));
    auto const steps = static_cast<int>(std::max<std::int64_t>(1, tiles - 1));
    int const fewer = tiles_rise_to_the_last(problem) ? max_of(0, most - 1) : 0;
    for (int i = 0; i < tiles; ++i) { blocks.push_back(most - scaled_cut(i, steps, fewer)); }
    return blocks;
  }
  for (int m = 0; m * queries < query_rows_of_sequence(problem); ++m) {
    blocks.push_back(blocks_of_tile(problem, tile, packing, m));
  }
  std::ranges::sort(blocks, std::greater{});
  return blocks;
}

}  // namespace

double us_of_pairs(PlanRequest const& request, TileRow const& row, int packed_heads) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  TileConfig const& tile = row.tile;
  Problem const& problem = request.problem;
  std::int64_t const tiles = most_tiles(problem, tile, packed_heads);
  if (!tiles_have_ranks(problem) || tiles > request.device.sm_count || tiles == 0) { return kNever; }
  std::vector<int> const blocks = blocks_of_tiles(request, tile, packed_heads, tiles);
  std::int64_t const alike = tiles / std::ssize(blocks);
  auto const blocks_at = [&](std::int64_t rank) {
    return blocks[static_cast<std::size_t>(std::min<std::int64_t>(rank / alike, std::ssize(blocks) - 1))];
  };
  auto const us = [&](double count, int ends) { return (count * row.cost.block + ends * row.cost.tile) * 1e-3; };
  double longest = 0;
  bool shares = false;
  int const pairs = static_cast<int>(number_of_pairs(tiles, request.device.sm_count));
  for (int pair = 0; pair < pairs; ++pair) {
    PairOfRanks const ranks = pair_of_ranks(pair, pairs, static_cast<int>(tiles));
    bool const two = ranks.second >= 0;
    int const more = blocks_at(ranks.first);
    int const fewer = two ? blocks_at(ranks.second) : 0;
    int const shared = blocks_to_share(more, two ? fewer + blocks_of_ends(tile) : 0);
    double const first = us(fewer + shared, (two ? 1 : 0) + (shared > 0 ? 1 : 0));
    double const second = us(more - shared, 1);
    longest = std::max(longest, std::max(first, second) + (shared == 0 ? 0 : two ? kExchangeUs : kExchangeAloneUs));
    shares = shares || shared > 0;
  }
  return shares ? kStartUs + longest : kNever;
}

void plan_pairs(PlanRequest const& request, Plan& plan, TileRow const& row) {
  Problem const& problem = request.problem;
  require(tiles_have_ranks(problem), "tile: two blocks share the tiles of up to ", kLanes, " sequences, there are ",
          problem.batch);
  plan.tiles = most_tiles(problem, row.tile, plan.packed_heads);
  require(plan.tiles <= kMaxTiles, "q: the problem has up to ", plan.tiles, " tiles, at most ", kMaxTiles,
          " are possible; split the batch");
  std::int64_t const pairs = number_of_pairs(plan.tiles, request.device.sm_count);
  int const clusters = static_cast<int>(std::min<std::int64_t>(pairs, max_of(1, request.most_ctas(row.tile) / 2)));
  KernelPlan kernel{family_of(row.tile), row.tile, 2 * clusters, threads_of(row.tile)};
  kernel.most_tiles = plan.tiles;
  kernel.pairs = static_cast<int>(pairs);
  plan.heads_per_pass = problem.batch * (problem.heads_q / plan.packed_heads);
  because(plan, "grid", kernel.ctas, " blocks of ", kernel.threads, " threads in clusters of two, for ",
          tiles_are_known(problem) ? "" : "up to ", counted(plan.tiles, "tile"));
  because(plan, "splits",
          "1: nothing goes through the workspace; of a long tile and a short one, the first of two blocks takes the "
          "short one and the first keys of the long one, and the second the rest");
  because(plan, "workspace", "0 bytes: parts are merged in shared memory");
  plan.kernels.push_back(kernel);
}

}  // namespace hopper_attention
