"""Kernels that ptxas is told fewer threads of: their images, and code that must not be one."""

import io
import re
from dataclasses import replace

import pytest
from elftools.elf.elffile import ELFFile
from tests.lowering import lowered

from warploom.autosched.schedules import Policy
from warploom.codegen.analysis.entry import entry_registers, threads_for
from warploom.codegen.compile.build import compile_source
from warploom.codegen.compile.entry_image import check_entry, with_entry
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import SM80_ARCHITECTURES, emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import CheckFailed
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.sass.decode import nvinfo
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode


@pytest.fixture(scope="module")
def source():
    config = GemmConfig(tile=(192, 256, 64))
    launch = LaunchPlan(split="m", cluster=("m_tile", 2))
    return emit(lowered(gemm(config), Policy("inflight", launch, groups=3, depth=3)))


@pytest.mark.parametrize(
    ("threads", "columns", "declared"),
    [(384, 256, 384), (512, 200, 512), (512, 208, 384), (512, 256, 384), (256, 256, 256)],
)
def test_as_many_threads_are_declared_as_ptxas_takes(threads, columns, declared):
    assert threads_for(threads, columns) == declared
    assert threads_for(threads, 0) == threads


def test_the_image_begins_with_what_its_blocks_have(source):
    assert (source.threads, source.declared_threads) == (512, 384)
    assert "__launch_bounds__(384, 1)" in source.text
    cubin = parse(compile_source(source, "sm_90a")[0])
    kernel = decode(cubin)
    assert kernel.code.registers == entry_registers(512) == 128
    found = {r.attribute: r.payload for r in nvinfo.records(kernel.info)}
    assert int.from_bytes(found[0x05][:4], "little") == 512
    # The groups that compute name more registers than a block of 512 threads begins with.
    named = [a.resource for i in kernel.instructions for a in i.effects.writes if a.resource < 255]
    assert max(named) >= 128
    check_entry(kernel, 128)
    assert with_entry(cubin.data, kernel, 512) == cubin.data


def test_an_image_that_lacks_a_record_is_refused(source):
    """Planted fault: one of the three records that say how a block begins has another name."""
    image = compile_source(source, "sm_90a")[0]
    (kernel,) = parse(image).kernels
    elf, refused = ELFFile(io.BytesIO(image)), 0
    for name in (".nv.info", f".nv.info.{kernel}"):
        section = elf.get_section_by_name(name)
        for record in nvinfo.records(section.data()):
            if record.attribute not in (nvinfo.REGISTER_COUNT, 0x05, 0x1B):
                continue
            at = section["sh_offset"] + record.offset - 3  # the byte that names it
            assert image[at] == record.attribute
            broken = image[:at] + b"\x7f" + image[at + 1 :]
            with pytest.raises(CheckFailed, match="2 records of its entry, expected 3"):
                with_entry(broken, decode(parse(image)), 512)
            refused += 1
    assert refused == 3


def test_a_role_that_keeps_its_registers_is_found(source):
    """Planted fault: the compute groups never ask for more registers than the entry gives."""
    lines = source.text.splitlines()
    kept = [line for line in lines if not line.strip().startswith("registers_up<")]
    broken = replace(source, text="\n".join(kept))
    with pytest.raises(CheckFailed, match="before its role changes its registers; a thread begins"):
        compile_source(broken, "sm_90a", ("setmaxnreg", "spills", "stack", "serialized"))


def test_of_n_registers_the_last_is_the_one_before_n():
    program = gemm(GemmConfig(tile=(64, 64, 16)))
    launch = LaunchPlan(split="m", store="direct")
    image, resources = compile_source(
        emit_sm80(lowered(program, Policy("multistage", launch, groups=1))),
        "sm_80",
        architectures=SM80_ARCHITECTURES,
    )
    kernel = decode(parse(image))  # no role changes its registers: all of it counts
    numbers = [int(text) for i in kernel.instructions for text in re.findall(r"\bR(\d+)", str(i))]
    accesses = [a for i in kernel.instructions for a in (*i.effects.reads, *i.effects.writes)]
    last = max(a.resource for a in accesses if a.resource < 255)
    # An operand of four is named by its first; the compiler counts what it has named.
    assert max(numbers) <= last <= max(numbers) + 3 and last < resources.registers
    check_entry(kernel, last + 1)
    with pytest.raises(CheckFailed, match=rf"names R{last} before its role .* begins with {last}"):
        check_entry(kernel, last)
    # What is only read counts as much as what is only written.
    for kind, other in (("reads", "writes"), ("writes", "reads")):
        one_kind = replace(
            kernel,
            instructions=tuple(
                replace(i, effects=replace(i.effects, **{other: ()})) for i in kernel.instructions
            ),
        )
        named = [a.resource for i in kernel.instructions for a in getattr(i.effects, kind)]
        most = max(resource for resource in named if resource < 255)
        check_entry(one_kind, most + 1)
        with pytest.raises(CheckFailed, match=f"names R{most} "):
            check_entry(one_kind, most)
