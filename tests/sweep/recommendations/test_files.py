"""Files of a recommendation: scripts that run what was meant, a manifest that is whole, the rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
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
from fastroof.engines.launch.settings import SIDE_PORTS
from fastroof.models.load import Published
from fastroof.sweep import Recommendation, recommend
from fastroof.sweep.recommendations import Deployment
from fastroof.sweep.recommendations.deployment import placed_copies
from fastroof.sweep.recommendations.manifests import label_name
from tests.sweep.recommendations.test_manifests import check_kubernetes

HOSTILE = (
    "org/a b", 'org/"; rm -rf ~; "', "org/$(touch owned)", "org/`touch owned`", "org/x\n- injected: true",
    "-rf", "org/'quoted'", "org/a: b # c", "org/\u2028é", "org/{{x}}",
)  # fmt: skip


MODES = "aggregated", "disaggregated"


def recommended(engine: str, mode: str) -> Recommendation:
    return recommend(
        "qwen3-8b", "h100", total_gpus=4, isl=500, osl=50, tpot_ms=20, engine=engine, requests=200,
        max_num_batched_tokens=8192, gpu_hour_price=2, mode=mode, most_gpus_each=1,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["vllm", "sglang", "trtllm-1.1"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(engine: str) -> Recommendation:
    return recommended(engine, "aggregated")


@pytest.fixture(scope="module", params=MODES)
def either(request: pytest.FixtureRequest, engine: str) -> Recommendation:
    return recommended(engine, request.param)


def only(found: Recommendation) -> Deployment:
    (deployment,) = found.deployments
    assert deployment is not None
    return deployment


def renamed(found: Recommendation, name: str) -> Recommendation:
    """The same answer for a model that is called otherwise."""
    deployment = only(found)
    assert deployment.engine is not None
    settings = {role: dataclasses.replace(one, model=name) for role, one in deployment.settings.items()}
    servers = {
        role: dataclasses.replace(command, arguments=deployment.engine.server(settings[role]).arguments)
        for role, command in deployment.servers.items()
    }
    checkpoint = Published(name, "bf16", "bf16", True)
    changed = dataclasses.replace(
        deployment, settings=settings, servers=servers, checkpoint=checkpoint, notes=(f"of {name}",),
        facts=(f"of {name}",),
    )  # fmt: skip
    return dataclasses.replace(found, deployments=(changed,))


def calls(script: Path, programs: Iterable[str], *arguments: str) -> list[tuple[list[str], dict[str, str]]]:
    """Run a script with stand-ins for programs, which record how they were called."""
    tools, record = script.parent / "tools", script.parent / "called.jsonl"
    tools.mkdir(exist_ok=True)
    record.write_text("")
    called = "json.dumps([sys.argv[1:], dict(os.environ)])"
    text = f"import json, os, sys; print({called}, file=open({str(record)!r}, 'a'))"
    for program in programs:
        stand_in = tools / program
        stand_in.write_text(f'#!/bin/sh\nexec "$REAL_PYTHON" -c {shlex.quote(text)} "$@"\n')
        stand_in.chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "REAL_PYTHON": sys.executable}
    subprocess.run([script, *arguments], check=True, env=environment, cwd=script.parent)
    return [(words, seen) for words, seen in map(json.loads, record.read_text().splitlines())]


def ran(script: Path, program: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    (call,) = calls(script, [program], *arguments)
    return call


def sides(words: list[str], seen: dict[str, str]) -> list[str]:
    """Where a copy listens for KV transfers."""
    given = dict(itertools.pairwise(words))
    return [one[name] for one in (given, seen) for name in SIDE_PORTS if name in one]


@pytest.mark.slow
def test_the_scripts_start_and_measure_the_recommendation(either: Recommendation, tmp_path: Path) -> None:
    deployment = only(either)
    assert all(path.is_file() for path in either.save(tmp_path))
    for script in tmp_path.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
    starts = {"server": "start.sh", "prefill": "start-prefill.sh", "decode": "start-decode.sh"}
    gpus, ports, urls = [], [], []
    for copy in deployment.placement:
        command = deployment.servers[copy.role]
        expected = command.words(str(tmp_path / command.config_name))
        called, seen = ran(tmp_path / starts[copy.role], expected[0], str(copy.number))
        gpus += seen["CUDA_VISIBLE_DEVICES"].split(",")
        port = called[called.index("--port") + 1]
        ports += [port, *sides(called, seen)]
        urls.append(f"127.0.0.1:{port}")
        assert len(called) == len(expected) - 1
        varied = {"--port", *SIDE_PORTS}
        pairs = zip(["", *called], called, expected[1:], strict=False)
        assert all(mine == meant for option, mine, meant in pairs if option not in varied)
        if command.config:
            assert yaml.safe_load((tmp_path / command.config_name).read_text()) == command.config
    assert sorted(map(int, gpus)) == list(range(4))
    assert len(set(ports)) == len(ports)
    with_sides = {"vllm": 4, "sglang": deployment.replicas.get("prefill", 0), "trtllm": 0}
    assert len(ports) - 4 == with_sides[deployment.profile.engine] * ("server" not in deployment.servers)
    assert deployment.benchmark is not None
    words = deployment.benchmark.words()
    assert ran(tmp_path / "benchmark.sh", words[0])[0] == words[1:]
    target = words[words.index("--base-url") + 1]
    words[words.index("--base-url") + 1] = "http://there:9"
    assert ran(tmp_path / "benchmark.sh", words[0], "http://there:9")[0] == words[1:]
    if deployment.router is None:
        assert (deployment.profile.engine, list(deployment.servers)) == ("trtllm", ["server"])
        return
    router = deployment.router
    shown = json.dumps(router.config) if router.config else " ".join(router.words())
    assert re.findall(r"127.0.0.1:\d+", shown) == urls
    if "server" not in deployment.servers:
        assert target == "http://127.0.0.1:8100"
        servers = {
            role: json.dumps([one.words()[1:], one.config]) for role, one in deployment.servers.items()
        }
        assert len(set(servers.values())) == 2
    programs = {command.program[0] for command in deployment.commands.values()}
    assert len(calls(tmp_path / "start-all.sh", programs)) == len(deployment.placement) + 1


def test_copies_follow_each_other_on_machines() -> None:
    placed = placed_copies({"prefill": 3, "decode": 2}, 3, 8, 5600)
    assert [copy.gpus for copy in placed[:3]] == [(0, 1, 2), (3, 4, 5), (0, 1, 2)]
    assert [copy.address.host for copy in placed] == ["node-0", "node-0", "node-1", "node-1", "node-2"]
    wide = placed_copies({"server": 2}, 16, 8, 0)
    assert [(copy.gpus, copy.address.host) for copy in wide] == [((), "node-0"), ((), "node-2")]


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


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_models_name_is_run_or_read(either: Recommendation, name: str, tmp_path: Path) -> None:
    hostile = renamed(either, name)
    place = tmp_path / "out"
    hostile.save(place)
    check_kubernetes(only(hostile), (place / "kubernetes.yaml").read_text("utf-8"))
    for role, script in (("server", "start.sh"), ("decode", "start-decode.sh")):
        if role in only(hostile).servers:
            command = only(hostile).servers[role]
            assert ran(place / script, command.program[0])[0][:4] == command.words()[1:5]
    assert not list(tmp_path.rglob("owned"))


def test_several_have_a_folder_each(tmp_path: Path) -> None:
    found = recommend(["qwen3-8b", "llama-3.1-8b"], "h100", total_gpus=1, isl=500, osl=50, percentile=None)
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
    assert name[0].isalpha()
