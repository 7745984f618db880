// y = 2 x + 1 over rows of 1 KiB: bulk copies in, threads, bulk copies out. Four buffers in, two
// out; a producer thread, 128 that compute.
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>

constexpr int ROW = 256, IN = 4, OUT = 2;
struct Shared {
  alignas(128) float in[IN][ROW];
  alignas(128) float out[OUT][ROW];
  uint64_t ready[IN], taken[IN];
};

static __device__ __forceinline__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
static __device__ __forceinline__ void wait_parity(uint64_t* bar, unsigned parity) {
  asm volatile("{\n\t.reg .pred P1;\n\tWAIT: \n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n\t"
               "@!P1 bra WAIT;\n\t}" :: "r"(at(bar)), "r"(parity) : "memory");
}

__global__ void __launch_bounds__(160) scale(const float* x, float* y, int rows) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *(Shared*)memory;
  if (threadIdx.x == 128) {
    for (int i = 0; i < IN; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&s.ready[i])));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" :: "r"(at(&s.taken[i])));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128) {
      unsigned turn = 0;
      for (int row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
        const int slot = turn % IN;
        wait_parity(&s.taken[slot], (turn / IN & 1) ^ 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(&s.ready[slot])), "r"(ROW * 4) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(at(s.in[slot])), "l"(x + row * ROW), "r"(ROW * 4), "r"(at(&s.ready[slot])) : "memory");
      }
    }
  } else {
    unsigned turn = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
      const int slot = turn % IN, put = turn % OUT;
      wait_parity(&s.ready[slot], turn / IN & 1);
      const float a = s.in[slot][threadIdx.x], b = s.in[slot][threadIdx.x + 128];
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(&s.taken[slot])) : "memory");
      if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(OUT - 1) : "memory");
      asm volatile("bar.sync 1, 128;" ::: "memory");
      s.out[put][threadIdx.x] = 2 * a + 1;
      s.out[put][threadIdx.x + 128] = 2 * b + 1;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync 2, 128;" ::: "memory");
      if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(y + row * ROW), "r"(at(s.out[put])), "r"(ROW * 4) : "memory");
        asm volatile("cp.async.bulk.commit_group;");
      }
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

int main() {
  const int rows = 40;
  float *x, *y;
  cudaMallocManaged(&x, rows * ROW * 4);
  cudaMallocManaged(&y, rows * ROW * 4);
  for (int i = 0; i < rows * ROW; ++i) x[i] = i % 101;
  scale<<<2, 160, sizeof(Shared)>>>(x, y, rows);
  if (cudaDeviceSynchronize() != cudaSuccess) return 2;
  for (int i = 0; i < rows * ROW; ++i)
    if (!(y[i] == 2 * x[i] + 1)) {
      printf("y[%d] = %g\n", i, y[i]);
      return 1;
    }
  return 0;
}
