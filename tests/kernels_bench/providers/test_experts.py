"""Experts: inputs, the naive reference, and vLLM's fused experts: a stand-in, and its own layers."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")

from kernels_bench.protocol import Point  # noqa: E402
from kernels_bench.providers import experts as drawn  # noqa: E402
from kernels_bench.providers.device import Device  # noqa: E402
from kernels_bench.providers.experts import ExpertLayer, ExpertSets  # noqa: E402
from kernels_bench.providers.random_inputs import spread_scales  # noqa: E402
from kernels_bench.providers.vllm_experts import BuiltExperts, prepare_vllm_experts  # noqa: E402
from kernels_bench.providers.vllm_provider import VllmProvider  # noqa: E402
from kernels_bench.run.check import check_result, error_bound, relative_error  # noqa: E402

HOST = Device("cpu", 400_000, (9, 0))
LAYER = {
    "dtype": "bf16", "hidden": 256, "intermediate": 256, "topk": 2, "num_experts": 8, "moe_tp": 2,
    "moe_ep": 1, "distribution": "balanced",
}  # fmt: skip


def point(num_tokens, **changes):
    return Point("moe", {**LAYER, **changes, "num_tokens": num_tokens})


class TestSets:
    def test_weights_are_shared_where_they_exceed_the_l2_and_turns_sweep_them(self):
        one_expert = 3 * 256 * 128 * 2
        sets = ExpertSets.make(point(1), Device("cpu", 300_000, rotation=2.0), 0, 10**9)
        assert len(sets.weights) == 1
        assert sets.num_sets == 2 * 300_000 // (2 * one_expert + 256 * 4 + 16) + 1
        seen = [set(sets.experts[i].ravel().tolist()) for i in range(sets.num_sets)]
        assert len(set.union(*seen)) == 2 * sets.num_sets, "no expert comes again before all others were"

    def test_small_weights_are_several(self):
        sets = ExpertSets.make(point(1), Device("cpu", 9 * 3 * 256 * 128 * 2, rotation=2.0), 0, 10**9)
        assert len(sets.weights) == 3
        assert (sets.weights_of(0).gate_up != sets.weights_of(1).gate_up).any()
        assert sets.rotated_bytes > 2 * 9 * 3 * 256 * 128 * 2

    def test_one_set_where_a_call_takes_all_there_is(self):
        sets = ExpertSets.make(point(64), Device("cpu", 100_000, rotation=2.0), 0, 10**9)
        assert sets.num_sets == 1

    def test_what_does_not_fit_is_a_memory_error(self):
        with pytest.raises(MemoryError):
            ExpertSets.make(point(64), HOST, 0, 10**5)

    def test_experts_elsewhere_stay_where_they_are(self):
        sets = ExpertSets.make(point(9, moe_ep=2, distribution="power_law_1.2"), HOST, 0, 10**9)
        layer = ExpertLayer.of(point(9, moe_ep=2))
        assert sets.weights_of(0).gate_up.shape == (4, 256, 256)
        assert sets.expert_map.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
        away = sets.experts >= layer.num_local
        assert (sets.experts[:, away[0]] == sets.experts[0][away[0]]).all()
        counts = np.bincount(sets.experts[0].ravel().numpy(), minlength=8).reshape(2, 4).sum(axis=1)
        assert counts[0] == counts.max()


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp8_block"])
@pytest.mark.parametrize("gate_first", [True, False])
def test_the_reference_is_a_loop_over_tokens_and_experts(dtype, gate_first):
    wanted = point(5, dtype=dtype, moe_ep=2)
    sets = ExpertSets.make(wanted, HOST, 3, 10**9, is_gate_first=gate_first)
    calls = sets.calls("none", lambda index: sets.x[index], 0)
    weights = sets.weights_of(1)
    gate_up, down = (
        weight.double() if scale is None
        else weight.double() * (
            scale.double()[:, None, None] if scale.ndim == 1 else spread_scales(scale, 128, *weight.shape[1:])
        )
        for weight, scale in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale))
    )  # fmt: skip
    want = np.zeros((5, 256))
    for token in range(5):
        for expert, share in zip(sets.experts[1, token], sets.expert_weights[1, token], strict=True):
            if expert >= 4:
                continue
            halves = (gate_up[expert] @ sets.x[1, token].double()).chunk(2)
            gate, up = halves if gate_first else halves[::-1]
            middle = gate / (1 + torch.exp(-gate)) * up
            want[token] += float(share) * (down[expert] @ middle).numpy()
    checked = sets._checked(0).numpy()
    np.testing.assert_allclose(calls.reference(1), want[checked], rtol=1e-9, atol=1e-12)
    assert sets.expert_weights.sum(dim=-1).numpy() == pytest.approx(1)


# -- vLLM --------------------------------------------------------------------------------------------


def quantised(x, scale, block_shape):
    """As vLLM's: static per tensor, or a scale for 128 elements of a row."""
    if block_shape is None:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    groups = x.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def fused_experts(
    hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map, quant_config
):
    assert hidden_states.is_contiguous()
    assert hidden_states.dtype == torch.bfloat16
    assert topk_ids.dtype == torch.int32
    assert topk_weights.dtype == torch.float32
    assert topk_weights.shape == topk_ids.shape
    assert hidden_states.shape[1] == w1.shape[2] == w2.shape[1]
    assert w1.shape[1] == 2 * w2.shape[2]
    config = quant_config or {}
    if expert_map is not None:
        assert expert_map.dtype == torch.int32
        assert expert_map.shape == (global_num_experts,)
    if config:
        block = config["block_shape"]
        (w1, w2), x = (
            (
                w.float() * (spread_scales(s, 128, *w.shape[1:]) if block else s[:, None, None])
                for w, s in ((w1, config["w1_scale"]), (w2, config["w2_scale"]))
            ),
            quantised(hidden_states, config["a1_scale"], block),
        )
        assert block in (None, [128, 128])
        assert (config["a1_scale"] is None) == (config["a2_scale"] is None) == bool(block)
    else:
        w1, w2, x = w1.float(), w2.float(), hidden_states.float()
    out = torch.zeros(hidden_states.shape)
    for token, slot in np.ndindex(*topk_ids.shape):
        expert = int(topk_ids[token, slot])
        expert = expert if expert_map is None else int(expert_map[expert])
        if expert < 0:
            continue
        gate, up = (w1[expert] @ x[token]).chunk(2)
        middle = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        if config:
            middle = quantised(middle, config["a2_scale"], block)
        out[token] += topk_weights[token, slot] * (w2[expert] @ middle.float()).to(torch.bfloat16)
    return out.to(torch.bfloat16)


def stand_in(sets, weights, change=lambda **given: given):
    """A layer in plain torch that computes as vLLM's does; ``change`` makes mistakes."""
    config = {} if weights.down_scale is None else {
        "w1_scale": weights.gate_up_scale, "w2_scale": weights.down_scale, "a1_scale": sets.x_scale,
        "a2_scale": sets.gated_scale, "block_shape": [128, 128] if weights.down_scale.ndim > 1 else None,
    }  # fmt: skip

    def apply(x, shares, ids):
        given = change(w1=weights.gate_up, topk_weights=shares, topk_ids=ids, quant_config=dict(config))
        layer = {"global_num_experts": sets.layer.num_experts, "expert_map": sets.expert_map}
        return fused_experts(x, w2=weights.down, **given, **layer)

    return BuiltExperts("stand-in", apply)


POINTS = [
    point(1),
    point(17, distribution="power_law_1.2"),
    point(17, moe_ep=4, distribution="power_law_1.01"),
    point(9, dtype="fp8"),
    point(9, dtype="fp8", moe_ep=2),
    point(9, dtype="fp8_block"),
    point(9, dtype="fp8_block", moe_ep=2, distribution="power_law_1.2"),
]


@pytest.mark.parametrize("wanted", POINTS, ids=lambda p: p.key[:70])
def test_a_layer_of_the_experts_gives_the_reference(wanted):
    provider = VllmProvider(HOST, stand_in)
    assert provider.refuses(wanted) is None
    prepared = provider.prepare(wanted, 2, 10**9)
    check = check_result(wanted, prepared)
    assert check.passed
    if wanted.values["dtype"] == "bf16":
        assert "bf16" in prepared.kernel
    else:
        # both operands of two GEMMs are rounded, and those of the reference are the rounded weights
        assert 1e-2 < check.error < 0.7 * error_bound(wanted)
        assert "fp8" in prepared.kernel


@pytest.mark.parametrize("dtype", ["fp8", "fp8_block"])
def test_weights_that_are_drawn_in_parts_are_whole(dtype, monkeypatch):
    monkeypatch.setattr(drawn, "DRAWN_AT_ONCE", 3 * 256 * 256)  # three of eight experts at once
    wanted = point(9, dtype=dtype)
    assert check_result(wanted, VllmProvider(HOST, stand_in).prepare(wanted, 2, 10**9)).passed


@pytest.mark.parametrize("wrong", ["experts", "shares", "scale", "gate"])
def test_what_a_wrong_call_would_compute_fails_the_check(wrong):
    wanted = point(17, dtype="fp8_block")

    def mistaken(w1, topk_weights, topk_ids, quant_config):
        if wrong == "experts":
            topk_ids = (topk_ids + 1) % 8
        elif wrong == "shares":
            topk_weights = torch.full_like(topk_weights, 0.5)
        elif wrong == "gate":
            w1 = _rolled(w1)
        else:
            quant_config["w1_scale"] = quant_config["w1_scale"].roll(1, dims=2)
        return {"w1": w1, "topk_weights": topk_weights, "topk_ids": topk_ids, "quant_config": quant_config}

    def build(sets, weights):
        return stand_in(sets, weights, mistaken)

    assert not check_result(wanted, prepare_vllm_experts(wanted, build, HOST, 0, 10**9)).passed


def _rolled(weight):
    return weight.view(torch.uint8).roll(weight.shape[1] // 2, dims=1).view(weight.dtype)


def test_sets_are_each_computed_from_their_own_inputs():
    prepared = prepare_vllm_experts(point(1), stand_in, HOST, 0, 2 * 10**9)
    assert prepared.num_sets > 1
    for index in range(prepared.num_sets):
        prepared.run(index)
        assert relative_error(prepared.result(index), prepared.reference(index)) < 1e-2
    assert relative_error(prepared.result(0), prepared.reference(1)) > 0.5


def test_refusals():
    provider = VllmProvider(HOST, stand_in)
    assert "blocks of 128" in provider.refuses(point(1, dtype="fp8_block", intermediate=320))
    assert "no nvfp4" in provider.refuses(point(1, dtype="nvfp4"))
    assert "8.9" in VllmProvider(Device("cuda", 0, (8, 0)), stand_in).refuses(point(1, dtype="fp8"))
    if importlib.util.find_spec("vllm") is None:
        assert "not installed" in VllmProvider(HOST).refuses(point(1))


@pytest.mark.slow
def test_vllms_oracle_chooses_on_a_hopper_card():
    """Builds vLLM's layers with a stand-in H100 as platform, where vLLM's Python is there."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("flashinfer") is None:
        pytest.skip("vllm and flashinfer are not both installed")
    layers = [
        ["moe", point(9, moe_tp=1, dtype=d, moe_ep=ep).values] for d in ("bf16", "fp8_block") for ep in (1, 2)
    ]
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": 0}
    decode = ["attention_decode", {**heads, "kv_dtype": "bf16", "batch_size": 4, "kv_len": 100}]
    linear = [["gemm", {"dtype": dtype, "m": 17, "n": 256, "k": 512}] for dtype in ("fp8", "fp8_block")]
    kinds = ("rmsnorm_residual", "rope", "silu_and_mul", "fp8_quantise")
    small = [
        ["elementwise", {"kind": kind, "m": m, "width": 512, "io_bytes": 1}] for kind in kinds for m in (1, 9)
    ]
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels_bench.providers.vllm_on_h100"],
        input=json.dumps([*layers, *linear, *small, decode]), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    *found, attention = json.loads(run.stdout.splitlines()[-1])
    assert attention == [None, "FlashAttentionBackend", 3]
    kernels, errors, bounds = zip(*found, strict=True)
    names = [kernel.split()[1].strip(",") for kernel in kernels]
    assert names[:4] == ["TritonExperts", "TritonExperts", "TritonExperts", "FlashInferExperts"]
    assert all(name.startswith("Cutlass") for name in names[4:6]), "DeepGEMM's library is not there"
    assert ["inductor" in kernel for kernel in kernels[4:]] == [True, False] + [True] * len(small)
    assert names[6::2] == ["RMSNorm", "RotaryEmbedding", "SiluAndMul", "QuantFP8"]
    assert all(np.array(errors) < bounds)
