"""Which variant of a kernel a shape gets, as data fitted to measurements on an H200.

GEMM: a list of variants and a time model with four constants; the fastest predicted one is taken.
    time = waves * (k steps * max(matmul, copies) + epilogue) + start
Attention: a table by head size, mask and length.
Provenance: bench/gemm.py and bench/attention.py on one H200 (driver 580.159.04, torch 2.11, nvcc
13.5, 2026-11-21, random data); a test holds the model to those times (tests/kernels).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from warploom.codegen.emit_mma import MOST_COLUMNS
from warploom.codegen.named import multistage, overlapped
from warploom.codegen.plan import KernelSchedule, LaunchPlan
from warploom.errors import InputError
from warploom.kernels.attention import AttentionConfig, attention
from warploom.kernels.gemm import GemmConfig, gemm

SMS = 132  # streaming multiprocessors of H100 SXM and H200
STEP_BYTES = 128  # of the contracted axis a step of the ring: one swizzle width
MATMUL_RATE = 5.1e6  # 16-bit operations a microsecond and SM, under the power limit
COPY_RATE = 115e3  # bytes a microsecond and SM from L2
LINE = 128  # bytes: rows that do not begin at a line cost more of them
BETWEEN = 2.6  # copies of such a row, in copies of one that does
EPILOGUE = 0.5  # microseconds for a tile of 128 x 256
START = 2.5  # microseconds: launch, barriers, first copies, last stores
EARLY = 1.8  # the same where the launch is hidden behind the previous grid


@dataclass(frozen=True)
class GemmChoice:
    """A variant: tile (m, n), the grid axis and size of its cluster, ring depth, launch."""

    name: str
    tile: tuple[int, int]
    cluster: tuple[str, int] = ("m_tile", 2)
    depth: int = 4
    groups: int = 2
    panels: int = 2
    supergroup: int = 8
    efficiency: float = 1.0  # of MATMUL_RATE: small tiles read more shared memory a multiply
    dependent: bool = False
    resident: int = 1

    def config(self, base: GemmConfig) -> GemmConfig:
        """`base` with this tile; a step of k is 128 bytes."""
        return replace(base, tile=(*self.tile, STEP_BYTES // base.dtype.bytes))

    def schedule(self, config: GemmConfig) -> KernelSchedule:
        """Load-compute-finish with one matmul in flight, under this launch plan."""
        launch = LaunchPlan(
            split="m",
            cluster=self.cluster if self.cluster[1] > 1 else ("", 1),
            supergroup=self.supergroup,
            store_panels=self.panels,
            dependent=self.dependent,
            resident=self.resident,
        )
        registers = SHARED_REGISTERS if self.resident > 1 else None
        if self.tile[1] > MOST_COLUMNS:
            registers = WIDE_REGISTERS
        return multistage(gemm(config), self.depth, launch, self.groups, registers=registers)

    def microseconds(self, config: GemmConfig, m: int, n: int, k: int, batch: int = 1) -> float:
        """Predicted time of a launch."""
        (bm, bn), bk, size = self.tile, STEP_BYTES // config.dtype.bytes, config.dtype.bytes
        axis, blocks = self.cluster
        rows, cols = -(-m // bm), -(-n // bn)
        if axis == "m_tile":
            rows = -(-rows // blocks)
        else:
            cols = -(-cols // blocks)
        waves = -(-rows * cols * batch // (SMS // blocks))
        if self.resident > 1:  # blocks of an SM share its rate, so that a half-full wave is shorter
            waves = max(1.0, rows * cols * batch / SMS)
        a_line = (k if config.a == "mk" else m) * size
        b_line = (n if config.b == "kn" else k) * size
        copied = bm * (1 if a_line % LINE == 0 else BETWEEN) / (blocks if axis == "n_tile" else 1)
        copied += bn * (1 if b_line % LINE == 0 else BETWEEN) / (blocks if axis == "m_tile" else 1)
        step = max(
            bm * bn * STEP_BYTES / (MATMUL_RATE * self.efficiency), copied * STEP_BYTES / COPY_RATE
        )
        epilogue = EPILOGUE * bm * bn / (128 * 256)
        start = (EARLY if self.dependent else START) * (1 if blocks < 4 else 2)
        return waves * (-(-k // bk) * step + epilogue) + start


ALONE = ("", 1)  # no cluster
WIDE_REGISTERS = (40, 232)  # a thread: a producer of so many panels needs more than 24
SHARED_REGISTERS = (40, 216)  # a thread: producer, the one compute group of a block that shares


def _pair(
    name: str, tile: tuple[int, int], depth: int, efficiency: float, dependent: bool = False
) -> GemmChoice:
    # Two blocks of one compute group on an SM: one's epilogue beside the other's matmuls.
    return GemmChoice(name, tile, ALONE, depth, 1, 1, 8, efficiency, dependent, 2)


GEMM_CHOICES: tuple[GemmChoice, ...] = (
    GemmChoice("128x256", (128, 256)),
    GemmChoice("256x128", (256, 128), panels=1),
    GemmChoice("256x128-along-n", (256, 128), ("n_tile", 2), panels=1),
    GemmChoice("128x192", (128, 192)),
    GemmChoice("128x320", (128, 320), depth=3),
    GemmChoice("128x384", (128, 384), depth=3, panels=1),
    GemmChoice("128x320-by-4", (128, 320), ("m_tile", 4), 3),
    GemmChoice("128x384-by-4", (128, 384), ("m_tile", 4), 3, panels=1),
    GemmChoice("256x160-along-n", (256, 160), ("n_tile", 2), depth=3, panels=1),
    GemmChoice("256x192-along-n", (256, 192), ("n_tile", 2), depth=3, panels=1),
    GemmChoice("128x128", (128, 128), depth=6, efficiency=0.99),
    GemmChoice("128x256-by-4", (128, 256), ("m_tile", 4), efficiency=0.8),
    GemmChoice("128x192-by-4", (128, 192), ("m_tile", 4), efficiency=0.85),
    GemmChoice(
        "128x64-by-4", (128, 64), ("n_tile", 4), depth=8, panels=1, efficiency=0.85, dependent=True
    ),
    GemmChoice("128x64", (128, 64), ("n_tile", 2), depth=8, panels=1, efficiency=0.85),
    GemmChoice("64x128-by-4", (64, 128), ("m_tile", 4), 8, groups=1, panels=1, efficiency=0.85),
    GemmChoice("64x128-by-8", (64, 128), ("m_tile", 8), 8, groups=1, panels=1, efficiency=0.85),
    GemmChoice("128x256-dependent", (128, 256), efficiency=0.96, dependent=True),
    _pair("128x128-pair", (128, 128), 3, 0.93),
    _pair("128x128-pair-dependent", (128, 128), 3, 0.93, True),
    _pair("64x128-pair", (64, 128), 4, 0.7, True),
    _pair("128x64-pair", (128, 64), 4, 0.65, True),
    _pair("64x64-pair", (64, 64), 6, 0.55, True),
    GemmChoice("128x64-alone", (128, 64), ALONE, 8, panels=1, efficiency=0.9, dependent=True),
    GemmChoice("128x128-alone", (128, 128), ALONE, 6, efficiency=0.95, dependent=True),
    GemmChoice("64x256-alone", (64, 256), ALONE, 4, 1, 1, efficiency=0.9, dependent=True),
)


def gemm_choice(name: str) -> GemmChoice:
    """The variant of that name; raises `InputError` listing those there are."""
    for choice in GEMM_CHOICES:
        if choice.name == name:
            return choice
    names = ", ".join(choice.name for choice in GEMM_CHOICES)
    raise InputError(f"gemm variant {name!r}: expected one of {names}")


def choose_gemm(
    m: int, n: int, k: int, base: GemmConfig | None = None, batch: int = 1
) -> GemmChoice:
    """The variant with the least predicted time; the first of equals."""
    if min(m, n, batch) < 1 or k < 0:
        raise InputError(f"gemm of m={m} n={n} k={k} batch={batch}: expected positive sizes")
    config = base or GemmConfig()
    return min(GEMM_CHOICES, key=lambda choice: choice.microseconds(config, m, n, k, batch))


def default_gemm(
    m: int, n: int, k: int, base: GemmConfig | None = None, batch: int = 1
) -> tuple[GemmConfig, KernelSchedule]:
    """(configuration, schedule) for a shape; `base` has the element types and the epilogue."""
    chosen = choose_gemm(m, n, k, base, batch)
    config = chosen.config(base or GemmConfig())
    return config, chosen.schedule(config)


ALL_HEADS = 1 << 20  # a super-group that takes in every head


@dataclass(frozen=True)
class AttentionChoice:
    """A variant: tile (rows, keys), ring depth, whether groups take turns, and the launch plan.

    `registers` is (producer, consumer) a thread where the usual split does not fit; `allow` names
    what the compiler may do: positions in rings spilled once a task, none inside a loop.
    `serial`: a group waits for its matmuls before it goes on, so that scores and weights share
    registers and a tile may be wider; the other groups keep the tensor core busy meanwhile.
    """

    name: str
    tile: tuple[int, int] = (128, 128)
    depth: int = 2
    turns: bool = True
    registers: tuple[int, int] | None = None
    launch: dict[str, Any] = field(default_factory=dict[str, Any])
    allow: tuple[str, ...] = ()
    slack: float = 0.0
    apart: bool = False
    serial: bool = False

    def config(self, base: AttentionConfig) -> AttentionConfig:
        """`base` with this tile."""
        apart = self.apart and base.window is None
        return replace(base, tile=self.tile, slack=self.slack, apart=apart)

    def schedule(self, config: AttentionConfig) -> KernelSchedule:
        """FlashAttention-3's pipeline under this launch plan; longest rows first when causal."""
        # Packed sequences: the table of tasks has the longest first.
        reverse = ("rows_tile",) if config.causal and not config.packed else ()
        launch = LaunchPlan(
            split="rows", reverse=reverse, skip_unit=config.slack > 0, **self.launch
        )
        depths = {"k": self.depth, "v": self.depth}
        program, groups = attention(config), self.tile[0] // 64
        if self.serial:
            return multistage(program, depths, launch, groups, 0, self.registers)
        return overlapped(program, depths, launch, groups, self.turns, self.registers)


def _draw(band: int, **rest: Any) -> dict[str, Any]:
    # The next free task, longest first within so many heads, whose keys stay in the L2 cache.
    return {"walk": "dynamic", "supergroup": band, "grouped": "all", **AHEAD, **rest}


AHEAD: dict[str, Any] = {
    "task_rings": {"q_t": 2},
    "store_panels": 1,
}  # the next task's queries come early
ONE_Q: dict[str, Any] = {"task_rings": dict[str, int](), "store_panels": 1}
SNAKE: dict[str, Any] = {"walk": "snake", "supergroup": ALL_HEADS, "grouped": "all", **AHEAD}
GRID: dict[str, Any] = {"persistent": False, "store_panels": 1}  # the GPU gives the tasks out
TWO: dict[str, Any] = {"resident": 2, "task_rings": dict[str, int]()}  # blocks on an SM
# Of every 8 exponentials so many on the fp32 lanes: the special-function unit is as busy as the
# tensor core when heads are 64 wide.
FMA1: dict[str, Any] = {"fma_exp2": 1}
FMA2: dict[str, Any] = {"fma_exp2": 2}
PAIR = (32, 104)  # a thread, with six warp groups on an SM
WIDE = (40, 232)  # the producer of a dynamic walk needs more than 24 registers
_A = AttentionChoice
ATTENTION_CHOICES: dict[str, AttentionChoice] = {
    choice.name: choice
    for choice in (
        _A("128x128"),
        _A("128x128-together", turns=False),
        _A("128x128-ahead", launch=AHEAD),
        _A("128x128-ahead-together", turns=False, launch=AHEAD),
        _A("128x176-together", (128, 176), turns=False, launch=ONE_Q),
        _A("128x128-draw16", registers=WIDE, launch=_draw(16)),
        _A("128x128-draw16-together", turns=False, registers=WIDE, launch=_draw(16)),
        _A("192x128-ahead", (192, 128), 3, launch=AHEAD),
        _A("128x128-ahead-together-lazy", turns=False, launch=AHEAD, slack=8.0),
        _A("128x128-ahead-together-apart", turns=False, launch=AHEAD, apart=True),
        _A("128x176-together-apart", (128, 176), 2, False, launch=ONE_Q, apart=True),
        _A("128x128-draw16-together-apart", (128, 128), 2, False, WIDE, _draw(16), apart=True),
        _A("128x176-apart", (128, 176), launch=ONE_Q, apart=True),
        _A("128x128-draw16-apart", registers=WIDE, launch=_draw(16), apart=True),
        _A("192x128-ahead-apart", (192, 128), 3, launch=AHEAD, apart=True),
        _A("192x128-ahead-apart-fma1", (192, 128), 3, launch=AHEAD | FMA1, apart=True),
        _A("192x128-ahead-apart-fma2", (192, 128), 3, launch=AHEAD | FMA2, apart=True),
        _A("192x128-ahead-serial-apart", (192, 128), 3, launch=AHEAD, apart=True, serial=True),
        _A("192x160-serial-apart", (192, 160), launch=AHEAD, apart=True, serial=True),
        _A("192x192-serial-apart", (192, 192), launch=AHEAD, apart=True, serial=True),
        _A("192x192-serial", (192, 192), launch=AHEAD, serial=True),
        _A("128x192-ahead-apart", (128, 192), launch=AHEAD, apart=True),
        _A("192x128-snake", (192, 128), 3, launch=SNAKE),
        _A("192x128-snake-apart", (192, 128), 3, launch=SNAKE, apart=True),
        _A("192x128-snake-apart-fma1", (192, 128), 3, launch=SNAKE | FMA1, apart=True),
        _A("192x128-snake-apart-fma2", (192, 128), 3, launch=SNAKE | FMA2, apart=True),
        _A("192x128-snake-serial-apart", (192, 128), 3, launch=SNAKE, apart=True, serial=True),
        _A(
            "192x192-snake-serial-apart",
            (192, 192),
            launch=SNAKE,
            allow=("spills", "stack"),
            apart=True,
            serial=True,
        ),
        _A("192x128-ahead1-serial-apart", (192, 128), launch=ONE_Q, apart=True, serial=True),
        _A(
            "192x128-snake1-serial-apart",
            (192, 128),
            launch=SNAKE | ONE_Q,
            apart=True,
            serial=True,
        ),
        _A("192x128-draw16", (192, 128), 3, launch=_draw(16)),
        _A("128x128-draw16-fma1", registers=WIDE, launch=_draw(16, **FMA1)),
        _A("128x128-draw16-serial", registers=WIDE, launch=_draw(16), serial=True),
        _A("128x64-pair-serial", (128, 64), 2, False, PAIR, _draw(16, **TWO), serial=True),
        _A("128x64-grid-pair-serial", (128, 64), 2, False, PAIR, GRID | TWO, serial=True),
        _A("256x64-snake", (256, 64), 3, launch=SNAKE),
        _A("256x96-snake-serial", (256, 96), 2, launch=SNAKE, serial=True),
        _A("128x224-ahead-together", (128, 224), turns=False, launch=AHEAD),
        _A("128x64", (128, 64), launch=ONE_Q),
        _A("128x64-together", (128, 64), turns=False, launch=ONE_Q),
        _A("128x64-draw16-together", (128, 64), 2, False, WIDE, _draw(16, **ONE_Q)),
    )
}
# (head sizes up to, causal, rows up to) -> variant; the first row that fits
ATTENTION_TABLE: tuple[tuple[int, bool, float, str], ...] = (
    (64, False, float("inf"), "192x128-ahead"),
    (64, True, 1024, "128x128-draw16"),
    (64, True, float("inf"), "192x128-snake-apart"),
    (128, False, 4096, "128x128-ahead-together-apart"),
    (128, False, float("inf"), "128x176-together-apart"),
    (128, True, 2048, "128x128-draw16-together"),
    (128, True, float("inf"), "128x128-draw16-together-apart"),
    (256, False, float("inf"), "128x64"),
    (256, True, float("inf"), "128x64"),
)


def choose_attention(rows: int, base: AttentionConfig | None = None) -> AttentionChoice:
    """The table's variant for that many query rows; raises when no head size fits."""
    config = base or AttentionConfig()
    for head_dim, causal, longest, name in ATTENTION_TABLE:
        if config.head_dim <= head_dim and config.causal == causal and rows <= longest:
            return ATTENTION_CHOICES[name]
    raise InputError(f"attention head_dim={config.head_dim}: there are variants up to 256")


def default_attention(
    rows: int, base: AttentionConfig | None = None
) -> tuple[AttentionConfig, KernelSchedule]:
    """(configuration, schedule) for that many query rows."""
    chosen = choose_attention(rows, base)
    config = chosen.config(base or AttentionConfig())
    return config, chosen.schedule(config)
