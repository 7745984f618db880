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

//@ read_int8
DEVICE int read_int8(const Int8* p) { return value_of(*p); }

//@ half_e4m3
DEVICE float half_e4m3(unsigned short x, int high) {
  return value_of(E4m3{(unsigned char)(high ? x >> 8 : x)});
}

//@ half_e5m2
DEVICE float half_e5m2(unsigned short x, int high) {
  return value_of(E5m2{(unsigned char)(high ? x >> 8 : x)});
}

//@ half_int8
DEVICE int half_int8(unsigned short x, int high) {
  return value_of(Int8{(signed char)(high ? x >> 8 : x)});
}

//@ read_bool
DEVICE bool read_bool(const unsigned char* p) { return *p != 0; }

//@ write_e4m3
DEVICE void write_e4m3(E4m3* p, float x) { set(*p, x); }

//@ write_e5m2
DEVICE void write_e5m2(E5m2* p, float x) { set(*p, x); }

//@ write_bool
DEVICE void write_bool(unsigned char* p, bool x) { *p = x; }
