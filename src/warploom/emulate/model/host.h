// The CUDA runtime as a host program needs it to launch kernels on the emulated machine.
#pragma once
#include "cuda.h"

#include <chrono>
#include <map>
#include <string>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 10 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
typedef int cudaStream_t, CUdevice;
typedef std::chrono::steady_clock::time_point* cudaEvent_t;
struct cudaDeviceProp { char name[256]; int multiProcessorCount, major, minor;
    size_t sharedMemPerBlockOptin; };
namespace host {
const int PROCESSORS = 4;  // blocks side by side
inline std::map<const void*, unsigned>& allowed() { static std::map<const void*, unsigned> of;
    return of; }
inline unsigned seed() { const char* text = getenv("EMULATE_SEED"); return text
    ? unsigned(atoi(text)) : 1; }
inline int& launches() { static int count = 0; return count; }
// A program that ends well without a launch has shown nothing of its kernels.
inline int watch() {
  return on_exit([](int status, void*) {
    if (status || launches()) return;
    fflush(stdout);
    fprintf(stderr, "\nFAULT launch: the program ended and launched no kernel\n");
    _Exit(86);
  }, nullptr);
}
// A fault ends the program: the reason on the error output, after a mark.
inline void run(const std::function<void()>& body, machine::Launch how) {
  launches()++;
  how.seed = seed();
  how.together = PROCESSORS;
  const char* fault = machine::launch(body, how);
  if (!fault) return;
  fflush(stdout);
  fprintf(stderr, "\nFAULT %s\n", fault);
  fflush(stderr);
  _Exit(86);
}
}  // namespace host

// name<<<grid, block, shared>>>(arguments) is written name * cuda_launch(...) % cuda_arguments(...).
struct Configured { machine::Launch how; };
inline Configured cuda_launch(dim3 grid, dim3 block, size_t shared = 0) {
  Configured one;
  one.how.grid = grid, one.how.block = block, one.how.shared = unsigned(shared),
      one.how.cluster = 0;
  return one;
}
template <class... A> std::tuple<A...> cuda_arguments(A... given) {
    return std::tuple<A...>(given...); }
template <class... P> struct Ready { void (*kernel)(P...); Configured one; };
template <class... P> Ready<P...> operator*(void (*kernel)(P...), Configured one) { return {kernel,
    one}; }
template <class... P, class... A> void operator%(Ready<P...> what, const std::tuple<A...>& given) {
  const auto allowed = host::allowed().find((const void*)what.kernel);
  const unsigned most = allowed == host::allowed().end() ? 48 << 10 : allowed->second;
  if (what.one.how.shared > most) {
    fprintf(stderr, "\nFAULT launch: %u bytes of dynamic shared memory, and cudaFuncSetAttribute allows %u\n", what.one.how.shared, most);
    _Exit(86);
  }
  host::run([&] { std::apply([&](auto&... one) { what.kernel(one...); }, given); }, what.one.how);
}

template <class T> cudaError_t cudaMalloc(T** p, size_t bytes) {
  *p = static_cast<T*>(machine::allocate(bytes));
  return *p ? cudaSuccess : cudaErrorInvalidValue;
}
template <class T> cudaError_t cudaMallocManaged(T** p, size_t bytes) { return cudaMalloc(p,
    bytes); }
inline cudaError_t cudaFree(void* p) { return !p || machine::release(p) ? cudaSuccess
    : cudaErrorInvalidValue; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes,
    cudaMemcpyKind) { memcpy(to, from, bytes); return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
    cudaStream_t = 0) { memcpy(to, from, bytes); return cudaSuccess; }
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) { memset(to, value, bytes);
    return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error"
    : "error"; }
inline cudaError_t cudaEventCreate(cudaEvent_t* e) {
    *e = new std::chrono::steady_clock::time_point; return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t e,
    cudaStream_t = 0) { *e = std::chrono::steady_clock::now(); return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = std::chrono::duration<float, std::milli>(*b - *a).count();
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {"emulated sm_90", host::PROCESSORS, 9, 0, 232448};
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr,
    int) { *value = host::PROCESSORS; return cudaSuccess; }
template <class... P> cudaError_t cudaFuncSetAttribute(void (*kernel)(P...),
    cudaFuncAttribute what, int value) {
  if (what == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > 232448) return cudaErrorInvalidValue;
    host::allowed()[(const void*)kernel] = unsigned(value);
  }
  return cudaSuccess;
}

// ---- cudaLaunchKernelEx
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct { dim3 clusterDim; int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes = 0;
    cudaStream_t stream = 0; cudaLaunchAttribute* attrs = nullptr; unsigned numAttrs = 0; };
template <class... P, class... A> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
    void (*kernel)(P...), A... given) {
  Configured one = cuda_launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      const dim3& c = config->attrs[i].val.clusterDim;
      one.how.cluster = int(c.x * c.y * c.z);
    }
  kernel * one % cuda_arguments(P(given)...);
  return cudaSuccess;
}

// ---- tensor maps
typedef unsigned long long cuuint64_t;
typedef unsigned cuuint32_t;
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT16,
    CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_DATA_TYPE_INT32, CU_TENSOR_MAP_DATA_TYPE_UINT64,
        CU_TENSOR_MAP_DATA_TYPE_INT64, CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
                CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
inline CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
inline CUresult cuGetErrorString(CUresult, const char** text) { *text = "an invalid tensor map";
    return CUDA_SUCCESS; }
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
    void* address,
                                       const cuuint64_t* dims, const cuuint64_t* pitches,
                                           const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave,
                                           CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  static const int kinds[] = {-1, -1, -1, machine::kInt32, -1, -1, machine::kFp16, machine::kFp32,
      -1, machine::kBf16};
  machine::TensorView view{};
  view.address = static_cast<unsigned char*>(address);
  view.rank = int(rank), view.element = bytes[type], view.kind = kinds[type];
  view.width = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle;
  if (rank < 1 || rank > 5 || uintptr_t(address) % 16) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned d = 0; d < 5; ++d) {
    view.dims[d] = d < rank ? int(dims[d]) : 1;
    view.box[d] = d < rank ? int(box[d]) : 1;
    if (d < rank && (box[d] < 1 || box[d] > 256 || dims[d] < 1 ||
        steps[d] != 1)) return CUDA_ERROR_INVALID_VALUE;
    view.pitches[d] = d && d < rank ? (long long)pitches[d - 1] : 0;
    if (view.pitches[d] % 16) return CUDA_ERROR_INVALID_VALUE;
  }
  const int line = view.box[0] * view.element;
  if (line % 16 || (view.width && line > view.width)) return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  memcpy(map, &view, sizeof view);
  return CUDA_SUCCESS;
}
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault = 0 };
inline cudaError_t cudaGetDriverEntryPoint(const char*, void** entry, unsigned long long,
    cudaDriverEntryPointQueryResult* = nullptr) {
  *entry = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return cudaSuccess;
}
typedef decltype(&cuTensorMapEncodeTiled) PFN_cuTensorMapEncodeTiled;
typedef PFN_cuTensorMapEncodeTiled PFN_cuTensorMapEncodeTiled_v12000;
