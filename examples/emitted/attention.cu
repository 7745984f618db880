// attention: emitted by warploom from a tile program and the schedule "multistage".
//
//   program attention(q: bf16[batch, heads, rows, d], k: bf16[batch, kv_heads, keys, d], v: bf16[batch, kv_heads, keys, d], o: bf16[batch, heads, rows, d])
//     for each batch_tile < batch
//     for each heads_tile < heads
//     for each rows_tile < ((rows + 127) // 128)
//       0  q_t: bf16[rows=128, d=64] = load q[batch_tile, heads_tile, (rows_tile * 128) +128, 0 +64] edge 0.0
//       1  acc: fp32[rows=128] = fill -inf
//       2  acc_1: fp32[rows=128] = fill 0.0
//       3  acc_2: fp32[rows=128, d=64] = fill 0.0
//          loop i from 0 to ((keys + 127) // 128), a part until (min(max(((rows - (rows_tile * 128)) - rows.begin), 0), 1) * ((keys + 127) // 128)):
//         4  k_t: bf16[keys=128, d=64] = load k[batch_tile, heads_tile, (i * 128) +128, 0 +64] edge 0.0
//         5  product: fp32[rows=128, keys=128] = mma q_t, k_t
//         6  keys_at: int32[keys=128] = coordinate axis keys from (i * 128)
//         7  at: int32[] = coordinate from keys
//         8  lt: bool[keys=128] = lt keys_at, at
//         9  const: fp32[] = fill -inf
//        10  product: fp32[rows=128, keys=128] = where lt, product, const
//        11  max: fp32[rows=128] = reduce_max product axis keys
//        12  const_1: fp32[] = fill 0.18033688011112042
//        13  mul: fp32[rows=128] = mul max, const_1
//        14  max_1: fp32[rows=128] = max acc, mul
//        15  const_2: fp32[] = fill -inf
//        16  eq: bool[rows=128] = eq max_1, const_2
//        17  const_3: fp32[] = fill 0.0
//        18  where: fp32[rows=128] = where eq, const_3, max_1
//        19  sub: fp32[rows=128] = sub acc, where
//        20  exp2: fp32[rows=128] = exp2 sub
//        21  const_4: fp32[] = fill 0.18033688011112042
//        22  mul_1: fp32[rows=128, keys=128] = mul product, const_4
//        23  sub_1: fp32[rows=128, keys=128] = sub mul_1, where
//        24  exp2_1: fp32[rows=128, keys=128] = exp2 sub_1
//        25  mul_2: fp32[rows=128] = mul acc_1, exp2
//        26  sum: fp32[rows=128] = reduce_sum exp2_1 axis keys
//        27  acc_1: fp32[rows=128] = add mul_2, sum
//        28  acc: fp32[rows=128] = copy max_1
//        29  exp2_2: bf16[rows=128, keys=128] = cast exp2_1
//        30  acc_2: fp32[rows=128, d=64] = mul acc_2, exp2
//        31  v_t: bf16[keys=128, d=64] = load v[batch_tile, heads_tile, (i * 128) +128, 0 +64] edge 0.0
//        32  acc_2: fp32[rows=128, d=64] = mma exp2_2, v_t, acc_2
//      33  const_5: fp32[] = fill 0.0
//      34  eq_1: bool[rows=128] = eq acc_1, const_5
//      35  reciprocal: fp32[rows=128] = reciprocal acc_1
//      36  const_6: fp32[] = fill 0.0
//      37  where_1: fp32[rows=128] = where eq_1, const_6, reciprocal
//      38  mul_3: fp32[rows=128, d=64] = mul acc_2, where_1
//      39  mul_4: bf16[rows=128, d=64] = cast mul_3
//      40  store mul_4 o[batch_tile, heads_tile, (rows_tile * 128) +128, 0 +64]
//
//     launch {"split": "rows"}
//     ring q x1: load.0 (16384 B a slot)
//     ring k x2: load.4 (16384 B a slot)
//     ring v x2: load.31 (16384 B a slot)
//     role load: 4 warps, 24 registers
//       straight
//         Acquire q
//         Fill load.0 into q
//         Publish q
//       loop i, 0 started ahead
//         steady
//           Acquire k
//           Fill load.4 into k
//           Publish k
//           Acquire v
//           Fill load.31 into v
//           Publish v
//     role compute0: 4 warps, 240 registers, part 0
//       straight
//         Run fill.1
//         Run fill.2
//         Run fill.3
//       straight
//         Wait q
//       loop i, 0 started ahead
//         steady
//           Wait k
//           Issue mma.5
//           Join <= 0: product
//           Run where.10
//           Run reduce_max.11
//           Run max.14
//           Run where.18
//           Run exp2.20
//           Run exp2.24
//           Run reduce_sum.26
//           Run add.27
//           Run copy.28
//           Run cast.29
//           Run mul.30
//           Wait v
//           Issue mma.32
//           Release k
//           Join <= 0: acc_2
//           Release v
//         skip
//           Wait k
//           Release k
//           Wait v
//           Release v
//       straight
//         Release q
//       straight
//         Run where.37
//         Run store.40
//     role compute1: 4 warps, 240 registers, part 1
//       straight
//         Run fill.1
//         Run fill.2
//         Run fill.3
//       straight
//         Wait q
//       loop i, 0 started ahead
//         steady
//           Wait k
//           Issue mma.5
//           Join <= 0: product
//           Run where.10
//           Run reduce_max.11
//           Run max.14
//           Run where.18
//           Run exp2.20
//           Run exp2.24
//           Run reduce_sum.26
//           Run add.27
//           Run copy.28
//           Run cast.29
//           Run mul.30
//           Wait v
//           Issue mma.32
//           Release k
//           Join <= 0: acc_2
//           Release v
//         skip
//           Wait k
//           Release k
//           Wait v
//           Release v
//       straight
//         Release q
//       straight
//         Run where.37
//         Run store.40

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

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float rcp_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE void tma_load_4d(unsigned to, const TensorMap* map, unsigned bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global"
               ".mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

DEVICE void wgmma_m64n128_bf16_ss(float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(accumulate));
}

DEVICE void wgmma_m64n64_bf16_rs_nt(float (&d)[32], const unsigned* a, unsigned long long b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

DEVICE void tma_store_4d(const TensorMap* map, unsigned from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
               "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

extern "C" __global__ void __launch_bounds__(384, 1) attention(
    const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap o_map,
    int batch,
    int heads,
    int rows,
    int d,
    int kv_heads,
    int keys) {
  extern __shared__ __align__(1024) unsigned char shared_raw[];
  const unsigned shared = (smem_address(shared_raw) + 1023u) & ~1023u;
  const unsigned q_base = shared + 0;
  const unsigned q_full = shared + 98304;
  const unsigned q_empty = shared + 98312;
  const unsigned k_base = shared + 16384;
  const unsigned k_full = shared + 98320;
  const unsigned k_empty = shared + 98336;
  const unsigned v_base = shared + 49152;
  const unsigned v_full = shared + 98352;
  const unsigned v_empty = shared + 98368;
  const unsigned panels = shared + 81920;
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 1; ++s) {
      barrier_init(q_full + s * 8, 1);
      barrier_init(q_empty + s * 8, 8);
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(k_full + s * 8, 1);
      barrier_init(k_empty + s * 8, 8);
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(v_full + s * 8, 1);
      barrier_init(v_empty + s * 8, 8);
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
      const int rows_tile_count = ((rows + 127) / 128);
      const int tasks = batch_tile_count * heads_tile_count * rows_tile_count;
      #pragma unroll 1
      for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
        int rest = task;
        const int rows_tile_place = rest % rows_tile_count;
        rest /= rows_tile_count;
        const int heads_tile_place = rest % heads_tile_count;
        rest /= heads_tile_count;
        const int batch_tile_place = rest % batch_tile_count;
        rest /= batch_tile_count;
        const int batch_tile = batch_tile_place;
        const int heads_tile = heads_tile_place;
        const int rows_tile = rows_tile_place;
        // Acquire q
        barrier_wait(q_empty + q_cursor.slot * 8, q_cursor.parity ^ 1);
        barrier_expect(q_full + q_cursor.slot * 8, 16384);
        // Fill load.0 into q  program.py:275
        tma_load_4d(q_base + q_cursor.slot * 16384 + 0, &q_map, q_full + q_cursor.slot * 8, 0, (rows_tile * 128), heads_tile, batch_tile);
        // Publish q
        advance<1>(q_cursor);
        {
          const int i_start = 0, i_stop = ((keys + 127) / 128);
          #pragma unroll 1
          for (int i_ = i_start; i_ < i_stop; ++i_) {
            // Acquire k
            barrier_wait(k_empty + k_cursor.slot * 8, k_cursor.parity ^ 1);
            barrier_expect(k_full + k_cursor.slot * 8, 16384);
            // Fill load.4 into k  program.py:276
            tma_load_4d(k_base + k_cursor.slot * 16384 + 0, &k_map, k_full + k_cursor.slot * 8, 0, (i_ * 128), heads_tile, batch_tile);
            // Publish k
            advance<2>(k_cursor);
            // Acquire v
            barrier_wait(v_empty + v_cursor.slot * 8, v_cursor.parity ^ 1);
            barrier_expect(v_full + v_cursor.slot * 8, 16384);
            // Fill load.31 into v  program.py:252
            tma_load_4d(v_base + v_cursor.slot * 16384 + 0, &v_map, v_full + v_cursor.slot * 8, 0, (i_ * 128), heads_tile, batch_tile);
            // Publish v
            advance<2>(v_cursor);
          }
        }
      }
    }
  } else {
    // compute0: matmuls and everything in registers
    registers_up<240>();
    const int part = warp_group - 1;
    const int thread_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int thread_col = lane % 4 * 2;
    Cursor q_cursor; unsigned q_oldest = 0;
    Cursor k_cursor; unsigned k_oldest = 0;
    Cursor v_cursor; unsigned v_oldest = 0;
    const int batch_tile_count = batch;
    const int heads_tile_count = heads;
    const int rows_tile_count = ((rows + 127) / 128);
    const int tasks = batch_tile_count * heads_tile_count * rows_tile_count;
    #pragma unroll 1
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
      int rest = task;
      const int rows_tile_place = rest % rows_tile_count;
      rest /= rows_tile_count;
      const int heads_tile_place = rest % heads_tile_count;
      rest /= heads_tile_count;
      const int batch_tile_place = rest % batch_tile_count;
      rest /= batch_tile_count;
      const int batch_tile = batch_tile_place;
      const int heads_tile = heads_tile_place;
      const int rows_tile = rows_tile_place;
      float acc[1][2];
      float acc_1[1][2];
      float acc_2[1][32];
      float product[1][64];
      float max_[1][2];
      float max_1[1][2];
      float where[1][2];
      float exp2[1][2];
      float exp2_1[1][64];
      float sum[1][2];
      unsigned exp2_2[1][32];
      float where_1[1][2];
      // Run fill.1  program.py:328
      #pragma unroll
      for (int t = 0; t < 1; ++t)
      #pragma unroll
      for (int i = 0; i < 2; ++i)
          acc[t][i] = -INFINITY;
      // Run fill.2  program.py:328
      #pragma unroll
      for (int t = 0; t < 1; ++t)
      #pragma unroll
      for (int i = 0; i < 2; ++i)
          acc_1[t][i] = 0.0f;
      // Run fill.3  program.py:329
      #pragma unroll
      for (int t = 0; t < 1; ++t)
      #pragma unroll
      for (int i = 0; i < 32; ++i)
          acc_2[t][i] = 0.0f;
      // Wait q
      barrier_wait(q_full + q_cursor.slot * 8, q_cursor.parity);
      const unsigned q_at = in_block(q_base) + q_cursor.slot * 16384;
      advance<1>(q_cursor);
      {
        const int i_start = 0, i_end = ((keys + 127) / 128);
        const int i_stop = ::max(i_start, ::min(i_end, (::min(::max(((rows - (rows_tile * 128)) - (part * 64)), 0), 1) * ((keys + 127) / 128))));  // later iterations leave this part as it is
        #pragma unroll 1
        for (int i_ = i_start; i_ < i_stop; ++i_) {
          // Wait k
          barrier_wait(k_full + k_cursor.slot * 8, k_cursor.parity);
          const unsigned k_at = in_block(k_base) + k_cursor.slot * 16384;
          advance<2>(k_cursor);
          // Issue mma.5  program.py:331
          pin(product);
          wgmma_fence();
          wgmma_m64n128_bf16_ss(product[0], descriptor(0x10000, 0x40000040, q_at + part * 8192), descriptor(0x10000, 0x40000040, k_at), 0);
          wgmma_m64n128_bf16_ss(product[0], descriptor(0x10002, 0x40000040, q_at + part * 8192), descriptor(0x10002, 0x40000040, k_at), 1);
          wgmma_m64n128_bf16_ss(product[0], descriptor(0x10004, 0x40000040, q_at + part * 8192), descriptor(0x10004, 0x40000040, k_at), 1);
          wgmma_m64n128_bf16_ss(product[0], descriptor(0x10006, 0x40000040, q_at + part * 8192), descriptor(0x10006, 0x40000040, k_at), 1);
          wgmma_commit();
          // Join <= 0: product
          wgmma_wait<0>();
          pin(product);
          // Run where.10  program.py:334
          if (!(((i_ * 128) + 127) < keys)) {
            #pragma unroll
            for (int t = 0; t < 1; ++t)
            #pragma unroll
            for (int i = 0; i < 64; ++i)
                product[t][i] = ((((i_ * 128) + (((i) >> 2) * 8 + thread_col + ((i) & 1))) < keys) ? product[t][i] : -INFINITY);
          }
          // Run reduce_max.11  program.py:338
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          {
            max_[t][0] = max_[t][1] = -INFINITY;
            #pragma unroll
            for (int i = 0; i < 64; ++i)
              max_[t][i >> 1 & 1] = fmaxf(max_[t][i >> 1 & 1], product[t][i]);
            #pragma unroll
            for (int i = 0; i < 2; ++i)
            #pragma unroll
              for (int step = 1; step < 4; step *= 2)
                max_[t][i] = fmaxf(max_[t][i], __shfl_xor_sync(0xffffffffu, max_[t][i], step));
          }
          // Run max.14  program.py:339
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 2; ++i)
              max_1[t][i] = fmaxf(acc[t][i], (max_[t][i] * 0.18033688011112042f));
          // Run where.18  program.py:341
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 2; ++i)
              where[t][i] = ((max_1[t][i] == -INFINITY) ? 0.0f : max_1[t][i]);
          // Run exp2.20  program.py:342
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 2; ++i)
              exp2[t][i] = exp2_fast((acc[t][i] - where[t][i]));
          // Run exp2.24  program.py:343
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 64; ++i)
              exp2_1[t][i] = exp2_fast(((product[t][i] * 0.18033688011112042f) - where[t][((i) >> 1 & 1)]));
          // Run reduce_sum.26  program.py:344
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          {
            sum[t][0] = sum[t][1] = 0.0f;
            #pragma unroll
            for (int i = 0; i < 64; ++i)
              sum[t][i >> 1 & 1] = (sum[t][i >> 1 & 1] + exp2_1[t][i]);
            #pragma unroll
            for (int i = 0; i < 2; ++i)
            #pragma unroll
              for (int step = 1; step < 4; step *= 2)
                sum[t][i] = (sum[t][i] + __shfl_xor_sync(0xffffffffu, sum[t][i], step));
          }
          // Run add.27  program.py:344
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 2; ++i)
              acc_1[t][i] = ((acc_1[t][i] * exp2[t][i]) + sum[t][i]);
          // Run copy.28  program.py:345
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 2; ++i)
              acc[t][i] = max_1[t][i];
          // Run cast.29  program.py:347
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 32; ++i)
              exp2_2[t][i] = pack_bf16(exp2_1[t][2 * i], exp2_1[t][2 * i + 1]);
          // Run mul.30  program.py:348
          #pragma unroll
          for (int t = 0; t < 1; ++t)
          #pragma unroll
          for (int i = 0; i < 32; ++i)
              acc_2[t][i] = (acc_2[t][i] * exp2[t][((i) >> 1 & 1)]);
          // Wait v
          barrier_wait(v_full + v_cursor.slot * 8, v_cursor.parity);
          const unsigned v_at = in_block(v_base) + v_cursor.slot * 16384;
          advance<2>(v_cursor);
          // Issue mma.32  program.py:349
          pin(acc_2);
          pin(exp2_2);
          wgmma_fence();
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][0], descriptor(0x4000000, 0x40000040, v_at), 1);
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][4], descriptor(0x4000080, 0x40000040, v_at), 1);
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][8], descriptor(0x4000100, 0x40000040, v_at), 1);
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][12], descriptor(0x4000180, 0x40000040, v_at), 1);
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][16], descriptor(0x4000200, 0x40000040, v_at), 1);
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][20], descriptor(0x4000280, 0x40000040, v_at), 1);
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][24], descriptor(0x4000300, 0x40000040, v_at), 1);
          wgmma_m64n64_bf16_rs_nt(acc_2[0], &exp2_2[0][28], descriptor(0x4000380, 0x40000040, v_at), 1);
          wgmma_commit();
          // Release k
          if (lane == 0) barrier_arrive(k_empty + k_oldest * 8);
          if (++k_oldest == 2) k_oldest = 0;
          // Join <= 0: acc_2
          wgmma_wait<0>();
          pin(acc_2);
          // Release v
          if (lane == 0) barrier_arrive(v_empty + v_oldest * 8);
          if (++v_oldest == 2) v_oldest = 0;
        }
        #pragma unroll 1
        for (int i_ = i_stop; i_ < i_end; ++i_) {
          // Wait k
          barrier_wait(k_full + k_cursor.slot * 8, k_cursor.parity);
          const unsigned k_at = in_block(k_base) + k_cursor.slot * 16384;
          advance<2>(k_cursor);
          // Release k
          if (lane == 0) barrier_arrive(k_empty + k_oldest * 8);
          if (++k_oldest == 2) k_oldest = 0;
          // Wait v
          barrier_wait(v_full + v_cursor.slot * 8, v_cursor.parity);
          const unsigned v_at = in_block(v_base) + v_cursor.slot * 16384;
          advance<2>(v_cursor);
          // Release v
          if (lane == 0) barrier_arrive(v_empty + v_oldest * 8);
          if (++v_oldest == 2) v_oldest = 0;
        }
      }
      // Release q
      if (lane == 0) barrier_arrive(q_empty + q_oldest * 8);
      if (++q_oldest == 1) q_oldest = 0;
      // Run where.37  program.py:351
      #pragma unroll
      for (int t = 0; t < 1; ++t)
      #pragma unroll
      for (int i = 0; i < 2; ++i)
          where_1[t][i] = ((acc_1[t][i] == 0.0f) ? 0.0f : rcp_fast(acc_1[t][i]));
      // Run store.40  program.py:256
      if (threadIdx.x % 128 == 0) store_wait_read<0>();
      if (part == 0) named_sync<1, 128>(); else named_sync<2, 128>();
      if (0 + 0 < d) {
        const unsigned panel = panels + part * 8192 + 0;
        #pragma unroll
        for (int t = 0; t < 1; ++t)
        #pragma unroll
          for (int j = 0; j < 8; j += 2) {
            const unsigned row = threadIdx.x % 128 / 32 * 16 + lane % 16;
            const unsigned at = row * 128 + (j + lane / 16) * 16;
            stmatrix(panel + t * 8192 + (at ^ (at >> 3 & 0x70)), pack_bf16((acc_2[t][2 * (0 + 2 * j + 0)] * where_1[t][((2 * (0 + 2 * j + 0)) >> 1 & 1)]), (acc_2[t][2 * (0 + 2 * j + 0) + 1] * where_1[t][((2 * (0 + 2 * j + 0) + 1) >> 1 & 1)])), pack_bf16((acc_2[t][2 * (0 + 2 * j + 1)] * where_1[t][((2 * (0 + 2 * j + 1)) >> 1 & 1)]), (acc_2[t][2 * (0 + 2 * j + 1) + 1] * where_1[t][((2 * (0 + 2 * j + 1) + 1) >> 1 & 1)])), pack_bf16((acc_2[t][2 * (0 + 2 * j + 2)] * where_1[t][((2 * (0 + 2 * j + 2)) >> 1 & 1)]), (acc_2[t][2 * (0 + 2 * j + 2) + 1] * where_1[t][((2 * (0 + 2 * j + 2) + 1) >> 1 & 1)])), pack_bf16((acc_2[t][2 * (0 + 2 * j + 3)] * where_1[t][((2 * (0 + 2 * j + 3)) >> 1 & 1)]), (acc_2[t][2 * (0 + 2 * j + 3) + 1] * where_1[t][((2 * (0 + 2 * j + 3) + 1) >> 1 & 1)])));
          }
        fence_async();
      }
      if (part == 0) named_sync<1, 128>(); else named_sync<2, 128>();
      if (threadIdx.x % 128 == 0) {
        if (0 + 0 < d) tma_store_4d(&o_map, panels + part * 8192 + 0, 0, (rows_tile * 128) + part * 64, heads_tile, batch_tile);
        store_commit();
      }
    }
    store_wait_read<0>();
  }
}
