#include "launch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { PITCH = 16, SECTOR = 32, COUNTERS = 1024, SCRATCH = 512, MOST = 64 };
enum { CLUSTER = 4, DEPENDENT = 6 };                    /* CU_LAUNCH_ATTRIBUTE_* */
enum { SMS = 16, MAJOR = 75, MINOR = 76, SHARED = 97 }; /* CU_DEVICE_ATTRIBUTE_* */
enum { SHARED_LIMIT = 8, ANY_CLUSTER = 14 };            /* CU_FUNC_ATTRIBUTE_* */
static const int64_t LONGEST = 2147418112;              /* 2^31 - 2^16 */

typedef struct {
  int id, pad;
  unsigned value[16];
} attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  attribute *attributes;
  unsigned count;
} config;

/* The driver's functions: result, name, arguments. */
#define DRIVER(F)                                                                                  \
  F(cuInit, (unsigned))                                                                            \
  F(cuGetErrorName, (int, const char **))                                                          \
  F(cuDeviceGet, (int *, int))                                                                     \
  F(cuDeviceGetAttribute, (int *, int, int))                                                       \
  F(cuDevicePrimaryCtxRetain, (void **, int))                                                      \
  F(cuCtxPushCurrent_v2, (void *))                                                                 \
  F(cuCtxPopCurrent_v2, (void **))                                                                 \
  F(cuCtxSynchronize, (void))                                                                      \
  F(cuModuleLoadData, (void **, const void *))                                                     \
  F(cuModuleGetFunction, (void **, void *, const char *))                                          \
  F(cuFuncSetAttribute, (void *, int, int))                                                        \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, void *, int, size_t))                     \
  F(cuOccupancyMaxActiveClusters, (int *, void *, const config *))                                 \
  F(cuMemAlloc_v2, (uint64_t *, size_t))                                                           \
  F(cuMemsetD32_v2, (uint64_t, unsigned, size_t))                                                  \
  F(cuTensorMapEncodeTiled, (void *, int, unsigned, void *, const uint64_t *, const uint64_t *,    \
                             const uint32_t *, const uint32_t *, int, int, int, int))              \
  F(cuLaunchKernelEx, (const config *, void *, void **, void **))
#define DECLARE(name, args) static int(*name) args;
DRIVER(DECLARE)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread char said[512];

static const char *say(const char *form, ...) {
  va_list args;
  va_start(args, form);
  vsnprintf(said, sizeof said, form, args);
  va_end(args);
  return said;
}

static const char *failed(const char *call, int code) {
  const char *name = "unknown error";
  cuGetErrorName(code, &name);
  return say("%s failed: %s (%d)", call, name, code);
}

#define CALL(name, args)                                                                           \
  do {                                                                                             \
    int code = name args;                                                                          \
    if (code) return failed(#name, code);                                                          \
  } while (0)
#define TRY(expression)                                                                            \
  do {                                                                                             \
    const char *wrong = expression;                                                                \
    if (wrong) return wrong;                                                                       \
  } while (0)

static const char *open_driver(void) {
  if (cuLaunchKernelEx) return NULL;
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) return say("no GPU driver here: %s", dlerror());
#define FIND(name, args)                                                                           \
  if (!(*(void **)&name = dlsym(library, #name))) return say("the GPU driver has no " #name);
  DRIVER(FIND)
  CALL(cuInit, (0));
  return NULL;
}

static config shape_of(const wl_kernel *k, int64_t blocks, void *stream, attribute *attributes) {
  config made = {{(unsigned)blocks, 1, 1}, {(unsigned)k->threads, 1, 1}, (unsigned)k->shared_bytes,
                 stream, attributes, attributes ? 1u : 0u};
  return made;
}

static const char *zeros(uint64_t *address, size_t bytes) {
  CALL(cuMemAlloc_v2, (address, bytes));
  CALL(cuMemsetD32_v2, (*address, 0, bytes / 4));
  CALL(cuCtxSynchronize, ());
  return NULL;
}

static const char *resident(const wl_kernel *k, wl_loaded *l, int handle) {
  int each = 0, sms = 0;
  if (k->cluster > 1) {
    attribute cluster = {CLUSTER, 0, {(unsigned)k->cluster, 1, 1}};
    config shape = shape_of(k, k->cluster, NULL, &cluster);
    CALL(cuOccupancyMaxActiveClusters, (&each, l->function, &shape));
    l->blocks = (int64_t)each * k->cluster;
  } else {
    CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor,
         (&each, l->function, k->threads, (size_t)k->shared_bytes));
    CALL(cuDeviceGetAttribute, (&sms, SMS, handle));
    l->blocks = (int64_t)each * sms;
  }
  return l->blocks ? NULL : say("not one block of %s fits this GPU", k->name);
}

static const char *fill(const wl_kernel *k, wl_loaded *l, int handle) {
  int major = 0, minor = 0, shared = 0, maps = 0, counter = 0;
  CALL(cuDeviceGetAttribute, (&major, MAJOR, handle));
  CALL(cuDeviceGetAttribute, (&minor, MINOR, handle));
  CALL(cuDeviceGetAttribute, (&shared, SHARED, handle));
  int found = 10 * major + minor;
  if (k->arch_exact ? found != k->arch : found / 10 != k->arch / 10 || found < k->arch)
    return say("%s is for sm_%d%s, the GPU is sm_%d", k->name, k->arch, k->arch_exact ? "a" : "",
               found);
  if (k->shared_bytes > shared)
    return say("%s needs %d B of shared memory, the GPU has %d", k->name, k->shared_bytes, shared);
  void *module = NULL;
  CALL(cuModuleLoadData, (&module, k->cubin));
  CALL(cuModuleGetFunction, (&l->function, module, k->function));
  if (k->shared_bytes > 48 * 1024)
    CALL(cuFuncSetAttribute, (l->function, SHARED_LIMIT, k->shared_bytes));
  if (k->cluster > 8) CALL(cuFuncSetAttribute, (l->function, ANY_CLUSTER, 1));
  TRY(resident(k, l, handle));
  for (int i = 0; i < k->parameters; ++i) {
    maps |= k->parameter[i].kind == WL_MAP;
    counter |= k->parameter[i].kind == WL_COUNTER;
  }
  if (counter) TRY(zeros(&l->counters, 4 * COUNTERS));
  if (maps) TRY(zeros(&l->scratch, SCRATCH));
  return NULL;
}

/* The kernel on a device, whose context is the thread's when this gives NULL. */
static const char *enter(const wl_kernel *k, int device, wl_loaded **found) {
  if (device < 0 || device >= WL_DEVICES) return say("device %d, expected below 16", device);
  TRY(open_driver());
  wl_loaded *l = *found = &k->loaded[device];
  int handle;
  CALL(cuDeviceGet, (&handle, device));
  if (!l->context) CALL(cuDevicePrimaryCtxRetain, (&l->context, handle));
  CALL(cuCtxPushCurrent_v2, (l->context));
  const char *wrong = l->blocks ? NULL : fill(k, l, handle);
  void *left;
  if (wrong) {
    l->blocks = 0;
    cuCtxPopCurrent_v2(&left);
  }
  return wrong;
}

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b && (a < 0) != (b < 0)); }

static int64_t value(const wl_axis *axis, const int64_t *sizes) {
  int64_t stack[MOST], a, b;
  int top = 0;
  for (int i = 0; i < axis->count; ++i) {
    wl_token token = axis->tokens[i];
    if (token.op == 'd' || token.op == 'c') {
      stack[top++] = token.op == 'd' ? sizes[token.value] : token.value;
      continue;
    }
    b = stack[--top];
    a = stack[--top];
    switch (token.op) {
      case '+': a += b; break;
      case '-': a -= b; break;
      case '*': a *= b; break;
      case '/': a = floor_div(a, b); break;
      case '%': a -= floor_div(a, b) * b; break;
      case '<': a = a < b ? a : b; break;
      default: a = a > b ? a : b;
    }
    stack[top++] = a;
  }
  return stack[0];
}

static int is_empty(const wl_array *of) {
  for (int d = 0; d < of->ndim; ++d)
    if (!of->shape[d]) return 1;
  return 0;
}

static int64_t stride(const wl_array *of, int dim) {
  if (of->strides) return of->strides[dim];
  int64_t step = 1;
  for (int d = of->ndim - 1; d > dim; --d) step *= of->shape[d];
  return step;
}

static const char *bind(const wl_kernel *k, const wl_array *arrays, int64_t *sizes) {
  for (int d = 0; d < k->dims; ++d) sizes[d] = -1;
  for (int n = 0; n < k->arrays; ++n) {
    const wl_array_spec *spec = &k->array[n];
    const wl_array *of = &arrays[n];
    if (of->ndim != spec->ndim)
      return say("%s, array %s: %d dimensions, expected %d", k->name, spec->name, of->ndim,
                 spec->ndim);
    if (of->code != spec->code || of->bits != spec->bits)
      return say("%s, array %s: type code %d of %d bits, expected %d of %d", k->name, spec->name,
                 of->code, of->bits, spec->code, spec->bits);
    for (int d = 0; d < of->ndim; ++d) {
      int64_t *size = &sizes[spec->dims[d]];
      if (*size < 0) *size = of->shape[d];
      if (*size != of->shape[d] || *size > LONGEST)
        return say("%s: %s is %lld in %s, %lld before", k->name, k->dim_names[spec->dims[d]],
                   (long long)of->shape[d], spec->name, (long long)*size);
    }
    if (of->shape[of->ndim - 1] > 1 && stride(of, of->ndim - 1) != 1)
      return say("%s, array %s: last stride %lld", k->name, spec->name,
                 (long long)stride(of, of->ndim - 1));
  }
  return NULL;
}

/* Whether a written array overlaps itself: strides from the least, each above what lies below. */
static int overlaps(const wl_array *of) {
  int64_t reach = 0, last = -1;
  int last_dim = -1;
  for (int done = 0; done < of->ndim; ++done) {
    int64_t best = INT64_MAX;
    int at = -1;
    for (int d = 0; d < of->ndim; ++d) {
      int64_t step = stride(of, d) < 0 ? -stride(of, d) : stride(of, d);
      int after = step > last || (step == last && d > last_dim);
      if (of->shape[d] > 1 && after && step < best) best = step, at = d;
    }
    if (at < 0) return 0;
    if (best <= reach) return 1;
    reach += best * (of->shape[at] - 1);
    last = best, last_dim = at;
  }
  return 0;
}

/* The array that a parameter is of, if it is of one. */
static const wl_array *array_of(const wl_parameter *p, const wl_array *arrays) {
  return p->kind == WL_MAP || p->kind == WL_POINTER || p->kind == WL_STRIDE ? &arrays[p->index]
                                                                            : NULL;
}

static const char *check(const wl_kernel *k, const wl_parameter *p, const wl_array *of,
                         const int64_t *sizes) {
  if (p->kind == WL_DIM && sizes[p->index] % p->multiple)
    return say("%s: %s=%lld is no multiple of %d", k->name, k->dim_names[p->index],
               (long long)sizes[p->index], p->multiple);
  if ((p->kind != WL_MAP && p->kind != WL_POINTER) || is_empty(of)) return NULL;
  const char *name = k->array[p->index].name;
  int size = of->bits / 8, align = p->align > size ? p->align : size;
  if ((uintptr_t)of->data % align)
    return say("%s, array %s: its address must be a multiple of %d B", k->name, name, align);
  for (int d = 0; d + 1 < of->ndim; ++d) {
    int64_t pitch = stride(of, d) * size;
    if (of->shape[d] < 2) continue;
    if (pitch % p->align || (p->align >= PITCH && (pitch <= 0 || pitch >> 40)))
      return say("%s, array %s: pitch of %lld B, expected a multiple of %d", k->name, name,
                 (long long)pitch, p->align);
  }
  if (p->written && overlaps(of))
    return say("%s, array %s is written, but overlaps itself", k->name, name);
  return NULL;
}

static const char *encode(const wl_parameter *p, const wl_array *of, uint64_t scratch, void *map) {
  uint64_t dims[5] = {1, 1, 1, 1, 1}, pitches[5] = {PITCH, PITCH, PITCH, PITCH, PITCH};
  uint32_t steps[5] = {1, 1, 1, 1, 1};
  int rank = of->ndim, size = of->bits / 8, whole = 1, swizzle = 0, promotion = 0;
  void *address = (void *)(uintptr_t)(scratch + (p->written ? SCRATCH / 2 : 0));
  if (!is_empty(of)) {
    address = of->data;
    for (int d = 0; d < rank; ++d) dims[d] = (uint64_t)of->shape[rank - 1 - d];
    for (int d = 0; d + 1 < rank; ++d) {
      int64_t pitch = stride(of, rank - 2 - d) * size, legal = -floor_div(-pitch, PITCH) * PITCH;
      if (of->shape[rank - 2 - d] < 2) pitch = legal > PITCH ? legal : PITCH;
      pitches[d] = (uint64_t)pitch;
    }
  }
  for (int d = 0; d + 1 < rank; ++d) whole &= pitches[d] % SECTOR == 0;
  for (int bytes = 32; bytes <= p->swizzle; bytes *= 2) ++swizzle;
  for (int bytes = 64; whole && bytes <= p->promotion; bytes *= 2) ++promotion;
  CALL(cuTensorMapEncodeTiled, (map, p->map_type, (unsigned)rank, address, dims, pitches, p->box,
                                steps, 0, swizzle, promotion, 0));
  return NULL;
}

static const char *pack(const wl_kernel *k, wl_loaded *l, const wl_array *arrays,
                        const wl_scalar *scalars, const int64_t *sizes, unsigned char (*slots)[128]) {
  for (int i = 0; i < k->parameters; ++i) {
    const wl_parameter *p = &k->parameter[i];
    const wl_array *of = array_of(p, arrays);
    uint64_t word = 0;
    int32_t half = 0;
    switch (p->kind) {
      case WL_MAP: TRY(encode(p, of, l->scratch, slots[i])); continue;
      case WL_DIM: half = (int32_t)sizes[p->index]; break;
      case WL_SCALAR: half = scalars[p->index].i; break;
      case WL_STRIDE: word = (uint64_t)stride(of, p->dim); break;
      case WL_COUNTER: word = l->counters + 4 * (l->launches % COUNTERS); break;
      case WL_POINTER: word = is_empty(of) ? l->scratch : (uint64_t)(uintptr_t)of->data;
    }
    if (p->kind == WL_DIM || p->kind == WL_SCALAR) memcpy(slots[i], &half, 4);
    else memcpy(slots[i], &word, 8);
  }
  return NULL;
}

static const char *queue(const wl_kernel *k, wl_loaded *l, const wl_array *arrays,
                         const wl_scalar *scalars, void *stream) {
  int64_t sizes[MOST], blocks = k->cluster;
  unsigned char slots[MOST][128] __attribute__((aligned(64)));
  void *params[MOST];
  TRY(bind(k, arrays, sizes));
  for (int i = 0; i < k->parameters; ++i) {
    TRY(check(k, &k->parameter[i], array_of(&k->parameter[i], arrays), sizes));
    params[i] = slots[i];
  }
  for (int i = 0; i < k->axes; ++i) {
    int64_t count = value(&k->axis[i], sizes);
    if (count < 0) count = 0;
    if (k->axis[i].clustered) count = -floor_div(-count, k->cluster);
    blocks *= count;
  }
  if (k->persistent && blocks > l->blocks) blocks = l->blocks;
  if (blocks > LONGEST) return say("%s: %lld blocks", k->name, (long long)blocks);
  if (!blocks) return NULL;
  TRY(pack(k, l, arrays, scalars, sizes, slots));
  ++l->launches;
  attribute overlap = {DEPENDENT, 0, {1}};
  config shape = shape_of(k, blocks, stream, k->dependent ? &overlap : NULL);
  CALL(cuLaunchKernelEx, (&shape, l->function, params, NULL));
  return NULL;
}

const char *wl_launch(const wl_kernel *k, const wl_array *arrays, const wl_scalar *scalars,
                      int device, void *stream) {
  wl_loaded *l = NULL;
  void *left;
  pthread_mutex_lock(&lock);
  const char *wrong = enter(k, device, &l);
  if (!wrong) {
    wrong = queue(k, l, arrays, scalars, stream);
    cuCtxPopCurrent_v2(&left);
  }
  pthread_mutex_unlock(&lock);
  return wrong;
}
