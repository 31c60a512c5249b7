"""The record of answers: what is in it, and how it is made anew.

``tests/frozen/recorded`` holds a file a group, of some 230,000 answers in all: latencies, components,
origins, memory, errors, energy, lookups, estimates, sweeps' rows, exports, simulations, the best deployments,
capacities, starts of engines, replies of the server. ``test_frozen.py`` computes the same answers again and
compares to the last bit; only what goes through transcendental functions of NumPy or through BLAS and LAPACK
(errors, percentiles, experts, fits by least squares, energy, summaries of runs) may differ by 1e-12 of
itself, since its last bit depends on the processor. Where more numbers are computed than need to be read,
their hash is kept, or two sums of them.

To see what differs from the record::

    python -m tests.frozen.record --compare [GROUP ...]

To record an intended change, name the groups that it changes, and no others; what it prints of the
differences belongs into the commit, which explains why they are right::

    python -m tests.frozen.record GROUP ...

Large groups have parts, which tests ask for one by one.

A renamed name of the product is renamed in ``tests/frozen/product.py``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from tests.frozen import (
    of_deployments,
    of_exports,
    of_messages,
    of_plans,
    of_serving,
    of_simulations,
    of_sweeps,
    of_tables,
    product,
)
from tests.frozen.answers import FOLDER, Answer, Answers, Difference, differences, read_answers, write_answers

DRIVERS: Final = ("plain", "replicas", "ranks", "stages", "pools", "autoscaled", "tiers")
PARTS: Final[dict[str, dict[str, Callable[[], Answers]]]] = {
    **{
        f"simulations-{driver}": {
            name: partial(of_simulations.simulations, name)
            for name in of_simulations.DEPLOYMENTS
            if name.partition("-")[0] == driver
        }
        for driver in DRIVERS
    },
    **{
        f"best-{kind}": {name: partial(of_deployments.best, kind, name) for name in questions}
        for kind, questions in of_deployments.BEST.items()
    },
    "best-at-rates": {name: partial(of_deployments.best_at_rates, name) for name in of_deployments.RATES},
    "best-shared": {"shared": of_deployments.shared_gpus},
    "capacities": {name: partial(of_deployments.capacities, name) for name in of_deployments.CAPACITIES},
    "fits": {kind: partial(of_deployments.fits, kind) for kind in of_deployments.FITS},
    "energy": {case: partial(of_plans.energy, case) for case in of_plans.POWERED},
    "messages": {plan: partial(of_messages.messages, plan) for plan in of_messages.SERVED},
}
"""Groups whose parts are computed one by one: the cases of each begin with its name and a colon."""


GROUPS: Final[dict[str, Callable[[], Answers]]] = {
    **{f"plans-{model}": partial(of_plans.preset_plans, model) for model in product.PRESETS},
    "plans-of-kinds": of_plans.kinds_plans,
    "plans-datasheet": of_plans.datasheet_plans,
    "plans-options": of_plans.options,
    "plans-errors": of_plans.errors,
    "plans-explained": of_plans.explanations,
    **{f"lookups-{operator}": partial(of_tables.lookups, operator) for operator in of_tables.QUERIES},
    "lookups-errors": of_tables.lookup_errors,
    "lookups-holdout": of_tables.holdout,
    "measuring-grids": of_tables.grids,
    "estimates": of_serving.estimates,
    "estimates-by-default": of_serving.estimates_by_default,
    "estimates-disaggregated": of_serving.disaggregated,
    "estimates-of-measured-rows": of_serving.measured_rows,
    "sweeps-of-steps": of_sweeps.steps,
    "sweeps-of-deployments": of_sweeps.deployments,
    "sweeps-of-deployments-trtllm": of_sweeps.deployments_of_trtllm,
    "sweeps-of-deployments-disaggregated": of_sweeps.disaggregated_deployments,
    "sweeps-in-arrays": of_sweeps.grids_of_steps,
    "exports-dynamo": of_exports.dynamo,
    "exports-llm-d": of_exports.llm_d,
    "exports-llmservingsim": of_exports.llmservingsim,
    "results": of_exports.results,
    "refusals": of_exports.refusals,
}
"""Groups that are computed at once."""


def group_answers(group: str) -> list[Answer]:
    parts = PARTS[group].values() if group in PARTS else [GROUPS[group]]
    return [answer for call in parts for answer in call().listed]


def summary(group: str, found: list[Difference], shown: int = 8) -> str:
    """Say how many answers of a group differ, in which quantities and by how much, with the first few."""
    lines = [f"{group}: {len(found)} answers are not those recorded" if found else f"{group}: as recorded"]
    for quantity, count in Counter(difference.quantity for difference in found).most_common():
        largest = max(difference.relative for difference in found if difference.quantity == quantity)
        lines.append(f"  {quantity}: {count}, by up to {largest:.1e} of themselves")
    lines += [f"    {difference}" for difference in found[:shown]]
    return "\n".join(lines)


def main() -> None:
    """Compare groups with their record, or record them anew."""
    names = [*GROUPS, *PARTS]
    parser = argparse.ArgumentParser(
        description="Record what the product answers, or compare with the record."
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(names))
    parser.add_argument("--compare", action="store_true", help="write nothing; without a group compare all")
    parser.add_argument("--all", action="store_true", help="record every group")
    given = parser.parse_args()
    unknown = sorted({*given.groups} - {*names})
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(names)}")
    if not given.groups and not given.compare and not given.all:
        parser.error("name the groups to record, or --all, or --compare")
    for group in given.groups or names:
        current = group_answers(group)
        is_new = not (FOLDER / f"{group}.parquet").exists()
        print(summary(group, differences([] if is_new else read_answers(group), current)), flush=True)
        if not given.compare:
            print(f"{group}: {len(current)} answers, {write_answers(group, current)} bytes", flush=True)


if __name__ == "__main__":
    # what ships alone, as tests/conftest.py has it: nothing that this machine imported
    with tempfile.TemporaryDirectory() as no_tables:
        os.environ |= {"FASTROOF_TABLES": no_tables, "FASTROOF_TABLES_IMPORT": "never"}
        main()
