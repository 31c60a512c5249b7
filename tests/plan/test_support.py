"""Which combinations of model, GPU, engine, format and layout plans have measured kernels for."""

from __future__ import annotations

import pytest

from fastroof import compile_plan, load_model, load_tables
from fastroof.errors import MissingTableError
from fastroof.plan.plan_set import STATUSES, best_support, default_layouts, support_rows


@pytest.fixture(scope="module")
def rows():
    """SGLang has no tables of a B200."""
    models = [load_model("llama-3.1-70b"), load_model("qwen2.5-7b")]
    gpus, dtypes = ["h100", "a100", "b200"], ("auto", "fp8_block", "nvfp4")
    return list(support_rows(models, gpus, ["vllm", "sglang"], dtypes=dtypes))


def one(rows, **wanted):
    (row,) = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    return row


def test_every_combination_is_answered_once(rows):
    assert len(rows) == 2 * 3 * 2 * 3 * 4
    assert len({row[:9] for row in rows}) == len(rows)
    assert {row.status for row in rows} <= set(STATUSES)
    assert {row.dtype for row in rows} == {"bf16", "fp8_block", "nvfp4"}


def test_kernels_of_the_engine_are_measured(rows):
    row = one(rows, model="llama-3.1-70b", gpu="h100", engine="vllm", dtype="bf16", tp=4)
    assert (row.status, row.why) == ("measured", "")


def test_weights_that_do_not_fit_are_refused(rows):
    row = one(rows, model="llama-3.1-70b", gpu="h100", engine="vllm", dtype="bf16", tp=1)
    assert row.status == "refused"
    assert "weights take 131 GiB of a GPU's 80" in row.why


def test_a_split_that_the_model_refuses_has_a_reason(rows):
    row = one(rows, model="qwen2.5-7b", gpu="h100", engine="vllm", dtype="bf16", tp=8)
    assert row.status == "refused"
    assert "28 query heads do not divide by 8" in row.why


def test_another_engines_kernels_are_borrowed_and_named(rows):
    own, other = (
        one(rows, model="llama-3.1-70b", gpu="b200", engine=engine, dtype="fp8_block", tp=4)
        for engine in ("vllm", "sglang")
    )
    assert (own.status, own.why) == ("measured", "")
    assert other.status == "borrowed"
    assert other.why.startswith("qkv, ")
    assert "from aiconfigurator-vllm-" in other.why


def test_without_tables_everything_is_modelled(rows):
    row = one(rows, model="llama-3.1-70b", gpu="a100", engine="vllm", dtype="bf16", tp=4)
    assert row.status == "modelled"
    assert "a100 has no measured tables" in row.why


def test_measured_means_a_plan_without_the_datasheet(rows):
    tables = {gpu: load_tables(gpu) for gpu in ("h100", "b200")}
    for row in rows:
        if row.status not in ("measured", "borrowed"):
            continue
        options = {"tp": row.tp, "dtype": row.dtype, "engine": row.engine}
        plan = compile_plan(row.model, row.gpu, tables[row.gpu], **options)
        assert "datasheet" not in plan.kernels


def test_modelled_means_that_a_table_is_missing():
    model = load_model("llama-3.1-8b")
    row = next(support_rows([model], ["h100"], ["vllm"], dtypes=("int8",)))
    assert row.status == "modelled"
    with pytest.raises(MissingTableError):
        compile_plan(model, "h100", load_tables("h100"), dtype="int8", engine="vllm")


def test_dense_models_have_no_expert_parallelism():
    assert all(layout.ep == 1 for layout in default_layouts(load_model("llama-3.1-8b")))


def test_a_summary_has_the_best_row_of_all_layouts():
    models = [load_model("llama-3.1-70b"), load_model("bamba-9b")]
    place = (["h100"], ["vllm"])
    every = list(support_rows(models, *place, dtypes=("auto",)))
    for row in best_support(models, *place):
        statuses = {other.status for other in every if other.model == row.model}
        assert row.status == min(statuses, key=STATUSES.index)
        assert row in every
    assert {row.status for row in every if row.model == "llama-3.1-70b"} == {"measured", "refused"}
