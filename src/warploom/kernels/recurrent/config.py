"""What is static in recurrent attention."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import InputError
from warploom.tile import BF16, FP32, DType

DECAYS = ("none", "head", "token", "step", "channel")
TAYLOR = 16  # channels of a key with features of second order
SHORT = 64  # the largest d of a state that fits a tile of one compute group beside all else


@dataclass(frozen=True)
class RecurrentConfig:
    """What is static in recurrent attention.

    decay       what the state is multiplied by before a row is added:
                "none"    1
                "head"    exp(g), g: [heads], the same in every row
                "token"   exp(g), g: [batch, rows, heads]
                "step"    exp(dt a), dt: [batch, rows, heads], a: [heads]; rows are added as
                          dt k v^T (Mamba-2)
                "channel" exp(g) along d, g: [batch, rows, heads, d] in bf16 (GLA)
    delta       the delta rule: a row is added as beta k (v - S^T k)^T, beta: [batch, rows, heads],
                where S is the state it is added to; keys have norms of about 1. With "channel" it
                is two programs (`kernels.recurrent.solved`)
    softplus    the dt of a "step" is softplus(dt + bias), bias: [heads]
    gates       the element type of g, dt and beta of every row; a "channel" has bf16, its beta fp32
    key_dim     d, a multiple of 8, at most 128; with "channel" at most 64, with taylor 16
    value_dim   e, a multiple of 8; a task has 64 or 128 of them
    shared      all heads have one q and k: groups is 1
    skip        o += skip_h v, skip: [heads] (Mamba-2's D)
    initial     the state before the first row is given: [batch, heads, d, e]
    final       the state after the last row is stored: [batch, heads, d, e]
    output      there is an o; without it there is no q either, and `final` is all that is found
                (no delta, no decay of channels)
    states      the state before every chunk of 64 rows is stored, as gradients need it:
                [batch, chunks, heads, e, d] in bf16; with delta also what the rows add, `fresh`,
                and `inverse` of `kernels.recurrent.delta`: [batch, chunks, slots, 64, 64], a slot
                for every head and 64 columns of its values
    taylor      q k^T is 1 + s + s^2 / 2 with s = scale q k^T (Based): no decay, no delta, no state
                that is given or stored
    """

    decay: str = "token"
    delta: bool = False
    softplus: bool = False
    gates: DType = FP32
    key_dim: int = 64
    value_dim: int = 64
    shared: bool = False
    skip: bool = False
    initial: bool = False
    final: bool = False
    output: bool = True
    states: bool = False
    taylor: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning or no tile."""
        if self.decay not in DECAYS:
            raise InputError(f"recurrent decay={self.decay!r}: expected one of {', '.join(DECAYS)}")
        if self.delta and self.decay not in ("none", "token", "channel"):
            raise InputError(
                f"recurrent delta=True decay={self.decay!r}: expected none, token or channel"
            )
        stateful = self.delta or self.initial or self.final or self.states
        if self.taylor and (stateful or self.decay != "none"):
            raise InputError(
                "recurrent taylor=True: expected decay=none, no delta, and no state given or stored"
            )
        if self.softplus and self.decay != "step":
            raise InputError(f"recurrent softplus=True decay={self.decay!r}: expected 'step'")
        if self.skip and self.in_parts:
            raise InputError(
                "recurrent skip=True: expected no delta, no taylor and no decay of channels"
            )
        if not self.output and (self.in_parts or self.skip or not self.final):
            raise InputError(
                "recurrent output=False: expected final, no skip, no delta and no decay of channels"
            )
        kinds = (BF16,) if self.decay == "channel" else (FP32, BF16)
        if self.gates not in kinds:
            listed = " or ".join(kind.name for kind in kinds)
            raise InputError(f"recurrent gates={self.gates}: expected {listed}")
        most = TAYLOR if self.taylor else SHORT if self.decay == "channel" else 128
        if not 0 < self.key_dim <= most or self.key_dim % 8:
            raise InputError(
                f"recurrent key_dim={self.key_dim}: expected a multiple of 8, at most {most}"
            )
        if self.states and self.delta and (self.key_dim > SHORT or self.decay == "channel"):
            raise InputError(
                f"recurrent states=True delta=True decay={self.decay!r} key_dim={self.key_dim}: "
                f"expected none or token, and at most {SHORT}"
            )
        if self.value_dim <= 0 or self.value_dim % 8:
            raise InputError(f"recurrent value_dim={self.value_dim}: expected a multiple of 8")

    @property
    def in_two(self) -> bool:
        """Whether what chunks need of themselves is a kernel of its own: under decays of channels,
        where one has no room for both, and with long keys, where two take half of the time."""
        return self.delta and (self.decay == "channel" or self.key_dim > SHORT)

    @property
    def in_parts(self) -> bool:
        """Whether a chunk takes more than its scores: it is solved, or weighed part by part, or
        its state is one of features."""
        return self.delta or self.taylor or self.decay == "channel"

    @property
    def depth(self) -> int:
        """Of the state's tile along d, with zeros where a head is shorter."""
        if self.taylor:
            return TAYLOR
        return 128 if self.key_dim > SHORT else SHORT

    @property
    def columns(self) -> int:
        """Of the state's tile along e; with 128 two groups share it out."""
        wide = self.key_dim > SHORT if self.delta else self.value_dim > 64
        return 128 if wide and not self.taylor and self.decay != "channel" else 64
