"""Files of a recommendation: scripts to start and measure it, a Kubernetes manifest, and the rows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import whole_file, write_whole
from fastroof.errors import SweepError
from fastroof.models import TP_SIZES
from fastroof.sweep.recommendations.deployment import Deployment

_NOT_TEXT: Final = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that some version of YAML does not read as text."""


def yaml_documents(*documents: Mapping[str, Any]) -> str:
    """Format documents of mappings, lists, texts, numbers and booleans as block-style YAML."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        lines = []
        for key, item in value.items():
            lines += _entry(f"{_key(key)}:", item)
        return lines
    lines = []
    for item in value:
        if _is_nested(item):
            first, *others = _lines(item)
            lines += [f"- {first}", *(f"  {line}" for line in others)]
        else:
            lines.append(f"- {_scalar(item)}")
    return lines


def _entry(key: str, item: Any) -> list[str]:
    if _is_nested(item):
        return [key, *(f"  {line}" for line in _lines(item))]
    return [f"{key} {_scalar(item)}"]


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _key(key: str) -> str:
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z_./-]*", key) is not None
    return key if is_word and key.lower() not in _NOT_TEXT else _text(key)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _text(value: str) -> str:
    """Quote a text as ASCII, as JSON does but without surrogate pairs, which YAML does not support."""
    return re.sub(r"[^\x20-\x7e]", lambda found: _escaped(found[0]), json.dumps(value, ensure_ascii=False))


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"


PORT: Final = 8000
CONFIG_FOLDER: Final = "/etc/fastroof"
CONFIG_NAME: Final = "engine.yaml"
START_MINUTES: Final = 60
"""Maximum time for a replica to load its weights."""

_LABEL: Final = 50
_ANY_ADDRESS: Final = "0.0.0.0"
"""Address that a replica listens on: pods are reached from outside."""


def label_name(text: str) -> str:
    """Convert any text to a Kubernetes name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_LABEL].strip("-") or "model"


def kubernetes_manifest(deployment: Deployment) -> str:
    """Return a deployment's Kubernetes objects as YAML."""
    assert deployment.engine is not None
    name = label_name(deployment.checkpoint.name)
    command = deployment.servers["server"]
    labels = {"app": name}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    documents: list[dict[str, Any]] = []
    if command.config:
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "labels": labels},
                "data": {CONFIG_NAME: yaml_documents(command.config)},
            }
        )
        volumes.append({"name": "config", "configMap": {"name": name}})
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER})
    words = command.words(f"{CONFIG_FOLDER}/{CONFIG_NAME}")
    container = {
        "name": "server",
        "image": deployment.engine.image,
        "command": [*words, "--host", _ANY_ADDRESS],
        "ports": [{"name": "http", "containerPort": PORT}],
        "env": [
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}},
            }
        ],
        "resources": {"limits": {"nvidia.com/gpu": deployment.gpus_each}},
        "startupProbe": _probe(deployment.engine.health, period=10, failures=START_MINUTES * 6),
        "readinessProbe": _probe(deployment.engine.health, period=10, failures=3),
        "volumeMounts": mounts,
    }
    documents.append(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "replicas": deployment.copies,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [container], "volumes": volumes},
                },
            },
        }
    )
    documents.append(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
        }
    )
    return yaml_documents(*documents)


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "failureThreshold": failures,
    }


CONFIG: Final = "engine.yaml"


def save_deployments(
    rows: list[dict[str, Any]], deployments: Sequence[Deployment], folder: str | Path
) -> list[Path]:
    """Write the files of deployments, one folder each if there are several, and their rows."""
    place = Path(folder)
    written: list[Path] = []
    try:
        place.mkdir(parents=True, exist_ok=True)
        written += _write_rows(rows, place)
        for number, deployment in enumerate(deployments, start=1):
            own = place
            if len(deployments) > 1:
                own = place / f"{number}-{label_name(deployment.checkpoint.name)}"
            own.mkdir(exist_ok=True)
            for name, text in _files(deployment).items():
                path = own / name
                write_whole(path, text)
                if name.endswith(".sh"):
                    path.chmod(0o755)
                written.append(path)
    except OSError as error:
        raise SweepError(f"{place} cannot be written: {error.strerror or error}") from None
    return written


def _write_rows(rows: list[dict[str, Any]], place: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    from fastroof._version import __version__
    from fastroof.arrow import arrow_schema
    from fastroof.columns import guarded_columns
    from fastroof.parquet import write_parquet
    from fastroof.sweep.deployments import COLUMNS

    table = pa.Table.from_pylist(rows, schema=arrow_schema(COLUMNS, {"fastroof_version": __version__}))
    parquet, text = place / "deployments.parquet", place / "deployments.csv"
    with whole_file(parquet) as unfinished:
        write_parquet(table, unfinished)
    with whole_file(text) as unfinished:
        pacsv.write_csv(guarded_columns(table), unfinished)
    return [parquet, text]


def _files(deployment: Deployment) -> dict[str, str]:
    files: dict[str, str] = {}
    for name, command in deployment.servers.items():
        config = CONFIG if name == "server" else f"{name}.yaml"
        if command.config:
            files[config] = yaml_documents(command.config)
        script = "start.sh" if name == "server" else f"start-{name}.sh"
        files[script] = _start_script(deployment, name, config if command.config else "")
    if deployment.benchmark is not None:
        files["benchmark.sh"] = _script(
            [
                _measures(deployment),
                *_expected(deployment.row),
                *_arguments_of(deployment),
            ],
            deployment.benchmark.shell(raw={"--base-url": '"${1:-http://127.0.0.1:8000}"'}),
        )
        if deployment.gpus_each <= TP_SIZES[-1]:
            files["kubernetes.yaml"] = _manifest(deployment)
    return files


def _measures(deployment: Deployment) -> str:
    row = deployment.row
    if deployment.benchmark_rate:
        return (
            f"Measures one replica with {deployment.benchmark_rate:.4g} of the "
            f"{row['requests_per_s']:,.4g} requests/s."
        )
    clients = f"{deployment.benchmark_clients} of the {row['concurrency']:,.0f} clients"
    return f"Measures one replica with {clients}."


def _expected(row: Mapping[str, Any]) -> list[str]:
    times = [f"mean TTFT {row['ttft_ms']:.4g} ms"]
    if row["tpot_ms"] is not None:
        times.append(f"mean TPOT {row['tpot_ms']:.4g} ms")
    rate = row["tokens_per_s"] / max(row["replicas"], 1)
    return [f"Estimated: {', '.join(times)}, {rate:,.4g} output tokens/s per replica."]


def _arguments_of(deployment: Deployment) -> list[str]:
    engine = deployment.engine
    return [] if engine is None else [f"Arguments are those of {engine.title} {engine.release}."]


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


def _manifest(deployment: Deployment) -> str:
    assert deployment.engine is not None
    # quoted text must not start a new line in a comment
    lines = [
        f"{deployment.copies} replicas of {deployment.gpus_each} GPUs. Assumes the image "
        f"{deployment.engine.image}, NVIDIA's device plugin, and a secret hf-token for models that need "
        "one.",
        *deployment.notes,
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines) + kubernetes_manifest(deployment)
