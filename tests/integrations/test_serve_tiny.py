"""examples/serve_tiny.py on PyTorch's operators: every token is judged, and a fault is seen."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
PATH = Path(__file__).parents[2] / "examples" / "serve_tiny.py"
SMALL = (
    "--operators torch --device cpu --requests 4 --rows 2 --width 64 --heads 4 --depth 2 "
    "--prompt 30 --tokens 8 --json"
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("serve_tiny", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_tiny"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serve_tiny"]


def test_tokens_of_a_batch_are_those_of_each_sequence(example, capsys):
    assert example.main(SMALL.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] + found["tie"] == found["tokens"] > 10
    assert found["same"] > found["tie"]
    assert 0 < found["rounding"] < 0.1


def test_a_token_that_sees_one_key_too_few_is_wrong(example, capsys, monkeypatch):
    whole = example.of_torch()

    def short(q, k, v, lengths, table, causal):
        return whole.attend(q, k, v, (lengths - 1).clamp(min=q.shape[1]), table, causal)

    monkeypatch.setattr(example, "of_torch", lambda: replace(whole, attend=short))
    assert example.main(SMALL.split()) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] > 0
