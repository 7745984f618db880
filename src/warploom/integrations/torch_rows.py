"""Row operations as PyTorch operators, with gradients: norms, softmax, cross-entropy, gates.

    y = rms_norm(x, weight)                           x [..., n] bf16 or fp16, weight [n]
    y, h = rms_norm(x, weight, residual=h)            h = x + residual

Every operation of `kernels.rows` is an operator `warploom::NAME` on tensors whose last dimension is
a row. A kernel is compiled for the length of rows at its first call, kept, and launched on torch's
current stream. Gradients of weights are the same bits at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from warploom.codegen.compile.build import build
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.integrations.row_signatures import SCALARS, SIGNATURES
from warploom.kernels.rows.choose import built_rows, row_kernel, scaled_kernel, sums_kernel
from warploom.kernels.rows.program import OPS, RowConfig, row_program
from warploom.runtime.kernel import Kernel
from warploom.tile import BF16, FP32, DType

ARCH = "sm_90a"
PARTS = "_parts"
LINE = 16  # bytes that lines are multiples of at most
TASKS = 2048  # that multiply in place: as many as GPUs hold at a time
MOST_SCALED = 2**31  # elements, which are counted in words
FLOATS = ("bf16", "fp16", "fp32")
# The tensor whose rows are the operation's, for each that has no x.
MAIN = {"softmax_backward": "y", "gated": "gate", "gated_backward": "gate"}
DROPOUT = "dropout"
torch: Any = ops.torch_module()


@dataclass(frozen=True)
class Bound:
    """One call: its configuration, tensors as matrices, and the shape of all dimensions but rows'
    last."""

    config: RowConfig
    given: Mapping[str, Any]
    scalars: Mapping[str, float]
    lead: tuple[int, ...]
    like: Any


def _bind(op: str, *args: Any) -> Bound:
    """Arguments checked; raises `InputError` for what the kernel does not take."""
    known = SIGNATURES[op]
    values = dict(zip(known.names, args, strict=False))
    main = values[MAIN.get(op, "x")]
    tensors = {
        one.name: values[one.name] for one in known.inputs if values.get(one.name) is not None
    }
    ops.check_devices(op, tensors)
    columns, lead = main.shape[-1], tuple(main.shape[:-1])
    shapes = {"m n": (*lead, columns), "m": lead, "m words": lead, "n": (columns,), "seeds": (2,)}
    for one in known.inputs:
        want = shapes[" ".join(one.dims)]
        if one.name in tensors and tuple(tensors[one.name].shape) != want:
            raise InputError(
                f"{op} {one.name} has shape {list(tensors[one.name].shape)}, expected {list(want)}"
            )
    options = {known.optional[name] for name in tensors if name in known.optional}
    options |= {flag for flag in known.flags if values.get(flag)}
    scale = ops.allowed_type(tensors["w"], f"{op} w", FLOATS) if "w" in tensors else BF16
    kind = ops.allowed_type(main, f"{op} {MAIN.get(op, 'x')}", FLOATS)
    config = RowConfig(op, columns, 1, kind, scale, frozenset(options))
    scalars = {name: float(values.get(name, SCALARS[name])) for name in known.scalars}
    if DROPOUT not in options:
        scalars.pop("p", None)
    return Bound(config, tensors, scalars, lead, main)


def _results(op: str, bound: Bound, *_: Any) -> Any:
    """Fresh tensors for the operator's results; empty ones for those that do not go with it.

    The length of rows may be a symbol of torch.compile's: the program's types do not depend on it.
    """
    types = {one.name: one.dtype for one in row_program(replace(bound.config, columns=8)).arrays}
    made: list[Any] = []
    for one in SIGNATURES[op].outputs:
        shape: tuple[int, ...] = {1: bound.lead, 2: (*bound.lead, bound.config.columns)}[
            len(one.dims)
        ]
        kind = types.get(one.name, FP32)
        if one.name.endswith(PARTS):
            shape, kind = (bound.config.columns,), bound.config.weight
        shape = shape if one.name in types else (0,)
        made.append(bound.like.new_empty(shape, dtype=getattr(torch, kind.library)))
    return made[0] if len(made) == 1 else tuple(made)


_chosen = cache(row_kernel)


def _kernel(config: RowConfig, like: Any) -> tuple[Kernel, int]:
    """The kernel of a configuration for rows like these, and how many rows a task of it takes."""
    _, schedule, rows = _chosen(config)
    beyond = schedule.evict_last and _beyond_l2(like)
    make = partial(built_rows, config, ARCH, beyond)
    return ops.built_kernel(("rows", config, beyond), like, make), rows


def _beyond_l2(rows: Any) -> bool:
    return rows.is_cuda and rows.numel() * rows.element_size() > _l2_bytes(rows.device)


@cache
def _l2_bytes(device: Any) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _sums(kind: DType, like: Any) -> Kernel:
    return ops.built_kernel(("sums", kind), like, lambda: build(*sums_kernel(kind), ARCH))


def _scaled(kind: DType, like: Any) -> Kernel:
    return ops.built_kernel(("scaled", kind), like, lambda: build(*scaled_kernel(kind), ARCH))


def _fill(op: str, bound: Bound, results: Any, *_: Any) -> None:
    made = dict(
        zip([one.name for one in SIGNATURES[op].outputs], ops.several(results), strict=True)
    )
    columns = bound.config.columns
    rows = bound.like.numel() // columns if columns else 0
    if rows == 0:
        for tensor in made.values():
            tensor.zero_()
        return
    kernel, each = _kernel(bound.config, bound.like)
    stream = ops.current_stream(bound.like)
    wanted = {one.name: one for one in kernel.interface.arrays}
    arrays: dict[str, Any] = {}
    parts = kernel.resident_tasks(-(-rows // each))
    for name, spec in wanted.items():
        if name.endswith(PARTS):
            arrays[name] = bound.like.new_empty((parts, columns), dtype=torch.float32)
            continue
        tensor = bound.given[name] if name in bound.given else made[name]
        tensor = _words(tensor) if "words" in spec.dims else tensor
        shape = {"m n": (rows, columns), "m": (rows,), "m words": (rows, -1)}
        shape |= {"n": (columns,), "seeds": (2,)}
        arrays[name] = _aligned(tensor.reshape(shape[" ".join(spec.dims)]))
    kernel(arrays, bound.scalars, stream)
    for name in wanted:
        if name.endswith(PARTS):
            added = _sums(bound.config.weight, bound.like)
            added({"parts_of": arrays[name], "y": made[name]}, {}, stream)


def _words(classes: Any) -> Any:
    """Whole numbers as words of 32 bits, the lowest first: a view of those that have 32 or 64."""
    wide = classes if classes.dtype in (torch.int32, torch.int64) else classes.to(torch.int64)
    return wide.contiguous().unsqueeze(-1).view(torch.int32)


def _aligned(tensor: Any) -> Any:
    """The tensor, or a copy where it or its rows begin at no multiple of 16 bytes."""
    size, pitches = tensor.element_size(), tensor.stride()[:-1]
    fits = tensor.data_ptr() % LINE == 0 and tensor.stride(-1) == 1
    if tensor.shape[-1] * size % LINE == 0:
        fits = fits and all(step * size % LINE == 0 for step in pitches)
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _operator(op: str) -> Any:
    """The operator of an operation, with the gradient that `op_backward` gives."""
    run, fake = ops.steps(partial(_bind, op), partial(_results, op), partial(_fill, op))
    gradient = (_backward(op), _context(op)) if f"{op}_backward" in OPS else ()
    return ops.operator(f"warploom::{op}", SIGNATURES[op].schema, run, fake, *gradient)


def _context(op: str) -> Callable[..., None]:
    known = SIGNATURES[op]
    needed = {one.name for one in SIGNATURES[f"{op}_backward"].inputs}

    def context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = ops.several(output)
        values = dict(zip(known.names, inputs, strict=False))
        values |= dict(zip([one.name for one in known.outputs], results, strict=True))
        ctx.flags = {flag: bool(values.get(flag)) for flag in known.flags}
        ctx.flags["bias"] = values.get("b") is not None
        ctx.residual, ctx.p = values.get("residual") is not None, values.get("p", 0.0)
        if ctx.residual:
            values["x"] = values["summed"]
        names = [name for name in values if name in needed]
        ctx.names = names
        ctx.save_for_backward(*[values[name] for name in names])

    return context


def _backward(op: str) -> Callable[..., tuple[Any, ...]]:
    known, back = SIGNATURES[op], SIGNATURES[f"{op}_backward"]

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        values = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        for one, grad in zip(known.outputs, grads, strict=True):
            values[f"d{one.name}"] = grad
        if not ctx.residual:
            values.pop("dsummed", None)
        values |= ctx.flags | {"p": ctx.p}
        given = [values.get(name) for name in back.names]
        found = OPERATORS[f"{op}_backward"](*given)
        results = ops.several(found)
        names = [one.name.removesuffix(PARTS) for one in back.outputs]
        made = dict(zip(names, results, strict=True))
        if values.get("seed") is None:
            made["dresidual"] = made.get("dx") if ctx.residual else None
        if not ctx.flags["bias"]:
            made.pop("db", None)
        return tuple(made.get(f"d{name}") for name in known.names)

    return backward


def _turned(config: RowConfig, x: Any, *_: Any) -> Any:
    return x.new_empty(x.shape)


def _nothing(*_: Any) -> None:
    """What an operation gives that writes in place."""


def _scaled_kind(x: Any, by: Any) -> DType:
    ops.check_devices("scale_", {"x": x, "by": by})
    if by.dtype != torch.float32 or by.numel() != 1:
        raise InputError(f"scale_ by {by.dtype} {list(by.shape)}: expected one number in fp32")
    return ops.allowed_type(x, "scale_ x", FLOATS)


def _scale(kind: DType, _: None, x: Any, by: Any) -> None:
    """Launch a product in place."""
    count = x.numel()
    whole = x.is_contiguous() and x.data_ptr() % LINE == 0 and 0 < count < MOST_SCALED
    if not whole or count * x.element_size() % LINE:
        x.mul_(by.reshape(1))  # a number without dimensions would first be rounded to 16 bits
        return
    changes = (by != 1).int().expand(TASKS).contiguous()
    arrays = {"x": x.view(-1), "by": by.reshape(1), "changes": changes}
    _scaled(kind, x)(arrays, {}, ops.current_stream(x))


def _rotate(config: RowConfig, y: Any, x: Any, cos: Any, sin: Any, *_: bool) -> None:
    """Launch a rotation, from the rows x to y, or without y in their place."""
    if x.numel() == 0:
        return
    lines = _aligned(x)
    if y is None and lines is not x:
        _rotate(config, None, lines, cos, sin)
        x.copy_(lines)
        return
    if y is None:
        config, rows = replace(config, options=config.options | {"place"}), {"x": x}
    else:
        rows = {"x": lines, "y": y}
    kernel = _kernel(config, x)[0]
    pairs = (config.columns // 2, 2) if "pairs" in config.options else (config.columns,)
    arrays = {name: one.view(*one.shape[:-1], *pairs) for name, one in rows.items()}
    kernel({**arrays, "cos": _aligned(cos), "sin": _aligned(sin)}, {}, ops.current_stream(x))


def _rotary_config(x: Any, cos: Any, sin: Any, pairs: bool, inverse: bool) -> RowConfig:
    ops.check_devices("rotary", {"x": x, "cos": cos, "sin": sin})
    if x.dim() != 4 or x.shape[-1] % 2:
        raise InputError(f"rotary of {list(x.shape)}: expected [batch, rows, heads, even size]")
    want = [x.shape[1], x.shape[3] // 2]
    for name, one in (("cos", cos), ("sin", sin)):
        if list(one.shape) != want or one.dtype != cos.dtype:
            raise InputError(
                f"rotary {name} is {one.dtype} {list(one.shape)}, expected {cos.dtype} {want}"
            )
    flags = {"pairs": pairs, "inverse": inverse}
    options = frozenset(name for name, given in flags.items() if given)
    return RowConfig(
        "rotary",
        x.shape[-1],
        1,
        ops.allowed_type(x, "rotary x", FLOATS),
        ops.allowed_type(cos, "rotary cos", FLOATS),
        options,
    )


def _rotary_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, *flags = inputs
    ctx.pairs, ctx.inverse = (*flags, False, False)[:2]
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    return OPERATORS["rotary"](grad, *ctx.saved_tensors, ctx.pairs, not ctx.inverse), *[None] * 4


ROTARY_SCHEMA = "(Tensor x, Tensor cos, Tensor sin, bool pairs=False, bool inverse=False) -> Tensor"
IN_PLACE_SCHEMA = (
    "(Tensor(a!) x, Tensor cos, Tensor sin, bool pairs=False, bool inverse=False) -> ()"
)
TURNED = ops.steps(_rotary_config, _turned, _rotate)
IN_PLACE = ops.steps(_rotary_config, _nothing, _rotate, in_place=True)
OPERATORS: dict[str, Any] = {op: _operator(op) for op in SIGNATURES} | {
    "rotary": ops.operator(
        "warploom::rotary", ROTARY_SCHEMA, *TURNED, _rotary_backward, _rotary_context
    ),
    "rotary_": ops.operator("warploom::rotary_", IN_PLACE_SCHEMA, *IN_PLACE, mutates=("x",)),
    "scale_": ops.operator(
        "warploom::scale_",
        "(Tensor(a!) x, Tensor by) -> ()",
        *ops.steps(_scaled_kind, _nothing, _scale, in_place=True),
        mutates=("x",),
    ),
}


def rms_norm(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    eps: float = 1e-6,
    dropout: float = 0.0,
) -> Any:
    """x / sqrt(mean x^2 + eps) weight + bias along the last dimension; with `residual` of
    dropout(x) + residual, which is the second result."""
    made = _norm("rmsnorm", x, w=weight, b=bias, residual=residual, eps=eps, p=dropout)
    return made["y"] if residual is None else (made["y"], made["summed"])


def layer_norm(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    eps: float = 1e-5,
    dropout: float = 0.0,
) -> Any:
    """(x - mean x) / sqrt(variance + eps) weight + bias; `residual` and `dropout` as of
    `rms_norm`."""
    made = _norm("layernorm", x, w=weight, b=bias, residual=residual, eps=eps, p=dropout)
    return made["y"] if residual is None else (made["y"], made["summed"])


def _norm(op: str, x: Any, **named: Any) -> dict[str, Any]:
    """The results of a norm by their names, of arguments by the names of its signature. What
    dropout leaves out follows from two words that torch's generator of the device gives."""
    given: dict[str, Any] = {"x": x, "p": 0.0, "fp8": False, "seed": None, **named}
    dropout, residual = given["p"], given["residual"]
    if not 0 <= dropout < 1 or (dropout and residual is None):
        raise InputError(
            f"{op} dropout={dropout} {'without' if residual is None else 'with'} a residual: "
            "expected a probability below 1, and a residual that what is kept is added to"
        )
    if dropout:
        words = {"dtype": torch.int32, "device": x.device}
        given["seed"] = torch.randint(-(2**31), 2**31 - 1, (2,), **words)
    known = SIGNATURES[op]
    found = OPERATORS[op](*[given[name] for name in known.names])
    return dict(zip([one.name for one in known.outputs], found, strict=True))


def softmax(x: Any) -> Any:
    """Along the last dimension."""
    return OPERATORS["softmax"](x)


def log_softmax(x: Any) -> Any:
    """Logarithm of the softmax along the last dimension."""
    return OPERATORS["softmax"](x, True)


def cross_entropy(x: Any, target: Any, reduction: str = "mean") -> Any:
    """The loss of logits x [..., n] for classes `target`; class -100 does not count.

    `reduction` is "mean", "sum" or "none".
    """
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"cross_entropy reduction={reduction!r}: expected mean, sum or none")
    loss, _ = OPERATORS["cross_entropy"](x, target)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != -100).sum()


def logits_to_gradients(logits: Any, target: Any, dloss: Any, loss: Any) -> None:
    """Logits [m, n] become their gradients for the gradients `dloss` [m] of their losses, which go
    to `loss` [m], both fp32; class -100 does not count."""
    columns = logits.shape[1]
    kind = ops.allowed_type(logits, "logits", FLOATS)
    kernel, _ = _kernel(RowConfig("cross_entropy_both", columns, dtype=kind), logits)
    arrays = {"x": logits, "target": _words(target), "dloss": dloss, "loss": loss}
    kernel(arrays, {}, ops.current_stream(logits))


def scale_in_place(x: Any, by: Any) -> None:
    """Multiply x in place by the number `by`, an fp32 tensor on its device. Where that is 1, as the
    gradient of a loss mostly is, x is not even read, and the host need not know."""
    OPERATORS["scale_"](x, by)


def swiglu(gate: Any, up: Any) -> Any:
    """silu(gate) up."""
    return OPERATORS["gated"](gate, up)


def geglu(gate: Any, up: Any) -> Any:
    """gelu(gate) up, in the exact form."""
    return OPERATORS["gated"](gate, up, True)


def rotary(x: Any, cos: Any, sin: Any, pairs: bool = False) -> Any:
    """x [batch, rows, heads, d] turned by the angles of its row, cos and sin [rows, d / 2]: column
    j with j + d / 2, or with `pairs` 2 j with 2 j + 1. cos and sin get no gradient."""
    return OPERATORS["rotary"](x, cos, sin, pairs)


def rotary_(x: Any, cos: Any, sin: Any, pairs: bool = False) -> Any:
    """`rotary` in the place of x, which has no gradient and is the result; its rows begin at
    multiples of 16 bytes."""
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError("rotary_ of a tensor that has a gradient: use rotary")
    OPERATORS["rotary_"](x, cos, sin, pairs)
    return x


def quantised_rms_norm(
    x: Any, weight: Any, bias: Any = None, residual: Any = None, eps: float = 1e-6
) -> Any:
    """`rms_norm` as e4m3 with one scale a row, the second result: what an 8-bit product takes; with
    `residual` the sum is the third. None of them has a gradient."""
    return _quantised("rmsnorm", x, weight, bias, residual, eps)


def quantised_layer_norm(
    x: Any, weight: Any, bias: Any = None, residual: Any = None, eps: float = 1e-5
) -> Any:
    """`layer_norm` as `quantised_rms_norm` gives it."""
    return _quantised("layernorm", x, weight, bias, residual, eps)


def _quantised(op: str, x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> Any:
    with torch.no_grad():
        made = _norm(op, x, w=weight, b=bias, residual=residual, eps=eps, fp8=True)
    y, scale = made["y"], made["scale"]
    return (y, scale) if residual is None else (y, scale, made["summed"])


def quantised_rows(x: Any) -> tuple[Any, Any]:
    """x as e4m3 with one scale a row: x = y * scale."""
    return OPERATORS["quantised"](x)


__all__ = [
    "cross_entropy",
    "geglu",
    "layer_norm",
    "log_softmax",
    "quantised_layer_norm",
    "quantised_rms_norm",
    "quantised_rows",
    "rms_norm",
    "rotary",
    "rotary_",
    "softmax",
    "swiglu",
]
