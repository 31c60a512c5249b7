"""What every measured row says of the engine that it ran on, as plans and profiles take it."""

from __future__ import annotations

from fastroof.engines import EngineProfile, engine_of_version, serving_engines
from fastroof.errors import TableError
from fastroof.models import load_model
from fastroof.models.execution import AUTO
from fastroof.models.layout import Layout

__all__ = ["ServedAs", "check_served"]


class ServedAs:
    """A row's engine, version, model, format and layout; the row's own class declares the fields."""

    engine: str
    engine_version: str
    model: str
    dtype: str
    tp: int
    pp: int
    dp: int
    ep: int

    @property
    def layout(self) -> Layout:
        """Its engine's layout."""
        return Layout(self.tp, self.pp, self.dp, self.ep)

    @property
    def plan_dtype(self) -> str:
        """Its ``dtype`` as a plan takes it: each layer's own where the checkpoint has it."""
        return AUTO if load_model(self.model).checkpoint.formats[0] == self.dtype else self.dtype

    @property
    def engine_profile(self) -> EngineProfile:
        """The packaged profile of its engine and version."""
        return engine_of_version(self.engine, self.engine_version)


def check_served(where: str, row: ServedAs) -> None:
    """Raise a TableError if its engine is unknown."""
    if row.engine not in serving_engines():
        known = ", ".join(serving_engines())
        raise TableError(f"{where}: engine {row.engine!r} is unknown; known are {known}")
