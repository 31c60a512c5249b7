"""Recipes: how a public benchmark launched an engine, by version, date, GPU, model and format.

Each TOML in ``recipes`` holds the facts of one engine's launch scripts, each with its file and commit. They
give the KV cache, layout and draft of runs measured with them, where the rows lack these or contradict them;
your own plans set them explicitly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from fastroof.checks import is_whole_number
from fastroof.documents import parse_table
from fastroof.engines.values import check_fields, holds_for, is_version
from fastroof.errors import PlanError

_FOLDER: Final = "recipes"
_KV_DTYPES: Final = ("", "bf16", "fp8")
_SPLITS: Final = {"attention": ("", "tp"), "experts": ("", "tp", "ep")}
_COUNTS: Final = (
    "min_tp", "num_draft_tokens", "num_draft_tokens_dp", "max_num_batched_tokens", "max_num_seqs",
    "requests_per_client", "stream_interval", "wait_below_tp",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How an engine was launched under some conditions; what a script does not set is empty or 0.

    Attributes
    ----------
    engine : str
        Engine name.
    file, commit, reason : str
        Source of the facts, and remarks.
    versions : str
        Range of the engine's versions; empty for any.
    builds : tuple of str
        Names of builds that are not versions (``nightly-dev``); ``""`` is a run without a version.
    measured : tuple of str
        First and last day of the runs; empty for any. Runs without a date match any day.
    gpus, formats : tuple of str
        GPUs, and dtypes of linear layers; empty for any.
    models : tuple of str
        Prefixes of model names; empty for any.
    min_tp : int
        Minimum tensor-parallel size.
    labelled : tuple of int
        tp, dp and ep as the row labels them; empty for any.
    speculative : bool
        Whether requests verify draft tokens.
    kv_dtype : str
        Format of the KV cache.
    attention, experts : str
        ``tp`` if attention is split by tensor parallelism whatever data parallelism a row has, and
        experts too whatever groups it has; ``ep`` if experts are groups on all GPUs.
    moe_backend, moe_backend_dp, attention_backend : str
        Requested kernels, by the engine's names; with data-parallel attention, if different.
    ep_from, dp_from : tuple of (str, int)
        Clients from which experts are groups on all GPUs, and attention is data parallel, by tensor-parallel
        size, prompt and output: ``4x1024x1024``. A table in TOML.
    num_draft_tokens, num_draft_tokens_dp : int
        Tokens drafted per request and step; with data-parallel attention.
    accepted, accepted_dp : float
        Tokens that a request produces per step.
    max_num_batched_tokens, max_num_seqs : int
        Limits of a step.
    batched_tokens_per_isl : float
        The first limit, if it depends on the length of prompts.
    client_seqs : bool
        Whether the second limit is the number of clients.
    memory_fraction : float
        Share of the GPU's memory, by the engine's definition.
    cuda_graphs : str
        Description of the CUDA-graph settings.
    fused_allreduce, async_scheduling : bool
        Whether it requests all-reduces fused with norms, and scheduling of the next step during the
        current one, if that is not the version's default.
    stream_interval : int
        Number of tokens sent to a client together.
    wait_steps : tuple of (int, int)
        Number of clients from which prompts wait for others, and for how many steps (TensorRT-LLM's
        ``batch_wait_timeout_iters``, SGLang's ``scheduler_recv_interval``), fewest clients first.
    wait_lengths : tuple of int
        Nominal isl and osl that this applies to; empty for any.
    wait_below_tp : int
        Tensor-parallel size below which this applies; 0 for any.
    requests_per_client : int
        Requests per client, if not 10.
    by_rows : tuple of str
        Fields that no script sets: they were chosen by the runs themselves.
    """

    engine: str
    file: str
    commit: str
    reason: str = ""
    versions: str = ""
    builds: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    min_tp: int = 0
    labelled: tuple[int, ...] = ()
    speculative: bool = False
    kv_dtype: str = ""
    attention: str = ""
    experts: str = ""
    ep_from: tuple[tuple[str, int], ...] = ()
    dp_from: tuple[tuple[str, int], ...] = ()
    moe_backend: str = ""
    moe_backend_dp: str = ""
    attention_backend: str = ""
    num_draft_tokens: int = 0
    num_draft_tokens_dp: int = 0
    accepted: float = 0.0
    accepted_dp: float = 0.0
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    batched_tokens_per_isl: float = 0.0
    client_seqs: bool = False
    memory_fraction: float = 0.0
    cuda_graphs: str = ""
    fused_allreduce: bool = False
    async_scheduling: bool = False
    stream_interval: int = 0
    wait_steps: tuple[tuple[int, int], ...] = ()
    wait_lengths: tuple[int, ...] = ()
    wait_below_tp: int = 0
    requests_per_client: int = 0
    by_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, but=("kv_dtype", *_SPLITS))
        if len(self.measured) not in (0, 2):
            raise PlanError(f"measured must be a first and a last day, got {list(self.measured)!r}")
        for name, allowed in (("kv_dtype", _KV_DTYPES), *_SPLITS.items()):
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"{name} must be one of {', '.join(allowed[1:])}, got {getattr(self, name)!r}"
                )
        waits: Any = self.wait_steps
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in waits):
            raise PlanError(f"wait_steps must be pairs of clients and steps, got {waits!r}")
        object.__setattr__(self, "wait_steps", tuple((pair[0], pair[1]) for pair in waits))
        if len(self.wait_lengths) not in (0, 2):
            raise PlanError(f"wait_lengths must be an isl and an osl, got {self.wait_lengths!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value != 0 and not is_whole_number(value):
                raise PlanError(f"{name} must be a whole number of at least 1, got {value!r}")
        if len(self.labelled) not in (0, 3) or not all(map(is_whole_number, self.labelled)):
            raise PlanError(f"labelled must be tp, dp and ep, got {list(self.labelled)!r}")
        for name in ("ep_from", "dp_from"):
            object.__setattr__(self, name, _clients(name, getattr(self, name)))
        if self.speculative != bool(self.num_draft_tokens):
            raise PlanError(
                f"num_draft_tokens must be above 0 exactly if speculative, got speculative "
                f"{self.speculative} and num_draft_tokens {self.num_draft_tokens}"
            )

    def holds(
        self,
        version: str,
        gpu: str,
        model: str,
        dtype: str,
        layout: tuple[int, int, int] | None = None,
        measured_on: str = "",
    ) -> bool:
        """Return whether a run matches the conditions, as :func:`recipe_for` needs."""
        is_version_of = self.versions != "" and is_version(version) and holds_for(self.versions, version)
        days = self.measured or ("", "")
        return (
            (is_version_of or version in self.builds or not (self.versions or self.builds))
            and (not self.gpus or gpu in self.gpus)
            and (not self.formats or dtype in self.formats)
            and (not self.models or model.startswith(self.models))
            and (layout is None or layout[0] * layout[1] >= self.min_tp)
            and (not self.labelled or layout == self.labelled)
            and (not days[0] or not measured_on or days[0] <= measured_on <= days[1])
        )

    def layout(
        self, tp: int, dp: int, ep: int, *, isl: float = 0, osl: float = 0, clients: float = 0
    ) -> tuple[int, int, int]:
        """Return the tp, dp and ep that ran, given those that a row reports.

        If they depend on prompts, outputs and clients, these are needed too.

        Examples
        --------
        >>> recipe_for("vllm", "0.17.0", "b200", "kimi-k2.5", "nvfp4").layout(1, 4, 4)
        (4, 1, 1)
        """
        gpus = tp * dp
        if self.attention == "tp":
            tp, dp = gpus, 1
        run = f"{tp}x{isl:g}x{osl:g}"
        if dp == 1 and clients >= dict(self.dp_from).get(run, math.inf):
            return 1, gpus, gpus
        if dp == 1 and clients >= dict(self.ep_from).get(run, math.inf):
            return tp, dp, gpus
        if self.experts == "tp" and dp == 1:
            ep = 1
        elif self.experts == "ep":
            ep = gpus
        return tp, dp, ep

    def steps_to_wait(self, isl: float, osl: float, tp: int, clients: float) -> int:
        """Return the number of steps that prompts wait for other prompts; 0 if they do not.

        Examples
        --------
        >>> recipe = recipe_for("trtllm", "1.1.0rc2.post2", "h200", "llama-3.1-70b", "fp8")
        >>> recipe.steps_to_wait(1024, 1024, 4, 64), recipe.steps_to_wait(1024, 1024, 8, 64)
        (20, 0)
        """
        if self.wait_lengths not in ((), (isl, osl)) or 0 < self.wait_below_tp <= tp:
            return 0
        return max((steps for least, steps in self.wait_steps if clients >= least), default=0)

    def drafts(self, dp: int) -> tuple[int, float]:
        """Return the tokens drafted and accepted per request and step; 0 and 0.0 if unknown."""
        if dp > 1 and self.num_draft_tokens_dp:
            return self.num_draft_tokens_dp, self.accepted_dp
        return self.num_draft_tokens, self.accepted


def _clients(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    try:
        clients = tuple(dict(value).items())
    except (TypeError, ValueError):
        clients = ()
    if (value and not clients) or not all(
        re.fullmatch(r"\d+x\d+x\d+", str(run)) and is_whole_number(least) for run, least in clients
    ):
        raise PlanError(f"{name} must be a table of clients such as {{4x1024x1024 = 64}}, got {value!r}")
    return clients


@lru_cache(16)
def recipes_of(engine: str) -> tuple[Recipe, ...]:
    """Return the known launch facts of an engine in file order; empty for other engines.

    Examples
    --------
    >>> {recipe.engine for recipe in recipes_of("sglang")}, recipes_of("tgi")
    ({'sglang'}, ())
    """
    file = resources.files("fastroof.engines") / _FOLDER / f"{engine}.toml"
    if not file.is_file():
        return ()
    top = parse_table(file.read_text("utf-8"), f"{engine}.toml", PlanError)
    return tuple(table.build(Recipe, engine=engine) for table in top.tables("recipes"))


def recipe_for(
    engine: str,
    version: str,
    gpu: str,
    model: str,
    dtype: str,
    *,
    layout: tuple[int, int, int] | None = None,
    measured_on: str = "",
    speculative: bool | None = None,
) -> Recipe | None:
    """Return how a public benchmark launched an engine for a run.

    Parameters
    ----------
    engine, version : str
        As in rows; the version may be the name of a build, or empty.
    gpu, model, dtype : str
        GPU, the model's preset or architecture, and the dtype of its linear layers.
    layout : tuple of int, optional
        tp, dp and ep as the row reports them; recipes for one layout need it.
    measured_on : str
        Day of the run, ``2026-03-28``; empty if unknown.
    speculative : bool, optional
        Whether the run is known to verify draft tokens; None takes the first matching recipe, which is
        one without drafts if both exist.

    Returns
    -------
    Recipe or None
        None if unknown.

    Examples
    --------
    >>> recipe = recipe_for("trtllm", "1.2.0rc6.post3", "b200", "deepseek-v3", "fp8_block")
    >>> recipe.kv_dtype, recipe.moe_backend, recipe.drafts(dp=1), recipe.drafts(dp=8)
    ('fp8', 'trtllm', (3, 2.2), (1, 1.6))
    """
    return next(
        (
            recipe
            for recipe in recipes_of(engine)
            if recipe.holds(version, gpu, model, dtype, layout, measured_on)
            and speculative in (None, recipe.speculative)
        ),
        None,
    )
