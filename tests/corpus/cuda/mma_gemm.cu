// fp16 GEMM with mma.sync, ldmatrix and a 3-deep cp.async ring: HMMA, LDSM, LDGSTS, LDGDEPBAR.
#include <cuda_fp16.h>

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 32, kDepth = 3;
constexpr int kTile = kBlockM * kBlockK;

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}

__device__ __forceinline__ int swizzle(int row, int col8) {  // element offset of an 8-element piece
  return row * kBlockK + ((col8 ^ ((row >> 1) & 3)) * 8);
}

__device__ void load_stage(half* a_s, half* b_s, const half* a, const half* b, int k, int k0) {
  for (int piece = threadIdx.x; piece < kTile / 8; piece += blockDim.x) {
    const int row = piece / 4, col8 = piece % 4;
    copy16(a_s + swizzle(row, col8), a + (size_t)row * k + k0 + col8 * 8);
    copy16(b_s + swizzle(row, col8), b + (size_t)row * k + k0 + col8 * 8);
  }
  asm volatile("cp.async.commit_group;");
}

__device__ __forceinline__ void load_matrix(unsigned (&r)[4], const half* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p)));
}

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[m, n] = a[m, k] @ b[n, k]^T, 8 warps of 32x64.
extern "C" __global__ void __launch_bounds__(256)
mma_gemm(const half* __restrict__ a, const half* __restrict__ b, half* __restrict__ c, int n, int k) {
  extern __shared__ __align__(128) half ring[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = (warp / 2) * 32, warp_n = (warp % 2) * 64;
  a += (size_t)blockIdx.y * kBlockM * k;
  b += (size_t)blockIdx.x * kBlockN * k;
  float acc[2][8][4] = {};
  const int steps = k / kBlockK;
  for (int s = 0; s < kDepth - 1; ++s)
    load_stage(ring + s * 2 * kTile, ring + s * 2 * kTile + kTile, a, b, k, s * kBlockK);
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 2));
    __syncthreads();
    const int next = step + kDepth - 1;
    half* slot = ring + (next % kDepth) * 2 * kTile;
    if (next < steps) load_stage(slot, slot + kTile, a, b, k, next * kBlockK);
    else asm volatile("cp.async.commit_group;");
    const half* a_s = ring + (step % kDepth) * 2 * kTile;
    const half* b_s = a_s + kTile;
#pragma unroll
    for (int inner = 0; inner < 2; ++inner) {
      unsigned a_frag[2][4], b_frag[4][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_matrix(a_frag[i], a_s + swizzle(warp_m + i * 16 + lane % 16, inner * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        load_matrix(b_frag[j], b_s + swizzle(warp_n + j * 16 + lane % 16, inner * 2 + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          mma(acc[i][j], a_frag[i], b_frag[j / 2][j % 2], b_frag[j / 2][j % 2 + 2]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = blockIdx.y * kBlockM + warp_m + i * 16 + lane / 4;
      const int col = blockIdx.x * kBlockN + warp_n + j * 8 + (lane % 4) * 2;
      *reinterpret_cast<half2*>(c + (size_t)row * n + col) =
          __floats2half2_rn(acc[i][j][0], acc[i][j][1]);
      *reinterpret_cast<half2*>(c + (size_t)(row + 8) * n + col) =
          __floats2half2_rn(acc[i][j][2], acc[i][j][3]);
    }
}
