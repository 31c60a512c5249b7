"""Energy of steps: each kernel's time times the power that its utilisation draws, and the host's gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.arrow import RELATIVE_ERROR, ArrowResult
from fastroof.caching import lazy_property
from fastroof.columns import Column
from fastroof.compiled import steps
from fastroof.config import GpuSpec
from fastroof.errors import FastroofError, PlanError
from fastroof.operators.power import GAP, MEASURED_ON, draw_of
from fastroof.operators.registry import OPERATORS
from fastroof.plan.arena import WindowPoints, are_decodes, attention_means, attention_times, per_step
from fastroof.plan.calls import Ranks
from fastroof.plan.curves import per_row, row_cost, row_values
from fastroof.plan.plan_data import PlanData
from fastroof.run.batch import StepBatch, StepTimes
from fastroof.units import UJ_PER_J, US_PER_S

POWER_ERROR: Final = 0.25
"""Relative standard error of the power of serving: the RMS of ln(predicted / measured) over the runs of the
ML.ENERGY leaderboard that choose no constant, 0.30 of 99 on B200 and 0.18 of 102 on H100."""

_ROWS_AT: Final = (steps.TOKENS_AT, steps.DECODE_TOKENS_AT, steps.LOGITS_AT)


class RowEnergy(NamedTuple):
    """Energy of calls over rows on one GPU, uJ, at every number of tokens or sequences."""

    tokens_uj: Floats
    decode_tokens_uj: Floats
    logits_uj: Floats


class Parts(NamedTuple):
    """Energy and time of some kernels on one GPU."""

    uj: Floats
    us: Floats

    @property
    def watts(self) -> Floats:
        """Mean power, W; 0 without any time."""
        return np.asarray(self.uj / np.where(self.us > 0.0, self.us, np.inf))


class MeanSteps(NamedTuple):
    """Steps by their mean sizes, as estimates have them: decodes at a mean kv_len, chunks of prompts."""

    decodes: Floats
    kv_len: Floats
    prompt_tokens: Floats
    prompts: Floats
    q_len: Floats


class BusyLoad(NamedTuple):
    """Mean steps of a rank while its engine steps; ranks that step together wait for one another.

    ``prompt_steps_per_us`` are its own steps with prompts. In the rest of the time it decodes, or waits for
    other ranks, which is taken to draw as much.
    """

    decodes: Floats
    """Of a step without prompts; at least one counts."""
    beside: Floats
    """Decodes of a step with prompts."""
    kv_len: Floats
    prompt_tokens: Floats
    """Of a step with prompts, and of a prompt in the next."""
    new_tokens: Floats
    prompt_steps_per_us: Floats


@dataclass(frozen=True, eq=False)
class StepEnergy(ArrowResult):
    """Energy of steps.

    Attributes
    ----------
    joules : ndarray of float64, shape (steps,)
        Joules of the GPUs that run the step: those of its rank, each while it runs its pipeline stage.
    tokens : ndarray of int, shape (steps,)
        New tokens of the step, over which ``joules_per_token`` is.
    watts : ndarray of float64, shape (steps,)
        Mean power of one of these GPUs, W; 0 for a step without requests.
    relative_error : float or ndarray of float64
        One standard error divided by the joules: of the power, and with ``with_error`` of the time too.
    basis : str
        ``measured`` on the GPU whose kernels' power was measured, ``modelled`` on others: its shares of the
        range from idle to the power limit.
    made_from : mapping of str to str
        As in :class:`fastroof.StepTimes`.
    """

    joules: Floats
    tokens: Longs
    watts: Floats
    relative_error: Any
    basis: str
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)

    arrow_columns = (
        Column("step", "int", "", "position in the batch", 0),
        Column("joules", "float", "J", "energy of the GPUs that run the step", 0),
        Column("tokens", "int", "tokens", "new tokens of the step", 0),
        Column("joules_per_token", "float", "J", "joules over new tokens; empty without any", 0),
        Column("watts", "float", "W", "mean power of one GPU", 0),
        RELATIVE_ERROR,
        Column("basis", "text", "", "measured on this GPU, or modelled from another's shares"),
    )

    @property
    def joules_per_token(self) -> Floats:
        """Joules over new tokens; nan for a step without requests."""
        return np.asarray(self.joules / np.where(self.tokens > 0, self.tokens, np.nan))

    def columns(self) -> dict[str, Any]:
        """Return all fields except made_from, by step."""
        count = len(self.joules)
        return {
            "step": np.arange(count),
            "joules": self.joules,
            "tokens": self.tokens,
            "joules_per_token": self.joules_per_token,
            "watts": self.watts,
            "relative_error": np.broadcast_to(self.relative_error, count),
            "basis": [self.basis] * count,
        }


def check_power(gpu: GpuSpec, error: type[FastroofError] = PlanError) -> None:
    """Refuse a GPU whose power is unknown."""
    if not gpu.tdp_w:
        raise error(
            f"the power of {gpu.name} is unknown: add [power] with tdp_w and idle_w to its gpu.toml, or use "
            "a GPU that has it, such as h100, h200, a100, b200 or l4"
        )


def basis_of(gpu: GpuSpec) -> str:
    """Return whether a GPU's kernels were measured, or are modelled from another's."""
    return "measured" if gpu.name == MEASURED_ON else "modelled"


def gap_watts(gpu: GpuSpec) -> float:
    """Return the power of a GPU whose host prepares the next kernels, W."""
    return gpu.idle_w + GAP * (gpu.tdp_w - gpu.idle_w)


def energy_error(time_error: Any, shape: tuple[int, ...] = ()) -> Any:
    """Relative standard error of joules per token: of the power, and of the time where it is known."""
    return np.hypot(POWER_ERROR, np.nan_to_num(0.0 if time_error is None else time_error)) + np.zeros(shape)


class PlanWithEnergy(PlanData):
    """Energy of a plan's steps."""

    if TYPE_CHECKING:

        def run(self, batch: StepBatch, *, threads: int = 1, with_error: bool = False) -> StepTimes:
            """Time ragged steps."""

    @lazy_property
    def row_energy(self) -> RowEnergy:
        """Energy of its calls over rows, made on first use."""
        return row_energy(self)

    def energy(self, batch: StepBatch, *, threads: int = 1, with_error: bool = False) -> StepEnergy:
        """Estimate the energy of ragged steps.

        Parameters
        ----------
        batch : StepBatch
            The steps.
        threads : int
            As in :meth:`fastroof.StepPlan.decode_us`.
        with_error : bool
            Whether ``relative_error`` includes that of the steps' times, as :meth:`run` estimates it.

        Returns
        -------
        StepEnergy
            Joules, joules per token and watts, one entry per step.

        Raises
        ------
        PlanError
            If the GPU's power is unknown, or as in :meth:`run`.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
        >>> one, many = (fastroof.StepBatch.from_requests([[(1, 999)] * n]) for n in (1, 64))
        >>> bool(plan.energy(many).joules_per_token[0] < plan.energy(one).joules_per_token[0] / 20)
        True
        """
        check_power(self.gpu)
        times = self.run(batch, threads=threads, with_error=with_error)
        joules, tokens = step_joules(self, batch, times)
        step_s = times.latency_us / US_PER_S
        gpus = gpus_of_a_batch(self)
        error = energy_error(times.relative_error)
        watts = joules / np.where(step_s > 0.0, step_s * gpus, np.inf)
        return StepEnergy(joules, tokens, watts, error, basis_of(self.gpu), self.made_from)


def gpus_of_a_batch(plan: PlanData) -> float:
    """GPUs that work on one batch of a step's size at a time: those of a rank's pipeline stage."""
    return float(plan.layout.world_size / plan.layout.batches_in_flight)


def row_energy(plan: PlanData) -> RowEnergy:
    """Work out the energy of a plan's calls over rows."""
    decode = _rows_uj(plan, "tokens", "with_prefill", plan.max_num_batched_tokens)
    same = all(curve.operator.steps == "all" for curve in plan.row_curves)
    tokens = decode if same else _rows_uj(plan, "tokens", "decode_only", plan.max_num_batched_tokens)
    return RowEnergy(tokens, decode, _rows_uj(plan, "sequences", "", plan.max_num_seqs))


def _rows_uj(plan: PlanData, rows: str, left_out: str, limit: int) -> Floats:
    """Energy of all calls over tokens or sequences, at every number of them."""
    total, ranks, gpu = np.zeros(limit + 1), Ranks.of(plan.layout, plan.execution), plan.gpu
    for curve in plan.row_curves:
        call = curve.operator
        if (call.rows == "sequences") != (rows == "sequences") or call.steps == left_out:
            continue
        at = ranks.rows(call, limit)
        time_us = row_values(curve, int(at[-1]))[0][at]
        operator = per_row(call)
        flops, moved = operator.row_work(call, np.asarray(at * curve.share, np.float64))
        peak = gpu.peak(row_cost(call).dtype) if np.any(flops > 0.0) else 1.0
        memory_us = 0.0 if operator.over_link else moved / gpu.hbm_bytes_per_s * US_PER_S
        draw = draw_of(call.operator, operator.over_link)
        compute_us = np.nan_to_num(flops) / peak * US_PER_S
        total += call.times * time_us * draw.watts(gpu, time_us, curve.launch_us, compute_us, memory_us)
    return total


def attention_parts(
    plan: PlanData, is_decode: bool, batch: Floats, length: Floats, within: WindowPoints | None = None
) -> Parts:
    """Attention of all kinds of layers over equal requests without a prefix, by the steps' means."""
    gpu = plan.gpu
    total_us, total_uj = np.zeros(len(batch)), np.zeros(len(batch))
    for number, part in enumerate(plan.attention):
        phase = part.phase(is_decode)
        if not phase.operator:
            continue
        times = attention_times(plan, number, is_decode, batch, length, within)
        work = phase.work_at(gpu, batch, length)
        compute_us = np.nan_to_num(work.flops / work.peak) * US_PER_S
        if not is_decode:
            compute_us = compute_us / plan.layout.cp
        memory_us = work.moved_bytes / gpu.hbm_bytes_per_s * US_PER_S
        draw = draw_of(phase.operator, OPERATORS[phase.operator].over_link)
        one_us = times.own_us / part.call.times
        total_us += times.own_us
        total_uj += times.own_us * draw.watts(gpu, one_us, times.launch_us, compute_us, memory_us)
    return Parts(total_uj, total_us)


def with_host(gpu: GpuSpec, kernels: Parts, step_us: Floats) -> Floats:
    """Energy of whole steps, uJ of one GPU: while no kernel runs, it draws the power of a gap.

    An engine's corrections may make a step shorter than its kernels: these then draw their mean power.
    """
    host_us = step_us - kernels.us
    return np.where(host_us >= 0.0, kernels.uj + gap_watts(gpu) * host_us, kernels.watts * step_us)


def step_joules(plan: PlanWithEnergy, batch: StepBatch, times: StepTimes) -> tuple[Floats, Longs]:
    """Energy of the GPUs that run each step, J, and its new tokens."""
    tokens, rows, us = per_step(batch, batch.new_tokens), plan.row_energy, times.components
    has_prompts = per_step(batch, ~are_decodes(batch)) > 0
    uj = np.where(has_prompts, rows.tokens_uj[tokens], rows.decode_tokens_uj[tokens])
    uj = uj + rows.logits_uj[np.diff(batch.offsets)]
    for is_decode, attention_us in ((True, us.decode_attention_us), (False, us.prefill_attention_us)):
        busy, size, x, within = attention_means(plan, batch, is_decode)
        uj[busy] += attention_us[busy] * attention_parts(plan, is_decode, size, x, within).watts
    kernels = Parts(uj, times.latency_us - us.runtime_us)
    return with_host(plan.gpu, kernels, times.latency_us) / UJ_PER_J * gpus_of_a_batch(plan), tokens


def mean_steps(plan: PlanWithEnergy, mean: MeanSteps) -> Parts:
    """Energy and time of steps of mean sizes, with the engine's own time."""
    kernels, arena = _mean_kernels(plan, mean), plan.arena
    seqs, has_prompts = mean.decodes + mean.prompts, mean.prompt_tokens > 0.0
    prompts_us = np.where(has_prompts, arena[steps.PREFILL_US], 0.0)
    floor_us = np.where(has_prompts, arena[steps.PREFILL_FLOOR_US], 0.0)
    host_us = arena[steps.STEP_US] + arena[steps.SEQUENCE_US] * seqs + prompts_us
    step_us = np.maximum(kernels.us + host_us, floor_us)
    return Parts(with_host(plan.gpu, kernels, step_us), step_us)


def busy_watts(plan: PlanWithEnergy, load: BusyLoad) -> Floats:
    """Mean power of a GPU while its engine steps, W: in steps with prompts, and as in decodes otherwise."""
    nothing, one = np.zeros_like(load.kv_len), np.ones_like(load.kv_len)
    q_len = np.maximum(np.minimum(load.new_tokens, load.prompt_tokens), 1.0)
    chunks = load.prompt_tokens / q_len
    prompts = mean_steps(plan, MeanSteps(load.beside, load.kv_len, load.prompt_tokens, chunks, q_len))
    decodes = mean_steps(plan, MeanSteps(np.maximum(load.decodes, 1.0), load.kv_len, nothing, nothing, one))
    share = np.minimum(load.prompt_steps_per_us * prompts.us, 1.0)
    return np.asarray(share * prompts.watts + (1.0 - share) * decodes.watts)


def _mean_kernels(plan: PlanWithEnergy, mean: MeanSteps) -> Parts:
    rows, arena = plan.row_energy, plan.arena
    has_prompts = mean.prompt_tokens > 0.0
    tokens, seqs = np.rint(mean.decodes + mean.prompt_tokens), np.rint(mean.decodes + mean.prompts)
    tokens = np.clip(tokens, 1, plan.max_num_batched_tokens).astype(np.int64)
    seqs = np.clip(seqs, 1, plan.max_num_seqs).astype(np.int64)
    all_at, decode_at, logits_at = (int(arena[at]) for at in _ROWS_AT)
    us = np.where(has_prompts, arena[all_at + tokens], arena[decode_at + tokens]) + arena[logits_at + seqs]
    uj = np.where(has_prompts, rows.tokens_uj[tokens], rows.decode_tokens_uj[tokens]) + rows.logits_uj[seqs]
    # in a step with prompts decodes may take longer, and both share a launch
    least_us = np.where(has_prompts, arena[steps.MIXED_KV_US] * mean.decodes * mean.kv_len, 0.0)
    shared_us = arena[steps.SHARED_LAUNCH_US] * np.minimum(mean.decodes, 1.0)
    chunks = mean.prompt_tokens / np.maximum(mean.q_len, 1.0)
    for is_decode, size, length in ((True, mean.decodes, mean.kv_len), (False, chunks, mean.q_len)):
        busy = size > 0.0
        part = attention_parts(plan, is_decode, size[busy], np.maximum(length[busy], 1.0))
        limited = (
            np.maximum(part.us, least_us[busy]) if is_decode else np.maximum(part.us - shared_us[busy], 0)
        )
        us[busy] += limited
        uj[busy] += limited * part.watts
    return Parts(uj, us)
