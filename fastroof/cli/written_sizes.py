"""Sizes and requests as a command line writes them: ``64,128``, ``64x4096``, ``2048@1024``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastroof.cli.output import counted
from fastroof.errors import BackendError, BatchError, LookupInputError

__all__ = [
    "Requests",
    "parse_beside",
    "parse_images",
    "parse_rates",
    "parse_requests",
    "parse_sizes",
    "parse_steps",
    "with_image_tokens",
]

MOST_REQUESTS: Final = 2**22
_NUMBER: Final = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?")
_DECODE: Final = re.compile(r"([0-9]+)x([0-9]+)")
_IMAGE: Final = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")
_PREFILL: Final = re.compile(r"(?:([0-9]+)x)?([0-9]+)@([0-9]+)")


def parse_sizes(option: str, text: str) -> int | list[int]:
    """Read one whole number or a comma-separated list of them."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if re.fullmatch(r"[+-]?[0-9]{1,18}", part) is None]
    if wrong:
        raise LookupInputError(f"{option} needs a whole number or a list such as 64,128, got {wrong[0]!r}")
    sizes = [int(part) for part in parts]
    return sizes if len(sizes) > 1 else sizes[0]


def parse_rates(text: str) -> list[float]:
    """Read requests a second: one number, or a comma-separated list of them."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (_NUMBER.fullmatch(part) and 0.0 < float(part) < math.inf)]
    if wrong:
        raise LookupInputError(f"--rate needs a number above 0 or a list such as 5,20, got {wrong[0]!r}")
    return [float(part) for part in parts]


@dataclass(frozen=True)
class Requests:
    """``count`` equal requests of a step, as (new_tokens, context_len)."""

    count: int
    new_tokens: int
    context_len: int

    @property
    def is_decode(self) -> bool:
        """Whether they are decodes."""
        return self.new_tokens == 1 and self.context_len > 0

    @property
    def words(self) -> str:
        """The requests as a person says them."""
        if self.is_decode:
            return f"{counted(self.count, 'decode')} at kv_len {self.context_len + 1}"
        after = f" after {self.context_len}" if self.context_len else ""
        return f"{counted(self.count, 'prefill')} of {counted(self.new_tokens, 'token')}{after}"


def parse_requests(decode: Sequence[str], prefill: Sequence[str]) -> list[Requests]:
    """Read ``64x4096`` (64 decodes at kv_len 4096) and ``2048@1024`` (2048 new tokens after 1024)."""
    parsed = []
    for text in decode:
        match = _DECODE.fullmatch(text)
        if match is None:
            raise BatchError(
                f"--decode {text} is not BATCHxKV_LEN: 64x4096 is 64 decodes that attend to 4096 tokens each"
            )
        batch_size, kv_len = map(int, match.groups())
        if kv_len < 2:
            raise BatchError(
                f"--decode {text}: a decode attends to itself and a context, so kv_len is at least 2; "
                f"--prefill {batch_size}x1@0 is one token without a context"
            )
        parsed.append(Requests(batch_size, 1, kv_len - 1))
    for text in prefill:
        match = _PREFILL.fullmatch(text)
        if match is None:
            raise BatchError(
                f"--prefill {text} is not [COUNTx]NEW@CONTEXT: 2048@1024 is 2048 new tokens after 1024, "
                "4x2048@0 is four prompts of 2048"
            )
        parsed.append(Requests(int(match[1] or 1), int(match[2]), int(match[3])))
    if not parsed:
        raise BatchError("nothing to time: give --decode 64x4096, --prefill 2048@0, or both")
    for requests, text in zip(parsed, (*decode, *prefill), strict=True):
        if requests.count < 1 or requests.new_tokens < 1:
            raise BatchError(f"{text}: a step needs at least 1 request of at least 1 new token")
    total = sum(requests.count for requests in parsed)
    if total > MOST_REQUESTS:
        raise BatchError(f"{total} requests in one step are more than the {MOST_REQUESTS} it can hold")
    return parsed


def parse_beside(text: str) -> tuple[int, int]:
    """Read ``32x2000``: the decodes of a step, and what each attends to."""
    match = _DECODE.fullmatch(text)
    if match is None:
        raise BackendError(f"--beside {text} is not DECODESxKV_LEN: 32x2000 is")
    return int(match[1]), int(match[2])


def parse_images(option: str, texts: Sequence[str]) -> list[tuple[int, int]]:
    """Read images as ``1024x768``: width and height in pixels."""
    images = []
    for text in texts:
        match = _IMAGE.fullmatch(text)
        if match is None:
            raise BatchError(f"{option} {text} is not WIDTHxHEIGHT in pixels: 1024x768")
        images.append((int(match[1]), int(match[2])))
    return images


def with_image_tokens(requests: Sequence[Requests], tokens: int) -> list[Requests]:
    """Add the tokens of images to the new ones of every prompt."""
    if all(one.is_decode for one in requests):
        raise BatchError(
            "images are part of a prompt: give --prefill 50@0 too, say, with the text beside them"
        )
    return [
        one if one.is_decode else Requests(one.count, one.new_tokens + tokens, one.context_len)
        for one in requests
    ]


def parse_steps(decode: Sequence[str], prefill: Sequence[str]) -> tuple[list[tuple[int, int]], list[int]]:
    """Read lists of ``32x4096`` and of ``2048``."""
    decodes, prefills = [], []
    for text in (part.strip() for given in decode for part in given.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text)
        if match is None:
            raise BatchError(f"--decode {text!r} is not BATCHxKV_LEN, such as 32x4096 or 1x1024,32x4096")
        decodes.append((int(match[1]), int(match[2])))
    for text in (part.strip() for given in prefill for part in given.split(",")):
        if re.fullmatch(r"[0-9]{1,9}", text) is None:
            raise BatchError(f"--prefill {text!r} is not a number of tokens, such as 2048 or 2048,8192")
        prefills.append(int(text))
    if not decodes and not prefills:
        raise BatchError("nothing to compare: give --decode 32x4096, --prefill 2048, or both")
    return decodes, prefills
