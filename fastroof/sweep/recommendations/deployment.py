"""How to run a deployment: its engine's commands, their assumptions, and the price."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.columns import MODELLED_FROM, ORIGIN_MODELLED
from fastroof.config import load_gpu
from fastroof.engines import EngineProfile, load_engine
from fastroof.engines.launch import (
    Address,
    BenchmarkLoad,
    Command,
    EngineCommands,
    LaunchSettings,
    engine_commands,
    served_name,
)
from fastroof.engines.launch.settings import LOOPBACK
from fastroof.engines.load import version_named
from fastroof.models import TP_SIZES, load_model
from fastroof.models.load import Published, draft_to_serve, published_checkpoint
from fastroof.models.lora import lora_settings
from fastroof.sweep.answers import Choice
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.deployments.kind import DeploymentSweep
from fastroof.sweep.kind import GpuTables, load_tables_by_gpu
from fastroof.sweep.units import PlanKey

ROOM_TRUSTED: Final = 0.9
"""Maximum share of the estimated KV cache for the longest sequence: an engine with less KV cache than its
longest sequence needs does not start."""
WHOLE_CONTEXT: Final = 1024

PORT: Final = 8000
PORT_STEP: Final = 10
"""Between the ports of two copies: ranks of SGLang that share experts take six, 233 after their server's."""
ROUTER_PORT: Final = 8100
GPUS_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


class Copy(NamedTuple):
    """A copy of a role: its number among them, GPUs (none if it spans machines), first machine and ports."""

    role: str
    number: int
    gpus: tuple[int, ...]
    address: Address


def placed_copies(
    replicas: Mapping[str, int], gpus_each: int, machine_gpus: int, side_port: int
) -> tuple[Copy, ...]:
    """Return where copies run: one after the other on as few machines as hold them."""
    roles = [(role, number) for role, count in replicas.items() for number in range(count)]
    at_once, machines = max(machine_gpus // gpus_each, 1), -(-gpus_each // machine_gpus)
    copies = []
    for index, (role, number) in enumerate(roles):
        machine, slot = divmod(index, at_once)
        host = LOOPBACK if len(roles) <= at_once and machines == 1 else f"node-{machine * machines}"
        first = slot * gpus_each
        gpus = tuple(range(first, first + gpus_each)) if machines == 1 else ()
        side = side_port + first if side_port and role != "server" else 0
        copies.append(Copy(role, number, gpus, Address(host, PORT + PORT_STEP * slot, side)))
    return tuple(copies)


class TokenPrice(NamedTuple):
    """Price of tokens, from the price of a GPU-hour.

    Attributes
    ----------
    an_hour : float
        Price of all GPUs per hour.
    of_output, of_all : float
        Price per million output tokens, and per million tokens of prompts and outputs.
    """

    an_hour: float
    of_output: float
    of_all: float


@dataclass(frozen=True)
class Deployment:
    """How to run one deployment.

    Attributes
    ----------
    choice : Choice
        The deployment with the reasons for its rank.
    checkpoint : Published
        Checkpoint for the engine to serve.
    profile : EngineProfile
        Profile of the engine that the estimate is for.
    engine : EngineCommands or None
        The engine's commands; None if it is not a serving engine.
    gpus_each : int
        GPUs per replica or worker.
    placement : tuple of Copy
        Where each replica or worker runs.
    settings : dict of str to LaunchSettings
        Settings of the first copy by role: ``server``, or ``prefill`` and ``decode``.
    servers : dict of str to Command
        Start commands of the first copies by role.
    router : Command or None
        Command of the router in front of several copies; None if the engine has none for them.
    benchmark : Command or None
        Command that measures one replica under its share of the load, or separate workers under all of it.
    benchmark_clients : int
        Concurrent clients of the benchmark; with a rate the mean number of its requests in flight.
    benchmark_rate : float
        Requests/s of the benchmark; 0 if its clients send their next request when the last one is answered.
    price : TokenPrice or None
        Price of tokens; None without a price of GPUs.
    facts : tuple of str
        What the estimate is of, however the engine is started.
    notes : tuple of str
        The facts, assumptions of the commands, and settings that they cannot express.
    """

    choice: Choice
    checkpoint: Published
    profile: EngineProfile
    engine: EngineCommands | None
    gpus_each: int
    placement: tuple[Copy, ...]
    settings: dict[str, LaunchSettings]
    servers: dict[str, Command]
    router: Command | None
    benchmark: Command | None
    benchmark_clients: int
    benchmark_rate: float
    price: TokenPrice | None
    facts: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def row(self) -> dict[str, Any]:
        """Return the deployment's row."""
        return self.choice.row

    @property
    def replicas(self) -> dict[str, int]:
        """Return the number of copies by role."""
        return dict(Counter(copy.role for copy in self.placement))

    @property
    def copies(self) -> int:
        """Return the number of replicas; 0 if prefill and decode run on separate workers."""
        return self.replicas.get("server", 0)

    @property
    def commands(self) -> dict[str, Command]:
        """Return the commands of the deployment by role, with that of the router."""
        return self.servers | ({} if self.router is None else {"router": self.router})


def deployment_of(
    spec: DeploymentSpec, choice: Choice, tables_by_gpu: Mapping[str, GpuTables] | None = None
) -> Deployment:
    """Return how to run one of the ranked deployments of a spec.

    The tables by the names of GPUs in the spec are loaded if not given.

    Examples
    --------
    >>> from fastroof.sweep import best_deployments, load_spec
    >>> spec = load_spec({"models": ["llama-3.1-8b"], "tp": [2], "isl": 1000, "osl": 100, "clients": [8]})
    >>> deployment = deployment_of(spec, best_deployments(spec).answers[0].choices[0])
    >>> deployment.servers["server"].words()[:5]
    ['vllm', 'serve', 'meta-llama/Llama-3.1-8B', '--tensor-parallel-size', '2']
    """
    row = choice.row
    key = spec.plan_key(row)
    checkpoint = published_checkpoint(key.model, row["dtype"])
    profile = load_engine(key.engine)
    # the name in the spec may include a version
    engine = engine_commands(profile.engine, profile.versions, version_named(key.engine))
    gpus_each = row["tp"] * row["pp"] * row["dp"]
    replicas = {"prefill": row["prefill_workers"], "decode": row["decode_workers"]}
    if row["replicas"]:
        replicas = {"server": row["replicas"]}
    machine_gpus = min(load_gpu(key.gpu).linked_gpus, TP_SIZES[-1])
    placement = placed_copies(replicas, gpus_each, machine_gpus, engine.side_port if engine else 0)
    settings: dict[str, LaunchSettings] = {}
    servers: dict[str, Command] = {}
    router = benchmark = None
    # what takes all requests of the benchmark, which are its share
    measured = row["replicas"] or 1
    clients = max(round(row["clients"] / measured), 1)
    # limits on a percentile hold for arrivals at random, which a closed loop of clients does not send
    is_by_rate = choice.percentile is not None and not choice.percentile.why_not
    rate = row["requests_per_s"] / measured if is_by_rate else 0.0
    if engine is not None:
        for role in replicas:
            first = next(copy for copy in placement if copy.role == role)
            settings[role] = _settings(spec, row, key, checkpoint, profile, first)
            command = engine.server(settings[role])
            gpus = (
                {GPUS_VARIABLE: ",".join(map(str, first.gpus))} if first.gpus and len(placement) > 1 else {}
            )
            servers[role] = replace(command, environment=gpus | dict(command.environment))
        if len(placement) > 1:
            places = {role: [one.address for one in placement if one.role == role] for role in replicas}
            router = engine.router(places, ROUTER_PORT)
        load = BenchmarkLoad(
            # a server calls the model by the path or id that it was started with
            served_name(checkpoint.name), row["isl"], row["osl"], clients,
            prefix_tokens=int(row["isl"] * row["prefix_hit"]),
            port=PORT if row["replicas"] else ROUTER_PORT,
            requests_per_s=rate,
        )  # fmt: skip
        benchmark = engine.benchmark(load)
    facts = _facts(row, checkpoint, profile, engine)
    facts += _modelled_kernels(spec, row, tables_by_gpu or load_tables_by_gpu(DeploymentSweep(spec)))
    notes = facts + _assumptions(placement, replicas, engine, router, machines=-(-gpus_each // machine_gpus))
    unsaid = dict.fromkeys(
        text for command in (*servers.values(), benchmark) if command is not None for text in command.unsaid
    )
    notes += [f"not in the command: {text}" for text in unsaid]
    return Deployment(
        choice, checkpoint, profile, engine, gpus_each, placement, settings, servers, router, benchmark,
        clients, rate, _price(spec, row), tuple(facts), tuple(notes),
    )  # fmt: skip


_OF_ROW: Final = (
    "tp", "pp", "dp", "ep", "max_num_batched_tokens", "max_num_seqs", "dtype", "kv_dtype", "num_draft_tokens",
)  # fmt: skip
"""Settings of a launch that rows have under the same names."""


def _settings(
    spec: DeploymentSpec,
    row: dict[str, Any],
    key: PlanKey,
    checkpoint: Published,
    profile: EngineProfile,
    copy: Copy,
) -> LaunchSettings:
    model, gpu = load_model(key.model), load_gpu(key.gpu)
    draft, method = draft_to_serve(row["draft"] or "")
    batches = row["dp"] * row["pp"] * max(row["replicas"] or row["decode_workers"], 1)
    return LaunchSettings(
        model=served_name(checkpoint.name),
        has_experts=model.has_experts,
        max_context=_context(row, model.max_position),
        running=math.ceil(row["effective_concurrency"] / batches),
        memory_fraction=0.0 if profile.memory.room == "datasheet" else profile.memory.fraction,
        checkpoint_dtype=checkpoint.dtype,
        auto_kv_dtype=profile.memory.auto_kv_dtype(gpu, model.architecture, checkpoint.kv_dtype),
        draft=draft,
        draft_method=method,
        draft_tp=0 if spec.speculation is None else spec.speculation.draft_tp or 0,
        balance_steps=profile.data_parallel.balance_steps,
        pauses=profile.scheduling.pauses_on,
        role="" if copy.role == "server" else copy.role,
        address=copy.address.host,
        port=copy.address.port,
        side_port=copy.address.side_port,
        **{name: row[name] for name in _OF_ROW},
        **lora_settings(spec.lora, profile.lora, profile.name, model.linear_roles),
    )


def _context(row: dict[str, Any], longest: int) -> int:
    """Return the maximum sequence length: the model's own, or what certainly fits next to the weights."""
    room = int(row["max_kv_tokens"] * ROOM_TRUSTED) // WHOLE_CONTEXT * WHOLE_CONTEXT
    needed: int = row["isl"] + row["osl"]
    return max(min(longest, room), needed)


def _facts(
    row: dict[str, Any],
    checkpoint: Published,
    profile: EngineProfile,
    engine: EngineCommands | None,
) -> list[str]:
    """Return what an estimate is of, however the engine is started."""
    if engine is None:
        return [f"engine {row['engine']} is not a server: there is no command to start it"]
    facts = [f"estimated for {engine.title}, profile {profile.title}, from kernels of {row['kernels']}"]
    if not checkpoint.is_given:
        facts.append(f"{checkpoint.name} is the published checkpoint in {row['dtype']}")
    if Path(checkpoint.name).is_dir():
        facts.append(f"mount the folder {served_name(checkpoint.name)} into the container too")
    return facts


def _assumptions(
    placement: tuple[Copy, ...],
    replicas: Mapping[str, int],
    engine: EngineCommands | None,
    router: Command | None,
    *,
    machines: int,
) -> list[str]:
    """Return what the commands assume, with copies on a number of machines each."""
    if engine is None:
        return []
    notes = [f"arguments are those of {engine.title} {engine.release}"]
    if not engine.is_of_profile:
        notes[0] += ", the closest release that was read: check them against your version"
    if machines > 1:
        notes.append(
            f"a copy spans {machines} machines: start {engine.title} on each of them, following its "
            "multi-node guide"
        )
    if router is not None:
        counts = " and ".join(
            f"{count} {'copies' if role == 'server' else f'that {role}'}" for role, count in replicas.items()
        )
        notes.append(f"{engine.router_name} on port {ROUTER_PORT} gives requests to {counts}")
    elif len(placement) > 1:
        notes.append(f"{engine.title} has no router for whole copies: put a load balancer in front of them")
    if (last := placement[-1].address.host) != placement[0].address.host:
        notes.append(f"node-0 to {last} are machines: name them so in /etc/hosts, or replace the names")
    return notes


def _modelled_kernels(
    spec: DeploymentSpec, row: dict[str, Any], by_gpu: Mapping[str, GpuTables]
) -> list[str]:
    """Return what replaces the kernels of a deployment's decode and prefill steps that were not measured."""
    from fastroof.load.scaled import scaled_error
    from fastroof.sweep.unit_plans import Lost, unit_plan

    key = spec.plan_key(row)
    tables = by_gpu[key.gpu]
    batches = row["dp"] * row["pp"] * max(row["replicas"] or row["decode_workers"], 1)
    prompt = max(min(row["isl"], row["max_num_batched_tokens"]), 1)
    running = max(min(math.ceil(row["effective_concurrency"] / batches), row["max_num_batched_tokens"]), 1)
    with warnings.catch_warnings():
        # of modelled kernels, which is what the answer is about
        warnings.simplefilter("ignore", UserWarning)
        plan = unit_plan(spec, key, tables, max_num_batched_tokens=max(prompt, running), max_num_seqs=running)
    if isinstance(plan, Lost):
        return []
    steps = [(1, row["isl"] + row["osl"] // 2)] * running, [(prompt, 0)]
    parts = [part for step in steps for part in plan.explain(step).operators if part.role != "runtime"]
    scaled = tables.tables.scaled_sources if tables.tables is not None else ()
    by_how: dict[str, dict[str, None]] = {}
    for part in parts:
        if part.origin == ORIGIN_MODELLED:
            how = "from the datasheet, not measured"
            error = plan.gpu.datasheet_error
            if MODELLED_FROM in part.source:
                # the source states its error
                by_how.setdefault(f"from {part.source}", {})[part.name] = None
                continue
            if part.source in scaled:
                how = f"from kernels of {plan.gpu.kernels_of}, scaled"
                error = scaled_error(load_gpu(plan.gpu.kernels_of), plan.gpu)
            by_how.setdefault(f"modelled {how} (standard error {error:.0%})", {})[part.name] = None
    return [
        f"{how}: {'all kernels' if all(part.name in names for part in parts) else ', '.join(names)}"
        for how, names in by_how.items()
    ]


def _price(spec: DeploymentSpec, row: dict[str, Any]) -> TokenPrice | None:
    price = spec.price(row["gpu"])
    if price is None:
        return None
    of_output = row["cost_per_million_tokens"]
    share = row["osl"] / (row["isl"] + row["osl"])
    return TokenPrice(price * row["total_gpus"], of_output, of_output * share)
