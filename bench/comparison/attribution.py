"""What of a winning schedule made it faster: the winner taken apart and every part measured.

For each block the winner changed: the original with this block of the winner (`only`), and the
winner with this block as compiled (`without`); and the winner's orders with control fields derived
anew (`orders`), and its control edits where a block's order stood (`controls`). Every variant is
judged by the verifier; one it refuses is reported as refused, never measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from warploom.sass.decode.cubin import Cubin
from warploom.sass.edit.edit import Editor
from warploom.sass.edit.rederive import BlockState
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.loops import depths, natural_loops
from warploom.search.actions import Reorder
from warploom.search.game import Candidate, Game

FAR = 3  # positions; what merely makes room shifts by fewer


@dataclass
class Parts:
    """Variants to measure, those the verifier refused, and the winner's edits in numbers."""

    images: dict[str, bytes] = field(default_factory=dict[str, bytes])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    moved: Counter[str] = field(default_factory=Counter[str])
    edits: Counter[str] = field(default_factory=Counter[str])
    blocks: dict[int, str] = field(default_factory=dict[int, str])


def take_apart(original: Cubin, winner: Cubin, kernel: str) -> Parts:
    """The parts of a winner found by playing on `original`."""
    game = Game(original, kernel, AliasMode.TRITON)
    as_compiled = [(s, game.editor.controls(b)) for b, s in enumerate(game.editor.states)]
    won = Editor(original, kernel, AliasMode.TRITON)
    won.adopt(winner.kernel(kernel).words)
    final = [(s, won.controls(b)) for b, s in enumerate(won.states)]
    parts = Parts()
    depth = depths(game.kernel, natural_loops(game.kernel))
    changed = [
        b
        for b, (one, other) in enumerate(zip(as_compiled, final, strict=True))
        if (one[0].order, one[1]) != (other[0].order, other[1])
    ]
    for block in changed:
        count_edits(game, as_compiled[block], final[block], parts)
        size = game.kernel.blocks[block].size
        parts.blocks[block] = f"{size} instructions, loop depth {depth[block]}"
    mixtures = {f"only block {b}": {b} for b in changed}
    mixtures |= {f"without block {b}": set(changed) - {b} for b in changed}
    mixtures |= {"loops only": {b for b in changed if depth[b]}}
    mixtures |= {"outside loops only": {b for b in changed if not depth[b]}}
    for name, chosen in mixtures.items():
        for block in range(len(as_compiled)):
            game.editor.restore(block, *(final if block in chosen else as_compiled)[block])
        _judge(game, name, parts)
    for block in range(len(as_compiled)):
        game.editor.restore(block, *as_compiled[block])
    for block in changed:
        if final[block][0].order != as_compiled[block][0].order:
            game.apply(Reorder(block, final[block][0].order))
    _judge(game, "orders, fields derived", parts)
    for block in range(len(as_compiled)):
        same = final[block][0].order == as_compiled[block][0].order
        game.editor.restore(block, *(final if same else as_compiled)[block])
    _judge(game, "controls of blocks in order", parts)
    return parts


def _judge(game: Game, name: str, parts: Parts) -> None:
    candidate: Candidate = game.current()
    if not candidate.verdict.legal:
        parts.refused[name] = str(candidate.verdict.findings[0])
    elif candidate.cubin not in (*parts.images.values(), game.original.data):
        parts.images[name] = candidate.cubin


def count_edits(
    game: Game,
    before: tuple[BlockState, tuple[object, ...]],
    after: tuple[BlockState, tuple[object, ...]],
    parts: Parts,
) -> None:
    """Count a block's moves by opcode and direction and its control edits by field."""
    place = {index: here for here, index in enumerate(before[0].order)}
    fields = dict(zip(before[0].order, before[1], strict=True))
    for here, (index, control) in enumerate(zip(after[0].order, after[1], strict=True)):
        step = here - place[index]
        item = game.kernel.instructions[index]
        if abs(step) >= FAR:
            parts.moved[f"{item.base} {'down' if step > 0 else 'up'}"] += 1
        for name in ("stall", "stay", "wait", "reuse"):
            old, new = getattr(fields[index], name), getattr(control, name)
            if old != new:
                less = name == "stall" and new < old
                parts.edits["stall shorter" if less else f"{name} changed"] += 1


def summary(parts: Parts, ratios: Mapping[str, list[float]]) -> dict[str, object]:
    """What a log line keeps."""
    return {
        "ratios": dict(ratios),
        "refused": parts.refused,
        "moved": dict(parts.moved.most_common()),
        "edits": dict(parts.edits.most_common()),
        "blocks": {str(block): about for block, about in parts.blocks.items()},
    }
