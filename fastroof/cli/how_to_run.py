"""How to run a deployment, as a person reads it: the engine's commands, what tokens cost, what is assumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from fastroof.cli.best_answer import say
from fastroof.cli.output import UNLIMITED_WIDTH, console, counted

if TYPE_CHECKING:
    from fastroof.engines.launch import Command
    from fastroof.sweep import Deployment

__all__ = ["deployment_document", "parse_prices", "print_how_to_run", "print_saved"]

_CONFIG: Final = "engine.yaml"
_INDENT: Final = "  "
_COMMAND_WIDTH: Final = 76
_ROLES: Final = {"server": "", "prefill": " that prefills", "decode": " that decodes"}


def parse_prices(given: list[str]) -> float | dict[str, float] | None:
    """Read prices of a GPU for an hour: ``h100=2.5`` each, or one number for all."""
    prices: dict[str, float] = {}
    for text in given:
        gpu, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not 0.0 < price < float("inf") or (equals and not gpu):
            raise typer.BadParameter(f"--price takes GPU=PRICE, as h100=2.5, a number above 0; got {text!r}")
        prices[gpu] = price
    if "" in prices and len(prices) > 1:
        raise typer.BadParameter("--price takes one number for all GPUs, or GPU=PRICE for each; got both")
    return prices.get("", prices or None)


def print_how_to_run(deployment: Deployment) -> None:
    """Print the commands of a deployment."""
    price = deployment.price
    if price is not None:
        say(
            f"costs {price.an_hour:,.4g} an hour: {price.of_output:,.4g} for 1M output tokens, "
            f"{price.of_all:,.4g} for 1M tokens of prompts and outputs"
        )
    for role, command in deployment.servers.items():
        copies = _copies_words(deployment, role)
        say(f"to run it, {copies}{_ROLES[role]}:")
        _print_command(command)
        if command.config:
            from fastroof.sweep.recommendations.yaml_text import yaml_documents

            say(f"with {_CONFIG}:")
            _print_indented(yaml_documents(command.config))
    if deployment.benchmark is not None:
        clients = f"{deployment.benchmark_clients:,}"
        if deployment.copies > 1:
            clients += f" of the {deployment.row['concurrency']:,.0f}"
        say(f"to check it, one copy with {clients} clients:")
        _print_command(deployment.benchmark)
    for note in deployment.notes:
        say(note)
    console().print()


def _copies_words(deployment: Deployment, role: str) -> str:
    row = deployment.row
    copies = {"server": deployment.copies, "prefill": row["prefill_workers"], "decode": row["decode_workers"]}
    each = counted(deployment.gpus_each, "GPU")
    return f"on {each}" if copies[role] == 1 else f"{copies[role]} times, each on {each}"


def _print_command(command: Command) -> None:
    out = console()
    width = _COMMAND_WIDTH if out.width >= UNLIMITED_WIDTH else min(out.width - len(_INDENT), 118)
    _print_indented(command.shell(_CONFIG if command.config else "", width=width))


def _print_indented(text: str) -> None:
    out = console()
    out.print()
    for line in text.splitlines():
        out.print(f"{_INDENT}{line}", soft_wrap=True)
    out.print()


def print_saved(written: list[Path]) -> None:
    """Print which files were written."""
    folder = written[0].parent
    say(f"written to {folder}: {', '.join(str(path.relative_to(folder)) for path in written)}")


def deployment_document(deployment: Deployment | None) -> dict[str, Any] | None:
    """How to run a deployment, as JSON has it."""
    if deployment is None:
        return None
    engine = deployment.engine

    def words(command: Command) -> dict[str, Any]:
        return {
            "command": command.words(_CONFIG if command.config else ""),
            "config": dict(command.config) or None,
        }

    return {
        "checkpoint": deployment.checkpoint.name,
        "engine": None if engine is None else engine.title,
        "release": None if engine is None else engine.release,
        "image": None if engine is None else engine.image,
        "copies": deployment.copies,
        "gpus_each": deployment.gpus_each,
        "servers": {role: words(command) for role, command in deployment.servers.items()},
        "benchmark": None if deployment.benchmark is None else words(deployment.benchmark),
        "benchmark_clients": deployment.benchmark_clients,
        "price": None if deployment.price is None else deployment.price._asdict(),
        "notes": list(deployment.notes),
    }
