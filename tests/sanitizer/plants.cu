#include "plants.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

namespace plants {
namespace {

constexpr int kThreads = 64;
constexpr int kBox = 64;        // elements of the TMA box, bytes here
constexpr int kAllocated = 32;  // bytes of the memory that the tensor map says to be kBox bytes long

__global__ void write_past_the_end(int* memory, int count) { memory[threadIdx.x == 0 ? count : threadIdx.x - 1] = 1; }

__global__ void read_without_barrier(int* out) {
  __shared__ int values[kThreads];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = values[(threadIdx.x + 32) % kThreads];  // written by the other warp, maybe later
}

__global__ void diverge_at_barrier(int* out) {
  if (threadIdx.x % 2 == 0) { __syncthreads(); }
  out[threadIdx.x] = 1;
}

__global__ void read_what_nobody_wrote(int const* memory, int* out) { out[threadIdx.x] = memory[threadIdx.x] + 1; }

// Loads a box by TMA that reaches past the end of the allocation.
__global__ void load_past_the_end(__grid_constant__ CUtensorMap const map, int* out) {
  __shared__ alignas(128) std::uint8_t box[kBox];
  __shared__ alignas(8) std::uint64_t barrier;
  auto const address = [](void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); };
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&barrier)));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(kBox)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" ::"r"(
            address(box)),
        "l"(&map), "r"(0), "r"(address(&barrier))
        : "memory");
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(address(&barrier))
        : "memory");
    out[0] = box[0];
  }
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*, cuuint64_t const*,
                            cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

bool tensor_map(void* memory, CUtensorMap* map) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      function == nullptr) {
    return false;
  }
  cuuint64_t const size = kBox;
  cuuint32_t const box = kBox, step = 1;
  return reinterpret_cast<Encode>(function)(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, memory, &size, nullptr, &box, &step,
                                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                            CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

std::vector<std::string> names() { return {"memcheck", "memcheck-tensor", "racecheck", "synccheck", "initcheck"}; }

bool run(std::string const& name) {
  int* memory = nullptr;
  int* out = nullptr;
  if (cudaMalloc(&memory, kThreads * sizeof(int)) != cudaSuccess ||
      cudaMalloc(&out, kThreads * sizeof(int)) != cudaSuccess) {
    std::fprintf(stderr, "plant: no GPU memory\n");
    return false;
  }
  if (name == "memcheck") {
    write_past_the_end<<<1, kThreads>>>(memory, kThreads);
  } else if (name == "memcheck-tensor") {
    void* small = nullptr;
    CUtensorMap map{};
    if (cudaMalloc(&small, kAllocated) != cudaSuccess || cudaMemset(small, 0, kAllocated) != cudaSuccess ||
        !tensor_map(small, &map)) {
      std::fprintf(stderr, "plant: no tensor map\n");
      return false;
    }
    load_past_the_end<<<1, kThreads>>>(map, out);
  } else if (name == "racecheck") {
    read_without_barrier<<<1, kThreads>>>(out);
  } else if (name == "synccheck") {
    diverge_at_barrier<<<1, kThreads>>>(out);
  } else if (name == "initcheck") {
    read_what_nobody_wrote<<<1, kThreads>>>(memory, out);
  } else {
    return false;
  }
  // What the tool makes of it is the tool's to say: memcheck ends the context of a kernel that it caught.
  std::printf("plant %s: %s\n", name.c_str(), cudaGetErrorString(cudaDeviceSynchronize()));
  return true;
}

}  // namespace plants
