"""Variants of the attention kernel; `tuned.toml` has the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from warploom.autosched.named import multistage, overlapped
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import task_table
from warploom.kernels.tuned.table import Sizes, Table
from warploom.perf.launch_time import Launch

HEAD_DIMS = (64, 96, 128, 256)  # the records of the next larger one hold for a head size
# Head sizes between that build with the variants of 256. Below, tiles made for the next larger size
# spill (16, 32, 224 causal) or do not fit shared memory (80).
LARGE_HEADS = range(129, 209)
FITS_ALL = "128x64"  # its tile and rings fit with every head size
MANY = 512  # batch * heads where the caller does not say
Lengths = int | Sequence[int]  # of one sequence, or of packed ones


@dataclass(frozen=True)
class AttentionChoice:
    """A variant: tile, schedule, launch plan, and how a block's scores are weighed.

    tile            (rows, keys) of a task's block of scores
    depth           slots of the rings of keys and values
    pingpong        the compute groups take turns with the tensor core
    serial          a group waits for its matmuls before it goes on, so that scores and weights
                    share registers and a tile may be wider; meanwhile the other groups keep the
                    tensor core busy. Without ping-pong
    registers       (producer, consumer) a thread, where the usual split does not fit
    tile_scheduler  how persistent blocks share the tasks (`plan.LaunchPlan`)
    heads           tasks are taken over so many heads at a time, whose keys stay in the L2 cache;
                    0: head after head
    query_slots     slots of the ring of queries: with 2 those of the next task are loaded early
    store           "tma" through panels, "direct" from registers, or "queries": through the slot
                    of the queries, so that every byte of shared memory is left for rings
    store_panels    panels that a group may have in flight to global memory
    overlap_next_task, early_release, resident  as in `plan.LaunchPlan`
    split_mask_loop, rescale_threshold, optimistic_threshold, cluster_m  as in `AttentionConfig`;
                    a threshold of the configuration is kept where the variant has none
    early_rescale   sums are rescaled beside the product with the next keys, before the values are
                    added
    allow           what the compiler may do: positions in rings spilled once a task, none inside a
                    loop
    """

    name: str
    tile: tuple[int, int]
    depth: int = 2
    pingpong: bool = True
    serial: bool = False
    registers: tuple[int, int] | None = None
    tile_scheduler: str = "static"
    heads: int = 0
    query_slots: int = 1
    store: str = "tma"
    store_panels: int = 1
    overlap_next_task: bool = False
    early_release: bool = False
    resident: int = 1
    split_mask_loop: bool = False
    early_rescale: bool = False
    rescale_threshold: float = 0.0
    optimistic_threshold: float = 0.0
    cluster_m: int = 1
    allow: tuple[str, ...] = ()

    def takes(self, base: AttentionConfig) -> bool:
        """Whether there is a kernel of this variant for a configuration."""
        if base.exact and (self.optimistic_threshold or self.rescale_threshold):
            return False
        if base.narrow:
            # Fragments of 32 keys; results are wider than queries; weights saturate.
            unfit = self.optimistic_threshold or self.store == "queries"
            return self.tile[1] % 32 == 0 and not unfit
        # The first block of a window has no key for some rows, whose warps then weigh the next
        # one twice: optimistic rescaling gets 0.97 of the same tile's rate.
        windowed = base.window is not None and self.optimistic_threshold
        paired = base.packed and self.cluster_m > 1
        return not ((base.rescale_threshold and self.optimistic_threshold) or windowed or paired)

    def config(self, base: AttentionConfig) -> AttentionConfig:
        """`base` with this tile and this way to weigh a block."""
        return replace(
            base,
            tile=self.tile,
            split_mask_loop=self.split_mask_loop and base.window is None,
            rescale_threshold=self.rescale_threshold or base.rescale_threshold,
            cluster_m=self.cluster_m,
            optimistic_threshold=self.optimistic_threshold,
        )

    def plan(self, config: AttentionConfig) -> LaunchPlan:
        """How the grid is laid over the GPU; longest rows first when causal."""
        # Packed sequences: the table of tasks has the longest first.
        reverse = ("rows_tile",) if config.causal and not config.packed else ()
        return LaunchPlan(
            split="rows",
            cluster=("rows_tile", self.cluster_m) if self.cluster_m > 1 else ("", 1),
            supergroup=self.heads,
            grouped="all" if self.heads else "row",
            reverse=reverse,
            tile_scheduler=self.tile_scheduler,
            store="direct" if self.store == "direct" else "tma",
            store_panels=self.store_panels,
            store_over="q_t" if self.store == "queries" else "",
            task_rings={"q_t": self.query_slots},
            skip_unit=config.rescale_threshold > 0 or config.optimistic_threshold > 0,
            skip_voted=config.optimistic_threshold > 0,
            overlap_next_task=self.overlap_next_task,
            early_release=self.early_release,
            resident=self.resident,
        )

    def schedule(self, config: AttentionConfig) -> KernelSchedule:
        """FlashAttention-3's pipeline under this launch plan."""
        launch = self.plan(config)
        program, groups = attention(config), self.tile[0] // 64
        if self.serial:
            return multistage(program, self.depth, launch, groups, 0, self.registers)
        return overlapped(
            program,
            self.depth,
            launch,
            groups,
            self.pingpong,
            self.registers,
            early_rescale=self.early_rescale,
        )

    def launch(self, config: AttentionConfig, sizes: Sizes, gpu: str) -> Launch:
        """Of `heads` (of the whole batch), `rows` and `keys`; packed: lengths, and heads of one."""
        rows, keys, heads = sizes["rows"], sizes["keys"], sizes["heads"]
        dims = {"heads": heads, "kv_heads": heads // config.group, "d": config.head_dim, "one": 1}
        program, plan = _program(config), self.plan(config)
        if not config.packed:
            dense = {**dims, "batch": 1, "rows": rows, "keys": keys}
            return Launch(program, plan, dense, gpu)
        tiles = task_table(rows, keys, config.tile[0])
        bounds = {name: np.cumsum([0, *of]) for name, of in (("row", rows), ("key", keys))}
        dims |= {f"{name}_tokens": int(of[-1]) for name, of in bounds.items()}
        dims |= {"tasks": len(tiles), "pair": 2, "bounds": len(rows) + 1}
        arrays = {"tiles": tiles, **{f"{name}_bounds": of for name, of in bounds.items()}}
        return Launch(program, plan, dims, gpu, arrays)


_program = lru_cache(maxsize=256)(attention)


def kinds(config: AttentionConfig) -> Sequence[str]:
    """Packed or not, element width, head size, mask; then those that are like it."""
    fitting = [d for d in HEAD_DIMS if config.head_dim <= d]
    if not fitting:
        raise InputError(f"attention head_dim={config.head_dim}: there are variants up to 256")
    dense = f"{fitting[0]} {'causal' if config.causal else 'full'}"
    narrow = ["8-bit "] if config.narrow else []
    packed = ["packed "] if config.packed else []
    leads = [*(lead + wide for lead in packed for wide in narrow), *narrow, *packed, ""]
    return [lead + dense for lead in leads]


ATTENTION = Table(Path(__file__).with_name("tuned.toml"), AttentionChoice, kinds, FITS_ALL)


def _builds(choice: AttentionChoice, config: AttentionConfig) -> bool:
    """Whether the variant's kernel for the configuration does not spill."""
    known = config.head_dim in HEAD_DIMS or config.head_dim in LARGE_HEADS
    # Two loops with optimistic rescaling leave no registers for where a sequence lies (76 B at 128
    # full).
    crowded = config.packed and choice.split_mask_loop and choice.optimistic_threshold > 0
    return known and not crowded


@lru_cache(maxsize=1024)
def _chosen(config: AttentionConfig, rows: Lengths, keys: Lengths, heads: int) -> AttentionChoice:
    sizes = {"heads": heads, "rows": rows, "keys": keys}
    return ATTENTION.choose(config, sizes, lambda choice: _builds(choice, config))


def choose_attention(
    rows: Lengths,
    base: AttentionConfig | None = None,
    keys: Lengths | None = None,
    heads: int = MANY,
) -> AttentionChoice:
    """The variant for a shape; raises where no head size fits.

    `heads` counts the heads of the whole batch; `keys` is `rows` unless given. For packed sequences
    give the lengths of all, and the heads of one.
    """
    config = base or AttentionConfig()
    rows, keys = (
        ((x,) if config.packed else x) if isinstance(x, int) else tuple(x)
        for x in (rows, rows if keys is None else keys)
    )
    return _chosen(config, rows, keys, heads)
