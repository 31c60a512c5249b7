"""Which measured kernels an engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from fastroof.checks import is_number
from fastroof.engines.prefill_graphs import PrefillGraphs
from fastroof.engines.values import check_number, check_one_of, check_range, check_size, check_text, holds_for
from fastroof.errors import PlanError


@dataclass(frozen=True)
class MixedAttention:
    """How long decodes attend at least in a step that also prefills.

    Its decodes take ``max(decode attention, ns x query heads of a GPU x KV tokens of all decodes x layers)``:
    one call serves chunks and decodes, which reads the cache for each query head by itself and does not split
    it. Decode-only and prefill-only steps are not touched.

    Attributes
    ----------
    ns : float
        A query head of one GPU, KV token and layer, ns.
    interval_ns : tuple of float
        Lowest and highest that the evidence allows, ns; empty where unknown.
    gpu : str
        Of which GPU; empty for any.
    head_dim : int
        Of which size of heads; 0 for any.
    kv_dtype : str
        Of which format of the KV cache; empty for any.
    reason, evidence : str
        Why the engine's kernel does so, and which runs chose and judged the figure.
    """

    ns: float
    interval_ns: tuple[float, ...] = ()
    gpu: str = ""
    head_dim: int = 0
    kv_dtype: str = ""
    reason: str = ""
    evidence: str = ""

    def __post_init__(self) -> None:
        """Refuse invalid times and empty names."""
        if not is_number(self.ns) or not self.ns > 0:
            raise PlanError(f"ns of mixed_attention must be a number above 0, got {self.ns!r}")
        object.__setattr__(self, "ns", check_number("ns of mixed_attention", self.ns))
        object.__setattr__(self, "interval_ns", _interval(self.interval_ns, self.ns))
        for name in ("gpu", "kv_dtype", "reason", "evidence"):
            if not isinstance(getattr(self, name), str):
                raise PlanError(f"{name} of mixed_attention must be a text, got {getattr(self, name)!r}")
        if not isinstance(self.head_dim, int) or isinstance(self.head_dim, bool) or self.head_dim < 0:
            raise PlanError(
                f"head_dim of mixed_attention must be a whole number of at least 0, got {self.head_dim!r}"
            )

    def is_for(self, gpu: str, head_dim: int, kv_dtype: str) -> bool:
        """Whether it is known of such heads on a GPU."""
        return self.gpu in ("", gpu) and self.head_dim in (0, head_dim) and self.kv_dtype in ("", kv_dtype)


def _interval(given: Any, ns: float) -> tuple[float, ...]:
    """Two numbers with the figure between them, or none."""
    ends = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not ends:
        return ()
    if len(ends) != 2 or not all(is_number(end) for end in ends) or not 0 <= ends[0] <= ns <= ends[1]:
        raise PlanError(
            f"interval_ns of mixed_attention must be two numbers with ns = {ns:g} between them, got {given!r}"
        )
    return float(ends[0]), float(ends[1])


GEMM_SMOOTHINGS: Final = ("none", "median3")
FP8_SCALES: Final = ("dynamic", "static")
SHARED_EXPERTS: Final = ("apart", "beside")
LATENT_ATTENTION: Final = ("whole", "parts")
LAYOUT_KEYS: Final = ("tp", "pp", "dp", "moe_tp", "ep")


@dataclass(frozen=True)
class OperatorKernel:
    """Which measured kernel an engine runs for an operator, where.

    Attributes
    ----------
    operator : str
        As tables call it, such as ``gemm``.
    versions : str
        Of which versions of the engine, a range within the profile's; empty for all of them. One with a range
        counts in a profile that was loaded for a version, as ``vllm-0.17.0``.
    gpu, format : str
        Of which GPU, and of linear layers of which dtype; empty for any.
    architecture : str
        Of which models: a Hugging Face class, such as ``MiniMaxM2ForCausalLM``; empty for any.
    layout : tuple of (str, int)
        Of which sizes of the layout, such as ``("tp", 8)``; those that are not named may be any. In a
        TOML a table, ``{tp = 8}``.
    source : str
        The source of the tables that measured it; empty where the tables' own choice does.
    required : bool
        Whether tables that serve another source's rows are refused; otherwise they replace it.
    shared_experts : str
        For the operator ``moe``: how shared experts run with these kernels, where not as
        :class:`KernelChoices` says; empty where so.
    engine : str
        The engine whose measured kernels replace it, under any source name.
    reason : str
        Why they do, where they are another engine's.
    version, dtype, kernel : str
        Of the library, that the kernel computes in, and its name: what a reader can check a source by.
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

    def __post_init__(self) -> None:
        """Refuse what names no kernel."""
        for key in fields(self):
            if key.name not in ("layout", "required"):
                check_text(key.name, getattr(self, key.name))
        if not self.operator:
            raise PlanError("a kernel needs the operator that it is of")
        if not isinstance(self.required, bool):
            raise PlanError(f"required must be true or false, got {self.required!r}")
        if self.shared_experts:
            check_one_of("shared_experts", self.shared_experts, SHARED_EXPERTS)
        check_range(self.versions)
        try:
            sizes = tuple(dict(self.layout).items())
        except (TypeError, ValueError):
            raise PlanError(f"layout must be a table such as {{tp = 8}}, got {self.layout!r}") from None
        for name, size in sizes:
            check_one_of("a key of layout", name, LAYOUT_KEYS)
            check_size(f"layout {name}", size)
        object.__setattr__(self, "layout", sizes)

    def is_for(
        self, operator: str, gpu: str, dtype: str, layout: Mapping[str, int], architecture: str = ""
    ) -> bool:
        """Whether it is run for an operator on a GPU, in a format and layout, by models of a class."""
        return (
            self.operator == operator
            and self.versions == ""
            and self.gpu in ("", gpu)
            and self.format in ("", dtype)
            and self.architecture in ("", architecture)
            and all(layout.get(name, 1) == size for name, size in self.layout)
        )

    def of_version(self, version: str) -> OperatorKernel | None:
        """Return the kernel as a version of the engine has it; None if its range does not hold it."""
        if not self.versions:
            return self
        return replace(self, versions="") if holds_for(self.versions, version) else None


@dataclass(frozen=True)
class KernelChoices:
    """Which kernels an engine runs.

    Attributes
    ----------
    gemm_smoothing : str
        How small bf16 GEMMs are smoothed along m before they are summed: none or median3.
    fp8_scales : str
        Whether fp8 GEMMs find the scale of their input (dynamic) or know it (static).
    shared_experts : str
        Whether shared experts have their own time (apart), or run in parallel with the routed ones in
        decode steps, which then take the longer of both (beside).
    latent_attention : str
        How blocks of latent attention are timed: as they were measured, projections and all, where the tables
        have sound ones (whole), or projections, absorbed products and attention each by itself (parts).
    engines : tuple of str
        Engines whose measured kernels replace its own on GPUs without them, the nearest first; its own
        always come first.
    operators : tuple of OperatorKernel
        Operators whose kernel is known; of several that apply the first counts. A plan reads them from the
        source or engine that is named, and refuses tables that serve a named source's from another.
    mixed_attention : tuple of MixedAttention
        How long decodes attend at least in steps that prefill too, by GPU; of several that apply the first
        counts; if none applies, decodes take as long as in a decode step.
    cold_decode : tuple of str
        GPUs on which decode attention reads its KV cache from memory in every step, though tables have calls
        that found it in the L2; elsewhere decodes take as long as those calls.
    prefill_graphs : tuple of PrefillGraphs
        Number of tokens that prefill steps are padded to, by version; of several that apply the first counts.
    """

    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"
    shared_experts: str = "apart"
    latent_attention: str = "parts"
    engines: tuple[str, ...] = ()
    operators: tuple[OperatorKernel, ...] = ()
    mixed_attention: tuple[MixedAttention, ...] = ()
    cold_decode: tuple[str, ...] = ()
    prefill_graphs: tuple[PrefillGraphs, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be chosen."""
        if isinstance(self.engines, str) or not all(isinstance(name, str) for name in self.engines):
            raise PlanError(f"engines must be a list of names, got {self.engines!r}")
        object.__setattr__(self, "engines", tuple(self.engines))
        check_one_of("gemm_smoothing", self.gemm_smoothing, GEMM_SMOOTHINGS)
        check_one_of("fp8_scales", self.fp8_scales, FP8_SCALES)
        check_one_of("shared_experts", self.shared_experts, SHARED_EXPERTS)
        check_one_of("latent_attention", self.latent_attention, LATENT_ATTENTION)
        object.__setattr__(self, "operators", tuple(self.operators))
        object.__setattr__(self, "mixed_attention", tuple(self.mixed_attention))
        object.__setattr__(self, "prefill_graphs", tuple(self.prefill_graphs))
        if not isinstance(self.cold_decode, list | tuple):
            raise PlanError(f"cold_decode must be a list of GPUs, got {self.cold_decode!r}")
        for gpu in self.cold_decode:
            check_text("a GPU of cold_decode", gpu)
        object.__setattr__(self, "cold_decode", tuple(self.cold_decode))

    def mixed_attention_ns(self, gpu: str, head_dim: int, kv_dtype: str) -> float:
        """Return what decodes take at least beside prefill, ns a query head, KV token and layer; or 0."""
        known = (one.ns for one in self.mixed_attention if one.is_for(gpu, head_dim, kv_dtype))
        return next(known, 0.0)

    def of(
        self, operator: str, gpu: str, dtype: str, layout: Mapping[str, int], architecture: str = ""
    ) -> OperatorKernel | None:
        """Return the kernel of an operator on a GPU, in a format and layout; None where it is not known."""
        return next((k for k in self.operators if k.is_for(operator, gpu, dtype, layout, architecture)), None)

    def of_version(self, version: str) -> KernelChoices:
        """Return the choices of one version of the engine: those of its range come before those of any."""
        ranged = [(k.versions != "", k.of_version(version)) for k in self.operators]
        kept = [k for is_ranged, k in sorted(ranged, key=lambda one: not one[0]) if k is not None]
        graphs = [one for one in (g.of_version(version) for g in self.prefill_graphs) if one is not None]
        if any(is_ranged and k is not None for is_ranged, k in ranged):
            return replace(self, operators=tuple(kept), prefill_graphs=tuple(graphs))
        return replace(self, prefill_graphs=tuple(graphs)) if graphs else self


ANY_KERNELS: Final = KernelChoices()
"""No engine: every kernel as measured."""
