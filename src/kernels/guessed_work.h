// Finding the first item while the kernel before still runs. The schedule and the lengths of a step are mostly older
// than that kernel, but may be what it writes. So they are read past L1 as a guess what they will be, the first item
// follows from the guess, and behind the wait it is published if all that was read is still the same. The way to the
// first item takes 4 to 7 us, most of it the time in which instructions arrive.
#pragma once

#include "kernels/cute.h"

#include "kernels/dependent_launch.h"
#include "kernels/params.h"
#include "kernels/part_arrivals.h"
#include "kernels/schedule.h"
#include "kernels/schedule_layout.h"
#include "kernels/tile_sources.h"
#include "kernels/warm_schedule.h"
#include "kernels/work_source.h"

namespace hopper_attention {

// A copy of the metadata in shared memory, where the first item will have its probabilities or keys. All lanes of a
// warp.
class ScheduleCopy {
 public:
  // `words`: as many as metadata have.
  __device__ __forceinline__ ScheduleCopy(ScheduleParams const& params, int* words) : params_(params), words_(words) {}

  __device__ __forceinline__ int const* words() const { return words_; }

  // Reads all of it again. Whether it is the same as before. Counters do not belong to it.
  __device__ __forceinline__ bool refresh() const {
    constexpr int kAtOnce = 5;  // of a lane: of up to 39 sequences memory is waited for once
    int const words = schedule_words(params_.stride);
    int const counter = static_cast<int>(where_is(words_, params_.stride, kDecodeCounter) - words_);
    bool same = true;
    __syncwarp();  // no lane reads what was there before any more
    CUTE_NO_UNROLL
    for (int first = 1 + static_cast<int>(threadIdx.x % 32); first < words; first += 32 * kAtOnce) {
      int now[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const word = first + i * 32;
        now[i] = word < words && word != counter ? load_hint(params_.metadata + word) : 0;
      }
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const word = first + i * 32;
        if (word >= words) { break; }
        same = same && words_[word] == now[i];
        words_[word] = now[i];
      }
    }
    __syncwarp();  // all lanes read what all have written
    return __all_sync(0xffffffff, same);
  }

 private:
  ScheduleParams const& params_;
  int* words_;
};

// Units of a schedule that may have been read before the wait, from the copy.
class GuessedUnitSource {
 public:
  static constexpr bool kDraws = true;

  // `keys` of a block.
  __device__ __forceinline__ GuessedUnitSource(AttentionParams const& params, ScheduleCopy const& copy,
                                               Schedule const& schedule, int keys, bool is_guess)
      : params_(params.schedule),
        arrivals_(params.epilogue.partial.arrivals),
        copy_(copy),
        source_(params, schedule, keys),
        is_guess_(is_guess) {
    if (!is_guess) { read_number(); }
  }

  template <class Draw>
  __device__ __forceinline__ bool next(WorkItem& item, Sequence& sequence, Draw draw) {
    return source_.next(item, sequence, draw);
  }

  // What next() has said is a guess, which is to be confirmed behind the wait before next() is called again.
  __device__ __forceinline__ bool is_guess() const { return is_guess_; }

  // Then the copy is no longer read.
  __device__ __forceinline__ bool confirm(WorkItem const& item, Sequence const& sequence) {
    is_guess_ = false;
    read_number();
    warm(params_.metadata, schedule_words(params_.stride));
    bool const same = copy_.refresh();
    source_.read_from(params_.metadata);
    return same && __all_sync(0xffffffff, item.place < 0 || source_.sequence_at(item.place) == sequence);
  }

  // For those who merge the item's tile.
  __device__ __forceinline__ ArrivingPart arriving(WorkItem const& item) const {
    int const begin = source_.tile_begin(item);
    return {source_.chunks(), begin, begin + item.units, call_};
  }

  // Behind the first item, by one lane.
  __device__ __forceinline__ void begun() const {
    if (arrivals_ == nullptr) { return; }
    count_cta(arrivals_, call_, where_is(params_.metadata, params_.stride, kDecodeCounter));
  }

 private:
  __device__ __forceinline__ void read_number() {
    if (arrivals_ != nullptr) { call_ = number_of_call(arrivals_); }
  }

  ScheduleParams const& params_;
  std::uint64_t* arrivals_;
  ScheduleCopy copy_;
  UnitSource<HintLoad> source_;
  std::uint64_t call_ = 0;
  bool is_guess_;
};

// The one fact of the metadata that says where work comes from.
struct GuessedFact {
  int const* where = nullptr;  // nullptr: there is no guess
  int guess = 0;               // the same in all lanes

  GuessedFact() = default;
  __device__ __forceinline__ explicit GuessedFact(ScheduleParams const& params)
      : where(where_is(params.metadata, params.stride, kPlacesAndCuts)),
        guess(__shfl_sync(0xffffffff, load_hint(where), 0)) {}

  // Behind the wait.
  __device__ __forceinline__ bool holds() const { return __shfl_sync(0xffffffff, load_hint(where), 0) == guess; }
};

// Of clusters that a guess may have chosen. The fact is read again together with the lengths of the first item, behind
// the wait.
template <class Tiles>
class GuessedClusterSource {
 public:
  static constexpr bool kDraws = false;

  __device__ __forceinline__ GuessedClusterSource(AttentionParams const& params, GuessedFact const& fact)
      : source_(params, static_cast<int>(blockIdx.x)), fact_(fact) {}

  template <class Draw>
  __device__ __forceinline__ bool next(WorkItem& item, Sequence& sequence, Draw draw) {
    if (is_guess()) { now_ = load_hint(fact_.where); }
    return source_.next(item, sequence, draw);
  }

  __device__ __forceinline__ bool is_guess() const { return fact_.where != nullptr; }

  __device__ __forceinline__ bool confirm(WorkItem const& /*item*/, Sequence const& /*sequence*/) {
    fact_.where = nullptr;
    return now_ == fact_.guess;
  }

 private:
  ClusterWorkSource<Tiles> source_;
  GuessedFact fact_;
  int now_ = 0;
};

}  // namespace hopper_attention
