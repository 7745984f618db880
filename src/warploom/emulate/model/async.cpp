// What completes on its own: barriers in shared memory, bulk copies, wgmma, register requests.
// Layouts: PTX ISA 9.x, sections 9.7.15.5 (wgmma), 5.5 (tensors); maps: `cuTensorMapEncodeTiled`.
#include "state.h"

#include <algorithm>

namespace machine {
static long entry_registers;
#define ENTER enter_frame(static_cast<void**>(__builtin_frame_address(0)))
void enter_frame(void** frame);

static u32 swizzled(u32 at, int width) {
  const u32 mask = width == 128 ? 0x70 : width == 64 ? 0x30 : width == 32 ? 0x10 : 0;
  return at ^ (at >> 3 & mask);
}

// ---- barriers
Mbarrier& barrier_at(u32 bar) {
  static Mbarrier nothing;
  const auto found = mbarriers.find(bar);
  if (found != mbarriers.end()) return found->second;
  fail("no barrier has been initialised at %s", shown(bar).c_str());
  return nothing;
}
static Mbarrier& made_before(u32 bar) {
  Mbarrier& b = barrier_at(bar);
  if (b.maker >= 0 && fault.empty() && b.made > known(current)[threads[b.maker].agent])
    fail("the barrier at %s is used, and nothing orders its mbarrier.init by %s at %s before",
        shown(bar).c_str(),
         who_thread(b.maker).c_str(), place(b.site).c_str());
  return b;
}
Mbarrier& published(u32 bar, const char* by) {
  Mbarrier& b = made_before(bar);
  if (!b.published && fault.empty())
    fail("the barrier at %s is used by %s before a fence.mbarrier_init of %s, which made it at %s",
        shown(bar).c_str(), by,
         who_thread(b.maker).c_str(), place(b.site).c_str());
  return b;
}
static void complete(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.pending = b.count;
  ++b.phase;
  b.done_known.resize(b.known.size()), b.done_fenced.resize(b.fenced.size());
  for (size_t i = 0; i < b.known.size(); ++i) {
    b.done_known[i] = std::max(b.done_known[i], b.known[i]);
    b.done_fenced[i] = std::max(b.done_fenced[i], b.fenced[i]);
  }
  std::fill(b.known.begin(), b.known.end(), 0);
  std::fill(b.fenced.begin(), b.fenced.end(), 0);
}
void arrive(u32 bar, u32 count) {
  Mbarrier& b = barrier_at(bar);
  if (!fault.empty()) return;
  if (b.pending < count)
    return fail("the barrier at %s has %u arrivals in its phase %u and counts %u; the last was by %s at %s", shown(bar).c_str(),
                b.count - b.pending + count, b.phase, b.count,
                b.last_thread < 0 ? "a copy" : who_thread(b.last_thread).c_str(),
                    place(b.last).c_str());
  b.pending -= count;
  complete(b);
}
void receive(u32 bar, u32 bytes, u32 phase, u32 site) {
  const auto found = mbarriers.find(bar);
  if (found == mbarriers.end()) return fail("a copy, issued at %s, ends at %s, where no barrier is", place(site).c_str(), shown(bar).c_str());
  Mbarrier& b = found->second;
  if (b.phase != phase)
    return fail("bytes: a copy issued at %s for phase %u of the barrier at %s lands in phase %u: the barrier expected fewer bytes than its copies bring",
                place(site).c_str(), phase, shown(bar).c_str(), b.phase);
  b.bytes -= bytes;
  if (b.bytes < 0 && !b.pending)
    return fail("bytes: a copy issued at %s brings more bytes to the barrier at %s than it expects: %ld more", place(site).c_str(),
                shown(bar).c_str(), -b.bytes);
  complete(b);
}
void mbarrier_init(u32 bar, u32 count) {
  ENTER;
  bar = global_of(bar);
  if (bar % 8 || !count || count >= 1u << 20) fail("mbarrier.init at +0x%x with a count of %u",
      bar % WINDOW, count);
  at(bar, 8);
  if (!fault.empty()) return;
  Mbarrier& b = mbarriers[bar];
  const int agent = b.count ? b.agent : new_agent(kBarrier, current, bar);
  const u32 phase = b.phase;
  b = {};
  b.count = b.pending = count;
  b.agent = agent;
  b.phase = (phase + 1) / 2 * 2;  // a fresh barrier's parity; records of before keep their order
  b.maker = current;
  b.made = ++known(current)[me().agent];
  b.site = site_here();
  ++me().version;
}
void mbarrier_drop(u32 bar) { ENTER; mbarriers.erase(global_of(bar)); }
static Mbarrier& by_me(u32 bar, bool remote) {
  Mbarrier& b = remote ? published(bar, "another block") : made_before(bar);
  b.last = site_here();
  b.last_thread = current;
  return b;
}
u64 mbarrier_arrive(u32 bar, u32 count) {
  ENTER;
  bar = global_of(bar);
  const int block = bar / WINDOW;
  const bool remote = block != block_of(current);
  if (remote && block < blocks) {
    bool alive = false;
    for (int f = 0; f < each; ++f) alive |= !threads[block * each + f].done;
    if (!alive) fail("an arrival at a barrier of block %d, which has ended", block);
  }
  Mbarrier& b = by_me(bar, remote);
  const u64 phase = b.phase;
  if (remote && fault.empty()) ends[block].visits[me().agent] = {known(current)[me().agent],
      site_here()};
  release_to(b.known, b.fenced);
  arrive(bar, count);
  return phase;
}
void mbarrier_expect(u32 bar, u32 bytes) {
  ENTER;
  bar = global_of(bar);
  Mbarrier& b = by_me(bar, int(bar / WINDOW) != block_of(current));
  b.bytes += bytes;
  if (b.bytes >= 1l << 20) fail("a barrier that expects %ld bytes: it counts to 1048575", b.bytes);
}
void poll() {
  ENTER;
  give_way();
}
static bool wait_for(u32 bar, u32 parity, bool blocks_here) {
  bar = global_of(bar);
  Mbarrier& b = made_before(bar);
  if (int(bar / WINDOW) != block_of(current)) fail("a wait at a barrier of another block");
  const auto ready = [](const void* at,
      long p) { return (((const Mbarrier*)at)->phase & 1) != unsigned(p); };
  if (blocks_here) yield_until(ready, &b, parity & 1, parity & 1 ? "phase parity 1"
      : "phase parity 0", bar);
  else give_way();
  if (!ready(&b, parity & 1)) return false;
  join(known(current), b.done_known);
  join(fenced(current), b.done_fenced);
  u32& seen = known(current)[b.agent];
  seen = std::max(seen, b.phase);
  ++me().version;
  return true;
}
bool mbarrier_wait(u32 bar, u32 parity) { ENTER; return wait_for(bar, parity, true); }
bool mbarrier_test(u32 bar, u32 parity) { ENTER; return wait_for(bar, parity, false); }
bool mbarrier_wait_phase(u32 bar, u64 phase) { ENTER; return wait_for(bar, phase & 1, true); }
static void publish() {
  for (auto& one : mbarriers)
    if (one.second.maker == current) one.second.published = true;
}
void fence_mbarrier_init() { publish(); }
// What a relaxed arrival behind that fence orders: the barriers made before, and nothing else.
void inits_to(std::vector<u32>& known_into) {
  for (auto& one : mbarriers) {
    const Mbarrier& b = one.second;
    if (b.maker != current || !b.published) continue;
    if (known_into.size() < size_t(agents_each)) known_into.resize(agents_each);
    u32& seen = known_into[threads[b.maker].agent];
    seen = std::max(seen, b.made);
  }
}
void fence_proxy() {
  publish();
  std::copy(known(current), known(current) + agents_each, fenced(current));
  ++known(current)[me().agent];
  ++me().version;
}

// ---- registers
void registers(bool more, u32 count) {
  ENTER;
  if (count % 8 || count < 24 ||
      count > 256) fail("setmaxnreg to %u: expected a multiple of 8 from 24 to 256", count);
  Thread& one = me();
  if (!one.held) one.held = int(entry_registers);
  long& left = spare[block_of(current)];
  if (!more) {
    if (int(count) > one.held) fail("registers: setmaxnreg.dec to %u by a thread that has %d",
        count, one.held);
    left += one.held - int(count);
  } else {
    count = std::max(count, u32(one.held));
    const long wanted = int(count) - one.held;
    yield_until([](const void* s, long n) { return *(const long*)s >= n; }, &left, wanted,
                "registers that others have to give back by setmaxnreg");
    left -= wanted;
  }
  one.held = int(count);
}

// ---- bulk tensor copies
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
static TensorView view_of(const void* map, int rank, u32 place, const char* what) {
  TensorView view;
  memcpy(&view, map, sizeof view);
  if (view.rank != rank || rank < 1 || rank > 5) {
    fail("%s of %d dimensions with a tensor map of %d", what, rank, view.rank);
    view.rank = 1;
  }
  const int line = view.box[0] * view.element;
  if (place % 128 || (view.width && line > view.width) || line % 16)
    fail("%s at +0x%x with rows of %d bytes under a swizzle of %d: not what its tensor map allows",
        what,
         place % WINDOW - START, line, view.width);
  return view;
}
// Records of what lies in a swizzled box, a line at a time: 16 bytes stay together.
static void touch_box(const TensorView& map, u32 place, int from, int until, const Access& how,
                      const std::array<int, 5>* inside) {
  const int line = map.box[0] * map.element;
  for (int row = from; row < until && fault.empty(); ++row)
    for (int byte = 0; byte < line && fault.empty(); byte += 16)
      if (!inside || element_of(map, *inside, row, byte / map.element))
        touch(swizzled(place + row * line + byte, map.width), 16, how);
}
static void issue(Box& one) {
  const int first = block_of(current) / cluster * cluster;
  for (int block = 0; block < cluster && fault.empty(); ++block) {
    if (!(one.mask >> block & 1)) continue;
    const u32 bar = moved(one.bar, first + block), to = moved(one.place, first + block);
    Mbarrier& b = published(bar, "a bulk copy");
    if (!fault.empty()) return;
    one.phase[block] = b.phase;
    const Access how{b.agent, b.phase + 1, known(current), fenced(current), one.site, true, true,
        "a bulk copy"};
    if (one.from) touch(to, one.bytes, how);
    else touch_box(one.map, to, 0, outer_rows(one.map), how, nullptr);
    ends[first + block].visits[b.agent] = {b.phase + 1, one.site};
  }
  boxes.push_back(one);
}
void tma_load(u32 to, const void* map, const int* coordinates, int rank, u32 bar, u32 mask) {
  ENTER;
  Box one{};
  one.map = view_of(map, rank, to, "a bulk load");
  for (int d = 0; d < rank; ++d) one.at[d] = coordinates[d];
  one.place = global_of(to), one.bar = global_of(bar), one.block = block_of(current);
  if (!mask) {
    if (int(one.place / WINDOW) != one.block &&
        cluster == 1) fail("a bulk load into another block");
    mask = 1u << (one.place / WINDOW) % cluster;
  }
  if (mask >> cluster) fail("a multicast mask of 0x%x in a cluster of %d", mask, cluster);
  one.mask = mask;
  one.site = site_here();
  issue(one);
}
void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  ENTER;
  if (to % 16 || bytes % 16 ||
      uintptr_t(from) % 16) fail("a bulk copy that is not of multiples of 16 bytes");
  watch(from, bytes, false);
  Box one{};
  one.place = global_of(to), one.bar = global_of(bar), one.block = block_of(current);
  one.mask = 1u << (one.place / WINDOW) % cluster;
  one.from = static_cast<const unsigned char*>(from), one.bytes = bytes;
  one.site = site_here();
  issue(one);
}
// Half of a box lands.
static bool box_lands(Box& one) {
  const TensorView& map = one.map;
  const int first = one.block / cluster * cluster;
  const int rows = one.from ? int(one.bytes) : outer_rows(map), line = one.from ? 1
      : map.box[0] * map.element;
  const int half = one.from ? rows / 32 * 16 : rows / 2;
  const int last = one.row == 0 && half > 0 ? half : rows;
  for (int block = 0; block < cluster; ++block) {
    if (!(one.mask >> block & 1)) continue;
    const u32 to = moved(one.place, first + block);
    if (one.from) {
      memcpy(at(to + one.row, last - one.row), one.from + one.row, last - one.row);
    } else {
      for (int row = one.row; row < last; ++row)
        for (int col = 0; col < map.box[0]; ++col) {
          const unsigned char* from = element_of(map, one.at, row, col);
          unsigned char* into = at(swizzled(to + row * line + col * map.element, map.width),
              map.element);
          if (!fault.empty()) return true;
          if (from) memcpy(into, from, map.element);
          else memset(into, 0, map.element);
        }
    }
    receive(moved(one.bar, first + block), (last - one.row) * line, one.phase[block], one.site);
    if (!fault.empty()) return true;
  }
  one.row = last;
  return last == rows;
}
static float value_at(const unsigned char* p, int kind) {
  uint16_t half;
  float whole;
  memcpy(&half, p, kind <= kFp16 ? 2 : 0);
  if (kind == kBf16) return numbers::from_bf16(half);
  if (kind == kFp16) return numbers::from_fp16(half);
  if (kind == kE4m3) return numbers::from_e4m3(*p);
  if (kind == kE5m2) return numbers::from_e5m2(*p);
  memcpy(&whole, p, 4);
  return kind == kTf32 ? numbers::of_bits(numbers::bits_of(whole) & 0xffffe000u) : whole;
}
static void add_element(unsigned char* to, const unsigned char* from, int kind) {
  if (kind == kInt32) { *(int*)to += *(const int*)from; return; }
  if (kind == kFp32) { *(float*)to += *(const float*)from; return; }
  const float sum = value_at(to, kind) + value_at(from, kind);
  const uint16_t bits = kind == kBf16 ? numbers::to_bf16(sum) : numbers::to_fp16(sum);
  memcpy(to, &bits, 2);
}
static u32 bytes_of(const Store& one) {
  return one.to ? one.bytes : outer_rows(one.map) * one.map.box[0] * one.map.element;
}
static void store_reads(Store& one) {
  one.read = true;
  const u32 bytes = bytes_of(one);
  one.holds.resize(bytes);
  memcpy(one.holds.data(), at(one.place, bytes), bytes);
}
static void store_lands(Store& one) {
  one.done = true;
  if (one.to) {
    const unsigned char* from = one.holds.data();
    if (!one.add) memcpy(one.to, from, one.bytes);
    else for (u32 n = 0; n < one.bytes; n += 4) add_element(one.to + n, from + n, kFp32);
    return;
  }
  const TensorView& map = one.map;
  const int rows = outer_rows(map), line = map.box[0] * map.element;
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < map.box[0]; ++col) {
      unsigned char* to = element_of(map, one.at, row, col);
      if (!to) continue;
      const u32 place = swizzled(one.place + row * line + col * map.element, map.width);
      const unsigned char* from = &one.holds[place - one.place];
      if (one.add) add_element(to, from, map.kind);
      else memcpy(to, from, map.element);
    }
}
static void issue(Store& one) {
  Thread& mine = me();
  if (mine.store_agent < 0) mine.store_agent = new_agent(kStores, current, 0);
  const Access how{mine.store_agent, mine.groups + 1, known(current), fenced(current), one.site,
      false, true, "a bulk store"};
  if (one.to) touch(one.place, one.bytes, how);
  else touch_box(one.map, one.place, 0, outer_rows(one.map), how, &one.at);
  one.group = mine.groups + 1;
  mine.stores.back().push_back(one);
  copying.insert(current);
}
void tma_store(const void* map, u32 from, const int* coordinates, int rank, bool add) {
  ENTER;
  Store one{};
  one.map = view_of(map, rank, from, "a bulk store");
  if (add && one.map.kind != kBf16 && one.map.kind != kFp16 && one.map.kind != kFp32 &&
      one.map.kind != kInt32)
    fail("a bulk addition of this element type");
  for (int d = 0; d < rank; ++d) {
    one.at[d] = coordinates[d];
    // An H200 stops the kernel with an illegal instruction; loads of such boxes bring zeros.
    if (one.at[d] + one.map.box[d] <= 0)
      fail("a bulk store of the box from %d to %d of dimension %d, which ends before its array begins: the copy engine traps",
          one.at[d], one.at[d] + one.map.box[d], d);
  }
  one.place = global_of(from), one.add = add, one.site = site_here();
  issue(one);
}
void bulk_store(void* to, u32 from, u32 bytes, bool add) {
  ENTER;
  if (from % 16 || bytes % 16 ||
      uintptr_t(to) % 16) fail("a bulk copy that is not of multiples of 16 bytes");
  watch(to, bytes, true);
  Store one{};
  one.to = static_cast<unsigned char*>(to), one.place = global_of(from), one.bytes = bytes,
      one.add = add, one.site = site_here();
  issue(one);
}
void bulk_commit() {
  ++me().groups;
  me().stores.emplace_back();
}
static bool all_read(const std::vector<Store>& group) {
  for (const Store& one : group)
    if (!one.read) return false;
  return true;
}
void bulk_wait(u32 pending, bool read) {
  ENTER;
  Thread& mine = me();
  // The last group is open: nothing waits for it.
  while (mine.stores.size() > 1 + pending) {
    yield_until([](const void* g, long) { return all_read(*(const std::vector<Store>*)g); },
        &mine.stores.front(), 0, "bulk stores to read shared memory");
    for (Store& one : mine.stores.front()) mine.landing.push_back(std::move(one));
    mine.stores.pop_front();
  }
  while (!mine.landing.empty() && !read && mine.landing.front().group + pending <= mine.groups) {
    yield_until([](const void* one, long) { return ((const Store*)one)->done; },
        &mine.landing.front(), 0, "bulk stores to be complete");
    mine.landing.pop_front();
  }
  if (mine.store_agent < 0 || mine.groups < pending) return;
  u32& seen = known(current)[mine.store_agent];
  seen = std::max(seen, mine.groups - pending);
  ++mine.version;
}
void store_async(u32 to, const void* from, u32 bytes, u32 bar) {
  ENTER;
  if (to % bytes) fail("a misaligned st.async");
  Push one{global_of(to), global_of(bar), bytes, 0, site_here(), {}};
  Mbarrier& b = published(one.bar, "a copy");
  one.phase = b.phase;
  memcpy(one.bytes, from, bytes);
  if (!fault.empty()) return;
  ends[one.to / WINDOW].visits[b.agent] = {b.phase + 1, one.site};
  touch(one.to, bytes, {b.agent, b.phase + 1, known(current), fenced(current), one.site, true,
      true, "st.async"});
  pushes.push_back(one);
}

// ---- cp.async
static int copy_agent() {
  if (me().copy_agent < 0) me().copy_agent = new_agent(kCopies, current, 0);
  return me().copy_agent;
}
void copy_async(u32 to, const void* from, u32 bytes, u32 count) {
  ENTER;
  Thread& mine = me();
  if ((bytes != 4 && bytes != 8 && bytes != 16) || to % bytes || (count && uintptr_t(from) % bytes) ||
      count > bytes) fail("a cp.async that is misaligned or reads beyond its %u bytes", bytes);
  if (count) watch(from, count, false);
  Copy one{mine.copy_number, global_of(to), bytes, {}};
  memcpy(one.bytes, from, count);
  // The record's agent writes for the generic proxy.
  touch(one.to, bytes, {copy_agent(), mine.copy_number, known(current), fenced(current),
      site_here(), true, false, "cp.async"});
  mine.copies.push_back(one);
  copying.insert(current);
}
void copies_commit() {
  me().copy_groups.push_back(me().copy_number++);
}
void copies_wait(u32 pending) {
  ENTER;
  Thread& mine = me();
  if (mine.copy_groups.size() <= pending) return;
  const u32 wanted = mine.copy_groups[mine.copy_groups.size() - 1 - pending];
  yield_until([](const void* t, long n) {
    const Thread& one = *(const Thread*)t;
    return one.copies.empty() || one.copies.front().number > u32(n);
  }, &mine, wanted, "cp.async groups");
  known(current)[copy_agent()] = std::max(known(current)[copy_agent()], wanted);
  ++mine.version;
}
void copies_arrive(u32 bar, bool counted) {
  ENTER;
  bar = global_of(bar);
  Mbarrier& b = by_me(bar, false);
  if (counted) ++b.pending;
  const int agent = copy_agent();
  me().arrivals.push_back({me().copy_number++, bar, counted});
  copying.insert(current);
  release_to(b.known, b.fenced);
  b.known[agent] = std::max(b.known[agent], me().copy_number - 1);
}
// Copies of a thread land in order.
static void copies_land(bool all) {
  for (int t : copying) {
    if (!fault.empty()) return;
    Thread& one = threads[t];
    if (one.copies.empty() && one.arrivals.empty()) continue;
    if (!all && !chance(4)) continue;
    size_t count = all ? one.copies.size() : random_of() % (one.copies.size() + 1);
    for (; count; --count) {
      const Copy& first = one.copies.front();
      memcpy(at(first.to, first.size), first.bytes, first.size);
      one.copies.pop_front();
    }
    while (!one.arrivals.empty() && (one.copies.empty() ||
        one.copies.front().number > one.arrivals.front().number)) {
      arrive(one.arrivals.front().bar, 1);
      one.arrivals.erase(one.arrivals.begin());
    }
  }
}

// ---- shared memory and matrices
void shared_read(void* to, u32 from, u32 bytes) {
  ENTER;
  from = global_of(from);
  if (from % bytes) fail("a misaligned read of shared memory");
  touch(from, bytes, by_thread(false, "ld.shared"));
  memcpy(to, at(from, bytes), bytes);
}
void shared_write(u32 to, const void* from, u32 bytes) {
  ENTER;
  to = global_of(to);
  if (to % bytes) fail("a misaligned write to shared memory");
  touch(to, bytes, by_thread(true, "st.shared"));
  memcpy(at(to, bytes), from, bytes);
}
static void lanes() { exchange(~0u, me().slot, 0); }
static u32 row_of(int lane) { return global_of(u32(threads[current / 32 * 32 + lane].slot)); }
void load_matrices(u32* x, u32 from, int count, bool transposed) {
  ENTER;
  const int lane = current % 32;
  if (lane < 8 * count && from % 16) fail("ldmatrix of a row that is not aligned to 16 bytes");
  me().slot = from;
  lanes();
  const Access how = by_thread(false, "ldmatrix");
  for (int q = 0; q < count; ++q) {
    uint16_t half[2];
    for (int h = 0; h < 2; ++h) {
      const u32 place = transposed ? row_of(q * 8 + lane % 4 * 2 + h) + lane / 4 * 2
                                   : row_of(q * 8 + lane / 4) + lane % 4 * 4 + h * 2;
      touch(place, 2, how);
      memcpy(&half[h], at(place, 2), 2);
    }
    x[q] = half[0] | u32(half[1]) << 16;
  }
  lanes();
}
void store_matrices(u32 to, const u32* x, int count, bool transposed) {
  ENTER;
  const int lane = current % 32;
  if (lane < 8 * count && to % 16) fail("stmatrix of a row that is not aligned to 16 bytes");
  me().slot = to;
  lanes();
  const Access how = by_thread(true, "stmatrix");
  for (int q = 0; q < count; ++q)
    for (int h = 0; h < 2; ++h) {
      const uint16_t half = uint16_t(x[q] >> 16 * h);
      const int row = lane / 4, col = lane % 4 * 2 + h;
      const u32 place = row_of(q * 8 + (transposed ? col : row)) + (transposed ? row : col) * 2;
      touch(place, 2, how);
      memcpy(at(place, 2), &half, 2);
    }
  lanes();
}
static std::vector<std::array<u32, 6>> words;
void multiply(float* d, const u32* a, const u32* b, const float* c, int kind) {
  ENTER;
  const int first = current / 32 * 32, lane = current % 32;
  words.resize(threads.size());
  words[current] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  lanes();
  auto half = [&](int from, int word, int k) {
    const uint16_t bits = uint16_t(words[first + from][word] >> (k % 2 * 16));
    return double(kind == kBf16 ? numbers::from_bf16(bits) : numbers::from_fp16(bits));
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k)
      sum += half(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) * half(col * 4 + k % 8 / 2, 4 +
          k / 8, k);
    d[i] = c[i] + float(sum);
  }
  lanes();
}

// ---- wgmma
// The address of element (mn, k) of an operand, by its descriptor.
static u32 operand_at(int block, u64 words, bool across, int mn, int k, int element) {
  const u32 low = u32(words), high = u32(words >> 32);
  const u32 base = (low & 0x3fff) << 4, lbo = (low >> 16 & 0x3fff) << 4, sbo = (high & 0x3fff) << 4;
  const int code = high >> 30, width = code == 1 ? 128 : code == 2 ? 64 : code == 3 ? 32 : 0;
  if (!code) return base + mn / 8 * sbo + k * element / 16 * lbo + mn % 8 * 16 + k * element % 16 +
      block * WINDOW;
  const int row = width / element;
  const u32 linear = across ? mn / row * lbo + k / 8 * sbo + k % 8 * width + mn % row * element
                            : mn / 8 * sbo + mn % 8 * width + k * element;
  return swizzled(base + linear, width) + block * WINDOW;
}
static int element_bytes(int kind) { return kind <= kFp16 ? 2 : kind == kTf32 ? 4 : 1; }
static void touch_operand(const Product& one, int which, int extent, const Access& how) {
  const int element = element_bytes(one.kind), depth = 32 / element, step = 4 / element;
  const bool across = one.across[which];
  for (int mn = 0; mn < extent && doubt->empty(); mn += across ? step : 1)
    for (int k = 0; k < depth && doubt->empty(); k += across ? 1 : step)
      touch(operand_at(one.block, one.side[which], across, mn, k, element), 4, how);
}
// All threads have issued it: it reads shared memory from now on, ordered as for all of them.
static void issue(Product& one, Group& group) {
  const int first = current / each * each + current % each / 128 * 128;
  u64 stamp = 1;
  for (int t = first; t < first + 128; ++t) stamp += threads[t].version;
  if (stamp != group.stamp) {
    group.stamp = stamp;
    group.known.assign(known(first), known(first) + agents_each);
    group.fenced.assign(fenced(first), fenced(first) + agents_each);
    for (int t = first + 1; t < first + 128; ++t)
      for (int i = 0; i < agents_each; ++i) {
        group.known[i] = std::min(group.known[i], known(t)[i]);
        group.fenced[i] = std::min(group.fenced[i], fenced(t)[i]);
      }
  }
  const int agent = cluster * each + (block_of(current) % cluster) * groups_each +
      current % each / 128;
  const Access how{agent, one.number, group.known.data(), group.fenced.data(), one.site, false,
      true, "wgmma"};
  // What it reads too early only spoils its result: some kernels multiply what they never use.
  std::string why;
  std::vector<Cell*> made;
  doubt = &why, recorded = &made;
  if (!one.registers) touch_operand(one, 0, 64, how);
  touch_operand(one, 1, one.columns, how);
  doubt = nullptr, recorded = nullptr;
  if (why.empty()) return;
  for (Cell* cell : made) cell->flags = 0;
  group.spoiled.emplace(one.number, why);
}
static void mark(const void* register_, u32 number, bool result, bool fresh) {
  const unsigned char* p = static_cast<const unsigned char*>(register_);
  if (p < stacks + STACK * current || p >= stacks + STACK * (current + 1)) return;
  Register& r = registers_of[(p - stacks) / 4];
  Thread& mine = me();
  const bool flying = r.result > mine.waited;
  if (!flying && (r.wrote > mine.fences || (result && r.read > mine.fences)))
    fail("registers: wgmma uses a register (%s) that the thread touched after its last wgmma.fence", result ? "an accumulator" : "operand A");
  if (!result && flying) fail("registers: wgmma reads as operand A an accumulator of a running wgmma");
  (result ? r.result : r.operand) = number;
  if (result && (fresh || !r.since || r.since == NONE)) r.since = number;
}
void wgmma(const Operands& what) {
  ENTER;
  Thread& mine = me();
  if (each % 128) fail("wgmma in a block of %d threads: its last warps are no group of four", each);
  if (!mine.fences) fail("registers: a wgmma before the first wgmma.fence");
  Group& group = groups[group_of(current)];
  const u32 number = ++mine.issued;
  const size_t place = number - 1 - group.first;
  while (group.queue.size() <= place) group.queue.emplace_back();
  Product& one = group.queue[place];
  if (!one.joined) {
    one.block = block_of(current), one.columns = what.columns, one.kind = what.kind,
        one.number = number;
    one.side[0] = what.left, one.side[1] = what.right, one.accumulate = what.accumulate;
    one.registers = what.rows != nullptr, one.site = site_here();
    one.across[0] = what.left_across, one.across[1] = what.right_across;
    one.negative[0] = what.negative_left, one.negative[1] = what.negative_right;
    one.sums.resize(size_t(128) * what.columns / 2);
    for (int i = 0; i < 2; ++i)
      if ((i || !one.registers) && (one.side[i] >> 49 & 7)) fail("a descriptor with a base offset");
  } else if (one.side[1] != what.right || one.side[0] != what.left || one.columns != what.columns ||
             one.accumulate != what.accumulate || one.registers != (what.rows != nullptr)) {
    fail("the threads of a group issue different wgmma: descriptors, shape or scale-d differ from those at %s", machine::place(one.site).c_str());
  }
  const int lane = current % each % 128;
  for (int i = 0; i < what.columns / 2; ++i) {
    mark(what.sums[i], number, true, !what.accumulate);
    one.sums[lane * (what.columns / 2) + i] = what.sums[i];
  }
  for (int i = 0; i < 4 && what.rows; ++i) {
    memcpy(&one.rows[lane][i], what.rows[i], 4);
    if (!(what.own >> i & 1)) mark(what.rows[i], number, false, false);
  }
  if (++one.joined == 128) issue(one, group);
}
void wgmma_fence() { ++me().fences; }
void wgmma_commit() { me().commits.push_back(me().issued); }
void wgmma_wait(u32 pending) {
  ENTER;
  Thread& mine = me();
  if (mine.commits.size() <= pending) return;
  const u32 wanted = mine.commits[mine.commits.size() - 1 - pending];
  yield_until([](const void* g, long n) { return ((const Group*)g)->first >= u32(n); },
      &groups[group_of(current)],
              wanted, "wgmma that others of its group have to issue too");
  if (wanted <= mine.waited) return;
  mine.waited = wanted;
  const int agent = cluster * each + (block_of(current) % cluster) * groups_each +
      current % each / 128;
  known(current)[agent] = std::max(known(current)[agent], wanted);
  ++mine.version;
}
static void multiply_all(Product& one) {
  const int element = element_bytes(one.kind), depth = 32 / element;
  static float left[64][32], right[256][32];
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < depth; ++k) {
      if (one.registers) {
        const int per = 4 / element, half = depth / 2;  // elements of a word, of half of the depth
        const int thread = row / 16 * 32 + row % 8 * 4 + k % half / per;
        const u32* word = one.rows[thread] + row % 16 / 8 + k / half * 2;
        left[row][k] = value_at((const unsigned char*)word + k % per * element, one.kind);
      } else {
        left[row][k] = value_at(at(operand_at(one.block, one.side[0], one.across[0], row, k,
            element), element), one.kind);
      }
      if (one.negative[0]) left[row][k] = -left[row][k];
    }
  for (int col = 0; col < one.columns; ++col)
    for (int k = 0; k < depth; ++k) {
      const float x = value_at(at(operand_at(one.block, one.side[1], one.across[1], col, k,
          element), element), one.kind);
      right[col][k] = one.negative[1] ? -x : x;
    }
  if (!fault.empty()) return;
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < one.columns / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      const int col = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double sum = 0;
      for (int k = 0; k < depth; ++k) sum += double(left[row][k]) * right[col][k];
      float& into = *one.sums[thread * (one.columns / 2) + i];
      into = (one.accumulate ? into : 0.0f) + float(sum);
    }
}

// ---- one of each kind takes effect now and then
void events(bool all) {
  copies_land(all);
  for (int tries = 0; !boxes.empty() && fault.empty() && (all || (tries < 4 &&
      chance(0))); ++tries) {
    const size_t pick = random_of() % boxes.size();
    if (box_lands(boxes[pick])) boxes.erase(boxes.begin() + pick);
  }
  for (Group& one : groups)
    while (fault.empty() && !one.queue.empty() && one.queue.front().joined == 128 && (all ||
        chance(1))) {
      multiply_all(one.queue.front());
      one.queue.pop_front();
      ++one.first;
    }
  for (int t : copying) {
    const auto goes_on = [&](Store& one) {
      if (!one.read && (all || chance(2)) && fault.empty()) store_reads(one);
      if (one.read && !one.done && (all || chance(5)) && fault.empty()) store_lands(one);
    };
    for (Store& one : threads[t].landing) goes_on(one);
    for (auto& group : threads[t].stores)
      for (Store& one : group) goes_on(one);
  }
  size_t some = pushes.empty() ? 0 : all ? pushes.size() : chance(3) ? random_of() % pushes.size() +
      1 : 0;
  for (; some && fault.empty(); --some) {
    std::swap(pushes[random_of() % pushes.size()], pushes.back());
    const Push one = pushes.back();
    pushes.pop_back();
    memcpy(at(one.to, one.size), one.bytes, one.size);
    receive(one.bar, one.size, one.phase, one.site);
  }
}
bool more_to_come() {
  if (!boxes.empty() || !pushes.empty()) return true;
  for (const Group& one : groups)
    if (!one.queue.empty() && one.queue.front().joined == 128) return true;
  for (; !copying.empty(); copying.erase(copying.begin())) {
    const Thread& mine = threads[*copying.begin()];
    if (!mine.copies.empty() || !mine.arrivals.empty()) return true;
    for (const Store& one : mine.landing)
      if (!one.done) return true;
    for (const auto& group : mine.stores)
      for (const Store& one : group)
        if (!one.done) return true;
  }
  return false;
}
void leaves() {
  const Thread& mine = me();
  for (const auto& group : mine.stores)
    for (const Store& one : group)
      return fail("exit: %s ended while its bulk store at %s may still read shared memory: no cp.async.bulk.wait_group covers it",
                    who_thread(current).c_str(), place(one.site).c_str());
  if (mine.waited < mine.issued)
    return fail("exit: %s ended under a wgmma that no wgmma.wait_group covers",
        who_thread(current).c_str());
  Block& end = ends[block_of(current)];
  join(end.known, known(current));
  for (int f = block_of(current) * each; f < (block_of(current) + 1) * each; ++f)
    if (!threads[f].done && f != current) return;
  for (const auto& [agent, visit] : end.visits)
    if (visit.epoch > end.known[agent])
      return fail("exit: block %d may end before %s, at %s, uses its shared memory: nothing orders the two", block_of(current),
                  who(own_cluster().agents[agent]).c_str(), place(visit.site).c_str());
  for (const Box& one : boxes)
    for (int b = 0; b < cluster; ++b)
      if (one.mask >> b & 1 && one.block / cluster * cluster + b == block_of(current))
        return fail("exit: block %d ended before the copy issued at %s into it landed",
            block_of(current), place(one.site).c_str());
}
void start_async() {
  // An equal share of 64 Ki registers in eights, of which a thread can name 255.
  entry_registers = std::min(65536 / std::max(each, 1), 255) / 8 * 8;
  const int paces[] = {1, 2, 6, 25, 100};
  for (int& one : pace) one = paces[random_of() % 5];
  pace[5] *= 10;  // from when a store has read to when it has written
}
}  // namespace machine
