"""Gradients of packed attention against float64: interpreted, interleaved at random, as emitted."""

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.backward_case import gradients

from warploom import tile as t
from warploom.autosched.schedules import schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.errors import InputError
from warploom.kernels.attention.backward_config import BackwardConfig, fitted
from warploom.kernels.attention.gradients import kernel, parts

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
    "window": (BackwardConfig(head_dim=80, causal=True, window=50), (100, 60), (100, 90), 1),
}


def packed_case(name):
    """(config, arrays of all three kernels, what they give) of random packed sequences."""
    config, rows, keys, heads = CASES[name]
    config = fitted(BackwardConfig(**{**vars(config), "packed": True}), max(rows), max(keys))
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
    return config, values | tasks(config, bounds) | kept(config, heads, sum(rows), len(rows)), want


def tasks(config, bounds):
    """Bounds with a sequence of no tokens at the end, and both tables."""
    found = {}
    for name, count in zip(("row", "key"), config.tile, strict=True):
        tokens = torch.tensor(bounds[f"{name}_bounds"], dtype=torch.int32)
        order = False if name == "key" and not config.deterministic else None
        most = int(tokens[-1]) // count + len(tokens) - 1
        found[f"{name}_tiles"] = tables.tile_table(tokens, count, most, order).numpy()
        found[f"{name}_bounds"] = np.append(tokens, tokens[-1]).astype(np.int32)
    return found


def kept(config, heads, tokens, sequences):
    """Room for what the kernels leave one another, and for the gradients."""
    rows = (heads, config.places(tokens, sequences))
    found = {x: np.full(rows, np.nan, np.float32) for x in ("base", "delta")}
    found["dq_sum"] = np.full(config.sums_shape(rows), np.nan, np.float32)
    if config.deterministic:
        found["turns"] = np.zeros(config.turns_shape(rows), np.int32)
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


@pytest.mark.parametrize("name", ["causal", "in-turn"])
def test_the_emitted_code_gives_them_too(name):
    config, values, want = packed_case(name)

    def run(part, program, policy, given):
        if part != "main":
            return t.interpret(program, given)
        source = emit(lower(program, schedule_for(program, policy)))
        library = emulate.compile_all([source], None)
        return emulate.run(library, 0, source, program, given, blocks=3)

    assert close(run_parts(config, values, want, run), want)


def test_a_table_has_every_tile_once_and_none_for_the_rest():
    bounds = torch.tensor([0, 130, 130, 200], dtype=torch.int32)
    assert tables.tile_table(bounds, 64, 6).tolist() == [
        [0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [3, 0],
    ]  # fmt: skip
    assert tables.tile_table(bounds, 64, 6, True).tolist() == [
        [0, 2], [0, 1], [2, 1], [0, 0], [2, 0], [3, 0],
    ]  # fmt: skip
    assert tables.tile_table(bounds, 64, 6, False)[:3].tolist() == [[0, 0], [0, 1], [2, 0]]


def test_packed_heads_that_are_too_long_are_refused():
    with pytest.raises(InputError, match="packed heads of 192: expected heads of up"):
        BackwardConfig(head_dim=192, packed=True)
