"""The device functions that emitted kernels are written with, most of them one PTX instruction.

They stand as CUDA C++ in `device`, no headers; a kernel gets those it mentions and those they
mention, in order of dependence. A family with a member for every shape is made here.
"""

from __future__ import annotations

import re
from importlib.resources import files

from warploom.tile import DType
from warploom.tile.dtypes import FP8, HALVES


def read(name: str) -> dict[str, str]:
    """The texts of a file of `device`: each stands under a line `//@ NAME`."""
    text = files("warploom.codegen.cuda").joinpath("device", name).read_text()
    _, *parts = re.split(r"^//@ (\w+)\n", text, flags=re.MULTILINE)
    return {part: body.strip("\n") for part, body in zip(parts[::2], parts[1::2], strict=True)}


TYPES = read("types.cuh")
SIMT_PRELUDE = {**TYPES, **read("simt.cuh")}
SM80_PRELUDE = read("sm80.cuh")
# In place of others in kernels that begin before the previous grid has ended.
DEPENDENT = read("dependent.cuh")
PRELUDE = {
    **read("hopper.cuh"),
    **read("values.cuh"),
    **read("blocks.cuh"),
    **TYPES,
    **read("memory.cuh"),
    **read("index.cuh"),
    **{name: SIMT_PRELUDE[name] for name in ("Found", "FoundInt")},
}
MACROS = (
    "#define DEVICE __device__ __forceinline__",
    "#ifndef INFINITY",
    "#define INFINITY __int_as_float(0x7f800000)",
    "#define NAN __int_as_float(0x7fffffff)",
    "#endif",
    "",
)
# The same wait for debug builds: after half a second (globaltimer counts ns) a hang is a fault.
BOUNDED_WAIT = read("debug.cuh")["barrier_wait"]


def memory_type(kind: DType) -> str:
    """The C++ type of an element in memory; a narrow type's is a struct of the prelude."""
    if kind.kind == "bool":
        return "unsigned char"
    return kind.name.capitalize() if kind.name in (*HALVES, *FP8, "int8") else kind.kind


def pointer_to(element: str, written: bool, dependent: bool) -> str:
    """The C++ type of an array parameter: nothing else leads to the same memory. To the compiler
    that says of an array that is only read that it does not change while the kernel runs, which is
    not so where it begins before the previous grid has ended (`dependent`)."""
    restrict = " __restrict__" if written or not dependent else ""
    return f"{'' if written else 'const '}{element}*{restrict}"


EVICT_FIRST = "0x12f0000000000000"  # what createpolicy.fractional.L2::evict_first gives


def tma_load(rank: int, multicast: bool, once: bool = False) -> tuple[str, str]:
    """Name and text of the bulk tensor load of that rank; `once`: of what L2 gives up first."""
    coords = ", ".join(f"int c{i}" for i in range(rank))
    holes = ", ".join(f"%{i + 3}" for i in range(rank))
    uses = ", ".join(f'"r"(c{i})' for i in range(rank))
    name = f"tma_load_{rank}d" + ("_multicast" if multicast else "") + ("_once" if once else "")
    extra = ", unsigned short mask" if multicast else ""
    cast = ".multicast::cluster" if multicast else ""
    hole = f", %{rank + 3}" if multicast else ""
    use = ', "h"(mask)' if multicast else ""
    if once:
        cast += ".L2::cache_hint"
        hole += f", %{rank + 3 + multicast}"
        use += f', "l"({EVICT_FIRST}ull)'
    text = f"""\
DEVICE void {name}(unsigned to, const TensorMap* map, unsigned bar, {coords}{extra}) {{
  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global"
               ".mbarrier::complete_tx::bytes{cast} "
               "[%0], [%1, {{{holes}}}], [%2]{hole};"
               ::"r"(to), "l"(map), "r"(bar), {uses}{use} : "memory");
}}"""
    return name, text


def tma_fetch(rank: int) -> tuple[str, str]:
    """Name and text of the bulk tensor prefetch into L2 of that rank."""
    coords = ", ".join(f"int c{i}" for i in range(rank))
    holes = ", ".join(f"%{i + 1}" for i in range(rank))
    uses = ", ".join(f'"r"(c{i})' for i in range(rank))
    name = f"tma_fetch_{rank}d"
    text = f"""\
DEVICE void {name}(const TensorMap* map, {coords}) {{
  asm volatile("cp.async.bulk.prefetch.tensor.{rank}d.L2.global [%0, {{{holes}}}];"
               ::"l"(map), {uses} : "memory");
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


BULK_ADD = """\
DEVICE void store_shared_quad(unsigned at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void bulk_add(float* to, unsigned from, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}"""
BULK_PUT = """\
DEVICE void bulk_put(float* to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}"""
TURN_WAIT = """\
// Until so many stores have added to a place; what they added is seen by the copies that follow.
DEVICE void turn_wait(const int* count, int number) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
  } while (seen < number);
}"""
TURN_PASS = """\
// One store more has added: its copies are complete.
DEVICE void turn_pass(int* count) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  __threadfence();
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}"""


def wgmma(
    n: int, dtype: str, registers: bool, transposed: tuple[bool, bool], taken_off: bool = False
) -> tuple[str, str]:
    """Name and text of one m64 wgmma; A from registers or shared memory.

    `transposed` sets the MN-major bits of A and B (16-bit types only); `taken_off`: the product is
    taken off the sums.
    """
    kind = "f16" if dtype == "fp16" else dtype
    sixteen = dtype in HALVES
    k = 16 if sixteen else 32
    count = n // 2
    name = f"wgmma_m64n{n}_{dtype}_{'rs' if registers else 'ss'}"
    if any(transposed):
        name += "_" + "".join("t" if flag else "n" for flag in transposed)
    if taken_off:
        name += "_off"
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
    bits = ["p", "-1" if taken_off else "1", "1"]
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
