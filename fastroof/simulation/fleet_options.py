"""Options of replicas, pools of engines, autoscaling and caches: of the command line and the local page.

Help is printed without NumPy, so that nothing slow is imported before a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from fastroof.checks import shown
from fastroof.command_group import Group, GroupValues, UsageError, taking
from fastroof.errors import SimulationError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation import Autoscaler, Link, Simulation, Trace

ROUTER: Final[Group] = {
    "router": (
        Annotated[
            str,
            typer.Option(
                metavar="NAME",
                help="Routing to replicas: round_robin, least_outstanding, least_load, least_kv, "
                "power_of_two or, with a simulated prefix cache, prefix_aware.",
            ),
        ],
        "round_robin",
    ),
    "prefix_cache": (
        Annotated[
            str,
            typer.Option(
                metavar="auto|given|lru",
                help="Prefix cache: hits as the trace gives them, or of a simulated LRU cache by its "
                "hash_ids or sessions; auto is lru for traces with either.",
            ),
        ],
        "auto",
    ),
    "kv_tiers": (
        Annotated[
            str | None,
            typer.Option(
                metavar="TIERS",
                help="Tiers of KV cache below a simulated prefix cache, with commas between: lmcache-cpu, "
                "lmcache-disk, vllm-offloading, sglang-hicache, mooncake-store, or another name with its "
                "size and bandwidth, then latency, write_back, write_through, wait, before_step, by_layer, "
                "prompts, answers: host:200GB:50GB/s:20us:by_layer.  [default: none]",
            ),
        ],
        None,
    ),
}
"""How requests find a replica, and what is cached in it and below it."""

POOLS: Final[Group] = {
    "prefill_replicas": (
        Annotated[
            int | None, typer.Option(min=1, help="Number of prefill engines; needs --decode-replicas.")
        ],
        None,
    ),
    "decode_replicas": (
        Annotated[int | None, typer.Option(min=1, help="Number of decode engines, each on --tp GPUs.")],
        None,
    ),
    "prefill_tp": (
        Annotated[
            int | None, typer.Option(metavar="GPUS", help="GPUs of a prefill engine.  [default: --tp]")
        ],
        None,
    ),
    "kv_bandwidth": (
        Annotated[
            float | None,
            typer.Option(
                metavar="GB/S",
                help="Bandwidth from a prefill GPU to a decode GPU: 50 is a 400 Gb/s NIC.  "
                "[default: NVLink's]",
            ),
        ],
        None,
    ),
    "kv_latency": (
        Annotated[
            float | None,
            typer.Option(metavar="US", help="Latency of each KV cache transfer.  [default: 0]"),
        ],
        None,
    ),
    "first_token": (
        Annotated[
            str | None,
            typer.Option(
                metavar="transfer|prefill|decode",
                help="Where the client sees the first token: with the KV cache at the decode engine, at the "
                "prefill engine, or computed by the decode engine.  [default: transfer]",
            ),
        ],
        None,
    ),
    "back_pressure": (
        Annotated[
            bool | None,
            typer.Option(
                "--back-pressure/--no-back-pressure",
                help="Keep a prompt's blocks until it is sent, once its decode engine has room.  "
                "[default: no-back-pressure]",
            ),
        ],
        None,
    ),
    "kv_by_layer": (
        Annotated[
            bool | None,
            typer.Option(
                "--kv-by-layer/--kv-at-once",
                help="Send each layer's KV cache as soon as it is computed.  [default: kv-at-once]",
            ),
        ],
        None,
    ),
}
"""Engines that only prefill and engines that only decode."""

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

FLEET: Final[Group] = {
    "replicas": (
        Annotated[
            int,
            typer.Option(
                min=1, help="Number of engines that share the requests; with --autoscale, at the start."
            ),
        ],
        1,
    ),
    **ROUTER,
    **AUTOSCALE,
    **POOLS,
}
"""The engines of a simulated run."""


class Fleet(NamedTuple):
    """The engines that options of FLEET describe."""

    options: GroupValues
    link: Link | None
    autoscale: Autoscaler | None

    @classmethod
    def of_options(cls, options: GroupValues) -> Fleet:
        """Return the engines, or refuse options that exclude each other."""
        link = _link(options["replicas"], **{name: options[name] for name in POOLS})
        autoscale = _autoscaler({name: options[name] for name in AUTOSCALE})
        if link is not None and autoscale is not None:
            raise SimulationError("--autoscale starts and stops whole engines: leave out --prefill-replicas")
        if link is not None and options["kv_tiers"] is not None:
            raise SimulationError("kv_tiers of pools of engines are not simulated; leave out one of them")
        return cls(options, link, autoscale)

    @classmethod
    def read(cls, text: str, **options: Any) -> Fleet:
        """Read the options as on a command line, except those that are given."""

        @taking(fleet_options={name: option for name, option in FLEET.items() if name not in options})
        def simulate(fleet_options: GroupValues) -> None:
            pass

        app = typer.Typer(add_completion=False, context_settings={"help_option_names": []})
        app.command()(simulate)
        try:
            context = typer.main.get_command(app).make_context("simulate", shlex.split(text))
        except (ValueError, UsageError) as error:
            why = getattr(error, "format_message", error.__str__)().strip().rstrip(".")
            raise SimulationError(
                f"{why[:1].lower()}{why[1:]}, in {shown(text)}; valid: --replicas, --router, --autoscale, "
                "--prefill-replicas and the others of fastroof simulate"
            ) from None
        return cls.of_options({**context.params, **options})

    def simulate(
        self,
        plan: StepPlan,
        prefill_plan: StepPlan,
        trace: Trace,
        settings: Mapping[str, Any],
        *,
        seed: int = 0,
        on_too_long: str = "error",
    ) -> Simulation:
        """Serve a trace; pools compute prompts with ``prefill_plan``."""
        options, router = self.options, self.options["router"]
        if self.link is None:
            from fastroof.simulation import simulate

            return simulate(
                plan,
                trace,
                **settings,
                replicas=options["replicas"],
                routing=router,
                prefix_cache=options["prefix_cache"],
                kv_tiers=options["kv_tiers"],
                seed=seed,
                on_too_long=on_too_long,
                autoscale=self.autoscale,
            )
        from fastroof.simulation import simulate_disaggregated

        return simulate_disaggregated(
            prefill_plan,
            plan,
            trace,
            options["prefill_replicas"],
            options["decode_replicas"],
            link=self.link,
            prefill=settings,
            decode=settings,
            prefill_routing=router,
            decode_routing="least_kv" if router == "prefix_aware" else router,
            prefix_cache=options["prefix_cache"],
            on_too_long=on_too_long,
        )


def _link(
    replicas: int,
    *,
    prefill_replicas: int | None,
    decode_replicas: int | None,
    prefill_tp: int | None,
    kv_bandwidth: float | None,
    kv_latency: float | None,
    first_token: str | None,
    back_pressure: bool | None,
    kv_by_layer: bool | None,
) -> Link | None:
    """Return the link between pools of engines, None without pools."""
    from fastroof.simulation import Link
    from fastroof.units import GB

    options: dict[str, Any] = {
        "--prefill-tp": prefill_tp,
        "--kv-bandwidth": kv_bandwidth,
        "--kv-latency": kv_latency,
        "--first-token": first_token,
        "--back-pressure": back_pressure,
        "--kv-by-layer": kv_by_layer,
    }
    if prefill_replicas is None and decode_replicas is None:
        alone = [name for name, value in options.items() if value is not None]
        if alone:
            raise SimulationError(f"{alone[0]} needs --prefill-replicas and --decode-replicas")
        return None
    if None in (prefill_replicas, decode_replicas):
        raise SimulationError("--prefill-replicas and --decode-replicas go together: give both")
    if replicas != 1:
        raise SimulationError(
            f"--replicas {replicas} are engines that prefill and decode; leave it out with "
            "--prefill-replicas and --decode-replicas"
        )
    link = Link(
        None if kv_bandwidth is None else kv_bandwidth * GB,
        kv_latency or 0.0,
        back_pressure=bool(back_pressure),
        by_layer=bool(kv_by_layer),
    )
    return link if first_token is None else link._replace(first_token=first_token)


_AUTOSCALER_FIELDS: Final = {
    "startup": "startup_s", "scale_interval": "interval_s", "scale_down_delay": "scale_down_delay_s"
}  # fmt: skip


def _autoscaler(given: GroupValues) -> Autoscaler | None:
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
