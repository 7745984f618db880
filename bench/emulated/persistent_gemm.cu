// C = A B^T in bf16, written as bf16: clusters of two blocks one above the other share the tile of
// B, each copies half of it to both. Persistent blocks, register reallocation, a store through
// shared memory (stmatrix, bulk tensor copies) that runs beside the next tile's loop.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <vector>

typedef __nv_bfloat16 bf16;
static constexpr int BM = 128, BN = 64, BK = 64, QSIZE = 3, CLUSTER = 2, NUM_THREADS = 384;

struct SMem {
  alignas(1024) bf16 A[QSIZE][BM * BK];
  alignas(1024) bf16 B[QSIZE][BN * BK];
  alignas(1024) bf16 C[BM * BN];
  alignas(8) uint64_t full[QSIZE], empty[QSIZE];
};

__device__ static inline uint32_t ptr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ static inline void wait(uint64_t* bar, int parity) {
  asm volatile("{\n.reg .pred P1;\nLAB_WAIT:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1;\n"
               "@P1 bra.uni DONE;\nbra.uni LAB_WAIT;\nDONE:\n}\n" ::"r"(ptr(bar)), "r"(parity));
}
__device__ static inline void arrive_cluster(uint64_t* bar, uint32_t cta) {
  asm volatile("{\n.reg .b32 remAddr32;\nmapa.shared::cluster.u32 remAddr32, %0, %1;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remAddr32];\n}\n" ::"r"(ptr(bar)), "r"(cta));
}
__device__ static inline void load_async(bf16* dst, const CUtensorMap* map, uint64_t* bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(ptr(dst)), "l"(reinterpret_cast<uint64_t>(map)), "r"(ptr(bar)), "r"(x), "r"(y) : "memory");
}
__device__ static inline void load_multicast(bf16* dst, const CUtensorMap* map, uint64_t* bar, int x, int y, uint16_t mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(ptr(dst)), "l"(reinterpret_cast<uint64_t>(map)), "r"(ptr(bar)), "r"(x), "r"(y), "h"(mask) : "memory");
}
__device__ static inline void store_async(const CUtensorMap* map, bf16* src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(reinterpret_cast<uint64_t>(map)), "r"(ptr(src)), "r"(x), "r"(y) : "memory");
}
template <uint32_t R> __device__ void reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" : : "n"(R)); }
template <uint32_t R> __device__ void reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" : : "n"(R)); }

__device__ static inline uint64_t desc(bf16* p) {
  return uint64_t((ptr(p) & 0x3FFFF) >> 4) | (uint64_t(1) << 16) | (uint64_t(64) << 32) | (uint64_t(1) << 62);
}
__device__ static inline void wgmma(float d[4][8], uint64_t a, uint64_t b, int scale) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;\n}\n"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[0][4]), "+f"(d[0][5]), "+f"(d[0][6]), "+f"(d[0][7]),
                 "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[1][4]), "+f"(d[1][5]), "+f"(d[1][6]), "+f"(d[1][7]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[2][4]), "+f"(d[2][5]), "+f"(d[2][6]), "+f"(d[2][7]),
                 "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[3][4]), "+f"(d[3][5]), "+f"(d[3][6]), "+f"(d[3][7])
               : "l"(a), "l"(b), "r"(scale));
}

struct Schedule {
  int tile, step, tiles, wide;
  __device__ Schedule(int m, int n, int rank) : tile(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER), wide(n / BN) {
    tiles = m / (BM * CLUSTER) * wide;
    this->rank = rank;
  }
  int rank;
  __device__ bool next(int& y, int& x) {
    if (tile >= tiles) return false;
    y = (tile / wide * CLUSTER + rank) * BM, x = tile % wide * BN;
    tile += step;
    return true;
  }
};

template <int Consumers>
__global__ __launch_bounds__(NUM_THREADS) void __cluster_dims__(CLUSTER, 1, 1)
gemm(int M, int N, int K, const __grid_constant__ CUtensorMap tmC, const __grid_constant__ CUtensorMap tmA, const __grid_constant__ CUtensorMap tmB) {
  extern __shared__ __align__(1024) uint8_t smem[];
  SMem& s = *reinterpret_cast<SMem*>(smem);
  const int blocks_k = K / BK, wg = threadIdx.x / 128, tid = threadIdx.x % 128;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank) :);
  if (threadIdx.x == 0) {
    for (int i = 0; i < QSIZE; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(ptr(&s.full[i])), "r"(1));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(ptr(&s.empty[i])), "r"(Consumers * CLUSTER));
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::);
  }
  asm volatile("barrier.cluster.arrive;\n" : :);
  asm volatile("barrier.cluster.wait;\n" : :);
  Schedule schedule(M, N, rank);
  int y, x;
  if (wg == 0) {
    reg_dealloc<24>();
    if (tid == 0) {
      int p = 0, q = 0;
      while (schedule.next(y, x)) {
        for (int k = 0; k < blocks_k; ++k, ++q) {
          if (q == QSIZE) q = 0, p ^= 1;
          wait(&s.empty[q], p);
          asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(ptr(&s.full[q])), "r"(uint32_t((BM + BN) * BK * sizeof(bf16))));
          load_async(s.A[q], &tmA, &s.full[q], k * BK, y);
          load_multicast(s.B[q] + rank * (BN / CLUSTER) * BK, &tmB, &s.full[q], k * BK, x + rank * (BN / CLUSTER), 3);
        }
      }
    }
  } else {
    reg_alloc<240>();
    const int part = wg - 1;
    float d[4][8];
    for (int q = 0; q < QSIZE; ++q)
      if (tid < CLUSTER) arrive_cluster(&s.empty[q], tid);
    int p = 0, q = 0;
    while (schedule.next(y, x)) {
      for (int k = 0; k < blocks_k; ++k, ++q) {
        if (q == QSIZE) q = 0, p ^= 1;
        wait(&s.full[q], p);
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
        for (int kk = 0; kk < BK / 16; ++kk)
          wgmma(d, desc(s.A[q] + part * 64 * BK + kk * 16), desc(s.B[q] + kk * 16), k || kk);
        asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(0) : "memory");
        if (tid < CLUSTER) arrive_cluster(&s.empty[q], tid);
      }
      // The panel of this warp group is free when its last store has read it.
      if (tid == 0) asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
      asm volatile("bar.sync %0, 128;\n" ::"r"(part + 2) : "memory");
      const int lane = tid % 32, warp = tid / 32;
      bf16* panel = s.C + part * 64 * BN;
      for (int w = 0; w < 4; ++w) {
        uint32_t v[4];
        for (int i = 0; i < 4; ++i) {
          bf16 low = __float2bfloat16(d[w][i * 2]), high = __float2bfloat16(d[w][i * 2 + 1]);
          v[i] = uint32_t(*reinterpret_cast<uint16_t*>(&low)) | uint32_t(*reinterpret_cast<uint16_t*>(&high)) << 16;
        }
        const int row = warp * 16 + lane % 16, chunk = w * 2 + lane / 16;
        const uint32_t to = ptr(panel) + row * 128 + ((chunk ^ row % 8) * 16);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
      }
      asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
      asm volatile("bar.sync %0, 128;\n" ::"r"(part + 2) : "memory");
      if (tid == 0) {
        store_async(&tmC, panel, x, y + part * 64);
        asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
      }
    }
    if (tid == 0) asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

static CUtensorMap make_map(bf16* p, int rows, int cols, int box_rows) {
  CUtensorMap map;
  uint64_t shape[2] = {uint64_t(cols), uint64_t(rows)}, stride[1] = {sizeof(bf16) * cols};
  uint32_t box[2] = {64, uint32_t(box_rows)}, ones[2] = {1, 1};
  CUresult result = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)p, (cuuint64_t*)shape, (cuuint64_t*)stride, box, ones,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  assert(result == CUDA_SUCCESS);
  return map;
}

int main() {
  const int M = 512, N = 128, K = 192;
  std::vector<bf16> a(M * K), b(N * K), c(M * N);
  for (int i = 0; i < M * K; ++i) a[i] = float(i * 13 % 5 - 2);
  for (int i = 0; i < N * K; ++i) b[i] = float(i * 7 % 3 - 1);
  bf16 *da, *db, *dc;
  cudaMalloc(&da, sizeof(bf16) * M * K);
  cudaMalloc(&db, sizeof(bf16) * N * K);
  cudaMalloc(&dc, sizeof(bf16) * M * N);
  cudaMemcpy(da, a.data(), sizeof(bf16) * M * K, cudaMemcpyHostToDevice);
  cudaMemcpy(db, b.data(), sizeof(bf16) * N * K, cudaMemcpyHostToDevice);
  auto* kernel = gemm<2>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(SMem)));
  kernel<<<4, NUM_THREADS, sizeof(SMem)>>>(M, N, K, make_map(dc, M, N, 64), make_map(da, M, K, BM), make_map(db, N, K, BN / CLUSTER));
  cudaDeviceSynchronize();
  cudaMemcpy(c.data(), dc, sizeof(bf16) * M * N, cudaMemcpyDeviceToHost);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) {
      float want = 0;
      for (int k = 0; k < K; ++k) want += float(a[i * K + k]) * float(b[j * K + k]);
      if (!(float(c[i * N + j]) == float(bf16(want)))) {
        printf("C[%d][%d] = %g, not %g\n", i, j, float(c[i * N + j]), want);
        return 1;
      }
    }
  return 0;
}
