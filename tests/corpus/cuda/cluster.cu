// Clusters: distributed shared memory, multicast bulk copies, st.async, remote mbarrier arrivals,
// cluster barriers, dependent launch, elect.
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void wait(unsigned barrier, unsigned phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], "
      "%1;\n@done bra ready;\nbra again;\nready:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

extern "C" __global__ void __cluster_dims__(2, 1, 1)
exchange(const float* __restrict__ x, float* __restrict__ y, int rounds) {
  __shared__ __align__(128) float mine[256];
  __shared__ __align__(16) float other[256];
  __shared__ __align__(8) unsigned long long loaded, received;
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const unsigned loaded_at = shared_address(&loaded), received_at = shared_address(&received);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(loaded_at));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(received_at));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  float sum = 0.f;
  for (int round = 0; round < rounds; ++round) {
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(loaded_at));
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(received_at));
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::
              "r"(shared_address(mine)), "l"(x + (size_t)(round * gridDim.x + blockIdx.x) * 256),
          "r"(loaded_at) : "memory");
    }
    wait(loaded_at, round & 1);
    const unsigned to = shared_address(&other[threadIdx.x]);
    unsigned remote, remote_barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(to), "r"(rank ^ 1));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(received_at), "r"(rank ^ 1));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
                 "r"(__float_as_uint(mine[threadIdx.x])), "r"(remote_barrier) : "memory");
    wait(received_at, round & 1);
    sum += mine[threadIdx.x] * other[threadIdx.x ^ 1];
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;");
  y[blockIdx.x * 256 + threadIdx.x] = sum;
}
