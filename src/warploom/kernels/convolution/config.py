"""What is static in a long convolution."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import InputError

ROWS = COLUMNS = 64  # of a tile
FACTORS = (8, 16, 32, 64)


@dataclass(frozen=True)
class ConvolutionConfig:
    """What is static in a long convolution.

    length   N, of the transform: 512, 1024, 2048 or 4096
    causal   sequences have N / 2 elements and are followed by zeros, so nothing comes round; they
             have N elements and come round otherwise
    pairs    pairs of sequences of a task, one after the other
    blocks   longer causal sequences are blocks of N / 2 elements, of which a task has one: the sum
             over that block and those before it of their transforms, each by the frequencies of N
             taps of the kernel, is transformed back once
    """

    length: int = 4096
    causal: bool = True
    pairs: int = 2
    blocks: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no tile."""
        if self.length % COLUMNS or self.factor not in FACTORS:
            lengths = ", ".join(str(COLUMNS * factor) for factor in FACTORS)
            raise InputError(f"convolution length={self.length}: expected one of {lengths}")
        if self.pairs < 1:
            raise InputError(f"convolution pairs={self.pairs}: expected 1 or more")
        if self.blocks and not (self.causal and self.square and self.pairs == 1):
            raise InputError(
                f"convolution of blocks with length={self.length} causal={self.causal} "
                f"pairs={self.pairs}: expected {COLUMNS * COLUMNS}, True and 1"
            )

    @property
    def factor(self) -> int:
        """N1, the length of the transforms down the columns of a tile."""
        return self.length // COLUMNS

    @property
    def square(self) -> bool:
        """Whether both transforms have one length, and so one matrix."""
        return self.factor == COLUMNS

    @property
    def heads(self) -> int:
        """Heads of a tile."""
        return ROWS // self.factor

    @property
    def taps(self) -> int:
        """Elements of a sequence, or of a block of it, and of a kernel at most."""
        return self.length // 2 if self.causal else self.length

    @property
    def taken(self) -> int:
        """Rows of x in a tile: those that are zero are not loaded."""
        return ROWS // 2 if self.causal else ROWS
