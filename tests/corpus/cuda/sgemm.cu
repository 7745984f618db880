// Single-precision GEMM, 128x128x8 tiles in shared memory, 8x8 per thread: FFMA, LDS.128, BAR.
extern "C" __global__ void __launch_bounds__(256)
sgemm(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int m, int n,
      int k) {
  __shared__ float a_tile[8][128];
  __shared__ float b_tile[8][128];
  const int thread = threadIdx.x;
  const int row0 = blockIdx.y * 128, col0 = blockIdx.x * 128;
  const int a_row = thread / 2, a_col = (thread % 2) * 4;
  const int b_row = thread / 32, b_col = (thread % 32) * 4;
  const int tile_row = (thread / 16) * 8, tile_col = (thread % 16) * 8;
  float acc[8][8] = {};
  for (int k0 = 0; k0 < k; k0 += 8) {
    const float4 a4 = *reinterpret_cast<const float4*>(a + (size_t)(row0 + a_row) * k + k0 + a_col);
    const float4 b4 = *reinterpret_cast<const float4*>(b + (size_t)(k0 + b_row) * n + col0 + b_col);
    a_tile[a_col + 0][a_row] = a4.x;
    a_tile[a_col + 1][a_row] = a4.y;
    a_tile[a_col + 2][a_row] = a4.z;
    a_tile[a_col + 3][a_row] = a4.w;
    *reinterpret_cast<float4*>(&b_tile[b_row][b_col]) = b4;
    __syncthreads();
#pragma unroll
    for (int inner = 0; inner < 8; ++inner) {
      float a_regs[8], b_regs[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) a_regs[i] = a_tile[inner][tile_row + i];
#pragma unroll
      for (int j = 0; j < 8; ++j) b_regs[j] = b_tile[inner][tile_col + j];
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] += a_regs[i] * b_regs[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
      c[(size_t)(row0 + tile_row + i) * n + col0 + tile_col + j] = acc[i][j];
}
