// Takes the place of device.cpp and of what launches kernels in a host-only build: all up to the plan works, the rest
// says why not.
#include "hopper_attention/append.h"
#include "hopper_attention/combine.h"
#include "hopper_attention/forward.h"
#include "host/kernel_table.h"
#include "host/launches.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

constexpr char const* kNoKernels =
    "this is a host-only build without kernels; rebuild without HOPPER_ATTENTION_HOST_ONLY "
    "(-DHOPPER_ATTENTION_HOST_ONLY=OFF)";

// Rows of a checked `out`: (..., head_dim).
bool has_rows(Tensor const& out) {
  std::int64_t rows = 1;
  for (int dim = 0; dim + 1 < out.rank; ++dim) { rows *= out.shape[dim]; }
  return rows > 0;
}

}  // namespace

DeviceInfo const& device_info(int ordinal) { raise<CudaError>("device ", ordinal, " cannot be read: ", kNoKernels); }

void require_supported_device(int ordinal) { raise<CudaError>("device ", ordinal, " cannot be used: ", kNoKernels); }

CudaVersions cuda_versions() { return {}; }

void combine(CombineArguments const& args, Stream /*stream*/) {
  validate(args);
  if (!has_rows(args.out)) { return; }
  raise<NotImplemented>("flash_attn_combine: ", kNoKernels);
}

void merge_states(MergeArguments const& args, Stream /*stream*/) {
  validate(args);
  if (!has_rows(args.out)) { return; }
  raise<NotImplemented>("merge_states: ", kNoKernels);
}

AppendLaunch prepare_append(AppendArguments const& /*args*/) { return {}; }

void start(AppendLaunch const& /*launch*/, AppendArguments const& args, Stream stream) { launch_append(args, stream); }

void launch_append(AppendArguments const& args, Stream /*stream*/) {
  bool const rotates = args.q_rotated.given() && has_rows(args.q_rotated);
  if (!has_rows(args.k_new) && !rotates) { return; }
  raise<NotImplemented>("append: ", kNoKernels);
}

void warmup(int /*ordinal*/) { raise<NotImplemented>("warmup: ", kNoKernels); }

struct Launches {};

std::shared_ptr<Launches const> prepare_launches(Plan const& plan, Problem const& /*problem*/) {
  for (KernelPlan const& kernel : plan.kernels) { find_kernel(kernel.family, plan.dtype, kernel.tile); }
  return std::make_shared<Launches>();
}

void start(Launches const& /*launches*/, Plan const& plan, Problem const& problem, Arguments const& args,
           Stream stream) {
  launch(plan, problem, args, stream);
}

void launch(Plan const& plan, Problem const& /*problem*/, Arguments const& /*args*/, Stream /*stream*/) {
  if (plan.kernel == KernelFamily::kNone) { return; }
  raise<NotImplemented>("launch: ", kNoKernels);
}

void make_schedule(ScheduleArguments const& args, Stream /*stream*/) {
  validate(args);
  raise<NotImplemented>("get_scheduler_metadata: ", kNoKernels);
}

}  // namespace hopper_attention
