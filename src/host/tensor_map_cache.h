// Tensor maps of the calls before: the layers of a model pass the same tensors at every step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "host/tensor_map.h"

namespace hopper_attention {

// All that goes into a map.
struct TensorMapKey {
  void* data = nullptr;
  DataType dtype = DataType::kUnsupported;
  TensorMapShape shape;

  friend bool operator==(TensorMapKey const&, TensorMapKey const&) = default;
};

// Of one thread: without locks. Every key has one place, where the next key of that place replaces it, so it never
// grows. Trivially destructible: a thread may still call while its thread-local objects are destroyed.
class TensorMapCache {
 public:
  // Four maps for each of 128 layers.
  static constexpr std::size_t kPlaces = 512;

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

  // Tensors of a model differ in address by large powers of 2, two maps of one tensor in box or extents.
  static std::size_t place_of(TensorMapKey const& key) {
    constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;
    std::uint64_t hash = reinterpret_cast<std::uintptr_t>(key.data);
    for (std::uint64_t const value :
         {std::uint64_t{key.shape.box[1]}, std::uint64_t{key.shape.box[2]}, key.shape.extent[1], key.shape.extent[2]}) {
      hash = (hash ^ value) * kGolden;
      hash ^= hash >> 32;
    }
    return hash % kPlaces;
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
