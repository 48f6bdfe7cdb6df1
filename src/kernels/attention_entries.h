// The attention kernels of one (dtype, head dim), for the kernel table: one for each row of kTiles. So that several
// compilers work on them at once, each of `kParts` files has every kParts-th of them.
#pragma once

#include <array>
#include <span>
#include <utility>

#include "kernels/attention_kernel.h"
#include "kernels/kernel_entry.h"
#include "kernels/tile_config.h"

namespace hopper_attention {

template <class Element>
constexpr DataType data_type_of() {
  return is_same_v<Element, cutlass::bfloat16_t> ? DataType::kBFloat16 : DataType::kFloat16;
}

template <class Element, TileConfig kTile>
KernelEntry attention_entry() {
  using Traits = AttentionTraits<Element, kTile>;
  return {family_of(kTile), data_type_of<Element>(), kTile, reinterpret_cast<void const*>(&attention_kernel<Traits>),
          Traits::kThreads, Traits::kSharedBytes};
}

// The different tiles of a head dim; two uses may share one.
template <int kHeadDim, int kHeadDimV>
constexpr auto tiles_of_head_dim() {
  std::array<TileConfig, kTiles.size()> tiles{};
  int count = 0;
  for (TileRow const& row : kTiles) {
    bool known = row.tile.head_dim != kHeadDim || row.tile.head_dim_v != kHeadDimV;
    for (int i = 0; i < count; ++i) { known = known || tiles[i] == row.tile; }
    if (!known) { tiles[count++] = row.tile; }
  }
  return std::pair{tiles, count};
}

template <int kHeadDim, int kHeadDimV>
inline constexpr auto kTilesOf = tiles_of_head_dim<kHeadDim, kHeadDimV>();

template <class Element, int kHeadDim, int kHeadDimV, int kPart, int kParts, std::size_t... I>
std::array<KernelEntry, sizeof...(I)> make_attention_entries(std::index_sequence<I...>) {
  return {attention_entry<Element, kTilesOf<kHeadDim, kHeadDimV>.first[kPart + I * kParts]>()...};
}

template <class Element, int kHeadDim, int kHeadDimV, int kPart, int kParts>
std::span<KernelEntry const> attention_entries() {
  constexpr int kCount = kTilesOf<kHeadDim, kHeadDimV>.second;
  static_assert(kCount > 0, "kTiles has no row for this head dim");
  using Indices = std::make_index_sequence<(kCount - kPart + kParts - 1) / kParts>;
  static auto const entries = make_attention_entries<Element, kHeadDim, kHeadDimV, kPart, kParts>(Indices{});
  return entries;
}

}  // namespace hopper_attention
