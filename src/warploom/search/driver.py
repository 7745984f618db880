"""Running players against an evaluator under a budget; the best so far is never lost."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from warploom.sass.decode.cubin import Cubin
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier
from warploom.search.evaluate import Evaluator
from warploom.search.game import Candidate, Game
from warploom.search.players import Play, Player, Score

KEEP: Final = 8
KEEP_FAILURES: Final = 16


@dataclass(frozen=True)
class Budget:
    """Stop after so many seconds, scored candidates or measurements, whichever comes first.

    A confirmation is a measurement more of the same candidate.
    """

    seconds: float
    candidates: int | None = None
    measurements: int | None = None


@dataclass(frozen=True)
class Progress:
    """What a search has done so far."""

    seconds: float
    scored: int
    best: float
    rate: float


@dataclass(frozen=True)
class SearchOptions:
    """How a search plays.

    kernel, mode   of the cubin; how its pointers may alias
    chains         players at a time: one is edited and verified while the others are being measured
    confirmations  more measurements of a score that would be a chain's new best, which counts with
                   its mean
    start          an earlier result to begin from instead of the original
    moves          what the game proposes (`actions.STEPS`); None: all
    on_best        told of every new best
    game           played instead of a new one; it says itself what is allowed
    """

    kernel: str | None = None
    mode: AliasMode = AliasMode.STRICT
    seed: int = 0
    chains: int = 1
    confirmations: int = 0
    start: Cubin | None = None
    verifier: Verifier | None = None
    moves: frozenset[str] | None = None
    on_progress: Callable[[Progress], None] | None = None
    on_best: Callable[[Candidate, float], None] | None = None
    game: Game | None = None


@dataclass
class SearchResult:
    """The outcome: the best candidates, best first, and what became of all of them."""

    player: str
    evaluator: str
    best: list[tuple[float, Candidate]] = field(default_factory=list[tuple[float, Candidate]])
    tally: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    scored: int = 0
    measured: int = 0
    curve: list[tuple[float, int, float]] = field(default_factory=list[tuple[float, int, float]])
    failures: list[tuple[str, Candidate, Candidate | None]] = field(
        default_factory=list[tuple[str, Candidate, "Candidate | None"]]
    )
    interrupted: bool = False
    on_best: Callable[[Candidate, float], None] | None = None

    @property
    def best_speedup(self) -> float:
        """The best score seen; 1.0 (the original) when nothing beat it."""
        return self.best[0][0] if self.best and self.best[0][0] > 1.0 else 1.0

    @property
    def candidate_s(self) -> float:
        """Seconds a measurement took, players' thoughts included; 0 when nothing was measured."""
        return self.seconds / self.measured if self.measured else 0.0

    def record(self, candidate: Candidate, score: Score, parent: Candidate | None = None) -> None:
        """Count a score and keep the candidate when it is among the best.

        A failure is kept with the last state that was right: together they show the rule the
        static verdict lacks.
        """
        self.scored += 1
        self.outcomes[score.outcome] += 1
        if score.outcome != "ok":
            if len(self.failures) < KEEP_FAILURES:
                self.failures.append((score.outcome, candidate, parent))
            return
        if any(candidate.digest == kept.digest for _, kept in self.best):
            return
        if not self.best or score.speedup > self.best[0][0]:
            self.curve.append((self.seconds, self.scored, score.speedup))
            if self.on_best is not None and score.speedup > 1.0:
                self.on_best(candidate, score.speedup)
        self.best.append((score.speedup, candidate))
        self.best.sort(key=lambda pair: -pair[0])
        del self.best[KEEP:]


@dataclass
class _Chain:
    """One running player and the candidate it waits for."""

    game: Game
    play: Play
    waiting: Candidate | None = None
    right: Candidate | None = None
    scores: list[float] = field(default_factory=list[float])
    best: float = 1.0


def run_search(
    original: Cubin,
    player: Player,
    evaluator: Evaluator,
    budget: Budget,
    options: SearchOptions | None = None,
) -> SearchResult:
    """Play until the budget is spent; Ctrl-C ends the search and keeps the best so far.

    The seconds include deriving the rules of the kernel. When they are spent no player is let think
    again: what runs over is one player's thought (a climb of `guided` takes seconds on a large
    kernel) and the candidates being measured.
    """
    began = time.monotonic()
    given = options or SearchOptions()
    result = SearchResult(player.name, evaluator.name, on_best=given.on_best)
    games = _games(original, player, given)

    def spent() -> bool:
        result.seconds = time.monotonic() - began
        return result.seconds >= budget.seconds

    def report() -> None:
        if given.on_progress is not None:
            given.on_progress(_progress(result))

    running: dict[int, _Chain] = {}
    plays: list[Play] = []
    try:
        report()
        for number, game in enumerate(games):
            if number and spent():
                break
            plays.append(player.play(game, random.Random(f"{given.seed}/{number}")))
            chain = _Chain(game, plays[-1])
            _advance(chain, None, evaluator, running)
        last_report = 0.0
        while running and not spent():
            counted = budget.candidates is not None and result.scored >= budget.candidates
            taken = result.measured + len(running) >= (budget.measurements or 1 << 62)
            if counted or taken:
                break
            finished = evaluator.poll(min(1.0, max(0.0, budget.seconds - result.seconds)))
            _deliver(finished, running, evaluator, result, given.confirmations, spent)
            if result.seconds - last_report >= 0.5:
                last_report = result.seconds
                report()
    except KeyboardInterrupt:
        result.interrupted = True
    result.seconds = time.monotonic() - began
    _drain(running, evaluator, result)
    for play in plays:
        play.close()
    for game in games:
        result.tally.update(game.tally)
    report()
    return result


def _games(original: Cubin, player: Player, given: SearchOptions) -> list[Game]:
    """The game of every chain, where play starts."""
    game = given.game
    if game is None:
        shared = given.verifier or Verifier(original, given.kernel, given.mode)
        game = Game(original, given.kernel, given.mode, player.family, shared, given.moves)
    first = game.fork()
    first.elsewhere = given.start is not None
    if given.start is not None:
        first.editor.adopt(given.start.kernel(first.kernel.name).words)
    return [first, *(first.fork() for _ in range(1, min(given.chains, player.most_chains)))]


def _deliver(
    finished: Mapping[int, Score],
    running: dict[int, _Chain],
    evaluator: Evaluator,
    result: SearchResult,
    confirmations: int,
    spent: Callable[[], bool],
) -> None:
    thinking: list[tuple[_Chain, Score]] = []
    for ticket, measured in finished.items():
        chain = running.pop(ticket, None)
        if chain is None or chain.waiting is None:
            continue
        result.measured += 1
        right = measured.outcome == "ok"
        if right and _wants_confirmation(chain, measured, confirmations):
            running[evaluator.submit(chain.waiting)] = chain
            continue
        score = Score(sum(chain.scores) / len(chain.scores)) if right else measured
        chain.scores = []
        result.record(chain.waiting, score, chain.right)
        if right:
            chain.right = chain.waiting
            chain.best = max(chain.best, score.speedup)
        thinking.append((chain, score))
    # Only when all is recorded: players think for seconds, and may be interrupted.
    for chain, score in thinking:
        if not spent():
            _advance(chain, score, evaluator, running)


def _wants_confirmation(chain: _Chain, score: Score, confirmations: int) -> bool:
    """A score above the chain's best is measured again: the best of many noisy ones flatters."""
    chain.scores.append(score.speedup)
    mean = sum(chain.scores) / len(chain.scores)
    return mean > chain.best and len(chain.scores) <= confirmations


def _advance(
    chain: _Chain, score: Score | None, evaluator: Evaluator, running: dict[int, _Chain]
) -> None:
    """Let a player think until it wants the next candidate scored, and submit that."""
    try:
        chain.waiting = next(chain.play) if score is None else chain.play.send(score)
    except StopIteration:
        return
    running[evaluator.submit(chain.waiting)] = chain


def _drain(running: dict[int, _Chain], evaluator: Evaluator, result: SearchResult) -> None:
    """Collect what was still being measured, so that nothing scored is lost."""
    deadline = time.monotonic() + 10.0
    while running and time.monotonic() < deadline:
        for ticket, score in evaluator.poll(0.5).items():
            chain = running.pop(ticket, None)
            if chain is not None and chain.waiting is not None:
                result.measured += 1
                if score.outcome == "ok":
                    chain.scores.append(score.speedup)
                    score = Score(sum(chain.scores) / len(chain.scores))  # noqa: PLW2901
                result.record(chain.waiting, score, chain.right)


def _progress(result: SearchResult) -> Progress:
    rate = result.scored / result.seconds if result.seconds > 0 else 0.0
    return Progress(result.seconds, result.scored, result.best_speedup, rate)
