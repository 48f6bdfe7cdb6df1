// Scheduler metadata as plain sequential code, to hold the kernel that makes it and all that read it against.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/schedule_params.h"

namespace hopper_attention {

// Blocks to an eighth: the number of the step, larger for longer tiles. From 2^18 blocks on all are alike.
inline int step_of(int blocks) {
  int halvings = 0;
  while (blocks >> halvings >= 16) { ++halvings; }
  return std::min(8 * halvings + (blocks >> halvings), 127);
}

struct ModelPlace {
  int sequence = 0;
  bool decode = false;
  SequenceWork work{};
  SequenceWork in_blocks{};  // however many parts it has

  // Where it stands: prefill before decode, long before short. Equals keep their order.
  int rank() const { return (decode ? 128 : 0) + 127 - (work.tiles == 0 ? 0 : step_of(in_blocks.units)); }
};

inline std::vector<ModelPlace> model_places(ScheduleKernelParams const& params) {
  std::vector<ModelPlace> places;
  for (int b = 0; b < params.sequences.batch; ++b) {
    SeqlenQK const len = sequence_at(params.sequences, b).len;
    bool const decode = len.q <= params.decode.queries;
    TileShape const& shape = decode ? params.decode : params.prefill;
    places.push_back({b, decode, sequence_work(shape, params.mask, len), work_in_blocks(shape, params.mask, len)});
  }
  std::stable_sort(places.begin(), places.end(), [](auto const& a, auto const& b) { return a.rank() < b.rank(); });
  return places;
}

// How many parts a sequence has if none of its tiles has parts of more than `size` units: tiles of the kernel that may
// cut them, each in as many as the longest.
inline long long parts_of_place(ScheduleKernelParams const& params, ModelPlace const& place, long long size) {
  if (place.work.tiles == 0) { return 0; }
  long long const queries = sequence_at(params.sequences, place.sequence).len.q;
  long long const of_mixed = params.even_parts.many_queries.divisor;
  return (place.decode ? 1 : (queries + of_mixed - 1) / of_mixed) * ((place.in_blocks.units + size - 1) / size);
}

// Of one head group.
struct ModelParts {
  long long all = 0;
  long long in_front = 0;
  long long cut = 0;  // of tiles that are
  long long longest_whole = 0;
  bool cuts_rising = false;  // tiles of which the first has less than half of the last one's keys
};

// In front stand the tiles that are cut, those of their class that are nearly as long as a part, and prefill, if any of
// decode is among these.
inline bool stands_in_front(std::vector<ModelPlace> const& places, ModelPlace const& place, long long size) {
  auto const nearly_cut = [&](ModelPlace const& p) { return p.work.tiles > 0 && 8LL * p.in_blocks.units > 7 * size; };
  bool const cuts_decode =
      std::any_of(places.begin(), places.end(), [&](ModelPlace const& p) { return p.decode && nearly_cut(p); });
  return place.work.tiles > 0 && (nearly_cut(place) || (cuts_decode && !place.decode));
}

inline ModelParts parts_of_size(ScheduleKernelParams const& params, std::vector<ModelPlace> const& places,
                                long long size) {
  ModelParts found;
  for (ModelPlace const& place : places) {
    long long const parts = parts_of_place(params, place, size);
    if (parts == 0) { continue; }
    long long const units = place.in_blocks.units;
    found.all += parts;
    if (stands_in_front(places, place, size)) { found.in_front += parts; }
    if (units <= size) { found.longest_whole = std::max(found.longest_whole, units); }
    if (units > size) { found.cut += parts; }
    if (units > size && 2 * place.in_blocks.least < units) { found.cuts_rising = true; }
  }
  return found;
}

// Of all head groups: units of the tiles of a sequence, if all of them have as many as the first and the last in the
// mean.
inline long long units_of_place(ScheduleKernelParams const& params, ModelPlace const& place) {
  long long const mean = (place.in_blocks.units + place.in_blocks.least + 1) / 2;
  return params.even_parts.head_groups * parts_of_place(params, place, 1 << 30) * mean;
}

// Units until all is done and merged. Blocks take a part each, and then draw; those that have none of the parts in
// front draw what follows alone until these are done. The block that draws is three eighths of what it draws ahead of
// the others.
inline long long cost_of_parts(ScheduleKernelParams const& params, std::vector<ModelPlace> const& places,
                               long long ctas, long long size) {
  long long const groups = params.even_parts.head_groups;
  ModelParts const parts = parts_of_size(params, places, size);
  long long const in_front = parts.in_front * groups;
  long long units_in_front = 0;
  for (ModelPlace const& place : places) {
    if (stands_in_front(places, place, size)) { units_in_front += units_of_place(params, place); }
  }
  long long end = 0;
  long long parts_until = 0;
  long long units_until = 0;
  for (ModelPlace const& place : places) {
    if (place.work.tiles == 0) { continue; }
    parts_until += parts_of_place(params, place, size) * groups;
    units_until += units_of_place(params, place);
    long long const of_tile = (place.in_blocks.units + size - 1) / size;
    long long const length = (place.in_blocks.units + of_tile - 1) / of_tile;
    long long start = 0;
    if (parts_until > ctas) {
      start = std::max(0LL, units_until - length) / ctas;
      long long const behind = std::max(0LL, units_until - length - units_in_front);
      if (in_front < ctas) { start = std::min(start, behind / (ctas - in_front)); }
      start = std::max(0LL, start - 3 * length / 8);
    }
    end = std::max(end, start + length);
  }
  return end + (parts.cut == 0 ? 0 : 3 + 9 * parts.cut * groups / ctas);
}

inline bool is_one_tile_each(ScheduleKernelParams const& params, std::vector<ModelPlace> const& places) {
  return std::all_of(places.begin(), places.end(), [&](ModelPlace const& place) {
    return sequence_at(params.sequences, place.sequence).len.q <= params.even_parts.queries_of_one;
  });
}

// Of a step whose tiles may be cut each by itself; of all head groups.
struct ModelStep {
  bool one_tile_each = false;
  long long ctas = 0;
  long long counted = 0;  // units, as metadata count them
  long long most = 0;     // units of the longest tile
  long long share = 0;    // of a block
};

inline bool parts_fit(ScheduleKernelParams const& params, ModelStep const& step, ModelParts const& parts) {
  return parts.all < 1 << 11 && parts.in_front > 0 && parts.in_front * params.even_parts.head_groups <= step.ctas;
}

// Of few queries alone: the least size that is hardly longer than a block's share of all with which each block has one
// part at most, or whole tiles are short. 0: none.
inline long long size_for_few(ScheduleKernelParams const& params, std::vector<ModelPlace> const& places,
                              ModelStep const& step) {
  for (int i = 0; i < 8; ++i) {
    long long const size = step.share + i * (1 + step.share / 64);
    ModelParts const parts = parts_of_size(params, places, size);
    if (size > step.share + 4) { return 0; }
    bool const one_each = parts.all * params.even_parts.head_groups <= step.ctas;
    bool const short_ones = parts.longest_whole <= 10 && parts.longest_whole <= step.share / 2;
    if (parts_fit(params, step, parts) && (one_each || short_ones)) { return size; }
  }
  return 0;
}

// The size with which all are done and merged first, the last of such, no later than chunks, and cutting has to save
// something. Where a tile each holds any sequence, whole tiles are no choice. 0: none.
inline long long size_by_cost(ScheduleKernelParams const& params, std::vector<ModelPlace> const& places,
                              ModelStep const& step) {
  long long const groups = params.even_parts.head_groups;
  long long const from = std::max<long long>(params.even_parts.least_units, 3 * step.share / 4);
  long long best = 0;
  long long least_cost = 0;
  for (int i = 0; i < 8; ++i) {
    long long const size = i == 7 ? step.most : from + i * (1 + step.share / 5);
    ModelParts const parts = parts_of_size(params, places, size);
    if (!parts_fit(params, step, parts) || parts.cuts_rising) { continue; }
    long long const cost = cost_of_parts(params, places, step.ctas, size);
    bool const over_whole = cost <= std::max(step.most, step.share);
    bool const whole = parts.cut == 0 && parts.all * groups <= step.ctas;
    bool const pays = step.one_tile_each
                          ? parts.cut > 0 && over_whole && cost <= step.share + 20
                          : (whole || over_whole) && step.ctas * (cost - params.even_parts.units_of_chunks) *
                                                             params.even_parts.many_queries.divisor <=
                                                         step.counted * groups * params.prefill.queries;
    if (pays && (best == 0 || cost <= least_cost)) {
      best = size;
      least_cost = cost;
    }
  }
  return best;
}

// Tiles cut each by itself: the size of parts, 0 if they are not cut so. All parts of tiles that are cut are among the
// first that blocks take, at most one for each block.
inline long long size_of_even_parts(ScheduleKernelParams const& params, std::vector<ModelPlace> const& places) {
  EvenParts const& even = params.even_parts;
  ModelStep step;
  step.one_tile_each = is_one_tile_each(params, places);
  step.ctas = step.one_tile_each ? even.ctas : even.many_ctas;
  long long units = 0;
  for (ModelPlace const& place : places) {
    if (place.work.tiles == 0) { continue; }
    step.counted += place.work.sum();
    units += units_of_place(params, place);
    step.most = std::max<long long>(step.most, place.in_blocks.units);
  }
  if (step.ctas == 0 || places.size() > 512 || units == 0) { return 0; }
  if (step.most > 15 << 14 || step.counted >= 1 << 20) { return 0; }
  step.share = std::max<long long>(even.least_units, (units + step.ctas - 1) / step.ctas);
  bool const has_many = !places.front().decode;
  long long const for_few = has_many ? 0 : size_for_few(params, places, step);
  return for_few > 0 ? for_few : size_by_cost(params, places, step);
}

inline std::vector<int> model_metadata(ScheduleKernelParams const& params) {
  std::vector<ModelPlace> places = model_places(params);
  int longest[2] = {0, 0};  // blocks of a tile: prefill, decode
  for (ModelPlace const& place : places) {
    int& most = longest[place.decode ? 1 : 0];
    if (place.work.tiles > 0) { most = std::max(most, place.in_blocks.units); }
  }
  WholeTiles of_decode, of_all;  // of one head group
  for (ModelPlace const& place : places) {
    if (place.work.tiles == 0) { continue; }
    of_all.tiles += place.work.tiles;
    of_all.units += place.in_blocks.sum();
    of_decode.tiles += place.decode ? place.work.tiles : 0;
    of_decode.units += place.decode ? place.in_blocks.sum() : 0;
  }
  of_decode.most = longest[1];
  of_all.most = std::max(longest[0], longest[1]);
  long long const groups = params.even_parts.head_groups;
  auto const cuts = [&](WholeTiles const& of, long long prefill, int cutting) {
    WholeTiles const of_groups{groups * of.tiles, groups * of.units, of.most};
    FewReaders const& readers = params.readers;
    int const longest_part = params.decode.fixed_split;
    if (longest_part > 0 && of.most <= longest_part) { return 0; }
    int const enough = enough_readers(readers.ctas, longest_part > 0);
    auto const pays = [&](int size) {
      return cutting_pays_beside(of_groups, groups * prefill, size, readers, enough, cutting);
    };
    return (pays(1) ? 1 : 0) + (pays(readers.cluster) ? 2 : 0);
  };
  bool const fixed_parts = params.decode.fixed_split > 0;
  int const said = (cuts(of_decode, of_all.units - of_decode.units, units_of_cutting(false, fixed_parts)) << 26) +
                   (cuts(of_all, 0, units_of_cutting(true, fixed_parts)) << 28);
  bool const may_pay = said >> 28 != 0 || !is_one_tile_each(params, places);
  long long const size = may_pay ? size_of_even_parts(params, places) : 0;
  // Above units, which are 20 bits then, stand parts.
  auto const above = [](long long parts) { return static_cast<int>(parts << 20); };
  if (size > 0) {
    long long const most = std::max(longest[0], longest[1]);
    longest[0] += above(parts_of_size(params, places, size).in_front);
    longest[1] += above((most + size - 1) / size);
  }
  auto const stride = static_cast<std::size_t>(schedule_stride(params.sequences.batch));
  std::vector<int> order(stride), tiles_until(stride), units_until(stride), facts(stride);
  // Every other place of prefill ends with its longest tiles if that leaves CTAs no more time to fill than the places
  // behind it, or these and those of decode, take; of large batches, always.
  auto const turned = [&](std::size_t i) {
    ModelPlace const& place = places[i];
    std::size_t const prefill = static_cast<std::size_t>(
        std::count_if(places.begin(), places.end(), [](ModelPlace const& of) { return !of.decode; }));
    if (place.decode || (prefill - i) % 2 != 0) { return 0; }
    if (places.size() > 512) { return 3 << 29; }
    long long until = 0;
    for (std::size_t before = 0; before <= i; ++before) { until += places[before].work.sum(); }
    long long const to_fill = params.readers.of_many * static_cast<long long>(place.work.sum());
    auto const fills = [&](long long all) { return (all - until) * place.work.tiles * groups >= to_fill; };
    return (fills(of_all.units - of_decode.units) ? 1 << 29 : 0) + (fills(of_all.units) ? 1 << 30 : 0);
  };
  int tiles = 0;
  int units = 0;
  for (std::size_t i = 0; i < stride; ++i) {
    int turned_bits = 0;
    if (i < places.size()) {
      ModelPlace const& place = places[i];
      order[i] = place.sequence;
      turned_bits = turned(i);
      tiles += place.work.tiles;
      units += place.work.sum() + (size > 0 ? above(parts_of_place(params, place, size)) : 0);
      if (!place.decode) { ++facts[kPlacesAndCuts]; }
    }
    tiles_until[i] = tiles + turned_bits;
    units_until[i] = units;
  }
  facts[kPlacesAndCuts] += said + (size > 0 ? 1 << 30 : 0);
  bool const has_prefill = !places.empty() && !places.front().decode;
  if (size > 0 && has_prefill && is_one_tile_each(params, places)) {
    facts[kPlacesAndCuts] |= std::numeric_limits<int>::min();
  }
  facts[kMostUnitsPrefill] = longest[0];
  facts[kMostUnitsDecode] = longest[1];
  std::vector<int> metadata{0};
  for (auto const& part : {order, tiles_until, units_until, facts}) {
    metadata.insert(metadata.end(), part.begin(), part.end());
  }
  return metadata;
}

}  // namespace hopper_attention
