// New keys, values and queries -> kernel parameters -> one launch. All but where tensors lie is computed once for calls
// of the same shapes.
#include "hopper_attention/append.h"

#include <algorithm>
#include <limits>

#include "hopper_attention/forward.h"
#include "host/cuda_launch.h"
#include "host/launches.h"
#include "host/memory_overlap.h"
#include "kernels/append_params.h"

namespace hopper_attention {
namespace {

// Beyond so many blocks for a tensor, three for each SM, a block takes more tokens instead: it looks up each of them
// once.
constexpr std::int64_t kBlocksOfJob = 400;
constexpr std::int64_t kRotaryVector = kAppendVectorBytes / 2;  // elements

int const* int32s(Tensor const& t) { return static_cast<int const*>(t.data); }

// (B, S, H, D) or packed (T, H, D).
TokenStrides strides(Tensor const& t) {
  int const first = t.rank - 3;
  return {first == 0 ? 0 : t.stride[0], t.stride[first], t.stride[first + 1]};
}

AppendJob move_job(Tensor const& source, Tensor const& destination) {
  int const first = source.rank - 3;
  std::int64_t const sequences = first == 0 ? 1 : source.shape[0];
  int const heads = static_cast<int>(source.shape[first + 1]);
  AppendJob job{.source_stride = strides(source),
                .destination_stride = strides(destination),
                .tokens = static_cast<int>(sequences * source.shape[first]),
                .heads = heads};
  if (heads == 0) { job.tokens = 0; }
  if (job.tokens == 0) { return job; }
  int const vectors = static_cast<int>(source.shape[first + 2]) * element_bytes(source.dtype) / kAppendVectorBytes;
  int const heads_per_block = std::clamp(kAppendThreads / vectors, 1, heads);
  int const head_blocks = (heads + heads_per_block - 1) / heads_per_block;
  std::int64_t const filling = kAppendThreads / (heads_per_block * vectors);
  std::int64_t const wanted = (std::int64_t{job.tokens} * head_blocks + kBlocksOfJob - 1) / kBlocksOfJob;
  job.tokens_per_block = static_cast<int>(std::clamp<std::int64_t>(std::max(filling, wanted), 1, kMaxTokensPerBlock));
  job.heads_per_block = FastDivmod(heads_per_block);
  job.head_blocks = FastDivmod(head_blocks);
  job.vectors = FastDivmod(vectors);
  job.seqlen = FastDivmod(static_cast<int>(source.shape[first]));
  return job;
}

std::int64_t blocks_of(AppendJob const& job) {
  std::int64_t const token_blocks = (std::int64_t{job.tokens} + job.tokens_per_block - 1) / job.tokens_per_block;
  return token_blocks * job.head_blocks.divisor;
}

CacheParams cache_params(AppendArguments const& args) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  bool const paged = args.page_table.given();
  std::int64_t const slots = args.k_cache.shape[1];
  CacheParams cache;
  cache.seqused_all = static_cast<int>(std::clamp<std::int64_t>(args.seqused_k_all, 0, kMost));
  cache.rows = static_cast<int>(args.k_cache.shape[0]);
  // Lengths are int32: no slot behind that is ever used.
  cache.capacity = static_cast<int>(std::min(paged ? args.page_table.shape[1] * slots : slots, kMost));
  if (paged) {
    cache.page_table_stride = args.page_table.stride[0];
    cache.page_size = FastDivmod(static_cast<int>(std::max<std::int64_t>(slots, 1)));
  }
  return cache;
}

bool in_vectors(Tensor const& table) {
  std::int64_t const bytes = element_bytes(table.dtype);
  return reinterpret_cast<std::uintptr_t>(table.data) % kAppendVectorBytes == 0 &&
         (table.shape[0] <= 1 || table.stride[0] * bytes % kAppendVectorBytes == 0);
}

RotaryParams rotary_params(AppendArguments const& args) {
  if (!args.rotary_cos.given()) { return {}; }
  Tensor const& cos = args.rotary_cos;
  Tensor const& sin = args.rotary_sin;
  return {.cos_stride = cos.stride[0],
          .sin_stride = sin.stride[0],
          .positions = static_cast<int>(cos.shape[0]),
          .half = static_cast<int>(cos.shape[1]),
          .float32 = cos.dtype == DataType::kFloat32,
          .interleaved = args.rotary_interleaved,
          .per_position = args.rotate_q_per_position,
          .by_vector = cos.shape[1] % kRotaryVector == 0 && in_vectors(cos) && in_vectors(sin)};
}

std::int64_t batch_of(AppendArguments const& args) {
  return args.cu_seqlens_k_new.given() ? args.cu_seqlens_k_new.shape[0] - 1 : args.k_new.shape[0];
}

void set_memory(AppendJob& job, Tensor const& source, Tensor const& destination, Tensor const& starts) {
  job.source = source.data;
  job.destination = destination.data;
  job.starts = int32s(starts);
}

// A tensor that is not given lies at null.
void set_memory(AppendParams& params, AppendArguments const& args) {
  params.cache.seqused = int32s(args.seqused_k);
  params.cache.batch_idx = int32s(args.cache_batch_idx);
  params.cache.page_table = int32s(args.page_table);
  set_memory(params.jobs[0], args.k_new, args.k_cache, args.cu_seqlens_k_new);
  set_memory(params.jobs[1], args.v_new, args.v_cache, args.cu_seqlens_k_new);
  if (!args.rotary_cos.given()) { return; }
  set_memory(params.jobs[2], args.q, args.q_rotated, args.cu_seqlens_q);
  params.rotary.cos = args.rotary_cos.data;
  params.rotary.sin = args.rotary_sin.data;
  params.rotary.seqlens = int32s(args.rotary_seqlens);
}

}  // namespace

AppendLaunch prepare_append(AppendArguments const& args) {
  bool const rotary = args.rotary_cos.given();
  AppendLaunch launch;
  AppendParams& params = launch.params;
  params.batch = static_cast<int>(batch_of(args));
  params.cache = cache_params(args);
  params.rotary = rotary_params(args);
  params.jobs[0] = move_job(args.k_new, args.k_cache);
  params.jobs[0].rotate = rotary;
  params.jobs[1] = move_job(args.v_new, args.v_cache);
  if (rotary) {
    params.jobs[2] = move_job(args.q, args.q_rotated);
    params.jobs[2].rotate = true;
    params.jobs[2].to_cache = false;
  }
  for (int i = 0; i < kAppendJobs; ++i) {
    params.first_block[i] = static_cast<int>(launch.blocks);
    launch.blocks += blocks_of(params.jobs[i]);
  }
  if (launch.blocks > 0) { require_supported_device(args.k_cache.device); }
  return launch;
}

void start(AppendLaunch const& launch, AppendArguments const& args, Stream stream) {
  if (launch.blocks == 0) { return; }
  AppendParams params = launch.params;
  set_memory(params, args);
  int const device = args.k_cache.device;
  DeviceGuard const guard(device);
  launch_kernel(append_kernel(args.k_cache.dtype),
                {.device = device,
                 .grid = dim3(static_cast<unsigned>(launch.blocks)),
                 .threads = kAppendThreads,
                 .start = Start::kOverlap},
                &params, stream, "the launch of the append kernel failed");
}

void launch_append(AppendArguments const& args, Stream stream) { start(prepare_append(args), args, stream); }

}  // namespace hopper_attention
