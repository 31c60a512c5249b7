"""All kinds of sweep, and which of them a spec describes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from fastroof.documents import parse_table
from fastroof.errors import SweepError
from fastroof.sweep.capacities import CapacitySpec, CapacitySummary, CapacitySweep
from fastroof.sweep.deployments import DeploymentSpec, DeploymentSummary, DeploymentSweep
from fastroof.sweep.spec import read_values, validated
from fastroof.sweep.steps import StepSpec, StepSummary, StepSweep

Spec = StepSpec | DeploymentSpec | CapacitySpec
"""Spec of any kind of sweep."""

Summary = StepSummary | DeploymentSummary | CapacitySummary
"""Summary of any kind of sweep."""

_ADDED: Final = ("constraints", "workload", "slo")
"""Tables of a spec that changes are merged into."""


def load_spec(
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Spec:
    """Load and validate a sweep spec.

    Parameters
    ----------
    spec : StepSpec, DeploymentSpec, CapacitySpec, mapping, str, Path or None
        A spec, its keys and values, or the path of a TOML file with them. None is the packaged spec.
        In a file, a gpu, tables, engine, model or trace that starts with ``./`` or ``../`` is relative to the
        file's folder. With ``slo`` it is a sweep over capacities, with ``isl`` one over deployments,
        otherwise one over steps.
    changes : mapping, optional
        Keys and values that replace the spec's; constraints, a workload and an slo are merged into
        the spec's.

    Returns
    -------
    StepSpec, DeploymentSpec or CapacitySpec
        With ranges expanded.

    Raises
    ------
    SweepError
        Naming every wrong key, its value and the valid values.

    Examples
    --------
    >>> load_spec({"models": ["llama-3.1-8b"], "batch_size": [1, 64], "kv_len": 4096}).tp
    (1,)
    >>> load_spec({"models": ["llama-3.1-8b"], "isl": 4000, "osl": 500, "clients": [1, 64]}).mode
    ('aggregated',)
    """
    if isinstance(spec, Spec):
        if not changes:
            return spec
        # the defaults of keep and k depend on other keys
        spec = spec.model_dump(exclude={"keep", "k"} - spec.model_fields_set)
    if spec is None:
        text = (resources.files("fastroof.sweep.steps") / "default.toml").read_text(encoding="utf-8")
        top = parse_table(text, "packaged spec", SweepError)
    else:
        top = read_values(spec)
    top.data = values = dict(top.data)
    for key, value in (changes or {}).items():
        both = isinstance(value, Mapping) and isinstance(values.get(key), Mapping) and key in _ADDED
        values[key] = {**values[key], **value} if both else value
    kind: type[Spec] = DeploymentSpec if "isl" in values else StepSpec
    if "slo" in values or "workload" in values:
        kind = CapacitySpec
    return validated(kind, top, changes or ())


def load_deployment_spec(
    spec: Spec | Mapping[str, Any] | str | Path, changes: Mapping[str, Any] | None = None
) -> DeploymentSpec:
    """Load a spec as :func:`load_spec` does; reject one that is not of deployments."""
    loaded = load_spec(spec, changes)
    if not isinstance(loaded, DeploymentSpec):
        raise SweepError("the spec is not a deployment spec, which has isl, osl and clients")
    return loaded


def sweep_of(spec: Spec) -> StepSweep | DeploymentSweep | CapacitySweep:
    """Return the sweep of a spec, which implements :class:`fastroof.sweep.kind.SweepKind`."""
    if isinstance(spec, CapacitySpec):
        return CapacitySweep(spec)
    return DeploymentSweep(spec) if isinstance(spec, DeploymentSpec) else StepSweep(spec)
