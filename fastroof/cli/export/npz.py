"""``fastroof export npz``: a plan as a profile of Dynamo's mocker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.named_plans import PLAN_TABLES, PLANS_HELP, PlanArgument, named_plans, plans_words
from fastroof.cli.options import option
from fastroof.cli.output import percent
from fastroof.cli.workload_options import parse_beside
from fastroof.command_group import Group, GroupValues, taking, warn
from fastroof.errors import BackendError

EPILOG: Final = f"""\b
Examples:
  fastroof export npz llama-3.1-8b -o llama.npz
  fastroof export npz llama-3.1-70b,tp=4,dtype=fp8 --isl 1024 -o llama.npz
  fastroof export npz llama-3.1-8b --isl 1024 --osl 128 --rate 20 -o llama.npz
  python -m dynamo.mocker --planner-profile-data llama.npz ...

{PLANS_HELP}
For Dynamo's mocker and AISimulate, which read it as the external timing provider dynamo_profile. The mocker
knows a step's new tokens, not their prompts: set their length by --isl. It adds the time of prompts to
that of decodes, which real steps run together: --beside writes what prompts add to a step of such decodes,
and --rate finds by simulation which decodes run.
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
        int, "Maximum decodes in a step, the mocker's max_num_seqs.  [default: 256]", min=1
    ),
    "points": option(int, "Grid points for each doubling of tokens.  [default: 24]", min=1),
}
"""Sizes of a profile, as arguments of :func:`fastroof.backends.dynamo.write_dynamo_profile`."""


@taking(sizes=SIZES, measured=PLAN_TABLES)
def npz(
    *,
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (.npz).", show_default=False)],
    sizes: GroupValues,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="DECODESxKV_LEN",
            help="Write prefill as what it adds to a step of such decodes, as 32x2000.  [default: alone]",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="REQUESTS/S", help="Write prefill as what it adds to the decodes at this rate."),
    ] = None,
    output_len: Annotated[
        int | None, typer.Option("--osl", min=1, help="Tokens of an output, for --rate.")
    ] = None,
    measured: GroupValues,
) -> None:
    """Write a plan as the NPZ profile that Dynamo's mocker reads."""
    from fastroof.backends import dynamo

    [(name, compiled)] = named_plans([plan], **measured).items()
    sizes = {"max_batch_size": dynamo.MAX_BATCH_SIZE} | {k: v for k, v in sizes.items() if v is not None}
    batch, prompt_len = sizes["max_batch_size"], sizes.get("prompt_len")
    running = None if beside is None else parse_beside(beside)
    if rate is not None or output_len is not None:
        if rate is None or output_len is None or prompt_len is None or running is not None:
            raise BackendError("--rate, --isl and --osl go together, and without --beside")
        lengths = {"prompt_len": prompt_len, "output_len": output_len}
        running = dynamo.decodes_beside(compiled, rate_per_s=rate, **lengths, max_batch_size=batch)
        typer.echo(f"at {rate:g} requests/s {running[0]} decodes of {running[1]} tokens run next to prompts")
    profile = dynamo.write_dynamo_profile(compiled, output, **sizes, beside=running)
    tokens, active, context = (
        profile[key] for key in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length")
    )
    typer.echo(
        f"wrote {output}: {plans_words({name: compiled})}, prefill of 1 to {tokens[-1]:,.0f} tokens, "
        f"decode at {len(active)} x {len(context)} points, up to {context[-1]:,.0f} tokens a request and "
        f"{batch:,} requests"
    )
    blocks = compiled.memory.tokens_beside_states(batch) // dynamo.BLOCK_TOKENS
    if blocks:
        typer.echo(
            f"run the mocker with --num-gpu-blocks-override {blocks} --block-size {dynamo.BLOCK_TOKENS} "
            f"--max-num-seqs {batch} --max-num-batched-tokens {tokens[-1]:.0f}"
        )
    else:
        warn(f"{name} leaves no room for KV cache on a GPU: the mocker cannot know; use a larger tp")
    short = float((profile["decode_itl"] < dynamo.LEAST_DECODE_MS).mean())
    if short:
        warn(f"{percent(short)} of the decode times are under 1 ms, which the mocker rounds up to 1 ms")
