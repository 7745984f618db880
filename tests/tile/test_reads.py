"""Numbers that iterations read, and loads that stack what they take: meaning, invariants, text."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate

from warploom import tile as t
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.simt.choose import simt
from warploom.errors import InputError
from warploom.rewrites.replay import Replay
from warploom.tile.footprint import footprints
from warploom.tile.widen import widened

ARRAYS = {
    "x": t.array(t.FP32, "pages rows n"),
    "pages": t.array(t.INT32, "m"),
    "y": t.array(t.FP32, "m n"),
}
DRAW = np.random.default_rng(0)
X = DRAW.integers(-4, 5, (5, 4, 6)).astype(np.float32)
PAGES = np.array([3, 0, 4, 4, 1], np.int32)


def traced(body, **more):
    return t.trace(body, ARRAYS | more, name="paged")


def summed(x, pages, y):
    """The sum over some pages, two an iteration."""
    total = t.zeros(rows=8, n=6)
    for i in t.loop(2):
        first, second = t.read(pages, 2 * i), t.read(pages, 2 * i + 1)
        total += t.load(x, [first, second], t.span(0, 4), t.span(0, 6))
    t.store(y, t.span(0, 8, "rows"), t.span(0, 6), tile=total)


def test_a_load_stacks_the_places_that_an_iteration_reads():
    program = traced(summed)
    got = t.interpret(program, {"x": X, "pages": PAGES, "y": np.zeros((5, 6), np.float32)})["y"]
    want = np.concatenate([X[3] + X[4], X[0] + X[4]])[:5]
    assert np.array_equal(got, want)
    text = str(program)
    assert "pages_read = pages[(2 * i)]" in text
    assert "load x[(pages_read, pages_read_1), 0 +4, 0 +6]" in text
    assert str(Replay(program).run()) == text
    wide = t.interpret(widened(program), {"x": X, "pages": PAGES, "y": np.zeros((5, 6))})["y"]
    assert np.array_equal(wide, want)


def test_a_part_outside_of_its_array_is_the_edge():
    def body(x, pages, y):
        tile = t.load(x, [1, 7, -1], t.span(2, 4), t.span(0, 6), edge=np.inf)
        t.store(y, t.span(0, 12, "rows"), t.span(0, 6), tile=tile)

    got = t.interpret(
        traced(body),
        {"x": X, "pages": PAGES, "y": np.zeros((12, 6))} | {"pages": np.zeros(12, np.int32)},
    )["y"]
    assert np.array_equal(got[:2], X[1, 2:]) and np.isinf(got[2:]).all()


@pytest.mark.parametrize("at", [-1, 3])
def test_an_iteration_reads_numbers_of_its_array_only(at):
    def body(x, pages, y):
        for i in t.loop(3):
            t.store(y, i, t.span(0, 6), tile=t.load(x, t.read(pages, i + at), 0, t.span(0, 6)))

    arrays = {"x": X, "pages": PAGES, "y": np.zeros((5, 6))}
    with pytest.raises(InputError, match=r"pages_read = pages.*reads element \[(-1|5)\] of"):
        t.interpret(traced(body), arrays)


def _store_at(x, pages, y):
    for i in t.loop(3):
        t.store(y, t.read(pages, i), t.span(0, 6), tile=t.full(1.0, n=6))


def _store_further(x, pages, y):
    for i in t.loop(3):
        at = t.read(pages, i)
        for j in t.loop(2):
            t.store(y, t.span(at * 2 + j, 1), t.span(0, 6), tile=t.full(1.0, m=1, n=6))


def _invariant(x, pages, y):
    for i in t.loop(3):
        t.store(y, i, t.span(0, 6), tile=t.load(x, t.read(pages, 0), 0, t.span(0, 6)))


def _stored_too(x, pages, y):
    for i in t.loop(3):
        t.store(y, i, t.span(0, 6), tile=t.load(x, t.read(pages, i), 0, t.span(0, 6)))
    t.store(pages, t.span(0, 2), tile=t.full(1, t.INT32, m=2))


def _two_stacks(x, pages, y):
    t.store(y, t.span(0, 4, "n"), t.span(0, 6), tile=t.load(x, [0, 1], [0, 1], t.span(0, 6)))


def _no_rows(x, pages, y):
    t.store(y, 0, 0, tile=t.load(x, [0, 1], 0, 0))


def _stacked_store(x, pages, y):
    t.store(y, [0, 1], t.span(0, 6), tile=t.full(1.0, n=6))


def _nowhere(x, pages, y):
    t.store(y, 0, t.span(0, 6), tile=t.load(x, [], 0, t.span(0, 6)))


REFUSED = {
    "at a number that an iteration of loop i reads: two iterations may name one": _store_at,
    "at a number that an iteration of loop i reads": _store_further,
    "inside of loop i, on which its place does not depend": _invariant,
    "store to pages, from which pages_read is read as an index": _stored_too,
    "parts are stacked along the tile's first axis": _two_stacks,
    "parts are stacked along the tile's first axis, from": _no_rows,
    "only loads stack what they take|is a range of": _stacked_store,
    "no places are given for dimension 'pages'": _nowhere,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_order_is_refused_at_its_line(message):
    body = REFUSED[message]
    with pytest.raises(InputError, match=message) as caught:
        traced(body)
    assert f"{__file__}:" in str(caught.value) and "\n" not in str(caught.value)


def _with_loop(program, **changes):
    (loop,) = program.loops()
    body = tuple(replace(loop, **changes) if item is loop else item for item in program.body)
    return replace(program, body=body)


def _far(loop):
    load = loop.body[0]
    spans = (replace(load.spans[0], others=(t.Index("symbol", "far"),)), *load.spans[1:])
    return (replace(load, spans=spans), *loop.body[1:])


def test_the_verifier_checks_what_iterations_read():
    program = traced(summed)
    (loop,) = program.loops()
    first, second = loop.reads
    faults = {
        "pages_read, which has no value there": {"reads": (second,)},
        "read twice or hides another index": {"reads": (first, first, second)},
        "hides another index": {"reads": (replace(first, name="i"), first, second)},
        "uses j, which has no value": {"reads": (replace(first, at=(t.Index("symbol", "j"),)),)},
        "array range far uses far": {"body": _far(loop)},
        "no int32 parameter": {"reads": (replace(first, array=program.array("x")), second)},
    }
    for message, change in faults.items():
        with pytest.raises(InputError, match=message):
            t.verify(_with_loop(program, **change))


def _ragged(x, pages, y):
    """Rows of each page that the array names: a number read bounds the loop within."""
    (i,) = t.grid(m=t.size("m"))
    total = t.zeros(n=6)
    for j in t.loop(i, t.size("m")):
        page = t.read(pages, j)
        for k in t.loop(t.minimum_index(page, t.size("rows"))):
            again = t.read(pages, t.minimum_index(k + page, t.size("m") - 1))
            total += t.load(x, again, k, t.span(0, 6))
    t.store(y, i, t.span(0, 6), tile=total)


def test_threads_read_numbers_for_ranges_and_bounds(tmp_path):
    program = traced(_ragged)
    arrays = {"x": X, "pages": PAGES, "y": np.full((5, 6), np.nan, np.float32)}
    want = t.interpret(program, arrays)["y"]
    sums = [
        sum((X[PAGES[min(k + p, 4)], k] for p in PAGES[i:] for k in range(min(p, 4))), np.zeros(6))
        for i in range(5)
    ]
    assert np.array_equal(want, np.array(sums))
    assert footprints(program, arrays)["y"].written.all()
    source = emit_simt(program, simt(program), "sm_90")
    # A number of another iteration gives other sums.
    other = replace(source, text=source.text.replace("= GIVEN(pages_data + i_)", "= 1"))
    assert other.text != source.text
    library = emulate.compile_all([source, other], tmp_path)
    got = [emulate.run(library, n, s, program, arrays) for n, s in enumerate((source, other))]
    assert np.array_equal(got[0]["y"], want)
    assert not np.array_equal(got[1]["y"], want)


def test_threads_do_not_stack():
    program = traced(summed)
    with pytest.raises(InputError, match="load of stacked parts: only loads that feed a matmul"):
        emit_simt(program, simt(program), "sm_90")
