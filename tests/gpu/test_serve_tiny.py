"""examples/serve_tiny.py on a GPU: every token of 40 requests is judged, steps run as a graph.

Kernels follow at once there, as a test of one operator never has them.
"""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("more", [(), ("--rows", "3", "--heads", "16", "--depth", "2")])
def test_no_token_is_wrong(more):
    words = [sys.executable, "examples/serve_tiny.py", "--json", *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["wrong"] == 0 and found["same"] > found["tie"]
