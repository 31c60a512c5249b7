"""The READMEs are right: their Python and commands run as written, and what they link to is there."""

from __future__ import annotations

import doctest
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fastroof.backends.releases import releases_markdown

CHECKOUT = Path(__file__).resolve().parents[1]
README = CHECKOUT / "README.md"
FOLDERS = (".github", "bench_data", "benchmarks", "fastroof", "kernels_bench", "tests")
PAGES = [README, *sorted(page for folder in FOLDERS for page in (CHECKOUT / folder).rglob("*.md"))]
MODULES = {path.name for folder in FOLDERS for path in (CHECKOUT / folder).rglob("*.py")}
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
SECONDS = ("fastroof/sweep/README.md",)
"""Pages whose commands take half a minute."""
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(page: Path, language: str, *, runs: bool = True) -> list[tuple[int, str]]:
    """A page's fenced blocks of a language, each with the line that it starts at.

    Words behind the language give the reason why a block does not run here: ```` ```console needs a GPU ````.
    """
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, m.start(3)), m[3])
        for m in FENCE.finditer(text)
        if m[1].lower() == language and bool(m[2].strip()) != runs
    ]


def pages_with(language: str, *, runs: bool = True) -> list[Any]:
    """The pages that have such blocks, named by their path."""
    pages = [page for page in PAGES if blocks(page, language, runs=runs)]
    return [pytest.param(page, id=str(page.relative_to(CHECKOUT))) for page in pages]


def slow_ones(pages: list[Any]) -> list[Any]:
    """Mark the pages that take half of the seconds of all; `best` and sweeps have tests of their commands."""
    return [
        pytest.param(*page.values, id=page.id, marks=pytest.mark.slow) if page.id in SECONDS else page
        for page in pages
    ]


@pytest.mark.parametrize("page", slow_ones(pages_with("python")))
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for line, source in blocks(page, "python"):
        if ">>>" in source:
            test = doctest.DocTestParser().get_doctest(source, names, page.name, str(page), line)
            report: list[str] = []
            doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append, clear_globs=False)
            assert not report, "".join(report)
            names = test.globs
        else:
            # The empty lines make a traceback's line numbers the page's own.
            exec(compile("\n" * line + source, str(page), "exec"), names)


def program_of(name: str) -> typer.Typer:
    from fastroof.cli import app
    from kernels_bench.cli import app as measuring

    return {"fastroof": app, "kernels-bench": measuring}[name]


def transcript(source: str) -> list[tuple[list[str], str]]:
    """The words of each command of a block, and the output that is shown under it."""
    commands: list[tuple[list[str], str]] = []
    # lines that a command goes on in; output may end in a backslash too
    whole = re.sub(
        r"^\$ (?:.*\\\n)+", lambda lines: lines[0].replace("\\\n", " "), source, flags=re.MULTILINE
    )
    for line in whole.splitlines(keepends=True):
        if line.startswith("$ "):
            parts = line.removeprefix("$ ").split("&&")
            commands += [(shlex.split(part, comments=True), "") for part in parts]
        else:
            words, shown = commands.pop()
            commands.append((words, shown + line))
    return commands


@pytest.mark.parametrize("page", slow_ones(pages_with("console")))
def test_commands_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for line, source in blocks(page, "console"):
        for words, shown in transcript(source):
            name, *arguments = words
            into = None
            if ">" in arguments:
                into = tmp_path / arguments[arguments.index(">") + 1]
                arguments = arguments[: arguments.index(">")]
            done = CliRunner().invoke(program_of(name), arguments)
            assert done.exit_code == 0, f"{page}:{line}: {shlex.join(words)}: {done.output}"
            if into is not None:
                into.write_text(done.stdout, encoding="utf-8")
            if shown:
                assert doctest.OutputChecker().check_output(shown, done.stdout, OPTIONS), done.stdout


@pytest.mark.parametrize("page", pages_with("console", runs=False))
def test_commands_that_do_not_run_here_have_the_options_that_they_name(page: Path) -> None:
    for line, source in blocks(page, "console", runs=False):
        for words, _ in transcript(source):
            if words[0] not in ("fastroof", "kernels-bench"):
                continue
            command: Any = typer.main.get_command(program_of(words[0]))
            for word in words[1:]:
                if word.startswith("-") and len(word) > 1:
                    options = {name for option in command.params for name in option.opts}
                    assert word.partition("=")[0] in options, f"{page}:{line}: {shlex.join(words)}"
                elif hasattr(command, "commands"):
                    # made when they are asked for, as the commands of fastroof lookup
                    command = command.get_command(None, word)
                    assert command is not None, f"{page}:{line}: {shlex.join(words)}"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(CHECKOUT))) for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if not link.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / link).exists(), f"{page}: {link}"


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:stop]))
        except ModuleNotFoundError:
            continue
        for part in parts[stop:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(CHECKOUT))) for page in PAGES])
def test_names_and_paths_are_of_today(page: Path) -> None:
    """Changes speak of names that were; all other pages of those that are."""
    if page.name == "CHANGES.md":
        return
    # the table of releases names files of other programs
    text = page.read_text(encoding="utf-8").replace(releases_markdown(), "")
    for name in re.findall(r"`(fastroof(?:\.[A-Za-z_]\w*)+)", text):
        # an adapter imports the program that it serves
        assert name.startswith("fastroof.backends.vidur.") or is_there(name), f"{page}: {name}"
    for path in re.findall(r"(?<![\w./-])((?:fastroof|kernels_bench|tests)(?:/\w+)+\.(?:py|toml))\b", text):
        assert (CHECKOUT / path).is_file(), f"{page}: {path}"
    for path in re.findall(r"(?<![\w./*<>-])(?:\w+/)*(\w+\.py)\b", FENCE.sub("", text)):
        assert path in MODULES, f"{page}: {path}"


def test_every_folder_is_on_the_map() -> None:
    text = (CHECKOUT / "fastroof" / "README.md").read_text(encoding="utf-8")
    for folder in (CHECKOUT / "fastroof").iterdir():
        if (folder / "__init__.py").is_file():
            assert f"`{folder.name}/`" in text
    for page in (CHECKOUT / "fastroof").glob("*/README.md"):
        assert f"]({page.parent.name}/README.md)" in text


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
    commands = [words for _, source in blocks(README, "bash") for words in shell_commands(source) if words]
    install = [words for words in commands if words[:3] == ["pip", "install", "-e"]]
    test = [words for words in commands if words[-1] == "pytest" or words[:3] == ["python", "-m", "pytest"]]
    assert len(install) == 1, "the README names one command that installs a clone"
    assert len(test) == 1, "the README names one command that runs the tests"
    stages = ci_commands()
    # CI runs all of the tests but repetitions for releases, slow ones in turns, and benchmarks
    turns = [*test[0], "--all", "-m", "not release", "--slow-part", "$slow", "--benchmark-disable"]
    assert [*turns, "tests", "fastroof", "kernels_bench", "benchmarks"] in stages

    # and installs the same from pins: those of the command's extras, and the clone without looking further
    extras = set(re.fullmatch(r"\.\[([\w,]+)\]", install[0][3])[1].split(","))
    [pinned] = re.findall(r"^pin ci (\S+)", (CHECKOUT / ".ci" / "pin").read_text(encoding="utf-8"), re.M)
    assert extras <= set(pinned.split(","))
    quick = ("--no-compile", "--quiet")
    assert ["pip", "install", *quick, "--no-deps", "--require-hashes", "-r", "$pins/ci.txt"] in stages
    assert ["pip", "install", *quick, "--no-deps", "--no-build-isolation", "-e", "."] in stages


def test_headline_errors_are_those_of_the_reports() -> None:
    folder = CHECKOUT / "benchmarks" / "accuracy"
    groups = (folder / "groups.md").read_text(encoding="utf-8")
    benches = (folder / "README.md").read_text(encoding="utf-8").split("## By bench")[1].split("\n## ")[0]
    cells = re.compile(r"^\| (\w+) \|(.*)\|$", re.MULTILINE)
    by_bench, by_protocol = (
        {name: [cell.strip() for cell in row.split("|")] for name, row in cells.findall(part)}
        for part in benches.split("by protocol;", 1)
    )
    number, fitted_nothing, error = by_protocol["all"][:3]
    assert number == "9", "the number is a word in the README"
    judged = re.compile(r"\* (TPOT|TTFT) of (\d+) runs judged: MAPE ([\d.]+)%.*against ([\d.]+)% over")
    by_model = {what: (f"{int(count):,}", mape, peer) for what, count, mape, peer in judged.findall(groups)}
    text = README.read_text(encoding="utf-8").replace("\n  ", " ")
    assert f"nine benches that fitted nothing | {fitted_nothing} | **{error} %**" in text
    of = " / ".join(by_protocol[name][2] for name in ("closed", "burst", "open"))
    assert f"| **{of} %** | |" in text
    runs = f"{int(by_bench['all'][0]):,}"
    assert f"TPOT without the run's bench | {runs} | **{by_bench['all'][3]} %**" in text
    count, mape, peer = by_model["TPOT"]
    assert f"TPOT on {count} public runs" in text
    assert f"| **{mape} %** | {peer} %, aiconfigurator-core" in text
    for count, mape, peer in by_model.values():
        assert f"| {count} | **{mape} %** | {peer} % |" in text
    guide = (CHECKOUT / "fastroof" / "serving" / "README.md").read_text(encoding="utf-8")
    for _, mape, peer in by_model.values():
        assert f"| **{mape} %**," in guide
        assert f"| {peer} %" in guide
