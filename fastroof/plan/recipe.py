"""What plans of one architecture have in common, whatever their depth; laid out in one arena each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.compiled import grids, steps
from fastroof.compiled.rows import sum_rows
from fastroof.config import GpuSpec
from fastroof.models import ModelSpec
from fastroof.models.layout import ShardedShape, shard
from fastroof.models.step_calls import transformer_operators
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import Rows
from fastroof.plan.curves import CurveSource, RowCurve
from fastroof.plan.datasheet import DatasheetCurves
from fastroof.plan.options import PlanOptions
from fastroof.plan.step_error import ErrorSource
from fastroof.plan.step_plan import StepPlan
from fastroof.plan.table_curves import TableCurves
from fastroof.tables import Tables

__all__ = ["PlanRecipe", "RowSums", "curves_of", "plan_recipe"]


class RowSums(NamedTuple):
    """Times of the operators that depend on a number of rows alone, us: a row a plan.

    Attributes
    ----------
    tokens_us : ndarray of float64, shape (plans, max_tokens + 1)
        All per-token operators, by tokens.
    logits_us : ndarray of float64, shape (plans, max_seqs + 1)
        The LM head, by sequences.
    """

    tokens_us: Floats
    logits_us: Floats


@dataclass(frozen=True, eq=False)
class PlanRecipe:
    """Curves, blocks and origins of every plan that differs in its layers alone.

    Made by :func:`plan_recipe`.
    """

    gpu: GpuSpec
    options: PlanOptions
    share: ShardedShape
    heads: HeadShape
    tables_hash: str
    method: str
    row_curves: tuple[RowCurve, ...]
    times_a_layer: tuple[int, ...]
    values: tuple[tuple[Floats, Flags], ...]
    decode_block: Floats
    prefill_block: Floats
    prefix_us: tuple[float, float]
    error_source: ErrorSource

    def row_sums(self, num_layers: Sequence[int]) -> RowSums:
        """Sum the operators of plans with these numbers of layers, in the order of the step."""
        deeper = np.asarray(num_layers, np.float64)[:, None] - 1.0
        calls = np.array([curve.operator.times for curve in self.row_curves], np.float64)
        times = calls + deeper * np.array(self.times_a_layer, np.float64)

        def summed(rows: Rows, limit: int) -> Floats:
            found = np.zeros((len(times), limit + 1))
            of = [i for i, curve in enumerate(self.row_curves) if curve.operator.rows == rows]
            sum_rows(np.stack([self.values[i][0] for i in of]), times[:, of].copy(), found)
            return found

        return RowSums(summed("tokens", self.options.max_tokens), summed("sequences", self.options.max_seqs))

    def plan(self, model: ModelSpec, tokens_us: Floats, logits_us: Floats) -> StepPlan:
        """Compile the plan of one model from its row of :meth:`row_sums`."""
        deeper = model.num_layers - 1
        row_curves = tuple(
            replace(curve, operator=replace(curve.operator, times=curve.operator.times + a_layer * deeper))
            for curve, a_layer in zip(self.row_curves, self.times_a_layer, strict=True)
        )
        options = self.options
        return StepPlan(
            model=model,
            gpu=self.gpu,
            share=self.share,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            engine=options.runtime,
            method=self.method,
            max_tokens=options.max_tokens,
            max_seqs=options.max_seqs,
            tables_hash=self.tables_hash,
            arena=self._arena(model.num_layers, tokens_us, logits_us),
            row_curves=row_curves,
            error_source=self.error_source,
        )

    def _arena(self, num_layers: int, tokens_us: Floats, logits_us: Floats) -> Floats:
        """Lay a plan out as the step loops read it."""
        origins: dict[Rows, Flags] = {
            "tokens": np.zeros(len(tokens_us), np.uint8),
            "sequences": np.zeros(len(logits_us), np.uint8),
        }
        for curve, (_, origin) in zip(self.row_curves, self.values, strict=True):
            made = origins[curve.operator.rows]
            np.maximum(made, origin[: len(made)], out=made)
        sections: list[Array] = [
            tokens_us,
            logits_us,
            *origins.values(),
            self.decode_block,
            self.prefill_block,
        ]
        starts = steps.HEADER_SIZE + np.cumsum([0, *(len(section) for section in sections)])
        pair_us, token_us = (num_layers * us for us in self.prefix_us)
        header = np.zeros(steps.HEADER_SIZE)
        costs = self.options.runtime.costs
        header[: steps.PREFIX_TOKEN_US + 1] = (
            steps.ARENA_MAGIC, steps.ARENA_FORMAT, self.options.max_tokens, self.options.max_seqs, num_layers,
            costs.step_us, pair_us, token_us,
        )  # fmt: skip
        header[steps.SEQUENCE_US : steps.PREFILL_FLOOR_US + 1] = (
            costs.sequence_us, costs.prefill_us, costs.prefill_floor_layer_us * num_layers,
        )  # fmt: skip
        header[steps.TOKENS_AT : steps.ARENA_SIZE + 1] = starts
        arena = np.concatenate([header, *sections], dtype=np.float64)
        for at in (steps.DECODE_AT, steps.PREFILL_AT):
            _scale_to_layers(arena[int(arena[at]) : int(arena[at + 1])], num_layers)
        arena.flags.writeable = False
        return arena


def _scale_to_layers(block: Floats, num_layers: int) -> None:
    """Make a block of one call one of all layers: cells are latencies, or work / latency."""
    cells = block[grids.cells_of(block)]
    if block[grids.FORM] == grids.FORM_LATENCY:
        cells *= num_layers
    else:
        cells /= num_layers


def curves_of(tables: Tables | None, gpu: GpuSpec, options: PlanOptions) -> CurveSource:
    """Where a plan's latencies come from; ``options`` are checked."""
    if tables is None:
        return DatasheetCurves(gpu)
    kernels = options.runtime.kernels
    return TableCurves(tables, options.method, kernels.gemm_smoothing, kernels.fp8_scales)


def plan_recipe(
    model: ModelSpec, gpu: GpuSpec, options: PlanOptions, curves: CurveSource, tables_hash: str
) -> PlanRecipe:
    """Look up every curve and block that plans of a model's architecture need.

    Raises
    ------
    PlanError
        If the model cannot be split.
    MissingTableError
        If no table serves an operator.
    """
    share = shard(model, options.tp)
    heads = HeadShape(options.kv_dtype, share.num_q_heads, share.num_kv_heads, model.head_dim)
    quantise = options.dtype == "fp8" and curves.quantise_inputs
    one, two = (
        transformer_operators(
            replace(model, num_layers=layers),
            share,
            options.dtype,
            options.kv_dtype,
            quantise_inputs=quantise,
        )
        for layers in (1, 2)
    )
    row_limit = max(options.max_tokens, options.max_seqs)
    return PlanRecipe(
        gpu=gpu,
        options=options,
        share=share,
        heads=heads,
        tables_hash=tables_hash,
        method=curves.method,
        row_curves=tuple(curves.row_curve(operator, row_limit) for operator in one),
        times_a_layer=tuple(b.times - a.times for a, b in zip(one, two, strict=True)),
        values=tuple(curves.row_values(operator, row_limit) for operator in one),
        decode_block=curves.attention_block("attention_decode", heads),
        prefill_block=curves.attention_block("attention_prefill", heads),
        prefix_us=curves.prefix_us(heads),
        error_source=ErrorSource.of(curves),
    )
