"""Shapes that kernels are measured at: what models give on one GPU, and which shapes cannot exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fastroof.models.layout import ShardedShape, split

__all__ = [
    "COLUMNS_OF_SHAPES",
    "ELEMENTWISE_BYTES",
    "MODEL_SHAPES",
    "SPREADS",
    "Experts",
    "ModelShape",
    "elementwise_bytes",
    "impossible",
    "shapes_of",
]

ELEMENTWISE_BYTES: Final[dict[str, int]] = {
    "rmsnorm_residual": 8,
    "rope": 4,
    "silu_and_mul": 6,
    "kv_write": 4,
    "fp8_quantise": 3,
    "copy": 4,
    "launch": 0,
}
"""Compulsory bytes an element by kind, of ``m`` rows of ``width`` elements, all bf16 but for fp8 outputs.

- ``rmsnorm_residual``: width is the hidden size; input and residual are read and both written.
- ``rope``: width is (query heads + KV heads) x head_dim on one GPU, rotated in place.
- ``silu_and_mul``: width is that of the output; gate and up are read.
- ``kv_write``: width is 2 x KV heads x head_dim, keys and values into a bf16 cache.
- ``fp8_quantise``: width is that of the input; one scale for all of it.
- ``copy``: one row; device to device, so 2 x width bytes are copied.
- ``launch``: an empty kernel; m = width = io_bytes = 1.
"""

SPREADS: Final = ("uniform", "bimodal", "one_long")
"""How the KV lengths of an unequal decode batch differ."""

_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "kind": tuple(ELEMENTWISE_BYTES),
    "spread": SPREADS,
    "mode": ("graph", "eager", "nccl"),
    "collective": ("all_gather", "reduce_scatter", "alltoall"),
}


class Experts(NamedTuple):
    """The experts of a MoE layer: how many, how many a token takes, and the width of one."""

    num_experts: int
    topk: int
    intermediate: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer that its kernels' shapes follow from.

    Attributes
    ----------
    name : str
        What the model is called.
    num_q_heads, num_kv_heads, head_dim : int
        Attention heads of the whole model, and the width of one.
    hidden : int
        Width of the residual stream.
    vocab : int
        Rows of the LM head, without padding.
    intermediate : int
        Width of the dense MLP; of one expert, without being given, where the layers have experts.
    experts : Experts or None
        The experts of a MoE model.
    tp : tuple of int
        Tensor-parallel sizes it is measured for.

    Raises
    ------
    ValueError
        If the sizes cannot be those of a model, or a tp does not divide them.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    intermediate: int = 0
    experts: Experts | None = None
    tp: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Refuse sizes that no GPU of a group could have a share of."""
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads {self.num_q_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )
        if (self.experts is None) == (self.intermediate == 0):
            raise ValueError("need either intermediate (a dense MLP) or experts (a MoE layer)")
        if self.experts is not None and self.experts.topk > self.experts.num_experts:
            raise ValueError(f"topk {self.experts.topk} is above num_experts {self.experts.num_experts}")
        if self.experts is not None:
            object.__setattr__(self, "intermediate", self.experts.intermediate)
        for tp in self.tp:
            for what, size in (("num_q_heads", self.num_q_heads), ("MLP width", self.intermediate)):
                if size % tp:
                    raise ValueError(f"tp {tp} does not divide {what} {size}")
            if self.num_kv_heads % tp and tp % self.num_kv_heads:
                raise ValueError(
                    f"tp {tp} neither divides num_kv_heads {self.num_kv_heads} nor is a multiple of it"
                )

    def share(self, tp: int) -> ShardedShape:
        """Sizes of one GPU's share."""
        return split(self, tp)

    def heads(self, tp: int) -> tuple[int, int, int]:
        """Query heads, KV heads (replicated where there are fewer than GPUs) and head width on one GPU."""
        share = self.share(tp)
        return share.num_q_heads, share.num_kv_heads, self.head_dim

    def rope_width(self, tp: int) -> int:
        """Elements a token that are rotated on one GPU: queries and keys."""
        share = self.share(tp)
        return (share.num_q_heads + share.num_kv_heads) * self.head_dim

    def kv_width(self, tp: int) -> int:
        """Elements a token that are written into the cache of one GPU: keys and values."""
        return 2 * self.share(tp).num_kv_heads * self.head_dim

    def linear(self, tp: int) -> list[tuple[int, int]]:
        """Outputs and inputs (n, k) of a layer's GEMMs on one GPU; of a MoE layer, the router's too.

        Examples
        --------
        >>> ModelShape("m", 32, 8, 128, 4096, 128256, intermediate=14336).linear(1)
        [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
        """
        share = self.share(tp)
        attention = [(share.qkv_out, self.hidden), (self.hidden, share.o_in)]
        if self.experts is not None:
            return [*attention, (self.experts.num_experts, self.hidden)]
        return [*attention, (2 * share.intermediate, self.hidden), (self.hidden, share.intermediate)]

    def lm_head(self, tp: int) -> tuple[int, int]:
        """Outputs and inputs (n, k) of the LM head on one GPU, padding included."""
        return self.share(tp).vocab_rows, self.hidden

    def expert_layer(self, tp: int) -> tuple[int, int, int, int, int] | None:
        """Hidden size, expert width before moe_tp, topk, num_experts and moe_tp; None for a dense model."""
        if self.experts is None:
            return None
        num_experts, topk, intermediate = self.experts
        return self.hidden, intermediate, topk, num_experts, tp


Shape = tuple[int, ...]


class _Derived(NamedTuple):
    operators: tuple[str, ...]
    columns: tuple[str, ...]
    of: Callable[[ModelShape, int], Iterable[Shape]]


_ATTENTION: Final = ("attention_prefill", "attention_decode", "attention_decode_unequal")
_HEADS: Final = ("num_q_heads", "num_kv_heads", "head_dim")
_EXPERTS: Final = ("hidden", "intermediate", "topk", "num_experts", "moe_tp")

COLUMNS_OF_SHAPES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(_ATTENTION, _HEADS),
    "gemm": ("n", "k"),
    "moe": _EXPERTS,
    "elementwise": ("width",),
}
"""The columns that ``shapes`` fills, by operator; other operators have none."""


def _experts_of(model: ModelShape, tp: int) -> list[Shape]:
    layer = model.expert_layer(tp)
    return [] if layer is None else [layer]


_DERIVED: Final[dict[str, _Derived]] = {
    "heads": _Derived(_ATTENTION, _HEADS, lambda model, tp: [model.heads(tp)]),
    "linear": _Derived(("gemm",), ("n", "k"), lambda model, tp: model.linear(tp)),
    "lm_head": _Derived(("gemm",), ("n", "k"), lambda model, tp: [model.lm_head(tp)]),
    "experts": _Derived(("moe",), _EXPERTS, _experts_of),
    "hidden": _Derived(("elementwise",), ("width",), lambda model, tp: [(model.hidden,)]),
    "activations": _Derived(
        ("elementwise",), ("width",), lambda model, tp: [(model.share(tp).intermediate,)]
    ),
    "rope": _Derived(("elementwise",), ("width",), lambda model, tp: [(model.rope_width(tp),)]),
    "kv": _Derived(("elementwise",), ("width",), lambda model, tp: [(model.kv_width(tp),)]),
}

MODEL_SHAPES: Final[dict[str, tuple[str, ...]]] = {name: d.operators for name, d in _DERIVED.items()}
"""Names that ``shapes`` knows, and the operators each is for."""


def shapes_of(name: str, models: Iterable[ModelShape]) -> list[Shape]:
    """Derive the distinct shapes of a name in :data:`MODEL_SHAPES`, sorted.

    Parameters
    ----------
    name : str
        What is derived: ``"heads"``, ``"linear"``, ...
    models : iterable of ModelShape
        The models, each with its tensor-parallel sizes.

    Returns
    -------
    list of tuple of int
        Values of the operator's :data:`COLUMNS_OF_SHAPES`.

    Examples
    --------
    >>> shapes_of("heads", [ModelShape("m", 32, 8, 128, 4096, 128256, intermediate=14336, tp=(1, 8))])
    [(4, 1, 128), (32, 8, 128)]
    """
    return sorted({shape for model in models for tp in model.tp for shape in _DERIVED[name].of(model, tp)})


def elementwise_bytes(kind: str, m: int, width: int) -> int:
    """Compulsory bytes that an elementwise kernel reads and writes, at least 1.

    Parameters
    ----------
    kind : str
        A key of :data:`ELEMENTWISE_BYTES`.
    m, width : int
        Rows, and elements a row.

    Returns
    -------
    int
        The ``io_bytes`` column.

    Examples
    --------
    >>> elementwise_bytes("silu_and_mul", 2, 1024), elementwise_bytes("launch", 1, 1)
    (12288, 1)
    """
    return max(1, ELEMENTWISE_BYTES[kind] * m * width)


def impossible(operator: str, values: Mapping[str, Any]) -> str | None:
    """Say why no kernel can have these sizes, or None.

    Parameters
    ----------
    operator : str
        A key of :data:`fastroof.columns.OPERATORS`.
    values : mapping of str to int or str
        The point's key and axis columns.

    Returns
    -------
    str or None
        What contradicts what, with the figures.

    Examples
    --------
    >>> impossible("attention_decode", {"num_q_heads": 30, "num_kv_heads": 8})
    'num_q_heads 30 is not divisible by num_kv_heads 8'
    """
    for column, choices in _CHOICES.items():
        if column in values and values[column] not in choices:
            return f"{column} {values[column]!r} is none of {', '.join(choices)}"
    divided = {"num_q_heads": "num_kv_heads", "intermediate": "moe_tp", "num_experts": "moe_ep"}
    for size, divisor in divided.items():
        if size in values and divisor in values and values[size] % values[divisor]:
            return f"{size} {values[size]} is not divisible by {divisor} {values[divisor]}"
    if operator == "moe" and values["topk"] > values["num_experts"]:
        return f"topk {values['topk']} is above num_experts {values['num_experts']}"
    if operator == "attention_prefill" and values["q_len"] > values["kv_len"]:
        return f"q_len {values['q_len']} is above kv_len {values['kv_len']}"
    if operator == "attention_decode_unequal" and (values["batch_size"] < 2 or values["kv_len"] < 2):
        return "a batch of unequal lengths needs batch_size and kv_len of at least 2"
    if operator in ("allreduce", "collective") and values["num_gpus"] < 2:
        return f"num_gpus {values['num_gpus']}: a collective needs at least 2"
    return _impossible_elementwise(values) if operator == "elementwise" else None


def _impossible_elementwise(values: Mapping[str, Any]) -> str | None:
    kind, m, width = values["kind"], values["m"], values["width"]
    if kind == "launch" and (m, width) != (1, 1):
        return f"an empty launch has m 1 and width 1, not m {m} and width {width}"
    if kind == "copy" and m != 1:
        return f"a copy has one row, not m {m}"
    return None
