// What kernels for sm_90a have beyond cuda_on_cpu.h: TMA, mbarriers that count bytes, wgmma, store
// groups, clusters. Copies, matmuls and stores take effect at random times of their own, matmuls
// of a warp group in order; registers and shared memory are read and written at that time and no
// earlier, so that a missing wait, a slot given back early or a register touched too soon gives
// wrong results. Faults: generic writes that no fence has made visible to the other proxy, barriers
// that copies or other blocks use before the fence of their initialisation, matmuls without a fence
// since the threads had the registers to themselves. Registers that no thread gave back are waited
// for until the run ends.
// Layouts: PTX ISA 9.x, sections 9.7.15.5 (wgmma), 5.5 (tensors); TMA: `cuTensorMapEncodeTiled`.

namespace machine {
struct TensorView {
  unsigned char* address;
  int rank, element, width, kind;  // bytes of an element, of a swizzled row; kind: see `value_in`
  int dims[5], box[5];             // innermost first
  long long pitches[5];            // bytes, of dimensions 1 and up
};
enum Kind { kBf16, kFp16, kE4m3, kE5m2, kFp32, kInt32 };

static unsigned swizzled(unsigned at, int width) {
  const unsigned mask = width == 128 ? 0x70 : width == 64 ? 0x30 : width == 32 ? 0x10 : 0;
  return at ^ (at >> 3 & mask);
}

struct Product {
  int block = 0, columns = 0, kind = 0, joined = 0;
  bool from_registers = false, accumulate = false, left_across = false, right_across = false;
  unsigned long long left = 0, right = 0;
  float* sums[128];
  const unsigned* rows[128];
};
struct Group { std::deque<Product> queue; long first = 0; };  // first: number of queue.front()
struct Thread { long issued = 0; std::vector<long> commits; bool fenced = false; };
struct Push { unsigned to, bar; unsigned char bytes[16]; };
struct Box { TensorView map; std::array<int, 5> at; unsigned place, bar, mask; int row, block; };
struct Store { TensorView map; std::array<int, 5> at; unsigned place; bool add, read; };
static std::vector<Group> groups;
static std::vector<Thread> matmuls;
static std::vector<Box> boxes;
static std::vector<Push> pushes;
using Bulk = std::vector<Store>;
static std::vector<std::deque<Bulk>> stores;  // by thread and group of stores
static std::vector<unsigned short> unfenced;  // by byte of shared memory: the thread that wrote, + 1
static std::vector<std::vector<unsigned>> written_by;
static Barrier meeting[MOST_BLOCKS];  // of the blocks of a cluster
static std::vector<long> spare;        // by block: registers that its threads gave back
// Of a thread when a block begins: an equal share of 64 Ki, in eights, of which it can name 255.
static int registers_at_entry() { return std::min(65536 / threads_each, 255) / 8 * 8; }
static int pace[4];  // of copies, matmuls, stores, pushes: 1 in so many turns takes effect

static void proxy_reads(unsigned at) {
  if (unfenced[at / WINDOW * ROOM + at % WINDOW]) fail("read by the other proxy without a fence");
}
// A barrier as copies and other blocks see it.
static Mbarrier& published(unsigned bar) {
  Mbarrier& b = barrier_at(bar);
  if (b.private_to) fail("a barrier used by a copy or another block before the fence of its making");
  return b;
}
static void receive(unsigned bar, unsigned bytes) {
  Mbarrier& b = published(bar);
  b.bytes -= bytes;
  complete(b);
}
static unsigned moved(unsigned address, unsigned block) { return block * WINDOW + address % WINDOW; }
static unsigned peer(unsigned address, unsigned rank) {
  if (rank >= unsigned(cluster)) fail("no such block in the cluster");
  return rank * WINDOW + address % WINDOW;
}

static int outer_rows(const TensorView& map) {
  int rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
  return rows;
}
// The global address of element `col` of row `row` of a box, or null outside of the tensor.
static unsigned char* element_of(const TensorView& map, const std::array<int, 5>& from, int row,
                                 int col) {
  int rest = row;
  const int x = from[0] + col;
  bool in = x >= 0 && x < map.dims[0];
  unsigned char* p = map.address + (long long)x * map.element;
  for (int d = 1; d < map.rank; ++d) {
    const int y = from[d] + rest % map.box[d];
    rest /= map.box[d];
    in = in && y >= 0 && y < map.dims[d];
    p += y * map.pitches[d];
  }
  return in ? p : nullptr;
}
// Half of a box lands.
static bool box_lands(Box& one) {
  const TensorView& map = one.map;
  const int rows = outer_rows(map), line = map.box[0] * map.element;
  const int last = one.row == 0 && rows > 1 ? rows / 2 : rows;
  for (int block = 0; block < 32; ++block) {
    if (!(one.mask >> block & 1)) continue;
    const unsigned to = moved(one.place, one.block / cluster * cluster + block);
    for (int row = one.row; row < last; ++row)
      for (int col = 0; col < map.box[0]; ++col) {
        const unsigned char* from = element_of(map, one.at, row, col);
        const unsigned place = swizzled(to + row * line + col * map.element, map.width);
        unsigned char* into = at(place, map.element);
        if (fault) return true;
        if (from) memcpy(into, from, map.element);
        else memset(into, 0, map.element);
        for (int i = 0; i < map.element; ++i)
          unfenced[place / WINDOW * ROOM + place % WINDOW + i] = 0;
      }
    receive(moved(one.bar, one.block / cluster * cluster + block), (last - one.row) * line);
  }
  one.row = last;
  return last == rows;
}
template <class T> static float as_float(const unsigned char* p) {
  T x;
  memcpy(&x, p, sizeof(T));
  return value_of(x);
}
template <class T> static void add_in(unsigned char* p, const unsigned char* q) {
  T x;
  memcpy(&x, p, sizeof(T));
  set(x, value_of(x) + as_float<T>(q));
  memcpy(p, &x, sizeof(T));
}
static void store_reads(Store& one) {
  const TensorView& map = one.map;
  const int rows = outer_rows(map), line = map.box[0] * map.element;
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < map.box[0]; ++col) {
      unsigned char* to = element_of(map, one.at, row, col);
      if (!to) continue;
      const unsigned place = swizzled(one.place + row * line + col * map.element, map.width);
      const unsigned char* from = at(place, map.element);
      proxy_reads(place);
      if (fault) return;
      if (!one.add) memcpy(to, from, map.element);
      else if (map.kind == kBf16) add_in<Bf16>(to, from);
      else if (map.kind == kFp16) add_in<Fp16>(to, from);
      else if (map.kind == kFp32) *(float*)to += *(const float*)from;
      else if (map.kind == kInt32) *(int*)to += *(const int*)from;
      else return fail("no such addition");
    }
  one.read = true;
}

// The address of element (mn, k) of an operand, by its descriptor; `layout.hardware_address`.
static unsigned operand_at(int block, unsigned long long words, bool across, int mn, int k,
                           int element) {
  const unsigned low = unsigned(words), high = unsigned(words >> 32);
  const unsigned base = (low & 0x3fff) << 4, lbo = (low >> 16 & 0x3fff) << 4;
  const unsigned sbo = (high & 0x3fff) << 4;
  const int code = high >> 30, width = code == 1 ? 128 : code == 2 ? 64 : 32;
  if (!code) fail("descriptor without a swizzle");
  const int row = width / element;
  const unsigned linear =
      across ? mn / row * lbo + k / 8 * sbo + k % 8 * width + mn % row * element
             : mn / 8 * sbo + mn % 8 * width + k * element;
  return swizzled(base + linear, width) + block * WINDOW;
}
static float value_in(const unsigned char* p, int kind) {
  return kind == kBf16 ? as_float<Bf16>(p) : kind == kFp16 ? as_float<Fp16>(p)
       : kind == kE4m3 ? as_float<E4m3>(p) : as_float<E5m2>(p);
}
__attribute__((optimize("O2"))) static void multiply_all(Product& one) {
  const int element = one.kind <= kFp16 ? 2 : 1, depth = 32 / element;
  static float left[64][32], right[256][32];
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < depth; ++k) {
      if (one.from_registers) {
        const int per = 4 / element, half = depth / 2;  // elements of a word, of half of the depth
        const int thread = row / 16 * 32 + row % 8 * 4 + k % half / per;
        const unsigned* words = one.rows[thread] + row % 16 / 8 + k / half * 2;
        left[row][k] = value_in((const unsigned char*)words + k % per * element, one.kind);
      } else {
        const unsigned from = operand_at(one.block, one.left, one.left_across, row, k, element);
        proxy_reads(from);
        left[row][k] = value_in(at(from, element), one.kind);
      }
    }
  for (int col = 0; col < one.columns; ++col)
    for (int k = 0; k < depth; ++k) {
      const unsigned from = operand_at(one.block, one.right, one.right_across, col, k, element);
      proxy_reads(from);
      right[col][k] = value_in(at(from, element), one.kind);
    }
  if (fault) return;
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < one.columns / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      const int col = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double sum = 0;
      for (int k = 0; k < depth; ++k) sum += double(left[row][k]) * right[col][k];
      float& into = one.sums[thread][i];
      into = (one.accumulate ? into : 0.0f) + float(sum);
    }
}
static bool chance(int which) { return random_of() % pace[which] == 0; }
// One of each kind takes effect now and then.
static void events(bool all) {
  for (int tries = 0; !boxes.empty() && !fault && (all || (tries < 4 && chance(0))); ++tries) {
    const size_t pick = random_of() % boxes.size();
    if (box_lands(boxes[pick])) boxes.erase(boxes.begin() + pick);
  }
  for (Group& one : groups)
    while (!fault && !one.queue.empty() && one.queue.front().joined == 128 && (all || chance(1))) {
      multiply_all(one.queue.front());
      one.queue.pop_front();
      ++one.first;
    }
  for (auto& mine : stores)
    for (auto& group : mine)
      for (Store& one : group)
        if (!one.read && (all || chance(2)) && !fault) store_reads(one);
  size_t some = pushes.empty() ? 0 : all ? pushes.size() : chance(3) ? random_of() % pushes.size() + 1 : 0;
  for (; some && !fault; --some) {
    std::swap(pushes[random_of() % pushes.size()], pushes.back());
    const Push one = pushes.back();
    pushes.pop_back();
    memcpy(at(one.to, 16), one.bytes, 16);
    receive(one.bar, 16);
  }
}
static bool more_to_come() {
  if (!boxes.empty() || !pushes.empty()) return true;
  for (const Group& one : groups)
    if (!one.queue.empty() && one.queue.front().joined == 128) return true;
  for (const auto& mine : stores)
    for (const Bulk& group : mine)
      for (const Store& one : group)
        if (!one.read) return true;
  return false;
}
static bool all_read(const Bulk& group) {
  for (const Store& one : group)
    if (!one.read) return false;
  return true;
}
static void leaves(int thread) {
  for (const auto& group : stores[thread])
    if (!all_read(group)) return fail("a thread left while a store reads shared memory");
  if (groups[thread / 128].first < matmuls[thread].issued) return fail("left under a matmul");
  for (int f = block_of() * threads_each; f < (block_of() + 1) * threads_each; ++f)
    if (!done[f] && f != thread) return;
  for (const Box& one : boxes)
    for (int b = 0; b < cluster; ++b)
      if (one.mask >> b & 1 && one.block / cluster * cluster + b == block_of())
        return fail("a block ended before a copy into it");
}
static void hopper(int blocks, int threads, int in_cluster) {
  const int all = blocks * threads;
  cluster = in_cluster;
  groups.assign(all / 128 + 1, {});
  for (Barrier& one : meeting) one = {};
  matmuls.assign(all, {});
  stores.assign(all, {});
  spare.assign(blocks, 0);
  written_by.assign(all, {});
  unfenced.assign(size_t(blocks) * ROOM, 0);
  boxes.clear();
  pushes.clear();
  const int paces[] = {1, 2, 6, 25, 100};
  for (int& one : pace) one = paces[random_of() % 5];
  tick = events;
  busy = more_to_come;
  at_exit_of = leaves;
  on_write = [](unsigned at, unsigned bytes) {
    for (unsigned i = 0; i < bytes; ++i) {
      const unsigned place = at / WINDOW * ROOM + at % WINDOW + i;
      unfenced[place] = current + 1;
      written_by[current].push_back(place);
    }
  };
}
}  // namespace machine

// ---- mbarriers, clusters
static void barrier_expect(unsigned bar, unsigned bytes) {
  bar = machine::global_of(bar);
  machine::barrier_at(bar).bytes += bytes;
  machine::arrive(bar);
}
static unsigned in_peer(unsigned address, unsigned rank) { return machine::peer(address, rank); }
static void barrier_arrive_at(unsigned bar, unsigned rank) {
  const unsigned to = machine::global_of(machine::peer(bar, rank));
  bool alive = false;
  for (int f = 0; f < machine::threads_each; ++f)
    alive |= !machine::done[to / machine::WINDOW * machine::threads_each + f];
  if (!alive) machine::fail("an arrival at a block that has ended");
  machine::published(to);
  machine::arrive(to);
}
static unsigned cluster_rank() { return machine::block_of() % machine::cluster; }
static void cluster_sync() {
  machine::wait(machine::meeting[machine::block_of() / machine::cluster],
                machine::threads_each * machine::cluster);
}
static void fence_barrier_init() {
  for (auto& one : machine::mbarriers)
    if (one.second.private_to == machine::current + 1) one.second.private_to = 0;
}
static void fence_async() {
  auto& mine = machine::written_by[machine::current];
  for (unsigned place : mine)
    if (machine::unfenced[place] == machine::current + 1) machine::unfenced[place] = 0;
  mine.clear();
}
static void push_quad(unsigned to, const float* x, unsigned bar) {
  machine::Push one{machine::global_of(to), machine::global_of(bar), {}};
  if (to % 16) machine::fail("misaligned push");
  memcpy(one.bytes, x, 16);
  machine::pushes.push_back(one);
}
static void read_quad(float* x, unsigned at) { memcpy(x, machine::at(machine::global_of(at), 16), 16); }
static void add_quad(float* x, unsigned at) {
  float y[4];
  read_quad(y, at);
  for (int i = 0; i < 4; ++i) x[i] += y[i];
}
template <int kCount> static void registers_down() {
  const int less = machine::registers_at_entry() - kCount;
  if (less < 0) machine::fail("registers given back that the thread does not have");
  machine::spare[machine::block_of()] += less;
}
template <int kCount> static void registers_up() {
  const int more = std::max(0, kCount - machine::registers_at_entry());
  long& spare = machine::spare[machine::block_of()];
  machine::yield_until([](const void* s, long n) { return *(const long*)s >= n; }, &spare, more);
  spare -= more;
}
template <class M> static void prefetch_map(const M*) {}
static void wait_previous_grid() {}
static void start_next_grid() {}
static int shared_read(unsigned at) {
  int x;
  memcpy(&x, machine::at(machine::global_of(at), 4), 4);
  return x;
}
static int take_task(unsigned* counter, unsigned last) {
  const unsigned x = *counter;
  *counter = x >= last ? 0 : x + 1;
  return x;
}

// ---- TMA
template <class M> static machine::TensorView view_of(const M* map) {
  machine::TensorView view;
  memcpy(&view, map, sizeof(view));
  return view;
}
template <class M>
static void tma_load(unsigned to, const M* map, unsigned bar, std::array<int, 5> at, int rank,
                     unsigned mask) {
  const machine::TensorView view = view_of(map);
  if (view.rank != rank || to % 128 || view.box[0] * view.element > view.width)
    machine::fail("a load that does not fit its tensor map");
  to = machine::global_of(to);
  bar = machine::global_of(bar);
  const int block = machine::block_of();
  if (!mask) mask = 1u << block % machine::cluster;
  machine::boxes.push_back({view, at, to, bar, mask, 0, block});
}
template <class M>
static void tma_store(const M* map, unsigned from, std::array<int, 5> at, int rank, bool add) {
  const machine::TensorView view = view_of(map);
  if (view.rank != rank || from % 128 || view.box[0] * view.element > view.width)
    machine::fail("a store that does not fit its tensor map");
  auto& mine = machine::stores[machine::current];
  if (mine.empty()) mine.emplace_back();
  mine.back().push_back({view, at, machine::global_of(from), add, false});
}
static void store_commit() {
  auto& mine = machine::stores[machine::current];
  if (mine.empty()) mine.emplace_back();
  mine.emplace_back();
}
template <int kPending> static void store_wait_read() {
  auto& mine = machine::stores[machine::current];
  // The last group is open: nothing waits for it.
  for (size_t i = 0; i + 1 + kPending < mine.size(); ++i)
    machine::yield_until(
        [](const void* g, long) { return machine::all_read(*(const machine::Bulk*)g); }, &mine[i], 0);
  while (mine.size() > 1 && machine::all_read(mine.front())) mine.pop_front();
}
#define OF_RANK(r, ints, names)                                                                  \
  template <class M>                                                                             \
  static void tma_load_##r##d(unsigned to, const M* map, unsigned bar, ints) {                   \
    tma_load(to, map, bar, {names}, r, 0);                                                       \
  }                                                                                              \
  template <class M>                                                                             \
  static void tma_load_##r##d_multicast(unsigned to, const M* map, unsigned bar, ints,           \
                                        unsigned short mask) {                                   \
    tma_load(to, map, bar, {names}, r, mask);                                                    \
  }                                                                                              \
  template <class M> static void tma_store_##r##d(const M* map, unsigned from, ints) {           \
    tma_store(map, from, {names}, r, false);                                                     \
  }                                                                                              \
  template <class M> static void tma_store_add_##r##d(const M* map, unsigned from, ints) {       \
    tma_store(map, from, {names}, r, true);                                                      \
  }
#define LIST(...) __VA_ARGS__
OF_RANK(2, LIST(int c0, int c1), LIST(c0, c1))
OF_RANK(3, LIST(int c0, int c1, int c2), LIST(c0, c1, c2))
OF_RANK(4, LIST(int c0, int c1, int c2, int c3), LIST(c0, c1, c2, c3))
OF_RANK(5, LIST(int c0, int c1, int c2, int c3, int c4), LIST(c0, c1, c2, c3, c4))

// ---- registers to shared memory
static void matrices_out(unsigned at, const unsigned* x, int count, bool across) {
  const int first = machine::current / 32 * 32, lane = machine::current % 32;
  machine::slots[machine::current] = at;
  if (lane < 8 * count && at % 16) machine::fail("misaligned matrix");
  warp_wait();
  for (int q = 0; q < count; ++q)
    for (int half = 0; half < 2; ++half) {
      const unsigned short value = x[q] >> 16 * half;
      const int row = lane / 4, col = lane % 4 * 2 + half;
      const unsigned line = machine::slots[first + q * 8 + (across ? col : row)];
      written(line + (across ? row : col) * 2, &value, 2);
    }
  warp_wait();
}
static void stmatrix(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  const unsigned x[] = {a, b, c, d};
  matrices_out(at, x, 4, false);
}
static void stmatrix_transposed(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  const unsigned x[] = {a, b, c, d};
  matrices_out(at, x, 4, true);
}
static void stmatrix_transposed(unsigned at, unsigned a, unsigned b) {
  const unsigned x[] = {a, b};
  matrices_out(at, x, 2, true);
}
static void store_shared_pair(unsigned at, float a, float b) {
  const float x[] = {a, b};
  written(at, x, 8);
}

// ---- wgmma
template <class T> static void pin(T&) {}
static void wgmma_fence() { machine::matmuls[machine::current].fenced = true; }
static void wgmma_commit() {
  machine::Thread& mine = machine::matmuls[machine::current];
  mine.fenced = false;  // between groups of matmuls the thread may use its registers
  mine.commits.push_back(mine.issued);
}
template <int kPending> static void wgmma_wait() {
  machine::Thread& mine = machine::matmuls[machine::current];
  if (int(mine.commits.size()) <= kPending) return;
  const long wanted = mine.commits[mine.commits.size() - 1 - kPending];
  machine::yield_until(
      [](const void* g, long n) { return ((const machine::Group*)g)->first >= n; },
      &machine::groups[machine::current / 128], wanted);
}
static machine::Product& joined(float* sums, int columns, int kind, unsigned long long right,
                                int accumulate, unsigned long long left, const unsigned* rows,
                                bool left_across, bool right_across) {
  machine::Group& group = machine::groups[machine::current / 128];
  if (!machine::matmuls[machine::current].fenced) machine::fail("a matmul without a fence before");
  const size_t place = machine::matmuls[machine::current].issued++ - group.first;
  while (group.queue.size() <= place) group.queue.emplace_back();
  machine::Product& one = group.queue[place];
  if (one.joined && (one.right != right || one.columns != columns || one.left != left ||
                     one.accumulate != bool(accumulate) || one.from_registers != bool(rows)))
    machine::fail("the threads of a group start different matmuls");
  one.block = machine::block_of();
  one.columns = columns;
  one.kind = kind;
  one.right = right;
  one.left = left;
  one.accumulate = accumulate;
  one.from_registers = rows;
  one.left_across = left_across;
  one.right_across = right_across;
  one.sums[machine::current % 128] = sums;
  one.rows[machine::current % 128] = rows;
  ++one.joined;
  return one;
}
template <int kKind, bool kLeft, bool kRight, int kCount>
static void start_wgmma(float (&d)[kCount], unsigned long long a, unsigned long long b, int add) {
  joined(d, 2 * kCount, kKind, b, add, a, nullptr, kLeft, kRight);
}
template <int kKind, bool kLeft, bool kRight, int kCount>
static void start_wgmma(float (&d)[kCount], const unsigned* a, unsigned long long b, int add) {
  joined(d, 2 * kCount, kKind, b, add, 0, a, kLeft, kRight);
}

// ---- what else is PTX
static int __all_sync(unsigned, int holds) {
  machine::slots[machine::current] = holds;
  const int first = machine::current / 32 * 32;
  warp_wait();
  bool all = true;
  for (int i = 0; i < 32; ++i) all &= machine::slots[first + i] != 0;
  warp_wait();
  return all;
}
static unsigned __byte_perm(unsigned x, unsigned y, unsigned chosen) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> 8 * (chosen >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
static void __trap() { machine::fail("trap"); }
static unsigned pack_e4m3(float a, float b, float c, float d) {
  E4m3 x[4];
  set(x[0], a), set(x[1], b), set(x[2], c), set(x[3], d);
  return x[0].bits | x[1].bits << 8 | x[2].bits << 16 | unsigned(x[3].bits) << 24;
}
static unsigned pack_e5m2(float a, float b, float c, float d) {
  E5m2 x[4];
  set(x[0], a), set(x[1], b), set(x[2], c), set(x[3], d);
  return x[0].bits | x[1].bits << 8 | x[2].bits << 16 | unsigned(x[3].bits) << 24;
}

// All `count` blocks, as many side by side as `together` says; the reason of a fault, if any.
template <class... A>
static const char* launch(void (*f)(A...), void** p, int count, int threads, int together,
                          unsigned shared, int in_cluster, unsigned seed) {
  static void (*kernel)(A...);
  static void** arguments;
  kernel = f;
  arguments = p;
  machine::body = [] { call(kernel, arguments, std::index_sequence_for<A...>{}); };
  machine::fault = nullptr;
  machine::room = shared;
  machine::random_of.seed(seed);
  gridDim.x = count;
  blockDim.x = threads;
  for (int b = 0; b < count && !machine::fault; b += together) {
    const int side_by_side = std::min(together, count - b);
    machine::hopper(side_by_side, threads, in_cluster);
    machine::run_blocks(b, side_by_side, threads);
  }
  return machine::fault;
}
