"""The kernels by name: configuration, program, default schedule, arrays and results of a run.

A name is a kernel of the library (`gemm`, `attention`) or FILE.py:OBJECT, a user's own program
(`kernels.user`); both become an `Entry`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.autosched.schedules import Policy
from warploom.errors import InputError
from warploom.kernels import own
from warploom.kernels.attention import program as attention
from warploom.kernels.attention import reference as attention_reference
from warploom.kernels.attention.variants import ATTENTION, choose_attention
from warploom.kernels.gemm import program as gemm
from warploom.kernels.gemm import reference as gemm_reference
from warploom.kernels.gemm.variant import GEMM, choose_gemm
from warploom.kernels.recurrent import program as recurrent
from warploom.kernels.recurrent import reference as recurrent_reference
from warploom.kernels.settings import parse
from warploom.kernels.tuned.table import Table
from warploom.kernels.tuned.variant import Template, Variant
from warploom.kernels.user import (
    UserKernel,
    load_kernel,
    random_arrays,
    scaled_arrays,
    settings_kinds,
)
from warploom.objects import defined, names_object
from warploom.tile import BF16, Program, dtype
from warploom.tile.typing import QUAD_PLACES

Values = dict[str, NDArray[Any]]
Sizes = Mapping[str, int]


RECURRENT_SCALE = 0.125  # of a run, where no caller gives one


def _no_variant(config: Any, sizes: Sizes, given: frozenset[str]) -> None:
    """A kernel without a tuned table."""


@dataclass(frozen=True)
class Entry:
    """A kernel that can be built and run.

    settings   the names of the configuration's fields, with the kind of each
    sizes      the array dimensions that `run` uses by default; `full`: sizes that fill a GPU;
               `alike`: the size whose value another one takes when that alone is given
    outputs    the right results in float64; `judge` names what computes them
    bound      the relative error that a run may have; None: what rounding explains
               (`kernels.check`)
    template   what the points of its space choose from
    table      the tuned table, and under which sizes it knows a shape; `variant(config, sizes,
               given)` is its choice, or None when a field that it would set was `given`: then
               `policy` says what a configuration gets
    flops      operations of the matmuls asked for, without padding; 0 where none are known
    """

    config: Callable[..., Any]
    settings: Mapping[str, str]
    program: Callable[[Any], Program]
    policy: Callable[[Any], Policy]
    outputs: Callable[[Any, Values], Mapping[str, NDArray[np.float64]]]
    sizes: Mapping[str, int]
    bound: float | None = None
    judge: str = "float64"
    full: Sizes = field(default_factory=dict[str, int])
    alike: Mapping[str, str] = field(default_factory=dict[str, str])
    template: Template | None = None
    table: Table | None = None
    asked: Callable[[Any, Sizes], Sizes] = lambda config, sizes: sizes
    variant: Callable[[Any, Sizes, frozenset[str]], Variant | None] = _no_variant
    follow: Callable[[Any, dict[str, int], Set[str]], None] = lambda config, sizes, given: None
    arrays: Callable[[Program, Mapping[str, int], int], Values] = random_arrays
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    flops: Callable[[Any, Sizes], float] = lambda config, sizes: 0.0


def _kinds(config: type) -> dict[str, str]:
    """The kind of each field, without the module that a type is named by."""
    return {one.name: re.sub(r"\w+\.", "", str(one.type)) for one in fields(config)}


def _gemm_config(**settings: Any) -> gemm.GemmConfig:
    """Of 8-bit elements b is "nk" unless told otherwise: Hopper's tensor core takes no other."""
    narrow = dtype(settings.get("dtype", BF16)).bits == 8
    chosen: dict[str, Any] = {"b": "nk", **settings} if narrow else settings
    return gemm.GemmConfig(**chosen)


def _gemm_outputs(config: gemm.GemmConfig, values: Values) -> dict[str, NDArray[np.float64]]:
    return {"c": gemm_reference.reference(config, values)}


def _attention_outputs(
    config: attention.AttentionConfig, values: Values
) -> dict[str, NDArray[np.float64]]:
    out, lse = attention_reference.reference(config, values)
    return {"o": out, "lse": lse} if config.lse else {"o": out}


def _attention_sizes(
    config: attention.AttentionConfig, sizes: dict[str, int], given: Set[str]
) -> None:
    """What was not given of d, heads and kv_heads follows from the rest."""
    sizes["d"] = config.head_dim
    if config.value_dim:
        sizes["e"] = config.value_dim
    if "heads" not in given:
        pairs = sizes["kv_heads"] if "kv_heads" in given else sizes["heads"] // config.group
        sizes["heads"] = max(1, pairs) * config.group
    if "kv_heads" not in given:
        sizes["kv_heads"] = sizes["heads"] // config.group
    if config.ordered:
        sizes["places"] = -(-sizes["keys"] // QUAD_PLACES) * QUAD_PLACES
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads < 1 or heads != kv_heads * config.group:
        raise InputError(
            f"attention: heads={heads} kv_heads={kv_heads} group={config.group}: expected at least "
            "one head, and heads = kv_heads * group"
        )


def _recurrent_sizes(
    config: recurrent.RecurrentConfig, sizes: dict[str, int], given: Set[str]
) -> None:
    """d and e are the configuration's; neighbouring heads share what groups there are."""
    sizes["d"], sizes["e"] = config.key_dim, config.value_dim
    heads, groups = sizes["heads"], sizes["groups"]
    if groups < 1 or heads % groups or (config.shared and groups != 1):
        raise InputError(
            f"recurrent: heads={heads} groups={groups} shared={config.shared}: expected heads to "
            "be a multiple of groups, and one group that is shared"
        )


def _recurrent_arrays(program: Program, sizes: Sizes, seed: int) -> Values:
    """Keys of about one in length, and gates of a layer's usual size: nothing grows."""
    values = random_arrays(program, sizes, seed)
    values["k"] = values["k"] / sizes["d"] ** 0.5
    for name in {"g", "a"} & set(values):
        values[name] = -np.abs(values[name]) / 8
    if "dt" in values and "bias" not in values:
        values["dt"] = np.abs(values["dt"])
    return values


NO_CLUSTER = "gone: it cost more than it saved (docs/attention.md)"
# Names that fields of the configurations had once, and what became of them.
FORMER: Mapping[str, Mapping[str, str]] = {
    "gemm": {
        "across": "called 'swap_ab'",
        "together": "called 'in_cluster'",
        "ahead": "called 'products_in_flight'",
    },
    "attention": {
        "apart": "called 'split_mask_loop'",
        "slack": "called 'rescale_threshold'",
        "guess": "called 'optimistic_threshold'",
        **dict.fromkeys(("shared", "cluster_m"), NO_CLUSTER),
    },
}
# Fields that a variant sets: who gives one gets the textbook schedule of what was given.
GEMM_TILE = frozenset(("tile", "slices", "in_cluster", "swap_ab", "products_in_flight"))
ATTENTION_TILE = frozenset(("tile", "split_mask_loop", "optimistic_threshold"))


def _gemm_asked(config: gemm.GemmConfig, sizes: Sizes) -> dict[str, int]:
    return {**{x: sizes[x] for x in "mnk"}, "batch": sizes["batch"] if config.batched else 1}


def _gemm_variant(config: gemm.GemmConfig, sizes: Sizes, given: frozenset[str]) -> Variant | None:
    return None if given & GEMM_TILE else choose_gemm(base=config, **_gemm_asked(config, sizes))


def _gemm_flops(config: gemm.GemmConfig, sizes: Sizes) -> float:
    return 2.0 * prod(_gemm_asked(config, sizes).values())


def _attention_flops(config: attention.AttentionConfig, sizes: Sizes) -> float:
    """Of half of the scores under a causal mask; a window's are not counted."""
    asked = prod(sizes[dim] for dim in ("batch", "heads", "rows", "keys", "d"))
    return 0.0 if config.window is not None else (2.0 if config.causal else 4.0) * asked


def _attention_asked(config: attention.AttentionConfig, sizes: Sizes) -> dict[str, int]:
    heads = sizes["batch"] * sizes["heads"]
    return {"heads": heads, "rows": sizes["rows"], "keys": sizes["keys"]}


def _attention_variant(
    config: attention.AttentionConfig, sizes: Sizes, given: frozenset[str]
) -> Variant | None:
    if given & ATTENTION_TILE:
        return None
    return choose_attention(base=config, **_attention_asked(config, sizes))


KERNELS: dict[str, Entry] = {
    "gemm": Entry(
        _gemm_config,
        _kinds(gemm.GemmConfig),
        gemm.gemm,
        gemm.default_policy,
        _gemm_outputs,
        {"m": 200, "n": 264, "k": 144, "batch": 2, "one": 1},
        full={"m": 4096, "n": 4096, "k": 4096, "batch": 4},
        template=GEMM.template,
        table=GEMM,
        asked=_gemm_asked,
        variant=_gemm_variant,
        arrays=scaled_arrays,
        flops=_gemm_flops,
    ),
    "attention": Entry(
        attention.AttentionConfig,
        _kinds(attention.AttentionConfig),
        attention.attention,
        attention.default_policy,
        _attention_outputs,
        {"batch": 1, "heads": 2, "kv_heads": 2, "rows": 200, "keys": 208, "one": 1},
        full={"batch": 2, "heads": 16, "kv_heads": 16, "rows": 4096, "keys": 4096},
        alike={"keys": "rows"},
        template=ATTENTION.template,
        table=ATTENTION,
        asked=_attention_asked,
        variant=_attention_variant,
        follow=_attention_sizes,
        arrays=scaled_arrays,
        flops=_attention_flops,
    ),
    "recurrent": Entry(
        recurrent.RecurrentConfig,
        _kinds(recurrent.RecurrentConfig),
        recurrent.recurrent,
        recurrent.default_policy,
        lambda config, values: recurrent_reference.reference(config, values, RECURRENT_SCALE),
        {"batch": 1, "rows": 200, "groups": 1, "heads": 2},
        full={"batch": 16, "rows": 4096, "groups": 1, "heads": 16},
        follow=_recurrent_sizes,
        arrays=_recurrent_arrays,
        scalars={"scale": RECURRENT_SCALE},
    ),
}


def entry(name: str) -> Entry:
    """The kernel of that name; raises `InputError` listing those there are."""
    if names_object(name):
        return user_entry(load_kernel(name))
    if name not in KERNELS:
        raise InputError(
            f"kernel {name!r}: expected one of {', '.join(sorted(KERNELS))}, or FILE.py:OBJECT"
            f"{_meant(name)}"
        )
    return KERNELS[name]


def _meant(name: str) -> str:
    """What a name that is none may have been for: a kernel, or functions of a file."""
    path = Path(name if name.endswith(".py") else f"{name}.py")
    if path.is_file():
        return defined(path)
    near = get_close_matches(name, KERNELS, n=1)
    return f"; nearest: {near[0]}" if near else ""


def user_entry(kernel: UserKernel) -> Entry:
    """What the library has of its own kernels, of a user's."""
    template = own.template(kernel)
    table = own.table(kernel, template)
    return Entry(
        dict,
        settings_kinds(kernel),
        kernel.trace,
        lambda config: kernel.policy,
        kernel.outputs,
        kernel.default_sizes(),
        kernel.bound,
        "the reference given" if kernel.reference else "the program's own meaning in float64",
        full=kernel.full_sizes(),
        follow=lambda config, sizes, given: kernel.refuse_others(sizes),
        arrays=kernel.arrays,
        scalars=kernel.scalars,
        template=template,
        table=table,
        variant=partial(own.variant, kernel, table),
    )


def configure(
    name: str, settings: Mapping[str, str], usual: Sizes | None = None
) -> tuple[Any, dict[str, int]]:
    """(configuration, sizes) from `key=value` texts: configuration fields and array dimensions.

    Sizes that are not given are those of `usual`, then those of `Entry.sizes`.
    """
    kernel = entry(name)
    chosen: dict[str, Any] = {}
    sizes = {**kernel.sizes, **(usual or {})}
    alike = {size: of for size, of in kernel.alike.items() if size not in settings}
    settings = {**{size: settings[of] for size, of in alike.items() if of in settings}, **settings}
    for key, text in settings.items():
        if key in kernel.settings:
            chosen[key] = parse(name, key, text, kernel.settings[key])
        elif key in sizes:
            sizes[key] = parse(name, key, text, "int")
            if sizes[key] < 0:
                raise InputError(f"{name}: {key}={text}, expected a size of at least 0")
        else:
            known = "expected one of " + (", ".join([*kernel.settings, *sizes]) or "none")
            now = FORMER.get(name, {}).get(key)
            raise InputError(f"{name} has no setting {key!r}: {f'it is {now}' if now else known}")
    config = kernel.config(**chosen)
    kernel.follow(config, sizes, settings.keys())
    return config, sizes
