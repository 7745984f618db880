"""What each operation of the language means: traced, interpreted, compared with numpy."""

import numpy as np
import pytest

from warploom import tile as t
from warploom.errors import InputError

RNG = np.random.default_rng(7)
X = RNG.normal(size=(6, 10)).astype(np.float32)
Y = RNG.normal(size=(6, 10)).astype(np.float32)


def run(function, out="m n", dtype=t.FP32, **extra):
    """Trace `function(x, y)` on one 8x12 tile with tails and give the stored array."""
    arrays = {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m n"), "z": t.array(dtype, out)}

    def body(x, y, z):
        rows, cols = t.span(0, 8), t.span(0, 12)
        result = function(t.load(x, rows, cols), t.load(y, rows, cols))
        where = [{"m": rows, "n": cols}[dim] for dim in out.split()]
        t.store(z, *where, tile=result)

    program = t.trace(body, arrays)
    shape = [{"m": 6, "n": 10}[dim] for dim in out.split()]
    values = {"x": X, "y": Y, "z": np.full(shape, np.nan, np.float32), **extra}
    return t.interpret(program, values)["z"]


MAPS = {
    "exp": (t.exp, np.exp), "exp2": (t.exp2, np.exp2), "abs": (abs, np.abs),
    "tanh": (t.tanh, np.tanh), "relu": (t.relu, lambda x: np.maximum(x, 0)),
    "neg": (lambda x: -x, np.negative), "sin": (t.sin, np.sin), "cos": (t.cos, np.cos),
    "sigmoid": (t.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "sqrt": (lambda x: t.sqrt(abs(x)), lambda x: np.sqrt(np.abs(x))),
    "rsqrt": (lambda x: t.rsqrt(abs(x)), lambda x: 1 / np.sqrt(np.abs(x))),
    "log": (lambda x: t.log(abs(x)), lambda x: np.log(np.abs(x))),
    "log2": (lambda x: t.log2(abs(x)), lambda x: np.log2(np.abs(x))),
    "leaky": (t.leaky_relu, lambda x: np.where(x > 0, x, 0.01 * x)),
    "minus": (lambda x: 1.0 - x, lambda x: 1 - x), "over": (lambda x: 2.0 / x, lambda x: 2 / x),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_maps(name):
    ours, numpy = MAPS[name]
    np.testing.assert_allclose(run(lambda x, y: ours(x)), numpy(X), rtol=2e-6)


def test_binary_operators_and_where():
    got = run(lambda x, y: t.where((x < y) & ~(x > 0.5), x * y - 1.0, t.maximum(x, y) / 2.0))
    np.testing.assert_allclose(
        got, np.where((X < Y) & ~(X > 0.5), X * Y - 1, np.maximum(X, Y) / 2), rtol=1e-6
    )


def test_reductions_and_broadcasts_by_axis_name():
    def body(x, y):
        x[:] = t.where(t.coordinate("n", 12) < t.size("n"), x, -np.inf)
        x -= t.max_along(x, "n")
        e = t.exp(x)
        return e / t.sum_along(e, "n")

    e = np.exp(X - X.max(1, keepdims=True))
    np.testing.assert_allclose(run(body), e / e.sum(1, keepdims=True), rtol=1e-5)


def test_column_reductions_scan_argmax_and_products():
    inside = X[:6]
    padded = np.zeros((8, 12), np.float32)
    padded[:6, :10] = inside
    np.testing.assert_allclose(run(lambda x, y: t.sum_along(x, "m"), "n"), X.sum(0), rtol=1e-5)
    np.testing.assert_allclose(run(lambda x, y: t.min_along(x, "n"), "m"), padded.min(1)[:6])
    np.testing.assert_allclose(
        run(lambda x, y: t.product_along(x + 2.0, "n"), "m"), np.prod(padded[:6] + 2, 1), rtol=1e-5
    )
    np.testing.assert_allclose(run(lambda x, y: t.cumsum(x, "n")), np.cumsum(X, 1), rtol=1e-5)
    got = run(lambda x, y: t.argmax_along(x, "n"), "m", t.INT32)
    assert got.tolist() == padded[:6].argmax(1).tolist()


def test_gather_and_sub_tiles():
    picked = run(lambda x, y: t.gather(x, 11 - t.coordinate("n", 12), "n"))
    padded = np.zeros((8, 12), np.float32)
    padded[:6, :10] = X
    assert np.array_equal(picked, padded[:6, ::-1][:, :10])
    got = run(lambda x, y: x * t.sum_along(x.sub("n", 2, 4), "n"))
    np.testing.assert_allclose(got, X * X[:, 2:6].sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("a", ["m k", "k m"])
@pytest.mark.parametrize("b", ["k n", "n k"])
def test_the_four_matmuls_come_from_axis_names(a, b):
    def body(a, b, c):
        pick = {"m": t.span(0, 8), "n": t.span(0, 8), "k": t.span(0, 16)}
        left = t.load(a, *[pick[d] for d in a.dims])
        right = t.load(b, *[pick[d] for d in b.dims])
        t.store(c, pick["m"], pick["n"], tile=left @ right)

    arrays = {"a": t.array(t.BF16, a), "b": t.array(t.BF16, b), "c": t.array(t.FP32, "m n")}
    x = RNG.integers(-4, 5, size=(5, 9)).astype(np.float32)
    y = RNG.integers(-4, 5, size=(9, 7)).astype(np.float32)
    values = {
        "a": x if a == "m k" else x.T, "b": y if b == "k n" else y.T, "c": np.zeros((5, 7)),
    }  # fmt: skip
    got = t.interpret(t.trace(body, arrays), values)["c"]
    assert np.array_equal(got, x @ y)


def test_complex_pairs():
    def body(x, y):
        u, v = t.Complex(x, y), t.Complex(y, x)
        w = u * v.conj() + u - v
        return w.re + w.im

    u, v = X + 1j * Y, Y + 1j * X
    w = u * np.conj(v) + u - v
    np.testing.assert_allclose(run(body), w.real + w.imag, rtol=1e-4, atol=1e-5)


def test_complex_quotients_exponentials_and_transposes():
    def body(x, y):
        u, v = t.Complex(x, y), t.Complex(y + 3.0, x)
        w = (u / v).exp().T.T.copy()
        return w.re - w.im

    w = np.exp((X + 1j * Y) / (Y + 3.0 + 1j * X))
    np.testing.assert_allclose(run(body), w.real - w.imag, rtol=1e-4, atol=1e-5)


def test_complex_parts_have_one_type():
    with pytest.raises(InputError, match="both parts have one type"):
        run(lambda x, y: t.Complex(x, y.cast(t.BF16)).re)


def test_masks_by_coordinates():
    rows, cols = t.coordinate, t.coordinate
    got = run(lambda x, y: t.causal(rows("m", 8), cols("n", 12), x, 5.0))
    assert np.array_equal(got, np.where(np.arange(10) <= np.arange(6)[:, None], X, 5.0))
    got = run(lambda x, y: t.where(x.differs(y), x, 1.0))
    assert np.array_equal(got, X)


def test_rounding_happens_at_the_cast_and_only_there():
    got = run(lambda x, y: (x.cast(t.BF16) * y.cast(t.BF16)).cast(t.FP32))
    x, y = t.round_to(t.BF16, X), t.round_to(t.BF16, Y)
    assert np.array_equal(got, t.round_to(t.BF16, x * y))


def test_stores_add_and_drop_what_is_outside():
    def body(x, z):
        for i in t.loop(2):
            t.store(z, t.span(i * 3, 4), tile=t.load(x, t.span(i * 3, 4)), add=True)

    arrays = {"x": t.array(t.FP32, "m"), "z": t.array(t.FP32, "m")}
    got = t.interpret(t.trace(body, arrays), {"x": np.arange(5.0), "z": np.ones(5)})["z"]
    assert got.tolist() == [1, 2, 3, 7, 5]


ERRORS = {
    "axes": (lambda x, y: x @ y, "contracts the one axis both have"),
    "types": (lambda x, y: x + y.cast(t.BF16), "element types differ"),
    "bool": (lambda x, y: x if x > y else y, "cannot decide an if"),
    "reduce": (lambda x, y: t.sum_along(x, "k"), "no axis 'k'"),
    "slice": (lambda x, y: x.sub("n", 8, 8), "leaves"),
    "order": (lambda x, y: x + x.T, "different order"),
    "assign": (lambda x, y: x.assign(t.sum_along(x, "n")), "cannot be assigned"),
    "number": (lambda x, y: x @ 3, "@ of int 3: expected a tile"),
    "string": (lambda x, y: x + "s", "add of str 's': expected a tile or a number"),
    "function": (lambda x, y: t.exp(3.0), "exp of float 3.0: expected a tile"),
    "equality": (lambda x, y: x == y, "use x.equals"),
    "part": (lambda x, y: x[0], r"x\.sub\(axis"),
    "sequence": (lambda x, y: sum(x), "not a sequence"),
    "power": (lambda x, y: x**0.5, "expected 2, 3 or 4"),
    "size": (lambda x, y: x + t.zeros(m=8.5), "positive whole numbers"),
    "three axes": (lambda x, y: x + t.zeros(m=8, n=12, k=2), "at most two"),
    "dtype": (lambda x, y: x.cast("bf16"), "expected an element type"),
    "span": (lambda x, y: t.load(y, t.span(0, t.size("m"))), "span of Index m elements"),
    "position": (lambda x, y: x + t.number(t.size("m") * 0.5), "index float 0.5"),
    "tuple": (lambda x, y: x + t.number(t.grid(m=4)), r"\(i,\) = grid"),
    "half": (lambda x, y: x + t.number(t.size("m") / 2), "use // or cdiv"),
    "if": (lambda x, y: x if t.size("m") > 2 else y, "not known while tracing"),
    "range": (lambda x, y: next(x for _ in range(t.size("m"))), "for i in loop"),
    "conditions": (lambda x, y: t.sum_along(x > 0.0, "n"), "cast them to int32"),
    "array": (lambda x, y: t.load(x, 0), "is no array parameter"),
    "cdiv": (lambda x, y: x + t.number(t.cdiv(t.size("m"), 0)), "must be a positive number"),
    "zero": (lambda x, y: x + t.number(t.size("m") // 0), "divides by zero"),
    "index power": (lambda x, y: x + t.number(t.size("m") ** 2), "have no powers"),
    "half of an int": (lambda x, y: t.where(x.cast(t.INT32) > 0.5, x, y), "0.5 beside int32"),
    "large int": (lambda x, y: t.full(2**40, t.INT32, m=8), "32-bit whole number"),
    "large": (lambda x, y: x + 1e300, "fp32 holds numbers up to"),
    "type of zeros": (lambda x, y: t.zeros("fp32", m=8), "expected an element type"),
    "half a part": (lambda x, y: x.sub("n", 0.5, 2), "sub start float 0.5"),
    "name of an axis": (lambda x, y: t.coordinate("a b", 8), "letters, digits and _"),
    "name of a scalar": (lambda x, y: x * t.scalar("s; exit"), "letters, digits and _"),
    "pair": (lambda x, y: t.Complex(x, 1.0), "complex pair of float 1.0: expected a tile"),
    "pairs": (lambda x, y: t.Complex(x, y) + 1.0, r"expected another Complex\(re, im\)"),
    "meeting": (lambda x, y: t.reduce_scatter(x, 0, 2, "n"), "an index that grid"),
    "reading": (lambda x, y: x + t.number(t.read(x, 0)), "expected an array parameter"),
    "no grid": (lambda x, y: t.grid(m=-1), "expected at least 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_line_of_the_user(name):
    function, message = ERRORS[name]
    with pytest.raises(InputError, match=message) as caught:
        run(function)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tile_of_a_loop_does_not_outlive_it():
    def body(x, z):
        for i in t.loop(2):
            inner = t.load(x, t.span(i, 4))
        t.store(z, t.span(0, 4), tile=inner)

    arrays = {"x": t.array(t.FP32, "m"), "z": t.array(t.FP32, "m")}
    with pytest.raises(InputError, match="made inside a loop that has ended"):
        t.trace(body, arrays)


def test_leaving_a_loop_is_refused():
    def body(x):
        for _ in t.loop(2):
            t.zeros(m=4)
            break

    line = body.__code__.co_firstlineno + 1
    with pytest.raises(InputError, match=f"{__file__}:{line}: .*left by break"):
        t.trace(body, {"x": t.array(t.FP32, "m")})
    for wrong in ("m-1", "a.b c", "m; x"):
        with pytest.raises(InputError, match="letters, digits and _"):
            t.array(t.FP32, wrong)


def test_an_array_where_a_tile_belongs_says_how_to_load_it():
    def body(x, z):
        t.store(z, t.span(0, 4), tile=t.load(x, t.span(0, 4)) + x)

    arrays = {"x": t.array(t.FP32, "m"), "z": t.array(t.FP32, "m")}
    with pytest.raises(InputError, match=r"add of array x: load a tile of it first, load\(x\)"):
        t.trace(body, arrays)
    for wrong in ({"x": 3}, {"x": t.FP32}):
        with pytest.raises(InputError, match="expected array"):
            t.trace(body, wrong)
    with pytest.raises(InputError, match="expected an element type"):
        t.array("bf16", "m")
    with pytest.raises(InputError, match="expected a function"):
        t.trace(3, arrays)


def test_small_powers_and_numpy_numbers():
    got = run(lambda x, y: x**3 + np.float32(2.0) * y + np.int64(1))
    np.testing.assert_allclose(got, X**3 + 2 * Y + 1, rtol=1e-5, atol=1e-6)
