"""Inject faults with ``python -m tests.faults``, kill processes with ``--kills 100``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"
os.environ["FASTROOF_TABLES_IMPORT"] = "never"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--operation", action="append", help="an operation (repeatable; see --list); default: all"
    )
    parser.add_argument(
        "--most", type=int, default=60, help="maximum number of calls of each kind to fail (default: 60)"
    )
    parser.add_argument("--cases", type=int, help="number of faults to draw per operation; default: all")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the draw and of the times of kills (default: 0)"
    )
    parser.add_argument("--json", type=Path, help="file for counts")
    parser.add_argument("--list", action="store_true", help="list the operations")
    parser.add_argument("--kills", type=int, help="number of processes to kill instead")
    args = parser.parse_args()

    from tests.faults.shim import Shim, command_with_faults

    if args.kills is not None:
        from tests.faults.kills import run_kills

        return run_kills(args.kills, args.seed)
    try:
        shim = Shim()
    except RuntimeError:
        with tempfile.TemporaryDirectory(prefix="fastroof-faults-") as folder:
            started = command_with_faults("tests.faults", sys.argv[1:], Path(folder))
            if isinstance(started, str):
                parser.error(started)
            command, environment = started
            return subprocess.run(command, env=environment, check=False).returncode

    from tests.faults.fault_runs import try_faults
    from tests.faults.operations import OPERATIONS, prepare_inputs
    from tests.faults.planted import PLANTED

    known = {operation.name: operation for operation in OPERATIONS}
    wrong_ones = {operation.name: operation for operation in PLANTED.values()}
    names = args.operation or list(known)
    known |= wrong_ones
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown operation {', '.join(unknown)}; see --list")
    if args.list:
        print("\n".join(known))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="fastroof-faults-") as folder:
        (inputs := Path(folder, "inputs")).mkdir()
        if set(names) - wrong_ones.keys():
            prepare_inputs(inputs)
        for number, name in enumerate(names):
            (work := Path(folder, str(number))).mkdir()
            began_s = time.monotonic()
            tried = try_faults(known[name], inputs, work, shim, args.most, args.cases, args.seed)
            for kind, counts in tried:
                outcomes = ", ".join(f"{number} {word}" for word, number in sorted(counts.outcomes.items()))
                print(f"{name}: {kind}: {counts.tried}: {outcomes}; {len(counts.wrong)} wrong", flush=True)
                for place, why in counts.wrong.items():
                    print(f"    {place}: {why}", flush=True)
                rows.append({"operation": name, "fault": kind, **vars(counts)})
            print(f"{name}: {time.monotonic() - began_s:.1f} s", flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    wrong = sum(len(row["wrong"]) for row in rows)
    print(f"{sum(row['tried'] for row in rows):,} faults in {len(names)} operations, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
