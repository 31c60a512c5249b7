"""What a server accepts at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastroof.checks import whole_number
from fastroof.errors import BackendError

__all__ = ["ServeLimits"]


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
        Steps that a simulation may take at most: tokens of all outputs, and chunks of all prompts.

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
