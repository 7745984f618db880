"""Programs without a matmul, one for each family of ops, with inputs: for CPU and GPU tests."""

import numpy as np

from warploom import tile as t


def _softmax(x, y, n):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 2))
    rows, cols = t.span(i * 2, 2), t.span(0, n)
    a = t.load(x, rows, cols, edge=-np.inf).cast(t.FP32)
    a -= t.max_along(a, "n")
    e = t.exp(a)
    t.store(y, rows, cols, tile=(e / t.sum_along(e, "n")).cast(t.BF16))


def _rmsnorm(x, w, y, n):
    (i,) = t.grid(m=t.size("m"))
    rows, cols = t.span(i, 1), t.span(0, n)
    a = t.load(x, rows, cols).cast(t.FP32)
    mean = t.sum_along(a * a, "n") / t.scalar("count")
    scale = t.rsqrt(mean + t.scalar("eps"))
    t.store(y, rows, cols, tile=(a * scale * t.load(w, cols)).cast(t.BF16))


def _layernorm(x, w, b, y, n):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 4))
    rows, cols = t.span(i * 4, 4), t.span(0, n)
    inside = t.coordinate("n", n) < t.size("n")
    a = t.load(x, rows, cols)
    count = t.scalar("count")
    mean = t.sum_along(a, "n") / count
    c = t.where(inside, a - mean, 0.0)
    var = t.sum_along(c * c, "n") / count
    t.store(y, rows, cols, tile=c * t.rsqrt(var + 1e-5) * t.load(w, cols) + t.load(b, cols))


def _maps(x, y):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 8))
    rows, cols = t.span(i * 8, 8), t.span(0, 12)
    a = t.load(x, rows, cols)
    p = abs(a) + 0.1
    r = t.exp(a) + t.exp2(a) + t.log(p) + t.log2(p) + t.sqrt(p) + t.rsqrt(p) + t.reciprocal(p)
    r += t.tanh(a) + t.erf(a) + t.relu(a) + t.gelu(a) + t.gelu_tanh(a) + t.silu(a) + t.leaky_relu(a)
    r += t.maximum(a, 0.25) - t.minimum(a, -0.25) + (-a) / p
    r += t.sin(a * 1e6) + t.cos(a * 100.0)
    t.store(y, rows, cols, tile=r)


def _rows(x, total, top, low, product):
    rows, cols = t.span(0, 24), t.span(0, 20)
    inside = t.coordinate("m", 24) < t.size("m")
    a = t.load(x, rows, cols)
    t.store(total, cols, tile=t.sum_along(a, "m"))
    t.store(top, cols, tile=t.max_along(t.where(inside, a, -np.inf), "m"))
    t.store(low, cols, tile=t.min_along(t.where(inside, a, np.inf), "m"))
    t.store(product, cols, tile=t.product_along(t.where(inside, a, 1.0) * 0.5 + 1.0, "m"))


def _scans(x, k, y, z, w, v):
    rows, cols = t.span(0, 24), t.span(0, 40)
    a = t.load(x, rows, cols)
    t.store(y, rows, cols, tile=t.cumsum(a, "n"))
    t.store(z, rows, cols, tile=t.cumsum(a, "m"))
    t.store(w, cols, tile=t.cumsum(t.load(k, cols), "n"))
    t.store(v, rows, tile=t.cumsum(t.sum_along(a, "n"), "m"))


def _argmax(x, k, y, z, w, one):
    rows, cols = t.span(0, 24), t.span(0, 40)
    a = t.load(x, rows, cols, edge=-np.inf)
    t.store(y, rows, tile=t.argmax_along(a, "n"))
    t.store(z, cols, tile=t.argmax_along(a, "m"))
    counts = t.load(k, rows, cols)
    t.store(w, rows, tile=t.argmax_along(counts, "n"))
    t.store(one, 0, tile=t.argmax_along(t.max_along(a, "n"), "m"))


def _gathers(x, pick, each, y, z, w):
    rows, cols, out = t.span(0, 12), t.span(0, 20), t.span(0, 16, "n")
    a = t.load(x, rows, cols)
    t.store(y, rows, out, tile=t.gather(a, t.load(pick, out), "n"))
    t.store(z, rows, cols, tile=t.gather(a, t.load(each, rows, cols), "m"))
    t.store(w, out, tile=t.gather(t.load(x, 3, cols), t.load(pick, out), "n"))


def _transposed(x, y, z):
    rows, cols = t.span(0, 24), t.span(0, 20)
    a = t.load(x, rows, cols)
    b = (a - t.sum_along(a, "n") * 0.1).T
    # the row sums stand beside the columns of the transposed tile here
    t.store(y, cols, rows, tile=b + t.max_along(a, "n"))
    t.store(z, rows, cols, tile=b.T)


def _parts(x, y, z):
    rows, cols = t.span(0, 24), t.span(0, 20)
    a = t.load(x, rows, cols)
    t.store(y, t.span(0, 16), t.span(0, 9), tile=a.sub("n", 4, 9).sub("m", 8, 16))
    t.store(z, t.span(0, 5), tile=t.sum_along(a, "n").sub("m", 3, 5))


def _casts(x, eight, five, half, whole, yes, back):
    rows, cols = t.span(0, 8), t.span(0, 40)
    a = t.load(x, rows, cols)
    t.store(eight, rows, cols, tile=a.cast(t.E4M3))
    t.store(five, rows, cols, tile=a.cast(t.E5M2))
    t.store(half, rows, cols, tile=(a.cast(t.BF16) * a.cast(t.BF16) + 1.0).cast(t.FP16))
    t.store(whole, rows, cols, tile=a.cast(t.INT32) * 3 + t.coordinate("n", 40))
    t.store(yes, rows, cols, tile=(a > 0.0) & ~(a > 2.0))
    small = t.load(eight, rows, cols).cast(t.FP32) + t.load(five, rows, cols).cast(t.FP32)
    t.store(back, rows, cols, tile=small + t.load(whole, rows, cols).cast(t.FP32))


def _complex(re, im, y, z):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 16))
    rows, cols = t.span(i * 16, 16), t.span(0, 24)
    u = t.Complex(t.load(re, rows, cols), t.load(im, rows, cols))
    v = u * u.conj() + u * u - u
    t.store(y, rows, cols, tile=v.re)
    t.store(z, rows, cols, tile=v.im)


def _causal(x, y):
    i, j = t.grid(m=t.cdiv(t.size("m"), 16), n=t.cdiv(t.size("n"), 16))
    a = t.load(x, t.span(i * 16, 16), t.span(j * 16, 16))
    rows, cols = t.coordinate("m", 16, i * 16), t.coordinate("n", 16, j * 16)
    near = (rows - cols < 9).cast(t.FP32)
    t.store(y, t.span(i * 16, 16), t.span(j * 16, 16), tile=t.causal(rows, cols, a * near, 7.0))


def _online(x, y, chunk):
    """Softmax in two passes over chunks of a row of any length; the loops nest."""
    (i,) = t.grid(b=t.size("b"))
    for row in t.loop(t.size("m")):
        top, total = t.full(-np.inf, q=1), t.zeros(q=1)
        for j in t.loop(t.cdiv(t.size("n"), chunk)):
            a = t.load(x, i, t.span(row, 1, "q"), t.span(j * chunk, chunk), edge=-np.inf)
            high = t.maximum(top, t.max_along(a, "n"))
            total[:] = total * t.exp(top - high) + t.sum_along(t.exp(a - high), "n")
            top[:] = high
        for j in t.loop(t.cdiv(t.size("n"), chunk)):
            at = (i, t.span(row, 1, "q"), t.span(j * chunk, chunk))
            t.store(y, *at, tile=t.exp(t.load(x, *at) - top) / total)


def _adds(x, y, k):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 8))
    a = t.load(x, t.span(i * 8, 8), t.span(0, 20))
    t.store(y, t.span(0, 20), tile=t.sum_along(a, "m"), add=True)
    t.store(k, 0, tile=t.sum_along(t.sum_along((a > 0.0).cast(t.INT32), "n"), "m"), add=True)


def _line(x, y):
    (i,) = t.grid(n=t.cdiv(t.size("n"), 100))
    here = t.span(i * 100, 100)
    t.store(y, here, tile=t.load(x, here) * 2.0 + 1.0)


def _before(x, y):
    """A window that begins before the array: a convolution over the two elements before."""
    (i,) = t.grid(n=t.cdiv(t.size("n"), 16))
    total = t.zeros(n=16)
    for back in t.loop(3):
        total += t.load(x, t.span(i * 16 - back, 16))
    t.store(y, t.span(i * 16, 16), tile=total)


def _inner(x, y):
    """Tiles whose columns are not neighbours in memory: the last dimension is an index."""
    c, i = t.grid(c=t.size("c"), m=t.cdiv(t.size("m"), 8))
    a = t.load(x, t.span(i * 8, 8), t.span(0, 12), c)
    t.store(y, t.span(i * 8, 8), t.span(0, 12), c, tile=a - t.max_along(a, "n"))


def _array(kind, dims):
    return t.array(kind, dims)


def make(name):
    """(program, arrays, scalars, bound) of one of `PROGRAMS`."""
    random = np.random.default_rng(3)
    return PROGRAMS[name](random)


def _trace(body, arrays, **static):
    return t.trace(body, arrays, name=body.__name__.strip("_"), **static)


def _out(*shape):
    return np.full(shape, np.nan)


F, B = t.FP32, t.BF16


def _with_specials(values):
    values[0, 3], values[1, :], values[2, 5] = np.nan, -np.inf, np.inf
    values[4, 2] = values[4, 9] = 50.0
    return values


PROGRAMS = {
    "softmax": lambda r: (
        _trace(_softmax, {"x": _array(B, "m n"), "y": _array(B, "m n")}, n=1000),
        {"x": r.normal(size=(5, 990)), "y": _out(5, 990)}, {}, 4e-3),
    "rmsnorm": lambda r: (
        _trace(_rmsnorm, {"x": _array(B, "m n"), "w": _array(F, "n"), "y": _array(B, "m n")},
               n=512),
        {"x": r.normal(size=(3, 501)), "w": r.normal(size=501), "y": _out(3, 501)},
        {"count": 501.0, "eps": 1e-6}, 4e-3),
    "layernorm": lambda r: (
        _trace(_layernorm, {"x": _array(F, "m n"), "w": _array(F, "n"), "b": _array(F, "n"),
                            "y": _array(F, "m n")}, n=256),
        {"x": r.normal(size=(6, 250)), "w": r.normal(size=250), "b": r.normal(size=250),
         "y": _out(6, 250)}, {"count": 250.0}, 1e-5),
    "maps": lambda r: (
        _trace(_maps, {"x": _array(F, "m n"), "y": _array(F, "m n")}),
        {"x": r.normal(size=(13, 11)), "y": _out(13, 11)}, {}, 1e-3),
    "rows": lambda r: (
        _trace(_rows, {"x": _array(F, "m n"), **{k: _array(F, "n") for k in
                       ("total", "top", "low", "product")}}),
        {"x": r.normal(size=(21, 19)), **{k: _out(19) for k in
                       ("total", "top", "low", "product")}}, {}, 1e-5),
    "scans": lambda r: (
        _trace(_scans, {"x": _array(F, "m n"), "k": _array(t.INT32, "n"), "y": _array(F, "m n"),
                        "z": _array(F, "m n"), "w": _array(t.INT32, "n"), "v": _array(F, "m")}),
        {"x": r.normal(size=(21, 37)), "k": r.integers(-9, 9, 37), "y": _out(21, 37),
         "z": _out(21, 37), "w": np.zeros(37), "v": _out(21)}, {}, 1e-5),
    "argmax": lambda r: (
        _trace(_argmax, {"x": _array(F, "m n"), "k": _array(t.INT32, "m n"),
                         "y": _array(t.INT32, "m"), "z": _array(t.INT32, "n"),
                         "w": _array(t.INT32, "m"), "one": _array(t.INT32, "q")}),
        {"x": _with_specials(r.normal(size=(21, 37))), "k": r.integers(-3, 3, (21, 37)),
         "y": np.zeros(21), "z": np.zeros(37), "w": np.zeros(21), "one": np.zeros(1)}, {}, 0.0),
    "gathers": lambda r: (
        _trace(_gathers, {"x": _array(F, "m n"), "pick": _array(t.INT32, "p"),
                          "each": _array(t.INT32, "m n"), "y": _array(F, "m p"),
                          "z": _array(F, "m n"), "w": _array(F, "p")}),
        {"x": r.normal(size=(12, 20)), "pick": r.integers(0, 20, 16),
         "each": r.integers(0, 12, (12, 20)), "y": _out(12, 16), "z": _out(12, 20),
         "w": _out(16)}, {}, 0.0),
    "transposed": lambda r: (
        _trace(_transposed, {"x": _array(F, "m n"), "y": _array(F, "n m"), "z": _array(F, "m n")}),
        {"x": r.normal(size=(21, 19)), "y": _out(19, 21), "z": _out(21, 19)}, {}, 1e-6),
    "parts": lambda r: (
        _trace(_parts, {"x": _array(F, "m n"), "y": _array(F, "m n"), "z": _array(F, "m")}),
        {"x": r.normal(size=(24, 20)), "y": _out(24, 20), "z": _out(24)}, {}, 1e-6),
    "casts": lambda r: (
        _trace(_casts, {"x": _array(F, "m n"), "eight": _array(t.E4M3, "m n"),
                        "five": _array(t.E5M2, "m n"), "half": _array(t.FP16, "m n"),
                        "whole": _array(t.INT32, "m n"), "yes": _array(t.BOOL, "m n"),
                        "back": _array(F, "m n")}),
        {"x": r.normal(size=(7, 37)) * np.exp(3 * r.normal(size=(7, 37))),
         **{k: np.zeros((7, 37)) for k in ("eight", "five", "half", "whole", "yes", "back")}},
        {}, 0.0),
    "complex": lambda r: (
        _trace(_complex, {k: _array(F, "m n") for k in ("re", "im", "y", "z")}),
        {"re": r.normal(size=(19, 23)), "im": r.normal(size=(19, 23)), "y": _out(19, 23),
         "z": _out(19, 23)}, {}, 1e-6),
    "causal": lambda r: (
        _trace(_causal, {"x": _array(F, "m n"), "y": _array(F, "m n")}),
        {"x": r.normal(size=(40, 37)), "y": _out(40, 37)}, {}, 0.0),
    "online": lambda r: (
        _trace(_online, {"x": _array(F, "b m n"), "y": _array(F, "b m n")}, chunk=64),
        {"x": r.normal(size=(2, 3, 150)), "y": _out(2, 3, 150)}, {}, 1e-5),
    "adds": lambda r: (
        _trace(_adds, {"x": _array(F, "m n"), "y": _array(F, "n"), "k": _array(t.INT32, "q")}),
        {"x": r.normal(size=(21, 19)), "y": np.ones(19), "k": np.ones(1)}, {}, 1e-5),
    "line": lambda r: (
        _trace(_line, {"x": _array(t.FP16, "n"), "y": _array(t.FP16, "n")}),
        {"x": r.normal(size=250), "y": _out(250)}, {}, 0.0),
    "before": lambda r: (
        _trace(_before, {"x": _array(F, "n"), "y": _array(F, "n")}),
        {"x": r.normal(size=50), "y": _out(50)}, {}, 1e-6),
    "inner": lambda r: (
        _trace(_inner, {"x": _array(F, "m n c"), "y": _array(F, "m n c")}),
        {"x": r.normal(size=(13, 12, 3)), "y": _out(13, 12, 3)}, {}, 1e-6),
    "empty": lambda r: (
        _trace(_softmax, {"x": _array(B, "m n"), "y": _array(B, "m n")}, n=64),
        {"x": np.zeros((0, 30)), "y": np.zeros((0, 30))}, {}, 0.0),
}  # fmt: skip
