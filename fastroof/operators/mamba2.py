"""Mamba-2: a layer's convolution, which tables have, and its recurrence, which none has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.operators.foreign_rows import RUN, ForeignRows, PackageFile, Raw, measured_us, size_columns
from fastroof.operators.linear_attention import (
    CONVOLUTION,
    GATE_BYTES,
    LAYER_COLUMNS,
    PACKAGE_COLUMNS,
    RECURRENCE,
    StateOperator,
    parts_of_rows,
)
from fastroof.operators.operator import Columns, DatasheetClass, HoldoutGrid, Key
from fastroof.operators.work import sizes_as_floats
from fastroof.units import ACTIVATION_BYTES

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["MAMBA2", "OPERATORS", "SHORT_RECURRENCE", "Mamba2"]

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
OPERATORS: Final = (MAMBA2,)
