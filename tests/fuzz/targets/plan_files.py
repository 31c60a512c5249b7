"""Plan files with wrong bytes, under a right CRC too: refused, or a plan that is timed within its bytes."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np

import fastroof
from fastroof.backends.c import read_plan_file
from fastroof.backends.c.plan_file import description, plan_bytes
from fastroof.compiled import plan_files as loops
from fastroof.compiled import steps
from tests.backends.c.test_hostile_descriptions import first_version
from tests.fuzz.made_plans import plan_of
from tests.fuzz.mutators import mutated_text
from tests.fuzz.target import Target, Wrong, all_finite

NUMBERS = (-1.0, 0.0, 1.0, 2.0, 5e8, 1e18, 1e308, 5e-324, float("nan"), float("inf"), 0.5, 31.0)
WORDS = (-1, 0, 1, 2, 31, 33, 2**20, 2**33, 2**62, -(2**63))
EIGHT = struct.Struct("<q")
CRC_AT = 12
SIZES = ((1, 1), (4, 100), (4, 2**28), (3, 7000))


class PlanFiles(Target):
    """A case is lines: which file, whether its CRC is set, and edits of it.

    An edit is ``AT HEX``, bytes that take the place of others; ``cut AT``; or ``text HEX``, another
    description of the file of version 1.
    """

    name = "plan.file"
    ci_cases = 600

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.path = folder / "one.frplan"
        plan = plan_of(max_num_batched_tokens=16, max_num_seqs=4)
        staged = plan_of(max_num_batched_tokens=16, max_num_seqs=4, pp=2)
        self.arena = plan.arena
        self.text = _text(plan)
        self.files = {
            "one": plan_bytes(plan, "one"),
            "stages": plan_bytes(staged, "stages"),
            "first": first_version(plan.arena, self.text),
        }
        self.near = {name: _facts(content) for name, content in self.files.items()}

    def examples(self) -> list[bytes]:
        return [f"{name} as it is".encode() for name in self.files]

    def case(self, random: Random) -> bytes:
        name = random.choice(list(self.files))
        content = self.files[name]
        lines = [f"{name} {'crc' if random.random() < 0.85 else 'as it is'}"]
        if name == "first" and random.random() < 0.5:
            lines.append(f"text {mutated_text(self.text, random).hex()}")
            return "\n".join(lines).encode()
        words = len(content) // 8
        floats = int.from_bytes(content[24:32], "little")
        for _ in range(random.choice((1, 1, 2, 3))):
            what = random.random()
            # the header, the plan's own header, its times, facts of it or of its stages, or anywhere
            at = 8 * random.choice(
                (
                    random.randrange(8),
                    8 + random.randrange(24),
                    8 + random.randrange(floats),
                    random.choice(self.near[name]),
                    random.randrange(words),
                )
            )
            if what < 0.5:
                lines.append(f"{at} {struct.pack('<d', random.choice(NUMBERS)).hex()}")
            elif what < 0.8:
                word = random.choice((*WORDS, random.randrange(words)))
                lines.append(f"{at} {EIGHT.pack(word).hex()}")
            elif what < 0.95:
                at += random.randrange(8)
                lines.append(f"{at} {content[at] ^ 1 << random.randrange(8):02x}")
            else:
                lines.append(f"cut {random.choice((0, 1, 63, 64, at, len(content) - 1))}")
        return "\n".join(lines).encode()

    def content(self, case: bytes) -> bytes:
        first, *edits = case.decode().split("\n")
        name, _, crc = first.partition(" ")
        content = bytearray(self.files[name])
        for edit in edits:
            at, _, what = edit.partition(" ")
            if at == "text":
                content = bytearray(first_version(self.arena, bytes.fromhex(what)))
            elif at == "cut":
                del content[int(what) :]
            else:
                new = bytes.fromhex(what)
                content[int(at) : int(at) + len(new)] = new
        if crc == "crc" and len(content) >= 16:
            content[CRC_AT:16] = zlib.crc32(content[16:]).to_bytes(4, "little")
        return bytes(content)

    def check(self, case: bytes) -> None:
        self.path.write_bytes(self.content(case))
        read = read_plan_file(self.path)
        arena = read.arena
        if read.description["max_num_batched_tokens"] != arena[steps.MAX_TOKENS]:
            raise Wrong("the description is of another plan")
        for batch_size, kv_len in SIZES:
            out = np.empty(1)
            sizes = np.array([batch_size]), np.array([kv_len])
            if not steps.general_decode_steps_us(arena, *sizes, out):
                all_finite(out)
                if out[0] < 0.0:
                    raise Wrong(f"a step takes {out[0]} us")
        if loops.FILE_HEADER + 8 * len(arena) > len(self.path.read_bytes()):
            raise Wrong("the plan is longer than its file")


def _facts(content: bytes) -> list[int]:
    """Return the words of all headers, of facts and of their lists; a stage is a file within a file."""
    words = np.frombuffer(content[: len(content) // 8 * 8], np.int64)
    starts = [int(start) for start in np.flatnonzero(words == words[0])]
    found = [start + word for start in starts for word in range(1, 8)]
    for start in starts:
        facts = start + 8 + int(words[start + 5])
        if start + 8 < facts < len(words) - 32:
            found += range(facts, facts + 32)
            found += [8 + start + int(words[facts + 1]) + i for i in range(8)]
            found += [8 + start + int(words[facts + 3]) + i for i in range(4)]
    return [word for word in found if 0 < word < len(words)]


def _text(plan: fastroof.StepPlan) -> bytes:
    import json

    return json.dumps(description(plan, "first")).encode()


TARGETS = [PlanFiles]
