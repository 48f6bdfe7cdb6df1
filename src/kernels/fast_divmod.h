// Division by a number known only at run time, as one multiplication.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace hopper_attention {

// Exact for 0 <= n < 2^31 and 1 <= divisor < 2^31. Source: Granlund and Montgomery, "Division by invariant integers
// using multiplication", 1994. For n of 31 bits the multiplier has 32 and needs no correction step.
struct FastDivmod {
  int divisor = 1;
  std::uint32_t shift = 0;
  std::uint32_t multiplier = 1;

  FastDivmod() = default;

  explicit constexpr FastDivmod(int divisor_) : divisor(divisor_) {
    while ((std::uint64_t{1} << shift) < static_cast<std::uint64_t>(divisor_)) { ++shift; }
    shift += 31;
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + divisor_ - 1) / divisor_);
  }

  HA_HOST_DEVICE constexpr int quotient(int n) const {
    return static_cast<int>((std::uint64_t{static_cast<std::uint32_t>(n)} * multiplier) >> shift);
  }

  HA_HOST_DEVICE constexpr int remainder(int n) const { return n - quotient(n) * divisor; }
};

}  // namespace hopper_attention
