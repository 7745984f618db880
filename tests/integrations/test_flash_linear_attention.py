"""Our kernels as fla's back end, without a GPU: which calls they take, and where those go."""

import pytest

torch = pytest.importorskip("torch")
ours = pytest.importorskip("warploom.integrations.flash_linear_attention")


def make(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="meta", dtype=dtype)


def delta(size=64, **changes):
    rows = 2, 100, 4
    given = {x: make(*rows, size) for x in "qkv"}
    given |= {"g": make(*rows, dtype=torch.float32), "beta": make(*rows)}
    return given | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"scale": 0.5, "output_final_state": True, "chunk_size": 64, "cp_context": None}, None),
        ({"use_qk_l2norm_in_kernel": False, "cu_seqlens": None}, None),
        ({"cu_seqlens": torch.tensor([0, 50, 100])}, "warploom has no cu_seqlens"),
        ({"chunk_size": 32}, "warploom has no chunk_size"),
        ({"use_gate_in_kernel": True, "A_log": make(4)}, "no use_gate_in_kernel, A_log"),
        ({"state_v_first": True}, "warploom has no state_v_first"),
        ({"scale": 0.0}, "expected a number above 0"),
        ({"initial_state": make(2, 4, 64, 64)}, "initial is torch.bfloat16"),
        ({"q": make(2, 100, 4, 64, dtype=torch.float16)}, "expected torch.bfloat16"),
    ],
)
def test_calls_of_the_gated_delta_rule_are_taken_or_refused_with_a_reason(changes, reason):
    taken, why = ours.takes_gated_delta_rule(**delta(**changes))
    assert taken is (reason is None)
    assert reason is None or reason in why
    if taken:
        out, state = ours.gated_delta_rule(**delta(**changes))
        assert out.shape == (2, 100, 4, 64)
        assert (state is not None) is changes.get("output_final_state", False)


def test_gradients_with_long_keys_are_left_to_others():
    given = delta(128)
    assert ours.takes_gated_delta_rule(**given)[0]
    given["k"].requires_grad_()
    assert "keys of up to 64" in ours.takes_gated_delta_rule(**given)[1]
    with torch.no_grad():
        assert ours.takes_gated_delta_rule(**given)[0]


def test_calls_of_simple_gla():
    q, g, gamma = make(2, 100, 4, 64), make(2, 100, 4), make(4, dtype=torch.float32)
    assert ours.takes_simple_gla(q, q, q)[0] and ours.takes_simple_gla(q, q, q, g)[0]
    assert ours.takes_simple_gla(q, q, q, g_gamma=gamma, output_final_state=True)[0]
    assert "not both" in ours.takes_simple_gla(q, q, q, g, gamma)[1]
    assert "no cu_seqlens" in ours.takes_simple_gla(q, q, q, g, cu_seqlens=torch.tensor([0]))[1]
    placed = (q, q, q, g, None, None, None, False)
    assert ours.takes_simple_gla(*placed, None)[0]
    assert "no further arguments" in ours.takes_simple_gla(*placed, torch.tensor([0]))[1]
    assert ours.simple_gla(q, q, q, g)[0].shape == q.shape


def test_fla_sends_its_calls_to_our_kernels(monkeypatch):
    delta_rule = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    simple = pytest.importorskip("fla.ops.simple_gla").fused_chunk_simple_gla
    monkeypatch.setattr(ours, "on_hopper", lambda: True)
    ours.register()
    calls = []
    monkeypatch.setattr(ours.ours, "_operator", lambda *args: calls.append(args) or args[:3])
    delta_rule(**delta())
    q = make(2, 100, 4, 64)
    simple(q, q, q, make(2, 100, 4))
    assert [call[8] is not None for call in calls] == [True, False]
