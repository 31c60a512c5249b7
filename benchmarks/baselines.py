"""What the engine is measured against, beside the stream loops and NumPy of ``fastroof.bench``."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fastroof import StepPlan, Tables
from fastroof.bench.numpy_steps import CHUNK, NumpySteps
from fastroof.operators.attention import ATTENTION_PREFILL
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import AllReduce, Gemm

MODEL = "meta-llama/Meta-Llama-3.1-8B"
US_PER_MS = 1e3


class NumpyPlan:
    """Steps in NumPy over a plan's own idea: dense tables of every lookup, gathers and no search."""

    def __init__(self, plan: StepPlan, tables: Tables) -> None:
        steps = NumpySteps(plan, tables)
        grid = steps.decode_grid
        self.layers, self.grid = steps.layers, grid
        rows = np.arange(min(plan.max_num_batched_tokens, plan.max_num_seqs) + 1.0)
        self.rows_us = steps.rows_us("tokens", rows) + steps.rows_us("sequences", rows)
        self.row_of_batch = _cell_of(grid.batch, len(rows))
        self.column_of_kv = _cell_of(grid.x, int(grid.x[-1]) + 1)
        self.batch_weight = (rows - grid.batch[self.row_of_batch]) / np.diff(grid.batch)[self.row_of_batch]
        self.x_scale = 1.0 / np.diff(grid.x)

    def decode_us(self, batch_size: Any, kv_len: Any) -> Any:
        out = np.empty(len(batch_size))
        value = self.grid.value
        for start in range(0, len(out), CHUNK):
            part = slice(start, start + CHUNK)
            batch, kv = batch_size[part], kv_len[part]
            i, j = self.row_of_batch[batch], self.column_of_kv[kv]
            w = (kv - self.grid.x[j]) * self.x_scale[j]
            low = value[i, j] + w * (value[i, j + 1] - value[i, j])
            high = value[i + 1, j] + w * (value[i + 1, j + 1] - value[i + 1, j])
            attention = low + self.batch_weight[batch] * (high - low)
            out[part] = self.rows_us[batch] + self.layers * attention
        return out


def _cell_of(axis: Any, count: int) -> Any:
    """Cell of every whole number below ``count``."""
    cell = np.searchsorted(axis, np.arange(count), side="right") - 1
    return np.clip(cell, 0, len(axis) - 2).astype(np.int32)


def python_decode_us(plan: StepPlan, tables: Tables, batch: int, kv: int) -> float:
    """One step by one public lookup an operator: what a plain program does."""
    heads = plan.heads
    total = plan.model.num_layers * float(
        tables.lookup(
            "attention_decode", num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim, batch_size=batch, kv_len=kv, kv_dtype=heads.kv_dtype,
        ).latency_us
    )  # fmt: skip
    for curve in plan.row_curves:
        op = curve.operator
        if isinstance(op, Gemm):
            found = tables.lookup("gemm", m=batch, n=op.n, k=op.k, dtype=op.dtype)
            total += op.times * float(found.latency_us)
        elif isinstance(op, AllReduce):
            message = int(batch * op.row_bytes)
            found = tables.lookup("allreduce", num_gpus=op.num_gpus, message_bytes=message)
            total += op.times * float(found.latency_us)
        else:
            total += op.times * float(np.interp(batch, curve.axis, curve.value))
    return total


class TableNodes(NamedTuple):
    """A table as a full grid, for interpolators that know no other: holes filled by public lookups.

    ``points`` are the coordinates of the points that are looked up, one array an axis, in which
    fastroof's interpolation is linear.
    """

    axes: tuple[Any, ...]
    values: Any
    points: tuple[Any, ...]


def gemm_nodes(tables: Tables, points: dict[str, Any]) -> TableNodes:
    columns = tables.table("gemm").columns
    rows = columns["dtype"] == points["dtype"]
    axes = [np.unique(columns[name][rows]) for name in ("m", "n", "k")]
    m, n, k = np.meshgrid(*axes, indexing="ij")
    values = tables.lookup("gemm", m=m, n=n, k=k, dtype=points["dtype"]).latency_us
    return _as_floats(axes, values, [points[name] for name in ("m", "n", "k")])


def attention_nodes(tables: Tables, operator: str, points: dict[str, Any]) -> TableNodes:
    """Decode is linear in kv_len, prefill in the roofline of q_len."""
    heads = {name: points[name] for name in ("kv_dtype", "num_q_heads", "num_kv_heads", "head_dim")}
    rows = tables.groups(operator)[(*heads.values(), 0)]
    columns = {name: values[rows] for name, values in tables.table(operator).columns.items()}
    if operator == "attention_decode":
        batch, x = np.unique(columns["batch_size"]), np.unique(columns["kv_len"])
        sizes = {"kv_len": x}

        def position(x: Any) -> Any:
            return x
    else:
        whole = columns["q_len"] == columns["kv_len"]
        batch, x = np.unique(columns["batch_size"][whole]), np.unique(columns["q_len"][whole])
        sizes = {"q_len": x, "kv_len": x}
        roofline = ATTENTION_PREFILL.bound(HeadShape(**heads), tables.gpu, 0.0)

        def position(x: Any) -> Any:
            return (roofline.square_us * x + roofline.slope_us) * x

    values = tables.lookup(operator, batch_size=batch[:, None], **sizes, **heads).latency_us
    lengths = points["kv_len" if operator == "attention_decode" else "q_len"]
    return _as_floats(
        [batch, position(x)], values, [points["batch_size"], position(lengths.astype(np.float64))]
    )


def _as_floats(axes: list[Any], values: Any, points: list[Any]) -> TableNodes:
    floats = [[np.ascontiguousarray(a, np.float64) for a in arrays] for arrays in (axes, points)]
    return TableNodes(tuple(floats[0]), values, tuple(floats[1]))


def scipy_interpolator(nodes: TableNodes) -> Callable[[], Any]:
    """RegularGridInterpolator at the points, or ImportError."""
    from scipy.interpolate import RegularGridInterpolator

    interpolator = RegularGridInterpolator(nodes.axes, nodes.values)
    return lambda: interpolator(nodes.points)


def interpn_interpolator(nodes: TableNodes) -> Callable[[], Any]:
    """interpn's multilinear interpolator at the points, or ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import interpn

        interpolator = interpn.MultilinearRectilinear.new(
            list(nodes.axes), np.ascontiguousarray(nodes.values)
        )
    points, out = list(nodes.points), np.empty(len(nodes.points[0]))
    return lambda: interpolator.eval(points, out)


class AiconfiguratorEngine:
    """aiconfigurator-core's compiled engine on the same H100 tables, or ImportError.

    Its steps have other operators than fastroof's (embedding, norms and prefixes are priced otherwise),
    so their times differ by some percent; a measured GEMM is the same number in both.
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from aiconfigurator_core.sdk.common import GEMMQuantMode
            from aiconfigurator_core.sdk.engine import EngineHandle, build_ops_json
            from aiconfigurator_core.sdk.operations.gemm import GEMM

            # it warns of every table that it reads in place of another
            logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
            self._engine = EngineHandle.compile(MODEL, "h100_sxm", "vllm", backend_version="0.24.0")
            operator = GEMM("gemm", 1.0, 6144, 4096, GEMMQuantMode.bfloat16)
            self._gemm = json.loads(build_ops_json([operator]))

    def decode_us(self, batch_size: Any, kv_len: Any) -> Any:
        """One step a call: isl + osl - 1 is what a query of the last step attends to."""
        call = self._engine.predict_decode_latency
        sizes = zip(batch_size.tolist(), kv_len.tolist(), strict=True)
        return np.array([call(batch, kv - 1, 2) for batch, kv in sizes]) * US_PER_MS

    def gemm_us(self, m: Any, n: Any, k: Any) -> Any:
        """One lookup a call; its operators are made before."""
        found = []
        for rows, operators in zip(m.tolist(), self._operators(n, k), strict=True):
            answer = self._engine.evaluate_ops_json(operators, is_context=True, batch_size=1, s=rows, x=rows)
            found.append(answer[0][1])
        return np.array(found) * US_PER_MS

    def _operators(self, n: Any, k: Any) -> list[str]:
        def operator(n: int, k: int) -> str:
            return json.dumps([{"Gemm": {**self._gemm[0]["Gemm"], "n": n, "k": k}}])

        return [operator(*shape) for shape in zip(n.tolist(), k.tolist(), strict=True)]
