// CUDA C++ as far as translated kernels need it: words, types, functions of the device.
#pragma once
#include "machine.h"
#include "numbers.h"

#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#define __cluster_dims__(...)
#define __constant__
#define __restrict__ __restrict
#define __CUDA_ARCH__ 900

struct dim3 : Extent {
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) { x = a, y = b, z = c; }
  dim3(Extent e) : Extent(e) {}
};
#define VECTOR(word, name) \
  struct name##2 { word x, y; }; \
  struct alignas(4 * sizeof(word)) name##4 { word x, y, z, w; };
VECTOR(unsigned, uint)
VECTOR(int, int)
VECTOR(float, float)
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };

// ---- 16-bit floats
#define HALF(name, from, to)                                     \
  struct name {                                                  \
    uint16_t bits;                                               \
    name() = default;                                            \
    name(float x) : bits(numbers::to(x)) {}                      \
    operator float() const { return numbers::from(bits); }       \
  };
HALF(__nv_bfloat16, from_bf16, to_bf16)
HALF(__half, from_fp16, to_fp16)
typedef __nv_bfloat16 nv_bfloat16;
typedef __half half;
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half2 { __half x, y; };
typedef __nv_bfloat162 nv_bfloat162;
typedef __half2 half2;
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {x.x, x.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }

// ---- functions
inline float __uint_as_float(unsigned v) { return numbers::of_bits(v); }
inline unsigned __float_as_uint(float v) { return numbers::bits_of(v); }
inline float __int_as_float(int v) { return numbers::of_bits(unsigned(v)); }
inline int __float_as_int(float v) { return int(numbers::bits_of(v)); }
inline int __float2int_rz(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x <= -2147483648.0f ? -2147483647 - 1 : int(x);
}
inline float __int2float_rn(int x) { return float(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned chosen) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> 8 * (chosen >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
using std::abs;
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T atomicAdd(T* p, T x) { const T y = *p; *p = T(y + x); return y; }
inline size_t __cvta_generic_to_shared(const void* p) { return machine::shared_address(p); }
#define __syncthreads machine::sync_block
inline void __syncwarp(unsigned mask = ~0u) { machine::sync_warp(mask); }
#define __trap() machine::fail("trap")
inline void __nanosleep(unsigned) {}
inline long long clock64() { return (long long)machine::now(); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- exchanges among the lanes of a warp
namespace ptx {
template <class To, class From> To as(const From& x) {
  if constexpr (std::is_same_v<To, From>) return x;
  else if constexpr (std::is_pointer_v<From>) return To(reinterpret_cast<uintptr_t>(x));
  else if constexpr (std::is_pointer_v<To>) return reinterpret_cast<To>(uintptr_t(x));
  else if constexpr (std::is_integral_v<To> && (std::is_integral_v<From> ||
      std::is_enum_v<From>)) return To(x);
  else {
    static_assert(sizeof(To) <= 8 && sizeof(From) <= 8, "an operand of at most 64 bits");
    To y{};
    memcpy(&y, &x, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
    return y;
  }
}
template <class T, class From> void put(T& x, const From& value) { x = as<T>(value); }
inline int lane() { return int(threadIdx.x + blockDim.x * (threadIdx.y +
    blockDim.y * threadIdx.z)) % 32; }
inline int warp() { return int(threadIdx.x + blockDim.x * (threadIdx.y +
    blockDim.y * threadIdx.z)) / 32; }
inline int block_in_cluster() { return int(machine::rank_in_cluster()); }
// Packed conversions: the second operand goes to the lower half.
inline uint32_t pair(uint16_t high, uint16_t low) { return uint32_t(high) << 16 | low; }
template <class T> void load(T* to, uint64_t from, int count) {
  machine::watch(reinterpret_cast<void*>(from), sizeof(T) * count, false);
  memcpy(to, reinterpret_cast<void*>(from), sizeof(T) * count);
}
template <class T> void store(uint64_t to, const T* from, int count) {
  if (to % (sizeof(T) * count)) machine::fail("a misaligned st.global");
  machine::watch(reinterpret_cast<void*>(to), sizeof(T) * count, true);
  memcpy(reinterpret_cast<void*>(to), from, sizeof(T) * count);
}
inline uint32_t count_up(uint64_t at, uint32_t last) {
  uint32_t x;
  load(&x, at, 1);
  const uint32_t next = x >= last ? 0 : x + 1;
  store(at, &next, 1);
  return x;
}
template <class T> T add_up(uint64_t at, T more) {
  T x;
  load(&x, at, 1);
  const T next = T(x + more);
  store(at, &next, 1);
  return x;
}
}  // namespace ptx
template <class T> T shuffled(unsigned mask, T x, int from) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof(T));
  bits = machine::exchange(mask, bits, from);
  memcpy(&x, &bits, sizeof(T));
  return x;
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int bits,
    int = 32) { return shuffled(mask, x, ptx::lane() ^ bits); }
template <class T> T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  return shuffled(mask, x, ptx::lane() / width * width + lane % width);
}
template <class T> T __shfl_up_sync(unsigned mask, T x, int by, int = 32) {
  return shuffled(mask, x, ptx::lane() >= by ? ptx::lane() - by : ptx::lane());
}
template <class T> T __shfl_down_sync(unsigned mask, T x, int by, int = 32) {
  return shuffled(mask, x, ptx::lane() + by < 32 ? ptx::lane() + by : ptx::lane());
}
inline int __all_sync(unsigned mask, int holds) { return machine::ballot(mask, holds) == mask; }
inline int __any_sync(unsigned mask, int holds) { return machine::ballot(mask, holds) != 0; }
inline unsigned __ballot_sync(unsigned mask, int holds) { return machine::ballot(mask, holds); }

// A kernel's launch with its parameters given by address.
template <class T> T parameter_at(void** p, size_t i) { return *(T*)p[i]; }
template <class... A, size_t... I>
const char* launch_indexed(void (*f)(A...), void** p, machine::Launch how,
    std::index_sequence<I...>) {
  const std::function<void()> body = [&] { f(parameter_at<A>(p, I)...); };
  return machine::launch(body, how);
}
template <class... A> const char* launch_with(void (*f)(A...), void** p, machine::Launch how) {
  return launch_indexed(f, p, how, std::index_sequence_for<A...>{});
}
