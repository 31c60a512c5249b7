"""Steps and their times as Arrow IPC streams: the bodies of ``POST /steps``.

A request holds one step per row, in record batches of two columns: ``batch_size`` and ``kv_len`` (decode
steps), or ``new_tokens`` and ``context_len`` (a list of requests each), of int32 or int64. The reply is one
record batch of ``latency_us``, and of ``relative_error`` if asked for.

Only plain record batches are read. Arrow decompresses a buffer to whatever length it claims, and a long
schema takes many times its size, so every message is checked before Arrow decodes it: its kind, the length of
its metadata, compression. Everything else of a malformed message Arrow itself refuses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import BytesIO
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrays import Floats, Ints
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.messages import AnySteps, Decode
from fastroof.checks import one_line
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run import StepBatch

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
DECODE_COLUMNS: Final = ("batch_size", "kv_len")
RAGGED_COLUMNS: Final = ("new_tokens", "context_len")
MAX_METADATA_BYTES: Final = 2**16
MAX_BATCHES: Final = 2**12

_WANTED: Final = "batch_size and kv_len of int32 or int64, or new_tokens and context_len of lists of them"
_TIMES: Final[Any] = pa.schema([pa.field("latency_us", pa.float64(), nullable=False)])
_TIMES_AND_ERRORS: Final[Any] = _TIMES.append(pa.field("relative_error", pa.float64(), nullable=False))
_COMPRESSION: Final = 3  # a field of Arrow's RecordBatch


def read_steps(body: bytes, limits: ServeLimits) -> Decode | AnySteps:
    """Read the steps of a request body; those of a single record batch stay where they lie."""
    try:
        messages = _messages(body)
        schema = pa.ipc.read_schema(next(messages))
        names = _step_columns(schema)
        batches = []
        num_steps = 0
        for message in messages:
            batch = pa.ipc.read_record_batch(message, schema)
            num_steps += batch.num_rows
            limits.check_steps(num_steps)
            batch.validate()
            batches.append(batch)
        table = pa.Table.from_batches(batches, schema)
    except StopIteration:
        raise BackendError("an Arrow IPC stream is needed, got an empty body") from None
    except FastroofError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BackendError(f"the body is not a valid Arrow IPC stream: {one_line(error)}") from None
    columns = [_without_nulls(name, table.column(name)) for name in names]
    if names == DECODE_COLUMNS:
        batch_size, kv_len = map(_aligned, columns)
        return Decode.model_construct(batch_size=batch_size, kv_len=kv_len)
    (new_tokens, offsets), (context_len, others) = (
        _lists(name, column, limits) for name, column in zip(names, columns, strict=True)
    )
    if not np.array_equal(offsets, others):
        step = int(np.flatnonzero(np.diff(offsets) != np.diff(others))[0])
        raise BatchError(
            f"step {step} has {offsets[step + 1] - offsets[step]} requests in new_tokens, "
            f"{others[step + 1] - others[step]} in context_len"
        )
    return AnySteps.model_construct(requests=StepBatch(new_tokens, context_len, offsets))


def _messages(body: bytes) -> Iterator[Any]:
    """Yield the schema and the record batches of a stream, each checked before anything is decoded."""
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
    for count in range(MAX_BATCHES + 2):
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if count > MAX_BATCHES:
            raise BackendError(f"more than {MAX_BATCHES} record batches: send larger ones")
        wanted = "record batch" if count else "schema"
        if message.type != wanted:
            raise BackendError(
                f"message {count} of the Arrow IPC stream must be a {wanted}, got a {message.type}"
            )
        if message.metadata.size > MAX_METADATA_BYTES:
            raise BackendError(
                f"message {count} of the Arrow IPC stream has {message.metadata.size} bytes of metadata, "
                f"more than {MAX_METADATA_BYTES}"
            )
        if count and _is_compressed(message.metadata):
            raise BackendError("compressed record batches are not accepted: write them uncompressed")
        yield message


def _is_compressed(metadata: Any) -> bool:
    """Whether a record batch says that its buffers are compressed; Arrow has verified its flatbuffer."""
    table = _uint(metadata, 0)
    header_at = _field(metadata, table, 2)
    batch = header_at + _uint(metadata, header_at)
    return bool(_field(metadata, batch, _COMPRESSION))


def _field(metadata: Any, table: int, index: int) -> int:
    """Position of a field of a flatbuffer's table, 0 if it is missing."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    entry = 4 + 2 * index
    if entry >= struct.unpack_from("<H", metadata, vtable)[0]:
        return 0
    offset: int = struct.unpack_from("<H", metadata, vtable + entry)[0]
    return table + offset if offset else 0


def _uint(metadata: Any, at: int) -> int:
    value: int = struct.unpack_from("<I", metadata, at)[0]
    return value


def _step_columns(schema: Any) -> tuple[str, str]:
    """Return which two columns a schema has, in the order in which steps take them."""
    try:
        found = set(schema.names)
    except UnicodeDecodeError as error:
        raise BackendError(f"a column's name is not UTF-8 ({error}): the columns must be {_WANTED}") from None
    names = next((names for names in (DECODE_COLUMNS, RAGGED_COLUMNS) if found == set(names)), None)
    if names is None or len(schema.names) != 2:
        shown = ", ".join(f"{field.name!s:.40}: {field.type!s:.40}" for field in list(schema)[:4])
        raise BackendError(f"the columns must be {_WANTED}, got {len(schema.names)} ({shown})")
    for field in schema:
        of = field.type
        if names == RAGGED_COLUMNS:
            if not pa.types.is_list(of) and not pa.types.is_large_list(of):
                raise BackendError(f"column {field.name} must hold lists, got {of}: send {_WANTED}")
            of = of.value_type
        if of not in (pa.int32(), pa.int64()):
            raise BackendError(
                f"column {field.name} must hold int32 or int64, got {field.type}: send {_WANTED}"
            )
    return names


def _without_nulls(name: str, column: Any) -> Any:
    """Return a column as one array; every step needs an element."""
    if column.null_count:
        raise BatchError(f"{name} is null in step {_first_null(column)}: every step needs one")
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _lists(name: str, column: Any, limits: ServeLimits) -> tuple[Ints, Ints]:
    """Return the values of a column's lists, and where each list starts among them."""
    offsets = column.offsets.to_numpy() if len(column) else np.zeros(1, np.int64)
    count = int(offsets[-1]) - int(offsets[0])
    limits.check_requests(count)
    values = column.values.slice(int(offsets[0]), count)
    offsets = offsets - np.int64(offsets[0])
    if values.null_count:
        request = _first_null(values)
        step = int(np.searchsorted(offsets, request, side="right")) - 1
        raise BatchError(f"{name} is null in request {request - int(offsets[step])} of step {step}")
    return _aligned(values), offsets


def _aligned(values: Any) -> Ints:
    """Return integers as an array; loops are compiled for aligned ones, and a body need not align its own."""
    array: Ints = values.to_numpy(zero_copy_only=True)
    return array if array.flags.aligned else array.copy()


def _first_null(column: Any) -> int:
    return int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])


def write_stream(batch: Any) -> bytes:
    """Write a record batch as an Arrow IPC stream."""
    sink = BytesIO()  # hands out its bytes without a copy, which Arrow's own buffers do not
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def write_times(latency_us: Floats, relative_error: Floats | None = None) -> bytes:
    """Write the body of a reply."""
    if relative_error is None:
        return write_stream(pa.record_batch([pa.array(latency_us)], schema=_TIMES))
    columns = [pa.array(latency_us), pa.array(relative_error)]
    return write_stream(pa.record_batch(columns, schema=_TIMES_AND_ERRORS))


def read_times(body: bytes) -> list[Floats]:
    """Read the columns of a reply."""
    table = pa.ipc.open_stream(body).read_all().combine_chunks()
    return [column.to_numpy() for column in table.columns]
