"""The page's answer to what to run: that of ``fastroof best`` for the view's GPUs and limits."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fastroof.models.layout import copies_words
from fastroof.sweep import recommend
from fastroof.sweep.recommendations.candidates import default_limits_words
from fastroof.ui.commands import number_written

if TYPE_CHECKING:
    from fastroof.engines.launch import Command
    from fastroof.sweep import Deployment
    from fastroof.sweep.answers import Answer, Choice
    from fastroof.ui.plans import PlanStore
    from fastroof.ui.view import View


def deployment_question_of(store: PlanStore, view: View) -> dict[str, Any]:
    """Return the view as arguments of :func:`fastroof.recommend`, without those at their defaults."""
    question: dict[str, Any] = {
        "total_gpus": view.gpus,
        "isl": view.isl,
        "osl": view.osl,
        "ttft_ms": view.ttft_ms,
        "tpot_ms": view.tpot_ms,
        "engine": view.engine,
        "max_num_batched_tokens": view.max_num_batched_tokens,
        "front_end": view.front_end,
        "lora": view.lora,
    }
    for name in ("dtype", "kv_dtype"):
        if getattr(view, name) != "auto":
            question[name] = getattr(view, name)
    if view.allow_modelled:
        question["allow_modelled"] = True
    if store.measured(view.gpu).where is None:
        question["tables"] = "datasheet"
    return {name: value for name, value in question.items() if value is not None}


def deployment_command(store: PlanStore, view: View) -> str:
    """Return the command that gives the answer."""
    names = {"total_gpus": "gpus", "ttft_ms": "ttft", "tpot_ms": "tpot"}
    words = ["fastroof", "best", "--model", store.written_model(view.model)]
    words += ["--gpu", store.written_gpu(view.gpu)]
    for name, value in deployment_question_of(store, view).items():
        words.append(f"--{names.get(name, name).replace('_', '-')}")
        if value is not True:
            words.append(value if isinstance(value, str) else number_written(value))
    if view.percentile != 99:
        words += ["--percentile", str(view.percentile)]
    return shlex.join(words)


def deployment_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Return the best deployment on the view's GPUs within its limits, the runners-up, and its commands."""
    found = recommend(
        store.written_model(view.model),
        store.written_gpu(view.gpu),
        **deployment_question_of(store, view),
        percentile=float(view.percentile),
    )
    (answer,), (deployment,) = found.answers.answers, found.deployments
    commands = {} if deployment is None else deployment.commands
    return {
        "limits_on": answer.limits_on,
        "why_mean": answer.why_mean,
        "default_limits": default_limits_words(answer.default_limits),
        "gpus": view.gpus,
        "choices": [_choice(choice) for choice in answer.choices],
        "nearest": _nearest(answer),
        "families": [
            {"family": one.family, "gain": one.gain, "layout": one.choice and copies_words(one.choice.row)}
            for one in answer.families
        ],
        "configurations": found.answers.configurations,
        "simulated": answer.simulated,
        "servers": {role: _with_release(deployment, role, command) for role, command in commands.items()},
        "command": deployment_command(store, view),
    }


def _with_release(deployment: Deployment | None, role: str, command: Command) -> str:
    engine = None if deployment is None else deployment.engine
    if engine is None:
        return command.shell()
    release = engine.router_name if role == "router" else f"{engine.title} {engine.release}"
    return f"# {release}\n{command.shell()}"


def _choice(choice: Choice) -> dict[str, Any]:
    row, most = choice.row, choice.percentile
    names = "clients", "requests_per_s", "tokens_per_s_per_gpu", "max_num_seqs", "max_num_batched_tokens"
    return {
        "layout": copies_words(row),
        **{name: row[name] for name in names},
        **{name: getattr(choice, name) for name in ("behind", "is_tie")},
        "why_not": "" if most is None else most.why_not,
        "sampling_error": None if most is None else most.sampling_error,
        "margins": [margin._asdict() for margin in choice.margins],
    }


def _nearest(answer: Answer) -> dict[str, Any] | None:
    if answer.nearest is None:
        return None
    found = answer.nearest._asdict()
    return {"layout": copies_words(found.pop("row")), **found}
