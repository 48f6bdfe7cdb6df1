// append(): every wrong argument raises before anything runs, and the message begins with the argument's name.
#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hopper_attention/append.h"
#include "tensors.h"

namespace hopper_attention {
namespace {

enum class Kind { kNoError, kInvalidArgument, kInvalidType, kNotImplemented, kOther };

struct Outcome {
  Kind kind = Kind::kNoError;
  std::string message;
};

using A = AppendArguments;

Outcome outcome(A const& args) {
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

constexpr DataType kHalf = DataType::kBFloat16;
constexpr DataType kInt = DataType::kInt32;

// Two sequences, three new keys each, in a cache of nine slots; every tensor in a MiB of its own.
A right_call() {
  A args;
  args.k_new = contiguous(1 * kMiB, kHalf, {2, 3, 2, 64});
  args.v_new = contiguous(2 * kMiB, kHalf, {2, 3, 2, 32});
  args.k_cache = contiguous(3 * kMiB, kHalf, {2, 9, 2, 64});
  args.v_cache = contiguous(4 * kMiB, kHalf, {2, 9, 2, 32});
  args.seqused_k = contiguous(5 * kMiB, kInt, {2});
  return args;
}

A with_rotary() {
  A args = right_call();
  args.rotary_cos = contiguous(6 * kMiB, kHalf, {100, 16});
  args.rotary_sin = contiguous(7 * kMiB, kHalf, {100, 16});
  args.q = contiguous(8 * kMiB, kHalf, {2, 5, 4, 64});
  args.q_rotated = contiguous(9 * kMiB, kHalf, {2, 5, 4, 64});
  return args;
}

A with_queries() {
  A args = with_rotary();
  args.rotary_cos = args.rotary_sin = args.q_rotated = {};
  return args;
}

// Seven pages of four keys, three for each sequence.
A with_pages() {
  A args = with_rotary();
  args.k_cache = contiguous(3 * kMiB, kHalf, {7, 4, 2, 64});
  args.v_cache = contiguous(4 * kMiB, kHalf, {7, 4, 2, 32});
  args.page_table = contiguous(10 * kMiB, kInt, {2, 3});
  return args;
}

A with_packed_tokens() {
  A args = with_pages();
  args.k_new = contiguous(1 * kMiB, kHalf, {11, 2, 64});
  args.v_new = contiguous(2 * kMiB, kHalf, {11, 2, 32});
  args.cu_seqlens_k_new = contiguous(11 * kMiB, kInt, {3});
  args.q = contiguous(8 * kMiB, kHalf, {13, 4, 64});
  args.q_rotated = contiguous(9 * kMiB, kHalf, {13, 4, 64});
  args.cu_seqlens_q = contiguous(12 * kMiB, kInt, {3});
  return args;
}

struct Right {
  char const* why;
  std::function<A()> make;
};

// Pages of K and V by turns in one pool, as the engine of transformers has them: K counts from the first page on and V
// from the one behind it.
A with_pages_by_turns() {
  A args = with_pages();
  args.v_new.shape[3] = 64;
  args.v_new.stride = args.k_new.stride;
  args.v_cache = args.k_cache;
  args.v_cache.data = reinterpret_cast<void*>(3 * kMiB + 4 * 2 * 64 * 2);
  return args;
}

// One wrong thing: what it is, the error and how its message begins, and a part that it must contain.
struct Wrong {
  char const* why;
  std::function<A()> make;
  std::function<void(A&)> spoil;
  Kind kind;
  char const* begins;
  char const* contains;
};

A changed(A args, std::function<void(A&)> const& change) {
  change(args);
  return args;
}

constexpr Kind kArgument = Kind::kInvalidArgument;
constexpr Kind kType = Kind::kInvalidType;
constexpr Kind kMissing = Kind::kNotImplemented;

}  // namespace

TEST_CASE("append: right calls") {
  std::vector<Right> const cases{
      {"dense", right_call},
      {"rotary", with_rotary},
      {"queries that are not rotated", with_queries},
      {"as many columns as there may be",
       [] {
         return changed(right_call(), [](A& a) {
           a.k_new = contiguous(1 * kMiB, kHalf, {2, 3, 2, 256});
           a.k_cache = contiguous(3 * kMiB, kHalf, {2, 9, 2, 256});
         });
       }},
      {"pages", with_pages},
      {"packed tokens", with_packed_tokens},
      {"one length for all", [] { return changed(right_call(), [](A& a) { a.seqused_k = {}, a.seqused_k_all = 0; }); }},
      {"rows of the cache by index",
       [] {
         return changed(right_call(), [](A& a) {
           a.k_cache.shape[0] = a.v_cache.shape[0] = 9;
           a.cache_batch_idx = contiguous(13 * kMiB, kInt, {2});
         });
       }},
      {"cos and sin in fp32",
       [] {
         return changed(with_rotary(), [](A& a) { a.rotary_cos.dtype = a.rotary_sin.dtype = DataType::kFloat32; });
       }},
      {"cos and sin with a row stride of their own",
       [] { return changed(with_rotary(), [](A& a) { a.rotary_cos.stride[0] = 33, a.rotary_sin.stride[0] = 77; }); }},
      {"expanded new keys", [] { return changed(right_call(), [](A& a) { a.k_new.stride[0] = 0; }); }},
      {"odd strides of dims of size 1",
       [] {
         return changed(right_call(), [](A& a) {
           a.k_new.shape[0] = a.v_new.shape[0] = a.k_cache.shape[0] = a.v_cache.shape[0] = a.seqused_k.shape[0] = 1;
           a.k_new.stride[0] = a.k_cache.stride[0] = 3333331;
           a.seqused_k.stride[0] = 5;
         });
       }},
      {"K and V of 20,000 pages interleaved in one tensor",
       [] {
         return changed(with_pages(), [](A& a) {
           a.k_cache = contiguous(64 * kMiB, kHalf, {20000, 16, 2, 64});
           a.k_cache.stride[0] *= 2;
           a.v_cache = a.k_cache;
           a.v_cache.data = reinterpret_cast<void*>(64 * kMiB + 16 * 2 * 64 * 2);
           a.v_new.shape = a.k_new.shape;
           a.v_new.stride = a.k_new.stride;
         });
       }},
      {"K of 192 and V of 128 columns in rows of one tensor",
       [] {
         return changed(with_pages(), [](A& a) {
           a.k_cache = contiguous(64 * kMiB, kHalf, {500, 16, 2, 320});
           a.v_cache = a.k_cache;
           a.v_cache.data = reinterpret_cast<void*>(64 * kMiB + 192 * 2);
           a.k_cache.shape[3] = a.k_new.shape[3] = a.q.shape[3] = a.q_rotated.shape[3] = 192;
           a.v_cache.shape[3] = a.v_new.shape[3] = 128;
           for (Tensor* t : {&a.k_new, &a.v_new, &a.q, &a.q_rotated}) { t->stride = {8192, 1024, 256, 1, 0}; }
         });
       }},
      {"pages of K and V by turns", with_pages_by_turns},
      {"no sequences",
       [] {
         return changed(right_call(), [](A& a) {
           for (Tensor* t : {&a.k_new, &a.v_new, &a.k_cache, &a.v_cache, &a.seqused_k}) {
             t->shape[0] = 0;
             t->data = nullptr;
           }
         });
       }},
  };
  for (Right const& c : cases) {
    CAPTURE(c.why);
    Outcome const found = outcome(c.make());
    CAPTURE(found.message);
    CHECK(found.kind == Kind::kNoError);
  }
}

TEST_CASE("append: what is written shares no memory with lengths and page tables, which are read meanwhile") {
  A packed = with_packed_tokens();
  packed.rotary_seqlens = contiguous(13 * kMiB, kInt, {2});
  A indexed = with_rotary();
  indexed.cache_batch_idx = contiguous(14 * kMiB, kInt, {2});
  struct Read {
    char const* name;
    Tensor A::* tensor;
    A const& call;
  };
  for (auto const& [name, tensor, call] : {Read{"cache_seqlens", &A::seqused_k, packed},
                                           {"page_table", &A::page_table, packed},
                                           {"cu_seqlens_k_new", &A::cu_seqlens_k_new, packed},
                                           {"cu_seqlens_q", &A::cu_seqlens_q, packed},
                                           {"rotary_seqlens", &A::rotary_seqlens, packed},
                                           {"cache_batch_idx", &A::cache_batch_idx, indexed}}) {
    CAPTURE(name);
    REQUIRE(outcome(call).kind == Kind::kNoError);
    for (Tensor A::* written : {&A::k_cache, &A::v_cache, &A::q_rotated}) {
      A args = call;
      (args.*tensor).data = (args.*written).data;
      Outcome const found = outcome(args);
      CHECK(found.kind == kArgument);
      CHECK(found.message.find(": shares memory with " + std::string(name)) != std::string::npos);
    }
  }
}

TEST_CASE("append: wrong calls") {
  std::vector<Wrong> const cases{
      {"no k", right_call, [](A& a) { a.k_new = {}; }, kArgument, "k:", "none was given"},
      {"no v", right_call, [](A& a) { a.v_new = {}; }, kArgument, "v:", "none was given"},
      {"no cache", right_call, [](A& a) { a.v_cache = {}; }, kArgument, "v_cache:", "none was given"},
      {"cache of rank 3", right_call, [](A& a) { a.k_cache.rank = 3; }, kArgument, "k_cache:", "found 3 dims"},
      {"packed k without cu_seqlens", right_call, [](A& a) { a.k_new.rank = 3; }, kArgument, "k:", "seqlen_new"},
      {"dense k with cu_seqlens", right_call, [](A& a) { a.cu_seqlens_k_new = contiguous(kMiB, kInt, {3}); }, kArgument,
       "k:", "with cu_seqlens_k_new"},
      {"cache on the CPU", right_call, [](A& a) { a.k_cache.device = kCpuDevice; }, kArgument, "k_cache:", "CUDA"},
      {"k on another GPU", right_call, [](A& a) { a.k_new.device = 1; }, kArgument, "k:", "cuda:1"},
      {"lengths on the CPU", right_call, [](A& a) { a.seqused_k.device = kCpuDevice; }, kArgument,
       "cache_seqlens:", "the CPU"},
      {"fp32 cache", right_call, [](A& a) { a.k_cache.dtype = DataType::kFloat32; }, kType, "k_cache: dtype", "fp32"},
      {"fp16 k", right_call, [](A& a) { a.k_new.dtype = DataType::kFloat16; }, kType, "k: dtype", "fp16"},
      {"fp16 V cache", right_call, [](A& a) { a.v_cache.dtype = DataType::kFloat16; }, kType, "v_cache: dtype", "fp16"},
      {"lengths that are no int32", right_call, [](A& a) { a.seqused_k.dtype = DataType::kUnsupported; }, kType,
       "cache_seqlens: dtype", "int32"},
      {"heads of k", right_call, [](A& a) { a.k_new.shape[2] = 1; }, kArgument, "k: dim 2 (heads)", "must be 2"},
      {"head dim of v", right_call, [](A& a) { a.v_new.shape[3] = 64; }, kArgument, "v: dim 3 (head_dim)",
       "must be 32"},
      {"sequences of v", right_call, [](A& a) { a.v_new.shape[0] = 3; }, kArgument, "v: dim 0 (batch)", "must be 2"},
      {"tokens of v", right_call, [](A& a) { a.v_new.shape[1] = 4; }, kArgument, "v: dim 1 (tokens)", "must be 3"},
      {"slots of the V cache", right_call, [](A& a) { a.v_cache.shape[1] = 8; }, kArgument, "v_cache: dim 1", "be 9"},
      {"head dim 60", right_call, [](A& a) { a.k_cache.shape[3] = 60; }, kArgument, "k_cache: head_dim", "found 60"},
      {"head dim 264", right_call, [](A& a) { a.v_cache.shape[3] = 264; }, kMissing, "v_cache: head_dim", "264"},
      {"no heads", right_call, [](A& a) { a.k_cache.shape[2] = a.v_cache.shape[2] = 0; }, kArgument, "k_cache: heads",
       "found 0"},
      {"batch of the cache", right_call, [](A& a) { a.k_cache.shape[0] = a.v_cache.shape[0] = 3; }, kArgument,
       "k_cache: dim 0 (batch) must be 2", "cache_batch_idx"},
      {"no lengths", right_call, [](A& a) { a.seqused_k = {}; }, kArgument, "cache_seqlens:", "needed"},
      {"lengths twice", right_call, [](A& a) { a.seqused_k_all = 3; }, kArgument, "cache_seqlens:", "one of them"},
      {"lengths of another batch", right_call, [](A& a) { a.seqused_k.shape[0] = 3; }, kArgument,
       "cache_seqlens: must have batch elements, 2", "found 3"},
      {"lengths with gaps", right_call, [](A& a) { a.seqused_k.stride[0] = 2; }, kArgument,
       "cache_seqlens:", "stride of dim 0 is 2"},
      {"k with odd row stride", right_call, [](A& a) { a.k_new.stride[1] = 132; }, kArgument, "k: stride of dim 1",
       "multiple of 8"},
      {"last stride of the cache", right_call, [](A& a) { a.k_cache.stride[3] = 2; }, kArgument,
       "k_cache: stride of the last", "found 2"},
      {"negative stride", right_call, [](A& a) { a.v_new.stride[0] = -64; }, kArgument, "v: stride of dim 0",
       "negative"},
      {"stride beyond all memory", right_call, [](A& a) { a.v_new.stride[0] = std::int64_t{1} << 62; }, kArgument,
       "v: stride", "2^40"},
      {"k within a vector", right_call, [](A& a) { a.k_new.data = reinterpret_cast<void*>(kMiB + 2); }, kArgument,
       "k: the address", "16 bytes"},
      {"null cache", right_call, [](A& a) { a.k_cache.data = nullptr; }, kArgument, "k_cache: the data pointer",
       "null"},
      {"expanded cache", right_call, [](A& a) { a.k_cache.stride[0] = 0; }, kArgument, "k_cache: elements share", ""},
      {"K and V are one", right_call, [](A& a) { a.v_cache.data = a.k_cache.data; }, kArgument, "k_cache: shares",
       "v_cache"},
      {"k is in the cache", right_call, [](A& a) { a.k_new.data = a.k_cache.data; }, kArgument, "k_cache: shares",
       "k,"},
      {"V half a page behind K", with_pages_by_turns,
       [](A& a) { a.v_cache.data = reinterpret_cast<void*>(3 * kMiB + 2 * 2 * 64 * 2); }, kArgument, "k_cache: shares",
       "v_cache"},
      {"K and V are the same pages", with_pages_by_turns, [](A& a) { a.v_cache.data = a.k_cache.data; }, kArgument,
       "k_cache: shares", "v_cache"},
      {"V one sequence behind K, without pages", right_call,
       [](A& a) {
         a.v_new.shape[3] = 64;
         a.v_new.stride = a.k_new.stride;
         a.v_cache = a.k_cache;
         a.v_cache.data = reinterpret_cast<void*>(3 * kMiB + 9 * 2 * 64 * 2);
       },
       kArgument, "k_cache: shares", "v_cache"},
      {"V one page behind K, pages within each other", with_pages_by_turns,
       [](A& a) {
         a.k_cache.stride = a.v_cache.stride = {64, 8 * 128, 8 * 64 * 8, 1, 0};
         a.v_cache.data = reinterpret_cast<void*>(3 * kMiB + 64 * 2);
       },
       kArgument, "k_cache: shares", "v_cache"},
      {"k among pages by turns", with_pages_by_turns,
       [](A& a) { a.k_new.data = reinterpret_cast<void*>(3 * kMiB + 7 * 4 * 2 * 64 * 2); }, kArgument,
       "v_cache: shares", "k,"},
      {"too many rows", right_call,
       [](A& a) {
         a.k_new.shape[1] = a.v_new.shape[1] = std::int64_t{1} << 28;
         a.k_new.stride[0] = a.v_new.stride[0] = 0;
       },
       kArgument, "k: at most 2^29 rows", "split"},
      {"page table of rank 1", with_pages, [](A& a) { a.page_table.rank = 1; }, kArgument,
       "page_table:", "found 1 dims"},
      {"page table of int64", with_pages, [](A& a) { a.page_table.dtype = DataType::kUnsupported; }, kType,
       "page_table: dtype", "int32"},
      {"page table on the CPU", with_pages, [](A& a) { a.page_table.device = kCpuDevice; }, kArgument,
       "page_table:", "the CPU"},
      {"page table of another batch", with_pages, [](A& a) { a.page_table.shape[0] = 1; }, kArgument,
       "page_table: dim 0", "must be 2"},
      {"page table with gaps", with_pages, [](A& a) { a.page_table.stride[1] = 2; }, kArgument, "page_table: stride",
       "2"},
      {"pages and index", with_pages, [](A& a) { a.cache_batch_idx = contiguous(13 * kMiB, kInt, {2}); }, kArgument,
       "cache_batch_idx:", "page_table"},
      {"empty cu_seqlens_k_new", with_packed_tokens, [](A& a) { a.cu_seqlens_k_new.shape[0] = 0; }, kArgument,
       "cu_seqlens_k_new:", "(batch + 1,)"},
      {"cu_seqlens_k_new on the CPU", with_packed_tokens, [](A& a) { a.cu_seqlens_k_new.device = kCpuDevice; },
       kArgument, "cu_seqlens_k_new:", "the CPU"},
      {"cu_seqlens_k_new of int64", with_packed_tokens, [](A& a) { a.cu_seqlens_k_new.dtype = DataType::kUnsupported; },
       kType, "cu_seqlens_k_new: dtype", "int32"},
      {"cu_seqlens_k_new with gaps", with_packed_tokens, [](A& a) { a.cu_seqlens_k_new.stride[0] = 2; }, kArgument,
       "cu_seqlens_k_new: must be contiguous", "2"},
      {"cu_seqlens_q of another batch", with_packed_tokens, [](A& a) { a.cu_seqlens_q.shape[0] = 2; }, kArgument,
       "cu_seqlens_q: must have batch + 1 elements, 3", "found 2"},
      {"cos alone", with_rotary, [](A& a) { a.rotary_sin = {}; }, kArgument, "rotary_sin:", "together"},
      {"sin alone", with_rotary, [](A& a) { a.rotary_cos = {}; }, kArgument, "rotary_cos:", "together"},
      {"cos in fp16", with_rotary, [](A& a) { a.rotary_cos.dtype = DataType::kFloat16; }, kType, "rotary_cos: dtype",
       "fp16"},
      {"sin in another dtype", with_rotary, [](A& a) { a.rotary_sin.dtype = DataType::kFloat32; }, kType,
       "rotary_sin: dtype", "fp32"},
      {"cos on the CPU", with_rotary, [](A& a) { a.rotary_cos.device = kCpuDevice; }, kArgument,
       "rotary_cos:", "the CPU"},
      {"sin on another GPU", with_rotary, [](A& a) { a.rotary_sin.device = 1; }, kArgument, "rotary_sin:", "cuda:1"},
      {"cos that goes back", with_rotary, [](A& a) { a.rotary_cos.stride[0] = -16; }, kArgument,
       "rotary_cos: stride of dim 0", "negative"},
      {"cos of another width", with_rotary, [](A& a) { a.rotary_sin.shape[1] = 8; }, kArgument, "rotary_sin: dim 1",
       "16"},
      {"cos without positions", with_rotary, [](A& a) { a.rotary_cos.shape[0] = a.rotary_sin.shape[0] = 0; }, kArgument,
       "rotary_cos: has no positions", ""},
      {"more columns than there are", with_rotary, [](A& a) { a.rotary_cos.shape[1] = a.rotary_sin.shape[1] = 33; },
       kArgument, "rotary_cos: covers 66 columns", "64"},
      {"rotary without q", with_rotary, [](A& a) { a.q = {}; }, kArgument, "q:", "none was given"},
      {"rotary without q_rotated", with_rotary, [](A& a) { a.q_rotated = {}; }, kArgument, "q_rotated:", "none"},
      {"q_rotated without rotary", with_rotary, [](A& a) { a.rotary_cos = a.rotary_sin = {}; }, kArgument,
       "q_rotated:", "rotary_cos"},
      {"q in the cache", with_queries, [](A& a) { a.q.data = a.k_cache.data; }, kArgument, "k_cache: shares", "q,"},
      {"q in the V cache", with_queries, [](A& a) { a.q.data = a.v_cache.data; }, kArgument, "v_cache: shares", "q,"},
      {"q among pages by turns", with_pages_by_turns,
       [](A& a) {
         a.rotary_cos = a.rotary_sin = a.q_rotated = {};
         a.q.data = reinterpret_cast<void*>(3 * kMiB + 7 * 4 * 2 * 64 * 2);
       },
       kArgument, "v_cache: shares", "q,"},
      {"batch of q that is not rotated", with_queries, [](A& a) { a.q.shape[0] = 3; }, kArgument, "q: dim 0 (batch)",
       "must be 2"},
      {"batch of q", with_rotary, [](A& a) { a.q.shape[0] = 3; }, kArgument, "q: dim 0 (batch)", "must be 2"},
      {"head dim of q", with_rotary, [](A& a) { a.q.shape[3] = 32; }, kArgument, "q: dim 3 (head_dim)", "must be 64"},
      {"heads of q", with_rotary, [](A& a) { a.q.shape[2] = 3; }, kArgument, "q: heads", "3 and 2"},
      {"shape of q_rotated", with_rotary, [](A& a) { a.q_rotated.shape[1] = 4; }, kArgument, "q_rotated: must have",
       "(2, 5"},
      {"q rotated in place", with_rotary, [](A& a) { a.q_rotated.data = a.q.data; }, kArgument, "q_rotated: shares",
       "q,"},
      {"expanded q_rotated", with_rotary, [](A& a) { a.q_rotated.stride[1] = 0; }, kArgument, "q_rotated: elements",
       ""},
      {"rotary_seqlens of another batch", with_rotary,
       [](A& a) { a.rotary_seqlens = contiguous(13 * kMiB, kInt, {1}); }, kArgument, "rotary_seqlens:", "found 1"},
  };
  for (Wrong const& c : cases) {
    A args = c.make();
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

}  // namespace hopper_attention
