"""Row operations as tile programs: a task takes some rows whole and keeps them in registers.

All arithmetic is fp32. Where an operation also sums over rows, a task takes many: it keeps a sum
for each column in registers and stores it once, as one of `parts` rows; `column_sums` adds these
up. Both orders of addition are fixed, so results are the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from warploom import tile as t

LOG2E = 1.4426950408889634
SQRT_HALF = 0.7071067811865476
DENSITY = 0.3989422804014327  # of the normal distribution at 0
SUMMED = (32, 32)  # rows and columns that a task of `column_sums` takes at a time
PIECE = 2048  # columns of a task where a row can be cut
SCALED = 4096  # elements that a task of `scaled` takes at a time
LINE = 16  # elements that lines are multiples of at most
IGNORED = -100  # torch's class that a loss leaves out


@dataclass(frozen=True)
class RowConfig:
    """A row operation for rows of so many columns, `rows` of them a task.

    dtype     of rows; `weight` of scales and offsets by column
    options   what the operation has beside its rows: "bias", "residual", "log", "gelu"; "fp8": its
              rows are stored as e4m3 with a scale a row; "dropout": elements of x are left out
              before the residual is added; "again": it loads its rows where it needs
              them again, so that they need not stay in registers; "place": rotated rows are stored
              where they were
    """

    op: str
    columns: int
    rows: int = 1
    dtype: t.DType = t.BF16
    weight: t.DType = t.BF16
    options: frozenset[str] = field(default_factory=frozenset[str])


class Rows:
    """The rows of one task, or `width` columns of them from `column` on: what an operation loads
    and stores, by the arrays' names.

    Where a task takes many rows, `sums` are what it adds up over them and `scales` its columns'.
    """

    def __init__(
        self,
        config: RowConfig,
        arrays: dict[str, t.Array],
        first: t.Index,
        column: t.Index | int = 0,
        sums: dict[str, t.Tile] | None = None,
        scales: t.Tile | None = None,
    ) -> None:
        self.config, self.arrays, self.sums, self.scales = config, arrays, sums or {}, scales
        self.first, self.column, self.width = first, column, width_of(config)
        self.rows, self.cols = t.span(first, config.rows), t.span(column, self.width)

    def __contains__(self, option: str) -> bool:
        return option in self.config.options

    def _ranges(self, name: str) -> tuple[t.Span | int, ...]:
        known = {"m": self.rows, "n": self.cols, "words": 0}
        return tuple(known[dim] for dim in self.arrays[name].dims)

    def get(self, name: str) -> t.Tile:
        """Rows, a number a row or a number a column, in fp32."""
        if name == "w" and self.scales is not None:
            return self.scales
        tile = t.load(self.arrays[name], *self._ranges(name))
        return tile if tile.dtype is t.INT32 else tile.cast(t.FP32)

    def put(self, name: str, tile: t.Tile) -> None:
        """Store rows, or a number a row, in the array's type."""
        target = self.arrays[name]
        t.store(target, *self._ranges(name), tile=tile.cast(target.dtype))

    def put_scaled(self, tile: t.Tile) -> None:
        """Store rows as e4m3 `y` and the number a row, `scale`, that makes them what they were."""
        # A row of zeros keeps a scale that can be divided by.
        scale = t.maximum(t.max_along(abs(tile), "n") * (1.0 / t.E4M3.largest), 1e-12)
        self.put("scale", scale)
        self.put("y", tile * (1.0 / scale))

    def add(self, name: str, tile: t.Tile) -> None:
        """Add rows to what the task sums up for an array of parts."""
        more = t.sum_along(tile, "m") if "again" in self else tile
        self.sums[name].assign(self.sums[name] + more)

    def dropped(self, tile: t.Tile) -> t.Tile:
        """Elements with the probability `p`, by the two words of `seed`, are 0; others grow."""
        rows, columns = t.coordinate("m", self.config.rows, self.first), self.columns
        key, second = (t.load(self.arrays["seed"], word) for word in (0, 1))
        share = t.scalar("p")
        least = (share * 2.0**32 - 2.0**31).cast(t.INT32)  # of so many of all words no less
        kept = t.philox(rows, columns, key, second) >= least
        return t.where(kept, tile * (1.0 / (1.0 - share)), 0.0)

    @property
    def columns(self) -> t.Tile:
        """The number of each column."""
        return t.coordinate("n", self.width, self.column)

    def mean(self, tile: t.Tile) -> t.Tile:
        """Along the columns."""
        return t.sum_along(tile, "n") * (1.0 / self.config.columns)


def _norm(rows: Rows, centred: bool) -> None:
    x = rows.get("x")
    x = rows.dropped(x) if "dropout" in rows else x
    if "residual" in rows:
        x = x + rows.get("residual")
        rows.put("summed", x)
    if centred:
        mean = rows.mean(x)
        rows.put("mean", mean)
        x = x - mean
    scale = t.rsqrt(rows.mean(x * x) + t.scalar("eps"))
    rows.put("rstd", scale)
    y = x * scale * rows.get("w")
    y = y + rows.get("b") if "bias" in rows else y
    if "fp8" in rows:
        rows.put_scaled(y)
    else:
        rows.put("y", y)


def _norm_backward(rows: Rows, centred: bool) -> None:
    scale, mean = rows.get("rstd"), rows.get("mean") if centred else None

    def operands() -> tuple[t.Tile, t.Tile, t.Tile]:
        x, grad = rows.get("x"), rows.get("dy")
        return (x if mean is None else x - mean) * scale, grad, grad * rows.get("w")

    x, grad, weighed = operands()
    share = rows.mean(weighed * x)
    mean_share = rows.mean(weighed) if centred else None
    if "again" in rows:
        x, grad, weighed = operands()
    rows.add("dw_parts", grad * x)
    if "bias" in rows:
        rows.add("db_parts", grad)
    dx = weighed - x * share
    dx = (dx if mean_share is None else dx - mean_share) * scale
    dx = dx + rows.get("dsummed") if "residual" in rows else dx
    if "dropout" in rows:
        rows.put("dresidual", dx)
        dx = rows.dropped(dx)
    rows.put("dx", dx)


def _softmax(rows: Rows) -> None:
    x = rows.get("x")
    top = t.max_along(x, "n")
    weights = t.exp2(x * LOG2E - top * LOG2E)
    total = t.sum_along(weights, "n")
    rows.put("y", x - (top + t.log(total)) if "log" in rows else weights * (1.0 / total))


def _softmax_backward(rows: Rows) -> None:
    y, grad = rows.get("y"), rows.get("dy")
    if "log" in rows:
        rows.put("dx", grad - t.exp(y) * t.sum_along(grad, "n"))
    else:
        rows.put("dx", y * (grad - t.sum_along(grad * y, "n")))


def _of_class(rows: Rows) -> tuple[t.Tile, t.Tile]:
    """Which element of a row is its class', and whether the row counts."""
    target = rows.get("target")
    columns = rows.columns
    return target.equals(columns), target.differs(t.full(IGNORED, t.INT32))


def _cross_entropy(rows: Rows) -> None:
    x, (own, counts) = rows.get("x"), _of_class(rows)
    chosen = t.sum_along(t.where(own, x, 0.0), "n")
    top = t.max_along(x, "n")
    lse = top + t.log(t.sum_along(t.exp2(x * LOG2E - top * LOG2E), "n"))
    rows.put("lse", lse)
    rows.put("loss", t.where(counts, lse - chosen, 0.0))


def _cross_entropy_backward(rows: Rows) -> None:
    x, (own, counts) = rows.get("x"), _of_class(rows)
    weights = t.exp2(x * LOG2E - rows.get("lse") * LOG2E)
    rows.put("dx", t.where(own, weights - 1.0, weights) * t.where(counts, rows.get("dloss"), 0.0))


def _cross_entropy_both(rows: Rows) -> None:
    """The loss, and its gradient in the place of the logits."""
    x, (own, counts) = rows.get("x"), _of_class(rows)
    chosen = t.sum_along(t.where(own, x, 0.0), "n")
    top = t.max_along(x, "n")
    weights = t.exp2(x * LOG2E - top * LOG2E)
    total = t.sum_along(weights, "n")
    rows.put("loss", t.where(counts, top + t.log(total) - chosen, 0.0))
    scale = t.where(counts, rows.get("dloss"), 0.0)
    rows.put("x", weights * (scale / total) - t.where(own, scale, 0.0))


def _gated(rows: Rows) -> None:
    gate, up = rows.get("gate"), rows.get("up")
    if "gelu" in rows:
        rows.put("y", gate * up * 0.5 * (t.erf(gate * SQRT_HALF) + 1.0))
    else:
        rows.put("y", gate * t.sigmoid(gate) * up)


def _gated_backward(rows: Rows) -> None:
    gate, up, grad = rows.get("gate"), rows.get("up"), rows.get("dy")
    if "gelu" in rows:
        share = (t.erf(gate * SQRT_HALF) + 1.0) * 0.5
        slope = share + gate * t.exp(gate * gate * -0.5) * DENSITY
    else:
        share = t.sigmoid(gate)
        slope = share * (gate * (1.0 - share) + 1.0)
    rows.put("dup", grad * gate * share)
    rows.put("dgate", grad * up * slope)


def _quantised(rows: Rows) -> None:
    rows.put_scaled(rows.get("x"))


@dataclass(frozen=True)
class RowOp:
    """An operation.

    arrays    as "name:type dims": types `x` and `w` are the configuration's, `y` the rows' or e4m3,
              dimensions m, n, p, k and s rows, columns, parts, words and two seeds: of a class the
              first word counts, so that tensors of 64 bits are read as they are
    body      what a task does
    optional  arrays that go with an option
    pointwise whether the columns of a row know nothing of each other: a task takes some of them
    in_place  whether results are stored over what was loaded: no operator of its own
    """

    arrays: str
    body: Callable[[Rows], None]
    optional: tuple[tuple[str, str], ...] = ()
    pointwise: bool = False
    in_place: bool = False


DROPOUT = "seed:int32 s"
FORWARD = (
    ("residual", "residual:x mn, summed:x mn"), ("bias", "b:w n"), ("dropout", DROPOUT),
    ("fp8", "scale:fp32 m"),
)  # fmt: skip
BACKWARD = (
    ("residual", "dsummed:x mn"), ("bias", "db_parts:fp32 pn"),
    ("dropout", f"{DROPOUT}, dresidual:x mn"),
)  # fmt: skip
OPS: dict[str, RowOp] = {
    "rmsnorm": RowOp(
        "x:x mn, w:w n, y:y mn, rstd:fp32 m", partial(_norm, centred=False), FORWARD
    ),
    "rmsnorm_backward": RowOp(
        "x:x mn, w:w n, dy:x mn, rstd:fp32 m, dx:x mn, dw_parts:fp32 pn",
        partial(_norm_backward, centred=False), BACKWARD,
    ),
    "layernorm": RowOp(
        "x:x mn, w:w n, y:y mn, mean:fp32 m, rstd:fp32 m", partial(_norm, centred=True), FORWARD
    ),
    "layernorm_backward": RowOp(
        "x:x mn, w:w n, dy:x mn, mean:fp32 m, rstd:fp32 m, dx:x mn, dw_parts:fp32 pn",
        partial(_norm_backward, centred=True), BACKWARD,
    ),
    "softmax": RowOp("x:x mn, y:x mn", _softmax),
    "softmax_backward": RowOp("y:x mn, dy:x mn, dx:x mn", _softmax_backward),
    "cross_entropy": RowOp("x:x mn, target:int32 mk, loss:fp32 m, lse:fp32 m", _cross_entropy),
    "cross_entropy_backward": RowOp(
        "x:x mn, target:int32 mk, lse:fp32 m, dloss:fp32 m, dx:x mn", _cross_entropy_backward,
        pointwise=True,
    ),
    "cross_entropy_both": RowOp(
        "x:x mn, target:int32 mk, dloss:fp32 m, loss:fp32 m", _cross_entropy_both, in_place=True
    ),
    "gated": RowOp("gate:x mn, up:x mn, y:x mn", _gated, pointwise=True),
    "gated_backward": RowOp(
        "gate:x mn, up:x mn, dy:x mn, dgate:x mn, dup:x mn", _gated_backward, pointwise=True
    ),
    "quantised": RowOp("x:x mn, y:e4m3 mn, scale:fp32 m", _quantised),
}  # fmt: skip
DIMS = {"m": "m", "n": "n", "p": "parts", "k": "words", "s": "seeds"}


def width_of(config: RowConfig) -> int:
    """Columns of a task: all, or some where that may be and lines stay whole."""
    cut = OPS[config.op].pointwise and config.columns % LINE == 0
    return min(config.columns, PIECE) if cut else config.columns


def row_program(config: RowConfig) -> t.Program:
    """The tile program of a row operation."""
    entry = OPS[config.op]
    texts = [entry.arrays, *(more for option, more in entry.optional if option in config.options)]
    own = {"x": config.dtype, "w": config.weight, "fp32": t.FP32, "int32": t.INT32, "e4m3": t.E4M3}
    own["y"] = t.E4M3 if "fp8" in config.options else config.dtype
    specs: dict[str, t.Array] = {}
    for text in ", ".join(texts).split(", "):
        name, kind, dims = text.replace(":", " ").split()
        specs[name] = t.array(own[kind], " ".join(DIMS[dim] for dim in dims))

    def body(**arrays: t.Array) -> None:
        if any(name.endswith("_parts") for name in arrays):
            _many_rows(config, arrays)
        else:
            width, tasks = width_of(config), t.cdiv(t.size("m"), config.rows)
            i, *j = (
                t.grid(m=tasks, n=t.cdiv(t.size("n"), width))
                if entry.pointwise
                else t.grid(m=tasks)
            )
            entry.body(Rows(config, arrays, i * config.rows, j[0] * width if j else 0))

    return t.trace(body, specs, name=config.op)


def _many_rows(config: RowConfig, arrays: dict[str, t.Array]) -> None:
    """Task p of the parts takes the rows of p, p + parts, ... and adds up over them."""
    (p,) = t.grid(p=t.size("parts"))
    cols, parts = t.span(0, config.columns), t.size("parts")
    scales = None if "again" in config.options else t.load(arrays["w"], cols).cast(t.FP32)
    names = [name for name in arrays if name.endswith("_parts")]
    # Long rows lie in all threads of a block: those of a task have one sum a column together.
    whole = "again" in config.options
    kept = {"n": config.columns} if whole else {"m": config.rows, "n": config.columns}
    sums = {name: t.zeros(t.FP32, **kept) for name in names}
    for i in t.loop((t.cdiv(t.size("m"), config.rows) - p + parts - 1) // parts):
        first = (i * parts + p) * config.rows
        OPS[config.op].body(Rows(config, arrays, first, 0, sums, scales))
    for name, total in sums.items():
        t.store(arrays[name], p, cols, tile=total if whole else t.sum_along(total, "m"))


def rotary(config: RowConfig) -> t.Program:
    """Rotation of `columns` columns of every head by the angles of its row: y, from x [b, m, h, n],
    `rows` heads of one row a task, which lie beside each other. With "place" y is x.

    Column j goes with j + n / 2, or with "pairs" 2 j with 2 j + 1: then x and y are
    [b, m, h, n / 2, 2]. cos and sin are [m, n / 2]; "inverse" turns back.
    """
    dims = "b m h n two" if "pairs" in config.options else "b m h n"
    angles = t.array(config.weight, "m half")
    whole = t.array(config.dtype, dims)
    specs = {"x": whole, "cos": angles, "sin": angles}
    specs |= {} if "place" in config.options else {"y": whole}
    return t.trace(_rotary, specs, name="rotary", config=config)


def _rotary(
    config: RowConfig, x: t.Array, cos: t.Array, sin: t.Array, y: t.Array | None = None
) -> None:
    half = config.columns // 2
    b, i, group = t.grid(b=t.size("b"), m=t.size("m"), h=t.cdiv(t.size("h"), config.rows))
    heads, cols = t.span(group * config.rows, config.rows), t.span(0, half, "half")
    turn, lift = t.load(cos, i, cols).cast(t.FP32), t.load(sin, i, cols).cast(t.FP32)
    lift = -lift if "inverse" in config.options else lift
    pairs = "pairs" in config.options
    first: tuple[t.Span | t.Index | int, ...] = (b, i, heads, cols)
    second = (b, i, heads, cols if pairs else t.span(half, half, "half"))
    if pairs:
        first, second = (*first, 0), (*second, 1)
    left, right = t.load(x, *first).cast(t.FP32), t.load(x, *second).cast(t.FP32)
    y = x if y is None else y
    t.store(y, *first, tile=(left * turn - right * lift).cast(y.dtype))
    t.store(y, *second, tile=(left * lift + right * turn).cast(y.dtype))


def column_sums(dtype: t.DType) -> t.Program:
    """The sum over all parts, a column each, in their order."""
    return t.trace(_column_sums, {"parts_of": t.array(t.FP32, "parts n"), "y": t.array(dtype, "n")},
                 name="column_sums", dtype=dtype)  # fmt: skip


def _column_sums(parts_of: t.Array, y: t.Array, dtype: t.DType) -> None:
    rows, width = SUMMED
    (j,) = t.grid(n=t.cdiv(t.size("n"), width))
    cols = t.span(j * width, width)
    total = t.zeros(parts=rows, n=width)
    for i in t.loop(t.cdiv(t.size("parts"), rows)):
        total += t.load(parts_of, t.span(i * rows, rows), cols)
    t.store(y, cols, tile=t.sum_along(total, "parts").cast(dtype))


def scaled(dtype: t.DType) -> t.Program:
    """x [n] times the number `by`, in place, by as many tasks as `changes` has elements, which are
    1, or 0 where that number is 1: then nothing is read."""
    arrays = {
        "x": t.array(dtype, "n"),
        "by": t.array(t.FP32, "one"),
        "changes": t.array(t.INT32, "parts"),
    }
    return t.trace(_scaled, arrays, name="scaled", dtype=dtype)


def _scaled(x: t.Array, by: t.Array, changes: t.Array, dtype: t.DType) -> None:
    (p,) = t.grid(parts=t.size("parts"))
    parts = t.size("parts")
    pieces = (t.cdiv(t.size("n"), SCALED) - p + parts - 1) // parts
    for i in t.loop(t.read(changes, p) * pieces):
        at = t.span((i * parts + p) * SCALED, SCALED)
        t.store(x, at, tile=(t.load(x, at).cast(t.FP32) * t.load(by, 0)).cast(dtype))
