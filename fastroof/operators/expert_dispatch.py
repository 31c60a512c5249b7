"""Expert dispatch: tokens sent to experts on other GPUs and back; MegaMoE does it in the experts' kernel.

Two calls per layer, by phase: ``dispatch`` sends each token to the GPUs of its experts, ``combine`` brings
the outputs back. ``library`` names one of the alternative kernels (DeepEP's low-latency and high-throughput
kernels, TensorRT-LLM's over NVLink). Tokens are those of one GPU, unlike in :mod:`fastroof.operators.moe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError
from fastroof.operators.borrowing import DISPATCH, nearest
from fastroof.operators.calls import Dispatch, Experts
from fastroof.operators.external_rows import (
    LATENCY_MS,
    ExternalRows,
    PackageFile,
    Raw,
    constant_text,
    others,
    package_rows,
    size_columns,
    text_columns,
)
from fastroof.operators.links import OVER_NODES, Far, LinkDonor, LinkOperator, Placement, placed
from fastroof.operators.moe import EXPERT_KEYS
from fastroof.operators.moe_work import (
    DEFAULT_DTYPE,
    HIGH_THROUGHPUT,
    INDEX_BYTES,
    LOW_LATENCY,
    OVER_NVLINK,
    DispatchKey,
    check_routed,
    crossing_bytes,
    dispatch_wire_bytes,
    element_bytes_of,
    sent_bytes,
)
from fastroof.operators.operator import (
    Columns,
    DatasheetClass,
    Key,
    RowSource,
    by_word,
    every_second,
    measured_keys,
)
from fastroof.operators.row_operator import RowCost, RowNodes
from fastroof.operators.wide_experts import EXPERT_COLUMNS, GLOBAL_TOKENS, PHASE, GlobalExperts, expert_rows
from fastroof.units import DTYPE_BYTES, US_PER_S

GPUS_PER_NODE: Final = 8
GPUS_PER_TRAY: Final = 4
"""GPUs in a node of GB200 and GB300, by the expert-parallel size of one node."""

LOW_LATENCY_OVER_NODES: Final = 0.1
"""Relative standard error of low-latency kernels across nodes, including another number of nodes."""

OTHER_NODES: Final = 0.4
"""Relative standard error of high-throughput kernels from another number of nodes (20 to 41 % measured)."""

_PHASES: Final = ("dispatch", "combine")

DEFAULT_SMS: Final = 20
"""SMs that DeepEP uses by default (Buffer.num_sms in its source)."""


def _gpus_of_nodes(raw: Raw) -> Array:
    devices = raw.get("device", np.full(len(raw["node_num"]), "", object)).astype(str)
    is_tray = (np.char.find(devices, "GB200") >= 0) | (np.char.find(devices, "GB300") >= 0)
    return np.asarray(raw["node_num"] * np.where(is_tray, GPUS_PER_TRAY, GPUS_PER_NODE))


def _moe_a2a(raw: Raw) -> ExternalRows:
    return package_rows(
        raw,
        *("phase", "topk", "num_experts", "sms", "num_tokens"),
        library="comm_backend",
        comm_dtype="comm_dtype",
        hidden="hidden_size",
        num_gpus="ep_size",
        num_nodes="node_num",
        # microseconds, unlike the latency of every other file
        latency_us="latency",
    )


def _deepep(raw: Raw, library: str, phases: Mapping[str, tuple[Array, Array]]) -> ExternalRows:
    """Rows of both phases, given their latency and SMs."""
    rows = len(raw["num_token"])
    of_phases = [
        package_rows(
            raw,
            "num_experts",
            library=constant_text(library, rows),
            phase=constant_text(phase, rows),
            comm_dtype=constant_text(DEFAULT_DTYPE, rows),
            hidden="hidden_size",
            topk="num_topk",
            num_gpus=_gpus_of_nodes(raw),
            num_nodes="node_num",
            sms=sms,
            num_tokens="num_token",
            latency_us=latency_us,
        ).columns
        for phase, (latency_us, sms) in phases.items()
    ]
    return ExternalRows({name: np.concatenate([c[name] for c in of_phases]) for name in of_phases[0]}, {})


def _deepep_low_latency(raw: Raw) -> ExternalRows:
    sms = np.zeros_like(raw["num_token"])
    return _deepep(raw, "deepep_ll", {name: (raw[f"{name}_avg_t_us"], sms) for name in _PHASES})


def _deepep_normal(raw: Raw) -> ExternalRows:
    # GPUs first exchange the sizes (notify), which is part of the call
    us = {name: raw[f"{name}_transmit_us"] + raw[f"{name}_notify_us"] for name in _PHASES}
    return _deepep(raw, "deepep_normal", {name: (us[name], raw[f"{name}_sms"]) for name in _PHASES})


_TRTLLM_LIBRARIES: Final = {"NVLinkOneSided": "nvlink_one_sided", "NVLinkTwoSided": "nvlink_two_sided"}


def _trtllm_alltoall(raw: Raw) -> ExternalRows:
    kernel = raw["kernel_source"]
    return package_rows(
        raw,
        *("topk", "num_experts", "num_tokens"),
        library=np.array([_TRTLLM_LIBRARIES.get(word, word) for word in kernel], object),
        phase=np.array([word.removeprefix("alltoall_") for word in raw["op_name"]], object),
        comm_dtype="moe_dtype",
        hidden="hidden_size",
        num_gpus="moe_ep_size",
        # trays of four GPUs; all 72 share the same switches
        num_nodes=-(-raw["moe_ep_size"] // GPUS_PER_TRAY),
        sms=np.zeros(len(kernel), np.int64),
    ).without(others("routed by", raw["distribution"], ("balanced",)))


_LATENCY_US: Final = Column("latency", "float", "us", "measured latency")
_DEEPEP_SIZES: Final = ("node_num", "hidden_size", "num_token", "num_topk", "num_experts")


def _times_us(*names: str, minimum: int = 1) -> tuple[Column, ...]:
    return tuple(Column(name, "float", "us", "measured time", minimum) for name in names)


class ExpertDispatch(LinkOperator):
    """One phase of exchanging tokens between GPUs that share experts; B is linear in the tokens."""

    name = "expert_dispatch"
    rank = 62
    summary = "Tokens to experts of other GPUs and back."
    about = (
        "Phases are dispatch and combine (nvlink_two_sided also prepare and combine_low_precision): "
        "two calls per layer. Tokens are those of one GPU. sms 0: the library's default SMs."
    )
    note = (
        "moe_a2a and DeepEP have microseconds in the package, trtllm_alltoall milliseconds; of "
        "deepep_normal, telling how much will come is added to sending it. Tokens are those of one GPU"
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
    # SGLang's H100 rows of DeepEP: the smallest, and those of the high-throughput kernels beyond 500 us.
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"expert_dispatch": DatasheetClass(9.2, 0.34)}
    holdouts = every_second("expert_dispatch", "phase", "dispatch", "combine")
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
        return RowCost(0.0, sent_bytes(call) / call.shared_by, 0.0, "bf16")

    def row_key(self, call: Dispatch) -> Key:
        """Kernel, and the number of GPUs that share the rows."""
        shape = (call.hidden, call.topk, call.num_experts, call.num_gpus)
        return (call.library, call.phase, call.comm_dtype, *shape, call.shared_by)

    def near_call(self, call: Dispatch, where: Placement) -> Dispatch:
        """The GPUs of one domain."""
        return replace(call, num_gpus=where.near)

    def far(self, call: Dispatch, where: Placement) -> Far:
        """One message, with the bytes that cross."""
        return Far(1, crossing_bytes(call, *where) / call.shared_by)

    def donor(self, call: Dispatch, tables: RowSource) -> LinkDonor:
        """Kernel that serves a call, of these tables or of those of a GPU with the same links."""
        found = self._donor(call, tables)
        if found is None and (alike := tables.of_like_links()) is not None:
            found = self._donor(call, alike)
            found = found and found._replace(is_own=False, others=alike)
        if found is None:
            nodes = -(-call.num_gpus // tables.gpu.linked_gpus)
            tables.serving(self.name, (*self.row_key(call)[:-1], nodes, 0))
            raise AssertionError("a kernel that is served must have a donor")
        return found

    def _donor(self, call: Dispatch, tables: RowSource) -> LinkDonor | None:
        return tables.cached(("dispatch donor", *self.row_key(call)), lambda: self._find_donor(call, tables))

    def _find_donor(self, call: Dispatch, tables: RowSource) -> LinkDonor | None:
        """Find the nearest kernel of the same kind: over as many nodes, else other nodes, else one node."""
        kinds = (LOW_LATENCY, HIGH_THROUGHPUT, OVER_NVLINK)
        libraries = next((kind for kind in kinds if call.library in kind), (call.library,))
        keys = measured_keys(tables, self.name) if tables.has(self.name) else []
        there = [DispatchKey(*key) for key in keys]
        there = [key for key in there if key.phase == call.phase and key.library in libraries]
        if not there:
            return None
        where, linked = self.placed(call, tables.gpu), tables.gpu.linked_gpus
        target = DispatchKey._make((*self.row_key(call)[:-1], where.domains, DEFAULT_SMS))
        is_low_latency = call.library in LOW_LATENCY
        same = there if where.domains == 1 else [key for key in there if key[6:8] == target[6:8]]
        if same:
            key = nearest(target, same, DISPATCH)[0].kernel
            tokens = sent_bytes(call) / sent_bytes(key) / call.shared_by
            return LinkDonor(tuple(key), tokens, key[:7] == target[:7])
        over_nodes = [key for key in there if key.num_gpus > linked and key.num_nodes > 1]
        if over_nodes:
            key = nearest(target, over_nodes, DISPATCH)[0].kernel
            theirs = crossing_bytes(key, *placed(key.num_gpus, 1, tables.gpu))
            tokens = crossing_bytes(call, *where) / theirs / call.shared_by
            error = LOW_LATENCY_OVER_NODES if is_low_latency else OTHER_NODES
            return LinkDonor(tuple(key), tokens, False, error=error)
        of_node = [key for key in there if key.num_gpus <= linked] or there
        key = nearest(target._replace(num_gpus=where.near), of_node, DISPATCH)[0].kernel
        tokens = sent_bytes(self.near_call(call, where)) / sent_bytes(key) / call.shared_by
        if is_low_latency:
            tokens *= where.near / call.num_gpus
        error = LOW_LATENCY_OVER_NODES if is_low_latency else OVER_NODES
        return LinkDonor(tuple(key), tokens, False, far=self.far(call, where), error=error)


EXPERT_DISPATCH: Final = ExpertDispatch()


_, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _, _MOE_EP, _DISTRIBUTION = EXPERT_KEYS


def _megamoe_rows(raw: Raw) -> ExternalRows:
    # num_tokens of the file are one GPU's
    rows = expert_rows(raw, phase="phase", num_tokens="global_num_tokens")
    return rows.without({"shared experts in the kernel": raw["num_fused_shared_experts"] > 0})


class MegaMoe(GlobalExperts):
    """DeepGEMM's MegaMoE: dispatch, experts and combine in one kernel."""

    name = "megamoe"
    rank = 53
    summary = "Experts over many GPUs, tokens sent too."
    note = f"{GLOBAL_TOKENS}: global_num_tokens of the file, whose num_tokens are one GPU's"
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
        ),
    )

    # -- in plans ----------------------------------------------------------------------------------

    def row_key(self, call: Experts) -> Key:
        """Key of the kernel."""
        layer = (call.hidden, call.intermediate, call.topk, call.num_experts)
        return (call.dtype, *layer, call.moe_ep, call.phase, call.distribution)

    def datasheet_nodes(self, call: Experts, gpu: GpuSpec) -> RowNodes:
        """Time of the experts or the link, whichever is longer, since the kernel overlaps them."""
        made = super().datasheet_nodes(call, gpu)
        row_bytes = call.hidden * (DTYPE_BYTES["fp8"] + DTYPE_BYTES["bf16"])
        sent = dispatch_wire_bytes(made.axis / call.moe_ep, row_bytes, call.topk, call.moe_ep)
        link = EXPERT_DISPATCH.datasheet
        sending_us = link.launch_us + sent / gpu.nvlink_bytes_per_s / link.efficiency * US_PER_S
        return made._replace(value=np.maximum(made.value, sending_us))


MEGAMOE: Final = MegaMoe()

OPERATORS: Final = (
    EXPERT_DISPATCH,
    MEGAMOE,
)
