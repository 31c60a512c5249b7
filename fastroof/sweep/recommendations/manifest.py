"""A deployment as Kubernetes objects: a Deployment of its copies, a Service before them."""

from __future__ import annotations

import re
from typing import Any, Final

from fastroof.sweep.recommendations.deployment import Deployment
from fastroof.sweep.recommendations.yaml_text import yaml_documents

__all__ = ["kubernetes_manifest", "label_name"]

PORT: Final = 8000
CONFIG_FOLDER: Final = "/etc/fastroof"
CONFIG_NAME: Final = "engine.yaml"
START_MINUTES: Final = 60
"""How long a copy may take to load its weights."""

_LABEL: Final = 50
_ANY_ADDRESS: Final = "0.0.0.0"
"""Where a copy listens: pods are reached from outside."""


def label_name(text: str) -> str:
    """Turn any text into the name of an object: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_LABEL].strip("-") or "model"


def kubernetes_manifest(deployment: Deployment) -> str:
    """Write a deployment's objects as YAML."""
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
