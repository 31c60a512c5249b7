"""Plans named on a command line: ``llama-3.1-70b,tp=4,dtype=fp8``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.acceptance import MTP, parse_accepted
from fastroof.checks import unknown_word
from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.options import GPU_NAMES, Source, TablesPath, option
from fastroof.command_group import Group, GroupValues
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.errors import BatchError, PlanError
from fastroof.plan.options import OPTIONS

if TYPE_CHECKING:
    from fastroof import SpeculativeDecoding, StepPlan

PLANS_HELP: Final = f"""\b
A plan is MODEL[,KEY=VALUE...]: a preset or the path of a config.json, then name, gpu or options of
`fastroof step`, as tp=4, dtype=fp8, engine=sglang or eplb=yes, and max_num_batched_tokens and max_num_seqs.
The default name is the model and the options that are not defaults, as llama-3.1-70b-tp4-fp8; the
default engine is {DEFAULT_ENGINE}.
"""

PlansArgument = Annotated[
    list[str], typer.Argument(metavar="PLAN...", help="MODEL[,KEY=VALUE...], such as llama-3.1-70b,tp=4.")
]
PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="MODEL[,KEY=VALUE...], such as llama-3.1-70b,tp=4.")
]
GpuOption = Annotated[
    str | None,
    typer.Option(*GPU_NAMES, help="GPU of plans without gpu=, or path of a gpu.toml.  [default: h100]"),
]

PLAN_TABLES: Final[Group] = {"gpu": (GpuOption, None), "tables": (TablesPath, None), "source": (Source, None)}
"""The GPU and tables of named plans, as arguments of :func:`named_plans`."""

_SPLITS: Final = (("experts", "wide"), ("num_slots", "slots"), ("two_batch_overlap", "two-batches"))
_UNNAMED: Final = ("bf16", DEFAULT_ENGINE, "roofline")


def named_plans(
    texts: Sequence[str],
    gpu: str | None = None,
    tables: str | None = None,
    source: str | None = None,
    engine: str = DEFAULT_ENGINE,
) -> dict[str, StepPlan]:
    """Compile the plans of a command line, by name, in order."""
    from fastroof import compile_plan

    if not texts:
        raise PlanError("no plan given; llama-3.1-70b,tp=4 is one")
    measured: dict[str | None, Any] = {}
    plans: dict[str, StepPlan] = {}
    for text in texts:
        model, name, of_gpu, options = read_plan(text)
        of_gpu = of_gpu or gpu
        if of_gpu not in measured:
            measured[of_gpu] = gpu_and_tables(of_gpu, tables, source)
        spec, of_tables = measured[of_gpu]
        plan = compile_plan(model, spec, of_tables, **{"engine": engine, **options})
        name = name or _name_of(plan)
        if name in plans:
            raise PlanError(f"two plans are named {name!r}; give one another name: {text},name=...")
        plans[name] = plan
    return plans


def plans_words(plans: Mapping[str, StepPlan]) -> str:
    """List plans with their engines."""
    return ", ".join(f"{name} (engine {plan.engine})" for name, plan in plans.items())


def read_plan(text: str) -> tuple[str, str | None, str | None, dict[str, Any]]:
    """Read MODEL[,KEY=VALUE,...]: the model, its name, GPU and other options."""
    model, *pairs = text.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        word, equals, value = pair.partition("=")
        word = word.strip().replace("-", "_")
        if not equals or not value:
            raise PlanError(f"{text!r}: {pair!r} is not KEY=VALUE")
        if word not in (known := ("name", "gpu", *OPTIONS)):
            raise PlanError(f"{text!r}: {unknown_word('key', word, known, 'fastroof step --help')}")
        if word in options:
            raise PlanError(f"{text!r} gives {word} twice")
        is_text = word in ("name", "gpu", "engine")
        options[word] = value if is_text else _value(text, word, OPTIONS[word], value)
    if not model or "=" in model:
        raise PlanError(f"{text!r} does not start with a model; llama-3.1-70b,tp=4 is a plan")
    return model, options.pop("name", None), options.pop("gpu", None), options


def _value(text: str, word: str, field: Field[Any], value: str) -> Any:
    kind = str(field.type)
    if kind.startswith("int"):
        if not value.isascii() or not value.isdigit():
            raise PlanError(f"{text!r}: {word} needs a whole number, got {value!r}")
        return int(value)
    if kind.startswith("bool"):
        if value not in ("yes", "no"):
            raise PlanError(f"{text!r}: {word} is yes or no, got {value!r}")
        return value == "yes"
    if kind.startswith("float"):
        try:
            return float(value)
        except ValueError:
            raise PlanError(f"{text!r}: {word} needs a number, got {value!r}") from None
    return value


def _name_of(plan: StepPlan) -> str:
    """Name a plan by its model and the options that are not defaults."""
    parts = [plan.model.name]
    if plan.tp > 1:
        parts.append(f"tp{plan.tp}")
    layout = plan.layout
    sizes = {"pp": layout.pp, "cp": layout.cp, "dp": layout.dp, "ep": layout.ep}
    parts += [f"{size}{count}" for size, count in sizes.items() if count > 1]
    split = plan.describe()
    parts += [f"{word}{split[key] if key == 'num_slots' else ''}" for key, word in _SPLITS if key in split]
    parts += ["eplb"] if str(split.get("routing", "")).endswith("_eplb") else []
    if plan.kv_dtype != "bf16":
        parts.append(f"{plan.dtype}-kv-{plan.kv_dtype}")
    elif plan.dtype != "bf16":
        parts.append(plan.dtype)
    parts += [word for word in (plan.engine, plan.method) if word not in _UNNAMED]
    return "-".join(parts)


DRAFTS: Final[Group] = {
    "num_draft_tokens": option(int, "Draft tokens per request and step.", "TOKENS", min=1),
    "accepted": option(
        str,
        "Mean tokens that a step produces per request, rates by position (0.8,0.5), or auto: as measured for "
        "the model.",
        "TOKENS",
    ),
    "draft": option(
        str, "Draft model: mtp, or MODEL[,tp=1,dtype=bf16].  [default: drafts take no time]", "PLAN"
    ),
}
"""Speculative decoding."""

SPECULATION: Final[Group] = {
    **DRAFTS,
    "prefix_hit": option(float, "Share of a prompt in the prefix cache.", "SHARE"),
}
"""Speculative decoding and prefix cache."""


def asked_speculation(
    model: str, given: GroupValues, measured: GroupValues, engine: str, **options: Any
) -> SpeculativeDecoding | None:
    """Read the options of speculative decoding of a model."""
    num_draft_tokens, accepted, draft = (given[name] for name in ("num_draft_tokens", "accepted", "draft"))
    if num_draft_tokens is None:
        spare = [name for name, value in (("--accepted", accepted), ("--draft", draft)) if value is not None]
        if spare:
            raise BatchError(f"{' and '.join(spare)} needs --num-draft-tokens")
        return None
    if accepted is None:
        raise BatchError("--num-draft-tokens needs --accepted, the mean tokens that a step produces, or auto")
    from fastroof import SpeculativeDecoding

    drafter: StepPlan | str | None = draft
    if draft is not None and draft != MTP:
        given_names = {part.partition("=")[0] for part in draft.split(",")[1:]}
        others = [f"{name}={value}" for name, value in options.items() if name not in given_names]
        (drafter,) = named_plans([",".join([draft, *others])], **measured, engine=engine).values()
    length = parse_accepted("--accepted", accepted)
    return SpeculativeDecoding(num_draft_tokens, length, drafter).for_model(model)


def speculation_of(
    plan: StepPlan, given: GroupValues, measured: GroupValues, engine: str
) -> SpeculativeDecoding | None:
    """Read the options of speculative decoding of a plan, which a draft's sizes follow."""
    return asked_speculation(
        plan.model.name, given, measured, engine, tp=plan.tp, kv_dtype=plan.kv_dtype,
        max_num_batched_tokens=plan.max_num_batched_tokens, max_num_seqs=plan.max_num_seqs,
    )  # fmt: skip


def drafts_said(drafts: SpeculativeDecoding | None) -> dict[str, Any]:
    """Return the keys of an answer that say which drafts it assumes; none without drafts."""
    return {} if drafts is None else drafts.facts


def drafts_words(facts: Mapping[str, Any]) -> str:
    """Return the drafts of :func:`drafts_said`, or of a row of a sweep, in words that follow a plan's."""
    if not facts.get("num_draft_tokens"):
        return ""
    source = f" ({facts['accepted_from']})" if "accepted_from" in facts else ""
    drafts = f"{facts['num_draft_tokens']} draft tokens ({facts['draft']})"
    return f", {drafts}, {facts['accepted']:g} tokens a step{source}"
