"""The settings of deployments that tests go through, and the options that fastroof passes for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from packaging.version import Version

from fastroof.engines.launch import Address, BenchmarkLoad, Command, LaunchSettings, sglang, trtllm, vllm
from fastroof.engines.launch.platforms import DYNAMO_RELEASE, dynamo_engine
from fastroof.engines.launch.vllm_forward import FIRST_RELEASE, forward_command
from tests.engines.arguments import Option, Recorded, recorded

MODULES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}
ROLES = ("server",), ("prefill", "decode")
OTHERS = {
    "dynamo": DYNAMO_RELEASE,
    **{f"{one.ROUTER.replace('-', '_').split()[0]}": one.ROUTER.split()[1] for one in (vllm, sglang)},
}
"""Other programs with records, and their releases."""
ONE = LaunchSettings(
    model="org/a-model", tp=2, pp=1, dp=1, ep=1, has_experts=False, max_num_batched_tokens=2048,
    max_num_seqs=1024, max_context=32_768, running=40, memory_fraction=0.9, dtype="bf16", kv_dtype="bf16",
    checkpoint_dtype="bf16", auto_kv_dtype="bf16", max_loras=4, side_port=9000,
)  # fmt: skip


_LAYOUTS: dict[str, tuple[Any, ...]] = {
    "split": ((1, 1, 1, 1), (8, 2, 1, 1), (1, 1, 8, 8), (2, 1, 4, 1)),
    "has_experts": (False, True),
}
_OTHERS: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp8", "nvfp4"),
    "kv_dtype": ("bf16", "fp8"),
    "auto_kv_dtype": ("bf16", "fp8"),
    "draft": ("", "mtp", "small"),
    "role": ("", "prefill", "decode"),
    "memory_fraction": (0.0, 0.9),
    "balance_steps": (0, 60),
    "kv_cache_bytes": (0, 2**34),
    "lora_rank": (0, 16),
}


def some_settings(*, all_together: bool) -> Iterator[LaunchSettings]:
    """Yield settings that reach every option: every layout with each other setting, or with all of them."""
    if all_together:
        others = [dict(zip(_OTHERS, values, strict=True)) for values in itertools.product(*_OTHERS.values())]
    else:
        others = [{name: value} for name, values in _OTHERS.items() for value in values]
    for (tp, pp, dp, ep), has_experts in itertools.product(*_LAYOUTS.values()):
        for other in others:
            drafts = 3 if other.get("draft") else 0
            other = {**other, "address": "node-1" if other.get("role") else "127.0.0.1"}
            split = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "has_experts": has_experts}
            yield LaunchSettings(**{**vars(ONE), **split, **other, "num_draft_tokens": drafts})


def loads() -> Iterator[BenchmarkLoad]:
    """Yield loads that reach every option of a benchmark."""
    for prefix, rate in itertools.product((0, 400), (0.0, 2.5)):
        yield BenchmarkLoad("org/a-model", 1000, 100, 40, prefix, requests_per_s=rate)


def forwards() -> Iterator[Command]:
    """Yield commands that measure steps; over several GPUs torchrun starts the same one."""
    for (tp, dp, ep), dtype, kv_dtype in itertools.product(
        ((1, 1, 1), (2, 1, 1), (1, 4, 4)), ("bf16", "fp8"), ("bf16", "fp8")
    ):
        served = LaunchSettings("org/a-model", tp, 1, dp, ep, dtype, kv_dtype, "bf16", "bf16")
        yield replace(
            forward_command(served, {"a": [(1, 9)]}, "a.json"), program=("vllm", "bench", "forward")
        )


def routers(engine: str) -> tuple[Command, ...]:
    """Return the routers of an engine, in front of copies and of separate workers."""
    places = [Address("here", 8000, 9000), Address("there", 8000, 9000)]
    found = (MODULES[engine].router(dict.fromkeys(roles, places), 8100) for roles in ROLES)
    return tuple(one for one in found if one is not None)


@cache
def commands(engine: str, release: str, *, all_together: bool = False) -> tuple[Command, ...]:
    """Return fastroof's commands of a release: servers, workers of Dynamo, or routers, and benchmarks."""
    if engine.endswith("_router"):
        return routers(engine.removesuffix("_router"))
    wanted = tuple(some_settings(all_together=all_together))
    if engine == "dynamo":
        workers = [dynamo_engine(name) for name in MODULES]
        return tuple(known.worker(one) for known in workers if known is not None for one in wanted)
    module = MODULES[engine]
    servers = tuple(module.server(one, release) for one in wanted)
    steps = forwards() if engine == "vllm" and Version(release) >= Version(FIRST_RELEASE) else ()
    own = routers(engine) if engine == "trtllm" else ()
    return (*servers, *(module.benchmark(one, release) for one in loads()), *steps, *own)


def options_of(command: Command) -> dict[str, str]:
    """Return the options of a command with their values, and the option of its YAML."""
    given = {one[0]: one[1] if len(one) > 1 else "" for one in command.arguments if one[0].startswith("-")}
    return given | ({command.config_option: "engine.yaml"} if command.config else {})


def passed_options(engine: str, record: Recorded) -> set[str]:
    """Return the options that fastroof passes to a command of a release."""
    return {
        option
        for command in commands(engine, record.release)
        if " ".join(command.program) == record.command
        for option in options_of(command)
        if not (record.takes_also and record.find(option) is None)
    }


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return a YAML's settings by their dotted keys."""
    found = {}
    for key, value in config.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return found


def record_of(engine: str, release: str, program: str) -> Recorded:
    """Return the record of a command in a release."""
    (found,) = (one for one in recorded(engine) if (one.release, one.command) == (release, program))
    return found


def option_of(record: Recorded, spelling: str) -> Option | None:
    """Return an option of a command, or of the server whose options it takes too."""
    if (found := record.find(spelling)) or not record.takes_also:
        return found
    engine, _, release = record.takes_also.partition("-")
    return next(one for one in recorded(engine) if one.release == release).find(spelling)


def check(command: Command, record: Recorded) -> None:
    """Assert that a release has every option of a command, and takes its values."""
    for spelling, value in options_of(command).items():
        option = option_of(record, spelling)
        assert option is not None, (record.release, spelling)
        assert not option.is_deprecated, (record.release, spelling, option.use)
        assert not option.choices or value in option.choices, (record.release, spelling, value)
    if record.keys:
        assert set(flat(command.config)) <= record.keys, record.release
