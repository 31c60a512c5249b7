"""``fastroof sweep --shard`` and ``fastroof merge`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fastroof.cli import app

KEYS = ["--models", "llama-3.1-8b", "--tp", "1,2,4", "--set", "batch_size=[1, 64]", "--set", "kv_len=4096"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.slow
def test_shards_are_swept_and_merged(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{number}.parquet") for number in (1, 2)]
    for number, file in enumerate(files, 1):
        assert run("sweep", *KEYS, "--shard", f"{number}/2", "-o", file, "--quiet") == ""
    whole = json.loads(run("sweep", *KEYS, "-o", str(tmp_path / "whole.parquet"), "--json"))
    merged = json.loads(run("merge", *files, "-o", str(tmp_path / "all.parquet"), "--json"))
    assert (merged["rows"], merged["best"]) == (whole["rows"], whole["best"])
    assert merged["rows"] == 3
    rows = pq.read_table(tmp_path / "all.parquet")
    assert rows.equals(pq.read_table(tmp_path / "whole.parquet"))
    assert "3 rows in " in run("merge", *files, "-o", str(tmp_path / "all.csv"))
    assert run("merge", *files, "-o", str(tmp_path / "all.csv"), "--quiet") == ""
