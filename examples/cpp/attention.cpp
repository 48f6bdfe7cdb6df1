// Attention from C++: fill Arguments, check, plan, explain; run if there is a GPU. CMakeLists.txt says how to build it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "common.h"
#include "hopper_attention/forward.h"

namespace ha = hopper_attention;
using namespace example;

namespace {

constexpr std::int64_t kBatch = 1, kQueries = 1000, kKeys = 3000, kHeadsQ = 16, kHeadsK = 4, kHeadDim = 128;
constexpr std::uint16_t kOne = 0x3f80;  // 1.0 as bf16

ha::Arguments arguments(void* q, void* k, void* v, void* out, void* lse) {
  using enum ha::DataType;
  ha::Arguments args;
  args.q = tensor(q, kBFloat16, {kBatch, kQueries, kHeadsQ, kHeadDim});
  args.k = tensor(k, kBFloat16, {kBatch, kKeys, kHeadsK, kHeadDim});
  args.v = tensor(v, kBFloat16, {kBatch, kKeys, kHeadsK, kHeadDim});
  args.out = tensor(out, kBFloat16, {kBatch, kQueries, kHeadsQ, kHeadDim});
  args.softmax_lse = tensor(lse, kFloat32, {kBatch, kHeadsQ, kQueries});
  args.causal = true;
  return args;
}

// Nothing here reads the tensors, so addresses that only look like device memory will do.
void plan_without_gpu() {
  ha::Arguments args = arguments(address(1), address(2), address(3), address(4), address(5));
  std::cout << ha::plan(ha::validate(args), ha::device_info("H100")).explain() << '\n';

  args.k.shape[2] = args.v.shape[2] = 3;
  try {
    ha::validate(args);
  } catch (ha::InvalidArgument const& error) { std::cout << "3 heads of k are refused: " << error.what() << '\n'; }
}

#if defined(WITH_CUDA_RUNTIME)
// Queries of zeros weigh all visible keys alike: out is the mean of the values, LSE the logarithm of their number.
bool run_on_gpu() {
  std::vector<std::uint16_t> values(kKeys * kHeadsK * kHeadDim, 0);
  std::fill(values.begin(), values.begin() + kKeys / 2 * kHeadsK * kHeadDim, kOne);
  DeviceArray<std::uint16_t> const q(std::vector<std::uint16_t>(kQueries * kHeadsQ * kHeadDim, 0));
  DeviceArray<std::uint16_t> const k(std::vector<std::uint16_t>(kKeys * kHeadsK * kHeadDim, kOne));
  DeviceArray<std::uint16_t> const v(values);
  DeviceArray<std::uint16_t> const out(std::vector<std::uint16_t>(kQueries * kHeadsQ * kHeadDim));
  DeviceArray<float> const lse(std::vector<float>(kHeadsQ * kQueries));

  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  ha::forward(arguments(q.data(), k.data(), v.data(), out.data(), lse.data()), stream);
  check(cudaStreamSynchronize(stream));
  check(cudaStreamDestroy(stream));

  std::vector<std::uint16_t> const means = out.on_host();
  std::vector<float> const logs = lse.on_host();
  float out_error = 0.0F;
  float lse_error = 0.0F;
  for (std::int64_t head = 0; head < kHeadsQ; ++head) {
    for (std::int64_t i = 0; i < kQueries; ++i) {
      auto const visible = static_cast<float>(i + 1 + kKeys - kQueries);
      float const mean = from_bfloat16(means[(i * kHeadsQ + head) * kHeadDim]);
      out_error = std::fmax(out_error, std::fabs(mean - static_cast<float>(kKeys / 2) / visible));
      lse_error = std::fmax(lse_error, std::fabs(logs[head * kQueries + i] - std::log(visible)));
    }
  }
  std::cout << "on the GPU: error of out " << out_error << ", of the log-sum-exp " << lse_error << '\n';
  return out_error < 1.0F / 256 && lse_error < 2e-4F;
}
#else
bool run_on_gpu() { return false; }
#endif

}  // namespace

int main() {
  plan_without_gpu();
  if (std::string const reason = why_not(); !reason.empty()) {
    std::cout << "nothing was run on a GPU: " << reason << '\n';
    return 0;
  }
  return run_on_gpu() ? 0 : 1;
}
