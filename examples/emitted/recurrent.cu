// recurrent: emitted by warploom from a tile program and the schedule "lcsf".
//
//   program recurrent(q: bf16[batch, rows, groups, d], k: bf16[batch, rows, groups, d], v: bf16[batch, rows, heads, e], o: bf16[batch, rows, heads, e], scale: fp32[])
//     for each batch_tile < batch
//     for each heads_tile < heads
//     for each cols_tile < ((e + 63) // 64)
//       0  m_at: int32[m=64] = coordinate axis m from 0
//       1  n_at: int32[n=64] = coordinate axis n from 0
//       2  acc: fp32[e=64, d=64] = fill 0.0
//          loop i from 0 to ((rows + 63) // 64):
//         3  q_t: bf16[m=64, d=64] = load q[batch_tile, (i * 64) +64, ((heads_tile * groups) // heads), 0 +64] edge 0.0
//         4  k_t: bf16[n=64, d=64] = load k[batch_tile, (i * 64) +64, ((heads_tile * groups) // heads), 0 +64] edge 0.0
//         5  v_t: bf16[n=64, e=64] = load v[batch_tile, (i * 64) +64, heads_tile, (cols_tile * 64) +64] edge 0.0
//         6  acc_1: bf16[e=64, d=64] = cast acc
//         7  product: fp32[e=64, m=64] = mma acc_1, q_t
//         8  product_1: fp32[n=64, m=64] = mma k_t, q_t
//         9  le: bool[n=64, m=64] = le n_at, m_at
//        10  mul: fp32[n=64, m=64] = mul product_1, scale
//        11  const: fp32[] = fill 0.0
//        12  where: fp32[n=64, m=64] = where le, mul, const
//        13  product: fp32[e=64, m=64] = mul product, scale
//        14  where_1: bf16[n=64, m=64] = cast where
//        15  product: fp32[e=64, m=64] = mma v_t, where_1, product
//        16  acc: fp32[e=64, d=64] = mma v_t, k_t, acc
//        17  product_2: fp32[m=64, e=64] = transpose product
//        18  product_3: bf16[m=64, e=64] = cast product_2
//        19  store product_3 o[batch_tile, (i * 64) +64, heads_tile, (cols_tile * 64) +64]
//
//     launch {"split": "e", "store_panels": 1, "resident": 2}
//     ring q x4: load.3 (8192 B a slot)
//     ring k x4: load.4 (8192 B a slot)
//     ring v x4: load.5 (8192 B a slot)
//     role load: 4 warps, 24 registers
//       loop i, 0 started ahead
//         steady
//           Acquire q
//           Fill load.3 into q
//           Publish q
//           Acquire k
//           Fill load.4 into k
//           Publish k
//           Acquire v
//           Fill load.5 into v
//           Publish v
//     role compute0: 4 warps, 232 registers, part 0
//       straight
//         Run fill.2
//       loop i, 0 started ahead
//         steady
//           Run cast.6
//           Wait q
//           Issue mma.7
//           Wait k
//           Issue mma.8
//           Join <= 1: product
//           Run mul.13
//           Join <= 0: product_1
//           GroupSync
//           Run cast.14
//           Wait v
//           FencedGroupSync
//           Issue mma.15
//           Issue mma.16
//           Join <= 1: product
//           Run store.19
//           Join <= 0: acc
//           Release k
//           Release q
//           Release v

#define DEVICE __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

struct alignas(64) TensorMap { unsigned long long opaque[16]; };

// Position in a ring: slot and the parity of the round it is in.
struct Cursor { unsigned slot = 0, parity = 0; };

template <unsigned kDepth> DEVICE void advance(Cursor& at) {
  if (++at.slot == kDepth) { at.slot = 0; at.parity ^= 1; }
}

DEVICE unsigned smem_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

DEVICE void barrier_init(unsigned bar, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

DEVICE void barrier_expect(unsigned bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Returns when the phase of that parity has completed (a fresh barrier: parity 1 at once).
DEVICE void barrier_wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred done;\nAGAIN:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra AGAIN; }" ::"r"(bar), "r"(parity) : "memory");
}

DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kId, int kThreads> DEVICE void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

template <int kCount> DEVICE void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount> DEVICE void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int kPending> DEVICE void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

DEVICE void stmatrix(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Every 8 x 8 matrix is transposed on its way: what a thread holds of a row goes down a column.
DEVICE void stmatrix_transposed(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void stmatrix_transposed(unsigned at, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(at), "r"(a), "r"(b) : "memory");
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

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

// The address without the block's number: in a cluster, shared addresses of block r have r in bits
// 24 and up, which would run into the stride field of a descriptor.
DEVICE unsigned in_block(unsigned address) { return address & 0x3ffffu; }

// `address` as `in_block` gives it.
DEVICE unsigned long long descriptor(unsigned low, unsigned high, unsigned address) {
  return (static_cast<unsigned long long>(high) << 32) | (low + (address >> 4));
}

DEVICE unsigned pack_bf16(float low, float high) {
  unsigned x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// Byte offset of (row, byte of the row) in a tile of panels kWidth bytes wide, swizzled.
template <int kWidth, int kRows> DEVICE unsigned tile_offset(int row, int byte) {
  constexpr unsigned kMask = kWidth == 128 ? 0x70 : kWidth == 64 ? 0x30 : 0x10;
  const unsigned at = row * kWidth + byte % kWidth;
  return byte / kWidth * (kRows * kWidth) + (at ^ (at >> 3 & kMask));
}

DEVICE void tma_load_4d(unsigned to, const TensorMap* map, unsigned bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global"
               ".mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

DEVICE void wgmma_m64n64_bf16_rs(float (&d)[32], const unsigned* a, unsigned long long b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

DEVICE void wgmma_m64n64_bf16_ss(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate));
}

DEVICE void wgmma_m64n64_bf16_ss_tt(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate));
}

DEVICE void tma_store_4d(const TensorMap* map, unsigned from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
               "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

extern "C" __global__ void __launch_bounds__(256, 2) recurrent(
    const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap o_map,
    int batch,
    int rows,
    int groups,
    int d,
    int heads,
    int e,
    float scale) {
  extern __shared__ __align__(1024) unsigned char shared_raw[];
  const unsigned shared = smem_address(shared_raw);
  if (shared % 1024) __trap();  // swizzled tiles need it; drivers give it
  const unsigned q_base = shared + 0;
  const unsigned q_full = shared + 114688;
  const unsigned q_empty = shared + 114720;
  const unsigned k_base = shared + 32768;
  const unsigned k_full = shared + 114752;
  const unsigned k_empty = shared + 114784;
  const unsigned v_base = shared + 65536;
  const unsigned v_full = shared + 114816;
  const unsigned v_empty = shared + 114848;
  const unsigned panels = shared + 98304;
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 4; ++s) {
      barrier_init(q_full + s * 8, 1);
      barrier_init(q_empty + s * 8, 4);
    }
    for (int s = 0; s < 4; ++s) {
      barrier_init(k_full + s * 8, 1);
      barrier_init(k_empty + s * 8, 4);
    }
    for (int s = 0; s < 4; ++s) {
      barrier_init(v_full + s * 8, 1);
      barrier_init(v_empty + s * 8, 4);
    }
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    prefetch_map(&v_map);
    prefetch_map(&o_map);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp_group == 0) {
    // load: one thread starts every copy into shared memory
    registers_down<24>();
    if (threadIdx.x == 0) {
      Cursor q_cursor;
      Cursor k_cursor;
      Cursor v_cursor;
      const int batch_tile_count = batch;
      const int heads_tile_count = heads;
      const int cols_tile_count = ((e + 63) / 64);
      const int tasks = batch_tile_count * heads_tile_count * cols_tile_count;
      #pragma unroll 1
      for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
        int rest = task;
        const int cols_tile_place = rest % cols_tile_count;
        rest /= cols_tile_count;
        const int heads_tile_place = rest % heads_tile_count;
        rest /= heads_tile_count;
        const int batch_tile_place = rest % batch_tile_count;
        rest /= batch_tile_count;
        const int batch_tile = batch_tile_place;
        const int heads_tile = heads_tile_place;
        const int cols_tile = cols_tile_place;
        {
          const int i_start = 0, i_stop = ((rows + 63) / 64);
          #pragma unroll 1
          for (int i_ = i_start; i_ < i_stop; ++i_) {
            // Acquire q
            barrier_wait(q_empty + q_cursor.slot * 8, q_cursor.parity ^ 1);
            barrier_expect(q_full + q_cursor.slot * 8, 8192);
            // Fill load.3 into q  task.py:56
            tma_load_4d(q_base + q_cursor.slot * 8192 + 0, &q_map, q_full + q_cursor.slot * 8, 0, ((heads_tile * groups) / heads), (i_ * 64), batch_tile);
            // Publish q
            advance<4>(q_cursor);
            // Acquire k
            barrier_wait(k_empty + k_cursor.slot * 8, k_cursor.parity ^ 1);
            barrier_expect(k_full + k_cursor.slot * 8, 8192);
            // Fill load.4 into k  task.py:56
            tma_load_4d(k_base + k_cursor.slot * 8192 + 0, &k_map, k_full + k_cursor.slot * 8, 0, ((heads_tile * groups) / heads), (i_ * 64), batch_tile);
            // Publish k
            advance<4>(k_cursor);
            // Acquire v
            barrier_wait(v_empty + v_cursor.slot * 8, v_cursor.parity ^ 1);
            barrier_expect(v_full + v_cursor.slot * 8, 8192);
            // Fill load.5 into v  task.py:60
            tma_load_4d(v_base + v_cursor.slot * 8192 + 0, &v_map, v_full + v_cursor.slot * 8, (cols_tile * 64), heads_tile, (i_ * 64), batch_tile);
            // Publish v
            advance<4>(v_cursor);
          }
        }
      }
    }
  } else {
    // compute0: matmuls and everything in registers
    registers_up<232>();
    const int part = warp_group - 1;
    const unsigned where_1_room = shared + 106496 + part * 8192;
    const unsigned where_1_staged = in_block(where_1_room);
    const int thread_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int thread_col = lane % 4 * 2;
    Cursor q_cursor; unsigned q_oldest = 0;
    Cursor k_cursor; unsigned k_oldest = 0;
    Cursor v_cursor; unsigned v_oldest = 0;
    const int batch_tile_count = batch;
    const int heads_tile_count = heads;
    const int cols_tile_count = ((e + 63) / 64);
    const int tasks = batch_tile_count * heads_tile_count * cols_tile_count;
    #pragma unroll 1
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
      int rest = task;
      const int cols_tile_place = rest % cols_tile_count;
      rest /= cols_tile_count;
      const int heads_tile_place = rest % heads_tile_count;
      rest /= heads_tile_count;
      const int batch_tile_place = rest % batch_tile_count;
      rest /= batch_tile_count;
      const int batch_tile = batch_tile_place;
      const int heads_tile = heads_tile_place;
      const int cols_tile = cols_tile_place;
      float acc[1][32];
      unsigned acc_1[1][16];
      float product[1][32];
      float product_1[1][32];
      unsigned where_1[1][16];
      // Run fill.2  task.py:50
      #pragma unroll
      for (int t = 0; t < 1; ++t)
      #pragma unroll
      for (int i = 0; i < 32; ++i)
          acc[t][i] = 0.0f;
      {
        const int i_start = 0, i_stop = ((rows + 63) / 64);
        #pragma unroll 1
        for (int i_ = i_start; i_ < i_stop; ++i_) {
          // Run cast.6  scalar.py:63
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 16; ++i)
              acc_1[t][i] = pack_bf16(acc[t][2 * i], acc[t][2 * i + 1]);
          // Wait q
          barrier_wait(q_full + q_cursor.slot * 8, q_cursor.parity);
          const unsigned q_at = in_block(q_base) + q_cursor.slot * 8192;
          advance<4>(q_cursor);
          // Issue mma.7  scalar.py:63
          pin(product);
          pin(acc_1);
          wgmma_fence();
          wgmma_m64n64_bf16_rs(product[0], &acc_1[0][0], descriptor(0x10000, 0x40000040, q_at), 0);
          wgmma_m64n64_bf16_rs(product[0], &acc_1[0][4], descriptor(0x10002, 0x40000040, q_at), 1);
          wgmma_m64n64_bf16_rs(product[0], &acc_1[0][8], descriptor(0x10004, 0x40000040, q_at), 1);
          wgmma_m64n64_bf16_rs(product[0], &acc_1[0][12], descriptor(0x10006, 0x40000040, q_at), 1);
          wgmma_commit();
          // Wait k
          barrier_wait(k_full + k_cursor.slot * 8, k_cursor.parity);
          const unsigned k_at = in_block(k_base) + k_cursor.slot * 8192;
          advance<4>(k_cursor);
          // Issue mma.8  scalar.py:64
          pin(product_1);
          wgmma_fence();
          wgmma_m64n64_bf16_ss(product_1[0], descriptor(0x10000, 0x40000040, k_at), descriptor(0x10000, 0x40000040, q_at), 0);
          wgmma_m64n64_bf16_ss(product_1[0], descriptor(0x10002, 0x40000040, k_at), descriptor(0x10002, 0x40000040, q_at), 1);
          wgmma_m64n64_bf16_ss(product_1[0], descriptor(0x10004, 0x40000040, k_at), descriptor(0x10004, 0x40000040, q_at), 1);
          wgmma_m64n64_bf16_ss(product_1[0], descriptor(0x10006, 0x40000040, k_at), descriptor(0x10006, 0x40000040, q_at), 1);
          wgmma_commit();
          // Join <= 1: product
          wgmma_wait<1>();
          pin(product);
          // Run mul.13  scalar.py:72
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 32; ++i)
              product[t][i] = (product[t][i] * scale);
          // Join <= 0: product_1
          wgmma_wait<0>();
          pin(product_1);
          // GroupSync
          named_sync<1, 128>();
          // Run cast.14  scalar.py:73
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 16; ++i)
              where_1[t][i] = pack_bf16((((0 + (0 + (t) * 64 + thread_row + (((2 * i) >> 1 & 1)) * 8)) <= (0 + (((2 * i) >> 2) * 8 + thread_col + ((2 * i) & 1)))) ? (product_1[t][2 * i] * scale) : 0.0f), (((0 + (0 + (t) * 64 + thread_row + (((2 * i + 1) >> 1 & 1)) * 8)) <= (0 + (((2 * i + 1) >> 2) * 8 + thread_col + ((2 * i + 1) & 1)))) ? (product_1[t][2 * i + 1] * scale) : 0.0f));
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int s = 0; s < 4; ++s)
              stmatrix(where_1_room + tile_offset<128, 64>(t * 64 + threadIdx.x % 128 / 32 * 16 + lane % 16, (s * 16 + lane / 16 * 8) * 2), where_1[t][4 * s + 0], where_1[t][4 * s + 1], where_1[t][4 * s + 2], where_1[t][4 * s + 3]);
          // Wait v
          barrier_wait(v_full + v_cursor.slot * 8, v_cursor.parity);
          const unsigned v_at = in_block(v_base) + v_cursor.slot * 8192;
          advance<4>(v_cursor);
          // FencedGroupSync
          fence_async();
          named_sync<1, 128>();
          // Issue mma.15  scalar.py:73
          pin(product);
          wgmma_fence();
          wgmma_m64n64_bf16_ss_tt(product[0], descriptor(0x2000000, 0x40000040, v_at), descriptor(0x2000000, 0x40000040, where_1_staged), 1);
          wgmma_m64n64_bf16_ss_tt(product[0], descriptor(0x2000080, 0x40000040, v_at), descriptor(0x2000080, 0x40000040, where_1_staged), 1);
          wgmma_m64n64_bf16_ss_tt(product[0], descriptor(0x2000100, 0x40000040, v_at), descriptor(0x2000100, 0x40000040, where_1_staged), 1);
          wgmma_m64n64_bf16_ss_tt(product[0], descriptor(0x2000180, 0x40000040, v_at), descriptor(0x2000180, 0x40000040, where_1_staged), 1);
          wgmma_commit();
          // Issue mma.16  scalar.py:74
          pin(acc);
          wgmma_fence();
          wgmma_m64n64_bf16_ss_tt(acc[0], descriptor(0x2000000, 0x40000040, v_at), descriptor(0x2000000, 0x40000040, k_at), 1);
          wgmma_m64n64_bf16_ss_tt(acc[0], descriptor(0x2000080, 0x40000040, v_at), descriptor(0x2000080, 0x40000040, k_at), 1);
          wgmma_m64n64_bf16_ss_tt(acc[0], descriptor(0x2000100, 0x40000040, v_at), descriptor(0x2000100, 0x40000040, k_at), 1);
          wgmma_m64n64_bf16_ss_tt(acc[0], descriptor(0x2000180, 0x40000040, v_at), descriptor(0x2000180, 0x40000040, k_at), 1);
          wgmma_commit();
          // Join <= 1: product
          wgmma_wait<1>();
          pin(product);
          // Run store.19  task.py:70
          if (threadIdx.x % 128 == 0) store_wait_read<0>();
          named_sync<1, 128>();
          if ((cols_tile * 64) + 0 < e && (i_ * 64) + 0 < rows) {
            const unsigned panel = panels + part * 8192 + 0;
            const unsigned corner = (lane / 16 * 8 + lane % 8) * 128 + (threadIdx.x % 128 / 32 * 2 + lane / 8 % 2) * 16;
            #pragma unroll
            for (int j = 0; j < 8; j += 2) {
              const unsigned at = corner + j * 1024;
              stmatrix_transposed(panel + (at ^ (at >> 3 & 0x70)), pack_bf16(product[0][2 * (2 * (j + 0) + 0)], product[0][2 * (2 * (j + 0) + 0) + 1]), pack_bf16(product[0][2 * (2 * (j + 0) + 1)], product[0][2 * (2 * (j + 0) + 1) + 1]), pack_bf16(product[0][2 * (2 * (j + 0) + 2)], product[0][2 * (2 * (j + 0) + 2) + 1]), pack_bf16(product[0][2 * (2 * (j + 0) + 3)], product[0][2 * (2 * (j + 0) + 3) + 1]));
            }
            fence_async();
          }
          named_sync<1, 128>();
          if (threadIdx.x % 128 == 0) {
            if ((cols_tile * 64) + 0 < e && (i_ * 64) + 0 < rows) tma_store_4d(&o_map, panels + part * 8192 + 0, (cols_tile * 64), heads_tile, (i_ * 64), batch_tile);
            store_commit();
          }
          // Join <= 0: acc
          wgmma_wait<0>();
          pin(acc);
          // Release k
          if (lane == 0) barrier_arrive(k_empty + k_oldest * 8);
          if (++k_oldest == 4) k_oldest = 0;
          // Release q
          if (lane == 0) barrier_arrive(q_empty + q_oldest * 8);
          if (++q_oldest == 4) q_oldest = 0;
          // Release v
          if (lane == 0) barrier_arrive(v_empty + v_oldest * 8);
          if (++v_oldest == 4) v_oldest = 0;
        }
      }
    }
    store_wait_read<0>();
  }
}
