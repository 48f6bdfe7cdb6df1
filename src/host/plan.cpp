// Problem + device facts -> Plan. Pure: no pointers, no CUDA calls.
#include <algorithm>
#include <cstdint>
#include <string>

#include "hopper_attention/forward.h"
#include "hopper_attention/testing.h"
#include "host/require.h"
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
constexpr int kBlocksPerTile = 1;                          // what starting and ending a tile costs, in key blocks
constexpr std::int64_t kMaxTiles = std::int64_t{1} << 30;  // the scheduler counts in int

// Packing stores O in pieces; it must save at least an eighth of the tiles.
constexpr std::int64_t kPackingNumerator = 7;
constexpr std::int64_t kPackingDenominator = 8;

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
    plan_.kernel = KernelFamily::kPrefill;
    choose_tile();
    choose_packing();
    choose_splits();
    choose_grid();
    choose_order();
    plan_.workspace_bytes = 0;
    because("workspace", "0 bytes: nothing is merged afterwards");
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
    require(forced_.num_splits <= 1, "num_splits: the prefill kernel does not split the keys, ", forced_.num_splits,
            " was forced");
  }

  std::int64_t output_elements() const {
    return std::int64_t{problem_.batch} * problem_.heads_q != 0 && problem_.seqlen_q != 0 ? problem_.head_dim_v : 0;
  }

  int ratio() const { return problem_.heads_q / problem_.heads_k; }
  int head_groups() const { return problem_.heads_q / plan_.packed_heads; }

  std::int64_t m_blocks(int packed_heads) const {
    std::int64_t const queries_per_tile = std::int64_t{plan_.tile.rows / kSlabRows} * (kSlabRows / packed_heads);
    return ceil_div<std::int64_t>(problem_.seqlen_q, queries_per_tile);
  }

  std::int64_t tiles(int packed_heads) const {
    return m_blocks(packed_heads) * (problem_.heads_q / packed_heads) * problem_.batch;
  }

  // Keys that a query sees, averaged over a few of them.
  int average_keys() const {
    constexpr int kSamples = 16;
    SeqlenQK const len{problem_.seqlen_q, problem_.seqlen_k};
    std::int64_t sum = 0;
    for (int i = 0; i < kSamples; ++i) {
      auto const query = static_cast<int>((2 * i + 1) * std::int64_t{problem_.seqlen_q} / (2 * kSamples));
      KeyInterval const keys = visible(problem_.mask, query, len);
      sum += keys.end - keys.begin;
    }
    return static_cast<int>(sum / kSamples);
  }

  void choose_tile() {
    bool const masked = problem_.mask != MaskParams{};
    int const keys = average_keys();
    TileRow const* row =
        find_tile(problem_.head_dim, problem_.head_dim_v, masked ? MaskClass::kMasked : MaskClass::kFull, keys);
    require<NotImplemented>(row != nullptr, "head_dim: no kernel holds head dims (", problem_.head_dim, ", ",
                            problem_.head_dim_v, ") of q and v; the largest is (", largest_tile().head_dim, ", ",
                            largest_tile().head_dim_v, ")");
    if (forced_.tile != TileConfig{}) {
      auto const fits = [&](TileRow const& candidate) {
        return agrees(candidate.tile, forced_.tile) && candidate.tile.head_dim >= problem_.head_dim &&
               candidate.tile.head_dim_v >= problem_.head_dim_v;
      };
      auto const found = std::find_if(kTiles.begin(), kTiles.end(), fits);
      require(found != kTiles.end(), "tile: no kernel with head dims of at least (", problem_.head_dim, ", ",
              problem_.head_dim_v, ") agrees with the forced tile ", forced_.tile, " (0: any)");
      plan_.tile = found->tile;
      because("tile", plan_.tile, ": forced");
    } else {
      plan_.tile = row->tile;
      because("tile", plan_.tile, ", for ", masked ? "a mask" : "full attention", " and ", keys,
              " keys a query: ", row->why);
    }
    plan_.threads = (plan_.tile.rows / kSlabRows + 1) * kWarpgroupThreads;
  }

  void choose_packing() {
    int const g = ratio();
    plan_.packed_heads = 1;
    if (forced_.packed_heads != 0) {
      require(forced_.packed_heads == 1 || (forced_.packed_heads == g && g <= kSlabRows),
              "packed_heads: must be 1 or the ", g, " heads of q for each of k (at most ", kSlabRows, "), ",
              forced_.packed_heads, " was forced");
      plan_.packed_heads = forced_.packed_heads;
      because("packing", plan_.packed_heads, " heads share a tile: forced");
    } else if (g == 1) {
      because("packing", "off: every head of q has its own head of k");
    } else if (g > kSlabRows) {
      because("packing", "off: ", g, " heads of q for each of k are more than the ", kSlabRows, " rows of a slab");
    } else if (tiles(g) * kPackingDenominator <= tiles(1) * kPackingNumerator) {
      because("packing", g, " heads share a tile: ", tiles(g), " tiles instead of ", tiles(1));
      plan_.packed_heads = g;
    } else {
      because("packing", "off: ", tiles(1), " tiles, packed ", tiles(g), ", which saves less than an eighth");
    }
    plan_.tiles = tiles(plan_.packed_heads);
    require(plan_.tiles <= kMaxTiles, "q: the problem has ", plan_.tiles, " tiles, at most ", kMaxTiles,
            " are possible; split the batch");
  }

  void choose_splits() {
    plan_.num_splits = 1;
    because("splits", problem_.num_splits == 1 ? "1: as asked" : "1: the prefill kernel does not split the keys");
  }

  void choose_grid() {
    int const available = std::max(1, device_.sm_count - problem_.sm_margin);
    plan_.ctas = static_cast<int>(std::min<std::int64_t>(plan_.tiles, forced_.ctas > 0 ? forced_.ctas : available));
    because("grid", plan_.ctas, " blocks of ", plan_.threads, " threads for ", plan_.tiles, " tiles: ",
            forced_.ctas > 0          ? "forced"
            : plan_.tiles > available ? "one block on each SM takes tiles in turn"
                                      : "one tile each",
            problem_.sm_margin > 0 ? concat(", sm_margin ", problem_.sm_margin, " leaves SMs free") : "");
  }

  // Key blocks of each query block's tile, and what a tile costs beside them.
  std::vector<int> work_of_tiles() const {
    Packing const packing = make_packing(plan_.packed_heads);
    SeqlenQK const len{problem_.seqlen_q, problem_.seqlen_k};
    std::vector<int> work;
    for (int m = 0; m < m_blocks(plan_.packed_heads); ++m) {
      QueryRange const queries = query_range(packing, plan_.tile.rows / kSlabRows, m, problem_.seqlen_q);
      work.push_back(block_range(problem_.mask, queries.first, queries.last, len, plan_.tile.keys).blocks() +
                     kBlocksPerTile);
    }
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
    auto const l2_budget = static_cast<std::int64_t>(kL2Share * static_cast<double>(device_.l2_bytes));
    std::int64_t const fitting = kv_bytes == 0 ? all : std::min(all, l2_budget / kv_bytes * sharing);
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
};

}  // namespace

Plan plan(Problem const& problem, DeviceInfo const& device) { return Planner(problem, device, {}).run(); }

Plan testing::plan_with(Problem const& problem, DeviceInfo const& device, ForcedPlan const& forced) {
  return Planner(problem, device, forced).run();
}

std::string Plan::explain() const {
  std::string text = kernel == KernelFamily::kNone
                         ? std::string("plan: nothing to run\n")
                         : concat("plan: ", family_name(kernel), " kernel, ", dtype_name(dtype), ", tile ", tile.rows,
                                  "x", tile.keys, ", ", tiles, " tiles on ", ctas, " blocks\n");
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
