#include "host/tile_order.h"

#include <algorithm>
#include <cmath>

#include "kernels/tile_scheduler.h"

namespace hopper_attention {
namespace {

constexpr std::int64_t kTilesToCompute = 1 << 15;
// For each doubling beyond L2, as a share of the time; measured: 2 % from 4 to 8 heads at 16k.
constexpr double kCostOfLeavingL2 = 0.02;
// Of tiles of a head that run in several rounds of the grid and read its keys and values at different times: what that
// costs where memory takes all of the time. By 33 calls of 256 to 4k tokens with 4 to 200 heads at a time on an H100
// (docs/performance-notes.md, step 208): 512 tokens, causal, d128, took 0.89 of the time with 8 heads instead of 67.
// Where memory takes little of the time, nothing was gained; where it takes more, something also where the tiles of a
// head fill most of one round: 700 tokens, causal, d256, 0.85 with 6 heads instead of 20.
constexpr double kCostOfRounds = 0.05;
constexpr double kLeastMemoryShare = 0.3;
constexpr double kLeastMemoryShareOfARound = 0.6;

double imbalance(TileOrderProblem const& problem, int heads_per_pass) {
  int const m_blocks = static_cast<int>(problem.work.size());
  SchedulerParams const params =
      make_scheduler_params(problem.sequence_heads, 1, m_blocks, heads_per_pass, problem.descending, problem.ctas);
  double busiest = 0;
  double total = 0;
  for (int cta = 0; cta < problem.ctas; ++cta) {
    double mine = 0;
    for (TileScheduler scheduler(params, cta); scheduler.valid(); scheduler.advance()) {
      mine += problem.work[static_cast<std::size_t>(scheduler.tile().m)];
    }
    busiest = std::max(busiest, mine);
    total += mine;
  }
  return total == 0 ? 1.0 : busiest * problem.ctas / total;
}

double rounds(TileOrderProblem const& problem, int width) {
  return static_cast<double>(width) * static_cast<double>(problem.work.size()) / problem.ctas;
}

// The smallest of the best balanced widths whose tiles take an eighth to half of a round; imbalance 0 if there are
// none.
TileOrder order_at_once(TileOrderProblem const& problem) {
  TileOrder best{.imbalance = 0, .at_once = true};
  for (int width = problem.sharing; width <= problem.sequence_heads && rounds(problem, width) <= 0.5;
       width += problem.sharing) {
    if (rounds(problem, width) < 0.125) { continue; }
    double const balance = imbalance(problem, width);
    if (best.imbalance == 0 || balance < best.imbalance) { best = {width, balance, true}; }
  }
  return best;
}

// Of the first heads, so many that widths can be compared.
TileOrderProblem part_of(TileOrderProblem problem) {
  constexpr int kTilesToCompare = 1 << 13;
  int const heads = kTilesToCompare / static_cast<int>(problem.work.size()) / problem.sharing * problem.sharing;
  problem.sequence_heads = std::min(problem.sequence_heads, std::max(problem.sharing, heads));
  return problem;
}

TileOrder order_in_l2(TileOrderProblem const& problem) {
  int const in_l2 = std::clamp(problem.in_l2, problem.sharing, problem.sequence_heads);
  std::int64_t const tiles = std::int64_t{problem.sequence_heads} * static_cast<std::int64_t>(problem.work.size());
  if (tiles > kTilesToCompute) { return {in_l2 / problem.sharing * problem.sharing, 1.0}; }

  // Halves and doubles of what fits, and the widths that divide the heads evenly.
  std::vector<int> widths{problem.sequence_heads};
  for (int width = problem.sharing; width < problem.sequence_heads; width += problem.sharing) {
    bool const near = 2 * width >= in_l2 && width <= 2 * in_l2;
    if (near || problem.sequence_heads % width == 0) { widths.push_back(width); }
  }
  constexpr std::size_t kMostWidths = 32;
  if (widths.size() > kMostWidths) {
    std::sort(widths.begin(), widths.end(), [&](int a, int b) { return std::abs(a - in_l2) < std::abs(b - in_l2); });
    widths.resize(kMostWidths);
  }

  TileOrder best;
  double best_cost = 0;
  for (int const width : widths) {
    double const balance = imbalance(problem, width);
    double const doublings = std::log2(static_cast<double>(width) / in_l2);
    double const cost = balance * (1.0 + kCostOfLeavingL2 * std::max(0.0, doublings));
    bool const better = best_cost == 0 || cost < best_cost || (cost == best_cost && width > best.heads_per_pass);
    if (better) {
      best = {width, balance};
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace

TileOrder choose_tile_order(TileOrderProblem const& problem) {
  TileOrder const in_l2 = order_in_l2(problem);
  double const apart = rounds(problem, in_l2.heads_per_pass);
  double const least_share = apart > 1 ? kLeastMemoryShare : kLeastMemoryShareOfARound;
  bool const one_round = rounds(problem, problem.sequence_heads) <= 1;  // a block for each tile
  if (one_round || apart <= 0.5 || problem.memory_share < least_share) { return in_l2; }
  TileOrderProblem const part = part_of(problem);
  TileOrder const at_once = order_at_once(part);
  double const gained = 1 + kCostOfRounds * problem.memory_share * problem.memory_share;
  bool const is_better = at_once.imbalance > 0 && at_once.imbalance <= imbalance(part, in_l2.heads_per_pass) * gained;
  return is_better ? at_once : in_l2;
}

}  // namespace hopper_attention
