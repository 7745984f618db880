"""The tables that choose variants: they agree with what was measured, and every entry is sound."""

from dataclasses import replace

import numpy as np
import pytest

from warploom.codegen.build import build
from warploom.codegen.emit import emit
from warploom.codegen.lower import lower
from warploom.codegen.simulate import simulate
from warploom.errors import InputError
from warploom.kernels.attention import AttentionConfig, attention
from warploom.kernels.choices import (
    ATTENTION_CHOICES,
    ATTENTION_TABLE,
    GEMM_CHOICES,
    choose_attention,
    choose_gemm,
    default_attention,
    default_gemm,
    gemm_choice,
)
from warploom.kernels.gemm import GemmConfig, gemm
from warploom.tile import E4M3, interpret

# Microseconds on one H200 (2026-11-21, bf16, row-major, random data) of each variant, in turn.
MEASURED = {
    (4096, 4096, 4096): {"128x256": 210, "256x128": 204, "128x128": 210, "128x192": 241},
    (8192, 8192, 8192): {"128x256": 1671, "256x128": 1649, "128x128": 1672, "128x192": 1642},
    (4000, 6008, 3000): {"128x256": 242, "256x128": 280, "128x128": 317, "128x192": 258},
    (8200, 1032, 8192): {"128x256": 300, "256x128": 304, "128x128": 256, "128x192": 222},
    (2048, 2048, 16384): {"128x256": 197, "256x128": 209, "128x128": 203, "128x192": 304},
    (16384, 1024, 4096): {"128x256": 212, "256x128": 212, "128x128": 214, "128x192": 237},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_the_time_model_is_within_a_tenth_and_ranks_as_measured(shape):
    predicted = {n: gemm_choice(n).microseconds(GemmConfig(), *shape) for n in MEASURED[shape]}
    for name, time in MEASURED[shape].items():
        assert predicted[name] == pytest.approx(time, rel=0.12), name
    best = min(predicted, key=lambda name: predicted[name])
    assert MEASURED[shape][best] <= 1.05 * min(MEASURED[shape].values())


def test_shapes_get_the_variant_that_measured_best():
    assert choose_gemm(8200, 1032, 8192).name == "128x192"
    assert choose_gemm(4096, 4096, 4096).name == "128x256"
    assert choose_gemm(1024, 1024, 1024).name == "128x64-alone"  # 5.1 us; the next best 5.9
    assert choose_attention(16384, AttentionConfig(head_dim=64)).name == "192x128-ahead"
    assert choose_attention(16384).name == "128x176-together-apart"


@pytest.mark.parametrize("name", [choice.name for choice in GEMM_CHOICES])
def test_every_gemm_variant_is_emitted_and_gives_the_sequential_result(name):
    choice = gemm_choice(name)
    config = choice.config(GemmConfig())
    assert emit(lower(gemm(config), choice.schedule(config))).shared_bytes <= 232448
    # The same plan on a program small enough to simulate: one step of 16, the tile kept.
    small = replace(config, tile=(*choice.tile, 16))
    schedule = replace(choice, depth=3).schedule(small)
    rng = np.random.default_rng(0)
    m, n, k = 2 * choice.tile[0] + 8, choice.tile[1] + 72, 56
    arrays = {"a": rng.normal(size=(m, k)), "b": rng.normal(size=(k, n)), "c": np.zeros((m, n))}
    program = gemm(small)
    got = simulate(lower(program, schedule), arrays, seed=1)["c"]
    assert got.tobytes() == interpret(program, arrays)["c"].tobytes()


@pytest.mark.parametrize("name", sorted(ATTENTION_CHOICES))
def test_every_attention_variant_gives_the_sequential_result(name):
    choice = ATTENTION_CHOICES[name]
    config = choice.config(AttentionConfig(head_dim=16, causal=True))
    program = attention(config)
    rng = np.random.default_rng(0)
    arrays = {x: rng.normal(size=(1, 2, 330, 16)) for x in "qkv"}
    arrays["o"] = np.full((1, 2, 330, 16), np.nan)
    got = simulate(lower(program, choice.schedule(config)), arrays, seed=2)["o"]
    assert got.tobytes() == interpret(program, arrays)["o"].tobytes()


@pytest.mark.parametrize("row", ATTENTION_TABLE)
def test_every_row_of_the_attention_table_builds(row):
    head_dim, causal, longest, name = row
    rows = 100000 if longest == float("inf") else int(longest)
    base = AttentionConfig(head_dim=head_dim, causal=causal)
    chosen = choose_attention(rows, base)
    assert chosen.name == name
    config, schedule = default_attention(rows, base)
    build(attention(config), schedule, allow=chosen.allow)


def test_the_default_of_another_type_keeps_128_bytes_a_step():
    config, schedule = default_gemm(8192, 8192, 8192, GemmConfig(dtype=E4M3, b="nk"))
    assert config.tile[2] == 128 and config.dtype is E4M3
    emit(lower(gemm(config), schedule))


def test_what_has_no_variant_is_refused():
    with pytest.raises(InputError, match="expected positive sizes"):
        choose_gemm(0, 8, 8)
    with pytest.raises(InputError, match="expected one of 128x256"):
        gemm_choice("1x1")
    with pytest.raises(InputError, match="up to 256"):
        choose_attention(128, AttentionConfig(head_dim=512))
