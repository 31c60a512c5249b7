"""The library to link, objects for another architecture, and the licence of every exported file."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof.backends.c import export, export_c, objects
from fastroof.backends.c.objects import FUNCTIONS, object_code
from fastroof.compiled.c_api import ABI_VERSION
from fastroof.errors import BackendError
from tests.reference.compilers import find_compiler

AARCH64, X86_64 = 183, 62
"""e_machine of ELF."""
ROOT = Path(__file__).parents[3]
HEADER = ROOT / "fastroof" / "backends" / "c" / "fastroof_step.h"


@pytest.fixture(scope="module")
def plans(h100):
    return {
        "small": fastroof.compile_plan(
            "llama-3.1-8b", "h100", h100, max_num_batched_tokens=4096, engine="kernels"
        )
    }


@pytest.fixture(scope="module")
def folder(exported):
    place = next(iter(exported.plans.values())).parent
    if not (place / "libfastroof_step.so.1").is_file():
        pytest.skip("no C compiler links a library with a SONAME here")
    return place


def output_of(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **options)
    assert (done.returncode, done.stderr) == (0, ""), words
    return done.stdout


def needed(*names):
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name} here")


def bits_of(printed):
    """An example's lines but for what a call costs."""
    return list(takewhile(lambda line: not line.startswith("a call"), printed.splitlines()))


@pytest.fixture(scope="module")
def static_lines(folder, tmp_path_factory):
    compiler = find_compiler("cc")
    made = tmp_path_factory.mktemp("static") / "example"
    output_of(compiler, "-O2", "example.c", "fastroof_step.o", "-o", made, cwd=folder)
    return bits_of(output_of(made, folder / "small.plan"))


def test_the_header_declares_what_the_code_has():
    text = re.sub(r"static inline.*?^}", "", HEADER.read_text(), flags=re.S | re.M)
    assert set(re.findall(r"\b(fastroof_\w+)\(", text)) == set(FUNCTIONS)
    assert int(re.search(r"#define FASTROOF_ABI (\d+)", text)[1]) == ABI_VERSION


def test_the_library_returns_its_abi_version(loaded):
    assert loaded.fastroof_abi_version() == ABI_VERSION


def test_the_library_has_a_soname_and_versioned_symbols_alone(folder):
    needed("readelf", "nm")
    path = folder / "libfastroof_step.so"
    assert (path.is_symlink(), path.resolve().name) == (True, "libfastroof_step.so.1")
    assert "Library soname: [libfastroof_step.so.1]" in output_of("readelf", "-d", path)
    shown = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only", path).splitlines()]
    assert set(shown) == {"FASTROOF_1", *(f"{name}@@FASTROOF_1" for name in FUNCTIONS)}


def test_a_program_links_by_pkg_config_wherever_the_folder_is(folder, static_lines, tmp_path):
    needed("pkg-config", "readelf")
    compiler = find_compiler("cc")
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved, symlinks=True)
    found = {"PKG_CONFIG_PATH": str(moved), "PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    flags = output_of("pkg-config", "--cflags", "--libs", "fastroof_step", env=found).split()
    assert f"-I{moved}" in flags
    assert output_of("pkg-config", "--modversion", "fastroof_step", env=found).strip() == fastroof.__version__
    made = tmp_path / "example"
    output_of(compiler, "-O2", moved / "example.c", *flags, f"-Wl,-rpath,{moved}", "-o", made)
    assert "Shared library: [libfastroof_step.so.1]" in output_of("readelf", "-d", made)
    assert "(FASTROOF_1)" in output_of("nm", "-D", made) or "@FASTROOF_1" in output_of("nm", "-D", made)
    assert bits_of(output_of(made, moved / "small.plan")) == static_lines


def test_a_plan_that_the_library_opened_has_the_bits_of_python(loaded, exported, plans):
    plan, us = ctypes.c_void_p(), ctypes.c_double()
    assert loaded.fastroof_open(str(exported.plans["small"]).encode(), ctypes.byref(plan)) == 0
    for batch_size, kv_len in ((1, 1), (64, 4096), (1000, 77)):
        sizes = (ctypes.c_int64(batch_size), ctypes.c_int64(kv_len))
        assert loaded.fastroof_decode_us(plan, *sizes, ctypes.byref(us)) == 0
        assert us.value == plans["small"].decode_us(batch_size, kv_len)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("aarch64-linux-gnu", AARCH64),
        # the target by default, which other tests load
        pytest.param("x86_64-linux-gnu", X86_64, marks=pytest.mark.release),
    ],
)
def test_an_object_is_of_its_target(target, machine):
    code = object_code(target=target)
    magic, bits, little = struct.unpack_from("<4sBB", code)
    assert (magic, bits, little) == (b"\x7fELF", 2, 1)
    assert struct.unpack_from("<HH", code, 16) == (1, machine)


def test_an_aarch64_program_prints_the_same_bits(plans, static_lines, tmp_path):
    """No multiplication is fused with an addition there either."""
    gcc, qemu = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
    needed(qemu)
    find_compiler(gcc)
    export_c(plans, tmp_path, target="aarch64-linux-gnu", shared=True)
    library_root = Path(output_of(gcc, "-print-sysroot").strip() or "/")
    if not (library_root / "lib" / "ld-linux-aarch64.so.1").exists():
        library_root = Path("/usr/aarch64-linux-gnu")
    # emulated: a million calls would take long
    source = tmp_path / "example.c"
    source.write_text(source.read_text().replace("CALLS = 1000000", "CALLS = 1000"))
    output_of(gcc, "-O2", source, tmp_path / "fastroof_step.o", "-static", "-o", tmp_path / "static")
    output_of(gcc, "-O2", source, f"-L{tmp_path}", "-lfastroof_step", "-o", tmp_path / "shared")
    run = [qemu, "-L", library_root, "-E", f"LD_LIBRARY_PATH={tmp_path}"]
    for made in ("static", "shared"):
        lines = bits_of(output_of(*run, tmp_path / made, tmp_path / "small.plan"))
        assert lines[:-1] == static_lines[:-1]
        call = np.arange(1000)
        us = np.cumsum(plans["small"].decode_us(1 + call % 256, 1 + call % 8191))[-1]
        assert lines[-1].endswith(f"bits {struct.unpack('<Q', struct.pack('<d', us))[0]:016x}")


def test_an_object_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(tmp_path))
    # the user's own folder, which may hold the object
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: f"~/{name}")
    compiled = []

    def compile_object(*words):
        compiled.append(words)
        return b"code of %d" % len(compiled)

    monkeypatch.setattr(objects, "_compiled", compile_object)

    def code(*words):
        objects._object_code.cache_clear()
        return object_code(*words)

    try:
        assert [code(), code(), code("x86-64-v2"), code()] == [
            b"code of 1",
            b"code of 1",
            b"code of 2",
            b"code of 1",
        ]
        (one, _) = sorted(tmp_path.glob("loops-*/object-*.loop"), key=lambda path: path.stat().st_mtime_ns)
        one.write_bytes(one.read_bytes()[:-1])
        assert code() == b"code of 3"
        monkeypatch.setattr(objects, "_SOURCE", b"another")
        assert code() == b"code of 4"
    finally:
        objects._object_code.cache_clear()


def test_targets_and_linkers_that_are_not_there(plans, tmp_path, monkeypatch):
    with pytest.raises(BackendError, match=r"no object code for 'riscv64'.*aarch64-linux-gnu"):
        object_code(target="riscv64")
    with pytest.raises(BackendError, match="LLVM knows no CPU 'x86-64-v3' of aarch64-linux-gnu: generic"):
        object_code("x86-64-v3", "aarch64-linux-gnu")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BackendError, match=r"no C compiler links libfastroof_step.*set CC"):
        export_c(plans, tmp_path / "none", shared=True)
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("CC", "false --quickly")
    with pytest.raises(BackendError, match="false --quickly could not link"):
        export.link_library(export.find_linker(None), b"no object")


def test_an_export_replaces_the_one_before(folder, plans):
    export_c(plans, folder)
    assert (folder / "libfastroof_step.so").is_symlink()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_every_text_has_its_licence_in_its_first_line(exported, folder):
    binary = {".plan", ".o", ".so", ".1"}
    texts = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in binary]
    assert {path.name for path in texts} >= {"fastroof_step.h", "go.mod", "example.rs", "fastroof_step.pc"}
    for path in texts:
        first = path.read_text().splitlines()[0]
        if path.name == "LICENSE":
            assert path.read_bytes() == (ROOT / "LICENSE").read_bytes()
        else:
            assert re.fullmatch(r"(//|#|/\*) SPDX-License-Identifier: Apache-2\.0( \*/)?", first), path


def test_a_text_that_has_its_licence_is_left_alone():
    text = b"// SPDX-License-Identifier: Apache-2.0\n\npackage x\n"
    assert export.with_licence_line("x.go", text) == text


def test_an_installed_package_has_its_licence_in_its_metadata(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "__file__", str(tmp_path / "fastroof" / "backends" / "c" / "export.py"))
    info = tmp_path / "fastroof-1.dist-info"
    (info / "licenses").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: fastroof\nVersion: 1\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(BackendError, match="no LICENSE to export"):
        export.licence_bytes()
    (info / "licenses" / "LICENSE").write_text("the text")
    assert export.licence_bytes() == b"the text"
