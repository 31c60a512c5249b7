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
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fastroof.cli import app
from fastroof.cli import output as fitted_tables
from fastroof.cli.output import FittedTable, fit, fold, pieces, print_table

CHECKOUT = Path(__file__).resolve().parents[2]
WIDTHS = (60, 80, 120, 200)
STEP = ("step", "--model", "llama-3.1-8b", "--decode", "64x4096", "--prefill", "2048@0")
ARGUMENTS = ("--model", "llama-3.1-8b", "--isl", "1000", "--osl", "100", "--ttft", "500", "--tpot", "50")
COMMANDS: dict[str, tuple[str, ...]] = {
    "gpus": ("gpus",),
    "models": ("models",),
    "engines": ("engines",),
    "backends": ("backends",),
    "lookup": ("lookup", "gemm", "--m", "64,128", "--n", "6144", "--k", "4096"),
    "step": STEP,
    "step --explain": (*STEP, "--explain"),
    "compare": ("compare", "--model", "llama-3.1-8b", "--decode", "64x4096", "--prefill", "2048"),
    "best": ("best", *ARGUMENTS, "--gpu", "h100", "--gpus", "2"),
    "fit": ("fit", "--model", "llama-3.1-8b", "--tpot", "10"),
    "serving": ("serving", "--model", "llama-3.1-8b", "--isl", "1000", "--osl", "100", "--clients", "8"),
    "tables list": ("tables", "list"),
    "tables show": ("tables", "show", "gemm"),
}
# a hyphen behind a letter is no sign
NUMBER = re.compile(r"(?<![A-Za-z])-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?|\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def tables_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[dict[str, Any]]:
    """What a command prints as tables: names, cells, and which may be left out."""
    printed: list[dict[str, Any]] = []

    def keep(columns: Any, rows: Any, left: Any, width: int, least: Any = ()) -> FittedTable:
        printed.append({"columns": columns, "rows": rows, "left": left, "least": least})
        return fit(columns, rows, left, width, least)

    with monkeypatch.context() as patch:
        patch.setattr(fitted_tables, "fit", keep)
        done = CliRunner().invoke(app, list(words), prog_name="fastroof")
    assert done.exit_code == 0, done.output
    return printed


def unfolded(text: str) -> str:
    return re.sub(r"\s+", "", text)


def check(table: dict[str, Any], width: int) -> FittedTable:
    """Hold a fitted table to what was to be printed."""
    columns, rows = list(table["columns"]), table["rows"]
    fitted = fit(columns, rows, table["left"], width, table["least"])
    if not fitted.columns:
        shown = [unfolded(line) for line in fitted.records]
        for row in rows:
            for cell in row:
                for number in NUMBER.findall(cell):
                    assert any(unfolded(number) in line for line in shown)
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


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_of_a_command_fit(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tables_of(monkeypatch, *COMMANDS[command])
    assert tables or command == "step"
    for table in tables:
        for width in WIDTHS:
            check(table, width)
            print_table(
                table["columns"], table["rows"], left=table["left"], width=width, least=table["least"]
            )
            assert max(map(len, capsys.readouterr().out.splitlines())) <= width
        whole = check(table, 10_000)
        assert (whole.gap, whole.alike, whole.left_out, whole.records) == (3, (), (), ())
        assert whole.columns == tuple(table["columns"])


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


@given(text=CELLS, is_list=st.booleans(), in_names=st.booleans(), width=st.integers(1, 40))
def test_folded_lines_are_no_wider_than_their_parts(
    text: str, is_list: bool, in_names: bool, width: int
) -> None:
    parts = pieces(text, is_list=is_list, in_names=in_names)
    lines = fold(text, width, is_list=is_list, in_names=in_names)
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


def test_lines_of_a_pipe_are_never_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = CliRunner().invoke(app, ["gpus"], prog_name="fastroof").stdout
    assert max(map(len, out.splitlines())) > 150
