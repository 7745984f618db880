"""The cubin container and the control field: exact round trips, one clear line for bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.sass.decode.control import CONTROL_MASK, Control
from warploom.sass.decode.cubin import Cubin, load, parse
from warploom.sass.decode.kernel import decode

SOFTMAX = "triton_softmax_1x4096_w8_s1_sm90"
WORD = st.integers(0, (1 << 64) - 1)


def refusal(call: Callable[[], object]) -> str:
    """The message of the InputError a call raises, which is one line."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_round_trip_is_byte_identical(corpus: list[Path]) -> None:
    for path in corpus:
        cubin = load(path)
        for code in cubin.kernels.values():
            info = cubin.section_bytes(code.info) if code.info else None
            words = [(low, Control.decode(high).encode(high)) for low, high in code.words]
            assert cubin.replace(code, words, info).data == path.read_bytes(), path.name


def test_replacing_changes_only_the_code(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(SOFTMAX)
    code = cubin.kernel()
    changed = cubin.replace(code, [(low ^ 1, high) for low, high in code.words]).data
    start, end = code.text.offset, code.text.offset + code.text.size
    assert changed[:start] == cubin.data[:start]
    assert changed[end:] == cubin.data[end:]
    assert changed[start:end] != cubin.data[start:end]


@given(WORD)
def test_control_decodes_and_encodes_exactly(high: int) -> None:
    assert Control.decode(high).encode(high) == high


@given(
    WORD,
    st.builds(
        Control,
        stall=st.integers(0, 15),
        stay=st.booleans(),
        write_sb=st.integers(0, 7),
        read_sb=st.integers(0, 7),
        wait=st.integers(0, 63),
        reuse=st.integers(0, 15),
    ),
)
def test_control_encodes_and_decodes_exactly(high: int, control: Control) -> None:
    word = control.encode(high)
    assert Control.decode(word) == control
    assert word & ~CONTROL_MASK == high & ~CONTROL_MASK
    assert word < 1 << 64


@pytest.mark.parametrize("data", [b"", b"\x7fEL", b"not a cubin at all", b"\0" * 4096])
def test_not_a_cubin(data: bytes) -> None:
    assert "junk.bin is not a cubin" in refusal(lambda: parse(data, "junk.bin"))


def test_a_missing_file(tmp_path: Path) -> None:
    assert "no.cubin" in refusal(lambda: load(tmp_path / "no.cubin"))


def test_another_machine(cubin_of: Callable[[str], Cubin]) -> None:
    data = bytearray(cubin_of(SOFTMAX).data)
    data[18:20] = (62).to_bytes(2, "little")
    assert "expected a CUDA cubin" in refusal(lambda: parse(bytes(data), "x.o"))


@pytest.mark.parametrize("start", [SOFTMAX, "triton_softmax_1x4096_w8_s1_sm80", "cuda_several"])
def test_truncated_at_any_length(cubin_of: Callable[[str], Cubin], start: str) -> None:
    data = cubin_of(start).data
    lengths = {*range(0, 80), *range(80, len(data), 499), len(data) - 1}
    for length in sorted(lengths):
        assert "cut.cubin" in refusal(lambda n=length: parse(data[:n], "cut.cubin"))


@pytest.mark.parametrize("start", [SOFTMAX, "triton_softmax_1x4096_w8_s1_sm80"])
def test_unknown_architecture(cubin_of: Callable[[str], Cubin], start: str) -> None:
    data = bytearray(cubin_of(start).data)
    for place in (0x30, 0x31):
        data[place] = 70
    message = refusal(lambda: parse(bytes(data), "volta.cubin"))
    assert "sm_70" in message
    assert "sm_90" in message


def test_damage_is_an_error_or_another_cubin_never_a_crash(
    cubin_of: Callable[[str], Cubin],
) -> None:
    original = cubin_of("cuda_switch_sm90a").data
    table = int.from_bytes(original[0x28:0x30], "little")
    for place in (*range(16, 64), *range(table, min(table + 640, len(original)), 3)):
        data = bytearray(original)
        data[place] ^= 0xFF
        try:
            parse(bytes(data), "damaged.cubin")
        except InputError as error:
            assert "\n" not in str(error)


def test_kernel_not_found(cubin_of: Callable[[str], Cubin]) -> None:
    message = refusal(lambda: cubin_of(SOFTMAX).kernel("nope"))
    assert "'nope'" in message
    assert "softmax_kernel" in message


def test_several_kernels_and_none_named(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of("cuda_several_sm90a")
    message = refusal(lambda: decode(cubin))
    assert "none was named" in message
    assert "saxpy" in message
    assert decode(cubin, "saxpy").name == "saxpy"


def test_wrong_number_of_words(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(SOFTMAX)
    code = cubin.kernel()
    assert "expected" in refusal(lambda: cubin.replace(code, code.words[:-1]))
