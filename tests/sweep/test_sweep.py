"""Sweeps: equal to the naive one, atomic files, and left-out points reported."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import fastroof
from fastroof import StepBatch, SweepError, Tables, compile_plan
from fastroof.arrow import arrow_schema
from fastroof.columns import ORIGINS
from fastroof.errors import PlanRangeError
from fastroof.sweep import LIMITS, best_batches, load_spec, results, run_sweep
from fastroof.sweep.kind import load_tables_by_gpu
from fastroof.sweep.kinds import sweep_of
from fastroof.sweep.results import ResultFile
from fastroof.sweep.steps import COLUMNS
from fastroof.sweep.steps import spec as units
from fastroof.sweep.steps.spec import BestStep, step_columns, with_standings
from tests.reference.sweep import best_steps, violated

CHECKOUT = Path(__file__).resolve().parents[2]
# from 64 to 65 kernels jump, and fewer requests may give more tokens a second
BATCHES = [1, 2, 7, 24, 29, 30, 31, 32, 64, 65]
LENGTHS = [1, 2, 1000, 4096, 16384, 100_000]
SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b"],
    "batch_size": BATCHES,
    "kv_len": LENGTHS,
    # what the naive versions sum; the default is held elsewhere (tests/test_defaults.py)
    "engine": "kernels",
}


def plan_of(tables: Tables, model: str, **options: Any) -> Any:
    most = max(BATCHES)
    return compile_plan(
        model,
        "h100",
        tables,
        max_num_batched_tokens=most,
        max_num_seqs=most,
        **{"engine": "kernels", **options},
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]


PLANS: list[dict[str, Any]] = [
    {"model": "llama-3.1-8b", "tp": 1, "dtype": "bf16"},
    {"model": "llama-2-7b", "tp": 2, "dtype": "bf16"},
    {"model": "qwen2.5-72b", "tp": 1, "dtype": "fp8"},
]


@pytest.mark.loops
def test_best_steps_equal_the_naive_ones(tmp_path: Path, h100: Tables) -> None:
    output = tmp_path / "r.parquet"
    met = set()
    for options in PLANS:
        plan = plan_of(h100, **options)
        lengths = [kv for kv in LENGTHS if kv <= plan.model.max_position]
        for limit_ms in (None, 25.0, 11.0, 1.0):
            limit = {} if limit_ms is None else {"tpot_ms": limit_ms}
            varied = {"models": options["model"], "tp": options["tp"], "dtype": options["dtype"]}
            summary = run_sweep({**SPEC, **varied, **limit}, output)
            expected, infeasible = best_steps(plan, BATCHES, lengths, limit_ms and limit_ms * 1e3)
            rows = rows_of(output)
            found = [(r["kv_len"], r["batch_size"], r["step_us"], r["limited_by"]) for r in rows]
            assert found == expected
            assert summary.infeasible == infeasible
            assert summary.evaluations == len(lengths) * len(BATCHES)
            assert summary.rows == len(lengths)
            met |= {(best.limited_by, best.batch_size > 0) for best in expected}
    # the comparison has met whatever can limit a batch
    assert met == {(limit, True) for limit in LIMITS} | {("memory", False), ("tpot", False)}


@pytest.mark.loops
def test_all_steps_equal_the_plans(tmp_path: Path, h100: Tables) -> None:
    spec = {**SPEC, "keep": "all", "tpot_ms": 20.0, "kv_dtype": ["bf16", "fp8"], "tp": 2}
    summary = run_sweep(spec, tmp_path / "r.parquet")
    rows = iter(rows_of(tmp_path / "r.parquet"))
    counts: dict[Any, int] = {}
    for kv_dtype in ("bf16", "fp8"):
        plan = plan_of(h100, "llama-3.1-8b", tp=2, kv_dtype=kv_dtype)
        for kv_len in LENGTHS:
            for batch_size in BATCHES:
                row = next(rows)
                assert (row["kv_dtype"], row["kv_len"], row["batch_size"]) == (kv_dtype, kv_len, batch_size)
                step_us = plan.decode_us(batch_size, kv_len)
                assert row["step_us"] == step_us
                assert row["tokens_per_s"] == batch_size / step_us * 1e6
                assert row["tokens_per_s_per_gpu"] == batch_size / step_us * 1e6 / 2
                assert row["exceeds"] == violated(plan, batch_size, kv_len, 20_000.0)
                counts[row["exceeds"]] = counts.get(row["exceeds"], 0) + 1
    assert next(rows, None) is None
    assert summary.evaluations == summary.rows == 2 * len(LENGTHS) * len(BATCHES)
    assert summary.infeasible == {"memory": counts["memory"], "tpot": counts["tpot"]}
    assert min(summary.infeasible.values()) > 0


@pytest.mark.loops
def test_origins_are_those_of_the_run_steps(tmp_path: Path, h100: Tables) -> None:
    found = set()
    for model in ("llama-3.1-8b", "mistral-7b", "qwen2.5-7b"):
        run_sweep({**SPEC, "models": model, "keep": "all"}, tmp_path / "r.parquet")
        plan = plan_of(h100, model)
        for row in rows_of(tmp_path / "r.parquet"):
            if row["kv_len"] > 1:  # one token after nothing is a prefill to run
                steps = StepBatch.from_requests([[(1, row["kv_len"] - 1)] * row["batch_size"]])
                assert row["origin"] == ORIGINS[plan.run(steps).origin[0]]
            found.add(row["origin"])
    assert found == {"interpolated", "extrapolated", "borrowed"}


@pytest.mark.loops
def test_loops_report_a_plan_that_is_too_small(h100: Tables) -> None:
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=8, max_num_seqs=8, engine="kernels"
    )
    with pytest.raises(PlanRangeError, match="max_num_batched_tokens=65, max_num_seqs=65"):
        best_batches(plan, BATCHES, 4096)


def test_names_of_the_limits_are_in_the_order_of_the_codes() -> None:
    from fastroof.compiled import sweeps

    for code, name in enumerate(LIMITS):
        assert getattr(sweeps, f"LIMITED_BY_{name.upper().replace(' ', '_')}") == code


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["best", "all"])
def test_any_thread_count_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    spec = {
        **SPEC,
        "models": ["llama-3.1-8b", "mistral-7b"],
        "tp": [1, 2, 4],
        "keep": keep,
        "tpot_ms": 20.0,
    }
    summaries = [run_sweep(spec, tmp_path / f"{n}.parquet", threads=n) for n in (1, 2, 5)]
    # parts of plans make no difference either
    monkeypatch.setattr(units, "ROWS_A_UNIT", 2)
    monkeypatch.setattr(results, "ROWS_A_GROUP", 2)
    summaries.append(run_sweep(spec, tmp_path / "parts.parquet", threads=2))
    assert pq.ParquetFile(tmp_path / "parts.parquet").num_row_groups > 6
    tables = [pq.read_table(summary.output) for summary in summaries]
    for table, summary in zip(tables[1:], summaries[1:], strict=True):
        assert table.equals(tables[0], check_metadata=True)
        assert summary.best == summaries[0].best
        assert summary.evaluations == summaries[0].evaluations
        assert summary.infeasible == summaries[0].infeasible


def test_the_summary_has_the_best_step_of_each_plan_at_the_nearest_length(tmp_path: Path) -> None:
    spec = {**SPEC, "models": ["llama-3.1-8b", "llama-2-7b"], "report_kv_len": 9000, "tpot_ms": 20.0}
    summary = run_sweep(spec, tmp_path / "r.parquet")
    rows = {(r["model"], r["kv_len"]): r for r in rows_of(tmp_path / "r.parquet")}
    # 16384 is beyond what llama-2-7b knows
    assert [(b.model, b.kv_len) for b in summary.best] == [("llama-3.1-8b", 4096), ("llama-2-7b", 4096)]
    for best in summary.best:
        row = rows[best.model, best.kv_len]
        fields = {name: value for name, value in vars(best).items() if name != "standing"}
        assert {name: row[name] for name in fields} == fields


def test_a_plan_without_a_feasible_batch_has_a_reason(tmp_path: Path) -> None:
    summary = run_sweep({**SPEC, "tpot_ms": 0.5}, tmp_path / "r.parquet")
    assert all(r["limited_by"] == "tpot" and r["batch_size"] == 0 for r in rows_of(tmp_path / "r.parquet"))
    assert all(
        r[name] is None
        for r in rows_of(tmp_path / "r.parquet")
        for name in ("step_us", "tokens_per_s", "tokens_per_s_per_gpu", "origin")
    )
    assert (summary.best[0].batch_size, summary.best[0].step_us, summary.best[0].origin) == (0, None, None)
    assert sum(summary.infeasible.values()) == summary.evaluations


def test_skipped_points_are_named(tmp_path: Path) -> None:
    spec = {
        **SPEC,
        "models": ["qwen2.5-7b", "llama-3.1-70b", "yi-34b"],
        "tp": [1, 8],
        "dtype": ["bf16", "fp8"],
        "kv_len": [128, 50_000],
    }
    calls: list[tuple[int, int]] = []
    summary = run_sweep(
        spec, tmp_path / "r.parquet", progress=lambda done, total: calls.append((done, total))
    )
    assert list(summary.skipped) == [
        "beyond the model's context", "cannot be split", "weights do not fit in memory",
    ]  # fmt: skip
    assert summary.skipped["beyond the model's context"] == (
        "qwen2.5-7b: 1 of 2 kv_len are above 32768",
        "yi-34b: 1 of 2 kv_len are above 4096",
    )
    (split,) = summary.skipped["cannot be split"]
    assert split.startswith("qwen2.5-7b cannot run with tp=8: 28 query heads")
    assert summary.skipped["weights do not fit in memory"] == ("llama-3.1-70b on h100 tp=1 bf16 kv bf16",)
    # of 12 plans: qwen tp=8 twice and the 70B once fall out
    assert summary.plans == 9
    assert summary.evaluations == (2 * 1 + 3 * 2 + 4 * 1) * len(BATCHES)
    assert summary.rows == 2 * 1 + 3 * 2 + 4 * 1
    # every step of the plans that might have been, within the models' context
    assert calls[-1] == ((4 * 1 + 4 * 2 + 4 * 1) * len(BATCHES),) * 2
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    kept = {(r["model"], r["tp"], r["dtype"]) for r in rows_of(tmp_path / "r.parquet")}
    assert ("qwen2.5-7b", 8, "bf16") not in kept
    assert len(kept) == 9


def test_a_model_that_no_plan_can_be_made_of_is_named(tmp_path: Path) -> None:
    preset = json.loads((CHECKOUT / "fastroof" / "models" / "presets" / "mistral-7b.json").read_text())
    (tmp_path / "windowed.json").write_text(json.dumps({**preset, "sliding_window": 512}))
    models = ["yi-34b", "llama-2-7b", str(tmp_path / "windowed.json")]
    spec = {**SPEC, "models": models, "kv_len": [4096], "method": "floor"}
    summary = run_sweep(spec, tmp_path / "r.parquet")
    assert [b.model for b in summary.best] == ["yi-34b", "llama-2-7b"]
    (windowed,) = summary.skipped["no plan"]
    assert windowed.startswith("windowed on h100 tp=1 bf16 kv bf16: ")
    assert "method='floor' interpolates MFU, which does not fit windowed's window" in windowed
    with pytest.raises(SweepError, match="nothing to evaluate: beyond the model's context: yi-34b: 2 of 2"):
        run_sweep({**SPEC, "models": "yi-34b", "kv_len": [5000, 6000]}, tmp_path / "r.parquet")


def test_missing_tables_are_named_and_an_error_where_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from fastroof.tables import table_set

    whole = table_set.load_tables("h100")
    kept = {name: t for name, t in whole.measured.tables.items() if name != "allreduce"}
    monkeypatch.setattr(
        table_set, "load_gpu_tables", lambda *_, **__: Tables(replace(whole.measured, tables=kept), whole.gpu)
    )
    summary = run_sweep({**SPEC, "tp": [1, 2]}, tmp_path / "r.parquet")
    assert summary.plans == 1
    (missing,) = summary.skipped["no measured table"]
    assert missing.startswith("llama-3.1-8b on h100 tp=2 bf16 kv bf16: h100 has no allreduce table")
    with pytest.raises(SweepError, match=r"no measured table: llama-3\.1-8b on h100 tp=2"):
        run_sweep({**SPEC, "tp": 2}, tmp_path / "other.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["r.parquet"]


def test_a_gpu_without_tables_is_modelled(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no measured tables of a100"):
        run_sweep({**SPEC, "gpu": "a100"}, tmp_path / "r.parquet")
    with pytest.warns(UserWarning, match="no measured tables of a100"):
        summary = run_sweep({**SPEC, "gpu": "A100", "tables": "datasheet"}, tmp_path / "r.parquet")
    assert summary.best[0].origin == "modelled"
    metadata = pq.read_schema(tmp_path / "r.parquet").metadata
    assert (metadata[b"fastroof.gpu"], metadata[b"fastroof.tables_hash"]) == (b"a100", b"")


def test_the_file_has_its_provenance(tmp_path: Path, h100: Tables) -> None:
    run_sweep({**SPEC, "gpu": "H100-SXM"}, tmp_path / "r.parquet")
    schema = pq.read_schema(tmp_path / "r.parquet")
    assert schema.metadata[b"fastroof.version"].decode() == fastroof.__version__
    assert schema.metadata[b"fastroof.tables_hash"].decode() == h100.content_hash
    assert schema.metadata[b"fastroof.gpu"] == b"h100"
    assert load_spec(json.loads(schema.metadata[b"fastroof.spec"])) == load_spec({**SPEC, "gpu": "H100-SXM"})


@pytest.mark.parametrize(("keep", "left_out"), [("best", "exceeds"), ("all", "limited_by")])
def test_every_column_is_documented(tmp_path: Path, keep: str, left_out: str, h100: Tables) -> None:
    run_sweep({**SPEC, "keep": keep}, tmp_path / "r.parquet")
    schema = pq.read_schema(tmp_path / "r.parquet")
    columns = [c for c in COLUMNS if c.name != left_out]
    assert schema.names == [c.name for c in columns]
    for column in columns:
        about = schema.field(column.name).metadata
        assert about == {b"unit": column.unit.encode(), b"meaning": column.meaning.encode()}
    row = rows_of(tmp_path / "r.parquet")[0]
    memory = plan_of(h100, "llama-3.1-8b").memory
    assert row["weight_bytes"] == memory.weight_bytes
    assert row["max_kv_tokens"] == memory.max_kv_tokens
    assert (row["model"], row["gpu"], row["tp"], row["dtype"]) == ("llama-3.1-8b", "h100", 1, "bf16")
    assert (row["kv_dtype"], row["engine"]) == ("bf16", "kernels")


def test_csv_holds_the_same_rows(tmp_path: Path) -> None:
    spec = {**SPEC, "tpot_ms": 11.0}
    run_sweep(spec, tmp_path / "r.parquet")
    run_sweep(spec, str(tmp_path / "r.csv"))
    whole = pq.read_table(tmp_path / "r.parquet").replace_schema_metadata()
    types = {f.name: f.type for f in whole.schema}
    options = pacsv.ConvertOptions(column_types=types, strings_can_be_null=True)
    assert pacsv.read_csv(tmp_path / "r.csv", convert_options=options).equals(whole)


def test_json_lines_hold_the_same_rows(tmp_path: Path) -> None:
    spec = {**SPEC, "tpot_ms": 11.0}
    run_sweep(spec, tmp_path / "r.parquet")
    run_sweep(spec, tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows_of(tmp_path / "r.parquet")


def test_units_are_pieces_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_sweep({**SPEC, "tp": [1, 2]}, tmp_path / "r.parquet")
    monkeypatch.setattr(units, "EVALUATIONS_A_UNIT", 20)
    sweep = sweep_of(load_spec({**SPEC, "tp": [1, 2]}))
    listed = sweep.units()
    assert [unit.number for unit in listed] == list(range(6))
    assert sum(unit.size for unit in listed) == 2 * len(LENGTHS) * len(BATCHES)
    tables = load_tables_by_gpu(sweep)
    # in any order, each from nothing but itself
    results = {}
    for unit in listed[::-1]:
        results[unit.number] = sweep.evaluate(pickle.loads(pickle.dumps(unit)), tables)
    rows = sweep.ordered(pa.Table.from_batches([results[number].rows for number in range(6)]))
    assert rows.to_pylist() == rows_of(tmp_path / "r.parquet")
    assert [len(results[number].for_summary) for number in range(6)] == [0, 0, 1, 0, 0, 1]


def test_no_unit_holds_more_than_a_quarter_of_a_million_rows() -> None:
    spec = {"models": ["llama-3.1-8b"], "tp": 1, "batch_size": list(range(1, 1001)), "keep": "all"}
    listed = sweep_of(load_spec({**spec, "kv_len": {"start": 1, "stop": 2000, "step": 1}})).units()
    assert sum(unit.size for unit in listed) == 2_000_000
    assert max(unit.size for unit in listed) <= 2**18


def test_steps_as_good_as_the_best_but_for_its_error_are_ties() -> None:
    def step(tokens_per_s: float, error: float | None, kv_len: int = 1, model: str = "a") -> BestStep:
        split = (1, 1, 1, 1, "bf16", "bf16", kv_len, 1, 1.0, tokens_per_s, tokens_per_s)
        return BestStep(model, *split, "memory", "measured", error)

    # as far behind as 5 % and just less, which is the error of both together: 3 and 4 %
    steps = [
        step(100.0, 0.03),
        step(95.2, 0.04),
        step(95.1, 0.04),
        step(200.0, None),
        step(9.0, 0.9, model="b"),
    ]
    assert [each.standing for each in with_standings(steps)] == ["best", "tie", None, None, "best"]
    assert [each.standing for each in with_standings([step(1.0, None), step(1.0, None, 2)])] == [None, None]


def test_the_file_has_the_counts(tmp_path: Path) -> None:
    summary = run_sweep({**SPEC, "tpot_ms": 11.0}, tmp_path / "r.parquet")
    metadata = pq.read_metadata(tmp_path / "r.parquet").metadata
    assert metadata[b"fastroof.kind"] == b"steps"
    counts = json.loads(metadata[b"fastroof.counts"])
    assert counts == {"evaluated": summary.evaluations, **summary.infeasible}


def test_millions_of_steps_are_counted(tmp_path: Path) -> None:
    spec = {**SPEC, "models": ["llama-3.1-8b", "qwen3-8b"], "tp": [1, 2, 4, 8], "dtype": ["bf16", "fp8"]}
    spec["batch_size"] = {"start": 1, "stop": 256, "step": 1}
    summary = run_sweep({**spec, "kv_len": {"start": 1, "stop": 3000, "step": 1}}, tmp_path / "r.parquet")
    assert summary.evaluations == 16 * 3000 * 256
    assert summary.infeasible["memory"] < summary.evaluations / 2


def test_an_old_file_is_replaced_at_the_end_only(tmp_path: Path) -> None:
    output = tmp_path / "r.parquet"
    output.write_text("old")
    seen: list[str] = []
    run_sweep(SPEC, output, progress=lambda *_: seen.append(output.read_bytes()[:4].decode()))
    assert seen[0] == "old"
    assert rows_of(output)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_sweep_that_is_broken_off_leaves_the_old_file_and_what_resumes_it(
    tmp_path: Path, error: type[BaseException]
) -> None:
    output = tmp_path / "r.parquet"
    output.write_text("old")

    def stop(*_: int) -> None:
        raise error

    with pytest.raises(error):
        run_sweep(SPEC, output, threads=2, progress=stop)
    assert {p.name for p in tmp_path.iterdir()} <= {"r.parquet", ".r.parquet.parts"}
    assert output.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("r.txt", r"r\.txt must end in \.parquet, \.csv or \.jsonl"),
        ("none/r.parquet", "folder .*none does not exist"),
        ("none/r.csv", "folder .*none does not exist"),
        ("none/r.jsonl", "folder .*none does not exist"),
        (f"{'r' * 250}.parquet", "cannot be written"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    done: list[int] = []
    with pytest.raises(SweepError, match=message):
        run_sweep(SPEC, tmp_path / name, progress=lambda *_: done.append(1))
    assert not done
    assert not list(tmp_path.iterdir())


def test_a_folder_is_refused_as_output(tmp_path: Path) -> None:
    (tmp_path / "r.parquet").mkdir()
    with pytest.raises(SweepError, match="is a folder, need a file's name"):
        run_sweep(SPEC, tmp_path / "r.parquet")


@pytest.mark.parametrize("moment", ["write_table", "close"])
def test_a_failing_write_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    schema = arrow_schema(step_columns("best"), {})
    batch = pa.RecordBatch.from_pylist([], schema=schema)

    def fill() -> None:
        with ResultFile(tmp_path / "r.parquet", schema) as results:
            monkeypatch.setattr(results._writer, moment, fail)
            results.write([batch])

    with pytest.raises(SweepError, match="No space left on device"):
        fill()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "dask"}, "executor must be one of local, ray, got 'dask'"),
        ({"threads": 0}, "threads must be a whole number of at least 1, got 0"),
        ({"threads": True}, "got True"),
        ({"executor": ["local"]}, "executor must be one of local, ray, got"),
        ({"resume": np.array([1, 2])}, "resume must be True or False"),
        ({"restart": "no"}, "restart must be True or False"),
        ({"progress": np.array([1, 2])}, "progress must be a function that is called with"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        run_sweep(SPEC, tmp_path / "r.parquet", **options)


@pytest.mark.parametrize("output", [None, 3, b"r.parquet", "", ["r.parquet"]])
def test_invalid_paths_are_refused(output: Any) -> None:
    with pytest.raises(SweepError, match="output must be a path"):
        run_sweep(SPEC, output)


@pytest.mark.slow
def test_the_packaged_sweep_answers_for_every_model(tmp_path: Path) -> None:
    summary = run_sweep(None, tmp_path / "r.parquet", threads=2)
    assert summary.evaluations >= 20_000_000
    assert summary.total_s < 30
    assert len({b.model for b in summary.best}) == len(load_spec().models)
    assert summary.rows == pq.read_metadata(tmp_path / "r.parquet").num_rows
    assert summary.evaluations == summary.rows * 512
    assert summary.evaluations_per_s > 1e6
    for best in summary.best:
        assert best.kv_len == 4096
        assert best.step_us is None or 0 < best.step_us <= 50_000


def test_the_best_throughput_grows_with_the_limit(tmp_path: Path) -> None:
    rates = []
    for limit_ms in (8.0, 12.0, 20.0, 50.0):
        run_sweep({**SPEC, "tpot_ms": limit_ms}, tmp_path / "r.parquet")
        rates.append([r["tokens_per_s"] or 0.0 for r in rows_of(tmp_path / "r.parquet")])
    assert (np.diff(rates, axis=0) >= 0).all()
    assert np.any(np.diff(rates, axis=0) > 0)
