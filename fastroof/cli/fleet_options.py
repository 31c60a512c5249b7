"""Options of fleets: those of fastroof.simulation.fleet_options with help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.named_plans import speculation_of
from fastroof.cli.option_groups import simulated_plan
from fastroof.cli.options import option
from fastroof.command_group import Group, GroupValues
from fastroof.simulation.fleet_options import OPTIONS, count, fleet_of_options

if TYPE_CHECKING:
    from fastroof import Fleet, StepPlan

_HELP: Final[dict[str, tuple[str | None, ...]]] = {
    "replicas": ("Number of engines that share the requests; with --autoscale, at the start.",),
    "router": (
        "Routing to replicas: round_robin, least_outstanding, least_load, least_kv, power_of_two or, with a "
        "simulated prefix cache, prefix_aware.",
        "NAME",
    ),
    "prefix_cache": (
        "Prefix cache: hits as the trace gives them, or of a simulated LRU cache by its hash_ids or "
        "sessions; auto is lru for traces with either.",
        "auto|given|lru",
    ),
    "kv_tiers": (
        "Tiers of KV cache below a simulated prefix cache, with commas between: lmcache-cpu, lmcache-disk, "
        "vllm-offloading, sglang-hicache, mooncake-store, or another name with its size and bandwidth, then "
        "latency, write_back, write_through, wait, before_step, by_layer, prompts, answers: "
        "host:200GB:50GB/s:20us:by_layer.  [default: none]",
        "TIERS",
    ),
    "autoscale": (
        "Start and stop replicas to keep a metric at a target per replica: queue:2 (waiting requests), "
        "concurrency:32 (waiting or running), kv:0.7 (share of the KV cache) or rate:5 (requests/s). With "
        "LOW, one more above TARGET and one fewer below LOW. Prefill and decode engines each have the rule.",
        "METRIC:TARGET[:LOW]",
    ),
    "min_replicas": ("Fewest replicas with --autoscale.  [default: 1]",),
    "max_replicas": ("Most replicas; needed with --autoscale.",),
    "startup": ("Seconds until a started replica takes requests; needed with --autoscale.", "S"),
    "scale_interval": ("Seconds between checks.  [default: 15]", "S"),
    "scale_down_delay": ("Seconds for which fewer replicas must be enough.  [default: 300]", "S"),
    "prefill_replicas": ("Number of prefill engines; needs --decode-replicas.",),
    "decode_replicas": ("Number of decode engines, each on --tp GPUs.",),
    "prefill_tp": ("GPUs of a prefill engine.  [default: --tp]", "GPUS"),
    "kv_bandwidth": (
        "Bandwidth from a prefill GPU to a decode GPU: 50 is a 400 Gb/s NIC.  [default: NVLink's]",
        "GB/S",
    ),
    "back_pressure": (
        "Keep a prompt's blocks until it is sent, once its decode engine has room.  "
        "[default: no-back-pressure]",
        None,
        "--back-pressure/--no-back-pressure",
    ),
}
"""Help, metavar and names of each option."""


def _option(name: str) -> tuple[Any, Any]:
    kind, default = OPTIONS[name]
    is_count = kind is count
    about: Any = _HELP[name]
    return option(int if is_count else kind, *about, default=default, min=1 if is_count else None)


FLEET: Final[Group] = {name: _option(name) for name in OPTIONS}
"""The engines of a simulated run."""

ROUTER: Final[Group] = {name: FLEET[name] for name in ("router", "prefix_cache", "kv_tiers")}
"""How requests find a replica, and what is cached in it and below it."""


def given_fleet(
    model: str,
    options: GroupValues,
    plan: GroupValues,
    settings: dict[str, Any],
    speculative: GroupValues,
    measured: GroupValues,
) -> Fleet:
    """Return the fleet that options describe: those of FLEET, of a plan, engine, draft tokens and tables."""
    what = (model, *gpu_and_tables(**measured), settings)

    def compiled(own: dict[str, Any]) -> StepPlan:
        return simulated_plan(*what, {**plan, **own}, speculative["num_draft_tokens"])

    drafts: dict[str, Any] = {}
    if any(value is not None for value in speculative.values()):
        drafts = {"speculation": speculation_of(compiled({}), speculative, measured, plan["engine"])}
    return fleet_of_options(options, compiled, {**settings, **drafts})
