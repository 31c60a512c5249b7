"""Reader of the keys of a gpu.toml, and the limits of their values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from fastroof.checks import is_number, shown
from fastroof.errors import GpuError

LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "peak_tflops": (1e-3, 1e7),
    "hbm_tb_per_s": (1e-4, 1e4),
    "hbm_gib": (1e-2, 1e6),
    "nvlink_gb_per_s": (1e-3, 1e6),
    "pcie_gb_per_s": (1e-3, 1e6),
    "inter_node_gb_per_s": (1e-3, 1e6),
    "l2_mib": (1e-3, 1e6),
    "num_sms": (1, 1e6),
    "linked_gpus": (1, 1e6),
    "modelled_error": (1e-3, 10),
    "tdp_w": (1e-1, 1e5),
    "idle_w": (1e-2, 1e5),
}
"""Minimum and maximum of the values in a gpu.toml, in their units."""


class Keys:
    """Reader of a gpu.toml's keys, which collects what is missing or wrong for one error."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def check(self) -> None:
        """Raise the error, if anything is missing or wrong."""
        problems = self.wrong
        if self.missing:
            is_one = len(self.missing) == 1
            words = "key {} is missing" if is_one else "keys {} are missing"
            problems = [words.format(", ".join(self.missing)), *problems]
        if problems:
            raise GpuError(f"{self.where}: {'; '.join(problems)}")

    def known(self, table: Mapping[str, Any], known: tuple[str, ...] | list[str], prefix: str) -> None:
        """Note keys that are not among the valid ones."""
        for key in table:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f", did you mean {prefix}{close[0]}?" if close else ""
                self.wrong.append(f"unknown key {prefix}{key}; valid are {', '.join(known)}{hint}")

    def table(self, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        """Return the table of a key; empty without one."""
        table = data.get(key, {})
        if not isinstance(table, Mapping):
            self.wrong.append(f"{key} must be a table, got {shown(table)}")
            return {}
        return table

    def text(self, data: Mapping[str, Any], key: str, prefix: str = "") -> str:
        """Return the text of a key."""
        text = data.get(key)
        if key not in data:
            self.missing.append(f"{prefix}{key}")
        elif not isinstance(text, str) or not text.strip():
            self.wrong.append(f"{prefix}{key} must be text, got {shown(text)}")
        return str(text)

    def aliases(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names under ``aliases``."""
        aliases = data.get("aliases", [])
        if not isinstance(aliases, list | tuple) or not all(
            isinstance(a, str) and a.strip() for a in aliases
        ):
            self.wrong.append(f"aliases must be a list of names, got {shown(aliases)}")
            return ()
        return tuple(aliases)

    def count(self, table: Mapping[str, Any], key: str, prefix: str) -> int:
        """Return a count of at least 1."""
        value = self.amount(table, key, 1, prefix)
        if value.is_integer():
            return int(value)
        if not math.isnan(value):
            self.wrong.append(f"{prefix}{key} must be a whole number, got {table[key]!r}")
        return 0

    def amount(self, table: Mapping[str, Any], key: str, unit: float, prefix: str) -> float:
        """Return the value of a key in base units, above zero; nan if it has none."""
        value = table.get(key)
        name = f"{prefix}{key}"
        least, most = LIMITS[key if key in LIMITS else "peak_tflops"]
        if key not in table:
            self.missing.append(name)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong.append(f"{name} must be a number, got {shown(value)}")
        elif not (is_number(value) and value > 0):
            self.wrong.append(f"{name} must be above zero and finite, got {shown(value, 40)}")
        elif not least <= value <= most:
            self.wrong.append(f"{name} must be from {least:g} to {most:g}, got {shown(value, 40)}")
        else:
            # decimal, because 2.039 * 1e12 in float is not 2.039e12
            return float(Decimal(repr(value)) * Decimal(unit))
        return math.nan
