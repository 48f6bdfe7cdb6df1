// The facts that host and device derive by the same code must be the same facts: masks, block ranges, division and the
// order of tiles, computed by a kernel and by the host. Exits with 77, which ctest takes for skipped, where there is no
// GPU.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/block_range.h"
#include "kernels/fast_divmod.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {
namespace {

constexpr int kSkipped = 77;

struct Case {
  MaskParams mask;
  SeqlenQK len;
  int first_row, last_row, block;
  FastDivmod divisor;
  int dividend;
  SchedulerParams schedule;
  int item;
};

struct Answer {
  KeyInterval first, last;
  BlockRange range;
  int quotient, remainder;
  Tile tile;
};

HA_HOST_DEVICE Answer answer(Case const& c) {
  return {visible(c.mask, c.first_row, c.len),
          visible(c.mask, c.last_row, c.len),
          block_range(c.mask, c.first_row, c.last_row, c.len, c.block),
          c.divisor.quotient(c.dividend),
          c.divisor.remainder(c.dividend),
          tile_at(c.schedule, c.item)};
}

__global__ void answer_all(Case const* cases, Answer* answers, int count) {
  int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) { answers[i] = answer(cases[i]); }
}

Case random_case(std::mt19937& random) {
  auto const up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n + 1)); };
  Case c{};
  c.mask = {up_to(2) == 0 ? kUnlimited : up_to(700), up_to(2) == 0 ? kUnlimited : up_to(700),
            up_to(2) == 0 ? 1 + up_to(400) : 0};
  c.len = {1 + up_to(1000), up_to(1000)};
  c.first_row = up_to(c.len.q - 1);
  c.last_row = c.first_row + up_to(c.len.q - 1 - c.first_row);
  c.block = 16 * (1 + up_to(11));
  c.divisor = FastDivmod(1 + up_to(1 << 20));
  c.dividend = up_to((1 << 30) - 1);
  int const heads = 1 + up_to(40);
  int const batch = 1 + up_to(10);
  c.schedule = make_scheduler_params(batch, heads, 1 + up_to(60), 1 + up_to(batch * heads - 1), up_to(1) == 0, 132);
  c.item = up_to(c.schedule.tiles - 1);
  return c;
}

void check(cudaError_t error, char const* what) {
  if (error == cudaSuccess) { return; }
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

int run() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no GPU");
    return kSkipped;
  }
  constexpr int kCases = 200000;
  std::mt19937 random(1);
  std::vector<Case> cases;
  for (int i = 0; i < kCases; ++i) { cases.push_back(random_case(random)); }
  Case* on_device = nullptr;
  Answer* answers_on_device = nullptr;
  check(cudaMalloc(&on_device, kCases * sizeof(Case)), "cudaMalloc");
  check(cudaMalloc(&answers_on_device, kCases * sizeof(Answer)), "cudaMalloc");
  check(cudaMemcpy(on_device, cases.data(), kCases * sizeof(Case), cudaMemcpyHostToDevice), "cudaMemcpy");
  answer_all<<<(kCases + 255) / 256, 256>>>(on_device, answers_on_device, kCases);
  check(cudaGetLastError(), "launch");
  std::vector<Answer> answers(kCases);
  check(cudaMemcpy(answers.data(), answers_on_device, kCases * sizeof(Answer), cudaMemcpyDeviceToHost), "cudaMemcpy");

  int wrong = 0;
  for (int i = 0; i < kCases; ++i) {
    Answer const expected = answer(cases[i]);
    if (std::memcmp(&expected, &answers[i], sizeof(Answer)) != 0 && ++wrong <= 5) {
      std::fprintf(stderr, "case %d of seed 1: host and device differ\n", i);
    }
  }
  std::printf("%d cases, %d wrong\n", kCases, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace hopper_attention

int main() { return hopper_attention::run(); }
