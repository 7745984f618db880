// C = A B^T in bf16 with cp.async, ldmatrix and mma.sync: three buffers, two groups of copies under
// way, a __syncthreads before each step. Two warps side by side have 32 x 16 of C each.
#include <cuda_bf16.h>
#include <cstdint>
#include <cstdio>
#include <vector>

#define BM 32
#define BN 32
#define BK 32
#define BUFFERS 3
#define PITCH (BK + 8)

__device__ inline void copy16(void* to, const void* from) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" :: "r"(at), "l"(from));
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;\n" ::); }
template <int n> __device__ inline void wait_copies() { asm volatile("cp.async.wait_group %0;\n" :: "n"(n)); }
__device__ inline void ldsm4(uint32_t (&r)[4], const void* p) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(p);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__global__ void gemm(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int n, int k) {
  extern __shared__ __align__(16) unsigned char raw[];
  __nv_bfloat16 (*sa)[BM][PITCH] = (__nv_bfloat16(*)[BM][PITCH])raw;
  __nv_bfloat16 (*sb)[BN][PITCH] = (__nv_bfloat16(*)[BN][PITCH])(raw + BUFFERS * BM * PITCH * 2);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = k / BK;
  auto fetch = [&](int step) {
    for (int i = threadIdx.x; i < BM * BK / 8; i += blockDim.x) {
      const int r = i / (BK / 8), q = i % (BK / 8) * 8;
      copy16(&sa[step % BUFFERS][r][q], a + (blockIdx.y * BM + r) * k + step * BK + q);
      copy16(&sb[step % BUFFERS][r][q], b + (blockIdx.x * BN + r) * k + step * BK + q);
    }
  };
  float acc[2][2][4] = {};
  fetch(0);
  commit();
  fetch(1);
  commit();
  for (int step = 0; step < steps; ++step) {
    wait_copies<1>();
    __syncthreads();
    if (step + 2 < steps) fetch(step + 2);
    commit();
    const int buffer = step % BUFFERS;
    for (int kk = 0; kk < BK; kk += 16) {
      uint32_t fb[4];
      ldsm4(fb, &sb[buffer][warp * 16 + lane % 8 + lane / 16 * 8][kk + lane / 8 % 2 * 8]);
      for (int i = 0; i < 2; ++i) {
        uint32_t fa[4];
        ldsm4(fa, &sa[buffer][i * 16 + lane % 16][kk + lane / 16 * 8]);
        mma(acc[i][0], fa, fb[0], fb[1]);
        mma(acc[i][1], fa, fb[2], fb[3]);
      }
    }
  }
  // Through shared memory, so that rows are written whole.
  wait_copies<0>();
  __syncthreads();
  float (*out)[BN] = (float(*)[BN])raw;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j)
      for (int e = 0; e < 4; ++e)
        out[i * 16 + lane / 4 + e / 2 * 8][warp * 16 + j * 8 + lane % 4 * 2 + e % 2] = acc[i][j][e];
  __syncthreads();
  for (int i = threadIdx.x; i < BM * BN; i += blockDim.x)
    c[(blockIdx.y * BM + i / BN) * n + blockIdx.x * BN + i % BN] = out[i / BN][i % BN];
}

int main() {
  const int m = 64, n = 64, k = 160;
  std::vector<__nv_bfloat16> a(m * k), b(n * k);
  for (int i = 0; i < m * k; ++i) a[i] = __float2bfloat16(i * 3 % 7 - 3);
  for (int i = 0; i < n * k; ++i) b[i] = __float2bfloat16(i * 5 % 11 - 5);
  __nv_bfloat16 *da, *db;
  float* dc;
  cudaMalloc((void**)&da, m * k * 2);
  cudaMalloc((void**)&db, n * k * 2);
  cudaMalloc((void**)&dc, m * n * 4);
  cudaMemcpy(da, a.data(), m * k * 2, cudaMemcpyHostToDevice);
  cudaMemcpy(db, b.data(), n * k * 2, cudaMemcpyHostToDevice);
  gemm<<<dim3(n / BN, m / BM), 64, BUFFERS * (BM + BN) * PITCH * 2>>>(da, db, dc, n, k);
  std::vector<float> c(m * n);
  cudaMemcpy(c.data(), dc, m * n * 4, cudaMemcpyDeviceToHost);
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      float want = 0;
      for (int q = 0; q < k; ++q) want += float(a[i * k + q]) * float(b[j * k + q]);
      if (!(want == c[i * n + j])) { printf("%d %d\n", i, j); return 1; }
    }
  return 0;
}
