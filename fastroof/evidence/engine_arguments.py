"""Reading an engine's start arguments: GPU, version, model, formats, layout and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fastroof.acceptance import MOST_DRAFT_TOKENS, parse_accepted
from fastroof.checks import is_whole_number
from fastroof.config.gpu import gpu_named
from fastroof.engines import EngineProfile, engine_of_version, serving_engines
from fastroof.engines.scheduling import PAUSES
from fastroof.errors import ModelError, TableError
from fastroof.evidence.engine_files import engine_by_flags, settings_of_file
from fastroof.evidence.engine_flags import ENGINE_FLAGS, FALSE, SETTINGS, names_of, spelled
from fastroof.evidence.speculative_flags import (
    NO_DRAFT,
    SYNTHETIC,
    DraftFlags,
    draft_flags,
    parse_draft,
    split_drafts,
)
from fastroof.models import Layout, ModelSpec, load_model
from fastroof.models.execution import DTYPES, KV_DTYPES

KV_FORMATS: Final[Mapping[str, str]] = {
    "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_inc": "fp8", "bf16": "bf16", "bfloat16": "bf16",
    "float16": "bf16", "fp16": "bf16", "half": "bf16",
    **{name: name for name in KV_DTYPES},
}  # fmt: skip
ACTIVATIONS: Final = ("auto", "bfloat16", "bf16", "float16", "fp16", "half")
CHECKPOINTS: Final = (
    "modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed", "compressed_tensors", "awq", "awq_marlin",
    "gptq", "gptq_marlin", "mxfp4", "w8a8_int8", "w8a8_fp8", "auto", "none",
)  # fmt: skip
"""Quantization methods that name how the checkpoint is read, not its format."""

TRUE: Final = ("true", "1", "yes", "on")
PREFILL_BACKENDS: Final = ("disabled", "breakable", "tc_piecewise", "full")
MOST_GPUS: Final = 1024


@dataclass(frozen=True)
class EngineArguments:
    """The start arguments of one engine; its version is empty if unknown.

    ``model`` is the name or path for :func:`fastroof.load_model` of the given ``checkpoint``; ``profile`` is
    that of the version, with the given schedule. ``changing`` are flags that change steps, not modelled.
    ``accepted`` is an acceptance length as
    :class:`fastroof.SpeculativeDecoding` takes it.
    """

    gpu: str
    engine: str
    version: str
    checkpoint: str
    model: str
    dtype: str
    kv_dtype: str
    kv_dtype_from: str
    layout: Layout
    profile: EngineProfile
    warnings: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    drafts: DraftFlags | None = None
    accepted: float | tuple[float, ...] | str = ""


def read_engine_arguments(
    path: str | Path | None = None, given: Mapping[str, Any] | None = None, *, engine: str = ""
) -> EngineArguments:
    """Read an engine's start arguments; warnings name flags that are unknown, or known but not modelled.

    The file is a .json, .toml or .yaml with the engine's flags or fastroof's names, such as vLLM's
    ``--config``, or a container of Docker Compose or Kubernetes; or any other file with the command line
    (``vllm serve ..``, ``sglang serve ..``, ``trtllm-serve ..``, ``python -m dynamo.vllm ..``) or the line of
    vLLM's log with its non-default args. Files that ``--config`` and ``--extra_llm_api_options`` name are
    read too. Values that ``given`` (names of ``SETTINGS``) and the file both set must agree, except for the
    model, which may have two names. Without an ``engine`` it is the only one with all of the flags.

    Examples
    --------
    >>> own = {"gpu": "h100", "engine": "vllm", "version": "0.12.0", "model": "llama-3.1-70b", "tp": 4}
    >>> started = read_engine_arguments(given=own)
    >>> started.layout.tp, started.kv_dtype, started.profile.engine
    (4, 'bf16', 'vllm')
    """
    where = "the options" if path is None else str(path)
    settings: dict[str, tuple[str, str]] = {}
    unknown: list[str] = []
    overlooked: list[str] = []
    warnings = []
    drafts: DraftFlags | None = None
    places: Mapping[str, str] = {}
    changing: tuple[str, ...] = ()
    if path is not None:
        named, pairs, places = settings_of_file(Path(path))
        named = named or str((given or {}).get("engine") or engine).lower()
        if not named and (named := engine_by_flags(pairs)):
            warnings.append(f"{where} does not name the engine: it is {named}, the only one with these flags")
        others, found = split_drafts(where, pairs)
        if (known := ENGINE_FLAGS.get(named)) is not None:
            changing = tuple(flag for flag, value in others if known.changes_steps(flag, value))
        drafts = draft_flags(where, named, found, str((given or {}).get("draft") or ""))
        if drafts is not None:
            settings["num_draft_tokens"] = (str(drafts.num_draft_tokens), where)
            if (accepted := found.get(SYNTHETIC)) is not None:
                settings["accepted"] = (accepted, f"{where}, {SYNTHETIC}")
        for flag, value in others:
            _settle(settings, *_meaning(where, named, flag, value, unknown, overlooked))
        if named:
            _settle(settings, "engine", named, where)
    elif engine and not (given or {}).get("engine"):
        settings["engine"] = (engine, where)
    for name, value in (given or {}).items():
        if name not in SETTINGS:
            raise TableError(
                f"{name!r} is not a setting of an engine; valid settings are {', '.join(SETTINGS)}"
            )
        if value is not None and name == "model" and "model" in settings:
            settings.setdefault("checkpoint", settings["model"])
            settings["model"] = (str(value), "the options")
        elif value is not None and name == "gpu" and name in places and name in settings:
            if str(value).lower() != settings[name][0].lower():
                warnings.append(f"{where}: {places[name]} is {settings[name][0]}; {value} is used")
            settings[name] = (str(value), "the options")
        elif value is not None:
            _settle(settings, name, str(value), "the options")
    if unknown:
        warnings.append(f"{where}: unknown flags, ignored: {', '.join(unknown)}")
    if overlooked:
        warnings.append(f"{where}: flags that may change steps but are not modelled: {', '.join(overlooked)}")
    found = {name: value for name, (value, _) in settings.items()}
    return replace(_arguments(where, found, warnings, drafts, places), changing=changing)


def _meaning(
    where: str, engine: str, flag: str, value: str | None, unknown: list[str], overlooked: list[str]
) -> tuple[str, str, str]:
    """Return the setting, value and place of a flag; the setting is empty if it has none."""
    name = spelled(flag)
    known = ENGINE_FLAGS.get(engine)
    if known is not None:
        if name in (*known.switches, *known.settings) and known.is_not_modelled(name):
            overlooked.append(flag)
        if name in known.settings and value is not None:
            return known.settings[name], value, f"{where}, {flag}"
        if name in known.switches:
            setting, on = known.switches[name]
            if value is not None and value.lower() in FALSE:
                on = "true" if on == "false" else "false"
            return setting, on, f"{where}, {flag}"
        if name in known.settings:
            raise TableError(f"{where}: {flag} needs a value")
        for one in names_of(flag):
            if known.is_not_modelled(one):
                overlooked.append(flag)
                return "", "", ""
            if known.is_silent(one):
                return "", "", ""
    if name in SETTINGS and value is not None:
        return name, value, f"{where}, {flag}"
    unknown.append(flag)
    return "", "", ""


def _settle(settings: dict[str, tuple[str, str]], name: str, value: str, place: str) -> None:
    if not name:
        return
    before = settings.setdefault(name, (value, place))
    if before[0].lower() != value.lower():
        raise TableError(f"{name} is {before[0]} in {before[1]} and {value} in {place}; give one")


def _arguments(
    where: str,
    found: Mapping[str, str],
    warnings: Sequence[str],
    drafts: DraftFlags | None,
    places: Mapping[str, str],
) -> EngineArguments:
    for need, example in (("engine", "vllm"), ("gpu", "h100"), ("model", "llama-3.1-70b")):
        if not found.get(need):
            add = f"add {places[need]}" if need in places else "add it to the file"
            raise TableError(f"{where} does not name the {need}; {add} or give --{need} {example}")
    engine, version = found["engine"].lower(), found.get("version", "").removeprefix("v")
    if engine not in serving_engines():
        raise TableError(f"{where}: engine {engine!r} is unknown; valid are {', '.join(serving_engines())}")
    checkpoint = found.get("checkpoint", found["model"])
    try:
        spec = load_model(found["model"])
    except ModelError as error:
        raise type(error)(f"{where}: {error} (--model names another)") from None
    dtype, notes = _dtype(where, found, spec.checkpoint.formats[0])
    packaged = engine_of_version(engine, version)
    kv_dtype, known_from = _kv_dtype(where, found, spec, packaged)
    layout, ranks = _layout(where, engine, found)
    started = packaged.started_with(_settings(where, found, drafts is not None))
    profile = _scheduled(where, started, found, ranks)
    if not version:
        notes.append(
            f"{where} does not name the version of {engine}: the newest is assumed, profile {packaged.title}"
        )
    return EngineArguments(
        found["gpu"].lower(),
        engine,
        version,
        checkpoint,
        found["model"],
        dtype,
        kv_dtype,
        known_from,
        layout,
        profile,
        (*warnings, *notes, *(() if drafts is None else drafts.notes)),
        (),
        *_drafts(where, found, drafts),
    )


def _drafts(
    where: str, found: Mapping[str, str], flags: DraftFlags | None
) -> tuple[DraftFlags | None, float | tuple[float, ...] | str]:
    """Return the drafts of flags or options, and their acceptance length if it is given."""
    drafts = flags
    if "num_draft_tokens" in found:
        tokens = _size(where, found, "num_draft_tokens", MOST_DRAFT_TOKENS)
        drafts = DraftFlags(tokens, *parse_draft(found.get("draft", NO_DRAFT))) if flags is None else flags
    spare = [name for name in ("accepted", "draft") if name in found]
    if drafts is None and spare:
        raise TableError(
            f"{where}: {' and '.join(spare)} needs num_draft_tokens, or flags that turn drafts on"
        )
    if drafts is None:
        return None, ""
    return drafts, parse_accepted(f"{where}: accepted", found.get("accepted", ""))


def _dtype(where: str, found: Mapping[str, str], of_checkpoint: str) -> tuple[str, list[str]]:
    activations = found.get("activations", "auto").lower()
    notes = []
    if activations not in ACTIVATIONS:
        raise TableError(
            f"{where}: dtype {activations!r} is not modelled; valid are {', '.join(ACTIVATIONS)}"
        )
    if activations in ("float16", "fp16", "half"):
        notes.append(f"{where}: float16 is treated as bf16, whose kernels are equally fast")
    if (dtype := found.get("dtype")) is not None:
        if dtype != "auto" and dtype not in DTYPES:
            raise TableError(f"{where}: dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
        return (of_checkpoint if dtype == "auto" else dtype), notes
    method = spelled(found.get("quantization", "auto"))
    if method in CHECKPOINTS:
        return of_checkpoint, notes
    if method == "fp8":
        return (of_checkpoint if of_checkpoint != "bf16" else "fp8"), notes
    raise TableError(f"{where}: unknown quantization {method!r}; --dtype must be one of {', '.join(DTYPES)}")


def _kv_dtype(
    where: str, found: Mapping[str, str], model: ModelSpec, engine: EngineProfile
) -> tuple[str, str]:
    kv_dtype = found.get("kv_dtype", "auto").lower()
    if kv_dtype != "auto":
        if kv_dtype not in KV_FORMATS:
            raise TableError(
                f"{where}: KV cache in {kv_dtype!r} is not modelled; valid are auto, {', '.join(KV_FORMATS)}"
            )
        return KV_FORMATS[kv_dtype], "given"
    gpu, stored = gpu_named(found["gpu"]), model.checkpoint.formats[1]
    own = stored if gpu is None else engine.memory.auto_kv_dtype(gpu, model.architecture, stored)
    default = "the dtype of the activations" if own == stored else f"of this model on {found['gpu']}"
    is_stored = own == model.checkpoint.kv_dtype
    return own, "assumed: the checkpoint's" if is_stored else f"assumed: {engine.engine}'s default, {default}"


def _size(where: str, found: Mapping[str, str], name: str, most: int = MOST_GPUS, least: int = 1) -> int:
    text = found.get(name, "1")
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not is_whole_number(value, least, most):
        raise TableError(f"{where}: {name} must be a whole number from {least} to {most}, got {text[:40]!r}")
    return value


def _is_on(where: str, found: Mapping[str, str], name: str) -> bool | None:
    text = found.get(name)
    if text is None:
        return None
    if text.lower() not in TRUE + FALSE:
        raise TableError(f"{where}: {name} must be true or false, got {text[:40]!r}")
    return text.lower() in TRUE


def _layout(where: str, engine: str, found: Mapping[str, str]) -> tuple[Layout, int]:
    """Return the layout, and the ranks by which the engine divides its limits of a step."""
    tp, pp, dp, ep = (_size(where, found, name) for name in ("tp", "pp", "dp", "ep"))
    shares_attention = _is_on(where, found, "dp_attention")
    if (ranks := _size(where, found, "attention_dp")) > 1:
        if dp > 1:
            raise TableError(
                f"{where}: --attn-dp-size {ranks} and --dp-size {dp}: SGLang takes one of them above 1"
            )
        dp, shares_attention = ranks, True
    if engine == "vllm" and _is_on(where, found, "expert_parallel"):
        if "ep" in found and ep != tp * dp:
            raise TableError(f"{where}: with expert parallelism vLLM uses ep = tp x dp = {tp * dp}, got {ep}")
        ep = tp * dp
    elif engine == "sglang" and shares_attention:
        # attention ranks share the GPUs of tp
        if tp % dp:
            raise TableError(
                f"{where}: ranks that share experts need a tp divisible by dp, got tp {tp} and dp {dp}"
            )
        tp //= dp
    elif engine == "trtllm" and shares_attention:
        if dp not in (1, tp):
            raise TableError(f"{where}: enable_attention_dp makes each of {tp} GPUs a rank, got dp {dp}")
        tp, dp = 1, tp
    elif engine == "sglang" and dp > 1 and ep > tp:
        raise TableError(f"{where}: ranks without shared experts have an ep of at most tp {tp}, got {ep}")
    divides = engine == "sglang" and bool(shares_attention)
    return Layout(tp, pp, dp, ep), dp if divides else 1


def _settings(where: str, found: Mapping[str, str], drafts_tokens: bool) -> set[str]:
    """Return settings of graphs, fused kernels and caches, for ``EngineProfile.started_with``."""
    switches = ("lora", "offload", "fused", "no_prefix_cache")
    has = {name: bool(_is_on(where, found, name)) for name in switches}
    has["extra_buffer"] = found.get("state_strategy") == "extra_buffer"
    has["lora"] |= "lora_paths" in found
    has["offload"] |= found.get("cpu_offload_gb", "0") != "0"
    has["speculation"] = drafts_tokens or "num_draft_tokens" in found
    has["disaggregation"] = found.get("role", "null") != "null"
    has["alltoall"] = found.get("a2a_backend", "none") != "none"
    graphs = found.get("prefill_graphs", "").lower()
    if graphs and graphs not in PREFILL_BACKENDS:
        raise TableError(
            f"{where}: prefill graphs {graphs[:40]!r} are unknown; valid are {', '.join(PREFILL_BACKENDS)}"
        )
    has["no_graphs"] = graphs == "disabled"
    has["graphs"] = graphs not in ("", "disabled")
    return {name for name, is_on in has.items() if is_on}


def _scheduled(where: str, profile: EngineProfile, found: Mapping[str, str], ranks: int) -> EngineProfile:
    """Return the profile with the schedule of the arguments, in limits of one rank."""
    schedule = profile.scheduling
    most = 2**20
    if found.get("max_num_batched_tokens") == "-1" and profile.engine == "sglang":
        schedule = replace(schedule, chunked_prefill=False)
    elif "max_num_batched_tokens" in found:
        tokens = _size(where, found, "max_num_batched_tokens", most)
        schedule = replace(schedule, max_num_batched_tokens=max(tokens // ranks, 1))
    if "max_num_seqs" in found:
        seqs = _size(where, found, "max_num_seqs", most)
        schedule = replace(schedule, max_num_seqs=max(seqs // ranks, 1))
    if {"max_num_batched_tokens", "max_num_seqs"} & set(found):
        schedule = replace(schedule, by_card=False)
    for name, off in PAUSES.items():
        if name in found:
            sizes: dict[str, Any] = {name: _size(where, found, name, most, off)}
            schedule = replace(schedule, **sizes)
    profile.refuse_pauses(schedule.pauses_on, shares_experts=True, error=TableError)
    overlaps = _is_on(where, found, "async_scheduling")
    if overlaps is not None:
        schedule = replace(schedule, async_scheduling=overlaps)
    chunked = _is_on(where, found, "chunked_prefill")
    if chunked is not None:
        if chunked and found.get("max_num_batched_tokens") == "-1":
            raise TableError(
                f"{where}: a chunk of -1 tokens turns chunked prefill off, but it is also turned on"
            )
        schedule = replace(schedule, chunked_prefill=chunked)
    return replace(profile, scheduling=schedule)
