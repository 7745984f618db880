// CUDA enough to run emitted kernels on a CPU: every thread is a fiber, and the next one to run is
// drawn at random whenever one waits, so that a missing barrier gives wrong results. Several blocks
// may run side by side (clusters, dynamic walks); shared memory and registers begin as NaN.
// What is PTX in the kernel's helpers is C++ here; everything else is the emitted text.
#include <ucontext.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // the runner takes it away from the extern arrays
#define __align__(n)
#define __grid_constant__
#define __cluster_dims__(...)
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Extent { unsigned x = 1, y = 1, z = 1; };
static Extent gridDim, blockDim, blockIdx, threadIdx;

namespace machine {
const unsigned WINDOW = 1u << 24;  // between the shared addresses of the blocks of a cluster
const unsigned ROOM = 1u << 18;    // bytes of a block's shared memory
const unsigned START = 1024;       // of them the system takes
const int MOST_BLOCKS = 8;
struct Barrier { int arrived = 0, round = 0; };
alignas(1024) static unsigned char pool[MOST_BLOCKS * ROOM];
static std::vector<ucontext_t> fibers;
static std::vector<char> done, stacks;
static std::vector<Barrier> warps;
static std::vector<unsigned long long> slots;
static std::vector<Barrier> block;
static std::vector<std::array<Barrier, 16>> named;
struct Mbarrier {
  unsigned count = 0, pending = 0, parity = 0;
  long bytes = 0;
  int private_to = 0;  // the thread that made it, + 1, until its fence; hopper_on_cpu.h asks
};
static std::map<unsigned, Mbarrier> mbarriers;
struct Copy { unsigned to; unsigned char bytes[16]; };
struct Batch { int thread; unsigned bar; std::vector<Copy> copies; };
static std::vector<std::vector<Copy>> started;  // by thread: copies that no barrier tracks yet
static std::deque<Batch> in_flight;
static std::vector<std::array<unsigned, 8>> words;
static ucontext_t home;
static int current = 0, threads_each = 1, alive = 0, blocks = 0, cluster = 1;
static unsigned room = 0;          // bytes the launch asks for
static bool inside = false;        // a fiber runs
static const char* fault = nullptr;
static std::mt19937 random_of(1);
static void (*body)() = nullptr;
static std::function<void(bool)> tick;     // what else happens at random times; all of it: true
static std::function<bool()> busy;         // whether more of that is to come
static std::function<void(unsigned, unsigned)> on_write;  // by a thread: address, bytes
static std::function<void(int)> at_exit_of;  // of a thread: what it must not leave behind

// The run ends here; `launch` gives the reason.
static void fail(const char* why) {
  if (!fault) fault = why;
  if (inside) { inside = false; swapcontext(&fibers[current], &home); }
}
static int block_of() { return current / threads_each; }
// Kernels see a block's number in its cluster in the high bits of an address; in here it is the
// number among all blocks that run.
static unsigned global_of(unsigned address) {
  return address + block_of() / cluster * cluster * WINDOW;
}
static unsigned char* at(unsigned address, unsigned bytes) {
  const unsigned number = address / WINDOW, place = address % WINDOW;
  if (number >= unsigned(blocks) || place < START || place + bytes > START + room) {
    fail("address outside of the block's shared memory");
    return pool;
  }
  return pool + number * ROOM + place;
}
static unsigned char* own_shared() { return pool + block_of() * ROOM + START; }
// The fiber goes on when `ready(what, value)` holds.
struct Until { bool (*ready)(const void*, long) = nullptr; const void* what; long value; };
static std::vector<Until> until;
static void yield_until(bool (*ready)(const void*, long), const void* what, long value) {
  if (ready(what, value)) return;
  until[current] = {ready, what, value};
  swapcontext(&fibers[current], &home);
}
static void wait(Barrier& at, int count) {
  const int round = at.round;
  if (++at.arrived >= count) { at.arrived = 0; ++at.round; return; }
  yield_until([](const void* b, long was) { return ((const Barrier*)b)->round != was; }, &at, round);
}
static void complete(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.pending = b.count;
  b.parity ^= 1;
}
static Mbarrier& barrier_at(unsigned bar) {
  static Mbarrier nothing;
  const auto found = mbarriers.find(bar);
  if (found == mbarriers.end()) { fail("no barrier at this address"); return nothing; }
  return found->second;
}
static void arrive(unsigned bar) {
  Mbarrier& b = barrier_at(bar);
  if (b.pending == 0) return fail("too many arrivals");
  --b.pending;
  complete(b);
}
// Copies land when they like, only in order for each thread.
static void land(bool all) {
  while (!in_flight.empty() && (all || random_of() % 3 == 0)) {
    size_t pick = all ? 0 : random_of() % in_flight.size();
    for (size_t at = 0; at < pick; ++at)
      if (in_flight[at].thread == in_flight[pick].thread) { pick = at; break; }
    for (const Copy& c : in_flight[pick].copies) memcpy(at(c.to, 16), c.bytes, 16);
    const unsigned bar = in_flight[pick].bar;
    in_flight.erase(in_flight.begin() + pick);
    arrive(bar);
  }
}
static void start() {
  body();
  if (at_exit_of) at_exit_of(current);
  done[current] = 1;
  --alive;
  inside = false;
  swapcontext(&fibers[current], &home);
}
static void run_blocks(int first, int count, int threads) {
  const size_t size = 128 << 10;
  const int all = count * threads;
  threads_each = threads;
  blocks = count;
  fibers.assign(all, {});
  done.assign(all, 0);
  stacks.assign(size * all, char(0xff));
  memset(pool, 0xff, size_t(count) * ROOM);
  warps.assign(all / 32, {});
  slots.assign(all, 0);
  words.assign(all, {});
  started.assign(all, {});
  until.assign(all, {});
  in_flight.clear();
  mbarriers.clear();
  block.assign(count, {});
  named.assign(count, {});
  alive = all;
  for (int f = 0; f < all; ++f) {
    getcontext(&fibers[f]);
    fibers[f].uc_stack.ss_sp = stacks.data() + size * f;
    fibers[f].uc_stack.ss_size = size;
    makecontext(&fibers[f], start, 0);
  }
  std::vector<int> order(all);
  std::vector<char> late(all / 32);
  for (int f = 0; f < all; ++f) order[f] = f;
  for (int turn = 0, stuck = 0; alive && !fault; ++turn) {
    land(false);
    if (tick) tick(false);
    if (turn % 8 == 0) std::shuffle(order.begin(), order.end(), random_of);
    // Warps fall behind now and then.
    if (turn % 16 == 0) for (char& one : late) one = random_of() % 4 == 0;
    bool moved = !in_flight.empty() || (busy && busy());
    for (int f : order) {
      if (done[f] || late[f / 32]) continue;
      if (until[f].ready && !until[f].ready(until[f].what, until[f].value)) continue;
      until[f].ready = nullptr;
      current = f;
      threadIdx.x = f % threads;
      blockIdx.x = first + f / threads;
      inside = true;
      swapcontext(&home, &fibers[f]);
      inside = false;
      moved = true;
      if (fault) return;
    }
    stuck = moved ? 0 : stuck + 1;
    if (stuck > 500) fault = "deadlock";  // no warp is late that long
  }
  if (tick && !fault) tick(true);
}
}  // namespace machine

static void __syncthreads() {
  machine::wait(machine::block[machine::block_of()], blockDim.x);
}
static void warp_wait() { machine::wait(machine::warps[machine::current / 32], 32); }
static void __syncwarp() { warp_wait(); }
template <class T> static T exchange(T x, int from) {
  const int me = machine::current, first = me / 32 * 32;
  unsigned long long bits = 0;
  memcpy(&bits, &x, sizeof(T));
  machine::slots[me] = bits;
  warp_wait();
  T y;
  memcpy(&y, &machine::slots[first + (from & 31)], sizeof(T));
  warp_wait();
  return y;
}
static int lane_of() { return machine::current % 32; }
static void store_16_bytes(void* to, const unsigned (&w)[4]) {
  if (uintptr_t(to) % 16) machine::fail("misaligned store");
  std::memcpy(to, w, 16);
}
template <class T> static T __shfl_xor_sync(unsigned, T x, int mask) {
  return exchange(x, lane_of() ^ mask);
}
template <class T> static T __shfl_sync(unsigned, T x, int lane) { return exchange(x, lane); }
template <class T> static T __shfl_up_sync(unsigned, T x, int by) {
  const int lane = lane_of();
  T y = exchange(x, lane >= by ? lane - by : lane);
  return y;
}

static float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
static float __int_as_float(int v) { float f; memcpy(&f, &v, 4); return f; }
static int __float2int_rz(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x <= -2147483648.0f ? -2147483647 - 1 : int(x);
}
static float __int2float_rn(int x) { return float(x); }
static float __fdividef(float a, float b) { return a / b; }
static float __fsqrt_rn(float x) { return sqrtf(x); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float exp2_fast(float x) { return exp2f(x); }
static float log2_fast(float x) { return log2f(x); }
static float tanh_fast(float x) { return tanhf(x); }
static float rcp_fast(float x) { return 1.0f / x; }
template <class T> static void atomicAdd(T* p, T x) { *p += x; }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
using std::abs;

// One rounding, to nearest even, to a type of `mantissa` stored bits; clamped when `saturates`.
static float narrow(float x, int mantissa, int least, float largest, bool saturates) {
  if (x != x) return x;
  if (std::isinf(x)) return saturates ? copysignf(largest, x) : x;
  int exponent;
  frexp(double(x), &exponent);
  const double step = ldexp(1.0, std::max(exponent - 1, least) - mantissa);
  double y = nearbyint(x / step) * step;
  if (fabs(y) > largest) y = saturates ? copysign(double(largest), x) : copysign(INFINITY, x);
  return float(copysign(y, double(x)));
}
struct Bf16 { unsigned short bits; };
static float value_of(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
static void set(Bf16& y, float x) {
  unsigned v;
  float r = narrow(x, 7, -126, 3.3895313892515355e38f, false);
  memcpy(&v, &r, 4);
  y.bits = v >> 16;
}
struct Fp16 { unsigned short bits; };
static float value_of(Fp16 x) { _Float16 h; memcpy(&h, &x.bits, 2); return float(h); }
static void set(Fp16& y, float x) { _Float16 h = _Float16(x); memcpy(&y.bits, &h, 2); }
template <int kMantissa, int kBias> static float small_value(unsigned char bits) {
  const int exponent = (bits & 127) >> kMantissa, fraction = bits & ((1 << kMantissa) - 1);
  const bool e5m2 = kMantissa == 2;
  float v = exponent ? ldexpf(1 + fraction / float(1 << kMantissa), exponent - kBias)
                     : ldexpf(fraction / float(1 << kMantissa), 1 - kBias);
  if (e5m2 && exponent == 31) v = fraction ? NAN : INFINITY;
  if (!e5m2 && (bits & 127) == 127) v = NAN;
  return bits & 128 ? -v : v;
}
template <int kMantissa, int kBias> static unsigned char small_bits(float x, float largest) {
  const unsigned char sign = std::signbit(x) ? 128 : 0;
  if (x != x) return 127;
  const float want = fabsf(narrow(x, kMantissa, 1 - kBias, largest, true));
  for (int bits = 0; bits < 128; ++bits)
    if (small_value<kMantissa, kBias>(bits) == want) return sign | bits;
  abort();
}
struct E4m3 { unsigned char bits; };
static float value_of(E4m3 x) { return small_value<3, 7>(x.bits); }
static void set(E4m3& y, float x) { y.bits = small_bits<3, 7>(x, 448.0f); }
struct E5m2 { unsigned char bits; };
static float value_of(E5m2 x) { return small_value<2, 15>(x.bits); }
static void set(E5m2& y, float x) { y.bits = small_bits<2, 15>(x, 57344.0f); }
template <class T> static void add_to(T* p, float x) { set(*p, value_of(*p) + x); }

// ---- helpers of the warp-specialised kernels (codegen/cuda/prelude.py, prelude_sm80.py)
template <class T> static T __ldg(const T* p) { return *p; }
static size_t __cvta_generic_to_shared(const void* p) {
  const size_t at = (const unsigned char*)p - machine::pool;
  return at / machine::ROOM % machine::cluster * machine::WINDOW + at % machine::ROOM;
}
template <int kId, int kThreads> static void named_sync() {
  machine::wait(machine::named[machine::block_of()][kId], kThreads);
}
template <int kId, int kThreads> static void named_arrive() {
  machine::Barrier& at = machine::named[machine::block_of()][kId];
  if (++at.arrived >= kThreads) { at.arrived = 0; ++at.round; }
}
static void barrier_init(unsigned bar, unsigned count) {
  bar = machine::global_of(bar);
  machine::at(bar, 8);
  machine::mbarriers[bar] = {count, count, 0, 0, machine::current + 1};
}
static void barrier_arrive(unsigned bar) { machine::arrive(machine::global_of(bar)); }
static void barrier_wait(unsigned bar, unsigned parity) {
  bar = machine::global_of(bar);
  machine::yield_until(
      [](const void* b, long p) { return ((const machine::Mbarrier*)b)->parity != unsigned(p); },
      &machine::barrier_at(bar), parity & 1);
}
static void copy_async(unsigned to, const void* from, unsigned count) {
  machine::Copy copy{machine::global_of(to), {}};
  if (to % 16 || (count && (uintptr_t)from % 16)) machine::fail("misaligned copy");
  memcpy(copy.bytes, from, count);
  machine::started[machine::current].push_back(copy);
}
static void copies_arrive(unsigned bar) {
  const int me = machine::current;
  machine::in_flight.push_back({me, machine::global_of(bar), machine::started[me]});
  machine::started[me].clear();
}
static void written(unsigned at, const void* from, unsigned bytes) {
  if (at % bytes) machine::fail("misaligned write to shared memory");
  at = machine::global_of(at);
  memcpy(machine::at(at, bytes), from, bytes);
  if (machine::on_write) machine::on_write(at, bytes);
}
static void shared_write(unsigned at, int x) { written(at, &x, 4); }
static unsigned short half_at(unsigned at) {
  unsigned short x;
  memcpy(&x, machine::at(machine::global_of(at), 2), 2);
  return x;
}
static void matrices(unsigned (&x)[4], unsigned at, bool transposed) {
  const int me = machine::current, first = me / 32 * 32, lane = me % 32;
  machine::slots[me] = at;
  if (at % 16) machine::fail("misaligned matrix");
  warp_wait();
  for (int q = 0; q < 4; ++q) {
    unsigned short low, high;
    if (transposed) {
      low = half_at(unsigned(machine::slots[first + q * 8 + lane % 4 * 2]) + lane / 4 * 2);
      high = half_at(unsigned(machine::slots[first + q * 8 + lane % 4 * 2 + 1]) + lane / 4 * 2);
    } else {
      const unsigned row = unsigned(machine::slots[first + q * 8 + lane / 4]) + lane % 4 * 4;
      low = half_at(row);
      high = half_at(row + 2);
    }
    x[q] = low | unsigned(high) << 16;
  }
  warp_wait();
}
static void load_matrix(unsigned (&x)[4], unsigned at) { matrices(x, at, false); }
static void load_matrix_transposed(unsigned (&x)[4], unsigned at) { matrices(x, at, true); }
template <class T> static void multiply(float* d, const unsigned* a, const unsigned* b) {
  const int me = machine::current, first = me / 32 * 32, lane = me % 32;
  machine::words[me] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  warp_wait();
  auto half = [&](int from, int word, int k) {
    T x;
    x.bits = (unsigned short)(machine::words[first + from][word] >> (k % 2 * 16));
    return double(value_of(x));
  };
  for (int c = 0; c < 4; ++c) {
    const int row = lane / 4 + c / 2 * 8, col = lane % 4 * 2 + c % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k)
      sum += half(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) *
             half(col * 4 + k % 8 / 2, 4 + k / 8, k);
    d[c] += float(sum);
  }
  warp_wait();
}
static void mma_bf16(float* d, const unsigned* a, const unsigned* b) { multiply<Bf16>(d, a, b); }
static void mma_fp16(float* d, const unsigned* a, const unsigned* b) { multiply<Fp16>(d, a, b); }
template <class T> static unsigned pack(float low, float high) {
  T x, y;
  set(x, low);
  set(y, high);
  return x.bits | unsigned(y.bits) << 16;
}
static unsigned pack_bf16(float low, float high) { return pack<Bf16>(low, high); }
static unsigned pack_fp16(float low, float high) { return pack<Fp16>(low, high); }
static float half_fp16(unsigned x, int high) {
  return value_of(Fp16{(unsigned short)(high ? x >> 16 : x)});
}
static float read_fp16(const unsigned short* p) { return value_of(Fp16{*p}); }
static void write_bf16(unsigned short* p, float x) { Bf16 y; set(y, x); *p = y.bits; }
static void write_fp16(unsigned short* p, float x) { Fp16 y; set(y, x); *p = y.bits; }

template <class T> static T argument(void** p, size_t i) { return *(T*)p[i]; }
template <class... A, size_t... I>
static void call(void (*f)(A...), void** p, std::index_sequence<I...>) { f(argument<A>(p, I)...); }
