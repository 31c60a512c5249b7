"""Estimates of aiconfigurator-core (optional) for measured rows.

They are requested as ``aiconfigurator cli estimate`` does: the current version of its tables of the engine,
nominal lengths, a context budget of one prompt. Rows that it refuses are tried in other modes (:data:`WAYS`).
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module, metadata, resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from fastroof.errors import FastroofError, TableError
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.models import load_model
from fastroof.models.named import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastroof.evidence.rows import ServingRow

AICONFIGURATOR: Final = "aiconfigurator-core"
SDK: Final = "aiconfigurator_core.sdk"

DIGITS: Final = 4
"""Digits of its times in ms: they are estimates."""

WAYS: Final = ((True, None), (True, "bfloat16"), (False, None), (False, "bfloat16"))
"""Modes it is queried in, in this order until one has an answer: whether the row's format by name, or each
layer's as it reads the checkpoint; and the dtype that attention of prompts computes in, its own choice or
bf16, in which engines run it by default and which its tables have where fp8 is missing."""

_DTYPES: Final = {"bf16": "bfloat16", "mxfp4": None}
"""Its names of formats if they differ; None: as it reads the checkpoint."""

_PLACE: Final = re.compile(r" at /\S*.*")
"""The path of its tables on this machine, which is removed from reasons."""


def aiconfigurator_version() -> str:
    """Return the version of the installed package."""
    try:
        return metadata.version(AICONFIGURATOR)
    except metadata.PackageNotFoundError:
        raise FastroofError(
            f"{AICONFIGURATOR} is not installed, so it cannot be queried: "
            f"pip install {AICONFIGURATOR}==0.12.0; "
            "without it the predictions that ship with the rows are shown"
        ) from None


def with_aiconfigurator_estimates(
    rows: Sequence[ServingRow],
) -> tuple[tuple[ServingRow, ...], dict[str, int]]:
    """Query the installed package for its estimate of each row."""
    aiconfigurator_version()
    systems = {name: system for system, name in SYSTEMS.items()}
    answered, refused = [], dict[str, int]()
    with quiet(), TemporaryDirectory() as folder:
        for row in rows:
            try:
                if row.is_disaggregated:
                    raise NotImplementedError("disaggregated runs are not asked for")
                config = _config_folder(row.model, Path(folder))
                ttft_ms, tpot_ms = _first_answer(row, systems[row.gpu], config)
            except Exception as error:
                # any exception is the answer for this row only
                words = _PLACE.sub("", str(error).splitlines()[0]) if str(error) else ""
                reason = f"{type(error).__name__}: {words}"[:100]
                refused[reason] = refused.get(reason, 0) + 1
                ttft_ms = tpot_ms = math.nan
            answered.append(replace(row, aic_ttft_ms=ttft_ms, aic_tpot_ms=tpot_ms))
    return tuple(answered), refused


def _config_folder(model: str, folder: Path) -> str:
    """Return the folder of a model's config.json; a name would be downloaded."""
    if model not in PRESETS:
        path = Path(model)
        return str(path.parent if path.suffix == ".json" else path)
    own = folder / model
    if not own.is_dir():
        own.mkdir()
        if not any(write_published_config(checkpoint, own) for checkpoint in PRESETS[model]):
            preset = resources.files("fastroof.models") / "presets" / f"{model}.json"
            (own / "config.json").write_bytes(preset.read_bytes())
    return str(own)


def write_published_config(checkpoint: str, folder: Path) -> bool:
    """Write the package's configuration of a checkpoint into a folder, as in its repository."""
    try:
        configs = installed_root() / "model_configs"
    except TableError:
        return False
    for name in ("config.json", "hf_quant_config.json"):
        file = configs / f"{checkpoint.replace('/', '--')}_{name}"
        if file.is_file():
            (folder / name).write_bytes(file.read_bytes())
    return (folder / "config.json").is_file()


def _first_answer(row: ServingRow, system: str, config_folder: str) -> tuple[float, float]:
    """Return TTFT and TPOT, ms, by the first mode that answers; else raise the error of the first."""
    first: Exception | None = None
    for named, attention_dtype in WAYS:
        try:
            return _estimate(row, system, config_folder, named, attention_dtype)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _estimate(
    row: ServingRow, system: str, config_folder: str, named: bool, attention_dtype: str | None
) -> tuple[float, float]:
    """Return TTFT and TPOT, ms."""
    databases = import_module(f"{SDK}.perf_database")
    version = databases.get_version_slots(system, row.engine)["current"]
    database = databases.get_database(system, row.engine, version)
    # replicas of a dense model are queried one by one
    experts = load_model(row.model).has_experts
    dtype = _DTYPES.get(row.dtype, row.dtype) if named else None
    model_config = import_module(f"{SDK}.config_builders").build_model_config(
        row.tp,
        row.pp,
        row.dp if experts else 1,
        row.tp * row.dp // row.ep if experts else 1,
        row.ep,
        gemm_quant_mode=dtype,
        kvcache_quant_mode={"bf16": "bfloat16"}.get(row.kv_dtype, row.kv_dtype),
        fmha_quant_mode=attention_dtype,
        moe_quant_mode=dtype if experts else None,
    )
    model = import_module(f"{SDK}.models").get_model(config_folder, model_config, row.engine)
    lengths = {
        "isl": round(row.isl),
        "osl": round(row.osl),
        "batch_size": max(1, round(row.concurrency / row.dp)),
        "prefix": round(row.prefix_tokens),
    }
    summary = (
        import_module(f"{SDK}.backends.factory")
        .get_backend(row.engine)
        .run_agg(
            model,
            database,
            import_module(f"{SDK}.config").RuntimeConfig(**lengths),
            ctx_tokens=lengths["isl"],
        )
    )
    answer: dict[str, Any] = summary.get_result_dict()
    return round(float(answer["ttft"]), DIGITS), round(float(answer["tpot"]), DIGITS)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the package's logs and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
