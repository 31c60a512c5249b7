"""A plan's times as settings of llm-d-inference-sim, fitted by the simulator's own formula.

llm-d-inference-sim answers as vLLM does, and sleeps instead of computing: it has no steps, a request waits
for its first token and then for each of the others. With n requests running of at most N = max-num-seqs::

    load  = 1 + (time-factor-under-load - 1) (n - 1) / (N - 1)
    TTFT  = prefill-overhead load + uncached prompt tokens x (prefill-time-per-token load)
    ITL   = inter-token-latency load

of its calculator ``per-token``, each product cut to whole nanoseconds, and the sum to whole milliseconds. So
four numbers stand for a plan, chosen over a range of operating points against what
:func:`fastroof.serving.estimate` says that clients of an engine see there.

Sources: llm-d/llm-d-inference-sim, pkg/simulator/latencies.go, pkg/simulator/context.go,
pkg/common/config.go (``Configuration``, ``LatenciesConfig``) and docs/configuration.md at
05ea24a77256cbafdb04b077585a7ffe43bfbcd4, later than v0.11.2; RandomNormDuration of pkg/common, whose whole
milliseconds docs/latency-profiles.md states at 9d328abbe2ad6d50baab2d76e8700d8cfc5abfb7. There the
latencies are a block of their own, and v0.13.0 will read no other form; v0.11.2 and older releases read keys
of the top level, and take a block that they do not know for no latency at all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.atomic_files import write_output
from fastroof.checks import shown
from fastroof.documents import yaml_text
from fastroof.errors import BackendError
from fastroof.models.named import PRESETS
from fastroof.serving import estimate
from fastroof.units import NS_PER_MS, NS_PER_US, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


CONCURRENCY: Final = (1, 2, 4, 8, 16, 32, 64)
ISL: Final = (256, 512, 1024, 2048, 4096)
OSL: Final = (128, 512)

CUT_MS: Final = 0.5
"""Mean loss by cutting to whole milliseconds."""

STARTS: Final = 8


@dataclass(frozen=True)
class Latencies:
    """The simulator's settings that a fit chooses; times are whole nanoseconds.

    Attributes
    ----------
    max_num_seqs : int
        Maximum number of concurrent requests, at which the load factor is ``time_factor_under_load``.
    inter_token_latency_ns : int
        ``inter-token-latency``.
    prefill_overhead_ns, prefill_time_per_token_ns : int
        ``prefill-overhead`` and ``prefill-time-per-token``.
    time_factor_under_load : float
        ``time-factor-under-load``, at least 1.
    """

    max_num_seqs: int
    inter_token_latency_ns: int
    prefill_overhead_ns: int
    prefill_time_per_token_ns: int
    time_factor_under_load: float


class LatencyFit(NamedTuple):
    """What was fitted, and how far off the simulator's formula is: arrays have an element a point.

    Attributes
    ----------
    latencies : Latencies
        The settings.
    isl, osl, clients : ndarray of float64
        The operating points.
    ttft_ms, tpot_ms : ndarray of float64
        What :func:`fastroof.serving.estimate` says there.
    simulated_ttft_ms, simulated_tpot_ms : ndarray of float64
        What the simulator makes of the settings.
    left_out : int
        Operating points that were not fitted: their requests are longer than the model's context, or do
        not all fit the KV cache, for which the simulator has no queue.
    """

    latencies: Latencies
    isl: Floats
    osl: Floats
    clients: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    simulated_ttft_ms: Floats
    simulated_tpot_ms: Floats
    left_out: int

    @property
    def errors(self) -> tuple[Floats, Floats]:
        """Relative errors of time to first token, and of time per output token."""
        return self.simulated_ttft_ms / self.ttft_ms - 1.0, self.simulated_tpot_ms / self.tpot_ms - 1.0


def simulated_ms(latencies: Latencies, clients: Any, isl: Any) -> tuple[Floats, Floats]:
    """Time to first token and between tokens as the simulator computes them, ms: whole numbers.

    Examples
    --------
    >>> given = Latencies(16, 12_000_000, 30_000_000, 250_000, 2.0)
    >>> [float(time) for time in simulated_ms(given, 16, 256)]
    [188.0, 24.0]
    """
    running, prompt = np.broadcast_arrays(np.asarray(clients, float), np.asarray(isl, float))
    load = np.ones(running.shape)
    if latencies.max_num_seqs > 1:
        load += (latencies.time_factor_under_load - 1.0) * (running - 1.0) / (latencies.max_num_seqs - 1)
    ttft_ns = np.floor(latencies.prefill_overhead_ns * load)
    ttft_ns += prompt * np.floor(latencies.prefill_time_per_token_ns * load)
    itl_ns = np.floor(latencies.inter_token_latency_ns * load)
    return np.floor(ttft_ns / NS_PER_MS), np.floor(itl_ns / NS_PER_MS)


def fit_llm_d(plan: StepPlan, *, clients: Any = CONCURRENCY, isl: Any = ISL, osl: Any = OSL) -> LatencyFit:
    """Choose the simulator's latencies for a plan over every combination of some loads and lengths.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs; its engine says what is added, ``max_num_batched_tokens`` is its token budget.
    clients : sequence of int
        Requests that run at once; the largest becomes ``max-num-seqs``.
    isl, osl : sequence of int
        Tokens of prompts, and of outputs, the first included.

    Returns
    -------
    LatencyFit
        The settings with the least sum of two mean absolute relative errors, of TTFT and of TPOT.

    Raises
    ------
    BackendError
        If an output has no second token, or no point's requests fit.

    Notes
    -----
    For each of many time factors the rest is solved by least squares of relative errors, against times half
    a millisecond longer than the plan's; from the best few, one number at a time moves, by 1 ms down to 2 us,
    until no step lessens the sum of the errors by :func:`simulated_ms`.
    """
    axes = [np.unique(np.atleast_1d(np.asarray(sizes))) for sizes in (isl, osl, clients)]
    for name, sizes, least in zip(("isl", "osl", "clients"), axes, (1, 2, 1), strict=True):
        if sizes.dtype.kind not in "iu" or sizes.size == 0 or sizes[0] < least:
            raise BackendError(f"{name} needs whole numbers of at least {least}, got {shown(sizes.tolist())}")
    points = [axis.ravel().astype(float) for axis in np.meshgrid(*axes, indexing="ij")]
    lengths, outputs, running = points
    # requests of independent clients
    seen = estimate(plan, lengths, outputs, running, plan.max_num_batched_tokens, arrivals="random")
    fits = seen.wait_ms <= 0.0
    fits &= lengths + outputs <= plan.model.max_position
    if not fits.any():
        raise BackendError(f"no such requests fit {plan!r}: fewer, shorter ones or a larger tp may do")
    lengths, outputs, running = (values[fits] for values in points)
    ttft_ms, tpot_ms = seen.ttft_ms[fits], seen.tpot_ms[fits]

    def loss(latencies: Latencies) -> float:
        first_ms, next_ms = simulated_ms(latencies, running, lengths)
        return float(np.abs(first_ms / ttft_ms - 1.0).mean() + np.abs(next_ms / tpot_ms - 1.0).mean())

    most = int(running.max())
    started = _started(most, running, lengths, ttft_ms, tpot_ms)
    best = sorted(started, key=loss)[:STARTS]
    latencies = min((_descended(one, loss) for one in best), key=loss)
    return LatencyFit(
        latencies, lengths, outputs, running, ttft_ms, tpot_ms,
        *simulated_ms(latencies, running, lengths), int((~fits).sum()),
    )  # fmt: skip


def _started(
    most: int, running: Floats, lengths: Floats, ttft_ms: Floats, tpot_ms: Floats
) -> list[Latencies]:
    """Settings by least squares, one for each of many time factors."""
    starts = []
    highest = max(float(values.max() / values.min()) for values in (ttft_ms, tpot_ms))
    for factor in np.geomspace(1.0, max(highest, 1.0), 200 if most > 1 else 1):
        load = 1.0 + (factor - 1.0) * (running - 1.0) / max(most - 1.0, 1.0)
        relative = load / (tpot_ms + CUT_MS)
        token_ms = relative.sum() / (relative * relative).sum()
        matrix = np.stack([load, load * lengths], 1) / (ttft_ms + CUT_MS)[:, np.newaxis]
        solved = np.linalg.lstsq(matrix, np.ones(len(matrix)), rcond=None)[0]
        if (solved < 0.0).any():
            # of two, the overhead is the one that may vanish
            solved = np.array([0.0, matrix[:, 1].sum() / (matrix[:, 1] ** 2).sum()])
        token_us, first_us = (round(time_ms * US_PER_MS) for time_ms in (token_ms, solved[0]))
        starts.append(
            Latencies(
                max_num_seqs=most,
                inter_token_latency_ns=token_us * NS_PER_US,
                prefill_overhead_ns=first_us * NS_PER_US,
                prefill_time_per_token_ns=round(solved[1] * NS_PER_MS),
                time_factor_under_load=round(float(factor), 4),
            )
        )
    return starts


def _descended(latencies: Latencies, loss: Any) -> Latencies:
    """Move one number at a time, until no step of any size lessens the loss."""
    largest: dict[str, float] = {
        "inter_token_latency_ns": NS_PER_MS,
        "prefill_overhead_ns": NS_PER_MS,
        "prefill_time_per_token_ns": latencies.prefill_time_per_token_ns // 8,
    }
    if latencies.max_num_seqs > 1:
        largest["time_factor_under_load"] = 0.5
    steps = [(name, size / 2**i) for i in range(10) for name, size in largest.items()]
    least, before = loss(latencies), np.inf
    while least < before:
        before = least
        for (name, step), sign in itertools.product(steps, (1.0, -1.0)):
            moved = getattr(latencies, name) + sign * step
            moved = max(round(moved, 4), 1.0) if "factor" in name else max(round(moved), 0)
            other = replace(latencies, **{name: moved})
            if loss(other) < least:
                latencies, least = other, loss(other)
    return latencies


def llm_d_yaml(
    plan: StepPlan,
    fit: LatencyFit,
    *,
    model: str | None = None,
    link_bytes_per_s: float | None = None,
    is_flat: bool = True,
) -> str:
    """Write a configuration as text: the fitted latencies, and a comment with their range and error."""
    latencies = fit.latencies
    if model is None:
        model = PRESETS.get(plan.model.name, (plan.model.name,))[0]
    link = plan.gpu.nvlink_bytes_per_s if link_bytes_per_s is None else link_bytes_per_s
    if not link > 0.0:
        raise BackendError(f"a link of {link!r} bytes/s moves no KV cache")
    memory, isl = plan.memory, float(fit.isl.mean())
    token_bytes = memory.kv_bytes_per_token + memory.state_bytes_per_sequence / isl
    times = {
        "inter-token-latency": latencies.inter_token_latency_ns,
        "inter-token-latency-std-dev": 0,
        "prefill-overhead": latencies.prefill_overhead_ns,
        "prefill-time-per-token": latencies.prefill_time_per_token_ns,
        "prefill-time-std-dev": 0,
        "kv-cache-transfer-time-per-token": round(token_bytes / link * US_PER_S * NS_PER_US),
        "kv-cache-transfer-time-std-dev": 0,
    }
    settings: dict[str, Any] = {key: _duration(time_ns) for key, time_ns in times.items()}
    settings["time-factor-under-load"] = latencies.time_factor_under_load
    comments = [
        *fit_words(plan, fit),
        "read by releases up to v0.11.2, and by later ones that still take keys of the top level"
        if is_flat
        else "only for releases after v0.11.2: to those before, every latency of this file is 0",
    ]
    document = {
        "engine": "vllm",
        "model": model,
        "max-num-seqs": latencies.max_num_seqs,
        "max-model-len": plan.model.max_position,
        "latency-calculator": "per-token",
        **(settings if is_flat else {"latencies": settings}),
    }
    return "".join(f"# {line}\n" for line in comments) + yaml_text(document)


def fit_words(plan: StepPlan, fit: LatencyFit) -> list[str]:
    """What was fitted and how well, in lines of text."""
    shown = {"clients": fit.clients, "isl": fit.isl, "osl": fit.osl}
    ranges = ", ".join(
        " ".join([name, *(f"{value:.0f}" for value in np.unique(values))]) for name, values in shown.items()
    )
    lines = [
        f"{plan.model.name} on {plan.tp} x {plan.gpu.title}, {plan.dtype} weights, {plan.kv_dtype} KV cache, "
        f"engine {plan.engine}, by fastroof {plan.version}",
        f"fitted over {len(fit.isl)} operating points: {ranges}",
        "of means: the plan has no spread. The simulator cuts times to whole milliseconds; that is part of",
        "the errors of its formula against the plan's estimates:",
    ]
    for name, errors in zip(("time to first token", "inter-token latency"), fit.errors, strict=True):
        worst = int(np.abs(errors).argmax())
        lines.append(
            f"{name}: MAPE {100.0 * np.abs(errors).mean():.1f} %, at most {100.0 * abs(errors[worst]):.1f} % "
            f"(clients {fit.clients[worst]:.0f}, isl {fit.isl[worst]:.0f}, osl {fit.osl[worst]:.0f})"
        )
    running = np.unique(fit.clients)
    if len(running) > 1:
        lines.append("where it holds, MAPE by clients:")
        for requests in running:
            here = fit.clients == requests
            first, following = (100.0 * np.abs(errors[here]).mean() for errors in fit.errors)
            lines.append(f"  {requests:.0f}: first token {first:.1f} %, inter-token {following:.1f} %")
    if fit.left_out:
        lines.append(f"left out, since they do not fit the KV cache or the context: {fit.left_out} points")
    return lines


def _duration(time_ns: int) -> str:
    """A duration as Go reads it, exact."""
    unit, digits = ("ms", 6) if time_ns >= NS_PER_MS else ("us", 3)
    whole, rest = divmod(time_ns, 10**digits)
    return f"{whole}.{rest:0{digits}d}".rstrip("0").rstrip(".") + unit


def export_llm_d(
    plan: StepPlan,
    output: str | Path,
    fit: LatencyFit | None = None,
    *,
    model: str | None = None,
    link_bytes_per_s: float | None = None,
    is_flat: bool = True,
) -> LatencyFit:
    """Write a plan's configuration, whole or not at all.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    output : str or Path
        The file, of the suffix ``.yaml`` or ``.yml``.
    fit : LatencyFit, optional
        What to write; by default :func:`fit_llm_d` over its default range.
    model, link_bytes_per_s, is_flat
        As of :func:`llm_d_yaml`.

    Returns
    -------
    LatencyFit
        What was written, and its errors.

    Raises
    ------
    BackendError
        As of :func:`fit_llm_d`, or if there is no such folder.
    """
    output = Path(output)
    if output.suffix not in (".yaml", ".yml") or output.is_dir():
        raise BackendError(f"the configuration is a .yaml file, got {output}")
    if fit is None:
        fit = fit_llm_d(plan)
    text = llm_d_yaml(plan, fit, model=model, link_bytes_per_s=link_bytes_per_s, is_flat=is_flat)
    write_output(output, text, error=BackendError)
    return fit
