"""The profile for LLMServingSim v1.0.0: what its reader sums from the files, against the plan's own steps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.backends.llmservingsim import others_us
from fastroof.backends.llmservingsim_v0 import LAYERS, LONGEST, export_llmservingsim_v0
from fastroof.cli import app
from fastroof.errors import BackendError
from tests.backends import test_llmservingsim
from tests.backends.interfaces import recorded
from tests.backends.llmservingsim_v0_reader import (
    BLOCK,
    COLUMNS,
    ENDS,
    Profile,
    decode_key,
    is_decode,
    prefill_key,
)

Step = list[tuple[int, int]]
PLANS = test_llmservingsim.PLANS
LONG = 32_832
"""Beyond the longest of the random steps."""


@pytest.fixture(scope="module", params=PLANS)
def exported(
    request: pytest.FixtureRequest, h100: fastroof.Tables, tmp_path_factory: pytest.TempPathFactory
) -> tuple[fastroof.StepPlan, Profile]:
    plan = fastroof.compile_plan(
        request.param, "h100", h100, **{"runtime": "kernels", **PLANS[request.param]}
    )
    folder = export_llmservingsim_v0(plan, tmp_path_factory.mktemp("models"), longest=LONG).folder
    return plan, Profile(folder, plan.tp)


def steps(plan: fastroof.StepPlan, kind: str, count: int = 200) -> list[Step]:
    """Random steps of a kind: those of a prefix are told apart from those that the simulator schedules."""
    some = test_llmservingsim.steps(plan, kind, count)
    if kind == "mixed":
        return [[(new, context if new == 1 else 0) for new, context in step] for step in some]
    return some


def errors(plan: fastroof.StepPlan, profile: Profile, some: list[Step]) -> np.ndarray:
    own_us = np.array([test_llmservingsim.own_us(plan, step) for step in some])
    return np.array([profile.step_ns(step, plan.model.num_layers) for step in some]) / 1e3 / own_us - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mean", "most"),
    [
        # one row for 64 lengths: at most 32 tokens from its middle, which is much of a short context
        ("equal decodes", 0.005, 0.03),
        ("decodes", 0.003, 0.015),
        # one row for 32 lengths
        ("prompt", 0.007, 0.04),
        # several prompts are one whose square is as large
        ("prompts", 0.007, 0.03),
        ("mixed", 0.005, 0.035),
        # the simulator takes a prompt's context for 0
        ("chunk", 0.06, 0.65),
        ("chunks", 0.12, 0.5),
    ],
)
def test_steps_add_up(
    exported: tuple[fastroof.StepPlan, Profile], kind: str, mean: float, most: float
) -> None:
    found = np.abs(errors(*exported, steps(exported[0], kind)))
    assert found.mean() < mean
    assert found.max() < most


@pytest.mark.parametrize("kind", ["equal decodes", "decodes", "prompt", "prompts", "mixed"])
def test_all_but_attention_is_exact(exported: tuple[fastroof.StepPlan, Profile], kind: str) -> None:
    plan, profile = exported
    layers = plan.model.num_layers
    reduced = {c.operator.role: c for c in plan.row_curves if "allreduce" in c.operator.role}
    for step in steps(plan, kind, 50):
        tokens = sum(new for new, _ in step)
        own_us = float(others_us(plan, tokens, len(step)))
        for curve in reduced.values():
            own_us -= curve.operator.times * float(np.interp(tokens, curve.axis, curve.value))
        others_ns = profile.step_ns(step, layers) - layers * profile.attention_ns(step)
        # half a nanosecond in each of eight operators of a layer and three besides
        assert abs(others_ns - own_us * 1e3) < 0.5 * (8 * layers + 3) + 0.1


def test_attention_is_that_of_the_middle(exported: tuple[fastroof.StepPlan, Profile]) -> None:
    plan, profile = exported
    layers = plan.model.num_layers
    for count, kv_len in ((1, 33), (64, 4065), (256, 16353)):
        key = decode_key([(1, kv_len - 1)] * count)
        assert key == (count, kv_len + 31)
        parts = plan.run(fastroof.StepBatch.from_requests([[(1, kv_len - 1)] * count])).components
        assert abs(profile.decode[key] - parts.decode_attention_us[0] * 1e3 / layers) <= 0.5 + 1e-3
    for new, context in ((16, 0), (1008, 0), (2032, 4064)):
        parts = plan.run(fastroof.StepBatch.from_requests([[(new, context)]])).components
        own_ns = parts.prefill_attention_us[0] * 1e3 / layers
        key = (context + 32 if context else 0, new + 16)
        assert abs(profile.prefill[key] - own_ns) <= 0.5 + 1e-3
        if not context:
            assert key == prefill_key([(new, 0)])
            assert profile.layer_ns("attn", new) == profile.prefill[key]


def test_fused_layers_add_up_to_the_nanosecond(exported: tuple[fastroof.StepPlan, Profile]) -> None:
    plan, profile = exported
    curves = {curve.operator.role: curve for curve in plan.row_curves}
    tokens = np.arange(1, plan.max_tokens + 1)
    for layers, operators in LAYERS.items():
        if len(layers) == 1:
            continue
        parts = [curves[name] for name in operators if name in curves]
        fused_ns = np.rint(sum(np.interp(tokens, part.axis, part.value) for part in parts) * 1e3)
        shares_ns = np.array([[profile.layer_ns(layer, n) for layer in layers] for n in tokens.tolist()])
        assert np.array_equal(shares_ns.sum(axis=1), fused_ns)
        # by the width of their outputs, the first with what is left over
        heads = (plan.heads.num_q_heads, plan.heads.num_kv_heads, plan.heads.num_kv_heads)
        widths = np.array(heads if layers[0] == "q_proj" else (1, 1))
        exact_ns = fused_ns[:, np.newaxis] * widths / widths.sum()
        assert np.abs(shares_ns - exact_ns).max() < len(layers)


def test_every_operator_is_in_a_layer(exported: tuple[fastroof.StepPlan, Profile]) -> None:
    plan, _ = exported
    own = {name for operators in LAYERS.values() for name in operators}
    named = {curve.operator.role for curve in plan.row_curves}
    assert named <= own | {"attention_allreduce", "mlp_allreduce"}
    assert {layer for layers in LAYERS for layer in layers} == {*ENDS, *BLOCK}


@pytest.mark.slow
def test_rows_are_whole_nanoseconds_of_every_size(exported: tuple[fastroof.StepPlan, Profile]) -> None:
    plan, profile = exported
    for name in COLUMNS:
        rows = (profile.folder / name).read_text().splitlines()[1:]
        assert all(re.fullmatch(r"[0-9]+", row.rpartition(",")[2]) for row in rows)
        keys = [row.rpartition(",")[0] for row in rows]
        assert len(set(keys)) == len(keys)
    for layer in (*ENDS, *BLOCK, "attn"):
        last = plan.max_seqs if layer == "lm_head" else plan.max_tokens
        inputs = sorted(rows for name, rows, _, _ in profile.layers if name == layer)
        assert inputs == list(range(1, last + 1))
    lengths, chunks = range(64, LONG + 1, 64), range(32, plan.max_tokens + 1, 32)
    assert profile.decode.keys() == {(n, kv) for n in range(1, plan.max_seqs + 1) for kv in lengths}
    assert profile.prefill.keys() == {(kv, chunk) for kv in (0, *lengths) for chunk in chunks}
    for much in (
        [(plan.max_tokens + 1, 0)], [(1, 100)] * (plan.max_seqs + 1), [(1, LONG)],
    ):  # fmt: skip
        with pytest.raises(KeyError):
            profile.step_ns(much, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mean"), [("decodes", 0.005), ("prompt", 0.01), ("mixed", 0.25)])
def test_a_floor_is_that_of_one_prompt(h100: fastroof.Tables, tmp_path: Path, kind: str, mean: float) -> None:
    """What a prompt lacks to the floor is in its row, and decodes beside it do not take it away."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="trtllm")
    folder = export_llmservingsim_v0(plan, tmp_path, longest=LONG).folder
    found = errors(plan, Profile(folder, 1), steps(plan, kind))
    assert np.abs(found).mean() < mean
    if kind == "mixed":
        assert found.mean() > 0


@pytest.mark.parametrize(("tokens", "seqs"), [(1, 1), (2, 1), (33, 8), (64, 1024)])
def test_small_plans(h100: fastroof.Tables, tmp_path: Path, tokens: int, seqs: int) -> None:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_tokens=tokens, max_seqs=seqs, engine="kernels"
    )
    folder = export_llmservingsim_v0(plan, tmp_path, longest=100).folder
    some: list[Step] = [[(1, 99)], [(tokens, 0)], [(1, 0)]]
    assert np.abs(errors(plan, Profile(folder, 1), some)).max() < 0.03


def test_requests_end_where_the_model_does(h100: fastroof.Tables, tmp_path: Path) -> None:
    plan = fastroof.compile_plan("llama-2-7b", "h100", h100, max_tokens=8192, max_seqs=2, engine="kernels")
    most = plan.model.max_position
    assert most < LONGEST
    profile = Profile(export_llmservingsim_v0(plan, tmp_path).folder, 1)
    assert max(kv for _, kv in profile.decode) == most
    assert profile.step_ns([(1, most - 1), (1, 10)], plan.model.num_layers) > 0
    for longest in (0, most + 1):
        with pytest.raises(BackendError, match=f"requests of 1 to {most} tokens"):
            export_llmservingsim_v0(plan, tmp_path, longest=longest, hardware="other")


def test_a_bundle_of_several_sizes(h100: fastroof.Tables, tmp_path: Path) -> None:
    plans = [
        fastroof.compile_plan(
            "llama-3.1-8b", "h100", h100, tp=tp, max_tokens=512, max_seqs=64, engine="kernels"
        )
        for tp in (2, 1)
    ]
    bundle = export_llmservingsim_v0(plans, tmp_path, hardware="roof", model="my/model", longest=2048)
    assert bundle.folder == tmp_path / "roof" / "my" / "model"
    assert sorted(path.name for path in bundle.folder.iterdir()) == ["tp1", "tp2"]
    for plan in plans:
        some: list[Step] = [[(1, 1007)] * 64, [(496, 0)], [(200, 0), (1, 500)]]
        assert np.abs(errors(plan, Profile(bundle.folder, plan.tp), some)).max() < 5e-3
    assert bundle.rows == sum(len(p.read_text().splitlines()) - 1 for p in bundle.folder.rglob("*.csv"))
    with pytest.raises(BackendError, match="exists: remove it, or name another hardware or model"):
        export_llmservingsim_v0(plans[0], tmp_path, hardware="roof", model="my/model")
    for hardware in ("TPU-v6e-1", "tpu", "myTPU"):
        with pytest.raises(BackendError, match="is a TPU to the simulator"):
            export_llmservingsim_v0(plans, tmp_path, hardware=hardware)
    assert [path.name for path in tmp_path.iterdir()] == ["roof"]


@pytest.mark.slow
def test_the_command_writes_a_profile(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        texts = [f"llama-3.1-8b,tp={tp},max_tokens=64,max_seqs=8" for tp in (1, 2)]
        done = CliRunner().invoke(
            app, ["export", "llmservingsim", *texts, "-o", str(tmp_path), "--format", "v0", *arguments]
        )
        return done.exit_code, done.stdout, done.stderr

    code, out, _ = run("--longest", "256", "--hardware", "roof")
    assert code == 0
    folder = tmp_path / "roof" / "meta-llama" / "Llama-3.1-8B"
    written, limits, missing = out.splitlines()
    rows = sum(len(p.read_text().splitlines()) - 1 for p in folder.rglob("*.csv"))
    named = "llama-3.1-8b (engine vllm), llama-3.1-8b-tp2 (engine vllm)"
    assert written == f"wrote {folder}: {rows} rows of {named}"
    assert limits == "simulate it with --max-num-batched-tokens 64 --max-batch 8 at most"
    assert missing == "not in it: all-reduces: the simulator times them by its network model"
    assert max(kv for _, kv in Profile(folder, 2).decode) == 256
    for words, *arguments in (
        ("--variant is of --format v1.1 and bundle", "--variant", "bf16"),
        ("--longest is of --format v0", "--format", "bundle", "--longest", "256"),
    ):
        code, _, said = run(*arguments)
        assert code == 2
        assert words in said
    assert run("--format", "v1")[0] == 2


def test_the_reader_keys_steps_as_the_simulator_does() -> None:
    """Worked by hand from the scheduler's lists and the generator's key."""
    mixed: Step = [(300, 0), (400, 0), (1, 99), (1, 160)]
    assert decode_key(mixed) == (2, 192)  # (100 + 161) / 2 is 130
    assert prefill_key(mixed) == (0, 512)  # the root of 250 002 is 500
    assert prefill_key([(1, 10)]) == decode_key([(5, 0)]) == (0, 0)
    assert not is_decode((1, 0))


def test_the_stand_in_reads_the_recorded_columns():
    [interface] = [one for one in recorded("llmservingsim") if one.path.startswith("inference_serving/")]
    ours = {f"{name}: {column}" for name, columns in COLUMNS.items() for column in columns}
    assert ours == set(interface.signatures)
