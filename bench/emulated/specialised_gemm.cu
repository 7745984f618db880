// C = A B^T in bf16 (fp32 sums): one producer warp, two consumer warp groups, a ring of stages,
// one matmul in flight. Every consumer waits and gives back with one thread a warp group.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

typedef __nv_bfloat16 bf16;
constexpr int BM = 128, BN = 64, BK = 64, STAGES = 3, THREADS = 384;

struct Stage { bf16 a[BM * BK], b[BN * BK]; };
struct Smem { alignas(1024) Stage stage[STAGES]; alignas(8) uint64_t full[STAGES], empty[STAGES]; };

__device__ __forceinline__ uint32_t smem_of(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void init_barrier(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_of(bar)), "r"(count));
}
__device__ __forceinline__ void expect_bytes(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(smem_of(bar)), "r"(bytes));
}
__device__ __forceinline__ void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_of(bar)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* bar, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "LAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra LAB_WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(smem_of(bar)), "r"(phase));
}
__device__ __forceinline__ void load_tile(bf16* to, const CUtensorMap* map, uint64_t* bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem_of(to)), "l"(map), "r"(smem_of(bar)), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ uint64_t descriptor(const bf16* p) {
  uint64_t d = (smem_of(p) & 0x3ffff) >> 4;
  d |= uint64_t(1) << 16;           // leading offset: of no use with a swizzle
  d |= uint64_t(1024 >> 4) << 32;   // 8 rows of 128 bytes
  d |= uint64_t(1) << 62;           // 128-byte swizzle
  return d;
}
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_matmuls() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
template <int ScaleD> __device__ __forceinline__ void wgmma64(float (&d)[4][8], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,   %1,   %2,   %3,   %4,   %5,   %6,   %7,   "
      " %8,   %9,   %10,  %11,  %12,  %13,  %14,  %15,  "
      " %16,  %17,  %18,  %19,  %20,  %21,  %22,  %23,  "
      " %24,  %25,  %26,  %27,  %28,  %29,  %30,  %31},"
      " %32, %33, %34, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[0][4]), "+f"(d[0][5]), "+f"(d[0][6]), "+f"(d[0][7]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[1][4]), "+f"(d[1][5]), "+f"(d[1][6]), "+f"(d[1][7]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[2][4]), "+f"(d[2][5]), "+f"(d[2][6]), "+f"(d[2][7]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[3][4]), "+f"(d[3][5]), "+f"(d[3][6]), "+f"(d[3][7])
      : "l"(a), "l"(b), "n"(ScaleD));
}

__global__ void __launch_bounds__(THREADS) gemm(int m, int n, int k, float* c, const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Smem& s = *reinterpret_cast<Smem*>(raw);
  const int group = threadIdx.x / 128, trips = k / BK;
  const int row = blockIdx.y * BM, col = blockIdx.x * BN;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(&s.full[i], 1);
      init_barrier(&s.empty[i], 2);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(24));
    if (threadIdx.x == 0) {
      int phase = 0;
      for (int i = 0, slot = 0; i < trips; ++i) {
        wait(&s.empty[slot], phase ^ 1);
        expect_bytes(&s.full[slot], sizeof(Stage));
        load_tile(s.stage[slot].a, &map_a, &s.full[slot], i * BK, row);
        load_tile(s.stage[slot].b, &map_b, &s.full[slot], i * BK, col);
        if (++slot == STAGES) slot = 0, phase ^= 1;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(240));
    float d[4][8];
    const int part = group - 1;
    int phase = 0, old = -1;
    for (int i = 0, slot = 0; i < trips; ++i) {
      wait(&s.full[slot], phase);
      const bf16* a = s.stage[slot].a + part * 64 * BK;
      const bf16* b = s.stage[slot].b;
      fence_registers();
      if (i == 0) wgmma64<0>(d, descriptor(a), descriptor(b));
      else wgmma64<1>(d, descriptor(a), descriptor(b));
      for (int q = 1; q < BK / 16; ++q) wgmma64<1>(d, descriptor(a + 16 * q), descriptor(b + 16 * q));
      commit();
      wait_matmuls<1>();
      if (old >= 0 && threadIdx.x % 128 == 0) arrive(&s.empty[old]);
      old = slot;
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    wait_matmuls<0>();
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int r = row + part * 64 + warp * 16 + lane / 4, x = col + lane % 4 * 2;
    for (int w = 0; w < 4; ++w)
      for (int h = 0; h < 8; ++h)
        c[(r + h / 2 % 2 * 8) * n + x + w * 16 + h / 4 * 8 + h % 2] = d[w][h];
  }
}

static CUtensorMap map_of(bf16* p, int rows, int cols, int box_rows) {
  CUtensorMap map;
  const cuuint64_t dims[] = {cuuint64_t(cols), cuuint64_t(rows)}, pitch[] = {cuuint64_t(cols) * sizeof(bf16)};
  const cuuint32_t box[] = {BK, cuuint32_t(box_rows)}, steps[] = {1, 1};
  if (cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, dims, pitch, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    printf("no tensor map\n");
    exit(1);
  }
  return map;
}

int main() {
  const int m = 128, n = 64, k = 320;
  std::vector<bf16> a(m * k), b(n * k);
  for (auto& x : a) x = float(rand() % 5 - 2);
  for (auto& x : b) x = float(rand() % 5 - 2);
  bf16 *da, *db;
  float* dc;
  cudaMalloc(&da, a.size() * sizeof(bf16));
  cudaMalloc(&db, b.size() * sizeof(bf16));
  cudaMalloc(&dc, m * n * sizeof(float));
  cudaMemcpy(da, a.data(), a.size() * sizeof(bf16), cudaMemcpyHostToDevice);
  cudaMemcpy(db, b.data(), b.size() * sizeof(bf16), cudaMemcpyHostToDevice);
  cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  gemm<<<dim3(n / BN, m / BM), THREADS, sizeof(Smem)>>>(m, n, k, dc, map_of(da, m, k, BM), map_of(db, n, k, BN));
  std::vector<float> c(m * n);
  cudaMemcpy(c.data(), dc, c.size() * sizeof(float), cudaMemcpyDeviceToHost);
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int q = 0; q < k; ++q) sum += float(a[i * k + q]) * float(b[j * k + q]);
      if (!(c[i * n + j] == sum)) {
        printf("c[%d][%d] is %g, expected %g\n", i, j, c[i * n + j], sum);
        return 1;
      }
    }
  printf("right\n");
  return 0;
}
