"""CUDA sources that exercise the runtime on a real GPU: one right kernel and its planted faults."""

from __future__ import annotations

from warploom.runtime import Buffer, LaunchSpec, Null, Pointer, Scalar, TensorMap
from warploom.runtime.nvrtc import compile_source

# y = x ^ 0x3C byte by byte; BEHAVE plants a fault, ROUNDS makes it slower.
FLIP = r"""
#ifndef BEHAVE
#define BEHAVE 0
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
extern "C" __global__ void flip(const uint4* x, uint4* y, int quads, float unused,
                                void* scratch, void* profile) {
    int step = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < quads; i += step) {
        uint4 v = x[i];
#pragma unroll 1
        for (int round = 0; round < 2 * ROUNDS - 1; ++round) {
            v.x ^= 0x3C3C3C3Cu; v.y ^= 0x3C3C3C3Cu; v.z ^= 0x3C3C3C3Cu; v.w ^= 0x3C3C3C3Cu;
            asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
        }
#if BEHAVE == 1  /* one wrong bit in the last element */
        if (i == quads - 1) v.w ^= 1u << 31;
#elif BEHAVE == 2  /* never ends */
        for (;;) asm volatile("nanosleep.u32 1000;");
#elif BEHAVE == 3  /* illegal address */
        if (i == 0) *(volatile int*)16 = 1;
#elif BEHAVE == 4  /* writes past the end of y */
        if (i == quads - 1) y[quads] = v;
#elif BEHAVE == 5  /* leaves the last element unwritten */
        if (i == quads - 1) continue;
#endif
        y[i] = v;
    }
}
"""

# Copies x to y through TMA, one 64 x 8 box a block; checks tensor maps and by-value parameters.
TMA_COPY = r"""
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void tma_copy(const __grid_constant__ Map map, unsigned short* y) {
    __shared__ alignas(1024) unsigned short tile[64 * 8];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
    unsigned to = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(at), "r"(64 * 8 * 2) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];"
                     :: "r"(to), "l"(&map), "r"(0), "r"((int)blockIdx.x * 8), "r"(at) : "memory");
    }
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                     " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at) : "memory");
    for (int i = threadIdx.x; i < 64 * 8; i += blockDim.x) y[blockIdx.x * 512 + i] = tile[i];
}
"""

# Each block writes its rank and the size of its cluster.
CLUSTER_RANK = r"""
extern "C" __global__ void cluster_rank(const int* x, int* y) {
    unsigned rank, size;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) y[blockIdx.x] = (int)(rank + 100 * size) + 0 * x[0];
}
"""

# Reads `quads` 16-byte words again and again from every block; for the L2 bandwidth.
L2_READ = r"""
extern "C" __global__ void l2_read(const uint4* x, unsigned* y, int quads, int times) {
    unsigned sum = 0;
    for (int t = 0; t < times; ++t) {
        int step = gridDim.x * blockDim.x;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < quads; i += step) {
            uint4 v;
            asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x + i));
            sum += v.x ^ v.y ^ v.z ^ v.w;
        }
    }
    y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""

RIGHT, WRONG, HANG, FAULT, WILD, UNWRITTEN = range(6)


def flip_cubin(arch: str, behave: int = RIGHT, rounds: int = 1) -> bytes:
    """The flip kernel with a planted behaviour and so many redundant rounds."""
    options = (f"-DBEHAVE={behave}", f"-DROUNDS={rounds}")
    return compile_source(FLIP, arch, options)


def flip_spec(quads: int, blocks: int, dtype: str = "bf16") -> LaunchSpec:
    """A launch of flip on `quads` 16-byte words, with the two null pointers Triton appends."""
    count = quads * (2 if dtype == "fp64" else 4 if dtype == "fp32" else 8)
    buffers = (Buffer("x", (count // 64, 64), dtype, "in"), Buffer("y", (count,), dtype, "out"))
    arguments = (
        Pointer("x"), Pointer("y"), Scalar("i32", quads), Scalar("fp32", 1.5), Null(), Null(),
    )  # fmt: skip
    return LaunchSpec("flip", (blocks, 1, 1), (256, 1, 1), buffers, arguments)


def tma_spec(rows: int = 1024) -> LaunchSpec:
    """A launch of tma_copy on [rows, 64] bf16."""
    buffers = (Buffer("x", (rows, 64), "bf16", "in"), Buffer("y", (rows, 64), "bf16", "out"))
    arguments = (TensorMap("x", (64, rows), (128,), (64, 8)), Pointer("y"))
    return LaunchSpec("tma_copy", (rows // 8, 1, 1), (128, 1, 1), buffers, arguments)


def cluster_spec(size: int, blocks: int = 64) -> LaunchSpec:
    """A launch of cluster_rank in clusters of `size` blocks."""
    buffers = (Buffer("x", (16,), "i32", "in"), Buffer("y", (blocks,), "i32", "out"))
    return LaunchSpec(
        "cluster_rank",
        (blocks, 1, 1),
        (32, 1, 1),
        buffers,
        (Pointer("x"), Pointer("y")),
        cluster=(size, 1, 1),
    )


def l2_spec(quads: int, blocks: int, times: int) -> LaunchSpec:
    """A launch of l2_read: `times` passes over `quads` 16-byte words."""
    buffers = (Buffer("x", (quads * 4,), "fp32", "in"), Buffer("y", (blocks * 512,), "u32", "out"))
    arguments = (Pointer("x"), Pointer("y"), Scalar("i32", quads), Scalar("i32", times))
    return LaunchSpec("l2_read", (blocks, 1, 1), (512, 1, 1), buffers, arguments)
