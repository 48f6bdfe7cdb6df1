#include "host/plan_request.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "host/require.h"

namespace hopper_attention {
namespace {

// Of L2, for K and V. With 0.6 (36 of an H200's 60 MB) a full call of 4k tokens read 679 MB from DRAM and with 0.4 417
// MB, where its inputs are 202 MB (bench --suite io).
constexpr double kL2Share = 0.4;

bool agrees(TileConfig const& tile, TileConfig const& forced) {
  auto const same = [](int value, int wanted) { return wanted == 0 || value == wanted; };
  return same(tile.rows, forced.rows) && same(tile.keys, forced.keys) && same(tile.head_dim, forced.head_dim) &&
         same(tile.head_dim_v, forced.head_dim_v) && same(tile.stages, forced.stages);
}

TileConfig largest_tile() {
  TileConfig largest;
  for (TileRow const& row : kTiles) {
    if (row.tile.head_dim + row.tile.head_dim_v > largest.head_dim + largest.head_dim_v) { largest = row.tile; }
  }
  return largest;
}

}  // namespace

// Those that fit in L2 and leave room for other data; where a mask makes tiles longer and shorter, more if so many
// blocks have tiles of each head that most lines are read by several at a time. Without that bound 512 tokens take up
// to 1.25 times as long.
std::int64_t PlanRequest::bytes_together(std::int64_t kv_bytes, double most_of_l2) const {
  constexpr int kBlocksOfHead = 8;
  auto const of_l2 = [&](double share) {
    return static_cast<std::int64_t>(share * static_cast<double>(device.l2_bytes));
  };
  std::int64_t const fitting = of_l2(kL2Share);
  if (problem.mask.right == kUnlimited) { return fitting; }
  return std::max(fitting, std::min(of_l2(most_of_l2), device.sm_count / kBlocksOfHead * kv_bytes));
}

bool PlanRequest::has_short_prompts() const {
  constexpr int kShortForSomeRows = 64;
  constexpr int kShort = 1024;
  TileRow const* const row = find_tile(problem.head_dim, problem.head_dim_v, TileUse::kSomeRows);
  bool const alone = row != nullptr && row->tile.per_sm == 1;
  bool const many = groups_of_few() > device.sm_count;
  bool const is_forced = forces_tile() || forced.cluster != 0 || forced.num_splits != 0;
  if (!alone || !many || is_forced || problem.batch_invariant || problem.softcap != 0.0F) { return false; }
  std::int64_t const rows = rows_of_sequence();
  std::int64_t const keys = most_keys_of_queries(problem.seqlen_q);
  return rows > kMostSomeRows ? keys <= kShort : rows > kMostFewRows && keys <= kShortForSomeRows;
}

// The tile of a sequence must not depend on the others where its bits must not.
TileUse PlanRequest::decode_use() const {
  if (problem.batch_invariant && rows_of_sequence() > kMostFewRows) { return TileUse::kDecode; }
  if (several_tiles > 0) { return TileUse::kSomeRows; }
  return decodes() ? few_rows_use(rows_of_sequence())
                   : few_queries_use(problem.head_dim, problem.head_dim_v, scheduled_packing(), false);
}

bool PlanRequest::mixes_decode_tiles() const {
  bool const queries_vary = problem.packed_q || problem.seqused_q;
  return problem.batch_invariant && queries_vary && !forces_tile() && rows_of_sequence() > kMostFewRows &&
         few_rows_use(scheduled_packing()) == TileUse::kFewRows;
}

std::int64_t PlanRequest::full_tiles(TileConfig const& tile, std::int64_t apart) const {
  std::int64_t const queries = tile_shape(tile, scheduled_packing(), false).queries;
  std::int64_t const of_group = problem.packed_q ? ceil_div(std::max<std::int64_t>(0, problem.total_q - apart), queries)
                                                 : problem.batch * ceil_div<std::int64_t>(problem.seqlen_q, queries);
  return of_group * scheduled_groups();
}

SequenceWork PlanRequest::work_of_sequence(TileConfig const& tile) const {
  return sequence_work(tile_shape(tile, scheduled_packing(), problem.batch_invariant), problem.mask,
                       {problem.seqlen_q, problem.seqlen_k});
}

std::int64_t PlanRequest::blocks_of_tile(TileConfig const& tile) const {
  if (problem.mask.cp_world > 1) { return ceil_div(problem.seqlen_k, tile.keys); }
  TileShape shape = tile_shape(tile, scheduled_packing(), false);
  shape.least_units = 1;
  shape.ends = 0;
  return sequence_work(shape, problem.mask, {problem.seqlen_q, problem.seqlen_k}).units;
}

// Of any sequence of the call, also one that is shorter than the others.
std::int64_t PlanRequest::most_keys_of_tile(TileConfig const& tile) const {
  return most_keys_of_queries(std::min(tile_shape(tile, scheduled_packing(), false).queries, problem.seqlen_q));
}

std::int64_t PlanRequest::most_keys_of_queries(int queries) const {
  MaskParams const& mask = problem.mask;
  bool const windowed = mask.left != kUnlimited && mask.right != kUnlimited && mask.cp_world <= 1;
  if (!windowed) { return problem.seqlen_k; }
  return std::min<std::int64_t>(problem.seqlen_k, std::int64_t{mask.left} + mask.right + queries);
}

std::int64_t PlanRequest::bytes_of_block(TileConfig const& tile) const {
  return std::int64_t{tile.keys} * (problem.head_dim + problem.head_dim_v) * kElementBytes;
}

TileRow const& PlanRequest::tile_row(TileUse use) const {
  TileRow const* const row = find_tile(problem.head_dim, problem.head_dim_v, use);
  require<NotImplemented>(row != nullptr, "head_dim: no kernel holds head dims (", problem.head_dim, ", ",
                          problem.head_dim_v, ") of q and v; the largest is (", largest_tile().head_dim, ", ",
                          largest_tile().head_dim_v, ")");
  return *row;
}

bool PlanRequest::allows(TileConfig const& tile) const { return !forces_tile() || agrees(tile, forced.tile); }

TileRow const& PlanRequest::forced_row(std::initializer_list<TileUse> uses) const {
  auto const fits = [&](TileRow const& candidate) {
    return (uses.size() == 0 || std::ranges::find(uses, candidate.use) != uses.end()) &&
           agrees(candidate.tile, forced.tile) && holds(candidate.tile) &&
           candidate.tile.head_dim >= problem.head_dim && candidate.tile.head_dim_v >= problem.head_dim_v;
  };
  TileRow const* found = nullptr;  // the first of the smallest head dims, as find_tile()
  for (TileRow const& row : kTiles) {
    auto const dims = [](TileRow const& of) { return of.tile.head_dim + of.tile.head_dim_v; };
    if (fits(row) && (found == nullptr || dims(row) < dims(*found))) { found = &row; }
  }
  require(found != nullptr, "tile: no kernel with head dims of at least (", problem.head_dim, ", ", problem.head_dim_v,
          ") agrees with the forced tile ", forced.tile, " (0: any)",
          problem.softcap == 0.0F ? "" : "; softcap has the tiles of varlen calls");
  return *found;
}

TileRow const& measured_row(TileRow const& row) {
  if (row.use == TileUse::kCapped) { return row; }
  TileRow const* const dense = dense_row(row.tile);
  return dense == nullptr ? row : *dense;
}

std::string counted(std::int64_t number, char const* noun) { return concat(number, " ", noun, number == 1 ? "" : "s"); }

std::string microseconds(double us) {
  if (std::isinf(us)) { return "-"; }  // of a forced tile that is not for such calls
  auto const tenths = static_cast<std::int64_t>(us * 10 + 0.5);
  return us < 100 ? concat(tenths / 10, ".", tenths % 10) : concat(tenths / 10);
}

std::string megabytes(std::int64_t bytes) {
  std::int64_t const tenths = (bytes * 10 + (1 << 19)) >> 20;
  return concat(tenths / 10, ".", tenths % 10, " MiB");
}

}  // namespace hopper_attention
