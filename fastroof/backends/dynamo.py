"""Profiles for Dynamo's mocker: a plan's step times on the grids that their reader needs.

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
from fastroof.backends.mixed_steps import MAX_BATCH_SIZE, added_us, size_of, sizes_of
from fastroof.backends.releases import warn_of_release
from fastroof.checks import whole_number
from fastroof.errors import BackendError
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


LEAST_DECODE_MS: Final = 1.0
"""The mocker's shortest decode step, ms, whatever the file says."""

POINTS: Final = 24
"""Grid points for each doubling: interpolating between them has a mean error of 0.1 to 0.2 %."""

MOST_POINTS: Final = 128


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
        How many decodes usually run, and the tokens that each attends to, see
        :func:`fastroof.backends.mixed_steps.decodes_beside`: prefill times become what new tokens add to a
        step of those, which is what the mocker adds. Then lone prompts are too fast. By default they are
        what the new tokens take by themselves: right for those, too slow with decodes.

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
    most_new, most_batch, longest, running = sizes_of(
        plan, "Dynamo's mocker", max_isl, max_batch_size, max_context, beside
    )
    most_kv = size_of("max_kv_tokens", most_batch * longest if max_kv_tokens is None else max_kv_tokens, 2)
    points = whole_number("points", points, most=MOST_POINTS, error=BackendError)
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


def _prefill_us(
    plan: StepPlan, lengths: Longs, prompt_len: int | None, running: tuple[int, int] | None
) -> Floats:
    """Time each number of new tokens as prompts of one length, or as what they add to running decodes."""
    if prompt_len is None:
        counts, prompts, contexts = np.ones_like(lengths), lengths, np.zeros_like(lengths)
    else:
        whole, rest = np.divmod(lengths, size_of("prompt_len", prompt_len, 1))
        counts = whole + (rest > 0)
        ends = np.cumsum(counts)
        prompts = np.full(ends[-1], prompt_len)
        prompts[ends[rest > 0] - 1] = rest[rest > 0]
        contexts = (prompt_len - prompts) // 2
    return added_us(plan, counts, prompts, contexts, running)


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
