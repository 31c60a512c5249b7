"""Commands that need a checkout: the shipped profiles are validated by benchmarks/accuracy."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import fastroof
from fastroof.errors import FastroofError
from fastroof.option_help import HelpfulCommand

PACKAGE: Final = "benchmarks.accuracy"
DATA: Final = ("--runs", "--steps")
WITH_DATA: Final = (
    "--engine-args", "--engine-version", "--model", "--num-draft-tokens", "--accepted", "--draft",
)  # fmt: skip
"""Options of the user's data, and those that need it."""

ELSEWHERE: Final = {"validate": "judge", "calibrate": "fit"}
"""The command of benchmarks.accuracy that does the same with the shipped rows."""


class CheckoutCommand(HelpfulCommand):
    """A command on the user's data; without any, it passes its arguments to one of benchmarks.accuracy."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments about the user's data; pass on all others."""
        given = {word.partition("=")[0] for word in args}
        is_own = not given.isdisjoint((*DATA, *WITH_DATA)) and "--rows" not in given
        if not is_own and given.isdisjoint(("-h", "--help", "--help-all")) and not ctx.resilient_parsing:
            request = f"{ctx.command_path} without {' or '.join(DATA)}"
            _run_elsewhere(request, [ELSEWHERE[str(self.name)], *args])
            ctx.exit()
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def _run_elsewhere(request: str, words: list[str]) -> None:
    """Run a command of benchmarks.accuracy, which only a checkout has."""
    root = Path(fastroof.__file__).parent.parent
    if not (root / PACKAGE.replace(".", "/")).is_dir():
        raise FastroofError(
            f"{request} validates or fits the shipped profiles and needs a checkout of fastroof; "
            f"there, run python -m {PACKAGE} {words[0]}"
        )
    import_module(f"{PACKAGE}.__main__").run(words)
