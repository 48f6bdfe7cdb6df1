// Device memory of a case, each tensor an allocation of its own of exactly its size, so that the tools see every byte
// beyond it; but for those that take_with_room() is for. Without a GPU host memory stands in for it, for checks of
// arguments and plans alone.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "hopper_attention/types.h"

namespace driver {

inline void check(cudaError_t code) {
  if (code != cudaSuccess) { throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(code)); }
}

inline std::int64_t element_bytes(hopper_attention::DataType dtype) {
  using hopper_attention::DataType;
  return dtype == DataType::kUInt8 ? 1 : dtype == DataType::kBFloat16 || dtype == DataType::kFloat16 ? 2 : 4;
}

// A number as an element of `dtype`, in the low bits; rounded to nearest even.
inline std::uint32_t encoded(float value, hopper_attention::DataType dtype) {
  using hopper_attention::DataType;
  std::uint32_t bits = 0;
  if (dtype == DataType::kFloat16) {
    auto const half = static_cast<_Float16>(value);
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  std::memcpy(&bits, &value, 4);
  if (dtype == DataType::kFloat32) { return bits; }
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // of a finite number
}

inline float decoded(std::uint32_t bits, hopper_attention::DataType dtype) {
  using hopper_attention::DataType;
  if (dtype == DataType::kFloat16) {
    _Float16 half{};
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
  }
  if (dtype == DataType::kBFloat16) { bits <<= 16; }
  float value = 0.0F;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float rounded(float value, hopper_attention::DataType dtype) { return decoded(encoded(value, dtype), dtype); }

// Elements of a tensor on the host; NaN where nothing was set.
class Values {
 public:
  Values(hopper_attention::DataType dtype, std::int64_t count)
      : dtype_(dtype), bytes_(static_cast<std::size_t>(count * element_bytes(dtype)), 0xFF) {}

  void set(std::int64_t at, float value) {
    std::uint32_t const bits = encoded(value, dtype_);
    std::memcpy(bytes_.data() + at * element_bytes(dtype_), &bits, static_cast<std::size_t>(element_bytes(dtype_)));
  }
  float get(std::int64_t at) const {
    std::uint32_t bits = 0;
    std::memcpy(&bits, bytes_.data() + at * element_bytes(dtype_), static_cast<std::size_t>(element_bytes(dtype_)));
    return decoded(bits, dtype_);
  }
  bool untouched(std::int64_t at) const {
    for (std::int64_t i = 0; i < element_bytes(dtype_); ++i) {
      if (bytes_[static_cast<std::size_t>(at * element_bytes(dtype_) + i)] != 0xFF) { return false; }
    }
    return true;
  }
  std::vector<std::uint8_t>& bytes() { return bytes_; }

 private:
  hopper_attention::DataType dtype_;
  std::vector<std::uint8_t> bytes_;
};

class Memory {
 public:
  explicit Memory(bool on_gpu) : on_gpu_(on_gpu) {}
  Memory(Memory const&) = delete;
  Memory& operator=(Memory const&) = delete;
  ~Memory() {
    for (void* p : taken_) { on_gpu_ ? static_cast<void>(cudaFree(p)) : std::free(p); }
  }

  // Nobody has written to it.
  void* take(std::size_t bytes) {
    void* p = nullptr;
    if (on_gpu_) {
      check(cudaMalloc(&p, std::max<std::size_t>(bytes, 1)));
    } else {
      p = std::aligned_alloc(256, (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256);
    }
    taken_.push_back(p);
    return p;
  }

  void* take(void const* from, std::size_t bytes) {
    void* const p = take(bytes);
    if (on_gpu_) {
      check(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    } else {
      std::memcpy(p, from, bytes);
    }
    return p;
  }

  // For tensors whose maps have every row once for each row of a box (ClippedBox), at overlapping addresses: memcheck
  // takes the product of a map's extents for the size of what it describes, and lets no box be loaded if the allocation
  // is smaller, wherever the box lies. The room is filled as Values are where nothing was set: with NaN.
  void* take_with_room(std::vector<std::uint8_t> const& values, int most_copies) {
    std::size_t const bytes = values.size(), all = bytes * static_cast<std::size_t>(most_copies);
    if (!on_gpu_) { return take(values.data(), bytes); }
    void* const p = take(all);
    check(cudaMemset(p, 0xFF, all));
    put(p, values.data(), bytes);
    return p;
  }

  // Whether nobody wrote behind a tensor of take_with_room(), as far again as it is long.
  bool room_is_untouched(void const* p, std::size_t bytes) const {
    if (!on_gpu_) { return true; }
    std::vector<std::uint8_t> room(bytes);
    fetch(room.data(), static_cast<std::uint8_t const*>(p) + bytes, bytes);
    return std::all_of(room.begin(), room.end(), [](std::uint8_t b) { return b == 0xFF; });
  }

  void put(void* to, void const* from, std::size_t bytes) const {
    if (on_gpu_) {
      check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    } else {
      std::memcpy(to, from, bytes);
    }
  }

  void fetch(void* to, void const* from, std::size_t bytes) const {
    if (on_gpu_) {
      check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
    } else {
      std::memcpy(to, from, bytes);
    }
  }

 private:
  bool on_gpu_;
  std::vector<void*> taken_;
};

// A contiguous tensor of device 0.
inline hopper_attention::Tensor tensor(void* data, hopper_attention::DataType dtype,
                                       std::initializer_list<std::int64_t> shape) {
  hopper_attention::Tensor t{.data = data, .dtype = dtype, .device = 0, .rank = static_cast<int>(shape.size())};
  std::int64_t stride = 1;
  int dim = t.rank;
  for (auto size = std::rbegin(shape); size != std::rend(shape); ++size) {
    --dim;
    t.shape[static_cast<std::size_t>(dim)] = *size;
    t.stride[static_cast<std::size_t>(dim)] = stride;
    stride *= *size;
  }
  return t;
}

inline std::int64_t elements(hopper_attention::Tensor const& t) {
  std::int64_t count = 1;
  for (int dim = 0; dim < t.rank; ++dim) { count *= t.shape[static_cast<std::size_t>(dim)]; }
  return count;
}

}  // namespace driver
