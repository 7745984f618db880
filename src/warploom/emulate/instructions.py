"""PTX instructions as C++: the subset that the emulated machine has (PTX ISA 9.x).

`FORMS` is read from the top: the first pattern that fits a mnemonic whole gives its C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from warploom.errors import InputError

Make = Callable[["Call"], str]

TYPES = {
    "pred": "bool", "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t",
    "u16": "uint16_t", "s16": "int16_t", "f16": "uint16_t", "bf16": "uint16_t", "b32": "uint32_t",
    "u32": "uint32_t", "s32": "int32_t", "f16x2": "uint32_t", "bf16x2": "uint32_t",
    "f32": "float", "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t", "f64": "double",
}  # fmt: skip
SPECIAL = {
    "tid.x": "threadIdx.x", "tid.y": "threadIdx.y", "tid.z": "threadIdx.z",
    "ntid.x": "blockDim.x", "ctaid.x": "blockIdx.x", "ctaid.y": "blockIdx.y",
    "ctaid.z": "blockIdx.z", "nctaid.x": "gridDim.x", "nctaid.y": "gridDim.y",
    "laneid": "ptx::lane()", "warpid": "ptx::warp()", "smid": "blockIdx.x",
    "cluster_ctarank": "machine::rank_in_cluster()",
    "cluster_ctaid.x": "machine::rank_in_cluster()",
    "cluster_nctarank": "machine::blocks_of_cluster()",
    "cluster_nctaid.x": "machine::blocks_of_cluster()",
    "clusterid.x": "(blockIdx.x / machine::blocks_of_cluster())",
    "nclusterid.x": "(gridDim.x / machine::blocks_of_cluster())",
    "clock": "machine::now()", "clock64": "machine::now()", "globaltimer": "machine::now()",
}  # fmt: skip
KINDS = {"bf16": "kBf16", "f16": "kFp16", "e4m3": "kE4m3", "e5m2": "kE5m2", "tf32": "kTf32"}


def c_type(name: str) -> str | None:
    """The C++ type of a PTX type."""
    return TYPES.get(name)


@dataclass(frozen=True)
class Operand:
    """One operand: bound to C++, a register, a number, a vector, an address, or none (`_`)."""

    kind: str
    text: str = ""
    parts: tuple[Operand, ...] = ()
    written: bool = False

    def value(self, kind: str) -> str:
        """It as C++ of that type."""
        if self.kind == "special":
            if self.text not in SPECIAL:
                raise InputError(f"PTX register %{self.text} is not in the emulated subset")
            return f"{kind}({SPECIAL[self.text]})"
        if self.kind == "number":
            return f"{kind}({self.text})"
        if self.kind not in ("bound", "register"):
            raise InputError(f"a PTX {self.kind} stands where a value is expected")
        return f"ptx::as<{kind}>({self.text})"

    def set(self, value: str) -> str:
        """C++ that writes it."""
        if self.kind == "sink":
            return f"{value};"
        if not self.written:
            raise InputError("PTX writes an operand that is not an output")
        return f"ptx::put({self.text}, {value});"

    def address(self, kind: str = "uint32_t") -> str:
        """An address without coordinates."""
        if self.kind != "address":
            raise InputError("PTX has no address where one is expected")
        return f"{self.parts[0].value(kind)}{self.text}"


@dataclass(frozen=True)
class Call:
    """An instruction: the groups of its pattern, its operands, whether it stands in a kernel."""

    groups: tuple[str, ...]
    ops: list[Operand]
    kernel: bool

    def u32(self, at: int) -> str:
        """Operand `at` as an unsigned number."""
        return self.ops[at].value("uint32_t")

    def mem(self, at: int, kind: str = "uint32_t") -> str:
        """Operand `at` as an address."""
        return self.ops[at].address(kind)


def translated(name: str, operands: list[Operand], kernel: bool) -> str | None:
    """C++ statements of an instruction, or None where it is not in the subset."""
    for pattern, make in FORMS:
        if found := re.fullmatch(pattern, name):
            try:
                return make(Call(tuple(each or "" for each in found.groups()), operands, kernel))
            except IndexError:
                raise InputError(f"{name} has {len(operands)} operands") from None
    return None


def _said(text: str) -> Make:
    """C++ with {u0}, {m1}: operands as numbers, addresses in shared memory."""

    def make(call: Call) -> str:
        def part(found: re.Match[str]) -> str:
            return call.u32(int(found[2])) if found[1] == "u" else call.mem(int(found[2]))

        return re.sub(r"\{([um])(\d)\}", part, text)

    return make


def _math(text: str, kind: str = "float") -> Make:
    """A function of values: {1}, {2}, {3} are the operands."""

    def make(call: Call) -> str:
        own = TYPES[call.groups[0]] if call.groups else kind
        value = re.sub(r"\{(\d)\}", lambda found: call.ops[int(found[1])].value(own), text)
        return call.ops[0].set(f"{own}({value})")

    return make


def _coordinates(address: Operand) -> tuple[str, str]:
    """Map and coordinates of a tensor's box."""
    if len(address.parts) != 2 or address.parts[1].kind != "vector":
        raise InputError("a bulk tensor copy without coordinates")
    places = ", ".join(part.value("int") for part in address.parts[1].parts)
    return f"ptx::as<const void*>({address.parts[0].text})", f"const int at_[] = {{{places}}};"


def _tma_load(call: Call) -> str:
    rank, multicast = call.groups
    map_, places = _coordinates(call.ops[1])
    mask = call.u32(3) if multicast else "0"
    return f"{places} machine::tma_load({call.mem(0)}, {map_}, at_, {rank}, {call.mem(2)}, {mask});"


def _tma_store(call: Call) -> str:
    verb, rank = call.groups
    map_, places = _coordinates(call.ops[0])
    add = "true" if verb == "cp.reduce" else "false"
    return f"{places} machine::tma_store({map_}, {call.mem(1)}, at_, {rank}, {add});"


def _arrive(call: Call) -> str:
    expect, *_ = call.groups
    count = "1" if expect or len(call.ops) < 3 else call.u32(2)
    lines = f"machine::mbarrier_expect({call.mem(1)}, {call.u32(2)});" if expect else ""
    return lines + call.ops[0].set(f"machine::mbarrier_arrive({call.mem(1)}, {count})")


def _arrive_remote(call: Call) -> str:
    # Without a state the address comes first in older PTX.
    return f"machine::mbarrier_arrive({call.mem(0)}, 1);"


def _wait(call: Call) -> str:
    kind, parity = call.groups
    if not parity:
        phase = call.ops[2].value("uint64_t")
        return call.ops[0].set(f"machine::mbarrier_wait_phase({call.mem(1)}, {phase})")
    name = "wait" if kind == "try" else "test"
    return call.ops[0].set(f"machine::mbarrier_{name}({call.mem(1)}, {call.u32(2)})")


def _matrices(call: Call) -> str:
    verb, count, across = call.groups
    load = verb == "ld"
    vector, address = (0, 1) if load else (1, 0)
    parts = call.ops[vector].parts or (call.ops[vector],)
    if len(parts) != int(count):
        raise InputError(f"{count} matrices in {len(parts)} registers")
    how = f"{call.mem(address)}, "
    flag = "true" if across else "false"
    if load:
        lines = f"uint32_t x_[{count}]; machine::load_matrices(x_, {how}{count}, {flag});"
        return lines + " ".join(part.set(f"x_[{i}]") for i, part in enumerate(parts))
    values = ", ".join(part.value("uint32_t") for part in parts)
    return f"const uint32_t x_[] = {{{values}}};machine::store_matrices({how}x_, {count}, {flag});"


def _memory(call: Call) -> str:
    verb, space, _, kind = call.groups
    own = TYPES[kind]
    load = verb == "ld"
    vector, address = (0, 1) if load else (1, 0)
    parts = call.ops[vector].parts or (call.ops[vector],)
    count = len(parts)
    shared = space.startswith("shared")
    where = call.mem(address, "uint32_t" if shared else "uint64_t")
    if load:
        lines = f"alignas(16) {own} x_[{count}];"
        if shared:
            lines += f"machine::shared_read(x_, {where}, sizeof x_);"
        else:
            lines += f"ptx::load(x_, {where}, {count});"
        return lines + " ".join(part.set(f"x_[{i}]") for i, part in enumerate(parts))
    values = ", ".join(part.value(own) for part in parts)
    lines = f"alignas(16) const {own} x_[] = {{{values}}};"
    if shared:
        return f"{lines} machine::shared_write({where}, x_, sizeof x_);"
    return f"{lines} ptx::store({where}, x_, {count});"


def _poll(call: Call) -> str:
    kind = TYPES[call.groups[0]]
    read = f"machine::poll(); {kind} x_; ptx::load(&x_, {call.mem(1, 'uint64_t')}, 1); "
    return read + call.ops[0].set("x_")


def _store_async(call: Call) -> str:
    kind = TYPES[call.groups[1]]
    parts = call.ops[1].parts or (call.ops[1],)
    values = ", ".join(part.value(kind) for part in parts)
    return (
        f"const {kind} x_[] = {{{values}}};"
        f"machine::store_async({call.mem(0)}, x_, sizeof x_, {call.mem(2)});"
    )


def _copy_async(call: Call) -> str:
    bytes_ = call.u32(2)
    count = call.u32(3) if len(call.ops) > 3 else bytes_
    source = f"reinterpret_cast<const void*>({call.mem(1, 'uint64_t')})"
    return f"machine::copy_async({call.mem(0)}, {source}, {bytes_}, {count});"


def _mma(call: Call) -> str:
    kind = KINDS[call.groups[0]]
    d, a, b, c = (op.parts for op in call.ops)
    words = ", ".join(part.value("uint32_t") for part in (*a, *b))
    sums = ", ".join(part.value("float") for part in c)
    return (
        f"const uint32_t x_[] = {{{words}}}; const float c_[] = {{{sums}}}; float d_[4];"
        f"machine::multiply(d_, x_, x_ + 4, c_, machine::{kind});"
        + " ".join(part.set(f"d_[{i}]") for i, part in enumerate(d))
    )


def _wgmma(call: Call) -> str:
    n, k, kind, right = call.groups
    d, a, b, scale, *rest = call.ops
    if kind != right:
        raise InputError(f"wgmma of {kind} by {right}: the emulation multiplies equal types")
    if any(part.kind != "bound" or not part.written for part in d.parts):
        raise InputError("wgmma's accumulators are not operands of the statement")
    if len(d.parts) != int(n) // 2:
        raise InputError(f"wgmma of n{n} with {len(d.parts)} accumulators")
    sums = ", ".join(f"(float*)&{part.text}" for part in d.parts)
    registers = bool(a.parts)
    lines = [f"float* const d_[] = {{{sums}}}; machine::Operands w_{{}};"]
    if registers:
        lines.append(
            f"const void* const a_[] = {{{', '.join(f'&{part.text}' for part in a.parts)}}};"
        )
        for i, part in enumerate(a.parts):
            gone = f"!std::is_lvalue_reference_v<decltype({part.text})>"
            if not call.kernel:
                gone += f" || (const char*)&{part.text} < (const char*)__builtin_frame_address(0)"
            lines.append(f"if ({gone}) w_.own |= {1 << i};")
    flags = [op.value("int") for op in rest]
    names = ["negative_left", "negative_right"]
    if k == "16":
        names += ["right_across"] if registers else ["left_across", "right_across"]
    if len(flags) != len(names):
        raise InputError(f"wgmma with {len(flags)} immediates after scale-d, expected {len(names)}")
    for name, flag in zip(names, flags, strict=True):
        lines.append(f"w_.{name} = {flag} {'< 0' if name.startswith('negative') else '!= 0'};")
    left = "0" if registers else a.value("uint64_t")
    lines.append(
        f"w_.columns = {n}; w_.kind = machine::{KINDS[kind]}; w_.sums = d_; "
        f"w_.rows = {'a_' if registers else 'nullptr'}; w_.left = {left}; "
        f"w_.right = {b.value('uint64_t')}; w_.accumulate = {scale.value('bool')}; "
        "machine::wgmma(w_);"
    )
    return " ".join(lines)


def _move(call: Call) -> str:
    kind = TYPES[call.groups[0]]
    to, source = call.ops
    if to.parts or source.parts:
        parts = to.parts or source.parts
        half = {"uint32_t": "uint16_t", "uint64_t": "uint32_t", "float": "uint16_t"}[kind]
        shift = 8 * {"uint16_t": 2, "uint32_t": 4}[half]
        if to.parts:
            whole = f"const {kind} x_ = {source.value(kind)};"
            return whole + " ".join(
                part.set(f"{half}(x_ >> {shift * i})") for i, part in enumerate(parts)
            )
        value = " | ".join(
            f"{kind}({part.value(half)}) << {shift * i}" for i, part in enumerate(parts)
        )
        return to.set(f"{kind}({value})")
    return to.set(source.value(kind))


def _elect(call: Call) -> str:
    parts = call.ops[0].parts
    lines = f"const bool own_ = ptx::lane() == __builtin_ctz({call.u32(1)});"
    if parts[0].kind != "sink":
        lines += parts[0].set(f"__builtin_ctz({call.u32(1)})")
    return lines + parts[1].set("own_")


COMPARED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
    "hi": ">", "hs": ">=",
}  # fmt: skip


def _compare(call: Call) -> str:
    sign, kind = call.groups
    own = TYPES[kind]
    return call.ops[0].set(f"{call.ops[1].value(own)} {COMPARED[sign]} {call.ops[2].value(own)}")


def _select(call: Call) -> str:
    own = TYPES[call.groups[0]]
    _, x, y, which = call.ops
    return call.ops[0].set(f"{which.value('bool')} ? {x.value(own)} : {y.value(own)}")


def _convert(call: Call) -> str:
    """cvt between fp32 and narrower types, and among integers."""
    to, source = call.groups
    ops = call.ops
    if to in ("bf16x2", "f16x2") and source == "f32":
        one = f"numbers::to_{'bf16' if to == 'bf16x2' else 'fp16'}"
        high, low = (f"{one}({op.value('float')})" for op in ops[1:])
        return ops[0].set(f"ptx::pair({high}, {low})")
    if to in ("e4m3x2", "e5m2x2"):
        one = f"numbers::to_{to[:4]}"
        high, low = (f"{one}({op.value('float')})" for op in ops[1:])
        return ops[0].set(f"uint16_t({high} << 8 | {low})")
    if source in ("e4m3x2", "e5m2x2"):
        one = f"numbers::to_fp16(numbers::from_{source[:4]}"
        whole = f"const uint16_t x_ = {ops[1].value('uint16_t')};"
        return whole + ops[0].set(f"ptx::pair({one}(x_ >> 8)), {one}(x_ & 255)))")
    halves = {"bf16": "bf16", "f16": "fp16"}
    if to in halves:
        return ops[0].set(f"numbers::to_{halves[to]}({ops[1].value('float')})")
    if source in halves:
        return ops[0].set(f"numbers::from_{halves[source]}({ops[1].value('uint16_t')})")
    return ops[0].set(f"{TYPES[to]}({ops[1].value(TYPES[source])})")


def _fma_pairs(call: Call) -> str:
    """fma of two 16-bit numbers in a word."""
    name = "bf16" if call.groups[0] == "bf16x2" else "fp16"
    words = ", ".join(op.value("uint32_t") for op in call.ops[1:])

    def half(shift: int) -> str:
        each = ", ".join(f"numbers::from_{name}(uint16_t(x_[{i}] >> {shift}))" for i in range(3))
        return f"numbers::to_{name}(fmaf({each}))"

    return f"const uint32_t x_[] = {{{words}}};" + call.ops[0].set(
        f"ptx::pair({half(16)}, {half(0)})"
    )


def _add_global(call: Call) -> str:
    kind = call.groups[0]
    at, more = call.mem(0, "uint64_t"), call.ops[1]
    if kind in ("bf16", "f16"):
        word = "__nv_bfloat16" if kind == "bf16" else "__half"
        return f"{word} x_; x_.bits = {more.value('uint16_t')}; ptx::add_up<{word}>({at}, x_);"
    return f"ptx::add_up<{TYPES[kind]}>({at}, {more.value(TYPES[kind])});"


SCOPE = r"(?:\.(?:release|relaxed|acquire))?(?:\.(?:cta|cluster|gpu|sys))?"
SHARED = r"(?:\.shared(?:::cta|::cluster)?)?"
ANY = r"\.(\w+)"
NOTHING = _said("")
FORMS: list[tuple[str, Make]] = [
    (rf"mbarrier\.init{SHARED}\.b64", _said("machine::mbarrier_init({m0}, {u1});")),
    (rf"mbarrier\.inval{SHARED}\.b64", _said("machine::mbarrier_drop({m0});")),
    (
        rf"mbarrier\.expect_tx{SCOPE}{SHARED}\.b64",
        _said("machine::mbarrier_expect({m0}, {u1});"),
    ),
    (
        rf"mbarrier\.arrive(\.expect_tx)?{SCOPE}{SHARED}\.b64",
        lambda call: _arrive_remote(call) if call.ops[0].kind == "address" else _arrive(call),
    ),
    (rf"mbarrier\.(try|test)_wait(\.parity)?{SCOPE}{SHARED}\.b64", _wait),
    (r"fence\.mbarrier_init\.release\.cluster", _said("machine::fence_mbarrier_init();")),
    (r"fence\.proxy\.async(?:\.shared::cta|\.shared::cluster)?", _said("machine::fence_proxy();")),
    (r"fence\.proxy\.async\.global", NOTHING),
    (r"fence(?:\.acq_rel|\.sc)\.cluster", _said("machine::fence_mbarrier_init();")),
    (r"fence(?:\.acq_rel|\.sc)\.(?:cta|gpu|sys)|membar\.\w+", NOTHING),
    (
        r"barrier\.cluster\.arrive(?:\.release)?(?:\.aligned)?",
        _said("machine::cluster_arrive(true);"),
    ),
    (
        r"barrier\.cluster\.arrive\.relaxed(?:\.aligned)?",
        _said("machine::cluster_arrive(false);"),
    ),
    (r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", _said("machine::cluster_wait();")),
    (
        r"(?:bar(?:\.cta)?|barrier(?:\.cta)?)\.sync(?:\.aligned)?",
        lambda call: (
            f"machine::named_sync({call.u32(0)}, {call.u32(1) if len(call.ops) > 1 else '0'});"
        ),
    ),
    (
        r"(?:bar(?:\.cta)?|barrier(?:\.cta)?)\.arrive(?:\.aligned)?",
        _said("machine::named_arrive({u0}, {u1});"),
    ),
    (r"bar\.warp\.sync", _said("machine::sync_warp({u0});")),
    (r"setmaxnreg\.inc\.sync\.aligned\.u32", _said("machine::registers(true, {u0});")),
    (r"setmaxnreg\.dec\.sync\.aligned\.u32", _said("machine::registers(false, {u0});")),
    (
        r"cp\.async\.bulk\.tensor\.(\d)d\.shared::(?:cluster|cta)\.global(?:\.tile)?"
        r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(?:\.L2::cache_hint)?",
        _tma_load,
    ),
    (
        r"(cp|cp\.reduce)\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta(?:\.add)?(?:\.tile)?"
        r"\.bulk_group(?:\.L2::cache_hint)?",
        _tma_store,
    ),
    (
        r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes"
        r"(?:\.L2::cache_hint)?",
        lambda call: (
            f"machine::bulk_load({call.mem(0)}, (const void*)({call.mem(1, 'uint64_t')}), "
            f"{call.u32(2)}, {call.mem(3)});"
        ),
    ),
    (
        r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?",
        lambda call: (
            f"machine::bulk_store((void*)({call.mem(0, 'uint64_t')}), {call.mem(1)}, "
            f"{call.u32(2)});"
        ),
    ),
    (
        r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32",
        lambda call: (
            f"machine::bulk_store((void*)({call.mem(0, 'uint64_t')}), {call.mem(1)}, "
            f"{call.u32(2)}, true);"
        ),
    ),
    (r"cp\.async\.bulk\.commit_group", _said("machine::bulk_commit();")),
    (r"cp\.async\.bulk\.wait_group\.read", _said("machine::bulk_wait({u0}, true);")),
    (r"cp\.async\.bulk\.wait_group", _said("machine::bulk_wait({u0}, false);")),
    (
        r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\w+)?(?:\.L2::cache_hint)?",
        _copy_async,
    ),
    (r"cp\.async\.commit_group", _said("machine::copies_commit();")),
    (r"cp\.async\.wait_group", _said("machine::copies_wait({u0});")),
    (r"cp\.async\.wait_all", _said("machine::copies_commit(); machine::copies_wait(0);")),
    (
        rf"cp\.async\.mbarrier\.arrive\.noinc{SHARED}\.b64",
        _said("machine::copies_arrive({m0}, false);"),
    ),
    (rf"cp\.async\.mbarrier\.arrive{SHARED}\.b64", _said("machine::copies_arrive({m0}, true);")),
    (
        r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.v[24])?\.(\w+)",
        _store_async,
    ),
    (r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", _matrices),
    (r"wgmma\.fence\.sync\.aligned", _said("machine::wgmma_fence();")),
    (r"wgmma\.commit_group\.sync\.aligned", _said("machine::wgmma_commit();")),
    (r"wgmma\.wait_group\.sync\.aligned", _said("machine::wgmma_wait({u0});")),
    (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(8|16|32)\.f32\.(bf16|f16|tf32|e4m3|e5m2)"
        r"\.(bf16|f16|tf32|e4m3|e5m2)",
        _wgmma,
    ),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", _mma),
    (
        r"(ld|st)(?:\.weak|\.volatile)?\.(shared|shared::cta)(\.v[24])?\.(\w+)",
        _memory,
    ),
    (r"ld\.acquire\.gpu\.global\.(\w+)", _poll),
    (
        r"(ld|st)(?:\.weak|\.volatile|\.relaxed\.gpu|\.acquire\.gpu|\.release\.gpu)?\.(global)"
        r"(?:\.nc|\.cs|\.cg)?(?:\.L[12]::\w+)*(\.v[24])?\.(\w+)",
        _memory,
    ),
    (
        r"atom\.global\.inc\.u32",
        lambda call: call.ops[0].set(f"ptx::count_up({call.mem(1, 'uint64_t')}, {call.u32(2)})"),
    ),
    (
        r"atom(?:\.relaxed|\.acq_rel)?(?:\.gpu)?\.global\.add\.(u32|s32|f32)",
        lambda call: call.ops[0].set(
            f"ptx::add_up<{TYPES[call.groups[0]]}>({call.mem(1, 'uint64_t')}, "
            f"{call.ops[2].value(TYPES[call.groups[0]])})"
        ),
    ),
    (r"red(?:\.relaxed)?(?:\.gpu)?\.global\.add(?:\.noftz)?\.(bf16|f16|f32|u32|s32)", _add_global),
    (
        r"mapa(?:\.shared::cluster)?\.u32",
        lambda call: call.ops[0].set(f"machine::map_to({call.u32(1)}, {call.u32(2)})"),
    ),
    (
        r"cvta\.to\.shared\.u(?:32|64)",
        lambda call: call.ops[0].set(
            f"machine::shared_address(ptx::as<const void*>({call.ops[1].text}))"
        ),
    ),
    (r"elect\.sync", _elect),
    (r"fma\.rn\.(bf16x2|f16x2)", _fma_pairs),
    (rf"mov{ANY}", _move),
    (r"cvt(?:\.rn|\.rz)?(?:\.satfinite)?(?:\.relu)?\.(\w+)\.(\w+)", _convert),
    (r"setp\.(\w\w)\.(\w+)", _compare),
    (rf"selp{ANY}", _select),
    (r"ex2\.approx(?:\.ftz)?\.f32", _math("exp2f({1})")),
    (r"lg2\.approx(?:\.ftz)?\.f32", _math("log2f({1})")),
    (r"tanh\.approx\.f32", _math("tanhf({1})")),
    (r"rcp\.approx(?:\.ftz)?\.f32", _math("1.0f / {1}")),
    (r"rsqrt\.approx(?:\.ftz)?\.f32", _math("1.0f / sqrtf({1})")),
    (r"sqrt\.\w+(?:\.ftz)?\.f32", _math("sqrtf({1})")),
    (r"fma\.rn(?:\.ftz)?\.f32", _math("fmaf({1}, {2}, {3})")),
    (r"add(?:\.ftz)?\.(f32|[us]32|[us]64)", _math("{1} + {2}")),
    (r"sub(?:\.ftz)?\.(f32|[us]32|[us]64)", _math("{1} - {2}")),
    (r"mul(?:\.lo|\.ftz)?\.(f32|[us]32|[us]64)", _math("{1} * {2}")),
    (r"max(?:\.ftz)?\.(f32|[us]32)", _math("std::max({1}, {2})")),
    (r"min(?:\.ftz)?\.(f32|[us]32)", _math("std::min({1}, {2})")),
    (r"and\.(b32|b64|pred)", _math("{1} & {2}")),
    (r"or\.(b32|b64|pred)", _math("{1} | {2}")),
    (r"xor\.(b32|b64|pred)", _math("{1} ^ {2}")),
    (r"shl\.(b32|b64)", _math("{1} << {2}")),
    (r"shr\.([bu]32|[bu]64|s32)", _math("{1} >> {2}")),
    (
        r"prefetch\..*|cp\.async\.bulk\.prefetch\..*|applypriority\..*|griddepcontrol\..*"
        r"|nanosleep\.u32|pmevent",
        NOTHING,
    ),
    (r"trap", _said('machine::fail("trap");')),
    (r"createpolicy\..*\.b64", lambda call: call.ops[0].set("uint64_t(0)")),
]
