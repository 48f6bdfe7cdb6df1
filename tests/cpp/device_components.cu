// The facts that host and device derive by the same code must be the same facts: masks, block ranges, division, the
// order of tiles, lengths of sequences and the items of a schedule, computed by a kernel and by the host. And the
// kernel that makes the schedule must write what a plain loop writes. Exits with 77, which ctest takes for skipped,
// where there is no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/block_range.h"
#include "kernels/fast_divmod.h"
#include "kernels/schedule_kernel.h"
#include "kernels/tile_scheduler.h"
#include "kernels/tile_sources.h"
#include "kernels/work_source.h"
#include "listed_clusters.h"
#include "schedule_model.h"

namespace hopper_attention {
namespace {

constexpr int kSkipped = 77;

struct Case {
  MaskParams mask;
  SeqlenQK len;
  int first_row, last_row, block;
  FastDivmod divisor;
  int dividend;
  SchedulerParams schedule;
  int item;
};

struct Answer {
  KeyInterval first, last;
  BlockRange range;
  int quotient, remainder;
  Tile tile;
};

HA_HOST_DEVICE Answer answer(Case const& c) {
  return {visible(c.mask, c.first_row, c.len),
          visible(c.mask, c.last_row, c.len),
          block_range(c.mask, c.first_row, c.last_row, c.len, c.block),
          c.divisor.quotient(c.dividend),
          c.divisor.remainder(c.dividend),
          tile_at(c.schedule, c.item)};
}

__global__ void answer_all(Case const* cases, Answer* answers, int count) {
  int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) { answers[i] = answer(cases[i]); }
}

Case random_case(std::mt19937& random) {
  auto const up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n + 1)); };
  Case c{};
  c.mask = {up_to(2) == 0 ? kUnlimited : up_to(700), up_to(2) == 0 ? kUnlimited : up_to(700),
            up_to(2) == 0 ? 1 + up_to(400) : 0};
  c.len = {1 + up_to(1000), up_to(1000)};
  c.first_row = up_to(c.len.q - 1);
  c.last_row = c.first_row + up_to(c.len.q - 1 - c.first_row);
  c.block = 16 * (1 + up_to(11));
  c.divisor = FastDivmod(1 + up_to(1 << 20));
  c.dividend = up_to((1 << 30) - 1);
  int const heads = 1 + up_to(40);
  int const batch = 1 + up_to(10);
  c.schedule = make_scheduler_params(batch, heads, 1 + up_to(60), 1 + up_to(batch * heads - 1), up_to(1) == 0, 132);
  c.item = up_to(c.schedule.tiles - 1);
  return c;
}

void check(cudaError_t error, char const* what) {
  if (error == cudaSuccess) { return; }
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// A copy of `host` on the device, freed at the end.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(std::vector<T> const& host) : size_(host.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(T) + 1), "cudaMalloc");
    check(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  OnDevice(OnDevice const&) = delete;
  OnDevice& operator=(OnDevice const&) = delete;
  ~OnDevice() { cudaFree(data_); }

  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> copy(size_);
    check(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

// Of prefill kernels with two warpgroups, and of that of both classes.
using ListedSource = WorkSource<32>;
using ListedSourceOfBoth = WorkSource<32, FewAlone>;

// The first items of a CTA, whose draws are `cta`, `cta + ctas`, ... All lanes of a warp.
template <class Source>
HA_HOST_DEVICE void list_items(AttentionParams const& params, Source& source, int cta, ListedItem* items) {
  int round = 0;
  auto const draw = [&](Draws const&) { return cta + round++ * params.schedule.ctas; };
  for (int i = 0; i < kMostItems; ++i) {
    WorkItem item;
    Sequence sequence{};
    source.next(item, sequence, draw);
    if (item.place < 0) { sequence = {}; }  // which may be any
    items[i] = {item, sequence};
    if (item.place < 0) { break; }
  }
}

template <class Source>
__global__ void list_all(__grid_constant__ AttentionParams const params, int slabs, int keys, ListedItem* items) {
  using State = typename Source::State;
  __shared__ alignas(State) char memory[sizeof(State)];
  if (threadIdx.x == 0) { new (memory) State(Schedule(params.schedule)); }
  __syncwarp();
  Source source(params, params.schedule.metadata, *reinterpret_cast<State*>(memory), slabs, keys);
  list_items(params, source, static_cast<int>(blockIdx.x), items + blockIdx.x * kMostItems);
}

// The same of all CTAs, on the host.
template <class Source>
void list_all_here(AttentionParams const& params, int slabs, int keys, ListedItem* items) {
  for (int cta = 0; cta < params.schedule.ctas; ++cta) {
    typename Source::State state(Schedule(params.schedule));
    Source source(params, params.schedule.metadata, state, slabs, keys);
    list_items(params, source, cta, items + std::size_t{kMostItems} * cta);
  }
}

// But for what lies between the fields.
bool are_same(ListedItem const& a, ListedItem const& b) {
  auto const facts = [](WorkItem const& item) {
    return std::tie(item.place, item.head, item.m, item.first, item.last, item.units, item.slot, item.in_cluster,
                    item.part);
  };
  return facts(a.item) == facts(b.item) && a.sequence == b.sequence;
}

// Of a grid of clusters: all lanes write the same.
template <class Tiles>
__global__ void list_clusters(__grid_constant__ AttentionParams const params, ListedItem* items) {
  list_cluster_items<Tiles>(params, static_cast<int>(blockIdx.x), items + blockIdx.x * kMostItems);
}

// The items of grids of clusters, found by the device and by the host: tiles one for each CTA and taken in turn,
// sequences without queries and with more than a tile holds; one tile for each sequence, several, and as many as hold
// its queries. Returns how many grids differ.
int check_clusters() {
  int wrong = 0;
  int grids = 0;
  std::mt19937 random(3);
  auto const up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n + 1)); };
  for (int round = 0; round < 400; ++round) {
    int const batch = 1 + up_to(40);
    std::vector<int> starts{0};
    std::vector<int> keys;
    for (int b = 0; b < batch; ++b) {
      starts.push_back(starts.back() + (up_to(9) == 0 ? up_to(20) : up_to(2)));
      keys.push_back(up_to(5000));
    }
    OnDevice<int> const starts_on_device(starts);
    OnDevice<int> const keys_on_device(keys);
    int const heads = 1 + up_to(7);
    AttentionParams params{};
    params.packing = make_packing(4, 16 << up_to(1));
    params.sequences.batch = batch;
    params.sequences.seqlen_q = starts.back();
    params.sequences.capacity_k = 5000;
    params.cluster.size = 1 << up_to(4);
    params.cluster.tiles = batch * heads;
    params.cluster.at_once = up_to(1) == 0 ? params.cluster.tiles : 1 + up_to(params.cluster.tiles - 1);
    params.cluster.ctas_of_tile = FastDivmod(params.cluster.size);
    params.cluster.head_groups = FastDivmod(heads);
    bool const several = up_to(2) > 0;
    params.cluster.packed = several && up_to(1) == 0;
    if (several) {
      int const queries = params.packing.queries_per_slab;
      int const of_group = params.cluster.packed ? (starts.back() + batch * (queries - 1)) / queries : 3 * batch;
      if (!params.cluster.packed) { params.cluster.tiles_of_group = FastDivmod(3); }
      params.cluster.tiles = of_group * heads;
      params.cluster.at_once = up_to(1) == 0 ? params.cluster.tiles : 1 + up_to(params.cluster.tiles / 2);
      if (params.cluster.tiles == 0) { continue; }
    }
    int const ctas = params.cluster.at_once * params.cluster.size;
    std::vector<ListedItem> wanted(std::size_t{kMostItems} * ctas);
    OnDevice<ListedItem> const listed(wanted);
    AttentionParams on_device = params;
    on_device.sequences.cu_seqlens_q = starts_on_device.data();
    on_device.sequences.seqused_k = keys_on_device.data();
    if (several) {
      list_clusters<SeveralTilesEach><<<ctas, 32>>>(on_device, listed.data());
    } else {
      list_clusters<OneTileEach><<<ctas, 32>>>(on_device, listed.data());
    }
    check(cudaGetLastError(), "launch of the list of clusters");
    std::vector<ListedItem> const found = listed.host();
    params.sequences.cu_seqlens_q = starts.data();
    params.sequences.seqused_k = keys.data();
    for (int cta = 0; cta < ctas; ++cta) {
      ListedItem* const of_cta = wanted.data() + std::size_t{kMostItems} * cta;
      list_clusters_on_host(params, several, cta, of_cta);
    }
    ++grids;
    if (!std::equal(found.begin(), found.end(), wanted.begin(), are_same) && ++wrong <= 5) {
      std::fprintf(stderr, "round %d: host and device find different items of clusters\n", round);
    }
  }
  std::printf("%d grids of clusters, %d wrong\n", grids, wrong);
  return wrong;
}

// The kernel that makes the schedule against a plain loop, then the items that warps find in it against those that the
// host finds. Returns how many batches differ.
int check_schedules() {
  int wrong = 0;
  int batches = 0;
  int even = 0;
  int cut_of_both = 0;
  int whole_of_both = 0;
  int drafts = 0;
  std::mt19937 random(2);
  auto const up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n + 1)); };
  for (int const batch : {1,   2,   3,    4,    5,    31,   32,   33,   255,  256,  257,   511,
                          512, 513, 1023, 1025, 2048, 2049, 4096, 5000, 8192, 8193, 20'000}) {
    for (int round = 0; round < 12; ++round) {
      // In turn: mixed lengths, all alike, decode with a few prompts, all empty; once drafts that one tile holds but
      // are counted as many, and once two chunks beside decode.
      std::vector<int> starts{0};
      std::vector<int> keys;
      for (int b = 0; b < batch; ++b) {
        if (round == 7) {
          starts.push_back(starts.back() + (b < 2 ? 17 + up_to(100) : 1));
          keys.push_back(b < 2 ? 5000 + up_to(50'000) : up_to(900));
          continue;
        }
        if (round == 5) {
          starts.push_back(starts.back() + (up_to(7) == 0 ? up_to(24) : 17 + up_to(7)));
          keys.push_back(up_to(7) == 0 ? up_to(50'000) : up_to(5000));
          continue;
        }
        int const kind = round % 4 == 0 ? up_to(3) : round % 4 == 1 ? 4 : round % 4 == 2 ? (up_to(15) == 0 ? 3 : 1) : 0;
        int const queries = kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? up_to(40) : kind == 3 ? up_to(3000) : 7;
        starts.push_back(starts.back() + queries);
        keys.push_back(kind == 4 ? 1000 : up_to(3) == 0 ? up_to(100'000) : up_to(900));
      }
      OnDevice<int> const starts_on_device(starts);
      OnDevice<int> const keys_on_device(keys);
      ScheduleKernelParams params{};
      params.mask = {up_to(3) == 0 ? up_to(2000) : kUnlimited, up_to(1) == 0 ? 0 : kUnlimited,
                     up_to(3) == 0 ? 1 + up_to(5000) : 0};
      int const fixed = round >= 8 ? 32 : 0;
      params.prefill = TileShape{48, 128, fixed == 0 ? 0 : 1 << 30};
      params.decode = TileShape{16, 64, fixed, fixed == 0 ? 4 : 1};
      params.readers = {.ctas = 132, .beside_prefill = 99, .cluster = up_to(1) == 0 ? 1 : 4, .of_many = 132};
      if (fixed == 0 && up_to(3) > 0) {
        params.even_parts = {.ctas = up_to(1) == 0 ? 132 : 1 + up_to(300),
                             .head_groups = 1 + up_to(3),
                             .least_units = 2,
                             .queries_of_one = 24,
                             .many_ctas = up_to(3) == 0 ? 0 : 132,
                             .many_queries = FastDivmod(32),
                             .units_of_chunks = 16};
      }
      params.sequences.batch = batch;
      params.sequences.seqlen_q = starts.back();
      params.sequences.capacity_k = 1 << 20;
      ScheduleKernelParams host = params;
      host.sequences.cu_seqlens_q = starts.data();
      host.sequences.seqused_k = keys.data();
      std::vector<int> expected = model_metadata(host);
      std::vector<int> poison(expected.size(), -7);
      OnDevice<int> const metadata(poison);
      params.sequences.cu_seqlens_q = starts_on_device.data();
      params.sequences.seqused_k = keys_on_device.data();
      params.metadata = metadata.data();
      ScheduleGrid const grid = schedule_grid(batch);
      (grid.ctas == 1 ? schedule_kernel : schedule_cluster_kernel)<<<grid.ctas, grid.threads>>>(params);
      check(cudaGetLastError(), "launch of the schedule kernel");
      std::vector<int> const made = metadata.host();
      ++batches;
      int const fact = *where_is(expected.data(), schedule_stride(batch), kPlacesAndCuts);
      even += PlacesAndCuts::of(fact).even_parts;
      drafts += PlacesAndCuts::of(fact).one_each;
      if (PlacesAndCuts::of(fact).even_parts && PlacesAndCuts::of(fact).prefill > 0 && fact >= 0) {
        int const most_parts = *where_is(expected.data(), schedule_stride(batch), kMostUnitsDecode);
        ++(UnitsAndParts::parts(most_parts) > 1 ? cut_of_both : whole_of_both);
      }
      if (made != expected) {
        if (++wrong <= 5) { std::fprintf(stderr, "batch %d, round %d: the schedule differs\n", batch, round); }
        continue;
      }

      AttentionParams work{};
      work.listed = true;
      work.packing = make_packing(4);
      work.mask = params.mask;
      work.keys_in_l2 = 4096;
      work.sequences = params.sequences;
      work.schedule.metadata = metadata.data();
      work.schedule.batch = batch;
      work.schedule.stride = schedule_stride(batch);
      bool const of_both = up_to(2) == 0;
      work.schedule.places = of_both ? Places::kAll : round % 2 == 0 ? Places::kDecode : Places::kPrefill;
      work.schedule.mixed = work.schedule.parts_many = of_both;
      if (of_both) { work.schedule.resized = {3, FastDivmod(2)}; }
      work.schedule.head_groups = FastDivmod(1 + up_to(7));
      work.schedule.ctas = 132;
      work.schedule.may_split = work.schedule.always_split = round % 3 != 0;
      work.schedule.fixed_splits = fixed != 0;
      work.schedule.least_units = fixed == 0 ? 2 : 1;
      work.schedule.most_tiles = work.schedule.most_units = 1 << 25;
      int const slabs = of_both ? 2 : work.schedule.places == Places::kDecode ? 1 : 3;
      int const block = (slabs == 1 ? params.decode : params.prefill).keys;
      std::size_t const count = std::size_t{132} * kMostItems;
      std::vector<ListedItem> wanted(count);
      OnDevice<ListedItem> const listed(wanted);
      (of_both ? list_all<ListedSourceOfBoth> : list_all<ListedSource>)<<<132, 32>>>(work, slabs, block, listed.data());
      check(cudaGetLastError(), "launch of the list");
      std::vector<ListedItem> const found = listed.host();
      work.sequences = host.sequences;
      work.schedule.metadata = expected.data();
      (of_both ? list_all_here<ListedSourceOfBoth> : list_all_here<ListedSource>)(work, slabs, block, wanted.data());
      if (std::memcmp(found.data(), wanted.data(), count * sizeof(ListedItem)) != 0 && ++wrong <= 5) {
        std::fprintf(stderr, "batch %d, round %d: host and device find different items\n", batch, round);
      }
    }
  }
  std::printf(
      "%d schedules, %d of them with tiles in even parts, %d of these with prompts, beside %d whole ones, %d of "
      "drafts, "
      "%d wrong\n",
      batches, even, cut_of_both, whole_of_both, drafts, wrong);
  return even >= 10 && cut_of_both >= 3 && drafts >= 3 ? wrong : wrong + 1;
}

int run() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no GPU");
    return kSkipped;
  }
  int const wrong_schedules = check_schedules() + check_clusters();
  constexpr int kCases = 200000;
  std::mt19937 random(1);
  std::vector<Case> cases;
  for (int i = 0; i < kCases; ++i) { cases.push_back(random_case(random)); }
  Case* on_device = nullptr;
  Answer* answers_on_device = nullptr;
  check(cudaMalloc(&on_device, kCases * sizeof(Case)), "cudaMalloc");
  check(cudaMalloc(&answers_on_device, kCases * sizeof(Answer)), "cudaMalloc");
  check(cudaMemcpy(on_device, cases.data(), kCases * sizeof(Case), cudaMemcpyHostToDevice), "cudaMemcpy");
  answer_all<<<(kCases + 255) / 256, 256>>>(on_device, answers_on_device, kCases);
  check(cudaGetLastError(), "launch");
  std::vector<Answer> answers(kCases);
  check(cudaMemcpy(answers.data(), answers_on_device, kCases * sizeof(Answer), cudaMemcpyDeviceToHost), "cudaMemcpy");

  int wrong = 0;
  for (int i = 0; i < kCases; ++i) {
    Answer const expected = answer(cases[i]);
    if (std::memcmp(&expected, &answers[i], sizeof(Answer)) != 0 && ++wrong <= 5) {
      std::fprintf(stderr, "case %d of seed 1: host and device differ\n", i);
    }
  }
  std::printf("%d cases, %d wrong\n", kCases, wrong);
  return wrong + wrong_schedules == 0 ? 0 : 1;
}

}  // namespace
}  // namespace hopper_attention

int main() { return hopper_attention::run(); }
