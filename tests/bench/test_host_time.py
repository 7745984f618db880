"""The row of the host's time: beside the fastest library, not beside a call that does nothing."""

import pytest

from bench import host_time as claim
from bench import kernel_bench as kb

WHERE = dict.fromkeys(("device", "driver", "date", "command"), "here")


def test_the_row_is_beside_the_fastest_library():
    samples = {
        kb.OURS: [200.0, 210.0, 220.0, 200.0, 210.0, 220.0, 210.0],
        kb.CONTROL: [200.0, 210.0, 220.0, 200.0, 210.0, 220.0, 210.0],
        claim.TORCH: [300.0, 315.0, 330.0, 300.0, 315.0, 330.0, 315.0],
        claim.FA4: [600.0] * 7,
        claim.NOTHING: [100.0] * 7,
    }
    row = claim.row(claim.CASES[0], samples, 0.001, WHERE)
    assert row.ratio_to_best == pytest.approx(1.5) and row.ours == 210.0 and row.better == "lower"
    assert row.baselines == {claim.TORCH: 315.0, claim.FA4: 600.0} and row.control == (1.0, 1.0)
    assert row.checks == {"numerics": "pass", "a function that does nothing": 100.0}
    assert claim.row(claim.CASES[0], samples, 0.5, WHERE).checks["numerics"] == "off by 0.5"
