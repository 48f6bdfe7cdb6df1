// Moves new keys and values into the cache, and rotates new keys and queries on the way.
//
// A block takes a few tokens of one tensor. Its warps find out which sequence each token belongs to and at which
// position it is; its threads move vectors of 16 bytes. A decode step is a chain of dependent loads, kept to two: the
// length, with the vector under way meanwhile, then the page together with cos and sin.
//
// All that is read from the device is clamped: whatever lengths, starts, pages and indices hold, only elements of the
// given tensors are read and written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "kernels/append_params.h"
#include "kernels/dependent_launch.h"

namespace hopper_attention {
namespace append_detail {

inline constexpr int kWarp = 32;
inline constexpr int kWarps = kAppendThreads / kWarp;
inline constexpr int kColumns = 8;  // of a vector
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

__device__ __forceinline__ int clamp(std::int64_t value, int low, int high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

// Where a token goes: to a slot of a row of the cache, or with pages of its sequence.
struct Place {
  int sequence;  // -1: nowhere
  int row;
  int slot;
  int position;  // row of cos and sin
};

// A token as one of a sequence; sequence -1 if it belongs to none.
struct TokenOf {
  int sequence;
  int index;
};

// The sequence of a token of a packed tensor, by a search of the whole warp: each lane looks at one of 32 pieces. Ends
// for any `starts`; what it finds then is checked.
__device__ __forceinline__ TokenOf find_token(int const* starts, int batch, int tokens, int token) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int begin = 0;  // the number of starts up to `token` is in [begin, end]
  int end = batch + 1;
  while (begin < end) {
    int const step = (end - begin + kWarp - 1) / kWarp;
    int const last = begin + (lane + 1) * step - 1;
    bool const up_to_token = last < end && starts[last] <= token;
    begin += __popc(__ballot_sync(kAllLanes, up_to_token)) * step;
    end = min(begin + step - 1, end);
  }
  int const sequence = begin - 1;
  if (sequence < 0 || sequence >= batch) { return {-1, 0}; }
  int const first = clamp(starts[sequence], 0, tokens);
  int const behind = clamp(starts[sequence + 1], first, tokens);
  return {token >= first && token < behind ? sequence : -1, token - first};
}

__device__ __forceinline__ Place place_of(AppendParams const& params, AppendJob const& job, TokenOf const& of) {
  Place place{-1, of.sequence, 0, 0};
  if (of.sequence < 0) { return place; }
  CacheParams const& cache = params.cache;
  RotaryParams const& rotary = params.rotary;
  if (cache.batch_idx != nullptr) { place.row = cache.batch_idx[of.sequence]; }
  bool const has_slots = cache.page_table != nullptr || (place.row >= 0 && place.row < cache.rows);
  int const capacity = has_slots ? cache.capacity : 0;
  int const given = cache.seqused != nullptr ? cache.seqused[of.sequence] : cache.seqused_all;
  int const used = clamp(given, 0, capacity);
  if (job.rotate) {
    std::int64_t const first = rotary.seqlens != nullptr ? rotary.seqlens[of.sequence] : used;
    std::int64_t const steps = job.to_cache || rotary.per_position ? of.index : 0;
    place.position = clamp(first + steps, 0, rotary.positions - 1);
  }
  std::int64_t const slot = std::int64_t{used} + of.index;
  if (job.to_cache && slot >= capacity) { return place; }
  place.sequence = of.sequence;
  place.slot = job.to_cache ? static_cast<int>(slot) : 0;
  return place;
}

// The row of the cache that holds a token's slot: with pages the page, which may be none that exists.
__device__ __forceinline__ int cache_row(CacheParams const& cache, Place const& place) {
  if (cache.page_table == nullptr) { return place.row; }
  return cache.page_table[place.sequence * cache.page_table_stride + cache.page_size.quotient(place.slot)];
}

// A token of a tensor that has all of them, in elements from its start.
__device__ __forceinline__ std::int64_t token_offset(AppendJob const& job, TokenStrides const& stride, int token) {
  if (job.starts != nullptr) { return token * stride.token; }
  int const sequence = job.seqlen.quotient(token);
  return sequence * stride.sequence + (token - sequence * job.seqlen.divisor) * stride.token;
}

template <class Element>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ __forceinline__ float2 unpack(Type pair) { return __bfloat1622float2(pair); }
  static __device__ __forceinline__ Type pack(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ __forceinline__ float value(__nv_bfloat16 x) { return __bfloat162float(x); }
};
template <>
struct Pair<__half> {
  using Type = __half2;
  static __device__ __forceinline__ float2 unpack(Type pair) { return __half22float2(pair); }
  static __device__ __forceinline__ Type pack(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ __forceinline__ float value(__half x) { return __half2float(x); }
};

// A vector of `Element`, or half of one.
template <class Element, int kCount, class Vector>
__device__ __forceinline__ void unpack(Vector vector, float (&values)[kCount]) {
  using PairType = typename Pair<Element>::Type;
  static_assert(sizeof(Vector) == kCount * sizeof(Element));
  PairType pairs[kCount / 2];
  std::memcpy(pairs, &vector, sizeof(vector));
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    float2 const pair = Pair<Element>::unpack(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <class Element>
__device__ __forceinline__ uint4 pack(float const (&values)[kColumns]) {
  typename Pair<Element>::Type pairs[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) { pairs[i] = Pair<Element>::pack(values[2 * i], values[2 * i + 1]); }
  uint4 vector;
  std::memcpy(&vector, pairs, sizeof(vector));
  return vector;
}

// kCount entries of a row of cos or sin from column `first` on, which is a multiple of kCount.
template <class Element, int kCount>
__device__ __forceinline__ void load_table(void const* table, bool float32, std::int64_t row, int first,
                                           float (&values)[kCount]) {
  if (float32) {
    auto const* const from = reinterpret_cast<float4 const*>(static_cast<float const*>(table) + row + first);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      float4 const four = from[i];
      values[4 * i] = four.x;
      values[4 * i + 1] = four.y;
      values[4 * i + 2] = four.z;
      values[4 * i + 3] = four.w;
    }
  } else {
    auto const* const from = static_cast<Element const*>(table) + row + first;
    if constexpr (kCount == kColumns) {
      unpack<Element>(*reinterpret_cast<uint4 const*>(from), values);
    } else {
      unpack<Element>(*reinterpret_cast<uint2 const*>(from), values);
    }
  }
}

template <class Element>
__device__ __forceinline__ float table_entry(void const* table, bool float32, std::int64_t index) {
  return float32 ? static_cast<float const*>(table)[index]
                 : Pair<Element>::value(static_cast<Element const*>(table)[index]);
}

// The products and the sum are rounded one by one, without fused multiply-add: the same bits as the reference.
__device__ __forceinline__ float rotated(float own, float partner, float cos, float signed_sin) {
  return __fadd_rn(__fmul_rn(own, cos), __fmul_rn(partner, signed_sin));
}

// Whether columns are turned together with those half of the rotary dim away, as vectors, and where those begin.
__device__ __forceinline__ bool has_partner(RotaryParams const& rotary, int column) {
  return rotary.by_vector && !rotary.interleaved && column < 2 * rotary.half;
}
__device__ __forceinline__ int partner_of(RotaryParams const& rotary, int column) {
  return column < rotary.half ? column + rotary.half : column - rotary.half;
}

// Rotates a vector of columns from `column` on, of the row at `source`, at a row of the tables. `partner_vector`:
// that of partner_of().
template <class Element>
__device__ __forceinline__ uint4 rotate(RotaryParams const& rotary, Element const* source, uint4 vector,
                                        uint4 partner_vector, int column, int position) {
  int const half = rotary.half;
  if (column >= 2 * half) { return vector; }
  std::int64_t const cos_row = position * rotary.cos_stride;
  std::int64_t const sin_row = position * rotary.sin_stride;
  float own[kColumns];
  unpack<Element>(vector, own);
  if (rotary.by_vector && rotary.interleaved) {
    float cos[kColumns / 2];
    float sin[kColumns / 2];
    load_table<Element>(rotary.cos, rotary.float32, cos_row, column / 2, cos);
    load_table<Element>(rotary.sin, rotary.float32, sin_row, column / 2, sin);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      float const x = own[2 * i];
      float const y = own[2 * i + 1];
      own[2 * i] = rotated(x, y, cos[i], -sin[i]);
      own[2 * i + 1] = rotated(y, x, cos[i], sin[i]);
    }
    return pack<Element>(own);
  }
  if (rotary.by_vector) {
    bool const first = column < half;
    int const entry = first ? column : column - half;
    float partner[kColumns];
    float cos[kColumns];
    float sin[kColumns];
    unpack<Element>(partner_vector, partner);
    load_table<Element>(rotary.cos, rotary.float32, cos_row, entry, cos);
    load_table<Element>(rotary.sin, rotary.float32, sin_row, entry, sin);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) { own[i] = rotated(own[i], partner[i], cos[i], first ? -sin[i] : sin[i]); }
    return pack<Element>(own);
  }
  // A rotary dim that is not a multiple of 16, or tables that are not aligned: element by element.
  float turned[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    int const c = column + i;
    if (c >= 2 * half) { continue; }
    bool const first = rotary.interleaved ? i % 2 == 0 : c < half;
    int const entry = rotary.interleaved ? c / 2 : first ? c : c - half;
    int const other = rotary.interleaved ? (first ? c + 1 : c - 1) : (first ? c + half : entry);
    float const sin = table_entry<Element>(rotary.sin, rotary.float32, sin_row + entry);
    turned[i] = rotated(own[i], Pair<Element>::value(source[other]),
                        table_entry<Element>(rotary.cos, rotary.float32, cos_row + entry), first ? -sin : sin);
  }
  // 2 * half is even: no pair is cut. The others keep their bits.
  typename Pair<Element>::Type pairs[kColumns / 2];
  std::memcpy(pairs, &vector, sizeof(vector));
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    if (column + 2 * i < 2 * half) { pairs[i] = Pair<Element>::pack(turned[2 * i], turned[2 * i + 1]); }
  }
  std::memcpy(&vector, pairs, sizeof(vector));
  return vector;
}

__device__ __forceinline__ void fetch_to_l2(void const* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Brings near what a token's place follows from, as far as lengths tell before they are certain.
__device__ __forceinline__ void expect_place(AppendParams const& params, AppendJob const& job, TokenOf const& of) {
  CacheParams const& cache = params.cache;
  RotaryParams const& rotary = params.rotary;
  if (cache.capacity == 0) { return; }
  std::int64_t const used = cache.seqused != nullptr ? load_hint(cache.seqused + of.sequence) : cache.seqused_all;
  int const slot = clamp(used + of.index, 0, cache.capacity - 1);
  if (job.to_cache && cache.page_table != nullptr) {
    fetch_to_l2(cache.page_table + of.sequence * cache.page_table_stride + cache.page_size.quotient(slot));
  }
  if (job.rotate && rotary.positions > 0) {
    std::int64_t const first = rotary.seqlens != nullptr ? load_hint(rotary.seqlens + of.sequence) : used;
    int const position = clamp(first + of.index, 0, rotary.positions - 1);
    int const bytes = rotary.float32 ? 4 : 2;
    fetch_to_l2(static_cast<char const*>(rotary.cos) + position * rotary.cos_stride * bytes);
    fetch_to_l2(static_cast<char const*>(rotary.sin) + position * rotary.sin_stride * bytes);
  }
}

template <class Element>
__global__ void __launch_bounds__(kAppendThreads) append_tokens(__grid_constant__ AppendParams const params) {
  __shared__ Place places[kMaxTokensPerBlock];
  int const block = static_cast<int>(blockIdx.x);
  int const which = (block >= params.first_block[1] ? 1 : 0) + (block >= params.first_block[2] ? 1 : 0);
  AppendJob const& job = params.jobs[which];
  int const block_of_job = block - params.first_block[which];
  int const token_block = job.head_blocks.quotient(block_of_job);
  int const first_token = token_block * job.tokens_per_block;
  int const first_head = (block_of_job - token_block * job.head_blocks.divisor) * job.heads_per_block.divisor;
  int const tokens = min(job.tokens_per_block, job.tokens - first_token);
  int const vectors = tokens * job.heads_per_block.divisor * job.vectors.divisor;

  struct Item {
    int token;  // of the block
    int head;
    int column;
    Element const* from;  // the row
    uint4 vector;
    uint4 partner;
  };
  auto const locate = [&](int i) {
    int const row = job.vectors.quotient(i);
    int const token = job.heads_per_block.quotient(row);
    Item item{token, first_head + row - token * job.heads_per_block.divisor, (i - row * job.vectors.divisor) * kColumns,
              nullptr};
    item.vector = item.partner = uint4{0, 0, 0, 0};
    if (item.head >= job.heads) { return item; }
    item.from = static_cast<Element const*>(job.source) + token_offset(job, job.source_stride, first_token + token) +
                item.head * job.source_stride.head;
    return item;
  };
  auto const read = [&](Item item) {
    if (item.from == nullptr) { return item; }
    item.vector = *reinterpret_cast<uint4 const*>(item.from + item.column);
    if (job.rotate && has_partner(params.rotary, item.column)) {
      item.partner = *reinterpret_cast<uint4 const*>(item.from + partner_of(params.rotary, item.column));
    }
    return item;
  };

  start_dependents();
  int const thread = static_cast<int>(threadIdx.x);
  Item item{};
  if (thread < vectors) { item = locate(thread); }
  if (item.from != nullptr) { fetch_to_l2(item.from + item.column); }
  // Each warp places up to four tokens, a lane for each.
  int const lane = thread % kWarp;
  int const warp = thread / kWarp;
  int const mine = warp + lane * kWarps;
  TokenOf of{-1, 0};
  if (job.starts == nullptr && mine < tokens) {
    of.sequence = job.seqlen.quotient(first_token + mine);
    of.index = first_token + mine - of.sequence * job.seqlen.divisor;
    expect_place(params, job, of);
  }
  wait_for_prerequisites();
  item = read(item);
  if (job.starts != nullptr) {
    for (int turn = 0; warp + turn * kWarps < tokens; ++turn) {
      TokenOf const found = find_token(job.starts, params.batch, job.tokens, first_token + warp + turn * kWarps);
      if (lane == turn) { of = found; }
    }
  }
  if (mine < tokens) { places[mine] = place_of(params, job, of); }
  __syncthreads();

  auto* const destination = static_cast<Element*>(job.destination);
  for (int i = thread; i < vectors; i += kAppendThreads) {
    if (i != thread) { item = read(locate(i)); }
    Place const place = places[item.token];
    if (place.sequence < 0 || item.head >= job.heads) { continue; }
    int const row = job.to_cache ? cache_row(params.cache, place) : 0;
    if (job.rotate) {
      item.vector = rotate(params.rotary, item.from, item.vector, item.partner, item.column, place.position);
    }
    std::int64_t to = 0;
    if (!job.to_cache) {
      to = token_offset(job, job.destination_stride, first_token + item.token);
    } else {
      if (row < 0 || row >= params.cache.rows) { continue; }
      int const slot = params.cache.page_table == nullptr ? place.slot : params.cache.page_size.remainder(place.slot);
      to = row * job.destination_stride.sequence + slot * job.destination_stride.token;
    }
    *reinterpret_cast<uint4*>(destination + to + item.head * job.destination_stride.head + item.column) = item.vector;
  }
}

}  // namespace append_detail
}  // namespace hopper_attention
