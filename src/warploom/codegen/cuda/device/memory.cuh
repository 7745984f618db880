// Rounding through the element types of `types.cuh`, and reading, writing and adding one element.

//@ rounded_bf16
DEVICE float rounded_bf16(float x) {
  Bf16 y;
  set(y, x);
  return value_of(y);
}

//@ rounded_fp16
DEVICE float rounded_fp16(float x) {
  Fp16 y;
  set(y, x);
  return value_of(y);
}

//@ rounded_e4m3
DEVICE float rounded_e4m3(float x) {
  E4m3 y;
  set(y, x);
  return value_of(y);
}

//@ rounded_e5m2
DEVICE float rounded_e5m2(float x) {
  E5m2 y;
  set(y, x);
  return value_of(y);
}

//@ add_bf16
DEVICE void add_bf16(unsigned short* p, float x) { add_to(reinterpret_cast<Bf16*>(p), x); }

//@ add_fp16
DEVICE void add_fp16(unsigned short* p, float x) { add_to(reinterpret_cast<Fp16*>(p), x); }

//@ add_fp32
DEVICE void add_fp32(float* p, float x) { atomicAdd(p, x); }

//@ add_int32
DEVICE void add_int32(int* p, int x) { atomicAdd(p, x); }

//@ read_e4m3
DEVICE float read_e4m3(const E4m3* p) { return value_of(*p); }

//@ read_e5m2
DEVICE float read_e5m2(const E5m2* p) { return value_of(*p); }

//@ kept
// A constant that stays in a register: ptxas makes one that it knows anew for every use, so that an
// instruction with two of them took two. No lane is both above a lane and not, which it cannot know.
DEVICE unsigned kept(unsigned constant) {
  unsigned above, others;
  asm("mov.u32 %0, %%lanemask_gt;" : "=r"(above));
  asm("mov.u32 %0, %%lanemask_le;" : "=r"(others));
  return constant + (above & others);
}

//@ Field
// A signed number of some bits of a word. As a float it comes without a conversion, of which an SM
// has few: with its sign flipped the field is the low part of the mantissa of 2^23, and one FFMA
// takes away what was added and scales it back to its place.
struct Field {
  unsigned word;
  int shift, bits;
};
DEVICE float number(Field x) {
  const unsigned sign = 1u << (x.bits - 1) << x.shift, mask = (2 * sign - 1) >> x.shift << x.shift;
  const float unit = 1.0f / (1 << x.shift);
  const float whole = __uint_as_float((x.word & mask) ^ (0x4b000000u | sign));
  return __fmaf_rn(whole, unit, -(8388608.0f + sign) * unit);
}
DEVICE Field low_nibble(Field x) { return Field{x.word, x.shift, 4}; }
DEVICE Field high_nibble(Field x) { return Field{x.word, x.shift + 4, 4}; }

//@ read_int8
DEVICE Field read_int8(const Int8* p) { return Field{(unsigned char)p->bits, 0, 8}; }

//@ half_of
// One of two elements that were converted together: both halves of a pair are asked for, and the
// compiler finds that the conversion is the same.
DEVICE float half_of(unsigned pair, int high) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(high ? pair >> 16 : pair)));
  return y;
}

//@ half_e4m3
DEVICE float half_e4m3(unsigned short x, int high) {
  unsigned pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(x));
  return half_of(pair, high);
}

//@ halves_e4m3
DEVICE unsigned halves_e4m3(unsigned short x) {
  unsigned pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(x));
  return pair;
}

//@ half_e5m2
DEVICE float half_e5m2(unsigned short x, int high) {
  unsigned pair;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(x));
  return half_of(pair, high);
}

//@ half_int8
DEVICE Field half_int8(unsigned short x, int high) { return Field{x, high ? 8 : 0, 8}; }

//@ bytes_bf16
// Two signed numbers of eight bits. Their low seven bits are the mantissa of 128, and with 128's own
// the sign is the last bit of an exponent: 256 where it is set. One packed FMA takes that away.
DEVICE unsigned bytes_bf16(unsigned short x) {
  const unsigned spread = __byte_perm(x, 0, 0x4140);
  unsigned y = (spread & kept(0x007f007fu)) ^ 0x43004300u;
  const unsigned less = (spread & kept(0x00800080u)) ^ 0xc300c300u;
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(y) : "r"(0x3f803f80u), "r"(less));
  return y;
}

//@ bytes_fp16
// The same: with its sign flipped a number is the low part of the mantissa of 1024.
DEVICE unsigned bytes_fp16(unsigned short x) {
  unsigned y = __byte_perm(x, 0, 0x4140) ^ 0x64806480u;
  asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(y) : "r"(0x3c003c00u), "r"(0xe480e480u));
  return y;
}

//@ nibbles_bf16
// The signed numbers in four bits, from `shift` on, of two bytes: with its sign flipped each is the
// low part of the mantissa of 128, and one packed FMA takes away what was added.
DEVICE unsigned nibbles_bf16(unsigned short x, int shift) {
  unsigned y = (__byte_perm(x, 0, 0x4140) >> shift & kept(0x000f000fu)) ^ 0x43084308u;
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(y) : "r"(0x3f803f80u), "r"(0xc308c308u));
  return y;
}

//@ nibbles_fp16
// The same in the mantissa of 1024.
DEVICE unsigned nibbles_fp16(unsigned short x, int shift) {
  unsigned y = (__byte_perm(x, 0, 0x4140) >> shift & kept(0x000f000fu)) ^ 0x64086408u;
  asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(y) : "r"(0x3c003c00u), "r"(0xe408e408u));
  return y;
}

//@ read_bool
DEVICE bool read_bool(const unsigned char* p) { return *p != 0; }

//@ write_e4m3
DEVICE void write_e4m3(E4m3* p, float x) { set(*p, x); }

//@ write_e5m2
DEVICE void write_e5m2(E5m2* p, float x) { set(*p, x); }

//@ write_bool
DEVICE void write_bool(unsigned char* p, bool x) { *p = x; }
