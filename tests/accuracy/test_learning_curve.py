"""Groups of the public sample taken for clusters of a user's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fastroof
from benchmarks.accuracy import learning_curve_on_sample as on_sample
from benchmarks.accuracy.rows import shipped_rows
from fastroof.evidence.kernel_times import kernel_times, predicted_us
from fastroof.evidence.validation import is_waiting


def test_a_group_of_the_sample_stands_for_a_users_cluster(
    h100: fastroof.Tables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = [row for row in shipped_rows("h100") if row.model == "qwen3-32b" and not row.left_out]
    # of runs that wait for their place the time per token may be that of a smaller batch
    group = [row for row in sample if row.engine_version == "0.5.1.post1" and not is_waiting(row)][:6]
    fewer = [row for row in sample if row.engine_version == "0.12.0"][:5]
    off = [
        replace(group[0], left_out="twice as slow"),
        replace(group[0], tpot_ms=0.0),
        replace(group[0], decode_workers=1, prefill_workers=1),
    ]
    monkeypatch.setattr(on_sample, "LEAST_RUNS", 6)
    monkeypatch.setattr(on_sample, "load_tables", lambda gpu: h100)
    monkeypatch.setattr(on_sample, "read_silicon_sample", lambda gpu: ((*off, *fewer, *group), (), {}))
    (curve,) = on_sample.curves_on("h100", draws=2)
    assert curve[:5] == ("h100", "sglang", "0.5.1.post1", "qwen3-32b", "bf16")
    assert curve.runs == 6
    # kernels with given costs and the packaged profile: of all runs, each by a plan of its own
    of_kernels: list[float] = []
    of_profile: list[float] = []
    for row in group:
        for errors, profile in ((of_kernels, row.engine_profile.unfitted()), (of_profile, None)):
            times = kernel_times([row], h100, row.engine_profile if profile is None else profile)
            costs = on_sample._packaged(row) if profile is None else {}
            errors.append(abs(float(predicted_us(times, costs)[0]) / float(times.measured_us[0]) - 1.0))
    assert curve.kernels == pytest.approx(np.mean(of_kernels))
    assert curve.packaged == pytest.approx(np.mean(of_profile))
    assert list(curve.by_size) == [3]
    on_sample.print_curves([curve, curve._replace(gpu="h200", runs=4, kernels=curve.kernels + 0.2)])
    lines = capsys.readouterr().out.splitlines()
    first, last = lines[2:]
    assert first.startswith(f"| sglang 0.5.1.post1 | h100 h200 | 2 | 10 | {curve.kernels + 0.1:.1%} | ")
    assert last.startswith("| all | h100 h200 | 2 | 10 | ")
    assert last.endswith(f"| {curve.packaged:.1%} | {curve.by_size[3]:.1%} |  |  |  |")
