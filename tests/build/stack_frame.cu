// Planted: an array indexed by a run-time number lives on the stack.
__global__ void stack_frame(float* data, int const* order) {
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) { x[i] = data[i]; }
  for (int i = 0; i < 16; ++i) { x[order[i] & 15] += x[i]; }
#pragma unroll
  for (int i = 0; i < 16; ++i) { data[i] = x[i]; }
}
