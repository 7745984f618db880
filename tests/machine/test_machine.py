"""Machines: the shipped data is whole and agrees with itself; bad files are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from warploom import machine
from warploom.errors import InputError
from warploom.machine import KEYS, Machine, Quantity

SHIPPED = ["a100", "b200", "h100", "h200"]

# What every floor above may rely on, for every shipped machine.
PROMISED = [
    "arch.name",
    "sm.count",
    "clock.boost",
    "clock.tensor",
    "tensor.fp16",
    "tensor.bf16",
    "lanes.fp32",
    "mufu.rate",
    "issue.rate",
    "registers.per_sm",
    "registers.per_thread_max",
    "registers.warp_granularity",
    "limits.warps_per_sm",
    "limits.threads_per_block",
    "limits.blocks_per_sm",
    "smem.per_sm",
    "smem.per_block_max",
    "smem.bytes_per_clk",
    "l2.size",
    "dram.size",
    "dram.bandwidth",
    "barrier.named_per_block",
    "peak.tensor_bf16",
]

# datasheet peak, rate, clock, FLOP per counted operation
PEAKS = [
    ("peak.tensor_tf32", "tensor.tf32", "clock.tensor", 1),
    ("peak.tensor_fp16", "tensor.fp16", "clock.tensor", 1),
    ("peak.tensor_bf16", "tensor.bf16", "clock.tensor", 1),
    ("peak.tensor_fp8", "tensor.fp8", "clock.tensor", 1),
    ("peak.tensor_int8", "tensor.int8", "clock.tensor", 1),
    ("peak.tensor_fp4", "tensor.fp4", "clock.tensor", 1),
    ("peak.tensor_fp64", "tensor.fp64", "clock.boost", 1),
    ("peak.fp32", "lanes.fp32", "clock.boost", 2),
    ("peak.fp64", "lanes.fp64", "clock.boost", 2),
]


def quantity(value: float, unit: str) -> Quantity:
    return Quantity(value, unit, "this test", "measured")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_machines_have_what_the_floors_rely_on(name: str) -> None:
    loaded = machine.load(name)
    missing = [key for key in PROMISED if key not in loaded]
    assert not missing


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("peak", "rate", "clock", "flop"), PEAKS)
def test_datasheet_peak_is_rate_times_sms_times_clock(
    name: str, peak: str, rate: str, clock: str, flop: int
) -> None:
    loaded = machine.load(name)
    if peak not in loaded:
        assert rate not in loaded or name in ("a100",)
        return
    computed = loaded.value(rate) * flop * loaded.value("sm.count") * loaded.value(clock) * 1e6
    assert computed / 1e12 == pytest.approx(loaded.value(peak), rel=0.015)


@pytest.mark.parametrize("name", SHIPPED)
def test_limits_agree_with_each_other(name: str) -> None:
    loaded = machine.load(name)
    warp = loaded.integer("limits.warp_size")
    assert loaded.integer("limits.threads_per_sm") == warp * loaded.integer("limits.warps_per_sm")
    reserved = loaded.integer("smem.reserved_per_block")
    assert loaded.integer("smem.per_block_max") + reserved == loaded.integer("smem.per_sm")
    assert loaded.integer("smem.per_sm") < loaded.integer("l1.size")
    if "tmem.size" in loaded:
        words = loaded.integer("tmem.columns") * loaded.integer("tmem.lanes")
        assert loaded.integer("tmem.size") == 4 * words


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100", "h100"),
        ("h100-sxm", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("A100_SXM4_80GB", "a100"),
    ],
)
def test_aliases_reach_the_machine_however_spelt(spelling: str, name: str) -> None:
    assert machine.load(spelling).name == name


def test_no_other_module_writes_down_how_much_shared_memory_a_gpu_has() -> None:
    sizes = {
        machine.architecture(name).integer(f"smem.{key}")
        for name in machine.architectures()
        for key in ("per_sm", "per_block_max")
    }
    found: list[str] = []
    for path in Path(machine.__file__).parents[1].rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            literals = re.findall(r"\b\d[\d_]*\b", line)
            if sizes & {int(text.replace("_", "")) for text in literals}:
                found.append(f"{path}:{number}: {line.strip()}")
    assert len(sizes) == 6 and not found


def test_names_lists_the_shipped_machines() -> None:
    assert machine.names() == SHIPPED


def test_every_architecture_has_the_limits_that_code_is_emitted_by() -> None:
    assert machine.architectures() == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100"]
    for name in machine.architectures():
        limits = machine.architecture(name)
        threads = limits.integer("limits.warp_size") * limits.integer("limits.warps_per_sm")
        assert limits.integer("limits.threads_per_sm") == threads
        per_block, per_sm = limits.integer("smem.per_block_max"), limits.integer("smem.per_sm")
        assert per_block + limits.integer("smem.reserved_per_block") == per_sm
        for key in ("limits.threads_per_block", "registers.per_sm", "registers.per_thread_max"):
            assert limits.integer(key) <= machine.largest(key)
    assert machine.largest("limits.threads_per_block") == 1024


def test_a_gpu_has_the_limits_of_its_architecture() -> None:
    for name in SHIPPED:
        gpu = machine.load(name)
        limits = machine.architecture(gpu.text("arch.name"))
        kept = [key for key in limits.keys() if key != "arch.name"]  # noqa: SIM118 (no mapping)
        assert [gpu.quantity(key) for key in kept] == [limits.quantity(key) for key in kept]
    with pytest.raises(InputError, match="of architecture 'sm_75': expected sm_80, sm_86"):
        machine.architecture("sm_75")


def test_h200_inherits_the_h100_processor_and_replaces_its_memory() -> None:
    h100, h200 = machine.load("h100"), machine.load("h200")
    assert h200.quantity("tensor.bf16") == h100.quantity("tensor.bf16")
    assert h200.value("dram.bandwidth") > h100.value("dram.bandwidth")
    assert h200.quantity("dram.copy_bandwidth").kind == "measured"
    assert "dram.latency" not in h200


def test_unknown_machine_names_the_known_ones_and_the_closest() -> None:
    with pytest.raises(InputError, match=r"unknown machine 'h20'.*a100, b200.*closest: 'h200'"):
        machine.load("h20")
    with pytest.raises(InputError, match=r"'zx9': known are a100, b200, h100, h200; or give"):
        machine.load("zx9")


def test_a_missing_value_says_how_to_supply_it() -> None:
    with pytest.raises(InputError, match=r"no value for l2.bandwidth.*overlay\(machine"):
        machine.load("b200").value("l2.bandwidth")
    assert machine.load("b200").get("l2.bandwidth") is None
    assert machine.load("b200").get("l2.bandwidth", 1.0) == 1.0


@pytest.mark.parametrize("reader", ["value", "quantity", "get", "__getitem__"])
def test_an_unknown_key_names_the_closest(reader: str) -> None:
    with pytest.raises(InputError, match=r"unknown machine key 'tensor.bf61'.*'tensor.bf16'"):
        getattr(machine.load("h100"), reader)("tensor.bf61")


def test_words_and_numbers_are_not_mixed_up() -> None:
    h100 = machine.load("h100")
    assert h100.text("arch.name") == "sm_90a"
    assert h100["sm.count"] == 132
    with pytest.raises(InputError, match="is the word 'sm_90a'"):
        h100.value("arch.name")
    with pytest.raises(InputError, match="is the number 132"):
        h100.text("sm.count")
    with pytest.raises(InputError, match="expected a whole number"):
        h100.integer("peak.fp32")


def test_json_round_trip_keeps_everything(tmp_path: Path) -> None:
    loaded = machine.overlay(machine.load("h200"), {"dram.latency": quantity(700, "clk")})
    back = Machine.from_json(json.loads(json.dumps(loaded.to_json())))
    assert back == loaded
    assert hash(back) == hash(loaded)
    with pytest.raises(InputError, match="schema 7"):
        Machine.from_json({**loaded.to_json(), "schema": 7})
    with pytest.raises(InputError, match="incomplete"):
        Machine.from_json({"schema": 1, "name": "x"})


def test_overlay_keeps_the_provenance_of_both_layers() -> None:
    h100 = machine.load("h100")
    laid = machine.overlay(h100, {"l2.bandwidth": quantity(5.5e12, "B/s")})
    assert laid.quantity("l2.bandwidth").source == "this test"
    assert laid.quantity("sm.count") == h100.quantity("sm.count")
    assert laid.overlays == ("mapping",)
    assert h100.quantity("l2.bandwidth").kind == "model"


def test_overlay_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(
        "[l2]\nbandwidth = { value = 6e12, unit = 'B/s', source = 'our probe', kind = 'measured' }"
    )
    laid = machine.overlay(machine.load("h100"), path)
    assert laid.value("l2.bandwidth") == 6e12
    assert laid.overlays == (str(path),)


def test_a_users_machine_starts_from_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "h100-pcie.toml"
    path.write_text(
        "name = 'h100-pcie'\ntitle = 'H100 PCIe'\nbase = 'h100'\nwithout = ['clock.tensor']\n"
        "[sources]\nsheet = 'NVIDIA H100 PCIe product brief'\n"
        "[sm]\ncount = { value = 114, unit = 'SM', source = 'sheet', kind = 'datasheet' }\n"
    )
    loaded = machine.load(str(path))
    assert loaded.value("sm.count") == 114
    assert loaded.quantity("sm.count").source == "NVIDIA H100 PCIe product brief"
    assert "clock.tensor" not in loaded
    assert loaded.value("tensor.bf16") == 4096
    child = tmp_path / "child.toml"
    child.write_text("name = 'child'\ntitle = 'child'\nbase = 'h100-pcie.toml'\n")
    assert machine.load(child).value("sm.count") == 114


HEAD = "name = 'x'\ntitle = 'x'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'x'", "title is missing"),
        (
            HEAD + "[sm]\ncuont = { value = 1, unit = 'SM', source = 'a b', kind = 'measured' }",
            "unknown key 'sm.cuont'; did you mean 'sm.count'",
        ),
        (
            HEAD
            + "[dram]\nbandwidth = { value = 1, unit = 'GB/s', source = 'a b', kind = 'measured' }",
            "dram.bandwidth has unit 'GB/s', expected 'B/s'",
        ),
        (
            HEAD + "[sm]\ncount = { value = -1, unit = 'SM', source = 'a b', kind = 'measured' }",
            "sm.count is -1, expected a finite number above zero",
        ),
        (
            HEAD + "[sm]\ncount = { value = true, unit = 'SM', source = 'a b', kind = 'measured' }",
            "sm.count is True, expected a finite number",
        ),
        (
            HEAD + "[sm]\ncount = { value = 1, unit = 'SM', source = 'a b', kind = 'guess' }",
            "sm.count has kind 'guess', expected one of datasheet",
        ),
        (
            HEAD + "[sm]\ncount = { value = 1, unit = 'SM', source = 'sheet', kind = 'measured' }",
            "cites 'sheet', which",
        ),
        (HEAD + "[sm]\ncount = 3", "sm.count is 3, expected"),
        (HEAD + "speed = 3", "unknown entry 'speed'"),
        (HEAD + "base = 'h101'", "unknown machine 'h101'"),
        (HEAD + "base = 'h100'\nwithout = ['no.such']", "without names 'no.such'"),
        (HEAD + "base = 'bad.toml'", "leads back to itself"),
        ("name = ", "not a TOML file"),
    ],
)
def test_a_bad_machine_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        machine.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "bad.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml: cannot read"):
        machine.load(tmp_path / "nowhere.toml")


def test_an_overlay_with_a_base_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "o.toml"
    path.write_text("base = 'h100'")
    with pytest.raises(InputError, match="an overlay has no base"):
        machine.overlay(machine.load("h100"), path)


def test_every_key_is_documented_once_with_a_unit() -> None:
    assert all(key.unit and key.meaning for key in KEYS.values())
    assert all(name.count(".") == 1 for name in KEYS)


def test_a_machine_prints_as_a_table_and_as_html() -> None:
    h100 = machine.load("h100")
    assert "tensor.bf16" in str(h100)
    assert "4,096 FLOP/clk/SM" in str(h100)
    assert "<td>4,096</td>" in h100._repr_html_()
