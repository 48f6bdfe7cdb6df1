// Launches that are prepared once for all calls that differ in memory only.
#pragma once

#include <cstdint>
#include <memory>

#include "hopper_attention/append.h"
#include "hopper_attention/forward.h"
#include "kernels/append_params.h"

namespace hopper_attention {

// What the kernels of a plan are told in every call: all that follows from the plan and the problem, not from tensors.
struct Launches;

// Raises NotImplemented if a kernel was left out of this build.
std::shared_ptr<Launches const> prepare_launches(Plan const& plan, Problem const& problem);

// launch(), with what was prepared for `plan` and `problem`.
void start(Launches const& launches, Plan const& plan, Problem const& problem, Arguments const& args, Stream stream);

// Of an append: all but where its tensors lie.
struct AppendLaunch {
  AppendParams params;
  std::int64_t blocks = 0;  // none: there is nothing to write
};

// For `args` that passed validate(). Raises CudaError if the device cannot run the kernel.
AppendLaunch prepare_append(AppendArguments const& args);

// launch_append(), with what was prepared for a call that is the same (same_call.h).
void start(AppendLaunch const& launch, AppendArguments const& args, Stream stream);

}  // namespace hopper_attention
