// Merging partial results: weights from log-sum-exps. Device code without CuTe, for every kernel that merges.
//
// Each part s of the keys left (o_s, L_s). With m = max L_s and t = sum_s exp(L_s - m),
//
//   L = m + ln t,   o = sum_s exp(L_s - m) / t * o_s.
//
// Weights are taken from L_s - m, which is exact or nearly so, and not from L_s - L: L is rounded to float32, which at
// |L| = 1000 alone would be a relative error of 3e-5 in all weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace hopper_attention {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// A part without keys says so by -inf; some kernels say +inf. NaN stays, and makes the merged row NaN.
__device__ __forceinline__ float part_lse(float lse) { return lse == -minus_infinity() ? minus_infinity() : lse; }

// exp(lse - maximum), for lse <= maximum; 0 for a part without keys, also when no part has any and the maximum is -inf.
__device__ __forceinline__ float part_weight(float lse, float maximum) {
  return __expf(lse - (maximum == minus_infinity() ? 0.0F : maximum));
}

// acc + weight * value; a value of weight 0 is not looked at, because it may be NaN.
__device__ __forceinline__ float add_weighted(float acc, float weight, float value) {
  return weight == 0.0F ? acc : fmaf(weight, value, acc);
}

// What weights are multiplied with once their total is known; 0 without keys.
__device__ __forceinline__ float inverse_total(float total) { return total == 0.0F ? 0.0F : 1.0F / total; }

// L; -inf without keys.
__device__ __forceinline__ float merged_lse(float maximum, float total) {
  return total == 0.0F ? minus_infinity() : maximum + logf(total);
}

// The weights of kParts parts, which sum to 1, or are all 0 without keys.
template <int kParts>
struct MergeWeights {
  float weight[kParts];
  float maximum;
  float total;

  // LSEs as their kernels left them.
  __device__ __forceinline__ explicit MergeWeights(float const (&lses)[kParts])
      : maximum(minus_infinity()), total(0.0F) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) { maximum = fmaxf(maximum, part_lse(lses[i])); }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      weight[i] = part_weight(part_lse(lses[i]), maximum);
      total += weight[i];
    }
    float const inverse = inverse_total(total);
#pragma unroll
    for (int i = 0; i < kParts; ++i) { weight[i] *= inverse; }
  }

  __device__ __forceinline__ float lse() const { return merged_lse(maximum, total); }
};

// Parts that come a few at a time: acc holds sum_s exp(L_s - maximum) o_s of those so far.
template <int kColumns>
struct RunningMerge {
  float acc[kColumns];
  float maximum;
  float total;

  __device__ __forceinline__ RunningMerge() : acc{}, maximum(minus_infinity()), total(0.0F) {}

  // To a maximum of at least `at_least`; returns the new one.
  __device__ __forceinline__ float raise_maximum(float at_least) {
    float const raised = fmaxf(maximum, at_least);
    float const factor = part_weight(maximum, raised);
    total *= factor;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) { acc[i] = add_weighted(0.0F, factor, acc[i]); }
    maximum = raised;
    return raised;
  }

  // A part, or parts merged before (weight = exp(their maximum - maximum), their total), of which `values` is the sum.
  __device__ __forceinline__ void add(float weight, float part_total, float const (&values)[kColumns]) {
    total += weight * part_total;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) { acc[i] = add_weighted(acc[i], weight, values[i]); }
  }

  __device__ __forceinline__ void normalise() {
    float const inverse = inverse_total(total);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) { acc[i] *= inverse; }
  }

  __device__ __forceinline__ float lse() const { return merged_lse(maximum, total); }
};

// 16 bytes of T as float32.
__device__ __forceinline__ void unpack(uint4 raw, float (&values)[4], float const* /*type*/) {
  values[0] = __uint_as_float(raw.x);
  values[1] = __uint_as_float(raw.y);
  values[2] = __uint_as_float(raw.z);
  values[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ void unpack(uint4 raw, float (&values)[8], __nv_bfloat16 const* /*type*/) {
  std::uint32_t const pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);  // bf16 is the upper half of float32
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000U);
  }
}

__device__ __forceinline__ void unpack(uint4 raw, float (&values)[8], __half const* /*type*/) {
  std::uint32_t const pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const pair = __half22float2(reinterpret_cast<__half2 const&>(pairs[i]));
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ std::uint32_t pack_pair(float low, float high, __nv_bfloat16 const* /*type*/) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<std::uint32_t const&>(pair);
}

__device__ __forceinline__ std::uint32_t pack_pair(float low, float high, __half const* /*type*/) {
  __half2 const pair = __floats2half2_rn(low, high);
  return reinterpret_cast<std::uint32_t const&>(pair);
}

// kColumns float32 values, rounded to nearest, as one store of T at `target`.
template <int kColumns, class T>
__device__ __forceinline__ void store(T* target, float const (&values)[kColumns]) {
  if constexpr (sizeof(T) == sizeof(float)) {
    static_assert(kColumns == 4, "a vector of float32 has 16 bytes");
    *reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
    std::uint32_t pairs[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) { pairs[i] = pack_pair(values[2 * i], values[2 * i + 1], target); }
    if constexpr (kColumns == 8) {
      *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      static_assert(kColumns == 4, "a vector has 8 or 16 bytes");
      *reinterpret_cast<uint2*>(target) = make_uint2(pairs[0], pairs[1]);
    }
  }
}

}  // namespace hopper_attention
