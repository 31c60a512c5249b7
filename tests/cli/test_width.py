"""Tables in the width that there is: nothing is wider, no number is cut, and what is not shown is named."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from fastroof.cli import app
from fastroof.cli import output as fitted_tables
from fastroof.cli.output import PIPE_WIDTH, FittedTable, fit, fold, pieces, print_table
from fastroof.engines import StepCosts
from fastroof.option_help import column_meanings
from tests.evidence.test_own_runs import LLAMA, recorded_cluster

CHECKOUT = Path(__file__).resolve().parents[2]
WIDTHS = (64, 80, 120, 200)
STEP = ("step", "--model", "llama-3.1-8b", "--decode", "64x4096", "--prefill", "2048@0")
LOAD = ("--isl", "1000", "--osl", "100")
LIMITS = ("--model", "llama-3.1-8b", *LOAD, "--ttft", "500", "--tpot", "50")
SERVING = ("serving", "--model", "llama-3.1-8b", *LOAD, "--clients", "8")
CAPACITY = ("capacity", "--model", "llama-3.1-8b", "--trace", "example", "--ttft", "900", "--tpot", "90")
FILES = {
    "sweep.toml": 'models = ["llama-3.1-8b"]\ntp = [1, 2]\n',
    "steps.toml": 'models = ["llama-3.1-8b"]\nbatch_size = [8, 64]\nkv_len = 4096\n',
    "capacity.toml": """models = ["llama-3.1-8b"]
        workload = {requests = 100, isl = 100, osl = 20}
        slo = {ttft_p99_ms = 500}""",
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "gpus": (),
    "models": (),
    "models --support": ("--support", "--gpu", "h100", "--engine", "vllm", "--model", "qwen3-8b"),
    "models --support --full": ("--support", "--full", "--gpu", "h100", "--model", "qwen3-8b"),
    "models --architectures": ("--architectures",),
    "engines": (),
    "backends": (),
    "doctor": (),
    "lookup": ("gemm", "--m", "64,128", "--n", "6144", "--k", "4096"),
    "step": STEP[1:],
    "step --explain": (*STEP[1:], "--explain"),
    "compare": ("--model", "llama-3.1-8b", "--decode", "64x4096", "--prefill", "2048"),
    "best": (*LIMITS, "--gpu", "h100", "--gpus", "2"),
    "best --rate": (*LIMITS, "--gpu", "h100", "--gpus", "2", "--rate", "4"),
    "fit": ("--model", "llama-3.1-8b", "--tpot", "10"),
    "fit, too much": ("--model", "llama-3.1-70b", "--tp", "2", "--max-num-seqs", "4096"),
    "serving": (*SERVING[1:], "--energy"),
    "serving, apart": (*SERVING[1:], "--disaggregated", "1:1"),
    "simulate": ("--model", "llama-3.1-8b", "--trace", "example"),
    "capacity": CAPACITY[1:],
    "capacity, fewest": (*CAPACITY[1:], "--fewest"),
    "capacity, specification": ("capacity.toml",),
    "sweep, deployments": ("sweep.toml", "--isl", "[1000, 2000]", "--osl", "100", "--clients", "2"),
    "sweep, steps": ("steps.toml",),
    "validate": ("--runs", "runs", "--gpu", "h100"),
    "calibrate": ("--runs", "runs", "--gpu", "h100", "--engine-version", "0.12.0"),
    "bench": ("decode", "--quick", "--repeat", "1"),
    "tables list": (),
    "tables show": ("gemm",),
    "tables validate": ("h100", "--source", "aiconfigurator-vllm-0.24.0"),
    "tables diff": ("h100/aiconfigurator-vllm-0.24.0", "h100/aiconfigurator-sglang-0.5.14"),
    "tables holdout": ("h100", "--operator", "mla_bmm"),
    "tables holdout --coverage": ("h100", "--operator", "mla_bmm", "--coverage"),
    "tables survey": ("h100", "--operator", "mla_bmm"),
    "tables campaigns": ("h100/aiconfigurator-vllm-0.24.0", "h100/aiconfigurator-sglang-0.5.14"),
}
"""Words of each command that prints a table, behind its name."""
SLOW = {"best --rate", "capacity", "validate", "tables validate", "calibrate", "tables campaigns"}
OTHERS = ("plot ", "export ", "tables import ")
NO_TABLES = {"report", "ui", "warm", "serve", "tables flag", "tables new"}
# a hyphen behind a letter is no sign
NUMBER = re.compile(r"(?<![A-Za-z])-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?|\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def words_of(command: str) -> list[str]:
    return [*command.partition(",")[0].partition(" --")[0].split(), *COMMANDS[command]]


def tables_of(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Any]], str]:
    """What a command prints as tables: names, cells, and which may be left out; and all that a pipe gets."""
    printed: list[dict[str, Any]] = []

    def keep(columns: Any, rows: Any, left: Any, width: int, least: Any = ()) -> FittedTable:
        printed.append({"columns": columns, "rows": rows, "left": left, "least": least})
        return fit(columns, rows, left, width, least)

    for name, text in FILES.items():
        (folder / name).write_text(text)
    if "runs" in COMMANDS[command]:
        (folder / "runs").mkdir()
        recorded_cluster(folder / "runs", StepCosts(step_us=300.0, sequence_us=5.0))
        (folder / "runs/engine_args.txt").write_text(f"vllm serve {LLAMA}")
    with monkeypatch.context() as patch:
        patch.setattr(fitted_tables, "fit", keep)
        patch.delenv("COLUMNS")
        patch.chdir(folder)
        done = CliRunner().invoke(app, words_of(command), prog_name="fastroof")
    assert done.exit_code == 0, done.output
    return printed, done.stdout


def unfolded(text: str) -> str:
    return re.sub(r"\s+", "", text)


def check(table: dict[str, Any], width: int) -> FittedTable:
    """Hold a fitted table to what was to be printed."""
    columns, rows = list(table["columns"]), table["rows"]
    fitted = fit(columns, rows, table["left"], width, table["least"])
    if not fitted.columns:
        return fitted
    assert sum(fitted.widths) + fitted.gap * (len(fitted.widths) - 1) <= width
    names = [unfolded(name) for name in fitted.columns]
    alike = dict(fitted.alike)
    assert sorted([*names, *map(unfolded, alike), *map(unfolded, fitted.left_out)]) == sorted(
        map(unfolded, columns)
    )
    assert set(fitted.left_out) <= set(table["least"])
    for row, cells in zip(rows, fitted.rows, strict=True):
        whole = {unfolded(name): cell for name, cell in zip(columns, row, strict=True)}
        for name, cell, wide in zip(names, cells, fitted.widths, strict=True):
            assert unfolded(cell) == unfolded(whole[name])
            assert NUMBER.findall(cell) == NUMBER.findall(whole[name])
            assert all(len(line) <= wide for line in cell.split("\n"))
        assert all(whole[unfolded(name)] == cell for name, cell in alike.items())
    return fitted


def is_explained(head: str, meanings: dict[str, str]) -> bool:
    names = (re.escape(name).replace(re.escape("..."), ".+") for name in meanings)
    return not head or any(re.fullmatch(name, head) for name in names)


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in COMMANDS]
)
def test_tables_of_a_command_fit_and_their_columns_are_explained(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, shown = tables_of(command, tmp_path, monkeypatch)
    assert tables
    assert max(map(len, shown.splitlines())) <= PIPE_WIDTH
    names = words_of(command)[: 2 if command.startswith(("tables", "lookup")) else 1]
    meanings = column_meanings(" ".join(names))
    explained = CliRunner().invoke(app, [*names, "--help"]).stdout
    assert all(name in explained for name in meanings)
    for table in tables:
        # the sizes of a lookup are its options
        heads = {head for head in table["columns"] if not is_explained(head, meanings)}
        assert heads <= ({"dtype", "m", "n", "k"} if command == "lookup" else set())
        for width in WIDTHS:
            check(table, width)
            monkeypatch.setenv("COLUMNS", str(width))
            print_table(table["columns"], table["rows"], left=table["left"], least=table["least"])
            assert max(map(len, capsys.readouterr().out.splitlines())) <= width
        whole = check(table, 10_000)
        assert (whole.gap, whole.alike, whole.left_out) == (3, (), ())
        assert whole.columns == tuple(table["columns"])


def test_all_commands_that_print_tables_are_tried() -> None:
    def leaves(group: Any, above: str = "") -> Iterator[str]:
        for name, command in getattr(group, "commands", {}).items():
            place = f"{above} {name}".strip()
            yield from leaves(command, place) if hasattr(command, "commands") else [place]

    tried = {" ".join(words_of(command)[:count]) for command in COMMANDS for count in (1, 2)}
    every = set(leaves(get_command(app)))
    assert {one for one in every - tried if not one.startswith(OTHERS)} == NO_TABLES


CELLS = st.one_of(
    st.integers(-(10**9), 10**9).map("{:,}".format),
    st.floats(0, 1e6, allow_nan=False).map("{:.4g} us".format),
    st.lists(st.sampled_from(["dense", "moe", "vllm-0.12.0-bf16", "of 3,", "2026-11-24"]), max_size=6).map(
        " ".join
    ),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), width=st.integers(1, 140), count=st.integers(1, 6))
def test_whatever_the_table_no_number_is_cut(data: st.DataObject, width: int, count: int) -> None:
    columns = [f"{'long name of ' * (place % 2)}column {place}" for place in range(count)]
    rows = data.draw(st.lists(st.tuples(*[CELLS] * count), min_size=1, max_size=4))
    left = data.draw(st.lists(st.sampled_from(columns), unique=True))
    least = data.draw(st.lists(st.sampled_from(columns), unique=True))
    check({"columns": columns, "rows": rows, "left": left, "least": least}, width)


@given(text=CELLS, is_list=st.booleans(), width=st.integers(1, 40))
def test_folded_lines_are_no_wider_than_their_parts(text: str, is_list: bool, width: int) -> None:
    parts = pieces(text, is_list=is_list)
    lines = fold(text, width, is_list=is_list)
    assert unfolded("".join(lines)) == unfolded(text) == unfolded("".join(parts))
    assert all(len(line) <= max(width, *map(len, parts)) for line in lines)


def in_terminal(width: int, *words: str, **changed: str) -> str:
    """What a command prints into a terminal of some width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.Popen(
        [sys.executable, "-m", "fastroof", *words], stdout=its, stderr=its, stdin=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": str(CHECKOUT), "TERM": "dumb", **changed},
    )  # fmt: skip
    os.close(its)
    read = b""
    try:
        while some := os.read(ours, 65536):
            read += some
    except OSError:
        pass
    os.close(ours)
    assert done.wait(60) == 0
    return read.decode().replace("\r\n", "\n")


def test_the_width_is_that_of_columns_then_of_the_terminal_then_80() -> None:
    def widest(width: int, **changed: str) -> int:
        return max(map(len, in_terminal(width, "gpus", **changed).splitlines()))

    assert 80 < widest(120) <= 120
    assert widest(120, COLUMNS="90") <= 90
    assert widest(120, COLUMNS="none") > 90
    assert widest(0) <= 80


def test_a_pipe_gets_more_columns_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        return CliRunner().invoke(app, ["gpus"], prog_name="fastroof").stdout

    [whole] = re.findall(r"left out on 120 columns: name, int8 TFLOP/s \(COLUMNS=(\d+) shows", shown(120))
    assert "left out" not in shown(int(whole))
    assert max(map(len, shown(int(whole)).splitlines())) == int(whole)
