"""``fastroof models``: the models known by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.checkout import checkout_module
from fastroof.cli.options import GPU_NAMES, Json
from fastroof.cli.output import print_json, print_line, print_records, print_table
from fastroof.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastroof.models import ModelSpec
    from fastroof.plan.plan_set import Support


def print_support(
    models: Sequence[str],
    gpus: Sequence[str],
    engines: Sequence[str],
    dtypes: Sequence[str],
    *,
    is_full: bool,
    as_json: bool,
) -> None:
    """Compute and print a summary, a row per model and format, or for one model a row per layout."""
    from fastroof import gpu_names, load_model, model_names
    from fastroof.engines import engine_of_version, serving_engines
    from fastroof.load.by_name import table_folders
    from fastroof.models.execution import AUTO, DTYPES
    from fastroof.plan.plan_set import FORMATS, best_support, support_rows

    unknown = [dtype for dtype in dtypes if dtype not in (AUTO, *DTYPES)]
    if unknown:
        raise PlanError(f"--dtype must be one of {AUTO}, {', '.join(DTYPES)}, got {', '.join(unknown)}")
    specs = [load_model(name) for name in models or model_names()]
    wanted = list(gpus) or [name for name in gpu_names() if table_folders(name)]
    profiles = list(engines) or [engine_of_version(name).name for name in serving_engines()]
    if not (models or is_full or as_json):
        _print_summary(list(best_support(specs, wanted, profiles, dtypes=dtypes or (AUTO,))), len(specs))
        return
    rows = list(support_rows(specs, wanted, profiles, dtypes=dtypes or FORMATS))
    if as_json:
        print_json([row._asdict() for row in rows])
    elif len(specs) == 1:
        _print_layouts(rows)
    else:
        _print_matrix(rows)


def _print_summary(rows: Sequence[Support], models: int) -> None:
    """Print how many models each GPU and engine has, by the status of their best layout."""
    from fastroof.plan.plan_set import STATUSES

    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        counts.setdefault((row.gpu, row.engine), Counter())[row.status] += 1
    table = [(*place, *(str(counted[name]) for name in STATUSES)) for place, counted in counts.items()]
    print_table(("gpu", "engine", *STATUSES), table, left=("gpu", "engine"))
    print_line(
        f"\n{models} models, each by its best layout on up to 8 GPUs in its checkpoint's format (or "
        "--dtype). --model NAME lists the layouts of one with reasons, --full all models and formats."
    )


def _print_layouts(rows: Sequence[Support]) -> None:
    from fastroof.models.layout import split_words

    columns: dict[str, Callable[[Support], str]] = {
        "gpu": lambda row: row.gpu,
        "engine": lambda row: row.engine,
        "format": lambda row: row.dtype,
        "layout": lambda row: split_words({size: getattr(row, size) for size in ("tp", "pp", "dp", "ep")}),
        "status": lambda row: row.status,
        "why": lambda row: row.why,
    }
    print_records(rows, columns, left=tuple(columns))


def _print_matrix(rows: Sequence[Support]) -> None:
    from fastroof.plan.plan_set import STATUSES

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
    print_line(f"Layouts that are {'/'.join(STATUSES)}. Of {len(rows):,} in all: {words}.")


def print_architectures(registry: Path | None, *, as_json: bool) -> None:
    """Print which of the names that vLLM registers are read, and why the others are not."""
    from fastroof.models.architectures import DRAFT, POOLING, STATUSES, read_registry, shipped_registry

    found = shipped_registry() if registry is None else read_registry(registry)
    names = found.architectures()
    if as_json:
        listed = [one._asdict() for one in names]
        print_json({"vllm": found.release, "architectures": listed, "removed": dict(found.removed)})
        return
    columns = ("architecture", "task", "status", "family", "why")
    grouped = (DRAFT, POOLING)
    shown = [tuple(one) for one in names if one.status not in grouped]
    print_table(columns, shown, left=columns, least=("why", "task"))
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
With --roster: package (name and version), configs, configs_loaded, and combinations: one object per
combination with model, gpu, engine, verdict (the matrix's), tp, status, on_request (needs --allow-modelled),
fits, why, borrowed, modelled (operators), streams_only, is_covered.
With --architectures: vllm (the release), architectures: one object per name with name, task, status
(supported, same, by its text model, missing, draft or pooling), family, why; and removed: names that earlier
releases had, with the last one.

The roster has one plan per combination of model, GPU and engine that aiconfigurator-core's support matrix
calls PASS (--failed: those it has no data for), with the largest tensor parallelism of 8, 4, 2 and 1 that
works. A cell is covered/all (measured, borrowed, only norms and the like modelled, others modelled).
"""


LISTED_KINDS: Final = 2


def models(
    support: Annotated[
        bool, typer.Option("--support", help="Print what is measured, borrowed, modelled or refused.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --support: every model and format, not a summary.")
    ] = False,
    roster: Annotated[
        bool, typer.Option("--roster", help="Count what plans cover of aiconfigurator-core's support matrix.")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="With --roster: list what that matrix has no data for.")
    ] = False,
    architectures: Annotated[
        bool,
        typer.Option("--architectures", help="Print which of the names that vLLM registers are supported."),
    ] = False,
    registry: Annotated[
        Path | None,
        typer.Option(
            metavar="WHEEL",
            help="With --architectures: read them from a wheel of vLLM or its folder.  [default: the record]",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="With --support: only this preset or config.json; with --roster: this Hugging Face id; "
            "repeatable."
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(*GPU_NAMES, help="GPU of --support or --roster; repeatable.  [default: with tables]"),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="Engine of --support or --roster; repeatable.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="With --support: only this format, or auto; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models known by name, or what plans are made of."""
    if (failed and not roster) or (roster and (support or dtype or full)):
        raise PlanError(
            "--roster goes with --failed, --model, --gpu and --engine, and --failed with --roster"
        )
    if registry and not architectures:
        raise PlanError("--registry goes with --architectures")
    if architectures:
        if support or roster or model or gpu or engine or dtype or full:
            raise PlanError("--architectures goes with --registry and --json")
        print_architectures(registry, as_json=as_json)
        return
    if roster:
        judging = checkout_module("roster", "fastroof models --roster", "roster")
        judging.print_roster(model or (), gpu or (), engine or (), failed, as_json)
        return
    if support:
        print_support(model or (), gpu or (), engine or (), dtype or (), is_full=full, as_json=as_json)
        return
    if model or gpu or engine or dtype or full:
        raise PlanError(
            "--model, --gpu, --engine, --dtype and --full choose what --support shows; give it (or --roster)"
        )
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
        "heads": lambda spec: _distinct(a.heads_text for a in _attentions(spec) if a.heads_text),
        "window": lambda spec: (
            _distinct(str(a.window) for a in _attentions(spec) if a.window is not None) or "-"
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
    parameters = {"num_parameters": spec.num_parameters, "active_parameters": spec.active_parameters}
    ids = [
        {"id": known.hf_id, "format": known.dtype, "source": known.source}
        for known in KNOWN_IDS
        if known.preset == spec.name
    ]
    return {
        "name": sizes.pop("name"),
        "ids": ids,
        **sizes,
        "num_layers": spec.num_layers,
        **parameters,
        "layers": layers,
    }


def _attentions(spec: ModelSpec) -> list[Any]:
    return [kind.attention for kind in spec.kinds]


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
