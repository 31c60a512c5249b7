"""HTTP requests whose head states the length of the body more than once.

If a proxy and a server read such a head differently, the rest of a body counts as another client's request
(request smuggling). h11 accepts ``Transfer-Encoding`` together with ``Content-Length``, and repeated equal
lengths, as RFC 9112 permits; a server that may run behind a proxy refuses them.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["framing_fault"]

_END: Final = re.compile(rb"\n\r?\n")


def framing_fault(data: bytes) -> str:
    r"""Return why the length of a request is ambiguous; empty if it is not, or if its head is incomplete.

    Parameters
    ----------
    data : bytes
        From the first byte of a request.

    Examples
    --------
    >>> framing_fault(b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n")
    'Content-Length and Transfer-Encoding together'
    >>> framing_fault(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
    ''
    """
    end = _END.search(data)
    if end is None:
        return ""
    first, *lines = data[: end.start()].split(b"\n")
    names = [line.partition(b":")[0].strip().lower() for line in lines]
    lengths, codings = names.count(b"content-length"), names.count(b"transfer-encoding")
    if lengths and codings:
        return "Content-Length and Transfer-Encoding together"
    if lengths > 1 or codings > 1:
        return "Content-Length or Transfer-Encoding twice"
    for name, line in zip(names, lines, strict=True):
        if name == b"content-length" and b"," in line:
            return "Content-Length of several values"
        if line[:1] in b" \t" and line.strip():
            return "a header of several lines"
    if codings and first.rstrip().endswith(b"HTTP/1.0"):
        return "Transfer-Encoding in HTTP/1.0"
    return ""
