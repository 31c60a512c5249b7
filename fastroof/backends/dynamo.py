"""Profiles for Dynamo's mocker and AISimulate: a plan's step times on the grids that their reader needs.

The reader is native: ``PerfModel`` in lib/mocker/src/common/perf_model.rs (ai-dynamo/dynamo@f80944a4), as
built into ai-dynamo-runtime 1.6.1. What it asks of a file, and when, was tried on that build.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.atomic_files import write_output
from fastroof.backends.plan_facts import check_decodes_alone
from fastroof.backends.releases import warn_of_release
from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import BackendError, PlanRangeError
from fastroof.run import StepBatch
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


LEAST_DECODE_MS: Final = 1.0
"""The mocker's shortest decode step, ms, whatever the file says."""

MAX_BATCH_SIZE: Final = 256
"""The mocker's default max_num_seqs."""

POINTS: Final = 24
"""Grid points for each doubling: interpolating between them has a mean error of 0.1 to 0.2 %."""

MOST_POINTS: Final = 128

BLOCK_TOKENS: Final = 64
"""The mocker's default block_size."""

SIMULATED_REQUESTS: Final = 2000


def dynamo_profile(
    plan: StepPlan,
    *,
    max_isl: int | None = None,
    prompt_len: int | None = None,
    max_context: int | None = None,
    max_kv_tokens: int | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    points: int = POINTS,
    beside: tuple[int, int] | None = None,
) -> dict[str, Floats]:
    """Tabulate a plan as Dynamo's mocker reads it.

    Parameters
    ----------
    plan : StepPlan
        What to tabulate; its engine says what is added to the kernels.
    max_isl : int, optional
        Most new prompt tokens in a step, the mocker's max_num_batched_tokens; by default the plan's.
    prompt_len : int, optional
        Tokens of a prompt, if all are about as long: more new tokens in a step are several prompts, fewer
        a part of one, after half of its others on average. By default they are one prompt without context,
        however many: right for a single prompt, too long for several, too short for the parts of a long one.
    max_context : int, optional
        Most tokens that a decode attends to; by default the model's positions.
    max_kv_tokens : int, optional
        Most tokens that the decodes of a step attend to together; by default max_batch_size * max_context,
        which the mocker's num_gpu_blocks * block_size is meant to be below. It counts whole tokens: where
        layers keep a window of a sequence, ``plan.memory.max_kv_tokens`` is less than what fits; next to
        states ``plan.memory.tokens_beside_states(max_batch_size)`` are left.
    max_batch_size : int
        Most decodes in a step, the mocker's max_num_seqs.
    points : int
        Grid points for each doubling of tokens, 1 to 128.
    beside : (int, int), optional
        How many decodes usually run, and the tokens that each attends to, see :func:`decodes_beside`: prefill
        times become what new tokens add to a step of those, which is what the mocker adds. Then lone prompts
        are too fast. By default they are what the new tokens take by themselves: right for those, too slow
        with decodes.

    Returns
    -------
    dict of str to ndarray of float64
        ``prefill_isl`` (p,) tokens and ``prefill_ttft_ms`` (p,); ``decode_active_kv_tokens`` (a,) and
        ``decode_context_length`` (c,) tokens, both rising; ``decode_itl`` (a, c) ms, a step's.

    Raises
    ------
    BackendError
        If a limit is not an integer of a size that makes a grid, or decodes take longer next to prefill while
        ``beside`` is not given.
    PlanRangeError
        If max_isl or max_batch_size is larger than the plan.

    Notes
    -----
    The mocker times a step as prefill + decode, each from a table. Prefill: linear in the new tokens of all
    prompts, whatever stands before them; here at every number of tokens, so that nothing is interpolated. The
    parts q of a prompt of P tokens, each after (P - q) / 2, attend to as much as they do one after another.
    Both read the weights, which a real step reads once: that is what ``beside`` takes off the prefill.

    Decode: bilinear in A, the tokens that all decodes attend to (the new one included), and C, their mean,
    rounded down. At (A, C) stands the step of b = A / C requests, held within 1 and max_batch_size, that
    attend to A tokens together; between two whole b and two whole kv_len it is linear. Where A is a multiple
    of C that is ``plan.decode_us(A // C, C)``. Beyond the last point the reader continues the last two; under
    ``LEAST_DECODE_MS`` it takes that.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> profile = dynamo_profile(plan, max_context=4096)
    >>> active, context = (profile[f"decode_{name}"] for name in ("active_kv_tokens", "context_length"))
    >>> at = active.searchsorted(64 * 4096), context.searchsorted(4096)
    >>> bool(profile["decode_itl"][at] == plan.decode_us(64, 4096) / 1e3)
    True
    """
    running = None if beside is None else _decodes(plan, beside)
    if running is None:
        check_decodes_alone(plan, "Dynamo's mocker")
    most_new = _size("max_isl", plan.max_num_batched_tokens if max_isl is None else max_isl, 2)
    most_batch = _size("max_batch_size", max_batch_size, 1)
    for name, size, limit in (
        ("max_isl", most_new, "max_num_batched_tokens"),
        ("max_batch_size", most_batch, "max_num_seqs"),
    ):
        if size > getattr(plan, limit):
            raise PlanRangeError(
                f"{name} is {size}, the plan times up to {getattr(plan, limit)}: "
                f"compile_plan(..., {limit}={size}) or a smaller {name}"
            )
    longest = _size("max_context", plan.model.max_position if max_context is None else max_context, 2)
    most_kv = _size("max_kv_tokens", most_batch * longest if max_kv_tokens is None else max_kv_tokens, 2)
    points = whole_number("points", points, most=MOST_POINTS, error=BackendError)
    if running is not None:
        most_new = min(most_new, plan.max_num_batched_tokens - running[0])
    lengths = np.arange(1, most_new + 1)
    # one set of nodes for both axes: a batch of 1, and of any power of 2, runs through nodes
    doublings = np.arange(0, points * np.log2(max(most_kv, longest)) + 1)
    nodes = np.unique(np.rint(2.0 ** (doublings / points)).astype(np.int64))
    contexts = np.union1d(nodes[nodes < longest], [longest])
    active = np.union1d(np.append(nodes, longest), [most_kv])
    active = active[active <= most_kv]
    return {
        "prefill_isl": lengths.astype(np.float64),
        "prefill_ttft_ms": _prefill_us(plan, lengths, prompt_len, running) / US_PER_MS,
        "decode_active_kv_tokens": active.astype(np.float64),
        "decode_context_length": contexts.astype(np.float64),
        "decode_itl": _decode_us(plan, active[:, None], contexts[None, :], most_batch) / US_PER_MS,
    }


def decodes_beside(
    plan: StepPlan,
    *,
    rate_per_s: float,
    prompt_len: int,
    output_len: int,
    max_batch_size: int = MAX_BATCH_SIZE,
) -> tuple[int, int]:
    """Find the decodes that run next to prompts at a rate of requests: ``beside`` for :func:`dynamo_profile`.

    Parameters
    ----------
    plan : StepPlan
        What times the steps.
    rate_per_s : float
        Requests a second, which come at random.
    prompt_len, output_len : int
        Tokens of each request.
    max_batch_size : int
        The mocker's max_num_seqs.

    Returns
    -------
    (int, int)
        Mean number of decodes, 1 to max_batch_size, and the tokens that each attends to.

    Raises
    ------
    BackendError
        If the rate is not a positive number, or a length is not an integer of at least 1.
    SimulationError
        If the engine never has room for such a request.

    Notes
    -----
    By Little's law, the rate times the mean time between the first and the last token, of 2,000 requests that
    fastroof simulates in the mocker's engine: synchronous, with chunked prefill and blocks of 64 tokens.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> decodes, kv_len = decodes_beside(plan, rate_per_s=20, prompt_len=1024, output_len=128)
    >>> 30 <= decodes <= 38, kv_len
    (True, 1088)
    """
    prompt, output = _size("prompt_len", prompt_len, 1), _size("output_len", output_len, 1)
    if not is_number(rate_per_s) or not 0 < rate_per_s < np.inf:
        raise BackendError(
            f"rate_per_s must be a positive number of requests a second, got {shown(rate_per_s)}"
        )
    arrival_s = np.random.default_rng(0).exponential(1 / rate_per_s, SIMULATED_REQUESTS).cumsum()
    trace = Trace(arrival_s, np.full(SIMULATED_REQUESTS, prompt), np.full(SIMULATED_REQUESTS, output))
    batch = _size("max_batch_size", max_batch_size, 1)
    settings = EngineSettings(
        num_gpu_blocks=plan.memory.tokens_beside_states(batch) // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_seqs=batch,
        async_scheduling=False,
    )
    seen = run_engine(plan, trace, settings)
    decodes = rate_per_s * float((seen.last_us - seen.first_us).mean()) / US_PER_S
    return min(max(1, round(decodes)), batch), prompt + output // 2


def write_dynamo_profile(plan: StepPlan, path: str | Path, **limits: Any) -> dict[str, Floats]:
    """Write a plan as a profile that Dynamo's mocker reads, whole or not at all.

    Parameters
    ----------
    plan : StepPlan
        What to tabulate.
    path : str or Path
        The file: .npz, as the mocker insists.
    **limits
        As of :func:`dynamo_profile`.

    Returns
    -------
    dict of str to ndarray of float64
        What was written. The file also says of which plan it is, in an array ``fastroof_plan`` that the
        mocker ignores.

    Raises
    ------
    BackendError
        If the name does not end in .npz or its folder does not exist, and as :func:`dynamo_profile`.

    Warns
    -----
    ReleaseWarning
        If Dynamo is installed here in a release that the profile was not tried with.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise BackendError(f"a profile of Dynamo's mocker is an .npz file, got {path}")
    warn_of_release("dynamo.py")
    profile = dynamo_profile(plan, **limits)
    content = io.BytesIO()
    np.savez(content, **profile, fastroof_plan=np.array(json.dumps(plan.describe())))  # type: ignore[arg-type]
    write_output(path, content.getvalue(), error=BackendError)
    return profile


def _size(name: str, value: Any, least: int) -> int:
    return whole_number(name, value, least, error=BackendError)


def _prefill_us(
    plan: StepPlan, lengths: Longs, prompt_len: int | None, running: tuple[int, int] | None
) -> Floats:
    """Time each number of new tokens as prompts of one length, or as what they add to running decodes."""
    if prompt_len is None:
        counts, prompts, contexts = np.ones_like(lengths), lengths, np.zeros_like(lengths)
    else:
        whole, rest = np.divmod(lengths, _size("prompt_len", prompt_len, 1))
        counts = whole + (rest > 0)
        ends = np.cumsum(counts)
        prompts = np.full(ends[-1], prompt_len)
        prompts[ends[rest > 0] - 1] = rest[rest > 0]
        contexts = (prompt_len - prompts) // 2
    if running is None:
        return plan.step_us(StepBatch(prompts, contexts, np.r_[0, np.cumsum(counts)]))
    decodes, kv_len = running
    starts = np.repeat(np.cumsum(counts) - counts, decodes)
    new, before = np.insert(prompts, starts, 1), np.insert(contexts, starts, kv_len - 1)
    together_us = plan.step_us(StepBatch(new, before, np.r_[0, np.cumsum(counts + decodes)]))
    # a jagged kernel may be faster for more rows; the mocker's times do not fall below nothing
    return np.maximum(together_us - plan.decode_us(decodes, kv_len), 0.0)


def _decodes(plan: StepPlan, beside: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(beside, tuple) or len(beside) != 2:
        raise BackendError(
            f"beside must be the decodes that run and their tokens, as (32, 4096), got {beside!r}"
        )
    decodes, kv_len = (
        _size("the decodes of beside", beside[0], 1),
        _size("the tokens of beside", beside[1], 1),
    )
    most = min(plan.max_num_seqs, plan.max_num_batched_tokens - 1)
    if decodes > most:
        raise PlanRangeError(
            f"{decodes} decodes with new tokens are more than the {most} that the plan times"
        )
    return decodes, kv_len


def _decode_us(plan: StepPlan, active: Longs, context: Longs, max_batch_size: int) -> Floats:
    batch = np.clip(active / context, 1.0, max_batch_size)
    fewer, more = np.floor(batch).astype(np.int64), np.ceil(batch).astype(np.int64)
    return _between(batch - fewer, _shared_us(plan, fewer, active), _shared_us(plan, more, active))


def _shared_us(plan: StepPlan, batch: Longs, active: Longs) -> Floats:
    """Time decodes that attend to ``active`` tokens together."""
    kv_len = active // batch
    return _between(active / batch - kv_len, plan.decode_us(batch, kv_len), plan.decode_us(batch, kv_len + 1))


def _between(weight: Floats, low_us: Floats, high_us: Floats) -> Floats:
    return (1.0 - weight) * low_us + weight * high_us
