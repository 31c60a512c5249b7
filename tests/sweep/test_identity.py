"""The identity of a sweep holds all that decides its answers: else `--resume` would mix two sweeps."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

from fastroof import SweepError, load_gpu, load_model
from fastroof.config.paths import bench_data_root
from fastroof.engines import engine_names, load_engine
from fastroof.models import model_names
from fastroof.sweep import load_spec, run_sweep
from fastroof.sweep.identity import IDENTITY_KEYS, file_metadata
from fastroof.sweep.kind import load_tables_by_gpu
from fastroof.sweep.kinds import sweep_of

PACKAGE = Path(__file__).resolve().parents[2] / "fastroof"
SOURCE = "aiconfigurator-vllm-0.25.0"
OPERATORS = ("gemm", "attention_decode", "attention_prefill", "elementwise", "dsa_prefill")


class Inputs(NamedTuple):
    """Everything that a sweep reads, in one folder."""

    folder: Path

    @property
    def specs(self) -> dict[str, dict[str, Any]]:
        """A sweep of each kind, with a name for what it reads."""
        gpu = str(self.folder / "card")
        every = {"models": str(self.folder / "model"), "tables": gpu}
        engine = str(self.folder / "mine.toml")
        return {
            "steps": {**every, "gpu": gpu, "engine": engine, "batch_size": [1, 8], "kv_len": 1024},
            "deployments": {
                **every, "gpus": gpu, "engine": engine, "isl": 500, "osl": 100, "clients": [1, 8],
                "speculation": {
                    "num_draft_tokens": 3, "accepted": 2.2, "draft": str(self.folder / "draft"),
                },
            },
            "capacities": {
                **every, "gpus": gpu, "engine": engine, "slo": {"ttft_p99_ms": 500},
                "workload": {"trace": str(self.folder / "trace.csv")},
            },
        }  # fmt: skip

    def identity(self, kind: str, **changed: Any) -> dict[str, str]:
        sweep = sweep_of(load_spec({**self.specs[kind], **changed}))
        metadata = file_metadata(sweep, load_tables_by_gpu(sweep))
        return {key: metadata[key] for key in IDENTITY_KEYS}


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    config = (PACKAGE / "models" / "presets" / "llama-3.1-8b.json").read_text("utf-8")
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    card = tmp_path / "card"
    for rank, source in enumerate(("first", "second"), 1):
        (card / source).mkdir(parents=True)
        for operator in OPERATORS:
            shutil.copy(bench_data_root() / "h100" / SOURCE / f"{operator}.parquet", card / source)
        (card / source / "provenance.toml").write_text(f'gpu = "h100"\nrank = {rank}\n')
    shutil.copy(bench_data_root() / "h100" / "gpu.toml", card)
    profile = (PACKAGE / "engines" / "profiles" / "vllm.toml").read_text("utf-8")
    (tmp_path / "mine.toml").write_text(profile.replace('name = "vllm"', 'name = "mine"'))
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n1,200,20\n")
    return Inputs(tmp_path)


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1))


def rewritten(path: Path, column: str, change: Callable[[np.ndarray[Any, Any]], Any]) -> None:
    table = pq.read_table(path)
    place = table.column_names.index(column)
    values = np.array(table.column(place).to_pylist())
    pq.write_table(table.set_column(place, column, [change(values)]), path)


def renamed(names: np.ndarray[Any, Any]) -> list[str]:
    return ["another", *names[1:]]


HF_QUANT = '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}'
STEPS = ("steps",)
EVERY = (*STEPS, "deployments", "capacities")
CHANGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a model": (
        lambda at: replaced(at / "model/config.json", '"num_hidden_layers": 32', '"num_hidden_layers": 31'),
        EVERY,
    ),
    "its formats": (lambda at: (at / "model/hf_quant_config.json").write_text(HF_QUANT), EVERY),
    "a draft": (
        lambda at: replaced(at / "draft/config.json", '"num_hidden_layers": 32', '"num_hidden_layers": 4'),
        ("deployments",),
    ),
    "a GPU": (lambda at: replaced(at / "card/gpu.toml", "tb_per_s = 3.35", "tb_per_s = 3.34"), STEPS),
    "what an engine costs": (
        lambda at: replaced(at / "mine.toml", "\nlogit_ps = ", "\nlogit_ps = 1"),
        STEPS,
    ),
    "how it schedules": (
        lambda at: replaced(at / "mine.toml", "max_num_seqs = 1024", "max_num_seqs = 512"),
        STEPS,
    ),
    "its memory": (lambda at: replaced(at / "mine.toml", "fraction = 0.9", "fraction = 0.8"), STEPS),
    "which kernels it runs": (
        lambda at: replaced(at / "mine.toml", 'fp8_scales = "static"', 'fp8_scales = "dynamic"'),
        STEPS,
    ),
    "a row of the first source": (
        lambda at: rewritten(at / "card/first/gemm.parquet", "latency_us", lambda us: us * 1.001),
        STEPS,
    ),
    "a row of the second source": (
        lambda at: rewritten(at / "card/second/gemm.parquet", "latency_us", lambda us: us * 1.001),
        STEPS,
    ),
    "names of kernels": (
        lambda at: rewritten(at / "card/second/dsa_prefill.parquet", "kernel", renamed),
        STEPS,
    ),
    "whose kernels they are": (
        lambda at: replaced(at / "card/second/provenance.toml", "rank", 'framework = "vllm"\nrank'),
        STEPS,
    ),
    "ranks": (lambda at: replaced(at / "card/second/provenance.toml", "rank = 2", "rank = 3"), STEPS),
    "a source less": (lambda at: shutil.rmtree(at / "card/second"), STEPS),
    "requests": (lambda at: replaced(at / "trace.csv", "200,20", "200,21"), ("capacities",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_sweep_reads_is_in_its_identity(inputs: Inputs, change: str) -> None:
    make, kinds = CHANGES[change]
    before = {kind: inputs.identity(kind) for kind in kinds}
    make(inputs.folder)
    for kind in kinds:
        assert inputs.identity(kind) != before[kind], kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_nothing_else_is_in_it(inputs: Inputs, kind: str) -> None:
    assert inputs.identity(kind) == inputs.identity(kind)


@pytest.mark.filterwarnings("ignore:no measured tables")
def test_the_gpu_of_a_datasheet_is_in_its_identity(inputs: Inputs) -> None:
    before = inputs.identity("steps", tables="datasheet")
    CHANGES["a GPU"][0](inputs.folder)
    assert inputs.identity("steps", tables="datasheet") != before


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_an_identity_does_not_depend_on_where_files_lie(inputs: Inputs, tmp_path: Path, kind: str) -> None:
    """Shards of one sweep run on several machines."""
    before = inputs.identity(kind)
    for file in inputs.folder.rglob("*.*"):
        os.utime(file, (0, 0))
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    shutil.copytree(inputs.folder, elsewhere)
    after = Inputs(elsewhere).identity(kind)
    for key in IDENTITY_KEYS:
        assert after[key].replace(str(elsewhere), str(inputs.folder)) == before[key], key


@pytest.mark.slow
@pytest.mark.parametrize("change", ["what an engine costs", "a row of the second source"])
def test_a_sweep_of_other_inputs_is_not_resumed(inputs: Inputs, change: str) -> None:
    spec, output = inputs.specs["steps"], inputs.folder / "r.parquet"
    run_sweep(spec, output)
    run_sweep(spec, output, resume=True)
    CHANGES[change][0](inputs.folder)
    with pytest.raises(SweepError, match="holds results of another sweep"):
        run_sweep(spec, output, resume=True)


def parts_of(value: Any) -> Iterator[Any]:
    """Every dataclass that something is made of, itself included."""
    if is_dataclass(value):
        yield value
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from parts_of(part)


def test_text_of_an_input_has_all_of_its_fields() -> None:
    """Inputs are hashed by their ``repr``."""
    inputs = [
        *map(load_model, model_names()),
        load_gpu("h100"),
        *map(load_engine, engine_names()),
    ]
    kinds = {type(part) for value in inputs for part in parts_of(value)}
    assert len(kinds) > 20
    for kind in kinds:
        assert all(field.repr for field in fields(kind)), kind
        assert kind.__repr__.__qualname__ == f"{kind.__qualname__}.__repr__", kind
        assert getattr(kind.__repr__, "__wrapped__", None) is not None, kind


def values_of(value: Any) -> Any:
    """Numbers and words of a packed kernel, in order."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return [(key, values_of(value[key])) for key in sorted(value)]
    if isinstance(value, list | tuple):
        return [values_of(one) for one in value]
    if isinstance(value, FunctionType):
        return [values_of(cell.cell_contents) for cell in value.__closure__ or ()]
    return values_of(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else value


def test_a_packed_kernel_depends_on_nothing_else(h100: Any) -> None:
    """``packed_words`` are the only optional columns that decide what is packed."""
    for name, table in h100.measured.tables.items():
        operator = table.schema
        if not operator.answers_lookups:
            continue
        wanted = {column.name for column in operator.required} | set(operator.packed_words)
        for key, rows in [*table.groups().items()][:3]:
            columns = {column: values[rows] for column, values in table.columns.items()}
            own = {column: values for column, values in columns.items() if column in wanted}
            packed = [values_of(operator.pack(key, given, h100.gpu)) for given in (columns, own)]
            assert packed[0] == packed[1], name


@pytest.mark.slow
def test_json_of_a_spec_has_every_key(inputs: Inputs) -> None:
    for kind in EVERY:
        spec = load_spec(inputs.specs[kind])
        written = json.loads(inputs.identity(kind)["fastroof.spec"])
        assert written.keys() == set(type(spec).model_fields)
