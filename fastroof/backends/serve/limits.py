"""What a server accepts at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastroof.checks import whole_number
from fastroof.errors import BackendError
from fastroof.stopping import Stop

__all__ = ["ServeLimits", "call_stop"]


@dataclass(frozen=True)
class ServeLimits:
    """Limits of a server: what is beyond them gets an error, and costs neither memory nor another's call.

    Attributes
    ----------
    max_plans : int
        Plans it serves.
    max_steps, max_requests : int
        Steps of a call, and requests of all of them together.
    max_detailed_steps, max_detailed_requests : int
        The same of a call that asks for more than times: standard errors, stages (each step counts once a
        stage), micro-batches of a pipeline, an explanation. A step of them takes up to some microseconds.
    max_message_bytes : int
        Longest message it reads.
    max_line_bytes : int
        Longest line of JSON it reads, which takes some twenty times its length to parse; never more than
        ``max_message_bytes``. JSON that comes otherwise, in a frame or by Flight, is held to it too.
    max_calls : int
        Calls at once; further ones are refused, to be tried again. A pipe carries one at a time.
    max_simulated_requests, max_answered_requests : int
        Requests of a simulation, and of one whose answer has all of them.
    max_simulated_steps : int
        Steps that a simulation may take at most, as
        :func:`fastroof.simulation.settings.simulated_steps` counts them: tokens of all outputs, chunks of all
        prompts, and looks at replicas.
    max_call_s : int
        Seconds that a call may take, from when it has been read; then its work is ended. A stream of lines
        is one call. Simulations are ended at once, and everything else between its parts, which take seconds
        at most by the other limits.

    Raises
    ------
    BackendError
        If a limit is not a whole number of at least 1.

    Examples
    --------
    >>> ServeLimits(max_steps=1000).max_steps
    1000
    """

    max_plans: int = 64
    max_steps: int = 2**22
    max_requests: int = 2**24
    max_detailed_steps: int = 2**18
    max_detailed_requests: int = 2**20
    max_message_bytes: int = 2**28
    max_line_bytes: int = 2**23
    max_calls: int = 32
    max_simulated_requests: int = 2**20
    max_answered_requests: int = 2**17
    max_simulated_steps: int = 2**28
    max_call_s: int = 60

    def __post_init__(self) -> None:
        for each in fields(self):
            whole_number(each.name, getattr(self, each.name), error=BackendError)

    @property
    def json_bytes(self) -> int:
        """The longest message of JSON, whichever way it comes."""
        return min(self.max_line_bytes, self.max_message_bytes)

    def check_line(self, num_bytes: int) -> None:
        """Refuse a message of JSON that is longer than a line may be.

        Raises
        ------
        BackendError
            If it is.
        """
        if num_bytes > self.json_bytes:
            raise BackendError(
                f"a message of JSON is longer than the {self.json_bytes} bytes of a line: send several"
            )


def call_stop(limit_s: int) -> Stop:
    """Return what ends a call at its time limit, from now on."""
    return Stop(
        limit_s, f"the call took longer than the {limit_s} s that one may take (max_call_s): ask for less"
    )
