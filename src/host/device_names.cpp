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
};

// SM counts from NVIDIA's data sheets; L2 as an H200 reports it, for the others that of the H100's data sheet. The card
// itself is asked when it is there.
constexpr std::array kCards{
    Card{"H100", 132, 50}, Card{"H100 NVL", 132, 50}, Card{"H100 PCIe", 114, 50},
    Card{"H200", 132, 60}, Card{"H20", 78, 50},
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
              .l2_bytes = std::int64_t{card.l2_mebibytes} << 20};
    }
  }
  raise<InvalidArgument>("device: must be one of ", known_names(), ", found \"", name, "\"");
}

}  // namespace hopper_attention
