"""Who writes what: every element once in the library's programs, planted overlaps in others."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from warploom import tile as t
from warploom.kernels.library import configure, entry
from warploom.tile.footprint import footprints
from warploom.tile.interpret import bind


def traced(body, **arrays: str) -> t.Program:
    kinds = {name: t.array(t.FP32, dims) for name, dims in arrays.items()}
    return t.trace(body, kinds, name="written")


def of(program: t.Program, **shapes: tuple[int, ...]):
    return footprints(program, {name: np.zeros(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemm", {"m": 130, "n": 260, "batched": "true"}),
        ("gemm", {"slices": 3, "in_cluster": "true"}),
        ("gemm", {"swap_ab": "true", "tile": "128,128,64"}),
        ("attention", {"rows": 129, "causal": "true", "lse": "true"}),
    ],
)
def test_library_programs_write_each_element_once(name: str, settings: dict[str, object]) -> None:
    config, sizes = configure(name, {key: str(value) for key, value in settings.items()})
    program = entry(name).program(config)
    arrays = bind(program, entry(name).arrays(program, sizes, 0))
    for one in footprints(program, arrays).values():
        assert one.written.all() and one.overlap is None


def test_the_count_is_that_of_a_count_by_hand() -> None:
    """Boxes of 5 x 7 at steps of 4 and 6, cut off at the array's edges."""

    def body(y: t.Array) -> None:
        i, j = t.grid(m=3, n=4)
        t.store(y, t.span(i * 4 - 1, 5, "m"), t.span(j * 6, 7, "n"), tile=t.zeros(m=5, n=7))

    writers: Counter[tuple[int, int]] = Counter()
    for i in range(3):
        for j in range(4):
            places = [(r, c) for r in range(4 * i - 1, 4 * i + 4) for c in range(6 * j, 6 * j + 7)]
            writers.update(p for p in places if 0 <= p[0] < 14 and p[1] < 21)
    found = of(traced(body, y="m n"), y=(14, 21))["y"]
    assert found.written.sum() == len(writers)
    assert found.overlap is not None
    assert found.overlap.count == sum(many > 1 for many in writers.values())
    assert found.overlap.first == (0, 6)
    assert found.overlap.tasks == ({"m_tile": 0, "n_tile": 0}, {"m_tile": 0, "n_tile": 1})


def test_a_task_may_write_twice_and_dropped_indices_count() -> None:
    def body(y: t.Array) -> None:
        (i,) = t.grid(m=t.size("m"))
        for _ in t.loop(3):
            t.store(y, i, t.span(0, 8), tile=t.zeros(n=8))

    found = of(traced(body, y="m n"), y=(4, 6))["y"]
    assert found.written.all() and found.overlap is None


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False), (False, False)])
def test_a_store_beside_another_tasks_sum_overlaps(first: bool, second: bool) -> None:
    """Sums of tasks may be taken in any order; what is stored over one of them may not."""

    def body(y: t.Array) -> None:
        (i,) = t.grid(m=t.size("m"))
        t.store(y, i, t.span(0, 4), tile=t.zeros(n=4), add=first)
        t.store(y, i - 1, t.span(0, 2), tile=t.zeros(n=2), add=second)

    overlap = of(traced(body, y="m n"), y=(3, 4))["y"].overlap
    assert overlap is not None and overlap.count == 4 and overlap.first == (0, 0)


def test_sums_of_several_tasks_do_not_overlap() -> None:
    def body(y: t.Array) -> None:
        t.grid(m=t.size("m"))
        t.store(y, 0, t.span(0, 4), tile=t.zeros(n=4), add=True)

    found = of(traced(body, y="m n"), y=(3, 4))["y"]
    assert found.overlap is None and found.written.sum() == 4
