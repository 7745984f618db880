"""Code for stores through shared memory: when panels are free, written, copied and given back."""

from __future__ import annotations

from dataclasses import replace

from warploom.codegen.analysis.stores import StorePanels, StorePath
from warploom.codegen.cuda.emit_ops import direct_store_lines, wide_store_lines
from warploom.codegen.cuda.emit_panels import panel_lines, transposed_lines
from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.emit_tma import coordinates
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.prelude import BULK_ADD, BULK_PUT, TURN_PASS, TURN_WAIT, tma_store
from warploom.codegen.cuda.tasks import element_of
from warploom.codegen.cuda.values import At, Values, c_index
from warploom.codegen.ir.layout import CHUNK, SWIZZLES
from warploom.codegen.ir.place import Placement
from warploom.tile import Op

Names = dict[str, str]
LEADER = "if (threadIdx.x % 128 == 0)"


PIECE = 2048  # bytes of 8 columns of 64 rows of fp32


def store_of(
    path: StorePath, map_name: str, values: Values, op: Op, names: Names, helpers: dict[str, str]
) -> Store:
    """A store through panels; adds the device functions that it calls to `helpers`."""
    assert op.array is not None and path.panels is not None
    if op.array.fragments:
        helpers["bulk_add"] = BULK_ADD
        if op.turn is not None:
            helpers["bulk_put"] = BULK_PUT
        return _Fragments(path.panels, "", values, op, names)
    kinds = (op.kind, *(["store"] if op.turn is not None else []))
    helpers.update(tma_store(len(op.spans), kind == "store_add") for kind in kinds)
    make = _Ending if path.ends_in_panels else Store
    return make(path.panels, map_name, values, op, names)


def carried_lines(store: Store, helpers: dict[str, str]) -> list[str]:
    """What the warp that copies a group's panels does: wait for them, copy, give them back."""
    before, behind, copies = list[str](), list[str](), store.copies()
    if (turn := store.op.turn) is not None:
        helpers["turn_wait"], helpers["turn_pass"] = TURN_WAIT, TURN_PASS
        count = element_of(turn.counts, turn.at, store.names)
        adders = 1 if store.panels.in_turn else store.values.placement.parts
        number = c_index(turn.number, store.names)
        # While the group makes its part: what the counter says takes long to get here.
        before = [
            f"const int turn = {number} * {adders};  // every group adds its part in turn",
            f"if (lane == 0) turn_wait({count}, turn);",
        ]
        behind = [f"  turn_pass({count});"]
        first = store.beginning().copies()
        copies = ["  if (turn == 0) {", *indent(first), "  } else {", *indent(copies), "  }"]
    room = "" if store.alternates else " + part * 8"  # groups in turn have one, whoever copies
    return [
        *before,
        "barrier_wait(carried_full + part * 8, carried_parity);",
        "carried_parity ^= 1;",
        "__syncwarp();  // or lanes that have not looked yet miss two phases, once they are free",
        "if (lane == 0) {",
        "  fence_async();  // here and not in the group, which it would hold up",
        *copies,
        "  store_commit();",
        "  store_wait_read<0>();",
        f"  barrier_arrive(carried_empty{room});",
        *behind,
        "}",
    ]


def carried_wait(placement: Placement) -> str:
    """Wait until the last copy of a group's panels has read them, or of the one room that groups
    have in turn."""
    own = "" if placement.in_turn else " + part * 8"
    return f"barrier_wait(carried_empty{own}, carried_parity ^ 1);"


def store_lines(store: Store, path: StorePath) -> list[str]:
    """Write a register tile panel by panel to shared memory and start its copy to global memory,
    or where it is carried hand the panels to the warp that does."""
    if path.ends_in_panels:
        return store.lines()
    values, op, names = store.values, store.op, store.names
    local = values.placement.local(op.srcs[0].type)
    # A box cannot end early: the last tile of a range is written from the registers.
    whole: list[str] = []
    for span in op.spans:
        if span.stop is not None:
            first = "0"
            if span.size is not None and span.axis in values.placement.rows:
                first = values.first_row(span.axis, span.size)
            last = f"{first} + {1 if span.size is None else local.size(span.axis)}"
            whole.append(f"{c_index(span.start, names)} + {last} <= {c_index(span.stop, names)}")
    lines = store.handed() if path.carried else store.written() if path.late else store.lines()
    if not whole:
        return lines
    return [
        f"if ({' && '.join(whole)}) {{",
        *indent(lines),
        "} else {",
        *indent((wide_store_lines if path.wide else direct_store_lines)(values, op, names)),
        "}",
    ]


def where_it_has_rows(store: Op, lines: list[str]) -> list[str]:
    """What is done only where a store that ends with a row of the array has rows."""
    (rows,) = (span for span in store.spans if span.stop is not None)
    assert rows.stop is not None
    return [
        "{",
        f"  const int rows_begin = {c_index(rows.start)}, rows_end = {c_index(rows.stop)};",
        "  if (rows_begin < rows_end) {",
        *indent(indent(lines)),
        "  }",
        "}",
    ]


class Store:
    """One store: where its panels are in shared memory, in the tile and in the array."""

    def __init__(
        self, panels: StorePanels, map_name: str, values: Values, op: Op, names: Names
    ) -> None:
        self.panels, self.map, self.values, self.op = panels, map_name, values, op
        self.names = names
        self.slots, self.step = panels.slots, panels.slot_bytes
        self.base = "panels" if panels.in_turn else f"panels + part * {panels.group_bytes}"

    @property
    def alternates(self) -> bool:
        """Whether each group has a warp that copies what it leaves in the one room that groups have
        in turn: while one waits until its copy is complete and passes its turn on, another copies.
        """
        return self.panels.in_turn and self.op.turn is not None

    def beginning(self) -> Store:
        """The same store where nothing has been added before."""
        op = replace(self.op, kind="store")
        return type(self)(self.panels, self.map, self.values, op, self.names)

    def lines(self) -> list[str]:
        """All panels of the tile."""
        return self._at_once() if self.panels.at_once else self._in_turn()

    def handed(self) -> list[str]:
        """All panels, each in its slot, for the warp that copies them (`carried_lines`)."""
        in_turn = self.panels.in_turn
        own = " + part * 8" if not in_turn or self.alternates else ""
        return [
            # In turn the others have waited for the last copy before they met.
            *([] if in_turn else [carried_wait(self.values.placement), "carried_parity ^= 1;"]),
            *self.written(),
            "__syncwarp();",
            f"if (lane == 0) barrier_arrive(carried_full{own});",
        ]

    def copies(self) -> list[str]:
        """The copies of all panels that lie in the array, each from its slot."""
        return [
            f"  if ({self._inside(origin)}) "
            f"{self._copy(f'{self.base} + {number * self.step}', origin)}"
            for number, origin in enumerate(self.panels.origins)
        ]

    def written(self) -> list[str]:
        """All panels, each in its slot."""
        # The branch keeps ptxas from beginning all panels at once, which spills.
        lines: list[str] = []
        for number, origin in enumerate(self.panels.origins):
            panel = [f"const unsigned panel = {self.base} + {number * self.step};"]
            panel += self._panel(origin)
            lines += [f"if ({self._inside(origin)}) {{", *indent(panel), "}"]
        return lines

    def _at_once(self) -> list[str]:
        # Every panel has a slot: all are written between two barriers of the group, and the only
        # wait is for the stores of the task before.
        return [
            f"{LEADER} store_wait_read<0>();",
            self._sync(),
            *self.written(),
            "fence_async();",
            self._sync(),
            *self.sent(),
            *(
                line
                for number, origin in enumerate(self.panels.origins)
                for line in self._copied(f"{self.base} + {number * self.step}", origin)
            ),
        ]

    def sent(self) -> list[str]:
        """The copies of all panels, which the whole group has written and fenced."""
        return [f"{LEADER} {{", *self.copies(), "  store_commit();", "}"]

    def _in_turn(self) -> list[str]:
        # Slots are taken in turn within a task. With up to two, the group synchronises before a
        # panel is written (the store that read its slot must have ended) and after. With more, the
        # barrier that ends the writing of one panel also says that the slot of the next is free: a
        # store less is under way, and half of the barriers are gone.
        # A panel outside of the array is left out, its barrier is not: the count of stores would be
        # wrong. The branch also keeps ptxas from beginning panels early, which spills.
        once = self.panels.one_barrier
        lines: list[str] = []
        count = len(self.panels.origins)
        for number, origin in enumerate(self.panels.origins):
            at = f"{self.base} + {number % self.slots * self.step}"
            if not once or not number:
                pending = self.slots - 1 if number else 0
                lines += [f"{LEADER} store_wait_read<{pending}>();", self._sync()]
            lines += [
                f"if ({self._inside(origin)}) {{",
                f"  const unsigned panel = {at};",
                *indent(self._panel(origin)),
                "  fence_async();",
                "}",
            ]
            if once and number + 1 < count:
                lines.append(f"{LEADER} store_wait_read<{self.slots - 2}>();")
            lines += [
                self._sync(),
                f"{LEADER} {{",
                f"  if ({self._inside(origin)}) {self._copy(at, origin)}",
                "  store_commit();",
                "}",
                *self._copied(at, origin),
            ]
        return lines

    def _copied(self, at: str, origin: tuple[int, int]) -> list[str]:
        """What all threads of the group do behind the copy of a panel."""
        del at, origin
        return []

    def _sync(self) -> str:
        return group_sync(self.values.placement.groups)

    def _place(self, origin: tuple[int, int]) -> tuple[str, str]:
        """Row and column of a panel in the whole tile, as C++."""
        kind = self.op.srcs[0].type
        split = 1 if self.panels.transposed else 0  # the array's dimension over the register rows
        first = self.values.first_row(kind.names[split], kind.shape[split])
        text = [str(at) for at in origin]
        if first != "0":
            text[split] = first if text[split] == "0" else f"{first} + {text[split]}"
        return text[0], text[1]

    def _inside(self, origin: tuple[int, int]) -> str:
        op = self.op
        assert op.array is not None
        row, col = self._place(origin)
        checks = [
            f"{c_index(op.spans[-1].start, self.names)} + {col} < {c_name(op.array.dims[-1])}"
        ]
        spanned = [d for d, span in enumerate(op.spans) if span.size is not None]
        if self.panels.transposed:
            start = c_index(op.spans[spanned[0]].start, self.names)
            checks.append(f"{start} + {row} < {c_name(op.array.dims[spanned[0]])}")
        # The copy engine traps on a box that ends before its array begins.
        tile = self.panels.tile
        for dim, place, extent in ((spanned[0], row, tile.rows), (spanned[-1], col, tile.cols)):
            if op.spans[dim].start.signed:
                checks.append(
                    f"{c_index(op.spans[dim].start, self.names)} + {place} + {extent} > 0"
                )
        return " && ".join(dict.fromkeys(checks))

    def _copy(self, at: str, origin: tuple[int, int]) -> str:
        where = coordinates(self.op.spans, self.names, *self._place(origin))
        call, _ = tma_store(len(self.op.spans), self.op.kind == "store_add")
        return f"{call}(&{self.map}, {at}, {where});"

    def _panel(self, origin: tuple[int, int]) -> list[str]:
        lines = transposed_lines if self.panels.transposed else panel_lines
        return lines(self.values, self.op, self.panels, origin, self.names)


class _Fragments(Store):
    """A store as the registers hold the tile: four elements of a thread behind those of the thread
    before, in one piece for the group."""

    def written(self) -> list[str]:
        kind = self.values.placement.local(self.op.srcs[0].type)
        source, groups = self.op.srcs[0], kind.shape[1] // 8
        four = [
            self.values.element(source, At("tile", i=f"4 * j + {n}"), self.names) for n in range(4)
        ]
        return [
            "#pragma unroll",
            f"for (int t = 0; t < {self.values.blocks(source.type)}; ++t)",
            "#pragma unroll",
            f"  for (int j = 0; j < {groups}; ++j)",
            f"    store_shared_quad({self.base} + (t * {groups} + j) * {PIECE} + "
            f"threadIdx.x % 128 * 16, {', '.join(four)});",
        ]

    def copies(self) -> list[str]:
        """One copy of all that the group has written."""
        op = self.op
        whole = op.srcs[0].type
        kind = self.values.placement.local(whole)
        array, size = op.array, kind.shape[0] * kind.shape[1]
        assert array is not None
        first = c_index(op.spans[-2].start, self.names)
        first += f" + {self.values.first_row(kind.names[0], whole.shape[0])}"
        starts = [span.start for span in op.spans[:-2]]
        place = [
            f"static_cast<long long>({c_index(start, self.names)}) * {array.name}_stride{dim}"
            for dim, start in enumerate(starts)
        ]
        if kind.shape[1] < whole.shape[1]:  # a group has some columns of all rows
            place.append(f"part * {size}")
        to = " + ".join([f"{array.name}_data", *place, f"({first}) * {whole.shape[1]}"])
        call = "bulk_add" if op.kind == "store_add" else "bulk_put"
        return [f"  {call}({to}, {self.base}, {4 * size});"]


class _Ending(Store):
    """A transposed store that ends with a row of the array: panels beyond it are left out, and
    the one that it lies in is copied from shared memory by the threads of the group, row by row, as
    a box cannot end early."""

    def lines(self) -> list[str]:
        return where_it_has_rows(self.op, super().lines())

    def _inside(self, origin: tuple[int, int]) -> str:
        return f"{super()._inside(origin)} && rows_begin + {origin[0]} < rows_end"

    def _copied(self, at: str, origin: tuple[int, int]) -> list[str]:
        tile, array = self.panels.tile, self.op.array
        assert array is not None
        row, col = self._place(origin)
        pieces = tile.width // CHUNK
        place = [span.start for span in self.op.spans]
        first = element_of(array, place, self.names)
        return [
            f"if ({self._inside(origin)} && rows_begin + {row} + {tile.rows} > rows_end) {{",
            f"  for (int p = threadIdx.x % 128; p < {tile.rows * pieces}; p += 128) {{",
            f"    const int r = {row} + p / {pieces}, c = {col} + p % {pieces} * {CHUNK // 2};",
            f"    const unsigned from = p * {CHUNK};",
            f"    if (rows_begin + r < rows_end && "
            f"{c_index(place[-1], self.names)} + c < {c_name(array.dims[-1])})",
            f"      copy_16_bytes({first} + r * {array.name}_stride{len(place) - 2} + c, "
            f"{at} + (from ^ (from >> 3 & {SWIZZLES[tile.width][0]:#x})));",
            "  }",
            "}",
        ]

    def _copy(self, at: str, origin: tuple[int, int]) -> str:
        row, _ = self._place(origin)
        whole = f"rows_begin + {row} + {self.panels.tile.rows} <= rows_end"
        return f"if ({whole}) {super()._copy(at, origin)}"
