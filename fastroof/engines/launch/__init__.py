"""How serving engines are started and measured: the arguments of their commands.

A file an engine; what its arguments are called was read in the releases that it names.
"""

from __future__ import annotations

from fastroof.engines.launch.commands import EngineCommands, engine_commands
from fastroof.engines.launch.settings import BenchmarkLoad, Command, LaunchSettings

__all__ = ["BenchmarkLoad", "Command", "EngineCommands", "LaunchSettings", "engine_commands"]
