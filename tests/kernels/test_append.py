"""New keys and values into caches: against numpy, interpreted and on the emulated machine."""

import numpy as np
import pytest

from warploom.autosched.schedules import compiled
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.emulate.kernel import Library
from warploom.errors import InputError
from warploom.kernels.attention.append import AppendConfig, append, append_schedule
from warploom.tile import BF16, E4M3, FP16, FP32, interpret
from warploom.tile.interpret import bind

CASES = {
    "dense": AppendConfig(head_dim=32),
    "rotated": AppendConfig(head_dim=32, rotary="halves", group=2),
    "pages": AppendConfig(head_dim=32, rotary="halves", page=16),
    "pairs": AppendConfig(FP16, head_dim=32, rotary="pairs", group=3, page=16, angles=BF16),
    "8 bits": AppendConfig(head_dim=32, cache=E4M3, rotary="halves", group=2, page=32),
}
TOKENS, HEADS, ROOM = 3, 10, 64
LENGTHS = (0, 17, 62)  # of the last sequence one token has no room


def arrays_of(config, seed=0):
    rng, d, batch = np.random.default_rng(seed), config.head_dim, len(LENGTHS)
    row = (d // 2, 2) if config.rotary == "pairs" else (d,)
    made = {x: rng.normal(size=(batch, TOKENS, HEADS, d)) for x in "kv"}
    made["k"] = made["k"].reshape(batch, TOKENS, HEADS, *row)
    made["lengths"] = np.array(LENGTHS, np.int32)
    rows = (batch, ROOM)
    if config.page:
        count = batch * ROOM // config.page + 1
        rows = (count, config.page)
        table = rng.permutation(count)[: batch * ROOM // config.page]
        made["table"] = table.reshape(batch, -1).astype(np.int32)
    made["k_cache"] = rng.normal(size=(*rows, HEADS, *row))
    made["v_cache"] = rng.normal(size=(*rows, HEADS, d))
    if config.rotary:
        angle = np.arange(ROOM)[:, None] * 0.3 ** np.arange(d // 2)
        made |= {"cos": np.cos(angle), "sin": np.sin(angle)}
    if config.scaled:
        made |= {f"scale_{x}": rng.uniform(0.5, 2.0, (batch, HEADS)) for x in "kv"}
    if config.group:
        made["q"] = rng.normal(size=(batch, TOKENS, HEADS * config.group, *row))
        made["r"] = np.zeros_like(made["q"])
    return made


def rotated(config, x, cos, sin):
    if config.rotary == "pairs":
        left, right = x[..., 0], x[..., 1]
        return np.stack([left * cos - right * sin, left * sin + right * cos], -1)
    left, right = np.split(x, 2, -1)
    return np.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def expected(config, values):
    """Caches and rotated queries in float64, before they are rounded."""
    wide = {name: np.asarray(value, np.float64) for name, value in values.items()}
    for b, length in enumerate(LENGTHS):
        for t in range(TOKENS):
            at = length + t
            new = {x: wide[x][b, t] for x in "kv"}
            if config.rotary and at < ROOM:
                turns = wide["cos"][at], wide["sin"][at]
                new["k"] = rotated(config, new["k"], *turns)
                if config.group:
                    wide["r"][b, t] = rotated(config, wide["q"][b, t], *turns)
            for x in "kv" if at < ROOM else ():
                if config.scaled:
                    new[x] = new[x] / wide[f"scale_{x}"][b][:, None]
                row = (b, at)
                if config.page:
                    row = (values["table"][b, at // config.page], at % config.page)
                wide[f"{x}_cache"][row] = new[x]
    return {name: wide[name] for name in ("k_cache", "v_cache", "r") if name in wide}


@pytest.fixture(scope="module")
def library():
    return Library([emit_simt(append(c), append_schedule(c), "sm_90a") for c in CASES.values()])


@pytest.mark.parametrize("name", CASES)
def test_caches_get_what_numpy_says(library, name):
    config = CASES[name]
    program, arrays = append(config), arrays_of(config)
    values = bind(program, arrays)
    want = expected(config, values)
    number = list(CASES).index(name)
    for got in (interpret(program, arrays), library.run(number, program, arrays)):
        for which, exact in want.items():
            rounding = 2.0**-4 if which != "r" and config.scaled else 2.0**-8
            assert np.abs(got[which] - exact).max() <= rounding * np.abs(exact).max(), which
        untouched = want["v_cache"] == values["v_cache"]
        assert (got["v_cache"] == values["v_cache"])[untouched].all()


@pytest.mark.parametrize("cache", [BF16, E4M3])
@pytest.mark.parametrize("rotary, group", [("halves", 4), ("halves", 16), ("pairs", 1)])
def test_registers_hold_the_queries_of_a_task(rotary, group, cache):
    config = AppendConfig(cache=cache, rotary=rotary, group=group, page=16)
    assert not compiled(append(config), append_schedule(config)).resources.spill_bytes


def test_what_is_no_append_is_refused():
    for fields in ({"dtype": FP32}, {"cache": FP16}, {"rotary": "turned"}, {"group": 2}):
        with pytest.raises(InputError, match="append"):
            AppendConfig(**fields)
