"""The command line, called in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from fastroof.cli import app


def run(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    done = CliRunner().invoke(app, words, prog_name="fastroof")
    return done.exit_code, done.stdout, done.stderr


def good(*words: str) -> str:
    """Standard output of a command that succeeds."""
    done = CliRunner().invoke(app, words, prog_name="fastroof", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def document(*words: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(good(*words, "--json"))


def refused(*words: str) -> str:
    """Standard error of a command with invalid arguments."""
    done = CliRunner().invoke(app, words, prog_name="fastroof")
    assert done.exit_code == 2, done.output
    return done.stderr
