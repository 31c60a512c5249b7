"""Measured tables as Parquet and CSV: dense kernels, experts, latent attention, collectives."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet

import fastroof
from fastroof.operators.registry import OPERATORS
from tests.fuzz.arrow_mutators import csv_bytes, mutated_table, parquet_bytes
from tests.fuzz.mutators import mutated_bytes, mutated_text
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite

SHIPPED = Path(__file__).resolve().parents[3] / "bench_data" / "h100"
SOURCE = "aiconfigurator-sglang-0.5.14"
NAMES = (
    "gemm", "attention_prefill", "attention_decode", "moe", "mla_decode", "mla_module_decode", "allreduce",
    "gdn",
)  # fmt: skip
MOST_ROWS = 24


class TableFiles(Target):
    """A folder of one source: the case is ``operator`` and a file, apart by a newline."""

    ending = ".parquet"
    ci_cases = 250
    is_bytes = True

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.tables = {}
        for name in NAMES:
            table = pa.parquet.read_table(SHIPPED / SOURCE / f"{name}.parquet")
            keys = [column.name for column in OPERATORS[name].keys]
            first = {key: table.column(key)[0].as_py() for key in keys if key in table.column_names}
            same = np.ones(table.num_rows, bool)
            for key, value in first.items():
                same &= np.array(table.column(key).to_pylist(), object) == value
            rows = np.flatnonzero(same)
            wanted = rows[np.linspace(0, len(rows) - 1, min(MOST_ROWS, len(rows))).astype(int)]
            self.tables[name] = table.take(pa.array(np.unique(wanted))).replace_schema_metadata(None)
        self.texts = [csv_bytes(table) for table in self.tables.values()]
        self.source = folder / "h100" / "mine"
        self.source.mkdir(parents=True)
        (folder / "h100" / "gpu.toml").write_bytes((SHIPPED / "gpu.toml").read_bytes())
        (self.source / "provenance.toml").write_text('gpu = "h100"\n')

    def content(self, name: str, random: Random) -> bytes:
        table = self.tables[name]
        if random.random() < 0.25:
            return mutated_bytes(parquet_bytes(table, random), random)
        return parquet_bytes(mutated_table(table, random, list(self.tables.values())), random)

    def case(self, random: Random) -> bytes:
        name = random.choice(NAMES)
        try:
            return name.encode() + b"\n" + self.content(name, random)
        except (pa.ArrowException, ValueError):
            return b""

    def check(self, case: bytes) -> None:
        if not case:
            raise SkippedError
        word, _, content = case.partition(b"\n")
        name = word.decode(errors="replace")
        if name not in self.tables:
            raise SkippedError
        path = self.source / f"{name}{self.ending}"
        path.write_bytes(content)
        try:
            tables = fastroof.load_tables(self.folder / "h100")
            measured = tables.measured.tables[name]
            if not (measured.columns["latency_us"] > 0.0).all():
                raise Wrong("a kernel takes no time")
            operator = OPERATORS[name]
            if not operator.answers_lookups:
                return
            known = {key: value for key, value in measured.columns.items() if key in operator.arguments}
            for row in (0, -1):
                sizes = {key: value[row] for key, value in known.items()}
                query = {key: value if isinstance(value, str) else int(value) for key, value in sizes.items()}
                found = tables.lookup(name, **query)
                all_finite(found.latency_us, f"lookup of {query}")
                if (found.latency_us <= 0.0).any():
                    raise Wrong(f"{query} takes {found.latency_us} us")
        finally:
            path.unlink()


class ParquetTables(TableFiles):
    name = "table.parquet"
    suffix = ".parquet"


class CsvTables(TableFiles):
    name = "table.csv"
    suffix = ".csv"
    ending = ".csv"

    def content(self, name: str, random: Random) -> bytes:
        if random.random() < 0.3:
            return csv_bytes(mutated_table(self.tables[name], random, list(self.tables.values())))
        return mutated_text(self.texts[NAMES.index(name)], random, self.texts)


TARGETS = [ParquetTables, CsvTables]
