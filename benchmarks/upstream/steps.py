"""Random steps for the scripts of this folder, the rows that they print, and the record of these rows.

``python -m benchmarks.upstream.steps < rows`` renews ``fastroof/backends/releases.toml`` and the table of its
README from what scripts printed. A program's record is replaced as a whole: give all of its rows.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import numpy as np

import fastroof
from fastroof.arrays import Floats
from fastroof.backends.releases import programs, releases_markdown

Step = list[tuple[int, int]]
"""New tokens and context of each request."""

KINDS = ("equal decodes", "decodes", "prompt", "chunk", "prompts", "chunks", "mixed")
LONGEST = 32_768


def size(rng: np.random.Generator, least: int, most: int) -> int:
    """A size that is small as often as large."""
    return int(np.exp(rng.uniform(np.log(least), np.log(most + 1))))


def random_steps(plan: fastroof.StepPlan, kind: str, count: int = 300, seed: int = 8) -> list[Step]:
    """Steps of a kind, within the plan's largest batch."""
    rng = np.random.default_rng(seed)
    tokens, seqs = plan.max_num_batched_tokens, min(plan.max_num_seqs, plan.max_num_batched_tokens)

    def decodes(most: int) -> Step:
        return [(1, size(rng, 1, LONGEST)) for _ in range(size(rng, 1, most))]

    def prompts(most: int, context: int) -> Step:
        several = size(rng, 2, 16)
        return [(size(rng, 2, most // several), size(rng, 1, context) - 1) for _ in range(several)]

    kinds = {
        "equal decodes": lambda: [(1, size(rng, 1, LONGEST))] * size(rng, 1, seqs),
        "decodes": lambda: decodes(seqs),
        "prompt": lambda: [(size(rng, 2, tokens), 0)],
        "chunk": lambda: [(size(rng, 2, tokens), size(rng, 1, LONGEST))],
        "prompts": lambda: prompts(tokens, 1),
        "chunks": lambda: prompts(tokens, LONGEST // 2),
        "mixed": lambda: [*decodes(seqs // 2), (size(rng, 2, tokens // 2), size(rng, 1, LONGEST) - 1)],
    }
    return [kinds[kind]() for _ in range(count)]


def mixed_steps(plan: fastroof.StepPlan, count: int) -> list[Step]:
    """Steps of all kinds in turn."""
    by_kind = [random_steps(plan, kind, -(-count // len(KINDS))) for kind in KINDS]
    return [step for steps in zip(*by_kind, strict=True) for step in steps][:count]


def own_us(plan: fastroof.StepPlan, step: Step) -> float:
    """The plan's step, us."""
    new_tokens, context_len = zip(*step, strict=True)
    return plan.step_scalar(list(new_tokens), list(context_len))


def version(checkout: Path) -> str:
    """Return a checkout's commit and its date; of an unpacked release, the folder's name."""
    done = subprocess.run(
        ["git", "-C", checkout, "log", "-1", "--format=%h (%cs)"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else checkout.name


def print_exact(
    program: str, at: str, found: list[float], expected: list[float], what: str = "steps"
) -> None:
    """Print the row of a program that gives the plan's own numbers, and fail if any differs."""
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    worst = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
    print(f"| {program} | {at} | {same:,} of {len(found):,} {what} equal to the bit | {worst:.2g} |")
    if same < len(found):
        sys.exit(f"{program}: {len(found) - same} of {len(found)} {what} differ from the plan")


def print_errors(program: str, at: str, kind: str, errors: Floats) -> None:
    """Print the row of a kind of steps: mean and max of relative errors."""
    sizes = np.abs(errors)
    print(f"| {program} | {at} | {len(sizes)} {kind} | {sizes.mean():.2%} mean, {sizes.max():.2%} max |")


def record(lines: Iterable[str]) -> None:
    """Replace ``ran``, ``result`` and ``checked`` of each program that has rows."""
    folder = Path(str(resources.files("fastroof.backends")))
    listed, readme = folder / "releases.toml", folder / "README.md"
    shown = releases_markdown()
    ran: dict[str, list[str]] = {}
    results: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        name, _, part = cells[0].partition(", ")
        if len(cells) != 4 or name not in {one.name for one in programs()}:
            sys.exit(f"not a row of a program in releases.toml: {line.strip()!r}")
        ran.setdefault(name, []).append(cells[1].split()[0])
        errors = re.fullmatch(r"(\S+)% mean, .*", cells[3])
        found = f"{cells[2].partition(' ')[2]} ±{errors[1]} %" if errors else cells[2]
        results.setdefault(name, {}).setdefault(part, []).append(found)
    blocks = listed.read_text("utf-8").split("[[program]]\n")
    for place, block in enumerate(blocks):
        name = (re.findall(r'^name = "(.*)"$', block, re.MULTILINE) or [""])[0]
        if name not in ran:
            continue
        parts = [(f"{part}: " if part else "") + ", ".join(found) for part, found in results[name].items()]
        for key, value in {
            "ran": json.dumps(list(dict.fromkeys(ran[name]))),
            "result": json.dumps("; ".join(parts), ensure_ascii=False),
            "checked": datetime.date.today().isoformat(),
        }.items():
            block = re.sub(rf"^{key} = .*$", lambda _, new=f"{key} = {value}": new, block, flags=re.MULTILINE)
        blocks[place] = block
    listed.write_text("[[program]]\n".join(blocks), "utf-8")
    programs.cache_clear()
    readme.write_text(readme.read_text("utf-8").replace(shown, releases_markdown()), "utf-8")


if __name__ == "__main__":
    record(sys.stdin)
