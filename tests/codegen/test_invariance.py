"""What a kernel's bits depend on: statements, planted faults, and other batches beside them."""

import math
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.codegen.batches import changed
from tests.codegen.wild_program import wild_case
from tests.codegen.wild_simt import wild_threads
from tests.kernels.decode_case import decode_case

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.invariance.certificate import certificate
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.attention import backward, backward_config
from warploom.kernels.attention.combine import combine
from warploom.kernels.attention.decode import DecodeConfig, decode, decode_policy
from warploom.kernels.attention.program import AttentionConfig, attention, default_policy
from warploom.kernels.gemm import program as gemm
from warploom.kernels.recurrent.program import RecurrentConfig, recurrent
from warploom.kernels.recurrent.program import default_policy as recurrent_policy
from warploom.kernels.rows.program import RowConfig, column_sums, row_program
from warploom.kernels.user import random_arrays
from warploom.tile import Loop
from warploom.tile.index import const, symbol

GEMM = gemm.GemmConfig(tile=(64, 32, 32))
EQUAL = DecodeConfig(group=4, head_dim=64, part=64, causal=True, page=16)


def kernel(program, schedule):
    """The block program, as its text has it."""
    block = lower(program, schedule)
    return parse_block(block_text(block), program)


def of_policy(program, policy):
    return kernel(program, schedule_for(program, policy))


def by_default(config):
    return of_policy(attention(config), default_policy(config))


def decode_kernel(config):
    return of_policy(decode(config), decode_policy(config))


def gemm_kernel(config):
    launch = LaunchPlan(cluster=("slices_tile", config.slices), store="direct")
    plan = launch if config.in_cluster else LaunchPlan()
    return kernel(
        gemm.gemm(config),
        schedule_for(gemm.gemm(config), Policy("inflight", plan, groups=1, depth=2)),
    )


def main_program(deterministic):
    return backward.backward(
        backward_config.BackwardConfig(deterministic=deterministic, causal=True)
    )


def main_kernel(deterministic):
    config = backward_config.BackwardConfig(deterministic=deterministic, causal=True)
    return of_policy(main_program(deterministic), backward.backward_policy(config))


# kernel -> dimensions along which its results are proved independent, and others with the reason
LIBRARY = {
    "decode, equal parts": (lambda: decode_kernel(EQUAL), "batch kv_heads columns", {
        "splits": r"parts .* depends on its place along splits \(splits_tile\): loop i"}),
    "decode, parts of one size": (lambda: combine(EQUAL, 8), "batch kv_heads splits d", {}),
    "decode, some parts": (lambda: decode_kernel(DecodeConfig(head_dim=64)), "", {
        "batch": r"depends on splits, which no input has: the launch chooses it: loop i"}),
    "decode, some parts joined": (lambda: combine(DecodeConfig(), 8), "batch", {
        "splits": "depends on how many splits"}),
    "decode, whole": (lambda: decode_kernel(DecodeConfig(head_dim=64, split=False)),
        "batch kv_heads rows keys", {"d": "depends on how many d there are: mma"}),
    "gemm": (lambda: gemm_kernel(GEMM), "m n", {"k": "how many k there are"}),
    "gemm, slices": (lambda: gemm_kernel(replace(GEMM, slices=3)), "m n", {"slices": "its place"}),
    "gemm, slices added up": (lambda: gemm.combine(replace(GEMM, slices=3)), "m n", {}),
    "gemm, slices in a cluster": (
        lambda: gemm_kernel(replace(GEMM, slices=2, in_cluster=True)), "m n", {}),
    "attention": (
        lambda: by_default(AttentionConfig(group=2, causal=True)),
        "batch", {"rows": "how many rows", "heads": r"k at a place that depends on its place"}),
    "attention, packed": (
        lambda: by_default(AttentionConfig(packed=True)),
        "tasks", {"row_tokens": "its place along row_tokens", "heads": "reads k at a place"}),
    "backward": (
        lambda: main_kernel(False), "", {"batch": "adds to dq_sum in the order"}),
    "backward, deterministic": (lambda: main_kernel(True), "batch", {"keys": "how many keys"}),
    "recurrent": (
        lambda: of_policy(recurrent(c := RecurrentConfig("head")), recurrent_policy(c)), "batch",
        {"rows": "its place along rows"}),
    "rmsnorm": (lambda: row_program(RowConfig("rmsnorm", 64, 2)), "m", {"n": "reduce_sum.3"}),
    "layernorm backward": (
        lambda: row_program(RowConfig("layernorm_backward", 64, 2)), "m",
        {"parts": r"dw_parts .* depends on its place along parts"}),
    "column sums": (lambda: column_sums(t.BF16), "n", {"parts": "how many parts"}),
}  # fmt: skip


@cache
def library(name):
    return certificate(LIBRARY[name][0]())


@pytest.mark.parametrize("name", LIBRARY)
def test_what_is_proved_of_the_library(name):
    _, proved, refused = LIBRARY[name]
    found = library(name)
    for dim in proved.split():
        found.require(dim)
    for dim, reason in refused.items():
        with pytest.raises(InputError, match=f"--invariant {dim}: not proved: .*{reason}"):
            found.require(dim)


def test_the_statement_of_a_sequence_names_its_own_keys_and_nothing_else():
    result = library("decode, equal parts").results[0]
    first = "of the first lengths[batch]"
    assert result.elements == (
        f"k[table[batch, every columns], page_keys below 16, kv_heads, d below 64], {first}",
        "lengths[batch]",
        "q[batch, kv_heads, rows, d below 64]",
        "table[batch, every columns]",
        f"v[table[batch, every columns], page_keys below 16, kv_heads, d], {first}",
    )
    assert result.numbers == ("d", "lengths[batch]", "page_keys", "rows")
    assert result.place == ("rows", "splits") and result.order == "fixed"
    joined = library("decode, parts of one size").results[0]
    part = "splits below ((lengths[batch] + 63) // 64)"
    assert f"parts[batch, kv_heads, {part}, rows, d]" in joined.elements
    assert joined.numbers == ("lengths[batch]",)
    assert library("attention, packed").results[0].elements[0] == (
        "k[key_tokens from key_bounds[tiles[tasks, 0]] below key_bounds[tiles[tasks, 0] + 1], "
        "heads, d below 128]"
    )
    assert "lengths[batch] is at most 16 columns" in library("decode, equal parts").assumed


def test_the_order_of_every_sum_is_named():
    sums = library("gemm, slices in a cluster").sums
    assert [one.split(":")[0] for one in sums] == [
        "mma.3 over k",
        "reduce_scatter.4 over slices_tile",
        "loop i from ((((k + 31) // 32) + 1) // 2) slices_tile to min(((((k + 31) // 32) + 1) // 2)"
        " + ((((k + 31) // 32) + 1) // 2) slices_tile, ((k + 31) // 32)), in order",
    ]


# ---- planted faults


def small(fault=""):
    """A small attention over cached keys, with a fault."""
    wide = {"q": "batch rows d", "k": "batch keys d", "v": "batch keys d"}
    arrays = {name: t.array(t.BF16, dims) for name, dims in wide.items()}
    arrays |= {"lengths": t.array(t.INT32, "batch"), "o": t.array(t.FP32, "batch rows d")}
    if fault == "parts of a grid axis":
        arrays["o"] = t.array(t.FP32, "batch splits rows d")

    def body(q, k, v, lengths, o):
        b, s = t.grid(batch=t.size("batch"), splits=t.size("splits") if "splits" in o.dims else 1)
        own = b + 1 if fault == "another sequence's length" else b
        most = "batch" if fault == "a length below the batch" else "keys"
        length = t.minimum_index(t.read(lengths, own), t.size(most))
        near = b + 1 if fault == "another sequence's keys" else b
        rows, d = t.span(0, 64), t.span(0, 64)
        first, last = 0, t.cdiv(length, 32)
        if fault == "parts of the batch":
            last = t.minimum_index(last, t.size("batch"))
        if "splits" in o.dims:
            each = (last + t.size("splits") - 1) // t.size("splits")
            first, last = s * each, t.minimum_index(s * each + each, last)
        if fault == "keys of the whole cache":
            last = t.cdiv(t.size("keys"), 32)
        acc, total = t.zeros(rows=64, d=64), t.zeros(rows=64)
        queries = t.load(q, b, rows, d)
        for j in t.loop(first, last):
            at = (j + b) % last if fault == "an order of the place" else j
            keys = t.span(at * 32, 32)
            scores = queries @ t.load(k, near, keys, d)
            start = at * 32 + (32 if fault == "a mask of the next block" else 0)
            bound = (
                t.size("keys")
                if fault in ("a mask of the cache", "keys of the whole cache")
                else length
            )
            place = t.coordinate("keys", 32, start)
            seen = place <= bound if fault == "a mask one too long" else place < bound
            if fault == "a mask of where the sequence stands":
                seen = place < length - b
            value = 0.0 if fault == "a mask of weight 1" else -math.inf
            masked = scores if fault == "no mask" else t.where(seen, scores, value)
            weights = t.exp2(masked)
            summed = t.exp2(scores) if fault == "a sum without its mask" else weights
            total += t.sum_along(summed, "keys")
            acc += weights.cast(t.BF16) @ t.load(v, near, keys, d)
        out = acc * t.reciprocal(total)
        if fault == "the place as a value":
            out = out + t.number(b, t.FP32)
        if fault == "how many as a value":
            out = out * t.number(t.size("batch"), t.FP32)
        where = (0 if fault == "one place for all" else b, *((s,) if "splits" in o.dims else ()))
        t.store(o, *where, rows, d, tile=out, add=fault == "atomics")

    return t.trace(body, arrays, name="small")


def small_kernel(fault=""):
    program = small(fault)
    return kernel(
        program,
        schedule_for(program, Policy("inflight", LaunchPlan(store="direct"), groups=1, depth=2)),
    )


FAULTS = {
    "another sequence's length": ("batch", r"reads lengths at \(batch_tile \+ 1\) of batch"),
    "another sequence's keys": ("batch", "depends on how many batch there are: load.3"),
    "a length below the batch": (
        "batch",
        r"is proved only where lengths\[batch\] is at most batch",
    ),
    "parts of the batch": ("batch", "depends on how many batch there are: loop i"),
    "parts of a grid axis": ("batch", "depends on splits, which no input has"),
    "keys of the whole cache": ("keys", "depends on how many keys there are: coordinate"),
    "an order of the place": ("batch", r"its place along batch \(batch_tile\): coordinate.5"),
    "a mask of the cache": ("keys", "depends on how many keys there are: coordinate"),
    "a mask of the next block": ("keys", "depends on how many keys there are: reduce_sum"),
    "a mask one too long": ("keys", "depends on how many keys there are: reduce_sum"),
    "a mask of where the sequence stands": ("batch", "depends on its place along batch"),
    "a mask of weight 1": ("keys", "depends on how many keys there are: reduce_sum"),
    "no mask": ("keys", "depends on how many keys there are: reduce_sum"),
    "a sum without its mask": ("keys", "depends on how many keys there are: reduce_sum"),
    "the place as a value": ("batch", r"depends on its place along batch \(batch_tile\)"),
    "how many as a value": ("batch", "depends on how many batch there are: coordinate"),
    "one place for all": ("batch", "the place in o does not tell batch_tile"),
    "atomics": ("batch", "store_add.* adds to o in the order in which tasks and iterations come"),
}


def test_what_has_no_fault_is_proved():
    found = certificate(small_kernel())
    assert not found.fault
    for dim in ("batch", "keys"):
        found.require(dim)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(fault):
    dim, reason = FAULTS[fault]
    with pytest.raises(InputError, match=f"--invariant {dim}: not proved: .*{reason}"):
        certificate(small_kernel(fault)).require(dim)


# Of the small kernel's text: what is changed, and the rule of the block program that says so.
STEPS = {
    "a sum is not zeroed": (r" +Run fill.0\n", "", "every op is there once"),
    "a sum goes on from the task before": (
        r"( +Run fill.0\n)(.*)( +Run store.18\n)", r"\2\3\1", "the program's meaning"),
    "a block is added twice": (r"( +Run add.12 .*?\n)", r"\1\1", "every op is there once"),
    "the last block is left out": (
        r"(epilogue 0.*?) +Run add.12 \(iteration -1\)\n", r"\1", "the program's meaning"),
    "a block goes before another": (
        r"(steady.*?)Run add.12 \(iteration -1\)", r"\1Run add.12", "the program's meaning"),
    "keys of another task": (r" +Wait k\n", "", "the groups' slots"),
    "keys are overwritten": (
        r"(steady.*?)( +Issue mma.15.*?)( +Release v .*?\n)", r"\1\3\2", "the groups' slots"),
    "queries of the task before": (r" +straight\n +Release q\n", "", "the groups' slots"),
    "weights of the block before": (
        r"( +Join <= 0: product\n)( +Run exp2.10\n)", r"\2\1", "unfinished matmuls"),
}  # fmt: skip


@pytest.mark.parametrize("fault", STEPS)
def test_a_planted_step_is_refused(fault):
    old, new, rule = STEPS[fault]
    text = block_text(small_kernel())
    wrong, count = re.subn(old, new, text, count=1, flags=re.S)
    assert count == 1 and wrong != text
    found = certificate(parse_block(wrong, small()))
    with pytest.raises(InputError, match=f"not proved: block program inflight: {rule}: "):
        found.require("batch")


def row_operation(fault=""):
    """Rows that are copied, four a task, with a fault."""
    arrays = {name: t.array(t.FP32, "m n") for name in "xy"} | {"at": t.array(t.INT32, "places")}

    def body(x, y, at):
        tasks = {"place in the only tile": 1, "columns moved by the place": t.size("m")}
        (i,) = t.grid(m=tasks.get(fault, t.cdiv(t.size("m"), 4)))
        first = 0 if fault == "place in the only tile" else i * 4
        rows, cols = t.span(first, 4), t.span(0, 32)
        tile = t.load(x, t.span(i * 4 + 1, 4) if fault == "the next row" else rows, cols)
        if fault == "a sum over rows":
            tile = tile - t.sum_along(tile, "m")
        if fault == "rows before":
            tile = t.cumsum(tile, "m")
        if fault.startswith("place in"):
            tile = tile + t.coordinate("m", 4).cast(t.FP32)
        if fault == "columns by the place":
            tile = t.load(x, rows, t.span(i, 32))
        if fault == "columns moved by the place":
            rows, tile = i, t.load(x, i, cols)
            cols = t.span(t.read(at, i), 32)
        t.store(y, rows, cols, tile=tile)

    return t.trace(body, arrays, name="rows")


ROWS = {
    "the next row": "depends on how many m there are: store.1",
    "a sum over rows": "depends on how many m there are: reduce_sum.1",
    "rows before": "depends on how many m there are: cumsum.1",
    "place in a tile": r"depends on its place along m \(m_tile\): store.4",
    "place in the only tile": "depends on its place along m: coordinates of m",
    "columns by the place": "reads x at a place that depends on its place along m",
    "columns moved by the place": "reads at at a place that depends on its place along m",
}


@pytest.mark.parametrize("fault", ROWS)
def test_a_planted_fault_of_rows_is_refused(fault):
    certificate(row_operation()).require("m")
    with pytest.raises(InputError, match=f"--invariant m: not proved: .*{ROWS[fault]}"):
        certificate(row_operation(fault)).require("m")


# ---- other batches

SIZES = {"m": 37, "n": 40, "k": 70, "batch": 3, "heads": 2, "kv_heads": 1, "rows": 40, "keys": 90,
         "d": 64, "slices": 3, "parts": 2, "one": 1}  # fmt: skip
# Dimensions that these programs fix: another size of them is another result, or none.
FIXED = {"rmsnorm": "n", "softmax": "n", "layernorm backward": "n", "small": "d rows",
         "attention": "d kv_heads heads rows", "gemm": "", "gemm, slices": "slices",
         "gemm, slices in a cluster": ""}  # fmt: skip
SMALL = {
    "attention": lambda: attention(AttentionConfig(
        head_dim=64, group=2, causal=True, tile=(64, 32))),
    "gemm": lambda: gemm.gemm(replace(GEMM, bias=True, activation="gelu")),
    "gemm, slices": lambda: gemm.gemm(replace(GEMM, slices=3)),
    "gemm, slices in a cluster": lambda: gemm.gemm(replace(GEMM, slices=2, in_cluster=True)),
    "rmsnorm": lambda: row_program(RowConfig("rmsnorm", 40, 4)),
    "softmax": lambda: row_program(RowConfig("softmax", 40, 2)),
    "layernorm backward": lambda: row_program(RowConfig("layernorm_backward", 40, 2)),
    "small": small,
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_other_batches_change_what_the_certificate_says(name):
    """Nothing that is proved independent, in many batches; and what is not in one of them."""
    program = SMALL[name]()
    sizes = {dim: SIZES[dim] for dim in program.dims}
    arrays = random_arrays(program, sizes, 0)
    if name == "small":
        arrays["lengths"] = np.array([90, 7, 40], np.int32)
    random = np.random.default_rng(1)
    scalars = {var.name: 1e-5 for var in program.scalars}
    for dim, why in certificate(program).independent.items():
        if dim not in FIXED[name].split():
            batches = [changed(program, arrays, dim, random, scalars=scalars) for _ in range(4)]
            assert any(batches) == bool(why), (dim, why, batches)


@pytest.mark.parametrize("seed", [*range(402, 408), 305, 308, 311])
def test_wild_programs_keep_what_is_proved(seed):
    try:
        case = wild_case(seed) if seed < 400 else None
        program, arrays = wild_threads(seed) if case is None else (case.program, case.arrays)
    except InputError:
        pytest.skip("the language refuses it")
    for dim, why in certificate(program).independent.items():
        random = np.random.default_rng(seed)
        assert why or dim == "p" or not changed(program, arrays, dim, random), dim


def attended(config, arrays, splits, room=8):
    """What `decode` and `combine` give over so many parts."""
    batch, heads, rows, d = np.shape(arrays["q"])
    shape = (batch, heads, splits, rows)
    made = {"parts": np.full((*shape, d), np.nan), "sums": np.full(shape, np.nan)}
    found = t.interpret(decode(config), arrays | made)
    parts = {name: found[name] for name in made}
    parts |= {"lengths": arrays["lengths"]} if config.part else {}
    out = np.full((batch, rows // config.group, heads, config.group, d), np.nan)
    return t.interpret(combine(config, room), {**parts, "o": out})["o"]


@pytest.mark.parametrize("part", [64, None])
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(part):
    """Parts of one size: whatever stands beside a sequence, and whatever its cache has room for.
    As many parts as the launch likes: other bits."""
    config = DecodeConfig(group=4, head_dim=64, part=part)
    arrays, _ = decode_case(config, (300, 0, 129, 77))
    arrays |= {name: np.random.default_rng(7).normal(size=arrays[name].shape) for name in "qkv"}
    together = attended(config, arrays, 5)
    same = []
    for number, length in enumerate(arrays["lengths"]):
        alone = {name: arrays[name][number : number + 1] for name in ("q", "lengths")}
        alone |= {name: arrays[name][number : number + 1, :, : max(1, length)] for name in "kv"}
        splits = max(1, -(-length // 64)) if part else 2
        same.append(np.array_equal(attended(config, alone, splits), together[number : number + 1]))
    assert all(same) == bool(part) and same[1]


def in_turn(number=None, at=None):
    """The program of deterministic gradients, its turns replaced."""
    program = main_program(True)

    def swapped(item):
        if isinstance(item, Loop):
            return replace(item, body=tuple(map(swapped, item.body)))
        if item.turn is None:
            return item
        turn = replace(
            item.turn,
            number=number(item.turn.number) if number else item.turn.number,
            at=at(item.turn.at) if at else item.turn.at,
        )
        return replace(item, turn=turn)

    return replace(program, body=tuple(map(swapped, program.body)))


def test_sums_in_turn_have_one_order():
    assert certificate(in_turn()).require("batch") is None
    assert certificate(in_turn(number=lambda n: n * 3 + 1)).require("batch") is None


TASK, COUNTER, BATCH = (symbol(name) for name in ("keys_tile", "i", "batch_tile"))
TURN_FAULTS = {
    "all the same": ({"number": lambda n: const(0)}, "turns are not shown to be different"),
    "two at a time": ({"number": lambda n: n // 2}, "turns are not shown to be different"),
    "of the iteration": ({"number": lambda n: COUNTER}, "turns are not shown to be different"),
    "a product": ({"number": lambda n: n + TASK * BATCH}, "turns are not shown to be different"),
    "taken out again": ({"number": lambda n: n + TASK}, "turns are not shown to be different"),
    "of a number that is read": ({"number": lambda n: n + symbol("read")}, "depend on read"),
    "of the sequence": ({"number": lambda n: n + BATCH}, "depends on its place along batch"),
    "one counter for all heads": (
        {"at": lambda at: (at[0], const(0), *at[2:])}, "counted by another place"),
    "the next counter": ({"at": lambda at: (*at[:-1], at[-1] + 1)}, "counted by another place"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TURN_FAULTS)
def test_turns_that_leave_the_order_open_are_refused(fault):
    changed, said = TURN_FAULTS[fault]
    with pytest.raises(InputError, match=said):
        certificate(in_turn(**changed)).require("batch")


def test_which_tasks_add_counts_too():
    program = in_turn()
    grid = tuple((n, e + symbol("batch") if n == "keys_tile" else e) for n, e in program.grid)
    with pytest.raises(InputError, match="how many batch there are"):
        certificate(replace(program, grid=grid)).require("batch")


def test_tasks_of_grouped_heads_are_not_told_apart():
    config = backward_config.BackwardConfig(deterministic=True, causal=True, group=4)
    with pytest.raises(InputError, match="does not tell i, keys_tile, kv_heads_tile"):
        certificate(backward.backward(config)).require("batch")
