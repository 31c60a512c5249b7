"""What kernels_bench reads back: journals to resume and make tables of, grids, steps.csv, sets of tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

import fastroof
from fastroof.errors import FastroofError
from fastroof.load.compare import diff_tables
from fastroof.load.steps_file import read_step_rows
from kernels_bench.grid.estimate import estimate_all
from kernels_bench.grid.grid import GRIDS, load_grid
from kernels_bench.output.export_trees import export_tree
from kernels_bench.output.merge import merge_runs, write_merged
from kernels_bench.output.table_sets import gpu_of, load_table_set
from kernels_bench.output.tables import write_tables
from kernels_bench.output.validate import validate_tables
from kernels_bench.run.request import request_of
from tests.fuzz.mutators import mutated_tree
from tests.fuzz.target import TextFiles, Wrong, all_finite
from tests.fuzz.targets.imports import FolderFiles, checked_tables
from tests.kernels_bench.fakes import gemms, run
from tests.reference.made_journals import copy, decode, gemm, prefill, skip, start, write_journal

POINTS = [
    (gemm(64), 33.5), (gemm(4096), 120.25), (gemm(4096, dtype="fp8"), 231.0), (decode(16, 4096), 142.75),
    (prefill(2048), 1234.5), (copy(8192), 120.0),
]  # fmt: skip
REQUEST = {"grid": "cpu", "gpu": None, "providers": ["cpu"], "only": [], "seed": 0, "budget_s": None}


class Journals(TextFiles):
    """Journals of kernels: resumed, made tables of, and loaded as a set."""

    name = "bench.journal"
    suffix = ".jsonl"
    ci_cases = 100

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.runs = folder / "run"
        self.runs.mkdir()
        self.path = self.runs / "journal-r.jsonl"
        made = folder / "journal-made.jsonl"
        lines = [*POINTS, skip(gemm(8), "oom", "needs 90 GB"), skip(gemm(9), "error", "lost")]
        write_journal(made, lines, first=start(request=REQUEST))
        resumed = folder / "journal-resumed.jsonl"
        run(resumed, gemms(3), start={"request": REQUEST, "versions": {"torch": "2.11"}})
        run(resumed, gemms(5), start={"request": REQUEST, "versions": {"torch": "2.12"}})
        self.texts = [made.read_bytes(), resumed.read_bytes()]

    def case(self, random: Random) -> bytes:
        if random.random() < 0.4:
            return super().case(random)
        lines = random.choice(self.texts).splitlines()
        others = [json.loads(line) for line in lines]
        for _ in range(random.choice((1, 1, 2))):
            at = random.randrange(len(lines))
            mutated = mutated_tree(json.loads(lines[at]), random, others)
            lines[at] = json.dumps(mutated).encode(errors="surrogatepass")
        return b"\n".join(lines) + b"\n"

    def read(self) -> None:
        content, refusal = self.path.read_bytes(), None
        for read in (self.tables, self.table_set, self.request, self.resumed):
            shutil.rmtree(self.runs)
            self.runs.mkdir()
            self.path.write_bytes(content)
            try:
                read()
            except FastroofError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def tables(self) -> None:
        written = write_tables([self.path], self.runs / "kernels_bench")
        loaded = load_table_set(str(written.folder))
        checked_tables(loaded)
        all_finite(validate_tables(loaded, gpu_of(loaded)).as_dict())

    def table_set(self) -> None:
        tables = load_table_set(str(self.runs))
        checked_tables(tables)
        all_finite(validate_tables(tables, gpu_of(tables)).as_dict())
        all_finite([vars(one) for one in diff_tables(tables, tables)])

    def request(self) -> None:
        hash(request_of(self.path))

    def resumed(self) -> None:
        before = self.path.read_bytes()
        report = run(self.path, gemms(4), start={"versions": {"torch": "2.13"}})
        all_finite([[vars(one) for one in report.sentinels], report.elapsed_s])
        whole = before[: before.rfind(b"\n") + 1]
        if not self.path.read_bytes().startswith(whole):
            raise Wrong("a resumed run changes what was measured before")
        if report.left or report.before + report.measured + sum(report.skipped.values()) != 4:
            raise Wrong(f"a resumed run ends with {report}")


class Grids(TextFiles):
    """Grids of points to measure."""

    name = "bench.grid"
    suffix = ".toml"
    ci_cases = 60

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.texts = [(GRIDS / f"{name}.toml").read_bytes() for name in ("cpu", "smoke")]
        self.gpu = fastroof.load_gpu("h100")

    def read(self) -> None:
        grid = load_grid(self.path)
        grid.sentinels()
        points = grid.points()[:2000]
        for one in estimate_all(points, self.gpu):
            if not one.seconds > 0.0 or not np.isfinite(one.seconds):
                raise Wrong(f"a point takes {one.seconds} s")


STEPS = b"""\
model,gpu,tp,dtype,kv_dtype,phase,new_tokens,context_len,num_requests,num_tokens,latency_us,p25_us,p75_us,min_us,num_replays,provider
llama-3.1-8b,h100,1,bf16,bf16,decode,1x2,99x2,2,2,5000.5,4990.0,5010.0,4980.0,20,vllm 0.26.0 engine
llama-3.1-8b,h100,1,bf16,bf16,mixed,1;64,500;0,2,65,7000.5,6990.0,7010.0,6980.0,20,vllm 0.26.0 engine
"""


class StepFiles(TextFiles):
    """steps.csv of measured whole steps."""

    name = "bench.steps"
    suffix = ".csv"
    ci_cases = 150
    texts: ClassVar[list[bytes]] = [STEPS]

    def read(self) -> None:
        rows = read_step_rows(self.path)
        all_finite(rows)
        for row in rows:
            if any(isinstance(value, float) and value <= 0.0 for value in row.values()):
                raise Wrong(f"a step of {row}")


class TableSets(FolderFiles):
    """Two runs' tables, one file of one of them mutated: compared, merged, validated, exported."""

    name = "bench.tables"
    suffix = ".csv"
    ci_cases = 60

    def write(self, root: Path) -> None:
        for name, factor in (("a", 1.0), ("b", 1.02)):
            points = [(point, us * factor) for point, us in POINTS]
            journal = write_journal(self.folder / f"journal-{name}.jsonl", points)
            folder = write_tables([journal], root / name / "kernels_bench").folder
            # as of other programs, which give no digests
            text = (folder / "provenance.toml").read_text()
            (folder / "provenance.toml").write_text(text.split("[files]")[0])

    def is_mutated(self, name: str) -> bool:
        return name.startswith("a/")

    def read(self) -> None:
        one, other = (str(self.root / name / "kernels_bench") for name in ("a", "b"))
        out = self.folder / "out"
        try:
            tables, second = load_table_set(one), load_table_set(other)
            all_finite([vars(one) for one in diff_tables(tables, second)])
            all_finite(validate_tables(tables, gpu_of(tables)).as_dict())
            merged = merge_runs([one, other], ["torch"])
            checked_tables(load_table_set(str(write_merged(merged, out / "merged"))))
            all_finite(export_tree(tables, out / "tree").read_as_zero)
        finally:
            shutil.rmtree(out, ignore_errors=True)


TARGETS = [Journals, Grids, StepFiles, TableSets]
