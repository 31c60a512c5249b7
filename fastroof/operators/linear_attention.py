"""Linear attention and state space models: layers with a state of fixed size instead of a KV cache.

A layer runs a short causal convolution over its channels, then a recurrence: gated delta rule (``gdn``,
Qwen3-Next and Qwen3.5), Kimi delta attention (``kda``) or Mamba-2. Their times add up. Part ``all`` is the
fused kernel of both if it was measured, else the sum of the parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.columns import ORIGIN_BORROWED, Column
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.external_rows import (
    MEASURED,
    RUN,
    ExternalRows,
    PackageFile,
    Raw,
    package_rows,
    size_columns,
    text_columns,
    version_order,
)
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    Key,
    RowSource,
    every_second,
    is_measured,
    sizes_as_floats,
)
from fastroof.operators.ragged import LENGTHS, KernelDonor, RaggedOperator, WorkPart, kernel_donor
from fastroof.units import ACTIVATION_BYTES

ALL: Final = "all"
CONVOLUTION: Final = "convolution"
RECURRENCE: Final = "recurrence"
FUSED: Final = "fused"

FUSED_KERNELS: Final = ("fused_kda_decode", "kda_fused_decode")
"""Kernels that fuse convolution and recurrence."""

ALL_CHANNELS_SINCE: Final = (0, 5, 14)
"""First version of SGLang whose convolution was measured over all channels."""

GATE_BYTES: Final = 4
"""Decays and gates are float32."""


def part_of(kernel: str) -> str:
    """Part of a layer that a kernel of the package runs."""
    if kernel in FUSED_KERNELS:
        return FUSED
    return CONVOLUTION if kernel.startswith("causal_conv1d") else RECURRENCE


def parts_of_rows(kernels: Array) -> Array:
    """Part of a layer of each row of the package, by its kernel."""
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


def _state_rows(raw: Raw, **sizes: str) -> ExternalRows:
    part = parts_of_rows(raw["kernel_source"])
    named = {"conv_width": "d_conv", "q_len": "seq_len", **sizes}
    return package_rows(raw, "phase", "batch_size", part=part, **named)


class StateOperator(RaggedOperator):
    """Parts of a layer with a state, looked up along batch and new tokens."""

    axes = _AXES
    state_bytes: ClassVar[float]
    note = (
        "rows are parts of a layer: convolution and recurrence add up, and a fused row is both. vLLM's "
        "convolutions of prompts were launched by the host, not replayed from a CUDA graph"
    )
    borrowable_sizes = frozenset({"num_heads", "num_k_heads", "num_v_heads"})
    defaults: ClassVar[Mapping[str, Any]] = {"phase": "generation", "part": ALL, "conv_width": 4, "q_len": 1}

    # -- sizes of a layer ----------------------------------------------------------------------------

    @abstractmethod
    def channels(self, columns: Columns) -> Array:
        """Channels of the convolution."""

    @abstractmethod
    def state(self, columns: Columns) -> Array:
        """Elements of one sequence's state."""

    @abstractmethod
    def flops_of_state(self) -> float:
        """FLOPs of the recurrence per token and element of the state."""

    @abstractmethod
    def token_bytes(self, columns: Columns) -> Array:
        """Bytes of the recurrence's inputs and outputs per token."""

    def state_width(self, columns: Columns) -> Any:
        """Bytes per element of the state."""
        return self.state_bytes

    # -- work ----------------------------------------------------------------------------------------

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Taps of the convolution and the plain recurrence; chunked kernels compute more."""
        c = sizes_as_floats(columns)
        tokens = c["batch_size"] * c["q_len"]
        convolution = 2.0 * tokens * c["conv_width"] * self.channels(c)
        recurrence = self.flops_of_state() * tokens * self.state(c)
        both = np.where(c["part"] == CONVOLUTION, 0.0, recurrence) + np.where(
            (c["part"] == CONVOLUTION) | (c["part"] == FUSED), convolution, 0.0
        )
        return [WorkPart(np.asarray(both), "bf16")]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Tokens in and out, and states: read once, written once or after every draft token."""
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
        """One new token in decode; a prompt's prefix is in its state."""
        return {"batch_size": batch, "q_len": np.ones_like(length) if is_decode else length}

    def step_lengths(self, is_decode: bool, rows: Columns) -> Array:
        """New tokens; decode does not depend on the length."""
        return np.array(LENGTHS) if is_decode else np.asarray(rows["q_len"])

    def verifying(self, key: Key) -> Key | None:
        """Verify kernels read a state once and store it after every token."""
        return ("verify", *key[1:])

    def step_kernels(self, tables: RowSource, key: Key) -> list[KernelDonor]:
        """The fused kernel if it was measured, else convolution and recurrence."""
        return [kernel_donor(tables, self, one) for one in self._kernels(tables, key)]

    def _kernels(self, tables: RowSource, key: Key) -> list[Key]:
        phase, part, *shape = key
        if part != ALL:
            return [key]
        fused = (phase, FUSED, *shape)
        if is_measured(tables, self.name, fused):
            return [fused]
        return [(phase, name, *shape) for name in (CONVOLUTION, RECURRENCE)]

    def kernel_of(self, key: Key, donor: Key) -> Key:
        """The same part as the donor."""
        return (key[0], donor[1], *key[2:])

    # -- lookups -------------------------------------------------------------------------------------

    def check_key(self, key: Key) -> None:
        """Reject an unknown phase or part."""
        phase, part = key[0], key[1]
        if phase not in ("context", "generation", "verify"):
            raise LookupInputError(f"unknown phase {phase!r}: use context, generation or verify")
        if part not in (ALL, CONVOLUTION, RECURRENCE, FUSED):
            raise LookupInputError(f"unknown part {part!r}: use all, convolution, recurrence or fused")

    def check_sizes(self, sizes: Mapping[str, Floats]) -> None:
        """Accept all sizes."""

    def parts_of(self, tables: RowSource, key: Key) -> list[Key]:
        """Measured kernels whose times add up to that of a key."""
        kernels = self._kernels(tables, key)
        have = [is_measured(tables, self.name, one) for one in kernels]
        if any(have) and not all(have):
            there, missing = (kernels[have.index(is_there)][1] for is_there in (True, False))
            raise MissingTableError(
                f"{tables.gpu.name} has only the {there} of {self.name} in phase {key[0]}, no {missing}: "
                f"look up part={there!r}"
            )
        return kernels

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up one part, or the sum of all parts."""
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
            if tables.is_foreign(tables.serving(self.name, kernel)):
                np.maximum(one[2], ORIGIN_BORROWED, out=one[2])
            out += one[0]
            peak_us += one[0] * one[1]
            np.maximum(origin, one[2], out=origin)
        np.divide(peak_us, out, out=mfu)

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """Relative standard error; errors of parts are independent."""
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
    """Rows of TensorRT-LLM, and of SGLang before 0.5.14, whose convolution covers only the keys' channels.

    64 heads of values take as long as 16: with all channels 2.5 to 5 times the bandwidth, with the keys'
    0.84.
    """
    rows = len(raw["phase"])
    engines, versions = (raw.get(name, np.full(rows, "", object)) for name in ("framework", "version"))
    old = {v: version_order(v) < ALL_CHANNELS_SINCE for v in set(versions)}
    is_old = np.array([old[version] for version in versions], bool)
    engine = np.char.lower(engines.astype(str))
    return np.asarray((engine == "trtllm") | ((engine == "sglang") & is_old))


def _delta_rows(raw: Raw) -> ExternalRows:
    # models of equal heads were measured separately; d_model does not matter to these kernels
    rows = _state_rows(raw, **{name: name for name in _DELTA_SIZES})
    narrow = (rows.columns["part"] == CONVOLUTION) & _convolves_keys_alone(raw)
    return rows.without({"convolution over the keys alone, not over queries and values too": narrow})


class DeltaRule(StateOperator):
    """Recurrences with the delta rule: the state is corrected by its prediction error."""

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
        """A matrix per value head."""
        c = columns
        return np.asarray(c["num_v_heads"] * c["head_k_dim"] * c["head_v_dim"], np.float64)

    def flops_of_state(self) -> float:
        """1 for the decay, 2 each for prediction, correction and query."""
        return 7.0

    def token_bytes(self, columns: Columns) -> Array:
        """Queries, keys, values, outputs and gates."""
        c = columns
        outputs = c["num_v_heads"] * c["head_v_dim"]
        gates = c["num_v_heads"] * (c["head_k_dim"] if self.gate_per_channel else 1)
        width = ACTIVATION_BYTES if self.gate_per_channel else GATE_BYTES
        return np.asarray(ACTIVATION_BYTES * (self.channels(c) + outputs) + width * gates)


class Gdn(DeltaRule):
    """Gated delta rule: one decay per head."""

    name = "gdn"
    rank = 82
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"gdn": DatasheetClass(3.4, 0.67)}
    summary = "Gated delta rule with its convolution."
    about = "Part all is the sum of convolution and recurrence."
    # bf16 in TensorRT-LLM: float32 would need 1.0 to 1.2 times the bandwidth. vLLM and SGLang decode in the
    # same time, 0.8 to 0.9 of the bandwidth with float32
    state_bytes = 2
    gate_per_channel = False
    defaults: ClassVar[Mapping[str, Any]] = {
        **StateOperator.defaults, "head_k_dim": 128, "head_v_dim": 128,
    }  # fmt: skip
    holdouts = every_second("gdn", "phase", "context", "generation")
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
    """Kimi delta attention: one decay per channel."""

    name = "kda"
    rank = 83
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"kda": DatasheetClass(6.4, 0.37)}
    summary = "Kimi delta attention with its convolution."
    about = (
        "Part all is the fused kernel if measured (engines run it unless they speculate), else the sum of "
        "convolution and recurrence. Phase verify checks q-len draft tokens."
    )
    state_bytes = 4
    gate_per_channel = True
    defaults = Gdn.defaults
    holdouts = every_second("kda", "phase", "context", "generation", "verify")
    package_files = (
        PackageFile("kda", "kda_perf", (*PACKAGE_COLUMNS, *size_columns(*_DELTA_SIZES)), _delta_rows, RUN),
    )


GDN: Final = Gdn()
KDA: Final = Kda()


SHORT_RECURRENCE: Final = "recurrence_16bit"
"""The recurrence with a 16-bit state, modelled like the other one."""

_MAMBA2_SIZES: Final = {
    "num_heads": "nheads",
    "head_dim": "head_dim",
    "state_dim": "d_state",
    "num_groups": "n_groups",
    "chunk_size": "chunk_size",
}


class Mamba2(StateOperator):
    """Mamba-2; public tables only have its convolution, the recurrence is modelled from the datasheet."""

    name = "mamba2"
    rank = 84
    summary = "Mamba-2 with its convolution."
    # float32 by default
    state_bytes = 4
    borrowable_sizes = frozenset({"num_heads", "state_dim", "num_groups", "chunk_size"})
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "mamba2_generation_convolution": DatasheetClass(3.8, 0.66),
        "mamba2_context_convolution": DatasheetClass(5.2, 0.63),
        # from Kimi delta attention, whose state is also a float32 matrix per head
        "mamba2_generation_recurrence": DatasheetClass(3.3, 0.9),
        "mamba2_context_recurrence": DatasheetClass(21.0, 0.42),
    }
    keys = (
        *LAYER_COLUMNS,
        Column("num_heads", "int", "", "heads on one GPU"),
        Column("head_dim", "int", "", "width of one head"),
        Column("state_dim", "int", "", "states of each of a head's channels"),
        Column("num_groups", "int", "", "groups of heads that share B and C"),
        Column("chunk_size", "int", "", "tokens per chunk of prefill"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {**StateOperator.defaults, "chunk_size": 128}
    holdouts = every_second("mamba2", "phase", "context", "generation")
    package_files = (
        PackageFile(
            "linear_attention",
            "mamba2_perf",
            (*PACKAGE_COLUMNS, *size_columns(*_MAMBA2_SIZES.values())),
            lambda raw: _state_rows(raw, **_MAMBA2_SIZES),
            RUN,
        ),
    )

    def channels(self, columns: Columns) -> Array:
        """Inputs of all heads, B and C of all groups."""
        c = columns
        return np.asarray(c["num_heads"] * c["head_dim"] + 2 * c["num_groups"] * c["state_dim"])

    def state(self, columns: Columns) -> Array:
        """A matrix per head."""
        c = columns
        return np.asarray(c["num_heads"] * c["head_dim"] * c["state_dim"], np.float64)

    def flops_of_state(self) -> float:
        """1 for the decay, 2 each for input and output."""
        return 5.0

    def token_bytes(self, columns: Columns) -> Array:
        """Inputs, B, C, outputs, and one step per head."""
        c = columns
        outputs = c["num_heads"] * c["head_dim"]
        return np.asarray(ACTIVATION_BYTES * (self.channels(c) + outputs) + GATE_BYTES * c["num_heads"])

    def state_width(self, columns: Columns) -> Array:
        """Bytes per element of the state."""
        return np.where(columns["part"] == SHORT_RECURRENCE, ACTIVATION_BYTES, self.state_bytes)

    def check_key(self, key: Key) -> None:
        """Reject an unknown phase or part."""
        super().check_key((key[0], RECURRENCE, *key[2:]) if key[1] == SHORT_RECURRENCE else key)

    # -- in steps ------------------------------------------------------------------------------------

    def datasheet_of(self, key: Key) -> DatasheetClass:
        """Class of the phase and part."""
        phase = "context" if key[0] == "context" else "generation"
        return self.datasheets[f"mamba2_{phase}_{RECURRENCE if key[1] == SHORT_RECURRENCE else key[1]}"]

    def is_modelled_unasked(self, key: Key) -> bool:
        """True: no table has the recurrence, and not every GPU a convolution."""
        return True

    def donor_ratio(self, tables: RowSource, target: Key, donor: Key, sizes: Mapping[str, Floats]) -> Floats:
        """Convolutions of prompts scale with channels: one thread block per sequence and channel."""
        if target[0] != "context" or target[1] != CONVOLUTION:
            return super().donor_ratio(tables, target, donor, sizes)
        own, theirs = (
            self.channels(sizes_as_floats(self.columns_at(key, self.coordinates(sizes), None)))
            for key in (target, donor)
        )
        return np.asarray(own / theirs, np.float64)


MAMBA2: Final = Mamba2()

OPERATORS: Final = (
    GDN,
    KDA,
    MAMBA2,
)
