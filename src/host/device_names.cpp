// Cards by name, so that a plan needs no GPU.
#include <array>
#include <cstdint>
#include <string>

#include "hopper_attention/forward.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

struct Card {
  char const* name;
  int sm_count;
  int l2_mebibytes;
  double memory_gbs;
};

// SM counts from NVIDIA's data sheets; L2 and memory as an H100 and an H200 report them, of the others by data sheets.
// The card itself is asked when it is there.
constexpr std::array kCards{
    Card{"H100", 132, 50, 3352}, Card{"H100 NVL", 132, 50, 3938}, Card{"H100 PCIe", 114, 50, 2039},
    Card{"H200", 132, 60, 4917}, Card{"H20", 78, 50, 4023},
};

std::string known_names() {
  std::string text;
  for (Card const& card : kCards) { text += concat(text.empty() ? "" : ", ", card.name); }
  return text;
}

}  // namespace

DeviceInfo device_info(std::string const& name) {
  for (Card const& card : kCards) {
    if (name == card.name) {
      return {.name = name,
              .sm_count = card.sm_count,
              .compute_major = 9,
              .compute_minor = 0,
              .l2_bytes = std::int64_t{card.l2_mebibytes} << 20,
              .memory_gbs = card.memory_gbs};
    }
  }
  raise<InvalidArgument>("device: must be one of ", known_names(), ", found \"", name, "\"");
}

}  // namespace hopper_attention
