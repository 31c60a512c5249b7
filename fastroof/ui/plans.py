"""Plans behind the page: the models and GPUs that it lists, and a cache of compiled plans."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.caching import BoundedCache
from fastroof.checks import shown
from fastroof.config import gpu_names, is_shipped, load_gpu
from fastroof.errors import GpuError, ModelError
from fastroof.file_access import FilesRead, recorded
from fastroof.models import load_model, model_names
from fastroof.ui.view import View

if TYPE_CHECKING:
    from fastroof.config import GpuSpec
    from fastroof.models import ModelSpec
    from fastroof.plan import StepPlan
    from fastroof.tables import Tables


PLANS_BYTES: Final = 2**27
"""Size of the plan cache: about 180 plans, those of two mixtures of experts in all their layouts."""

ARENAS: Final = 4
"""Memory of a plan in multiples of its arena, including the errors and lines that it computes later."""

MOST_GPUS: Final = 4
"""Number of GPUs whose tables are cached, up to about 100 MB each."""

CHECK_EVERY_S: Final = 1.0
"""Seconds between checks for changed files, which take about 3 ms."""


class GpuTables(NamedTuple):
    """A GPU, its measured tables, and the argument of :func:`fastroof.load_tables`; None without tables."""

    gpu: GpuSpec
    tables: Tables | None
    where: str | None


class CompiledPlan(NamedTuple):
    """A plan and the warnings of its compilation."""

    plan: StepPlan
    notes: tuple[str, ...]


def _bytes_of(made: CompiledPlan) -> int:
    return ARENAS * sum(each.arena.nbytes for each in (made.plan, *made.plan.stage_plans))


class PlanStore:
    """Plans by their options, compiled on first use and cached; thread-safe."""

    def __init__(
        self, models: Mapping[str, str] | None = None, gpus: Mapping[str, str] | None = None
    ) -> None:
        self.models = {**{name: name for name in model_names()}, **(models or {})}
        self.gpus = {**{name: name for name in gpu_names()}, **(gpus or {})}
        self._specs: dict[str, ModelSpec] = {}
        self._tables: BoundedCache[GpuTables] = BoundedCache(MOST_GPUS)
        self._plans: BoundedCache[CompiledPlan] = BoundedCache(PLANS_BYTES)
        self._lock = Lock()
        self._read = FilesRead()
        self._checked_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._plans)

    def written_model(self, name: str) -> str:
        """Return a model's command-line argument."""
        if name not in self.models:
            raise ModelError(
                f"the page has no model {shown(name)}; `fastroof models` lists the valid ones, and "
                "`fastroof ui --model PATH` adds a config.json"
            )
        return self.models[name]

    def written_gpu(self, name: str) -> str:
        """Return a GPU's command-line argument."""
        if name not in self.gpus:
            raise GpuError(
                f"the page has no GPU {shown(name)}; valid: {', '.join(self.gpus)}, and "
                "`fastroof ui --gpu PATH` adds a gpu.toml"
            )
        return self.gpus[name]

    def model(self, name: str) -> ModelSpec:
        """Return a model that the page lists."""
        with self._reading():
            return self._model(name)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Hold the lock, clear the caches if files have changed, and record the files read."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked_s >= CHECK_EVERY_S:
                if not (self._read.is_repeatable and FilesRead.holds(self._read.entries)):
                    for made in (self._specs, self._tables, self._plans):
                        made.clear()
                    self._read = FilesRead()
                self._checked_s = now
            with recorded(self._read):
                yield

    def _model(self, name: str) -> ModelSpec:
        written = self.written_model(name)
        if name not in self._specs:
            self._specs[name] = load_model(written)
        return self._specs[name]

    def gpu(self, name: str) -> GpuSpec:
        """Return a GPU that the page lists."""
        return load_gpu(self.written_gpu(name))

    def plan(
        self, view: View, sizes: Mapping[str, int | None], split: Mapping[str, int] | None = None
    ) -> CompiledPlan:
        """Return a plan of the view's model and GPU."""
        options = {**view.plan_options, **(split or {}), **sizes}
        key = (view.model, view.gpu, frozenset(options.items()))

        def compiled() -> CompiledPlan:
            from fastroof.plan import compile_plan

            model, measured = self._model(view.model), self._measured(view.gpu)
            if not view.has_known_card:
                options["engine"] = view.profile
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                plan = compile_plan(model, measured.gpu, measured.tables, **options)
            return CompiledPlan(plan, tuple(str(each.message) for each in caught))

        with self._reading():
            return self._plans.get_or_raise(key, compiled, _bytes_of)

    def measured(self, name: str) -> GpuTables:
        """Return a GPU with its tables, loaded as by a command."""
        with self._reading():
            return self._measured(name)

    def _measured(self, name: str) -> GpuTables:
        def loaded() -> GpuTables:
            from fastroof.load.by_name import find_tables_of, has_tables
            from fastroof.tables import load_tables

            # tables and their engine-specific views reference each other
            gc.collect()
            written = self.written_gpu(name)
            gpu = load_gpu(written)
            found = find_tables_of(written)
            where = str(found.folders[0]) if found.folders else None
            if found.gpu is not None and found.gpu.name in gpu_names():
                where = found.gpu.name if has_tables(found.gpu.name) else None
            return GpuTables(gpu, None if where is None else load_tables(where), where)

        return self._tables.get_or_raise(name, loaded, lambda _: 1)


class NamedStart(NamedTuple):
    """The first view, and the custom models and GPUs that the page lists for it."""

    view: View
    models: dict[str, str]
    gpus: dict[str, str]


def named_start(model: str | None = None, gpu: str | None = None) -> NamedStart:
    """Return the first view for a given model and GPU, which may be paths."""
    models: dict[str, str] = {}
    gpus: dict[str, str] = {}
    chosen: dict[str, Any] = {} if model is None else {"tp": 1}
    if model is not None:
        spec = load_model(model)
        chosen["model"] = spec.name
        if spec.name not in model_names() or load_model(spec.name) != spec:
            chosen["model"] = _free(spec.name, model_names())
            models[chosen["model"]] = str(Path(model))
    if gpu is not None:
        card = load_gpu(gpu)
        chosen["gpu"] = card.name
        if not is_shipped(card):
            chosen["gpu"] = _free(card.name, gpu_names())
            gpus[chosen["gpu"]] = str(Path(gpu))
    return NamedStart(View(**chosen), models, gpus)


def _free(name: str, taken: tuple[str, ...] | list[str]) -> str:
    return f"{name} (own)" if name in taken else name
