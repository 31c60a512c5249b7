"""bench_data is found from a clone, an editable install and an installed wheel alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import fastroof

CHECKOUT = Path(__file__).resolve().parents[1]
BASE = {"numba", "numpy", "platformdirs", "pyarrow", "pydantic", "pyyaml", "rich", "typer"}
FIND_BENCH_DATA = """
from fastroof import load_gpu
from fastroof.config.paths import bench_data_root
assert load_gpu("h100").name == "h100"
print(bench_data_root())
"""


def run(*command: str | Path, cwd: Path, pythonpath: Path | None = None, **changed: str) -> str:
    """What the command prints; its own output is shown if it fails."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **changed}
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped(folder: str, *, suffixes: tuple[str, ...] = ()) -> set[str]:
    """Files of a folder of the checkout, relative to the checkout, without what Python or numba cached."""
    files = (p for p in (CHECKOUT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(CHECKOUT).as_posix() for p in files if not suffixes or p.suffix in suffixes}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a distribution, by the name of its hook, in a process of its own."""

    def build(hook: str, **changed: str) -> Path:
        folder = tmp_path_factory.mktemp(hook)
        code = f"import sys; from hatchling.build import {hook}; print({hook}(sys.argv[1]))"
        name = run(sys.executable, "-I", "-c", code, folder, cwd=CHECKOUT, **changed).split()[-1]
        return folder / name

    return build


@pytest.fixture(scope="module")
def wheel(build: Callable[..., Path]) -> Path:
    return build("build_wheel")


def install(wheel: Path, target: Path, cwd: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", "--target", target, wheel, cwd=cwd)


def test_clone_finds_its_own_bench_data(tmp_path: Path) -> None:
    found = run(sys.executable, "-c", FIND_BENCH_DATA, cwd=tmp_path, pythonpath=CHECKOUT)
    assert Path(found.strip()) == CHECKOUT / "bench_data"


def test_editable_install_finds_the_clones_bench_data(build: Callable[..., Path], tmp_path: Path) -> None:
    install(build("build_editable"), tmp_path / "site", tmp_path)
    # A second copy would go stale.
    assert not (tmp_path / "site" / "fastroof").exists()
    # --target is no site folder, whose .pth files Python reads at its start: -S keeps the real one out.
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n{FIND_BENCH_DATA}"
    found = run(sys.executable, "-I", "-S", "-c", code, cwd=tmp_path)
    assert Path(found.strip()) == CHECKOUT / "bench_data"


@pytest.mark.slow
def test_installed_wheel_finds_the_bench_data_inside_it(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(wheel, site, tmp_path)
    found = run(sys.executable, "-c", FIND_BENCH_DATA, cwd=tmp_path, pythonpath=site)
    assert Path(found.strip()) == site.resolve() / "fastroof" / "bench_data"


def test_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    # measured runs are for benchmarks/accuracy, in a checkout
    data = {
        f"fastroof/{name}"
        for name in shipped("bench_data")
        if "/serving/" not in name
        and not name.startswith(("bench_data/kv_room.", "bench_data/public_serving."))
    }
    assert names == shipped("fastroof") | shipped("kernels_bench") | data
    assert {"fastroof/py.typed", "fastroof/bench_data/h100/gpu.toml", "kernels_bench/cli.py"} <= names
    presets = {name for name in names if name.startswith("fastroof/models/") and not name.endswith(".py")}
    assert presets, "no model presets in the wheel"


@pytest.mark.slow
def test_a_wheel_with_compiled_loops_is_for_one_python(build: Callable[..., Path], tmp_path: Path) -> None:
    """The build hook adds the folder that FASTROOF_LOOPS names; without loops the wheel stays pure."""
    loops = tmp_path / "loops"
    loops.mkdir()
    assert build("build_wheel", FASTROOF_LOOPS=str(loops)).name.endswith("-py3-none-any.whl")
    (loops / "loops-0").mkdir()
    (loops / "loops-0" / "bracket-0.loop").write_bytes(b"")
    wheel = build("build_wheel", FASTROOF_LOOPS=str(loops))
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.endswith(f"-{python}-{python}-manylinux_2_17_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "fastroof/compiled/loops/loops-0/bracket-0.loop" in archive.namelist()
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert b"Root-Is-Purelib: false" in archive.read(metadata)


def test_wheel_metadata(wheel: Path) -> None:
    info = f"fastroof-{fastroof.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{info}/licenses/LICENSE") == (CHECKOUT / "LICENSE").read_bytes()
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        plotly = "fastroof/report/html/plotly/LICENSE"
        assert archive.read(f"{info}/licenses/{plotly}") == (CHECKOUT / plotly).read_bytes()
    assert "License-Expression: Apache-2.0 AND MIT\n" in metadata
    assert "fastroof = fastroof.__main__:main\n" in entry_points
    assert "kernels-bench = kernels_bench.__main__:main" in entry_points


def test_wheel_carries_a_bill_of_materials(wheel: Path) -> None:
    info = f"fastroof-{fastroof.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        bill = json.loads(archive.read(f"{info}/sboms/fastroof.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    there = {(part["type"], part["name"], part["version"]) for part in bill["components"]}

    provenances = [
        tomllib.loads(path.read_text()) for path in (CHECKOUT / "bench_data").glob("*/*/provenance.toml")
    ]
    held = {
        ("data", entry["package"], entry["package_version"]) for entry in provenances if "package" in entry
    }
    read = [tomllib.loads(path.read_text()) for path in (CHECKOUT / "fastroof").rglob("provenance.toml")]
    shipped = [entry for entry in read if "package" in entry]
    assert {entry["package"] for entry in shipped} == {"plotly.js-basic-dist-min", "uplot"}
    held |= {("library", entry["package"], entry["package_version"]) for entry in shipped}
    tested_with = {("library", name, version) for name, version in pins("runtime")}
    assert there == held | tested_with
    assert {name for name, _ in pins("runtime")} >= BASE


def test_ci_installs_only_what_is_pinned_by_hash() -> None:
    script = "".join((CHECKOUT / ".ci" / name).read_text() for name in ("run", "wheel"))
    script = script.replace("\\\n", " ")
    installs = re.findall(r"pip\"? install (.*)", script)
    # torch, whose builds differ, and what lies in the checkout
    free = [line for line in installs if "--require-hashes" not in line and "--no-deps" not in line]
    assert free == ['--no-compile --quiet "$@"; } &&']
    wanted = re.findall(r"^ *client \S+ \S+ (\S+)$", script, re.MULTILINE)
    assert set(wanted) == {"torch==2.13.0"}
    for path in (CHECKOUT / ".ci/requirements").glob("*.txt"):
        pinned = re.findall(
            r"^[\w.-]+==[^\n]*\n(?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", path.read_text(), re.M
        )
        assert len(pinned) == len(re.findall(r"^\w", path.read_text(), re.MULTILINE)) > 0, path.name


def test_pins_are_of_every_requirement() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {
        re.match(r"[\w.-]+", line)[0] for line in [*project["dependencies"], *extras["test"], *extras["dev"]]
    }
    assert {name.lower().replace("_", "-") for name in named} <= {name for name, _ in pins("ci")}


def test_lower_bounds_are_the_versions_that_ci_tries() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    options = {
        *project["dependencies"],
        *(line for name in ("http", "report", "ui", "test") for line in extras[name]),
    }
    tried = dict(pins("lowest"))
    for line in options:
        name, bound = re.match(r"([\w.-]+)>=([\d.]+)", line).groups()
        version = tried[name.lower().replace("_", "-")]
        assert f"{version}.".startswith(f"{bound}."), f"{line}: {version}; run .ci/pin"
    script = (CHECKOUT / ".ci/run").read_text()
    assert re.search(r'^ *stage "lowest: requirements" .* -r "\$pins/lowest.txt"$', script, re.MULTILINE)


def test_container_is_made_from_what_it_is_given() -> None:
    """The image installs pins of servers and pages, from a context that has all that the wheel needs."""
    recipe = (CHECKOUT / ".github/Containerfile").read_text()
    assert re.findall(r"-r (\S+)", recipe) == [".ci/requirements/container.txt"]
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [line for extra in ("http", "report", "ui") for line in extras[extra]]
    needed = [*project["project"]["dependencies"], *wanted, "hatchling"]
    versions = dict(pins("container"))
    assert {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in needed} <= versions.keys()
    shared = versions.keys() & dict(pins("ci")).keys()
    assert {name: versions[name] for name in shared} == {name: dict(pins("ci"))[name] for name in shared}

    context = (CHECKOUT / ".dockerignore").read_text().splitlines()
    taken = {line.removeprefix("!") for line in context if line.startswith("!")}
    assert all((CHECKOUT / name).exists() for name in taken)
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    readme, licences = project["project"]["readme"], project["project"]["license-files"]
    hook = wheel["hooks"]["custom"]["path"]
    needed_files = (*wheel["only-include"], *wheel["sbom-files"], hook, ".ci/compiled_loops.py")
    for name in (*needed_files, readme, *licences, "pyproject.toml"):
        assert any(name == each or name.startswith(f"{each}/") for each in taken), name


def pins(name: str) -> list[tuple[str, str]]:
    """Names and versions that a file of pins lists."""
    text = (CHECKOUT / f".ci/requirements/{name}.txt").read_text()
    return re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)


def test_base_install_needs_no_extra() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    base = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    assert base == BASE
