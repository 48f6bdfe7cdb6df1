// A call checked and planned for a card by name, on a machine without GPU, driver or CUDA headers.
#include <cmath>
#include <iostream>

#include "hopper_attention/forward.h"

namespace ha = hopper_attention;

namespace {

// A contiguous (batch, rows, heads, head_dim) bf16 tensor on device 0; `data` is never read here.
ha::Tensor tensor(void* data, std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  ha::Tensor t{.data = data, .dtype = ha::DataType::kBFloat16, .device = 0, .rank = 4};
  t.shape = {batch, rows, heads, head_dim};
  t.stride = {rows * heads * head_dim, heads * head_dim, head_dim, 1};
  return t;
}

// An address that looks like device memory, `gigabytes` apart so that no two tensors overlap.
void* address(std::uintptr_t gigabytes) { return reinterpret_cast<void*>(gigabytes << 30); }

bool refuses_wrong_heads(ha::Arguments args) {
  args.k.shape[2] = args.v.shape[2] = 3;
  try {
    ha::validate(args);
  } catch (ha::InvalidArgument const& error) {
    std::cout << "refused: " << error.what() << '\n';
    return true;
  }
  return false;
}

}  // namespace

int main() {
  ha::Arguments args;
  args.q = tensor(address(1), 2, 1000, 16, 128);
  args.k = tensor(address(2), 2, 3000, 4, 128);
  args.v = tensor(address(3), 2, 3000, 4, 128);
  args.out = tensor(address(4), 2, 1000, 16, 128);
  args.causal = true;

  ha::Problem const problem = ha::validate(args);
  ha::Plan const plan = ha::plan(problem, ha::device_info("H100"));
  std::cout << "hopper-attention " << ha::version() << '\n' << plan.explain() << '\n';

  bool const right = problem.heads_k == 4 && problem.mask.right == 0 &&
                     std::abs(problem.softmax_scale - 1.0F / std::sqrt(128.0F)) < 1e-7F && plan.tile.head_dim == 128 &&
                     plan.ctas > 0 && refuses_wrong_heads(args);
  std::cout << (right ? "consumer: all right\n" : "consumer: FAILED\n");
  return right ? 0 : 1;
}
