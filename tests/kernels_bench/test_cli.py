"""The commands: end to end on the CPU, killed and resumed, with bad input, without heavy imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import requires
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.config.gpu import load_gpu
from fastroof.errors import GpuError, MeasureError
from kernels_bench.commands.smoke import smoke
from kernels_bench.grid.estimate import run_seconds
from kernels_bench.grid.grid import load_grid
from kernels_bench.journal import find_journals, read_journal
from kernels_bench.operators.registry import MEASURED
from kernels_bench.protocol import Point
from kernels_bench.run import request, runner, session
from kernels_bench.run.card import measured_gpu, refuse_other_gpu, write_gpu_file
from kernels_bench.run.facts import checkout_commit, software_versions, working
from tests.kernels_bench.fakes import FakeMonitor, FakeProvider, FakeTimer, command, of_type, refused

CHECKOUT = Path(__file__).resolve().parents[2]
H100 = "NVIDIA H100 80GB HBM3"

GRID = """
title = "many small points"
[[group]]
name = "gemm"
operator = "gemm"
priority = 1
dtype = "bf16"
shapes = [[32, 32], [32, 64]]
m = {start = 1, stop = 40, step = 1}
"""


def python(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, check=check)


# -- end to end --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "out"
    result = command("run", "cpu", "-o", folder, "--providers", "cpu", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert f"complete: {len(load_grid('cpu').points())} points measured" in result.stdout
    return folder


@pytest.mark.slow
def test_a_run_on_the_cpu_loads_and_every_lookup_comes_back_exactly(measured: Path) -> None:
    tables = fastroof.load_tables(measured)
    (journal,) = find_journals(measured)
    rows = of_type(read_journal(journal), "row")
    assert Counter(r["key"] for r in rows) == Counter(p.key for p in load_grid("cpu").points())
    assert set(tables.sources.values()) == {"kernels_bench"}
    looked_up = 0
    for row in rows:
        values = {k: v for k, v in row["values"].items() if k != "io_bytes"}
        if row["operator"] not in ("gemm", "attention_prefill", "attention_decode", "moe"):
            continue
        if row["operator"] == "attention_prefill" and values["q_len"] < values["kv_len"]:
            continue  # what a prefix adds is modelled
        found = tables.lookup(row["operator"], **values)
        assert float(found.latency_us) == row["latency_us"]
        assert int(found.origin) == 0
        looked_up += 1
    assert looked_up > 20
    assert sum(t.num_rows for t in tables.measured.tables.values()) == len(rows)


def test_cpu_measurements_are_not_mistaken_for_a_gpu(measured: Path) -> None:
    provenance = tomllib.loads((measured / "kernels_bench" / "provenance.toml").read_text())
    assert provenance["gpu"] == "cpu"
    (run,) = provenance["runs"].values()
    assert run["device"] == "cpu"
    assert run["facts"]["gpu_name"].startswith("no GPU: ")
    assert run["providers"] == ["cpu"]
    assert fastroof.load_gpu(measured).title.startswith("no GPU")
    with pytest.raises(GpuError, match="unknown GPU 'cpu'"):
        fastroof.load_gpu("cpu")
    for table in fastroof.load_tables(measured).measured.tables.values():
        assert set(table.columns["provider"]) == {"cpu"}


def test_the_start_line_holds_what_the_provenance_needs(measured: Path) -> None:
    start = read_journal(find_journals(measured)[0])[0]
    assert start["versions"]["numpy"] == np.__version__
    assert start["versions"]["fastroof"] == fastroof.__version__
    assert start["grid_sha256"] == load_grid("cpu").sha256
    assert (start["grid"], start["seed"]) == ("cpu", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", start["started"])
    assert start["commit"] == checkout_commit()
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", start["commit"])


def test_resuming_what_is_done_changes_no_row_and_writes_the_same_tables(measured: Path) -> None:
    (journal,) = find_journals(measured)
    rows = of_type(read_journal(journal), "row")
    table = (measured / "kernels_bench" / "gemm.csv").read_bytes()
    for arguments in (("resume", measured), ("resume", journal), ("run", "--resume", journal)):
        result = command(*arguments)
        assert result.exit_code == 0, result.output
        assert "complete: 0 points measured" in result.stdout
    assert of_type(read_journal(journal), "row") == rows
    assert (measured / "kernels_bench" / "gemm.csv").read_bytes() == table


def test_only_some_operators(tmp_path: Path) -> None:
    assert command("run", "cpu", "-o", tmp_path, "--providers", "cpu", "--only", "moe").exit_code == 0
    assert set(fastroof.load_tables(tmp_path).sources) == {"moe"}


def test_smoke_on_the_cpu_shows_every_operator() -> None:
    result = command("smoke", "--providers", "cpu")
    assert result.exit_code == 0, result.output
    for operator in {p.operator for p in load_grid("cpu").points()}:
        assert re.search(rf"cpu\s+{operator}\s.*\d\.\d\d\s.*\bok\b", result.stdout), result.stdout


def test_a_failed_smoke_check_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = FakeProvider("cpu", error_of=lambda p: 1.0 if p.operator == "moe" else 0.0)
    monkeypatch.setattr(request, "known_providers", lambda: [wrong])
    monkeypatch.setattr("kernels_bench.run.timing.CpuTimer", FakeTimer)
    result = command("smoke", "--providers", "cpu")
    assert result.exit_code == 1
    assert "reference: cpu (fake moe) is wrong" in " ".join(result.stdout.split())
    assert re.search(r"^\d+ points agree, [1-9]\d* failed, 0 skipped in", result.stdout, re.MULTILINE)


def test_a_killed_smoke_test_has_shown_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException):
        pass

    def kill_third(point: Point, call: int) -> tuple[float, float]:
        if len(timer.keys) == 3:
            raise Killed
        return 12.5, 0.0

    timer = FakeTimer(latency_us=kill_third)
    monkeypatch.setattr(request, "known_providers", lambda: [FakeProvider("cpu")])
    monkeypatch.setattr("kernels_bench.run.timing.CpuTimer", lambda: timer)
    with pytest.raises(Killed):
        smoke(providers="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"cpu .* 12\.50 us .*  fake \w+  .* ok", line) for line in lines)


def test_providers_prints_which_work_and_why_the_others_do_not() -> None:
    listed = {p["name"]: p for p in json.loads(command("providers", "--json").stdout)["providers"]}
    assert listed["cpu"]["works"]
    assert listed["cpu"]["versions"]["numpy"] == np.__version__
    assert all(p["works"] or p["reason"] for p in listed.values())
    plain = command("providers").stdout
    assert all(name in plain for name in listed)


# -- killed and resumed ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("wait_rows", [0, 1, 25])
def test_a_killed_process_is_resumed_to_every_point_once(tmp_path: Path, wait_rows: int) -> None:
    grid, folder = tmp_path / "g.toml", tmp_path / "out"
    grid.write_text(GRID)
    line = [sys.executable, "-m", "kernels_bench", "run", str(grid), "-o", str(folder), "--providers", "cpu"]
    process = subprocess.Popen(line, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and process.poll() is None:
            found = find_journals(folder)
            if found and found[0].read_bytes().count(b'"type": "row"') >= wait_rows:
                break
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "the run was over before it was killed"
    (journal,) = find_journals(folder)
    survived = of_type(read_journal(journal), "row")
    assert not (folder / "kernels_bench").exists()
    result = command("resume", folder)
    if not of_type(read_journal(journal), "start")[1:] and result.exit_code == 2:
        assert "stopped before it started" in result.stderr  # killed before its first line
        return
    assert result.exit_code == 0, result.output
    text = journal.read_text()
    assert text.endswith("\n")
    rows = [r for r in map(json.loads, text.splitlines()) if r["type"] == "row"]
    assert [r["key"] for r in rows[: len(survived)]] == [r["key"] for r in survived]
    assert Counter(r["key"] for r in rows) == Counter(p.key for p in load_grid(grid).points())
    assert fastroof.load_tables(folder).measured.tables["gemm"].num_rows == len(rows) == 80


@pytest.mark.slow
def test_sigterm_writes_the_tables_of_what_was_measured(tmp_path: Path) -> None:
    grid, folder = tmp_path / "g.toml", tmp_path / "out"
    grid.write_text(GRID)
    line = [sys.executable, "-m", "kernels_bench", "run", str(grid), "-o", str(folder), "--providers", "cpu"]
    process = subprocess.Popen(line, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        found = find_journals(folder)
        if found and found[0].read_bytes().count(b'"type": "row"') >= 5:
            break
        time.sleep(0.005)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out.startswith("interrupted: ")
    measured = fastroof.load_tables(folder).measured.tables["gemm"].num_rows
    assert 5 <= measured < 80
    assert command("resume", folder).exit_code == 0
    assert fastroof.load_tables(folder).measured.tables["gemm"].num_rows == 80


def test_a_deadline_stops_with_tables_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a clock that every look at it puts on: half way through however busy the machine is
    looks = count(1)
    monkeypatch.setattr(session, "monotonic", lambda: 0.004 * next(looks))
    grid, folder = tmp_path / "g.toml", tmp_path / "out"
    grid.write_text(GRID)
    result = command("run", grid, "-o", folder, "--providers", "cpu", "--deadline", "3.6")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("deadline: ")
    assert f"kernels-bench resume {folder} measures what is left" in " ".join(result.stdout.split())
    assert 0 < fastroof.load_tables(folder).measured.tables["gemm"].num_rows < 80


# -- bad input ---------------------------------------------------------------------------------------


def test_unknown_things_are_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "unknown provider cuda; there are vllm" in refused("run", "-o", out, "--providers", "cuda")
    assert "pass --providers cpu alone" in refused("run", "-o", out, "--providers", "cpu,torch")
    cpu = ("run", "cpu", "--providers", "cpu")
    assert "cannot be read" in refused("run", tmp_path / "no.toml", "-o", out, "--providers", "cpu")
    assert "--only conv: grid cpu has attention_decode" in refused(*cpu, "-o", out, "--only", "conv")
    assert "the cpu provider measures no h100" in refused(*cpu, "-o", out, "--gpu", "h100")
    assert "pass --deadline on a CPU" in refused(*cpu, "-o", out, "--budget", "5")
    assert "number of seconds above zero" in refused(*cpu, "-o", out, "--deadline", "-1")
    assert "give -o FOLDER" in refused(*cpu)
    assert "nothing was begun there" in refused("resume", tmp_path)
    assert "no such option" in refused("run", "--nope")
    assert not out.exists(), "a refused run left a folder"


def test_no_gpu_here_is_one_line_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    line = refused("run", "-o", tmp_path / "out")
    assert "no provider works here (vllm: torch cannot be imported" in line
    assert "--providers cpu proves the harness" in line
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_run_is_not_started_over(measured: Path) -> None:
    before = sorted(measured.rglob("*"))
    line = refused("run", "cpu", "-o", measured, "--providers", "cpu")
    assert f"`kernels-bench resume {measured}` continues it" in line
    assert sorted(measured.rglob("*")) == before


def test_a_folder_of_another_gpu_is_refused(tmp_path: Path) -> None:
    write_gpu_file(tmp_path, load_gpu("h200"), None)
    assert "holds measurements of h200, this is cpu" in refused(
        "run", "cpu", "-o", tmp_path, "--providers", "cpu"
    )
    with pytest.raises(MeasureError, match="holds measurements of h200, this is h100"):
        refuse_other_gpu(tmp_path, load_gpu("h100"))


def test_a_grid_that_changed_is_not_resumed(tmp_path: Path) -> None:
    grid, folder = tmp_path / "g.toml", tmp_path / "out"
    grid.write_text(GRID.replace("stop = 40", "stop = 2"))
    assert command("run", grid, "-o", folder, "--providers", "cpu").exit_code == 0
    grid.write_text(GRID)
    assert "is not what" in refused("resume", folder)


def test_resume_takes_no_other_options(measured: Path) -> None:
    (journal,) = find_journals(measured)
    assert "leave the others out" in refused("run", "h100", "--resume", journal)
    assert "leave the others out" in refused("run", "--resume", journal, "-o", measured)


def test_an_unwritable_output_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused("run", "cpu", "-o", tmp_path / "file" / "out", "--providers", "cpu")


# -- which card, which software ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "h100", "H100-SXM"])
def test_the_driver_names_the_card(name: str | None) -> None:
    assert measured_gpu(name, {"gpu_name": H100}, on_cpu=False).name == "h100"


def test_one_card_is_not_called_by_the_name_of_another(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="--gpu h100 is NVIDIA H100 SXM, but this is NVIDIA H200"):
        measured_gpu("h100", {"gpu_name": "NVIDIA H200"}, on_cpu=False)
    with pytest.raises(MeasureError, match="--gpu h100 is NVIDIA H100 SXM, but this is NVIDIA H100 PCIe"):
        measured_gpu("h100", {"gpu_name": "NVIDIA H100 PCIe"}, on_cpu=False)
    with pytest.raises(MeasureError, match="the driver reports the GPU 'NVIDIA RTX 9'"):
        measured_gpu(None, {"gpu_name": "NVIDIA RTX 9"}, on_cpu=False)
    with pytest.raises(MeasureError, match="does not report which GPU this is"):
        measured_gpu(None, {}, on_cpu=False)
    with pytest.raises(GpuError, match="unknown GPU 'h1000'"):
        measured_gpu("h1000", {"gpu_name": H100}, on_cpu=False)
    assert measured_gpu("h100", {}, on_cpu=False).name == "h100"


def test_a_custom_card_takes_its_facts_along(tmp_path: Path) -> None:
    own = tmp_path / "mine" / "gpu.toml"
    own.parent.mkdir()
    own.write_text((CHECKOUT / "bench_data" / "h200" / "gpu.toml").read_text().replace('name = "h200"\n', ""))
    spec = measured_gpu(str(own), {"gpu_name": "NVIDIA RTX 9"}, on_cpu=False)
    assert spec.name == "mine"
    write_gpu_file(tmp_path / "out", spec, str(own))
    assert load_gpu(tmp_path / "out") == spec


def test_a_gpu_run_with_fakes_is_laid_out_as_bench_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `run` does on a GPU, with the device's parts replaced: card, monitor, timer, memory."""
    provider = FakeProvider("torch")
    monkeypatch.setattr(request, "known_providers", lambda: [provider, FakeProvider("cpu")])
    monkeypatch.setattr(session, "usable_bytes", lambda on_cpu: 123)
    monkeypatch.setattr("kernels_bench.run.monitor.open_monitor", FakeMonitor)
    monkeypatch.setattr(
        "kernels_bench.run.timing.GraphTimer", lambda: FakeTimer(latency_us=lambda *_: (5e4, 0.0))
    )
    folder = tmp_path / "out"
    result = command("run", "smoke", "-o", folder, "--budget", "60", "--deadline", "60")
    assert result.exit_code == 0, result.output
    assert provider.max_bytes[0] == 123
    assert "the budget of 60 s drops 0 points, 0 cannot be measured on NVIDIA H100 SXM" in result.stderr
    tables = fastroof.load_tables(folder)
    assert tables.gpu == load_gpu("h100")
    assert float(tables.lookup("gemm", m=256, n=4096, k=4096, dtype="bf16").latency_us) == 5e4
    (journal,) = find_journals(folder)
    sentinels = of_type(read_journal(journal), "sentinel")
    assert {s["key"] for s in sentinels} == {p.key for p in load_grid("smoke").sentinels()}
    monkeypatch.setattr("kernels_bench.run.monitor.open_monitor", lambda: FakeMonitor(name="NVIDIA H200"))
    assert "holds measurements of h100, this is h200" in refused("resume", folder)


def test_a_budget_counts_no_point_that_no_provider_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 points are estimated at 8 s on an H100; the half that is taken fits 5 s."""
    provider = FakeProvider("torch", takes=lambda point: point.values["m"] % 2 == 0)
    monkeypatch.setattr(request, "known_providers", lambda: [provider, FakeProvider("cpu")])
    monkeypatch.setattr(session, "usable_bytes", lambda on_cpu: 123)
    monkeypatch.setattr(session, "sentinel_points", lambda tiny: ())
    monkeypatch.setattr("kernels_bench.run.monitor.open_monitor", FakeMonitor)
    monkeypatch.setattr("kernels_bench.run.timing.GraphTimer", FakeTimer)
    grid, folder = tmp_path / "g.toml", tmp_path / "out"
    grid.write_text(GRID.replace("stop = 40", "stop = 100"))
    points = load_grid(grid).points()
    gpu = load_gpu("h100")
    assert run_seconds(points, gpu) > 7 > 5 > run_seconds(points[::2], gpu)
    result = command("run", grid, "-o", folder, "--budget", "5")
    assert result.exit_code == 0, result.output
    assert "drops 0 points, 0 cannot be measured on NVIDIA H100 SXM, 100 are taken by no" in result.stderr
    (journal,) = find_journals(folder)
    records = read_journal(journal)
    rows, skips = of_type(records, "row"), of_type(records, "skip")
    assert {r["key"] for r in rows} == {p.key for p in points if p.values["m"] % 2 == 0}
    assert {s["key"] for s in skips} == {p.key for p in points if p.values["m"] % 2}
    assert {s["kind"] for s in skips} == {"unsupported"}


def test_a_resumed_run_expects_first_calls_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process imports and compiles again, at the first point that it measures."""
    monkeypatch.setattr(request, "known_providers", lambda: [FakeProvider("torch"), FakeProvider("cpu")])
    monkeypatch.setattr(session, "usable_bytes", lambda on_cpu: 123)
    monkeypatch.setattr("kernels_bench.run.monitor.open_monitor", FakeMonitor)
    calls = 0

    def interrupt_fourth(point: Point, call: int) -> tuple[float, float]:
        nonlocal calls
        if point.operator == "moe":
            calls += 1
            if calls == 4:
                raise KeyboardInterrupt
        return 10.0, 0.0

    monkeypatch.setattr("kernels_bench.run.timing.GraphTimer", lambda: FakeTimer(latency_us=interrupt_fourth))
    expected: list[list[float]] = []
    measure = runner.measure

    def seen(points: Sequence[Point], *rest: Any) -> Any:
        estimate_s = rest[-1].estimate_s
        expected.append(sorted((estimate_s(point) for point in points), reverse=True))
        return measure(points, *rest)

    monkeypatch.setattr(runner, "measure", seen)
    grid, folder = tmp_path / "g.toml", tmp_path / "out"
    experts = 'name = "experts"\noperator = "moe"\npriority = 1\ndtype = "bf16"\nnum_tokens = 16\n'
    shapes = f"shapes = {[[2048, 256 * n, 8, 64, 1, 1] for n in range(1, 7)]}\n"
    grid.write_text(f'title = "t"\n[[group]]\n{experts}{shapes}')
    assert command("run", grid, "-o", folder).exit_code == 130
    assert command("resume", folder).exit_code == 0
    first_s = MEASURED["moe"].import_s + MEASURED["moe"].compile_s
    for seconds, num_left in zip(expected, (6, 3), strict=True):
        assert first_s < seconds[0] < first_s + 0.2
        assert all(0 < one < 0.2 for one in seconds[1:num_left])
        assert not any(seconds[num_left:])


def test_a_lost_device_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FakeProvider("cpu", fails=lambda p: RuntimeError("CUDA error: unspecified launch failure"))
    monkeypatch.setattr(request, "known_providers", lambda: [failing])
    result = command("run", "cpu", "-o", tmp_path / "out", "--providers", "cpu")
    assert result.exit_code == 1
    assert result.stdout.startswith("device lost: 0 points measured")
    assert "no point was measured, so there are no tables" in result.stderr
    assert not (tmp_path / "out" / "kernels_bench").exists()


def test_a_providers_own_versions_win_and_a_broken_one_does_not_work() -> None:
    class Broken(FakeProvider):
        def availability(self):  # type: ignore[no-untyped-def]
            raise OSError("undefined symbol: _ZN2at")

    good, broken = working([FakeProvider("numpy"), Broken("broken")])
    assert (broken[1].works, broken[1].reason) == (False, "OSError: undefined symbol: _ZN2at")
    assert software_versions([good, broken])["numpy"] == "1"
    assert software_versions()["numpy"] == np.__version__


def test_cuda_and_cudnn_are_those_of_an_imported_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(
        __version__="2.11.0+cu130",
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    versions = software_versions()
    assert (versions["torch"], versions["cuda"], versions["cudnn"]) == ("2.11.0+cu130", "13.0", "91900")


# -- imports -----------------------------------------------------------------------------------------


HEAVY = {"pydantic", "numba", "llvmlite", "vllm", "matplotlib", "torch", "flashinfer", "triton"}
VLLM_GRID = ["steps", "--model", "llama-3.1-8b", "--grid"]
TYPER_NEEDS_PYDANTIC = any(r.startswith("pydantic") for r in requires("typer") or ())


def loaded(code: str, *arguments: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the code."""
    code += "\nimport sys; print('LOADED', *{m.partition('.')[0] for m in sys.modules})"
    return set(python("-c", code, *arguments).stdout.rpartition("LOADED")[2].split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["plan", "--help"], ["plan", "cpu"], VLLM_GRID]
)
def test_commands_load_nothing_heavy(arguments: Sequence[str]) -> None:
    code = (
        "import sys\n"
        "from kernels_bench.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stopped:\n    assert stopped.code == 0"
    )
    modules = loaded(code, *arguments)
    assert "typer" in modules
    # From 0.29 on typer itself parses with pydantic; the hosts that lack it have an older one.
    assert modules.isdisjoint(HEAVY - ({"pydantic"} if TYPER_NEEDS_PYDANTIC else set()))


@pytest.mark.slow
def test_no_module_of_ours_loads_pydantic_or_anything_heavy() -> None:
    # Files of kernels written in Triton are loaded when one is measured.
    code = (
        "import importlib, pkgutil, kernels_bench\n"
        "for m in pkgutil.walk_packages(kernels_bench.__path__, 'kernels_bench.'):\n"
        "    if not m.name.endswith('__main__'):\n"
        "        importlib.import_module(m.name)"
    )
    assert loaded(code).isdisjoint(HEAVY)


@pytest.mark.slow
def test_a_run_works_where_they_are_not_installed(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "sys.modules |= dict.fromkeys(('pydantic', 'numba', 'matplotlib', 'torch'))\n"
        "from kernels_bench.run.request import Request\nfrom kernels_bench.run.session import run_request\n"
        "request = Request('cpu', providers=('cpu',), only=('moe',))\n"
        "print(run_request(request, Path(sys.argv[1]))[0].reason)"
    )
    assert python("-c", code, tmp_path / "out").stdout == "complete\n"
    assert fastroof.load_tables(tmp_path / "out").sources == {"moe": "kernels_bench"}


@pytest.mark.slow
def test_module_and_help() -> None:
    done = python("-m", "kernels_bench", "--version")
    assert done.stdout == f"kernels-bench {fastroof.__version__}\n"
    text = python("-m", "kernels_bench").stdout
    for name in ("run", "resume", "smoke", "providers", "plan"):
        assert re.search(rf"^  {name}\s", text, re.MULTILINE), name
    assert os.linesep.join(["Examples:"]) in text
