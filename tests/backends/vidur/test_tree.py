"""Vidur's source tree: registered without a patch, called by its schedulers, equal to the plan.

Against a stand-in of the tree, tests/backends/vidur/vidur_tree; it lists what it leaves out.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import fastroof
from fastroof.backends.vidur.terms import TERM_OF
from fastroof.models import Layout
from fastroof.models.execution import Execution
from fastroof.models.spec import step_calls
from fastroof.operators.calls import AttentionCall, MixerCall, Parallel
from tests.backends.interfaces import python_differences, recorded

TREE = Path(__file__).with_name("vidur_tree")
CHECKOUT = TREE.parents[3]
MODEL = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture
def vidur(monkeypatch):
    """The stand-in as `vidur`, and the adapter imported on top of it; both gone afterwards."""
    ours = ("fastroof.backends.vidur.tree", "tests.examples.vidur_tree")

    def forget():
        for name in list(sys.modules):
            if name == "vidur" or name.startswith("vidur.") or name in ours:
                del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(str(TREE))
    names = ("config", "entities", "execution_time_predictor", "simulator", "types")
    modules = {name: import_module(f"vidur.{name}") for name in names}
    yield SimpleNamespace(**modules, adapter=import_module(ours[0]))
    forget()


@pytest.fixture
def predictor(vidur):
    return made(vidur)


def made(vidur, replica=None, **options):
    config = vidur.adapter.FastroofExecutionTimePredictorConfig(**options)
    replica = {"model_name": MODEL, "device": "h100"} | (replica or {})
    return vidur.execution_time_predictor.ExecutionTimePredictorRegistry.get(
        config.get_type(),
        predictor_config=config,
        replica_config=vidur.config.ReplicaConfig(**replica),
        replica_scheduler_config=vidur.config.SarathiSchedulerConfig(),
        metrics_config=vidur.config.MetricsConfig(),
    )


def request(vidur, prompt, output=100, steps=()):
    """A request that went through steps of so many tokens."""
    made = vidur.entities.Request(0.0, prompt, output)
    for tokens in steps:
        made.on_batch_end(1.0, tokens)
    return made


def seconds(predictor, vidur, requests, num_tokens):
    return predictor.get_execution_time(vidur.entities.Batch(0, requests, num_tokens), 0).total_time


# What a batch is


def test_a_chunk_attends_to_what_was_processed(vidur, predictor):
    first, later = request(vidur, 1000), request(vidur, 1000, steps=[512])
    assert seconds(predictor, vidur, [first], [512]) == predictor.plan.prefill_us(512, 0) / 1e6
    assert seconds(predictor, vidur, [later], [488]) == predictor.plan.prefill_us(488, 512) / 1e6


def test_a_decode_attends_to_the_tokens_that_vidur_counts_itself_included(vidur, predictor):
    decode = request(vidur, 1000, steps=[512, 488])
    # the first output token is counted, and goes through the model now: 1000 in the cache, and itself
    assert decode.num_processed_tokens == 1001
    assert seconds(predictor, vidur, [decode], [1]) == predictor.plan.decode_us(1, 1001) / 1e6
    decode.on_batch_end(2.0, 1)
    assert seconds(predictor, vidur, [decode], [1]) == predictor.plan.decode_us(1, 1002) / 1e6


def test_after_a_preemption_the_output_is_prefilled_with_the_prompt(vidur, predictor):
    restarted = request(vidur, 1000, steps=[1000, 1, 1])
    restarted.restart()
    assert (restarted.num_prefill_tokens, restarted.num_processed_tokens) == (1003, 0)
    assert seconds(predictor, vidur, [restarted], [1003]) == predictor.plan.prefill_us(1003, 0) / 1e6
    restarted.on_batch_end(3.0, 1003)
    assert seconds(predictor, vidur, [restarted], [1]) == predictor.plan.decode_us(1, 1004) / 1e6


def test_a_mixed_batch_is_the_plans_step_to_the_bit(vidur, predictor):
    requests = [request(vidur, 1000, steps=[1000]), request(vidur, 700, steps=[700, 1]), request(vidur, 900)]
    expected = predictor.plan.step_scalar([1, 1, 510], [1000, 701, 0])
    assert seconds(predictor, vidur, requests, [1, 1, 510]) == expected / 1e6
    assert seconds(predictor, vidur, requests[::-1], [510, 1, 1]) == expected / 1e6


# The terms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replica", "options"),
    [
        ({}, {}),
        ({"tensor_parallel_size": 4, "model_name": "meta-llama/Meta-Llama-3-70B"}, {"dtype": "fp8"}),
        ({}, {"engine": "kernels"}),
        ({}, {"model": "qwen3-8b"}),
    ],
)
@pytest.mark.parametrize("kind", ["mixed", "decodes", "prefill"])
def test_vidurs_formulas_hold_over_the_terms(vidur, replica, options, kind):
    predictor = made(vidur, replica, **options)
    chosen = {"mixed": slice(None), "decodes": slice(2), "prefill": slice(2, None)}[kind]
    requests = [request(vidur, 1000, steps=[1000]), request(vidur, 700, steps=[700]), request(vidur, 900)]
    batch = vidur.entities.Batch(0, requests[chosen], [1, 1, 510][chosen])
    found = predictor.get_execution_time(batch, 0)
    terms = {name: getattr(found, f"_{name}") for name in vidur.entities.TERMS}
    again = vidur.entities.ExecutionTime(**terms)
    assert again.total_time == pytest.approx(found.total_time, rel=1e-12)
    assert again.model_time == pytest.approx(found.model_time, rel=1e-12)
    assert found.model_time_ms == found.model_time * 1e3
    assert all(value >= 0.0 for value in terms.values())
    assert (found.schedule_time > 0.0) == (predictor.plan.engine == "vllm")
    assert (found.attention_all_reduce_time > 0.0) == ("tensor_parallel_size" in replica)
    assert (found.attention_decode_execution_time > 0.0) == (kind != "prefill")
    assert (found.attention_prefill_execution_time > 0.0) == (kind != "decodes")


def test_terms_are_those_of_the_explanation(vidur, predictor):
    decode = vidur.entities.Batch(0, [request(vidur, 4095, steps=[4095])] * 64, [1] * 64)
    found = predictor.get_execution_time(decode, 0)
    times = {part.name: part.total_us for part in predictor.plan.explain([(1, 4095)] * 64).operators}
    layers = found.num_layers
    assert layers == 32
    assert found.attention_decode_execution_time * layers == pytest.approx(times["decode attention"] / 1e3)
    assert found.attention_pre_proj_time * layers == pytest.approx(times["qkv"] / 1e3)
    assert found.mlp_layer_up_proj_execution_time * layers == pytest.approx(times["gate_up"] / 1e3)
    assert found.mlp_layer_down_proj_execution_time * layers == pytest.approx(times["down"] / 1e3)
    once = times["embedding"] + times["final rmsnorm"] + times["lm_head"]
    assert found.sampler_e2e_time == pytest.approx(once / 1e3)


def test_every_operator_of_a_layer_has_a_term(vidur):
    for model in map(fastroof.load_model, fastroof.model_names()):
        calls = step_calls(model, Layout(2), Execution("fp8", "fp8", ("fp8",)))
        of_layers = [call for layer in calls.layers for call in layer]
        paths = [path for call in of_layers if isinstance(call, Parallel) for path in call.paths]
        of_layers += [call for path in paths for call in path]
        rows = [call for call in of_layers if not isinstance(call, AttentionCall | MixerCall | Parallel)]
        assert all(call.role in TERM_OF for call in rows)
        assert not any(call.role in TERM_OF for call in (*calls.before, *calls.after))


def test_an_execution_time_has_an_id_of_its_own_and_no_other_attributes(vidur, predictor):
    batch = vidur.entities.Batch(0, [request(vidur, 100)], [100])
    one, two = (predictor.get_execution_time(batch, 0) for _ in range(2))
    assert one.id != two.id
    before = one.id
    assert one.add_time == 0.0
    assert one.id == before
    with pytest.raises(AttributeError, match="no attribute 'latency'"):
        one.latency  # noqa: B018
    copied = copy.deepcopy(two)
    assert copied.total_time == two.total_time
    assert copied.attn_norm_time == two.attn_norm_time


# The plan


def test_the_plan_is_of_the_replicas_sizes(vidur):
    plan = made(vidur, {"tensor_parallel_size": 2}, max_num_batched_tokens=4096).plan
    sizes = vidur.config.MODELS[MODEL]
    assert (plan.model.name, plan.model.num_layers, plan.model.hidden) == (MODEL, 32, 4096)
    attention = plan.model.only_kind.attention
    assert (attention.num_kv_heads, attention.head_dim, plan.model.vocab) == (8, 128, sizes.vocab_size)
    assert (plan.tp, plan.gpu.name, plan.max_num_batched_tokens) == (2, "h100", 4096)
    same = made(vidur, model="llama-3.1-8b").plan
    assert same.decode_us(64, 4096) == made(vidur).plan.decode_us(64, 4096)


def test_what_it_cannot_time_is_refused(vidur, predictor):
    with pytest.raises(fastroof.BackendError, match="num_pipeline_stages=4"):
        made(vidur, {"num_pipeline_stages": 4})
    with pytest.raises(fastroof.UnsupportedModelError, match="use_gated_mlp is False"):
        made(vidur, {"model_name": "microsoft/phi-2"})
    with pytest.raises(fastroof.TableError, match="a100 has no measured tables"):
        made(vidur, {"device": "a100"})
    with pytest.raises(fastroof.PlanRangeError, match="max_num_batched_tokens"):
        seconds(predictor, vidur, [request(vidur, 10000)], [10000])
    with pytest.raises(fastroof.BatchError):
        seconds(predictor, vidur, [request(vidur, 100)], [0])


def test_another_gpu_can_stand_for_the_device_and_a_datasheet_for_its_tables(vidur):
    assert made(vidur, {"device": "a100"}, gpu="h100").plan.gpu.name == "h100"
    with pytest.warns(UserWarning, match="a100"):
        plan = made(vidur, {"device": "a100"}, tables="datasheet").plan
    assert (plan.gpu.name, plan.tables_hash) == ("a100", "")


def test_a_copied_scheduler_keeps_the_predictor_and_a_process_gets_its_own(vidur, predictor):
    assert copy.deepcopy({"predictor": predictor})["predictor"] is predictor
    batch = vidur.entities.Batch(0, [request(vidur, 900, steps=[900])], [1])
    sent = pickle.loads(pickle.dumps(predictor))
    assert sent.get_execution_time(batch, 0).total_time == predictor.get_execution_time(batch, 0).total_time


# Registration


def test_it_is_registered_for_dummy(vidur):
    registry = vidur.execution_time_predictor.ExecutionTimePredictorRegistry
    dummy = vidur.types.ExecutionTimePredictorType.DUMMY
    assert registry.get_class(dummy) is vidur.adapter.FastroofExecutionTimePredictor
    assert vidur.adapter.FastroofExecutionTimePredictorConfig.get_type() is dummy


def test_a_fork_that_has_a_dummy_of_its_own_is_not_overruled(vidur):
    registry = vidur.execution_time_predictor.ExecutionTimePredictorRegistry
    dummy = vidur.types.ExecutionTimePredictorType.DUMMY
    registry.unregister(dummy)
    registry.register(dummy, int)
    with pytest.raises(fastroof.BackendError, match=r"already has a predictor for DUMMY, int.*unregister"):
        vidur.adapter.register(registry, dummy, vidur.adapter.FastroofExecutionTimePredictor, "Vidur")


def test_the_command_line_chooses_and_configures_it(vidur, monkeypatch):
    prefix = "--fastroof_execution_time_predictor_config"
    options = f"--execution_time_predictor_config_type dummy {prefix}_gpu h100 {prefix}_max_num_seqs 128"
    monkeypatch.setattr(sys, "argv", ["vidur", *options.split()])
    config = vidur.config.SimulationConfig.create_from_cli_args().execution_time_predictor_config
    assert config == vidur.adapter.FastroofExecutionTimePredictorConfig(gpu="h100", max_num_seqs=128)


def run(*arguments, tree=TREE):
    path = os.pathsep.join(map(str, filter(None, (CHECKOUT, tree, os.environ.get("PYTHONPATH")))))
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_vidurs_own_command_line_simulates_with_it():
    options = "--execution_time_predictor_config_type dummy --replica_config_device h100"
    done = run("fastroof.backends.vidur.tree", *options.split(), "--replica_config_model_name", MODEL)
    assert done.stderr == ""
    assert done.stdout.startswith("Simulation ended at: ")


@pytest.mark.slow
def test_the_example_runs():
    done = run("tests.examples.vidur_tree")
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["constant", "fastroof"] * 2


@pytest.mark.slow
def test_without_a_tree_it_names_what_it_needs(tmp_path):
    (tmp_path / "vidur").mkdir()
    (tmp_path / "vidur" / "__init__.py").touch()
    native = tmp_path / "native"
    (native / "vidur" / "_native").mkdir(parents=True)
    (native / "vidur" / "__init__.py").touch()
    hidden = tmp_path / "checkout"
    (hidden / "vidur" / "types").mkdir(parents=True)
    for path, message in (
        ((tmp_path,), f"{tmp_path}/vidur is a source tree (No module named 'vidur.types')"),
        ((native,), f"{native}/vidur is the vidur of PyPI"),
        ((hidden, native), f"{native}/vidur is the vidur of PyPI"),  # which has an __init__.py
    ):
        done = run("fastroof.backends.vidur.tree", tree=os.pathsep.join(map(str, path)))
        assert done.returncode == 1
        assert f"needs Vidur's source tree or a fork of it, and {message}" in done.stderr
        assert done.stderr.count("\n") == 1


# A whole simulation


@pytest.mark.parametrize("num_blocks", [100000, 600])
def test_a_simulation_times_every_batch_as_the_plan_does(vidur, monkeypatch, num_blocks):
    """With plenty of KV cache, and with so little that requests are preempted and start anew."""
    config = vidur.config.SimulationConfig(
        cluster_config=vidur.config.ClusterConfig(
            vidur.config.ReplicaConfig(MODEL, device="h100"),
            vidur.config.SarathiSchedulerConfig(num_blocks=num_blocks),
        ),
        execution_time_predictor_config=vidur.adapter.FastroofExecutionTimePredictorConfig(),
    )
    requests = vidur.simulator.poisson_requests(60, 20.0, seed=1)
    simulator = vidur.simulator.Simulator(config, requests)
    plan = simulator._predictor.plan
    in_cache = dict.fromkeys((request.id for request in requests), 0)
    call = simulator._predictor.get_execution_time

    def watched(batch, stage):
        # counts what is in each request's KV cache by itself, from what went through the model
        for request in batch.requests:
            if request.num_processed_tokens == 0:
                in_cache[request.id] = 0
        step = [(tokens, in_cache[r.id]) for r, tokens in zip(batch.requests, batch.num_tokens, strict=True)]
        for request, tokens in zip(batch.requests, batch.num_tokens, strict=True):
            in_cache[request.id] += tokens
        found = call(batch, stage)
        assert found.total_time == plan.step_us(fastroof.StepBatch.from_requests([step]))[0] / 1e6
        return found

    monkeypatch.setattr(simulator._predictor, "get_execution_time", watched)
    end_s = simulator.run()
    assert all(
        request.completed and request.arrived_at < request.completed_at <= end_s for request in requests
    )
    restarts = sum(request.num_restarts for request in requests)
    assert (restarts > 0) == (num_blocks == 600)


def test_the_stand_in_has_the_recorded_signatures(vidur):
    times, batches, base = recorded("vidur_tree")
    ours = vidur.adapter.FastroofExecutionTimePredictor
    assert python_differences(times, vars(vidur.entities)) == []
    assert python_differences(batches, vars(vidur.entities)) == []
    assert (
        python_differences(
            times._replace(signatures=times.signatures[1:]),
            {"ExecutionTime": vidur.adapter.StepExecutionTime},
        )
        == []
    )
    wanted, made = base.signatures
    assert python_differences(base._replace(signatures=(wanted,)), {"BaseExecutionTimePredictor": ours}) == []
    given = made[made.index("(") + 1 : -1].split(", ")
    inspect.signature(ours).bind(**dict.fromkeys(given))
