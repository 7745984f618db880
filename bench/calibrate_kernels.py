"""CUDA source of the micro-benchmarks behind the `h200` cost table, as text.

Every kernel reads the SM's clock itself and writes cycle counts, so launch overhead and the GPU's
frequency do not enter. A spin on an mbarrier gives up after a bounded number of polls and leaves
the mark `STUCK`; nothing here can hang a device. Used by bench/calibrate_schedule.py.
"""

from __future__ import annotations

STUCK = 0xFFFFFFFF
COLUMNS = (64, 128, 256)
BATCHES = (1, 2, 4, 8, 16)

HEADER = """
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { u64 word[16]; };
#define DEV __device__ __forceinline__
DEV u32 now() { u32 c; asm volatile("mov.u32 %0, %%clock;" : "=r"(c) :: "memory"); return c; }
DEV u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void bar_sync(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
DEV void bar_arrive(int id, int n) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory");
}
DEV void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
DEV void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
DEV void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(bar), "r"(bytes) : "memory");
}
DEV bool wait(u32 bar, u32 parity) {  // false: gave up
  for (int polls = 0; polls < 200000; ++polls) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    if (done) return true;
  }
  return false;
}
DEV void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void bulk_load(u32 to, const char* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEV void tensor_load(u32 to, const Map* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
DEV u32 shared_base(const void* raw) { return (address(raw) + 1023u) & ~1023u; }
"""


def source() -> str:
    """The whole file."""
    parts = [HEADER]
    for columns in COLUMNS:
        for batch in BATCHES:
            parts += [wgmma(columns, batch, registers=r) for r in (False, True)]
    parts += [lane_kernel(name, *op) for name, op in LANE_OPS.items()]
    for columns in COLUMNS:
        parts += [tile_kernel(name, body, columns) for name, body in TILE_OPS.items()]
    return "\n".join([*parts, SHARED, BULK, SYNC, SETMAXNREG])


def wgmma(columns: int, batch: int, *, registers: bool) -> str:
    """`batch` products m64n{columns}k16 issued back to back by each warp group.

    K-major operands in 128-byte swizzle, 64 deep, as kernels hold them; out for each warp
    group: cycles of `reps` batches, each waited for, and cycles until they were issued.
    """
    count = columns // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    if registers:
        operands = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db)'
        tail = "1, 1, 1, 0"
    else:
        operands = f"%{count}, %{count + 1}"
        inputs = '"l"(da), "l"(db)'
        tail = "1, 1, 1, 0, 0"
    steps = "\n".join(
        f"    {{ u64 da = first_a + {(s // 4 % 2 * 8192 + s % 4 * 32) >> 4};"
        f" u64 db = first_b + {(s // 4 % 2 * columns * 128 + s % 4 * 32) >> 4}; (void)da;\n"
        f'      asm volatile("{shape} {{{accumulators}}}, {operands}, {tail};"\n'
        f"                   : {outputs} : {inputs}); }}"
        for s in range(batch)
    )
    return f"""
extern "C" __global__ void __launch_bounds__(256)
wgmma_{"rs" if registers else "ss"}_{columns}_{batch}(u32* out, int reps, u32 base) {{
  // The base of shared memory comes in as a parameter, so that descriptors stay out of the loop.
  extern __shared__ unsigned char raw[];
  if (base != shared_base(raw)) {{ out[0] = 0xFFFFFFFFu; return; }}
  for (u32 at = threadIdx.x * 4; at < {2 * 8192 + 2 * columns * 128}; at += blockDim.x * 4)
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(base + at), "r"(0) : "memory");
  async_fence();
  __syncthreads();
  // Descriptor: address >> 4, leading 1, stride 1024 B, 128-byte swizzle (PTX ISA, wgmma).
  const u64 layout = (1ull << 62) | (64ull << 32) | (1ull << 16);
  u64 first_a = layout | ((base & 0x3FFFF) >> 4);
  u64 first_b = layout | (((base + 16384) & 0x3FFFF) >> 4);
  u32 a[4] = {{(u32)reps >> 30, (u32)reps >> 29, (u32)reps >> 30, (u32)reps >> 29}};
  float d[{count}];
#pragma unroll
  for (int i = 0; i < {count}; ++i) d[i] = 0.f;
  (void)a;
  // Twice: the whole loop by two clock reads, then the time until each batch is issued.
  __syncthreads();
  u32 start = now();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{steps}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }}
  u32 whole = now() - start, issuing = 0;
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {{
    u32 begin = now();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{steps}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    issuing += now() - begin;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }}
  if (threadIdx.x % 128 == 0) {{
    out[threadIdx.x / 64] = whole;
    out[threadIdx.x / 64 + 1] = issuing;
  }}
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < {count}; ++i) sum += d[i];
  if (sum == 12345.f) out[0] = 0;
}}
"""


# asm text on operand %0 (read and written) and a constant %1, and the operand's letter.
LANE_OPS: dict[str, tuple[str, str]] = {
    "ex2": ("ex2.approx.ftz.f32 %0, %0;", "f"),
    "ffma": ("fma.rn.f32 %0, %0, %1, %1;", "f"),
    "fadd": ("add.f32 %0, %0, %1;", "f"),
    "fmul": ("mul.f32 %0, %0, %1;", "f"),
    "fmax": ("max.f32 %0, %0, %1;", "f"),
    "pack": ("{ .reg .b32 p; cvt.rn.bf16x2.f32 p, %0, %1; mov.b32 %0, p; }", "f"),
    "shuffle": ("shfl.sync.bfly.b32 %0, %0, 1, 31, 0xffffffff;", "r"),
    "select": ("{ .reg .pred p; setp.lt.f32 p, %0, %1; selp.f32 %0, %1, %0, p; }", "f"),
}


def lane_kernel(name: str, text: str, letter: str) -> str:
    """Throughput with 8 chains a thread, latency with 1; out: begin and end of each warp."""
    kind = "float" if letter == "f" else "u32"
    one = f'asm volatile("{text}" : "+{letter}"(x[INDEX]) : "{letter}"(c));'

    def chain(chains: int) -> str:
        return " ".join(one.replace("INDEX", str(i)) for i in range(chains))

    return "\n".join(
        f"""
extern "C" __global__ void lane_{name}_{chains}(u32* out, int reps) {{
  {kind} x[{chains}], c = ({kind})(threadIdx.x & 1);
#pragma unroll
  for (int i = 0; i < {chains}; ++i) x[i] = ({kind})(threadIdx.x + i);
  __syncthreads();
  u32 begin = now();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {{
#pragma unroll
    for (int u = 0; u < {64 // chains}; ++u) {{ {chain(chains)} }}
  }}
  u32 end = now();
  {kind} sum = 0;
#pragma unroll
  for (int i = 0; i < {chains}; ++i) sum += x[i];
  if (threadIdx.x % 32 == 0) {{
    out[threadIdx.x / 16] = begin;
    out[threadIdx.x / 16 + 1] = end;
  }}
  if (sum == ({kind})12345678) out[0] = 0;
}}"""
        for chains in (1, 8)
    )


# One operation on the two row parts a thread holds of a 64-row tile (PER values: half of each
# row's part), then a step that makes the next repetition wait for the result.
TILE_OPS = {
    "row_max": """
      for (int h = 0; h < 2; ++h) {
        float m[4];
        for (int j = 0; j < 4; ++j) m[j] = fmaxf(carried[h], x[h * HALF + j]);
        for (int i = 4; i < HALF; ++i) m[i % 4] = fmaxf(m[i % 4], x[h * HALF + i]);
        float all = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
        all = fmaxf(all, __shfl_xor_sync(0xffffffff, all, 1));
        carried[h] = fmaxf(all, __shfl_xor_sync(0xffffffff, all, 2));
      }""",
    "row_sum": """
      for (int h = 0; h < 2; ++h) {
        float m[4];
        for (int j = 0; j < 4; ++j) m[j] = carried[h] + x[h * HALF + j];
        for (int i = 4; i < HALF; ++i) m[i % 4] += x[h * HALF + i];
        float all = (m[0] + m[1]) + (m[2] + m[3]);
        all += __shfl_xor_sync(0xffffffff, all, 1);
        carried[h] = all + __shfl_xor_sync(0xffffffff, all, 2);
      }""",
    "row_sum_local": """
      for (int h = 0; h < 2; ++h) {
        float m[4];
        for (int j = 0; j < 4; ++j) m[j] = carried[h] + x[h * HALF + j];
        for (int i = 4; i < HALF; ++i) m[i % 4] += x[h * HALF + i];
        carried[h] = (m[0] + m[1]) + (m[2] + m[3]);
      }""",
    "scale_shift": """
      for (int i = 0; i < PER; ++i)
        x[i] = __fmaf_rn(x[i], scale, carried[i / HALF]);
      carried[0] = x[HALF - 1]; carried[1] = x[PER - 1];""",
    "exp2": """
      for (int i = 0; i < PER; ++i)
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
      { float swap = x[0]; x[0] = x[PER - 1]; x[PER - 1] = swap; }""",
    "rescale": """
      for (int i = 0; i < PER; ++i) x[i] *= carried[i / HALF];
      carried[0] = x[HALF - 1]; carried[1] = x[PER - 1];""",
    "convert": """
      for (int i = 0; i < PER / 2; ++i) {
        u32 p;
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(x[2*i]), "f"(x[2*i+1]));
        x[2*i] = __uint_as_float(p);
      }
      { float swap = x[0]; x[0] = x[PER - 2]; x[PER - 2] = swap; }""",
}


def tile_kernel(name: str, body: str, columns: int) -> str:
    """One tile operation, 64 rows by `columns`, by each warp group; out: begin, end a warp."""
    loops = body.replace("for (", "\n#pragma unroll\n      for (")
    return f"""
#define PER {columns // 2}
#define HALF {columns // 4}
extern "C" __global__ void __launch_bounds__(256) tile_{name}_{columns}(u32* out, int reps) {{
  float x[PER], carried[2] = {{(float)threadIdx.x, (float)threadIdx.x}};
  float scale = (float)(reps >> 30);
#pragma unroll
  for (int i = 0; i < PER; ++i) x[i] = (float)((threadIdx.x * 7 + i * 13) & 63) - 64.f;
  (void)scale;
  __syncthreads();
  u32 begin = now();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {{
    {{ {loops}
    }}
    asm volatile("" :: "f"(carried[0]), "f"(carried[1]) : "memory");
  }}
  u32 end = now();
  float sum = carried[0] + carried[1];
#pragma unroll
  for (int i = 0; i < PER; ++i) sum += x[i];
  if (threadIdx.x % 32 == 0) {{
    out[threadIdx.x / 16] = begin;
    out[threadIdx.x / 16 + 1] = end;
  }}
  if (sum == 12345.25f) out[0] = 0;
}}
#undef PER
#undef HALF
"""


SHARED = """
extern "C" __global__ void smem_read(u32* out, int reps) {
  extern __shared__ unsigned char raw[];
  u32 at = shared_base(raw) + threadIdx.x * 16;
  u32 sum = 0;
  __syncthreads();
  u32 begin = now();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      u32 a, b, c, d;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at + u * 16384) : "memory");
      sum += a ^ b ^ c ^ d;
    }
  }
  u32 end = now();
  if (threadIdx.x % 32 == 0) { out[threadIdx.x / 16] = begin; out[threadIdx.x / 16 + 1] = end; }
  if (sum == 12345u) out[0] = 0;
}
extern "C" __global__ void smem_write(u32* out, int reps) {
  extern __shared__ unsigned char raw[];
  u32 at = shared_base(raw) + threadIdx.x * 16;
  __syncthreads();
  u32 begin = now();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {
#pragma unroll
    for (int u = 0; u < 4; ++u)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"
                   :: "r"(at + u * 16384), "r"(r) : "memory");
  }
  u32 end = now();
  if (threadIdx.x % 32 == 0) { out[threadIdx.x / 16] = begin; out[threadIdx.x / 16 + 1] = end; }
}
extern "C" __global__ void smem_latency(u32* out, int reps) {
  extern __shared__ unsigned char raw[];
  u32 at = shared_base(raw);
  asm volatile("st.shared.u32 [%0], %0;" :: "r"(at) : "memory");
  __syncthreads();
  u32 begin = now();
#pragma unroll 1
  for (int r = 0; r < reps; ++r)
    asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at) :: "memory");
  u32 end = now();
  out[0] = begin;
  out[1] = end;
  if (at == 1u) out[0] = 0;
}
"""

BULK = """
// One load at a time: out[r] is issue to visible. slot r reads data + r * stride (+ per block).
extern "C" __global__ void bulk_latency(u32* out, const char* data, u64 stride, u32 bytes,
                                        int reps) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 full;
  u32 bar = address(&full), to = shared_base(raw);
  barrier_init(bar, 1);
  async_fence();
  for (int r = 0; r < reps; ++r) {
    u32 begin = now();
    expect(bar, bytes);
    bulk_load(to, data + r * stride, bytes, bar);
    u32 issued = now();
    bool good = wait(bar, r & 1);
    u32 end = now();
    out[2 * r] = issued - begin;
    out[2 * r + 1] = good ? end - begin : 0xFFFFFFFFu;
    if (!good) return;
  }
}
extern "C" __global__ void tensor_latency(const __grid_constant__ Map map, u32* out, u32 bytes,
                                          int step, int reps) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 full;
  u32 bar = address(&full), to = shared_base(raw);
  barrier_init(bar, 1);
  async_fence();
  for (int r = 0; r < reps; ++r) {
    u32 begin = now();
    expect(bar, bytes);
    tensor_load(to, &map, 0, r * step, bar);
    u32 issued = now();
    bool good = wait(bar, r & 1);
    u32 end = now();
    out[2 * r] = issued - begin;
    out[2 * r + 1] = good ? end - begin : 0xFFFFFFFFu;
    if (!good) return;
  }
}
// A ring of 4 slots kept full: cycles of `reps` loads after the first round; one block an SM.
extern "C" __global__ void tensor_stream(const __grid_constant__ Map map, u32* out, u32 bytes,
                                         int step, int wrap, int reps) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 full[4];
  u32 to = shared_base(raw);
  for (int s = 0; s < 4; ++s) barrier_init(address(&full[s]), 1);
  async_fence();
  int first = (int)blockIdx.x * 5;
  for (int s = 0; s < 4; ++s) {
    expect(address(&full[s]), bytes);
    tensor_load(to + s * bytes, &map, 0, (first + s) % wrap * step, address(&full[s]));
  }
  u32 begin = now();
  for (int r = 0; r < reps; ++r) {
    u32 bar = address(&full[r & 3]);
    if (!wait(bar, (r >> 2) & 1)) { out[blockIdx.x] = 0xFFFFFFFFu; return; }
    expect(bar, bytes);
    tensor_load(to + (r & 3) * bytes, &map, 0, (first + r + 4) % wrap * step, bar);
  }
  out[blockIdx.x] = now() - begin;
  for (int r = reps; r < reps + 4; ++r) wait(address(&full[r & 3]), (r >> 2) & 1);
}
// Store of a staged buffer: out: issue, source readable again, written.
extern "C" __global__ void bulk_store(u32* out, char* data, u64 stride, u32 bytes, int reps) {
  extern __shared__ unsigned char raw[];
  u32 from = shared_base(raw);
  for (int r = 0; r < reps; ++r) {
    u32 begin = now();
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(data + r * stride), "r"(from), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    u32 issued = now();
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    u32 read = now();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    u32 end = now();
    out[3 * r] = issued - begin;
    out[3 * r + 1] = read - begin;
    out[3 * r + 2] = end - begin;
  }
}
"""

SYNC = """
// Two warp groups hand a token back and forth `reps` times: half a round trip is one way.
extern "C" __global__ void __launch_bounds__(256) mbarrier_pingpong(u32* out, int reps, int all) {
  __shared__ alignas(8) u64 bars[2];
  u32 ping = address(&bars[0]), pong = address(&bars[1]);
  if (threadIdx.x == 0) { barrier_init(ping, all ? 128 : 1); barrier_init(pong, all ? 128 : 1); }
  async_fence();
  __syncthreads();
  bool first = threadIdx.x < 128, speaks = all || threadIdx.x % 128 == 0, good = true;
  u32 begin = now();
  for (int r = 0; r < reps && good; ++r) {
    if (first) {
      if (speaks) arrive(ping);
      good = wait(pong, r & 1);
    } else {
      good = wait(ping, r & 1);
      __syncwarp();
      if (speaks) arrive(pong);
    }
  }
  u32 end = now();
  if (threadIdx.x == 0) { out[0] = good ? end - begin : 0xFFFFFFFFu; }
}
// arrive and wait by the same group: what a barrier costs that is already complete.
extern "C" __global__ void mbarrier_alone(u32* out, int reps) {
  __shared__ alignas(8) u64 bars[1];
  u32 bar = address(&bars[0]);
  if (threadIdx.x == 0) barrier_init(bar, 128);
  async_fence();
  __syncthreads();
  bool good = true;
  u32 begin = now();
  for (int r = 0; r < reps && good; ++r) { arrive(bar); good = wait(bar, r & 1); }
  u32 end = now();
  if (threadIdx.x == 0) { out[0] = good ? end - begin : 0xFFFFFFFFu; }
}
extern "C" __global__ void __launch_bounds__(256) named_pingpong(u32* out, int reps) {
  bool first = threadIdx.x < 128;
  __syncthreads();
  u32 begin = now();
  for (int r = 0; r < reps; ++r) {
    if (first) { bar_arrive(1, 256); bar_sync(2, 256); }
    else { bar_sync(1, 256); bar_arrive(2, 256); }
  }
  u32 end = now();
  if (threadIdx.x == 0) out[0] = end - begin;
}
// A tile in registers crosses: n x 16 bytes a thread through shared memory and a named barrier.
template <int N> DEV void handoff(u32* out, int reps) {
  extern __shared__ unsigned char raw[];
  u32 mine = shared_base(raw) + threadIdx.x % 128 * 16;
  bool first = threadIdx.x < 128;
  u32 x[4 * N];
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) x[i] = threadIdx.x + i;
  __syncthreads();
  u32 begin = now();
#pragma unroll 1
  for (int r = 0; r < 2 * reps; ++r) {
    bool writes = first == ((r & 1) == 0);
    u32 slot = mine + (r & 1) * (N * 2048);
    if (writes) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(slot + i * 2048),
                     "r"(x[4*i]), "r"(x[4*i+1]), "r"(x[4*i+2]), "r"(x[4*i+3]) : "memory");
      bar_arrive(1 + (r & 1), 256);
    } else {
      bar_sync(1 + (r & 1), 256);
#pragma unroll
      for (int i = 0; i < N; ++i)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[4*i]), "=r"(x[4*i+1]),
                     "=r"(x[4*i+2]), "=r"(x[4*i+3]) : "r"(slot + i * 2048) : "memory");
    }
  }
  u32 end = now();
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) sum += x[i];
  if (threadIdx.x == 0) out[0] = end - begin;
  if (sum == 12345u) out[0] = 0;
}
extern "C" __global__ void __launch_bounds__(256) handoff_1(u32* o, int r) { handoff<1>(o, r); }
extern "C" __global__ void __launch_bounds__(256) handoff_4(u32* o, int r) { handoff<4>(o, r); }
extern "C" __global__ void __launch_bounds__(256) handoff_8(u32* o, int r) { handoff<8>(o, r); }
extern "C" __global__ void __launch_bounds__(256) handoff_16(u32* o, int r) { handoff<16>(o, r); }
"""

SETMAXNREG = """
// Group 0 gives registers away and takes them back; out: dec, inc in cycles, uncontended.
extern "C" __global__ void __launch_bounds__(384, 1) setmaxnreg_pair(u32* out, int reps) {
  if (threadIdx.x < 128) {
    for (int r = 0; r < reps; ++r) {
      u32 begin = now();
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;" ::: "memory");
      u32 given = now();
      asm volatile("setmaxnreg.inc.sync.aligned.u32 168;" ::: "memory");
      u32 taken = now();
      if (threadIdx.x == 0) { out[2 * r] = given - begin; out[2 * r + 1] = taken - given; }
    }
  }
}
// Group 1 asks for what group 0 has not given yet: begin of dec, end of dec, end of inc.
extern "C" __global__ void __launch_bounds__(384, 1) setmaxnreg_wait(u32* out) {
  if (threadIdx.x < 128) {
    u32 start = now();
    while (now() - start < 4000) {}
    u32 begin = now();
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;" ::: "memory");
    u32 end = now();
    if (threadIdx.x == 0) { out[0] = begin; out[1] = end; }
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;" ::: "memory");
    u32 end = now();
    if (threadIdx.x == 128) out[2] = end;
  }
}
"""
