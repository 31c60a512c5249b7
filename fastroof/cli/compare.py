"""``fastroof compare``: the methods side by side, and where they differ."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import measured_tables
from fastroof.cli.option_groups import TABLES, plan_options
from fastroof.cli.options import Json, Model
from fastroof.cli.output import counted, layout_suffix, print_json, print_line, print_table
from fastroof.cli.workload_options import parse_steps
from fastroof.command_group import GroupValues, taking
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.compat.compare_steps import ComparedStep, Comparison, Step

TITLES: Final = {
    "fastroof": "fastroof",
    "roofline_v2": "roofline V2",
    "infersim": "InferSim",
    "datasheet": "datasheet",
}
PARTS: Final = {
    "linear": "linear layers",
    "experts": "experts",
    "attention": "attention",
    "communication": "communication",
    "lm_head": "LM head",
    "elementwise": "elementwise",
    "memory": "memory bound",
    "overhead": "overhead",
}

EPILOG: Final = """\b
Examples:
  fastroof compare --model llama-2-7b --gpu h100 --decode 1x1024,32x4096 --prefill 2048
  fastroof compare --model llama-3.1-70b --tp 4 --decode 32x4096 --infersim-tree InferSim/bench_data
  fastroof compare --model qwen3-30b-a3b --dp 8 --ep 8 --dtype fp8_block --decode 32x4096

\b
JSON: model, gpu, tp, dp, ep, moe_tp, dtype (of the layers' GEMMs), engine (kernels: no engine's cost),
constants {method: {name: value}}, trees {method: source of its tables}, steps [phase (decode or prefill),
batch_size, tokens (kv_len of a decode, new tokens of a prefill), methods {method: total_us, components_us
{linear, experts, attention, communication, lm_head, elementwise, memory, overhead}, why_not (why it has no
answer, else null)}, differences [method, component, us, cause]]. Methods: fastroof,
roofline_v2, infersim, datasheet. Missing answers are null.
"""


@taking(
    plan=plan_options(only=("tp", "dp", "ep", "moe_tp", "dtype", "routing", "allow_modelled")),
    measured=TABLES,
)
def compare(
    *,
    model: Model,
    plan: GroupValues,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="BATCHxKV,...", help="Decode steps: 1x1024,32x4096; repeatable."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="NEW,...", help="Prefill steps of one prompt each: 2048,8192; repeatable."),
    ] = None,
    roofline_v2_tree: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Tables of roofline V2.  [default: fastroof's, converted]"),
    ] = None,
    infersim_tree: Annotated[
        str | None, typer.Option(metavar="PATH", help="Tables of InferSim.  [default: fastroof's, converted]")
    ] = None,
    measured: GroupValues,
    as_json: Json = False,
) -> None:
    """Compare fastroof with other methods, component by component."""
    from fastroof.compat.compare import compare as compare_methods

    decodes, prefills = parse_steps(decode or (), prefill or ())
    spec, tables = measured_tables(**measured)
    comparison = compare_methods(
        model,
        spec,
        decode=decodes,
        prefill=prefills,
        tables=tables,
        **plan,
        roofline_v2_root=roofline_v2_tree,
        infersim_root=infersim_tree,
    )
    if as_json:
        print_json(_document(comparison))
    else:
        _print(comparison)


def _document(comparison: Comparison) -> dict[str, Any]:
    return {
        "model": comparison.model,
        "gpu": comparison.gpu,
        **{size: getattr(comparison.layout, size) for size in ("tp", "dp", "ep", "moe_tp")},
        **{name: getattr(comparison, name) for name in ("dtype", "engine", "constants", "trees")},
        "steps": [_step_document(compared) for compared in comparison.steps],
    }


def _step_document(compared: ComparedStep) -> dict[str, Any]:
    methods = {
        time.method: {
            "total_us": time.total_us,
            "components_us": None if time.why_not else dict(time.components_us),
            "why_not": time.why_not or None,
        }
        for time in compared.times
    }
    differences = [asdict(one) for one in compared.differences]
    return {**asdict(compared.step), "methods": methods, "differences": differences}


def _print(comparison: Comparison) -> None:
    layout = comparison.layout
    where = f"{layout.world_size} x {comparison.gpu}{layout_suffix(layout)}"
    print_line(f"{comparison.model} on {where}, {comparison.dtype}, engine {comparison.engine}")
    for method, constants in comparison.constants.items():
        if method == "datasheet":  # two a class of kernels: in --json
            continue
        listed = ", ".join(f"{name} {value:g}" for name, value in constants.items())
        print_line(f"{TITLES[method]}: tables: {comparison.trees[method]}; {listed}")
    for compared in comparison.steps:
        print_line(f"\n{_words(compared.step)}, ms\n")
        _print_step(compared)


def _words(step: Step) -> str:
    if step.phase == "decode":
        return f"{counted(step.batch_size, 'decode')} at kv_len {step.tokens}"
    return f"{counted(step.batch_size, 'prefill')} of {counted(step.tokens, 'token')}"


def _print_step(compared: ComparedStep) -> None:
    timed = [time for time in compared.times if not time.why_not]
    rows = [
        (words, *(f"{time.components_us[name] / US_PER_MS:,.3f}" for time in timed))
        for name, words in PARTS.items()
        if any(time.components_us[name] for time in timed)
    ]
    own_us = compared.time("fastroof").total_us
    rows.append(("total", *(f"{time.total_us / US_PER_MS:,.3f}" for time in timed)))
    rows.append(("against fastroof", *(f"{time.total_us / own_us - 1.0:+.1%}" for time in timed)))
    print_table(("component", *(TITLES[time.method] for time in timed)), rows, left=("component",))
    for time in compared.times:
        if time.why_not:
            print_line(f"{TITLES[time.method]} has no answer: {time.why_not}")
    method = ""
    for d in compared.differences:
        if d.method != method:
            print_line(f"\n{TITLES[d.method]} differs by more than 10 % in")
            method = d.method
        print_line(f"  {PARTS[d.component]}: {d.us / US_PER_MS:+,.3f} ms  {d.cause}")
