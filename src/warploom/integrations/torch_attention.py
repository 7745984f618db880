"""The gradients of attention as a PyTorch operator: `attention_backward`.

Kernels one after another (`kernels.attention.backward`), compiled at first use. With
`deterministic` the gradients have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.errors import InputError
from warploom.integrations.torch_launches import Launches, Room
from warploom.integrations.torch_program import (
    Chosen,
    Steps,
    allowed_type,
    check_devices,
    empty_like,
    form_of,
    multiprocessors,
    operator,
    refuse_backward,
    steps,
    torch_module,
)
from warploom.kernels.attention.backward_config import BackwardConfig, fitted
from warploom.kernels.attention.gradients import kernel, parts
from warploom.kernels.attention.program import refuse_scale
from warploom.kernels.attention.shares import lists_of_tasks
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = torch_module()
ATTENTION_TYPES = ("bf16", "fp16")

ONCE = "take no gradient of a gradient"  # a hint of refusals
SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? grad_lse=None, "
    "bool causal=False, int? window=None, float? scale=None, bool deterministic=False, "
    "float softcap=0.0) -> (Tensor, Tensor, Tensor)"
)
OPTIONS = ("causal", "window", "scale", "deterministic", "softcap")  # the last of these, in order


def checked_group(
    name: str, q: Any, k: Any, v: Any, window: int | None, scale: float | None
) -> int:
    """Query heads a key head of tensors whose heads are axis 1.

    Raises `InputError` for heads, types or masks that no kernel of attention takes.
    """
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(
            f"{name} of q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: {q.shape[1]} "
            f"query heads over {k.shape[1]} key heads is not a whole number each"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"{name} of {q.dtype}, {k.dtype}, {v.dtype}: expected one element type")
    allowed_type(q, f"{name} q", ATTENTION_TYPES)
    if window is not None and window < 1:
        raise InputError(f"{name} window={window}: expected at least 1")
    refuse_scale(scale)
    return q.shape[1] // k.shape[1]


def value_dim(q: Any, v: Any) -> int | None:
    """The head size of v, where it is another than that of q."""
    return None if v.shape[-1] == q.shape[-1] else v.shape[-1]


def config_of(q: Any, k: Any, v: Any, **options: Any) -> BackwardConfig:
    """The kernels that shapes need, and `OPTIONS`; raises `InputError` where there are none."""
    config = BackwardConfig(
        dtype=dtype(element_type(q.dtype)),
        head_dim=q.shape[3],
        group=q.shape[1] // k.shape[1],
        value_dim=value_dim(q, v),
        sms=multiprocessors(q.device.index),
        **options,
    )
    return fitted(config, q.shape[2], k.shape[2], k.shape[0] * k.shape[1])


def _check(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    given = {"grad": grad, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    check_devices("attention_backward", given)
    rows, kinds = (*q.shape[:3], v.shape[3]), {t.dtype for t in (grad, q, k, v, out)}
    shapes = [tuple(t.shape) for t in (grad, out)] + [(*lse.shape, v.shape[3])]
    if shapes.count(rows) != len(shapes) or len(kinds) != 1:
        listed = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in given.items())
        raise InputError(
            f"attention_backward of {listed}: expected one type, grad and out like q with the head "
            "size of v"
        )


def _build(config: BackwardConfig, part: str) -> Built:
    program, policy, allow = kernel(config, part)
    return compiled(program, policy, allow=allow)


def kernels_of(config: BackwardConfig) -> dict[str, Chosen]:
    """The kernels of a backward pass, by name."""
    return {part: ((config, part), partial(_build, config, part)) for part in parts(config)}


def room_of(config: BackwardConfig, lse: tuple[int, ...], heads: int, keys: int) -> Room:
    """What the kernels leave one another for lse of that shape and so many key heads of keys: two
    vectors and dq's sums, with the counters of those who add to them, and the sums of pieces."""
    vectors, sums = tuple(config.vectors_shape(lse)), config.sums
    used = vectors[-1] if sums else lse[-1]
    found = [("base", "fp32", vectors, used), ("delta", "fp32", vectors, used)]
    if sums:
        shape = tuple(config.sums_shape(lse))
        found.append(("dq_sum", "fp32", shape, shape[-1]))
    if config.sums and config.deterministic:
        shape = tuple(config.turns_shape(lse))
        found.append(("turns", "int32", shape, shape[-1]))
    if config.cut:
        shape = tuple(config.pieces_shape(heads, keys))
        found.append(("piece_sums", "fp32", shape, shape[-1]))
    return Room(tuple(found))


@dataclass(frozen=True)
class Plan:
    """What a call launches; `tasks` gives the lists of tasks."""

    config: BackwardConfig
    launches: Launches
    tasks: Callable[[], dict[str, Any]]


def _plan(*args: Any) -> Plan:
    grad, q, k, v, out, lse, _, *options = args
    _check(grad, q, k, v, out, lse)
    config = config_of(q, k, v, **dict(zip(OPTIONS, options, strict=True)))
    batch, kv_heads, keys = k.shape[:3]
    shape, rows, device = list(q.shape), q.shape[2], q.device

    @cache
    def tasks() -> dict[str, Any]:
        """The list of tasks on the GPU, made at the first call of these sizes."""
        if not config.listed:
            return {}
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"attention_backward of q {shape} for the first time while a graph is captured: "
                "call it once before, so that its list of tasks is on the GPU"
            )
        made = lists_of_tasks(config, batch, kv_heads, rows, keys)
        return {name: torch.from_numpy(table).to(device) for name, table in made.items()}

    # Kernels of listed tasks are the same for all bands.
    alike = replace(config, band=0) if config.listed else config
    room = partial(room_of, config, tuple(lse.shape), batch * kv_heads, keys)
    launches = Launches(partial(kernels_of, alike), room, ("do",))
    return Plan(config, launches, tasks)


def _form(*args: Any) -> tuple[Any, ...]:
    return "attention_backward", *form_of(*args[:6]), *args[7:]


def gradients_like(_: Any, grad: Any, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, Any, Any]:
    """Room for the gradients of q, k and v."""
    return empty_like(q), empty_like(k), empty_like(v)


def _fill(plan: Plan, made: tuple[Any, ...], *args: Any) -> None:
    grad, q, k, v, out, lse, grad_lse, *_ = args
    dq, dk, dv = made
    if q.numel() == 0 or k.numel() == 0:
        for one in made:
            one.zero_()
        return
    arrays = {"q": q, "k": k, "v": v, "o": out, "do": grad, "lse": lse.contiguous()}
    arrays |= {"dq": dq, "dk": dk, "dv": dv, **plan.tasks()}
    config = plan.config
    if grad_lse is None and not config.cut:
        plan.launches(arrays)
        return

    def prepared(room: Mapping[str, Any]) -> None:
        if config.cut:
            room["piece_sums"].zero_()
        # Scores change lse by the weights, and out by the weights times grad v less delta.
        if grad_lse is not None:
            subtract(room["delta"], grad_lse, config.fragments)

    plan.launches(arrays, {"prepare": prepared})


def subtract(delta: Any, rows: Any, in_fragments: bool) -> None:
    """Take an element a row off a vector of the kernels', which lies in its own order."""
    if not in_fragments:
        delta[..., : rows.shape[-1]] -= rows
        return
    padded = torch.nn.functional.pad(rows, (0, delta.shape[-1] - rows.shape[-1]))
    # 16 rows are 2 times 8, of which a thread of a quad has 2 neighbours (`Array.fragments`).
    delta.unflatten(-1, (-1, 4, 2, 2)).sub_(padded.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2))


GRADIENTS = Steps(_plan, gradients_like, _fill, _form)
attention_backward = operator(
    "warploom::attention_backward",
    SCHEMA,
    *steps(*GRADIENTS),
    refuse_backward("warploom::attention_backward", ONCE),
)
