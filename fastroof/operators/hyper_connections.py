"""Manifold-constrained hyper-connections: several residual streams, mixed before and after a sublayer.

Before attention and before the MLP the streams are combined into one input (``pre``, with weights made doubly
stochastic by Sinkhorn iterations); afterwards the output is added to all of them (``post``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import DTYPE, Column
from fastroof.operators import external_rows as external
from fastroof.operators.calls import HyperConnection
from fastroof.operators.operator import Columns, DatasheetClass, Key, Real, as_floats, every_second
from fastroof.operators.row_operator import KernelOperator, RowCost
from fastroof.units import ACTIVATION_BYTES

WEIGHT_BYTES: Final = 4
"""Bytes per mixing weight: float32."""


def hyper_connection_flops(stage: str, num_tokens: Real, hidden: Real, streams: Real, sites: Real) -> Floats:
    """FLOPs of all sites: projection to ``streams (streams + 2)`` weights, and mixing."""
    tokens, s = as_floats(num_tokens) * as_floats(sites), as_floats(streams)
    width = as_floats(hidden)
    if stage == "pre":
        return 2.0 * tokens * s * width * (s * (s + 2.0) + 1.0)
    return 2.0 * tokens * s * width * (s + 1.0)


def hyper_connection_bytes(stage: str, num_tokens: Real, hidden: Real, streams: Real, sites: Real) -> Floats:
    """Bytes of all sites: streams in and one out (pre), or streams and one in and streams out; weights."""
    s, width = as_floats(streams), as_floats(hidden)
    moved = s + 1.0 if stage == "pre" else 2.0 * s + 1.0
    weights = WEIGHT_BYTES * s * width * s * (s + 2.0) if stage == "pre" else 0.0
    return as_floats(sites) * (ACTIVATION_BYTES * as_floats(num_tokens) * width * moved + weights)


def _package_rows(raw: external.Raw) -> external.ExternalRows:
    return external.package_rows(
        raw,
        "num_tokens",
        dtype=external.constant_text("bf16", len(raw["num_tokens"])),
        stage="op_name",
        hidden="hidden_size",
        streams="hc_mult",
        sinkhorn_iterations="sinkhorn_iters",
        # one latency covers all sites of a layer (attention and MLP)
        sites="num_sites",
    ).without(external.others("stage", raw["op_name"], ("pre", "post")))


class HyperConnections(KernelOperator):
    """Mixing of residual streams around the sublayers of one layer; B is linear in the tokens."""

    name = "hyper_connections"
    rank = 72
    summary = "Residual streams mixed around sublayers."
    about = "A time covers all sites of a layer (attention and MLP), see --sites."
    keys = (
        DTYPE,
        Column("stage", "text", "", "pre or post: before a sublayer, or after it"),
        Column("hidden", "int", "", "model width"),
        Column("streams", "int", "", "residual streams"),
        Column("sinkhorn_iterations", "int", "", "iterations that make the weights doubly stochastic"),
        Column("sites", "int", "", "sublayers that one time covers"),
    )
    axes = (Column("num_tokens", "int", "tokens", "tokens of one GPU"),)
    defaults: ClassVar[Mapping[str, Any]] = {
        "dtype": "bf16",
        "streams": 4,
        "sinkhorn_iterations": 20,
        "sites": 2,
    }
    is_linear = True
    # vLLM on H200: the smallest calls, and the median beyond 500 us
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "hyper_connections_pre": DatasheetClass(17.5, 0.47),
        "hyper_connections_post": DatasheetClass(6.1, 0.87),
    }
    holdouts = every_second("hyper_connections", "stage", "pre", "post")
    note = "a latency is that of all sites of one layer, measured one after the other"
    package_files = (
        external.PackageFile(
            "mhc",
            "mhc_module_perf",
            (
                *external.text_columns("op_name"),
                *external.size_columns("num_tokens", "num_sites", "hc_mult", "hidden_size", "sinkhorn_iters"),
                *external.MEASURED,
            ),
            _package_rows,
        ),
    )

    @staticmethod
    def _of_both(work: Callable[..., Floats], columns: Columns) -> Floats:
        sizes = [columns[name] for name in ("num_tokens", "hidden", "streams", "sites")]
        is_pre = columns["stage"].astype(str) == "pre"
        return np.where(is_pre, work("pre", *sizes), work("post", *sizes))

    def flops(self, columns: Columns) -> Floats:
        """FLOPs of all sites."""
        return self._of_both(hyper_connection_flops, columns)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes of all sites."""
        return self._of_both(hyper_connection_bytes, columns)

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: HyperConnection) -> RowCost:
        """FLOPs and bytes per token at all sites, and the mixing weights."""
        shape = (call.hidden, call.streams, call.sites)
        fixed = float(hyper_connection_bytes(call.stage, 0, *shape))
        per_row = float(hyper_connection_bytes(call.stage, 1, *shape)) - fixed
        return RowCost(float(hyper_connection_flops(call.stage, 1, *shape)), per_row, fixed, call.dtype)

    def row_key(self, call: HyperConnection) -> Key:
        """Key of the kernel."""
        return (
            call.dtype, call.stage, call.hidden, call.streams, call.sinkhorn_iterations, call.sites,
        )  # fmt: skip

    def row_datasheet(self, call: HyperConnection) -> DatasheetClass:
        """Class of the stage."""
        return self.datasheets[f"{self.name}_{call.stage}"]


HYPER_CONNECTIONS: Final = HyperConnections()
OPERATORS: Final = (HYPER_CONNECTIONS,)
