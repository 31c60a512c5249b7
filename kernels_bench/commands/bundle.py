"""``kernels-bench bundle``: all that measuring needs, for a borrowed host without network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastroof.errors import MeasureError


def bundle(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the bundle.")] = Path(".gpu"),
    wheels: Annotated[
        Path | None, typer.Option(help="Folder of wheels, filled by download.  [default: OUTPUT-wheels]")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Download nothing.")] = False,
    arch: Annotated[
        int, typer.Option(help="Compute capability to keep, times 10: 90 is Hopper.", min=50, max=999)
    ] = 90,
    python: Annotated[str, typer.Option(metavar="VERSION", help="Version of Python on the host.")] = "3.12",
    limit: Annotated[float, typer.Option(metavar="MIB", help="Fail above this size.")] = 64.0,
    checkout: Annotated[
        Path | None, typer.Option(help="Git checkout that travels along: its files count against the limit.")
    ] = None,
    preset: Annotated[int, typer.Option(help="Compression of libraries.", min=0, max=9)] = 9,
) -> None:
    """Pack vLLM's libraries cut to one architecture, vLLM, its small requirements and our packages.

    The host needs Python, torch 2.11 with CUDA 13.0, triton, transformers, numpy, pyarrow, rich and typer.
    There `OUT=results bash BUNDLE/measure_kernels.sh SECONDS` measures kernels and `measure_steps.sh` whole
    steps. Building takes a download of 300 MB and some minutes. Exit codes: 0 done, 2 an error, too large
    among them.
    """
    from fastroof.units import MIB
    from kernels_bench.bundle.build import BundleOptions, build_bundle

    if not limit > 0:
        raise MeasureError(f"a limit is a number of MiB above zero, got {limit:g}")
    options = BundleOptions(
        output=output,
        wheels=output.with_name(f"{output.name}-wheels") if wheels is None else wheels,
        arch=arch,
        python=python,
        limit_bytes=int(limit * MIB),
        checkout=checkout,
        preset=preset,
        is_offline=offline,
        say=typer.echo,
    )
    size = build_bundle(options)
    what = "" if checkout is None else f" with {checkout}"
    typer.echo(f"{output}{what}: {size / MIB:.1f} of {limit:g} MiB")
