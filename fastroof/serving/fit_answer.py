"""What an engine's start answers: memory, limits, refusals, and what makes it start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastroof._version import __version__
from fastroof.engines.launch.commands import EngineCommands
from fastroof.engines.launch.settings import Command
from fastroof.memory.plan_memory import PlanMemory
from fastroof.memory.room_errors import RoomErrors
from fastroof.plan.start import Refusal
from fastroof.serving.largest_sizes import LargestSize
from fastroof.units import GIB


class Change(NamedTuple):
    """Settings with which an engine starts: one, or two limits together.

    Attributes
    ----------
    settings : mapping of str to int, float or str
        Keywords of :func:`fit` and their values.
    max_model_len : int
        Longest ``max_model_len`` that then starts.
    concurrency : float
        Requests of the asked ``max_model_len`` that then fit at once.
    """

    settings: Mapping[str, Any]
    max_model_len: int
    concurrency: float

    def options(self) -> str:
        """Return the settings as options of ``fastroof fit``."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Fit:
    """Whether an engine starts a model on GPUs, and what it does with the memory of each.

    Attributes
    ----------
    model, gpu, engine : str
        Names; the engine's is that of its profile.
    engine_title : str
        The same with its versions, and the newest of logged starts if this is of a newer version.
    versions : str
        Versions of the engine that the profile's memory rules are of.
    tp, pp, dp, ep : int
        The layout.
    dtype, kv_dtype : str
        Formats of weights and KV cache.
    starts : bool
        Whether the engine starts by the rules.
    confidence : str
        ``yes`` or ``no`` where the margin exceeds the errors of the rules, else ``likely`` or ``unlikely``.
    margin_gib, deciding_check : float, str
        By how much the check that decides is passed, GiB, negative if it fails; and its code.
    refusals : tuple of Refusal
        Why it does not, or what may still fail.
    changes : tuple of Change
        Changes with which it starts, each enough by itself; empty if it does.
    memory : PlanMemory
        Bytes of one GPU by use, and blocks of KV cache.
    max_model_len, max_num_seqs, max_num_batched_tokens : int
        The engine's limits that were asked, or its own.
    cache_line_tokens : int
        What this version prints as the tokens of its KV cache.
    concurrency : float
        Requests of ``max_model_len`` that fit at once, as the engine prints it.
    largest_max_model_len : int
        Longest ``max_model_len`` with which it starts at that ``max_num_seqs``; 0 if none.
    largest_max_num_seqs : int
        Largest ``max_num_seqs`` with which it starts at that ``max_model_len``; 0 if none.
    length_of_all : int
        Longest length of which ``max_num_seqs`` requests run at once; 0 if they never do.
    running : int
        Requests of ``max_model_len`` that run at once.
    graphs_variable : str
        Environment variable, with its value, that leaves out the estimate of CUDA graphs; empty without one.
    source : str
        Where the memory rules were read.
    commands : EngineCommands or None
        The engine's commands, None if it is not a server.
    command : Command or None
        The command that starts one copy.
    room_errors : RoomErrors or None
        How far the room of KV cache was off in logged starts of the engine's version; None if not judged.
    fewer_tokens : tuple of int or None
        Fewer tokens of a step, and the tokens of KV cache that are then printed, if these depend on them.
    other_rooms : mapping of str to int
        Bytes of KV cache of an engine with other packages installed, where they differ.
    layout : str
        How a token of sparse attention is stored, if not in the format's own bytes.
    tpot_ms : float or None
        The asked time per output token, ms.
    largest : tuple of LargestSize
        The largest decode steps within it; empty if none was asked for, or if the engine does not start.
    """

    model: str
    gpu: str
    engine: str
    versions: str
    engine_title: str
    tp: int
    pp: int
    dp: int
    ep: int
    dtype: str
    kv_dtype: str
    starts: bool
    refusals: tuple[Refusal, ...]
    changes: tuple[Change, ...]
    memory: PlanMemory = field(repr=False)
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_line_tokens: int
    concurrency: float
    largest_max_model_len: int
    largest_max_num_seqs: int
    length_of_all: int
    running: int
    graphs_variable: str
    source: str
    commands: EngineCommands | None = field(repr=False)
    command: Command | None = field(repr=False)
    confidence: str
    margin_gib: float
    deciding_check: str
    room_errors: RoomErrors | None = None
    fewer_tokens: tuple[int, int] | None = None
    layout: str = ""
    other_rooms: Mapping[str, int] = field(default_factory=dict)
    tpot_ms: float | None = None
    largest: tuple[LargestSize, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON values; sizes in bytes."""
        memory = self.memory
        plain = (
            "model", "gpu", "engine", "versions", "engine_title", "tp", "pp", "dp", "ep", "dtype", "kv_dtype",
            "starts", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
        )  # fmt: skip
        answers = (
            "cache_line_tokens", "concurrency", "largest_max_model_len", "largest_max_num_seqs",
            "length_of_all", "running", "graphs_variable", "source",
        )  # fmt: skip
        unread = ("max_kv_tokens", "window", "window_kv_bytes_per_token", "groups")
        graphs = [memory.graphs_low_bytes / GIB, memory.graphs_high_bytes / GIB]
        within: dict[str, Any] = {}
        if self.tpot_ms is not None:
            within = {"tpot_ms": self.tpot_ms, "largest": [one._asdict() for one in self.largest]}
        command = None
        if self.command is not None:
            command = {"text": self.command.shell(), "release": getattr(self.commands, "release", "")}
            command |= {"config": dict(self.command.config), "unsaid": list(self.command.unsaid)}
        return {
            "version": __version__,
            **{name: getattr(self, name) for name in plain},
            "refusals": [vars(one) | {"is_warning": one.is_warning} for one in self.refusals],
            "changes": [change._asdict() for change in self.changes],
            "memory": {
                "fraction": memory.fraction,
                **{name: value for name, value in memory.facts().items() if name not in unread},
            },
            **{name: getattr(self, name) for name in answers},
            "confidence": self.confidence,
            "margin_gib": self.margin_gib,
            "error_gib": None if self.room_errors is None else self.room_errors.most_gib,
            "graph_range_gib": graphs,
            "deciding_check": self.deciding_check,
            "other_rooms": dict(self.other_rooms),
            "room_errors": None if self.room_errors is None else self.room_errors._asdict(),
            "command": command,
            **within,
        }

    @property
    def confidence_words(self) -> str:
        """Why the answer is not sure, to follow it; empty if it is."""
        if self.confidence in ("yes", "no"):
            return ""
        words = f"{self.confidence}: a margin of {self.margin_gib:.1f} GiB"
        if self.room_errors is not None:
            words += f", and 90 % of this engine's rooms are off by at most {self.room_errors.most_gib:.1f}"
        graphs_gib = (self.memory.graphs_high_bytes - self.memory.graphs_bytes) / GIB
        if graphs_gib > 1:
            least = max(self.memory.kv_cache_bytes / GIB - graphs_gib, 0)
            words += (
                f"; the engine may take up to {graphs_gib:.1f} more off for graphs, which leaves {least:.1f}"
            )
            words += " and it may not start" * (not least)
        return f" ({words})"

    def memory_rows(self) -> list[tuple[str, str, str]]:
        """Return the memory of a GPU as rows of use, GiB and note."""
        memory = self.memory
        # TensorRT-LLM's is of what the rest leaves
        share = memory.requested_bytes if memory.requested_bytes != memory.kv_cache_bytes else 0
        run = (
            f"forward {memory.forward_bytes / GIB:.2f}, sampler {memory.sampler_bytes / GIB:.2f}: the larger"
        )
        extra = memory.activation_bytes - max(memory.forward_bytes, memory.sampler_bytes)
        run += f", and {extra / GIB:.2f} more" * (extra > 0)
        low, high = memory.graphs_low_bytes, memory.graphs_high_bytes
        graphs = f"estimates logged: {low / GIB:.2f} to {high / GIB:.2f}" if high else ""
        room = ""
        if high:
            least, most = (max(memory.kv_cache_bytes + memory.graphs_bytes - size, 0) for size in (high, low))
            room = f"{least / GIB:.2f} to {most / GIB:.2f} by the estimate of graphs"
        rows = [
            ("total", memory.total_bytes, "as CUDA reports it"),
            ("engine's share", share, f"{memory.fraction:.3g} of it"),
            ("weights", memory.weight_bytes, ""),
            ("LoRA adapters", memory.adapter_bytes, "of all that it holds, at their largest rank"),
            ("workspace of sparse attention", memory.workspace_bytes, f"of {self.max_model_len:,} tokens"),
            ("profiling run", memory.activation_bytes, run if memory.sampler_bytes else ""),
            ("outside torch", memory.context_bytes, "CUDA context, collectives"),
            ("CUDA graphs", memory.graphs_bytes, graphs),
            ("pool of states", memory.state_pool_bytes, f"{memory.state_slots:,} states"),
            ("KV cache", memory.kv_cache_bytes, room),
        ]
        always = ("weights", "KV cache")
        return [(name, f"{size / GIB:.2f}", note) for name, size, note in rows if size or name in always]

    def facts(self) -> list[tuple[str, str]]:
        """Return the room and the limits as names and sentences."""
        memory = self.memory
        if not memory.parts:
            return [("KV cache", "none")]
        cache = f"{self.cache_line_tokens:,} tokens"
        if memory.blocks is not None and memory.block_tokens > 1:
            blocks = f"{memory.blocks:,} blocks of {memory.block_tokens:,} tokens"
            if memory.windows:
                fixed = memory.reserved_parts(self.max_model_len) - -(
                    -self.max_model_len // memory.block_tokens
                )
                blocks += (
                    f" ({memory.groups} groups; {fixed:,} blocks of a request do not depend on its length)"
                )
            cache = f"{blocks}; the engine prints {cache}"
        if not memory.token_parts:
            cache = "no layer caches tokens"
        together = f"all run at once if none is longer than {self.length_of_all:,} tokens"
        if not self.length_of_all:
            together = f"at most {memory.max_sequences(1):,} run at once"
        length, seqs = f"max-model-len {self.max_model_len:,}", f"max-num-seqs {self.max_num_seqs:,}"
        longest, most = (
            f"up to {largest:,} starts" if largest else "none starts"
            for largest in (self.largest_max_model_len, self.largest_max_num_seqs)
        )
        judged = "not judged" if self.room_errors is None else self.room_errors.words
        facts = [
            ("KV cache", cache),
            ("its error", judged),
            (f"at {length}", f"{self.concurrency:,.2f} requests fit; {longest} with {seqs}"),
            (f"at {seqs}", f"{together}; {most} with {length}"),
        ]
        if self.fewer_tokens is not None:
            tokens, cached = self.fewer_tokens
            fewer = f"max-num-batched-tokens {tokens:,}"
            facts.append(
                (f"at {fewer}", f"the engine prints {cached:,} tokens: steps in flight reserve less")
            )
        facts += [(words, f"{size / GIB:.2f} GiB of KV cache") for words, size in self.other_rooms.items()]
        if self.layout:
            facts.append(("layout", self.layout))
        if self.graphs_variable:
            facts.append(("CUDA graphs", f"{self.graphs_variable} leaves out the engine's estimate"))
        if memory.max_running:
            facts.append(("running requests", f"at most {memory.max_running:,}, by the engine's own limit"))
        return facts
