// What translated CUDA C++ calls: the machine of machine.cpp, one function an instruction family.
// Shared addresses are 32 bits: the block's rank in its cluster from bit 24 on, then the offset.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

struct Extent { unsigned x = 1, y = 1, z = 1; };
extern Extent gridDim, blockDim, blockIdx, threadIdx;

namespace machine {
typedef uint32_t u32;
typedef uint64_t u64;
enum Kind { kBf16, kFp16, kE4m3, kE5m2, kFp32, kInt32, kTf32, kInt8 };

// A tensor map, in the first bytes of the 128 that a kernel is given.
struct TensorView {
  unsigned char* address;
  int rank, element, width, kind;  // bytes of an element, of a swizzled row (0: none); a Kind
  int dims[5], box[5];             // innermost first
  long long pitches[5];            // bytes, of dimensions 1 and up
};
struct Launch {
  Extent grid, block;
  u32 shared = 0;           // bytes of dynamic shared memory
  int cluster = 1, together = 4;  // blocks of a cluster; blocks side by side
  u32 seed = 1;
};
// Runs `body` as every thread of every block; the reason of a fault, or null. In a reason, {a b}
// are code addresses of a place and its callers, relative to the library.
const char* launch(const std::function<void()>& body, Launch how);
void fail(const char* why, ...);
void watch(const void* first, size_t bytes, bool write);  // a global access of an instruction
void* allocate(size_t bytes);                 // memory that kernels see, with guards
bool release(void* memory);                   // whether `allocate` gave it
void begin(int cluster);                      // first statement of a kernel: its attributes
unsigned char* own_shared();
void* static_shared(int number, size_t bytes, size_t align);
u32 shared_address(const void* p);

// ---- threads that meet
void sync_block();
void sync_warp(u32 mask);
u64 exchange(u32 mask, u64 bits, int from);  // what lane `from` gives
u32 ballot(u32 mask, bool holds);
void named_sync(u32 id, u32 count);
void named_arrive(u32 id, u32 count);
void cluster_arrive(bool release);
void cluster_wait();
u32 rank_in_cluster();
u32 blocks_of_cluster();
u32 map_to(u32 address, u32 rank);
u64 now();

// ---- barriers in shared memory
void mbarrier_init(u32 bar, u32 count);
void mbarrier_drop(u32 bar);
u64 mbarrier_arrive(u32 bar, u32 count);  // the phase it was in
void mbarrier_expect(u32 bar, u32 bytes);
bool mbarrier_wait(u32 bar, u32 parity);
bool mbarrier_test(u32 bar, u32 parity);
bool mbarrier_wait_phase(u32 bar, u64 phase);
void fence_mbarrier_init();  // and others for the cluster
void fence_proxy();
void poll();  // before a read of what another block may write: others run first

// ---- registers
void registers(bool more, u32 count);

// ---- copies
void tma_load(u32 to, const void* map, const int* at, int rank, u32 bar, u32 mask);
void tma_store(const void* map, u32 from, const int* at, int rank, bool add);
void bulk_load(u32 to, const void* from, u32 bytes, u32 bar);
void bulk_store(void* to, u32 from, u32 bytes, bool add = false);  // of fp32
void bulk_commit();
void bulk_wait(u32 pending, bool read);
void copy_async(u32 to, const void* from, u32 bytes, u32 count);
void copies_commit();
void copies_wait(u32 pending);
void copies_arrive(u32 bar, bool counted);
void store_async(u32 to, const void* from, u32 bytes, u32 bar);

// ---- shared memory and matrices
void shared_read(void* to, u32 at, u32 bytes);
void shared_write(u32 at, const void* from, u32 bytes);
void load_matrices(u32* x, u32 at, int count, bool transposed);
void store_matrices(u32 at, const u32* x, int count, bool transposed);
void multiply(float* d, const u32* a, const u32* b, const float* c, int kind);

// ---- wgmma
struct Operands {
  int columns, kind;
  float* const* sums;         // columns / 2 registers of this thread
  const void* const* rows;    // operand A's four registers, or null
  u64 left, right;            // descriptors
  bool accumulate, negative_left, negative_right, left_across, right_across;
  unsigned own;               // bit i: A's register i is gone when its function returns
};
void wgmma(const Operands& what);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 pending);
}  // namespace machine
