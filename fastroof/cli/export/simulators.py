"""``fastroof export llm-d | llmservingsim | trace``: files of other simulators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from fastroof.cli.named_plans import (
    PLAN_TABLES,
    PLANS_HELP,
    PlanArgument,
    PlansArgument,
    named_plans,
    plans_words,
)
from fastroof.cli.options import option
from fastroof.cli.output import counted, print_line
from fastroof.cli.workload_options import WORKLOAD, parse_sizes, print_left_out, workload_trace
from fastroof.command_group import Group, GroupValues, taking
from fastroof.units import GB

LLM_D: Final = f"""{PLANS_HELP}
\b
Examples:
  fastroof export llm-d llama-3.1-8b -o 8b.yaml
  fastroof export llm-d llama-3.1-70b,tp=4,dtype=fp8 -o 70b.yaml --isl 2048 --osl 256 --clients 1,8,32,128
  llm-d-inference-sim --config 70b.yaml

The simulator has one number for each time, so they are fitted over every combination of --clients,
--isl and --osl to the estimates of `fastroof serving`: the narrower the ranges, the closer the fit. The file
states the errors, which include the whole milliseconds that the simulator cuts times to.
"""

LLMSERVINGSIM: Final = f"""{PLANS_HELP}
\b
Examples:
  fastroof export llmservingsim llama-3.1-8b -o LLMServingSim/profiler/perf
  fastroof export llmservingsim llama-3.1-70b,tp=4 llama-3.1-70b,tp=8 -o perf --hardware H100-SXM

A cluster configuration then names the GPU as --hardware does and the model as --model-name does. Plans of
one model go into one bundle, a folder per tp. The simulator asks for the precision that the model's config
declares: a plan of fp8 weights needs a config that declares it, or --variant.

--format v1.1 is for release 1.1.0, which draws its lines of attention over logarithms: five times the rows,
half a million for a model of 131,072 positions. bundle is for the source since, which draws them straight.
"""

TRACE: Final = """\b
Examples:
  fastroof export trace --trace gateway.csv --where model=llama-8b --format llmservingsim -o requests.jsonl
  fastroof export trace --rate 5 --isl lognormal:1024:0.5 --osl 200 --format mooncake -o trace.jsonl

The requests are those that `fastroof simulate` serves with the same options, in order of arrival.
`fastroof simulate --trace` reads the file back.
"""


NAMES: Final[Group] = {
    "hardware": option(str, "Name of the GPU in cluster configurations.  [default: H100]"),
    "model": option(
        str, "Name of the model in configs/model.  [default: its Hugging Face name]", None, "--model-name"
    ),
    "variant": option(str, "Folder of the precision.  [default: bf16, fp8, fp8-kvfp8, ...]"),
}
"""Names in LLMServingSim, as arguments of :func:`fastroof.backends.llmservingsim.export_llmservingsim`."""


@taking(names=NAMES, measured=PLAN_TABLES)
def llmservingsim(
    *,
    plans: PlansArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The simulator's profiler/perf.")
    ],
    names: GroupValues,
    profile: Annotated[
        Literal["v1.1", "bundle"], typer.Option("--format", help="Format of the simulator's version.")
    ] = "v1.1",
    measured: GroupValues,
) -> None:
    """Write the layers of a plan as CSV files that LLMServingSim simulates a GPU from.

    Decode steps, prompts and mixed steps add up to the plan's times; nearly so for an engine that holds steps
    with prompts at a floor.
    """
    from fastroof.backends.llmservingsim import export_llmservingsim, left_out

    named = named_plans(plans, **measured)
    compiled = list(named.values())
    bundle = export_llmservingsim(
        compiled, output, **names, release="1.1" if profile == "v1.1" else "unreleased"
    )
    print_line(f"wrote {bundle.folder}: {counted(bundle.rows, 'row')} of {plans_words(named)}")
    for words in dict.fromkeys(words for plan in compiled for words in left_out(plan)):
        print_line(f"left out: {words}")


LOADS: Final[Group] = {
    "clients": option(
        str,
        "Concurrent requests; the maximum becomes max-num-seqs.",
        "REQUESTS",
        default="1,2,4,8,16,32,64",
    ),
    "isl": option(str, "Prompt lengths.", "TOKENS", default="256,512,1024,2048,4096"),
    "osl": option(str, "Output lengths, including the first token.", "TOKENS", default="128,512"),
}
"""Loads and lengths to fit, as arguments of :func:`fastroof.backends.llm_d.fit_llm_d`."""


@taking(loads=LOADS, measured=PLAN_TABLES)
def llm_d(
    *,
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.yaml", help="File to write.")],
    loads: GroupValues,
    model_name: Annotated[
        str | None, typer.Option(help="Model that clients ask for.  [default: its Hugging Face name]")
    ] = None,
    kv_bandwidth: Annotated[
        float | None, typer.Option(help="Bandwidth from a GPU to another worker's, GB/s.  [default: NVLink]")
    ] = None,
    flat: Annotated[
        bool,
        typer.Option(
            "--flat/--block",
            help="Write latencies at the top level (releases up to v0.11.2), or in a block (the source "
            "since; older releases read 0).",
        ),
    ] = True,
    measured: GroupValues,
) -> None:
    """Write a configuration of llm-d-inference-sim that is as fast as a plan.

    Fits its time to first token, time between tokens and their factor under load to the plan. The file states
    the range of the fit and the error of the simulator's formula there.
    """
    from fastroof.backends.llm_d import export_llm_d, fit_llm_d, fit_words

    (compiled,) = named_plans([plan], **measured).values()
    sizes: GroupValues = {name: parse_sizes(f"--{name}", text) for name, text in loads.items()}
    fit = fit_llm_d(compiled, **sizes)
    link = None if kv_bandwidth is None else kv_bandwidth * GB
    export_llm_d(compiled, output, fit, model=model_name, link_bytes_per_s=link, is_flat=flat)
    for line in fit_words(compiled, fit):
        print_line(line)
    print_line(f"wrote {output}")


@taking(workload=WORKLOAD)
def trace(
    *,
    workload: GroupValues,
    format: Annotated[
        Literal["plain", "mooncake", "llmservingsim"],
        typer.Option(
            "--format", help="Format of the file: mooncake and llmservingsim are .jsonl, plain is .csv."
        ),
    ] = "plain",
    file: Annotated[Path, typer.Option("-o", metavar="FILE", help="File to write.", show_default=False)],
) -> None:
    """Write requests, replayed or drawn, as a trace of another simulator."""
    from fastroof.simulation import write_trace

    trace = workload_trace(**workload)
    without = write_trace(trace, file, format)
    print_line(f"wrote {file}: {counted(len(trace), 'request')} of {trace.name}")
    print_left_out(trace)
    if without:
        print_line(f"without {' and '.join(without)}, for which {format} has no place")
