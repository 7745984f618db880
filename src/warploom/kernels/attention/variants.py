"""A variant of the attention kernel; `variants.toml` has the table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from warploom.autosched.named import multistage, overlapped
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.tables import read_variants


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

    def schedule(self, config: AttentionConfig) -> KernelSchedule:
        """FlashAttention-3's pipeline under this launch plan; longest rows first when causal."""
        # Packed sequences: the table of tasks has the longest first.
        reverse = ("rows_tile",) if config.causal and not config.packed else ()
        launch = LaunchPlan(
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


ATTENTION_CHOICES = read_variants(Path(__file__).with_name("variants.toml"), AttentionChoice)
