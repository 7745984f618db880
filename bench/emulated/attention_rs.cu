// O = (Q K^T / 16) V over blocks of keys in bf16, without a softmax: the products of one matmul are
// rounded in registers and are the left operand of the next. Two consumer warp groups take turns at
// the tensor core by named barriers; a producer warp fills a ring of K and V.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

using bf16 = __nv_bfloat16;
namespace {
constexpr int kRows = 128, kKeys = 64, kHead = 64, kDepth = 2;
struct Tiles {
  alignas(1024) bf16 q[kRows * kHead];
  alignas(1024) bf16 k[kDepth][kKeys * kHead];
  alignas(1024) bf16 v[kDepth][kKeys * kHead];
  uint64_t q_full, k_full[kDepth], v_full[kDepth], k_free[kDepth], v_free[kDepth];
};

template <class T> __device__ __forceinline__ unsigned address(T* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbar_init(uint64_t* b, unsigned n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void mbar_arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory"); }
__device__ __forceinline__ void mbar_expect(uint64_t* b, unsigned n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)), "r"(n) : "memory"); }
__device__ __forceinline__ bool mbar_try(uint64_t* b, unsigned parity) {
  unsigned ok;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.b32 %0, 1, 0, p;\n}" : "=r"(ok) : "r"(address(b)), "r"(parity) : "memory");
  return ok;
}
__device__ __forceinline__ void mbar_wait(uint64_t* b, unsigned parity) { while (!mbar_try(b, parity)) {} }
__device__ __forceinline__ void tma(void* to, const CUtensorMap* m, uint64_t* b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(address((char*)to)), "l"(m), "r"(address(b)), "r"(x), "r"(y) : "memory");
}
template <int id> __device__ __forceinline__ void turn_wait() { asm volatile("bar.sync %0, 256;" ::"n"(id) : "memory"); }
template <int id> __device__ __forceinline__ void turn_give() { asm volatile("bar.arrive %0, 256;" ::"n"(id) : "memory"); }
__device__ __forceinline__ uint64_t desc(unsigned at) { return uint64_t((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

#define SUMS(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), \
      "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
      "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
__device__ __forceinline__ void mma_ss(float (&d)[32], uint64_t a, uint64_t b, int keep) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0; }"
               : SUMS(d) : "l"(a), "l"(b), "r"(keep));
}
__device__ __forceinline__ void mma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : SUMS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1) attend(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v, float* o, int keys) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  Tiles& t = *reinterpret_cast<Tiles*>(bytes);
  const int blocks = keys / kKeys, group = threadIdx.x / 128;
  if (threadIdx.x == 256) {
    mbar_init(&t.q_full, 1);
    for (int i = 0; i < kDepth; ++i) {
      mbar_init(&t.k_full[i], 1), mbar_init(&t.v_full[i], 1);
      mbar_init(&t.k_free[i], 2), mbar_init(&t.v_free[i], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      mbar_expect(&t.q_full, sizeof(t.q));
      tma(t.q, &q, &t.q_full, 0, blockIdx.x * kRows);
      for (int i = 0; i < blocks; ++i) {
        const int slot = i % kDepth, again = i / kDepth & 1;
        mbar_wait(&t.k_free[slot], again ^ 1);
        mbar_expect(&t.k_full[slot], sizeof(t.k[0]));
        tma(t.k[slot], &k, &t.k_full[slot], 0, i * kKeys);
        mbar_wait(&t.v_free[slot], again ^ 1);
        mbar_expect(&t.v_full[slot], sizeof(t.v[0]));
        tma(t.v[slot], &v, &t.v_full[slot], 0, i * kKeys);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const bool leader = threadIdx.x % 128 == 0;
    float sum[32], s[32];
    for (int i = 0; i < 32; ++i) sum[i] = 0;
    mbar_wait(&t.q_full, 0);
    if (group == 1) turn_give<1>();
    for (int i = 0; i < blocks; ++i) {
      const int slot = i % kDepth, parity = i / kDepth & 1;
      if (group == 0) turn_wait<1>(); else turn_wait<2>();
      mbar_wait(&t.k_full[slot], parity);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int c = 0; c < kHead / 16; ++c) mma_ss(s, desc(address(t.q) + group * 8192 + c * 32), desc(address(t.k[slot]) + c * 32), c);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (leader) mbar_arrive(&t.k_free[slot]);
      if (group == 0) turn_give<2>(); else if (i + 1 < blocks) turn_give<1>();
      uint32_t p[4][4];
      for (int c = 0; c < 4; ++c)
        for (int w = 0; w < 4; ++w) p[c][w] = pack(s[c * 8 + w * 2] / 16, s[c * 8 + w * 2 + 1] / 16);
      mbar_wait(&t.v_full[slot], parity);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int c = 0; c < 4; ++c) mma_rs(sum, p[c], desc(address(t.v[slot]) + c * 2048));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (leader) mbar_arrive(&t.v_free[slot]);
    }
    const int row = blockIdx.x * kRows + group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int i = 0; i < 32; ++i) o[(row + i / 2 % 2 * 8) * kHead + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = sum[i];
  }
}

static CUtensorMap mapped(bf16* p, uint64_t rows, unsigned box) {
  CUtensorMap m;
  const cuuint64_t size[] = {kHead, rows}, pitch[] = {kHead * 2};
  const cuuint32_t boxes[] = {kHead, box}, one[] = {1, 1};
  if (cuTensorMapEncodeTiled(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, size, pitch, boxes, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    exit(3);
  return m;
}

int main() {
  const int rows = 128, keys = 256;
  bf16 *q, *k, *v;
  float* o;
  cudaMallocManaged(&q, rows * kHead * 2);
  cudaMallocManaged(&k, keys * kHead * 2);
  cudaMallocManaged(&v, keys * kHead * 2);
  cudaMallocManaged(&o, rows * kHead * 4);
  for (int i = 0; i < rows * kHead; ++i) q[i] = i * 5 % 3 - 1;
  for (int i = 0; i < keys * kHead; ++i) k[i] = i * 7 % 5 - 2, v[i] = i * 3 % 7 - 3;
  cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Tiles));
  attend<<<rows / kRows, 384, sizeof(Tiles)>>>(mapped(q, rows, kRows), mapped(k, keys, kKeys), mapped(v, keys, kKeys), o, keys);
  std::vector<float> part(keys);
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < keys; ++j) {
      float sum = 0;
      for (int c = 0; c < kHead; ++c) sum += float(q[r * kHead + c]) * float(k[j * kHead + c]);
      part[j] = float(bf16(sum / 16));
    }
    for (int c = 0; c < kHead; ++c) {
      float want = 0;
      for (int j = 0; j < keys; ++j) want += part[j] * float(v[j * kHead + c]);
      if (!(o[r * kHead + c] == want)) {
        printf("row %d column %d: %g, not %g\n", r, c, o[r * kHead + c], want);
        return 1;
      }
    }
  }
  return 0;
}
