"""`warploom.kernel` without a GPU: the interpreter, shapes on "meta", what is built, refusals."""

import numpy as np
import pytest

import warploom
from warploom import tile as t
from warploom.errors import InputError
from warploom.kernels import UserKernel

torch = pytest.importorskip("torch")
torch_kernel = pytest.importorskip("warploom.integrations.torch_kernel")
torch_program = pytest.importorskip("warploom.integrations.torch_program")


def body(a, b, c, tile: int = t.tunable(128, 64)):
    """c = silu(a b)."""
    i, j = t.grid(m=t.cdiv(t.size("m"), tile), n=t.cdiv(t.size("n"), tile))
    rows, cols = t.span(i * tile, tile), t.span(j * tile, tile)
    total = t.zeros(m=tile, n=tile)
    for k in t.loop(t.cdiv(t.size("k"), 64)):
        part = t.span(k * 64, 64)
        total += t.load(a, rows, part) @ t.load(b, part, cols)
    t.store(c, rows, cols, tile=(t.silu(total) * t.scalar("factor")).cast(c.dtype))


@pytest.fixture
def product():
    return warploom.kernel(a="m k", b="k n", c="m n")(body)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def silu(x):
    return x / (1 + np.exp(-x))


def test_the_interpreter_gives_what_a_call_would(product):
    random = np.random.default_rng(0)
    a, b = random.normal(size=(70, 72)), random.normal(size=(72, 40)) / 8
    got = product.interpret(a, b, factor=2.0, tile=64)
    assert np.allclose(got, 2.0 * silu(a @ b), atol=0.05)
    tensors = [torch.from_numpy(one).bfloat16() for one in (a, b)]
    assert np.array_equal(product.interpret(*tensors, 2.0), product.interpret(a, b, 2.0))
    assert product.__doc__ == "c = silu(a b)."


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_and_sizes_are_those_of_the_tensors(product, dtype):
    made = product(meta(100, 72, dtype=dtype), meta(72, 40, dtype=dtype), 1.0)
    assert made.shape == (100, 40) and made.dtype is dtype
    product(meta(8, 16, dtype=dtype), meta(16, 8, dtype=dtype), factor=2.0)
    assert len(product.operators) == 1
    product(meta(8, 16, dtype=dtype), meta(16, 8, dtype=dtype), 1.0, tile=64)
    assert len(product.operators) == 2


def test_what_a_call_would_launch_is_built_for_its_types(product):
    with torch_program.collecting() as built:
        product(meta(8, 8, dtype=torch.float16), meta(8, 8, dtype=torch.float16), 1.0, tile=64)
        ((_, run, _),) = product.operators.values()
        run(meta(8, 8, dtype=torch.float16), meta(8, 8, dtype=torch.float16), 1.0)
    (made,) = built.values()
    assert {one.dtype for one in made.interface.arrays} == {t.FP16}


def test_it_is_a_kernel_for_the_rest_of_the_package(product):
    kernel = warploom.kernel(UserKernel(product.program, scalars={"factor": 0.5}))
    assert warploom.run(kernel, {"m": 70, "n": 40, "k": 72, "tile": 64}).passed
    assert repr(product) == (
        "kernel body(a: bf16[m, k], b: bf16[k, n], factor: fp32[], tile=128) -> c: bf16[m, n]"
    )
    assert "program body" in product._repr_html_()
    product(meta(8, 8), meta(8, 8), 1.0)  # what is called first is built outside of a graph
    whole = torch.compile(product, fullgraph=True, backend="eager")
    assert whole(meta(9, 8), meta(8, 8), 1.0).shape == (9, 8)


def test_the_table_beside_its_file_is_of_the_declared_types(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(
        "import warploom\nfrom warploom import tile as t\n"
        "@warploom.kernel(x='m n', y='m n')\n"
        "def twice(x, y, rows: int = t.tunable(4, 8)):\n"
        "    (i,) = t.grid(m=t.cdiv(t.size('m'), rows))\n"
        "    here = t.span(i * rows, rows), t.span(0, 64)\n"
        "    t.store(y, *here, tile=(t.load(x, *here) + t.load(x, *here)))\n"
    )
    from warploom.objects import load_object  # noqa: PLC0415

    twice = load_object(f"{path}:twice")
    twice(meta(5, 64))
    (entry,) = twice.entries.values()
    assert entry.table.path == tmp_path / "mine.twice.tuned.toml"
    twice(meta(5, 64, dtype=torch.float16))
    assert list(twice.entries.values())[1].table is None
    assert warploom.run(f"{path}:twice", {"m": 9, "n": 64}).passed


REFUSED = {
    "a is numpy.ndarray, expected a torch tensor on a GPU": lambda f: f(np.ones(3), np.ones(3), 1),
    "body is launched on a GPU, and torch finds none here; body.interpret": lambda f: f(
        torch.zeros(8, 8), torch.zeros(8, 8), 1.0
    ),
    r"body\(a, b, factor\) was called without b": lambda f: f(meta(8, 8)),
    "was called without factor": lambda f: f(meta(8, 8), meta(8, 8)),
    "called with 4 arguments; it gives c": lambda f: f(*[meta(8, 8)] * 3, 1.0),
    "takes no 'tiles', expected one of a, b, factor, tile": lambda f: f(
        meta(8, 8), meta(8, 8), 1.0, tiles=64
    ),
    "b was given twice": lambda f: f(meta(8, 8), meta(8, 8), 1.0, b=meta(8, 8)),
    "dimension 'k' is 8 in one array, 9 in b": lambda f: f(meta(8, 8), meta(9, 8), 1.0),
    "b is float64, expected one of": lambda f: f(meta(8, 8), meta(8, 8, dtype=torch.float64), 1.0),
    "a @ b of bf16.*and fp16": lambda f: f(meta(8, 8), meta(8, 8, dtype=torch.float16), 1.0),
    "a is fp16, it was declared bf16": lambda f: warploom.kernel(f.program())(
        meta(8, 8, dtype=torch.float16), meta(8, 8), 1.0
    ),
    "has no parameter 'd', it has a, b, c, tile": lambda f: warploom.kernel(d="m")(body),
    'array needs its dimensions, kernel..="m n"': lambda f: warploom.kernel(a="m k", b="k n")(body),
    "expected arrays, such as": lambda f: warploom.kernel(),
    "warploom.kernel of int": lambda f: warploom.kernel(3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_said_in_one_line(product, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=message) as found:
        REFUSED[message](product)
    assert len(str(found.value).splitlines()) == 1
