"""Plans that an earlier process kept, in files that were mutated since: the bits of a plan made anew."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

import fastroof
from fastroof.errors import FastroofError
from fastroof.file_access import is_file, matches, read_bytes, recorded
from fastroof.plan import plan_cache
from fastroof.plan.plan_cache import CachedPlan
from tests.fuzz.made_plans import plan_of
from tests.fuzz.mutators import mutated_bytes, mutated_text
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite

DIGEST = hashlib.sha256().digest_size
SIZE = struct.Struct("<Q")
SIZES = struct.Struct("<QQ")
PLACES = (
    "link",
    "two names",
    "folder",
    "pipe",
    "all may write it",
    "all may write the folder",
    "folder by a link",
)
"""What may stand where the file was, or be done to it."""

STEPS = ([(1, 99), (1, 7)], [(40, 0)], [(30, 100), (1, 3000)])


class KeptPlans(Target):
    """A case is lines: whose file it is, then ``file HEX``, ``payload HEX`` under its own digest, or a place.

    Of ``payload`` the digest holds, as of a version that kept something else: it may be refused or read as it
    is, but nothing that is no FastroofError may be raised. All else is answered as by a plan made anew.
    """

    name = "plan.kept"
    ci_cases = 300

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.plans = {
            "one": plan_of(max_num_batched_tokens=64, max_num_seqs=8),
            "two": plan_of(max_num_batched_tokens=64, max_num_seqs=8, dtype="fp8"),
            "stages": plan_of(max_num_batched_tokens=64, max_num_seqs=8, pp=5),
        }
        self.batch = fastroof.StepBatch.from_requests(STEPS)
        self.roots = plan_cache.cache_roots
        self.cache = folder / "cache"
        plan_cache.cache_roots = lambda: (self.cache,)
        self.files = {}
        with recorded() as self.read:
            read_bytes(__file__)
            matches(Path(__file__).parent, "kept_*.py")
            is_file(folder / "nothing")
        for name, plan in self.plans.items():
            plan_cache.store_plan(name, plan_cache._joined(self.read, CachedPlan.of(plan).to_bytes()))
            self.files[name] = self._file(name).read_bytes()
        self.times = {name: self._timed(plan) for name, plan in self.plans.items()}

    def close(self) -> None:
        plan_cache.cache_roots = self.roots

    def examples(self) -> list[bytes]:
        return [f"{name}\nfile {content.hex()}".encode() for name, content in self.files.items()]

    def case(self, random: Random) -> bytes:
        name = random.choice(list(self.files))
        what, content = random.random(), self.files[name]
        if what < 0.15:
            return f"{name}\n{random.choice(PLACES)}".encode()
        if what < 0.25:
            return f"{name}\nfile {random.choice(list(self.files.values())).hex()}".encode()
        if what < 0.6:
            return f"{name}\nfile {mutated_bytes(content, random, list(self.files.values())).hex()}".encode()
        return f"{name}\npayload {self._other_payload(content[DIGEST:], random).hex()}".encode()

    def _other_payload(self, payload: bytes, random: Random) -> bytes:
        """What another version may have kept: other words, other sizes, fewer times; no other times."""
        key, plan = payload[:DIGEST], payload[DIGEST:]
        (size,) = SIZE.unpack_from(plan)
        files, plan = plan[SIZE.size : SIZE.size + size], plan[SIZE.size + size :]
        if random.random() < 0.3:
            files = mutated_text(files.rstrip(), random).replace(b"**", b"")
            size = random.choice((len(files), len(files), size, 0, 2**63))
            return key + SIZE.pack(size) + files + plan
        key += SIZE.pack(size) + files
        size, floats = SIZES.unpack_from(plan)
        text, times = plan[SIZES.size : SIZES.size + size], plan[SIZES.size + size :]
        what = random.random()
        if what < 0.7:
            text = mutated_text(text.rstrip(), random)
            text += b" " * (-len(text) % 8)
            size = len(text)
        elif what < 0.85:
            size, floats = random.choice(((size, 0), (0, floats), (2**63, floats), (size + 8, floats - 1)))
        else:
            times = times[: random.choice((0, 7, 8, len(times) // 2))]
            floats = random.choice((floats, len(times) // 8))
        return key + SIZES.pack(size, floats) + text + times

    def check(self, case: bytes) -> None:
        name, _, given = case.decode().partition("\n")
        what, _, content = given.partition(" ")
        if name not in self.plans or (what not in ("file", "payload") and given not in PLACES):
            raise SkippedError
        shutil.rmtree(self.cache, ignore_errors=True)
        file = self._file(name)
        file.parent.mkdir(parents=True)
        if what == "file":
            file.write_bytes(bytes.fromhex(content))
        elif what == "payload":
            payload = bytes.fromhex(content)
            file.write_bytes(hashlib.sha256(payload).digest() + payload)
        else:
            file.write_bytes(self.files[name])
            _replace(file, given)
        made = []

        def make() -> fastroof.StepPlan:
            made.append(name)
            return self.plans[name]

        try:
            kept, _ = plan_cache.cached_plan(name, make)
            times = self._timed(kept)
        finally:
            _undo(file)
        if what == "payload" and not made:
            all_finite(times[0])
            return
        if times != self.times[name]:
            raise Wrong(f"{name} is timed as another plan")
        if kept.to_bytes() != plan_cache._split(self.files[name][2 * DIGEST :])[1]:
            raise Wrong(f"{name} returns what it did not return")
        if made:
            raise FastroofError("made anew: nothing was believed that is not what was kept")

    def _file(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return self.cache / plan_cache.FOLDER / f"{digest[:32]}.plan"

    def _timed(self, plan: fastroof.StepPlan | CachedPlan) -> tuple[Any, ...]:
        times = plan.run(self.batch)
        parts = [part.tobytes() for part in times.components]
        return times.latency_us.tolist(), times.origin.tolist(), parts, plan.cycle_us(self.batch)


def _replace(file: Path, what: str) -> None:
    """Do to a file, or put in its place, what another program may."""
    other = file.parent.parent / "other"
    match what:
        case "link":
            file.rename(other)
            file.symlink_to(other)
        case "two names":
            other.hardlink_to(file)
        case "folder":
            file.unlink()
            file.mkdir()
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "all may write it":
            file.chmod(0o666)
        case "all may write the folder":
            file.parent.chmod(0o777)
        case "folder by a link":
            file.parent.rename(other)
            file.parent.symlink_to(other)


def _undo(file: Path) -> None:
    if file.parent.is_symlink():
        file.parent.unlink()


TARGETS = [KeptPlans]
