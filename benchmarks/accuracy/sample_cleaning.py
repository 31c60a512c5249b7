"""Cleaning of aiconfigurator-core's sample: rules that give each column one meaning.

The package (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator) joins runs of several test benches and
dates, which encode layouts, concurrency and formats differently. Each rule has a name and counts the rows
that it changed or rejected. No rule uses a prediction.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from benchmarks.accuracy.bench_settings import dynamo_settings
from fastroof.engines import recipe_for, serving_engines
from fastroof.evidence.rows import ServingRow

DYNAMO, INFERENCEMAX = "dynamo", "inferencemax"
BENCH_ROUNDS: Final = 10.0
INFERENCEMAX_LENGTHS: Final = 0.9
INFERENCEMAX_SPREAD: Final = 0.2
NODE_GPUS: Final[Mapping[str, int]] = MappingProxyType({"gb200": 4, "gb300": 4})
"""GPUs per node if not eight."""
SAME_MS: Final = 1e-2
"""Relative distance of times within one run: parts of the sample have two digits."""


class Rule(NamedTuple):
    """One cleaning rule: what the sample contains, and what it becomes."""

    name: str
    sample: str
    cleaned: str


RULES: Final = (
    Rule(
        "layout",
        "tp_size of dated files and of the database is tp x ep where both are set (64, 16, 4 with moe 8 x 8, "
        "4 x 4, 2 x 2), attention_dp_size likewise, and moe_ep_size 16, 4 of attention_dp 4, 2 is dp x tp",
        "GPUs = moe_tp x ep as their product's root, dp that number where attention is data parallel",
    ),
    Rule(
        "concurrency",
        "batch_size is what a rank has of it; the client's concurrency is in silicon_data_source or the id",
        "concurrency of all clients; ranks, or replicas of a dense model, where batch_size is a part of it",
    ),
    Rule("ranks", "moe_tp x ep is more than tp, and no attention_dp is written", "dp = moe_tp x ep / tp"),
    Rule(
        "format",
        "gpt-oss is nvfp4 or fp8; DeepSeek, MiniMax, Qwen3.5, GLM-5 and Qwen3-235B-FP8 are fp8",
        "mxfp4; fp8_block, the format of their checkpoints",
    ),
    Rule(
        "version",
        "no version, or that of the Dynamo release that the engine came in",
        "the one that the public benchmark's recipes of that date name, where they do; the release's engine",
    ),
    Rule(
        "experts",
        "SGLang's rows of November 2025 without a version, and MiniMax in fp8_block over 8 GPUs, whose "
        "experts cannot be cut so: moe_ep_size 1",
        "ep = tp",
    ),
    Rule(
        "recipe",
        "labels of layouts that are not what the public benchmark's launch scripts of that date ran",
        "what they ran, see fastroof/engines/README.md; their KV cache, requests a client and limits of a "
        "step too",
    ),
    Rule(
        "settings",
        "no limits of a step, of engines that the sample's own generator started behind Dynamo",
        "what its rules of that time write, see benchmarks/accuracy/bench_settings.py",
    ),
    Rule(
        "wide",
        "decode workers of SGLang with more ranks of attention than a node has GPUs: ep 1 or their number",
        "ep = ranks, tokens sent by DeepEP, as NVIDIA's public recipes for these deployments",
    ),
    Rule(
        "duplicate",
        "one run in several rows, formats of numbers or labels",
        "one row, the others' labels kept",
    ),
)
"""Rules that change rows; rows left out have a reason in words."""

_DEEPSEEK = "deepseek-v3"
_MODELS: Final[Mapping[tuple[str, str], tuple[str, str, str]]] = MappingProxyType(
    {
        ("Qwen/Qwen3-32B", ""): ("qwen3-32b", "bf16", "qwen3-32b"),
        ("Qwen/Qwen3-32B", "fp8"): ("qwen3-32b", "fp8", "qwen3-32b"),
        ("Qwen/Qwen3-32B", "fp4"): ("qwen3-32b", "nvfp4", "qwen3-32b"),
        ("nvidia/Qwen3-32B-NVFP4", "fp4"): ("qwen3-32b", "nvfp4", "qwen3-32b"),
        ("meta-llama/Llama-3.1-8B-Instruct", ""): ("llama-3.1-8b", "bf16", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "fp8"): ("llama-3.1-8b", "fp8", "llama-3.1-8b"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): ("llama-3.1-8b", "fp8", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-70B", "fp8"): ("llama-3.1-70b", "fp8", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B", "fp4"): ("llama-3.1-70b", "nvfp4", "llama-3.1-70b"),
        ("Qwen/Qwen3-235B-A22B-FP8", "fp8"): ("qwen3-235b-a22b-fp8", "fp8_block", "qwen3-235b-a22b"),
        ("openai/gpt-oss-120b", "fp4"): ("gpt-oss-120b", "mxfp4", "gpt-oss-120b"),
        ("openai/gpt-oss-120b", "fp8"): ("gpt-oss-120b", "mxfp4", "gpt-oss-120b"),
        ("MiniMaxAI/MiniMax-M2.5", "fp8"): ("minimax-m2.5", "fp8_block", "minimax-m2.5"),
        ("MiniMaxAI/MiniMax-M2.5", "fp4"): ("minimax-m2.5-nvfp4", "nvfp4", "minimax-m2.5"),
        ("deepseek-ai/DeepSeek-R1", "fp8"): ("deepseek-r1", "fp8_block", _DEEPSEEK),
        ("deepseek-ai/DeepSeek-R1", "fp4"): ("deepseek-v3.1-nvfp4", "nvfp4", _DEEPSEEK),
        ("deepseek-ai/DeepSeek-V3", "fp8"): ("deepseek-r1", "fp8_block", _DEEPSEEK),
        ("deepseek-ai/DeepSeek-V3", "fp4"): ("deepseek-v3.1-nvfp4", "nvfp4", _DEEPSEEK),
        ("nvidia/DeepSeek-R1-NVFP4", "fp4"): ("deepseek-v3.1-nvfp4", "nvfp4", _DEEPSEEK),
        ("nvidia/DeepSeek-V3.1-NVFP4", "fp4"): ("deepseek-v3.1-nvfp4", "nvfp4", _DEEPSEEK),
        ("moonshotai/Kimi-K2.5", "int4"): ("kimi-k2.5", "int4_wo", "kimi-k2.5"),
        ("moonshotai/Kimi-K2.5", "fp4"): ("kimi-k2.5-nvfp4", "nvfp4", "kimi-k2.5"),
        ("Qwen/Qwen3.5-397B-A17B", "bf16"): ("qwen3.5-397b-a17b", "bf16", "qwen3.5-397b-a17b"),
        ("Qwen/Qwen3.5-397B-A17B", "fp8"): ("qwen3.5-397b-a17b", "fp8_block", "qwen3.5-397b-a17b"),
        ("Qwen/Qwen3.5-397B-A17B", "fp4"): ("qwen3.5-397b-a17b-nvfp4", "nvfp4", "qwen3.5-397b-a17b"),
        ("zhipuai/GLM-5", "fp8"): ("glm-5-fp8", "fp8_block", "glm-5"),
        ("zhipuai/GLM-5", "fp4"): ("glm-5-nvfp4", "nvfp4", "glm-5"),
    }
)
"""Preset, format and architecture of the sample's model_path and precision."""

_DENSE: Final = ("qwen3-32b", "llama-3.1-8b", "llama-3.1-70b")

_VERSIONS: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {("vllm", "2025-10-29"): "0.10.2", ("trtllm", "2025-10-29"): "1.1.0rc2.post2"}
)
"""Versions of runs without one, by engine and date, from the public benchmark's repository."""

_OF_DYNAMO: Final[Mapping[str, str]] = MappingProxyType(
    {
        "0.5.1-rc0.pre3": "1.1.0rc5",
        "0.7.0.post2": "1.2.0rc3",
        "0.8.1.post1": "1.2.0rc6.post1",
        "0.8.1.post2": "1.2.0rc6.post2",
        "0.8.1.post3": "1.2.0rc6.post3",
        "1.1.0-dev.2": "1.3.0rc5.post1",
    }
)
"""TensorRT-LLM versions by Dynamo release, which its rows have: docs.nvidia.com/dynamo, support matrix.
Three are not listed and have that of the nearest release: 0.5.1-rc0.pre3 of 0.6.0, 0.7.0.post2 of 0.7.0.post1
and 0.7.1, 1.1.0-dev.2 of 1.0.0."""

_ONSET, _DEFAULT, _MODELOPT = "queueing onset", "engine default", "modelopt default"
_RECIPE = "recipe"
KV_DTYPE_FROM: Final[Mapping[str, str]] = MappingProxyType(
    {
        _ONSET: "inferred: requests begin to queue where the KV cache of this dtype is full",
        _DEFAULT: "assumed: the engine's default, the dtype of the activations",
        _MODELOPT: "assumed: what modelopt writes into fp8 checkpoints",
        _RECIPE: "the public benchmark's recipes of that date",
    }
)
"""How the dtype of a KV cache is known, in words."""


_OF_INFERENCEMAX: Final = r"db-dump|source_file=2026-|source_file=[a-z0-9.-]+-gap-analysis\.csv"
"""Files of the public benchmark's runs; the gap analysis repeats others to two digits."""


class _Refused(Exception):
    """A row that no plan can represent, and the reason."""


@dataclass(frozen=True)
class CleanedSample:
    """The sample's rows: cleaned, repeated, and left out."""

    rows: tuple[ServingRow, ...]
    refused: Mapping[str, int]
    duplicates: int
    changed: Mapping[str, int]


def clean_sample(cells: Iterable[Mapping[str, str]], gpu_of: Mapping[str, str]) -> CleanedSample:
    """Clean the rows of the sample."""
    refused, changed = Counter[str](), Counter[str]()
    runs: dict[tuple[object, ...], list[ServingRow]] = {}
    for cell in sorted(cells, key=_completeness):
        try:
            row = _cleaned(cell, gpu_of, changed)
        except _Refused as reason:
            refused[str(reason)] += 1
            continue
        runs.setdefault(_run_key(row), []).append(row)
    rows = []
    for same in runs.values():
        labels = sorted({row.checkpoint for row in same} - {same[0].checkpoint})
        rows.append(replace(same[0], also_as=",".join(labels)))
    duplicates = sum(len(same) - 1 for same in runs.values())
    changed["duplicate"] = duplicates
    return CleanedSample(
        tuple(rows),
        dict(sorted(refused.items())),
        duplicates,
        {rule.name: changed[rule.name] for rule in RULES},
    )


def _completeness(cell: Mapping[str, str]) -> int:
    """Return the sort key of one run's rows: the database has worker counts, the later file more versions."""
    origin = cell["silicon_data_source"]
    if origin.startswith("db-dump"):
        return 0
    return 2 if "source_file=2026-03" in origin else 1


def _run_key(row: ServingRow) -> tuple[object, ...]:
    """Return what is equal in all rows of one run, including times to 10 us."""
    return (
        row.gpu, row.engine, row.isl, row.osl, row.concurrency, row.is_disaggregated,
        round(row.ttft_ms / SAME_MS), round(row.tpot_ms / SAME_MS),
    )  # fmt: skip


def _number(cell: Mapping[str, str], column: str) -> int:
    text = cell.get(column) or ""
    return int(float(text)) if text else 0


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _cleaned(cell: Mapping[str, str], gpu_of: Mapping[str, str], changed: Counter[str]) -> ServingRow:
    gpu, engine, checkpoint = gpu_of.get(cell["system"], ""), cell["backend"], cell["model_path"]
    if not gpu:
        raise _Refused(f"no GPU of fastroof: {cell['system']}")
    if engine not in serving_engines():
        raise _Refused(f"engine {engine}: {checkpoint}")
    known = _MODELS.get((checkpoint, cell["precision"]))
    if known is None:
        raise _Refused(f"no preset: {checkpoint} {cell['precision']}".rstrip())
    model, dtype, architecture = known
    if checkpoint == "meta-llama/Llama-3.1-8B-Instruct" and cell["gemm_quant_mode"] == "fp8_block":
        dtype = "fp8_block"
    if cell["precision"] and dtype != cell["gemm_quant_mode"]:
        changed["format"] += 1
    origin = cell["silicon_data_source"]
    measured_on = _found(r"measured=([0-9-]{10})", origin)
    is_inferencemax = re.match(_OF_INFERENCEMAX, origin) is not None
    version = cell["backend_version"]
    known_version = version or _VERSIONS.get((engine, measured_on), "")
    if engine == "trtllm":
        known_version = _OF_DYNAMO.get(version, known_version)
    changed["version"] += known_version != version
    is_disaggregated, exchange = cell["mode"] == "disagg", ""
    if is_disaggregated:
        layout = _disaggregated(cell)
        concurrency = layout.pop("concurrency")
        if engine == "sglang" and layout["dp"] > NODE_GPUS.get(gpu, 8):
            layout["ep"] = layout["tp"] * layout["dp"]
            exchange = "alltoall"
            changed["wide"] += 1
    else:
        layout = _layout(cell, model, is_inferencemax, changed)
        concurrency = layout.pop("concurrency")
        uncut = architecture == "minimax-m2.5" and dtype == "fp8_block" and layout["tp"] == 8
        if uncut or (engine == "sglang" and not version and layout["tp"] > 1 and layout["ep"] == 1):
            changed["experts"] += layout["ep"] == 1
            layout["ep"] = layout["tp"]
    kv_dtype, kv_from = _kv_dtype(engine, gpu, architecture, dtype)
    rounds = BENCH_ROUNDS
    if is_inferencemax and not is_disaggregated:
        labelled = (layout["tp"], layout["dp"], layout["ep"])
        recipe = recipe_for(
            engine, known_version, gpu, architecture, dtype, layout=labelled, measured_on=measured_on
        )
        if recipe is not None:
            ran = recipe.layout(
                *labelled, isl=float(cell["isl"]), osl=float(cell["osl"]), clients=concurrency
            )
            changed["recipe"] += ran != labelled
            layout |= dict(zip(("tp", "dp", "ep"), ran, strict=True))
            if recipe.kv_dtype:
                kv_dtype, kv_from = recipe.kv_dtype, _RECIPE
            rounds = float(recipe.requests_per_client or rounds)
            of_isl = round(recipe.batched_tokens_per_isl * float(cell["isl"]))
            layout["max_num_batched_tokens"] = of_isl or recipe.max_num_batched_tokens
            layout["max_num_seqs"] = recipe.max_num_seqs
            if layout["max_num_batched_tokens"] or layout["max_num_seqs"]:
                layout["settings_from"] = f"{PurePosixPath(recipe.file).name}, {recipe.commit[:8]}"
    elif not is_disaggregated:
        sizes = float(cell["isl"]), concurrency, layout["dp"]
        settings = dynamo_settings(engine, known_version, *sizes)
        changed["settings"] += bool(settings)
        layout |= settings
    return ServingRow(
        dataset="-".join(
            filter(None, (engine, version, architecture if model not in _DENSE else model, dtype,
                          "disaggregated" if is_disaggregated else ""))
        ),
        row=cell["id"],
        gpu=gpu,
        engine=engine,
        engine_version=known_version,
        checkpoint=checkpoint,
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_dtype_from=kv_from,
        isl=float(cell["isl"]),
        osl=float(cell["osl"]),
        concurrency=float(concurrency),
        length_factor=INFERENCEMAX_LENGTHS if is_inferencemax else 1.0,
        requests_per_client=rounds,
        frontend="" if is_inferencemax else DYNAMO,
        ttft_ms=float(cell["silicon_ttft_ms"]),
        tpot_ms=float(cell["silicon_tpot_ms"]),
        left_out="",
        architecture=architecture,
        bench=INFERENCEMAX if is_inferencemax else DYNAMO,
        length_spread=INFERENCEMAX_SPREAD if is_inferencemax else 0.0,
        measured_on=measured_on,
        exchange=exchange,
        **layout,
    )  # fmt: skip


def _layout(
    cell: Mapping[str, str], model: str, is_inferencemax: bool, changed: Counter[str]
) -> dict[str, Any]:
    """Return layout and concurrency of an aggregated run."""
    tp, dp = _number(cell, "tp_size"), _number(cell, "attention_dp_size")
    moe_tp, ep = max(_number(cell, "moe_tp_size"), 1), max(_number(cell, "moe_ep_size"), 1)
    batch = _number(cell, "batch_size")
    origin, name = cell["silicon_data_source"], cell["id"]
    clients = _found(r"silicon_concurrency=(\d+)", origin) or _found(r"_c(\d+)_", name)
    if not clients:
        raise _Refused("its concurrency is in no column")
    concurrency = int(clients)
    if tp > 8 and (moe_tp == tp or ep == tp) and is_inferencemax:
        raise _Refused("the GPUs of a disaggregated deployment, written as one engine's")
    written = (tp, dp, ep)
    if model in _DENSE:
        ep = 1
        dp = max(dp, 1)
        if concurrency != batch * dp and concurrency % batch == 0:
            # replicas behind one router
            dp = concurrency // batch
            changed["concurrency"] += 1
        return {"tp": tp, "pp": _number(cell, "pp_size"), "dp": dp, "ep": 1, "concurrency": concurrency}
    if is_inferencemax:
        if moe_tp > 1 and ep > 1:
            gpus = math.isqrt(moe_tp * ep)
            tp, dp = (1, gpus) if dp > 1 else (gpus, 1)
            ep = gpus
        elif dp > 1 and ep == dp * tp and tp == dp:
            tp, ep = 1, dp
        if written != (tp, dp, ep):
            changed["layout"] += 1
    dp = max(dp, 1)
    if not is_inferencemax:
        if concurrency == batch * tp and tp > 1 and moe_tp * ep == tp:
            # attention of data-parallel ranks, written as tp
            tp, dp = 1, tp
            changed["concurrency"] += 1
        elif tp * dp != moe_tp * ep and moe_tp * ep % tp == 0 and moe_tp * ep > tp:
            dp = moe_tp * ep // tp
            changed["ranks"] += 1
    if (tp * dp) % ep:
        raise _Refused(f"its layout contradicts itself: tp {tp}, dp {dp}, moe_tp {moe_tp}, ep {ep}")
    return {"tp": tp, "pp": _number(cell, "pp_size"), "dp": dp, "ep": ep, "concurrency": concurrency}


def _disaggregated(cell: Mapping[str, str]) -> dict[str, Any]:
    """Return layouts, workers and concurrency of a disaggregated run."""
    if not cell.get("prefill_num_workers"):
        raise _Refused("disaggregated without worker counts")
    layout = {
        "tp": _number(cell, "decode_tp_size"),
        "pp": _number(cell, "decode_pp_size"),
        "dp": max(_number(cell, "decode_attention_dp_size"), 1),
        "ep": max(_number(cell, "decode_moe_ep_size"), 1),
        "decode_workers": _number(cell, "decode_num_workers"),
        "prefill_workers": _number(cell, "prefill_num_workers"),
        "prefill_tp": _number(cell, "prefill_tp_size"),
        "prefill_dp": max(_number(cell, "prefill_attention_dp_size"), 1),
        "prefill_ep": max(_number(cell, "prefill_moe_ep_size"), 1),
    }
    written = _found(r"silicon_concurrency=(\d+)", cell["silicon_data_source"]) or _found(
        r"_c(\d+)_", cell["id"]
    )
    each = _number(cell, "decode_batch_size") * layout["dp"] * layout["decode_workers"]
    layout["concurrency"] = int(written) if written else each
    if not layout["concurrency"]:
        raise _Refused("its concurrency is in no column")
    return layout


def _kv_dtype(engine: str, gpu: str, architecture: str, dtype: str) -> tuple[str, str]:
    """Return the KV cache's dtype and how it is known."""
    if dtype == "bf16":
        return "bf16", _DEFAULT
    if (engine, architecture) == ("trtllm", "qwen3-32b"):
        return "fp8", _ONSET
    if (engine, architecture) == ("vllm", "llama-3.1-70b"):
        # H100 runs as many requests as fit a bf16 cache, the others as fit fp8
        return ("bf16" if gpu == "h100" else "fp8"), _ONSET
    return ("fp8", _MODELOPT) if engine == "trtllm" else ("bf16", _DEFAULT)
