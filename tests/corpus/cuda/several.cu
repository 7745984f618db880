// Several small kernels in one cubin: streaming, transpose, stencil, texture-free gather, bytes.
#include <cuda_fp16.h>

extern "C" __global__ void saxpy(float a, const float4* __restrict__ x, float4* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float4 u = x[i];
  float4 v = y[i];
  v.x += a * u.x;
  v.y += a * u.y;
  v.z += a * u.z;
  v.w += a * u.w;
  y[i] = v;
}

extern "C" __global__ void transpose(const float* __restrict__ x, float* __restrict__ y, int m, int n) {
  __shared__ float tile[32][33];
  const int col = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
#pragma unroll
  for (int j = 0; j < 32; j += 8) tile[threadIdx.y + j][threadIdx.x] = x[(size_t)(row + j) * n + col];
  __syncthreads();
  const int out_col = blockIdx.y * 32 + threadIdx.x, out_row = blockIdx.x * 32 + threadIdx.y;
#pragma unroll
  for (int j = 0; j < 32; j += 8)
    y[(size_t)(out_row + j) * m + out_col] = tile[threadIdx.x][threadIdx.y + j];
}

extern "C" __global__ void stencil(const half2* __restrict__ x, half2* __restrict__ y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x + 1;
  if (i >= n - 1) return;
  const half2 quarter = __floats2half2_rn(0.25f, 0.25f);
  y[i] = __hfma2(__hadd2(x[i - 1], x[i + 1]), quarter, __hmul2(x[i], __hadd2(quarter, quarter)));
}

extern "C" __global__ void bytes(const unsigned char* __restrict__ x, unsigned char* y,
                                 const signed char* __restrict__ w, int* dots, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __brev(x[i]) >> 24;
  const int* words = reinterpret_cast<const int*>(w);
  dots[i] = __dp4a(words[i], words[i ^ 1], (int)__byte_perm(words[i], i, 0x3214));
}

extern "C" __global__ void gather(const long long* __restrict__ index, const float* __restrict__ x,
                                  float* y, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x)
    __stcs(y + i, __ldcg(x + index[i]));
}
