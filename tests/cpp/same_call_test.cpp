// Which calls count as the same one, and that what is left to look at is looked at.
#include "host/same_call.h"

#include <doctest/doctest.h>

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "hopper_attention/testing.h"
#include "tensors.h"

namespace hopper_attention {
namespace {

int launches = 0;

void count_launch(Plan const&, Problem const&, Arguments const&, Stream) { ++launches; }
void count_append(AppendArguments const&, Stream) { ++launches; }
DeviceInfo const& card(int /*ordinal*/) {
  static DeviceInfo const info = device_info("H100");
  return info;
}

class StandIn {
 public:
  StandIn() {
    testing::set_backend({.launch = &count_launch, .device_info = &card, .append = &count_append});
    launches = 0;
  }
  ~StandIn() { testing::set_backend({}); }
};

// Every tensor with another shape in a MiB of its own. No valid call: only what is compared counts.
template <class Call>
Call with_all_tensors() {
  Call call;
  std::uintptr_t address = kMiB;
  std::apply(
      [&](auto const&... field) {
        auto const fill = [&]<class Field>(Field const& x) {
          if constexpr (std::is_same_v<Field, Tensor>) {
            const_cast<Tensor&>(x) = contiguous(address += kMiB, DataType::kInt32, {3, 4});
          }
        };
        (fill(field), ...);
      },
      fields(call));
  return call;
}

std::vector<std::function<void(Tensor&)>> const kChanges{
    [](Tensor& t) { t = {}; },
    [](Tensor& t) { t.data = nullptr; },
    [](Tensor& t) { t.data = static_cast<char*>(t.data) + 4; },
    [](Tensor& t) { t.dtype = DataType::kFloat32; },
    [](Tensor& t) { t.device = 1; },
    [](Tensor& t) { t.rank = 1; },
    [](Tensor& t) { t.shape[1] = 3; },
    [](Tensor& t) { t.stride[0] = 5; },
};

// Each change of one field alone, back and forth.
template <class Call>
int differences() {
  Call const before = with_all_tensors<Call>();
  Call call = before;
  int found = 0;
  CHECK(is_same_call(before, call));
  std::apply(
      [&](auto const&... field) {
        auto const change = [&]<class Field>(Field const& x) {
          Field const kept = x;
          auto& changing = const_cast<Field&>(x);
          auto const try_it = [&] {
            CHECK(!is_same_call(before, call));
            CHECK(!is_same_call(call, before));
            changing = kept;
            CHECK(is_same_call(before, call));
            ++found;
          };
          if constexpr (std::is_same_v<Field, Tensor>) {
            for (auto const& of_tensor : kChanges) {
              of_tensor(changing);
              try_it();
            }
            changing.data = static_cast<char*>(changing.data) + 16 * kMiB;
            changing.shape[3] = 100;  // behind the last dim
            CHECK(is_same_call(before, call));
            changing = kept;
          } else if constexpr (std::is_same_v<Field, bool>) {
            changing = !changing;
            try_it();
          } else if constexpr (std::is_same_v<Field, std::optional<double>>) {
            changing = 0.5;
            try_it();
          } else {
            changing += 1;
            try_it();
          }
        };
        (change(field), ...);
      },
      fields(call));
  return found;
}

AppendArguments append_call() {
  Arguments const attention = cache_call();
  AppendArguments args;
  args.k_new = contiguous(20 * kMiB, DataType::kBFloat16, {3, 1, 2, 64});
  args.v_new = contiguous(21 * kMiB, DataType::kBFloat16, {3, 1, 2, 64});
  args.k_cache = attention.k;
  args.v_cache = attention.v;
  args.seqused_k = attention.seqused_k;
  args.cache_batch_idx = attention.cache_batch_idx;
  return args;
}

Arguments attention_after_append() {
  Arguments args = cache_call();
  args.seqlen_k_new = 1;
  return args;
}

}  // namespace

TEST_CASE("same call: any field that differs makes another, memory of the same alignment does not") {
  CHECK(differences<Arguments>() == 17 * 8 + 15);
  CHECK(differences<AppendArguments>() == 14 * 8 + 3);
}

TEST_CASE("same call: shared memory is found in the second call, too, and the next call is right") {
  StandIn const stand_in;
  Arguments const right = valid_call();
  Arguments wrong = right;
  wrong.out.data = right.q.data;
  for (int i = 0; i < 2; ++i) {
    forward(right, nullptr);
    CHECK_THROWS_WITH_AS(forward(wrong, nullptr), doctest::Contains("out: shares memory with q"), InvalidArgument);
  }
  CHECK(launches == 2);
}

TEST_CASE("same call: an append looks at the memory of both launches before the first") {
  StandIn const stand_in;
  AppendArguments const append = append_call();
  Arguments const attention = attention_after_append();
  auto const run = [](AppendArguments const& a, Arguments const& b) { append_and_forward(a, b, nullptr, nullptr); };
  for (int i = 0; i < 2; ++i) {
    run(append, attention);
    AppendArguments wrong_append = append;
    wrong_append.k_new.data = append.v_cache.data;
    CHECK_THROWS_WITH_AS(run(wrong_append, attention), doctest::Contains("v_cache: shares memory with k"),
                         InvalidArgument);
    Arguments wrong = attention;
    wrong.softmax_lse.data = attention.k.data;
    CHECK_THROWS_WITH_AS(run(append, wrong), doctest::Contains("softmax_lse: shares memory with k"), InvalidArgument);
  }
  CHECK(launches == 4);
}

TEST_CASE("same call: a workspace that is too small is missed in every call") {
  StandIn const stand_in;
  Arguments args = paged_call();
  args.batch_invariant = true;  // a schedule has to be made
  args.q = contiguous(1 * kMiB, DataType::kBFloat16, {500, 4, 64});
  args.out = contiguous(4 * kMiB, DataType::kBFloat16, {500, 4, 64});
  args.softmax_lse = {};
  std::int64_t const bytes = plan(validate(args), card(0)).workspace_bytes;
  REQUIRE(bytes > 0);
  for (int i = 0; i < 2; ++i) {
    args.workspace = contiguous(30 * kMiB, DataType::kUInt8, {bytes});
    check_call(args);
    args.workspace = contiguous(30 * kMiB, DataType::kUInt8, {bytes - 1});
    CHECK_THROWS_AS(check_call(args), InvalidArgument);
    CHECK_THROWS_AS(check_call(args), InvalidArgument);
  }
}

TEST_CASE("same call: what nobody looked at may be anything") {
  AppendArguments args = append_call();
  args.cu_seqlens_q.rank = kMaxRank + 1;  // not needed without rotary embedding
  CHECK_FALSE(is_same_call(args, args));
}

TEST_CASE("append: nothing is written where attention has neither a workspace nor a way to allocate one") {
  StandIn const stand_in;
  testing::ForcedPlan splits;
  splits.num_splits = 2;
  splits.cluster = -1;
  testing::force_plan(splits);
  Arguments const attention = attention_after_append();
  auto const run = [&](auto const& allocate) { append_and_forward(append_call(), attention, nullptr, allocate); };
  CHECK_THROWS_WITH_AS(run(nullptr), doctest::Contains("workspace: this call needs"), InvalidArgument);
  CHECK(launches == 0);
  run([](std::int64_t bytes) { return contiguous(40 * kMiB, DataType::kUInt8, {bytes}); });
  CHECK(launches == 2);
  testing::force_plan(std::nullopt);
}

}  // namespace hopper_attention
