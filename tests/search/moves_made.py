"""How far a game is from the original."""

from __future__ import annotations

from warploom.sass.flow.diff import align
from warploom.search.game import Game


def moved(game: Game) -> int:
    """Instructions that are not where the original has them: the least number of moves."""
    blocks = zip(game.kernel.blocks, game.editor.states, strict=True)
    return sum(
        len(state.order) - len(align(range(block.start, block.end), state.order))
        for block, state in blocks
    )
