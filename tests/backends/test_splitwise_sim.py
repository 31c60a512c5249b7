"""Tables for splitwise-sim: what its lookups of them say, and how far that is from the plan."""

from __future__ import annotations

import re

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.backends import splitwise_sim, splitwise_sim_example
from fastroof.backends.splitwise_sim import splitwise_errors, splitwise_table, write_splitwise_table
from fastroof.cli import app
from fastroof.errors import BackendError
from tests.backends.interfaces import Interface, python_differences, recorded
from tests.backends.splitwise_sim import READ, DatabasePerformanceModel, Instance, PromptTask, TokenTask

PLANS = {
    "dense": ("llama-3.1-8b", {}),
    "engine": ("llama-3.1-70b", {"tp": 4, "dtype": "fp8", "engine": "vllm"}),
    "experts": ("mixtral-8x7b", {"tp": 2}),
}


@pytest.fixture(scope="module", params=PLANS)
def plan(request, h100):
    model, options = PLANS[request.param]
    return fastroof.compile_plan(
        model, "h100", h100, max_tokens=2048, max_seqs=128, **{"engine": "kernels", **options}
    )


@pytest.fixture
def reader(plan, tmp_path):
    path = tmp_path / "perf_model.csv"
    write_splitwise_table(plan, path, 2048, longest=10_000)
    instance = Instance(plan.model.name, "h100-80gb", plan.layout.tp)
    found = DatabasePerformanceModel(path)
    assert list(found.lines) == [instance]
    return lambda batch: 1e6 * found.get_iteration_duration(batch, instance)


def test_the_stand_in_is_as_recorded():
    [interface] = recorded("splitwise_sim")
    columns = [line for line in interface.signatures if ": " in line]
    assert [line.partition(": ")[2] for line in columns] == list(READ) == list(splitwise_sim.COLUMNS)
    calls = tuple(line for line in interface.signatures if ": " not in line)
    only_calls = Interface(**{**interface._asdict(), "signatures": calls})
    # a class is recorded with the parameters of its constructor
    assert python_differences(only_calls, {"DatabasePerformanceModel": DatabasePerformanceModel}) == []


def test_one_prompt_is_timed_as_the_plan_times_it(plan, reader):
    for tokens in (1, 2, 77, 1000, 2048):
        assert reader([PromptTask(tokens)]) == pytest.approx(plan.prefill_us(tokens, 0), rel=1e-12)
    steps = plan.prefill_us([2048, 2048, 512], [0, 2048, 4096])
    assert reader([PromptTask(4608)]) == pytest.approx(
        steps.sum(), rel=1e-12
    )  # a row of its own: 2048 + 10 * 256
    assert reader([PromptTask(10_000)]) == pytest.approx(
        plan.prefill_us([2048] * 4 + [1808], [0, 2048, 4096, 6144, 8192]).sum(), rel=1e-12
    )


def test_decodes_are_timed_at_their_usual_length(plan, reader):
    for count in (1, 2, 33, 128):
        assert reader([TokenTask(9)] * count) == pytest.approx(plan.decode_us(count, 2048), rel=1e-12)


def test_prompts_beside_decodes_are_prompts_times_a_factor(plan, reader):
    batch = [PromptTask(300), PromptTask(200), *[TokenTask(5)] * 12]
    assert reader(batch) == pytest.approx(1.1 * plan.prefill_us(512, 0), rel=1e-12)


def test_errors_are_those_of_the_reader(plan, reader, tmp_path):
    table = splitwise_table(plan, 2048, longest=10_000)
    for requests in ([(300, 0)], [(300, 0), (9, 0)], [(1, 5)] * 7, [(1, 5), (700, 0)], [(1, 0)]):
        batch = [TokenTask(c) if (n, c > 0) == (1, True) else PromptTask(n) for n, c in requests]
        assert 1e3 * splitwise_sim.looked_up_ms(table, requests) == pytest.approx(reader(batch), rel=1e-12)
    one, several, decodes, mixed = splitwise_errors(plan, table, steps=60)
    assert one.mean == pytest.approx(0.0, abs=1e-12)
    assert one.worst == pytest.approx(0.0, abs=1e-12)
    for error in (several, decodes, mixed):
        assert 0.0 < error.mean <= error.worst
        assert abs(error.bias) <= error.mean
    # at the length that the table is made for, decodes are exact
    assert (
        abs(splitwise_sim.looked_up_ms(table, [(1, 2047)] * 8) * 1e3 / plan.decode_us(8, 2048) - 1.0) < 1e-12
    )


def test_tables_rise_and_end_where_they_are_told(plan):
    for longest in (1, 2, 100, 2048, 2049, 3000):
        tokens = splitwise_table(plan, 64, longest=longest)["tokens"]
        assert (np.diff(tokens) > 0).all()
        assert tokens[0] == 1
        assert tokens[-1] == max(longest, 2)


def test_what_has_no_place_is_refused(h100):
    plan = fastroof.compile_plan("llama-3.1-70b", "h100", h100, tp=2, pp=2, engine="kernels")
    with pytest.raises(BackendError, match=r"by tensor_parallel only, and the plan's layout is .*pp"):
        splitwise_table(plan, 2048)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    for given in ({"kv_len": 0}, {"kv_len": 1.5}, {"kv_len": 9, "longest": 0}):
        with pytest.raises(BackendError, match=r"whole number|at least"):
            splitwise_table(plan, **given)


def test_the_command_writes_a_table_and_says_its_errors(tmp_path):
    path = tmp_path / "perf_model.csv"
    words = ["llama-2-70b,tp=8,max_tokens=512,max_seqs=64", "--kv-len", "2048", "--model-name", "llama2-70b"]
    done = CliRunner().invoke(app, ["export", "splitwise-sim", *words, "-o", str(path), "--longest", "512"])
    assert done.exit_code == 0
    wrote, *errors, limit = done.stdout.splitlines()
    assert wrote == f"wrote {path}: llama-2-70b-tp8 (engine vllm), 512 rows, batches of 1 to 512 tokens"
    kinds = ["one prompt", "several prompts", "decodes", "prompts with decodes"]
    assert [error.partition(":")[0] for error in errors] == kinds
    assert all(re.search(r": [0-9.]+ % mean error, [0-9.]+ % max, bias [+-]", error) for error in errors)
    assert "may have up to 64 requests" in limit
    assert [*DatabasePerformanceModel(path).lines] == [Instance("llama2-70b", "h100-80gb", 8)]
    assert "fastroof 0." in path.read_text().splitlines()[1]


def test_the_example_runs(capsys):
    splitwise_sim_example.main()
    assert "decodes" in capsys.readouterr().out
