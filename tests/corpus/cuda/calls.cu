// Function calls and slow paths: CALL.REL, RET, indirect calls, division, square root, recursion.
__noinline__ __device__ float horner(float x, const float* c) {
  float y = c[0];
  for (int i = 1; i < 8; ++i) y = y * x + c[i];
  return y;
}

__noinline__ __device__ float newton(float x, float y) { return 0.5f * (y + x / y); }

__noinline__ __device__ int depth(int n) { return n < 2 ? 1 : depth(n / 2) + depth(n - n / 2); }

typedef float (*Unary)(float, float);
__device__ Unary table[2] = {newton, newton};

extern "C" __global__ void slow_paths(const float* __restrict__ x, const float* __restrict__ c,
                                      float* y, int n, int d) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float v = x[i];
  float r = horner(v, c) / (v + 1.5f) + sqrtf(v) + 1.0f / sqrtf(v * v + 2.f);
  r += static_cast<float>((i * 7) / d + (i * 7) % d);
  r += static_cast<float>((1ll * i * n) / (d + 3ll));
  y[i] = __frcp_rn(r) + fmodf(v, 3.f) + powf(v, 1.3f) + sinf(v * 1e6f);
}

extern "C" __global__ void indirect(const float* __restrict__ x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = table[i & 1](x[i], 1.f) + depth(i & 7);
}
