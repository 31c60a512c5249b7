"""What ``fastroof models --support`` prints: of which models, formats and layouts kernels were measured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from fastroof.cli.output import console, print_json, print_table
from fastroof.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastroof.plan.support import Support

__all__ = ["print_support"]


def print_support(
    models: Sequence[str], gpus: Sequence[str], engines: Sequence[str], dtypes: Sequence[str], as_json: bool
) -> None:
    """Work the matrix out and print it: a row a model and format, or of one model a row a layout."""
    from fastroof import gpu_names, load_model, model_names
    from fastroof.engines import engine_of_version, serving_engines
    from fastroof.load.by_name import table_folders
    from fastroof.models.execution import AUTO, DTYPES
    from fastroof.plan.support import FORMATS, support_rows

    unknown = [dtype for dtype in dtypes if dtype not in (AUTO, *DTYPES)]
    if unknown:
        raise PlanError(f"--dtype must be out of {AUTO}, {', '.join(DTYPES)}, got {', '.join(unknown)}")
    specs = [load_model(name) for name in models or model_names()]
    wanted = list(gpus) or [name for name in gpu_names() if table_folders(name)]
    profiles = list(engines) or [engine_of_version(name).name for name in serving_engines()]
    rows = list(support_rows(specs, wanted, profiles, dtypes=dtypes or FORMATS))
    if as_json:
        print_json([row._asdict() for row in rows])
    elif len(specs) == 1:
        _print_layouts(rows)
    else:
        _print_matrix(rows)


def _print_layouts(rows: Sequence[Support]) -> None:
    from fastroof.models.layout import split_words

    columns = ("gpu", "engine", "format", "layout", "status", "why")
    print_table(
        columns,
        [
            (
                row.gpu,
                row.engine,
                row.dtype,
                split_words({"tp": row.tp, "pp": row.pp, "dp": row.dp, "ep": row.ep}),
                row.status,
                row.why,
            )
            for row in rows
        ],
        left=columns,
    )


def _print_matrix(rows: Sequence[Support]) -> None:
    from fastroof.plan.support import STATUSES

    places = list(dict.fromkeys((row.gpu, row.engine) for row in rows))
    counts: dict[tuple[str, str], dict[tuple[str, str], Counter[str]]] = {}
    for row in rows:
        cells = counts.setdefault((row.model, row.dtype), {})
        cells.setdefault((row.gpu, row.engine), Counter())[row.status] += 1

    def cell(statuses: Counter[str] | None) -> str:
        return "" if statuses is None else "/".join(str(statuses[name]) for name in STATUSES)

    table: list[tuple[Any, ...]] = [
        (model, dtype, *(cell(cells.get(place)) for place in places))
        for (model, dtype), cells in counts.items()
    ]
    columns = ("model", "format", *(f"{gpu} {engine}" for gpu, engine in places))
    print_table(columns, table, left=("model", "format"))
    total = Counter(row.status for row in rows)
    words = ", ".join(f"{total[name]:,} {name}" for name in STATUSES)
    console().print(f"Layouts that are {'/'.join(STATUSES)}. Of {len(rows):,} in all: {words}.")
