// gemm: emitted by warploom from a tile program and the schedule "lcsf".
//
//   program gemm(a: bf16[m, k], b: bf16[k, n], c: bf16[m, n])
//     for each m_tile < ((m + 199) // 200)
//     for each n_tile < ((n + 255) // 256)
//       0  acc: fp32[n=256, m=200] = fill 0.0
//          loop i from 0 to ((k + 63) // 64):
//         1  a_t: bf16[m=200, k=64] = load a[(m_tile * 200) +200, (i * 64) +64] edge 0.0
//         2  b_t: bf16[k=64, n=256] = load b[(i * 64) +64, (n_tile * 256) +256] edge 0.0
//         3  acc: fp32[n=256, m=200] = mma b_t, a_t, acc
//       4  acc_1: fp32[m=200, n=256] = transpose acc
//       5  acc_2: bf16[m=200, n=256] = cast acc_1
//       6  store acc_2 c[(m_tile * 200) +200, (n_tile * 256) +256]
//
//     launch {"split": "n", "supergroup": 6, "store_panels": 1}
//     ring a_b x3: load.1, load.2 (58368 B a slot)
//     role load: 4 warps, 24 registers
//       loop i, 0 started ahead
//         steady
//           Acquire a_b
//           Fill load.1 into a_b
//           Fill load.2 into a_b
//           Publish a_b
//     role compute0: 4 warps, 240 registers, part 0
//       straight
//         Run fill.0
//       loop i, 0 started ahead
//         steady
//           Wait a_b
//           Issue mma.3
//           Join <= 0: acc
//           Release a_b
//       straight
//         Run store.6
//     role compute1: 4 warps, 240 registers, part 1
//       straight
//         Run fill.0
//       loop i, 0 started ahead
//         steady
//           Wait a_b
//           Issue mma.3
//           Join <= 0: acc
//           Release a_b
//       straight
//         Run store.6

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

DEVICE void tma_load_2d(unsigned to, const TensorMap* map, unsigned bar, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global"
               ".mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
}

DEVICE void wgmma_m64n200_bf16_ss_tn(float (&d)[100], unsigned long long a, unsigned long long b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %102, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n200k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      "%96, %97, %98, %99}, "
      "%100, %101, p, 1, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
      : "l"(a), "l"(b), "r"(accumulate));
}

DEVICE void tma_store_2d(const TensorMap* map, unsigned from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group "
               "[%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(c0), "r"(c1) : "memory");
}

extern "C" __global__ void __launch_bounds__(384, 1) gemm(
    const __grid_constant__ TensorMap a_map,
    const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map,
    int m,
    int k,
    int n) {
  extern __shared__ __align__(1024) unsigned char shared_raw[];
  const unsigned shared = (smem_address(shared_raw) + 1023u) & ~1023u;
  const unsigned a_b_base = shared + 0;
  const unsigned a_b_full = shared + 226304;
  const unsigned a_b_empty = shared + 226328;
  const unsigned panels = shared + 175104;
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) {
      barrier_init(a_b_full + s * 8, 1);
      barrier_init(a_b_empty + s * 8, 8);
    }
    prefetch_map(&a_map);
    prefetch_map(&b_map);
    prefetch_map(&c_map);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp_group == 0) {
    // load: one thread starts every copy into shared memory
    registers_down<24>();
    if (threadIdx.x == 0) {
      Cursor a_b_cursor;
      const int m_tile_count = ((m + 199) / 200);
      const int n_tile_count = ((n + 255) / 256);
      const int tasks = m_tile_count * n_tile_count;
      #pragma unroll 1
      for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
        int rest = task / (m_tile_count * n_tile_count);
        const int in_plane = task % (m_tile_count * n_tile_count);
        const int band = in_plane / (6 * n_tile_count);
        const int in_band = in_plane % (6 * n_tile_count);
        const int band_rows = ::min(6, m_tile_count - band * 6);
        const int m_tile_place = band * 6 + in_band % band_rows;
        const int n_tile_place = in_band / band_rows;
        const int m_tile = m_tile_place;
        const int n_tile = n_tile_place;
        {
          const int i_start = 0, i_stop = ((k + 63) / 64);
          #pragma unroll 1
          for (int i_ = i_start; i_ < i_stop; ++i_) {
            // Acquire a_b
            barrier_wait(a_b_empty + a_b_cursor.slot * 8, a_b_cursor.parity ^ 1);
            barrier_expect(a_b_full + a_b_cursor.slot * 8, 58368);
            // Fill load.1 into a_b  program.py:176
            tma_load_2d(a_b_base + a_b_cursor.slot * 58368 + 0, &a_map, a_b_full + a_b_cursor.slot * 8, (i_ * 64), (m_tile * 200));
            // Fill load.2 into a_b  program.py:178
            tma_load_2d(a_b_base + a_b_cursor.slot * 58368 + 25600, &b_map, a_b_full + a_b_cursor.slot * 8, (n_tile * 256), (i_ * 64));
            tma_load_2d(a_b_base + a_b_cursor.slot * 58368 + 33792, &b_map, a_b_full + a_b_cursor.slot * 8, (n_tile * 256) + 64, (i_ * 64));
            tma_load_2d(a_b_base + a_b_cursor.slot * 58368 + 41984, &b_map, a_b_full + a_b_cursor.slot * 8, (n_tile * 256) + 128, (i_ * 64));
            tma_load_2d(a_b_base + a_b_cursor.slot * 58368 + 50176, &b_map, a_b_full + a_b_cursor.slot * 8, (n_tile * 256) + 192, (i_ * 64));
            // Publish a_b
            advance<3>(a_b_cursor);
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
    Cursor a_b_cursor; unsigned a_b_oldest = 0;
    const int m_tile_count = ((m + 199) / 200);
    const int n_tile_count = ((n + 255) / 256);
    const int tasks = m_tile_count * n_tile_count;
    #pragma unroll 1
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
      int rest = task / (m_tile_count * n_tile_count);
      const int in_plane = task % (m_tile_count * n_tile_count);
      const int band = in_plane / (6 * n_tile_count);
      const int in_band = in_plane % (6 * n_tile_count);
      const int band_rows = ::min(6, m_tile_count - band * 6);
      const int m_tile_place = band * 6 + in_band % band_rows;
      const int n_tile_place = in_band / band_rows;
      const int m_tile = m_tile_place;
      const int n_tile = n_tile_place;
      float acc[2][100];
      int acc_live = 0;
      // Run fill.0  program.py:171
      acc_live = 0;
      {
        const int i_start = 0, i_stop = ((k + 63) / 64);
        #pragma unroll 1
        for (int i_ = i_start; i_ < i_stop; ++i_) {
          // Wait a_b
          barrier_wait(a_b_full + a_b_cursor.slot * 8, a_b_cursor.parity);
          const unsigned a_b_at = in_block(a_b_base) + a_b_cursor.slot * 58368;
          advance<3>(a_b_cursor);
          // Issue mma.3  program.py:180
          pin(acc);
          wgmma_fence();
          wgmma_m64n200_bf16_ss_tn(acc[0], descriptor(0x2000640, 0x40000040, a_b_at + part * 16384), descriptor(0x10000, 0x40000040, a_b_at), acc_live);
          wgmma_m64n200_bf16_ss_tn(acc[1], descriptor(0x2000840, 0x40000040, a_b_at + part * 16384), descriptor(0x10000, 0x40000040, a_b_at), acc_live);
          wgmma_m64n200_bf16_ss_tn(acc[0], descriptor(0x20006c0, 0x40000040, a_b_at + part * 16384), descriptor(0x10002, 0x40000040, a_b_at), 1);
          wgmma_m64n200_bf16_ss_tn(acc[1], descriptor(0x20008c0, 0x40000040, a_b_at + part * 16384), descriptor(0x10002, 0x40000040, a_b_at), 1);
          wgmma_m64n200_bf16_ss_tn(acc[0], descriptor(0x2000740, 0x40000040, a_b_at + part * 16384), descriptor(0x10004, 0x40000040, a_b_at), 1);
          wgmma_m64n200_bf16_ss_tn(acc[1], descriptor(0x2000940, 0x40000040, a_b_at + part * 16384), descriptor(0x10004, 0x40000040, a_b_at), 1);
          wgmma_m64n200_bf16_ss_tn(acc[0], descriptor(0x20007c0, 0x40000040, a_b_at + part * 16384), descriptor(0x10006, 0x40000040, a_b_at), 1);
          wgmma_m64n200_bf16_ss_tn(acc[1], descriptor(0x20009c0, 0x40000040, a_b_at + part * 16384), descriptor(0x10006, 0x40000040, a_b_at), 1);
          wgmma_commit();
          acc_live = 1;
          // Join <= 0: acc
          wgmma_wait<0>();
          pin(acc);
          // Release a_b
          if (lane == 0) barrier_arrive(a_b_empty + a_b_oldest * 8);
          if (++a_b_oldest == 3) a_b_oldest = 0;
        }
        if (!acc_live) {
          #pragma unroll
          for (int t = 0; t < 2; ++t)
          #pragma unroll
          for (int i = 0; i < 100; ++i)
              acc[t][i] = 0.0f;
        }
      }
      // Run store.6  program.py:211
      if (threadIdx.x % 128 == 0) store_wait_read<0>();
      if (part == 0) named_sync<1, 128>(); else named_sync<2, 128>();
      if ((n_tile * 256) + part * 128 < n && (m_tile * 200) + 0 < m) {
        const unsigned panel = panels + part * 25600 + 0;
        const unsigned corner = (lane / 16 * 8 + lane % 8) * 128 + (threadIdx.x % 128 / 32 * 2 + lane / 8 % 2) * 16;
        #pragma unroll
        for (int j = 0; j < 24; j += 2) {
          const unsigned at = corner + j * 1024;
          stmatrix_transposed(panel + (at ^ (at >> 3 & 0x70)), pack_bf16(acc[0][2 * (2 * (j + 0) + 0)], acc[0][2 * (2 * (j + 0) + 0) + 1]), pack_bf16(acc[0][2 * (2 * (j + 0) + 1)], acc[0][2 * (2 * (j + 0) + 1) + 1]), pack_bf16(acc[0][2 * (2 * (j + 0) + 2)], acc[0][2 * (2 * (j + 0) + 2) + 1]), pack_bf16(acc[0][2 * (2 * (j + 0) + 3)], acc[0][2 * (2 * (j + 0) + 3) + 1]));
        }
        {
          const unsigned at = corner + 24576;
          stmatrix_transposed(panel + (at ^ (at >> 3 & 0x70)), pack_bf16(acc[0][2 * (2 * (24) + 0)], acc[0][2 * (2 * (24) + 0) + 1]), pack_bf16(acc[0][2 * (2 * (24) + 1)], acc[0][2 * (2 * (24) + 1) + 1]));
        }
        fence_async();
      }
      if (part == 0) named_sync<1, 128>(); else named_sync<2, 128>();
      if (threadIdx.x % 128 == 0) {
        if ((n_tile * 256) + part * 128 < n && (m_tile * 200) + 0 < m) tma_store_2d(&c_map, panels + part * 25600 + 0, (n_tile * 256) + part * 128, (m_tile * 200));
        store_commit();
      }
      if (threadIdx.x % 128 == 0) store_wait_read<0>();
      if (part == 0) named_sync<1, 128>(); else named_sync<2, 128>();
      if ((n_tile * 256) + part * 128 + 64 < n && (m_tile * 200) + 0 < m) {
        const unsigned panel = panels + part * 25600 + 0;
        const unsigned corner = (lane / 16 * 8 + lane % 8) * 128 + (threadIdx.x % 128 / 32 * 2 + lane / 8 % 2) * 16;
        #pragma unroll
        for (int j = 0; j < 24; j += 2) {
          const unsigned at = corner + j * 1024;
          stmatrix_transposed(panel + (at ^ (at >> 3 & 0x70)), pack_bf16(acc[1][2 * (2 * (j + 0) + 0)], acc[1][2 * (2 * (j + 0) + 0) + 1]), pack_bf16(acc[1][2 * (2 * (j + 0) + 1)], acc[1][2 * (2 * (j + 0) + 1) + 1]), pack_bf16(acc[1][2 * (2 * (j + 0) + 2)], acc[1][2 * (2 * (j + 0) + 2) + 1]), pack_bf16(acc[1][2 * (2 * (j + 0) + 3)], acc[1][2 * (2 * (j + 0) + 3) + 1]));
        }
        {
          const unsigned at = corner + 24576;
          stmatrix_transposed(panel + (at ^ (at >> 3 & 0x70)), pack_bf16(acc[1][2 * (2 * (24) + 0)], acc[1][2 * (2 * (24) + 0) + 1]), pack_bf16(acc[1][2 * (2 * (24) + 1)], acc[1][2 * (2 * (24) + 1) + 1]));
        }
        fence_async();
      }
      if (part == 0) named_sync<1, 128>(); else named_sync<2, 128>();
      if (threadIdx.x % 128 == 0) {
        if ((n_tile * 256) + part * 128 + 64 < n && (m_tile * 200) + 0 < m) tma_store_2d(&c_map, panels + part * 25600 + 0, (n_tile * 256) + part * 128 + 64, (m_tile * 200));
        store_commit();
      }
    }
    store_wait_read<0>();
  }
}
