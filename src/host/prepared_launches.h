// The launches of a plan, up to four: what prepare_launches() writes down once and start() adds tensors to.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "hopper_attention/forward.h"
#include "host/cuda_launch.h"
#include "host/launches.h"
#include "kernels/params.h"
#include "kernels/schedule_params.h"
#include "kernels/split_combine_params.h"

namespace hopper_attention {

// All but what tensors say. `readers`: see readers_of_few(). Raises NotImplemented if no kernel holds the head dims.
ScheduleKernelParams schedule_kernel_params(Problem const& problem, FewReaders const& readers);

// What the boxes of a kernel's tensor maps are made of.
struct BoxShape {
  TileConfig tile;
  int packed_heads;
  int queries;
};

struct KernelLaunch {
  AttentionParams params;
  void const* function;
  LaunchShape shape;
  BoxShape box;
  std::size_t kernel;  // of the plan
};

struct CombineLaunch {
  SplitCombineParams params;
  std::array<std::size_t, 2> kernels;  // of the plan, whose parts the tasks merge
  int tasks;
  KernelFamily family = KernelFamily::kDecode;  // kPrefill: of both
  LaunchShape shape;
};

struct Launches {
  std::optional<ScheduleKernelParams> schedule;  // where the call makes it
  std::vector<KernelLaunch> kernels;             // in the order of their start
  std::optional<CombineLaunch> combine;
};

}  // namespace hopper_attention
