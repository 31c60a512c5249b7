"""The README's Python runs as written, and the commands it names are those that CI runs."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
README = CHECKOUT / "README.md"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(language: str) -> list[tuple[int, str]]:
    """The README's fenced blocks of a language, each with the line that it starts at."""
    if not README.is_file():
        pytest.skip("no README.md yet")
    text = README.read_text(encoding="utf-8")
    found = [
        (text.count("\n", 0, m.start(2)), m[2]) for m in FENCE.finditer(text) if m[1].lower() == language
    ]
    if not found:
        pytest.skip(f"README.md has no {language} block")
    return found


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for line, source in blocks("python"):
        if ">>>" in source:
            test = doctest.DocTestParser().get_doctest(source, names, "README.md", str(README), line)
            report: list[str] = []
            doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append, clear_globs=False)
            assert not report, "".join(report)
            names = test.globs
        else:
            # The empty lines make a traceback's line numbers the README's own.
            exec(compile("\n" * line + source, str(README), "exec"), names)


def shell_commands(script: str) -> list[list[str]]:
    """The words of each command of a script, without prompts, comments and continued lines."""
    lines = script.replace("\\\n", " ").splitlines()
    commands = (part.strip().removeprefix("$ ") for line in lines for part in line.split("&&"))
    return [shlex.split(command, comments=True) for command in commands if command]


def ci_commands() -> list[list[str]]:
    """What .ci/run runs as its stages, without the stage's name."""
    script = (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", " ")
    stages = (shlex.split(line, comments=True) for line in script.splitlines() if line.startswith("stage "))
    return [words[2:] for words in stages]


def test_install_and_test_commands_are_those_of_ci() -> None:
    commands = [words for _, source in blocks("bash") for words in shell_commands(source) if words]
    install = [words for words in commands if words[:3] == ["pip", "install", "-e"]]
    test = [words for words in commands if words[-1] == "pytest" or words[:3] == ["python", "-m", "pytest"]]
    assert len(install) == 1, "the README names one command that installs a clone"
    assert len(test) == 1, "the README names one command that runs the tests"
    for words in install + test:
        # CI shares the tests over its processors: `pytest -n auto`
        stages = [
            stage[: len(words)] for stage in ci_commands() if stage[len(words) :] in ([], ["-n", "auto"])
        ]
        assert words in stages, f"{shlex.join(words)!r} is no stage of .ci/run"
