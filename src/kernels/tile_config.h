// The tile of every kernel: the only place where tile sizes stand. The planner chooses from this table and the kernels
// are instantiated from it.
#pragma once

#include <array>

#include "hopper_attention/types.h"
#include "kernels/host_device.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

// Dense calls choose among the tiles of a head dim by what they cost; also that of kDecode where its cost is known, for
// grids so small that the longest tile is what they wait for. Where lengths are on the device, there is one
// tile for many queries, one for few and those for what 16 or 32 rows hold; the blocks of the last three have as many
// keys, since schedules count them together. Tiles of kRagged that are never cut, of keys without pages, have kernels
// of their own, kWhole, and kShort where sequences are short in the mean. So have tiles of fewer rows, for calls in
// which those of kRagged would leave SMs idle: kSmallGrid, which are never cut, and kSmallParts, which a schedule may
// cut or of which all are in as many parts. Schedules count the tiles of kRagged all the same. kPaired is for so few
// tiles that each has an SM, of which some are long and some short, or so few that each has several: the thread blocks
// of a cluster share a long one and a short one. kMixed is for prompts beside sequences of few queries in one kernel,
// whose blocks have as many keys as those of few queries; it computes tiles of at most 16 rows as kFewRows does. With
// more of these than SMs it is kMixedMany, which finds each by its number; fewer are found sooner without that code.
// kWindow is for windows so short that one block holds what a tile sees, wherever lengths are; dense calls have such a
// tile among theirs. Softcap for many queries, in dense calls too, has kernels of its own with the tiles of kRagged.
// Those of kFewRows have two more: for batch_invariant, since what merges parts would take short calls 0.2 us, and for
// tiles that follow from their index, whose calls take 0.97 of the time without the code that looks for others, gathers
// keys or caps scores; those of kSomeRows one more, since batch_invariant has no tile of 32 rows.
enum class TileUse : std::uint8_t {
  kDense,
  kRagged,
  kWhole,
  kShort,
  kSmallGrid,
  kSmallParts,
  kWindow,
  kMixed,
  kMixedMany,
  kPaired,
  kCapped,
  kDecode,
  kFewRows,
  kFewRowsByIndex,
  kFewRowsInParts,
  kSomeRows,
  kSomeRowsByIndex
};

constexpr bool is_mixed(TileUse use) { return use == TileUse::kMixed || use == TileUse::kMixedMany; }

constexpr Calls calls_of(TileUse use) {
  switch (use) {
    case TileUse::kDense:
      return Calls::kDense;
    case TileUse::kRagged:
    case TileUse::kSmallParts:
      return Calls::kUncapped;
    case TileUse::kMixed:
      return Calls::kMixed;
    case TileUse::kMixedMany:
      return Calls::kMixedMany;
    case TileUse::kSmallGrid:
    case TileUse::kWindow:
      return Calls::kUncut;
    case TileUse::kWhole:
    case TileUse::kShort:
      return Calls::kWhole;
    case TileUse::kPaired:
      return Calls::kPaired;
    case TileUse::kCapped:
      return Calls::kCapped;
    case TileUse::kFewRowsByIndex:
    case TileUse::kSomeRowsByIndex:
      return Calls::kByIndex;
    case TileUse::kFewRowsInParts:
      return Calls::kInParts;
    default:
      return Calls::kAll;
  }
}

// Nanoseconds of an SM, from the times of calls that differ in length alone (tools/sweep_tiles); of head dims with one
// tile, estimates. What a tile of 192x96 takes stands higher than the fit (3,650), which misses short causal calls.
// Those of kDecode are of small grids, where an SM is faster by a seventh (d 64, 128) or a third than in a full one,
// and raised by as much.
struct TileCost {
  int block = 1000;  // one block of keys for all rows of the tile
  int tile = 1000;   // what starting and ending a tile takes beside its blocks

  constexpr bool operator==(TileCost const&) const = default;
};
inline constexpr TileCost kUnknownCost{0, 0};

struct TileRow {
  TileUse use;
  TileConfig tile;
  char const* why;
  // Ratios between the rows of a head dim count, and of block and tile for packing; those of kPaired also as times,
  // beside that of an exchange. Which blocks the CTAs of a cluster share follows from them, and so do bits.
  TileCost cost;

  constexpr TileRow(TileUse use_, TileConfig const& tile_, char const* why_, TileCost cost_ = {})
      : use(use_), tile(tile_), why(why_), cost(cost_) {
    tile.calls = calls_of(use);
  }
};

// Figures: bf16, 16k tokens, H200. Two with a slash: speed over FlashAttention-3's varlen build, of this tile and of
// another one; for head dim 96, of this tile (1.00) and the other over the faster of them (docs/performance-notes.md).
inline constexpr std::array kTiles{
    TileRow{
        TileUse::kDense,
        {192, 128, 64, 64, 8},
        "three warpgroups hide the exponentials of d 64, and skip what they do not see: full 1.49 / 1.30 at 1k, causal "
        "1.60 / 1.54 at 512 (the other one 128x128)",
        {1479, 2140}},
    TileRow{TileUse::kDense,
            {256, 64, 64, 64, 12},
            "four warpgroups: full 1.59 / 1.53 at 512, causal 1.80 / 1.70 at 512, window of 128 1.44 / 1.08 (the other "
            "one 192x128)",
            {1050, 2500}},
    TileRow{TileUse::kDense,
            {256, 192, 64, 64, 4, 1, Calls::kDense, 136},
            "one block: window of 128, 8 heads of q for each of k 1.85 / 1.40 (the other one 256x64)",
            {1800, 2400}},
    TileRow{
        TileUse::kDense, {128, 128, 96, 96, 6}, "square: causal 1.00 / 0.92 at 512, 1.00 / 0.97 at 1k", {1228, 2589}},
    TileRow{TileUse::kDense, {192, 96, 96, 96, 6}, "three warpgroups: full 1.00 / 0.94 at 4k", {1278, 4300}},
    TileRow{TileUse::kDense,
            {128, 128, 128, 128, 5},
            "square, with two buffers for Q and O: full 1.26 / 1.15 at 512, causal 1.21 / 1.02 at 1k",
            {1557, 2536}},
    TileRow{TileUse::kDense,
            {128, 176, 128, 128, 4},
            "fewer, wider blocks: full 1.04 / 1.03 at 16k, causal 1.06 / 1.05 at 16k",
            {2080, 3300}},
    TileRow{TileUse::kDense,
            {192, 80, 128, 128, 6},
            "three warpgroups: full 1.13 / 1.08 at 2k, causal 1.12 / 1.10 at 8k (the other one 128x128)",
            {1440, 3600}},
    TileRow{TileUse::kDense,
            {192, 64, 128, 128, 8},
            "three warpgroups, narrow blocks: window of 128 1.67 / 1.44 (the other one 128x176)",
            {1250, 2600}},
    TileRow{TileUse::kDense,
            {128, 128, 192, 128, 4},
            "the widest that fits in shared memory: 128x112 took 1.10 of its time for causal 512, 1.05 for full 1k",
            {1930, 3600}},
    TileRow{TileUse::kDense, {128, 112, 192, 192, 4}, "the widest that fits in shared memory", {2040, 5000}},
    TileRow{TileUse::kDense, {128, 80, 256, 256, 4}, "the widest that fits in shared memory", {1940, 6800}},
    TileRow{TileUse::kRagged, {192, 128, 64, 64, 8}, "three warpgroups hide the exponentials of d 64"},
    TileRow{
        TileUse::kRagged,
        {192, 96, 96, 96, 6},
        "three warpgroups: dense 8k 1.07 full and 1.06 causal of the speed of 128x128, 512 0.98 and 0.99; head dim 72 "
        "1.41"},
    TileRow{TileUse::kRagged,
            {192, 80, 128, 128, 6},
            "three warpgroups: 32 x 512 with 32/8 heads 1.49 / 1.32, lengths from 1 to 8k 1.13 / 1.06 (the other one "
            "128x128)"},
    TileRow{TileUse::kRagged, {128, 128, 192, 128, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kRagged, {128, 112, 192, 192, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kRagged, {128, 80, 256, 256, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kWhole, {192, 128, 64, 64, 8}, "as where tiles are cut"},
    TileRow{TileUse::kWhole, {192, 96, 96, 96, 6}, "as where tiles are cut"},
    TileRow{TileUse::kWhole, {192, 80, 128, 128, 6}, "as where tiles are cut, without the code for it"},
    TileRow{TileUse::kWhole, {128, 128, 192, 128, 4}, "as where tiles are cut"},
    TileRow{TileUse::kWhole, {128, 112, 192, 192, 4}, "as where tiles are cut"},
    TileRow{TileUse::kWhole, {128, 80, 256, 256, 4}, "as where tiles are cut"},
    TileRow{TileUse::kShort, {256, 64, 64, 64, 12}, "four warpgroups for sequences that are short in the mean"},
    TileRow{TileUse::kShort, {192, 64, 128, 128, 8}, "narrow blocks for sequences that are short in the mean"},
    TileRow{TileUse::kSmallGrid,
            {128, 128, 64, 64, 8},
            "fewer rows, so that more SMs have a tile: a prompt of 512 to 4k, 8/1 heads, 0.87 to 0.91 of the time of "
            "192x128",
            {1330, 1100}},
    TileRow{TileUse::kSmallGrid,
            {128, 128, 128, 128, 5},
            "fewer rows, so that more SMs have a tile: two thirds of the rows of 192x80 in two thirds of the time",
            {1557, 2536}},
    TileRow{TileUse::kSmallParts, {128, 128, 64, 64, 8}, "as where tiles are whole", {1330, 1100}},
    TileRow{TileUse::kSmallParts, {128, 128, 128, 128, 5}, "as where tiles are whole", {1557, 2536}},
    TileRow{
        TileUse::kWindow, {256, 192, 64, 64, 4, 1, Calls::kUncut, 136}, "one block, as in dense calls", {1800, 2400}},
    TileRow{TileUse::kMixed,
            {128, 128, 64, 64, 8},
            "one kernel instead of two: 538 and 123 queries and some beside singles, 32/4 heads, 0.83 of the time",
            {1330, 1100}},
    TileRow{TileUse::kMixed,
            {128, 128, 128, 128, 4},
            "one kernel instead of two: 28 and 15 queries beside four singles on 4.5k keys, 12/2 heads, 0.65 of the "
            "time",
            {1557, 2536}},
    TileRow{
        TileUse::kMixed,
        {128, 64, 192, 192, 6},
        "one kernel instead of two: eight prompts of 37 to 900 over a page table with room, 16/16 heads, 0.73 of the "
        "time",
        {1300, 4000}},
    TileRow{
        TileUse::kMixed,
        {128, 64, 256, 256, 4},
        "one kernel instead of two: eight prompts of 37 to 900 over a page table with room, 16/8 heads, 0.80 of the "
        "time",
        {1650, 6000}},
    TileRow{TileUse::kMixedMany,
            {128, 128, 64, 64, 8},
            "one kernel instead of two, for many sequences: 42 and some queries beside 129 on up to 5.2k "
            "keys, 12/2 heads, 0.57 of the time",
            {1330, 1100}},
    TileRow{TileUse::kMixedMany,
            {128, 128, 128, 128, 4},
            "one kernel instead of two, for many sequences: 506 and some queries beside 35 on up to 7.1k "
            "keys, 48/8 heads, 0.69 of the time",
            {1557, 2536}},
    TileRow{TileUse::kPaired,
            {128, 128, 64, 64, 6},
            "as where tiles are whole, and the blocks of a cluster share a long tile and a short one",
            {1330, 1100}},
    TileRow{TileUse::kPaired,
            {128, 128, 128, 128, 4},
            "as where tiles are whole, and the blocks of a cluster share a long tile and a short one",
            {1557, 2536}},
    TileRow{TileUse::kCapped, {192, 128, 64, 64, 8}, "as without softcap", {1479, 2140}},
    TileRow{TileUse::kCapped, {192, 96, 96, 96, 6}, "as without softcap", {1278, 4300}},
    TileRow{TileUse::kCapped, {192, 80, 128, 128, 6}, "as without softcap", {1440, 3600}},
    TileRow{TileUse::kCapped, {128, 128, 192, 128, 4}, "as without softcap", {1930, 3600}},
    TileRow{TileUse::kCapped, {128, 112, 192, 192, 4}, "as without softcap", {2040, 5000}},
    TileRow{TileUse::kCapped, {128, 80, 256, 256, 4}, "as without softcap", {1940, 6800}},
    TileRow{TileUse::kDecode,
            {64, 128, 64, 64, 5, 2},
            "two blocks an SM: one starts or ends while the other streams",
            {1200, 3600}},
    TileRow{TileUse::kDecode, {64, 128, 96, 96, 7}, "one block an SM, as head dim 128", kUnknownCost},
    TileRow{TileUse::kDecode,
            {64, 128, 128, 128, 5},
            "64 SMs with one block each reach 4,230 GB/s, with two blocks of 64 keys each 3,100",
            {1250, 3800}},
    TileRow{TileUse::kDecode, {64, 64, 192, 128, 6}, "one block an SM: two have no room for four stages", kUnknownCost},
    TileRow{TileUse::kDecode, {64, 64, 192, 192, 6}, "one block an SM: two have no room for four stages", kUnknownCost},
    TileRow{TileUse::kDecode, {64, 64, 256, 256, 5}, "one block an SM: two have no room for four stages", {1300, 5400}},
    TileRow{TileUse::kFewRows,
            {16, 128, 64, 64, 6, 2},
            "queries are the columns of S and O: 16 of them instead of 64 rows"},
    TileRow{
        TileUse::kFewRows, {16, 128, 96, 96, 8}, "queries are the columns of S and O: 16 of them instead of 64 rows"},
    TileRow{
        TileUse::kFewRows, {16, 128, 128, 128, 6}, "queries are the columns of S and O: 16 of them instead of 64 rows"},
    TileRow{
        TileUse::kFewRows, {16, 64, 192, 128, 8}, "queries are the columns of S and O: 16 of them instead of 64 rows"},
    TileRow{
        TileUse::kFewRows, {16, 64, 192, 192, 8}, "queries are the columns of S and O: 16 of them instead of 64 rows"},
    TileRow{
        TileUse::kFewRows, {16, 64, 256, 256, 6}, "queries are the columns of S and O: 16 of them instead of 64 rows"},
    TileRow{TileUse::kFewRowsByIndex, {16, 128, 64, 64, 6, 2}, "as where a schedule may have them"},
    TileRow{TileUse::kFewRowsByIndex, {16, 128, 96, 96, 8}, "as where a schedule may have them"},
    TileRow{TileUse::kFewRowsByIndex, {16, 128, 128, 128, 6}, "as where a schedule may have them"},
    TileRow{TileUse::kFewRowsByIndex, {16, 64, 192, 128, 8}, "as where a schedule may have them"},
    TileRow{TileUse::kFewRowsByIndex, {16, 64, 192, 192, 8}, "as where a schedule may have them"},
    TileRow{TileUse::kFewRowsByIndex, {16, 64, 256, 256, 6}, "as where a schedule may have them"},
    TileRow{TileUse::kFewRowsInParts, {16, 128, 64, 64, 6, 2}, "as without batch_invariant"},
    TileRow{TileUse::kFewRowsInParts, {16, 128, 96, 96, 8}, "as without batch_invariant"},
    TileRow{TileUse::kFewRowsInParts, {16, 128, 128, 128, 6}, "as without batch_invariant"},
    TileRow{TileUse::kFewRowsInParts, {16, 64, 192, 128, 8}, "as without batch_invariant"},
    TileRow{TileUse::kFewRowsInParts, {16, 64, 192, 192, 8}, "as without batch_invariant"},
    TileRow{TileUse::kFewRowsInParts, {16, 64, 256, 256, 6}, "as without batch_invariant"},
    TileRow{TileUse::kSomeRows,
            {32, 128, 64, 64, 4, 2},
            "queries are the columns of S and O: 48 x 3 queries on 169 keys, 64/8 heads, 0.73 of the time of 64 rows"},
    TileRow{
        TileUse::kSomeRows, {32, 128, 96, 96, 7}, "queries are the columns of S and O: 32 of them instead of 64 rows"},
    TileRow{
        TileUse::kSomeRows,
        {32, 128, 128, 128, 5},
        "queries are the columns of S and O: 16 x 5 queries on 64 to 91 keys, 16/4 heads, 0.85 of the time of 64 rows"},
    TileRow{
        TileUse::kSomeRows, {32, 64, 192, 128, 7}, "queries are the columns of S and O: 32 of them instead of 64 rows"},
    TileRow{
        TileUse::kSomeRows, {32, 64, 192, 192, 7}, "queries are the columns of S and O: 32 of them instead of 64 rows"},
    TileRow{
        TileUse::kSomeRows, {32, 64, 256, 256, 5}, "queries are the columns of S and O: 32 of them instead of 64 rows"},
    TileRow{TileUse::kSomeRowsByIndex, {32, 128, 64, 64, 4, 2}, "as where a schedule may have them"},
    TileRow{TileUse::kSomeRowsByIndex, {32, 128, 96, 96, 7}, "as where a schedule may have them"},
    TileRow{TileUse::kSomeRowsByIndex, {32, 128, 128, 128, 5}, "as where a schedule may have them"},
    TileRow{TileUse::kSomeRowsByIndex, {32, 64, 192, 128, 7}, "as where a schedule may have them"},
    TileRow{TileUse::kSomeRowsByIndex, {32, 64, 192, 192, 7}, "as where a schedule may have them"},
    TileRow{TileUse::kSomeRowsByIndex, {32, 64, 256, 256, 5}, "as where a schedule may have them"},
};

// The first row for the smallest head dims that hold (head_dim, head_dim_v); nullptr if none does.
constexpr TileRow const* find_tile(int head_dim, int head_dim_v, TileUse use) {
  TileRow const* best = nullptr;
  for (TileRow const& row : kTiles) {
    TileConfig const& t = row.tile;
    if (row.use != use || t.head_dim < head_dim || t.head_dim_v < head_dim_v) { continue; }
    if (best == nullptr || t.head_dim + t.head_dim_v < best->tile.head_dim + best->tile.head_dim_v) { best = &row; }
  }
  return best;
}

// Query rows of a consumer warpgroup, and how many of these a tile has.
constexpr int rows_of_slab(TileConfig const& tile) { return min_of(tile.rows, kSlabRows); }
constexpr int slabs_of(TileConfig const& tile) { return tile.rows / rows_of_slab(tile); }

// Whether a kernel can find whole tiles by their rank: those for small grids. In others producers have no registers for
// it.
constexpr bool may_rank_tiles(TileConfig const& tile) { return tile.calls == Calls::kUncut; }

constexpr KernelFamily family_of(TileConfig const& tile) {
  return tile.rows <= 64 ? KernelFamily::kDecode : KernelFamily::kPrefill;
}

}  // namespace hopper_attention
