"""A program with two matmuls of which every pass has something to do, and its schedules."""

from dataclasses import replace

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import LaunchPlan


def _body(q, k, v, o):
    (i,) = t.grid(rows=t.cdiv(t.size("rows"), 128))
    rows, out = t.span(i * 128, 128), t.span(0, 16)
    left = t.load(q, rows, t.span(0, 16))
    acc = t.zeros(rows=128, out=16)
    stop = t.cdiv(t.size("keys"), 32)
    for j in t.loop(stop, until=t.part_end("rows") // 32):
        keys = t.span(j * 32, 32)
        product = left @ t.load(k, t.span(0, 16), keys)
        acc *= 0.5
        acc += t.exp2(product).cast(t.BF16) @ t.load(v, keys, out)
    t.store(o, rows, out, tile=acc)


def tiny_program():
    """The program: mma.3 gives `product`, cast.7 `exp2_1` of it, mma.9 adds to `acc`."""
    dims = {"q": "rows dims", "k": "dims keys", "v": "keys out"}
    arrays = {name: t.array(t.BF16, text) for name, text in dims.items()}
    return t.trace(_body, arrays | {"o": t.array(t.FP32, "rows out")}, name="tiny")


def tiny_case(pingpong=False, **options):
    """(program, schedule): two groups, and one iteration started ahead."""
    program = tiny_program()
    plan = LaunchPlan(split="rows", **options)
    policy = Policy("pingpong" if pingpong else "overlapped", plan, groups=2, depth=2)
    return program, replace(schedule_for(program, policy), name="tiny")
