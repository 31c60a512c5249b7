"""Options of replicas, pools, autoscaling and caches; :mod:`fastroof.simulation.fleet` reads them."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fastroof.command_group import Group

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
