"""Errors that fastroof raises: each message names the given value and the valid ones."""

from __future__ import annotations


class FastroofError(ValueError):
    """Base of every error that fastroof raises on purpose."""


class TableError(FastroofError):
    """A measured table cannot be read or must not be used."""


class MeasureError(FastroofError):
    """A kernel cannot be measured, or its measurement must not be used."""


class MissingTableError(TableError):
    """No measured table covers the requested operator, dtype or shape."""


class LookupInputError(FastroofError):
    """An argument of a lookup is not a size that a kernel can have."""


class GpuError(FastroofError):
    """A GPU is unknown or its gpu.toml is invalid."""


class ModelError(FastroofError):
    """A model is unknown or its config.json is invalid."""


class UnsupportedModelError(ModelError):
    """The model's architecture needs operators that are not supported yet."""


class PlanError(FastroofError):
    """A model, a GPU and tables cannot be compiled into a plan."""


class PlanRangeError(PlanError):
    """A step is larger than the plan was compiled for."""


class BatchError(FastroofError):
    """A batch of steps is malformed."""


class TraceError(FastroofError):
    """A trace of requests, or the workload that generates one, is invalid."""


class SimulationError(FastroofError):
    """An engine cannot serve the simulated requests."""


class StoppedError(FastroofError):
    """Work was stopped early: at a time limit, or because its caller disconnected."""


class SweepError(FastroofError):
    """A sweep's spec or output is invalid."""


class BackendError(FastroofError):
    """A plan cannot be passed to another program, or a message from one is invalid."""
