"""The attention variants: tile, rings, turns, launch plan, and how a block's scores are weighed.

Names say what a variant is: tile, walk (none: static; `snake` over all heads, `band` over so many
at a time, `draw` dynamically), `ahead` (two slots for queries; a 1 or nothing more: one), `chain`,
`back`, `direct` (`plan.LaunchPlan`), `together` (no turns), `serial`, `early`, `guess`,
`slack`, `split_mask_loop`, `clusters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from warploom.autosched.named import multistage, overlapped
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.kernels.attention.program import AttentionConfig, attention

ALL_HEADS = 1 << 20  # a super-group that takes in every head


@dataclass(frozen=True)
class AttentionChoice:
    """A variant: tile (rows, keys), ring depth, whether groups take turns, and the launch plan.

    `registers` is (producer, consumer) a thread where the usual split does not fit; `allow` names
    what the compiler may do: positions in rings spilled once a task, none inside a loop.
    `serial`: a group waits for its matmuls before it goes on, so that scores and weights share
    registers and a tile may be wider; the other groups keep the tensor core busy meanwhile.
    `early_rescale`: sums are rescaled beside the product with the next keys, before the values come on top.
    `rescale_threshold` replaces the configuration's where that has none.
    `optimistic_threshold` replaces the configuration's.
    `cluster_m`: clusters of so many blocks take neighbouring row tiles, and each block of keys comes
    from the L2 cache once for all of them. Not for packed sequences.
    """

    name: str
    tile: tuple[int, int] = (128, 128)
    depth: int = 2
    pingpong: bool = True
    registers: tuple[int, int] | None = None
    launch: dict[str, Any] = field(default_factory=dict[str, Any])
    allow: tuple[str, ...] = ()
    split_mask_loop: bool = False
    serial: bool = False
    early_rescale: bool = False
    rescale_threshold: float = 0.0
    cluster_m: int = 1
    optimistic_threshold: float = 0.0

    def takes(self, base: AttentionConfig) -> bool:
        """Whether there is a kernel of this variant for a configuration."""
        if base.exact and (self.optimistic_threshold or self.rescale_threshold):
            return False
        if base.narrow:
            # Fragments of 32 keys; results are wider than queries; weights saturate.
            over = bool(self.launch.get("store_over"))
            return self.tile[1] % 32 == 0 and not self.optimistic_threshold and not over
        # The first block of a window has no key for some rows, whose warps then weigh the next
        # one twice: optimistic rescaling gets 0.97 of the same tile's rate.
        windowed = base.window is not None and self.optimistic_threshold
        paired = base.packed and self.cluster_m > 1
        return not ((base.rescale_threshold and self.optimistic_threshold) or windowed or paired)

    def config(self, base: AttentionConfig) -> AttentionConfig:
        """`base` with this tile."""
        split_mask_loop = self.split_mask_loop and base.window is None
        rescale_threshold = self.rescale_threshold or base.rescale_threshold
        return replace(
            base,
            tile=self.tile,
            split_mask_loop=split_mask_loop,
            rescale_threshold=rescale_threshold,
            cluster_m=self.cluster_m,
            optimistic_threshold=self.optimistic_threshold,
        )

    def schedule(self, config: AttentionConfig) -> KernelSchedule:
        """FlashAttention-3's pipeline under this launch plan; longest rows first when causal."""
        # Packed sequences: the table of tasks has the longest first.
        reverse = ("rows_tile",) if config.causal and not config.packed else ()
        plan: dict[str, Any] = dict(self.launch)
        plan["cluster"] = ("rows_tile", self.cluster_m) if self.cluster_m > 1 else ("", 1)
        launch = LaunchPlan(
            split="rows",
            reverse=reverse,
            skip_unit=config.rescale_threshold > 0 or config.optimistic_threshold > 0,
            skip_voted=config.optimistic_threshold > 0,
            **plan,
        )
        depths = {"k": self.depth, "v": self.depth}
        program, groups = attention(config), self.tile[0] // 64
        if self.serial:
            return multistage(program, depths, launch, groups, 0, self.registers)
        return overlapped(
            program,
            depths,
            launch,
            groups,
            self.pingpong,
            self.registers,
            early_rescale=self.early_rescale,
        )


def _draw(band: int, rest: Mapping[str, Any] | None = None) -> dict[str, Any]:
    # The next free task, longest first within so many heads, whose keys stay in the L2 cache.
    return {
        "tile_scheduler": "dynamic",
        "supergroup": band,
        "grouped": "all",
        **AHEAD,
        **(rest or {}),
    }


AHEAD: dict[str, Any] = {
    "task_rings": {"q_t": 2},
    "store_panels": 1,
}  # the next task's queries come early
ONE_Q: dict[str, Any] = {"task_rings": dict[str, int](), "store_panels": 1}
SNAKE: dict[str, Any] = {
    "tile_scheduler": "serpentine",
    "supergroup": ALL_HEADS,
    "grouped": "all",
    **AHEAD,
}
TWO: dict[str, Any] = {"resident": 2, "task_rings": dict[str, int]()}  # blocks on an SM
GUESS = 12.0  # powers of 2 that weights may add up to before a block gets a maximum of its own
OVER: dict[str, Any] = {**ONE_Q, "store_over": "q_t"}  # no panels: every byte is for rings
BACK: dict[str, Any] = {
    **ONE_Q,
    "early_release": True,
}  # the next task's queries beside the last matmul
DIRECT: dict[str, Any] = {**BACK, "store": "direct"}  # no panels either
CHAIN: dict[str, Any] = {**AHEAD, "overlap_next_task": True}
PAIR = (32, 104)  # a thread, with six warp groups on an SM
THREE = (32, 160)  # so does that of three groups
WIDE = (40, 232)  # the producer of a dynamic walk needs more than 24 registers
_A = AttentionChoice
ATTENTION_CHOICES: dict[str, AttentionChoice] = {
    choice.name: choice
    for choice in (
        _A("128x128"),
        _A("128x128-ahead", launch=AHEAD),
        _A("128x128-ahead-together-apart", pingpong=False, launch=AHEAD, split_mask_loop=True),
        _A("128x176-together-apart", (128, 176), 2, False, launch=ONE_Q, split_mask_loop=True),
        _A(
            "128x128-chain-early-guess",
            pingpong=False,
            launch=CHAIN,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A("128x128-draw16-chain", pingpong=False, registers=WIDE, launch=_draw(16, CHAIN)),
        _A(
            "128x128-draw16-chain-early-guess",
            pingpong=False,
            registers=WIDE,
            launch=_draw(16, CHAIN),
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x128-chain-early-guess",
            (192, 128),
            3,
            launch=CHAIN,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x112-chain-early-guess",
            (192, 112),
            launch=CHAIN,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x80-draw16-chain-early-guess",
            (192, 80),
            2,
            True,
            THREE,
            _draw(16, CHAIN),
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x80-ahead-early-guess-apart",
            (192, 80),
            launch=AHEAD,
            split_mask_loop=True,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "128x80-direct-early-apart-slack",
            (128, 80),
            2,
            False,
            launch=DIRECT,
            split_mask_loop=True,
            early_rescale=True,
            rescale_threshold=8.0,
        ),
        _A("128x128-draw16", registers=WIDE, launch=_draw(16)),
        _A("128x128-draw16-together", pingpong=False, registers=WIDE, launch=_draw(16)),
        _A(
            "128x128-draw16-together-apart",
            (128, 128),
            2,
            False,
            WIDE,
            _draw(16),
            split_mask_loop=True,
        ),
        _A("192x128-ahead", (192, 128), 3, launch=AHEAD),
        _A("192x128-snake", (192, 128), 3, launch=SNAKE),
        _A("192x128-draw16", (192, 128), 3, launch=_draw(16)),
        _A(
            "192x128-ahead1-serial-apart",
            (192, 128),
            launch=ONE_Q,
            split_mask_loop=True,
            serial=True,
        ),
        _A("192x128-snake1-serial", (192, 128), launch=SNAKE | ONE_Q, serial=True),
        _A(
            "192x128-snake1-serial-apart",
            (192, 128),
            launch=SNAKE | ONE_Q,
            split_mask_loop=True,
            serial=True,
        ),
        _A("128x64-pair-serial", (128, 64), 2, False, PAIR, _draw(16, TWO), serial=True),
        _A("128x224-ahead-together", (128, 224), pingpong=False, launch=AHEAD),
        _A("128x64", (128, 64), launch=ONE_Q),
        _A("128x64-draw16-together", (128, 64), 2, False, WIDE, _draw(16, ONE_Q)),
        _A("128x80-together-apart", (128, 80), 2, False, launch=OVER, split_mask_loop=True),
        _A(
            "128x80-together-apart-slack",
            (128, 80),
            2,
            False,
            launch=OVER,
            split_mask_loop=True,
            rescale_threshold=8.0,
        ),
        _A(
            "128x80-early-apart-slack",
            (128, 80),
            2,
            False,
            launch=OVER,
            split_mask_loop=True,
            early_rescale=True,
            rescale_threshold=8.0,
        ),
        _A(
            "128x80-apart-clusters",
            (128, 80),
            2,
            False,
            WIDE,
            OVER,
            split_mask_loop=True,
            cluster_m=2,
        ),
        _A(
            "128x80-draw16-apart-slack",
            (128, 80),
            2,
            False,
            WIDE,
            _draw(16, OVER),
            split_mask_loop=True,
            rescale_threshold=8.0,
        ),
        _A(
            "192x80-early-guess-apart",
            (192, 80),
            launch=ONE_Q,
            split_mask_loop=True,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x80-snake1-early-guess-apart",
            (192, 80),
            launch=SNAKE | ONE_Q,
            allow=("spills", "stack"),
            split_mask_loop=True,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x112-early-guess",
            (192, 112),
            launch=ONE_Q,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x112-early-guess-apart",
            (192, 112),
            launch=ONE_Q,
            split_mask_loop=True,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x112-snake1-early-guess",
            (192, 112),
            launch=SNAKE | ONE_Q,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x128-ahead-early-guess",
            (192, 128),
            3,
            launch=AHEAD,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x128-ahead-guess-apart",
            (192, 128),
            3,
            launch=AHEAD,
            split_mask_loop=True,
            optimistic_threshold=GUESS,
        ),
        _A(
            "192x128-snake-early-guess",
            (192, 128),
            3,
            launch=SNAKE,
            early_rescale=True,
            optimistic_threshold=GUESS,
        ),
    )
}
