#include "rotated_query.h"

#include <algorithm>
#include <array>

namespace hopper_attention::python {
namespace {

constexpr std::int64_t kElementBytes = 2;  // q is bf16 or fp16

bool is_half(DataType type) { return type == DataType::kBFloat16 || type == DataType::kFloat16; }

std::int64_t round_up(std::int64_t bytes) {
  return (bytes + kRotatedQueryAlignment - 1) / kRotatedQueryAlignment * kRotatedQueryAlignment;
}

// Whether `t` may have elements in [begin, end). What is not of 2 bytes has 4 at most.
bool may_touch(Tensor const& t, std::byte const* begin, std::byte const* end) {
  if (!t.given() || t.data == nullptr) { return false; }
  std::int64_t last = 0;
  for (int dim = 0; dim < t.rank; ++dim) {
    if (t.shape[dim] == 0) { return false; }
    last += (t.shape[dim] - 1) * t.stride[dim];
  }
  auto const* const first = static_cast<std::byte const*>(t.data);
  return first < end && begin < first + (last + 1) * (is_half(t.dtype) ? kElementBytes : 4);
}

}  // namespace

std::int64_t workspace_with_rotated_query(std::int64_t plan_bytes, std::int64_t query_bytes) {
  return round_up(plan_bytes) + round_up(query_bytes);
}

bool take_from_workspace(Arguments& args, AppendArguments& appended) {
  Tensor const& whole = args.workspace;
  Tensor const& q = args.q;
  if (whole.rank != 1 || whole.data == nullptr || whole.dtype != DataType::kUInt8 || whole.stride[0] != 1 ||
      !is_half(q.dtype)) {
    return false;
  }
  std::int64_t bytes = kElementBytes;
  for (int dim = 0; dim < q.rank; ++dim) {
    if (q.shape[dim] != 0 && bytes > whole.shape[0] / q.shape[dim]) { return false; }
    bytes *= q.shape[dim];
  }
  std::int64_t const before = (whole.shape[0] - bytes) / kRotatedQueryAlignment * kRotatedQueryAlignment;
  if (before < workspace_bytes(args)) { return false; }
  auto* const begin = static_cast<std::byte*>(whole.data) + before;
  // append() compares what it is given with the rotated q, attention with the rest of the workspace.
  for (Tensor const* const t :
       std::array{&args.out, &args.softmax_lse, &args.sinks, &args.cu_seqlens_q, &args.seqused_k, &args.page_table,
                  &args.cache_batch_idx, &args.cache_leftpad, &args.cu_seqlens_k_new, &args.cp_tot_seqused_k,
                  &args.scheduler_metadata, &appended.rotary_seqlens}) {
    if (may_touch(*t, begin, begin + bytes)) { return false; }
  }
  Tensor& rotated = appended.q_rotated;
  rotated = q;
  rotated.data = begin;
  std::int64_t stride = 1;
  for (int dim = q.rank - 1; dim >= 0; --dim) {
    rotated.stride[dim] = stride;
    stride *= q.shape[dim];
  }
  args.workspace.shape[0] = before;
  return true;
}

}  // namespace hopper_attention::python
