// Every tile exactly once, in an order that spreads causal work evenly.
#include "kernels/tile_scheduler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace hopper_attention {
namespace {

struct Case {
  int batch;
  int head_groups;
  int m_blocks;
  int heads_per_pass;
  bool descending;
  int ctas;
};

struct Visits {
  std::int64_t tiles = 0;
  int repeated = 0;
  int outside = 0;
  int most = 0;   // tiles of the busiest CTA
  int least = 0;  // of the idlest
};

Visits visit(Case const& c) {
  SchedulerParams const params =
      make_scheduler_params(c.batch, c.head_groups, c.m_blocks, c.heads_per_pass, c.descending, c.ctas);
  std::vector<bool> seen(static_cast<std::size_t>(c.batch) * c.head_groups * c.m_blocks, false);
  Visits visits;
  visits.least = params.tiles;
  for (int cta = 0; cta < c.ctas; ++cta) {
    int count = 0;
    for (TileScheduler scheduler(params, cta); scheduler.valid(); scheduler.advance()) {
      Tile const tile = scheduler.tile();
      ++count;
      bool const inside = tile.m >= 0 && tile.m < c.m_blocks && tile.head >= 0 && tile.head < c.head_groups &&
                          tile.batch >= 0 && tile.batch < c.batch;
      if (!inside) {
        ++visits.outside;
        continue;
      }
      auto const place = (static_cast<std::size_t>(tile.batch) * c.head_groups + tile.head) * c.m_blocks + tile.m;
      visits.repeated += seen[place];
      seen[place] = true;
    }
    visits.tiles += count;
    visits.most = std::max(visits.most, count);
    visits.least = std::min(visits.least, count);
  }
  return visits;
}

void check_every_tile_once(Case const& c) {
  CAPTURE(c.batch);
  CAPTURE(c.head_groups);
  CAPTURE(c.m_blocks);
  CAPTURE(c.heads_per_pass);
  CAPTURE(c.descending);
  CAPTURE(c.ctas);
  Visits const visits = visit(c);
  CHECK(visits.outside == 0);
  CHECK(visits.repeated == 0);
  CHECK(visits.tiles == std::int64_t{c.batch} * c.head_groups * c.m_blocks);
  CHECK(visits.most - visits.least <= 1);
}

// A causal tile m reads m + 1 key blocks. The work of the busiest CTA over the mean.
double imbalance(int sequence_heads, int m_blocks, int heads_per_pass, int ctas, bool descending) {
  SchedulerParams const params = make_scheduler_params(1, sequence_heads, m_blocks, heads_per_pass, descending, ctas);
  std::int64_t most = 0;
  std::int64_t total = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    std::int64_t work = 0;
    for (TileScheduler scheduler(params, cta); scheduler.valid(); scheduler.advance()) {
      work += scheduler.tile().m + 1;
    }
    most = std::max(most, work);
    total += work;
  }
  return static_cast<double>(most) * ctas / static_cast<double>(total);
}

}  // namespace

TEST_CASE("scheduler: every tile once for the batch sizes at which others failed") {
  for (int const batch : {1, 2, 31, 32, 33, 255, 256, 257, 992, 993, 4096}) {
    for (int const head_groups : {1, 3, 8}) {
      for (int const m_blocks : {1, 2, 5}) {
        for (int const heads_per_pass : {1, 7, 64, batch * head_groups}) {
          int const tiles = batch * head_groups * m_blocks;
          for (int const ctas : {1, 48, 114, 132}) {
            check_every_tile_once(
                {batch, head_groups, m_blocks, heads_per_pass, batch % 2 == 0, std::min(ctas, tiles)});
          }
        }
      }
    }
  }
}

TEST_CASE("scheduler: one pass may be wider than all heads, the last one narrower than the others") {
  check_every_tile_once({3, 5, 7, 1'000'000, true, 13});
  check_every_tile_once({1, 17, 9, 16, true, 132});
  check_every_tile_once({1, 17, 9, 16, false, 1});
}

TEST_CASE("scheduler: more tiles than a grid of 65,535 blocks, and one block for each tile") {
  check_every_tile_once({4096, 32, 3, 96, true, 132});
  check_every_tile_once({1, 1, 70'001, 1, true, 132});
  check_every_tile_once({70'001, 1, 1, 64, false, 70'001});
}

TEST_CASE("scheduler: a pass runs together; passes alternate and the last one ends with the shortest tiles") {
  auto const order = [](int heads_per_pass, int ctas = 1) {
    SchedulerParams const params = make_scheduler_params(2, 2, 3, heads_per_pass, true, ctas);
    std::string text;  // batch, head, query block
    for (int cta = 0; cta < ctas; ++cta) {
      for (TileScheduler scheduler(params, cta); scheduler.valid(); scheduler.advance()) {
        Tile const tile = scheduler.tile();
        text += std::to_string(tile.batch) + std::to_string(tile.head) + std::to_string(tile.m) + " ";
      }
    }
    return text;
  };
  CHECK(order(3) == "000 010 100 001 011 101 002 012 102 112 111 110 ");
  CHECK(order(4) == "002 012 102 112 001 011 101 111 000 010 100 110 ");
  // Blocks of one tile each: those of a pass at the same time begin with neighbouring keys only if all passes fall.
  CHECK(order(2, 12) == "002 012 001 011 000 010 102 112 101 111 100 110 ");
}

TEST_CASE("scheduler: causal work is balanced, however many passes there are") {
  // The busiest CTA has at most two of the longest tiles more than the mean.
  for (int const ctas : {48, 114, 132}) {
    for (int const m_blocks : {16, 64, 128}) {
      for (int const heads : {8, 16, 32}) {
        for (int const heads_per_pass : {4, 8, heads}) {
          CAPTURE(ctas);
          CAPTURE(m_blocks);
          CAPTURE(heads);
          CAPTURE(heads_per_pass);
          double const mean = 0.5 * m_blocks * (m_blocks + 1) * heads / ctas;
          CHECK(imbalance(heads, m_blocks, heads_per_pass, ctas, true) <= 1.0 + 2.0 * m_blocks / mean);
        }
      }
    }
  }
}

TEST_CASE("scheduler: passes of two rounds do not give all long tiles to the same CTAs") {
  CHECK(imbalance(64, 32, 8, 132, true) < 1.05);
  CHECK(imbalance(32, 32, 8, 132, true) < 1.05);
  CHECK(imbalance(16, 128, 2, 132, true) < 1.05);
}

}  // namespace hopper_attention
