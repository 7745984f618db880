"""The emitted CUDA and its machine code: what must be in it, what must not, what is refused."""

import json
import re
import subprocess
from dataclasses import replace

import pytest
from tests.lowering import with_slots

from warploom import toolchain
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import Built, build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.names import c_name
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import CheckFailed, InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import ATTENTION
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.tile import (
    BF16,
    E4M3,
    FP32,
    array,
    cdiv,
    coordinate,
    grid,
    load,
    loop,
    max_along,
    size,
    span,
    store,
    trace,
    where,
    zeros,
)

PLAN = LaunchPlan(split="m", cluster=("m_tile", 2), supergroup=8)


def gemm_schedule(config=None, depth=4, plan=PLAN):
    program = gemm(config or GemmConfig())
    return program, schedule_for(program, Policy("inflight", plan, groups=2, depth=depth))


def attention_schedule(**config):
    program = attention(AttentionConfig(**config))
    return program, schedule_for(
        program, Policy("pingpong", LaunchPlan(split="rows"), groups=2, depth=2)
    )


def sass(built, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(built.cubin)
    return toolchain.find("nvdisasm").run("-c", str(path)).stdout


def loops(text):
    """The bodies of backward branches, innermost text only."""
    lines = text.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    for number, line in enumerate(lines):
        found = re.search(r"BRA `\((\.L\w+)\)", line)
        if found and labels.get(found.group(1), number) < number:
            yield lines[labels[found.group(1)] : number]


def test_gemm_machine_code_keeps_the_tensor_core_busy(tmp_path):
    built = build(*gemm_schedule())
    text = sass(built, tmp_path)
    assert built.resources.spill_bytes == 0 and not re.search(r"\b(LDL|STL)\b", text)
    main = min((b for b in loops(text) if sum("HGMMA" in x for x in b) == 4), key=len)
    code = "\n".join(main)
    assert len(main) < 64, "the main loop is the matmuls, one wait and one release"
    assert "DEPBAR.LE gsb0, 0x1" in code, "a matmul stays in flight over the back edge"
    assert "MEMBAR" not in code and "BAR.SYNC" not in code
    assert "UTMALDG.2D.MULTICAST" in text and "UTMASTG" in text and "USETMAXREG" in text


def test_attention_machine_code_is_the_softmax_and_nothing_else(tmp_path):
    text = sass(build(*attention_schedule()), tmp_path)
    bodies = [b for b in loops(text) if sum("HGMMA" in x for x in b) == 16]
    main = min(bodies, key=len)
    code = "\n".join(main)
    assert len(re.findall(r"MUFU.EX2", code)) == 66  # 64 weights and 2 rescales a thread
    masks = [line for line in main if re.search(r"\b(FSEL|ISETP|VIADD|IADD3)\b", line)]
    assert len(main) - len(masks) < 520
    assert not re.search(r"\b(LDL|STL|LDS|STS)\b", text)


def test_generic_writes_are_fenced_before_the_copy_engine_reads_them():
    text = emit(lower(*gemm_schedule())).text
    body = text[text.index('extern "C"') :]
    for found in re.finditer(r"tma_store_2d\(", body):
        before = body[: found.start()]
        assert before.rindex("fence_async();") > before.rindex("stmatrix(")
        assert before.rindex("named_sync") > before.rindex("fence_async();")


def test_the_source_is_readable_and_names_op_and_line():
    text = emit(lower(*attention_schedule())).text
    assert "program attention(q: bf16[batch, heads, rows, d]" in text
    assert re.search(r"// Issue mma\.\d+  program\.py:\d+", text)
    assert re.search(r"// Release v \(iteration -1\)", text)


VARIANTS = {
    "tt": GemmConfig(a="km", b="nk"),
    "fp8": GemmConfig(dtype=E4M3, b="nk", tile=(128, 256, 128)),
    "silu-mul": GemmConfig(bias=True, activation="silu", residual=True),
    "fp32": GemmConfig(out=FP32),
    "wide": GemmConfig(tile=(256, 128, 64)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gemm_variants_compile_without_spills(name):
    plan = replace(PLAN, store_panels=1)
    assert build(*gemm_schedule(VARIANTS[name], plan=plan)).resources.spill_bytes == 0


def test_built_kernels_survive_the_disk_and_a_changed_cubin_is_refused(tmp_path):
    built = build(*gemm_schedule())
    built.write(tmp_path)
    again = Built.read(tmp_path)
    assert again.manifest() == built.manifest() and again.cubin == built.cubin
    (tmp_path / "gemm.cubin").write_bytes(built.cubin[:-1] + b"?")
    with pytest.raises(InputError, match="not the one manifest"):
        Built.read(tmp_path)


def test_the_second_build_comes_from_the_cache(monkeypatch):
    build(*gemm_schedule())
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("the compiler ran again"))
    build(*gemm_schedule())


def test_schedules_survive_json():
    _, schedule = gemm_schedule()
    again = KernelSchedule.from_json(schedule.to_json())
    assert again.to_json() == schedule.to_json()
    with pytest.raises(InputError, match=r"expected 'warploom.kernel-schedule'"):
        KernelSchedule.from_json({"schema": "x"})


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("stagger", "gone"),
        ("alternate", "gone"),
        ("walk", "called tile_scheduler, and its 'snake' 'serpentine'"),
        ("chain", "called overlap_next_task"),
        ("skip_settled", "called skip_voted"),
        ("give_back", "called early_release"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_file_with_an_option_of_an_older_version_is_told_its_new_name(name, now, version):
    _, schedule = gemm_schedule()
    simt = SimtSchedule("simt", 128, 1, 1)
    for made, reader in ((schedule, KernelSchedule.from_json), (simt, SimtSchedule.from_json)):
        data = json.loads(json.dumps(made.to_json())) | {"version": version}
        data["launch"][name] = False
        words = (
            rf"^old\.json: schema .* version {version}, expected .* version 2, in which {name} is "
        )
        with pytest.raises(InputError, match=words + now):
            reader(data, "old.json")


def test_a_file_of_an_older_version_is_refused_with_the_names_that_changed():
    _, schedule = gemm_schedule()
    data = json.loads(json.dumps(schedule.to_json()))
    assert KernelSchedule.from_json(data) == schedule
    with pytest.raises(
        InputError, match=r"version 1, expected 'warploom.kernel-schedule' version 2$"
    ):
        KernelSchedule.from_json(data | {"version": 1})
    with pytest.raises(InputError, match=r"version 2, in which turns is called pingpong$"):
        KernelSchedule.from_json(data | {"version": 1, "turns": True})


REFUSED = {
    "needs 246,848 B of shared memory": lambda: emit(
        lower(
            gemm(GemmConfig()), with_slots(gemm_schedule(plan=replace(PLAN, store_panels=3))[1], 4)
        )
    ),
    "split axis 'k'": lambda: lower(*gemm_schedule(plan=LaunchPlan(split="k"))),
    "the same for all 3 blocks of a cluster; multicast is over 2, 4, 8": lambda: emit(
        lower(*gemm_schedule(plan=replace(PLAN, cluster=("m_tile", 3))))
    ),
    "cluster of 9": lambda: LaunchPlan(cluster=("m_tile", 9)),
    "the grid has": lambda: emit(
        lower(*gemm_schedule(plan=LaunchPlan(split="m", cluster=("batch", 2))))
    ),
    "8-bit wgmma reads both operands K-major": lambda: gemm_schedule(GemmConfig(dtype=E4M3)),
    "multiple of 128": lambda: gemm_schedule(GemmConfig(tile=(64, 256, 64))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_numbers(message):
    with pytest.raises(InputError, match=re.escape(message)):
        REFUSED[message]()


def test_spills_are_an_error_unless_allowed():
    program = attention(AttentionConfig(head_dim=128, tile=(192, 128)))
    schedule = schedule_for(
        program, Policy("pingpong", LaunchPlan(split="rows", store_panels=1), groups=3, depth=2)
    )
    with pytest.raises(CheckFailed, match=r"spills|serialized|registers"):
        build(program, schedule)


def hostile(t, rank, m_base, rows):
    """A program whose names are those of the emitter: `t[i, lane]`, `rank[lane, task]`."""
    p, q = grid(i=cdiv(size("i"), 128), task=cdiv(size("task"), 64))
    acc = zeros(i=128, task=64)
    for j in loop(cdiv(size("lane"), 64)):
        left = load(t, span(p * 128, 128), span(j * 64, 64))
        shown = coordinate("task", 64, j * 64) < size("lane")
        acc[:] = where(shown, acc, acc) + left @ load(rank, span(j * 64, 64), span(q * 64, 64))
    max_ = max_along(acc, "task")
    store(m_base, span(p * 128, 128), tile=max_)
    store(rows, span(p * 128, 128), span(q * 64, 64), tile=(acc + max_).cast(BF16))


HOSTILE = {
    "t": array(BF16, "i lane"),
    "rank": array(BF16, "lane task"),
    "m_base": array(FP32, "i"),
    "rows": array(BF16, "i task"),
}


def test_names_of_the_program_never_meet_names_of_the_emitter():
    program = trace(hostile, HOSTILE)
    schedule = schedule_for(
        program, Policy("lcsf", LaunchPlan(split="i", cluster=("i_tile", 2)), groups=2, depth=3)
    )
    built = build(program, schedule)
    assert [p["name"] for p in built.source.parameters if p["kind"] == "dim"] == list(program.dims)
    body = built.source.text[built.source.text.index('extern "C"') :]
    # A counter of registers must not hide the loop's or a dimension's.
    assert re.search(r"int i_,\s", body) and re.search(r"int task_", body)
    assert not re.search(r"for \(int \w+_ = 0; \w+_ < \d+;", body)


def test_identifiers_stay_distinct():
    names = ["i", "i_", "i__", "acc", "acc_live", "acc_live_", "max", "k_base", "c_map1", "m_tile"]
    assert len({c_name(n) for n in names}) == len(names)
    assert c_name("acc") == "acc" and c_name("m_tile") == "m_tile" and c_name("i") == "i_"


def chained_schedule():
    config = AttentionConfig(causal=True)
    return attention(config), ATTENTION.variants["128x128-dynamic16-overlap"].schedule(config)


@pytest.mark.parametrize(
    "case", [gemm_schedule, lambda: attention_schedule(lse=True), chained_schedule]
)
def test_every_name_that_an_emitted_body_declares_is_the_programs_or_reserved(case):
    program, schedule = case()
    text = emit(lower(program, schedule)).text
    body = text[text.index(") {\n", text.index('extern "C"')) :]
    declared = set(re.findall(r"\b(?:int|unsigned|float|Cursor) (\w+)(?=[ ;=\[])", body))
    theirs = {op.dst.name for op in program.ops() if op.dst} | {g for g, _ in program.grid}
    theirs |= {loop.index for loop in program.loops()} | set(program.dims)
    own = declared - {c_name(name) for name in theirs}
    assert "task" in own and "lane" in own
    assert all(c_name(name) != name for name in own), {n for n in own if c_name(n) == n}
