"""What a deployment asks of an engine, and a command that gives it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MTP: Final = "mtp"
"""A draft by a layer of the model itself."""

_LINE: Final = 78


@dataclass(frozen=True)
class LaunchSettings:
    """One copy of a model as a deployment assumes that its engine runs it.

    Attributes
    ----------
    model : str
        Hugging Face id, or folder of the checkpoint.
    tp, pp, dp, ep : int
        How it is split, as :class:`fastroof.models.Layout` has it.
    has_experts : bool
        Whether it has routed experts.
    max_batched_tokens, max_seqs : int
        Maximum tokens per step and concurrent requests, per rank and stage.
    max_context : int
        Tokens of the longest sequence.
    running : int
        Concurrent requests on each rank and stage under the deployment's load.
    memory_fraction : float
        Of a GPU's memory, by the engine's own measure; 0 for its own formula.
    dtype, kv_dtype : str
        Of linear layers and experts, and of the KV cache.
    checkpoint_dtype, checkpoint_kv_dtype : str
        What the checkpoint has by itself.
    num_draft_tokens : int
        Tokens drafted for a request before each step.
    draft : str
        What drafts them: ``mtp``, ``none``, or a model.
    balance_steps : int
        Steps that a rank's prompts wait for those of other ranks; 0 if they do not.
    role : str
        ``prefill`` or ``decode`` where both run apart; empty where a copy does both.
    port : int
        Where it listens.
    """

    model: str
    tp: int
    pp: int
    dp: int
    ep: int
    has_experts: bool
    max_batched_tokens: int
    max_seqs: int
    max_context: int
    running: int
    memory_fraction: float
    dtype: str
    kv_dtype: str
    checkpoint_dtype: str
    checkpoint_kv_dtype: str
    num_draft_tokens: int = 0
    draft: str = ""
    balance_steps: int = 0
    role: str = ""
    port: int = 8000

    @property
    def is_own_dtype(self) -> bool:
        """Whether the weights run in the checkpoint's format."""
        return self.dtype == self.checkpoint_dtype

    @property
    def is_own_kv_dtype(self) -> bool:
        """Whether the KV cache has the format that the checkpoint says."""
        return self.kv_dtype == self.checkpoint_kv_dtype

    def missing_format(self, engine: str) -> str:
        """What to say where an engine cannot bring the checkpoint's weights to the format that is meant."""
        return (
            f"{self.dtype} weights: {self.model} has {self.checkpoint_dtype}, which {engine} does not bring "
            f"to {self.dtype} while it loads; serve a checkpoint that has it"
        )

    @property
    def shown_model(self) -> str:
        """The model as a command takes it: what begins with a dash would be an option."""
        return f"./{self.model}" if self.model.startswith("-") else self.model


@dataclass(frozen=True)
class BenchmarkLoad:
    """What a benchmark sends to one copy.

    Attributes
    ----------
    model : str
        As the server was given it.
    isl, osl : int
        Tokens of a prompt and of an output.
    clients : int
        Requests in flight.
    prefix_tokens : int
        Of each prompt, those that all prompts begin with.
    port : int
        Where the server listens.
    """

    model: str
    isl: int
    osl: int
    clients: int
    prefix_tokens: int = 0
    port: int = 8000

    @property
    def prompts(self) -> int:
        """Requests to send: ten a client, so that the first and last ones weigh little."""
        return max(10 * self.clients, 20)


@dataclass(frozen=True)
class Command:
    """A command of an engine.

    Attributes
    ----------
    program : tuple of str
        What is run.
    arguments : tuple of tuple of str
        Its arguments, an option with its value each.
    config_option : str
        Option that takes the path of ``config``; empty if there is none.
    config : mapping
        What the engine reads from a YAML file.
    unsaid : tuple of str
        What the deployment assumes and this command cannot say.
    """

    program: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]
    config_option: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()

    def words(self, config_path: str = "") -> list[str]:
        """Return program and arguments one by one, as a process takes them."""
        return [word for group in self._groups(config_path) for word in group]

    def shell(self, config_path: str = "", raw: Mapping[str, str] | None = None, width: int = _LINE) -> str:
        """Return the command as a shell takes it, every word quoted, over lines of about ``width``.

        Values in ``raw``, by their option, stand as they are: a script's own variables.
        """
        groups = []
        for group in self._groups(config_path):
            words = [shlex.quote(word) for word in group]
            if raw and group[0] in raw:
                words[1:] = [raw[group[0]]]
            groups.append(" ".join(words))
        return _broken(groups, width)

    def _groups(self, config_path: str) -> list[tuple[str, ...]]:
        last = ((self.config_option, config_path),) if self.config_option and config_path else ()
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
