// y = sum over the blocks of a cluster of what each makes of its rows: every block but the first
// pushes its numbers into the first one's shared memory, where a barrier counts the bytes.
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>

constexpr int BLOCKS = 4, THREADS = 64;
struct Shared {
  alignas(16) float parts[BLOCKS - 1][THREADS * 4];
  uint64_t full, free_;
};

__device__ unsigned place(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ unsigned in_block(unsigned at, int rank) {
  unsigned to;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(at), "r"(rank));
  return to;
}
__device__ void wait(uint64_t* bar, unsigned parity) {
  asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra AGAIN; }"
               :: "r"(place(bar)), "r"(parity) : "memory");
}
__device__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS) sums(const float* x, float* y, int rounds) {
  __shared__ Shared s;
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(place(&s.full)), "r"(1));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(place(&s.free_)), "r"(1));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  meet();
  for (int round = 0; round < rounds; ++round) {
    const float* from = x + ((blockIdx.x / BLOCKS * rounds + round) * BLOCKS + rank) * THREADS * 4;
    float4 v = ((const float4*)from)[threadIdx.x];
    v.x *= rank + 1, v.y *= rank + 1, v.z *= rank + 1, v.w *= rank + 1;
    if (rank) {
      if (round) wait(&s.free_, (round - 1) & 1);
      const unsigned to = in_block(place(&s.parts[rank - 1][threadIdx.x * 4]), 0), bar = in_block(place(&s.full), 0);
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                   :: "r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar) : "memory");
    } else {
      if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(place(&s.full)), "r"((BLOCKS - 1) * THREADS * 16) : "memory");
      wait(&s.full, round & 1);
      for (int b = 0; b < BLOCKS - 1; ++b) {
        v.x += s.parts[b][threadIdx.x * 4], v.y += s.parts[b][threadIdx.x * 4 + 1];
        v.z += s.parts[b][threadIdx.x * 4 + 2], v.w += s.parts[b][threadIdx.x * 4 + 3];
      }
      ((float4*)(y + (blockIdx.x / BLOCKS * rounds + round) * THREADS * 4))[threadIdx.x] = v;
      __syncthreads();
      if (threadIdx.x > 0 && threadIdx.x < BLOCKS) {
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                     :: "r"(in_block(place(&s.free_), threadIdx.x)) : "memory");
      }
    }
  }
  meet();
}

int main() {
  const int clusters = 2, rounds = 3, each = THREADS * 4;
  float *x, *y;
  cudaMallocManaged(&x, clusters * rounds * BLOCKS * each * 4);
  cudaMallocManaged(&y, clusters * rounds * each * 4);
  for (int i = 0; i < clusters * rounds * BLOCKS * each; ++i) x[i] = i % 13;
  sums<<<clusters * BLOCKS, THREADS>>>(x, y, rounds);
  for (int r = 0; r < clusters * rounds; ++r)
    for (int i = 0; i < each; ++i) {
      float want = 0;
      for (int b = 0; b < BLOCKS; ++b) want += (b + 1) * x[(r * BLOCKS + b) * each + i];
      if (!(y[r * each + i] == want)) {
        printf("%d %d: %g not %g\n", r, i, y[r * each + i], want);
        return 1;
      }
    }
  return 0;
}
