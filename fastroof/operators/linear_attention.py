"""Linear attention and state spaces: layers that keep a state of fixed size instead of a KV cache.

A layer runs a short causal convolution over its channels, then a recurrence: gated delta rule (``gdn``,
Qwen3-Next and Qwen3.5), Kimi delta attention (``kda``), Mamba-2 (:mod:`.mamba2`). These are parts of one call
and add up; an engine may have one kernel that does both, which is measured beside them. Part ``all`` is that
kernel where it was measured, else the sum of both parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.columns import ORIGIN_BORROWED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    measured_us,
    size_columns,
    text_columns,
    version_order,
)
from fastroof.operators.operator import Answers, Columns, DatasheetClass, HoldoutGrid, Key, sizes_as_floats
from fastroof.operators.ragged import LENGTHS, Lent, RaggedOperator, WorkPart, lent
from fastroof.units import ACTIVATION_BYTES

if TYPE_CHECKING:
    from fastroof.tables import Tables


ALL: Final = "all"
CONVOLUTION: Final = "convolution"
RECURRENCE: Final = "recurrence"
FUSED: Final = "fused"

FUSED_KERNELS: Final = ("fused_kda_decode", "kda_fused_decode")
"""Convolution, recurrence and what is between them in one."""

ALL_CHANNELS_SINCE: Final = (0, 5, 14)
"""Version of SGLang since which its convolution was measured over all channels."""

GATE_BYTES: Final = 4
"""Decays and gates are float32."""


def part_of(kernel: str) -> str:
    """Which part of a layer a kernel of the package is."""
    if kernel in FUSED_KERNELS:
        return FUSED
    return CONVOLUTION if kernel.startswith("causal_conv1d") else RECURRENCE


def parts_of_rows(kernels: Array) -> Array:
    """Which part of a layer each row of the package is, by its kernel."""
    named = {kernel: part_of(kernel) for kernel in set(kernels)}
    return np.array([named[kernel] for kernel in kernels], object)


LAYER_COLUMNS: Final = (
    Column("phase", "text", "", "context, generation, or verify (draft tokens of speculative decoding)"),
    Column("part", "text", "", "convolution, recurrence, fused (one kernel for both)"),
    Column("conv_width", "int", "", "taps of the convolution"),
)
_AXES: Final = (
    Column("batch_size", "int", "", "sequences"),
    Column("q_len", "int", "tokens", "new tokens of each sequence"),
)
PACKAGE_COLUMNS: Final = (
    *text_columns("phase"),
    *size_columns("batch_size", "seq_len", "d_conv"),
    *MEASURED,
)


class StateOperator(RaggedOperator):
    """Parts of a layer with a state, looked up along batch and new tokens."""

    axes = _AXES
    state_bytes: ClassVar[float]
    lent_sizes = frozenset({"num_heads", "num_k_heads", "num_v_heads"})
    defaults: ClassVar[Mapping[str, Any]] = {"phase": "generation", "part": ALL, "conv_width": 4, "q_len": 1}

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """How parts make a layer."""
        return {
            "note": "rows are parts of a layer: convolution and recurrence add up, and a fused row is both. "
            "vLLM's convolutions of prompts were launched by the host, not replayed from a CUDA graph"
        }

    # -- what a layer has ----------------------------------------------------------------------------

    @abstractmethod
    def channels(self, columns: Columns) -> Array:
        """Channels that the convolution runs over."""

    @abstractmethod
    def state(self, columns: Columns) -> Array:
        """Elements of one sequence's state."""

    @abstractmethod
    def flops_of_state(self) -> float:
        """FLOPs of the recurrence, a token and element of the state."""

    @abstractmethod
    def token_bytes(self, columns: Columns) -> Array:
        """Bytes of one token's inputs and outputs of the recurrence."""

    def state_width(self, columns: Columns) -> Any:
        """Bytes of an element of the state."""
        return self.state_bytes

    # -- work ----------------------------------------------------------------------------------------

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Taps of the convolution, and the recurrence as written: chunked kernels do more."""
        c = sizes_as_floats(columns)
        tokens = c["batch_size"] * c["q_len"]
        convolution = 2.0 * tokens * c["conv_width"] * self.channels(c)
        recurrence = self.flops_of_state() * tokens * self.state(c)
        both = np.where(c["part"] == CONVOLUTION, 0.0, recurrence) + np.where(
            (c["part"] == CONVOLUTION) | (c["part"] == FUSED), convolution, 0.0
        )
        return [WorkPart(np.asarray(both), "bf16")]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Tokens in and out, and states: read once, and written once, or after every draft token."""
        c = sizes_as_floats(columns)
        batch, q_len = c["batch_size"], c["q_len"]
        is_context = c["phase"] == "context"
        writes = np.where(c["phase"] == "verify", q_len, 1.0)
        # a fresh prompt has no state to read
        moves = writes + np.where(is_context, 0.0, 1.0)
        channels = ACTIVATION_BYTES * self.channels(c)
        taps = (c["conv_width"] - 1) * channels * batch * moves
        convolution = taps + 2.0 * channels * batch * q_len
        state = self.state_width(c) * self.state(c)
        recurrence = batch * (moves * state + q_len * self.token_bytes(c))
        fused = np.where(c["part"] == FUSED, taps, 0.0)
        return np.asarray(np.where(c["part"] == CONVOLUTION, convolution, recurrence + fused))

    # -- in steps ------------------------------------------------------------------------------------

    def step_sizes(self, is_decode: bool, batch: Any, length: Any, prefix: Any) -> dict[str, Any]:
        """A decode has one new token, whatever came before; a prompt's prefix is in its state."""
        return {"batch_size": batch, "q_len": np.ones_like(length) if is_decode else length}

    def step_lengths(self, is_decode: bool, rows: Columns) -> Array:
        """New tokens; a decode was measured at every length, whatever came before."""
        return np.array(LENGTHS) if is_decode else np.asarray(rows["q_len"])

    def verifying(self, key: Key) -> Key | None:
        """A state is read once and kept after every token."""
        return ("verify", *key[1:])

    def step_kernels(self, tables: Tables, key: Key) -> list[Lent]:
        """The fused kernel where it was measured, else convolution and recurrence."""
        phase, part, *shape = key
        if part != ALL:
            return [lent(tables, self, key)]
        fused = (phase, FUSED, *shape)
        if tables.serves(self.name, fused):
            return [lent(tables, self, fused)]
        return [lent(tables, self, (phase, name, *shape)) for name in (CONVOLUTION, RECURRENCE)]

    def kernel_of(self, key: Key, lender: Key) -> Key:
        """The part that the lender is."""
        return (key[0], lender[1], *key[2:])

    # -- lookups -------------------------------------------------------------------------------------

    def check_key(self, key: Key) -> None:
        """Refuse a phase or part that there is not."""
        phase, part = key[0], key[1]
        if phase not in ("context", "generation", "verify"):
            raise LookupInputError(f"phase is {phase!r}: use context, generation or verify")
        if part not in (ALL, CONVOLUTION, RECURRENCE, FUSED):
            raise LookupInputError(f"part is {part!r}: use all, convolution, recurrence or fused")

    def check_sizes(self, sizes: Mapping[str, Floats]) -> None:
        """Nothing to refuse."""

    def parts_of(self, tables: Tables, key: Key) -> list[Key]:
        """Measured kernels whose times add up to those of a key."""
        phase, part, *shape = key
        if part != ALL:
            return [key]
        fused = (phase, FUSED, *shape)
        if tables.serves(self.name, fused):
            return [fused]
        both: list[Key] = [(phase, name, *shape) for name in (CONVOLUTION, RECURRENCE)]
        have = [tables.serves(self.name, one) for one in both]
        if any(have) and not all(have):
            there, missing = (both[have.index(is_there)][1] for is_there in (True, False))
            raise MissingTableError(
                f"of {self.name} in {phase} {tables.gpu.name} has the {there} alone, no {missing}: "
                f"the whole has no time; look up part={there!r}"
            )
        return both

    def look_up(self, tables: Tables, method: str, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look one part up, or all of them and add."""
        kernels = self.parts_of(tables, key)
        if kernels == [key]:
            super().look_up(tables, method, key, sizes, answers)
            return
        out, mfu, origin = answers
        out.fill(0.0)
        origin.fill(0)
        peak_us = np.zeros_like(out)
        for kernel in kernels:
            one = (np.empty_like(out), np.empty_like(mfu), np.empty_like(origin))
            super().look_up(tables, method, kernel, sizes, one)
            if tables.is_foreign(self.name, kernel):
                np.maximum(one[2], ORIGIN_BORROWED, out=one[2])
            out += one[0]
            peak_us += one[0] * one[1]
            np.maximum(origin, one[2], out=origin)
        np.divide(peak_us, out, out=mfu)

    def relative_error(self, tables: Tables, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """One standard error over the latency; parts err apart from each other."""
        kernels = self.parts_of(tables, key)
        if kernels == [key]:
            return super().relative_error(tables, key, sizes, latency_us)
        square = np.zeros_like(latency_us)
        for kernel in kernels:
            one = (np.empty_like(latency_us), np.empty_like(latency_us), np.empty(len(latency_us), np.uint8))
            super().look_up(tables, "roofline", kernel, sizes, one)
            square += (super().relative_error(tables, kernel, sizes, one[0]) * one[0]) ** 2
        return np.asarray(np.sqrt(square) / latency_us)


# -- gated delta rules -----------------------------------------------------------------------------

_DELTA_SIZES: Final = ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")


def _convolves_keys_alone(raw: Raw) -> Bools:
    """Rows of collections whose convolution ran over a third to a sixth of a layer's channels."""
    rows = len(raw["phase"])
    engines, versions = (raw.get(name, np.full(rows, "", object)) for name in ("framework", "version"))
    old = {v: version_order(v) < ALL_CHANNELS_SINCE for v in set(versions)}
    is_old = np.array([old[version] for version in versions], bool)
    engine = np.char.lower(engines.astype(str))
    return np.asarray((engine == "trtllm") | ((engine == "sglang") & is_old))


def _delta_rows(raw: Raw) -> ForeignRows:
    # models of equal heads were measured each: their width (d_model) is no size of these kernels
    columns = {
        "phase": raw["phase"],
        "part": parts_of_rows(raw["kernel_source"]),
        "conv_width": raw["d_conv"],
        "q_len": raw["seq_len"],
        **{name: raw[name] for name in ("batch_size", *_DELTA_SIZES)},
        **measured_us(raw),
    }
    narrow = (columns["part"] == CONVOLUTION) & _convolves_keys_alone(raw)
    return ForeignRows(columns, {"convolution over the keys alone, not over queries and values too": narrow})


class DeltaRule(StateOperator):
    """A recurrence that corrects its state by what it would have answered."""

    keys = (
        *LAYER_COLUMNS,
        Column("num_k_heads", "int", "", "heads of queries and keys on one GPU"),
        Column("head_k_dim", "int", "", "their width"),
        Column("num_v_heads", "int", "", "heads of values on one GPU"),
        Column("head_v_dim", "int", "", "their width"),
    )
    gate_per_channel: ClassVar[bool]

    def channels(self, columns: Columns) -> Array:
        """Queries, keys and values."""
        c = columns
        return np.asarray(2 * c["num_k_heads"] * c["head_k_dim"] + c["num_v_heads"] * c["head_v_dim"])

    def state(self, columns: Columns) -> Array:
        """A matrix a head of values."""
        c = columns
        return np.asarray(c["num_v_heads"] * c["head_k_dim"] * c["head_v_dim"], np.float64)

    def flops_of_state(self) -> float:
        """Decay; what the key would have answered, the correction, and the query: 2 each."""
        return 7.0

    def token_bytes(self, columns: Columns) -> Array:
        """Queries, keys, values, outputs and gates."""
        c = columns
        outputs = c["num_v_heads"] * c["head_v_dim"]
        gates = c["num_v_heads"] * (c["head_k_dim"] if self.gate_per_channel else 1)
        width = ACTIVATION_BYTES if self.gate_per_channel else GATE_BYTES
        return np.asarray(ACTIVATION_BYTES * (self.channels(c) + outputs) + width * gates)


class Gdn(DeltaRule):
    """Gated delta rule: one decay a head."""

    name = "gdn"
    rank = 82
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"gdn": DatasheetClass(3.4, 0.67)}
    summary = "Gated delta rule with its convolution."
    about = "Part all adds up what runs: convolution and recurrence."
    # bf16 in TensorRT-LLM: float32 would be 1.0 to 1.2 times the memory's bandwidth. Decodes of vLLM and
    # SGLang take alike, 0.8 to 0.9 of it with float32
    state_bytes = 2
    gate_per_channel = False
    defaults: ClassVar[Mapping[str, Any]] = {
        **StateOperator.defaults, "head_k_dim": 128, "head_v_dim": 128,
    }  # fmt: skip
    holdouts = (
        HoldoutGrid("gdn", "every second (context)", {}, {"phase": "context"}),
        HoldoutGrid("gdn", "every second (generation)", {}, {"phase": "generation"}),
    )
    coverages = (HoldoutGrid("gdn", "all", {}, {}),)
    package_files = (
        PackageFile(
            "linear_attention",
            "gdn_perf",
            (*PACKAGE_COLUMNS, *size_columns(*_DELTA_SIZES)),
            _delta_rows,
            RUN,
        ),
    )


class Kda(DeltaRule):
    """Kimi delta attention: a decay a channel."""

    name = "kda"
    rank = 83
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"kda": DatasheetClass(6.4, 0.37)}
    summary = "Kimi delta attention with its convolution."
    about = (
        "Part all is the fused kernel where there is one, which engines run unless they speculate, else the "
        "sum of convolution and recurrence. Phase verify checks q-len draft tokens."
    )
    state_bytes = 4
    gate_per_channel = True
    defaults = Gdn.defaults
    holdouts = (
        HoldoutGrid("kda", "every second (context)", {}, {"phase": "context"}),
        HoldoutGrid("kda", "every second (generation)", {}, {"phase": "generation"}),
        HoldoutGrid("kda", "every second (verify)", {}, {"phase": "verify"}),
    )
    coverages = (HoldoutGrid("kda", "all", {}, {}),)
    package_files = (
        PackageFile("kda", "kda_perf", (*PACKAGE_COLUMNS, *size_columns(*_DELTA_SIZES)), _delta_rows, RUN),
    )


GDN: Final = Gdn()
KDA: Final = Kda()


SHORT_RECURRENCE: Final = "recurrence_16bit"
"""The recurrence with a state in bf16 or fp16, which is modelled as the other one is."""

_SIZES: Final = {
    "num_heads": "nheads",
    "head_dim": "head_dim",
    "state_dim": "d_state",
    "num_groups": "n_groups",
    "chunk_size": "chunk_size",
}


def _rows(raw: Raw) -> ForeignRows:
    columns = {
        "phase": raw["phase"],
        "part": parts_of_rows(raw["kernel_source"]),
        "conv_width": raw["d_conv"],
        "batch_size": raw["batch_size"],
        "q_len": raw["seq_len"],
        **{name: raw[theirs] for name, theirs in _SIZES.items()},
        **measured_us(raw),
    }
    return ForeignRows(columns, {})


class Mamba2(StateOperator):
    """State space duality; the public tables have its convolution alone."""

    name = "mamba2"
    rank = 84
    summary = "Mamba-2 with its convolution."
    # float32 unless a checkpoint or its engine says otherwise
    state_bytes = 4
    lent_sizes = frozenset({"num_heads", "state_dim", "num_groups", "chunk_size"})
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "mamba2_generation_convolution": DatasheetClass(3.8, 0.66),
        "mamba2_context_convolution": DatasheetClass(5.2, 0.63),
        # Kimi delta attention's, whose state is a matrix a head in float32 as well
        "mamba2_generation_recurrence": DatasheetClass(3.3, 0.9),
        "mamba2_context_recurrence": DatasheetClass(21.0, 0.42),
    }
    keys = (
        *LAYER_COLUMNS,
        Column("num_heads", "int", "", "heads on one GPU"),
        Column("head_dim", "int", "", "width of one head"),
        Column("state_dim", "int", "", "states of each of a head's channels"),
        Column("num_groups", "int", "", "groups of heads that share B and C"),
        Column("chunk_size", "int", "", "tokens that a prefill takes at a time"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {**StateOperator.defaults, "chunk_size": 128}
    holdouts = (
        HoldoutGrid("mamba2", "every second (context)", {}, {"phase": "context"}),
        HoldoutGrid("mamba2", "every second (generation)", {}, {"phase": "generation"}),
    )
    coverages = (HoldoutGrid("mamba2", "all", {}, {}),)
    package_files = (
        PackageFile(
            "linear_attention",
            "mamba2_perf",
            (*PACKAGE_COLUMNS, *size_columns(*_SIZES.values())),
            _rows,
            RUN,
        ),
    )

    def channels(self, columns: Columns) -> Array:
        """Inputs of all heads, B and C of all groups."""
        c = columns
        return np.asarray(c["num_heads"] * c["head_dim"] + 2 * c["num_groups"] * c["state_dim"])

    def state(self, columns: Columns) -> Array:
        """A matrix a head."""
        c = columns
        return np.asarray(c["num_heads"] * c["head_dim"] * c["state_dim"], np.float64)

    def flops_of_state(self) -> float:
        """Decay, input and output: the last two a multiply-add each."""
        return 5.0

    def token_bytes(self, columns: Columns) -> Array:
        """Inputs, B, C, outputs, and a step a head."""
        c = columns
        outputs = c["num_heads"] * c["head_dim"]
        return np.asarray(ACTIVATION_BYTES * (self.channels(c) + outputs) + GATE_BYTES * c["num_heads"])

    def state_width(self, columns: Columns) -> Array:
        """Bytes of an element of the state."""
        return np.where(columns["part"] == SHORT_RECURRENCE, ACTIVATION_BYTES, self.state_bytes)

    def check_key(self, key: Key) -> None:
        """Refuse a phase or part that there is not."""
        super().check_key((key[0], RECURRENCE, *key[2:]) if key[1] == SHORT_RECURRENCE else key)

    # -- in steps ------------------------------------------------------------------------------------

    def datasheet_of(self, key: Key) -> DatasheetClass:
        """By phase and part."""
        phase = "context" if key[0] == "context" else "generation"
        return self.datasheets[f"mamba2_{phase}_{RECURRENCE if key[1] == SHORT_RECURRENCE else key[1]}"]

    def is_modelled_unasked(self, key: Key) -> bool:
        """No table has the recurrence, and not every GPU a convolution."""
        return True

    def lent_share(self, tables: Tables, wanted: Key, lender: Key, sizes: Mapping[str, Floats]) -> Floats:
        """Convolutions of prompts run a block of threads a sequence and channel, whatever its tokens."""
        if wanted[0] != "context" or wanted[1] != CONVOLUTION:
            return super().lent_share(tables, wanted, lender, sizes)
        own, theirs = (
            self.channels(sizes_as_floats(self.columns_at(key, self.coordinates(sizes), None)))
            for key in (wanted, lender)
        )
        return np.asarray(own / theirs, np.float64)


MAMBA2: Final = Mamba2()

OPERATORS: Final = (
    GDN,
    KDA,
    MAMBA2,
)
