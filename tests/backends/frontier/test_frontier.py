"""Frontier: registered without a patch, called by its stage schedulers, equal to the plan.

Against a stand-in of its tree, frontier_tree; what it follows and leaves out is listed there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import fastroof
from tests.backends.interfaces import python_differences, recorded

TREE = Path(__file__).with_name("frontier_tree")
CHECKOUT = TREE.parents[3]


@pytest.fixture(scope="module")
def frontier():
    """The stand-in as `frontier`, and the adapter imported on top of it; both gone afterwards."""

    def forget():
        for name in list(sys.modules):
            if name.split(".")[0] == "frontier" or name.startswith("fastroof.backends.frontier"):
                del sys.modules[name]

    forget()
    sys.path.insert(0, str(TREE))
    names = ("config", "entities", "execution_time_predictor", "scheduler", "types")
    modules = {name: import_module(f"frontier.{name}") for name in names}
    adapter = import_module("fastroof.backends.frontier")
    yield SimpleNamespace(**modules, adapter=adapter, clusters=modules["types"].ClusterType)
    sys.path.remove(str(TREE))
    forget()


def made(frontier, cluster="MONOLITHIC", replica=None, **options):
    given = {"model_name": "meta-llama/Llama-3.1-8B", "device": "h100"} | (replica or {})
    if isinstance(layers := given.pop("num_layers", 32), int):
        given.setdefault("model_config", frontier.config.BaseModelConfig(layers))
    return frontier.adapter.FastroofExecutionTimePredictor(
        frontier.adapter.FastroofExecutionTimePredictorConfig(**options),
        frontier.config.ReplicaConfig(**given),
        cluster_type=frontier.clusters[cluster],
    )


@pytest.fixture(scope="module")
def predictor(frontier):
    return made(frontier)


def request(frontier, prompt, *steps):
    """A request that went through steps: (cluster, tokens)."""
    one = frontier.entities.Request(0.0, prompt, 100)
    for cluster, tokens in steps:
        one.on_batch_end(1.0, tokens, frontier.clusters[cluster])
    return one


def seconds(predictor, frontier, requests, num_tokens, cluster="MONOLITHIC"):
    batch = frontier.entities.Batch(0, requests, num_tokens, is_moe=False)
    return frontier.scheduler.predict_and_create_stage(predictor, batch, 0, frontier.clusters[cluster])


def test_the_stand_in_and_the_adapter_have_frontiers_signatures(frontier):
    names = {
        **vars(frontier.entities),
        **vars(frontier.execution_time_predictor),
        **vars(frontier.types),
        "BaseExecutionTimePredictor": frontier.adapter.FastroofExecutionTimePredictor,
    }
    assert [python_differences(one, names) for one in recorded("frontier")] == [[]] * 4


@pytest.mark.parametrize(
    ("replica", "options"),
    [
        ({}, {}),
        ({}, {"engine": "kernels"}),
        (
            {"model_name": "llama-3.1-70b", "attn_tensor_parallel_size": 4, "num_layers": 80},
            {"dtype": "fp8", "kv_dtype": "fp8"},
        ),
        ({"model_name": "gemma-3-12b", "num_layers": 48}, {}),
    ],
)
def test_a_mixed_step_of_a_colocated_cluster_is_the_plans_to_the_bit(frontier, replica, options):
    predictor = made(frontier, replica=replica, **options)
    whole = [("MONOLITHIC", 1000)]
    requests = [request(frontier, 1000, *whole), request(frontier, 1000, *whole, ("MONOLITHIC", 1))]
    requests += [request(frontier, 900), request(frontier, 900, ("MONOLITHIC", 300))]
    expected = predictor.plan.step_scalar([1, 1, 510, 200], [1000, 1001, 0, 300]) / 1e6
    assert seconds(predictor, frontier, requests, [1, 1, 510, 200]) == (expected, expected)


def test_a_decode_cluster_counts_no_token_that_the_prefill_gave(frontier):
    prefill, decode = made(frontier, "PREFILL"), made(frontier, "DECODE")
    one = request(frontier, 1000)
    expected = prefill.plan.prefill_us(1000, 0) / 1e6
    assert seconds(prefill, frontier, [one], [1000], "PREFILL")[0] == expected
    one.on_batch_end(1.0, 1000, frontier.clusters.PREFILL)
    for context in (1000, 1001):
        expected = decode.plan.step_scalar([1], [context]) / 1e6
        assert seconds(decode, frontier, [one], [1], "DECODE")[0] == expected
        one.on_batch_end(1.0, 1, frontier.clusters.DECODE)


def test_what_was_preempted_recomputes_in_chunks(frontier, predictor):
    one = request(frontier, 1000, ("MONOLITHIC", 1000), ("MONOLITHIC", 1))
    one.restart()
    for chunk, context in ((512, 0), (490, 512)):
        expected = predictor.plan.step_scalar([chunk], [context]) / 1e6
        assert seconds(predictor, frontier, [one], [chunk])[0] == expected
        one.on_batch_end(1.0, chunk, frontier.clusters.MONOLITHIC)
    assert one.num_processed_tokens == 1003
    assert seconds(predictor, frontier, [one], [1])[0] == predictor.plan.step_scalar([1], [1002]) / 1e6


@pytest.mark.parametrize("engine", ["kernels", "vllm"])
def test_the_terms_add_up_to_the_step(frontier, engine):
    predictor = made(
        frontier,
        replica={"model_name": "llama-3.1-70b", "attn_tensor_parallel_size": 4, "num_layers": 80},
        engine=engine,
    )
    requests = [request(frontier, 4095, ("MONOLITHIC", 4095))] * 64
    batch = frontier.entities.Batch(0, requests, [1] * 64, is_moe=False)
    one, two = (
        predictor.predict_stage_execution_time(batch, 0, frontier.clusters.MONOLITHIC, 80) for _ in range(2)
    )
    of_itself = one.id
    assert (one.layers_ms + one.sampler_e2e_time) / 1e3 == pytest.approx(one.total_time, rel=1e-12)
    assert one.diagnostic_total_time_ms == one.total_time * 1e3
    parts = {part.name: part.total_us for part in predictor.plan.explain([(1, 4095)] * 64).operators}
    assert one.attention_decode_execution_time == pytest.approx(parts["decode attention"] / 1e3)
    assert one.id == of_itself != two.id
    with pytest.raises(AttributeError, match="no attribute 'latency'"):
        one.latency  # noqa: B018


def test_what_it_cannot_time_is_refused(frontier, predictor):
    for cluster in ("DECODE_ATTN", "DECODE_FFN"):
        with pytest.raises(fastroof.BackendError, match=f"cluster {cluster}: .*one layer apart"):
            made(frontier, cluster)
        with pytest.raises(fastroof.BackendError, match="whole steps"):
            seconds(predictor, frontier, [request(frontier, 100)], [100], cluster)
    with pytest.raises(fastroof.BackendError, match="num_pipeline_stages=2"):
        made(frontier, replica={"num_pipeline_stages": 2})
    with pytest.raises(fastroof.BackendError, match="attn_data_parallel_size=2"):
        made(frontier, replica={"attn_data_parallel_size": 2})
    experts = frontier.config.BaseModelConfig(32, is_moe=True)
    with pytest.raises(fastroof.BackendError, match="mixtral-8x7b has experts"):
        made(frontier, replica={"model_name": "mixtral-8x7b", "model_config": experts})
    with pytest.raises(fastroof.BackendError, match=r"has 32 layers, and the replica's .* 80"):
        made(frontier, replica={"num_layers": 80})
    batch = frontier.entities.Batch(0, [request(frontier, 10)], [10], is_moe=False)
    with pytest.raises(fastroof.BackendError, match="num_layers=1 of 32"):
        predictor.predict_stage_execution_time(batch, 0, frontier.clusters.MONOLITHIC)
    drafts = request(frontier, 100, ("MONOLITHIC", 100))
    drafts._spec_decode_enabled = True
    with pytest.raises(fastroof.BackendError, match="verifies draft tokens"):
        seconds(predictor, frontier, [drafts], [4])
    with pytest.raises(fastroof.PlanRangeError, match="max_num_batched_tokens"):
        seconds(predictor, frontier, [request(frontier, 10000)], [10000])


def test_frontiers_registry_makes_it_and_its_options_have_types(frontier):
    registry, dummy = (
        frontier.execution_time_predictor.ExecutionTimePredictorRegistry,
        frontier.types.ExecutionTimePredictorType.DUMMY,
    )
    config = frontier.adapter.FastroofExecutionTimePredictorConfig()
    assert config.get_type() is dummy
    assert config.enable_dummy_mode
    replica = frontier.config.ReplicaConfig(model_name="llama-3.1-8b", device="h100")
    one = registry.get(dummy, config, replica, None, None, cluster_type=frontier.clusters.PREFILL)
    assert one.plan.model.name == "llama-3.1-8b"
    types = frontier.config.resolved_options(type(config))
    assert types["max_num_batched_tokens"] is int
    assert not any(isinstance(kind, str) for kind in types.values())
    predictor = frontier.adapter.FastroofExecutionTimePredictor
    registry.unregister(dummy)
    registry.register(dummy, int)
    with pytest.raises(fastroof.BackendError, match=r"already has a predictor for DUMMY, int.*unregister"):
        frontier.adapter.register(registry, dummy, predictor, "Frontier")
    registry.unregister(dummy)
    frontier.adapter.register(registry, dummy, predictor, "Frontier")


def run(module, *path):
    paths = os.pathsep.join(map(str, (CHECKOUT, *path)))
    return subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_it_replaces_frontiers_main_and_names_what_it_needs():
    done = run("fastroof.backends.frontier", TREE)
    assert (done.stdout, done.returncode) == ("FastroofExecutionTimePredictor\n", 0)
    assert "needs Frontier's source tree" in run("fastroof.backends.frontier").stderr


@pytest.mark.slow
def test_the_example_runs():
    done = run("tests.examples.frontier", TREE)
    assert done.stderr == ""
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["constant", "fastroof"] * 2
