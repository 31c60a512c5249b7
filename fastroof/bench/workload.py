"""What a benchmark is: units of work, the bytes they move, and the baselines that do the same units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fastroof.checks import whole_number
from fastroof.config import GpuSpec, load_gpu
from fastroof.models import ModelSpec, load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.tables import Tables

__all__ = ["AGREEMENT", "Baseline", "Setup", "Workload", "new_setup"]

AGREEMENT: Final = 1e-9
"""Largest relative difference of a baseline's answers from fastroof's; sums are added in another order."""


@dataclass(frozen=True)
class Baseline:
    """Another way to do the same units, timed in the same rounds.

    Attributes
    ----------
    name : str
        As in ``"NumPy"``; ``"stream"`` is the loop that only moves the workload's bytes.
    run : callable
        Does ``count`` units, the workload's first ones, and returns their answers.
    count : int
        Units of one call.
    rtol : float or None
        Largest relative difference from fastroof's answers; None where it gives no such answers.
    reports_seconds : bool
        Whether ``run`` returns the seconds that the units took, which are fewer than its own.
    """

    name: str
    run: Callable[[], Any]
    count: int
    rtol: float | None = AGREEMENT
    reports_seconds: bool = False


@dataclass(frozen=True)
class Workload:
    """One thing whose speed is measured.

    Attributes
    ----------
    name : str
        What it is asked for by.
    title : str
        What is done, with its sizes.
    unit : str
        What is counted, in the singular: step, request, lookup, plan, call.
    count : int
        Units of one call.
    run : callable
        Does them, and returns their answers in the units' order.
    bytes_per_unit : float
        Bytes of the caller's arrays that a unit reads and writes; 0 where nothing streams.
    baselines : tuple of Baseline
        What it is compared with.
    reports_seconds : bool
        As of a baseline.
    """

    name: str
    title: str
    unit: str
    count: int
    run: Callable[[], Any]
    bytes_per_unit: float = 0.0
    baselines: tuple[Baseline, ...] = ()
    reports_seconds: bool = False


@dataclass(frozen=True)
class Setup:
    """What workloads are made of.

    Attributes
    ----------
    model, gpu, tables, plan
        The plan that is timed and what it was compiled from.
    threads : int
        Threads of fastroof's own calls; baselines run on one.
    quick : bool
        Sizes small enough that everything runs once within seconds: for tests, not for figures.
    folder : str or None
        Where the tables lie, if not where that GPU's are shipped.
    """

    model: ModelSpec
    gpu: GpuSpec
    tables: Tables
    plan: StepPlan
    threads: int
    quick: bool
    folder: str | None = None

    def size(self, full: int, quick: int) -> int:
        """Choose a number of units."""
        return quick if self.quick else full


def new_setup(
    model: Any,
    gpu: Any,
    tables: Tables,
    *,
    threads: int = 1,
    quick: bool = False,
    folder: str | None = None,
) -> Setup:
    """Compile the plan that workloads time.

    Parameters
    ----------
    model, gpu : str, Path, mapping or spec
        What :func:`fastroof.compile_plan` takes.
    tables : Tables
        Measured tables of that GPU.
    threads : int
        Threads of fastroof's own calls.
    quick : bool
        Small sizes.
    folder : str, optional
        Where the tables lie, if not where that GPU's are shipped.

    Returns
    -------
    Setup
        For the workloads.

    Raises
    ------
    FastroofError
        If threads is no whole number of at least 1, or the plan cannot be compiled.
    """
    whole_number("threads", threads)
    model = model if isinstance(model, ModelSpec) else load_model(model)
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    return Setup(
        model, gpu, tables, compile_plan(model, gpu, tables, engine="kernels"), threads, quick, folder
    )
