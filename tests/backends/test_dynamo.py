"""Profiles for Dynamo's mocker: what is in them, what its reader makes of them, and replays in the mocker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

from benchmarks.upstream.dynamo import replay_errors
from fastroof import BackendError, PlanRangeError, StepBatch, StepPlan, Tables, compile_plan
from fastroof.backends.dynamo import LEAST_DECODE_MS, dynamo_profile, write_dynamo_profile
from fastroof.backends.mixed_steps import MAX_BATCH_SIZE, decodes_beside
from fastroof.cli import app
from tests.examples import dynamo as dynamo_example

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHAPES = {
    "prefill_isl": 1,
    "prefill_ttft_ms": 1,
    "decode_active_kv_tokens": 1,
    "decode_context_length": 1,
    "decode_itl": 2,
}


@pytest.fixture(scope="module", params=["llama-3.1-8b fp8 1", "llama-3.1-70b bf16 4", "qwen2.5-7b bf16 1"])
def plan(request: pytest.FixtureRequest, h100: Tables) -> StepPlan:
    model, dtype, tp = request.param.split()
    return compile_plan(model, "h100", h100, tp=int(tp), dtype=dtype, engine="kernels")


@pytest.fixture(scope="module")
def llama(h100: Tables) -> StepPlan:
    return compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")


def read_prefill_ms(profile: dict[str, Floats], tokens: Any) -> Any:
    """The mocker's rule: linear, continued beyond the ends."""
    nodes, times = profile["prefill_isl"], profile["prefill_ttft_ms"]
    at, share = _cell(nodes, tokens)
    return times[at] * (1 - share) + times[at + 1] * share


def read_decode_ms(profile: dict[str, Floats], active: Any, context: Any) -> Any:
    """The mocker's rule: bilinear, continued beyond the ends, and a millisecond at least."""
    times = profile["decode_itl"]
    i, u = _cell(profile["decode_active_kv_tokens"], active)
    j, v = _cell(profile["decode_context_length"], context)
    low = times[i, j] * (1 - u) + times[i + 1, j] * u
    high = times[i, j + 1] * (1 - u) + times[i + 1, j + 1] * u
    return np.maximum(low * (1 - v) + high * v, LEAST_DECODE_MS)


def _cell(nodes: Floats, x: Any) -> tuple[Any, Any]:
    at = np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2)
    return at, (x - nodes[at]) / (nodes[at + 1] - nodes[at])


def test_the_arrays_are_what_the_reader_insists_on(plan: StepPlan, tmp_path: Path) -> None:
    profile = write_dynamo_profile(plan, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as stored:
        assert set(stored) == {*SHAPES, "fastroof_plan"}
        text = json.loads(str(stored["fastroof_plan"]))
        for name, dimensions in SHAPES.items():
            assert stored[name].dtype == np.dtype("<f8")
            assert stored[name].ndim == dimensions
            assert stored[name].flags.c_contiguous
            np.testing.assert_array_equal(stored[name], profile[name])
    assert (text["model"], text["tp"], text["dtype"]) == (plan.model.name, plan.tp, plan.dtype)
    assert text["tables_hash"] == plan.tables_hash
    for name in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length"):
        assert (np.diff(profile[name]) > 0).all()
        assert (profile[name] == np.rint(profile[name])).all()
    active, context = profile["decode_active_kv_tokens"], profile["decode_context_length"]
    assert profile["decode_itl"].shape == (len(active), len(context))
    assert (active[-1], context[-1]) == (MAX_BATCH_SIZE * plan.model.max_position, plan.model.max_position)
    assert np.isfinite(profile["decode_itl"]).all()
    assert (profile["decode_itl"] > 0).all()


def test_the_same_plan_makes_the_same_file(llama: StepPlan, tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_dynamo_profile(llama, tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_prefill_is_the_plan_s_at_every_number_of_tokens(plan: StepPlan) -> None:
    profile = dynamo_profile(plan)
    tokens = np.arange(1, plan.max_num_batched_tokens + 1)
    np.testing.assert_array_equal(profile["prefill_isl"], tokens)
    np.testing.assert_array_equal(profile["prefill_ttft_ms"], plan.prefill_us(tokens) / 1e3)
    np.testing.assert_array_equal(read_prefill_ms(profile, tokens), profile["prefill_ttft_ms"])


def test_prompts_of_one_length_differ_from_one_prompt(llama: StepPlan) -> None:
    times_ms = dynamo_profile(llama, prompt_len=1000)["prefill_ttft_ms"]
    assert times_ms[999] == llama.prefill_us(1000) / 1e3
    assert times_ms[3999] == llama.prefill_us(1000, 0, 4) / 1e3
    # on average a part of a prompt comes after half of the others
    assert times_ms[599] == llama.prefill_us(600, 200) / 1e3
    two_and_a_part = StepBatch([1000, 1000, 600], [0, 0, 200], [0, 3])
    assert times_ms[2599] == llama.step_us(two_and_a_part)[0] / 1e3


def test_the_parts_of_a_long_prompt_take_the_plans_time(llama: StepPlan) -> None:
    times_ms = dynamo_profile(llama, prompt_len=20_000)["prefill_ttft_ms"]
    parts = np.array([8192, 8192, 3616])
    exact_ms = llama.prefill_us(parts, np.array([0, 8192, 16384])).sum() / 1e3
    assert times_ms[parts - 1].sum() == pytest.approx(exact_ms, rel=0.005)
    # as the same tokens without a context they would be a sixth too fast
    assert llama.prefill_us(parts).sum() / 1e3 < 0.85 * exact_ms


def test_new_tokens_with_decodes_cost_what_they_add(plan: StepPlan) -> None:
    """Held to steps whose decodes are others than those that the profile was made beside."""
    alone, added = (dynamo_profile(plan, points=1, beside=decodes) for decodes in (None, (32, 2000)))
    tokens = np.array([1, 100, 2048])
    together = [plan.step_us(StepBatch([n] + [1] * 32, [0] + [1999] * 32, [0, 33]))[0] for n in tokens]
    np.testing.assert_array_equal(
        added["prefill_ttft_ms"][tokens - 1], (np.array(together) - plan.decode_us(32, 2000)) / 1e3
    )
    rng, errors = np.random.default_rng(20), []
    for count, kv_len, new in zip(
        rng.integers(8, 60, 100), rng.integers(200, 8000, 100), rng.integers(64, 4000, 100), strict=True
    ):
        batch = StepBatch([new] + [1] * count, [0] + [kv_len - 1] * count, [0, count + 1])
        decodes_ms, exact_ms = plan.decode_us(count, kv_len) / 1e3, plan.step_us(batch)[0] / 1e3
        errors.append(
            [p["prefill_ttft_ms"][new - 1] + decodes_ms - exact_ms for p in (alone, added)] / exact_ms
        )
    by_alone, by_added = np.abs(errors).mean(axis=0)
    print(
        f"{plan.model.name}: mixed steps {by_alone:.1%} off by prompts alone, {by_added:.1%} by what they add"
    )
    assert by_added < 0.2 * by_alone


def test_prompts_with_decodes_keep_their_length(llama: StepPlan) -> None:
    added = dynamo_profile(llama, points=1, prompt_len=1000, beside=(4, 500))["prefill_ttft_ms"]
    batch = StepBatch([1000, 1000, 600, 1, 1, 1, 1], [0, 0, 200, 499, 499, 499, 499], [0, 7])
    assert added[2599] == pytest.approx((llama.step_us(batch)[0] - llama.decode_us(4, 500)) / 1e3, rel=1e-12)
    assert len(added) == llama.max_num_batched_tokens - 4


def test_decode_of_a_whole_batch_is_the_plan_s(plan: StepPlan) -> None:
    profile = dynamo_profile(plan, points=4)
    active, context = np.meshgrid(
        profile["decode_active_kv_tokens"].astype(np.int64),
        profile["decode_context_length"].astype(np.int64),
        indexing="ij",
    )
    whole = (active % context == 0) & (active <= MAX_BATCH_SIZE * context)
    assert len(np.unique(active[whole] // context[whole])) > 9
    times_us = plan.decode_us(active[whole] // context[whole], context[whole])
    np.testing.assert_array_equal(profile["decode_itl"][whole], times_us / 1e3)
    below = active < context
    np.testing.assert_array_equal(profile["decode_itl"][below], plan.decode_us(1, active[below]) / 1e3)
    above = (active > MAX_BATCH_SIZE * context) & (active % MAX_BATCH_SIZE == 0)
    times_us = plan.decode_us(MAX_BATCH_SIZE, active[above] // MAX_BATCH_SIZE)
    np.testing.assert_array_equal(profile["decode_itl"][above], times_us / 1e3)


def test_between_whole_batches_it_is_between_their_times(llama: StepPlan) -> None:
    profile = dynamo_profile(llama, max_context=3, max_kv_tokens=7, points=1)
    np.testing.assert_array_equal(profile["decode_active_kv_tokens"], [1, 2, 3, 4, 7])
    np.testing.assert_array_equal(profile["decode_context_length"], [1, 2, 3])
    # seven tokens in contexts of three: two and a third requests, of 3.5 or of 2.33 tokens each
    two_us = 0.5 * llama.decode_us(2, 3) + 0.5 * llama.decode_us(2, 4)
    three_us = 2 / 3 * llama.decode_us(3, 2) + 1 / 3 * llama.decode_us(3, 3)
    assert profile["decode_itl"][4, 2] == pytest.approx((2 * two_us + three_us) / 3e3, rel=1e-14)


def held_out(plan: StepPlan, steps: int) -> tuple[Ints, Ints, Floats]:
    """Decodes of contexts that differ by up to half their mean: requests, tokens, and the plan's ms."""
    rng = np.random.default_rng(8)
    batch = np.exp(rng.uniform(0, np.log(MAX_BATCH_SIZE + 1), 4 * steps)).astype(np.int64)
    batch[::8] = MAX_BATCH_SIZE
    mean = np.exp(rng.uniform(np.log(32), np.log(plan.model.max_position / 1.5), len(batch)))
    fits = np.flatnonzero(batch * mean * 1.5 < plan.memory.max_kv_tokens)[:steps]
    batch, mean = batch[fits], mean[fits]
    offsets = np.r_[0, np.cumsum(batch)]
    kv_len = np.rint(np.repeat(mean, batch) * rng.uniform(0.5, 1.5, offsets[-1])).astype(np.int64)
    times_us = plan.step_us(StepBatch(np.ones_like(kv_len), kv_len - 1, offsets))
    return batch, np.add.reduceat(kv_len, offsets[:-1]), times_us / 1e3


def test_what_the_reader_interpolates_stays_close_to_the_plan(plan: StepPlan) -> None:
    batch, active, exact_ms = held_out(plan, 20_000)

    def errors(**grid: Any) -> Floats:
        profile = dynamo_profile(plan, **grid)
        return np.abs(read_decode_ms(profile, active, active // batch) / exact_ms - 1)

    found, full = errors(), batch == MAX_BATCH_SIZE
    print(
        f"{plan.model.name} {plan.dtype}: mean {found.mean():.3%}, "
        f"{np.quantile(found, 0.99):.2%} at p99, "
        f"{found.max():.1%} at most, {found[full].mean():.3%} at batch {MAX_BATCH_SIZE}, "
        f"{errors(points=6).mean():.3%} with 6 points"
    )
    assert found.mean() < 0.004
    assert np.quantile(found, 0.99) < 0.05
    # the mocker's largest batch, where a busy replay stays, is next to a step in many GEMMs
    assert found[full].mean() < 0.003
    assert found.mean() < errors(points=6).mean()


def test_wrong_grids_are_refused(llama: StepPlan, tmp_path: Path) -> None:
    for wrong in (
        {"max_isl": 1},
        {"max_context": 1.5},
        {"max_kv_tokens": 0},
        {"max_batch_size": True},
        {"prompt_len": 0},
        {"points": 0},
        {"points": 10_000},
        {"beside": (0, 100)},
        {"beside": (1, 0)},
    ):
        [name] = wrong
        with pytest.raises(BackendError, match=f"{name} must be a whole number"):
            dynamo_profile(llama, **wrong)
    with pytest.raises(PlanRangeError, match=r"max_isl is 9000.*max_num_batched_tokens=9000"):
        dynamo_profile(llama, max_isl=9000)
    with pytest.raises(BackendError, match=r"beside must be the decodes .*got \[32, 4096\]"):
        dynamo_profile(llama, beside=[32, 4096])
    with pytest.raises(PlanRangeError, match="9000 decodes with new tokens are more than the 1024"):
        dynamo_profile(llama, beside=(9000, 4096))
    with pytest.raises(PlanRangeError, match="max_num_seqs=1025"):
        dynamo_profile(llama, max_batch_size=1025)
    with pytest.raises(BackendError, match=r"\.npz file, got .*a\.json"):
        write_dynamo_profile(llama, tmp_path / "a.json")
    with pytest.raises(BackendError, match="does not exist; create it"):
        write_dynamo_profile(llama, tmp_path / "nowhere" / "a.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_there_stays_where_another_cannot_be_made(llama: StepPlan, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"before")
    with pytest.raises(PlanRangeError):
        write_dynamo_profile(llama, path, max_isl=9000)
    assert path.read_bytes() == b"before"
    write_dynamo_profile(llama, path, points=1)
    assert path.read_bytes()[:2] == b"PK"
    assert list(tmp_path.iterdir()) == [path]


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["export", "npz", *arguments], prog_name="fastroof")
    return done.exit_code, done.stdout, done.stderr


def test_the_command_writes_what_the_library_makes(llama: StepPlan, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    options = ("--isl", "512", "--max-isl", "4096", "--max-context", "8192", "--points", "8")
    kernels = "llama-3.1-8b,engine=kernels"
    code, out, err = run(kernels, "-o", str(path), *options, "--max-batch-size", "64")
    assert (code, err) == (0, "")
    assert "prefill of 1 to 4,096 tokens" in out
    assert (
        f"--num-gpu-blocks-override {llama.memory.max_kv_tokens // 64} --block-size 64 --max-num-seqs 64"
        in out
    )
    grid = {"prompt_len": 512, "max_isl": 4096, "max_context": 8192, "max_batch_size": 64, "points": 8}
    with np.load(path) as stored:
        for name, array in dynamo_profile(llama, **grid).items():
            np.testing.assert_array_equal(stored[name], array)


def test_the_command_takes_decodes_of_mixed_steps(llama: StepPlan, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    assert run("llama-3.1-8b,engine=kernels", "-o", str(path), "--points", "1", "--beside", "16x1000")[0] == 0
    with np.load(path) as stored:
        expected = dynamo_profile(llama, points=1, beside=(16, 1000))["prefill_ttft_ms"]
        np.testing.assert_array_equal(stored["prefill_ttft_ms"], expected)
    code, _, err = run("llama-3.1-8b", "-o", str(path), "--beside", "16")
    assert (code, "DECODESxKV_LEN" in err) == (2, True)


def test_the_command_prints_what_the_mocker_cannot_know(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npz")
    code, out, err = run("llama-3.1-70b", "-o", path, "--points", "2")
    assert code == 0
    assert "num-gpu-blocks" not in out
    assert "leaves no room for KV cache" in err
    code, _, err = run("llama-3.1-8b", "-o", str(tmp_path / "a.txt"))
    assert (code, err.count("\n")) == (2, 1)


def test_the_command_prints_where_the_mocker_is_slower_than_the_plan(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "three_layers.json").write_text(json.dumps(config))
    path = tmp_path / "a.npz"
    code, _, err = run(f"{tmp_path / 'three_layers.json'},name=small", "-o", str(path), "--points", "8")
    with np.load(path) as stored:
        share = (stored["decode_itl"] < LEAST_DECODE_MS).mean()
    assert 0.1 < share < 0.9
    assert (code, f"{share:.1%}".replace("%", " %") in err) == (0, True)


def test_dynamo_takes_the_file_for_its_own(llama: StepPlan, tmp_path: Path) -> None:
    """Needs ai-dynamo and ai-dynamo-runtime 1.6.1."""
    pytest.importorskip("dynamo._core")
    converter = pytest.importorskip("dynamo.mocker.utils.planner_profiler_perf_data_converter")
    write_dynamo_profile(llama, tmp_path / "a.npz")
    assert converter.is_mocker_format_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("isl", "batch"), [(100, 1), (1000, 1), (8192, 1), (1000, 8), (700, 11), (32, 250), (31, 256)]
)
def test_the_mocker_s_own_reader_answers_as_the_plan(
    isl: int, batch: int, llama: StepPlan, tmp_path: Path
) -> None:
    """Needs ai-dynamo-runtime 1.6.1: all prompts in one step, then one decode of each."""
    core = pytest.importorskip("dynamo._core")
    profile = write_dynamo_profile(llama, tmp_path / "a.npz", prompt_len=isl)
    report = core.run_mocker_synthetic_trace_replay(
        isl,
        2,
        batch,
        extra_engine_args=dynamo_example.engine(llama, tmp_path / "a.npz"),
        replay_concurrency=batch,
        capture_per_request=True,
    )
    assert len(report.per_request) == batch
    for seen in report.per_request:
        # the mocker's clock counts nanoseconds
        assert seen["ttft_ms"] == pytest.approx(llama.prefill_us(isl, 0, batch) / 1e3, abs=2e-6)
        assert seen["itl_ms"] == pytest.approx(read_decode_ms(profile, batch * (isl + 1), isl + 1), abs=2e-6)
        assert seen["itl_ms"] == pytest.approx(llama.decode_us(batch, isl + 1) / 1e3, rel=0.002)


@pytest.mark.parametrize("rate_per_s", [5.0, 20.0, 30.0])
def test_a_profile_for_a_rate_replays_as_the_plan_serves(
    rate_per_s: float, h100: Tables, tmp_path: Path
) -> None:
    """Needs ai-dynamo-runtime 1.6.1: means of the mocker and of fastroof's engine."""
    core = pytest.importorskip("dynamo._core")
    errors = replay_errors(core, compile_plan("llama-3.1-8b", "h100", h100), rate_per_s, tmp_path)
    print(f"{rate_per_s:g} requests/s: TTFT {errors['rate'][0]:+.1%}, TPOT {errors['rate'][1]:+.1%}")
    assert np.abs(errors["rate"]).max() < 0.03
    assert np.abs(errors["alone"]).max() > 5 * np.abs(errors["rate"]).max()


def test_decodes_with_prompts_follow_the_rate(llama: StepPlan) -> None:
    lengths = {"prompt_len": 1024, "output_len": 128}
    few, some, most = (
        decodes_beside(llama, rate_per_s=rate, **lengths, max_batch_size=64) for rate in (0.01, 10, 1000)
    )
    assert (few, most) == ((1, 1088), (64, 1088))
    # without waiting each decodes for at least as long as alone
    alone_s = 127 * llama.decode_us(1, 1088) / 1e6
    assert 10 * alone_s < some[0] < 3 * 10 * alone_s
    for wrong in ({"rate_per_s": 0.0}, {"rate_per_s": "x"}, {"output_len": 0}):
        with pytest.raises(BackendError, match=f"{next(iter(wrong))} must be"):
            decodes_beside(llama, **{"rate_per_s": 1.0, **lengths, **wrong})


def test_the_command_finds_the_decodes_of_a_rate(llama: StepPlan, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    options = ("--points", "1", "--isl", "1024", "--rate", "20")
    code, out, _ = run("llama-3.1-8b,engine=kernels", "-o", str(path), *options, "--osl", "128")
    running = decodes_beside(llama, rate_per_s=20, prompt_len=1024, output_len=128)
    assert (code, f"at 20 requests/s {running[0]} decodes of 1088 tokens" in out) == (0, True)
    with np.load(path) as stored:
        expected = dynamo_profile(llama, points=1, prompt_len=1024, beside=running)["prefill_ttft_ms"]
        np.testing.assert_array_equal(stored["prefill_ttft_ms"], expected)
    code, _, err = run("llama-3.1-8b", "-o", str(path), *options)
    assert (code, "--osl" in err) == (2, True)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    dynamo_example.main()
    out = capsys.readouterr().out
    assert "'decode_itl': (" in out
    assert "tokens/s" in out or "pip install ai-dynamo-runtime" in out
