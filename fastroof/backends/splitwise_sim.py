"""Tables for splitwise-sim: a plan's step times by the tokens of a batch, all that its lookups know.

The reader is ``DatabasePerformanceModel`` in performance_model.py (Mutinifni/splitwise-sim@3780880, MIT),
which was run at 8f99e7d. It groups a file's rows by ``prompt_size * batch_size`` and draws lines between
them, for prompts and for decodes, and goes on with the last two rows beyond. A batch is looked up by its
tokens: those of its prompts, which are never cut, or one for each decode; if it has both, as prompts of
so many tokens times 1.1.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.atomic_files import write_output
from fastroof.checks import whole_number
from fastroof.errors import BackendError
from fastroof.run import StepBatch
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


COLUMNS: Final = (
    "model",
    "hardware",
    "tensor_parallel",
    "prompt_size",
    "batch_size",
    "token_size",
    "prompt_time",
    "token_time",
)
"""What the reader takes of a file; it drops other columns."""

HARDWARE: Final = {"h100": "h100-80gb", "a100": "a100-80gb"}
"""Names of its processors, by those of GPUs here."""

MIXED_FACTOR: Final = 1.1
"""What a batch of prompts and decodes takes, of prompts of as many tokens, in the reader."""

_PROMPTS_BESIDE: Final = 3
_COARSE: Final = 256
"""Tokens between rows beyond a step's."""


def splitwise_table(plan: StepPlan, kv_len: int, *, longest: int | None = None) -> dict[str, Floats | Longs]:
    """Tabulate a plan by the tokens of a batch.

    Parameters
    ----------
    plan : StepPlan
        What to tabulate; its engine says what is added to the kernels.
    kv_len : int
        Tokens that each decode attends to: the reader knows of none, so that of the usual one.
    longest : int, optional
        Most tokens of a batch of prompts; by default the model's positions. Beyond the plan's max_tokens a
        prompt takes several steps of so many tokens, whose times are added up.

    Returns
    -------
    dict of str to ndarray, shape (rows,)
        ``tokens`` of a batch, rising; ``prompt_ms`` of one prompt of so many; ``token_ms`` of a step of so
        many decodes. Beyond the plan's max_seqs there are no such steps, and the last one's time is repeated.

    Raises
    ------
    BackendError
        If kv_len or longest is no length, or the plan is of several ranks or stages.
    """
    kv_len = whole_number("kv_len", kv_len, error=BackendError)
    longest = (
        plan.model.max_position if longest is None else whole_number("longest", longest, error=BackendError)
    )
    if plan.layout.world_size != plan.layout.tp:
        raise BackendError(
            "splitwise-sim looks its instances up by tensor_parallel only, and the plan's layout is "
            f"{plan.layout}; use a plan with tp only"
        )
    fine = min(plan.max_tokens, max(longest, 2))
    tokens = np.unique([*range(1, fine + 1), *range(fine, longest, _COARSE), max(longest, fine)])
    decodes = np.minimum(tokens, min(plan.max_seqs, plan.max_tokens))
    return {
        "tokens": tokens,
        "prompt_ms": _prompt_us(plan, tokens) / US_PER_MS,
        "token_ms": plan.decode_us(decodes, np.full_like(decodes, kv_len)) / US_PER_MS,
    }


def _prompt_us(plan: StepPlan, tokens: Longs) -> Floats:
    """Time prompts, cut into steps of max_tokens if they are longer."""
    most = plan.max_tokens
    ahead = np.arange(0, int(tokens[-1]), most)
    whole = np.concatenate([[0.0], np.cumsum(plan.prefill_us(np.full_like(ahead, most), ahead))])
    rest = tokens % most
    last = np.where(rest > 0, plan.prefill_us(np.maximum(rest, 1), tokens - rest), 0.0)
    times: Floats = whole[tokens // most] + last
    return times


class SplitwiseError(NamedTuple):
    """How far steps of one kind are off.

    Attributes
    ----------
    kind : str
        What the steps are.
    mean, worst : float
        Of the absolute relative differences from the plan.
    bias : float
        Mean of the differences; above 0 the table is too slow.
    """

    kind: str
    mean: float
    worst: float
    bias: float


def splitwise_errors(
    plan: StepPlan, table: dict[str, Floats | Longs], *, steps: int = 500
) -> list[SplitwiseError]:
    """Measure what the reader's lookups of a table are off, over drawn steps that fit the plan.

    Prompts are of 16 tokens to the plan's max_tokens or the table's last, decodes attend to 64 tokens to the
    model's positions or 32,768, both spread evenly in log; neither is what the table was made for.

    Parameters
    ----------
    plan : StepPlan
        The plan.
    table : dict
        Of :func:`splitwise_table`.
    steps : int
        Of each kind.

    Returns
    -------
    list of SplitwiseError
        One prompt, several prompts, decodes, prompts with decodes.
    """
    rng = np.random.default_rng(2024)
    longest_kv = min(plan.model.max_position, 32_768)
    most_decodes = max(min(plan.max_seqs - _PROMPTS_BESIDE, plan.max_tokens // 2, 256), 1)

    def drawn(least: int, most: int, count: int = 1) -> list[int]:
        return [round(value) for value in np.exp(rng.uniform(np.log(least), np.log(most), count))]

    def prompts(most_tokens: int, count: int) -> list[tuple[int, int]]:
        lengths = drawn(16, most_tokens, count)
        return [
            (length, 0) for i, length in enumerate(lengths) if not i or sum(lengths[: i + 1]) <= most_tokens
        ]

    def decodes(most: int) -> list[tuple[int, int]]:
        return [(1, length) for length in drawn(64, longest_kv, drawn(1, most)[0])]

    most_tokens = min(plan.max_tokens, int(table["tokens"][-1]))
    half = max(most_tokens // 2, 17)
    kinds: dict[str, Callable[[], list[tuple[int, int]]]] = {
        "one prompt": lambda: prompts(most_tokens, 1),
        "several prompts": lambda: prompts(most_tokens, int(rng.integers(2, 9))),
        "decodes": lambda: decodes(most_decodes),
        "prompts with decodes": lambda: (
            prompts(half, int(rng.integers(1, _PROMPTS_BESIDE + 1))) + decodes(most_decodes)
        ),
    }
    found = []
    for kind, draw in kinds.items():
        batch = [draw() for _ in range(steps)]
        expected = plan.step_us(StepBatch.from_requests(batch)) / US_PER_MS
        looked_up = np.array([looked_up_ms(table, one) for one in batch])
        off = looked_up / expected - 1.0
        found.append(SplitwiseError(kind, float(abs(off).mean()), float(abs(off).max()), float(off.mean())))
    return found


def looked_up_ms(table: dict[str, Floats | Longs], requests: list[tuple[int, int]]) -> float:
    """Time a batch of (new tokens, context) as the reader does: one new token after a context is a decode."""
    is_decode = [new == 1 and context > 0 for new, context in requests]
    tokens = sum(1 if decode else new for decode, (new, _) in zip(is_decode, requests, strict=True))
    column = "token_ms" if all(is_decode) else "prompt_ms"
    x, y = table["tokens"], table[column]
    at = int(np.clip(np.searchsorted(x, tokens), 1, len(x) - 1))
    time_ms = float(y[at - 1] + (y[at] - y[at - 1]) / (x[at] - x[at - 1]) * (tokens - x[at - 1]))
    return time_ms * (MIXED_FACTOR if any(is_decode) and not all(is_decode) else 1.0)


def write_splitwise_table(
    plan: StepPlan,
    path: Path,
    kv_len: int,
    *,
    longest: int | None = None,
    model: str | None = None,
    hardware: str | None = None,
) -> dict[str, Floats | Longs]:
    """Write the CSV that ``db_path`` of its configs/performance_model/db.yaml names.

    Parameters
    ----------
    plan, kv_len, longest
        As of :func:`splitwise_table`.
    path : Path
        File to write.
    model, hardware : str, optional
        Names in its configs/model_repo and configs/hardware_repo; by default the plan's model, and
        :data:`HARDWARE` or the GPU's name. They are what its instances are looked up by.

    Returns
    -------
    dict
        What was written, as of :func:`splitwise_table`.

    Raises
    ------
    BackendError
        As :func:`splitwise_table`.

    Examples
    --------
    >>> import fastroof, tempfile
    >>> plan = fastroof.compile_plan("llama-2-70b", "h100", engine="kernels", tp=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "perf_model.csv"
    ...     table = write_splitwise_table(plan, path, 2048, model="llama2-70b")
    ...     print(path.read_text().splitlines()[64])
    llama2-70b,h100-80gb,8,64,1,1,11.791691160999317,13.69704603334524,
    >>> float(table["token_ms"][63]) == plan.decode_us(64, 2048) / 1e3
    True
    """
    table = splitwise_table(plan, kv_len, longest=longest)
    names: tuple[Any, ...] = (
        model or plan.model.name,
        hardware or HARDWARE.get(plan.gpu.name, plan.gpu.name),
        plan.layout.tp,
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, "note"])
    facts = plan.describe()
    note = " ".join(f"{name}={facts[name]}" for name in ("model", "gpu", "tp", "dtype", "kv_dtype", "engine"))
    note = f"fastroof {facts['version']}: {note} kv_len={kv_len}"
    columns = (table[name].tolist() for name in ("tokens", "prompt_ms", "token_ms"))
    for tokens, prompt_ms, token_ms in zip(*columns, strict=True):
        writer.writerow([*names, tokens, 1, 1, prompt_ms, token_ms, note])
        note = ""
    write_output(path, text.getvalue().encode())
    return table
