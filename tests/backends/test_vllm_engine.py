"""vLLM's plugin does nothing without a GPU's name; schedulers of installed engines equal `simulate`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("gpu", "found"), [(None, None), ("", None), ("h100", "NoGpu")])
def test_the_plugin_replaces_vllms_platform_only_if_a_gpu_is_named(gpu, found, monkeypatch):
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["vllm.platform_plugins"].items()
    plugin = EntryPoint(name, value, "vllm.platform_plugins").load()
    if gpu is None:
        monkeypatch.delenv("FASTROOF_GPU", raising=False)
    else:
        monkeypatch.setenv("FASTROOF_GPU", gpu)
    answer = plugin()
    assert (answer and answer.rpartition(".")[2]) == found
    if answer is not None:
        assert importlib.util.find_spec(answer.rpartition(".")[0]) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "runs"), [("vllm", 22), ("sglang", 16)])
def test_engines_own_schedulers_equal_simulations(engine, runs):
    pytest.importorskip(engine)
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.upstream.{engine}"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("|\n") == runs
