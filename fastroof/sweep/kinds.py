"""The kinds of sweep that there are, and which of them a spec asks for."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fastroof.sweep.deployments import DeploymentSpec, DeploymentSweep
from fastroof.sweep.spec_values import read_values, validated
from fastroof.sweep.steps import StepSpec, StepSweep
from fastroof.sweep.units import WorkUnit

__all__ = ["load_spec", "sweep_of", "work_units"]


def load_spec(
    spec: StepSpec | DeploymentSpec | Mapping[str, Any] | str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> StepSpec | DeploymentSpec:
    """Load what to sweep, and check it whole.

    Parameters
    ----------
    spec : StepSpec, DeploymentSpec, mapping, str, Path or None
        A spec, its keys and values, or the path of a TOML file with them. None is the packaged spec.
        In a file, a gpu, tables, runtime or model that starts with ``./`` or ``../`` lies beside the file.
        With ``isl`` it is a sweep over deployments, otherwise one over steps.
    changes : mapping, optional
        Keys and values that take the place of the spec's; constraints are added to the spec's.

    Returns
    -------
    StepSpec or DeploymentSpec
        With ranges expanded.

    Raises
    ------
    SweepError
        Naming every wrong key, what was given and what would do.

    Examples
    --------
    >>> load_spec({"models": ["llama-3.1-8b"], "batch_size": [1, 64], "kv_len": 4096}).tp
    (1,)
    >>> load_spec({"models": ["llama-3.1-8b"], "isl": 4000, "osl": 500, "concurrency": [1, 64]}).mode
    ('aggregated',)
    """
    if isinstance(spec, StepSpec | DeploymentSpec):
        if not changes:
            return spec
        spec = spec.model_dump()
    if spec is None:
        text = (resources.files("fastroof.sweep.steps") / "default.toml").read_text(encoding="utf-8")
        values: dict[Any, Any] = tomllib.loads(text)
        where = "packaged spec"
    else:
        values, where = read_values(spec)
    for key, value in (changes or {}).items():
        both = isinstance(value, Mapping) and isinstance(values.get(key), Mapping) and key == "constraints"
        values[key] = {**values[key], **value} if both else value
    if "isl" in values:
        return validated(DeploymentSpec, values, where)
    return validated(StepSpec, values, where)


def sweep_of(spec: StepSpec | DeploymentSpec) -> StepSweep | DeploymentSweep:
    """Take a spec as a sweep of its kind, which keeps :class:`fastroof.sweep.kind.SweepKind`."""
    return DeploymentSweep(spec) if isinstance(spec, DeploymentSpec) else StepSweep(spec)


def work_units(spec: StepSpec | DeploymentSpec) -> list[WorkUnit]:
    """Cut a sweep into units, always the same ones.

    Parameters
    ----------
    spec : StepSpec or DeploymentSpec
        What to sweep.

    Returns
    -------
    list of WorkUnit
        In the order of the rows: models, GPUs, modes, tp, dtypes, kv_dtypes, runtimes. Plans that cannot
        be compiled have units too, which count what is lost.

    Examples
    --------
    >>> from fastroof.sweep import load_spec, work_units
    >>> spec = {"models": ["llama-3.1-8b"], "tp": [1, 2], "isl": 1000, "osl": 100, "concurrency": [1, 8]}
    >>> [(unit.plan.tp, unit.start, unit.stop) for unit in work_units(load_spec(spec))]
    [(1, 0, 2), (2, 0, 2)]
    """
    return sweep_of(spec).units()
