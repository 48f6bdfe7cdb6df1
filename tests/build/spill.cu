// Planted: 128 values per thread live at once under a bound of 32 registers, so that ptxas must spill.
__global__ void __launch_bounds__(1024, 2) spill(float* data) {
  float x[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) { x[i] = data[i * 1024 + threadIdx.x]; }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) { data[(127 - i) * 1024 + threadIdx.x] = x[i] * x[(i * 37 + 11) % 128]; }
}
