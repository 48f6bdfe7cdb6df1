// Attention sinks: a logit per query head that takes part in the denominator.
#pragma once

#include "kernels/cute.h"

#include "hopper_attention/types.h"
#include "kernels/softmax.h"

namespace hopper_attention {

// The sink of query head `head` as an exponent of 2.
__device__ __forceinline__ float sink_log2(void const* sinks, DataType type, int head) {
  float sink = 0.0F;
  switch (type) {
    case DataType::kBFloat16:
      sink = static_cast<cutlass::bfloat16_t const*>(sinks)[head];
      break;
    case DataType::kFloat16:
      sink = static_cast<cutlass::half_t const*>(sinks)[head];
      break;
    default:
      sink = static_cast<float const*>(sinks)[head];
  }
  return sink * kLog2e;
}

}  // namespace hopper_attention
