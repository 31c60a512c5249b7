"""Options of ``fastroof best`` that are given per model, and the answer of GPUs shared among models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof.cli.best_answer import say_default_limits
from fastroof.cli.output import counted, print_line, print_table
from fastroof.errors import SweepError

if TYPE_CHECKING:
    from fastroof.sweep import GpuShare, SharedBudget

TRAFFIC: Final = {
    "isl": "--isl", "osl": "--osl", "requests_per_s": "--rate", "ttft_ms": "--ttft", "tpot_ms": "--tpot",
    "itl_ms": "--itl", "request_latency_ms": "--e2e", "prefix_hit": "--prefix-hit",
}  # fmt: skip
"""Options that are given once for all models, or once per model, by the key of a traffic."""


def one_for_all(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a question without rates, in which each is given once."""
    for name, option in TRAFFIC.items():
        times = len(given.get(name, ()))
        if times > 1:
            raise SweepError(
                f"{option} was given {times} times: once per --model needs --rate too, the wanted requests/s "
                "of each model"
            )
    return {name: value[0] if name in TRAFFIC else value for name, value in given.items()}


def shared_question(
    spec: Path | None, models: Sequence[str] | None, given: Mapping[str, Any]
) -> dict[str, Any] | Path | None:
    """Return the question of GPUs shared among models, or None if the question is another one."""
    if spec is not None:
        from fastroof.sweep import is_shared_spec

        return spec if is_shared_spec(spec) else None
    if not models or "requests_per_s" not in given:
        return None
    if "objective" in given:
        raise SweepError(
            "--objective does not go with --rate, which maximizes the smallest ratio of held to wanted rate"
        )
    question = {name: value for name, value in given.items() if name not in TRAFFIC}
    gpus = question.pop("gpu", ["h100"])
    if len(gpus) > 1:
        raise SweepError(
            f"--rate shares GPUs of one kind, got --gpu {' --gpu '.join(gpus)}: ask once for each"
        )
    traffic: list[dict[str, Any]] = [{"model": model} for model in models]
    for name, option in TRAFFIC.items():
        values = given.get(name, ())
        if len(values) not in (0, 1, len(models)):
            raise SweepError(
                f"{option} was given {len(values)} times for {len(models)} x --model: give it once for all "
                "models, or once per model in the same order"
            )
        for place, table in enumerate(traffic):
            if values:
                table[name] = values[place if len(values) > 1 else 0]
    return {"gpu": gpus[0], **question, "traffic": traffic}


def shared_document(found: SharedBudget) -> dict[str, Any]:
    """Return how GPUs are shared, for JSON."""
    shares = [
        {
            **{name: getattr(share.traffic, name) for name in ("model", "isl", "osl", "default_limits")},
            "wanted_requests_per_s": share.traffic.requests_per_s,
            "held_requests_per_s": share.requests_per_s,
            **{name: getattr(share, name) for name in ("ratio", "gpus", "needed_gpus")},
        }
        for share in found.shares
    ]
    of_all = ("gpu", "total_gpus", "scale", "gpus_left", "needed_gpus", "questions", "total_s")
    return {**{name: getattr(found, name) for name in of_all}, "shares": shares}


def print_shares(found: SharedBudget) -> None:
    """Print how many GPUs each model gets, and what it holds on them."""
    for share in found.shares:
        model = f"{share.traffic.model}: " if len(found.shares) > 1 else ""
        say_default_limits(share.traffic.default_limits, model)
    for line in _summary(found):
        print_line(line)
    print_line()
    if found.scale:
        columns = ["model", "isl", "osl", "GPUs", "layout", "wanted requests/s", "held", "ratio", "needs"]
        print_table(columns, [_cells(share) for share in found.shares], left=["model", "layout"])
        print_line()


def _summary(found: SharedBudget) -> list[str]:
    gpus = f"{found.total_gpus:,} x {found.gpu}"
    is_one = len(found.shares) == 1
    rates = "the wanted rate" if is_one else "all wanted rates"
    total = found.needed_gpus
    needed = "; ".join(_needs(share) for share in found.shares)
    if total is not None:
        need = f"{rates} {'needs' if is_one else 'need'} {counted(total, 'GPU')}"
        needed = need if is_one else f"{need}: {needed}"
    if not found.total_gpus:
        return [needed]
    if not found.scale:
        return [f"{gpus} cannot run {'this model' if is_one else 'all models'}", needed]
    holds = f"{gpus} can serve {found.scale:,.3g} times {rates}"
    if not is_one:
        holds += " (the smallest such ratio, which the split maximizes)"
    if found.gpus_left:
        holds += f"; {counted(found.gpus_left, 'GPU')} {'is' if found.gpus_left == 1 else 'are'} left over"
    short = [
        f"{share.traffic.model} holds {share.requests_per_s:,.4g} of {share.traffic.requests_per_s:,.4g} "
        "requests/s"
        for share in found.shares
        if share.ratio < 1.0
    ]
    return [holds, *short, needed]


def _needs(share: GpuShare) -> str:
    if share.needed_gpus is not None:
        return f"{share.traffic.model} {share.needed_gpus:,}"
    wanted = f"{share.traffic.requests_per_s:,.4g} requests/s"
    return f"{share.traffic.model} holds {wanted} on no number of GPUs that was tried"


def _cells(share: GpuShare) -> list[str]:
    from fastroof.models.layout import copies_words

    assert share.recommendation is not None
    row = share.recommendation.answers.answers[0].choices[0].row
    traffic = share.traffic
    return [
        row["model"], f"{traffic.isl:,}", f"{traffic.osl:,}", f"{share.gpus:,}", copies_words(row),
        f"{traffic.requests_per_s:,.4g}", f"{share.requests_per_s:,.4g}", f"{share.ratio:,.3g}",
        "-" if share.needed_gpus is None else f"{share.needed_gpus:,}",
    ]  # fmt: skip
