// Kernels for GPUs without TMA and wgmma: cp.async, ldmatrix, mma.sync.
// Sources: PTX ISA 9.x, sections 9.7.9.25 (cp.async), 9.7.13.15 (mbarrier,
// cp.async.mbarrier.arrive), 9.7.14.5 (mma, ldmatrix). Tiles lie in shared memory as `ir.layout`
// says. Its swizzle repeats every 8 rows: (8 i + r, byte) is 8 i rows beyond (r, byte). `read_left`
// and `read_right` are written so: then the offsets of all blocks differ by constants and share
// registers; else each has its own.

//@ barrier_wait
// Returns when the phase of that parity has completed (a fresh barrier: parity 1 at once).
DEVICE void barrier_wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred done;\nAGAIN:\n"
               "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
               "@!done bra AGAIN; }" ::"r"(bar), "r"(parity) : "memory");
}

//@ copies_arrive
// Arrives once every copy this thread has started is done; the barrier counts on 128 of them.
DEVICE void copies_arrive(unsigned bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

//@ copy_async
// 16 bytes to shared memory, of which `count` are read and the rest are zero.
DEVICE void copy_async(unsigned to, const void* from, unsigned count) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(count) : "memory");
}

//@ load_matrix
DEVICE void load_matrix(unsigned (&x)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

//@ load_matrix_transposed
DEVICE void load_matrix_transposed(unsigned (&x)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

//@ mma_bf16
DEVICE void mma_bf16(float* d, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

//@ mma_fp16
DEVICE void mma_fp16(float* d, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

//@ block_store
// `blocks.cuh` has it by stmatrix.
DEVICE void block_store(unsigned at, const unsigned (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("st.shared.u32 [%0], %1;"
                 ::"r"(at + i * 128 + threadIdx.x % 32 * 4), "r"(x[i]) : "memory");
}

//@ tile_offset
// Byte offset of (row, byte of the row) in a tile of panels kWidth bytes wide, swizzled.
template <int kWidth, int kRows> DEVICE unsigned tile_offset(int row, int byte) {
  constexpr unsigned kMask = kWidth == 128 ? 0x70 : kWidth == 64 ? 0x30 : 0x10;
  const unsigned at = row * kWidth + byte % kWidth;
  return byte / kWidth * (kRows * kWidth) + (at ^ (at >> 3 & kMask));
}

//@ fill_tile
// 128 threads start the copies of a tile; what lies outside of the array becomes zero.
template <int kWidth, int kRows, int kCols>
DEVICE void fill_tile(unsigned to, const unsigned short* from, long long pitch, int row, int rows,
                      int col, int cols) {
  constexpr int kLine = kCols / 8;  // pieces of 16 bytes a row
#pragma unroll 4
  for (int at = threadIdx.x % 128; at < kRows * kLine; at += 128) {
    const int r = row + at / kLine, c = col + at % kLine * 8;
    const bool inside = unsigned(r) < unsigned(rows) && unsigned(c) < unsigned(cols);
    const unsigned count = inside ? 2 * ::min(cols - c, 8) : 0;
    copy_async(to + tile_offset<kWidth, kRows>(at / kLine, at % kLine * 16),
               inside ? from + r * pitch + c : from, count);
  }
}

//@ read_left
// Operand A of one mma: rows from `row`, depth from `depth`, multiples of 8; kDeep: the depth is
// contiguous.
template <int kWidth, int kRows, bool kDeep>
DEVICE void read_left(unsigned (&x)[4], unsigned tile, int row, int depth) {
  const int lane = threadIdx.x % 32;
  if constexpr (kDeep) {
    const int byte = (depth + lane / 16 * 8) * 2;
    load_matrix(x, tile + row * kWidth + tile_offset<kWidth, kRows>(lane % 16, byte));
  } else {
    const int r = lane % 8 + lane / 16 * 8, byte = (row + lane / 8 % 2 * 8) * 2;
    load_matrix_transposed(x, tile + depth * kWidth + tile_offset<kWidth, kRows>(r, byte));
  }
}

//@ read_bytes
// Pairs of 8-bit elements of 16 columns as a lane holds those of sums: rows r and r + 8 of columns
// 2 q and 2 q + 1 (q = lane % 4), then of the next 8 columns. A lane's rows are 8 apart, so their
// swizzle is the same, and its address differs from that of column 0 in the column's bits alone.
template <int kWidth, int kRows>
DEVICE void read_bytes(unsigned short (&x)[4], unsigned tile, int row, int col) {
  const int lane = threadIdx.x % 32;
  const unsigned first = tile + tile_offset<kWidth, kRows>(row + lane / 4, lane % 4 * 2);
  const unsigned at = (first ^ (col % kWidth)) + col / kWidth * kRows * kWidth;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("ld.shared.u16 %0, [%1];"
                 : "=h"(x[i]) : "r"(at + i % 2 * 8 * kWidth + i / 2 * 8) : "memory");
  }
}

//@ turn_tile
// An 8-bit tile of kKeys rows and kCols columns, transposed and each 16 of its rows in the order of
// quads, by kWarps warps from warp 1 on. A pair of columns moves as one 16-bit element: transposed,
// lane 4 p + q holds rows 2 q and 2 q + 1 of columns 2 p and 2 p + 1, from two matrices all that one
// word of either column's row takes. Lanes of odd columns of the upper half first: rows of a matrix
// then lie in different banks.
template <int kWidth, int kRows, int kFrom, int kKeys, int kCols, int kWarps, int kAhead>
DEVICE void turn_tile(unsigned to, unsigned from) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1;
  const unsigned upper = lane / 16, row = lane % 8;
  const unsigned one = upper ? 0x7531 : 0x6420, other = upper ? 0x6420 : 0x7531;
  const unsigned own = row * 2 + (row / 4 ^ (lane / 8 % 2));
  // The swizzle changes bits of a place by XOR, so that places further on are an XOR away.
  // Nothing is derived from them before: the addresses of a loop's tiles would fill registers.
  const unsigned first = at_use(from + tile_offset<kFrom, kKeys>(lane, 0));
  const unsigned last =
      at_use(to + tile_offset<kWidth, kRows>(own, upper * 16) + warp * 16 * kWidth);
  // A step is 32 keys of 16 columns. Of a wide tile, with more columns than a warp's registers have
  // addresses for, kAhead steps of kParts parts have their matrices on their way at a time.
  constexpr int kSteps = (kKeys + 31) / 32, kWide = kCols > 128;
  constexpr int kParts = kWide ? kAhead / kSteps + (kAhead < kSteps) : 1;
  constexpr int kAtOnce = kWide ? 1 : kCols / 16;
#pragma unroll kAtOnce
  for (unsigned part = 0; part < kCols / 16; part += kWarps * kParts) {
    if (part + kWarps * kParts > kCols / 16 && (part + warp) * 16 >= kCols) break;
    constexpr int kBatch = kWide ? kAhead : 1;
#pragma unroll
    for (int begin = 0; begin < kParts * kSteps; begin += kBatch) {
      unsigned x[kBatch][4];
#pragma unroll
      for (int i = begin; i < begin + kBatch && i < kParts * kSteps; ++i) {
        const unsigned col = (part + i / kSteps * kWarps + warp) * 16;
        const unsigned panel = kCols > kFrom ? col / kFrom : 0;
        const unsigned at = (first ^ col % kFrom) + panel * (kKeys * kFrom);
        if (i / kSteps == 0 || col < kCols)
          load_matrix_transposed(x[i - begin], at + i % kSteps * 32 * kFrom);
      }
#pragma unroll
      for (int i = begin; i < begin + kBatch && i < kParts * kSteps; ++i) {
        unsigned(&y)[4] = x[i - begin];
        const int key = i % kSteps * 32;
        const unsigned own = part + i / kSteps * kWarps;
        if (i / kSteps == 0 || (own + warp) * 16 < kCols)
          stmatrix((last ^ key % kWidth) + own * 16 * kWidth + key / kWidth * (kRows * kWidth),
                   __byte_perm(y[0], y[1], one), __byte_perm(y[0], y[1], other),
                   __byte_perm(y[2], y[3], one), __byte_perm(y[2], y[3], other));
      }
    }
  }
}

//@ read_right
// Operand B of two mma: columns from `col`, 16 of them where the tile has so many (8 twice, else).
template <int kWidth, int kRows, int kCols, bool kDeep>
DEVICE void read_right(unsigned (&x)[4], unsigned tile, int col, int depth) {
  const int lane = threadIdx.x % 32;
  const int second = col + 16 <= (kDeep ? kRows : kCols) ? lane / 16 * 8 : 0;
  if constexpr (kDeep) {
    const int byte = (depth + lane / 8 % 2 * 8) * 2;
    load_matrix(x, tile + col * kWidth + tile_offset<kWidth, kRows>(lane % 8 + second, byte));
  } else {
    const int r = lane % 8 + lane / 8 % 2 * 8, byte = (col + second) * 2;
    load_matrix_transposed(x, tile + depth * kWidth + tile_offset<kWidth, kRows>(r, byte));
  }
}
