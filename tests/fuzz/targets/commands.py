"""Words of the command line: an answer, or one line of error and exit code 1 or 2."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from random import Random

from typer.testing import CliRunner

from fastroof.cli import app
from fastroof.errors import FastroofError
from tests.fuzz.mutators import HOSTILE_WORDS
from tests.fuzz.target import SkippedError, Target, Wrong

LINES = (
    "step --model llama-3.1-8b --decode 64x4096 --prefill 2048@0 --explain --engine kernels",
    "step --model llama-3.1-8b --decode 1x9 --decode 2x99 --tp 2 --dtype fp8 --json --engine sglang",
    "step --model qwen3-30b-a3b --decode 8x1000 --dp 2 --ep 2 --engine kernels",
    "lookup gemm --m 64,128 --n 6144 --k 4096",
    "lookup attention_decode --num-q-heads 32 --num-kv-heads 8 --head-dim 128 --batch-size 8 --kv-len 400",
    "lookup moe --num-tokens 64 --hidden 4096 --intermediate 14336 --topk 2 --num-experts 8 --json",
    "serving --model llama-3.1-8b --isl 1000 --osl 100 --clients 1,8 --engine vllm",
    "fit --model llama-3.1-8b --tpot 30 --kv-len 1000,4000 --batch-size 8 --tp 1 --engine kernels --json",
    "simulate --model llama-3.1-8b --rate 5 --num-requests 9 --isl 100 --osl 9 --engine kernels --json",
    "simulate --model llama-3.1-8b --trace example --limit 20 --engine vllm",
    "capacity --model llama-3.1-8b --num-requests 20 --isl 100 --osl 9 --ttft 500 --engine kernels "
    "--threads 1",
    "simulate --model llama-3.1-8b --rate 5 --num-requests 9 --turns 3 --think exponential:1 --isl 100 "
    "--osl 9 --engine kernels --kv-tiers host:1GB:1GB/s --lora 16:4 --json",
    "simulate --model llama-3.1-8b --rate 5 --num-requests 9 --isl 100 --osl 9 --engine kernels "
    "--autoscale concurrency:4 --max-replicas 3 --startup 1 --energy",
    "capacity --model llama-3.1-8b --fewest --rate 2 --num-requests 20 --turns 3 --think 1 --isl 100 --osl 9 "
    "--ttft 500 --engine kernels --no-steady --threads 1",
    "models",
    "models --json",
    "gpus",
    "gpus --json",
    "engines",
    "engines --json",
    "tables list",
    "tables show gemm --gpu h100",
)
WORDS = (
    *HOSTILE_WORDS, "--json", "--help", "--tp", "--model", "--gpu", "--decode", "llama-3.1-70b", "a100",
    "64x",
    "x4096", "64x4096x2", "2048@", "@", "1:8", "1:8:2", "0x0", "1e3x4", "fp8", "vllm", "sglang", "/nowhere",
    "--x", "-1", "--", "1,,2", ",", "99999999999x9", "power_law_1.2", "0.5",
)  # fmt: skip
NEVER = (
    "-o", "--results", "--csv", "--save", "--minutes", "serve", "bench", "sweep", "export", "calibrate",
    "plot", "report", "import",
)  # fmt: skip
"""Words that write files, or last; ``--output`` is tokens to the commands that are here."""


def _writes(word: str) -> bool:
    return word.partition("=")[0] in NEVER or word.startswith("-o")


class Commands(Target):
    """A case is a list of words, as JSON."""

    name = "cli"
    suffix = ".json"
    limit_s = 30.0
    ci_cases = 30
    is_one_line = False

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.lines = [shlex.split(line) for line in LINES]
        self.runner = CliRunner()
        self.was = Path.cwd()
        os.chdir(folder)

    def close(self) -> None:
        os.chdir(self.was)

    def examples(self) -> list[bytes]:
        return [json.dumps(line).encode() for line in self.lines]

    def case(self, random: Random) -> bytes:
        words = list(random.choice(self.lines))
        if random.random() < 0.4:  # another number in the place of one: most are answered
            words = [random.choice(("1", "2", "3", "8", "100")) if word.isdigit() else word for word in words]
            return json.dumps(words).encode()
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            at = random.randrange(len(words))
            match random.randrange(6):
                case 0 | 1 | 2:
                    words[at] = random.choice(WORDS)
                case 3:
                    words[at:at] = [random.choice(WORDS)]
                case 4 if len(words) > 1:
                    del words[at]
                case _:
                    other = random.choice(self.lines)
                    start = random.randrange(len(other))
                    words[at:at] = other[start : start + 2]
        return json.dumps(words).encode()

    def check(self, case: bytes) -> None:
        words = json.loads(case)
        # an argument of a program has no null in it
        if any(_writes(word) or "\0" in word for word in words):
            raise SkippedError
        done = self.runner.invoke(app, words, prog_name="fastroof")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code not in (0, 1, 2):
            raise Wrong(f"exit code {done.exit_code}")
        if "Traceback" in done.stderr:
            raise Wrong(done.stderr)
        if done.exit_code:
            if not done.stderr.strip() and not done.stdout.strip():
                raise Wrong(f"exit code {done.exit_code} without a word")
            raise FastroofError(done.stderr or done.stdout)
        if "--json" in words and "--help" not in words:
            json.loads(done.stdout)


TARGETS = [Commands]
