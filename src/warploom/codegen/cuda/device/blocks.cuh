// Products of 16 x 16 fp16 blocks by single warps (PTX ISA 9.x, sections 9.7.14.5 mma, ldmatrix).
// A block in shared memory is four 8 x 8 matrices one after the other: rows 0 to 7 and 8
// to 15 of its first 8 columns, then of its last 8, which is how a thread holds it as first operand.

//@ block_store
DEVICE void block_store(unsigned at, const unsigned (&x)[4]) {
  stmatrix(at + threadIdx.x % 32 * 16, x[0], x[1], x[2], x[3]);
}

//@ block_load
// As second operand: each matrix is transposed on its way.
DEVICE void block_load(unsigned (&x)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at + threadIdx.x % 32 * 16) : "memory");
}

//@ block_mma
// Adds a product with 8 columns of a block.
DEVICE void block_mma(float* d, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

//@ block_product
// Adds a product with a block in shared memory.
DEVICE void block_product(float* d, const unsigned* a, unsigned at) {
  unsigned b[4];
  block_load(b, at);
  block_mma(d, a, b);
  block_mma(d + 4, a, b + 2);
}

//@ block_words
// A block that a thread has in fp32, as pairs.
DEVICE void block_words(unsigned (&x)[4], const float* from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = pack_fp16(from[2 * i], from[2 * i + 1]);
}
