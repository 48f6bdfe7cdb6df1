// What may be wrong with a tensor of a call. Every rule raises with a message that starts with the tensor's name.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "hopper_attention/types.h"
#include "host/memory_overlap.h"

namespace hopper_attention {

struct Named {
  char const* name;
  Tensor const& tensor;
};

using DimNames = std::array<char const*, kMaxRank>;

// The largest dim, and the largest position in a sequence: sums of two positions and a window stay within 32 bits in
// visible().
inline constexpr std::int64_t kMaxExtent = std::int64_t{1} << 29;
inline constexpr std::int64_t kTmaAlignment = 16;
inline constexpr std::int64_t kMostAlignment = 16;  // no rule asks for more

bool is_half(DataType type);
bool is_empty(Tensor const& tensor);

// Given, of `rank` dims, none of them over kMaxExtent. `layout` is the shape for the message.
void require_rank(Named t, int rank, char const* layout);

void require_dtype(Named t, DataType dtype);
void require_dtype_of(Named t, Named other);
void require_cuda(Named t);
void require_device_of(Named t, Named other);

// Dim `dim` must be `size`, "as in " `source`.
void require_size(Named t, DimNames const& names, int dim, std::int64_t size, char const* source);

// Whether a dim of stride 0 may have more than one element.
enum class Expanded : std::uint8_t { kRefused, kAllowed };

// Rows are read or written in units of `bytes`: base and strides are multiples of them, the last stride is 1.
void require_vectors(Named t, DimNames const& names, std::int64_t bytes, Expanded expanded = Expanded::kAllowed);

// For tensors that TMA reads: vectors of 16 bytes, no expanded dim.
void require_readable_by_tma(Named t, DimNames const& names);

// Unit last stride, an address for every element, no element twice.
void require_writable(Named t, DimNames const& names);

// Contiguous, at a multiple of `alignment` bytes (0: of an element).
void require_contiguous(Named t, std::int64_t alignment = 0);

// Unit last stride, rows anywhere.
void require_rows(Named t, DimNames const& names);

// Elements anywhere.
void require_elements(Named t, DimNames const& names);

// Every element has an address of its own.
void require_distinct(Named t);

// `written` shares no byte with any of `others` that is given.
void require_disjoint(Named written, Named other);
void require_disjoint(Named written, std::initializer_list<Named> others);

// A tensor of a call.
template <class Call>
struct NamedMember {
  char const* name;
  Tensor Call::* tensor;

  Named of(Call const& call) const { return {name, call.*tensor}; }
};

// What each tensor of a call spans; 0: not given, or without elements. Calls that are the same (same_call.h) agree.
template <class Call, std::size_t kCount>
std::array<std::int64_t, kCount> spanned_bytes(Call const& call, std::array<NamedMember<Call>, kCount> const& members) {
  std::array<std::int64_t, kCount> bytes{};
  for (std::size_t i = 0; i < kCount; ++i) {
    Tensor const& tensor = call.*members[i].tensor;
    if (tensor.given()) { bytes[i] = spanned_bytes(tensor); }
  }
  return bytes;
}

// Calls `found(j, i)` where member i crosses the address range of j, one of the first kWritten and before i.
template <std::size_t kWritten, class Call, std::size_t kCount, class Found>
[[gnu::always_inline]] inline void for_each_crossing(Call const& call,
                                                     std::array<NamedMember<Call>, kCount> const& members,
                                                     std::array<std::int64_t, kCount> const& bytes,
                                                     Found const& found) {
  static_assert(kCount <= 32, "to be unrolled: members then are offsets in the code");
  std::array<AddressRange, kWritten> written{};
#pragma GCC unroll 32
  for (std::size_t i = 0; i < kCount; ++i) {
    if (bytes[i] == 0) { continue; }
    AddressRange const range = address_range(call.*members[i].tensor, bytes[i]);
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kWritten; ++j) {
      if (j < i && range.crosses(written[j])) { found(j, i); }
    }
    if (i < kWritten) { written[i] = range; }
  }
}

// The first kWritten of kMembers share no byte with each other or with any that follows. Address ranges rarely cross;
// only then elements are looked at.
template <auto const& kMembers, std::size_t kWritten, class Call, class Bytes>
void require_written_apart(Call const& call, Bytes const& bytes) {
  bool crossed = false;
  for_each_crossing<kWritten>(call, kMembers, bytes, [&](std::size_t, std::size_t) { crossed = true; });
  if (!crossed) { return; }
  for_each_crossing<kWritten>(call, kMembers, bytes, [&](std::size_t j, std::size_t i) {
    require_disjoint(kMembers[j].of(call), kMembers[i].of(call));
  });
}

}  // namespace hopper_attention
