// Kernels that run before and after the attention kernels, for cudaLaunchKernelExC.
#pragma once

#include "hopper_attention/types.h"

namespace hopper_attention {

void const* schedule_function(int ctas);  // of a ScheduleGrid; takes ScheduleKernelParams
// kDecode: only tiles of few queries are in parts. Takes SplitCombineParams.
void const* split_combine_function(KernelFamily family, int head_dim_v);

}  // namespace hopper_attention
