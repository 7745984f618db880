"""Verdicts on patches are what the verifier says of the whole kernel, legal or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from warploom.rl.board import Board
from warploom.rl.env import make_env
from warploom.rl.offers import Offers, Patched
from warploom.rl.patches import Patch
from warploom.rl.trace import Trace
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.edit.rederive import BlockState
from warploom.sass.rules.versions import Versions

MATRIX = "triton_attention_128x64_w8_s3_sm90"  # has WARPGROUP.DEPBAR, which takes no wait
KERNELS = (MATRIX, "triton_rmsnorm_2x4096_w8_s2_sm80", "cuda_sgemm_sm90a")
STEPS, EACH = 4, 30


@pytest.fixture(scope="module")
def boards(cubin_of: Callable[[str], Cubin]) -> Callable[[str], Board]:
    """One board a kernel, back at its start."""
    made: dict[str, Board] = {}

    def board(name: str) -> Board:
        found = made.setdefault(name, make_env(cubin_of(name)).board)
        found.restore(found.start)
        return found

    return board


def legal_by_the_verifier(board: Board, block: int, version: Versions) -> tuple[bool, str]:
    """(the verdict on the kernel with one version of a block in it, the rule it breaks)."""
    board.sync()
    editor, verifier, batch = board.game.editor, board.game.verifier, board.batches[block]
    before = editor.states[block], editor.controls(block)
    order = version.order[0]
    fields = zip(
        version.stall[0].tolist(),
        version.stay[0].tolist(),
        batch.write_sb[order].tolist(),
        batch.read_sb[order].tolist(),
        version.wait[0].tolist(),
        version.reuse[0].tolist(),
        strict=True,
    )
    controls = tuple(Control(s, bool(y), w, r, m, u) for s, y, w, r, m, u in fields)
    names = tuple((order + batch.start).tolist())
    editor.restore(
        block, BlockState(names, dict(zip(names, controls, strict=True)), True), controls
    )
    verdict = verifier.check_words(editor.words(), editor.info())
    editor.restore(block, *before)
    return verdict.legal, "" if verdict.legal else verdict.findings[0].rule


def faulty(patched: Patched, rng: np.random.Generator, rows: list[int]) -> Iterator[Patch]:
    """Patches with another wait mask or another reuse hint at one of the places they derive."""
    trace = patched.trace
    for row in rows:
        patch = patched.patches[row]
        places = _derived(patch, trace)
        special = _taking_no_wait(patch, trace)
        hinted = [p for p in places if (patch.cells.get(p) or trace.cells[p]).reuse]
        for choice in (places, special, hinted):
            if not choice:
                continue
            place = int(rng.choice(choice))
            cell = patch.cells.get(place) or trace.cells[place]
            if choice is special or (choice is places and rng.random() < 0.6):
                bits = [n for n in range(6) if cell.wait >> n & 1] or range(6)
                cell = cell._replace(wait=cell.wait ^ 1 << int(rng.choice(bits)))
            else:
                slot = int(rng.integers(0, 3))
                stay = int(1 <= cell.stall <= 11)
                cell = cell._replace(reuse=cell.reuse ^ 1 << slot, stay=stay)
            yield replace(patch, cells={**patch.cells, place: cell})


def _derived(patch: Patch, trace: Trace) -> list[int]:
    """The places a patch works out anew, the block's edges aside."""
    return list(range(max(patch.first - 1, 1), min(patch.end, trace.size - 1)))


def _taking_no_wait(patch: Patch, trace: Trace) -> list[int]:
    cells = [
        (place, patch.cells.get(place) or trace.cells[place]) for place in _derived(patch, trace)
    ]
    batch = trace.rules.batch
    awaits_nothing = batch.tables.no_wait[batch.start :]
    return [place for place, cell in cells if awaits_nothing[trace.name[cell.number]]]


def disagreements(board: Board, seed: int, seen: Counter[str]) -> list[str]:
    """Where the two differ on random patches, as they are and with a fault put in."""
    rng = np.random.default_rng(seed)
    found: list[str] = []
    for _ in range(STEPS):
        for block in board.scope:
            offers, now, wide = board.offers(block), board.now[block], board.wide[block]
            patched = offers.patched
            if patched is None or not len(offers.lines):
                continue
            fits = offers.fitting(block, board.coupling)
            plain = [
                row for row, patch in enumerate(patched.patches) if not patch.odd and patch.cells
            ]
            rows: list[int] = rng.permutation(plain)[:EACH].tolist()
            trace = patched.trace
            rows += [row for row in plain if _taking_no_wait(patched.patches[row], trace)][:EACH]
            sound = [row for row in rows if fits[row]]
            patches = [patched.patches[row] for row in rows]
            patches += faulty(patched, rng, sound)
            lines = np.zeros(len(patches), np.int64)
            given = Offers(lines, lines, lines == 0, [], patched=replace(patched, patches=patches))
            versions, _ = wide.made(now, given, np.arange(len(patches)))
            verdicts = [bool(fits[row]) for row in rows]
            verdicts += wide.batch.inside(versions)[len(rows) :].tolist()
            cases = zip(patches, verdicts, strict=True)
            for at, (patch, says) in enumerate(cases):
                legal, rule = legal_by_the_verifier(board, block, versions.take([at]))
                seen[rule or "legal"] += 1
                if legal != says:
                    found.append(f"block {block} {patch.action}: judge {says}, {rule or 'legal'}")
        board.take(int(rng.choice(np.flatnonzero(board.mask()))))
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_judge_and_verifier_agree(boards: Callable[[str], Board], name: str) -> None:
    seen: Counter[str] = Counter()
    found = disagreements(boards(name), 11, seen)
    print(dict(seen))
    assert not found, "\n".join(found[:10])
    assert seen["legal"] > 100 and seen.total() - seen["legal"] > 40
    assert seen["REUSE"] > 20
    assert name != MATRIX or seen["CONTROL_WAIT"] > 20


@pytest.mark.parametrize("rule", ["no_wait", "reuse_rows"])
def test_a_judge_without_the_rule_is_found_out(
    boards: Callable[[str], Board], monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    board = boards(MATRIX)
    board._memory.clear()
    for batch in board.batches:
        kept = getattr(batch, rule)
        monkeypatch.setattr(batch, rule, kept & False if rule == "no_wait" else kept[:0])
    assert disagreements(board, 11, Counter())
    board._memory.clear()
    board._offers.clear()
