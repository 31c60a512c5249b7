"""What campaigns differ by: scales hold what they claim, medians pool them, and every operator has one."""

from __future__ import annotations

import json
import math
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.operators.registry import OPERATORS
from fastroof.uncertainty import campaign
from fastroof.uncertainty.campaign import (
    BLEND,
    LONG,
    CampaignError,
    CampaignErrors,
    CampaignFigure,
    campaign_error,
    common_scale,
    figures,
    pooled_figures,
    scale_of,
)
from fastroof.uncertainty.leave_one_out import NORMAL_80


@given(st.lists(st.floats(-2.0, 2.0), min_size=5, max_size=200))
def test_so_many_standard_errors_hold_80_percent(log_ratio: list[float]) -> None:
    values = np.array(log_ratio)
    inside = np.mean(np.abs(values) <= NORMAL_80 * scale_of(values) + 1e-12)
    # quantiles lie between two of the values
    assert inside >= 0.8 - 1.0 / len(values)


def test_what_all_points_share_is_common_and_what_averages_out_is_not() -> None:
    rng = np.random.default_rng(1)
    octave = np.repeat(np.arange(10), 400)
    noise = rng.normal(0.0, 0.1, len(octave))
    assert common_scale(noise, octave) < 0.02
    assert common_scale(noise + 0.07, octave) == pytest.approx(0.07, abs=0.005)
    # an octave that is slow and one that is fast are no common factor, but each step has one of them
    swings = np.where(octave % 2 == 0, 0.07, -0.07)
    assert common_scale(noise + swings, octave) == pytest.approx(0.07, abs=0.005)


def figure(family: str, gpu: str, scale: float, common: float = 0.0, kernels: str = "same") -> CampaignFigure:
    return CampaignFigure("gemm", family, gpu, kernels, "long", scale, common, 1, 10)


def test_figures_are_pooled_by_medians_step_by_step() -> None:
    pairs = [
        figure("bf16", "h100", 0.1),
        figure("bf16", "h100", 0.2),
        figure("bf16", "h100", 0.9),
        figure("bf16", "a100", 0.4),
        figure("fp8", "h100", 0.5, kernels="any"),
    ]
    pooled = {(f.family, f.gpu, f.kernels): f for f in pooled_figures(pairs) if f.operator}
    assert {key: f.scale for key, f in pooled.items()} == {
        ("bf16", "h100", "same"): 0.2,
        ("bf16", "a100", "same"): 0.4,
        ("bf16", "", "same"): pytest.approx(0.3),
        ("fp8", "h100", "any"): 0.5,
        ("fp8", "", "any"): 0.5,
        ("", "", "same"): pytest.approx(0.3),
        ("", "", "any"): 0.5,
    }
    assert (pooled["bf16", "h100", "same"].pairs, pooled["bf16", "", "same"].points) == (3, 40)


def test_the_two_parts_make_the_whole() -> None:
    error = figure("bf16", "h100", 0.1, 0.06).error
    assert error == CampaignError(pytest.approx(0.08), 0.06)  # type: ignore[arg-type]
    assert math.sqrt(error.variance) == pytest.approx(0.1)
    # medians of octaves can swing further than 80 % of the points
    assert figure("bf16", "h100", 0.1, 0.15).error == CampaignError(0.0, 0.1)


def test_short_calls_pass_into_long_ones() -> None:
    errors = CampaignErrors(CampaignError(0.2, 0.1), CampaignError(0.1, 0.02))
    factors = np.array([1.0, LONG / BLEND, LONG, LONG * BLEND, 1e6])
    spread, common = errors.at(5.0 * factors, 5.0)
    np.testing.assert_allclose(spread, [0.2, 0.2, 0.15, 0.1, 0.1])
    np.testing.assert_allclose(common, [0.1, 0.1, 0.06, 0.02, 0.02])


def test_the_shipped_file_is_what_the_command_writes() -> None:
    text = (resources.files("fastroof.uncertainty") / campaign.CAMPAIGNS_FILE).read_text("utf-8")
    assert campaign.campaigns_text(json.loads(text)) == text


def test_every_operator_has_an_error_on_any_gpu() -> None:
    for name in OPERATORS:
        for engines in (None, ("sglang", "trtllm"), ("a", "b")):
            errors = campaign_error(name, "bf16", "no such card", engines)
            assert all(0.0 < math.sqrt(error.variance) < 4.0 for error in errors)


def test_the_nearest_figure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def known() -> dict[tuple[str, ...], CampaignFigure]:
        listed = [
            ("gemm", "bf16", "h100", "same", 0.1), ("gemm", "bf16", "", "same", 0.2),
            ("gemm", "", "", "same", 0.3), ("", "", "", "same", 0.4), ("", "", "", "any", 0.5),
            ("gemm", "bf16", "h100", "any", 0.6), ("gemm", "bf16", "h100", "sglang+vllm", 0.7),
        ]  # fmt: skip
        return {
            (*key, length): CampaignFigure(*key, length, scale, 0.0, 1, 1)
            for *key, scale in listed
            for length in ("short", "long")
        }

    monkeypatch.setattr(campaign, "figures", known)

    def spread(*wanted: object) -> float:
        return campaign_error(*wanted).long.spread  # type: ignore[arg-type]

    assert spread("gemm", "bf16", "h100") == 0.1
    assert spread("gemm", "bf16", "l4") == 0.2
    assert spread("gemm", "fp8", "h100") == 0.3
    assert spread("moe", "bf16", "h100") == 0.4
    assert spread("gemm", "bf16", "h100", ("vllm", "sglang")) == 0.7
    assert spread("gemm", "bf16", "h100", ("vllm", "trtllm")) == 0.6
    assert spread("moe", "bf16", "h100", ("vllm", "trtllm")) == 0.5


def test_gemms_of_one_library_differ_by_about_a_tenth() -> None:
    # 7 to 9 % rms between the three engines' campaigns on H100
    shipped = figures()
    for length in ("short", "long"):
        assert 0.06 < shipped["gemm", "bf16", "h100", "same", length].scale < 0.12
        # same rows, same figure: torch's linear is what all three ran
        same = shipped["gemm", "bf16", "h100", "same", length]
        assert shipped["gemm", "bf16", "h100", "any", length].scale == same.scale
