"""Runtime profiles: what a serving engine adds to the sum of its kernels, and the evidence for it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Final

from fastroof.errors import PlanError

__all__ = ["FP8_SCALES", "GEMM_SMOOTHINGS", "EngineProfile", "engine_names", "load_engine"]

GEMM_SMOOTHINGS: Final = ("none", "median3")
FP8_SCALES: Final = ("dynamic", "static")
_COSTS: Final = ("step_us", "sequence_us", "prefill_us", "prefill_floor_layer_us", "residual")


@dataclass(frozen=True)
class EngineProfile:
    """What an engine adds to a step: ``max(kernels + step + sequence x seqs, floor x layers)``.

    Attributes
    ----------
    name : str
        What the profile is called.
    step_us : float
        Added to every step, us: scheduling, input preparation, launching a CUDA graph.
    sequence_us : float
        Added for every sequence whose logits a step needs, us: sampling, detokenising, bookkeeping.
    prefill_us : float
        Added to a step that holds prefill, us.
    prefill_floor_layer_us : float
        A step that holds prefill takes at least this a layer, us: kernels that are launched one by one,
        without a CUDA graph, are not faster than the host.
    gemm_smoothing : str
        How small bf16 GEMMs are smoothed along m before they are summed: none or median3.
    fp8_scales : str
        Whether fp8 GEMMs find the scale of their input (dynamic) or know it (static).
    residual : float
        Relative standard error that is left on models which a fit has not seen; 0 where unknown.
    evidence : mapping
        What the constants were fitted on, by which command, and their confidence intervals.
    """

    name: str
    step_us: float = 0.0
    sequence_us: float = 0.0
    prefill_us: float = 0.0
    prefill_floor_layer_us: float = 0.0
    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"
    residual: float = 0.0
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse costs that are no costs, in profiles that were built or changed by hand too."""
        for key in _COSTS:
            value = getattr(self, key)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise PlanError(f"runtime {self.name!r}: {key} must be a number of at least 0, got {value!r}")
            object.__setattr__(self, key, float(value))
        for key, allowed in (("gemm_smoothing", GEMM_SMOOTHINGS), ("fp8_scales", FP8_SCALES)):
            if getattr(self, key) not in allowed:
                raise PlanError(
                    f"runtime {self.name!r}: {key} must be one of {', '.join(allowed)}, "
                    f"got {getattr(self, key)!r}"
                )

    @property
    def is_kernels(self) -> bool:
        """Whether nothing is added, nor any kernel changed: the pure sum."""
        return self == EngineProfile(self.name, residual=self.residual, evidence=self.evidence)


def engine_names() -> tuple[str, ...]:
    """Return the profiles that :func:`load_engine` knows, sorted; ``kernels`` is the pure sum."""
    folder = resources.files("fastroof.engines") / "profiles"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")))


def load_engine(given: EngineProfile | str | Path | Mapping[str, Any]) -> EngineProfile:
    """Load a runtime profile.

    Parameters
    ----------
    given : EngineProfile, str, Path or mapping
        A profile, the name of a packaged one, the path of a TOML file, or its contents.

    Returns
    -------
    EngineProfile
        Checked.

    Raises
    ------
    PlanError
        If there is no such profile, or it holds something else than a profile's keys.

    Examples
    --------
    >>> load_engine("kernels").step_us
    0.0
    """
    if isinstance(given, EngineProfile):
        return given
    if isinstance(given, Mapping):
        return _profile(dict(given), "the profile given")
    names = engine_names()
    if isinstance(given, str) and given in names:
        text = (resources.files("fastroof.engines") / "profiles" / f"{given}.toml").read_text("utf-8")
        return _profile(tomllib.loads(text), f"profile {given}")
    path = Path(given) if isinstance(given, str | Path) else None
    if path is None or path.suffix != ".toml":
        raise PlanError(f"runtime must be one of {', '.join(names)} or a .toml file, got {given!r}")
    try:
        return _profile({"name": path.stem, **tomllib.loads(path.read_text("utf-8"))}, str(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"cannot read the runtime profile {path}: {error}") from None


def _profile(content: dict[str, Any], where: str) -> EngineProfile:
    known = [f.name for f in fields(EngineProfile)]
    unknown = sorted(set(content) - set(known))
    if unknown or not isinstance(content.get("name"), str):
        wrong = f"does not know {', '.join(unknown)}" if unknown else "needs a name"
        raise PlanError(f"{where} {wrong}: a runtime profile has {', '.join(known)}")
    return EngineProfile(**content)
