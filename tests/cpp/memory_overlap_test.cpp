// Overlap of strided views against marking every byte.
#include "host/memory_overlap.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "tensors.h"

namespace hopper_attention {
namespace {

constexpr std::uintptr_t kBase = 4096;

// How often each byte from kBase on belongs to an element.
std::vector<int> bytes_of(Tensor const& tensor) {
  std::vector<int> count(1 << 14, 0);
  std::vector<std::int64_t> index(tensor.rank, 0);
  std::int64_t elements = 1;
  for (int dim = 0; dim < tensor.rank; ++dim) { elements *= tensor.shape[dim]; }
  for (std::int64_t i = 0; i < elements; ++i) {
    std::int64_t rest = i;
    std::int64_t offset = 0;
    for (int dim = 0; dim < tensor.rank; ++dim) {
      offset += rest % tensor.shape[dim] * tensor.stride[dim];
      rest /= tensor.shape[dim];
    }
    int const bytes = element_bytes(tensor.dtype);
    auto const first = reinterpret_cast<std::uintptr_t>(tensor.data) - kBase + offset * bytes;
    for (int byte = 0; byte < bytes; ++byte) { ++count.at(first + byte); }
  }
  return count;
}

Tensor random_view(std::mt19937& random) {
  auto const pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  DataType const dtype = pick(0, 3) == 0 ? DataType::kFloat32 : DataType::kBFloat16;
  Tensor tensor = contiguous(kBase + 2 * pick(0, 60), dtype, {pick(1, 3), pick(1, 4), pick(1, 4), pick(1, 6)});
  for (int dim = 0; dim < 3; ++dim) { tensor.stride[dim] = pick(0, 4) == 0 ? pick(1, 90) : 6 * pick(1, 12); }
  if (pick(0, 4) == 0) { tensor.stride[3] = pick(1, 5); }
  if (pick(0, 4) == 0) { tensor.stride[pick(0, 3)] = 0; }  // expanded
  return tensor;
}

}  // namespace

TEST_CASE("overlap: 20,000 random pairs of views agree with marking their bytes") {
  std::mt19937 random(5);
  int shared = 0;
  int apart_but_crossing = 0;
  for (int i = 0; i < 20'000; ++i) {
    Tensor const a = random_view(random);
    Tensor const b = random_view(random);
    std::vector<int> const in_a = bytes_of(a);
    std::vector<int> const in_b = bytes_of(b);
    bool expected = false;
    for (std::size_t byte = 0; byte < in_a.size(); ++byte) { expected |= in_a[byte] > 0 && in_b[byte] > 0; }
    REQUIRE(overlap(a, b) == (expected ? Overlap::kShared : Overlap::kNone));
    REQUIRE(overlap(b, a) == overlap(a, b));
    shared += expected;
    apart_but_crossing += !expected && a.data < b.data;
  }
  CHECK(shared > 2000);
  CHECK(apart_but_crossing > 500);
}

TEST_CASE("overlap: a view without elements shares nothing") {
  Tensor const some = contiguous(kBase, DataType::kBFloat16, {2, 3});
  Tensor const none = contiguous(kBase, DataType::kBFloat16, {2, 0});
  CHECK(overlap(some, some) == Overlap::kShared);
  CHECK(overlap(some, none) == Overlap::kNone);
  CHECK(overlap(none, some) == Overlap::kNone);
}

TEST_CASE("overlap: large interleaved views are decided, not given up") {
  // two halves of the heads of one (64, 100000, 32, 128) tensor
  Tensor a = contiguous(kBase, DataType::kBFloat16, {64, 100'000, 16, 128});
  a.stride = {100'000 * 4096, 4096, 128, 1};
  Tensor b = a;
  b.data = reinterpret_cast<void*>(kBase + 16 * 128 * 2);
  CHECK(overlap(a, b) == Overlap::kNone);
  b.data = reinterpret_cast<void*>(kBase + 15 * 128 * 2);
  CHECK(overlap(a, b) == Overlap::kShared);
}

TEST_CASE("elements_are_distinct: true only for views in which no byte is counted twice, and for all ordinary ones") {
  std::mt19937 random(6);
  int distinct = 0;
  for (int i = 0; i < 20'000; ++i) {
    Tensor const tensor = random_view(random);
    if (!elements_are_distinct(tensor)) { continue; }
    ++distinct;
    std::vector<int> const counts = bytes_of(tensor);
    REQUIRE(*std::max_element(counts.begin(), counts.end()) == 1);
  }
  CHECK(distinct > 1000);

  Tensor tensor = contiguous(kBase, DataType::kBFloat16, {2, 3, 4, 8});
  CHECK(elements_are_distinct(tensor));
  std::swap(tensor.stride[1], tensor.stride[2]);
  std::swap(tensor.shape[1], tensor.shape[2]);
  CHECK(elements_are_distinct(tensor));
  tensor.stride[0] = 50;
  CHECK_FALSE(elements_are_distinct(tensor));
}

}  // namespace hopper_attention
