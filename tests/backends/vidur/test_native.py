"""fastroof.backends.vidur.native: step times in simulations of the package vidur 0.0.26, by its own classes.

Needs an environment with vidur==0.0.26 (1.3 GB) beside fastroof's `test` extra; without it the tests of
Vidur's classes skip.
"""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fastroof
from fastroof import BackendError, PlanRangeError, StepPlan, Tables

CHECKOUT = Path(__file__).resolve().parents[3]
MODEL = "meta-llama/Llama-3-8B"
SCHEDULERS = (
    "VllmSchedulerConfig",
    "SarathiSchedulerConfig",
    "MnemosyneFCFSFixedChunkSchedulerConfig",
    "MnemosyneFCFSSchedulerConfig",
    "MnemosyneEDFSchedulerConfig",
    "MnemosyneLRSSchedulerConfig",
    "MnemosyneSTSchedulerConfig",
)


@pytest.fixture(scope="session")
def plan(h100: Tables) -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")


@pytest.fixture
def vidur(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Vidur's configurations; its round-robin scheduler needs replicas that are counted from 0."""
    pytest.importorskip("vidur._native", reason="needs vidur==0.0.26 in an environment of its own")
    from vidur import config
    from vidur.entities import Replica

    monkeypatch.setattr(Replica, "_id", -1)
    return config


def predictor(vidur: Any, plan: StepPlan, folder: Path, *, replica: Any = None, **fields: Any) -> Any:
    from fastroof.backends.vidur.native import FastroofPredictor, FastroofPredictorConfig

    config = FastroofPredictorConfig.of(plan, cache_dir=str(folder / "cache"), **fields)
    replica = replica or vidur.ReplicaConfig(MODEL, num_pipeline_stages=1, tensor_parallel_size=plan.tp)
    return FastroofPredictor(config, replica, vidur.CacheConfig())


def batch(requests: list[tuple[int, int, bool]], groups: bool) -> Any:
    """A Vidur batch of (new tokens, tokens processed before, whether it is decoding)."""
    from vidur.entities import Batch, Request

    made = []
    for new, processed, decoding in requests:
        request = Request(0.0, processed - 1 if decoding else processed + new, 1000)
        request._num_processed_tokens = processed
        request._is_prefill_complete = decoding
        made.append(request)
    new_tokens = [new for new, _, _ in requests]
    kv_tokens = [processed + (0 if groups else new) for new, processed, _ in requests]
    active = [1] * len(requests) if groups else None
    return Batch(0, made, new_tokens, kv_tokens, active, [0] * len(requests) if groups else None)


class StepCall(NamedTuple):
    """One call for a step time, with the tokens in Vidur's requests."""

    new_tokens: list[int]
    context_len: list[int]
    total_s: float


def simulate(
    vidur: Any, plan: StepPlan, folder: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> list[StepCall]:
    """Run Vidur's simulator, and return every step time it asked for."""
    from vidur.simulator import Simulator

    from fastroof.backends.vidur.native import FastroofPredictor, FastroofPredictorConfig

    calls = []
    answer = FastroofPredictor.get_execution_time

    def watched(self: Any, batch: Any, pipeline_stage: int) -> Any:
        step = answer(self, batch, pipeline_stage)
        if hasattr(batch, "batch_mapping"):
            (batch,) = batch.batch_mapping.values()
        context_len = [
            # schedulers with deadlines ask about prompts of no request
            kv if request is None else request.num_processed_tokens - request.is_prefill_complete
            for request, kv in zip(batch.requests, batch.num_kv_tokens, strict=True)
        ]
        calls.append(StepCall(list(batch.num_q_tokens), context_len, step.total_time))
        return step

    monkeypatch.setattr(FastroofPredictor, "get_execution_time", watched)
    replica = vidur.ReplicaConfig(MODEL, num_pipeline_stages=1, tensor_parallel_size=plan.tp)
    lengths = vidur.UniformRequestLengthGeneratorConfig(
        min_tokens=200, max_tokens=2048, prefill_to_decode_ratio=8.0
    )
    requests = vidur.SyntheticRequestGeneratorConfig(
        length_generator_config=lengths,
        interval_generator_config=vidur.PoissonRequestIntervalGeneratorConfig(qps=30.0),
        num_requests=40,
    )
    config = vidur.SimulationConfig(
        cluster_config=vidur.ClusterConfig(
            replica_config=replica, replica_scheduler_config=getattr(vidur, scheduler)()
        ),
        request_generator_config=requests,
        execution_time_predictor_config=FastroofPredictorConfig.of(plan, cache_dir=str(folder / "cache")),
        metrics_config=vidur.MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, output_dir=str(folder)
        ),
    )
    Simulator(config).run()
    return calls


def test_the_package_loads_no_client() -> None:
    code = "import sys, fastroof.backends.vidur; print('vidur' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_without_vidur_the_error_names_what_to_install() -> None:
    code = "import sys; sys.modules['vidur'] = None; import fastroof.backends.vidur.native"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True)
    assert "ImportError: fastroof.backends.vidur.native needs" in done.stderr
    assert "and no vidur is installed" in done.stderr
    assert "pip install vidur==0.0.26" in done.stderr


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_step_of_a_simulation_takes_the_plans_time(
    vidur: Any, plan: StepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    wanted = simulate(vidur, plan, tmp_path, monkeypatch, scheduler)
    assert len(wanted) > 200
    for step in wanted:
        us = plan.step_scalar(step.new_tokens, step.context_len)
        assert step.total_s == us / 1e3 * 1e-3
        assert step.total_s == pytest.approx(us * 1e-6, rel=2**-51, abs=0)
    kinds = {(max(step.new_tokens) > 1, min(step.new_tokens) == 1) for step in wanted}
    assert {(True, False), (False, True)} <= kinds
    assert len({len(step.new_tokens) for step in wanted}) > 5


def test_the_orca_scheduler_is_refused(
    vidur: Any, plan: StepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match=r"orca scheduler of vidur 0\.0\.26"):
        simulate(vidur, plan, tmp_path, monkeypatch, "OrcaSchedulerConfig")


@pytest.mark.parametrize("groups", [False, True])
def test_both_countings_of_kv_tokens_are_one_step(
    vidur: Any, plan: StepPlan, tmp_path: Path, groups: bool
) -> None:
    from vidur.entities import KVParallelBatch

    requests = [(512, 0, False), (100, 512, False), (1, 0, False), (1, 700, True), (1, 2, True)]
    wanted = batch(requests, groups)
    if groups:
        wanted = KVParallelBatch(0, {0: wanted})
    step = predictor(vidur, plan, tmp_path).get_execution_time(wanted, 0)
    assert step.total_time == plan.step_scalar([512, 100, 1, 1, 1], [0, 512, 0, 699, 1]) / 1e3 * 1e-3
    decodes = batch([(1, 700, True), (1, 2, True)], groups)
    step = predictor(vidur, plan, tmp_path).get_execution_time(decodes, 0)
    assert step.total_time == plan.step_scalar([1, 1], [699, 1]) / 1e3 * 1e-3


def test_a_step_is_one_term_that_vidur_counts_once(vidur: Any, plan: StepPlan, tmp_path: Path) -> None:
    from vidur._native.entities import ExecutionTime

    from fastroof.backends.vidur import native

    step = predictor(vidur, plan, tmp_path).get_execution_time(batch([(1, 700, True)], False), 0)
    assert isinstance(step, ExecutionTime)
    assert step.num_layers == 32
    assert step.pipeline_parallel_communication_time == plan.step_scalar([1], [699]) / 1e3
    assert all(getattr(step, name) == 0.0 for name in native._TERMS)
    assert step.model_time == step.total_time


@pytest.mark.parametrize(("tp", "engine"), [(1, "kernels"), (4, "vllm"), (4, "trtllm")])
def test_by_operator_the_terms_are_a_layer_of_the_plan(
    vidur: Any, h100: Tables, tmp_path: Path, tp: int, engine: str
) -> None:
    from fastroof.backends.vidur import native

    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=tp, dtype="fp8", engine=engine)
    wanted = batch([(512, 100, False), (1, 700, True)], False)
    step = predictor(vidur, plan, tmp_path, by_operator=True).get_execution_time(wanted, 0)
    explained = plan.explain([(512, 100), (1, 699)])
    assert step.total_time == pytest.approx(explained.total_us * 1e-6, rel=1e-15, abs=0)
    once = ("embedding", "final_norm", "lm_head")
    operators_us = {operator.role: operator.total_us for operator in explained.operators}
    assert {n.removesuffix("_quantise") for n in operators_us} <= {*native._TERM_OF, *once, "runtime"}
    qkv_us = sum(us for name, us in operators_us.items() if name in ("qkv", "qkv_quantise"))
    assert step.attention_layer_pre_proj_execution_time == pytest.approx(qkv_us / 32 / 1e3)
    assert step.attention_decode_execution_time == pytest.approx(operators_us["decode_attention"] / 32 / 1e3)
    reduces_us = sum(us for name, us in operators_us.items() if "allreduce" in name)
    assert step.tensor_parallel_communication_time == pytest.approx(reduces_us / 64 / 1e3)
    assert (reduces_us > 0) == (tp > 1)
    runtime_us = operators_us.get("runtime", 0.0)
    once_us = sum(operators_us[name] for name in once) + runtime_us
    assert step.pipeline_parallel_communication_time == pytest.approx(once_us / 1e3)
    assert once_us > 0


def test_a_step_larger_than_the_plan_is_an_error(vidur: Any, h100: Tables, tmp_path: Path) -> None:
    small = fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=256, engine="kernels")
    with pytest.raises(PlanRangeError, match="max_num_batched_tokens"):
        predictor(vidur, small, tmp_path).get_execution_time(batch([(512, 0, False)], False), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pipeline_stages": 2}, "num_pipeline_stages is 2: fastroof times tensor parallelism"),
        ({"kv_parallel_size": 2}, "kv_parallel_size is 2"),
        ({"tensor_parallel_size": 8}, "tp=1, the replica tensor_parallel_size=8"),
        ({"model_name": "meta-llama/Llama-3-70B"}, "runs meta-llama/Llama-3-70B, the plan llama-3.1-8b"),
    ],
)
def test_replicas_that_no_plan_times_are_refused(
    vidur: Any, plan: StepPlan, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    fields = {"model_name": MODEL, "num_pipeline_stages": 1, "tensor_parallel_size": 1, **options}
    with pytest.raises(BackendError, match=message):
        predictor(vidur, plan, tmp_path, replica=vidur.ReplicaConfig(**fields))


def test_times_are_kept_by_what_they_depend_on(
    vidur: Any, plan: StepPlan, h100: Tables, tmp_path: Path
) -> None:
    other = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="trtllm")
    ours, theirs = (predictor(vidur, p, tmp_path).to_dict() for p in (plan, other))
    assert ours["plan"] != theirs["plan"]
    assert ours == predictor(vidur, plan, tmp_path).to_dict()


def test_it_is_one_of_vidurs_predictors(vidur: Any, plan: StepPlan, tmp_path: Path) -> None:
    from vidur.execution_time_predictor import BaseExecutionTimePredictor, ExecutionTimePredictorRegistry
    from vidur.types import ExecutionTimePredictorType

    ours = predictor(vidur, plan, tmp_path)
    assert isinstance(ours, BaseExecutionTimePredictor)
    assert ExecutionTimePredictorRegistry.get_class(ExecutionTimePredictorType.DUMMY) is type(ours)


def test_vidurs_command_line_simulates_one_request_step_by_step(
    vidur: Any, h100: Tables, tmp_path: Path
) -> None:
    """A request of 1,000 prompt and 21 output tokens takes its chunks and its decodes, one after another."""
    options = {
        "execution_time_predictor_config_type": "dummy",
        "fastroof_predictor_config_model": "llama-3.1-8b",
        "fastroof_predictor_config_dtype": "fp8",
        "fastroof_predictor_config_cache_dir": tmp_path / "cache",
        "replica_config_num_pipeline_stages": 1,
        "replica_config_tensor_parallel_size": 2,
        "replica_scheduler_config_type": "sarathi",
        "sarathi_scheduler_config_chunk_size": 512,
        "synthetic_request_generator_config_num_requests": 1,
        "fixed_request_length_generator_config_prefill_tokens": 1000,
        "fixed_request_length_generator_config_decode_tokens": 21,
        "metrics_config_output_dir": tmp_path,
    }
    pairs = [(f"--{name}", str(value)) for name, value in options.items()]
    arguments = [*itertools.chain(*pairs), "--no-metrics_config_store_plots"]
    module = "fastroof.backends.vidur.native"
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (metrics,) = tmp_path.glob("*/request_metrics.csv")
    with metrics.open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, dtype="fp8", engine="vllm")
    chunks_us = plan.prefill_us(512) + plan.prefill_us(488, 512)
    decodes_us = sum(plan.decode_us(1, kv_len) for kv_len in range(1001, 1021))
    assert float(row["prefill_e2e_time"]) == pytest.approx(chunks_us * 1e-6, rel=1e-12)
    assert float(row["request_e2e_time"]) == pytest.approx((chunks_us + decodes_us) * 1e-6, rel=1e-12)


def test_config_json_has_what_was_simulated(vidur: Any, plan: StepPlan, tmp_path: Path) -> None:
    from fastroof.backends.vidur.native import FastroofPredictorConfig

    vidur.SimulationConfig(
        execution_time_predictor_config=FastroofPredictorConfig.of(plan),
        metrics_config=vidur.MetricsConfig(output_dir=str(tmp_path)),
    )
    (written,) = tmp_path.glob("*/config.json")
    facts = json.loads(written.read_text("utf-8"))["execution_time_predictor_config"]
    assert facts["name"] == "dummy"
    assert (facts["model"], facts["gpu"], facts["engine"]) == ("llama-3.1-8b", plan.gpu.name, "vllm")
    assert facts["tables"] == plan.tables_hash


def test_example_runs(vidur: Any) -> None:
    module = "tests.examples.vidur_native"
    done = subprocess.run([sys.executable, "-m", module], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("300 requests: median TTFT ")
