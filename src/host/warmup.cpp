// Loads kernels before their first call.
#include <array>
#include <vector>

#include "hopper_attention/forward.h"
#include "host/cuda_launch.h"
#include "host/kernel_table.h"
#include "kernels/append_params.h"
#include "kernels/combine_params.h"
#include "kernels/schedule_params.h"
#include "kernels/support_kernels.h"

namespace hopper_attention {
namespace {

// All beside those of the table.
std::vector<void const*> other_kernels() {
  constexpr int kColumns[] = {64, 128, 256};  // more of v need another split_combine_kernel
  constexpr std::array kHalves{DataType::kBFloat16, DataType::kFloat16};
  constexpr std::array kOutputs{DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32};
  std::vector<void const*> kernels{schedule_function(1), schedule_function(kScheduleCluster)};
  for (int const columns : kColumns) {
    for (KernelFamily const family : {KernelFamily::kPrefill, KernelFamily::kDecode}) {
      kernels.push_back(split_combine_function(family, columns));
    }
  }
  for (DataType const type : kHalves) {
    kernels.push_back(append_kernel(type));
    kernels.push_back(merge_kernel(type, type, 2));
  }
  for (DataType const type : kOutputs) {
    kernels.push_back(combine_kernel(type));
    for (int const parts : {2, kMaxMergedParts}) { kernels.push_back(merge_kernel(DataType::kFloat32, type, parts)); }
  }
  return kernels;
}

}  // namespace

void warmup(int ordinal) {
  require_supported_device(ordinal);
  DeviceGuard const guard(ordinal);
  for (auto const& unit : kernel_table()) {
    for (KernelEntry const& kernel : unit) { prepare_kernel(kernel.function, kernel.shared_bytes, ordinal); }
  }
  for (void const* const function : other_kernels()) { prepare_kernel(function, 0, ordinal); }
}

}  // namespace hopper_attention
