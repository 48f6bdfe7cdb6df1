// Planted: accumulators are read while a WGMMA may still write them, so that ptxas serialises the WGMMAs.
#include <cstdint>

namespace {

__device__ void wgmma(float (&d)[4], std::uint64_t a, std::uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"(a), "l"(b));
}

}  // namespace

__global__ void serialised_wgmma(float* out, std::uint64_t a, std::uint64_t b) {
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;\n");
  wgmma(d, a, b);
  d[0] *= 2.0F;
  wgmma(d, a, b);
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n");
  for (int i = 0; i < 4; ++i) { out[threadIdx.x * 4 + i] = d[i]; }
}
