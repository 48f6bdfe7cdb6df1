// Tensor maps of the calls before: the layers of a model pass the same tensors at every step.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "host/tensor_map.h"

namespace hopper_attention {

// Of one thread: without locks. Every key has one place, where the next key of that place replaces it, so it never
// grows. Trivially destructible: a thread may still call while its thread-local objects are destroyed.
class TensorMapCache {
 public:
  // Four maps for each of 128 layers.
  static constexpr std::size_t kPlaces = 512;
  static_assert(std::has_single_bit(kPlaces));

  // The map of `key`, made by `make()` if it is not there; valid until the next call. If make() throws, nothing has
  // changed.
  template <class Make>
  CUtensorMap const& get(TensorMapKey const& key, Make const& make) {
    Place& place = places_[place_of(key)];
    if (!(place.key == key)) {
      CUtensorMap const made = make();
      place = {key, made};
    }
    return place.map;
  }

  // Tensors of a model differ in address by large powers of 2, two maps of one tensor in box or extents. Products that
  // do not wait for each other, of which the highest bits depend on all bits of a key.
  static std::size_t place_of(TensorMapKey const& key) {
    constexpr std::uint64_t kOdd[] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb,
                                      0xd6e8feb86659fd93, 0xff51afd7ed558ccd, 0xc4ceb9fe1a85ec53};
    TensorMapShape const& shape = key.shape;
    std::uint64_t const hash = reinterpret_cast<std::uintptr_t>(key.data) * kOdd[0] + shape.box[1] * kOdd[1] +
                               shape.box[2] * kOdd[2] + shape.box[3] * kOdd[5] + shape.extent[1] * kOdd[3] +
                               shape.extent[2] * kOdd[4];
    return hash >> (64 - std::countr_zero(kPlaces));
  }

 private:
  // Empty it is the key of no tensor, and all zeros: 130 KB of thread-local memory that take no room in the library.
  struct Place {
    TensorMapKey key{.shape = {.rank = 0, .extent = {}, .stride = {}, .box = {}}};
    CUtensorMap map{};
  };
  std::array<Place, kPlaces> places_{};
};

}  // namespace hopper_attention
