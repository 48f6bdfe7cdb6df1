// The interval mask and the block ranges against a dense mask that is filled key by key.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <random>
#include <string>
#include <vector>

#include "kernels/block_range.h"
#include "kernels/interval_mask.h"
#include "kernels/tile_config.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {
namespace {

struct MaskCase {
  MaskParams mask;
  SeqlenQK len;
};

std::string text_of(MaskCase const& c) {
  return "left " + std::to_string(c.mask.left) + ", right " + std::to_string(c.mask.right) + ", chunk " +
         std::to_string(c.mask.chunk) + ", Sq " + std::to_string(c.len.q) + ", Sk " + std::to_string(c.len.k) + " of " +
         std::to_string(c.len.k_total) + ", rank " + std::to_string(c.mask.cp_rank) + " of " +
         std::to_string(c.mask.cp_world);
}

// The definition in docs/algorithm.md, word by word: position of the query, distance of the key, same chunk. Of W ranks
// rank r has the keys at r, r + W, ...
bool sees(MaskCase const& c, int row, int local_key) {
  int const position = row - c.len.q + c.len.k_total;
  int const key = local_key * c.mask.cp_world + c.mask.cp_rank;
  if (c.mask.left != kUnlimited && position - key > c.mask.left) { return false; }
  if (c.mask.right != kUnlimited && key - position > c.mask.right) { return false; }
  if (c.mask.chunk == 0) { return true; }
  int chunk_of_query = 0;
  while (position >= (chunk_of_query + 1) * c.mask.chunk) { ++chunk_of_query; }
  while (position < chunk_of_query * c.mask.chunk) { --chunk_of_query; }
  return key / c.mask.chunk == chunk_of_query;
}

class DenseMask {
 public:
  explicit DenseMask(MaskCase const& c) : keys_(c.len.k), seen_(static_cast<std::size_t>(c.len.q) * c.len.k) {
    for (int row = 0; row < c.len.q; ++row) {
      for (int key = 0; key < keys_; ++key) { seen_[at(row, key)] = sees(c, row, key); }
    }
  }
  bool operator()(int row, int key) const { return key >= 0 && key < keys_ && seen_[at(row, key)]; }

 private:
  std::size_t at(int row, int key) const { return static_cast<std::size_t>(row) * keys_ + key; }

  int keys_;
  std::vector<bool> seen_;
};

MaskCase random_case(std::mt19937& random) {
  auto const pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  MaskCase c;
  int const longest = pick(0, 3) == 0 ? 8 : 90;
  int const keys = pick(0, longest);
  c.len = {pick(1, longest), keys, keys};
  auto const side = [&] { return pick(0, 2) == 0 ? kUnlimited : pick(0, 3) == 0 ? 0 : pick(0, 60); };
  c.mask.left = side();
  c.mask.right = side();
  c.mask.chunk = pick(0, 2) == 0 ? pick(1, 70) : 0;
  if (pick(0, 3) == 0) {
    c.mask.cp_world = pick(2, 5);
    c.mask.cp_rank = pick(0, c.mask.cp_world - 1);
    c.len.k = std::max(0, (c.len.k_total - c.mask.cp_rank + c.mask.cp_world - 1) / c.mask.cp_world);
  }
  return c;
}

// What is wrong with the intervals; empty if nothing is.
std::string interval_fault(MaskCase const& c, DenseMask const& dense) {
  KeyInterval before{0, 0};
  for (int row = 0; row < c.len.q; ++row) {
    KeyInterval const interval = visible(c.mask, row, c.len);
    std::string const where = " at row " + std::to_string(row);
    if (interval.begin < 0 || interval.end > c.len.k || interval.begin > interval.end) {
      return "interval out of bounds" + where;
    }
    if (interval.begin < before.begin || interval.end < before.end) { return "interval ends decrease" + where; }
    for (int key = 0; key < c.len.k; ++key) {
      if (dense(row, key) != (key >= interval.begin && key < interval.end)) {
        return "key " + std::to_string(key) + " differs" + where;
      }
    }
    before = interval;
  }
  return "";
}

int count_seen(DenseMask const& dense, int first_row, int last_row, int first_key, int last_key) {
  int count = 0;
  for (int row = first_row; row <= last_row; ++row) {
    for (int key = first_key; key <= last_key; ++key) { count += dense(row, key); }
  }
  return count;
}

std::string range_fault(MaskCase const& c, DenseMask const& dense, int first_row, int last_row, int block,
                        BlockAlignment alignment = {}) {
  BlockRange const range = block_range(c.mask, first_row, last_row, c.len, block, alignment);
  int const rows = last_row - first_row + 1;
  int const seen = count_seen(dense, first_row, last_row, 0, c.len.k - 1);
  if (range.empty()) { return seen == 0 ? "" : "visible keys, but no block"; }
  if (seen == 0) { return "blocks, but no visible key"; }
  if (range.begin != 0 || range.full_begin < range.begin || range.full_end < range.full_begin ||
      range.end < range.full_end) {
    return "bounds are not ordered";
  }
  auto const first_key = [&](int n) { return range.origin + n * block; };
  if (count_seen(dense, first_row, last_row, range.origin, first_key(range.end) - 1) != seen) {
    return "visible key outside the blocks";
  }
  if ((range.origin + alignment.shift) % alignment.unit != 0) { return "origin is not aligned"; }
  for (int n = range.begin; n < range.end; ++n) {
    int const in_block = count_seen(dense, first_row, last_row, first_key(n), first_key(n + 1) - 1);
    if (in_block == 0) { return "block " + std::to_string(n) + " is useless"; }
    bool const called_full = n >= range.full_begin && n < range.full_end;
    if (called_full && in_block != rows * block) { return "block " + std::to_string(n) + " needs a mask"; }
    if (!called_full && in_block == rows * block) { return "block " + std::to_string(n) + " is masked for nothing"; }
  }
  int first_seen = INT_MAX;
  int last_seen = -1;
  for (int key = 0; key < c.len.k; ++key) {
    if (count_seen(dense, first_row, last_row, key, key) > 0) {
      first_seen = std::min(first_seen, key);
      last_seen = key;
    }
  }
  if (range.origin > first_seen || range.origin <= first_seen - alignment.unit) {
    return "origin is too early or late";
  }
  if (range.keys.begin != first_seen || range.keys.end != last_seen + 1) { return "union of the intervals is wrong"; }
  return "";
}

// The rows [first, last] of a tile, none if last < first.
std::string slab_fault(MaskCase const& c, DenseMask const& dense, BlockRange const& tile, int first, int last,
                       int block) {
  SlabRange const slab = slab_range(tile, c.mask, first, last, c.len, block);
  auto const seen_in = [&](int n) {
    int const key = tile.origin + n * block;
    return count_seen(dense, first, last, key, key + block - 1);
  };
  int needed_end = tile.begin;  // behind the last block of which a row sees something
  for (int n = tile.begin; n < tile.end; ++n) {
    if (seen_in(n) > 0) { needed_end = n + 1; }
  }
  // A part of a tile is visited up to its end also by rows that see only what follows.
  int const behind = tile.origin + tile.end * block;
  if (count_seen(dense, first, last, behind, c.len.k - 1) > 0) { needed_end = tile.end; }
  if (needed_end == tile.begin) { return slab.empty() ? "" : "blocks, but no visible key"; }
  if (slab.begin != tile.begin || slab.end != needed_end) { return "visits other blocks"; }
  if (slab.full_begin < slab.begin || slab.full_end < slab.full_begin || slab.end < slab.full_end) {
    return "bounds are not ordered";
  }
  for (int n = slab.begin; n < slab.end; ++n) {
    bool const called_full = n >= slab.full_begin && n < slab.full_end;
    bool const is_full = seen_in(n) == (last - first + 1) * block;
    if (called_full != is_full) { return "block " + std::to_string(n) + " is masked wrongly"; }
  }
  return "";
}

}  // namespace

TEST_CASE("visible: 4,000 random masks agree with the dense mask, row by row") {
  std::mt19937 random(2);
  for (int i = 0; i < 4000; ++i) {
    MaskCase const c = random_case(random);
    CAPTURE(text_of(c));
    REQUIRE(interval_fault(c, DenseMask(c)) == "");
  }
}

TEST_CASE("block_range: 40,000 random tiles visit what their rows see and mask what must be masked") {
  std::mt19937 random(3);
  for (int i = 0; i < 4000; ++i) {
    MaskCase const c = random_case(random);
    DenseMask const dense(c);
    for (int tile = 0; tile < 10; ++tile) {
      int const first_row = std::uniform_int_distribution<int>(0, c.len.q - 1)(random);
      int const last_row = std::min(c.len.q - 1, first_row + std::uniform_int_distribution<int>(0, 40)(random));
      int const block = std::uniform_int_distribution<int>(1, 24)(random);
      CAPTURE(text_of(c));
      CAPTURE(first_row);
      CAPTURE(last_row);
      CAPTURE(block);
      REQUIRE(range_fault(c, dense, first_row, last_row, block) == "");
    }
  }
}

TEST_CASE("slab_range: slabs of 20,000 random tiles and of their parts visit what their rows see") {
  std::mt19937 random(5);
  auto const draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int skipping = 0;
  for (int i = 0; i < 4000; ++i) {
    MaskCase const c = random_case(random);
    DenseMask const dense(c);
    for (int tile = 0; tile < 5; ++tile) {
      int const rows = draw(1, 14);
      int const first_row = draw(0, c.len.q - 1);
      int const last_row = std::min(c.len.q - 1, first_row + 3 * rows - 1);
      int const block = draw(1, 24);
      BlockRange const whole = block_range(c.mask, first_row, last_row, c.len, block);
      BlockRange const part = part_of(whole, draw(0, 1), draw(2, 3), 3);
      CAPTURE(text_of(c));
      CAPTURE(first_row);
      CAPTURE(last_row);
      CAPTURE(block);
      for (BlockRange const& range : {whole, part}) {
        int longest = range.begin;
        for (int slab = 0; slab < 3; ++slab) {
          int const first = first_row + slab * rows;
          int const last = std::min(first + rows - 1, last_row);
          REQUIRE(slab_fault(c, dense, range, first, last, block) == "");
          int const end = slab_range(range, c.mask, first, last, c.len, block).end;
          skipping += end < range.end;
          longest = std::max(longest, last < first ? longest : end);
        }
        // Or the warp of values could miss a pass of the ring: it counts on one that waits for the first values.
        REQUIRE(longest == range.end);
      }
    }
  }
  CHECK(skipping > 1000);
}

TEST_CASE("one_block_holds: a block and a slab's part of it hold what windows leave, wherever pages end") {
  TileConfig const tile = find_tile(64, 64, TileUse::kWindow)->tile;
  int const slabs = slabs_of(tile);
  int const rows_of_product = steps_of_slab(tile) * kKeysOfStep;
  std::mt19937 random(11);
  auto const draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int held = 0;
  int unaligned = 0;  // slabs that begin where no pattern of the swizzle does
  for (int i = 0; i < 20'000; ++i) {
    int const heads = std::array{1, 2, 4, 5, 8, 16, 64}[draw(0, 6)];
    Packing const packing = make_packing(heads);
    MaskParams const mask{.left = draw(0, 140), .right = draw(0, 3) == 0 ? draw(0, 70) : 0};
    if (!one_block_holds(tile, mask, heads)) { continue; }
    ++held;
    int const q = draw(1, 400);
    SeqlenQK const len{q, draw(0, 700)};
    int const tiles = ceil_div(ceil_div(q, packing.queries_per_slab), slabs);
    QueryRange const queries = query_range(packing, slabs, draw(0, tiles - 1), q);
    BlockAlignment const alignment{1 << draw(0, 4), draw(0, 40)};
    BlockRange const range = block_range(mask, queries.first, queries.last, len, tile.keys, alignment);
    CAPTURE(heads);
    CAPTURE(mask.left);
    CAPTURE(mask.right);
    CAPTURE(len.q);
    CAPTURE(len.k);
    CAPTURE(queries.first);
    CAPTURE(alignment.unit);
    REQUIRE(range.blocks() <= 1);
    for (int slab = 0; slab < slabs; ++slab) {
      QueryRange const of_slab = queries_of_slab(packing, queries, slab);
      int const first = first_key_of_slab(range, mask, of_slab.first, len, tile.keys - rows_of_product);
      REQUIRE(first >= 0);
      REQUIRE(first + rows_of_product <= tile.keys);
      unaligned += first % 8 != 0;
      for (int row = of_slab.first; row <= of_slab.last; ++row) {
        KeyInterval const seen = visible(mask, row, len);
        if (seen.empty()) { continue; }
        REQUIRE(seen.begin >= range.origin + first);
        REQUIRE(seen.end <= range.origin + first + tile.slab_keys);
      }
    }
  }
  CHECK(held > 5000);
  CHECK(unaligned > 5000);
}

TEST_CASE("one_block_holds: windows of 128 with 8 heads of q for each of k, and no masks that reach further") {
  TileConfig const tile = find_tile(64, 64, TileUse::kWindow)->tile;
  CHECK(one_block_holds(tile, {.left = 127, .right = 0}, 8));
  CHECK(one_block_holds(tile, {.left = 128, .right = 0}, 8));
  CHECK_FALSE(one_block_holds(tile, {.left = 129, .right = 0}, 8));
  CHECK(one_block_holds(tile, {.left = 100, .right = 0}, 4));
  CHECK_FALSE(one_block_holds(tile, {.left = 127, .right = 0}, 4));
  CHECK_FALSE(one_block_holds(tile, {.left = 127}, 8));
  CHECK_FALSE(one_block_holds(tile, {.right = 0}, 8));
  CHECK_FALSE(one_block_holds(tile, {.left = 127, .right = 0, .chunk = 64}, 8));
  CHECK_FALSE(one_block_holds(tile, {.left = 127, .right = 0, .cp_world = 2}, 8));
  CHECK_FALSE(one_block_holds(tile, {.left = 2147483647, .right = 2147483647}, 8));
}

TEST_CASE("is_in_turns: not where four slabs skip a large share of a tile's blocks") {
  auto const in_turns = [](MaskParams const& mask, int first_row, SeqlenQK len) {
    BlockRange const tile = block_range(mask, first_row, first_row + 255, len, 64);
    return is_in_turns(tile, slab_range(tile, mask, first_row, first_row + 63, len, 64), 4);
  };
  MaskParams const causal{.right = 0};
  CHECK_FALSE(in_turns(causal, 0, {256, 256}));      // slabs of 1, 2, 3 and 4 blocks
  CHECK_FALSE(in_turns(causal, 512, {1024, 1024}));  // 9 to 12
  CHECK(in_turns(causal, 768, {1024, 1024}));        // 13 to 16: the blocks in common are most
  CHECK_FALSE(in_turns(causal, 0, {512, 320}));      // the first rows see nothing
  CHECK(in_turns({}, 0, {256, 256}));
  CHECK(in_turns(causal, 0, {256, 1300}));
  // A part of a tile that all slabs visit up to its end.
  BlockRange const tile = block_range(causal, 512, 767, {1024, 1024}, 64);
  BlockRange const part = part_of(tile, 0, 1, 2);
  CHECK(is_in_turns(part, slab_range(part, causal, 512, 575, {1024, 1024}, 64), 4));
}

TEST_CASE("query_range: every query in one slab of one tile, and the first tile has the slabs that are left over") {
  for (int const heads : {1, 3, 5, 8, 64}) {
    Packing const packing = make_packing(heads);
    for (int slabs = 1; slabs <= 3; ++slabs) {
      for (int seqlen = 0; seqlen <= 1300; ++seqlen) {
        CAPTURE(heads);
        CAPTURE(slabs);
        CAPTURE(seqlen);
        int const tiles = ceil_div(seqlen, slabs * packing.queries_per_slab);
        int next = 0;
        for (int m = 0; m < tiles; ++m) {
          QueryRange const tile = query_range(packing, slabs, m, seqlen);
          REQUIRE(tile.first == next);
          for (int slab = 0; slab < slabs; ++slab) {
            QueryRange const rows = queries_of_slab(packing, tile, slab);
            if (rows.last < rows.first) {
              REQUIRE(m == 0);
              continue;
            }
            REQUIRE(rows.first == next);
            bool const full = rows.last - rows.first + 1 == packing.queries_per_slab;
            REQUIRE((full || rows.last == seqlen - 1));
            next = rows.last + 1;
          }
          REQUIRE(tile.last == next - 1);
        }
        REQUIRE(next == seqlen);
        QueryRange const behind = query_range(packing, slabs, tiles, seqlen);
        REQUIRE(behind.last < behind.first);
      }
    }
  }
}

TEST_CASE("clipped box: the rows that are wanted and then none, unless they are a few of the tensor's first") {
  int exact = 0;
  for (int const rows : {1, 5, 40, 79, 80, 81, 200}) {  // of the tensor
    for (int const size : {8, 64, 80}) {                // of the box
      int const copies = std::min(rows, size);
      for (int first = 0; first < rows; ++first) {
        for (int wanted = 1; wanted <= rows - first; ++wanted) {
          ClippedBox const box(first, wanted, copies);
          REQUIRE((box.y >= 0 && box.y <= rows - copies && box.x >= 0));  // no part of the map is behind the tensor
          REQUIRE(box.exact == (first + std::min(wanted, copies) >= copies));
          exact += box.exact && wanted < size;
          for (int i = 0; i < size; ++i) {
            bool const is_in_map = box.x + i < copies;
            if (!is_in_map) {
              REQUIRE(i >= wanted);
              continue;
            }
            REQUIRE(box.y + box.x + i == first + i);
            REQUIRE(first + i < rows);
            if (box.exact) { REQUIRE(i < wanted); }
          }
        }
      }
    }
  }
  CHECK(exact > 1000);
}

TEST_CASE("swizzled_piece: where the swizzle of 128 or 64 bytes puts 16 bytes, by the bits of their address") {
  for (int const pieces : {8, 4}) {
    for (int row = 0; row < 32; ++row) {
      for (int piece = 0; piece < pieces; ++piece) {
        int const address = (row * pieces + piece) * kPieceBytes;
        int const swizzled = address ^ (((address >> 7) & (pieces - 1)) << 4);
        CHECK((row * pieces + swizzled_piece(row, piece, pieces)) * kPieceBytes == swizzled);
      }
    }
  }
}

TEST_CASE("block_range: blocks that must not cross a page begin at a multiple of its boxes in memory") {
  std::mt19937 random(7);
  auto const up_to = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 20'000; ++i) {
    MaskCase const c = random_case(random);
    int const first_row = up_to(0, c.len.q - 1);
    int const last_row = std::min(c.len.q - 1, first_row + up_to(0, 40));
    int const unit = 1 << up_to(0, 3);
    BlockAlignment const alignment{unit, up_to(0, 30)};
    int const block = unit * up_to(1, 4);
    CAPTURE(text_of(c));
    CAPTURE(first_row);
    CAPTURE(last_row);
    CAPTURE(block);
    CAPTURE(unit);
    CAPTURE(alignment.shift);
    REQUIRE(range_fault(c, DenseMask(c), first_row, last_row, block, alignment) == "");
  }
}

TEST_CASE("block_range: every mask of tiny sequences") {
  int checked = 0;
  for (int q = 1; q <= 4; ++q) {
    for (int k = 0; k <= 5; ++k) {
      for (int left = -1; left <= 4; ++left) {
        for (int right = -1; right <= 4; ++right) {
          for (int chunk = 0; chunk <= 6; ++chunk) {
            MaskCase const c{{left, right, chunk}, {q, k}};
            DenseMask const dense(c);
            CAPTURE(text_of(c));
            REQUIRE(interval_fault(c, dense) == "");
            for (int first_row = 0; first_row < q; ++first_row) {
              for (int block = 1; block <= 3; ++block) {
                REQUIRE(range_fault(c, dense, first_row, q - 1, block) == "");
                ++checked;
              }
            }
          }
        }
      }
    }
  }
  CHECK(checked == 45'360);
}

TEST_CASE("visible: rows that see no key") {
  MaskParams const causal{.right = 0};
  CHECK(visible(causal, 0, {300, 100}).empty());
  CHECK(visible(causal, 199, {300, 100}).empty());
  CHECK(visible(causal, 200, {300, 100}).end == 1);
  CHECK(visible(MaskParams{}, 0, {5, 0}).empty());
  CHECK(block_range(causal, 0, 127, {300, 100}, 64).empty());
}

TEST_CASE("visible: the longest sequences and windows that validate lets pass do not overflow") {
  constexpr int kLongest = 1 << 29;
  SeqlenQK const len{kLongest, kLongest};
  int const last = kLongest - 1;
  CHECK(visible({.left = kLongest - 2}, last, len).begin == 1);
  CHECK(visible({.right = kLongest - 2}, 0, len).end == kLongest - 1);
  CHECK(visible({.chunk = kLongest}, last, len).end == kLongest);
  CHECK(visible({.left = kLongest - 2, .right = 0}, last, {kLongest, 1}).begin == 0);
  CHECK(visible({.right = kLongest - 2}, 0, {kLongest, 1}).empty());
  CHECK(block_range({.right = 0}, last - 127, last, len, 128).end == kLongest / 128);
}

}  // namespace hopper_attention
