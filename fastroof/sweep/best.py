"""Rank the candidates of a sweep over deployments: the best one, the runners-up, and why."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

from fastroof.checks import check_progress, whole_number
from fastroof.errors import SweepError
from fastroof.sweep.answers import Answer, Answers, Choice, Nearest, margins_of, nearest_of, ranked_choices
from fastroof.sweep.deployments import DeploymentSpec, DeploymentSweep
from fastroof.sweep.deployments.columns import OBJECTIVE_COLUMNS
from fastroof.sweep.kind import GpuTables, load_tables_by_gpu
from fastroof.sweep.kinds import load_deployment_spec
from fastroof.sweep.percentile_answer import by_percentile, compared_of, why_mean_of
from fastroof.sweep.percentile_capacity import LEAST_REQUESTS
from fastroof.sweep.percentile_search import PercentileSearch
from fastroof.sweep.replay import Replay, ReplaySearch

MOST_ROWS: Final = 200_000
_KEY_OF: Final = {"request_rate_per_s": "rate"}


def nearest_to_limits(spec: DeploymentSpec, rows: Sequence[dict[str, Any]]) -> Nearest | None:
    """Find the row whose worst excess over a limit is smallest."""
    found = [nearest_of(spec, row, row) for row in rows]
    return min(found, key=lambda one: max(one.exceeds.values(), default=0.0), default=None)


CHOICE_COLUMNS: Final = ("gpu", "mode", "tp", "pp", "dp", "ep", "routing", "dtype", "kv_dtype", "engine")
"""Columns that distinguish choices; replicas, budgets and loads are ways to run the same choice."""

PERCENTILE: Final = 99.0
"""Percentile of each time that limits apply to by default."""


class _OfModel(NamedTuple):
    """Results of the units of one model."""

    rows: list[dict[str, Any]]
    counts: Counter[str]
    given: str


Progress = Callable[[int, int, str], None]
REPORTED: Final = "a number done, the total and what is counted"


class RankingOptions(TypedDict, total=False):
    """Options of :func:`best_deployments`."""

    runners_up: int
    percentile: float | None
    requests: int | None
    seed: int
    threads: int
    progress: Progress | None
    replay: Replay | None


def best_deployments(
    spec: DeploymentSpec | Mapping[str, Any] | str | Path,
    *,
    runners_up: int = 3,
    percentile: float | None = PERCENTILE,
    requests: int | None = None,
    seed: int = 0,
    threads: int = 1,
    progress: Progress | None = None,
    replay: Replay | None = None,
    tables_by_gpu: Mapping[str, GpuTables] | None = None,
) -> Answers:
    """Find the best deployment of each model, and the next best ones of other kinds.

    Parameters
    ----------
    spec : DeploymentSpec, mapping, str or Path
        Deployments to compare, see :func:`fastroof.sweep.load_spec`. Its ``keep``, ``k`` and ``histogram``
        are ignored; each value of a load column in ``per`` gets its own answer.
    runners_up : int
        Maximum number of deployments after the best; each is the best of its GPU, mode, tp, dtypes and
        engine.
    percentile : float or None
        Percentile of each time that limits apply to, by simulation: deployments are ranked by the largest
        rate at which it keeps them, as :func:`fastroof.capacity` finds it; their rows are at that rate. None
        applies limits to the closed form's means. Without limits on times, with the objective
        ``tokens_per_s_per_user``, for a given number of clients (in ``per``) and with draft tokens, answers
        are of means too, and say so.
    requests, seed : int
        With a percentile: number of simulated requests (default: 20 for each request in the system, from
        10,000 to 40,000), and the seed of their Poisson arrivals. Their lengths are those of the load.
    threads : int
        Threads to share the work over; any number gives the same answers.
    progress : callable, optional
        Called with a number done, the total and what is counted: ``candidates``, then ``deployments
        simulated``, whose total grows while more of them may be the best.
    replay : Replay, optional
        A trace to simulate instead of requests at random, each deployment with the settings of its row;
        ``requests`` and ``seed`` do not matter then. Its mean lengths must be the spec's.
    tables_by_gpu : mapping, optional
        Loaded tables by the names of GPUs in the spec (default: they are loaded).

    Returns
    -------
    Answers
        Within the constraints, ordered by the spec's objective; equals go to fewer GPUs, then to shorter
        request latency. With a percentile, ordered by requests/s within it, per GPU or per cost; if a rate is
        given, deployments that serve it come first. Simulated are, from the closed form's best on, all kinds
        that could serve more than the best so far, each with several limits of its steps. First is the
        simplest of those that tie with the best, on its GPU, engine and formats: without separate workers,
        then with a copy split in fewer ways.

    Raises
    ------
    SweepError
        If the spec is invalid or not one of deployments, or the percentile is not one.
    TableError
        If the tables cannot be read.

    Examples
    --------
    >>> spec = {"models": ["llama-3.1-8b"], "tp": [1, 2], "isl": 1000, "osl": 100, "clients": [1, 32],
    ...         "constraints": {"tpot_ms": 20}}
    >>> best, second = best_deployments(spec, percentile=None).answers[0].choices
    >>> best.row["tp"], best.row["clients"], best.margins[0].name, second.row["tp"]
    (1, 32.0, 'tpot_ms', 2)
    >>> answer = best_deployments(spec, requests=1000).answers[0]
    >>> answer.limits_on, answer.choices[0].percentile.limit
    ('p99', 'tpot_p99_ms')
    """
    loaded = load_deployment_spec(spec)
    started = time.perf_counter()
    whole_number("runners_up", runners_up, 0, error=SweepError)
    whole_number("threads", threads, error=SweepError)
    whole_number("requests", LEAST_REQUESTS if requests is None else requests, 2, error=SweepError)
    check_progress(progress, REPORTED, SweepError)
    loads = tuple(name for name in loaded.load_axes if name in loaded.per)
    changes = {"keep": "best", "k": 1, "histogram": False, "per": ["model", *CHOICE_COLUMNS, *loads]}
    narrowed = load_deployment_spec(loaded, changes)
    if tables_by_gpu is None:
        tables_by_gpu = load_tables_by_gpu(DeploymentSweep(loaded))
    why_mean = "" if percentile is None else why_mean_of(loaded, percentile, replay)
    search: PercentileSearch | None = None
    bounds = [narrowed] if replay is None else replay.bounds(narrowed)
    by_model, skipped = evaluate(bounds, tables_by_gpu, threads, progress)
    if replay is not None:
        # without deployments there are no default limits either
        replay.check(percentile, why_mean if any(one.rows for one in by_model.values()) else "")
        assert percentile is not None
        search = ReplaySearch(loaded, tables_by_gpu, percentile, replay, threads, progress)
    elif percentile is not None and not why_mean:
        search = PercentileSearch(loaded, tables_by_gpu, percentile, requests, seed, threads, progress)
    objective = OBJECTIVE_COLUMNS.get(loaded.objective, loaded.objective)
    answers = []
    for model, evaluated in by_model.items():
        if replay is not None:
            # bounds have the tokens that no cache finds
            evaluated.rows[:] = [{**row, "isl": loaded.isl[0]} for row in evaluated.rows]
        counts = evaluated.counts.copy()
        candidates = counts.pop("evaluated")
        for load in itertools.product(*(loaded.load_axes[name] for name in loads)):
            group = dict(zip(loads, load, strict=True))
            rows = [row for row in evaluated.rows if all(row[name] == value for name, value in group.items())]
            choices = _ranked(loaded, objective, rows)
            feasible = candidates - sum(counts.values())
            nearest = None if choices else _nearest(loaded, evaluated.given, group, tables_by_gpu, threads)
            answer = Answer(
                {"model": model, **group}, choices, candidates, feasible, dict(counts), nearest,
                why_mean=why_mean,
            )  # fmt: skip
            if search is not None:
                answer = by_percentile(answer, search, objective, 1 + runners_up)
                skipped += tuple(sorted(search.lost))
            compared = compared_of(loaded, objective, answer.choices)
            answers.append(answer._replace(choices=answer.choices[: 1 + runners_up], families=compared))
    total = sum(evaluated.counts["evaluated"] for evaluated in by_model.values())
    elapsed_s = time.perf_counter() - started
    return Answers(tuple(answers), objective, total, loaded.num_configurations, skipped, elapsed_s)


def evaluate(
    specs: Sequence[DeploymentSpec],
    tables_by_gpu: Mapping[str, GpuTables],
    threads: int,
    progress: Progress | None,
) -> tuple[dict[str, _OfModel], tuple[str, ...]]:
    """Run sweeps in memory; return the remaining rows and the counts of each model, and skipped plans."""
    import pyarrow as pa

    from fastroof.arrow import arrow_schema
    from fastroof.models import load_model
    from fastroof.sweep.executors import local_results

    names = {model: load_model(model).name for model in specs[0].models}
    counts: dict[str, Counter[str]] = {name: Counter() for name in names.values()}
    skipped: dict[str, None] = {}  # a dict as an ordered set
    parts = [(sweep, sweep.units()) for sweep in map(DeploymentSweep, specs)]
    total = sum(unit.size for _, units in parts for unit in units)
    rows = []
    done = 0
    if progress is not None:
        progress(0, total, "candidates")
    for sweep, units in parts:
        batches = []
        results = local_results(sweep, units, tables_by_gpu, threads)
        for unit, result in zip(units, results, strict=True):
            batches.append(result.rows)
            counts[names[unit.plan.model]].update(result.counts)
            model = unit.plan.model
            skipped |= dict.fromkeys(why if model in why else f"{model}: {why}" for _, why in result.skipped)
            done += unit.size
            if progress is not None:
                progress(done, total, "candidates")
        table = pa.Table.from_batches(batches, arrow_schema(sweep.columns, {}))
        rows += sweep.ordered(sweep.reduced(table)).to_pylist()
    by_name = {name: model for model, name in names.items()}
    by_model = {
        name: _OfModel([row for row in rows if row["model"] == name], counted, by_name[name])
        for name, counted in counts.items()
    }
    return by_model, tuple(skipped)


def _nearest(
    spec: DeploymentSpec,
    model: str,
    group: Mapping[str, Any],
    tables_by_gpu: Mapping[str, GpuTables],
    threads: int,
) -> Nearest | None:
    """Find the deployment nearest to limits that no deployment of a model keeps under a load."""
    if spec.num_configurations * len(spec.prefix_hit) > MOST_ROWS:
        return None
    load = "clients" if spec.rate is None else "rate"
    # none has shorter times than under the least load
    changes: dict[str, Any] = {load: [getattr(spec, load)[0]]}
    changes |= {_KEY_OF.get(name, name): [value] for name, value in group.items()}
    changes |= {"models": [model], "keep": "all", "histogram": False, "per": ["model"]}
    narrowed = load_deployment_spec(spec, changes)
    (evaluated,) = evaluate([narrowed], tables_by_gpu, threads, None)[0].values()
    return nearest_to_limits(narrowed, evaluated.rows)


def _ranked(spec: DeploymentSpec, objective: str, rows: Sequence[dict[str, Any]]) -> tuple[Choice, ...]:
    """Order rows, one per kind of deployment, best first."""
    load = "clients" if spec.rate is None else "request_rate_per_s"
    loads = spec.load_axes[load]
    has_edge = len(loads) > 1 and load not in spec.per
    return tuple(
        choice._replace(
            margins=margins_of(spec, choice.row), at_edge=has_edge and choice.row[load] == loads[-1]
        )
        for choice in ranked_choices(spec, objective, [(row, None) for row in rows])
    )
