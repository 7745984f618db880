// A dense switch (BRX through a branch table), constant tables, divergence (BSSY/BSYNC), local arrays.
__constant__ float weights[64] = {1.f, 2.f, 3.f, 5.f, 7.f, 11.f};

extern "C" __global__ void interpret(const int* __restrict__ code, const float* __restrict__ x, float* y,
                                     int length) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float stack[16];
  int top = 0;
  float acc = x[i];
  for (int pc = 0; pc < length; ++pc) {
    switch (code[pc]) {
      case 0: acc += weights[pc & 63]; break;
      case 1: acc *= acc; break;
      case 2: stack[top++ & 15] = acc; break;
      case 3: acc = stack[--top & 15]; break;
      case 4: acc = __expf(acc); break;
      case 5: acc = acc > 0.f ? acc : -acc; break;
      case 6: acc -= stack[(top + 3) & 15]; break;
      case 7: acc = __sinf(acc); break;
      case 8: if (acc > 4.f) pc += 2; break;
      case 9: y[i] = acc; break;
      case 10: acc = __shfl_xor_sync(__activemask(), acc, 1); break;
      default: return;
    }
  }
  y[i] = acc;
}

extern "C" __global__ void collatz(const unsigned* __restrict__ x, unsigned* steps, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned value = x[i], count = 0;
  while (value != 1) {
    if (value & 1) {
      value = 3 * value + 1;
      if (value > 1u << 30) break;
    } else {
      value >>= __ffs(value) - 1;
    }
    ++count;
  }
  __syncwarp();
  steps[i] = count;
}
