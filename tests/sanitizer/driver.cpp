// Small calls over all functions of the library, for compute-sanitizer, whose tools make kernels 10 to 1,000 times
// slower; `tools/sanitize` runs it. Results are compared with a plain computation on the host, coarsely: that they are
// exact is for the gpu tests to show, here the kernels have to take the ways that they take.
//
//   driver [--only TEXT] [--part I N] [--malformed]
//                          the cases whose names contain TEXT, on device 0; of those every Nth from the Ith on; also
//                          those whose lengths, offsets, pages or schedules lie, of which only accesses are looked at
//   driver --plan          without a GPU: checks all arguments and prints what each case would launch
//   driver --plant NAME    a kernel with a bug that the tool NAME must see
//   driver --plants        their names
//
// Memory that no call may read holds NaN. Exits with 1 if a result is wrong or a call raised, 77 without a GPU.
#include <algorithm>
#include <climits>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>

#include "cases.h"
#include "hopper_attention/append.h"
#include "hopper_attention/combine.h"
#include "hopper_attention/forward.h"
#include "hopper_attention/testing.h"
#include "memory.h"
#include "plants.h"

namespace driver {
namespace {

namespace ha = hopper_attention;
using ha::DataType;
using ha::Tensor;

constexpr int kSkipped = 77;
constexpr int kTailRows = 2;   // rows of a packed q behind all sequences
constexpr int kSpareRows = 3;  // rows of a dense cache behind the longest sequence
constexpr int kUnusedPage = 2147480000;
constexpr int kMostBlockKeys = 256;  // rows of K or V that a box of any kernel has at most
constexpr int kMostSlabRows = 64;    // the same of out

float normal(std::uint32_t seed) {  // about: the sum of four uniform numbers
  float sum = 0.0F;
  for (int i = 0; i < 4; ++i) {
    seed = seed * 747796405U + 2891336453U;
    std::uint32_t const word = ((seed >> ((seed >> 28) + 4)) ^ seed) * 277803737U;
    sum += static_cast<float>((word >> 22) ^ word) * 0x1p-32F - 0.5F;
  }
  return sum * 1.7F;
}

std::vector<int> starts(std::vector<int> const& lengths) {
  std::vector<int> found(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), found.begin() + 1);
  return found;
}

// Rows of heads of one float array on the host: what the kernels should see, wherever it lies.
struct Rows {
  int heads = 0, columns = 0;
  std::vector<float> values;
  float* row(int at, int head) { return values.data() + (static_cast<std::size_t>(at) * heads + head) * columns; }
  float const* row(int at, int head) const {
    return values.data() + (static_cast<std::size_t>(at) * heads + head) * columns;
  }
};

Rows random_rows(int rows, int heads, int columns, DataType dtype, std::uint32_t seed) {
  Rows found{heads, columns, std::vector<float>(static_cast<std::size_t>(rows) * heads * columns)};
  for (std::size_t i = 0; i < found.values.size(); ++i) {
    found.values[i] = rounded(normal(seed * 0x9E3779B9U + static_cast<std::uint32_t>(i)), dtype);
  }
  return found;
}

// Scores up to some 4, 30 and 200 in turn, and such that are all negative.
void make_sizes(Rows& q, Rows& k, DataType dtype) {
  constexpr int kRowsOfWarp = 16;
  constexpr float kSizes[] = {1.0F, 8.0F, 50.0F, 1.0F};
  std::size_t const of_row = static_cast<std::size_t>(q.heads) * static_cast<std::size_t>(q.columns);
  for (std::size_t i = 0; i < q.values.size(); ++i) {
    std::size_t const group = i / of_row / kRowsOfWarp % 4;
    bool const is_first = i % static_cast<std::size_t>(q.columns) == 0;
    q.values[i] = group == 3 && is_first ? -30.0F : rounded(q.values[i] * kSizes[group], dtype);
  }
  for (std::size_t i = 0; i < k.values.size(); i += static_cast<std::size_t>(k.columns)) { k.values[i] = 4.0F; }
}

float angle(int position, int i) { return static_cast<float>(position) * 0.05F + static_cast<float>(i) * 0.01F; }

// Columns 2i, 2i + 1 (interleaved) or i, i + R / 2 turned by the angle of position and i; rounded as the kernel rounds.
void rotate(float* row, int columns, int position, bool interleaved, DataType dtype) {
  for (int i = 0; i < columns / 2; ++i) {
    float& x = row[interleaved ? 2 * i : i];
    float& y = row[interleaved ? 2 * i + 1 : i + columns / 2];
    float const c = std::cos(angle(position, i)), s = std::sin(angle(position, i)), x0 = x, y0 = y;
    x = rounded(x0 * c - y0 * s, dtype);
    y = rounded(x0 * s + y0 * c, dtype);
  }
}

// One call: its tensors on the device, what it should give, and the calls themselves.
class Call {
 public:
  Call(Case const& c, Memory& memory)
      : case_(c),
        memory_(memory),
        batch_(static_cast<int>(c.queries.size())),
        q_starts_(starts(c.queries)),
        k_starts_(starts(c.keys)),
        q_(random_rows(q_starts_.back(), c.heads_q, c.head_dim, c.dtype, 1)),
        k_(random_rows(k_starts_.back(), c.heads_k, c.head_dim, c.dtype, 2)),
        v_(random_rows(k_starts_.back(), c.heads_k, c.head_dim_v, c.dtype, 3)) {
    if (c.sinks) {
      for (int h = 0; h < c.heads_q; ++h) { sinks_.push_back(normal(static_cast<std::uint32_t>(1000 + h))); }
    }
    if (c.sizes_of_q) { make_sizes(q_, k_, c.dtype); }
    place_keys();
    make_queries();
    make_lengths();
    set_options();
  }

  ha::Problem problem() const { return ha::validate(args_); }

  void check_only() const {
    ha::validate(args_);
    if (case_.lying != Lying::kNothing) { static_cast<void>(lying()); }
    if (append_) { ha::validate(*append_); }
    if (schedule_) { ha::validate(*schedule_); }
  }

  void run(cudaStream_t stream) {
    if (case_.lying != Lying::kMetadata) { lie(stream); }
    if (schedule_) { ha::make_schedule(*schedule_, stream); }
    if (case_.lying == Lying::kMetadata) { lie(stream); }
    if (append_) { ha::append(*append_, stream); }
    ha::forward(args_, stream, [&](std::int64_t bytes) {
      return tensor(memory_.take(static_cast<std::size_t>(bytes)), DataType::kUInt8, {bytes});
    });
    check(cudaStreamSynchronize(stream));
  }

  // "" or what is wrong.
  std::string verdict() {
    if (case_.lying != Lying::kNothing) { return ""; }
    if (append_) { rotate_truth(); }
    Values out(case_.dtype, elements(args_.out));
    memory_.fetch(out.bytes().data(), args_.out.data, out.bytes().size());
    if (!memory_.room_is_untouched(args_.out.data, out.bytes().size())) { return "memory behind out was written"; }
    std::optional<Values> lse;
    if (case_.lse) {
      lse.emplace(DataType::kFloat32, elements(args_.softmax_lse));
      memory_.fetch(lse->bytes().data(), args_.softmax_lse.data, lse->bytes().size());
    }
    for (int b = 0; b < batch_; ++b) {
      for (int i = 0; i < case_.queries[static_cast<std::size_t>(b)]; ++i) {
        for (int h = 0; h < case_.heads_q; ++h) {
          std::string const wrong = row_verdict(b, i, h, out, lse ? &*lse : nullptr);
          if (!wrong.empty()) {
            return "sequence " + std::to_string(b) + ", query " + std::to_string(i) + ", head " + std::to_string(h) +
                   ": " + wrong;
          }
        }
      }
    }
    for (std::int64_t at = static_cast<std::int64_t>(q_starts_.back()) * case_.heads_q * case_.head_dim_v;
         at < elements(args_.out); ++at) {
      if (!out.untouched(at)) { return "rows of no sequence were written"; }
    }
    return "";
  }

 private:
  int used(int b) const {  // slots of a sequence before an append
    return case_.keys[static_cast<std::size_t>(b)] + case_.leftpad - case_.append;
  }
  int longest(std::vector<int> const& lengths) const { return *std::max_element(lengths.begin(), lengths.end()); }

  void* ints(std::vector<int> const& values) { return memory_.take(values.data(), values.size() * sizeof(int)); }
  Tensor lengths(std::vector<int> const& values) {
    return tensor(ints(values), DataType::kInt32, {static_cast<std::int64_t>(values.size())});
  }

  // Makes K and V: the rows of k_ and v_ where the layout has them, NaN elsewhere; new keys only where they come from.
  void place_keys() {
    Case const& c = case_;
    std::int64_t rows = 0;
    std::function<std::int64_t(int, int)> slot;  // of key j of sequence b, flat
    int const depth = longest(c.keys) + c.leftpad + (c.used ? kSpareRows : 0);
    std::vector<int> first_page(1, 0);
    for (int b = 0; b < batch_; ++b) {
      int const pages = c.page_size > 0 ? (used(b) + c.append + c.page_size - 1) / c.page_size : 0;
      first_page.push_back(first_page.back() + pages);
    }
    int const pages = first_page.back() + 2;
    auto const page_of = [=](int place) { return pages - 1 - place; };  // the last page first, so that order matters
    if (c.layout == Keys::kPaged) {
      rows = static_cast<std::int64_t>(pages) * c.page_size;
      slot = [=, size = c.page_size](int b, int j) {
        return static_cast<std::int64_t>(page_of(first_page[static_cast<std::size_t>(b)] + j / size)) * size + j % size;
      };
    } else if (c.layout == Keys::kPacked) {
      rows = k_starts_.back() + kTailRows;
      slot = [=, this](int b, int j) { return static_cast<std::int64_t>(k_starts_[static_cast<std::size_t>(b)] + j); };
    } else {
      rows = static_cast<std::int64_t>(depth) * (batch_ + (c.batch_idx ? 1 : 0));
      slot = [=, last = batch_, by_index = c.batch_idx](int b, int j) {
        return static_cast<std::int64_t>(by_index ? last - b : b) * depth + j;
      };
    }
    std::int64_t const size_k = rows * c.heads_k * c.head_dim, size_v = rows * c.heads_k * c.head_dim_v;
    Values k(c.dtype, size_k), v(c.dtype, size_v);
    for (int b = 0; b < batch_; ++b) {
      for (int j = 0; j < c.keys[static_cast<std::size_t>(b)] - c.append; ++j) {
        put(k, k_, k_starts_[static_cast<std::size_t>(b)] + j, slot(b, j + c.leftpad));
        put(v, v_, k_starts_[static_cast<std::size_t>(b)] + j, slot(b, j + c.leftpad));
      }
    }
    auto const in_memory = [&](Values& values) {
      return c.layout == Keys::kPaged ? memory_.take(values.bytes().data(), values.bytes().size())
                                      : memory_.take_with_room(values.bytes(), kMostBlockKeys);
    };
    void* const data_k = in_memory(k);
    void* const data_v = in_memory(v);
    auto const shaped = [&](void* data, int columns) {
      if (c.layout == Keys::kPacked) { return tensor(data, c.dtype, {rows, c.heads_k, columns}); }
      std::int64_t const inner = c.layout == Keys::kPaged ? c.page_size : depth;
      return tensor(data, c.dtype, {rows / inner, inner, c.heads_k, columns});
    };
    args_.k = shaped(data_k, c.head_dim);
    args_.v = shaped(data_v, c.head_dim_v);
    if (c.layout == Keys::kPaged) {
      int width = 1;
      for (int b = 0; b < batch_; ++b) {
        width = std::max(width, first_page[static_cast<std::size_t>(b) + 1] - first_page[static_cast<std::size_t>(b)]);
      }
      ++width;
      std::vector<int> table(static_cast<std::size_t>(batch_) * width, kUnusedPage);
      for (int b = 0; b < batch_; ++b) {
        int const begin = first_page[static_cast<std::size_t>(b)], end = first_page[static_cast<std::size_t>(b) + 1];
        for (int place = begin; place < end; ++place) {
          table[static_cast<std::size_t>(b) * width + place - begin] = page_of(place);
        }
      }
      args_.page_table = tensor(ints(table), DataType::kInt32, {batch_, width});
    }
    if (c.batch_idx) {
      std::vector<int> index;
      for (int b = 0; b < batch_; ++b) { index.push_back(batch_ - b); }
      args_.cache_batch_idx = lengths(index);
    }
    if (c.append > 0) { make_append(); }
  }

  static void put(Values& target, Rows const& source, int row, std::int64_t slot) {
    for (int h = 0; h < source.heads; ++h) {
      for (int d = 0; d < source.columns; ++d) {
        target.set((slot * source.heads + h) * source.columns + d, source.row(row, h)[d]);
      }
    }
  }

  void make_append() {
    Case const& c = case_;
    append_.emplace();
    auto const fresh = [&](Rows const& source) {
      Values values(c.dtype, static_cast<std::int64_t>(batch_) * c.append * source.heads * source.columns);
      for (int b = 0; b < batch_; ++b) {
        int const first = k_starts_[static_cast<std::size_t>(b) + 1] - c.append;
        for (int j = 0; j < c.append; ++j) { put(values, source, first + j, b * c.append + j); }
      }
      return tensor(memory_.take(values.bytes().data(), values.bytes().size()), c.dtype,
                    {batch_, c.append, source.heads, source.columns});
    };
    append_->k_new = fresh(k_);
    append_->v_new = fresh(v_);
    append_->k_cache = args_.k;
    append_->v_cache = args_.v;
    append_->page_table = args_.page_table;
    append_->cache_batch_idx = args_.cache_batch_idx;
    if (!c.rotary) { return; }
    int const positions = longest(c.keys) + 1, half = c.head_dim / 2;
    Values cos(DataType::kFloat32, static_cast<std::int64_t>(positions) * half), sin = cos;
    for (int p = 0; p < positions; ++p) {
      for (int i = 0; i < half; ++i) {
        cos.set(p * half + i, std::cos(angle(p, i)));
        sin.set(p * half + i, std::sin(angle(p, i)));
      }
    }
    auto const table = [&](Values& values) {
      return tensor(memory_.take(values.bytes().data(), values.bytes().size()), DataType::kFloat32, {positions, half});
    };
    append_->rotary_cos = table(cos);
    append_->rotary_sin = table(sin);
    append_->rotary_interleaved = c.interleaved;
    append_->rotate_q_per_position = c.causal;
  }

  void make_queries() {
    Case const& c = case_;
    int const rows = q_starts_.back() + (c.packed_q ? kTailRows : 0);
    Values q(c.dtype, static_cast<std::int64_t>(rows) * c.heads_q * c.head_dim);
    for (int row = 0; row < q_starts_.back(); ++row) { put(q, q_, row, row); }
    void* const data = memory_.take(q.bytes().data(), q.bytes().size());
    auto const shaped = [&](void* at, int columns) {
      return c.packed_q ? tensor(at, c.dtype, {rows, c.heads_q, columns})
                        : tensor(at, c.dtype, {batch_, c.queries[0], c.heads_q, columns});
    };
    args_.q = shaped(data, c.head_dim);
    std::int64_t const size_out = static_cast<std::int64_t>(rows) * c.heads_q * c.head_dim_v;
    Values out(c.dtype, size_out), lse(DataType::kFloat32, static_cast<std::int64_t>(rows) * c.heads_q);
    // Results are initialised, because rows of no sequence are read here, and because initcheck need not know of what
    // TMA stored.
    auto const place = [&](Values& values) { return memory_.take(values.bytes().data(), values.bytes().size()); };
    args_.out = shaped(memory_.take_with_room(out.bytes(), kMostSlabRows), c.head_dim_v);
    if (c.lse) {
      void* const at = place(lse);
      args_.softmax_lse = c.packed_q ? tensor(at, DataType::kFloat32, {c.heads_q, rows})
                                     : tensor(at, DataType::kFloat32, {batch_, c.heads_q, c.queries[0]});
    }
    if (c.sinks) {
      Values sinks(DataType::kFloat32, c.heads_q);
      for (int h = 0; h < c.heads_q; ++h) { sinks.set(h, sinks_[static_cast<std::size_t>(h)]); }
      args_.sinks = tensor(memory_.take(sinks.bytes().data(), sinks.bytes().size()), DataType::kFloat32, {c.heads_q});
    }
    if (append_ && c.rotary) {
      append_->q = args_.q;
      append_->q_rotated = shaped(memory_.take(q.bytes().size()), c.head_dim);
      args_.q = append_->q_rotated;
    }
  }

  void make_lengths() {
    Case const& c = case_;
    if (c.packed_q) { args_.cu_seqlens_q = lengths(q_starts_); }
    args_.max_seqlen_q = longest(c.queries);
    std::vector<int> slots;
    for (int b = 0; b < batch_; ++b) { slots.push_back(used(b)); }
    if (c.layout == Keys::kPacked) { args_.cu_seqlens_k = lengths(k_starts_); }
    if (c.layout == Keys::kPaged || c.used) { args_.seqused_k = lengths(slots); }
    if (c.layout != Keys::kDense) { args_.max_seqlen_k = longest(c.keys) + c.leftpad; }
    if (c.leftpad > 0) { args_.cache_leftpad = lengths(std::vector<int>(static_cast<std::size_t>(batch_), c.leftpad)); }
    args_.seqlen_k_new = c.append;
    if (append_) {
      append_->seqused_k = args_.seqused_k;
      append_->cu_seqlens_q = args_.cu_seqlens_q;
    }
    if (c.cp_world > 1) {
      std::vector<int> totals;
      for (int const n : c.keys) { totals.push_back(total(n)); }
      args_.cp_world_size = c.cp_world;
      args_.cp_rank = c.cp_world - 1;
      args_.cp_tot_seqused_k = lengths(totals);
    }
  }

  Tensor const& lying() const {
    Tensor const* found = nullptr;
    switch (case_.lying) {
      case Lying::kNothing:
        break;
      case Lying::kCuSeqlensQ:
        found = &args_.cu_seqlens_q;
        break;
      case Lying::kCuSeqlensK:
        found = &args_.cu_seqlens_k;
        break;
      case Lying::kSequsedK:
        found = &args_.seqused_k;
        break;
      case Lying::kPageTable:
        found = &args_.page_table;
        break;
      case Lying::kCacheBatchIdx:
        found = &args_.cache_batch_idx;
        break;
      case Lying::kCacheLeftpad:
        found = &args_.cache_leftpad;
        break;
      case Lying::kMetadata:
        found = &args_.scheduler_metadata;
        break;
    }
    if (found == nullptr || !found->given()) { throw std::logic_error("the tensor that is to lie is not given"); }
    return *found;
  }

  // Overwrites the tensor that lies, which the append shares with the attention.
  void lie(cudaStream_t stream) {
    if (case_.lying == Lying::kNothing) { return; }
    Tensor const& t = lying();
    check(cudaStreamSynchronize(stream));
    std::vector<int> values(static_cast<std::size_t>(elements(t)));
    std::size_t const bytes = values.size() * sizeof(int);
    memory_.fetch(values.data(), t.data, bytes);
    std::uint32_t bits = 12345;
    for (int& value : values) {
      bits = bits * 1664525U + 1013904223U;
      switch (case_.lie) {
        case Lie::kLargest:
          value = INT_MAX;
          break;
        case Lie::kSmallest:
          value = INT_MIN;
          break;
        case Lie::kMinusOne:
          value = -1;
          break;
        case Lie::kMillionMore:
          value += 1'000'000;
          break;
        case Lie::kRandom:
          value = static_cast<int>(bits);
          break;
      }
    }
    memory_.put(t.data, values.data(), bytes);
  }

  int total(int keys) const { return keys * case_.cp_world; }  // of all ranks; the last one is this one

  void set_options() {
    Case const& c = case_;
    args_.causal = c.causal;
    args_.window_left = c.window_left;
    args_.window_right = c.window_right;
    args_.attention_chunk = c.chunk;
    args_.softcap = c.softcap;
    args_.num_splits = c.num_splits;
    args_.sm_margin = c.sm_margin;
    args_.batch_invariant = c.batch_invariant;
    if (!c.metadata) { return; }
    schedule_.emplace();
    schedule_->shape = {.dtype = c.dtype,
                        .batch = batch_,
                        .seqlen_q = longest(c.queries),
                        .seqlen_k = longest(c.keys),
                        .heads_q = c.heads_q,
                        .heads_k = c.heads_k,
                        .head_dim = c.head_dim,
                        .head_dim_v = c.head_dim_v,
                        .has_sinks = c.sinks,
                        .page_size = c.layout == Keys::kPaged ? c.page_size : 0};
    schedule_->options = args_;
    std::int64_t const size = ha::schedule_size(batch_);
    schedule_->metadata = tensor(memory_.take(static_cast<std::size_t>(size) * sizeof(int)), DataType::kInt32, {size});
    args_.scheduler_metadata = schedule_->metadata;
  }

  // What append() does to new keys and to q.
  void rotate_truth() {
    Case const& c = case_;
    if (!c.rotary) { return; }
    for (int b = 0; b < batch_; ++b) {
      for (int j = 0; j < c.append; ++j) {
        for (int h = 0; h < c.heads_k; ++h) {
          rotate(k_.row(k_starts_[static_cast<std::size_t>(b) + 1] - c.append + j, h), c.head_dim, used(b) + j,
                 c.interleaved, c.dtype);
        }
      }
      for (int i = 0; i < c.queries[static_cast<std::size_t>(b)]; ++i) {
        for (int h = 0; h < c.heads_q; ++h) {
          rotate(q_.row(q_starts_[static_cast<std::size_t>(b)] + i, h), c.head_dim, used(b) + (c.causal ? i : 0),
                 c.interleaved, c.dtype);
        }
      }
    }
  }

  bool visible(int b, int i, int j) const {
    Case const& c = case_;
    int const keys = total(c.keys[static_cast<std::size_t>(b)]);
    int const position = j * c.cp_world + static_cast<int>(args_.cp_rank);
    int const diagonal = i + keys - c.queries[static_cast<std::size_t>(b)];
    int const right = c.causal ? 0 : c.window_right;
    if (c.window_left >= 0 && position < diagonal - c.window_left) { return false; }
    if (right >= 0 && position > diagonal + right) { return false; }
    auto const chunk_of = [&](int x) { return (x >= 0 ? x : x - c.chunk + 1) / c.chunk; };
    return c.chunk == 0 || chunk_of(position) == chunk_of(diagonal);
  }

  std::string row_verdict(int b, int i, int h, Values const& out, Values const* lse) const {
    Case const& c = case_;
    int const head_k = h / (c.heads_q / c.heads_k);
    int const first = k_starts_[static_cast<std::size_t>(b)];
    int const row = q_starts_[static_cast<std::size_t>(b)] + i;
    double const scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    std::vector<double> scores;
    std::vector<int> seen;
    double sum = c.sinks ? std::exp(static_cast<double>(sinks_[static_cast<std::size_t>(h)])) : 0.0;
    for (int j = 0; j < c.keys[static_cast<std::size_t>(b)]; ++j) {
      if (!visible(b, i, j)) { continue; }
      double score = 0.0;
      for (int d = 0; d < c.head_dim; ++d) {
        score += static_cast<double>(q_.row(row, h)[d]) * static_cast<double>(k_.row(first + j, head_k)[d]);
      }
      score *= scale;
      if (c.softcap > 0.0) { score = c.softcap * std::tanh(score / c.softcap); }
      seen.push_back(j);
      scores.push_back(std::exp(score));
      sum += scores.back();
    }
    // A row is (b, i, h) of a dense out and (row, h) of a packed one: the same place, since sequences are alike there.
    std::int64_t const at = (static_cast<std::int64_t>(row) * c.heads_q + h) * c.head_dim_v;
    double const unit = c.dtype == DataType::kFloat16 ? 0x1p-11 : 0x1p-8;
    for (int d = 0; d < c.head_dim_v; ++d) {
      double expected = 0.0;
      for (std::size_t n = 0; n < seen.size(); ++n) {
        expected += scores[n] / sum * static_cast<double>(v_.row(first + seen[n], head_k)[d]);
      }
      double const found = static_cast<double>(out.get(at + d));
      if (!(std::abs(found - expected) <= unit * (6 + 3 * std::abs(expected)))) {
        return "column " + std::to_string(d) + " is " + std::to_string(found) + ", should be " +
               std::to_string(expected);
      }
    }
    if (lse == nullptr) { return ""; }
    std::int64_t const place = c.packed_q ? h * (elements(args_.softmax_lse) / c.heads_q) + row
                                          : (static_cast<std::int64_t>(b) * c.heads_q + h) * c.queries[0] + i;
    double const expected = std::log(sum), found = static_cast<double>(lse->get(place));
    bool const right = sum == 0.0 ? std::isinf(found) && found < 0 : std::abs(found - expected) <= 1e-2;
    return right ? "" : "LSE is " + std::to_string(found) + ", should be " + std::to_string(expected);
  }

  Case const& case_;
  Memory& memory_;
  int batch_;
  std::vector<int> q_starts_, k_starts_;
  Rows q_, k_, v_;
  std::vector<float> sinks_;
  ha::Arguments args_;
  std::optional<ha::AppendArguments> append_;
  std::optional<ha::ScheduleArguments> schedule_;
};

// combine() or merge_states() of random parts, of which one in five has no keys.
class Merge {
 public:
  Merge(MergeCase const& c, Memory& memory) : case_(c), memory_(memory), parts_(c.parts == 0 ? 2 : c.parts) {
    std::int64_t const rows = static_cast<std::int64_t>(c.batch) * c.queries * c.heads;
    DataType const in = c.parts == 0 ? c.dtype : DataType::kFloat32;
    for (int s = 0; s < parts_; ++s) {
      Values out(in, rows * c.columns), lse(DataType::kFloat32, rows);
      for (std::int64_t i = 0; i < rows * c.columns; ++i) {
        out.set(i, normal(static_cast<std::uint32_t>(s * 7919 + i)));
      }
      for (std::int64_t i = 0; i < rows; ++i) {
        bool const empty = (i + s) % 5 == 0;
        lse.set(i, empty ? -INFINITY : normal(static_cast<std::uint32_t>(s * 104729 + i + 5)));
      }
      outs_.push_back(out);
      lses_.push_back(lse);
    }
    std::vector<std::uint8_t> all_out, all_lse;
    for (int s = 0; s < parts_; ++s) {
      auto const place = static_cast<std::size_t>(s);
      all_out.insert(all_out.end(), outs_[place].bytes().begin(), outs_[place].bytes().end());
      all_lse.insert(all_lse.end(), lses_[place].bytes().begin(), lses_[place].bytes().end());
    }
    auto* const data = static_cast<std::uint8_t*>(memory.take(all_out.data(), all_out.size()));
    auto* const lse = static_cast<std::uint8_t*>(memory.take(all_lse.data(), all_lse.size()));
    out_ = tensor(memory.take(static_cast<std::size_t>(rows * c.columns * element_bytes(c.dtype))), c.dtype,
                  {c.batch, c.queries, c.heads, c.columns});
    void* const total = memory.take(static_cast<std::size_t>(rows) * sizeof(float));
    if (c.parts > 0) {
      lse_ = tensor(total, DataType::kFloat32, {c.batch, c.queries, c.heads});
      combine_ = {.out_partial = tensor(data, in, {parts_, c.batch, c.queries, c.heads, c.columns}),
                  .lse_partial = tensor(lse, DataType::kFloat32, {parts_, c.batch, c.queries, c.heads}),
                  .out = out_,
                  .lse = lse_};
      return;
    }
    // LSEs of states are (B, H, M): here as views of (B, M, H).
    auto const state_lse = [&](void* at) {
      Tensor t = tensor(at, DataType::kFloat32, {c.batch, c.heads, c.queries});
      t.stride[1] = 1;
      t.stride[2] = c.heads;
      return t;
    };
    lse_ = state_lse(total);
    Tensor const a = tensor(data, in, {c.batch, c.queries, c.heads, c.columns});
    Tensor b = a;
    b.data = data + outs_[0].bytes().size();
    merge_ = {.out_a = a,
              .lse_a = state_lse(lse),
              .out_b = b,
              .lse_b = state_lse(lse + lses_[0].bytes().size()),
              .out = out_,
              .lse = lse_};
  }

  void check_only() const { case_.parts > 0 ? ha::validate(combine_) : ha::validate(merge_); }

  void run(cudaStream_t stream) {
    if (case_.parts > 0) {
      ha::combine(combine_, stream);
    } else {
      ha::merge_states(merge_, stream);
    }
    check(cudaStreamSynchronize(stream));
  }

  std::string verdict() {
    Values out(case_.dtype, elements(out_)), lse(DataType::kFloat32, elements(lse_));
    memory_.fetch(out.bytes().data(), out_.data, out.bytes().size());
    memory_.fetch(lse.bytes().data(), lse_.data, lse.bytes().size());
    for (std::int64_t row = 0; row < elements(lse_); ++row) {
      double sum = 0.0;
      for (Values const& part : lses_) { sum += std::exp(static_cast<double>(part.get(row))); }
      double const total = static_cast<double>(lse.get(row));
      bool const right = sum == 0.0 ? std::isinf(total) && total < 0 : std::abs(total - std::log(sum)) < 1e-3;
      if (!right) { return "LSE of row " + std::to_string(row) + " is " + std::to_string(total); }
      for (int d = 0; d < case_.columns; ++d) {
        double expected = 0.0;
        for (std::size_t s = 0; s < outs_.size(); ++s) {
          double const weight = sum == 0.0 ? 0.0 : std::exp(static_cast<double>(lses_[s].get(row))) / sum;
          if (weight > 0.0) { expected += weight * static_cast<double>(outs_[s].get(row * case_.columns + d)); }
        }
        double const found = static_cast<double>(out.get(row * case_.columns + d));
        if (!(std::abs(found - expected) <= 2.5e-2)) {
          return "row " + std::to_string(row) + ", column " + std::to_string(d) + " is " + std::to_string(found) +
                 ", should be " + std::to_string(expected);
        }
      }
    }
    return "";
  }

 private:
  MergeCase const& case_;
  Memory& memory_;
  int parts_;
  std::vector<Values> outs_, lses_;
  Tensor out_, lse_;
  ha::CombineArguments combine_;
  ha::MergeArguments merge_;
};

struct Options {
  std::string only;
  int part = 0, parts = 1;
  bool plan = false;
  bool malformed = false;
};

bool is_built(ha::Plan const& plan) {
  auto const& built = ha::built_kernels();
  return std::all_of(plan.kernels.begin(), plan.kernels.end(), [&](ha::KernelPlan const& kernel) {
    return std::any_of(built.begin(), built.end(), [&](ha::KernelInfo const& info) {
      return info.family == kernel.family && info.dtype == plan.dtype && info.tile == kernel.tile;
    });
  });
}

enum class Outcome { kRight, kWrong, kNotBuilt };

Outcome run_case(Case const& c, Options const& options, cudaStream_t stream) {
  Memory memory(!options.plan);
  Call call(c, memory);
  ha::testing::ForcedPlan forced;
  if (!c.clusters) { forced.cluster = -1; }
  forced.one_tile = !c.several_tiles;
  if (c.shares_tiles > 0) {
    forced.tile = {.rows = 128, .keys = 128, .stages = c.head_dim == 64 ? 6 : 4};
    forced.cluster = c.shares_tiles;
  }
  ha::Plan const plan =
      ha::testing::plan_with(call.problem(), options.plan ? ha::device_info("H200") : ha::device_info(0), forced);
  if (!options.plan && !is_built(plan)) {
    std::printf("not built  %s\n", c.why.c_str());
    return Outcome::kNotBuilt;
  }
  if (options.plan) {
    call.check_only();
    std::string kernels;
    for (ha::KernelPlan const& kernel : plan.kernels) {
      kernels += kernel.family == ha::KernelFamily::kDecode ? " decode" : " prefill";
      kernels.append(" ").append(std::to_string(kernel.tile.rows));
      kernels.append("x").append(std::to_string(kernel.tile.keys));
      if (kernel.may_split) { kernels += " split"; }
    }
    if (plan.cluster > 0) { kernels.append(" cluster of ").append(std::to_string(plan.cluster)); }
    std::printf("%-55s%s%s\n", c.why.c_str(), kernels.c_str(), plan.makes_schedule ? ", schedule" : "");
    return Outcome::kRight;
  }
  ha::testing::force_plan(forced);
  call.run(stream);
  ha::testing::force_plan(std::nullopt);
  std::string const wrong = call.verdict();
  std::printf("%s  %s%s%s\n", wrong.empty() ? "right" : "WRONG", c.why.c_str(), wrong.empty() ? "" : ": ",
              wrong.c_str());
  return wrong.empty() ? Outcome::kRight : Outcome::kWrong;
}

Outcome run_case(MergeCase const& c, Options const& options, cudaStream_t stream) {
  Memory memory(!options.plan);
  Merge merge(c, memory);
  merge.check_only();
  if (options.plan) {
    std::printf("%s\n", c.why.c_str());
    return Outcome::kRight;
  }
  merge.run(stream);
  std::string const wrong = merge.verdict();
  std::printf("%s  %s%s%s\n", wrong.empty() ? "right" : "WRONG", c.why.c_str(), wrong.empty() ? "" : ": ",
              wrong.c_str());
  return wrong.empty() ? Outcome::kRight : Outcome::kWrong;
}

int run_all(Options const& options) {
  cudaStream_t stream = nullptr;
  if (!options.plan) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      std::printf("no GPU\n");
      return kSkipped;
    }
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  int counts[3] = {}, place = 0;
  auto const each = [&](auto const& c) {
    if (c.why.find(options.only) == std::string::npos || place++ % options.parts != options.part) { return; }
    Outcome outcome = Outcome::kWrong;
    try {
      outcome = run_case(c, options, stream);
    } catch (std::exception const& error) { std::printf("WRONG  %s: %s\n", c.why.c_str(), error.what()); }
    std::fflush(stdout);
    ++counts[static_cast<int>(outcome)];
  };
  for (Case const& c : attention_cases()) { each(c); }
  for (MergeCase const& c : merge_cases()) { each(c); }
  if (options.malformed) {
    for (Case const& c : malformed_cases()) { each(c); }
  }
  if (stream != nullptr) { check(cudaStreamDestroy(stream)); }
  std::printf("driver: %d right, %d wrong, %d not built\n", counts[0], counts[1], counts[2]);
  return counts[1] > 0 || counts[0] == 0 ? 1 : 0;
}

}  // namespace
}  // namespace driver

int main(int argc, char** argv) {
  driver::Options options;
  std::vector<std::string> const given(argv + 1, argv + argc);
  for (std::size_t i = 0; i < given.size(); ++i) {
    bool const has_value = i + 1 < given.size();
    if (given[i] == "--plants") {
      for (std::string const& name : plants::names()) { std::printf("%s\n", name.c_str()); }
      return 0;
    }
    if (given[i] == "--plant" && has_value) { return plants::run(given[i + 1]) ? 0 : 2; }
    if (given[i] == "--only" && has_value) {
      options.only = given[++i];
    } else if (given[i] == "--part" && i + 2 < given.size()) {
      options.part = std::atoi(given[++i].c_str());
      options.parts = std::max(1, std::atoi(given[++i].c_str()));
    } else if (given[i] == "--plan") {
      options.plan = true;
    } else if (given[i] == "--malformed") {
      options.malformed = true;
    } else {
      std::fprintf(stderr, "unknown option %s\n", given[i].c_str());
      return 2;
    }
  }
  return driver::run_all(options);
}
