"""The commands that start and benchmark serving engines.

Each engine has one file; its argument names were read in the releases that the file names.
"""

from __future__ import annotations

from fastroof.engines.launch.commands import EngineCommands, engine_commands
from fastroof.engines.launch.settings import Address, BenchmarkLoad, Command, LaunchSettings, served_name

__all__ = [
    "Address", "BenchmarkLoad", "Command", "EngineCommands", "LaunchSettings", "engine_commands",
    "served_name",
]  # fmt: skip
