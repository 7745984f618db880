// A libcuda that runs on the CPU: just the driver calls of runtime/driver.py, device memory on the
// heap, one stream, launches executed thread by thread when queued, graphs as recorded closures.
// HELPERS is the text of runtime/helpers.cu, compiled here as plain C++: the very source the
// GPU runs. `flip` is the kernel the tests launch. Only for tests; see test_driver.py.
#include <dlfcn.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
struct uint4 { unsigned x, y, z, w; };
struct Extent { unsigned x = 1, y = 1, z = 1; };
static thread_local Extent gridDim, blockDim, blockIdx, threadIdx;
static double now_us = 0;
static long long clock64() { now_us += 0.01; return (long long)(now_us * 1000); }
static float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
static long long __double_as_longlong(double d) { long long v; memcpy(&v, &d, 8); return v; }
static void atomicAdd(unsigned long long* at, unsigned long long v) { *at += v; }
static void atomicMin(unsigned long long* at, unsigned long long v) { if (v < *at) *at = v; }
#include HELPERS
extern "C" void flip(const u8* x, u8* y, int n, float unused, void* null_1, void* null_2) {
    if (unused != 1.5f || null_1 || null_2) abort();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < (u64)n; i += (u64)gridDim.x * blockDim.x) y[i] = x[i] ^ 0x3C;
}

template <class T> static T arg(void** p, int i) { return *(T*)p[i]; }
template <class... A, size_t... I>
static void call(void (*f)(A...), void** p, std::index_sequence<I...>) { f(arg<A>(p, I)...); }
template <class... A> static std::function<void(void**)> kernel(void (*f)(A...)) {
    return [f](void** p) { call(f, p, std::index_sequence_for<A...>{}); };
}
template <class... A> static std::vector<size_t> sizes(void (*)(A...)) { return {sizeof(A)...}; }

struct Function { std::function<void(void**)> run; std::vector<size_t> sizes; double us; };
struct Module { std::string image; };
#define KERNEL(name) {#name, {kernel(name), sizes(name), 0}}
static std::map<std::string, Function> kernels = {
    KERNEL(fill_elements), KERNEL(compare_words), KERNEL(advance), KERNEL(spin), KERNEL(flip)};
static std::set<void*> modules;
static std::map<uintptr_t, size_t> memory;
static bool capturing = false;
typedef std::vector<std::function<void()>> Graph;
static Graph recorded;

static int queue(std::function<void()> work) {
    if (capturing) recorded.push_back(work); else work();
    return 0;
}
static bool inside(uintptr_t at, size_t n) {
    auto it = memory.upper_bound(at);
    if (it == memory.begin()) return false;
    --it;
    return at + n <= it->first + it->second;
}

extern "C" {
int s_cuInit(unsigned) { return 0; }
int s_cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int s_cuDeviceGetCount(int* n) { *n = 1; return 0; }
int s_cuDeviceGet(int* d, int i) { *d = i; return 0; }
int s_cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "Stub"); return 0; }
int s_cuDeviceTotalMem(size_t* n, int) { *n = 1 << 30; return 0; }
int s_cuDeviceGetAttribute(int* v, int key, int) {
    static std::map<int, int> table = {{75, 9}, {76, 0}, {16, 4}, {13, 1000000}, {38, 65536}, {97, 232448}};
    *v = table.at(key);
    return 0;
}
int s_cuDevicePrimaryCtxRetain(void** c, int) { *c = (void*)64; return 0; }
int s_cuDevicePrimaryCtxRelease(int) { return 0; }
int s_cuCtxSetCurrent(void* c) { return c == (void*)64 ? 0 : 1; }
int s_cuStreamCreate(void** s, unsigned flags) { *s = (void*)128; return flags == 1 ? 0 : 1; }
int s_cuStreamDestroy(void*) { return 0; }
int s_cuStreamSynchronize(void* s) { return s == (void*)128 && !capturing ? 0 : 1; }
int s_cuModuleLoadData(void** m, const void* image) {
    const char* text = (const char*)image + 64;  // past the ELF header
    if (memcmp(text, "junk", 4) == 0) return 200;
    *m = new Module{memcmp(text, "flip", 4) == 0 ? text : "helpers"};
    modules.insert(*m);
    return 0;
}
int s_cuModuleUnload(void* m) { return modules.erase(m) ? 0 : 400; }
int s_cuModuleGetFunction(void** f, void* m, const char* name) {
    if (!modules.count(m) || !kernels.count(name)) return 500;
    auto* function = new Function(kernels[name]);
    std::string image = ((Module*)m)->image;
    function->us = image.size() > 5 && image[0] == 'f' ? atof(image.c_str() + 5) : 0;
    *f = function;
    return 0;
}
int s_cuFuncSetAttribute(void*, int key, int value) {
    return (key == 8 && value <= 232448) || (key == 14 && value == 1) ? 0 : 1;
}
int s_cuMemAlloc(uintptr_t* p, size_t n) {
    if (n > (1u << 30)) return 2;
    *p = (uintptr_t)aligned_alloc(512, (n + 511) / 512 * 512);
    memory[*p] = n;
    return 0;
}
int s_cuMemFree(uintptr_t p) { free((void*)p); return memory.erase(p) ? 0 : 1; }
int s_cuMemcpyHtoDAsync(uintptr_t to, const void* from, size_t n, void* s) {
    if (!inside(to, n) || s != (void*)128) return 1;
    memcpy((void*)to, from, n);
    return 0;
}
int s_cuMemcpyDtoHAsync(void* to, uintptr_t from, size_t n, void* s) {
    if (!inside(from, n) || s != (void*)128) return 1;
    memcpy(to, (void*)from, n);
    return 0;
}
int s_cuMemcpyDtoDAsync(uintptr_t to, uintptr_t from, size_t n, void*) {
    if (!inside(to, n) || !inside(from, n)) return 1;
    return queue([=] { memcpy((void*)to, (void*)from, n); });
}
int s_cuMemsetD8Async(uintptr_t to, unsigned char v, size_t n, void*) {
    if (!inside(to, n)) return 1;
    return queue([=] { memset((void*)to, v, n); });
}
int s_cuMemsetD32Async(uintptr_t to, unsigned v, size_t n, void*) {
    if (!inside(to, 4 * n) || to % 4) return 1;
    return queue([=] { for (size_t i = 0; i < n; ++i) ((unsigned*)to)[i] = v; });
}
static int launch(Function* f, Extent grid, Extent block, void** params) {
    std::vector<std::vector<char>> copies;
    for (size_t i = 0; i < f->sizes.size(); ++i)
        copies.emplace_back((char*)params[i], (char*)params[i] + f->sizes[i]);
    return queue([=] {
        std::vector<void*> p;
        for (auto& copy : copies) p.push_back((void*)copy.data());
        gridDim = grid; blockDim = block;
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) f->run(p.data());
        now_us += f->us;
    });
}
int s_cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                     unsigned bz, unsigned shared, void* s, void** params, void** extra) {
    if (s != (void*)128 || extra || shared > 232448) return 1;
    return launch(f, {gx, gy, gz}, {bx, by, bz}, params);
}
struct Attribute { int id; char pad[4]; union { char raw[64]; unsigned cluster[3]; }; };
struct Config { unsigned gx, gy, gz, bx, by, bz, shared; void* s; Attribute* attributes; unsigned count; };
int s_cuLaunchKernelEx(const Config* c, Function* f, void** params, void** extra) {
    if (c->s != (void*)128 || extra || c->count != 1 || c->attributes->id != 4) return 1;
    if (c->gx % c->attributes->cluster[0]) return 1;
    return launch(f, {c->gx, c->gy, c->gz}, {c->bx, c->by, c->bz}, params);
}
int s_cuEventCreate(double** e, unsigned) { *e = new double(-1); return 0; }
int s_cuEventRecord(double* e, void*) { *e = now_us; return 0; }
int s_cuEventQuery(double* e) { return *e < 0 ? 1 : 600; }
int s_cuEventElapsedTime(float* ms, double* a, double* b) { *ms = (float)((*b - *a) / 1000); return 0; }
int s_cuGetErrorString(int, const char** s) { *s = "stub text"; return 0; }
int s_cuStreamBeginCapture(void*, int mode) { capturing = true; recorded.clear(); return mode == 1 ? 0 : 1; }
int s_cuStreamEndCapture(void*, Graph** g) { capturing = false; *g = new Graph(recorded); return 0; }
int s_cuGraphInstantiateWithFlags(Graph** e, Graph* g, unsigned long long) { *e = new Graph(*g); return 0; }
int s_cuGraphLaunch(Graph* g, void*) { for (auto& work : *g) work(); return 0; }
int s_cuGraphExecDestroy(Graph* g) { delete g; return 0; }
int s_cuGraphDestroy(Graph* g) { delete g; return 0; }
int s_cuTensorMapEncodeTiled(unsigned* map, int type, unsigned rank, void* at, const uint64_t* dims,
                             const uint64_t* strides, const unsigned* box, const unsigned* step,
                             int interleave, int swizzle, int promotion, int fill) {
    unsigned words[] = {(unsigned)type, rank, (unsigned)(uintptr_t)at, (unsigned)dims[0], (unsigned)dims[1],
                        (unsigned)strides[0], box[0], box[1], step[0], step[1], (unsigned)interleave,
                        (unsigned)swizzle, (unsigned)promotion, (unsigned)fill};
    memset(map, 0, 128);
    memcpy(map, words, sizeof words);
    return 0;
}
int cuGetProcAddress_v2(const char* name, void** f, int, uint64_t, void*) {
    std::string mine = std::string("s_") + name;
    *f = strcmp(name, "cuGetProcAddress") == 0 ? (void*)cuGetProcAddress_v2 : dlsym(RTLD_DEFAULT, mine.c_str());
    if (!*f) { Dl_info self; dladdr((void*)cuGetProcAddress_v2, &self);
               *f = dlsym(dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW), mine.c_str()); }
    return *f ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** f, int v, uint64_t flags) { return cuGetProcAddress_v2(name, f, v, flags, 0); }
}
