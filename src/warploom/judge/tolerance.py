"""How far rounding alone may take a candidate from a reference in torch: the rule of the judge.

The reference runs in float64 on the inputs, whose values are exact there. Then it runs again and
again with every result rounded up or down at random to the type that intermediate results may have
(stochastic rounding; Parker, Pierce and Eggert, "Monte Carlo arithmetic", 2000). What comes out
varies as the results of correct kernels do. The rest is the rule of `warploom run`
(`tile.rounding`, `kernels.check`): an element may be off by eight of its standard deviations, an
output in norm by three.

* A sum of n terms also moves by `unit * sqrt(n)` of its terms, for every order of adding them.
* A function that GPUs approximate moves by the error of the GPU's own instruction.
* A result beyond the largest number of the type is infinite: such elements are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from warploom.errors import InputError
from warploom.integrations.torch_program import torch_module
from warploom.tile.dtypes import FP32, DType
from warploom.tile.ir import Array
from warploom.tile.rounding import APPROXIMATED, HALF_ULP, SAMPLES, SUM_UNITS, Spread

torch: Any = torch_module()
DispatchMode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
SUMS = frozenset(
    "sum mean cumsum prod cumprod var var_mean std std_mean logsumexp norm linalg_vector_norm "
    "_softmax _log_softmax native_layer_norm native_group_norm _fused_rms_norm convolution "
    "scatter_add index_add scatter_reduce avg_pool1d avg_pool2d _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu nll_loss_forward mse_loss".split()
)
# Functions of torch that are made of approximated ones.
MADE_OF = {
    "_softmax": "exp", "_log_softmax": "log", "logsumexp": "log", "sigmoid": "exp", "silu": "exp",
    "gelu": "erf", "softplus": "log", "log1p": "log", "expm1": "exp", "pow": "exp", "mish": "tanh",
    "elu": "exp", "native_layer_norm": "rsqrt", "native_group_norm": "rsqrt",
    "_fused_rms_norm": "rsqrt",
}  # fmt: skip


def spreads_of(
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[Array],
    within: DType = FP32,
    seed: int = 0,
) -> dict[str, Spread]:
    """The spread of every output of `reference` on `inputs`, tensors in their own types.

    within   the type in which intermediate results may be kept

    Raises `InputError` where the reference gives something else than the outputs.
    """
    floats = [one.element_size() * 8 for one in inputs if one.is_floating_point()]
    unit = max(HALF_ULP, SUM_UNITS.get(min(floats, default=32), 0.0))
    exact = _run(reference, inputs, outputs, _Exact())
    squares = {name: np.zeros(value.shape) for name, value in exact.items()}
    with np.errstate(all="ignore"):
        for sample in range(SAMPLES):
            noise = _Noise(within, unit, seed * SAMPLES + sample)
            moved = _run(reference, inputs, outputs, noise)
            for one in outputs:
                value = noise.rounded(one.dtype, torch.from_numpy(moved[one.name]))
                squares[one.name] += (value.numpy() - exact[one.name]) ** 2
    found: dict[str, Spread] = {}
    for one in outputs:
        total, want = squares[one.name], exact[one.name]
        known = np.isfinite(total) & np.isfinite(want)
        deviation = np.where(known, np.sqrt(np.where(known, total, 0.0) / SAMPLES), 0.0)
        found[one.name] = Spread(one.dtype, want, deviation, known)
    return found


def results(given: Any, outputs: Sequence[Array]) -> dict[str, Any]:
    """What a function returned, a tensor or a tuple of them, by the outputs' names."""
    values = parts(given)
    if len(values) != len(outputs):
        raise InputError(
            f"{len(values)} results, expected {len(outputs)}: "
            f"{', '.join(one.name for one in outputs)}"
        )
    return {one.name: value for one, value in zip(outputs, values, strict=True)}


def parts(given: Any) -> tuple[Any, ...]:
    """A tuple or list of results, or one result, as a tuple."""
    return tuple(cast("list[Any]", given)) if isinstance(given, (tuple, list)) else (given,)


def _run(
    reference: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Array], mode: Any
) -> dict[str, NDArray[np.float64]]:
    wide = [one.double() if one.is_floating_point() else one.clone() for one in inputs]
    with torch.no_grad(), mode:
        given = reference(*wide)
    found: dict[str, NDArray[np.float64]] = {}
    for name, value in results(given, outputs).items():
        if not isinstance(value, torch.Tensor):
            raise InputError(f"the reference gives {name} as {type(value).__name__}, not a tensor")
        found[name] = value.to(torch.float64).contiguous().numpy().copy()
    return found


class EagerMode(DispatchMode):
    """A mode under which nothing is compiled: `torch._dynamo` takes seconds to import."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Exact(EagerMode):
    """Keeps float64 where the reference converts to fp32 or wider; narrower types do round."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options: dict[str, Any] = dict(kwargs or {})
        kind: Any = options.get("dtype")
        if kind is not None and kind.is_floating_point:
            options["dtype"] = torch.float64
            if func.overloadpacket is torch.ops.aten._to_copy and kind.itemsize < FP32.bytes:
                args = (args[0].to(kind), *args[1:])
        return self.computed(func, args, options)

    def computed(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What the operation gives."""
        return func(*args, **options)


class _Noise(_Exact):
    """Rounds every result at random."""

    def __init__(self, within: DType, unit: float, seed: int) -> None:
        DispatchMode.__init__(self)
        self._within, self._unit = within, unit
        self._random = torch.Generator().manual_seed(seed)

    def computed(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What the operation may give where it rounds."""
        name = func.overloadpacket.__name__.rstrip("_") if func else ""
        place, unit = self._moves(name, args)
        if unit and isinstance(args[place], torch.Tensor) and args[place].is_floating_point():
            args = (*args[:place], self._moved(args[place], unit), *args[place + 1 :])
        given = func(*args, **options)
        for one in parts(given):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64 and one.numel():
                self._disturb(name, one)
        return given

    def rounded(self, kind: DType, value: Any) -> Any:
        """Values rounded up or down at random to a type; those that it has stay."""
        if not kind.is_float:
            return value
        _, exponent = torch.frexp(value)
        least = torch.where(value == 0, kind.least, torch.clamp(exponent - 1, min=kind.least))
        step = torch.ldexp(torch.ones_like(value), least - kind.mantissa)
        down = torch.floor(value / step) * step
        share = (value - down) / step
        made = down + step * (self._uniform(value) < share)
        if not kind.saturate:
            made = torch.where(made.abs() > kind.largest, made.sign() * math.inf, made)
        else:
            made = made.clamp(-kind.largest, kind.largest)
        return torch.where(torch.isfinite(value), made, value)

    def _moves(self, name: str, args: Sequence[Any]) -> tuple[int, float]:
        """The operand that stands for the errors within an operation, and how far it moves."""
        if name in PRODUCTS:
            return PRODUCTS[name], self._unit * math.sqrt(args[PRODUCTS[name]].shape[-1])
        if name in SUMS:
            return 0, HALF_ULP * math.sqrt(max(args[0].shape, default=1))
        return 0, 2 * HALF_ULP if MADE_OF.get(name, name) == "exp" else 0.0

    def _disturb(self, name: str, one: Any) -> None:
        relative, absolute = APPROXIMATED.get(MADE_OF.get(name, name), (0.0, 0.0))
        value = one.detach()
        if relative:
            size = relative * value.abs() + absolute
            value = torch.where(torch.isfinite(size), value + size * self._signs(value), value)
        moved = self.rounded(self._within, value)
        if not torch.equal(moved.nan_to_num(), one.nan_to_num()):
            one.copy_(moved)

    def _moved(self, value: Any, relative: float) -> Any:
        return value * (1.0 + relative * self._signs(value))

    def _signs(self, value: Any) -> Any:
        return 2.0 * self._uniform(value) - 1.0

    def _uniform(self, value: Any) -> Any:
        return torch.rand(value.shape, generator=self._random, dtype=torch.float64)
