"""The engines whose commands are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from fastroof.engines.launch import sglang, trtllm, vllm
from fastroof.engines.launch.settings import BenchmarkLoad, Command, LaunchSettings
from fastroof.engines.values import holds_for


@dataclass(frozen=True)
class EngineCommands:
    """The commands of an engine in one of its releases.

    Attributes
    ----------
    engine, title : str
        ``vllm``, and its display name.
    release : str
        Release in which its arguments were read.
    is_of_profile : bool
        Whether the requested profile includes that release.
    image : str
        A public container image of the release.
    health : str
        Path of the health check.
    server, benchmark : callable
        Functions that return the command of one copy, and of its benchmark.
    """

    engine: str
    title: str
    release: str
    is_of_profile: bool
    image: str
    health: str
    server: Callable[[LaunchSettings], Command]
    benchmark: Callable[[BenchmarkLoad], Command]


_ENGINES: Final = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


@cache
def engine_commands(engine: str, versions: str = "") -> EngineCommands | None:
    """Return an engine's commands in the newest known release of a range of versions.

    Parameters
    ----------
    engine : str
        One of :func:`fastroof.engines.serving_engines`.
    versions : str
        Range of a profile; empty for any.

    Returns
    -------
    EngineCommands or None
        None if it is not a serving engine. If no known release is in the range, the newest known one.

    Examples
    --------
    >>> engine_commands("vllm", ">=0.14").release, engine_commands("vllm", "<0.14").release
    ('0.24.0', '0.13.0')
    >>> engine_commands("trtllm", "<1.1.0rc0").is_of_profile
    False
    """
    known = _ENGINES.get(engine)
    if known is None:
        return None
    held = [release for release in known.RELEASES if holds_for(versions, release)]
    release = held[0] if held else known.RELEASES[0]
    return EngineCommands(
        engine, known.TITLE, release, bool(held), known.IMAGE.format(release=release), known.HEALTH,
        known.server, known.benchmark,
    )  # fmt: skip
