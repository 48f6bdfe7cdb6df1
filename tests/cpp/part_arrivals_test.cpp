// What counts the parts of tiles, in words that may hold anything before.
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "kernels/part_arrivals.h"

using namespace hopper_attention;

TEST_CASE("part arrivals: a word belongs to the call whose number it was counted with, whatever it counts") {
  std::uint64_t const most = std::numeric_limits<std::uint64_t>::max();
  std::set<std::uint64_t> tags;
  for (std::uint64_t number :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1} << 53, most - 1, most}) {
    std::uint64_t const none = TaggedCount::none(number);
    for (std::uint64_t count : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{264}, TaggedCount::kMostCounted}) {
      CHECK(TaggedCount::is_of(none, none + count));
      CHECK(TaggedCount::count(none + count) == static_cast<int>(count));
      CHECK_FALSE(TaggedCount::is_of(TaggedCount::none(number + 1), none + count));
      CHECK_FALSE(TaggedCount::is_of(TaggedCount::none(number - 1), none + count));
    }
    tags.insert(none);
  }
  CHECK(tags.size() == 6);
}

TEST_CASE("part arrivals: memory filled with one value is no count of the call that this value numbers") {
  for (int byte = 0; byte < 256; ++byte) {
    auto const word = static_cast<std::uint64_t>(byte) * 0x0101010101010101U;
    CHECK_FALSE(TaggedCount::is_of(TaggedCount::none(word), word));
  }
  for (std::uint32_t half : {0x7fc00000U, 0x7f800000U, 0x3f800000U, 0xdeadbeefU}) {  // NaN, infinity, 1
    std::uint64_t const word = (std::uint64_t{half} << 32) | half;
    CHECK_FALSE(TaggedCount::is_of(TaggedCount::none(word), word));
  }
}

TEST_CASE("part arrivals: the parts of a tile follow from its units and the chunks") {
  Chunks const chunks{100, 8, 13};
  // Begins in chunk 1 and ends in chunk 4.
  TileParts const parts = ArrivingPart{chunks, 11, 35, 0}.parts();
  REQUIRE(parts.count == 4);
  std::vector<int> const slots{3, 4, 6, 8};
  for (int i = 0; i < parts.count; ++i) {
    CHECK(parts.slot(i) == slots[static_cast<std::size_t>(i)]);
    CHECK(parts.part_in(parts.slot(i)) == i);
  }
  CHECK(ArrivingPart{chunks, 16, 17, 0}.parts().count == 1);
  CHECK(ArrivingPart{chunks, 96, 140, 0}.parts().count == 1);  // damaged metadata: past the list
}

TEST_CASE("part arrivals: in one step or two, each part is merged once, by words that belong to it alone") {
  for (int count = 2; count <= 264; ++count) {
    CAPTURE(count);
    for (int first_slot : {6, 7}) {
      TileParts const all{count, first_slot, 6, 2};
      std::multiset<int> merged;
      std::set<int> words;
      std::set<int> left;
      for (int part = 0; part < count; ++part) {
        MergeStep const step = first_merge(all, all.slot(part));
        bool const begins_group = step.parts.first_slot == all.slot(part);
        if (!begins_group) { continue; }
        CHECK(words.insert(step.counted_in).second);
        for (int i = 0; i < step.parts.count; ++i) { merged.insert(step.parts.slot(i)); }
        CHECK(step.parts.count <= kMostPartsOfOneStep);
        CHECK(step.ends_tile == (count <= kMostPartsOfOneStep));
        left.insert(step.parts.first_slot);
      }
      CHECK(merged.size() == static_cast<std::size_t>(count));
      for (int part = 0; part < count; ++part) { CHECK(merged.count(all.slot(part)) == 1); }
      if (count <= kMostPartsOfOneStep) { continue; }
      MergeStep const last = last_merge(all);
      CHECK(last.ends_tile);
      CHECK(words.insert(last.counted_in).second);
      std::set<int> of_last;
      for (int i = 0; i < last.parts.count; ++i) { of_last.insert(last.parts.slot(i)); }
      CHECK(of_last == left);
    }
  }
}
