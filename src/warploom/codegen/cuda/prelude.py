"""The device functions that emitted kernels are written with: one PTX instruction each, no headers.

`PRELUDE` is in order of dependence; a kernel gets the entries it mentions and those they mention.
Source of the instructions: PTX ISA 9.x, sections 9.7.9 (cp.async.bulk), 9.7.13 (mbarrier,
setmaxnreg, barriers), 9.7.15 (wgmma).
"""

from __future__ import annotations

import re

from warploom.codegen.cuda.prelude_simt import SIMT_PRELUDE
from warploom.codegen.cuda.prelude_values import VALUE_PRELUDE
from warploom.tile.dtypes import HALVES

PRELUDE: dict[str, str] = {
    "TensorMap": "struct alignas(64) TensorMap { unsigned long long opaque[16]; };",
    "Cursor": """\
// Position in a ring: slot and the parity of the round it is in.
struct Cursor { unsigned slot = 0, parity = 0; };""",
    "advance": """\
template <unsigned kDepth> DEVICE void advance(Cursor& at) {
  if (++at.slot == kDepth) { at.slot = 0; at.parity ^= 1; }
}""",
    "smem_address": """\
DEVICE unsigned smem_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}""",
    "barrier_init": """\
DEVICE void barrier_init(unsigned bar, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}""",
    "barrier_expect": """\
DEVICE void barrier_expect(unsigned bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}""",
    "barrier_arrive": """\
DEVICE void barrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}""",
    "barrier_arrive_at": """\
DEVICE void barrier_arrive_at(unsigned bar, unsigned cta) {
  asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\\n"
               "mbarrier.arrive.shared::cluster.b64 _, [remote]; }"
               ::"r"(bar), "r"(cta) : "memory");
}""",
    "barrier_wait": """\
// Returns when the phase of that parity has completed (a fresh barrier: parity 1 at once).
DEVICE void barrier_wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred done;\\nAGAIN:\\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
               "@!done bra AGAIN; }" ::"r"(bar), "r"(parity) : "memory");
}""",
    "in_peer": """\
// The address of the same place in another block of the cluster.
DEVICE unsigned in_peer(unsigned address, unsigned cta) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
  return remote;
}""",
    "push_quad": """\
// Four registers into another block's shared memory; a barrier there counts the 16 bytes.
DEVICE void push_quad(unsigned to, const float* x, unsigned bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(bar) : "memory");
}""",
    "read_quad": """\
DEVICE void read_quad(float* x, unsigned at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
}""",
    "add_quad": """\
DEVICE void add_quad(float* x, unsigned at) {
  float y[4];
  read_quad(y, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] += y[i];
}""",
    "fence_barrier_init": """\
DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}""",
    "fence_async": """\
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }""",
    "cluster_sync": """\
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\\n"
               "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}""",
    "cluster_rank": """\
DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}""",
    "named_sync": """\
template <int kId, int kThreads> DEVICE void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}""",
    "named_arrive": """\
template <int kId, int kThreads> DEVICE void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}""",
    "registers_down": """\
template <int kCount> DEVICE void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}""",
    "registers_up": """\
template <int kCount> DEVICE void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}""",
    "prefetch_map": """\
DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}""",
    "store_commit": """\
DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }""",
    "store_wait_read": """\
template <int kPending> DEVICE void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}""",
    "shared_read": """\
DEVICE int shared_read(unsigned at) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}""",
    "shared_write": """\
DEVICE void shared_write(unsigned at, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}""",
    "take_task": """\
// The counter's value; it goes on by one, and from `last` back to 0.
DEVICE int take_task(unsigned* counter, unsigned last) {
  unsigned x;
  asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(x) : "l"(counter), "r"(last) : "memory");
  return x;
}""",
    "wait_previous_grid": """\
DEVICE void wait_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }""",
    "start_next_grid": """\
DEVICE void start_next_grid() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}""",
    "stmatrix": """\
DEVICE void stmatrix(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}""",
    "stmatrix_transposed": """\
// Every 8 x 8 matrix is transposed on its way: what a thread holds of a row goes down a column.
DEVICE void stmatrix_transposed(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void stmatrix_transposed(unsigned at, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(at), "r"(a), "r"(b) : "memory");
}""",
    "store_shared_pair": """\
DEVICE void store_shared_pair(unsigned at, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}""",
    "wgmma_fence": """\
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }""",
    "wgmma_commit": """\
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }""",
    "wgmma_wait": """\
template <int kPending> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}""",
    "store_16_bytes": """\
DEVICE void store_16_bytes(void* to, const unsigned (&w)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}""",
    "quad_exchange": """\
// The four lanes of a quad hold a column pair each of four groups: lane q gets all of group q.
DEVICE void quad_exchange(unsigned (&w)[4], unsigned q) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = q & step;
      const unsigned out = upper ? w[i] : w[i + step];
      const unsigned in = __shfl_xor_sync(0xffffffffu, out, step);
      if (upper) w[i] = in;
      else w[i + step] = in;
    }
}""",
    "some": """\
// A run of one row of accumulators, for one of several matmuls side by side.
template <int kCount> DEVICE float (&some(float* first))[kCount] {
  return *reinterpret_cast<float (*)[kCount]>(first);
}""",
    "pin": """\
// Keeps the compiler from moving reads or writes of registers across a wgmma fence or wait.
template <int kRows, int kCols> DEVICE void pin(float (&x)[kRows][kCols]) {
#pragma unroll
  for (int t = 0; t < kRows; ++t)
#pragma unroll
    for (int i = 0; i < kCols; ++i) asm volatile("" : "+f"(x[t][i])::"memory");
}
template <int kRows, int kCols> DEVICE void pin(unsigned (&x)[kRows][kCols]) {
#pragma unroll
  for (int t = 0; t < kRows; ++t)
#pragma unroll
    for (int i = 0; i < kCols; ++i) asm volatile("" : "+r"(x[t][i])::"memory");
}""",
    "in_block": """\
// The address without the block's number: in a cluster, shared addresses of block r have r in bits
// 24 and up, which would run into the stride field of a descriptor.
DEVICE unsigned in_block(unsigned address) { return address & 0x3ffffu; }""",
    "descriptor": """\
// `address` as `in_block` gives it.
DEVICE unsigned long long descriptor(unsigned low, unsigned high, unsigned address) {
  return (static_cast<unsigned long long>(high) << 32) | (low + (address >> 4));
}""",
    **VALUE_PRELUDE,
    "floor_div": """\
DEVICE int floor_div(int a, int b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }""",
    "floor_mod": """\
DEVICE int floor_mod(int a, int b) { return a - floor_div(a, b) * b; }""",
    **{name: SIMT_PRELUDE[name] for name in ("Found", "FoundInt")},
}


# The same wait for debug builds: after half a second (globaltimer counts ns) a hang is a fault.
BOUNDED_WAIT = """\
DEVICE void barrier_wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred done, late; .reg .u64 begin, now;\\nmov.u64 begin, %%globaltimer;\\n"
               "AGAIN:\\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n@done bra DONE;\\n"
               "mov.u64 now, %%globaltimer;\\nsub.u64 now, now, begin;\\n"
               "setp.gt.u64 late, now, 500000000;\\n@late trap;\\n"
               "bra AGAIN;\\nDONE: }" ::"r"(bar), "r"(parity) : "memory");
}"""


def tma_load(rank: int, multicast: bool) -> tuple[str, str]:
    """Name and text of the bulk tensor load of that rank."""
    coords = ", ".join(f"int c{i}" for i in range(rank))
    holes = ", ".join(f"%{i + 3}" for i in range(rank))
    uses = ", ".join(f'"r"(c{i})' for i in range(rank))
    name = f"tma_load_{rank}d" + ("_multicast" if multicast else "")
    extra = ", unsigned short mask" if multicast else ""
    cast = ".multicast::cluster" if multicast else ""
    hole = f", %{rank + 3}" if multicast else ""
    use = ', "h"(mask)' if multicast else ""
    text = f"""\
DEVICE void {name}(unsigned to, const TensorMap* map, unsigned bar, {coords}{extra}) {{
  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global"
               ".mbarrier::complete_tx::bytes{cast} "
               "[%0], [%1, {{{holes}}}], [%2]{hole};"
               ::"r"(to), "l"(map), "r"(bar), {uses}{use} : "memory");
}}"""
    return name, text


def tma_store(rank: int, add: bool) -> tuple[str, str]:
    """Name and text of the bulk tensor store (or reduce-add) of that rank."""
    coords = ", ".join(f"int c{i}" for i in range(rank))
    holes = ", ".join(f"%{i + 2}" for i in range(rank))
    uses = ", ".join(f'"r"(c{i})' for i in range(rank))
    name = f"tma_store_{'add_' if add else ''}{rank}d"
    verb = "cp.reduce" if add else "cp"
    tail = ".add" if add else ""
    text = f"""\
DEVICE void {name}(const TensorMap* map, unsigned from, {coords}) {{
  asm volatile("{verb}.async.bulk.tensor.{rank}d.global.shared::cta{tail}.bulk_group "
               "[%0, {{{holes}}}], [%1];" ::"l"(map), "r"(from), {uses} : "memory");
}}"""
    return name, text


def wgmma(n: int, dtype: str, registers: bool, transposed: tuple[bool, bool]) -> tuple[str, str]:
    """Name and text of one m64 wgmma; A from registers or shared memory.

    `transposed` sets the MN-major bits of A and B (16-bit types only).
    """
    kind = "f16" if dtype == "fp16" else dtype
    sixteen = dtype in HALVES
    k = 16 if sixteen else 32
    count = n // 2
    name = f"wgmma_m64n{n}_{dtype}_{'rs' if registers else 'ss'}"
    if any(transposed):
        name += "_" + "".join("t" if flag else "n" for flag in transposed)
    lines = [
        ", ".join(f"%{i}" for i in range(start, min(start + 16, count)))
        for start in range(0, count, 16)
    ]
    outs = ",\n        ".join(
        ", ".join(f'"+f"(d[{i}])' for i in range(start, min(start + 8, count)))
        for start in range(0, count, 8)
    )
    if registers:
        a_args = "const unsigned* a"
        a_holes = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        a_uses = ", ".join(f'"r"(a[{i}])' for i in range(4))
        after = count + 4
    else:
        a_args, a_holes, a_uses, after = "unsigned long long a", f"%{count}", '"l"(a)', count + 1
    bits = ["p", "1", "1"]
    if sixteen:
        bits += [] if registers else [str(int(transposed[0]))]
        bits += [str(int(transposed[1]))]
    body = ',"\n      "'.join(lines)
    text = f"""\
DEVICE void {name}(float (&d)[{count}], {a_args}, unsigned long long b, int accumulate) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{after + 1}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{"
      "{body}}}, "
      "{a_holes}, %{after}, {", ".join(bits)}; }}"
      : {outs}
      : {a_uses}, "l"(b), "r"(accumulate));
}}"""
    return name, text


def needed(body: str, extra: dict[str, str]) -> list[str]:
    """The texts of every device function that `body` mentions, directly or not, in order."""
    table = {**PRELUDE, **extra}
    wanted: set[str] = set()
    todo = [body]
    while todo:
        words = set(re.findall(r"\w+", todo.pop()))
        for name in words & set(table):
            if name not in wanted:
                wanted.add(name)
                todo.append(table[name])
    return [table[name] for name in table if name in wanted]
