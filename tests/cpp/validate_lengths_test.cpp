// Layouts of q, k and v, tensors of lengths, pages, the schedule: what is refused, and what the problem then says.
#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "hopper_attention/forward.h"
#include "kernels/interval_mask.h"
#include "tensors.h"

namespace hopper_attention {
namespace {

enum class Kind { kNoError, kInvalidArgument, kInvalidType, kOther };

struct Outcome {
  Kind kind = Kind::kNoError;
  std::string message;
};

template <class Args>
Outcome outcome(Args const& args) {
  try {
    validate(args);
    return {};
  } catch (InvalidArgument const& error) {
    return {Kind::kInvalidArgument, error.what()};
  } catch (InvalidType const& error) {
    return {Kind::kInvalidType, error.what()};
  } catch (std::exception const& error) { return {Kind::kOther, error.what()}; }
}

using A = Arguments;

struct Wrong {
  char const* why;
  std::function<void(A&)> spoil;
  char const* begins;
  char const* contains;
  Kind kind = Kind::kInvalidArgument;
};

void check_all(Arguments const& right, std::vector<Wrong> const& cases) {
  REQUIRE(outcome(right).message == "");
  for (Wrong const& c : cases) {
    Arguments args = right;
    c.spoil(args);
    Outcome const found = outcome(args);
    CAPTURE(c.why);
    CAPTURE(found.message);
    CHECK(found.kind == c.kind);
    CHECK(found.message.find(c.begins) == 0);
    CHECK(found.message.find(c.contains) != std::string::npos);
  }
}

void check_allowed(Arguments args, std::function<void(A&)> const& change) {
  change(args);
  CHECK(outcome(args).message == "");
}

}  // namespace

TEST_CASE("validate: packed q and k") {
  check_all(
      varlen_call(),
      {
          {"q of a dense batch", [](A& a) { a.q = contiguous(kMiB, DataType::kBFloat16, {2, 10, 4, 64}); },
           "q:", "(total_q, heads_q, head_dim) with cu_seqlens_q, found 4 dims"},
          {"q packed without cu_seqlens_q", [](A& a) { a.cu_seqlens_q = {}; }, "q:", "found 3 dims"},
          {"k packed without cu_seqlens_k", [](A& a) { a.cu_seqlens_k = {}; },
           "k:", "without cu_seqlens_k and page_table, found 3 dims"},
          {"v has fewer rows", [](A& a) { a.v.shape[0] = 29; }, "v: dim 0 (total_k)", "must be 30, as in k"},
          {"k has another head dim", [](A& a) { a.k.shape[2] = 56; }, "k: dim 2 (head_dim)", "must be 64, as in q"},
          {"cu_seqlens_q without elements", [](A& a) { a.cu_seqlens_q.shape[0] = 0; }, "cu_seqlens_q:", "batch + 1"},
          {"cu_seqlens_q with two dims", [](A& a) { a.cu_seqlens_q.rank = 2; }, "cu_seqlens_q:", "found 2 dims"},
          {"cu_seqlens_k for 4 sequences", [](A& a) { a.cu_seqlens_k.shape[0] = 5; },
           "cu_seqlens_k:", "4 for the batch of cu_seqlens_q, found 5"},
          {"seqused_q for 4 sequences", [](A& a) { a.seqused_q = lengths_at(9 * kMiB, 4); },
           "seqused_q:", "batch elements, 3 for the batch of cu_seqlens_q, found 4"},
          {"seqused_k for 2 sequences", [](A& a) { a.seqused_k = lengths_at(9 * kMiB, 2); }, "seqused_k:", "found 2"},
          {"int64 lengths", [](A& a) { a.cu_seqlens_q.dtype = DataType::kUnsupported; }, "cu_seqlens_q: dtype",
           "must be int32, found another dtype", Kind::kInvalidType},
          {"float lengths", [](A& a) { a.cu_seqlens_k.dtype = DataType::kFloat32; }, "cu_seqlens_k: dtype", "fp32",
           Kind::kInvalidType},
          {"lengths on the CPU", [](A& a) { a.cu_seqlens_q.device = kCpuDevice; }, "cu_seqlens_q:", "on the CPU"},
          {"lengths on another GPU", [](A& a) { a.cu_seqlens_k.device = 1; }, "cu_seqlens_k:", "cuda:1"},
          {"every second element", [](A& a) { a.cu_seqlens_q.stride[0] = 2; }, "cu_seqlens_q: must be contiguous",
           "is 2"},
          {"misaligned", [](A& a) { a.cu_seqlens_k.data = static_cast<char*>(a.cu_seqlens_k.data) + 2; },
           "cu_seqlens_k: the address", "4 bytes"},
          {"no memory", [](A& a) { a.cu_seqlens_q.data = nullptr; }, "cu_seqlens_q: the data pointer", "null"},
          {"one length for all", [](A& a) { a.seqused_k_all = 5; }, "seqused_k:", "tensor with cu_seqlens_k"},
          {"cache_batch_idx", [](A& a) { a.cache_batch_idx = lengths_at(9 * kMiB, 3); },
           "cache_batch_idx:", "cu_seqlens_k"},
          {"max_seqlen_q -2", [](A& a) { a.max_seqlen_q = -2; }, "max_seqlen_q:", "found -2"},
          {"max_seqlen_k -7", [](A& a) { a.max_seqlen_k = -7; }, "max_seqlen_k:", "found -7"},
          {"out of a dense batch", [](A& a) { a.out = contiguous(4 * kMiB, DataType::kBFloat16, {2, 10, 4, 64}); },
           "out:", "(total_q, heads_q, head_dim_v), found 4 dims"},
          {"out with fewer rows", [](A& a) { a.out.shape[0] = 19; }, "out: dim 0 (total_q)", "must be 20, as in q"},
          {"LSE as (total_q, heads)", [](A& a) { std::swap(a.softmax_lse.shape[0], a.softmax_lse.shape[1]); },
           "softmax_lse: dim 0 (heads_q)", "must be 4"},
          {"LSE of a dense batch", [](A& a) { a.softmax_lse = contiguous(5 * kMiB, DataType::kFloat32, {1, 4, 20}); },
           "softmax_lse:", "(heads_q, total_q) with cu_seqlens_q, found 3 dims"},
          {"LSE in cu_seqlens_q", [](A& a) { a.softmax_lse.data = a.cu_seqlens_q.data; },
           "softmax_lse: shares memory with cu_seqlens_q", ""},
          {"num_splits 257", [](A& a) { a.num_splits = 257; }, "num_splits:", "256, found 257"},
      });
  check_allowed(varlen_call(), [](A& a) { a.cu_seqlens_q.stride[0] = 1; });
  check_allowed(varlen_call(), [](A& a) { a.seqused_k = lengths_at(9 * kMiB, 3); });
  check_allowed(varlen_call(), [](A& a) { a.seqused_q = lengths_at(9 * kMiB, 3); });
  check_allowed(varlen_call(), [](A& a) {  // no sequence
    a.cu_seqlens_q.shape[0] = 1;
    a.cu_seqlens_k.shape[0] = 1;
    a.cu_seqlens_q.stride[0] = 77;
  });
  check_allowed(varlen_call(), [](A& a) {  // no rows
    a.q.shape[0] = 0;
    a.q.data = nullptr;
    a.out.shape[0] = 0;
    a.softmax_lse.shape[1] = 0;
  });
}

TEST_CASE("validate: pages") {
  check_all(
      paged_call(),
      {
          {"cu_seqlens_k as well", [](A& a) { a.cu_seqlens_k = lengths_at(10 * kMiB, 4); },
           "cu_seqlens_k:", "page_table"},
          {"no lengths", [](A& a) { a.seqused_k = {}; }, "seqused_k:", "needed with page_table"},
          {"two kinds of lengths", [](A& a) { a.seqused_k_all = 5; }, "seqused_k:", "together"},
          {"packed k", [](A& a) { a.k = contiguous(2 * kMiB, DataType::kBFloat16, {30, 2, 64}); },
           "k:", "(pages, page_size, heads_k, head_dim) with page_table"},
          {"v of other pages", [](A& a) { a.v.shape[1] = 8; }, "v: dim 1 (page_size)", "must be 16, as in k"},
          {"v of fewer pages", [](A& a) { a.v.shape[0] = 8; }, "v: dim 0 (pages)", "must be 12, as in k"},
          {"a table with one dim", [](A& a) { a.page_table.rank = 1; }, "page_table:", "(batch, pages of a sequence)"},
          {"a table for 4 sequences", [](A& a) { a.page_table.shape[0] = 4; }, "page_table: dim 0 (batch)",
           "must be 3, as in cu_seqlens_q"},
          {"an int64 table", [](A& a) { a.page_table.dtype = DataType::kUnsupported; }, "page_table: dtype", "int32",
           Kind::kInvalidType},
          {"a table on the CPU", [](A& a) { a.page_table.device = kCpuDevice; }, "page_table:", "CPU"},
          {"a transposed table",
           [](A& a) {
             a.page_table.stride[0] = 1;
             a.page_table.stride[1] = 3;
           },
           "page_table: stride of the last dim", "found 3"},
          {"a table that goes back", [](A& a) { a.page_table.stride[0] = -5; }, "page_table: stride of dim 0 (batch)",
           "negative"},
          {"pages without rows",
           [](A& a) {
             a.k.shape[1] = 0;
             a.v.shape[1] = 0;
           },
           "k: dim 1 (page_size)", "at least 1"},
          {"more keys than positions", [](A& a) { a.page_table.shape[1] = (1 << 25) + 1; },
           "page_table:", "16 must be at most 536870912 keys"},
          {"more pages than 2^29",
           [](A& a) {
             a.k.shape[0] = (1 << 29) + 1;
             a.v.shape[0] = (1 << 29) + 1;
           },
           "k: dim 0", "536870913"},
          {"cache_batch_idx", [](A& a) { a.cache_batch_idx = lengths_at(10 * kMiB, 3); },
           "cache_batch_idx:", "page_table"},
          {"workspace in the table",
           [](A& a) {
             a.workspace = contiguous(reinterpret_cast<std::uintptr_t>(a.page_table.data), DataType::kUInt8, {64});
           },
           "workspace: shares memory with page_table", ""},
      });
  check_allowed(paged_call(), [](A& a) { a.page_table.stride[0] = 4096; });
  check_allowed(paged_call(), [](A& a) { a.page_table.stride[0] = 0; });
  check_allowed(paged_call(), [](A& a) {
    a.seqused_k = {};
    a.seqused_k_all = 1000;
  });
  check_allowed(paged_call(), [](A& a) {  // K and V of a page one after another
    a.v.data = static_cast<char*>(a.k.data) + 16 * 2 * 64 * 2;
    a.k.stride[0] *= 2;
    a.v.stride[0] *= 2;
  });
  for (std::int64_t const page_size : {1, 3, 7, 8, 24, 256, 1024}) {
    check_allowed(paged_call(), [=](A& a) {
      a.k = contiguous(16 * kMiB, DataType::kBFloat16, {12, page_size, 2, 64});
      a.v = contiguous(32 * kMiB, DataType::kBFloat16, {12, page_size, 2, 64});
    });
  }
  check_allowed(paged_call(), [](A& a) {  // 2^29 pages of one key of one head of 8 dims
    a.q = contiguous(1 * kMiB, DataType::kBFloat16, {20, 4, 8});
    a.out = contiguous(4 * kMiB, DataType::kBFloat16, {20, 4, 8});
    a.k = contiguous(std::uintptr_t{1} << 40, DataType::kBFloat16, {1 << 29, 1, 1, 8});
    a.v = contiguous(std::uintptr_t{2} << 40, DataType::kBFloat16, {1 << 29, 1, 1, 8});
  });
}

TEST_CASE("validate: caches, appended keys, context parallelism") {
  check_all(cache_call(),
            {
                {"another batch without cache_batch_idx", [](A& a) { a.cache_batch_idx = {}; }, "k: dim 0 (batch)",
                 "must be 3, as in q"},
                {"indices for 4 sequences", [](A& a) { a.cache_batch_idx.shape[0] = 4; },
                 "cache_batch_idx:", "3 for the batch of q, found 4"},
                {"padding for 4 sequences", [](A& a) { a.cache_leftpad = lengths_at(10 * kMiB, 4); },
                 "cache_leftpad:", "found 4"},
                {"new offsets for 3 elements", [](A& a) { a.cu_seqlens_k_new = lengths_at(10 * kMiB, 3); },
                 "cu_seqlens_k_new:", "batch + 1 elements, 4"},
                {"new keys twice",
                 [](A& a) {
                   a.cu_seqlens_k_new = lengths_at(10 * kMiB, 4);
                   a.seqlen_k_new = 1;
                 },
                 "cu_seqlens_k_new:", "seqlen_k_new"},
                {"negative new keys", [](A& a) { a.seqlen_k_new = -1; }, "seqlen_k_new:", "found -1"},
                {"lengths twice", [](A& a) { a.seqused_k_all = 0; }, "seqused_k:", "together"},
                {"a length below -1", [](A& a) { a.seqused_k_all = -2; }, "seqused_k:", "found -2"},
                {"no ranks", [](A& a) { a.cp_world_size = 0; }, "cp_world_size:", "found 0"},
                {"too many ranks", [](A& a) { a.cp_world_size = 1 << 20; }, "cp_", ""},
                {"no such rank",
                 [](A& a) {
                   a.cp_world_size = 2;
                   a.cp_rank = 2;
                   a.cp_tot_seqused_k = lengths_at(10 * kMiB, 3);
                 },
                 "cp_rank:", "0 to 1"},
                {"ranks without totals", [](A& a) { a.cp_world_size = 2; },
                 "cp_tot_seqused_k:", "needed with cp_world_size 2"},
                {"totals without ranks", [](A& a) { a.cp_tot_seqused_k = lengths_at(10 * kMiB, 3); },
                 "cp_tot_seqused_k:", "cp_world_size 1"},
                {"totals for 2 sequences",
                 [](A& a) {
                   a.cp_world_size = 2;
                   a.cp_tot_seqused_k = lengths_at(10 * kMiB, 2);
                 },
                 "cp_tot_seqused_k:", "found 2"},
            });
  check_allowed(cache_call(), [](A& a) { a.cache_leftpad = lengths_at(10 * kMiB, 3); });
  check_allowed(cache_call(), [](A& a) { a.seqlen_k_new = std::int64_t{1} << 62; });
  check_allowed(cache_call(), [](A& a) {
    a.seqused_k = {};
    a.seqused_k_all = std::int64_t{1} << 62;
  });
}

TEST_CASE("validate: schedule and workspace of a call") {
  auto const with = [](std::function<void(A&)> const& more) {
    return [=](A& a) {
      a.scheduler_metadata = lengths_at(16 * kMiB, schedule_size(3));
      a.workspace = contiguous(32 * kMiB, DataType::kUInt8, {4096});
      more(a);
    };
  };
  check_all(
      paged_call(),
      {
          {"metadata too short", with([](A& a) { a.scheduler_metadata.shape[0] = 16; }),
           "scheduler_metadata:", "at least 17 elements for 3 sequences, found 16"},
          {"metadata with two dims", with([](A& a) { a.scheduler_metadata.rank = 2; }),
           "scheduler_metadata:", "2 dims"},
          {"int64 metadata", with([](A& a) { a.scheduler_metadata.dtype = DataType::kUnsupported; }),
           "scheduler_metadata: dtype", "int32", Kind::kInvalidType},
          {"metadata on the CPU", with([](A& a) { a.scheduler_metadata.device = kCpuDevice; }),
           "scheduler_metadata:", "CPU"},
          {"metadata with gaps", with([](A& a) { a.scheduler_metadata.stride[0] = 2; }),
           "scheduler_metadata: must be contiguous", "2"},
          {"workspace of floats", with([](A& a) { a.workspace.dtype = DataType::kFloat32; }), "workspace: dtype",
           "uint8, found fp32", Kind::kInvalidType},
          {"workspace of rows", with([](A& a) { a.workspace = contiguous(32 * kMiB, DataType::kUInt8, {64, 64}); }),
           "workspace:", "(bytes,), found (64, 64)"},
          {"workspace on the CPU", with([](A& a) { a.workspace.device = kCpuDevice; }), "workspace:", "CPU"},
          {"workspace at 8 bytes", with([](A& a) { a.workspace.data = static_cast<char*>(a.workspace.data) + 8; }),
           "workspace: the address", "16 bytes"},
          {"workspace with gaps", with([](A& a) { a.workspace.stride[0] = 2; }), "workspace: must be contiguous", ""},
          {"workspace in metadata", with([](A& a) { a.workspace.data = a.scheduler_metadata.data; }),
           "workspace: shares memory with scheduler_metadata", ""},
          {"workspace in out", with([](A& a) { a.workspace.data = a.out.data; }), "out: shares memory with workspace",
           ""},
          {"LSE in the workspace", with([](A& a) { a.softmax_lse.data = a.workspace.data; }),
           "softmax_lse: shares memory with workspace", ""},
      });
  check_allowed(paged_call(), with([](A& a) { a.scheduler_metadata.shape[0] = 1000; }));
  Arguments args = paged_call();
  with([](A&) {})(args);
  CHECK(validate(args).has_metadata);
  CHECK_FALSE(validate(paged_call()).has_metadata);
  CHECK_FALSE(validate(varlen_call()).seqused_q);
  args = varlen_call();
  args.seqused_q = lengths_at(9 * kMiB, 3);
  CHECK(validate(args).seqused_q);
}

TEST_CASE("validate: out, softmax_lse and the workspace lie in no tensor that is read") {
  Arguments packed = varlen_call();
  packed.seqused_q = lengths_at(10 * kMiB, 3);
  Arguments paged = paged_call();
  paged.scheduler_metadata = lengths_at(10 * kMiB, schedule_size(3));
  Arguments cache = cache_call();
  cache.cache_leftpad = lengths_at(10 * kMiB, 3);
  cache.cu_seqlens_k_new = lengths_at(11 * kMiB, 4);
  cache.cp_world_size = 2;
  cache.cp_tot_seqused_k = lengths_at(12 * kMiB, 3);
  struct Read {
    char const* name;
    Tensor A::* tensor;
    Arguments const& call;
  };
  for (Read const& read : {Read{"q", &A::q, cache},
                           {"k", &A::k, cache},
                           {"v", &A::v, cache},
                           {"sinks (s_aux)", &A::sinks, cache},
                           {"cu_seqlens_q", &A::cu_seqlens_q, packed},
                           {"cu_seqlens_k", &A::cu_seqlens_k, packed},
                           {"seqused_q", &A::seqused_q, packed},
                           {"seqused_k", &A::seqused_k, cache},
                           {"page_table", &A::page_table, paged},
                           {"cache_batch_idx", &A::cache_batch_idx, cache},
                           {"cache_leftpad", &A::cache_leftpad, cache},
                           {"cu_seqlens_k_new", &A::cu_seqlens_k_new, cache},
                           {"cp_tot_seqused_k", &A::cp_tot_seqused_k, cache},
                           {"scheduler_metadata", &A::scheduler_metadata, paged}}) {
    for (auto const& [name, written] :
         {std::pair{"out", &A::out}, {"softmax_lse", &A::softmax_lse}, {"workspace", &A::workspace}}) {
      Arguments args = read.call;
      args.workspace = contiguous(32 * kMiB, DataType::kUInt8, {64});
      REQUIRE(outcome(args).message == "");
      (args.*written).data = (args.*read.tensor).data;
      CHECK(outcome(args).message.find(std::string(name) + ": shares memory with " + read.name + ",") == 0);
    }
  }
}

TEST_CASE("validate: what the problem says of layouts and bounds") {
  SUBCASE("packed") {
    Arguments args = varlen_call();
    Problem p = validate(args);
    CHECK(p.batch == 3);
    CHECK(p.seqlen_q == 20);
    CHECK(p.total_q == 20);
    CHECK(p.seqlen_k == 30);
    CHECK(p.ragged);
    CHECK(p.packed_q);
    CHECK(p.keys == KeyLayout::kVarlen);
    CHECK(p.page_size == 0);
    args.max_seqlen_q = 7;
    args.max_seqlen_k = 9;
    CHECK(validate(args).seqlen_q == 7);
    CHECK(validate(args).seqlen_k == 9);
    CHECK(validate(args).total_q == 20);
    args.max_seqlen_q = std::int64_t{1} << 40;
    args.max_seqlen_k = 131072;
    CHECK(validate(args) == p);
  }
  SUBCASE("pages") {
    Arguments args = paged_call();
    Problem const p = validate(args);
    CHECK(p.keys == KeyLayout::kPaged);
    CHECK(p.page_size == 16);
    CHECK(p.seqlen_k == 80);
    args.max_seqlen_k = 33;
    CHECK(validate(args).seqlen_k == 33);
    args.seqused_k = {};
    args.seqused_k_all = 20;
    CHECK(validate(args).seqlen_k == 20);
    args.seqlen_k_new = 5;
    CHECK(validate(args).seqlen_k == 25);
    args.max_seqlen_k = -1;
    args.seqlen_k_new = 1000;
    CHECK(validate(args).seqlen_k == 80);
    args.k = contiguous(2 * kMiB, DataType::kBFloat16, {12, 1, 2, 64});
    args.v = contiguous(3 * kMiB, DataType::kBFloat16, {12, 1, 2, 64});
    CHECK(validate(args).keys == KeyLayout::kPaged);
    CHECK(validate(args).page_size == 1);
  }
  SUBCASE("a cache with lengths on the device") {
    Arguments args = cache_call();
    args.max_seqlen_q = 99;  // without effect on a dense q
    Problem const p = validate(args);
    CHECK(p.batch == 3);
    CHECK(p.seqlen_q == 1);
    CHECK(p.total_q == 3);
    CHECK(p.seqlen_k == 100);
    CHECK(p.ragged);
    CHECK_FALSE(p.packed_q);
    CHECK(p.keys == KeyLayout::kDense);
    for (Tensor Arguments::* const tensor :
         {&A::seqused_q, &A::seqused_k, &A::cache_leftpad, &A::cu_seqlens_k_new, &A::cp_tot_seqused_k}) {
      Arguments one = valid_call();
      bool const offsets = tensor == &A::cu_seqlens_k_new;
      one.*tensor = lengths_at(9 * kMiB, offsets ? 3 : 2);
      one.cp_world_size = tensor == &A::cp_tot_seqused_k ? 2 : 1;
      CHECK(validate(one).ragged);
    }
  }
  SUBCASE("a cache whose lengths are known") {
    Arguments args = cache_call();
    args.seqused_k = {};
    CHECK_FALSE(validate(args).ragged);
    CHECK(validate(args).seqlen_k == 100);
    args.seqused_k_all = 40;
    CHECK(validate(args).seqlen_k == 40);
    args.seqlen_k_new = 2;
    CHECK(validate(args).seqlen_k == 42);
    args.max_seqlen_k = 7;  // a bound, while the length is known
    CHECK(validate(args).seqlen_k == 42);
    args.seqused_k_all = 99;
    CHECK(validate(args).seqlen_k == 100);
    CHECK_FALSE(validate(args).ragged);
  }
  SUBCASE("context parallelism") {
    Arguments args = cache_call();
    args.cp_world_size = 4;
    args.cp_rank = 3;
    args.cp_tot_seqused_k = lengths_at(10 * kMiB, 3);
    CHECK(validate(args).mask == MaskParams{.cp_world = 4, .cp_rank = 3});
  }
}

TEST_CASE("validate: masks of ragged problems do not follow from bounds, and show what was asked") {
  std::mt19937 random(7);
  auto const pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 3000; ++i) {
    MaskParams const asked{.left = pick(-1, 40), .right = pick(-1, 40), .chunk = pick(0, 1) * pick(0, 40)};
    Arguments args = varlen_call();
    args.window_left = asked.left;
    args.window_right = asked.right;
    args.attention_chunk = asked.chunk;
    bool const parallel = pick(0, 1) == 1;
    MaskParams meant = asked;
    if (parallel) {
      args.cp_world_size = meant.cp_world = pick(2, 4);
      args.cp_rank = meant.cp_rank = pick(0, meant.cp_world - 1);
      args.cp_tot_seqused_k = lengths_at(10 * kMiB, 3);
    }
    MaskParams const canonical = validate(args).mask;
    args.max_seqlen_q = 1;
    args.max_seqlen_k = 3;
    REQUIRE(validate(args).mask == canonical);
    int const total = pick(0, 60);
    int const local = parallel ? (total - meant.cp_rank + meant.cp_world - 1) / meant.cp_world : total;
    SeqlenQK const len{pick(1, 20), local, total};
    for (int row = 0; row < len.q; ++row) {
      KeyInterval const a = visible(meant, row, len);
      KeyInterval const b = visible(canonical, row, len);
      CAPTURE(row);
      REQUIRE((a.empty() ? b.empty() : a.begin == b.begin && a.end == b.end));
    }
  }
  Arguments args = varlen_call();
  args.window_left = std::int64_t{1} << 62;
  args.window_right = std::int64_t{1} << 29;
  CHECK(validate(args).mask == MaskParams{});
  args.causal = true;
  args.attention_chunk = std::int64_t{1} << 62;
  CHECK(validate(args).mask == MaskParams{.right = 0});
  args.causal = false;
  CHECK(validate(args).mask == MaskParams{.chunk = 1 << 29});
  Arguments one_query = cache_call();
  one_query.causal = true;
  CHECK(validate(one_query).mask == MaskParams{.right = 0});
}

TEST_CASE("validate: what a schedule is made for") {
  ScheduleArguments right;
  right.shape = {DataType::kBFloat16, 5, 1, 4096, 32, 8, 128, 128, false, 16};
  right.metadata = lengths_at(1 * kMiB, schedule_size(5));
  right.options.seqused_k = lengths_at(2 * kMiB, 5);
  right.options.cu_seqlens_q = lengths_at(3 * kMiB, 6);
  REQUIRE(outcome(right).message == "");
  Problem const p = validate(right);
  CHECK(p.ragged);
  CHECK(p.packed_q);
  CHECK(p.keys == KeyLayout::kPaged);
  CHECK(p.page_size == 16);
  struct Case {
    std::function<void(ScheduleArguments&)> spoil;
    char const* message;
  };
  for (Case const& c :
       {Case{[](auto& a) { a.metadata = {}; }, "out (metadata): a tensor is required"},
        {[](auto& a) { a.metadata.device = kCpuDevice; }, "out (metadata): must be on a CUDA device"},
        {[](auto& a) { a.metadata.shape[0] = 32; }, "out (metadata): must have at least 33"},
        {[](auto& a) { a.metadata.dtype = DataType::kFloat32; }, "out (metadata): dtype"},
        {[](auto& a) { a.options.seqused_k.shape[0] = 4; }, "seqused_k: must have batch elements, 5"},
        {[](auto& a) { a.options.seqused_k.device = 1; }, "seqused_k: must be on the device of out"},
        {[](auto& a) { a.options.cu_seqlens_q.shape[0] = 5; }, "cu_seqlens_q: must have batch + 1"},
        {[](auto& a) { a.metadata.data = a.options.seqused_k.data; }, "out (metadata): shares memory with seqused_k"},
        {[](auto& a) { a.shape.heads_k = 5; }, "q: heads must be a multiple"},
        {[](auto& a) { a.shape.page_size = -1; }, "page_size: must be between 0"},
        {[](auto& a) { a.options.num_splits = 300; }, "num_splits:"}}) {
    ScheduleArguments args = right;
    c.spoil(args);
    CAPTURE(c.message);
    CHECK(outcome(args).message.find(c.message) == 0);
  }
  for (auto const& [name, tensor] : {std::pair{"cu_seqlens_q", &A::cu_seqlens_q},
                                     {"cu_seqlens_k", &A::cu_seqlens_k},
                                     {"seqused_q", &A::seqused_q},
                                     {"seqused_k", &A::seqused_k},
                                     {"cache_leftpad", &A::cache_leftpad},
                                     {"cu_seqlens_k_new", &A::cu_seqlens_k_new},
                                     {"cp_tot_seqused_k", &A::cp_tot_seqused_k}}) {
    ScheduleArguments args = right;
    if (tensor == &A::cp_tot_seqused_k) { args.options.cp_world_size = 2; }
    bool const offsets = std::string(name).starts_with("cu_");
    args.options.*tensor = lengths_at(4 * kMiB, offsets ? 6 : 5);
    REQUIRE(outcome(args).message == "");
    args.metadata.data = (args.options.*tensor).data;
    CHECK(outcome(args).message.find(std::string("out (metadata): shares memory with ") + name + ",") == 0);
  }
  ScheduleArguments large = right;  // bounds alone refuse nothing that a packed q can have
  large.shape.batch = 4096;
  large.shape.seqlen_q = 1 << 20;
  large.shape.heads_q = 64;
  large.metadata = lengths_at(1 * kMiB, schedule_size(4096));
  large.options.seqused_k = lengths_at(2 * kMiB, 4096);
  large.options.cu_seqlens_q = lengths_at(3 * kMiB, 4097);
  CHECK(outcome(large).message == "");
}

}  // namespace hopper_attention
