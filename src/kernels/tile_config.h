// The tile of every kernel: the only place where tile sizes stand. The planner chooses from this table and the kernels
// are instantiated from it.
#pragma once

#include <array>

#include "hopper_attention/types.h"

namespace hopper_attention {

// Why one head dim has several tiles. A mask that cuts blocks wants narrow tiles, full attention wide ones. Where
// lengths are on the device, the tile must not follow from a bound that the caller gives: one for many queries, one for
// few.
enum class TileUse : std::uint8_t { kFull, kMasked, kRagged, kDecode };

struct TileRow {
  TileUse use;
  int from_keys;  // keys that a query sees on average: the row is for this many or more
  TileConfig tile;
  char const* why;
};

// For each head dim and use rows by ascending from_keys, the first of them 0. Figures: speed over
// FlashAttention-3's varlen build, bf16, 16k tokens, H200, this tile against the other one in the table
// (docs/performance-notes.md).
inline constexpr std::array kTiles{
    TileRow{
        TileUse::kFull, 0, {192, 128, 64, 64, 8}, "three warpgroups hide the exponentials of d 64: 1.29 / 1.20 at 1k"},
    TileRow{TileUse::kMasked, 0, {128, 128, 64, 64, 8}, "short and square, little is cut off: 1.36 / 1.27 at 1k"},
    TileRow{TileUse::kMasked, 1024, {192, 128, 64, 64, 8}, "three warpgroups hide the exponentials: 1.14 / 1.07 at 4k"},
    TileRow{TileUse::kFull, 0, {128, 128, 96, 96, 6}, "short: 1.20 / 1.14 at 512"},
    TileRow{TileUse::kFull, 2048, {192, 96, 96, 96, 6}, "three warpgroups: 1.00 / 0.94 at 4k"},
    TileRow{TileUse::kMasked, 0, {128, 128, 96, 96, 6}, "square: 1.54 / 1.38 at 1k, 1.12 / 1.11 at 4k"},
    TileRow{TileUse::kFull, 0, {128, 128, 128, 128, 5}, "O has its own buffer: 1.18 / 1.08 at 512"},
    TileRow{TileUse::kFull, 4096, {128, 176, 128, 128, 4}, "fewer, wider blocks: 1.02 / 0.95 at 16k"},
    TileRow{
        TileUse::kMasked, 0, {128, 128, 128, 128, 5}, "square, a causal tile wastes half a block: 1.15 / 0.96 at 1k"},
    TileRow{TileUse::kMasked, 4096, {128, 176, 128, 128, 4}, "fewer, wider blocks: 1.05 / 0.99 at 16k"},
    TileRow{TileUse::kFull, 0, {128, 112, 192, 128, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kMasked, 0, {128, 112, 192, 128, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kFull, 0, {128, 112, 192, 192, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kMasked, 0, {128, 112, 192, 192, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kFull, 0, {128, 80, 256, 256, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kMasked, 0, {128, 80, 256, 256, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kRagged, 0, {192, 128, 64, 64, 8}, "three warpgroups hide the exponentials of d 64"},
    TileRow{TileUse::kRagged, 0, {128, 128, 96, 96, 6}, "square"},
    TileRow{TileUse::kRagged, 0, {128, 128, 128, 128, 5}, "square, O has its own buffer"},
    TileRow{TileUse::kRagged, 0, {128, 112, 192, 128, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kRagged, 0, {128, 112, 192, 192, 4}, "the widest that fits in shared memory"},
    TileRow{TileUse::kRagged, 0, {128, 80, 256, 256, 4}, "the widest that fits in shared memory"},
    TileRow{
        TileUse::kDecode, 0, {64, 128, 64, 64, 6, 2}, "two blocks an SM: one starts or ends while the other streams"},
    TileRow{TileUse::kDecode, 0, {64, 64, 96, 96, 8, 2}, "two blocks an SM"},
    TileRow{TileUse::kDecode, 0, {64, 64, 128, 128, 6, 2}, "two blocks an SM"},
    TileRow{TileUse::kDecode, 0, {64, 64, 192, 128, 8}, "one block an SM: two have no room for four stages"},
    TileRow{TileUse::kDecode, 0, {64, 64, 192, 192, 8}, "one block an SM: two have no room for four stages"},
    TileRow{TileUse::kDecode, 0, {64, 64, 256, 256, 6}, "one block an SM: two have no room for four stages"},
};

// The row for `keys` visible keys on average, of the smallest head dims that hold (head_dim, head_dim_v); nullptr if
// none does.
constexpr TileRow const* find_tile(int head_dim, int head_dim_v, TileUse use, int keys) {
  TileRow const* best = nullptr;
  for (TileRow const& row : kTiles) {
    TileConfig const& t = row.tile;
    if (row.use != use || row.from_keys > keys || t.head_dim < head_dim || t.head_dim_v < head_dim_v) { continue; }
    int const size = t.head_dim + t.head_dim_v;
    int const best_size = best == nullptr ? 0 : best->tile.head_dim + best->tile.head_dim_v;
    bool const better = best == nullptr || size < best_size || (size == best_size && row.from_keys > best->from_keys);
    if (better) { best = &row; }
  }
  return best;
}

constexpr KernelFamily family_of(TileConfig const& tile) {
  return tile.rows == 64 ? KernelFamily::kDecode : KernelFamily::kPrefill;
}

}  // namespace hopper_attention
