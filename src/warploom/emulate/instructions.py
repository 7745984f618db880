"""PTX instructions as C++: the subset that the emulated machine has (PTX ISA 9.x).

`FORMS` is read from the top: the first pattern that fits a mnemonic whole gives its C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from warploom.emulate.machine_instructions import (
    arrive,
    arrive_remote,
    copy_async,
    matrices,
    mma,
    poll,
    store_async,
    tma_load,
    tma_store,
    wait,
    wgmma,
)
from warploom.emulate.operands import TYPES, Call, Operand
from warploom.errors import InputError

Make = Callable[[Call], str]


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
    (rf"mbarrier\.expect_tx{SCOPE}{SHARED}\.b64", _said("machine::mbarrier_expect({m0}, {u1});")),
    (
        rf"mbarrier\.arrive(\.expect_tx)?{SCOPE}{SHARED}\.b64",
        lambda call: arrive_remote(call) if call.ops[0].kind == "address" else arrive(call),
    ),
    (rf"mbarrier\.(try|test)_wait(\.parity)?{SCOPE}{SHARED}\.b64", wait),
    (r"fence\.mbarrier_init\.release\.cluster", _said("machine::fence_mbarrier_init();")),
    (r"fence\.proxy\.async(?:\.shared::cta|\.shared::cluster)?", _said("machine::fence_proxy();")),
    (r"fence\.proxy\.async\.global", NOTHING),
    (r"fence(?:\.acq_rel|\.sc)\.cluster", _said("machine::fence_mbarrier_init();")),
    (r"fence(?:\.acq_rel|\.sc)\.(?:cta|gpu|sys)|membar\.\w+", NOTHING),
    (
        r"barrier\.cluster\.arrive(?:\.release)?(?:\.aligned)?",
        _said("machine::cluster_arrive(true);"),
    ),
    (r"barrier\.cluster\.arrive\.relaxed(?:\.aligned)?", _said("machine::cluster_arrive(false);")),
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
        tma_load,
    ),
    (
        r"(cp|cp\.reduce)\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta(?:\.add)?(?:\.tile)?"
        r"\.bulk_group(?:\.L2::cache_hint)?",
        tma_store,
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
        r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::(?!cache_hint)\w+)?"
        r"(\.L2::cache_hint)?",
        copy_async,
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
        store_async,
    ),
    (r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", matrices),
    (r"wgmma\.fence\.sync\.aligned", _said("machine::wgmma_fence();")),
    (r"wgmma\.commit_group\.sync\.aligned", _said("machine::wgmma_commit();")),
    (r"wgmma\.wait_group\.sync\.aligned", _said("machine::wgmma_wait({u0});")),
    (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(8|16|32)\.f32\.(bf16|f16|tf32|e4m3|e5m2)"
        r"\.(bf16|f16|tf32|e4m3|e5m2)",
        wgmma,
    ),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", mma),
    (r"(ld|st)(?:\.weak|\.volatile)?\.(shared|shared::cta)(\.v[24])?\.(\w+)", _memory),
    (r"ld\.acquire\.gpu\.global\.(\w+)", poll),
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
    (r"max\.NaN\.f32", _math("std::isnan({1}) ? {1} : std::max({1}, {2})")),
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
