// The ring of shared-memory slots through which K and V reach the consumers: places, and which block takes which.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace hopper_attention {

// A place in the ring: the slot, and how often (mod 2) it has been passed.
template <int kStages>
struct RingState {
  int slot = 0;
  std::uint32_t phase = 0;

  HA_HOST_DEVICE constexpr void operator++() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }

  HA_HOST_DEVICE constexpr void advance(int slots) {
    for (int i = 0; i < slots; ++i) { ++*this; }
  }
};

// Which slots the blocks of a tile take. A step has K of a block and V of the one before it, to its right; the tile's
// first step has K alone, its last one V alone. Mostly slots follow each other in that order: K0 K1 V0 K2 V1 ... Vn.
// With pairs those of a block are neighbours, K in an even slot: K0 V0 K1 V1 ... Kn Vn; then slots of K and of V may
// differ in size. Each function returns a place and moves `at` on.
template <bool kPairs, int kStages>
struct RingOrder {
  static_assert(!kPairs || kStages % 2 == 0);
  using State = RingState<kStages>;

  // A step's K, then its V. With pairs `at` moves on with V, so that a step that has both asks for both.
  HA_HOST_DEVICE static constexpr State k_of_step(State& at, bool has_v = true) {
    State k = at;
    if (kPairs && has_v) {
      ++k;
    } else {
      ++at;
    }
    return k;
  }
  HA_HOST_DEVICE static constexpr State v_of_step(State& at, bool has_k = true) {
    State const v = at;
    ++at;
    if (kPairs && has_k) { ++at; }
    return v;
  }

  // The tile's next K, for a warp that takes no V; the last V is left to pass.
  HA_HOST_DEVICE static constexpr State k_alone(State& at, bool is_first) {
    if (kPairs && !is_first) { ++at; }
    State const k = at;
    ++at;
    if (!kPairs && !is_first) { ++at; }
    return k;
  }
  // Its next V, for a warp that takes no K and has passed the first.
  HA_HOST_DEVICE static constexpr State v_alone(State& at, bool is_last) {
    if (!kPairs && !is_last) { ++at; }
    State const v = at;
    ++at;
    if (kPairs && !is_last) { ++at; }
    return v;
  }
};

}  // namespace hopper_attention
