"""Serving on standard input and output: one request after the other, each answered in its form.

The first byte of the stream says which form all of it has: the binary one of
:mod:`fastroof.backends.serve.frames` starts with F5, which no text starts with, and anything else is read
as lines of JSON, :mod:`fastroof.backends.serve.json_lines`.

A client may send many requests before it reads a reply, as long as it also reads: a pipe holds at most 1 MiB
each way, and a server whose replies nobody takes stops reading.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from fastroof.backends.serve import frames
from fastroof.backends.serve.answer import ServedPlans, as_refusal
from fastroof.backends.serve.frame_reader import Frame, FrameReader
from fastroof.backends.serve.json_lines import LineReader, answer_line, error_line
from fastroof.backends.serve.limits import call_stop
from fastroof.backends.serve.messages import answer_message, parse_message, take_id, write_reply
from fastroof.backends.serve.pipe import PIPE_BYTES, Inflow, Outflow, widen
from fastroof.backends.serve.steps_asked import AnySteps
from fastroof.errors import BackendError, BatchError
from fastroof.run import StepBatch

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan

__all__ = ["protocol_output", "serve_pipe", "serve_stdio"]


@contextmanager
def protocol_output() -> Iterator[int]:
    """Keep standard output for replies: what else the process prints there goes to standard error.

    Yields
    ------
    int
        File descriptor to write replies to.
    """
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield output
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


def serve_stdio(
    plans: Mapping[str, StepPlan],
    *,
    limits: ServeLimits | None = None,
    input_fd: int = 0,
    output_fd: int = 1,
) -> None:
    """Answer requests on standard input until it ends, nobody reads, or SIGTERM or SIGINT comes.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By name.
    limits : ServeLimits, optional
        What is refused.
    input_fd, output_fd : int
        The two pipes.

    Raises
    ------
    BackendError
        If there are no plans, or more than the limits allow. A request never raises.

    Notes
    -----
    After a signal every request that had arrived whole is answered, one that had arrived in part gets an
    error, and the function returns. A second signal ends the process at once.
    """
    served = ServedPlans(plans, limits)
    with _stop_signals() as stop_fd:
        serve_pipe(served, input_fd, output_fd, stop_fd)


@contextmanager
def _stop_signals() -> Iterator[int]:
    """A file descriptor that becomes readable when SIGTERM or SIGINT comes."""

    def end_at_the_next(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)

    stop_fd, signal_fd = os.pipe()
    os.set_blocking(signal_fd, False)
    # written when the signal comes; a handler in Python may wait for the poll that it is to end
    former_fd = signal.set_wakeup_fd(signal_fd)
    former = {number: signal.signal(number, end_at_the_next) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop_fd
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_fd)
        os.close(stop_fd)
        os.close(signal_fd)


def serve_pipe(served: ServedPlans, input_fd: int, output_fd: int, stop_fd: int | None = None) -> None:
    """Answer requests from one file descriptor on another, as :func:`serve_stdio`, without signals.

    Parameters
    ----------
    served : ServedPlans
        What answers.
    input_fd, output_fd : int
        Pipes, sockets or files; blocking.
    stop_fd : int, optional
        Stops it by becoming readable.
    """
    widen(input_fd)
    widen(output_fd)
    output = Outflow(output_fd)
    inflow = Inflow(input_fd, output, stop_fd)
    with suppress(BrokenPipeError):
        room = memoryview(bytearray(PIPE_BYTES))
        first = bytes(room[: inflow.read_into(room)])
        if first[:1] == frames.REQUEST_MAGIC[:1]:
            _serve_frames(served, FrameReader(inflow, served.limits, first), output)
        else:
            _serve_lines(served, LineReader(inflow, served.limits, first), output)
        output.flush()


def _serve_lines(served: ServedPlans, reader: LineReader, output: Outflow) -> None:
    while True:
        try:
            line = reader.next_line()
        except BackendError as error:
            output.put(error_line(error))
            continue
        if line is None:
            return
        if line.strip():
            output.put(answer_line(served, line))


def _serve_frames(served: ServedPlans, reader: FrameReader, output: Outflow) -> None:
    while True:
        try:
            frame = reader.next_frame()
        except frames.FrameError as error:
            output.put(frames.error_reply(error, error.request_id))
            continue
        if frame is None:
            return
        try:
            replies = _reply(served, frame)
        except Exception as error:
            reader.failed()
            output.put(frames.error_reply(as_refusal(error), frame.header.request_id))
        else:
            output.put(*replies)


def _reply(served: ServedPlans, frame: Frame) -> tuple[bytes | memoryview, ...]:
    header = frame.header
    which, arrays = header.body(frame.data)
    if header.kind == frames.DESCRIBE:
        return (frames.json_reply(write_reply(served.describe()), header.request_id),)
    if header.kind == frames.MESSAGE:
        return (frames.json_reply(_reply_text(served, bytes(arrays[0])), header.request_id),)
    if header.num_steps == 1 and header.kind in (frames.DECODE, frames.RAGGED):
        return (frames.one_time_reply(_one_step_us(served, which, arrays), header.request_id),)
    sizes = [np.asarray(ints) for ints in arrays]
    if header.kind in (frames.DECODE_ERRORS, frames.RAGGED_ERRORS):
        decodes = header.kind == frames.DECODE_ERRORS
        steps = served.decode_steps(*sizes) if decodes else AnySteps(StepBatch(*sizes))
        return frames.times_and_errors_reply(served.with_errors(which, steps), header.request_id)
    timed = served.decode_us if header.kind == frames.DECODE else served.step_us
    return frames.times_reply(timed(which, *sizes), header.request_id)


def _reply_text(served: ServedPlans, text: bytes) -> bytes:
    """Answer a message of JSON as a line is answered, but for its errors, which are raised."""
    message = parse_message(text)
    request_id = take_id(message)
    with call_stop(served.limits.max_call_s).watched():
        return write_reply({"id": request_id, **answer_message(served, message)})


def _one_step_us(served: ServedPlans, which: str | int, arrays: list[memoryview]) -> float:
    """Time one step by integers: NumPy's arrays would take longer than the plan."""
    if len(arrays) == 2:
        return served.plan(which).scalar(arrays[0][0], arrays[1][0])
    new_tokens, context_len, offsets = arrays
    if offsets.tolist() != [0, len(new_tokens)]:
        raise BatchError(f"offsets of one step must be [0, {len(new_tokens)}], got {offsets.tolist()}")
    return served.one_step_us(which, new_tokens.tolist(), context_len.tolist())
