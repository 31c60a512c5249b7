"""The question that people have, as the spec of a sweep: a model, GPUs, lengths and limits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.checks import whole_number
from fastroof.config import load_gpu
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import SweepError
from fastroof.models import TP_SIZES, ModelSpec, load_model
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.kinds import load_spec

__all__ = ["deployment_question", "layouts_to_try"]

BUDGETS: Final = (2048, 8192)
"""Tokens of a step that are tried, beside the engines' own."""

MOST_GPUS: Final = 2**16
MOST_CLIENTS: Final = 2**20
CLIENTS_A_GPU_APART: Final = 8
"""Numbers of clients that are tried lie one apart for so many GPUs, two for twice as many."""

MOST_STAGES: Final = 8

Names = str | Path | Sequence[str | Path]


def deployment_question(
    model: str | Path,
    gpu: Names = "h100",
    *,
    total_gpus: int,
    isl: int,
    osl: int,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    request_latency_ms: float | None = None,
    dtype: Names = "auto",
    kv_dtype: Names = "auto",
    runtime: Names | None = None,
    max_batched_tokens: int | Sequence[int] | None = None,
    max_seqs: int | None = None,
    prefix_hit: float = 0.0,
    gpu_hour_price: float | Mapping[str, float] | None = None,
    objective: str | None = None,
    tables: str | Path | None = None,
    allow_modelled: bool = False,
) -> DeploymentSpec:
    """Return the deployments to compare for a model on a number of GPUs.

    Parameters
    ----------
    model : str or Path
        Preset, Hugging Face id of one, or path of a config.json.
    gpu : str, Path or sequence of them
        GPUs to choose from, each by itself.
    total_gpus : int
        How many there are of one kind; copies of the model fill them.
    isl, osl : int
        Tokens of a prompt and of an output.
    ttft_ms, tpot_ms, request_latency_ms : float, optional
        Longest means, ms.
    dtype, kv_dtype : str or sequence of str
        Formats to choose from; ``auto`` is the checkpoint's.
    runtime : str, Path or sequence of them, optional
        Engines to choose from; by default what sweeps of deployments assume.
    max_batched_tokens : int or sequence of int, optional
        Tokens of a step to choose from; by default 2,048, 8,192, the engines' own, and a whole prompt where
        one of them cuts none.
    max_seqs : int, optional
        Requests that a copy runs at once at most; by default the engines' own.
    prefix_hit : float
        Share of each prompt that is found in the prefix cache.
    gpu_hour_price : float or mapping, optional
        Price of a GPU for an hour, for all or by GPU.
    objective : str, optional
        As in a spec; by default the least cost where prices are given, else the most tokens a second and GPU.
    tables : str or Path, optional
        A folder of measured tables, or ``datasheet`` to do without; by default each GPU's own.
    allow_modelled : bool
        Whether the datasheet model stands for kernels that nobody measured.

    Returns
    -------
    DeploymentSpec
        Every layout of :func:`layouts_to_try`, with every number of clients up to all that can run.

    Raises
    ------
    SweepError
        Saying what is wrong with what was given.

    Examples
    --------
    >>> spec = deployment_question("llama-3.1-8b", total_gpus=2, isl=1000, osl=100, tpot_ms=20)
    >>> [split.tp for split in spec.split], spec.max_batched_tokens, spec.concurrency[-1]
    ([1, 2], (2048, 8192), 2049)
    """
    whole_number("total_gpus", total_gpus, most=MOST_GPUS, error=SweepError)
    loaded = load_model(model)
    gpus = [load_gpu(name) for name in _listed(gpu)]
    node = min([*(each.linked_gpus for each in gpus), TP_SIZES[-1]])
    default = "tokens_per_s_per_gpu" if gpu_hour_price is None else "cost"
    limits = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "request_latency_ms": request_latency_ms}
    values: dict[str, Any] = {
        "models": [str(model)],
        "gpus": [str(name) for name in _listed(gpu)],
        "split": layouts_to_try(loaded, total_gpus, node),
        "total_gpus": total_gpus,
        "isl": isl,
        "osl": osl,
        "dtype": _listed(dtype),
        "kv_dtype": _listed(kv_dtype),
        "prefix_hit": prefix_hit,
        "constraints": {name: limit for name, limit in limits.items() if limit is not None},
        "objective": default if objective is None else objective,
        "concurrency": 1,
        "allow_modelled": allow_modelled,
    }
    if tables is not None:
        values["tables"] = str(tables)
    if isinstance(gpu_hour_price, Mapping):
        values["gpu_hour_price"] = dict(gpu_hour_price)
    elif gpu_hour_price is not None:
        values["gpu_hour_price"] = gpu_hour_price
    if runtime is not None:
        values["runtime"] = [str(name) for name in _listed(runtime)]
    if max_seqs is not None:
        values["max_seqs"] = max_seqs
    # what else there is to say follows from what the spec has made of that
    values["max_batched_tokens"] = BUDGETS[0] if max_batched_tokens is None else max_batched_tokens
    spec = load_spec(values)
    assert isinstance(spec, DeploymentSpec)
    changes: dict[str, Any] = {"concurrency": _clients(total_gpus, spec.max_seqs)}
    if max_batched_tokens is None:
        changes["max_batched_tokens"] = _budgets([load_engine(name) for name in spec.runtime], spec.isl[0])
    spec = load_spec(values | changes)
    assert isinstance(spec, DeploymentSpec)
    return spec


def layouts_to_try(model: ModelSpec, total_gpus: int, node_gpus: int) -> list[dict[str, int]]:
    """List the ways to lay a copy of a model out that are tried on a number of GPUs.

    Copies fill the GPUs, and one stays within a node (up to eight GPUs of a link): every tp there; with
    experts every tp with the data parallelism of attention that is left, experts whole on their GPUs or split
    over all of them. Beyond a node it is cut into stages, each a node and eight of them at most.

    Examples
    --------
    >>> layouts_to_try(load_model("llama-3.1-70b"), 16, 8)[-2:]
    [{'tp': 8}, {'tp': 8, 'pp': 2}]
    >>> layouts_to_try(load_model("qwen3-30b-a3b"), 2, 8)
    [{'tp': 1}, {'tp': 2}, {'tp': 2, 'ep': 2}, {'tp': 1, 'dp': 2}, {'tp': 1, 'dp': 2, 'ep': 2}]
    """
    sizes = [size for size in TP_SIZES if size <= node_gpus and total_gpus % size == 0]
    splits: list[dict[str, int]] = []
    for gpus in sizes:
        if not model.has_experts:
            splits.append({"tp": gpus})
            continue
        for tp, has_groups in itertools.product(reversed(TP_SIZES), (False, True)):
            if gpus % tp or (has_groups and gpus == 1):
                continue
            split = {"tp": tp}
            if gpus > tp:
                split["dp"] = gpus // tp
            if has_groups:
                split["ep"] = gpus
            splits.append(split)
    stages = [2**power for power in range(1, MOST_STAGES.bit_length())]
    beyond = [pp for pp in stages if sizes[-1] == node_gpus and total_gpus % (pp * node_gpus) == 0]
    return splits + [{"tp": node_gpus, "pp": pp} for pp in beyond]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _clients(total_gpus: int, max_seqs: int) -> list[int]:
    """Numbers of clients, up to one more than can run on single GPUs."""
    apart = max(total_gpus // CLIENTS_A_GPU_APART, 1)
    most = min(total_gpus * max_seqs + apart, MOST_CLIENTS)
    return sorted({1, *range(apart, most + 1, apart)})


def _budgets(engines: Sequence[EngineProfile], isl: int) -> list[int]:
    """Tokens of a step: what is common, what the engines have, and whole prompts where they are not cut."""
    own = {engine.scheduling.max_num_batched_tokens for engine in engines}
    budgets = sorted({*BUDGETS, *own})
    if isl > budgets[-1] and any(not engine.scheduling.chunked_prefill for engine in engines):
        budgets.append(1 << (isl - 1).bit_length())
    return budgets
