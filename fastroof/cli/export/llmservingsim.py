"""``fastroof export llmservingsim``: a profile of LLMServingSim, each layer's latency by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from fastroof.cli.named_plans import PLANS_HELP, GpuOption, PlansArgument, named_plans, plans_words
from fastroof.cli.options import Source, TablesPath
from fastroof.cli.output import console, counted

EPILOG: Final = f"""{PLANS_HELP}
\b
Examples:
  fastroof export llmservingsim llama-3.1-8b -o LLMServingSim/profiler/perf
  fastroof export llmservingsim llama-3.1-70b,tp=4 llama-3.1-70b,tp=8 -o perf --hardware H100-SXM
  fastroof export llmservingsim llama-3.1-8b -o llm_profile/perf_models --hardware roof --format v0

A cluster configuration then names the GPU as --hardware does and the model as --model-name does. Plans of
one model go into one bundle, a folder a tp. The simulator asks for the precision that the model's config
declares: a plan of fp8 weights needs a config that says so, or --variant.

--format v1.1 is what release 1.1.0 reads, and the source until the summer of 2026: several prompts of a step
are one to it. bundle is what the source reads since, which no release does (a KeyError of prefill_key or
kv_prefill means the other one); v0, what version 1.0.0 and its forks read: a row of integer nanoseconds for
every size of a step, which ends the simulation where it needs another.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("llmservingsim", epilog=EPILOG)(llmservingsim)


def llmservingsim(
    plans: PlansArgument,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="The simulator's profiler/perf or perf_models."),
    ],
    hardware: Annotated[
        str | None, typer.Option(help="What cluster configurations call the GPU.  [default: H100]")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Which of configs/model it is.  [default: its Hugging Face name]")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Folder of the precision.  [default: bf16, fp8, fp8-kvfp8, ...]")
    ] = None,
    profile: Annotated[
        Literal["v1.1", "bundle", "v0"], typer.Option("--format", help="Which of the simulator's formats.")
    ] = "v1.1",
    longest: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Longest request of a v0 profile.  [default: 16384]"),
    ] = None,
    gpu: GpuOption = None,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Write the layers of a plan as CSV files that LLMServingSim simulates a GPU from."""
    from fastroof.backends.llmservingsim import export_llmservingsim, left_out
    from fastroof.backends.llmservingsim_v0 import export_llmservingsim_v0

    named = named_plans(plans, gpu, tables, source)
    compiled = list(named.values())
    if profile == "v0":
        if variant is not None:
            raise typer.BadParameter(
                "--variant is of --format v1.1 and bundle: v0 has no folder of the precision"
            )
        bundle = export_llmservingsim_v0(
            compiled, output, hardware=hardware, model=model_name, longest=longest
        )
        limits = f"--max-num-batched-tokens {compiled[0].max_tokens} --max-batch {compiled[0].max_seqs}"
    else:
        if longest is not None:
            raise typer.BadParameter("--longest is of --format v0: the others take what the model takes")
        bundle = export_llmservingsim(
            compiled,
            output,
            hardware=hardware,
            model=model_name,
            variant=variant,
            release="1.1" if profile == "v1.1" else "unreleased",
        )
        limits = ""
    out = console()
    out.print(f"wrote {bundle.folder}: {counted(bundle.rows, 'row')} of {plans_words(named)}", soft_wrap=True)
    if limits:
        out.print(f"simulate it with {limits} at most", soft_wrap=True, highlight=False)
    for words in dict.fromkeys(words for plan in compiled for words in left_out(plan)):
        out.print(f"not in it: {words}", soft_wrap=True)
