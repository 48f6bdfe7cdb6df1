// Kernels that run before and after the attention kernels, for cudaLaunchKernelExC.
#pragma once

namespace hopper_attention {

void const* schedule_function(int ctas);             // of a ScheduleGrid; takes ScheduleKernelParams
void const* split_combine_function(int head_dim_v);  // takes SplitCombineParams

}  // namespace hopper_attention
