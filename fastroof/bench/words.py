"""Times and rates as a person reads them."""

from __future__ import annotations

from typing import Final

__all__ = ["rate_of", "share_of", "time_of_ns"]

_TIMES: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_RATES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def time_of_ns(ns: float) -> str:
    """Write a time in the unit it is read in best.

    Examples
    --------
    >>> time_of_ns(1.934), time_of_ns(310_000_000.0)
    ('1.93 ns', '310 ms')
    """
    factor, unit = next(((f, u) for f, u in _TIMES if ns >= f), _TIMES[-1])
    return f"{_three_digits(ns / factor)} {unit}"


def rate_of(units_per_s: float) -> str:
    """Write units a second: ``517 M/s``.

    Examples
    --------
    >>> rate_of(517e6), rate_of(1.25)
    ('517 M/s', '1.25 /s')
    """
    factor, prefix = next(((f, p) for f, p in _RATES if units_per_s >= f), _RATES[-1])
    return f"{_three_digits(units_per_s / factor)} {prefix}/s"


def share_of(share: float) -> str:
    """Write a share in percent.

    Examples
    --------
    >>> share_of(0.612), share_of(0.0134)
    ('61 %', '1.3 %')
    """
    return f"{share * 100.0:.0f} %" if share >= 0.0995 else f"{share * 100.0:.2g} %"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
