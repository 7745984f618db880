/* Launch the kernels of this folder through the CUDA driver: C99, libcuda.so.1 found at run time,
   no CUDA toolkit. kernels.h declares them. */
#ifndef WL_LAUNCH_H
#define WL_LAUNCH_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define WL_DEVICES 16

/* An array in device memory. `code` and `bits` are DLPack's (DLDataType), `strides` count elements;
   NULL: the rows lie one behind the other. */
typedef struct {
  void *data;
  int32_t ndim;
  uint8_t code, bits;
  const int64_t *shape, *strides;
} wl_array;

typedef union {
  int32_t i;
  float f;
} wl_scalar;

/* What a launch must know, as data. An expression is in postfix order: 'd' a dimension, 'c' a
   constant, + - * / % as in Python on whole numbers, < the smaller and > the larger of two. */
typedef enum { WL_MAP, WL_DIM, WL_POINTER, WL_STRIDE, WL_COUNTER, WL_SCALAR } wl_kind;
typedef struct {
  char op;
  int64_t value;
} wl_token;
typedef struct {
  int clustered, count;
  const wl_token *tokens;
} wl_axis;
typedef struct {
  const char *name;
  uint8_t code, bits;
  int ndim;
  const int *dims;
} wl_array_spec;
typedef struct {
  wl_kind kind;
  int index; /* of the array, the dimension or the scalar */
  int dim, multiple, align, written, map_type, swizzle, promotion;
  uint32_t box[5];
} wl_parameter;
typedef struct {
  void *context, *function;
  uint64_t counters, scratch;
  unsigned launches;
  int64_t blocks;
} wl_loaded;
typedef struct {
  const char *name, *function;
  const unsigned char *cubin;
  int arch, arch_exact, threads, shared_bytes, cluster, persistent, dependent;
  int dims, arrays, scalars, axes, parameters;
  const char *const *dim_names;
  const wl_array_spec *array;
  const wl_axis *axis;
  const wl_parameter *parameter;
  wl_loaded *loaded; /* of each device */
} wl_kernel;

/* Queue a kernel on `stream` (a CUstream; NULL: the default one) of a device. NULL, or what is
   wrong, in a text that is good until this thread's next call. */
const char *wl_launch(const wl_kernel *kernel, const wl_array *arrays, const wl_scalar *scalars,
                      int device, void *stream);

#ifdef __cplusplus
}
#endif
#endif
