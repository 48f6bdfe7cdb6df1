#include "cases.h"

namespace driver {
namespace {

using hopper_attention::DataType;

constexpr DataType kFloat16 = DataType::kFloat16;
constexpr DataType kFloat32 = DataType::kFloat32;

// Decode of a cache in pages: one query of every sequence.
Case decode(std::string why, std::vector<int> keys, int page_size) {
  return {.why = std::move(why),
          .queries = std::vector<int>(keys.size(), 1),
          .keys = std::move(keys),
          .layout = Keys::kPaged,
          .page_size = page_size,
          .causal = true,
          .num_splits = 0};
}

Case mixed(std::string why, Keys layout, int page_size) {
  return {.why = std::move(why),
          .queries = {1, 70, 0, 5, 1},
          .keys = {90, 70, 33, 300, 0},
          .layout = layout,
          .packed_q = true,
          .page_size = page_size,
          .causal = true,
          .num_splits = 0};
}

// Tiles of 32 rows and of 4 in one kernel.
void several_queries(Case& c) {
  c.queries = {8, 1, 8, 1};
  c.heads_k = 1;
  c.packed_q = true;
}

// A tile of 64 rows for each, of which the last has fewer.
void many_rows(Case& c) {
  c.queries = {16, 1, 16, 9};
  c.heads_k = 1;
  c.packed_q = true;
}

// Chunks of a few tiles of 32 rows each, beside sequences with one and with none.
Case several_tiles(std::string why, std::vector<int> queries, std::vector<int> keys) {
  return {.why = std::move(why),
          .queries = std::move(queries),
          .keys = std::move(keys),
          .heads_k = 1,
          .layout = Keys::kPaged,
          .packed_q = true,
          .page_size = 16,
          .causal = true,
          .num_splits = 0,
          .several_tiles = true};
}

// Windows so short that a tile has one block.
void in_one_block(Case& c) {
  c.queries.back() = 300;
  c.keys.back() = 500;
  c.heads_q = 8;
  c.heads_k = 1;
  c.head_dim = c.head_dim_v = 64;
  c.window_left = 127;
  c.window_right = 0;
  c.num_splits = 1;
}

// A chunk beside single queries, of which one has so many keys that each class has a kernel.
Case step(std::string why, int heads_k, int most_keys) {
  Case made{.why = std::move(why),
            .queries = {1, 70, 1, 0, 1, 5, 1, 1},
            .keys = {90, 70, 1, 33, most_keys, 300, 0, 17},
            .heads_q = 4 * heads_k,
            .heads_k = heads_k,
            .layout = Keys::kPaged,
            .packed_q = true,
            .page_size = 16,
            .causal = true,
            .num_splits = 0};
  made.queries.resize(24, 1);
  made.keys.resize(24, 5);
  return made;
}

// The same in one kernel for both classes: more tiles than blocks find without a schedule.
Case crowded(std::string why, int most_keys) {
  Case made = step(std::move(why), 1, most_keys);
  made.queries.resize(94, 64);
  made.keys.resize(94, 70);
  made.queries.resize(130, 1);
  made.keys.resize(130, 5);
  return made;
}

template <class Change>
Case but(Case changed, Change change) {
  change(changed);
  return changed;
}

// Warps of a tile have scores for which softcap takes other ways.
Case capped(int head_dim, int head_dim_v) {
  return {.why = "dense: softcap in all its forms, d " + std::to_string(head_dim) + ", " + std::to_string(head_dim_v),
          .queries = {200},
          .keys = {430},
          .heads_q = 2,
          .heads_k = 2,
          .head_dim = head_dim,
          .head_dim_v = head_dim_v,
          .softcap = 50.0,
          .sizes_of_q = true};
}

std::vector<Case> make() {
  std::vector<Case> found{
      {.why = "dense: one query, one key", .queries = {1}, .keys = {1}, .heads_q = 1, .heads_k = 1},
      {.why = "dense: ragged, two blocks of rows", .queries = {130, 130}, .keys = {190, 190}},
      {.why = "dense: causal, several blocks of keys", .queries = {150}, .keys = {420}, .causal = true},
      {.why = "dense: more queries than keys", .queries = {140}, .keys = {60}, .causal = true},
      {.why = "dense: window, sinks, softcap",
       .queries = {200},
       .keys = {260},
       .window_left = 70,
       .window_right = 5,
       .softcap = 5.0,
       .sinks = true},
      capped(64, 64),
      capped(96, 96),
      capped(128, 128),
      capped(192, 128),
      capped(192, 192),
      capped(256, 256),
      {.why = "dense: chunks, no LSE", .queries = {130}, .keys = {200}, .causal = true, .chunk = 48, .lse = false},
      {.why = "dense: heads packed into a tile", .queries = {5, 5}, .keys = {300, 300}, .heads_q = 8, .heads_k = 1},
      {.why = "dense: fp16, d 64",
       .queries = {129},
       .keys = {129},
       .head_dim = 64,
       .head_dim_v = 64,
       .dtype = kFloat16},
      {.why = "dense: (192, 128)", .queries = {80}, .keys = {150}, .head_dim = 192, .causal = true},
      {.why = "dense: d 256", .queries = {80}, .keys = {150}, .head_dim = 256, .head_dim_v = 256, .causal = true},
      {.why = "dense: d 72 in a larger kernel", .queries = {70}, .keys = {90}, .head_dim = 72, .head_dim_v = 72},
      {.why = "dense: more tiles than run at once",  // items of work take the places of others
       .queries = std::vector<int>(140, 70),
       .keys = std::vector<int>(140, 40)},
      // Slabs that skip blocks, and the third of a tile without queries, for several items of work a thread block.
      {.why = "dense: d 64, causal, slabs that skip, more tiles than run at once",
       .queries = std::vector<int>(80, 130),
       .keys = std::vector<int>(80, 150),
       .head_dim = 64,
       .head_dim_v = 64,
       .causal = true},
      {.why = "dense: d 72, slabs that skip, more tiles than run at once",
       .queries = std::vector<int>(80, 70),
       .keys = std::vector<int>(80, 100),
       .head_dim = 72,
       .head_dim_v = 72},
      {.why = "dense: d 256, chunks, slabs that skip two blocks, more tiles than run at once",
       .queries = std::vector<int>(80, 128),
       .keys = std::vector<int>(80, 240),
       .head_dim = 256,
       .head_dim_v = 256,
       .causal = true,
       .chunk = 176},
      // One block of keys, of which slabs read parts that lie over each other, for several items of work a thread
      // block.
      {.why = "dense: windows of one block, d 64, more tiles than run at once",
       .queries = std::vector<int>(70, 70),
       .keys = std::vector<int>(70, 150),
       .heads_q = 8,
       .heads_k = 1,
       .head_dim = 64,
       .head_dim_v = 64,
       .window_left = 127,
       .window_right = 0,
       .sinks = true},
      // Of one causal sequence the thread blocks of a cluster share a long tile and a short one, and a tile in the
      // middle; where there are few SMs, one pair after the other. Blocks of large clusters have no keys of some tiles.
      {.why = "dense: two blocks share two tiles",
       .queries = {600},
       .keys = {600},
       .heads_q = 1,
       .heads_k = 1,
       .causal = true,
       .shares_tiles = 2},
      {.why = "varlen: two blocks share two tiles, d 64, pages of 16, several pairs for a cluster",
       .queries = {250},
       .keys = {500},
       .heads_q = 2,
       .heads_k = 1,
       .head_dim = 64,
       .head_dim_v = 64,
       .layout = Keys::kPaged,
       .packed_q = true,
       .causal = true,
       .sm_margin = 130,
       .shares_tiles = 2},
      {.why = "varlen: two blocks share two tiles, several pairs for a cluster",
       .queries = {640},
       .keys = {700},
       .heads_q = 1,
       .heads_k = 1,
       .layout = Keys::kPaged,
       .packed_q = true,
       .causal = true,
       .sm_margin = 130,
       .shares_tiles = 2},
      // Tiles that end with a block of keys: no row of V is hidden. racecheck does not see the order between the lanes
      // that zero such rows and an O that comes into the same slot of the ring (performance notes, step 166).
      {.why = "varlen: three blocks share two tiles, several pairs for a cluster",
       .queries = {384},
       .keys = {1152},
       .heads_q = 1,
       .heads_k = 1,
       .layout = Keys::kPaged,
       .packed_q = true,
       .causal = true,
       .sm_margin = 128,
       .shares_tiles = 3},
      {.why = "varlen: four blocks share tiles, d 64",
       .queries = {200},
       .keys = {700},
       .heads_q = 1,
       .heads_k = 1,
       .head_dim = 64,
       .head_dim_v = 64,
       .packed_q = true,
       .causal = true,
       .shares_tiles = 4},
      {.why = "dense: eight blocks share tiles, several pairs for a cluster",
       .queries = {384},
       .keys = {500},
       .heads_q = 1,
       .heads_k = 1,
       .causal = true,
       .sm_margin = 121,
       .shares_tiles = 8},
      {.why = "varlen: one sequence, whole tiles without a schedule",
       .queries = {200},
       .keys = {300},
       .layout = Keys::kPaged,
       .packed_q = true,
       .causal = true},
      several_tiles("varlen: several tiles of few rows, clusters", {40, 9, 0, 17, 1}, {700, 20, 7, 500, 130}),
      several_tiles("varlen: several tiles of few rows, one sequence, large clusters", {12}, {4000}),
      but(several_tiles("varlen: several tiles of few rows, d 64, a window, packed keys", {33, 2, 17}, {700, 90, 64}),
          [](Case& c) {
            c.layout = Keys::kPacked;
            c.page_size = 0;
            c.head_dim = c.head_dim_v = 64;
            c.window_left = 60;
            c.window_right = 0;
          }),
      but(several_tiles("varlen: several tiles of few rows, d 256, more sequences than lanes", {20}, {150}),
          [](Case& c) {
            c.queries.resize(35, 1);
            c.keys.resize(35, 9);
            c.head_dim = c.head_dim_v = 256;
          }),
      but(several_tiles("dense: several tiles of few rows", {21, 21}, {300, 300}),
          [](Case& c) {
            c.layout = Keys::kDense;
            c.packed_q = false;
            c.page_size = 0;
          }),
      step("varlen: a kernel for each class, clusters in both", 2, 2000),
      but(step("varlen: a kernel for each class, tiles of few queries drawn", 8, 600),
          [](Case& c) {
            c.queries[1] = 20;
            c.metadata = true;
          }),
      mixed("varlen: packed keys", Keys::kPacked, 0),
      but(mixed("varlen: d 64, packed keys, slabs that skip, more tiles than run at once", Keys::kPacked, 0),
          [](Case& c) {
            c.queries = std::vector<int>(80, 130);
            c.keys = std::vector<int>(80, 150);
            c.head_dim = c.head_dim_v = 64;
          }),
      but(mixed("varlen: d 256, pages of 16, slabs that skip, more tiles than run at once", Keys::kPaged, 16),
          [](Case& c) {
            c.queries = std::vector<int>(80, 100);
            c.keys = std::vector<int>(80, 170);
            c.head_dim = c.head_dim_v = 256;
          }),
      mixed("varlen: pages of 16", Keys::kPaged, 16),
      mixed("varlen: pages of 1", Keys::kPaged, 1),
      mixed("varlen: pages of 4", Keys::kPaged, 4),
      mixed("varlen: pages of 24", Keys::kPaged, 24),
      mixed("varlen: pages of 128", Keys::kPaged, 128),
      but(mixed("varlen: pages of 16, softcap", Keys::kPaged, 16), [](Case& c) { c.softcap = 5.0; }),
      but(mixed("varlen: more tiles than run at once", Keys::kPaged, 16),
          [](Case& c) {
            c.queries = std::vector<int>(140, 70);
            c.keys = std::vector<int>(140, 90);
          }),
      crowded("varlen: one kernel for both classes", 900),
      crowded("varlen: one kernel for both classes, cut", 4000),
      but(crowded("varlen: one kernel for both classes, pages of 1, cut", 3000), [](Case& c) { c.page_size = 1; }),
      but(mixed("varlen: metadata, window, sinks", Keys::kPaged, 16),
          [](Case& c) {
            c.metadata = c.sinks = true;
            c.window_left = 100;
            c.window_right = 0;
          }),
      but(mixed("varlen: windows of one block", Keys::kPacked, 0), in_one_block),
      but(mixed("varlen: windows of one block, pages of 16", Keys::kPaged, 16), in_one_block),
      but(mixed("varlen: windows of one block, pages of 1", Keys::kPaged, 1), in_one_block),
      but(mixed("varlen: batch_invariant, metadata", Keys::kPaged, 16),
          [](Case& c) { c.metadata = c.batch_invariant = true; }),
      but(mixed("varlen: context parallelism", Keys::kPacked, 0), [](Case& c) { c.cp_world = 2; }),
      but(mixed("varlen: (192, 128), 3 splits", Keys::kPaged, 64),
          [](Case& c) {
            c.head_dim = 192;
            c.num_splits = 3;
          }),
      decode("decode: pages of 16, splits", {700, 1, 17, 0}, 16),
      decode("decode: pages of 1, splits", {500, 3}, 1),
      decode("decode: pages of 4", {300, 65}, 4),
      but(decode("decode: metadata", {900, 64, 200}, 64), [](Case& c) { c.metadata = true; }),
      but(decode("decode: batch_invariant, five parts, a block of a cluster for each", {4300}, 16),
          [](Case& c) {
            c.heads_q = 2;
            c.heads_k = 1;
            c.batch_invariant = true;
          }),
      but(decode("decode: batch_invariant, a block of a cluster for four parts", std::vector<int>(25, 4300), 16),
          [](Case& c) { c.batch_invariant = true; }),
      but(decode("decode: batch_invariant, a block for all parts of a tile", std::vector<int>(40, 4300), 16),
          [](Case& c) { c.batch_invariant = true; }),
      but(decode("decode: batch_invariant, parts that a kernel merges", {40000, 300}, 16),
          [](Case& c) {
            c.heads_q = 2;
            c.heads_k = 1;
            c.batch_invariant = true;
          }),
      but(decode("decode: batch_invariant, more tiles than run at once", std::vector<int>(300, 3), 16),
          [](Case& c) { c.batch_invariant = true; }),
      but(decode("decode: no cluster, pages of 16, splits", {700, 1, 17, 0}, 16), [](Case& c) { c.clusters = false; }),
      but(decode("decode: no cluster, pages of 1, metadata", {500, 3}, 1),
          [](Case& c) {
            c.clusters = false;
            c.metadata = true;
          }),
      but(decode("decode: no cluster, d 256, 7 splits", {400, 30}, 16),
          [](Case& c) {
            c.clusters = false;
            c.head_dim = c.head_dim_v = 256;
            c.num_splits = 7;
          }),
      but(decode("decode: no cluster, more tiles than run at once", std::vector<int>(600, 3), 4),
          [](Case& c) {
            c.heads_q = 2;
            c.heads_k = 1;
            c.keys.front() = 900;
            c.clusters = false;
            c.metadata = true;
          }),
      but(decode("decode: up to 32 rows, clusters", {700, 1, 17, 5}, 16), several_queries),
      but(decode("decode: up to 32 rows, no cluster, splits", {700, 1, 17, 5}, 16),
          [](Case& c) {
            several_queries(c);
            c.clusters = false;
          }),
      but(decode("decode: up to 64 rows, clusters", {700, 1, 17, 9}, 16), many_rows),
      but(decode("decode: up to 64 rows, d 96, pages of 1, clusters", {700, 1, 17, 9}, 1),
          [](Case& c) {
            many_rows(c);
            c.head_dim = c.head_dim_v = 96;
          }),
      // Of O^T there are rows for columns that V does not have.
      but(decode("decode: d 96, clusters", {700, 1, 17, 5}, 16), [](Case& c) { c.head_dim = c.head_dim_v = 96; }),
      but(decode("decode: d 96, no cluster, splits", {700, 1, 17, 5}, 16),
          [](Case& c) {
            several_queries(c);
            c.clusters = false;
            c.head_dim = c.head_dim_v = 96;
          }),
      but(decode("decode: 32 rows, d 256", {400, 30}, 16),
          [](Case& c) {
            c.queries = {8, 8};
            c.heads_k = 1;
            c.head_dim = c.head_dim_v = 256;
          }),
      but(decode("decode: 4 queries, d 64", {200, 70}, 16),
          [](Case& c) {
            c.queries = {4, 4};
            c.head_dim = c.head_dim_v = 64;
          }),
      but(decode("decode: d 256, 7 splits", {400, 30}, 16),
          [](Case& c) {
            c.head_dim = c.head_dim_v = 256;
            c.num_splits = 7;
          }),
      but(decode("decode: dense cache, rows by index, left padding", {120, 30, 64}, 0),
          [](Case& c) {
            c.layout = Keys::kDense;
            c.used = c.batch_idx = true;
            c.leftpad = 9;
          }),
      but(decode("schedule: 70 sequences", std::vector<int>(70, 3), 4),
          [](Case& c) {
            c.heads_q = c.heads_k = 1;
            c.metadata = true;
          }),
      but(decode("schedule: 600 sequences", std::vector<int>(600, 2), 4), [](Case& c) { c.heads_q = c.heads_k = 1; }),
      but(decode("append: pages of 16", {90, 17, 3}, 16), [](Case& c) { c.append = 3; }),
      but(decode("append: pages of 1, rotary in halves", {90, 17, 3}, 1),
          [](Case& c) {
            c.append = 3;
            c.rotary = true;
          }),
      but(decode("append: dense cache, rotary in pairs", {90, 17}, 0),
          [](Case& c) {
            c.layout = Keys::kDense;
            c.used = c.rotary = c.interleaved = true;
            c.queries = {2, 2};
            c.append = 2;
          }),
  };
  return found;
}

struct NamedLying {
  Lying lying;
  char const* name;
};

struct NamedLie {
  Lie lie;
  char const* name;
};

constexpr NamedLying kCuSeqlensQ{Lying::kCuSeqlensQ, "cu_seqlens_q"};
constexpr NamedLying kCuSeqlensK{Lying::kCuSeqlensK, "cu_seqlens_k"};
constexpr NamedLying kSequsedK{Lying::kSequsedK, "seqused_k"};
constexpr NamedLying kPageTable{Lying::kPageTable, "page_table"};
constexpr NamedLying kCacheBatchIdx{Lying::kCacheBatchIdx, "cache_batch_idx"};
constexpr NamedLying kCacheLeftpad{Lying::kCacheLeftpad, "cache_leftpad"};
constexpr NamedLying kMetadata{Lying::kMetadata, "scheduler_metadata"};

constexpr NamedLie kLies[] = {{Lie::kLargest, "the largest int"},
                              {Lie::kSmallest, "the smallest int"},
                              {Lie::kMinusOne, "-1"},
                              {Lie::kMillionMore, "a million more"},
                              {Lie::kRandom, "random bits"}};

// Every tensor of ints of a call that has it, with every lie.
std::vector<Case> make_malformed() {
  Case const paged = mixed("pages of 16", Keys::kPaged, 16);
  Case const small_pages = mixed("pages of 1", Keys::kPaged, 1);
  Case const packed = mixed("packed keys", Keys::kPacked, 0);
  Case const split = decode("decode, splits", {700, 1, 17, 0}, 16);
  Case const scheduled = but(decode("decode, metadata", {900, 64, 200}, 64), [](Case& c) { c.metadata = true; });
  Case const invariant = but(paged, [](Case& c) {
    c.why = "batch_invariant, metadata";
    c.metadata = c.batch_invariant = true;
  });
  Case const dense = but(decode("dense cache", {120, 30, 64}, 0), [](Case& c) {
    c.layout = Keys::kDense;
    c.used = c.batch_idx = true;
    c.leftpad = 9;
  });
  Case const append = but(decode("append to pages", {90, 17, 3}, 16), [](Case& c) { c.append = 3; });
  Case const rotated = but(decode("append to a dense cache, rotated", {90, 17}, 0), [](Case& c) {
    c.layout = Keys::kDense;
    c.used = c.rotary = true;
    c.queries = {2, 2};
    c.append = 2;
  });
  Case const classes = step("a kernel for each class", 2, 2000);
  Case const several = several_tiles("several tiles of few rows", {40, 9, 0, 17, 1}, {300, 20, 7, 64, 130});
  Case const both = but(crowded("one kernel for both classes, cut", 3000), [](Case& c) { c.metadata = true; });
  struct Target {
    Case const& of;
    NamedLying lying;
  };
  Target const targets[] = {
      {paged, kPageTable},     {paged, kSequsedK},     {paged, kCuSeqlensQ},   {small_pages, kPageTable},
      {packed, kCuSeqlensQ},   {packed, kCuSeqlensK},  {split, kPageTable},    {split, kSequsedK},
      {scheduled, kMetadata},  {scheduled, kSequsedK}, {invariant, kMetadata}, {dense, kSequsedK},
      {dense, kCacheBatchIdx}, {dense, kCacheLeftpad}, {append, kPageTable},   {append, kSequsedK},
      {rotated, kSequsedK},    {classes, kCuSeqlensQ}, {classes, kSequsedK},   {both, kMetadata},
      {both, kSequsedK},       {several, kCuSeqlensQ}, {several, kSequsedK},   {several, kPageTable},
  };
  std::vector<Case> found;
  for (Target const& target : targets) {
    for (NamedLie const& lie : kLies) {
      found.push_back(but(target.of, [&](Case& c) {
        c.why = "malformed: " + c.why + ", " + target.lying.name + " " + lie.name;
        c.lying = target.lying.lying;
        c.lie = lie.lie;
      }));
    }
  }
  return found;
}

}  // namespace

std::vector<Case> const& malformed_cases() {
  static std::vector<Case> const cases = make_malformed();
  return cases;
}

std::vector<Case> const& attention_cases() {
  static std::vector<Case> const cases = make();
  return cases;
}

std::vector<MergeCase> const& merge_cases() {
  static std::vector<MergeCase> const cases{
      {.why = "combine: 3 parts, bf16", .parts = 3},
      {.why = "combine: 40 parts, float32", .parts = 40, .columns = 128, .dtype = kFloat32},
      {.why = "merge_states: bf16", .columns = 72},
      {.why = "merge_states: float32", .dtype = kFloat32},
  };
  return cases;
}

}  // namespace driver
