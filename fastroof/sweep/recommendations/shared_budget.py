"""Share a number of GPUs among models, each with its own traffic."""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import numpy as np
import numpy.typing as npt

from fastroof.arrow import ArrowRows
from fastroof.checks import check_progress
from fastroof.columns import Column
from fastroof.config import load_gpu
from fastroof.errors import SweepError
from fastroof.sweep.best import REPORTED, RankingOptions
from fastroof.sweep.deployments import COLUMNS
from fastroof.sweep.recommendations.candidates import MOST_GPUS
from fastroof.sweep.recommendations.files import save_deployments
from fastroof.sweep.recommendations.recommend import (
    MOST_GPUS_TRIED,
    Recommendation,
    recommended,
)
from fastroof.sweep.recommendations.traffic import Traffic, load_shared_spec
from fastroof.sweep.result_rows import rows_as_html, rows_as_table

if TYPE_CHECKING:
    import pyarrow as pa

Floats = npt.NDArray[np.float64]

NODE_GPUS: Final = 8
"""Numbers of GPUs up to this are asked for each model, larger ones only up to about its share."""

MOST_ROUNDS: Final = 8
"""Number of times that a split is improved by asking for numbers of GPUs that were not asked for before."""


@dataclass(frozen=True)
class GpuShare:
    """GPUs of one model, and what it holds on them.

    Attributes
    ----------
    traffic : Traffic
        The model's requests and limits.
    gpus : int
        Number of GPUs that it gets; 0 if the GPUs do not suffice for all models.
    requests_per_s : float
        Largest rate that it holds on them within its limits.
    needed_gpus : int or None
        Fewest GPUs found that hold the wanted rate; None if none of the tried numbers does.
    recommendation : Recommendation or None
        Deployment to run, with runners-up and commands; without GPUs, why no deployment on all GPUs (or the
        most that were tried) keeps the limits, and None if one does.
    """

    traffic: Traffic
    gpus: int
    requests_per_s: float
    needed_gpus: int | None
    recommendation: Recommendation | None

    @property
    def ratio(self) -> float:
        """Return the ratio of the rate held to the rate wanted."""
        return self.requests_per_s / self.traffic.requests_per_s


SHARE_COLUMNS: Final = (
    Column("wanted_requests_per_s", "float", "1/s", "wanted request rate"),
    Column("held_requests_per_s", "float", "1/s", "largest request rate held within the limits"),
    Column("ratio", "float", "", "held_requests_per_s / wanted_requests_per_s"),
    Column("needed_gpus", "int", "GPUs", "fewest GPUs found that hold the wanted rate; empty if none do"),
)
"""Columns of a shared budget that precede those of the deployments."""


@dataclass(frozen=True)
class SharedBudget(ArrowRows):
    """GPUs shared among models.

    Attributes
    ----------
    gpu : str
        Name of the GPU.
    total_gpus : int
        Number of GPUs to share; if none was given, the fewest found that hold all wanted rates, or 0 if
        none of the tried numbers does.
    scale : float
        Smallest ratio of held to wanted rate, the objective: the GPUs hold all rates times this. 0 if they do
        not suffice to run all models.
    shares : tuple of GpuShare
        What each model gets, in the order of the traffics.
    questions : int
        Number of questions (a model on a number of GPUs) that were answered.
    total_s : float
        Time for all of them, s.
    """

    gpu: str
    total_gpus: int
    scale: float
    shares: tuple[GpuShare, ...]
    questions: int
    total_s: float

    @property
    def gpus_left(self) -> int:
        """Return the number of GPUs that no model gets: with them the scale would be the same."""
        return self.total_gpus - sum(share.gpus for share in self.shares)

    @property
    def needed_gpus(self) -> int | None:
        """Return the number of GPUs that hold all wanted rates; None if none of the tried numbers does."""
        needed = [share.needed_gpus for share in self.shares]
        return None if None in needed else sum(gpus or 0 for gpus in needed)

    def to_arrow(self) -> pa.Table:
        """Return the deployment of each model as an Arrow table, one row each.

        Returns
        -------
        pyarrow.Table
            ``wanted_requests_per_s``, ``held_requests_per_s``, ``ratio`` and ``needed_gpus``, then
            :data:`fastroof.sweep.deployments.COLUMNS`; no rows if the scale is 0.
        """
        return rows_as_table((*SHARE_COLUMNS, *COLUMNS), self._rows())

    def _repr_html_(self) -> str:
        """Return the deployments as HTML for notebooks."""
        caption = f"{self.total_gpus:,} x {self.gpu} hold {self.scale:.3g} times the wanted rates"
        return rows_as_html((*SHARE_COLUMNS, *COLUMNS), self._rows(), caption)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "wanted_requests_per_s": share.traffic.requests_per_s,
                "held_requests_per_s": share.requests_per_s,
                "ratio": share.ratio,
                "needed_gpus": share.needed_gpus,
                **share.recommendation.answers.answers[0].choices[0].row,
            }
            for share in self.shares
            if share.gpus and share.recommendation is not None
        ]

    def save(self, folder: str | Path, manifest: str = "kubernetes") -> list[Path]:
        """Write the files of :meth:`Recommendation.save`, one folder per model."""
        found = [share.recommendation for share in self.shares if share.gpus and share.recommendation]
        rows = [choice.row for one in found for answer in one.answers.answers for choice in answer.choices]
        run = [deployment for one in found for deployment in one.deployments if deployment is not None]
        return save_deployments(rows, run, folder, manifest)


class HeldRates:
    """Rates that a model holds on numbers of GPUs: asked for, or those of copies of an asked deployment."""

    def __init__(self, rate_of: Callable[[int], float], wanted: float) -> None:
        self._rate_of = rate_of
        self._wanted = wanted
        self.ratios: dict[int, float] = {}

    def ask(self, gpus: int) -> float:
        """Return the ratio of the rate held on exactly this many GPUs to the wanted one; ask once."""
        if gpus not in self.ratios:
            self.ratios[gpus] = self._rate_of(gpus) / self._wanted
        return self.ratios[gpus]

    def expected(self, most: int, *, with_copies: bool = True) -> Floats:
        """Return the ratio of each number of GPUs up to ``most``, 0 if nothing is known about it."""
        ratios = np.zeros(most + 1)
        if with_copies:
            for gpus, ratio in self.ratios.items():
                multiples = ratios[gpus::gpus]
                np.maximum(multiples, ratio * np.arange(1, len(multiples) + 1), out=multiples)
        for gpus, ratio in self.ratios.items():
            if gpus <= most:
                ratios[gpus] = ratio
        return ratios


def largest_scale(ratios: Sequence[Floats], total_gpus: int) -> tuple[float, list[int]]:
    """Maximize the smallest ratio over all splits of some GPUs; return it and each model's fewest GPUs.

    ``ratios[m][g]`` is the ratio of model m on g GPUs. This is exact: the answer is one of the ratios, and
    the fewest GPUs that reach a ratio grow with it. If every split has a model at 0, it is 0 and no GPUs.
    """
    best = [np.maximum.accumulate(each) for each in ratios]
    scales = np.unique(np.concatenate(best))
    scales = scales[scales > 0.0]

    def fewest(scale: float) -> list[int]:
        return [int(np.searchsorted(each, scale)) for each in best]

    reached = bisect.bisect_left(scales, True, key=lambda scale: sum(fewest(scale)) > total_gpus)
    if not reached:
        return 0.0, [0] * len(best)
    scale = float(scales[reached - 1])
    return scale, fewest(scale)


def first_tried(most: int) -> list[int]:
    """List the numbers of GPUs to ask for first: powers of two, and up to a node halfway between them."""
    powers = [2**power for power in range(most.bit_length())]
    halfway = [3 * power // 2 for power in powers if 1 < power < NODE_GPUS]
    return sorted(gpus for gpus in (*powers, *halfway) if gpus <= most)


def split_gpus(models: Sequence[HeldRates], total_gpus: int) -> tuple[float, list[int]]:
    """Find the split of some GPUs with the largest scale; every number in it was asked for."""
    most = max(total_gpus - len(models) + 1, 0)
    for model in models:
        for gpus in first_tried(most):
            if gpus <= NODE_GPUS or not any(model.ratios.values()):
                model.ask(gpus)
    # large deployments take longest: those much larger than a model's share are not asked for
    _, split = largest_scale([model.expected(total_gpus) for model in models], total_gpus)
    for model, share in zip(models, split, strict=True):
        for gpus in first_tried(min(most, 1 << (share - 1).bit_length()) if share else 0):
            model.ask(gpus)
    for _ in range(MOST_ROUNDS):
        scale, split = largest_scale([model.expected(total_gpus) for model in models], total_gpus)
        new = [(model, gpus) for model, gpus in zip(models, split, strict=True) if gpus not in model.ratios]
        if not new or scale == 0.0:
            return scale, split
        for model, gpus in new:
            model.ask(gpus)
    return largest_scale([model.expected(total_gpus, with_copies=False) for model in models], total_gpus)


def fewest_gpus(model: HeldRates, total_gpus: int) -> int | None:
    """Find the fewest GPUs on which a model holds what is wanted, also beyond those that there are."""
    few = first_tried(max(MOST_GPUS_TRIED, 2 * total_gpus))
    for power in range(few[-1].bit_length()):
        if any(model.ratios.values()):
            break
        model.ask(2**power)
    if not any(model.ratios.values()):
        return None
    for rounds in itertools.count():
        is_late = rounds >= MOST_ROUNDS
        enough = np.flatnonzero(model.expected(MOST_GPUS, with_copies=not is_late) >= 1.0)
        gpus = int(enough[0]) if enough.size else MOST_GPUS
        # one copy on more GPUs than there are may hold more than copies on few
        next_tried = [each for each in few if each <= gpus]
        if enough.size:
            # one GPU fewer is tried too, where workers apart may hold more than copies
            next_tried += [gpus] if is_late or gpus == 1 else [gpus - 1, gpus]
        elif is_late:
            next_tried.append(min(2 * max(model.ratios), MOST_GPUS))
        new = dict.fromkeys(each for each in next_tried if each not in model.ratios)
        if not new:
            return gpus if enough.size else None
        for each in new:
            model.ask(each)
    raise AssertionError("unreachable")


def recommend_shared(
    spec: Mapping[str, Any] | str | Path,
    *,
    gpu_hour_price: float | Mapping[str, float] | None = None,
    **ranking: Unpack[RankingOptions],
) -> SharedBudget:
    """Share a number of GPUs among models, each with its own traffic, or find the fewest that suffice.

    Without ``total_gpus`` each model gets the fewest GPUs that hold its rate. Otherwise the GPUs are split so
    that the smallest ratio of held to wanted rate is as large as possible, and on the fewest GPUs that reach
    it. What a model holds on some GPUs is the rate of its best deployment there, as
    :func:`fastroof.recommend` answers it. Asked for are 1, 2, 3, 4, 6 and 8 GPUs, and powers of two up to a
    model's share. Others are first expected to hold what copies of these hold, and asked for once a split
    uses them.

    Parameters
    ----------
    spec : mapping, str or Path
        ``gpu`` (default: h100), ``total_gpus`` (default: as few as suffice) and ``traffic``, or the path of a
        TOML file with them.
        ``traffic`` is a list of tables with ``model``, ``isl``, ``osl`` (tokens) and ``requests_per_s``, and
        any limits and choices of :func:`fastroof.recommend`, such as ``ttft_ms``, ``tpot_ms``, ``dtype``
        and ``engine``. One of these keys next to ``traffic`` is for all models that do not set it. Default
        limits are those of :func:`fastroof.recommend` on the fewest GPUs that hold a model.
    gpu_hour_price : float or mapping, optional
        Price per GPU-hour, which replaces the spec's.
    **ranking
        As in :func:`fastroof.sweep.best_deployments`; ``progress`` is called with the number of questions
        answered, those known so far, and ``questions``.

    Returns
    -------
    SharedBudget
        GPUs, deployment and commands of each model, the rate it holds, and the GPUs that the wanted rates
        need.

    Raises
    ------
    SweepError
        If the spec is invalid.
    ModelError
        If a model is unknown.
    TableError
        If the tables cannot be read.

    Examples
    --------
    >>> import fastroof
    >>> found = fastroof.recommend_shared({"gpu": "h100", "total_gpus": 3, "isl": 1000, "osl": 200,
    ...     "max_num_batched_tokens": 2048, "max_num_seqs": 64,
    ...     "traffic": [{"model": "llama-3.1-8b", "requests_per_s": 30, "tpot_ms": 30},
    ...     {"model": "qwen3-32b", "requests_per_s": 2, "tpot_ms": 40, "dtype": "fp8"}]})
    >>> [share.gpus for share in found.shares], found.scale > 1.0, found.gpus_left
    ([2, 1], True, 0)
    >>> alone = {"model": "llama-3.1-8b", "isl": 1000, "osl": 200, "requests_per_s": 30, "tpot_ms": 30}
    >>> fastroof.recommend_shared({"max_num_seqs": 64, "traffic": [alone]}).total_gpus
    2
    """
    began = time.perf_counter()
    progress = ranking.get("progress")
    check_progress(progress, REPORTED, SweepError)
    changes = {} if gpu_hour_price is None else {"gpu_hour_price": gpu_hour_price}
    loaded = load_shared_spec(spec, changes)
    loaded = loaded._replace(traffic=tuple(map(loaded.limited, loaded.traffic)))
    ranked: dict[str, Any] = {**ranking, "progress": None}
    answered = 0
    total = loaded.total_gpus or 0
    known = len(loaded.traffic) * len(first_tried(min(max(total - len(loaded.traffic) + 1, 0), NODE_GPUS)))

    def report(questions: int) -> None:
        if progress is not None:
            progress(answered, questions, "questions")

    @functools.cache
    def answer(place: int, gpus: int) -> Recommendation:
        nonlocal answered
        traffic = loaded.traffic[place]
        found = recommended([(loaded.question(traffic, gpus), traffic.default_limits)], ranked)
        answered += 1
        report(max(answered + 1, known))
        return found

    def rate_on(place: int, gpus: int) -> float:
        choices = answer(place, gpus).answers.answers[0].choices
        return float(choices[0].row["requests_per_s"]) if choices else 0.0

    report(max(1, known))
    models = [
        HeldRates(functools.partial(rate_on, place), traffic.requests_per_s)
        for place, traffic in enumerate(loaded.traffic)
    ]
    if total:
        scale, split = split_gpus(models, total)
        needed = [fewest_gpus(model, total) for model in models]
    else:
        needed = [fewest_gpus(model, 0) for model in models]
        split = [gpus or 0 for gpus in needed] if all(needed) else [0] * len(models)
        total = sum(split)
        scale = min(model.ask(gpus) for model, gpus in zip(models, split, strict=True)) if total else 0.0
    shares = []
    for place, (traffic, model, gpus) in enumerate(zip(loaded.traffic, models, split, strict=True)):
        held = rate_on(place, gpus) if gpus else 0.0
        run = answer(place, gpus or total or max(model.ratios))
        is_shown = gpus or not run.answers.answers[0].choices
        shares.append(GpuShare(traffic, gpus, held, needed[place], run if is_shown else None))
    report(answered)
    elapsed_s = time.perf_counter() - began
    return SharedBudget(load_gpu(loaded.gpu).name, total, scale, tuple(shares), answered, elapsed_s)
