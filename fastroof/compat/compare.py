"""Comparing steps timed by fastroof, roofline V2, InferSim and the datasheet model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from fastroof.checks import shown, whole_number
from fastroof.compat import infersim, roofline_v2
from fastroof.compat.compare_infersim import constants_of, hf_config, infersim_time
from fastroof.compat.compare_roofline_v2 import (
    infersim_tree,
    roofline_v2_time,
    roofline_v2_tree,
)
from fastroof.compat.compare_steps import (
    INFERSIM_DTYPES,
    Case,
    ComparedModel,
    ComparedStep,
    Comparison,
    MethodTime,
    Step,
    differences,
    gemm_dtype,
    is_fp8,
    modelled_components,
    obstacles,
    plan_time,
)
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import BatchError, FastroofError, MissingTableError, TableError
from fastroof.models import ModelSpec, load_model
from fastroof.plan import compile_plan
from fastroof.plan.curves import CLASSES
from fastroof.tables import Tables, load_tables
from fastroof.units import DTYPE_BYTES, TB, TFLOP

BANDWIDTH_FACTOR: Final = 0.82
LAYER_OVERHEAD_US: Final = 100.0
MIN_MAX_TOKENS: Final = 8192
MIN_MAX_SEQS: Final = 1024
LARGEST: Final = 2**22


def compare(
    model: ModelSpec | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Path | Mapping[str, Any],
    *,
    decode: Iterable[tuple[int, int]] = (),
    prefill: Iterable[int] = (),
    tables: Tables | None = None,
    roofline_v2_root: str | Path | None = None,
    infersim_root: str | Path | None = None,
    **plan_options: Any,
) -> Comparison:
    """Time steps with every method, by component, with the causes of their differences.

    ``plan_options`` are the layout, dtype, routing and allow_modelled of :func:`fastroof.compile_plan`.
    """
    steps = _steps(decode, prefill)
    roots = {"roofline_v2_root": roofline_v2_root, "infersim_root": infersim_root}
    for name, root in roots.items():
        if not isinstance(root, str | Path | None):
            raise TableError(f"{name} must be the path of a tree, got {shown(root)}")
    model = model if isinstance(model, ModelSpec) else load_model(model)
    spec = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    if tables is None:
        tables = load_tables(spec.name if isinstance(gpu, GpuSpec | Mapping) else gpu)
    case = compare_case(model, spec, tables, steps, **roots, **plan_options)
    constants = {
        "fastroof": {"bf16 TFLOP/s": spec.peak("bf16") / TFLOP}
        | ({"fp8 TFLOP/s": spec.peak("fp8") / TFLOP} if is_fp8(case.dtype) else {})
        | {"memory TB/s": spec.hbm_bytes_per_s / TB},
        "roofline_v2": {name: float(value) for name, value in case.hardware.items()},
        "infersim": asdict(case.infersim.gpus[spec.name]),
        "datasheet": {f"{name} efficiency": kind.efficiency for name, kind in CLASSES.items()}
        | {f"{name} launch us": kind.launch_us for name, kind in CLASSES.items()},
    }
    measured = f"measured tables of {spec.name}"
    modelled = modelled_components(case.plan, steps[0])
    trees = {
        "fastroof": measured + (f"; modelled, in part or whole: {', '.join(modelled)}" if modelled else ""),
        "roofline_v2": "none" if case.roofline_v2 is None else _place(measured, "bf16", roofline_v2_root),
        "infersim": _place(measured, case.dtype, infersim_root),
        "datasheet": "none",
    }
    compared = tuple(_compared(case, step) for step in steps)
    return Comparison(
        model.name, spec.name, case.layout, case.dtype, case.plan.engine, constants, trees, compared
    )


def compare_case(
    model: ModelSpec,
    gpu: GpuSpec,
    tables: Tables,
    steps: tuple[Step, ...],
    *,
    roofline_v2_root: str | Path | None = None,
    infersim_root: str | Path | None = None,
    **plan_options: Any,
) -> Case:
    """Return the plans, trees and configs with which all methods time steps; arguments as in compare."""
    sizes = ComparedModel.of(model)
    max_num_batched_tokens = max(MIN_MAX_TOKENS, *(step.new_tokens for step in steps))
    max_num_seqs = max(MIN_MAX_SEQS, *(step.batch_size for step in steps))
    fixed: dict[str, Any] = {"engine": "kernels", "kv_dtype": "bf16"}
    fixed |= {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    plan = compile_plan(model, gpu, tables, **fixed, **plan_options)
    dtype = gemm_dtype(plan)
    with warnings.catch_warnings():
        # labelled separately, so that it is not confused with the measured one
        warnings.simplefilter("ignore", UserWarning)
        datasheet = compile_plan(model, gpu, None, **fixed, **plan_options)
    why_not = obstacles(sizes, plan.layout, dtype)
    infersim_tables = _infersim_tables(
        tables, gpu, infersim_root, sizes, dtype if dtype in INFERSIM_DTYPES else "bf16"
    )
    return Case(
        plan=plan,
        datasheet=datasheet,
        model=sizes,
        dtype=dtype,
        infersim=infersim_tables,
        roofline_v2=None if why_not["roofline_v2"] else _roofline_v2_tables(tables, gpu, roofline_v2_root),
        model_config={
            "num_hidden_layers": sizes.num_layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.num_q_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "intermediate_size": sizes.intermediate,
            "bytes_per_param": DTYPE_BYTES["bf16"],
        },
        hardware={
            "TFlopsPeak": gpu.peak("bf16") / TFLOP,
            "BwPeakTBs": gpu.hbm_bytes_per_s / TB,
            "bwEfficiencyFactor": BANDWIDTH_FACTOR,
            "perLayerOverhead": LAYER_OVERHEAD_US,
        },
        hf_config=hf_config(model),
        why_not=why_not,
    )


def _place(own: str, dtype: str, root: str | Path | None) -> str:
    return f"{own}, {dtype} rows, in its form" if root is None else str(root)


def _roofline_v2_tables(
    tables: Tables, gpu: GpuSpec, root: str | Path | None
) -> roofline_v2.RooflineV2Tables:
    if root is None:
        return roofline_v2_tree(tables)
    folder = Path(root)
    named = any((folder / part / "gemm" / gpu.name).is_dir() for part in ("", "bench_data"))
    return roofline_v2.load(folder, gpu=gpu.name if named else None)


def _infersim_tables(
    tables: Tables, gpu: GpuSpec, root: str | Path | None, model: ComparedModel, dtype: str
) -> infersim.InfersimTables:
    constants = constants_of(gpu)
    if root is None:
        return infersim_tree(tables, constants, dtype=dtype, model=model)
    folder = Path(root)
    if (folder / "bench_data").is_dir():
        folder = folder / "bench_data"
    loaded = infersim.load(folder, {gpu.name: constants})
    if not any(gpu.name in Path(name).parts for name in loaded.files):
        raise MissingTableError(f"{folder} has no file of gpu {gpu.name}, such as gemm/{gpu.name}/data.csv")
    return loaded


def _compared(case: Case, step: Step) -> ComparedStep:
    own = plan_time("fastroof", case.plan, step)
    timed: dict[str, Callable[[], MethodTime]] = {
        "roofline_v2": partial(roofline_v2_time, case, step),
        "infersim": partial(infersim_time, case, step),
        "datasheet": partial(plan_time, "datasheet", case.datasheet, step),
    }
    times, found = [own], []
    for method, time_step in timed.items():
        why_not = case.why_not.get(method, "")
        try:
            time = MethodTime(method, {}, float("nan"), why_not) if why_not else time_step()
        except FastroofError as error:
            time = MethodTime(method, {}, float("nan"), str(error))
        times.append(time)
        if not time.why_not:
            found += differences(own, time)
    return ComparedStep(step, tuple(times), tuple(found))


def _steps(decode: Iterable[tuple[int, int]], prefill: Iterable[int]) -> tuple[Step, ...]:
    steps = []
    for pair in _listed("decode", decode):
        try:
            batch_size, kv_len = pair
        except (TypeError, ValueError):
            raise BatchError(f"decode must hold pairs of (batch_size, kv_len), got {shown(pair)}") from None
        steps.append(Step("decode", _size("batch_size", batch_size, 1), _size("kv_len", kv_len, 2)))
    steps += [Step("prefill", 1, _size("prefill", tokens, 1)) for tokens in _listed("prefill", prefill)]
    if not steps:
        raise BatchError("nothing to compare; give decode=[(32, 4096)], prefill=[2048], or both")
    return tuple(steps)


def _listed(name: str, value: Any) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise BatchError(f"{name} must be a list of steps, got {shown(value)}") from None


def _size(name: str, value: Any, least: int) -> int:
    return whole_number(name, value, least, LARGEST, BatchError)
