"""Profiles of the learned player: which actions, which network, which parameters.

`CUASMRL` is the published player (arXiv 2501.08071; its parameters as left in its public code):
loads and stores one line up or down, control fields travelling, horizon 32, PPO as in CleanRL, a
small CNN over the listing. `WIDE` is ours: any instruction, several distances, yield, stall and
reuse edits, fields re-derived, and attention over the dependence graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from warploom.errors import InputError


class Kind(Enum):
    """What an action does to its line."""

    UP = "up 1"
    DOWN = "down 1"
    UP_FEW = "up 4"
    DOWN_FEW = "down 4"
    UP_FAR = "up far"
    DOWN_FAR = "down far"
    TIGHTEN = "tighten"
    YIELD = "yield"
    REUSE_A = "reuse a"
    REUSE_B = "reuse b"
    REUSE_C = "reuse c"


@dataclass(frozen=True)
class KindSpec:
    """A move's least and most positions, or the operand slot of a reuse hint."""

    reach: tuple[int, int] | None = None
    slot: int = -1


KINDS: Final[Mapping[Kind, KindSpec]] = {
    Kind.UP: KindSpec((1, 1)),
    Kind.DOWN: KindSpec((1, 1)),
    # A few: 4 or as many as there is room for, at least 2. Far: at most 24, at least 5.
    Kind.UP_FEW: KindSpec((2, 4)),
    Kind.DOWN_FEW: KindSpec((2, 4)),
    Kind.UP_FAR: KindSpec((5, 24)),
    Kind.DOWN_FAR: KindSpec((5, 24)),
    Kind.TIGHTEN: KindSpec(),
    Kind.YIELD: KindSpec(),
    Kind.REUSE_A: KindSpec(slot=0),
    Kind.REUSE_B: KindSpec(slot=1),
    Kind.REUSE_C: KindSpec(slot=2),
}


@dataclass(frozen=True)
class PPOParameters:
    """Parameters of proximal policy optimisation; steps are environment steps."""

    steps: int = 64
    minibatch: int = 8
    epochs: int = 4
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5
    total: int = 12_800
    anneal: bool = True


@dataclass(frozen=True)
class Profile:
    """A learned player. It plays the hottest blocks that fit into `hot` lines, and at least one, of
    which it plays `lines`. `moves` names the opcodes that may move (empty: all); `kept` lets
    control fields travel; `restart` is the share of episodes that begin at the best state so far; a
    state scored before is not scored again when `remember`. With `accept`, a step that is slower
    than the episode's best by more than that share is taken back: the policy proposes, the score
    disposes. `worst_reward` bounds the reward of a slow step from below. `stride`: accepted steps
    from one score to the next; those between are rewarded and judged by the timing model.
    """

    name: str
    kinds: tuple[Kind, ...]
    moves: frozenset[str]
    kept: bool
    lines: int
    hot: int
    horizon: int
    network: str
    ppo: PPOParameters
    restart: float = 0.0
    remember: bool = False
    accept: float | None = None
    worst_reward: float | None = None
    stride: int = 1

    @property
    def weights(self) -> tuple[str, tuple[Kind, ...]]:
        """What a network's weights depend on: a policy of one profile plays another alike."""
        return self.network, self.kinds


CUASMRL: Final = Profile(
    name="cuasmrl",
    kinds=(Kind.UP, Kind.DOWN),
    moves=frozenset(("LDG", "LDGSTS", "STG", "LDS")),
    kept=True,
    lines=320,
    hot=320,
    horizon=32,
    network="cnn",
    ppo=PPOParameters(),
)
WIDE: Final = Profile(
    name="wide",
    kinds=tuple(KINDS),
    moves=frozenset(),
    kept=False,
    lines=512,
    hot=320,
    horizon=32,
    network="graph",
    ppo=PPOParameters(steps=32, minibatch=16, learning_rate=1e-3, total=1_000_000, anneal=False),
    restart=0.9,
    remember=True,
    accept=5e-4,
    worst_reward=-1.0,
)
GUIDED: Final = replace(
    WIDE, name="guided", horizon=64, stride=4, ppo=replace(WIDE.ppo, steps=64, epochs=2)
)
PROFILES: Final[Mapping[str, Profile]] = {
    profile.name: profile for profile in (CUASMRL, WIDE, GUIDED)
}


def profile_named(name: str) -> Profile:
    """A profile by name; raises `InputError` naming those there are."""
    if name not in PROFILES:
        raise InputError(f"profile {name!r}, expected one of {', '.join(PROFILES)}")
    return PROFILES[name]
