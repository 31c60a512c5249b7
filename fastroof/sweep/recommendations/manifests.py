"""Manifests that run a deployment on Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from fastroof.documents import yaml_text
from fastroof.engines import serving_engines
from fastroof.engines.launch import Command
from fastroof.engines.launch.platforms import (
    DYNAMO_API,
    DYNAMO_RELEASE,
    LLM_D_CHART,
    LLM_D_RELEASE,
    LLM_D_SIDECAR,
    DynamoEngine,
    LlmDEngine,
    dynamo_engine,
    llm_d_engine,
)
from fastroof.errors import SweepError
from fastroof.models import TP_SIZES
from fastroof.sweep.recommendations.deployment import Deployment

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
    container = {
        "name": "server",
        "image": deployment.engine.image,
        "command": [*command.words(f"{CONFIG_FOLDER}/{CONFIG_NAME}"), "--host", _ANY_ADDRESS],
        "ports": [{"name": "http", "containerPort": PORT}],
        "env": [_secret("hf-token", "token")],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
    }
    config = [_config_map(name, labels, command)] if command.config else []
    return yaml_text(*config, _pods(deployment, "server", command, name, labels, container), service)


def _secret(name: str, key: str) -> dict[str, Any]:
    """Return the variable of the token for models that need one."""
    secret = {"name": name, "key": key, "optional": True}
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def _pods(
    deployment: Deployment,
    role: str,
    command: Command,
    name: str,
    labels: Mapping[str, str],
    container: Mapping[str, Any],
    sidecar: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the object of the pods of a role, whose container gets GPUs, probes and volumes."""
    assert deployment.engine is not None
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if command.config:
        volumes.append({"name": "config", "configMap": {"name": name}})
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER})
    server = {
        **container,
        "resources": {"limits": {"nvidia.com/gpu": deployment.gpus_each}},
        "startupProbe": _probe(deployment.engine.health, period=10, failures=START_MINUTES * 6),
        "readinessProbe": _probe(deployment.engine.health, period=10, failures=3),
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": _replicas(deployment, role),
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {**(sidecar or {}), "containers": [server], "volumes": volumes},
            },
        },
    }


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "failureThreshold": failures,
    }


def kubernetes_files(deployment: Deployment) -> dict[str, str]:
    """Return a Deployment and a Service with their assumptions, if a copy fits on a node and does it all."""
    if deployment.benchmark is None or deployment.gpus_each > TP_SIZES[-1]:
        return {}
    assert deployment.engine is not None
    comments = [
        f"{deployment.copies} replicas of {deployment.gpus_each} GPUs. Assumes the image "
        f"{deployment.engine.image}, NVIDIA's device plugin, and a secret hf-token for models that need "
        "one.",
        *deployment.notes,
    ]
    return {"kubernetes.yaml": _comments(comments) + kubernetes_manifest(deployment)}


def _comments(lines: Iterable[str]) -> str:
    # quoted text must not start a new line in a comment
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _unsaid(commands: Iterable[Command]) -> list[str]:
    texts = dict.fromkeys(text for command in commands for text in command.unsaid)
    return [f"not in the command: {text}" for text in texts]


def _replicas(deployment: Deployment, role: str) -> int:
    row = deployment.row
    copies = {"server": deployment.copies, "prefill": row["prefill_workers"], "decode": row["decode_workers"]}
    return int(copies[role])


_SERVERS: Final = ", ".join(serving_engines())


def dynamo_files(deployment: Deployment) -> dict[str, str]:
    """Return a DynamoGraphDeployment: a frontend, and workers that do it all or only prefill or decode."""
    known = dynamo_engine(deployment.profile.engine)
    if known is None:
        raise SweepError(f"Dynamo does not run engine {deployment.row['engine']}; use {_SERVERS}")
    name = label_name(deployment.checkpoint.name)
    workers = {role: known.worker(one) for role, one in deployment.settings.items()}
    comments = [
        f"For Dynamo {DYNAMO_RELEASE} and its operator: kubectl apply -f dynamo.yaml. Its frontend serves "
        f"all replicas on port {PORT}. Assumes a secret hf-token-secret with HF_TOKEN for models that need "
        "one.",
        f"arguments are those of {known.title} {known.release}, the version in Dynamo's image"
        + (f"; keys of its YAML were read in {known.keys_release}" if known.keys_release else ""),
        *deployment.facts,
        *_unsaid(workers.values()),
    ]
    config_maps = [
        _config_map(f"{name}-{role}", {"app": name}, command)
        for role, command in workers.items()
        if command.config
    ]
    graph = {
        "apiVersion": DYNAMO_API,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {
            "backendFramework": deployment.profile.engine,
            "components": [
                _dynamo_frontend(known),
                *(_dynamo_worker(deployment, known, role, command) for role, command in workers.items()),
            ],
        },
    }
    return {"dynamo.yaml": _comments(comments) + yaml_text(*config_maps, graph)}


_DYNAMO_SECRET: Final = [{"secretRef": {"name": "hf-token-secret", "optional": True}}]


def _dynamo_frontend(known: DynamoEngine) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": known.image,
        "command": ["python3", "-m", "dynamo.frontend"],
        "envFrom": _DYNAMO_SECRET,
    }
    return {
        "name": "frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [container]}},
    }


def _dynamo_worker(
    deployment: Deployment, known: DynamoEngine, role: str, command: Command
) -> dict[str, Any]:
    nodes = -(-deployment.gpus_each // TP_SIZES[-1])
    container: dict[str, Any] = {
        "name": "main",
        "image": known.image,
        "command": list(command.program),
        "args": command.words(f"{CONFIG_FOLDER}/{CONFIG_NAME}")[len(command.program) :],
        "envFrom": _DYNAMO_SECRET,
        "resources": {"limits": {"nvidia.com/gpu": str(deployment.gpus_each // nodes)}},
    }
    pod: dict[str, Any] = {"containers": [container]}
    if command.config:
        container["volumeMounts"] = [{"name": "config", "mountPath": CONFIG_FOLDER}]
        name = f"{label_name(deployment.checkpoint.name)}-{role}"
        pod["volumes"] = [{"name": "config", "configMap": {"name": name}}]
    return {
        "name": "worker" if role == "server" else role,
        "type": "worker" if role == "server" else role,
        "replicas": _replicas(deployment, role),
        # the operator starts the engine on each node, and passes what joins them
        **({"multinode": {"nodeCount": nodes}} if nodes > 1 else {}),
        "podTemplate": {"spec": pod},
    }


def _config_map(name: str, labels: Mapping[str, str], command: Command) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": dict(labels)},
        "data": {CONFIG_NAME: yaml_text(command.config)},
    }


_SIDECAR_TO: Final = 8200
"""Port of an engine behind llm-d's sidecar, which takes the pod's own."""

_LLM_D_ROLES: Final = {"server": "prefill-decode", "prefill": "prefill", "decode": "decode"}


def llm_d_files(deployment: Deployment) -> dict[str, str]:
    """Return Deployments of model servers for llm-d, and the values of its router's chart."""
    engine = deployment.engine
    known = None if engine is None else llm_d_engine(engine)
    if engine is None or known is None:
        raise SweepError(f"llm-d does not route to engine {deployment.row['engine']}; use {_SERVERS}")
    if deployment.gpus_each > TP_SIZES[-1]:
        raise SweepError(
            f"the manifest for llm-d has copies within a node of {TP_SIZES[-1]} GPUs, got "
            f"{deployment.gpus_each}: give --most-gpus-each {TP_SIZES[-1]} (most_gpus_each)"
        )
    is_split = "server" not in deployment.settings
    if is_split and not known.connector:
        raise SweepError(
            f"llm-d's sidecar has no KV transfer for {engine.title}: give --mode aggregated, or another "
            "engine"
        )
    name = label_name(deployment.checkpoint.name)
    commands = {
        role: engine.server(replace(one, port=_SIDECAR_TO if role == "decode" else PORT))
        for role, one in deployment.settings.items()
    }
    comments = [
        f"For llm-d-router {LLM_D_RELEASE}: kubectl apply -f llm-d.yaml, and helm install {name} "
        f"{LLM_D_CHART} --version v{LLM_D_RELEASE} -f llm-d-router.yaml. Assumes NVIDIA's device plugin, the "
        "CRDs of the Gateway API Inference Extension, and a secret llm-d-hf-token with HF_TOKEN for models "
        "that need one.",
        f"arguments are those of {engine.title} {engine.release}",
        *deployment.facts,
        # the router and its sidecar give workers their roles
        *_unsaid(engine.server(replace(one, role="")) for one in deployment.settings.values()),
    ]
    objects: list[dict[str, Any]] = []
    for role, command in commands.items():
        label = name if role == "server" else f"{name}-{role}"
        if command.config:
            objects.append(_config_map(label, _llm_d_labels(name), command))
        objects.append(_llm_d_server(deployment, known, role, command, label))
    return {
        "llm-d.yaml": _comments(comments) + yaml_text(*objects),
        "llm-d-router.yaml": yaml_text(_llm_d_router(name, known, is_split=is_split)),
    }


def _llm_d_labels(name: str) -> dict[str, str]:
    return {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": name}


def _llm_d_server(
    deployment: Deployment, known: LlmDEngine, role: str, command: Command, name: str
) -> dict[str, Any]:
    assert deployment.engine is not None
    labels = {**_llm_d_labels(label_name(deployment.checkpoint.name)), "llm-d.ai/role": _LLM_D_ROLES[role]}
    words = [*command.words(f"{CONFIG_FOLDER}/{CONFIG_NAME}"), "--host", _ANY_ADDRESS]
    env = [_secret("llm-d-hf-token", "HF_TOKEN")]
    if role != "server":
        words += [word for argument in known.transfer for word in argument]
        if known.address_variable:
            address = {"fieldRef": {"fieldPath": "status.podIP"}}
            env.append({"name": known.address_variable, "valueFrom": address})
    container = {
        "name": "modelserver",
        "image": deployment.engine.image,
        "command": words,
        "ports": [{"name": "http", "containerPort": _SIDECAR_TO if role == "decode" else PORT}],
        "env": env,
    }
    sidecar = {"initContainers": [_llm_d_sidecar(known)]} if role == "decode" else {}
    return _pods(deployment, role, command, name, labels, container, sidecar)


def _llm_d_sidecar(known: LlmDEngine) -> dict[str, Any]:
    return {
        "name": "routing-proxy",
        "image": f"{LLM_D_SIDECAR}:v{LLM_D_RELEASE}",
        "restartPolicy": "Always",
        "args": [
            f"--port={PORT}",
            f"--model-server-port={_SIDECAR_TO}",
            f"--kv-connector={known.connector}",
            "--secure-proxy=false",
        ],
        "ports": [{"name": "sidecar", "containerPort": PORT}],
    }


_ROUTER_CONFIG: Final = "fastroof.yaml"


def _llm_d_router(name: str, known: LlmDEngine, *, is_split: bool) -> dict[str, Any]:
    """Return the values of the router's chart; every request is prefilled apart if workers are."""
    router: dict[str, Any] = {
        "modelServers": {
            "type": known.server_type,
            "targetPorts": [{"number": PORT}],
            "matchLabels": _llm_d_labels(name),
        }
    }
    if is_split:
        plugins = (
            "always-disagg-pd-decider", "prefill-filter", "decode-filter", "active-request-scorer",
            "max-score-picker",
        )  # fmt: skip
        handler = {
            "type": "disagg-profile-handler",
            "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}},
        }
        profiles = [
            {
                "name": role,
                "plugins": [
                    {"pluginRef": plugin}
                    for plugin in (f"{role}-filter", "active-request-scorer", "max-score-picker")
                ],
            }
            for role in ("prefill", "decode")
        ]
        config = {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [*({"type": plugin} for plugin in plugins), handler],
            "schedulingProfiles": profiles,
        }
        router["epp"] = {
            "pluginsConfigFile": _ROUTER_CONFIG,
            "pluginsCustomConfig": {_ROUTER_CONFIG: yaml_text(config)},
        }
    return {"router": router}


KUBERNETES: Final = "kubernetes"
PLATFORMS: Final[Mapping[str, Callable[[Deployment], dict[str, str]]]] = {
    KUBERNETES: kubernetes_files,
    "dynamo": dynamo_files,
    "llm-d": llm_d_files,
}
"""What returns the files of a platform by their names."""
