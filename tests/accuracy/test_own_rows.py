"""Lines of the README about our own measurements: made of the data that ships, or of none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fastroof
from benchmarks.accuracy import own_rows
from benchmarks.accuracy.own_rows import PREFIX, README, main, own_campaigns, step_lines, with_lines
from fastroof.engines import engine_of_version
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.load import MeasuredTables
from fastroof.load.write import write_source

TEXT = "| what |\n|---|\n| GEMM |\n| MoE | 1 |\n| TPOT |\n\nafter\n"


def printed(capsys: pytest.CaptureFixture[str], *, write: bool = False) -> list[str]:
    main(write=write)
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data with a campaign that takes 1.25 times as long as the others' rows."""
    m = np.arange(1, 41)
    latency_us = 20.0 + m
    for name, tool, factor in (("others", "another", 1.0), ("mine", "kernels_bench 0.1.0", 1.25)):
        sizes = {"m": m, "n": np.full(40, 4096), "k": np.full(40, 4096)}
        columns = {"dtype": np.full(40, "bf16", object), **sizes, "latency_us": latency_us * factor}
        write_source(tmp_path / "h100" / name, {"gemm": columns}, {"gpu": "h100", "tool": tool})
    (tmp_path / "h100" / "serving").mkdir()
    monkeypatch.setattr(own_rows, "bench_data_root", lambda: tmp_path)
    monkeypatch.setattr(own_rows, "shipped_steps", lambda gpu: ())
    return tmp_path


def test_others_rows_are_looked_up_at_ours(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert own_campaigns(root) == {"h100": root / "h100" / "mine"}
    assert printed(capsys) == ["| own H100 rows: gemm, bf16 | 40 | **20.0 %** | 20.0 % |"]


def test_lines_are_written_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TEXT)
    monkeypatch.setattr(own_rows, "README", readme)
    lines = printed(capsys, write=True)
    once = readme.read_text()
    assert once.splitlines()[3:6] == ["| MoE | 1 |", *lines, "| TPOT |"]
    printed(capsys, write=True)
    assert readme.read_text() == once
    assert with_lines(once, []) == TEXT


def test_without_own_data_nothing_is_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (root / "h100" / "mine").iterdir():
        path.unlink()
    main()
    assert capsys.readouterr() == ("", "bench_data has nothing that kernels-bench measured\n")


def test_steps_are_predicted_in_every_way() -> None:
    tables = fastroof.load_tables("h100")
    gemm = tables.table("gemm")
    slow = {**gemm.columns, "latency_us": gemm.columns["latency_us"] * 1.5}
    campaign = MeasuredTables(
        "h100", {"gemm": type(gemm)("gemm", slow, "own", provenance={"tool": "x"})}, Path()
    )
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine="kernels")
    step = MeasuredStep(
        "llama-3.1-8b", "h100", 1, "bf16", "bf16", "decode", (1,) * 8, (1023,) * 8,
        plan.decode_us(8, 1024), timed="engine", engine="vllm", engine_version="0.26.0",
        profile=engine_of_version("vllm", "0.26.0"),
    )  # fmt: skip
    lines = list(step_lines([step], tables, campaign))
    assert [line.partition(": ")[2].partition(" |")[0] for line in lines] == [
        "others' kernels alone", "others' kernels and the profile", "own kernels alone",
        "own kernels and the profile",
    ]  # fmt: skip
    assert all(line.startswith(f"{PREFIX}H100 steps of vLLM 0.26.0") for line in lines)
    assert "| 1 decode | **0.0 %** |" in lines[0]
    assert all("**0.0 %**" not in line for line in lines[1:])
    assert len(list(step_lines([step], tables, None))) == 2
    assert list(step_lines([], tables, campaign)) == []


def test_the_readme_has_lines_if_such_data_ships() -> None:
    if own_campaigns():
        assert any(line.startswith(PREFIX) for line in README.read_text("utf-8").splitlines())
