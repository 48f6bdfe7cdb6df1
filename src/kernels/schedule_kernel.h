// Computes scheduler metadata: one CTA that orders the sequences and sums up their work.
#pragma once

#include "kernels/dependent_launch.h"
#include "kernels/schedule_params.h"

namespace hopper_attention {

namespace schedule_detail {

constexpr int kWarps = kScheduleThreads / 32;
constexpr int kBuckets = 256;  // 128 of each class
constexpr int kItems = 4;      // sequences of a thread in a round

// Blocks of a tile to an eighth: 16 steps where they double. Longer tiles have smaller numbers.
__device__ __forceinline__ int bucket_of(bool decode, SequenceWork const& work) {
  int const units = work.tiles == 0 ? 0 : work.units;
  int const exponent = units < 8 ? 0 : 28 - __clz(units);
  int const step = units < 8 ? units : 8 * (exponent + 1) + (units >> exponent) - 8;
  return (decode ? kBuckets : kBuckets / 2) - 1 - min_of(step, kBuckets / 2 - 1);
}

struct Shared {
  int place[kBuckets];                       // sequences of a bucket, then where its next one goes
  unsigned short of_warp[kWarps][kBuckets];  // sequences of a warp in this round, then those of the warps before it
  int sums[2][kWarps];
  int most[2];
  int prefill;
};

__device__ __forceinline__ int inclusive_sum(int value) {
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(0xffffffff, value, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) { value += other; }
  }
  return value;
}

// Inclusive sums over the CTA's threads of two numbers, on top of `carry`, which becomes the last thread's sums.
__device__ __forceinline__ void scan(int (&value)[2], int (&carry)[2], Shared& shared) {
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  int const warps = blockDim.x / 32;
  for (int i = 0; i < 2; ++i) {
    value[i] = inclusive_sum(value[i]);
    if (lane == 31) { shared.sums[i][warp] = value[i]; }
  }
  __syncthreads();
  for (int i = 0; i < 2; ++i) {
    int const mine = lane < warps ? shared.sums[i][lane] : 0;
    int const all = __reduce_add_sync(0xffffffff, mine);
    int const before = __reduce_add_sync(0xffffffff, lane < warp ? mine : 0);
    value[i] += carry[i] + before;
    carry[i] += all;
  }
  __syncthreads();
}

}  // namespace schedule_detail

// One CTA of kScheduleThreads threads or fewer, at least as many as there are buckets. Stable: sequences of a bucket
// keep their order, so that the same lengths give the same metadata.
__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(__grid_constant__ ScheduleKernelParams const params) {
  using namespace schedule_detail;
  __shared__ Shared shared;
  int const thread = threadIdx.x;
  int const threads = blockDim.x;
  int const lane = thread % 32;
  int const warp = thread / 32;
  int const warps = threads / 32;
  int const batch = params.sequences.batch;
  int const stride = schedule_stride(batch);
  int* const order = params.metadata + 1;
  int* const tiles = order + stride;
  int* const units = tiles + stride;
  int* const facts = units + stride;

  start_dependents();
  if (thread < kBuckets) { shared.place[thread] = 0; }
  if (thread < 2) { shared.most[thread] = 0; }
  __syncthreads();
  wait_for_prerequisites();

  struct Entry {
    SequenceWork work;
    bool decode;
    int bucket;
  };
  auto const entry_of = [&](int b) {
    if (b >= batch) { return Entry{{0, 0}, true, kBuckets}; }
    SeqlenQK const len = sequence_at(params.sequences, b).len;
    bool const decode = len.q <= params.decode.queries;
    SequenceWork const work = sequence_work(decode ? params.decode : params.prefill, params.mask, len);
    return Entry{work, decode, bucket_of(decode, work)};
  };
  // Each warp takes a stretch of the sequences, 32 at a time.
  int const items = min_of(kItems, ceil_div(batch, threads));
  int const in_round = threads * items;
  auto const sequence_of = [&](int first, int item) { return first + (warp * items + item) * 32 + lane; };
  Entry entry[kItems];
  auto const read_entries = [&](int first) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) { entry[i] = entry_of(i < items ? sequence_of(first, i) : batch); }
  };

  // How many sequences each bucket has, and from that its first place.
  for (int first = 0; first < batch; first += in_round) {
    read_entries(first);
    int most[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (entry[i].bucket < kBuckets) { atomicAdd(&shared.place[entry[i].bucket], 1); }
      int const units = entry[i].work.tiles > 0 ? entry[i].work.units : 0;
      most[0] = max_of(most[0], entry[i].decode ? 0 : units);
      most[1] = max_of(most[1], entry[i].decode ? units : 0);
    }
    for (int i = 0; i < 2; ++i) {
      int const of_warp = __reduce_max_sync(0xffffffff, most[i]);
      if (lane == 0 && of_warp > 0) { atomicMax(&shared.most[i], of_warp); }
    }
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first < kBuckets; first += 32) {
      if (first == kBuckets / 2) { shared.prefill = before; }
      int const count = shared.place[first + lane];
      int const until = before + inclusive_sum(count);
      shared.place[first + lane] = until - count;
      before = __shfl_sync(0xffffffff, until, 31);
    }
  }

  // Each sequence to its place: behind those of its bucket in earlier rounds, in earlier warps, earlier in its warp.
  for (int first = 0; first < batch; first += in_round) {
    for (int i = thread; i < warps * kBuckets; i += threads) { shared.of_warp[i / kBuckets][i % kBuckets] = 0; }
    __syncthreads();
    if (batch > in_round) { read_entries(first); }
    int rank[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int const bucket = entry[i].bucket;
      unsigned const alike = __match_any_sync(0xffffffff, bucket);
      int const in_group = __popc(alike & ((1U << lane) - 1));
      int const so_far = bucket < kBuckets ? shared.of_warp[warp][bucket] : 0;
      rank[i] = so_far + in_group;
      __syncwarp();
      if (bucket < kBuckets && in_group == 0) {
        shared.of_warp[warp][bucket] = static_cast<unsigned short>(so_far + __popc(alike));
      }
      __syncwarp();
    }
    __syncthreads();
    int of_round = 0;
    if (thread < kBuckets) {
#pragma unroll 8
      for (int w = 0; w < warps; ++w) {
        int const count = shared.of_warp[w][thread];
        shared.of_warp[w][thread] = static_cast<unsigned short>(of_round);
        of_round += count;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int const bucket = entry[i].bucket;
      if (bucket == kBuckets) { continue; }
      int const place = shared.place[bucket] + shared.of_warp[warp][bucket] + rank[i];
      order[place] = sequence_of(first, i);
      tiles[place] = entry[i].work.tiles;
      units[place] = entry[i].work.tiles * entry[i].work.units;
    }
    __syncthreads();
    if (thread < kBuckets) { shared.place[thread] += of_round; }
  }
  __syncthreads();

  // Sums over the places: each thread takes `items` neighbours.
  int carry[2] = {0, 0};
  for (int first = 0; first < stride; first += in_round) {
    int own[2][kItems];
    int value[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int const place = first + thread * items + i;
      bool const exists = i < items && place < batch;
      own[0][i] = exists ? tiles[place] : 0;
      own[1][i] = exists ? units[place] : 0;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      value[0] += own[0][i];
      value[1] += own[1][i];
    }
    int const total[2] = {value[0], value[1]};
    scan(value, carry, shared);
    int sum[2] = {value[0] - total[0], value[1] - total[1]};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int const place = first + thread * items + i;
      sum[0] += own[0][i];
      sum[1] += own[1][i];
      if (i < items && place < stride) {
        tiles[place] = sum[0];
        units[place] = sum[1];
        if (place >= batch) { order[place] = 0; }
      }
    }
  }
  for (int i = thread; i < stride; i += threads) {
    facts[i] = i == kPrefillPlaces      ? shared.prefill
               : i == kMostUnitsPrefill ? shared.most[0]
               : i == kMostUnitsDecode  ? shared.most[1]
                                        : 0;
  }
  if (thread == 0) { params.metadata[0] = 0; }
}

}  // namespace hopper_attention
