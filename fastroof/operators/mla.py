"""Latent attention (MLA): the attention kernel without projections, and the base of measured blocks.

Prefill expands the latent vectors to keys and values of every head; decode absorbs the expansion into the
queries, so that one latent vector per token is key and value of all heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.columns import DTYPE, KV_DTYPE, Column
from fastroof.errors import LookupInputError
from fastroof.operators import external_rows as external
from fastroof.operators.attention_work import (
    DECODE_AXES,
    SEQ_LEN,
    attention_bytes,
    attention_flops,
    decode_attention_bytes,
    decode_attention_flops,
    prefill_flops_conventions,
)
from fastroof.operators.operator import Columns, DatasheetClass, Key, Real, as_floats, element_bytes
from fastroof.operators.ragged import RaggedOperator, RaggedPrefill, WorkPart
from fastroof.operators.widths import LATENT_SHAPES, LatentShape
from fastroof.units import ACTIVATION_BYTES

_NAMES: Final = {
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "zai-org/GLM-5": "glm-5",
    "zai-org/GLM-5-FP8": "glm-5",
    "zai-org/GLM-5.2": "glm-5",
    "zai-org/GLM-5.2-FP8": "glm-5",
    "nvidia/GLM-5.2-NVFP4": "glm-5",
    "sgl-project/DeepSeek-V4-Flash-FP8": "deepseek-v4-flash",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
    "sgl-project/DeepSeek-V4-Pro-FP8": "deepseek-v4-pro",
    "deepseek-ai/DeepSeek-V4-Pro": "deepseek-v4-pro",
}
"""Names of the package's models; the format of a checkpoint is in gemm_type, not in the name."""


def model_names(words: Array) -> Array:
    """Rename the package's models to fastroof's names; unknown ones are unchanged."""
    distinct, index = np.unique(words.astype(str), return_inverse=True)
    renamed: Array = np.array([_NAMES.get(word, word) for word in distinct], object)[index]
    return renamed


def unknown_models(models: Array) -> dict[str, Bools]:
    """Rows of models with unknown widths, by reason."""
    return external.others("model", models, LATENT_SHAPES)


def check_model(model: str, known: Iterable[str] = LATENT_SHAPES) -> None:
    """Raise LookupInputError for a model with unknown widths."""
    names = list(known)
    if model not in names:
        raise LookupInputError(f"unknown model {model!r}: use one of {', '.join(names)}")


def shapes_of(models: Array) -> LatentShape:
    """Widths of each row's model, arrays of shape (rows,); NaN if unknown."""
    # one pass over the names; a pass per width took longer than reading the file
    listed = models.tolist()
    place = {model: i for i, model in enumerate(dict.fromkeys(listed))}
    unknown = (np.nan,) * len(LatentShape._fields)
    rows = np.array([LATENT_SHAPES.get(model, unknown) for model in place], np.float64)
    rows = rows.reshape(len(place), len(unknown))
    return LatentShape(*rows[[place[model] for model in listed]].T)


NUM_HEADS: Final = Column("num_heads", "int", "", "query heads on one GPU")


def causal_pairs(q_len: Real, kv_len: Real, most: Real = np.inf) -> Floats:
    """(query, token) pairs of a sequence whose last ``q_len`` tokens are new; at most ``most`` per query."""
    q, context = as_floats(q_len), as_floats(kv_len) - as_floats(q_len)
    growing = np.clip(most - context, 0.0, q)
    beyond = np.where(q > growing, q - growing, 0.0)
    some = np.where(beyond > 0.0, most, 0.0)
    return np.asarray(growing * context + growing * (growing + 1.0) / 2.0 + beyond * some)


def attended(kv_len: Real, most: Real) -> Floats:
    """Tokens that one query attends to."""
    return np.minimum(as_floats(kv_len), most)


MOSTLY: Final = 0.9
"""Least share of steps that are powers of two where steps are lengths: they are 96 to 100 % there."""


def generation_kv_len(raw: external.Raw) -> Array:
    """Tokens attended to in the package's files of decode.

    Most count the cached tokens without the new one; collectors whose steps are 2, 4, 8 ... (and a few
    others) pass the step as the length of the sequence.
    """
    steps = raw["step"]
    is_power = (steps & (steps - 1)) == 0
    counts_new = steps.min() > 1 and is_power.mean() > MOSTLY and bool((raw["isl"] == 1).all())
    return steps if counts_new else raw["isl"] + steps


def projections(columns: Columns, shape: LatentShape, tokens: Floats, expanded: Real = 0.0) -> list[WorkPart]:
    """Projections of a block over tokens; ``expanded`` tokens have keys and values expanded (0: absorbed)."""
    heads = columns["num_heads"]
    hidden, q_lora, kv_lora, nope, rope, v_dim = shape[:6]
    down = hidden * (q_lora + kv_lora + rope)
    own = down + q_lora * heads * (nope + rope) + heads * v_dim * hidden
    expansion = kv_lora * heads * (nope + v_dim)
    return [
        WorkPart(np.asarray(2.0 * tokens * own + 2.0 * expanded * expansion), columns["dtype"]),
        WorkPart(np.asarray(np.where(expanded > 0.0, 0.0, 2.0 * tokens * expansion)), "bf16"),
    ]


def module_bytes(columns: Columns, tokens: Floats, cached: Floats) -> Floats:
    """Weights once, tokens in and out, and the latent vectors of ``cached`` tokens."""
    heads = columns["num_heads"]
    hidden, q_lora, kv_lora, nope, rope, v_dim = shapes_of(columns["model"])[:6]
    weights = (
        hidden * (q_lora + kv_lora + rope)
        + heads * (q_lora * (nope + rope) + v_dim * hidden + kv_lora * (nope + v_dim))
    ) * element_bytes(columns["dtype"])
    kv = cached * (kv_lora + rope) * element_bytes(columns["kv_dtype"])
    return np.asarray(weights + kv + 2.0 * ACTIVATION_BYTES * tokens * hidden)


MODULE_KEYS: Final = (
    DTYPE,
    KV_DTYPE,
    Column("attn_dtype", "text", "", "dtype that attention computes in"),
    Column("model", "text", "", "model whose widths the block has: deepseek-v3"),
    NUM_HEADS,
)
"""Keys of a measured attention block."""

MODULE_COLUMNS: Final = (
    *external.size_columns("num_heads", "batch_size", "isl"),
    *external.size_columns("step", minimum=0),
    *external.text_columns("mla_dtype", "kv_cache_dtype"),
)
"""Columns of the package's files of measured blocks."""

Convert = Callable[[external.Raw], external.ExternalRows]


def module_rows(
    raw: external.Raw, model: Array, dtype: str | Array = "gemm_type", attn_dtype: str | Array = "mla_dtype"
) -> external.ExternalRows:
    """Keys, batch and latency of the package's rows of blocks, without their lengths."""
    dtypes = {"dtype": dtype, "kv_dtype": "kv_cache_dtype", "attn_dtype": attn_dtype}
    return external.package_rows(raw, "num_heads", "batch_size", model=model, **dtypes)


def prompts(convert: Convert) -> Convert:
    """Add q_len and kv_len to converted rows of prompts."""

    def converted(raw: external.Raw) -> external.ExternalRows:
        return convert(raw).with_columns(q_len=raw["isl"], kv_len=raw["isl"] + raw["step"])

    return converted


def decodes(convert: Convert) -> Convert:
    """Add kv_len to converted rows of decode."""

    def converted(raw: external.Raw) -> external.ExternalRows:
        return convert(raw).with_columns(kv_len=generation_kv_len(raw))

    return converted


class AttentionModule(RaggedOperator):
    """An attention block of a model, measured as one."""

    keys = MODULE_KEYS

    def sizes(self, columns: Columns) -> tuple[Floats, Floats, Floats]:
        """Batch, new tokens and tokens of each row's sequences; a decode has one new token."""
        batch, kv_len = (np.asarray(columns[name], np.float64) for name in ("batch_size", "kv_len"))
        return batch, np.asarray(columns.get("q_len", 1.0), np.float64), kv_len

    def pairs(self, q_len: Floats, kv_len: Floats, most: Real = np.inf) -> Floats:
        """(query, token) pairs of a sequence, at most ``most`` per query."""
        return causal_pairs(q_len, kv_len, most) if "q_len" in self.axis_names else attended(kv_len, most)


class PickingModule(AttentionModule):
    """A block whose queries attend to some of the cached tokens, which they pick."""

    @abstractmethod
    def bytes_if(self, columns: Columns, picking: Floats) -> Floats:
        """Bytes if so many queries of a sequence pick tokens of their own."""

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, and what of the cache all queries may pick."""
        return self.bytes_if(columns, self.sizes(columns)[1])

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes if all queries of a sequence pick the same."""
        return self.bytes_if(columns, np.asarray(1.0))


class LatentModule(AttentionModule):
    """A block of latent attention of a model with known widths."""

    def check_key(self, key: Key) -> None:
        """Reject models with unknown widths."""
        check_model(key[3])


_Q_HEADS: Final = Column("num_q_heads", "int", "", "query heads on one GPU")
_ROPE_DIM: Final = Column("rope_dim", "int", "", "rotary head width")
_DEEPSEEK: Final = {"kv_lora_rank": 512, "nope_dim": 128, "rope_dim": 64}
"""Widths of all models in the package's kernel files: DeepSeek-V3's."""


def _prefill_from_tree(read: external.Raw, heads: external.Heads) -> dict[str, Array]:
    columns = external.tree_attention(read, heads, ("num_q_heads", "nope_dim", "rope_dim"))
    return columns | {"dtype": read["dtype"]}


def _decode_from_tree(read: external.Raw, heads: external.Heads) -> dict[str, Array]:
    return external.tree_attention(read, heads, ("num_q_heads", "kv_lora_rank", "rope_dim"))


def _package_rows(raw: external.Raw, widths: tuple[str, ...]) -> external.ExternalRows:
    # num_heads is per GPU; the same kernel is repeated for each tp_size, which is not a key
    computes = external.others("computes in", external.dtype_names(raw["mla_dtype"]), ("bf16",))
    sizes = {name: np.full(len(raw["num_heads"]), _DEEPSEEK[name], np.int64) for name in widths}
    keys = {"kv_dtype": "kv_cache_dtype", "num_q_heads": "num_heads"}
    return external.package_rows(raw, "batch_size", **keys, **sizes).without(computes)


def _package_prefill(raw: external.Raw) -> external.ExternalRows:
    return _package_rows(raw, ("nope_dim", "rope_dim")).with_columns(
        dtype=external.dtype_names(raw["mla_dtype"])
    )


def _package_decode(raw: external.Raw) -> external.ExternalRows:
    return _package_rows(raw, ("kv_lora_rank", "rope_dim"))


class MlaPrefill(RaggedPrefill):
    """Causal MLA of prompts, before absorption."""

    name = "mla_prefill"
    rank = 88
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_prefill": DatasheetClass(15.0, 0.63)}
    summary = "MLA over prompts: the kernel alone."
    keys = (
        DTYPE,
        KV_DTYPE,
        _Q_HEADS,
        Column("nope_dim", "int", "", "head width without rotary part"),
        _ROPE_DIM,
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 1, "dtype": "bf16", "kv_dtype": "bf16", "nope_dim": 128, "rope_dim": 64,
    }  # fmt: skip
    package_files = (
        external.PackageFile(
            "mla", "context_mla_perf", (*MODULE_COLUMNS, *external.MEASURED), prompts(_package_prefill)
        ),
    )
    tree_files = (
        external.attention_file(
            "mla", "prefill", (DTYPE, SEQ_LEN), _prefill_from_tree, computes_in_any_dtype=True
        ),
    )

    @staticmethod
    def _head_dim(c: Columns) -> Array:
        """Mean of key (nope + rope) and value (nope) widths, which gives MLA the cost of plain attention."""
        return np.asarray(c["nope_dim"] + c["rope_dim"] / 2.0)

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Exact causal FLOPs."""
        sizes = columns["q_len"], columns["kv_len"], columns["batch_size"]
        return [
            WorkPart(
                attention_flops(columns["num_q_heads"], self._head_dim(columns), *sizes), columns["dtype"]
            )
        ]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes with separate keys and values per query head."""
        heads = columns["num_q_heads"]
        sizes = columns["q_len"], columns["kv_len"], columns["batch_size"]
        return attention_bytes(heads, heads, self._head_dim(columns), *sizes)

    def flops_conventions(self, columns: Columns) -> dict[str, Floats]:
        """FLOPs by each convention of published files for the causal triangle."""
        return prefill_flops_conventions(columns, self._head_dim(columns), self.flops(columns))


class MlaDecode(RaggedOperator):
    """Absorbed MLA of one new token per sequence: one latent vector per token is key and value."""

    name = "mla_decode"
    rank = 90
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_decode": DatasheetClass(11.0, 0.96)}
    summary = "MLA of one new token per sequence: the kernel alone."
    keys = (KV_DTYPE, _Q_HEADS, Column("kv_lora_rank", "int", "", "width of the compressed KV"), _ROPE_DIM)
    axes = DECODE_AXES
    defaults: ClassVar[Mapping[str, Any]] = {"kv_dtype": "bf16", "kv_lora_rank": 512, "rope_dim": 64}
    package_files = (
        external.PackageFile(
            "mla", "generation_mla_perf", (*MODULE_COLUMNS, *external.MEASURED), decodes(_package_decode)
        ),
    )
    tree_files = (
        external.attention_file("mla", "decode", (DTYPE, KV_DTYPE, *DECODE_AXES), _decode_from_tree),
    )

    @staticmethod
    def _head_dim(c: Columns) -> Array:
        """Mean of key (kv_lora + rope) and value (kv_lora) widths, see :meth:`MlaPrefill._head_dim`."""
        return np.asarray(c["kv_lora_rank"] + c["rope_dim"] / 2.0)

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """One query per sequence."""
        width = self._head_dim(columns)
        flops = decode_attention_flops(
            columns["num_q_heads"], width, columns["kv_len"], columns["batch_size"]
        )
        return [WorkPart(flops, "bf16")]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes of one latent vector per token, as a number of KV heads of the mean width."""
        width = self._head_dim(columns)
        latent_heads = (columns["kv_lora_rank"] + columns["rope_dim"]) / (2.0 * width)
        return decode_attention_bytes(
            columns["num_q_heads"], latent_heads, width, columns["kv_len"], columns["batch_size"],
            element_bytes(columns["kv_dtype"]),
        )  # fmt: skip


MLA_PREFILL: Final = MlaPrefill()
MLA_DECODE: Final = MlaDecode()
OPERATORS: Final = (MLA_PREFILL, MLA_DECODE)
