// The kernels that do not depend on the dtype and head dim of a call: scheduler metadata, and the combine kernel.
#include "kernels/schedule_kernel.h"
#include "kernels/split_combine.h"
#include "kernels/support_kernels.h"

namespace hopper_attention {

void const* schedule_function(int ctas) {
  return ctas == 1 ? reinterpret_cast<void const*>(&schedule_kernel)
                   : reinterpret_cast<void const*>(&schedule_cluster_kernel);
}

namespace {

template <KernelFamily kFamily>
void const* function_of_family(int head_dim_v) {
  void const* found = nullptr;
  auto const consider = [&]<int kHeadDim>() {
    if (kHeadDim >= head_dim_v && found == nullptr) {
      found = reinterpret_cast<void const*>(&split_combine_kernel<kFamily, combine_shape(kFamily, kHeadDim)>);
    }
  };
  consider.template operator()<64>();
  consider.template operator()<128>();
  consider.template operator()<256>();
  return found;
}

}  // namespace

void const* split_combine_function(KernelFamily family, int head_dim_v) {
  return family == KernelFamily::kDecode ? function_of_family<KernelFamily::kDecode>(head_dim_v)
                                         : function_of_family<KernelFamily::kPrefill>(head_dim_v);
}

}  // namespace hopper_attention
