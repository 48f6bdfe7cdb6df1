// FastDivmod against the division of the compiler.
#include "kernels/fast_divmod.h"

#include <doctest/doctest.h>

#include <climits>
#include <cstdint>
#include <random>

using hopper_attention::FastDivmod;

namespace {

// Counts instead of checking each: millions of doctest checks take minutes.
int wrong(FastDivmod const& divmod, int divisor, int n) {
  return n >= 0 && (divmod.quotient(n) != n / divisor || divmod.remainder(n) != n % divisor);
}

// Where a rounded multiplier fails first: next to multiples of the divisor, also the last ones below 2^31.
int wrong_near_multiples(int divisor) {
  FastDivmod const divmod(divisor);
  int const last = INT_MAX / divisor;
  int found = 0;
  for (int const multiple : {0, 1, 2, 3, last / 3, last / 2, last - 1, last}) {
    if (multiple < 0) { continue; }
    auto const n = static_cast<std::int64_t>(multiple) * divisor;
    for (std::int64_t const near : {n - 1, n, n + 1}) {
      if (near <= INT_MAX) { found += wrong(divmod, divisor, static_cast<int>(near)); }
    }
  }
  return found + wrong(divmod, divisor, INT_MAX) + wrong(divmod, divisor, INT_MAX - 1);
}

}  // namespace

TEST_CASE("FastDivmod: every small dividend by every small divisor") {
  int found = 0;
  for (int divisor = 1; divisor <= 1100; ++divisor) {
    FastDivmod const divmod(divisor);
    for (int n = 0; n < 3300; ++n) { found += wrong(divmod, divisor, n); }
  }
  CHECK(found == 0);
}

TEST_CASE("FastDivmod: next to multiples, for the first 200,000 divisors and around powers of two") {
  int found = 0;
  for (int divisor = 1; divisor <= 200'000; ++divisor) { found += wrong_near_multiples(divisor); }
  for (int power = 17; power < 31; ++power) {
    for (int delta = -3; delta <= 3; ++delta) { found += wrong_near_multiples((1 << power) + delta); }
  }
  found += wrong_near_multiples(INT_MAX) + wrong_near_multiples(INT_MAX - 1);
  CHECK(found == 0);
}

TEST_CASE("FastDivmod: random dividends and divisors below 2^31") {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> bits(1, 30);
  int found = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    int const divisor = std::uniform_int_distribution<int>(1, (1 << bits(random)) + 1)(random);
    int const n = std::uniform_int_distribution<int>(0, INT_MAX)(random);
    found += wrong(FastDivmod(divisor), divisor, n);
  }
  CHECK(found == 0);
}

TEST_CASE("FastDivmod: the default divides by 1") {
  CHECK(FastDivmod().quotient(INT_MAX) == INT_MAX);
  CHECK(FastDivmod().remainder(INT_MAX) == 0);
}
