"""``kernels-bench providers``: which work on this host, and why the others don't."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def providers(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List what can launch kernels, in order of choice: whether it works here, with which versions.

    JSON: a list with one object a provider: name, works, reason (why not), versions.
    """
    from kernels_bench.run.card import CPU
    from kernels_bench.run.facts import working
    from kernels_bench.run.request import known_providers

    answers = working(known_providers())
    if as_json:
        listing = [
            {"name": p.name, "works": a.works, "reason": a.reason, "versions": dict(a.versions or {})}
            for p, a in answers
        ]
        typer.echo(json.dumps(listing, indent=2))
        return
    for provider, answer in answers:
        versions = ", ".join(f"{name} {version}" for name, version in (answer.versions or {}).items())
        note = f" (only with --providers {provider.name})" if provider.name == CPU else ""
        status = f"works{note}; {versions}" if answer.works else f"does not work: {answer.reason}"
        typer.echo(f"{provider.name}: {status.rstrip('; ')}")
