"""``fastroof sweep``: evaluate every deployment, or step, of a specification."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.option_groups import EXECUTION
from fastroof.cli.options import option
from fastroof.cli.output import (
    attribute,
    duration,
    limit_words,
    percent,
    print_json,
    print_line,
    print_records,
    print_table,
    range_words,
)
from fastroof.command_group import Group, GroupValues, taking
from fastroof.documents import parse_toml
from fastroof.errors import FastroofError
from fastroof.host import share_heaps, usable_processors
from fastroof.interrupts import BeforeTheEnd
from fastroof.progress import mute, shown_progress
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.sweep import BestStep, CapacitySummary, DeploymentSummary, StepSummary

    AnySummary = StepSummary | DeploymentSummary | CapacitySummary


EPILOG: Final = """\b
Examples:
  fastroof sweep
  fastroof sweep my.toml -o my.parquet --threads 8
  fastroof sweep my.toml -o my.parquet --resume
  fastroof sweep my.toml --address auto
  fastroof sweep --example > my.toml
  fastroof sweep --model llama-3.1-70b,qwen3-32b --gpus 8 --isl 4000 --osl 500 \\
      --clients '{start = 1, stop = 512, step = 1}' --ttft 500 --tpot 30

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
_NESTED: Final = ("ttft_ms", "tpot_ms", "itl_ms", "request_latency_ms")


def _key(help_text: str, *names: str) -> tuple[Any, Any]:
    return option(list[str], help_text, "VALUE", *names)


KEYS: Final[Group] = {
    "models": _key("Presets, or config.json files.", "--model"),
    "gpus": _key("Names of GPUs, or gpu.toml files.", "--gpu"),
    "mode": _key("aggregated or disaggregated."),
    "tp": _key("GPUs that share each layer."),
    "pp": _key("Pipeline stages."),
    "dp": _key("Ranks of attention data parallelism."),
    "ep": _key("Number of GPU groups that the experts are spread over."),
    "routing": _key("Distribution of tokens over experts: auto, balanced, power_law_1.01, power_law_1.2."),
    "replicas": _key("Number of replicas; or --gpus."),
    "total_gpus": _key("GPUs of the whole deployment.", "--gpus"),
    "dtype": _key("auto (the checkpoint's), bf16, fp8, fp8_block, nvfp4, ..."),
    "kv_dtype": _key("auto (the engine's own), bf16, fp8, nvfp4, int8_per_token_head."),
    "engine": _key("Serving engines (see fastroof engines), or .toml files."),
    "isl": _key("Prompt length in tokens."),
    "osl": _key("Output length in tokens."),
    "clients": _key("Number of clients; or --rate."),
    "rate": _key("Requests per second."),
    "max_num_batched_tokens": _key("Maximum number of tokens in a step."),
    "max_num_seqs": _key("Maximum number of concurrent sequences."),
    "prefix_hit": _key("Share of a prompt in the prefix cache."),
    "front_end": _key("Front end: plain, dynamo, none or milliseconds."),
    "lora": _key("LoRA adapters: RANK[:ADAPTERS[:MODULES]]."),
    "ttft_ms": _key("Maximum mean time to first token, ms.", "--ttft"),
    "tpot_ms": _key("Maximum mean time per output token, ms.", "--tpot"),
    "itl_ms": _key("Maximum mean time between two tokens, ms.", "--itl"),
    "request_latency_ms": _key("Maximum mean time of a request, ms.", "--e2e"),
    "objective": _key("Metric to maximize."),
    "gpu_hour_price": _key("Price per GPU hour.", "--price"),
}
"""Keys of a specification that have an option; --set takes any."""


@taking(run=EXECUTION, keys=KEYS)
def sweep(
    *,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC.toml]", help="Specification to sweep. [default: the packaged sweep]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Results: .parquet, .csv or .jsonl.  [default: results.parquet]"),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of threads.  [default: all processors]")] = None,
    run: GroupValues,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print an example specification.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of specifications.")
    ] = False,
    keys: GroupValues,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other key, in TOML."),
    ] = None,
) -> None:
    """Sweep millions of deployments, or steps; keep the best."""
    if example or schema:
        _print_about(example)
        return
    from fastroof import run_sweep
    from fastroof.sweep import DeploymentSpec, load_spec

    changes = _changes(keys, settings or [])
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
    if quiet:
        mute()
    with resumable(rows), shown_progress("sweep", "evaluations", quiet=as_json or quiet) as progress:
        summary = run_sweep(
            loaded,
            rows,
            threads=usable_processors() if threads is None else threads,
            progress=progress,
            executor="ray" if run["address"] else "local",
            **run,
        )
    print_summary(summary, as_json=as_json, quiet=quiet)


def _changes(given: GroupValues, settings: list[str]) -> dict[str, Any]:
    """Return the specification's keys that were given as options."""
    from fastroof.sweep import DeploymentSpec

    known = (*DeploymentSpec.model_fields, *_NESTED)
    texts: dict[str, list[str]] = {key: list(given[key]) for key in known if given.get(key)}
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


def print_summary(summary: AnySummary, *, as_json: bool, quiet: bool) -> None:
    """Print the summary of a sweep: as text, as JSON, or not at all."""
    if as_json:
        print_json(summary.document())
    elif not quiet:
        _PRINTED[summary.kind](summary)


def _print_steps(summary: StepSummary) -> None:
    """Print the best step of each plan, and the counts."""
    from fastroof.sweep.deployments.kind import INFEASIBLE

    every = summary.best
    kv_lens = {best.kv_len for best in every}
    has_errors = any(best.relative_error is not None for best in every)
    is_shown = {
        **{size: any(getattr(best, size) > 1 for best in every) for size in ("pp", "dp", "ep")},
        "kv dtype": len({best.kv_dtype for best in every}) > 1,
        "kv_len": len(kv_lens) > 1,
        "error": has_errors,
        "standing": has_errors,
    }
    at = f" at kv_len {min(kv_lens):,}" if len(kv_lens) == 1 else ""
    print_line(f"Best throughput{at} within the limits, engine {summary.engine}:\n")
    columns = {head: cell for head, cell in _STEP.items() if is_shown.get(head, True)}
    print_records(every, columns, left=("model", "dtype", "kv dtype", "standing", "limited by", "origin"))
    print_line()
    _print_skipped(summary, INFEASIBLE)
    beyond = ", ".join(f"{count:,} beyond {limit}" for limit, count in summary.infeasible.items() if count)
    print_line(
        f"{summary.evaluations:,} steps timed for {summary.plans} plans in {duration(summary.evaluate_s)}: "
        f"{summary.evaluations_per_s / 1e6:.1f} million a second" + (f" ({beyond})" if beyond else "")
    )
    print_line(f"{summary.rows:,} rows in {summary.output}; {duration(summary.total_s)} in all")


_STEP: Final[dict[str, Callable[[BestStep], str]]] = {
    **{name: attribute(name) for name in ("model", "tp", "pp", "dp", "ep", "dtype")},
    "kv dtype": attribute("kv_dtype"),
    "kv_len": attribute("kv_len", ","),
    "batch": lambda best: f"{best.batch_size:,}" if best.batch_size else "-",
    "ms a step": lambda best: "-" if best.step_us is None else f"{best.step_us / US_PER_MS:.2f}",
    "error": lambda best: "-" if best.relative_error is None else f"±{percent(best.relative_error)}",
    "tokens/s": attribute("tokens_per_s", ",.0f"),
    "tokens/s a GPU": attribute("tokens_per_s_per_gpu", ",.0f"),
    "standing": lambda best: best.standing or "",
    "limited by": attribute("limited_by"),
    "origin": attribute("origin"),
}


def _print_deployments(summary: DeploymentSummary) -> None:
    """Print the best deployment of each group, and the counts."""
    from fastroof.sweep.deployments.kind import INFEASIBLE

    best = summary.best[:MOST_GROUPS]

    def varies(*columns: str) -> bool:
        return len({tuple(row[column] for column in columns) for row in best}) > 1

    is_shown = {
        **{head: varies("isl", "osl") for head in ("isl", "osl")},
        **{head: varies(_DEPLOYMENT[head]) for head in ("kv dtype", "engine", "token budget", "prefix hit")},
        "requests/s": any(row["request_rate_per_s"] is not None for row in best),
        "cost of 1M tokens": any(row["cost_per_million_tokens"] is not None for row in best),
    }
    if best:
        at = "" if is_shown["isl"] else f" at isl {best[0]['isl']:,}, osl {best[0]['osl']:,}"
        engine = "" if is_shown["engine"] else f", engine {best[0]['engine']}"
        print_line(f"Best deployments{at} within the limits{engine}:\n")
        heads = [head for head in _DEPLOYMENT if is_shown.get(head, True)]
        rows = [[_deployment_cell(row, head) for head in heads] for row in best]
        print_table(heads, rows, left=("model", "GPUs", "layout", "dtype", "kv dtype", "engine", "bound by"))
    else:
        print_line("No deployment is within the limits.")
    _print_counts(
        summary,
        INFEASIBLE,
        f"{summary.candidates:,} deployments estimated in {duration(summary.total_s)}: "
        f"{summary.feasible:,} are possible and within the limits",
        "{:>13,} are not: ",
    )


_DEPLOYMENT: Final = {
    "model": "model", "isl": "isl", "osl": "osl", "GPUs": "gpu", "layout": "tp", "dtype": "dtype",
    "kv dtype": "kv_dtype", "engine": "engine", "token budget": "max_num_batched_tokens",
    "prefix hit": "prefix_hit", "requests/s": "requests_per_s", "clients": "clients",
    "TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms", "tokens/s a GPU": "tokens_per_s_per_gpu",
    "tokens/s a user": "tokens_per_s_per_user", "cost of 1M tokens": "cost_per_million_tokens",
    "bound by": "bound",
}  # fmt: skip
"""Columns of results by their heads."""


def _deployment_cell(row: dict[str, Any], head: str) -> str:
    if head == "GPUs":
        return f"{row['total_gpus']} x {row['gpu']}"
    if head == "layout":
        from fastroof.models.layout import copies_words

        return copies_words(row)
    value = row[_DEPLOYMENT[head]]
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 or value.is_integer() else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_capacities(summary: CapacitySummary) -> None:
    """Print the best deployment of each group, and the counts."""
    from fastroof.models.layout import split_words
    from fastroof.sweep.capacities.kind import LOST

    best = summary.best[:MOST_GROUPS]
    if best:
        print_line("Most requests per second and GPU within the limits:\n")
        columns: dict[str, Callable[[dict[str, Any]], str]] = {
            "model": lambda row: row["model"],
            "GPUs": lambda row: f"{row['total_gpus']} x {row['gpu']}",
            "layout": lambda row: f"{row['replicas']} x {split_words(row)}",
            "dtype": lambda row: row["dtype"],
            "engine": lambda row: row["engine"],
            "tokens a step": lambda row: f"{row['max_num_batched_tokens']:,}",
            "max requests": lambda row: f"{row['max_num_seqs']:,}",
            "requests/s a GPU": lambda row: f"{row['requests_per_s_per_gpu']:,.4g}",
            "requests/s": lambda row: f"{row['requests_per_s']:,.4g}",
            "one error": range_words,
            "limited by": lambda row: limit_words(row["limit"]),
        }
        print_records(best, columns, left=("model", "GPUs", "layout", "dtype", "engine", "limited by"))
        sampled = [row["sampling_error"] for row in best if row["sampling_error"] is not None]
        if sampled:
            print_line(f"\nby chance up to ±{percent(max(sampled))}, one standard error")
    else:
        print_line("No deployment keeps the limits at any rate.")
    _print_counts(
        summary,
        LOST,
        f"capacities of {summary.candidates:,} deployments in {duration(summary.total_s)}: "
        f"{summary.feasible:,} keep the limits",
        "{:>9,} do not: ",
        between="; ",
    )


def _print_counts(
    summary: DeploymentSummary | CapacitySummary,
    reasons: Mapping[str, str],
    counts: str,
    lost: str,
    between: str = ", ",
) -> None:
    """Print how many groups, deployments and rows there are, and what was left out."""
    if len(summary.best) > MOST_GROUPS:
        print_line(f"and {len(summary.best) - MOST_GROUPS:,} more groups")
    print_line()
    _print_skipped(summary, reasons, between)
    print_line(counts)
    for reason, count in sorted(summary.infeasible.items(), key=lambda pair: -pair[1]):
        print_line(f"  {lost.format(count)}{reasons[reason]}")
    print_line(f"{summary.rows:,} rows in {summary.output}")


def _print_skipped(summary: AnySummary, reasons: Mapping[str, str], between: str = ", ") -> None:
    for reason, names in summary.skipped.items():
        print_line(f"left out, {reasons.get(reason, reason)}: {between.join(names)}")


_PRINTED: Final[dict[str, Callable[[Any], None]]] = {
    "steps": _print_steps,
    "deployments": _print_deployments,
    "capacities": _print_capacities,
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
    again = (word for word in sys.argv[1:] if word not in ("--resume", "--restart"))
    words = shlex.join(["fastroof", *again, "--resume"])
    typer.echo(f"interrupted; finished parts are stored in {folder}. To continue: {words}", err=True)
