// Parts of a tile that CTAs have left in the workspace -> out and LSE, by these CTAs together: each merges some rows.
//
// Source of the method: the order and the weights are FlashDecoding's (Dao et al. 2023); stream-K (Osama et al. 2023)
// merges the parts of a tile in the kernel that computes them, too, by the CTA that begins it.
#pragma once

#include "kernels/cute.h"

#include "kernels/left_part.h"
#include "kernels/merge_parts.h"
#include "kernels/merged_row.h"
#include "kernels/output_rows.h"
#include "kernels/params.h"
#include "kernels/part_arrivals.h"
#include "kernels/sink.h"
#include "kernels/tile_work.h"
#include "kernels/turns.h"

namespace hopper_attention {

// The consumer warpgroup of tiles of few queries, behind the last of its items.
template <class Traits>
class JointMerge {
 public:
  __device__ __forceinline__ JointMerge(AttentionParams const& params, typename Traits::SharedStorage& shared,
                                        int thread)
      : params_(params), shared_(shared), thread_(thread) {}

  __device__ __forceinline__ void operator()() const {
    int const left = __shfl_sync(0xffffffff, shared_.parts_left, 0);
    if (left == 0 || params_.epilogue.partial.arrivals == nullptr) { return; }
    sync_warpgroup(0);  // all rows are written
    if (__shfl_sync(0xffffffff, thread_ / 32, 0) == 0) { meet(left); }
    sync_warpgroup(0);
    CUTE_NO_UNROLL
    for (int i = 0; i < left; ++i) { merge(shared_.left()[i]); }
    if (thread_ < left) { take_counts_back(shared_.left()[thread_]); }
  }

 private:
  // Of 64 rows, twice as many at a time.
  static constexpr bool kManyRows = Traits::kQueryRows > kMostSomeRows;
  static constexpr int kColumns = kManyRows || Traits::kHeadDimV > 128 ? 8 : 4;  // of a lane
  static constexpr int kWidestOfLanes = kColumns * 16;
  static constexpr int kLanes = Traits::kHeadDimV <= kWidestOfLanes / 2 ? 8  // of a row
                                : Traits::kHeadDimV <= kWidestOfLanes   ? 16
                                                                        : 32;
  static constexpr int kRowsOfWarp = 32 / kLanes;  // at a time
  static constexpr int kRowsAtOnce = cutlass::NumThreadsPerWarpGroup / kLanes;
  using Parts = PartsOfRow<kLanes, kColumns, kManyRows ? 4 : 16 / kColumns>;

  // Behind some 0.2 s a CTA gives up, since with damaged metadata a part may never come.
  static constexpr int kMostPolls = 1 << 18;

  __device__ __forceinline__ int rows_of(TileWork const& work) const {
    int const queries = work.queries.last - work.queries.first + 1;
    return min_of(queries * params_.packing.heads.divisor, params_.epilogue.partial.rows);
  }

  // Whether one CTA merges a tile as fast as several would, which are all late to make room for the next call: it has
  // a lane for each row, or has little to wait for.
  __device__ __forceinline__ bool is_small(TileWork const& work, TileParts const& parts) const {
    constexpr int kMostAlone = 2;  // times that a lane waits for parts
    int const rounds = ceil_div(rows_of(work), kRowsAtOnce);
    return rounds == 1 || rounds * ceil_div(parts.count, Parts::kAtOnce) <= kMostAlone;
  }

  // Counts the parts, a lane each, and waits for the other ones of their tiles. By one warp.
  __device__ __forceinline__ void meet(int left) const {
    std::uint64_t* const arrivals = params_.epilogue.partial.arrivals;
    bool const has_one = thread_ < left;
    LeftPart& mine = shared_.left()[min_of(thread_, left - 1)];
    TileParts const parts = mine.part.parts();
    std::uint64_t* const word = arrivals + word_of_slot(parts.first_slot);
    std::uint64_t const none = ArrivalCounts::none(mine.part.call);
    bool const has_all_begun = number_of_call(arrivals) != mine.part.call;
    bool const waits = has_all_begun && !is_small(mine.work, parts);
    std::uint64_t const added = ArrivalCounts::kPart + (waits ? ArrivalCounts::kWaiter : 0);
    fence_of_device();
    std::uint64_t const before = add_to_counts(word, none, added, has_one);
    std::uint64_t now = before + added;
    CUTE_NO_UNROLL
    for (int i = 0; i < kMostPolls; ++i) {
      bool const lacks_some = has_one && waits && ArrivalCounts::parts(now) < parts.count;
      if (!__any_sync(0xffffffff, lacks_some)) { break; }
      if (lacks_some) { now = load_counts(word); }
    }
    if (has_one) {
      mine.parts = parts;
      mine.share = share_of_rows(waits, before, now, parts.count);
    }
    fence_of_device();
  }

  // By the last one that has seen all parts.
  __device__ __forceinline__ void take_counts_back(LeftPart const& of) const {
    if (of.share.shares == 0) { return; }
    std::uint64_t* const word = params_.epilogue.partial.arrivals + word_of_slot(of.parts.first_slot);
    auto* const counts = reinterpret_cast<unsigned long long*>(word);
    // One that has not waited is alone, as if it had.
    std::uint64_t const seen = atomicAdd(counts, ArrivalCounts::kSeen);
    if (ArrivalCounts::seen(seen) + 1 == of.share.shares) { store_counts(word, ArrivalCounts::none(of.part.call)); }
  }

  // A lane has columns of a row. What it needs next is on the way while it adds what has arrived. The loop has each
  // instruction once, since each comes from far away when it comes first.
  __device__ __forceinline__ void merge(LeftPart const& left) const {
    ShareOfRows const share = left.share;
    if (share.shares == 0) { return; }
    PartialParams const& partial = params_.epilogue.partial;
    TileWork const work = read_at_once(left.work);
    TileParts const parts = left.parts;
    int const rows = rows_of(work);
    // Rows of a warp follow each other in what this CTA merges: its first one, and how far behind it the lane's is.
    int const behind = thread_ % 32 / kLanes * share.shares;
    int next_row = share.rank + __shfl_sync(0xffffffff, thread_ / 32, 0) * kRowsOfWarp * share.shares;
    int next_part = 0;
    int row = -1;  // of `found`, and the first of its parts
    int part = 0;
    Parts found;
    auto merged = MergedRow<kColumns>::none();
    auto group = MergedRow<kColumns>::none();
    CUTE_NO_UNROLL
    for (;;) {
      bool const more = next_row < rows;
      Parts next;
      if (more) {
        int const of_lane = min_of(next_row + behind, rows - 1);
        next.load(partial, parts, params_.epilogue.head_dim_v, of_lane, column(), next_part);
      }
      if (row >= 0) {
        found.add_to(group, parts, part);
        part += Parts::kAtOnce;
        bool const ends_row = part >= parts.count;
        if (ends_row || part % kPartsOfGroup == 0) {
          merged.add(group);
          group = MergedRow<kColumns>::none();
        }
        if (ends_row) {
          if (row + behind < rows) { store(work, row + behind, merged); }
          merged = MergedRow<kColumns>::none();
        }
      }
      if (!more) { return; }
      found = next;
      row = next_row;
      part = next_part;
      next_part += Parts::kAtOnce;
      if (next_part >= parts.count) {
        next_row += kRowsAtOnce * share.shares;
        next_part = 0;
      }
    }
  }

  __device__ __forceinline__ int column() const { return thread_ % kLanes * 4; }

  __device__ __forceinline__ void store(TileWork const& work, int row, MergedRow<kColumns> const& merged) const {
    using Element = typename Traits::Element;
    OutputRow const id = output_row(params_, work, work.queries.first, row);
    if (!id.exists) { return; }
    EpilogueParams const& p = params_.epilogue;
    RowEnd end = row_end(merged.top, merged.sum);
    if (p.sinks != nullptr) { end = end_row(end.exponent, end.sum, sink_log2(p.sinks, p.sinks_type, id.head)); }
    Element* const to = output_pointer<Element>(params_, work, id);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 4) {
      int const first = c * kLanes + column();
      if (first < p.head_dim_v) { store_columns(to + first, merged, c, end); }
    }
    if (column() == 0) { store_lse(params_, work, id, end); }
  }

  AttentionParams const& params_;
  typename Traits::SharedStorage& shared_;
  int thread_;
};

}  // namespace hopper_attention
