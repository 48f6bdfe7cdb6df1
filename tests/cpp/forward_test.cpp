// forward() with a stand-in for the GPU: what is planned once, what reaches the launch.
#include "hopper_attention/forward.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "hopper_attention/testing.h"
#include "host/kernel_table.h"
#include "host/plan_cache.h"
#include "tensors.h"

namespace hopper_attention {
namespace {

std::atomic<int> launches = 0;
std::atomic<int> questions = 0;  // to the device: one for each new plan

struct Launched {
  Plan plan;
  Problem problem;
  void const* q = nullptr;
  Stream stream = nullptr;
};
thread_local Launched last;

void record(Plan const& plan, Problem const& problem, Arguments const& args, Stream stream) {
  last = {plan, problem, args.q.data, stream};
  ++launches;
}

DeviceInfo const& two_cards(int ordinal) {
  static std::vector<DeviceInfo> const cards{device_info("H100"), device_info("H100 PCIe")};
  ++questions;
  return cards.at(ordinal);
}

// The real backend again at the end of a test.
class StandIn {
 public:
  StandIn() {
    testing::set_backend({.launch = &record, .device_info = &two_cards});
    launches = 0;
    questions = 0;
  }
  ~StandIn() {
    testing::force_plan(std::nullopt);
    testing::set_backend({});
  }
};

// What is written to stderr in its lifetime.
class CapturedLog {
 public:
  CapturedLog() : before_(std::cerr.rdbuf(text_.rdbuf())) {}
  ~CapturedLog() { std::cerr.rdbuf(before_); }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::streambuf* before_;
};

}  // namespace

TEST_CASE("forward: validates, plans and launches with what the caller gave") {
  StandIn const stand_in;
  Arguments args = valid_call();
  args.causal = true;
  auto const stream = reinterpret_cast<Stream>(std::uintptr_t{64});
  forward(args, stream);
  CHECK(launches == 1);
  CHECK(last.problem == validate(args));
  CHECK(last.plan.explain() == plan(validate(args), device_info("H100")).explain());
  CHECK(last.q == args.q.data);
  CHECK(last.stream == stream);
}

TEST_CASE("forward: a wrong argument reaches neither the device nor the launch, and the next call is right") {
  StandIn const stand_in;
  Arguments args = valid_call();
  args.num_splits = 1000;
  CHECK_THROWS_AS(forward(args, nullptr), InvalidArgument);
  CHECK(questions == 0);
  CHECK(launches == 0);
  args.num_splits = 1;
  forward(args, nullptr);
  CHECK(launches == 1);
}

TEST_CASE("forward: one plan for each problem and device, whatever the memory") {
  StandIn const stand_in;
  Arguments args = valid_call();
  for (int i = 0; i < 3; ++i) {
    forward(args, nullptr);
    args.q.data = static_cast<char*>(args.q.data) + 64;
  }
  CHECK(launches == 3);
  CHECK(questions == 1);
  CHECK(testing::cached_plans() == 1);

  Arguments other = valid_call();
  for (Tensor* tensor : {&other.q, &other.k, &other.v, &other.out, &other.softmax_lse, &other.sinks}) {
    tensor->device = 1;
  }
  forward(other, nullptr);
  CHECK(questions == 2);
  CHECK(last.plan.reasons.at(1).find("H100 PCIe") != std::string::npos);
  forward(args, nullptr);
  forward(other, nullptr);
  CHECK(questions == 2);
  CHECK(last.plan.reasons.at(1).find("H100 PCIe") != std::string::npos);
}

TEST_CASE("forward: the number of kept plans is bounded") {
  StandIn const stand_in;
  for (int seqlen = 1; seqlen <= testing::kMaxCachedPlans + 100; ++seqlen) {
    forward(valid_call({.batch = 1, .seqlen_k = seqlen}), nullptr);
  }
  CHECK(questions == testing::kMaxCachedPlans + 100);
  CHECK(testing::cached_plans() <= testing::kMaxCachedPlans);
  CHECK(testing::cached_plans() >= 1);
}

TEST_CASE("forward: eight threads get the plans of their own problems") {
  StandIn const stand_in;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([thread, &wrong] {
      for (int i = 0; i < 500; ++i) {
        Arguments const args = valid_call({.seqlen_k = 1 + (thread + i) % 16});
        forward(args, nullptr);
        wrong += last.problem.seqlen_k != args.k.shape[1];
        wrong += last.plan.reasons.at(0).find(" on " + std::to_string(args.k.shape[1]) + " keys") == std::string::npos;
      }
    });
  }
  for (std::thread& thread : threads) { thread.join(); }
  CHECK(wrong == 0);
  CHECK(launches == 8 * 500);
  CHECK(testing::cached_plans() == 16);
}

TEST_CASE("forward: a forced plan holds on its thread until it is taken back, and is not kept") {
  StandIn const stand_in;
  Arguments const args = valid_call();
  forward(args, nullptr);
  Plan const own = last.plan;
  CHECK_FALSE(testing::force_plan(testing::ForcedPlan{.tile = {.head_dim = 128}, .ctas = 3}));
  forward(args, nullptr);
  CHECK(last.plan.tile.head_dim == 128);
  CHECK(last.plan.ctas == 3);
  std::thread([&args, &own] {
    forward(args, nullptr);
    CHECK(last.plan.tile == own.tile);
  }).join();
  CHECK(testing::force_plan(std::nullopt)->ctas == 3);
  forward(args, nullptr);
  CHECK(last.plan.tile == own.tile);
  CHECK(last.plan.ctas == own.ctas);
}

TEST_CASE("forward: silent by default; HOPPER_ATTENTION_LOG=1 writes one line for each new plan") {
  StandIn const stand_in;
  CapturedLog const log;
  unsetenv("HOPPER_ATTENTION_LOG");
  forward(valid_call({.seqlen_k = 100}), nullptr);
  CHECK(log.text() == "");
  setenv("HOPPER_ATTENTION_LOG", "1", 1);
  for (int i = 0; i < 3; ++i) { forward(valid_call({.seqlen_k = 200}), nullptr); }
  unsetenv("HOPPER_ATTENTION_LOG");
  std::string const text = log.text();
  CHECK(text.find("hopper_attention: problem: bf16") == 0);
  CHECK(text.find("on 200 keys") != std::string::npos);
  CHECK(text.find('\n') == text.size() - 1);
}

TEST_CASE("plan cache: problems that differ in one field have plans of their own") {
  Problem const base = validate(valid_call());
  std::vector<Problem> problems(29, base);
  problems[1].dtype = DataType::kFloat16;
  problems[2].batch = 99;
  problems[3].seqlen_q = 99;
  problems[4].seqlen_k = 99;
  problems[5].heads_q = 98;
  problems[6].heads_k = 1;
  problems[7].head_dim = 128;
  problems[8].head_dim_v = 32;
  problems[9].mask.left = 2;
  problems[10].mask.right = 2;
  problems[11].mask.chunk = 2;
  problems[12].softmax_scale = 2.0F;
  problems[13].softcap = 2.0F;
  problems[14].has_sinks = !base.has_sinks;
  problems[15].num_splits = 2;
  problems[16].sm_margin = 2;
  problems[17].batch_invariant = true;
  problems[18].total_q = 99;
  problems[19].ragged = true;
  problems[20].packed_q = true;
  problems[21].keys = KeyLayout::kPaged;
  problems[22].page_size = 16;
  problems[23].has_metadata = true;
  problems[24].mask.cp_world = 2;
  problems[25].mask.cp_rank = 1;
  problems[26].seqused_q = true;
  problems[27].total_k = 99;
  problems[28].keys_known = true;
  for (Problem const& problem : problems) {
    bool const is_base = &problem == problems.data();
    CHECK((PlanKeyHash{}({problem, 0}) == PlanKeyHash{}({base, 0})) == is_base);
  }
  PlanCache cache(100);
  int made = 0;
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < problems.size(); ++i) {
      auto const found = cache.get({problems[i], 0}, [&] {
        ++made;
        return Plan{.ctas = static_cast<int>(i)};
      });
      CHECK(found->ctas == static_cast<int>(i));
    }
  }
  CHECK(made == 29);
}

TEST_CASE("check_call: raises what forward() raises, and starts nothing") {
  StandIn const stand_in;
  auto const error_of = [](auto const& call) -> std::string {
    try {
      call();
    } catch (InvalidArgument const& error) { return error.what(); }
    return "";
  };
  Arguments args = paged_call();
  args.batch_invariant = true;  // a schedule has to be made
  args.q = contiguous(1 * kMiB, DataType::kBFloat16, {500, 4, 64});
  args.out = contiguous(4 * kMiB, DataType::kBFloat16, {500, 4, 64});
  args.softmax_lse = {};
  args.num_splits = 0;
  CHECK_NOTHROW(check_call(args));  // a workspace that is not given may be allocated
  std::int64_t const needed = plan(validate(args), two_cards(0)).workspace_bytes;
  REQUIRE(needed > 1);
  struct Wrong {
    char const* what;
    void (*change)(Arguments&, std::int64_t needed);
  };
  for (Wrong const &wrong : {Wrong{"num_splits: ", [](Arguments& a, std::int64_t) { a.num_splits = 1000; }},
                             Wrong{"seqused_k: ", [](Arguments& a, std::int64_t) { a.seqused_k = {}; }},
                             Wrong{"workspace: this call needs ", [](Arguments& a, std::int64_t bytes) {
                                     a.workspace = contiguous(16 * kMiB, DataType::kUInt8, {bytes - 1});
                                   }}}) {
    CAPTURE(wrong.what);
    Arguments changed = args;
    wrong.change(changed, needed);
    std::string const message = error_of([&] { check_call(changed); });
    CHECK(message.starts_with(wrong.what));
    // The stand-in looks at no workspace.
    if (!changed.workspace.given()) {
      CHECK(message == error_of([&] { forward(changed, nullptr); }));
    }
  }
  args.workspace = contiguous(16 * kMiB, DataType::kUInt8, {needed});
  CHECK_NOTHROW(check_call(args));
  CHECK(launches == 0);
}

TEST_CASE("check_call: shares the plan with the call that follows, and heeds a forced one") {
  StandIn const stand_in;
  Arguments const args = valid_call();
  check_call(args);
  forward(args, nullptr);
  CHECK(questions == 1);
  testing::force_plan(testing::ForcedPlan{.tile = {.rows = 1}});
  CHECK_THROWS_AS(check_call(args), InvalidArgument);
}

TEST_CASE("check_call: a kernel that was not built is missed before anything is written") {
  StandIn const stand_in;
  testing::set_backend({.device_info = &two_cards});  // the real launch
  if (built_kernels().empty()) {
    CHECK_THROWS_AS(check_call(valid_call()), NotImplemented);
  } else {
    KernelInfo const kernel = built_kernels().front();
    CHECK_NOTHROW(check_call(
        valid_call({.head_dim = kernel.tile.head_dim, .head_dim_v = kernel.tile.head_dim_v, .dtype = kernel.dtype})));
  }
}

TEST_CASE("find_kernel: a kernel that was not built names the variables of the build and what there is") {
  std::string message;
  try {
    find_kernel(KernelFamily::kPrefill, DataType::kBFloat16,
                {.rows = 64, .keys = 64, .head_dim = 248, .head_dim_v = 248, .stages = 2});
  } catch (NotImplemented const& error) { message = error.what(); }
  for (char const* part : {"HOPPER_ATTENTION_HEAD_DIMS", "HOPPER_ATTENTION_DTYPES", "bf16", "248", "this build has"}) {
    CAPTURE(part);
    CAPTURE(message);
    CHECK(message.find(part) != std::string::npos);
  }
}

TEST_CASE("built_kernels: lists the kernel table, each kernel once") {
  std::size_t entries = 0;
  for (auto const& unit : kernel_table()) { entries += unit.size(); }
  CHECK(built_kernels().size() == entries);
  for (KernelInfo const& a : built_kernels()) {
    CHECK(find_kernel(a.family, a.dtype, a.tile).tile == a.tile);
    int same = 0;
    for (KernelInfo const& b : built_kernels()) {
      same += a.family == b.family && a.dtype == b.dtype && a.tile == b.tile;
    }
    CHECK(same == 1);
  }
}

TEST_CASE("version: is a version") {
  std::string const text = version();
  CHECK(text.find_first_not_of("0123456789.") == std::string::npos);
  CHECK(text == HOPPER_ATTENTION_VERSION);
}

}  // namespace hopper_attention
