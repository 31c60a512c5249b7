"""A deployment sweep's spec: what it expands to, its layouts, and all errors reported at once."""

from __future__ import annotations

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastroof.errors import SweepError
from fastroof.ranges import expand_reals
from fastroof.sweep import Constraints, DeploymentSpec, load_spec
from fastroof.sweep.deployments import spec as spec_module
from fastroof.sweep.deployments.spec import Layout
from fastroof.sweep.spec import count_problem
from fastroof.sweep.steps import spec as step_spec

SMALL: dict[str, Any] = {"models": ["llama-3.1-8b"], "isl": 1000, "osl": 100, "clients": [1, 8]}


def loaded(**changes: Any) -> DeploymentSpec:
    spec = load_spec({**SMALL, **changes})
    assert isinstance(spec, DeploymentSpec)
    return spec


def refused(**changes: Any) -> str:
    with pytest.raises(SweepError) as caught:
        load_spec({**SMALL, **changes})
    return str(caught.value)


def test_the_packaged_example_is_a_sweep_of_deployments() -> None:
    text = (resources.files("fastroof.sweep.deployments") / "example.toml").read_text()
    spec = load_spec(tomllib.loads(text))
    assert isinstance(spec, DeploymentSpec)
    assert spec.constraints == Constraints.model_validate({"ttft_ms": 500, "tpot_ms": 30})
    assert spec.num_candidates == 2 * 2 * 4 * 512 * 2
    # every key is there, set or explained
    for key in (*DeploymentSpec.model_fields, *Constraints.model_fields):
        assert f"\n{key} = " in text or f"\n# {key} = " in text or f"\n[{key}]" in text, key


def test_defaults_and_json() -> None:
    spec = loaded()
    assert (spec.gpus, spec.mode, spec.tp, spec.engine) == (
        ("h100",),
        ("aggregated",),
        (1, 2, 4, 8),
        ("vllm",),
    )
    assert (spec.keep, spec.k, spec.objective) == ("pareto", 5, "tokens_per_s_per_gpu")
    assert load_spec(spec) is spec
    assert load_spec(json.loads(spec.model_dump_json())) == spec
    assert load_spec(spec, {"k": 2}) == loaded(k=2)
    assert load_spec({**SMALL, "k": 3}, {"k": 2, "osl": 7}) == loaded(k=2, osl=7)


def test_the_objective_decides_the_default_of_keep() -> None:
    priced = {"objective": "cost", "gpu_hour_price": 2.5}
    for changes, keep in (
        ({}, "pareto"),
        ({"k": 5}, "best"),
        ({"objective": "tokens_per_s_per_user"}, "pareto"),
        ({"objective": "goodput"}, "best"),
        (priced, "best"),
        ({**priced, "keep": "pareto"}, "pareto"),
        ({"k": 3, "keep": "all"}, "all"),
    ):
        assert loaded(**changes).keep == keep
        # changed afterwards, as options of the command change a file
        assert load_spec(loaded(), changes) == loaded(**changes)
    assert load_spec(loaded(k=3), priced) == loaded(k=3, **priced)


def test_the_longest_request_is_a_length_of_step_sweeps() -> None:
    assert 2 * max(spec_module._LARGEST[key] for key in ("isl", "osl")) <= step_spec.MAX_KV_LEN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"isl": []}, "isl: the list is empty"),
        ({"tpot_ms": 30}, "tpot_ms: unknown key; did you mean constraints.tpot_ms? "),
        ({"isl": {"start": 9, "stop": 2, "step": 1}}, "isl: the range is empty: start 9 is above stop 2"),
        ({"osl": 0}, "osl: got 0 at position 0, need whole numbers from 1"),
        ({"clients": [4, -1]}, "clients: got -1 at position 1"),
        ({"clients": None}, "need clients or rate, got neither"),
        ({"rate": 3}, "need clients or rate, got both"),
        ({"rate": [0]}, "rate: got 0 at position 0, need numbers above 0"),
        (
            {"speculation": {"num_draft_tokens": 0, "accepted": 1}},
            "speculation.num_draft_tokens: got 0, need draft tokens per step, a whole number",
        ),
        ({"speculation": {"accepted": 2.0}}, "speculation.num_draft_tokens: missing, need draft tokens"),
        (
            {"speculation": {"num_draft_tokens": 2, "accepted": 2, "draft_tb": 1}},
            "did you mean draft_tp",
        ),
        (
            {"speculation": {"num_draft_tokens": 2, "accepted": 4}},
            "speculation: accepted must be a number from 1 to 3",
        ),
        ({"speculation": {"num_draft_tokens": 2, "accepted": 2, "draft": "eagle"}}, "eagle"),
        ({"speculation": 3}, "speculation: got 3, need a table for speculative decoding"),
        (
            {"speculation": {"num_draft_tokens": 8, "accepted": 2}, "max_num_batched_tokens": [8, 99]},
            "max_num_batched_tokens: must be at least 9, which a request verifies per step",
        ),
        ({"prefix_hit": 1.5}, "prefix_hit: got 1.5 at position 0, need numbers from 0 to 0.999"),
        ({"prefix_hit": 0.5, "mode": "disaggregated"}, "prefix_hit: above 0 needs mode 'aggregated'"),
        ({"osl": 1, "mode": "disaggregated"}, "osl: mode 'disaggregated' needs at least 2"),
        ({"total_gpus": 8, "replicas": 2}, "total_gpus: determines replicas"),
        ({"total_gpus": 0}, "total_gpus: got 0 at position 0"),
        ({"objective": "cost"}, "objective: 'cost' needs a gpu_hour_price"),
        ({"objective": "speed"}, "objective: got 'speed', need one of tokens_per_s_per_gpu"),
        ({"gpu_hour_price": -1}, "gpu_hour_price: got -1, need a number above 0"),
        ({"gpu_hour_price": 0}, "gpu_hour_price: got 0, need a number above 0"),
        ({"mode": []}, "mode: the list is empty"),
        ({"gpu_hour_price": {"h200": 3}}, "gpu_hour_price: missing for h100"),
        ({"gpu_hour_price": {"h100": True}}, "gpu_hour_price: got True"),
        ({"per": ["model", "colour"]}, "per: got 'colour', need some of model"),
        ({"per": "request_rate_per_s"}, "per: request_rate_per_s is not an axis"),
        ({"constraints": {"ttft": 5}}, "constraints.ttft: unknown key; did you mean ttft_ms?"),
        ({"constraints": {"tpot_ms": -1}}, "constraints.tpot_ms: got -1, need a number of ms above 0"),
        ({"constraints": {"total_gpus": 1.5}}, "constraints.total_gpus: got 1.5, need a whole number"),
        ({"constraints": 3}, "constraints: got 3, need a table of limits"),
        ({"gpus": ["h101"]}, "gpus: unknown GPU 'h101'"),
        ({"gpus": 3}, "gpus: got 3, need GPU names"),
        ({"engine": "vlm"}, "engine: unknown engine 'vlm'; did you mean vllm?"),
        ({"k": 0}, "k: got 0, need rows to keep per group"),
        ({"client": 3}, "client: unknown key; did you mean clients?"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], message: str) -> None:
    answer = refused(**changes)
    assert message in answer
    assert answer.startswith("sweep spec: ")
    assert "\n" not in answer


def test_all_rows_may_be_one_group() -> None:
    assert loaded(per=[]).per == ()


def test_all_errors_are_reported_at_once() -> None:
    answer = refused(models=["nobody", "llama-3.1-8b", "nothing"], gpus=["h101", "zz"], osl=0, tp=3)
    assert answer.startswith("sweep spec: ")
    assert "\n" not in answer
    for name in ("nobody", "nothing", "h101", "zz", "osl", "tp"):
        assert name in answer
    assert "`fastroof models` lists all" in answer


@pytest.mark.slow
def test_absurd_counts_are_refused_with_what_to_cut() -> None:
    wide = {"start": 1, "stop": 100_000, "step": 1}
    answer = refused(isl=wide, osl=wide, clients=wide)
    assert "4,000,000,000,000,000 candidates are too many, at most 10,000,000,000" in answer
    assert "4 layouts x 100,000 isl x 100,000 osl x 100,000 clients" in answer
    assert "cut isl and the next longest" in answer

    # every split of so many GPUs: never listed
    splits = {"start": 1, "stop": 65_536, "step": 1}
    assert "candidates are too many" in refused(total_gpus=splits, mode="disaggregated", clients=wide)
    answer = refused(clients={"start": 1, "stop": 10**6, "step": 1}, isl=[1, 2, 3, 4, 5, 6], keep="all")
    assert "24,000,000 rows are too many" in answer
    assert "or keep = 'best' or 'pareto'" in answer
    answer = refused(isl=wide, per=["isl", "model"])
    assert "100,000 groups per plan are too many, at most 65,536 (100,000 isl): cut isl" in answer
    answer = refused(total_gpus=wide | {"stop": 60_000}, clients=[1, 2], per=["total_gpus", "clients"])
    assert "groups per plan are too many" in answer
    count_problem({"a": 3}, "things", 3, "")


def test_layouts() -> None:
    spec = loaded(total_gpus=[1, 4, 6], mode=["aggregated", "disaggregated"])
    assert spec.layouts("aggregated", 2) == (Layout(2, 0, 0), Layout(3, 0, 0))
    assert spec.layouts("disaggregated", 2) == (Layout(0, 1, 1), Layout(0, 1, 2), Layout(0, 2, 1))
    assert spec.layouts("disaggregated", 8) == ()
    assert [spec.num_layouts(mode, 2) for mode in spec.mode] == [3, 4]
    assert [layout.total_gpus(2) for layout in spec.layouts("disaggregated", 2)] == [4, 6, 6]
    given = loaded(replicas=[1, 3], prefill_workers=[1, 2], decode_workers=4)
    assert given.layouts("aggregated", 1) == (Layout(1, 0, 0), Layout(3, 0, 0))
    assert given.layouts("disaggregated", 1) == (Layout(0, 1, 4), Layout(0, 2, 4))
    assert (given.num_layouts("aggregated", 1), given.num_layouts("disaggregated", 1)) == (2, 2)
    assert loaded().layouts("disaggregated", 1) == (Layout(0, 1, 1),)
    # what is impossible is a candidate too
    assert spec.num_candidates == 2 * sum(spec.num_layouts(m, tp) for m in spec.mode for tp in spec.tp)


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (0.5, (0.5,)),
        ([3, 1.5, 3], (1.5, 3.0)),
        (np.array([2.0, 1.0]), (1.0, 2.0)),
        ({"start": 0, "stop": 1, "step": 0.25}, (0.0, 0.25, 0.5, 0.75, 1.0)),
        ({"start": 0.1, "stop": 0.3, "step": 0.1}, (0.1, 0.2, 0.3)),
        ({"start": 0.5, "stop": 5, "factor": 2}, (0.5, 1.0, 2.0, 4.0)),
        ({"start": 1, "stop": 4, "num": 3}, (1.0, 2.5, 4.0)),
        ({"start": 1, "stop": 4, "num": 3, "scale": "log2"}, (1.0, 2.0, 4.0)),
    ],
)
def test_amounts(given: Any, expanded: tuple[float, ...]) -> None:
    assert expand_reals(given, 0, 10) == pytest.approx(expanded)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the list is empty"),
        ("1", "got '1', need numbers above 0 up to 10"),
        (None, "got None"),
        (
            [1, 0, 99, True, float("nan")],
            "got 0 at position 1, 99 at position 2, True at position 3 and 1 more",
        ),
        ({"start": 1, "end": 2, "step": 1}, "unknown key 'end'; stop is missing"),
        ({"start": 1, "stop": 2}, "need one of step, factor, num, got none"),
        ({"start": 1, "stop": 2, "step": 1, "scale": "log2"}, "scale needs num"),
        ({"start": 3, "stop": 2, "step": 1}, "the range is empty: start 3 is above stop 2"),
        ({"start": 0, "stop": 2, "step": 1}, "start must be one of numbers above 0 up to 10, got 0"),
        ({"start": 1, "stop": 2, "step": 0}, "step must be a number above 0, got 0"),
        ({"start": 1, "stop": 2, "factor": 1}, "factor must be a number above 1, got 1"),
        ({"start": 1, "stop": 2, "num": 2.5}, "num must be a whole number of at least 2, got 2.5"),
        ({"start": 1, "stop": 2, "num": 3, "scale": "log"}, "scale must be linear or log2, got 'log'"),
        ({"start": 1, "stop": 2, "step": 1e-9}, "1,000,000,001 values are too many"),
        ([1.0] * (2**20 + 1), "1,048,577 values are too many"),
    ],
)
def test_wrong_amounts_are_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"got|need|list|range|must|values") as caught:
        expand_reals(given, 0, 10, above=True)
    assert message in str(caught.value)


def test_no_geometric_range_starts_at_zero() -> None:
    with pytest.raises(ValueError, match="factor cannot start at 0"):
        expand_reals({"start": 0, "stop": 1, "factor": 2}, 0, 1)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'models = ["llama-3.1-8b"]\nisl = 10\nosl = 10\nrate = 1\ntables = "./mine"\n'
        "[constraints]\nttft_ms = 5\n"
    )
    spec = load_spec(tmp_path / "my.toml")
    assert isinstance(spec, DeploymentSpec)
    assert spec.tables == str(tmp_path / "mine")
    assert spec.constraints.ttft_ms == 5


def test_listed_layouts_replace_the_product_of_axes() -> None:
    split = [{"tp": 8}, {"tp": 8, "ep": 8}, {"dp": 8, "ep": 8}, {"tp": 8}, {"tp": 8, "pp": 2}]
    spec = loaded(split=split, routing=["balanced"])
    found = [(tp, other.pp, other.dp, other.ep) for tp, other in spec.splits]
    assert found == [(8, 1, 1, 1), (8, 1, 1, 8), (1, 1, 8, 8), (8, 2, 1, 1)]
    again = load_spec(spec, {"keep": "all"})
    assert isinstance(again, DeploymentSpec)
    assert again.splits == spec.splits
    assert len(spec.layouts_by_split) == 4
    # a list gives the same as a product of axes
    product = loaded(tp=[4, 8], ep=[1, 4])
    listed = loaded(split=[{"tp": tp, "ep": ep} for tp in (4, 8) for ep in (1, 4)])
    assert listed.splits == product.splits


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([], "the list is empty"),
        ([3], "need tables like {tp = 1, dp = 8, ep = 8}"),
        ([{"tp": 3}], "got 3, need some of 1, 2, 4, 8"),
        ([{"tp": 8, "gp": 1}], "unknown key 'gp' of a split"),
        ([{"dp": 0}], "split: got 0"),
        ([{"dp": 1.5}], "split: got 1.5"),
    ],
)
def test_wrong_layouts_are_named(split: Any, message: str) -> None:
    assert message in refused(split=split)


def test_layouts_are_given_only_once() -> None:
    assert "split: sets dp itself; give only one of them" in refused(split=[{"tp": 8}], dp=[2])
