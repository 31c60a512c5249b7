"""``fastroof validate --gpu all``: runs of all GPUs in one report, in the terminal or as Markdown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from fastroof.cli.output import console, counted, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastroof.serving.evidence.run_groups import RunGroup, Totals
    from fastroof.serving.evidence.whole_sample import SampleValidation

COLUMNS: Final = (
    "model", "gpu", "engine", "version", "format", "kind", "rows", "MAPE", "median", "p90", "bias", "aic",
)  # fmt: skip
_TITLES: Final = {
    "tpot": "Time per output token",
    "ttft": "Time to first token, where nothing queues",
    "decode": "Time per output token, one request in flight",
}


def print_report(report: SampleValidation, min_rows: int) -> None:
    """Print the groups of each quantity, the worst first, what they sum up to, and what is not judged."""
    out = console()
    out.print(
        f"{report.represented} of {counted(report.runs, 'distinct run')} on "
        f"{counted(len(report.gpus), 'GPU')}, {_how(report)}",
        soft_wrap=True,
    )
    for quantity, groups in _by_quantity(report.groups(min_rows)).items():
        out.print(f"\n{_TITLES.get(quantity, quantity)}\n", soft_wrap=True)
        print_table(COLUMNS, [_cells(group) for group in groups], left=COLUMNS[:6])
    out.print("")
    for total in report.totals():
        for line in _total_lines(total):
            out.print(line, soft_wrap=True)
    for gpu, why in report.absent.items():
        out.print(f"\n{gpu} is left out: {why}", soft_wrap=True)
    out.print(f"\nnot judged: {counted(sum(report.left_out.values()), 'row')}", soft_wrap=True)
    for reason, rows in report.left_out.items():
        out.print(f"  {rows:>4}  {reason}", soft_wrap=True)


def markdown_groups(report: SampleValidation, min_rows: int) -> str:
    """Return the same as Markdown: a table a quantity, and the totals as a list."""
    lines = [f"{report.represented} of {report.runs} distinct runs, {_how(report)}.", ""]
    for total in report.totals():
        lines += [f"* {line.strip()}" for line in _total_lines(total)]
    lines += ["", *_by_engine(report.groups())]
    for quantity, groups in _by_quantity(report.groups(min_rows)).items():
        lines += ["", f"**{_TITLES.get(quantity, quantity)}**", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * 6}{'---:|' * (len(COLUMNS) - 6)}"]
        lines += [f"| {' | '.join(_cells(group))} |" for group in groups]
    return "\n".join(lines)


def _by_engine(groups: Sequence[RunGroup]) -> list[str]:
    """All judged runs by GPU and engine, with the group that does worst: TPOT."""
    members: dict[tuple[str, str], list[RunGroup]] = {}
    for group in groups:
        if (group.quantity, group.kind) == ("tpot", "judged"):
            members.setdefault((group.gpu, group.engine), []).append(group)
    columns = ("gpu", "engine", "runs", "groups", "TPOT MAPE", "bias", "aic", "the worst group")
    lines = [f"| {' | '.join(columns)} |", "|---|---|---:|---:|---:|---:|---:|---|"]
    for (gpu, engine), some in sorted(members.items()):
        runs, answered = sum(group.rows for group in some), sum(group.aic_rows for group in some)
        mape, bias = (
            sum(group.rows * value for group, value in zip(some, values, strict=True)) / runs
            for values in ([group.mape for group in some], [group.bias for group in some])
        )
        aic = sum(group.aic_rows * group.aic_mape for group in some if group.aic_rows)
        beside = f"{aic / answered:.1%}" if answered else ""
        worst = max(some, key=lambda group: group.mape)
        named = (
            f"{worst.model} {worst.dtype}, {worst.version or 'no version'}: {worst.mape:.1%} of {worst.rows}"
        )
        cells = (gpu, engine, f"{runs}", f"{len(some)}", f"{mape:.1%}", f"{bias:+.1%}", beside, named)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _how(report: SampleValidation) -> str:
    if report.split:
        return f"constants fitted without each run's {report.split}"
    return f"runtime {report.runtime}"


def _by_quantity(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    found: dict[str, list[RunGroup]] = {}
    for group in groups:
        found.setdefault(group.quantity, []).append(group)
    return found


def _cells(group: RunGroup) -> tuple[str, ...]:
    beside = "" if not group.aic_rows else f"{group.aic_mape:.1%}"
    if group.aic_rows not in (0, group.rows):
        beside += f" of {group.aic_rows}"
    fitted = " (fitted)" if group.fitted else ""
    return (
        group.model, group.gpu, group.engine, group.version, group.dtype, f"{group.kind}{fitted}",
        f"{group.rows}", f"{group.mape:.1%}", f"{group.median:.1%}", f"{group.p90:.1%}",
        f"{group.bias:+.1%}", beside,
    )  # fmt: skip


def _total_lines(total: Totals) -> list[str]:
    """What groups sum up to, in words; the list of poor ones for time per output token alone."""
    which = total.kinds[0] if len(total.kinds) == 1 else "of all kinds"
    lines = [
        f"{total.quantity.upper()} of {counted(total.rows, 'run')} {which}: MAPE {_share(total.mape)}, "
        f"bias {total.bias:+.1%}; median of {counted(total.groups, 'group')} of 10 runs or more "
        f"{_share(total.median_of_groups)}; ahead of aiconfigurator-core in {_share(total.ahead, 0)} of the "
        f"{total.groups_beside} that it answers ({_share(total.beside_mape)} against "
        f"{_share(total.aic_mape)} over its runs)"
    ]
    if total.quantity == "tpot" and total.poor:
        lines.append(f"  above 25 %: {'; '.join(total.poor)}")
    return lines


def _share(value: float, digits: int = 1) -> str:
    return "none" if math.isnan(value) else f"{value:.{digits}%}"
