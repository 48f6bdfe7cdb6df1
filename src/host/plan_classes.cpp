// Steps of an engine: few prompts or chunks beside sequences of few queries. Each of the two classes has a kernel that
// finds its tiles without a schedule and merges parts of them in shared memory, so that neither the schedule is
// searched nor a combine kernel waited for, and both kernels run beside each other.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "host/plan_request.h"
#include "host/ranked_tiles.h"
#include "host/schedule_shape.h"
#include "host/tile_share.h"
#include "kernels/paired_tiles.h"

namespace hopper_attention {
namespace {

// Queries of a sequence in the mean, up to which most of several are supposed to have few.
constexpr int kMostMeanQueries = 64;
constexpr int kLeastSequences = 4;
// What an SM, and what all of them read of K and V.
constexpr double kBytesOfSmPerUs = 70e3;
constexpr double kBytesOfCardPerUs = 4.2e6;
// And what one block of the keys of few queries takes at least, however much the memory could bring.
constexpr double kLeastUsOfBlock = 0.7;
// A tile of few queries by a block of its own, beside its keys; the same of one of many that a block takes in turn.
constexpr double kEndsOfFewUs = 5;
constexpr double kEndsInTurnUs = 1;
// What a cluster of twice as many blocks takes longer beside its share.
constexpr double kDoublingUs = 1;
// Until blocks of the second kernel can start: by stamps they begin 8 us behind those of the first.
constexpr double kSecondStartsUs = 5;
// Of the time that tiles of few queries take, where they are more than thread blocks: what prompts may take beside
// them, all with as many keys as may be. For more a schedule chooses a share of the SMs: 512 queries on 4k and 64 x 1
// on 2k, 32/8 heads, 0.19, took 167 us by one, 180 without; 100 on 100 and 40 x 1 on 4k, 0.10, 175 and 164.
constexpr double kMostBesideTurns = 0.12;
// What a second kernel must save: 512 queries and 32 x 4 on 4k, 8/1 heads, took 38.4 us in two and 34.7 in one with
// head dim 128, 29.9 and 28.2 with 64.
constexpr double kSecondKernelUs = 2;
// Key blocks of a tile that a second kernel would begin with when they could be done: 25 random steps took 0.77 of the
// time in one kernel, of whole tiles (docs/performance-notes.md, step 271).
constexpr int kFewBlocksOfSecond = 6;
// Of choices that end together the one with the shorter tiles of many queries is better, should these be longer.
constexpr double kShareOfMany = 0.1;
// Fresh prompts have tiles of any length up to the longest, which goes first.
constexpr double kOfAnyLength = 0.75;
// Prompts for whose tiles the grid has room beyond as many as rows and the bound on queries make at least: a prompt
// more has one more tile that is not full.
constexpr int kMorePrompts = 4;

// Thread blocks that each fill an SM for so long.
struct OnCard {
  std::int64_t blocks = 0;
  double us = 0;
};

// Of two kernels, of which the second starts where the first leaves SMs.
double us_of_both(OnCard const& first, OnCard const& second, int sms) {
  std::int64_t const rounds = ceil_div<std::int64_t>(first.blocks, sms);
  std::int64_t const last = first.blocks - (rounds - 1) * sms;  // SMs that the last round takes
  double const early = std::max(kSecondStartsUs, static_cast<double>(rounds - 1) * first.us);
  double const late = std::max(kSecondStartsUs, static_cast<double>(rounds) * first.us);
  auto const taken_until = [&](double us) {
    auto const rounds_from = [&](double start) { return us < start ? 0 : std::floor((us - start) / second.us + 1e-6); };
    return rounds_from(early) * static_cast<double>(sms - last) + rounds_from(late) * static_cast<double>(last);
  };
  // Its last block ends a number of rounds after it could start, on SMs of either kind.
  double end_of_early = early + second.us;
  double end_of_late = late + second.us;
  while (sms > last && taken_until(end_of_early) < static_cast<double>(second.blocks)) { end_of_early += second.us; }
  while (taken_until(end_of_late) < static_cast<double>(second.blocks)) { end_of_late += second.us; }
  return std::max(late, sms > last ? std::min(end_of_early, end_of_late) : end_of_late);
}

// What lengths the classes may have: a bound on keys is for both.
struct Supposed {
  bool fresh;       // prompts have no keys but their own
  int fewer_times;  // as many keys as there may be have the sequences of few queries
};
constexpr std::array kSupposed{Supposed{false, 1}, Supposed{true, 1}, Supposed{false, 2}, Supposed{true, 2},
                               Supposed{false, 4}};

// All queries but one of each sequence are of one prompt, or of several with full tiles. The bound on queries does not
// count, since it must not change a tile.
class Step {
 public:
  explicit Step(PlanRequest const& request)
      : request_(request),
        prompt_(prompt_of(request.problem)),
        of_prompt_{prompt_, request.device, request.forced},
        few_(request.tile_row(TileUse::kFewRows).tile) {}
  Step(Step const&) = delete;

  bool takes_turns() const { return request_.tiles_of_few() > request_.most_ctas(few_); }
  bool draws() const { return takes_turns() && blocks_of_few(1, 1) > kMostBlocksOfShortTile; }

  // Whether whole tiles of both classes in one kernel are better, where clusters for few queries would have `size`
  // blocks.
  bool is_for_one_kernel(int size) const {
    bool const short_tiles = !takes_turns() && size == 1 && blocks_of_few(1, size) <= kFewBlocksOfSecond;
    return short_tiles && needs_no_schedule(request_, choose_prefill(request_));
  }

  // A block's share of the longest tile of few queries is bounded as where there are no others.
  bool may_share(int size) const {
    return blocks_of_few(1, size) * request_.bytes_of_block(few_) <= kMostBytesOfShare &&
           (size == 1 || (!takes_turns() && reason_against_cluster(request_, few_, size) == nullptr));
  }

  std::int64_t tiles_of_prompt(TileConfig const& tile) const {
    return most_tiles(prompt_, tile, request_.scheduled_packing());
  }

  // Tiles of prompts that the grid takes in one round. Blocks that find none hold their SMs for 4 us, for which those
  // of the other class wait; should there be more, some have two. Nothing else depends on it.
  std::int64_t tiles_at_once(TileConfig const& tile) const {
    int const prompts = ceil_div(prompt_.total_q, max_of(1, request_.problem.seqlen_q));
    return tiles_of_prompt(tile) + std::int64_t{request_.scheduled_groups()} * (prompts - 1 + kMorePrompts);
  }

  OnCard many(TileRow const& row, int size, Supposed const& supposed) const {
    std::int64_t const tiles = tiles_of_prompt(row.tile);
    int const keys = keys_of_prompts(row, supposed);
    if (size == 1) { return {tiles, us_of_tile(row, keys) * (supposed.fresh ? kOfAnyLength : 1)}; }
    std::int64_t const clusters = std::min<std::int64_t>(tiles, clusters_at_once(size, request_.device.sm_count));
    double const us = us_with_clusters(of_prompt_, row, blocks_of_prompts(row, supposed), tiles, size);
    // Tiles that are not worth sharing stay whole.
    return {size * clusters, (std::isinf(us) ? us_of_tile(row, keys) : us) + us_of_size(size)};
  }

  // Where two of their blocks have room on an SM, they share one only if each has one already: before others begin,
  // all SMs are free.
  OnCard few(int size, Supposed const& supposed, bool first) const {
    std::int64_t const ctas = request_.tiles_of_few() * size;
    int const per_sm = first && ctas <= request_.device.sm_count ? 1 : few_.per_sm;
    double const bytes = static_cast<double>(request_.bytes_of_block(few_)) * per_sm;
    double const us_of_block = std::max(kLeastUsOfBlock, bytes / kBytesOfSmPerUs);
    auto const blocks = static_cast<double>(blocks_of_few(supposed.fewer_times, size));
    return {ceil_div<std::int64_t>(ctas, per_sm), us_of_ends() + us_of_size(size) + blocks * us_of_block};
  }

  // Of one kernel for the tiles of both classes, whole or shared; infinite if there may be more than SMs.
  double us_of_one_kernel(TileRow const& row, Supposed const& supposed) const {
    int const packed_heads = request_.scheduled_packing();
    if (most_tiles(request_.problem, row.tile, packed_heads) > request_.device.sm_count) {
      return std::numeric_limits<double>::infinity();
    }
    std::vector<int> blocks = blocks_of_prompts(row, supposed);
    auto const of_few = static_cast<std::size_t>(request_.tiles_of_few() - request_.scheduled_groups());
    blocks.insert(blocks.end(), of_few, ceil_div(keys_seen(row), row.tile.keys * supposed.fewer_times));
    std::ranges::sort(blocks, std::greater{});
    int const size = size_of_clusters(request_, row, packed_heads);
    double const shared = us_with_clusters(request_, row, blocks, std::ssize(blocks), size);
    double const whole = us_of_tile(row, static_cast<double>(blocks.front()) * row.tile.keys);
    return std::max(std::min(whole, shared), us_of_memory(supposed));
  }

  double us_of_memory(Supposed const& supposed) const {
    std::int64_t const blocks = request_.tiles_of_few() * blocks_of_few(supposed.fewer_times, 1);
    return us_of_ends() + static_cast<double>(blocks * request_.bytes_of_block(few_)) / kBytesOfCardPerUs;
  }

 private:
  static Problem prompt_of(Problem problem) {
    problem.total_q = static_cast<int>(std::max<std::int64_t>(1, problem.total_q - (problem.batch - 1)));
    problem.batch = 1;
    return problem;
  }

  double us_of_ends() const { return takes_turns() ? kEndsInTurnUs : kEndsOfFewUs; }
  static double us_of_size(int size) { return kDoublingUs * std::log2(size); }

  int keys_seen(TileRow const& row) const { return static_cast<int>(keys_of_full_tile(request_, row.tile)); }

  int keys_of_prompts(TileRow const& row, Supposed const& supposed) const {
    return supposed.fresh ? min_of(static_cast<int>(prompt_.total_q), keys_seen(row)) : keys_seen(row);
  }

  // Of each tile, the most first.
  std::vector<int> blocks_of_prompts(TileRow const& row, Supposed const& supposed) const {
    auto const tiles = static_cast<int>(tiles_of_prompt(row.tile));
    int const most = max_of(1, ceil_div(keys_of_prompts(row, supposed), row.tile.keys));
    int const fewer = supposed.fresh ? most - 1 : 0;
    std::vector<int> blocks;
    for (int i = 0; i < tiles; ++i) { blocks.push_back(most - scaled_cut(i, max_of(1, tiles - 1), fewer)); }
    return blocks;
  }

  std::int64_t blocks_of_few(int fewer_times, int size) const {
    int const queries = tile_shape(few_, request_.scheduled_packing(), false).queries;
    return ceil_div<std::int64_t>(request_.most_keys_of_queries(queries), std::int64_t{few_.keys} * fewer_times * size);
  }

  PlanRequest const& request_;
  Problem prompt_;
  PlanRequest of_prompt_;
  TileConfig few_;
};

// Kernels of both classes without a schedule, and lengths of which nothing is known but bounds.
bool may_have_classes(PlanRequest const& request) {
  Problem const& problem = request.problem;
  testing::ForcedPlan const& forced = request.forced;
  bool const is_forced = request.forces_work() || forced.cluster != 0 || forced.packed_heads != 0;
  bool const packed = problem.ragged && problem.packed_q && !problem.seqused_q;
  if (!packed || is_forced || request.decodes() || problem.num_splits == 1) { return false; }
  if (problem.batch_invariant || problem.mask.cp_world > 1) { return false; }
  bool const most_few = problem.total_q <= std::int64_t{kMostMeanQueries} * problem.batch;
  if (!most_few || problem.batch < kLeastSequences) { return false; }
  if (few_rows_use(request.scheduled_packing()) != TileUse::kFewRows) { return false; }
  // Tiles so short that few more of them take no longer than a second kernel.
  TileRow const* const window = window_row(request);
  if (window != nullptr && us_of_few_along(request, *window) <= kSecondStartsUs) { return false; }
  TileRow const* const paired = special_row(request, TileUse::kPaired);
  return paired != nullptr && special_row(request, TileUse::kSmallGrid) != nullptr &&
         tiles_have_ranks(problem, paired->tile, request.scheduled_packing());
}

// Of tiles of prompts that are not shared.
TileRow const& whole_row(PlanRequest const& request) {
  TileRow const* const window = window_row(request);
  return window != nullptr ? *window : *special_row(request, TileUse::kSmallGrid);
}

}  // namespace

// What takes least in the geometric mean over kSupposed. An sm_margin does not count: which tiles are shared decides
// bits.
std::optional<ClassesChoice> choose_classes(PlanRequest const& with_margin) {
  if (!may_have_classes(with_margin)) { return std::nullopt; }
  Problem problem = with_margin.problem;
  problem.sm_margin = 0;
  PlanRequest const request{problem, with_margin.device, with_margin.forced};
  Step const step(request);
  int const sms = request.device.sm_count;
  TileRow const& whole = whole_row(request);
  TileRow const& shared = *special_row(request, TileUse::kPaired);
  std::int64_t const tiles = step.tiles_of_prompt(whole.tile);
  if (tiles > sms) { return std::nullopt; }

  bool const has_few = !queries_are_known(problem);
  bool const one_block = has_one_block(whole.tile);  // which nobody shares
  std::vector<int> sizes{1};
  if (!one_block) { sizes.insert(sizes.end(), std::begin(kPairClusters), std::end(kPairClusters)); }
  std::optional<ClassesChoice> best;
  double least_product = std::numeric_limits<double>::infinity();
  double us_of_many = 0;  // what prompts of the best take of all SMs, with as many keys as there may be
  for (int const of_many : sizes) {
    if (of_many > 1 && tiles > 2LL * clusters_at_once(of_many, sms)) { break; }
    std::array<OnCard, kSupposed.size()> many;
    for (std::size_t i = 0; i < many.size(); ++i) {
      many[i] = step.many(of_many == 1 ? whole : shared, of_many, kSupposed[i]);
    }
    for (int of_few = 1; of_few <= kMostCluster; of_few *= 2) {
      if (!step.may_share(of_few)) { continue; }
      for (bool const few_first : {false, true}) {
        if (few_first && step.takes_turns()) { break; }  // its blocks stay on all SMs until no tile is left
        std::array<double, kSupposed.size()> us;
        double product = 1;
        for (std::size_t i = 0; i < us.size(); ++i) {
          OnCard const few = step.few(of_few, kSupposed[i], few_first);
          double const both = few_first ? us_of_both(few, many[i], sms) : us_of_both(many[i], few, sms);
          us[i] = std::max(both, step.us_of_memory(kSupposed[i])) + kShareOfMany * many[i].us;
          product *= us[i];
        }
        if (product < least_product) {
          least_product = product;
          best = {of_many, of_few, has_few, few_first, has_few && step.draws()};
          us_of_many = static_cast<double>(many[0].blocks) * many[0].us / sms;
        }
      }
    }
  }
  if (!best || (has_few && !one_block && step.is_for_one_kernel(best->blocks_of_few))) { return std::nullopt; }
  bool const beside_turns = us_of_many <= kMostBesideTurns * step.us_of_memory(kSupposed[0]);
  if (step.takes_turns() && !beside_turns) { return std::nullopt; }
  if (one_block) { return best; }  // may_have_classes() has compared it with one kernel
  double product_of_one = 1;
  for (Supposed const& supposed : kSupposed) { product_of_one *= step.us_of_one_kernel(shared, supposed); }
  auto const mean = [](double product) { return std::pow(product, 1.0 / kSupposed.size()); };
  return mean(product_of_one) <= mean(least_product) + kSecondKernelUs ? std::nullopt : best;
}

void plan_classes(PlanRequest const& request, Plan& plan, ClassesChoice const& choice) {
  take_scheduled_packing(request, plan);
  int const most_queries = kMostFewRows / plan.packed_heads;
  because(plan, "kernels",
          choice.has_few ? concat("two: one for sequences with up to ", counted(most_queries, "row"),
                                  " of q, one for the others; both find their tiles by themselves")
                         : concat("one: every sequence has ", request.problem.seqlen_q, " queries"));
  TileRow const& shared = *special_row(request, TileUse::kPaired);
  std::int64_t const at_once = Step(request).tiles_at_once(shared.tile);
  KernelPlan& many = choice.blocks_of_many > 1 ? add_pairs(request, plan, shared, choice.blocks_of_many, at_once)
                                               : add_in_order(request, plan, whole_row(request).use, at_once);
  choose_workspace(request.problem, plan);
  if (!choice.has_few) { return; }
  many.least_queries = most_queries + 1;

  KernelPlan& few = choose_kernel(request, plan, TileUse::kFewRows, false);
  few.most_queries = most_queries;
  int size = choice.blocks_of_few;
  while (size > 1 && reason_against_cluster(request, few.tile, size) != nullptr) { size /= 2; }  // an sm_margin
  plan.cluster = plan.num_splits = size;
  few.ctas = static_cast<int>(std::min<std::int64_t>(few.most_tiles * size, request.most_ctas(few.tile)));
  because(plan, "grid", "of few queries ", counted(few.ctas, "block"), " of ", few.threads, " threads for up to ",
          counted(few.most_tiles, "tile"));
  because(plan, "splits",
          size > 1
              ? concat("each tile of few queries by a cluster of ", size,
                       " blocks, which merge their parts in shared memory")
              : concat("1: tiles of few queries are whole", few.ctas < few.most_tiles ? ", more than blocks" : ""));
  plan.decode_first = choice.few_first;
  because(plan, "order",
          choice.few_first ? "sequences with few queries first, whose tiles take longer"
                           : "sequences with few queries behind the others, which leave SMs or take longer");
}

}  // namespace hopper_attention
