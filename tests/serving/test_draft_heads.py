"""Draft heads (EAGLE-3, DFlash, DSpark): their passes, weights and memory, the same everywhere."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import fastroof
from fastroof import SpeculativeDecoding, compile_plan
from fastroof.cli import app
from fastroof.compiled import mean_steps, steps, verification
from fastroof.errors import ModelError, PlanError
from fastroof.evidence.speculative_flags import DraftFlags, draft_flags, split_drafts
from fastroof.models import load_model
from fastroof.models.draft_heads import method_of
from fastroof.plan.speculation import speculated
from fastroof.serving import estimate
from fastroof.simulation.drafts import Drafting
from fastroof.sweep import recommend_for_spec

K, H, KV = 4, 4096, 2 * 8 * 128
_HEADS = {"hidden_size": H, "num_attention_heads": 32, "num_key_value_heads": 8}
# sgl-project/SpecForge (MIT): configs/qwen3-8b-dflash.json at b3d2401f, qwen3-8b-dspark.json at 4e3f4555
_QWEN3 = {
    "model_type": "qwen3", "intermediate_size": 12288, "head_dim": 128, "num_hidden_layers": 5, **_HEADS,
    "max_position_embeddings": 40960, "vocab_size": 151936, "architectures": ["DFlashDraftModel"],
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "intermediate_size": 14336, "num_hidden_layers": 1, **_HEADS,
    "max_position_embeddings": 131072, "vocab_size": 128256,
}  # fmt: skip
_KV_DTYPES = ("int8_per_token_head", "bf16")
FILES = {
    # as vllm-project/speculators writes it: three hidden states, 32,000 tokens
    "eagle3": {
        "speculators_model_type": "eagle3", "draft_vocab_size": 32000, "transformer_layer_config": _LLAMA,
    },
    "dflash": _QWEN3,
    "dspark": {
        **_QWEN3, "architectures": ["DSparkDraftModel"],
        "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "markov_rank": 256},
    },
}  # fmt: skip
TARGETS = {"eagle3": "llama-3.1-8b", "dflash": "qwen3-8b", "dspark": "qwen3-8b"}
# tokens of a request in the first pass and in later ones, how many later ones, and rows of their LM head
PASSES = {"eagle3": (1 + K, 1, K - 1, 1), "dflash": (0, 1 + K, 1, K), "dspark": (0, K, 1, K)}
# weights without the target's embedding and LM head; DFlash's keys and values are there twice
LAYER = H * (H + KV) + H * H + 3 * H * 12288
WEIGHTS = {
    "eagle3": 2 * H * (H + KV) + H * H + 3 * H * 14336 + 3 * H * H + 32000 * H,
    "dflash": 5 * (LAYER + H * H + KV * H),
    "dspark": 5 * (LAYER + H * H + KV * H) + 2 * 151936 * 256,
}


@pytest.fixture(params=FILES)
def case(request, tmp_path, h100):
    """A method, its target's plan, the folder of its file, and the speculation."""
    method, folder = request.param, tmp_path / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FILES[method]), encoding="utf-8")
    plan = compile_plan(TARGETS[method], "h100", h100, engine="vllm")
    head = compile_plan(str(folder), "h100", h100, engine="vllm")
    return method, plan, str(folder), SpeculativeDecoding(K, 2.5, head)


def test_a_draft_head_runs_its_passes(case, h100):
    method, plan, path, speculation = case
    joined, drafted = (
        compile_plan(path, "h100", h100, engine="kernels"),
        speculated(plan, speculation).draft,
    )
    alone = compile_plan(drafted.model, "h100", h100, engine="kernels", allow_modelled=True)
    found = speculated(plan, SpeculativeDecoding(K, 2.5, joined))
    (first, later, more, rows), batch, kv = PASSES[method], 8, 3000

    def head_us(of, count):
        return of.arena[int(of.arena[steps.LOGITS_AT]) + count]

    def pass_us(tokens, with_head):
        us = alone.verify_us(batch, kv + tokens - 1, tokens)
        return us - head_us(alone, batch * tokens) + head_us(alone, batch * with_head)

    expected = more * pass_us(later, rows) + (pass_us(first, 1) if first else 0.0)
    # the Markov head, one token after another
    expected += K * (head_us(joined, batch) - head_us(alone, batch))
    of_plan = verification.open_speculation(found.arena, steps.open_plan(found.arena))
    sums = mean_steps.ChunkSums(0.0, 0.0, 0.0, 0.0), mean_steps.NO_SUMS
    # half-way through K tokens the kv_len is K / 2 higher
    got = mean_steps.drafting_us(
        found.arena, of_plan, float(batch), batch * (kv - 0.5 * K), *sums, float(batch)
    )
    assert got == pytest.approx(expected, rel=2e-3)
    # what joins the target's hidden states is of every token of its step
    at = int(plan.arena[steps.TOKENS_AT])
    assert found.arena[at] == plan.arena[at]
    assert (found.arena[at + 1 : at + 8193] > plan.arena[at + 1 : at + 8193]).all()


def test_a_quantised_draft_head_has_its_method_and_any_cache(tmp_path, h100):
    block_scales = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_QWEN3, "quantization_config": block_scales}), encoding="utf-8")
    assert method_of(load_model(str(path))) == "dflash"
    plans = [compile_plan(str(path), "h100", h100, engine="vllm", kv_dtype=kv) for kv in _KV_DTYPES]
    assert plans[0].decode_us(8, 3000) < plans[1].decode_us(8, 3000)


def test_fit_starts_a_draft_head_on_its_own_gpus(case, h100):
    _, plan, path, _ = case
    head = compile_plan(path, "h100", h100, tp=2, engine="vllm")
    found = fastroof.serving.fit(plan.model.name, "h100", tp=4, num_draft_tokens=K, draft=head)
    assert '"draft_tensor_parallel_size": 2' in found.command.shell()


def test_a_draft_head_takes_its_weights_and_cache(case, h100):
    method, plan, _, speculation = case
    found, kv_bytes = speculated(plan, speculation), 2 * FILES["dflash"]["num_hidden_layers"] * KV
    kv_bytes = 2 * KV if method == "eagle3" else kv_bytes
    memory = found.memory()
    assert memory.weight_bytes - plan.memory.weight_bytes == pytest.approx(2 * WEIGHTS[method], rel=1e-4)
    assert memory.kv_bytes_per_token == plan.memory.kv_bytes_per_token + kv_bytes
    # vLLM 0.33: num_lookahead_tokens
    ahead = Drafting.of_plan(plan, speculation).lookahead(is_mixed=True, reserves_output=False)
    assert ahead == K + (method == "dflash")
    other = compile_plan("llama-3.2-1b", "h100", h100, engine="vllm")
    with pytest.raises(PlanError, match=r"of 4,096 numbers, and those of llama-3\.2-1b have 2,048: use a"):
        speculated(other, speculation)


@pytest.mark.slow
def test_every_command_answers_alike(case):
    method, plan, path, speculation = case
    target, room = TARGETS[method], speculated(plan, speculation)
    load = fastroof.Workload(clients=16, requests=200, isl=1000, osl=200).trace()
    simulated = fastroof.simulate(plan, load, speculation=speculation)
    seen = estimate(plan, 1000, 200, 16, speculation=speculation)
    assert simulated.summary()["tpot_ms"]["mean"] == pytest.approx(seen.tpot_ms, rel=0.03)
    words = f"serving --model {target} --isl 1000 --osl 200 --clients 16 --num-draft-tokens {K} --json"
    answer = CliRunner().invoke(app, [*words.split(), "--accepted", "2.5", "--draft", path])
    assert json.loads(answer.stdout)["rows"][0]["tpot_ms"] == pytest.approx(seen.tpot_ms, rel=1e-9)
    fitted = fastroof.fit(target, "h100", engine="vllm", num_draft_tokens=K, draft=path)
    limits = {name: getattr(fitted, name) for name in ("max_num_batched_tokens", "max_num_seqs")}
    assert fitted.memory == room.memory(**limits)
    spec = {"models": target, "tp": [1], "isl": 1000, "osl": 200, "clients": [16], "max_num_seqs": 256}
    spec["speculation"] = {"num_draft_tokens": K, "accepted": 2.5, "draft": path}
    best = recommend_for_spec({**spec, "engine": "vllm"}, percentile=None).deployments[0]
    row = best.choice.row
    limits = {name: row[name] for name in limits}
    steady = {"requests_per_client": "steady", "speculation": speculation}
    one = estimate(plan, 1000, 200, 16, **steady, **limits)
    assert row["tpot_ms"] == pytest.approx(one.tpot_ms, rel=1e-9)
    assert row["max_kv_tokens"] == room.memory(**limits).max_kv_tokens
    config = json.dumps({"method": method, "num_speculative_tokens": K, "model": path})
    assert f"--speculative-config {config}" in " ".join(best.servers["server"].words())
    flags = split_drafts("runs", [("--speculative-config", config)])[1]
    assert draft_flags("runs", "vllm", flags) == DraftFlags(K, path)
    best = recommend_for_spec({**spec, "engine": "sglang"}, percentile=None).deployments[0]
    flags = " ".join(best.servers["server"].words())
    assert f"--speculative-algorithm {method.upper()} --speculative-draft-model-path {path} " in flags
    assert f"--speculative-num-draft-tokens {K + 1}" in flags


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "medusa"}, "drafts by medusa are not modelled; valid: eagle3, dflash"),
        ({"markov_rank": -1, "architectures": ["Qwen3DSparkModel"]}, "field markov_rank must be"),
        ({"num_experts": 8}, "num_experts 8 means experts"),
    ],
)
def test_other_heads_are_refused_in_one_line(change, message):
    with pytest.raises(ModelError, match=message):
        load_model({**_QWEN3, **change})
