// C = A B in fp16 (fp32 sums) by one warp group: arrays of fixed size in shared memory, one barrier,
// a copy and a product in turn. B lies as K x N: the operand is read across.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <vector>

const int M = 64, N = 64, K = 192, BK = 64;

__device__ uint64_t describe(uint32_t address, int leading, int stride) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 62;
}

__global__ void __launch_bounds__(128) product(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right, float* out) {
  __shared__ alignas(1024) half a[M * BK];
  __shared__ alignas(1024) half b[BK * N];
  __shared__ alignas(8) uint64_t arrived;
  const uint32_t a_at = (uint32_t)__cvta_generic_to_shared(a), b_at = (uint32_t)__cvta_generic_to_shared(b);
  const uint32_t bar = (uint32_t)__cvta_generic_to_shared(&arrived);
  const int row = blockIdx.x * M, col = blockIdx.y * N;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  float d[32];
  for (int i = 0; i < 32; i++) d[i] = 0.0f;
  for (int step = 0; step < K / BK; step++) {
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(bar), "r"(int(sizeof(a) + sizeof(b))));
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                   :: "r"(a_at), "l"(&left), "r"(step * BK), "r"(row), "r"(bar) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                   :: "r"(b_at), "l"(&right), "r"(col), "r"(step * BK), "r"(bar) : "memory");
    }
    uint32_t done = 0;
    while (!done) {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(done) : "r"(bar), "r"(step & 1) : "memory");
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < BK / 16; k++) {
      const uint64_t da = describe(a_at + k * 32, 16, 1024), db = describe(b_at + k * 2048, 8192, 1024);
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
          "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 1;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
          : "l"(da), "l"(db));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    __syncthreads();
  }
  const int lane = threadIdx.x % 32, top = row + threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 32; i++)
    out[(top + (i / 2 % 2) * 8) * (gridDim.y * N) + col + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

CUtensorMap encode(half* data, uint64_t rows, uint64_t cols) {
  CUtensorMap map;
  cuuint64_t shape[2] = {cols, rows}, stride[1] = {cols * 2};
  cuuint32_t box[2] = {64, 64}, ones[2] = {1, 1};
  CUresult bad = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, data, shape, stride, box, ones,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (bad) printf("no map\n");
  return map;
}

int main() {
  const int m = 128, n = 64;
  half *a, *b;
  float* c;
  cudaMallocManaged(&a, m * K * 2);
  cudaMallocManaged(&b, K * n * 2);
  cudaMallocManaged(&c, m * n * 4);
  for (int i = 0; i < m * K; i++) a[i] = __float2half(float(i * 7 % 5 - 2));
  for (int i = 0; i < K * n; i++) b[i] = __float2half(float(i * 11 % 7 - 3));
  product<<<dim3(m / M, n / N), 128>>>(encode(a, m, K), encode(b, K, n), c);
  cudaDeviceSynchronize();
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      float want = 0;
      for (int k = 0; k < K; k++) want += __half2float(a[i * K + k]) * __half2float(b[k * n + j]);
      if (!(c[i * n + j] == want)) { printf("%d %d: %f not %f\n", i, j, c[i * n + j], want); return 1; }
    }
  return 0;
}
