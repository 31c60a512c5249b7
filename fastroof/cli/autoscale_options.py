"""The options of simulate by which a rule starts and stops replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.cli.option_groups import Group, GroupValues
from fastroof.errors import SimulationError

if TYPE_CHECKING:
    from fastroof.simulation import Autoscaler

AUTOSCALE: Final[Group] = {
    "autoscale": (
        Annotated[
            str | None,
            typer.Option(
                metavar="METRIC:TARGET[:LOW]",
                help="Start and stop replicas to keep a metric at a target per replica: queue:2 (waiting "
                "requests), concurrency:32 (waiting or running), kv:0.7 (share of the KV cache) or rate:5 "
                "(requests/s). With LOW, one more above TARGET and one fewer below LOW.",
            ),
        ],
        None,
    ),
    "min_replicas": (
        Annotated[int | None, typer.Option(min=1, help="Fewest replicas with --autoscale.  [default: 1]")],
        None,
    ),
    "max_replicas": (
        Annotated[int | None, typer.Option(min=1, help="Most replicas; needed with --autoscale.")],
        None,
    ),
    "startup": (
        Annotated[
            float | None,
            typer.Option(
                metavar="S", help="Seconds until a started replica takes requests; needed with --autoscale."
            ),
        ],
        None,
    ),
    "scale_interval": (
        Annotated[
            float | None,
            typer.Option(metavar="S", help="Seconds between checks.  [default: 15]"),
        ],
        None,
    ),
    "scale_down_delay": (
        Annotated[
            float | None,
            typer.Option(
                metavar="S", help="Seconds for which fewer replicas must be enough.  [default: 300]"
            ),
        ],
        None,
    ),
}
"""Replicas that a rule starts and stops."""

_AUTOSCALER_FIELDS: Final = {
    "startup": "startup_s", "scale_interval": "interval_s", "scale_down_delay": "scale_down_delay_s"
}  # fmt: skip


def asked_autoscaler(given: GroupValues) -> Autoscaler | None:
    """Return the rule that options of AUTOSCALE describe, None without --autoscale."""
    options = {name: value for name, value in given.items() if value is not None}
    text = options.pop("autoscale", None)
    if text is None:
        if options:
            raise SimulationError(f"--{next(iter(options)).replace('_', '-')} needs --autoscale")
        return None
    for name in ("max_replicas", "startup"):
        if name not in options:
            raise SimulationError(f"--autoscale {text} needs --{name.replace('_', '-')}")
    from fastroof.simulation import Autoscaler

    fields = {_AUTOSCALER_FIELDS.get(name, name): value for name, value in options.items()}
    return Autoscaler.parsed(text, **fields)
