// Fibers, meetings, vector clocks and the records of accesses.
#include "state.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>

Extent gridDim, blockDim, blockIdx, threadIdx;

namespace machine {
std::vector<Thread> threads;
std::vector<Cluster> clusters;
std::vector<std::map<u32, Meeting>> warps, named;
std::vector<Meeting> blocks_meet;
std::vector<Block> ends;
std::map<u32, Mbarrier> mbarriers;
std::vector<Group> groups;
std::vector<Box> boxes;
std::vector<Push> pushes;
std::vector<long> spare;
std::set<int> copying;
std::vector<u32> known_of, fenced_of;
int current, each = 1, groups_each, blocks, cluster = 1, agents_each, pace[6];
u32 room, static_room;
bool inside;
std::string fault;
std::mt19937 random_of(1);
unsigned char *pool, *stacks;
Cell* cells;
uint8_t* filled;
Register* registers_of;
std::vector<Cell*>* recorded;
std::string* doubt;

static std::jmp_buf home;
static Launch how;
static bool probing, idle;
static int alive, wanted_cluster;
static const std::function<void()>* body;
static std::map<int, u32> statics;
static size_t stacks_made;
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));

// ---- memory: one reservation each, given back between runs
template <class T> static T* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED) { fprintf(stderr, "no memory for the emulation\n"); abort(); }
  return static_cast<T*>(p);
}
static void clear(void* p, size_t bytes) { madvise(p, bytes, MADV_DONTNEED); }

struct Region { size_t bytes; };
static unsigned char *heap, *heap_end;
static std::map<const unsigned char*, Region> regions;
const size_t HEAP = size_t(4) << 30, GUARD = 4096;
void* allocate(size_t bytes) {
  if (!heap) heap_end = heap = reserve<unsigned char>(HEAP);
  unsigned char* p = heap_end + GUARD;
  const size_t taken = (bytes + 255) / 256 * 256;
  if (p + taken + GUARD > heap + HEAP) return nullptr;
  heap_end = p + taken;
  memset(p, 0xff, bytes);
  regions[p] = {bytes};
  return p;
}
bool release(void* memory) { return regions.erase(static_cast<unsigned char*>(memory)) > 0; }

// ---- places in the source: return addresses of a call and of its callers
struct Site { const char* pc[DEPTH]; };
static std::vector<Site> sites;
static std::unordered_map<u64, u32> site_numbers;
__attribute__((noinline)) static u32 site_from(void** frame) {
  Site site = {};
  const unsigned char* top = stacks + STACK * (current + 1);
  for (int i = 0; i < DEPTH; ++i) {
    if (reinterpret_cast<unsigned char*>(frame) < stacks ||
        reinterpret_cast<unsigned char*>(frame) + 16 > top)
      break;
    site.pc[i] = static_cast<const char*>(frame[1]) - 1;
    frame = static_cast<void**>(frame[0]);
  }
  u64 key = 0;
  for (const char* pc : site.pc) key = key * 0x9e3779b97f4a7c15ull + reinterpret_cast<u64>(pc);
  auto [found, made] = site_numbers.try_emplace(key, u32(sites.size()));
  if (made) sites.push_back(site);
  return found->second;
}
static void** entry_frame;  // of the function of the machine that the kernel called
void enter_frame(void** frame) { entry_frame = frame; }
u32 site_here() { return entry_frame ? site_from(entry_frame) : 0; }
#define ENTER entry_frame = static_cast<void**>(__builtin_frame_address(0))

std::string place(u32 site) {
  if (site >= sites.size()) return "{}";
  std::string text = "{";
  for (const char* pc : sites[site].pc) {
    if (!pc) break;
    char hex[32];
    snprintf(hex, sizeof hex, "%s%lx", text.size() > 1 ? " " : "",
             (unsigned long)(pc - __ehdr_start));
    text += hex;
  }
  return text + "}";
}
std::string shown(u32 at) {
  char text[64];
  const u32 place = at % WINDOW;
  if (place >= START + room) snprintf(text, sizeof text, "static+0x%x", ROOM - place);
  else snprintf(text, sizeof text, "+0x%x", place - START);
  return std::string("shared memory ") + text + " of block " + std::to_string(at / WINDOW);
}
std::string who_thread(int thread) {
  return "thread " + std::to_string(thread % each) +
         (blocks > 1 ? " of block " + std::to_string(thread / each) : "");
}
std::string who(const Agent& a) {
  if (a.kind == kMatmuls)
    return "the wgmma of threads " + std::to_string(a.thread % each) + "-" +
           std::to_string(a.thread % each + 127) +
           (blocks > 1 ? " of block " + std::to_string(a.thread / each) : "");
  if (a.kind == kBarrier) return "a bulk copy counted by the barrier at " + shown(a.bar);
  if (a.kind == kStores) return "a bulk store of " + who_thread(a.thread);
  if (a.kind == kCopies) return "a cp.async of " + who_thread(a.thread);
  return who_thread(a.thread);
}

// ---- faults end the run
static void leave() {
  if (!inside) return;
  inside = false;
  longjmp(home, 1);
}
void fail(const char* why, ...) {
  if (fault.empty()) {
    char text[2000];
    va_list rest;
    va_start(rest, why);
    vsnprintf(text, sizeof text, why, rest);
    va_end(rest);
    fault = text;
    if (inside) fault += "; " + who_thread(current) + " at " + place(site_here());
  }
  leave();
}
static void fail_at(const std::string& why) {
  if (doubt) {
    if (doubt->empty()) *doubt = why;
    return;
  }
  if (fault.empty()) {
    fault = why;
    for (const Group& group : groups)
      if (!group.spoiled.empty() && why.find(group.spoiled.begin()->second) != 0) {
        fault += "; before it, " + group.spoiled.begin()->second;
        break;
      }
  }
  leave();
}

// ---- fibers
static void switch_home() {
  void** volatile frame = entry_frame;
  if (_setjmp(me().context)) {
    entry_frame = frame;
    return;
  }
  inside = false;
  longjmp(home, 1);
}
void yield_until(bool (*ready)(const void*, long), const void* what, long value, const char* why,
                 u32 key) {
  if (ready(what, value)) return;
  const u32 site = site_here();
  me().wait = {ready, what, value, why, site, key};
  switch_home();
}
// A thread that polls lets others run; if all do nothing else, nothing will ever happen.
void give_way() {
  me().wait = {[](const void*, long) { return true; }, nullptr, 0, "a condition that it polls",
      site_here(), 0};
  idle = true;
  switch_home();
}
static void fiber() {
  (*body)();
  entry_frame = nullptr;
  leaves();
  me().done = true;
  --alive;
  inside = false;
  longjmp(home, 1);
}
static void enter(int f) {
  current = f;
  const unsigned index = f % each;
  threadIdx = {index % how.block.x, index / how.block.x % how.block.y,
               index / how.block.x / how.block.y};
  inside = true;
  if (_setjmp(home)) return;
  if (threads[f].started) longjmp(threads[f].context, 1);
  threads[f].started = true;
  static ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = stacks + STACK * f;
  first.uc_stack.ss_size = STACK;
  first.uc_link = nullptr;
  makecontext(&first, fiber, 0);
  setcontext(&first);
}

// ---- clocks
// A tenth of a run's time went into this loop, a component at a time. Without AVX2 there is no
// maximum of unsigned words.
#ifdef __x86_64__
__attribute__((optimize("O3"), target_clones("avx2", "default")))
#endif
static void join_words(u32* into, const u32* from, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] = std::max(into[i], from[i]);
}
void join(u32* into, const std::vector<u32>& from) { join_words(into, from.data(), from.size()); }
void join(std::vector<u32>& into, const u32* from) {
  into.resize(agents_each);
  join_words(into.data(), from, agents_each);
}
void release_to(std::vector<u32>& known_into, std::vector<u32>& fenced_into) {
  join(known_into, known(current));
  join(fenced_into, fenced(current));
  ++known(current)[me().agent];
  ++me().version;
}
void acquire_from(const std::vector<u32>& known_from, const std::vector<u32>& fenced_from) {
  join(known(current), known_from);
  join(fenced(current), fenced_from);
  ++me().version;
}
int new_agent(AgentKind kind, int thread, u32 bar) {
  Cluster& own = clusters[(kind == kBarrier ? int(bar / WINDOW) : block_of(thread)) / cluster];
  if (int(own.agents.size()) >= agents_each) fail("more barriers and copying threads than the emulation keeps");
  own.agents.push_back({kind, thread, bar});
  return int(own.agents.size()) - 1;
}
static void complete_meeting(Meeting& at) {
  at.arrived = at.count = 0;
  ++at.round;
  for (int thread : at.waiters) {
    join(known(thread), at.known), join(fenced(thread), at.fenced);
    ++threads[thread].version;
  }
  at.waiters.clear();
  std::fill(at.known.begin(), at.known.end(), 0);
  std::fill(at.fenced.begin(), at.fenced.end(), 0);
}
static bool arrive_at(Meeting& at, int count, bool memory, bool waits) {
  if (at.count && at.count != count) fail("threads expect %d and %d at one barrier", at.count,
      count);
  at.count = count;
  if (memory) {
    release_to(at.known, at.fenced);
    if (waits) at.waiters.push_back(current);
  }
  if (++at.arrived < count) return false;
  complete_meeting(at);
  return true;
}
void meet(Meeting& at, int count, bool memory, const char* why, u32 key) {
  const int round = at.round;
  if (arrive_at(at, count, memory, true)) return;
  yield_until([](const void* b, long was) { return ((const Meeting*)b)->round != was; }, &at, round,
              why, key);
}

// ---- accesses of shared memory
unsigned char* at(u32 address, u32 bytes) {
  const u32 number = address / WINDOW, place = address % WINDOW;
  const bool in = place >= START && place + bytes <= ROOM &&
                  (place + bytes <= START + room || place >= ROOM - static_room);
  if (number >= u32(blocks) || !in) {
    fail("an address outside of the block's shared memory (%u bytes at +0x%x, block %u)", bytes,
         place - START, number);
    return pool;
  }
  return pool + size_t(number) * ROOM + place;
}
static std::string side(const Cell& cell, int block) {
  const Agent& agent = clusters[block / cluster].agents[cell.agent];
  return std::string(cell.flags & kWrite ? "the write" : "the read") + " by " + who(agent) +
      " at " +
         place(cell.site);
}
void touch(u32 address, u32 bytes, const Access& how) {
  at(address, bytes);
  if (!fault.empty()) return;
  const int block = address / WINDOW;
  u32 from = address % WINDOW, end = from + bytes;
  const uint8_t flags = kValid | (how.write ? kWrite : 0) | (how.async ? kAsync : 0);
  const bool own_thread = clusters[block / cluster].agents[how.agent].kind == kThread;
  for (u32 word = from / 4; word * 4 < end; ++word) {
    uint8_t mask = 15;
    if (word * 4 < from) mask &= 15 << (from - word * 4);
    if (end < word * 4 + 4) mask &= 15 >> (word * 4 + 4 - end);
    const size_t place_of = size_t(block) * (ROOM / 4) + word;
    Cell* const all = cells + place_of * CELLS;
    int room_for = -1;
    for (int i = 0; i < CELLS; ++i) {
      Cell& c = all[i];
      if (!c.flags) {
        if (room_for < 0) room_for = i;
        continue;
      }
      if (!(c.mask & mask)) continue;
      const bool same = c.agent == how.agent && (own_thread || c.epoch == how.epoch);
      const bool ordered = same || c.epoch <= how.known[c.agent];
      const bool clash = (c.flags & kWrite) || how.write;
      if (clash && !ordered) {
        const std::string why = "race: " + std::string(how.write ? "the write" : "the read") +
            " by " + how.what +
                       " (" + who_thread(current) + ") at " + place(how.site) + " and " + side(c,
                           block) +
                       " touch " + shown(block * WINDOW + word * 4) +
                       " and nothing orders the first after the second";
        const Agent& other = clusters[block / cluster].agents[c.agent];
        if (other.kind != kMatmuls) return fail_at(why);
        // A product that nobody uses may read what it likes.
        Group& group = groups[group_of(other.thread)];
        if (c.epoch < group.used.size() && group.used[c.epoch]) return fail_at(why);
        group.spoiled.emplace(c.epoch, why);
      }
      if (clash && how.async && !how.write && !(c.flags & kAsync) && c.epoch > how.fenced[c.agent])
        return fail_at("proxy: " + std::string(how.what) + " (" + who_thread(current) + ") at " +
                       place(how.site) + " reads " + shown(block * WINDOW + word * 4) + ", and " +
                       side(c, block) + " has no fence.proxy.async after it");
      if (ordered && !(c.mask & ~mask) && (how.write || !(c.flags & kWrite))) {
        c.flags = 0;
        if (room_for < 0) room_for = i;
      }
    }
    if (!how.write && (filled[place_of] & mask) != mask)
      return fail_at("unwritten: " + std::string(how.what) + " (" + who_thread(current) + ") at " +
                     place(how.site) + " reads " + shown(block * WINDOW + word * 4) +
                     ", which nothing has written");
    if (how.write) filled[place_of] |= mask;
    if (room_for < 0) room_for = random_of() % CELLS;
    all[room_for] = {how.epoch, how.site, uint16_t(how.agent), mask, flags};
    if (recorded) recorded->push_back(all + room_for);
  }
}
Access by_thread(bool write, const char* what) {
  return {me().agent, known(current)[me().agent], known(current), fenced(current), site_here(),
      write, false, what};
}

// ---- what gcc's instrumentation reports: every access to memory that others may see
// A thread reads what products since `since` added up to.
static void use(const Register& r) {
  Group& group = groups[group_of(current)];
  const auto bad = group.spoiled.lower_bound(r.since);
  if (bad != group.spoiled.end() && bad->first <= r.result)
    return fail_at(bad->second + "; the result is read at " + place(site_here()));
  group.used.resize(std::max<size_t>(group.used.size(), r.result + 1));
  for (u32 n = r.result; n >= r.since && !group.used[n]; --n) group.used[n] = 1;
}
static void register_access(unsigned char* p, size_t bytes, bool write) {
  Thread& one = me();
  if (p < stacks + STACK * current || p >= stacks + STACK * (current + 1)) return;
  Register* r = registers_of + (p - stacks) / 4;
  for (size_t i = 0; i * 4 < bytes; ++i) {
    (write ? r[i].wrote : r[i].read) = one.fences + 1;
    if (write) r[i].since = NONE;
    else if (r[i].since && r[i].since != NONE) use(r[i]);
    if (r[i].result > one.waited)
      fail("registers: %s an accumulator of a running wgmma before its wgmma.wait_group",
           write ? "a write to" : "a read of");
    if (write && r[i].operand > one.waited)
      fail("registers: a write to operand A of a running wgmma before its wgmma.wait_group");
  }
}
static void plain_access(void* at, size_t bytes, bool write) {
  if (!inside) return;
  unsigned char* p = static_cast<unsigned char*>(at);
  if (p >= stacks && p < stacks + stacks_made) return register_access(p, bytes, write);
  if (p >= pool && p < pool + size_t(MOST_BLOCKS) * ROOM) {
    const size_t place = p - pool;
    return touch(u32(place / ROOM * WINDOW + place % ROOM), u32(bytes),
                 by_thread(write, "a plain access"));
  }
  if (heap && p >= heap && p < heap + HEAP) {
    auto next = regions.upper_bound(p);
    if (next == regions.begin()) return fail("bounds: global memory that nobody allocated");
    --next;
    if (p + bytes > next->first + next->second.bytes)
      fail("bounds: %s of %zu bytes, %zd beyond the end of an allocation of %zu", write
          ? "a write" : "a read",
           bytes, p + bytes - next->first - next->second.bytes, next->second.bytes);
  }
}
// The address where a global access of an instruction goes.
void watch(const void* first, size_t bytes, bool write) {
  ENTER;
  plain_access(const_cast<void*>(first), bytes, write);
}

// ---- threads that meet
void sync_block() { ENTER; meet(blocks_meet[block_of(current)], each, true, "__syncthreads"); }
void sync_warp(u32 mask) {
  ENTER;
  meet(warps[current / 32][mask], __builtin_popcount(mask), true, "__syncwarp");
}
// Of shuffles and votes, which order no memory.
static Meeting& lanes_meet(u32 mask) { return warps[current / 32 + warps.size() / 2][mask]; }
u64 exchange(u32 mask, u64 bits, int from) {
  ENTER;
  const int first = current / 32 * 32;
  me().slot = bits;
  meet(lanes_meet(mask), __builtin_popcount(mask), false, "a shuffle");
  const u64 result = threads[first + (from & 31)].slot;
  meet(lanes_meet(mask), __builtin_popcount(mask), false, "a shuffle");
  return result;
}
u32 ballot(u32 mask, bool holds) {
  ENTER;
  const int first = current / 32 * 32;
  me().slot = holds;
  meet(lanes_meet(mask), __builtin_popcount(mask), false, "a vote");
  u32 all = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) all |= u32(threads[first + i].slot != 0) << i;
  meet(lanes_meet(mask), __builtin_popcount(mask), false, "a vote");
  return all;
}
void named_sync(u32 id, u32 count) {
  ENTER;
  if (id > 15 || count % 32) fail("a named barrier of number %u and %u threads", id, count);
  meet(named[block_of(current)][id], count ? count : each, true, "a named barrier", id);
}
void named_arrive(u32 id, u32 count) {
  ENTER;
  if (id > 15 || count % 32) fail("a named barrier of number %u and %u threads", id, count);
  arrive_at(named[block_of(current)][id], count, true, false);
}
void cluster_arrive(bool release) {
  ENTER;
  Meeting& at = own_cluster().meeting;
  if (me().cluster_open) fail("a second arrival at the cluster's barrier without a wait");
  me().cluster_open = true;
  me().cluster_round = at.round;
  release ? release_to(at.known, at.fenced) : inits_to(at.known);
  if (++at.arrived < each * cluster) return;
  at.done_known = at.known, at.done_fenced = at.fenced;
  complete_meeting(at);
}
void cluster_wait() {
  ENTER;
  Meeting& at = own_cluster().meeting;
  if (!me().cluster_open) fail("a wait at the cluster's barrier without an arrival");
  me().cluster_open = false;
  yield_until([](const void* b, long was) { return ((const Meeting*)b)->round != was; }, &at,
              me().cluster_round, "the cluster's barrier");
  acquire_from(at.done_known, at.done_fenced);
}
u32 rank_in_cluster() { return block_of(current) % cluster; }
u32 blocks_of_cluster() { return cluster; }
u32 map_to(u32 address, u32 rank) {
  ENTER;
  if (rank >= u32(cluster)) fail("block %u of a cluster of %d", rank, cluster);
  return rank * WINDOW + address % WINDOW;
}
u64 now() {
  static u64 time;
  return time += 20;
}
unsigned char* own_shared() { return pool + size_t(block_of(current)) * ROOM + START; }
void* static_shared(int number, size_t bytes, size_t align) {
  ENTER;
  auto found = statics.find(number);
  if (found == statics.end()) {
    static_room = u32((static_room + bytes + align - 1) / align * align);
    if (static_room + room > LIMIT) fail("more than %u bytes of shared memory", LIMIT);
    found = statics.emplace(number, ROOM - static_room).first;
  }
  return pool + size_t(block_of(current)) * ROOM + found->second;
}
u32 shared_address(const void* p) {
  ENTER;
  const unsigned char* q = static_cast<const unsigned char*>(p);
  if (q < pool || q >= pool +
      size_t(MOST_BLOCKS) * ROOM) fail("the shared address of what is not in shared memory");
  const size_t place = q - pool;
  return u32(place / ROOM % cluster * WINDOW + place % ROOM);
}
void begin(int blocks_in_cluster) {
  if (!probing) return;
  wanted_cluster = blocks_in_cluster;
  inside = false;
  longjmp(home, 1);
}

// ---- a launch
static void prepare(int count) {
  blocks = count;
  const int all = count * each;
  groups_each = (each + 127) / 128;
  threads.assign(all, {});
  clusters.assign((count + cluster - 1) / cluster, {});
  agents_each = cluster * (2 * each + groups_each + 192);
  known_of.assign(size_t(all) * agents_each, 0);
  fenced_of.assign(size_t(all) * agents_each, 0);
  warps.assign((all + 31) / 32 * 2, {});
  named.assign(count, {});
  blocks_meet.assign(count, {});
  ends.assign(count, {});
  groups.assign(size_t(count) * groups_each, {});
  spare.assign(count, 0);
  copying.clear();
  mbarriers.clear();
  boxes.clear();
  pushes.clear();
  statics.clear();
  sites.resize(1), site_numbers.clear();
  doubt = nullptr, recorded = nullptr;
  static_room = 0;
  for (int c = 0; c < int(clusters.size()); ++c) {
    const int first = c * cluster * each;
    for (int t = 0; t < cluster * each; ++t)
      clusters[c].agents.push_back({kThread, first + t, 0});
    for (int g = 0; g < cluster * groups_each; ++g) {
      const int thread = first + g / groups_each * each + g % groups_each * 128;
      clusters[c].agents.push_back({kMatmuls, thread, 0});
    }
  }
  for (int t = 0; t < all; ++t) {
    threads[t].done = false;
    threads[t].agent = t % (cluster * each);
    threads[t].stores.emplace_back();
    known(t)[threads[t].agent] = 1;
  }
  alive = all;
  if (!pool) {
    pool = reserve<unsigned char>(size_t(MOST_BLOCKS) * ROOM);
    cells = reserve<Cell>(size_t(MOST_BLOCKS) * (ROOM / 4) * CELLS * sizeof(Cell));
    filled = reserve<uint8_t>(size_t(MOST_BLOCKS) * (ROOM / 4));
  }
  clear(cells, size_t(MOST_BLOCKS) * (ROOM / 4) * CELLS * sizeof(Cell));
  clear(filled, size_t(MOST_BLOCKS) * (ROOM / 4));
  memset(pool, 0xff, size_t(count) * ROOM);
  if (stacks_made < STACK * all) {
    if (stacks) munmap(stacks, stacks_made), munmap(registers_of,
        stacks_made / 4 * sizeof(Register));
    stacks_made = STACK * all;
    stacks = reserve<unsigned char>(stacks_made);
    registers_of = reserve<Register>(stacks_made / 4 * sizeof(Register));
  }
  clear(registers_of, stacks_made / 4 * sizeof(Register));
  for (int t = 0; t < all; ++t) memset(stacks + STACK * (t + 1) - (32 << 10), 0xff, 32 << 10);
  start_async();
}
// Threads that wait, by what for.
static void deadlock() {
  std::map<std::string, std::vector<int>> waiting;
  for (int t = 0; t < int(threads.size()); ++t) {
    const Thread& one = threads[t];
    if (one.done) continue;
    std::string what = std::string(one.wait.why);
    if (one.wait.key && mbarriers.count(one.wait.key)) {
      const Mbarrier& b = mbarriers[one.wait.key];
      what += " of the barrier at " + shown(one.wait.key) + " (made at " + place(b.site) +
          "), where " +
              std::to_string(b.pending) + " of " + std::to_string(b.count) + " arrivals and " +
              std::to_string(b.bytes) + " bytes are missing in phase " + std::to_string(b.phase);
      if (b.last_thread >= 0) what += "; the last to arrive was " + who_thread(b.last_thread) +
          " at " + place(b.last);
    } else if (one.wait.what && !strcmp(one.wait.why, "a named barrier")) {
      const Meeting& at = *static_cast<const Meeting*>(one.wait.what);
      what += " " + std::to_string(one.wait.key) + ", where " + std::to_string(at.arrived) +
          " of " +
              std::to_string(at.count) + " threads are";
    }
    what += " at " + place(one.wait.site);
    waiting[what].push_back(t);
  }
  fault = "deadlock";
  for (const auto& [what, them] : waiting) {
    fault += "\n  ";
    for (size_t i = 0; i < them.size();) {
      size_t j = i;
      while (j + 1 < them.size() && them[j + 1] == them[j] + 1 && them[j +
          1] / each == them[i] / each) ++j;
      fault += (i ? ", " : "") + who_thread(them[i]) + (j > i ? " to " +
          std::to_string(them[j] % each) : "");
      i = j + 1;
      if (fault.size() > 6000) break;
    }
    fault += (them.size() > 1 ? " wait for " : " waits for ") + what;
  }
}
static void run_blocks(int first, int count) {
  prepare(count);
  const int all = count * each;
  std::vector<int> order(all);
  std::vector<char> late((all + 31) / 32);
  int apart = -1;  // a warp of each block, of which some lanes wait until nothing else goes on
  u32 behind = 0;
  for (int f = 0; f < all; ++f) order[f] = f;
  for (int turn = 0, stuck = 0; alive && fault.empty(); ++turn) {
    events(false);
    if (turn % 8 == 0) std::shuffle(order.begin(), order.end(), random_of);
    // Warps fall behind now and then.
    if (turn % 16 == 0) for (char& one : late) one = random_of() % 4 == 0;
    bool moved = more_to_come();
    // Lanes fall behind lanes, for long: the first, which does what one lane does, or all others, of
    // a warp that has given registers away. Those that compute are kept together by wgmma.
    if (stuck % 50 == 49 || turn % 4096 == 64) {
      behind = random_of() % 2 ? 1u : ~1u;
      std::vector<int> loading;
      for (int w = 0; w * 32 < each; ++w)
        if (const int held = threads[w * 32].held; held && held < 65536 / each / 8 * 8) loading.push_back(w);
      apart = loading.empty() ? -1 : loading[random_of() % loading.size()];
    }
    for (int f : order) {
      Thread& one = threads[f];
      if (one.done || late[f / 32]) continue;
      if (f % each / 32 == apart && behind >> f % 32 & 1) continue;
      if (one.wait.ready && !one.wait.ready(one.wait.what, one.wait.value)) continue;
      one.wait.ready = nullptr;
      const unsigned number = first + f / each;
      blockIdx = {number % how.grid.x, number / how.grid.x % how.grid.y,
          number / how.grid.x / how.grid.y};
      idle = false;
      enter(f);
      inside = false;
      moved |= !idle;
      if (!fault.empty()) return;
    }
    stuck = moved ? 0 : stuck + 1;
    if (stuck > 500) return deadlock();  // no warp is late that long
  }
  if (fault.empty()) events(true);
}
// The attributes that a kernel states in its first statement.
static void probe() {
  probing = true;
  wanted_cluster = 0;
  blocks = 0, each = 1;
  if (!stacks) prepare(0), stacks_made = STACK, stacks = reserve<unsigned char>(STACK),
      registers_of = reserve<Register>(STACK / 4 * sizeof(Register));
  threads.assign(1, {});
  enter(0);
  inside = false;
  probing = false;
}
const char* launch(const std::function<void()>& kernel, Launch wanted) {
  fault.clear();
  how = wanted;
  body = &kernel;
  gridDim = how.grid, blockDim = how.block;
  if (how.cluster < 1) {
    probe();
    how.cluster = wanted_cluster > 0 ? wanted_cluster : 1;
  }
  each = int(how.block.x * how.block.y * how.block.z);
  cluster = how.cluster;
  room = how.shared;
  const int count = int(how.grid.x * how.grid.y * how.grid.z);
  if (each < 1 || each > 1024 || count < 0 || cluster > MOST_BLOCKS || count % cluster ||
      room > LIMIT) {
    char text[200];
    snprintf(text, sizeof text,
        "launch: %d blocks of %d threads in clusters of %d with %u bytes of shared memory",
             count, each, cluster, room);
    fault = text;
    return fault.c_str();
  }
  random_of.seed(how.seed);
  int together = std::min(std::max(cluster, how.together), MOST_BLOCKS) / cluster * cluster;
  for (int b = 0; b < count && fault.empty(); b += together) run_blocks(b, std::min(together,
      count - b));
  return fault.empty() ? nullptr : fault.c_str();
}
}  // namespace machine

#define ACCESS(p, n, write)                                                  \
  machine::entry_frame = static_cast<void**>(__builtin_frame_address(0)),    \
  machine::plain_access(p, n, write)
#define HOOK(n)                                                              \
  extern "C" void __tsan_read##n(void* p) { ACCESS(p, n, false); }           \
  extern "C" void __tsan_write##n(void* p) { ACCESS(p, n, true); }           \
  extern "C" void __tsan_unaligned_read##n(void* p) { ACCESS(p, n, false); } \
  extern "C" void __tsan_unaligned_write##n(void* p) { ACCESS(p, n, true); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
extern "C" void __tsan_read_range(void* p, size_t n) { ACCESS(p, n, false); }
extern "C" void __tsan_write_range(void* p, size_t n) { ACCESS(p, n, true); }
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_init() {}
