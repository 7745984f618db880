"""Cubins in objects, libraries and fat binaries, and what a refusal explains."""

from __future__ import annotations

import doctest
import json
import lzma
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.command import warploom

from warploom import sass, toolchain
from warploom.errors import InputError, ToolMissing, WarploomWarning
from warploom.sass.decode import container
from warploom.sass.decode.words import instruction_words
from warploom.sass.rules.verdict import REMEDIES

ROOT = Path(__file__).parents[2]
PREBUILT = ROOT / "tests" / "corpus" / "prebuilt"
SOFTMAX = "softmax_sm90a_triton3.6.0-ptxas12.8.93.cubin"
SKINNY = "skinny_gemm_sm80_triton3.6.0-ptxas12.8.93.cubin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cubins for two architectures, and both in a fat binary, a library and an object."""
    path = tmp_path_factory.mktemp("files")
    for name in (SOFTMAX, SKINNY):
        (path / name).write_bytes(lzma.decompress((PREBUILT / f"{name}.xz").read_bytes()))
    (path / "softmax.cubin").write_bytes((path / SOFTMAX).read_bytes())
    nvcc = toolchain.find("nvcc").path
    for name, more in (("plain", ()), ("small", ("--compress-all",))):
        images = (f"--image3=kind=elf,sm={sm},file={path / file}"
                  for sm, file in ((90, SOFTMAX), (80, SKINNY)))  # fmt: skip
        call = [nvcc.parent / "fatbinary", f"--create={path / name}.fatbin", *more, *images]
        subprocess.run(list(map(str, call)), check=True, capture_output=True)
        section = "__nv_relfatbin" if name == "plain" else ".nv_fatbin"
        rename = f"--rename-section=.data={section},alloc,load,readonly,data,contents"
        objcopy = [
            "objcopy", "-I", "binary", "-O", "elf64-x86-64", rename,
            f"{path / name}.fatbin", f"{path / name}.o",
        ]  # fmt: skip
        subprocess.run(objcopy, check=True, capture_output=True)
        subprocess.run(["ld", "-shared", f"{path / name}.o", "-o", f"{path / name}.so"], check=True)
    return path


def digests(found: list[sass.Cubin]) -> list[str]:
    return [one.digest for one in found]


@pytest.mark.parametrize("kind", ["fatbin", "o", "so"])
def test_every_cubin_of_a_file_is_read(folder: Path, kind: str) -> None:
    wanted = [sass.load(folder / name).digest for name in (SOFTMAX, SKINNY)]
    assert digests(sass.cubins(folder / f"plain.{kind}")) == wanted
    assert digests(sass.cubins(folder / f"plain.{kind}", "sm_80")) == wanted[1:]
    one = sass.load(folder / f"plain.{kind}", "softmax_kernel")
    assert one.digest == wanted[0] and "(cubin 1)" in one.origin


@pytest.mark.parametrize("kind", ["fatbin", "o", "so"])
def test_compressed_cubins_are_taken_out_by_cuobjdump(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / f"small.{kind}"
    assert path.stat().st_size < (folder / f"plain.{kind}").stat().st_size / 2
    wanted = {sass.load(folder / name).digest for name in (SOFTMAX, SKINNY)}
    if toolchain.candidates("cuobjdump"):
        assert set(digests(sass.cubins(path))) == wanted
    monkeypatch.setattr(toolchain, "candidates", lambda name: [])
    with pytest.raises(ToolMissing, match=r"cuobjdump .* none found; install it with"):
        sass.cubins(path)


def test_a_file_of_nvcc(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "two.cu"
    source.write_text(
        "__global__ void scale(float* x) { x[threadIdx.x] *= 2; }\n"
        "template <int N> __global__ void add(float* x) { x[threadIdx.x] += N; }\n"
        "template __global__ void add<3>(float*);\n"
    )
    done = toolchain.find("nvcc").run(
        "-arch=sm_90a", "--no-compress", "-fatbin", str(source), folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (one,) = sass.cubins(tmp_path / "two.fatbin")
    assert one.arch == "sm_90a" and set(one.kernels) == {"_Z5scalePf", "_Z3addILi3EEvPf"}
    assert all(one.legal for one in sass.verify_all(one, one).values())


def test_commands_choose_by_architecture_and_kernel(folder: Path) -> None:
    fat = str(folder / "plain.so")
    stats = json.loads(warploom("sass", "stats", fat, "--json").stdout)
    assert [one["name"] for one in stats] == ["softmax_kernel", "skinny_gemm_kernel"]
    shown = warploom("sass", "show", fat, "--kernel", "softmax_kernel", "--no-color")
    assert shown.returncode == 0 and shown.stdout.startswith("softmax_kernel  sm_90,")
    assert warploom("sass", "show", fat, "--arch", "sm_80").returncode == 0
    several = warploom("sass", "show", fat)
    assert several.returncode == 2 and several.stderr.count("\n") == 1
    assert "choose one with --arch and --kernel: sm_90a: softmax_kernel; sm_80:" in several.stderr
    none = warploom("sass", "stats", fat, "--arch", "sm_70")
    assert none.returncode == 2 and "nothing for sm_70; it holds sm_90a, sm_80" in none.stderr
    same = warploom("sass", "verify", fat, str(folder / "plain.fatbin"))
    assert same.returncode == 0 and same.stdout.count(": legal") == 2
    fewer = warploom("sass", "verify", fat, str(folder / SOFTMAX))
    assert fewer.returncode == 2 and "holds 1 cubins" in fewer.stderr


def test_damaged_files_are_one_line(folder: Path, tmp_path: Path) -> None:
    data = (folder / "plain.fatbin").read_bytes()
    cases = {
        "short": (data[:5000], "is truncated: a fat binary ends at byte"),
        "sizes": (data[:20] + b"\x01" + data[21:], "is damaged: an entry of a fat binary"),
        "empty": (data[:8] + bytes(8), "holds no machine code for a GPU"),
        "kinds": (data[:16] + b"\x01" + data[17:], "skinny_gemm_kernel"),
    }
    for name, (changed, words) in cases.items():
        path = tmp_path / name
        path.write_bytes(changed)
        done = warploom("sass", "stats", str(path))
        assert words in done.stdout + done.stderr, name
        assert (done.returncode, done.stderr.count("\n")) == ((0, 0) if name == "kinds" else (2, 1))


def test_an_architecture_that_is_not_read_is_said(folder: Path, tmp_path: Path) -> None:
    old = bytearray((folder / "plain.fatbin").read_bytes())
    at = old.index(b"\x7fELF") + 48  # e_flags
    old[at : at + 4] = b"".join(
        b"\x4b" if byte == 90 else bytes([byte]) for byte in old[at : at + 4]
    )
    (tmp_path / "old.fatbin").write_bytes(old)
    with pytest.warns(WarploomWarning, match=r"left out: .* is for sm_75"):
        found = sass.cubins(tmp_path / "old.fatbin")
    assert [one.sm for one in found] == [80]


def test_several_kernels_of_one_file_are_each_verified(
    cubin_of: Callable[[str], sass.Cubin],
) -> None:
    original = cubin_of("cuda_several_sm90a")
    names = list(original.kernels)[:2]
    edited = original
    for name in names:  # a cycle more of stall is legal in every kernel
        code = edited.kernels[name]
        words = list(code.words)
        field = sass.Control.decode(words[0][1])
        words[0] = (
            words[0][0],
            sass.Control.encode(_with(field, stall=field.stall + 1), words[0][1]),
        )
        edited = edited.replace(code, words)
    verdicts = sass.verify_all(original, edited)
    assert all(one.legal for one in verdicts.values())
    assert [one.control_edits for one in verdicts.values()][:3] == [1, 1, 0]
    data = bytearray(edited.data)
    data[-1] ^= 1
    spoiled = sass.verify_all(original, sass.parse(bytes(data)))
    assert [f.rule for one in spoiled.values() for f in one.findings] == ["CONTAINER"]
    with pytest.raises(InputError, match="is not in both"):
        sass.verify_all(original, cubin_of("cuda_calls_sm90a"))


def _with(field: sass.Control, **changes: int) -> sass.Control:
    return sass.Control(**{name: getattr(field, name) for name in field.__slots__} | changes)


@pytest.fixture(scope="module")
def verifier(folder: Path) -> sass.Verifier:
    return sass.Verifier(sass.load(folder / SOFTMAX))


def edited(verifier: sass.Verifier, index: int, **changes: int) -> np.ndarray:
    words = instruction_words(verifier.original, verifier.kernel.name).copy()
    high = int(words[index, 1])
    words[index, 1] = _with(sass.Control.decode(high), **changes).encode(high)
    return words


def offset_of(said: str) -> int:
    """Where the instruction stands that a finding's `other` names."""
    return int(said.split(maxsplit=1)[0], 16)


def test_the_cycles_that_a_refusal_asks_for_make_it_legal(verifier: sass.Verifier) -> None:
    """Every stall is shortened to 1, and mended where the finding says."""
    mended = 0
    for item in verifier.kernel.instructions:
        if item.control.stall < 3:
            continue
        words = edited(verifier, item.index, stall=1)
        verdict = verifier.check_words(words, every=True)
        more = [
            (int(found[1]), one)
            for one in verdict.findings
            if (found := re.match(r"(\d+) more cycles? of stall between the first", one.remedy))
        ]
        if len(more) != len(verdict.findings) or not more:
            continue
        cycles, _ = max(more, key=lambda pair: pair[0])
        again = edited(verifier, item.index, stall=1 + cycles)
        assert verifier.check_words(again, every=True).legal, more[0][1].explained()
        short = edited(verifier, item.index, stall=cycles)
        assert not verifier.check_words(short, every=True).legal
        mended += 1
    assert mended > 5


def test_the_wait_that_a_refusal_asks_for_makes_it_legal(verifier: sass.Verifier) -> None:
    mended = 0
    for item in verifier.kernel.instructions:
        if not item.control.wait:
            continue
        words = edited(verifier, item.index, wait=0)
        findings = verifier.check_words(words, every=True).findings
        asked = [re.match(r"a wait for scoreboard (\d) on the second", f.remedy) for f in findings]
        if not all(asked):
            continue
        for found, finding in zip(asked, findings, strict=True):
            index = finding.offset // 16
            high = int(words[index, 1])
            field = sass.Control.decode(high)
            words[index, 1] = _with(field, wait=field.wait | 1 << int(found[1])).encode(high)
            assert finding.other == "the block's edge" or offset_of(finding.other) < finding.offset
        after = verifier.check_words(words, every=True)
        # A scoreboard set in the cycle before is another refusal, with a remedy of its own.
        left = {one.rule for one in after.findings}
        assert left <= {"SCOREBOARD_VISIBLE"}, f"{findings[0].explained()}\n{after}"
        mended += after.legal
    assert mended > 3


def test_a_refused_order_names_both_instructions(verifier: sass.Verifier, folder: Path) -> None:
    words = instruction_words(verifier.original, verifier.kernel.name).copy()
    words[[1, 5]] = words[[5, 1]]
    verdict = verifier.check_words(words, every=True)
    order = [one for one in verdict.findings if one.rule == "REGISTER_ORDER"]
    assert order and all(one.other for one in order)
    lines = order[0].explained().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["first", "then", "legal"]
    changed = sass.load(folder / SOFTMAX)
    code = changed.kernel()
    made = changed.replace(code, [(int(low), int(high)) for low, high in words])
    (folder / "bad.cubin").write_bytes(made.data)
    done = warploom("sass", "verify", str(folder / SOFTMAX), str(folder / "bad.cubin"))
    assert (
        done.returncode == 1 and "  legal   with the first before the second again" in done.stdout
    )


def test_every_rule_of_the_page_says_what_is_legal() -> None:
    page = (ROOT / "docs" / "sass.md").read_text()
    table = page[page.index("| rule | a candidate is refused when |") :]
    named = re.findall(r"`([A-Z_0-9]+)`", "\n".join(table.split("\n\n")[0].splitlines()[2:]))
    computed = {
        "REGISTER_ORDER", "MEMORY_ORDER", "SYNC_ORDER", "SCOREBOARD_ORDER", "LATENCY", "SPACING",
        "LATENCY_ACROSS_BLOCKS", "BLOCK_DURATION", "BLOCK_EDGE", "PIPE_SPACING", "SYNC_DISTANCE",
        "INHERITED_WAIT", "WAIT_BEFORE_EXIT",
    }  # fmt: skip
    assert set(named) == (set(REMEDIES) - {"LINEAGE"}) | computed


def test_the_examples_of_the_api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert doctest.testmod(sass).attempted > 10
    assert doctest.testmod(sass).failed == 0
    assert all(getattr(sass, name) is not None for name in sass.__all__)
    assert set(sass.__all__) == set(dir(sass))
    assert shutil.which("objcopy") and container.SECTIONS
