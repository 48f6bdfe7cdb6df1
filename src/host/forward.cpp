// validate -> plan, kept for the next call -> launch.
#include "hopper_attention/forward.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "hopper_attention/testing.h"
#include "host/kernel_table.h"
#include "host/plan_cache.h"
#include "host/text.h"
#include "host/workspace.h"

namespace hopper_attention {
namespace {

DeviceInfo const& supported_device(int ordinal) {
  require_supported_device(ordinal);
  return device_info(ordinal);
}

testing::Backend backend{&launch, &supported_device};

// Counts set_backend(): a thread's last plan is of an earlier backend if its count differs.
std::atomic<int> generation = 0;

thread_local std::optional<testing::ForcedPlan> forced_plan;

// Leaked on purpose: a thread may still call forward() while static objects are destroyed at exit.
PlanCache& plan_cache() {
  static auto* const cache = new PlanCache(testing::kMaxCachedPlans);
  return *cache;
}

void log(Plan const& plan) {
  char const* const wanted = std::getenv("HOPPER_ATTENTION_LOG");
  if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, "0") == 0) { return; }
  std::string line = "hopper_attention:";
  for (std::string const& reason : plan.reasons) {
    line += concat(&reason == &plan.reasons.front() ? " " : "; ", reason);
  }
  std::cerr << line + "\n";  // one write, so that lines of threads do not mix
}

Plan make_plan(Problem const& problem, int device) {
  DeviceInfo const& info = backend.device_info(device);
  Plan made = forced_plan ? testing::plan_with(problem, info, *forced_plan) : plan(problem, info);
  log(made);
  return made;
}

// The plan of this thread's last call is at hand without a lock.
std::shared_ptr<Plan const> const& cached_plan(Problem const& problem, int device) {
  struct Last {
    PlanKey key;
    std::shared_ptr<Plan const> plan;
    int generation = -1;
  };
  thread_local Last last;
  PlanKey const key{problem, device};
  int const now = generation.load(std::memory_order_relaxed);
  if (last.generation != now || !(last.key == key)) {
    last.plan = plan_cache().get(key, [&] { return make_plan(problem, device); });
    last.key = key;
    last.generation = now;
  }
  return last.plan;
}

}  // namespace

void check_call(Arguments const& args) {
  Problem const problem = validate(args);
  Plan const plan = forced_plan ? make_plan(problem, args.q.device) : *cached_plan(problem, args.q.device);
  if (args.workspace.given()) { require_workspace(plan, args.workspace); }
  if (backend.launch != &launch) { return; }  // a stand-in needs no kernel
  for (KernelPlan const& kernel : plan.kernels) { find_kernel(kernel.family, plan.dtype, kernel.tile); }
}

void forward(Arguments const& args, Stream stream) { forward(args, stream, nullptr); }

void forward(Arguments args, Stream stream, std::function<Tensor(std::int64_t)> const& allocate) {
  Problem const problem = validate(args);
  auto const run = [&](Plan const& plan) {
    if (plan.workspace_bytes > 0 && !args.workspace.given() && allocate) {
      args.workspace = allocate(plan.workspace_bytes);
    }
    backend.launch(plan, problem, args, stream);
  };
  if (forced_plan) {
    run(make_plan(problem, args.q.device));
  } else {
    std::shared_ptr<Plan const> const plan =
        cached_plan(problem, args.q.device);  // kept: allocate() may call forward()
    run(*plan);
  }
}

std::int64_t schedule_size(std::int64_t batch) { return 1 + 4 * ((batch + 3) / 4 * 4); }

char const* version() { return HOPPER_ATTENTION_VERSION; }

namespace testing {

std::optional<ForcedPlan> force_plan(std::optional<ForcedPlan> forced) { return std::exchange(forced_plan, forced); }

void set_backend(Backend wanted) {
  backend = {wanted.launch != nullptr ? wanted.launch : &launch,
             wanted.device_info != nullptr ? wanted.device_info : &supported_device};
  plan_cache().clear();
  generation.fetch_add(1);
}

int cached_plans() { return static_cast<int>(plan_cache().size()); }

}  // namespace testing
}  // namespace hopper_attention
