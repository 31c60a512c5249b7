"""Runs that decode speculatively are predicted with their drafts, and costs are fitted to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fastroof
from fastroof import SpeculativeDecoding, StepPlan, Tables, compile_plan
from fastroof.cli import app
from fastroof.engines import StepCosts, engine_of_version
from fastroof.errors import TableError
from fastroof.evidence.own_fit import fit_own_runs
from fastroof.evidence.own_runs import OwnRuns, read_own_runs
from fastroof.evidence.predictions import Plans
from fastroof.evidence.validation import INDEPENDENT, validate_own
from fastroof.serving import estimate
from tests.command_line import good

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
VERSION = "0.12.0"
SERVE = f"vllm serve {LLAMA} --speculative-config "
MTP = SERVE + '\'{"method": "mtp", "num_speculative_tokens": 3}\''
NGRAM = SERVE + '\'{"method": "ngram", "num_speculative_tokens": 3}\''


@pytest.fixture(scope="module")
def tables() -> Tables:
    return fastroof.load_tables("h100")


def cluster(
    folder: Path, plan: StepPlan, speculation: SpeculativeDecoding, *, has_accepted: bool = True
) -> None:
    """Write what vllm bench serve would have written of an engine that is exactly a plan."""
    for clients in (1, 4, 16, 64):
        for isl, osl in ((1024, 128), (512, 512)):
            seen = estimate(plan, isl, osl, clients, speculation=speculation)
            requests, latency_ms = 10 * clients, seen.ttft_ms + seen.tpot_ms * (osl - 1)
            result: dict[str, Any] = {
                "tokenizer_id": LLAMA, "model_id": LLAMA, "num_prompts": requests, "completed": requests,
                "request_rate": "inf", "max_concurrency": clients, "burstiness": 1.0,
                "duration": 10 * latency_ms / 1e3, "total_input_tokens": requests * isl,
                "total_output_tokens": requests * osl, "request_throughput": 1.0,
                "mean_ttft_ms": seen.ttft_ms, "mean_tpot_ms": seen.tpot_ms,
            }  # fmt: skip
            if has_accepted:
                result["spec_decode_acceptance_length"] = speculation.acceptance_length
            (folder / f"c{clients}-{isl}-{osl}.json").write_text(json.dumps(result))


def read(folder: Path, command: str, **given: Any) -> OwnRuns:
    (folder / "engine_args.txt").write_text(command)
    return read_own_runs([folder], given={"gpu": "h100", "version": VERSION, **given})


@pytest.fixture(scope="module")
def engine(tables: Tables) -> StepPlan:
    return compile_plan("llama-3.1-8b", "h100", tables, engine=engine_of_version("vllm", VERSION))


def test_a_draft_has_the_kernels_of_its_engine(tmp_path: Path, tables: Tables, engine: StepPlan) -> None:
    """Plans are cached; two engines with steps of one size have a draft each."""
    cluster(tmp_path, engine, SpeculativeDecoding(3, 2.4))
    row = replace(read(tmp_path, NGRAM).rows[0], draft_model="llama-3.1-8b", draft_tp=1)
    plans = Plans(tables)
    for name in ("vllm", "sglang", "vllm"):
        target = compile_plan(
            "llama-3.1-8b", "h100", tables, engine=name, max_num_batched_tokens=512, max_num_seqs=64
        )
        speculation = plans.speculation(row, target)
        assert speculation is not None
        assert isinstance(speculation.draft, StepPlan)
        assert speculation.draft.profile == target.profile.kernels_alone()


@pytest.mark.parametrize(("command", "draft"), [(MTP, "mtp"), (NGRAM, None)])
def test_runs_are_predicted_with_their_drafts(
    tmp_path: Path, tables: Tables, engine: StepPlan, command: str, draft: str | None
) -> None:
    speculation = SpeculativeDecoding(3, 2.4, draft)
    cluster(tmp_path, engine, speculation)
    own = read(tmp_path, command)
    assert {row.speculation for row in own.rows} == {speculation}
    report = validate_own(own.rows, (), tables)
    assert {row.kind for row in report.rows} == {INDEPENDENT}
    # the runs' requests per client are not those of a steady state, which they were made from
    assert max(abs(row.error) for row in report.rows if row.quantity != "ttft") < 0.05
    # without drafts they would be much slower
    plain = tuple(replace(row, speculation=None) for row in own.rows)
    assert min(row.error for row in validate_own(plain, (), tables).rows if row.quantity != "ttft") > 0.25


def test_a_draft_model_is_timed_as_its_plan(tmp_path: Path, tables: Tables, engine: StepPlan) -> None:
    small = "Qwen/Qwen3-0.6B"
    drafter = compile_plan(
        small, "h100", tables, engine=engine.profile.kernels_alone(), max_num_batched_tokens=8192,
        max_num_seqs=1024, allow_modelled=True,
    )  # fmt: skip
    cluster(tmp_path, engine, SpeculativeDecoding(3, 2.4, drafter))
    own = read(tmp_path, SERVE + json.dumps({"model": small, "num_speculative_tokens": 3}).join("''"))
    assert own.rows[0].draft_model == small
    report = validate_own(own.rows, (), tables)
    assert max(abs(row.error) for row in report.rows if row.quantity != "ttft") < 0.05


@pytest.mark.slow
def test_costs_come_back_from_runs_with_drafts(tmp_path: Path, tables: Tables) -> None:
    profile = replace(engine_of_version("vllm", VERSION), costs=StepCosts(step_us=300.0, sequence_us=5.0))
    plan = compile_plan("llama-3.1-8b", "h100", tables, engine=profile)
    cluster(tmp_path, plan, SpeculativeDecoding(3, 2.4, "mtp"))
    fitted = fit_own_runs(read(tmp_path, MTP), tables, resamples=0)
    assert fitted.profile.costs.step_us == pytest.approx(300.0, rel=0.02)
    assert fitted.profile.costs.sequence_us == pytest.approx(5.0, rel=0.1)
    assert fitted.fit.left_out_mape < 0.01 < fitted.kernels_mape
    assert not fitted.suspects
    words = ["--runs", str(tmp_path), "--gpu", "h100", "--engine-version", VERSION, "--bootstrap", "0"]
    shown = good("calibrate", *words)
    assert "3 draft tokens by mtp, 2.4 tokens accepted a step" in shown


def test_unknown_facts_of_drafts_are_reported(tmp_path: Path, tables: Tables, engine: StepPlan) -> None:
    cluster(tmp_path, engine, SpeculativeDecoding(3, 2.4))
    plain = read(tmp_path, f"vllm serve {LLAMA}")
    assert all(
        "2.4 tokens a step: speculative decoding; name its drafts" in row.left_out for row in plain.rows
    )
    with pytest.raises(
        TableError, match="name its drafts in the engine's arguments, or give --num-draft-tokens"
    ):
        fit_own_runs(plain, tables)
    one = read(tmp_path, SERVE + '\'{"method": "ngram", "num_speculative_tokens": 1}\'')
    assert all("accepted must be a number from 1 to 2" in row.left_out for row in one.rows)
    named = read(tmp_path, f"vllm serve {LLAMA}", num_draft_tokens=3)
    assert {row.speculation for row in named.rows} == {SpeculativeDecoding(3, 2.4)}
    other = read(tmp_path, f"vllm serve {LLAMA}", num_draft_tokens=3, accepted="1.5")
    assert {row.speculation for row in other.rows} == {SpeculativeDecoding(3, 1.5)}

    cluster(tmp_path, engine, SpeculativeDecoding(3, 2.4), has_accepted=False)
    unknown = read(tmp_path, NGRAM)
    assert all("neither its file nor --accepted has the mean tokens" in row.left_out for row in unknown.rows)
    given = read(tmp_path, NGRAM, accepted="0.7,0.4,0.3")
    assert {row.speculation for row in given.rows} == {SpeculativeDecoding(3, (0.7, 0.4, 0.3))}
    auto = read(tmp_path, NGRAM, accepted="auto")
    assert all("accepted='auto' needs a measured acceptance length" in row.left_out for row in auto.rows)


def test_auto_is_what_was_measured_for_the_model(tmp_path: Path, engine: StepPlan) -> None:
    cluster(tmp_path, engine, SpeculativeDecoding(3, 2.4), has_accepted=False)
    own = read(tmp_path, MTP.replace(LLAMA, "zai-org/GLM-5.2-FP8"), accepted="auto")
    known = {row.speculation for row in own.rows}
    assert known == {SpeculativeDecoding(3, 2.99, "mtp", accepted_from=next(iter(known)).accepted_from)}
    assert "glm-5.2-fp8 with MTP, SPEED-Bench coding" in str(next(iter(known)))


def test_commands_take_drafts_of_runs(tmp_path: Path, engine: StepPlan) -> None:
    cluster(tmp_path, engine, SpeculativeDecoding(3, 2.4, "mtp"), has_accepted=False)
    (tmp_path / "engine_args.txt").write_text(f"vllm serve {LLAMA}")
    words = ["validate", "--runs", str(tmp_path), "--gpu", "h100", "--engine-version", VERSION, "--json"]
    drafts = ["--num-draft-tokens", "3", "--accepted", "2.4", "--draft", "mtp"]
    shown = good(*words, *drafts)
    groups = {group["quantity"]: group["mape"] for group in json.loads(shown)["groups"]}
    assert max(groups["tpot"], groups["decode"]) < 0.05
    refused = CliRunner().invoke(app, ["validate", *drafts])
    assert refused.exit_code == 2
    assert "--draft go with --runs or --steps" in refused.output
