"""``kernels-bench steps``: whole steps of a model as ground truth."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.errors import MeasureError
from kernels_bench.command_options import EXIT_UNFINISHED, DeadlineOfPart, HostGpu
from kernels_bench.commands.run import terminable

if TYPE_CHECKING:
    from fastroof.models import DenseModel
    from kernels_bench.protocol import Monitor, Timer, Timing
    from kernels_bench.steps.measure import StepSkip, StepsReport
    from kernels_bench.steps.step_points import StepPoint
    from kernels_bench.vllm_steps.session import EngineOptions

POINT_US: Final = 400_000.0
"""Timed replays of one step take at most this: a prefill of 300 ms is replayed five times."""
CPU_BYTES: Final = 2**30
ENGINE: Final = "vllm"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("steps", short_help="Measure whole forward steps of a model.")(steps)


def steps(
    model: Annotated[
        str,
        typer.Option(help="Preset, config.json or its folder; on one GPU. With --engine several, by comma."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of steps.csv and steps.toml.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="vllm: whole steps of vLLM itself. Default: its kernels in one CUDA graph.")
    ] = "",
    grid: Annotated[
        bool, typer.Option("--grid", help="Print the steps, their memory and seconds; measure nothing.")
    ] = False,
    gpu: HostGpu = None,
    dtype: Annotated[
        str,
        typer.Option(help="Format of linear layers: bf16, fp8, fp8_block, or auto: that of the model."),
    ] = "auto",
    providers: Annotated[
        str, typer.Option(help="Attention providers by preference, comma-separated; cpu only if named.")
    ] = "",
    deadline: DeadlineOfPart = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and order.")] = 0,
    level: Annotated[
        int,
        typer.Option(
            help="With --engine, first try: 0 as vLLM compiles, 1 no torch.compile, 2 eager.",
            min=0,
            max=2,
        ),
    ] = 0,
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="With --engine: arguments of vLLM's EngineArgs.")
    ] = "{}",
    closed_loop: Annotated[
        bool, typer.Option(help="With --engine: run 64 and 16 clients for 12 s each after the steps.")
    ] = True,
    least: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --engine: begin no model with less time left.")
    ] = 70.0,
) -> None:
    """Measure whole forward steps with random weights.

    By default the model's kernels run in one CUDA graph: decode, prefill, mixed and unequal batches; the
    embedding, LM head and KV cache are in bf16. With `--engine vllm` an installed vLLM runs its own
    scheduler, model and sampler, one process per model; `--gpu cpu` tries its CPU build on tiny sizes. Steps
    that OUTPUT/steps.csv already has are not measured again, so the same command continues after a deadline
    or a kill. Exit codes: 0 done, 1 stopped at the deadline or a model failed, 2 an error.
    """
    if engine not in ("", ENGINE):
        raise MeasureError(f"unknown engine {shown(engine)}; valid is {ENGINE}")
    if deadline is not None and not deadline > 0:
        raise MeasureError(f"a deadline is a number of seconds above zero, got {deadline:g}")
    if engine:
        if dtype != "auto" or providers or seed:
            raise MeasureError("--dtype, --providers and --seed are for steps without --engine")
        options = _engine_options(gpu, deadline, least, level, closed_loop, engine_args)
        _engine_steps([name.strip() for name in model.split(",") if name.strip()], output, grid, options)
        return
    from fastroof.models import DenseModel, load_model
    from kernels_bench.steps.step_model import refuses_model

    loaded = load_model(model)
    spec = DenseModel.of(loaded)
    weights = loaded.checkpoint.dtype if dtype == "auto" else dtype
    if reason := refuses_model(spec, weights):
        raise MeasureError(reason)
    if grid:
        _print_grid(spec, weights, gpu)
        return
    if output is None:
        raise MeasureError("give -o FOLDER, where steps.csv goes, or --grid to see the steps")
    report = _measure(spec, weights, output, gpu, providers, deadline, seed)
    typer.echo(
        f"{report.measured} steps measured, {report.present} were there, {len(report.skips)} skipped: "
        f"{output / 'steps.csv'}"
    )
    if report.stopped:
        typer.echo(report.stopped)
        raise typer.Exit(EXIT_UNFINISHED)


def _engine_options(
    gpu: str | None,
    deadline_s: float | None,
    least_s: float,
    level: int,
    loops: bool,
    engine_args: str,
) -> EngineOptions:
    from kernels_bench.vllm_steps.session import EngineOptions

    arguments = parse_json(engine_args.encode(), "--engine-args", MeasureError)
    if not isinstance(arguments, dict):
        raise MeasureError(f"--engine-args is a JSON object of names and values, got {shown(engine_args)}")
    return EngineOptions(gpu, deadline_s, least_s, level, loops, arguments, _say_record)


def _engine_steps(models: list[str], output: Path | None, grid: bool, options: EngineOptions) -> None:
    """Measure steps of vLLM itself, or print which."""
    from kernels_bench.run.card import CPU
    from kernels_bench.vllm_steps.model_folder import engine_model
    from kernels_bench.vllm_steps.points import TINY, default_points
    from kernels_bench.vllm_steps.session import measure_engine_steps

    loaded = [engine_model(name) for name in models]
    if not loaded:
        raise MeasureError("--model names no model")
    if grid:
        for point in TINY if options.gpu == CPU else default_points():
            typer.echo(str(point))
        return
    if output is None:
        raise MeasureError("give -o FOLDER, where steps.csv goes, or --grid to see the steps")
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


def _measure(
    spec: DenseModel,
    weights: str,
    output: Path,
    gpu: str | None,
    providers: str,
    deadline_s: float | None,
    seed: int,
) -> StepsReport:
    from kernels_bench.providers.attention import Heads
    from kernels_bench.run.card import measured_gpu
    from kernels_bench.run.facts import checkout_commit, now_iso, software_versions
    from kernels_bench.run.session import MonotonicClock, usable_bytes
    from kernels_bench.steps.measure import StepOptions, check_step, measure_steps, write_provenance
    from kernels_bench.steps.step_attention import choose_backend
    from kernels_bench.steps.step_points import default_steps

    clock = MonotonicClock()
    began_s, started, commit = clock.seconds(), now_iso(), checkout_commit()
    names = [name.strip() for name in providers.split(",") if name.strip()]
    heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    backend = choose_backend(names, heads, weights)
    on_cpu = backend.device.name == "cpu"
    monitor, timer = _monitor(on_cpu), _timer(on_cpu)
    card = measured_gpu(gpu, monitor.facts(), on_cpu)
    points = _tiny_steps() if on_cpu else default_steps()
    if on_cpu and spec.num_parameters * 4 > CPU_BYTES:
        raise MeasureError(f"{spec.name} is too large for a CPU; give a config.json of a tiny model")
    error = check_step(spec, backend, seed)
    report = measure_steps(
        spec,
        points,
        backend,
        timer,
        monitor,
        clock,
        output,
        StepOptions(
            gpu=card.name,
            seed=seed,
            deadline_s=None if deadline_s is None else deadline_s - (clock.seconds() - began_s),
            usable_bytes=None if on_cpu else _usable(usable_bytes(on_cpu)),
            on_step=_say,
        ),
    )
    facts = {
        "device": dict(monitor.facts()),
        "versions": {**software_versions(), **backend.versions},
        "seed": seed,
        "started": started,
        "finished": now_iso(),
        "commit": commit,
    }
    if report.measured == 0 and not report.skips:
        return report
    write_provenance(output, report, spec, backend, gpu=card.name, error=error, facts=facts)
    return report


def _usable(for_points_bytes: int) -> int:
    """Return what a step may take: nearly all, since nothing else is measured then."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    return max(for_points_bytes, int(free_bytes * 0.97))


def _monitor(on_cpu: bool) -> Monitor:
    from kernels_bench.run.monitor import HostMonitor, open_monitor

    return HostMonitor() if on_cpu else open_monitor()


def _timer(on_cpu: bool) -> Timer:
    from kernels_bench.replays import ReplayRule
    from kernels_bench.run.timing import CpuTimer, GraphTimer

    return CpuTimer(ReplayRule(point_us=POINT_US)) if on_cpu else GraphTimer(ReplayRule(point_us=POINT_US))


def _tiny_steps() -> list[StepPoint]:
    """Return one step of each phase, for a CPU."""
    from kernels_bench.steps.step_points import StepPoint

    return [
        StepPoint("decode", (1, 1), (15, 15)),
        StepPoint("prefill", (8,), (0,)),
        StepPoint("mixed", (1, 1, 4), (15, 15, 0)),
        StepPoint("unequal", (1, 1, 1), (3, 15, 40)),
    ]


def _say(point: StepPoint, outcome: Timing | StepSkip) -> None:
    from kernels_bench.steps.measure import StepSkip

    what = f"{point.phase} {point.new_text} after {point.context_text}"
    what = what if len(what) <= 90 else f"{what[:87]}..."
    if isinstance(outcome, StepSkip):
        typer.echo(f"{what}: skipped ({outcome.kind}): {outcome.reason}")
    else:
        typer.echo(f"{what}: {outcome.latency_us:,.1f} us ({outcome.num_replays} replays)")


def _print_grid(spec: DenseModel, weights: str, gpu: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from fastroof.config import load_gpu
    from fastroof.units import GIB
    from kernels_bench.steps.step_points import default_steps, expected_seconds, step_bytes, weight_bytes

    card = load_gpu(gpu or "h100")
    usable_bytes = 0.97 * card.hbm_bytes
    table = Table(title=f"{spec.name} in {weights}, whole steps on {card.title}")
    for name, justify in (("phase", "left"), ("new tokens", "left"), ("context", "left")):
        table.add_column(name, justify=justify, max_width=22, overflow="ellipsis", no_wrap=True)  # type: ignore[arg-type]
    for name in ("GiB", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    fitting: list[Any] = []
    for point in default_steps():
        needed_bytes = step_bytes(point, spec, weights=weights)
        fits = needed_bytes <= usable_bytes
        if fits:
            fitting.append(point)
        seconds = f"{expected_seconds(point, spec, weights):.2f}" if fits else "no room"
        table.add_row(point.phase, point.new_text, point.context_text, f"{needed_bytes / GIB:.1f}", seconds)
    # Into a pipe a table is as wide as it needs to be.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    total_s = sum(expected_seconds(point, spec, weights) for point in fitting)
    weights_gib = weight_bytes(spec, weights) / GIB
    console.print(f"{len(fitting)} steps fit, about {total_s:.0f} s; weights {weights_gib:.1f} GiB")
