"""The fuzzer: ``python -m tests.fuzz --minutes 60``, or ``--target X --case SEED`` for one case."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"
os.environ["FASTROOF_TABLES_IMPORT"] = "never"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="minutes, shared by all targets (default: 10)")
    parser.add_argument("--cases", type=int, help="cases per target, instead of a time")
    parser.add_argument("--target", action="append", help="a target (repeatable; see --list); default: all")
    parser.add_argument(
        "--case", help="run one case, given by its seed or a file, and print it with its traceback"
    )
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--keep", type=Path, help="folder for failing cases")
    parser.add_argument("--json", type=Path, help="file for counts and failures")
    parser.add_argument("--guided", action="store_true", help="coverage-guided, with atheris; one target")
    parser.add_argument("--list", action="store_true", help="list the targets")
    args = parser.parse_args()

    if args.guided:
        from tests.fuzz.guided import run_guided

        return run_guided(args.target, args.minutes or 1.0, args.keep)

    from tests.fuzz.running import Counts, run_target, table
    from tests.fuzz.targets import target_classes

    known = target_classes()
    names = args.target or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown target {', '.join(unknown)}; see --list")
    if args.list:
        print("\n".join(known))
        return 0
    if args.case is not None:
        return _one_case(known[names[0]], args.case)
    from tests.fuzz.made_plans import warm

    warm()
    counts = {}
    left_s = 60.0 * (args.minutes if args.minutes is not None else 10.0)
    for place, name in enumerate(names):
        began_s = time.monotonic()
        seconds = None if args.cases is not None else left_s / (len(names) - place)
        try:
            one = run_target(known[name], args.first, args.cases, seconds, args.keep)
        except RuntimeError as error:
            # the others go on
            one = Counts(cases=1, failed=1, failures={"no case": [1, [], str(error)]})
        counts[name] = one
        left_s -= time.monotonic() - began_s
        print(f"{name}: {one.cases:,} cases in {one.seconds:.0f} s, {one.failed} failures", flush=True)
        for where, (number, seeds, why) in one.failures.items():
            print(f"    {number} x {where}: seeds {seeds}: {why}", flush=True)
        if args.json:
            import json

            args.json.write_text(json.dumps({key: vars(value) for key, value in counts.items()}, indent=1))
    print(table(counts))
    return int(any(one.failed for one in counts.values()))


def _one_case(kind: type, given: str) -> int:
    """Print one case and its traceback."""
    from tests.fuzz.corpus_files import read_case
    from tests.fuzz.judge import FAILED, case_of, judge
    from tests.fuzz.running import warnings_are_errors

    with tempfile.TemporaryDirectory(prefix="fastroof-fuzz-") as folder:
        target = kind()
        target.begin(Path(folder))
        case = read_case(Path(given)) if Path(given).is_file() else case_of(target, int(given))
        print(f"{len(case):,} bytes: {case[:2000]!r}", flush=True)
        with warnings.catch_warnings():
            warnings_are_errors()
            try:
                target.check(case)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            verdict = judge(target, case)
        target.close()
    print(verdict.kind, verdict.why)
    return int(verdict.kind == FAILED)


if __name__ == "__main__":
    sys.exit(main())
