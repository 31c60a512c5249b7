"""Unpacks a bundle on the measuring host: ``python3 unpack.py BUNDLE TARGET``; standard library only.

What fails is printed and the rest unpacked: without vLLM's libraries torch's kernels can still be measured.
"""

from __future__ import annotations

import hashlib
import lzma
import shutil
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SITE = "site"
CHECKSUMS_FILE = "sha256.txt"
"""Copied next to ``site`` when all is done: it tells which bundle was unpacked."""
_BLOCK = 2**24


def _library(packed: Path, target: Path) -> str:
    with lzma.open(packed) as source, target.open("wb") as file:
        while block := source.read(_BLOCK):
            file.write(block)
    return f"{target}: {target.stat().st_size:,} B"


def _archive(packed: Path, site: Path) -> str:
    with tarfile.open(packed, "r:xz") as archive:
        archive.extractall(site, filter="data")
    return f"{site}: {packed.name}"


def _differing(bundle: Path) -> list[str]:
    """Return the files whose SHA-256 is not the bundle's."""
    wrong = []
    for line in (bundle / CHECKSUMS_FILE).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        path = bundle / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            wrong.append(name)
    return wrong


def unpack(bundle: Path, target: Path) -> list[str]:
    """Unpack a bundle to ``target``/site, in place of another; return what failed."""
    begun_s, site = time.monotonic(), target / SITE
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    failed = [f"{name} is missing or differs from {CHECKSUMS_FILE}" for name in _differing(bundle)]
    lib = bundle / "lib"
    libraries = {one: site / one.relative_to(lib).with_suffix("") for one in sorted(lib.rglob("*.xz"))}
    for library in libraries.values():  # before the archives: tarfile fails where a folder appears meanwhile
        library.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(_archive, one, site) for one in sorted(bundle.glob("*.tar.xz"))]
        jobs += [pool.submit(_library, *one) for one in libraries.items()]
        for job in jobs:
            try:
                print(f"  {job.result()}")
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
    for reason in failed:
        print(f"  FAILED {reason}")
    print(f"unpacked in {time.monotonic() - begun_s:.1f} s, {len(failed)} failed")
    shutil.copyfile(bundle / CHECKSUMS_FILE, target / CHECKSUMS_FILE)
    return failed


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
