// For tests: choices that the plan would not make, and stand-ins for the GPU. Not for production code.
#pragma once

#include <optional>

#include "hopper_attention/append.h"
#include "hopper_attention/forward.h"

namespace hopper_attention::testing {

// What forward() plans on this thread instead of its own choice. Fields of `tile` that are 0 leave the choice open:
// {.rows = 128}.
struct ForcedPlan {
  TileConfig tile;
  int packed_heads = 0;    // 1 (off) or heads_q / heads_k; 0 leaves the choice open
  int heads_per_pass = 0;  // 0 leaves the choice open
  int ctas = 0;            // 0 leaves the choice open
  int num_splits = 0;      // at least 2: tiles are cut, each into at most so many parts; 0 leaves the choice open
  int cluster = 0;  // thread blocks that share a tile of few queries, a power of 2 up to 16; -1: none do; of those that
                    // share tiles of many queries, 2, 3, 4 or 8; 0 leaves the choice open
  bool one_tile = false;  // no sequence has several tiles of 32 rows instead of a larger one
};

// Applies to calls of forward() on the calling thread until called again; nullopt ends it. Returns what was in force
// before. A value that the problem does not allow raises InvalidArgument in forward().
HOPPER_ATTENTION_EXPORT std::optional<ForcedPlan> force_plan(std::optional<ForcedPlan> forced);

// plan() with forced choices.
HOPPER_ATTENTION_EXPORT Plan plan_with(Problem const& problem, DeviceInfo const& device, ForcedPlan const& forced);

// What forward() and append() call to start a kernel and to learn about a device; for all threads.
struct Backend {
  void (*launch)(Plan const&, Problem const&, Arguments const&, Stream) = nullptr;
  DeviceInfo const& (*device_info)(int ordinal) = nullptr;  // raises if the device cannot run the kernels
  void (*append)(AppendArguments const&, Stream) = nullptr;
};

// Replaces the backend, the real one where a pointer is null, and forgets all plans. Not while forward() runs.
HOPPER_ATTENTION_EXPORT void set_backend(Backend backend);

// Plans kept by forward(), and their bound.
HOPPER_ATTENTION_EXPORT int cached_plans();
inline constexpr int kMaxCachedPlans = 1024;

}  // namespace hopper_attention::testing
