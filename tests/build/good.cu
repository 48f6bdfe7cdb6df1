// The control: nothing to reject.
__global__ void good(float* data) { data[threadIdx.x] *= 2.0F; }
