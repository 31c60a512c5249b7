"""Expert dispatch: tokens sent to experts on other GPUs and back; MegaMoE does it in the experts' kernel.

Two calls per layer, by phase: ``dispatch`` sends each token to the GPUs of its experts, ``combine`` brings
the outputs back. ``library`` names one of the alternative kernels (DeepEP's low-latency and high-throughput
kernels, TensorRT-LLM's over NVLink). Tokens are those of one GPU, unlike in :mod:`fastroof.operators.moe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError, PlanError
from fastroof.operators.calls import Dispatch, Experts
from fastroof.operators.dispatch_borrowing import (
    DEFAULT_DTYPE,
    INDEX_BYTES,
    LOW_LATENCY_OVER_NODES,
    OTHER_NODES,
    DispatchDonor,
    borrowed_nodes,
    crossing_bytes,
    dispatch_donor,
    element_bytes_of,
    is_low_latency,
    row_bytes_of,
    sent_to,
)
from fastroof.operators.external_rows import (
    LATENCY_MS,
    RUN,
    ExternalRows,
    PackageFile,
    Raw,
    constant_text,
    dtype_names,
    measured_us,
    size_columns,
    text_columns,
    unknown_dtypes,
)
from fastroof.operators.link_groups import BORROWED_GROUP, OVER_NODES, inter_node_us, placed
from fastroof.operators.moe import EXPERT_KEYS, MOE, MoeOperator
from fastroof.operators.moe_work import check_routed, nodes_of_experts, tokens_to_reach_all
from fastroof.operators.operator import (
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    Real,
    RowSource,
    SourceTable,
    as_floats,
    by_word,
)
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes, SizedOperator
from fastroof.operators.wide_experts import EXPERT_COLUMNS, GLOBAL_TOKENS, PHASE, GlobalExperts
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import DTYPE_BYTES, US_PER_S

GPUS_PER_NODE: Final = 8
GPUS_PER_TRAY: Final = 4
"""GPUs in a node of GB200 and GB300, by the expert-parallel size of one node."""


def dispatch_wire_bytes(num_tokens: Real, row_bytes: Real, topk: Real, num_gpus: Real) -> Floats:
    """Bytes that a GPU sends: each token once to every other GPU that has one of its experts.

    The experts of an evenly routed token reach ``g (1 - (1 - 1/g)^topk)`` of g GPUs.
    """
    g = as_floats(num_gpus)
    reached = g * (1.0 - (1.0 - 1.0 / g) ** as_floats(topk))
    return as_floats(num_tokens) * as_floats(row_bytes) * reached * (g - 1.0) / g


def _gpus_of_nodes(raw: Raw) -> Array:
    devices = raw.get("device", np.full(len(raw["node_num"]), "", object)).astype(str)
    is_tray = (np.char.find(devices, "GB200") >= 0) | (np.char.find(devices, "GB300") >= 0)
    return np.asarray(raw["node_num"] * np.where(is_tray, GPUS_PER_TRAY, GPUS_PER_NODE))


def _moe_a2a(raw: Raw) -> ExternalRows:
    columns = {
        "library": raw["comm_backend"],
        "comm_dtype": dtype_names(raw["comm_dtype"]),
        "num_gpus": raw["ep_size"],
        "num_nodes": raw["node_num"],
        # microseconds, unlike the latency of every other file
        "latency_us": raw["latency"],
        "kernel": raw["kernel_source"],
        **{name: raw[name] for name in ("phase", "hidden_size", "topk", "num_experts", "sms", "num_tokens")},
    }
    columns["hidden"] = columns.pop("hidden_size")
    return ExternalRows(columns, {})


def _deepep_phase(raw: Raw, library: str, phase: str, latency_us: Array, sms: Array) -> dict[str, Array]:
    rows = len(latency_us)
    return {
        "library": constant_text(library, rows),
        "phase": constant_text(phase, rows),
        "comm_dtype": constant_text(DEFAULT_DTYPE, rows),
        "hidden": raw["hidden_size"],
        "topk": raw["num_topk"],
        "num_experts": raw["num_experts"],
        "num_gpus": _gpus_of_nodes(raw),
        "num_nodes": raw["node_num"],
        "sms": sms,
        "num_tokens": raw["num_token"],
        "latency_us": latency_us,
        "kernel": raw["kernel_source"],
    }


def _both_phases(dispatch: dict[str, Array], combine: dict[str, Array]) -> ExternalRows:
    return ExternalRows({n: np.concatenate([dispatch[n], combine[n]]) for n in dispatch}, {})


def _deepep_low_latency(raw: Raw) -> ExternalRows:
    phases = (
        _deepep_phase(raw, "deepep_ll", phase, raw[f"{phase}_avg_t_us"], np.zeros_like(raw["num_token"]))
        for phase in ("dispatch", "combine")
    )
    return _both_phases(*phases)


def _deepep_normal(raw: Raw) -> ExternalRows:
    # GPUs first exchange the sizes (notify), which is part of the call
    phases = (
        _deepep_phase(
            raw,
            "deepep_normal",
            phase,
            raw[f"{phase}_transmit_us"] + raw[f"{phase}_notify_us"],
            raw[f"{phase}_sms"],
        )
        for phase in ("dispatch", "combine")
    )
    return _both_phases(*phases)


_TRTLLM_LIBRARIES: Final = {"NVLinkOneSided": "nvlink_one_sided", "NVLinkTwoSided": "nvlink_two_sided"}


def _trtllm_alltoall(raw: Raw) -> ExternalRows:
    kernel, rows = raw["kernel_source"], len(raw["kernel_source"])
    gpus = raw["moe_ep_size"]
    columns = {
        "library": np.array([_TRTLLM_LIBRARIES.get(word, word) for word in kernel], object),
        "phase": np.array([word.removeprefix("alltoall_") for word in raw["op_name"]], object),
        "comm_dtype": dtype_names(raw["moe_dtype"]),
        "hidden": raw["hidden_size"],
        "topk": raw["topk"],
        "num_experts": raw["num_experts"],
        "num_gpus": gpus,
        # trays of four GPUs; all 72 share the same switches
        "num_nodes": -(-gpus // GPUS_PER_TRAY),
        "sms": np.zeros(rows, np.int64),
        "num_tokens": raw["num_tokens"],
        **measured_us(raw),
    }
    uneven = {
        f"routed by {d}": raw["distribution"] == d for d in sorted(set(raw["distribution"]) - {"balanced"})
    }
    return ExternalRows(columns, uneven)


_LATENCY_US: Final = Column("latency", "float", "us", "measured latency")
_DEEPEP_SIZES: Final = ("node_num", "hidden_size", "num_token", "num_topk", "num_experts")


def _times_us(*names: str, minimum: int = 1) -> tuple[Column, ...]:
    return tuple(Column(name, "float", "us", "measured time", minimum) for name in names)


class ExpertDispatch(SizedOperator, PerRowOperator):
    """One phase of exchanging tokens between GPUs that share experts; B is linear in the tokens."""

    name = "expert_dispatch"
    rank = 62
    summary = "Tokens to experts of other GPUs and back."
    about = (
        "Phases are dispatch and combine (nvlink_two_sided also prepare and combine_low_precision): "
        "two calls per layer. Tokens are those of one GPU. sms 0: the library's default SMs."
    )
    keys = (
        Column(
            "library", "text", "", "deepep_ll, deepep_normal, deepep_ht, trtllm_deepep_ll, nvlink_one_sided"
        ),
        Column("phase", "text", "", "dispatch or combine"),
        Column("comm_dtype", "text", "", "dtype on the wire; default: the library's own"),
        Column("hidden", "int", "", "model width"),
        Column("topk", "int", "", "experts a token is routed to"),
        Column("num_experts", "int", "", "experts of the layer"),
        Column("num_gpus", "int", "", "GPUs that share the experts", 2),
        Column("num_nodes", "int", "", "nodes that the GPUs are in"),
        Column("sms", "int", "", "SMs that the kernel may use, 0 for the library's default", 0),
    )
    axes = (Column("num_tokens", "int", "tokens", "tokens of one GPU"),)
    defaults: ClassVar[Mapping[str, Any]] = {"comm_dtype": DEFAULT_DTYPE, "num_nodes": 1, "sms": 0}
    over_link = True
    is_linear = True
    # SGLang's H100 rows of DeepEP: the smallest, and those of the high-throughput kernels beyond 500 us.
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"expert_dispatch": DatasheetClass(9.2, 0.34)}
    holdouts = (
        HoldoutGrid("expert_dispatch", "every second (dispatch)", {}, {"phase": "dispatch"}),
        HoldoutGrid("expert_dispatch", "every second (combine)", {}, {"phase": "combine"}),
    )
    package_files = (
        PackageFile(
            "comm",
            "moe_a2a_perf",
            (
                *text_columns("comm_backend", "phase", "comm_dtype", "kernel_source"),
                *size_columns("ep_size", "node_num", "hidden_size", "topk", "num_experts", "num_tokens"),
                *size_columns("sms", minimum=0),
                _LATENCY_US,
            ),
            _moe_a2a,
            RUN,
        ),
        PackageFile(
            "comm",
            "wideep_deepep_ll_perf",
            (
                *text_columns("kernel_source"),
                *size_columns(*_DEEPEP_SIZES),
                *_times_us("dispatch_avg_t_us", "combine_avg_t_us"),
            ),
            _deepep_low_latency,
            RUN,
        ),
        PackageFile(
            "comm",
            "wideep_deepep_normal_perf",
            (
                *text_columns("kernel_source"),
                *size_columns(*_DEEPEP_SIZES, "dispatch_sms", "combine_sms"),
                *_times_us("dispatch_transmit_us", "combine_transmit_us"),
                *_times_us("dispatch_notify_us", "combine_notify_us", minimum=0),
            ),
            _deepep_normal,
            RUN,
        ),
        PackageFile(
            "comm",
            "trtllm_alltoall_perf",
            (
                *text_columns("op_name", "kernel_source", "moe_dtype", "distribution"),
                *size_columns("num_tokens", "hidden_size", "topk", "num_experts", "moe_ep_size"),
                LATENCY_MS,
            ),
            _trtllm_alltoall,
            RUN,
        ),
    )

    def moved_bytes(self, columns: Columns) -> Floats:
        """Every token once to each other GPU that has one of its experts."""
        phase, dtype = (columns[name].astype(str) for name in ("phase", "comm_dtype"))
        is_prepare = phase == "prepare"
        sent = np.char.add(np.char.add(columns["library"].astype(str), " "), np.char.add(phase, " "))
        element = by_word(np.char.add(sent, dtype), lambda words: element_bytes_of(*words.split(" ")))
        row = columns["hidden"] * element
        row = np.where(is_prepare, INDEX_BYTES * columns["topk"], row)
        return dispatch_wire_bytes(columns["num_tokens"], row, columns["topk"], columns["num_gpus"])

    def roofline(self, key: Key, gpu: GpuSpec, launch_us: float) -> Callable[[Any], Floats]:
        """Launch plus the bytes that a GPU sends over the link."""
        library, phase, comm_dtype, hidden, topk, _, num_gpus, _, _ = key
        row = row_bytes_of(library, phase, comm_dtype, hidden, topk)
        link = gpu.nvlink_bytes_per_s / US_PER_S

        def bound_us(num_tokens: Any) -> Floats:
            return launch_us + dispatch_wire_bytes(num_tokens, row, topk, num_gpus) / link

        return bound_us

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Note the units of the files."""
        return {
            "note": "moe_a2a and DeepEP have microseconds in the package, trtllm_alltoall milliseconds; of "
            "deepep_normal, telling how much will come is added to sending it. Tokens are those of one GPU"
        }

    def check_key(self, key: Key) -> None:
        """Reject a group of one GPU, nodes without a GPU, and topk above the number of experts."""
        _, _, _, _, topk, num_experts, num_gpus, num_nodes, _ = key
        check_routed(topk, num_experts)
        if num_gpus == 1:
            raise LookupInputError("expert_dispatch needs num_gpus of at least 2, got 1")
        if num_nodes > num_gpus:
            raise LookupInputError(f"num_nodes {num_nodes} is more than num_gpus {num_gpus}")

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: Dispatch) -> RowCost:
        """Bytes that a GPU sends per row of the rank."""
        row = row_bytes_of(call.library, call.phase, call.comm_dtype, call.hidden, call.topk)
        return RowCost(0.0, row * sent_to(call.num_gpus, call.topk) / call.shared_by, 0.0, "bf16")

    def row_key(self, call: Dispatch) -> Key:
        """Kernel, and the number of GPUs that share the rows."""
        shape = (call.hidden, call.topk, call.num_experts, call.num_gpus)
        return (call.library, call.phase, call.comm_dtype, *shape, call.shared_by)

    def _donor(self, call: Dispatch, tables: RowSource) -> tuple[DispatchDonor, RowSource]:
        """Kernel that serves a call, and its tables: these, or those of a GPU with the same links."""
        found = dispatch_donor(call, tables, self.name)
        if found is not None:
            return found, tables
        alike = tables.of_like_links()
        donor = None if alike is None else dispatch_donor(call, alike, self.name)
        if donor is None or alike is None:
            nodes = -(-call.num_gpus // tables.gpu.linked_gpus)
            tables.serving(self.name, (*self.row_key(call)[:-1], nodes, 0))
            raise AssertionError("a kernel that is served must have a donor")
        return donor._replace(is_own=False), alike

    def serving(self, call: Dispatch, tables: RowSource) -> SourceTable:
        """Table of the kernel, or of the nearest of its kind."""
        found, where = self._donor(call, tables)
        table = where.serving(self.name, tuple(found.key))
        return table if where is tables else table.renamed(f"{where.gpu.name} {table.source}")

    def row_nodes(self, call: Dispatch, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Curve of the kernel in rows of the rank; donors at equal bytes, with the part across nodes."""
        found, where = self._donor(call, tables)
        if options.method == "roofline":
            curve = self.packed(where, tuple(found.key)).curve
            made = borrowed_nodes(found, curve.axis, curve.value, curve.flag, tables.gpu)
        else:
            tokens = np.rint(np.arange(1, max_rows + 1) * found.tokens / call.shared_by)
            sizes = [np.maximum(tokens, 1.0)]
            at = self.every_row_nodes(where, options.method, tuple(found.key), sizes, 0.0)
            made = borrowed_nodes(
                found, at.axis * found.tokens / call.shared_by, at.value, at.flag, tables.gpu
            )
        return made._replace(axis=made.axis * call.shared_by)

    def table_points(
        self, call: Dispatch, tables: RowSource, rows: Floats
    ) -> tuple[Key, list[Floats]] | None:
        """Kernel that is read and its tokens at numbers of rows; None if it is another GPU's."""
        found, where = self._donor(call, tables)
        if where is not tables:
            return None
        return tuple(found.key), [rows / call.shared_by * found.tokens]

    def row_variance(self, call: Dispatch, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the curve that is read, of borrowing, and of other nodes."""
        found, where = self._donor(call, tables)
        tokens = [rows / call.shared_by * found.tokens]
        variance = relative_variance(self.local_errors(where, tuple(found.key)), tokens)
        if not found.is_own:
            variance = variance + BORROWED_GROUP**2
        if not found.crossing_bytes and not found.is_other_nodes:
            return variance
        others = OTHER_NODES if found.is_other_nodes else OVER_NODES
        return variance + (LOW_LATENCY_OVER_NODES if is_low_latency(call.library) else others) ** 2

    def row_datasheet(self, call: Dispatch) -> DatasheetClass:
        """Launch floor and efficiency of the only class."""
        return self.datasheets[self.name]

    def datasheet_nodes(self, call: Dispatch, gpu: GpuSpec) -> RowNodes:
        """Bytes at the link's bandwidth times the efficiency, plus the part across nodes."""
        where = placed(call.num_gpus, 1, gpu)
        made = super().datasheet_nodes(replace(call, num_gpus=where.near), gpu)
        if where.domains == 1:
            return made
        far_us = inter_node_us(made.axis / call.shared_by * crossing_bytes(call, where), 1, gpu)
        return made._replace(
            value=made.value + far_us, launch_us=made.launch_us + float(inter_node_us(0, 1, gpu))
        )


EXPERT_DISPATCH: Final = ExpertDispatch()


_, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _, _MOE_EP, _DISTRIBUTION = EXPERT_KEYS


def _megamoe_rows(raw: Raw) -> ExternalRows:
    dtype = dtype_names(raw["moe_dtype"])
    columns = {
        "dtype": dtype,
        "hidden": raw["hidden_size"],
        "intermediate": raw["inter_size"],
        "moe_ep": raw["moe_ep_size"],
        # num_tokens of the file are one GPU's
        "num_tokens": raw["global_num_tokens"],
        **{name: raw[name] for name in ("topk", "num_experts", "phase", "distribution")},
        **measured_us(raw),
    }
    other = {
        "experts that are split": raw["moe_tp_size"] > 1,
        "shared experts in the kernel": raw["num_fused_shared_experts"] > 0,
    }
    return ExternalRows(columns, unknown_dtypes(dtype) | other)


class MegaMoe(GlobalExperts, PerRowOperator):
    """DeepGEMM's MegaMoE: dispatch, experts and combine in one kernel."""

    name = "megamoe"
    rank = 53
    summary = "Experts over many GPUs, tokens sent too."
    keys = (DTYPE, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _MOE_EP, PHASE, _DISTRIBUTION)
    defaults: ClassVar[Mapping[str, Any]] = {
        "phase": "generation",
        "distribution": "balanced",
        "dtype": "w4a8_mxfp4_mxfp8",
    }
    package_files = (
        PackageFile(
            "moe",
            "dsv4_megamoe_module_perf",
            (
                *EXPERT_COLUMNS,
                *text_columns("phase"),
                *size_columns("global_num_tokens"),
                *size_columns("num_fused_shared_experts", minimum=0),
            ),
            _megamoe_rows,
            RUN,
        ),
    )

    datasheet_error = MoeOperator.datasheet_error

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: Experts) -> RowCost:
        """FLOPs and bytes of the experts."""
        return MOE.row_cost(call)

    def row_work(self, call: Experts, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs and bytes of the experts that the tokens are expected to reach."""
        return MOE.row_work(call, rows)

    def row_key(self, call: Experts) -> Key:
        """Key of the kernel."""
        layer = (call.hidden, call.intermediate, call.topk, call.num_experts)
        return (call.dtype, *layer, call.moe_ep, call.phase, call.distribution)

    def serving(self, call: Experts, tables: RowSource) -> SourceTable:
        """Table of the kernel itself; nothing is borrowed, since the number of GPUs matters."""
        return tables.serving(self.name, self.row_key(call))

    def row_nodes(self, call: Experts, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Curve of the kernel, with a node at every number of tokens until they reach all experts."""
        if options.method != "roofline":
            raise PlanError(f"megamoe supports method='roofline' only, got {options.method!r}")
        packed = self.packed(tables, self.row_key(call))
        return nodes_of_experts(packed, tokens_to_reach_all(call.topk, call.num_experts))

    def table_points(self, call: Experts, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]]:
        """Kernel and tokens."""
        return self.row_key(call), [rows]

    def row_variance(self, call: Experts, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the kernel's curve."""
        return relative_variance(self.local_errors(tables, self.row_key(call)), [rows])

    def row_datasheet(self, call: Experts) -> DatasheetClass:
        """Launch floor and efficiency of experts."""
        return MOE.row_datasheet(call)

    def datasheet_nodes(self, call: Experts, gpu: GpuSpec) -> RowNodes:
        """Time of the experts or the link, whichever is longer, since the kernel overlaps them."""
        made = MOE.datasheet_nodes(replace(call, phase=""), gpu)
        row_bytes = call.hidden * (DTYPE_BYTES["fp8"] + DTYPE_BYTES["bf16"])
        sent = dispatch_wire_bytes(made.axis / call.moe_ep, row_bytes, call.topk, call.moe_ep)
        link = EXPERT_DISPATCH.datasheets[EXPERT_DISPATCH.name]
        sending_us = link.launch_us + sent / gpu.nvlink_bytes_per_s / link.efficiency * US_PER_S
        return made._replace(value=np.maximum(made.value, sending_us))

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Note whose tokens are counted."""
        return {"note": f"{GLOBAL_TOKENS}: global_num_tokens of the file, whose num_tokens are one GPU's"}


MEGAMOE: Final = MegaMoe()

OPERATORS: Final = (
    EXPERT_DISPATCH,
    MEGAMOE,
)
