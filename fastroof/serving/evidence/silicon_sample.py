"""Serving rows out of the package aiconfigurator-core: its sample of runs measured on GPUs.

The package (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator) holds them as
``systems/silicon_sample.csv``. Only that file is read: the package is not imported.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from fastroof.engines import serving_engines
from fastroof.errors import TableError
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.load.own import SERVING_FOLDER
from fastroof.load.write import toml_text
from fastroof.models.execution import DTYPES
from fastroof.serving.evidence.aiconfigurator_estimates import (
    AICONFIGURATOR,
    aiconfigurator_version,
    with_aiconfigurator_estimates,
)
from fastroof.serving.evidence.rows import LeftOut, ServingRow, write_rows
from fastroof.whole_files import write_whole

__all__ = ["SAMPLE_FILE", "convert_silicon_sample", "read_silicon_sample"]

SAMPLE_FILE: Final = "systems/silicon_sample.csv"
SOURCE: Final = "silicon_sample"

PRESETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Qwen/Qwen3-32B": "qwen3-32b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
        "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    }
)
"""The sample's models that a plan can represent."""

EXPERTS: Final = (
    "deepseek-ai/", "MiniMaxAI/", "openai/gpt-oss", "Qwen/Qwen3.5-397B", "moonshotai/", "Qwen/Qwen3-235B",
    "zhipuai/GLM-5", "nvidia/DeepSeek",
)  # fmt: skip
"""What its mixtures of experts begin with."""

DYNAMO: Final = "dynamo"
BENCH_ROUNDS: Final = 10.0
INFERENCEMAX_LENGTHS: Final = 0.9

_ONSET, _DEFAULT, _MODELOPT = "queueing onset", "engine default", "modelopt default"
KV_DTYPE_FROM: Final[Mapping[str, str]] = MappingProxyType(
    {
        _ONSET: "inferred: requests begin to queue where the KV cache of this dtype is full",
        _DEFAULT: "assumed: the engine's default, the dtype of the activations",
        _MODELOPT: "assumed: what modelopt writes into fp8 checkpoints",
    }
)
"""How the dtype of a KV cache is known, in words."""


class _KvDtype(NamedTuple):
    dtype: str
    known_from: str


def read_silicon_sample(
    gpu: str, path: str | Path | None = None
) -> tuple[tuple[ServingRow, ...], tuple[LeftOut, ...]]:
    """Read the rows of one GPU that fastroof can represent, and count the others.

    Parameters
    ----------
    gpu : str
        fastroof's name of it.
    path : str or Path, optional
        The file; that of the installed package if not given.

    Returns
    -------
    rows : tuple of ServingRow
        Aggregated serving of dense models in bf16 or fp8, by data set and in the file's order.
    left_out : tuple of LeftOut
        Rows of the GPU that are none of these, by reason.

    Raises
    ------
    TableError
        If the package is not installed, or the file is not the sample, or has nothing of the GPU.

    Notes
    -----
    The sample does not say how its runs were made. Rows of InferenceMAX (those of a dated file or a
    database) follow its public protocol: lengths uniform from 0.8 to 1.0 of nominal, 10 requests a client.
    The others ran behind NVIDIA Dynamo, with nominal lengths; 10 requests a client is an assumption there.
    No column has the KV cache's dtype: see ``kv_dtype_from`` of each row.
    """
    path = installed_root() / SAMPLE_FILE if path is None else Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            cells = [cell for cell in csv.DictReader(file) if SYSTEMS.get(cell.get("system", "")) == gpu]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as the sample of aiconfigurator-core: {error}") from None
    if not cells:
        raise TableError(f"{path} has no rows of {gpu}; it has {', '.join(SYSTEMS.values())} at most")
    rows, reasons = [], Counter[str]()
    for cell in cells:
        reason = _unrepresentable(cell)
        if reason:
            reasons[reason] += 1
        else:
            rows.append(_row(gpu, cell))
    rows.sort(key=lambda row: row.dataset)
    left_out = tuple(LeftOut(SOURCE, reason, count) for reason, count in sorted(reasons.items()))
    return tuple(rows), left_out


def convert_silicon_sample(gpu: str, bench_data: str | Path) -> Path:
    """Write a GPU's rows, with the package's own predictions beside them, and where they come from.

    Parameters
    ----------
    gpu : str
        fastroof's name of it.
    bench_data : str or Path
        Folder that holds one folder a GPU: silicon_sample.csv and .toml go to ``<gpu>/serving`` in it.

    Returns
    -------
    Path
        The CSV.

    Raises
    ------
    TableError
        As :func:`read_silicon_sample` does.
    FastroofError
        If the package is not installed.
    """
    rows, left_out = read_silicon_sample(gpu)
    rows, refused = with_aiconfigurator_estimates(rows)
    folder = Path(bench_data) / gpu / SERVING_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    version = aiconfigurator_version()
    provenance = {
        "gpu": gpu,
        "package": AICONFIGURATOR,
        "package_version": version,
        "url": "https://github.com/ai-dynamo/aiconfigurator",
        "licence": "Apache-2.0",
        "copyright": "Copyright (c) NVIDIA CORPORATION & AFFILIATES. All rights reserved.",
        "file": SAMPLE_FILE,
        "sha256": hashlib.sha256((installed_root() / SAMPLE_FILE).read_bytes()).hexdigest(),
        "changes": "rows selected and sorted by data set, columns renamed and added; no time was changed",
        "rows": len(rows),
        "predictions": (
            f"aic_ttft_ms and aic_tpot_ms are predictions of {AICONFIGURATOR} {version}, at kv_dtype"
        ),
        "predictions_refused": refused,
        "kv_dtype_from": {row.kv_dtype_from: KV_DTYPE_FROM[row.kv_dtype_from] for row in rows},
        "left_out": {entry.reason: entry.rows for entry in left_out},
    }
    write_whole(folder / f"{SOURCE}.toml", toml_text(provenance))
    return write_rows(folder / f"{SOURCE}.csv", rows)


def _unrepresentable(cell: Mapping[str, str]) -> str:
    """Why a plan cannot represent a row; empty where it can."""
    model = cell["model_path"]
    if cell["mode"] != "agg":
        return f"disaggregated: {model}"
    if model.startswith(EXPERTS):
        return f"mixture of experts: {model}"
    if model not in PRESETS:
        return f"no preset: {model}"
    if _dtype(cell) not in DTYPES:
        return f"dtype {_dtype(cell)}: {model}"
    if cell["backend"] not in serving_engines():
        return f"engine {cell['backend']}: {model}"
    if cell["pp_size"] != "1" or cell["attention_dp_size"] not in ("", "0", "1"):
        return f"pipeline or data parallel: {model}"
    return ""


def _dtype(cell: Mapping[str, str]) -> str:
    """Dtype of the linear layers; the sample leaves bf16 empty."""
    if cell["gemm_quant_mode"] == "fp8_block":
        return "fp8_block"
    return cell["precision"] or "bf16"


def _row(gpu: str, cell: Mapping[str, str]) -> ServingRow:
    engine, version, model, dtype = (
        cell["backend"],
        cell["backend_version"],
        PRESETS[cell["model_path"]],
        _dtype(cell),
    )
    origin = cell["silicon_data_source"]
    inferencemax = "source_file=2026-" in origin or origin.startswith("db-dump")
    kv = _kv_dtype(engine, model, dtype)
    return ServingRow(
        dataset="-".join(filter(None, (engine, version, model, dtype))),
        row=cell["id"],
        gpu=gpu,
        engine=engine,
        engine_version=version,
        checkpoint=cell["model_path"],
        model=model,
        dtype=dtype,
        kv_dtype=kv.dtype,
        kv_dtype_from=kv.known_from,
        tp=int(cell["tp_size"]),
        isl=float(cell["isl"]),
        osl=float(cell["osl"]),
        concurrency=float(cell["batch_size"]),
        length_factor=INFERENCEMAX_LENGTHS if inferencemax else 1.0,
        prefix_tokens=0.0,
        requests_per_client=BENCH_ROUNDS,
        frontend="" if inferencemax else DYNAMO,
        ttft_ms=float(cell["silicon_ttft_ms"]),
        tpot_ms=float(cell["silicon_tpot_ms"]),
        aic_ttft_ms=math.nan,
        aic_tpot_ms=math.nan,
        left_out=_odd(cell),
    )


def _kv_dtype(engine: str, model: str, dtype: str) -> _KvDtype:
    if dtype == "bf16":
        return _KvDtype("bf16", _DEFAULT)
    if (engine, model) == ("trtllm", "qwen3-32b"):
        return _KvDtype("fp8", _ONSET)
    if (engine, model) == ("vllm", "llama-3.1-70b"):
        return _KvDtype("bf16", _ONSET)
    return _KvDtype("fp8", _MODELOPT) if engine == "trtllm" else _KvDtype("bf16", _DEFAULT)


def _odd(cell: Mapping[str, str]) -> str:
    """Why a row that could be represented is no ground truth; empty where it is."""
    if "_c_tp" in cell["id"]:
        return "its concurrency is not in its name, and it took half of what its kernels alone take"
    if cell["model_path"] == "nvidia/Llama-3.1-8B-Instruct-FP8":
        return "it took less than half of what its kernels alone take"
    return ""
