// Scheduler metadata as plain sequential code, to hold the kernel that makes it and all that read it against.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/schedule_params.h"

namespace hopper_attention {

// Units to an eighth: the number of the step, larger for longer tiles. From 2^18 units on all are alike.
inline int step_of(int units) {
  int halvings = 0;
  while (units >> halvings >= 16) { ++halvings; }
  return std::min(8 * halvings + (units >> halvings), 127);
}

struct ModelPlace {
  int sequence = 0;
  bool decode = false;
  SequenceWork work{};

  // Where it stands: prefill before decode, long before short. Equals keep their order.
  int rank() const { return (decode ? 128 : 0) + 127 - (work.tiles == 0 ? 0 : step_of(work.units)); }
};

inline std::vector<ModelPlace> model_places(ScheduleKernelParams const& params) {
  std::vector<ModelPlace> places;
  for (int b = 0; b < params.sequences.batch; ++b) {
    SeqlenQK const len = sequence_at(params.sequences, b).len;
    bool const decode = len.q <= params.decode.queries;
    places.push_back({b, decode, sequence_work(decode ? params.decode : params.prefill, params.mask, len)});
  }
  std::stable_sort(places.begin(), places.end(), [](auto const& a, auto const& b) { return a.rank() < b.rank(); });
  return places;
}

inline std::vector<int> model_metadata(ScheduleKernelParams const& params) {
  std::vector<ModelPlace> const places = model_places(params);
  auto const stride = static_cast<std::size_t>(schedule_stride(params.sequences.batch));
  std::vector<int> order(stride), tiles_until(stride), units_until(stride), facts(stride);
  int tiles = 0;
  int units = 0;
  for (std::size_t i = 0; i < stride; ++i) {
    if (i < places.size()) {
      ModelPlace const& place = places[i];
      order[i] = place.sequence;
      tiles += place.work.tiles;
      units += place.work.tiles * place.work.units;
      if (!place.decode) { ++facts[kPrefillPlaces]; }
      int& most = facts[place.decode ? kMostUnitsDecode : kMostUnitsPrefill];
      if (place.work.tiles > 0) { most = std::max(most, place.work.units); }
    }
    tiles_until[i] = tiles;
    units_until[i] = units;
  }
  std::vector<int> metadata{0};
  for (auto const& part : {order, tiles_until, units_until, facts}) {
    metadata.insert(metadata.end(), part.begin(), part.end());
  }
  return metadata;
}

}  // namespace hopper_attention
