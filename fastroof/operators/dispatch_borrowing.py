"""Donors of expert dispatch: the nearest measured kernel, within a node and across nodes.

A kernel that was not measured reads the nearest one: same library, then same kind, same format, nearest
number of GPUs, nearest shape, DeepEP's default SMs; at equal bytes sent per GPU. Across nodes, kernels of as
many nodes serve, else those of the nearest number of nodes, at equal bytes that cross. If a table has one
node only, its kernel serves the part within the node, and one message and the crossing bytes are added:
low-latency kernels send a copy per expert, the others one per node, which forwards it.

The error of each rule, from DeepEP's rows of 16, 32 and 64 H100, is in README.md ("Dispatch across nodes").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.operators.calls import Dispatch
from fastroof.operators.link_groups import Placement, inter_node_us, placed
from fastroof.operators.operator import Key, RowSource, measured_keys
from fastroof.operators.row_operator import RowNodes
from fastroof.units import DTYPE_BYTES

DEFAULT_DTYPE: Final = "default"
DEFAULT_DTYPE_BYTES: Final = {"dispatch": 1.0, "combine": 2.0}
"""DeepEP dispatches fp8 with scales (1.034 bytes per element by its figures) and combines bf16 (2.0)."""

INDEX_BYTES: Final = 4
"""Bytes of an expert's index."""

LOW_LATENCY: Final = ("deepep_ll", "trtllm_deepep_ll", "deepep_v2_generation")
HIGH_THROUGHPUT: Final = ("deepep_normal", "deepep_ht", "trtllm_deepep_ht", "deepep_v2_context")
OVER_NVLINK: Final = ("nvlink_one_sided", "nvlink_two_sided")
KINDS: Final = (LOW_LATENCY, HIGH_THROUGHPUT, OVER_NVLINK)

BF16_PHASES: Final = ("combine",)
"""Phases of NVLink kernels that move two bytes per element for every format of the experts: GB200's two-sided
combine takes the same time in bf16, fp8 and nvfp4, the one-sided one in nvfp4 3.5 times its dispatch."""

FP4_BYTES: Final = 0.5

LOW_LATENCY_OVER_NODES: Final = 0.1
"""Relative standard error of low-latency kernels across nodes, including another number of nodes."""

OTHER_NODES: Final = 0.4
"""Relative standard error of high-throughput kernels from another number of nodes (20 to 41 % measured)."""

DEFAULT_SMS: Final = 20
"""SMs that DeepEP uses by default (Buffer.num_sms in its source)."""


class DispatchKey(NamedTuple):
    """Key of a kernel, in the order of the operator's keys."""

    library: str
    phase: str
    comm_dtype: str
    hidden: int
    topk: int
    num_experts: int
    num_gpus: int
    num_nodes: int
    sms: int


class DispatchDonor(NamedTuple):
    """Measured kernel that serves a call, and its tokens per token of the call.

    ``crossing_bytes`` are bytes of a token that cross nodes in addition to the kernel.
    """

    key: DispatchKey
    tokens: float
    is_own: bool
    crossing_bytes: float
    is_other_nodes: bool = False


def row_bytes_of(library: str, phase: str, comm_dtype: str, hidden: float, topk: float) -> float:
    """Bytes of one token on the wire."""
    if phase == "prepare":
        return float(INDEX_BYTES * topk)
    return hidden * element_bytes_of(library, phase, comm_dtype)


def element_bytes_of(library: str, phase: str, comm_dtype: str) -> float:
    """Bytes of one element on the wire."""
    if library in OVER_NVLINK and phase in BF16_PHASES:
        return DEFAULT_DTYPE_BYTES["combine"]
    if comm_dtype == "fp4":
        return FP4_BYTES
    return DTYPE_BYTES.get(comm_dtype, DEFAULT_DTYPE_BYTES.get(phase, 1.0))


def sent_to(groups: float, topk: float) -> float:
    """Expected groups of GPUs, other than its own, that hold some of a token's experts under even routing."""
    return float((groups - 1.0) * (1.0 - (1.0 - 1.0 / groups) ** topk))


def is_low_latency(library: str) -> bool:
    """Whether a library's kernels send a copy per expert, without forwarding."""
    return library in LOW_LATENCY


def crossing_bytes(call: Dispatch, where: Placement) -> float:
    """Bytes of one token that cross nodes: a copy per remote expert, or one per node."""
    row = row_bytes_of(call.library, call.phase, call.comm_dtype, call.hidden, call.topk)
    if is_low_latency(call.library):
        return row * call.topk * (call.num_gpus - where.near) / call.num_gpus
    return row * sent_to(where.domains, call.topk)


def dispatch_donor(call: Dispatch, tables: RowSource, operator: str) -> DispatchDonor | None:
    """Find the measured kernel that serves a call; None if nothing of its kind was measured."""

    def found() -> DispatchDonor | None:
        keys = measured_keys(tables, operator) if tables.has(operator) else []
        kind = next((kind for kind in KINDS if call.library in kind), (call.library,))
        there = [DispatchKey(*key) for key in keys]
        there = [key for key in there if key.phase == call.phase and key.library in kind]
        if not there:
            return None
        where = placed(call.num_gpus, 1, tables.gpu)
        same_nodes = there
        if where.domains > 1:
            nodes = (call.num_gpus, where.domains)
            same_nodes = [key for key in there if (key.num_gpus, key.num_nodes) == nodes]
        if same_nodes:
            key = min(same_nodes, key=lambda one: _distance(call, call.num_gpus, one))
            return DispatchDonor(key, _tokens(call, call.num_gpus, key), _is_own(call, key), 0.0)
        over_nodes = [key for key in there if key.num_gpus > tables.gpu.linked_gpus and key.num_nodes > 1]
        if over_nodes:
            key = min(over_nodes, key=lambda one: _distance(call, call.num_gpus, one))
            return DispatchDonor(key, _crossing_tokens(call, where, key, tables.gpu), False, 0.0, True)
        near = [key for key in there if key.num_gpus <= tables.gpu.linked_gpus] or there
        key = min(near, key=lambda one: _distance(call, where.near, one))
        tokens = _tokens(call, where.near, key)
        if is_low_latency(call.library):
            tokens *= where.near / call.num_gpus
        return DispatchDonor(key, tokens, False, crossing_bytes(call, where))

    return tables.cached(("dispatch donor", *_key_of(call)), found)


def _key_of(call: Dispatch) -> Key:
    shape = (call.hidden, call.topk, call.num_experts, call.num_gpus)
    return (call.library, call.phase, call.comm_dtype, *shape)


def _is_own(call: Dispatch, key: DispatchKey) -> bool:
    return key[:7] == _key_of(call)


def _distance(call: Dispatch, num_gpus: int, key: DispatchKey) -> tuple[float, ...]:
    formats = (call.comm_dtype, DEFAULT_DTYPE)
    ratios = (key.hidden / call.hidden, key.topk / call.topk, key.num_experts / call.num_experts)
    return (
        key.library != call.library,
        formats.index(key.comm_dtype) if key.comm_dtype in formats else 2,
        abs(float(np.log(key.num_gpus / num_gpus))),
        sum(abs(float(np.log(ratio))) for ratio in ratios),
        abs(key.sms - DEFAULT_SMS) if key.sms else 0.0,
        key.num_nodes,
    )


def _tokens(call: Dispatch, num_gpus: int, key: DispatchKey) -> float:
    """Donor tokens with as many bytes as one token of the call."""
    if key[3:7] == (call.hidden, call.topk, call.num_experts, num_gpus) and key.comm_dtype == call.comm_dtype:
        return 1.0
    own = row_bytes_of(call.library, call.phase, call.comm_dtype, call.hidden, call.topk) * sent_to(
        num_gpus, call.topk
    )
    its = row_bytes_of(key.library, key.phase, key.comm_dtype, key.hidden, key.topk) * sent_to(
        key.num_gpus, key.topk
    )
    return own / its


def _crossing_tokens(call: Dispatch, where: Placement, key: DispatchKey, gpu: GpuSpec) -> float:
    """Donor tokens with as many bytes across nodes as one token of the call."""
    theirs = replace(call, comm_dtype=key.comm_dtype, hidden=key.hidden, topk=key.topk, num_gpus=key.num_gpus)
    return crossing_bytes(call, where) / crossing_bytes(theirs, placed(key.num_gpus, 1, gpu))


def borrowed_nodes(found: DispatchDonor, axis: Floats, value: Floats, flag: Flags, gpu: GpuSpec) -> RowNodes:
    """Nodes of a call in tokens of one GPU, from its donor's curve."""
    launch_us = float(value[1:-1].min())
    made = RowNodes(axis / found.tokens, value, flag, launch_us)
    if found.is_own:
        return made
    made = made._replace(flag=np.maximum(made.flag, np.uint8(ORIGIN_BORROWED)))
    if not found.crossing_bytes:
        return made
    far_us = inter_node_us(made.axis * found.crossing_bytes, 1, gpu)
    flags = np.full(len(made.flag), ORIGIN_MODELLED, np.uint8)
    return RowNodes(made.axis, made.value + far_us, flags, launch_us + float(inter_node_us(0.0, 1, gpu)))
