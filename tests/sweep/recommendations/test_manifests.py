"""Manifests of Dynamo and llm-d: fields that these have, and commands that run what was meant."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastroof import SweepError
from fastroof.engines.launch.platforms import DYNAMO_RELEASE, LLM_D_RELEASE, dynamo_engine
from fastroof.evidence.engine_arguments import read_engine_arguments
from fastroof.models.load import Published
from fastroof.sweep import recommend
from fastroof.sweep.recommendations import Deployment, Recommendation
from fastroof.sweep.recommendations.manifests import (
    dynamo_files,
    kubernetes_files,
    label_name,
    llm_d_files,
)
from tests.engines.arguments.passed import check, flat, record_of
from tests.sweep.recommendations.schemas import check_object

FIELDS = tomllib.loads((Path(__file__).parent / "fields.toml").read_text("utf-8"))
HOSTILE = ('org/"; rm -rf ~; "', "org/x\n- injected: true", "-rf", "org/a: b # c", "org/\u2028é")


@pytest.fixture(scope="module", params=["vllm", "vllm-0.24.0", "sglang-0.5.14", "sglang", "trtllm-1.1"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["aggregated", "disaggregated"])
def found(request: pytest.FixtureRequest, engine: str) -> Recommendation:
    return recommend(
        "qwen3-8b", "h100", total_gpus=4, isl=500, osl=50, engine=engine, max_num_batched_tokens=8192,
        mode=request.param, percentile=None, most_gpus_each=1,
    )  # fmt: skip


def only(found: Recommendation) -> Deployment:
    (deployment,) = found.deployments
    assert deployment is not None
    return deployment


def changed(found: Recommendation, settings: dict[str, Any], **changes: Any) -> Deployment:
    deployment = only(found)
    wanted = {role: dataclasses.replace(one, **settings) for role, one in deployment.settings.items()}
    return dataclasses.replace(deployment, settings=wanted, **changes)


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest, each of which its kind's schema takes."""
    found = [one for one in yaml.safe_load_all(text) if one is not None]
    for one in found:
        check_object(one)
        assert one["metadata"]["name"] == label_name(one["metadata"]["name"])
    return found


def check_pod(spec: dict[str, Any], objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Check that what a pod mounts is there; return the container that serves."""
    configs = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    volumes = {one["name"]: one for one in spec.get("volumes", ())}
    (container,) = spec["containers"]
    words = [*container["command"], *container.get("args", ())]
    for mount in container.get("volumeMounts", ()):
        volume = volumes.pop(mount["name"])
        if "configMap" in volume:
            (name,) = configs[volume["configMap"]["name"]]
            assert f"{mount['mountPath']}/{name}" in words
    assert not volumes
    return dict(container)


def replicas_of(deployment: Deployment) -> dict[str, int]:
    row = deployment.row
    if row["replicas"]:
        return {"server": row["replicas"]}
    return {"prefill": row["prefill_workers"], "decode": row["decode_workers"]}


def check_copies(deployment: Deployment, objects: list[dict[str, Any]], decode_port: int) -> dict[str, Any]:
    """Check that pods of each role run what was meant; return what is of them, by role."""
    engine, name = deployment.engine, label_name(deployment.checkpoint.name)
    assert engine is not None
    specs = {one["metadata"]["name"]: one["spec"] for one in objects if "template" in one.get("spec", {})}
    found = {}
    for role, replicas in replicas_of(deployment).items():
        spec = found[role] = specs.pop(name if role == "server" else f"{name}-{role}")
        assert spec["replicas"] == replicas
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        container = check_pod(spec["template"]["spec"], objects)
        assert container["image"].rpartition(":")[2].lstrip("v") == engine.release
        assert container["resources"]["limits"] == {"nvidia.com/gpu": deployment.gpus_each}
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
        port = decode_port if role == "decode" else 8000
        place = {"port": port, "side_port": engine.side_port, "address": "status.podIP"}
        command = engine.server(dataclasses.replace(deployment.settings[role], **place))
        assert container["command"] == command.words(f"/etc/fastroof/{command.config_name}")
        assert container["ports"] == [{"name": "http", "containerPort": port}]
        assert {one["name"] for one in container["env"]} == {"HF_TOKEN", *command.environment}
        check(command, record_of(engine.engine, engine.release, " ".join(command.program)))
    router = specs.pop(f"{name}-router", None)
    assert not specs
    return found if router is None else found | {"router": router}


def check_kubernetes(deployment: Deployment, text: str) -> None:
    """Check pods of each role, how the router finds them, and the service of clients."""
    objects = documents(text)
    specs = check_copies(deployment, objects, 8000)
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    places = []
    for role, spec in specs.items():
        labels = spec["template"]["metadata"]["labels"]
        ((service, reached),) = ((name, one) for name, one in services.items() if one["selector"] == labels)
        assert reached["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
        assert (
            ("clusterIP" in reached)
            == (spec.get("serviceName") == service)
            == (role in ("prefill", "decode"))
        )
        if "serviceName" in spec:
            places += [f"{service}-{number}.{service}:8000" for number in range(spec["replicas"])]
    assert label_name(deployment.checkpoint.name) in services
    assert ("router" in specs) == bool(places)
    if places:
        router = check_pod(specs["router"]["template"]["spec"], objects)
        shown = json.dumps([router["command"], [one.get("data") for one in objects]])
        assert re.findall(r"[\w-]+\.[\w-]+:8000", shown) == places


def test_kubernetes_runs_the_recommendation(found: Recommendation) -> None:
    deployment = only(found)
    check_kubernetes(deployment, kubernetes_files(deployment)["kubernetes.yaml"])
    wide = changed(found, {"tp": 2}, gpus_each=2)
    check_kubernetes(wide, kubernetes_files(wide)["kubernetes.yaml"])
    assert kubernetes_files(changed(found, {"tp": 16}, gpus_each=16)) == {}


def check_dynamo(deployment: Deployment, text: str) -> list[dict[str, Any]]:
    """Check what Dynamo's operator requires; return the workers."""
    objects = documents(text)
    graph = objects[-1]
    assert graph["spec"]["backendFramework"] == deployment.profile.engine
    frontend, *workers = graph["spec"]["components"]
    assert frontend["type"] == "frontend"
    assert len({one["name"] for one in (frontend, *workers)}) == 1 + len(workers)
    for component in (frontend, *workers):
        container = check_pod(component["podTemplate"]["spec"], objects)
        assert container["image"].endswith(f"-runtime:{DYNAMO_RELEASE}")
        nodes = component.get("multinode", {"nodeCount": 1})["nodeCount"]
        if component is not frontend:
            assert nodes * int(container["resources"]["limits"]["nvidia.com/gpu"]) == deployment.gpus_each
    return list(workers)


def test_dynamo_runs_the_recommendation(found: Recommendation) -> None:
    deployment = only(found)
    (text,) = dynamo_files(deployment).values()
    workers = check_dynamo(deployment, text)
    engine = deployment.profile.engine
    known = dynamo_engine(engine)
    assert known is not None
    assert f"arguments are those of {known.title} {known.release}" in text
    replicas = replicas_of(deployment)
    assert [one["type"] for one in workers] == (["worker"] if "server" in replicas else list(replicas))
    assert [one["replicas"] for one in workers] == list(replicas.values())
    total = sum(replicas.values()) * deployment.gpus_each
    assert total == deployment.row["total_gpus"]
    for worker, (role, settings) in zip(workers, deployment.settings.items(), strict=True):
        (container,) = worker["podTemplate"]["spec"]["containers"]
        command = known.worker(settings)
        words = command.words(f"/etc/fastroof/{command.config_name}")
        assert [*container["command"], *container["args"]] == words
        assert container["command"] == ["python3", "-m", f"dynamo.{engine}"]
        check(command, record_of("dynamo", DYNAMO_RELEASE, " ".join(command.program)))
        if command.config:
            assert set(flat(command.config)) <= record_of("trtllm", "1.3.0rc11", "trtllm-serve serve").keys
        words = container["args"]
        modes = [words[i + 1] for i, word in enumerate(words) if word == "--disaggregation-mode"]
        assert modes == ([] if role == "server" else [role])
        assert ("--host" in words) == (engine == "sglang" and role != "server")
        assert "--port" not in words


def test_a_copy_is_started_for_its_share_of_the_requests(found: Recommendation) -> None:
    deployment = only(found)
    *_, copies = replicas_of(deployment).values()
    for settings in deployment.settings.values():
        assert settings.running - 1 < deployment.row["effective_concurrency"] / copies <= settings.running


@pytest.mark.parametrize("stages", [2, 3])
def test_dynamo_manifests_have_the_number_of_nodes(found: Recommendation, stages: int) -> None:
    gpus = {2: 16, 3: 12}[stages]
    wide = changed(found, {"tp": gpus // stages, "pp": stages}, gpus_each=gpus)
    (text,) = dynamo_files(wide).values()
    assert {one["multinode"]["nodeCount"] for one in check_dynamo(wide, text)} == {2}


def test_its_workers_are_read_back(found: Recommendation, tmp_path: Path) -> None:
    """The reader of users' runs finds the same layout and limits."""
    deployment = only(found)
    if "server" not in deployment.settings:
        pytest.skip("one engine a file")
    settings = deployment.settings["server"]
    path = tmp_path / "dynamo.yaml"
    path.write_text(dynamo_files(deployment)["dynamo.yaml"])
    known = dynamo_engine(deployment.profile.engine)
    assert known is not None
    config = yaml.safe_dump(dict(known.worker(settings).config))
    (tmp_path / "engine.yaml").write_text(config)
    back = read_engine_arguments(path, {"gpu": "h100"})
    assert (back.engine, back.model) == (deployment.profile.engine, settings.model)
    assert (back.layout.tp, back.layout.pp, back.layout.dp) == (settings.tp, settings.pp, settings.dp)
    assert back.profile.scheduling.max_num_batched_tokens == settings.max_num_batched_tokens
    assert back.profile.scheduling.max_num_seqs == settings.max_num_seqs


def check_llm_d(deployment: Deployment, files: dict[str, str]) -> None:
    """What llm-d's router and Kubernetes ask, and that objects belong together."""
    facts = FIELDS["llm-d"]
    servers = check_copies(deployment, documents(files["llm-d.yaml"]), 8200)
    router = yaml.safe_load(files["llm-d-router.yaml"])
    assert set(router) == {"router"}
    assert set(router["router"]) <= set(facts["values"])
    model_servers = router["router"]["modelServers"]
    assert set(model_servers) <= set(facts["model_servers"])
    assert model_servers["type"] in facts["server_types"]
    (target,) = model_servers["targetPorts"]
    roles = []
    for spec in servers.values():
        labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
        assert model_servers["matchLabels"].items() <= labels.items()
        roles.append(labels[facts["role_label"]])
        sidecars = pod.get("initContainers", ())
        assert len(sidecars) == (roles[-1] == "decode")
        (serving,) = sidecars or pod["containers"]
        assert serving["ports"][0]["containerPort"] == target["number"]
        for sidecar in sidecars:
            given = dict(word.removeprefix("--").split("=") for word in sidecar["args"])
            assert set(given) <= set(facts["sidecar_options"])
            assert given["kv-connector"] in facts["connectors"]
            ports = facts["sidecar_port"], facts["model_server_port"]
            assert (int(given["port"]), int(given["model-server-port"])) == ports
            assert sidecar["image"].endswith(f":v{LLM_D_RELEASE}")
            assert sidecar["restartPolicy"] == "Always"
    assert set(roles) <= set(facts["roles"])
    if len(servers) == 1:
        assert "epp" not in router["router"]
        return
    epp = router["router"]["epp"]
    assert set(epp) <= set(facts["epp"])
    config = yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])
    assert (config["apiVersion"], config["kind"]) == (facts["config_api"], "EndpointPickerConfig")
    plugins = {one["type"] for one in config["plugins"]}
    assert plugins == set(facts["plugins"])
    assert [one["name"] for one in config["schedulingProfiles"]] == roles
    for profile in config["schedulingProfiles"]:
        named = {one["pluginRef"] for one in profile["plugins"]}
        assert named <= plugins
        assert f"{profile['name']}-filter" in named


def test_llm_d_runs_the_recommendation(found: Recommendation) -> None:
    deployment = only(found)
    assert deployment.engine is not None
    if deployment.profile.engine == "trtllm" and "server" not in deployment.settings:
        with pytest.raises(SweepError, match="sidecar has no KV transfer for TensorRT-LLM: give --mode aggr"):
            llm_d_files(deployment)
        return
    files = llm_d_files(deployment)
    check_llm_d(deployment, files)
    written = f"arguments are those of {deployment.engine.title} {deployment.engine.release}\n"
    assert written in files["llm-d.yaml"]


def test_a_copy_over_nodes_is_refused_by_llm_d(found: Recommendation) -> None:
    with pytest.raises(SweepError, match="copies within a node of 8 GPUs, got 16: give --most-gpus-each 8"):
        llm_d_files(changed(found, {"tp": 16}, gpus_each=16))


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_models_name_is_read(found: Recommendation, name: str) -> None:
    checkpoint = Published(name, "bf16", "bf16", True)
    hostile = changed(found, {"model": name}, checkpoint=checkpoint, facts=(f"of {name}",))
    check_dynamo(hostile, dynamo_files(hostile)["dynamo.yaml"])
    if not (hostile.profile.engine == "trtllm" and "server" not in hostile.settings):
        check_llm_d(hostile, llm_d_files(hostile))


def test_a_platform_takes_the_place_of_kubernetes(found: Recommendation, tmp_path: Path) -> None:
    names = {path.name for path in found.save(tmp_path, "dynamo")}
    assert "dynamo.yaml" in names
    assert "kubernetes.yaml" not in names
    assert (tmp_path / "dynamo.yaml").read_text() == dynamo_files(only(found))["dynamo.yaml"]


def test_what_a_platform_cannot_run_writes_nothing(found: Recommendation, tmp_path: Path) -> None:
    place = tmp_path / "out"
    with pytest.raises(SweepError, match="manifest must be one of kubernetes, dynamo, llm-d, got 'slurm'"):
        found.save(place, "slurm")
    profile = dataclasses.replace(only(found).profile, engine="")
    nothing = dataclasses.replace(only(found), engine=None, profile=profile)
    alone = dataclasses.replace(found, deployments=(nothing,))
    for platform in ("dynamo", "llm-d"):
        with pytest.raises(SweepError, match="use sglang, trtllm, vllm"):
            alone.save(place, platform)
    assert not place.exists()
