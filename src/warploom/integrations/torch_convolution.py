"""Long convolution as a PyTorch operator, by Fourier transforms that are matmuls.

    y = long_convolution(x, kernel)             # causal; kernel: [heads, up to as many as x has]
    bands = kernel_spectrum(kernel, x.shape[-1])
    y = long_convolution(x, bands)              # where the kernel does not change

The gradient of x is the same kernel with the conjugate spectrum, that of the spectrum a sum over
batches by torch.fft. Importing this module needs torch.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.kernels.convolution.config import COLUMNS, FACTORS, ConvolutionConfig
from warploom.kernels.convolution.matrices import matrices
from warploom.kernels.convolution.program import default_policy
from warploom.kernels.convolution.program import long_convolution as program

torch: Any = ops.torch_module()
MOST_BLOCKS = 8  # of a sequence: what a block costs grows with those before it
SCHEMA = "(Tensor x, Tensor kernel_re, Tensor kernel_im, bool causal) -> Tensor"
CONSTANTS: dict[tuple[ConvolutionConfig, Any], dict[str, Any]] = {}
"""The matrices of a configuration, by the device they are on."""


def convolution_config(taps: int, causal: bool) -> ConvolutionConfig:
    """What is static for sequences of `taps` elements; raises `InputError` for too many, or for a
    length that comes round and is no length of a transform."""
    lengths = [COLUMNS * factor for factor in FACTORS]
    if not causal:
        return ConvolutionConfig(taps, causal=False)
    for length in lengths:
        if 0 < taps <= length // 2:
            return ConvolutionConfig(length, causal=True)
    most = MOST_BLOCKS * lengths[-1] // 2
    if not 0 < taps <= most:
        raise InputError(
            f"long_convolution of {taps} elements: expected 1 to {most} where it is causal"
        )
    return ConvolutionConfig(causal=True, pairs=1, blocks=True)


def _blocks(config: ConvolutionConfig, taps: int) -> int:
    """Blocks of a sequence of so many elements."""
    return -(-taps // config.taps)


def kernel_spectrum(kernel: Any, taps: int, causal: bool = True) -> tuple[Any, Any]:
    """The transform of `kernel: [heads, elements]` for sequences of `taps`, as the operator takes
    it: its real and imaginary part in bf16."""
    config = convolution_config(taps, causal)
    if kernel.dim() != 2 or kernel.shape[1] > taps:
        raise InputError(
            f"long_convolution kernel is {list(kernel.shape)}, expected [heads, up to {taps}]"
        )
    count, each = _blocks(config, taps), config.taps
    wide = kernel.float()
    if config.blocks:  # those that take a block to the one d later, negative lags at the end
        room = torch.nn.functional.pad(wide, (each, count * each - kernel.shape[1]))
        wide = room.unfold(1, 2 * each, each).roll(each, -1)
    wide = torch.fft.fft(wide, n=config.length).reshape(-1, config.length)
    re, im = (part.bfloat16().contiguous() for part in _bands(wide, config))
    return re, im


def _bands(wide: Any, config: ConvolutionConfig) -> tuple[Any, Any]:
    """A spectrum: [heads or their blocks, length] as the operator takes it."""
    split = wide.reshape(len(wide), COLUMNS, config.factor).transpose(1, 2)
    return split.real.reshape(-1, COLUMNS), split.imag.reshape(-1, COLUMNS)


def long_convolution(
    x: Any, kernel: Any, causal: bool = True, pregate: Any = None, postgate: Any = None
) -> Any:
    """y[b, h, n] = sum over m of kernel[h, m] x[b, h, n - m], or with gates like x
    postgate[b, h, n] times the sum over m of kernel[h, m] (pregate x)[b, h, n - m].

    x: [batch, heads, elements] in bf16, at most 16384 elements where nothing comes round (`causal`)
    and 512, 1024, 2048 or 4096 otherwise; kernel: [heads, elements] or its `kernel_spectrum`.
    Gives y like x.
    """
    if x.dim() != 3:
        raise InputError(
            f"long_convolution of x {list(x.shape)}: expected [batch, heads, elements]"
        )
    for name, gate in (("pregate", pregate), ("postgate", postgate)):
        if gate is not None and gate.shape != x.shape:
            raise InputError(
                f"long_convolution {name} is {list(gate.shape)}, expected {list(x.shape)}"
            )
    given = not torch.is_tensor(kernel)
    re, im = kernel if given else kernel_spectrum(kernel, x.shape[-1], causal)
    y = _operator(x if pregate is None else pregate * x, re, im, causal)
    return y if postgate is None else postgate * y


def _checked(x: Any, kernel_re: Any, kernel_im: Any, causal: bool) -> ConvolutionConfig:
    tensors = {"x": x, "kernel_re": kernel_re, "kernel_im": kernel_im}
    ops.check_devices("long_convolution", tensors)
    for name, one in tensors.items():
        if one.dtype != torch.bfloat16:
            raise InputError(f"long_convolution {name} is {one.dtype}, expected torch.bfloat16")
    config = convolution_config(x.shape[-1], causal)
    bands = (x.shape[1] * _blocks(config, x.shape[-1]) * config.factor, COLUMNS)
    for name in ("kernel_re", "kernel_im"):
        if tuple(tensors[name].shape) != bands:
            raise InputError(
                f"long_convolution {name} is {list(tensors[name].shape)}, expected {list(bands)}: "
                f"the kernel_spectrum of {x.shape[1]} heads and {x.shape[-1]} elements"
            )
    return config


def _constants(config: ConvolutionConfig, device: Any) -> dict[str, Any]:
    if (config, device) not in CONSTANTS:
        CONSTANTS[config, device] = {
            name: torch.tensor(one, device=device).bfloat16()
            for name, one in matrices(config).items()
        }
    return CONSTANTS[config, device]


def _result(config: ConvolutionConfig, x: Any, *_: Any) -> Any:
    return x.new_empty(x.shape)


def _fill(
    config: ConvolutionConfig, out: Any, x: Any, kernel_re: Any, kernel_im: Any, causal: bool
) -> None:
    batch, heads, taps = x.shape
    # Heads fill their last tile, too.
    more, count = -heads % config.heads, _blocks(config, taps)
    rows = torch.nn.functional.pad(x, (0, count * config.taps - taps, 0, more)).contiguous()
    rows = rows.view(batch, -1, count * config.taken, COLUMNS)
    whole = out.numel() == rows.numel()
    y = (out if whole else rows.new_empty(rows.shape)).view(rows.shape)
    given = {"x": rows, "y": y, "kernel_re": kernel_re, "kernel_im": kernel_im}
    arrays = given | _constants(config, x.device)
    ops.launch((config,), lambda: compiled(program(config), default_policy(config)), arrays)
    if not whole:
        out.copy_(y.view(batch, heads + more, -1)[:, :heads, :taps])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    x, re, im = ctx.saved_tensors
    config = convolution_config(x.shape[-1], ctx.causal)
    dx = None
    if ctx.needs_input_grad[0] and config.blocks:  # the same sums over the blocks behind
        dx = _operator(dy.flip(-1), re, im, ctx.causal).flip(-1)
    elif ctx.needs_input_grad[0]:
        dx = _operator(dy.contiguous(), re, -im, ctx.causal)
    if not any(ctx.needs_input_grad[1:3]):
        return dx, None, None, None
    bands = _bands(spectrum_gradient(x, dy, config), config)
    return dx, *(one.to(re.dtype) for one in bands), None


def spectrum_gradient(x: Any, dy: Any, config: ConvolutionConfig) -> Any:
    """Of every frequency of a kernel's spectrum, [heads or their blocks, length]: the real part is
    the gradient by its real part, the imaginary part that by its imaginary part. x, dy: [batch,
    heads, elements]"""
    count, length = _blocks(config, x.shape[-1]), config.length
    room = count * config.taps - x.shape[-1]
    blocks = (torch.nn.functional.pad(one.float(), (0, room)) for one in (x, dy))
    seen, wanted = (
        torch.fft.rfft(one.unflatten(-1, (count, config.taps)), n=length) for one in blocks
    )
    later = [(seen[:, :, : count - d].conj() * wanted[:, :, d:]).sum((0, 2)) for d in range(count)]
    half = torch.stack(later, 1).flatten(0, 1) / length
    return torch.cat([half, half[:, 1:-1].flip(1).conj()], 1)


_operator = ops.operator(
    "warploom::long_convolution", SCHEMA, *ops.steps(_checked, _result, _fill), _backward, _save
)
