"""The kernels by name: configuration, program, default schedule and the check of one run.

A name is a kernel of the library (`gemm`, `attention`) or FILE.py:OBJECT, a user's own program
(`kernels.user`); both become an `Entry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from warploom.codegen.build import Built, build
from warploom.codegen.on_gpu import run_on_gpu
from warploom.codegen.plan import KernelSchedule
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.kernels import attention, attention_reference, gemm, gemm_reference
from warploom.kernels.attention_choices import choose_attention
from warploom.kernels.gemm_choices import choose_gemm
from warploom.kernels.user import (
    UserKernel,
    load_kernel,
    random_arrays,
    settings_kinds,
    written_names,
)
from warploom.objects import names_object
from warploom.tile import Program, dtype, interpret
from warploom.tile.interpret import bind

Values = dict[str, NDArray[Any]]
Sizes = Mapping[str, int]
FILLING = 4096  # of a dimension of a user's program: fills a GPU
Run = Callable[[Program, Values, Mapping[str, float]], Values]


class Variant(Protocol):
    """An entry of a tuned table: the tile and the schedule that a configuration gets."""

    @property
    def name(self) -> str: ...

    @property
    def allow(self) -> tuple[str, ...]: ...

    def config(self, base: Any) -> Any: ...

    def schedule(self, config: Any) -> KernelSchedule: ...


def _no_variant(config: Any, sizes: Sizes, given: frozenset[str]) -> None:
    """A kernel without a tuned table."""


@dataclass(frozen=True)
class Entry:
    """A kernel that can be built and run.

    `settings` are the names of the configuration's fields with the kind of each; `sizes` the array
    dimensions `run` uses unless told otherwise, `full` those of them that fill a GPU, `alike` says
    which size another one is when only that is given; `outputs` the right results in float64,
    `judge` what gave them; `bound` the relative error a run may have against them.
    `variant(config, sizes, given)` is the tuned table's choice, None where a field that it would
    set was `given`; `schedule` is what a configuration gets then.
    """

    config: Callable[..., Any]
    settings: Mapping[str, str]
    program: Callable[[Any], Program]
    schedule: Callable[[Any], KernelSchedule | SimtSchedule]
    outputs: Callable[[Any, Values], Mapping[str, NDArray[np.float64]]]
    sizes: Mapping[str, int]
    bound: float
    judge: str = "float64"
    full: Sizes = field(default_factory=dict[str, int])
    alike: Mapping[str, str] = field(default_factory=dict[str, str])
    variant: Callable[[Any, Sizes, frozenset[str]], Variant | None] = _no_variant
    follow: Callable[[Any, dict[str, int]], None] = lambda config, sizes: None
    arrays: Callable[[Program, Mapping[str, int], int], Values] = random_arrays
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])


def _kinds(config: type) -> dict[str, str]:
    return {one.name: str(one.type) for one in fields(config)}


def _gemm_outputs(config: gemm.GemmConfig, values: Values) -> dict[str, NDArray[np.float64]]:
    return {"c": gemm_reference.reference(config, values)}


def _attention_outputs(
    config: attention.AttentionConfig, values: Values
) -> dict[str, NDArray[np.float64]]:
    out, lse = attention_reference.reference(config, values)
    return {"o": out, "lse": lse} if config.lse else {"o": out}


def _attention_sizes(config: attention.AttentionConfig, sizes: dict[str, int]) -> None:
    """Head counts and the head dimension follow from the configuration."""
    sizes["d"] = config.head_dim
    sizes["kv_heads"] = max(1, sizes["heads"] // config.group)
    sizes["heads"] = sizes["kv_heads"] * config.group


# Fields that a variant sets: who gives one gets the textbook schedule of what was given.
GEMM_TILE = frozenset(("tile", "slices", "together", "across", "ahead"))
ATTENTION_TILE = frozenset(("tile", "apart", "shared", "guess"))


def _gemm_variant(config: gemm.GemmConfig, sizes: Sizes, given: frozenset[str]) -> Variant | None:
    if given & GEMM_TILE:
        return None
    batch = sizes["batch"] if config.batched else 1
    return choose_gemm(sizes["m"], sizes["n"], sizes["k"], config, batch)


def _attention_variant(
    config: attention.AttentionConfig, sizes: Sizes, given: frozenset[str]
) -> Variant | None:
    if given & ATTENTION_TILE:
        return None
    heads = sizes["batch"] * sizes["heads"]
    return choose_attention(sizes["rows"], config, sizes["keys"], heads)


KERNELS: dict[str, Entry] = {
    "gemm": Entry(
        gemm.GemmConfig,
        _kinds(gemm.GemmConfig),
        gemm.gemm,
        gemm.default_schedule,
        _gemm_outputs,
        {"m": 200, "n": 264, "k": 136, "batch": 2},
        4e-3,
        full={"m": 4096, "n": 4096, "k": 4096, "batch": 4},
        variant=_gemm_variant,
    ),
    "attention": Entry(
        attention.AttentionConfig,
        _kinds(attention.AttentionConfig),
        attention.attention,
        attention.default_schedule,
        _attention_outputs,
        {"batch": 1, "heads": 2, "kv_heads": 2, "rows": 200, "keys": 200},
        8e-3,
        full={"batch": 2, "heads": 16, "kv_heads": 16, "rows": 4096, "keys": 4096},
        alike={"keys": "rows"},
        variant=_attention_variant,
        follow=_attention_sizes,
    ),
}


def entry(name: str) -> Entry:
    """The kernel of that name; raises `InputError` listing those there are."""
    if names_object(name):
        return _user_entry(load_kernel(name))
    if name not in KERNELS:
        raise InputError(
            f"kernel {name!r}: expected one of {', '.join(sorted(KERNELS))}, or FILE.py:OBJECT"
        )
    return KERNELS[name]


def _user_entry(kernel: UserKernel) -> Entry:
    return Entry(
        dict,
        settings_kinds(kernel),
        kernel.trace,
        lambda config: kernel.schedule_of(kernel.trace(config)),
        kernel.outputs,
        kernel.default_sizes(),
        kernel.bound,
        "the reference given" if kernel.reference else "the program's own meaning in float64",
        full={dim: kernel.sizes.get(dim, FILLING) for dim in kernel.default_sizes()},
        arrays=kernel.arrays,
        scalars=kernel.scalars,
    )


def configure(name: str, settings: Mapping[str, str]) -> tuple[Any, dict[str, int]]:
    """(configuration, sizes) from `key=value` texts: configuration fields and array dimensions."""
    kernel = entry(name)
    chosen: dict[str, Any] = {}
    sizes = dict(kernel.sizes)
    alike = {size: of for size, of in kernel.alike.items() if size not in settings}
    settings = {**{size: settings[of] for size, of in alike.items() if of in settings}, **settings}
    for key, text in settings.items():
        if key in kernel.settings:
            chosen[key] = _parse(name, key, text, kernel.settings[key])
        elif key in sizes:
            sizes[key] = _parse(name, key, text, "int")
            if sizes[key] < 0:
                raise InputError(f"{name}: {key}={text}, expected a size of at least 0")
        else:
            known = ", ".join([*kernel.settings, *sizes]) or "it has none"
            raise InputError(f"{name} has no setting {key!r}: expected one of {known}")
    config = kernel.config(**chosen)
    kernel.follow(config, sizes)
    return config, sizes


def _parse(name: str, key: str, text: str, kind: str) -> Any:
    try:
        if kind == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if kind == "DType":
            return dtype(text)
        if kind.startswith("tuple"):
            values = tuple(int(part) for part in text.split(","))
            if len(values) != kind.count("int"):
                raise ValueError
            return values
        if kind.startswith("int"):
            return None if text == "none" else int(text)
        return float(text) if kind.startswith("float") else text
    except (ValueError, KeyError):
        raise InputError(f"{name}: {key}={text!r}, expected {_words(kind)}") from None


def _words(kind: str) -> str:
    """What a kind of setting looks like on the command line."""
    if kind.startswith("tuple"):
        return f"{kind.count('int')} whole numbers, as 128,256"
    words = {"bool": "true or false", "int": "a whole number", "float": "a number"}
    return next((words[k] for k in words if kind.startswith(k)), kind)


def check_on_cpu(
    name: str, config: Any, sizes: Mapping[str, int], seed: int = 0
) -> dict[str, float]:
    """Run a kernel on the interpreter; the relative error of each output against float64."""
    return _errors(name, config, sizes, seed, interpret)


def check_on_gpu(
    name: str, config: Any, sizes: Mapping[str, int], seed: int = 0, arch: str = "sm_90a"
) -> dict[str, float]:
    """Compile a kernel with its default schedule and launch it; errors as on the CPU.

    Raises `InputError` for what the launch refuses, `DeviceError` without a GPU.
    """
    kernel = entry(name)
    built = build(kernel.program(config), kernel.schedule(config), arch)
    return check_built(name, config, sizes, built, seed)


def check_built(
    name: str, config: Any, sizes: Mapping[str, int], built: Built, seed: int = 0
) -> dict[str, float]:
    """Launch a kernel that was built before; errors and what is raised as `check_on_gpu`."""

    def launch(program: Program, arrays: Values, scalars: Mapping[str, float]) -> Values:
        return run_on_gpu(program, built, arrays, scalars)

    return _errors(name, config, sizes, seed, launch)


def _errors(
    name: str,
    config: Any,
    sizes: Mapping[str, int],
    seed: int,
    run: Run,
) -> dict[str, float]:
    # An output with elements that were not written counts as infinitely wrong.
    kernel = entry(name)
    program = kernel.program(config)
    if not written_names(program):
        raise InputError(f"{name}: the program stores nothing, so there is nothing to check")
    if missing := [dim for dim in program.dims if dim not in sizes]:
        raise InputError(
            f"{name}: a run does not know how long {missing[0]!r} is in this configuration; use it "
            "from Python with arrays of your own"
        )
    try:
        return _compared(kernel, config, program, kernel.arrays(program, sizes, seed), run)
    except MemoryError:
        text = ", ".join(f"{dim}={sizes[dim]:,}" for dim in program.dims)
        raise InputError(f"{name}: arrays of {text} do not fit this computer's memory") from None


def _compared(
    kernel: Entry, config: Any, program: Program, arrays: Values, run: Run
) -> dict[str, float]:
    got = run(program, arrays, kernel.scalars)
    errors: dict[str, float] = {}
    for output, want in kernel.outputs(config, bind(program, arrays)).items():
        finite = np.isfinite(want)
        same = np.array_equal(finite, np.isfinite(got[output]))
        gap = np.linalg.norm(np.where(finite, got[output] - np.where(finite, want, 0), 0))
        norm = np.linalg.norm(np.where(finite, want, 0)) or 1.0
        errors[output] = float(gap / norm) if same else float("inf")
    return errors
