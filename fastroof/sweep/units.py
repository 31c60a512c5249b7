"""A sweep as a list of pieces that depend on no other: one plan each, and a slice of what it is asked for."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.models import load_model
from fastroof.sweep.deployments.layouts import layouts, num_layouts
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.spec import SweepSpec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PlanKey", "UnitResult", "WorkUnit", "work_units"]

EVALUATIONS_A_UNIT: Final = 2**26
ROWS_A_UNIT: Final = 2**18
CANDIDATES_A_UNIT: Final = 2**18
"""Neither takes more than a fraction of a second: how long an interrupt has to wait."""
KEPT_A_UNIT: Final = 2**14
"""Candidates of a unit that writes them all: a row takes half a kB."""


class PlanKey(NamedTuple):
    """What a plan is compiled from, as the spec names it."""

    model: str
    gpu: str
    tp: int
    dtype: str
    kv_dtype: str
    runtime: str


class WorkUnit(NamedTuple):
    """A piece of work that depends on no other, small and picklable.

    Attributes
    ----------
    number : int
        Place in the list, from 0; rows are written in this order.
    plan : PlanKey
        What to evaluate.
    mode : str
        ``steps``, ``aggregated`` or ``disaggregated``.
    start, stop : int
        Which of the plan's candidates, or for steps which of the spec's kv_len.
    size : int
        Evaluations: how much work it is, and what progress counts.
    is_last : bool
        Whether it is the plan's last.
    """

    number: int
    plan: PlanKey
    mode: str
    start: int
    stop: int
    size: int
    is_last: bool


class UnitResult(NamedTuple):
    """What a unit comes to.

    Attributes
    ----------
    rows : pyarrow.RecordBatch
        Of the results' schema, already reduced to what may be kept.
    counts : dict of str to int
        ``evaluated``, and how many of them are infeasible by reason.
    skipped : tuple of (str, str)
        Reasons and names of what was left out whole.
    best : tuple
        For steps the :class:`BestStep` of the plan that is done; empty for deployments.
    histograms : dict
        Counts of the objective's values by group, where they are asked for.
    evaluate_s : float
        Seconds spent evaluating, without compiling the plan.
    """

    rows: pa.RecordBatch
    counts: dict[str, int]
    skipped: tuple[tuple[str, str], ...] = ()
    best: tuple[Any, ...] = ()
    histograms: dict[tuple[Any, ...], list[int]] = {}  # noqa: RUF012 - a default that nobody changes
    evaluate_s: float = 0.0


def work_units(spec: SweepSpec | DeploymentSpec) -> list[WorkUnit]:
    """Cut a sweep into units, always the same ones.

    Parameters
    ----------
    spec : SweepSpec or DeploymentSpec
        What to sweep.

    Returns
    -------
    list of WorkUnit
        In the order of the rows: models, GPUs, modes, tp, dtypes, kv_dtypes, runtimes. Plans that cannot
        be compiled have units too, which count what is lost.

    Examples
    --------
    >>> from fastroof.sweep import load_spec, work_units
    >>> spec = {"models": ["llama-3.1-8b"], "tp": [1, 2], "isl": 1000, "osl": 100, "concurrency": [1, 8]}
    >>> [(unit.plan.tp, unit.start, unit.stop) for unit in work_units(load_spec(spec))]
    [(1, 0, 2), (2, 0, 2)]
    """
    pieces = _step_pieces(spec) if isinstance(spec, SweepSpec) else _deployment_pieces(spec)
    return [WorkUnit(number, *piece) for number, piece in enumerate(pieces)]


def _slices(length: int, most: int) -> list[tuple[int, int]]:
    """Cut a length into slices; one that is empty where there is nothing."""
    most = max(1, most)
    return [(start, min(start + most, length)) for start in range(0, length, most)] or [(0, 0)]


def _step_pieces(spec: SweepSpec) -> list[tuple[PlanKey, str, int, int, int, bool]]:
    batches = len(spec.batch_size)
    rows_a_length = batches if spec.keep == "all" else 1
    most = min(ROWS_A_UNIT // rows_a_length, EVALUATIONS_A_UNIT // batches)
    found = []
    for model in spec.models:
        longest = load_model(model).max_position
        within = sum(kv_len <= longest for kv_len in spec.kv_len)
        for tp, dtype, kv_dtype in itertools.product(spec.tp, spec.dtype, spec.kv_dtype):
            key = PlanKey(model, spec.gpu, tp, dtype, kv_dtype, spec.runtime)
            for start, stop in _slices(within, most):
                found.append((key, "steps", start, stop, (stop - start) * batches, stop == within))
    return found


def _deployment_pieces(spec: DeploymentSpec) -> list[tuple[PlanKey, str, int, int, int, bool]]:
    grid = math.prod(map(len, spec.grid.values()))
    most = KEPT_A_UNIT if spec.keep == "all" else CANDIDATES_A_UNIT
    found = []
    for model, gpu, mode, tp in itertools.product(spec.models, spec.gpus, spec.mode, spec.tp):
        possible = len(layouts(spec, mode, tp))
        # a unit of what cannot be laid out counts it
        impossible = (num_layouts(spec, mode, tp) - possible) * grid
        for dtype, kv_dtype, runtime in itertools.product(spec.dtype, spec.kv_dtype, spec.runtime):
            key = PlanKey(model, gpu, tp, dtype, kv_dtype, runtime)
            for start, stop in _slices(possible * grid, most):
                size = stop - start + (impossible if start == 0 else 0)
                found.append((key, mode, start, stop, size, stop == possible * grid))
    return found
