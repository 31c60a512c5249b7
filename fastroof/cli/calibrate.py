"""``fastroof calibrate``: fit an engine's profile to a user's runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.checkout import CheckoutCommand
from fastroof.cli.gpu_tables import tables_of
from fastroof.cli.named_plans import DRAFTS
from fastroof.cli.options import FolderGpu, Json, flag_of
from fastroof.cli.output import print_json
from fastroof.cli.own_runs import OWN_DATA, own_document, own_runs_of, print_own_fit
from fastroof.command_group import GroupValues, taking

EPILOG: Final = """\b
Examples:
  fastroof calibrate --runs results/ --engine-args serve.txt --gpu h100 --output mine.toml
  fastroof calibrate --steps fpm_forward_perf.parquet --gpu h200 --output mine.toml
  fastroof step --model llama-3.1-8b --engine mine.toml --decode 64x4096

Runs are result files of load generators for one engine; --engine-args is how it was started. Few runs
determine few costs: leaving out each run chooses how many are fitted, and how close they stay to the
packaged profile. The output has errors on unseen runs after 3, 5, 10 and 20 runs, suspect kernels, and
reasons why runs were left out. Intervals are 95 %, from a bootstrap over runs.

--steps are whole steps. Those of an engine (aisimulate's forward passes of vLLM) count as runs. Forwards of
`vllm bench forward` have no sampler and no host: they are fitted without runs, and the profile is of the
forward alone. steps.csv of kernels-bench has only kernels, which no cost is fitted to.

Runs with draft tokens need their number and the mean tokens per step: from the engine's arguments and the
run's file, or from --num-draft-tokens, --accepted and --draft.

Without --runs and --steps it fits the shipped rows, or a CSV of rows, with other options. That needs a
checkout of fastroof: python -m benchmarks.accuracy fit --help.

\b
JSON: profile (its parts), evidence (command, hashes, intervals, errors), costs: a list [name, us, low_us,
high_us], chosen, chosen_by (error of each candidate), errors, suspects, curve, runs, steps, warnings, output
(the profile written, or null).
"""


FitTables = Annotated[str | None, typer.Option(help="Folder of measured tables.  [default: the GPU's own]")]
FitSource = Annotated[str | None, typer.Option(help="Use only this source.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write the profile to: .toml.")]
Bootstrap = Annotated[
    int | None, typer.Option(min=0, help="Number of resamples; 0 for no intervals. [default: 400]")
]


SETTINGS: Final = {"cls": CheckoutCommand}


@taking(data=OWN_DATA)
def calibrate(
    *,
    data: GroupValues,
    engine: Annotated[str | None, typer.Option(help="Engine.  [default: the one in --engine-args]")] = None,
    gpu: FolderGpu = None,
    tables: FitTables = None,
    source: FitSource = None,
    output: Output = None,
    bootstrap: Bootstrap = None,
    as_json: Json = False,
) -> None:
    """Fit an engine's profile to your own runs.

    Prints the costs that the engine adds to its kernels, their intervals, and errors on unseen runs.
    """
    from fastroof.evidence.own_fit import RESAMPLES, fit_own_runs
    from fastroof.evidence.profile_file import check_profile_path, write_profile

    if output is not None:
        check_profile_path(output)
    own = own_runs_of(data, gpu, engine, warn=not as_json)
    loaded = tables_of(tables, own.gpu or gpu, source)
    words = ["fastroof", "calibrate", *(f"--runs={path}" for path in data["runs"] or ())]
    alone = ((name, data[name]) for name in ("steps", "engine_args", *DRAFTS))
    words += [f"{flag_of(name)}={value}" for name, value in alone if value is not None]
    fitted = fit_own_runs(
        own,
        loaded,
        resamples=RESAMPLES if bootstrap is None else bootstrap,
        name="" if output is None else output.stem,
        command=shlex.join(words),
    )
    if output is not None:
        write_profile(fitted.profile, output)
    if as_json:
        print_json(own_document(fitted, own, output))
        return
    print_own_fit(fitted)
    if output is not None:
        typer.echo(f"\nwritten to {output}: --engine {output} uses it")
