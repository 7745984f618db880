"""Kernels that warploom generated: warp-specialised, TMA, wgmma, mbarriers, setmaxnreg.

The verifier accepts them as compiled, moves of arithmetic inside the consumers' branches are found
and legal, matrix instructions and barriers stay, and every planted fault is refused.
"""

from __future__ import annotations

import lzma
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.sass.facts import Code, closest_neighbours, spread
from tests.sass.mutators import MUTATORS

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.lint import lint
from warploom.sass.rules.verify import Verifier
from warploom.search.actions import Move
from warploom.search.game import Candidate, Game

DATA = Path(__file__).parent / "data" / "own"
NAMES = ("attention-d64-192x128-prefetch", "gemm-128x256")
STAYING = ("HGMMA", "WARPGROUP", "SYNCS", "USETMAXREG", "UTMALDG", "UTMASTG", "BAR")
EACH = 3


@pytest.fixture(scope="module", params=NAMES)
def own(request: pytest.FixtureRequest) -> tuple[Cubin, Verifier]:
    """A generated kernel and its verifier."""
    data = lzma.decompress((DATA / f"{request.param}.cubin.xz").read_bytes())
    cubin = parse(data, request.param)
    return cubin, Verifier(cubin, mode=AliasMode.TRITON)


def test_as_compiled_it_is_legal_and_clean(own: tuple[Cubin, Verifier]) -> None:
    cubin, verifier = own
    assert verifier.check_file(cubin).legal
    assert not [one for one in lint(verifier.kernel) if one.severity == "error"]
    bases = {item.base for item in verifier.kernel.instructions}
    assert bases >= {"HGMMA", "SYNCS", "UTMALDG", "USETMAXREG", "WARPGROUP"}


def test_arithmetic_moves_and_matrix_instructions_keep_their_order(
    own: tuple[Cubin, Verifier],
) -> None:
    cubin, verifier = own
    game = Game(cubin, None, AliasMode.TRITON, verifier=verifier)
    rng = random.Random(7)
    moved: Counter[str] = Counter()
    for _ in range(120):
        action = game.propose(rng)
        if action is None or not isinstance(game.apply(action), Candidate):
            continue
        if isinstance(action, Move):
            moved[verifier.kernel.instructions[action.index].base] += 1
    assert moved.total() > 40 and len(moved) > 10
    order = [index for state in game.editor.states for index in state.order]
    items = verifier.kernel.instructions
    matrix = [i for i in order if items[i].effects.info.pipe is Pipe.ASYNC]
    assert matrix == sorted(matrix)
    syncs = [i for i in order if items[i].base in STAYING]
    assert syncs == sorted(syncs)


def test_planted_faults_are_refused(own: tuple[Cubin, Verifier]) -> None:
    cubin, verifier = own
    code = Code(cubin, verifier.kernel, closest_neighbours([verifier.kernel]))
    kinds = 0
    accepted: list[str] = []
    for mutator, rules in MUTATORS.items():
        mutants = list(mutator(code))
        kinds += bool(mutants)
        for mutant in spread(mutants, EACH):
            verdict = verifier.check_file(parse(mutant.data))
            if not rules & {finding.rule for finding in verdict.findings}:
                accepted.append(f"{mutator.__name__}: {mutant.why}: {verdict}")
    assert not accepted, "\n".join(accepted)
    assert kinds >= 20
