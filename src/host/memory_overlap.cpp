#include "host/memory_overlap.h"

#include <algorithm>
#include <array>
#include <utility>

namespace hopper_attention {
namespace {

// stride * x for low <= x <= high, in bytes.
struct Term {
  std::int64_t stride;
  std::int64_t low;
  std::int64_t high;
};

struct Terms {
  std::array<Term, 2 * kMaxRank + 1> items{};
  int count = 0;

  void add(std::int64_t stride, std::int64_t low, std::int64_t high) {
    auto const end = items.begin() + count;
    auto const same = std::find_if(items.begin(), end, [&](Term const& term) { return term.stride == stride; });
    if (same != end) {
      same->low += low;
      same->high += high;
    } else {
      items[count++] = {stride, low, high};
    }
  }
};

// The view as rows of `width` contiguous bytes: its last dim, if that has stride 1.
struct Rows {
  std::int64_t width;
  int dims;  // the dims before it
};

Rows rows_of(Tensor const& tensor) {
  std::int64_t const bytes = element_bytes(tensor.dtype);
  int const last = tensor.rank - 1;
  if (last >= 0 && (tensor.stride[last] == 1 || tensor.shape[last] == 1)) { return {tensor.shape[last] * bytes, last}; }
  return {bytes, tensor.rank};
}

bool has_elements(Tensor const& tensor) {
  return std::all_of(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, [](std::int64_t n) { return n > 0; });
}

constexpr int kMaxSearchSteps = 1 << 14;

// Is `target` a sum of the terms?
class Search {
 public:
  explicit Search(Terms terms) : terms_(terms) {
    std::sort(terms_.items.begin(), terms_.items.begin() + terms_.count,
              [](Term const& a, Term const& b) { return a.stride > b.stride; });
    for (int level = terms_.count - 1; level >= 0; --level) {
      Term const& term = terms_.items[level];
      low_[level] = low_[level + 1] + term.stride * term.low;
      high_[level] = high_[level + 1] + term.stride * term.high;
    }
  }

  Overlap run(std::int64_t target) { return step(0, target); }

 private:
  static std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
  static std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return -floor_div(-a, b); }

  Overlap step(int level, std::int64_t target) {
    if (target < low_[level] || target > high_[level]) { return Overlap::kNone; }
    if (level == terms_.count - 1) {
      return target % terms_.items[level].stride == 0 ? Overlap::kShared : Overlap::kNone;
    }
    Term const& term = terms_.items[level];
    std::int64_t const first = std::max(term.low, ceil_div(target - high_[level + 1], term.stride));
    std::int64_t const last = std::min(term.high, floor_div(target - low_[level + 1], term.stride));
    for (std::int64_t x = first; x <= last; ++x) {
      if (++steps_ > kMaxSearchSteps) { return Overlap::kUnknown; }
      if (Overlap const found = step(level + 1, target - term.stride * x); found != Overlap::kNone) { return found; }
    }
    return Overlap::kNone;
  }

  Terms terms_;
  std::array<std::int64_t, 2 * kMaxRank + 2> low_{};   // least sum of the terms from a level on
  std::array<std::int64_t, 2 * kMaxRank + 2> high_{};  // greatest
  int steps_ = 0;
};

}  // namespace

Overlap overlap(Tensor const& a, Tensor const& b) {
  if (!has_elements(a) || !has_elements(b)) { return Overlap::kNone; }
  AddressRange const range_a = address_range(a);
  AddressRange const range_b = address_range(b);
  if (!range_a.crosses(range_b)) { return Overlap::kNone; }  // the usual case, without a search: separate allocations
  Rows const rows_a = rows_of(a);
  Rows const rows_b = rows_of(b);
  Terms terms;
  // address in a + byte of its row = address in b + byte of its row, with the base addresses on the other side
  terms.add(1, -(rows_b.width - 1), rows_a.width - 1);
  for (int dim = 0; dim < rows_a.dims; ++dim) {
    if (a.shape[dim] > 1 && a.stride[dim] > 0) {
      terms.add(a.stride[dim] * element_bytes(a.dtype), 0, a.shape[dim] - 1);
    }
  }
  for (int dim = 0; dim < rows_b.dims; ++dim) {
    if (b.shape[dim] > 1 && b.stride[dim] > 0) {
      terms.add(b.stride[dim] * element_bytes(b.dtype), 1 - b.shape[dim], 0);
    }
  }
  return Search(terms).run(range_b.begin - range_a.begin);
}

bool elements_are_distinct(Tensor const& tensor) {
  if (!has_elements(tensor)) { return true; }
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> dims;  // stride, size
  int count = 0;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.shape[dim] > 1) { dims[count++] = {tensor.stride[dim], tensor.shape[dim]}; }
  }
  std::sort(dims.begin(), dims.begin() + count);
  std::int64_t reach = 0;  // offset of the last element that the smaller strides address
  for (int dim = 0; dim < count; ++dim) {
    if (dims[dim].first <= reach) { return false; }
    reach += dims[dim].first * (dims[dim].second - 1);
  }
  return true;
}

}  // namespace hopper_attention
