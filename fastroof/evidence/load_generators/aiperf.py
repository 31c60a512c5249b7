"""``aiperf profile`` (profile_export_aiperf.json) and its predecessor ``genai-perf`` (.._genai_perf.json).

Recorded from aiperf 0.13.0. The older ``loadgen`` of its input_config and genai-perf 0.0.16 were read in the
wheels (genai_perf/export_data/json_exporter.py: statistics per metric, next to input_config).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fastroof.errors import TableError
from fastroof.evidence.load_generators.documents import Document, number, part, spread_of_std, text
from fastroof.evidence.load_generators.figures import CONSTANT, POISSON, Figures
from fastroof.units import MS_PER_S

NAME: Final = "aiperf"

MS_OF: Final[Mapping[str, float]] = {"ms": 1.0, "us": 1e-3, "ns": 1e-6, "sec": MS_PER_S, "s": MS_PER_S}
_ARRIVALS: Final[Mapping[str, str]] = {"poisson": POISSON, "constant": CONSTANT}


def is_written_by(document: Document) -> bool:
    """Return whether this tool wrote the document."""
    return "input_config" in document and ("request_throughput" in document or "aiperf_version" in document)


def figures_of(where: str, document: Document, name: str) -> list[Figures]:
    """Read the run of an export."""
    config = part(document, "input_config")
    load = _load(where, config)
    requests = _mean(where, document, "request_count")
    throughput = _mean(where, document, "request_throughput")
    duration_s = _mean(where, document, "benchmark_duration")
    if math.isnan(duration_s) and throughput > 0.0:
        duration_s = requests / throughput
    if math.isnan(requests):
        requests = throughput * duration_s
    failed = _mean(where, document, "error_request_count")
    refused = "it was cancelled" if document.get("was_cancelled") is True else ""
    return [
        Figures(
            file=where,
            name=name,
            generator=NAME if "aiperf_version" in document else "genai-perf",
            model=_model(config),
            requests=requests,
            failed=0.0 if math.isnan(failed) else failed,
            isl=_mean(where, document, "input_sequence_length"),
            osl=_mean(where, document, "output_sequence_length"),
            ttft_ms=_mean_ms(where, document, "time_to_first_token"),
            # per request (latency - TTFT) / (tokens - 1): other tools call it TPOT
            tpot_ms=_mean_ms(where, document, "inter_token_latency"),
            latency_ms=_mean_ms(where, document, "request_latency"),
            has_medians="p50" in part(document, "inter_token_latency"),
            clients=load.clients,
            rate_per_s=load.rate_per_s,
            arrivals=load.arrivals,
            duration_s=duration_s,
            length_spread=spread_of_std(
                _mean(where, document, "input_sequence_length"),
                number(where, part(document, "input_sequence_length"), "std"),
            ),
            refused=refused or load.refused,
        )
    ]


class _Load(NamedTuple):
    clients: float = math.nan
    rate_per_s: float = math.nan
    arrivals: str = ""
    refused: str = ""


def _load(where: str, config: Document) -> _Load:
    """Return what limited the requests, from each form that input_config has had."""
    phases = config.get("phases")
    if isinstance(phases, list):
        measured = [p for p in phases if isinstance(p, Mapping) and p.get("kind", "profiling") == "profiling"]
        if len(measured) != 1:
            return _Load(refused=f"{len(measured)} phases were measured together; measure one")
        one = measured[0]
        return _Load(
            number(where, one, "concurrency"), number(where, one, "rate"), _arrivals(one.get("type"))
        )
    if loadgen := part(config, "loadgen"):
        arrivals = loadgen.get("arrival_pattern", loadgen.get("request_rate_mode"))
        return _Load(
            number(where, loadgen, "concurrency"), number(where, loadgen, "request_rate"), _arrivals(arrivals)
        )
    held = part(config, "perf_analyzer", "stimulus") or config
    return _Load(number(where, held, "concurrency"), number(where, held, "request_rate"))


def _arrivals(kind: Any) -> str:
    return _ARRIVALS.get(kind, "") if isinstance(kind, str) else ""


def _model(config: Document) -> str:
    items = part(config, "models").get("items")
    names = config.get("model_names", part(config, "endpoint").get("model_names"))
    if isinstance(items, list) and items and isinstance(items[0], Mapping):
        return text(items[0], "name")
    if isinstance(names, list) and names:
        return str(names[0])[:200]
    return text(config, "model")


def _mean(where: str, document: Document, metric: str) -> float:
    return number(f"{where}, {metric}", part(document, metric), "avg")


def _mean_ms(where: str, document: Document, metric: str) -> float:
    value = _mean(where, document, metric)
    unit = part(document, metric).get("unit", "ms")
    if not isinstance(unit, str) or unit not in MS_OF:
        raise TableError(f"{where}: {metric} is in {unit!r}; valid units are {', '.join(MS_OF)}")
    return value * MS_OF[unit]
