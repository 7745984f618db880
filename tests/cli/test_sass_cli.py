"""`warploom sass`: output, exit codes, and one clear line for every bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from warploom.cli import main
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import load
from warploom.sass.decode.kernel import decode

BUILDER = Path(__file__).parents[1] / "corpus" / "build.py"
SOFTMAX = "triton_softmax_1x4096_w8_s1_sm90.cubin"
SEVERAL = "cuda_several_sm90a.cubin"


@pytest.fixture(scope="session")
def folder() -> Path:
    """The corpus of cubins."""
    spec = importlib.util.spec_from_file_location("warploom_corpus_builder", BUILDER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.build_corpus()
    return Path(module.DEFAULT_DIRECTORY)


Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `warploom sass ...` in this process, as the installed command does."""

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["warploom", "sass", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def faulty(folder: Path, tmp_path: Path) -> Path:
    """The softmax kernel with every wait of its first waiting instruction dropped."""
    cubin = load(folder / SOFTMAX)
    kernel = decode(cubin)
    words = list(kernel.code.words)
    index = next(item.index for item in kernel.instructions if item.control.wait)
    low, high = words[index]
    control = Control.decode(high)
    words[index] = (
        low,
        Control(
            control.stall, control.stay, control.write_sb, control.read_sb, 0, control.reuse
        ).encode(high),
    )
    path = tmp_path / "faulty.cubin"
    path.write_bytes(cubin.replace(kernel.code, words).data)
    return path


def test_show_is_plain_when_piped(run: Run, folder: Path) -> None:
    done = run("show", folder / SOFTMAX)
    assert done.code == 0
    assert "\x1b[" not in done.out
    assert "softmax_kernel" in done.out
    assert "stall " in done.out
    assert "wait SB" in done.out


def test_colour_on_a_terminal_and_not_with_no_color(folder: Path) -> None:
    command = [sys.executable, "-m", "warploom", "sass", "show", str(folder / SOFTMAX)]

    def on_terminal(**environment: str) -> str:
        leader, follower = os.openpty()
        kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        with subprocess.Popen(
            [*command, "--block", "1"],
            stdout=follower,
            env={**kept, "TERM": "xterm-256color", **environment},
        ) as process:
            process.wait(60)
        os.close(follower)
        with os.fdopen(leader, "rb", buffering=0) as stream:
            return stream.read(65536).decode(errors="replace")

    assert "\x1b[" in on_terminal()
    assert "\x1b[" not in on_terminal(NO_COLOR="1")


def test_show_json_carries_reasons(run: Run, folder: Path) -> None:
    done = run("show", folder / SOFTMAX, "--json")
    data = json.loads(done.out)
    items = [item for block in data["blocks"] for item in block["instructions"]]
    assert data["arch"] == "sm_90a"
    assert [item["offset"] for item in items] == list(range(0, len(items) * 16, 16))
    assert any(item["stall_reason"] for item in items)
    assert any(item["wait_reasons"] for item in items)


def test_show_html(run: Run, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    done = run("show", folder / SOFTMAX, "--html", page)
    assert done.code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_show_options(run: Run, folder: Path) -> None:
    done = run("show", folder / SEVERAL, "--kernel", "saxpy", "--defuse", "--block", "0")
    assert done.code == 0
    assert "use " in done.out
    assert "block 1 " not in done.out


def test_stats_of_every_kernel(run: Run, folder: Path) -> None:
    done = run("stats", folder / SEVERAL, folder / SOFTMAX, "--json")
    names = [one["name"] for one in json.loads(done.out)]
    assert len(names) == 6
    assert names[-1] == "softmax_kernel"
    assert "issue cycles" in run("stats", folder / SOFTMAX).out


def test_diff_exits_zero_unless_asked(run: Run, folder: Path, faulty: Path) -> None:
    assert run("diff", folder / SOFTMAX, folder / SOFTMAX, "--exit-code").code == 0
    done = run("diff", folder / SOFTMAX, faulty)
    assert done.code == 0
    assert "wait SB" in done.out
    assert run("diff", folder / SOFTMAX, faulty, "--exit-code").code == 1
    data = json.loads(run("diff", folder / SOFTMAX, faulty, "--json").out)
    assert len(data[0]["rows"]) == 1


def test_verify_says_legal_and_illegal(run: Run, folder: Path, faulty: Path) -> None:
    legal = run("verify", folder / SOFTMAX, folder / SOFTMAX)
    assert legal.code == 0
    assert legal.out.startswith("legal (aliasing strict")
    illegal = run("verify", folder / SOFTMAX, faulty, "--alias", "triton", "--json")
    assert illegal.code == 1
    data = json.loads(illegal.out)
    assert data["legal"] is False
    assert data["alias"] == "triton"
    assert data["findings"]


def test_lint_exit_codes(run: Run, folder: Path, faulty: Path) -> None:
    assert run("lint", folder / SOFTMAX).code == 0
    done = run("lint", faulty)
    assert done.code == 1
    assert "SCOREBOARD_WAIT" in done.out
    findings = json.loads(run("lint", faulty, "--json").out)[0]["findings"]
    assert findings[0]["severity"] == "error"


# --- bad input: exit 2, one line, nothing half-written -----------------------------------------


def bad_files(folder: Path, tmp_path: Path) -> dict[str, Path]:
    """Files that are no usable cubin, by what is wrong with them."""
    good = (folder / SOFTMAX).read_bytes()
    foreign = bytearray(good)
    # e_flags at byte 48: the architecture stands in its second byte (CUDA 13's layout).
    (flags,) = struct.unpack_from("<I", foreign, 48)
    struct.pack_into("<I", foreign, 48, flags & ~0xFFFF | 0x0707)
    contents = {
        "not a cubin": b"hello, this is text\n",
        "empty": b"",
        "truncated": good[: len(good) // 2],
        "header only": good[:40],
        "architecture": bytes(foreign),
    }
    paths: dict[str, Path] = {}
    for name, data in contents.items():
        paths[name] = tmp_path / f"{name.replace(' ', '_')}.cubin"
        paths[name].write_bytes(data)
    paths["missing"] = tmp_path / "no_such_file.cubin"
    paths["a folder"] = tmp_path
    return paths


@pytest.mark.parametrize(
    "kind",
    ["not a cubin", "empty", "truncated", "header only", "architecture", "missing", "a folder"],
)
@pytest.mark.parametrize("command", ["show", "stats", "lint", "diff", "verify"])
def test_unusable_files(command: str, kind: str, run: Run, folder: Path, tmp_path: Path) -> None:
    path = bad_files(folder, tmp_path)[kind]
    two = command in ("diff", "verify")
    done = run(command, path, *([folder / SOFTMAX] if two else []))
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert str(path) in done.err


def test_kernel_not_found_and_not_named(run: Run, folder: Path) -> None:
    for arguments in (
        ("show", folder / SEVERAL),
        ("show", folder / SEVERAL, "--kernel", "nothing"),
        ("verify", folder / SEVERAL, folder / SEVERAL, "--kernel", "nothing"),
        ("stats", folder / SEVERAL, "--kernel", "nothing"),
        ("lint", folder / SEVERAL, "--kernel", "nothing"),
        ("diff", folder / SEVERAL, folder / SEVERAL, "--kernel", "nothing"),
    ):
        done = run(*arguments)
        assert done.code == 2, arguments
        assert done.err.count("\n") == 1
        assert "saxpy" in done.err


def test_other_bad_requests(run: Run, folder: Path, tmp_path: Path) -> None:
    without_lines = tmp_path / "without_lines.cubin"
    data = (folder / SOFTMAX).read_bytes()
    without_lines.write_bytes(data.replace(b".debug_line", b".hidden_lin"))
    block = run("show", folder / SOFTMAX, "--block", "999")
    assert (block.code, block.err.count("\n")) == (2, 1)
    source = run("show", without_lines, "--source")
    assert (source.code, source.err.count("\n")) == (2, 1)
    assert "-lineinfo" in source.err


def test_source_lines_come_from_the_file_beside_the_cubin(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["warploom", "build", "gemm", "-o", str(out)])
    with pytest.raises(SystemExit):
        main()
    # Another file of the name, where the compiler was called, is not the kernel's.
    (tmp_path / "gemm.cu").write_text("// wrong\n" * 1000)
    found = run("show", out / "gemm.cubin", "--source")
    assert (found.code, found.err) == (0, "")
    shown = [line.strip("│ ") for line in found.out.splitlines() if f"{out}/gemm.cu:" in line]
    lines = (out / "gemm.cu").read_text().splitlines()
    assert len(shown) > 50
    for line in shown:
        place, _, text = line.partition("  ")
        assert text == lines[int(place.rpartition(":")[2]) - 1].strip()

    for path in (tmp_path / "gemm.cu", out / "gemm.cu"):
        path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as Python has it; pytest collects them all
        alone = run("show", out / "gemm.cubin", "--source")
    (said,) = alone.err.splitlines()
    assert alone.code == 0 and f"{tmp_path}/gemm.cu:" in alone.out
    assert f"gemm.cubin was compiled from {tmp_path}/gemm.cu, which is not there: " in said


def test_a_candidate_for_another_architecture_is_refused(run: Run, folder: Path) -> None:
    arch = run("verify", folder / SOFTMAX, folder / "triton_softmax_1x4096_w8_s1_sm80.cubin")
    assert (arch.code, arch.err.count("\n")) == (2, 1)


def test_unwritable_output_leaves_nothing(run: Run, folder: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    for command in (("show", folder / SOFTMAX), ("diff", folder / SOFTMAX, folder / SOFTMAX)):
        done = run(*command, "--html", blocker / "page.html")
        assert done.code == 2
        assert done.err.count("\n") == 1
        folder_in_the_way = tmp_path / "taken.html"
        folder_in_the_way.mkdir(exist_ok=True)
        done = run(*command, "--html", folder_in_the_way)
        assert done.code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.html"]
    assert blocker.read_text() == "in the way"
