"""What a validation says: findings with a severity, gathered into one report a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

__all__ = ["SEVERITIES", "AxisRange", "FileReport", "Finding", "Severity", "worst"]

Severity = Literal["note", "warning", "error"]

SEVERITIES: Final[tuple[Severity, ...]] = ("note", "warning", "error")
"""From harmless to unusable."""


@dataclass(frozen=True)
class Finding:
    """One thing found in a file."""

    kind: str
    severity: Severity
    count: int
    message: str
    worst: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AxisRange:
    """The values of one axis that a file has: how many different ones, least and greatest."""

    name: str
    count: int
    minimum: int
    maximum: int


@dataclass(frozen=True)
class FileReport:
    """What was found in one file of measured rows."""

    file: str
    operator: str
    source: str
    rows: int
    axes: tuple[AxisRange, ...]
    mfu_min: float | None
    mfu_max: float | None
    bandwidth_max_bytes_per_s: float | None
    bandwidth_limit_bytes_per_s: float
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """The gravest finding's severity, ``"note"`` if there is none."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default="note")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON can hold."""
        return {**asdict(self), "severity": self.severity}


def worst(reports: Iterable[FileReport]) -> Severity:
    """Return the gravest severity of all reports, ``"note"`` if there is none."""
    return max((r.severity for r in reports), key=SEVERITIES.index, default="note")
