"""``inference-perf``: one report per stage (stage_N_lifecycle_metrics.json), and one of all stages.

Read in kubernetes-sigs/inference-perf, inference_perf/reportgen/base.py at
010d12fb62cc3157b6bd228ef93dd865c7a05194, and in its recorded reports (demos/kubecon-na-2025 at
a8a2a0bafad95b4330e2e8f9d390b7f2501218d7). Times are in seconds. Reports from before its issue 564 counted
the tokens of a stream about twice, so that their means are inconsistent; figures.py rejects those.
"""

from __future__ import annotations

import math
from typing import Final

from fastroof.evidence.load_generators.documents import Document, number, part
from fastroof.evidence.load_generators.figures import Figures
from fastroof.units import MS_PER_S

NAME: Final = "inference-perf"


def is_written_by(document: Document) -> bool:
    """Return whether this tool wrote the document."""
    return {"load_summary", "successes", "failures"} <= document.keys()


def figures_of(where: str, document: Document, name: str) -> list[Figures]:
    """Read the stage of a report."""
    load, answered = part(document, "load_summary"), part(document, "successes")
    times = part(answered, "latency")
    requests = number(where, answered, "count")
    throughput = number(where, part(answered, "throughput"), "requests_per_sec")
    duration_s = number(where, document, "benchmark_time_seconds")
    if not duration_s > 0.0:
        duration_s = requests / throughput if throughput > 0.0 else math.nan
    refused = ""
    clients = number(where, load, "concurrency")
    if "requested_rate" not in load:
        refused = "it combines all stages; give a single stage's stage_N_lifecycle_metrics.json"

    def mean_s(key: str) -> float:
        return number(f"{where}, {key}", part(times, key), "mean")

    def length(*keys: str) -> float:
        found = [number(f"{where}, {key}", part(answered, key), "mean") for key in keys]
        return next((value for value in found if not math.isnan(value)), math.nan)

    return [
        Figures(
            file=where,
            name=name,
            generator=NAME,
            requests=requests,
            failed=number(where, part(document, "failures"), "count"),
            isl=length("prompt_tokens", "prompt_len"),
            osl=length("output_len", "output_tokens"),
            ttft_ms=mean_s("time_to_first_token") * MS_PER_S,
            tpot_ms=mean_s("time_per_output_token") * MS_PER_S,
            latency_ms=mean_s("request_latency") * MS_PER_S,
            clients=clients,
            # with clients the rate is a result, not the requested rate
            rate_per_s=math.nan if clients >= 1.0 else number(where, load, "requested_rate"),
            duration_s=duration_s,
            refused=refused,
        )
    ]
