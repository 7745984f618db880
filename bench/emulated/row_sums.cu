// Threads only: y[r] = sum over a row of x, then x transposed in tiles by each warp. Warps exchange
// through shared memory under __syncwarp, blocks under __syncthreads.
#include <cuda_runtime.h>
#include <cstdio>
#include <vector>

constexpr int THREADS = 128, WARPS = THREADS / 32;

__global__ void row_sums(const float* x, float* y, int rows, int cols) {
  __shared__ float parts[WARPS];
  __shared__ float total;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0;
    for (int i = threadIdx.x; i < cols; i += THREADS) sum += x[row * cols + i];
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float all = 0;
      for (int w = 0; w < WARPS; ++w) all += parts[w];
      total = all;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < cols; i += THREADS) y[row * cols + i] = x[row * cols + i] - total;
  }
}

__global__ void transposed(const float* x, float* y, int rows, int cols) {
  __shared__ float tiles[WARPS][32][33];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = cols / 32;
  float (&tile)[32][33] = tiles[warp];
  for (int t = blockIdx.x * WARPS + warp; t < rows / 32 * across; t += gridDim.x * WARPS) {
    const int r = t / across * 32, c = t % across * 32;
    for (int i = 0; i < 32; ++i) tile[i][lane] = x[(r + i) * cols + c + lane];
    __syncwarp();
    for (int i = 0; i < 32; ++i) y[(c + i) * rows + r + lane] = tile[lane][i];
    __syncwarp(0xffffffffu);
  }
}

// The longest run of a warp: a leader lane keeps a list that all lanes read.
__global__ void leaders(const int* x, int* y, int n) {
  __shared__ int lists[WARPS][32];
  __shared__ int counts[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int at = (blockIdx.x * WARPS + warp) * 32; at < n; at += gridDim.x * WARPS * 32) {
    const unsigned odd = __ballot_sync(0xffffffffu, x[at + lane] & 1);
    if (lane == 0) {
      int count = 0;
      for (int i = 0; i < 32; ++i)
        if (odd >> i & 1) lists[warp][count++] = i;
      counts[warp] = count;
    }
    __syncwarp();
    y[at + lane] = lane < counts[warp] ? lists[warp][lane] : -1;
    __syncwarp();
  }
}

int main() {
  const int rows = 64, cols = 96;
  float *x, *y, *z;
  cudaMallocManaged(&x, rows * cols * sizeof(float));
  cudaMallocManaged(&y, rows * cols * sizeof(float));
  cudaMallocManaged(&z, rows * cols * sizeof(float));
  for (int i = 0; i < rows * cols; ++i) x[i] = i % 17 - 8;
  row_sums<<<3, THREADS>>>(x, y, rows, cols);
  transposed<<<1, THREADS>>>(x, z, rows, cols);
  cudaDeviceSynchronize();
  for (int r = 0; r < rows; ++r) {
    float sum = 0;
    for (int c = 0; c < cols; ++c) sum += x[r * cols + c];
    for (int c = 0; c < cols; ++c)
      if (!(y[r * cols + c] == x[r * cols + c] - sum && z[c * rows + r] == x[r * cols + c])) {
        printf("row %d column %d\n", r, c);
        return 1;
      }
  }
  int *in, *out;
  const int n = 1024;
  cudaMallocManaged(&in, n * sizeof(int));
  cudaMallocManaged(&out, n * sizeof(int));
  for (int i = 0; i < n; ++i) in[i] = i * i * 7 + i / 3;
  leaders<<<2, THREADS>>>(in, out, n);
  for (int at = 0; at < n; at += 32) {
    int count = 0;
    for (int i = 0; i < 32; ++i)
      if (in[at + i] & 1 && out[at + count++] != i) return 2;
    for (; count < 32; ++count)
      if (out[at + count] != -1) return 3;
  }
  return 0;
}
