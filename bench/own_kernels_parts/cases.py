"""The kernels of claim `own-kernels`: how each is built, and at which sizes it is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warploom import machine
from warploom.codegen.compile.build import Built, build
from warploom.files import write_bytes_atomically
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import ATTENTION
from warploom.runtime.launch import LaunchSpec

GPU = "h200"
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """One kernel: what it is called, how it is made, sizes to search, compare and check at, and
    those to time beside the libraries."""

    name: str
    kernel: str
    variant: str
    about: str
    search: Sizes
    timed: tuple[Sizes, ...]
    checked: Sizes
    made: Callable[[], Built]
    beside: tuple[Sizes, ...] = ()


def make(case: Case, home: Path) -> None:
    """Build a case into a folder, with a copy of its cubin as `original.cubin`."""
    built = case.made()
    built.write(home)
    write_bytes_atomically(home / "original.cubin", built.cubin)
    print(f"{case.name}: {len(built.cubin)} B, {built.resources.compiler}", flush=True)


def launch_of(case: Case, home: Path, sizes: Sizes) -> LaunchSpec:
    """The launch of a built case at some sizes."""
    return Built.read(home).interface.launch_spec(sizes, machine.load(GPU))


def _tokens(head_dim: int, length: int, batch: int) -> Sizes:
    heads = 2048 // head_dim
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": heads,
        "rows": length,
        "keys": length,
        "d": head_dim,
    }


def _attention(head_dim: int, causal: bool, variant: str, *lengths: int) -> Case:
    def made() -> Built:
        choice = ATTENTION.variants[variant]
        config = choice.config(AttentionConfig(head_dim=head_dim, causal=causal))
        return build(attention(config), choice.schedule(config), allow=choice.allow)

    words = f"attention-d{head_dim}{'-causal' if causal else ''}"
    search = _tokens(head_dim, 4096, 1)
    sizes = tuple(_tokens(head_dim, length, 16384 // length) for length in lengths)
    return Case(
        f"{words}-{variant}",
        "attention",
        variant,
        f"head size {head_dim}, {'causal' if causal else 'full'}, bf16",
        search,
        (search, *sizes),
        _tokens(head_dim, 2048, 2),
        made,
        sizes,
    )


def _gemm(variant: str, *edges: int) -> Case:
    def made() -> Built:
        from warploom.kernels.gemm.program import GemmConfig, gemm  # noqa: PLC0415 - to build only
        from warploom.kernels.gemm.variant import GEMM  # noqa: PLC0415

        choice = GEMM.find(variant)
        config = choice.config(GemmConfig())
        return build(gemm(config), choice.schedule(config))

    def square(edge: int) -> dict[str, Any]:
        return {"m": edge, "n": edge, "k": edge}

    return Case(
        f"gemm-{variant}",
        "gemm",
        variant,
        "bf16",
        square(4096),
        tuple(square(edge) for edge in edges),
        square(1024),
        made,
    )


_SHORT = (1024, 2048, 4096)
_LONG = (8192, 16384)
_ALL = (
    _attention(128, False, "128x128-prefetch-cooperative-split", *_SHORT),
    _attention(128, True, "128x128-dynamic16-cooperative", *_SHORT),
    _attention(64, False, "192x128-prefetch", *_SHORT, *_LONG),
    _attention(64, True, "192x128-serpentine", 2048, 4096, *_LONG),
    _gemm("128x256", 4096, 8192),
    _attention(128, False, "128x176-cooperative-split", *_LONG),
    _attention(128, True, "192x128-serpentine1-serial-split", *_LONG),
    _attention(128, False, "128x128-overlap-early-optimistic", 1024),
    _attention(128, False, "192x80-prefetch-early-optimistic-split", 2048, 4096, *_LONG),
    _attention(128, True, "192x80-serpentine1-early-optimistic-split", 4096, *_LONG),
    _attention(128, True, "128x128-dynamic16-overlap-early-optimistic", *_SHORT),
    _attention(64, False, "192x128-overlap-early-optimistic", *_SHORT, *_LONG),
    _attention(64, True, "192x128-serpentine-early-optimistic", 2048, 4096, *_LONG),
    _attention(96, False, "192x112-overlap-early-optimistic", *_SHORT, 8192),
)
CASES: dict[str, Case] = {case.name: case for case in _ALL}
