"""Candidates of a recommendation: layouts, ways to deploy, clients, limits of a step and default limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.models import TP_SIZES, ModelSpec
from fastroof.sweep.best import evaluate
from fastroof.sweep.deployments import DeploymentSpec, DeploymentSweep
from fastroof.sweep.deployments.spec import MODES
from fastroof.sweep.kind import load_tables_by_gpu
from fastroof.sweep.kinds import load_deployment_spec

BUDGETS: Final = (1024, 2048, 4096, 8192)
"""Token budgets to try in addition to the engines' defaults, as far as they are smaller."""

LEAST_SEQS: Final = 16
"""Smallest limit on concurrent requests to try; what still smaller ones leave is hardly more."""

MOST_GPUS: Final = 2**16
MOST_CLIENTS: Final = 2**20
CLIENTS_APART: Final = 100
"""Numbers of clients to try are at most one part in this many apart: all up to it, then about 1 %."""

MOST_NODES: Final = 8
"""Maximum number of nodes of a replica."""


def modes_to_try(
    gpus: Sequence[GpuSpec], total_gpus: int, node: int, osl: int, limits: Mapping[str, Any]
) -> dict[str, Any]:
    """Return whether prefill and decode on separate workers are tried too, and the link between workers."""
    links = [each.inter_node_bytes_per_s for each in gpus]
    is_beyond = total_gpus > node
    # what such workers cannot do, or nothing is known about, is not tried unless it is requested
    can = total_gpus > 1 and osl > 1 and not limits.get("prefix_hit") and (not is_beyond or all(links))
    can = can and limits.get("objective") != "energy"
    modes = list(MODES) if can else [MODES[0]]
    requested = listed(limits["mode"]) if "mode" in limits else modes
    if not (is_beyond and all(links) and MODES[1] in requested):
        return {"mode": modes}
    # workers may be on different nodes
    return {"mode": modes, "link_bytes_per_s": min(links)}


def layouts_to_try(
    model: ModelSpec, total_gpus: int, node_gpus: int, most_gpus: int = MOST_GPUS
) -> list[dict[str, int]]:
    """List the layouts of a replica of up to ``most_gpus`` to try on a number of GPUs.

    Replicas fill the GPUs. Within a node (up to eight linked GPUs): every tp, and for models with experts
    every tp with data-parallel attention over the other GPUs, with and without expert parallelism over all of
    them. Over two, four or eight nodes: a pipeline stage on each, and for models with experts every tp with
    data-parallel attention and expert parallelism over all GPUs.

    Examples
    --------
    >>> from fastroof.models import load_model
    >>> layouts_to_try(load_model("llama-3.1-70b"), 16, 8)[-2:]
    [{'tp': 8}, {'tp': 8, 'pp': 2}]
    >>> layouts_to_try(load_model("deepseek-v3"), 16, 8)[-2:]
    [{'tp': 2, 'dp': 8, 'ep': 16}, {'tp': 1, 'dp': 16, 'ep': 16}]
    >>> layouts_to_try(load_model("qwen3-30b-a3b"), 2, 8)
    [{'tp': 1}, {'tp': 2}, {'tp': 2, 'ep': 2}, {'tp': 1, 'dp': 2}, {'tp': 1, 'dp': 2, 'ep': 2}]
    """
    sizes = [size for size in TP_SIZES if size <= node_gpus and total_gpus % size == 0 and size <= most_gpus]
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
    nodes = [
        count
        for count in (2**power for power in range(1, MOST_NODES.bit_length()))
        if sizes[-1] == node_gpus and total_gpus % (count * node_gpus) == 0 and count * node_gpus <= most_gpus
    ]
    splits += [{"tp": node_gpus, "pp": count} for count in nodes]
    if model.has_experts:
        splits += [
            {"tp": tp, "dp": count * node_gpus // tp, "ep": count * node_gpus}
            for count, tp in itertools.product(nodes, reversed(TP_SIZES))
            if node_gpus % tp == 0
        ]
    return splits


def listed(value: Any) -> list[Any]:
    """Return a value or several as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def clients_to_try(total_gpus: int, max_num_seqs: int) -> list[int]:
    """Return the numbers of clients to try, up to one more than can run on single GPUs."""
    most = min(total_gpus * max_num_seqs + 1, MOST_CLIENTS)
    clients = [1]
    while clients[-1] < most:
        clients.append(min(clients[-1] + max(clients[-1] // CLIENTS_APART, 1), most))
    return clients


def budgets_to_try(engines: Sequence[EngineProfile], isl: int) -> list[int]:
    """Return the token budgets to try: common ones, the engines', and whole prompts if not chunked."""
    defaults = {engine.scheduling.max_num_batched_tokens for engine in engines}
    # what memory a larger step than the engine's own takes is unknown
    budgets = sorted({*defaults, *(tokens for tokens in BUDGETS if tokens < max(defaults))})
    if isl > budgets[-1] and any(not engine.scheduling.chunked_prefill for engine in engines):
        budgets.append(1 << (isl - 1).bit_length())
    return budgets


def seqs_to_try(engines: Sequence[EngineProfile]) -> list[int]:
    """Return the limits on requests to try: the engines' own, powers of two below, and halfway between."""
    defaults = {engine.scheduling.max_num_seqs for engine in engines}
    powers = (2**power for power in range(LEAST_SEQS.bit_length() - 1, max(defaults).bit_length()))
    smaller = {seqs for power in powers for seqs in (power, 3 * power // 2)}
    return sorted({*defaults, *(seqs for seqs in smaller if seqs < max(defaults))})


QUEUE_MS: Final = 1000.0
"""Part of the default limit on TTFT that comes on top of the prompt alone."""

TPOT_MS: Final = 50.0
"""Default limit on TPOT."""

_BOUNDED_BY: Final = {
    "ttft_ms": ("ttft_ms", "request_latency_ms"),
    "tpot_ms": ("tpot_ms", "itl_ms", "request_latency_ms"),
}


def default_limits(given: Iterable[str], alone_ms: float) -> dict[str, float]:
    """Return the limits of a question that does not bound TTFT or TPOT by those whose names are given."""
    limits = {"ttft_ms": float(math.ceil(QUEUE_MS + alone_ms)), "tpot_ms": TPOT_MS}
    return {name: ms for name, ms in limits.items() if not set(_BOUNDED_BY[name]).intersection(given)}


def default_limits_words(limits: Mapping[str, float]) -> str:
    """Return default limits as text; empty if there are none."""
    names = {"ttft_ms": "TTFT <= {:,.0f} ms (1 s + the prompt alone)", "tpot_ms": "TPOT <= {:,.0f} ms"}
    return ", ".join(names[name].format(ms) for name, ms in limits.items())


def prompt_alone_ms(spec: DeploymentSpec, isl: int | None = None) -> float | None:
    """Return the TTFT of one client on a spec's fastest deployment; None if no deployment is possible.

    By default with the prompts of the spec.
    """
    mode = MODES[0] if MODES[0] in spec.mode else spec.mode[0]
    alone = {"mode": mode, "clients": 1, "constraints": {}, "keep": "all", "objective": "goodput"}
    one = load_deployment_spec(spec, alone | ({} if isl is None else {"isl": isl}))
    (found,) = evaluate([one], load_tables_by_gpu(DeploymentSweep(one)), 1, None)[0].values()
    return min((row["ttft_ms"] for row in found.rows), default=None)
