"""The engines whose commands are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

from fastroof.engines.launch import sglang, trtllm, vllm
from fastroof.engines.launch.settings import BenchmarkLoad, Command, LaunchSettings, Servers
from fastroof.engines.values import holds_for, is_version


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
        Whether it is the requested version, or one of the requested profile.
    image : str
        A public container image of the release.
    health : str
        Path of the health check.
    side_port : int
        Port of KV transfers that workers of a role take if they have a machine of their own; 0 for none.
    router_name, router_image : str
        The router with its version, and its container image.
    server, benchmark, router : callable
        Functions that return the command of one copy, of its benchmark, and of the router in front of copies
        on a port (None if it has none for them).
    """

    engine: str
    title: str
    release: str
    is_of_profile: bool
    image: str
    health: str
    side_port: int
    router_name: str
    router_image: str
    server: Callable[[LaunchSettings], Command]
    benchmark: Callable[[BenchmarkLoad], Command]
    router: Callable[[Servers, int], Command | None]


_ENGINES: Final = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


@lru_cache(256)
def engine_commands(engine: str, versions: str = "", version: str = "") -> EngineCommands | None:
    """Return an engine's commands in the release that comes closest to a version, or to a range of them.

    Parameters
    ----------
    engine : str
        One of :func:`fastroof.engines.serving_engines`.
    versions : str
        Range of a profile; empty for any.
    version : str
        Version of the engine; empty for the newest known one in the range. A name that is not a version
        (``nightly``) counts as none.

    Returns
    -------
    EngineCommands or None
        None if it is not a serving engine. The newest known release up to the version, or in the range; the
        oldest known one for a version before all of them, the newest if none is in the range.

    Examples
    --------
    >>> engine_commands("vllm", ">=0.14").release, engine_commands("vllm", "<0.14").release
    ('0.33.0', '0.13.0')
    >>> before = engine_commands("sglang", version="0.5.10")
    >>> before.release, before.is_of_profile
    ('0.5.9', False)
    >>> engine_commands("trtllm", "<1.1.0rc0").is_of_profile
    False
    """
    known = _ENGINES.get(engine)
    if known is None:
        return None
    if is_version(version):
        held = [release for release in known.RELEASES if holds_for(f"<={version}", release)]
        release = held[0] if held else known.RELEASES[-1]
        is_of_profile = holds_for(f"=={version}", release)
    else:
        held = [release for release in known.RELEASES if holds_for(versions, release)]
        release = held[0] if held else known.RELEASES[0]
        is_of_profile = bool(held)
    return EngineCommands(
        engine, known.TITLE, release, is_of_profile, known.IMAGE.format(release=release), known.HEALTH,
        known.SIDE_PORT, known.ROUTER, known.ROUTER_IMAGE.format(release=release),
        partial(known.server, release=release), partial(known.benchmark, release=release), known.router,
    )  # fmt: skip
