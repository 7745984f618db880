"""From a formula to a Derivation: fusion, nests, tiles, cost, bound, pseudocode.

Two modes. *Model* (`memory` in values): least transferred values, the setting of the proofs.
*GPU*: least time on a machine, real divisors, double buffers, waves; traffic and bound are still
reported in values. Either way the result is refused if it beats a proven bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from warploom.derive.bounds.bounds import Bound, check
from warploom.derive.cost import closed, continuous, timing
from warploom.derive.cost.cost import FULL, PAPER, Accounting, resident, traffic
from warploom.derive.cost.counts import exact_traffic
from warploom.derive.cost.gpu import Gpu, element_bytes, gpu
from warploom.derive.cost.levels import level_lines, sm_lines
from warploom.derive.cost.structure import MAX_STREAMS, Plan, Setting, search
from warploom.derive.cost.work import recomputes
from warploom.derive.execute import run_kernels
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs, shrunk_sizes
from warploom.derive.formula.graph import Diagram
from warploom.derive.kernel.chunk import exchange
from warploom.derive.kernel.kernel import Kernel, Loop, LoopKind
from warploom.derive.kernel.legal import has_code, make_kernel
from warploom.derive.lemmas.cascade import Refusal
from warploom.derive.show.drawing import draw
from warploom.derive.show.pseudo import pseudocode
from warploom.errors import InputError

SCHEMA = "warploom.derivation/1"
EXCHANGE = "exchange of sums (chunks)"
PAIRS = "associativity of the pair (decay, state) (chunks)"


@dataclass(frozen=True)
class Derivation:
    """What was derived. Traffic and memory are in values, `certificate` is a relative gap."""

    diagram: Diagram
    kernels: tuple[Kernel, ...]
    capacity: float
    bound: Bound
    gpu: str = ""
    """A machine's name, or the path of its file."""
    dtype: str = ""
    estimates: tuple[timing.Estimate, ...] = ()
    regions: int = 0
    nests: int = 0

    @cached_property
    def traffic(self) -> int:
        """Values moved by all kernels, exactly."""
        return sum(exact_traffic(kernel) for kernel in self.kernels)

    @property
    def recomputes(self) -> bool:
        """Whether some product is evaluated more than once."""
        return any(recomputes(kernel) for kernel in self.kernels)

    @property
    def percent_of_bound(self) -> float:
        """The proven bound as a percentage of what the derivation moves: 100 cannot be beaten."""
        return 100.0 * self.bound.value / self.traffic

    @property
    def seconds(self) -> float:
        """Modelled time on the GPU; 0 without one."""
        return sum(estimate.seconds for estimate in self.estimates)

    @property
    def binding(self) -> str:
        """The resource that takes longest in the longest kernel."""
        if not self.estimates:
            return "transfer"
        return max(self.estimates, key=lambda estimate: estimate.seconds).binding

    @property
    def lemmas(self) -> tuple[str, ...]:
        """Every lemma used, in order."""
        boxes = [node for kernel in self.kernels for node in kernel.body.nodes]
        written = {node.name for node in self.diagram.nodes if node.kind == "scan_contract"}
        chunked = [n for n in boxes if n.kind == "scan_contract" and n.name not in written]
        first = [PAIRS if node.attr("gated") else EXCHANGE for node in chunked]
        used = [name for kernel in self.kernels for name in kernel.lemmas]
        return tuple(dict.fromkeys([*first, *used]))

    def verify(self, sizes: Mapping[str, int] | None = None, seed: int = 0) -> tuple[float, int]:
        """Run the kernels on random input at small sizes: (largest relative error, values moved).

        `sizes` overrides the small sizes chosen; tiles shrink with them. The moved count is from
        the execution, not from the formula.
        """
        small = self.shrunk(sizes)
        arrays = random_inputs(small.diagram, seed)
        got, moved = run_kernels(small.kernels, arrays)
        return compare(got, evaluate(small.diagram, arrays)), sum(t.total for t in moved)

    def shrunk(self, sizes: Mapping[str, int] | None = None, limit: int = 24) -> Derivation:
        """The same derivation on small axes with tiles that leave ragged tails."""
        wanted = shrunk_sizes(self.diagram, limit) | dict(sizes or {})
        kernels: list[Kernel] = []
        for kernel in self.kernels:
            small = kernel.resized(wanted)
            tiles = {
                each.symbol: min(
                    small.body.size[each.axis],
                    max(1, min(kernel.tile[each.symbol], 5 if each.kind != "stream" else 3)),
                )
                for each in kernel.loops
            }
            kernels.append(_whole_slices(small.tiled(tiles)))
        return replace(self, diagram=self.diagram.resized(wanted), kernels=tuple(kernels))

    def law(self) -> str:
        """The closed form of each kernel's traffic, where there is one."""
        lines: list[str] = []
        for kernel in self.kernels:
            try:
                lines.append(f"{kernel.name}: {closed.law(kernel, PAPER).at(self.capacity)}")
            except InputError:
                lines.append(f"{kernel.name}: {traffic(kernel)}")
        return "\n".join(lines)

    def certificate_gap(self, accounting: Accounting = FULL) -> float:
        """Relative distance of the continuous optimum from its dual bound, worst kernel."""
        return max(continuous.solve(k, self.capacity, accounting).gap for k in self.kernels)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data, versioned."""
        return {
            "schema": SCHEMA,
            "diagram": self.diagram.to_json(),
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "capacity": self.capacity,
            "traffic": self.traffic,
            "bound": {
                "name": self.bound.name,
                "box": self.bound.box,
                "value": self.bound.value,
                "statement": self.bound.statement,
            },
            "percent_of_bound": self.percent_of_bound,
            "gpu": self.gpu,
            "dtype": self.dtype,
            "seconds": self.seconds,
            "binding": self.binding,
            "lemmas": list(self.lemmas),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Derivation:
        """Back from JSON; raises `InputError` for another schema or a missing field."""
        if data.get("schema") != SCHEMA:
            raise InputError(f"derivation schema is {data.get('schema')!r}, expected {SCHEMA!r}")
        try:
            kernels = tuple(Kernel.from_json(item) for item in data["kernels"])
            found = cls(
                Diagram.from_json(data["diagram"]),
                kernels,
                float(data["capacity"]),
                Bound(**data["bound"]),
                data["gpu"],
                data["dtype"],
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"derivation JSON is incomplete: {error!r}") from None
        if not found.gpu:
            return found
        machine = gpu(found.gpu)
        return replace(
            found, estimates=tuple(timing.estimate(k, machine, found.dtype) for k in kernels)
        )

    def __str__(self) -> str:
        """The report: what was fused, sizes, cost against bound, pseudocode."""
        where = (
            f" on {gpu(self.gpu).name} in {self.dtype}"
            if self.gpu
            else f" at M = {self.capacity:.0f} values"
        )
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.diagram.sizes)
        lines = [f"{self.diagram.name}{where}", "", f"axes      {sizes}"]
        if self.lemmas:
            lines.append("lemmas    " + ", ".join(self.lemmas))
        for kernel in self.kernels:
            tiles = ", ".join(f"{name}={size}" for name, size in kernel.tiles) or "no tiles"
            lines.append(f"{kernel.name:9} {tiles}; {resident(kernel):.0f} values on chip")
        lines += [
            f"traffic   {self.traffic:.6g} values",
            f"bound     {self.bound.value:.6g} values, {self.bound.name}: {self.bound.statement}",
            f"          {self.percent_of_bound:.1f} % of the traffic is proven necessary",
        ]
        for kernel, estimate in zip(self.kernels, self.estimates, strict=False):
            parts = ", ".join(f"{n} {1e6 * s:.1f}" for n, s in estimate.parts.items())
            apart = "launch and merge" if kernel.splits else "launch"
            lines.append(
                f"time      {1e6 * estimate.seconds:.1f} us, {estimate.binding} binds ({parts} us; "
                f"waves x{estimate.waves:.2f}) and {1e6 * estimate.apart:.1f} to {apart}; "
                f"{1e3 * estimate.joules:.3g} mJ to move data"
            )
        if self.estimates:
            machine = gpu(self.gpu)
            for kernel, estimate in zip(self.kernels, self.estimates, strict=True):
                lines += ["", kernel.name]
                lines += level_lines(kernel, machine, self.dtype, estimate)
                lines += sm_lines(kernel, machine, self.dtype)
        if any(not_fits(kernel, self) for kernel in self.kernels):
            lines.append("warning   a kernel exceeds the level's capacity")
        lines.append("")
        element = element_bytes(self.dtype or "fp16")
        lines += [pseudocode(kernel, bool(self.gpu), element) for kernel in self.kernels]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The drawing, for notebooks."""
        return draw(self)


def not_fits(kernel: Kernel, derivation: Derivation) -> bool:
    """Whether a kernel holds more than the capacity it was derived for."""
    accounting = FULL
    if derivation.gpu:
        accounting = timing.accounting(gpu(derivation.gpu), derivation.dtype)
    return resident(kernel, accounting) > derivation.capacity * (1 + 1e-9)


def derive(
    diagram: Diagram, memory: float, *, split: bool = False, lemmas: bool = True
) -> Derivation:
    """Derive an algorithm that moves the fewest values, with `memory` values of fast memory.

    `split` allows axes that several blocks share. Without `lemmas` the registered ones are not
    looked at: every streaming form is searched for, with the same certificates.

    Raises `InputError` when nothing fits, `BoundBroken` when the result claims less traffic than is
    proven necessary.
    """
    if not memory >= 1 or not math.isfinite(memory):
        raise InputError(f"memory is {memory} values: give a finite number of at least 1")
    setting = Setting(memory, {}, split=split, lemmas=lemmas)
    rewritten = exchange(diagram)
    try:
        plan = search(rewritten, setting)
    except InputError:  # a chunk needs all of the axis that it sums over, a step some of it
        if rewritten == diagram:
            raise
        plan = search(diagram, setting)
    return _checked(Derivation(diagram, plan.kernels, memory, _PENDING), plan)


def derive_on(
    diagram: Diagram,
    gpu_name: str,
    dtype: str = "fp16",
    *,
    objective: str = "time",
    streams: int = MAX_STREAMS,
    lemmas: bool = True,
    share: float = 1.0,
) -> Derivation:
    """Derive the fastest algorithm on a GPU, or the one that takes the least energy to move data.

    `gpu_name` is a shipped machine's name or the path of a .toml file; `objective` is "time" or
    "energy". `streams` is the most stream loops in one nest (1 for kernels that are to be compiled:
    nests without code are left out), `share` the part of shared memory and registers that tiles may
    fill; `lemmas`, and what is raised, as of `derive`, and `InputError` for unknown names.
    """
    machine = gpu(gpu_name)
    machine.flops(dtype)
    if objective not in OBJECTIVES:
        raise InputError(f"no objective {objective!r}: choose {' or '.join(OBJECTIVES)}")
    asked = Setting(0, {}, split=True, streams=streams, lemmas=lemmas)
    if streams == 1:
        asked = replace(asked, allowed=has_code)
    return _for_gpu(diagram, machine, dtype, objective, share, asked)


def derive_unshared(diagram: Diagram, gpu_name: str, dtype: str) -> Derivation:
    """`derive_on` for kernels that are to be compiled, where blocks share no axis: nothing is left
    for a second program to join."""
    asked = Setting(0, {}, streams=1, allowed=has_code)
    return _for_gpu(diagram, gpu(gpu_name), dtype, "time", 1.0, asked)


PARTITIONS: dict[str, LoopKind] = {"group": "group", "split": "split", "stream": "stream"}
"""The words for a partition."""
_PENDING = Bound("", "", 0.0, "")


OBJECTIVES: dict[str, tuple[Any, Any]] = {
    "time": (timing.time_score, timing.floor_seconds),
    "energy": (timing.energy_score, timing.energy_floor),
}
"""What a GPU derivation minimises: (score, lower bound of the score)."""


def _for_gpu(
    diagram: Diagram, machine: Gpu, dtype: str, objective: str, share: float, asked: Setting
) -> Derivation:
    """The least modelled time or energy on a machine, of the nests that are asked for."""
    score, floor = OBJECTIVES[objective]
    rewritten = exchange(diagram)
    capacity = timing.capacity(machine, dtype) * share
    setting = replace(
        asked,
        capacity=capacity,
        multiples=timing.multiples(rewritten, machine, dtype),
        score=score(machine, dtype),
        accounting=timing.accounting(machine, dtype),
        floor=floor(machine, dtype),
    )
    plan = search(rewritten, setting)
    plan = replace(plan, kernels=tuple(_whole_slices(kernel) for kernel in plan.kernels))
    estimates = tuple(timing.estimate(kernel, machine, dtype) for kernel in plan.kernels)
    found = Derivation(
        diagram, plan.kernels, capacity, _PENDING, machine.reference, dtype, estimates
    )
    return _checked(found, plan)


def _whole_slices(kernel: Kernel) -> Kernel:
    """Parts of a split axis made a multiple of their slices, so that no slice is cut by a part."""
    tiles = dict(kernel.tiles)
    for axis in kernel.splits:
        step, width = tiles.get(f"s_{axis}"), tiles[f"w_{axis}"]
        if step is not None and width % step:
            longer = -(-width // step) * step
            tiles[f"w_{axis}"] = longer if longer <= kernel.body.size[axis] else longer - step
    return kernel.tiled(tiles)


def _checked(found: Derivation, plan: Plan) -> Derivation:
    """Attach the strongest bound and the search's account; a beaten bound is an error."""
    bound = check(found.diagram, found.traffic, found.capacity, found.recomputes)
    return replace(found, bound=bound, regions=plan.regions, nests=plan.nests)


def by_hand(
    diagram: Diagram,
    loops: Mapping[str, str],
    tiles: Mapping[str, int],
    memory: float,
    lemmas: bool = True,
) -> Derivation:
    """One fused kernel with a nest chosen by a person: `loops` maps axis to group, split or stream.

    Raises `InputError` with the refused rule, or when the tiles do not fit.
    """
    wanted: list[Loop] = []
    for axis, kind in loops.items():
        for word in kind.split("+"):
            if word not in PARTITIONS:
                raise InputError(
                    f"axis {axis!r}: {word!r} is no partition; use group, split, stream"
                )
            wanted.append(Loop(axis, PARTITIONS[word]))
    order = {"group": 0, "split": 1, "stream": 2}
    nest = sorted(wanted, key=lambda loop: order[loop.kind])
    kernel = make_kernel(exchange(diagram), nest, lemmas=lemmas)
    if isinstance(kernel, Refusal):
        raise InputError(str(kernel))
    sized = kernel.tiled(
        {each.symbol: tiles.get(each.symbol, tiles.get(each.axis, 1)) for each in kernel.loops}
    )
    needed = resident(sized)
    if needed > memory:
        raise InputError(
            f"tiles {dict(sized.tiles)} hold {needed:.0f} values, memory is {memory:.0f}: "
            f"scale them by {memory / needed:.2f}"
        )
    found = Derivation(diagram, (sized,), memory, _PENDING)
    return replace(found, bound=check(diagram, found.traffic, memory, recomputes(sized)))
