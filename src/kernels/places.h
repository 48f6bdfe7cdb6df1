// Which place of a schedule holds an entry of its list.
#pragma once

#include "kernels/host_device.h"
#include "kernels/lanes.h"
#include "kernels/schedule.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// The first place in [begin, end) whose `until(place)` is greater than `x`; `end` if there is none; some place where
// `until` decreases. All lanes of a warp ask together and look at 32 places at a time; the host does what they do.
template <class Until>
HA_HOST_DEVICE int find_place(int begin, int end, int x, Until until) {
  while (begin < end) {
    int const step = ceil_div(end - begin, 32);
    auto const lies_before = [&](int lane) {
      int const probe = begin + (lane + 1) * step - 1;
      return probe < end && until(probe) <= x;
    };
    int const count = number_of_lanes_where(lies_before);
    begin += count * step;
    if (step == 1) { break; }
    end = min_of(end, begin + step - 1);
  }
  return begin;
}

// The place that holds unit `x` of a head group; in damaged metadata some place, which may not hold it. All lanes of a
// warp.
HA_HOST_DEVICE FoundPlace place_of_unit(Schedule const& schedule, int x) {
  int const place =
      find_place(schedule.begin(), schedule.end(), x, [&](int p) { return schedule.units_before(p + 1); });
  if (place >= schedule.end()) { return {}; }
  return {place, schedule.units_before(place), schedule.units_before(place + 1)};
}

}  // namespace hopper_attention
