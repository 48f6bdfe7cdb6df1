// Lets plain functions serve host and device; code that includes this compiles without CUDA.
#pragma once

#include <bit>

#if defined(__CUDACC__)
#define HA_HOST_DEVICE __host__ __device__ __forceinline__
#define HA_NO_UNROLL _Pragma("unroll 1")
#else
#define HA_HOST_DEVICE inline
#define HA_NO_UNROLL
#endif

namespace hopper_attention {

// For b > 0, as floor_div().
template <class T>
HA_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// For a >= 0, in half of the instructions where b is not known before.
HA_HOST_DEVICE constexpr int ceil_div_unsigned(int a, int b) {
  return static_cast<int>(ceil_div(static_cast<unsigned>(a), static_cast<unsigned>(b)));
}

HA_HOST_DEVICE constexpr int floor_div(int a, int b) { return a / b - (a % b < 0); }

HA_HOST_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
HA_HOST_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }

template <class Integer>
HA_HOST_DEVICE constexpr int clamped(Integer value, int low, int high) {
  return value < low ? low : value > high ? high : static_cast<int>(value);
}

// Rounded down, for x > 0.
HA_HOST_DEVICE constexpr int log2_of(int x) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(x);
#else
  return std::bit_width(static_cast<unsigned>(x)) - 1;
#endif
}

}  // namespace hopper_attention
