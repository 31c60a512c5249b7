"""Cases that follow coverage, for targets whose cases are any bytes: by atheris, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.corpus_files import corpus_cases, keep_case

__all__ = ["run_guided"]

SEEDED = 200
"""Cases of seeds that it begins with, beside the examples and the corpus."""

LONGEST_BYTES = 2**16


def run_guided(names: Sequence[str] | None, minutes: float, kept: Path | None) -> int:
    """Run one target for some minutes, print what was found, and return the exit code.

    Parameters
    ----------
    names : sequence of str or None
        The target, alone.
    minutes : float
        How long.
    kept : Path or None
        A folder for the cases that fail.
    """
    if importlib.util.find_spec("atheris") is None:
        print("--guided needs atheris: pip install atheris", file=sys.stderr)
        return 2
    if names is None or len(names) != 1:
        print("--guided takes one --target", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fastroof-fuzz-") as folder:
        place = Path(folder)
        pid = os.fork()
        if pid == 0:
            # libFuzzer ends the process that it runs in
            _fuzz(names[0], minutes, place, kept)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        found = place / "counts.json"
        counts = json.loads(found.read_text()) if found.exists() else {"failures": {}}
        print(json.dumps(counts, indent=1))
        if status:
            print(f"the process ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
        return int(bool(counts["failures"] or status))


def _fuzz(name: str, minutes: float, place: Path, kept: Path | None) -> None:
    import atheris

    # numba compiles the loops from their own bytecode
    with atheris.instrument_imports(
        include=["fastroof"], exclude=["fastroof.compiled"], enable_loader_override=False
    ):
        import fastroof.backends.serve.answers
        import fastroof.config
        import fastroof.load
        import fastroof.models
        import fastroof.simulation
        import fastroof.sweep
        import fastroof.tables  # noqa: F401

    from tests.fuzz.judge import FAILED, case_of, judge
    from tests.fuzz.running import warnings_are_errors
    from tests.fuzz.targets import target_classes

    kind = target_classes()[name]
    if not kind.is_bytes:
        print(f"cases of {name} are written out, not any bytes: run it without --guided", file=sys.stderr)
        os._exit(2)
    target = kind()
    for folder in ("own", "seeds"):
        (place / folder).mkdir()
    target.begin(place / "own")
    seeds = [*target.examples(), *corpus_cases(name).values()]
    seeds += [case_of(target, seed) for seed in range(SEEDED)]
    for number, case in enumerate(seeds):
        (place / "seeds" / str(number)).write_bytes(case)
    counts: dict[str, int] = {}
    failures: dict[str, str] = {}
    done = 0

    def one(case: bytes) -> None:
        nonlocal done
        with warnings.catch_warnings():
            warnings_are_errors()
            verdict = judge(target, case)
        done += 1
        counts[verdict.kind] = counts.get(verdict.kind, 0) + 1
        is_new = verdict.kind == FAILED and verdict.place not in failures
        if is_new:
            failures[verdict.place] = verdict.why
            if kept is not None:
                keep_case(name, f"guided-{len(failures)}{kind.suffix}", case, kept)
        if is_new or done % 100 == 0:
            (place / "counts.json").write_text(json.dumps({**counts, "failures": failures}))

    # the judge decides what takes too long
    limits = {"max_total_time": round(60 * minutes), "max_len": LONGEST_BYTES, "timeout": 3600}
    others = {"rss_limit_mb": 0, "verbosity": 0, "artifact_prefix": f"{place}/"}
    words = [f"-{limit}={value}" for limit, value in {**limits, **others}.items()]
    atheris.Setup([sys.argv[0], *words, str(place / "seeds")], one)
    atheris.Fuzz()
