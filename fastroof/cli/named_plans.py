"""Plans named on a command line: ``llama-3.1-70b,tp=4,dtype=fp8``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.options import GPU_NAMES
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.errors import PlanError

if TYPE_CHECKING:
    from fastroof import StepPlan

__all__ = ["PLANS_HELP", "GpuOption", "PlansArgument", "named_plans", "plans_words"]

PLANS_HELP: Final = f"""\b
A plan is MODEL[,KEY=VALUE...]: a preset or the path of a config.json, then any of name, gpu, tp, dtype,
kv_dtype, runtime, method, max_tokens, max_seqs. Without a name it is called after its model and what
differs from the defaults, as llama-3.1-70b-tp4-fp8; without runtime it has that of {DEFAULT_RUNTIME}.
pp, cp, dp, ep, moe_tp, routing and exchange split it; eplb=yes (with num_slots), wide_experts=yes and
two_batch_overlap=yes say how its experts run.
"""

PlansArgument = Annotated[
    list[str], typer.Argument(metavar="PLAN...", help="MODEL[,KEY=VALUE...], as llama-3.1-70b,tp=4.")
]
GpuOption = Annotated[
    str | None,
    typer.Option(*GPU_NAMES, help="GPU of plans that name none, or path of a gpu.toml.  [default: h100]"),
]

_WORDS: Final = ("dtype", "kv_dtype", "runtime", "method", "routing", "exchange")
_SPLIT: Final = ("pp", "cp", "dp", "ep", "moe_tp")
_NUMBERS: Final = ("tp", *_SPLIT, "num_slots", "max_tokens", "max_seqs")
_FLAGS: Final = ("wide_experts", "eplb", "two_batch_overlap")
_SAID: Final = (("experts", "wide"), ("num_slots", "slots"), ("two_batch_overlap", "two-batches"))
_UNNAMED: Final = ("bf16", DEFAULT_RUNTIME, "roofline")


def named_plans(
    texts: Sequence[str],
    gpu: str | None = None,
    tables: str | None = None,
    source: str | None = None,
    runtime: str = DEFAULT_RUNTIME,
) -> dict[str, StepPlan]:
    """Compile the plans of a command line, by name, in order."""
    from fastroof import compile_plan

    if not texts:
        raise PlanError("no plan was named: llama-3.1-70b,tp=4 is one")
    measured: dict[str | None, Any] = {}
    plans: dict[str, StepPlan] = {}
    for text in texts:
        model, name, of_gpu, options = _read(text)
        of_gpu = of_gpu or gpu
        if of_gpu not in measured:
            measured[of_gpu] = gpu_and_tables(of_gpu, tables, source)
        spec, of_tables = measured[of_gpu]
        plan = compile_plan(model, spec, of_tables, **{"runtime": runtime, **options})
        name = name or _name_of(plan)
        if name in plans:
            raise PlanError(f"two plans are called {name!r}: {text},name=... gives one of them another name")
        plans[name] = plan
    return plans


def plans_words(plans: Mapping[str, StepPlan]) -> str:
    """Say what plans are called, and whose runtime they have."""
    return ", ".join(f"{name} (runtime {plan.runtime})" for name, plan in plans.items())


def _read(text: str) -> tuple[str, str | None, str | None, dict[str, Any]]:
    model, *pairs = text.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not value or key not in ("name", "gpu", *_WORDS, *_NUMBERS, *_FLAGS):
            keys = ", ".join(("name", "gpu", *_NUMBERS, *_WORDS, *_FLAGS))
            raise PlanError(f"{text!r}: {pair!r} is not KEY=VALUE, where KEY is one of {keys}")
        if key in options:
            raise PlanError(f"{text!r} gives {key} twice")
        if key in _NUMBERS:
            if not value.isascii() or not value.isdigit():
                raise PlanError(f"{text!r}: {key} needs a whole number, got {value!r}")
            options[key] = int(value)
        elif key in _FLAGS:
            if value not in ("yes", "no"):
                raise PlanError(f"{text!r}: {key} is yes or no, got {value!r}")
            options[key] = value == "yes"
        else:
            options[key] = value
    if not model or "=" in model:
        raise PlanError(f"{text!r} starts with no model: llama-3.1-70b,tp=4 is a plan")
    return model, options.pop("name", None), options.pop("gpu", None), options


def _name_of(plan: StepPlan) -> str:
    """Call a plan after its model and what differs from the defaults."""
    parts = [plan.model.name]
    if plan.tp > 1:
        parts.append(f"tp{plan.tp}")
    layout = plan.layout
    sizes = {"pp": layout.pp, "cp": layout.cp, "dp": layout.dp, "ep": layout.ep}
    parts += [f"{size}{count}" for size, count in sizes.items() if count > 1]
    split = plan.describe()
    parts += [f"{word}{split[key] if key == 'num_slots' else ''}" for key, word in _SAID if key in split]
    parts += ["eplb"] if str(split.get("routing", "")).endswith("_eplb") else []
    if plan.kv_dtype != "bf16":
        parts.append(f"{plan.dtype}-kv-{plan.kv_dtype}")
    elif plan.dtype != "bf16":
        parts.append(plan.dtype)
    parts += [word for word in (plan.runtime, plan.method) if word not in _UNNAMED]
    return "-".join(parts)
