"""LoRA adapters: how a plan names them, which layers have them, and their calls and weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.checks import is_whole_number, shown, unknown_word, whole_number
from fastroof.documents import read_json
from fastroof.engines.lora import LoraRules
from fastroof.errors import PlanError
from fastroof.operators.calls import (
    AdapterGemm,
    AttentionCall,
    Call,
    Elementwise,
    Experts,
    Gemm,
    MixerCall,
    Parallel,
    Role,
    RowOperator,
)
from fastroof.units import ACTIVATION_BYTES

MOST_RANK: Final = 512
MOST_LORAS: Final = 1024

_ATTENTION: Final = ("qkv", "q_down", "q_up", "kv_up", "state_in", "o", "state_out")
_MLP: Final = ("gate_up", "down", "shared_gate_up", "shared_down", "experts", "experts_down", "experts_up")
_GATES: Final = ("attention_gate", "state_gate", "router", "shared_gate")
_UP: Final = ("gate_up", "shared_gate_up", "experts")
_DOWN: Final = ("down", "shared_down", "experts")
_ENDS: Final = ("embedding", "lm_head")

MODULES: Final[dict[str, tuple[str, ...]]] = {
    "all": (*_ATTENTION, *_MLP, *_GATES, *_ENDS),
    "linear": (*_ATTENTION, *_MLP, *_GATES),
    "attention": _ATTENTION,
    "mlp": _MLP,
    "embed_tokens": ("embedding",),
    "lm_head": ("lm_head",),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), ("qkv",)),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), ("q_down",)),
    "q_b_proj": ("q_up",),
    "kv_b_proj": ("kv_up",),
    "o_proj": ("o",),
    **dict.fromkeys(("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"), ("state_in",)),
    "out_proj": ("state_out",),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), _UP),
    "down_proj": _DOWN,
    "experts": ("experts",),
    "gate": ("router",),
}
"""Roles of the layers by group, or by module name as in PEFT's ``target_modules``. One module of a layer that
an engine runs as one, such as ``q_proj``, gives adapters to the whole."""

_SPEC: Final = re.compile(r"([0-9]{1,9})(?::(?:([0-9]{1,9})/)?([0-9]{1,9}))?(?::([a-z0-9_+]+))?")
_CONFIG: Final = "adapter_config.json"
_VALID: Final = "a rank such as 16, RANK:ADAPTERS as in 16:4, RANK:ADAPTERS:MODULES as in 16:4:attention, or "
_STATE_SLICES: Final = {"gdn": 4, "mamba2": 5}
"""Outputs of projections to states that engines give an adapter each: vLLM's in_proj_qkvz has four, Mamba-2's
in_proj five; three of Kimi delta attention and short convolutions."""


_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "q_down": ("q_a_proj", "kv_a_proj_with_mqa"),
    "q_up": ("q_b_proj",),
    "kv_up": ("kv_b_proj",),
    "o": ("o_proj",),
    **dict.fromkeys(("gate_up", "shared_gate_up"), ("gate_proj", "up_proj")),
    **dict.fromkeys(("down", "shared_down"), ("down_proj",)),
    "experts": ("gate_proj", "up_proj", "down_proj"),
    "embedding": ("embed_tokens",),
    "lm_head": ("lm_head",),
}
"""Names by role that options of engines take; layers with a state have other names in each model."""


@dataclass(frozen=True)
class Lora:
    """LoRA adapters that a server holds, and how many of them a step uses.

    Parameters
    ----------
    rank : int
        Rank of the adapters, or the largest of them: 1 to 512.
    max_loras : int, optional
        Adapters that a GPU holds at once, each with memory for ``rank`` in every layer of ``targets``
        (default: the engine's own, 1 of vLLM and 8 of SGLang).
    targets : tuple of str
        Layers with adapters: ``all`` (as the engine does by default), ``linear`` (without embedding and LM
        head), ``attention``, ``mlp``, or names of PEFT's ``target_modules`` (``q_proj``, ``down_proj``).
    active : int, optional
        Different adapters in a step, if it has as many tokens (default: ``max_loras``).

    Raises
    ------
    PlanError
        If a value is invalid.

    Notes
    -----
    Weights are in 16 bits. Every request has an adapter; which request has which one plays no part. Memory
    and kernels are those of the engine's buffers: vLLM's have the next rank that it knows.

    Examples
    --------
    >>> Lora(16, max_loras=4, targets=("q_proj", "v_proj"))
    Lora(rank=16, max_loras=4, targets=('q_proj', 'v_proj'), active=None)
    >>> Lora.of("32:2/8:attention")
    Lora(rank=32, max_loras=8, targets=('attention',), active=2)
    """

    rank: int
    max_loras: int | None = None
    targets: tuple[str, ...] = ("all",)
    active: int | None = None

    def __post_init__(self) -> None:
        """Reject invalid values."""
        whole_number("lora rank", self.rank, most=MOST_RANK, error=PlanError)
        for name in ("max_loras", "active"):
            value = getattr(self, name)
            if value is not None:
                whole_number(f"lora {name}", value, most=MOST_LORAS, error=PlanError)
        if self.active is not None and self.max_loras is not None and self.active > self.max_loras:
            raise PlanError(f"lora active must be at most max_loras {self.max_loras}, got {self.active}")
        targets = self.targets
        if isinstance(targets, str) or not isinstance(targets, Sequence) or not targets:
            raise PlanError(f"lora targets must be a tuple of names, got {shown(targets)}")
        for name in targets:
            if not isinstance(name, str) or name not in MODULES:
                raise PlanError(unknown_word("lora target", str(name)[:60], tuple(MODULES)))
        object.__setattr__(self, "targets", tuple(dict.fromkeys(targets)))

    @classmethod
    def of(cls, value: Any, *, reads_files: bool = True) -> Lora:
        """Return adapters given as themselves, a rank, or the text of an option.

        Parameters
        ----------
        value : Lora, int or str
            ``RANK[:[ACTIVE/]ADAPTERS][:MODULES]``, modules joined by ``+``; instead of the rank, a folder
            with PEFT's ``adapter_config.json``, whose rank and modules count.
        reads_files : bool
            Whether a folder is valid.

        Raises
        ------
        PlanError
            If it is not one of these, or the file is not of a LoRA adapter.

        Examples
        --------
        >>> Lora.of("16:4:q_proj+v_proj").targets
        ('q_proj', 'v_proj')
        """
        if isinstance(value, cls):
            return value
        if is_whole_number(value):
            return cls(int(value))
        if not isinstance(value, str):
            raise PlanError(f"lora must be {_VALID}a folder with {_CONFIG}, got {shown(value)}")
        match = _SPEC.fullmatch(value)
        if match is not None:
            rank, active, most, names = match.groups()
            targets = ("all",) if names is None else tuple(names.split("+"))
            return cls(int(rank), int(most) if most else None, targets, int(active) if active else None)
        if not reads_files:
            raise PlanError(f"lora must be {_VALID}empty, got {shown(value)}")
        folder, _, most = value.partition(":")
        path = Path(folder)
        if not _exists(path, folder) or (most and not re.fullmatch("[0-9]{1,9}", most)):
            raise PlanError(f"lora must be {_VALID}a folder with {_CONFIG}, got {shown(value)}")
        return cls.read(path if path.is_file() else path / _CONFIG, int(most) if most else None)

    @classmethod
    def read(cls, path: Path, max_loras: int | None = None) -> Lora:
        """Return the adapters that a PEFT configuration describes.

        Parameters
        ----------
        path : Path
            An ``adapter_config.json``.
        max_loras : int, optional
            As in the class.
        """
        config = read_json(path, PlanError)
        if not isinstance(config, dict) or str(config.get("peft_type", "LORA")).upper() != "LORA":
            raise PlanError(f"{path} must be the configuration of a LoRA adapter, with peft_type LORA")
        modules, pattern = config.get("target_modules"), config.get("rank_pattern") or {}
        names = ["linear"] if modules == "all-linear" else modules
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise PlanError(
                f"{path}: target_modules must be a list of modules or all-linear, got {shown(names)}"
            )
        if not isinstance(pattern, dict):
            raise PlanError(f"{path}: rank_pattern must be an object, got {shown(pattern)}")
        ranks = [config.get("r"), *pattern.values()]
        for rank in ranks:
            if not is_whole_number(rank, 1, MOST_RANK):
                raise PlanError(f"{path}: r must be a whole number from 1 to {MOST_RANK}, got {shown(rank)}")
        try:
            return cls(max(ranks), max_loras, tuple(name.rpartition(".")[2] for name in names))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    def in_engine(self, rules: LoraRules, engine: str) -> Lora:
        """Return the adapters with the buffers that an engine has for them."""
        rank = next((one for one in rules.ranks if one >= self.rank), 0) if rules.ranks else self.rank
        if not rank:
            raise PlanError(f"{engine} has adapters up to rank {rules.ranks[-1]}, got {self.rank}")
        most = self.max_loras or max(rules.max_loras, self.active or 1)
        return replace(self, rank=rank, max_loras=most, active=self.active or most)

    def launch_settings(self, roles: Iterable[str]) -> dict[str, Any]:
        """Return the adapters as settings of an engine's command, for a model with layers of these roles."""
        names: list[str] = ["all"] if "all" in self.targets else []
        if not names:
            targeted = {role for name in self.targets for role in MODULES[name]}
            adapted = [role for role in targeted & {*roles, *_ENDS} if role not in _GATES]
            known = all(role in _NAMES for role in adapted)
            names = [name for role in _NAMES if known and role in adapted for name in _NAMES[role]]
        modules = tuple(dict.fromkeys(names))
        return {"lora_rank": self.rank, "max_loras": self.max_loras or 1, "lora_modules": modules}

    @property
    def words(self) -> str:
        """The same as an option, and what cached plans call it."""
        active = f"{self.active}/" if self.active not in (None, self.max_loras) else ""
        most = "" if self.max_loras is None else f":{active}{self.max_loras}"
        targets = "" if self.targets == ("all",) else f":{'+'.join(self.targets)}"
        return f"{self.rank}{most}{targets}"


def lora_settings(
    lora: Lora | str | int | None, rules: LoraRules, engine: str, roles: Iterable[str]
) -> dict[str, Any]:
    """Return adapters as settings of an engine's command, for a model with layers of these roles."""
    return {} if lora is None else Lora.of(lora).in_engine(rules, engine).launch_settings(roles)


class Adapters(NamedTuple):
    """How an engine runs the adapters of a model."""

    rank: int
    held: int
    active: int
    roles: frozenset[str]
    fills: bool = False
    splits_head: bool = True
    words: str = ""

    @classmethod
    def of(cls, lora: Lora, rules: LoraRules, architecture: str) -> Adapters:
        """Return the adapters of :meth:`Lora.in_engine` in a model."""
        roles = {role for name in lora.targets for role in MODULES[name]}
        if "all" in lora.targets and not rules.adapts_embeddings(architecture):
            roles -= set(_ENDS) - {role for name in lora.targets if name != "all" for role in MODULES[name]}
        if not rules.gates and "gate" not in lora.targets:
            roles -= set(_GATES)
        most = lora.max_loras or 1
        adapter_key = (lora.rank, most, lora.active or most, frozenset(roles))
        return cls(*adapter_key, rules.fills, rules.splits_head, lora.words)

    def beside(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Return a layer's calls, each linear layer that has adapters followed by theirs."""
        widths = {call.role: call.k for call in _flat(calls) if isinstance(call, Gemm)}
        mixers = {
            call.decode.operator for call in calls if isinstance(call, MixerCall) and call.decode is not None
        }
        return tuple(one for call in calls for one in self._with(call, widths, mixers))

    def of_block(self, parts: Sequence[Call], roles: set[str]) -> tuple[Call, ...]:
        """Return the adapters of layers that are part of one measured block, by its separate calls."""
        after = self.beside([call for call in parts if isinstance(call, Gemm) and call.role in roles])
        return tuple(call for call in after if not isinstance(call, Gemm))

    def _with(self, call: Call, widths: dict[Role, int], mixers: set[str]) -> list[Call]:
        if isinstance(call, Parallel):
            paths = (
                tuple(one for part in path for one in self._with(part, widths, mixers)) for path in call.paths
            )
            return [replace(call, paths=tuple(paths))]  # type: ignore[arg-type]
        if isinstance(call, AttentionCall | MixerCall) or call.role not in self.roles:
            return [call]
        if isinstance(call, Gemm):
            slices = _slices(call, widths, mixers)
            return [call, *self.pair(f"{call.name} lora", call.n, call.k, slices, call)]
        if isinstance(call, Experts):
            return [call, *self._of_experts(call)]
        return [call]

    def pair(
        self, name: str, n: int, k: int, slices: int, like: RowOperator, role: Role = "lora", **more: Any
    ) -> list[Call]:
        """Return both GEMMs of a layer of n outputs and k inputs, and what zeroes the buffer between them."""
        fields = {"rows": like.rows, "steps": like.steps, **more}
        width = slices * self.rank
        shrink = AdapterGemm(role, f"{name} shrink", 1, "shrink", k, width, slices, self.active, **fields)
        expand = AdapterGemm(role, f"{name} expand", 1, "expand", self.rank, n, slices, self.active, **fields)
        if not self.fills:
            return [shrink, expand]
        rows, steps, picks = fields["rows"], fields["steps"], fields.get("picks", 1.0)
        fill = Elementwise(role, f"{name} buffer", 1, 4.0 * width * picks, rows=rows, steps=steps)
        return [fill, shrink, expand]

    def _of_experts(self, call: Experts) -> list[Call]:
        """Return the GEMMs next to both of a fused kernel of experts, and what sorts tokens by adapter."""
        width = call.intermediate // call.moe_tp
        ups = 2 if call.is_gated else 1
        sizes: dict[str, Any] = {"experts": call.num_experts // call.moe_ep, "picks": call.topk / call.moe_ep}
        sort_bytes = 8.0 * sizes["picks"]
        return [
            Elementwise("lora", "experts lora sort", 1, sort_bytes, rows=call.rows, steps=call.steps),
            *self.pair("experts up lora", ups * width, call.hidden, ups, call, **sizes),
            *self.pair("experts down lora", call.hidden, width, 1, call, **sizes),
        ]

    def of_embedding(self, vocab: int, hidden: int) -> tuple[Call, ...]:
        """Return the calls next to the embedding, whose matrices are whole on every GPU."""
        if "embedding" not in self.roles:
            return ()
        lookup = AdapterGemm(
            "embedding", "embedding lora lookup", 1, "lookup", vocab, self.rank, 1, self.active
        )
        expand = AdapterGemm(
            "embedding", "embedding lora expand", 1, "expand", self.rank, hidden, 1, self.active
        )
        return lookup, expand

    def of_head(self, vocab: int, head: Gemm) -> tuple[Call, ...]:
        """Return the calls next to the LM head, with all its rows or the GPU's own."""
        if "lm_head" not in self.roles:
            return ()
        n = head.n if self.splits_head else vocab
        return tuple(self.pair("lm_head lora", n, head.k, 1, head, "lm_head"))


def _exists(path: Path, text: str) -> bool:
    """Return whether a text names a file or a folder, whatever is in it."""
    try:
        return bool(text) and path.exists()
    except (OSError, ValueError):
        return False


def adapter_bytes(calls: Sequence[Call], held: int) -> int:
    """Return the bytes that an engine holds for the adapters of some calls on one GPU."""
    found = (call for call in _flat(calls) if isinstance(call, AdapterGemm))
    # a call that has a variant for decodes has one for prompts
    return sum(call.weights for call in found if call.steps != "decode_only") * held * ACTIVATION_BYTES


def _flat(calls: Sequence[Call]) -> Iterator[Call]:
    for call in calls:
        if isinstance(call, Parallel):
            for path in call.paths:
                yield from path
        else:
            yield call


def _slices(call: Gemm, widths: dict[Role, int], mixers: set[str]) -> int:
    """Return how many adapters' outputs a layer that engines run as one has."""
    if call.role == "qkv":
        return 3
    if call.role in ("gate_up", "shared_gate_up"):
        down = widths.get("shared_down" if call.role.startswith("shared") else "down", call.n)
        return max(call.n // down, 1)
    if call.role == "q_down":
        # queries have a latent vector too, or are projected at once
        return 2 if widths.get("q_up", call.k) != call.k else 1
    if call.role == "state_in":
        return next((_STATE_SLICES[name] for name in sorted(mixers) if name in _STATE_SLICES), 3)
    return 1
