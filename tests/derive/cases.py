"""Kernels used by several tests: a formula, a nest, and sizes that leave ragged tails."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.derive.derive import shrunk_sizes
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import formula
from warploom.derive.kernel.chunk import exchange
from warploom.derive.kernel.kernel import Kernel, Loop, LoopKind
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas.cascade import Refusal

KINDS: dict[str, LoopKind] = {"g": "group", "s": "stream", "w": "split"}

# formula: nests, as loop symbols from the outside in
NESTS: tuple[tuple[str, str], ...] = (
    ("matmul", "g_a g_c s_b"),
    ("matmul", "g_a g_c w_b s_b"),
    ("matmul", "g_a s_c"),
    ("attention", "g_q s_x"),
    ("attention", "g_q s_x s_d"),
    ("attention", "g_q g_e s_x"),
    ("attention", "g_q w_x s_x"),
    ("causal", "g_q s_x"),
    ("window", "g_q s_x"),
    ("gqa", "g_n g_h g_q s_x"),
    ("gqa_decode", "g_n g_h w_x s_x"),
    ("mqa", "g_h g_q s_x"),
    ("mla", "g_h s_x"),
    ("spherical", "g_q s_x"),
    ("rmsnorm", "g_m"),
    ("rmsnorm_matmul", "g_m g_n s_d"),
    ("layernorm", "g_m"),
    ("layernorm_matmul", "g_m g_n s_d"),
    ("mlp", "g_m s_h"),
    ("mlp", "g_m s_h s_d"),
    ("mlp", "g_m g_n s_h s_d"),
    ("swiglu", "g_m s_h s_d"),
    ("cross_entropy", "g_m s_v"),
    ("linear_attention", "g_e s_t"),
    ("ssm", "g_c s_t"),
    ("variance", "g_m s_x"),
    ("variance", "g_m w_x s_x"),
    ("logsumexp", "g_m w_x s_x"),
    ("router", "g_m s_n"),
    ("router", "g_m w_n s_n"),
    ("convolution", "g_o g_n s_c"),
    ("convolution", "g_o s_w"),
)


def loops(text: str) -> list[Loop]:
    """`"g_q s_x"` as loops."""
    return [Loop(s[2:], KINDS[s[0]]) for s in text.split()]


def small(name: str, limit: int = 14) -> Diagram:
    """A named formula at small, uneven sizes."""
    diagram = formula(name)
    sizes = shrunk_sizes(diagram, limit)
    return diagram.resized({a: sizes[a] for a in diagram.size})


def kernel(name: str, nest: str, limit: int = 14) -> Kernel:
    """The kernel of a small formula and a nest, tiles not chosen."""
    made = make_kernel(small(name, limit), loops(nest))
    assert not isinstance(made, Refusal), f"{name} {nest}: {made}"
    return made


def chunked(name: str, nest: str, limit: int = 14) -> Kernel:
    """The same with the exchange lemma applied first."""
    made = make_kernel(exchange(small(name, limit)), loops(nest))
    assert not isinstance(made, Refusal), f"{name} {nest}: {made}"
    return made


def tilings(made: Kernel) -> Iterator[Kernel]:
    """The kernel with several tile choices, some that divide and some that do not."""
    for group, stream, split in ((4, 3, 5), (3, 2, 6), (1, 1, 4), (6, 4, 100)):
        sizes = {"group": group, "stream": stream, "split": split}
        yield made.tiled(
            {each.symbol: min(sizes[each.kind], made.body.size[each.axis]) for each in made.loops}
        )
