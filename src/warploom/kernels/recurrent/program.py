"""Recurrent attention forward, S_t = G_t S_{t-1} + k_t v_t^T and o_t = scale q_t S_t, in chunks.

Arrays: `q, k: [batch, rows, groups, d]`, `v, o: [batch, rows, heads, e]`; `heads / groups`
neighbouring heads share their q and k. The state is fp32, one a head. With a the running sum of the
logarithms of G from the start of a chunk of rows,

    o = exp(a) q S + (q k^T * exp(a_i - a_j) for j <= i) v
    S = exp(a_C) S + (exp(a_C - a) k)^T v

so every exponent is at most 0. What G is (`RecurrentConfig.decay`) gives linear attention,
RetNet and lightning attention, simple GLA, Mamba-2's SSD (arXiv 2405.21060, section 6) or GLA; with
`delta` a row replaces what the state has for its key (DeltaNet, the gated delta rule), and with
`taylor` q and k stand for features of second order (Based).
"""

from __future__ import annotations

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.kernels.recurrent.channel import ChannelTask
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.delta import DeltaTask
from warploom.kernels.recurrent.scalar import ScalarTask
from warploom.kernels.recurrent.taylor import TaylorTask
from warploom.kernels.recurrent.upright import UprightTask, stands_upright
from warploom.tile import BF16, FP32, Array, DType, Program, array, trace

__all__ = ["RecurrentConfig", "default_launch", "default_policy", "recurrent"]
HEADS, STATES, KEPT = "heads", "batch heads d e", "batch chunks heads e d"
INVERSE, FRESH = "batch chunks slots r n", "batch rows heads e"


def recurrent(config: RecurrentConfig) -> Program:
    """The program of a configuration; scalar `scale`, above 0, multiplies q k^T.

    Raises `InputError` for one that is two programs (`kernels.recurrent.solved`).
    """
    if config.delta and config.decay == "channel":
        raise InputError("recurrent delta=True decay='channel' is two programs: solve and chunks")

    arrays = arrays_of(config, "batch rows")

    def body(**given: Array) -> None:
        task_of(config)(config, given).run()

    return trace(body, arrays, name="recurrent")


def task_of(config: RecurrentConfig) -> type[ChannelTask | DeltaTask | TaylorTask | ScalarTask]:
    """What traces a task of a configuration."""
    if config.decay == "channel":
        return ChannelTask
    if config.taylor:
        return TaylorTask
    if config.delta:
        return DeltaTask
    return UprightTask if stands_upright(config) else ScalarTask


def arrays_of(config: RecurrentConfig, rows: str) -> dict[str, Array]:
    """The arrays of a configuration, in order; `rows` are the dimensions that count rows."""
    arrays = {name: array(BF16, f"{rows} groups d") for name in ("q", "k")}
    arrays |= {name: array(BF16, f"{rows} heads e") for name in ("v", "o")}
    tokens = f"{rows} heads"
    more = {
        "head": {"g": HEADS},
        "token": {"g": tokens},
        "step": {"dt": tokens, "a": HEADS},
        "channel": {"g": f"{tokens} d"},
    }
    given = more.get(config.decay, {}) | ({"beta": tokens} if config.delta else {})
    given |= {"skip": HEADS} if config.skip else {}
    given |= {"initial": STATES} if config.initial else {}
    given |= {"final": STATES} if config.final else {}
    given |= {"bias": HEADS} if config.softplus else {}
    if not config.output:
        del arrays["q"], arrays["o"]
    more = {"inverse": INVERSE, "fresh": FRESH} if config.delta else {}
    given |= {"states": KEPT} | more if config.states else {}
    kinds: dict[str, DType] = dict.fromkeys((tokens, f"{tokens} d"), config.gates)
    if config.delta and config.decay == "channel":
        kinds[tokens] = FP32
    kinds |= dict.fromkeys((KEPT, INVERSE, FRESH), BF16)
    return arrays | {name: array(kinds.get(dims, FP32), dims) for name, dims in given.items()}


def default_policy(config: RecurrentConfig) -> Policy:
    """What a configuration gets."""
    plan = default_launch(config)
    if config.taylor:
        return Policy("multistage", plan)  # 10 % less time than deeper rings
    if stands_upright(config):
        # Mamba-2 takes 3 % less time than with "inflight", simple GLA the same.
        return Policy("lcsf-ahead", plan, groups=1)
    if config.decay != "channel":
        # Under delta rules a third slot is worth nothing, and in short rows it costs 2 %.
        return Policy("lcsf", plan, depth=2 if config.delta else 0)
    # Beside all its operands two blocks have room for one slot of v, which is needed last.
    return Policy("lcsf-early", plan, groups=1, depth=2, slots={"v": 1})


def default_launch(config: RecurrentConfig) -> LaunchPlan:
    """The launch plan of the default policy: two states on an SM, in two blocks or two groups."""
    upright = stands_upright(config)
    return LaunchPlan(
        split="" if upright else "e",
        resident=1 if config.columns > 64 else 2,
        store_panels=1,
        # Worth 4 % for Mamba-2, 1 to 2 for GLA and Based, nothing under delta rules.
        late_stores=upright or config.taylor or config.decay == "channel",
        keep_masks=upright or config.delta or config.taylor,
    )
