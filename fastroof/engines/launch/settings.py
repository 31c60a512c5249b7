"""Deployment settings of an engine, and the command that applies them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.engines.values import holds_for
from fastroof.units import GIB

MTP: Final = "mtp"
"""A draft by the model's own prediction layer."""

ALL_MODULES: Final = "all"
"""All modules that an engine gives LoRA adapters to."""

LOOPBACK: Final = "127.0.0.1"

SIDE_HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
SIDE_PORTS: Final = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "--disaggregation-bootstrap-port")
"""Where engines take the address and port of a copy's KV transfers."""

START_S: Final = 3600
"""Maximum time for a copy to load its weights, which routers and probes wait."""

RESULT: Final = "benchmark.json"
"""The file that a benchmark writes, which ``fastroof validate --runs`` reads."""

_LINE: Final = 78


class Address(NamedTuple):
    """Where a copy listens: its machine, and ports for requests and for KV transfers."""

    host: str
    port: int
    side_port: int = 0

    @property
    def url(self) -> str:
        """The address as routers take it."""
        return f"http://{self.host}:{self.port}"


MISSING_MODULES: Final = "which modules have LoRA adapters: see --lora-target-modules"

Servers = Mapping[str, Sequence[Address]]
"""Addresses of copies by role: ``server``, or ``prefill`` and ``decode``."""


@dataclass(frozen=True)
class LaunchSettings:
    """One copy of a model and the settings that a deployment assumes for its engine.

    Attributes
    ----------
    model : str
        Hugging Face id, or folder of the checkpoint.
    tp, pp, dp, ep : int
        The layout, as in :class:`fastroof.models.Layout`.
    dtype, kv_dtype : str
        Formats of linear layers and experts, and of the KV cache.
    checkpoint_dtype, auto_kv_dtype : str
        Formats of the checkpoint, and of the KV cache that the engine takes by itself.
    has_experts : bool
        Whether the model has routed experts.
    max_num_batched_tokens, max_num_seqs : int
        Maximum tokens per step and concurrent requests, per rank and stage.
    max_context : int
        Tokens of the longest sequence.
    running : int
        Concurrent requests per rank and stage under the deployment's load.
    memory_fraction : float
        Share of a GPU's memory, by the engine's definition; 0 for its formula.
    num_draft_tokens : int
        Tokens drafted per request before each step.
    draft : str
        Draft: ``mtp``, ``none``, or a model.
    draft_method : str
        Method of a draft that is a head of the model: ``eagle3``, ``dflash`` or ``dspark``; else empty.
    draft_tp : int
        GPUs of a draft head; 0 for those of the model.
    balance_steps : int
        Steps that a rank's prompts wait for those of other ranks; 0 for none.
    role : str
        ``prefill`` or ``decode`` if both run separately; empty if a copy does both.
    port, side_port : int
        Ports that it listens on: for requests, and for KV transfers of a role.
    address : str
        Its machine for routers and other copies; it listens beyond this machine if it has one.
    kv_cache_bytes : int
        Bytes of KV cache on each GPU, instead of what the share leaves; 0 for that.
    pauses : mapping
        Options that let prompts wait, by name (:class:`fastroof.engines.Scheduling`).
    lora_rank, max_loras : int
        Rank of LoRA adapters and how many a GPU holds; 0 without adapters.
    lora_modules : tuple of str
        Modules with adapters, or ``all``; empty if engines have no names for them.
    """

    model: str
    tp: int
    pp: int
    dp: int
    ep: int
    dtype: str
    kv_dtype: str
    checkpoint_dtype: str
    auto_kv_dtype: str
    has_experts: bool = False
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    max_context: int = 0
    running: int = 0
    memory_fraction: float = 0.0
    num_draft_tokens: int = 0
    draft: str = ""
    draft_method: str = ""
    draft_tp: int = 0
    balance_steps: int = 0
    role: str = ""
    port: int = 8000
    side_port: int = 0
    address: str = LOOPBACK
    kv_cache_bytes: int = 0
    pauses: Mapping[str, int] = field(default_factory=dict)
    lora_rank: int = 0
    max_loras: int = 0
    lora_modules: tuple[str, ...] = (ALL_MODULES,)

    @property
    def pause_options(self) -> list[tuple[str, int]]:
        """Options that let prompts wait, which are called as the settings."""
        return [(f"--{name.replace('_', '-')}", value) for name, value in self.pauses.items()]

    @property
    def listen_options(self) -> list[tuple[str, str | int]]:
        """Options of where it listens, which are called the same."""
        return [("--host", "" if self.address == LOOPBACK else "0.0.0.0"), ("--port", self.port)]

    @property
    def is_own_kv_dtype(self) -> bool:
        """Whether the KV cache has the format that the engine takes by itself."""
        return self.kv_dtype == self.auto_kv_dtype

    @property
    def online_dtype(self) -> str:
        """Format to which engines quantise 16-bit weights while loading; empty if they need not or cannot."""
        is_online = (self.checkpoint_dtype, self.dtype) == ("bf16", "fp8")
        return self.dtype if is_online else ""

    def missing_format(self, engine: str, *, converts: bool = True) -> str:
        """Return the message for an engine that cannot convert the checkpoint's weights; empty if it can."""
        if self.dtype == self.checkpoint_dtype or (converts and self.online_dtype):
            return ""
        return (
            f"{self.dtype} weights: {self.model} has {self.checkpoint_dtype}, which {engine} cannot convert "
            f"to {self.dtype} while loading; serve a checkpoint in {self.dtype}"
        )

    def own_drafts(self, heads: Mapping[str, str], release: str) -> int:
        """Number of tokens drafted by the model's own layer, or by a head whose method a release has."""
        method = self.draft_method
        is_own = self.draft == MTP or (method in heads and holds_for(heads[method], release))
        return self.num_draft_tokens if is_own else 0

    def missing_drafts(self, option: str) -> str:
        """Return the message for drafts that are left to an option; empty without drafts."""
        drafts = f"{self.num_draft_tokens} draft tokens by {self.draft}: see {option}"
        return drafts if self.num_draft_tokens else ""

    def missing_kv_bytes(self, option: str) -> str:
        """Return the message for a size of the KV cache that is left to an option; empty without one."""
        return f"{self.kv_cache_bytes / GIB:g} GiB of KV cache: see {option}" if self.kv_cache_bytes else ""

    @property
    def shown_model(self) -> str:
        """The model as a command takes it, so that a leading dash is not an option."""
        return f"./{self.model}" if self.model.startswith("-") else self.model


def options(*given: tuple[str, Any]) -> list[tuple[str, ...]]:
    """Return options as a command takes them: none without a value, and a True one by its name alone."""
    found: list[tuple[str, ...]] = []
    for name, value in given:
        values = value if isinstance(value, tuple) else (f"{value:g}" if isinstance(value, float) else value,)
        if value:
            found.append((name,) if value is True else (name, *map(str, values)))
    return found


def served_name(name: str) -> str:
    """Return a folder as an absolute path; an id unchanged, unless it looks like an option."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    return f"./{name}" if name.startswith("-") else name


@dataclass(frozen=True)
class BenchmarkLoad:
    """The requests that a benchmark sends to one copy.

    Attributes
    ----------
    model : str
        The name or path given to the server.
    isl, osl : int
        Tokens of a prompt and an output.
    clients : int
        Requests in flight; with a rate the mean number of them.
    prefix_tokens : int
        Number of tokens that all prompts start with.
    port : int
        Port that the server listens on.
    requests_per_s : float
        Rate of Poisson arrivals; 0 if each client sends its next request when the last one is answered.
    """

    model: str
    isl: int
    osl: int
    clients: int
    prefix_tokens: int = 0
    port: int = 8000
    requests_per_s: float = 0.0

    @property
    def prompts(self) -> int:
        """Number of requests to send: ten per client, so that the first and last ones weigh little.

        At a rate at least a thousand, so that ten are beyond the 99th percentile.
        """
        return max(10 * self.clients, 1000 if self.requests_per_s else 20)

    @property
    def load(self) -> tuple[str, str]:
        """Return the option that sets the load, which the engines' benchmarks have in common."""
        if self.requests_per_s:
            return "--request-rate", f"{self.requests_per_s:.4g}"
        return "--max-concurrency", str(self.clients)

    @property
    def random_prompts(self) -> tuple[tuple[str, ...], ...]:
        """Return the arguments that vLLM's benchmark and TensorRT-LLM's, made from it, have in common."""
        prefix = [("--random-prefix-len", str(self.prefix_tokens))] if self.prefix_tokens else []
        return (
            ("--model", self.model),
            ("--base-url", f"http://127.0.0.1:{self.port}"),
            ("--dataset-name", "random"),
            ("--random-input-len", str(self.isl - self.prefix_tokens)),
            *prefix,
            ("--random-output-len", str(self.osl)),
            ("--ignore-eos",),
            self.load,
            ("--num-prompts", str(self.prompts)),
            ("--percentile-metrics", "ttft,tpot,itl,e2el"),
            ("--save-result",),
            ("--result-filename", RESULT),
        )


@dataclass(frozen=True)
class Command:
    """A command of an engine.

    Attributes
    ----------
    program : tuple of str
        Program and its fixed arguments.
    arguments : tuple of tuple of str
        Its arguments, each option with its value.
    config_option : str
        Option that takes the path of ``config``; empty if none.
    config : mapping
        Settings that the engine reads from a YAML file.
    config_name : str
        Name of that file.
    environment : mapping
        Environment variables to start it with.
    unsaid : tuple of str
        Assumptions of the deployment that this command cannot express.
    """

    program: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]
    config_option: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    config_name: str = "engine.yaml"
    environment: Mapping[str, str] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()

    def words(self, config_path: str = "") -> list[str]:
        """Return the program and its arguments as a process takes them, without the environment."""
        return [word for group in self._groups(config_path) for word in group]

    def shell(self, config_path: str = "", raw: Mapping[str, str] | None = None, width: int = _LINE) -> str:
        """Return the command for a shell, with every word quoted, over lines of about ``width``.

        Values in ``raw``, by option or environment variable, are not quoted: they are a script's variables.
        """
        raw = raw or {}
        before = [f"{name}={raw.get(name) or shlex.quote(one)}" for name, one in self.environment.items()]
        groups = [" ".join(before)] if before else []
        for group in self._groups(config_path):
            quoted = [shlex.quote(word) for word in group]
            if group[0] in raw:
                quoted[1:] = [raw[group[0]]]
            groups.append(" ".join(quoted))
        return _broken(groups, width)

    def _groups(self, config_path: str) -> list[tuple[str, ...]]:
        last = ((self.config_option, config_path or self.config_name),) if self.config else ()
        return [self.program, *self.arguments, *last]


def _broken(groups: Sequence[str], width: int) -> str:
    lines = [groups[0]]
    for group in groups[1:]:
        # two for the backslash
        if len(lines[-1]) + 1 + len(group) + 2 <= width:
            lines[-1] += f" {group}"
        else:
            lines.append(f"    {group}")
    return " \\\n".join(lines)


def url_router(
    program: tuple[str, ...], servers: Servers, port: int, *, roles_option: str, names_side_ports: bool
) -> Command:
    """Return the command of SGLang's router, of which vLLM's is a fork, in front of copies or of roles."""
    arguments: list[tuple[str, ...]]
    if "server" in servers:
        arguments = [("--worker-urls", *(one.url for one in servers["server"]))]
    else:
        sides = [(one.url, *[str(one.side_port)] * names_side_ports) for one in servers["prefill"]]
        arguments = [(roles_option,), *(("--prefill", *side) for side in sides)]
        arguments += [("--decode", one.url) for one in servers["decode"]]
    arguments += options(("--worker-startup-timeout-secs", START_S), ("--host", "0.0.0.0"), ("--port", port))
    return Command(program, tuple(arguments))
