"""Small programs, schedules and data that the tests of this folder share."""

import numpy as np

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import LaunchPlan
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm


def gemm_case(m, n, k, depth=3, cluster=1, flying=1, seed=0, **config):
    """(program, schedule, arrays) of a small GEMM, on 128 x 64 x 16 tiles unless told otherwise."""
    chosen = GemmConfig(**{"tile": (128, 64, 16), **config})
    split = "n" if chosen.swap_ab else "m"
    along = ("m_tile", cluster) if cluster > 1 else ("", 1)
    program = gemm(chosen)
    plan = LaunchPlan(split=split, cluster=along)
    policy = Policy("inflight" if flying else "lcsf", plan, groups=2, depth=depth)
    schedule = schedule_for(program, policy)
    rng = np.random.default_rng(seed)
    arrays = {"a": rng.normal(size=(m, k)), "b": rng.normal(size=(k, n))}
    if chosen.a == "km":
        arrays["a"] = arrays["a"].T
    if chosen.b == "nk":
        arrays["b"] = arrays["b"].T
    if chosen.bias:
        arrays["bias"] = rng.normal(size=n)
    if chosen.residual:
        arrays["residual"] = rng.normal(size=(m, n))
    return program, schedule, {**arrays, "c": np.full((m, n), np.nan)}


def attention_case(
    rows, keys, depth=2, pingpong=True, groups=2, kind="overlapped", seed=0, **config
):
    """(program, schedule, arrays) of a small attention on (64 * groups) x 32 tiles."""
    chosen = AttentionConfig(head_dim=32, tile=(64 * groups, 32), **config)
    program = attention(chosen)
    launch = LaunchPlan(split="rows")
    pair = "pingpong" if pingpong else "overlapped"
    order = pair if kind == "overlapped" else "lcsf"
    schedule = schedule_for(program, Policy(order, launch, groups, depth))
    rng = np.random.default_rng(seed)
    heads = chosen.group
    arrays = {
        "q": rng.normal(size=(1, heads, rows, 32)),
        "k": rng.normal(size=(1, 1, keys, 32)),
        "v": rng.normal(size=(1, 1, keys, 32)),
        "o": np.full((1, heads, rows, 32), np.nan),
    }
    if chosen.lse:
        arrays["lse"] = np.full((1, heads, rows), np.nan)
    return program, schedule, arrays
