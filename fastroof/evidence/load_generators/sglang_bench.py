"""``python -m sglang.bench_serving --output-file``: one JSON object per line and run.

Read in sgl-project/sglang, python/sglang/bench_serving.py at 0033168f0f58b2bc05aa0273bd475d9c01bafb1c. Its
first version, at 50a613687fe1ffc6f1bb630c684a24c428a54a74, writes only medians of TTFT and gaps.
"""

from __future__ import annotations

import math
from typing import Final

from fastroof.evidence.load_generators.documents import Document, number, numbers, spread_of, text
from fastroof.evidence.load_generators.figures import POISSON, Figures
from fastroof.evidence.load_generators.vllm_bench import mean_tpot_ms

NAME: Final = "sglang.bench_serving"


def is_written_by(document: Document) -> bool:
    """Return whether this tool wrote the line."""
    return {"total_output_tokens_retokenized", "dataset_name"} <= document.keys()


def figures_of(where: str, document: Document, name: str) -> list[Figures]:
    """Read the run of a line."""
    completed = number(where, document, "completed")
    tpot_ms = number(where, document, "mean_tpot_ms")

    def each(key: str) -> float:
        total = number(where, document, key)
        return total / completed if completed > 0.0 else math.nan

    return [
        Figures(
            file=where,
            name=name,
            generator=NAME,
            model=text(document, "model_id", "model"),
            requests=completed,
            isl=each("total_input_tokens"),
            osl=each("total_output_tokens"),
            ttft_ms=number(where, document, "mean_ttft_ms"),
            tpot_ms=mean_tpot_ms(where, document) if math.isnan(tpot_ms) else tpot_ms,
            latency_ms=number(where, document, "mean_e2e_latency_ms"),
            has_medians="median_itl_ms" in document,
            clients=number(where, document, "max_concurrency"),
            rate_per_s=number(where, document, "request_rate"),
            arrivals=POISSON,
            duration_s=number(where, document, "duration"),
            accepted=number(where, document, "accept_length"),
            length_spread=spread_of(numbers(where, document, "input_lens")),
        )
    ]
