"""Manifests that run a deployment on Kubernetes, by platform."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, Final

from fastroof.documents import yaml_text
from fastroof.engines import serving_engines
from fastroof.engines.launch import Address, Command, LaunchSettings
from fastroof.engines.launch.platforms import (
    DYNAMO_API,
    DYNAMO_RELEASE,
    LLM_D_CHART,
    LLM_D_CONNECTORS,
    LLM_D_RELEASE,
    LLM_D_SERVERS,
    LLM_D_SIDECAR,
    POD,
    dynamo_engine,
)
from fastroof.engines.launch.settings import START_S
from fastroof.errors import SweepError
from fastroof.models import TP_SIZES
from fastroof.sweep.recommendations.deployment import PORT, Deployment

CONFIG_FOLDER: Final = "/etc/fastroof"
KUBERNETES_RELEASE: Final = "1.37"

_LABEL: Final = 43
"""Length of a name that leaves room for a role: a StatefulSet's has at most 52 letters."""


def label_name(text: str) -> str:
    """Convert any text to a Kubernetes name: lower-case letters, digits and dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^(?=\d)", "m", name)[:_LABEL].strip("-") or "model"


def kubernetes_files(deployment: Deployment) -> dict[str, str]:
    """Return a Deployment and a Service; for separate workers StatefulSets, and the router that finds them.

    Empty if a copy does not fit on a node, or there is no engine to start.
    """
    engine = deployment.engine
    if engine is None or deployment.gpus_each > TP_SIZES[-1]:
        return {}
    name = label_name(deployment.checkpoint.name)
    commands = {role: engine.server(_in_pod(deployment, role)) for role in deployment.settings}
    objects: list[dict[str, Any]] = []
    for role, command in commands.items():
        label = name if role == "server" else f"{name}-{role}"
        container = {"name": "server", "image": engine.image, "env": [_secret("hf-token", "token")]}
        kind = "Deployment" if role == "server" else "StatefulSet"
        objects += _pods(deployment, role, command, label, {"app": label}, container, kind=kind)
        objects.append(_service(label, label, headless=role != "server"))
    assumed = [
        f"For Kubernetes {KUBERNETES_RELEASE}: kubectl apply -f kubernetes.yaml. Assumes the image "
        f"{engine.image}, NVIDIA's device plugin, and a secret hf-token for models that need one.",
        f"arguments are those of {engine.title} {engine.release}",
    ]
    if "server" not in commands:
        places = {
            role: [Address(f"{name}-{role}-{n}.{name}-{role}", PORT, engine.side_port) for n in range(count)]
            for role, count in deployment.replicas.items()
        }
        router, label = engine.router(places, PORT), f"{name}-router"
        assert router is not None
        container = {"name": "router", "image": engine.router_image}
        objects += _pods(deployment, "router", router, label, {"app": label}, container)
        objects.append(_service(name, label))
        assumed.append(f"the router is {engine.router_name}; clients ask the service {name}")
    comments = [*assumed, *deployment.facts, *_unsaid(commands.values())]
    return {"kubernetes.yaml": _comments(comments) + yaml_text(*objects)}


def _in_pod(deployment: Deployment, role: str, port: int = PORT) -> LaunchSettings:
    """Return a role's settings in a pod, which has an address of its own."""
    assert deployment.engine is not None
    side_port = deployment.engine.side_port
    return replace(deployment.settings[role], port=port, side_port=side_port, address=POD)


def _service(name: str, app: str, *, headless: bool = False) -> dict[str, Any]:
    """Return the service of pods; a headless one gives each a name, also before it is ready."""
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    spec: dict[str, Any] = {"selector": {"app": app}, "ports": ports}
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _named(name, {"app": app}), "spec": spec}


def _named(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    return {"name": name, "labels": dict(labels)}


def _secret(name: str, key: str) -> dict[str, Any]:
    """Return the variable of the token for models that need one."""
    secret = {"name": name, "key": key, "optional": True}
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def _variable(name: str, value: str) -> dict[str, Any]:
    """Return an environment variable, which may take the pod's own address."""
    if value == POD:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": POD}}}
    return {"name": name, "value": value}


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _pods(
    deployment: Deployment,
    role: str,
    command: Command,
    name: str,
    labels: Mapping[str, str],
    container: Mapping[str, Any],
    *,
    kind: str = "Deployment",
    port: int = PORT,
    sidecars: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the objects of the pods of a role or the router: YAML, port, probes, and a copy's GPUs."""
    assert deployment.engine is not None
    objects, volumes, mounts = _config_of(name, labels, command)
    resources = {}
    if role in deployment.replicas:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        resources = {"limits": {"nvidia.com/gpu": deployment.gpus_each}}
    server = {
        **container,
        "command": command.words(f"{CONFIG_FOLDER}/{command.config_name}"),
        "ports": [{"name": "http", "containerPort": port}],
        "env": [*container.get("env", ()), *(_variable(*one) for one in command.environment.items())],
        "resources": resources,
        "startupProbe": _probe(deployment.engine.health, failures=START_S // _PERIOD_S),
        "readinessProbe": _probe(deployment.engine.health, failures=3),
        "volumeMounts": mounts,
    }
    pod = {"initContainers": list(sidecars), "containers": [_filled(server)], "volumes": volumes}
    spec = {
        "replicas": deployment.replicas.get(role, 1),
        "selector": {"matchLabels": dict(labels)},
        "template": {"metadata": {"labels": dict(labels)}, "spec": _filled(pod)},
    }
    if kind == "StatefulSet":
        spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return [*objects, {"apiVersion": "apps/v1", "kind": kind, "metadata": _named(name, labels), "spec": spec}]


_PERIOD_S: Final = 10


def _probe(path: str, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": _PERIOD_S,
        "failureThreshold": failures,
    }


def _config_of(
    name: str, labels: Mapping[str, str], command: Command
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the ConfigMap of a command's YAML, its volume and mount; nothing if there is no YAML."""
    if not command.config:
        return [], [], []
    data = {command.config_name: yaml_text(command.config)}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _named(name, labels), "data": data}
    volume = {"name": "config", "configMap": {"name": name}}
    return [config], [volume], [{"name": "config", "mountPath": CONFIG_FOLDER}]


def _comments(lines: Iterable[str]) -> str:
    # quoted text must not start a new line in a comment
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _unsaid(commands: Iterable[Command]) -> list[str]:
    texts = dict.fromkeys(text for command in commands for text in command.unsaid)
    return [f"not in the command: {text}" for text in texts]


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
    nodes = -(-deployment.gpus_each // TP_SIZES[-1])
    limits = {"limits": {"nvidia.com/gpu": str(deployment.gpus_each // nodes)}}
    frontend = {"command": ["python3", "-m", "dynamo.frontend"]}
    objects: list[dict[str, Any]] = []
    components = [_dynamo_component("frontend", 1, 1, known.image, frontend, [])]
    for role, command in workers.items():
        config, volumes, mounts = _config_of(f"{name}-{role}", {"app": name}, command)
        objects += config
        words, program = command.words(f"{CONFIG_FOLDER}/{command.config_name}"), len(command.program)
        worker: dict[str, Any] = {"command": words[:program], "args": words[program:], "resources": limits}
        worker["volumeMounts"] = mounts
        kind, replicas = "worker" if role == "server" else role, deployment.replicas[role]
        components.append(_dynamo_component(kind, replicas, nodes, known.image, worker, volumes))
    graph = {
        "apiVersion": DYNAMO_API,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {"backendFramework": deployment.profile.engine, "components": components},
    }
    return {"dynamo.yaml": _comments(comments) + yaml_text(*objects, graph)}


def _dynamo_component(
    kind: str,
    replicas: int,
    nodes: int,
    image: str,
    container: Mapping[str, Any],
    volumes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    secret = {"secretRef": {"name": "hf-token-secret", "optional": True}}
    main = _filled({"name": "main", "image": image, **container, "envFrom": [secret]})
    return _filled(
        {
            "name": kind,
            "type": kind,
            "replicas": replicas,
            # the operator starts the engine on each node, and passes what joins them
            "multinode": {"nodeCount": nodes} if nodes > 1 else {},
            "podTemplate": {"spec": _filled({"containers": [main], "volumes": list(volumes)})},
        }
    )


_SIDECAR_TO: Final = 8200
"""Port of an engine behind llm-d's sidecar, which takes the pod's own."""

_LLM_D_ROLES: Final = {"server": "prefill-decode", "prefill": "prefill", "decode": "decode"}


def llm_d_files(deployment: Deployment) -> dict[str, str]:
    """Return Deployments of model servers for llm-d, and the values of its router's chart."""
    engine = deployment.engine
    if engine is None or engine.engine not in LLM_D_SERVERS:
        raise SweepError(f"llm-d does not route to engine {deployment.row['engine']}; use {_SERVERS}")
    if deployment.gpus_each > TP_SIZES[-1]:
        raise SweepError(
            f"the manifest for llm-d has copies within a node of {TP_SIZES[-1]} GPUs, got "
            f"{deployment.gpus_each}: give --most-gpus-each {TP_SIZES[-1]} (most_gpus_each)"
        )
    is_split, connector = "server" not in deployment.settings, LLM_D_CONNECTORS.get(engine.engine)
    if is_split and connector is None:
        raise SweepError(
            f"llm-d's sidecar has no KV transfer for {engine.title}: give --mode aggregated, or another "
            "engine"
        )
    name = label_name(deployment.checkpoint.name)
    commands = {}
    objects: list[dict[str, Any]] = []
    for role in deployment.settings:
        port = _SIDECAR_TO if role == "decode" else PORT
        commands[role] = engine.server(_in_pod(deployment, role, port))
        labels = {**_llm_d_labels(name), "llm-d.ai/role": _LLM_D_ROLES[role]}
        secret = _secret("llm-d-hf-token", "HF_TOKEN")
        objects += _pods(
            deployment, role, commands[role], name if role == "server" else f"{name}-{role}", labels,
            {"name": "modelserver", "image": engine.image, "env": [secret]}, port=port,
            sidecars=[_llm_d_sidecar(connector)] if role == "decode" else [],
        )  # fmt: skip
    comments = [
        f"For llm-d-router {LLM_D_RELEASE}: kubectl apply -f llm-d.yaml, and helm install {name} "
        f"{LLM_D_CHART} --version v{LLM_D_RELEASE} -f llm-d-router.yaml. Assumes NVIDIA's device plugin, the "
        "CRDs of the Gateway API Inference Extension, and a secret llm-d-hf-token with HF_TOKEN for models "
        "that need one.",
        f"arguments are those of {engine.title} {engine.release}",
        *deployment.facts,
        *_unsaid(commands.values()),
    ]
    return {
        "llm-d.yaml": _comments(comments) + yaml_text(*objects),
        "llm-d-router.yaml": yaml_text(_llm_d_router(name, LLM_D_SERVERS[engine.engine], is_split=is_split)),
    }


def _llm_d_labels(name: str) -> dict[str, str]:
    return {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": name}


def _llm_d_sidecar(connector: str | None) -> dict[str, Any]:
    return {
        "name": "routing-proxy",
        "image": f"{LLM_D_SIDECAR}:v{LLM_D_RELEASE}",
        "restartPolicy": "Always",
        "args": [
            f"--port={PORT}",
            f"--model-server-port={_SIDECAR_TO}",
            f"--kv-connector={connector}",
            "--secure-proxy=false",
        ],
        "ports": [{"name": "sidecar", "containerPort": PORT}],
    }


_PLUGINS: Final = "llm-d-plugins.yaml"


def _llm_d_router(name: str, server_type: str, *, is_split: bool) -> dict[str, Any]:
    """Return the values of the router's chart; every request is prefilled apart if workers are."""
    servers = {"type": server_type, "targetPorts": [{"number": PORT}]}
    router: dict[str, Any] = {"modelServers": {**servers, "matchLabels": _llm_d_labels(name)}}
    if is_split:
        plugins = resources.files("fastroof.sweep.recommendations").joinpath(_PLUGINS).read_text("utf-8")
        router["epp"] = {"pluginsConfigFile": _PLUGINS, "pluginsCustomConfig": {_PLUGINS: plugins}}
    return {"router": router}


KUBERNETES: Final = "kubernetes"
PLATFORMS: Final[Mapping[str, Callable[[Deployment], dict[str, str]]]] = {
    KUBERNETES: kubernetes_files,
    "dynamo": dynamo_files,
    "llm-d": llm_d_files,
}
"""What returns the files of a platform by their names."""
