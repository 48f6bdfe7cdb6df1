// Computes scheduler metadata: orders the sequences and sums up their work.
#pragma once

#include "kernels/cutting_pays.h"
#include "kernels/dependent_launch.h"
#include "kernels/lanes.h"
#include "kernels/schedule_params.h"
#include "kernels/try_parts.h"

namespace hopper_attention {

namespace schedule_detail {

constexpr int kWarps = kScheduleThreads / 32;
constexpr int kBuckets = kScheduleBuckets;  // half of each class

// Blocks of a tile, with its ends, to an eighth: 16 steps where they double. Longer tiles have smaller numbers.
__device__ __forceinline__ int bucket_of(bool decode, SequenceWork const& in_blocks) {
  int const blocks = in_blocks.tiles == 0 ? 0 : in_blocks.units;
  int const exponent = blocks < 8 ? 0 : 28 - __clz(blocks);
  int const step = blocks < 8 ? blocks : 8 * (exponent + 1) + (blocks >> exponent) - 8;
  return (decode ? kBuckets : kBuckets / 2) - 1 - min_of(step, kBuckets / 2 - 1);
}

// Of all sequences of prefill and, one further on, of decode: blocks of the longest tile, tiles, and their blocks, all
// with what tiles take beside them (TileShape::ends).
enum ClassNumber : int { kMost = 0, kTiles = 2, kBlocks = 4, kClassNumbers = 6 };

// Of a warp: the largest, or the sum.
__device__ __forceinline__ int reduce_class_number(int i, int value) {
  return i < kTiles ? __reduce_max_sync(kAllLanes, value) : __reduce_add_sync(kAllLanes, value);
}

// What a place adds to the sums.
struct PlaceWork {
  int tiles;
  int units;  // of all its tiles; UnitsAndParts where these are cut evenly
};

struct Shared {
  alignas(16) int of_warp[kWarps][kBuckets];  // sequences of a bucket in a warp, then those in the warps before it
  int of_cta[kBuckets];                       // sequences of a bucket in this CTA
  int place[kBuckets];                        // where this CTA's first sequence of a bucket goes
  int buckets_of_warp[kBuckets / 32];
  PlaceWork work[kScheduleThreads];  // of the places that this CTA's threads sum up
  SequencesToCut to_cut;
  PlaceWork work_of_warp[kWarps];
  PlaceWork work_of_cta[kScheduleCluster];  // written by the CTAs before this one
  int class_of_warp[kClassNumbers][kWarps];
  int class_of_cta[kClassNumbers];
  int of_class[kClassNumbers];  // in the first CTA
};

static_assert(sizeof(Shared) <= 48 << 10, "more static shared memory than CUDA 12 compiles");

// The CTAs that make one schedule: one, or a cluster whose shared memory all of them reach.
template <int kCtas>
struct Ctas {
  __device__ __forceinline__ static int rank() { return kCtas == 1 ? 0 : static_cast<int>(blockIdx.x); }

  // What was written before it, to global or shared memory, is read after it.
  __device__ __forceinline__ static void sync() {
    if constexpr (kCtas == 1) {
      __syncthreads();
    } else {
      __cluster_barrier_arrive();
      __cluster_barrier_wait();
    }
  }

  template <class T>
  __device__ __forceinline__ static T& at(T& shared, int rank) {
    if constexpr (kCtas == 1) { return shared; }
    return *static_cast<T*>(__cluster_map_shared_rank(&shared, static_cast<unsigned>(rank)));
  }
};

// By one warp. Four lanes ask whether cutting pays: over whole tiles and over clusters, of decode and of all.
__device__ __forceinline__ void write_facts(ScheduleKernelParams const& params, int const (&numbers)[kClassNumbers],
                                            int prefill, int* facts) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  bool const of_all = (lane & 2) != 0;
  bool const clusters = (lane & 1) != 0;
  long long const groups = params.even_parts.head_groups;
  auto const sum = [&](int i) { return groups * (numbers[i + 1] + (of_all ? numbers[i] : 0)); };
  int const most = max_of(numbers[kMost + 1], of_all ? numbers[kMost] : 0);
  WholeTiles const tiles{sum(kTiles), sum(kBlocks), most};
  long long const beside = of_all ? 0 : groups * numbers[kBlocks];
  int const longest_part = params.decode.fixed_split;
  bool const may_cut = longest_part == 0 || most > longest_part;
  int const cutting = units_of_cutting(of_all, longest_part > 0);
  bool const pays = may_cut && cutting_pays_beside(tiles, beside, clusters ? params.readers.cluster : 1, params.readers,
                                                   enough_readers(params.readers.ctas, longest_part > 0), cutting);
  int const cuts = static_cast<int>(__ballot_sync(kAllLanes, pays));
  constexpr int kCuts = (1 << PlacesAndCuts::kBits) - 1;
  if (lane > 0) { return; }
  facts[kPlacesAndCuts] = PlacesAndCuts{prefill, cuts & kCuts, cuts >> PlacesAndCuts::kBits & kCuts}.fact();
  facts[kMostUnitsPrefill] = numbers[kMost];
  facts[kMostUnitsDecode] = numbers[kMost + 1];
  facts[kDecodeCounter] = 0;
}

// Whether tiles are to be cut each by itself into even parts, and how many: the numbers of the places then have these,
// too. By all threads, of which each has one place, and one sequence that one tile of few queries `holds`, or none.
__device__ __forceinline__ bool cut_evenly(ScheduleKernelParams const& params, Shared& shared, int prefill, bool holds,
                                           bool writes_facts, int* facts) {
  EvenParts const& even = params.even_parts;
  int const thread = static_cast<int>(threadIdx.x);
  int const warps = static_cast<int>(blockDim.x) / 32 - 1;  // that take sequences
  int const most = max_of(shared.of_class[kMost], shared.of_class[kMost + 1]);
  bool const one_each = __syncthreads_and(holds) != 0;
  if ((one_each ? even.ctas : even.many_ctas) == 0 || most > kMostEvenUnits) { return false; }
  if (one_each && PlacesAndCuts::of(facts[kPlacesAndCuts]).cuts_all == 0) { return false; }
  bool const has_place = thread < params.sequences.batch;
  if (thread < warps * 32) {
    note_units(shared.to_cut, thread / 32, has_place ? shared.work[thread].units : 0,
               has_place ? shared.to_cut.at[thread] : EvenTiles{});
  }
  NotedStep const noted{warps, prefill, most, shared.of_class[kMost + 1], one_each};
  TriedParts chosen;
  if (prefill == 0) {
    chosen =
        best_parts(params, shared.to_cut, noted, [](auto const& step, int i) { return try_parts_of_few(step, i); });
  }
  if (chosen.cost == TriedParts::kNever) {
    chosen =
        best_parts(params, shared.to_cut, noted, [](auto const& step, int i) { return try_parts_by_cost(step, i); });
  }
  if (chosen.cost == TriedParts::kNever) { return false; }
  if (has_place) {
    PlaceWork& work = shared.work[thread];
    work.units = UnitsAndParts::of(work.units, shared.to_cut.at[thread].parts(chosen.size));
  }
  if (writes_facts) {
    auto said = PlacesAndCuts::of(facts[kPlacesAndCuts]);
    said.even_parts = true;
    said.one_each = one_each && prefill > 0;
    facts[kPlacesAndCuts] = said.fact();
    facts[kMostUnitsPrefill] = UnitsAndParts::of(facts[kMostUnitsPrefill], chosen.in_front);
    facts[kMostUnitsDecode] = UnitsAndParts::of(facts[kMostUnitsDecode], ceil_div_unsigned(most, chosen.size));
  }
  return true;
}

// Whether the tiles of a place of prefill may end with the longest. Until the last one is done, CTAs then have half of
// its time to fill on average; the longest is supposed to be twice as long as the mean. `units_until`: of the places up
// to and with it.
__device__ __forceinline__ void turn_tiles(ScheduleKernelParams const& params, Shared const& shared,
                                           PlaceWork const& work, int units_until, TilesUntil& until) {
  long long const tiles = static_cast<long long>(params.even_parts.head_groups) * work.tiles;
  long long const least = static_cast<long long>(params.readers.of_many) * work.units;
  long long const behind_in_class = shared.of_class[kBlocks] - units_until;
  until.turned_in_class = behind_in_class * tiles >= least;
  until.turned_in_all = (behind_in_class + shared.of_class[kBlocks + 1]) * tiles >= least;
}

template <int kCtas>
__device__ __forceinline__ void make_schedule(ScheduleKernelParams const& params, Shared& shared) {
  using Cluster = Ctas<kCtas>;
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x) - 32;  // that take sequences
  int const lane = thread % 32;
  int const warp = thread / 32;
  int const warps = threads / 32;
  bool const sums_facts = warp == warps;  // beside the others, who would all have to wait for it
  int const cta = Cluster::rank();
  int const batch = params.sequences.batch;
  int const stride = schedule_stride(batch);
  int* const order = params.metadata + 1;
  int* const tiles = order + stride;
  int* const units = tiles + stride;
  int* const facts = units + stride;
  // Each warp takes a stretch of the sequences, and later of the places, 32 at a time.
  int const turns_of_all = ceil_div(batch, threads * kCtas);
  int const turns = sums_facts ? 0 : turns_of_all;
  int const first = (cta * warps + warp) * turns * 32 + lane;

  start_dependents();
  int* const counts = shared.of_warp[warp];
#pragma unroll
  for (int i = 0; i < kBuckets; i += 128) { reinterpret_cast<int4*>(counts + i)[lane] = int4{0, 0, 0, 0}; }
  __syncwarp();
  wait_for_prerequisites();

  struct Entry {
    SequenceWork in_blocks{0, 0};
    SequenceWork work{0, 0};
    EvenTiles even;
    bool decode = true;
    bool is_one = true;     // one tile of few queries holds it
    int bucket = kBuckets;  // no sequence
    unsigned alike = 0;     // lanes whose sequences have the same bucket
  };
  auto const entry_of = [&](int b) {
    Entry entry;
    if (b < batch) {
      SeqlenQK const len = sequence_at(params.sequences, b).len;
      entry.decode = len.q <= params.decode.queries;
      FastTileShape const& shape = entry.decode ? params.decode : params.prefill;
      entry.in_blocks = work_in_blocks(shape, params.mask, len);
      entry.work = work_in_units(shape, entry.in_blocks);
      entry.is_one = len.q <= params.even_parts.queries_of_one;
      FastDivmod const& of_mixed = params.even_parts.many_queries;
      int const tiles = entry.decode ? entry.work.tiles : of_mixed.quotient(len.q + of_mixed.divisor - 1);
      entry.even = EvenTiles(tiles, entry.in_blocks.units, entry.in_blocks.least);
      entry.bucket = bucket_of(entry.decode, entry.in_blocks);
    }
    entry.alike = __match_any_sync(kAllLanes, entry.bucket);
    return entry;
  };
  // How many of the warp's sequences so far are in the bucket of a lane's, before its own in the order.
  auto const take_rank = [&](Entry const& entry) {
    int const before_in_warp = __popc(entry.alike & ((1U << lane) - 1));
    int const so_far = entry.bucket < kBuckets ? counts[entry.bucket] : 0;
    __syncwarp();
    if (entry.bucket < kBuckets && before_in_warp == 0) { counts[entry.bucket] = so_far + __popc(entry.alike); }
    __syncwarp();
    return so_far + before_in_warp;
  };

  // How many sequences each bucket has, of each warp.
  Entry entry;
  int class_number = 0;  // of the warp: of each lane its own one of ClassNumber
  for (int turn = 0; turn < turns; ++turn) {
    entry = entry_of(first + turn * 32);
    take_rank(entry);
    int const most = entry.work.tiles > 0 ? entry.in_blocks.units : 0;
    int const sum = entry.work.tiles > 0 ? entry.in_blocks.sum() : 0;
#pragma unroll
    for (int i = 0; i < kClassNumbers; ++i) {
      int const number = i < kTiles ? most : i < kBlocks ? entry.work.tiles : sum;
      int const of_turn = reduce_class_number(i, entry.decode == (i % 2 == 1) ? number : 0);
      int const so_far = i < kTiles ? max_of(class_number, of_turn) : class_number + of_turn;
      class_number = lane == i ? so_far : class_number;
    }
  }
  if (!sums_facts && lane < kClassNumbers) { shared.class_of_warp[lane][warp] = class_number; }
  __syncthreads();

  // Where each bucket begins: behind the buckets before it, then behind the CTAs and the warps before.
  int in_cta = 0;
  if (thread < kBuckets) {
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      int const count = shared.of_warp[w][thread];
      shared.of_warp[w][thread] = in_cta;
      in_cta += count;
    }
    shared.of_cta[thread] = in_cta;
  }
  if (sums_facts) {
#pragma unroll
    for (int i = 0; i < kClassNumbers; ++i) {
      int const of_cta = reduce_class_number(i, lane < warps ? shared.class_of_warp[i][lane] : 0);
      if (lane == 0) { (kCtas == 1 ? shared.of_class : shared.class_of_cta)[i] = of_cta; }
    }
  }
  if constexpr (kCtas > 1) {
    Cluster::sync();
    if (cta == 0 && sums_facts) {
#pragma unroll
      for (int i = 0; i < kClassNumbers; ++i) {
        int const of_cta = lane < kCtas ? Cluster::at(shared.class_of_cta[i], lane) : 0;
        int const of_all = reduce_class_number(i, of_cta);
        if (lane == 0) { shared.of_class[i] = of_all; }
      }
    }
  }
  int before = 0;
  int until = 0;
  if (thread < kBuckets) {
    int in_all = in_cta;
    if constexpr (kCtas > 1) {
      in_all = 0;
#pragma unroll
      for (int c = 0; c < kCtas; ++c) {
        int const count = Cluster::at(shared.of_cta[thread], c);
        before += c < cta ? count : 0;
        in_all += count;
      }
    }
    until = sum_until_lane(in_all);
    before += until - in_all;
    if (lane == 31) { shared.buckets_of_warp[warp] = until; }
  }
  __syncthreads();
  if (thread < kBuckets) {
    before += sum_of_warp(lane < warp ? shared.buckets_of_warp[lane] : 0);
    shared.place[thread] = before;
  }
  __syncthreads();

  // Prefill has the first half of the buckets.
  int const prefill = sum_of_warp(lane < kBuckets / 2 / 32 ? shared.buckets_of_warp[lane] : 0);
  if (cta == 0 && sums_facts && stride > 0) { write_facts(params, shared.of_class, prefill, facts); }

  // Each sequence to its place. Where each thread has one, what is to be summed up stays in shared memory.
  for (int turn = 0; turn < turns; ++turn) {
    int const b = first + turn * 32;
    if (turns > 1) { entry = entry_of(b); }
    int const rank = take_rank(entry);
    if (entry.bucket == kBuckets) { continue; }
    int const place = shared.place[entry.bucket] + rank;
    PlaceWork const work{entry.work.tiles, entry.work.sum()};
    order[place] = b;
    if (turns == 1) {
      int const owner = kCtas == 1 ? 0 : place / threads;
      Cluster::at(shared.work[place - owner * threads], owner) = work;
      if (kCtas == 1) { shared.to_cut.at[place] = entry.even; }
    } else {
      tiles[place] = work.tiles;
      units[place] = work.units;
    }
  }
  Cluster::sync();
  bool const is_small = kCtas == 1 && turns_of_all == 1;
  bool const even = is_small && cut_evenly(params, shared, prefill, entry.is_one, sums_facts && lane == 0, facts);

  // Sums over the places: of each thread's in its warp, of the warps, of the CTAs.
  auto const work_at = [&](int place) {
    if (place >= batch) { return PlaceWork{0, 0}; }
    return turns == 1 ? shared.work[thread] : PlaceWork{tiles[place], units[place]};
  };
  PlaceWork of_warp{0, 0};
  for (int turn = 0; turn < turns; ++turn) {
    PlaceWork const work = work_at(first + turn * 32);
    of_warp.tiles += sum_of_warp(work.tiles);
    of_warp.units += sum_of_warp(work.units);
  }
  if (lane == 0) { shared.work_of_warp[warp] = of_warp; }
  __syncthreads();
  PlaceWork const other = lane < warps ? shared.work_of_warp[lane] : PlaceWork{0, 0};
  PlaceWork sum{sum_of_warp(lane < warp ? other.tiles : 0), sum_of_warp(lane < warp ? other.units : 0)};
  if constexpr (kCtas > 1) {
    PlaceWork const of_cta{sum_of_warp(other.tiles), sum_of_warp(other.units)};
    if (warp == 0 && lane > cta && lane < kCtas) { Cluster::at(shared.work_of_cta[cta], lane) = of_cta; }
    Cluster::sync();  // behind it no CTA reaches into another: each may end
    PlaceWork const of_other = lane < cta ? shared.work_of_cta[lane] : PlaceWork{0, 0};
    sum.tiles += sum_of_warp(of_other.tiles);
    sum.units += sum_of_warp(of_other.units);
  }
  for (int turn = 0; turn < turns; ++turn) {
    int const place = first + turn * 32;
    PlaceWork const work = work_at(place);
    int const tiles_until = sum.tiles + sum_until_lane(work.tiles);
    int const units_until = sum.units + sum_until_lane(work.units);
    sum = {__shfl_sync(kAllLanes, tiles_until, 31), __shfl_sync(kAllLanes, units_until, 31)};
    if (place >= stride) { continue; }
    bool const may_turn = place < prefill && (prefill - 1 - place) % 2 == 1;  // so that lengths change slowly
    TilesUntil until{tiles_until, may_turn, may_turn};
    if (is_small && may_turn) {  // of more sequences each is little beside the others
      auto const plain = [&](int units) { return even ? UnitsAndParts::units(units) : units; };
      turn_tiles(params, shared, {work.tiles, plain(work.units)}, plain(units_until), until);
    }
    tiles[place] = until.word();
    units[place] = units_until;
    if (place >= batch) { order[place] = 0; }
    if (place >= kScheduleFactCount) { facts[place] = 0; }
  }
  if (cta == 0 && thread == 0) { params.metadata[0] = 0; }
}

}  // namespace schedule_detail

// One CTA, or a cluster for large batches, as schedule_grid() says. The sort is a counting sort and stable, so that the
// same lengths give the same metadata.
__global__ void __launch_bounds__(kScheduleThreads, 1)
    schedule_kernel(__grid_constant__ ScheduleKernelParams const params) {
  __shared__ schedule_detail::Shared shared;
  schedule_detail::make_schedule<1>(params, shared);
}

__global__ void __cluster_dims__(kScheduleCluster) __launch_bounds__(kScheduleThreads, 1)
    schedule_cluster_kernel(__grid_constant__ ScheduleKernelParams const params) {
  __shared__ schedule_detail::Shared shared;
  schedule_detail::make_schedule<kScheduleCluster>(params, shared);
}

}  // namespace hopper_attention
