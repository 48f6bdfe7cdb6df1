// Scheduler metadata as plain sequential code, to hold the kernel that makes it and all that read it against.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
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

// Units of few tiles in whole chunks: a size of which there are at most as many as CTAs, and which is what the units
// divided by CTAs give.
inline void round_up_units(FewTiles const& few, std::vector<ModelPlace>& places) {
  long long units = 0;
  long long tiles = 0;
  for (ModelPlace const& place : places) {
    if (!place.decode || place.work.tiles > 1) { return; }
    units += static_cast<long long>(place.work.tiles) * place.work.units * few.head_groups;
    tiles += static_cast<long long>(place.work.tiles) * few.head_groups;
  }
  if (few.ctas == 0 || places.size() > 32 || tiles == 0 || 2 * tiles > few.ctas || units > 1 << 29) { return; }
  auto const chunks_of = [](ModelPlace const& place, long long size) {
    return place.work.tiles == 0 ? 0 : (place.work.units + size - 1) / size;
  };
  auto const all = [&](long long size) {
    long long sum = 0;
    for (ModelPlace const& place : places) { sum += chunks_of(place, size) * few.head_groups; }
    return sum;
  };
  long long const spare = 2LL * few.ctas - tiles;
  long long size = std::max<long long>(few.least_units, (2 * units + spare - 1) / spare);
  while (all(size) > few.ctas) { size += 1 + size / 16; }
  // What is saved is an item, which takes no longer than four units.
  if (size > (units + few.ctas - 1) / few.ctas + 4) { return; }
  long long more = 0;  // chunks of the longest tile
  auto const too_few = [&](long long chunks) {
    return size > few.least_units && (chunks * size + few.ctas - 1) / few.ctas < size;
  };
  while (too_few(all(size) + more * few.head_groups)) { ++more; }
  if (all(size) + more * few.head_groups > few.ctas) { more = 0; }
  for (ModelPlace& place : places) {
    place.work.units = static_cast<int>(size * (chunks_of(place, size) + (&place == &places.front() ? more : 0)));
  }
}

// The longest tile of few queries, of so many blocks, once its units may have been rounded up.
inline int longest_when_rounded(FewTiles const& few, std::vector<ModelPlace>& places, int blocks) {
  std::vector<int> before, after;
  auto const units = [](ModelPlace const& place) { return place.work.units; };
  std::transform(places.begin(), places.end(), std::back_inserter(before), units);
  round_up_units(few, places);
  std::transform(places.begin(), places.end(), std::back_inserter(after), units);
  return after == before ? blocks : *std::max_element(after.begin(), after.end());
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
  longest[1] = longest_when_rounded(params.few_tiles, places, longest[1]);
  auto const stride = static_cast<std::size_t>(schedule_stride(params.sequences.batch));
  std::vector<int> order(stride), tiles_until(stride), units_until(stride), facts(stride);
  int tiles = 0;
  int units = 0;
  for (std::size_t i = 0; i < stride; ++i) {
    if (i < places.size()) {
      ModelPlace const& place = places[i];
      order[i] = place.sequence;
      tiles += place.work.tiles;
      units += place.work.sum();
      if (!place.decode) { ++facts[kPlacesAndCuts]; }
    }
    tiles_until[i] = tiles;
    units_until[i] = units;
  }
  facts[kMostUnitsPrefill] = longest[0];
  facts[kMostUnitsDecode] = longest[1];
  long long const groups = params.few_tiles.head_groups;
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
  facts[kPlacesAndCuts] +=
      (cuts(of_decode, of_all.units - of_decode.units, units_of_cutting(false, fixed_parts)) << 26) +
      (cuts(of_all, 0, units_of_cutting(true, fixed_parts)) << 28);
  std::vector<int> metadata{0};
  for (auto const& part : {order, tiles_until, units_until, facts}) {
    metadata.insert(metadata.end(), part.begin(), part.end());
  }
  return metadata;
}

}  // namespace hopper_attention
