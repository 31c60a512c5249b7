"""``fastroof lookup``: one kernel, or a list of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from fastroof.cli.completion import fast_arguments, run_few_loops_plain
from fastroof.cli.gpu_tables import measured_tables
from fastroof.cli.option_groups import TABLES
from fastroof.cli.options import Json, flag_of, option
from fastroof.cli.output import percent, print_json, print_table
from fastroof.cli.workload_options import parse_sizes
from fastroof.columns import ORIGINS
from fastroof.command_group import Commands, Group, GroupValues, help_if_alone, taking

if TYPE_CHECKING:
    from fastroof.columns import Column
    from fastroof.operators.operator import Operator

EPILOG: Final = """\b
Sizes are integers or comma-separated lists, which are broadcast: --m 1,64,512 --n 6144 --k 4096.

\b
JSON: operator, gpu, source, method, rows: one object per kernel with its sizes and dtypes, latency_us,
mfu (null for communication), origin (measured, interpolated, extrapolated, borrowed or modelled), and of the
method roofline relative_error: one standard error over the latency, 80 % of points are within 1.28 of them.
"""

MOST_PLAIN: Final = 1000
"""Number of kernels above which compiled loops are faster, including numba's import."""

Method = Annotated[
    str,
    typer.Option(
        metavar="METHOD",
        help="Interpolation between measured points: roofline, linear_mfu, nearest or floor.",
    ),
]


class OperatorCommands(TyperGroup):
    """One command per operator; operators load on first use."""

    @functools.cached_property
    def made(self) -> dict[str, Any]:
        """Commands by name."""
        from fastroof.operators.registry import OPERATORS

        app = Commands()
        app.callback()(lambda: None)
        for operator in OPERATORS.values():
            if operator.answers_lookups:
                text = "\n\n".join(filter(None, (operator.summary, operator.about)))
                app.command(operator.name, epilog=EPILOG, help=text)(_command(operator))
        made: Any = typer.main.get_group(app)
        return dict(made.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the operators' names in their usual order."""
        return list(self.made)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return an operator's command, or None."""
        return fast_arguments(self.made.get(cmd_name))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = Commands(cls=OperatorCommands, help="Look up kernels: latency, MFU, origin.")
    group.callback(invoke_without_command=True)(help_if_alone)
    app.add_typer(group, name="lookup")


def _command(operator: Operator) -> Callable[..., None]:
    """Return the command of an operator, whose options are the arguments of its lookups."""

    @taking(given=_arguments(operator), measured=TABLES)
    def command(
        *,
        given: GroupValues,
        method: Method = "roofline",
        measured: GroupValues,
        as_json: Json = False,
    ) -> None:
        _look_up(operator, given, measured, method, as_json=as_json)

    return command


def _arguments(operator: Operator) -> Group:
    """Type and default of each argument of an operator's lookups; ... if required."""
    columns: dict[str, Column] = {c.name: c for c in (*operator.keys, *operator.axes)}
    group: dict[str, tuple[Any, Any]] = {}
    for name in operator.arguments:
        column, default = columns[name], operator.defaults.get(name, ...)
        sentence = f"{column.meaning[:1].upper()}{column.meaning[1:]}."
        if column.kind == "text":
            group[name] = option(str, sentence, default=default)
        elif default is not ...:
            group[name] = option(str, sentence, "SIZES", default=str(default))
        else:
            group[name] = option(str, sentence, "SIZES", default=default, show_default=False)
    return group


def _look_up(
    operator: Operator,
    options: GroupValues,
    measured: GroupValues,
    method: str,
    *,
    as_json: bool,
) -> None:
    """Look up kernels and print the answer."""
    import numpy as np

    texts = tuple(key.name for key in operator.keys if key.kind == "text")
    given = {
        name: value if name in texts else parse_sizes(flag_of(name), value) for name, value in options.items()
    }
    if max((len(sizes) for sizes in given.values() if isinstance(sizes, list)), default=1) <= MOST_PLAIN:
        run_few_loops_plain()
    _, tables = measured_tables(**measured)
    answer = tables.lookup(operator.name, method=method, with_error=method == "roofline", **given)
    columns: dict[str, Any] = {**given, "latency_us": answer.latency_us, "mfu": answer.mfu}
    columns["origin"] = np.take(ORIGINS, answer.origin)
    if answer.relative_error is not None:
        columns["relative_error"] = answer.relative_error
    shape = answer.latency_us.shape
    lists = [np.broadcast_to(values, shape).ravel().tolist() for values in columns.values()]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]
    if as_json:
        print_json(
            {
                "operator": operator.name,
                "gpu": tables.gpu.name,
                "source": tables.sources[operator.name],
                "method": method,
                "rows": rows,
            }
        )
        return
    words_of: dict[str, tuple[str, Callable[[float], str]]] = {
        "latency_us": ("latency us", lambda us: f"{us:,.3f}"),
        "mfu": ("MFU", lambda mfu: percent(mfu) or "-"),
        "relative_error": ("error", lambda error: f"±{percent(error)}"),
    }
    shown = {name: words_of.get(name, (name, str)) for name in columns}
    text = [[words(row[name]) for name, (_, words) in shown.items()] for row in rows]
    print_table([head for head, _ in shown.values()], text, left=("origin", *texts))
