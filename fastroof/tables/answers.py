"""What tables answer: lookups, with or without their error."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.arrays import Flags, Floats

__all__ = ["Lookup", "LookupWithError"]


class Lookup(NamedTuple):
    """Answer of a lookup, arrays of the broadcast shape of its arguments.

    Attributes
    ----------
    latency_us : ndarray of float64
        Latency, us.
    mfu : ndarray of float64
        FLOPs / (latency x peak of the dtype the kernel computes in); NaN for communication.
    origin : ndarray of uint8
        0 measured, 1 interpolated, 2 extrapolated, 3 borrowed, 4 modelled.
    """

    latency_us: Floats
    mfu: Floats
    origin: Flags


class LookupWithError(NamedTuple):
    """Answer of a lookup that was asked for its error too.

    Attributes
    ----------
    latency_us, mfu, origin
        As in :class:`Lookup`.
    relative_error : ndarray of float64
        One standard error over the latency: an 80 % interval is 1.28 of them on either side, in ln.
    """

    latency_us: Floats
    mfu: Floats
    origin: Flags
    relative_error: Floats
