"""``fastroof models``: the models known by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.options import GPU_NAMES, Json, option
from fastroof.cli.output import print_json, print_line, print_records, print_table
from fastroof.command_group import Group, GroupValues, taking
from fastroof.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastroof.models import ModelSpec
    from fastroof.plan.plan_set import Support


def print_support(
    *,
    model: Sequence[str],
    gpu: Sequence[str],
    engine: Sequence[str],
    dtype: Sequence[str],
    is_full: bool,
    as_json: bool,
) -> None:
    """Compute and print counts, or of the models named a row per GPU and engine, or per layout."""
    from fastroof import gpu_names, load_model, model_names
    from fastroof.engines import engine_of_version, serving_engines
    from fastroof.load.by_name import table_folders
    from fastroof.models.execution import AUTO, DTYPES
    from fastroof.plan.plan_set import FORMATS, best_support, support_rows

    unknown = [name for name in dtype if name not in (AUTO, *DTYPES)]
    if unknown:
        raise PlanError(f"--dtype must be one of {AUTO}, {', '.join(DTYPES)}, got {', '.join(unknown)}")
    specs = [load_model(name) for name in model or model_names()]
    wanted = list(gpu) or [name for name in gpu_names() if table_folders(name)]
    profiles = list(engine) or [engine_of_version(name).name for name in serving_engines()]
    if not (model or is_full or as_json):
        _print_counts(best_support(specs, wanted, profiles, dtypes=dtype or (AUTO,)), ("gpu", "engine"))
        print_line(
            f"\n{len(specs)} models, each by its best layout on up to 8 GPUs in its checkpoint's format (or "
            "--dtype). --model NAME prints one by GPU and engine, --full counts layouts by model and format."
        )
        return
    rows = list(support_rows(specs, wanted, profiles, dtypes=dtype or FORMATS))
    if as_json:
        print_json([row._asdict() for row in rows])
    elif not model:
        _print_counts(rows, ("model", "dtype"))
    elif is_full:
        _print_layouts(rows)
    else:
        _print_best(rows)
        print_line("\neach by its best layout on up to 8 GPUs; --full prints every layout, and why")


def _print_counts(rows: Iterable[Support], places: Sequence[str]) -> None:
    """Print how many rows each place has, by their status."""
    from fastroof.plan.plan_set import STATUSES

    counts: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        counts.setdefault(tuple(getattr(row, name) for name in places), Counter())[row.status] += 1
    table = [(*place, *(str(counted[name]) for name in STATUSES)) for place, counted in counts.items()]
    print_table((*places, *map(_status, STATUSES)), table, left=places)


def _status(name: str) -> str:
    return "no" if name == "refused" else name


def _print_best(rows: Sequence[Support]) -> None:
    """Print for each model, GPU and engine the status of its best layout, by format."""
    from fastroof.plan.plan_set import STATUSES

    formats = tuple(dict.fromkeys(row.dtype for row in rows))
    found: dict[tuple[str, ...], dict[str, list[Support]]] = {}
    for row in rows:
        found.setdefault((row.model, row.gpu, row.engine), {}).setdefault(row.dtype, []).append(row)
    table = []
    for place, by_format in found.items():
        best = {
            name: min((row.status for row in layouts), key=STATUSES.index)
            for name, layouts in by_format.items()
        }
        name, first = next(iter(by_format.items()))
        sizes = sorted(
            {row.tp * row.pp * row.dp for row in first if row.status == best[name] != STATUSES[-1]}
        )
        cells = (_status(best.get(name, "")) for name in formats)
        table.append((*place, *cells, ", ".join(map(str, sizes)) or "-"))
    heads = ("model", "gpu", "engine", *(f"as {name}" for name in formats), "GPUs a copy")
    print_table(heads, table, left=heads)


def _print_layouts(rows: Sequence[Support]) -> None:
    """Print layouts that have the same status for the same reason in one row."""
    from fastroof.models.layout import split_words

    same: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        layout = split_words({size: getattr(row, size) for size in ("tp", "pp", "dp", "ep")})
        place = (row.model, row.gpu, row.engine, row.dtype, _status(row.status), row.why)
        same.setdefault(place, []).append(layout)
    table = [(*place[:4], ", ".join(layouts), *place[4:]) for place, layouts in same.items()]
    columns = ("model", "gpu", "engine", "dtype", "layouts", "status", "why")
    print_table(columns, table, left=columns)


def print_architectures(*, as_json: bool) -> None:
    """Print which of the names that vLLM registers are read, and why the others are not."""
    from fastroof.models.architectures import DRAFT, POOLING, STATUSES, shipped_registry

    found = shipped_registry()
    names = found.architectures()
    if as_json:
        listed = [one._asdict() for one in names]
        print_json({"vllm": found.release, "architectures": listed, "removed": dict(found.removed)})
        return
    columns = ("architecture", "task", "status", "family", "why")
    grouped = (DRAFT, POOLING)
    shown = [tuple(one) for one in names if one.status not in grouped]
    print_table(columns, shown, left=columns, least=("task",))
    counts = Counter(one.status for one in names)
    print_line()
    for status in grouped:
        (why,) = {one.why for one in names if one.status == status}
        tasks = ", ".join(dict.fromkeys(one.task for one in names if one.status == status))
        print_line(f"{counts[status]} names of {tasks}: {why}.")
    words = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    print_line(
        f"vLLM {found.release} registers {len(names)} names: {words}. "
        f"{len(found.removed)} that earlier releases had are removed."
    )


EPILOG: Final = """\b
JSON: a list with one object per model: name, ids (of its checkpoints on Hugging Face: id, format, source, the
public file that names it), architecture, hidden, vocab, tie_embeddings, max_position,
torch_dtype, checkpoint (dtype, kv_dtype, method, head_dtype, scale_bytes), vision (sizes of its image
encoder, or null), num_layers, num_parameters, active_parameters, and layers: one object per kind, with its
name, count, attention, mlp and formats.
With --support one object per model, GPU, engine, format and layout: model, gpu, engine, dtype, tp, pp, dp,
ep, moe_tp, status (measured, borrowed, modelled or refused), why.
With --architectures: vllm (the release), architectures: one object per name with name, task, status
(supported, same, by its text model, missing, draft or pooling), family, why; and removed: names that earlier
releases had, with the last one.
"""


LISTED_KINDS: Final = 2


CHOSEN: Final[Group] = {
    "model": option(list[str], "With --support: only this preset or config.json; repeatable."),
    "gpu": option(list[str], "GPU of --support; repeatable.  [default: with tables]", None, *GPU_NAMES),
    "engine": option(list[str], "Engine of --support; repeatable."),
    "dtype": option(list[str], "With --support: only this format, or auto; repeatable."),
}
"""What is printed of the support, as arguments of :func:`print_support`; all if empty."""


@taking(chosen=CHOSEN)
def models(
    *,
    support: Annotated[
        bool, typer.Option("--support", help="Print what is measured, borrowed, modelled or refused.")
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="With --support: every layout of --model and why, or counts by model."),
    ] = False,
    architectures: Annotated[
        bool,
        typer.Option("--architectures", help="Print which of the names that vLLM registers are supported."),
    ] = False,
    chosen: GroupValues,
    as_json: Json = False,
) -> None:
    """List the models known by name, or what plans are made of."""
    if architectures:
        if support or full or any(chosen.values()):
            raise PlanError("--architectures goes with --json alone")
        print_architectures(as_json=as_json)
        return
    if support:
        print_support(**{name: words or () for name, words in chosen.items()}, is_full=full, as_json=as_json)
        return
    if full or any(chosen.values()):
        raise PlanError("--model, --gpu, --engine, --dtype and --full choose what --support shows; give it")
    from fastroof import load_model, model_names

    specs = [load_model(name) for name in model_names()]
    if as_json:
        print_json([_as_json(spec) for spec in specs])
        return
    columns: dict[str, Callable[[ModelSpec], str]] = {
        "model": lambda spec: spec.name,
        "parameters": lambda spec: f"{spec.num_parameters / 1e9:.1f} B",
        "active": lambda spec: f"{spec.active_parameters / 1e9:.1f} B",
        "format": lambda spec: spec.checkpoint.dtype,
        "layers": _layers,
        "hidden": lambda spec: str(spec.hidden),
        "heads": lambda spec: _distinct(
            kind.attention.heads_text for kind in spec.kinds if kind.attention.heads_text
        ),
        "window": lambda spec: (
            _distinct(str(kind.attention.window) for kind in spec.kinds if kind.attention.window is not None)
            or "-"
        ),
        "MLP width, experts": lambda spec: _distinct(
            _width(kind.mlp) for kind in spec.kinds if hasattr(kind.mlp, "intermediate")
        ),
        "vocabulary": lambda spec: f"{spec.vocab:,}",
        "max context": lambda spec: f"{spec.max_position:,}",
    }
    least = ("vocabulary", "hidden", "window", "MLP width, experts", "heads", "layers", "active")
    print_records(specs, columns, left=("model", "format", "layers"), least=least)


def _as_json(spec: ModelSpec) -> dict[str, Any]:
    from fastroof.models.named import KNOWN_IDS

    sizes = asdict(spec)
    layers = [{"count": group["count"], **group["kind"]} for group in sizes.pop("layers")]
    ids = [
        {"id": known.hf_id, "format": known.dtype, "source": known.source}
        for known in KNOWN_IDS
        if known.preset == spec.name
    ]
    return {
        "name": sizes.pop("name"),
        "ids": ids,
        **sizes,
        **{name: getattr(spec, name) for name in ("num_layers", "num_parameters", "active_parameters")},
        "layers": layers,
    }


def _layers(spec: ModelSpec) -> str:
    if len(spec.layers) == 1:
        return str(spec.num_layers)
    if len(spec.layers) > LISTED_KINDS:
        return f"{spec.num_layers} of {len(spec.layers)} kinds"
    return ", ".join(f"{group.count} {group.kind.name}" for group in spec.layers)


def _width(mlp: Any) -> str:
    if not mlp.has_experts:
        return str(mlp.intermediate)
    shared = f" + {mlp.shared_intermediate}" if mlp.shared_intermediate else ""
    return f"{mlp.topk} of {mlp.num_experts} x {mlp.intermediate}{shared}"


def _distinct(texts: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(texts))
    if len(distinct) <= LISTED_KINDS or not all(text.isdigit() for text in distinct):
        return ", ".join(distinct)
    return f"{min(map(int, distinct))} to {max(map(int, distinct))}"
