"""Formats of load generators: how to recognise a program's document, and where it has the figures of a run.

* aiperf: recorded from 0.13.0. Its CSV (exporters/metrics_csv_exporter.py), its file of single requests
  (MetricRecordInfo of common/models/record_models.py), the older ``loadgen`` of its input_config and
  genai-perf 0.0.16 (genai_perf/export_data/json_exporter.py: statistics per metric) were read in the wheels.
* guidellm: recorded from 0.3.1 and 0.8.1, with the CSV and YAML of 0.8.1; 0.2.1, 0.4.0 and 0.5.4 were read in
  their wheels.
* inference-perf: kubernetes-sigs/inference-perf, inference_perf/reportgen/base.py at
  010d12fb62cc3157b6bd228ef93dd865c7a05194, and its recorded reports (demos/kubecon-na-2025 at
  a8a2a0bafad95b4330e2e8f9d390b7f2501218d7).
* InferenceX: SemiAnalysisAI/InferenceX, utils/process_result.py, and the commands of its benchmarks.
* SGLang: sgl-project/sglang, python/sglang/bench_serving.py at 0033168f0f58b2bc05aa0273bd475d9c01bafb1c; the
  first version, at 50a613687fe1ffc6f1bb630c684a24c428a54a74, has only medians of TTFT and gaps.
* vLLM: vllm-project/vllm, vllm/benchmarks/serve.py at 009e6d4a1cd6ba3fb2a9fc00f4ec06f5297232a1 and
  benchmarks/benchmark_serving.py at 8668d7c05027b98ac66bd5540955dd2ce3a0f318. Keys were added since, but
  none of those below was renamed.
* Printed tables: those of the same files, sgl-project/sglang, python/sglang/benchmark/metrics.py at
  1291c7fc351de2eb2548a95b82a27fb166143efa, and NVIDIA/TensorRT-LLM, benchmark_serving.py at
  0228a71223416496ff056a157936bad2e42c762f.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.checks import shown
from fastroof.errors import TableError
from fastroof.evidence.load_generators.documents import (
    REQUESTS,
    TABLE_TITLE,
    Document,
    mean_of,
    number,
    numbers,
    part,
    ratio,
    spread_of,
    spread_of_std,
    text,
)
from fastroof.evidence.load_generators.runs import CONSTANT, POISSON, GeneratorRun
from fastroof.units import MS_PER_S, NS_PER_S


class Format(NamedTuple):
    """The documents of one program, and the function that reads a run, given its place and name.

    ``several`` is the key of the list of runs in a document that has several.
    """

    name: str
    is_written_by: Callable[[Document], bool]
    read: Callable[[str, Document, str], GeneratorRun]
    several: str = ""


def _has(*keys: str) -> Callable[[Document], bool]:
    return lambda document: document.keys() >= set(keys)


_VLLM, _SGLANG, _PRINTED = "vllm bench serve", "sglang.bench_serving", "a benchmark's printed table"

_SERVING: Final = {
    "requests": "completed", "ttft_ms": "mean_ttft_ms", "tpot_ms": "mean_tpot_ms",
    "clients": "max_concurrency", "rate_per_s": "request_rate", "duration_s": "duration",
}  # fmt: skip
"""Figures that vLLM's benchmark and SGLang's, which was made from it, have under the same keys."""


def _serving(where: str, document: Document, name: str, keys: Mapping[str, str], **more: Any) -> GeneratorRun:
    """Read a result of vLLM's benchmark or of SGLang's; times in lists are in seconds."""
    figures: dict[str, Any] = {
        field: number(where, document, key) for field, key in {**_SERVING, **keys}.items()
    }
    if math.isnan(figures["tpot_ms"]):
        figures["tpot_ms"] = _mean_tpot_ms(where, document)
    isl, osl = (
        ratio(number(where, document, f"total_{side}_tokens"), figures["requests"])
        for side in ("input", "output")
    )
    spread = spread_of(numbers(where, document, "input_lens"))
    return GeneratorRun(where, name, isl=isl, osl=osl, length_spread=spread, **figures, **more)


def _mean_tpot_ms(where: str, document: Document) -> float:
    """Return the mean over requests from a detailed result, ms; nan without details."""
    lengths, gaps = numbers(where, document, "output_lens"), document.get("itls")
    if gaps is None or not lengths:
        return math.nan
    if not isinstance(gaps, list) or len(gaps) != len(lengths):
        raise TableError(f"{where}: itls must be a list with the gaps of each of {len(lengths)} requests")
    sums = [math.fsum(numbers(where, {"itls": each}, "itls")) for each in gaps]
    return mean_of(
        MS_PER_S * s / (n - 1.0) for s, n in zip(sums, lengths, strict=True) if n > 1.0 and s > 0.0
    )


def _vllm(where: str, document: Document, name: str) -> GeneratorRun:
    refused = ""
    if "ramp_up_strategy" in document:
        refused = "its rate was ramped up, so that there is no steady state"
    elif "total_output_tokens" not in document:
        refused = "it is of a pooling model, which produces no tokens"
    sent, failed = number(where, document, "num_prompts"), number(where, document, "failed")
    if math.isnan(failed):
        # older results count only answered requests
        failed = max(sent - number(where, document, "completed"), 0.0)
    # 1 is a Poisson process, inf evenly spaced requests, and other values are in between
    arrivals = {1.0: POISSON, math.inf: CONSTANT}.get(number(where, document, "burstiness"), "")
    keys = {"latency_ms": "mean_e2el_ms", "accepted": "spec_decode_acceptance_length"}
    return _serving(
        where, document, name, keys, generator=_VLLM, model=text(document, "model_id"), failed=failed,
        has_medians="median_tpot_ms" in document, arrivals=arrivals, refused=refused,
    )  # fmt: skip


def _sglang(where: str, document: Document, name: str) -> GeneratorRun:
    keys = {"latency_ms": "mean_e2e_latency_ms", "accepted": "accept_length"}
    return _serving(
        where, document, name, keys, generator=_SGLANG, model=text(document, "model_id", "model"),
        has_medians="median_itl_ms" in document, arrivals=POISSON,
    )  # fmt: skip


def _printed(where: str, document: Document, name: str) -> GeneratorRun:
    """Read a printed table; SGLang's has no TPOT, whose mean is that of all tokens after the first."""
    run = _vllm(where, document, name)
    refused = run.refused
    if not {"max_concurrency", "request_rate"} & document.keys():
        refused = refused or (
            "the table names neither clients nor a rate: put the line 'Maximum request concurrency: N' above "
            "it, unless all requests were sent together, which is not a steady state"
        )
    tpot_ms = run.tpot_ms
    if math.isnan(tpot_ms):
        tpot_ms = ratio(run.latency_ms - run.ttft_ms, run.osl - 1.0)
    return replace(run, generator=_PRINTED, tpot_ms=tpot_ms, refused=refused)


_INFERENCEX = "InferenceX"
_REQUESTS_PER_CLIENT: Final = 10.0
_PLAIN_DECODING: Final = ("", "none", "false", "off")
_SHORTEST, _LONGEST = 0.5, 1.05
"""Range of the mean output over the requested maximum: lengths are drawn from a share of it up to it."""


def _inferencex(where: str, document: Document, name: str) -> GeneratorRun:
    """Read a result of vLLM's benchmark after InferenceX: times in seconds, throughputs per GPU.

    Counts of requests and tokens are left out, but the means determine them: outputs by latency = TTFT +
    TPOT x (tokens - 1), prompts by the ratio of throughputs, and the duration by ten requests per client,
    ``--num-prompts`` of its commands.
    """
    clients, gpus = number(where, document, "conc"), number(where, document, "tp")
    output_tput = number(where, document, "output_tput_per_gpu")
    input_tput = number(where, document, "input_tput_per_gpu")
    if math.isnan(input_tput):
        input_tput = number(where, document, "tput_per_gpu") - output_tput
    ttft_s, tpot_s, latency_s = (number(where, document, f"mean_{key}") for key in ("ttft", "tpot", "e2el"))
    osl = 1.0 + ratio(latency_s - ttft_s, tpot_s)
    most = number(where, document, "osl")
    requests = _REQUESTS_PER_CLIENT * (clients if math.isfinite(clients) else 1.0)
    refused = ""
    drafts = str(document.get("spec_decoding", ""))
    if document.get("disagg") or document.get("is_multinode"):
        refused = "prompts and outputs are computed by separate engines"
    elif math.isnan(latency_s):
        refused = "it has no mean_e2el, which determines the tokens of outputs"
    elif most > 0.0 and not _SHORTEST * most <= osl <= _LONGEST * most:
        refused = f"its means are inconsistent: they make {osl:.4g} tokens of an output of up to {most:g}"
    return GeneratorRun(
        where, name, _INFERENCEX, text(document, "model"),
        requests=requests,
        isl=ratio(osl * input_tput, output_tput),
        osl=osl,
        ttft_ms=ttft_s * MS_PER_S,
        tpot_ms=tpot_s * MS_PER_S,
        latency_ms=latency_s * MS_PER_S,
        has_medians="median_tpot" in document,
        clients=clients if math.isfinite(clients) else math.nan,
        duration_s=ratio(requests, ratio(output_tput * gpus, osl)),
        drafts="" if drafts.lower() in _PLAIN_DECODING else f"spec_decoding is {drafts[:20]}",
        refused=refused,
    )  # fmt: skip


_INFERENCE_PERF = "inference-perf"


def _inference_perf(where: str, document: Document, name: str) -> GeneratorRun:
    """Read one stage of a report, or refuse that of all stages. Times are in seconds.

    Reports from before its issue 564 counted the tokens of a stream about twice, so that their means are
    inconsistent, and refused as such.
    """
    load, answered = part(document, "load_summary"), part(document, "successes")
    requests = number(where, answered, "count")
    throughput = number(where, part(answered, "throughput"), "requests_per_sec")
    duration_s = number(where, document, "benchmark_time_seconds")
    clients = number(where, load, "concurrency")

    def mean(within: Document, *keys: str) -> float:
        """Return the mean of the first metric that has one."""
        found = [number(f"{where}, {key}", part(within, key), "mean") for key in keys]
        return next((value for value in found if not math.isnan(value)), math.nan)

    def mean_ms(key: str) -> float:
        return mean(part(answered, "latency"), key) * MS_PER_S

    return GeneratorRun(
        where, name, _INFERENCE_PERF,
        requests=requests,
        failed=number(where, part(document, "failures"), "count"),
        isl=mean(answered, "prompt_tokens", "prompt_len"),
        osl=mean(answered, "output_len", "output_tokens"),
        ttft_ms=mean_ms("time_to_first_token"),
        tpot_ms=mean_ms("time_per_output_token"),
        latency_ms=mean_ms("request_latency"),
        clients=clients,
        # with clients the rate is a result, not the requested rate
        rate_per_s=math.nan if clients >= 1.0 else number(where, load, "requested_rate"),
        duration_s=duration_s if duration_s > 0.0 else ratio(requests, throughput),
        refused=""
        if "requested_rate" in load
        else "it combines all stages; give a single stage's stage_N_lifecycle_metrics.json",
    )  # fmt: skip


_GUIDELLM = "guidellm"
_CLOSED: Final = {"concurrent": "streams", "throughput": "max_concurrency"}
_OPEN: Final = {"constant": CONSTANT, "async": CONSTANT, "poisson": POISSON}


def _is_guidellm(document: Document) -> bool:
    listed = document.get("benchmarks")
    return isinstance(listed, list) and all(isinstance(b, Mapping) and "metrics" in b for b in listed)


def _guidellm(where: str, one: Document, name: str) -> GeneratorRun:
    """Read a benchmark. The strategy moved from ``args`` to ``config`` in 0.4.

    In every release, ``inter_token_latency_ms`` is the time per token after the first, whose mean weights
    requests by their tokens from 0.4 on; ``time_per_output_token_ms`` divides by all tokens, and includes
    TTFT from 0.4 on.
    """
    strategy = part(one, "config", "strategy") or part(one, "args", "strategy")
    kind = text(strategy, "type_", "kind")
    clients = rate = math.nan
    refused = ""
    if kind == "synchronous":
        clients = 1.0
    elif kind in _CLOSED:
        clients = number(where, strategy, _CLOSED[kind])
    elif kind in _OPEN:
        rate = number(where, strategy, "rate")
        clients = number(where, strategy, "max_concurrency")
    else:
        refused = f"strategy {kind or 'unknown'} has neither clients nor a rate; use concurrent"
    totals = part(one, "metrics", "request_totals") or part(one, "request_totals")

    def mean(metric: str) -> float:
        return number(f"{where}, {metric}", part(one, "metrics", metric, "successful"), "mean")

    isl = mean("prompt_token_count")
    std = number(where, part(one, "metrics", "prompt_token_count", "successful"), "std_dev")
    return GeneratorRun(
        where, name, _GUIDELLM,
        text(part(one, "worker"), "backend_model") or text(part(one, "config", "backend"), "model"),
        requests=number(where, totals, "successful"),
        failed=number(where, totals, "errored"),
        isl=isl,
        osl=mean("output_token_count"),
        ttft_ms=mean("time_to_first_token_ms"),
        tpot_ms=mean("inter_token_latency_ms") or math.nan,
        latency_ms=mean("request_latency") * MS_PER_S,
        clients=clients,
        rate_per_s=rate,
        arrivals=_OPEN.get(kind, ""),
        duration_s=number(where, one, "duration"),
        length_spread=spread_of_std(isl, std),
        refused=refused,
    )  # fmt: skip


_AIPERF = "aiperf"
MOST_IDLE: Final = 0.05
"""Time between an end and the next start, over the mean latency, below which clients form a closed loop."""

MOST_EVEN: Final = 0.5
"""Standard deviation of the gaps between arrivals over their mean, below which they are evenly spaced."""

_MS_OF: Final[Mapping[str, float]] = {"ms": 1.0, "us": 1e-3, "ns": 1e-6, "sec": MS_PER_S, "s": MS_PER_S}


def _is_aiperf(document: Document) -> bool:
    return "input_config" in document and ("request_throughput" in document or "aiperf_version" in document)


def _aiperf(where: str, document: Document, name: str) -> GeneratorRun:
    """Read an export of aiperf (profile_export_aiperf.json) or its predecessor (.._genai_perf.json)."""

    def mean(metric: str) -> float:
        return number(f"{where}, {metric}", part(document, metric), "avg")

    def mean_ms(metric: str) -> float:
        value = mean(metric)
        return value * _per_ms(where, metric, part(document, metric).get("unit", "ms"))

    config = part(document, "input_config")
    load = _aiperf_load(where, config)
    if not config:
        # the CSV names no load: a closed loop if the most requests were in flight half of the time
        most, middle = (number(where, part(document, "effective_concurrency"), key) for key in ("max", "p50"))
        in_flight = mean("request_throughput") * mean_ms("request_latency") / MS_PER_S
        source = "requests in flight" if most == middle else "Little's law of the file's means"
        load |= {"clients": most if most == middle else max(in_flight, 1.0), "concurrency_from": source}
    if document.get("was_cancelled") is True:
        load["refused"] = "it was cancelled"
    requests, throughput = mean("request_count"), mean("request_throughput")
    duration_s = mean("benchmark_duration")
    if math.isnan(duration_s):
        duration_s = ratio(requests, throughput)
    if math.isnan(requests):
        requests = throughput * duration_s
    isl = mean("input_sequence_length")
    return GeneratorRun(
        where, name, _AIPERF if "aiperf_version" in document else "genai-perf", _aiperf_model(config),
        requests=requests,
        failed=mean("error_request_count"),
        isl=isl,
        osl=mean("output_sequence_length"),
        ttft_ms=mean_ms("time_to_first_token"),
        # per request (latency - TTFT) / (tokens - 1): other tools call it TPOT
        tpot_ms=mean_ms("inter_token_latency"),
        latency_ms=mean_ms("request_latency"),
        has_medians="p50" in part(document, "inter_token_latency"),
        duration_s=duration_s,
        length_spread=spread_of_std(isl, number(where, part(document, "input_sequence_length"), "std")),
        **load,
    )  # fmt: skip


def _aiperf_requests(where: str, document: Document, name: str) -> GeneratorRun:
    """Read single requests: clients of a closed loop if most start when one ends, else a rate."""
    taken = [one for one in document[REQUESTS] if part(one, "metadata").get("benchmark_phase") != "warmup"]
    failures = [one.get("error") or part(one, "metadata").get("was_cancelled") for one in taken]
    answered = [one for one, failure in zip(taken, failures, strict=True) if not failure]
    times = np.array(
        [
            [number(where, part(one, "metadata"), f"request_{at}_ns") for at in ("start", "end")]
            for one in answered
        ]
    ).reshape(-1, 2)
    if not answered or not np.isfinite(times).all() or not (times[:, 1] >= times[:, 0]).all():
        raise TableError(f"{where}: needs requests that were answered, with their start and end in ns")
    starts_s, ends_s = np.sort((times - times.min()) / NS_PER_S, axis=0).T
    ended = np.searchsorted(ends_s, starts_s, side="right")
    in_flight = np.arange(1, len(starts_s) + 1) - ended
    # since the last end; a client of a closed loop sends its next request at once
    idle_s = (starts_s - ends_s[ended - 1])[ended > 0]
    is_closed = not len(idle_s) or float(np.median(idle_s)) < MOST_IDLE * float((ends_s - starts_s).mean())
    load: dict[str, Any] = {"clients": float(in_flight.max())}
    if not (is_closed and float(np.median(in_flight)) == in_flight.max()) and starts_s[-1] > 0.0:
        gaps_s = np.diff(starts_s)
        is_even = float(gaps_s.std()) < MOST_EVEN * float(gaps_s.mean())
        load = {"rate_per_s": 1.0 / float(gaps_s.mean()), "arrivals": CONSTANT if is_even else POISSON}
    lengths = [_metric(where, one, "input_sequence_length") for one in answered]
    ttft_ms, tpot_ms, latency_ms, osl = (
        mean_of(value for value in (_metric(where, one, key) for one in answered) if not math.isnan(value))
        for key in ("time_to_first_token", "inter_token_latency", "request_latency", "output_sequence_length")
    )
    return GeneratorRun(
        where, name, _AIPERF, requests=float(len(answered)), failed=float(len(taken) - len(answered)),
        isl=mean_of(lengths), osl=osl, ttft_ms=ttft_ms, tpot_ms=tpot_ms, latency_ms=latency_ms,
        duration_s=float(ends_s[-1]), length_spread=spread_of(lengths), **load,
    )  # fmt: skip


def _metric(where: str, request: Document, name: str) -> float:
    """Return a metric of a request, times in ms; nan if missing."""
    found = part(request, "metrics", name)
    per_ms = 1.0 if found.get("unit", "tokens") == "tokens" else _per_ms(where, name, found["unit"])
    return number(f"{where}, {name}", found, "value") * per_ms


def _per_ms(where: str, metric: str, unit: Any) -> float:
    if not isinstance(unit, str) or unit not in _MS_OF:
        raise TableError(f"{where}: {metric} is in {shown(unit)}; valid units are {', '.join(_MS_OF)}")
    return _MS_OF[unit]


def _aiperf_load(where: str, config: Document) -> dict[str, Any]:
    """Return what limited the requests, from each form that input_config has had."""
    phases, loadgen, rate, arrivals = config.get("phases"), part(config, "loadgen"), "request_rate", None
    if isinstance(phases, list):
        measured = [p for p in phases if isinstance(p, Mapping) and p.get("kind", "profiling") == "profiling"]
        if len(measured) != 1:
            return {"refused": f"{len(measured)} phases were measured together; measure one"}
        load, rate, arrivals = measured[0], "rate", measured[0].get("type")
    elif loadgen:
        load, arrivals = loadgen, loadgen.get("arrival_pattern", loadgen.get("request_rate_mode"))
    else:
        load = part(config, "perf_analyzer", "stimulus") or config
    return {
        "clients": number(where, load, "concurrency"),
        "rate_per_s": number(where, load, rate),
        "arrivals": arrivals if arrivals in (POISSON, CONSTANT) else "",
    }


def _aiperf_model(config: Document) -> str:
    items = part(config, "models").get("items")
    names = config.get("model_names", part(config, "endpoint").get("model_names"))
    if isinstance(items, list) and items and isinstance(items[0], Mapping):
        return text(items[0], "name")
    if isinstance(names, list) and names:
        return str(names[0])[:200]
    return text(config, "model")


FORMATS: Final = (
    Format(_PRINTED, _has(TABLE_TITLE), _printed),
    Format(_SGLANG, _has("total_output_tokens_retokenized", "dataset_name"), _sglang),
    Format(_VLLM, _has("tokenizer_id", "num_prompts", "request_throughput"), _vllm),
    Format(_INFERENCE_PERF, _has("load_summary", "successes", "failures"), _inference_perf),
    Format(_GUIDELLM, _is_guidellm, _guidellm, "benchmarks"),
    Format(_AIPERF, _is_aiperf, _aiperf),
    Format(_AIPERF, _has(REQUESTS), _aiperf_requests),
    Format(_INFERENCEX, _has("hw", "conc", "framework", "tput_per_gpu"), _inferencex),
)
"""All formats, in the order in which they are tried."""
