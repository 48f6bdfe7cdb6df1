#include "host/tile_order.h"

#include <algorithm>
#include <cmath>

#include "kernels/tile_scheduler.h"

namespace hopper_attention {
namespace {

constexpr std::int64_t kTilesToCompute = 1 << 15;
constexpr double kCostOfLeavingL2 =
    0.02;  // for each doubling beyond it, as a share of the time; measured: 2 % from 4 to 8 heads at 16k

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

}  // namespace

TileOrder choose_tile_order(TileOrderProblem const& problem) {
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

}  // namespace hopper_attention
