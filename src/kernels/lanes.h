// What the lanes of a warp find out together, on the device; the host does what they do, one after the other.
#pragma once

#include <bit>

#include "kernels/host_device.h"

namespace hopper_attention {

inline constexpr int kLanes = 32;

// Calls `body(lane)` in each lane of a warp, between barriers of the warp.
template <class Body>
HA_HOST_DEVICE void in_each_lane(Body body) {
#if defined(__CUDA_ARCH__)
  __syncwarp();
  body(static_cast<int>(threadIdx.x % kLanes));
  __syncwarp();
#else
  for (int lane = 0; lane < kLanes; ++lane) { body(lane); }
#endif
}

// Which lanes of a warp `holds` is true for. All lanes; the host asks for one after the other.
template <class Predicate>
HA_HOST_DEVICE unsigned lanes_where(Predicate holds) {
#if defined(__CUDA_ARCH__)
  return __ballot_sync(0xffffffff, holds(static_cast<int>(threadIdx.x % kLanes)));
#else
  unsigned lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) { lanes |= (holds(lane) ? 1U : 0U) << lane; }
  return lanes;
#endif
}

template <class Predicate>
HA_HOST_DEVICE int number_of_lanes_where(Predicate holds) {
#if defined(__CUDA_ARCH__)
  return __popc(lanes_where(holds));
#else
  return std::popcount(lanes_where(holds));
#endif
}

#if defined(__CUDACC__)
inline constexpr unsigned kAllLanes = 0xffffffff;

// The sum of the lanes' ints, in all of them.
__device__ __forceinline__ int sum_of_warp(int value) { return __reduce_add_sync(kAllLanes, value); }

// Of the lanes up to and with each.
__device__ __forceinline__ int sum_until_lane(int value) {
  int const lane = static_cast<int>(threadIdx.x % kLanes);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    int const before = __shfl_up_sync(kAllLanes, value, step);
    value += lane >= step ? before : 0;
  }
  return value;
}
#endif

// The same of what `value(lane)` is.
template <class Value>
HA_HOST_DEVICE int sum_over_lanes(Value value) {
#if defined(__CUDA_ARCH__)
  return sum_of_warp(static_cast<int>(value(static_cast<int>(threadIdx.x % kLanes))));
#else
  int sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) { sum += value(lane); }
  return sum;
#endif
}

// The largest int of all lanes.
template <class Value>
HA_HOST_DEVICE int most_of_lanes(Value value) {
#if defined(__CUDA_ARCH__)
  return __reduce_max_sync(0xffffffff, static_cast<int>(value(static_cast<int>(threadIdx.x % kLanes))));
#else
  int most = value(0);
  for (int lane = 1; lane < kLanes; ++lane) { most = max_of(most, value(lane)); }
  return most;
#endif
}

// The int of one lane, in all of them.
template <class Value>
HA_HOST_DEVICE int value_of_lane(int lane, Value value) {
#if defined(__CUDA_ARCH__)
  return __shfl_sync(0xffffffff, static_cast<int>(value(static_cast<int>(threadIdx.x % kLanes))), lane);
#else
  return value(lane);
#endif
}

// A value of each lane.
template <class T>
class PerLane {
 public:
  HA_HOST_DEVICE T& operator[](int lane) { return values_[index(lane)]; }
  HA_HOST_DEVICE T const& operator[](int lane) const { return values_[index(lane)]; }

 private:
#if defined(__CUDA_ARCH__)
  HA_HOST_DEVICE static constexpr int index(int /*lane*/) { return 0; }
  T values_[1]{};  // a lane has its own alone
#else
  HA_HOST_DEVICE static constexpr int index(int lane) { return lane; }
  T values_[kLanes]{};
#endif
};

// Of the lanes up to and with each.
HA_HOST_DEVICE PerLane<int> sums_until_lane(PerLane<int> values) {
#if defined(__CUDA_ARCH__)
  values[0] = sum_until_lane(values[0]);
#else
  for (int lane = 1; lane < kLanes; ++lane) { values[lane] += values[lane - 1]; }
#endif
  return values;
}

}  // namespace hopper_attention
