"""Traces of production logs and other simulators: own names, separators, zones, failures, filters."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace, TraceError, load_trace
from fastroof.traces.trace_files import load_lengths
from fastroof.traces.trace_formats import FORMATS, PLAIN
from fastroof.traces.trace_writing import WRITTEN, write_trace

LOG = """Request ID;Started At;Model;Prompt Tokens;Completion Tokens;HTTP Status
a;2025-10-26 02:38:50,484+02:00;m1;100;10;200
b;2025-10-26 02:38:52.5+02:00;m2;200;20;200
c;2025-10-26 02:10:00+01:00;m1;300;;499
d;2025-10-26T01:38:55Z;m1;400;0;200
e;2025-10-26 01:38:54.484 +00:00;m1;500;50;201
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(content: str, name: str = "log.csv") -> Path:
        path = tmp_path / name
        path.write_text(content)
        return path

    return written


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as error:
        load_trace(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_gateways_log(write: Callable[..., Path]) -> None:
    trace = load_trace(write(LOG))
    assert trace.input_tokens.tolist() == [100, 200, 500]
    np.testing.assert_allclose(trace.arrival_s, [0, 2.016, 3604.0], rtol=1e-12)
    assert trace.left_out == {"HTTP Status 499": 1, "Completion Tokens 0": 1}
    assert load_trace(write(LOG.replace("201", "503"))).left_out["HTTP Status 503"] == 1
    # without a status the empty output shows the same
    bare = "\n".join(line.rpartition(";")[0] for line in LOG.splitlines())
    assert load_trace(write(bare)).left_out == {"Completion Tokens 0": 1, "Completion Tokens missing": 1}
    only = load_trace(write(LOG), where="Model=m1")
    assert only.input_tokens.tolist() == [100, 500]
    assert only.left_out == {"not Model=m1": 1} | trace.left_out
    for same in (["model = m1", "HTTP Status<499"], {"model": "m1", "http_status": 200}):
        found = load_trace(write(LOG.replace("201", "200")), where=same)
        assert found.input_tokens.tolist() == [100, 500]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_and_own_names(write: Callable[..., Path], separator: str) -> None:
    rows = [("Begun at", "In", "Out", "What"), ("0.5", "10", "1", "a"), ("2.5", "20", "2", "b")]
    path = write("\n".join(separator.join(row) for row in rows))
    columns = "arrival_s=begun_at,input=In,output=out"
    for wanted in (columns, dict(pair.split("=") for pair in columns.split(","))):
        trace = load_trace(path, columns=wanted)
        assert (trace.arrival_s.tolist(), trace.output_tokens.tolist()) == ([0.0, 2.0], [1, 2])
    assert load_trace(path, columns=columns, where="what!=a").input_tokens.tolist() == [20]
    assert load_trace(path, columns=columns.replace("_s=", "_ms=")).duration_s == 0.002
    lengths = load_lengths(path, columns="input=In,output=Out", where={"What": "b"})
    assert lengths.input_tokens.tolist() == [20]


def test_the_usual_name_of_arrivals_goes_before_others_of_a_log(write: Callable[..., Path]) -> None:
    head, row = "created_at,started_at,time,isl,osl", "2026-01-01,2026-01-01,2026-01-0{},10,1"
    both = "\n".join([head, row.format(1), row.format(2)])
    assert load_trace(write(both)).duration_s == 86400
    assert load_trace(write(both), columns="arrival=started_at").duration_s == 0
    text = refusal(write(both.replace("time", "note")))
    assert "columns 'created_at' and 'started_at' all have arrivals: keep one, or name it (columns or" in text


def test_own_names_in_json_lines_and_tables(write: Callable[..., Path]) -> None:
    rows = [
        {"begun": 3, "in": 7, "ok": False},  # failed before it had an output
        {"begun": 5, "in": 8, "out": 2, "ok": True, "model": "a"},
        {"begun": 9, "in": 9, "out": None, "ok": True, "model": "b"},
        {"begun": 11, "in": 9, "out": 3, "ok": True, "model": "b"},
    ]
    path = write("".join(json.dumps(row) + "\n" for row in rows), "log.jsonl")
    columns = {"arrival_s": "begun", "input": "in", "output": "out", "status": "ok"}
    table = pa.Table.from_pylist(rows[1:] + rows[:1])
    for source in (path, table):
        trace = load_trace(source, columns=columns)
        assert trace.input_tokens.tolist() == [8, 9]
        assert trace.left_out == {"ok false": 1, "out missing": 1}
    assert load_trace(path, columns=columns, where="model=b").duration_s == 0
    assert load_trace(path, columns=columns, where="begun>=5").left_out["not begun>=5"] == 1


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (("0,5", "1,25"), 0.75),
        (("0,500", "12,250"), 11.75),
        (("1000,5", "1002,0"), 1.5),
        (("3", "1234,500"), 1231.5),
    ],
)
def test_decimal_commas_that_cannot_be_of_thousands(
    write: Callable[..., Path], written: tuple[str, ...], seconds: float
) -> None:
    first, second = written
    path = write(f"arrival_s;isl;osl\n{first};10;1,0\n{second};20;2,0\n")
    trace = load_trace(path)
    assert (trace.duration_s, trace.output_tokens.tolist()) == (seconds, [1, 2])


@pytest.mark.parametrize("written", ["1,234", "12,345", "1,234.5", "1,234,567"])
def test_a_comma_of_decimals_or_thousands_is_refused(write: Callable[..., Path], written: str) -> None:
    for row, name in ((f"{written};20;2", "arrival_s"), (f"2;20;{written}", "osl")):
        text = refusal(write(f"arrival_s;isl;osl\n1;10;1\n{row}\n"))
        assert (
            f"line 3: {name} '{written}' has a comma of decimals or thousands: write a point or none" in text
        )


def test_clock_changes(write: Callable[..., Path]) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    moments = [
        datetime(2025, 10, 25, 23, 30, tzinfo=ZoneInfo("UTC")).timestamp() + 420 * i for i in range(30)
    ]
    local = [datetime.fromtimestamp(moment, berlin) for moment in moments]
    plain = write("time,isl,osl\n" + "".join(f"{one:%Y-%m-%d %H:%M:%S},10,1\n" for one in local))
    with pytest.warns(UserWarning, match=r"line 15: time goes back by 53 minutes, as if clocks changed"):
        load_trace(plain)
    zoned = write("time,isl,osl\n" + "".join(f"{one.isoformat(' ')},10,1\n" for one in local))
    assert load_trace(zoned).arrival_s.tolist() == [moment - moments[0] for moment in moments]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a pair out of order is no clock change
        load_trace(write("time,isl,osl\n2025-10-26 01:00:00.02,10,1\n2025-10-26 01:00:00.01,10,1\n"))


BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 9,
     "type": "text", "turn": 1, "hash_ids": [5, 6, 7]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.5, "input_length": 48, "output_length": 9,
     "type": "text", "turn": 2, "hash_ids": [5, 6, 8]},
]  # fmt: skip


def test_blocks_of_bailian_and_of_other_sizes(write: Callable[..., Path]) -> None:
    def lines(*rows: dict[str, Any]) -> Path:
        return write("".join(json.dumps(row) + "\n" for row in rows), "a.jsonl")

    trace = load_trace(lines(*BAILIAN))
    assert trace.duration_s == pytest.approx(1.386)
    assert (trace.hash_block_size, trace.name) == (16, "a")
    assert trace.hash_ids is not None
    assert trace.hash_ids.tolist() == [5, 6, 7, 5, 6, 8]
    # the same ids under Mooncake's names, and of other sizes: the number of ids gives the size
    other = [{k: v for k, v in row.items() if k in ("timestamp", "input_length", "output_length", "hash_ids")}
             for row in BAILIAN]  # fmt: skip
    assert load_trace(lines(*other)).hash_block_size == 16
    assert load_trace(lines(*(row | {"input_length": 100} for row in BAILIAN)), format="mooncake",
                      hash_block_size=48).hash_block_size == 48  # fmt: skip
    one = BAILIAN[0] | {"input_length": 17, "hash_ids": [1]}
    text = refusal(lines(one))
    assert "hash_ids are not of 16 tokens each; they could be of 32 or 64" in text
    assert "give hash_block_size" in text
    assert load_trace(lines(one), hash_block_size=64).hash_block_size == 64
    uneven = BAILIAN[1] | {"hash_ids": [5, 6]}
    assert "line 2: hash_ids has 2 ids, and a prompt of 48 tokens has 3 blocks of 16" in refusal(
        lines(BAILIAN[0], uneven)
    )


def test_simulators_traces(write: Callable[..., Path]) -> None:
    rows = [(0.0, 500, 100), (0.5, 700, 200), (1.1, 300, 100)]
    expected = Trace(*zip(*rows, strict=True))
    llm = "".join(
        json.dumps({"input_toks": i, "output_toks": o, "arrival_time_ns": round(s * 1e9)}) + "\n"
        for s, i, o in rows
    )
    split = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    split += "".join(f"{n},2,0,{s},1,{i},{o}\n" for n, (s, i, o) in enumerate(rows))
    for path, format in ((write(llm, "a.jsonl"), "llmservingsim"), (write(split, "a.csv"), "splitwise")):
        trace = load_trace(path)
        for name in ("arrival_s", "input_tokens", "output_tokens"):
            assert (getattr(trace, name) == getattr(expected, name)).all(), (path, name)
        if format in WRITTEN:
            written = path.read_bytes()
            assert write_trace(expected, path, format) == []
            assert path.read_bytes() == written


@given(
    rows=st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=20
    ),
    block=st.sampled_from([0, 16, 512]),
)
def test_a_trace_comes_back_from_every_simulators_file(tmp_path_factory: Any, rows: Any, block: int) -> None:
    arrival_s, prompts, outputs = map(np.array, zip(*rows, strict=True))
    hashes: dict[str, Any] = {}
    if block:
        counts = -(-prompts // block)
        ids = np.arange(counts.sum()) % 7
        hashes = {"hash_ids": ids, "hash_offsets": np.append(0, np.cumsum(counts)), "hash_block_size": block}
    trace = Trace(arrival_s - arrival_s.min(), prompts, outputs, prompts // 2, **hashes)
    folder = tmp_path_factory.mktemp("traces")
    for format, suffix in WRITTEN.items():
        without = write_trace(trace, folder / f"a{suffix}", format)
        given_size = {"hash_block_size": block} if block and format == "mooncake" else {}
        back = load_trace(folder / f"a{suffix}", **given_size)
        np.testing.assert_allclose(back.arrival_s, trace.arrival_s, rtol=1e-15, atol=1.01e-9)
        for name in ("input_tokens", "output_tokens"):
            assert (getattr(back, name) == getattr(trace, name)).all()
        assert without == ["cached_tokens"] * (format != "plain" and bool(trace.cached_tokens.any())) + [
            "hash_ids"
        ] * (format != "mooncake" and bool(block))
        if given_size:
            assert (back.hash_ids == trace.hash_ids).all()  # type: ignore[union-attr]
        if format == "plain":
            assert (back.cached_tokens == trace.cached_tokens).all()


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    trace = Trace([0.0], [1], [1])
    for path, format, words in (
        ("a.csv", "vidur", "format must be one of plain, mooncake, llmservingsim, got 'vidur'"),
        ("a.jsonl", "plain", "plain traces are .csv files"),
        ("none/a.csv", "plain", "trace .*none/a.csv"),
    ):
        with pytest.raises(TraceError, match=words):
            write_trace(trace, tmp_path / path, format)
    with pytest.raises(TraceError, match="is a closed loop, whose arrivals depend on the answers"):
        write_trace(fastroof.Workload(clients=2).trace(), tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_errors_name_every_accepted_name(write: Callable[..., Path]) -> None:
    text = refusal(write("a;b\n1;2\n"))
    assert all(name in text for name in PLAIN.arrivals)
    assert "its columns are 'a', 'b': name one (columns or --columns arrival=COLUMN)" in text
    text = refusal(write("arrival_s;b\n1;2\n"))
    assert all(name in text for name in PLAIN.input_tokens)
    assert "--columns input=COLUMN" in text
    assert ", ".join(FORMATS) in refusal(write("a\n1\n"), format="csv")
    path = write(LOG)
    for columns in ("arrival", "when=Started At", "input=", {"input": 5}, 7, ["input"]):
        text = refusal(path, columns=columns)
        assert text.startswith("columns must be ROLE=COLUMN such as arrival=started_at,input=prompt_tokens,")
        assert "arrival_s, arrival_ms, arrival_us or arrival_ns if it is a number), input, output, " in text
    assert "has no column 'prompt_token'; did you mean 'Prompt Tokens'? its columns are 'Requ" in refusal(
        path, columns="input=prompt_token"
    )
    assert "columns name arrival twice: a and b" in refusal(path, columns="arrival=a,arrival_ms=b")
    text = refusal(write("stamp,isl,osl\n1,10,1\n"), columns="arrival=stamp")
    assert "columns or --columns arrival_s=stamp, or arrival_ms, arrival_us, arrival_ns" in text
    path = write(LOG)
    for where, words in (
        ("model", "where must be COLUMN=VALUE, or with !=, <, <=, > or >="),
        (5, "where must be COLUMN=VALUE"),
        ("models=m1", "has no column 'models'; did you mean 'Model'?"),
        ("model=m3", "has no rows with model=m3: it holds 'm1', 'm2'"),
        ("model<3", "model<3 compares numbers"),
        ("prompt tokens<x", "compares numbers"),
    ):
        assert words in refusal(path, where=where)


def test_the_log_of_the_samples_agrees_with_pythons_own_reading(shared: Path) -> None:
    folder = shared / "cases" / "traces"
    if not folder.is_dir():
        pytest.skip("no sample traces beside the checkout")
    with open(folder / "prod.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["HTTP Status"] == "200"]
    for where in (None, "model=gpt-oss-120b"):
        kept = [row for row in rows if where is None or row["Model"] == "gpt-oss-120b"]
        kept.sort(key=lambda row: datetime.fromisoformat(row["Started At"]))
        times = np.array([datetime.fromisoformat(row["Started At"]).timestamp() for row in kept])
        trace = load_trace(folder / "prod.csv", where=where)
        np.testing.assert_allclose(trace.arrival_s, times - times[0], atol=2e-6)
        for name, column in (
            ("input_tokens", "Prompt Tokens"), ("output_tokens", "Completion Tokens"),
            ("cached_tokens", "Cached Prompt Tokens"),
        ):  # fmt: skip
            assert getattr(trace, name).tolist() == [int(row[column]) for row in kept]
        assert sum(trace.left_out.values()) + len(trace) == 1499
    german = load_trace(folder / "prod_de.csv", columns="arrival=Zeit")
    assert (len(german), german.left_out) == (1499, {})
