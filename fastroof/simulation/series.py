"""How engines did over time: a table of stretches, and how full they were in the mean and at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrow import arrow_schema
from fastroof.columns import Column
from fastroof.simulation.outcomes import SERIES
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.outcomes import Outcomes
    from fastroof.simulation.settings import EngineSettings

__all__ = ["SERIES_COLUMNS", "engine_use", "mean_step", "series_table"]

SERIES_COLUMNS: Final = (
    Column("time_s", "float", "s", "where the stretch of time begins", 0),
    Column("running", "float", "", "mean requests that run", 0),
    Column("waiting", "float", "", "mean requests that wait", 0),
    Column("kv_use", "float", "", "mean share of the KV cache that requests hold", 0),
    Column("busy", "float", "", "share of the time in which steps run", 0),
    Column(
        "computed_tokens_per_s", "float", "tokens/s", "tokens of prompts and answers that steps compute", 0
    ),
    Column("output_tokens_per_s", "float", "tokens/s", "tokens that come out", 0),
)
"""Columns of :meth:`Simulation.series`."""


# places in the outcomes' series
RUNNING_US, WAITING_US, BLOCKS_US, BUSY_US, NEW_TOKENS, OUTPUT_TOKENS = range(len(SERIES))


def series_table(outcomes: Outcomes, engines: int, made_from: Mapping[str, str]) -> pa.Table:
    """Lay the series out as a table, up to the end of the last step; of so many that step by themselves."""
    width_us, end_us = float(outcomes.bin_us), float(outcomes.counters["end_us"])
    count = min(max(int(np.ceil(end_us / width_us)), 1), len(outcomes.series))
    series = outcomes.series[:count]
    starts_us = np.arange(count) * width_us
    # the last stretch ends with the run
    length_us = np.minimum(starts_us + width_us, end_us) - starts_us
    length_us = np.where(length_us > 0.0, length_us, width_us)
    blocks = float(outcomes.counters["num_gpu_blocks"])
    values: dict[str, Any] = {
        "time_s": starts_us / US_PER_S,
        "running": series[:, RUNNING_US] / length_us,
        "waiting": series[:, WAITING_US] / length_us,
        "kv_use": series[:, BLOCKS_US] / length_us / max(blocks, 1.0),
        "busy": series[:, BUSY_US] / length_us / engines,
        "computed_tokens_per_s": series[:, NEW_TOKENS] / length_us * US_PER_S,
        "output_tokens_per_s": series[:, OUTPUT_TOKENS] / length_us * US_PER_S,
    }
    stretch = {"fastroof.stretch_s": repr(width_us / US_PER_S)}
    schema = arrow_schema(SERIES_COLUMNS, {**made_from, **stretch})
    return pa.table([pa.array(values[name], from_pandas=True) for name in schema.names], schema=schema)


def engine_use(outcomes: Outcomes, engines: int, duration_us: float) -> dict[str, Any]:
    """Say how full the engines were: means over the run, and the most at any step."""
    totals, counters = outcomes.series.sum(axis=0), outcomes.counters
    over_us = duration_us if duration_us > 0.0 else np.nan
    # none where all requests were rejected
    blocks = max(float(counters["num_gpu_blocks"]), 1.0)

    def use(place: int, peak: str, whole: float) -> dict[str, float]:
        return {"mean": float(totals[place]) / over_us / whole, "peak": float(counters[peak]) / whole}

    return {
        "running": use(RUNNING_US, "peak_running", 1.0),
        "waiting": use(WAITING_US, "peak_waiting", 1.0),
        "kv_use": use(BLOCKS_US, "peak_blocks", blocks),
        "busy": float(totals[BUSY_US]) / over_us / engines,
    }


def mean_step(outcomes: Outcomes, settings: EngineSettings, ranks: int = 1) -> tuple[float, float]:
    """Return the mean number of running requests of a rank, over busy time, and the tokens each holds."""
    running_us, _, blocks_us, busy_us = outcomes.series[:, : BUSY_US + 1].sum(axis=0).tolist()
    if not (running_us > 0.0 and busy_us > 0.0):
        return 1.0, 1.0
    return running_us / busy_us / ranks, blocks_us * settings.block_size / running_us
