"""Manifests that run a deployment on Kubernetes, and the YAML they are written in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

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


def kubernetes_file(deployment: Deployment) -> str:
    """Return a deployment's Kubernetes objects as YAML, with its assumptions as comments."""
    assert deployment.engine is not None
    # quoted text must not start a new line in a comment
    lines = [
        f"{deployment.copies} replicas of {deployment.gpus_each} GPUs. Assumes the image "
        f"{deployment.engine.image}, NVIDIA's device plugin, and a secret hf-token for models that need "
        "one.",
        *deployment.notes,
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines) + kubernetes_manifest(deployment)
