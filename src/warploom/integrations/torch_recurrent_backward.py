"""The gradients of recurrent attention as a PyTorch operator, behind `torch_recurrent`.

`gradients` is what autograd calls: one or two kernels, and sums over what they leave in parts.
Importing this module needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.integrations import torch_program as ops
from warploom.kernels.recurrent.backward import (
    ALLOW,
    backward_arrays,
    backward_policy,
    made_arrays,
    parts_of,
    recurrent_backward,
    sizes_of,
    slots_of,
    tiles_of,
)
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.slots import slot_schedule, slot_sums
from warploom.tile import BF16, FP32

torch: Any = ops.torch_module()
READ = ("q", "k", "v", "do", "states", "g", "dt", "a", "bias", "skip", "beta",
        "inverse", "fresh", "dfinal")  # fmt: skip
WRITTEN = ("dq", "dk", "dv", "dg", "ddt", "da", "dbias", "dskip", "dbeta", "dinitial")
SCHEMA = (
    f"({', '.join(f'Tensor {x}' if n < 5 else f'Tensor? {x}' for n, x in enumerate(READ))}, "
    f"bool initial, float scale) -> ({', '.join(['Tensor'] * len(WRITTEN))})"
)


def backward_config(tensors: dict[str, Any], initial: bool) -> RecurrentConfig:
    """What the kernel of these tensors is."""
    gate = tensors.get("g", tensors.get("dt"))
    ranks = {1: "head", 3: "token", 4: "channel"}
    decay = "none" if gate is None else "step" if "dt" in tensors else ranks[gate.dim()]
    gates = [one for one in (gate, tensors.get("beta")) if one is not None and one.dim() > 1]
    narrow = any(one.dtype is torch.bfloat16 for one in gates)
    q, v = tensors["q"], tensors["v"]
    return RecurrentConfig(
        decay=decay,
        delta="beta" in tensors,
        softplus="bias" in tensors,
        gates=BF16 if narrow else FP32,
        key_dim=int(q.shape[3]),  # of traced shapes, too: a kernel is for one size of heads
        value_dim=int(v.shape[3]),
        shared=bool(q.shape[2] == 1),
        skip="skip" in tensors,
        initial=initial,
        final="dfinal" in tensors,
    )


_written = cache(made_arrays)
_taken = cache(backward_arrays)  # making them anew: an eighth of a call on the host


def _room(config: RecurrentConfig, tensors: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Fresh tensors for what the kernels write under these names."""
    v = tensors["v"]
    sizes = sizes_of(config, *v.shape[:3])
    kinds = {BF16: torch.bfloat16, FP32: torch.float32}
    arrays = {name: _written(config)[name] for name in names}
    return {
        name: v.new_empty([sizes[dim] for dim in one.dims], dtype=kinds[one.dtype])
        for name, one in arrays.items()
    }


def _given(args: tuple[Any, ...]) -> dict[str, Any]:
    named = zip(READ, args, strict=False)
    return {name: one for name, one in named if one is not None}


def _plan(*args: Any) -> RecurrentConfig:
    return backward_config(_given(args), args[len(READ)])


def _results(config: RecurrentConfig, *args: Any) -> tuple[Any, ...]:
    """What the kernels write, dq, dk and dv like q, k and v; empty where there is none."""
    tensors = _given(args)
    v, names = tensors["v"], [name for name in WRITTEN[3:] if name in _written(config)]
    made = {f"d{x}": v.new_empty(tensors[x].shape) for x in ("q", "k", "v")}
    made |= _room(config, tensors, names)
    return tuple(made[x] if x in made else v.new_empty(0) for x in WRITTEN)


def _fill(config: RecurrentConfig, results: tuple[Any, ...], *args: Any) -> None:
    tensors = _given(args)
    made: dict[str, Any] = dict(zip(WRITTEN, results, strict=True))
    if tensors["v"].numel() == 0:
        for one in results:
            one.zero_()
        return
    # Tasks may leave parts of dq, dk and dv; `starts` is what a kernel leaves another.
    heads, parts = tensors["v"].shape[2], list[str]()
    parts += ["dv"] if tiles_of(config)[1] > 1 else []
    parts += ["dq", "dk"] if tensors["q"].shape[2] != slots_of(config, heads) else []
    own = [x for x in _written(config) if x not in WRITTEN or x in parts]
    kept = _room(config, tensors, own)
    every = tensors | made | kept
    for part in parts_of(config):

        def make(part: str = part) -> Built:
            program = recurrent_backward(config, part)
            return compiled(program, backward_policy(config, part), allow=ALLOW)

        arrays = {name: every[name] for name in _taken(config, part)}
        ops.launch(("backward", part, config), make, arrays, {"scale": args[-1]})
    for name in parts:
        add_slots(kept[name], made[name])


_operator = ops.operator("warploom::recurrent_backward", SCHEMA, *ops.steps(_plan, _results, _fill))


def gradients(tensors: dict[str, Any], do: Any, dfinal: Any, scale: float) -> dict[str, Any]:
    """The gradient of every tensor that `torch_recurrent`'s operator got, by its name.

    `tensors` has them, and what the operator kept (`KEPT`) as it left it; `do` is like v, `dfinal`
    None where there is no final state.
    """
    given = tensors | {"do": do.contiguous()}
    if dfinal is not None:
        given["dfinal"] = dfinal.contiguous()
    made = _operator(*[given.get(x) for x in READ], "initial" in tensors, scale)
    return finished(tensors, dict(zip(WRITTEN, made, strict=True)))


def finished(tensors: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """The gradients by the names of inputs; those of gates are still in parts."""
    heads, found = tensors["v"].shape[2], {x: made[f"d{x}"] for x in "qkv"}
    for name in ("g", "dt", "a", "bias", "skip", "beta"):
        if name in tensors:
            one, like = made[f"d{name}"], tensors[name]
            by_row = like.dim() > 1
            one = _over_slots(one, 2, heads) if by_row else _over_slots(one.sum((0, 2)), 0, heads)
            found[name] = one.to(like.dtype)
    return found | ({"initial": made["dinitial"]} if "initial" in tensors else {})


def add_slots(parts: Any, sums: Any) -> None:
    """Add what neighbouring slots have, into the tensor like q or v."""
    count, d = parts.shape[2] // sums.shape[2], sums.shape[3]
    program = slot_sums(count, d)
    arrays = {"parts": parts.view(-1, count, d), "sums": sums.view(-1, d)}
    ops.launch(("slot sums", count, d), lambda: compiled(program, slot_schedule(program)), arrays)


def _over_slots(parts: Any, axis: int, count: int) -> Any:
    """The sum over neighbouring slots, of which `count` are left."""
    if parts.shape[axis] == count:
        return parts
    return parts.unflatten(axis, (count, parts.shape[axis] // count)).sum(axis + 1)
