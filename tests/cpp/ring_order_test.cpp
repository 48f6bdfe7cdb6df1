// Every warp finds a block in the slot in which the others look for it.
#include "kernels/ring_order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

namespace hopper_attention {
namespace {

template <int kStages>
int place_of(RingState<kStages> const& at) {
  return static_cast<int>(at.phase) * kStages + at.slot;  // of two passes
}

struct Walk {
  std::vector<int> k;
  std::vector<int> v;
  int end = 0;

  bool operator==(Walk const&) const = default;
};

// As the warp does that loads, reads or announces both.
template <bool kPairs, int kStages>
Walk by_steps(RingState<kStages> at, int blocks, std::vector<int>* order = nullptr) {
  using Order = RingOrder<kPairs, kStages>;
  Walk walk;
  for (int i = 0; i <= blocks; ++i) {
    if (i < blocks) { walk.k.push_back(place_of(Order::k_of_step(at, i > 0))); }
    if (order != nullptr && i < blocks) { order->push_back(walk.k.back()); }
    if (i > 0) { walk.v.push_back(place_of(Order::v_of_step(at, i < blocks))); }
    if (order != nullptr && i > 0) { order->push_back(walk.v.back()); }
  }
  walk.end = place_of(at);
  return walk;
}

// As two warps do, each of which takes one of the two.
template <bool kPairs, int kStages>
Walk each_alone(RingState<kStages> const& start, int blocks) {
  using Order = RingOrder<kPairs, kStages>;
  Walk walk;
  RingState<kStages> keys = start;
  for (int i = 0; i < blocks; ++i) { walk.k.push_back(place_of(Order::k_alone(keys, i == 0))); }
  if (blocks > 0) { ++keys; }  // the last V
  RingState<kStages> values = start;
  if (blocks > 0) { ++values; }  // the first K
  for (int i = 0; i < blocks; ++i) { walk.v.push_back(place_of(Order::v_alone(values, i == blocks - 1))); }
  walk.end = place_of(values);
  CHECK(place_of(keys) == walk.end);
  return walk;
}

template <bool kPairs, int kStages>
void check_walks() {
  for (int start = 0; start < kStages; start += kPairs ? 2 : 1) {
    for (int blocks = 0; blocks <= 6; ++blocks) {
      CAPTURE(kPairs);
      CAPTURE(kStages);
      CAPTURE(start);
      CAPTURE(blocks);
      RingState<kStages> at;
      at.advance(start);
      Walk const walk = by_steps<kPairs>(at, blocks);
      CHECK(each_alone<kPairs>(at, blocks) == walk);
      at.advance(2 * blocks);
      CHECK(walk.end == place_of(at));
    }
  }
}

}  // namespace

TEST_CASE("ring: warps that take K or V alone look where those do that take both") {
  check_walks<false, 4>();
  check_walks<false, 5>();
  check_walks<false, 16>();
  check_walks<true, 4>();
  check_walks<true, 6>();
  check_walks<true, 16>();
}

TEST_CASE("ring: slots follow the order of steps, or with pairs K and V of a block are neighbours, K in an even slot") {
  constexpr int kBlocks = 6;
  constexpr int kStages = 16;  // more than the blocks take
  std::vector<int> order;
  by_steps<false, kStages>({}, kBlocks, &order);
  CHECK(std::ranges::is_sorted(order));
  CHECK(order.size() == 2 * kBlocks);
  CHECK(std::ranges::adjacent_find(order) == order.end());

  Walk const pairs = by_steps<true, kStages>({}, kBlocks);
  for (int i = 0; i < kBlocks; ++i) {
    CHECK(pairs.k[static_cast<std::size_t>(i)] == 2 * i);
    CHECK(pairs.v[static_cast<std::size_t>(i)] == 2 * i + 1);
  }
}

}  // namespace hopper_attention
