"""Which measured kernels an engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from fastroof.checks import is_number, one_of, whole_number
from fastroof.engines.prefill_graphs import PrefillGraphs
from fastroof.engines.values import (
    MOST,
    check_fields,
    holds_for,
    includes_newest,
    is_version,
    of_version,
)
from fastroof.errors import PlanError


@dataclass(frozen=True)
class MixedAttention:
    """Minimum attention time of decodes in a step that also prefills.

    Its decodes take ``max(decode attention, ns x query heads of a GPU x KV tokens of all decodes x layers)``:
    one call serves chunks and decodes; it reads the cache separately for each query head and does not split
    it. Decode-only and prefill-only steps are unaffected.

    Attributes
    ----------
    ns : float
        Time per query head of one GPU, KV token and layer, ns.
    interval_ns : tuple of float
        Lowest and highest value that the evidence allows, ns; empty if unknown.
    gpu : str
        GPU; empty for any.
    head_dim : int
        Head width; 0 for any.
    kv_dtype : str
        Format of the KV cache; empty for any.
    reason, evidence : str
        Why the engine's kernel behaves this way, and the runs that determined and tested the value.
    """

    ns: float
    interval_ns: tuple[float, ...] = ()
    gpu: str = ""
    head_dim: int = 0
    kv_dtype: str = ""
    reason: str = ""
    evidence: str = ""

    def __post_init__(self) -> None:
        if not is_number(self.ns) or not self.ns > 0:
            raise PlanError(f"ns of mixed_attention must be a number above 0, got {self.ns!r}")
        check_fields(self, " of mixed_attention")
        object.__setattr__(self, "interval_ns", _interval(self.interval_ns, self.ns))
        if not isinstance(self.head_dim, int) or isinstance(self.head_dim, bool) or self.head_dim < 0:
            raise PlanError(
                f"head_dim of mixed_attention must be a whole number of at least 0, got {self.head_dim!r}"
            )

    def is_for(self, gpu: str, head_dim: int, kv_dtype: str) -> bool:
        """Return whether this applies to such heads on a GPU."""
        return self.gpu in ("", gpu) and self.head_dim in (0, head_dim) and self.kv_dtype in ("", kv_dtype)


def _interval(given: Any, ns: float) -> tuple[float, ...]:
    """Return two numbers with the value between them, or an empty tuple."""
    ends = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not ends:
        return ()
    if len(ends) != 2 or not all(is_number(end) for end in ends) or not 0 <= ends[0] <= ns <= ends[1]:
        raise PlanError(
            f"interval_ns of mixed_attention must be two numbers with ns = {ns:g} between them, got {given!r}"
        )
    return float(ends[0]), float(ends[1])


GEMM_SMOOTHINGS: Final = ("none", "median3")
SHARED_EXPERTS: Final = ("apart", "beside")
_CHOICES: Final = {
    "gemm_smoothing": GEMM_SMOOTHINGS,
    "fp8_scales": ("dynamic", "static"),
    "shared_experts": SHARED_EXPERTS,
    "latent_attention": ("whole", "parts"),
    "marlin": ("none", "except_mxfp4", "all"),
}
"""Fields of :class:`KernelChoices` with a few valid values."""
LAYOUT_KEYS: Final = ("tp", "pp", "dp", "moe_tp", "ep")


@dataclass(frozen=True)
class OperatorKernel:
    """The measured kernel that an engine runs for an operator, and where it does.

    Attributes
    ----------
    operator : str
        Name of the operator in tables, such as ``gemm``.
    versions : str
        Range of engine versions within the profile's; empty for all of them. A range that ends
        applies only to a profile loaded for a version in it, as ``vllm-0.17.0``.
    gpu, format : str
        GPU, and dtype of linear layers; empty for any.
    architecture : str
        Hugging Face class of the models, such as ``MiniMaxM2ForCausalLM``; empty for any.
    layout : tuple of (str, int)
        Sizes of the layout, such as ``("tp", 8)``; unnamed sizes may be any. In TOML
        a table, ``{tp = 8}``.
    source : str
        Source of the tables that measured it; empty for the tables' own choice.
    required : bool
        Whether tables that serve another source's rows are rejected; otherwise it replaces them.
    shared_experts : str
        For the operator ``moe``: how shared experts run with these kernels, if not as
        :class:`KernelChoices` sets; empty otherwise.
    engine : str
        The engine whose measured kernels replace it, under any source name.
    faster : str
        An engine whose measured kernels it also has, and runs at the sizes where they are faster than those
        of its own tables.
    reason : str
        Why another engine's kernels replace it.
    version, dtype, kernel : str
        Version of the library, compute dtype and name of the kernel, by which a reader can check a source.
    """

    operator: str
    gpu: str = ""
    format: str = ""
    layout: tuple[tuple[str, int], ...] = ()
    source: str = ""
    engine: str = ""
    reason: str = ""
    version: str = ""
    dtype: str = ""
    kernel: str = ""
    versions: str = ""
    architecture: str = ""
    required: bool = True
    shared_experts: str = ""
    faster: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.operator:
            raise PlanError("a kernel needs the name of its operator")
        if self.shared_experts:
            one_of("shared_experts", self.shared_experts, SHARED_EXPERTS, PlanError)
        try:
            sizes = tuple(dict(self.layout).items())
        except (TypeError, ValueError):
            raise PlanError(f"layout must be a table such as {{tp = 8}}, got {self.layout!r}") from None
        for name, size in sizes:
            one_of("a key of layout", name, LAYOUT_KEYS, PlanError)
            whole_number(f"layout {name}", size, most=MOST, error=PlanError)
        object.__setattr__(self, "layout", sizes)

    def is_for(
        self, operator: str, gpu: str, dtype: str, layout: Mapping[str, int], architecture: str = ""
    ) -> bool:
        """Return whether it runs for an operator on a GPU, in a format and layout, in models of a class."""
        return (
            self.operator == operator
            and includes_newest(self.versions)
            and self.gpu in ("", gpu)
            and self.format in ("", dtype)
            and self.architecture in ("", architecture)
            and all(layout.get(name, 1) == size for name, size in self.layout)
        )


@dataclass(frozen=True)
class ExpertRows:
    """What a measured kernel of routed experts ran, if neither its name nor its row says it.

    Attributes
    ----------
    kernel : str
        Name of the kernel in the measured files; ``*`` stands for any characters.
    versions : str
        Range of engine versions; empty for all of them.
    hidden : int
        Width of the model; 0 for any.
    has_gate : bool
        Whether experts of models without a gate were measured with one.
    most_tokens : int
        Maximum number of tokens for which the engine runs this kernel, and no other of the same sizes;
        0 if the number does not decide.
    remote_slots_to_ep : int
        Maximum ep of rows to use, if a GPU was measured with its tokens' slots on other GPUs too: their
        tokens then count as many as give each GPU so many slots. 0 if it was not.
    """

    kernel: str
    versions: str = ""
    hidden: int = 0
    has_gate: bool = True
    most_tokens: int = 0
    remote_slots_to_ep: int = 0

    def __post_init__(self) -> None:
        check_fields(self, " of expert_rows")
        for name in ("hidden", "most_tokens", "remote_slots_to_ep"):
            whole_number(f"{name} of expert_rows", getattr(self, name), least=0, most=MOST, error=PlanError)

    def is_for(self, kernel: str, version: str) -> bool:
        """Return whether a kernel of a version has these rows."""
        if self.versions and not (is_version(version) and holds_for(self.versions, version)):
            return False
        return fnmatchcase(kernel, self.kernel)


@dataclass(frozen=True)
class FusedNorms:
    """Norms of queries and keys over all heads that one kernel runs together with their all-reduce.

    Attributes
    ----------
    architecture : str
        Hugging Face class of the models.
    tokens : int
        Maximum number of tokens of a step; beyond it each of two kernels takes queries and keys at once.
    versions : str
        Range of engine versions; empty for all of them.
    reason : str
        Where this was read.
    """

    architecture: str
    tokens: int
    versions: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self, " of fused_norms")
        whole_number("tokens of fused_norms", self.tokens, most=MOST, error=PlanError)


@dataclass(frozen=True)
class SinkAttention:
    """Attention of prompts with sinks, in layers without a window, by a kernel that no table has.

    Attributes
    ----------
    share : float
        Its efficiency relative to the measured kernel without sinks.
    error : float
        Standard error of ln of its time.
    gpus : tuple of str
        GPUs; empty for any.
    reason : str
        Which kernel it is, and where the share is from.
    """

    share: float
    error: float
    gpus: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self, " of sink_attention")
        if not self.share:
            raise PlanError("share of sink_attention must be above 0, got 0")


@dataclass(frozen=True)
class KernelChoices:
    """The kernels that an engine runs.

    Attributes
    ----------
    gemm_smoothing : str
        How small bf16 GEMMs are smoothed along m before they are summed: none or median3.
    fp8_scales : str
        Whether fp8 GEMMs compute the scale of their input (dynamic) or know it (static).
    shared_experts : str
        Whether shared experts have a separate time (apart), or run in parallel with the routed ones in
        decode steps, which then take the longer of both (beside).
    shared_experts_tokens : int
        Maximum number of tokens of a step, with or without prefill, in which shared experts run in parallel;
        0 if all decode steps run them so, and no others.
    fused_norms : tuple of FusedNorms
        Models whose norms of queries and keys run inside the all-reduce between them.
    sink_attention : tuple of SinkAttention
        Kernels of attention with sinks, by GPU; the first that applies counts.
    latent_attention : str
        How blocks of latent attention are timed: as measured, including projections, where the tables
        have valid rows (whole), or as separate projections, absorbed products and attention (parts).
    marlin : str
        Which weight-only formats run with Marlin's kernels: none, all, or all except_mxfp4.
    fp8_weight_only : bool
        Whether fp8 weights run on GPUs without fp8 units, computed in bf16.
    engines : tuple of str
        Engines whose measured kernels replace its own on GPUs without them, in order of preference; its own
        always come first.
    operators : tuple of OperatorKernel
        Operators with a known kernel; the first that applies counts. A plan reads them from the named
        source or engine, and rejects tables that serve a named source's rows from another.
    mixed_attention : tuple of MixedAttention
        Minimum attention time of decodes in steps that also prefill, by GPU; the first that applies
        counts; if none applies, decodes take as long as in a decode step.
    cold_decode : tuple of str
        GPUs on which decode attention reads its KV cache from memory in every step, though tables have calls
        that found it in the L2; on others, decodes take as long as those calls.
    one_attention_call : tuple of str
        GPUs on which one attention call serves the chunks and decodes of a step: it launches once. On
        others they are two calls.
    prefill_graphs : tuple of PrefillGraphs
        Number of tokens that prefill steps are padded to, by version; the first that applies counts.
    expert_rows : tuple of ExpertRows
        What measured kernels of routed experts ran; the first that applies counts. Read when files of
        measured rows are converted.
    """

    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"
    shared_experts: str = "apart"
    shared_experts_tokens: int = 0
    latent_attention: str = "parts"
    marlin: str = "none"
    fp8_weight_only: bool = True
    engines: tuple[str, ...] = ()
    operators: tuple[OperatorKernel, ...] = ()
    mixed_attention: tuple[MixedAttention, ...] = ()
    cold_decode: tuple[str, ...] = ()
    one_attention_call: tuple[str, ...] = ()
    prefill_graphs: tuple[PrefillGraphs, ...] = ()
    expert_rows: tuple[ExpertRows, ...] = ()
    fused_norms: tuple[FusedNorms, ...] = ()
    sink_attention: tuple[SinkAttention, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, but=_CHOICES)
        whole_number("shared_experts_tokens", self.shared_experts_tokens, 0, MOST, PlanError)
        for name, choices in _CHOICES.items():
            one_of(name, getattr(self, name), choices, PlanError)

    def mixed_attention_ns(self, gpu: str, head_dim: int, kv_dtype: str) -> float:
        """Return the minimum decode attention with prefill, ns per query head, KV token and layer; or 0."""
        known = (one.ns for one in self.mixed_attention if one.is_for(gpu, head_dim, kv_dtype))
        return next(known, 0.0)

    def of(
        self, operator: str, gpu: str, dtype: str, layout: Mapping[str, int], architecture: str = ""
    ) -> OperatorKernel | None:
        """Return the kernel of an operator on a GPU, in a format and layout; None if unknown."""
        known = [k for k in self.operators if k.is_for(operator, gpu, dtype, layout, architecture)]
        return next((k for k in known if k.versions), known[0] if known else None)

    def at(self, version: str) -> KernelChoices:
        """Return the choices of a version, those with a matching range first; of all if it is empty."""
        ranged_first = sorted(self.operators, key=lambda kernel: not kernel.versions)
        ranged = (ranged_first, self.prefill_graphs, self.fused_norms)
        operators, graphs, norms = (of_version(parts, version) for parts in ranged)
        if (operators, graphs, norms) == (self.operators, self.prefill_graphs, self.fused_norms):
            return self
        return replace(self, operators=operators, prefill_graphs=graphs, fused_norms=norms)

    def fused_norm_tokens(self, architecture: str) -> int:
        """Return the maximum tokens of steps without norms of queries and keys apart; 0 if there are none."""
        known = (one.tokens for one in self.fused_norms if one.architecture == architecture)
        return next(known, 0)


ANY_KERNELS: Final = KernelChoices()
"""No engine: every kernel as measured."""
