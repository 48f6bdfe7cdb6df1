// validate -> plan, kept for the next call -> launch.
#include "hopper_attention/forward.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "hopper_attention/append.h"
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

testing::Backend backend{&launch, &supported_device, &launch_append};

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

// The plan of a call, kept while the call runs: allocating the workspace may make another call.
class PlanInUse {
 public:
  PlanInUse(Problem const& problem, int device) {
    if (forced_plan) {
      plan_ = &forced_.emplace(make_plan(problem, device));
    } else {
      cached_ = cached_plan(problem, device);
      plan_ = cached_.get();
    }
  }
  PlanInUse(PlanInUse const&) = delete;
  PlanInUse& operator=(PlanInUse const&) = delete;

  Plan const& operator*() const { return *plan_; }

 private:
  std::shared_ptr<Plan const> cached_;
  std::optional<Plan> forced_;
  Plan const* plan_ = nullptr;
};

// Raises what the launch would raise before its first kernel.
void require_launchable(Plan const& plan, Arguments const& args) {
  if (args.workspace.given()) { require_workspace(plan, args.workspace); }
  if (backend.launch != &launch) { return; }  // a stand-in needs no kernel
  for (KernelPlan const& kernel : plan.kernels) { find_kernel(kernel.family, plan.dtype, kernel.tile); }
}

using Allocate = std::function<Tensor(std::int64_t)>;

void run(Plan const& plan, Problem const& problem, Arguments const& args, Stream stream, Allocate const& allocate) {
  if (plan.workspace_bytes == 0 || args.workspace.given() || !allocate) {
    backend.launch(plan, problem, args, stream);
  } else {
    Arguments with_workspace = args;
    with_workspace.workspace = allocate(plan.workspace_bytes);
    backend.launch(plan, problem, with_workspace, stream);
  }
}

}  // namespace

void check_call(Arguments const& args) {
  Problem const problem = validate(args);
  PlanInUse const plan(problem, args.q.device);
  require_launchable(*plan, args);
}

void forward(Arguments const& args, Stream stream) { forward(args, stream, nullptr); }

void forward(Arguments const& args, Stream stream, Allocate const& allocate) {
  Problem const problem = validate(args);
  PlanInUse const plan(problem, args.q.device);
  run(*plan, problem, args, stream, allocate);
}

void append(AppendArguments const& args, Stream stream) {
  validate(args);
  backend.append(args, stream);
}

void append_and_forward(AppendArguments const& args, Arguments attention, Stream stream, Allocate const& allocate) {
  validate(args);
  Problem const problem = validate(attention);
  PlanInUse const plan(problem, attention.q.device);
  require_launchable(*plan, attention);
  backend.append(args, stream);
  if (args.q_rotated.given()) { attention.q = args.q_rotated; }
  run(*plan, problem, attention, stream, allocate);
}

std::int64_t schedule_size(std::int64_t batch) { return 1 + 4 * ((batch + 3) / 4 * 4); }

char const* version() { return HOPPER_ATTENTION_VERSION; }

namespace testing {

std::optional<ForcedPlan> force_plan(std::optional<ForcedPlan> forced) { return std::exchange(forced_plan, forced); }

void set_backend(Backend wanted) {
  backend = {wanted.launch != nullptr ? wanted.launch : &launch,
             wanted.device_info != nullptr ? wanted.device_info : &supported_device,
             wanted.append != nullptr ? wanted.append : &launch_append};
  plan_cache().clear();
  generation.fetch_add(1);
}

int cached_plans() { return static_cast<int>(plan_cache().size()); }

}  // namespace testing
}  // namespace hopper_attention
