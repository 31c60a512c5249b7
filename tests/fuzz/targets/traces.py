"""Traces of every maker: CSV, JSON lines, Parquet, Arrow, and mappings of arrays."""

from __future__ import annotations

import gzip
import json
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

import fastroof
from fastroof.traces.trace_files import load_lengths
from tests.fuzz.arrow_mutators import mutated_table, parquet_bytes, stream_bytes
from tests.fuzz.expressions import NAMES, evaluated, integer, integer_array, odd
from tests.fuzz.mutators import mutated_bytes
from tests.fuzz.target import SkippedError, Target, TextFiles, Wrong, all_finite
from tests.simulation.test_sessions import PLAIN as LINKED
from tests.simulation.test_sessions import TURNS, an_agent
from tests.traces.test_own_traces import BAILIAN, LOG
from tests.traces.test_trace_files import AZURE_2023, AZURE_2024, BURSTGPT, BURSTGPT_3, MOONCAKE, PLAIN

BLOCKS = "\n".join(map(json.dumps, BAILIAN))
READ_AS: tuple[dict[str, Any], ...] = (
    {"columns": "arrival=Started At,output=Completion Tokens"},
    {"where": ["model=m1", "http_status<400"], "hash_block_size": 16},
)
ONE_LIST = '[{"input_tokens": 5, "output_tokens": 7, "arrival_s": 0.5}]'


def read(path: Path, **options: Any) -> None:
    """Read a file, whose error names it."""
    try:
        answers(fastroof.load_trace(path, **options))
    except fastroof.FastroofError as error:
        if not options and str(path) not in str(error):
            raise Wrong(f"the file is not named: {error}") from None
        raise


def answers(trace: fastroof.Trace) -> None:
    """Look at what was read as those who simulate it would."""
    all_finite(trace.arrival_s)
    if not len(trace) or trace.arrival_s[0] < 0 or (trace.arrival_s[1:] < trace.arrival_s[:-1]).any():
        raise Wrong("arrivals do not rise from 0")
    if trace.input_tokens.min() < 1 or trace.output_tokens.min() < 1 or trace.cached_tokens.min() < 0:
        raise Wrong("a request has no tokens")
    if len(trace) < 10_000:
        again = fastroof.load_trace(trace.table())
        if again.input_tokens.tolist() != trace.input_tokens.tolist():
            raise Wrong("its own table is read as another trace")
        if trace.parents is not None:
            if again.parents is None or again.parents.tolist() != trace.parents.tolist():
                raise Wrong("the links of its own table are others")
            if (trace.parents >= np.repeat(np.arange(len(trace)), np.diff(trace.parent_offsets))).any():
                raise Wrong("a request comes before its parent")


class TraceFiles(TextFiles):
    name = "trace.text"
    ci_cases = 700
    suffix = ""  # content alone distinguishes makers

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        sessions = ("\n".join(map(json.dumps, TURNS)), LINKED, json.dumps(an_agent()))
        makers = (
            AZURE_2023,
            AZURE_2024,
            BURSTGPT,
            BURSTGPT_3,
            MOONCAKE,
            PLAIN,
            ONE_LIST,
            LOG,
            LOG.replace("50,484", "50").replace(";", ","),
            BLOCKS,
            *sessions,
        )
        self.texts = [text.encode() for text in makers]

    def case(self, random: Random) -> bytes:
        text = super().case(random)
        if random.random() < 0.03:
            text = gzip.compress(text, 1, mtime=0)
            text = mutated_bytes(text, random) if random.random() < 0.5 else text
        return text

    def check(self, case: bytes) -> None:
        # a log that goes back as clocks do is read with a warning
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* goes back by", UserWarning)
            super().check(case)

    def read(self) -> None:
        try:
            read(self.path)
        finally:
            # lengths alone are another way in
            with suppress(fastroof.FastroofError):
                load_lengths(self.path)
            for options in READ_AS:
                with suppress(fastroof.FastroofError):
                    read(self.path, **options)


class TraceTables(Target):
    name = "trace.arrow"
    suffix = ".parquet"
    is_bytes = True
    ci_cases = 300

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.path = folder / "trace"
        mooncake = folder / "m.jsonl"
        mooncake.write_text(MOONCAKE)
        self.tables = [
            fastroof.load_trace("example", limit=20).table(), fastroof.load_trace(mooncake).table(),
            fastroof.load_trace({"arrival_s": [0.0, 1.5], "input_tokens": [9, 8], "output_tokens": [1,
            2]}).table(),
            pa.table({"arrival_s": [0.0, 1.0], "input_tokens": [5, 6], "output_tokens": [1, 2],
            "status": [200, 200], "model": ["a", "b"]}),
            fastroof.Workload(rate=1, requests=9, turns=3, think_s=2).trace().table(),
        ]  # fmt: skip

    def case(self, random: Random) -> bytes:
        table = random.choice(self.tables)
        write = random.choice((parquet_bytes, stream_bytes))
        try:
            if random.random() < 0.3:
                return mutated_bytes(write(table, random), random)
            return write(mutated_table(table, random, self.tables), random)
        except (ValueError, OSError):
            return b""

    def check(self, case: bytes) -> None:
        if not case:
            raise SkippedError
        self.path.write_bytes(case)
        with suppress(fastroof.FastroofError):
            read(self.path, where="model=a")
        read(self.path)


class TraceArrays(Target):
    name = "trace.arrays"
    ci_cases = 1500
    links = ("session", "parent", "delay_s", "id")

    def case(self, random: Random) -> bytes:
        count = random.choice((1, 2, 5))
        words = {
            name: integer_array(random, 3000, count)
            for name in (
                "arrival_s",
                "input_tokens",
                "output_tokens",
                "cached_tokens",
                *self.links,
                "hash_ids",
            )
            if random.random() < (0.95 if name != "hash_ids" and name not in self.links else 0.1)
        }
        if words and random.random() < 0.4:
            words[random.choice(list(words))] = odd(random)
        given = ", ".join(f"{name!r}: {value}" for name, value in words.items())
        options = {}
        if random.random() < 0.3:
            name = random.choice(("format", "limit", "rate_scale", "hash_block_size", "columns", "where"))
            given_options = (
                "'azure'", "'plain'", "0.5", "'UTC'", "'output_tokens>1'", "'arrival_ms=arrival_s'",
                "{'input': 'output_tokens'}", "{'cached_tokens': 0}",
            )  # fmt: skip
            options[name] = random.choice((odd(random), integer(random, 5), *given_options))
        return f"f({{{given}}}{''.join(f', {name}={value}' for name, value in options.items())})".encode()

    def check(self, case: bytes) -> None:
        given, options = evaluated(case.decode(), NAMES)
        answers(fastroof.load_trace(*given, **options))


class TraceFields(Target):
    """The class itself: its arguments, and on a line of its own a call of what was made."""

    name = "trace.class"
    ci_cases = 800
    fields = (
        "hash_ids",
        "hash_offsets",
        "hash_block_size",
        "clients",
        "think_s",
        "order",
        "parents",
        "parent_offsets",
        "delay_s",
        "session",
        "name",
        "left_out",
    )

    def case(self, random: Random) -> bytes:
        count = random.choice((1, 2, 5))
        words = [integer_array(random, 3000, count) for _ in range(random.choice((3, 3, 4)))]
        if random.random() < 0.3:
            words[random.randrange(len(words))] = odd(random)
        for name in self.fields:
            if random.random() < 0.04:
                value = random.choice((odd(random), integer(random, 9), integer_array(random, 9)))
                words.append(f"{name}={value}")
        text = f"f({', '.join(words)})"
        if random.random() < 0.4:
            value = random.choice((odd(random), "0.5", "1", "2.5"))
            name = random.choice(("rate_scaled", "limited", "sliced"))
            text += f"\n({name!r}, {value})"
        return text.encode()

    def check(self, case: bytes) -> None:
        text, _, call = case.decode().partition("\n")
        given, options = evaluated(text, NAMES)
        wanted = evaluated(call, NAMES) if call else None
        trace = fastroof.Trace(*given, **options)
        answers(trace)
        if wanted is not None:
            answers(getattr(trace, wanted[0])(wanted[1]))


TARGETS = [TraceFiles, TraceTables, TraceArrays, TraceFields]
