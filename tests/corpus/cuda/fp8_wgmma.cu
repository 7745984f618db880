// fp8 wgmma with a register operand A (QGMMA, RS form), the form that ptxas before 13.3 miscompiled:
// d[64, 128] += (2 * a)[64, k] @ b[128, k]^T, the registers of A rewritten between groups.
constexpr int kBlockN = 128, kBlockK = 128;

__device__ __forceinline__ unsigned long long descriptor(unsigned address) {  // 128-byte swizzle
  return ((unsigned long long)(address >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
                "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

__device__ __forceinline__ void wgmma_rs(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%2"
      "4,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%4"
      "6,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      " {%64,%65,%66,%67}, %68, 1, 1, 1;"
      : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

extern "C" __global__ void __launch_bounds__(128)
fp8_wgmma(const unsigned* __restrict__ a, const uint4* __restrict__ b, float* __restrict__ c, int k) {
  __shared__ __align__(1024) unsigned char b_tile[kBlockN * kBlockK];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(b_tile));
  float d[64] = {};
  for (int k0 = 0; k0 < k; k0 += kBlockK) {
    for (int piece = threadIdx.x; piece < kBlockN * kBlockK / 16; piece += 128) {
      const int row = piece / 8, col = piece % 8;
      const unsigned to = base + row * kBlockK + ((col ^ (row & 7)) * 16);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                   "l"(b + (size_t)row * (k / 16) + k0 / 16 + col));
    }
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;");
    asm volatile("fence.proxy.async.shared::cta;");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
    for (int inner = 0; inner < kBlockK / 32; ++inner) {
      const unsigned* from = a + (size_t)(warp * 16 + lane / 4) * (k / 4) + (k0 + inner * 32) / 4;
      unsigned regs[4] = {from[lane % 4], from[2 * k + lane % 4], from[4 + lane % 4],
                          from[2 * k + 4 + lane % 4]};
      for (int i = 0; i < 4; ++i) regs[i] += 0x08080808u;  // exponent + 1
      wgmma_rs(d, regs, descriptor(base + inner * 32));
    }
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float* out = c + (size_t)(blockIdx.x * 64 + warp * 16 + lane / 4) * kBlockN + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(out) = make_float2(d[j * 4], d[j * 4 + 1]);
    *reinterpret_cast<float2*>(out + 8 * kBlockN) = make_float2(d[j * 4 + 2], d[j * 4 + 3]);
  }
}
