"""The page's choices, and the commands that give its answers."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fastroof._version import __version__
from fastroof.columns import ORIGINS
from fastroof.engines import engine_names
from fastroof.load.by_name import can_import, has_tables, table_folders
from fastroof.models.execution import AUTO, DTYPES, KV_DTYPES
from fastroof.report.plots import GROUPS
from fastroof.serving.scenarios import STEADY

if TYPE_CHECKING:
    from fastroof.ui.plans import PlanStore
from fastroof.ui.view import KINDS, PERCENTILES, SIZES, View


def choices(store: PlanStore, start: View) -> dict[str, Any]:
    """Return the values of all controls, and the first view."""
    return {
        "version": __version__,
        "models": list(store.models),
        "gpus": [_gpu(store, name) for name in store.gpus],
        "choices": {
            "dtype": [AUTO, *DTYPES],
            "kv_dtype": [AUTO, *KV_DTYPES],
            "engine": list(engine_names()),
            "kind": list(KINDS),
            "percentile": list(PERCENTILES),
        },
        "sizes": SIZES,
        "start": start.document(),
        "groups": list(GROUPS),
        "origins": list(ORIGINS),
    }


def _gpu(store: PlanStore, name: str) -> dict[str, str]:
    written = store.gpus[name]
    known = "measured"
    if written == name and not table_folders(name):
        donor = store.gpu(name).kernel_name
        known = "scaled" if has_tables(name) else "importable" if can_import(donor) else "datasheet"
    return {"name": name, "title": store.gpu(name).title, "known": known}


def number_written(value: float) -> str:
    """Return a number as short as it can be written without an exponent."""
    short = f"{value:g}"
    return short if "e" not in short and float(short) == value else repr(value)


def _options(store: PlanStore, view: View, split: dict[str, int] | None = None) -> list[str]:
    """Return the options that all commands share; the model is separate, an argument of some."""
    options = ["--gpu", store.written_gpu(view.gpu)]
    sizes = {name: getattr(view, name) for name in ("tp", "pp", "dp", "ep")} | (split or {})
    for name, size in sizes.items():
        if size != 1:
            options += [f"--{name}", str(size)]
    for name in ("dtype", "kv_dtype"):
        if getattr(view, name) != "auto":
            options += [f"--{name.replace('_', '-')}", getattr(view, name)]
    options += [] if view.lora is None else ["--lora", view.lora]
    options += ["--allow-modelled"] * view.allow_modelled
    return [*options, "--engine", view.engine]


def has_power(store: PlanStore, view: View) -> bool:
    """Return whether the power of the view's GPU is known, which energy needs."""
    return bool(store.measured(view.gpu).gpu.tdp_w)


def step_command(store: PlanStore, view: View) -> str:
    """Return the command that prints the step."""
    words = ["fastroof", "step", "--model", store.written_model(view.model), *_options(store, view)]
    if view.decodes:
        words += ["--decode", f"{view.decodes}x{view.decode_kv_len}"]
    if view.prompt_tokens:
        words += ["--prefill", f"{view.prompt_tokens}@0"]
    return shlex.join([*words, "--explain", *["--energy"] * has_power(store, view)])


def fit_command(store: PlanStore, view: View) -> str:
    """Return the command that tells whether the engine starts."""
    words = [word for word in _options(store, view) if word != "--allow-modelled"]
    return shlex.join(["fastroof", "fit", "--model", store.written_model(view.model), *words, *_budget(view)])


def _budget(view: View) -> list[str]:
    """Return the option of the engine's maximum tokens per step, if one is set."""
    most = view.max_num_batched_tokens
    return [] if most is None else ["--max-num-batched-tokens", str(most)]


def _overhead(view: View) -> list[str]:
    """Return the option of a time outside the engine, which steps do not have."""
    given = view.front_end
    if given is None:
        return []
    return ["--front-end", given if isinstance(given, str) else number_written(given)]


def serving_command(store: PlanStore, view: View, clients: int, split: dict[str, int] | None = None) -> str:
    """Return the command that estimates a number of clients, for the view's layout or another."""
    words = ["fastroof", "serving", "--model", store.written_model(view.model), *_options(store, view, split)]
    words += [*_overhead(view), "--isl", str(view.isl), "--osl", str(view.osl)]
    words += ["--clients", str(clients), *_budget(view)]
    if split is not None:
        return shlex.join([*words, "--requests-per-client", STEADY])
    return shlex.join([*words, *["--energy"] * has_power(store, view)])


def lengths_written(view: View) -> tuple[int | str, int | str]:
    """Return the lengths of prompts and outputs, as written in a workload and a command."""
    if not view.spread:
        return view.isl, view.osl
    sigma = number_written(view.spread)
    return f"lognormal:{view.isl}:{sigma}", f"lognormal:{view.osl}:{sigma}"


def request_limits(view: View) -> dict[str, float]:
    """Return the limits of each request, as arguments of :meth:`fastroof.Simulation.summary`."""
    limits = {"ttft_ms": view.ttft_ms, "tpot_ms": view.tpot_ms}
    return {name: float(ms) for name, ms in limits.items() if ms is not None}


def capacity_limits(view: View) -> dict[str, float]:
    """Return the limits of a capacity, as arguments of :func:`fastroof.capacity`."""
    return {name.replace("_ms", f"_p{view.percentile}_ms"): ms for name, ms in request_limits(view).items()}


def capacity_command(store: PlanStore, view: View) -> str:
    """Return the command that finds the capacity."""
    words = ["fastroof", "capacity", "--model", store.written_model(view.model), *_options(store, view)]
    prompts, outputs = lengths_written(view)
    words += _overhead(view)
    for name, ms in request_limits(view).items():
        words += [f"--{name.removesuffix('_ms')}", number_written(ms)]
    words += [] if view.percentile == 99 else ["--percentile", number_written(view.percentile)]
    return shlex.join([*words, "--isl", str(prompts), "--osl", str(outputs), *_budget(view)])


def simulation_command(store: PlanStore, view: View, *, with_energy: bool) -> str:
    """Return the command that simulates the view's traffic."""
    words = ["fastroof", "simulate", "--model", store.written_model(view.model), *_options(store, view)]
    words += _overhead(view)
    prompts, outputs = lengths_written(view)
    given: dict[str, str | float | None] = {
        "rate": view.rate,
        "clients": view.clients,
        "num_requests": view.num_requests,
        "isl": prompts,
        "osl": outputs,
        "turns": None if view.turns == 1 else view.turns,
        "growth": view.growth,
        "think": view.think_s or None,
        "kv_tiers": view.kv_tiers,
        "max_num_batched_tokens": view.max_num_batched_tokens,
        "ttft": view.ttft_ms,
        "tpot": view.tpot_ms,
    }
    for name, value in given.items():
        if value is not None:
            written = value if isinstance(value, str) else number_written(value)
            words += [f"--{name.replace('_', '-')}", written]
    if not view.prefix_cache:
        words += ["--prefix-cache", "given", "--cached", "0"]
    return shlex.join([*words, *shlex.split(view.fleet or ""), *["--energy"] * with_energy])
