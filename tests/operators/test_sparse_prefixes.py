"""Prices of prefixes of sparse attention: against a table made of known ones, and measured prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.arrays import Floats
from fastroof.operators.attention_work import PrefixUs, measured_price
from fastroof.operators.registry import OPERATORS
from fastroof.operators.sparse_attention import fitted_price
from fastroof.pack.ragged import RaggedTable, pack_ragged

WINDOW = 64
PRICE = PrefixUs(3e-3, 2e-2, 5e-3, 4e-2)


def prefix_us(price: PrefixUs, q_len: int, prefix: int, window: int = WINDOW) -> float:
    """A prefix of one sequence, query after query."""
    near = sum(min(prefix + i, window) - min(i, window) for i in range(1, q_len + 1))
    far = price.pair * q_len * prefix + price.token * prefix
    return far + price.window_pair * near + price.window_token * min(prefix, window - 1)


def table(prefixes: tuple[int, ...], price: PrefixUs = PRICE, outlier: float = 1.0) -> RaggedTable:
    """Prompts whose prefixes cost a known price; one in five of them is off by a factor."""
    points, latency_us = [], []
    for batch in (1, 4):
        for q_len in (1, 16, 100, 300):
            for number, prefix in enumerate(prefixes):
                us = 50.0 + batch * (q_len * 0.5 + prefix_us(price, q_len, prefix))
                points.append((batch, q_len, prefix))
                latency_us.append(us * (outlier if prefix and number % 5 == 3 else 1.0))

    def work_us(batch: Floats, q_len: Floats, prefix: Floats) -> Floats:
        return np.asarray(batch * q_len * (1.0 + prefix))

    axes = tuple(np.array(axis, np.float64) for axis in zip(*points, strict=True))
    return pack_ragged(axes, np.array(latency_us), work_us)


LONG = (0, 8, 32, 64, 100, 200, 500, 1000, 3000)


def test_a_table_of_known_prices_gives_them_back() -> None:
    fitted = fitted_price(table(LONG), PrefixUs(), WINDOW)
    assert fitted == pytest.approx(PRICE, rel=1e-6)
    # prompts that are off do not move it, as a mean of squares would
    assert fitted_price(table(LONG, outlier=3.0), PrefixUs(), WINDOW) == pytest.approx(PRICE, rel=0.05)


def test_no_part_is_below_the_roofline_or_below_nothing() -> None:
    least = PRICE.times(2.0)
    assert fitted_price(table(LONG), least, WINDOW) == pytest.approx(least, rel=1e-9)
    free = PrefixUs(0.0, 2e-2, 5e-3, 0.0)
    assert fitted_price(table(LONG, free), PrefixUs(), WINDOW) == pytest.approx(free, rel=1e-6, abs=1e-9)


def test_short_prefixes_do_not_fit_unbounded_growth() -> None:
    assert fitted_price(table((0, 8, WINDOW)), PrefixUs(), WINDOW) is None
    assert fitted_price(table((0,)), PrefixUs(), WINDOW) is None
    assert fitted_price(table(LONG), PrefixUs(), 0) is None


def test_prompts_give_the_ratio_to_the_roofline_s_price() -> None:
    roofline = PrefixUs(1e-3, 7e-3, 2e-3, 5e-3)
    paying = table(LONG, roofline.times(3.0, 1.5))
    assert measured_price(paying, roofline, WINDOW) == pytest.approx((3.0, 1.5), rel=1e-6)
    # never less than the roofline, for either part
    for far, near in ((0.5, 0.25), (3.0, 0.5)):
        less = table(LONG, roofline.times(far, near))
        assert measured_price(less, roofline, WINDOW) == pytest.approx((max(far, 1.0), 1.0), rel=1e-6)
    without = table(LONG, PrefixUs(3e-3, 21e-3))
    assert measured_price(without, roofline, 0) == pytest.approx((3.0, 1.0), rel=1e-6)


@pytest.fixture(scope="module")
def sglang() -> Any:
    return fastroof.load_tables("h100", source="aiconfigurator-sglang-0.5.14")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm-5", "deepseek-v3.2"])
def test_measured_prompts_pay_about_the_price(sglang: Any, model: str) -> None:
    operator: Any = OPERATORS["dsa_prefill"]
    key = ("fp8_block", "bf16", "bf16", model, 16)
    topk = 2048
    packed = sglang.packed(operator, key)
    points, measured_us = packed.points(), packed.latency_us
    batch, q_len, prefix = points
    fresh_us, origin = np.empty(len(batch)), np.empty(len(batch), np.uint8)
    packed.latency((batch, q_len, np.zeros(len(batch))), fresh_us, origin)
    some = np.flatnonzero((prefix > 0) & (q_len >= 128))[::7]

    def errors(price: PrefixUs) -> Floats:
        added = [prefix_us(price, int(q_len[i]), int(prefix[i]), topk) for i in some]
        return np.abs((fresh_us[some] + batch[some] * added) / measured_us[some] - 1.0)

    price = operator.prefix_us(sglang, key, topk)
    roofline = operator.prefix_prices(key, sglang.gpu, topk)
    assert all(a >= b > 0.0 for a, b in zip(price, roofline, strict=True))
    by_ratio = errors(roofline.times(operator.prefix_ratio(sglang, key)))
    # gated against collapse alone: 0.11 and 0.10, of the longest prompt's ratio 0.23 and 0.13
    assert np.median(errors(price)) < min(0.2, float(np.median(by_ratio)))


def test_a_donor_s_price_is_scaled_by_the_roofline(sglang: Any) -> None:
    operator: Any = OPERATORS["dsa_prefill"]
    # its fp8_block rows are flagged as launched by the host, so they are no donors
    measured, wanted = (("bf16", "bf16", "bf16", "glm-5", heads) for heads in (16, 20))
    assert operator.step_kernels(sglang, wanted)[0].key == measured
    borrowed, price = (operator.prefix_us(sglang, key, 2048) for key in (measured, wanted))
    own, of_donor = (operator.prefix_prices(key, sglang.gpu, 2048) for key in (wanted, measured))
    for got, from_donor, a, b in zip(price, borrowed, own, of_donor, strict=True):
        assert got == pytest.approx(from_donor * a / b)
    # scores know no heads of attention, what is picked does
    assert price.pair == pytest.approx(borrowed.pair, rel=1e-6)
    assert price.window_pair == pytest.approx(borrowed.window_pair * 20 / 16, rel=1e-6)
