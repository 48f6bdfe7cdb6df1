// Problem + device facts -> Plan. Pure: no pointers, no CUDA calls.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "hopper_attention/forward.h"
#include "hopper_attention/testing.h"
#include "host/require.h"
#include "host/schedule_shape.h"
#include "host/tile_order.h"
#include "kernels/block_range.h"
#include "kernels/host_device.h"
#include "kernels/tile_config.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {
namespace {

using testing::ForcedPlan;

constexpr int kElementBytes = 2;
constexpr int kWarpgroupThreads = 128;
// Of L2, for K and V. With 0.6 (36 of an H200's 60 MB) a full call of 4k tokens read 679 MB from DRAM and with 0.4 417
// MB, where its inputs are 202 MB (bench --suite io).
constexpr double kL2Share = 0.4;
constexpr std::int64_t kMaxTiles = std::int64_t{1} << 30;  // the scheduler counts in int

// Packing must save a little for certain.
constexpr double kPackingGain = 0.97;
constexpr std::int64_t kTilesToCost = 1024;  // of a head; more are sampled

// Clusters of more than 8 blocks are not portable: a card with SMs switched off may have no GPC with 16 of them.
constexpr int kPortableCluster = 8;
constexpr int kSmsForLargestCluster = 132;

// Tiles with at most so many key blocks are alike enough to be taken in turn.
constexpr int kMostBlocksOfShortTile = 4;

// Of K and V that a decode tile, or the share of a thread block in it, may have to read so that no schedule is needed
// to balance them: an SM reads about 100 GB/s, so this is what the longest sequence may cost among short ones, 40 us.
constexpr std::int64_t kMostBytesOfShare = std::int64_t{4} << 20;

std::string text_of(MaskParams const& mask) {
  if (mask == MaskParams{}) { return "no mask"; }
  std::string text;
  auto const add = [&](std::string const& part) { text += (text.empty() ? "" : ", ") + part; };
  if (mask.left == kUnlimited && mask.right == 0) {
    add("causal");
  } else if (mask.left != kUnlimited || mask.right != kUnlimited) {
    auto const side = [](int n) { return n == kUnlimited ? std::string("unlimited") : std::to_string(n); };
    add(concat("window (", side(mask.left), ", ", side(mask.right), ")"));
  }
  if (mask.chunk != 0) { add(concat("chunk ", mask.chunk)); }
  return text;
}

std::string text_of(Problem const& p) {
  return concat(dtype_name(p.dtype), ", batch ", p.batch, ", ", p.seqlen_q, " queries on ", p.seqlen_k, " keys, heads ",
                p.heads_q, "/", p.heads_k, ", head dims ", p.head_dim, "/", p.head_dim_v, ", ", text_of(p.mask),
                p.softcap == 0.0F ? "" : ", softcap", p.has_sinks ? ", sinks" : "",
                p.batch_invariant ? ", batch invariant" : "");
}

std::string megabytes(std::int64_t bytes) {
  std::int64_t const tenths = (bytes * 10 + (1 << 19)) >> 20;
  return concat(tenths / 10, ".", tenths % 10, " MiB");
}

bool agrees(TileConfig const& tile, TileConfig const& forced) {
  auto const same = [](int value, int wanted) { return wanted == 0 || value == wanted; };
  return same(tile.rows, forced.rows) && same(tile.keys, forced.keys) && same(tile.head_dim, forced.head_dim) &&
         same(tile.head_dim_v, forced.head_dim_v) && same(tile.stages, forced.stages);
}

std::string microseconds(double us) {
  auto const tenths = static_cast<std::int64_t>(us * 10 + 0.5);
  return us < 100 ? concat(tenths / 10, ".", tenths % 10) : concat(tenths / 10);
}

std::string percent(double share) { return concat(static_cast<int>(share * 100.0 + 0.5), " %"); }

TileConfig largest_tile() {
  TileConfig largest;
  for (TileRow const& row : kTiles) {
    if (row.tile.head_dim + row.tile.head_dim_v > largest.head_dim + largest.head_dim_v) { largest = row.tile; }
  }
  return largest;
}

// Each step decides one thing and says why.
class Planner {
 public:
  Planner(Problem const& problem, DeviceInfo const& device, ForcedPlan const& forced)
      : problem_(problem), device_(device), forced_(forced) {}

  Plan run() {
    check();
    plan_.dtype = problem_.dtype;
    because("problem", text_of(problem_));
    because("device", device_.name, ", ", device_.sm_count, " SMs, ", megabytes(device_.l2_bytes), " L2");
    if (output_elements() == 0) {
      because("kernel", "none: the output has no elements");
      return plan_;
    }
    choose_path();
    if (plan_.cluster > 0) {
      plan_clusters();
    } else if (plan_.listed) {
      plan_listed();
    } else {
      plan_dense();
    }
    KernelPlan const& first = plan_.kernels.front();
    plan_.kernel = first.family;
    plan_.tile = first.tile;
    plan_.ctas = first.ctas;
    plan_.threads = first.threads;
    return plan_;
  }

 private:
  template <class... Parts>
  void because(char const* decision, Parts const&... parts) {
    plan_.reasons.push_back(concat(decision, ": ", parts...));
  }

  void check() const {
    require(problem_.heads_k > 0 && problem_.heads_q % problem_.heads_k == 0,
            "problem: heads of q must be a multiple of heads of k, at least one: found ", problem_.heads_q, " and ",
            problem_.heads_k);
    require(device_.sm_count > 0, "device: the number of SMs must be at least 1, found ", device_.sm_count);
  }

  std::int64_t output_elements() const {
    return std::int64_t{problem_.batch} * problem_.heads_q != 0 && problem_.seqlen_q != 0 ? problem_.head_dim_v : 0;
  }

  int ratio() const { return problem_.heads_q / problem_.heads_k; }
  int head_groups() const { return problem_.heads_q / plan_.packed_heads; }

  // Query blocks of a head.
  std::int64_t m_blocks(TileConfig const& tile, int packed_heads) const {
    require(packed_heads <= rows_of_slab(tile), "packed_heads: ", packed_heads, " heads do not fit the ",
            rows_of_slab(tile), " rows of the tile");
    std::int64_t const queries_per_tile = std::int64_t{slabs_of(tile)} * (rows_of_slab(tile) / packed_heads);
    return ceil_div<std::int64_t>(problem_.seqlen_q, queries_per_tile);
  }

  // Nanoseconds of an SM for the tile of query block m.
  int tile_ns(TileRow const& row, Packing const& packing, int m) const {
    QueryRange const queries = query_range(packing, slabs_of(row.tile), m, problem_.seqlen_q);
    BlockRange const range =
        block_range(problem_.mask, queries.first, queries.last, {problem_.seqlen_q, problem_.seqlen_k}, row.tile.keys);
    return range.blocks() * row.cost.block + row.cost.tile;
  }

  // Microseconds of an SM for all heads of a sequence. Nothing of the batch or the card goes in: the bits of a result
  // must not depend on them.
  double sequence_us(TileRow const& row, int packed_heads) const {
    Packing const packing = make_packing(packed_heads, rows_of_slab(row.tile));
    std::int64_t const count = m_blocks(row.tile, packed_heads);
    std::int64_t const samples = std::min(count, kTilesToCost);
    double ns = 0;
    for (std::int64_t i = 0; i < samples; ++i) {
      ns += tile_ns(row, packing, static_cast<int>((2 * i + 1) * count / (2 * samples)));
    }
    double const tiles = static_cast<double>(count) * (problem_.heads_q / packed_heads);
    return samples == 0 ? 0.0 : ns / static_cast<double>(samples) * tiles * 1e-3;
  }

  // Few enough queries that one slab holds those of all heads of a K/V head.
  std::int64_t rows_of_sequence() const { return std::int64_t{problem_.seqlen_q} * scheduled_packing(); }
  bool decodes() const { return rows_of_sequence() <= kSlabRows; }
  // The tile of a sequence must not depend on the others where its bits must not.
  TileUse decode_use() const {
    if (rows_of_sequence() > kMostFewRows || problem_.batch_invariant) { return TileUse::kDecode; }
    // O^T of 96 columns is no multiple of 64: for them only the tile of 64 rows was built.
    TileRow const* const few = find_tile(problem_.head_dim, problem_.head_dim_v, TileUse::kFewRows);
    TileRow const* const many = find_tile(problem_.head_dim, problem_.head_dim_v, TileUse::kDecode);
    bool const alike = few != nullptr && many != nullptr && few->tile.head_dim == many->tile.head_dim;
    return alike && few->tile.head_dim_v == many->tile.head_dim_v ? TileUse::kFewRows : TileUse::kDecode;
  }
  int scheduled_packing() const { return hopper_attention::scheduled_packing(problem_.heads_q, problem_.heads_k); }

  int available_sms() const { return std::max(1, device_.sm_count - problem_.sm_margin); }
  int most_ctas(TileConfig const& tile) const {
    return forced_.ctas > 0 ? forced_.ctas : available_sms() * tile.per_sm;
  }

  static int threads_of(TileConfig const& tile) { return (slabs_of(tile) + 1) * kWarpgroupThreads; }

  TileRow const& tile_row(TileUse use) const {
    TileRow const* const row = find_tile(problem_.head_dim, problem_.head_dim_v, use);
    require<NotImplemented>(row != nullptr, "head_dim: no kernel holds head dims (", problem_.head_dim, ", ",
                            problem_.head_dim_v, ") of q and v; the largest is (", largest_tile().head_dim, ", ",
                            largest_tile().head_dim_v, ")");
    return *row;
  }

  bool holds(TileConfig const& tile) const { return problem_.softcap == 0.0F || holds_softcap(tile); }

  // A row of kTiles for a forced tile, of one of the uses; nullptr if none agrees.
  template <class Fits>
  TileRow const* forced_row(Fits uses) const {
    auto const fits = [&](TileRow const& candidate) {
      return uses(candidate.use) && agrees(candidate.tile, forced_.tile) && holds(candidate.tile) &&
             candidate.tile.head_dim >= problem_.head_dim && candidate.tile.head_dim_v >= problem_.head_dim_v;
    };
    auto const found = std::find_if(kTiles.begin(), kTiles.end(), fits);
    return found == kTiles.end() ? nullptr : &*found;
  }

  [[noreturn]] void refuse_forced_tile() const {
    raise<InvalidArgument>("tile: no kernel with head dims of at least (", problem_.head_dim, ", ", problem_.head_dim_v,
                           ") agrees with the forced tile ", forced_.tile, " (0: any)",
                           problem_.softcap == 0.0F ? "" : "; softcap needs a tile of at most 128 keys");
  }

  // Thread blocks that share each tile, where there is one for each sequence and group of heads and all of them run at
  // once or are short; 0: a schedule is better. Sequences that are much longer than the others would leave most of the
  // card idle, which is bounded by what a block may have to read.
  int cluster_size() const {
    if (!decodes() || plan_.fixed_splits || forced_.num_splits >= 2 || forced_.ctas > 0 || forced_.cluster < 0) {
      return 0;
    }
    TileConfig const tile = tile_row(decode_use()).tile;
    std::int64_t const tiles = std::int64_t{problem_.batch} * (problem_.heads_q / scheduled_packing());
    bool const may_share = problem_.num_splits != 1 && rows_of_sequence() <= kMostMergeRows;
    if (forced_.cluster > 0) {
      require(std::has_single_bit(static_cast<unsigned>(forced_.cluster)) && forced_.cluster <= kMostCluster,
              "cluster: must be a power of 2 up to ", kMostCluster, ", ", forced_.cluster, " was forced");
      require(may_share || forced_.cluster == 1, "cluster: ", rows_of_sequence(), " rows are more than ",
              kMostMergeRows, ", or num_splits is 1");
      return forced_.cluster;
    }
    std::int64_t const blocks = blocks_of_tile(tile);
    if (forced_.tile != TileConfig{} || forced_.packed_heads != 0 || forced_.heads_per_pass != 0) { return 0; }
    if (tiles > most_ctas(tile)) { return blocks <= kMostBlocksOfShortTile ? 1 : 0; }
    int const possible = device_.sm_count < kSmsForLargestCluster ? kPortableCluster : kMostCluster;
    int const most = problem_.num_splits == 0 ? possible : std::min(possible, problem_.num_splits);
    int size = 1;
    while (may_share && 2 * size <= most && size < blocks && leaves_most_idle(size * tiles) &&
           2 * size * tiles <= most_ctas_in_clusters(tile, 2 * size)) {
      size *= 2;
    }
    // A schedule could use the SMs that few clusters leave idle, if it may split.
    bool const most_idle = leaves_most_idle(size * tiles) && problem_.num_splits != 1;
    std::int64_t const bytes = ceil_div<std::int64_t>(blocks, size) * bytes_of_block(tile);
    return bytes <= (most_idle ? kMostBytesOfShare / 2 : kMostBytesOfShare) ? size : 0;
  }

  // Four ninths of the SMs read nearly as fast as all.
  bool leaves_most_idle(std::int64_t ctas) const { return 9 * ctas < 4 * available_sms(); }

  // Key blocks that a tile of few queries may have.
  std::int64_t blocks_of_tile(TileConfig const& tile) const {
    bool const all_keys = problem_.mask.cp_world > 1;
    return all_keys ? ceil_div(problem_.seqlen_k, tile.keys) : work_of_sequence(tile).units;
  }
  std::int64_t bytes_of_block(TileConfig const& tile) const {
    return std::int64_t{tile.keys} * (problem_.head_dim + problem_.head_dim_v) * kElementBytes;
  }

  // A cluster runs within a group of SMs (GPC) and leaves some of them over: 132 SMs hold 66 clusters of 2, 30 of 4, 15
  // of 8 and 7 of 16.
  int most_ctas_in_clusters(TileConfig const& tile, int size) const {
    return (size <= 2 ? available_sms() : available_sms() * 7 / 8) * tile.per_sm;
  }

  void plan_clusters() {
    plan_.packed_heads = scheduled_packing();
    explain_scheduled_packing();
    add_kernel(KernelFamily::kDecode, false);
    KernelPlan& kernel = plan_.kernels.back();
    int const most = most_ctas(kernel.tile);
    kernel.ctas = plan_.cluster > 1 ? static_cast<int>(kernel.most_tiles * plan_.cluster) : std::min(kernel.ctas, most);
    // Half of the clusters of the next call would wait for this one's to end, and then run on SMs with neighbours.
    plan_.starts_early = plan_.cluster == 1 || 2 * kernel.ctas <= most_ctas_in_clusters(kernel.tile, plan_.cluster);
    plan_.num_splits = plan_.cluster;
    because("splits", plan_.cluster == 1
                          ? std::string("1: ") + (problem_.num_splits == 1 ? "as asked" : "one is enough")
                          : concat("each tile by a cluster of ", plan_.cluster,
                                   " blocks, which merge their parts in shared memory"));
    because("workspace", "0 bytes: nothing is merged afterwards");
  }

  void choose_path() {
    plan_.fixed_splits = problem_.batch_invariant;
    plan_.cluster = cluster_size();
    if (plan_.cluster > 0) {
      because("schedule", "none: one tile for each sequence and group of heads, all at once or short");
      return;
    }
    char const* reason = nullptr;
    if (problem_.ragged) {
      reason = "lengths are on the device";
    } else if (problem_.keys == KeyLayout::kPaged) {
      reason = "keys are in pages, which the widest tiles cannot load";
    } else if (problem_.batch_invariant) {
      reason = "splits of fixed size, so that no sequence depends on another";
    } else if (forced_.num_splits >= 2) {
      reason = "splits are forced";
    } else if (problem_.num_splits != 1 && splitting_pays()) {
      reason = "whole tiles would leave SMs idle";
    }
    plan_.listed = reason != nullptr;
    // Splits of fixed size would differ with metadata of a dense q, which count the queries they were made for, and
    // with those of several ranks, which count the keys of one rank's positions: a chunk may have more on another.
    bool const may_differ =
        problem_.has_metadata && plan_.fixed_splits && (!problem_.packed_q || problem_.mask.cp_world > 1);
    plan_.makes_schedule = problem_.ragged && (!problem_.has_metadata || may_differ);
    if (plan_.listed) {
      because(
          "schedule", reason, "; ",
          plan_.makes_schedule
              ? may_differ
                    ? "a kernel makes it first: with batch_invariant, metadata serve packed queries on one rank only"
                    : "a kernel makes it first (get_scheduler_metadata makes it once for all layers)"
          : problem_.has_metadata ? "the scheduler metadata given"
                                  : "all sequences are alike, so that it follows from their number");
    }
  }

  // For sequences that are all alike: what the kernels would decide.
  bool splitting_pays() const {
    TileConfig const tile = tile_row(decodes() ? decode_use() : TileUse::kRagged).tile;
    ScheduleParams params;
    params.batch = problem_.batch;
    params.alike = work_of_sequence(tile);
    params.head_groups = problem_.heads_q / scheduled_packing();
    params.ctas = most_ctas(tile);
    params.may_split = true;
    params.bound_by_memory = decodes();
    if (params.alike.units <= 1) { return false; }
    return Schedule(params).by_units();
  }

  SequenceWork work_of_sequence(TileConfig const& tile) const {
    return sequence_work(tile_shape(tile, scheduled_packing(), plan_.fixed_splits), problem_.mask,
                         {problem_.seqlen_q, problem_.seqlen_k});
  }

  void plan_listed() {
    plan_.packed_heads = scheduled_packing();
    explain_scheduled_packing();
    bool const splits = problem_.num_splits != 1 || plan_.fixed_splits || forced_.num_splits >= 2;
    if (decodes()) {
      bool const forced = plan_.fixed_splits || forced_.num_splits >= 2;
      add_kernel(KernelFamily::kDecode, splits && (forced || !whole_tiles_suffice()));
    } else {
      add_kernel(KernelFamily::kPrefill, splits && !plan_.fixed_splits);
      if (splits && problem_.ragged) { add_kernel(KernelFamily::kDecode, splits); }
    }
    choose_workspace();
  }

  void explain_scheduled_packing() {
    because("packing", plan_.packed_heads == 1 ? std::string("off")
                                               : concat(plan_.packed_heads, " heads of q for each of k share a tile"));
  }

  // More tiles than thread blocks, none of which can be long.
  bool whole_tiles_suffice() const {
    TileConfig const tile = tile_row(decode_use()).tile;
    std::int64_t const tiles = std::int64_t{problem_.batch} * head_groups();
    return tiles > most_ctas(tile) && blocks_of_tile(tile) * bytes_of_block(tile) <= kMostBytesOfShare;
  }

  void add_kernel(KernelFamily family, bool may_split) {
    bool const decode = family == KernelFamily::kDecode;
    TileUse const use = !decode ? TileUse::kRagged : decodes() ? decode_use() : TileUse::kDecode;
    TileRow const* row = &tile_row(use);
    char const* why = row->why;
    if (forced_.tile != TileConfig{}) {
      row = forced_row([&](TileUse candidate) {
        return candidate == use || (candidate == TileUse::kDecode && use == TileUse::kFewRows);
      });
      if (row == nullptr) { refuse_forced_tile(); }
      why = "forced";
    }
    KernelPlan kernel{family, row->tile, most_ctas(row->tile), threads_of(row->tile), may_split};
    std::int64_t const groups = problem_.heads_q / plan_.packed_heads;
    TileShape const shape = tile_shape(kernel.tile, plan_.packed_heads, plan_.fixed_splits);
    // A sequence of the decode kernel is one tile; of the others each may end with a tile that is not full.
    std::int64_t const tiles = decode ? problem_.batch
                               : problem_.packed_q
                                   ? problem_.total_q / shape.queries + problem_.batch
                                   : std::int64_t{problem_.batch} * ceil_div(problem_.seqlen_q, shape.queries);
    int const blocks = ceil_div(std::max(problem_.seqlen_k, 1), shape.keys) + 1;
    std::int64_t const units = shape.fixed_split > 0 ? ceil_div(blocks, shape.fixed_split) : blocks;
    kernel.most_tiles = tiles * groups;
    require(kernel.most_tiles <= kMaxTiles, "q: the problem has up to ", kernel.most_tiles, " tiles, at most ",
            kMaxTiles, " are possible; split the batch");
    kernel.most_units = std::min(kMaxTiles, kernel.most_tiles * units);
    // More units than can be counted are not shared out. With lengths on the device the kernels decide so.
    may_split = may_split && (problem_.ragged || plan_.fixed_splits || kernel.most_tiles * units <= kMaxTiles);
    kernel.may_split = may_split;
    kernel.ctas =
        static_cast<int>(std::min<std::int64_t>(kernel.ctas, may_split ? kernel.most_units : kernel.most_tiles));
    if (may_split) {
      kernel.partial_rows =
          decode ? static_cast<int>(std::min<std::int64_t>(kSlabRows, rows_of_sequence())) : kernel.tile.rows;
      // A block cuts at most two tiles.
      kernel.partial_slots = plan_.fixed_splits ? kernel.most_units : 2 * std::int64_t{kernel.ctas};
    }
    char const* const who =
        problem_.ragged && may_split && !decodes() ? (decode ? "sequences with few queries: " : "the others: ") : "";
    because("tile", who, family_name(family), " ", kernel.tile, ": ", why);
    because("grid", kernel.ctas, " blocks of ", kernel.threads, " threads for up to ", kernel.most_tiles, " tiles");
    plan_.tiles += kernel.most_tiles;
    plan_.kernels.push_back(kernel);
  }

  void choose_workspace() {
    std::int64_t parts = 0;
    std::int64_t partial = 0;
    bool may_split = false;
    for (KernelPlan const& kernel : plan_.kernels) {
      may_split = may_split || kernel.may_split;
      partial += partial_bytes(kernel, problem_.head_dim_v);
      parts += kernel.partial_slots;
    }
    plan_.forces_splits = forced_.num_splits >= 2;
    int const bound = plan_.forces_splits ? forced_.num_splits : problem_.num_splits;
    plan_.max_splits = plan_.fixed_splits ? 0 : bound;
    plan_.keys_in_l2 = static_cast<int>(l2_budget() / ((problem_.head_dim + problem_.head_dim_v) * kElementBytes));
    plan_.num_splits = may_split ? (plan_.fixed_splits || bound == 0 ? plan_.kernels.back().ctas : bound) : 1;
    because("splits", !may_split ? std::string("1: ") + (problem_.num_splits == 1 ? "as asked" : "one is enough")
                      : plan_.fixed_splits ? concat("every ", kFixedSplitKeys, " keys, for sequences with few queries")
                      : bound == 0
                          ? std::string("every block gets the same number of key blocks")
                          : concat("every block gets the same number of key blocks, a tile at most ", bound, " parts"));
    std::int64_t const schedule = plan_.makes_schedule ? aligned_bytes(schedule_size(problem_.batch) * 4) : 0;
    plan_.workspace_bytes = partial + schedule;
    because("workspace", megabytes(plan_.workspace_bytes), ": ", parts, " parts of tiles",
            schedule > 0 ? concat(", ", schedule, " bytes for the schedule") : "");
  }

  void plan_dense() {
    choose_tile();
    because("splits", problem_.num_splits == 1 ? "1: as asked" : "1: whole tiles use the SMs as well");
    choose_grid();
    choose_order();
    plan_.workspace_bytes = 0;
    because("workspace", "0 bytes: nothing is merged afterwards");
    plan_.kernels.push_back({family_of(plan_.tile), plan_.tile, plan_.ctas, plan_.threads});
  }

  struct Candidate {
    TileRow const* row = nullptr;
    int packed_heads = 1;
    double us = 0;  // of an SM, for a sequence
  };

  std::vector<TileRow const*> candidate_rows() const {
    if (forced_.tile != TileConfig{}) {
      TileRow const* const found = forced_row([](TileUse) { return true; });
      if (found == nullptr) { refuse_forced_tile(); }
      return {found};
    }
    if (decodes()) { return {&tile_row(decode_use())}; }
    TileConfig const& first = tile_row(TileUse::kDense).tile;
    std::vector<TileRow const*> rows;
    for (TileRow const& row : kTiles) {
      bool const fits = row.tile.head_dim == first.head_dim && row.tile.head_dim_v == first.head_dim_v;
      if (row.use == TileUse::kDense && fits && holds(row.tile)) { rows.push_back(&row); }
    }
    return rows;
  }

  // Query heads that may share a tile.
  std::vector<int> candidate_packings() const {
    int const g = ratio();
    if (forced_.packed_heads != 0) {
      require(forced_.packed_heads == 1 || (forced_.packed_heads == g && g <= kSlabRows),
              "packed_heads: must be 1 or the ", g, " heads of q for each of k (at most ", kSlabRows, "), ",
              forced_.packed_heads, " was forced");
      return {forced_.packed_heads};
    }
    if (decodes()) { return {scheduled_packing()}; }
    return g == 1 || g > kSlabRows ? std::vector{1} : std::vector{1, g};
  }

  // Tile and packing together: a window, or few queries, want tiles whose rows are few queries of many heads.
  void choose_tile() {
    Candidate best;
    std::vector<Candidate> best_of_packing;
    std::string others;
    for (int const packed_heads : candidate_packings()) {
      Candidate best_here;
      for (TileRow const* const row : candidate_rows()) {
        Candidate const candidate{row, packed_heads, sequence_us(*row, packed_heads)};
        others += concat(others.empty() ? "" : ", ", row->tile.rows, "x", row->tile.keys,
                         packed_heads > 1 ? " packed " : " ", microseconds(candidate.us));
        if (best_here.row == nullptr || candidate.us < best_here.us) { best_here = candidate; }
      }
      double const bound = packed_heads > 1 && best.row != nullptr ? best.us * kPackingGain : best.us;
      if (best.row == nullptr || best_here.us <= bound) { best = best_here; }
      best_of_packing.push_back(best_here);
    }
    plan_.tile = best.row->tile;
    plan_.packed_heads = best.packed_heads;
    plan_.threads = threads_of(plan_.tile);
    cost_ = best.row;
    bool const forced = forced_.tile != TileConfig{};
    because("tile", plan_.tile, ": ",
            forced      ? "forced"
            : decodes() ? concat("few queries: ", best.row->why)
                        : best.row->why,
            forced || decodes() ? std::string() : concat("; microseconds of an SM for a sequence: ", others));
    explain_packing(best_of_packing);
    plan_.tiles = m_blocks(plan_.tile, plan_.packed_heads) * head_groups() * problem_.batch;
    require(plan_.tiles <= kMaxTiles, "q: the problem has ", plan_.tiles, " tiles, at most ", kMaxTiles,
            " are possible; split the batch");
  }

  void explain_packing(std::vector<Candidate> const& best_of_packing) {
    int const g = ratio();
    if (forced_.packed_heads != 0) {
      because("packing", plan_.packed_heads, " heads share a tile: forced");
    } else if (g == 1) {
      because("packing", "off: every head of q has its own head of k");
    } else if (decodes()) {
      because("packing", plan_.packed_heads, " heads of q for each of k share a tile, which holds all queries");
    } else if (g > kSlabRows) {
      because("packing", "off: ", g, " heads of q for each of k are more than the ", kSlabRows, " rows of a slab");
    } else {
      std::string const times = concat(microseconds(best_of_packing[0].us), " us without, ",
                                       microseconds(best_of_packing[1].us), " us packed");
      if (plan_.packed_heads > 1) {
        because("packing", g, " heads share a tile: ", times);
      } else {
        because("packing", "off: ", times, ", which saves too little");
      }
    }
  }

  void choose_grid() {
    int const available = most_ctas(plan_.tile);
    plan_.ctas = static_cast<int>(std::min<std::int64_t>(plan_.tiles, available));
    because("grid", plan_.ctas, " blocks of ", plan_.threads, " threads for ", plan_.tiles, " tiles: ",
            forced_.ctas > 0          ? std::string("forced")
            : plan_.tiles > available ? concat(plan_.tile.per_sm, " on each SM, which take tiles in turn")
                                      : std::string("one tile each"),
            problem_.sm_margin > 0 ? concat(", sm_margin ", problem_.sm_margin, " leaves SMs free") : "");
  }

  std::int64_t l2_budget() const { return static_cast<std::int64_t>(kL2Share * static_cast<double>(device_.l2_bytes)); }

  std::vector<int> work_of_tiles() const {
    Packing const packing = make_packing(plan_.packed_heads, rows_of_slab(plan_.tile));
    std::vector<int> work;
    for (int m = 0; m < m_blocks(plan_.tile, plan_.packed_heads); ++m) { work.push_back(tile_ns(*cost_, packing, m)); }
    return work;
  }

  void choose_order() {
    std::int64_t const all = std::int64_t{problem_.batch} * head_groups();
    if (forced_.heads_per_pass > 0) {
      plan_.heads_per_pass = static_cast<int>(std::min<std::int64_t>(all, forced_.heads_per_pass));
      because("order", plan_.heads_per_pass, " of ", all, " head groups at a time: forced");
      return;
    }
    int const sharing = ratio() / plan_.packed_heads;  // groups that read the same K and V
    std::int64_t const kv_bytes =
        std::int64_t{problem_.seqlen_k} * (problem_.head_dim + problem_.head_dim_v) * kElementBytes;
    std::int64_t const fitting = kv_bytes == 0 ? all : std::min(all, l2_budget() / kv_bytes * sharing);
    TileOrder const order = choose_tile_order({.sequence_heads = static_cast<int>(all),
                                               .sharing = sharing,
                                               .in_l2 = static_cast<int>(fitting),
                                               .ctas = plan_.ctas,
                                               .descending = problem_.mask.right != kUnlimited,
                                               .work = work_of_tiles()});
    plan_.heads_per_pass = order.heads_per_pass;
    because("order", plan_.heads_per_pass, " of ", all, " head groups at a time: K and V of one head take ",
            megabytes(kv_bytes), ", L2 has room for those of ", fitting, " groups; the busiest block has ",
            percent(order.imbalance), " of the mean work");
  }

  Problem const& problem_;
  DeviceInfo const& device_;
  ForcedPlan const& forced_;
  Plan plan_;
  TileRow const* cost_ = nullptr;  // of the tile that was chosen
};

}  // namespace

Plan plan(Problem const& problem, DeviceInfo const& device) { return Planner(problem, device, {}).run(); }

Plan testing::plan_with(Problem const& problem, DeviceInfo const& device, ForcedPlan const& forced) {
  return Planner(problem, device, forced).run();
}

std::string Plan::explain() const {
  std::string text =
      kernel == KernelFamily::kNone
          ? std::string("plan: nothing to run\n")
          : concat("plan: ", family_name(kernel), " kernel, ", dtype_name(dtype), ", tile ", tile.rows, "x", tile.keys,
                   ", ", listed ? "up to " : "", tiles, " tiles on ", ctas, " blocks",
                   kernels.size() > 1 ? concat(", and a ", family_name(kernels[1].family), " kernel") : "", "\n");
  for (std::string const& reason : reasons) {
    std::size_t const colon = reason.find(':');
    std::string decision = reason.substr(0, colon);
    constexpr std::size_t kColumn = 10;
    decision.resize(std::max(kColumn, decision.size()), ' ');
    text += concat("  ", decision, reason.substr(colon + 1), "\n");
  }
  return text;
}

}  // namespace hopper_attention
