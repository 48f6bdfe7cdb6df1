// Decoding over a paged K/V cache, as an engine without Python does it: one schedule for a step, shared by its layers,
// a workspace that is allocated once, lengths that grow on the device. CMakeLists.txt says how to build it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "hopper_attention/forward.h"

namespace ha = hopper_attention;
using namespace example;

namespace {

constexpr std::int64_t kBatch = 5, kHeadsQ = 32, kHeadsK = 8, kHeadDim = 128, kPageSize = 16, kPages = 200;
constexpr std::int64_t kPagesPerSequence = 40;
constexpr int kSteps = 3, kLayers = 2;
constexpr std::int32_t kUnusedSlot = 2147480000;               // slots behind a sequence hold anything
std::vector<std::int32_t> const kLengths{1, 16, 0, 333, 600};  // before the first step

struct Step {
  void *q, *k, *v, *out, *lse, *lengths, *pages, *metadata, *workspace;
  std::int64_t workspace_bytes;
};

// One query for each sequence, over the keys that its pages hold.
ha::Arguments arguments(Step const& step) {
  using enum ha::DataType;
  ha::Arguments args;
  args.q = tensor(step.q, kBFloat16, {kBatch, 1, kHeadsQ, kHeadDim});
  args.k = tensor(step.k, kBFloat16, {kPages, kPageSize, kHeadsK, kHeadDim});
  args.v = tensor(step.v, kBFloat16, {kPages, kPageSize, kHeadsK, kHeadDim});
  args.out = tensor(step.out, kBFloat16, {kBatch, 1, kHeadsQ, kHeadDim});
  args.softmax_lse = tensor(step.lse, kFloat32, {kBatch, kHeadsQ, 1});
  args.page_table = tensor(step.pages, kInt32, {kBatch, kPagesPerSequence});
  args.seqused_k = tensor(step.lengths, kInt32, {kBatch});
  args.scheduler_metadata = tensor(step.metadata, kInt32, {ha::schedule_size(kBatch)});
  if (step.workspace_bytes > 0) { args.workspace = tensor(step.workspace, kUInt8, {step.workspace_bytes}); }
  args.causal = true;
  args.num_splits = 0;  // the plan chooses
  return args;
}

// The same facts without q, k and v: known before the first layer runs.
ha::ScheduleArguments schedule_arguments(Step const& step) {
  ha::Arguments const args = arguments(step);
  ha::ScheduleArguments schedule;
  schedule.shape = {.dtype = ha::DataType::kBFloat16,
                    .batch = kBatch,
                    .seqlen_q = 1,
                    .seqlen_k = kPagesPerSequence * kPageSize,
                    .heads_q = kHeadsQ,
                    .heads_k = kHeadsK,
                    .head_dim = kHeadDim,
                    .head_dim_v = kHeadDim,
                    .page_size = kPageSize};
  schedule.options.seqused_k = args.seqused_k;
  schedule.options.causal = args.causal;
  schedule.metadata = args.scheduler_metadata;
  return schedule;
}

// Depends on shapes only, so it is asked once, before any memory is there.
ha::Plan plan(ha::DeviceInfo const& device) {
  Step const nothing{address(1), address(2), address(3), address(4), address(5),
                     address(6), address(7), address(8), nullptr,    0};
  ha::validate(schedule_arguments(nothing));
  return ha::plan(ha::validate(arguments(nothing)), device);
}

#if defined(WITH_CUDA_RUNTIME)
// A cache whose pages are dealt out in no order. Each page holds one value of its own, so that the mean that comes out
// tells which keys were read; what belongs to no sequence holds NaN.
class Cache {
 public:
  Cache() : table(kBatch * kPagesPerSequence, kUnusedSlot), values(kPages * kPageSize * kHeadsK * kHeadDim, kNan) {}

  static float value(std::int32_t page) { return static_cast<float>(page % 128); }

  // Makes room for token `position` of sequence `b` and writes its value.
  void append(std::int64_t b, std::int64_t position) {
    std::int32_t& page = table[b * kPagesPerSequence + position / kPageSize];
    if (page == kUnusedSlot) { page = static_cast<std::int32_t>(next_++ * 77 % kPages); }
    auto const token = values.begin() + (page * kPageSize + position % kPageSize) * kHeadsK * kHeadDim;
    std::fill(token, token + kHeadsK * kHeadDim, to_bfloat16(value(page)));
  }

  double mean(std::int64_t b, std::int64_t length) const {
    double sum = 0;
    for (std::int64_t i = 0; i < length; ++i) { sum += value(table[b * kPagesPerSequence + i / kPageSize]); }
    return length == 0 ? 0 : sum / static_cast<double>(length);
  }

  std::vector<std::int32_t> table;
  std::vector<std::uint16_t> values;

 private:
  static constexpr std::uint16_t kNan = 0x7fc0;
  std::int64_t next_ = 1;  // times 77, which has no factor in common with 200: every page once
};

double worse(double a, double b) { return std::isnan(b) ? HUGE_VAL : std::max(a, b); }

// The largest errors of out and LSE after one layer. Queries of zeros weigh all keys alike: out is the mean of the
// values, LSE the logarithm of their number; a sequence without keys gives 0 and -inf.
std::pair<double, double> errors(Cache const& cache, std::vector<std::int32_t> const& lengths,
                                 std::vector<std::uint16_t> const& out, std::vector<float> const& lse) {
  double out_error = 0, lse_error = 0;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    double const mean = cache.mean(b, lengths[b]);
    for (std::int64_t i = b * kHeadsQ * kHeadDim; i < (b + 1) * kHeadsQ * kHeadDim; ++i) {
      double const error = std::fabs(from_bfloat16(out[i]) - mean) / std::max(1.0, mean);
      out_error = worse(out_error, error);
    }
    for (std::int64_t head = b * kHeadsQ; head < (b + 1) * kHeadsQ; ++head) {
      double const expected = std::log(static_cast<double>(lengths[b]));
      double const error = lse[head] == expected ? 0 : std::fabs(lse[head] - expected);
      lse_error = worse(lse_error, error);
    }
  }
  return {out_error, lse_error};
}

bool run_on_gpu() {
  ha::Plan const decided = plan(ha::device_info(0));
  Cache cache;
  std::vector<std::int32_t> lengths = kLengths;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t i = 0; i < lengths[b]; ++i) { cache.append(b, i); }
  }
  DeviceArray<std::uint16_t> const q(std::vector<std::uint16_t>(kBatch * kHeadsQ * kHeadDim, 0));
  DeviceArray<std::uint16_t> const k(std::vector<std::uint16_t>(cache.values.size(), to_bfloat16(1)));
  DeviceArray<std::uint16_t> v(cache.values);
  DeviceArray<std::uint16_t> const out(std::vector<std::uint16_t>(kBatch * kHeadsQ * kHeadDim));
  DeviceArray<float> const lse(std::vector<float>(kBatch * kHeadsQ));
  DeviceArray<std::int32_t> device_lengths(lengths);
  DeviceArray<std::int32_t> pages(cache.table);
  DeviceArray<std::int32_t> const metadata(std::vector<std::int32_t>(ha::schedule_size(kBatch)));
  DeviceArray<std::uint8_t> const workspace(
      std::vector<std::uint8_t>(std::max<std::int64_t>(1, decided.workspace_bytes)));
  Step const step{q.data(),         k.data(),
                  v.data(),         out.data(),
                  lse.data(),       device_lengths.data(),
                  pages.data(),     metadata.data(),
                  workspace.data(), decided.workspace_bytes};

  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  double out_error = 0, lse_error = 0;
  for (int i = 0; i < kSteps; ++i) {
    ha::make_schedule(schedule_arguments(step), stream);
    for (int layer = 0; layer < kLayers; ++layer) { ha::forward(arguments(step), stream); }
    check(cudaStreamSynchronize(stream));
    auto const [out_now, lse_now] = errors(cache, lengths, out.on_host(), lse.on_host());
    out_error = worse(out_error, out_now);
    lse_error = worse(lse_error, lse_now);

    for (std::int64_t b = 0; b < kBatch; ++b) { cache.append(b, lengths[b]++); }
    v.write(cache.values);
    pages.write(cache.table);
    device_lengths.write(lengths);
  }
  check(cudaStreamDestroy(stream));
  std::cout << kSteps << " steps on the GPU: error of out " << out_error << ", of the log-sum-exp " << lse_error
            << '\n';
  return out_error < 1.0 / 256 && lse_error < 2e-4;
}
#else
bool run_on_gpu() { return false; }
#endif

}  // namespace

int main() {
  std::cout << plan(ha::device_info("H100")).explain() << '\n';
  if (std::string const reason = why_not(); !reason.empty()) {
    std::cout << "nothing was run on a GPU: " << reason << '\n';
    return 0;
  }
  return run_on_gpu() ? 0 : 1;
}
