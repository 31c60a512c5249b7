"""InferenceX (InferenceMAX): ``agg_*.json``, its load generator's result by its ``process_result.py``.

Read in SemiAnalysisAI/InferenceX, utils/process_result.py, and the commands of its benchmarks. Times are in
seconds, throughputs per GPU. Counts of requests and tokens are left out, but the means determine them:
outputs by latency = TTFT + TPOT x (tokens - 1), prompts by the ratio of throughputs, and the duration by ten
requests per client, ``--num-prompts`` of its commands.
"""

from __future__ import annotations

import math
from typing import Final

from fastroof.evidence.load_generators.documents import Document, number, text
from fastroof.evidence.load_generators.figures import Figures
from fastroof.units import MS_PER_S

NAME: Final = "InferenceX"

REQUESTS_PER_CLIENT: Final = 10.0
PLAIN_DECODING: Final = ("", "none", "false", "off")

SHORTEST: Final = 0.5
LONGEST: Final = 1.05
"""Range of the mean output over the requested maximum: lengths are drawn from a share of it up to it."""


def is_written_by(document: Document) -> bool:
    """Return whether this tool wrote the document."""
    return {"hw", "conc", "framework", "tput_per_gpu"} <= document.keys()


def figures_of(where: str, document: Document, name: str) -> list[Figures]:
    """Read the run of a result."""

    def seconds(key: str) -> float:
        return number(where, document, key)

    clients, gpus = number(where, document, "conc"), number(where, document, "tp")
    output_tput = number(where, document, "output_tput_per_gpu")
    input_tput = number(where, document, "input_tput_per_gpu")
    if math.isnan(input_tput):
        input_tput = number(where, document, "tput_per_gpu") - output_tput
    ttft_s, tpot_s, latency_s = (seconds(f"mean_{key}") for key in ("ttft", "tpot", "e2el"))
    osl = 1.0 + (latency_s - ttft_s) / tpot_s if tpot_s > 0.0 else math.nan
    most = number(where, document, "osl")
    rate_per_s = output_tput * gpus / osl if osl > 0.0 else math.nan
    requests = REQUESTS_PER_CLIENT * (clients if math.isfinite(clients) else 1.0)
    refused = ""
    drafts = str(document.get("spec_decoding", ""))
    if document.get("disagg") or document.get("is_multinode"):
        refused = "prompts and outputs are computed by separate engines"
    elif math.isnan(latency_s):
        refused = "it has no mean_e2el, which determines the tokens of outputs"
    elif most > 0.0 and not SHORTEST * most <= osl <= LONGEST * most:
        refused = f"its means are inconsistent: they make {osl:.4g} tokens of an output of up to {most:g}"
    return [
        Figures(
            file=where,
            name=name,
            generator=NAME,
            model=text(document, "model"),
            requests=requests,
            isl=osl * input_tput / output_tput if output_tput > 0.0 else math.nan,
            osl=osl,
            ttft_ms=ttft_s * MS_PER_S,
            tpot_ms=tpot_s * MS_PER_S,
            latency_ms=latency_s * MS_PER_S,
            has_medians="median_tpot" in document,
            clients=clients if math.isfinite(clients) else math.nan,
            duration_s=requests / rate_per_s if rate_per_s > 0.0 else math.nan,
            drafts="" if drafts.lower() in PLAIN_DECODING else f"spec_decoding is {drafts[:20]}",
            refused=refused,
        )
    ]
