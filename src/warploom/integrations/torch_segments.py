"""Recurrent attention of few heads and many rows: three kernels (`kernels.recurrent.segments`)."""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.integrations.torch_program import launch, multiprocessors, torch_module
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.program import default_policy, recurrent
from warploom.kernels.recurrent.segments import configs, scan, segments
from warploom.kernels.recurrent.solved import few_tasks

torch: Any = torch_module()
BY_ROW = ("q", "k", "v", "dt", "o")


def best_count(config: RecurrentConfig, v: Any) -> int:
    """How many segments the rows of v: [batch, rows, heads, e] are best cut in."""
    if config.states or v.device.type != "cuda":
        return 1
    batch, rows, heads, _ = v.shape
    return segments(config, batch, heads, rows, multiprocessors(v.device.index))


def alone(config: RecurrentConfig, v: Any) -> bool:
    """Whether the second kernel of a delta rule in two has an SM for each of its tasks."""
    batch, _, heads, _ = v.shape
    return v.device.type == "cuda" and few_tasks(
        config, batch, heads, multiprocessors(v.device.index)
    )


def run_segments(config: RecurrentConfig, arrays: dict[str, Any], scale: float, count: int) -> None:
    """Fill `o`, and `final` where the configuration has it, of the arrays by their names."""
    v = arrays["v"]
    batch, rows, heads, e = v.shape
    shape = (batch, count, heads, config.key_dim, e)
    cut = {
        name: one.reshape(batch * count, rows // count, *one.shape[2:])
        if name in BY_ROW or (name == "g" and one.dim() > 1)
        else one
        for name, one in arrays.items()
        if name not in ("initial", "final")
    }
    added, before = (torch.empty(shape, device=v.device, dtype=torch.float32) for _ in range(2))
    first, last = configs(config)
    flat = (batch * count, *shape[2:])
    _call(first, cut | {"final": added.view(flat)}, scale)
    states = {"added": added, "sums": _sums(config, arrays, count), "before": before}
    states["final"] = arrays["final"] if config.final else added.new_empty(shape[:1] + shape[2:])
    if config.initial:
        states["initial"] = arrays["initial"]
    launch(("scan", config), lambda: compiled(scan(config)), states)
    _call(last, cut | {"initial": before.view(flat)}, scale)


def _call(config: RecurrentConfig, arrays: dict[str, Any], scale: float) -> None:
    program = recurrent(config)
    given = {array.name: arrays[array.name] for array in program.arrays}
    launch((config,), lambda: compiled(program, default_policy(config)), given, {"scale": scale})


def _sums(config: RecurrentConfig, arrays: dict[str, Any], count: int) -> Any:
    """[batch, count, heads]: the logarithm of what a segment multiplies the state by."""
    batch, rows, heads, _ = arrays["v"].shape
    if config.decay == "none":
        return torch.zeros(batch, count, heads, device=arrays["v"].device)
    if config.decay == "head":
        return (arrays["g"] * (rows // count)).expand(batch, count, heads).contiguous()
    gates = arrays["g" if config.decay == "token" else "dt"].float()
    if config.softplus:
        gates = torch.nn.functional.softplus(gates + arrays["bias"])
    sums = gates.reshape(batch, count, -1, heads).sum(2)
    return sums * arrays["a"] if config.decay == "step" else sums
