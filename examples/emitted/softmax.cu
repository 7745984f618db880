// softmax: emitted by warploom from a tile program and the schedule "rows":
// 1 blocks of 128 threads for a task, 64 along the columns, 8 columns each.
//
//   program softmax(x: bf16[m, n], y: bf16[m, n])
//     for each m_tile < ((m + 1) // 2)
//       0  x_t: bf16[m=2, n=1024] = load x[(m_tile * 2) +2, 0 +1024] edge 0.0
//       1  x_t_1: fp32[m=2, n=1024] = cast x_t
//       2  max: fp32[m=2] = reduce_max x_t_1 axis n
//       3  const: fp32[] = fill 1.4426950408889634
//       4  mul: fp32[m=2, n=1024] = mul x_t_1, const
//       5  const_1: fp32[] = fill 1.4426950408889634
//       6  mul_1: fp32[m=2] = mul max, const_1
//       7  sub: fp32[m=2, n=1024] = sub mul, mul_1
//       8  exp2: fp32[m=2, n=1024] = exp2 sub
//       9  sum: fp32[m=2] = reduce_sum exp2 axis n
//      10  const_2: fp32[] = fill 1.0
//      11  div: fp32[m=2] = div const_2, sum
//      12  mul_2: fp32[m=2, n=1024] = mul exp2, div
//      13  mul_3: bf16[m=2, n=1024] = cast mul_2
//      14  store mul_3 y[(m_tile * 2) +2, 0 +1024]

#define DEVICE __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

DEVICE float value_of(float x) { return x; }
DEVICE int value_of(int x) { return x; }
DEVICE bool value_of(unsigned char x) { return x != 0; }
DEVICE void set(float& y, float x) { y = x; }
DEVICE void set(int& y, int x) { y = x; }
DEVICE void set(unsigned char& y, bool x) { y = x; }
DEVICE void add_to(float* p, float x) { atomicAdd(p, x); }
DEVICE void add_to(int* p, int x) { atomicAdd(p, x); }

// A run of one row of accumulators, for one of several matmuls side by side.
template <int kCount> DEVICE float (&some(float* first))[kCount] {
  return *reinterpret_cast<float (*)[kCount]>(first);
}

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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

// x as the type holds it.
template <class T> DEVICE float rounded(float x) {
  T y;
  set(y, x);
  return value_of(y);
}

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
}

DEVICE void memory_word(float& y, unsigned bits) { y = __uint_as_float(bits); }
DEVICE void memory_word(int& y, unsigned bits) { y = int(bits); }
DEVICE void memory_byte(unsigned char& y, unsigned bits) { y = (unsigned char)bits; }
template <class T> DEVICE void memory_byte(T& y, unsigned bits) { y.bits = (unsigned char)bits; }
DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
DEVICE unsigned bits_of(int x) { return unsigned(x); }
DEVICE unsigned bits_of(unsigned char x) { return x; }
template <class T> DEVICE unsigned bits_of(T x) { return x.bits; }

// kCount neighbours as they are in memory, in words of registers.
template <int kBytes> struct WordOf { typedef unsigned Type; };
template <> struct WordOf<1> { typedef unsigned char Type; };
template <> struct WordOf<2> { typedef unsigned short Type; };
template <class T, int kCount> struct Line {
  static constexpr int kBytes = kCount * int(sizeof(T));
  typedef typename WordOf<kBytes>::Type Word;
  static constexpr int kIn = int(sizeof(Word) / sizeof(T));
  alignas(kBytes < 16 ? kBytes : 16) Word words[kCount / kIn];
  DEVICE T get(int h) const {
    T x;
    const unsigned bits = unsigned(words[h / kIn]) >> (h % kIn * 8 * int(sizeof(T)));
    if constexpr (sizeof(T) == 4) memory_word(x, bits);
    else if constexpr (sizeof(T) == 2) x.bits = (unsigned short)bits;
    else memory_byte(x, bits);
    return x;
  }
  DEVICE void put(int h, T x) {
    const unsigned bits = bits_of(x), at = h % kIn * 8 * int(sizeof(T));
    words[h / kIn] = Word(h % kIn ? words[h / kIn] | bits << at : bits << at);
  }
};

template <int kCount, class X, class T> DEVICE void values_of(X* x, const Line<T, kCount>& line) {
#pragma unroll
  for (int h = 0; h < kCount; ++h) x[h] = value_of(line.get(h));
}

// Values rounded to a line; two at a time where the type is narrow.
template <int kCount, class X, class T> DEVICE void line_of(Line<T, kCount>& line, const X* x) {
  constexpr int kIn = Line<T, kCount>::kIn;
  if constexpr (kIn > 1 && sizeof(X) == 4) {
#pragma unroll
    for (int h = 0; h < kCount; h += 2) {
      const unsigned pair = pair_of((T*)0, x[h], x[h + 1]), at = h % kIn * 8 * sizeof(T);
      auto& word = line.words[h / kIn];
      word = h % kIn ? word | pair << at : pair;
    }
  } else {
#pragma unroll
    for (int h = 0; h < kCount; ++h) {
      T y;
      set(y, x[h]);
      line.put(h, y);
    }
  }
}

template <class T, int kCount, class X> DEVICE void edge_line(Line<T, kCount>& x, X edge) {
  T y;
  set(y, edge);
#pragma unroll
  for (int h = 0; h < kCount; ++h) x.put(h, y);
}

// Of a load: nobody writes there while the kernel runs.
#define READ_ONLY ".nc"

// One access for each 16 bytes, or one of 8, 4 or 2, which the compiler leaves where it is: it would
// move some of a row's loads behind the first use of others. What is read once passes by L1; what is
// read `kHere` does not begin before a barrier in front of it.
template <int kBytes, bool kOnce, bool kHere, class W>
DEVICE void load_now(W* to, const void* from) {
  if constexpr (kBytes == 2) {
    asm volatile("ld.global" READ_ONLY ".u16 %0, [%1];" : "=h"(to[0]) : "l"(from));
  } else if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int s = 0; s < kBytes / 16; ++s) {
      unsigned* const x = to + 4 * s;
      const char* const at = static_cast<const char*>(from) + 16 * s;
      if constexpr (kHere)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at) : "memory");
      else if constexpr (kOnce)
        asm volatile("ld.global" READ_ONLY ".L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at));
      else
        asm volatile("ld.global" READ_ONLY ".v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at));
    }
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global" READ_ONLY ".v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  } else {
    asm volatile("ld.global" READ_ONLY ".u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
  }
}

// An address that is computed once: accesses then differ by what stands in the instruction.
template <class T> DEVICE const T* pinned(const T* p) {
  const T* q;
  asm volatile("mov.u64 %0, %1;" : "=l"(q) : "l"(p));
  return q;
}

template <bool kOnce, bool kHere = false, class T, int kCount, class X>
DEVICE void read_early(Line<T, kCount>& x, const T* from, int place, int length, bool inside,
                       X edge) {
  edge_line(x, edge);
  if (inside && unsigned(place) < unsigned(length)) {
    if constexpr (kCount * int(sizeof(T)) == 1) copy_bytes<1>(x.words, from);
    else load_now<kCount * int(sizeof(T)), kOnce, kHere>(x.words, from);
  }
}

template <int kCount, class X, class T>
DEVICE void write_whole(const X* x, T* line, int place, int length, bool inside) {
  Line<T, kCount> y;
  line_of(y, x);
  if (inside && unsigned(place) < unsigned(length))
    copy_bytes<kCount * int(sizeof(T))>(line + place, y.words);
}

DEVICE float swap_with(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
DEVICE int swap_with(int x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

// kPeers threads, kStride apart, that share an axis: kWarp of them in a warp, kGroups such parts.
template <int kPeers, int kStride> struct Peers {
  static constexpr int kFit = kStride < 32 ? 32 / kStride : 1;
  static constexpr int kWarp = kFit < kPeers ? kFit : kPeers;
  static constexpr int kGroups = kPeers / kWarp;
  static DEVICE int mine() { return int(threadIdx.x) / kStride % kPeers; }
  static DEVICE int other() {
    return int(threadIdx.x) % kStride + int(threadIdx.x) / (kStride * kPeers) * kStride;
  }
};

// x[.] that the peers of a warp have in common, put together by f over the warps.
template <int kPeers, int kStride, int kCount, class T, class F>
DEVICE void combine_warps(T* x, void* shared, F f) {
  using Of = Peers<kPeers, kStride>;
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
      if constexpr (kStride == 1) {
        // A lane takes the value of a warp: f may be costly.
        x[s] = row[threadIdx.x % Of::kGroups * kCount + s];
#pragma unroll
        for (int step = 1; step < Of::kGroups; step *= 2) x[s] = f(x[s], swap_with(x[s], step));
      } else {
        x[s] = row[s];
        for (int at = 1; at < Of::kGroups; ++at) x[s] = f(x[s], row[at * kCount + s]);
      }
    }
  }
}

// x[.] of all peers, put together by f: every one of them gets the same result.
template <int kPeers, int kStride, int kCount, class T, class F>
DEVICE void combine(T* x, void* shared, F f) {
#pragma unroll
  for (int s = 0; s < kCount; ++s)
#pragma unroll
    for (int step = 1; step < Peers<kPeers, kStride>::kWarp; step *= 2)
      x[s] = f(x[s], swap_with(x[s], step * kStride));
  combine_warps<kPeers, kStride, kCount>(x, shared, f);
}

// The largest of some numbers, and the sum of exp2 of what each is below it; of nothing but -inf it
// is 0.
struct Weighted { float value, sum; };
DEVICE float share_of(float top, float best, float scale) {
  return top == -INFINITY ? 0.0f : exp2_fast((top - best) * scale);
}
DEVICE Weighted joined(Weighted a, Weighted b, float scale) {
  const float best = fmaxf(a.value, b.value);
  return {best, a.sum * share_of(a.value, best, scale) + b.sum * share_of(b.value, best, scale)};
}
DEVICE Weighted swap_with(Weighted x, int lanes) {
  return {__shfl_xor_sync(0xffffffffu, x.value, lanes),
          __shfl_xor_sync(0xffffffffu, x.sum, lanes)};
}
DEVICE void words_of(unsigned* w, Weighted x) {
  w[0] = __float_as_uint(x.value);
  w[1] = __float_as_uint(x.sum);
}
DEVICE void of_words(Weighted& x, const unsigned* w) {
  x.value = __uint_as_float(w[0]);
  x.sum = __uint_as_float(w[1]);
}

DEVICE void words_of(unsigned* w, float x) { w[0] = __float_as_uint(x); }
DEVICE void words_of(unsigned* w, int x) { w[0] = unsigned(x); }
DEVICE void of_words(float& x, const unsigned* w) { x = __uint_as_float(w[0]); }
DEVICE void of_words(int& x, const unsigned* w) { x = int(w[0]); }
template <class T> DEVICE void words_of(unsigned* w, T x) {
  words_of(w, x.value);
  w[1] = unsigned(x.place);
}
template <class T> DEVICE void of_words(T& x, const unsigned* w) {
  of_words(x.value, w);
  x.place = int(w[1]);
}

extern "C" __global__ void __launch_bounds__(128, 8) softmax(
    const Bf16* __restrict__ x_data,
    long long x_stride0,
    Bf16* __restrict__ y_data,
    long long y_stride0,
    int m,
    int n) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread_col = int(threadIdx.x % 64);
  const int thread_row = int(threadIdx.x / 64);
  const int m_tile_count = ((m + 1) / 2);
  const int tasks = m_tile_count;
  const int task = blockIdx.x;
  if (task < tasks) {
    int rest = task;
    const int m_tile_place = rest;
    const int m_tile = m_tile_place;
    float x_t[1][16];
    float x_t_1[1][16];
    float max_[1];
    float const_;
    float mul[1][16];
    float const_1;
    float mul_1[1];
    float sub[1][16];
    float exp2[1][16];
    float sum[1];
    float const_2;
    float div[1];
    float mul_2[1][16];
    float mul_3[1][16];
    float share_of_sum[1];
    Line<Bf16, 8> lines0_at[1][2];
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      const Bf16* const from_lines0_at = pinned(x_data + static_cast<long long>((m_tile * 2) + ((i) * 2 + thread_row)) * x_stride0 + 0 + thread_col * 8);
      #pragma unroll
      for (int s = 0; s < 2; ++s) {
        read_early<false>(lines0_at[i][s], from_lines0_at + s * 512, 0 + (s * 64 + thread_col) * 8, n, static_cast<unsigned>((m_tile * 2) + ((i) * 2 + thread_row)) < static_cast<unsigned>(m), 0.0f);
      }
    }
    // x_t: bf16[m=2, n=1024] = load x[(m_tile * 2) +2, 0 +1024] edge 0.0  program.py:77
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int s = 0; s < 2; ++s) {
        values_of(&x_t[i][s * 8], lines0_at[i][s]);
      }
    }
    // x_t_1: fp32[m=2, n=1024] = cast x_t  program.py:78
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int j = 0; j < 16; ++j) {
        x_t_1[i][j] = x_t[i][j];
      }
    }
    // max: fp32[m=2] = reduce_max x_t_1 axis n  program.py:162
    {
      #pragma unroll
      for (int t = 0; t < 1; ++t) {
        float total = -INFINITY;
        #pragma unroll
        for (int s = 0; s < 16; ++s) {
          total = fmaxf(total, x_t_1[t][s]);
        }
        (max_)[t] = total;
      }
      combine<32, 1, 1>(max_, shared, [](float a, float b) { return fmaxf(a, b); });
      #pragma unroll
      for (int t = 0; t < 1; ++t) {
        (max_)[t] = (max_)[t] == -INFINITY ? 0.0f : (max_)[t];
      }
    }
    // const: fp32[] = fill 1.4426950408889634  program.py:163
    const_ = 1.4426950408889634f;
    // mul: fp32[m=2, n=1024] = mul x_t_1, const  program.py:163
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int j = 0; j < 16; ++j) {
        mul[i][j] = (x_t_1[i][j] * const_);
      }
    }
    // const_1: fp32[] = fill 1.4426950408889634  program.py:163
    const_1 = 1.4426950408889634f;
    // mul_1: fp32[m=2] = mul max, const_1  program.py:163
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      mul_1[i] = (max_[i] * const_1);
    }
    // sub: fp32[m=2, n=1024] = sub mul, mul_1  program.py:163
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int j = 0; j < 16; ++j) {
        sub[i][j] = (mul[i][j] - mul_1[i]);
      }
    }
    // exp2: fp32[m=2, n=1024] = exp2 sub  program.py:163
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int j = 0; j < 16; ++j) {
        exp2[i][j] = exp2_fast(sub[i][j]);
      }
    }
    // sum: fp32[m=2] = reduce_sum exp2 axis n  program.py:164
    {
      #pragma unroll
      for (int t = 0; t < 1; ++t) {
        float total = 0.0f;
        #pragma unroll
        for (int s = 0; s < 16; ++s) {
          total = (total + exp2[t][s]);
        }
        (sum)[t] = total;
      }
      combine<32, 1, 1>(sum, shared, [](float a, float b) { return (a + b); });
      Weighted of_row[1];
      #pragma unroll
      for (int t = 0; t < 1; ++t) {
        share_of_sum[t] = (sum)[t] == 0.0f ? -INFINITY : max_[t];
        of_row[t] = Weighted{share_of_sum[t], (sum)[t]};
      }
      combine_warps<64, 1, 1>(of_row, shared, [](Weighted a, Weighted b) { return joined(a, b, 1.4426950408889634f); });
      #pragma unroll
      for (int t = 0; t < 1; ++t) {
        share_of_sum[t] = share_of(share_of_sum[t], of_row[t].value, 1.4426950408889634f);
        max_[t] = of_row[t].value;
        (sum)[t] = of_row[t].sum;
      }
    }
    // const_2: fp32[] = fill 1.0  program.py:165
    const_2 = 1.0f;
    // div: fp32[m=2] = div const_2, sum  program.py:165
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      div[i] = __fdividef(const_2, sum[i]);
    }
    // mul_2: fp32[m=2, n=1024] = mul exp2, div  program.py:165
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int j = 0; j < 16; ++j) {
        mul_2[i][j] = (exp2[i][j] * (div[i] * share_of_sum[i]));
      }
    }
    // mul_3: bf16[m=2, n=1024] = cast mul_2  program.py:83
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int j = 0; j < 16; ++j) {
        mul_3[i][j] = mul_2[i][j];
      }
    }
    // store mul_3 y[(m_tile * 2) +2, 0 +1024]  program.py:83
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      #pragma unroll
      for (int s = 0; s < 2; ++s) {
        write_whole<8>(&mul_3[i][s * 8], y_data + static_cast<long long>((m_tile * 2) + ((i) * 2 + thread_row)) * y_stride0, 0 + (s * 64 + thread_col) * 8, n, static_cast<unsigned>((m_tile * 2) + ((i) * 2 + thread_row)) < static_cast<unsigned>(m));
      }
    }
  }
}
