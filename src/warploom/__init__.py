"""warploom: derive, tile, schedule, emit and tune GPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warploom.flows.notebook import build, optimize, run, tune
    from warploom.integrations.torch_kernel import kernel
    from warploom.integrations.triton_swap import install, tuned, uninstall

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "build",
    "install",
    "kernel",
    "optimize",
    "run",
    "tune",
    "tuned",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """The commands as functions and the Triton integration, loaded when first used."""
    if name in ("build", "optimize", "run", "tune"):
        from warploom.flows import notebook  # noqa: PLC0415 - keeps the import light

        return getattr(notebook, name)
    if name == "kernel":
        from warploom.integrations import torch_kernel  # noqa: PLC0415 - keeps the import light

        return torch_kernel.kernel
    if name in ("install", "tuned", "uninstall"):
        from warploom.integrations import triton_swap  # noqa: PLC0415 - keeps the import light

        return getattr(triton_swap, name)
    raise AttributeError(f"module 'warploom' has no attribute {name!r}")
