"""The training claim: its row says what the runs were, and refuses losses that part."""

import pytest

from bench import attention_training as claim
from warploom.errors import CheckFailed

torch = pytest.importorskip("torch")


def run(losses, rate):
    return {"losses": losses, "tokens_per_second": rate}


def found(ours):
    runs = {
        claim.OURS: [run([2.0, ours], 110.0), run([2.0, ours], 121.0)],
        claim.TORCH: [run([2.0, 1.001], 100.0), run([2.0, 1.0], 100.0)],
        claim.AGAIN: [run([2.0, 1.0], 100.0), run([2.0, 1.001], 101.0)],
    }
    where = dict.fromkeys(("shape", "device", "driver", "torch", "date", "command"), "here")
    return {"runs": runs, **where}


def test_the_row_compares_tokens_and_losses():
    row = claim.row(found(1.0))
    assert row.ratio_to_best == pytest.approx((1.1 * 1.21) ** 0.5) and row.ci95 == (1.1, 1.21)
    assert row.control == (1.0, 1.01) and row.samples == 2
    with pytest.raises(CheckFailed, match="our loss ends"):
        claim.row(found(1.1))


def test_the_curves_are_drawn():
    drawing = claim.plot(found(1.0)["runs"])
    assert drawing.count("<polyline") == 2 and drawing.endswith("</svg>\n")


def test_the_example_learns_the_same_from_the_same_seed():
    made = claim.example()
    small = "--device cpu --batch 2 --rows 32 --width 32 --heads 2 --depth 1 --steps 4".split()
    options = made.arguments(small)
    first, second = (made.train(made.of_torch, options.steps, options) for _ in range(2))
    assert first["losses"] == second["losses"] and len(first["losses"]) == 4
    text = made.sums(100, torch.Generator().manual_seed(1))
    a, rest = text.split(";")[0].split("+")
    b, c = rest.split("=")
    assert len(text) == 100 and int(a) + int(b) == int(c)
