"""Traces of every format are read as written, and errors name the place."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace, TraceError, load_trace
from fastroof.traces.trace_files import load_lengths
from fastroof.traces.trace_formats import PLAIN as PLAIN_FORMAT
from fastroof.traces.trace_formats import UNITS

ROWS = ("arrival_s", "input_tokens", "output_tokens", "cached_tokens", "order")

# heads as their makers publish them
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-12 00:00:00.001163+00:00,100,20\n2024-05-12 00:00:10+00:00,200,0\n"
    "2024-05-12 01:00:10.5+01:00,300,40\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
    "47,ChatGPT,900,0,900,API log\n118,GPT-4,417,276,693,Conversation log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
    "19440161.0,d5983bf9,2,ChatGPT,36,29,65,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 513, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 27, "input_length": 512, "output_length": 490, "hash_ids": [0]}\n'
)
PLAIN = "arrival_s,input_tokens,output_tokens\n0,10,1\n0.5,20,2\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(content: str | bytes, name: str = "a.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def test_azure_of_2023(write: Callable[..., Path]) -> None:
    trace = load_trace(write(AZURE_2023, "conv.csv"))
    assert trace.name == "conv"
    np.testing.assert_allclose(trace.arrival_s, [0, 4.314579, 4.541877], rtol=1e-15)
    assert trace.input_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.left_out == {}


def test_azure_of_2024_has_zones_and_seconds_without_fractions(write: Callable[..., Path]) -> None:
    trace = load_trace(write(AZURE_2024))
    np.testing.assert_allclose(trace.arrival_s, [0, 10.498837], rtol=1e-15)
    assert trace.left_out == {"GeneratedTokens 0": 1}


@pytest.mark.parametrize(
    ("content", "arrival_s", "left_out"),
    [(BURSTGPT, [0, 40, 113], {"Response tokens 0": 1}), (BURSTGPT_3, [0, 51], {})],
)
def test_burstgpt(write: Callable[..., Path], content: str, arrival_s: list[float], left_out: Any) -> None:
    trace = load_trace(write(content))
    assert trace.arrival_s.tolist() == arrival_s
    assert trace.left_out == left_out


def test_mooncake(write: Callable[..., Path]) -> None:
    trace = load_trace(write(MOONCAKE, "a.jsonl"))
    assert trace.arrival_s.tolist() == [0, 0.027]
    assert trace.hash_block_size == 512
    assert trace.hash_ids.tolist() == [0, 1, 0]  # type: ignore[union-attr]
    assert trace.hash_offsets.tolist() == [0, 2, 3]  # type: ignore[union-attr]
    with pytest.raises(TraceError, match=r"line 1: hash_ids has 2 ids, and a prompt of 513 tokens has 3"):
        load_trace(write(MOONCAKE, "a.jsonl"), hash_block_size=256)


@pytest.mark.parametrize("names", [
    "arrival_ms,prompt_tokens,completion_tokens",
    "timestamp_ms, Input Length ,output_len",
    "arrival_us,isl,osl",
])  # fmt: skip
def test_other_names_of_a_plain_trace(write: Callable[..., Path], names: str) -> None:
    trace = load_trace(write(f"{names}\n1000,10,1\n2000,20,2\n"))
    assert trace.arrival_s.tolist() == [0, 1e-3 if "_us" in names else 1]
    assert trace.output_tokens.tolist() == [1, 2]


@pytest.mark.parametrize("name", [name for name, per_s in PLAIN_FORMAT.arrivals.items() if per_s is not None])
def test_the_unit_of_arrivals_is_that_of_their_name(write: Callable[..., Path], name: str) -> None:
    unit_s = 1 / UNITS.get(name.rpartition("_")[2], 1.0)
    trace = load_trace(write(f"{name},isl,osl\n4000000,10,1\n10000000,20,2\n"))
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 6e6 * unit_s])


def test_what_fastroof_calls_it_goes_before_what_others_do(write: Callable[..., Path]) -> None:
    trace = load_trace(write("timestamp,arrival_s,input_tokens,prompt_len,output_tokens\nx,0,5,6,7\n"))
    assert trace.input_tokens.tolist() == [5]


def test_vidurs_traces_are_plain(write: Callable[..., Path]) -> None:
    content = "arrived_at,num_prefill_tokens,num_decode_tokens,num_total_tokens\n0.5,100.0,10,110\n"
    assert load_trace(write(content)).input_tokens.tolist() == [100]


def test_a_format_is_forced(write: Callable[..., Path]) -> None:
    path = write("timestamp,input_length,output_length\n1000,10,1\n3000,20,0\n")
    assert load_trace(path).arrival_s.tolist() == [0]
    assert load_trace(path, format="mooncake").left_out == {"output_length 0": 1}
    for format, message in (
        ("plain", "must be a date and time, got '1000'"),
        ("burst", "format must be one of azure"),
        ("burstgpt", "no column of prompts' tokens"),
    ):
        with pytest.raises(TraceError, match=message):
            load_trace(path, format=format)


def test_texts_may_be_compressed_marked_and_have_blank_lines(write: Callable[..., Path]) -> None:
    path = write(gzip.compress(b"\xef\xbb\xbf\n" + PLAIN.replace("\n", "\r\n\r\n").encode()), "b.csv.gz")
    assert load_trace(path).arrival_s.tolist() == [0, 0.5]
    assert load_trace(path).name == "b"
    lines = "\ufeff" + MOONCAKE.replace("\n", "\n\n")
    assert len(load_trace(write(lines, "b.jsonl"))) == 2


rows = st.lists(
    st.tuples(
        st.floats(0, 1e6), st.integers(2, 3000), st.integers(1, 3000), st.integers(0, 1),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@given(rows)
def test_a_trace_comes_back_from_every_file(tmp_path_factory: Any, drawn: Any) -> None:
    arrival_s, prompts, answers, cached = map(np.array, zip(*drawn, strict=True))
    arrival_s = arrival_s - arrival_s.min()
    blocks = -(-prompts // 512)
    hashes = {"hash_ids": np.arange(blocks.sum()), "hash_offsets": np.append(0, np.cumsum(blocks))}
    trace = Trace(arrival_s, prompts, answers, cached, **hashes, hash_block_size=512, name="a")
    folder = tmp_path_factory.mktemp("traces")
    table = trace.table()
    pa.parquet.write_table(table, folder / "a.parquet")
    pa.feather.write_feather(table, folder / "a.arrow")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    pa.csv.write_csv(table.drop_columns("hash_ids"), folder / "a.csv")
    sources = [table, trace, *folder.iterdir()]
    assert len(sources) == 6
    for source in sources:
        back = load_trace(source)
        for name in ROWS:
            assert (getattr(back, name) == getattr(trace, name)).all(), (source, name)
        assert back.name == "a"
        if source != folder / "a.csv":
            assert (back.hash_ids == trace.hash_ids).all()
            assert (back.hash_offsets == trace.hash_offsets).all()


def test_a_closed_loops_table_is_marked() -> None:
    back = load_trace(fastroof.Workload(clients=3, think_s=0.25, requests=5).trace().table())
    assert (back.clients, back.think_s, len(back)) == (3, 0.25, 5)


def test_tables_and_arrays_of_many_types() -> None:
    times = np.array(["2024-01-01T00:00:02.5", "2024-01-01"], "datetime64[ms]")
    for arrival, expected in ((times, 2.5), (pa.array(times), 2.5), ([7, 3], 4), ([0.5, 0.0], 0.5),
                              (np.array([3, 1], np.uint8), 2)):  # fmt: skip
        name = "timestamp" if expected == 2.5 else "arrival_s"
        for sizes in (np.array([9, 8], np.uint64), pa.array([9, 8], pa.int16()), [9.0, 8.0], (9, 8)):
            trace = load_trace({name: arrival, "input_tokens": sizes, "output_tokens": sizes})
            assert trace.arrival_s.tolist() == [0, expected]
            assert trace.in_file_order(trace.input_tokens).tolist() == [9, 8]
    text = {"time": ["2024-01-01", "2024-01-02"], "input_tokens": [1, 2], "output_tokens": [1, 2]}
    assert load_trace(pa.table(text)).duration_s == 86400


def test_lengths_need_no_arrivals(write: Callable[..., Path]) -> None:
    path = write("prompt_tokens,completion_tokens\n10,1\n20,2\n")
    assert load_lengths(path).input_tokens.tolist() == [10, 20]
    file = f"file:{path}"
    drawn = fastroof.Workload(clients=2, isl=file, osl=file).trace()
    assert (drawn.input_tokens == drawn.output_tokens * 10).all()
    with pytest.raises(TraceError, match="no column of arrivals"):
        load_trace(path)


def test_the_example_ships() -> None:
    trace = load_trace("example")
    assert (len(trace), trace.name) == (600, "example")
    assert trace.arrival_s[0] == 0
    fast = load_trace("example", limit=10, rate_scale=2)
    assert (fast.arrival_s == trace.arrival_s[:10] / 2).all()


def test_the_example_is_the_head_of_what_azure_published(shared: Path) -> None:
    whole, few = load_trace(shared / "reference/traces/azure_2023_conv.csv", limit=600), load_trace("example")
    for name in ROWS:
        assert (getattr(whole, name) == getattr(few, name)).all()


def test_real_traces(shared: Path) -> None:
    folder = shared / "reference" / "traces"
    counts = {"azure_2023_conv.csv": 19366, "azure_2023_code.csv": 8819, "mooncake_conversation.jsonl": 12031}
    for name, count in counts.items():
        trace = load_trace(folder / name)
        assert len(trace) == count
        assert trace.left_out == {}
        assert 2000 < trace.duration_s < 3600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "has no header"),
        ("{}", "has no column of arrivals"),
        ("arrival_s,input_tokens,output_tokens\n", "has no requests"),
        ("a,b\n1,2\n", "no column of arrivals: in plain traces it is arrival_s or arrival_time_s"),
        ("arrival_s;input_tokens\n", "its columns are 'arrival_s', 'input_tokens'"),
        ("arrival_s,input_tokens,input_tokens,output_tokens\n0,1,2,3\n", "and 'input_tokens' all have"),
        ("arrival_s,isl,prompt_len,osl\n0,1,2,3\n", "'isl' and 'prompt_len' all have prompts' tokens"),
        (PLAIN + "1,2\n", "line 4: Expected 3 columns, got 2"),
        (PLAIN + "\n\nnan,30,3\n", "line 6: arrival_s must be a number of at least 0, got nan"),
        (PLAIN + "inf,30,3\n", "line 4: arrival_s"),
        (PLAIN + "-1,30,3\n", "line 4: arrival_s must be a number of at least 0, got -1.0"),
        (PLAIN + "1e300,30,3\n", r"line 4: arrival_s is over 1e+10 s after the first arrival"),
        (PLAIN + "soon,30,3\n", "line 4: arrival_s must be a number, got 'soon'"),
        (PLAIN + ",30,3\n", "line 4: arrival_s must be a number, got ''"),
        (PLAIN + "1,x,3\n", "line 4: input_tokens must be a whole number, got 'x'"),
        (PLAIN + "1,,3\n", "line 4: input_tokens"),
        (PLAIN + "1,NaN,3\n", "line 4: input_tokens"),
        (PLAIN + "1,2.5,3\n", "line 4: input_tokens must be a whole number below 2^63, got 2.5"),
        (PLAIN + "1,0,3\n", "line 4: input_tokens must be tokens from 1 to 16,777,216, got 0"),
        (PLAIN + "1,1e30,3\n", "line 4: input_tokens must be a whole number"),
        (PLAIN + "1,99999999999999999999,3\n", "line 4: input_tokens must be a whole number"),
        (PLAIN + "1,20000000,3\n", "line 4: input_tokens must be tokens from"),
        (PLAIN + "1,2,-3\n", "line 4: output_tokens"),
        (PLAIN + "1,2,true\n", "line 4: output_tokens"),
        (PLAIN + "1,2,\xff\n", "line 4: CSV conversion error to string: invalid UTF8 data"),
        ("arrival_s,input_tokens,output_tokens,cached_tokens\n0,5,1,5\n", "line 2: cached_tokens 5"),
        (AZURE_2023 + "\r\n2023-11-16 18:15,1,x", "line 5: GeneratedTokens"),
        (AZURE_2023 + "\r\n2023-11-46 18:15,1,2", "line 5: TIMESTAMP must be a date and time without a zone"),
        (AZURE_2024 + "2024-05-12 00:00:10,1,2", "line 5: TIMESTAMP must be a date and time with a zone"),
        (AZURE_2023 + "\r\n5,1,2", "line 5: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,2\n", "must be a date and time, got '5'"),
        (BURSTGPT.replace(",18,", ",0,").replace(",230,", ",0,").replace(",276,", ",0,"),
         "has no requests, 4 left out with Response tokens 0"),
        ("arrival_s,input_tokens,output_tokens,hash_ids\n0,5,1,[1]\n", "are lists, which CSV has not"),
        (MOONCAKE + "{", "line 3 is not JSON"),
        (MOONCAKE + "\n[1]", "line 4: JSON lines need one object per line, got list"),
        ("[" * 200_000, "line 1 has more than 64 nested lists"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1}', "line 3: hash_ids is missing"),
        (MOONCAKE.replace("27", "NaN"), "line 2: timestamp must be a number of at least 0, got nan"),
        (MOONCAKE.replace("27", '"x"'), "line 2: timestamp cannot be 'x'"),
        (MOONCAKE.replace("27", "9" * 400), "line 2: timestamp cannot be 9999"),
        (MOONCAKE.replace("27", "null"), "line 2: timestamp is missing"),
        (MOONCAKE.replace("27", "true"), "line 2: timestamp cannot be True"),
        (MOONCAKE.replace("27", '1, "timestamp": 2'), "line 2: 'timestamp' is repeated"),
        (MOONCAKE.replace("[0]", "[0, 1]"), "line 2: hash_ids has 2 ids"),
        (MOONCAKE.replace("[0]", "[null]"), "line 2: hash_ids has an id that is missing"),
        (MOONCAKE.replace("[0]", "[0.5]"), "hash_ids must be a list of whole numbers"),
        (MOONCAKE.replace("[0]", "7"), "line 2: hash_ids cannot be 7"),
        (MOONCAKE.replace("[0]", '["a"]'), "line 2: hash_ids cannot be"),
        (MOONCAKE.replace("490", "true"), "line 2: output_length cannot be True"),
        (MOONCAKE.replace("490", "[1]"), "line 2: output_length cannot be"),
        ("PAR1", "is not a complete Parquet file"),
        ("ARROW1\0\0", "is not a complete Arrow file"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_line(write: Callable[..., Path], content: str, message: str) -> None:
    path = write(content.encode("latin-1"), "wrong.txt")
    with pytest.raises(TraceError, match=re.escape(message)) as raised:
        load_trace(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 600


LIMITED = """
import os, resource, sys
import fastroof, fastroof.parquet, fastroof.traces.trace_files
from fastroof.host import usable_memory_bytes
room = int(sys.argv[2]) * 2**20
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
assert usable_memory_bytes() <= room
try:
    print(fastroof.load_trace(sys.argv[1]))
except fastroof.TraceError as error:
    print(error, flush=True)
os._exit(0)  # as commands do: threads of Arrow end badly without memory
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "room_mib", "words"),
    [
        ("parquet", 80, r"\(4,000,000 rows take at least 0.0894 GiB, 0.0\d+ GiB are usable\)"),
        ("parquet", 120, r"\((4,000,000 rows take at least 0.0894 GiB, .*; .*|Unable to allocate .*)\)"),
        ("arrow", 80, r"(\(.*\))?"),
        ("csv.gz", 80, r"(\(.*\))?"),
        ("jsonl.gz", 80, r"(\(.*\))?"),
    ],
)
def test_a_trace_beyond_memory_is_refused(tmp_path: Path, kind: str, room_mib: int, words: str) -> None:
    path = tmp_path / f"a.{kind}"
    large = pa.table({name: np.ones(4 * 10**6, int) for name in ROWS[:3]})
    if kind == "parquet":
        pa.parquet.write_table(large, path)
    elif kind == "arrow":
        pa.feather.write_feather(large, path, compression="zstd")
    else:
        head, line = ("arrival_s,input_tokens,output_tokens", "0,1,1") if kind == "csv.gz" else ("", MOONCAKE)
        path.write_bytes(gzip.compress(f"{head}\n{line * (2 * 10**8 // len(line))}".encode(), 1))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(room_mib)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    advice = "; give fewer rows or use a machine with more memory"
    expected = rf"trace {re.escape(str(path))} does not fit in memory ?{words}{advice}\n"
    assert re.fullmatch(expected, done.stdout), done.stdout


def test_a_compressed_file_is_not_unpacked_beyond_memory(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(gzip.compress(PLAIN.encode()), "a.csv.gz")
    monkeypatch.setattr("fastroof.traces.raw_files.usable_memory_bytes", lambda: 20)
    with pytest.raises(TraceError, match=r"does not fit in memory \(over the 1.86e-08 GiB that are usable"):
        load_trace(path)


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"\x1f\x8b not gzip")
    for path in (tmp_path, tmp_path / "none.csv", tmp_path / "a.csv.gz", tmp_path / ("x" * 300)):
        with pytest.raises(TraceError, match="trace "):
            load_trace(path)
    for source in (5, None, [1, 2], b"a.csv", object()):
        with pytest.raises(TraceError, match="a trace must be a path, an Arrow table"):
            load_trace(source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_tokens": [1]}, "have one length|one length, got"),
        ({"input_tokens": [[1, 2], [3, 4]]}, "input_tokens must be a number, got list"),
        ({"input_tokens": [1, None]}, "row 1: input_tokens is missing"),
        ({"input_tokens": [1, "x"]}, "input_tokens must be a column"),
        ({"input_tokens": ["1", "2"]}, "row 0: input_tokens must be a number, got string"),
        ({"input_tokens": [True, False]}, "got bool"),
        ({"input_tokens": np.ones((2, 2))}, "input_tokens must be a column"),
        ({"input_tokens": [2**70, 1]}, "input_tokens must be a column|whole number"),
        (
            {"input_tokens": np.array([1, 2**64 - 1], np.uint64)},
            "row 1: input_tokens must be a whole",
        ),
        ({"input_tokens": [1.0, 2.0**63]}, r"row 1: input_tokens must be .* below 2\^63, got 9\.22"),
        ({"input_tokens": [1.0, np.nan]}, "row 1: input_tokens must be a whole number"),
        (
            {"hash_ids": pa.array([[1], [2, 2**63]], pa.list_(pa.uint64())), "hash_block_size": 16},
            "row 1: hash_ids must be a whole number below",
        ),
        ({"input_tokens": object()}, "input_tokens must be a column"),
        ({"arrival_s": [0, np.nan]}, "row 1: arrival_s must be a number"),
        ({"arrival_s": [[], []]}, "arrival_s must be a number"),
        ({"arrival_s": np.array(["2024", "NaT"], "datetime64[s]")}, "row 1: arrival_s is missing"),
        ({"arrival_s": np.array([-(2**62), 2**62], "datetime64[s]")}, "row 1: arrival_s is over"),
    ],
)
def test_wrong_arrays_name_the_row(given: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"arrival_s": [0, 1], "input_tokens": [5, 6], "output_tokens": [1, 2]}
    with pytest.raises(TraceError, match=message):
        load_trace({**good, **given})


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.int64()), pa.bool_(), pa.int64(), pa.null()])
def test_a_table_without_rows_has_no_requests_whatever_its_types(kind: Any) -> None:
    table = pa.table({name: pa.nulls(0, kind) for name in ("arrival_s", "input_tokens", "output_tokens")})
    with pytest.raises(TraceError, match="the table has no requests"):
        load_trace(table)
