"""``fastroof export llm-d``: the latencies of llm-d-inference-sim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.named_plans import PLANS_HELP, GpuOption, named_plans
from fastroof.cli.options import Source, TablesPath
from fastroof.cli.output import console
from fastroof.cli.workload_options import parse_sizes
from fastroof.units import GB

EPILOG: Final = f"""{PLANS_HELP}
\b
Examples:
  fastroof export llm-d llama-3.1-8b -o 8b.yaml
  fastroof export llm-d llama-3.1-70b,tp=4,dtype=fp8 -o 70b.yaml --isl 2048 --osl 256 --concurrency 1,8,32,128
  llm-d-inference-sim --config 70b.yaml

The simulator knows one number a time, so it is fitted: over every combination of --concurrency, --isl and
--osl, against what fastroof serving estimates there. The narrower they are, the closer it comes. Times are
cut to whole milliseconds by the simulator, which is part of the errors that the file states.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("llm-d", epilog=EPILOG)(llm_d)


def llm_d(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="MODEL[,KEY=VALUE...], as llama-3.1-70b,tp=4.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.yaml", help="Where to write.")],
    concurrency: Annotated[
        str, typer.Option(metavar="REQUESTS", help="Requests that run at once; the most is max-num-seqs.")
    ] = "1,2,4,8,16,32,64",
    isl: Annotated[str, typer.Option(metavar="TOKENS", help="Prompt lengths.")] = "256,512,1024,2048,4096",
    osl: Annotated[
        str, typer.Option(metavar="TOKENS", help="Output lengths, first token included.")
    ] = "128,512",
    calculator: Annotated[
        str, typer.Option(help="per-token: TTFT grows with the prompt; constant: it does not.")
    ] = "per-token",
    model_name: Annotated[
        str | None, typer.Option(help="Model that clients ask for.  [default: its Hugging Face name]")
    ] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(help="One GPU to a GPU of another worker, GB/s.  [default: NVLink]")
    ] = None,
    flat: Annotated[
        bool,
        typer.Option(
            "--flat/--block",
            help="Latencies at the top level, which releases up to v0.11.2 read; or in a block, which only "
            "the source after them does: before, they are 0.",
        ),
    ] = True,
    gpu: GpuOption = None,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Write a configuration of llm-d-inference-sim that is as fast as a plan."""
    from fastroof.backends.llm_d import export_llm_d, fit_llm_d, fit_words

    (compiled,) = named_plans([plan], gpu, tables, source).values()
    fit = fit_llm_d(
        compiled,
        concurrency=parse_sizes("--concurrency", concurrency),
        isl=parse_sizes("--isl", isl),
        osl=parse_sizes("--osl", osl),
        calculator=calculator,
    )
    link = None if link_gb_per_s is None else link_gb_per_s * GB
    export_llm_d(compiled, output, fit, model=model_name, link_bytes_per_s=link, is_flat=flat)
    out = console()
    for line in fit_words(compiled, fit):
        out.print(line, soft_wrap=True)
    out.print(f"wrote {output}", soft_wrap=True)
