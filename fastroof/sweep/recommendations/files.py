"""Files of a recommendation: scripts to start and measure it, manifests, and the rows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import check_file_place, whole_file, write_whole
from fastroof.checks import one_of
from fastroof.documents import yaml_text
from fastroof.errors import SweepError
from fastroof.models import TP_SIZES
from fastroof.sweep.recommendations.deployment import Deployment
from fastroof.sweep.recommendations.manifests import KUBERNETES, PLATFORMS, label_name

CONFIG: Final = "engine.yaml"
ROWS: Final = "deployments.parquet"


def save_deployments(
    rows: list[dict[str, Any]],
    deployments: Sequence[Deployment],
    folder: str | Path,
    manifest: str = KUBERNETES,
) -> list[Path]:
    """Write the files of deployments, one folder each if there are several, and their rows."""
    one_of("manifest", manifest, PLATFORMS, SweepError)
    files = [_files(deployment, manifest) for deployment in deployments]
    place = Path(folder)
    written: list[Path] = []
    try:
        place.mkdir(parents=True, exist_ok=True)
        written += _write_rows(rows, place)
        for number, (deployment, texts) in enumerate(zip(deployments, files, strict=True), start=1):
            target = place
            if len(deployments) > 1:
                target = place / f"{number}-{label_name(deployment.checkpoint.name)}"
            target.mkdir(exist_ok=True)
            for name, text in texts.items():
                path = target / name
                write_whole(path, text)
                if name.endswith(".sh"):
                    path.chmod(0o755)
                written.append(path)
    except OSError as error:
        raise SweepError(f"{place} cannot be written: {error.strerror or error}") from None
    return written


def check_place(folder: str | Path, manifest: str) -> None:
    """Reject a folder that cannot be written, or an unknown platform, before the work starts."""
    one_of("manifest", manifest, PLATFORMS, SweepError)
    place = existing = Path(folder)
    while not os.path.exists(existing):
        existing = existing.parent
    if not os.path.isdir(existing):
        raise SweepError(f"{place} cannot be written: {existing} is not a folder")
    check_file_place(existing / ROWS, str(place), SweepError)


def _write_rows(rows: list[dict[str, Any]], place: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    from fastroof._version import __version__
    from fastroof.arrow import arrow_schema
    from fastroof.columns import guarded_columns
    from fastroof.parquet import write_parquet
    from fastroof.sweep.deployments.columns import columns_of

    columns = columns_of("energy" if "joules_per_token" in rows[0] else "") if rows else columns_of("")
    table = pa.Table.from_pylist(rows, schema=arrow_schema(columns, {"fastroof_version": __version__}))
    parquet, text = place / ROWS, place / "deployments.csv"
    with whole_file(parquet) as unfinished:
        write_parquet(table, unfinished)
    with whole_file(text) as unfinished:
        pacsv.write_csv(guarded_columns(table), unfinished)
    return [parquet, text]


def _files(deployment: Deployment, manifest: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for name, command in deployment.servers.items():
        config = CONFIG if name == "server" else f"{name}.yaml"
        if command.config:
            files[config] = yaml_text(command.config)
        script = "start.sh" if name == "server" else f"start-{name}.sh"
        files[script] = _start_script(deployment, name, config if command.config else "")
    if deployment.benchmark is not None:
        comments = [_measures(deployment), *_expected(deployment.row)]
        if (engine := deployment.engine) is not None:
            comments.append(f"Arguments are those of {engine.title} {engine.release}.")
        files["benchmark.sh"] = _script(
            comments,
            deployment.benchmark.shell(raw={"--base-url": '"${1:-http://127.0.0.1:8000}"'}),
        )
    return files | PLATFORMS[manifest](deployment)


def _measures(deployment: Deployment) -> str:
    row = deployment.row
    if deployment.benchmark_rate:
        return (
            f"Measures one replica with {deployment.benchmark_rate:.4g} of the "
            f"{row['requests_per_s']:,.4g} requests/s."
        )
    clients = f"{deployment.benchmark_clients} of the {row['clients']:,.0f} clients"
    return f"Measures one replica with {clients}."


def _expected(row: Mapping[str, Any]) -> list[str]:
    times = [f"mean TTFT {row['ttft_ms']:.4g} ms"]
    if row["tpot_ms"] is not None:
        times.append(f"mean TPOT {row['tpot_ms']:.4g} ms")
    rate = row["tokens_per_s"] / max(row["replicas"], 1)
    return [f"Estimated: {', '.join(times)}, {rate:,.4g} output tokens/s per replica."]


def _script(comments: list[str], command: str) -> str:
    # quoted text must not start a new line in a comment
    lines = [f"# {' '.join(comment.split())}" for comment in comments]
    return "\n".join(["#!/bin/sh", *lines, "set -eu", command]) + "\n"


def _start_script(deployment: Deployment, name: str, config: str) -> str:
    comments = list(deployment.notes)
    before = []
    raw = {}
    if name == "server" and deployment.copies > 1 and deployment.gpus_each <= TP_SIZES[-1]:
        each = deployment.gpus_each
        comments.append(
            f"One of {deployment.copies} replicas: start.sh N uses {each} of this machine's GPUs, from GPU "
            f"N x {each}, and port 8000 + N; N counts from 0."
        )
        before = [
            'copy="${1:-0}"',
            f"first=$((copy * {each}))",
            f'CUDA_VISIBLE_DEVICES="$(seq -s , "$first" "$((first + {each - 1}))")"',
            "export CUDA_VISIBLE_DEVICES",
        ]
        raw = {"--port": '"$((8000 + copy))"'}
    if config:
        before.append('here="$(cd "$(dirname "$0")" && pwd)"')
        raw[deployment.servers[name].config_option] = f'"$here"/{shlex.quote(config)}'
    command = deployment.servers[name].shell(config, raw=raw)
    return _script(comments, "\n".join([*before, f"exec {command}"]))
