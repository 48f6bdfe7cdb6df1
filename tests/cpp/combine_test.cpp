// combine() and merge_states(): every wrong argument raises before anything runs, and the message begins with the
// argument's name; what the kernels can take passes.
#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "hopper_attention/combine.h"
#include "kernels/combine_params.h"
#include "tensors.h"

namespace hopper_attention {
namespace {

constexpr DataType kFloat = DataType::kFloat32;

CombineArguments valid_combine() {
  return {.out_partial = contiguous(1 * kMiB, kFloat, {3, 2, 5, 4, 64}),
          .lse_partial = contiguous(3 * kMiB, kFloat, {3, 2, 5, 4}),
          .out = contiguous(4 * kMiB, DataType::kBFloat16, {2, 5, 4, 64}),
          .lse = contiguous(5 * kMiB, kFloat, {2, 5, 4})};
}

MergeArguments valid_merge(DataType dtype = DataType::kBFloat16) {
  return {.out_a = contiguous(1 * kMiB, dtype, {2, 5, 4, 64}),
          .lse_a = contiguous(2 * kMiB, kFloat, {2, 4, 5}),
          .out_b = contiguous(3 * kMiB, dtype, {2, 5, 4, 64}),
          .lse_b = contiguous(4 * kMiB, kFloat, {2, 4, 5}),
          .out = contiguous(5 * kMiB, dtype, {2, 5, 4, 64}),
          .lse = contiguous(6 * kMiB, kFloat, {2, 4, 5})};
}

void set_stride(Tensor& tensor, std::vector<std::int64_t> const& strides) {
  for (std::size_t dim = 0; dim < strides.size(); ++dim) { tensor.stride[dim] = strides[dim]; }
}

// "" if the arguments are right; else the class of the error and its message.
template <class Args>
std::string outcome(Args const& args) {
  try {
    validate(args);
    return "";
  } catch (InvalidArgument const& error) {
    return std::string("value: ") + error.what();
  } catch (InvalidType const& error) {
    return std::string("type: ") + error.what();
  } catch (NotImplemented const& error) { return std::string("not implemented: ") + error.what(); }
}

template <class Args>
struct Wrong {
  char const* why;
  std::function<void(Args&)> spoil;
  char const* begins;
  char const* contains;
};

template <class Args>
void check_all(std::function<Args()> const& valid, std::vector<Wrong<Args>> const& cases) {
  for (Wrong<Args> const& c : cases) {
    Args args = valid();
    REQUIRE(outcome(args) == "");
    c.spoil(args);
    std::string const found = outcome(args);
    CAPTURE(c.why);
    CAPTURE(found);
    CHECK(found.find(c.begins) == 0);
    CHECK(found.find(c.contains) != std::string::npos);
  }
}

using C = CombineArguments;
using M = MergeArguments;

}  // namespace

TEST_CASE("combine: wrong arguments") {
  check_all<C>(
      valid_combine,
      {
          {"no parts given", [](C& a) { a.out_partial = {}; }, "value: out_partial:", "none was given"},
          {"no lse given", [](C& a) { a.lse = {}; }, "value: lse:", "none was given"},
          {"parts of rank 4", [](C& a) { a.out_partial.rank = 4; }, "value: out_partial:", "found 4 dims"},
          {"bf16 parts", [](C& a) { a.out_partial.dtype = DataType::kBFloat16; }, "type: out_partial:", "fp32"},
          {"bf16 lse_partial", [](C& a) { a.lse_partial.dtype = DataType::kBFloat16; }, "type: lse_partial:", "fp32"},
          {"int32 out", [](C& a) { a.out.dtype = DataType::kInt32; }, "type: out:", "fp32, bf16 or fp16"},
          {"parts on the CPU", [](C& a) { a.out_partial.device = kCpuDevice; }, "value: out_partial:", "CPU"},
          {"out on another GPU", [](C& a) { a.out.device = 1; }, "value: out:", "cuda:1"},
          {"63 columns", [](C& a) { a.out_partial.shape[4] = 63; }, "value: out_partial:", "multiple of 8, found 63"},
          {"no columns", [](C& a) { a.out_partial.shape[4] = 0; }, "value: out_partial:", "multiple of 8, found 0"},
          {"520 columns", [](C& a) { a.out_partial.shape[4] = 520; }, "not implemented: out_partial:", "512"},
          {"one LSE too few", [](C& a) { a.lse_partial.shape[0] = 2; }, "value: lse_partial: dim 0", "must be 3"},
          {"heads of out", [](C& a) { a.out.shape[2] = 3; }, "value: out: dim 2", "must be 4"},
          {"queries of lse", [](C& a) { a.lse.shape[1] = 4; }, "value: lse: dim 1", "must be 5"},
          {"too many rows",
           [](C& a) {
             a.out_partial.shape = {1, 1 << 15, 1 << 15, 2, 8};
             a.out_partial.stride = {0, 0, 0, 0, 1};
           },
           "value: out_partial:", "2^30 rows"},
          {"columns not together", [](C& a) { a.out_partial.stride[4] = 2; }, "value: out_partial:", "last dim"},
          {"rows of 66 floats", [](C& a) { set_stride(a.out_partial, {2 * 5 * 4 * 66, 5 * 4 * 66, 4 * 66, 66, 1}); },
           "value: out_partial: stride of dim", "multiple of 4 elements (16 bytes)"},
          {"negative stride of LSEs", [](C& a) { a.lse_partial.stride[0] = -40; }, "value: lse_partial: stride", "-40"},
          {"a stride over all memory", [](C& a) { a.lse_partial.stride[0] = std::numeric_limits<std::int64_t>::max(); },
           "value: lse_partial: stride", "2^40"},
          {"parts at 8 bytes", [](C& a) { a.out_partial.data = reinterpret_cast<void*>(kMiB + 8); },
           "value: out_partial: the address", "16 bytes"},
          {"null", [](C& a) { a.lse_partial.data = nullptr; }, "value: lse_partial:", "null"},
          {"out in 4-byte units", [](C& a) { a.out.data = reinterpret_cast<void*>(4 * kMiB + 4); },
           "value: out:", "8 bytes"},
          {"expanded out", [](C& a) { a.out.stride[0] = 0; }, "value: out:", "share memory"},
          {"expanded lse", [](C& a) { a.lse.stride[1] = 0; }, "value: lse:", "share memory"},
          {"out on the parts", [](C& a) { a.out.data = a.out_partial.data; }, "value: out:", "out_partial"},
          {"lse on lse_partial", [](C& a) { a.lse.data = a.lse_partial.data; }, "value: lse:", "lse_partial"},
          {"lse on out", [](C& a) { a.lse.data = a.out.data; }, "value: lse:", "with out"},
      });
}

TEST_CASE("combine: what passes") {
  C args = valid_combine();
  args.lse.stride = {4 * 5, 1, 5};  // a transposed view of (B, H, M)
  CHECK(outcome(args) == "");
  args = valid_combine();
  args.out_partial.stride[0] = 0;  // an expanded input
  args.lse_partial.stride = {1, 3 * 20, 3 * 4, 3};
  CHECK(outcome(args) == "");
  args = valid_combine();
  args.out = contiguous(4 * kMiB + 8, DataType::kFloat16, {2, 5, 4, 64});  // 4 elements are enough
  CHECK(outcome(args) == "");
  args = valid_combine();
  args.out_partial = contiguous(1 * kMiB, kFloat, {3, 2, 5, 4, 512});  // as many columns as there may be
  args.out = contiguous(8 * kMiB, DataType::kBFloat16, {2, 5, 4, 512});
  CHECK(outcome(args) == "");
  args = valid_combine();
  args.out_partial = contiguous(0, kFloat, {0, 2, 5, 4, 64});  // no parts: rows without keys
  args.lse_partial = contiguous(0, kFloat, {0, 2, 5, 4});
  CHECK(outcome(args) == "");
  args.out = contiguous(0, kFloat, {2, 0, 4, 64});  // no rows: no memory
  args.lse = contiguous(0, kFloat, {2, 0, 4});
  args.out_partial = contiguous(0, kFloat, {3, 2, 0, 4, 64});
  args.lse_partial = contiguous(0, kFloat, {3, 2, 0, 4});
  CHECK(outcome(args) == "");
  args = valid_combine();
  for (Tensor* const t : {&args.out_partial, &args.lse_partial, &args.out, &args.lse}) {
    int const batch = t == &args.out || t == &args.lse ? 0 : 1;
    t->shape[batch] = 1;
    t->stride[batch] = 3331333;  // strides of dims of size 1 say nothing
  }
  CHECK(outcome(args) == "");
}

TEST_CASE("merge_states: wrong arguments") {
  check_all<M>(
      [] { return valid_merge(); },
      {
          {"no out_b given", [](M& a) { a.out_b = {}; }, "value: out_b:", "none was given"},
          {"out_a of rank 2", [](M& a) { a.out_a.rank = 2; }, "value: out_a:", "found 2 dims"},
          {"packed out_a, the rest not", [](M& a) { a.out_a = contiguous(kMiB, DataType::kBFloat16, {10, 4, 64}); },
           "value: out_b:", "(tokens, heads, head_dim)"},
          {"unknown dtype", [](M& a) { a.out_a.dtype = DataType::kUnsupported; }, "type: out_a:", "fp32, bf16 or fp16"},
          {"dtypes differ", [](M& a) { a.out_b.dtype = DataType::kFloat16; }, "type: out_b:", "bf16, found fp16"},
          {"fp32 out", [](M& a) { a.out.dtype = kFloat; }, "type: out:", "that of out_a"},
          {"heads of out_b", [](M& a) { a.out_b.shape[2] = 3; }, "value: out_b: dim 2", "must be 4, as in out_a"},
          {"columns of out", [](M& a) { a.out.shape[3] = 56; }, "value: out: dim 3", "must be 64, as in out_a"},
          {"out on another GPU", [](M& a) { a.out.device = 1; }, "value: out:", "cuda:1"},
          {"heads of a packed out",
           [](M& a) {
             for (Tensor* const t : {&a.out_a, &a.out_b, &a.out}) {
               *t = contiguous(reinterpret_cast<std::uintptr_t>(t->data), DataType::kBFloat16, {10, 4, 64});
             }
             a.out.shape[1] = 3;
           },
           "value: out: dim 1", "must be 4, as in out_a"},
          {"too many rows",
           [](M& a) {
             a.out_a.shape = {1 << 15, 1 << 15, 2, 8};
             a.out_a.stride = {0, 0, 0, 1};
           },
           "value: out_a:", "2^30 rows"},
          {"too many packed rows",
           [](M& a) {
             a.out_a = contiguous(kMiB, DataType::kBFloat16, {1 << 29, 4, 8});
             a.out_a.stride = {0, 0, 1};
           },
           "value: out_a:", "2^30 rows"},
          {"bf16 LSE", [](M& a) { a.lse_b.dtype = DataType::kBFloat16; }, "type: lse_b:", "fp32"},
          {"LSE of (B, M, H)", [](M& a) { a.lse_a = contiguous(2 * kMiB, kFloat, {2, 5, 4}); }, "value: lse_a: dim 1",
           "must be 4"},
          {"lse_b on the CPU", [](M& a) { a.lse_b.device = kCpuDevice; }, "value: lse_b:", "the CPU"},
          {"out_b at 8 bytes", [](M& a) { a.out_b.data = reinterpret_cast<void*>(3 * kMiB + 8); },
           "value: out_b:", "16 bytes"},
          {"rows of 68 half floats", [](M& a) { set_stride(a.out_b, {5 * 4 * 68, 4 * 68, 68, 1}); },
           "value: out_b: stride of dim", "multiple of 8 elements"},
          {"out is out_b", [](M& a) { a.out = a.out_b; }, "value: out:", "out_b"},
          {"out overlaps out_a but is not it", [](M& a) { a.out.data = static_cast<char*>(a.out_a.data) + 64 * 2; },
           "value: out:", "out_a"},
          {"out is a transposed out_a",
           [](M& a) {
             a.out_a = a.out = contiguous(kMiB, DataType::kBFloat16, {2, 4, 4, 64});
             a.out_b = contiguous(3 * kMiB, DataType::kBFloat16, {2, 4, 4, 64});
             a.lse_a.shape[2] = a.lse_b.shape[2] = a.lse.shape[2] = 4;
             std::swap(a.out.stride[1], a.out.stride[2]);
           },
           "value: out:", "out_a"},
          {"lse is lse_b", [](M& a) { a.lse = a.lse_b; }, "value: lse:", "lse_b"},
          {"lse in out", [](M& a) { a.lse.data = a.out.data; }, "value: lse:", "with out"},
          {"lse_a is expanded, and lse is it", [](M& a) { a.lse_a.stride[0] = 0, a.lse = a.lse_a; },
           "value: lse:", "share memory"},
      });
}

TEST_CASE("merge_states: what passes") {
  for (DataType const dtype : {kFloat, DataType::kBFloat16, DataType::kFloat16}) {
    M args = valid_merge(dtype);
    args.out = args.out_a;
    args.lse = args.lse_a;
    CHECK(outcome(args) == "");
  }
  M args = valid_merge();
  args.lse_a.stride = {1, 2, 8};  // any strides
  args.lse_b.stride = {0, 0, 0};
  CHECK(outcome(args) == "");
  args.out_a.stride = {0, 64, 5 * 64, 1};
  CHECK(outcome(args) == "");
  M packed = valid_merge();
  for (Tensor* const t : {&packed.out_a, &packed.out_b, &packed.out}) {
    *t = contiguous(reinterpret_cast<std::uintptr_t>(t->data), DataType::kBFloat16, {10, 4, 64});
  }
  for (Tensor* const t : {&packed.lse_a, &packed.lse_b, &packed.lse}) {
    *t = contiguous(reinterpret_cast<std::uintptr_t>(t->data), kFloat, {4, 10});
  }
  CHECK(outcome(packed) == "");
}

TEST_CASE("merge kernel: every count of parts has its loads in flight") {
  for (int parts = 1; parts <= kMaxMergedParts; ++parts) {
    CHECK(merge_units(parts) * parts <= kMergeLoads);
    CHECK(merge_units(parts) >= 1);
  }
}

}  // namespace hopper_attention
