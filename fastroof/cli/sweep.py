"""``fastroof sweep``: evaluate every deployment, or step, of a specification."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.caching import share_heaps, usable_processors
from fastroof.cli.capacity_tables import print_capacities
from fastroof.cli.option_groups import ENGINE, EXECUTION, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, check_engine
from fastroof.cli.output import console, duration, percent, print_json, print_table, shown_progress
from fastroof.command_group import GroupValues, taking
from fastroof.documents import parse_toml
from fastroof.errors import FastroofError
from fastroof.interrupts import BeforeTheEnd
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.sweep import BestStep, CapacitySummary, DeploymentSummary, StepSummary


EPILOG: Final = """\b
Examples:
  fastroof sweep
  fastroof sweep my.toml -o my.parquet --threads 8
  fastroof sweep my.toml -o my.parquet --resume
  fastroof sweep my.toml --executor ray --address auto
  fastroof sweep --example > my.toml
  fastroof sweep --models llama-3.1-70b,qwen3-32b --total-gpus 8 --isl 4000 --osl 500 \\
      --concurrency '{start = 1, stop = 512, step = 1}' --ttft-ms 500 --tpot-ms 30

A specification is TOML; keys can be given, or changed, as options. A value is a number, a comma-separated
list, or anything in TOML; a repeated option is a list of all its values. A specification with isl sweeps
deployments, one with [workload] and [slo] capacities (see `fastroof capacity --help`), otherwise decode
steps: `--example` and the packaged fastroof/sweep/steps/default.toml explain every key of them, `--schema` is
for editors. COLUMNS of fastroof.sweep.deployments and of fastroof.sweep.steps lists the columns of the
results with their units.

\b
JSON of steps: output, engine, plans, evaluations, evaluations_per_s, rows, evaluate_s, total_s, infeasible
(evaluations beyond memory, and beyond the TPOT limit), skipped (reason: names), best: one object per plan
[model, tp, dtype, kv_dtype, kv_len, batch_size, step_us, tokens_per_s, tokens_per_s_per_gpu, limited_by,
origin, relative_error (of the step's time), standing (best of its model in tokens/s a GPU, or tie: no further
from it than errors say)], batch_size 0 and nulls where no batch is within the limits.

\b
JSON of deployments: output, candidates, feasible, candidates_per_s, rows, evaluate_s, total_s, infeasible
(candidates by reason), skipped (reason: names), best: one object a group, with the columns of the results,
histograms (group: counts).
"""

DEFAULT_OUTPUT: Final = Path("results.parquet")
_KEYS: Final = "Keys of the specification"
_NESTED: Final = ("ttft_ms", "tpot_ms", "itl_ms", "request_latency_ms")

Text = list[str] | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep", epilog=EPILOG)(sweep)


def _key(help_text: str, *names: str) -> Any:
    return typer.Option(*names, metavar="VALUE", rich_help_panel=_KEYS, help=help_text)


@taking(run=EXECUTION)
def sweep(
    *,
    context: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC.toml]", help="Specification to sweep. [default: the packaged sweep]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Results: .parquet, .csv or .jsonl.  [default: results.parquet]",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of threads.  [default: all processors]")] = None,
    run: GroupValues,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print an example specification.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of specifications.")
    ] = False,
    models: Annotated[Text, _key("Presets, or config.json files.")] = None,
    gpus: Annotated[Text, _key("Names of GPUs, or gpu.toml files.")] = None,
    mode: Annotated[Text, _key("aggregated or disaggregated.")] = None,
    tp: Annotated[Text, _key("GPUs that share each layer.")] = None,
    pp: Annotated[Text, _key("Pipeline stages.")] = None,
    dp: Annotated[Text, _key("Ranks of attention data parallelism.")] = None,
    ep: Annotated[Text, _key("Number of GPU groups that the experts are spread over.")] = None,
    routing: Annotated[
        Text, _key("Distribution of tokens over experts: auto, balanced, power_law_1.01, power_law_1.2.")
    ] = None,
    replicas: Annotated[Text, _key("Number of replicas; or --total-gpus.")] = None,
    total_gpus: Annotated[Text, _key("GPUs of the whole deployment.")] = None,
    dtype: Annotated[Text, _key("auto (the checkpoint's), bf16, fp8, fp8_block, nvfp4, ...")] = None,
    kv_dtype: Annotated[Text, _key("auto (the checkpoint's), bf16, fp8.")] = None,
    engine: Annotated[Text, _key("Serving engines (see fastroof engines), or .toml files.", *ENGINE)] = None,
    isl: Annotated[Text, _key("Prompt length in tokens.")] = None,
    osl: Annotated[Text, _key("Output length in tokens.")] = None,
    concurrency: Annotated[Text, _key("Number of clients; or --request-rate.")] = None,
    request_rate: Annotated[Text, _key("Requests per second.")] = None,
    max_num_batched_tokens: Annotated[
        Text, _key("Maximum number of tokens in a step.", *MAX_NUM_BATCHED_TOKENS)
    ] = None,
    max_num_seqs: Annotated[Text, _key("Maximum number of concurrent sequences.", *MAX_NUM_SEQS)] = None,
    prefix_hit: Annotated[Text, _key("Share of a prompt in the prefix cache.")] = None,
    client_overhead_ms: Annotated[
        Text, _key("Time of a request outside the engine, ms.", "--client-overhead")
    ] = None,
    lora: Annotated[Text, _key("LoRA adapters: RANK[:ADAPTERS[:MODULES]].")] = None,
    speculation: Annotated[Text, _key("{num_draft_tokens = 3, accepted = 2.2, draft = 'mtp'}")] = None,
    ttft_ms: Annotated[Text, _key("Maximum mean time to first token, ms.")] = None,
    tpot_ms: Annotated[Text, _key("Maximum mean time per output token, ms.")] = None,
    itl_ms: Annotated[Text, _key("Maximum mean time between two tokens, ms.")] = None,
    request_latency_ms: Annotated[Text, _key("Maximum mean time of a request, ms.")] = None,
    objective: Annotated[Text, _key("Metric to maximize.")] = None,
    gpu_hour_price: Annotated[Text, _key("Price per GPU hour.")] = None,
    keep: Annotated[Text, _key("Rows to keep: pareto, best or all.")] = None,
    k: Annotated[
        Text,
        typer.Option("-k", metavar="VALUE", rich_help_panel=_KEYS, help="Number of best rows per group."),
    ] = None,
    per: Annotated[Text, _key("Columns that make a group.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=_KEYS, help="Any other key, in TOML."),
    ] = None,
) -> None:
    """Sweep millions of deployments, or steps; keep the best."""
    if example or schema:
        _print_about(example)
        return
    from fastroof import run_sweep
    from fastroof.sweep import DeploymentSpec, load_spec

    for name in engine or ():
        check_engine(name)
    changes = _changes(context, settings or [])
    # keys alone are a specification; a file's keys can be changed
    loaded = load_spec(changes) if spec is None and changes else load_spec(spec, changes)
    if isinstance(loaded, DeploymentSpec):
        for model, words in loaded.accepted_sources().items():
            typer.echo(f"accepted, {model}: {words}", err=True)
    rows = DEFAULT_OUTPUT if output is None else output
    if output is None and not quiet:
        what = "the packaged sweep (see --help)" if spec is None and not changes else "this sweep"
        say_where(rows, what)
    share_heaps(1)
    with resumable(rows), shown_progress("sweep", "evaluations", quiet=as_json or quiet) as progress:
        summary = run_sweep(
            loaded,
            rows,
            threads=usable_processors() if threads is None else threads,
            progress=progress,
            **run,
        )
    print_summary(summary, as_json=as_json, quiet=quiet)


def _changes(context: typer.Context, settings: list[str]) -> dict[str, Any]:
    """Return the specification's keys that were given as options."""
    from fastroof.sweep import DeploymentSpec

    given = {key: value for key, value in context.params.items() if value}
    keys = (*DeploymentSpec.model_fields, *_NESTED)
    texts: dict[str, list[str]] = {key: list(given[key]) for key in keys if key in given}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set takes KEY=VALUE, got {setting!r}")
        texts.setdefault(key.strip(), []).append(value)
    changes = {key: _together([_value(text) for text in values]) for key, values in texts.items()}
    limits = {key: changes.pop(key) for key in _NESTED if key in changes}
    if limits:
        changes["constraints"] = {**changes.get("constraints", {}), **limits}
    return changes


def _together(values: list[Any]) -> Any:
    """Return the value of an option: a list of all values if it was repeated."""
    if len(values) == 1:
        return values[0]
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


def _value(given: str) -> Any:
    """Read a value: TOML if it is that, a comma-separated list, or text."""
    try:
        return parse_toml(f"value = {given}", "value")["value"]
    except FastroofError:
        pass  # also what is beyond a limit: as text it is not a value of any key
    if "," in given and not given.lstrip().startswith(("[", "{")):
        return [_value(part.strip()) for part in given.split(",")]
    return given.strip()


def _print_about(is_example: bool) -> None:
    if is_example:
        from importlib import resources

        packaged = resources.files("fastroof.sweep.deployments") / "example.toml"
        sys.stdout.write(packaged.read_text(encoding="utf-8"))
        return
    from fastroof.sweep import CapacitySpec, DeploymentSpec, StepSpec

    kinds = [kind.model_json_schema() for kind in (DeploymentSpec, StepSpec, CapacitySpec)]
    definitions = {name: each for kind in kinds for name, each in kind.pop("$defs", {}).items()}
    print_json(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": kinds, "$defs": definitions}
    )


MOST_GROUPS: Final = 40
"""Groups whose best deployment is printed; all are in the file."""


def print_summary(
    summary: StepSummary | DeploymentSummary | CapacitySummary, *, as_json: bool, quiet: bool
) -> None:
    """Print the summary of a sweep: as text, as JSON, or not at all."""
    if as_json:
        print_json(summary.document())
    elif not quiet:
        _PRINTED[summary.kind](summary)


def _print_steps(summary: StepSummary) -> None:
    """Print the best step of each plan, and the counts."""
    out = console()
    kv_dtypes = {best.kv_dtype for best in summary.best}
    kv_lens = {best.kv_len for best in summary.best}
    columns = [
        "model",
        "tp",
        "dtype",
        "batch",
        "ms a step",
        "tokens/s",
        "tokens/s a GPU",
        "limited by",
        "origin",
    ]
    if len(kv_dtypes) > 1:
        columns.insert(3, "kv dtype")
    for size in ("ep", "dp", "pp"):
        if any(getattr(best, size) > 1 for best in summary.best):
            columns.insert(2, size)
    if len(kv_lens) > 1:
        columns.insert(columns.index("batch"), "kv_len")
    if any(best.relative_error is not None for best in summary.best):
        columns.insert(columns.index("tokens/s"), "error")
        columns.insert(columns.index("limited by"), "standing")
    at = f" at kv_len {min(kv_lens):,}" if len(kv_lens) == 1 else ""
    out.print(f"Best throughput{at} within the limits, engine {summary.engine}:\n", soft_wrap=True)
    rows = [[_step_cell(best, name) for name in columns] for best in summary.best]
    print_table(columns, rows, left=("model", "dtype", "kv dtype", "standing", "limited by", "origin"))
    out.print()
    _print_skipped(summary.skipped)
    beyond = ", ".join(f"{count:,} beyond {limit}" for limit, count in summary.infeasible.items() if count)
    out.print(
        f"{summary.evaluations:,} steps timed for {summary.plans} plans in {duration(summary.evaluate_s)}: "
        f"{summary.evaluations_per_s / 1e6:.1f} million a second" + (f" ({beyond})" if beyond else ""),
        soft_wrap=True,
    )
    out.print(
        f"{summary.rows:,} rows in {summary.output}; {duration(summary.total_s)} in all", soft_wrap=True
    )


def _print_skipped(skipped: dict[str, tuple[str, ...]]) -> None:
    from fastroof.sweep.deployments.kind import INFEASIBLE

    for reason, names in skipped.items():
        console().print(f"left out, {INFEASIBLE.get(reason, reason)}: {', '.join(names)}", soft_wrap=True)


def _step_cell(best: BestStep, column: str) -> str:
    if column == "batch":
        return f"{best.batch_size:,}" if best.batch_size else "-"
    if column == "ms a step":
        return "-" if best.step_us is None else f"{best.step_us / US_PER_MS:.2f}"
    if column == "tokens/s":
        return "-" if best.tokens_per_s is None else f"{best.tokens_per_s:,.0f}"
    if column == "tokens/s a GPU":
        return "-" if best.tokens_per_s_per_gpu is None else f"{best.tokens_per_s_per_gpu:,.0f}"
    if column == "error":
        return "-" if best.relative_error is None else f"+- {percent(best.relative_error)}"
    if column == "standing":
        return best.standing or ""
    if column == "kv_len":
        return f"{best.kv_len:,}"
    return str(getattr(best, column.replace(" ", "_")) or "-")


def _print_deployments(summary: DeploymentSummary) -> None:
    """Print the best deployment of each group, and the counts."""
    from fastroof.sweep.deployments.kind import INFEASIBLE

    out = console()
    best = summary.best[:MOST_GROUPS]
    names = ["model", "GPUs", "layout", "dtype", "clients", "TTFT ms", "TPOT ms", "tokens/s a GPU"]
    names += ["tokens/s a user", "bound by"]
    extra = {"kv_dtype": "kv dtype", "engine": "engine", "max_num_batched_tokens": "token budget",
             "prefix_hit": "prefix hit"}  # fmt: skip
    varied = {column: name for column, name in extra.items() if len({row[column] for row in best}) > 1}
    names[4:4] = list(varied.values())
    if len({(row["isl"], row["osl"]) for row in best}) > 1:
        names[1:1] = ["isl", "osl"]
    if any(row["request_rate_per_s"] is not None for row in best):
        names.insert(names.index("clients"), "requests/s")
    if any(row["cost_per_million_tokens"] is not None for row in best):
        names.insert(names.index("bound by"), "cost of 1M tokens")
    if best:
        at = ""
        if "isl" not in names:
            at = f" at isl {best[0]['isl']:,}, osl {best[0]['osl']:,}"
        engine = "" if "engine" in varied else f", engine {best[0]['engine']}"
        out.print(f"Best deployments{at} within the limits{engine}:\n", soft_wrap=True)
        rows = [[_deployment_cell(row, name, varied) for name in names] for row in best]
        print_table(names, rows, left=("model", "GPUs", "layout", "dtype", "kv dtype", "engine", "bound by"))
        if len(summary.best) > len(best):
            out.print(f"and {len(summary.best) - len(best):,} more groups", soft_wrap=True)
    else:
        out.print("No deployment is within the limits.", soft_wrap=True)
    out.print()
    _print_skipped(summary.skipped)
    out.print(
        f"{summary.candidates:,} deployments estimated in {duration(summary.total_s)}: "
        f"{summary.feasible:,} are possible and within the limits",
        soft_wrap=True,
    )
    for reason, count in sorted(summary.infeasible.items(), key=lambda pair: -pair[1]):
        out.print(f"  {count:>13,} are not: {INFEASIBLE[reason]}", soft_wrap=True)
    out.print(f"{summary.rows:,} rows in {summary.output}", soft_wrap=True)


def _deployment_cell(row: dict[str, Any], name: str, varied: dict[str, str]) -> str:
    if name == "GPUs":
        return f"{row['total_gpus']} x {row['gpu']}"
    if name == "layout":
        from fastroof.models.layout import copies_words

        return copies_words(row)
    columns = {
        "isl": "isl", "osl": "osl", "clients": "concurrency", "TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms",
        "tokens/s a GPU": "tokens_per_s_per_gpu", "tokens/s a user": "tokens_per_s_per_user",
        "bound by": "bound", "requests/s": "requests_per_s", "cost of 1M tokens": "cost_per_million_tokens",
        **{shown: column for column, shown in varied.items()},
    }  # fmt: skip
    value = row[columns.get(name, name)]
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 or value.is_integer() else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_PRINTED: Final[dict[str, Callable[[Any], None]]] = {
    "steps": _print_steps,
    "deployments": _print_deployments,
    "capacities": print_capacities,
}
"""What prints a summary, by its kind of sweep."""


def say_where(output: Path, what: str) -> None:
    """Print on standard error, before a sweep starts, the default output file."""
    there = ", in place of the one there" if output.exists() else ""
    typer.echo(f"{what}: its rows go to {output}{there}; -o names another file", err=True)


@contextmanager
def resumable(output: Path) -> Iterator[None]:
    """Print how to go on with a sweep where Ctrl-C ends it."""
    # now, and not while the process is about to end
    from fastroof.sweep.checkpoint import parts_folder

    print_once = cache(partial(_say_how_to_resume, parts_folder(output)))
    with BeforeTheEnd(print_once):
        try:
            yield
        except KeyboardInterrupt:
            print_once()
            raise


def _say_how_to_resume(folder: Path) -> None:
    if not folder.is_dir():
        typer.echo("interrupted before there was anything to keep", err=True)
        return
    words = [
        "fastroof",
        *(word for word in sys.argv[1:] if word not in ("--resume", "--restart")),
        "--resume",
    ]
    typer.echo(f"interrupted; what is done is kept in {folder}. To continue: {shlex.join(words)}", err=True)
