"""A stand-in for llm-d-inference-sim, a Go program that is on no registry of Python packages.

It reads a configuration and computes latencies by the simulator's rules, written anew from
pkg/common/config.go, pkg/engine/vllm/flags.go, pkg/simulator/latencies.go and docs/configuration.md of
llm-d/llm-d-inference-sim at 05ea24a77256cbafdb04b077585a7ffe43bfbcd4, and from RandomNormDuration of
pkg/common. Unlike there, an unknown key is an error, as docs/configuration.md at
9d328abbe2ad6d50baab2d76e8700d8cfc5abfb7 has made it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import yaml

LATENCIES = frozenset(
    {
        "time-to-first-token", "time-to-first-token-std-dev", "inter-token-latency",
        "inter-token-latency-std-dev", "kv-cache-transfer-latency", "kv-cache-transfer-latency-std-dev",
        "prefill-overhead", "prefill-time-per-token", "prefill-time-std-dev",
        "kv-cache-transfer-time-per-token", "kv-cache-transfer-time-std-dev", "time-to-generate-image",
        "time-to-generate-image-std-dev", "time-factor-under-load",
    }
)  # fmt: skip
SETTINGS = frozenset(
    {
        "port", "model", "served-model-name", "max-loras", "max-cpu-loras", "max-num-seqs",
        "max-waiting-queue-length", "max-model-len", "lora-modules", "latencies", "latency-calculator",
        "mode", "seed", "max-tool-call-integer-param", "min-tool-call-integer-param",
        "max-tool-call-number-param", "min-tool-call-number-param", "max-tool-call-array-param-length",
        "min-tool-call-array-param-length",
        "tool-call-not-required-param-probability", "object-tool-call-not-required-field-probability",
        "skip-tool-validation", "tool-call-extra-call-probability", "global-cache-hit-threshold", "kvcache",
        "fake-metrics", "fake-metrics-refresh-interval", "failure-injection-rate", "failure-types",
        "data-parallel-size", "data-parallel-rank", "ssl-certfile", "ssl-keyfile", "self-signed-certs",
        "dataset-path", "dataset-url", "dataset-in-memory", "dataset-table-name", "render-url",
        "render-timeout", "mm-render-timeout", "force-dummy-tokenizer", "startup-duration",
        "enable-sleep-mode", "enable-request-id-headers", "log-http", "strict",
        "default-embedding-dimensions", "mm-encoder-only", "omni", "image-emission-rate",
        "mm-processor-kwargs", "ec-transfer-config",
        "enforce-eager", "enable-prefix-caching", "tensor-parallel-size", "max-request-body-size-mb",
        "engine",
    }
)  # fmt: skip
UNITS_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
MILLISECOND = 10**6


def duration_ns(text: str) -> int:
    """Go's time.ParseDuration, of what is positive."""
    parts = re.findall(r"([0-9]+\.?[0-9]*)(ns|us|ms|s|m|h)", text)
    assert "".join(number + unit for number, unit in parts) == text, text
    return int(sum(Decimal(number) * UNITS_NS[unit] for number, unit in parts))


def whole_milliseconds(mean_ns: int, deviation_ns: int) -> int:
    """RandomNormDuration where nothing is random, ns."""
    assert deviation_ns // MILLISECOND == 0
    return mean_ns // MILLISECOND * MILLISECOND


@dataclass
class Simulator:
    """One that was started with ``--config``; times are ns."""

    text: str
    settings: dict[str, Any] = field(init=False)
    times: dict[str, int] = field(init=False)
    factor: float = field(init=False)

    def __post_init__(self) -> None:
        raw = yaml.safe_load(self.text)
        flat = {key: raw.pop(key) for key in sorted(LATENCIES & raw.keys())}
        nested = raw.get("latencies") or {}
        assert not (flat and nested), "latencies mix two layouts"
        unknown = (raw.keys() - SETTINGS) | (nested.keys() - LATENCIES)
        assert not unknown, f"unknown keys {unknown}"
        latencies = {**flat, **nested}
        self.settings = {"max-num-seqs": 5, "max-model-len": 1024, "latency-calculator": "", **raw}
        self.factor = float(latencies.pop("time-factor-under-load", 1.0))
        self.times = dict.fromkeys(LATENCIES, 0)
        self.times |= {key: duration_ns(value) for key, value in latencies.items()}
        assert self.settings["model"]
        assert self.settings["engine"] == "vllm"
        assert self.settings["latency-calculator"] == "per-token"
        assert self.factor >= 1.0
        assert min(self.settings["max-model-len"], self.settings["max-num-seqs"]) >= 1
        for name in ("time-to-first-token", "inter-token-latency"):
            assert self.times[f"{name}-std-dev"] <= 0.3 * self.times[name]

    def _loaded(self, name: str, running: int) -> int:
        slots = self.settings["max-num-seqs"]
        load = 1.0 if slots <= 1 else 1 + (self.factor - 1) * float(running - 1) / float(slots - 1)
        return int(float(self.times[name]) * load)

    def first_token_ns(self, running: int, prompt: int, cached: int = 0, *, is_remote: bool = False) -> int:
        """What a request waits for its first token, or for its KV cache from another worker."""
        if is_remote:
            mean = self.times["kv-cache-transfer-time-per-token"] * prompt
            return whole_milliseconds(mean, self.times["kv-cache-transfer-time-std-dev"])
        per_token = self._loaded("prefill-time-per-token", running)
        mean = self._loaded("prefill-overhead", running) + (prompt - cached) * per_token
        return whole_milliseconds(mean, self.times["prefill-time-std-dev"])

    def next_token_ns(self, running: int) -> int:
        mean = self._loaded("inter-token-latency", running)
        return whole_milliseconds(mean, self.times["inter-token-latency-std-dev"])
