"""Disaggregated serving: the results of a simulation with prefill and decode engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrow import arrow_schema
from fastroof.caching import lazy_property
from fastroof.checks import one_of, shown, whole_number
from fastroof.columns import Column
from fastroof.compiled.simulation.records import Rows
from fastroof.errors import SimulationError
from fastroof.simulation.answers import duration_us
from fastroof.simulation.autoscaled_simulation import ReplicaCounts, gpu_hours_of
from fastroof.simulation.autoscaling import Autoscaler, check_rule
from fastroof.simulation.energy import EnergyPart
from fastroof.simulation.engine import Outcomes, check_time_scale
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.kv_tiers import tiers_below
from fastroof.simulation.pools import POOLED_ROUTINGS, ROUTINGS, Link, Pool, never_run
from fastroof.simulation.requests import engine_use, request_table, spread
from fastroof.simulation.settings import MOST_REPLICAS, EngineSettings, running_tokens
from fastroof.simulation.simulation import Simulation
from fastroof.traces.prompt_tree import source_of_hits
from fastroof.traces.trace import Trace
from fastroof.traces.trace_files import load_trace
from fastroof.units import SECONDS_PER_HOUR, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan


ON_TOO_LONG: Final = ("error", "reject")

TRANSFER_COLUMNS: Final = (
    Column("prefill_replica", "int", "", "engine that prefilled it, from 0; empty if none did", 0),
    Column("transfer_ms", "float", "ms", "from the end of its prefill until its KV cache has arrived"),
)
"""Columns of :attr:`DisaggregatedSimulation.requests` after those of any simulation."""


class DisaggregatedSimulation(Simulation):
    """The results of a simulation with prefill and decode engines.

    Everything of :class:`Simulation` is over both pools; ``replica`` is the decode engine, empty if a request
    ended with its prefill. Made by :func:`simulate_disaggregated`.

    Parameters
    ----------
    prefill, decode : Pool
        The pools of engines.
    trace : Trace
        The requests.
    link : Link
        The link between the pools.
    time_scale : float
        Factor on the time of every step in both pools.

    Attributes
    ----------
    prefill, decode : Pool
        The pools of engines.
    link : Link
        The link between the pools.
    """

    def __init__(
        self, prefill: Pool, decode: Pool, trace: Trace, link: Link, *, time_scale: float = 1.0
    ) -> None:
        self.prefill, self.decode, self.link = prefill, decode, link

        def run(scale: float) -> Outcomes:
            return run_pools([prefill, decode], trace, link, time_scale=time_scale * scale)

        super().__init__(
            decode.plan,
            trace,
            decode.settings,
            run(1.0),
            replicas=prefill.most_replicas + decode.most_replicas,
            rerun=run,
        )

    @property
    def _each(self) -> tuple[tuple[str, Pool, Outcomes | None], ...]:
        """Return both pools by name, with what each did."""
        outcomes = self.outcomes
        return ("prefill", self.prefill, outcomes.prefill), ("decode", self.decode, outcomes.decode)

    def _lives(self, pool: Pool) -> Rows:
        """Return the lives of a pool's replicas, which an autoscaler started."""
        assert self.outcomes.lives is not None
        return self.outcomes.lives[self.outcomes.lives["pool"] == (pool is self.decode)]

    @property
    def energy_parts(self) -> list[EnergyPart]:
        """GPUs by plan, for :meth:`energy`."""
        over_s = duration_us(self.outcomes) / US_PER_S
        held_s = [
            pool.gpus * over_s
            if pool.autoscaler is None
            else gpu_hours_of(pool, self._lives(pool)) * SECONDS_PER_HOUR
            for _, pool, _ in self._each
        ]
        return [
            EnergyPart(pool.plan, pool.settings, outcomes, pool.engines, pool.gpus, gpu_s)
            for (_, pool, outcomes), gpu_s in zip(self._each, held_s, strict=True)
        ]

    @property
    def engines(self) -> int:
        """Number of engines that step independently, in both pools."""
        return self.prefill.engines + self.decode.engines

    @property
    def gpus(self) -> int:
        """GPUs of all engines, of both pools."""
        return self.prefill.gpus + self.decode.gpus

    @property
    def made_from(self) -> dict[str, str]:
        """The inputs of the results: plans and settings of both pools, their link, the trace."""
        settings = {f"fastroof.prefill.{name}": str(of) for name, of in vars(self.prefill.settings).items()}
        pools = {
            f"fastroof.{name}.replicas": str(pool.replicas)
            for name, pool in (("prefill", self.prefill), ("decode", self.decode))
        }
        link = {f"fastroof.link.{name}": str(value) for name, value in self.link._asdict().items()}
        plan = {f"prefill.{name}": value for name, value in self.prefill.plan.made_from.items()}
        return {**super().made_from, **plan, **settings, **pools, **link}

    @lazy_property
    def requests(self) -> pa.Table:
        """Requests as a table, a row each, in the order of the trace's file.

        Returns
        -------
        pyarrow.Table
            As :attr:`Simulation.requests`, then ``prefill_replica`` and ``transfer_ms``.
        """
        import pyarrow as pa

        outcomes = self.outcomes
        assert outcomes.prefill_replica is not None
        assert outcomes.transfer_us is not None
        table = request_table(self.trace, outcomes, self.times, self.made_from)
        replica, transfer = arrow_schema(TRANSFER_COLUMNS, {})
        prefilled = self.trace.in_file_order(outcomes.prefill_replica)
        sent_ms = self.trace.in_file_order(outcomes.transfer_us / US_PER_MS)
        table = table.append_column(replica, pa.array(prefilled, replica.type, mask=prefilled < 0))
        return table.append_column(transfer, pa.array(sent_ms, transfer.type, from_pandas=True))

    def summary(self, **given: Any) -> dict[str, Any]:
        """Return the results of the whole run.

        Parameters
        ----------
        **given
            As in :meth:`Simulation.summary`.

        Returns
        -------
        dict
            As in :meth:`Simulation.summary`, and ``transfer_ms``, ``{mean, p50, p90, p95, p99}`` of requests
            that were handed over; ``pools``: of ``prefill`` and ``decode``, their ``tp``, ``replicas``,
            ``steps`` and ``busy``, the share of the run in which steps ran, of ranks in lockstep any rank's;
            with a rule also ``autoscaling``, as :class:`~fastroof.simulation.AutoscaledSimulation` has it,
            and shares are those of the most replicas.
        """
        answers = super().summary(**given)
        sent_us = self.outcomes.transfer_us
        assert sent_us is not None
        answers["transfer_ms"] = spread(sent_us[np.isfinite(sent_us)] / US_PER_MS)
        over_us = duration_us(self.outcomes)
        answers["pools"] = {
            name: {
                "tp": pool.plan.tp,
                "replicas": pool.most_replicas,
                "steps": outcomes.counters["steps"] if outcomes else 0,
                "busy": engine_use(outcomes, pool.engines, over_us)["busy"] if outcomes else 0.0,
            }
            for name, pool, outcomes in self._each
        }
        for name, pool, _ in self._each:
            if pool.autoscaler is not None:
                lives = self._lives(pool)
                counts, hours = ReplicaCounts.of_lives(lives), gpu_hours_of(pool, lives)
                answers["pools"][name]["autoscaling"] = counts.answers(pool.autoscaler, lives, hours)
        return answers


def simulate_disaggregated(
    prefill_plan: StepPlan,
    decode_plan: StepPlan,
    trace: Any,
    prefill_replicas: int = 1,
    decode_replicas: int = 1,
    *,
    link: Link = Link(),  # noqa: B008 (immutable)
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    prefill_routing: str = "round_robin",
    decode_routing: str = "round_robin",
    prefix_cache: str = "auto",
    kv_tiers: Any = None,
    prefill_autoscale: Autoscaler | None = None,
    decode_autoscale: Autoscaler | None = None,
    timeout_s: float | None = None,
    on_too_long: str = "error",
    time_scale: float = 1.0,
) -> DisaggregatedSimulation:
    """Serve a trace with prefill engines and decode engines, request by request.

    Parameters
    ----------
    prefill_plan, decode_plan : StepPlan
        Plans with the same model and KV dtype; layouts and GPUs may differ.
    trace : Trace or what :func:`fastroof.load_trace` takes
        The requests: with arrivals, of the clients of a closed loop, or sessions.
    prefill_replicas, decode_replicas : int, default 1
        Number of engines of each kind.
    link : Link
        The link between the pools: bandwidth, latency, who computes the first token, whether a full decode
        engine holds back prefill, and whether layers are sent one by one.
    prefill, decode : mapping, optional
        Settings of each kind of engine, by the names of :class:`EngineSettings`; by default the engine's and
        the plan's memory.
    prefill_routing, decode_routing : str
        As ``routing`` of :func:`fastroof.simulate`; ``prefix_aware`` is for prefill engines.
    prefix_cache : {"auto", "given", "lru"}
        Where hits of prefill engines come from, as in :func:`fastroof.simulate`.
    kv_tiers : str or sequence of KvTier, optional
        Tiers below the simulated prefix cache of each prefill engine, likewise.
    prefill_autoscale, decode_autoscale : Autoscaler, optional
        Rules that start and stop the engines of each kind; the run begins with those given.
    timeout_s : float, optional
        Seconds after which clients give up an unfinished request, wherever it is (default: never).
    on_too_long : {"error", "reject"}
        What happens to a request that can never run in one of the pools.
    time_scale : float, default 1
        Factor on the time of every step, not of transfers.

    Returns
    -------
    DisaggregatedSimulation
        The times of every request, and results derived from them.

    Raises
    ------
    SimulationError
        If the plans do not match, a setting is invalid, or a request can never run.
    TraceError
        If the trace cannot be read.

    Notes
    -----
    A prompt is computed on a prefill engine, its KV cache is sent over the link, and a decode engine
    continues with the prompt as context. The closed form is
    :func:`fastroof.serving.estimate_disaggregated`.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.simulation import Link, simulate_disaggregated
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> trace = fastroof.Trace([0.0, 0.1, 0.2], [4000, 2000, 500], [100, 50, 1])
    >>> sim = simulate_disaggregated(plan, plan, trace, 2, link=Link(50e9))
    >>> sim.requests["prefill_replica"].to_pylist(), sim.requests["replica"].to_pylist()
    ([0, 1, 0], [0, 0, None])
    >>> round(sim.requests["transfer_ms"][0].as_py(), 3)
    10.486
    """
    from fastroof.plan.compile import check_plan

    one_of("on_too_long", on_too_long, ON_TOO_LONG, SimulationError)
    for name, plan in (("prefill_plan", prefill_plan), ("decode_plan", decode_plan)):
        check_plan(name, plan, SimulationError)
    for name, settings in (("prefill", prefill), ("decode", decode)):
        is_named = isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)
        if settings is not None and not is_named:
            raise SimulationError(f"{name} must be settings by name, got {shown(settings)}")
    prefill_replicas = whole_number("prefill_replicas", prefill_replicas, 1, MOST_REPLICAS, SimulationError)
    decode_replicas = whole_number("decode_replicas", decode_replicas, 1, MOST_REPLICAS, SimulationError)
    one_of("prefill_routing", prefill_routing, POOLED_ROUTINGS, SimulationError)
    one_of("decode_routing", decode_routing, ROUTINGS, SimulationError)
    check_time_scale(time_scale)
    for name, rule in (("prefill_autoscale", prefill_autoscale), ("decode_autoscale", decode_autoscale)):
        check_rule(name, rule)
    requests = trace if isinstance(trace, Trace) else load_trace(trace)
    prefix_cache = source_of_hits(requests, prefix_cache)
    prompts, outputs = (running_tokens(requests, plan) for plan in (prefill_plan, decode_plan))
    both = {"timeout_s": timeout_s}
    first = EngineSettings.of_plan(prefill_plan, kv_len=prompts, **(both | dict(prefill or {})))
    then = EngineSettings.of_plan(decode_plan, kv_len=outputs, **(both | dict(decode or {})))
    tiers = tiers_below(kv_tiers, prefill_plan, first, prefix_cache)
    pools = (
        Pool(prefill_plan, first, prefill_replicas, prefill_routing, prefix_cache, tiers, prefill_autoscale),
        Pool(decode_plan, then, decode_replicas, decode_routing, autoscaler=decode_autoscale),
    )
    if on_too_long == "error":
        beyond = never_run(pools, requests)
        if beyond.any():
            row = int(beyond.argmax())
            prompt, output = int(requests.input_tokens[row]), int(requests.output_tokens[row])
            raise SimulationError(
                f"request {int(requests.order[row])} of {requests.name} ({prompt:,} + {output:,} tokens) "
                f"can never run in both pools, the first of {int(beyond.sum()):,}; give more num_gpu_blocks, "
                'GPUs or max_num_batched_tokens, or on_too_long="reject"'
            )
    return DisaggregatedSimulation(*pools, requests, link, time_scale=time_scale)
