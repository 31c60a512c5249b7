"""Recommend the best deployment for a model on some GPUs within limits, and its commands."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from fastroof.arrow import ArrowRows
from fastroof.checks import check_progress, shown, whole_number
from fastroof.config import load_gpu
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import SweepError
from fastroof.models import TP_SIZES, load_model
from fastroof.sweep.answers import Answer, Answers
from fastroof.sweep.best import PERCENTILE, REPORTED, RankingOptions, best_deployments
from fastroof.sweep.deployments import DeploymentSpec, DeploymentSweep
from fastroof.sweep.kind import load_tables_by_gpu
from fastroof.sweep.kinds import load_deployment_spec
from fastroof.sweep.percentile_capacity import LIMITED
from fastroof.sweep.recommendations.candidates import (
    BUDGETS,
    LEAST_SEQS,
    MOST_GPUS,
    budgets_to_try,
    clients_to_try,
    default_limits,
    layouts_to_try,
    listed,
    modes_to_try,
    prompt_alone_ms,
    seqs_to_try,
)
from fastroof.sweep.recommendations.deployment import Deployment, deployment_of
from fastroof.sweep.recommendations.files import save_deployments
from fastroof.sweep.replay import Replay

if TYPE_CHECKING:
    import pyarrow as pa


Names = str | Path | Sequence[str | Path]


class QuestionOptions(TypedDict, total=False):
    """Options of :func:`recommend` that say which deployments to compare."""

    ttft_ms: float | None
    tpot_ms: float | None
    itl_ms: float | None
    request_latency_ms: float | None
    dtype: Names
    kv_dtype: Names
    engine: Names | None
    max_num_batched_tokens: int | Sequence[int] | None
    max_num_seqs: int | Sequence[int] | None
    mode: Names | None
    most_gpus_each: int | None
    prefix_hit: float
    front_end: str | float | None
    lora: str | None
    gpu_hour_price: float | Mapping[str, float] | None
    objective: str | None
    tables: str | Path | None
    allow_modelled: bool
    speculation: Mapping[str, Any] | None


class RecommendOptions(QuestionOptions, RankingOptions, total=False):
    """Options of :func:`recommend`."""


def deployment_question(
    model: str | Path,
    gpu: Names = "h100",
    *,
    total_gpus: int,
    isl: int,
    osl: int,
    **options: Unpack[QuestionOptions],
) -> DeploymentSpec:
    """Return the deployments to compare for a model on a number of GPUs.

    Parameters
    ----------
    model : str or Path
        Preset, Hugging Face id of one, or path of a config.json.
    gpu : str, Path or sequence of them
        GPUs to choose from; a deployment uses one kind.
    total_gpus : int
        Number of GPUs of one kind; replicas of the model fill them.
    isl, osl : int
        Tokens per prompt and per output.
    **options
        From ``ttft_ms`` to ``allow_modelled``, as in :func:`fastroof.recommend`, but without default limits.

    Returns
    -------
    DeploymentSpec
        All layouts of :func:`layouts_to_try` in every mode, with numbers of clients up to the maximum that
        can run.

    Raises
    ------
    SweepError
        If an argument is invalid.

    Examples
    --------
    >>> spec = deployment_question("llama-3.1-8b", total_gpus=2, isl=1000, osl=100, tpot_ms=20)
    >>> [split.tp for split in spec.split], spec.max_num_batched_tokens, spec.clients[-1]
    ([1, 2], (1024, 2048, 4096, 8192), 2049)
    """
    unknown = [name for name in options if name not in QuestionOptions.__annotations__]
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    whole_number("total_gpus", total_gpus, most=MOST_GPUS, error=SweepError)
    whole_number("osl", osl, error=SweepError)
    loaded = load_model(model)
    gpus = [load_gpu(name) for name in listed(gpu)]
    node = min([*(each.linked_gpus for each in gpus), TP_SIZES[-1]])
    chosen = {name: value for name, value in options.items() if value is not None}
    given_most: Any = chosen.pop("most_gpus_each", MOST_GPUS)
    most_gpus_each = whole_number("most_gpus_each", given_most, most=MOST_GPUS, error=SweepError)
    price = chosen.get("gpu_hour_price")
    if isinstance(price, Mapping):
        chosen["gpu_hour_price"] = dict(price)
    if "engine" in chosen:
        chosen["engine"] = [str(name) for name in listed(chosen["engine"])]
    limits = {name: chosen.pop(name) for name in LIMITED if name in chosen}
    values: dict[str, Any] = {
        "models": [str(model)],
        "gpus": [str(name) for name in listed(gpu)],
        "split": layouts_to_try(loaded, total_gpus, node, most_gpus_each),
        "total_gpus": total_gpus,
        "isl": isl,
        "osl": osl,
        "constraints": {name: limit for name, limit in limits.items() if limit != math.inf},
        "objective": "tokens_per_s_per_gpu" if price is None else "cost",
        "clients": 1,
        **modes_to_try(gpus, total_gpus, node, osl, chosen),
        # the other values depend on the defaults that the spec fills in
        "max_num_batched_tokens": BUDGETS[0],
        "max_num_seqs": LEAST_SEQS,
        **chosen,
    }
    spec = load_deployment_spec(values)
    engines = [load_engine(name).on(each) for name in spec.engine for each in gpus]
    changes: dict[str, Any] = {}
    if "max_num_seqs" not in chosen:
        changes["max_num_seqs"] = seqs_to_try(engines)
    changes["clients"] = clients_to_try(total_gpus, max(changes.get("max_num_seqs", spec.max_num_seqs)))
    if "max_num_batched_tokens" not in chosen:
        changes["max_num_batched_tokens"] = budgets_to_try(engines, spec.isl[0])
    return load_deployment_spec(values | changes)


MOST_GPUS_TRIED: Final = 64


@dataclass(frozen=True)
class Recommendation(ArrowRows):
    """Recommended deployments, and how to run them.

    Attributes
    ----------
    answers : Answers
        For each model the recommended deployment and runners-up, from
        :func:`fastroof.sweep.best_deployments`.
    deployments : tuple of Deployment or None
        How to run the recommended ones, in the same order; None if no deployment is within the limits.
    specs : tuple of DeploymentSpec
        Compared deployments, one spec per model; a single one if a spec was given.
    would_fit : dict of str to dict
        For models that do not fit on the GPUs: the row of a deployment on more GPUs that fits.
    """

    answers: Answers
    deployments: tuple[Deployment | None, ...]
    specs: tuple[DeploymentSpec, ...]
    would_fit: dict[str, dict[str, Any]]

    @property
    def _profiles(self) -> dict[str, EngineProfile]:
        return {one.name: one for spec in self.specs for one in map(load_engine, spec.engine)}

    @property
    def engine_titles(self) -> dict[str, str]:
        """Compared engines by name: with their versions, and the end of measured runs."""
        return {name: profile.title for name, profile in self._profiles.items()}

    @property
    def engines(self) -> list[dict[str, str | None]]:
        """The same for JSON."""
        return [profile.facts for profile in self._profiles.values()]

    def to_arrow(self) -> pa.Table:
        """Return the recommended deployments and the runners-up as an Arrow table, one row each.

        Returns
        -------
        pyarrow.Table
            ``place``, ``standing`` and ``behind``, then
            :data:`fastroof.sweep.deployments.COLUMNS`.
        """
        return self.answers.to_arrow()

    def _repr_html_(self) -> str:
        """Return the recommended deployments and the runners-up as HTML for notebooks."""
        return self.answers._repr_html_()

    def save(self, folder: str | Path, manifest: str = "kubernetes") -> list[Path]:
        """Write the files to run the recommended deployments, and the rows of the ranked ones.

        Parameters
        ----------
        folder : str or Path
            Output folder. Existing files of the same name are replaced, others stay. Several models or loads
            get a folder each.
        manifest : str
            Platform to write a manifest for: ``kubernetes``; ``dynamo``, a DynamoGraphDeployment; or
            ``llm-d``, Deployments and the values of its router's Helm chart.

        Returns
        -------
        list of Path
            The written files: for each deployment scripts that start its copies, the router in front of them
            and everything, one that measures it, YAML that these read, the manifest (for Kubernetes alone if
            a copy fits on a node), and the rows as Parquet and CSV.

        Raises
        ------
        SweepError
            If a file cannot be written, or the platform cannot run a deployment. Writes are atomic.
        """
        rows = [choice.row for answer in self.answers.answers for choice in answer.choices]
        deployments = [one for one in self.deployments if one is not None]
        return save_deployments(rows, deployments, folder, manifest)


def recommend(
    model: Names,
    gpu: Names = "h100",
    *,
    total_gpus: int,
    isl: int | None = None,
    osl: int | None = None,
    **options: Unpack[RecommendOptions],
) -> Recommendation:
    """Recommend deployments for models on a number of GPUs within limits.

    Parameters
    ----------
    model : str, Path or sequence of them
        Presets, Hugging Face ids of them, or paths of config.json files; each gets its own answer.
    gpu : str, Path or sequence of them
        GPUs to choose from.
    total_gpus : int
        Number of GPUs of one kind.
    isl, osl : int
        Tokens per prompt and per output; of a ``replay`` they are those of its trace.
    **options
        Any of the following.

    Other Parameters
    ----------------
    ttft_ms, tpot_ms, itl_ms, request_latency_ms : float, optional
        Maximum time to first token, per output token, between two tokens, and of a request, ms: of the 99th
        percentile, or of what ``percentile`` says. ``math.inf`` removes a limit. Default: for TTFT 1 s more
        than a prompt alone takes on the fastest compared deployment, for TPOT 50 ms; neither if
        ``request_latency_ms`` is given, and ``itl_ms`` replaces that of TPOT. They are in the answers'
        ``default_limits``.
    dtype, kv_dtype : str or sequence of str
        Formats to choose from (default: ``auto``, the checkpoint's).
    engine : str, Path or sequence of them
        Engines to choose from (default: vllm).
    max_num_batched_tokens : int or sequence of int
        Maximum tokens per step to choose from (default: the engines' own, smaller powers of two from
        1,024 on, and a whole prompt if an engine does not chunk prompts).
    max_num_seqs : int or sequence of int
        Maximum numbers of concurrent requests per replica to choose from (default: the engine's own, and
        smaller ones from 16 on, which leave more memory for KV cache).
    mode : str or sequence of str
        ``aggregated``: replicas prefill and decode; ``disaggregated``: separate workers do (default: both;
        only the first with one GPU, outputs of one token or a prefix cache, and beyond a node if the GPU's
        file has no ``inter_node_gb_per_s``).
    most_gpus_each : int
        Maximum number of GPUs of a replica or worker; those of a node (8) leave out expert parallelism and
        pipeline stages across nodes (default: no limit).
    prefix_hit : float
        Share of each prompt found in the prefix cache (default: 0).
    front_end : str or float, optional
        As in :func:`fastroof.compile_plan`: TTFT limits are on what clients see (default: the engines' own).
    lora : str, optional
        LoRA adapters of all requests, ``RANK[:ADAPTERS[:MODULES]]`` as in :func:`fastroof.compile_plan`
        (default: none).
    gpu_hour_price : float or mapping, optional
        Price per GPU-hour, for all or by GPU.
    objective : str
        As in a spec (default: the lowest cost if prices are given, otherwise the most tokens/s per GPU).
    tables : str or Path
        A folder of measured tables, or ``datasheet`` for none (default: each GPU's own).
    allow_modelled : bool
        Whether the datasheet model may replace kernels that were not measured (default: no).
    speculation : mapping, optional
        ``num_draft_tokens``, ``accepted`` and ``draft``, as a spec's (default: no draft tokens).
    replay : Replay, optional
        A trace to judge deployments by: each is simulated at its engine's own limits of a step, or those
        given. The default limit on TTFT is of a long prompt alone, the percentile of the trace's.
    runners_up, percentile, requests, seed, threads, progress
        As in :func:`fastroof.sweep.best_deployments`.

    Returns
    -------
    Recommendation
        For each model the best deployment, the runners-up, and the engine's own command; the number of
        clients is the best one within the limits.

    Raises
    ------
    SweepError
        If an argument is invalid.
    ModelError
        If a model is unknown.
    TableError
        If the tables cannot be read.

    Examples
    --------
    >>> import fastroof
    >>> found = fastroof.recommend("meta-llama/Llama-3.1-8B-Instruct", "h100", total_gpus=1, isl=1000,
    ...                            osl=100, ttft_ms=200, tpot_ms=15)
    >>> found.deployments[0].servers["server"].words()[:3]
    ['vllm', 'serve', 'meta-llama/Llama-3.1-8B-Instruct']
    """
    try:
        models: list[str | Path] = [model] if isinstance(model, str | Path) else list(model)
    except TypeError:
        raise SweepError(f"model must be a name or path, or several, got {shown(model)}") from None
    if not models:
        raise SweepError("model: the list is empty, need at least one")
    question: dict[str, Any] = {"gpu": gpu, "isl": isl, "osl": osl, **options}
    ranking = {name: question.pop(name) for name in RankingOptions.__annotations__ if name in question}
    replay: Replay | None = ranking.get("replay")
    if replay is not None:
        if not isinstance(replay, Replay):
            raise SweepError(f"replay must be a Replay, got {shown(replay)}")
        question = _of_replay(replay, question)
    by_name = {load_model(one).name: one for one in models}
    specs = [deployment_question(one, total_gpus=total_gpus, **question) for one in by_name.values()]
    longest = None if replay is None else replay.isl(ranking.get("percentile", PERCENTILE))
    found = recommended([with_default_limits(spec, question, longest) for spec in specs], ranking)
    for answer in found.answers.answers:
        name = answer.group["model"]
        if not answer.choices and answer.nearest is None and answer.infeasible.get("memory"):
            row = _on_other_gpus(by_name[name], total_gpus, question, ranking.get("threads", 1))
            if row is not None:
                found.would_fit[name] = row
    return found


def _of_replay(replay: Replay, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return a question with the lengths of a trace, and the engines' own limits of a step."""
    both = [name for name in ("isl", "osl", "prefix_hit") if question.get(name)]
    if both:
        raise SweepError(f"a replay has lengths and prefixes of its own: leave {', '.join(both)} out")
    gpus, engines = listed(question["gpu"]), listed(question.get("engine") or DEFAULT_ENGINE)
    own = [load_engine(name).on(load_gpu(gpu)).scheduling for name in engines for gpu in gpus]
    limits = {
        name: sorted({getattr(one, name) for one in own})
        for name in ("max_num_batched_tokens", "max_num_seqs")
        if not question.get(name)
    }
    return {**question, **limits, "isl": replay.isl(), "osl": replay.osl}


def recommend_for_spec(
    spec: DeploymentSpec | Mapping[str, Any] | str | Path,
    *,
    gpu_hour_price: float | Mapping[str, float] | None = None,
    **ranking: Unpack[RankingOptions],
) -> Recommendation:
    """Recommend deployments among those of a spec, with their commands.

    Parameters
    ----------
    spec : DeploymentSpec, mapping, str or Path
        As in :func:`fastroof.sweep.best_deployments`.
    gpu_hour_price : float or mapping, optional
        Price per GPU-hour, which replaces the spec's.
    **ranking
        As in :func:`fastroof.sweep.best_deployments`.

    Returns
    -------
    Recommendation
        Recommended deployments for each model and load.

    Raises
    ------
    SweepError
        If the spec is invalid or not a deployment spec.
    """
    changes = None if gpu_hour_price is None else {"gpu_hour_price": gpu_hour_price}
    return recommended([(load_deployment_spec(spec, changes), {})], ranking)


def with_default_limits(
    spec: DeploymentSpec, given: Mapping[str, Any], longest: int | None = None
) -> tuple[DeploymentSpec, dict[str, float]]:
    """Return a question with the limits that it lacks, and these; none if no deployment is possible.

    That on TTFT is for a prompt of the spec, or of ``longest`` tokens.
    """
    names = [name for name in LIMITED if given.get(name) is not None]
    if spec.osl == (1,):
        names.append("tpot_ms")  # a single token has no time per token
    if not default_limits(names, 0.0) or (alone_ms := prompt_alone_ms(spec, longest)) is None:
        return spec, {}
    limits = default_limits(names, alone_ms)
    return load_deployment_spec(spec, {"constraints": spec.constraints.model_dump() | limits}), limits


def recommended(
    questions: Sequence[tuple[DeploymentSpec, Mapping[str, float]]], ranking: Mapping[str, Any]
) -> Recommendation:
    """Recommend deployments of specs, each with its limits by default, which the answers name."""
    progress = ranking.get("progress")
    check_progress(progress, REPORTED, SweepError)
    began = time.perf_counter()
    specs = tuple(spec for spec, _ in questions)
    total = sum(spec.num_candidates for spec in specs)
    done = 0
    answers: list[Answer] = []
    deployments: list[Deployment | None] = []
    skipped: list[str] = []
    candidates, objective = 0, ""
    for spec, defaults in questions:
        before = done

        def report(of_spec: int, known: int, noun: str, before: int = before) -> None:
            if progress is not None:
                counted, of = (before + of_spec, total) if noun == "candidates" else (of_spec, known)
                progress(counted, of, noun)

        tables_by_gpu = load_tables_by_gpu(DeploymentSweep(spec))
        found = best_deployments(spec, tables_by_gpu=tables_by_gpu, **{**ranking, "progress": report})
        for answer in found.answers:
            answers.append(answer._replace(default_limits=defaults))
            choices = answer.choices
            deployments.append(deployment_of(spec, choices[0], tables_by_gpu) if choices else None)
        skipped += found.skipped
        candidates += found.candidates
        objective = found.objective
        done += spec.num_candidates
    compared = sum(spec.num_configurations for spec in specs)
    elapsed_s = time.perf_counter() - began
    answered = Answers(tuple(answers), objective, candidates, compared, tuple(skipped), elapsed_s)
    return Recommendation(answered, tuple(deployments), specs, {})


def _on_other_gpus(
    model: str | Path, total_gpus: int, question: Mapping[str, Any], threads: int
) -> dict[str, Any] | None:
    """Return the row of the smallest deployment that fits the model; None if no tried number does."""
    # smaller powers of two divide the GPUs given, and so were tried as replicas
    gpus = 2 * (total_gpus & -total_gpus)
    while gpus <= MOST_GPUS_TRIED:
        spec = deployment_question(model, total_gpus=gpus, **{**question, **dict.fromkeys(LIMITED)})
        few = load_deployment_spec(spec, {"clients": 1, "objective": "tokens_per_s_per_gpu"})
        choices = best_deployments(few, runners_up=0, threads=threads).answers[0].choices
        if choices:
            return choices[0].row
        gpus *= 2
    return None
