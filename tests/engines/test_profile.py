"""Engine profiles: loading them, their versions, and what they add to a step."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest

from benchmarks.accuracy.benches import without_bench
from fastroof import StepBatch, compile_plan, compile_plans
from fastroof.config.gpu import load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.engines import (
    CostForm,
    EngineProfile,
    KernelChoices,
    KvMemory,
    LayerCost,
    OperatorKernel,
    Scheduling,
    StepCosts,
    engine_names,
    engine_of_version,
    load_engine,
    serving_engines,
)
from fastroof.engines.values import holds_for, is_beyond, is_version
from fastroof.errors import PlanError
from fastroof.evidence.profile_file import write_profile
from fastroof.models import load_model
from fastroof.operators.elementwise import ELEMENTWISE
from fastroof.operators.gemm import LARGEST_SMOOTHED_M, median_of_three
from fastroof.plan.plan_data import kernel_sources
from fastroof.units import GIB

STEPS = StepBatch.from_requests([[(1, 4095)] * 8, [(512, 0), (1, 99)], [(300, 40)], [], [(1, 0)]])
PROFILE = EngineProfile(
    "mine",
    costs=StepCosts(step_us=500.0, sequence_us=30.0, prefill_us=70.0, prefill_floor_layer_us=200.0),
)


def test_the_packaged_profiles_load():
    assert set(engine_names()) >= {"infersim", "kernels", "sglang", "trtllm-1.1", "vllm"}
    for name in engine_names():
        profile = load_engine(name)
        assert profile.name == name
        assert profile.engine in (name.partition("-")[0], "")
        chosen = dataclasses.replace(profile.kernels, engines=(), operators=())
        adds_nothing = profile == profile.kernels_alone() and chosen == KernelChoices()
        assert adds_nothing == (name == "kernels")
        assert load_engine(profile) is profile
        assert load_engine(dataclasses.asdict(profile)) == profile
    recent = load_engine("trtllm-1.2.0")
    assert (recent.name, recent.kernels.fp8_scales) == ("trtllm-1.1", "static")
    assert load_engine("trtllm-1.0.0").name == "trtllm-1.0"
    infersim = load_engine("infersim")
    assert (infersim.costs.step_us, infersim.costs.step_us + infersim.costs.prefill_us) == (5000.0, 30000.0)


def test_a_profile_is_a_file_too(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[costs]\nstep_us = 3.5\nsequence_us = 2\n[memory]\nkv_reservation = 'full'\n", "utf-8")
    profile = load_engine(path)
    assert (profile.name, profile.costs, profile.memory) == ("mine", StepCosts(3.5, 2.0), KvMemory("full"))
    assert (profile.scheduling, profile.kernels, profile.fit) == (Scheduling(), KernelChoices(), None)
    assert load_engine(str(path)) == profile


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("costs.step_us = -1", r"mine\.toml, line 1: costs: step_us must be a number of at least 0, got -1"),
        ("costs.step_us = true", "step_us must be a number"),
        ("costs.step_us = nan", "step_us must be a number"),
        (
            "costs.sequence_ms = 1",
            "line 1: costs: unknown key 'sequence_ms'; did you mean sequence_us",
        ),
        ("sequence_ms = 1", "line 1: unknown key 'sequence_ms'; valid: name, engine"),
        ("step_us = 1", r"step_us belongs in \[costs\], not at the top level"),
        ("chunked_prefill = true", r"belongs in \[scheduling\]"),
        ("costs.layers = 1", "layers must be a list of tables"),
        ("costs.layers = [{layer_us = 1}]", "costs.layers 1: architecture is missing"),
        ("costs.layers = [{architecture = '', layer_us = 1}]", "needs its architecture"),
        ("costs.layers = [{architecture = 'A', layer_us = -1}]", "layer_us must be a number of at least 0"),
        ("costs.layers = [{architecture = 'A', layer_us = 1, tp = 1}]", "costs.layers 1: unknown key 'tp'"),
        ("costs.layers = [{architecture = 'A', layer_us = 1, versions = '1'}]", "versions must be bounds"),
        ("costs = 1", "line 1: costs must be a table, got 1"),
        ("name = 1", "line 1: name must be text, got 1"),
        ("engine = 1", "engine must be text, got 1"),
        ("versions = '0.12'", "versions must be bounds such as >=0.12,<0.14, got '0.12'"),
        ("versions = '>=new'", "'new' is not a version"),
        ("scheduling.chunked_prefill = 1", "chunked_prefill must be true or false, got 1"),
        ("scheduling.order = 'decodes'", "order must be one of mixed, prefill_first, got 'decodes'"),
        ("scheduling.max_num_seqs = 0", "max_num_seqs must be a whole number from 1 to"),
        ("scheduling.max_num_batched_tokens = 8e3", "max_num_batched_tokens must be a whole number"),
        ("memory.kv_reservation = 'none'", "kv_reservation must be one of mean, full, got 'none'"),
        ("memory.room = 'most'", "room must be one of datasheet, all, free, static, got 'most'"),
        ("memory.room = ['all']", "room must be one of datasheet"),
        ("memory.fraction = 0", "fraction must be a number above 0 and at most 1, got 0"),
        ("memory.fraction = 1.1", "fraction must be a number above 0 and at most 1, got 1.1"),
        ("memory.fraction = nan", "fraction must be a number above 0"),
        ("memory.fraction = true", "fraction must be a number above 0"),
        ("memory = {room = 'static', fraction = 0}", "a fraction of 0 needs a reserve"),
        ("memory = {room = 'static', fraction = false}", "fraction must be a number above 0"),
        ("memory.context_gib = -1", "context_gib must be a number of at least 0"),
        ("memory.sample_bytes = inf", "sample_bytes must be a number of at least 0"),
        ("memory.block_tokens = 0", "block_tokens must be a whole number from 1"),
        ("memory.small_seqs = 2.5", "small_seqs must be a whole number"),
        ("memory.small_gpus = 'a100'", "small_gpus must be a list of names"),
        ("memory.small_gpus = [1]", "small_gpus must be a list of names"),
        ("memory.reserve = 1", "memory: reserve: must be a table, got 1"),
        ("memory.reserve.gib = 1", "line 1: memory: reserve: unknown key 'gib'; did you mean mib"),
        ("memory.reserve.mib = 'many'", "mib must be a number of at least 0"),
        ("memory.reserve.least_tokens = 0", "least_tokens must be a whole number"),
        ("memory.reserve.graphs = [[20, 8]]", "graphs must be rows of"),
        ("memory.reserve.graphs = [[-1, 8, 8]]", "the GiB of a row of graphs must be a number"),
        ("memory.reserve.graphs = [[20, 8, 0.5]]", "a batch of graphs must be a whole number"),
        ("gpu_memory_utilization = 0.9", "unknown key 'gpu_memory_utilization'"),
        ("fraction = 0.9", r"fraction belongs in \[memory\]"),
        ("kernels.gemm_smoothing = 'loess'", "gemm_smoothing must be one of none, median3"),
        ("kernels.fp8_scales = 'none'", "fp8_scales must be one of dynamic, static"),
        ("kernels.operators = ['gemm']", "kernels.operators 1: must be a table, got 'gemm'"),
        ("kernels.operators = 1", "operators must be a list"),
        ("kernels.operators = [{operator = ''}]", "needs the name of its operator"),
        ("kernels.operators = [{operator = 'gemm', tp = 8}]", "kernels.operators 1: unknown key 'tp'"),
        ("kernels.operators = [{operator = 'gemm', gpu = 1}]", "gpu must be text"),
        ("kernels.operators = [{operator = 'gemm', layout = 8}]", "layout must be a table"),
        ("kernels.operators = [{operator = 'gemm', layout = {tq = 8}}]", "a key of layout must be one of tp"),
        ("kernels.operators = [{operator = 'gemm', layout = {tp = 0}}]", "layout tp must be a whole number"),
        ("fit.layers = []", "line 1: fit.costs is missing"),
        ("fit.costs = ['luck']", "a cost to fit must be one of step_us, .* got 'luck'"),
        ("costs.step_us = 5e-324", r"step_us must be 0, or from 1e-30 to 1e\+09, got 5e-324"),
        ("costs.step_us = 1e308", r"step_us must be 0, or from 1e-30 to 1e\+09, got 1e\+308"),
        ("costs.residual = 1e300", "residual must be 0, or from"),
        ("costs.layers = [{architecture = 'A', layer_us = 1e308}]", "layer_us must be 0, or from"),
        ("memory.context_gib = 1e308", "context_gib must be 0, or from"),
        ("memory.fraction = 5e-324", "fraction must be at least 0.001, got 5e-324"),
        ("memory.reserve.mib = 1e-320", "mib must be 0, or from"),
        ("errors.tpot = 1e308", r"tpot of \[errors\] must be 0, or from"),
        ("kernels.mixed_attention = [{ns = 5e-324}]", "ns of mixed_attention must be 0, or from"),
        ("layout.gathered_bytes = {fp8 = 5e-324}", "gathered_bytes must be a table of formats and bytes"),
        ("evidence = 1", "evidence must be a table"),
        ("step_us = ", "the engine profile .* is not TOML"),
    ],
)
def test_an_invalid_profile_is_refused(tmp_path, content, words):
    path = tmp_path / "mine.toml"
    path.write_text(content, "utf-8")
    with pytest.raises(PlanError, match=words):
        load_engine(path)


def test_costs_of_layers_and_all_reduces_are_one_number_of_a_plan(h100):
    """Counted by hand: 32 layers of two all-reduces each; those of another architecture add nothing."""
    layers = (LayerCost("LlamaForCausalLM", 7.0, "<0.5"), LayerCost("LlamaForCausalLM", 3.0, ">=0.5"))
    profile = EngineProfile(
        "mine",
        costs=StepCosts(50.0, allreduce_us=2.0, layer_us=1.0, prefill_layer_us=10.0, layers=layers),
    )
    for tp, one, added_us in (
        (1, profile, 50.0 + 32 * (1.0 + 3.0)),
        (2, profile, 50.0 + 32 * (1.0 + 3.0) + 64 * 2.0),
        (2, profile.at("0.4"), 50.0 + 32 * (1.0 + 7.0) + 64 * 2.0),
        (2, profile.at("0.5.1"), 50.0 + 32 * (1.0 + 3.0) + 64 * 2.0),
    ):
        plan, bare = (compile_plan("llama-3.1-8b", "h100", h100, tp=tp, engine=r) for r in (one, "kernels"))
        added = plan.step_us(STEPS) - bare.step_us(STEPS)
        np.testing.assert_allclose(added[:3], added_us + np.array([0.0, 320.0, 320.0]), rtol=1e-9)
    other = compile_plan("qwen3-8b", "h100", h100, engine=profile)
    bare = compile_plan("qwen3-8b", "h100", h100, engine="kernels")
    assert other.decode_us(1, 100) - bare.decode_us(1, 100) == pytest.approx(50.0 + 36)
    assert profile.at("0.4").costs.layers == (dataclasses.replace(layers[0], versions=""),)
    assert profile.at("") is profile
    assert PROFILE.at("0.4") is PROFILE


def test_a_profile_comes_back_from_its_dict():
    every = EngineProfile(
        "mine", "vllm", ">=0.12", StepCosts(layers=[LayerCost("Some", 2.0, "<0.13", "seen")]),
        fit=CostForm(["step_us"]), evidence={"by": "hand"},
        kernels=KernelChoices(operators=[OperatorKernel("gemm", "h100", layout={"tp": 8}, source="own")]),
    )  # fmt: skip
    assert load_engine(dataclasses.asdict(every)) == every
    assert hash(load_engine(dataclasses.asdict(every))) == hash(every)
    again = dataclasses.asdict(every)
    again["kernels"]["operators"][0]["layout"] = {"tp": 8}
    assert load_engine(again) == every


@pytest.mark.parametrize(
    ("versions", "inside", "outside"),
    [
        (
            ">=0.12,<0.14",
            ["0.12", "0.12.0", "0.13.9.post1", "0.12.1+cu129", "0.14.0rc1"],
            ["0.12.0rc1", "0.14.0"],
        ),
        (">=1.0.0rc0,<1.1.0rc0", ["1.0.0rc3", "1.0", "1.0.0.post2"], ["1.1.0rc0", "1.1.0rc2.post2", "0.21"]),
        ("==1.0", ["1.0.0", "1"], ["1.0.1", "1.0.post1"]),
        (">1.0, <=1.2", ["1.0.1", "1.0.0.post1", "1.2.0"], ["1.0.0", "1.2.0.post1"]),
        ("", ["0.1", "99.0"], []),
    ],
)
def test_a_range_holds_versions_as_packages_order_them(versions, inside, outside):
    assert [holds_for(versions, version) for version in inside] == [True] * len(inside)
    assert [holds_for(versions, version) for version in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    ("engine", "versions", "beyond"),
    [
        ("vllm", ">=0.33", "0.28"), ("vllm-0.33.1", ">=0.33", "0.28"), ("vllm-0.31", ">=0.31,<0.32", "0.28"),
        ("vllm-0.29.0", ">=0.29,<0.30", "0.28"), ("vllm-0.28.1", ">=0.28,<0.29", ""),
        ("vllm-0.27", ">=0.26.1rc1,<0.28", ""), ("vllm-0.24.0", ">=0.24,<0.25", ""),
        ("vllm-0.21", ">=0.21,<0.23", ""), ("vllm-0.19.1", ">=0.17,<0.20", ""),
        ("vllm-0.14", ">=0.14,<0.17", ""), ("vllm-0.12", ">=0.11.1,<0.14", ""),
        ("sglang", ">=0.5.23", "0.5.10"), ("sglang-0.5.14", ">=0.5.14,<0.5.15", "0.5.10"),
        ("sglang-0.5.10.post1", ">=0.5.10,<0.5.12", ""), ("trtllm-1.0", ">=1.0.0rc0,<1.1.0rc0", ""),
        ("trtllm-1.3.0rc5.post1", ">=1.2", ""), ("trtllm-1.3.0rc11", ">=1.2", "1.3.0rc5.post1"),
        ("kernels", "", ""),
    ],
)  # fmt: skip
def test_a_profile_has_the_versions_of_its_rules_and_evidence(engine, versions, beyond):
    profile = load_engine(engine)
    assert profile.rule_versions == versions
    assert profile.facts == {
        "engine": profile.name, "engine_versions": versions, "not_validated_beyond": beyond or None,
    }  # fmt: skip
    words = [f"not validated beyond {beyond}"] if beyond else []
    # runs of vLLM up to 0.19 are fitted
    words += ["half of the costs of 0.19"] if profile.cost_share == 0.5 else []
    title = f"{profile.name} {versions}".rstrip()
    assert profile.title == (f"{title} ({', '.join(words)})" if words else title)


def test_within_the_range_that_is_printed_the_rules_are_the_same():
    one_of = {}
    for version in (14, 17, 19, 20, 21, 23, 24, 25, 27, 28, 29, 32, 33):
        profile = load_engine(f"vllm-0.{version}")
        kernels, costs = profile.kernels, (profile.costs, profile.cost_share)
        rules = (profile.memory, profile.data_parallel, kernels.prefill_graphs, kernels.fused_norms, costs)
        assert one_of.setdefault(profile.rule_versions, rules) == rules
    assert len(one_of) == 12


FITTED = {"costs": ["step_us"], "given": ["kernel_us"], "newest": "1.2", "later_share": 0.25}
COSTS = {"step_us": 8.0, "kernel_us": 2.0, "layers": [{"architecture": "Some", "layer_us": 4.0}]}


def test_versions_later_than_the_fitted_runs_have_a_share_of_the_fitted_costs_once(tmp_path):
    profile = load_engine({"name": "mine", "engine": "vllm", "costs": COSTS, "fit": FITTED})
    for version in ("1.0", "1.2", "1.2.7", "nightly"):
        assert profile.at(version).costs == profile.costs
    later = profile.at("1.3")
    assert later.costs == StepCosts(step_us=2.0, kernel_us=2.0, layers=(LayerCost("Some", 1.0),))
    assert later.title == "mine (0.25 of the costs of 1.2)"
    # without a version it is the newest; what has its share keeps it, also in a file
    assert profile.at("").costs == later.costs == later.at("1.4").costs == later.at("").costs
    assert load_engine(write_profile(later, tmp_path / "later.toml")).at("1.4").costs == later.costs
    assert later.kernels_alone().title == "mine"
    assert profile.unfitted().at("1.3").costs == StepCosts(kernel_us=2.0)


@pytest.mark.parametrize("share", [1.5, -0.5, "half"])
def test_a_share_of_later_versions_is_at_most_all(share):
    with pytest.raises(PlanError, match="later_share must be a number"):
        load_engine({"name": "mine", "fit": FITTED | {"later_share": share}})


def test_vllm_later_than_its_fitted_runs_has_half_of_its_costs():
    fitted, later, newest = (load_engine(name).costs for name in ("vllm-0.19.1", "vllm-0.20.0", "vllm"))
    assert 0.0 < later.logit_ps == fitted.logit_ps / 2.0 == newest.logit_ps
    assert later.allreduce_us == fitted.allreduce_us / 2.0


def test_the_first_rule_of_a_cost_that_applies_counts(tmp_path):
    rules = [
        {"cost": "kernel_us", "us": 3.0, "gpus": ["b200"], "versions": "<2.0", "chosen_on": "mine"},
        {"cost": "kernel_us", "us": 1.0, "gpus": ["b200"]},
        {"cost": "prefill_floor_layer_us", "us": 90.0, "architectures": ["Some"]},
    ]
    costs = {"kernel_us": 2.0, "prefill_floor_kernel_us": 5.0, "rules": rules}
    engine = load_engine({"name": "mine", "engine": "sglang", "costs": costs})
    old, new = engine.at("1.9"), engine.at("2.0")
    for gpu, model, of_old, of_new in [
        ("b200", "Some", (3.0, 90.0, 0.0), (1.0, 90.0, 0.0)),
        ("h100", "Some", (2.0, 90.0, 0.0), (2.0, 90.0, 0.0)),
        ("b200", "Other", (3.0, 0.0, 5.0), (1.0, 0.0, 5.0)),
    ]:
        for profile, expected in ((old, of_old), (new, of_new), (engine, of_new)):
            found = profile.of_plan(model, load_gpu(gpu), False).costs
            names = ("kernel_us", "prefill_floor_layer_us", "prefill_floor_kernel_us")
            assert tuple(getattr(found, name) for name in names) == expected
    assert without_bench(old, "mine").of_plan("Some", load_gpu("b200"), False).costs.kernel_us == 1.0
    assert old.started_with({"fused"}).of_plan("Some", load_gpu("b200"), False).costs.kernel_us == 0.0
    assert load_engine(write_profile(engine, tmp_path / "mine.toml")).costs == engine.costs
    with pytest.raises(
        PlanError, match="cost must be one of kernel_us, prefill_floor_layer_us, got 'step_us'"
    ):
        load_engine({"name": "mine", "costs": {"rules": [{"cost": "step_us", "us": 1.0}]}})


@pytest.mark.parametrize(
    ("version", "architecture", "settings", "overlaps"),
    [
        ("0.5.8", "Qwen3NextForCausalLM", set(), False),
        ("0.5.8", "KimiLinearForCausalLM", set(), True),
        ("0.5.10", "KimiLinearForCausalLM", set(), True),
        ("0.5.10", "Qwen3NextForCausalLM", {"no_prefix_cache"}, True),
        ("0.5.10", "Qwen3NextForCausalLM", {"extra_buffer"}, True),
        ("0.5.13", "Qwen3NextForCausalLM", {"fused"}, False),
        ("0.5.14", "Qwen3NextForCausalLM", set(), True),
        ("0.5.14", "KimiLinearForCausalLM", set(), False),
    ],
)
def test_steps_of_states_do_not_overlap_in_some_versions_of_sglang(version, architecture, settings, overlaps):
    engine = load_engine(f"sglang-{version}").started_with(settings)
    assert engine.of_plan(architecture, load_gpu("h100"), True).scheduling.async_scheduling == overlaps
    assert engine.of_plan(architecture, load_gpu("h100"), False).scheduling.async_scheduling


def rows_by_engine():
    """Newest version of each engine's measured serving runs, of those that are versions."""
    newest = {}
    for path in bench_data_root().glob("*/serving/**/*.csv"):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                version = row["engine_version"]
                if is_version(version) and version > "":
                    newest.setdefault(row["engine"], set()).add(version)
    return newest


def test_given_costs_are_those_that_a_bench_did_not_choose(tmp_path):
    profile = load_engine("sglang-0.5.9")
    unseen = without_bench(profile, "sglang-cookbook")
    given = ("kernel_us", "prefill_floor_kernel_us")
    assert [getattr(unseen.costs, name) for name in given] == [1.3, 41.6]
    assert dataclasses.replace(unseen, costs=profile.costs) == profile
    assert without_bench(profile, "gpustack") is profile
    # fused kernels have no pauses, whatever the default of other kernels
    assert without_bench(profile.started_with({"fused"}), "sglang-cookbook").costs.kernel_us == 0.0
    assert not [rule for rule in unseen.costs.rules if rule.chosen_on]
    alone = profile.unfitted().costs
    assert alone == StepCosts(
        kernel_us=profile.costs.kernel_us,
        prefill_floor_kernel_us=profile.costs.prefill_floor_kernel_us,
        residual=profile.costs.residual,
        rules=profile.costs.rules,
    )
    path = write_profile(dataclasses.replace(profile, version="", rules=""), tmp_path / "sglang.toml")
    assert load_engine(path).fit == profile.fit


@pytest.mark.parametrize(
    "row",
    ["kernel_us", ["kernel_us", "a"], ["step_us", "a", 1.0], ["kernel_us", 3, 1.0], ["kernel_us", "a", -1]],
)
def test_costs_chosen_on_a_bench_are_given_ones(row):
    fit = {"costs": ["step_us"], "given": ["kernel_us"], "chosen_on": [row]}
    with pytest.raises(PlanError, match="chosen_on must"):
        load_engine({"name": "mine", "fit": fit})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"versions": ">=0.24"}, "kernel is missing"),
        ({"kernel": "vllm_*", "versions": "new"}, "versions must be bounds"),
        ({"kernel": "vllm_*", "most_tokens": -1}, "most_tokens of expert_rows must be a whole number from 0"),
        ({"kernel": "vllm_*", "has_gate": 1}, "has_gate of expert_rows must be"),
        ({"kernel": "vllm_*", "gate": True}, "unknown key 'gate'"),
    ],
)
def test_rules_of_measured_experts_are_checked(rule, message):
    with pytest.raises(PlanError, match=message):
        load_engine({"name": "mine", "kernels": {"expert_rows": [rule]}})


def test_rules_of_measured_experts_are_written_as_they_are_read(tmp_path):
    rules = load_engine("sglang").kernels.expert_rows
    old, new = (
        [rule.is_for("sglang_fused_moe_triton", version) for rule in rules]
        for version in ("0.5.10", "0.5.13")
    )
    assert (old, new) == ([True, True, False], [False, True, False])
    assert (
        load_engine(write_profile(load_engine("sglang"), tmp_path / "sglang.toml")).kernels.expert_rows
        == rules
    )


def test_validated_is_the_newest_version_of_the_measured_runs():
    for engine, versions in rows_by_engine().items():
        profile = load_engine(engine)
        assert not any(is_beyond(version, profile.validated) for version in versions)
        # some run is of that version, or a patch of it
        assert any(version.startswith(profile.validated) for version in versions)


def test_logged_is_the_newest_version_of_the_logged_starts():
    with (bench_data_root() / "kv_room.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for engine in serving_engines():
        versions = [row["version"] for row in rows if row["engine"] == engine]
        logged = load_engine(engine).memory.logged
        assert not any(is_beyond(version, logged) for version in versions)
        assert any(version.startswith(logged) for version in versions)


@pytest.mark.parametrize(
    ("version", "gpu", "gib", "limits"),
    [
        ("0.27", "b200", 179, (8192, 1024)), ("0.28", "b200", 179, (16384, 1024)),
        ("0.31", "h200", 140, (8192, 1024)), ("0.31", "l40s", 45, (2048, 256)),
        ("0.31", "a100", 80, (2048, 256)), ("0.32", "gb10", 120, (8192, 1024)),
        ("0.33", "gb10", 120, (2048, 256)), ("", "mi300x", 192, (16384, 1024)),
    ],
)  # fmt: skip
def test_default_limits_are_of_a_card_and_a_version(version, gpu, gib, limits):
    memory = load_engine(f"vllm-{version}" if version else "vllm").memory
    assert memory.default_limits(gpu, gib * GIB, 8192, 1024) == limits


def test_the_runner_of_a_model_is_of_a_version():
    def sampled(version, architecture, is_dense):
        rule = load_engine(f"vllm-{version}").memory.of_model(architecture, is_dense=is_dense)
        return rule.sample_bytes, rule.graphs is not None

    # one runner that samples cheaply and takes nothing off for graphs, one that does both, and both at once
    assert sampled("0.24", "LlamaForCausalLM", True) == (6.5, False)
    assert sampled("0.24", "OlmoForCausalLM", True) == (14.0, True)
    assert sampled("0.27", "OlmoForCausalLM", True) == (6.5, False)
    assert sampled("0.27", "Qwen3MoeForCausalLM", False) == (14.0, True)
    assert sampled("0.28", "DeepseekV4ForCausalLM", False) == (6.5, False)
    assert sampled("0.31", "Qwen3MoeForCausalLM", False) == (6.5, True)
    assert sampled("0.33", "Qwen3MoeForCausalLM", False) == (13.6, True)


def test_graphs_of_data_center_blackwell_are_larger_from_0_28_on():
    for version, tokens in (("0.27", 512), ("0.28", 1024), ("0.33", 1024)):
        rules = load_engine(f"vllm-{version}").data_parallel
        assert [rules.largest_graph(gpu) for gpu in ("b200", "gb300", "h200")] == [tokens, tokens, 512]


@pytest.mark.parametrize(
    ("engine", "given", "shares_experts", "why"),
    [
        ("vllm", {"prefill_schedule_interval": 4}, False, ""),
        ("vllm-0.31", {"prefill_schedule_interval": 4}, True, ""),
        (
            "vllm-0.31",
            {"prefill_schedule_interval": 4},
            False,
            "without ranks that share experts in versions >=0.33",
        ),
        ("vllm-0.23", {"prefill_schedule_interval": 4}, True, "has it in versions >=0.24"),
        ("vllm-0.23", {"prefill_schedule_interval": 1}, True, ""),
        ("vllm", {"min_free_slots_delay": 4}, True, "vllm has no such option"),
        ("trtllm", {"prefill_schedule_interval": 2}, True, "trtllm has no such option"),
        ("sglang-0.5.18", {"prefill_decode_interval": 2}, False, "has it in versions >=0.5.19"),
        ("sglang-0.5.18", {"min_free_slots_delay": 2}, False, ""),
        ("kernels", {"prefill_schedule_interval": 2, "min_free_slots_delay": 4}, False, ""),
    ],
)
def test_an_engine_lets_prompts_wait_as_its_version_does(engine, given, shares_experts, why):
    profile = load_engine(engine)
    if why:
        with pytest.raises(PlanError, match=why):
            profile.refuse_pauses(given, shares_experts, PlanError)
    else:
        profile.refuse_pauses(given, shares_experts, PlanError)


def test_an_engine_is_found_by_its_version():
    assert serving_engines() == ("sglang", "trtllm", "vllm")
    for engine in serving_engines():
        # of no version, of an unknown one and of one that no range holds: the newest
        for version in ("", "main", "0.0.1", "999.0"):
            assert engine_of_version(engine, version).engine == engine
    assert [engine_of_version(engine).name for engine in serving_engines()] == [
        "sglang",
        "trtllm-1.1",
        "vllm",
    ]
    assert engine_of_version("vllm", "0.0.1").name == load_engine("vllm-0.12.0").name == "vllm-0.12"
    # what only some versions have is not of an unknown one
    sglang = engine_of_version("sglang", "nightly")
    assert all(not one.versions for one in sglang.costs.layers)
    old = load_engine("trtllm-1.0.0rc3")
    assert old.version == "1.0.0rc3"
    assert dataclasses.replace(old, version="", rules="") == load_engine("trtllm-1.0")
    with pytest.raises(PlanError, match=r"no profile for trtllm 0\.9; valid: trtllm-1\.0 \(>=1\.0"):
        load_engine("trtllm-0.9")
    with pytest.raises(PlanError, match="'new' is not a version"):
        load_engine("vllm-new")
    with pytest.raises(PlanError, match="engine must be one of sglang, trtllm, vllm, got 'tgi'"):
        engine_of_version("tgi")


def test_an_engine_without_a_version_is_the_newest(h100):
    releases = {"vllm": "0.99.0", "sglang": "0.99.0", "trtllm": "9.0.0"}
    for engine, newest in releases.items():
        assert load_engine(engine) == engine_of_version(engine)
        plans = [
            compile_plan(model, "h100", h100, engine=name, max_num_batched_tokens=1024)
            for model in ("qwen3-8b", "qwen3-30b-a3b")
            for name in (engine, f"{engine}-{newest}")
        ]
        for bare, versioned in zip(plans[::2], plans[1::2], strict=True):
            assert bare.step_us(STEPS).tolist() == versioned.step_us(STEPS).tolist()
    assert load_engine("trtllm").versions == ">=1.1.0rc0"
    # kernels and costs of ranges that end are not the newest's, those of ranges that do not are
    ranged = KernelChoices(
        operators=[OperatorKernel("gemm"), OperatorKernel("gemm", versions="<2", source="old"),
                   OperatorKernel("gemm", versions=">=2", source="new")],
    )  # fmt: skip
    profile = EngineProfile("mine", kernels=ranged)
    sources = {"": "new", "1.0": "old", "2.1": "new", "nightly": ""}
    for version, source in sources.items():
        found = profile.at(version).kernels.of("gemm", "h100", "bf16", {})
        assert (found.source, version) == (source, version)


def test_a_kernel_is_for_a_gpu_a_format_and_a_layout():
    anywhere, sharded = OperatorKernel("gemm", format="fp8"), OperatorKernel("gemm", layout={"tp": 8})
    kernels = KernelChoices(operators=(OperatorKernel("gemm", "h200", "fp8"), sharded, anywhere))
    assert kernels.of("gemm", "h200", "fp8", {"tp": 8}) is kernels.operators[0]
    assert kernels.of("gemm", "h100", "fp8", {"tp": 8}) is sharded
    assert kernels.of("gemm", "h100", "fp8", {"tp": 1}) is anywhere
    assert kernels.of("gemm", "h100", "bf16", {}) is None
    assert kernels.of("moe", "h200", "fp8", {"tp": 8}) is None


def test_a_plan_refuses_tables_that_measured_another_kernel(h100):
    served = h100.sources["gemm"]
    for source in (served, ""):
        right = KernelChoices(operators=(OperatorKernel("gemm", "h100", source=source),))
        compile_plan("llama-3.1-8b", "h100", h100, engine=EngineProfile("right", kernels=right))
    wrong = KernelChoices(operators=(OperatorKernel("gemm", format="fp8", source="nowhere"),))
    engine = EngineProfile("wrong", kernels=wrong)
    compile_plan("llama-3.1-8b", "h100", h100, engine=engine)
    words = (
        f"wrong runs gemm on h100 as measured by source 'nowhere', and the tables serve it from '{served}'"
    )
    with pytest.raises(PlanError, match=words):
        compile_plan("llama-3.1-8b", "h100", h100, dtype="fp8", engine=engine)
    with pytest.raises(PlanError, match=words):
        compile_plans([{"model": "llama-3.1-8b", "dtype": "fp8", "engine": engine}], "h100", h100)


def test_an_optional_kernel_is_used_if_available(h100):
    served = h100.sources["gemm"]
    for source in ("nowhere", served):
        kernels = KernelChoices(operators=(OperatorKernel("gemm", source=source, required=False),))
        plan = compile_plan("llama-3.1-8b", "h100", h100, engine=EngineProfile("mine", kernels=kernels))
        assert kernel_sources(plan)["gemm"] == (served,)


def test_kernels_of_an_architecture_are_for_its_models_alone(h100):
    kernel = OperatorKernel("gemm", engine="trtllm", architecture="Qwen3ForCausalLM")
    engine = EngineProfile("mine", engine="vllm", kernels=KernelChoices(operators=(kernel,)))
    other = load_model("llama-3.1-8b")
    named = dataclasses.replace(other, architecture="Qwen3ForCausalLM")
    # of equal layers, so that a set could take one for the other
    plans = compile_plans([{"model": one, "engine": engine} for one in (other, named)], "h100", h100)
    sources = [kernel_sources(plan)["gemm"] for plan in plans]
    assert [("trtllm" in source, "vllm" in source) for (source,) in sources] == [(False, True), (True, False)]
    for plan, model in zip(plans, (other, named), strict=True):
        alone = compile_plan(model, "h100", h100, engine=engine)
        np.testing.assert_array_equal(plan.arena, alone.arena)


def test_shared_experts_can_go_by_the_kernels_of_routed_ones(h100):
    def overlaps(shared_experts: str, of_kernel: str) -> bool:
        kernels = KernelChoices(
            shared_experts=shared_experts, operators=(OperatorKernel("moe", shared_experts=of_kernel),)
        )
        plan = compile_plan("deepseek-v3", "h100", h100, tp=8, engine=EngineProfile("mine", kernels=kernels))
        return bool(plan.execution.shared_beside)

    assert [overlaps("apart", ""), overlaps("beside", "")] == [False, True]
    assert [overlaps("apart", "beside"), overlaps("beside", "apart")] == [True, False]
    with pytest.raises(PlanError, match="shared_experts must be one of apart, beside, got 'inside'"):
        OperatorKernel("moe", shared_experts="inside")
    with pytest.raises(PlanError, match="required must be true or false"):
        OperatorKernel("moe", required=1)


@pytest.mark.parametrize("given", ["vlm", "nowhere.toml", 5, None])
def test_an_unknown_profile_names_those_that_there_are(given):
    with pytest.raises(PlanError, match=r"did you mean vllm|kernels.*vllm|cannot be read"):
        load_engine(given)
    with pytest.raises(PlanError):
        compile_plan("llama-3.1-8b", "h100", None, engine=given)


@pytest.mark.loops
def test_a_step_takes_what_its_runtime_adds(h100):
    options = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    kernels = compile_plan("llama-3.1-8b", "h100", h100, **{"engine": "kernels", **options})
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine=PROFILE, **options)
    assert plan.engine == "mine"
    assert plan.profile == PROFILE
    pure, times = kernels.run(STEPS), plan.run(STEPS)
    floor = 200.0 * 32
    for i, (seqs, has_prefill) in enumerate([(8, False), (2, True), (1, True), (0, None), (1, True)]):
        expected = pure.latency_us[i] + 500.0 + 30.0 * seqs if seqs else 0.0
        if has_prefill:
            expected = max(expected + 70.0, floor)
        assert times.latency_us[i] == pytest.approx(expected, rel=1e-14)
        assert times.components.runtime_us[i] == pytest.approx(expected - pure.latency_us[i], rel=1e-11)
    np.testing.assert_array_equal(times.latency_us, plan.step_us(STEPS))
    np.testing.assert_allclose(sum(times.components), times.latency_us, rtol=1e-14)
    np.testing.assert_array_equal(pure.origin, times.origin)


@pytest.mark.loops
def test_every_entry_point_adds_the_same(h100):
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, engine=PROFILE, max_num_batched_tokens=1024, max_num_seqs=64
    )
    step = StepBatch.from_requests([[(1, 4095)] * 8])
    assert plan.decode_us(8, 4096) == plan.decode_us([8], [4096])[0] == plan.step_us(step)[0]
    assert plan.decode_us(8, 4096) == plan.explain([(1, 4095)] * 8).total_us == plan.prefill_us(1, 4095, 8)
    chunks = StepBatch.from_requests([[(128, 64)] * 4])
    assert plan.prefill_us(128, 64, 4) == plan.step_us(chunks)[0] == plan.explain([(128, 64)] * 4).total_us
    (of_set,) = compile_plans(
        [
            {
                "model": "llama-3.1-8b",
                "engine": dataclasses.asdict(PROFILE),
                "max_num_batched_tokens": 1024,
                "max_num_seqs": 64,
            }
        ],
        "h100",
        h100,
    )
    np.testing.assert_array_equal(of_set.arena, plan.arena)


def test_smoothing_moves_small_bf16_gemms_and_nothing_else(h100):
    raw = compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=4096, engine="kernels")
    smooth = compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=4096, gemm_smoothing="median3", engine="kernels"
    )
    again = compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=4096, engine="vllm", gemm_smoothing="none"
    )
    kernels = [p.decode_us(np.arange(1, 200), 4096) for p in (raw, smooth)]
    assert (kernels[0] != kernels[1]).any()
    np.testing.assert_allclose(kernels[0], kernels[1], rtol=0.12)
    large = StepBatch.from_requests([[(2048, 0)]])
    assert raw.run(large).components.tokens_us == smooth.run(large).components.tokens_us
    np.testing.assert_array_equal(again.row_curves[2].value, raw.row_curves[2].value)
    # what is looked up stays as it was measured
    found = h100.lookup("gemm", m=[1, 2, 4, 8], n=8192, k=8192)
    assert (found.origin == 0).all()
    with pytest.raises(PlanError, match="gemm_smoothing must be"):
        compile_plan("llama-3.1-8b", "h100", h100, gemm_smoothing="lots", engine="kernels")


def test_the_median_of_three_takes_out_a_lonely_slow_point():
    m = np.array([4.0, 1.0, 2.0, 8.0, 16.0, 2.0, 300.0, 9000.0])
    n = np.array([64.0, 64.0, 64.0, 64.0, 64.0, 128.0, 64.0, 64.0])
    k = np.full(8, 64.0)
    moved = 2.0 * (m * k + n * k + m * n)
    latency_us = moved * np.array([1.2, 1.0, 1.0, 1.0, 1.0, 5.0, 7.0, 7.0])
    got = median_of_three(m, n, k, latency_us, 1e9, 1.0, 2.0) / moved
    assert got.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 7.0, 7.0]
    assert m[-2] > LARGEST_SMOOTHED_M
    compute_bound = median_of_three(m, n, k, latency_us, 1e-9, 1.0, 2.0)
    np.testing.assert_array_equal(compute_bound, latency_us)
    ends = median_of_three(m[:2], n[:2], k[:2], moved[:2] * [1.0, 2.0], 1e9, 1.0, 2.0) / moved[:2]
    assert ends.tolist() == [1.5, 1.5]


def test_static_scales_take_off_what_finding_them_takes(h100):
    options = {"dtype": "fp8", "max_num_batched_tokens": 4096}
    dynamic = compile_plan("llama-3.1-8b", "h100", h100, **{"engine": "kernels", **options})
    known = EngineProfile("known scales", kernels=KernelChoices(fp8_scales="static"))
    static = compile_plan("llama-3.1-8b", "h100", h100, engine=known, **options)
    for tokens in (1, 64, 4096):
        step = StepBatch.from_requests([[(tokens, 0)]])
        less = dynamic.run(step).components.tokens_us[0] - static.run(step).components.tokens_us[0]
        gemms = [(4096, 4096), (4096, 4096), (4096, 4096), (4096, 14336)]
        scales_us = 32 * sum(float(ELEMENTWISE.fp8_scale_us(h100, tokens, k)) for _, k in gemms)
        assert less == pytest.approx(scales_us, rel=1e-9)
    # bf16 has no scales
    plans = [
        compile_plan("llama-3.1-8b", "h100", h100, engine=r, max_num_batched_tokens=64)
        for r in ("kernels", known)
    ]
    np.testing.assert_array_equal(
        plans[0].decode_us(np.arange(1, 60), 99), plans[1].decode_us(np.arange(1, 60), 99)
    )


def test_scales_are_those_of_the_rows_and_constant_outside(h100):
    columns = h100.measured.tables["elementwise"].columns
    rows = np.flatnonzero(columns["kind"] == "fp8_scale")[::97]
    for row in rows:
        m, k = columns["m"][row], columns["width"][row]
        assert ELEMENTWISE.fp8_scale_us(h100, m, k) == columns["latency_us"][row]
    assert (
        ELEMENTWISE.fp8_scale_us(h100, [0, 1], 4096).tolist() == [ELEMENTWISE.fp8_scale_us(h100, 1, 4096)] * 2
    )
    assert ELEMENTWISE.fp8_scale_us(h100, 10**9, 10**9) == ELEMENTWISE.fp8_scale_us(h100, 32768, 65536)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({"expert_padding": [{"formats": ["mxfp4"], "hidden": 0}]}, "hidden must be at least 1"),
        ({"state_buffers": [{"slots": 0.5}]}, "slots must be at least 1"),
        ({"workspaces": [{"decode_rows": "all"}]}, "decode_rows must be"),
        ({"sparse_caches": [{"row_bytes": "many"}]}, "row_bytes must be a number"),
        ({"sparse_caches": "fp8"}, "sparse_caches must be a list"),
        ({"workspaces": [{"versions": "new"}]}, "versions must be bounds"),
        ({"graphs": {"kinds": [{"gib": -1}]}}, "gib must be a number"),
        ({"graphs": {"kinds": 3}}, "kinds must be a list"),
        ({"expert_padding": [{"width": 3}]}, "width"),
    ],
)
def test_invalid_rows_of_cards_are_refused(rows, problem):
    with pytest.raises(PlanError, match=problem):
        load_engine({"name": "mine", "memory": {"room": "all", **rows}})
