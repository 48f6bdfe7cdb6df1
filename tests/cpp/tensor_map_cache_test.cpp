// Which calls find the tensor map of an earlier one.
#include "host/tensor_map_cache.h"

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

namespace hopper_attention {
namespace {

TensorMapKey key_at(std::uintptr_t address) {
  return {reinterpret_cast<void*>(address),
          DataType::kBFloat16,
          {.extent = {128, 4, 100, 8, 2}, .stride = {1, 128, 4096, 512, 409600}, .box = {64, 4, 16, 1, 1}}};
}

// A map that can be told from others.
CUtensorMap numbered(int number) {
  CUtensorMap map{};
  std::memcpy(&map, &number, sizeof number);
  return map;
}

int number_of(CUtensorMap const& map) {
  int number = 0;
  std::memcpy(&number, &map, sizeof number);
  return number;
}

}  // namespace

TEST_CASE("TensorMapCache: every part of the key counts") {
  TensorMapKey const base = key_at(1 << 20);
  std::vector<TensorMapKey> keys(1, base);
  auto const add = [&](auto change) {
    keys.push_back(base);
    change(keys.back());
  };
  add([](TensorMapKey& key) { key.data = static_cast<char*>(key.data) + 16; });
  add([](TensorMapKey& key) { key.dtype = DataType::kFloat16; });
  add([](TensorMapKey& key) { key.shape.rank = 4; });
  for (int dim = 0; dim < TensorMapShape::kRank; ++dim) {
    add([dim](TensorMapKey& key) { key.shape.extent[dim] += 8; });
    add([dim](TensorMapKey& key) { key.shape.stride[dim] += 8; });
    add([dim](TensorMapKey& key) { key.shape.box[dim] += 1; });
  }
  auto const cache = std::make_unique<TensorMapCache>();
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      int const number = static_cast<int>(i) + 1;
      CHECK(number_of(cache->get(keys[i], [&] { return numbered(number); })) == number);
    }
  }
}

TEST_CASE("TensorMapCache: a map is made once, until another key takes its place") {
  auto const cache = std::make_unique<TensorMapCache>();
  int made = 0;
  auto const get = [&](std::uintptr_t address) {
    return number_of(cache->get(key_at(address), [&] { return numbered(++made); }));
  };
  CHECK(get(1 << 20) == 1);
  CHECK(get(1 << 20) == 1);
  std::uintptr_t rival = 2 << 20;
  while (TensorMapCache::place_of(key_at(rival)) != TensorMapCache::place_of(key_at(1 << 20))) { rival += 1 << 20; }
  CHECK(get(rival) == 2);
  CHECK(get(rival) == 2);
  CHECK(get(1 << 20) == 3);
}

TEST_CASE("TensorMapCache: a map that cannot be made leaves the one that was there") {
  auto const cache = std::make_unique<TensorMapCache>();
  TensorMapKey const key = key_at(1 << 20);
  cache->get(key, [] { return numbered(7); });
  std::uintptr_t rival = 2 << 20;
  while (TensorMapCache::place_of(key_at(rival)) != TensorMapCache::place_of(key)) { rival += 1 << 20; }
  CHECK_THROWS_AS(cache->get(key_at(rival), []() -> CUtensorMap { throw std::runtime_error("refused"); }),
                  std::runtime_error);
  CHECK(number_of(cache->get(key, [] { return numbered(8); })) == 7);
}

TEST_CASE("TensorMapCache: the tensors of a model do not share a few places") {
  // 80 layers of K and V, allocated one after the other in pieces of a large power of 2.
  for (std::uintptr_t const piece : {std::uintptr_t{2} << 20, std::uintptr_t{1} << 30}) {
    std::set<std::size_t> places;
    for (std::uintptr_t layer = 1; layer <= 160; ++layer) {
      places.insert(TensorMapCache::place_of(key_at(layer * piece)));
    }
    CHECK(places.size() > 120);  // 137 of 160 if they were random
  }
}

}  // namespace hopper_attention
