"""The candidate's process: calls it on arrays that come over a pipe, and says what it saw.

Nothing here knows a right result. What is judged are the bits that go back to the process of the
judge, so code of the candidate cannot make a wrong result right.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from warploom.emulate.report import Fault
from warploom.errors import InputError, ToolMissing, WarploomError
from warploom.judge.candidate import load_candidate
from warploom.judge.problem import KINDS, Signature, Sizes, Values, bits_of, shape_of, tensor_of
from warploom.judge.timing import Timed, time_calls
from warploom.judge.tolerance import results, torch
from warploom.judge.watch import LIBRARIES, Exits, Recorder, Watch, refused_calls
from warploom.objects import called
from warploom.runtime.bindings import one_line
from warploom.runtime.buffers import ALIGNMENT, GUARD_BYTES, GUARD_VALUE, POISON
from warploom.runtime.encoding import Bits
from warploom.tile.ir import Array

PAUSE_S = 0.01  # in which work that a call left behind would show
SPIN_CYCLES = 2_000_000  # of the judge's stream before a call on a GPU: a millisecond
Complaint = tuple[str, str]  # the check, and what it found


@dataclass(frozen=True)
class Called:
    """What a call left: its outputs' bits, and what was wrong besides."""

    outputs: dict[str, Bits]
    complaints: tuple[Complaint, ...]


class _Guarded:
    """A tensor between guard bands; `fill` of the bands is NaN around what a candidate reads."""

    def __init__(self, one: Array, sizes: Sizes, guard: int, device: str) -> None:
        self.array, shape = one, shape_of(one, sizes)
        kind = getattr(torch, one.dtype.library)
        count = one.dtype.bytes
        for length in shape:
            count *= length
        total = 2 * GUARD_BYTES + -(-count // ALIGNMENT) * ALIGNMENT
        self._raw = torch.full((total + ALIGNMENT,), guard, dtype=torch.uint8, device=device)
        start = GUARD_BYTES + -(self._raw.data_ptr() + GUARD_BYTES) % ALIGNMENT
        self._guard, self._bands = guard, (self._raw[:start], self._raw[start + count :])
        self.tensor = self._raw[start : start + count].view(kind).view(shape)

    def poison(self) -> None:
        """All bits set: NaN in every floating type."""
        self.tensor.view(torch.uint8).fill_(POISON)

    @property
    def intact(self) -> bool:
        """Whether nothing was written around it."""
        return all(bool((band == self._guard).all()) for band in self._bands)


class Session:
    """One candidate, loaded. Lives in a worker process; see `runtime.worker`."""

    def __init__(self, kept: bytes) -> None:
        torch.set_num_threads(1)
        os.dup2(2, 1)  # what a candidate prints is no part of the verdict
        self._inputs: dict[str, _Guarded] = {}
        self._before: dict[str, Any] = {}
        self._earlier: tuple[dict[str, Any], dict[str, Bits]] | None = None

    def close(self) -> None:
        """Nothing stays open."""

    def open(self, text: str, signature: Signature, problem_file: Path, gpu: bool) -> str:
        """Load the candidate; gives why that fails, "" where it does not.

        Raises `ToolMissing` for what this computer lacks: that is no fault of the candidate.
        """
        if gpu and not torch.cuda.is_available():
            raise ToolMissing("--on gpu: torch finds no GPU here; --on cpu judges all but the time")
        if not gpu:
            import_module("warploom.judge.interpreted")
        self._signature, self._device = signature, "cuda" if gpu else "cpu"
        # torch replaces functions of its own when this is first imported, which its profiler does:
        # before the watch begins, or `torch.manual_seed` seems to be the candidate's.
        import_module("torch._dynamo")
        self._watch = Watch(problem_file)
        self._stream = torch.cuda.Stream() if gpu else None
        try:
            self._function, self._writes = load_candidate(text, signature, gpu)
        except ToolMissing:
            raise
        except InputError as error:
            return str(error)
        return ""

    def call(self, values: Values, sizes: Sizes, again: bool) -> Called:
        """Call it on inputs; `again` puts them where the inputs of the last call were."""
        given = self._placed(values, sizes, again)
        outputs, found = self._called(given, sizes)
        bits = self._read(outputs, found)
        found += self._inputs_kept(values)
        if self._earlier is not None:
            held, were = self._earlier
            if any(not (bits_of(held[name]) == were[name]).all() for name in held):
                found.append(("state", "the result of an earlier call changes with this one"))
        self._earlier = (outputs, bits) if bits else None
        found += [(check, said) for check, said in self._watch.heard if self._judges(check)]
        found += [("tampering", f"replaces {name}") for name in self._watch.tampered()[:1]]
        self._watch.heard.clear()
        return Called(bits, tuple(dict.fromkeys(found)))

    def burst(self, values: Values, sizes: Sizes, count: int) -> list[Called]:
        """Call it `count` times with nothing in between; gives each different result once."""
        given = self._placed(values, sizes, True)
        targets = [self._targets(sizes) for _ in range(count)] if self._writes else []
        made: list[Any] = []
        try:
            with self._on_stream():
                for number in range(count):
                    outs = [one.tensor for one in targets[number].values()] if targets else []
                    made.append(self._function(*given, *outs))
        except Exception as error:
            return [Called({}, (("burst", _said(error)),))]
        self._wait()
        different: dict[str, Called] = {}
        for number, one in enumerate(made):
            found: list[Complaint] = []
            outputs = self._named(one, targets[number] if targets else {}, sizes, found)
            bits = {name: bits_of(tensor) for name, tensor in outputs.items()}
            key = hashlib.sha256(b"".join(one.tobytes() for one in bits.values())).hexdigest()
            different.setdefault(key, Called(bits, tuple(found)))
        return list(different.values())

    def time(self, problem: str, sizes: Sizes, values: Values, seed: int) -> tuple[Timed, Called]:
        """Times of the candidate and of the problem's reference, on a GPU, and the last result."""
        given = self._placed(values, sizes, False)
        targets = self._targets(sizes) if self._writes else {}
        outs = [one.tensor for one in targets.values()]
        made: list[Any] = [None]

        def call() -> None:
            made[0] = self._function(*given, *outs)

        self._wait()
        timed = time_calls(call, problem, given, seed)
        found: list[Complaint] = []
        outputs = self._named(made[0], targets, sizes, found)
        bits = {name: bits_of(tensor) for name, tensor in outputs.items()}
        return timed, Called(bits, tuple(found))

    def _judges(self, check: str) -> bool:
        """Whether the problem cares: of libraries only where operations are forbidden."""
        return check != "library" or bool(self._signature.forbidden)

    def _placed(self, values: Values, sizes: Sizes, again: bool) -> list[Any]:
        """The inputs in memory of ours; they are copied by the judge's stream, behind a spin."""
        if not again or not self._inputs:
            made: dict[int, _Guarded] = {}  # inputs that are one array are one tensor
            for one in self._signature.inputs:
                own = made.setdefault(
                    id(values[one.name]), _Guarded(one, sizes, POISON, self._device)
                )
                self._inputs[one.name] = own
        self._before = {
            name: tensor_of(values[name], one.array.dtype).to(self._device)
            for name, one in self._inputs.items()
        }
        if self._device == "cuda":
            for one in self._inputs.values():
                one.poison()
            torch.cuda.synchronize()
        with self._on_stream():
            if self._device == "cuda":
                torch.cuda._sleep(SPIN_CYCLES)
            for name, one in self._inputs.items():
                one.tensor.copy_(self._before[name])
        return [one.tensor for one in self._inputs.values()]

    def _on_stream(self) -> Any:
        if self._device == "cpu":
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _targets(self, sizes: Sizes) -> dict[str, _Guarded]:
        made = {
            one.name: _Guarded(one, sizes, GUARD_VALUE, self._device)
            for one in self._signature.outputs
        }
        for one in made.values():
            one.poison()
        return made

    def _called(self, given: list[Any], sizes: Sizes) -> tuple[dict[str, Any], list[Complaint]]:
        """The outputs of a recorded call."""
        found: list[Complaint] = []
        targets = self._targets(sizes) if self._writes else {}
        ran, left = Recorder(), Exits()
        threads = threading.active_count()
        self._watch.busy = True
        try:
            with self._on_stream(), left, ran, self._profiled(found):
                made = self._function(*given, *(one.tensor for one in targets.values()))
        except Exception as error:
            return {}, [("fault" if isinstance(error, Fault) else "raises", _said(error))]
        finally:
            self._watch.busy = False
        if threading.active_count() > threads:
            found.append(("late", "leaves a thread running when it returns"))
        if calls := refused_calls(self._signature.forbidden, ran, left):
            found.append(("library", f"calls {', '.join(calls[:4])} of torch"))
        return self._named(made, targets, sizes, found), found

    def _profiled(self, found: list[Complaint]) -> Any:
        """On a GPU, where operations are forbidden: names of kernels that libraries ship."""
        if self._device == "cpu" or not self._signature.forbidden:
            return nullcontext()

        def ready(profile: Any) -> None:
            names = {event.key for event in profile.key_averages()}
            if known := sorted(name for name in names if LIBRARIES.search(name)):
                found.append(("library", f"launches {known[0]}"))

        activities = [torch.profiler.ProfilerActivity.CUDA]
        return torch.profiler.profile(activities=activities, on_trace_ready=ready)

    def _named(
        self, made: Any, targets: Mapping[str, _Guarded], sizes: Sizes, found: list[Complaint]
    ) -> dict[str, Any]:
        """The outputs by name, where they are what the problem asks for."""
        if targets:
            for name, one in targets.items():
                if not one.intact:
                    found.append(("bounds", f"writes outside of output {name}"))
            return {name: one.tensor for name, one in targets.items()}
        try:
            outputs = results(made, self._signature.outputs)
        except InputError as error:
            found.append(("form", str(error)))
            return {}
        for one in self._signature.outputs:
            if complaint := _form(one, outputs[one.name], sizes, self._device):
                found.append(complaint)
                return {}
            spans = [_span(other.tensor) for other in self._inputs.values()]
            low, high = _span(outputs[one.name])
            if any(low < end and start < high for start, end in spans):
                found.append(("aliasing", f"output {one.name} lies in memory of an input"))
        return outputs

    def _read(self, outputs: Mapping[str, Any], found: list[Complaint]) -> dict[str, Bits]:
        """The bits of the outputs, at once and a moment later."""
        with self._on_stream():
            first = {name: bits_of(tensor) for name, tensor in outputs.items()}
        self._wait()
        time.sleep(PAUSE_S)
        for name, tensor in outputs.items():
            if not (bits_of(tensor) == first[name]).all():
                where = " or on another stream" if self._device == "cuda" else ""
                found.append(("late", f"output {name} is written after the call{where}"))
        return first

    def _inputs_kept(self, values: Values) -> list[Complaint]:
        found: list[Complaint] = []
        for name, one in self._inputs.items():
            if not (bits_of(one.tensor) == values[name]).all():
                found.append(("inputs", f"changes input {name}"))
            if not one.intact:
                found.append(("bounds", f"writes outside of input {name}"))
        return found


def _form(one: Array, given: Any, sizes: Sizes, device: str) -> Complaint | None:
    """What is wrong with the kind of an output."""
    if type(given) is not torch.Tensor:
        kind = f"{type(given).__module__}.{type(given).__name__}"
        if isinstance(given, torch.Tensor) or hasattr(given, "__torch_function__"):
            return "lazy", f"output {one.name} is a {kind}, which may compute when it is read"
        return "form", f"output {one.name} is a {kind}, expected a tensor"
    if given.is_neg() or given.is_conj() or given.layout is not torch.strided:
        return "lazy", f"output {one.name} is a view that computes when it is read"
    shape, kind = tuple(given.shape), KINDS.get(given.dtype)
    if kind != one.dtype or shape != shape_of(one, sizes) or given.device.type != device:
        return "form", (
            f"output {one.name} is {kind or given.dtype} {list(shape)} on {given.device.type}, "
            f"expected {one.dtype} {list(shape_of(one, sizes))} on {device}"
        )
    return None


def _span(tensor: Any) -> tuple[int, int]:
    """The addresses that a tensor reaches over."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * step for extent, step in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _said(error: Exception) -> str:
    if isinstance(error, WarploomError):
        return one_line(error)

    def again() -> None:
        raise error

    try:
        called("it", again)
    except InputError as told:
        return str(told).removeprefix("it does not run: ")
    return one_line(error)
