// Every wrong argument raises before anything runs, and the message begins with the argument's name.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "hopper_attention/forward.h"
#include "tensors.h"

namespace hopper_attention {
namespace {

enum class Kind { kNoError, kInvalidArgument, kInvalidType, kNotImplemented, kOther };

struct Outcome {
  Kind kind = Kind::kNoError;
  std::string message;
};

Outcome outcome(Arguments const& args) {
  try {
    validate(args);
    return {};
  } catch (InvalidArgument const& error) {
    return {Kind::kInvalidArgument, error.what()};
  } catch (InvalidType const& error) {
    return {Kind::kInvalidType, error.what()};
  } catch (NotImplemented const& error) {
    return {Kind::kNotImplemented, error.what()};
  } catch (std::exception const& error) { return {Kind::kOther, error.what()}; }
}

// One wrong thing: what it is, how to do it, the error and how its message begins, and a part that it must contain.
struct Wrong {
  char const* why;
  std::function<void(Arguments&)> spoil;
  Kind kind;
  char const* begins;
  char const* contains;
};

void check_all(std::vector<Wrong> const& cases) {
  for (Wrong const& c : cases) {
    Arguments args = valid_call();
    REQUIRE(outcome(args).kind == Kind::kNoError);
    c.spoil(args);
    Outcome const found = outcome(args);
    CAPTURE(c.why);
    CAPTURE(found.message);
    CHECK(found.kind == c.kind);
    CHECK(found.message.find(c.begins) == 0);
    CHECK(found.message.find(c.contains) != std::string::npos);
  }
}

constexpr Kind kArgument = Kind::kInvalidArgument;
constexpr Kind kType = Kind::kInvalidType;
using A = Arguments;

}  // namespace

TEST_CASE("validate: rank, presence and shapes") {
  check_all({
      {"q was not given", [](A& a) { a.q = {}; }, kArgument, "q:", "none was given"},
      {"k was not given", [](A& a) { a.k = {}; }, kArgument, "k:", "none was given"},
      {"v was not given", [](A& a) { a.v = {}; }, kArgument, "v:", "none was given"},
      {"out was not given", [](A& a) { a.out = {}; }, kArgument, "out:", "none was given"},
      {"q is varlen", [](A& a) { a.q.rank = 3; }, kArgument, "q:", "(batch, seqlen_q, heads_q, head_dim)"},
      {"k has 5 dims", [](A& a) { a.k.rank = 5; }, kArgument, "k:", "found 5 dims"},
      {"softmax_lse has 4 dims", [](A& a) { a.softmax_lse.rank = 4; }, kArgument, "softmax_lse:", "found 4 dims"},
      {"sinks of shape (1, heads)", [](A& a) { a.sinks.rank = 2; }, kArgument, "sinks (s_aux):", "found 2 dims"},
      {"negative extent", [](A& a) { a.k.shape[1] = -1; }, kArgument, "k: dim 1", "found -1"},
      {"extent over 32 bits", [](A& a) { a.q.shape[1] = std::int64_t{1} << 33; }, kArgument, "q: dim 1", "8589934592"},
      {"k has another batch", [](A& a) { a.k.shape[0] = 3; }, kArgument, "k: dim 0 (batch)", "must be 2"},
      {"v has another batch", [](A& a) { a.v.shape[0] = 1; }, kArgument, "v: dim 0 (batch)", "must be 2"},
      {"k has another head dim", [](A& a) { a.k.shape[3] = 56; }, kArgument, "k: dim 3 (head_dim)",
       "must be 64, as in q"},
      {"v has more keys than k", [](A& a) { a.v.shape[1] = 8; }, kArgument, "v: dim 1 (seqlen_k)",
       "must be 7, as in k"},
      {"v has other heads than k", [](A& a) { a.v.shape[2] = 1; }, kArgument, "v: dim 2 (heads_k)",
       "must be 2, as in k"},
      {"heads not divisible",
       [](A& a) {
         a.k.shape[2] = 3;
         a.v.shape[2] = 3;
       },
       kArgument, "q: heads", "found 4 and 3"},
      {"no heads of k",
       [](A& a) {
         a.k.shape[2] = 0;
         a.v.shape[2] = 0;
       },
       kArgument, "k: heads", "found 0"},
      {"out has other queries", [](A& a) { a.out.shape[1] = 6; }, kArgument, "out: dim 1", "must be 5, as in q"},
      {"out has the head dim of q, not of v", [](A& a) { a.v.shape[3] = 32; }, kArgument, "out: dim 3",
       "must be 32, as in v"},
      {"softmax_lse as (batch, seqlen_q, heads_q)",
       [](A& a) { std::swap(a.softmax_lse.shape[1], a.softmax_lse.shape[2]); }, kArgument,
       "softmax_lse: dim 1 (heads_q)", "must be 4"},
      {"sinks for the heads of k", [](A& a) { a.sinks.shape[0] = 2; }, kArgument, "sinks (s_aux):", "4, found 2"},
  });
}

TEST_CASE("validate: head dims") {
  auto const with_dims = [](int head_dim, int head_dim_v) {
    return [=](A& a) { a = valid_call({.head_dim = head_dim, .head_dim_v = head_dim_v}); };
  };
  check_all({
      {"not a multiple of 8", with_dims(60, 64), kArgument, "q: head_dim", "multiple of 8, found 60"},
      {"head dim 0", with_dims(0, 64), kArgument, "q: head_dim", "found 0"},
      {"v not a multiple of 8", with_dims(64, 4), kArgument, "v: head_dim", "multiple of 8, found 4"},
      {"above 256", with_dims(264, 64), Kind::kNotImplemented, "q: head_dim", "at most 256, found 264"},
      {"MLA", with_dims(64, 512), Kind::kNotImplemented, "v: head_dim", "at most 256, found 512"},
  });
  for (int const head_dim : {8, 64, 72, 128, 192, 256}) {
    CHECK(outcome(valid_call({.head_dim = head_dim, .head_dim_v = head_dim})).message == "");
  }
  CHECK(outcome(valid_call({.head_dim = 192, .head_dim_v = 128})).message == "");
}

TEST_CASE("validate: dtypes") {
  check_all({
      {"fp32 q", [](A& a) { a.q.dtype = DataType::kFloat32; }, kType, "q: dtype", "found fp32"},
      {"fp64 q", [](A& a) { a.q.dtype = DataType::kUnsupported; }, kType, "q: dtype", "bf16 or fp16"},
      {"fp16 k with bf16 q", [](A& a) { a.k.dtype = DataType::kFloat16; }, kType, "k: dtype", "bf16, found fp16"},
      {"fp16 v with bf16 q", [](A& a) { a.v.dtype = DataType::kFloat16; }, kType, "v: dtype", "bf16, found fp16"},
      {"fp32 out", [](A& a) { a.out.dtype = DataType::kFloat32; }, kType, "out: dtype", "found fp32"},
      {"bf16 softmax_lse", [](A& a) { a.softmax_lse.dtype = DataType::kBFloat16; }, kType, "softmax_lse: dtype",
       "found bf16"},
      {"int sinks", [](A& a) { a.sinks.dtype = DataType::kUnsupported; }, kType, "sinks (s_aux): dtype",
       "bf16, fp16 or fp32"},
  });
  for (DataType const dtype : {DataType::kBFloat16, DataType::kFloat16}) {
    Arguments args = valid_call({.dtype = dtype});
    CHECK(validate(args).dtype == dtype);
    for (DataType const sinks : {DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32}) {
      args.sinks.dtype = sinks;
      CHECK(outcome(args).message == "");
    }
  }
}

TEST_CASE("validate: devices") {
  check_all({
      {"q on the CPU", [](A& a) { a.q.device = kCpuDevice; }, kArgument, "q:", "on the CPU"},
      {"k on the CPU", [](A& a) { a.k.device = kCpuDevice; }, kArgument, "k:", "is on the CPU"},
      {"v on another GPU", [](A& a) { a.v.device = 1; }, kArgument, "v:", "device of q, cuda:0, but is on cuda:1"},
      {"q on another GPU than all others", [](A& a) { a.q.device = 3; }, kArgument, "k:", "cuda:3"},
      {"out on the CPU", [](A& a) { a.out.device = kCpuDevice; }, kArgument, "out:", "is on the CPU"},
      {"softmax_lse on another GPU", [](A& a) { a.softmax_lse.device = 1; }, kArgument, "softmax_lse:", "cuda:1"},
      {"sinks on the CPU", [](A& a) { a.sinks.device = kCpuDevice; }, kArgument, "sinks (s_aux):", "is on the CPU"},
  });
}

TEST_CASE("validate: strides and addresses") {
  check_all({
      {"last stride 2", [](A& a) { a.q.stride[3] = 2; }, kArgument, "q: stride of the last dim", "found 2"},
      {"column-major v", [](A& a) { std::swap(a.v.stride[1], a.v.stride[3]); }, kArgument, "v: stride of the last dim",
       "contiguous"},
      {"row stride of 129 elements", [](A& a) { a.k.stride[1] = 129; }, kArgument, "k: stride of dim 1 (seqlen_k)",
       "8 elements (16 bytes), found 129"},
      {"head stride of 68 elements", [](A& a) { a.q.stride[2] = 68; }, kArgument, "q: stride of dim 2 (heads_q)",
       "found 68"},
      {"expanded batch", [](A& a) { a.k.stride[0] = 0; }, kArgument, "k: stride of dim 0 (batch) is 0 over 2",
       "expanded"},
      {"expanded heads of v", [](A& a) { a.v.stride[2] = 0; }, kArgument, "v: stride of dim 2 (heads_k) is 0",
       "contiguous copy"},
      {"flipped keys", [](A& a) { a.k.stride[1] = -128; }, kArgument, "k: stride of dim 1 (seqlen_k) is -128",
       "negative"},
      {"stride over 2^40 bytes", [](A& a) { a.q.stride[0] = std::int64_t{1} << 40; }, kArgument, "q: stride",
       "the most that can be addressed"},
      {"stride near 2^63", [](A& a) { a.out.stride[0] = std::numeric_limits<std::int64_t>::max(); }, kArgument,
       "out: stride", "2^40"},
      {"storage offset of one element", [](A& a) { a.q.data = static_cast<char*>(a.q.data) + 2; }, kArgument,
       "q: the address", "16 bytes"},
      {"k 8 bytes off", [](A& a) { a.k.data = static_cast<char*>(a.k.data) + 8; }, kArgument, "k: the address",
       "16 bytes"},
      {"v without memory", [](A& a) { a.v.data = nullptr; }, kArgument, "v: the data pointer", "null"},
      {"out without memory", [](A& a) { a.out.data = nullptr; }, kArgument, "out: the data pointer", "null"},
      {"out at an odd address", [](A& a) { a.out.data = static_cast<char*>(a.out.data) + 1; }, kArgument,
       "out: the address", "2 bytes"},
      {"out with last stride 2", [](A& a) { a.out.stride[3] = 2; }, kArgument, "out: stride of the last dim",
       "found 2"},
      {"expanded out", [](A& a) { a.out.stride[2] = 0; }, kArgument, "out: stride of dim 2 (heads_q) is 0", "expanded"},
      {"out with overlapping rows", [](A& a) { a.out.stride[1] = 128; }, kArgument, "out: elements share memory",
       "(2, 5, 4, 64)"},
      {"out with overlapping heads", [](A& a) { a.out.stride[2] = 63; }, kArgument, "out: elements share memory", ""},
      {"transposed softmax_lse", [](A& a) { std::swap(a.softmax_lse.stride[1], a.softmax_lse.stride[2]); }, kArgument,
       "softmax_lse: must be contiguous", "dim 2"},
      {"expanded sinks", [](A& a) { a.sinks.stride[0] = 0; }, kArgument, "sinks (s_aux): must be contiguous", "is 0"},
      {"misaligned softmax_lse", [](A& a) { a.softmax_lse.data = static_cast<char*>(a.softmax_lse.data) + 2; },
       kArgument, "softmax_lse: the address", "4 bytes"},
  });
}

TEST_CASE("validate: options") {
  double const nan = std::numeric_limits<double>::quiet_NaN();
  double const infinity = std::numeric_limits<double>::infinity();
  check_all({
      {"NaN scale", [=](A& a) { a.softmax_scale = nan; }, kArgument, "softmax_scale:", "finite"},
      {"infinite scale", [=](A& a) { a.softmax_scale = infinity; }, kArgument, "softmax_scale:", "finite"},
      {"scale beyond float32", [](A& a) { a.softmax_scale = 1e39; }, kArgument, "softmax_scale:", "1e+39"},
      {"negative scale", [](A& a) { a.softmax_scale = -0.5; }, kArgument, "softmax_scale:", "negate q"},
      {"NaN softcap", [=](A& a) { a.softcap = nan; }, kArgument, "softcap:", "nan"},
      {"infinite softcap", [=](A& a) { a.softcap = infinity; }, kArgument, "softcap:", "inf"},
      {"negative softcap", [](A& a) { a.softcap = -1.0; }, kArgument, "softcap:", "-1"},
      {"softcap that vanishes in float32", [](A& a) { a.softcap = 1e-60; }, kArgument, "softcap:", "too small"},
      {"window -2", [](A& a) { a.window_left = -2; }, kArgument, "window_size: left", "found -2"},
      {"right window -5", [](A& a) { a.window_right = -5; }, kArgument, "window_size: right", "found -5"},
      {"negative chunk", [](A& a) { a.attention_chunk = -1; }, kArgument, "attention_chunk:", "found -1"},
      {"num_splits -5", [](A& a) { a.num_splits = -5; }, kArgument, "num_splits:", "found -5"},
      {"num_splits 257", [](A& a) { a.num_splits = 257; }, kArgument, "num_splits:", "256, found 257"},
      {"num_splits 1000", [](A& a) { a.num_splits = 1000; }, kArgument, "num_splits:", "found 1000"},
      {"negative sm_margin", [](A& a) { a.sm_margin = -1; }, kArgument, "sm_margin:", "found -1"},
      {"negative new keys", [](A& a) { a.seqlen_k_new = -1; }, kArgument, "seqlen_k_new:", "found -1"},
      {"one length for all, below -1", [](A& a) { a.seqused_k_all = -2; }, kArgument, "seqused_k:", "found -2"},
      {"max_seqlen_q -2", [](A& a) { a.max_seqlen_q = -2; }, kArgument, "max_seqlen_q:", "found -2"},
      {"max_seqlen_k -2", [](A& a) { a.max_seqlen_k = -2; }, kArgument, "max_seqlen_k:", "found -2"},
      {"ranks without totals", [](A& a) { a.cp_world_size = 2; }, kArgument, "cp_tot_seqused_k:", "cp_world_size 2"},
  });
  for (std::int64_t const num_splits : {0, 1, 2, 256}) {
    Arguments args = valid_call();
    args.num_splits = num_splits;
    CHECK(validate(args).num_splits == num_splits);
  }
}

TEST_CASE("validate: out and softmax_lse overlap nothing") {
  check_all({
      {"out is q", [](A& a) { a.out.data = a.q.data; }, kArgument, "out: shares memory with q", "separate memory"},
      {"out begins in the last row of v",
       [](A& a) { a.out.data = static_cast<char*>(a.v.data) + 2 * 7 * 2 * 64 * 2 - 128; }, kArgument,
       "out: shares memory with v", ""},
      {"out ends in the first row of k",
       [](A& a) { a.out.data = static_cast<char*>(a.k.data) - 2 * 5 * 4 * 64 * 2 + 128; }, kArgument,
       "out: shares memory with k", ""},
      {"softmax_lse in q", [](A& a) { a.softmax_lse.data = a.q.data; }, kArgument, "softmax_lse: shares memory with q",
       ""},
      {"softmax_lse in out", [](A& a) { a.softmax_lse.data = a.out.data; }, kArgument,
       "out: shares memory with softmax_lse", ""},
      {"sinks in softmax_lse", [](A& a) { a.sinks.data = a.softmax_lse.data; }, kArgument,
       "softmax_lse: shares memory with sinks", ""},
  });
}

TEST_CASE("validate: views that only look wrong pass") {
  SUBCASE("q, k, v and out are slices of one packed tensor (batch, seqlen, heads, dim)") {
    Tensor const packed = contiguous(kMiB, DataType::kBFloat16, {2, 7, 16, 64});
    Arguments args = valid_call({.seqlen_q = 7, .heads_q = 4, .heads_k = 4});
    int first_head = 0;
    for (Tensor* tensor : {&args.q, &args.k, &args.v, &args.out}) {
      tensor->data = static_cast<char*>(packed.data) + first_head * 64 * 2;
      for (int dim = 0; dim < 4; ++dim) { tensor->stride[dim] = packed.stride[dim]; }
      first_head += 4;
    }
    CHECK(outcome(args).message == "");
    args.out.data = static_cast<char*>(packed.data) + 11 * 64 * 2;
    CHECK(outcome(args).message.find("out: shares memory with v") == 0);
  }
  SUBCASE("k and v are interleaved: the two halves of every row") {
    Arguments args = valid_call();
    args.v.data = static_cast<char*>(args.k.data) + 64 * 2;
    for (Tensor* tensor : {&args.k, &args.v}) {
      tensor->stride[2] = 128;
      tensor->stride[1] = 256;
      tensor->stride[0] = 7 * 256;
    }
    CHECK(outcome(args).message == "");
  }
  SUBCASE("k and v are the same tensor") {
    Arguments args = valid_call();
    args.v = args.k;
    CHECK(outcome(args).message == "");
  }
  SUBCASE("transposed (batch, heads, seqlen, dim) memory") {
    Arguments args = valid_call();
    for (Tensor* tensor : {&args.q, &args.k, &args.v, &args.out}) {
      tensor->stride[1] = 64;
      tensor->stride[2] = 64 * tensor->shape[1];
    }
    CHECK(outcome(args).message == "");
  }
  SUBCASE("dims of size 1 have any stride") {
    Arguments args = valid_call({.batch = 1, .seqlen_q = 1, .seqlen_k = 1, .heads_q = 1, .heads_k = 1});
    for (Tensor* tensor : {&args.q, &args.k, &args.v, &args.out}) {
      tensor->stride[0] = 3331333;
      tensor->stride[1] = 3;
      tensor->stride[2] = 0;
    }
    args.softmax_lse.stride = {3, 17, 0};
    args.sinks.stride = {5};
    CHECK(outcome(args).message == "");
  }
  SUBCASE("out with rows of odd length: the kernel stores it without TMA") {
    Arguments args = valid_call();
    args.out.stride = {5 * 4 * 65, 4 * 65, 65, 1};
    args.out.data = static_cast<char*>(args.out.data) + 2;
    CHECK(outcome(args).message == "");
  }
  SUBCASE("no queries, no keys, no batch, no heads of q: memory may be missing") {
    for (CallShape const& shape : {CallShape{.seqlen_q = 0}, CallShape{.batch = 0}, CallShape{.heads_q = 0}}) {
      Arguments args = valid_call(shape);
      for (Tensor* tensor : {&args.q, &args.out, &args.softmax_lse}) { tensor->data = nullptr; }
      CHECK(outcome(args).message == "");
    }
    Arguments args = valid_call({.seqlen_k = 0});
    args.k.data = nullptr;
    args.v.data = nullptr;
    CHECK(outcome(args).message == "");
  }
  SUBCASE("no softmax_lse, no sinks") {
    Arguments args = valid_call();
    args.softmax_lse = {};
    args.sinks = {};
    CHECK(outcome(args).message == "");
    CHECK_FALSE(validate(args).has_sinks);
  }
  SUBCASE("more than 2^31 elements") {
    Arguments args = valid_call({.batch = 1,
                                 .seqlen_q = 1 << 20,
                                 .seqlen_k = 1 << 20,
                                 .heads_q = 64,
                                 .heads_k = 64,
                                 .head_dim = 128,
                                 .head_dim_v = 128});
    args.k.data = reinterpret_cast<void*>(std::uintptr_t{1} << 40);
    args.v.data = reinterpret_cast<void*>(std::uintptr_t{2} << 40);
    args.out.data = reinterpret_cast<void*>(std::uintptr_t{3} << 40);
    args.softmax_lse.data = reinterpret_cast<void*>(std::uintptr_t{4} << 40);
    args.sinks.data = reinterpret_cast<void*>(std::uintptr_t{5} << 40);
    CHECK(outcome(args).message == "");
  }
}

TEST_CASE("validate: the problem holds what was asked") {
  Arguments args = valid_call(
      {.batch = 3, .seqlen_q = 50, .seqlen_k = 70, .heads_q = 6, .heads_k = 2, .head_dim = 128, .head_dim_v = 64});
  args.window_left = 9;
  args.window_right = 4;
  args.attention_chunk = 16;
  args.softcap = 30.0;
  args.sm_margin = 8;
  args.batch_invariant = true;
  Problem const p = validate(args);
  CHECK(p == Problem{.dtype = DataType::kBFloat16,
                     .batch = 3,
                     .seqlen_q = 50,
                     .seqlen_k = 70,
                     .total_q = 150,
                     .heads_q = 6,
                     .heads_k = 2,
                     .head_dim = 128,
                     .head_dim_v = 64,
                     .mask = {.left = 9, .right = 4, .chunk = 16},
                     .softmax_scale = static_cast<float>(1.0 / std::sqrt(128.0)),
                     .softcap = 30.0F,
                     .has_sinks = true,
                     .num_splits = 1,
                     .sm_margin = 8,
                     .batch_invariant = true});
  args.softmax_scale = 0.0;
  CHECK(validate(args).softmax_scale == 0.0F);
  args.softmax_scale = 0.25;
  CHECK(validate(args).softmax_scale == 0.25F);
}

TEST_CASE("make_problem: sizes whose product does not fit the scheduler are refused") {
  ProblemShape shape{DataType::kBFloat16, 1 << 20, 1 << 20, 1, 64, 64, 64, 64, false};
  std::string message;
  try {
    make_problem(shape, {});
  } catch (InvalidArgument const& error) { message = error.what(); }
  CHECK(message.find("q: batch * heads * seqlen_q / 64") == 0);
  shape.seqlen_q = 0;
  CHECK(make_problem(shape, {}).batch == 1 << 20);
}

}  // namespace hopper_attention
