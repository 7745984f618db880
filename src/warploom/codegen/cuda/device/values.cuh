// Functions on values in registers: packed pairs and quads of narrow types, the functions of maps.
// Sources: PTX ISA 9.x, sections 9.7.3 (ex2, lg2, rcp, tanh), 9.7.9.21 (cvt).

//@ pack_bf16
DEVICE unsigned pack_bf16(float low, float high) {
  unsigned x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

//@ pack_fp16
DEVICE unsigned pack_fp16(float low, float high) {
  unsigned x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

//@ product_bf16
// Of the elements of two pairs; what is added is -0, which changes none.
DEVICE unsigned product_bf16(unsigned a, unsigned b) {
  unsigned x;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(0x80008000u));
  return x;
}

//@ product_fp16
DEVICE unsigned product_fp16(unsigned a, unsigned b) {
  unsigned x;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(0x80008000u));
  return x;
}

//@ pack_e4m3
DEVICE unsigned pack_e4m3(float a, float b, float c, float d) {
  unsigned x;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(x) : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

//@ pack_e5m2
DEVICE unsigned pack_e5m2(float a, float b, float c, float d) {
  unsigned x;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(x) : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

//@ quad_fragment
// From columns 2q, 2q + 1, 8 + 2q, 9 + 2q of 16 (q = lane % 4) to columns 4q to 4q + 3.
DEVICE unsigned quad_fragment(unsigned pairs) {
  const int q = threadIdx.x & 3, from = threadIdx.x & 28 | (2 * q & 3);
  const unsigned x = __shfl_sync(0xffffffffu, pairs, from);
  const unsigned y = __shfl_sync(0xffffffffu, pairs, from + 1);
  return __byte_perm(x, y, q < 2 ? 0x5410 : 0x7632);
}

//@ GIVEN
// An element that nobody writes while the kernel runs.
#define GIVEN(p) __ldg(p)

//@ half_bf16
DEVICE float half_bf16(unsigned x, int high) {
  return __uint_as_float(high ? x & 0xffff0000u : x << 16);
}

//@ half_fp16
DEVICE float half_fp16(unsigned x, int high) {
  float y;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(high ? x >> 16 : x));
  return y;
}

//@ read_bf16
DEVICE float read_bf16(const unsigned short* p) {
  return __uint_as_float(unsigned(GIVEN(p)) << 16);
}

//@ read_fp16
DEVICE float read_fp16(const unsigned short* p) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(GIVEN(p)));
  return y;
}

//@ write_bf16
DEVICE void write_bf16(unsigned short* p, float x) {
  asm volatile("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; st.global.b16 [%0], h; }"
               ::"l"(p), "f"(x) : "memory");
}

//@ write_fp16
DEVICE void write_fp16(unsigned short* p, float x) {
  asm volatile("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; st.global.b16 [%0], h; }"
               ::"l"(p), "f"(x) : "memory");
}

//@ exp2_fast
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

//@ log2_fast
DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

//@ tanh_fast
DEVICE float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

//@ rcp_fast
DEVICE float rcp_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

//@ philox_block
// Philox4x32-10 of the counter (block, row, 0, 0).
DEVICE void philox_block(unsigned (&c)[4], unsigned row, unsigned block, int key, int second_key) {
  unsigned k0 = unsigned(key), k1 = unsigned(second_key);
  c[0] = block, c[1] = row, c[2] = 0, c[3] = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long left = 0xD2511F53ull * c[0], right = 0xCD9E8D57ull * c[2];
    c[0] = unsigned(right >> 32) ^ c[1] ^ k0;
    c[1] = unsigned(right);
    c[2] = unsigned(left >> 32) ^ c[3] ^ k1;
    c[3] = unsigned(left);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

//@ philox
// The word of a column of its block.
DEVICE int philox(int row, int column, int key, int second_key) {
  unsigned c[4];
  philox_block(c, unsigned(row), unsigned(column) >> 2, key, second_key);
  const int word = column & 3;
  return int(word == 0 ? c[0] : word == 1 ? c[1] : word == 2 ? c[2] : c[3]);
}

//@ erf_fast
// Abramowitz and Stegun 7.1.26: absolute error below 2e-7, no branch.
DEVICE float erf_fast(float x) {
  const float a = fabsf(x), t = rcp_fast(fmaf(0.3275911f, a, 1.0f));
  float p = fmaf(1.061405429f, t, -1.453152027f);
  p = fmaf(fmaf(fmaf(p, t, 1.421413741f), t, -0.284496736f), t, 0.254829592f) * t;
  return copysignf(fmaf(-p, exp2_fast(a * a * -1.4426950408889634f), 1.0f), x);
}

//@ gelu_fast
// x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|, where log2 Phi(-a) is -1 and a polynomial (minimax
// for a <= 6; 6 Phi(-6) is 6e-9): absolute error below 3e-7, relative below 1e-3 for x > -6. It takes
// one special function where erf takes two.
DEVICE float gelu_fast(float x) {
  const float a = fminf(fabsf(x), 6.0f);
  float q = fmaf(fmaf(3.24411515e-05f, a, -7.56586935e-04f), a, 8.01590934e-03f);
  q = fmaf(fmaf(q, a, -5.32738366e-02f), a, -4.58905078e-01f);
  q = fmaf(fmaf(q, a, -1.15114664f), a, -1.0f);
  float positive;  // of NaN NaN
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
  return fmaf(-a, exp2_fast(q), positive);
}

//@ gelu_tanh_fast
DEVICE float gelu_tanh_fast(float x) {
  const float half = 0.5f * x;
  return fmaf(half, tanh_fast(x * fmaf(x * x, 0.0356774081f, 0.797884561f)), half);
}

//@ quarters
// x less so many quarters of a turn: at most pi / 4 is left. Up to 1e5 three constants add up to
// pi / 2 (Cody and Waite), beyond that the bits of 2 / pi that matter are multiplied (Payne and
// Hanek): no table in local memory, as sinf has.
static __device__ const unsigned TWO_OVER_PI[7] = {0x28be60dbu, 0x9391054au, 0x7f09d5f4u,
    0x7d4d3770u, 0x36d8a566u, 0x4f10e410u, 0x7f9458eau};
DEVICE float quarters(float x, int& count) {
  if (fabsf(x) <= 1e5f) {
    const float k = rintf(x * 0.636619772f);
    count = int(k);
    return fmaf(k, -5.39030253e-15f, fmaf(k, -3.13916473e-7f, fmaf(k, -1.57079601f, x)));
  }
  count = 0;
  if (!(fabsf(x) < INFINITY)) return x - x;
  const unsigned bits = __float_as_uint(x), m = bits << 8 | 0x80000000u;
  const unsigned e = (bits >> 23 & 255u) - 126u, i = e / 32u, s = e % 32u;
  const unsigned w0 = i ? TWO_OVER_PI[i - 1u] : 0u, w1 = TWO_OVER_PI[i];
  const unsigned w2 = TWO_OVER_PI[i + 1u], w3 = TWO_OVER_PI[i + 2u];
  const unsigned high = w0 << s | (s ? w1 >> (32u - s) : 0u);
  const unsigned middle = w1 << s | (s ? w2 >> (32u - s) : 0u);
  const unsigned low = w2 << s | (s ? w3 >> (32u - s) : 0u);
  unsigned long long p = static_cast<unsigned long long>(m) * low >> 32;
  p += static_cast<unsigned long long>(m) * middle;
  p += static_cast<unsigned long long>(m * high) << 32;
  // p / 2^62 quarters, modulo 4; what is beyond one half of a quarter is negative.
  count = int((p + (1ull << 61)) >> 62);
  const float rest = float(static_cast<long long>(p << 2) >> 2) * 3.4061215800e-19f;
  if (x < 0.0f) count = -count;
  return x < 0.0f ? -rest : rest;
}

//@ sine
// sin(x + count pi / 2) for |x| <= pi / 4: absolute error below 1e-7.
DEVICE float sine(float x, int count) {
  const float s = x * x;
  float y = fmaf(fmaf(fmaf(2.86567956e-6f, s, -1.98559923e-4f), s, 8.33338592e-3f), s,
                 -1.66666672e-1f);
  y = fmaf(y, x * s, x);
  const float z = fmaf(fmaf(fmaf(fmaf(2.44677067e-5f, s, -1.38877297e-3f), s, 4.16666567e-2f), s,
                            -0.5f), s, 1.0f);
  const float w = count & 1 ? z : y;
  return count & 2 ? -w : w;
}

//@ sin_of
DEVICE float sin_of(float x) {
  int count;
  const float rest = quarters(x, count);
  return sine(rest, count);
}

//@ cos_of
DEVICE float cos_of(float x) {
  int count;
  const float rest = quarters(x, count);
  return sine(rest, count + 1);
}
