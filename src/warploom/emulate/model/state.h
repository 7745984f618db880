// What the parts of the machine share: threads as fibers, vector clocks, records of accesses.
// Each thread is a fiber; a block's threads, its wgmma groups, each barrier and each thread's bulk
// stores are agents with a component in the vector clocks of their cluster. A thread's two clocks
// say what is ordered before it (`known`) and what of that the async proxy sees (`fenced`).
#pragma once
#include "machine.h"
#include "numbers.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <array>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace machine {
const u32 WINDOW = 1u << 24, ROOM = 1u << 18, START = 1024, LIMIT = 232448;
const int MOST_BLOCKS = 16, CELLS = 6, DEPTH = 4;
const size_t STACK = 128 << 10;

enum AgentKind : uint8_t { kThread, kMatmuls, kBarrier, kStores, kCopies };
struct Agent { AgentKind kind; int thread; u32 bar; };  // thread: the first of a group; all global
struct Clocks { std::vector<u32> known, fenced; };
// An access of an agent at a moment of its clock.
struct Cell { u32 epoch, site; uint16_t agent; uint8_t mask, flags; };
enum { kValid = 1, kWrite = 2, kAsync = 4 };
// Of 4 bytes of a stack: the fence that came before a write and a read; the last wgmma that has them
// as accumulator and as operand; the first wgmma whose product they hold (NONE: no product).
struct Register { u32 wrote, read, result, operand, since; };
const u32 NONE = ~0u;

struct Meeting {
  int arrived = 0, round = 0, count = 0;
  std::vector<int> waiters;  // threads that what was before the arrivals is ordered for
  std::vector<u32> known, fenced, done_known, done_fenced;
};
struct Mbarrier {
  u32 count = 0, pending = 0, phase = 0, site = 0, last = 0;  // last: the site of the last arrival
  int last_thread = -1;
  long bytes = 0;
  int maker = -1, agent = 0;
  u32 made = 0;             // epoch of the maker
  bool published = false;   // to copies and other blocks
  std::vector<u32> known, fenced, done_known, done_fenced;
};
struct Wait {
  bool (*ready)(const void*, long) = nullptr;
  const void* what = nullptr;
  long value = 0;
  const char* why = "";
  u32 site = 0, key = 0;
};
struct Product {
  int block = 0, columns = 0, kind = 0, joined = 0;
  bool registers = false, accumulate = false, across[2] = {}, negative[2] = {};
  u64 side[2] = {};
  u32 site = 0, number = 0;
  std::vector<float*> sums;  // of all threads
  u32 rows[128][4];
};
// `spoiled`: products that mean nothing, and why; `used`: those of which a thread read a result.
struct Group {
  std::deque<Product> queue;
  u32 first = 0;
  u64 stamp = 0;
  std::vector<u32> known, fenced;
  std::map<u32, std::string> spoiled;
  std::vector<char> used;
};
// A bulk store: once it has read shared memory it has what it `holds`, until that is written.
struct Store {
  TensorView map; std::array<int, 5> at; u32 place, bytes; unsigned char* to; bool add, read;
      u32 site, group; std::vector<unsigned char> holds; bool done;
};
struct Copy { u32 number, to, size; unsigned char bytes[16]; };
struct Arrival { u32 number, bar; bool counted; };
struct Box {
  TensorView map; std::array<int, 5> at; u32 place, bar, mask; int row, block; u32 site;
  const unsigned char* from; u32 bytes;   // of a load without a map
  // by block of the cluster: the barrier's when it was issued
  std::array<u32, MOST_BLOCKS> phase;
};
struct Push { u32 to, bar, size, phase, site; unsigned char bytes[16]; };
struct Thread {
  std::jmp_buf context;
  bool done = true, started = false;
  int agent = 0, held = 0;  // held: registers, once setmaxnreg has said so
  Wait wait;
  u32 issued = 0, waited = 0, fences = 0;
  std::vector<u32> commits;
  std::deque<std::vector<Store>> stores;  // by group; the last one is open
  std::deque<Store> landing;              // those that have been waited for until they had read
  u32 groups = 0;                         // committed so far
  int store_agent = -1, copy_agent = -1;
  std::deque<Copy> copies;
  std::vector<Arrival> arrivals;
  std::vector<u32> copy_groups;
  u32 copy_number = 1;
  bool cluster_open = false;
  int cluster_round = 0;
  u64 slot = 0;                           // what it gives to the other lanes
  u64 version = 0;                        // of its clocks
};
struct Visit { u32 epoch, site; };
// A block: what others did to its barriers and memory, by agent, and what is ordered before its end.
struct Block { std::map<int, Visit> visits; std::vector<u32> known; };
struct Cluster {
  std::vector<Agent> agents;
  Meeting meeting;
};

extern std::vector<Thread> threads;
extern std::vector<Cluster> clusters;
extern std::vector<std::map<u32, Meeting>> warps, named;  // by warp and mask; by block and number
extern std::vector<Meeting> blocks_meet;
extern std::vector<Block> ends;
extern std::map<u32, Mbarrier> mbarriers;
extern std::vector<Group> groups;
extern std::vector<Box> boxes;
extern std::vector<Push> pushes;
extern std::vector<long> spare;
extern std::set<int> copying;  // threads whose copies, arrivals or bulk stores may not be done
extern std::vector<u32> known_of, fenced_of;  // a row of `agents_each` for each thread
extern int current, each, groups_each, blocks, cluster, agents_each, pace[6];
extern u32 room, static_room;
extern bool inside;
extern std::string fault;
extern std::mt19937 random_of;
extern unsigned char* pool;
extern Cell* cells;          // by block, word and record
extern uint8_t* filled;      // by word: bytes that something has written
extern Register* registers_of;  // by thread and word of its stack
extern unsigned char* stacks;
extern std::vector<Cell*>* recorded;  // of an access that may be taken back
extern std::string* doubt;            // where its fault goes

inline Thread& me() { return threads[current]; }
inline int block_of(int thread) { return thread / each; }
inline Cluster& own_cluster() { return clusters[block_of(current) / cluster]; }
inline u32* known(int thread) { return &known_of[size_t(thread) * agents_each]; }
inline u32* fenced(int thread) { return &fenced_of[size_t(thread) * agents_each]; }
inline int group_of(int thread) { return block_of(thread) * groups_each + thread % each / 128; }
// From the address that a kernel sees to that among all blocks that run, and back.
inline u32 global_of(u32 at) { return at + block_of(current) / cluster * cluster * WINDOW; }
inline u32 moved(u32 at, int block) { return block * WINDOW + at % WINDOW; }
inline bool chance(int which) { return random_of() % pace[which] == 0; }

u32 site_here();
std::string place(u32 site);
std::string shown(u32 at);  // an address
std::string who(const Agent& a);
std::string who_thread(int thread);
unsigned char* at(u32 address, u32 bytes);
void yield_until(bool (*ready)(const void*, long), const void* what, long value, const char* why,
                 u32 key = 0);
void give_way();
void join(std::vector<u32>& into, const u32* from);
void join(u32* into, const std::vector<u32>& from);
void release_to(std::vector<u32>& known_into, std::vector<u32>& fenced_into);
void inits_to(std::vector<u32>& known_into);
void acquire_from(const std::vector<u32>& known_from, const std::vector<u32>& fenced_from);
void meet(Meeting& at, int count, bool memory, const char* why, u32 key = 0);
int new_agent(AgentKind kind, int thread, u32 bar);
struct Access { int agent; u32 epoch; const u32 *known, *fenced; u32 site; bool write, async;
    const char* what; };
void touch(u32 address, u32 bytes, const Access& how);
Access by_thread(bool write, const char* what);
Mbarrier& barrier_at(u32 bar);
Mbarrier& published(u32 bar, const char* by);
void arrive(u32 bar, u32 count);
void receive(u32 bar, u32 bytes, u32 phase, u32 site);
void events(bool all);       // what else happens at random times
bool more_to_come();
void leaves();               // the current thread ends
void start_async();
}  // namespace machine
