"""The calls of a Flight server of plans."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import flight

from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.flight_calls import Calls, Doorman
from fastroof.backends.serve.flight_steps import (
    ERRORS,
    TIMES,
    TIMES_AND_ERRORS,
    answer_batch,
    batch_steps,
    plan_metadata,
    step_kind,
)
from fastroof.backends.serve.json_lines import answer_line
from fastroof.checks import shown
from fastroof.errors import BackendError, FastroofError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["PlanService"]


class PlanService(flight.FlightServerBase):  # type: ignore[misc]
    """The calls that a client can make; gRPC runs each in a thread.

    Parameters
    ----------
    location : pyarrow.flight.Location or str
        Where it listens, from when it is made.
    plans : mapping of str to StepPlan
        What it serves, by name.
    served : ServedPlans
        The same within limits.
    calls : Calls
        Where calls are counted.
    token : str or None
        What each call has to show.
    """

    def __init__(
        self,
        location: Any,
        plans: Mapping[str, StepPlan],
        served: ServedPlans,
        calls: Calls,
        token: str | None,
    ) -> None:
        super().__init__(location, middleware={"calls": Doorman(calls, token)})
        self._plans = plans
        self._served = served
        self._calls = calls

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        """Describe every plan, whatever the criteria."""
        return iter([_flight_info(name, plan) for name, plan in self._plans.items()])

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        """Describe a plan."""
        name = _plan_name(descriptor)
        return _flight_info(name, self._plan(name))

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        """Describe a plan by the schema of its answers."""
        return flight.SchemaResult(TIMES.with_metadata(plan_metadata(self._plan(_plan_name(descriptor)))))

    def list_actions(self, context: Any) -> list[Any]:
        """List what :meth:`do_action` knows."""
        return [
            ("health", "what is served, as JSON"),
            ("message", "a message of fastroof.backends.serve.json_lines, answered as there"),
            ("simulate", "the same"),
        ]

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Say what is served and how many calls are running, or answer a message of JSON."""
        if action.type in ("message", "simulate"):
            with self._calls:
                return iter([answer_line(self._served, action.body.to_pybytes())])
        if action.type != "health":
            raise flight.FlightServerError(
                f"no action {shown(action.type, 80)} exists; there are: health, message, simulate"
            )
        state = {**self._served.describe(), "calls": self._calls.running, "draining": self._calls.draining}
        return iter([json.dumps(state).encode()])

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Refuse it: there is nothing to put."""
        raise flight.FlightServerError("nothing is stored here: send steps by DoExchange")

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Refuse it: there is nothing to get."""
        raise flight.FlightServerError("nothing is stored here: send steps by DoExchange")

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer each record batch of steps by one of their times."""
        name, with_errors = _asked_plan(descriptor)
        plan = self._plan(name)
        answers = TIMES_AND_ERRORS if with_errors else TIMES
        try:
            kind = step_kind(reader.schema)
        except FastroofError as error:
            raise flight.FlightServerError(str(error)) from None
        except (pa.ArrowException, OSError) as error:
            raise flight.FlightServerError(f"there is no schema to read: {error!s:.200}") from None
        writer.begin(answers)
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            with self._calls:
                try:
                    if chunk.data is None:
                        raise BackendError("a message came without a record batch")
                    steps = batch_steps(kind, chunk.data, self._served.limits)
                    columns = (
                        self._served.with_errors(name, steps) if with_errors else (steps.times_us(plan),)
                    )
                except FastroofError as error:
                    if not context.get_middleware("calls").reads_errors:
                        raise flight.FlightServerError(str(error)) from None
                    told = {"error": type(error).__name__, "message": str(error)}
                    writer.write_with_metadata(answer_batch(answers), json.dumps(told).encode())
                else:
                    writer.write_batch(answer_batch(answers, *columns))

    def _plan(self, name: str) -> StepPlan:
        try:
            return self._served.plan(name)
        except FastroofError as error:
            raise flight.FlightServerError(str(error)) from None


def _asked_plan(descriptor: Any) -> tuple[str, bool]:
    """Which plan an exchange asks, and whether for standard errors too."""
    path = [] if descriptor is None else descriptor.path or []
    if len(path) == 2 and path[1] == ERRORS.encode():
        return str(path[0].decode("utf-8", "replace")), True
    return _plan_name(descriptor), False


def _plan_name(descriptor: Any) -> str:
    if descriptor is not None and descriptor.descriptor_type == flight.DescriptorType.CMD:
        return str(descriptor.command.decode("utf-8", "replace"))
    path = [] if descriptor is None else descriptor.path or []
    if len(path) != 1:
        raise flight.FlightServerError(
            f"the descriptor's path must be the name of a plan, or [name, {ERRORS!r}], got {shown(path, 80)}"
        )
    return str(path[0].decode("utf-8", "replace"))


def _flight_info(name: str, plan: StepPlan) -> Any:
    schema = TIMES.with_metadata(plan_metadata(plan))
    return flight.FlightInfo(schema, flight.FlightDescriptor.for_path(name), [], -1, -1)
