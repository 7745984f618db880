"""The programs of `examples/programs`: NumPy's numbers at sizes with tails, in every form."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tests.codegen import emulate

from warploom.autosched.plans import values
from warploom.autosched.points import Point
from warploom.engine.points import Space
from warploom.kernels.check import checked
from warploom.kernels.library import configure
from warploom.rewrites.check import check_meaning
from warploom.tile import BF16, interpret, round_to

FOLDER = Path(__file__).parents[2] / "examples" / "programs"
# The smallest tiles of each, and two shapes: one with tails everywhere, one smaller than a tile.
PROGRAMS = {
    "rmsnorm_linear": ("tile_n=128", ("m=130 n=264 k=136", "m=7 n=8 k=72")),
    "swiglu": ("tile_n=64", ("m=130 n=136 k=136", "m=7 n=8 k=72")),
    "layernorm_gelu": ("tile_n=128", ("m=130 n=264 k=136", "m=7 n=8 k=72")),
    "batched_gemm": ("tile_m=64", ("batch=3 m=72 n=136 k=88", "batch=1 m=7 n=8 k=72")),
    "fp8_linear": ("tile_n=128", ("m=130 n=264 k=144", "m=7 n=8 k=16")),
    "softcap_alibi": ("", ("heads=3 rows=130 keys=130", "heads=1 rows=7 keys=7")),
    "window_sinks": ("", ("rows=300 keys=300", "heads=16 pairs=2 rows=7 keys=7")),
}


def settings(*texts: str) -> dict[str, str]:
    return dict(word.split("=") for text in texts for word in text.split())


def test_every_program_is_here_and_short() -> None:
    files = {path.stem: path for path in FOLDER.glob("*.py")}
    assert files.keys() == {*PROGRAMS, "cross_entropy"}
    for name, path in files.items():
        assert len(path.read_text().splitlines()) <= 60, name


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_its_formula(name) -> None:
    tiles, shapes = PROGRAMS[name]
    kernel = f"{FOLDER}/{name}.py:kernel"
    for shape in shapes:
        found = checked(kernel, *configure(kernel, settings(tiles, shape))).require()
        assert found.judge == "the reference given"


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_form_of_a_program_means_the_same(name) -> None:
    tiles, shapes = PROGRAMS[name]
    space = Space(f"{FOLDER}/{name}.py:kernel", settings(tiles))
    sizes = configure(space.name, settings(tiles, shapes[0]))[1]
    chosen = next(iter(space.sizes()))
    program = space.textbook(chosen)
    arrays = space.entry.arrays(program, sizes, 1)
    made = space.forms(chosen)
    assert len(made) > 1 or name in ("rmsnorm_linear", "layernorm_gelu")
    for form in made:
        check_meaning(program, form.program, arrays)


@pytest.mark.parametrize(("rows", "tokens", "depth"), [(130, 600, 136), (5, 8, 64)])
def test_the_two_kernels_of_a_loss_give_it(rows, tokens, depth) -> None:
    spec = importlib.util.spec_from_file_location("cross_entropy", FOLDER / "cross_entropy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    random = np.random.default_rng(0)
    x = round_to(BF16, random.normal(size=(rows, depth)).astype(np.float32))
    w = round_to(BF16, random.normal(size=(tokens, depth)).astype(np.float32))
    targets, parts = random.integers(0, tokens, rows), np.full((rows, -(-tokens // 256)), np.nan)
    given = {"x": x, "w": w, "targets": targets, "sums": parts, "picked": parts}
    made = interpret(module.blocks_program(), given)
    loss = interpret(
        module.loss_program(),
        {"sums": made["sums"], "picked": made["picked"], "loss": np.full(rows, np.nan)},
    )["loss"]
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    highest = logits.max(1)
    want = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
    want -= logits[np.arange(rows), targets]
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-4)


SHARED = {  # points whose vectors go through shared memory, of one task after another in a block
    "layernorm_gelu": ("tile_m=128 tile_n=128", "inflight", ("panels=4",)),
    "fp8_linear": ("tile_m=128 tile_n=128", "lcsf", ("store=direct",)),
}


def test_vectors_that_groups_share_are_those_of_the_task() -> None:
    """On the emulated machine, of whose threads any may be late: a task's vectors are not there
    before all have read those of the task before."""
    cases = []
    for name, (tile, order, plan) in SHARED.items():
        space = Space(f"{FOLDER}/{name}.py:kernel", {})
        sizes = tuple(word.split("=") for word in tile.split())
        point = Point(tuple(map(tuple, sizes)), (), order, (*plan, "vectors=shared"))
        selected = space.selected(point, "h200")
        assert values(selected.program, "vectors") == ("shared",)
        assert selected.emitted().text.count("_shared[") > 2
        cases.append((space, name, selected))
    library = emulate.compile_all([selected.emitted() for *_, selected in cases], None)
    for number, (space, name, selected) in enumerate(cases):
        shape = configure(space.name, settings(PROGRAMS[name][1][0]))[1]
        arrays = space.entry.arrays(selected.program, shape, 1)
        wanted = interpret(selected.program, arrays)["y"]
        for seed in range(3):
            got = emulate.run(
                library, number, selected.emitted(), selected.program, arrays, {}, 1, seed
            )["y"]
            assert np.abs(got - wanted).max() <= 2e-2 * np.abs(wanted).max(), (name, seed)


def test_programs_without_such_vectors_have_no_such_choice() -> None:
    for name in ("rmsnorm_linear", "swiglu", "batched_gemm"):
        space = Space(f"{FOLDER}/{name}.py:kernel", {})
        assert values(space.textbook(next(iter(space.sizes()))), "vectors") == ()
