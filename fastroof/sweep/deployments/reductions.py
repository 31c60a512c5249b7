"""Reduction of a sweep's rows to the best and the Pareto-optimal ones of each group."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastroof.arrays import Floats, Longs
from fastroof.compiled.deployments import BestTable, Fronts, reduce_best, reduce_pareto
from fastroof.engines import load_engine
from fastroof.models import load_model
from fastroof.models.execution import DTYPES, KV_DTYPES
from fastroof.sweep.deployments.columns import MINIMIZED, OBJECTIVE_COLUMNS
from fastroof.sweep.deployments.spec import DeploymentSpec


def _groups(spec: DeploymentSpec, rows: pa.Table) -> Longs:
    """Number the group of each row: names in the spec's order, numbers ascending."""
    orders: dict[str, list[str]] = {
        "model": [load_model(name).name for name in spec.models],
        "gpu": list(spec.gpu_names),
        "mode": list(spec.mode),
        "dtype": list(DTYPES),
        "kv_dtype": list(KV_DTYPES),
        "engine": [load_engine(name).name for name in spec.engine],
    }
    group_of = np.zeros(rows.num_rows, np.int64)
    for name in spec.per:
        if name in orders:
            codes = pc.index_in(rows[name], value_set=pa.array(orders[name])).to_numpy().astype(np.int64)
        else:
            codes = np.unique(rows[name].to_numpy(), return_inverse=True)[1]
        group_of = np.unique(group_of * (int(codes.max()) + 1) + codes, return_inverse=True)[1]
    return group_of


def _column(rows: pa.Table, name: str) -> Floats:
    return np.asarray(rows[name].to_numpy(), np.float64)


def _objective(spec: DeploymentSpec, rows: pa.Table) -> Floats:
    """Return the metric to maximize; NaN where a row has no value."""
    name = OBJECTIVE_COLUMNS.get(spec.objective, spec.objective)
    return _column(rows, name) * (-1.0 if spec.objective in MINIMIZED else 1.0)


def reduced_rows(
    spec: DeploymentSpec, rows: pa.Table, keep: str | None = None, k: int | None = None
) -> pa.Table:
    """Return the rows that the spec selects, in their given order."""
    keep = spec.keep if keep is None else keep
    k = spec.k if k is None else k
    if keep == "all" or not rows.num_rows:
        return rows
    groups = _groups(spec, rows)
    count = int(groups.max()) + 1
    if keep == "best":
        # no group can keep more rows than it has
        shape = (count, min(k, int(np.bincount(groups).max())))
        table = BestTable(np.empty(shape), np.empty(shape, np.int64), np.zeros(count, np.int64))
        reduce_best(groups, _objective(spec, rows), table)
        selected = table.at[np.arange(shape[1]) < table.taken[:, None]]
    else:
        shape = (count, int(np.bincount(groups).max()))
        fronts = Fronts(
            np.empty(shape), np.empty(shape), np.empty(shape, np.int64), np.zeros(count, np.int64)
        )
        per_user = np.nan_to_num(_column(rows, "tokens_per_s_per_user"), nan=0.0)
        reduce_pareto(groups, per_user, _column(rows, "tokens_per_s_per_gpu"), 0, fronts)
        selected = fronts.at[np.arange(shape[1]) < fronts.taken[:, None]]
    return rows.take(pa.array(np.sort(selected)))


def best_rows(spec: DeploymentSpec, rows: pa.Table) -> pa.Table:
    """Return the best row of each group within the limits."""
    return reduced_rows(spec, rows.filter(pc.is_null(rows["exceeds"])), "best", 1)


def ordered_rows(spec: DeploymentSpec, rows: pa.Table) -> pa.Table:
    """Sort the selected rows: by group, best first or along the front."""
    if spec.keep == "all" or not rows.num_rows:
        return rows
    groups = _groups(spec, rows)
    if spec.keep == "best":
        value = -_objective(spec, rows)
    else:
        value = np.nan_to_num(_column(rows, "tokens_per_s_per_user"), nan=0.0)
    return rows.take(pa.array(np.lexsort((np.arange(len(groups)), value, groups))))
