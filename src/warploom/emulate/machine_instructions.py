"""PTX instructions of the machine's own units as C++: bulk copies, barriers, matrices."""

from __future__ import annotations

from warploom.emulate.operands import KINDS, TYPES, Call, Operand
from warploom.errors import InputError


def coordinates(address: Operand) -> tuple[str, str]:
    """Map and coordinates of a tensor's box."""
    if len(address.parts) != 2 or address.parts[1].kind != "vector":
        raise InputError("a bulk tensor copy without coordinates")
    places = ", ".join(part.value("int") for part in address.parts[1].parts)
    return f"ptx::as<const void*>({address.parts[0].text})", f"const int at_[] = {{{places}}};"


def tma_load(call: Call) -> str:
    rank, multicast = call.groups
    map_, places = coordinates(call.ops[1])
    mask = call.u32(3) if multicast else "0"
    return f"{places} machine::tma_load({call.mem(0)}, {map_}, at_, {rank}, {call.mem(2)}, {mask});"


def tma_store(call: Call) -> str:
    verb, rank = call.groups
    map_, places = coordinates(call.ops[0])
    add = "true" if verb == "cp.reduce" else "false"
    return f"{places} machine::tma_store({map_}, {call.mem(1)}, at_, {rank}, {add});"


def arrive(call: Call) -> str:
    expect, *_ = call.groups
    count = "1" if expect or len(call.ops) < 3 else call.u32(2)
    lines = f"machine::mbarrier_expect({call.mem(1)}, {call.u32(2)});" if expect else ""
    return lines + call.ops[0].set(f"machine::mbarrier_arrive({call.mem(1)}, {count})")


def arrive_remote(call: Call) -> str:
    # Without a state the address comes first in older PTX.
    return f"machine::mbarrier_arrive({call.mem(0)}, 1);"


def wait(call: Call) -> str:
    kind, parity = call.groups
    if not parity:
        phase = call.ops[2].value("uint64_t")
        return call.ops[0].set(f"machine::mbarrier_wait_phase({call.mem(1)}, {phase})")
    name = "wait" if kind == "try" else "test"
    return call.ops[0].set(f"machine::mbarrier_{name}({call.mem(1)}, {call.u32(2)})")


def matrices(call: Call) -> str:
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


def poll(call: Call) -> str:
    kind = TYPES[call.groups[0]]
    read = f"machine::poll(); {kind} x_; ptx::load(&x_, {call.mem(1, 'uint64_t')}, 1); "
    return read + call.ops[0].set("x_")


def store_async(call: Call) -> str:
    kind = TYPES[call.groups[1]]
    parts = call.ops[1].parts or (call.ops[1],)
    values = ", ".join(part.value(kind) for part in parts)
    return (
        f"const {kind} x_[] = {{{values}}};"
        f"machine::store_async({call.mem(0)}, x_, sizeof x_, {call.mem(2)});"
    )


def copy_async(call: Call) -> str:
    bytes_, hinted = call.u32(2), bool(call.groups[0])  # a policy comes last
    count = call.u32(3) if len(call.ops) - hinted > 3 else bytes_
    source = f"reinterpret_cast<const void*>({call.mem(1, 'uint64_t')})"
    return f"machine::copy_async({call.mem(0)}, {source}, {bytes_}, {count});"


def mma(call: Call) -> str:
    kind = KINDS[call.groups[0]]
    d, a, b, c = (op.parts for op in call.ops)
    words = ", ".join(part.value("uint32_t") for part in (*a, *b))
    sums = ", ".join(part.value("float") for part in c)
    return (
        f"const uint32_t x_[] = {{{words}}}; const float c_[] = {{{sums}}}; float d_[4];"
        f"machine::multiply(d_, x_, x_ + 4, c_, machine::{kind});"
        + " ".join(part.set(f"d_[{i}]") for i, part in enumerate(d))
    )


def wgmma(call: Call) -> str:
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
