"""Options of a run, and the providers that can measure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number, shown
from fastroof.errors import MeasureError
from kernels_bench.journal import read_journal, starts
from kernels_bench.operators.communication import ALLREDUCE, COLLECTIVE
from kernels_bench.protocol import Availability, Provider
from kernels_bench.run.card import CPU
from kernels_bench.run.facts import working

PARTS: Final = {ALLREDUCE: ("all-reduce", "allreduce"), COLLECTIVE: ("other collectives", "collectives")}
"""What a journal of ranks holds, and the command that continues it."""


@dataclass(frozen=True)
class Request:
    """Options of a run; the start line records them, so that it can be resumed."""

    # A grid's name or TOML file; the default grid where None.
    grid: str | None = None
    # Name of the GPU, or the path of a gpu.toml; what the driver names where None.
    gpu: str | None = None
    # In order of choice; every one that works but cpu where empty.
    providers: tuple[str, ...] = ()
    # Operators; all where empty.
    only: tuple[str, ...] = ()
    seed: int = 0
    # Seconds the points may be expected to take.
    budget_s: float | None = None


def request_of(journal: Path) -> Request:
    """Read the options of a journal's run."""
    first = starts(read_journal(journal))
    if not first:
        raise MeasureError(f"{journal} stopped before it started; delete it and run again")
    if (part := first[0].get("part")) in PARTS:
        words, command = PARTS[part]
        raise MeasureError(f"{journal} holds {words} only: kernels-bench {command} -o continues it")
    request: Mapping[str, Any] = first[0].get("request", {})
    if set(request) != set(asdict(Request())):
        raise MeasureError(f"{journal} does not record its options: another version wrote it")
    _refuse_odd(journal, request)
    return Request(**{**request, "providers": tuple(request["providers"]), "only": tuple(request["only"])})


def _refuse_odd(journal: Path, request: Mapping[str, Any]) -> None:
    """Refuse options that no run can have."""
    for name, value in request.items():
        if name in ("providers", "only"):
            is_right = isinstance(value, list) and all(isinstance(one, str) for one in value)
            what = "a list of names"
        elif name == "seed":
            is_right, what = is_whole_number(value, 0), "a whole number"
        elif name == "budget_s":
            is_right, what = value is None or (is_number(value) and value > 0), "seconds above 0, or null"
        else:
            is_right, what = value is None or isinstance(value, str), "a text or null"
        if not is_right:
            raise MeasureError(f"{journal}: the recorded options have {name} {shown(value)}, need {what}")


def choose_providers(names: Sequence[str]) -> list[tuple[Provider, Availability]]:
    """Return the providers that work here, in order of choice."""
    known = known_providers()
    have = list(dict.fromkeys(p.name for p in known))
    unknown = [name for name in names if name not in have]
    if unknown:
        raise MeasureError(f"unknown provider {', '.join(unknown)}; there are {', '.join(have)}")
    if CPU in names and set(names) != {CPU}:
        raise MeasureError("cpu measures the host and the others a GPU: pass --providers cpu alone, or not")
    wanted = list(names) or [name for name in have if name != CPU]
    answers = working(p for name in wanted for p in known if p.name == name)
    usable = [(provider, answer) for provider, answer in answers if answer.works]
    if not usable:
        reasons = "; ".join(f"{provider.name}: {answer.reason}" for provider, answer in answers)
        raise MeasureError(
            f"no provider works here ({reasons}); --providers cpu proves the harness without a GPU"
        )
    return usable


def known_providers() -> list[Provider]:
    """Return every provider there is; cpu, which measures only if named, is the last."""
    from kernels_bench.providers import all_providers
    from kernels_bench.providers.cpu import CpuProvider

    return [*all_providers(), CpuProvider()]
