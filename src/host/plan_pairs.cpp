// Calls of at most as many tiles as the card has SMs, some long and some short, as those of one causal prompt of a
// tensor-parallel group: the thread blocks of a cluster share two tiles, so that none waits for the longest.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
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

// From the last product of a tile that blocks share until their parts are merged; where the first block has a tile
// before, part of it is hidden.
constexpr double kExchangeUs = 2;
constexpr double kExchangeAloneUs = 2.5;
// The same of more than two blocks where the first has a tile before: it merges some rows, also of a tile that it has
// no keys of.
constexpr double kExchangeBehindShortUs = 4.5;
// For each block of a cluster but two: measured 0.6, 0.9 and 2.9 us with clusters of 3, 4 and 8.
constexpr double kExchangeOfMoreUs = 0.5;
// What starting clusters and finding pairs takes longer than starting blocks and finding tiles.
constexpr double kStartUs = 0.8;

int blocks_of_tile(Problem const& problem, TileConfig const& tile, Packing const& packing, int m) {
  SeqlenQK const len{query_rows_of_sequence(problem), problem.seqlen_k};
  QueryRange const queries = query_range(packing, slabs_of(tile), m, len.q);
  return block_range(problem.mask, queries.first, queries.last, len, tile.keys).blocks();
}

// How long tiles of sequences that are not known are supposed to be.
enum class Supposed { kAnyLength, kLongest };

// Key blocks of the tiles of a sequence, the most first; of sequences that are not known, of all `tiles`, with as many
// as there may be, or evenly down to one.
std::vector<int> blocks_of_tiles(PlanRequest const& request, TileConfig const& tile, int packed_heads,
                                 std::int64_t tiles, Supposed supposed) {
  Problem const& problem = request.problem;
  Packing const packing = make_packing(packed_heads, rows_of_slab(tile));
  int const queries = packing.queries_per_slab * slabs_of(tile);
  std::vector<int> blocks;
  if (!tiles_are_known(problem)) {
    auto const most = static_cast<int>(ceil_div<std::int64_t>(request.most_keys_of_queries(queries), tile.keys));
    auto const steps = static_cast<int>(std::max<std::int64_t>(1, tiles - 1));
    int const fewer = supposed == Supposed::kAnyLength ? max_of(0, most - 1) : 0;
    for (int i = 0; i < tiles; ++i) { blocks.push_back(most - scaled_cut(i, steps, fewer)); }
    return blocks;
  }
  for (int m = 0; m * queries < query_rows_of_sequence(problem); ++m) {
    blocks.push_back(blocks_of_tile(problem, tile, packing, m));
  }
  std::ranges::sort(blocks, std::greater{});
  return blocks;
}

struct Clusters {
  int blocks = 2;
  double us = std::numeric_limits<double>::infinity();
};

}  // namespace

double us_with_clusters(PlanRequest const& request, TileRow const& row, std::vector<int> const& blocks,
                        std::int64_t tiles, int blocks_of_pair) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  TileConfig const& tile = row.tile;
  std::int64_t const alike = tiles / std::ssize(blocks);
  auto const blocks_at = [&](std::int64_t rank) {
    return blocks[static_cast<std::size_t>(std::min<std::int64_t>(rank / alike, std::ssize(blocks) - 1))];
  };
  int const pairs = static_cast<int>(number_of_pairs(tiles, blocks_of_pair, request.device.sm_count));
  if (pairs > clusters_at_once(blocks_of_pair, request.device.sm_count)) { return kNever; }
  ClusterSize const size(blocks_of_pair);
  double longest = 0;
  bool shares = false;
  for (int pair = 0; pair < pairs; ++pair) {
    PairOfRanks const ranks = pair_of_ranks(pair, pairs, static_cast<int>(tiles));
    bool const two = ranks.second >= 0;
    int const more = blocks_at(ranks.first);
    int const fewer = two ? blocks_at(ranks.second) : 0;
    int const alone = two ? fewer + blocks_of_ends(tile) : 0;
    bool const shares_both = is_short_shared(more, alone, size);
    TileShares const long_shares(more, shares_both ? 0 : alone, size);
    bool const shares_long = long_shares.shared();
    // Of the CTAs: the first, and the last one, which has as much as any other.
    int const of_short = shares_both ? ceil_div(fewer, blocks_of_pair) : fewer;
    int const of_first = of_short + (shares_long ? long_shares.begin(1) : 0);
    int const of_last = (shares_both ? of_short : 0) + more - (shares_long ? long_shares.begin(blocks_of_pair - 1) : 0);
    auto const us = [&](double count, int ends) { return (count * row.cost.block + ends * row.cost.tile) * 1e-3; };
    int const first_ends = (two ? 1 : 0) + (shares_long ? 1 : 0);
    double const more_us = (blocks_of_pair - 2) * kExchangeOfMoreUs;
    double const of_long = two && blocks_of_pair > 2 ? kExchangeBehindShortUs : two ? kExchangeUs : kExchangeAloneUs;
    double const exchange = (shares_both ? kExchangeUs + more_us : 0) + (shares_long ? of_long + more_us : 0);
    longest = std::max(longest, std::max(us(of_first, first_ends), us(of_last, shares_both ? 2 : 1)) + exchange);
    shares = shares || shares_long;
  }
  return shares ? kStartUs + longest : kNever;
}

namespace {

// Those that lose least whatever lengths sequences have, if these are not known: under a causal mask tiles of any
// length as well as tiles that are all as long as may be.
Clusters best_clusters(PlanRequest const& request, TileRow const& row, int packed_heads) {
  Problem const& problem = request.problem;
  bool const is_forced = std::ranges::find(kPairClusters, request.forced.cluster) != std::end(kPairClusters);
  std::vector<Clusters> sizes;
  for (int const size : kPairClusters) {
    if (!is_forced || request.forced.cluster == size) { sizes.push_back({size}); }
  }
  std::int64_t const tiles = most_tiles(problem, row.tile, packed_heads);
  if (!tiles_have_ranks(problem, row.tile, packed_heads) || tiles > request.device.sm_count || tiles == 0) {
    return sizes.front();
  }
  std::vector<Supposed> supposed;
  if (tiles_rise_to_the_last(problem)) { supposed.push_back(Supposed::kAnyLength); }
  if (supposed.empty() || !tiles_are_known(problem)) { supposed.push_back(Supposed::kLongest); }
  std::vector<double> losses(sizes.size(), 1);
  for (Supposed const lengths : supposed) {
    std::vector<int> const blocks = blocks_of_tiles(request, row.tile, packed_heads, tiles, lengths);
    std::vector<double> us;
    for (Clusters const& of : sizes) { us.push_back(us_with_clusters(request, row, blocks, tiles, of.blocks)); }
    double const least = std::ranges::min(us);
    for (std::size_t i = 0; i < us.size(); ++i) {
      if (lengths == supposed.front()) { sizes[i].us = us[i]; }
      if (!std::isinf(least)) { losses[i] = std::max(losses[i], us[i] / least); }
    }
  }
  auto const best = std::ranges::min_element(losses) - losses.begin();
  return sizes[static_cast<std::size_t>(best)];
}

}  // namespace

double us_of_pairs(PlanRequest const& request, TileRow const& row, int packed_heads) {
  return best_clusters(request, row, packed_heads).us;
}

KernelPlan& add_pairs(PlanRequest const& request, Plan& plan, TileRow const& row, int size, std::int64_t at_once) {
  Problem const& problem = request.problem;
  KernelPlan kernel{family_of(row.tile), row.tile, 0, threads_of(row.tile)};
  kernel.most_tiles = std::max<std::int64_t>(1, most_tiles(problem, row.tile, plan.packed_heads));
  require(tiles_have_ranks(problem, row.tile, plan.packed_heads), "tile: the blocks of a cluster share tiles of up to ",
          kMostRankedSequences, " sequences and up to ", kMostRankedTiles, " of a group of heads; of ", problem.batch,
          " sequences there are up to ", kernel.most_tiles / (problem.heads_q / plan.packed_heads));
  require(kernel.most_tiles <= kMaxTiles, "q: the problem has up to ", kernel.most_tiles, " tiles, at most ", kMaxTiles,
          " are possible; split the batch");
  std::int64_t const pairs = number_of_pairs(kernel.most_tiles, size, request.device.sm_count);
  int const clusters = max_of(1, clusters_at_once(size, request.most_ctas(row.tile)));
  kernel.ctas = size * static_cast<int>(std::min({pairs, std::int64_t{clusters}, at_once}));
  kernel.pairs = static_cast<int>(pairs);
  kernel.blocks_of_pair = size;
  plan.tiles = kernel.most_tiles;
  plan.heads_per_pass = problem.batch * (problem.heads_q / plan.packed_heads);
  because(plan, "grid", kernel.ctas, " blocks of ", kernel.threads, " threads in clusters of ", size, ", for ",
          tiles_are_known(problem) ? "" : "up to ", counted(kernel.most_tiles, "tile"));
  because(plan, "splits",
          "1: nothing goes through the workspace; of a long tile and a short one, the first block of a cluster takes "
          "the short one and fewer keys of the long one, and the others the rest");
  return plan.kernels.emplace_back(kernel);
}

int size_of_clusters(PlanRequest const& request, TileRow const& row, int packed_heads) {
  return best_clusters(request, row, packed_heads).blocks;
}

void plan_pairs(PlanRequest const& request, Plan& plan, TileRow const& row) {
  add_pairs(request, plan, row, size_of_clusters(request, row, plan.packed_heads));
  because(plan, "workspace", "0 bytes: parts are merged in shared memory");
}

}  // namespace hopper_attention
