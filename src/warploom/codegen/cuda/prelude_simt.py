"""Device functions of SIMT kernels: element types in memory, exchanges among threads.

Conversions are single PTX instructions (PTX ISA 9.7.9, cvt; fp8 needs sm_89); everything else is
plain C++, so that tests run the emitted text on a CPU with their own conversions.
"""

from __future__ import annotations

from warploom.tile import DType
from warploom.tile.dtypes import FP8, HALVES

# Element types in memory and the conversions of each; tests replace exactly these.
TYPES: dict[str, str] = {
    "Bf16": """\
struct Bf16 { unsigned short bits; };
DEVICE float value_of(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
DEVICE void set(Bf16& y, float x) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
DEVICE void add_to(Bf16* p, float x) {
  Bf16 y;
  set(y, x);
  asm volatile("red.global.add.noftz.bf16 [%0], %1;" ::"l"(p), "h"(y.bits) : "memory");
}""",
    "Fp16": """\
struct Fp16 { unsigned short bits; };
DEVICE float value_of(Fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE void set(Fp16& y, float x) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
DEVICE void add_to(Fp16* p, float x) {
  Fp16 y;
  set(y, x);
  asm volatile("red.global.add.noftz.f16 [%0], %1;" ::"l"(p), "h"(y.bits) : "memory");
}""",
    "E4m3": """\
struct E4m3 { unsigned char bits; };
DEVICE float value_of(E4m3 x) {
  float y;
  asm("{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %1;\\n"
      "mov.b32 {low, high}, pair; cvt.f32.f16 %0, low; }" : "=f"(y) : "h"((unsigned short)x.bits));
  return y;
}
DEVICE void set(E4m3& y, float x) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  y.bits = (unsigned char)pair;
}""",
    "E5m2": """\
struct E5m2 { unsigned char bits; };
DEVICE float value_of(E5m2 x) {
  float y;
  asm("{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e5m2x2 pair, %1;\\n"
      "mov.b32 {low, high}, pair; cvt.f32.f16 %0, low; }" : "=f"(y) : "h"((unsigned short)x.bits));
  return y;
}
DEVICE void set(E5m2& y, float x) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  y.bits = (unsigned char)pair;
}""",
}

SIMT_PRELUDE: dict[str, str] = {
    **TYPES,
    "Plain": """\
DEVICE float value_of(float x) { return x; }
DEVICE int value_of(int x) { return x; }
DEVICE bool value_of(unsigned char x) { return x != 0; }
DEVICE void set(float& y, float x) { y = x; }
DEVICE void set(int& y, int x) { y = x; }
DEVICE void set(unsigned char& y, bool x) { y = x; }
DEVICE void add_to(float* p, float x) { atomicAdd(p, x); }
DEVICE void add_to(int* p, int x) { atomicAdd(p, x); }""",
    "rounded": """\
// x as the type holds it.
template <class T> DEVICE float rounded(float x) {
  T y;
  set(y, x);
  return value_of(y);
}""",
    "copy_bytes": """\
// One access for each 16 bytes, or one of 8, 4, 2, 1.
template <int kBytes> DEVICE void copy_bytes(void* to, const void* from) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int s = 0; s < kBytes / 16; ++s)
      static_cast<uint4*>(to)[s] = static_cast<const uint4*>(from)[s];
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
  } else if constexpr (kBytes == 4) {
    *static_cast<unsigned*>(to) = *static_cast<const unsigned*>(from);
  } else if constexpr (kBytes == 2) {
    *static_cast<unsigned short*>(to) = *static_cast<const unsigned short*>(from);
  } else {
    *static_cast<unsigned char*>(to) = *static_cast<const unsigned char*>(from);
  }
}""",
    "is_aligned": """\
template <int kBytes> DEVICE bool is_aligned(const void* p) {
  return reinterpret_cast<unsigned long long>(p) % (kBytes < 16 ? kBytes : 16) == 0;
}""",
    "read_line": """\
// kCount neighbours, from `place` on, of a line that ends at `length`; elsewhere `edge`.
template <int kCount, class X, class T>
DEVICE void read_line(X* x, const T* line, int place, int length, bool inside, X edge) {
  constexpr int kBytes = kCount * int(sizeof(T));
  alignas(16) T raw[kCount];
  if (inside && place >= 0 && place + kCount <= length && is_aligned<kBytes>(line + place)) {
    copy_bytes<kBytes>(raw, line + place);
#pragma unroll
    for (int h = 0; h < kCount; ++h) x[h] = value_of(raw[h]);
  } else {
#pragma unroll
    for (int h = 0; h < kCount; ++h)
      x[h] = inside && place + h >= 0 && place + h < length ? value_of(line[place + h]) : edge;
  }
}""",
    "write_line": """\
// The same places written; those outside of the line stay as they are.
template <int kCount, class X, class T>
DEVICE void write_line(const X* x, T* line, int place, int length, bool inside) {
  constexpr int kBytes = kCount * int(sizeof(T));
  alignas(16) T raw[kCount];
#pragma unroll
  for (int h = 0; h < kCount; ++h) set(raw[h], x[h]);
  if (inside && place >= 0 && place + kCount <= length && is_aligned<kBytes>(line + place)) {
    copy_bytes<kBytes>(line + place, raw);
  } else {
#pragma unroll
    for (int h = 0; h < kCount; ++h)
      if (inside && place + h >= 0 && place + h < length) line[place + h] = raw[h];
  }
}""",
    "add_line": """\
template <int kCount, class X, class T>
DEVICE void add_line(const X* x, T* line, int place, int length, bool inside) {
#pragma unroll
  for (int h = 0; h < kCount; ++h)
    if (inside && place + h >= 0 && place + h < length) add_to(line + place + h, x[h]);
}""",
    "Found": """\
// A value and where it is: the larger wins, of equals the first; NaN is larger than every number.
struct Found { float value; int place; };
DEVICE Found better(Found a, Found b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  const bool equal = (a_nan && b_nan) || a.value == b.value;
  const bool larger = equal ? b.place < a.place : (b_nan || (!a_nan && b.value > a.value));
  return larger ? b : a;
}
DEVICE Found swap_with(Found x, int lanes) {
  return {__shfl_xor_sync(0xffffffffu, x.value, lanes),
          __shfl_xor_sync(0xffffffffu, x.place, lanes)};
}""",
    "FoundInt": """\
struct FoundInt { int value; int place; };
DEVICE FoundInt better(FoundInt a, FoundInt b) {
  return b.value > a.value || (b.value == a.value && b.place < a.place) ? b : a;
}
DEVICE FoundInt swap_with(FoundInt x, int lanes) {
  return {__shfl_xor_sync(0xffffffffu, x.value, lanes),
          __shfl_xor_sync(0xffffffffu, x.place, lanes)};
}""",
    "swap_with": """\
DEVICE float swap_with(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
DEVICE int swap_with(int x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }""",
    "Peers": """\
// kPeers threads, kStride apart, that share an axis: kWarp of them in a warp, kGroups such parts.
template <int kPeers, int kStride> struct Peers {
  static constexpr int kFit = kStride < 32 ? 32 / kStride : 1;
  static constexpr int kWarp = kFit < kPeers ? kFit : kPeers;
  static constexpr int kGroups = kPeers / kWarp;
  static DEVICE int mine() { return int(threadIdx.x) / kStride % kPeers; }
  static DEVICE int other() {
    return int(threadIdx.x) % kStride + int(threadIdx.x) / (kStride * kPeers) * kStride;
  }
};""",
    "combine": """\
// x[.] of all peers, put together by f: every one of them gets the same result.
template <int kPeers, int kStride, int kCount, class T, class F>
DEVICE void combine(T* x, void* shared, F f) {
  using Of = Peers<kPeers, kStride>;
#pragma unroll
  for (int s = 0; s < kCount; ++s)
#pragma unroll
    for (int step = 1; step < Of::kWarp; step *= 2)
      x[s] = f(x[s], swap_with(x[s], step * kStride));
  if constexpr (Of::kGroups > 1) {
    T* row = static_cast<T*>(shared) + Of::other() * Of::kGroups * kCount;
    const int part = Of::mine() / Of::kWarp;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kCount; ++s)
      if (Of::mine() % Of::kWarp == 0) row[part * kCount + s] = x[s];
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      x[s] = row[s];
      for (int at = 1; at < Of::kGroups; ++at) x[s] = f(x[s], row[at * kCount + s]);
    }
  }
}""",
    "scan": """\
// x[.] becomes the sum over the peers before this one, total[.] the sum over all.
template <int kPeers, int kStride, int kCount, class T>
DEVICE void scan(T* x, T* total, void* shared) {
  using Of = Peers<kPeers, kStride>;
  const int mine = Of::mine() % Of::kWarp;
  T sum[kCount];
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    sum[s] = x[s];
#pragma unroll
    for (int step = 1; step < Of::kWarp; step *= 2) {
      const T low = __shfl_up_sync(0xffffffffu, sum[s], step * kStride);
      if (mine >= step) sum[s] += low;
    }
    const T before = __shfl_up_sync(0xffffffffu, sum[s], kStride % 32);
    x[s] = Of::kWarp > 1 && mine > 0 ? before : T(0);
    total[s] = sum[s];
    if constexpr (Of::kWarp > 1) {
      const int last = (threadIdx.x % 32) % kStride + (threadIdx.x % 32) / (kStride * Of::kWarp) *
          (kStride * Of::kWarp) + (Of::kWarp - 1) * kStride;
      total[s] = __shfl_sync(0xffffffffu, sum[s], last);
    }
  }
  if constexpr (Of::kGroups > 1) {
    T* row = static_cast<T*>(shared) + Of::other() * Of::kGroups * kCount;
    const int part = Of::mine() / Of::kWarp;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kCount; ++s)
      if (mine == 0) row[part * kCount + s] = total[s];
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      T before = T(0), all = T(0);
      for (int at = 0; at < Of::kGroups; ++at) {
        if (at == part) before = all;
        all += row[at * kCount + s];
      }
      x[s] += before;
      total[s] = all;
    }
  }
}""",
}


def memory_type(kind: DType) -> str:
    """The C++ type of an element in memory; a narrow floating type's is a struct of the prelude."""
    if kind.kind == "bool":
        return "unsigned char"
    return kind.name.capitalize() if kind.name in (*HALVES, *FP8) else kind.kind
