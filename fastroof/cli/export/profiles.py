"""``fastroof export npz | fpm``: a plan as a profile of Dynamo's mocker or a table of AISimulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.cli.named_plans import PLAN_TABLES, PLANS_HELP, PlanArgument, named_plans, plans_words
from fastroof.cli.options import option
from fastroof.cli.output import percent
from fastroof.cli.workload_options import parse_beside
from fastroof.command_group import Group, GroupValues, taking, warn
from fastroof.errors import BackendError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

NPZ: Final = f"""\b
Examples:
  fastroof export npz llama-3.1-8b -o llama.npz
  fastroof export npz llama-3.1-70b,tp=4,dtype=fp8 --isl 1024 -o llama.npz
  fastroof export npz llama-3.1-8b --isl 1024 --osl 128 --rate 20 -o llama.npz
  python -m dynamo.mocker --planner-profile-data llama.npz ...

{PLANS_HELP}
For Dynamo's mocker. It knows a step's new tokens, not their prompts: set their length by --isl. It adds the
time of prompts to that of decodes, which real steps run together: --beside writes what prompts add to a step
of such decodes, and --rate finds by simulation which decodes run.
"""

FPM: Final = f"""\b
Examples:
  fastroof export fpm llama-3.1-8b --max-context 16384 -o llama.parquet
  fastroof export fpm llama-3.1-70b,tp=4,dtype=fp8 --isl 1024 --osl 128 --rate 4 -o llama.parquet
  aisimulate predict -c llama.yaml

{PLANS_HELP}
For AISimulate: llama.yaml names the engine that takes the table, and may be given traffic. AISimulate adds
the time of prompts to that of decodes, as Dynamo's mocker does: --rate and --beside are as of export npz.
It ships some models' config.json, by name (--model-name), and downloads others'. `fastroof validate --steps`
reads a table of vLLM back.
"""


SIZES: Final[Group] = {
    "prompt_len": option(int, "Tokens of a prompt.  [default: all of a step]", None, "--isl", min=1),
    "max_isl": option(int, "Maximum new tokens in a step.  [default: the plan's]", min=2),
    "max_context": option(
        int, "Maximum tokens that a decode attends to.  [default: the model's positions]", min=2
    ),
    "max_kv_tokens": option(
        int, "Maximum tokens that all decodes of a step attend to.  [default: any batch's]", min=2
    ),
    "max_batch_size": option(
        int, "Maximum decodes in a step, the program's max_num_seqs.  [default: 256]", min=1
    ),
    "points": option(int, "Grid points for each doubling of tokens.  [default: 24]", min=1),
}
"""Sizes of a profile, as arguments of :func:`fastroof.backends.dynamo.write_dynamo_profile`."""


FPM_SIZES: Final[Group] = {
    "prompt_len": option(int, "Tokens of a prompt, for --rate.", None, "--isl", min=1),
    **{name: SIZES[name] for name in ("max_isl", "max_context", "max_batch_size")},
}
"""Sizes of a table, as arguments of :func:`fastroof.backends.aisimulate.write_fpm`."""

RUNNING: Final[Group] = {
    "beside": option(
        str,
        "Write prefill as what it adds to a step of such decodes, as 32x2000.  [default: alone]",
        "DECODESxKV_LEN",
    ),
    "rate": option(float, "Write prefill as what it adds to the decodes at this rate.", "REQUESTS/S"),
    "output_len": option(int, "Tokens of an output, for --rate.", None, "--osl", min=1),
}
"""Decodes that run next to prompts."""


def _decodes(
    plan: StepPlan, sizes: GroupValues, beside: str | None, rate: float | None, output_len: int | None
) -> tuple[int, int] | None:
    """Return the decodes that run next to prompts, as given or at a rate."""
    from fastroof.backends.mixed_steps import decodes_beside

    running, prompt_len = None if beside is None else parse_beside(beside), sizes.get("prompt_len")
    if rate is None and output_len is None:
        return running
    if rate is None or output_len is None or prompt_len is None or running is not None:
        raise BackendError("--rate, --isl and --osl go together, and without --beside")
    lengths = {"prompt_len": prompt_len, "output_len": output_len}
    running = decodes_beside(plan, rate_per_s=rate, **lengths, max_batch_size=sizes["max_batch_size"])
    typer.echo(f"at {rate:g} requests/s {running[0]} decodes of {running[1]} tokens run next to prompts")
    return running


def _given(sizes: GroupValues) -> GroupValues:
    from fastroof.backends.mixed_steps import MAX_BATCH_SIZE

    return {"max_batch_size": MAX_BATCH_SIZE} | {k: v for k, v in sizes.items() if v is not None}


@taking(sizes=FPM_SIZES, running=RUNNING, measured=PLAN_TABLES)
def fpm(
    *,
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .parquet to write.", show_default=False)],
    sizes: GroupValues,
    running: GroupValues,
    backend_version: Annotated[
        str | None, typer.Option(help="Engine's version in AISimulate.  [default: its current one]")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Model in AISimulate.  [default: its Hugging Face name]")
    ] = None,
    measured: GroupValues,
) -> None:
    """Write a plan as the table of whole steps that AISimulate reads, with its engine configuration."""
    from fastroof.backends.aisimulate import write_fpm

    [(name, compiled)] = named_plans([plan], **measured).items()
    sizes = _given(sizes)
    beside = _decodes(compiled, sizes, **running)
    if sizes.pop("prompt_len", None) and running["rate"] is None:
        raise BackendError("--isl is for --rate, which also needs --osl")
    batch = sizes["max_batch_size"]
    rows = write_fpm(
        compiled, output, backend_version=backend_version, model=model_name, **sizes, beside=beside
    )
    typer.echo(f"wrote {output}: {plans_words({name: compiled})}, {rows:,} steps of up to {batch:,} requests")
    typer.echo(f"run aisimulate predict -c {output.with_suffix('.yaml')}")
    if not compiled.memory.tokens_beside_states(batch):
        warn(f"{name} leaves no room for KV cache on a GPU: AISimulate cannot know; use a larger tp")


@taking(sizes=SIZES, running=RUNNING, measured=PLAN_TABLES)
def npz(
    *,
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (.npz).", show_default=False)],
    sizes: GroupValues,
    running: GroupValues,
    measured: GroupValues,
) -> None:
    """Write a plan as the NPZ profile that Dynamo's mocker reads."""
    from fastroof.backends import dynamo
    from fastroof.backends.mixed_steps import BLOCK_TOKENS

    [(name, compiled)] = named_plans([plan], **measured).items()
    sizes = _given(sizes)
    batch = sizes["max_batch_size"]
    profile = dynamo.write_dynamo_profile(
        compiled, output, **sizes, beside=_decodes(compiled, sizes, **running)
    )
    tokens, active, context = (
        profile[key] for key in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length")
    )
    typer.echo(
        f"wrote {output}: {plans_words({name: compiled})}, prefill of 1 to {tokens[-1]:,.0f} tokens, "
        f"decode at {len(active)} x {len(context)} points, up to {context[-1]:,.0f} tokens a request and "
        f"{batch:,} requests"
    )
    blocks = compiled.memory.tokens_beside_states(batch) // BLOCK_TOKENS
    if blocks:
        typer.echo(
            f"run the mocker with --num-gpu-blocks-override {blocks} --block-size {BLOCK_TOKENS} "
            f"--max-num-seqs {batch} --max-num-batched-tokens {tokens[-1]:.0f}"
        )
    else:
        warn(f"{name} leaves no room for KV cache on a GPU: the mocker cannot know; use a larger tp")
    short = float((profile["decode_itl"] < dynamo.LEAST_DECODE_MS).mean())
    if short:
        warn(f"{percent(short)} of the decode times are under 1 ms, which the mocker rounds up to 1 ms")
