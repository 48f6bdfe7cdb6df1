// What counts the parts of tiles, in words that may hold anything before.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "kernels/part_arrivals.h"

using namespace hopper_attention;

TEST_CASE("part arrivals: a word belongs to the call whose number it was counted with, whatever it counts") {
  std::uint64_t const most = std::numeric_limits<std::uint64_t>::max();
  std::set<std::uint64_t> tags;
  for (std::uint64_t number :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1} << 36, most - 1, most}) {
    std::uint64_t const none = ArrivalCounts::none(number);
    for (std::uint64_t parts : {0, 1, 264, ArrivalCounts::kMost}) {
      for (std::uint64_t waiters : {std::uint64_t{0}, parts / 2, parts}) {
        std::uint64_t const seen = waiters / 3;
        std::uint64_t const word =
            none + parts * ArrivalCounts::kPart + waiters * ArrivalCounts::kWaiter + seen * ArrivalCounts::kSeen;
        CHECK(ArrivalCounts::is_of(none, word));
        CHECK(ArrivalCounts::parts(word) == static_cast<int>(parts));
        CHECK(ArrivalCounts::waiters(word) == static_cast<int>(waiters));
        CHECK(ArrivalCounts::seen(word) == static_cast<int>(seen));
        CHECK_FALSE(ArrivalCounts::is_of(ArrivalCounts::none(number + 1), word));
        CHECK_FALSE(ArrivalCounts::is_of(ArrivalCounts::none(number - 1), word));
      }
    }
    tags.insert(none);
  }
  CHECK(tags.size() == 6);
}

TEST_CASE("part arrivals: memory filled with one value is no count of the call that this value numbers") {
  for (int byte = 0; byte < 256; ++byte) {
    auto const word = static_cast<std::uint64_t>(byte) * 0x0101010101010101U;
    CHECK_FALSE(ArrivalCounts::is_of(ArrivalCounts::none(word), word));
  }
  for (std::uint32_t half : {0x7fc00000U, 0x7f800000U, 0x3f800000U, 0xdeadbeefU}) {  // NaN, infinity, 1
    std::uint64_t const word = (std::uint64_t{half} << 32) | half;
    CHECK_FALSE(ArrivalCounts::is_of(ArrivalCounts::none(word), word));
  }
}

TEST_CASE("part arrivals: the parts of a tile follow from its units and the chunks") {
  Chunks const chunks{100, 8, 13, 13};
  // Begins in chunk 1 and ends in chunk 4.
  TileParts const parts = ArrivingPart{chunks, 11, 35, 0}.parts();
  REQUIRE(parts.count == 4);
  std::vector<int> const slots{3, 4, 6, 8};
  for (int i = 0; i < parts.count; ++i) { CHECK(parts.slot(i) == slots[static_cast<std::size_t>(i)]); }
  CHECK(ArrivingPart{chunks, 16, 17, 0}.parts().count == 1);
  CHECK(ArrivingPart{chunks, 96, 140, 0}.parts().count == 1);  // damaged metadata: past the list
  Chunks const whole_from_third{100, 8, 13, 3};
  CHECK(slot_of(whole_from_third, 2, 11) == 4);
  CHECK(slot_of(whole_from_third, 3, 11) == -1);  // damaged metadata: past the slots
  CHECK(ArrivingPart{whole_from_third, 11, 35, 0}.parts().count == 2);
}

TEST_CASE(
    "part arrivals: whoever waits and whoever does not, each row is merged once, by shares of about as many rows") {
  std::mt19937 random(1);
  for (int count = 1; count <= kMostPartsOfTile; ++count) {
    for (unsigned waiting : {0U, 1U, 50U, 100U}) {  // of a hundred
      CAPTURE(count);
      CAPTURE(waiting);
      std::vector<bool> waits;
      for (int i = 0; i < count; ++i) { waits.push_back(random() % 100U < waiting); }
      std::uint64_t const none = ArrivalCounts::none(random());
      std::uint64_t word = none;
      std::vector<std::uint64_t> before;
      for (int i = 0; i < count; ++i) {
        before.push_back(word);
        word += ArrivalCounts::kPart + (waits[static_cast<std::size_t>(i)] ? ArrivalCounts::kWaiter : 0);
        CHECK(share_of_rows(true, before.back(), word, count + 1).shares == 0);
      }
      int const rows = 1 + static_cast<int>(random() % 32U);
      std::vector<int> merged(static_cast<std::size_t>(rows));
      int takes_back = 0;
      int most = 0;
      int least = rows;
      for (std::size_t i = 0; i < before.size(); ++i) {
        std::uint64_t const own = before[i] + ArrivalCounts::kPart;
        ShareOfRows const share = share_of_rows(waits[i], before[i], waits[i] ? word : own, count);
        if (share.shares == 0) { continue; }
        CHECK(share.rank < share.shares);
        int const mine = std::max(0, (rows - share.rank + share.shares - 1) / share.shares);
        most = std::max(most, mine);
        least = std::min(least, mine);
        for (int row = share.rank; row < rows; row += share.shares) { ++merged[static_cast<std::size_t>(row)]; }
        takes_back += !waits[i] || ArrivalCounts::seen(word) + 1 == share.shares;
        if (waits[i]) { word += ArrivalCounts::kSeen; }
      }
      CHECK(most - least <= 1);
      CHECK(std::all_of(merged.begin(), merged.end(), [](int times) { return times == 1; }));
      CHECK(takes_back == 1);
    }
  }
}
