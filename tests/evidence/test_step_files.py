"""Whole steps of other programs: what was timed of them decides what is compared and fitted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof import StepBatch, StepPlan, Tables, compile_plan
from fastroof.cli import app
from fastroof.engines import StepCosts, engine_of_version
from fastroof.engines.launch.vllm_forward import case_text
from fastroof.errors import TableError
from fastroof.evidence.own_fit import fit_own_runs
from fastroof.evidence.own_runs import OwnRuns, read_own_runs
from fastroof.evidence.steps.measured_steps import phase_of
from fastroof.evidence.validation import validate_own
from fastroof.plan.speculation import mtp_draft
from tests.command_line import good

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
VLLM = "0.33.0"
COMMAND = (
    f"torchrun --nproc-per-node=2 -m vllm.entrypoints.cli.main bench forward --model {LLAMA} "
    "--tensor-parallel-size 2 --case 'decode=32*1@4096' --kv-len-jitter 0 --output-json forward.json"
)
DECODES = [(1, 4095)] * 32
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode": DECODES,
    # what --kv-len-jitter makes of equal decodes
    "jittered": [(1, 1000 + 77 * i) for i in range(16)],
    "prefill": [(2048, 0)],
    "chunk": [(1024, 3072)],
    "mix": [(2048, 1024), *[(1, 899)] * 16],
}
PHASES = ("decode", "unequal", "prefill", "prefill", "mixed")


@pytest.fixture(scope="module")
def tables() -> Tables:
    return fastroof.load_tables("h100")


@pytest.fixture(scope="module")
def kernels(tables: Tables) -> StepPlan:
    profile = engine_of_version("vllm", VLLM).kernels_alone()
    return compile_plan("llama-3.1-8b", "h100", tables, tp=2, engine=profile, max_num_batched_tokens=16384)


def case(
    name: str, requests: list[tuple[int, int]], us: float, ranks: int = 2, **first: Any
) -> dict[str, Any]:
    """What ``vllm bench forward`` writes of a case, without keys that repeat others."""
    drafts = first.pop("drafts", 0)
    rank: dict[str, Any] = {
        "num_tokens": sum(new for new, _ in requests), "kv_blocks": 9, "routing": "real",
        "num_local_tokens": 1, "batch_order": [], "timing_scope": "target_only", "finite": True,
        "graph_vs_eager": {"max_abs": 0.0, "relative_rms": 0.0}, "graph_deterministic": True,
        "latency_us": {"timer": "graph_events_rank_max", "median": us, "sample_spread_pct": 0.1},
    }  # fmt: skip
    sizes = [
        {"query_len": new, "kv_len": new + ctx, "num_draft_tokens": drafts, "chunked": new > 1 and ctx > 0}
        for new, ctx in requests
    ]
    return {"case": name, "requests": sizes, "median_us": us, "ranks": [rank | first] * ranks}


def forward_us(plan: StepPlan, requests: list[tuple[int, int]]) -> float:
    """The operators of a step without its LM head, added up by name."""
    parts = plan.explain(requests).operators
    assert sum(1 for part in parts if part.role == "lm_head") == 1
    return sum(part.total_us for part in parts if part.role != "lm_head")


def written(folder: Path, cases: Any, command: str = COMMAND) -> Path:
    (folder / "forward.sh").write_text(f"# a comment\n{command}\n")
    path = folder / "forward.json"
    path.write_text(json.dumps(cases))
    return path


def read(path: Path, **given: Any) -> OwnRuns:
    options = {"gpu": "h100", "version": VLLM, **given}
    return read_own_runs((), path.with_suffix(".sh"), options, steps=path)


def test_forwards_are_compared_without_the_lm_head(tmp_path: Path, tables: Tables, kernels: StepPlan) -> None:
    cases = [case(name, one, 1.25 * forward_us(kernels, one)) for name, one in STEPS.items()]
    own = read(written(tmp_path, cases))
    assert not own.warnings
    assert [step.phase for step in own.steps] == list(PHASES)
    assert [step.requests for step in own.steps] == list(STEPS.values())
    report = validate_own((), own.steps, tables)
    assert len(report.rows) == len(STEPS)
    for row in report.rows:
        assert row.error == pytest.approx(1 / 1.25 - 1, rel=1e-6), row.row
        assert (row.dataset, row.engine_version, row.tp) == ("vllm bench forward", VLLM, 2)
    # whatever engine is judged, a forward has none of its costs
    assert validate_own((), own.steps, tables, engine="vllm-0.12").rows == report.rows


def test_a_step_that_verifies_is_that_of_its_drafts(
    tmp_path: Path, tables: Tables, kernels: StepPlan
) -> None:
    parts = kernels.explain_verification(8, 2051, 4).operators
    us = sum(part.total_us for part in parts if part.role != "lm_head")
    verify = case("verify", [(4, 2047)] * 8, us, drafts=3)
    own = read(written(tmp_path, [verify]))
    assert own.steps[0].phase == "verify"
    (row,) = validate_own((), own.steps, tables).rows
    assert row.error == pytest.approx(0.0, abs=1e-9)


def test_a_timed_drafter_is_its_passes(tmp_path: Path, tables: Tables, kernels: StepPlan) -> None:
    """One pass over the step's tokens, and one token per request and further draft; each with its LM head."""
    draft = mtp_draft(kernels)
    head_us = draft.run(StepBatch.from_requests([[(1, 99)] * 8])).components.logits_us[0]
    decodes_us = draft.decode_us(32, 4096) + 2 * draft.decode_us(32, 4097)
    verified = kernels.explain_verification(8, 2051, 4).operators
    of_draft = draft.explain_verification(8, 2051, 4).operators
    verify_us = sum(part.total_us for part in (*verified, *of_draft) if part.role != "lm_head") + head_us
    cases = [
        case("plain", DECODES, forward_us(kernels, DECODES)),
        case("decode", DECODES, forward_us(kernels, DECODES) + decodes_us),
        case("verify", [(4, 2047)] * 8, verify_us + 2 * draft.decode_us(8, 2052), drafts=3),
        case("prefill", [(2048, 0)], forward_us(kernels, [(2048, 0)]) + draft.prefill_us(2048)
             + 2 * draft.decode_us(1, 2049)),
    ]  # fmt: skip
    for one in cases[1:]:
        for rank in one["ranks"]:
            rank["timing_scope"] = "target_and_drafter"
    drafts = " --spec-method mtp --spec-tokens 3"
    report = validate_own((), read(written(tmp_path, cases, COMMAND + drafts)).steps, tables)
    assert [row.error for row in report.rows] == pytest.approx([0.0] * 4, abs=1e-9)
    unknown = read(written(tmp_path, cases, COMMAND))
    assert [bool(step.left_out) for step in unknown.steps] == [False, True, True, True]
    ngrams = read(written(tmp_path, cases, COMMAND + drafts.replace("mtp", "ngram")))
    assert "only one like a layer of the model is compared" in ngrams.steps[1].left_out


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"timing_scope": "target_and_drafter"}, "measure with --exclude-drafter"),
        ({"finite": False}, "not finite"),
        ({"num_tokens": 99}, "prefix hit was replayed"),
    ],
)
def test_forwards_that_are_others_are_left_out(
    tmp_path: Path, tables: Tables, changed: dict[str, Any], reason: str
) -> None:
    own = read(written(tmp_path, [case("decode", DECODES, 5e3, **changed)]))
    report = validate_own((), own.steps, tables)
    assert not report.rows
    assert reason in report.left_out[0].reason
    with pytest.raises(TableError, match=reason.replace("(", "\\(")):
        fit_own_runs(own, tables)


def test_the_engine_of_forwards_is_named_by_its_command(tmp_path: Path) -> None:
    path = written(tmp_path, [case("decode", DECODES, 5e3)])
    assert read(path).steps[0].layout.tp == 2
    with pytest.raises(TableError, match="2 GPUs ran its cases, and the arguments lay the model out on 4"):
        read(written(tmp_path, [case("decode", DECODES, 5e3)], COMMAND.replace("size 2", "size 4")))
    with pytest.raises(TableError, match="names neither model nor GPU: give --gpu"):
        read_own_runs((), None, {"gpu": "h100"}, steps=path)
    own = read_own_runs((), None, {"gpu": "h100", "model": "llama-3.1-8b"}, steps=path)
    assert own.steps[0].tp == 2
    assert any("taken for tp 2" in words for words in own.warnings)
    with pytest.raises(TableError, match="vLLM ran these steps, and --engine is sglang"):
        read_own_runs((), None, {"gpu": "h100", "model": "llama-3.1-8b", "engine": "sglang"}, steps=path)
    with pytest.raises(TableError, match=r"is not a file of steps; valid: steps\.csv"):
        read_own_runs((), None, {}, steps=path.with_suffix(".sh"))


def test_notes_name_what_may_mislead(tmp_path: Path) -> None:
    command = COMMAND.replace(LLAMA, "Qwen/Qwen3-30B-A3B")
    spread = {"latency_us": {"sample_spread_pct": 3.0}}
    own = read(written(tmp_path, [case("decode", DECODES, 5e3, **spread)], command))
    assert any("--routing balanced" in words for words in own.warnings)
    assert "1 cases spread by more than 0.5 % between samples" in own.warnings
    balanced = case("decode", DECODES, 5e3, routing="balanced")
    assert not read(written(tmp_path, [balanced], command)).warnings


def test_costs_of_forwards_have_no_host(tmp_path: Path, tables: Tables, kernels: StepPlan) -> None:
    sizes = [[(1, 2047)] * batch for batch in (1, 2, 4, 8, 16, 32, 64, 128)]
    cases = [case(f"d{len(one)}", one, forward_us(kernels, one) + 90 + 2 * len(one)) for one in sizes]
    path = written(tmp_path, cases)
    fitted = fit_own_runs(read(path), tables, resamples=0, name="mine")
    assert fitted.profile.costs.step_us == pytest.approx(90.0, abs=0.5)
    assert fitted.profile.costs.sequence_us == pytest.approx(2.0, abs=0.05)
    assert fitted.profile.evidence["timed"] == "forward"
    assert fitted.profile.evidence["steps"] == len(sizes)
    assert fitted.fit.left_out_mape < 1e-3 < fitted.kernels_mape


# -- the command that measures a step --------------------------------------------------------------


def parsed(text: str) -> list[tuple[int, int]]:
    """Read ``--case`` by its grammar: NAME= and a list of [N*]Q[@K][c]."""
    requests = []
    for part in text.partition("=")[2].split(","):
        match = re.fullmatch(r"(?:(\d+)\*)?(\d+)(?:@(\d+))?(c)?", part)
        assert match is not None, part
        new = int(match[2])
        kv = int(match[3] or new)
        assert (match[4] == "c") == (kv > new > 1)
        requests += [(new, kv - new)] * int(match[1] or 1)
    return requests


def test_the_command_measures_the_step() -> None:
    for requests in STEPS.values():
        assert parsed(case_text(requests, "step")) == requests
    runner = CliRunner()
    words = ["step", "--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "2", "--measure"]
    shown = runner.invoke(app, [*words, "--decode", "32x4096", "--prefill", "512@256"])
    assert shown.exit_code == 0
    script = shown.stdout
    assert "--case 'step=32*1@4096,512@768c'" in script
    assert "fastroof validate --steps forward.json --engine-args forward.sh" in script
    assert "--max-model-len 4096" in script
    for more, reason in (
        (["--decode", "1x9", "--engine", "sglang"], "needs --engine vllm"),
        (["--decode", "1x9", "--pp", "2"], "needs pp 1"),
        (["--decode", "1x9", "--explain"], "does not go with"),
    ):
        refused = runner.invoke(app, [*words, *more])
        assert refused.exit_code == 2
        assert reason in refused.output


@pytest.mark.filterwarnings("ignore:no measured tables")
@pytest.mark.parametrize(("gpu", "least"), [("h100", 18), ("l4", 10)])
def test_without_a_step_it_measures_a_grid_that_fits(gpu: str, least: int) -> None:
    words = ["step", "--model", "llama-3.1-8b", "--gpu", gpu, "--measure"]
    script = CliRunner().invoke(app, words).stdout
    texts = re.findall(r"--case '?([^' ]+)'?", script)
    cases = {text.partition("=")[0]: parsed(text) for text in texts}
    assert len(cases) >= least
    assert f"# {len(cases)} steps that fit" in script
    memory = compile_plan("llama-3.1-8b", gpu, "datasheet", engine="vllm").memory
    kinds = set()
    for requests in cases.values():
        assert sum(map(sum, requests)) < memory.max_kv_tokens
        kinds.add(phase_of(*(tuple(sizes) for sizes in zip(*requests, strict=True))))
    assert kinds == {"decode", "prefill", "mixed"}
    longest = max(sum(one) for requests in cases.values() for one in requests)
    assert f"--max-model-len {longest}" in script


def test_what_the_command_writes_is_read_with_it(tmp_path: Path, kernels: StepPlan) -> None:
    runner = CliRunner()
    plan = ["--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "2"]
    words = ["step", *plan, "--decode", "32x4096", "--measure"]
    path = written(tmp_path, [case("step", DECODES, forward_us(kernels, DECODES))])
    path.with_suffix(".sh").write_text(runner.invoke(app, words).stdout)
    args = ["validate", "--steps", str(path), "--engine-args", str(path.with_suffix(".sh")), "--gpu", "h100"]
    shown = runner.invoke(app, [*args, "--engine-version", VLLM, "--json"])
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)
    assert [(group["quantity"], round(group["mape"], 9)) for group in document["groups"]] == [("decode", 0.0)]
    assert "without LM head, sampler and host" in document["compared"]["vllm bench forward"]


# -- forward-pass tables ----------------------------------------------------------------------------

# the columns of schema 7 with what was run, collector/fpm_forward/database.py of aisimulate
DEPLOYMENT: dict[str, Any] = {
    "cell_id": "fpm-1", "model_path": LLAMA, "system": "h100_sxm", "backend": "vllm",
    "backend_version": "0.12.0", "runtime_backend_version": "0.12.0", "weight_quantization": "bfloat16",
    "gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half", "kv_cache_dtype": "bfloat16", "parallel_strategy": "tp", "tp": 2, "pp": 1,
    "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1, "moe_backend": "auto", "attention_backend": "auto",
    "enable_wideep": False, "enable_eplb": False, "model_config_sha256": "", "execution_profile": "full",
    "engram_residency": "none", "input_modality": "text", "partition_policy": "balanced_v1",
    "kv_seed_regime": "n/a", "measurement_repeats": 1,
}  # fmt: skip
POINTS = [
    *(("decode", batch, 0, batch * kv) for batch in (1, 4, 16, 64) for kv in (500, 4000)),
    *(
        ("prefill", batch, batch * new, batch * ctx)
        for batch in (1, 3)
        for new, ctx in ((512, 0), (700, 300))
    ),
]


def requests_of(phase: str, batch: int, new: int, cached: int) -> list[tuple[int, int]]:
    if phase == "decode":
        return [(1, cached // batch)] * batch
    return [(new // batch, cached // batch)] * batch


def table_of(folder: Path, time_ms: Callable[..., float], **changed: Any) -> Path:
    rows = [
        DEPLOYMENT
        | {
            "workload_kind": phase, "batch_size": batch, "total_prefill_tokens": new,
            "total_kv_read_tokens": cached, "latency_ms": time_ms(phase, batch, new, cached),
        }
        | changed
        for phase, batch, new, cached in POINTS
    ]  # fmt: skip
    path = folder / "fpm_forward_perf.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    record = {"schema_version": 7, "parquet_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    path.with_suffix(".metadata.json").write_text(json.dumps(record))
    return path


@pytest.fixture(scope="module")
def engine(tables: Tables) -> StepPlan:
    profile = engine_of_version("vllm", "0.12.0")
    return compile_plan("llama-3.1-8b", "h100", tables, tp=2, engine=profile, max_num_batched_tokens=16384)


def times_of(plan: StepPlan) -> Callable[..., float]:
    def time_ms(phase: str, batch: int, new: int, cached: int) -> float:
        return float(plan.step_us(StepBatch.from_requests([requests_of(phase, batch, new, cached)]))[0]) / 1e3

    return time_ms


def test_forward_passes_are_compared_with_the_engine(
    tmp_path: Path, tables: Tables, engine: StepPlan
) -> None:
    path = table_of(tmp_path, times_of(engine))
    own = read_own_runs((), steps=path)
    assert own.gpu == "h100"
    assert [step.requests for step in own.steps] == [requests_of(*point) for point in POINTS]
    report = validate_own((), own.steps, tables)
    assert len(report.rows) == len(POINTS)
    assert max(abs(row.error) for row in report.rows) < 1e-9
    assert {(row.engine, row.engine_version, row.dataset) for row in report.rows} == {
        ("vllm", "0.12.0", "forward-pass table")
    }
    # SGLang times the forward on the device
    path = table_of(tmp_path, times_of(engine), backend="sglang", backend_version="0.5.14")
    assert {step.timed for step in read_own_runs((), steps=path).steps} == {"kernels"}


def test_tokens_that_do_not_divide_are_shared_evenly(tmp_path: Path) -> None:
    path = table_of(tmp_path, lambda *_: 1.0, batch_size=3, total_prefill_tokens=100, total_kv_read_tokens=8,
                    workload_kind="prefill")  # fmt: skip
    step = read_own_runs((), steps=path).steps[0]
    assert (step.new_tokens, step.context_len) == ((34, 33, 33), (3, 3, 2))


def test_costs_of_an_engine_come_back_from_its_steps(tmp_path: Path, tables: Tables) -> None:
    base = engine_of_version("vllm", "0.12.0").kernels_alone()
    costs = StepCosts(step_us=300.0, sequence_us=5.0)
    known = replace(base, costs=costs)
    plan = compile_plan("llama-3.1-8b", "h100", tables, tp=2, engine=known, max_num_batched_tokens=16384)
    path = table_of(tmp_path, times_of(plan))
    fitted = fit_own_runs(read_own_runs((), steps=path), tables, resamples=0)
    assert fitted.profile.costs.step_us == pytest.approx(300.0, abs=1.0)
    assert fitted.profile.costs.sequence_us == pytest.approx(5.0, abs=0.1)
    assert fitted.profile.evidence["timed"] == "engine"
    shown = good("calibrate", "--steps", str(path), "--bootstrap", "0")
    assert "12 steps fitted, 0 left out" in shown
    assert "without " not in shown


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_seed_regime": "fake_fallback"}, "KV cache was not filled by real tokens"),
        ({"cp": 2}, "context parallelism over 2 GPUs"),
        ({"execution_profile": "decoder_bounded"}, "another step than a plan's"),
        ({"partition_policy": "skewed"}, "requests of skewed are not known"),
        ({"gemm_quant_mode": "fp6"}, "GEMMs in fp6 are not modelled"),
        ({"model_path": "nobody/knows"}, "nobody/knows"),
        ({"system": "b200_sxm"}, "measured on b200"),
    ],
)
def test_rows_that_no_plan_represents_are_left_out(
    tmp_path: Path, tables: Tables, changed: dict[str, Any], reason: str
) -> None:
    report = validate_own(
        (), read_own_runs((), steps=table_of(tmp_path, lambda *_: 1.0, **changed)).steps, tables
    )
    assert not report.rows
    assert reason in report.left_out[0].reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"latency_ms": 0.0}, "latency_ms must be above 0"),
        ({"latency_ms": None}, "latency_ms must be above 0"),
        ({"tp": 0}, "tp must be a whole number"),
        ({"backend": "trtllm"}, "backend must be one of vllm, sglang"),
        ({"workload_kind": "mixed"}, "workload_kind must be prefill or decode"),
        ({"total_prefill_tokens": 0, "workload_kind": "prefill"}, "prompts need as many prefill tokens"),
        ({"batch_size": 10**9}, "batch_size must be a whole number up to 65,536"),
    ],
)
def test_impossible_rows_are_errors(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(TableError, match=reason):
        read_own_runs((), steps=table_of(tmp_path, lambda *_: 1.0, **changed))


def test_a_table_is_verified(tmp_path: Path) -> None:
    path = table_of(tmp_path, lambda *_: 1.0)
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    with pytest.raises(TableError, match=r"differs from its record fpm_forward_perf\.metadata\.json"):
        read_own_runs((), steps=path)
    path.with_suffix(".metadata.json").unlink()
    pq.write_table(pa.table({"tp": [1]}), path)
    with pytest.raises(TableError, match="it has no column model_path, system"):
        read_own_runs((), steps=path)


def test_kernels_alone_fit_nothing(tmp_path: Path, tables: Tables, engine: StepPlan) -> None:
    path = table_of(tmp_path, times_of(engine), backend="sglang", backend_version="0.5.14")
    with pytest.raises(TableError, match="nothing of an engine: use fastroof validate"):
        fit_own_runs(read_own_runs((), steps=path), tables)
