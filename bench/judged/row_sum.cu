// Sums of rows, a warp a row; `fault` plants one.
extern "C" __global__ void row_sum(const float* x, float* y, int rows, int n, int fault) {
  __shared__ float parts[128];
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows && fault != 1) return;                       // 1: rows of nobody are written
  int from = row < rows ? row : 0, end = fault == 2 ? n / 32 * 32 : n;  // 2: no tail
  float total = fault == 3 ? y[from] : 0.f;                    // 3: adds to what was there
  for (int i = lane; i < end; i += 32) total += x[from * n + i];
  parts[threadIdx.x] = total;
  if (fault != 4) __syncwarp();                                // 4: neighbours are not awaited
  if (fault == 5) { if (lane == 0) y[row] = total; return; }   // 5: one lane's part
  if (lane) return;
  total = 0.f;
  for (int i = 0; i < 32; ++i) total += parts[threadIdx.x + i];
  y[row] = total;
}
