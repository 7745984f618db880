// Element types in memory and the conversions of each, single PTX instructions (PTX ISA 9.7.9, cvt;
// fp8 needs sm_89). Tests that run SIMT kernels on a CPU replace exactly these.

//@ Bf16
struct Bf16 { unsigned short bits; };
DEVICE float value_of(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
DEVICE void set(Bf16& y, float x) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
DEVICE unsigned pair_of(Bf16*, float low, float high) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE void add_to(Bf16* p, float x) {
  Bf16 y;
  set(y, x);
  asm volatile("red.global.add.noftz.bf16 [%0], %1;" ::"l"(p), "h"(y.bits) : "memory");
}

//@ Fp16
struct Fp16 { unsigned short bits; };
DEVICE float value_of(Fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE void set(Fp16& y, float x) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
DEVICE unsigned pair_of(Fp16*, float low, float high) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE void add_to(Fp16* p, float x) {
  Fp16 y;
  set(y, x);
  asm volatile("red.global.add.noftz.f16 [%0], %1;" ::"l"(p), "h"(y.bits) : "memory");
}

//@ E4m3
struct E4m3 { unsigned char bits; };
DEVICE float value_of(E4m3 x) {
  float y;
  asm("{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %1;\n"
      "mov.b32 {low, high}, pair; cvt.f32.f16 %0, low; }" : "=f"(y) : "h"((unsigned short)x.bits));
  return y;
}
DEVICE unsigned pair_of(E4m3*, float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE void set(E4m3& y, float x) { y.bits = (unsigned char)pair_of(&y, x, 0.0f); }

//@ E5m2
struct E5m2 { unsigned char bits; };
DEVICE float value_of(E5m2 x) {
  float y;
  asm("{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e5m2x2 pair, %1;\n"
      "mov.b32 {low, high}, pair; cvt.f32.f16 %0, low; }" : "=f"(y) : "h"((unsigned short)x.bits));
  return y;
}
DEVICE unsigned pair_of(E5m2*, float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE void set(E5m2& y, float x) { y.bits = (unsigned char)pair_of(&y, x, 0.0f); }

//@ Int8
struct Int8 { signed char bits; };
DEVICE int value_of(Int8 x) { return x.bits; }
