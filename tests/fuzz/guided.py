"""Coverage-guided cases, with atheris: ``python -m tests.fuzz.guided TARGET FOLDER [LIBFUZZER_OPTION]...``.

For targets whose cases may be any bytes. FOLDER gets the examples, the corpus and 200 seeded cases to begin
with, then what reaches new code. libFuzzer ends at the first failure and writes it to the working directory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

SEEDED = 200
LONGEST_BYTES = 2**16


def main(name: str, folder: str, *options: str) -> int | None:
    os.environ |= {"MPLBACKEND": "Agg", "FASTROOF_TABLES_IMPORT": "never"}
    try:
        import atheris
    except ImportError:
        print("coverage-guided cases need atheris: pip install atheris", file=sys.stderr)
        return 2
    # numba compiles the loops from their own bytecode
    with atheris.instrument_imports(
        include=["fastroof"], exclude=["fastroof.compiled"], enable_loader_override=False
    ):
        from tests.fuzz.targets import target_classes
    from tests.fuzz.judge import FAILED, case_of, judge, warnings_are_errors

    kind = target_classes()[name]
    if not kind.is_bytes:
        print(f"cases of {name} are written out, not any bytes: use pytest --fuzz-cases", file=sys.stderr)
        return 2
    target = kind()
    target.begin(Path(tempfile.mkdtemp(prefix="fastroof-fuzz-")))
    seeds = Path(folder)
    seeds.mkdir(parents=True, exist_ok=True)
    cases = [*target.examples(), *target.corpus().values(), *(case_of(target, i) for i in range(SEEDED))]
    for number, case in enumerate(cases):
        (seeds / f"seed-{number}").write_bytes(case)

    def one(case: bytes) -> None:
        with warnings_are_errors():
            verdict = judge(target, case)
        if verdict.kind == FAILED:
            raise AssertionError(verdict.why) from verdict.error

    # the judge decides what takes too long, or too much memory
    limits = (f"-max_len={LONGEST_BYTES}", "-timeout=3600", "-rss_limit_mb=0")
    atheris.Setup([sys.argv[0], *limits, *options, folder], one)
    atheris.Fuzz()
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
