"""``fastroof sweep``: the main job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fastroof.cli.output import print_json
from fastroof.cli.progress import shown_progress
from fastroof.documents import parse_toml
from fastroof.errors import FastroofError
from fastroof.processors import usable_processors

__all__ = ["register"]

EPILOG: Final = """\b
Examples:
  fastroof sweep
  fastroof sweep my.toml -o my.parquet --threads 8
  fastroof sweep my.toml -o my.parquet --resume
  fastroof sweep my.toml -o my-3.parquet --shard 3/16
  fastroof sweep my.toml --engine ray --address auto
  fastroof sweep --example > my.toml
  fastroof sweep --models llama-3.1-70b,qwen3-32b --total-gpus 8 --isl 4000 --osl 500 \\
      --concurrency '{start = 1, stop = 512, step = 1}' --ttft-ms 500 --tpot-ms 30

A specification is TOML; keys can be given, or changed, as options. A value is a number, a comma-separated
list, or anything in TOML. One with isl sweeps deployments, one with [workload] and [slo] capacities (see
`fastroof capacity --help`), otherwise decode steps: `--example` and the
packaged fastroof/sweep/steps/default.toml explain every key of them, `--schema` is for editors. COLUMNS of
fastroof.sweep.deployments and of fastroof.sweep.steps lists the columns of the results with their units.

\b
JSON of steps: output, runtime, plans, evaluations, evaluations_per_s, rows, evaluate_s, total_s, infeasible
(evaluations beyond memory, and beyond the TPOT limit), skipped (reason: names), best: one object a plan
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
_NESTED: Final = ("ttft_ms", "tpot_ms", "request_latency_ms")

Text = str | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep", epilog=EPILOG)(sweep)


def _key(help_text: str) -> Any:
    return typer.Option(metavar="VALUE", rich_help_panel=_KEYS, help=help_text)


def sweep(
    context: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC.toml]", help="What to sweep; without it the packaged sweep."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where the results go: .parquet, .csv or .jsonl.  [default: results.parquet]",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads to use.  [default: all processors]")] = None,
    engine: Annotated[str, typer.Option(help="Where the sweep runs: local or ray.")] = "local",
    address: Annotated[
        Text, typer.Option(help="A Ray cluster: auto, host:port.  [default: start one here]")
    ] = None,
    shard: Annotated[
        Text, typer.Option(metavar="I/N", help="Sweep part I of N only; `fastroof merge` joins the parts.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Drop what such a run has done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no summary.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print an example of a specification.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print its JSON schema.")] = False,
    models: Annotated[Text, _key("Names of models, or config.json files.")] = None,
    gpus: Annotated[Text, _key("Names of GPUs, or gpu.toml files.")] = None,
    mode: Annotated[Text, _key("aggregated, disaggregated.")] = None,
    tp: Annotated[Text, _key("GPUs that a replica is split over.")] = None,
    pp: Annotated[Text, _key("Pipeline stages.")] = None,
    dp: Annotated[Text, _key("Ranks of attention data parallelism.")] = None,
    ep: Annotated[Text, _key("Groups of experts on GPUs of their own.")] = None,
    routing: Annotated[Text, _key("balanced, power_law_1.01, power_law_1.2.")] = None,
    replicas: Annotated[Text, _key("Replicas; or --total-gpus.")] = None,
    total_gpus: Annotated[Text, _key("GPUs of the whole deployment.")] = None,
    dtype: Annotated[Text, _key("auto (the checkpoint's), bf16, fp8, fp8_block, nvfp4, ...")] = None,
    kv_dtype: Annotated[Text, _key("auto (the checkpoint's), bf16, fp8.")] = None,
    runtime: Annotated[Text, _key("Names of engines' profiles, or files.")] = None,
    isl: Annotated[Text, _key("Tokens of a prompt.")] = None,
    osl: Annotated[Text, _key("Tokens of an output.")] = None,
    concurrency: Annotated[Text, _key("Clients; or --request-rate.")] = None,
    request_rate: Annotated[Text, _key("Requests a second.")] = None,
    max_batched_tokens: Annotated[Text, _key("Tokens that a step holds.")] = None,
    prefix_hit: Annotated[Text, _key("Share of a prompt in the prefix cache.")] = None,
    speculation: Annotated[Text, _key("{num_draft_tokens = 3, accepted = 2.2, draft = 'mtp'}")] = None,
    ttft_ms: Annotated[Text, _key("Longest mean time to first token, ms.")] = None,
    tpot_ms: Annotated[Text, _key("Longest mean time per output token, ms.")] = None,
    request_latency_ms: Annotated[Text, _key("Longest mean time of a request, ms.")] = None,
    objective: Annotated[Text, _key("What there should be most of.")] = None,
    gpu_hour_price: Annotated[Text, _key("Price of a GPU for an hour.")] = None,
    keep: Annotated[Text, _key("pareto, best, all.")] = None,
    k: Annotated[
        Text, typer.Option("-k", metavar="VALUE", rich_help_panel=_KEYS, help="Best rows of a group.")
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
    from fastroof.cli.sweep_summary import print_summary, resumable, say_where
    from fastroof.sweep import Shard, load_spec

    changes = _changes(context, settings or [])
    # keys alone are a specification; a file's keys can be changed
    loaded = load_spec(changes) if spec is None and changes else load_spec(spec, changes)
    rows = DEFAULT_OUTPUT if output is None else output
    if output is None and not quiet:
        what = "the packaged sweep (see --help)" if spec is None and not changes else "this sweep"
        say_where(rows, what)
    part = None if shard is None else Shard.from_text(shard)
    with resumable(rows), shown_progress("sweep", "evaluations", quiet=as_json or quiet) as progress:
        summary = run_sweep(
            loaded,
            rows,
            engine,
            threads=usable_processors() if threads is None else threads,
            address=address,
            shard=part,
            resume=resume,
            restart=restart,
            progress=progress,
        )
    print_summary(summary, as_json=as_json, quiet=quiet)


def _changes(context: typer.Context, settings: list[str]) -> dict[str, Any]:
    """Keys of the specification that were given as options."""
    from fastroof.sweep import DeploymentSpec

    given = {key: value for key, value in context.params.items() if value is not None}
    changes: dict[str, Any] = {key: _value(given[key]) for key in DeploymentSpec.model_fields if key in given}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set takes KEY=VALUE, got {setting!r}")
        changes[key.strip()] = _value(value)
    limits = {key: _value(given[key]) for key in _NESTED if key in given}
    if limits:
        changes["constraints"] = {**changes.get("constraints", {}), **limits}
    return changes


def _value(given: str) -> Any:
    """Read a value: TOML if it is that, a comma-separated list, or text."""
    try:
        return parse_toml(f"value = {given}", "value")["value"]
    except FastroofError:
        pass  # also what is beyond a limit: as text it is no value of any key
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
