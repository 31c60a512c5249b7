"""Builds a bundle: wheels cut to one GPU architecture, our packages, scripts for the host, and checksums."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastroof.atomic_files import whole_folder, write_errors
from fastroof.config.gpu import GPU_FILE
from fastroof.config.paths import bench_data_root
from fastroof.errors import MeasureError
from fastroof.units import MIB
from kernels_bench.bundle import unpack
from kernels_bench.bundle.fatbin import prune
from kernels_bench.run.facts import checkout_commit

VLLM_VERSION: Final = "0.26.0"
REQUIREMENTS: Final = (
    "pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types==0.8.0", "typing-inspection==0.4.5",
    "msgspec==0.22.0", "cachetools==8.0.2", "platformdirs==4.14.8",
)  # fmt: skip
"""What vLLM needs and a host with torch, triton and transformers lacks."""
PLATFORMS: Final = (
    "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any",
)  # fmt: skip
LIBRARIES: Final = (
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
)
"""Cut to the architecture; a bundle keeps their places, since an op may be registered by one file only."""
LEFT_OUT: Final = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*", "vllm/_qutlass_C*", "vllm/_flashmla*",
)  # fmt: skip
"""What no step needs: FA2, the Rust front end, Blackwell's kernels."""

SITE_ARCHIVE: Final = "site.tar.xz"
PACKAGES_ARCHIVE: Final = "packages.tar.xz"
SCRIPTS: Final = ("env.sh", "measure_kernels.sh", "measure_steps.sh")
MARK_FILE: Final = "versions.txt"
_SUFFIXES: Final = (".py", ".csv", ".json", ".toml", ".sh", ".yaml", ".typed")
_SITECUSTOMIZE: Final = b"""\
\"\"\"Installs stand-ins in every Python process: vLLM inspects a model in a separate process.\"\"\"

import os

if os.environ.get("KERNELS_BENCH_STAND_INS") == "1":
    from kernels_bench.bundle.stand_ins import install

    install()
"""


@dataclass(frozen=True)
class BundleOptions:
    """How to build a bundle."""

    output: Path
    # Folder of wheels. Those that are missing are downloaded, unless ``is_offline``.
    wheels: Path
    # Compute capability whose code is kept, times 10.
    arch: int = 90
    python: str = "3.12"
    limit_bytes: int = 64 * MIB
    checkout: Path | None = None
    preset: int = 9
    is_offline: bool = False
    say: Callable[[str], None] = lambda sentence: None


def build_bundle(options: BundleOptions) -> int:
    """Build a bundle; return its bytes and those of the checkout, or raise a MeasureError above the limit."""
    output, say = options.output, options.say
    if output.exists() and not (output / MARK_FILE).is_file():
        raise MeasureError(f"{output} exists and is not a bundle: give another -o")
    if not options.is_offline:
        say("downloading wheels")
        download(options.wheels, options.python)
    wheels = sorted(options.wheels.glob("*.whl"))
    names = [wheel.name.partition("-")[0] for wheel in wheels]
    if names.count("vllm") != 1 or len(set(names)) < len(names):
        raise MeasureError(
            f"{options.wheels} needs one wheel a package, vllm among them, found {', '.join(names) or 'none'}"
        )
    with write_errors(f"bundle {output}", MeasureError), whole_folder(output) as folder:
        _pack(folder, wheels, options)
    size = _size(output.rglob("*")) + (0 if options.checkout is None else _size(_tracked(options.checkout)))
    if size > options.limit_bytes:
        largest = sorted(output.rglob("*"), key=lambda path: -path.stat().st_size)[:3]
        words = ", ".join(f"{path.name} {path.stat().st_size / MIB:.1f}" for path in largest)
        limit = f"{options.limit_bytes / MIB:g}"
        raise MeasureError(f"the bundle takes {size / MIB:.1f} MiB, the limit is {limit}; largest: {words}")
    return size


def download(folder: Path, python: str) -> None:
    """Download the wheels that a folder lacks, with pip."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    cpython = f"cp{python.replace('.', '')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--python-version", python, "--implementation", "cp"]
    command += [f"--abi={abi}" for abi in (cpython, "abi3", "none")]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    for requirement in (f"vllm=={VLLM_VERSION}", *REQUIREMENTS):
        if any(folder.glob(f"{re.sub('-', '_', requirement.replace('==', '-', 1))}-*.whl")):
            continue
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        if done.returncode:
            words = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise MeasureError(f"pip cannot download {requirement}: {words}")


def _pack(folder: Path, wheels: Sequence[Path], options: BundleOptions) -> None:
    carried: list[str] = []
    with ThreadPoolExecutor() as pool:
        jobs: list[Future[None]] = []
        members: list[tuple[str, bytes, int]] = []
        for wheel in wheels:
            for name, mode, read in _members(wheel):
                if name not in LIBRARIES:
                    members.append((name, read(), mode))
                    continue
                library = bytearray(read())
                before = _sha256(library)
                cut = prune(library, options.arch)
                after = _sha256(library)
                carried += [f"{before}  {name}, in {wheel.name}", f"{after}  {name}, carried"]
                options.say(
                    f"{Path(name).name}: {cut.kept_bytes / MIB:.1f} MiB of sm_{options.arch} kept, "
                    f"{cut.dropped_bytes / MIB:.1f} dropped"
                )
                jobs.append(pool.submit(_compress, folder / "lib" / f"{name}.xz", library, options.preset))
        options.say("compressing; FA3 takes longest")
        preset = min(options.preset, 6)  # what more takes in memory, source does not repay
        jobs.append(pool.submit(_archive, folder / SITE_ARCHIVE, members, preset))
        jobs.append(pool.submit(_archive, folder / PACKAGES_ARCHIVE, list(_own_files()), preset))
        for job in jobs:
            job.result()
    if missing := [name for name in LIBRARIES if not (folder / "lib" / f"{name}.xz").exists()]:
        raise MeasureError(f"the wheels hold no {', '.join(missing)}")
    host = Path(__file__).parent / "host"
    for script in SCRIPTS:
        (folder / script).write_bytes((host / script).read_bytes())
    (folder / "unpack.py").write_bytes(Path(unpack.__file__).read_bytes())
    (folder / "libraries.txt").write_text("\n".join(carried) + "\n", encoding="utf-8")
    (folder / "commit").write_text(checkout_commit() + "\n", encoding="utf-8")
    (folder / MARK_FILE).write_text("\n".join(wheel.name for wheel in wheels) + "\n", encoding="utf-8")
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{_sha256(p.read_bytes())}  {p.relative_to(folder).as_posix()}" for p in files]
    (folder / unpack.CHECKSUMS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _members(wheel: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield the name, mode and content of the files of a wheel that a bundle carries."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for one in archive.infolist():
                if not one.is_dir() and not any(fnmatch.fnmatch(one.filename, out) for out in LEFT_OUT):
                    mode = one.external_attr >> 16 & 0o777 or 0o644
                    yield one.filename, mode, lambda one=one: archive.read(one)  # type: ignore[misc]
    except zipfile.BadZipFile as error:
        raise MeasureError(f"{wheel} is not a wheel: {error}") from None


def _own_files() -> Iterator[tuple[str, bytes, int]]:
    """Yield fastroof, kernels_bench and the facts of GPUs; no tables, no pages for browsers."""
    yield "sitecustomize.py", _SITECUSTOMIZE, 0o644
    parent = Path(__file__).resolve().parents[2]
    for package in ("fastroof", "kernels_bench"):
        for path in sorted((parent / package).rglob("*")):
            name = path.relative_to(parent).as_posix()
            if path.suffix in _SUFFIXES and path.is_file() and not name.startswith("fastroof/bench_data/"):
                yield name, path.read_bytes(), 0o644
    root = bench_data_root()
    for path in sorted(root.glob(f"*/{GPU_FILE}")):
        yield f"fastroof/bench_data/{path.relative_to(root).as_posix()}", path.read_bytes(), 0o644


def _compress(path: Path, content: bytearray, preset: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", preset=preset) as file:
        file.write(content)


def _archive(path: Path, members: Iterable[tuple[str, bytes, int]], preset: int) -> None:
    """Write an archive that is the same for the same files."""
    with lzma.open(path, "wb", preset=preset) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, content, mode in sorted(members):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))


def _tracked(checkout: Path) -> list[Path]:
    """Return what of a git checkout travels: tracked files, and untracked ones that git does not ignore."""
    command = ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise MeasureError(f"{checkout} is not a git checkout") from None
    return [checkout / name for name in done.stdout.split("\0") if name]


def _sha256(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
