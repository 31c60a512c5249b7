"""Files of a recommendation: scripts that run what was meant, a manifest that is whole, the rows."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import SweepError
from fastroof.documents import yaml_text
from fastroof.models.load import Published
from fastroof.sweep import Recommendation, recommend
from fastroof.sweep.recommendations import Deployment
from fastroof.sweep.recommendations.manifests import label_name

HOSTILE = (
    "org/a b", 'org/"; rm -rf ~; "', "org/$(touch owned)", "org/`touch owned`", "org/x\n- injected: true",
    "-rf", "org/'quoted'", "org/a: b # c", "org/\u2028é", "org/{{x}}",
)  # fmt: skip


@pytest.fixture(scope="module", params=["vllm", "sglang", "trtllm-1.1"])
def found(request: pytest.FixtureRequest) -> Recommendation:
    return recommend(
        "qwen3-8b", "h100", total_gpus=4, isl=500, osl=50, tpot_ms=20, engine=request.param,
        max_num_batched_tokens=8192, gpu_hour_price=2, mode="aggregated",
    )  # fmt: skip


def only(found: Recommendation) -> Deployment:
    (deployment,) = found.deployments
    assert deployment is not None
    return deployment


def renamed(found: Recommendation, name: str) -> Recommendation:
    """The same answer for a model that is called otherwise."""
    deployment = only(found)
    assert deployment.engine is not None
    servers = {
        role: dataclasses.replace(
            command,
            arguments=tuple(
                tuple(name if word == "Qwen/Qwen3-8B" else word for word in group)
                for group in command.arguments
            ),
        )
        for role, command in deployment.servers.items()
    }
    checkpoint = Published(name, "bf16", "bf16", True)
    changed = dataclasses.replace(deployment, servers=servers, checkpoint=checkpoint, notes=(f"of {name}",))
    return dataclasses.replace(found, deployments=(changed,))


def ran(script: Path, program: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Run a script with a stand-in for its program, which records how it was called."""
    tools = script.parent / "tools"
    tools.mkdir(exist_ok=True)
    calls = script.parent / "called.json"
    text = f"import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open({str(calls)!r}, 'w'))"
    stand_in = tools / program
    stand_in.write_text(f'#!/bin/sh\nexec "$REAL_PYTHON" -c {shlex.quote(text)} "$@"\n')
    stand_in.chmod(0o755)
    import sys

    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "REAL_PYTHON": sys.executable}
    subprocess.run([script, *arguments], check=True, env=environment, cwd=script.parent)
    called, seen = json.loads(calls.read_text())
    return called, seen


@pytest.mark.slow
def test_the_scripts_start_and_measure_the_recommendation(found: Recommendation, tmp_path: Path) -> None:
    deployment = only(found)
    written = found.save(tmp_path / "out")
    assert all(path.is_file() for path in written)
    start = tmp_path / "out" / "start.sh"
    command = deployment.servers["server"]
    config = str(start.parent / "engine.yaml") if command.config else ""
    expected = command.words(config)
    called, seen = ran(start, expected[0], *(["1"] if deployment.copies > 1 else []))
    if deployment.copies > 1:
        each = deployment.gpus_each
        assert seen["CUDA_VISIBLE_DEVICES"] == ",".join(str(gpu) for gpu in range(each, 2 * each))
        expected[expected.index("--port") + 1] = "8001"
    assert called == expected[1:]
    assert deployment.benchmark is not None
    words = deployment.benchmark.words()
    assert ran(tmp_path / "out" / "benchmark.sh", words[0])[0] == words[1:]
    words[words.index("--base-url") + 1] = "http://there:9"
    assert ran(tmp_path / "out" / "benchmark.sh", words[0], "http://there:9")[0] == words[1:]
    if command.config:
        assert yaml.safe_load((tmp_path / "out" / "engine.yaml").read_text()) == command.config


def test_a_replica_uses_the_gpus_after_those_of_the_ones_before(
    found: Recommendation, tmp_path: Path
) -> None:
    wide = dataclasses.replace(only(found), copies=2, gpus_each=2)
    dataclasses.replace(found, deployments=(wide,)).save(tmp_path)
    program = wide.servers["server"].program[0]
    used = [ran(tmp_path / "start.sh", program, copy)[1]["CUDA_VISIBLE_DEVICES"] for copy in ("0", "1")]
    assert used == ["0,1", "2,3"]


def test_a_benchmark_is_of_one_replicas_share(found: Recommendation, tmp_path: Path) -> None:
    deployment = only(found)
    found.save(tmp_path)
    text = (tmp_path / "benchmark.sh").read_text()
    shares = [
        float(re.findall(pattern, text)[0].replace(",", "")) * deployment.copies
        for pattern in (r"--request-rate ([\d.e+]+)", r"([\d.,e+]+) output tokens/s per replica")
    ]
    row = deployment.row
    assert deployment.copies > 1
    assert shares == pytest.approx([row["requests_per_s"], row["tokens_per_s"]], rel=1e-3)


def test_the_rows_are_the_choices(found: Recommendation, tmp_path: Path) -> None:
    found.save(tmp_path)
    rows = [choice.row for choice in found.answers.answers[0].choices]
    assert pq.read_table(tmp_path / "deployments.parquet").to_pylist() == rows
    table = pacsv.read_csv(tmp_path / "deployments.csv")
    assert table.column("tokens_per_s_per_gpu").to_pylist() == [row["tokens_per_s_per_gpu"] for row in rows]


def objects_of(text: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def check_manifest(deployment: Deployment, text: str) -> None:
    """What Kubernetes requires of these objects, and that they belong together."""
    objects = objects_of(text)
    command = deployment.servers["server"]
    assert set(objects) == {"Deployment", "Service"} | ({"ConfigMap"} if command.config else set())
    name = objects["Deployment"]["metadata"]["name"]
    assert name == label_name(name)
    for one in objects.values():
        assert one["apiVersion"] == ("apps/v1" if one["kind"] == "Deployment" else "v1")
        assert one["metadata"]["name"] == name
    spec = objects["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["replicas"] == deployment.copies
    assert spec["selector"]["matchLabels"] == labels == objects["Service"]["spec"]["selector"]
    (container,) = spec["template"]["spec"]["containers"]
    assert deployment.engine is not None
    assert container["image"] == deployment.engine.image
    assert container["image"].rpartition(":")[2].lstrip("v") == deployment.engine.release
    assert container["resources"]["limits"] == {"nvidia.com/gpu": deployment.gpus_each}
    assert deployment.copies * deployment.gpus_each == deployment.row["total_gpus"]
    assert all(isinstance(word, str) for word in container["command"])
    volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    config = "/etc/fastroof/engine.yaml" if command.config else ""
    assert container["command"] == [*command.words(config), "--host", "0.0.0.0"]
    (port,) = container["ports"]
    (served,) = objects["Service"]["spec"]["ports"]
    assert container["command"][container["command"].index("--port") + 1] == str(port["containerPort"])
    assert served["targetPort"] == port["name"]
    if command.config:
        assert yaml.safe_load(objects["ConfigMap"]["data"]["engine.yaml"]) == command.config


def test_the_manifest_is_complete(found: Recommendation, tmp_path: Path) -> None:
    found.save(tmp_path)
    check_manifest(only(found), (tmp_path / "kubernetes.yaml").read_text())


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_models_name_is_run_or_read(found: Recommendation, name: str, tmp_path: Path) -> None:
    hostile = renamed(found, name)
    place = tmp_path / "out"
    hostile.save(place)
    check_manifest(only(hostile), (place / "kubernetes.yaml").read_text("utf-8"))
    called, _ = ran(place / "start.sh", only(hostile).servers["server"].program[0])
    assert name in called
    assert not list(tmp_path.rglob("owned"))


def test_several_have_a_folder_each(tmp_path: Path) -> None:
    found = recommend(["qwen3-8b", "llama-3.1-8b"], "h100", total_gpus=1, isl=500, osl=50)
    names = {str(path.relative_to(tmp_path)) for path in found.save(tmp_path)}
    assert {"1-qwen-qwen3-8b/start.sh", "2-meta-llama-llama-3-1-8b/kubernetes.yaml"} <= names
    assert len(pq.read_table(tmp_path / "deployments.parquet")) == sum(
        len(a.choices) for a in found.answers.answers
    )


def test_an_unwritable_place_is_reported(found: Recommendation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="cannot be written"):
        found.save(tmp_path / "file" / "below")


def test_what_was_there_stays_where_writing_fails(
    found: Recommendation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastroof.atomic_files.os.replace", full)
    with pytest.raises(SweepError, match="No space left"):
        found.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
@settings(deadline=None)
def test_yaml_reads_back_what_was_written(document: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(document)) == document


LINES = st.lists(st.text(st.sampled_from(" -:#|>\"'{a%@!&*?\t"), max_size=8), min_size=1, max_size=5)
OF_LINES = LINES.map("\n".join) | LINES.map(lambda lines: "\n".join(lines) + "\n")


@given(st.dictionaries(TEXTS, OF_LINES, max_size=3))
@settings(deadline=None)
def test_yaml_reads_back_texts_of_several_lines(document: dict[str, str]) -> None:
    assert yaml.safe_load(yaml_text({"data": document})) == {"data": document}


def test_a_text_of_several_lines_is_readable() -> None:
    assert yaml_text({"data": {"a.yaml": "b:\n  c: 1\n"}}) == "data:\n  a.yaml: |\n    b:\n      c: 1\n"


def test_keys_that_yaml_would_take_for_something_else_are_quoted() -> None:
    odd = {"true": 1, "null": 2, "on": 3, "1": 4, "~": 5, "a b": 6, "nvidia.com/gpu": 7}
    assert yaml.safe_load(yaml_text(odd)) == odd


def test_text_is_not_a_number_or_a_truth_in_any_version_of_yaml() -> None:
    words = ["1e3", "0o17", "0x1F", "1:30", "y", "N", "off", ".inf", "12_000", "2026-11-28", "=", "<<", "-rf"]
    assert yaml_text({"args": words}) == "args:\n" + "".join(
        f"- {json.dumps(word)}\n" for word in words
    ).replace('"off"', "'off'")


def test_what_two_places_share_is_written_twice() -> None:
    labels = {"app": "a"}
    assert (
        yaml_text({"a": labels, "b": labels}, {"c": labels})
        == "a:\n  app: a\nb:\n  app: a\n---\nc:\n  app: a\n"
    )


@given(st.text())
def test_names_of_objects_are_what_kubernetes_takes(text: str) -> None:
    name = label_name(text)
    assert 1 <= len(name) <= 63
    assert name.isascii()
    assert all(letter.islower() or letter.isdigit() or letter == "-" for letter in name)
    assert name.strip("-") == name
