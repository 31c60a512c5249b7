"""Standard error of a step's time, from the errors of its operators (derivation: README.md)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Longs
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled import steps
from fastroof.engines.costs import UNSEEN_LAYERS_ERROR
from fastroof.errors import MissingTableError, PlanError
from fastroof.operators.attention_grids import AttentionErrors, attention_variance
from fastroof.operators.attention_work import prefix_within
from fastroof.operators.calls import AttentionCall, ModelledPrompts, RowOperator
from fastroof.operators.row_operator import PerRowOperator
from fastroof.plan.arena import WindowPoints, are_decodes, attention_means, attention_times, per_step
from fastroof.plan.attention import StepAttention, Variance
from fastroof.plan.calls import Ranks
from fastroof.plan.curves import per_row, row_values
from fastroof.plan.plan_data import PlanAttention, PlanData
from fastroof.plan.weight_only import weight_only_sibling
from fastroof.run.batch import StepBatch, StepTimes, int_array
from fastroof.tables import Tables
from fastroof.tables.source_errors import NO_SOURCE, SourceError, source_error
from fastroof.uncertainty.leave_one_out import PREFIX


class RowErrors(NamedTuple):
    """Errors of some calls: local and spread variances, and the common error, us."""

    local_us2: Floats
    spread_us2: Floats
    common_us: Floats

    def at(self, places: Longs) -> RowErrors:
        """Return the errors at some places."""
        return RowErrors(*(values[places] for values in self))

    def plus(self, other: RowErrors) -> RowErrors:
        """Return the errors of these and other calls together."""
        return RowErrors(*(np.asarray(mine + its) for mine, its in zip(self, other, strict=True)))

    @classmethod
    def none(cls, count: int) -> RowErrors:
        """Return the errors of no calls."""
        return cls(np.zeros(count), np.zeros(count), np.zeros(count))


class StepErrors(NamedTuple):
    """Errors of a plan's operators."""

    tokens: RowErrors
    decode_tokens: RowErrors
    logits: RowErrors
    decode: tuple[Variance, ...]
    prefill: tuple[Variance, ...]
    decode_sources: tuple[SourceError, ...]
    prefill_sources: tuple[SourceError, ...]


def step_errors(plan: PlanData, *, of_decodes: bool = False) -> StepErrors | None:
    """Work out a plan's errors, or those of decode steps alone; None for the datasheet model."""
    source = plan.error_source
    if source.is_datasheet:
        return None
    if plan.method != "roofline":
        raise PlanError(f"errors need a plan with method='roofline', got {plan.method!r}")
    tables = source.tables
    if tables is None:
        raise PlanError(
            "an unpickled plan has no tables to compute errors from; read plan.errors before pickling, or "
            "compile it again"
        )
    decodes = _rows_errors(plan, tables, "tokens", "with_prefill", plan.max_num_batched_tokens)
    same = of_decodes or all(curve.operator.steps == "all" for curve in plan.row_curves)
    tokens = (
        decodes if same else _rows_errors(plan, tables, "tokens", "decode_only", plan.max_num_batched_tokens)
    )
    logits = _rows_errors(plan, tables, "sequences", "", plan.max_num_seqs)
    decode, prefill = (
        [_attention_local(part, is_decode, tables) for part in plan.attention]
        if is_decode or not of_decodes
        else []
        for is_decode in (True, False)
    )
    return StepErrors(
        tokens,
        decodes,
        logits,
        tuple(one[0] for one in decode),
        tuple(one[0] for one in prefill),
        tuple(one[1] for one in decode),
        tuple(one[1] for one in prefill),
    )


def _attention_local(part: PlanAttention, is_decode: bool, tables: Tables) -> tuple[Variance, SourceError]:
    """Local errors of some attention, and of its source; the datasheet model's if it was not measured."""
    attention, modelled = part.phase(is_decode), modelled_prompts(part)
    if modelled is not None and not is_decode:
        return functools.partial(attention_variance, AttentionErrors((), modelled.error**2)), NO_SOURCE
    try:
        donors = attention.donors(tables)
        source = source_error(tables, attention.operator, donors[0]) if donors else NO_SOURCE
        return attention.variance(tables), source
    except MissingTableError:
        return functools.partial(
            attention_variance, AttentionErrors((), tables.gpu.datasheet_error**2)
        ), NO_SOURCE


def _rows_errors(plan: PlanData, tables: Tables, rows: str, left_out: str, limit: int) -> RowErrors:
    """Errors of all operators over tokens or sequences at every number of them."""
    total, ranks = RowErrors.none(limit + 1), Ranks.of(plan.layout, plan.execution)
    of_call: dict[RowOperator, Floats] = {}
    call_times: dict[RowOperator, int] = {}
    for curve in plan.row_curves:
        call = curve.operator
        if (call.rows == "sequences") != (rows == "sequences") or call.steps == left_out:
            continue
        at = ranks.rows(call, limit)
        time_us = call.times * row_values(curve, int(at[-1]))[0][at]
        # layers of several kinds may run one call
        one = replace(call, name="", times=1)
        of_call[one] = of_call[one] + time_us if one in of_call else time_us
        call_times[one] = call_times.get(one, 0) + call.times
    together_us: dict[PerRowOperator, Floats] = {}
    for call, time_us in of_call.items():
        operator = per_row(call)
        call_rows = ranks.rows(call, limit)[1:].astype(np.float64)
        sibling = weight_only_sibling(call, operator, tables)
        measured_call = call
        if sibling is not None:
            measured_call = sibling.call
            # the kernels of a step are off together
            total.common_us[1:] += time_us[1:] * sibling.error
        try:
            variance = operator.row_variance(measured_call, tables, call_rows)
        except MissingTableError:
            # from the datasheet model
            total.local_us2[:] += (time_us * (operator.datasheet_error or plan.gpu.datasheet_error)) ** 2
            continue
        points = operator.table_points(measured_call, tables, call_rows)
        if points is not None and variance is not None:
            key, sizes = points
            source = source_error(tables, operator.name, key)
            size_columns = dict(zip(operator.axis_names, sizes, strict=True))
            a_call_us = np.maximum(time_us[1:] / call_times[call], np.finfo(np.float64).tiny)
            spread, common = source.parts(size_columns, a_call_us)
            total.common_us[1:] += time_us[1:] * common
            total.spread_us2[1:] += (time_us[1:] * spread) ** 2
        if variance is None:
            together_us[operator] = together_us.get(operator, np.zeros(limit + 1)) + time_us
        else:
            total.local_us2[1:] += time_us[1:] ** 2 * variance
    for operator, time_us in together_us.items():
        total.local_us2[:] += (time_us * (operator.shared_error(tables) or plan.gpu.datasheet_error)) ** 2
    return total


def modelled_prompts(part: PlanAttention) -> ModelledPrompts | None:
    """Return the kernel of prompts' attention if it was not measured."""
    return part.call.prompts if isinstance(part.call, AttentionCall) else None


def batch_error(plan: PlanData, errors: StepErrors | None, batch: StepBatch, times: StepTimes) -> Floats:
    """Relative standard error of each step of a batch; 0 for a step without requests."""
    components = times.components
    if errors is None:
        kernels_us = times.latency_us - components.runtime_us
        return _relative(plan, _datasheet_errors(plan, kernels_us), times.latency_us)
    new, context = batch.new_tokens.astype(np.int64), batch.context_len.astype(np.int64)
    prompt = ~are_decodes(batch)
    tokens, has_prompts = per_step(batch, new), per_step(batch, prompt) > 0
    parts = zip(errors.tokens.at(tokens), errors.decode_tokens.at(tokens), strict=True)
    total = RowErrors(*(np.where(has_prompts, one, other) for one, other in parts))
    total = total.plus(errors.logits.at(np.diff(batch.offsets)))
    busy, bs, mean_kv, within = attention_means(plan, batch, True)
    attention_us = components.decode_attention_us[busy]
    _add(total, busy, _attention_errors(plan, errors, True, bs, mean_kv, attention_us, within))
    busy, bs, q_len, within = attention_means(plan, batch, False)
    prefix_us = plan.arena[steps.PREFIX_PAIR_US] * per_step(batch, prompt * new * context)[busy]
    prefix_us += plan.arena[steps.PREFIX_TOKEN_US] * per_step(batch, prompt * context)[busy]
    window = int(plan.arena[steps.WINDOW])
    if window:
        pairs, read = (
            per_step(batch, prompt * sizes)[busy] for sizes in prefix_within(new, new + context, window)
        )
        prefix_us += plan.arena[steps.WINDOW_PAIR_US] * pairs + plan.arena[steps.WINDOW_TOKEN_US] * read
    own_us = components.prefill_attention_us[busy] - prefix_us
    _add(total, busy, _attention_errors(plan, errors, False, bs, q_len, own_us, within))
    modelled = [one.error for one in map(modelled_prompts, plan.attention) if one is not None]
    total.local_us2[busy] += (max(PREFIX, *modelled, 0.0) * prefix_us) ** 2
    return _relative(plan, total, times.latency_us)


def mean_decodes(plan: PlanData, decodes: Any, kv_len: Any) -> tuple[Longs, Longs]:
    """Return the nearest whole sizes of mean decode steps that a plan times."""
    most = min(plan.max_num_seqs, plan.max_num_batched_tokens)
    batch = np.atleast_1d(np.clip(np.rint(decodes), 1, most)).astype(np.int64)
    return batch, np.atleast_1d(np.maximum(np.rint(kv_len), 1)).astype(np.int64)


def decode_origins(plan: PlanData, decodes: Any, kv_len: Any, has_drafts: bool = False) -> Flags:
    """Return the origins of mean decode steps at the nearest sizes; steps that verify drafts are modelled."""
    batch, kv = mean_decodes(plan, decodes, kv_len)
    origins = np.full(len(batch), ORIGIN_MODELLED, np.uint8)
    if not has_drafts:
        steps.decode_origins(plan.arena, batch, kv, origins)
    return origins


def stated_error(plan: PlanData, step_us: Any) -> Floats:
    """Relative standard error of TPOT by the engine's profile with such decode steps; nan if unknown."""
    stated = plan.profile.errors
    us = np.asarray(step_us, np.float64)
    of_layers = stated.layer_us * plan.model.num_layers / np.where(us > 0.0, us, np.inf)
    return np.maximum(stated.tpot, of_layers) if stated.tpot else np.full(us.shape, np.nan)


def _add(total: RowErrors, places: Bools, part: RowErrors) -> None:
    for values, more in zip(total, part, strict=True):
        values[places] += more


def _datasheet_errors(plan: PlanData, kernels_us: Floats) -> RowErrors:
    """Errors of the datasheet model: all kernels together."""
    return RowErrors.none(len(kernels_us))._replace(local_us2=(kernels_us * plan.gpu.datasheet_error) ** 2)


def _attention_errors(
    plan: PlanData,
    errors: StepErrors,
    is_decode: bool,
    batch: Floats,
    x: Floats,
    own_us: Floats,
    within: WindowPoints | None = None,
) -> RowErrors:
    """Errors of attention: independent between kinds of layers, unless they run the same kernels."""
    variances = errors.decode if is_decode else errors.prefill
    sources = errors.decode_sources if is_decode else errors.prefill_sources

    def of(
        attention: StepAttention, own_us: Floats, local: Variance, source: SourceError, layers: int
    ) -> RowErrors:
        y, z = (within.batch, within.x) if attention.window and within is not None else (batch, x)
        sizes = {"batch_size": y, "kv_len": z, "q_len": z}
        spread, common = source.parts(sizes, np.maximum(own_us / layers, np.finfo(np.float64).tiny))
        variance = local(y, z)
        return RowErrors(own_us**2 * variance, (own_us * spread) ** 2, own_us * common)

    phases = [part.phase(is_decode) for part in plan.attention]
    if len(variances) == 1:
        return of(phases[0], own_us, variances[0], sources[0], plan.attention[0].call.times)
    of_phase: dict[StepAttention, Floats] = {}
    for number, phase in enumerate(phases):
        times = attention_times(plan, number, is_decode, batch, x, within)
        of_phase[phase] = of_phase.get(phase, 0.0) + times.own_us
    known = {phase: (error, source) for phase, error, source in zip(phases, variances, sources, strict=True)}
    layers = dict.fromkeys(of_phase, 0)
    for phase, part in zip(phases, plan.attention, strict=True):
        layers[phase] += part.call.times
    parts = (of(phase, us, *known[phase], layers[phase]) for phase, us in of_phase.items())
    return functools.reduce(RowErrors.plus, parts)


def decode_error(
    plan: PlanData, errors: StepErrors | None, batch_size: Any, kv_len: Any, step_us: float | Floats
) -> float | Floats:
    """Relative standard error of equal decode steps that take ``step_us``."""
    # sizes that were timed fit int64; in the caller's type, indices into the arena may overflow
    checked = (int_array(name, size) for name, size in (("batch_size", batch_size), ("kv_len", kv_len)))
    batch, kv = (np.ravel(a).astype(np.int64) for a in np.broadcast_arrays(*checked))
    flat_us = np.reshape(step_us, -1)
    arena = plan.arena
    tokens_at, logits_at = int(arena[steps.DECODE_TOKENS_AT]), int(arena[steps.LOGITS_AT])
    runtime_us = arena[steps.STEP_US] + arena[steps.SEQUENCE_US] * batch
    if errors is None:
        kernels_us = flat_us - runtime_us
        error = _relative(plan, _datasheet_errors(plan, kernels_us), flat_us)
    else:
        attention_us = flat_us - arena[tokens_at + batch] - arena[logits_at + batch] - runtime_us
        sizes = (batch.astype(np.float64), kv.astype(np.float64))
        rows = errors.decode_tokens.at(batch).plus(errors.logits.at(batch))
        error = _relative(
            plan, rows.plus(_attention_errors(plan, errors, True, *sizes, attention_us)), flat_us
        )
    return error.reshape(np.shape(step_us)) if np.ndim(step_us) else float(error[0])


def _relative(plan: PlanData, errors: RowErrors, step_us: Floats) -> Floats:
    """Relative standard error of steps, with the residual of the engine's profile; 0 for empty steps."""
    has_steps = step_us > 0.0
    whole_us2 = np.where(has_steps, step_us, 1.0) ** 2
    campaign = (errors.spread_us2 + errors.common_us**2) / whole_us2
    residual = plan.profile.costs.residual**2
    if plan.profile.costs.of_other_layers(plan.model.architecture):
        residual += UNSEEN_LAYERS_ERROR**2
    # the residual includes the campaign of the tables that the profile was fitted to
    fitted_here = plan.gpu.name in plan.profile.evidence.get("gpus", ())
    together = np.maximum(campaign, residual) if fitted_here else campaign + residual
    return np.asarray(np.sqrt(np.where(has_steps, errors.local_us2 / whole_us2 + together, 0.0)))
