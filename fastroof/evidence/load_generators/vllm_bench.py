"""``vllm bench serve --save-result`` (``--save-detailed``, ``--append-result``), and its predecessor script.

Read in vllm-project/vllm, vllm/benchmarks/serve.py at 009e6d4a1cd6ba3fb2a9fc00f4ec06f5297232a1 and
benchmarks/benchmark_serving.py at 8668d7c05027b98ac66bd5540955dd2ce3a0f318: keys were added since, but none
of those below was renamed. Times in lists are in seconds.
"""

from __future__ import annotations

import math
from typing import Final

from fastroof.errors import TableError
from fastroof.evidence.load_generators.documents import (
    Document,
    mean_of,
    number,
    numbers,
    spread_of,
    text,
)
from fastroof.evidence.load_generators.figures import CONSTANT, POISSON, Figures
from fastroof.units import MS_PER_S

NAME: Final = "vllm bench serve"


def is_written_by(document: Document) -> bool:
    """Return whether this tool wrote the document."""
    return {"tokenizer_id", "num_prompts", "request_throughput"} <= document.keys()


def figures_of(where: str, document: Document, name: str) -> list[Figures]:
    """Read the run of a result."""
    completed = number(where, document, "completed")
    sent = number(where, document, "num_prompts")
    failed = number(where, document, "failed")
    burstiness = number(where, document, "burstiness")
    tpot_ms = number(where, document, "mean_tpot_ms")
    refused = ""
    if "ramp_up_strategy" in document:
        refused = "its rate was ramped up, so that there is no steady state"
    elif "total_output_tokens" not in document:
        refused = "it is of a pooling model, which produces no tokens"
    return [
        Figures(
            file=where,
            name=name,
            generator=NAME,
            model=text(document, "model_id"),
            requests=completed,
            # older results count only answered requests
            failed=max(sent - completed, 0.0) if math.isnan(failed) else failed,
            isl=_each(number(where, document, "total_input_tokens"), completed),
            osl=_each(number(where, document, "total_output_tokens"), completed),
            ttft_ms=number(where, document, "mean_ttft_ms"),
            tpot_ms=mean_tpot_ms(where, document) if math.isnan(tpot_ms) else tpot_ms,
            latency_ms=number(where, document, "mean_e2el_ms"),
            has_medians="median_tpot_ms" in document,
            clients=number(where, document, "max_concurrency"),
            rate_per_s=number(where, document, "request_rate"),
            # 1 is a Poisson process, inf evenly spaced requests, and other values are in between
            arrivals=POISSON if burstiness == 1.0 else CONSTANT if burstiness == math.inf else "",
            duration_s=number(where, document, "duration"),
            accepted=number(where, document, "spec_decode_acceptance_length"),
            length_spread=spread_of(numbers(where, document, "input_lens")),
            refused=refused,
        )
    ]


def _each(total: float, requests: float) -> float:
    return total / requests if requests > 0.0 else math.nan


def mean_tpot_ms(where: str, document: Document) -> float:
    """Return the mean over requests from a detailed result, ms; nan without details."""
    lengths, gaps = numbers(where, document, "output_lens"), document.get("itls")
    if gaps is None or not lengths:
        return math.nan
    if not isinstance(gaps, list) or len(gaps) != len(lengths):
        raise TableError(f"{where}: itls must be a list with the gaps of each of {len(lengths)} requests")
    sums = [math.fsum(numbers(where, {"itls": each}, "itls")) for each in gaps]
    each = [MS_PER_S * s / (n - 1.0) for s, n in zip(sums, lengths, strict=True) if n > 1.0 and s > 0.0]
    return mean_of(each)
