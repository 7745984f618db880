// Double precision: DFMA, DADD, DSETP, DMMA, MUFU.RCP64H, conversions.
extern "C" __global__ void nbody(const double4* __restrict__ bodies, double3* force, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const double4 me = bodies[i];
  double3 sum = {0, 0, 0};
  for (int j = 0; j < n; ++j) {
    const double4 other = bodies[j];
    const double dx = other.x - me.x, dy = other.y - me.y, dz = other.z - me.z;
    const double square = dx * dx + dy * dy + dz * dz + 1e-9;
    const double inverse = rsqrt(square);
    const double scale = square < 100.0 ? other.w * inverse * inverse * inverse : 0.0;
    sum.x += dx * scale;
    sum.y += dy * scale;
    sum.z += dz * scale;
  }
  force[i] = sum;
}

extern "C" __global__ void dmma(const double* __restrict__ a, const double* __restrict__ b, double* c,
                                int k) {
  const int lane = threadIdx.x;
  double c0 = 0, c1 = 0;
  for (int k0 = 0; k0 < k; k0 += 4) {
    const double av = a[(lane / 4) * k + k0 + lane % 4], bv = b[(lane / 4) * k + k0 + lane % 4];
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+d"(c0), "+d"(c1)
                 : "d"(av), "d"(bv));
  }
  c[(lane / 4) * 8 + (lane % 4) * 2] = c0;
  c[(lane / 4) * 8 + (lane % 4) * 2 + 1] = c1;
}

extern "C" __global__ void convert(const float* __restrict__ x, double* y, long long* z, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const double v = x[i];
  y[i] = exp(v) / (v + 2.0);
  z[i] = static_cast<long long>(v * 1e10);
}
