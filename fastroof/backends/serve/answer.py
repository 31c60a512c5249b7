"""Plans by name or number, and their answers within a server's limits."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Floats, Ints
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.message_forms import PROTOCOL
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run import StepBatch
from fastroof.run.arrays import int_array

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["ServedPlans", "as_refusal"]


class ServedPlans:
    """What a server answers from.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By name; a plan's number is its place in it, from 0.
    limits : ServeLimits
        What is refused.

    Raises
    ------
    BackendError
        If there are no plans, or more than the limits allow.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> served = ServedPlans({"small": plan})
    >>> bool(served.decode_us("small", [64], [4096])[0] == plan.decode_us(64, 4096))
    True
    """

    def __init__(self, plans: Mapping[str, StepPlan], limits: ServeLimits | None = None) -> None:
        self.limits = limits or ServeLimits()
        if not plans:
            raise BackendError("there is no plan to serve: name at least one")
        if len(plans) > self.limits.max_plans:
            raise BackendError(
                f"{len(plans)} plans are more than the {self.limits.max_plans} that a server may hold: "
                "a larger max_plans, or another server"
            )
        self._by_name = dict(plans)
        self._in_order = tuple(plans.values())

    def __len__(self) -> int:
        return len(self._in_order)

    def plan(self, which: str | int) -> StepPlan:
        """Return a plan by its name or number.

        Raises
        ------
        BackendError
            If it is not served.
        """
        if isinstance(which, str):
            served = self._by_name.get(which)
        else:
            served = self._in_order[which] if 0 <= which < len(self._in_order) else None
        if served is None:
            raise BackendError(f"no plan {which!r:.80} is served; {self.names_words()}")
        return served

    def names_words(self) -> str:
        """Say which plans there are."""
        return "there are: " + ", ".join(f"{i} {name}" for i, name in enumerate(self._by_name))

    def decode_us(self, which: str | int, batch_size: Any, kv_len: Any) -> Floats:
        """Time steps of equal decodes.

        Parameters
        ----------
        which : str or int
            The plan.
        batch_size, kv_len : int or array_like of int, shape (steps,)
            As in ``plan.decode_us``.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        BackendError, BatchError, PlanRangeError
            If the plan is not served, a limit is exceeded, or a size is none.
        """
        plan = self.plan(which)
        arrays = [int_array("batch_size", batch_size), int_array("kv_len", kv_len)]
        for name, array in zip(("batch_size", "kv_len"), arrays, strict=True):
            if array.ndim > 1:
                raise BatchError(f"{name} must be one list of integers, got shape {array.shape}")
            self.check_steps(array.size)
        return np.atleast_1d(plan.decode_us(*arrays))

    def step_us(self, which: str | int, new_tokens: Ints, context_len: Ints, offsets: Ints) -> Floats:
        """Time ragged steps given as the arrays of a :class:`StepBatch`.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        BackendError, BatchError, PlanRangeError
            As in :meth:`decode_us`.
        """
        plan = self.plan(which)
        self.check_steps(len(offsets) - 1)
        self.check_requests(len(new_tokens))
        return plan.step_us(StepBatch(new_tokens, context_len, offsets))

    def one_step_us(self, which: str | int, new_tokens: list[int], context_len: list[int]) -> float:
        """Time one step of any requests, us, without what arrays cost; errors as in :meth:`decode_us`."""
        self.check_requests(len(new_tokens))
        return self.plan(which).step_scalar(new_tokens, context_len)

    def requests_us(self, which: str | int, requests: Iterable[Iterable[tuple[int, int]]]) -> Floats:
        """Time ragged steps given as one list of (new_tokens, context_len) a step.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        BackendError, BatchError, PlanRangeError
            As in :meth:`decode_us`.
        """
        plan = self.plan(which)
        batch = StepBatch.from_requests(requests)
        self.check_steps(batch.num_steps)
        self.check_requests(len(batch.new_tokens))
        return plan.step_us(batch)

    def simulate(self, which: str | int, asked: Any) -> dict[str, Any]:
        """Simulate an engine, as :mod:`fastroof.backends.serve.simulations` says.

        Returns
        -------
        dict
            Ready for JSON.

        Raises
        ------
        FastroofError
            If the plan is not served, a limit is exceeded, or what is asked for cannot be.
        """
        from fastroof.backends.serve.simulations import simulation_answer

        return simulation_answer(self.plan(which), asked, self.limits)

    def check_steps(self, num_steps: int) -> None:
        """Refuse more steps than a call may ask for."""
        if num_steps > self.limits.max_steps:
            raise BackendError(
                f"{num_steps} steps are more than the {self.limits.max_steps} of a message: send several"
            )

    def check_requests(self, num_requests: int) -> None:
        """Refuse more requests than a call may ask for."""
        if num_requests > self.limits.max_requests:
            raise BackendError(
                f"{num_requests} requests are more than the {self.limits.max_requests} of a message: "
                "send several"
            )

    def describe(self) -> dict[str, Any]:
        """Return what is served: fastroof's version and the protocol's, the plans in order, the limits.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
        >>> ServedPlans({"small": plan}).describe()["plans"][0]["name"]
        'small'
        """
        plans = [
            {"number": number, "name": name, **plan.describe()}
            for number, (name, plan) in enumerate(self._by_name.items())
        ]
        limits = {
            name: getattr(self.limits, name)
            for name in (
                "max_steps",
                "max_requests",
                "max_message_bytes",
                "max_line_bytes",
                "max_simulated_requests",
                "max_answered_requests",
                "max_simulated_steps",
            )
        }
        return {"fastroof": __version__, "protocol": PROTOCOL, "plans": plans, "limits": limits}


def as_refusal(error: Exception) -> FastroofError:
    """Return the error that a client gets: for a fault of the server, which it prints, one that says so."""
    if isinstance(error, FastroofError):
        return error
    traceback.print_exception(error)
    return BackendError(f"the server failed on this message: {type(error).__name__}: {error}")
