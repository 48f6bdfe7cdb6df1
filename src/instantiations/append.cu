// The append kernel for each element type.
#include "kernels/append_kernel.h"

namespace hopper_attention {

void const* append_kernel(DataType dtype) {
  return dtype == DataType::kBFloat16 ? reinterpret_cast<void const*>(&append_detail::append_tokens<__nv_bfloat16>)
                                      : reinterpret_cast<void const*>(&append_detail::append_tokens<__half>);
}

}  // namespace hopper_attention
