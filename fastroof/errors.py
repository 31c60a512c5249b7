"""The errors fastroof raises: each names the given value and the valid ones."""

from __future__ import annotations


class FastroofError(ValueError):
    """Base of every error that fastroof raises on purpose."""


class TableError(FastroofError):
    """A measured table cannot be read or must not be used."""


class MeasureError(FastroofError):
    """A kernel cannot be measured, or what was measured must not be used."""


class MissingTableError(TableError):
    """No measured table serves the requested operator, dtype or shape."""


class LookupInputError(FastroofError):
    """An argument of a lookup is not a size that a kernel can have."""


class GpuError(FastroofError):
    """A GPU is unknown or its gpu.toml is wrong."""


class ModelError(FastroofError):
    """A model is unknown or its config.json is wrong."""


class UnsupportedModelError(ModelError):
    """The model's architecture needs operators that a plan does not have yet."""


class PlanError(FastroofError):
    """A model, a GPU and tables cannot be compiled into a plan."""


class PlanRangeError(PlanError):
    """A step is larger than the plan was compiled for."""


class BatchError(FastroofError):
    """A batch of steps is malformed."""


class TraceError(FastroofError):
    """A trace of requests, or a workload that makes one, is wrong."""


class SimulationError(FastroofError):
    """An engine cannot serve the simulated requests."""


class StoppedError(FastroofError):
    """Work was stopped early: at a time limit, or because its caller left."""


class SweepError(FastroofError):
    """A sweep's spec or output is wrong."""


class BackendError(FastroofError):
    """A plan cannot be handed to another program, or a message from one is wrong."""
