// Programmatic dependent launch: how a kernel and the one before it on its stream overlap.
#pragma once

namespace hopper_attention {

// The next kernel may start as soon as all CTAs have called this or ended. It promises nothing about memory.
__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns when the kernel before has finished and what it wrote can be read. Also called by kernels that read nothing
// of it, at their end: so that a kernel that has finished means that all before it have.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A number that the kernel before may still write: read past L1, where it must not stay. Before
// wait_for_prerequisites() it is a hint what to fetch, or what the number will be.
__device__ __forceinline__ int load_hint(int const* number) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(number));
  return value;
}

// How sequence_at() reads lengths then.
struct HintLoad {
  __device__ __forceinline__ static int load(int const* number) { return load_hint(number); }
};

}  // namespace hopper_attention
