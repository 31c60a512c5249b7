"""How far off an engine's serving estimates are, on runs that no fit has seen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from fastroof.engines.values import check_number

__all__ = ["NO_ERRORS", "ServingErrors"]


@dataclass(frozen=True)
class ServingErrors:
    """Errors of an engine's estimates, as measured serving shows them.

    Attributes
    ----------
    tpot, ttft : float
        One standard error of the time per output token, and of the time to first token where requests do
        not queue, over the time (in ln): 80 % of the runs of models, GPUs and versions that a fit has not
        seen are within 1.28 of them. 0 where unknown.

    Raises
    ------
    PlanError
        If one is no number of at least 0.
    """

    tpot: float = 0.0
    ttft: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no error."""
        for error in fields(self):
            value = check_number(f"{error.name} of [errors]", getattr(self, error.name))
            object.__setattr__(self, error.name, value)


NO_ERRORS: Final = ServingErrors()
"""Nothing is known."""
