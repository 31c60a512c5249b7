"""How to run a deployment: the commands of its engine, what they leave open, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.config import load_gpu
from fastroof.engines import EngineProfile, load_engine
from fastroof.engines.launch import BenchmarkLoad, Command, EngineCommands, LaunchSettings, engine_commands
from fastroof.models import TP_SIZES, load_model
from fastroof.models.load import Published, published_checkpoint
from fastroof.sweep.best import Choice
from fastroof.sweep.deployments import DeploymentSpec

ROOM_TRUSTED: Final = 0.9
"""Share of the estimated room for KV cache that the longest sequence may take: an engine that finds less room
than its longest sequence needs does not start."""
WHOLE_CONTEXT: Final = 1024


class TokenPrice(NamedTuple):
    """What tokens cost where a GPU's hour has a price.

    Attributes
    ----------
    an_hour : float
        All GPUs for an hour.
    of_output, of_all : float
        A million output tokens, and a million tokens of prompts and outputs together.
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
        What it is, and why.
    checkpoint : Published
        What the engine is given to serve.
    profile : EngineProfile
        Of the engine that it was estimated for.
    engine : EngineCommands or None
        The engine's commands; None if it is not a serving engine.
    copies : int
        Copies of the model; 0 where prefill and decode run apart.
    gpus_each : int
        GPUs of each copy or worker.
    servers : dict of str to Command
        The command of a copy, by its role: ``server``, or ``prefill`` and ``decode``.
    benchmark : Command or None
        What measures one copy under its share of the load; None where prefill and decode run apart.
    benchmark_clients : int
        Clients of that.
    price : TokenPrice or None
        What tokens cost; None without prices.
    notes : tuple of str
        What the commands assume, and what they cannot say.
    """

    choice: Choice
    checkpoint: Published
    profile: EngineProfile
    engine: EngineCommands | None
    copies: int
    gpus_each: int
    servers: dict[str, Command]
    benchmark: Command | None
    benchmark_clients: int
    price: TokenPrice | None
    notes: tuple[str, ...]

    @property
    def row(self) -> dict[str, Any]:
        """The deployment's row."""
        return self.choice.row


def deployment_of(spec: DeploymentSpec, choice: Choice) -> Deployment:
    """Return how to run a choice among a spec's deployments.

    Examples
    --------
    >>> from fastroof.sweep import best_deployments, load_spec
    >>> spec = load_spec({"models": ["llama-3.1-8b"], "tp": [2], "isl": 1000, "osl": 100, "concurrency": [8]})
    >>> deployment = deployment_of(spec, best_deployments(spec).answers[0].choices[0])
    >>> deployment.servers["server"].words()[:5]
    ['vllm', 'serve', 'meta-llama/Llama-3.1-8B', '--tensor-parallel-size', '2']
    """
    row = choice.row
    given = next(name for name in spec.models if load_model(name).name == row["model"])
    checkpoint = published_checkpoint(given, row["dtype"])
    # by the name that the spec has, which may say a version
    profile = next(load_engine(name) for name in spec.runtime if load_engine(name).name == row["runtime"])
    engine = engine_commands(profile.engine, profile.versions)
    gpus_each = row["tp"] * row["pp"] * row["dp"]
    servers: dict[str, Command] = {}
    benchmark = None
    copies = row["replicas"]
    clients = max(round(row["concurrency"] / copies), 1) if copies else 0
    if engine is not None:
        roles = {"server": ""} if copies else {"prefill": "prefill", "decode": "decode"}
        for name, role in roles.items():
            servers[name] = engine.server(_settings(spec, row, given, checkpoint, profile, role))
        if copies:
            prefix = int(row["isl"] * row["prefix_hit"])
            # a server names the model by the path or id it was given
            load = BenchmarkLoad(_served(checkpoint.name), row["isl"], row["osl"], clients, prefix)
            benchmark = engine.benchmark(load)
    notes = _notes(spec, row, checkpoint, profile, engine, gpus_each)
    unsaid = dict.fromkeys(
        text for command in (*servers.values(), benchmark) if command is not None for text in command.unsaid
    )
    notes += [f"not in the command: {text}" for text in unsaid]
    return Deployment(
        choice, checkpoint, profile, engine, copies, gpus_each, servers, benchmark, clients,
        _price(spec, row), tuple(notes),
    )  # fmt: skip


def _settings(
    spec: DeploymentSpec,
    row: dict[str, Any],
    given: str,
    checkpoint: Published,
    profile: EngineProfile,
    role: str,
) -> LaunchSettings:
    model = load_model(given)
    batches = row["dp"] * row["pp"] * max(row["replicas"] or row["decode_workers"], 1)
    return LaunchSettings(
        model=_served(checkpoint.name),
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        ep=row["ep"],
        has_experts=model.has_experts,
        max_batched_tokens=row["max_batched_tokens"],
        max_seqs=spec.max_seqs,
        max_context=_context(row, model.max_position),
        running=math.ceil(row["effective_concurrency"] / batches),
        memory_fraction=0.0 if profile.memory.room == "datasheet" else profile.memory.fraction,
        dtype=row["dtype"],
        kv_dtype=row["kv_dtype"],
        checkpoint_dtype=checkpoint.dtype,
        checkpoint_kv_dtype=checkpoint.kv_dtype,
        num_draft_tokens=row["num_draft_tokens"],
        draft=row["draft"] or "",
        balance_steps=profile.data_parallel.balance_steps,
        role=role,
    )


def _served(name: str) -> str:
    """A folder as an absolute path; ids stay unchanged and cannot look like options."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    return f"./{name}" if name.startswith("-") else name


def _context(row: dict[str, Any], longest: int) -> int:
    """Tokens of the longest sequence: the model's own, or what surely has room beside the weights."""
    room = int(row["max_kv_tokens"] * ROOM_TRUSTED) // WHOLE_CONTEXT * WHOLE_CONTEXT
    needed: int = row["isl"] + row["osl"]
    return max(min(longest, room), needed)


def _notes(
    spec: DeploymentSpec,
    row: dict[str, Any],
    checkpoint: Published,
    profile: EngineProfile,
    engine: EngineCommands | None,
    gpus_each: int,
) -> list[str]:
    notes = []
    if engine is None:
        return [f"runtime {row['runtime']} is not a serving engine: there is no command to start it"]
    of_versions = f" {profile.versions}" if profile.versions else ", any version"
    notes.append(
        f"estimated for {engine.title}{of_versions} (runtime {profile.name}), from kernels of "
        f"{row['kernels']}; arguments as of {engine.title} {engine.release}"
    )
    if not engine.is_of_profile:
        notes.append(
            f"{engine.title} {engine.release} is not of the versions that it was estimated for: check the "
            "arguments against yours"
        )
    if not checkpoint.is_given:
        notes.append(f"{checkpoint.name} is the published checkpoint in {row['dtype']}")
    if Path(checkpoint.name).is_dir():
        notes.append(f"a container has to have the folder {_served(checkpoint.name)} too")
    # by what the spec has for it, which may be a path
    gpu = next(gpu for gpu in map(load_gpu, spec.gpus) if gpu.name == row["gpu"])
    node = min(gpu.linked_gpus, TP_SIZES[-1])
    if gpus_each > node:
        notes.append(
            f"a copy spans {-(-gpus_each // node)} nodes of {node} GPUs: start {engine.title} on each of "
            "them, as its guide to several nodes says"
        )
    if not row["replicas"]:
        notes.append(
            f"{row['prefill_workers']} workers prefill and {row['decode_workers']} decode; a router before "
            "them is not in these commands"
        )
    if row["origin"] == "modelled":
        notes.append("its times are modelled from the datasheet, at least in part, rather than measured")
    return notes


def _price(spec: DeploymentSpec, row: dict[str, Any]) -> TokenPrice | None:
    price = spec.price(row["gpu"])
    if price is None:
        return None
    of_output = row["cost_per_million_tokens"]
    share = row["osl"] / (row["isl"] + row["osl"])
    return TokenPrice(price * row["total_gpus"], of_output, of_output * share)
