// The schedule of a step: which sequences come first, how many tiles each has and how many units of work. It is made
// once by a small kernel (schedule_kernel.h) and read by every layer's kernels. Where all sequences are alike, the same
// numbers are computed instead.
//
// A place is a position in the order of the sequences: those with many queries first (prefill), then those that fit in
// a tile for few (decode); in each class the longest first. Units are those of sequence_work.h. Numbers count one head
// group; all head groups of a place come one after another.
#pragma once

#include "kernels/fast_divmod.h"
#include "kernels/host_device.h"
#include "kernels/schedule_layout.h"
#include "kernels/sequence_work.h"
#include "kernels/sequences.h"

namespace hopper_attention {

// Key blocks of a thread block's idle time that are worth cutting tiles and merging them; fewer in a kernel for both
// classes, which waits for no other one.
inline constexpr int kWorthCutting = 24;
inline constexpr int kWorthCuttingMixed = 16;

// Whether whole tiles leave so much of the grid idle that cutting them pays: more than `worth_cutting` units for each
// thread block, and a fourteenth of all its time. `units`: of all tiles together; `most`: of the longest. Tiles of
// about the same length are taken in rounds; of others the short ones fill the gaps that the long ones leave.
// `behind`: units of a kernel that fills these.
template <class Count>
HA_HOST_DEVICE constexpr bool leave_grid_idle(Count tiles, long long units, int most, int ctas, bool even,
                                              long long behind = 0, int worth_cutting = kWorthCutting) {
  // No division of 64 bits: it is a call that producers have no registers for.
  long long const worth = static_cast<long long>(worth_cutting) * ctas + behind;
  long long const behind_longest = static_cast<long long>(most) * ctas - units;
  if (behind_longest > worth && 13 * (behind_longest - behind) > units) { return true; }
  if (!even) { return false; }
  long long const in_last_round = static_cast<long long>(ceil_div<Count>(tiles, ctas)) * ctas - tiles;
  bool const is_long = in_last_round * units > static_cast<long long>(tiles) * worth;
  return is_long && 13 * in_last_round > tiles;
}

// Which places a kernel takes.
enum class Places { kAll, kPrefill, kDecode };

// How a kernel shares the SMs with the other one of its call.
enum class CardShare {
  kAll,     // by turns: each CTA begins with the item of its own index
  kFirst,   // prefill before decode: SMs that whole tiles leave are not idle, and chunks leave decode some
  kLeaves,  // decode before prefill, bound by memory: CTAs that it can do without end at once
  kTakes,   // the second: its CTAs start where SMs are left, then where they become free, so that none has an own item
};

// Tiles of a kernel with fewer slabs than those that metadata count: with 2 instead of 3, one and a half of each that
// is counted and half a one for each sequence, rounded down. These are never too few; the last two of a sequence and
// head group may not exist. FewAlone leaves sequences of few queries as they are.
struct ResizedTiles {
  int slabs_counted = 1;
  FastDivmod slabs;

  HA_HOST_DEVICE constexpr bool on() const { return slabs.divisor != slabs_counted; }
  HA_HOST_DEVICE constexpr int of(int counted, int places) const {
    return on() ? slabs.quotient(slabs_counted * counted + (slabs.divisor - 1) * places) : counted;
  }
  // Units of a tile that has `counted` with as many slabs as are counted.
  HA_HOST_DEVICE constexpr int units(int counted) const {
    auto const of_slabs = static_cast<unsigned>(counted) * static_cast<unsigned>(slabs.divisor);
    return on() ? static_cast<int>(ceil_div(of_slabs, static_cast<unsigned>(slabs_counted))) : counted;
  }
};

struct ScheduleParams {
  int* metadata = nullptr;  // null: all sequences are alike
  int batch = 0;
  int stride = 0;  // schedule_stride(batch)
  Places places = Places::kAll;
  CardShare share = CardShare::kAll;
  SequenceWork alike{};  // without metadata
  int alike_units = 0;   // alike.sum(): kernels that computed it would be longer
  FastDivmod head_groups;
  int ctas = 1;  // of the grid
  bool may_split = false;
  bool always_split = false;     // by units also where the tiles fill the grid
  bool bound_by_memory = false;  // tiles of few queries
  int cuts_alike = 0;            // of these, without metadata: Cuts
  bool even_tiles = false;       // of a sequence
  int ends = 0;                  // TileShape::ends
  bool fixed_splits = false;     // every unit is a split: its bits depend on its sequence alone
  int least_units = 1;           // of a CTA
  int max_splits = 0;            // 0: no bound
  ResizedTiles resized;          // of metadata
  int most_tiles = 0;            // bounds for what damaged metadata may claim, of one head group
  int most_units = 0;
  int ctas_beside = 0;      // that the second kernel has from the start, beside the grid of the first
  bool mixed = false;       // the kernel is for both classes
  bool parts_many = false;  // tiles of many queries may be in even parts
  int least_ctas = 1;       // of the first of two kernels, whatever the other one has to do
  int prefill_at_par = 1;   // CTAs of prefill that take as long for a unit each as memory takes for as many of decode
};

// Whether tiles of few queries may be cut, and that pays over `whole`; `places_and_cuts`: the fact of the metadata.
HA_HOST_DEVICE constexpr bool cuts_tiles(ScheduleParams const& params, int places_and_cuts, Cuts whole) {
  if (!params.may_split) { return false; }
  auto const fact = PlacesAndCuts::of(places_and_cuts);
  return ((params.places == Places::kDecode ? fact.cuts_decode : fact.cuts_all) & whole) != 0;
}

// `metadata`: those of `params`, or a copy.
HA_HOST_DEVICE constexpr bool cuts_tiles(ScheduleParams const& params, int const* metadata, Cuts whole) {
  if (metadata == nullptr) { return params.may_split && (params.cuts_alike & whole) != 0; }
  return cuts_tiles(params, *where_is(metadata, params.stride, kPlacesAndCuts), whole);
}

// Whether sequences of many queries may be in even parts; `places_and_cuts`: the fact of the metadata.
using MayPartMany = bool (*)(ScheduleParams const& params, int places_and_cuts);

// In a kernel for few queries that takes all places each of them is one tile, but metadata that were made for other
// queries may know several.
HA_HOST_DEVICE constexpr bool may_part_in_any_kernel(ScheduleParams const& params, int places_and_cuts) {
  bool const are_few = params.bound_by_memory && params.places == Places::kAll;
  return are_few ? PlacesAndCuts::of(places_and_cuts).one_each : params.parts_many;
}

// What is left of that in a kernel for many queries, of which some have no register to ask what they are.
HA_HOST_DEVICE constexpr bool may_part_in_prefill_kernel(ScheduleParams const& params, int /*places_and_cuts*/) {
  return params.parts_many;
}

// Chunk c of the list of units: [begin(c), begin(c + 1)), for c < count. Those from `cutting` on have whole tiles
// alone.
struct Chunks {
  int units;
  int size;
  int count;
  int cutting;

  HA_HOST_DEVICE constexpr int begin(int chunk) const {
    unsigned const begin = static_cast<unsigned>(chunk) * static_cast<unsigned>(size);
    return begin < static_cast<unsigned>(units) ? static_cast<int>(begin) : units;
  }
  HA_HOST_DEVICE constexpr int of(int unit) const {
    return static_cast<int>(static_cast<unsigned>(unit) / static_cast<unsigned>(size));
  }
};

// What CTAs draw from: tiles or chunks. Where they draw from a counter, each takes items until it has drawn one too
// many, and then the counter is back at 0.
struct Draws {
  int count = 0;
  int ctas = 1;          // that take part: those of the smallest indices
  bool own_item = true;  // each begins with the item of its own index
  int* counter = nullptr;
  bool ends_soon = false;  // the whole list

  static constexpr int kFromCounter = -1;
  static constexpr int kLastRounds = 4;  // so few that it counts which CTA takes an item

  // What CTA `cta` takes in its round `round`.
  HA_HOST_DEVICE constexpr int item(int cta, int round) const {
    if (cta >= ctas || count <= 0) { return count; }
    if (counter == nullptr || (own_item && round == 0)) { return cta + round * ctas; }
    return own_item && count <= ctas ? count : kFromCounter;
  }
  HA_HOST_DEVICE constexpr int first_of_counter() const { return own_item ? ctas : 0; }

  HA_HOST_DEVICE constexpr bool end_soon(int item) const { return ends_soon || item >= count - kLastRounds * ctas; }
  HA_HOST_DEVICE constexpr unsigned last_of_counter() const {
    return static_cast<unsigned>(count - first_of_counter() + ctas - 1);
  }
};

// Of the places [begin, end) that a kernel takes.
struct ScheduleNumbers {
  int begin = 0;
  int end = 0;
  int tiles_base = 0;  // of the places before the first
  int units_base = 0;
  int tiles = 0;  // if all are resized
  int units = 0;
  int most_units = 0;  // of a tile as metadata count it
  int longest = 0;     // of a tile as it is; of few queries behind many, with a CTA's share of these
  bool by_units = false;
  bool has_parts = false;  // metadata are UnitsAndParts
  int units_in_front = 0;  // where tiles are in even parts; else 0
  int ctas = 0;

  HA_HOST_DEVICE constexpr bool even_parts() const { return units_in_front > 0; }
};

// The places that a kernel takes; counts are relative to the first one.
class Schedule {
 public:
  HA_HOST_DEVICE explicit constexpr Schedule(ScheduleParams const& params) : Schedule(params, params.metadata) {}

  // Read from `metadata`: those of `params`, or a copy.
  HA_HOST_DEVICE constexpr Schedule(ScheduleParams const& params, int const* metadata)
      : Schedule(params, metadata, may_part_in_any_kernel) {}

  HA_HOST_DEVICE constexpr Schedule(ScheduleParams const& params, int const* metadata, MayPartMany may_part)
      : params_(params), metadata_(metadata), numbers_{.end = params.batch, .ctas = params.ctas} {
    numbers_.most_units = numbers_.longest = params.alike.units;
    if (metadata != nullptr) {
      auto const said = PlacesAndCuts::of(fact(kPlacesAndCuts));
      int const prefill = min_of(said.prefill, params.batch);
      // Whether cutting pays has been asked for the places of both classes, or is a fact.
      bool const cuts = prefill > 0 ? may_part(params, fact(kPlacesAndCuts))
                                    : cuts_tiles(params, fact(kPlacesAndCuts), kCutsWholeTiles);
      numbers_.has_parts = said.even_parts;
      if (said.even_parts && params.may_split && cuts && !params.fixed_splits) {
        numbers_.units_in_front = kUnitsOfPart * UnitsAndParts::parts(fact(kMostUnitsPrefill));
      }
      bool const even = numbers_.even_parts();
      int const most_prefill = params.places == Places::kDecode || even ? 0 : units_of_word(fact(kMostUnitsPrefill));
      int const most_decode = params.places == Places::kPrefill ? 0 : units_of_word(fact(kMostUnitsDecode));
      numbers_.most_units = max_of(most_prefill, most_decode);
      numbers_.longest = max_of(params.resized.units(most_prefill), most_decode);
      // Tiles of few queries stand behind the others, and may begin when these are done.
      if (params.mixed && !even && 0 < prefill && prefill < params.batch) {
        auto const of_many = static_cast<unsigned>(behind(0, units_until(prefill - 1), params.most_units));
        unsigned const share =
            of_many * static_cast<unsigned>(params.head_groups.divisor) / static_cast<unsigned>(params.ctas);
        numbers_.longest = max_of(numbers_.longest, static_cast<int>(share + static_cast<unsigned>(most_decode)));
      }
      if (params.places == Places::kPrefill) { numbers_.end = prefill; }
      if (params.places == Places::kDecode) { numbers_.begin = prefill; }
      if (numbers_.begin > 0) {
        numbers_.tiles_base = tiles_until(numbers_.begin - 1).tiles;
        numbers_.units_base = units_until(numbers_.begin - 1);
      }
    }
    numbers_.tiles = params.resized.of(tiles_before(numbers_.end), numbers_.end - numbers_.begin);
    numbers_.units = units_before(numbers_.end);
    numbers_.units_in_front = min_of(numbers_.units_in_front, numbers_.units);
    numbers_.by_units = params.may_split && work_is_cut();
    bool const in_chunks = numbers_.by_units && !params.fixed_splits;
    bool const first_in_chunks = params.share == CardShare::kFirst && in_chunks;
    if (params.share == CardShare::kLeaves || first_in_chunks) { numbers_.ctas = ctas_beside_other(); }
  }

  // With the numbers of one that was made before.
  HA_HOST_DEVICE constexpr Schedule(ScheduleParams const& params, int const* metadata, ScheduleNumbers const& numbers)
      : params_(params), metadata_(metadata), numbers_(numbers) {}

  // From now on; the same numbers.
  HA_HOST_DEVICE constexpr void read_from(int const* metadata) { metadata_ = metadata; }

  HA_HOST_DEVICE constexpr ScheduleNumbers const& numbers() const { return numbers_; }
  HA_HOST_DEVICE constexpr int begin() const { return numbers_.begin; }
  HA_HOST_DEVICE constexpr int end() const { return numbers_.end; }
  HA_HOST_DEVICE constexpr int head_groups() const { return params_.head_groups.divisor; }
  // The first place whose sequence has few queries.
  HA_HOST_DEVICE constexpr int few_begin() const {
    return metadata_ == nullptr ? end() : clamped(PlacesAndCuts::of(fact(kPlacesAndCuts)).prefill, begin(), end());
  }

  // Of one head group, as metadata count them.
  HA_HOST_DEVICE constexpr int tiles_before(int place) const {
    if (metadata_ == nullptr) { return place * params_.alike.tiles; }
    if (place == numbers_.begin) { return 0; }
    return behind(numbers_.tiles_base, tiles_until(place - 1).tiles, params_.most_tiles);
  }
  // As many as the kernel has for these.
  HA_HOST_DEVICE constexpr int resized_before(int place) const {
    return params_.resized.of(tiles_before(place), place - numbers_.begin);
  }
  HA_HOST_DEVICE constexpr int units_before(int place) const {
    if (metadata_ == nullptr) { return place * params_.alike_units; }
    if (place == numbers_.begin) { return 0; }
    return behind(numbers_.units_base, units_until(place - 1), params_.most_units);
  }
  HA_HOST_DEVICE constexpr int units_of(int place) const { return units_before(place + 1) - units_before(place); }

  // Whether the longest of the whole tiles of a place are the last (TilesUntil).
  HA_HOST_DEVICE constexpr bool is_turned(int place) const {
    if (metadata_ == nullptr) { return (numbers_.end - 1 - place) % 2 != 0; }
    TilesUntil const until = tiles_until(place);
    return params_.share == CardShare::kTakes ? until.turned_in_class : until.turned_in_all;
  }

  // Of all head groups, if all tiles are resized.
  HA_HOST_DEVICE constexpr int tiles() const { return numbers_.tiles * params_.head_groups.divisor; }
  HA_HOST_DEVICE constexpr int units() const { return numbers_.units * params_.head_groups.divisor; }

  HA_HOST_DEVICE constexpr int sequence(int place) const {
    return metadata_ == nullptr ? place : clamped(at(kSequenceAt, place), 0, params_.batch - 1);
  }

  // Work is shared out by units and tiles are cut; otherwise CTAs take whole tiles.
  HA_HOST_DEVICE constexpr bool by_units() const { return numbers_.by_units; }

  // CTAs that take work.
  HA_HOST_DEVICE constexpr int ctas() const { return numbers_.ctas; }

  // How the units are cut into chunks: one for each CTA, one for each even part, or each unit by itself. Where the cut
  // tiles have more even parts than the grid has CTAs, several at a time, or as much for each CTA if that is less.
  HA_HOST_DEVICE constexpr Chunks chunks() const {
    int const all = units();
    if (params_.fixed_splits) { return {all, 1, all, all}; }
    int const unit = numbers_.even_parts() ? kUnitsOfPart : 1;
    int const cut = numbers_.even_parts() ? numbers_.units_in_front * params_.head_groups.divisor : all;
    int const parts = ceil_div_unsigned(cut, unit * numbers_.ctas);
    int size = max_of(unit, params_.least_units);
    size = max_of(size, min_of(unit * parts, ceil_div_unsigned(all, numbers_.ctas)));
    if (params_.max_splits >= 2) {
      size = max_of(size, unit * ceil_div(numbers_.most_units, unit * (params_.max_splits - 1)));
    }
    int const count = ceil_div_unsigned(all, size);
    return {all, size, count, min_of(count, numbers_.ctas)};
  }

  // A list ends soon whose tiles together take no longer than a few rounds of the longest: a CTA that draws two of
  // these before it begins the first ends late, however many short ones follow.
  HA_HOST_DEVICE constexpr Draws draws(int count) const {
    bool const ends_soon = units() <= static_cast<long long>(Draws::kLastRounds) * params_.ctas * numbers_.most_units;
    return {count, numbers_.ctas, params_.share != CardShare::kTakes, counter(), ends_soon};
  }

 private:
  HA_HOST_DEVICE constexpr int at(ScheduleArray array, int i) const {
    return where_is(metadata_, params_.stride, array)[i];
  }
  HA_HOST_DEVICE constexpr int fact(ScheduleFact which) const { return *where_is(metadata_, params_.stride, which); }

  HA_HOST_DEVICE constexpr TilesUntil tiles_until(int place) const { return TilesUntil::of(at(kTilesUntil, place)); }

  // Of parts, where tiles are in even ones.
  HA_HOST_DEVICE constexpr int units_of_word(int word) const {
    if (numbers_.even_parts()) { return kUnitsOfPart * UnitsAndParts::parts(word); }
    return numbers_.has_parts ? UnitsAndParts::units(word) : word;
  }
  HA_HOST_DEVICE constexpr int units_until(int place) const { return units_of_word(at(kUnitsUntil, place)); }

  HA_HOST_DEVICE constexpr int* counter() const {
    if (params_.metadata == nullptr || params_.places != Places::kDecode) { return params_.metadata; }
    return where_is(params_.metadata, params_.stride, kDecodeCounter);
  }

  // How far a sum lies behind another one, up to a bound; the bound where it lies before that one, in damaged metadata.
  HA_HOST_DEVICE static constexpr int behind(int base, int until, int most) {
    unsigned const found = static_cast<unsigned>(until) - static_cast<unsigned>(base);
    return found < static_cast<unsigned>(most) ? static_cast<int>(found) : most;
  }

  // Of the places behind those of the kernel, which the other one takes.
  HA_HOST_DEVICE constexpr int units_behind() const {
    long long const all = units_until(params_.batch - 1);
    return clamped(all - numbers_.units_base - numbers_.units, 0, (1 << 30) / params_.head_groups.divisor);
  }

  // Sums that the bound cuts off would lose tiles.
  HA_HOST_DEVICE constexpr bool units_fit() const {
    if (metadata_ == nullptr || numbers_.begin == numbers_.end) { return true; }
    unsigned const until = static_cast<unsigned>(numbers_.units_base) + static_cast<unsigned>(numbers_.units);
    return static_cast<unsigned>(units_until(numbers_.end - 1)) == until;
  }

  HA_HOST_DEVICE constexpr bool work_is_cut() const {
    if (params_.fixed_splits) { return true; }
    if (!units_fit()) { return false; }
    if (params_.always_split) { return true; }
    if (numbers_.even_parts()) { return true; }
    if (params_.bound_by_memory) { return cuts_tiles(params_, metadata_, kCutsWholeTiles); }
    int const all = max_of(1, tiles());
    // Decode behind prefill begins where whole tiles leave SMs. Before it, decode makes all work longer, of which only
    // the longest tile can end late beside more of decode.
    bool const first = params_.share == CardShare::kFirst;
    long long const groups = params_.head_groups.divisor;
    long long const other = first || params_.share == CardShare::kTakes ? units_behind() * groups : 0;
    bool const even =
        params_.even_tiles && 4LL * units() >= 3LL * all * numbers_.longest && (first || other <= units());
    return leave_grid_idle(all, first ? units() : units() + other, numbers_.longest, params_.ctas + params_.ctas_beside,
                           even, first ? other : 0, params_.mixed ? kWorthCuttingMixed : kWorthCutting);
  }

  // Of the first kernel, as many as leave the other one the SMs on which it ends no later. Decode that goes first has
  // at least the CTAs that read as fast as all: a wrong estimate costs little, as idle SMs slow no memory, and prefill
  // goes on where decode ends. Chunks that go first are as many as leave decode no more than three quarters: one after
  // the other both kernels would have their starts, and the last of their tiles, to wait for.
  HA_HOST_DEVICE constexpr int ctas_beside_other() const {
    bool const is_decode = params_.share == CardShare::kLeaves;
    int const other = is_decode ? clamped(numbers_.units_base, 0, 1 << 30) : units_behind();
    if (other <= 0 || numbers_.units <= 0) { return params_.ctas; }
    int const of_both = params_.ctas + params_.ctas_beside;
    // Decode takes as long as memory does, prefill as long as its SMs. Chunks of prefill count units of both alike: 128
    // rows take an SM about as long for a block of keys as its share of memory takes to bring one.
    long long const both = static_cast<long long>(numbers_.units) + other;
    int const all = is_decode ? numbers_.units : clamped(both, 1, 1 << 30);
    int const ctas_for_all = is_decode ? params_.prefill_at_par : of_both;
    // No division of 64 bits: it is a call that producers have no registers for.
    int const shift = max_of(0, log2_of(all) - 15);
    constexpr int kMostOfAll = 16;
    auto const units = static_cast<unsigned>(min_of(other >> shift, kMostOfAll * (all >> shift)));
    unsigned const for_other = units * static_cast<unsigned>(ctas_for_all) / static_cast<unsigned>(all >> shift);
    int const left = of_both - static_cast<int>(for_other);
    return min_of(max_of(params_.least_ctas, left), params_.ctas);
  }

  ScheduleParams const& params_;
  int const* metadata_;
  ScheduleNumbers numbers_;
};

}  // namespace hopper_attention
