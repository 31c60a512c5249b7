"""Fleets as options of the command line and the local page describe them: replicas, pools, autoscaling."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import shown
from fastroof.errors import SimulationError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation import Autoscaler, Fleet, Link


def count(text: str) -> int:
    """Return a number of engines; its name is in the parser's error."""
    if int(text) < 1:
        raise ValueError
    return int(text)


_POOLS: Final[dict[str, Callable[[str], Any]]] = {
    "prefill_replicas": count, "decode_replicas": count, "prefill_tp": int, "kv_bandwidth": float,
    "back_pressure": bool,
}  # fmt: skip
AUTOSCALE: Final[dict[str, Callable[[str], Any]]] = {
    "autoscale": str, "min_replicas": count, "max_replicas": count, "startup": float,
    "scale_interval": float, "scale_down_delay": float,
}  # fmt: skip
"""Options of rules that start and stop replicas."""

OPTIONS: Final[dict[str, tuple[Callable[[str], Any], Any]]] = {
    "replicas": (count, 1),
    "router": (str, "round_robin"),
    "prefix_cache": (str, "auto"),
    "kv_tiers": (str, None),
    **{name: (kind, None) for name, kind in (AUTOSCALE | _POOLS).items()},
}
"""Each option with its type and default; :mod:`fastroof.cli.fleet_options` adds their help."""


def read_options(text: str, **options: Any) -> dict[str, Any]:
    """Read the options as on a command line, except those that are given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, (kind, default) in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in options and kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        elif name not in options:
            parser.add_argument(flag, type=kind, default=default)
    try:
        values, unread = parser.parse_known_args(shlex.split(text))
        if unread:
            is_option = unread[0].startswith("-")
            raise ValueError(
                f"no such option: {unread[0]}" if is_option else f"unexpected argument {shown(unread[0])}"
            )
    except (ValueError, argparse.ArgumentError) as error:
        raise SimulationError(
            f"{str(error)[:1].lower()}{str(error)[1:]}, in {shown(text)}; valid: --replicas, --router, "
            "--autoscale, --prefill-replicas and the others of fastroof simulate"
        ) from None
    return {**vars(values), **options}


def fleet_of_options(
    options: Mapping[str, Any], compiled: Callable[[dict[str, Any]], StepPlan], settings: Mapping[str, Any]
) -> Fleet:
    """Return the fleet that options describe, or refuse options that exclude each other.

    ``compiled`` makes a plan with the given options instead of others; ``settings`` are those of all engines.
    """
    from fastroof.simulation.fleet import Fleet, Pool

    link = _link(options["replicas"], {name: options[name] for name in _POOLS})
    autoscaler = _autoscaler({name: options[name] for name in AUTOSCALE})
    caches = {name: options[name] for name in ("prefix_cache", "kv_tiers")}
    plan = compiled({})
    if link is None:
        pools = [Pool(plan, options["replicas"], **caches, **settings)]
    else:
        prefill = compiled({"tp": options["prefill_tp"]}) if options["prefill_tp"] else plan
        pools = [
            Pool(prefill, options["prefill_replicas"], **caches, **settings),
            Pool(plan, options["decode_replicas"], **settings),
        ]
    return Fleet(pools, options["router"], link, autoscaler)


def _link(replicas: int, given: Mapping[str, Any]) -> Link | None:
    """Return the link that options of pools of engines describe, None without pools."""
    from fastroof.simulation import Link
    from fastroof.units import GB

    pools = given["prefill_replicas"], given["decode_replicas"]
    if pools == (None, None):
        alone = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
        if alone:
            raise SimulationError(f"{alone[0]} needs --prefill-replicas and --decode-replicas")
        return None
    if None in pools:
        raise SimulationError("--prefill-replicas and --decode-replicas go together: give both")
    if replicas != 1:
        raise SimulationError(
            f"--replicas {replicas} are engines that prefill and decode; leave it out with "
            "--prefill-replicas and --decode-replicas"
        )
    bandwidth = given["kv_bandwidth"]
    return Link(None if bandwidth is None else bandwidth * GB, back_pressure=bool(given["back_pressure"]))


_AUTOSCALER_FIELDS: Final = {
    "startup": "startup_s", "scale_interval": "interval_s", "scale_down_delay": "scale_down_delay_s"
}  # fmt: skip


def _autoscaler(given: Mapping[str, Any]) -> Autoscaler | None:
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
