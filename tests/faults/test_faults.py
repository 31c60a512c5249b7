"""Some faults of every kind, and some kills: every file is old or new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastroof.atomic_files import write_files, write_output
from fastroof.load.write import write_source
from tests.faults.planted import PLANTED
from tests.faults.shim import command_with_faults

CHECKOUT = Path(__file__).resolve().parents[2]
SOME = (
    "sweep --resume",
    "sweep, deployments to CSV",
    "export c",
    "tables import aiconfigurator GPU",
    "write_source",
)
"""Operations that write by ways of their own; the others go through the same functions."""


def faults(folder: Path, *words: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output and counts of ``python -m tests.faults``."""
    started = command_with_faults("tests.faults", [*words, "--json", str(folder / "counts.json")], folder)
    if isinstance(started, str):
        pytest.skip(started)
    command, environment = started
    run = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(CHECKOUT), "TMPDIR": str(folder)}, cwd=CHECKOUT,
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert run.stderr == ""
    return run.returncode, run.stdout, json.loads((folder / "counts.json").read_text())


@pytest.mark.slow
def test_what_a_fault_leaves_is_old_or_new(tmp_path: Path) -> None:
    words = [word for name in SOME for word in ("--operation", name)]
    code, text, rows = faults(tmp_path, *words, "--most", "3", "--cases", "5", "--seed", "21")
    assert code == 0, text
    assert {row["operation"] for row in rows} == set(SOME)
    assert sum(row["tried"] for row in rows) > 20
    # what never leads to both tries nothing
    assert {word for row in rows for word in row["outcomes"]} >= {"old", "new"}


@pytest.mark.slow
def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    words = [word for one in PLANTED.values() for word in ("--operation", one.name)]
    code, _, rows = faults(tmp_path, *words, "--most", "4")
    assert code == 1
    for message, operation in PLANTED.items():
        why = [why for row in rows if row["operation"] == operation.name for why in row["wrong"].values()]
        assert any(message in one for one in why), operation.name


@pytest.mark.slow
def test_what_was_killed_is_continued(tmp_path: Path) -> None:
    names = ("sweep, steps to Parquet", "sweep, capacities to JSON lines", "tables import aiconfigurator GPU")
    kills = """
import json, sys
from pathlib import Path
from tests.faults.kills import count_kills

counts = count_kills(5, 21, Path(sys.argv[1]), sys.argv[2:])
print(json.dumps({name: vars(of) for name, of in counts.items()}))
"""
    # a process of its own: it cuts sweeps small, and forks
    run = subprocess.run(
        [sys.executable, "-c", kills, str(tmp_path), *names], cwd=CHECKOUT, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, check=True,
    )  # fmt: skip
    counts = json.loads(run.stdout)
    assert {name: of["wrong"] for name, of in counts.items()} == {name: [] for name in names}
    assert sum(of["kills"] for of in counts.values()) == 5
    assert sum(of["resumed"] for of in counts.values()) > 0


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB of which little is free."""
    (disk := tmp_path / "disk").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk may be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_full_keeps_what_it_has(full_disk: Path) -> None:
    def source(rows: int) -> None:
        sizes = {"m": np.arange(1, rows + 1), "n": np.full(rows, 64), "k": np.full(rows, 64)}
        times = np.random.default_rng(7).uniform(1.0, 2.0, rows)
        gemm = {"dtype": np.full(rows, "bf16", object), **sizes, "latency_us": times}
        write_source(full_disk / "own", {"gemm": gemm}, {"gpu": "h100"}, overwrite=True)

    source(10)
    write_output(full_disk / "page", "old")
    write_files(full_disk / "files", {"a": b"old"}, {})
    before = sorted(path.relative_to(full_disk) for path in full_disk.rglob("*"))
    with pytest.raises(OSError, match="No space left"):
        source(20_000)
    with pytest.raises(ValueError, match=r"page cannot be written \(No space left on device\)"):
        write_output(full_disk / "page", "new" * 30_000)
    with pytest.raises(OSError, match="No space left"):
        write_files(full_disk / "files", {"a": b"new", "b": b"new" * 30_000}, {"c": "a"})
    assert sorted(path.relative_to(full_disk) for path in full_disk.rglob("*")) == before
    assert (full_disk / "page").read_text() == (full_disk / "files" / "a").read_text() == "old"
    source(11)
