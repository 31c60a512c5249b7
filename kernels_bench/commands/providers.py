"""``kernels-bench providers``: which work on this host, and what they would measure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernels_bench.command_options import Json, print_json, print_table

if TYPE_CHECKING:
    from kernels_bench.protocol import Availability, Point


def providers(
    gpu: Annotated[
        str | None, typer.Option(help="GPU to list for: a name or a gpu.toml.  [default: the one here]")
    ] = None,
    grid: Annotated[str, typer.Option(help="Grid whose points are listed.")] = "smoke",
    as_json: Json = False,
) -> None:
    """List what can launch kernels, in order of choice, and what would be measured of a grid.

    Of each operator and format: which provider takes how many points, its library, the kernel; or why no
    provider does. With --gpu the libraries of this host count, and nothing runs. Where vLLM's layers choose
    the kernel, its class is known on the GPU only.

    JSON: providers (name, works, reason, versions) and measured (operator, format, points, provider, library,
    kernel; refused instead of the last three).
    """
    from fastroof.config.gpu import load_gpu
    from kernels_bench.grid.grid import load_grid
    from kernels_bench.providers import all_providers
    from kernels_bench.providers.device import named_device
    from kernels_bench.run.card import CPU
    from kernels_bench.run.facts import working
    from kernels_bench.run.request import known_providers

    points = load_grid(grid).points()
    answers = working(known_providers() if gpu is None else all_providers(named_device(load_gpu(gpu))))
    usable = [(provider, answer) for provider, answer in answers if answer.works and provider.name != CPU]
    listed = _measured(points, usable) if usable else []
    if as_json:
        states = [
            {"name": p.name, "works": a.works, "reason": a.reason, "versions": dict(a.versions or {})}
            for p, a in answers
        ]
        print_json({"providers": states, "measured": listed})
        return
    for provider, answer in answers:
        versions = ", ".join(f"{name} {version}" for name, version in (answer.versions or {}).items())
        note = f" (only with --providers {provider.name})" if provider.name == CPU else ""
        status = f"works{note}; {versions}" if answer.works else f"does not work: {answer.reason}"
        typer.echo(f"{provider.name}: {status.rstrip('; ')}")
    if not listed:
        typer.echo("nothing would be measured here; --gpu NAME lists what would be on one")
        return
    typer.echo("")
    cells = [
        [row["operator"], row["format"], f"{row['points']:,}", row.get("library", ""), row.get("kernel", "")]
        for row in listed
        if "refused" not in row
    ]
    print_table(["operator", "format", "points", "library", "kernel"], cells, left=5)
    for row in listed:
        if "refused" in row:
            typer.echo(f"refused: {row['points']:,} of {row['operator']} {row['format']}: {row['refused']}")


def _measured(points: Iterable[Point], usable: Sequence[tuple[Any, Availability]]) -> list[dict[str, Any]]:
    """Return who takes the points of each operator and format with which kernel, or why nobody does."""
    from kernels_bench.operators.communication import BY_RANKS
    from kernels_bench.run.runner import refusal

    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for point in points:
        words = ", ".join(str(value) for value in point.values.values() if isinstance(value, str))
        refusals: list[str] = []
        library, refused, name = "", "", None
        for provider, answer in usable:
            reason = refusal(provider, point)
            if reason is None:
                name, library = provider, f"{provider.name} {(answer.versions or {}).get(provider.name, '')}"
                break
            refusals.append(f"{provider.name}: {reason}")
        if point.operator in BY_RANKS:
            refused = "measured by `kernels-bench allreduce` and `collectives`, with two GPUs"
        elif name is None:
            refused = "; ".join(refusals)
        key = (point.operator, words, library, refused)
        if key not in rows:
            rows[key] = {"operator": point.operator, "format": words, "points": 0}
            if name is None:
                rows[key]["refused"] = refused
            else:
                rows[key] |= {"provider": name.name, "library": library.strip(), "kernel": name.kernel(point)}
        rows[key]["points"] += 1
    return list(rows.values())
