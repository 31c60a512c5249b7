"""Everything that writes files, as operations that make the same files again.

An operation has a folder of its own. It writes what it is asked for in two versions, so that what was there
before can be distinguished from what comes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastroof.backends.c import objects

__all__ = ["OPERATIONS", "Operation", "prepare_inputs"]

Run = Callable[[Path, Path, int, bool], None]
"""Takes the folder to write to, that of inputs, the version (0 is old), and whether a run failed before."""

OLD, NEW = 0, 1


@dataclass(frozen=True)
class Operation:
    """Something that writes files.

    Attributes
    ----------
    name : str
        Of the command or the function.
    run : callable
        Writes the files of a version, see :data:`Run`; a command ends with SystemExit.
    together : bool
        Whether its files are new or old together; else each by itself.
    replaces : bool
        Whether it replaces what is there; else it refuses to.
    leaves : str
        A pattern of what a run that failed may leave, which the next one makes use of or removes.
    stays : str
        A pattern of what a killed run leaves that later ones do not remove.
    needs_old : bool
        Whether it changes what is there, and makes nothing.
    interrupted : bool
        Whether it begins with what a killed run has left.
    always_succeeds : bool
        Whether it does its work without its files: a cache.
    reports_missing : bool
        Whether it goes on without a table that there is no memory to read: a report with a warning, a profile
        with the reason in its evidence.
    """

    name: str
    run: Run
    together: bool = True
    replaces: bool = True
    leaves: str = ""
    stays: str = ""
    needs_old: bool = False
    interrupted: bool = False
    always_succeeds: bool = False
    reports_missing: bool = False


STEPS: Final[dict[str, Any]] = {
    "models": ["llama-3.1-8b"], "tp": [1, 2], "batch_size": [1, 8], "kv_len": [1024, 8192], "keep": "all",
}  # fmt: skip
DEPLOYMENTS: Final[dict[str, Any]] = {
    "models": ["llama-3.1-8b"], "tp": [1, 2], "isl": 500, "osl": 100, "clients": [1, 8, 64],
    "keep": "pareto",
}  # fmt: skip
CAPACITIES: Final[dict[str, Any]] = {
    "models": ["llama-3.1-8b"],
    "tp": [1, 2],
    "max_num_seqs": [16, 128],
    "workload": {"requests": 40, "isl": "lognormal:600:0.5", "osl": 10, "seed": 2},
    "slo": {"ttft_p99_ms": 300, "tpot_p90_ms": 25},
}
SPECS: Final = {"steps": STEPS, "deployments": DEPLOYMENTS, "capacities": CAPACITIES}


def prepare_inputs(folder: Path) -> None:
    """Make what operations read, and cut sweeps into many small units, with a part after each."""
    from fastroof.sweep import checkpoint
    from fastroof.sweep.capacities import kind as capacity_units
    from fastroof.sweep.deployments import kind as deployment_units
    from fastroof.sweep.run import run_sweep
    from fastroof.sweep.steps import spec as step_units

    checkpoint.PART_EVERY_S = 0.0  # type: ignore[misc]
    for module in (step_units, deployment_units, capacity_units):
        for name in [name for name in vars(module) if name.endswith("_A_UNIT")]:
            setattr(module, name, 2)
    for name, spec in SPECS.items():
        for version in (OLD, NEW):
            (folder / f"{name}-{version}.json").write_text(json.dumps(_spec(spec, version)))
    for version in (OLD, NEW):
        run_sweep(_spec(DEPLOYMENTS, version), folder / f"results-{version}.parquet")
        _package(folder / f"site-{version}", version)
    _perf(folder / "perf")


def _package(site: Path, version: int) -> None:
    """A package that measured a B300; the old one lacks one source, and measured other times."""
    from tests.reference.packages import ATTENTION, GEMM, NCCL, OF_SGLANG, package

    files = {"generation": [ATTENTION], **({"nccl": [NCCL]} if version else {}), **OF_SGLANG}
    if version == OLD:
        files["gemm"] = files["gemm/sglang/0.5.14/gemm_perf"] = [GEMM | {"latency": 0.5}]
    systems = package(site, "b300_sxm", **files) / "systems"
    (systems / "query_versions.yaml").write_text(
        'defaults:\n  vllm: {current: "0.24.0"}\n  sglang: {current: "0.5.14"}\n'
    )


def _perf(root: Path) -> None:
    """A profile as LLMServingSim measures them."""
    folder = root / "RTXPRO6000" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp2"
    folder.mkdir(parents=True)
    layers = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "act_fn")
    rows = [f"{layer},64,{100.5 + number}" for number, layer in enumerate(layers)]
    (folder / "dense.csv").write_text("\n".join(("layer,tokens,time_us", *rows)) + "\n")


def _spec(spec: dict[str, Any], version: int) -> dict[str, Any]:
    return {**spec, "models": [("qwen3-8b", "llama-3.1-8b")[version]]}


def _cli(*words: str | Path) -> None:
    from fastroof.cli import main

    sys.argv = ["fastroof", *map(str, words)]
    main()


def _sweep(kind: str, suffix: str) -> Run:
    def run(folder: Path, inputs: Path, version: int, again: bool) -> None:
        from fastroof.sweep import run_sweep

        spec = json.loads((inputs / f"{kind}-{version}.json").read_text())
        # what was stopped before it had done anything is begun again
        begun = again and (folder / f".rows{suffix}.parts" / "manifest.json").exists()
        run_sweep(spec, folder / f"rows{suffix}", resume=begun)

    return run


def _export(command: str, place: str, *options: str) -> Run:
    def run(folder: Path, inputs: Path, version: int, again: bool) -> None:
        tp = (2, 1)[version]
        plan = f"llama-3.1-8b,tp={tp},name=plan,engine=vllm"
        _cli("export", command, plan, "-o", folder / place, *options)

    return run


def _export_c(folder: Path, inputs: Path, version: int, again: bool) -> None:
    """The files of the export without compiling, which takes a second; beside a file of the user's own."""

    objects.object_code = lambda *_: b"code" * 1000  # type: ignore[attr-defined]
    _export("c", "step", "--no-shared")(folder, inputs, version, again)


def _plan_file(folder: Path, inputs: Path, version: int, again: bool) -> None:
    from fastroof.backends.c.plan_file import write_plan_file

    write_plan_file(_plan(version), folder / "a.plan")


def _sglang(folder: Path, inputs: Path, version: int, again: bool) -> None:
    from fastroof.backends import sglang

    sglang.write_model(_plan(version), folder / "a.pkl")


def _plan(version: int) -> Any:
    import fastroof

    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", fastroof.load_tables("h100"), tp=(2, 1)[version], engine="kernels"
    )


def _import_by_name(folder: Path, inputs: Path, version: int, again: bool) -> None:
    from fastroof.load.by_name import ensure_imported

    package = inputs / f"site-{version}" / "aisimulate_core"
    ensure_imported("b300", always=True, root=folder / "tables", package=package)


def _import_backend(folder: Path, inputs: Path, version: int, again: bool) -> None:
    package = inputs / f"site-{version}" / "aisimulate_core"
    _cli(
        "tables", "import", "aiconfigurator", "b300", "--backend", "sglang", "--version", "0.5.14",
        "--overwrite", "--root", package, "-o", folder / "tables",
    )  # fmt: skip


def _import_profile(folder: Path, inputs: Path, version: int, again: bool) -> None:
    _cli(
        "tables", "import", "llmservingsim", inputs / "perf", "--gpu", "rtx_pro_6000", "-o",
        folder / "tables", "--overwrite", "--dtype", ("fp16", "bf16")[version],
    )  # fmt: skip


def _source(folder: Path, inputs: Path, version: int, again: bool) -> None:
    import numpy as np

    from fastroof.load.write import write_source

    rows = 5000
    gemm = {
        "dtype": np.full(rows, "bf16", object),
        "m": np.arange(1, rows + 1),
        "n": np.full(rows, 64),
        "k": np.full(rows, 64),
        "latency_us": np.random.default_rng(version).uniform(1.0, 2.0, rows),
    }
    provenance = {"gpu": "h100", "note": str(version)}
    write_source(folder / "own", {"gemm": gemm}, provenance, overwrite=True, compression_level=1)


def _flag(folder: Path, inputs: Path, version: int, again: bool) -> None:
    """Provenance of a source that is there, with other tables' flags taken out of it or written into it."""
    from fastroof.load.family_checks import flag_source
    from fastroof.load.sources import list_sources, load_sources

    source = folder / "own"
    if version == OLD:
        _slow_source(source)
        return
    assert list_sources(source)
    assert flag_source(load_sources(source), {})


def _slow_source(folder: Path) -> None:
    """Tables of which one family is slower than a launch can be."""
    import numpy as np

    from fastroof.load.write import write_source

    widths = np.repeat([64, 128], 4)
    gemm = {
        "dtype": np.full(8, "bf16", object),
        "m": np.tile([1, 2, 4, 8], 2),
        "n": widths,
        "k": np.full(8, 64),
        "latency_us": np.where(widths == 64, 900.0, 2.0),
    }
    write_source(folder, {"gemm": gemm}, {"gpu": "h100"}, overwrite=True)


def _simulate(folder: Path, inputs: Path, version: int, again: bool) -> None:
    _simulated(version, "--requests", folder / "requests.parquet", "--report", folder / "page.html")


def _simulate_csv(folder: Path, inputs: Path, version: int, again: bool) -> None:
    _simulated(version, "--requests", folder / "requests.csv")


def _simulated(version: int, *options: str | Path) -> None:
    _cli("simulate", "--model", "llama-3.1-8b", "--limit", ("40", "50")[version], *options)


def _report(folder: Path, inputs: Path, version: int, again: bool) -> None:
    _cli("report", inputs / f"results-{version}.parquet", "-o", folder / "page.html")


def _validate(folder: Path, inputs: Path, version: int, again: bool) -> None:
    words = ("--dataset", ("vllm-synchronous", "sglang-0.5.1.post1-qwen3-32b-bf16")[version])
    _cli("validate", "--gpu", "h100", *words, "--csv", folder / "rows.csv")


def _picture(suffix: str) -> Run:
    def run(folder: Path, inputs: Path, version: int, again: bool) -> None:
        _cli("plot", "pareto", inputs / f"results-{version}.parquet", "-o", folder / f"front{suffix}")

    return run


def _calibrate(folder: Path, inputs: Path, version: int, again: bool) -> None:
    _cli(
        "calibrate", "--engine", "vllm", "--gpu", "h100", "--dataset", "vllm-gpt-oss-120b-mxfp4",
        "--bootstrap", ("2", "0")[version], "-o", folder / "mine.toml",
    )  # fmt: skip


def _loops(folder: Path, inputs: Path, version: int, again: bool) -> None:
    """A loop that is compiled and kept; of the old version another one is."""
    from numba import njit

    from fastroof.compiled.loop_cache import LoopCache

    def twice(x: int) -> int:
        return 2 * x

    def thrice(x: int) -> int:
        return 3 * x

    loop = njit((twice, thrice)[version])
    loop._cache = LoopCache(loop.py_func, lambda: (folder / "loops-0",))
    assert loop(7) == (14, 21)[version]


# parts of a sweep that goes on from them; a GPU's lock
_PARTS: Final = r"\.rows\.\w+\.parts/(lock|manifest\.json|\d{9}\.arrow)?"
_IMPORTED: Final = r"tables/|tables/\.b300\.lock"

OPERATIONS: Final = (
    Operation("sweep, steps to Parquet", _sweep("steps", ".parquet"), leaves=_PARTS),
    Operation("sweep, deployments to CSV", _sweep("deployments", ".csv"), leaves=_PARTS),
    Operation("sweep, capacities to JSON lines", _sweep("capacities", ".jsonl"), leaves=_PARTS),
    Operation("sweep --resume", _sweep("steps", ".parquet"), leaves=_PARTS, interrupted=True),
    Operation("export c", _export_c),
    Operation("export llm-d", _export("llm-d", "a.yaml", "--isl", "512", "--osl", "128")),
    Operation("export llmservingsim", _export("llmservingsim", "perf", "--format", "bundle"), replaces=False),
    Operation(
        "export llmservingsim v0",
        _export("llmservingsim", "perf", "--format", "v0", "--longest", "64"),
        replaces=False,
    ),
    Operation("export npz", _export("npz", "a.npz", "--points", "4")),
    Operation("write_plan_file", _plan_file),
    Operation("sglang.write_model", _sglang),
    Operation("tables import aiconfigurator GPU", _import_by_name, leaves=_IMPORTED),
    Operation("tables import aiconfigurator --backend", _import_backend),
    Operation("tables import llmservingsim", _import_profile),
    Operation("write_source", _source),
    Operation("tables flag", _flag, needs_old=True),
    Operation("simulate --requests --report", _simulate, together=False),
    Operation("simulate --requests CSV", _simulate_csv),
    Operation("report", _report, reports_missing=True),
    Operation("validate --csv", _validate),
    Operation("plot, PNG", _picture(".png")),
    Operation("plot, SVG", _picture(".svg")),
    Operation("calibrate", _calibrate, reports_missing=True),
    Operation(
        "compiled loops",
        _loops,
        together=False,
        always_succeeds=True,
        stays=r"loops-0/\w+-code-[0-9a-f]{32}\.loop\.([0-9a-f]{16}|lock)",
    ),
)
"""All of them."""
