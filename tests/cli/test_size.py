"""``fastroof size``: rates of replicas on several GPUs, and what stops a batch or a context from growing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fastroof.cli import app

QUESTION = ("size", "--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "1", "--json")


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*QUESTION, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def test_ranks_that_share_nothing_have_the_rate_of_one_a_gpu() -> None:
    """A dense model's ranks are copies, each with a batch of its own."""
    asked = ("--kv-len", "2048", "--tpot-ms", "15")
    (one,), (four,) = rows(*asked), rows(*asked, "--dp", "4")
    assert four["batch_size"] == one["batch_size"] > 1
    assert four["tokens_per_s_per_gpu"] == pytest.approx(one["tokens_per_s_per_gpu"], rel=0.01)
    assert one["tokens_per_s_per_gpu"] == pytest.approx(one["batch_size"] / one["step_ms"] * 1e3)


def test_stages_work_on_a_batch_each() -> None:
    """Two stages have two batches in flight, on twice the GPUs: about the rate of one stage that is both."""
    (one,), (two,) = (rows("--batch-size", "64", *split) for split in ((), ("--pp", "2")))
    at = [rows("--kv-len", str(4096), "--max-num-seqs", "64", *split)[0] for split in ((), ("--pp", "2"))]
    assert [row["batch_size"] for row in at] == [64, 64]
    assert at[1]["tokens_per_s_per_gpu"] == pytest.approx(at[0]["tokens_per_s_per_gpu"], rel=0.15)
    assert one["batch_size"] == two["batch_size"] == 64


@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_a_context_is_stopped_by_what_the_next_token_would_exceed(batch: int) -> None:
    (row,) = rows("--batch-size", str(batch), "--max-num-seqs", "1024")
    # nothing limits the time: one sequence ends with the model's positions, many with the KV cache
    assert row["limited_by"] == ("model" if batch == 1 else "memory")
    assert (row["kv_len"] == 131072) == (batch == 1)
    if batch > 1:
        # vLLM's blocks have 16 tokens: the next token needs another one
        blocks, left = divmod(row["kv_len"], 16)
        assert left == 0
        assert row["kv_share"] <= 1.0 < row["kv_share"] / blocks * (blocks + 1)
