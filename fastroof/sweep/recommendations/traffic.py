"""Specifications of GPUs that several models share, and of the traffic of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.checks import is_number, shown, whole_number
from fastroof.documents import read_toml
from fastroof.errors import SweepError
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.recommendations.candidates import MOST_GPUS, default_limits
from fastroof.sweep.recommendations.recommend import (
    MOST_GPUS_TRIED,
    QuestionOptions,
    deployment_question,
    with_default_limits,
)
from fastroof.sweep.spec import read_values

TRAFFIC: Final = "traffic"
"""Key of a specification that lists the traffic of each model."""

LEAST_RATE: Final = 1e-6
MOST_RATE: Final = 1e6

_MUST: Final = ("model", "isl", "osl", "requests_per_s")
_OPTIONS: Final = tuple(name for name in QuestionOptions.__annotations__ if name != "objective")
_EXAMPLE: Final = "{model = 'llama-3.1-8b', isl = 1000, osl = 200, requests_per_s = 4}"


class Traffic(NamedTuple):
    """Requests for one model, and its limits.

    Attributes
    ----------
    model : str
        Preset, Hugging Face id of one, or path of a config.json.
    isl, osl : int
        Tokens per prompt and per output.
    requests_per_s : float
        Wanted rate, requests/s.
    options : dict of str to object
        Limits and choices, as in :func:`fastroof.sweep.deployment_question`.
    default_limits : mapping of str to float
        Limits in ``options`` that the question did not give, ms.
    """

    model: str
    isl: int
    osl: int
    requests_per_s: float
    options: dict[str, Any]
    default_limits: Mapping[str, float] = {}


class SharedSpec(NamedTuple):
    """GPUs of one kind (None: as few as suffice), and the traffic of each model that shares them."""

    gpu: str
    total_gpus: int | None
    traffic: tuple[Traffic, ...]

    def question(self, traffic: Traffic, gpus: int) -> DeploymentSpec:
        """Return the deployments to compare for one of the models on some of the GPUs."""
        return deployment_question(
            traffic.model, self.gpu, total_gpus=gpus, isl=traffic.isl, osl=traffic.osl, **traffic.options
        )

    def limited(self, traffic: Traffic) -> Traffic:
        """Return the traffic with the limits that it lacks, the same on any number of GPUs."""
        given = [name for name, value in traffic.options.items() if value is not None]
        if not default_limits(given, 0.0):
            return traffic
        # with a prompt on the fewest GPUs that hold the model
        for gpus in (2**power for power in range(MOST_GPUS_TRIED.bit_length())):
            _, limits = with_default_limits(self.question(traffic, gpus), traffic.options)
            if limits:
                return traffic._replace(options=traffic.options | limits, default_limits=limits)
        return traffic


def is_shared_spec(path: str | Path) -> bool:
    """Return whether a TOML file is a specification of :func:`fastroof.recommend_shared`.

    Parameters
    ----------
    path : str or Path
        Path of the file.

    Returns
    -------
    bool
        Whether it has ``traffic``.

    Raises
    ------
    SweepError
        If the file cannot be read as TOML.
    """
    return TRAFFIC in read_toml(Path(path), SweepError)


def load_shared_spec(
    spec: Mapping[str, Any] | str | Path, changes: Mapping[str, Any] | None = None
) -> SharedSpec:
    """Load and check a specification; keys of a traffic outside of its table are for all models.

    ``changes`` replace options of all models.
    """
    top = read_values(spec)
    if isinstance(spec, Mapping):
        top.where = "shared GPUs"
    top.allow(("gpu", "total_gpus", TRAFFIC, *_MUST[1:], *_OPTIONS))
    values, where = dict(top.data), top.where
    tables, gpu = values.pop(TRAFFIC, None), values.pop("gpu", "h100")
    total_gpus = values.pop("total_gpus", None)
    if total_gpus is not None:
        total_gpus = whole_number(f"{where}: total_gpus", total_gpus, most=MOST_GPUS, error=SweepError)
    if not isinstance(gpu, str | Path):
        raise SweepError(f"{where}: gpu: got {shown(gpu)}, need one name of a GPU, or the path of a gpu.toml")
    if not isinstance(tables, list | tuple) or not tables:
        raise SweepError(f"{where}: {TRAFFIC}: got {shown(tables)}, need a list of tables like {_EXAMPLE}")
    traffics = []
    for number, table in enumerate(top.tables(TRAFFIC), start=1):
        table.allow((*_MUST, *_OPTIONS))
        traffics.append(_traffic({**values, **table.data, **(changes or {})}, f"{where}: {TRAFFIC} {number}"))
    loaded = SharedSpec(str(gpu), total_gpus, tuple(traffics))
    for number, traffic in enumerate(traffics, start=1):
        try:
            loaded.question(traffic, total_gpus or 1)
        except SweepError as error:
            text = str(error).removeprefix("sweep spec: ")
            raise SweepError(f"{where}: {TRAFFIC} {number}: {text}") from None
    return loaded


def _traffic(values: dict[str, Any], place: str) -> Traffic:
    missing = [name for name in _MUST if name not in values]
    if missing:
        raise SweepError(f"{place}: {', '.join(missing)} missing, as in {_EXAMPLE}")
    model, isl, osl, rate = (values.pop(name) for name in _MUST)
    if not isinstance(model, str | Path):
        raise SweepError(f"{place}: model: got {shown(model)}, need a name, or the path of a config.json")
    for name, tokens in (("isl", isl), ("osl", osl)):
        whole_number(f"{place}: {name}", tokens, error=SweepError)
    if not is_number(rate) or not LEAST_RATE <= rate <= MOST_RATE:
        raise SweepError(
            f"{place}: requests_per_s must be a number from {LEAST_RATE:f} to {MOST_RATE:,.0f}, "
            f"got {shown(rate)}"
        )
    hit = values.get("prefix_hit")
    if hit is not None and not is_number(hit):
        raise SweepError(f"{place}: prefix_hit must be a number from 0 to 0.999, got {shown(hit)}")
    return Traffic(str(model), int(isl), int(osl), float(rate), values)
