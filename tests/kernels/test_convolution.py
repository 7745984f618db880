"""Long convolution: the program against a sum of products in float64, and as it is emitted."""

import re

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.convolution_reference import reference
from tests.lowering import lowered

from warploom import tile as t
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.errors import InputError
from warploom.kernels.convolution.config import COLUMNS, ConvolutionConfig
from warploom.kernels.convolution.matrices import matrices, spectrum, windows
from warploom.kernels.convolution.program import default_policy, long_convolution

CASES = [
    ConvolutionConfig(length, causal, pairs=2)
    for length, causal in ((512, True), (1024, False), (4096, True), (4096, False))
]
BLOCKS = ConvolutionConfig(pairs=1, blocks=True)
CASES.append(BLOCKS)
ROUNDING = 8e-3  # of matrices, factors and what lies between, to bf16


def case(config, batch=3, seed=1):
    """(arrays, x, kernel): two tiles of heads, batches that make no pair."""
    blocks = 2 if config.blocks else 1
    random, taps = np.random.default_rng(seed), blocks * config.taps
    heads = 2 * config.heads
    x = t.round_to(t.BF16, random.normal(size=(batch, heads, taps)))
    kernel = random.normal(size=(heads, taps)) * np.exp(-4 * np.arange(taps) / taps) / taps**0.5
    taken = windows(config, kernel).reshape(heads * blocks, -1) if config.blocks else kernel
    wide = spectrum(config, taken)
    shape = (batch, 2, blocks * config.taken, COLUMNS)
    arrays = {
        "x": x.reshape(shape), "y": np.full(shape, np.nan), **matrices(config),
        "kernel_re": t.round_to(t.BF16, wide.real), "kernel_im": t.round_to(t.BF16, wide.imag),
    }  # fmt: skip
    return arrays, x, kernel


@pytest.fixture(scope="module")
def emitted():
    blocks = [lowered(long_convolution(one), default_policy(one)) for one in CASES]
    sources = [emit(block) for block in blocks]
    return blocks, sources, emulate.compile_all(sources, None)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_every_length_is_right(emitted, number):
    blocks, sources, library = emitted
    config = CASES[number]
    program, (arrays, x, kernel) = long_convolution(config), case(config, batch=5)
    right = reference(config, x, kernel).reshape(arrays["y"].shape)
    meant = t.interpret(program, arrays)["y"]
    # One block: every group of it has a task, and one has two.
    got = emulate.run(library, number, sources[number], program, arrays, blocks=1)["y"]
    assert distance(meant, right) < ROUNDING
    assert distance(got, meant) < 1e-3
    if config.length == 512:
        assert np.array_equal(simulate(blocks[number], arrays, seed=number)["y"], meant)


def test_factors_are_read_once_for_both_parts(emitted):
    """Of a product the real and the imaginary part take the same words of a slot."""
    *others, blocks = emitted[1]
    assert blocks.text.count(", true>(kernel_im_t_words, ") == 1
    for source in others:
        assert source.text.count(", true>(twiddle_re_t_words, ") == 2
        assert source.text.count(", true>(kernel_re_t_words, ") == 1


def test_slots_go_back_behind_a_matmul_that_takes_what_lanes_read(emitted):
    """There nobody waits for what lanes have asked for; right behind the op that reads them the
    arrival would."""
    text = emitted[1][CASES.index(ConvolutionConfig(4096, False, pairs=2))].text
    body = text[text.index("// compute0") :]
    factors = body.index("kernel_re_t_words[4]")
    taken = body.index("// Issue", factors)
    assert body.index("// Release kernel_re", factors) > taken


def test_heads_do_not_mix_and_nothing_comes_round():
    """Planted faults: a kernel of another head, and one that comes round where none may."""
    config = CASES[0]
    arrays, x, kernel = case(config)
    found = t.interpret(long_convolution(config), arrays)["y"].reshape(x.shape)
    around = np.fft.ifft(np.fft.fft(x) * np.fft.fft(kernel)).real
    assert distance(found, reference(config, x, np.roll(kernel, 1, axis=0))) > 0.3
    assert distance(found, around) > 0.3
    for head in range(len(kernel)):
        own = reference(config, x[:, [head]], kernel[[head]])
        assert distance(found[:, [head]], own) < ROUNDING


def test_a_block_takes_from_all_before_it_and_from_none_behind():
    """Planted faults: windows of the kernel in another order, and the sums of the next block."""
    arrays, x, kernel = case(BLOCKS, batch=2)
    program, right = long_convolution(BLOCKS), reference(BLOCKS, x, kernel)
    for part in ("kernel_re", "kernel_im"):
        first, second = np.split(arrays[part].reshape(2, 2 * COLUMNS, COLUMNS), 2, axis=1)
        wrong = np.concatenate([second, first], axis=1).reshape(arrays[part].shape)
        found = t.interpret(program, arrays | {part: wrong})["y"].reshape(x.shape)
        assert distance(found, right) > 0.3
    later = x.copy()
    later[..., BLOCKS.taps :] = 0
    found = t.interpret(program, arrays | {"x": later.reshape(arrays["x"].shape)})["y"]
    found = found.reshape(x.shape)
    assert distance(found[..., : BLOCKS.taps], right[..., : BLOCKS.taps]) < ROUNDING
    assert distance(found, reference(BLOCKS, later, kernel)) < ROUNDING


@pytest.mark.parametrize(
    "change, said",
    [
        ({"length": 8192}, "length=8192: expected one of 512, 1024, 2048, 4096"),
        ({"length": 1000}, "length=1000: expected one of"),
        ({"pairs": 0}, "pairs=0: expected 1 or more"),
        ({"blocks": True, "length": 1024}, "of blocks with length=1024 causal=True pairs=2"),
        ({"blocks": True, "causal": False}, "of blocks with length=4096 causal=False pairs=2"),
        ({"blocks": True}, "of blocks with length=4096 causal=True pairs=2: expected 4096, True"),
    ],
)
def test_other_lengths_are_refused(change, said):
    with pytest.raises(InputError, match=re.escape(said)):
        ConvolutionConfig(**change)
