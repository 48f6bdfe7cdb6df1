// Decisions of the plan, on cards that need not be there.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hopper_attention/forward.h"
#include "hopper_attention/testing.h"
#include "host/cluster_params.h"
#include "host/plan_request.h"
#include "host/schedule_shape.h"
#include "host/text.h"
#include "host/tile_order.h"
#include "host/tile_share.h"
#include "kernels/host_device.h"
#include "kernels/paired_tiles.h"
#include "kernels/tile_config.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {
namespace {

DeviceInfo card(int sm_count) {
  return {.name = "a card",
          .sm_count = sm_count,
          .compute_major = 9,
          .compute_minor = 0,
          .l2_bytes = std::int64_t{50} << 20};
}

Problem problem(int batch, int seqlen_q, int seqlen_k, int heads_q, int heads_k, int head_dim, bool causal = false) {
  return make_problem({.dtype = DataType::kBFloat16,
                       .batch = batch,
                       .seqlen_q = seqlen_q,
                       .seqlen_k = seqlen_k,
                       .heads_q = heads_q,
                       .heads_k = heads_k,
                       .head_dim = head_dim,
                       .head_dim_v = head_dim},
                      {.causal = causal});
}

// Sequences whose lengths are on the device, 32 heads of q for 8 of k and v.
Problem ragged(int longest_q, int longest_k, int head_dim, int batch = 5) {
  Tensor given;
  static int lengths = 0;
  given.data = &lengths;
  given.rank = 1;
  return make_problem({.dtype = DataType::kBFloat16,
                       .batch = batch,
                       .seqlen_q = longest_q,
                       .seqlen_k = longest_k,
                       .heads_q = 32,
                       .heads_k = 8,
                       .head_dim = head_dim,
                       .head_dim_v = head_dim},
                      {.seqused_k = given});
}

bool explains(Plan const& plan, std::string const& text) { return plan.explain().find(text) != std::string::npos; }

// The busiest block's share of the causal work over the mean, for the schedule that this plan asks for.
double causal_imbalance(Plan const& plan, Problem const& p) {
  int const m_blocks = ceil_div(p.seqlen_q, plan.tile.rows);
  SchedulerParams const schedule =
      make_scheduler_params(p.batch, p.heads_q, m_blocks, plan.heads_per_pass, true, plan.ctas);
  std::int64_t most = 0;
  std::int64_t total = 0;
  for (int cta = 0; cta < plan.ctas; ++cta) {
    std::int64_t work = 0;
    for (TileScheduler scheduler(schedule, cta); scheduler.valid(); scheduler.advance()) {
      work += scheduler.tile().m + 1;
    }
    most = std::max(most, work);
    total += work;
  }
  return static_cast<double>(most) * plan.ctas / static_cast<double>(total);
}

}  // namespace

TEST_CASE("plan: one block for each SM, never more blocks than tiles, never fewer than one") {
  Problem const large = problem(2, 4096, 4096, 16, 16, 128);
  for (int const sm_count : {1, 48, 114, 132}) { CHECK(plan(large, card(sm_count)).ctas == sm_count); }
  CHECK(plan(large, card(132)).tiles == 2 * 16 * 4096 / 128);
  CHECK(plan(problem(1, 20, 100, 3, 3, 128), card(132)).ctas == 3);

  Problem with_margin = large;
  with_margin.sm_margin = 32;
  CHECK(plan(with_margin, card(132)).ctas == 100);
  CHECK(explains(plan(with_margin, card(132)), "sm_margin 32"));
  with_margin.sm_margin = 500;
  CHECK(plan(with_margin, card(132)).ctas == 1);
}

TEST_CASE("plan: long tiles over more keys than L2 holds have a block each, so that blocks do not drift apart") {
  auto const made = [](int seqlen, int heads_k, int margin = 0, MaskParams mask = {.right = 0}, int batch = 1) {
    Problem p = problem(batch, seqlen, seqlen, 16, heads_k, 128);
    p.mask = mask;
    p.sm_margin = margin;
    return plan(p, card(132));
  };
  for (int const heads_k : {16, 2}) {
    Plan const longest = made(262144, heads_k);
    CHECK(longest.ctas == longest.tiles);
    CHECK(longest.heads_per_pass * longest.packed_heads == 16 / heads_k);  // those of one head of k
    CHECK(explains(longest, "one long tile each"));
  }
  Plan const two = made(262144, 16, 0, {.right = 0}, 2);
  CHECK(two.ctas == two.tiles);
  CHECK(made(65536, 16).ctas == 132);                                  // K and V of a head stay in L2
  CHECK(made(262144, 16, 32).ctas == 100);                             // SMs are to be left free
  CHECK(made(262144, 16, 0, {.left = 4095, .right = 0}).ctas == 132);  // short tiles, which walk along together
  // A tile with so many keys takes 340 us, and 260.
  CHECK(made(262144, 16, 0, {.left = 29000, .right = 0}).ctas > 132);
  CHECK(made(262144, 16, 0, {.left = 22000, .right = 0}).ctas == 132);
  CHECK(testing::plan_with(problem(1, 262144, 262144, 16, 16, 128, true), card(132), {.ctas = 132}).ctas == 132);
  // Each tile has keys of its own, which nobody else reads.
  Problem few = problem(64, 1, 1 << 20, 16, 16, 128, true);
  few.num_splits = 1;
  CHECK(plan(few, card(132)).ctas <= 132 * plan(few, card(132)).tile.per_sm);
}

namespace {

std::string tile_of(Problem const& p) {
  Plan const made = plan(p, card(132));
  return concat(made.tile.rows, "x", made.tile.keys, made.packed_heads > 1 ? " packed" : "");
}

Problem windowed(int batch, int seqlen, int heads_q, int heads_k, int head_dim, int left) {
  return make_problem({.dtype = DataType::kBFloat16,
                       .batch = batch,
                       .seqlen_q = seqlen,
                       .seqlen_k = seqlen,
                       .heads_q = heads_q,
                       .heads_k = heads_k,
                       .head_dim = head_dim,
                       .head_dim_v = head_dim},
                      {.window_left = left, .window_right = 0});
}

}  // namespace

TEST_CASE("plan: a grid that waits for its longest tile takes one of 64 rows, if what that takes is known") {
  auto const rows = [](int batch, int length, int heads_q, int heads_k, int head_dim) {
    return plan(problem(batch, length, length, heads_q, heads_k, head_dim, true), card(132)).tile.rows;
  };
  CHECK(rows(1, 1024, 8, 8, 256) == 64);   // 64 tiles of 128 rows, half of the SMs
  CHECK(rows(1, 1024, 8, 1, 128) == 128);  // there two blocks share one
  CHECK(rows(1, 2048, 8, 1, 128) == 128);  // two of them one after the other take as long
  CHECK(rows(1, 4096, 8, 1, 128) == 128);
  CHECK(rows(1, 1024, 16, 16, 256) == 128);
  CHECK(rows(1, 1024, 4, 4, 96) > 64);
  CHECK(rows(1, 1024, 4, 4, 192) > 64);
  CHECK(explains(plan(problem(1, 1024, 1024, 8, 8, 256, true), card(132)), "few tiles"));
}

TEST_CASE("plan: a dense call takes a tile of the table for the head dims that hold its own") {
  for (int const head_dim : {8, 64, 72, 128, 200}) {
    for (bool const causal : {false, true}) {
      Plan const made = plan(problem(8, 512, 512, 16, 16, head_dim, causal), card(132));
      TileConfig const& first = find_tile(head_dim, head_dim, TileUse::kDense)->tile;
      CHECK(made.tile.head_dim == first.head_dim);
      CHECK(std::any_of(kTiles.begin(), kTiles.end(),
                        [&](TileRow const& row) { return row.use == TileUse::kDense && row.tile == made.tile; }));
      CHECK(made.threads == (made.tile.rows / 64 + 1) * 128);
      CHECK(made.kernel == KernelFamily::kPrefill);
      CHECK(made.num_splits == 1);
      CHECK(made.workspace_bytes == 0);
    }
  }
}

TEST_CASE("plan: the costs in the table choose the tiles that were measured to be the fastest") {
  struct Case {
    int head_dim;
    bool causal;
    int seqlen;
    char const* tile;
  };
  for (Case const c : {Case{64, false, 512, "256x64"}, {64, false, 1024, "192x128"},   {64, false, 16384, "192x128"},
                       {64, true, 512, "256x64"},      {64, true, 2048, "192x128"},    {64, true, 4096, "192x128"},
                       {64, true, 16384, "192x128"},   {96, false, 512, "128x128"},    {96, false, 4096, "192x96"},
                       {96, true, 1024, "128x128"},    {96, true, 4096, "192x96"},     {128, false, 512, "192x64"},
                       {128, false, 1024, "128x128"},  {128, false, 2048, "192x80"},   {128, false, 4096, "128x128"},
                       {128, false, 8192, "128x176"},  {128, false, 16384, "128x176"}, {128, true, 512, "192x64"},
                       {128, true, 1024, "192x64"},    {128, true, 2048, "192x80"},    {128, true, 4096, "192x80"},
                       {128, true, 8192, "192x80"},    {128, true, 16384, "192x80"}}) {
    int const heads = 2048 / c.head_dim;
    Problem const p = problem(16384 / c.seqlen, c.seqlen, c.seqlen, heads, heads, c.head_dim, c.causal);
    CAPTURE(c.seqlen);
    CAPTURE(plan(p, card(132)).explain());
    CHECK(tile_of(p) == std::string(c.tile));
  }
}

TEST_CASE("plan: rows that are no multiple of 32 bytes want tiles of more queries, which load less") {
  auto const tile_of_dense = [](int head_dim, int seqlen) {
    int const heads = 2048 / head_dim;
    return tile_of(problem(16384 / seqlen, seqlen, seqlen, heads, heads, head_dim, false));
  };
  CHECK(tile_of_dense(80, 1024) == "128x128");
  CHECK(tile_of_dense(72, 1024) == "192x96");   // 350 us instead of 451
  CHECK(tile_of_dense(72, 512) == "192x96");    // 209 instead of 250
  CHECK(tile_of_dense(104, 1024) == "192x80");  // 270 instead of 302
  CHECK(tile_of_dense(128, 1024) == "128x128");
  CHECK(tile_of_dense(56, 1024) == tile_of_dense(64, 1024));  // one box a row
}

TEST_CASE("plan: few tiles take the one whose longest tile is done first") {
  Problem p = problem(1, 2048, 2048, 8, 1, 128, true);
  CHECK(tile_of(p).starts_with("128x128"));
  p.batch = 16;
  CHECK(tile_of(p).starts_with("192x80"));
  p.batch = 1;
  p.sm_margin = 100;  // it and forced numbers of blocks only steer: bits must not change
  CHECK(tile_of(p).starts_with("128x128"));
  p.sm_margin = 0;
  CHECK(testing::plan_with(p, card(132), {.ctas = 3}).tile == plan(p, card(132)).tile);
  p.batch_invariant = true;  // one tile, whatever is in the batch
  CHECK(tile_of(p).starts_with("192x80"));
}

TEST_CASE("plan: heads are packed where that is faster") {
  CHECK(plan(problem(3, 512, 512, 16, 4, 64, false), card(132)).packed_heads == 4);
  CHECK(plan(problem(1, 16, 1000, 8, 1, 128, true), card(132)).packed_heads == 1);  // one tile instead of 8, as long
}

TEST_CASE("plan: windows pack heads, so that a tile spans few keys") {
  CHECK(tile_of(windowed(2, 8192, 64, 8, 64, 127)).find("packed") != std::string::npos);
  CHECK(tile_of(windowed(2, 8192, 32, 8, 128, 4095)) == "192x80 packed");
  CHECK(explains(plan(windowed(2, 8192, 64, 8, 64, 127), card(132)), "8 heads share a tile"));
}

TEST_CASE("plan: windows of 128 have one block, wherever lengths and keys are") {
  auto const is_one_block = [](Problem const& p) {
    Plan const made = plan(p, card(132));
    KernelPlan const& kernel = made.kernels.at(0);
    bool const dense = kernel.tile.calls == Calls::kDense;
    bool const one = has_one_block(kernel.tile);
    CHECK((!one || explains(made, "one block")));
    CHECK((!one || dense == !made.listed || kernel.ranked));
    return one;
  };
  Problem const dense = windowed(2, 8192, 64, 8, 64, 127);
  CHECK(is_one_block(dense));
  CHECK(is_one_block(windowed(2, 8192, 64, 8, 40, 127)));
  CHECK_FALSE(is_one_block(windowed(2, 8192, 64, 8, 64, 256)));
  CHECK_FALSE(is_one_block(windowed(2, 8192, 32, 16, 64, 127)));
  CHECK_FALSE(is_one_block(windowed(2, 8192, 64, 8, 128, 127)));
  Problem packed = dense;
  packed.packed_q = packed.ragged = true;
  packed.batch = 20;
  packed.total_q = packed.total_k = 16384;
  packed.keys = KeyLayout::kVarlen;
  Problem paged = packed;
  paged.keys = KeyLayout::kPaged;
  for (Problem p : {packed, paged}) {
    for (bool const invariant : {false, true}) {
      for (int const splits : {0, 1, 3}) {
        for (int const page : {1, 7, 8, 16, 24, 256}) {
          p.batch_invariant = invariant;
          p.num_splits = splits;
          p.page_size = p.keys == KeyLayout::kPaged ? page : 0;
          CAPTURE(invariant);
          CAPTURE(splits);
          CAPTURE(p.page_size);
          CHECK(is_one_block(p));
          CHECK_FALSE(plan(p, card(132)).kernels.at(0).may_split);
        }
      }
    }
    p.batch_invariant = false;
    p.softcap = 30.0F;
    CHECK_FALSE(is_one_block(p));
  }
  CHECK_THROWS_AS(testing::plan_with(windowed(2, 8192, 64, 8, 64, 300), card(132), {.tile = {.keys = 192}}),
                  InvalidArgument);
}

TEST_CASE("plan: a forced tile of pairs is taken for calls that pairs are not for, and what it takes is not told") {
  Problem const p = problem(1, 100, 100, 1, 1, 64, false);  // of one block, which nobody can share
  Plan const made = testing::plan_with(p, card(132), {.tile = {.rows = 128, .keys = 128, .stages = 6}});
  CHECK(made.tile.rows == 128);
  CHECK(made.tile.stages == 6);
}

TEST_CASE("plan: single queries beside windows of one block go along, or have a kernel that cuts nothing") {
  // A prompt and single queries on 4k keys, 64/8 heads or 8/1.
  auto const step = [](int queries, int singles, int heads_q) {
    Problem p = windowed(1 + singles, 4096, heads_q, heads_q / 8, 64, 127);
    p.seqlen_q = queries;
    p.packed_q = p.ragged = p.has_metadata = true;
    p.total_q = queries + singles;
    p.keys = KeyLayout::kPaged;
    p.page_size = 16;
    p.num_splits = 0;
    return plan(p, card(132));
  };
  Plan const along = step(2048, 8, 64);
  CHECK(along.kernels.size() == 1);
  CHECK(has_one_block(along.tile));
  Plan const beside = step(2048, 64, 64);  // 43 us where decode is cut and behind the prompt, 49 along
  CHECK(beside.kernels.size() == 2);
  CHECK(has_one_block(beside.kernels[0].tile));
  CHECK_FALSE(beside.kernels[1].may_split);
  CHECK(beside.decode_first);
  CHECK(beside.num_splits == 1);
  Plan const ranked = step(100, 32, 64);  // 17 us, along 20
  CHECK(ranked.kernels.size() == 2);
  CHECK(has_one_block(ranked.kernels[0].tile));
  CHECK_FALSE(ranked.listed);
  CHECK(step(2048, 64, 8).kernels.size() == 1);  // 10 us, in two kernels 18
}

TEST_CASE("plan: short prompts of more rows than tiles for few queries read fast are for those of many") {
  auto const rows = [](int batch, int queries, int keys, int heads_q, int heads_k, int head_dim) {
    return plan(problem(batch, queries, keys, heads_q, heads_k, head_dim, true), card(132)).tile.rows;
  };
  CHECK(rows(256, 64, 64, 16, 16, 128) > 64);  // 86 us instead of 144
  CHECK(rows(256, 32, 32, 16, 8, 128) > 64);   // 42 instead of 75
  CHECK(rows(32, 64, 1024, 16, 16, 128) > 64);
  CHECK(rows(128, 64, 64, 16, 16, 256) > 64);  // 73 us instead of 106
  CHECK(rows(32, 64, 2048, 16, 16, 128) <= 64);
  CHECK(rows(8, 64, 64, 16, 16, 128) <= 64);  // less than a round of them
  CHECK(rows(256, 32, 64, 16, 16, 128) > 64);
  CHECK(rows(256, 32, 128, 16, 16, 128) <= 64);
  CHECK(rows(256, 16, 16, 16, 16, 128) <= 16);
  CHECK(rows(256, 64, 64, 16, 16, 64) == 64);  // two of them share an SM
  Problem capped = problem(256, 64, 64, 16, 16, 128, true);
  capped.softcap = 30.0F;
  CHECK(plan(capped, card(132)).tile.rows == 64);
  Problem invariant = problem(256, 64, 64, 16, 16, 128, true);
  invariant.batch_invariant = true;
  CHECK(plan(invariant, card(132)).tile.rows == 64);
}

TEST_CASE("plan: softcap takes a tile that holds it, and refuses a forced one that does not") {
  Problem const p = make_problem({.dtype = DataType::kBFloat16,
                                  .batch = 2,
                                  .seqlen_q = 8192,
                                  .seqlen_k = 8192,
                                  .heads_q = 32,
                                  .heads_k = 16,
                                  .head_dim = 128,
                                  .head_dim_v = 128},
                                 {.causal = true, .softcap = 50.0F});
  CHECK(tile_of(p) == "192x80 packed");
  CHECK_THROWS_AS(testing::plan_with(p, card(132), {.tile = {.keys = 176}}), InvalidArgument);
}

TEST_CASE("plan: kernels have the code that their calls need and no more") {
  auto const calls_of = [](Problem const& p) { return plan(p, card(132)).kernels.at(0).tile.calls; };
  Problem dense = problem(2, 2048, 2048, 8, 8, 128, true);
  CHECK(calls_of(dense) == Calls::kDense);
  Problem lengths_on_device = ragged(2048, 2048, 128);
  CHECK(calls_of(lengths_on_device) == Calls::kWhole);
  lengths_on_device.keys = KeyLayout::kPaged;
  CHECK(calls_of(lengths_on_device) == Calls::kUncapped);
  lengths_on_device.keys = KeyLayout::kDense;
  lengths_on_device.seqused_q = true;
  lengths_on_device.num_splits = 0;
  CHECK(calls_of(lengths_on_device) == Calls::kWhole);  // so many tiles of so few keys that none is worth cutting
  lengths_on_device.seqlen_k = 4096;
  CHECK(calls_of(lengths_on_device) == Calls::kUncapped);
  lengths_on_device.seqused_q = false;
  lengths_on_device.batch = 1;
  lengths_on_device.seqlen_q = lengths_on_device.seqlen_k = 512;
  CHECK(calls_of(lengths_on_device) == Calls::kUncut);
  lengths_on_device.seqlen_q = 128;
  lengths_on_device.seqlen_k = 8192;
  CHECK(calls_of(lengths_on_device) == Calls::kUncapped);
  lengths_on_device.seqlen_q = 2048;
  dense.softcap = lengths_on_device.softcap = 30.0F;
  CHECK(calls_of(dense) == Calls::kCapped);
  CHECK(calls_of(lengths_on_device) == Calls::kCapped);
  dense.seqlen_q = 1;
  CHECK(calls_of(dense) == Calls::kAll);
}

TEST_CASE("plan: tiles of few rows that follow from their index have kernels without what others need") {
  auto const calls_of = [](Problem const& p) { return plan(p, card(132)).kernels.at(0).tile.calls; };
  Problem decode = ragged(1, 8192, 128);
  decode.num_splits = 0;
  decode.heads_k = 1;
  decode.heads_q = 8;
  CHECK(calls_of(decode) == Calls::kByIndex);
  Problem paged = decode;
  paged.keys = KeyLayout::kPaged;
  for (int const size : {8, 16, 24, 64, 80, 256}) {
    CAPTURE(size);
    paged.page_size = size;
    CHECK(calls_of(paged) == Calls::kByIndex);
  }
  for (int const size : {1, 4, 12, 100}) {  // whose rows are gathered
    CAPTURE(size);
    paged.page_size = size;
    CHECK(calls_of(paged) == Calls::kAll);
  }
  Problem capped = decode;
  capped.softcap = 30.0F;
  CHECK(calls_of(capped) == Calls::kAll);
  Problem by_schedule = decode;  // a bound that is a page table's
  by_schedule.seqlen_k = 1 << 17;
  by_schedule.batch = 32;
  CHECK(calls_of(by_schedule) == Calls::kAll);
  Problem in_parts = decode;
  in_parts.batch_invariant = true;
  CHECK(calls_of(in_parts) == Calls::kInParts);
  Problem some_rows = decode;
  some_rows.seqlen_q = 4;
  CHECK(calls_of(some_rows) == Calls::kByIndex);
  Problem many_rows = decode;
  many_rows.seqlen_q = 5;
  CHECK(calls_of(many_rows) == Calls::kByIndex);  // two tiles of 32
  many_rows.batch = 100;
  CHECK(calls_of(many_rows) == Calls::kAll);
}

TEST_CASE("tiles: those of softcap are those without, which the schedule counts") {
  for (TileRow const& row : kTiles) {
    if (row.use != TileUse::kRagged) { continue; }
    TileConfig capped = find_tile(row.tile.head_dim, row.tile.head_dim_v, TileUse::kCapped)->tile;
    CHECK(capped.calls == Calls::kCapped);
    capped.calls = row.tile.calls;
    CHECK(capped == row.tile);
    TileConfig whole = find_tile(row.tile.head_dim, row.tile.head_dim_v, TileUse::kWhole)->tile;
    CHECK(whole.calls == Calls::kWhole);
    whole.calls = row.tile.calls;
    CHECK(whole == row.tile);
  }
}

TEST_CASE("plan: blocks of a cluster have columns that they can merge four at a time") {
  Problem p = problem(1, 1, 2048, 8, 1, 128);
  p.num_splits = 0;
  CHECK(plan(p, card(132)).cluster == 16);
  p.head_dim = p.head_dim_v = 96;
  CHECK(plan(p, card(132)).cluster == 8);
  CHECK_THROWS_AS(testing::plan_with(p, card(132), {.cluster = 16}), InvalidArgument);
}

TEST_CASE("plan: the choice costs little time for very long sequences") {
  Plan const made = plan(problem(1, 1 << 24, 1 << 24, 4, 1, 128, true), card(132));
  CHECK(made.packed_heads == 4);
  CHECK(made.tile.keys == 80);
}

TEST_CASE("plan: head dims that no tile holds name the largest") {
  int largest = 0;
  for (TileRow const& row : kTiles) { largest = std::max(largest, row.tile.head_dim); }
  Problem p = problem(1, 64, 64, 1, 1, 128);
  p.head_dim = largest + 8;
  p.head_dim_v = largest + 8;
  std::string message;
  try {
    plan(p, card(132));
  } catch (NotImplemented const& error) { message = error.what(); }
  CHECK(message.find("head_dim") != std::string::npos);
  CHECK(message.find("largest is (" + std::to_string(largest)) != std::string::npos);
}

TEST_CASE("plan: heads are packed where that leaves no more rows idle") {
  int const rows = find_tile(128, 128, TileUse::kDense)->tile.rows;
  struct Case {
    char const* why;
    int seqlen_q, heads_q, heads_k, packed;
  };
  for (Case const c : {Case{"one query for each of 4 heads fills 4 rows instead of 1 of 4 tiles", 1, 32, 8, 4},
                       {"8 heads, 16 queries: one tile instead of 8", 16, 8, 1, 8},
                       {"a ratio that does not divide 64", 8, 40, 8, 5},
                       {"the largest ratio that a slab holds", 1, 64, 1, 64},
                       {"more heads than rows of a slab: 13 of 65 divide them", 1, 130, 2, 13},
                       {"no heads to pack", 1, 8, 8, 1},
                       {"one query past a tile: 2 tiles a head, packed 5 for 4 heads", rows + 1, 32, 8, 4},
                       {"no rows are idle either way, but slabs of packed heads end close together", rows, 32, 8, 4},
                       {"the same in a long prompt", 128 * rows, 32, 8, 4},
                       {"4 of 64 rows would be idle", 128 * rows, 24, 4, 1}}) {
    CAPTURE(c.why);
    constexpr int kBatch = 64;  // so that no SM is idle
    Problem const p = problem(kBatch, c.seqlen_q, std::max(1000, c.seqlen_q), c.heads_q, c.heads_k, 128, true);
    Plan const made = plan(p, card(132));
    CHECK(made.packed_heads == c.packed);
    std::int64_t const queries_per_tile = slabs_of(made.tile) * (rows_of_slab(made.tile) / c.packed);
    CHECK(made.tiles == kBatch * ceil_div<std::int64_t>(c.seqlen_q, queries_per_tile) * (c.heads_q / c.packed));
    CHECK(made.tiles <= std::int64_t{kBatch} * ceil_div(c.seqlen_q, made.tile.rows) * c.heads_q);
  }
}

TEST_CASE("plan: heads that share K and V stay together; L2 is left only where that balances the work") {
  for (int const seqlen : {64, 1000, 4096, 16384, 131072}) {
    for (int const heads_k : {1, 4, 10, 16}) {
      for (int const ratio : {1, 4, 5}) {
        Problem const p = problem(2, seqlen, seqlen, heads_k * ratio, heads_k, 128, true);
        Plan const made =
            testing::plan_with(p, card(132), {.packed_heads = 1, .cluster = -1});  // so that groups share K
        CAPTURE(made.explain());
        Plan const taken = testing::plan_with(p, card(132), {.cluster = -1});
        CHECK(taken.heads_per_pass <= p.batch * p.heads_q / taken.packed_heads);
        CHECK(taken.heads_per_pass % (ratio / taken.packed_heads) == 0);
        int const all = p.batch * p.heads_q / made.packed_heads;
        CHECK(made.heads_per_pass >= 1);
        CHECK(made.heads_per_pass <= all);
        int const sharing = ratio / made.packed_heads;
        CHECK((made.heads_per_pass % sharing == 0));
        std::int64_t const head = std::int64_t{seqlen} * 256 * 2;  // bytes
        std::int64_t const filling = std::min<std::int64_t>((std::int64_t{55} << 20) / head, 132 / 8);
        std::int64_t const in_l2 = std::max((std::int64_t{20} << 20) / head, filling) * sharing;
        bool const fits = made.heads_per_pass <= std::max<std::int64_t>(in_l2, sharing);
        if (!fits && made.tiles < 1 << 15) {
          // What fits would leave blocks with more than their share.
          auto const fitting = static_cast<int>(std::max<std::int64_t>(in_l2, sharing));
          Plan const narrow =
              testing::plan_with(p, card(132), {.packed_heads = 1, .heads_per_pass = fitting, .cluster = -1});
          CHECK(causal_imbalance(narrow, p) > causal_imbalance(made, p));
        }
      }
    }
  }
}

TEST_CASE("tile order: the answer is a multiple of the sharing, deterministic, and balanced where that is possible") {
  std::vector<int> causal(128);
  for (int m = 0; m < 128; ++m) { causal[static_cast<std::size_t>(m)] = m + 2; }
  // 8 heads of 128 causal tiles with room for one in L2: one head at a time would keep a block busy for 1.7 times the
  // mean.
  TileOrder const order = choose_tile_order(
      {.sequence_heads = 8, .sharing = 1, .in_l2 = 1, .ctas = 132, .descending = true, .work = causal});
  CHECK(order.heads_per_pass > 1);
  CHECK(order.imbalance < 1.1);
  TileOrder const shared = choose_tile_order(
      {.sequence_heads = 24, .sharing = 4, .in_l2 = 6, .ctas = 132, .descending = true, .work = causal});
  CHECK((shared.heads_per_pass % 4 == 0));
  TileOrder const many = choose_tile_order(
      {.sequence_heads = 1 << 20, .sharing = 2, .in_l2 = 7, .ctas = 132, .descending = false, .work = {1}});
  CHECK(many.heads_per_pass == 6);
}

TEST_CASE("tile order: where memory takes the time, so few heads that all of their tiles run at once") {
  // 512 causal tokens: three tiles of a head, of which the last has three times the work of the first.
  TileOrderProblem problem{
      .sequence_heads = 512, .sharing = 1, .in_l2 = 80, .ctas = 132, .descending = true, .work = {1, 2, 3}};
  auto const tiles_at_once = [&] { return 3 * choose_tile_order(problem).heads_per_pass; };
  CHECK(tiles_at_once() > 132);
  problem.memory_share = 0.2;
  CHECK(tiles_at_once() > 132);  // memory has time
  problem.memory_share = 0.9;
  TileOrder const found = choose_tile_order(problem);
  CHECK((132 / 8 <= tiles_at_once() && tiles_at_once() <= 132 / 2));
  CHECK(found.imbalance < 1.05);
  problem.sequence_heads = 1 << 20;  // more than are computed
  CHECK((132 / 8 <= tiles_at_once() && tiles_at_once() <= 132 / 2));
  // Passes of 66 tiles would give a block the same query block again and again.
  CHECK(tiles_at_once() != 66);
  // Groups that share K and V stay together, and nothing is gained where one of them has more than half of a round.
  problem.sharing = 8;
  CHECK((tiles_at_once() % (3 * 8) == 0 && tiles_at_once() <= 132 / 2));
  problem.sharing = 32;
  CHECK(tiles_at_once() > 132);
  // What fits in L2 stays where it runs within half of a round, and where memory takes no more of the time within one.
  problem = {.sequence_heads = 509,
             .sharing = 1,
             .in_l2 = 50,
             .ctas = 132,
             .descending = false,
             .memory_share = 0.5,
             .work = {1, 1}};
  int const within_a_round = choose_tile_order(problem).heads_per_pass;
  CHECK((66 < 2 * within_a_round && 2 * within_a_round <= 132));
  problem.memory_share = 1;
  CHECK(2 * choose_tile_order(problem).heads_per_pass <= 66);
  problem.sequence_heads = 60;  // a block for each tile, the longest first
  CHECK(choose_tile_order(problem).heads_per_pass > 33);
  problem.sequence_heads = 509;
  problem.in_l2 = 20;
  int const within_half = choose_tile_order(problem).heads_per_pass;
  problem.memory_share = 0;
  CHECK(within_half == choose_tile_order(problem).heads_per_pass);
}

TEST_CASE("plan: what memory can bring decides how many heads of short sequences run together") {
  Problem const p = problem(32, 512, 512, 16, 16, 128, true);
  DeviceInfo fast = card(132);
  fast.memory_gbs = 1e6;
  CHECK(3 * plan(p, fast).heads_per_pass > 132);
  CHECK(3 * plan(p, device_info("H200")).heads_per_pass <= 66);
  CHECK(3 * plan(p, device_info("H100")).heads_per_pass <= 66);
}

TEST_CASE("plan: memory decides in which order tiles run, and no tile") {
  DeviceInfo fast = card(132);
  fast.memory_gbs = 1e9;
  int others = 0;
  for (int const batch : {1, 4, 12, 32}) {
    for (int const seqlen : {128, 256, 384, 512, 700, 1024}) {
      for (int const head_dim : {64, 96, 128, 192, 256}) {
        Problem const p = problem(batch, seqlen, seqlen, 16, 16, head_dim, seqlen % 256 != 0);
        Plan const made = plan(p, card(132));
        Plan const other = plan(p, fast);
        CAPTURE(made.explain());
        CHECK(made.tile == other.tile);
        CHECK(made.packed_heads == other.packed_heads);
        CHECK(made.ctas == other.ctas);
        others += made.heads_per_pass != other.heads_per_pass;
        CHECK((made.heads_per_pass == other.heads_per_pass || explains(made, "run at once, since memory takes")));
      }
    }
  }
  CHECK(others > 5);
}

TEST_CASE("plan: memory of a card is a positive number") {
  Problem const p = problem(1, 100, 100, 1, 1, 128);
  DeviceInfo device = card(132);
  for (double const wrong : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    device.memory_gbs = wrong;
    CHECK_THROWS_AS(plan(p, device), InvalidArgument);
  }
}

TEST_CASE("plan: decode beside prefill keeps as many blocks as its memory is worth") {
  Problem p = ragged(1024, 4096, 128, 64);
  p.packed_q = true;
  p.total_q = 2 * 1024 + 62;
  p.num_splits = 0;
  auto const made = [&](DeviceInfo const& device) {
    Plan const found = plan(p, device);
    CAPTURE(found.explain());
    REQUIRE(found.decode_first);
    return found;
  };
  auto const kept = [&](DeviceInfo const& device) { return made(device).readers_beside_prefill; };
  CHECK(kept(device_info("H200")) == 70);
  CHECK(kept(device_info("H100")) == 48);
  DeviceInfo faster = device_info("H200");
  faster.memory_gbs *= 3;
  CHECK(kept(faster) == 99);  // three quarters: prefill has some in any case
  CHECK(kept(device_info("H20")) == 57);
  // So many take 1.25 x 1.44 us for a block while memory brings as many of 64 KB.
  CHECK(made(device_info("H200")).prefill_at_par == 122);
  CHECK(made(device_info("H100")).prefill_at_par == 83);
  CHECK(made(device_info("H200")).chunks_beside_decode == 33);
  CHECK(made(device_info("H100")).chunks_beside_decode == 64);
  p.batch_invariant = true;  // units say less: two of 1k beside 62 on 4k, 32/8, take 317 us with 70, 274 with 99
  CHECK(kept(device_info("H200")) == 99);
  p.batch_invariant = false;
  p.sm_margin = 66;
  CHECK(kept(device_info("H200")) == 50);
  // Metadata know no margin, and ask how many of the slowest read what memory gives.
  CHECK(readers_of_few(p, device_info("H100")).beside_prefill == 68);
  CHECK(readers_of_few(p, device_info("H200")).beside_prefill == 99);
}

TEST_CASE("plan: causal work is even over the blocks in the cases that are measured") {
  struct Case {
    int batch, seqlen, heads, head_dim;
  };
  for (Case const c : {Case{32, 512, 16, 128},
                       {16, 1024, 16, 128},
                       {8, 2048, 16, 128},
                       {4, 4096, 16, 128},
                       {2, 8192, 16, 128},
                       {1, 16384, 16, 128},
                       {4, 4096, 32, 64},
                       {1, 16384, 32, 64},
                       {4, 4096, 8, 256},
                       {1, 16384, 8, 256}}) {
    Problem const p = problem(c.batch, c.seqlen, c.seqlen, c.heads, c.heads, c.head_dim, true);
    Plan const made = plan(p, card(132));
    CAPTURE(made.explain());
    CHECK(causal_imbalance(made, p) < 1.05);
  }
}

TEST_CASE("plan: nothing runs for an output without elements, and it says so") {
  for (Problem const& p : {problem(0, 5, 5, 2, 2, 64), problem(3, 0, 5, 2, 2, 64), problem(3, 5, 5, 0, 2, 64)}) {
    Plan const made = plan(p, card(132));
    CHECK(made.kernel == KernelFamily::kNone);
    CHECK(made.tiles == 0);
    CHECK(made.ctas == 0);
    CHECK(explains(made, "nothing to run"));
    CHECK(explains(made, "the output has no elements"));
  }
}

TEST_CASE("plan: without keys the kernel still runs, since it writes zeros and -inf") {
  Plan const few = plan(problem(2, 5, 0, 2, 2, 64), card(132));
  CHECK(few.kernel == KernelFamily::kDecode);
  CHECK(few.ctas == 4);
  Plan const many = plan(problem(2, 100, 0, 2, 2, 64), card(132));
  CHECK(many.kernel == KernelFamily::kPrefill);
  CHECK(many.ctas == 4);
}

TEST_CASE("plan: does not depend on the batch, the SM count or sm_margin where bits depend on it") {
  for (int const seqlen : {1, 65, 4096}) {
    Problem p = problem(1, seqlen, 1000, 32, 8, 128, true);
    p.batch_invariant = true;
    Plan const one = plan(p, card(132));
    for (int const batch : {2, 33, 1000}) {
      p.batch = batch;
      Plan const other = plan(p, card(48));
      CHECK(other.tile == one.tile);
      CHECK(other.packed_heads == one.packed_heads);
      CHECK(other.num_splits == one.num_splits);
    }
  }
}

TEST_CASE("plan: explain prints the problem, the card and a reason for each decision") {
  Plan const made = plan(problem(2, 512, 4096, 32, 8, 128, true), device_info("H100"));
  for (char const* text :
       {"plan: prefill kernel, bf16", "batch 2, 512 queries on 4096 keys, heads 32/8, head dims 128/128, causal",
        "H100, 132 SMs, 50.0 MiB L2", "  tile", "  packing", "  splits", "  grid", "  order", "  workspace"}) {
    CAPTURE(text);
    CAPTURE(made.explain());
    CHECK(explains(made, text));
  }
  CHECK(made.reasons.size() == 8);
}

TEST_CASE("plan: masks are named in canonical form") {
  auto const text = [](Arguments const& options) {
    return plan(make_problem({DataType::kFloat16, 1, 300, 300, 2, 2, 64, 64, true}, options), card(132)).reasons.at(0);
  };
  CHECK(text({}).find("no mask, sinks") != std::string::npos);
  CHECK(text({.window_left = 16, .window_right = 0}).find("window (16, 0)") != std::string::npos);
  CHECK(text({.window_right = 7}).find("window (unlimited, 7)") != std::string::npos);
  CHECK(text({.causal = true, .attention_chunk = 32, .softcap = 30.0}).find("causal, chunk 32, softcap") !=
        std::string::npos);
}

TEST_CASE("plan: problems that were not made by make_problem are still refused where a decision would fail") {
  Problem p = problem(1, 64, 64, 4, 2, 64);
  CHECK_THROWS_AS(plan(p, card(0)), InvalidArgument);
  p.heads_k = 0;
  CHECK_THROWS_AS(plan(p, card(132)), InvalidArgument);
  p.heads_k = 3;
  CHECK_THROWS_AS(plan(p, card(132)), InvalidArgument);
}

TEST_CASE("plan_with: a forced choice replaces the plan's own and is named as forced") {
  using testing::plan_with;
  Problem const p = problem(1, 1, 1000, 8, 2, 64, true);
  TileConfig const wide = find_tile(128, 128, TileUse::kDense)->tile;
  Plan const made =
      plan_with(p, card(132), {.tile = wide, .packed_heads = 1, .heads_per_pass = 3, .ctas = 5, .num_splits = 1});
  CHECK(made.tile == wide);
  CHECK(made.packed_heads == 1);
  CHECK(made.heads_per_pass == 3);
  CHECK(made.ctas == 5);
  CHECK(made.threads == (wide.rows / 64 + 1) * 128);
  CHECK(explains(made, "forced"));
  CHECK(plan_with(p, card(132), {.tile = {.head_dim = 128}}).tile.head_dim == 128);
  CHECK(plan_with(p, card(132), {}).reasons == plan(p, card(132)).reasons);
  CHECK_THROWS_AS(plan_with(p, card(132), {.tile = {.rows = 7}}), InvalidArgument);
  CHECK_THROWS_AS(plan_with(p, card(132), {.packed_heads = 3, .cluster = -1}), InvalidArgument);
  Problem const many = ragged(2000, 3000, 128, 40);  // with more tiles than those of fewer rows are for
  TileConfig const small = find_tile(128, 128, TileUse::kSmallGrid)->tile;
  CHECK(plan(many, card(132)).tile != small);
  CHECK(plan_with(many, card(132), {.tile = small}).tile == small);
  CHECK_THROWS_AS(plan_with(many, card(132), {.tile = {.rows = 7}}), InvalidArgument);
  Plan const split = plan_with(p, card(132), {.num_splits = 2});
  CHECK((split.forces_splits && split.max_splits == 2));
}

TEST_CASE(
    "plan: where every sequence has many queries, no kernel for few runs, and tiles are cut only if they are few") {
  struct Case {
    char const* why;
    int batch;
    bool packed_q, seqused_q;
    int total_q;
    int sms;
    std::vector<bool> may_split;  // of each kernel
  };
  for (Case const& c :
       {Case{"a q of even sequences", 6, false, false, 0, 132, {false}},
        Case{"some of whose queries may not count", 6, false, true, 0, 132, {true, true}},
        Case{"packed, as many rows as all bounds together", 6, true, false, 3072, 132, {false}},
        Case{"packed, one row less, which is one kernel's if the schedule may cut", 6, true, false, 3071, 132, {true}},
        Case{"long tiles that leave a fifth of the grid idle", 5, false, false, 0, 132, {true}},
        Case{"tiles of fewer rows, which shorter sequences could leave idle", 4, false, false, 0, 132, {true}},
        Case{"tiles that leave much of the grid idle", 1, false, false, 0, 100, {true}}}) {
    CAPTURE(c.why);
    Problem p = ragged(512, 16384, 128, c.batch);
    p.num_splits = 0;
    p.packed_q = c.packed_q;
    p.seqused_q = c.seqused_q;
    if (c.packed_q) { p.total_q = c.total_q; }
    std::vector<bool> may_split;
    for (KernelPlan const& kernel : plan(p, card(c.sms)).kernels) { may_split.push_back(kernel.may_split); }
    CHECK(may_split == c.may_split);
    p.batch_invariant = true;  // those with up to 16 rows have a kernel of their own where there may be some
    CHECK(plan(p, card(132)).kernels.size() == (p.packed_q || p.seqused_q ? 3 : 2));
  }
}

TEST_CASE(
    "plan: decode goes before prefill, where that has several rounds of tiles and decode fills an SM with a block") {
  auto const decode_is_first = [](int queries, int singles, int heads_q, int head_dim, bool batch_invariant = false) {
    Problem p = ragged(queries, 4096, head_dim, 1 + singles);
    p.heads_q = heads_q;
    p.heads_k = heads_q / 4;
    p.packed_q = true;
    p.total_q = queries + singles;
    p.num_splits = 0;
    p.batch_invariant = batch_invariant;
    Plan const made = plan(p, card(132));
    REQUIRE(made.kernels.size() >= 2);
    for (KernelPlan const& kernel : made.kernels) {
      bool const decode = kernel.family == KernelFamily::kDecode;
      CardShare const first = decode ? CardShare::kLeaves : CardShare::kFirst;
      bool const rest = kernel.least_queries > 0;  // of decode
      CHECK(card_share(made, kernel) == (rest                          ? CardShare::kAll
                                         : decode == made.decode_first ? first
                                                                       : CardShare::kTakes));
    }
    return made.decode_first;
  };
  CHECK(decode_is_first(1024, 200, 32, 128));  // tiles of 32 queries of four heads: 32 x 8
  CHECK_FALSE(decode_is_first(512, 200, 32, 128));
  CHECK_FALSE(decode_is_first(2048, 400, 8, 128));
  CHECK_FALSE(decode_is_first(4096, 200, 32, 64));  // two blocks of decode share an SM
  CHECK(decode_is_first(4096, 200, 32, 256));
  CHECK(decode_is_first(4096, 200, 32, 128, true));
  CHECK_FALSE(decode_is_first(512, 200, 32, 128, true));
}

TEST_CASE("plan: lengths on the device ask for the kernels of both classes, or for one where no other can be needed") {
  DeviceInfo const device = card(132);
  // What clusters take instead has tests of its own.
  auto const listed_plan = [&](Problem const& p) { return testing::plan_with(p, device, {.cluster = -1}); };

  struct Case {
    char const* why;
    int seqlen_q;
    std::int64_t num_splits;
    bool batch_invariant;
    std::vector<KernelFamily> families;
    std::vector<bool> may_split;
  };
  using enum KernelFamily;
  for (Case const& c : {Case{"both classes", 1000, 0, false, {kPrefill, kDecode}, {true, true}},
                        Case{"at most one query", 1, 0, false, {kDecode}, {true}},
                        Case{"as many queries as a slab holds", 16, 0, false, {kDecode}, {true}},
                        Case{"one query more", 17, 0, false, {kPrefill, kDecode}, {true, true}},
                        Case{"one part: the large tiles do for all", 1000, 1, false, {kPrefill}, {false}},
                        Case{"one part and few queries", 16, 1, false, {kDecode}, {false}},
                        Case{"batch invariance splits few queries, and has two tiles for them",
                             1000,
                             1,
                             true,
                             {kPrefill, kDecode, kDecode},
                             {false, true, true}},
                        Case{"batch invariance, more than 16 rows", 5, 1, true, {kDecode, kDecode}, {true, true}},
                        Case{"batch invariance, few queries", 1, 7, true, {kDecode}, {true}}}) {
    CAPTURE(std::string(c.why));
    Problem p = ragged(c.seqlen_q, 8192, 96, 33);  // no tile for its head dim is found without a schedule
    p.heads_q = 4;
    p.heads_k = 1;
    p.num_splits = static_cast<int>(c.num_splits);
    p.batch_invariant = c.batch_invariant;
    p.seqused_q = true;  // sequences may have fewer queries than the bound says
    Plan const made = listed_plan(p);
    CHECK((made.listed && made.makes_schedule));
    CHECK(made.fixed_splits == c.batch_invariant);
    CHECK(made.packed_heads == 4);
    std::vector<KernelFamily> families;
    std::vector<bool> may_split;
    for (KernelPlan const& kernel : made.kernels) {
      families.push_back(kernel.family);
      may_split.push_back(kernel.may_split);
      CHECK(kernel.ctas <= device.sm_count * kernel.tile.per_sm);
      CHECK(kernel.threads == (slabs_of(kernel.tile) + 1) * 128);
    }
    CHECK(families == c.families);
    CHECK(may_split == c.may_split);
    CHECK((made.num_splits > 1) == (std::find(may_split.begin(), may_split.end(), true) != may_split.end()));
    p.has_metadata = true;
    Plan const given = listed_plan(p);
    // Metadata of a dense q may count other queries than the call has, which splits of fixed size must not depend on.
    CHECK(given.makes_schedule == c.batch_invariant);
    CHECK((given.workspace_bytes < made.workspace_bytes) != c.batch_invariant);
    CHECK(given.kernels.size() == made.kernels.size());
    p.packed_q = true;
    p.seqused_q = false;
    p.total_q = c.seqlen_q + p.batch - 1;
    Plan const packed = listed_plan(p);
    p.has_metadata = false;
    CHECK_FALSE(packed.makes_schedule);
    CHECK(packed.workspace_bytes < listed_plan(p).workspace_bytes);
  }
}

TEST_CASE("plan: few rows take tiles of fewer rows, which keep more SMs busy, whatever max_seqlen_q is") {
  auto const chunk = [](int total_q, int bound_q, int seqlen_k) {
    Problem p = ragged(bound_q, seqlen_k, 128, 1);
    p.packed_q = true;
    p.total_q = total_q;
    p.keys = KeyLayout::kPaged;
    p.mask.right = 0;
    return p;
  };
  for (int const splits : {0, 1}) {
    for (int const bound_q : {100, 512, 5000}) {
      Problem p = chunk(512, bound_q, 512);  // 128 tiles instead of 86
      p.num_splits = splits;
      CHECK(tile_of(p) == "128x128 packed");
      p.total_q = 560;  // 136 instead of 96, of which the shortest come behind others: 13.4 us instead of 14.9
      CHECK(tile_of(p) == "128x128 packed");
      p = chunk(381, bound_q, 458);  // 192 instead of 128, too short to come behind others: 16.5 us instead of 14.1
      p.heads_q = 64;
      p.num_splits = splits;
      CHECK(tile_of(p) == "192x80 packed");
      p = chunk(16384, bound_q, 16384);
      p.num_splits = splits;
      CHECK(tile_of(p) == "192x80 packed");
    }
  }
  Problem p = chunk(512, 512, 8192);
  p.num_splits = 0;
  CHECK(tile_of(p) == "128x128 packed");
  CHECK_FALSE(plan(p, card(132)).kernels.at(0).may_split);
  CHECK(explains(plan(p, card(132)), "fewer rows"));
  p.batch_invariant = true;
  CHECK(tile_of(p) == "192x80 packed");
  p = chunk(128, 128, 32768);  // so few tiles of so many keys that they are to be cut
  p.batch = 2;
  p.num_splits = 0;
  CHECK(tile_of(p) == "128x128 packed");
  CHECK(plan(p, card(132)).kernels.at(0).may_split);
  p = chunk(512, 512, 512);
  p.softcap = 30.0F;
  CHECK(tile_of(p) == "192x80 packed");
  p = chunk(2048 + 62, 1024, 4096);  // beside single queries
  p.batch = 64;
  p.num_splits = 0;
  CHECK(plan(p, card(132)).kernels.size() == 2);
  CHECK(tile_of(p) == "128x128 packed");
  p.total_q = 4096 + 62;
  CHECK(plan(p, card(132)).kernels.size() == 2);
  CHECK(tile_of(p) == "192x80 packed");
  p = chunk(512, 512, 512);  // 8 heads share a tile of 16 queries, or of 24
  p.head_dim = p.head_dim_v = 64;
  p.heads_q = 32;
  p.heads_k = 4;
  CHECK(tile_of(p) == "128x128 packed");
  p.total_q = 560;  // little more than a round of them: 11.9 us, 14.3 with the larger ones
  CHECK(tile_of(p) == "128x128 packed");
}

TEST_CASE("plan: packed sequences that are short in the mean take tiles for them, whatever their bounds are") {
  auto const packed = [](int head_dim, int batch, int mean, int bound) {
    Problem p = ragged(bound, bound, head_dim, batch);
    p.heads_k = p.heads_q;
    p.packed_q = true;
    p.keys = KeyLayout::kVarlen;
    p.total_q = p.total_k = batch * mean;
    p.mask.right = 0;
    return p;
  };
  for (int const bound : {512, 600, 9000}) {
    CAPTURE(bound);
    CHECK(tile_of(packed(64, 32, 512, bound)) == "256x64");
    CHECK(tile_of(packed(128, 32, 512, bound)) == "192x64");
    CHECK(tile_of(packed(64, 4, 8000, bound)) == "192x128");
    CHECK(tile_of(packed(128, 4, 8000, bound)) == "192x80");
    // Few queries of each sequence on many keys.
    Problem p = packed(128, 32, 512, bound);
    p.total_k = 32 * 16'000;
    CHECK(tile_of(p) == "192x80");
    p.total_k = 0;  // not known
    CHECK(tile_of(p) == "192x80");
    // A tile that depended on the other sequences.
    p = packed(128, 32, 512, bound);
    p.batch_invariant = true;
    CHECK(tile_of(p) == "192x80");
    p.batch_invariant = false;
    p.num_splits = 0;  // whether tiles are cut depends on the bound
    CHECK(tile_of(p) == "192x80");
    // Heads that share a tile.
    p = packed(128, 32, 512, bound);
    p.heads_k = p.heads_q / 2;
    CHECK(tile_of(p) == "192x80 packed");
  }
  CHECK(tile_of(packed(96, 32, 512, 512)) == "192x96");  // it has no other for short ones
  Problem p = packed(64, 32, 512, 512);
  p.softcap = 30.0F;
  CHECK(tile_of(p) == "192x128");
}

TEST_CASE("plan: no bound on the queries changes the tile of a packed q") {
  std::mt19937 random(7);
  auto const pick = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  int small = 0;
  int narrow = 0;
  for (int i = 0; i < 30'000; ++i) {
    int const batch = pick({1, 1, 2, 7, 40, 200});
    int const head_dim = batch == 1 ? 128 : pick({64, 128, 128, 192, 256});
    Problem p = ragged(70, pick({64, 100, 160, 300, 2000, 8192, 32'768}), head_dim, batch);
    p.heads_k = pick({1, 2, 8, 32});
    p.heads_q = p.heads_k * pick({1, 1, 3, 4, 8});
    p.packed_q = true;
    p.total_q = 1 + static_cast<std::int64_t>(random() % 5000);
    if (batch > 1 && p.total_q % batch == 0) { ++p.total_q; }  // all may have as many as the bound says
    p.keys = random() % 2 == 0 ? KeyLayout::kPaged : KeyLayout::kVarlen;
    if (p.keys == KeyLayout::kVarlen) { p.total_k = 1 + static_cast<int>(random() % 50'000); }
    p.num_splits = pick({0, 1, 3});
    p.mask.left = pick({kUnlimited, kUnlimited, 128, 1000});
    p.mask.right = pick({kUnlimited, 0, 0, 50});
    auto const tile = [&](int bound) {
      p.seqlen_q = bound;
      TileConfig const of_bound = plan(p, card(132)).kernels.front().tile;
      return std::pair{of_bound.rows, of_bound.keys};
    };
    int const shortest =
        64 / scheduled_packing(p.heads_q, p.heads_k) + 1;  // a bound that few queries fit in is a class
    auto const first = tile(shortest);
    CAPTURE(plan(p, card(132)).explain());
    for (int const bound : {shortest + 3, 300, 2048, static_cast<int>(p.total_q), 20'000}) {
      if (bound >= shortest) { CHECK(tile(bound) == first); }
    }
    small += first.first == 128;
    narrow += first.second == 64;
  }
  CHECK(small > 1000);
  CHECK(narrow > 100);
}

TEST_CASE("plan: tiles of a ragged call with many rows follow from the head dims and the class alone") {
  for (int const head_dim : {64, 96, 128, 192, 256}) {
    for (int const seqlen_q : {1, 10, 17, 500, 100'000}) {
      for (int const seqlen_k : {1, 3000, 1 << 20}) {
        for (bool const batch_invariant : {false, true}) {
          // So many that not every tile of 32 rows would have an SM.
          Problem p = ragged(seqlen_q, seqlen_k, head_dim, seqlen_q >= 17 ? 1000 : seqlen_q > 8 ? 9 : 5);
          p.num_splits = 0;
          p.batch_invariant = batch_invariant;
          p.mask.left = seqlen_k / 2;
          // Head dims without a tile of few rows have those of 64.
          bool const known = find_tile(head_dim, head_dim, TileUse::kFewRows)->tile.head_dim ==
                             find_tile(head_dim, head_dim, TileUse::kDecode)->tile.head_dim;
          // Beside prefill those with few queries are those that 32 rows hold, with head dim 64 16; without, all may
          // have as many as 64 hold. Here all sequences have the same number of queries, so that none has fewer than
          // the others.
          bool const many_without_prefill =
              4 * seqlen_q > (batch_invariant ? 16 : 32) && (4 * seqlen_q <= 64 || batch_invariant);
          bool const few = !many_without_prefill && known;
          bool const in_sixteen = 4 * seqlen_q <= 16 || batch_invariant || (head_dim == 64 && 4 * seqlen_q > 64);
          Plan const made = plan(p, card(114));
          for (KernelPlan const& kernel : made.kernels) {
            TileUse const of_few = batch_invariant ? TileUse::kFewRowsInParts
                                   : made.listed   ? (in_sixteen ? TileUse::kFewRows : TileUse::kSomeRows)
                                   : in_sixteen    ? TileUse::kFewRowsByIndex
                                                   : TileUse::kSomeRowsByIndex;
            TileUse const decode = few ? of_few : TileUse::kDecode;
            TileUse const use = kernel.family == KernelFamily::kDecode ? decode
                                : kernel.may_split                     ? TileUse::kRagged
                                                                       : TileUse::kWhole;
            CHECK(kernel.tile == find_tile(head_dim, head_dim, use)->tile);
          }
        }
      }
    }
  }
}

namespace {

// A call whose workspace is asked for: lengths on the device or, without, a dense batch.
struct WorkspaceCase {
  int head_dim;
  int head_dim_v;
  int heads_q;
  int heads_k;
  float softcap;
  bool paged;
};

std::vector<WorkspaceCase> workspace_cases() {
  std::vector<WorkspaceCase> cases;
  std::vector<std::pair<int, int>> const dims{{8, 8},     {64, 64},   {96, 96},   {128, 128},
                                              {192, 128}, {192, 192}, {256, 256}, {128, 256}};
  std::vector<std::pair<int, int>> const heads{{32, 8}, {16, 16}, {64, 4}, {128, 1}};  // ratios 4, 1, 16, 128
  for (auto const& [head_dim, head_dim_v] : dims) {
    for (auto const& [heads_q, heads_k] : heads) {
      for (float const softcap : {0.0F, 30.0F}) {
        for (bool const paged : {false, true}) {
          cases.push_back({head_dim, head_dim_v, heads_q, heads_k, softcap, paged});
        }
      }
    }
  }
  return cases;
}

Problem problem_of(WorkspaceCase const& c, int batch, int seqlen_q, bool lengths_on_device, bool packed_q) {
  static int lengths = 0;
  Tensor given;
  given.data = &lengths;
  given.rank = 1;
  Arguments options{.softcap = c.softcap};
  if (lengths_on_device) { options.seqused_k = given; }
  if (packed_q) { options.cu_seqlens_q = given; }
  return make_problem({.dtype = DataType::kBFloat16,
                       .batch = batch,
                       .seqlen_q = seqlen_q,
                       .seqlen_k = 1 << 20,
                       .heads_q = c.heads_q,
                       .heads_k = c.heads_k,
                       .head_dim = c.head_dim,
                       .head_dim_v = c.head_dim_v,
                       .page_size = c.paged ? 16 : 0},
                      options);
}

}  // namespace

TEST_CASE("plan: the workspace is bounded by SMs and tiles, whatever the batch, the lengths and num_splits") {
  constexpr std::int64_t kMost = std::int64_t{64} << 20;
  std::int64_t largest = 0;
  for (WorkspaceCase const& c : workspace_cases()) {
    CAPTURE(c.head_dim);
    CAPTURE(c.head_dim_v);
    CAPTURE(c.heads_q);
    CAPTURE(c.heads_k);
    CAPTURE(c.softcap);
    CAPTURE(c.paged);
    for (int const batch : {1, 200, 4096}) {
      for (int const seqlen_q : {1, 9, 100, 1 << 17}) {
        for (int const num_splits : {0, 1, 2, 7, 256}) {
          for (bool const packed_q : {false, true}) {
            Problem p = problem_of(c, batch, seqlen_q, true, packed_q);
            p.num_splits = num_splits;
            if (packed_q) {
              p.total_q = p.total_q / 2 + 1;
            }  // sequences shorter than the bound: kernels for both kinds
            Plan const made = plan(p, card(132));
            std::int64_t const schedule = made.makes_schedule ? 4 * schedule_size(batch) + 256 : 0;
            CHECK(made.workspace_bytes <= kMost + schedule);
            largest = std::max(largest, made.workspace_bytes);
          }
          if (num_splits > 2) { continue; }
          Problem dense = problem_of(c, std::min(batch, 64), seqlen_q, false, false);
          dense.num_splits = num_splits;
          CHECK(plan(dense, card(132)).workspace_bytes <= kMost);
        }
      }
    }
  }
  CHECK(largest > std::int64_t{16} << 20);
}

TEST_CASE("plan: batch invariance has room for every split of the sequences with few queries, and for no other") {
  Problem p = ragged(8192, 8192, 128, 8);
  p.batch_invariant = true;
  Plan const made = plan(p, card(132));
  KernelPlan const& decode = made.kernels.back();
  CHECK(decode.most_tiles == 8 * 8);
  CHECK(decode.partial_slots == 8 * 8 * 9);  // 1024 keys each, and one more where a page does not begin a block
  CHECK(made.kernels.at(0).partial_slots == 0);
}

namespace {

// Calls that clusters may take, and some that they may not: 1 to 80 rows of few and many heads, short and long.
std::vector<Problem> decode_problems() {
  std::vector<Problem> problems;
  for (int const batch : {1, 2, 7, 16, 64, 300}) {
    for (int const seqlen_q : {1, 2, 4, 5, 8, 9, 16, 17, 20}) {
      for (int const seqlen_k : {0, 1, 100, 300, 900, 5000, 100'000}) {
        for (int const num_splits : {0, 1, 2, 3, 5, 16, 40}) {
          for (int const head_dim : {64, 96, 128, 256}) {
            Problem p = ragged(seqlen_q, seqlen_k, head_dim, batch);
            p.num_splits = num_splits;
            if (seqlen_k == 300) { p.keys = KeyLayout::kPaged; }
            problems.push_back(p);
            p = problem(batch, seqlen_q, seqlen_k, 32, 8, head_dim, true);
            p.num_splits = num_splits;
            problems.push_back(p);
          }
        }
      }
    }
  }
  return problems;
}

bool is_cluster_size(int size) { return size == 1 || size == 2 || size == 4 || size == 8 || size == 16; }

}  // namespace

TEST_CASE(
    "plan: clusters take the tiles of each sequence and head group, all at once or drawn in the schedule's order") {
  DeviceInfo const device = card(132);
  int shared = 0;
  int alone = 0;
  int drawn = 0;
  int in_several = 0;
  int listed = 0;
  for (Problem const& p : decode_problems()) {
    Plan const made = plan(p, device);
    CAPTURE(made.explain());
    if (made.cluster == 0) {
      ++listed;
      continue;
    }
    REQUIRE(is_cluster_size(made.cluster));
    REQUIRE(made.kernels.size() == 1);
    KernelPlan const& kernel = made.kernels.front();
    int const packed = p.heads_q / p.heads_k;
    int const rows = p.seqlen_q * packed;
    // Several of 32 rows, where each has an SM and they take less time.
    bool const several = rows > 32 && kernel.tile.rows == 32;
    int const of_group = several ? ceil_div(rows, 32) : 1;
    CHECK((!several || of_group * p.batch * p.heads_k <= 132));
    int const tiles = p.batch * p.heads_k * of_group;
    CHECK(kernel.family == KernelFamily::kDecode);
    CHECK((rows <= 64 || several));
    CHECK(kernel.tiles_of_group == of_group);
    CHECK_FALSE(kernel.packed_tiles);  // of sequences that may all have as many queries
    in_several += several;
    CHECK(made.packed_heads == packed);
    CHECK(made.tiles == tiles);
    int const of_tile = clusters_of_tile(kernel);
    CHECK(kernel.partial_slots == (of_tile > 1 ? tiles * of_tile : 0));
    CHECK(kernel.may_split == (of_tile > 1));
    CHECK((made.workspace_bytes > 0) == (kernel.may_split || made.makes_schedule));
    CHECK((!made.listed || (made.cluster == 1 && p.ragged && tiles > made.ctas)));
    CHECK(made.makes_schedule == made.listed);
    CHECK(made.num_splits == made.cluster * of_tile);
    CHECK((p.num_splits == 0 || made.num_splits <= p.num_splits));
    drawn += made.listed;
    // A cluster of which half has no keys to read would be a smaller one.
    std::int64_t const blocks = ceil_div(std::max(p.seqlen_k, 1), kernel.tile.keys) + 1;
    CHECK(made.cluster < 2 * blocks);
    std::string const blocks_of_grid = concat(made.ctas, made.ctas == 1 ? " block" : " blocks");
    CHECK(explains(made, concat(" on ", blocks_of_grid, "\n")));
    CHECK(explains(made, concat("  grid       ", blocks_of_grid, " of ")));
    if (made.cluster == 1) {
      CHECK(made.ctas == std::min(tiles, 132 * kernel.tile.per_sm));
      ++alone;
    } else {
      CHECK(made.ctas == tiles * made.cluster * of_tile);
      CHECK(made.ctas <= 132 * kernel.tile.per_sm);
      CHECK((rows <= most_merge_rows(kernel.tile, made.cluster) || several));
      CHECK(explains(made, concat(of_tile > 1 ? "clusters of " : "a cluster of ", made.cluster, " blocks")));
      ++shared;
    }
  }
  CHECK(shared > 100);
  CHECK(alone > 100);
  CHECK(drawn > 100);
  CHECK(in_several > 100);
  CHECK(listed > 100);
}

TEST_CASE("plan: without shares of the same size no block reads more than 4 MiB of keys and values") {
  DeviceInfo const device = card(132);
  for (Problem p : decode_problems()) {
    p.mask = {};
    Plan const made = plan(p, device);
    if (made.cluster == 0) { continue; }
    CAPTURE(made.explain());
    TileConfig const& tile = made.kernels.front().tile;
    std::int64_t const share = ceil_div(ceil_div(p.seqlen_k, tile.keys), made.num_splits);
    std::int64_t const bytes = share * tile.keys * (p.head_dim + p.head_dim_v) * 2;
    bool const in_turn = made.tiles > made.ctas && !made.listed;
    CHECK(bytes <= std::int64_t{p.batch == 1 ? 16 : 4} << 20);  // one sequence: all tiles are as long
    CHECK((!in_turn || (made.cluster == 1 && share <= 4)));
  }
  // A mask bounds what is read as the lengths do.
  Problem windowed_decode = ragged(1, 1 << 20, 128, 16);
  windowed_decode.num_splits = 0;
  CHECK(plan(windowed_decode, device).cluster == 0);
  windowed_decode.mask.left = 1000;
  CHECK(plan(windowed_decode, device).cluster > 0);
}

TEST_CASE("plan: clusters share the tiles of a call with few of them, as far as num_splits allows") {
  auto const cluster = [](int batch, int seqlen_k, int num_splits) {
    Problem p = ragged(1, seqlen_k, 128, batch);
    p.num_splits = num_splits;
    return plan(p, card(132)).cluster;
  };
  CHECK(cluster(1, 8192, 0) > 2);
  CHECK(cluster(1, 8192, 1) == 1);
  CHECK(cluster(1, 8192, 2) == 2);
  CHECK(cluster(1, 8192, 3) == 2);
  CHECK(cluster(1, 100, 0) == 1);         // one block
  CHECK(cluster(16, 4096, 0) == 1);       // 128 tiles fill the card
  CHECK(cluster(16, 8192, 0) == 0);       // and are so long that it counts whether lengths differ
  CHECK(cluster(16, 8192, 1) == 1);       // but none may be cut
  CHECK(cluster(9, 4096, 0) == 0);        // 72 tiles: some SMs would share their way to memory, and others be done
  CHECK(cluster(17, 8192, 0) == 0);       // 4 behind a full round
  CHECK(cluster(17, 1024, 0) == 1);       // not for so few keys
  CHECK(cluster(64, 1024, 0) == 1);       // more tiles than blocks, drawn
  CHECK(cluster(64, 4096, 0) == 0);       // one of them may be longer than all others together
  CHECK(cluster(64, 200, 0) == 1);        // and short
  CHECK(cluster(1, 10'000'000, 0) == 0);  // one sequence may be too long for a cluster
}

struct Change {
  char const* why;
  void (*apply)(Problem&);
};

// With which packed sequences that all seemed to have as many queries need a schedule.
constexpr Change kWantSchedule[] = {
    {"rows of no sequence, or a bound that is too small", [](Problem& p) { ++p.total_q; }},
    {"shorter ones for certain", [](Problem& p) { --p.total_q; }},
    {"rows that do not count", [](Problem& p) { p.seqused_q = true; }},
    {"splits of fixed size", [](Problem& p) { p.batch_invariant = true; }},
};

TEST_CASE("plan: rows for nothing but sequences as long as they may be need no schedule") {
  Problem known = ragged(512, 512, 128, 32);
  known.packed_q = known.keys_known = true;
  known.total_q = 32 * 512;
  known.keys = KeyLayout::kVarlen;
  auto const listed = [](Problem const& p) { return plan(p, card(132)).listed; };
  Plan const made = plan(known, card(132));
  CHECK_FALSE(made.listed);
  CHECK_FALSE(made.makes_schedule);
  CHECK(made.workspace_bytes == 0);
  int const tiles_of_sequence = ceil_div(512, made.kernels.front().tile.rows / made.packed_heads);
  CHECK(made.tiles == std::int64_t{32} * tiles_of_sequence * known.heads_q / made.packed_heads);
  CHECK(explains(made, "none: there are as many rows"));
  // The tile is that of other lengths.
  Problem other = known;
  other.keys_known = false;
  CHECK(plan(other, card(132)).kernels.front().tile == made.kernels.front().tile);
  CHECK(listed(other));
  for (Change const& c : kWantSchedule) {
    CAPTURE(c.why);
    Problem p = known;
    c.apply(p);
    CHECK(listed(p));
  }
  Problem on_ranks = known;
  on_ranks.mask.cp_world = 2;
  CHECK(listed(on_ranks));
  Problem few = known;  // tiles that leave SMs idle are cut, if that saves more than it takes to merge them
  few.batch = 1;
  few.seqlen_q = few.total_q = 128;
  few.num_splits = 0;
  CHECK_FALSE(listed(few));
  few.seqlen_k = 8192;
  CHECK_FALSE(listed(few));
  CHECK(plan(few, card(132)).kernels.front().equal_parts == 4);
  few.seqlen_q = 300;  // a bound
  CHECK(plan(few, card(132)).kernels.front().equal_parts == 4);
  few.batch = 33;  // more than lanes
  CHECK(listed(few));
  few.batch = 1;
  few.num_splits = 1;
  CHECK(plan(few, card(132)).kernels.front().equal_parts == 1);
}

TEST_CASE("plan: the tiles of one sequence behind many keys are in equal parts, a block for each") {
  Problem p = ragged(128, 8192, 128, 1);
  p.packed_q = true;
  p.total_q = 128;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  p.num_splits = 0;
  Plan const made = plan(p, card(132));
  KernelPlan const& kernel = made.kernels.front();
  CHECK_FALSE(made.listed);
  CHECK_FALSE(made.makes_schedule);
  CHECK(tile_of(p) == "128x128 packed");
  CHECK(made.tiles == 32);  // 4 for each K/V head
  CHECK(kernel.equal_parts == 4);
  CHECK(kernel.ctas == 128);
  CHECK(kernel.partial_slots == 128);
  CHECK(explains(made, "4 parts of each tile"));
  auto const parts_of = [](Problem const& problem) { return plan(problem, card(132)).kernels.front().equal_parts; };
  p.num_splits = 3;  // which clusters merge sooner
  CHECK(plan(p, card(132)).kernels.front().blocks_of_pair == 3);
  p.num_splits = 1;
  CHECK(parts_of(p) == 1);
  p.num_splits = 0;
  p.softcap = 30.0F;
  CHECK(parts_of(p) == 5);
  p.batch_invariant = true;
  CHECK(parts_of(p) == 1);
  p.batch_invariant = false;
  p.seqlen_k = 900;  // done before parts could be merged
  CHECK(parts_of(p) == 1);
  p.seqlen_k = 8192;
  p.total_q = p.seqlen_q = 8192;  // so many tiles that they fill the card
  CHECK(parts_of(p) == 1);
  p.total_q = p.seqlen_q = 128;
  p.batch = 2;  // which may differ in length
  CHECK(parts_of(p) == 1);
}

// Prompts and sequences of few queries over pages, four heads of q for each of k, with metadata.
Problem step_of_classes(int total_q, int batch, int heads_k, int seqlen_k) {
  Problem p = ragged(512, seqlen_k, 128, batch);
  p.heads_q = 4 * heads_k;
  p.heads_k = heads_k;
  p.packed_q = true;
  p.total_q = total_q;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  p.num_splits = 0;
  p.has_metadata = true;
  return p;
}

bool has_classes(Problem const& p) { return explains(plan(p, card(132)), "both find their tiles by themselves"); }

TEST_CASE("plan: few prompts beside sequences of few queries have a kernel for each class and no schedule") {
  auto const step = [](int total_q, int batch, int heads_k, int seqlen_k) {
    Problem p = step_of_classes(total_q, batch, heads_k, seqlen_k);
    p.has_metadata = false;
    return p;
  };
  Problem p = step(140, 41, 2, 8192);
  Plan const made = plan(p, card(132));
  REQUIRE(has_classes(p));
  CHECK_FALSE((made.listed || made.makes_schedule));
  CHECK(made.workspace_bytes == 0);
  REQUIRE(made.kernels.size() == 2);
  CHECK(made.kernels[0].least_queries == 5);  // four heads share a tile of 16 rows
  CHECK(made.kernels[1].most_queries == 4);
  CHECK(made.kernels[1].tile.rows == 16);
  CHECK(made.kernels[1].ctas == made.cluster * 82);
  for (int const bound : {20, 140, 9000}) {  // of queries: no tile depends on it, nor which are shared
    p.seqlen_q = bound;
    Plan const other = plan(p, card(132));
    CHECK(other.kernels[0].tile == made.kernels[0].tile);
    CHECK(other.kernels[0].pairs == made.kernels[0].pairs);
    CHECK(other.kernels[0].blocks_of_pair == made.kernels[0].blocks_of_pair);
    // 100 queries are four tiles for each K/V head, and one more for each prompt; four more than there must be.
    int const prompts = ceil_div(100, bound) - 1 + 4;
    CHECK(other.kernels[0].ctas <= std::max(1, other.kernels[0].blocks_of_pair) * 2 * (4 + prompts));
    CHECK(other.kernels[0].ctas >= 2 * (4 + prompts));
  }
  p = step(364, 64, 1, 2048);
  KernelPlan const without_margin = plan(p, card(132)).kernels.at(0);
  for (int const margin : {8, 40, 131}) {  // tiles are shared alike, which decides bits
    p.sm_margin = margin;
    KernelPlan const many = plan(p, card(132)).kernels.at(0);
    CHECK(many.tile == without_margin.tile);
    CHECK(many.pairs == without_margin.pairs);
    CHECK(many.blocks_of_pair == without_margin.blocks_of_pair);
  }
  auto const differs = [&](auto const& change) {
    Problem other = step(140, 41, 2, 8192);
    change(other);
    return !has_classes(other);
  };
  CHECK(differs([](Problem& q) { q.batch_invariant = true; }));
  CHECK(differs([](Problem& q) { q.num_splits = 1; }));
  CHECK(differs([](Problem& q) { q.softcap = 30.0F; }));                // its kernels need a schedule
  CHECK(differs([](Problem& q) { q.head_dim_v = q.head_dim = 256; }));  // so do those of wide heads
  CHECK(differs([](Problem& q) { q.seqused_q = true; }));        // rows of q do not tell how many queries there are
  CHECK(differs([](Problem& q) { q.total_q = 65 * q.batch; }));  // prompts
  CHECK(differs([](Problem& q) { q.total_q = 2400; }));          // more tiles of them than SMs
  CHECK(differs([](Problem& q) { q.seqlen_k = 1 << 20; }));      // a block could have to read too much
  CHECK(differs([](Problem& q) { q.batch = kMostRankedSequences + 1; }));
  CHECK(differs([](Problem& q) { q.seqlen_k = 100; }));  // one kernel is enough

  // More tiles of few queries than blocks: drawn, unless prompts take much of the card.
  p = step_of_classes(140, 41, 8, 4096);
  CHECK(has_classes(p));
  CHECK((plan(p, card(132)).listed && !plan(p, card(132)).makes_schedule));
  CHECK_FALSE(plan(p, card(132)).decode_first);
  // Prompts do not look for their work in the schedule by which decode is drawn.
  Problem few_prompts = ragged(200, 2048, 128, 64);
  few_prompts.packed_q = few_prompts.has_metadata = true;
  few_prompts.total_q = 263;
  few_prompts.keys = KeyLayout::kPaged;
  few_prompts.mask.right = 0;
  few_prompts.num_splits = 0;
  for (Problem const& drawn : {p, few_prompts}) {
    Plan const by_both = plan(drawn, card(132));
    REQUIRE(by_both.kernels.size() == 2);
    CHECK(by_both.listed);
    CHECK(by_both.kernels.front().ranked == (drawn.batch == 64));
    CHECK_FALSE(takes_schedule(by_both, by_both.kernels.front()));
    CHECK(takes_schedule(by_both, by_both.kernels.back()));
  }
  p.has_metadata = false;
  CHECK(plan(p, card(132)).makes_schedule);
  CHECK_FALSE(has_classes(step(550, 41, 8, 4096)));

  // How many blocks merge a tile of few queries does not depend on the rows that prompts have.
  p = step(300, 12, 2, 4000);
  CHECK(has_classes(p));
  CHECK(plan(p, card(132)).cluster > 1);
}

TEST_CASE("plan: few prompts and sequences of few queries share one kernel where two would be late") {
  auto const step = step_of_classes;
  // By the schedule that metadata hold, which cut each long tile by itself. No bound on queries decides.
  auto const by_schedule = [](Problem const& problem) {
    Plan const by_it = plan(problem, card(132));
    KernelPlan const& kernel = by_it.kernels.front();
    return by_it.listed && !by_it.makes_schedule && is_mixed(kernel.tile.calls) && kernel.may_split;
  };
  auto const without_metadata = [](Problem problem) {
    problem.has_metadata = false;
    return problem;
  };
  for (Problem const& late : {step(140, 33, 1, 16000), step(140, 12, 2, 4200), step(60, 5, 1, 1 << 17)}) {
    CHECK_FALSE(plan(without_metadata(late), card(132)).listed);
    for (int const bound : {60, 140, 9000}) {  // of queries
      Problem other = late;
      other.seqlen_q = bound;
      CHECK(by_schedule(other));
    }
  }
  CHECK(by_schedule(step(300, 41, 1, 8192)));  // instead of pairs of tiles
  CHECK(is_paired(plan(without_metadata(step(300, 41, 1, 8192)), card(132)).kernels.front()));
  CHECK_FALSE(by_schedule(step(140, 12, 2, 4096)));  // tiles that clusters share as well
  CHECK(by_schedule(step(140, 3, 2, 16000)));
  Problem other = step(140, 33, 1, 16000);
  other.seqused_q = true;  // of which metadata do not know
  CHECK_FALSE(has_classes(other));
  other = step(140, 33, 1, 16000);
  other.num_splits = 4;  // a bound on parts that this kernel does not have
  CHECK_FALSE(by_schedule(other));
  for (int const keys : {4096, 4224}) {
    Problem narrow = step(140, 66, 1, keys);  // head dim 64 has the same bound
    narrow.head_dim = narrow.head_dim_v = 64;
    CHECK(by_schedule(narrow) == (keys > 4096));
  }
  // Whole tiles, where these are done before a second kernel would begin.
  for (bool const metadata : {false, true}) {
    Problem short_tiles = step(206, 33, 4, 700);
    short_tiles.has_metadata = metadata;
    CHECK_FALSE(has_classes(short_tiles));
    short_tiles.seqlen_q = 9000;
    CHECK(plan(short_tiles, card(132)).kernels.size() == 1);
    CHECK_FALSE(plan(short_tiles, card(132)).listed);
  }
  CHECK(has_classes(step(206, 33, 4, 900)));  // tiles of eight blocks instead of six
}

TEST_CASE("readers_of_few: even parts of steps are asked for where some call may have the kernel that takes them") {
  auto const ctas = [](int batch, int heads_k, int head_dim) {
    Problem p = step_of_classes(140, batch, heads_k, 8192);
    p.head_dim = p.head_dim_v = head_dim;
    return readers_of_few(p, card(132)).of_parts;
  };
  CHECK(ctas(165, 4, 128) == 132);  // five rounds of tiles of few queries
  CHECK(ctas(166, 4, 128) == 0);
  CHECK(ctas(99, 4, 64) == 132);  // three
  CHECK(ctas(100, 4, 64) == 0);
  CHECK(ctas(99, 4, 256) == 132);  // three as well, of blocks of fewer keys
  CHECK(ctas(100, 4, 256) == 0);
  CHECK(ctas(33, 4, 96) == 132);  // one, since its kernel computes these as those of many
  CHECK(ctas(34, 4, 96) == 0);
  CHECK(ctas(1, 1, 256) == 132);
  // A call that makes its schedule itself knows which kernels it has.
  Problem p = step_of_classes(4000, 41, 2, 8192);
  p.has_metadata = false;
  Plan const one = plan(p, card(132));
  REQUIRE((one.makes_schedule && is_mixed(one.kernels.front().tile.calls)));
  CHECK(one.readers.of_parts == 132);
  p.num_splits = 3;
  Plan const two = plan(p, card(132));
  REQUIRE((two.makes_schedule && two.kernels.size() == 2));
  CHECK(two.readers.of_parts == 0);
}

TEST_CASE("plan: two blocks share a long tile and a short one where each tile has an SM") {
  auto const dense = [](int length, int heads, int head_dim, bool causal) {
    return plan(problem(1, length, length, heads, 1, head_dim, causal), card(132));
  };
  auto const shares = [](Plan const& made) { return is_paired(made.kernels.front()); };
  for (int const head_dim : {64, 128}) {
    CHECK(shares(dense(2048, 8, head_dim, true)));
    CHECK_FALSE(shares(dense(2048, 8, head_dim, false)));  // all tiles are as long as each other
    CHECK_FALSE(shares(dense(4096, 8, head_dim, true)));   // two rounds, whose long and short tiles balance
    CHECK_FALSE(shares(dense(256, 8, head_dim, true)));    // too short to be worth an exchange
  }
  CHECK_FALSE(shares(dense(2048, 8, 256, true)));  // no kernel
  Plan const made = dense(2048, 8, 128, true);
  CHECK(made.tiles == 128);
  CHECK(made.ctas == 132);  // the longest four tiles are alone in theirs
  CHECK(made.workspace_bytes == 0);
  CHECK(explains(made, "in clusters of 2"));

  Problem p = ragged(2048, 2048, 128, 1);
  p.heads_q = 8;
  p.heads_k = 1;
  p.packed_q = true;
  p.total_q = 2048;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  for (int const splits : {0, 1, 3}) {
    p.num_splits = splits;
    Plan const paged = plan(p, card(132));
    CHECK(shares(paged));
    CHECK_FALSE((paged.listed || paged.makes_schedule));
    CHECK(paged.packed_heads == 8);
  }
  CHECK(shares(testing::plan_with(p, card(132), {.ctas = 8})));  // as the same bits
  CHECK(testing::plan_with(p, card(132), {.ctas = 8}).ctas == 8);
  for (int const margin : {1, 60, 131}) {  // clusters take several pairs, which are the same ones
    p.sm_margin = margin;
    CHECK(shares(plan(p, card(132))));
    CHECK(plan(p, card(132)).ctas == std::max((132 - margin) / 2 * 2, 2));
  }
  p.sm_margin = 0;
  auto const takes_schedule = [&](auto const& change) {
    Problem other = p;
    change(other);
    Plan const changed = plan(other, card(132));
    return changed.listed && !shares(changed);
  };
  CHECK(takes_schedule([](Problem& q) { q.batch_invariant = true; }));
  CHECK(takes_schedule([](Problem& q) { q.batch = kMostRankedSequences + 1; }));
  CHECK(takes_schedule([](Problem& q) {  // more than a tile for each SM
    q.batch = 20;
    q.total_q = 4500;
  }));
  CHECK_FALSE(shares(plan(
      [&] {
        Problem q = p;
        q.softcap = 30.0F;
        return q;
      }(),
      card(132))));
}

TEST_CASE("plan: two blocks share tiles of several sequences, whatever lengths these have") {
  Problem p = ragged(1500, 1500, 128, 4);
  p.heads_q = 8;
  p.heads_k = 1;
  p.packed_q = true;
  p.total_q = 1900;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  for (int const splits : {0, 1, 3}) {
    p.num_splits = splits;
    Plan const made = plan(p, card(132));
    REQUIRE(made.kernels.size() == 1);
    CHECK(is_paired(made.kernels.front()));
    CHECK_FALSE((made.listed || made.makes_schedule));
    CHECK(made.tiles == (1900 + 4 * 15) / 16);  // of 16 queries, of which each sequence may leave some out
    CHECK(made.kernels.front().pairs == 66);
    CHECK(made.workspace_bytes == 0);
  }
  auto const shares = [&](auto const& change) {
    Problem other = p;
    change(other);
    return is_paired(plan(other, card(132)).kernels.front());
  };
  CHECK(shares([](Problem& q) { q.seqused_q = true; }));
  CHECK(shares([](Problem& q) { q.mask.right = kUnlimited, q.total_q = 1000; }));  // each tile has two SMs
  CHECK_FALSE(shares([](Problem& q) { q.mask.right = kUnlimited; }));              // alike, as far as is known
  CHECK_FALSE(shares([](Problem& q) { q.seqlen_k = 512; }));                       // too short to be worth an exchange
  p.num_splits = 0;
  p.total_q = 500;
  CHECK(shares([](Problem& q) { q.seqlen_k = 2048; }));
  CHECK_FALSE(shares([](Problem& q) { q.seqlen_k = 32'768; }));  // so long that chunks on all SMs are worth merging
}

TEST_CASE("plan: the fewer tiles there are, the more blocks of a cluster share each") {
  auto const blocks_of_pair = [](Problem const& p) { return plan(p, card(132)).kernels.front().blocks_of_pair; };
  Problem p = ragged(128, 8192, 128, 1);
  p.heads_q = 8;
  p.heads_k = 1;
  p.packed_q = true;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  p.num_splits = 1;
  for (auto const& [queries, blocks] : {std::pair{128, 8}, {256, 4}, {448, 4}, {512, 3}, {608, 3}, {1024, 2}}) {
    CAPTURE(queries);
    p.seqlen_q = p.total_q = queries;
    CHECK(blocks_of_pair(p) == blocks);
  }
  Problem several = p;  // of lengths that are not known
  several.batch = 4;
  several.seqlen_q = 128;
  several.seqlen_k = 2048;
  several.total_q = 512;
  CHECK(blocks_of_pair(several) == 3);
  for (int const bound : {200, 512, 5000}) {
    several.seqlen_q = bound;
    CHECK(blocks_of_pair(several) == 3);
  }
  several.total_q = 900;
  CHECK(blocks_of_pair(several) == 2);
  Plan const forced = testing::plan_with(p, card(132), {.tile = {.rows = 128, .keys = 128, .stages = 4}, .cluster = 8});
  CHECK(forced.kernels.front().blocks_of_pair == 8);
  CHECK(forced.ctas % 8 == 0);
}

TEST_CASE("plan: what tiles take is computed for as many keys as a call may have") {
  Problem p = ragged(2048, 1 << 29, 128, 1);
  p.heads_q = p.heads_k = 1;
  p.packed_q = true;
  p.total_q = 132 * 128;
  p.keys = KeyLayout::kPaged;
  p.num_splits = 1;
  CHECK_FALSE(is_paired(plan(p, card(132)).kernels.front()));  // all tiles are as long as each other
  p.total_q = 2048;
  CHECK(is_paired(plan(p, card(132)).kernels.front()));  // 16 tiles, and eight SMs for each
}

TEST_CASE("plan: whole tiles of one sequence need no schedule in up to two rounds of the grid") {
  Problem p = ragged(1024, 1024, 128, 1);
  p.packed_q = true;
  p.total_q = 1024;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  for (int const splits : {0, 1}) {
    p.num_splits = splits;
    Plan const made = plan(p, card(132));  // 32/8 heads
    CHECK_FALSE((made.listed || made.makes_schedule));
    CHECK(made.tiles == 256);
    CHECK(made.ctas == 256);  // a block for each
    CHECK(made.workspace_bytes == 0);
  }
  auto const takes_schedule = [&](auto const& change) {
    Problem other = p;
    change(other);
    return plan(other, card(132)).listed;
  };
  CHECK(takes_schedule([](Problem& q) { q.total_q = q.seqlen_q = q.seqlen_k = 4096; }));  // more rounds
  CHECK(takes_schedule([](Problem& q) { q.batch = 33; }));                                // more than lanes
  CHECK(takes_schedule([](Problem& q) { q.batch_invariant = true; }));
  CHECK(takes_schedule([](Problem& q) { q.sm_margin = 10; }));  // a block for each tile leaves no SM free
}

TEST_CASE("plan: blocks find the tiles of few sequences by themselves in up to two rounds of the grid") {
  Problem p = ragged(600, 900, 128, 4);
  p.packed_q = true;
  p.total_q = 900;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  for (int const splits : {0, 1}) {
    p.num_splits = splits;
    Plan const made = plan(p, card(132));  // 32/8 heads
    REQUIRE(made.kernels.size() == 1);
    CHECK(made.kernels.front().ranked);
    CHECK_FALSE((made.listed || made.makes_schedule));
    CHECK(made.tiles == (900 + 4 * 31) / 32 * 8);
    CHECK(made.ctas == 132);
    CHECK(made.workspace_bytes == 0);
    CHECK(explains(made, "4 sequences, ranked by the blocks themselves"));
  }
  auto const is_ranked = [&](auto const& change) {
    Problem other = p;
    change(other);
    return plan(other, card(132)).kernels.front().ranked;
  };
  CHECK(is_ranked([](Problem& q) { q.seqused_q = true; }));
  CHECK(is_ranked([](Problem& q) { q.total_q = 930; }));
  CHECK_FALSE(is_ranked([](Problem& q) { q.total_q = 1000; }));  // more rounds
  CHECK_FALSE(is_ranked([](Problem& q) { q.batch = 33; }));
  CHECK_FALSE(is_ranked([](Problem& q) { q.head_dim = q.head_dim_v = 256; }));  // no registers for it
  CHECK_FALSE(is_ranked([](Problem& q) { q.batch_invariant = true; }));
  CHECK_FALSE(is_ranked([](Problem& q) { q.softcap = 30.0F; }));
}

// 16 sequences of 8 queries, of which one may have 25k keys and the others 3k, took 282 us whole.
TEST_CASE("plan: sequences of as many queries may be cut where one of them may have many more keys than the others") {
  Problem p = ragged(8, 25'000, 128, 16);
  p.heads_q = 96;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  p.num_splits = 0;
  auto const is_cut = [](Problem const& problem) {
    Plan const made = plan(problem, card(132));
    REQUIRE(made.kernels.size() == 1);
    return made.listed && made.kernels.front().may_split;
  };
  CHECK(is_cut(p));
  Problem other = p;
  other.num_splits = 1;
  CHECK_FALSE(is_cut(other));
  other = p;
  other.seqlen_k = 4000;  // no longer than merging takes
  CHECK_FALSE(is_cut(other));
}

TEST_CASE(
    "plan: a single query on many keys is never left to a whole tile for many queries, unless that is asked for") {
  for (int const batch : {2, 5, 20}) {
    for (int total_q = 300; total_q < 4500; total_q += 67) {
      for (int const heads_k : {1, 2, 8}) {
        Problem p = ragged(2087, 100'000, 128, batch);
        p.heads_q = 8;
        p.heads_k = heads_k;
        p.packed_q = true;
        p.total_q = total_q;
        p.keys = KeyLayout::kPaged;
        p.mask.right = 0;
        p.num_splits = 0;
        CAPTURE(batch);
        CAPTURE(total_q);
        CAPTURE(heads_k);
        if (total_q >= batch * p.seqlen_q) { continue; }  // there are no such queries
        // Or a kernel for both, which computes it as one for few does.
        Plan const made = plan(p, card(132));
        KernelPlan const& first = made.kernels.front();
        CHECK((made.kernels.size() == 2 || (is_mixed(first.tile.calls) && first.may_split)));
      }
    }
  }
}

TEST_CASE("plan: one kernel for prompts and single queries, where tiles are few, and two where they are many") {
  Problem p = ragged(300, 131'072, 128, 16);
  p.heads_q = 32;
  p.heads_k = 8;
  p.keys = KeyLayout::kPaged;
  p.packed_q = true;
  p.total_q = 332;
  p.num_splits = 0;
  auto const is_mixed = [&](auto const& change, testing::ForcedPlan const& forced = {}) {
    Problem other = p;
    change(other);
    Plan const made = testing::plan_with(other, card(132), forced);
    CAPTURE(made.explain());
    bool const mixed = hopper_attention::is_mixed(made.kernels.front().tile.calls);
    CHECK(mixed == (made.kernels.size() == 1 && explains(made, "as those for few queries do")));
    return mixed;
  };
  CHECK(is_mixed([](Problem&) {}));  // 128 tiles of few queries, of 132 SMs, and 80 of prompts
  auto const beside = [](int batch, int queries, int heads_k) {  // a head has a tile of 32 queries
    return [=](Problem& q) {
      q.batch = batch;
      q.total_q = batch + queries;
      q.heads_q = 4 * heads_k;
      q.heads_k = heads_k;
    };
  };
  for (int const head_dim : {64, 128}) {  // metadata are made for either
    TileConfig many = find_tile(head_dim, head_dim, TileUse::kMixedMany)->tile;
    many.calls = Calls::kMixed;
    CHECK(many == find_tile(head_dim, head_dim, TileUse::kMixed)->tile);
  }
  CHECK(is_mixed(beside(82, 32, 8)));  // five rounds of few
  CHECK_FALSE(is_mixed(beside(83, 32, 8)));
  CHECK(is_mixed([](Problem& q) { q.total_q = 16 + 49 * 32; }));
  CHECK_FALSE(is_mixed([](Problem& q) { q.total_q = 17 + 49 * 32; }));  // 400 tiles in more than three rounds
  // Two blocks of decode share an SM: three quarters of a round of many, and three of few.
  auto const of_64 = [](int batch, int queries) {
    return [=](Problem& q) {
      q.head_dim = q.head_dim_v = 64;
      q.batch = batch;
      q.total_q = batch + queries;
    };
  };
  CHECK(is_mixed(of_64(49, 12 * 32)));
  CHECK_FALSE(is_mixed(of_64(50, 12 * 32)));
  CHECK_FALSE(is_mixed(of_64(16, 12 * 32 + 1)));
  CHECK(is_mixed([](Problem& q) { q.seqlen_q = 2000; }));  // no bound changes it
  CHECK(is_mixed([](Problem& q) { q.sm_margin = 40; }));   // nor a margin
  CHECK_FALSE(is_mixed([](Problem& q) { q.num_splits = 3; }));
  CHECK_FALSE(is_mixed([](Problem& q) { q.num_splits = 1; }));
  auto const one = [](int queries, int keys) {  // a head has tiles of 32 queries
    return [=](Problem& q) {
      q.batch = 1;
      q.total_q = queries;
      q.seqlen_k = keys;
    };
  };
  CHECK(is_mixed(one(10 * 32, 131'072)));
  CHECK_FALSE(is_mixed(one(16 * 32 + 1, 131'072)));  // a second round
  CHECK_FALSE(is_mixed(one(10 * 32, 4'096)));  // tiles that may be whole have those of 192 rows, without a schedule
  CHECK_FALSE(is_mixed([](Problem& q) { q.batch_invariant = true; }));
  CHECK_FALSE(is_mixed([](Problem& q) { q.softcap = 30.0F; }));
  // Drafts of a cache call on few keys are short prompts, of which none has few queries; not if lengths of q may
  // differ.
  auto const drafts = [](int heads_q, int heads_k, bool seqused_q) {
    return [=](Problem& q) {
      q.batch = 200;
      q.seqlen_q = 8;
      q.seqlen_k = 215;
      q.packed_q = false;
      q.total_q = 0;
      q.seqused_q = seqused_q;
      q.heads_q = heads_q;
      q.heads_k = heads_k;
    };
  };
  CHECK_FALSE(is_mixed(drafts(8, 1, false)));
  CHECK(is_mixed(drafts(8, 1, true)));
  CHECK_FALSE(is_mixed(drafts(12, 1, false)));  // one tile each, which follow from their index
  CHECK_FALSE(is_mixed([](Problem& q) { q.head_dim = q.head_dim_v = 96; }));  // no such tile
  CHECK_FALSE(is_mixed([](Problem& q) { q.head_dim = 192; }));
  auto const of_wide = [](int head_dim, int batch, int queries) {
    return [=](Problem& q) {
      q.head_dim = q.head_dim_v = head_dim;
      q.batch = batch;
      q.total_q = batch + queries;
    };
  };
  for (int const head_dim : {192, 256}) {
    CHECK(is_mixed(of_wide(head_dim, 49, 49 * 32)));  // three rounds of each
    CHECK_FALSE(is_mixed(of_wide(head_dim, 50, 49 * 32)));
    CHECK_FALSE(is_mixed(of_wide(head_dim, 49, 49 * 32 + 1)));
  }
  CHECK_FALSE(is_mixed([](Problem&) {}, {.num_splits = 2}));

  auto const may_cut = [&](int keys, int left) {
    Problem other = p;
    other.heads_q = 4;
    other.heads_k = 1;
    other.batch = 130;
    other.total_q = 130 + 64 * 130;  // so many for each that no class has kernels of its own
    other.seqlen_k = keys;
    other.mask.left = left;
    other.mask.right = 0;
    Plan const made = plan(other, card(132));
    REQUIRE(hopper_attention::is_mixed(made.kernels.front().tile.calls));
    return made.kernels.front().may_split;
  };
  CHECK(may_cut(16 * 80 + 1, kUnlimited));
  CHECK_FALSE(may_cut(16 * 80, kUnlimited));  // of a tile so short no part is worth merging
  CHECK_FALSE(may_cut(100'000, 1000));        // whatever the window leaves out
}

TEST_CASE("plan: no further kernels where few sequences can have few queries, on few keys") {
  auto const kernels = [](int batch, int total_q, int keys) {
    Problem p = ragged(1000, keys, 128, batch);
    p.packed_q = true;
    p.total_q = total_q;
    p.keys = KeyLayout::kPaged;
    p.mask.right = 0;
    p.num_splits = 0;
    return plan(p, card(132)).kernels.size();
  };
  CHECK(kernels(8, 3433, 1000) == 1);
  CHECK(kernels(8, 1999, 30'000) == 2);  // a decode kernel reads long ones faster
  CHECK(kernels(8, 2000, 30'000) == 1);  // of which there are few, if most sequences have many queries
  CHECK(kernels(60, 3433, 1000) == 2);   // up to 57 sequences of one query
  CHECK(kernels(60, 57'000, 1000) == 1);
}

TEST_CASE(
    "plan: one kernel where most sequences seem to be prompts, and the kernel for many where it takes few along") {
  Problem p = ragged(900, 131'072, 192, 8);
  p.head_dim_v = 128;  // without a kernel for both classes, as head dim 96
  p.heads_q = 16;
  p.heads_k = 8;
  p.keys = KeyLayout::kPaged;
  p.mask.right = 0;
  p.packed_q = true;
  p.total_q = 2827;
  p.num_splits = 0;
  auto const changed = [&](auto const& change, testing::ForcedPlan const& forced = {}) {
    Problem other = p;
    change(other);
    return testing::plan_with(other, card(132), forced);
  };
  auto const is_one = [&](auto const& change) {
    Plan const made = changed(change);
    CAPTURE(made.explain());
    CHECK(made.for_both == (made.kernels.size() == 1));
    CHECK(made.for_both ==
          (explains(made, "most sequences seem to have") || explains(made, "are few, or for so many")));
    CHECK((!made.for_both || made.kernels.front().may_split));
    return made.for_both;
  };
  auto const none = [](Problem&) {};
  CHECK(is_one(none));
  CHECK(changed(none).kernels.front().tile == find_tile(192, 128, TileUse::kRagged)->tile);
  CHECK(explains(changed(none), "in even parts"));
  CHECK(is_one([](Problem& q) { q.head_dim = q.head_dim_v = 96; }));
  // Those for both classes are for fewer tiles; that for many has chunks of equal work.
  auto const of_128 = [](Problem& q) {
    q.head_dim = q.head_dim_v = 128;
    q.heads_q = 32;
  };
  CHECK(is_one(of_128));
  CHECK(changed(of_128).kernels.front().tile == find_tile(128, 128, TileUse::kRagged)->tile);
  CHECK_FALSE(explains(changed(of_128), "in even parts"));
  Plan const capped = changed([](Problem& q) { q.softcap = 30.0F; });
  CHECK((capped.for_both && capped.kernels.front().tile == find_tile(192, 128, TileUse::kCapped)->tile));
  CHECK(is_one([](Problem& q) { q.total_q = 8 * 900 / 4; }));
  CHECK_FALSE(is_one([](Problem& q) { q.total_q = 8 * 900 / 4 - 1; }));
  auto const drafts = [](int queries) {  // of 60 sequences, of 8 heads each, which a tile for few queries holds
    return [=](Problem& q) {
      q.heads_q = 64;
      q.batch = 60;
      q.seqlen_q = 16;
      q.total_q = queries;
    };
  };
  CHECK_FALSE(is_one(drafts(60 * 8)));
  CHECK(is_one(drafts(60 * 8 + 1)));
  auto const of_rows = [](int rows) {  // of q of a head group, two of them for each query
    return [=](Problem& q) {
      q.total_q = rows / 2;
      q.seqlen_q = rows / 4;
    };
  };
  CHECK(is_one(of_rows(6 * 132 * 128 / 8)));  // six rounds
  CHECK_FALSE(is_one(of_rows(6 * 132 * 128 / 8 + 2)));
  CHECK_FALSE(is_one([](Problem& q) { q.seqused_q = true; }));  // rows may count for none
  CHECK_FALSE(is_one([](Problem& q) { q.num_splits = 3; }));
  CHECK(changed([](Problem& q) { q.batch_invariant = true; }).kernels.size() > 1);
  CHECK(changed(none, {.num_splits = 2}).kernels.size() > 1);

  // Few of both, whatever there may be most of.
  auto const beside = [](int batch, int prompts) {
    return [=](Problem& q) {
      q.heads_q = 8;
      q.heads_k = 1;
      q.batch = batch;
      q.total_q = batch + prompts;
      q.seqlen_q = 100'000;
    };
  };
  CHECK(is_one(beside(39, 66 * 16)));  // three tenths of a round of tiles of few queries, half a one of 16 queries each
  CHECK_FALSE(is_one(beside(40, 66 * 16)));
  CHECK_FALSE(is_one(beside(39, 66 * 16 + 1)));
}

TEST_CASE("plan: more units than can be counted are not cut") {
  // 349,526 tiles of up to 13,108 units are more than int32 holds; as a negative number they would leave the grid idle.
  SequenceWork const work{349'526, 13'108, 1};
  CHECK(work.sum() > kMaxTiles);
  Problem known = ragged(1 << 20, 1 << 20, 128, 1);
  known.heads_q = 64;
  known.heads_k = 1;
  known.mask.right = 0;
  known.packed_q = known.keys_known = true;
  known.total_q = 1 << 20;
  known.keys = KeyLayout::kVarlen;
  known.num_splits = 0;
  Plan const made = plan(known, card(132));
  CHECK_FALSE(made.kernels.front().may_split);
}

TEST_CASE("PlanRequest: a bound on the keys of a tile holds for all of its sequences, and heeds a window") {
  std::mt19937 random(6);
  auto const pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 20'000; ++i) {
    Problem problem{.seqlen_q = pick(1, 40), .seqlen_k = pick(1, 400)};
    problem.mask = {.left = pick(-1, 200), .right = pick(-1, 200)};
    int const queries = pick(1, problem.seqlen_q);
    DeviceInfo const device;
    testing::ForcedPlan const forced;
    std::int64_t const most = PlanRequest{problem, device, forced}.most_keys_of_queries(queries);
    SeqlenQK const len{pick(queries, problem.seqlen_q), pick(0, problem.seqlen_k)};
    int const first = pick(0, len.q - queries);
    int const begin = visible(problem.mask, first, len).begin;
    int const end = visible(problem.mask, first + queries - 1, len).end;
    REQUIRE(end - begin <= most);
    REQUIRE(most <= problem.seqlen_k);
    if (problem.mask.left >= 0 && problem.mask.right >= 0) {
      REQUIRE(most <= problem.mask.left + problem.mask.right + queries);
    }
  }
}

TEST_CASE("plan: the schedule decides on clusters where the bound is long") {
  auto const made = [](int batch, int heads_k, int seqlen_k) {
    Problem p = ragged(1, seqlen_k, 128, batch);
    p.heads_q = 8;
    p.heads_k = heads_k;
    p.num_splits = 0;
    return plan(p, card(132));
  };
  CHECK(made(16, 1, 131'072).cluster_if_alike == 4);
  CHECK(made(64, 1, 131'072).cluster_if_alike == 1);
  CHECK(made(16, 1, 2'000'000).cluster_if_alike == 4);  // however long
  CHECK(made(200, 1, 131'072).draws_if_whole);
  CHECK(made(16, 1, 1000).cluster > 0);  // short enough for clusters without asking
  CHECK(made(16, 1, 1000).cluster_if_alike == 0);
}

TEST_CASE("plan: tiles of some rows whose keys are gathered have a second block, if they may be long") {
  auto const made = [](int queries, int page_size, int seqlen_k) {
    Problem p = ragged(queries, seqlen_k, 128, 64);
    p.heads_q = 8;
    p.heads_k = 1;
    p.num_splits = 0;
    p.has_metadata = true;
    p.keys = KeyLayout::kPaged;
    p.page_size = page_size;
    Plan const chosen = plan(p, card(132));
    return max_of(chosen.cluster, chosen.cluster_if_alike);  // short ones need no schedule
  };
  CHECK(made(4, 1, 131'072) == 2);
  CHECK(made(4, 4, 131'072) == 2);
  CHECK(made(4, 16, 131'072) == 1);  // boxes: 64 blocks read as fast as all
  CHECK(made(1, 1, 131'072) == 1);   // nearly
  CHECK(made(8, 1, 131'072) == 1);   // 64 rows, which were not measured
  CHECK(made(4, 1, 12 * 128) == 2);
  CHECK(made(4, 1, 11 * 128) == 1);
}

TEST_CASE(
    "plan: tiles follow from their index where none has many keys and each sequence has one, or all are prompts") {
  auto const cache = [](int queries, int keys) {
    Problem p = ragged(queries, keys, 128, 200);
    p.heads_q = 8;
    p.heads_k = 1;
    p.num_splits = 0;
    p.has_metadata = true;
    p.mask.right = 0;
    return p;
  };
  auto const packed = [&](int queries, int keys) {
    Problem p = cache(queries, keys);
    p.packed_q = true;
    p.total_q = p.batch * queries;
    p.keys = KeyLayout::kPaged;
    p.page_size = 16;
    return p;
  };
  auto const by_index = [](Problem const& p) {
    Plan const made = plan(p, card(132));
    CAPTURE(made.explain());
    bool const yes = explains(made, "hardly counts");
    CHECK(yes == !made.listed);
    if (yes) {
      CHECK(made.kernels.size() == 1);
      int const of_sequence = ceil_div(p.seqlen_q, made.kernels.front().tile.rows / made.packed_heads);
      CHECK(made.tiles == std::int64_t{p.batch} * of_sequence * p.heads_q / made.packed_heads);
      CHECK(made.workspace_bytes == 0);
      Problem without = p;
      without.has_metadata = false;
      CHECK_FALSE(plan(without, card(132)).makes_schedule);
    }
    return yes;
  };
  for (int const queries : {6, 8, 12, 16}) {
    CAPTURE(queries);
    CHECK(by_index(cache(queries, 1024)));
    CHECK(by_index(packed(queries, 1024)));
    CHECK_FALSE(by_index(cache(queries, 1025)));
    // The tile is that of other lengths.
    Problem other = packed(queries, 1024);
    Plan const made = plan(other, card(132));
    ++other.total_q;
    other.num_splits = 1;
    CHECK(plan(other, card(132)).kernels.front().tile == made.kernels.front().tile);
  }
  CHECK_FALSE(by_index(packed(25, 1024)));  // 200 rows, two tiles of a sequence
  CHECK(by_index(packed(768, 1024)));       // prompts, about as long as each other
  CHECK_FALSE(by_index(packed(767, 1024)));
  CHECK_FALSE(by_index(packed(800, 1025)));
  Problem full = packed(768, 1024);  // of any keys
  full.mask.right = kUnlimited;
  CHECK_FALSE(by_index(full));
  // More heads than a slab has rows: some of them share a tile, which only a schedule has, and in a window a tile of
  // one block holds no others.
  for (int const left : {kUnlimited, 127}) {
    CAPTURE(left);
    Problem many_heads = cache(2, 900);
    many_heads.head_dim = many_heads.head_dim_v = 64;
    many_heads.heads_q = 128;
    many_heads.mask.left = left;
    CHECK_FALSE(by_index(many_heads));
    many_heads.packed_q = many_heads.keys_known = true;
    many_heads.total_q = 2 * many_heads.batch;
    many_heads.keys = KeyLayout::kVarlen;
    many_heads.num_splits = 1;
    CHECK(plan(many_heads, card(132)).listed == (left == 127));
  }
  Problem in_window = packed(8, 100'000);
  in_window.mask.left = 500;
  CHECK(by_index(in_window));
  for (Change const& c : kWantSchedule) {
    CAPTURE(c.why);
    Problem p = packed(8, 1000);
    c.apply(p);
    CHECK_FALSE(by_index(p));
  }
}

TEST_CASE("plan: tiles follow from their index where no sequence has more than two blocks of keys") {
  auto const packed = [](int keys) {
    Problem p = ragged(keys, keys, 128, 200);
    p.num_splits = 1;
    p.packed_q = true;
    p.total_q = std::int64_t{p.batch} * keys / 2;
    p.keys = KeyLayout::kVarlen;
    return p;
  };
  auto const by_index = [](Problem const& p) {
    Plan const made = plan(p, card(132));
    CAPTURE(made.explain());
    bool const yes = explains(made, "hardly counts");
    CHECK_FALSE((yes && (made.listed || made.makes_schedule)));
    // What others have, too.
    if (yes) { CHECK(made.packed_heads == scheduled_packing(p.heads_q, p.heads_k)); }
    return yes;
  };
  int const keys = plan(packed(100), card(132)).kernels.front().tile.keys;
  for (int const right : {0, kUnlimited}) {
    for (bool const is_paged : {false, true}) {
      Problem p = packed(2 * keys);
      p.mask.right = right;
      p.keys = is_paged ? KeyLayout::kPaged : KeyLayout::kVarlen;
      p.has_metadata = is_paged;
      CHECK(by_index(p));
      p.num_splits = 0;
      CHECK(by_index(p));
      ++p.seqlen_k;
      CHECK_FALSE(by_index(p));
    }
  }
  struct {
    char const* why;
    bool yes;
    void (*apply)(Problem&);
  } const changes[] = {
      {"nothing", true, [](Problem&) {}},
      {"a cache call", true, [](Problem& p) { p.packed_q = false; }},
      {"parts of fixed size", false, [](Problem& p) { p.batch_invariant = true; }},
      {"rows that do not count", false, [](Problem& p) { p.seqused_q = true; }},
      {"most tiles would not exist", false, [](Problem& p) { p.seqlen_q = static_cast<int>(p.total_q); }},
      {"a quarter of the bound in the mean", true,
       [](Problem& p) { std::tie(p.num_splits, p.total_q) = std::pair(0, p.batch * 25); }},
      {"less, so that most may have few queries", false,
       [](Problem& p) { std::tie(p.num_splits, p.total_q) = std::pair(0, p.batch * 25 - 1); }},
      {"less, where all are in one class", true, [](Problem& p) { p.total_q = p.batch * 25 - 1; }},
      {"blocks rank the tiles of two rounds", false,
       [](Problem& p) { std::tie(p.batch, p.total_q) = std::pair(8, 400); }},
      {"one round", true, [](Problem& p) { std::tie(p.batch, p.total_q) = std::pair(3, 150); }},
      {"another tile where few queries are in the same kernel", false,
       [](Problem& p) {
         std::tie(p.batch, p.heads_q, p.heads_k) = std::tuple(100, 8, 1);
         std::tie(p.num_splits, p.total_q, p.keys) = std::tuple(0, 5628, KeyLayout::kPaged);
       }},
  };
  for (auto const& change : changes) {
    CAPTURE(std::string(change.why));
    Problem p = packed(100);
    p.mask.right = 0;
    change.apply(p);
    CHECK(by_index(p) == change.yes);
  }
}

TEST_CASE("plan: where each sequence has one tile, a tile of fewer rows is no more than those that metadata count") {
  for (bool const is_packed : {false, true}) {
    Problem p = ragged(8, 215, 128, 200);  // 64 rows
    p.heads_q = 8;
    p.heads_k = 1;
    p.num_splits = 1;
    p.packed_q = is_packed;
    p.seqused_q = true;  // so that a schedule finds out which have queries
    p.total_q = is_packed ? 200 * 8 : 0;
    Plan const made = plan(p, card(132));
    CAPTURE(made.explain());
    REQUIRE(made.listed);
    KernelPlan const& kernel = made.kernels.front();
    REQUIRE(kernel.tile.rows == 128);
    CHECK(kernel.most_tiles >= 2 * 200);  // metadata of a cache call may be made for twice as many queries
    CHECK_FALSE(schedule_params(made, kernel, p).resized.on());
    ++p.seqlen_q;
    CHECK(schedule_params(made, kernel, p).resized.on() == is_packed);  // a bound that may be too small
    p.seqlen_q = 17;
    CHECK(schedule_params(made, kernel, p).resized.on());
  }
}

TEST_CASE("plan: a schedule's clusters of 16, a GPC each, are an even number, but no fewer than tiles") {
  auto const made = [](int batch) {
    Problem p = ragged(1, 131'072, 128, batch);
    p.heads_q = 8;
    p.heads_k = 1;
    p.num_splits = 0;
    p.has_metadata = true;
    return plan(p, card(132));
  };
  auto const grid = [&](int batch) {
    return std::pair(made(batch).cluster_if_alike, made(batch).kernels.front().ctas);
  };
  CHECK(grid(5) == std::pair(16, 96));
  CHECK(grid(6) == std::pair(16, 96));
  CHECK(grid(7) == std::pair(16, 112));  // seven run at once
  CHECK(grid(8) == std::pair(8, 112));   // of which two share a GPC
}

TEST_CASE("plan: a few long tiles are shared by several clusters, whose results the combine kernel merges") {
  auto const made = [](int batch, int seqlen_k, int num_splits, bool has_metadata = false) {
    Problem p = ragged(1, seqlen_k, 128, batch);
    p.heads_q = 8;
    p.heads_k = 1;
    p.num_splits = num_splits;
    p.has_metadata = has_metadata;
    return plan(p, card(132));
  };
  auto const several = [](Plan const& p) { return std::pair(p.cluster, clusters_of_tile(p.kernels.front())); };
  CHECK(several(made(1, 131072, 0)) == std::pair(8, 14));
  CHECK(several(made(2, 131072, 0)) == std::pair(8, 7));
  CHECK(several(made(3, 131072, 0)) == std::pair(8, 4));
  CHECK(several(made(4, 65536, 0)) == std::pair(4, 7));  // of four clusters of 16 three may lie in one half of the card
  CHECK(several(made(5, 65536, 0)) == std::pair(16, 1));  // of five not
  CHECK(several(made(7, 131072, 0, true)).first == 0);    // 4 MB for a block of 8x2, should one be longer than others
  CHECK(several(made(8, 16384, 0)) == std::pair(8, 1));   // a cluster for each GPC
  CHECK(several(made(10, 32768, 0)) == std::pair(4, 2));  // ten of 8 lie unevenly
  CHECK(several(made(1, 8192, 0)) == std::pair(16, 1));   // too short to be merged twice
  CHECK(several(made(1, 16384, 0)) == std::pair(4, 28));
  CHECK(several(made(1, 131072, 40)) == std::pair(8, 5));
  CHECK(several(made(1, 131072, 20)) == std::pair(4, 5));
  CHECK(made(4, 1 << 20, 0).cluster == 0);  // so long that it counts whether lengths differ
  Plan const one = made(1, 131072, 0);
  CHECK(one.ctas == 112);
  CHECK(one.kernels.front().partial_slots == 14);
  CHECK(one.kernels.front().partial_rows == 8);
  CHECK(one.workspace_bytes >= 14 * 8 * (128 + 1) * 4);
  CHECK(one.starts_early);
}

TEST_CASE("us_of_tiles: within an eighth of what an H200 took, and better shares stay better") {
  struct Measured {
    int tiles;
    int keys;
    TileShare share;
    double us;
    int head_dim = 128;
  };
  DeviceInfo const device = card(132);
  testing::ForcedPlan const forced;
  auto const model = [&](Measured const& m) {
    Problem p = ragged(1, m.keys, m.head_dim, 1);
    p.heads_q = 8 * m.tiles;
    p.heads_k = m.tiles;
    PlanRequest const request{p, device, forced};
    TileConfig const tile = request.tile_row(request.decode_use()).tile;
    return us_of_tiles(request, tile, m.share, ceil_div(m.keys, tile.keys));
  };
  constexpr int kKeys = 1024;
  for (auto const& [slower, faster] : {
           std::pair{Measured{1, 16 * kKeys, {16, 1}, 12.1}, Measured{1, 16 * kKeys, {4, 28}, 9.8}},
           std::pair{Measured{2, 64 * kKeys, {2, 33}, 24.7}, Measured{2, 64 * kKeys, {8, 7}, 23.1}},
           std::pair{Measured{4, 64 * kKeys, {16, 1}, 47.9}, Measured{4, 64 * kKeys, {4, 7}, 39.1}},
           std::pair{Measured{4, 128 * kKeys, {16, 1}, 89.8}, Measured{4, 128 * kKeys, {2, 16}, 68.2}},
           std::pair{Measured{6, 64 * kKeys, {4, 4}, 57.7}, Measured{6, 64 * kKeys, {16, 1}, 51.5}},
           std::pair{Measured{7, 128 * kKeys, {16, 1}, 122.3}, Measured{7, 128 * kKeys, {8, 2}, 111.5}},
           std::pair{Measured{8, 64 * kKeys, {4, 3}, 74.8}, Measured{8, 64 * kKeys, {8, 1}, 65.7}},
           std::pair{Measured{10, 64 * kKeys, {8, 1}, 90.4}, Measured{10, 64 * kKeys, {4, 2}, 85.0}},
           std::pair{Measured{11, 128 * kKeys, {8, 1}, 196.9}, Measured{11, 128 * kKeys, {4, 2}, 169.4}},
           std::pair{Measured{12, 128 * kKeys, {8, 1}, 203.9}, Measured{12, 128 * kKeys, {2, 5}, 193.3}},
           std::pair{Measured{24, 32 * kKeys, {2, 2}, 117.8}, Measured{24, 32 * kKeys, {4, 1}, 109.4}},
           std::pair{Measured{4, 64 * kKeys, {16, 1}, 29.5, 64}, Measured{4, 64 * kKeys, {4, 7}, 22.8, 64}},
           std::pair{Measured{8, 128 * kKeys, {16, 1}, 80.1, 64}, Measured{8, 128 * kKeys, {2, 8}, 71.8, 64}},
           std::pair{Measured{6, 128 * kKeys, {4, 4}, 212.8, 256}, Measured{6, 128 * kKeys, {2, 11}, 192.8, 256}},
       }) {
    CAPTURE(slower.tiles);
    CAPTURE(slower.keys);
    CAPTURE(slower.head_dim);
    CHECK(model(slower) == doctest::Approx(slower.us).epsilon(0.125));
    CHECK(model(faster) == doctest::Approx(faster.us).epsilon(0.125));
    CHECK(model(faster) < model(slower));
  }
}

TEST_CASE("plan: 33 to 64 rows have clusters of up to 8 blocks, which a schedule takes where bounds do not tell") {
  for (int const head_dim : {64, 96, 128, 192, 256}) {
    CAPTURE(head_dim);
    bool const merges = head_dim <= 192;  // of wider heads no more than 32 rows have room
    Problem p = ragged(8, 1'000'000, head_dim, 3);
    p.heads_q = 8;
    p.heads_k = 1;
    p.num_splits = 0;
    Plan const by_schedule = plan(p, card(132));
    CHECK(by_schedule.tile.rows == 64);
    CHECK(by_schedule.cluster_if_alike == (merges ? 8 : 1));
    p.seqlen_k = 3000;
    Plan const known = testing::plan_with(p, card(132), {.one_tile = true});
    CHECK(known.tile.rows == 64);
    CHECK(known.cluster == (merges ? 8 : 0));
    CHECK(packing_of(known, known.kernels.front()).queries_per_slab == 8);
  }
}

TEST_CASE("plan: explain tells why a tile is shared by so many blocks, or by none") {
  auto const made = [](int batch, int seqlen_k, int num_splits, int heads_q = 8, int heads_k = 1) {
    Problem p = ragged(1, seqlen_k, 128, batch);
    p.heads_q = heads_q;
    p.heads_k = heads_k;
    p.num_splits = num_splits;
    return plan(p, card(132));
  };
  CHECK(explains(made(1, 32768, 0), "those of clusters: more would not all run at once"));
  CHECK(explains(made(1, 131072, 40), "those of clusters: num_splits allows no more"));
  CHECK(explains(made(1, 8192, 0), "shared memory: no larger cluster runs on this card"));
  CHECK(explains(made(1, 8192, 3), "shared memory: num_splits allows no more"));
  CHECK(explains(made(16, 1024, 0), "shared memory: enough SMs read to be nearly as fast as all"));
  CHECK(explains(made(1, 100, 0), "1: more blocks would have no keys"));
  CHECK(explains(made(1, 8192, 1), "1: as asked"));
  CHECK(explains(made(64, 1024, 0, 32, 8), "1: there are more tiles than blocks"));
  Problem widest = ragged(1, 100, 256, 4);  // with 64 rows, on so few keys that nothing is cut
  widest.heads_q = 1024;
  widest.heads_k = 16;
  widest.num_splits = 0;
  CHECK(explains(plan(widest, card(132)), "1: a sequence has more query rows than the 32 that blocks can merge"));
  Problem whole = ragged(512, 16384, 128, 16);
  whole.num_splits = 0;
  CHECK(explains(plan(whole, card(132)), "1: whole tiles keep the blocks busy"));
  Problem one_split = ragged(1, 4096, 128, 4);
  one_split.batch_invariant = true;
  one_split.num_splits = 0;
  CHECK(explains(plan(one_split, card(132)), "1: no sequence has more than the 4096 keys of one part"));
}

TEST_CASE("plan: with batch invariance, metadata serve packed queries that all count, on one rank") {
  Problem p = ragged(1, 200'000, 128, 4);  // too many parts for clusters
  p.has_metadata = p.batch_invariant = true;
  for (bool const packed : {false, true}) {
    for (bool const seqused : {false, true}) {
      for (int const ranks : {1, 2}) {
        p.packed_q = packed;
        p.seqused_q = seqused;
        p.total_q = 4;
        p.mask.cp_world = ranks;
        CAPTURE(packed);
        CAPTURE(seqused);
        CAPTURE(ranks);
        Plan const made = plan(p, card(132));
        CHECK(made.makes_schedule == !(packed && !seqused && ranks == 1));
        CHECK((made.workspace_bytes > 0 && made.fixed_splits));
        Problem other = p;
        other.batch_invariant = false;
        CHECK_FALSE(plan(other, card(132)).makes_schedule);
      }
    }
  }
}

TEST_CASE(
    "plan: batch invariance has splits of fixed size, of which one is a whole tile, and a tile for up to 16 rows") {
  int mixed = 0;
  int in_clusters = 0;
  for (Problem p : decode_problems()) {
    for (bool const packed_q : {false, true}) {
      if (packed_q && !p.ragged) { continue; }
      p.batch_invariant = true;
      p.packed_q = packed_q;
      p.total_q = std::int64_t{p.batch} * p.seqlen_q;
      Plan const made = plan(p, card(132));
      TileConfig const& few = find_tile(p.head_dim, p.head_dim_v, TileUse::kFewRowsInParts)->tile;
      TileConfig const& many = find_tile(p.head_dim, p.head_dim_v, TileUse::kDecode)->tile;
      bool const known = few.head_dim == many.head_dim;
      int const rows = p.seqlen_q * (p.heads_q / p.heads_k);
      bool const two = known && packed_q && rows > 16;  // sequences may have fewer queries than the bound
      bool const whole = p.seqlen_k <= 4096 && rows <= 64;
      mixed += two;
      CAPTURE(made.explain());
      bool const in_parts = made.cluster > 1;  // a block for each part of a tile, or each group of parts
      in_clusters += in_parts;
      if (in_parts) {
        int const parts = fixed_parts(ceil_div(p.seqlen_k, few.keys), 4096 / few.keys);
        CHECK((!whole && !two && known && rows <= 16 && !made.listed));
        CHECK((made.cluster <= 16 && made.cluster * p.batch * p.heads_k <= 132 * few.per_sm));
        CHECK((made.cluster >= parts || kPartsOfGroup * made.cluster >= parts));
        CHECK(made.workspace_bytes == 0);
      } else {
        CHECK(made.cluster == (whole && !two ? 1 : 0));
      }
      CHECK(made.fixed_splits);
      CHECK((made.listed || whole || in_parts));
      CHECK(((!whole && !in_parts) || !made.kernels.front().may_split));
      std::size_t decode_kernels = 0;
      for (KernelPlan const& kernel : made.kernels) {
        if (kernel.family == KernelFamily::kPrefill) { continue; }
        ++decode_kernels;
        bool const of_few = known && (rows <= 16 || kernel.shares_parts);
        CHECK(kernel.tile == (of_few ? few : many));
        int const most_few = 16 / (p.heads_q / p.heads_k);
        CHECK(kernel.least_queries == (two && !of_few ? most_few + 1 : 0));
        CHECK((kernel.most_queries == most_few) == (two && of_few));
      }
      CHECK(decode_kernels == (two ? 2 : rows <= 64 || p.ragged ? 1 : 0));
      CHECK((!two || made.kernels.back().least_queries > 0));  // the one whose slots both use
    }
  }
  CHECK(mixed > 100);
  CHECK(in_clusters > 100);
}

TEST_CASE("plan: with batch invariance, clusters hold the parts of any sequence, also where the longest sees little") {
  struct Case {
    int chunk, seqlen_k, batch;
  };
  for (Case const& c : {Case{16'384, 16'485, 1}, {16'384, 16'484, 12}, {8192, 12'000, 1}, {262'144, 267'144, 1}}) {
    Problem p = ragged(1, c.seqlen_k, 128, c.batch);
    p.batch_invariant = true;
    p.mask.chunk = c.chunk;
    Plan const made = plan(p, card(132));
    CAPTURE(made.explain());
    int const parts = fixed_parts(ceil_div(c.chunk, 128), 4096 / 128);
    CHECK((made.listed || kPartsOfGroup * made.cluster >= parts));
    CHECK(made.cluster != 1);
  }
}

TEST_CASE("tiles: few rows have kernels of their own by index and with batch_invariant, with the same tile") {
  int count = 0;
  for (TileRow const& row : kTiles) {
    if (row.use != TileUse::kFewRows) { continue; }
    for (TileUse const use : {TileUse::kFewRowsByIndex, TileUse::kFewRowsInParts}) {
      TileConfig same = row.tile;
      same.calls = calls_of(use);
      CHECK(find_tile(row.tile.head_dim, row.tile.head_dim_v, use)->tile == same);
    }
    ++count;
  }
  CHECK(count == 6);
}

TEST_CASE("tiles: some rows have a kernel of their own by index, and tiles wherever few rows have them") {
  for (TileRow const& row : kTiles) {
    auto const found = [&](TileUse use) { return find_tile(row.tile.head_dim, row.tile.head_dim_v, use)->tile; };
    if (row.use == TileUse::kFewRows) {
      TileConfig const some = found(TileUse::kSomeRows);
      CHECK((some.head_dim == row.tile.head_dim && some.head_dim_v == row.tile.head_dim_v));
      CHECK((some.rows == kMostSomeRows && some.per_sm == row.tile.per_sm));
    }
    if (row.use == TileUse::kSomeRows) {
      TileConfig same = row.tile;
      same.calls = Calls::kByIndex;
      CHECK(found(TileUse::kSomeRowsByIndex) == same);
    }
  }
}

TEST_CASE("tiles: a schedule counts the blocks of a call whichever of the decode tiles it uses") {
  for (TileRow const& row : kTiles) {
    if (row.use != TileUse::kFewRows && row.use != TileUse::kSomeRows) { continue; }
    CAPTURE(row.tile.head_dim);
    CHECK(find_tile(row.tile.head_dim, row.tile.head_dim_v, TileUse::kDecode)->tile.keys == row.tile.keys);
  }
}

TEST_CASE(
    "plan: 16 rows take the tile of few rows, one more that of 32, and 33 that of 64 if those of 32 have no SMs") {
  constexpr TileUse kFew = TileUse::kFewRowsByIndex;
  constexpr TileUse kSome = TileUse::kSomeRowsByIndex;
  constexpr TileUse kMany = TileUse::kDecode;
  for (auto const& [seqlen_q, heads_q, use] : {std::tuple{1, 8, kFew},
                                               {4, 32, kFew},
                                               {2, 64, kFew},
                                               {16, 8, kFew},
                                               {5, 32, kSome},
                                               {17, 8, kSome},
                                               {3, 64, kSome},
                                               {1, 136, kSome},
                                               {8, 32, kSome},
                                               {32, 8, kSome},
                                               {9, 32, kMany},
                                               {33, 8, kMany},
                                               {5, 64, kMany},
                                               {1, 264, kMany}}) {
    CAPTURE(seqlen_q);
    CAPTURE(heads_q);
    for (int const forced_cluster : {0, -1}) {
      Problem p = problem(16, seqlen_q, 1000, heads_q, 8, 128);
      Plan const made = testing::plan_with(p, card(132), {.cluster = forced_cluster});
      REQUIRE(made.kernel == KernelFamily::kDecode);
      CHECK(made.tile == find_tile(128, 128, use)->tile);
      CHECK(made.kernels.front().tiles_of_group == 1);
      p.batch = 2;
      Plan const few = testing::plan_with(p, card(132), {.cluster = forced_cluster});
      bool const by_two = use == kMany && heads_q <= 8 * 32 && forced_cluster == 0;
      CHECK(few.tile == find_tile(128, 128, by_two ? kSome : use)->tile);
      CHECK(few.kernels.front().tiles_of_group == (by_two ? 2 : 1));
    }
  }
  // With batch_invariant the tile of 64 follows that of 16: more kernels that each look for their sequences take
  // longer.
  Problem invariant = problem(2, 5, 1000, 32, 8, 128);
  invariant.batch_invariant = true;
  CHECK(plan(invariant, card(132)).tile.rows == 64);
  // A build with head dim 96 alone has all that its calls need.
  for (int const seqlen_q : {1, 32, 64}) {
    CHECK(plan(problem(2, seqlen_q, 1000, 8, 8, 96), card(132)).tile.head_dim == 96);
  }
}

TEST_CASE("plan: the next call starts early unless half of its clusters would have to wait for this one's to end") {
  for (Problem const& p : decode_problems()) {
    Plan const made = plan(p, card(132));
    if (made.cluster <= 1 || clusters_of_tile(made.kernels.front()) > 1) {
      CHECK(made.starts_early);  // behind several clusters of a tile a combine kernel lets the next call begin
    } else {
      CAPTURE(made.explain());
      CHECK((!made.starts_early || 2 * made.ctas <= 132 * made.tile.per_sm));
    }
  }
  CHECK(plan(problem(2, 512, 4096, 32, 8, 128, true), card(132)).starts_early);
}

TEST_CASE("plan: a decode kernel that is alone merges its parts, and has words to count them in") {
  auto const lengths_up_to = [](int queries) {
    Problem p = ragged(queries, 1'000'000, 128, 16);
    p.num_splits = 0;
    return p;
  };
  auto const merges = [](Problem const& p) {
    return std::ranges::any_of(plan(p, card(132)).kernels, &KernelPlan::merges_parts);
  };
  Plan const alone = plan(lengths_up_to(1), card(132));
  KernelPlan const& kernel = alone.kernels.at(0);
  CHECK((alone.kernels.size() == 1 && kernel.tile.rows == 16 && kernel.may_split && kernel.merges_parts));
  CHECK(alone.explain().find("by the blocks that leave parts of a tile") != std::string::npos);
  std::int64_t const parts = kernel.partial_slots * kernel.partial_rows * (128 + 1) * 4;
  CHECK(alone.workspace_bytes >= parts + 8 * (1 + kernel.partial_slots));

  Plan const wide = plan(lengths_up_to(1), card(640));  // more blocks than a word counts
  CHECK((wide.kernels.at(0).ctas > kMostPartsOfTile && wide.kernels.at(0).may_split));
  CHECK_FALSE(wide.kernels.at(0).merges_parts);

  CHECK(merges(lengths_up_to(4)));
  CHECK(merges(lengths_up_to(8)));
  CHECK(merges(lengths_up_to(9)));          // 36 rows
  CHECK_FALSE(merges(lengths_up_to(512)));  // prefill and decode
  Problem p = lengths_up_to(9);
  p.heads_q = 4;
  p.heads_k = 1;
  p.batch = 5;
  CHECK(merges(p));
  p.batch = 3;
  CHECK_FALSE(merges(p));  // tiles of 36 rows in some 40 parts each
  p.seqlen_q = 8;
  CHECK(merges(p));
  p = lengths_up_to(1);
  p.num_splits = 1;
  CHECK_FALSE(merges(p));  // nothing is cut
  p = lengths_up_to(1);
  p.batch_invariant = true;
  CHECK_FALSE(merges(p));  // a combine kernel merges those in the order that follows from the tile
  p = problem(16, 1, 100'000, 32, 8, 128, true);
  p.num_splits = 0;
  CHECK_FALSE(merges(p));  // no schedule, whose counter is 0 between calls
}

TEST_CASE(
    "plan: behind a schedule that leaves clusters nothing to merge, the next call starts early if both fit the card") {
  auto const made = [](int batch, int head_dim = 128) {
    Problem p = ragged(1, 1'000'000, head_dim, batch);
    p.heads_q = 8;
    p.heads_k = 1;
    p.num_splits = 0;
    return plan(p, card(132));
  };
  CHECK(made(2).cluster_if_alike == 16);
  CHECK(made(2).next_starts_early);
  CHECK(made(16).cluster_if_alike == 4);
  CHECK_FALSE(made(16).next_starts_early);  // 64 blocks of each call
  CHECK(made(64).cluster_if_alike == 1);
  CHECK(made(64).next_starts_early);
  CHECK_FALSE(made(64, 64).next_starts_early);  // with head dim 64 an SM would hold blocks of both calls
}

TEST_CASE("readers_of_few: the blocks of calls that leave clusters to the schedule, whatever their bounds") {
  int by_schedule = 0;
  for (int const batch : {1, 2, 3, 7, 16, 31, 32}) {
    for (auto const& [heads_q, heads_k] : {std::pair(8, 1), {8, 2}, {32, 8}, {4, 4}}) {
      for (int const head_dim : {64, 128, 192, 256}) {
        for (int const bound : {20'000, 131'072, 1'000'000}) {
          for (int const sms : {78, 114, 132}) {
            Problem p = ragged(1, bound, head_dim, batch);
            p.heads_q = heads_q;
            p.heads_k = heads_k;
            p.num_splits = 0;
            Plan const made = plan(p, card(sms));
            if (made.cluster_if_alike == 0 && !made.draws_if_whole) { continue; }
            CAPTURE(made.explain());
            ++by_schedule;
            CHECK(made.ctas == readers_of_few(p, card(sms)).by_schedule);
            CHECK(made.ctas == made.readers.by_schedule);
            CHECK(made.cluster_if_alike <= made.readers.cluster);
          }
        }
      }
    }
  }
  CHECK(by_schedule > 300);
  Problem fixed = ragged(1, 131'072, 128, 16);
  fixed.batch_invariant = true;
  CHECK(readers_of_few(fixed, card(132)).by_schedule == 0);
}

TEST_CASE("plan: several tiles of few rows do not depend on bounds or an sm_margin, and need no schedule") {
  std::mt19937 random(11);
  auto const pick = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  int several = 0;
  int others = 0;
  for (int i = 0; i < 20'000; ++i) {
    int const head_dim = pick({64, 96, 128, 128, 192, 256});
    int const batch = pick({1, 2, 4, 10, 40});
    Problem p = ragged(17, pick({40, 300, 700, 2000, 9000}), head_dim, batch);
    p.heads_k = pick({1, 2, 8});
    p.heads_q = p.heads_k * pick({1, 2, 4, 7, 8});
    p.packed_q = true;
    p.total_q = batch + static_cast<std::int64_t>(random() % 400);
    p.keys = KeyLayout::kPaged;
    p.num_splits = pick({0, 1, 6});
    p.mask.left = pick({kUnlimited, kUnlimited, 60, 500});
    p.mask.right = pick({kUnlimited, 0, 0});
    p.has_metadata = pick({0, 1}) == 1;
    int const packed = scheduled_packing(p.heads_q, p.heads_k);
    bool const in_slab = pick({0, 1}) == 1;
    int const least = in_slab ? 32 / packed + 1 : 64 / packed + 1;
    auto const made_with = [&](int bound, int margin) {
      p.seqlen_q = bound;
      p.sm_margin = margin;
      Plan made = plan(p, card(132));
      KernelPlan const& kernel = made.kernels.front();
      if (kernel.has_several_tiles()) {
        CHECK_FALSE(made.listed);
        CHECK(kernel.tile.rows == kMostSomeRows);
        CHECK(kernel.packed_tiles == (batch > 1));
        CHECK_FALSE(cluster_params(made, kernel, p.heads_q).fetches_early);
      }
      return made;
    };
    Plan const first = made_with(least, 0);
    CAPTURE(first.explain());
    bool const takes = first.kernels.front().has_several_tiles();
    ++(takes ? several : others);
    auto const same_tile = [&](Plan const& made) {
      KernelPlan const& kernel = made.kernels.front();
      return takes == kernel.has_several_tiles();
    };
    CHECK(same_tile(made_with(in_slab ? 64 / packed : 1000, 0)));
    if (p.num_splits != 1) { continue; }
    for (int const margin : {1, 30, 100, 131}) { CHECK(same_tile(made_with(least, margin))); }
  }
  CHECK(several > 2000);
  CHECK(others > 2000);
}

TEST_CASE("plan_with: clusters can be forced and forbidden") {
  using testing::plan_with;
  DeviceInfo const device = card(132);
  Problem p = ragged(1, 5000, 128, 3);
  p.num_splits = 0;
  for (int const size : {1, 2, 4, 8, 16}) {
    Plan const made = plan_with(p, device, {.cluster = size});
    CHECK(made.cluster == size);
    CHECK(made.ctas == 3 * 8 * size);
    CHECK(made.workspace_bytes == 0);
  }
  for (int const size : {3, 12, 32}) { CHECK_THROWS_AS(plan_with(p, device, {.cluster = size}), InvalidArgument); }
  Plan const none = plan_with(p, device, {.cluster = -1});
  CHECK(none.cluster == 0);
  CHECK(none.listed);
  CHECK(plan_with(p, device, {.num_splits = 2}).cluster == 0);
  p.num_splits = 1;
  CHECK(plan_with(p, device, {.cluster = 1}).cluster == 1);
  CHECK_THROWS_AS(plan_with(p, device, {.cluster = 2}), InvalidArgument);
  Problem many = ragged(9, 5000, 128, 3);  // 36 rows
  many.num_splits = 0;
  CHECK(plan_with(many, device, {.cluster = 4}).ctas == 3 * 8 * 2 * 4);
  many.batch = 9;  // so many that not every tile of 32 rows has an SM
  CHECK(plan_with(many, device, {.cluster = 4}).tile.rows == 64);
  many.head_dim = many.head_dim_v = 256;
  CHECK_THROWS_AS(plan_with(many, device, {.cluster = 4}), InvalidArgument);
}

// `queries` of prompts beside single ones: too many for ranks.
Problem prompts_beside_decode(int queries, int head_dim = 128) {
  constexpr int kSingles = 700;  // more than a kernel for both classes is chosen for
  static_assert(kSingles > kMostRankedSequences);
  Problem p = ragged(queries, 131'072, head_dim, 1 + kSingles);
  p.heads_q = 4;
  p.heads_k = 1;
  p.packed_q = true;
  p.total_q = queries + kSingles;
  p.num_splits = 0;
  return p;
}

TEST_CASE("plan: prefill in front of decode leaves it SMs from the start, where it has few tiles") {
  struct Case {
    char const* why;
    Problem problem;
    int ctas;
    int leaves;
  };
  Problem with_margin = prompts_beside_decode(100);
  with_margin.sm_margin = 32;
  Problem drafts = prompts_beside_decode(17);  // so many queries that each has a tile
  drafts.batch = 700;
  drafts.total_q = 120 * 17 + 580;
  Problem loosely_bounded = drafts;
  loosely_bounded.seqlen_q = 4096;
  // Tiles hold 192 rows of four heads: 48 queries.
  for (Case const& c : {Case{"three tiles: a quarter of the SMs", prompts_beside_decode(100), 99, 33},
                        Case{"half as many as SMs", prompts_beside_decode(66 * 48), 99, 33},
                        Case{"more", prompts_beside_decode(67 * 48), 132, 0},
                        Case{"so many that decode goes first", prompts_beside_decode(6400), 132, 0},
                        Case{"sequences that may each have a tile", drafts, 132, 0},
                        Case{"a bound on queries that says nothing of them", loosely_bounded, 132, 0},
                        Case{"a quarter of those that the margin leaves", with_margin, 75, 25},
                        Case{"two blocks of decode on an SM", prompts_beside_decode(100, 64), 99, 33}}) {
    CAPTURE(c.why);
    Plan const made = plan(c.problem, card(132));
    CAPTURE(made.explain());
    REQUIRE(made.kernels.size() == 2);
    KernelPlan const& prefill = made.kernels.front();
    CHECK(prefill.ctas == c.ctas);
    CHECK(prefill.leaves == c.leaves);
    CHECK(prefill.partial_slots == 2 * (prefill.may_split ? c.ctas : 0));
    CHECK(explains(made, "have the other SMs from the start") == (c.leaves > 0));
    ScheduleParams const params = schedule_params(made, prefill, c.problem);
    CHECK((params.ctas == c.ctas && params.ctas_beside == c.leaves));
  }
  KernelPlan const decode = plan(prompts_beside_decode(100), card(132)).kernels.back();
  CHECK((decode.ctas == 132 && decode.leaves == 0));
  CHECK(testing::plan_with(prompts_beside_decode(100), card(132), {.ctas = 120}).ctas == 120);
}

TEST_CASE("plan: tiles of fewer rows are cut where a schedule shares them out and one may be worth it") {
  struct Case {
    char const* why;
    int keys;
    int num_splits;
    Calls calls;
  };
  for (Case const& c :
       {Case{"a long one", 9417, 0, Calls::kUncapped}, Case{"none that is worth it", 1900, 0, Calls::kUncut},
        Case{"as asked", 9417, 1, Calls::kUncut}}) {
    CAPTURE(c.why);
    Problem p = prompts_beside_decode(600);  // of two groups of heads 50 tiles of 192 rows, 76 of 128
    p.batch = 332;
    p.total_q = 600 + 331;
    p.heads_q = 16;
    p.heads_k = 2;
    p.mask.right = 0;
    p.seqlen_k = c.keys;
    p.num_splits = c.num_splits;
    Plan const made = plan(p, card(132));
    CAPTURE(made.explain());
    KernelPlan const& prefill = made.kernels.front();
    REQUIRE(made.listed);
    CHECK(prefill.tile.rows == 128);
    CHECK(prefill.tile.calls == c.calls);
    CHECK(prefill.may_split == (c.calls == Calls::kUncapped));
    // Metadata count tiles of 192 rows, blocks of 80 keys and three units for the ends of a tile.
    ScheduleParams const params = schedule_params(made, prefill, p);
    CHECK(params.resized.on());
    CHECK(params.most_units >= (ceil_div(600, 24) + 332) * (ceil_div(c.keys, 80) + 3));
  }
}

TEST_CASE("device_info: cards by name; an unknown one is refused with the known ones") {
  CHECK(device_info("H100").sm_count == 132);
  CHECK(device_info("H100 PCIe").sm_count == 114);
  CHECK(device_info("H200").sm_count == 132);
  CHECK(device_info("H20").sm_count == 78);
  CHECK(device_info("H100").memory_gbs == 3352);
  CHECK(device_info("H200").memory_gbs == DeviceInfo{}.memory_gbs);
  std::string message;
  try {
    device_info("A100");
  } catch (InvalidArgument const& error) { message = error.what(); }
  CHECK(message.find("device") == 0);
  CHECK(message.find("H100 PCIe") != std::string::npos);
  CHECK(message.find("A100") != std::string::npos);
}

}  // namespace hopper_attention
