/* A libcuda.so.1 that writes down what it is asked: each launch is a line of text, read and emptied
   by `recorded`. Parameters have the sizes that `expect` was given. An address in memory that the
   stub gave is written as its offset there, so that two launchers with scratch memory of their own
   compare equal. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { int id, pad; unsigned value[16]; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned count; } Config;

static char text[1 << 20];
static int sizes[64], count_of_sizes, depth, loads;
static uint64_t top = 0x7000000000;

#define SAY(...) snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__)

const char *recorded(void) {
  static char given[1 << 20];
  strcpy(given, text);
  text[0] = 0;
  return given;
}
void expect(int count, const int *each) {
  count_of_sizes = count;
  memcpy(sizes, each, (size_t)count * sizeof *each);
}
int depth_of_contexts(void) { return depth; }

static uint64_t own(uint64_t address) { /* each allocation begins at a multiple of 2^16 */
  return address >= 0x7000000000 && address < top ? 0xA000000000 + (address & 0xFFFF) : address;
}

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuGetErrorName(int code, const char **s) { *s = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR"; return 0; }
int cuGetErrorString(int code, const char **s) { *s = "text"; return code < 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetAttribute(int *v, int key, int device) {
  *v = key == 16 ? 132 : key == 75 ? 9 : key == 76 ? 0 : key == 97 ? 232448 : -1;
  return device || *v < 0;
}
int cuDevicePrimaryCtxRetain(void **c, int device) { *c = (void *)64; return device; }
int cuCtxSetCurrent(void *c) { return c != (void *)64; }
int cuCtxGetCurrent(void **c) { *c = (void *)64; return 0; }
int cuCtxPushCurrent_v2(void *c) { ++depth; return c != (void *)64; }
int cuCtxPopCurrent_v2(void **c) { --depth; *c = (void *)64; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuModuleLoadData(void **m, const void *image) {
  *m = (void *)(uintptr_t)(1000 + ++loads);
  SAY("load %.8s\n", (const char *)image + 64);
  return memcmp(image, "\x7f" "ELF", 4) != 0;
}
int cuModuleGetFunction(void **f, void *m, const char *name) {
  *f = m;
  SAY("function %s\n", name);
  return 0;
}
int cuFuncSetAttribute(void *f, int key, int v) { SAY("set %d %d\n", key, v); return !f; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) {
  SAY("resident %d %zu\n", threads, shared);
  *n = 2;
  return !f;
}
int cuOccupancyMaxActiveClusters(int *n, void *f, const Config *c) {
  SAY("clusters %u %u %u of %u\n", c->grid[0], c->block[0], c->shared, c->attributes->value[0]);
  *n = 60;
  return !f || c->count != 1 || c->attributes->id != 4;
}
int cuMemAlloc_v2(uint64_t *p, size_t n) {
  *p = top;
  top += (n + 0xFFFF) / 0x10000 * 0x10000;
  SAY("alloc %zu\n", n);
  return 0;
}
int cuMemsetD32_v2(uint64_t p, unsigned v, size_t n) { SAY("fill %zu\n", n); return v || own(p) == p; }
int cuEventCreate(void **e, unsigned flags) { *e = (void *)8; return flags != 2; }
int cuEventRecord(void *e, void *s) { SAY("record on %p\n", s); return e != (void *)8; }
int cuStreamWaitEvent(void *s, void *e, unsigned f) { SAY("wait on %p\n", s); return e != (void *)8 || f; }
int cuEventDestroy_v2(void *e) { return e != (void *)8; }

/* Of some maps the address is the first word, of some it is not: launchers must try. */
static unsigned char *place(unsigned char *map, unsigned rank) { return map + (rank % 2 ? 8 : 0); }

int cuTensorMapEncodeTiled(unsigned char *map, int type, unsigned rank, void *at, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  memset(map, 0, 128);
  uint64_t address = own((uintptr_t)at);
  unsigned char head[] = {(unsigned char)type, (unsigned char)rank, (unsigned char)interleave,
                          (unsigned char)swizzle, (unsigned char)promotion, (unsigned char)fill};
  memcpy(map + (rank % 2 ? 0 : 8), head, sizeof head);
  memcpy(place(map, rank), &address, 8);
  memcpy(map + 16, dims, 8 * rank);
  memcpy(map + 56, strides, 8 * (rank - 1));
  memcpy(map + 88, box, 4 * rank);
  for (unsigned d = 0; d < rank; ++d) map[108 + d] = (unsigned char)steps[d];
  map[127] = (unsigned char)rank;
  return 0;
}

int cuTensorMapReplaceAddress(unsigned char *map, void *at) {
  uint64_t address = own((uintptr_t)at);
  memcpy(place(map, map[127]), &address, 8);
  return 0;
}

int cuLaunchKernelEx(const Config *c, void *f, void **params, void **extra) {
  SAY("launch grid %u %u %u block %u %u %u shared %u stream %p", c->grid[0], c->grid[1], c->grid[2],
      c->block[0], c->block[1], c->block[2], c->shared, c->stream);
  for (unsigned i = 0; i < c->count; ++i) SAY(" attribute %d=%u", c->attributes[i].id, c->attributes[i].value[0]);
  for (int i = 0; i < count_of_sizes; ++i) {
    unsigned char bytes[128];
    memcpy(bytes, params[i], (size_t)sizes[i]);
    if (sizes[i] == 8) {
      uint64_t word;
      memcpy(&word, bytes, 8);
      word = own(word);
      memcpy(bytes, &word, 8);
    }
    SAY(" ");
    for (int b = 0; b < sizes[i]; ++b) SAY("%02x", bytes[b]);
  }
  SAY("\n");
  return !f || extra != NULL || (c->count != 0) != (c->attributes != NULL);
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
  Config c = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
  return cuLaunchKernelEx(&c, f, params, extra);
}

int cuGetProcAddress_v2(const char *name, void **f, int version, uint64_t flags, int *status) {
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  Dl_info self;
  dladdr((void *)cuGetProcAddress_v2, &self);
  void *library = dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  *f = dlsym(library, second);
  if (!*f) *f = dlsym(library, name);
  if (status) *status = *f ? 0 : 1;
  return *f || version < 0 || flags > 8 ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **f, int v, uint64_t flags) { return cuGetProcAddress_v2(name, f, v, flags, NULL); }
