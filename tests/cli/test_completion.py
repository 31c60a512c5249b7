"""Completions for shells, as typer's scripts request them: by the environment, without arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastroof.cli import COMMANDS
from fastroof.config.gpu import gpu_names
from fastroof.engines import engine_names
from fastroof.models import model_names
from fastroof.models.execution import DTYPES, KV_DTYPES

CHECKOUT = Path(__file__).resolve().parents[2]
START = "import sys; sys.argv[0] = 'fastroof'; from fastroof.__main__ import main; main()"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", START, *words],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **variables},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def offered(shell: str, line: str) -> list[str]:
    variables = {"_FASTROOF_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        words = line.split(" ")
        variables |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    else:
        variables |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = run(**variables)
    assert (done.returncode, done.stderr) == (0, "")
    if shell == "zsh":
        return [part.split('"')[1] for part in done.stdout.splitlines() if '"' in part]
    return [part.split("\t")[0] for part in done.stdout.splitlines() if part]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_options_and_values_are_offered(shell: str) -> None:
    assert offered(shell, "fastroof se") == [name for name in COMMANDS if name.startswith("se")]
    assert "--model" in offered(shell, "fastroof step --m")
    llamas = [name for name in model_names() if name.startswith("llama-3")]
    assert llamas
    assert offered(shell, "fastroof step --model llama-3") == llamas


@pytest.mark.slow
def test_every_list_is_the_products() -> None:
    assert offered("bash", "fastroof step --gpu ") == list(gpu_names())
    assert offered("bash", "fastroof best --engine v") == [n for n in engine_names() if n.startswith("v")]
    assert offered("bash", "fastroof step --dtype ") == ["auto", *DTYPES]
    assert offered("bash", "fastroof step --kv-dtype ") == ["auto", *KV_DTYPES]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_and_installed(shell: str, tmp_path: Path) -> None:
    shown = run("--show-completion", shell, HOME=str(tmp_path))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "_FASTROOF_COMPLETE" in shown.stdout
    assert not [*tmp_path.iterdir()]
    assert run("--show-completion", SHELL=f"/usr/bin/{shell}").stdout == shown.stdout
    done = run("--install-completion", shell, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert (
        files
        == {
            "bash": {".bashrc", ".bash_completions/fastroof.sh"},
            "zsh": {".zshrc", ".zfunc/_fastroof"},
            "fish": {".config/fish/completions/fastroof.fish"},
        }[shell]
    )


def test_another_shell_is_refused_in_one_line() -> None:
    for words in (("--show-completion", "tcsh"), ("--install-completion",)):
        done = run(*words, SHELL="/bin/tcsh")
        assert (done.returncode, done.stdout) == (2, "")
        assert "bash, zsh, fish" in done.stderr
        assert len(done.stderr.splitlines()) == 1
