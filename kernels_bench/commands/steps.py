"""``kernels-bench steps``: whole steps of vLLM as ground truth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.errors import MeasureError
from kernels_bench.command_options import EXIT_UNFINISHED, DeadlineOfPart, HostGpu, check_deadline, listed
from kernels_bench.commands.run import terminable


def steps(
    model: Annotated[str, typer.Option(help="Presets, comma-separated; each runs on one GPU.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of steps.csv and steps.toml.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Print the steps; measure nothing.")] = False,
    gpu: HostGpu = None,
    deadline: DeadlineOfPart = None,
    level: Annotated[
        int, typer.Option(help="First try: 0 as vLLM compiles, 1 no torch.compile, 2 eager.", min=0, max=2)
    ] = 0,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Arguments of vLLM's EngineArgs.")] = "{}",
    closed_loop: Annotated[
        bool, typer.Option(help="Run 64 and 16 clients for 12 s each after the steps.")
    ] = True,
    least: Annotated[
        float, typer.Option(metavar="SECONDS", help="Begin no model with less time left.")
    ] = 70.0,
) -> None:
    """Measure whole steps of vLLM with dummy weights.

    An installed vLLM runs its own scheduler, model and sampler, one process per model; `--gpu cpu` tries its
    CPU build on tiny sizes. Steps that OUTPUT already has are not measured again, so the same command
    continues after a deadline or a kill. Exit codes: 0 done, 1 stopped at the deadline or a model failed,
    2 an error.
    """
    from kernels_bench.run.card import CPU
    from kernels_bench.vllm_steps.model_folder import engine_model
    from kernels_bench.vllm_steps.points import TINY, default_points
    from kernels_bench.vllm_steps.session import EngineOptions, measure_engine_steps

    check_deadline(deadline)
    arguments = parse_json(engine_args.encode(), "--engine-args", MeasureError)
    if not isinstance(arguments, dict):
        raise MeasureError(f"--engine-args is a JSON object of names and values, got {shown(engine_args)}")
    loaded = [engine_model(name) for name in listed(model)]
    if not loaded:
        raise MeasureError("--model names no model")
    if grid:
        for point in TINY if gpu == CPU else default_points():
            typer.echo(str(point))
        return
    if output is None:
        raise MeasureError("give -o FOLDER, where steps.csv goes, or --grid to see the steps")
    options = EngineOptions(gpu, deadline, least, level, closed_loop, arguments, _say_record)
    with terminable():
        report = measure_engine_steps(loaded, output, options)
    typer.echo(f"{report.measured} steps measured, {report.present} were there: {output / 'steps.csv'}")
    for problem in report.problems:
        typer.echo(problem)
    if report.problems:
        raise typer.Exit(EXIT_UNFINISHED)


def _say_record(record: Mapping[str, Any]) -> None:
    kind, where = record["type"], record.get("model", "")
    if kind == "engine":
        typer.echo(f"{where}: ready in {record['init_s']:.0f} s, {record['kv_tokens']:,} tokens of KV cache")
    elif kind == "step":
        row = record["row"]
        sizes = "x".join(map(str, record["sizes"]))
        spread = (row["p75_us"] - row["p25_us"]) / row["latency_us"]
        typer.echo(f"{where}: {record['phase']} {sizes}: {row['latency_us']:,.1f} us, IQR {spread:.1%}")
    elif kind == "unfit":
        sizes = "x".join(map(str, record["sizes"]))
        typer.echo(f"{where}: {record['phase']} {sizes}: skipped: {record['reason']}")
    elif kind == "closed_loop":
        typer.echo(f"{where}: {record['clients']} clients: {record['output_tokens_per_s']:,.0f} tokens/s")
