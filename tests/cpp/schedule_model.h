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

// Tiles of few queries cut each by itself, if no sequence has many and a size of parts is found: all parts of tiles
// that are cut are among the first that blocks take, parts are not much longer than a block's share of all, and each
// block has one part at most, or whole tiles are short. Returns the size, and 0 if tiles are not cut so.
inline long long size_of_even_parts(EvenParts const& even, std::vector<ModelPlace> const& places) {
  long long units = 0;
  long long most = 0;
  for (ModelPlace const& place : places) {
    if (!place.decode) { return 0; }
    if (place.work.tiles == 0) { continue; }
    units += static_cast<long long>(place.work.units) * even.head_groups;
    most = std::max<long long>(most, place.work.units);
  }
  if (even.ctas == 0 || places.size() > 512 || units == 0 || most > 15 << 14) { return 0; }
  long long const share = (units + even.ctas - 1) / even.ctas;
  long long const first = std::max<long long>(even.least_units, share);
  for (int i = 0; i < 8; ++i) {
    long long const size = first + i * (1 + share / 64);
    long long parts = 0;
    long long in_front = 0;
    int longest_whole = 0;
    for (ModelPlace const& place : places) {
      if (place.work.tiles == 0) { continue; }
      long long const count = (place.work.units + size - 1) / size;
      parts += count * even.head_groups;
      if (count == 1) { longest_whole = std::max(longest_whole, place.work.units); }
      if (place.work.units > size - size / 8.0) { in_front += count * even.head_groups; }
    }
    if (in_front == 0 || in_front > even.ctas) { continue; }
    if (size > first + 4) { return 0; }
    if (parts <= even.ctas || (longest_whole <= 10 && longest_whole <= first / 2)) { return size; }
  }
  return 0;
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
  long long const size = said == 0 ? 0 : size_of_even_parts(params.even_parts, places);
  int in_front = 0;
  if (size > 0) {
    for (ModelPlace& place : places) {
      bool const stands_in_front = place.work.units > size - size / 8.0;
      place.work.units = static_cast<int>(4 * ((place.work.units + size - 1) / size));
      if (stands_in_front && place.work.tiles > 0) { in_front += place.work.units; }
    }
    longest[1] = static_cast<int>(4 * ((longest[1] + size - 1) / size));
  }
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
  facts[kPlacesAndCuts] += said + (size > 0 ? 1 << 30 : 0);
  facts[kMostUnitsPrefill] = size > 0 ? in_front : longest[0];
  facts[kMostUnitsDecode] = longest[1];
  std::vector<int> metadata{0};
  for (auto const& part : {order, tiles_until, units_until, facts}) {
    metadata.insert(metadata.end(), part.begin(), part.end());
  }
  return metadata;
}

}  // namespace hopper_attention
