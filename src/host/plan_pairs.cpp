// Calls of about as many tiles as the card has SMs, some long and some short, as those of one causal prompt of a
// tensor-parallel group: two thread blocks of a cluster share two tiles, so that none waits for the longest.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "host/paired_tiles.h"
#include "host/plan_request.h"
#include "host/schedule_shape.h"
#include "kernels/block_range.h"

namespace hopper_attention {
namespace {

// From the last product of a tile that two blocks share until both parts are merged.
constexpr double kExchangeUs = 2;
// What starting clusters and finding pairs takes longer than starting blocks and finding tiles.
constexpr double kStartUs = 0.8;

PairedTiles pairs_of_call(PlanRequest const& request, TileConfig const& tile, int packed_heads) {
  return paired_tiles(request.problem, tile, packed_heads, request.most_ctas(tile));
}

int blocks_of_tile(Problem const& problem, TileConfig const& tile, Packing const& packing, int m) {
  SeqlenQK const len{query_rows_of_sequence(problem), problem.seqlen_k};
  QueryRange const queries = query_range(packing, slabs_of(tile), m, len.q);
  return block_range(problem.mask, queries.first, queries.last, len, tile.keys).blocks();
}

}  // namespace

double us_of_pairs(PlanRequest const& request, TileRow const& row, int packed_heads) {
  TileConfig const& tile = row.tile;
  PairedTiles const pairs = pairs_of_call(request, tile, packed_heads);
  if (2 * pairs.pairs > request.device.sm_count) { return std::numeric_limits<double>::infinity(); }
  Packing const packing = make_packing(packed_heads, rows_of_slab(tile));
  double longest = 0;
  bool shares = false;
  for (int m = 0; 2 * m < pairs.count; ++m) {
    int const mirror = pairs.count - 1 - m;
    bool const two = m != mirror;
    int const blocks = blocks_of_tile(request.problem, tile, packing, m);
    int const of_mirror = blocks_of_tile(request.problem, tile, packing, mirror);
    int const more = std::max(blocks, of_mirror);
    int const fewer = two ? std::min(blocks, of_mirror) : 0;
    int const shared = blocks_to_share(more, fewer, two ? pairs.blocks_of_ends : 0);
    auto const us = [&](double count, int tiles) { return (count * row.cost.block + tiles * row.cost.tile) * 1e-3; };
    double const first = us(fewer + shared, (two ? 1 : 0) + (shared > 0 ? 1 : 0));
    double const second = us(more - shared, 1);
    longest = std::max(longest, std::max(first, second) + (shared > 0 ? kExchangeUs : 0));
    shares = shares || shared > 0;
  }
  return shares ? kStartUs + longest : std::numeric_limits<double>::infinity();
}

void plan_pairs(PlanRequest const& request, Plan& plan, TileRow const& row) {
  Problem const& problem = request.problem;
  PairedTiles const pairs = pairs_of_call(request, row.tile, plan.packed_heads);
  plan.tiles = std::int64_t{pairs.count} * problem.batch * (problem.heads_q / plan.packed_heads);
  KernelPlan kernel{family_of(row.tile), row.tile, 2 * pairs.clusters, threads_of(row.tile)};
  kernel.most_tiles = plan.tiles;
  plan.heads_per_pass = problem.batch * (problem.heads_q / plan.packed_heads);
  because(plan, "grid", kernel.ctas, " blocks of ", kernel.threads, " threads in clusters of two, for ",
          counted(plan.tiles, "tile"));
  because(plan, "splits",
          "1: nothing goes through the workspace; of a long tile and a short one, the first of two blocks takes the "
          "short one and the first keys of the long one, and the second the rest");
  because(plan, "workspace", "0 bytes: parts are merged in shared memory");
  plan.kernels.push_back(kernel);
}

}  // namespace hopper_attention
