"""Gradients of packed attention against float64: interpreted, interleaved at random, as emitted."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.backward_case import gradients

from warploom import tile as t
from warploom.autosched.schedules import schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.errors import InputError
from warploom.kernels.attention.backward import dealt
from warploom.kernels.attention.backward_config import (
    PLAIN,
    STYLES,
    TILE_FIELDS,
    BackwardConfig,
    packed_for,
)
from warploom.kernels.attention.gradients import kernel, parts
from warploom.kernels.attention.tasks import TileListConfig, tile_list, tile_list_schedule

torch = pytest.importorskip("torch")
tables = pytest.importorskip("warploom.integrations.torch_attention_packed")
BOUND = 6e-3  # of the largest element, as of dense gradients
# name -> (config, lengths of rows, lengths of keys, heads)
CASES = {
    "causal": (BackwardConfig(causal=True, group=2), (70, 0, 130), (140, 30, 130), 2),
    "short": (BackwardConfig(head_dim=64), (150, 1, 20), (40, 9, 130), 1),
    "in-turn": (
        BackwardConfig(head_dim=64, causal=True, deterministic=True),
        (200, 40),
        (300, 40),
        1,
    ),
    "wide": (BackwardConfig(head_dim=64, causal=True), (220, 0, 30), (250, 40, 30), 2),
    "kept": (BackwardConfig(head_dim=96, causal=True), (90, 70), (200, 70), 1),
    "long": (BackwardConfig(causal=True, style=STYLES[128, True]), (90, 70), (200, 70), 1),
    "window": (BackwardConfig(head_dim=80, causal=True, window=50), (100, 60), (100, 90), 1),
}


def packed_case(name):
    """(config, arrays of all three kernels, what they give) of random packed sequences."""
    config, rows, keys, heads = CASES[name]
    config = replace(config, packed=True)
    config = packed_for(config, sum(rows), heads // config.group, sms=3, longest=max(keys))
    random, d = np.random.default_rng(0), config.head_dim
    shapes = {"q": (sum(rows), heads, d), "k": (sum(keys), heads // config.group, d)}
    shapes |= {"do": shapes["q"], "v": shapes["k"]}
    values = {x: random.integers(-4, 5, shape) * 0.25 for x, shape in shapes.items()}
    bounds = {"row_bounds": np.cumsum([0, *rows]), "key_bounds": np.cumsum([0, *keys])}
    want = {f"d{x}": np.zeros(shapes[x]) for x in "qkv"} | {"o": np.zeros(shapes["q"])}
    want["lse"] = np.zeros((heads, sum(rows)))
    for s in range(len(rows)):
        r, k = (slice(*bounds[f"{x}_bounds"][s : s + 2]) for x in ("row", "key"))
        at = {"q": r, "do": r, "k": k, "v": k, "dq": r, "dk": k, "dv": k, "o": r}
        one = gradients(config, {x: values[x][at[x]].swapaxes(0, 1)[None] for x in values})
        for x in ("dq", "dk", "dv", "o"):
            want[x][at[x]] = one[x][0].swapaxes(0, 1)
        want["lse"][:, r] = one["lse"][0]
    listed = tasks(config, bounds, sum(rows), sum(keys), len(rows))
    return config, values | listed | kept(config, heads, sum(rows), len(rows)), want


def tasks(config, bounds, rows, keys, sequences):
    """Both lists of tasks."""
    ends = {f"{x}_ends": bounds[f"{x}_bounds"].astype(np.int32) for x in ("row", "key")}
    room = tables.room_between(config, 1, rows, keys, sequences)
    found = room.views(room.made("cpu"))
    for own in tables.lists(config, sequences):
        found |= t.interpret(tile_list(own), ends | {own.name: found[own.name].numpy()})
    return {x: found[x] for x in ("row_tiles", "key_tiles")}


def kept(config, heads, tokens, sequences):
    """Room for what the kernels leave one another, and for the gradients."""
    rows = (heads, config.places(tokens, sequences))
    found = {x: np.full(rows, np.nan, np.float32) for x in ("base", "delta")}
    found["dq_sum"] = np.full(config.sums_shape(rows), np.nan, np.float32)
    if config.deterministic:
        found["turns"] = np.full(config.turns_shape(rows), 7, np.int32)
    return found


def run_parts(config, values, want, run):
    """The gradients that the three kernels give, each run by `run(part, program, policy, arrays)`
    on what those before it left."""
    arrays = values | {x: want[x] for x in ("o", "lse")}
    arrays |= {f"d{x}": np.full(arrays[x].shape, np.nan, np.float32) for x in "qkv"}
    for part in parts(config):
        program, policy, _ = kernel(config, part)
        given = {array.name: arrays[array.name] for array in program.arrays}
        arrays |= run(part, program, policy, given)
    return {x: arrays[x] for x in ("dq", "dk", "dv")}


def close(got, want):
    off = {x: float(np.abs(got[x] - want[x]).max() / np.abs(want[x]).max()) for x in got}
    return all(value < BOUND for value in off.values())


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_gives_the_gradients_of_every_sequence(name):
    config, values, want = packed_case(name)

    def run(part, program, policy, given):
        got = t.interpret(program, given)
        if part == "main":
            for seed in range(2):
                seen = simulate(
                    lower(program, schedule_for(program, policy), verified), given, seed=seed
                )
                assert all(distance(seen[x], got[x]) == 0 for x in got)
        return got

    assert close(run_parts(config, values, want, run), want)


@pytest.mark.parametrize("name", ["causal", "wide", "kept", "long", "in-turn"])
def test_the_emitted_code_gives_them_too(name):
    config, values, want = packed_case(name)

    def run(part, program, policy, given):
        if part != "main":
            return t.interpret(program, given)
        source = emit(lower(program, schedule_for(program, policy)))
        library = emulate.compile_all([source], None)
        return emulate.run(library, 0, source, program, given, blocks=3)

    assert close(run_parts(config, values, want, run), want)


@pytest.mark.parametrize("order", ["sequences", "causal", "all"])
@pytest.mark.parametrize(("of", "brief"), [("rows", False), ("rows", True), ("keys", False)])
def test_a_list_has_every_tile_once_the_longest_tasks_first(of, brief, order):
    random = np.random.default_rng(2)
    rows = random.integers(0, 700, 9) * random.integers(0, 2, 9)
    keys = rows + random.integers(0, 300, 9)
    ends = {
        f"{x}_ends": np.array([0, *n.cumsum()], np.int32) for x, n in (("row", rows), ("key", keys))
    }
    own = TileListConfig((64, 128), of, order, brief, 32)
    room = {own.name: np.full((100, 2 if brief else TILE_FIELDS), -1, np.int32)}
    want = []
    for s, (row, key) in enumerate(zip(rows, keys, strict=True)):
        first, first_key = int(rows[:s].sum()), int(keys[:s].sum())
        tiles = -(-row // 64) if of == "rows" else -(-key // 128)
        causal = range(1, tiles + 1) if of == "rows" else range(tiles, 0, -1)
        length = {"sequences": [0] * tiles, "causal": causal, "all": [tiles] * tiles}[order]
        entry = [s] if brief else [first, row, first // 64 + s, first_key, key]
        want += [(-length[j], [*entry, j]) for j in range(tiles)]
    want = [entry for _, entry in sorted(want, key=lambda one: one[0])]
    none = [9, 0] if brief else [rows.sum(), 0, rows.sum() // 64 + 9, keys.sum(), 0, 0]
    want += [none] * (100 - len(want))
    program, arrays = tile_list(own), ends | room
    assert t.interpret(program, arrays)[own.name].tolist() == np.array(want).tolist()
    if brief or order == "sequences":
        return
    source = emit_simt(program, tile_list_schedule(own), "sm_90a")
    found = emulate.Library([source]).run(0, program, arrays)
    assert found[own.name].tolist() == np.array(want).tolist()


@pytest.mark.parametrize(
    ("heads", "sms", "most"), [(1, 3, 1.6), (4, 8, 1.1), (6, 5, 1.1), (32, 132, 1.1)]
)
def test_all_tiles_of_all_heads_are_shared_out_evenly(heads, sms, most):
    keys = np.array([1700, 130, 0, 2500, 90, 640])
    config = BackwardConfig(causal=True, packed=True)
    config = packed_for(config, 5060, heads, sms, int(keys.max()))
    lengths = sorted((n for key in keys for n in range(1, -(-int(key) // 128) + 1)), reverse=True)
    tokens = int(keys.sum())
    room = tables.room_between(config, heads, tokens, tokens, len(keys))
    tasks = len(room.views(room.made("cpu"))["key_tiles"])
    bands, rounds = heads // config.band, tasks * config.band // sms
    seen, loads = set(), np.zeros(sms)
    for number, turn, sm in np.ndindex(bands, rounds, sms):
        head, entry = dealt(config, number, turn, sm)
        assert (head, entry) not in seen and head < heads and entry < tasks
        seen.add((head, entry))
        loads[sm] += lengths[entry] if entry < len(lengths) else 0
    assert {(h, n) for h in range(heads) for n in range(len(lengths))} <= seen
    assert loads.max() < most * loads.mean()


def test_packed_heads_that_are_too_long_are_refused():
    with pytest.raises(InputError, match="packed heads of 192: expected heads of up"):
        BackwardConfig(head_dim=192, packed=True)


def test_long_causal_sequences_have_the_style_of_long_dense_ones():
    config = BackwardConfig(causal=True, packed=True)
    long, short = (packed_for(config, 9000, 16, 132, longest) for longest in (4096, 4095))
    assert long.written == STYLES[128, True] and short.written == PLAIN
    grouped = replace(config, group=2)
    assert packed_for(grouped, 9000, 8, 132, 4096).written == PLAIN
    assert replace(config, head_dim=64).tile == (64, 192)
