// SIMT kernels: lines of memory, exchanges among threads. But for a few copies and barriers plain
// C++, so that tests run the emitted text on a CPU.

//@ Plain
DEVICE float value_of(float x) { return x; }
DEVICE int value_of(int x) { return x; }
DEVICE bool value_of(unsigned char x) { return x != 0; }
DEVICE void set(float& y, float x) { y = x; }
DEVICE void set(int& y, int x) { y = x; }
DEVICE void set(unsigned char& y, bool x) { y = x; }
DEVICE void add_to(float* p, float x) { atomicAdd(p, x); }
DEVICE void add_to(int* p, int x) { atomicAdd(p, x); }

//@ rounded
// x as the type holds it.
template <class T> DEVICE float rounded(float x) {
  T y;
  set(y, x);
  return value_of(y);
}

//@ copy_bytes
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

//@ is_aligned
template <int kBytes> DEVICE bool is_aligned(const void* p) {
  return reinterpret_cast<unsigned long long>(p) % (kBytes < 16 ? kBytes : 16) == 0;
}

//@ bits_of
DEVICE void memory_word(float& y, unsigned bits) { y = __uint_as_float(bits); }
DEVICE void memory_word(int& y, unsigned bits) { y = int(bits); }
DEVICE void memory_byte(unsigned char& y, unsigned bits) { y = (unsigned char)bits; }
template <class T> DEVICE void memory_byte(T& y, unsigned bits) { y.bits = (unsigned char)bits; }
DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
DEVICE unsigned bits_of(int x) { return unsigned(x); }
DEVICE unsigned bits_of(unsigned char x) { return x; }
template <class T> DEVICE unsigned bits_of(T x) { return x.bits; }

//@ Line
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

//@ values_of
template <int kCount, class X, class T> DEVICE void values_of(X* x, const Line<T, kCount>& line) {
#pragma unroll
  for (int h = 0; h < kCount; ++h) x[h] = value_of(line.get(h));
}

//@ values_of_part
// Of a line of pairs the elements that are first in theirs, or second.
template <int kPart, int kCount, class X, class T>
DEVICE void values_of_part(X* x, const Line<T, kCount>& line) {
#pragma unroll
  for (int h = 0; h < kCount / 2; ++h) x[h] = value_of(line.get(2 * h + kPart));
}

//@ line_of
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

//@ lines_fit
// Whether every line is one access: `sizes` are the pitches, lengths and starts, or'ed.
template <class T, int kCount> DEVICE bool lines_fit(const T* data, long long sizes) {
  return (sizes & (kCount - 1)) == 0 && is_aligned<kCount * int(sizeof(T))>(data);
}

//@ edge_line
template <class T, int kCount, class X> DEVICE void edge_line(Line<T, kCount>& x, X edge) {
  T y;
  set(y, edge);
#pragma unroll
  for (int h = 0; h < kCount; ++h) x.put(h, y);
}

//@ read_whole
// Neighbours from `place` on of a line of memory that ends at `length`: all of them, or no one is
// inside and they are `edge`.
template <class T, int kCount, class X>
DEVICE void read_whole(Line<T, kCount>& x, const T* line, int place, int length, bool inside,
                       X edge) {
  edge_line(x, edge);
  if (inside && unsigned(place) < unsigned(length))
    copy_bytes<kCount * int(sizeof(T))>(x.words, line + place);
}

//@ read_fragments
// Neighbours of a row from column `place` on, an even one, of an array that is kept as the registers
// of matmuls hold it: 64 rows after 64 rows, in these 8 columns after 8 columns, of which each
// thread has two in a row and two 8 rows below.
template <class T, int kCount, class X>
DEVICE void read_fragments(Line<T, kCount>& x, const T* data, int row, int place, int columns,
                           bool inside, X edge) {
  edge_line(x, edge);
  const int of_row = row / 64 * 64 * columns + row % 64 / 16 * 128 + row % 8 * 16 + row % 16 / 8 * 2;
#pragma unroll
  for (int h = 0; h < kCount; h += 2) {
    const int col = place + h;
    if (!inside || unsigned(col) >= unsigned(columns)) continue;
    const float2 pair =
        *reinterpret_cast<const float2*>(data + of_row + col / 8 * 512 + col % 8 * 2);
    x.put(h, pair.x);
    x.put(h + 1, pair.y);
  }
}

//@ READ_ONLY
// Of a load: nobody writes there while the kernel runs.
#define READ_ONLY ".nc"

//@ load_now
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

//@ pinned
// An address that is computed once: accesses then differ by what stands in the instruction.
template <class T> DEVICE const T* pinned(const T* p) {
  const T* q;
  asm volatile("mov.u64 %0, %1;" : "=l"(q) : "l"(p));
  return q;
}

//@ read_early
template <bool kOnce, bool kHere = false, class T, int kCount, class X>
DEVICE void read_early(Line<T, kCount>& x, const T* from, int place, int length, bool inside,
                       X edge) {
  edge_line(x, edge);
  if (inside && unsigned(place) < unsigned(length)) {
    if constexpr (kCount * int(sizeof(T)) == 1) copy_bytes<1>(x.words, from);
    else load_now<kCount * int(sizeof(T)), kOnce, kHere>(x.words, from);
  }
}

//@ load_last
// 16 bytes at a time, which L2 gives up last: what a kernel writes leaves it before.
template <int kBytes> DEVICE void load_last(void* to, const void* from) {
  static_assert(kBytes % 16 == 0, "lines of 16 bytes");
#pragma unroll
  for (int s = 0; s < kBytes / 16; ++s) {
    unsigned* const x = static_cast<unsigned*>(to) + 4 * s;
    asm volatile(
        "{ .reg .b64 last; createpolicy.fractional.L2::evict_last.b64 last, 1.0; "
        "ld.global" READ_ONLY ".L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], last; }"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
        : "l"(static_cast<const char*>(from) + 16 * s));
  }
}

//@ read_last
template <class T, int kCount, class X>
DEVICE void read_last(Line<T, kCount>& x, const T* from, int place, int length, bool inside,
                      X edge) {
  edge_line(x, edge);
  if (inside && unsigned(place) < unsigned(length))
    load_last<kCount * int(sizeof(T))>(x.words, from);
}

//@ quad_place
// Where an array in fragments has an element of a vector.
DEVICE int quad_place(int i) {
  return i & ~15 | (i >> 1 & 3) << 2 | (i >> 3 & 1) << 1 | i & 1;
}

//@ read_any
// Some of them may be outside, `step` apart, or the line at no multiple of its size.
template <class T, int kCount, class X>
DEVICE void read_any(Line<T, kCount>& x, const T* line, int place, int length, long long step,
                     bool inside, X edge) {
  T y;
  set(y, edge);
#pragma unroll
  for (int h = 0; h < kCount; ++h)
    x.put(h, inside && place + h >= 0 && place + h < length ? line[(place + h) * step] : y);
}

//@ write_whole
template <int kCount, class X, class T>
DEVICE void write_whole(const X* x, T* line, int place, int length, bool inside) {
  Line<T, kCount> y;
  line_of(y, x);
  if (inside && unsigned(place) < unsigned(length))
    copy_bytes<kCount * int(sizeof(T))>(line + place, y.words);
}

//@ write_pairs
template <int kCount, class X, class T>
DEVICE void write_pairs(const X* a, const X* b, T* line, int place, int length, bool inside) {
  X both[2 * kCount];
#pragma unroll
  for (int h = 0; h < kCount; ++h) both[2 * h] = a[h], both[2 * h + 1] = b[h];
  write_whole<2 * kCount>(both, line, place, length, inside);
}

//@ write_any
// Places outside of the line stay as they are.
template <int kCount, class X, class T>
DEVICE void write_any(const X* x, T* line, int place, int length, long long step, bool inside) {
  Line<T, kCount> y;
  line_of(y, x);
#pragma unroll
  for (int h = 0; h < kCount; ++h)
    if (inside && place + h >= 0 && place + h < length) line[(place + h) * step] = y.get(h);
}

//@ Pieces
// A line in a ring: pieces of at most 16 bytes, each thread's beside those of its neighbours.
template <int kThreads, int kBytes> struct Pieces {
  static constexpr int kPiece = kBytes < 16 ? kBytes : 16;
  static DEVICE int at(int number, int p) {
    return ((number + p) * kThreads + int(threadIdx.x)) * kPiece;
  }
};

//@ copy_some
template <int kBytes> DEVICE void copy_some(void* to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(smem_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 ::"r"(smem_address(to)), "l"(from), "n"(kBytes) : "memory");
}

//@ copies_commit
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

//@ copies_wait
template <int kPending> DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

//@ put_line
template <int kThreads, class T, int kCount>
DEVICE void put_line(unsigned char* stage, int number, const Line<T, kCount>& x) {
  using Of = Pieces<kThreads, kCount * int(sizeof(T))>;
#pragma unroll
  for (int p = 0; p < kCount * int(sizeof(T)) / Of::kPiece; ++p)
    copy_bytes<Of::kPiece>(stage + Of::at(number, p), (const unsigned char*)x.words + p * 16);
}

//@ copy_whole
template <int kThreads, class T, int kCount, class X>
DEVICE void copy_whole(unsigned char* stage, int number, const T* line, int place, int length,
                       bool inside, X edge, Line<T, kCount> x) {
  using Of = Pieces<kThreads, kCount * int(sizeof(T))>;
  const unsigned char* const from = (const unsigned char*)(line + place);
  if (inside && unsigned(place) < unsigned(length)) {
#pragma unroll
    for (int p = 0; p < kCount * int(sizeof(T)) / Of::kPiece; ++p)
      copy_some<Of::kPiece>(stage + Of::at(number, p), from + p * 16);
  } else {
    edge_line(x, edge);
    put_line<kThreads>(stage, number, x);
  }
}

//@ copy_last
// As copy_whole, in pieces of 16 bytes, which L2 gives up last.
template <int kThreads, class T, int kCount, class X>
DEVICE void copy_last(unsigned char* stage, int number, const T* line, int place, int length,
                      bool inside, X edge, Line<T, kCount> x) {
  using Of = Pieces<kThreads, kCount * int(sizeof(T))>;
  static_assert(Of::kPiece == 16, "lines of 16 bytes");
  const unsigned char* const from = (const unsigned char*)(line + place);
  if (inside && unsigned(place) < unsigned(length)) {
#pragma unroll
    for (int p = 0; p < kCount * int(sizeof(T)) / 16; ++p)
      asm volatile(
          "{ .reg .b64 last; createpolicy.fractional.L2::evict_last.b64 last, 1.0; "
          "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, last; }"
          ::"r"(smem_address(stage + Of::at(number, p))), "l"(from + p * 16) : "memory");
  } else {
    edge_line(x, edge);
    put_line<kThreads>(stage, number, x);
  }
}

//@ copy_any
template <int kThreads, class T, int kCount, class X>
DEVICE void copy_any(unsigned char* stage, int number, const T* line, int place, int length,
                     long long step, bool inside, X edge, Line<T, kCount> x) {
  read_any(x, line, place, length, step, inside, edge);
  put_line<kThreads>(stage, number, x);
}

//@ take_words
// Volatile for both compilers: what is taken again is read again and need not stay in registers.
template <int kBytes> DEVICE void take_words(unsigned* x, unsigned at) {
  if constexpr (kBytes == 16)
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
  else if constexpr (kBytes == 8)
    asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
  else
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x[0]) : "r"(at) : "memory");
}

//@ take_line
template <int kThreads, class T, int kCount>
DEVICE void take_line(Line<T, kCount>& x, const unsigned char* stage, int number) {
  using Of = Pieces<kThreads, kCount * int(sizeof(T))>;
#pragma unroll
  for (int p = 0; p < kCount * int(sizeof(T)) / Of::kPiece; ++p)
    take_words<Of::kPiece>(x.words + p * 4, smem_address(stage + Of::at(number, p)));
}

//@ add_line
template <int kCount, class X, class T>
DEVICE void add_line(const X* x, T* line, int place, int length, long long step, bool inside) {
#pragma unroll
  for (int h = 0; h < kCount; ++h)
    if (inside && place + h >= 0 && place + h < length) add_to(line + (place + h) * step, x[h]);
}

//@ Found
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
}

//@ FoundInt
struct FoundInt { int value; int place; };
DEVICE FoundInt better(FoundInt a, FoundInt b) {
  return b.value > a.value || (b.value == a.value && b.place < a.place) ? b : a;
}
DEVICE FoundInt swap_with(FoundInt x, int lanes) {
  return {__shfl_xor_sync(0xffffffffu, x.value, lanes),
          __shfl_xor_sync(0xffffffffu, x.place, lanes)};
}

//@ swap_with
DEVICE float swap_with(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
DEVICE int swap_with(int x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

//@ Peers
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

//@ combine_warps
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

//@ combine
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

//@ Weighted
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

//@ push_word
// A word into the shared memory of a block of the cluster; a barrier there counts its bytes.
DEVICE void push_word(unsigned to, unsigned x, unsigned bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               ::"r"(to), "r"(x), "r"(bar) : "memory");
}

//@ cluster_begin
// The barriers that a fence published are ordered by this arrival.
DEVICE void cluster_begin() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

//@ cluster_wait
DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

//@ words_of
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

//@ combine_blocks
// x[.] that the threads of a warp have in common, put together by f over the warps of all blocks of
// the cluster that have a row. Every warp pushes its values to all blocks once all are there. Where
// turns follow, a second barrier in every block counts the warps that have read those of a turn.
template <int kBlocks, int kPeers, int kOthers, int kCount, bool kMore, class T, class F>
DEVICE void combine_blocks(T* x, unsigned bar, unsigned& turn, F f) {
  constexpr int kWords = int(sizeof(T)) / 4, kWarps = kPeers / 32, kAll = kBlocks * kWarps;
  constexpr int kLanes = kAll < 32 ? kAll : 32;
  const int lane = int(threadIdx.x) % 32;
  const unsigned row = bar + 16 + int(threadIdx.x) / kPeers * kAll * kCount * int(sizeof(T));
  const unsigned own = cluster_rank() * kWarps + int(threadIdx.x) % kPeers / 32;
  if (!kMore || turn == 0) cluster_wait();
  else barrier_wait(bar + 8, turn - 1 & 1);
  if (threadIdx.x == 0) barrier_expect(bar, kAll * kOthers * kCount * int(sizeof(T)));
  if (lane < kBlocks) {
    const unsigned to = in_peer(row + own * kCount * int(sizeof(T)), lane);
    const unsigned there = in_peer(bar, lane);
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      unsigned words[kWords];
      words_of(words, x[s]);
#pragma unroll
      for (int w = 0; w < kWords; ++w) push_word(to + (s * kWords + w) * 4, words[w], there);
    }
  }
  barrier_wait(bar, turn++ & 1);
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
#pragma unroll
    for (int first = 0; first < kAll; first += 32) {
      unsigned words[kWords];
      T y;
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        words[w] = unsigned(
            shared_read(row + (((first + lane % kLanes) * kCount + s) * kWords + w) * 4));
      of_words(y, words);
      x[s] = first ? f(x[s], y) : y;
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) x[s] = f(x[s], swap_with(x[s], step));
  }
  if constexpr (kMore) {
    __syncwarp();
    if (lane < kBlocks) barrier_arrive_at(bar + 8, lane);
  }
}

//@ scan
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
}
