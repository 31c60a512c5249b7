"""The bundle: what is cut, what is carried, its checks, and its scripts on a host without a GPU."""

import hashlib
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fastroof.errors import MeasureError
from fastroof.units import MIB
from kernels_bench.bundle import build as module
from kernels_bench.bundle.build import LIBRARIES, BundleOptions, build_bundle, download
from kernels_bench.bundle.fatbin import HEADER, MACHINE_CODE, MAGIC, PTX, containers, prune
from kernels_bench.bundle.unpack import unpack
from kernels_bench.cli import main


def entry(kind, arch, size):
    body = np.random.default_rng(size + arch).bytes(size)
    return (
        struct.pack("<HHIQ", kind, 0, 64, size).ljust(28, b"\0") + struct.pack("<I", arch) + bytes(32) + body
    )


def library(*rows):
    """A library of containers, each a row of (kind, arch, size), between unrelated bytes."""
    data = b"\x7fELF before " + MAGIC + b" the magic by chance "
    for row in rows:
        body = b"".join(entry(*one) for one in row)
        data += MAGIC + struct.pack("<HHQ", 1, HEADER, len(body)) + body + b"between"
    return bytearray(data)


ROWS = (
    ((MACHINE_CODE, 80, 3000), (MACHINE_CODE, 90, 2000), (PTX, 90, 1000)),
    ((MACHINE_CODE, 90, 500), (MACHINE_CODE, 100, 900)),
    ((MACHINE_CODE, 89, 400), (PTX, 80, 300)),
    ((PTX, 75, 100),),
)


class TestPruning:
    def test_only_code_of_the_architecture_is_kept_in_place(self):
        data = library(*ROWS)
        before = bytes(data)
        begins = [begin for begin, _, _ in containers(data)]
        cut = prune(data, 90)
        assert len(data) == len(before)
        kept = [entries for _, _, entries in containers(data)]
        assert [begin for begin, _, _ in containers(data)] == begins
        assert [(e.kind, e.arch) for e in kept[0]] == [(MACHINE_CODE, 90)]
        assert kept[0][0].data == entry(MACHINE_CODE, 90, 2000)
        assert kept[1][0].data == entry(MACHINE_CODE, 90, 500)
        assert all(len(entries) == 1 for entries in kept)
        for begin in begins:  # everything but code is unchanged
            assert data[begin - 7 : begin + 8] == before[begin - 7 : begin + 8]
        assert len(lzma.compress(data)) < len(lzma.compress(before)) / 2
        assert cut.kept_bytes + cut.dropped_bytes == sum(64 + size for row in ROWS for _, _, size in row)

    def test_pruning_twice_changes_nothing(self):
        data = library(*ROWS)
        prune(data, 90)
        once = bytes(data)
        prune(data, 90)
        assert bytes(data) == once

    def test_an_architecture_that_is_missing(self):
        with pytest.raises(MeasureError, match=r"no code for sm_70, only for \[80, 89, 90, 100\]"):
            prune(library(*ROWS), 70)
        with pytest.raises(MeasureError, match="only for no GPU"):
            prune(bytearray(b"no library"), 90)

    @pytest.mark.parametrize("seed", range(20))
    def test_broken_libraries_do_not_hang_or_read_beyond_their_end(self, seed):
        random = np.random.default_rng(seed)
        data = library(*ROWS)[: random.integers(20, 8000)]
        for _ in range(5):
            data[random.integers(len(data))] = random.integers(256)
        for begin, end, _ in containers(data):
            assert 0 <= begin < end <= len(data)


def wheel(folder, name, files):
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return path


def make_wheels(folder):
    folder.mkdir()
    wheel(folder, "vllm-0.26.0", {
        "vllm/__init__.py": "NAME = 'stands in for vllm'\n", "vllm/_flashmla_C.abi3.so": bytes(100),
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": bytes(100),
        **{name: bytes(library(*ROWS)) for name in LIBRARIES},
    })  # fmt: skip
    wheel(
        folder, "cachetools-8.0.2", {"cachetools/__init__.py": "", "cachetools-8.0.2.dist-info/METADATA": ""}
    )
    return folder


@pytest.fixture
def wheels(tmp_path):
    return make_wheels(tmp_path / "wheels")


def build(wheels, output, **changes):
    return build_bundle(BundleOptions(output, wheels, **{"is_offline": True, "preset": 0, **changes}))


@pytest.fixture(scope="module")
def whole_bundle(tmp_path_factory):
    """With all of our packages, which take a second to compress; unpacked once."""
    folder = tmp_path_factory.mktemp("bundle")
    build(make_wheels(folder / "wheels"), folder / ".gpu")
    unpack(folder / ".gpu", folder / "host")
    return folder / ".gpu"


@pytest.fixture
def small(monkeypatch):
    """Bundles without our packages."""
    monkeypatch.setattr(module, "_own_files", lambda: [("ours.py", bytes(9), 0o644)])


@pytest.fixture
def bundle(small, wheels, tmp_path):
    build(wheels, tmp_path / ".gpu")
    return tmp_path / ".gpu"


def test_every_kind_of_data_file_travels():
    carried = {Path(name).suffix for name, _, _ in module._own_files()}
    root = Path(module.__file__).resolve().parents[2]
    files = [path for folder in ("fastroof", "kernels_bench") for path in (root / folder).rglob("*")]
    pages = ("assets", "plotly", "c", "bench_data", "__pycache__")
    read = {path.suffix for path in files if path.is_file() and not set(pages) & set(path.parts)}
    assert read - carried <= {".md", ".ipynb", ".svg", ".template"}


class TestBuilding:
    def test_what_it_holds(self, whole_bundle):
        names = {
            path.relative_to(whole_bundle).as_posix() for path in whole_bundle.rglob("*") if path.is_file()
        }
        assert {f"lib/{name}.xz" for name in LIBRARIES} < names
        assert {"env.sh", "measure_kernels.sh", "measure_steps.sh", "unpack.py", "commit"} < names
        assert (whole_bundle / "versions.txt").read_text().split() == [
            "cachetools-8.0.2-py3-none-any.whl",
            "vllm-0.26.0-py3-none-any.whl",
        ]
        with tarfile.open(whole_bundle / "site.tar.xz") as archive:
            assert set(archive.getnames()) == {
                "vllm/__init__.py",
                "cachetools/__init__.py",
                "cachetools-8.0.2.dist-info/METADATA",
            }
        with tarfile.open(whole_bundle / "packages.tar.xz") as archive:
            own = set(archive.getnames())
        assert {
            "sitecustomize.py", "kernels_bench/cli.py", "kernels_bench/grid/grids/first_run.toml",
            "fastroof/models/presets/llama-3.1-8b.json", "fastroof/bench_data/h100/gpu.toml",
        } < own  # fmt: skip
        assert not {name for name in own if name.endswith((".parquet", ".js", ".pyc"))}

    def test_checksums_are_of_every_file(self, bundle):
        lines = [line.split("  ") for line in (bundle / "sha256.txt").read_text().splitlines()]
        files = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()}
        assert {name for _, name in lines} == files - {"sha256.txt"}
        for digest, name in lines:
            assert hashlib.sha256((bundle / name).read_bytes()).hexdigest() == digest
        before = hashlib.sha256(library(*ROWS)).hexdigest()
        assert (bundle / "libraries.txt").read_text().count(before) == len(LIBRARIES)

    def test_the_same_wheels_make_the_same_bundle(self, bundle, wheels, tmp_path):
        build(wheels, tmp_path / "again")
        assert (tmp_path / "again" / "sha256.txt").read_bytes() == (bundle / "sha256.txt").read_bytes()

    def test_an_earlier_bundle_is_replaced_and_nothing_else(self, bundle, wheels, tmp_path):
        (bundle / "old").write_text("")
        build(wheels, bundle)
        assert not (bundle / "old").exists()
        mine = tmp_path / "mine"
        mine.mkdir()
        with pytest.raises(MeasureError, match="is not a bundle: give another -o"):
            build(wheels, mine)

    def test_git_ignores_it(self, small, wheels, tmp_path):
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        build(wheels, tmp_path / ".gpu")
        command = ["git", "-C", str(tmp_path), "status", "--porcelain", ".gpu"]
        assert not subprocess.run(command, capture_output=True, check=True).stdout

    def test_the_limit_counts_a_checkout_that_travels_along(self, small, wheels, tmp_path):
        checkout = tmp_path / "checkout"
        checkout.mkdir()
        subprocess.run(["git", "init", "-q", str(checkout)], check=True)
        (checkout / ".gitignore").write_text("ignored\n")
        (checkout / "file").write_bytes(bytes(MIB))
        (checkout / "ignored").write_bytes(bytes(3 * MIB))
        alone = build(wheels, tmp_path / ".gpu")
        assert build(wheels, tmp_path / ".gpu", checkout=checkout) == alone + MIB + len("ignored\n")
        with pytest.raises(MeasureError, match=r"\d MiB, the limit is 1; largest: "):
            build(wheels, tmp_path / ".gpu", checkout=checkout, limit_bytes=MIB)
        with pytest.raises(MeasureError, match="is not a git checkout"):
            build(wheels, tmp_path / ".gpu", checkout=wheels)

    def test_wheels_that_are_missing_or_twice(self, small, wheels, tmp_path):
        with pytest.raises(MeasureError, match="found none"):
            build(tmp_path / "nowhere", tmp_path / ".gpu")
        wheel(wheels, "vllm-0.25.0", {})
        with pytest.raises(MeasureError, match="one wheel a package, vllm among them, found cache"):
            build(wheels, tmp_path / ".gpu")
        (wheels / "vllm-0.26.0-py3-none-any.whl").unlink()
        with pytest.raises(MeasureError, match="the wheels hold no vllm/vllm_flash_attn/"):
            build(wheels, tmp_path / ".gpu")
        (wheels / "vllm-0.25.0-py3-none-any.whl").write_bytes(b"no zip")
        with pytest.raises(MeasureError, match="is not a wheel"):
            build(wheels, tmp_path / ".gpu")
        assert not (tmp_path / ".gpu").exists()

    def test_a_download_that_fails_is_one_line(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(MeasureError, match=r"pip cannot download vllm==0\.26\.0: "):
            download(tmp_path / "wheels", "3.12")


class TestUnpacking:
    def test_libraries_lie_where_vllm_looks_for_them(self, bundle, tmp_path, capsys):
        assert unpack(bundle, tmp_path / "host") == []
        cut = library(*ROWS)
        prune(cut, 90)
        for name in LIBRARIES:
            assert (tmp_path / "host" / "site" / name).read_bytes() == cut
        assert (tmp_path / "host" / "sha256.txt").read_bytes() == (bundle / "sha256.txt").read_bytes()
        assert "0 failed" in capsys.readouterr().out

    def test_another_bundle_replaces_what_was_unpacked(self, bundle, tmp_path):
        script = f'. "{bundle}/env.sh"; ls "$UNPACKED/site"'
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {**os.environ, "PATH": path, "KERNELS_BENCH_UNPACKED": str(tmp_path / "host")}

        def source():
            done = subprocess.run(
                ["bash", "-c", script], env=given, capture_output=True, text=True, check=True
            )
            return done.stdout.split("unpacked in")

        assert len(source()) == 2
        (tmp_path / "host" / "site" / "old").write_text("")
        (names,) = source()  # the same bundle stays
        assert "old" in names.split()
        (bundle / "sha256.txt").write_text(2 * (bundle / "sha256.txt").read_text(), encoding="utf-8")
        _, names = source()
        assert "old" not in names.split()
        assert "ours.py" in names.split()

    def test_what_is_damaged_is_named_and_the_rest_unpacked(self, bundle, tmp_path):
        broken = bundle / "lib" / f"{LIBRARIES[0]}.xz"
        broken.write_bytes(broken.read_bytes()[:50])
        failed = unpack(bundle, tmp_path / "host")
        assert any("_vllm_fa3_C.abi3.so.xz is missing or differs" in reason for reason in failed)
        assert len(failed) == 2
        assert (tmp_path / "host" / "site" / LIBRARIES[1]).is_file()


def host(script, bundle, tmp_path, *arguments, **environment):
    """Run a script of the bundle as a host would: with its own folder, Python first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    given = {
        "PATH": path,
        "OUT": str(tmp_path / "out"),
        "KERNELS_BENCH_UNPACKED": str(bundle.parent / "host"),
    }
    return subprocess.run(
        ["bash", str(bundle / script), *arguments],
        env={**kept, **given, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )


def returned(tmp_path):
    """Files that a script leaves; a host may return no more than eight, a log of the call among them."""
    names = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert len(names) <= 7
    assert max(len(name.parts) for name in names) <= 3
    return {name.as_posix() for name in names}


@pytest.mark.slow
class TestHost:
    def test_kernels_are_measured_by_the_bundles_own_code(self, whole_bundle, tmp_path):
        done = host(
            "measure_kernels.sh", whole_bundle, tmp_path, "90", "cpu", "--providers", "cpu", "--only", "gemm"
        )
        assert "run: exit code 0" in done.stdout, done.stdout + done.stderr
        (journal,) = (tmp_path / "out" / "run").glob("journal-*.jsonl")
        assert '"type": "row"' in journal.read_text()
        # a folder of its own, so that another call measures anew
        assert len(list((whole_bundle.parent / "host").glob("run-*/journal-*.jsonl"))) == 1
        assert returned(tmp_path) == {
            "host.txt", "run.log", "run/gpu.toml", f"run/{journal.name}",
        }  # fmt: skip
        assert str(whole_bundle.parent / "host") in (tmp_path / "out" / "run.log").read_text()
        with pytest.raises(SystemExit) as ended:
            main(["tables", str(tmp_path / "out" / "run"), "-o", str(tmp_path / "tables" / "kernels_bench")])
        assert not ended.value.code

    def test_without_anything_that_works_kernels_end_early(self, whole_bundle, tmp_path):
        done = host("measure_kernels.sh", whole_bundle, tmp_path, "90", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 3
        assert "NOTHING WORKS" in done.stdout

    def test_a_home_that_cannot_be_written_is_replaced(self, whole_bundle, tmp_path):
        script = f'. "{whole_bundle}/env.sh"; echo "$HOME"'
        kept = {name: value for name, value in os.environ.items() if name != "HOME"}
        given = {"KERNELS_BENCH_UNPACKED": str(whole_bundle.parent / "host")}
        for home, expected in (
            ({}, given["KERNELS_BENCH_UNPACKED"]),
            ({"HOME": str(tmp_path)}, str(tmp_path)),
        ):
            done = subprocess.run(
                ["bash", "-c", script], env={**kept, **given, **home}, capture_output=True, text=True
            )
            assert done.stdout == f"{expected}\n"

    def test_steps_end_with_the_reasons_where_vllm_fails(self, whole_bundle, tmp_path):
        done = host(
            "measure_steps.sh", whole_bundle, tmp_path, "60", "llama-3.1-8b", "--gpu", "cpu", "--least", "1"
        )
        assert "vllm: exit code 1" in done.stdout, done.stdout + done.stderr
        assert "llama-3.1-8b: ModuleNotFoundError: No module named 'vllm.engine'" in done.stdout
        # with steps/steps.csv and steps/steps.toml, which need a GPU, seven
        assert returned(tmp_path) == {
            "steps.log", "vllm/steps.csv", "vllm/steps.toml", "vllm/vllm.log", "vllm/vllm_steps.jsonl",
        }  # fmt: skip

    def test_stand_ins_are_in_every_process_and_real_packages_win(self, whole_bundle):
        code = (
            "import zmq.asyncio, cachetools, typer; from xgrammar import Grammar\n"
            "class Mine(Grammar): pass\n"
            "print(Mine(1).anything(2), Grammar[int] | None, cachetools.__file__, typer.__file__)"
        )
        environment = {
            "PYTHONPATH": str(whole_bundle.parent / "host" / "site"),
            "KERNELS_BENCH_STAND_INS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert not done.returncode, done.stderr
        assert str(whole_bundle.parent / "host" / "site" / "cachetools") in done.stdout

    def test_a_package_that_refuses_its_host_is_replaced(self, whole_bundle, tmp_path):
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "parts.py").write_text("")
        (tmp_path / "numba" / "__init__.py").write_text(
            "import numba.parts\nraise ImportError('Numba needs NumPy 2.4 or less')\n"
        )
        code = (
            "from kernels_bench.bundle.stand_ins import replace_broken\n"
            "print(replace_broken())\n"
            "from numba import njit, prange; import numba.core\n"
            "@njit(parallel=True)\ndef function(): pass"
        )
        environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{whole_bundle.parent / 'host' / 'site'}"}
        for value, expected in (("1", "['numba']"), ("", "[]")):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, **environment, "KERNELS_BENCH_STAND_INS": value},
                capture_output=True,
                text=True,
            )
            assert done.stdout.strip() == expected
            assert bool(done.returncode) is (value == "")


class TestCommand:
    def test_a_bundle(self, small, wheels, tmp_path, capsys):
        with pytest.raises(SystemExit) as done:
            main([
                "bundle", "-o", str(tmp_path / ".gpu"), "--wheels", str(wheels), "--offline", "--preset", "0",
            ])  # fmt: skip
        assert not done.value.code
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"{tmp_path / '.gpu'}: ")
        assert last.endswith(" of 64 MiB")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--offline", "--wheels", "nowhere"], "found none"),
            (["--limit", "0"], "above zero"),
            (["--limit", "nan"], "above zero"),
            (["--arch", "9"], "--arch"),
        ],
    )
    def test_bad_input_is_one_line(self, arguments, message, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as done:
            main(["bundle", *arguments])
        assert done.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not list(tmp_path.iterdir())
