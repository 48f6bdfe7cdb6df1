// The work of a step: what all CTAs of all its kernels compute together, and what the combine kernel makes of it,
// against a plain loop over sequences, heads and query blocks.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hopper_attention/testing.h"
#include "host/cluster_params.h"
#include "host/plan_request.h"
#include "host/ranked_tiles.h"
#include "host/schedule_shape.h"
#include "host/tile_list.h"
#include "kernels/left_part.h"
#include "kernels/parted_tile.h"
#include "kernels/ranked_tiles.h"
#include "kernels/schedule_params.h"
#include "kernels/tile_sources.h"
#include "kernels/tile_work.h"
#include "kernels/work_source.h"
#include "schedule_model.h"

namespace hopper_attention {
namespace {

using Random = std::mt19937;

int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

template <class T>
T one_of(Random& random, std::vector<T> const& values) {
  return values[static_cast<std::size_t>(pick(random, 0, static_cast<int>(values.size()) - 1))];
}

DeviceInfo card(int sm_count) {
  return {.name = "a card",
          .sm_count = sm_count,
          .compute_major = 9,
          .compute_minor = 0,
          .l2_bytes = std::int64_t{50} << 20};
}

// The tensors of lengths of a call, as vectors.
struct Lengths {
  std::vector<int> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, cache_leftpad, cp_tot_seqused_k;
};

// A call: what launch() would hand to the kernels, on the host.
struct Call {
  Lengths lengths;
  SequenceParams sequences;  // points into `lengths`
  Problem problem;
  Plan plan;
  int sm_count = 132;
  int page_unit = 1;
  std::vector<int> metadata;  // empty: all sequences are alike

  Call() = default;
  Call(Call const&) = delete;
  Call& operator=(Call const&) = delete;
};

ScheduleParams schedule_of(Call& call, KernelPlan const& kernel) {
  ScheduleParams p = schedule_params(call.plan, kernel, call.problem);
  p.metadata = call.problem.ragged ? call.metadata.data() : nullptr;
  return p;
}

AttentionParams params_of(Call& call, KernelPlan const& kernel) {
  int const sharing = call.problem.heads_q / call.problem.heads_k / call.plan.packed_heads;
  AttentionParams p{};
  p.schedule = schedule_of(call, kernel);
  p.sequences = call.sequences;
  p.packing = packing_of(call.plan, kernel);
  p.mask = call.problem.mask;
  p.load.groups_per_head_k = FastDivmod(sharing);
  p.alignment.unit = call.page_unit;
  p.keys_in_l2 = call.plan.keys_in_l2;
  p.sharing = sharing;
  p.listed = call.plan.listed;
  p.least_queries = kernel.least_queries;
  p.most_queries = kernel.most_queries;
  p.cluster = cluster_params(call.plan, kernel, call.problem.heads_q);
  set_metadata(p.cluster, call.plan, call.metadata.data());
  if (is_paired(kernel) || kernel.ranked) {
    p.ranked = ranked_tiles(call.plan, kernel, call.problem);
    if (is_paired(kernel)) { p.pairs = paired_tiles(kernel); }
  } else if (!call.plan.listed && call.plan.cluster == 0) {
    p.scheduler = tile_list(call.plan, kernel, call.problem);
    p.parts = equal_parts(kernel);
  }
  return p;
}

ScheduleKernelParams schedule_kernel_of(Call const& call) {
  auto const shape = [&](TileUse use) {
    return tile_shape(find_tile(call.problem.head_dim, call.problem.head_dim_v, use)->tile,
                      scheduled_packing(call.problem.heads_q, call.problem.heads_k), call.plan.fixed_splits);
  };
  Problem const& problem = call.problem;
  int const packed = scheduled_packing(problem.heads_q, problem.heads_k);
  TileUse const few = few_queries_use(problem.head_dim, problem.head_dim_v, packed, call.plan.fixed_splits);
  FewReaders const readers = readers_of_few(problem, card(call.sm_count));
  return {call.sequences, problem.mask, shape(TileUse::kRagged), shape(few), even_parts(problem, readers),
          readers,        nullptr};
}

struct Request {
  std::vector<SeqlenQK> lengths;
  int heads_q = 8, heads_k = 2;
  int head_dim = 128;
  Arguments options;
  int sm_count = 132;
  int forced_splits = 0;
  int forced_cluster = 0;
  bool packed_q = true;
  bool packed_k = false;
  int page_unit = 1;
  int leftpad = 0;
  int slack = 0;       // how far the bounds on the lengths are from the longest
  bool alike = false;  // all lengths are those of the first, known on the host
  int slack_k = 0;     // of the bound on keys alone
};

std::string text_of(Request const& r) {
  std::ostringstream text;
  text << "heads " << r.heads_q << "/" << r.heads_k << ", d " << r.head_dim << ", SMs " << r.sm_count << ", splits "
       << r.options.num_splits << " forced " << r.forced_splits << ", cluster " << r.forced_cluster
       << (r.options.batch_invariant ? ", fixed" : "") << (r.packed_q ? ", packed q" : "")
       << (r.packed_k ? ", packed k" : "") << (r.alike ? ", alike" : "") << ", page unit " << r.page_unit
       << ", leftpad " << r.leftpad << ", lengths";
  for (std::size_t i = 0; i < std::min<std::size_t>(r.lengths.size(), 40); ++i) {
    text << " " << r.lengths[i].q << "x" << r.lengths[i].k;
  }
  text << " of " << r.lengths.size();
  return text.str();
}

void make_call(Request const& r, Call& call) {
  int const batch = static_cast<int>(r.lengths.size());
  int longest_q = 1;
  int longest_k = 1;
  Lengths& l = call.lengths;
  l.cu_seqlens_q = {0};
  l.cu_seqlens_k = {0};
  for (SeqlenQK const len : r.lengths) {
    longest_q = std::max(longest_q, len.q);
    longest_k = std::max(longest_k, len.k + r.leftpad);
    l.cu_seqlens_q.push_back(l.cu_seqlens_q.back() + len.q);
    l.cu_seqlens_k.push_back(l.cu_seqlens_k.back() + (r.packed_k ? len.k : 0));
    l.seqused_q.push_back(len.q);
    l.seqused_k.push_back(len.k + r.leftpad);
    l.cache_leftpad.push_back(r.leftpad);
    l.cp_tot_seqused_k.push_back(len.k_total);
  }
  SequenceParams& s = call.sequences;
  s.batch = batch;
  Arguments options = r.options;
  Tensor given;
  given.data = &call;
  given.rank = 1;
  if (r.alike) {
    longest_q = r.lengths[0].q;
    longest_k = r.lengths[0].k;
    s.seqlen_q = longest_q;
    s.capacity_k = s.seqused_k_all = longest_k;
  } else {
    longest_q += r.slack;
    longest_k += r.slack + r.slack_k;
    if (r.packed_q) {
      s.cu_seqlens_q = l.cu_seqlens_q.data();
      s.seqlen_q = l.cu_seqlens_q.back() + r.slack;
      options.cu_seqlens_q = given;
    } else {
      s.seqused_q = l.seqused_q.data();
      s.seqlen_q = longest_q;
      options.seqused_q = given;
    }
    if (r.packed_k) {
      s.cu_seqlens_k = l.cu_seqlens_k.data();
      s.capacity_k = l.cu_seqlens_k.back();
      options.cu_seqlens_k = given;
    } else {
      s.seqused_k = l.seqused_k.data();
      s.capacity_k = longest_k;
      options.seqused_k = given;
      if (r.leftpad > 0) {
        s.cache_leftpad = l.cache_leftpad.data();
        options.cache_leftpad = given;
      }
    }
    if (options.cp_world_size > 1) {
      s.cp_tot_seqused_k = l.cp_tot_seqused_k.data();
      options.cp_tot_seqused_k = given;
    }
  }
  call.page_unit = r.page_unit;
  call.problem = make_problem({.dtype = DataType::kBFloat16,
                               .batch = batch,
                               .seqlen_q = longest_q,
                               .seqlen_k = longest_k,
                               .heads_q = r.heads_q,
                               .heads_k = r.heads_k,
                               .head_dim = r.head_dim,
                               .head_dim_v = r.head_dim},
                              options);
  if (call.problem.packed_q) { call.problem.total_q = s.seqlen_q; }
  if (r.packed_k) {
    call.problem.total_k = s.capacity_k;
    call.problem.keys_known = s.capacity_k >= batch * longest_k;
  }
  testing::ForcedPlan forced;
  forced.num_splits = r.forced_splits;
  forced.cluster = r.forced_cluster;
  call.sm_count = r.sm_count;
  call.plan = testing::plan_with(call.problem, card(r.sm_count), forced);
  if (call.problem.ragged && call.plan.listed) { call.metadata = model_metadata(schedule_kernel_of(call)); }
}

Request random_request(Random& random) {
  Request r;
  r.alike = pick(random, 0, 5) == 0;
  int const kind = pick(random, 0, 5);
  int const batch = kind <= 1 ? one_of<int>(random, {1, 2, 31, 32, 33, 64, 255, 257, 1030}) : pick(random, 1, 9);
  auto const length = [&](int longest) {
    int const which = pick(random, 0, 7);
    return which == 0 ? 0 : which == 1 ? 1 : which <= 4 ? pick(random, 0, 200) : pick(random, 0, longest);
  };
  int const ranks = pick(random, 0, 7) == 0 ? pick(random, 2, 4) : 1;
  int const rank = pick(random, 0, ranks - 1);
  SeqlenQK const same{pick(random, 1, 70), length(9000)};
  for (int b = 0; b < batch; ++b) {
    int const q = kind <= 1 ? pick(random, 0, kind * 3 + 1) : kind == 2 ? length(200) : length(3000);
    int const total = std::max(length(kind <= 1 ? 1500 : 9000), kind == 5 ? q : 0);
    int const here = std::max(0, (total - rank + ranks - 1) / ranks);
    r.lengths.push_back(r.alike ? same : SeqlenQK{q, here, total});
  }
  if (r.alike) {
    r.lengths.resize(std::min<std::size_t>(r.lengths.size(), 40));
  } else {
    r.packed_q = pick(random, 0, 1) == 0;
    r.packed_k = pick(random, 0, 3) == 0;
    r.leftpad = r.packed_k || ranks > 1 || pick(random, 0, 2) != 0 ? 0 : pick(random, 1, 90);
    r.slack = pick(random, 0, 2) == 0 ? pick(random, 0, 1000) : 0;
    r.options.cp_world_size = ranks;
    r.options.cp_rank = rank;
  }
  if (!r.alike && ranks == 1 && pick(random, 0, 7) == 0) {  // on the device, but there are rows for nothing else
    r.lengths.assign(r.lengths.size(), {pick(random, 1, 600), pick(random, 1, 3000)});
    r.packed_q = r.packed_k = true;
    r.slack = r.leftpad = 0;
  }
  r.page_unit = r.packed_k || r.alike ? 1 : one_of<int>(random, {1, 8, 64});
  std::tie(r.heads_q, r.heads_k) = one_of<std::pair<int, int>>(
      random, {{1, 1}, {4, 4}, {8, 2}, {8, 1}, {24, 8}, {5, 1}, {24, 1}, {130, 2}, {64, 1}});
  r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
  r.sm_count = one_of<int>(random, {1, 2, 48, 114, 132});
  r.options.num_splits = one_of<int>(random, {0, 0, 1, 2, 3, 7, 256});
  r.options.batch_invariant = pick(random, 0, 3) == 0;
  r.forced_splits = pick(random, 0, 3) == 0 ? one_of<int>(random, {2, 3, 7, 256}) : 0;
  r.forced_cluster = pick(random, 0, 1) == 0 ? -1 : 0;
  r.options.causal = pick(random, 0, 1) == 0;
  if (pick(random, 0, 3) == 0) { r.options.window_left = pick(random, 0, 2000); }
  if (pick(random, 0, 5) == 0) { r.options.window_right = pick(random, 0, 300); }
  if (pick(random, 0, 6) == 0) { r.options.attention_chunk = pick(random, 1, 3000); }
  return r;
}

struct Done {
  WorkItem item;
  TileWork work;
  int cta;
  int index;  // of the tile in the list; -1 where work is shared out by units
};

// What a source of work may find in its caller's item: that of a tile before.
constexpr WorkItem kStaleItem{.place = 1,
                              .head = 2,
                              .m = 3,
                              .first = 4,
                              .last = 5,
                              .units = 6,
                              .slot = 7,
                              .in_cluster = true,
                              .part = TilePart::kBetween};

enum class Turn { kRandom, kLeastLoaded, kLastFirst };

char const* const kSecondOfFew = "a second tile of a sequence of few queries";
char const* const kTooManyEmpty = "more than two tiles without queries of a sequence and head group";

// Runs all CTAs of a kernel, each as the scheduler warp of attention_kernel.h does, in a random order, as if every
// unit, or block of keys where tiles are in even parts, took the same time, or so that the last CTA ends before another
// begins; fills `done`. Returns what is wrong; empty if nothing is.
template <class MakeSource>
std::string run_drawing(AttentionParams const& params, KernelPlan const& kernel, Random& random, Turn turn,
                        std::vector<Done>& done, MakeSource make_source) {
  int const slabs = slabs_of(kernel.tile);
  std::int64_t most_items = kernel.most_units + kernel.most_tiles;
  if (kernel.family == KernelFamily::kDecode) {  // in damaged metadata any sequence may be one of few queries
    int most_queries = 0;
    for (int b = 0; b < params.schedule.batch; ++b) {
      most_queries = std::max(most_queries, sequence_at(params.sequences, b).len.q);
    }
    most_items += kernel.most_tiles * ceil_div(most_queries, params.packing.queries_per_slab);
  }
  struct Cta {
    explicit Cta(MakeSource& make) : source(make()) {}
    decltype(make_source()) source;
    int round = 0;
  };
  std::deque<Cta> ctas;                            // never moved: what a source has not seen yet is not set
  std::set<std::pair<std::int64_t, int>> running;  // by units done, or by a random number
  auto const next_turn = [&](std::int64_t key, int c, int units) {
    if (turn == Turn::kLastFirst) { return c + 1 == kernel.ctas ? std::int64_t{-1} : key; }
    return turn == Turn::kRandom ? static_cast<std::int64_t>(random()) : key + units;
  };
  for (int c = 0; c < kernel.ctas; ++c) {
    ctas.emplace_back(make_source);
    running.insert({next_turn(0, c, 0), c});
  }
  std::map<int*, unsigned> counters;
  bool const by_units = Schedule(params.schedule).by_units();
  int const few_begin = Schedule(params.schedule).few_begin();
  bool const even = Schedule(params.schedule).numbers().even_parts();
  std::map<std::pair<int, int>, int> empty;  // whole resized tiles without queries, of a place and head group
  bool has_second_of_few = false;
  while (!running.empty()) {
    auto const [key, c] = *running.begin();
    running.erase(running.begin());
    int index = -1;
    auto const draw = [&, number = c](Draws const& draws) {
      index = draws.item(number, ctas[static_cast<std::size_t>(number)].round++);
      if (index != Draws::kFromCounter) { return index; }
      unsigned& counter = counters[draws.counter];  // atomicInc
      unsigned const old = counter;
      counter = old >= draws.last_of_counter() ? 0 : old + 1;
      return index = draws.first_of_counter() + static_cast<int>(old);
    };
    WorkItem item = kStaleItem;
    Sequence sequence{};
    ctas[static_cast<std::size_t>(c)].source.next(item, sequence, draw);
    if (item.place < 0) { continue; }
    if (static_cast<std::int64_t>(done.size()) >= most_items) { return "more items than there can be"; }
    if (item.place >= params.schedule.batch || item.head < 0 || item.head >= params.schedule.head_groups.divisor ||
        item.m < 0 || item.first < 0 || item.first >= item.last || item.last > item.units) {
      return "an item out of bounds";
    }
    if (item.slot < -1 || item.slot >= kernel.partial_slots) { return "a slot out of bounds"; }
    TileWork const work = tile_work(params, slabs, kernel.tile.keys, item, sequence);
    running.insert({next_turn(key, c, even ? work.range.blocks() : item.last - item.first), c});
    if (params.schedule.resized.on() && !by_units && work.queries.last < work.queries.first) {
      has_second_of_few |= kernel.tile.calls == Calls::kMixedMany && item.place >= few_begin && item.m > 0;
      ++empty[{item.place, item.head}];
      continue;
    }
    done.push_back({item, work, c, index});
  }
  for (auto const& [counter, value] : counters) {
    int const* const end = params.schedule.metadata + 1 + 4 * schedule_stride(params.schedule.batch);
    if (counter < params.schedule.metadata || counter >= end) { return "a counter outside the metadata"; }
    if (value != 0) { return "a counter is not back at 0"; }
  }
  for (auto const& [where, count] : empty) {
    if (count > 2) { return kTooManyEmpty; }
  }
  if (has_second_of_few) { return kSecondOfFew; }
  return "";
}

// What the scheduler warp of a kernel of few queries takes its work from.
WorkFrom work_of(AttentionParams const& params) {
  if (params.cluster.by_schedule) { return work_from(params.cluster, params.schedule, params.schedule.metadata); }
  return work_from(params);
}

// A copy of the metadata; empty without any.
std::vector<int> copy_of(ScheduleParams const& params) {
  if (params.metadata == nullptr) { return {}; }
  return {params.metadata, params.metadata + schedule_words(params.stride)};
}

// A source of work with what it remembers, at an address that stays. As in kernels that guess, the first item is found
// in a copy of the metadata, which is gone when the next one is.
template <class Source>
struct WithState {
  WithState(AttentionParams const& params, TileConfig const& tile)
      : copy(copy_of(params.schedule)),
        state(Schedule(params.schedule, copy.empty() ? nullptr : copy.data())),
        first(params, copy.empty() ? nullptr : copy.data(), state, slabs_of(tile), tile.keys),
        source(params, params.schedule.metadata, state, slabs_of(tile), tile.keys) {}
  WithState(WithState const&) = delete;

  template <class Draw>
  void next(WorkItem& item, Sequence& sequence, Draw draw) {
    (begun ? source : first).next(item, sequence, draw);
    if (!begun && !first.lengths_hold()) { throw std::logic_error("lengths are said to have changed"); }
    begun = true;
    std::fill(copy.begin(), copy.end(), -1);
  }

  std::vector<int> copy;
  bool begun = false;
  typename Source::State state;
  Source first;
  Source source;
};

std::string run_kernel(AttentionParams const& params, KernelPlan const& kernel, Random& random, Turn turn,
                       std::vector<Done>& done) {
  auto const run = [&](auto make_source) { return run_drawing(params, kernel, random, turn, done, make_source); };
  if (kernel.family == KernelFamily::kPrefill) {
    if (kernel.tile.calls == Calls::kMixedMany) {
      return run([&] { return WithState<WorkSource<32, FewAlone>>(params, kernel.tile); });
    }
    if (slabs_of(kernel.tile) >= 3) {
      return run([&] { return WithState<WorkSource<1>>(params, kernel.tile); });
    }
    return run([&] { return WithState<WorkSource<32>>(params, kernel.tile); });
  }
  Schedule const schedule(params.schedule);
  bool const drawn = work_of(params) == WorkFrom::kDrawnTiles;
  if (!drawn && schedule.by_units()) {
    return run([&] { return UnitSource<>(params, schedule, kernel.tile.keys); });
  }
  DrawnTiles const tiles =
      drawn ? drawn_tiles(params.cluster, params.sequences.batch) : drawn_tiles(schedule, params.schedule);
  if (kernel.tile.calls == Calls::kInParts) {
    return run([&] { return FoldedTileSource(params, tiles, kernel.tile.keys); });
  }
  return run([&] { return DrawnTileSource(params, tiles); });
}

// Tiles that follow from their index, also those of queries that a sequence does not have.
std::vector<Done> run_tile_list(AttentionParams const& params, KernelPlan const& kernel) {
  std::vector<Done> done;
  std::vector<RankedSequence> room(kMostRankedSequences);
  for (int cta = 0; cta < kernel.ctas; ++cta) {
    auto const run = [&](auto source) {
      for (;;) {
        WorkItem item = kStaleItem;
        Sequence sequence{};
        source.next(item, sequence, 0);
        if (item.place < 0) { break; }
        done.push_back({item, tile_work(params, slabs_of(kernel.tile), kernel.tile.keys, item, sequence), cta, -1});
      }
    };
    if (kernel.ranked) {
      run(RankedTileSource(params, kernel.tile.keys, cta, room.data()));
    } else {
      bool const listed = kernel.tile.calls != Calls::kDense;
      int const queries = listed ? slabs_of(kernel.tile) * params.packing.queries_per_slab : 0;
      run(DenseWorkSource(params, cta, params.parts.on(), queries));
    }
  }
  return done;
}

// Of tiles by rank, which are in order of their length as far as they are alike or get longer by as many keys as they
// have queries.
std::string rank_fault(AttentionParams const& params, KernelPlan const& kernel, std::vector<Done> const& done) {
  std::map<int, int> rounds;                  // of a CTA, so far
  std::map<std::pair<int, int>, int> blocks;  // by round, and place in it
  for (Done const& d : done) {
    if (d.work.queries.last < d.work.queries.first) { return "a tile without queries"; }
    int const round = rounds[d.cta]++;
    blocks[{round, round % 2 == 0 ? d.cta : -d.cta}] = d.work.range.blocks();
  }
  // Blocks may begin before the first key of a sequence, and the first tile of one may lack a slab.
  int const tolerance = 1 + ceil_div(params.ranked.queries.divisor, kernel.tile.keys);
  int least = 1 << 30;
  for (auto const& [place, count] : blocks) {
    if (count > least + tolerance) { return "a tile behind shorter ones"; }
    least = std::min(least, count);
  }
  return "";
}

// Of a grid of clusters that share two tiles. `fault`: of what the CTAs of one must agree on.
std::vector<Done> run_pairs(AttentionParams const& params, KernelPlan const& kernel, std::string& fault) {
  std::vector<Done> done;
  std::vector<Done> shared;  // of the CTA of the cluster before
  std::vector<RankedSequence> room(kMostRankedSequences);
  for (int cta = 0; cta < kernel.ctas; ++cta) {
    int const rank = cta % kernel.blocks_of_pair;
    if (rank == 0) { shared.clear(); }
    std::size_t taken = 0;
    int const slabs = slabs_of(kernel.tile);
    PairedTileSource<AlikeTiles> alike(params, slabs, kernel.tile.keys, cta, room.data());
    PairedTileSource<RankedTiles> ranked(params, slabs, kernel.tile.keys, cta, room.data());
    bool const are_alike = params.ranked.alike > 0;
    for (int calls = 0;; ++calls) {
      WorkItem item = kStaleItem;
      Sequence sequence{};
      are_alike ? alike.next(item, sequence, 0) : ranked.next(item, sequence, 0);
      if (item.place < 0) { break; }
      if (calls > 100'000) { fault = "no end"; }
      if (!fault.empty()) { return done; }
      TileWork const work = are_alike ? alike.work(item, sequence) : ranked.work(item, sequence);
      if (work.queries.last < work.queries.first) { continue; }
      Done const now{item, work, cta, -1};
      if (item.slot != -1) { fault = "a slot of the workspace"; }
      if (!work.in_cluster || !work.range.empty()) { done.push_back(now); }
      if (!work.in_cluster) { continue; }
      if (rank == 0) {
        if (item.first != 0) { fault = "keys that no CTA has"; }
        shared.push_back(now);
      } else if (taken == shared.size()) {
        fault = "a part of a tile that others do not merge";
      } else {
        Done& other = shared[taken++];
        bool const same = other.item.place == item.place && other.item.head == item.head && other.item.m == item.m;
        if (!same || other.item.last != item.first) { fault = "parts that do not fit together"; }
        other = now;
      }
      if (rank == kernel.blocks_of_pair - 1 && item.last != item.units) { fault = "keys that no CTA has"; }
    }
    if (rank > 0 && taken != shared.size()) { fault = "a part that nobody merges"; }
  }
  return done;
}

// Of clusters that have one pair each: whether the CTAs that share a tile have as much to do as each other. The first
// of more than two may be a little longer at the short tile of the pair.
bool are_equal(AttentionParams const& params, std::vector<Done> const& done) {
  int const ctas = params.pairs.size.ctas.divisor;
  std::vector<int> blocks(static_cast<std::size_t>(ctas * params.pairs.clusters));
  std::set<int> sharing;  // clusters
  for (Done const& d : done) {
    blocks[static_cast<std::size_t>(d.cta)] +=
        d.work.range.blocks() + (d.work.in_cluster ? 0 : params.pairs.blocks_of_ends);
    if (d.work.in_cluster) { sharing.insert(d.cta / ctas); }
  }
  return std::ranges::all_of(sharing, [&](int c) {
    auto const first = blocks.begin() + c * ctas;
    if (ctas == 2) { return std::abs(first[0] - first[1]) <= 1; }
    int const share = ceil_div(std::accumulate(first, first + ctas, 0), ctas);
    return first[0] <= share + 2 * kWorthSharing && *std::max_element(first + 1, first + ctas) <= share + 1;
  });
}

// The parts of a tile, if it has any, are merged by a cluster.
bool takes_whole_tiles(WorkFrom from) { return from == WorkFrom::kClusters || from == WorkFrom::kDrawnTiles; }

using TileName = std::tuple<int, int, int>;  // sequence, head group, query block

struct Part {
  int begin, end;  // key blocks
  int slot;
};

// Whether each part has as many blocks as the others, or one more.
bool are_equal(std::vector<Part> const& parts) {
  auto const blocks = [](Part const& part) { return part.end - part.begin; };
  auto const [least, most] = std::ranges::minmax(parts, {}, blocks);
  return blocks(most) <= blocks(least) + 1;
}

std::map<TileName, std::vector<Part>> parts_of_tiles(AttentionParams const& params, std::vector<Done> const& done) {
  std::map<TileName, std::vector<Part>> tiles;
  for (Done const& d : done) {
    if (d.work.queries.last < d.work.queries.first || !params.takes(d.work.sequence)) { continue; }
    tiles[{d.work.sequence.batch, d.work.head, d.item.m}].push_back(
        {d.work.range.begin, d.work.range.end, d.work.slot});
  }
  for (auto& [name, parts] : tiles) {
    std::stable_sort(parts.begin(), parts.end(), [](Part const& a, Part const& b) {
      return std::pair(a.begin, a.slot) < std::pair(b.begin, b.slot);
    });
  }
  return tiles;
}

// Every key block of every query block once, by the kernel of the sequence's class.
std::string coverage_fault(Call const& call, KernelPlan const& kernel, AttentionParams const& params,
                           std::map<TileName, std::vector<Part>> const& tiles) {
  int const groups = call.problem.heads_q / call.plan.packed_heads;
  int const queries = params.packing.queries_per_slab * slabs_of(kernel.tile);
  bool const by_cluster = kernel.family == KernelFamily::kDecode && takes_whole_tiles(work_of(params));
  int const few = schedule_kernel_of(call).decode.queries;
  // Kernels that find their tiles without a schedule have classes of their own.
  bool const by_rows = call.plan.kernels.front().least_queries > 0;
  std::size_t expected = 0;
  for (int b = 0; b < call.problem.batch; ++b) {
    Sequence const sequence = sequence_at(call.sequences, b);
    bool const mine =
        call.plan.kernels.size() == 1 || by_rows || (sequence.len.q <= few) == (kernel.family == KernelFamily::kDecode);
    if (!mine || !params.takes(sequence)) { continue; }
    for (int m = 0; m * queries < sequence.len.q; ++m) {
      QueryRange const rows = query_range(params.packing, slabs_of(kernel.tile), m, sequence.len.q);
      BlockRange const all = block_range(call.problem.mask, rows.first, rows.last, sequence.len, kernel.tile.keys,
                                         {call.page_unit, sequence.k_row});
      for (int head = 0; head < groups; ++head) {
        ++expected;
        std::string const where = " of sequence " + std::to_string(b) + ", head " + std::to_string(head) +
                                  ", query block " + std::to_string(m);
        auto const found = tiles.find({b, head, m});
        if (found == tiles.end()) { return "nobody takes the tile" + where; }
        std::vector<int> visits(static_cast<std::size_t>(all.blocks()), 0);
        for (Part const& part : found->second) {
          if (part.begin < part.end && (part.begin < all.begin || part.end > all.end)) {
            return "a part outside" + where;
          }
          for (int n = part.begin; n < part.end; ++n) { ++visits[static_cast<std::size_t>(n)]; }
          if (by_cluster || is_paired(kernel)) { continue; }
          if (part.slot < 0 && found->second.size() > 1) { return "a whole tile and more" + where; }
          if (part.slot >= 0 && found->second.size() == 1) { return "a single part" + where; }
        }
        int const ctas = std::max(1, params.cluster.size) *
                         (params.cluster.first_takes_all(sequence.len) ? 1 : params.cluster.of_tile);
        bool const in_parts = params.cluster.longest_part > 0;  // counted elsewhere
        if (by_cluster && !in_parts && static_cast<int>(found->second.size()) != ctas) {
          return "not one part for each CTA of the cluster" + where;
        }
        for (int const count : visits) {
          if (count != 1) { return "a block is visited " + std::to_string(count) + " times" + where; }
        }
      }
    }
  }
  return tiles.size() == expected ? "" : "tiles that do not exist";
}

std::string slot_fault(std::vector<Done> const& done) {
  std::set<int> slots;
  for (Done const& d : done) {
    if (d.item.slot >= 0 && !slots.insert(d.item.slot).second) {
      return "two parts share slot " + std::to_string(d.item.slot);
    }
  }
  return "";
}

// Of tiles that a CTA takes part by part: as many as every call cuts them into, in the order of the keys, one after the
// other, and nothing in between.
std::string folded_fault(Call const& call, std::vector<Done> const& done) {
  TileShape const shape = schedule_kernel_of(call).decode;
  std::map<int, WorkItem> unfinished;  // of a CTA
  for (Done const& d : done) {
    WorkItem const& item = d.item;
    int const parts = sequence_work(shape, call.problem.mask, d.work.sequence.len).units;
    if (item.units != parts || item.last != item.first + 1) { return "other parts than those that may be shared out"; }
    if (item.slot >= 0) { return "a part with a slot"; }
    auto const before = unfinished.find(d.cta);
    if (before == unfinished.end()) {
      if (item.first != 0 || !begins_tile(d.work.part)) { return "a tile that does not begin"; }
    } else {
      WorkItem const& last = before->second;
      bool const same = last.place == item.place && last.head == item.head && last.m == item.m;
      if (!same || item.first != last.last || begins_tile(d.work.part)) {
        return "parts that do not follow each other";
      }
      unfinished.erase(before);
    }
    if ((item.last == item.units) != ends_tile(d.work.part)) { return "a tile that ends elsewhere"; }
    if (item.last < item.units) { unfinished[d.cta] = item; }
  }
  return unfinished.empty() ? "" : "a tile that does not end";
}

// With batch_invariant a tile is in the parts that follow from it alone, whoever takes them.
std::string fixed_parts_fault(Call const& call, std::map<TileName, std::vector<Part>> const& tiles) {
  TileShape const shape = schedule_kernel_of(call).decode;
  for (auto const& [name, parts] : tiles) {
    Sequence const sequence = sequence_at(call.sequences, std::get<0>(name));
    if (sequence.len.q > shape.queries) { continue; }  // prefill, or more than the bound
    auto const count = std::ranges::count_if(parts, [](Part const& part) { return part.begin < part.end; });
    int const expected = sequence_work(shape, call.problem.mask, sequence.len).units;
    if (count != expected && (count != 0 || expected != 1)) { return "other parts than follow from the tile"; }
  }
  return "";
}

// What the combine kernel finds, against the slots that were written.
std::string combine_fault(Call& call, KernelPlan const& kernel, std::map<TileName, std::vector<Part>> const& tiles) {
  SplitCombineTask task;
  task.schedule = schedule_of(call, kernel);
  task.packing = make_packing(call.plan.packed_heads, rows_of_slab(kernel.tile));
  task.mask = call.problem.mask;
  task.slabs = slabs_of(kernel.tile);
  task.keys = kernel.tile.keys;
  task.cluster = cluster_params(call.plan, kernel, call.problem.heads_q);
  set_metadata(task.cluster, call.plan, call.metadata.data());
  task.parts = equal_parts(kernel);
  if (task.parts.on()) { task.tiles = tile_list(call.plan, kernel, call.problem); }
  bool const by_tile = call.plan.fixed_splits || task.cluster.on() || task.parts.on();
  task.candidates = static_cast<int>(by_tile ? kernel.most_tiles : kernel.partial_slots / 2 - 1);
  std::map<TileName, std::set<int>> merged;  // shares of a tile's rows
  std::map<TileName, int> rows_shared;       // in so many
  for (int i = 0; i < task.candidates; ++i) {
    Sequence sequence{};
    PartedTile const tile = find_parted_tile<KernelFamily::kPrefill>(task, call.sequences, sequence, i);
    if (tile.place < 0) { continue; }
    TileName const name{sequence.batch, tile.head, tile.m};
    auto const found = tiles.find(name);
    if (task.cluster.on() && sequence.len.q == 0) { continue; }
    if (found == tiles.end()) { return "a tile is merged that nobody computed"; }
    std::set<int>& shares = merged[name];
    if (tile.share < 0 || tile.share >= tile.shares) { return "a share of a tile's rows that does not exist"; }
    if (!shares.insert(tile.share).second) { return "a share of a tile's rows is merged twice"; }
    rows_shared[name] = tile.shares;
    std::set<int> written;
    for (Part const& part : found->second) { written.insert(part.slot); }
    std::set<int> read;
    for (int part = 0; part < tile.parts.count; ++part) { read.insert(tile.parts.slot(part)); }
    if (read != written || static_cast<int>(read.size()) != tile.parts.count) {
      return "other slots are merged than written";
    }
  }
  for (auto const& [name, parts] : tiles) {
    bool const leaves_parts = parts.size() > 1 && parts.front().slot >= 0;
    if (leaves_parts != merged.contains(name)) { return "a tile in parts is not merged, or another one"; }
    if (leaves_parts && static_cast<int>(merged[name].size()) != rows_shared[name]) {
      return "a share of a tile's rows is not merged";
    }
  }
  return "";
}

// Long tiles before short ones, to an eighth, in each class; all prefill tiles before decode. Where tiles are of
// another size than those that metadata count, sequences of as many units whose tiles are as many once they are rounded
// run together, also those of different classes.
std::string order_fault(Call const& call, AttentionParams const& params, std::vector<Done> done) {
  std::erase_if(done, [](Done const& d) { return !begins_tile(d.work.part); });
  std::sort(done.begin(), done.end(), [](Done const& a, Done const& b) { return a.index < b.index; });
  std::vector<ModelPlace> const places = model_places(schedule_kernel_of(call));
  auto const place = [&](Done const& d) { return places[static_cast<std::size_t>(d.item.place)]; };
  auto const work = [&](Done const& d) { return std::pair(place(d).work.tiles, place(d).work.units); };
  bool const in_turn = params.schedule.resized.on() || params.schedule.fixed_splits;
  int const few_begin = Schedule(params.schedule).few_begin();
  std::array<Done const*, 2> before{};  // of each class, which may alternate in a kernel for both
  int index = -1;
  for (Done const& d : done) {
    Done const*& last = before[params.schedule.mixed && d.item.place >= few_begin ? 1 : 0];
    bool const together = in_turn && last != nullptr && work(d) == work(*last);
    if (last != nullptr && place(d).rank() < place(*last).rank() && !together) { return "a longer tile comes later"; }
    if (d.index == std::exchange(index, d.index)) { return "a tile was drawn twice"; }
    last = &d;
  }
  return "";
}

// The same where tiles are in parts that follow from them alone: each CTA has one, or a group of them, or a whole tile.
// Where any is shared, all CTAs of the cluster must come to merge it.
std::string run_clusters_in_parts(AttentionParams const& params, KernelPlan const& kernel, std::vector<Done>& done) {
  int const size = params.cluster.size;
  std::vector<TileName> leader;
  for (int cta = 0; cta < kernel.ctas; ++cta) {
    int const rank = cta % size;
    ClusterPartsSource source(params, kernel.tile.keys, cta);
    std::vector<TileName> merged;
    std::optional<WorkItem> before;  // of a group that has not ended
    for (int calls = 0;; ++calls) {
      if (calls > 100'000) { return "no end"; }
      WorkItem item = kStaleItem;
      Sequence sequence{};
      source.next(item, sequence, 0);
      if (item.place < 0) { break; }
      if (item.slot >= 0) { return "a part with a slot"; }
      TileWork const work = tile_work(params, slabs_of(kernel.tile), kernel.tile.keys, item, sequence);
      if (work.queries.last < work.queries.first) { continue; }
      bool const shared = item.units > 1;
      if (item.in_cluster != shared || (!shared && rank > 0)) { return "a whole tile of another"; }
      bool const one_each = item.units <= size;
      if ((item.part == TilePart::kWhole) == shared || (item.part == TilePart::kPart) != (shared && one_each)) {
        return "CTAs that do not agree on how to merge";
      }
      int const parts = one_each ? 1 : kPartsOfGroup;
      int const begin = std::min(rank * parts, item.units);
      int const end = std::min(begin + parts, item.units);
      if (shared && (item.first < begin || item.last > end)) { return "the part of another"; }
      if (begins_tile(item.part) != !before || (before && before->last != item.first)) {
        return "parts that do not follow each other";
      }
      if (begins_tile(item.part) && shared && item.first != begin) { return "parts that nobody takes"; }
      before = ends_tile(item.part) ? std::nullopt : std::optional(item);
      if (ends_tile(item.part) && shared && item.last != end) { return "parts that nobody takes"; }
      if (ends_tile(item.part) && shared) { merged.emplace_back(sequence.batch, item.head, item.m); }
      done.push_back({item, work, cta, -1});
    }
    if (before) { return "a group that does not end"; }
    if (rank == 0) { leader = merged; }
    if (merged != leader) { return "CTAs of a cluster do not merge the same tiles"; }
  }
  return "";
}

// Runs all CTAs of a grid of clusters. CTAs of a cluster wait for each other at every tile, so that they must take the
// same ones in the same order.
template <class Tiles>
std::string run_clusters_of(AttentionParams const& params, KernelPlan const& kernel, std::vector<Done>& done) {
  ClusterParams const& cluster = params.cluster;
  std::vector<TileName> leader;
  for (int cta = 0; cta < kernel.ctas; ++cta) {
    ClusterWorkSource<Tiles> source(params, cta);
    int const rank = cta % (cluster.size * cluster.of_tile);
    std::vector<TileName> mine;
    for (int calls = 0;; ++calls) {
      if (calls > 100'000) { return "no end"; }
      WorkItem item = kStaleItem;
      Sequence sequence{};
      source.next(item, sequence, 0);
      if (item.place < 0) { break; }
      bool const alone = cluster.first_takes_all(sequence.len);
      int const slot = cluster.of_tile > 1 && !alone ? cta / cluster.size : -1;
      bool const own = item.first == rank && item.last == rank + 1;
      if (!own || item.units != cluster.size * (alone ? 1 : cluster.of_tile)) { return "the part of another"; }
      if (item.slot != slot || slot >= kernel.partial_slots) { return "the slot of another"; }
      if (item.in_cluster != (cluster.size > 1)) { return "a part that nobody merges"; }
      TileWork const work = tile_work(params, slabs_of(kernel.tile), kernel.tile.keys, item, sequence);
      if (work.queries.last < work.queries.first) { continue; }
      if (work.queries.last - work.queries.first >= params.packing.queries_per_slab) { return "too many queries"; }
      int const rows = params.packing.queries_per_slab * params.packing.heads.divisor;
      int const most_rows = cluster.size > 1 ? most_merge_rows(kernel.tile, cluster.size) : kernel.tile.rows;
      if (rows > most_rows) { return "more rows than the tile has or the CTAs merge"; }
      mine.emplace_back(sequence.batch, item.head, item.m);
      done.push_back({item, work, cta, -1});
    }
    if (cta % std::max(1, cluster.size) == 0) { leader = mine; }
    if (mine != leader) { return "CTAs of a cluster do not take the same tiles"; }
  }
  return "";
}

std::string run_clusters(AttentionParams const& params, KernelPlan const& kernel, std::vector<Done>& done) {
  bool const in_parts = kernel.tile.calls == Calls::kInParts && params.cluster.size > 1;
  return in_parts                            ? run_clusters_in_parts(params, kernel, done)
         : kernel.tile.rows == kMostSomeRows ? run_clusters_of<SeveralTilesEach>(params, kernel, done)
                                             : run_clusters_of<OneTileEach>(params, kernel, done);
}

struct Seen {
  int classes = 0;
  int by_units = 0, by_tiles = 0, fixed = 0, alike = 0, parted = 0, two_kernels = 0, clusters = 0, drawn = 0;
  int two_decode_kernels = 0;
  int by_index = 0, by_rank = 0;
  int in_equal_parts = 0, whole_instead = 0;
  int in_pairs = 0, whole_of_pairs = 0;
  int clusters_by_schedule = 0, drawn_by_schedule = 0, units_by_schedule = 0, folded = 0, clusters_in_parts = 0;
  int merged_jointly = 0, in_many_parts = 0;
  int resized_by_units = 0, leaves_sms = 0, mixed_by_units = 0, mixed_by_tiles = 0;
  int mixed_by_number = 0;  // by tiles, those of few queries by their number
  int drafts_in_parts = 0;  // that metadata count among sequences of many queries, in a kernel for few
};

// What CTAs merge that have left parts of tiles: all parts of each tile, which counts them in a word of its own. A CTA
// remembers few of them.
std::string joint_merge_fault(AttentionParams const& params, std::vector<Done> const& done, Seen& seen) {
  Chunks const chunks = Schedule(params.schedule).chunks();
  std::map<TileName, std::set<int>> left;
  std::map<TileName, TileParts> found;
  std::map<int, TileName> counts;  // what each word counts
  std::map<int, int> of_cta;
  for (Done const& d : done) {
    if (d.item.slot < 0) { continue; }
    TileName const name{d.item.place, d.item.head, d.item.m};
    int const chunk = d.item.slot / 2;
    // The slot tells whether the tile begins in the chunk, and then ends behind it.
    int const begin = d.item.slot % 2 == 0 ? chunks.begin(chunk) - d.item.first : chunks.begin(chunk + 1) - d.item.last;
    TileParts const all = ArrivingPart{chunks, begin, begin + d.item.units, 0}.parts();
    if (all.first_slot < 0 || all.first_slot >= 2 * params.schedule.ctas) { return "a word that does not exist"; }
    if (counts.insert({all.first_slot, name}).first->second != name) { return "a word that counts two tiles"; }
    if (++of_cta[d.cta] > kMostPartsLeft) { return "more parts of a CTA than it remembers"; }
    left[name].insert(d.item.slot);
    found[name] = all;
  }
  for (auto const& [name, all] : found) {
    std::set<int> merged;
    for (int i = 0; i < all.count; ++i) { merged.insert(all.slot(i)); }
    if (merged != left[name]) { return "a tile whose parts are not those that are merged"; }
    if (all.count > kMostPartsOfTile) { return "more parts than can be counted"; }
    seen.in_many_parts += all.count > 16;
  }
  seen.merged_jointly += !found.empty();
  return "";
}

// Units of the busiest CTA, over those of all.
struct Load {
  std::int64_t most = 0;
  std::int64_t all = 0;
};

Load load_of(int ctas, std::vector<Done> const& done) {
  std::vector<std::int64_t> units(static_cast<std::size_t>(ctas));
  Load load;
  for (Done const& d : done) {
    std::int64_t& mine = units[static_cast<std::size_t>(d.cta)];
    mine += d.item.last - d.item.first;
    load.most = std::max(load.most, mine);
    load.all += d.item.last - d.item.first;
  }
  return load;
}

// Tiles in even parts: a CTA takes one at most of those that are cut, and has a slot for it.
std::string even_parts_fault(Schedule const& schedule, Chunks const& chunks, std::vector<Done> const& done) {
  if (chunks.size % kUnitsOfPart != 0 && chunks.count > schedule.ctas()) { return "chunks that begin inside a part"; }
  std::map<int, int> cut;  // parts of each CTA
  for (Done const& d : done) {
    bool const whole = d.item.last - d.item.first == d.item.units;
    if (whole != (d.item.slot < 0)) { return "a part without a slot"; }
    cut[d.cta] += !whole;
  }
  for (auto const& [cta, parts] : cut) {
    if (parts > (chunks.size > kUnitsOfPart ? 2 : 1)) { return "a CTA with several parts of tiles"; }
  }
  return chunks.cutting <= schedule.ctas() ? "" : "more chunks cut tiles than there are CTAs";
}

// By units all CTAs get the same, but for the last; fixed splits and even parts are drawn as CTAs are done.
std::string share_fault(AttentionParams const& params, KernelPlan const& kernel, Random& random,
                        std::map<TileName, std::vector<Part>> const& tiles) {
  Schedule const schedule(params.schedule);
  Chunks const chunks = schedule.chunks();
  bool const fixed = params.schedule.fixed_splits;
  bool const even = schedule.numbers().even_parts();
  if (!fixed && 2 * std::int64_t{chunks.cutting} > kernel.partial_slots) {
    return "more chunks than the plan has slots for";
  }
  if (!even && chunks.cutting != chunks.count) { return "a chunk without slots"; }
  for (int c = 0; c < chunks.count; ++c) {
    int const begin = chunks.begin(c);
    int const end = chunks.begin(c + 1);
    if (begin >= end || chunks.of(begin) != c || chunks.of(end - 1) != c) { return "a chunk that is not one"; }
  }
  if (chunks.begin(chunks.count) != schedule.units()) { return "chunks do not hold all units"; }
  std::vector<Done> done;
  std::string const fault = run_kernel(params, kernel, random, Turn::kLeastLoaded, done);
  if (!fault.empty()) { return fault; }
  Load const load = load_of(params.schedule.ctas, done);
  if (load.all != schedule.units()) { return "units are missing"; }
  bool const bounded = params.schedule.max_splits >= 2;
  int const mean = ceil_div(schedule.units(), schedule.ctas());
  if (!bounded && !even && load.most > std::max(mean, params.schedule.least_units)) {
    return "a CTA has too much work";
  }
  if (even && params.schedule.share == CardShare::kAll) {
    std::string const of_parts = even_parts_fault(schedule, chunks, done);
    if (!of_parts.empty()) { return of_parts; }
  }
  for (auto const& [name, parts] : tiles) {
    if (bounded && static_cast<int>(parts.size()) > params.schedule.max_splits) { return "too many parts"; }
  }
  return "";
}

// Of two kernels the first leaves SMs to the second, whose CTAs may start at any time.
std::string card_share_fault(AttentionParams const& params, KernelPlan const& kernel, Random& random,
                             std::vector<Done> const& done) {
  Schedule const schedule(params.schedule);
  bool const in_chunks = schedule.by_units() && !params.schedule.fixed_splits;
  if (params.schedule.share == CardShare::kLeaves || (params.schedule.share == CardShare::kFirst && in_chunks)) {
    if (schedule.ctas() < 1 || schedule.ctas() > kernel.ctas) { return "a share of the card that is none"; }
    for (Done const& d : done) {
      if (d.cta >= schedule.ctas()) { return "a CTA that leaves its SM has work"; }
    }
  } else if (schedule.ctas() != kernel.ctas) {
    return "SMs are left to nobody";
  }
  if (params.schedule.share == CardShare::kTakes) {
    std::vector<Done> by_last;
    std::string const fault = run_kernel(params, kernel, random, Turn::kLastFirst, by_last);
    if (!fault.empty()) { return fault; }
    for (Done const& d : by_last) {
      if (d.cta + 1 != kernel.ctas) { return "an item that waits for a CTA which may start late"; }
    }
  }
  return "";
}

std::string cluster_fault(Call& call, KernelPlan const& kernel, Random& random, Seen& seen) {
  AttentionParams const params = params_of(call, kernel);
  bool const draws = work_of(params) == WorkFrom::kDrawnTiles;
  seen.drawn += draws;
  seen.folded += draws && params.cluster.longest_part > 0;
  seen.clusters_in_parts += params.cluster.longest_part > 0 && params.cluster.size > 1;
  std::vector<Done> done;
  std::string fault =
      draws ? run_kernel(params, kernel, random, Turn::kRandom, done) : run_clusters(params, kernel, done);
  auto const tiles = parts_of_tiles(params, done);
  if (fault.empty()) { fault = coverage_fault(call, kernel, params, tiles); }
  if (fault.empty() && draws && params.cluster.longest_part > 0) { fault = folded_fault(call, done); }
  if (fault.empty() && call.plan.fixed_splits) { fault = fixed_parts_fault(call, tiles); }
  if (fault.empty() && draws) { fault = order_fault(call, params, done); }
  if (fault.empty() && kernel.may_split) { fault = combine_fault(call, kernel, tiles); }
  return fault;
}

// Of two decode kernels, each sequence belongs to one.
std::string share_of_decode_fault(Call& call) {
  for (int b = 0; b < call.problem.batch; ++b) {
    Sequence const sequence = sequence_at(call.sequences, b);
    int takers = 0;
    int decode_kernels = 0;
    for (KernelPlan const& kernel : call.plan.kernels) {
      if (kernel.family != KernelFamily::kDecode) { continue; }
      ++decode_kernels;
      takers += params_of(call, kernel).takes(sequence);
      bool const fits = sequence.len.q * call.plan.packed_heads <= kernel.tile.rows;
      if (kernel.shares_parts && params_of(call, kernel).takes(sequence) && !fits) {
        return "more rows than the tile has";
      }
    }
    if (decode_kernels > 0 && takers != 1) { return "a sequence of " + std::to_string(takers) + " kernels"; }
  }
  return "";
}

std::string pairs_fault(Call& call, KernelPlan const& kernel, Seen& seen) {
  AttentionParams const params = params_of(call, kernel);
  std::string fault;
  std::vector<Done> const done = run_pairs(params, kernel, fault);
  if (!fault.empty()) { return fault; }
  auto const tiles = parts_of_tiles(params, done);
  for (auto const& [name, parts] : tiles) { ++(parts.size() > 1 ? seen.in_pairs : seen.whole_of_pairs); }
  bool const one_pair = params.pairs.clusters == params.pairs.pairs;
  bool const all_exist =
      params.ranked.alike == 0 || sequence_at(call.sequences, 0).len.q == query_rows_of_sequence(call.problem);
  if (one_pair && all_exist && !are_equal(params, done)) {
    return "one of the blocks that share a tile has more to do";
  }
  return coverage_fault(call, kernel, params, tiles);
}

// Whole tiles of few sequences, in order of their length.
std::string ranked_fault(Call& call, KernelPlan const& kernel, Seen& seen) {
  ++seen.by_rank;
  AttentionParams const params = params_of(call, kernel);
  std::vector<Done> const done = run_tile_list(params, kernel);
  std::string const fault = coverage_fault(call, kernel, params, parts_of_tiles(params, done));
  bool const in_order = units_rise(params.mask) || params.mask == MaskParams{};
  return fault.empty() && in_order ? rank_fault(params, kernel, done) : fault;
}

// Whether many and few queries have a kernel each that finds its tiles without a schedule.
bool has_classes(Plan const& plan) {
  return plan.kernels.size() == 2 && (is_paired(plan.kernels.front()) || plan.kernels.front().ranked);
}

std::string classes_fault(Call& call, Random& random, Seen& seen) {
  ++seen.classes;
  KernelPlan const& many = call.plan.kernels.front();
  KernelPlan const& few = call.plan.kernels.back();
  for (int b = 0; b < call.problem.batch; ++b) {
    Sequence const sequence = sequence_at(call.sequences, b);
    bool const by_few = params_of(call, few).takes(sequence);
    if (by_few == params_of(call, many).takes(sequence)) { return "a sequence of both kernels or none"; }
    if (by_few && sequence.len.q * call.plan.packed_heads > few.tile.rows) { return "more rows than the tile has"; }
  }
  std::string fault = is_paired(many) ? pairs_fault(call, many, seen) : ranked_fault(call, many, seen);
  if (fault.empty()) { fault = cluster_fault(call, few, random, seen); }
  AttentionParams const params = params_of(call, few);
  if (!fault.empty() || work_of(params) != WorkFrom::kDrawnTiles) { return fault; }
  std::vector<Done> by_last;
  fault = run_kernel(params, few, random, Turn::kLastFirst, by_last);
  for (Done const& d : by_last) {
    if (d.cta + 1 != few.ctas) { return "a tile that waits for a CTA which may start late"; }
  }
  return fault;
}

std::string call_fault(Call& call, Random& random, Seen& seen) {
  if (has_classes(call.plan)) { return classes_fault(call, random, seen); }
  if (call.plan.cluster > 0) {
    ++seen.clusters;
    return cluster_fault(call, call.plan.kernels.front(), random, seen);
  }
  if (!call.plan.listed) {
    KernelPlan const& kernel = call.plan.kernels.front();
    if (is_paired(kernel)) { return pairs_fault(call, kernel, seen); }
    if (!call.problem.ragged && kernel.equal_parts == 1 && !kernel.ranked) { return ""; }
    if (kernel.ranked) { return ranked_fault(call, kernel, seen); }
    AttentionParams const params = params_of(call, kernel);
    std::vector<Done> const done = run_tile_list(params, kernel);
    auto const tiles = parts_of_tiles(params, done);
    std::string fault = coverage_fault(call, kernel, params, tiles);
    if (kernel.equal_parts == 1) {
      ++seen.by_index;
      return fault;
    }
    for (auto const& [name, parts] : tiles) {
      ++(parts.size() > 1 ? seen.in_equal_parts : seen.whole_instead);
      if (!are_equal(parts)) { return "parts of a tile that are not equal"; }
    }
    if (fault.empty()) { fault = slot_fault(done); }
    return fault.empty() ? combine_fault(call, kernel, tiles) : fault;
  }
  if (call.plan.cluster_if_alike > 0 || call.plan.draws_if_whole) {
    WorkFrom const from = work_of(params_of(call, call.plan.kernels.front()));
    seen.clusters_by_schedule += from == WorkFrom::kClusters;
    seen.drawn_by_schedule += from == WorkFrom::kDrawnTiles;
    seen.units_by_schedule += from == WorkFrom::kSchedule;
    if (takes_whole_tiles(from)) { return cluster_fault(call, call.plan.kernels.front(), random, seen); }
  }
  seen.two_kernels += call.plan.kernels.size() == 2;
  seen.alike += !call.problem.ragged;
  std::map<TileName, std::vector<Part>> of_few;  // of the first of two decode kernels
  if (std::string const fault = share_of_decode_fault(call); !fault.empty()) { return fault; }
  for (KernelPlan const& kernel : call.plan.kernels) {
    AttentionParams const params = params_of(call, kernel);
    Schedule const schedule(params.schedule);
    if (schedule.tiles() > kernel.most_tiles || schedule.units() > kernel.most_units) {
      return "over the plan's bounds";
    }
    std::vector<Done> done;
    std::string fault = run_kernel(params, kernel, random, Turn::kRandom, done);
    if (!fault.empty()) { return fault; }
    auto const tiles = parts_of_tiles(params, done);
    fault = coverage_fault(call, kernel, params, tiles);
    if (fault.empty()) { fault = slot_fault(done); }
    if (fault.empty()) { fault = card_share_fault(params, kernel, random, done); }
    if (kernel.shares_parts) {
      ++seen.two_decode_kernels;
      of_few = tiles;
    } else if (fault.empty() && kernel.may_split) {
      auto all = tiles;
      all.insert(of_few.begin(), of_few.end());
      fault = combine_fault(call, kernel, all);
    }
    if (fault.empty() && kernel.merges_parts && schedule.by_units()) { fault = joint_merge_fault(params, done, seen); }
    bool const by_units = schedule.by_units();
    bool const fixed = params.schedule.fixed_splits && by_units;
    if (fault.empty() && by_units) { fault = share_fault(params, kernel, random, tiles); }
    if (fault.empty() && !by_units && call.problem.ragged) { fault = order_fault(call, params, done); }
    if (!fault.empty()) { return fault; }
    seen.by_units += by_units && !fixed;
    seen.by_tiles += !by_units;
    seen.resized_by_units += by_units && params.schedule.resized.on();
    seen.leaves_sms += kernel.leaves > 0;
    bool const mixed = is_mixed(kernel.tile.calls);
    (by_units ? seen.mixed_by_units : seen.mixed_by_tiles) += mixed;
    seen.mixed_by_number += kernel.tile.calls == Calls::kMixedMany && !by_units;
    seen.fixed += fixed;
    bool const counted_as_many = call.problem.ragged && schedule.few_begin() > schedule.begin();
    bool const in_parts = counted_as_many && schedule.numbers().even_parts();
    seen.drafts_in_parts += kernel.family == KernelFamily::kDecode && in_parts;
    for (auto const& [name, parts] : tiles) { seen.parted += parts.size() > 1; }
  }
  return "";
}

// Where sequences of at most `longest` rows begin.
std::vector<int> shorter_starts(Random& random, std::size_t batch, int longest) {
  std::vector<int> starts{0};
  for (std::size_t b = 0; b < batch; ++b) { starts.push_back(starts.back() + pick(random, 0, longest)); }
  return starts;
}

// The key blocks of each part, by query block, of sequence `b`'s first head.
std::map<int, std::vector<std::pair<int, int>>> cuts_of(Call& call, int b, Random& random) {
  std::map<int, std::vector<std::pair<int, int>>> cuts;
  for (KernelPlan const& kernel : call.plan.kernels) {
    std::vector<Done> done;
    AttentionParams const params = params_of(call, kernel);
    REQUIRE(run_kernel(params, kernel, random, Turn::kRandom, done) == "");
    for (auto const& [name, parts] : parts_of_tiles(params, done)) {
      auto const [sequence, head, m] = name;
      if (sequence != b || head != 0) { continue; }
      for (Part const& part : parts) { cuts[m].emplace_back(part.begin, part.end); }
    }
  }
  return cuts;
}

// Call number `i` computes every key block of every query block once, if its plan is one that is wanted.
template <class IsWanted>
void check_call(Request const& request, int i, Random& random, Seen& seen, IsWanted is_wanted) {
  CAPTURE(i);
  CAPTURE(text_of(request));
  Call call;
  make_call(request, call);
  if (is_wanted(call.plan)) { REQUIRE(call_fault(call, random, seen) == ""); }
}
void check_call(Request const& request, int i, Random& random, Seen& seen) {
  check_call(request, i, random, seen, [](Plan const& /*plan*/) { return true; });
}

}  // namespace

TEST_CASE("schedule: random calls compute every key block of every query block once and merge what was cut") {
  Random random(1);
  Seen seen;
  for (int i = 0; i < 1500; ++i) { check_call(random_request(random), i, random, seen); }
  CHECK(seen.merged_jointly > 10);
  // All paths were taken.
  CHECK(seen.by_units > 50);
  CHECK(seen.by_tiles > 50);
  CHECK(seen.leaves_sms > 20);
  CHECK(seen.fixed > 50);
  CHECK(seen.alike > 20);
  CHECK(seen.by_index > 20);
  CHECK(seen.two_kernels > 50);
  CHECK(seen.two_decode_kernels > 20);
  CHECK(seen.parted > 1000);
  CHECK(seen.clusters > 20);
  CHECK(seen.drawn > 5);
}

TEST_CASE("schedule: whole tiles of each causal prompt end with the shortest, and lengths change slowly along them") {
  // A short prompt behind a long one fills nothing of what CTAs would leave that begin the longest tiles last.
  std::vector<std::vector<SeqlenQK>> const batches{{{5000, 5000}}, {{170, 170}, {12'000, 12'000}}};
  Random random(9);
  for (std::vector<SeqlenQK> const& lengths : batches) {
    for (int const heads_k : {1, 2, 4, 8}) {
      for (int const keys_in_l2 : {0, 20'000, 1'000'000}) {  // passes of one K/V head, of some, one pass
        Request request;
        request.heads_k = heads_k;
        request.lengths = lengths;
        request.options.sm_margin = 1;  // or one prompt would need no schedule
        request.heads_q = 4 * heads_k;
        request.options.num_splits = 1;
        request.options.causal = true;
        Call call;
        make_call(request, call);
        KernelPlan const& kernel = call.plan.kernels.front();
        AttentionParams params = params_of(call, kernel);
        params.keys_in_l2 = keys_in_l2;
        CAPTURE(lengths.size());
        CAPTURE(heads_k);
        CAPTURE(keys_in_l2);
        std::vector<Done> done;
        REQUIRE(run_kernel(params, kernel, random, Turn::kRandom, done) == "");
        std::sort(done.begin(), done.end(), [](Done const& a, Done const& b) { return a.index < b.index; });
        CHECK(done.back().item.m == 0);
        CHECK(done.back().item.place + 1 == static_cast<int>(lengths.size()));
        for (std::size_t i = 1; i < done.size(); ++i) {
          if (done[i].item.place == done[i - 1].item.place) {
            CHECK(std::abs(done[i].item.m - done[i - 1].item.m) <= 1);
          } else {
            CHECK(done[i - 1].item.m == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("schedule: tiles of fewer rows than metadata count are cut, and every key block is computed once") {
  Random random(27);
  Seen seen;
  for (int i = 0; i < 800; ++i) {
    Request r;
    bool const mixed = i % 2 == 0;  // by a kernel for both classes
    r.heads_k = one_of<int>(random, {1, 2});
    r.heads_q = r.heads_k * one_of<int>(random, {4, 5, 8});
    r.options.num_splits = mixed ? 0 : one_of<int>(random, {0, 0, 3});
    r.options.causal = pick(random, 0, 3) > 0;
    r.slack_k = pick(random, 0, 3000);
    r.packed_q = !mixed || pick(random, 0, 2) > 0;  // others have no even parts
    int const of_mixed = i % 8 == 0 ? pick(random, 140, 500) : pick(random, 2, 124);
    int const singles = (mixed ? of_mixed : pick(random, 680, 720)) / r.heads_k;
    r.lengths.assign(static_cast<std::size_t>(singles), SeqlenQK{1, pick(random, 1, mixed ? 9000 : 900)});
    // Those without queries have no tile.
    for (int none = pick(random, 0, 3); none > 0; --none) { r.lengths.push_back({0, pick(random, 0, 9000)}); }
    for (int prompts = pick(random, 1, 6); prompts > 0; --prompts) {
      int const q = pick(random, 20, 1500 / r.heads_k);
      r.lengths.push_back({q, q + pick(random, 0, 1) * pick(random, 0, 16'000)});
    }
    std::shuffle(r.lengths.begin(), r.lengths.end(), random);
    check_call(r, i, random, seen);
  }
  CHECK(seen.resized_by_units > 100);
  CHECK(seen.leaves_sms > 30);
  CHECK(seen.mixed_by_units > 50);
  CHECK(seen.mixed_by_tiles > 20);
  CHECK(seen.mixed_by_number > 10);
}

TEST_CASE("schedule: a kernel for many queries takes those of few along, and every key block is computed once") {
  Random random(41);
  Seen seen;
  int in_chunks = 0, in_even_parts = 0, whole = 0;
  for (int i = 0; i < 600; ++i) {
    Request r;
    r.head_dim = one_of<int>(random, {64, 72, 96, 128, 192, 256});
    r.options.softcap = pick(random, 0, 2) == 0 ? 30.0F : 0.0F;
    r.options.sm_margin = pick(random, 0, 3) == 0 ? 30 : 0;
    r.heads_k = one_of<int>(random, {1, 2, 8});
    r.heads_q = r.heads_k * one_of<int>(random, {1, 2, 5, 8});
    r.options.num_splits = 0;
    r.options.causal = pick(random, 0, 3) > 0;
    r.slack_k = pick(random, 0, 1) * 100'000;
    r.sm_count = one_of<int>(random, {132, 132, 114, 40});
    for (int prompts = pick(random, 1, 7); prompts > 0; --prompts) {
      int const q = pick(random, 60, 700);
      r.lengths.push_back({q, q + pick(random, 0, 1) * pick(random, 0, 9000)});
    }
    for (int few = pick(random, 0, 6); few > 0; --few) {
      r.lengths.push_back({pick(random, 0, 4), pick(random, 0, 20'000)});
    }
    std::shuffle(r.lengths.begin(), r.lengths.end(), random);
    check_call(r, i, random, seen);
    Call call;
    make_call(r, call);
    KernelPlan const& kernel = call.plan.kernels.front();
    if (!call.plan.for_both || is_mixed(kernel.tile.calls)) { continue; }
    Schedule const schedule(schedule_of(call, kernel));
    (schedule.numbers().even_parts() ? in_even_parts : schedule.by_units() ? in_chunks : whole) += 1;
  }
  CHECK(in_chunks > 50);
  CHECK(in_even_parts > 50);
  CHECK(whole > 10);
}

TEST_CASE(
    "FewAlone: where memory has more to do than a tile of a prompt takes, half of the CTAs have tiles of each class") {
  struct Step {
    char const* why;
    int prompt, singles, keys_of_single;
    bool alternates;
  };
  for (Step const& step :
       {Step{"decode takes longer than a tile", 512, 64, 2048, true},
        Step{"several rounds of prompts", 900, 64, 2048, true}, Step{"decode takes less", 512, 40, 600, false},
        Step{"prompts leave enough of the CTAs", 300, 64, 2048, false}}) {
    CAPTURE(step.why);
    Request r;
    r.heads_q = 32;
    r.heads_k = 8;
    r.options.num_splits = 0;
    r.options.causal = true;
    r.lengths.assign(static_cast<std::size_t>(step.singles), SeqlenQK{1, step.keys_of_single});
    r.lengths.push_back({step.prompt, 4096});
    Call call;
    make_call(r, call);
    KernelPlan const& kernel = call.plan.kernels.front();
    REQUIRE(kernel.tile.calls == Calls::kMixedMany);
    ScheduleParams const params = params_of(call, kernel).schedule;
    Schedule const schedule(params);
    REQUIRE_FALSE(schedule.by_units());
    FewAlone const few(schedule);
    int const count = few.tiles_of_all(schedule);
    std::vector<int> entries;
    for (int drawn = 0; drawn < count; ++drawn) { entries.push_back(few.entry(drawn)); }
    CHECK(std::ranges::is_sorted(entries) == !step.alternates);
    if (step.alternates) {
      int const prompts = few.entries * schedule.head_groups();
      auto const first = std::span(entries).first(static_cast<std::size_t>(kernel.ctas));
      CHECK(std::ranges::count_if(first, [&](int entry) { return entry < prompts; }) == kernel.ctas / 2);
    }
    std::ranges::sort(entries);
    for (int i = 0; i < count; ++i) { REQUIRE(entries[static_cast<std::size_t>(i)] == i); }
  }
}

TEST_CASE("chunks: begin where they should up to the largest number of units") {
  constexpr int kMost = 1 << 30;
  for (int const size : {1, 2, 3, 7'654'321, kMost - 1, kMost}) {
    int const count = ceil_div_unsigned(kMost, size);
    Chunks const chunks{kMost, size, count, count};
    CAPTURE(size);
    CHECK(chunks.begin(0) == 0);
    CHECK(chunks.begin(chunks.count) == kMost);
    CHECK(chunks.begin(chunks.count - 1) == std::int64_t{chunks.count - 1} * size);
    CHECK(chunks.of(kMost - 1) == chunks.count - 1);
  }
}

TEST_CASE("units: each tile of fewer rows than metadata count has some, however few there are") {
  // A tile of 192 rows with one block and one unit for its ends holds two of 128 rows; rising and even ones.
  for (bool const rise : {false, true}) {
    for (int const counted : {1, 2, 3, 4, 7}) {
      int const tiles = ceil_div(3 * counted, 2);
      FoundPlace const found{0, 0, 2 * counted};
      TilesOfUnits const of{tiles, rise, 128, 128, 2};
      std::map<int, int> units;
      for (int x = 0; x < found.until; ++x) {
        UnitTile const tile = unit_tile<KernelFamily::kPrefill>(found, of, x, 1);
        CHECK((tile.begin <= x && x < tile.begin + tile.units));
        ++units[tile.m];
      }
      CAPTURE(rise);
      CAPTURE(counted);
      for (int m = 0; m < tiles; ++m) { CHECK(units[m] >= 1); }
    }
  }
}

TEST_CASE("schedule: a call may have fewer queries than its metadata count, which know no seqused_q") {
  Random random(5);
  int by_units = 0;
  int mixed = 0, mixed_many = 0;
  for (int i = 0; i < 1000; ++i) {
    Request r;
    r.heads_k = one_of<int>(random, {1, 2, 8});
    r.heads_q = r.heads_k * one_of<int>(random, {1, 4});
    r.options.num_splits = 0;
    r.options.causal = pick(random, 0, 3) > 0;
    for (int b = pick(random, 1, 4); b > 0; --b) {
      int const q = pick(random, 200, 2500);
      r.lengths.push_back({q, std::max(q, pick(random, 300, pick(random, 0, 3) == 0 ? 60'000 : 9000))});
    }
    for (int singles = pick(random, 0, 1) * pick(random, 1, 80); singles > 0; --singles) {
      r.lengths.push_back({1, pick(random, 1, 3000)});
    }
    Call call;
    make_call(r, call);
    call.problem.seqused_q = true;
    call.plan = plan(call.problem, card(132));
    if (!call.plan.listed) { continue; }
    call.metadata = model_metadata(schedule_kernel_of(call));  // of cu_seqlens_q
    for (int& used : call.lengths.seqused_q) {
      used = used == 1 ? pick(random, 0, 1) : std::max(100, used - pick(random, 0, used / 2));
    }
    call.sequences.seqused_q = call.lengths.seqused_q.data();
    CAPTURE(i);
    CAPTURE(text_of(r));
    KernelPlan const& kernel = call.plan.kernels.front();
    AttentionParams const params = params_of(call, kernel);
    std::vector<Done> done;
    std::string const fault = run_kernel(params, kernel, random, Turn::kRandom, done);
    REQUIRE((fault.empty() || fault == kTooManyEmpty));
    auto const tiles = parts_of_tiles(params, done);
    REQUIRE(coverage_fault(call, kernel, params, tiles) == "");
    if (kernel.may_split) { REQUIRE(combine_fault(call, kernel, tiles) == ""); }
    by_units += Schedule(params.schedule).by_units();
    mixed += is_mixed(kernel.tile.calls);
    mixed_many += kernel.tile.calls == Calls::kMixedMany;
  }
  CHECK(by_units > 200);
  CHECK(mixed > 50);
  CHECK(mixed_many > 20);
}

TEST_CASE("schedule: tiles of 256 rows are computed once where metadata count those of 192") {
  Random random(9);
  Seen seen;
  int larger = 0;
  for (int i = 0; i < 1000; ++i) {
    Request r;
    r.head_dim = 64;
    r.heads_k = one_of<int>(random, {2, 8, 16});
    r.heads_q = r.heads_k * one_of<int>(random, {1, 1, 1, 4});
    r.packed_q = r.packed_k = true;
    r.options.causal = pick(random, 0, 1) == 0;
    for (int b = pick(random, 1, 60); b > 0; --b) {
      int const q = pick(random, 0, 9) == 0 ? pick(random, 0, 3000) : pick(random, 0, 700);
      r.lengths.push_back({q, q + pick(random, 0, 100)});
    }
    Call call;
    make_call(r, call);
    CAPTURE(i);
    CAPTURE(text_of(r));
    std::string const fault = call_fault(call, random, seen);
    REQUIRE(fault == "");
    larger += call.plan.listed && call.plan.kernels.front().tile.rows == 256;
  }
  CHECK(larger > 200);
}

TEST_CASE("schedule: tiles in equal parts are computed once and merged, and stay whole where keys are few") {
  Random random(11);
  Seen seen;
  for (int i = 0; i < 600; ++i) {
    Request r;
    r.heads_k = one_of<int>(random, {1, 2, 8});
    r.heads_q = r.heads_k * one_of<int>(random, {1, 3, 4, 8});
    r.head_dim = one_of<int>(random, {64, 128, 256});
    r.sm_count = one_of<int>(random, {114, 132});
    r.options.num_splits = one_of<int>(random, {0, 0, 3});
    r.options.causal = pick(random, 0, 2) > 0;
    r.options.softcap = pick(random, 0, 3) == 0 ? 30.0F : 0.0F;
    r.packed_q = pick(random, 0, 2) > 0;
    r.page_unit = one_of<int>(random, {1, 16, 64});
    r.leftpad = pick(random, 0, 3) == 0 ? 70 : 0;
    r.slack = pick(random, 0, 2) == 0 ? pick(random, 0, 300) : 0;
    r.slack_k = pick(random, 0, 1) * 30'000;  // what a page table has room for
    r.lengths = {SeqlenQK{pick(random, 0, 700), pick(random, 0, 20'000)}};
    r.alike = pick(random, 0, 4) == 0 && r.lengths[0].q > 0 && r.lengths[0].k > 0;
    if (r.alike) { r.lengths.resize(static_cast<std::size_t>(pick(random, 1, 3)), r.lengths[0]); }
    check_call(r, i, random, seen,
               [](Plan const& plan) { return !plan.kernels.empty() && plan.kernels.front().equal_parts > 1; });
  }
  CHECK(seen.in_equal_parts > 1000);
  CHECK(seen.whole_instead > 50);
}

// Without lengths, of head dims whose tiles two blocks may share and blocks may find by rank.
Request request_of_few_tiles(Random& random) {
  Request r;
  r.heads_k = one_of<int>(random, {1, 2, 8});
  r.heads_q = r.heads_k * one_of<int>(random, {1, 3, 4, 8});
  r.head_dim = one_of<int>(random, {64, 128});
  r.sm_count = one_of<int>(random, {114, 132});
  r.options.num_splits = one_of<int>(random, {0, 1});
  r.options.causal = pick(random, 0, 4) > 0;
  if (pick(random, 0, 5) == 0) { r.options.window_left = pick(random, 0, 2000); }
  return r;
}

TEST_CASE("TileShares: the parts of a tile follow one another, and no CTA has much more to do than another") {
  for (int const ctas : kPairClusters) {
    ClusterSize const size(ctas);
    for (int blocks = 0; blocks < 200; ++blocks) {
      for (int beside = 0; beside <= blocks + 3; ++beside) {
        CAPTURE(ctas);
        CAPTURE(blocks);
        CAPTURE(beside);
        TileShares const shares(blocks, beside, size);
        REQUIRE(shares.begin(0) == 0);
        REQUIRE(shares.begin(ctas) == blocks);
        int longest = 0;
        int shortest = blocks;
        for (int cta = 0; cta < ctas; ++cta) {
          int const count = shares.begin(cta + 1) - shares.begin(cta);
          REQUIRE(count >= 0);
          longest = std::max(longest, count);
          if (cta > 0) { shortest = std::min(shortest, count); }
        }
        REQUIRE(longest - shortest <= 1);
        int const first = shares.begin(1);
        REQUIRE((first == 0 || beside + first <= longest));  // done with the short tile and its part when others are
        REQUIRE((beside + first + 1 >= shortest));           // and not much sooner
        REQUIRE(shares.shared() == (blocks - longest >= kWorthSharing));
        if (ctas == 2 && beside <= blocks + 2) { REQUIRE_FALSE(is_short_shared(blocks, beside, size)); }
      }
    }
  }
}

TEST_CASE("TileExchange: each warp's rows are merged by one CTA of the cluster, which has room for all parts") {
  for (int const warps : {4, 8, 12}) {
    for (int const ctas : kPairClusters) {
      for (bool const alone : {false, true}) {
        int const of_owner = warps_of_owner(warps, ctas, alone);
        CHECK((warps - 1) / of_owner < ctas);
        CHECK(of_owner * (ctas - 1) <= most_parts_of_owner(warps));
      }
    }
  }
}

// Of those that share tiles of many queries.
void force_some_clusters(Request& r, Random& random) {
  int most_queries = 0;
  for (SeqlenQK const len : r.lengths) { most_queries = std::max(most_queries, len.q); }
  bool const many = most_queries * scheduled_packing(r.heads_q, r.heads_k) > kSlabRows;
  r.forced_cluster = many ? one_of<int>(random, {0, 0, 2, 3, 4, 8}) : 0;
}

TEST_CASE("schedule: tiles of one sequence, and of alike ones, are computed once where blocks share two") {
  Random random(13);
  Seen seen;
  for (int i = 0; i < 1500; ++i) {
    Request r = request_of_few_tiles(random);
    r.options.sm_margin = pick(random, 0, 5) == 0 ? 40 : 0;  // clusters then take several pairs
    r.packed_q = pick(random, 0, 2) > 0;
    r.page_unit = one_of<int>(random, {1, 16, 64});
    r.leftpad = pick(random, 0, 3) == 0 ? 70 : 0;
    r.slack = pick(random, 0, 2) == 0 ? pick(random, 0, 300) : 0;
    int const q = pick(random, 1, 16'000 / r.heads_q);
    r.lengths = {SeqlenQK{q, std::max(0, q + pick(random, 0, 2) * pick(random, -300, 2000))}};
    r.alike = pick(random, 0, 4) == 0 && r.lengths[0].k > 0;
    if (r.alike) { r.lengths.resize(static_cast<std::size_t>(pick(random, 1, 3)), r.lengths[0]); }
    force_some_clusters(r, random);
    check_call(r, i, random, seen,
               [](Plan const& plan) { return !plan.kernels.empty() && is_paired(plan.kernels.front()); });
  }
  CHECK(seen.in_pairs > 5000);
  CHECK(seen.whole_of_pairs > 5000);
}

// A few sequences, some of them without queries or keys.
std::vector<SeqlenQK> some_lengths(Random& random, int most_sequences, int most_queries) {
  std::vector<SeqlenQK> lengths;
  int const batch = pick(random, 1, most_sequences);
  for (int b = 0; b < batch; ++b) {
    int const kind = pick(random, 0, 9);
    int const q = kind == 0 ? 0 : kind == 1 ? 1 : pick(random, 1, std::max(1, 2 * most_queries / batch));
    int const k = std::max(0, q + one_of<int>(random, {0, 0, -100, 500, pick(random, 0, 2500)}));
    lengths.push_back({q, pick(random, 0, 15) == 0 ? 0 : k});
  }
  return lengths;
}

TEST_CASE("schedule: blocks that find the tiles of few sequences by themselves, alone or in pairs, leave none out") {
  Random random(17);
  Seen seen;
  for (int i = 0; i < 4000; ++i) {
    Request r = request_of_few_tiles(random);
    if (pick(random, 0, 5) == 0) { r.options.window_right = pick(random, 0, 300); }
    r.options.sm_margin = pick(random, 0, 9) == 0 ? 40 : 0;
    r.packed_q = pick(random, 0, 4) > 0;
    r.packed_k = pick(random, 0, 3) == 0;
    r.page_unit = r.packed_k ? 1 : one_of<int>(random, {1, 16, 64});
    r.leftpad = !r.packed_k && pick(random, 0, 3) == 0 ? 70 : 0;
    r.slack = pick(random, 0, 2) == 0 ? pick(random, 0, 300) : 0;
    r.lengths = some_lengths(random, one_of<int>(random, {6, 6, kLanes, kMostRankedSequences}), 24'000 / r.heads_q);
    force_some_clusters(r, random);
    check_call(r, i, random, seen, [](Plan const& plan) {
      return !plan.kernels.empty() && (is_paired(plan.kernels.front()) || plan.kernels.front().ranked);
    });
  }
  CHECK(seen.in_pairs > 5000);
  CHECK(seen.whole_of_pairs > 5000);
  CHECK(seen.by_rank > 200);
}

TEST_CASE("schedule: several tiles of few rows for a sequence, as many as its queries fill where these are packed") {
  Random random(31);
  Seen seen;
  int packed = 0;
  int alike = 0;
  int by_several_clusters = 0;
  for (int i = 0; i < 6000; ++i) {
    Request r = request_of_few_tiles(random);
    r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
    r.options.num_splits = one_of<int>(random, {0, 0, 1, 6});
    if (pick(random, 0, 5) == 0) { r.options.window_right = pick(random, 0, 300); }
    r.packed_q = pick(random, 0, 3) > 0;
    r.page_unit = one_of<int>(random, {1, 16, 64});
    r.leftpad = pick(random, 0, 3) == 0 ? 70 : 0;
    r.slack = r.packed_q && pick(random, 0, 2) == 0 ? pick(random, 0, 300) : 0;
    r.lengths = some_lengths(random, one_of<int>(random, {1, 4, 40}), 1200 / r.heads_q);
    bool const forces = r.lengths.size() <= 4 && pick(random, 0, 3) == 0;
    int most_queries = 0;
    for (SeqlenQK const len : r.lengths) { most_queries = std::max(most_queries, len.q + r.slack); }
    if (forces && most_queries * r.heads_q / r.heads_k <= 64) {
      r.forced_cluster = one_of<int>(random, {2, 4, 8});
      r.forced_splits = r.forced_cluster * pick(random, 0, 3);
      r.options.num_splits = 0;
    }
    check_call(r, i, random, seen, [&](Plan const& plan) {
      if (plan.kernels.empty()) { return false; }
      KernelPlan const& kernel = plan.kernels.front();
      packed += kernel.packed_tiles;
      alike += kernel.tiles_of_group > 1;
      bool const several = kernel.has_several_tiles();
      by_several_clusters += several && clusters_of_tile(kernel) > 1;
      return several;
    });
  }
  CHECK(packed > 500);
  CHECK(alike > 300);
  CHECK(by_several_clusters > 20);
}

// A step of an engine: prompts and chunks among sequences of few queries, of which some have more than a tile of few
// rows holds, and some none.
std::vector<SeqlenQK> lengths_of_step(Random& random, int most_queries) {
  std::vector<SeqlenQK> lengths;
  int const prompts = pick(random, 0, 3);
  for (int b = 0; b < prompts; ++b) {
    int const q = pick(random, 2, std::max(2, most_queries));
    lengths.push_back({q, std::max(0, q + one_of<int>(random, {0, 0, -100, 500, pick(random, 0, 9000)}))});
  }
  int const singles = one_of<int>(random, {1, 4, 17, 40, 64, 120, 150});
  for (int b = 0; b < singles; ++b) {
    int const q = pick(random, 0, 9) > 0 ? 1 : pick(random, 0, 6);
    lengths.push_back({q, pick(random, 0, 15) == 0 ? 0 : pick(random, 0, 5000)});
  }
  std::shuffle(lengths.begin(), lengths.end(), random);
  return lengths;
}

TEST_CASE("schedule: prompts beside sequences of few queries, each class in a kernel that finds its own tiles") {
  Random random(29);
  Seen seen;
  for (int i = 0; i < 8000; ++i) {
    Request r = request_of_few_tiles(random);
    r.sm_count = one_of<int>(random, {16, 48, 114, 132, 132, 132});
    r.options.num_splits = one_of<int>(random, {0, 0, 2, 7});
    if (pick(random, 0, 5) == 0) { r.options.window_right = pick(random, 0, 300); }
    if (pick(random, 0, 6) == 0) { r.options.attention_chunk = pick(random, 1, 3000); }
    r.options.sm_margin = one_of<int>(random, {0, 0, 0, 40, 131});
    r.packed_k = pick(random, 0, 3) == 0;
    r.page_unit = r.packed_k ? 1 : one_of<int>(random, {1, 16, 64});
    r.leftpad = !r.packed_k && pick(random, 0, 3) == 0 ? 70 : 0;
    r.slack = pick(random, 0, 2) == 0 ? pick(random, 0, 300) : 0;
    r.lengths = lengths_of_step(random, 12'000 / r.heads_q);
    check_call(r, i, random, seen, [](Plan const& plan) { return has_classes(plan); });
  }
  CHECK(seen.classes > 500);
  CHECK(seen.in_pairs > 500);
  CHECK(seen.by_rank > 50);
  CHECK(seen.drawn > 50);
}

TEST_CASE("schedule: two blocks share tiles of a window that is longer than the prompt as under a causal mask") {
  for (bool const alone : {true, false}) {
    Request r;
    r.heads_q = 8;
    r.heads_k = 1;
    r.options.num_splits = 1;
    r.options.causal = true;
    r.options.window_left = 4096;
    r.lengths = {SeqlenQK{1900, 1900}};
    if (!alone) { r.lengths.push_back({60, 60}); }
    Call call;
    make_call(r, call);
    KernelPlan const& kernel = call.plan.kernels.front();
    REQUIRE(is_paired(kernel));
    std::string fault;
    AttentionParams const params = params_of(call, kernel);
    std::vector<Done> const done = run_pairs(params, kernel, fault);
    CHECK(fault == "");
    std::map<int, int> blocks;  // of a CTA
    for (Done const& d : done) { blocks[d.cta] += d.work.range.blocks(); }
    int longest = 0;
    for (auto const& [cta, count] : blocks) { longest = std::max(longest, count); }
    CHECK(longest <= 11);  // of tiles of up to 15 blocks
  }
}

TEST_CASE("RankedTiles: every tile has one rank, and longer ones of a causal call come first") {
  Random random(19);
  std::vector<RankedSequence> room(kMostRankedSequences);
  for (int i = 0; i < 4000; ++i) {
    std::vector<SeqlenQK> const lengths =
        some_lengths(random, one_of<int>(random, {3, kLanes, kLanes, kMostRankedSequences}), 3000);
    std::vector<int> starts{0};
    std::vector<int> used;
    for (SeqlenQK const len : lengths) {
      starts.push_back(starts.back() + len.q);
      used.push_back(len.k);
    }
    int const heads = one_of<int>(random, {1, 3, 8});
    int const queries = one_of<int>(random, {16, 48, 128});
    int const keys = one_of<int>(random, {64, 128});
    AttentionParams params{};
    params.sequences = {.cu_seqlens_q = starts.data(),
                        .seqused_k = used.data(),
                        .batch = static_cast<int>(lengths.size()),
                        .seqlen_q = starts.back(),
                        .capacity_k = 1 << 20};
    params.mask = {.left = kUnlimited, .right = one_of<int>(random, {0, 0, 70, kUnlimited})};
    params.ranked = {.queries = FastDivmod(queries),
                     .head_groups = FastDivmod(heads),
                     .of_lanes = SequencesOfLanes(params.sequences.batch)};
    RankedTiles const ranked(params, keys, room.data());
    std::map<std::tuple<int, int, int>, int> ranks;
    int least = 1 << 30;
    for (int rank = 0; rank < ranked.count(); ++rank) {
      Tile const tile = ranked.tile(rank);
      REQUIRE(tile.batch >= 0);
      SeqlenQK const len = lengths[static_cast<std::size_t>(tile.batch)];
      REQUIRE((tile.m >= 0 && tile.m < ceil_div(len.q, queries)));
      ++ranks[{tile.batch, tile.m, tile.head}];
      int const from_end = ceil_div(len.q, queries) - 1 - tile.m;  // full tiles end the sequence
      int const last = len.q - from_end * queries - 1;
      KeyInterval const seen = visible(params.mask, last, len);
      int const blocks = ceil_div(seen.end - seen.begin, keys);
      REQUIRE(blocks <= least);
      least = blocks;
    }
    std::size_t all = 0;
    for (SeqlenQK const len : lengths) { all += static_cast<std::size_t>(ceil_div(len.q, queries) * heads); }
    REQUIRE(ranks.size() == all);
    REQUIRE(ranked.count() == static_cast<int>(all));
    REQUIRE(ranked.tile(ranked.count()).batch < 0);
  }
}

TEST_CASE("schedule: where the bound is what a page table has room for, lengths decide between clusters and units") {
  Random random(3);
  Seen seen;
  int one_long = 0;
  for (int i = 0; i < 1500; ++i) {
    Request r;
    int const batch = one_of<int>(random, {1, 2, 5, 16, 40, 64, 130, 300});
    int const usual = one_of<int>(random, {0, 1, 200, 1000, 3000});
    for (int b = 0; b < batch; ++b) {
      int const keys = pick(random, usual / 2, usual);
      r.lengths.push_back({pick(random, 0, 2), keys, keys});
    }
    if (pick(random, 0, 2) == 0) {
      ++one_long;
      int const keys = pick(random, 5'000, 60'000);
      r.lengths[static_cast<std::size_t>(pick(random, 0, batch - 1))] = {1, keys, keys};
    }
    std::tie(r.heads_q, r.heads_k) =
        one_of<std::pair<int, int>>(random, {{1, 1}, {4, 4}, {8, 2}, {8, 1}, {32, 8}, {5, 1}});
    r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
    r.sm_count = one_of<int>(random, {1, 7, 48, 114, 132});
    r.options.num_splits = one_of<int>(random, {0, 0, 0, 1, 2, 7, 256});
    r.options.batch_invariant = pick(random, 0, 3) == 0;
    r.options.causal = pick(random, 0, 1) == 0;
    if (pick(random, 0, 5) == 0) { r.options.window_left = pick(random, 0, 2000); }
    if (pick(random, 0, 5) == 0) { r.options.attention_chunk = pick(random, 1, 20'000); }
    r.packed_q = pick(random, 0, 1) == 0;
    r.page_unit = one_of<int>(random, {1, 8, 64});
    r.slack_k = 131'072;
    check_call(r, i, random, seen);
  }
  CHECK(seen.clusters_by_schedule > 100);
  CHECK(seen.drawn_by_schedule > 100);
  CHECK(seen.units_by_schedule > 100);
  CHECK(seen.merged_jointly > 100);
  CHECK(seen.in_many_parts > 50);
  CHECK(seen.folded > 50);
  CHECK(one_long > 100);
}

TEST_CASE(
    "schedule: drafts that one tile holds are cut each by itself, also by metadata of a step with other queries") {
  Random random(37);
  Seen seen;
  int of_other_queries = 0;
  int in_kernel_of_both = 0;
  for (int i = 0; i < 900; ++i) {
    Request r;
    std::tie(r.heads_q, r.heads_k) =
        one_of<std::pair<int, int>>(random, {{8, 1}, {16, 2}, {5, 1}, {24, 8}, {32, 8}, {7, 1}, {96, 8}});
    int const most = 64 / (r.heads_q / r.heads_k);
    int const longest = one_of<int>(random, {300, 4000, 20'000, 60'000});
    for (int b = pick(random, 2, 60); b > 0; --b) {
      int const queries = pick(random, 0, 9) == 0 ? pick(random, 0, most) : pick(random, (most + 1) / 2, most);
      int const keys = pick(random, 0, pick(random, 0, 3) == 0 ? longest : longest / 6);
      r.lengths.push_back({queries, std::max(queries, keys), std::max(queries, keys)});
    }
    r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
    r.sm_count = one_of<int>(random, {48, 114, 132, 132});
    r.options.num_splits = one_of<int>(random, {0, 0, 0, 7});
    r.options.causal = true;
    r.packed_q = pick(random, 0, 1) == 0;
    r.page_unit = one_of<int>(random, {1, 8, 64});
    r.slack_k = pick(random, 0, 3) == 0 ? 0 : 131'072;
    r.slack = pick(random, 0, 3) == 0 ? 300 : 0;  // of the bound on queries, for which the kernel is not one for few
    CAPTURE(i);
    CAPTURE(text_of(r));
    Call call;
    make_call(r, call);
    // These may have more units for a tile than num_splits is a bound for.
    if (call.plan.listed && r.options.num_splits == 0 && r.slack == 0 && pick(random, 0, 2) == 0) {
      ++of_other_queries;
      Request other = r;
      for (SeqlenQK& len : other.lengths) { len.q = pick(random, 1, one_of<int>(random, {1, most, 5 * most})); }
      Call step;
      make_call(other, step);
      if (step.plan.fixed_splits != call.plan.fixed_splits) { continue; }
      call.metadata = model_metadata(schedule_kernel_of(step));
    }
    KernelPlan const& kernel = call.plan.kernels.front();
    if (kernel.family != KernelFamily::kDecode && r.slack == 0) { continue; }
    REQUIRE(call_fault(call, random, seen) == "");
    if (!is_mixed(kernel.tile.calls)) { continue; }
    ScheduleParams const params = schedule_of(call, kernel);
    auto const fact = PlacesAndCuts::of(*where_is(params.metadata, params.stride, kPlacesAndCuts));
    in_kernel_of_both += fact.one_each && Schedule(params).numbers().even_parts();
  }
  CHECK(of_other_queries > 100);
  CHECK(in_kernel_of_both > 10);
  CHECK(seen.drafts_in_parts > 150);
  CHECK(seen.merged_jointly > 100);
  CHECK(seen.clusters_by_schedule > 50);
}

TEST_CASE("schedule: with batch_invariant, clusters take the parts of few tiles, each CTA one or a group of them") {
  Random random(31);
  Seen seen;
  for (int i = 0; i < 600; ++i) {
    Request r;
    int const longest = one_of<int>(random, {4097, 6000, 9000, 16'000, 33'000});
    for (int b = pick(random, 1, 70); b > 0; --b) {
      int const keys = pick(random, 0, 3) == 0 ? pick(random, 0, 4200) : pick(random, 0, longest);
      r.lengths.push_back({pick(random, 0, 2), keys, keys});
    }
    std::tie(r.heads_q, r.heads_k) = one_of<std::pair<int, int>>(random, {{1, 1}, {4, 4}, {8, 2}, {8, 1}, {5, 1}});
    r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
    r.sm_count = one_of<int>(random, {48, 114, 132, 132});
    r.options.num_splits = one_of<int>(random, {0, 1, 7});
    r.options.batch_invariant = true;
    r.options.causal = pick(random, 0, 1) == 0;
    if (pick(random, 0, 5) == 0) { r.options.window_left = pick(random, 0, 9000); }
    if (pick(random, 0, 3) == 0) { r.options.attention_chunk = one_of<int>(random, {100, 4096, 6000, 8192, 16'384}); }
    r.packed_q = pick(random, 0, 1) == 0;
    r.page_unit = one_of<int>(random, {1, 8, 64});
    check_call(r, i, random, seen);
  }
  CHECK(seen.clusters_in_parts > 100);
  CHECK(seen.folded > 20);
  CHECK(seen.fixed > 20);
}

TEST_CASE(
    "schedule: in even parts no CTA has much more than its share, or one tile more, and few have other schedules") {
  constexpr int kMostAboveShare = 17;   // blocks, as much as chunks take longer, without the combine kernel
  constexpr int kMostlyAboveShare = 4;  // as long as an item takes
  Random random(23);
  int hardly_above = 0;
  int one_each = 0;
  int drawn = 0;
  int few_tiles = 0;
  int even_of_few = 0;
  for (int i = 0; i < 900; ++i) {
    Request r;
    bool const one_long = i % 3 == 0;
    int const batch = one_long ? pick(random, 20, 400) : pick(random, 1, 24);
    for (int b = 0; b < batch; ++b) {
      int const most = b == 0 || (!one_long && pick(random, 0, 3) == 0) ? 60'000 : one_long ? 800 : 4'000;
      int const keys = pick(random, 0, most);
      r.lengths.push_back({pick(random, 0, 9) == 0 ? 0 : 1, keys, keys});
    }
    std::tie(r.heads_q, r.heads_k) = one_of<std::pair<int, int>>(random, {{1, 1}, {8, 1}, {16, 2}, {32, 8}, {16, 4}});
    r.head_dim = one_of<int>(random, {64, 128, 192, 256});
    r.sm_count = one_of<int>(random, {48, 114, 132});
    r.options.num_splits = 0;
    r.slack_k = 131'072;
    CAPTURE(i);
    CAPTURE(text_of(r));
    Call call;
    make_call(r, call);
    REQUIRE(call.plan.kernels.size() == 1);
    KernelPlan const& kernel = call.plan.kernels.front();
    AttentionParams const params = params_of(call, kernel);
    Schedule const schedule(params.schedule);
    if (call.plan.cluster > 0 || work_of(params) != WorkFrom::kSchedule) { continue; }
    EvenParts const made_for = schedule_kernel_of(call).even_parts;
    bool const even = schedule.numbers().even_parts();
    few_tiles += 2 * schedule.tiles() <= made_for.ctas;
    even_of_few += even && 2 * schedule.tiles() <= made_for.ctas;
    if (!even || made_for.ctas != schedule.ctas()) { continue; }  // another grid takes several parts at a time
    std::vector<Done> done;
    REQUIRE(run_kernel(params, kernel, random, Turn::kLeastLoaded, done) == "");
    std::map<int, int> items;
    std::map<int, int> blocks;
    std::map<TileName, int> units;
    int longest_whole = 0;
    for (Done const& d : done) {
      ++items[d.cta];
      blocks[d.cta] += d.work.range.blocks();
      units[{d.item.place, d.item.head, d.item.m}] += d.work.range.blocks();
      if (d.item.slot < 0) { longest_whole = std::max(longest_whole, d.work.range.blocks()); }
    }
    int longest = 0;
    for (auto const& [cta, count] : blocks) { longest = std::max(longest, count); }
    int all = 0;  // a tile of few blocks takes as long as some more
    for (auto const& [name, count] : units) { all += std::max(count, kLeastUnitsOfFewQueries); }
    int const share = ceil_div(all, made_for.ctas);
    bool const several = std::any_of(items.begin(), items.end(), [](auto const& cta) { return cta.second > 1; });
    ++(several ? drawn : one_each);
    int const behind = several ? longest_whole : 0;
    CHECK(longest <= std::max(share + kMostAboveShare + behind, kLeastUnits));
    hardly_above += longest <= std::max(share + kMostlyAboveShare + behind, kLeastUnits);
    for (auto const& [name, parts] : parts_of_tiles(params, done)) { CHECK(are_equal(parts)); }
    // Where each CTA has one part, a grid of some fewer does not take two parts at a time.
    for (int const fewer : {1, 8}) {
      if (several) { break; }
      AttentionParams of_fewer = params;
      KernelPlan smaller = kernel;
      smaller.ctas = of_fewer.schedule.ctas = kernel.ctas - fewer;
      done.clear();
      REQUIRE(run_kernel(of_fewer, smaller, random, Turn::kLeastLoaded, done) == "");
      blocks.clear();
      for (Done const& d : done) { blocks[d.cta] += d.work.range.blocks(); }
      for (auto const& [cta, count] : blocks) {
        CHECK(count <= std::max(3 * longest / 2 + 3, longest + longest_whole));  // or draws a tile behind its part
      }
    }
  }
  CHECK(one_each > 100);
  CHECK(drawn > 50);
  CHECK(10 * hardly_above > 9 * (one_each + drawn));
  // Of others parts would be too long, so that these are cut into chunks of equal work.
  CHECK(few_tiles > 150);
  CHECK(5 * even_of_few >= 3 * few_tiles);
}

TEST_CASE("schedule: a kernel for both classes cuts long tiles each by itself, and none that is short") {
  Random random(33);
  int one_each = 0;
  int drawn = 0;
  int whole = 0;
  int not_cut = 0;
  int not_even = 0;
  for (int i = 0; i < 1000; ++i) {
    Request r;
    for (int b = pick(random, 1, 3); b > 0; --b) {
      int const q = pick(random, 40, pick(random, 0, 1) == 0 ? 200 : 2000);
      r.lengths.push_back({q, q + pick(random, 0, 12'000)});
    }
    for (int b = pick(random, 3, 80); b > 0; --b) {
      r.lengths.push_back({1, pick(random, 1, i % 2 == 0 ? 900 : 9000)});
    }
    std::tie(r.heads_q, r.heads_k) = one_of<std::pair<int, int>>(random, {{8, 1}, {7, 1}, {16, 2}, {10, 2}, {16, 4}});
    r.head_dim = one_of<int>(random, {64, 128});
    r.sm_count = one_of<int>(random, {114, 132});
    r.options.num_splits = 0;
    r.options.causal = pick(random, 0, 3) > 0;
    r.slack_k = 60'000;
    CAPTURE(i);
    CAPTURE(text_of(r));
    Call call;
    make_call(r, call);
    KernelPlan const& kernel = call.plan.kernels.front();
    if (!is_mixed(kernel.tile.calls)) { continue; }
    AttentionParams const params = params_of(call, kernel);
    Schedule const schedule(params.schedule);
    if (!schedule.numbers().even_parts()) {
      ++not_even;
      continue;
    }
    REQUIRE(schedule.by_units());
    std::vector<Done> done;
    REQUIRE(run_kernel(params, kernel, random, Turn::kRandom, done) == "");
    REQUIRE(even_parts_fault(schedule, schedule.chunks(), done) == "");
    auto const tiles = parts_of_tiles(params, done);
    REQUIRE(coverage_fault(call, kernel, params, tiles) == "");
    REQUIRE(combine_fault(call, kernel, tiles) == "");
    std::map<int, int> items;
    for (Done const& d : done) { ++items[d.cta]; }
    bool const several = std::any_of(items.begin(), items.end(), [](auto const& cta) { return cta.second > 1; });
    int const fact = *where_is(call.metadata.data(), params.schedule.stride, kMostUnitsDecode);
    bool const is_cut =
        std::any_of(tiles.begin(), tiles.end(), [](auto const& tile) { return tile.second.size() > 1; });
    CHECK(is_cut == (UnitsAndParts::parts(fact) > 1));
    ++(!is_cut ? not_cut : several ? drawn : one_each);
    int longest_whole = 0;  // of few queries
    int shortest_cut = 1 << 30;
    for (auto const& [name, parts] : tiles) {
      CHECK(are_equal(parts));
      if (sequence_at(call.sequences, std::get<0>(name)).len.q > 1) { continue; }
      int blocks = 0;
      for (Part const& part : parts) { blocks += part.end - part.begin; }
      whole += parts.size() == 1;
      (parts.size() == 1 ? longest_whole : shortest_cut) =
          parts.size() == 1 ? std::max(longest_whole, blocks) : std::min(shortest_cut, blocks);
    }
    CHECK(longest_whole < shortest_cut);
    // A grid of fewer blocks than metadata were made for takes several parts at a time.
    AttentionParams on_fewer = params;
    KernelPlan smaller = kernel;
    smaller.ctas = on_fewer.schedule.ctas = kernel.ctas - pick(random, 1, 40);
    smaller.partial_slots = 2 * std::int64_t{smaller.ctas};
    done.clear();
    REQUIRE(run_kernel(on_fewer, smaller, random, Turn::kRandom, done) == "");
    CHECK(2 * Schedule(on_fewer.schedule).chunks().cutting <= smaller.partial_slots);
    REQUIRE(coverage_fault(call, smaller, on_fewer, parts_of_tiles(on_fewer, done)) == "");
    // Those that know fewer queries than metadata count do without.
    AttentionParams of_fewer = params;
    of_fewer.schedule.parts_many = false;
    CHECK_FALSE(Schedule(of_fewer.schedule).numbers().even_parts());
    CHECK(Schedule(of_fewer.schedule).units() != schedule.units());
  }
  CHECK(one_each > 50);
  CHECK(drawn > 50);
  CHECK(whole > 1000);
  CHECK(not_cut > 15);
  CHECK(not_even > 30);
}

TEST_CASE("schedule: the tiles of one sequence are cut each by itself where a call does not know its keys") {
  Random random(41);
  std::map<int, int> cut;  // by head dim
  int whole = 0;
  int in_chunks = 0;
  for (int i = 0; i < 2000; ++i) {
    Request r;
    int const q = pick(random, 65, pick(random, 0, 1) == 0 ? 400 : 2000);
    r.lengths.push_back({q, q + pick(random, 0, pick(random, 0, 1) == 0 ? 2'000 : 20'000)});
    std::tie(r.heads_q, r.heads_k) =
        one_of<std::pair<int, int>>(random, {{8, 1}, {7, 1}, {8, 8}, {10, 2}, {24, 8}, {20, 20}});
    r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
    r.sm_count = one_of<int>(random, {114, 132});
    r.options.num_splits = 0;
    r.options.causal = pick(random, 0, 3) > 0;
    r.slack_k = 131'072;
    CAPTURE(i);
    CAPTURE(text_of(r));
    Call call;
    make_call(r, call);
    KernelPlan const& kernel = call.plan.kernels.front();
    if (!call.plan.listed || kernel.family != KernelFamily::kPrefill || !kernel.may_split) { continue; }
    AttentionParams const params = params_of(call, kernel);
    if (!params.schedule.parts_many) { continue; }  // of tiles that are not as large as metadata count them
    Schedule const schedule(params.schedule);
    std::vector<Done> done;
    REQUIRE(run_kernel(params, kernel, random, Turn::kRandom, done) == "");
    auto const tiles = parts_of_tiles(params, done);
    REQUIRE(coverage_fault(call, kernel, params, tiles) == "");
    REQUIRE(combine_fault(call, kernel, tiles) == "");
    if (!schedule.numbers().even_parts()) {
      ++in_chunks;
      continue;
    }
    REQUIRE(even_parts_fault(schedule, schedule.chunks(), done) == "");
    std::size_t const count = tiles.begin()->second.size();
    for (auto const& [name, parts] : tiles) {
      CHECK(parts.size() == count);
      CHECK(are_equal(parts));
    }
    ++(count > 1 ? cut[r.head_dim] : whole);
    // Of a call that may have other queries than metadata know, which counts units.
    AttentionParams of_fewer = params;
    of_fewer.schedule.parts_many = false;
    done.clear();
    REQUIRE(run_kernel(of_fewer, kernel, random, Turn::kRandom, done) == "");
    REQUIRE(coverage_fault(call, kernel, of_fewer, parts_of_tiles(of_fewer, done)) == "");
  }
  for (int const head_dim : {64, 96, 128, 192, 256}) { CHECK(cut[head_dim] > 5); }
  CHECK(whole > 20);
  CHECK(in_chunks > 20);
}

TEST_CASE("schedule: even parts fit the bounds of calls that may have more rows than their sequences") {
  Random random(24);
  int even = 0;
  for (int i = 0; i < 300; ++i) {
    Request r;
    for (int b = pick(random, 1, 6); b > 0; --b) {
      int const keys = pick(random, 30'000, 32'000);
      r.lengths.push_back({1, keys, keys});
    }
    std::tie(r.heads_q, r.heads_k) = one_of<std::pair<int, int>>(random, {{8, 1}, {64, 8}, {16, 2}, {24, 1}, {32, 1}});
    r.head_dim = one_of<int>(random, {64, 128, 192, 256});
    r.options.num_splits = 0;
    r.slack = pick(random, 0, 64 / (r.heads_q / r.heads_k) - 1);  // of the bound on queries: up to 64 rows
    CAPTURE(i);
    CAPTURE(text_of(r));
    Call call;
    make_call(r, call);
    if (!call.plan.listed) { continue; }
    ScheduleParams const params = schedule_of(call, call.plan.kernels.front());
    int const batch = call.problem.batch;
    int const* const units_until = call.metadata.data() + 1 + kUnitsUntil * schedule_stride(batch);
    even += Schedule(params).numbers().even_parts();
    int const until = units_until[batch - 1];
    int const units = Schedule(params).numbers().even_parts() ? kUnitsOfPart * UnitsAndParts::parts(until) : until;
    CHECK(units <= params.most_units);
    CHECK(Schedule(params).units() == units * params.head_groups.divisor);
  }
  CHECK(even > 50);
}

TEST_CASE("schedule: a bound on parts holds for even ones, also in a kernel for many queries") {
  Random random(31);
  int even = 0;
  for (int i = 0; i < 300; ++i) {
    Request r;
    for (int b = pick(random, 1, 12); b > 0; --b) { r.lengths.push_back({1, pick(random, 2'000, 60'000), 60'000}); }
    std::tie(r.heads_q, r.heads_k) = one_of<std::pair<int, int>>(random, {{8, 1}, {16, 2}, {32, 1}});
    r.head_dim = 128;
    r.options.num_splits = pick(random, 2, 9);
    r.slack = 3;
    CAPTURE(i);
    CAPTURE(text_of(r));
    Call call;
    make_call(r, call);
    if (!call.plan.listed || call.plan.kernels.size() != 1) { continue; }
    for (bool const of_many : {false, true}) {
      ScheduleParams params = schedule_of(call, call.plan.kernels.front());
      // That each sequence might have many queries, so that one kernel takes all, does not change its metadata.
      if (of_many) {
        params.bound_by_memory = false;
        params.may_split = params.always_split = true;
      }
      Schedule const made(params);
      if (!made.by_units()) { continue; }
      even += made.numbers().even_parts();
      for (int place = 0; place < params.batch; ++place) {
        int const units = made.units_of(place);
        int const begin = made.units_before(place) * params.head_groups.divisor;
        for (int head = 0; units > 0 && head < params.head_groups.divisor; ++head) {
          TileParts const parts = parts_of_tile(made.chunks(), begin + head * units, begin + (head + 1) * units);
          CHECK(parts.count <= r.options.num_splits);
        }
      }
    }
  }
  CHECK(even > 50);
}

TEST_CASE("clusters: they suffice where no sequence is much longer than the others") {
  struct Step {
    char const* why;
    std::vector<int> keys;
    bool suffice;
  };
  auto const others = [](int longest, int count, int keys) {
    std::vector<int> all(static_cast<std::size_t>(count), keys);
    all.front() = longest;
    return all;
  };
  for (Step const& step :
       {Step{"all alike", others(8192, 16, 8192), true}, Step{"all short", others(100, 16, 1), true},
        Step{"one twice as long", others(8192, 16, 4096), true}, Step{"one long", others(100'000, 16, 1000), false}}) {
    CAPTURE(step.why);
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(8, 1);
    for (int const keys : step.keys) { r.lengths.push_back({1, keys, keys}); }
    r.slack_k = 131'072;
    r.options.num_splits = 0;
    Call call;
    make_call(r, call);
    CHECK(call.plan.cluster == 0);
    CHECK(call.plan.cluster_if_alike == 4);
    WorkFrom const from = work_of(params_of(call, call.plan.kernels.front()));
    CHECK(from == (step.suffice ? WorkFrom::kClusters : WorkFrom::kSchedule));
  }
}

TEST_CASE(
    "clusters: all CTAs together visit every key block of every query block once, each of a cluster a part of all") {
  Random random(7);
  int in_turn = 0;
  int several = 0;
  int drawn = 0;
  int longer = 0;
  int idle = 0;
  for (int i = 0; i < 1000; ++i) {
    Request r;
    int const batch = one_of<int>(random, {1, 2, 3, 9, 40});
    std::tie(r.heads_q, r.heads_k) =
        one_of<std::pair<int, int>>(random, {{1, 1}, {4, 4}, {8, 2}, {8, 1}, {24, 8}, {5, 1}, {16, 1}});
    int const ratio = r.heads_q / r.heads_k;
    int const most_q = one_of<int>(random, {16, 32}) / ratio;
    int const ranks = pick(random, 0, 7) == 0 ? 2 : 1;
    for (int b = 0; b < batch; ++b) {
      int const total = one_of<int>(random, {0, 1, 63, 64, 65, 127, 128, 129, 700, pick(random, 0, 9000)});
      r.lengths.push_back({pick(random, 0, most_q), (total + ranks - 1) / ranks, total});
    }
    r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
    r.sm_count = one_of<int>(random, {1, 2, 48, 132});
    r.options.num_splits = 0;
    r.options.cp_world_size = ranks;
    r.options.causal = pick(random, 0, 1) == 0;
    if (pick(random, 0, 3) == 0) { r.options.window_left = pick(random, 0, 500); }
    if (pick(random, 0, 6) == 0) { r.options.attention_chunk = pick(random, 1, 500); }
    r.page_unit = one_of<int>(random, {1, 8, 64});
    r.leftpad = ranks > 1 || pick(random, 0, 2) != 0 ? 0 : pick(random, 1, 90);
    r.packed_q = pick(random, 0, 1) == 0;
    r.forced_cluster = one_of<int>(random, {1, 2, 4, 8, 16});
    if (r.head_dim == 96) { r.forced_cluster = std::min(r.forced_cluster, 8); }  // four columns or more for each
    int const of_tile = one_of<int>(random, {1, 1, 2, 3, 7});
    if (r.forced_cluster > 1 && of_tile > 1) { r.forced_splits = r.forced_cluster * of_tile; }
    CAPTURE(i);
    CAPTURE(text_of(r));
    Call call;
    make_call(r, call);
    REQUIRE(call.plan.cluster == r.forced_cluster);
    KernelPlan kernel = call.plan.kernels.front();
    several += kernel.may_split;
    REQUIRE(clusters_of_tile(kernel) == (r.forced_cluster > 1 ? of_tile : 1));
    if (pick(random, 0, 1) == 0 && !kernel.may_split && !call.plan.listed) {
      kernel.ctas = r.forced_cluster * pick(random, 1, static_cast<int>(kernel.most_tiles));
    }
    in_turn += kernel.ctas < kernel.most_tiles * r.forced_cluster;
    // Queries that the bound does not know of.
    if (r.packed_q && !kernel.may_split && pick(random, 0, 2) == 0) {
      ++longer;
      int const b = pick(random, 0, batch - 1);
      int const more = pick(random, 1, 90);
      auto& starts = call.lengths.cu_seqlens_q;
      for (auto n = static_cast<std::size_t>(b) + 1; n < starts.size(); ++n) { starts[n] += more; }
      call.sequences.seqlen_q = starts.back();
    }
    AttentionParams const params = params_of(call, kernel);
    std::vector<Done> done;
    bool const draws = work_of(params) == WorkFrom::kDrawnTiles;
    drawn += draws;
    REQUIRE((draws ? run_kernel(params, kernel, random, Turn::kRandom, done) : run_clusters(params, kernel, done)) ==
            "");
    auto const tiles = parts_of_tiles(params, done);
    REQUIRE(coverage_fault(call, kernel, params, tiles) == "");
    if (kernel.may_split) { REQUIRE(combine_fault(call, kernel, tiles) == ""); }
    for (Done const& d : done) { idle += d.work.range.empty(); }
  }
  CHECK(in_turn > 100);
  CHECK(several > 100);
  CHECK(drawn > 5);
  CHECK(longer > 50);
  CHECK(idle > 1000);
}

TEST_CASE("clusters: a slot of the workspace takes one tile, also of sequences longer than the bound says") {
  Request request;
  std::tie(request.heads_q, request.heads_k) = std::pair(8, 1);
  request.lengths.assign(3, SeqlenQK{1, 5000});
  request.options.num_splits = 0;
  request.forced_cluster = 2;
  request.forced_splits = 4;
  Call call;
  make_call(request, call);
  for (std::size_t n = 1; n <= request.lengths.size(); ++n) { call.lengths.cu_seqlens_q[n] = 90 * static_cast<int>(n); }
  call.sequences.seqlen_q = call.lengths.cu_seqlens_q.back();
  KernelPlan const& kernel = call.plan.kernels.front();
  std::vector<Done> done;
  REQUIRE(run_clusters(params_of(call, kernel), kernel, done) == "");
  CHECK(done.size() == request.lengths.size() * 4);
  for (Done const& d : done) { CHECK((d.item.slot >= 0 && d.item.m == 0)); }
}

TEST_CASE("schedule: tiles of short sequences follow from their index, also those behind the bound on queries") {
  Random random(296);
  int beyond = 0;  // calls with a sequence that has more tiles than the bound says
  for (int i = 0; i < 400; ++i) {
    Request r;
    r.head_dim = one_of<int>(random, {64, 96, 128, 192, 256});
    std::tie(r.heads_q, r.heads_k) = one_of<std::pair<int, int>>(random, {{8, 8}, {8, 2}, {5, 1}, {16, 1}});
    r.options.num_splits = 1;
    r.options.causal = pick(random, 0, 1) == 0;
    r.packed_k = pick(random, 0, 1) == 0;
    int const longest = pick(random, 80, 2 * 64);  // two of the narrowest blocks
    int const batch = pick(random, 2, 60);
    for (int b = 0; b < batch; ++b) {
      int const q = pick(random, 0, longest);
      r.lengths.push_back({q, r.options.causal ? q : pick(random, 0, longest)});
    }
    Call call;
    make_call(r, call);
    call.problem.seqlen_q = max_of(65, call.problem.seqlen_q * pick(random, 1, 4) / 4);
    call.plan = plan(call.problem, card(132));
    CAPTURE(text_of(r));
    CAPTURE(call.plan.explain());
    REQUIRE_FALSE(call.plan.listed);
    REQUIRE(call.plan.kernels.size() == 1);
    KernelPlan const& kernel = call.plan.kernels.front();
    if (kernel.has_several_tiles()) { continue; }
    AttentionParams const params = params_of(call, kernel);
    auto const tiles = parts_of_tiles(params, run_tile_list(params, kernel));
    CHECK(coverage_fault(call, kernel, params, tiles) == "");
    beyond += !kernel.ranked && std::ranges::any_of(tiles, [&](auto const& tile) {
      return std::get<2>(tile.first) >= params.scheduler.m_blocks;
    });
  }
  CHECK(beyond > 100);
}

TEST_CASE("two kernels: decode leaves prefill the SMs that it needs, and keeps those that read nearly as fast as all") {
  auto const ctas_of_decode = [](int prompts, int prompt_length, int singles, int keys, int head_dim) {
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(32, 8);
    r.head_dim = head_dim;
    r.options.num_splits = 0;
    r.options.causal = true;
    r.lengths.assign(static_cast<std::size_t>(prompts), SeqlenQK{prompt_length, prompt_length});
    r.lengths.insert(r.lengths.end(), static_cast<std::size_t>(singles), SeqlenQK{1, keys});
    r.slack = 64;              // the bound lets all have many queries
    r.options.softcap = 30.0;  // so that there is no kernel for both
    Call call;
    make_call(r, call);
    REQUIRE(call.plan.kernels.size() == 2);
    return Schedule(schedule_of(call, call.plan.kernels[1])).ctas();
  };
  CHECK(ctas_of_decode(0, 0, 62, 4096, 128) == 132);  // nobody takes what it would leave
  // 2 x 22 tiles of 1 to 13 units, and 3 more for each, beside 62 of 32, for each K/V head: 27 SMs, each of which takes
  // 1.8 us for a unit, while memory brings 122 of decode.
  CHECK(ctas_of_decode(2, 1024, 62, 4096, 128) == 105);
  CHECK(ctas_of_decode(2, 512, 32, 16384, 128) == 128);  // 22 tiles of 1 to 7 units and 3 beside 32 of 128
  CHECK(ctas_of_decode(1, 512, 32, 8192, 128) == 132);   // a tile of prompts for each SM: these go first
  CHECK(ctas_of_decode(8, 4096, 59, 2048, 128) == 70);   // as many as read what memory gives
  CHECK(ctas_of_decode(8, 4096, 2, 32768, 128) == 70);   // in parts
  CHECK(ctas_of_decode(2, 4096, 1, 64, 128) == 70);      // whatever little they have to do
  CHECK(ctas_of_decode(2, 1024, 62, 4096, 64) == 264);   // two decode CTAs share an SM: none would be left
}

TEST_CASE("units: rise with the blocks of a causal sequence's tiles, and are as many as the schedule counts") {
  TileShape const shape{24, 80};
  MaskParams causal;
  causal.right = 0;
  for (SeqlenQK const len : {SeqlenQK{2048, 2048}, SeqlenQK{2040, 2048}, SeqlenQK{49, 49}, SeqlenQK{500, 9000},
                             SeqlenQK{300, 100}, SeqlenQK{1'000'000, 1'000'000}}) {
    SequenceWork const work = sequence_work(shape, causal, len);
    REQUIRE(work.tiles == ceil_div(len.q, shape.queries));
    int sum = 0;
    for (int m = 0; m < work.tiles; ++m) {
      int const last = len.q - 1 - (work.tiles - 1 - m) * shape.queries;
      int const blocks = block_range(causal, 0, last, len, shape.keys).blocks();
      // More queries than keys: the first of them see none, which is no straight line.
      if (len.q <= len.k && work.tiles < 1000) { CHECK(std::abs(work.units_of(m) - blocks) <= 1); }
      CHECK((work.units_of(m) >= 1 && work.units_of(m) <= work.units));
      CHECK(work.units_of(m) + work.units_of(work.tiles - 1 - m) ==
            (2 * m + 1 == work.tiles ? 2 * work.units_of(m) : work.units + work.least));
      sum += work.units_of(m);
    }
    CHECK(work.sum() == sum);
  }
  MaskParams window = causal;
  window.left = 127;
  CHECK(sequence_work(shape, window, {2048, 2048}).even());
  CHECK(sequence_work(shape, MaskParams{}, {2048, 2048}).even());
}

TEST_CASE("units: a shape that multiplies instead of dividing counts as many tiles and blocks") {
  Random random(31);
  for (int i = 0; i < 20'000; ++i) {
    TileShape const shape{pick(random, 1, 400), 8 * pick(random, 1, 32)};
    FastTileShape const fast(shape);
    int const number = i % 3 == 0 ? pick(random, 0, 1 << 30) : pick(random, 0, 100'000);
    REQUIRE(fast.tiles_of(number) == shape.tiles_of(number));
    REQUIRE(fast.blocks_of(number) == shape.blocks_of(number));
    MaskParams mask;
    if (i % 2 == 0) { mask.right = 0; }
    if (i % 5 == 0) { mask.left = pick(random, 0, 3000); }
    SeqlenQK const len{pick(random, 0, 5000), pick(random, 0, 100'000)};
    SequenceWork const work = work_in_blocks(shape, mask, len);
    SequenceWork const same = work_in_blocks(fast, mask, len);
    REQUIRE((work.tiles == same.tiles && work.units == same.units && work.least == same.least));
  }
}

TEST_CASE("even parts: tiles that are too large to be counted stay too large to be cut") {
  CHECK(EvenTiles().tiles() == 0);
  EvenTiles const tiles(7, 100, 31);
  CHECK((tiles.tiles() == 7 && tiles.units() == 100 && tiles.rise()));
  CHECK((tiles.parts_of_tile(30) == 4 && tiles.parts(30) == 28 && tiles.length(30) == 25));
  CHECK(tiles.units_of_all() == 7 * 66);  // of 65.5 each
  CHECK_FALSE(EvenTiles(7, 100, 50).rise());
  EvenTiles const huge(std::numeric_limits<int>::max(), std::numeric_limits<int>::max(), 1 << 20);
  CHECK(huge.units() > kMostEvenUnits);
  CHECK(static_cast<long long>(huge.tiles()) * huge.mean_units() > UnitsAndParts::kMostUnits);
}

TEST_CASE("even parts: the estimate of when all are done is near what blocks do that draw one after the other") {
  Random random(32);
  constexpr int kCtas = 132;
  double sum_of_logs = 0;
  int drawn = 0;
  for (int i = 0; i < 400; ++i) {
    // Places as the schedule orders them, of which the first have the parts in front.
    int const in_front = pick(random, 1, kCtas);
    int const length_in_front = pick(random, 20, 100);
    struct Place {
      int parts, length;
    };
    std::vector<Place> places{{in_front, length_in_front}};
    for (int length = length_in_front; length > 3 && places.size() < 60; length -= pick(random, 0, 6)) {
      places.push_back({pick(random, 1, 12), length});
    }
    std::multiset<int> free_at;
    for (int cta = 0; cta < kCtas; ++cta) { free_at.insert(0); }
    PartsUntil until;
    PartsUntil const front{in_front, in_front * length_in_front};
    int estimate = 0;
    for (Place const& place : places) {
      for (int part = 0; part < place.parts; ++part) {
        int const start = *free_at.begin();
        free_at.erase(free_at.begin());
        free_at.insert(start + place.length);
      }
      until = {until.parts + place.parts, until.units + place.parts * place.length};
      estimate = std::max(estimate, end_of_parts(kCtas, front, until, place.length));
    }
    int const end = *free_at.rbegin();
    if (until.parts <= kCtas) {
      CHECK(estimate == end);
      continue;
    }
    CAPTURE(i);
    CAPTURE(end);
    CAPTURE(estimate);
    CHECK((estimate > 0.8 * end && estimate < 1.4 * end));
    sum_of_logs += std::log(static_cast<double>(estimate) / end);
    ++drawn;
  }
  REQUIRE(drawn > 200);
  CHECK(std::abs(std::exp(sum_of_logs / drawn) - 1) < 0.08);
}

TEST_CASE("even parts: what merging them takes grows with how many there are, and whole tiles need none") {
  CHECK(units_of_merging(0, 132) == 0);
  CHECK(units_of_merging(2, 132) == 3);
  CHECK(units_of_merging(132, 132) == 12);
  CostedStep const step{false, 132, 60, 20, 132 * 12, 3, 2, 16};
  constexpr bool kEachTakesOne = true;
  CHECK(parts_pay_by_cost(step, 34, 2, kEachTakesOne));  // as late as chunks, 18 units and 16
  CHECK_FALSE(parts_pay_by_cost(step, 35, 2, kEachTakesOne));
  CHECK_FALSE(parts_pay_by_cost(step, 35, 0, kEachTakesOne));
  CostedStep const as_counted{false, 132, 60, 20, 132 * 12, 3, 3, 16};  // chunks take 12 units and 16
  CHECK(parts_pay_by_cost(as_counted, 28, 2, kEachTakesOne));
  CHECK_FALSE(parts_pay_by_cost(as_counted, 29, 2, kEachTakesOne));
  CostedStep const short_step{false, 132, 12, 8, 132 * 12, 3, 2, 16};  // the longest whole tile is done after 12
  CHECK(parts_pay_by_cost(short_step, 12, 2, kEachTakesOne));
  CHECK_FALSE(parts_pay_by_cost(short_step, 13, 2, kEachTakesOne));
  CHECK_FALSE(parts_pay_by_cost(short_step, 13, 0, !kEachTakesOne));
  CHECK(parts_pay_by_cost(short_step, 13, 0, kEachTakesOne));
  CostedStep const drafts{true, 132, 60, 20, 132 * 12, 3, 2, 16};  // with chunks all are done after a share and 20
  CHECK(parts_pay_by_cost(drafts, 40, 2, kEachTakesOne));
  CHECK_FALSE(parts_pay_by_cost(drafts, 41, 2, kEachTakesOne));
  CHECK_FALSE(parts_pay_by_cost(drafts, 40, 0, kEachTakesOne));  // cutting pays
  CostedStep const short_drafts{true, 132, 12, 8, 132 * 12, 3, 2, 16};
  CHECK_FALSE(parts_pay_by_cost(short_drafts, 13, 2, kEachTakesOne));
}

TEST_CASE("units: what starting and ending a tile takes counts for each tile beside its blocks") {
  MaskParams causal;
  causal.right = 0;
  for (MaskParams const& mask : {causal, MaskParams{}}) {
    for (SeqlenQK const len : {SeqlenQK{1, 1}, SeqlenQK{2048, 2048}, SeqlenQK{500, 9000}, SeqlenQK{300, 100}}) {
      SequenceWork const without = sequence_work({24, 80}, mask, len);
      SequenceWork const with = sequence_work({.queries = 24, .keys = 80, .ends = 3}, mask, len);
      CHECK(with.tiles == without.tiles);
      for (int m = 0; m < with.tiles; ++m) { CHECK(with.units_of(m) == without.units_of(m) + 3); }
      CHECK(with.sum() == without.sum() + 3 * without.tiles);
    }
  }
  CHECK(sequence_work({.ends = 3}, {}, {0, 100}).sum() == 0);
  // By the costs of dense calls; tiles of few queries have a least of their own, and fixed parts are no blocks.
  for (TileRow const& row : kTiles) {
    bool const prefill = family_of(row.tile) == KernelFamily::kPrefill;
    CHECK(tile_shape(row.tile, 1, true).ends == 0);
    if (row.use == TileUse::kRagged) {
      int const ends = tile_shape(row.tile, 1, false).ends;
      CHECK((ends >= 1 && ends <= 4));
      // With softcap a call cuts by the same metadata.
      TileRow const* const capped = find_tile(row.tile.head_dim, row.tile.head_dim_v, TileUse::kCapped);
      CHECK(tile_shape(capped->tile, 1, false).ends == ends);
    } else if (!prefill) {
      CHECK(tile_shape(row.tile, 1, false).ends == 0);
    }
  }
}

TEST_CASE("units: chunks of a causal prompt are the same work") {
  for (int const ratio : {1, 2, 4, 8}) {
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(ratio, 1);
    r.options.num_splits = 0;
    r.options.causal = true;
    r.lengths = {SeqlenQK{4096, 4096}};
    r.forced_splits = 256;
    Call call;
    make_call(r, call);
    KernelPlan const& kernel = call.plan.kernels.front();
    AttentionParams const params = params_of(call, kernel);
    REQUIRE(Schedule(params.schedule).by_units());
    Random random(7);
    std::vector<Done> done;
    REQUIRE(run_kernel(params, kernel, random, Turn::kLeastLoaded, done) == "");
    std::map<int, int> blocks;
    int all = 0;
    for (Done const& d : done) {
      blocks[d.cta] += d.work.range.blocks();
      all += d.work.range.blocks();
    }
    int most = 0;
    for (auto const& [cta, count] : blocks) { most = std::max(most, count); }
    // Each of the two or three items of a chunk is rounded to whole blocks.
    CHECK(most <= ceil_div(all, kernel.ctas) + 4);
  }
}

TEST_CASE("scheduled_packing: the most heads of a K/V head that fill a slab together, and one where there are none") {
  for (int ratio = 0; ratio <= 4 * kSlabRows; ++ratio) {
    int most = 1;
    for (int heads = 1; heads <= std::min(ratio, kSlabRows); ++heads) {
      if (ratio % heads == 0) { most = heads; }
    }
    CHECK(scheduled_packing(3 * ratio, 3) == most);
  }
}

TEST_CASE("schedule: fixed splits of a sequence follow from the sequence alone") {
  Random random(2);
  int parts = 0;
  int dense = 0;
  for (int i = 0; i < 400; ++i) {
    Request request = random_request(random);
    request.options.batch_invariant = true;
    if (request.alike) { continue; }
    if (request.lengths.size() > 40) { request.lengths.resize(40); }
    int const b = pick(random, 0, static_cast<int>(request.lengths.size()) - 1);
    int const keys = pick(random, 1, 20'000);
    request.lengths[static_cast<std::size_t>(b)] = {pick(random, 1, 40), keys};
    CAPTURE(text_of(request));
    Call call;
    make_call(request, call);
    Request alone = request;
    alone.lengths = {request.lengths[static_cast<std::size_t>(b)]};
    alone.sm_count = pick(random, 1, 200);
    alone.options.num_splits = pick(random, 0, 256);
    alone.packed_q = !request.packed_q;
    alone.slack = pick(random, 0, 5000);
    bool const plain = request.leftpad == 0 && request.page_unit == 1 && request.options.cp_world_size == 1;
    alone.alike = plain && pick(random, 0, 1) == 0;  // a dense call
    dense += alone.alike;
    Call other;
    make_call(alone, other);
    auto const cuts = cuts_of(call, b, random);
    REQUIRE(cuts == cuts_of(other, 0, random));
    for (auto const& [m, ranges] : cuts) { parts += ranges.size() > 1; }
  }
  CHECK(parts > 40);
  CHECK(dense > 10);
}

TEST_CASE("schedule: a graph that was captured with rows for the longest of all sequences serves shorter ones") {
  Random random(9);
  for (int i = 0; i < 200; ++i) {
    Request request = random_request(random);
    SeqlenQK const longest{pick(random, 129, 900), pick(random, 1, 3000)};
    request.lengths.assign(static_cast<std::size_t>(pick(random, 1, 9)), longest);
    request.alike = request.options.batch_invariant = false;
    request.packed_q = request.packed_k = true;
    request.page_unit = 1;
    request.slack = request.leftpad = request.forced_splits = request.forced_cluster = 0;
    request.options.num_splits = 1;
    request.options.cp_world_size = 1;
    request.options.cp_rank = 0;
    CAPTURE(text_of(request));
    Call call;
    make_call(request, call);
    REQUIRE_FALSE(call.plan.listed);
    REQUIRE_FALSE(call.plan.makes_schedule);
    call.lengths.cu_seqlens_q = shorter_starts(random, request.lengths.size(), longest.q);
    call.lengths.cu_seqlens_k = shorter_starts(random, request.lengths.size(), longest.k);
    call.sequences.cu_seqlens_q = call.lengths.cu_seqlens_q.data();
    call.sequences.cu_seqlens_k = call.lengths.cu_seqlens_k.data();
    KernelPlan const& kernel = call.plan.kernels.front();
    AttentionParams const params = params_of(call, kernel);
    std::string fault;
    std::vector<Done> done;
    if (params.cluster.on()) {  // several tiles of 32 rows
      fault = run_clusters(params, kernel, done);
    } else {
      done = is_paired(kernel) ? run_pairs(params, kernel, fault) : run_tile_list(params, kernel);
    }
    REQUIRE(fault == "");
    REQUIRE(coverage_fault(call, kernel, params, parts_of_tiles(params, done)) == "");
  }
}

TEST_CASE("schedule: damaged metadata leads to no place outside, no slot outside and an end") {
  Random random(3);
  std::int64_t items = 0;
  int by_clusters = 0, drawn = 0, by_units = 0;  // where the schedule decides
  int mixed = 0, mixed_many = 0, along = 0;
  for (int i = 0; i < 900; ++i) {
    Request request = random_request(random);
    request.alike = false;
    request.forced_cluster = -1;
    if (request.lengths.size() > 64) { request.lengths.resize(64); }
    if (i % 2 == 0) {
      for (SeqlenQK& len : request.lengths) { len.q = std::min(len.q, 2); }
      request.slack = 0;
      request.slack_k = 20'000;
      request.forced_cluster = request.forced_splits = 0;
      request.options.num_splits = 0;
      request.options.batch_invariant = false;
    }
    if (i % 8 == 3) {  // a kernel for many queries that takes few along
      request = {};
      request.head_dim =
          one_of<int>(random, {96, 96, 128, 256});  // most often the one without a kernel for both classes
      request.slack_k = 20'000;
      request.options.num_splits = 0;
      request.options.causal = true;
      for (int prompts = pick(random, 2, 8); prompts > 0; --prompts) { request.lengths.push_back({500, 2000}); }
      for (int few = pick(random, 0, 3); few > 0; --few) { request.lengths.push_back({1, pick(random, 1, 9000)}); }
    }
    if (i % 4 == 1) {  // a kernel for both classes, and that of many sequences
      bool const many = i % 8 == 1;
      request = {};
      request.heads_k = 1;
      request.slack_k = many ? 0 : 20'000;
      request.options.num_splits = 0;
      request.options.causal = true;
      int const singles = many ? pick(random, 170, 400) : pick(random, 2, 120);
      request.lengths.assign(static_cast<std::size_t>(singles), SeqlenQK{1, pick(random, 1, many ? 900 : 9000)});
      for (int prompts = pick(random, 1, 3); prompts > 0; --prompts) { request.lengths.push_back({500, 2000}); }
    }
    CAPTURE(i);
    CAPTURE(text_of(request));
    Call call;
    make_call(request, call);
    if (!call.plan.listed && call.plan.cluster == 0) { continue; }
    int const kind = pick(random, 0, 3);
    for (std::size_t at = 0; at < call.metadata.size(); ++at) {
      int const noise = static_cast<int>(random());
      if (kind == 0) { call.metadata[at] = noise; }
      if (kind == 1) { call.metadata[at] = pick(random, -3, 200); }
      if (kind == 2 && pick(random, 0, 9) == 0) { call.metadata[at] = noise >> pick(random, 0, 31); }
      if (kind == 3 && pick(random, 0, 9) == 0) { call.metadata[at] += pick(random, -2, 2); }
    }
    for (KernelPlan const& kernel : call.plan.kernels) {
      AttentionParams const params = params_of(call, kernel);
      if (kernel.family == KernelFamily::kPrefill && !call.plan.listed) { continue; }  // it reads no schedule
      // Bounds of what the kernels may take; far larger bounds only take longer.
      if (kernel.most_units > 200'000) { continue; }
      mixed += is_mixed(kernel.tile.calls);
      mixed_many += kernel.tile.calls == Calls::kMixedMany;
      along += call.plan.for_both && !is_mixed(kernel.tile.calls);
      std::vector<Done> done;
      WorkFrom const from = kernel.family == KernelFamily::kDecode ? work_of(params) : WorkFrom::kSchedule;
      if (params.cluster.by_schedule) {
        by_clusters += from == WorkFrom::kClusters;
        drawn += from == WorkFrom::kDrawnTiles;
        by_units += from == WorkFrom::kSchedule;
      }
      if (from == WorkFrom::kClusters) {
        REQUIRE(run_clusters(params, kernel, done) == "");
        REQUIRE(coverage_fault(call, kernel, params, parts_of_tiles(params, done)) == "");
      } else {
        std::string const fault = run_kernel(params, kernel, random, Turn::kRandom, done);
        CAPTURE(fault);
        REQUIRE((fault.empty() || fault == "a counter is not back at 0" || fault == kTooManyEmpty ||
                 fault == kSecondOfFew));
      }
      for (Done const& d : done) {
        ++items;
        Sequence const& sequence = d.work.sequence;
        REQUIRE((sequence.batch >= 0 && sequence.batch < call.problem.batch));
        REQUIRE(d.work.queries.last < sequence.len.q);
        BlockRange const& range = d.work.range;
        REQUIRE((range.begin >= 0 && range.begin <= range.full_begin && range.full_begin <= range.full_end &&
                 range.full_end <= range.end));
        REQUIRE((range.origin + range.begin * kernel.tile.keys < sequence.len.k || range.empty()));
      }
      if (!kernel.may_split || params.cluster.on()) { continue; }  // clusters that read no schedule
      SplitCombineTask task;
      task.schedule = params.schedule;
      task.cluster = params.cluster;
      task.packing = params.packing;
      task.mask = params.mask;
      task.slabs = slabs_of(kernel.tile);
      task.keys = kernel.tile.keys;
      auto const candidates = call.plan.fixed_splits ? kernel.most_tiles : kernel.partial_slots / 2 - 1;
      for (int candidate = 0; candidate < candidates; ++candidate) {
        Sequence sequence{};
        PartedTile const tile = find_parted_tile<KernelFamily::kPrefill>(task, call.sequences, sequence, candidate);
        if (tile.place < 0) { continue; }
        REQUIRE(from == WorkFrom::kSchedule);  // others leave nothing to merge
        REQUIRE((tile.place < call.problem.batch && tile.parts.count >= 1));
        REQUIRE((tile.head >= 0 && tile.head < params.schedule.head_groups.divisor));
        REQUIRE((tile.m >= 0 && tile.m * task.packing.queries_per_slab * task.slabs < sequence.len.q));
        for (int part : {0, tile.parts.count - 1}) {
          REQUIRE((tile.parts.slot(part) >= 0 && tile.parts.slot(part) < kernel.partial_slots));
        }
      }
    }
  }
  CHECK(items > 10'000);
  CHECK(by_clusters > 10);
  CHECK(drawn > 5);
  CHECK(by_units > 20);
  CHECK(mixed > 50);
  CHECK(mixed_many > 30);
  CHECK(along > 30);
}

TEST_CASE("schedule: more units than can be counted are taken as whole tiles") {
  // Keys that all sequences share can be as many as these.
  Request request;
  request.heads_q = request.heads_k = 64;
  request.options.num_splits = 0;
  request.lengths.assign(1 << 11, SeqlenQK{1, 1 << 20});
  Call call;
  make_call(request, call);
  KernelPlan const& kernel = call.plan.kernels.back();
  REQUIRE(kernel.family == KernelFamily::kDecode);
  CHECK(kernel.may_split);
  ScheduleParams const params = schedule_of(call, kernel);
  CHECK_FALSE(Schedule(params).by_units());
  CHECK(Schedule(params).tiles() == 64 << 11);

  // Forced splits cut whatever can be counted.
  for (int const more : {0, 1}) {  // than can be, in the last place
    CAPTURE(more);
    Request forced = request;
    forced.forced_splits = 2;
    forced.lengths.assign((1 << 11) + more, SeqlenQK{1, 1 << 20});
    Call cut;
    make_call(forced, cut);
    CHECK(Schedule(schedule_of(cut, cut.plan.kernels.back())).by_units() == (more == 0));
  }

  request.alike = true;
  Call dense;
  make_call(request, dense);
  CHECK_FALSE((dense.plan.listed && dense.plan.kernels.back().may_split));
}

TEST_CASE("WorkSource: whether the lengths near the first item are still what they were") {
  Request request;
  request.options.num_splits = 0;
  request.lengths.assign(70, SeqlenQK{500, 700});  // of which 32 are near at a time
  Call call;
  make_call(request, call);
  AttentionParams const params = params_of(call, call.plan.kernels.front());
  auto const holds = [&](int changed, int more) {
    WithState<WorkSource<32>> found(params, call.plan.kernels.front().tile);
    WorkItem item;
    Sequence sequence;
    found.next(item, sequence, [](Draws const&) { return 0; });
    call.lengths.seqused_k[static_cast<std::size_t>(changed)] += more;
    bool const still = found.source.lengths_hold();
    call.lengths.seqused_k[static_cast<std::size_t>(changed)] -= more;
    return still;
  };
  int const first = Schedule(params.schedule).sequence(0);
  CHECK(holds(first, 0));
  CHECK_FALSE(holds(first, -1));
  CHECK_FALSE(holds(Schedule(params.schedule).sequence(31), -1));
  CHECK(holds(Schedule(params.schedule).sequence(32), -1));  // nobody has looked at it
}

TEST_CASE("schedule: kernels of prefill and decode, which run beside each other, draw from counters of their own") {
  Request request;
  request.options.num_splits = 0;
  request.options.softcap = 30.0;  // so that there is no kernel for both
  request.lengths.assign(40, SeqlenQK{1, 3000});
  request.lengths.push_back({4000, 4000});
  Call call;
  make_call(request, call);
  REQUIRE(call.plan.kernels.size() == 2);
  std::set<int*> counters;
  for (KernelPlan const& kernel : call.plan.kernels) {
    counters.insert(Schedule(schedule_of(call, kernel)).draws(1).counter);
  }
  CHECK(counters.size() == 2);
  for (int* const counter : counters) {
    REQUIRE(counter != nullptr);
    CHECK(*counter == 0);  // a number of the schedule's own is none
  }
}

TEST_CASE("schedule: a graph's rows of the batch that no sequence has are not drawn beside prefill") {
  int const live = 40;
  Request request;
  request.options.num_splits = 0;
  request.lengths.assign(900, SeqlenQK{0, 0});
  std::fill_n(request.lengths.begin(), live, SeqlenQK{1, 300});
  request.lengths.push_back({1000, 1000});
  Call call;
  make_call(request, call);
  auto const decode = std::ranges::find(call.plan.kernels, KernelFamily::kDecode, &KernelPlan::family);
  REQUIRE(decode != call.plan.kernels.end());
  ScheduleParams const params = schedule_of(call, *decode);
  Schedule const schedule(params);
  REQUIRE_FALSE(schedule.by_units());
  CHECK(schedule.end() - schedule.begin() == 900);
  CHECK(drawn_tiles(schedule, params).draws.count == live * params.head_groups.divisor);
}

TEST_CASE("schedule: whole tiles of many queries are cut where they leave so much of the grid idle that it pays") {
  struct Grid {
    char const* why;
    int tiles;  // of the one sequence
    int units;  // of a tile
    bool is_cut;
  };
  for (Grid const& grid :
       {Grid{"half of the grid has no tile", 66, 100, true}, Grid{"a tile for each block", 132, 100, false},
        Grid{"one tile more", 133, 100, true}, Grid{"few tiles, too short to be merged", 40, 20, false},
        Grid{"full rounds", 264, 1000, false}, Grid{"a last round that is nearly full", 527, 1000, false}}) {
    CAPTURE(grid.why);
    ScheduleParams params;
    params.batch = 1;
    params.alike = {grid.tiles, grid.units};
    params.alike_units = params.alike.sum();
    params.ctas = 132;
    params.may_split = true;
    params.even_tiles = true;
    CHECK(Schedule(params).by_units() == grid.is_cut);
  }
}

TEST_CASE("leave_grid_idle: also where every block has a tile, but one is much longer than the others") {
  int const ctas = 132;
  CHECK(leave_grid_idle(ctas, 10LL * ctas, 400, ctas, false));
  CHECK_FALSE(leave_grid_idle(ctas, 390LL * ctas, 400, ctas, false));        // too little to be worth it
  CHECK_FALSE(leave_grid_idle(20 * ctas, 8000LL * ctas, 500, ctas, false));  // short ones fill the gap
}

TEST_CASE("leave_grid_idle: a kernel behind fills what whole tiles leave, as far as its work goes") {
  int const ctas = 132;
  long long const units = 88 * 205;              // of 88 tiles
  long long const idle = (132 - 88) * 205;       // what the grid could do until they end
  long long const worth = ctas * kWorthCutting;  // what cutting must save
  for (bool const even : {false, true}) {
    CHECK(leave_grid_idle(88, units, 205, ctas, even));
    CHECK(leave_grid_idle(88, units, 205, ctas, even, idle - worth - 1));
    CHECK_FALSE(leave_grid_idle(88, units, 205, ctas, even, idle - worth));
    CHECK_FALSE(leave_grid_idle(88, units, 205, ctas, even, 100 * idle));
  }
  // 22 more than a round: of the second one, too, all but these blocks would be idle.
  CHECK(leave_grid_idle(154, 154LL * 205, 205, ctas, true, idle));
  CHECK_FALSE(leave_grid_idle(154, 154LL * 205, 205, ctas, true, 3 * idle));
}

TEST_CASE("schedule: prefill before decode is cut only where decode has too little to do on the SMs that it leaves") {
  auto const is_cut = [](int singles, int keys) {
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(32, 8);
    r.options.num_splits = 0;
    r.options.causal = true;
    r.options.softcap = 30.0;  // so that there is no kernel for both
    r.lengths.assign(static_cast<std::size_t>(singles), SeqlenQK{1, keys});
    r.lengths.push_back({512, 16384});  // 88 tiles
    Call call;
    make_call(r, call);
    REQUIRE(call.plan.kernels.size() == 2);
    REQUIRE_FALSE(call.plan.decode_first);
    REQUIRE(call.plan.kernels[0].may_split);
    return Schedule(schedule_of(call, call.plan.kernels[0])).by_units();
  };
  CHECK_FALSE(is_cut(64, 8192));  // 64 x 8 tiles of 64 blocks, where 44 x 205 blocks' time is left
  CHECK(is_cut(64, 128));
  CHECK(is_cut(8, 2048));
}

TEST_CASE("schedule: tiles are cut for the last round only if those of all sequences are about as long") {
  auto const is_cut = [](std::vector<SeqlenQK> lengths) {
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(96, 8);
    r.options.num_splits = 0;
    r.options.causal = true;
    r.slack_k = 100'000;       // so that the tiles of a sequence as long as may be are even
    r.options.softcap = 30.0;  // tiles of as many rows as metadata count
    r.lengths = std::move(lengths);
    Call call;
    make_call(r, call);
    ScheduleParams const params = schedule_of(call, call.plan.kernels[0]);
    REQUIRE((params.even_tiles && params.may_split));
    return Schedule(params).by_units();
  };
  CHECK(is_cut({{36, 20'000}, {36, 20'000}, {36, 20'000}, {36, 20'000}, {36, 20'000}, {36, 20'000}}));  // 144 tiles
  // 1,100 tiles in 8 rounds and a third, of 8 to 97 units.
  std::vector<SeqlenQK> mixed{{924, 7468}, {536, 4108}, {85, 85}};
  mixed.insert(mixed.end(), 33, SeqlenQK{6, 1193});
  CHECK_FALSE(is_cut(mixed));
}

TEST_CASE("schedule: tiles of fewer rows than metadata count have no last round, since some of those do not exist") {
  Request r;
  std::tie(r.heads_q, r.heads_k) = std::pair(32, 8);
  r.options.num_splits = 0;
  r.options.causal = true;
  r.lengths.assign(4, SeqlenQK{512, 16384});  // 512 tiles of 128 rows in four rounds; 544 are counted
  Call call;
  make_call(r, call);
  ScheduleParams const params = schedule_of(call, call.plan.kernels[0]);
  REQUIRE((params.resized.on() && params.may_split));
  Schedule const schedule(params);
  CHECK(schedule.tiles() == 544);
  CHECK_FALSE(schedule.by_units());
}

TEST_CASE("schedule: chunks of prefill before decode leave it the SMs on which it ends with them") {
  auto const ctas_of_prefill = [](int singles, int keys) {
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(16, 2);
    r.options.num_splits = 0;
    r.options.causal = true;
    r.slack_k = 100'000;
    r.options.softcap = 30.0;  // so that there is no kernel for both
    r.lengths.assign(static_cast<std::size_t>(singles), SeqlenQK{1, keys});
    r.lengths.push_back({150, 9000});
    Call call;
    make_call(r, call);
    REQUIRE(call.plan.kernels.size() == 2);
    Schedule const schedule(schedule_of(call, call.plan.kernels[0]));
    REQUIRE((!call.plan.decode_first && schedule.by_units()));
    return schedule.ctas();
  };
  // Seven tiles of 111 to 113 blocks of 80 keys, and 3 units each: 805 of a head group.
  // Its grid, less than the 132 - 132 * 32 / 837 that eight tiles of at least four units would leave.
  CHECK(ctas_of_prefill(8, 1) == 99);
  CHECK(ctas_of_prefill(8, 9000) == 132 - 132 * 568 / 1373);  // of 71 blocks of 128 keys
  CHECK(ctas_of_prefill(8, 50'000) == 132 - 99);              // decode needs no more
}

TEST_CASE("schedule: a kernel for both classes cuts tiles where those of few queries would begin late") {
  auto const is_cut = [](int queries, int singles, int keys) {
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(16, 2);
    r.options.num_splits = 0;
    r.options.causal = true;
    r.slack_k = 100'000;
    r.lengths.assign(static_cast<std::size_t>(singles), SeqlenQK{1, keys});
    r.lengths.push_back({queries, queries});
    Call call;
    make_call(r, call);
    REQUIRE(is_mixed(call.plan.kernels.front().tile.calls));
    Schedule const schedule(schedule_of(call, call.plan.kernels.front()));
    int const stride = schedule_stride(call.problem.batch);
    int const parts = UnitsAndParts::parts(*where_is(call.metadata.data(), stride, kMostUnitsDecode));
    return schedule.by_units() && !(schedule.numbers().even_parts() && parts == 1);
  };
  CHECK_FALSE(is_cut(100, 8, 11 * 128));  // parts of six are merged when the whole is done
  CHECK(is_cut(100, 8, 12 * 128));
  // A prompt's tiles of 5 to 31 units, 24 for each CTA: alone, the longest is not worth cutting. Behind them, 20 are.
  CHECK_FALSE(is_cut(2200, 1, 128));
  CHECK(is_cut(2200, 8, 26 * 128));
}

TEST_CASE("schedule: a tile of fewer rows than metadata count is as much shorter when it is asked whether to cut") {
  ScheduleParams params;
  params.resized = {3, FastDivmod(2)};
  CHECK(params.resized.units(30) == 20);
  CHECK(params.resized.units(31) == 21);  // rounded up
  CHECK(params.resized.units(-1) >= 0);   // of damaged metadata, something
  params.resized = {3, FastDivmod(3)};
  CHECK(params.resized.units(31) == 31);
}

TEST_CASE("rows_of_queries: up to the last row that holds a query, past the idle rows of full slabs") {
  Packing const off = make_packing(1);
  CHECK(rows_of_queries(off, 0) == 0);
  CHECK(rows_of_queries(off, 1) == 1);
  CHECK(rows_of_queries(off, 64) == 64);
  CHECK(rows_of_queries(off, 65) == 65);
  Packing const five = make_packing(5);  // 12 queries in 60 of 64 rows
  CHECK(rows_of_queries(five, 1) == 5);
  CHECK(rows_of_queries(five, 12) == 60);
  CHECK(rows_of_queries(five, 13) == 69);
  CHECK(rows_of_queries(five, 36) == 188);
}

TEST_CASE("draws: late in lists that a few rounds of their longest tiles outlast") {
  auto const ends_soon = [](std::vector<SeqlenQK> lengths, int item) {
    Request r;
    std::tie(r.heads_q, r.heads_k) = std::pair(32, 4);
    r.options.causal = true;
    r.lengths = std::move(lengths);
    Call call;
    make_call(r, call);
    ScheduleParams const params = schedule_of(call, call.plan.kernels.front());
    auto const state = std::make_unique<WorkSourceState<1>>(Schedule(params));
    REQUIRE(item < state->draws.count);
    return state->draws.end_soon(item);
  };
  // 156 tiles as long as 102 blocks and 700 of up to 39: a block with two long ones has no time for a third.
  CHECK(ends_soon({{927, 8144}, {3070, 3070}, {1505, 1505}}, 0));
  std::vector<SeqlenQK> const alike(40, SeqlenQK{2000, 2000});  // 25 rounds
  CHECK_FALSE(ends_soon(alike, 0));
  CHECK(ends_soon(alike, 40 * 84 * 4 - 500));  // of the last four
}

TEST_CASE("tiles_are_even: where the first query sees three quarters of the keys of the last") {
  struct Prompt {
    char const* why;
    MaskParams mask;
    SeqlenQK len;
    bool even;
  };
  MaskParams const causal{.right = 0};
  for (Prompt const& prompt :
       {Prompt{"no mask", {}, {1000, 1000}, true}, Prompt{"causal", causal, {1000, 1000}, false},
        Prompt{"a chunk behind just enough keys", causal, {101, 400}, true},
        Prompt{"one query more", causal, {102, 400}, false}, Prompt{"no query", causal, {0, 400}, true}}) {
    CAPTURE(prompt.why);
    CHECK(tiles_are_even({.seqlen_q = prompt.len.q, .seqlen_k = prompt.len.k, .mask = prompt.mask}) == prompt.even);
  }
}

TEST_CASE("TileWork: rows of V are hidden where there is memory of keys that the tile does not see, and only there") {
  Random random(17);
  int hidden = 0;
  int arriving_as_zeros = 0;
  for (int i = 0; i < 20'000; ++i) {
    MaskParams const mask{.left = pick(random, -1, 40), .right = pick(random, -1, 40)};
    SeqlenQK const len{pick(random, 1, 30), pick(random, 0, 90)};
    int const first_row = pick(random, 0, len.q - 1);
    int const block = one_of<int>(random, {8, 16, 24});
    TileWork work;
    work.sequence.k_row = pick(random, 0, 20);
    work.sequence.k_memory = len.k + one_of<int>(random, {0, 1, 50});
    work.range = block_range(mask, first_row, pick(random, first_row, len.q - 1), len, block,
                             {one_of<int>(random, {1, 8}), work.sequence.k_row});
    for (int n = work.range.begin; n < work.range.end; ++n) {
      KeyInterval const keep = work.rows_to_keep(n, block);
      bool hides = false;
      bool keeps_right = true;
      for (int row = 0; row < block; ++row) {
        int const key = work.first_key(n, block) + row;
        bool const is_seen = work.range.keys.begin <= key && key < work.range.keys.end;
        keeps_right = keeps_right && is_seen == (keep.begin <= row && row < keep.end);
        hides = hides || (!is_seen && key < work.sequence.k_memory);
        arriving_as_zeros += key >= work.sequence.k_memory;
      }
      CAPTURE(i);
      CAPTURE(n);
      REQUIRE(keeps_right);
      REQUIRE(work.hides_rows_of_pages(n, block) == hides);
      hidden += hides;
    }
  }
  CHECK(hidden > 5000);
  CHECK(arriving_as_zeros > 5000);
}

TEST_CASE("find_place: the first place whose sum is greater, past those that add nothing") {
  Random random(4);
  for (int i = 0; i < 2000; ++i) {
    std::vector<int> until;
    int sum = 0;
    int const count = pick(random, 0, i % 10 == 0 ? 5000 : 100);
    for (int p = 0; p < count; ++p) { until.push_back(sum += pick(random, 0, 1) * pick(random, 0, 4)); }
    int const begin = pick(random, 0, count);
    int const x = pick(random, -1, sum + 1);
    int expected = begin;
    while (expected < count && until[static_cast<std::size_t>(expected)] <= x) { ++expected; }
    REQUIRE(find_place(begin, count, x, [&](int p) {
              REQUIRE((p >= begin && p < count));
              return until[static_cast<std::size_t>(p)];
            }) == expected);
  }
}

TEST_CASE("scaled_cut: units of the longest sequences fall on blocks in proportion, and never go back") {
  Random random(8);
  for (int i = 0; i < 20'000; ++i) {
    int const blocks = 1 << pick(random, 0, 22);
    int const longest = blocks + pick(random, 0, blocks);
    int const units = std::max(1, static_cast<int>(std::int64_t{longest} * pick(random, 30, 300) / 100));
    int const x = pick(random, 0, units);
    int const cut = scaled_cut(x, units, longest);
    CAPTURE(units);
    CAPTURE(longest);
    CAPTURE(x);
    REQUIRE(std::abs(cut - std::int64_t{x} * longest / units) <= 1 + longest / 1000);
    REQUIRE(cut <= scaled_cut(std::min(units, x + 1), units, longest));
    REQUIRE((cut >= 0 && cut <= longest));
    REQUIRE(scaled_cut(units, units, longest) == longest);
  }
  CHECK(scaled_cut(0, 3, 7) == 0);
  CHECK(scaled_cut(3, 3, 7) == 7);
}

TEST_CASE("part_of: parts of a range are disjoint, cover it, and keep which blocks need no mask") {
  Random random(5);
  for (int i = 0; i < 20'000; ++i) {
    int const end = pick(random, 0, 60);
    int const full_begin = pick(random, 0, end);
    int const full_end = pick(random, full_begin, end);
    BlockRange const range{3, 0, full_begin, full_end, end, {3, 3 + 16 * end}};
    int const parts = pick(random, 1, 70);
    int next = 0;
    int plain = 0;
    for (int first = 0; first < parts;) {
      int const last = pick(random, first + 1, parts);
      BlockRange const part = part_of(range, first, last, parts);
      first = last;
      if (part.empty()) { continue; }
      REQUIRE(part.begin == next);
      REQUIRE(part.origin == range.origin);
      REQUIRE((part.begin <= part.full_begin && part.full_begin <= part.full_end && part.full_end <= part.end));
      plain += part.full_end - part.full_begin;
      next = part.end;
    }
    REQUIRE(next == end);
    REQUIRE(plain == full_end - full_begin);
  }
  constexpr int kMany = 1 << 23;  // blocks of the longest sequence
  BlockRange const longest{0, 0, 0, kMany, kMany, {0, kMany * 64}};
  CHECK(part_of(longest, kMany - 1, kMany, kMany).begin == kMany - 1);
}

TEST_CASE("sequence_at: lengths, offsets and places as the public names say") {
  std::vector<int> const cu_q{0, 3, 3, 10};
  std::vector<int> const cu_k{0, 5, 20, 40};
  std::vector<int> const used{4, 9, 30};
  SequenceParams p;
  p.batch = 3;
  p.seqlen_q = 10;
  p.capacity_k = p.seqused_k_all = 40;
  CHECK(sequence_at(p, 2).q_batch == 2);
  CHECK(sequence_at(p, 2).len.q == 10);
  CHECK(sequence_at(p, 2).len.k == 40);
  p.cu_seqlens_q = cu_q.data();
  CHECK(sequence_at(p, 1).len.q == 0);
  CHECK(sequence_at(p, 2).q_batch == 0);
  CHECK(sequence_at(p, 2).q_row == 3);
  CHECK(sequence_at(p, 2).len.q == 7);
  p.cu_seqlens_k = cu_k.data();
  CHECK(sequence_at(p, 1).k_row == 5);
  CHECK(sequence_at(p, 1).len.k == 15);
  CHECK(sequence_at(p, 1).k_batch == 0);
  p.seqused_k = used.data();
  CHECK(sequence_at(p, 1).len.k == 9);
  p.seqlen_k_new = 2;
  CHECK(sequence_at(p, 1).len.k == 11);
  CHECK(sequence_at(p, 1).len.k_total == 11);
  p.cu_seqlens_k = nullptr;
  std::vector<int> const pad{0, 4, 50};
  p.cache_leftpad = pad.data();
  CHECK(sequence_at(p, 1).k_row == 4);
  CHECK(sequence_at(p, 1).k_memory == 36);
  CHECK(sequence_at(p, 1).len.k == 7);
  CHECK(sequence_at(p, 2).len.k == 0);
  std::vector<int> const places{1, 0, 7};
  p.cache_batch_idx = places.data();
  p.cache_batches = 2;
  CHECK(sequence_at(p, 0).k_batch == 1);
  CHECK(sequence_at(p, 0).len.k == 6);
  CHECK(sequence_at(p, 2).len.k == 0);
  std::vector<int> const total{100, 200, 300};
  p.cp_tot_seqused_k = total.data();
  CHECK(sequence_at(p, 0).len.k_total == 100);
  CHECK(sequence_at(p, 0).len.k == 6);
}

TEST_CASE("sequence_at: whatever the tensors hold, rows stay inside the memory there is") {
  Random random(6);
  for (int i = 0; i < 20'000; ++i) {
    int const batch = pick(random, 1, 4);
    std::vector<std::vector<int>> tensors(8, std::vector<int>(static_cast<std::size_t>(batch) + 1));
    for (auto& tensor : tensors) {
      int const bits = pick(random, 0, 31);
      for (int& value : tensor) { value = static_cast<int>(random()) >> bits; }
    }
    auto const maybe = [&](std::size_t which) { return pick(random, 0, 1) == 0 ? nullptr : tensors[which].data(); };
    SequenceParams p;
    p.cu_seqlens_q = maybe(0);
    p.cu_seqlens_k = maybe(1);
    p.seqused_q = maybe(2);
    p.seqused_k = maybe(3);
    p.cu_seqlens_k_new = maybe(4);
    p.cache_batch_idx = maybe(5);
    p.cache_leftpad = maybe(6);
    p.cp_tot_seqused_k = maybe(7);
    p.batch = batch;
    p.seqlen_q = pick(random, 0, 100);
    p.capacity_k = pick(random, 0, 1) == 0 ? pick(random, 0, 100) : 1 << 29;
    p.seqused_k_all = pick(random, 0, p.capacity_k);
    p.seqlen_k_new = pick(random, 0, 1) * pick(random, 0, 1 << 29);
    p.cache_batches = pick(random, 0, 3);
    Sequence const s = sequence_at(p, pick(random, 0, batch - 1));
    REQUIRE((s.q_row >= 0 && s.len.q >= 0 && s.q_row + s.len.q <= p.seqlen_q));
    REQUIRE((s.k_row >= 0 && s.len.k >= 0 && s.k_memory >= s.len.k && s.k_row + s.k_memory == p.capacity_k));
    REQUIRE((s.len.k_total >= 0 && s.len.k_total <= 1 << 29));
    REQUIRE((p.cache_batch_idx == nullptr || s.len.k == 0 || (s.k_batch >= 0 && s.k_batch < p.cache_batches)));
  }
}

TEST_CASE(
    "fixed_parts: of a quarter of the longest whole tile, at most 32 up to 32 times as many keys, then of so many") {
  for (auto const& [blocks, parts] : std::vector<std::pair<int, int>>{{0, 1},
                                                                      {1, 1},
                                                                      {32, 1},
                                                                      {33, 5},
                                                                      {64, 8},
                                                                      {65, 9},
                                                                      {256, 32},
                                                                      {257, 32},
                                                                      {1024, 32},
                                                                      {1025, 33},
                                                                      {4096, 128}}) {
    CAPTURE(blocks);
    CHECK(fixed_parts(blocks, 32) == parts);
  }
}

TEST_CASE("cutting_pays: where shared units were faster than whole tiles on an H200, and where not") {
  struct Case {
    char const* why;
    WholeTiles of;
    int size;
    bool pays;
  };
  auto const alike = [](int tiles, int blocks) { return WholeTiles{tiles, std::int64_t{tiles} * blocks, blocks}; };
  for (Case const& c : {
           Case{"one for each pair of SMs", alike(64, 64), 1, false},
           Case{"as many as CTAs", alike(128, 64), 1, false},
           Case{"two full rounds", alike(256, 64), 1, false},
           Case{"a last round that reads as fast as memory allows", alike(200, 64), 1, false},
           Case{"pairs of SMs with one tile and with two", alike(72, 64), 1, true},
           Case{"the same, short", alike(72, 16), 1, false},
           Case{"the same, nearly all with two", alike(120, 64), 1, false},
           Case{"four behind a full round", alike(136, 64), 1, true},
           Case{"four short ones", alike(136, 16), 1, false},
           Case{"28 behind a full round", alike(160, 64), 1, true},
           Case{"few long ones", alike(8, 256), 1, true},
           Case{"few short ones", alike(8, 12), 1, false},
           Case{"clusters of two, 80 CTAs", alike(40, 64), 2, false},
           Case{"the same, long", alike(40, 256), 2, true},
           Case{"clusters that take all CTAs", alike(16, 256), 8, false},
           Case{"four in clusters of 16: 45 us by units, and 37 to 50 whole", alike(4, 512), 16, false},
           Case{"one of 32k among 24, in clusters of 4", {24, 2313, 255}, 4, true},
           Case{"one of 8k among 32", {32, 640, 64}, 1, true},
           Case{"of all lengths, two rounds", {256, 4 * 2100, 64}, 1, false},
           Case{"one of 64k among 192", {192, 36'600, 512}, 1, true},
           Case{"none", {0, 0, 0}, 1, false},
       }) {
    CAPTURE(c.why);
    CHECK(cutting_pays(c.of, c.size, 132) == c.pays);
  }
}

TEST_CASE("cutting_pays: shorter tiles where no combine kernel follows") {
  int const enough = enough_readers(132, false);
  WholeTiles const short_ones{96, 96 * 32, 32};  // pairs of SMs with one tile and with two: 57 instead of 62 us
  CHECK(!cutting_pays(short_ones, 1, 132, enough));
  CHECK(cutting_pays(short_ones, 1, 132, enough, kUnitsOfCuttingAlone));
  WholeTiles const one_long{21, 18 * 20 + 128, 128};  // 18.9 instead of 19.3 us, in clusters of 4
  CHECK(cutting_pays(one_long, 4, 132, enough, kUnitsOfCuttingAlone));
  WholeTiles const none_long{128, 128 * 64, 64};
  CHECK(!cutting_pays(none_long, 1, 132, enough, kUnitsOfCuttingAlone));
  CHECK(units_of_cutting(true, false) == kUnitsOfCuttingAlone);
  CHECK(units_of_cutting(false, false) == kUnitsOfCutting);
  CHECK(units_of_cutting(true, true) == kUnitsOfCutting);  // batch_invariant: a combine kernel follows
}

TEST_CASE("cutting_pays_beside: prefill that takes much of the card leaves decode too few CTAs for long tiles") {
  int const enough = enough_readers(132, false);
  FewReaders const readers{.ctas = 132, .beside_prefill = 99};
  WholeTiles const of{64, 64 * 128, 128};  // as fast as all by themselves
  CHECK(!cutting_pays(of, 1, 132));
  CHECK(!cutting_pays_beside(of, 0, 1, readers, enough));
  CHECK(!cutting_pays_beside(of, 500, 1, readers, enough));    // a short prompt
  CHECK(cutting_pays_beside(of, 4'000, 1, readers, enough));   // one of 2k tokens
  CHECK(!cutting_pays_beside(of, 4'000, 2, readers, enough));  // clusters of two take half as long
  WholeTiles const many{256, 256 * 32, 32};
  CHECK(!cutting_pays_beside(many, 4'000, 1, readers, enough));  // none is long
  WholeTiles const longer{64, 64 * 32, 32};                      // than two shares, but by less than cutting takes
  CHECK(!cutting_pays_beside(longer, 40'000, 1, readers, enough));
  WholeTiles const few{8, 8 * 256, 256};
  CHECK(cutting_pays_beside(few, 0, 1, readers, enough));  // as without prefill
  // What 67 CTAs read, which is all of slower memory, is no sooner there in parts than to 64 with whole tiles.
  CHECK(!cutting_pays_beside(of, 4'000, 1, {.ctas = 132, .beside_prefill = 67}, enough));
}

TEST_CASE("cutting_pays: CTAs that merge parts on the way must be nearly all") {
  int const enough = enough_readers(132, true);
  CHECK(cutting_pays({64, 64 * 64, 64}, 1, 132, enough));
  CHECK(!cutting_pays({132, 132 * 64, 64}, 1, 132, enough));
  CHECK(!cutting_pays({256, 4 * 2100, 64}, 1, 132, enough));
}

TEST_CASE("PlacesAndCuts: all facts of the metadata's word come back, whatever else is in it, even in the sign") {
  for (int const places : {0, 1, 77, (1 << 26) - 1}) {
    for (int const cuts : {0, 1, 2, 3}) {
      for (bool const even : {false, true}) {
        bool const one_each = even && cuts % 2 == 0;
        int const fact = PlacesAndCuts{places, cuts, 3 - cuts, even, one_each}.fact();
        auto const found = PlacesAndCuts::of(fact);
        CHECK((fact < 0) == one_each);
        CHECK(found.one_each == one_each);
        CHECK(found.prefill == places);
        CHECK(found.cuts_decode == cuts);
        CHECK(found.cuts_all == 3 - cuts);
        CHECK(found.even_parts == even);
      }
    }
  }
  CHECK(PlacesAndCuts::of(-1).prefill == (1 << 26) - 1);  // damaged: readers take no more places than there are
}

TEST_CASE("UnitsAndParts: sums of both are the sums of each, up to the most that there may be") {
  int const a = UnitsAndParts::of(700, 3);
  int const b = UnitsAndParts::of(1, 2000);
  CHECK(UnitsAndParts::units(a + b) == 701);
  CHECK(UnitsAndParts::parts(a + b) == 2003);
  int const most = UnitsAndParts::of(UnitsAndParts::kMostUnits, UnitsAndParts::kMostParts);
  CHECK(most >= 0);
  CHECK(UnitsAndParts::units(most) == UnitsAndParts::kMostUnits);
  CHECK(UnitsAndParts::parts(most) == UnitsAndParts::kMostParts);
  CHECK(UnitsAndParts::parts(-1) >= 0);  // damaged: no number below 0
}

}  // namespace hopper_attention
