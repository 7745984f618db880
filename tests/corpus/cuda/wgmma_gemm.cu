// Hopper GEMM: TMA loads, mbarrier ring, warp specialisation with setmaxnreg, wgmma from shared
// memory, TMA store. c[m, n] = a[m, k] @ b[n, k]^T in bf16 with fp32 accumulation.
#include <cuda_bf16.h>

struct alignas(64) CUtensorMap {  // as in cuda.h, which NVRTC cannot include
  unsigned long long opaque[16];
};

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 64, kDepth = 4;
constexpr int kTileBytes = kBlockM * kBlockK * 2;

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void wait(unsigned barrier, unsigned phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\nbra again;\nready:\n}" ::"r"(barrier), "r"(phase));
}

__device__ __forceinline__ void load_tile(unsigned to, const CUtensorMap* map, int x, int y,
                                          unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

__device__ __forceinline__ unsigned long long descriptor(unsigned address) {  // 128-byte swizzle
  return ((unsigned long long)(address >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
                "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

__device__ __forceinline__ void wgmma_64x128(float (&d)[64], unsigned long long a,
                                             unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 0;"
      : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56)
      : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(384)
wgmma_gemm(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
           const __grid_constant__ CUtensorMap c_map, int k) {
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ __align__(8) unsigned long long full[kDepth], empty[kDepth];
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kDepth; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(shared_address(&empty[s])));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  const int steps = k / kBlockK;
  const unsigned base = shared_address(ring);
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map));
      for (int step = 0; step < steps; ++step) {
        const int slot = step % kDepth;
        wait(shared_address(&empty[slot]), ((step / kDepth) & 1) ^ 1);
        const unsigned barrier = shared_address(&full[slot]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "n"(2 * kTileBytes));
        load_tile(base + slot * 2 * kTileBytes, &a_map, step * kBlockK, blockIdx.y * kBlockM, barrier);
        load_tile(base + slot * 2 * kTileBytes + kTileBytes, &b_map, step * kBlockK,
                  blockIdx.x * kBlockN, barrier);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float d[64] = {};
    for (int step = 0; step < steps; ++step) {
      const int slot = step % kDepth;
      wait(shared_address(&full[slot]), (step / kDepth) & 1);
      const unsigned a_s = base + slot * 2 * kTileBytes + group * (kTileBytes / 2);
      const unsigned b_s = base + slot * 2 * kTileBytes + kTileBytes;
      asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
      for (int inner = 0; inner < kBlockK / 16; ++inner)
        wgmma_64x128(d, descriptor(a_s + inner * 32), descriptor(b_s + inner * 32));
      asm volatile("wgmma.commit_group.sync.aligned;");
      asm volatile("wgmma.wait_group.sync.aligned 0;");
      if (threadIdx.x % 128 == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[slot])));
    }
    asm volatile("bar.sync 1, 256;");
    __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(ring);
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    const int row = group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int col = j * 4 + lane % 4;
      out[row * 64 + col] = __floats2bfloat162_rn(d[j * 4], d[j * 4 + 1]);
      out[(row + 8) * 64 + col] = __floats2bfloat162_rn(d[j * 4 + 2], d[j * 4 + 3]);
    }
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("bar.sync 1, 256;");
    if (threadIdx.x == 0) {
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                       &c_map), "r"(blockIdx.x * kBlockN), "r"(blockIdx.y * kBlockM), "r"(base)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;");
      asm volatile("cp.async.bulk.wait_group.read 0;");
    }
  }
}
