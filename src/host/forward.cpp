// validate -> plan, kept for the next call -> launch.
#include "hopper_attention/forward.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "hopper_attention/append.h"
#include "hopper_attention/testing.h"
#include "host/launches.h"
#include "host/plan_cache.h"
#include "host/same_call.h"
#include "host/text.h"
#include "host/workspace.h"
#include "kernels/schedule_layout.h"

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

// What was found out about a call that passed validate(). Of one thread.
struct CheckedProblem {
  Problem problem;
  std::shared_ptr<Plan const> plan;
  std::shared_ptr<Launches const> launches;  // null before the first
};

struct KnownCall {
  Arguments args;
  CallBytes bytes{};  // of args
  std::shared_ptr<CheckedProblem> checked;
  int generation = -1;  // of the backend

  bool is(Arguments const& other) const {
    return generation == hopper_attention::generation.load(std::memory_order_relaxed) && is_same_call(args, other);
  }
};

// Set at the end of a thread: what its destructors call after that knows no calls.
constinit thread_local bool forgets_calls = false;

// The known call of this thread that `args` may be; null at the end of the thread. Layers of a model differ in their
// masks, calls of a layer in their queries; others replace each other.
KnownCall* known_call(Arguments const& args) {
  constexpr std::size_t kPlaces = 8;
  struct Calls : std::array<KnownCall, kPlaces> {
    ~Calls() { forgets_calls = true; }
  };
  if (forgets_calls) { return nullptr; }
  thread_local Calls calls;
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;
  std::uint64_t hash = 0;
  for (std::int64_t const value : {args.q.shape[0], args.q.shape[1], args.window_left, args.attention_chunk}) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * kGolden;
    hash ^= hash >> 32;
  }
  return &calls[hash % kPlaces];
}

// A call that passed validate(), and its plan: kept while the call runs, since allocating the workspace may make
// another call.
class CheckedCall {
 public:
  explicit CheckedCall(Arguments const& args) {
    KnownCall* const known = forced_plan ? nullptr : known_call(args);
    if (known == nullptr) {
      Problem const problem = validate(args);
      checked_ = std::make_shared<CheckedProblem>(
          problem, std::make_shared<Plan const>(make_plan(problem, args.q.device)), nullptr);
      return;
    }
    if (known->is(args)) {
      check_overlaps(args, known->bytes);
    } else {
      int const now = generation.load(std::memory_order_relaxed);
      Problem const problem = validate(args);
      int const device = args.q.device;
      auto const plan = plan_cache().get({problem, device}, [&] { return make_plan(problem, device); });
      *known = {args, spanned_bytes(args), std::make_shared<CheckedProblem>(problem, plan, nullptr), now};
    }
    checked_ = known->checked;
  }

  Plan const& plan() const { return *checked_->plan; }

  // Raises what the launch would raise before its first kernel. To be called before anything else is. allocates: a
  // workspace that is not given.
  void require_launchable(Arguments const& args, bool allocates) const {
    if (args.workspace.given() || (plan().workspace_bytes > 0 && !allocates)) {
      require_workspace(plan(), args.workspace);
    }
    if (backend.launch == &launch) { launches(); }  // a stand-in needs no kernel
  }

  void launch_with(Arguments const& args, Stream stream) const {
    if (backend.launch == &launch) {
      start(launches(), plan(), checked_->problem, args, stream);
    } else {
      backend.launch(plan(), checked_->problem, args, stream);
    }
  }

 private:
  Launches const& launches() const {
    if (checked_->launches == nullptr) { checked_->launches = prepare_launches(plan(), checked_->problem); }
    return *checked_->launches;
  }

  std::shared_ptr<CheckedProblem> checked_;
};

using Allocate = std::function<Tensor(std::int64_t)>;

void run(CheckedCall const& call, Arguments const& args, Stream stream, Allocate const& allocate) {
  Plan const& plan = call.plan();
  if (plan.workspace_bytes == 0 || args.workspace.given() || !allocate) {
    call.launch_with(args, stream);
  } else {
    Arguments with_workspace = args;
    with_workspace.workspace = allocate(plan.workspace_bytes);
    call.launch_with(with_workspace, stream);
  }
}

// An append that passed validate(). Trivially destructible: a thread may still append while its thread-local objects
// are destroyed.
struct KnownAppend {
  AppendArguments args;
  AppendBytes bytes{};                 // of args
  std::optional<AppendLaunch> launch;  // none before the first
};

static_assert(std::is_trivially_destructible_v<KnownAppend>);

// As validate(), which sees a call of this thread that is like the last one no second time. Valid until the next call.
KnownAppend& check(AppendArguments const& args) {
  thread_local std::optional<KnownAppend> last;
  if (last && is_same_call(last->args, args)) {
    check_overlaps(args, last->bytes);
  } else {
    validate(args);
    last = {args, spanned_bytes(args), std::nullopt};
  }
  return *last;
}

void run(KnownAppend& known, AppendArguments const& args, Stream stream) {
  if (backend.append != &launch_append) {
    backend.append(args, stream);
    return;
  }
  if (!known.launch) { known.launch = prepare_append(args); }
  start(*known.launch, args, stream);
}

}  // namespace

std::int64_t workspace_bytes(Arguments const& args) { return CheckedCall(args).plan().workspace_bytes; }

void check_call(Arguments const& args) { CheckedCall(args).require_launchable(args, true); }

void forward(Arguments const& args, Stream stream) { forward(args, stream, nullptr); }

void forward(Arguments const& args, Stream stream, Allocate const& allocate) {
  run(CheckedCall(args), args, stream, allocate);
}

void append(AppendArguments const& args, Stream stream) { run(check(args), args, stream); }

void append_and_forward(AppendArguments const& args, Arguments const& attention, Stream stream,
                        Allocate const& allocate) {
  KnownAppend& known = check(args);
  CheckedCall const call(attention);
  call.require_launchable(attention, static_cast<bool>(allocate));
  run(known, args, stream);
  if (args.q_rotated.given()) {
    Arguments of_rotated = attention;
    of_rotated.q = args.q_rotated;
    run(call, of_rotated, stream, allocate);
  } else {
    run(call, attention, stream, allocate);
  }
}

std::int64_t schedule_size(std::int64_t batch) { return schedule_words(schedule_stride(batch)); }

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
