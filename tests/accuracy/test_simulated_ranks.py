"""Measured runs of several ranks, simulated."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.accuracy import simulated_ranks


@pytest.mark.slow
def test_every_run_of_several_ranks_is_simulated_or_left_out_with_a_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_ranks, "ROUNDS", 2)
    skipped: Counter[str] = Counter()
    runs = list(simulated_ranks.rank_runs(skipped, ["h100"]))
    assert len(runs) == 5
    assert not skipped
    for one in runs:
        assert one.run.row.dp > 1
        # the closed form and the simulation are of one engine
        assert one.simulated_ms == pytest.approx(one.run.prediction.tpot_ms, rel=0.35)
    simulated_ranks.main(["h100"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["runs", "n", "estimate", "simulate"]
    assert len(printed) == 3
