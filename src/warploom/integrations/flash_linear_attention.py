"""Our kernels as a back end of flash-linear-attention, which stays as it is.

    from warploom.integrations import flash_linear_attention
    flash_linear_attention.register()  # fla's layers take our kernels from here on

fla offers some of its functions to back ends (`fla.backends`); those that our kernels compute whole
are `chunk_gated_delta_rule` and `fused_chunk_simple_gla`. A call that they do not take (packed
sequences, gates or norms made in the kernel, other types, another GPU) goes to the next back end,
and fla logs why. FLA_WARPLOOM=0 turns ours off. `register` needs fla 0.6, this module torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from inspect import signature
from itertools import zip_longest
from typing import Any

from warploom.errors import InputError, ToolMissing
from warploom.integrations import torch_recurrent as ours
from warploom.integrations.torch_program import torch_module
from warploom.kernels.recurrent.task import CHUNK

torch: Any = torch_module()
HOPPER = 9  # the compute capability that our kernels are for
ASKED = (
    1  # fla asks back ends in this order; its other ones have 3 and 5, Triton's kernels are last
)
SAME = {"chunk_size": 64}  # options of calls, by the value with which ours computes the same
Verdict = tuple[bool, str | None]


def register() -> None:
    """Offer our kernels to fla; raises `ToolMissing` where there is none with back ends."""
    try:
        backends: Any = importlib.import_module("fla.backends")
        importlib.import_module("fla.ops.gated_delta_rule")
        simple: Any = importlib.import_module("fla.ops.simple_gla")
    except ImportError as error:
        raise ToolMissing(f"fla 0.6 is needed for its back ends ({error})") from None

    class WarploomBackend(backends.BaseBackend):
        backend_type = "warploom"
        package_name = "warploom"
        env_var = "FLA_WARPLOOM"
        priority = ASKED

        @classmethod
        def is_available(cls) -> bool:
            return on_hopper()

    class WarploomDeltaBackend(WarploomBackend):
        """fla finds what a function is replaced by, and what judges a call, by their names."""

        chunk_gated_delta_rule = staticmethod(gated_delta_rule)
        chunk_gated_delta_rule_verifier = staticmethod(takes_gated_delta_rule)

    backends.register("gated_delta_rule")(WarploomDeltaBackend)
    offered = backends.register(
        simple.fused_chunk_simple_gla, backend=WarploomBackend, verifier=takes_simple_gla
    )
    offered(simple_gla)


def on_hopper() -> bool:
    """Whether there is a GPU that our kernels are for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


def gated_delta_rule(*args: Any, **options: Any) -> tuple[Any, Any]:
    """fla's `chunk_gated_delta_rule`, of a call that `takes_gated_delta_rule`."""
    return ours.gated_delta_rule(**_told(ours.gated_delta_rule, args, options)[0])


def takes_gated_delta_rule(*args: Any, **options: Any) -> Verdict:
    """(whether, why not) our kernels compute a call of `chunk_gated_delta_rule`."""
    given, others = _told(ours.gated_delta_rule, args, options)
    tensors = [given[name] for name in ("q", "k", "v", "g", "beta")]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if wanted and given["q"].shape[-1] > CHUNK:
        return False, f"warploom has gradients of delta rules with keys of up to {CHUNK}"
    return _verdict(given | {"beta": given["beta"].to(given["g"].dtype)}, others)


def simple_gla(*args: Any, **options: Any) -> tuple[Any, Any]:
    """fla's `fused_chunk_simple_gla`, of a call that `takes_simple_gla`."""
    return ours.simple_gla(**_told(ours.simple_gla, args, options)[0])


def takes_simple_gla(*args: Any, **options: Any) -> Verdict:
    """(whether, why not) our kernels compute a call of `fused_chunk_simple_gla`."""
    given, others = _told(ours.simple_gla, args, options)
    gates = [given[name] for name in ("g", "g_gamma") if given.get(name) is not None]
    if len(gates) > 1:
        return False, "warploom takes g or g_gamma, not both"
    return _verdict(given | {"g": gates[0] if gates else None}, others)


def _told(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call that our function of that name has, which come in the same order, and
    the others."""
    names = [*signature(function).parameters]
    placed = dict(zip_longest(names[: len(args)], args, fillvalue="further arguments"))
    given = placed | options
    return (
        {name: x for name, x in given.items() if name in names},
        {name: x for name, x in given.items() if name not in names},
    )


def _verdict(given: dict[str, Any], others: dict[str, Any]) -> Verdict:
    unknown = [name for name, x in others.items() if not _says_nothing(name, x)]
    if unknown:
        return False, f"warploom has no {', '.join(unknown)}"
    scale, final = given.get("scale"), given.get("output_final_state", False)
    if scale is not None and not scale > 0:
        return False, f"scale is {scale}, expected a number above 0"
    tensors = {name: given.get(name) for name in ("q", "k", "v", "g", "beta")}
    tensors["initial"] = given.get("initial_state")
    try:
        ours.config_of({name: one for name, one in tensors.items() if one is not None}, final)
    except InputError as error:
        return False, str(error)
    return True, None


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an option of fla's asks for what our kernels do anyway."""
    return value is None or value is False or SAME.get(name) == value
