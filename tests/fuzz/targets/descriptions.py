"""Descriptions in TOML: GPUs, engines, provenance of a source, and families known to be unsound."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import fastroof
from fastroof.engines import engine_names, load_engine
from fastroof.load.write import write_source
from tests.fuzz.made_plans import h100
from tests.fuzz.target import TextFiles, Wrong, all_finite

CHECKOUT = Path(__file__).resolve().parents[3]
LONG = (
    b"a." * 100_000 + b"a = 1\n",
    b"x = " + b"[" * 5000 + b"]" * 5000 + b"\n",
    b"x = " + b"9" * 5000 + b"\n",
)


class TomlFiles(TextFiles):
    suffix = ".toml"
    ci_cases = 500

    def case(self, random: Random) -> bytes:
        text = super().case(random)
        return text + random.choice(LONG) if random.random() < 0.003 else text


class Gpus(TomlFiles):
    name = "gpu.toml"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.texts = [path.read_bytes() for path in sorted((CHECKOUT / "bench_data").glob("*/gpu.toml"))]

    def read(self) -> None:
        gpu = fastroof.load_gpu(self.path)
        for name, value in dataclasses.asdict(gpu).items():
            if isinstance(value, int | float):
                all_finite(float(value), name)
                if value < 0:
                    raise Wrong(f"{name} is {value}")
        if gpu.hbm_bytes_per_s <= 0 or gpu.hbm_bytes <= 0:
            raise Wrong(f"{gpu} has no memory")
        plan = fastroof.compile_plan(
            "llama-3.1-8b", gpu, None, max_num_batched_tokens=64, max_num_seqs=8, engine="kernels"
        )
        answer = plan.decode_us(4, 100)
        all_finite([answer, plan.prefill_us(50)])
        if answer <= 0.0:
            raise Wrong(f"a step takes {answer} us")


class Engines(TomlFiles):
    name = "engine.toml"
    ci_cases = 300

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        profiles = CHECKOUT / "fastroof" / "engines" / "profiles"
        self.texts = [(profiles / f"{name}.toml").read_bytes() for name in engine_names()]

    def read(self) -> None:
        engine = load_engine(self.path)
        hash(engine)
        plan = fastroof.compile_plan(
            "llama-3.1-8b",
            "h100",
            h100(),
            engine=engine,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            allow_modelled=True,
        )
        all_finite([plan.decode_us(4, 100), plan.prefill_us(50), plan.memory_of(max_num_seqs=8)._asdict()])
        if plan.decode_us(4, 100) <= 0.0:
            raise Wrong("a step takes no time")


GEMM = {
    "dtype": ["bf16"] * 8,
    "m": [1, 1, 64, 64, 1, 1, 64, 64],
    "n": [128, 256] * 4,
    "k": [128] * 4 + [256] * 4,
    "latency_us": [2.0, 2.5, 3.0, 4.0, 2.25, 2.75, 5.0, 7.0],
}
PROVENANCE = b"""gpu = "h100"
name = "mine"
rank = 20
kernels_bench = "0.1.0"
url = "https://example.org"
device = "NVIDIA H100 80GB HBM3"
framework = "vllm"
framework_version = "0.24.0"

[operators.gemm]
rows = 8
points = 8
kernels = ["a", "b"]
rank = 30
unsound = [
  { keys = { dtype = ["bf16"], m = [1, 64] }, test = "steps", reason = "slow", ratio = 1.5, rows = 4 },
  { keys = { n = [128, 128] }, test = "falls", reason = "falls", excess_us = 2.5, serves = true, rows = 2 },
]
campaign = { scale = 0.05, common = 0.02 }

[absent]
"x" = "not measured"
"""


class Provenance(TomlFiles):
    """provenance.toml beside a table, with families of rows known to be unsound."""

    name = "provenance.toml"

    def prepare(self, folder: Path) -> None:
        import numpy as np

        super().prepare(folder)
        shipped = sorted((CHECKOUT / "bench_data" / "h100").glob("*/provenance.toml"))
        columns = {
            name: np.array(values, object if name == "dtype" else None) for name, values in GEMM.items()
        }
        self.source = write_source(folder / "h100" / "mine", {"gemm": columns}, {"gpu": "h100"})
        gpu = CHECKOUT / "bench_data" / "h100" / "gpu.toml"
        (folder / "h100" / "gpu.toml").write_bytes(gpu.read_bytes())
        written = (self.source / "provenance.toml").read_bytes()
        self.texts = [PROVENANCE, PROVENANCE, written, *(path.read_bytes()[:3000] for path in shipped)]
        self.path = self.source / "provenance.toml"

    def read(self) -> None:
        tables = fastroof.load_tables(self.folder / "h100")
        found = tables.lookup("gemm", m=[1, 30], n=128, k=200, with_error=True)
        all_finite([found.latency_us, found.mfu, found.relative_error])
        if (found.latency_us <= 0.0).any():
            raise Wrong(f"a kernel takes {found.latency_us} us")


TARGETS = [Gpus, Engines, Provenance]
