"""`optimize --record`: a table with rows of more shapes, and what must be refused."""

import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from warploom.cli import app
from warploom.errors import CheckFailed
from warploom.flows import record as module
from warploom.kernels.gemm.variant import GEMM
from warploom.kernels.library import KERNELS
from warploom.kernels.tuned.table import Table, as_toml
from warploom.perf.launch_time import MODEL


@pytest.fixture
def table(tmp_path, monkeypatch) -> Table:
    """GEMM's, in a file of its own."""
    shutil.copy(GEMM.path, tmp_path / "tuned.toml")
    own = Table(tmp_path / "tuned.toml", GEMM.row, GEMM.kinds, GEMM.fallback)
    monkeypatch.setitem(KERNELS, "gemm", replace(KERNELS["gemm"], table=own))
    return own


def recorded(table, *words, shapes="m=1000 n=1000 k=1000\n\nm=640 n=20000 k=512\n"):
    file = table.path.parent / "shapes"
    file.write_text(shapes)
    command = ["optimize", "gemm", "--record", str(file), "--measure", "none", *words]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def again(table) -> Table:
    return Table(table.path, table.row, table.kinds, table.fallback)


def test_a_row_a_shape_is_written_and_nothing_measured_is_lost(table, monkeypatch):
    def replayed(kernel, variant, config):
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
        names = [name for name in before.replays if not GEMM.variants[name].workspace]
        best = GEMM.fastest(plain, names, KERNELS["gemm"].config(), row.sizes)[0]
        assert min(row.predicted, key=lambda name: row.predicted[name]) == best


def test_a_new_kind_is_compiled_and_replayed(table, monkeypatch):
    asked = []

    def replayed(kernel, variant, config):
        asked.append(variant.name)
        if variant.swap_ab:
            raise CheckFailed("spills")
        return GEMM.known["16-bit"].replays["128x128"]

    monkeypatch.setattr(module, "_replayed", replayed)
    done = recorded(table, "--set", "dual=true")
    assert done.exit_code == 0 and "not of use: spills" in done.stderr
    kind = again(table).known["dual"]
    assert kind.settings == {"dual": "true"} and kind.rows and kind.replays
    assert not any(GEMM.variants[name].swap_ab for name in kind.replays)
    dual = KERNELS["gemm"].config(dual=True)
    assert set(asked) == {name for name, one in GEMM.variants.items() if one.takes(dual)}


def test_what_another_model_made_is_made_anew(table, monkeypatch):
    """Every variant is replayed again, and every row predicted again."""
    kind = GEMM.known["8-bit"]
    rows = tuple(row for row in kind.rows if row.measured)[:2]
    names = sorted({name for row in rows for name in row.predicted})
    few = replace(kind, replays={one: kind.replays[one] for one in names}, rows=rows)
    variants = {one: GEMM.variants[one] for one in {*names, GEMM.fallback}}
    text = as_toml(variants, {"8-bit": few, "16-bit": few})
    table.path.write_text(text.replace(f'model = "{MODEL}"', 'model = "5.2"'))
    asked = []

    def replayed(kernel, variant, config):
        asked.append(variant.name)
        found = kind.replays[variant.name]
        return replace(found, ends=replace(found.ends, begin=found.ends.begin + 2e6))

    monkeypatch.setattr(module, "_replayed", replayed)
    assert recorded(table, shapes="m=1000 n=1000 k=1000\n").exit_code == 0
    after = again(table)
    assert after.current and sorted(asked) == sorted(2 * names)
    for old, new in zip(rows, after.known["8-bit"].rows, strict=True):
        assert (old.sizes, old.measured) == (new.sizes, new.measured)
        assert all(time > 900 + old.predicted[x] for x, time in new.predicted.items())


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
