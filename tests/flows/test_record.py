"""`optimize --record`: a table with rows of more shapes, and what must be refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warploom.autosched.points import Point
from warploom.cli import app
from warploom.engine.search import Explored, Found
from warploom.engine.store import Row
from warploom.errors import CheckFailed, InputError
from warploom.flows import record as module
from warploom.kernels.gemm.variant import GEMM
from warploom.kernels.library import KERNELS, entry
from warploom.kernels.select import select
from warploom.kernels.tuned.table import Table, as_toml
from warploom.perf.launch_time import MODEL
from warploom.perf.replay import Ends


@pytest.fixture
def table(tmp_path, monkeypatch) -> Table:
    """GEMM's, in a file of its own."""
    shutil.copy(GEMM.path, tmp_path / "tuned.toml")
    own = Table(tmp_path / "tuned.toml", GEMM.template, GEMM.kinds, GEMM.fallback)
    monkeypatch.setitem(KERNELS, "gemm", replace(KERNELS["gemm"], table=own))
    return own


def recorded(table, *words, shapes="m=1000 n=1000 k=1000\n\nm=640 n=20000 k=512\n"):
    file = table.path.parent / "shapes"
    file.write_text(shapes)
    command = ["optimize", "gemm", "--record", str(file), "--measure", "none", *words]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def config_of(variant):
    return variant.config(KERNELS["gemm"].config())


def again(table) -> Table:
    return Table(table.path, table.template, table.kinds, table.fallback)


def test_a_row_a_shape_is_written_and_nothing_measured_is_lost(table, monkeypatch):
    def replayed(variant, config):
        raise CheckFailed("no compiler was to be asked")

    monkeypatch.setattr(module, "_replayed", replayed)
    before = table.known["16-bit"]
    done = recorded(table)
    assert done.exit_code == 0 and done.stdout.strip() == str(table.path)
    after = again(table).known["16-bit"]
    assert [row.sizes for row in after.rows[-2:]] == [
        {"m": 1000, "n": 1000, "k": 1000, "batch": 1},
        {"m": 640, "n": 20000, "k": 512, "batch": 1},
    ]
    kept = [row for row in after.rows if row.measured]
    assert [row.measured for row in kept] == [row.measured for row in before.rows if row.measured]
    for row in after.rows[-2:]:
        plain = replace(before, rows=())  # no error of the model is made good
        names = [name for name in before.replays if GEMM.variants[name].whole]
        best = GEMM.fastest(plain, names, KERNELS["gemm"].config(), row.sizes)[0]
        assert min(row.predicted, key=lambda name: row.predicted[name]) == best


def test_a_new_kind_is_compiled_and_replayed(table, monkeypatch):
    asked = []

    def replayed(variant, config):
        asked.append(variant.name)
        if config_of(variant).swap_ab:
            raise CheckFailed("spills")
        return GEMM.known["16-bit"].replays["128x128"]

    monkeypatch.setattr(module, "_replayed", replayed)
    done = recorded(table, "--set", "dual=true")
    assert done.exit_code == 0 and "not of use: spills" in done.stderr
    kind = again(table).known["dual"]
    assert kind.settings == {"dual": "true"} and kind.rows and kind.replays
    assert not any(config_of(GEMM.variants[name]).swap_ab for name in kind.replays)
    dual = KERNELS["gemm"].config(dual=True)
    assert set(asked) == {name for name, one in GEMM.variants.items() if one.takes(dual)}


@pytest.mark.parametrize("rules", ["2", MODEL.partition(".")[2]])
def test_what_another_model_made_is_made_anew(rules, table, monkeypatch):
    """Every row is predicted again, and every variant replayed again, if by other rules."""
    kind = GEMM.known["8-bit"]
    rows = tuple(row for row in kind.rows if row.measured)[:2]
    names = sorted({name for row in rows for name in row.predicted})
    old = tuple(replace(row, predicted=dict.fromkeys(row.predicted, 1.0)) for row in rows)
    few = replace(kind, replays={one: kind.replays[one] for one in names}, rows=old)
    variants = {one: GEMM.variants[one] for one in {*names, GEMM.fallback}}
    text = as_toml(variants, {"8-bit": few, "16-bit": few})
    table.path.write_text(text.replace(f'model = "{MODEL}"', f'model = "0.{rules}"'))
    asked = []

    def replayed(variant, config):
        asked.append(variant.name)
        found = kind.replays[variant.name]
        return replace(found, ends=replace(found.ends, begin=found.ends.begin + 2e6))

    monkeypatch.setattr(module, "_replayed", replayed)
    assert recorded(table, shapes="m=1000 n=1000 k=1000\n").exit_code == 0
    after = again(table)
    other = rules == "2"
    assert after.current and sorted(asked) == sorted(2 * names * other)
    for old, new in zip(rows, after.known["8-bit"].rows, strict=True):
        assert (old.sizes, old.measured) == (new.sizes, new.measured)
        later = 900 * other
        assert all(time > later + 0.999 * old.predicted[x] for x, time in new.predicted.items())


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """A user's program in a file of its own; its search finds two points, and replays of the plain
    one are twice as fast for steps of k, and have longer ends."""
    file = tmp_path / "mine.py"
    file.write_text(Path("examples/textbook_gemm.py").read_text())

    def searched(space, sizes, gpu, store, effort, say):
        tiles = (("tile_m", "128"), ("tile_n", "128"))
        if space.name == "gemm":
            tiles = (("tile", "128,64"),)
        points = [Point(tiles, (), "inflight"), Point(tiles, (), "lcsf", ("panels=1",))]
        return Explored([Found(point, Row(1.0, told={})) for point in points])

    def replayed(variant, config):
        if variant.name in GEMM.variants:
            raise CheckFailed("spills")
        found = GEMM.known["16-bit"].replays["128x128"]
        plain = variant.point.order == "inflight"
        loops = {x: replace(one, cycles=50.0 if plain else 999.0) for x, one in found.loops.items()}
        if variant.template is GEMM.template:  # the library's
            return replace(found, loops=loops, ends=Ends())
        ends = replace(found.ends, tail=30e3, finish=30e3) if plain else found.ends
        return replace(found, loops=loops, ends=ends)

    monkeypatch.setattr(module, "search", searched)
    monkeypatch.setattr(module, "_replayed", replayed)
    return f"{file}:kernel"


def test_a_users_program_has_its_table_beside_it(own, tmp_path):
    """What is recorded is chosen from for sizes that are no row, and left out where it does not
    hold: an open size that was given, other settings, another program."""
    size = dict.fromkeys("mn", "2048")
    assert not select(own, size).tuned  # nothing is recorded yet
    file = tmp_path / "shapes"
    file.write_text("m=2048 n=2048 k=128\nm=2048 n=2048 k=65536\n")
    command = ["optimize", own, "--record", str(file), "--measure", "none"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "mine.kernel.tuned.toml")
    short, long = (select(own, {**size, "k": k}) for k in ("256", "40000"))
    assert short.name == "tile_m=128 tile_n=128 lcsf panels=1"
    assert long.name == "tile_m=128 tile_n=128 inflight" and short.tuned and long.tuned
    assert short.launch.store_panels == 1 and short.config == {"tile_m": 128, "tile_n": 128}
    assert short.program == long.program == entry(own).program(short.config)
    assert not select(own, {**size, "tile_n": "64"}).tuned
    assert select(own, {**size, "tile_n": "128"}).tuned
    program = tmp_path / "mine.py"
    program.write_text(program.read_text().replace("tile=total", "tile=(total * 2.0)"))
    with pytest.raises(InputError, match="usual: recorded for another form of"):
        select(own, size)
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert select(own, size).tuned


def test_a_search_adds_to_a_table_of_the_library(table, own):
    done = recorded(table, "--effort", "quick", shapes="m=1024 n=1024 k=1024")
    assert done.exit_code == 0, done.stderr
    found = again(table)
    (*before, row) = found.known["16-bit"].rows
    assert len(before) == len(GEMM.known["16-bit"].rows)
    assert "tile=128,64 inflight" in found.variants.keys() & row.predicted.keys()
    with pytest.raises(InputError, match="--effort 'hasty': expected one of quick"):
        recorded(table, "--effort", "hasty")


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("recurrent", "rows=100", "recurrent has no tuned table"),
        ("gemm", "\n", "no shapes"),
        ("gemm", "m=0.5", "m='0.5'"),
        ("gemm", "q=5", "has no setting 'q'"),
        ("gemm", "m", "expected key=value"),
    ],
)
def test_what_cannot_be_recorded_is_told_in_a_line(name, shapes, message, tmp_path):
    file = tmp_path / "shapes"
    file.write_text(shapes)
    command = ["optimize", name, "--record", str(file), "--measure", "none", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    told = str(done.exception) + done.stderr
    assert done.exit_code and message in told and not (tmp_path / "tuned.toml").exists()


TWICE = """
from warploom import tile as t
from warploom.kernels import UserKernel


def program(rows: int = t.tunable(1, 2)):
    def twice(x):
        (i,) = t.grid(m=t.cdiv(t.size("m"), rows))
        place = t.span(i * rows, rows), t.span(0, 512)
        t.store(x, *place, tile=t.load(x, *place) * 2.0)

    return t.trace(twice, {"x": t.array(t.FP32, "m n")})


kernel = UserKernel(program, sizes={"m": 4, "n": 512})
"""


def test_a_kernel_without_matmuls_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(TWICE)
    file = tmp_path / "shapes"
    file.write_text("m=64 n=512\n")
    name = f"{tmp_path}/mine.py:kernel"
    done = CliRunner().invoke(app, ["optimize", name, "--record", str(file), "--measure", "none"])
    assert isinstance(done.exception, InputError)
    assert "the replay follows loops with matmuls" in str(done.exception)


def test_a_file_that_is_not_there_is_told(tmp_path):
    done = CliRunner().invoke(app, ["optimize", "gemm", "--record", str(tmp_path / "none")])
    assert done.exit_code and "expected a file of shapes" in str(done.exception) + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu", "h100"], ["--trace"], ["--compare"], ["--json"],
        ["--time-limit", "3"], ["--schedule", "lcsf"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--record", "--space"])
def test_options_that_do_nothing_beside_it_are_refused(option, words, tmp_path):
    file = tmp_path / "shapes"
    file.write_text("m=1000 n=1000 k=1000\n")
    option = [option, str(file)] if option == "--record" else [option]
    done = CliRunner().invoke(app, ["optimize", "gemm", *option, *words])
    told = str(done.exception) + done.stderr
    assert done.exit_code and f"does not go with {words[0]}" in told
