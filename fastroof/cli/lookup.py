"""``fastroof lookup``: one kernel, or a list of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from fastroof.cli.completion import fast_arguments, run_few_loops_plain
from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.option_groups import TABLES
from fastroof.cli.options import Json
from fastroof.cli.output import percent, print_json, print_table
from fastroof.cli.workload_options import parse_sizes
from fastroof.columns import ORIGINS
from fastroof.command_group import help_if_alone
from fastroof.errors import MissingTableError

if TYPE_CHECKING:
    from fastroof.columns import Column
    from fastroof.operators.operator import Operator

EPILOG: Final = """\b
Sizes are integers or comma-separated lists, which are broadcast: --m 1,64,512 --n 6144 --k 4096.

\b
JSON: operator, gpu, source, method, rows: one object per kernel with its sizes and dtypes, latency_us,
mfu (null for communication), origin (measured, interpolated, extrapolated, borrowed or modelled), and with
--with-error relative_error: one standard error over the latency, 80 % of points are within 1.28 of them.
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
WithError = Annotated[bool, typer.Option("--with-error", help="Also print one standard error.")]

_SHARED: Final[dict[str, tuple[Any, Any]]] = {
    "method": (Method, "roofline"),
    **TABLES,
    "with_error": (WithError, False),
    "as_json": (Json, False),
}
"""Options of every command: type and default."""


class OperatorCommands(TyperGroup):
    """One command per operator; operators load on first use."""

    @functools.cached_property
    def made(self) -> dict[str, Any]:
        """Commands by name."""
        from fastroof.operators.registry import OPERATORS

        app = typer.Typer(rich_markup_mode=None)
        app.callback()(lambda: None)
        for operator in OPERATORS.values():
            if operator.answers_lookups:
                app.command(operator.name, epilog=EPILOG, help=_help(operator))(_command(operator))
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
    group = typer.Typer(
        cls=OperatorCommands, help="Look up kernels: latency, MFU, origin.", rich_markup_mode=None
    )
    group.callback(invoke_without_command=True)(help_if_alone)
    app.add_typer(group, name="lookup")


def _help(operator: Operator) -> str:
    return f"{operator.summary}\n\n{operator.about}" if operator.about else operator.summary


def _command(operator: Operator) -> Any:
    """Return a function whose parameters are the operator's arguments, for typer to read."""

    def command(**options: Any) -> None:
        _look_up(operator, options)

    parameters = [*_arguments(operator), *((name, *option) for name, option in _SHARED.items())]
    keyword = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    signature = inspect.Signature(
        [
            inspect.Parameter(name, keyword, default=empty if default is ... else default, annotation=kind)
            for name, kind, default in parameters
        ]
    )
    described: Any = command
    described.__signature__ = signature
    described.__annotations__ = {name: kind for name, kind, _ in parameters}
    return command


def _arguments(operator: Operator) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of each argument of an operator's lookups; ... if required."""
    columns: dict[str, Column] = {c.name: c for c in (*operator.keys, *operator.axes)}
    for name in operator.arguments:
        column = columns[name]
        sentence = f"{column.meaning[:1].upper()}{column.meaning[1:]}."
        if column.kind == "text":
            yield name, Annotated[str, typer.Option(help=sentence)], operator.defaults.get(name, ...)
        elif name in operator.defaults:
            option = typer.Option(metavar="SIZES", help=sentence)
            yield name, Annotated[str, option], str(operator.defaults[name])
        else:
            yield name, Annotated[str, typer.Option(metavar="SIZES", help=sentence, show_default=False)], ...


def _look_up(operator: Operator, options: dict[str, Any]) -> None:
    """Look up kernels and print the answer."""
    import numpy as np

    method, as_json, with_error = (options.pop(name) for name in ("method", "as_json", "with_error"))
    gpu, path, source = options.pop("gpu"), options.pop("tables"), options.pop("source")
    words = tuple(key.name for key in operator.keys if key.kind == "text")
    given = {
        name: value if name in words else parse_sizes(f"--{name.replace('_', '-')}", value)
        for name, value in options.items()
    }
    if max((len(sizes) for sizes in given.values() if isinstance(sizes, list)), default=1) <= MOST_PLAIN:
        run_few_loops_plain()
    spec, tables = gpu_and_tables(gpu, path, source)
    if tables is None:
        from fastroof.load.by_name import missing_tables

        raise MissingTableError(missing_tables(spec.name))
    answer = tables.lookup(operator.name, method=method, with_error=with_error, **given)
    errors = None if answer.relative_error is None else answer.relative_error.ravel().tolist()
    shown = {
        name: np.broadcast_to(np.asarray(value), answer.latency_us.shape).ravel().tolist()
        for name, value in given.items()
    }
    answers = zip(
        answer.latency_us.ravel().tolist(),
        answer.mfu.ravel().tolist(),
        answer.origin.ravel().tolist(),
        strict=True,
    )
    rows = [
        {
            **{name: values[i] for name, values in shown.items()},
            "latency_us": latency_us,
            "mfu": mfu,
            "origin": ORIGINS[origin],
            **({} if errors is None else {"relative_error": errors[i]}),
        }
        for i, (latency_us, mfu, origin) in enumerate(answers)
    ]
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
    text = [
        tuple(
            f"{value:,.3f}"
            if name == "latency_us"
            else percent(value) or "-"
            if name == "mfu"
            else f"+- {percent(value)}"
            if name == "relative_error"
            else str(value)
            for name, value in row.items()
        )
        for row in rows
    ]
    print_table(
        tuple(
            {"latency_us": "latency us", "mfu": "MFU", "relative_error": "error"}.get(name, name)
            for name in rows[0]
        ),
        text,
        left=("origin", *words),
    )
