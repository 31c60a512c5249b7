"""``fastroof export splitwise-sim``: a plan as the table of splitwise-sim's performance model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.named_plans import PLANS_HELP, GpuOption, named_plans, plans_words
from fastroof.cli.options import Source, TablesPath
from fastroof.cli.output import percent

EPILOG: Final = f"""\b
Examples:
  fastroof export splitwise-sim llama-2-70b,tp=8 --kv-len 2048 --model-name llama2-70b -o perf_model.csv
  python run.py performance_model.db_path=perf_model.csv ...

{PLANS_HELP}
The simulator knows the tokens of a batch alone: decodes are timed at --kv-len, whatever they attend to, and
prompts beside decodes as prompts times 1.1. What that is off is printed, over steps drawn across the plan.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("splitwise-sim", epilog=EPILOG)(splitwise_sim)


def splitwise_sim(
    plan: Annotated[
        str,
        typer.Argument(metavar="PLAN", help="MODEL[,KEY=VALUE...], as llama-2-70b,tp=8.", show_default=False),
    ],
    kv_len: Annotated[int, typer.Option(min=1, help="Tokens that a decode attends to.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .csv.", show_default=False)],
    longest: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of a batch of prompts.  [default: the model's positions]"),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="The model in its configs.  [default: the plan's]")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="The processor in its configs.  [default: as h100-80gb]")
    ] = None,
    gpu: GpuOption = None,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Write a plan as the CSV of splitwise-sim."""
    from fastroof.backends.splitwise_sim import splitwise_errors, write_splitwise_table

    [(name, compiled)] = named_plans([plan], gpu, tables, source).items()
    table = write_splitwise_table(
        compiled, output, kv_len, longest=longest, model=model_name, hardware=hardware
    )
    tokens = table["tokens"]
    typer.echo(
        f"wrote {output}: {plans_words({name: compiled})}, {len(tokens):,} rows, "
        f"batches of 1 to {tokens[-1]:,} tokens"
    )
    for error in splitwise_errors(compiled, table):
        typer.echo(
            f"{error.kind}: {percent(error.mean)} off in the mean, {percent(error.worst)} at worst, "
            f"bias {error.bias:+.1%}"
        )
    most = min(compiled.max_seqs, compiled.max_tokens)
    typer.echo(f"its batches of decodes may have {most:,} requests: max_batch_size of its configs")
