// Reductions: SHFL, VOTE, MATCH, REDUX, shared and global atomics, RED, a last-block pattern.
extern "C" __global__ void reduce_sum(const float* __restrict__ x, float* out, unsigned* done, int n) {
  __shared__ float partial[32];
  __shared__ bool last;
  float sum = 0.f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0.f;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  }
  if (threadIdx.x == 0) {
    atomicAdd(out, sum);
    __threadfence();
    last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) out[1] = __fsqrt_rn(*static_cast<volatile float*>(out));
}

extern "C" __global__ void histogram(const unsigned* __restrict__ keys, unsigned* bins, int n) {
  __shared__ unsigned local[256];
  local[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) {
    const unsigned key = keys[i] & 255u;
    const unsigned peers = __match_any_sync(__activemask(), key);
    if ((threadIdx.x & 31) == __ffs(peers) - 1) atomicAdd(&local[key], __popc(peers));
  }
  __syncthreads();
  if (const unsigned count = local[threadIdx.x]) atomicAdd(&bins[threadIdx.x], count);
}

extern "C" __global__ void vote(const int* __restrict__ x, int* out, unsigned long long* best, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int value = i < n ? x[i] : 0;
  const unsigned mask = __ballot_sync(~0u, value > 0);
  const int total = __reduce_add_sync(~0u, value);
  const int top = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) {
    out[i / 32] = total + __popc(mask) + __any_sync(1u, top > 3);
    atomicMax(best, ((unsigned long long)(unsigned)top << 32) | i);
    atomicCAS(out + n, 0, top);
    atomicExch(out + n + 1, total);
  }
}
