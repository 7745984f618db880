// Hopper's kernels, one PTX instruction a function, in order of dependence.
// Sources: PTX ISA 9.x, sections 9.7.9 (cp.async.bulk), 9.7.13 (mbarrier, setmaxnreg, barriers),
// 9.7.15 (wgmma).

//@ TensorMap
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

//@ Cursor
// Position in a ring: slot and the parity of the round it is in.
struct Cursor { unsigned slot = 0, parity = 0; };

//@ advance
template <unsigned kDepth> DEVICE void advance(Cursor& at) {
  if (++at.slot == kDepth) { at.slot = 0; at.parity ^= 1; }
}

//@ smem_address
DEVICE unsigned smem_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

//@ barrier_init
DEVICE void barrier_init(unsigned bar, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

//@ barrier_expect
DEVICE void barrier_expect(unsigned bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}

//@ barrier_arrive
DEVICE void barrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

//@ barrier_arrive_at
DEVICE void barrier_arrive_at(unsigned bar, unsigned cta) {
  asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [remote]; }"
               ::"r"(bar), "r"(cta) : "memory");
}

//@ barrier_wait
// Returns when the phase of that parity has completed (a fresh barrier: parity 1 at once).
DEVICE void barrier_wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred done;\nAGAIN:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN; }" ::"r"(bar), "r"(parity) : "memory");
}

//@ in_peer
// The address of the same place in another block of the cluster.
DEVICE unsigned in_peer(unsigned address, unsigned cta) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
  return remote;
}

//@ push_quad
// Four registers into another block's shared memory; a barrier there counts the 16 bytes.
DEVICE void push_quad(unsigned to, const float* x, unsigned bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(bar) : "memory");
}

//@ read_quad
DEVICE void read_quad(float* x, unsigned at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
}

//@ read_quad_later
// Nothing but barriers keeps the compiler from reading this late.
DEVICE void read_quad_later(float* x, const float* from) {
  const float4 y = *reinterpret_cast<const float4*>(from);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

//@ add_quad
DEVICE void add_quad(float* x, unsigned at) {
  float y[4];
  read_quad(y, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] += y[i];
}

//@ fence_barrier_init
DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

//@ fence_async
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

//@ cluster_sync
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

//@ cluster_rank
DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

//@ named_sync
template <int kId, int kThreads> DEVICE void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

//@ named_arrive
template <int kId, int kThreads> DEVICE void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

//@ registers_down
template <int kCount> DEVICE void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

//@ registers_up
template <int kCount> DEVICE void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

//@ prefetch_map
DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

//@ store_commit
DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

//@ store_wait_read
template <int kPending> DEVICE void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

//@ shared_read
DEVICE int shared_read(unsigned at) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

//@ shared_write
DEVICE void shared_write(unsigned at, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

//@ prefetch_l2
DEVICE void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

//@ number_now
// A number as it is: what it is by the time the previous grid has ended may be another.
DEVICE int number_now(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

//@ take_task
// The counter's value; it goes on by one, and from `last` back to 0.
DEVICE int take_task(unsigned* counter, unsigned last) {
  unsigned x;
  asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(x) : "l"(counter), "r"(last) : "memory");
  return x;
}

//@ wait_previous_grid
DEVICE void wait_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

//@ start_next_grid
DEVICE void start_next_grid() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

//@ stmatrix
DEVICE void stmatrix(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

//@ stmatrix_transposed
// Every 8 x 8 matrix is transposed on its way: what a thread holds of a row goes down a column.
DEVICE void stmatrix_transposed(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void stmatrix_transposed(unsigned at, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(at), "r"(a), "r"(b) : "memory");
}

//@ store_shared_pair
DEVICE void store_shared_pair(unsigned at, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}

//@ wgmma_fence
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

//@ wgmma_commit
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

//@ wgmma_wait
template <int kPending> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

//@ store_16_bytes
DEVICE void store_16_bytes(void* to, const unsigned (&w)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

//@ store_pair
DEVICE void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

//@ copy_16_bytes
DEVICE void copy_16_bytes(void* to, unsigned from) {
  unsigned w[4];
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
  store_16_bytes(to, w);
}

//@ quad_exchange
// The four lanes of a quad hold a column pair each of four groups: lane q gets all of group q.
DEVICE void quad_exchange(unsigned (&w)[4], unsigned q) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = q & step;
      const unsigned out = upper ? w[i] : w[i + step];
      const unsigned in = __shfl_xor_sync(0xffffffffu, out, step);
      if (upper) w[i] = in;
      else w[i + step] = in;
    }
}

//@ some
// A run of one row of accumulators, for one of several matmuls side by side.
template <int kCount> DEVICE float (&some(float* first))[kCount] {
  return *reinterpret_cast<float (*)[kCount]>(first);
}

//@ pin
// Keeps the compiler from moving reads or writes of registers across a wgmma fence or wait.
template <int kRows, int kCols> DEVICE void pin(float (&x)[kRows][kCols]) {
#pragma unroll
  for (int t = 0; t < kRows; ++t)
#pragma unroll
    for (int i = 0; i < kCols; ++i) asm volatile("" : "+f"(x[t][i])::"memory");
}
template <int kRows, int kCols> DEVICE void pin(unsigned (&x)[kRows][kCols]) {
#pragma unroll
  for (int t = 0; t < kRows; ++t)
#pragma unroll
    for (int i = 0; i < kCols; ++i) asm volatile("" : "+r"(x[t][i])::"memory");
}

//@ in_block
// The address without the block's number: in a cluster, shared addresses of block r have r in bits
// 24 and up, which would run into the stride field of a descriptor.
DEVICE unsigned in_block(unsigned address) { return address & 0x3ffffu; }

//@ at_use
// The same address, of which nothing is derived before it is used.
DEVICE unsigned at_use(unsigned address) {
  asm volatile("" : "+r"(address));
  return address;
}

//@ descriptor
// `address` as `in_block` gives it.
DEVICE unsigned long long descriptor(unsigned low, unsigned high, unsigned address) {
  return (static_cast<unsigned long long>(high) << 32) | (low + (address >> 4));
}
