"""How layouts of one model compare: throughput a GPU against time per token, over clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.errors import FastroofError
from fastroof.models.layout import ALL_TP_SIZES, Layout
from fastroof.report.front import pareto_front
from fastroof.serving import estimate
from fastroof.stopping import check_stopped
from fastroof.ui.commands import serving_command
from fastroof.ui.step_answer import spread_sizes

if TYPE_CHECKING:
    from fastroof.ui.plans import PlanStore
    from fastroof.ui.view import View

__all__ = ["layouts_answer", "splits_of"]

MOST_CLIENTS: Final = 1024
COLUMNS: Final = (
    "ttft_ms", "tpot_ms", "request_latency_ms", "tokens_per_s_per_gpu", "wait_ms",
    "tpot_relative_error", "ttft_relative_error",
)  # fmt: skip
"""Fields of :class:`fastroof.serving.ServingEstimate` of each point."""


def layouts_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Answer how layouts compare."""
    clients = spread_sizes(1, min(MOST_CLIENTS, view.engine.scheduling.max_num_seqs))
    layouts = [_over_clients(store, view, split, clients) for split in splits_of(store, view)]
    limits = {name: ms for name in ("ttft_ms", "tpot_ms") if (ms := getattr(view, name)) is not None}
    answered = [each for each in layouts if "problem" not in each]
    for each in answered:
        each["within"] = np.all([each[name] <= ms for name, ms in limits.items()] or [clients > 0], axis=0)
    if answered:
        tpot, rate = (np.concatenate([each[name] for each in answered]) for name in COLUMNS[1:4:2])
        front = pareto_front(-tpot, rate, np.zeros(len(tpot), np.int64)).reshape(len(answered), -1)
        for each, on_front in zip(answered, front, strict=True):
            each["on_front"] = on_front
    best = _best(store, view, layouts, limits)
    for each in answered:
        for name in ("clients", *COLUMNS, "within", "on_front"):
            each[name] = None if each[name] is None else each[name].tolist()
    return {"layouts": layouts, "best": best, "limits": limits}


def splits_of(store: PlanStore, view: View) -> Iterator[dict[str, int]]:
    """Ways to split the view's model over up to its number of GPUs: tp, and with experts dp and ep too."""
    has_experts = store.model(view.model).has_experts
    own = {name: getattr(view, name) for name in ("tp", "pp", "dp", "ep")}
    sizes = [size for size in ALL_TP_SIZES if size <= view.gpus]
    splits = [
        {"tp": tp, "pp": 1, "dp": dp, "ep": ep}
        for tp in sizes
        for dp in (sizes if has_experts else [1])
        if tp * dp <= view.gpus
        for ep in dict.fromkeys([1, tp * dp] if has_experts else [1])
    ]
    yield from splits
    if own not in splits:
        yield own


def _over_clients(store: PlanStore, view: View, split: dict[str, int], clients: Any) -> dict[str, Any]:
    check_stopped()
    told: dict[str, Any] = {"split": split}
    try:
        layout = Layout(**split)
        told |= {"layout": str(layout), "gpus": layout.world_size}
        told["is_shown"] = all(getattr(view, name) == size for name, size in split.items())
        plan = store.plan(view, view.serving_sizes(1), split).plan
        seen = estimate(
            plan,
            view.isl,
            view.osl,
            clients,
            max_batched_tokens=view.budget,
            max_seqs=view.engine.scheduling.max_num_seqs,
            with_error=bool(plan.tables_hash),
        )
    except FastroofError as error:
        return {"layout": ", ".join(f"{name} {size}" for name, size in split.items()), **told,
                "problem": str(error)}  # fmt: skip
    return {**told, "clients": clients, **{name: getattr(seen, name) for name in COLUMNS}}


def _best(
    store: PlanStore, view: View, layouts: list[dict[str, Any]], limits: dict[str, float]
) -> dict[str, Any] | None:
    """The point of most throughput a GPU within the limits; of equals that on fewer GPUs."""
    best: tuple[float, int, int] | None = None
    for number, each in enumerate(layouts):
        if "problem" in each or not each["within"].any():
            continue
        rates = np.where(each["within"], each["tokens_per_s_per_gpu"], -np.inf)
        point = int(rates.argmax())
        if best is None or float(rates[point]) > best[0]:
            best = (float(rates[point]), number, point)
    if best is None:
        return None
    _, number, point = best
    chosen = layouts[number]
    clients = int(chosen["clients"][point])
    return {
        "layout": number,
        "point": point,
        "margins": {name: 1.0 - float(chosen[name][point]) / ms for name, ms in limits.items()},
        "command": serving_command(store, view, clients, chosen["split"]),
    }
