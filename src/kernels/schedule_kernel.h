// Computes scheduler metadata: one CTA that orders the sequences and sums up their work.
#pragma once

#include "kernels/dependent_launch.h"
#include "kernels/schedule_params.h"

namespace hopper_attention {

namespace schedule_detail {

constexpr int kWarps = kScheduleThreads / 32;
constexpr int kBuckets = 256;  // 128 of each class

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
    SeqlenQK const len = sequence_at(params.sequences, b).len;
    bool const decode = len.q <= params.decode.queries;
    SequenceWork const work = sequence_work(decode ? params.decode : params.prefill, params.mask, len);
    return Entry{work, decode, bucket_of(decode, work)};
  };

  // How many sequences each bucket has, and from that its first place.
  Entry entry{};
  for (int b = thread; b < batch; b += threads) {
    entry = entry_of(b);
    atomicAdd(&shared.place[entry.bucket], 1);
    if (entry.work.tiles > 0) { atomicMax(&shared.most[entry.decode ? 1 : 0], entry.work.units); }
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

  // Each sequence to its place: behind those of its bucket in earlier rounds, in earlier warps, in earlier lanes.
  for (int first = 0; first < batch; first += threads) {
    for (int i = thread; i < warps * kBuckets; i += threads) { shared.of_warp[i / kBuckets][i % kBuckets] = 0; }
    __syncthreads();
    int const b = first + thread;
    if (batch > threads && b < batch) { entry = entry_of(b); }
    int const bucket = b < batch ? entry.bucket : kBuckets;
    unsigned const alike = __match_any_sync(0xffffffff, bucket);
    int const rank = __popc(alike & ((1U << lane) - 1));
    if (b < batch && rank == 0) { shared.of_warp[warp][bucket] = static_cast<unsigned short>(__popc(alike)); }
    __syncthreads();
    int in_round = 0;
    if (thread < kBuckets) {
      for (int w = 0; w < warps; ++w) {
        int const count = shared.of_warp[w][thread];
        shared.of_warp[w][thread] = static_cast<unsigned short>(in_round);
        in_round += count;
      }
    }
    __syncthreads();
    if (b < batch) {
      int const place = shared.place[bucket] + shared.of_warp[warp][bucket] + rank;
      order[place] = b;
      tiles[place] = entry.work.tiles;
      units[place] = entry.work.tiles * entry.work.units;
    }
    __syncthreads();
    if (thread < kBuckets) { shared.place[thread] += in_round; }
  }
  __syncthreads();

  int carry[2] = {0, 0};
  for (int first = 0; first < stride; first += threads) {
    int const place = first + thread;
    int value[2] = {place < batch ? tiles[place] : 0, place < batch ? units[place] : 0};
    scan(value, carry, shared);
    if (place < stride) {
      tiles[place] = value[0];
      units[place] = value[1];
      if (place >= batch) { order[place] = 0; }
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
