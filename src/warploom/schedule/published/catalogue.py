"""Built-in loop bodies by name, with their parameters and what they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from warploom.errors import InputError
from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.graph import Graph
from warploom.schedule.published.attention import attention, attention_backward
from warploom.schedule.published.chunked import linear_attention, ssd
from warploom.schedule.published.matmul import gemm, gemm_epilogue


@dataclass(frozen=True)
class Entry:
    """A graph that ships. `tiles` are the tile shapes a search tries by default."""

    name: str
    build: Callable[..., Graph]
    about: str
    tiles: tuple[Mapping[str, int], ...] = ()


_ATTENTION_TILES = tuple(
    {"subtiles": subtiles, "keys": keys} for subtiles in (1, 2, 3) for keys in (64, 96, 128, 176)
)
_GEMM_TILES = tuple(
    {"rows": rows, "columns": columns, "depth": 64, "subtiles": rows // 64 if rows < 256 else 2}
    for rows in (64, 128, 192, 256)
    for columns in (64, 128, 192, 256)
)
_CHUNKS = tuple({"chunk": chunk} for chunk in (64, 128))

GRAPHS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("gemm", gemm, "main loop of a matrix product", _GEMM_TILES),
        Entry("gemm_epilogue", gemm_epilogue, "persistent matrix product with epilogue and store"),
        Entry("attention", attention, "softmax(Q K^T) V, one key block", _ATTENTION_TILES),
        Entry(
            "attention_causal",
            partial(attention, mask=True),
            "the same with a mask on every block",
            _ATTENTION_TILES,
        ),
        Entry("attention_backward", attention_backward, "dQ, dK, dV, one query block"),
        Entry("linear_attention", linear_attention, "one chunk of linear attention", _CHUNKS),
        Entry("ssd", ssd, "one chunk of the Mamba-2 recurrence", _CHUNKS),
    )
}


def build(name: str, costs: CostTable, params: Mapping[str, Any] | None = None) -> Graph:
    """The named graph on a cost table; unknown names and parameters raise `InputError`."""
    if name not in GRAPHS:
        close = get_close_matches(name, GRAPHS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise InputError(f"no graph {name!r}{hint}; expected a .json file or one of {list(GRAPHS)}")
    function = GRAPHS[name].build
    known = parameters(name)
    for key, value in (params or {}).items():
        if key not in known:
            raise InputError(f"graph {name} has no parameter {key!r}, it has {known}")
        default = known[key]
        if isinstance(default, int) and (not isinstance(value, int) or value < 0):
            raise InputError(f"graph {name}: {key}={value!r}, expected a whole number >= 0")
        if isinstance(default, str) and value not in ("bf16", "fp16", "fp8"):
            raise InputError(f"graph {name}: {key}={value!r}, expected bf16, fp16 or fp8")
        if isinstance(default, float) and (isinstance(value, str) or not 0 <= value <= 1):
            raise InputError(f"graph {name}: {key}={value!r}, expected a fraction, 0 to 1")
    given = dict(params or {})
    _check_split(name, {**known, **given})
    return function(costs, **given)


def _check_split(name: str, values: Mapping[str, Any]) -> None:
    subtiles = values.get("subtiles", 1)
    if subtiles < 1:
        raise InputError(f"graph {name}: subtiles={subtiles}, expected at least 1")
    for key in ("rows", "keys", "queries"):
        size = values.get(key, 0)
        if size and size % (subtiles * 8 if key != "keys" else 8):
            raise InputError(
                f"graph {name}: {key}={size} does not split into {subtiles} sub-tiles of whole "
                "8-row instruction tiles"
            )


def parameters(name: str) -> dict[str, Any]:
    """Parameters of a graph and their defaults."""
    signature = inspect.signature(GRAPHS[name].build)
    skipped = ("costs", "mask")
    return {key: p.default for key, p in signature.parameters.items() if key not in skipped}


def parse_params(items: list[str]) -> dict[str, Any]:
    """`["rows=128", "dtype=fp8"]` of a command line as parameters."""
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key or not text:
            raise InputError(f"--set {item!r}, expected name=value")
        try:
            found[key] = int(text)
        except ValueError:
            try:
                found[key] = float(text)
            except ValueError:
                found[key] = text
    return found
