"""rows.py, own.py and write.py: what is read, what is refused, and that writing loses nothing."""

from __future__ import annotations

import csv
import io
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import Tables, load_tables
from fastroof.columns import OPTIONAL_COLUMNS, Column
from fastroof.errors import FastroofError, GpuError, TableError
from fastroof.load import load_measured
from fastroof.load.rows import read_columns
from fastroof.load.sources import list_sources, load_sources
from fastroof.load.write import toml_text, write_source
from fastroof.operators.registry import OPERATORS
from tests.reference.call_counts import calls_in

SHIPPED_H100 = Path(__file__).resolve().parents[2] / "bench_data" / "h100"
GEMM = OPERATORS["gemm"]


def gemm_rows(rows: int = 4, **changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "dtype": np.full(rows, "bf16", object),
        "m": np.arange(1, rows + 1),
        "n": np.full(rows, 4096),
        "k": np.full(rows, 4096),
        "latency_us": 15.0 + np.arange(rows) / 3,
    }
    return table | changes


def write_csv(path: Path, columns: dict[str, Any]) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    path.write_text(text.getvalue())
    return path


def write_table(path: Path, columns: dict[str, Any]) -> Path:
    if path.suffix == ".csv":
        return write_csv(path, columns)
    pq.write_table(pa.table({name: pa.array(list(values)) for name, values in columns.items()}), path)
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(TableError) as caught:
        read_columns(path, GEMM.required, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


def source(folder: Path, tables: dict[str, Any], **provenance: Any) -> Path:
    return write_source(folder, tables, {"gpu": "h100", **provenance})


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_reads_the_named_columns_with_their_types(tmp_path: Path, ending: str) -> None:
    rows = gemm_rows(3, note=["a", "b", "c"], num_replays=[10, 20, 30])
    path = write_table(tmp_path / f"gemm{ending}", rows)
    read = read_columns(path, GEMM.required, OPTIONAL_COLUMNS)
    assert list(read) == ["dtype", "m", "n", "k", "latency_us", "num_replays"]
    assert [read[n].dtype for n in ("dtype", "m", "latency_us")] == [object, np.int64, np.float64]
    assert type(read["dtype"][0]) is str
    for name, values in read.items():
        assert values.tolist() == list(rows[name])


def test_a_csv_without_header_takes_names(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    path.write_text("bf16,1,8,16,2.5\nbf16,2,8,16,2.75\n")
    read = read_columns(path, GEMM.required, names=["dtype", "m", "n", "k", "latency_us"])
    assert read["latency_us"].tolist() == [2.5, 2.75]
    path.write_text("bf16,1,8,16,2.5\nbf16,x,8,16,2.75\n")
    assert "row 2 (line 2), column m" in refusal(path, names=["dtype", "m", "n", "k", "latency_us"])


def test_csv_spaces_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    path.write_bytes(b"\xef\xbb\xbfdtype, m,n,k,latency_us\r\nbf16, 1 ,8,16, 2.5\r\n")
    read = read_columns(path, GEMM.required)
    assert (read["dtype"][0], read["m"][0], read["latency_us"][0]) == ("bf16", 1, 2.5)


def test_whole_floats_are_sizes(tmp_path: Path) -> None:
    path = write_table(tmp_path / "gemm.csv", gemm_rows(2, m=["4.0", "1e3"]))
    assert read_columns(path, GEMM.required)["m"].tolist() == [4, 1000]


A_TIME = "a number from 0.001 to 1e+09 in us"
A_SIZE = "a whole number of at least 1 in tokens"


@pytest.mark.parametrize(
    ("column", "cell", "need"),
    [
        ("latency_us", "fast", A_TIME),
        ("latency_us", "nan", A_TIME),
        ("latency_us", "inf", A_TIME),
        ("latency_us", "-inf", A_TIME),
        ("latency_us", "0", A_TIME),
        ("latency_us", "-2.5", A_TIME),
        ("latency_us", "", A_TIME),
        ("m", "big", A_SIZE),
        ("m", "1.5", A_SIZE),
        ("m", "nan", A_SIZE),
        ("m", "0", A_SIZE),
        ("m", "-4", A_SIZE),
        ("m", "1e300", A_SIZE),
        ("m", "", A_SIZE),
        ("dtype", "", "text (dtype of weights"),
        ("dtype", "  ", "text (dtype of weights"),
    ],
)
def test_refuses_a_wrong_csv_cell(tmp_path: Path, column: str, cell: str, need: str) -> None:
    rows = {name: list(values) for name, values in gemm_rows(4).items()}
    rows[column][2] = cell
    message = refusal(write_csv(tmp_path / "gemm.csv", rows))
    found = repr(cell) if cell.strip() else "nothing"
    assert f", row 3 (line 4), column {column}: found {found}, need {need}" in message


@pytest.mark.parametrize(
    ("column", "values", "row", "found"),
    [
        ("latency_us", [1.0, None, 2.0], 2, "nothing"),
        ("latency_us", [1.0, float("nan"), 2.0], 2, "nan"),
        ("latency_us", [1.0, -float("inf"), 2.0], 2, "-inf"),
        ("latency_us", [1.0, 0.0, 2.0], 2, "0.0"),
        ("latency_us", [True, True, True], 1, "True"),
        ("latency_us", ["1", "2", "3"], 1, "'1'"),
        ("m", [1, None, 3], 2, "nothing"),
        ("m", [1, 3, 0], 3, "0"),
        ("m", [1, 2.5, 3], 2, "2.5"),
        ("m", [True, True, True], 1, "True"),
        ("m", ["1", "2", "3"], 1, "'1'"),
        ("dtype", ["bf16", None, "bf16"], 2, "nothing"),
        ("dtype", ["bf16", " ", "bf16"], 2, "nothing"),
        ("dtype", [1, 2, 3], 1, "1"),
    ],
)
def test_refuses_a_wrong_parquet_cell(
    tmp_path: Path, column: str, values: list[Any], row: int, found: str
) -> None:
    path = write_table(tmp_path / "gemm.parquet", gemm_rows(3, **{column: values}))
    assert f", row {row}, column {column}: found {found}, need" in refusal(path)


def test_empty_lines_do_not_shift_the_line_number(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    path.write_text("\ndtype,m,n,k,latency_us\n\nbf16,1,8,8,2\n\n\nbf16,2,8,8,oops\n")
    assert "row 2 (line 7), column latency_us: found 'oops'" in refusal(path)


def test_refuses_files_other_than_tables(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "gemm.csv")
    for name in ("gemm.csv", "gemm.parquet"):
        (tmp_path / name).touch()
        assert "the file is empty" in refusal(tmp_path / name)
    (tmp_path / "gemm.csv").write_text("\n\n")
    assert "the file is empty" in refusal(tmp_path / "gemm.csv")
    (tmp_path / "gemm.csv").write_text("dtype,m,n,k,latency_us\n")
    assert "no rows" in refusal(tmp_path / "gemm.csv")
    (tmp_path / "gemm.csv").write_bytes(b"dtype,m,n,k,latency_us\n\xff\xfe,1,2,3,4\n")
    assert "UTF-8" in refusal(tmp_path / "gemm.csv")
    (tmp_path / "gemm.csv").write_text("dtype,m,n,k,latency_us\nbf16,1,8,8,2\nbf16,1,8\n")
    assert "row 2 (line 3): found 3 cells, need 5" in refusal(tmp_path / "gemm.csv")
    (tmp_path / "gemm.json").write_text("{}")
    assert "only .csv and .parquet" in refusal(tmp_path / "gemm.json")
    write_csv(tmp_path / "gemm.parquet", gemm_rows())
    assert "not a Parquet file" in refusal(tmp_path / "gemm.parquet")
    schema = pa.schema([(n, pa.int64()) for n in gemm_rows()])
    pq.write_table(schema.empty_table(), tmp_path / "gemm.parquet")
    assert "no rows" in refusal(tmp_path / "gemm.parquet")


def test_refuses_every_truncation_of_a_parquet_file(tmp_path: Path) -> None:
    whole = write_table(tmp_path / "whole.parquet", gemm_rows(50)).read_bytes()
    path = tmp_path / "gemm.parquet"
    for length in (1, 4, 11, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "Parquet file" in refusal(path)
    # The magic bytes are in place, what they frame is not.
    path.write_bytes(whole[: len(whole) // 2] + whole[-8:])
    assert "damaged" in refusal(path)


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_refuses_missing_and_repeated_columns(tmp_path: Path, ending: str) -> None:
    rows = gemm_rows()
    del rows["k"]
    message = refusal(write_table(tmp_path / f"gemm{ending}", rows))
    assert "missing column k; the file has dtype, m, n, latency_us" in message
    path = tmp_path / f"twice{ending}"
    if ending == ".csv":
        path.write_text("dtype,m,n,k,m,latency_us\nbf16,1,8,8,1,2\n")
    else:
        arrays = [pa.array(list(v)) for v in gemm_rows().values()]
        pq.write_table(pa.Table.from_arrays([*arrays, arrays[1]], [*gemm_rows(), "m"]), path)
    assert "column m occurs 2 times" in refusal(path)


def test_a_float_column_may_allow_zero(tmp_path: Path) -> None:
    path = write_table(tmp_path / "gemm.csv", {"mfu": [0.0, 0.5]})
    assert read_columns(path, [Column("mfu", "float", "", "fraction", 0)])["mfu"].tolist() == [0.0, 0.5]
    with pytest.raises(TableError, match=r"row 1 .*need a finite number above 0"):
        read_columns(path, [Column("mfu", "float", "", "fraction")])


def test_dictionary_encoded_and_narrow_parquet_columns(tmp_path: Path) -> None:
    rows = gemm_rows(3, latency_us=[2.0, 2.5, 3.0])
    arrays = {name: pa.array(list(values)) for name, values in rows.items()}
    arrays |= {"dtype": arrays["dtype"].dictionary_encode(), "m": arrays["m"].cast(pa.uint16())}
    arrays |= {"latency_us": arrays["latency_us"].cast(pa.float32())}
    pq.write_table(pa.table(arrays), tmp_path / "gemm.parquet")
    read = read_columns(tmp_path / "gemm.parquet", GEMM.required)
    assert (read["m"].dtype, read["latency_us"].dtype) == (np.int64, np.float64)
    assert [read[n].tolist() for n in ("dtype", "m", "latency_us")] == [
        ["bf16"] * 3,
        [1, 2, 3],
        [2.0, 2.5, 3.0],
    ]


def test_words_of_a_dictionary_are_trimmed_and_must_be_present(tmp_path: Path) -> None:
    rows = {name: pa.array(list(values)) for name, values in gemm_rows(3).items()}
    path = tmp_path / "gemm.parquet"

    def write(codes: pa.Array, words: list[str | None]) -> None:
        dtype = pa.DictionaryArray.from_arrays(codes, pa.array(words, pa.string()))
        pq.write_table(pa.table(rows | {"dtype": dtype}), path)

    write(pa.array([1, 0, 1], pa.int8()), ["fp8", " bf16\u00a0", ""])
    assert read_columns(path, GEMM.required)["dtype"].tolist() == ["bf16", "fp8", "bf16"]
    for blank, code in (("", 2), ("  ", 2), ("", None)):
        write(pa.array([1, code, 0], pa.int32()), ["fp8", "bf16", blank])
        with pytest.raises(TableError, match="row 2, column dtype: found nothing, need text"):
            read_columns(path, GEMM.required)


def test_the_label_names_the_file(tmp_path: Path) -> None:
    path = write_table(tmp_path / "gemm.csv", gemm_rows(2, m=[1, 0]))
    with pytest.raises(TableError, match=r"^h100/mfu.csv, row 2"):
        read_columns(path, GEMM.required, label="h100/mfu.csv")


def test_a_hundred_thousand_rows_are_read_in_one_go(tmp_path: Path) -> None:
    path = write_table(tmp_path / "gemm.csv", gemm_rows(100_000))
    assert calls_in(lambda: read_columns(path, GEMM.required)) < 10_000


# -- own -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "h100"
    folder.mkdir()
    shutil.copy(SHIPPED_H100 / "gpu.toml", folder)
    return folder


def decode_rows(**changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {"kv_dtype": np.array(["bf16", "bf16"], object)}
    table |= {"num_q_heads": [32, 32], "num_kv_heads": [8, 8], "head_dim": [128, 128], "window": [0, 0]}
    table |= {"batch_size": [1, 64], "kv_len": [1024, 4096], "latency_us": [14.0, 400.0]}
    return {name: np.asarray(v) for name, v in (table | changes).items()}


def test_kernels_bench_tables_come_first_by_default(gpu_folder: Path) -> None:
    both = {"gemm": gemm_rows(2)}
    source(gpu_folder / "a_shipped", both)
    source(gpu_folder / "b_own", both, tool="kernels_bench 0.1.0")
    assert load_sources(gpu_folder).sources == {"gemm": "b_own"}
    assert load_sources(gpu_folder, source="a_shipped").sources == {"gemm": "a_shipped"}
    shutil.rmtree(gpu_folder / "b_own")
    source(gpu_folder / "b_own", both, tool="kernels_bench 0.1.0", rank=150)
    assert load_sources(gpu_folder).sources == {"gemm": "a_shipped"}


def test_sources_of_lower_rank_serve_first_then_by_name(gpu_folder: Path) -> None:
    both = {"gemm": gemm_rows(), "attention_decode": decode_rows()}
    source(gpu_folder / "b", both)
    source(gpu_folder / "a", {"gemm": gemm_rows(2)})
    assert load_sources(gpu_folder).sources == {"gemm": "a", "attention_decode": "b"}
    source(gpu_folder / "c", both, rank=50)
    assert load_sources(gpu_folder).sources == {"gemm": "c", "attention_decode": "c"}
    source(gpu_folder / "d", both, rank=60, operators={"gemm": {"rank": 1}})
    tables = load_sources(gpu_folder)
    assert tables.sources == {"gemm": "d", "attention_decode": "c"}
    assert (tables.gpu, tables.root, tables.ignored) == ("h100", gpu_folder, {})
    assert tables.tables["gemm"].files == ("gemm.parquet",)
    assert tables.tables["gemm"].provenance["operators"]["gemm"]["rank"] == 1
    assert [s.name for s in list_sources(gpu_folder)] == ["a", "b", "c", "d"]


def test_a_source_by_name_serves_alone(gpu_folder: Path) -> None:
    source(gpu_folder / "a", {"gemm": gemm_rows(2)})
    source(gpu_folder / "b", {"gemm": gemm_rows(3), "attention_decode": decode_rows()})
    tables = load_sources(gpu_folder, source="a")
    assert tables.sources == {"gemm": "a"}
    assert tables.tables["gemm"].num_rows == 2
    with pytest.raises(TableError, match="no source 'c'; its sources are a, b"):
        load_sources(gpu_folder, source="c")


def test_single_operators_take_the_sources_named_for_them(gpu_folder: Path) -> None:
    both = {"gemm": gemm_rows(3), "attention_decode": decode_rows()}
    source(gpu_folder / "a", both)
    source(gpu_folder / "b", {"gemm": gemm_rows(2)}, rank=200)
    source(gpu_folder / "c", both, rank=50)
    by_rank = {"gemm": "c", "attention_decode": "c"}
    assert load_sources(gpu_folder, source={}).sources == by_rank
    tables = load_sources(gpu_folder, source={"gemm": "b"})
    assert tables.sources == by_rank | {"gemm": "b"}
    assert tables.tables["gemm"].num_rows == 2
    picked = {"gemm": "b", "attention_decode": "a"}
    assert load_tables(gpu_folder, source=picked).sources == load_measured(gpu_folder, source=picked).sources
    assert load_tables(gpu_folder, source=picked).sources == picked
    with pytest.raises(TableError, match="no source 'd'; its sources are a, b, c"):
        load_sources(gpu_folder, source={"gemm": "d"})
    with pytest.raises(TableError, match="source: unknown operator 'conv'"):
        load_sources(gpu_folder, source={"conv": "a"})
    with pytest.raises(TableError, match="'b' has no attention_decode; those that have it: a, c"):
        load_sources(gpu_folder, source={"attention_decode": "b"})
    with pytest.raises(TableError, match="'a' has no moe; those that have it: none"):
        load_sources(gpu_folder, source={"moe": "a"})


def test_a_single_source_folder_anywhere(tmp_path: Path) -> None:
    folder = source(tmp_path / "mine", {"gemm": gemm_rows()})
    tables = load_sources(folder)
    assert (tables.gpu, tables.sources) == ("h100", {"gemm": "mine"})
    assert load_sources(folder, source="mine").content_hash == tables.content_hash
    assert load_sources(source(tmp_path / "alias", {"gemm": gemm_rows()}, gpu="H100-SXM")).gpu == "h100"
    with pytest.raises(GpuError, match="unknown GPU"):
        load_sources(source(tmp_path / "other", {"gemm": gemm_rows()}, gpu="rtx9999"))


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
@pytest.mark.parametrize("column", ["latency_us", "min_us", "p25_us", "p75_us"])
@pytest.mark.parametrize("value", [5e-324, 9.9e-4, 1.1e9, 1e308])
def test_a_time_that_no_kernel_takes_is_refused(
    tmp_path: Path, ending: str, column: str, value: float
) -> None:
    times = np.full(3, 1e3)
    times[1] = value
    rows = gemm_rows(3) | {"latency_us": np.full(3, 1e3), column: times}
    words = rf"gemm{ending}, row 2.*, column {column}: found .*, need a number from 0.001 to 1e\+09 in us"
    with pytest.raises(TableError, match=words):
        read_columns(write_table(tmp_path / f"gemm{ending}", rows), GEMM.required, OPTIONAL_COLUMNS)
    with pytest.raises(TableError, match=rf"table gemm, row \d, column {column}: got"):
        source(tmp_path / "a", {"gemm": rows})


def test_times_at_the_limits_load(tmp_path: Path) -> None:
    times = np.array([1e-3, 1e9])
    rows = gemm_rows(2, m=np.ones(2, int), n=np.ones(2, int), k=np.ones(2, int), latency_us=times)
    assert load_sources(source(tmp_path / "a", {"gemm": rows})).tables["gemm"].columns[
        "latency_us"
    ].tolist() == [1e-3, 1e9]


def test_a_gpu_that_the_tables_are_not_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"h100 has tables of h100, and gpu is 'b200': leave gpu out, or"):
        load_tables("h100", gpu="b200")
    assert load_tables("h100", gpu="H100-SXM").gpu.name == "h100"
    folder = source(tmp_path / "h100" / "mine", {"gemm": gemm_rows()})
    for place in (folder, str(folder), folder.parent):
        assert load_tables(place, gpu="h100").gpu.name == "h100"
        with pytest.raises(TableError, match="has tables of h100, and gpu is 'h200'"):
            load_tables(place, gpu="h200")
    with pytest.raises(TableError, match=r"gpu is 'h1000', and the tables are of h100: unknown GPU 'h1000'"):
        load_tables(folder, gpu="h1000")
    with pytest.raises(TableError, match="has tables of h100, and gpu is 'b200'"):
        load_tables("h100", gpu="b200", source="aiconfigurator-vllm-0.25.0")


def test_a_table_beyond_memory_is_not_called_damaged(
    gpu_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(gpu_folder / "mine", {"gemm": gemm_rows()})
    monkeypatch.setattr("fastroof.parquet.usable_memory_bytes", lambda: 10)
    with pytest.raises(TableError, match=r"needs more memory than is available \([0-9,]+ rows take") as error:
        load_sources(gpu_folder)
    assert "damaged" not in str(error.value)


def test_a_folder_without_a_slash_is_loaded_unless_a_gpu_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "h100"):
        source(tmp_path / name / "own", {"gemm": gemm_rows()})
        shutil.copy(SHIPPED_H100 / "gpu.toml", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert load_tables("mine").sources == {"gemm": "own"}
    assert load_tables("h100").sources["gemm"] != "own"
    (tmp_path / "card.toml").write_text((tmp_path / "mine/gpu.toml").read_text())
    with pytest.raises(TableError, match=r"card.toml is not a folder"):
        load_tables("card.toml")


def test_one_of_several_gpus_is_chosen_by_any_of_its_names(tmp_path: Path) -> None:
    for gpu in ("h100", "h200"):
        source(tmp_path / gpu / "mine", {"gemm": gemm_rows()}, gpu=gpu)
        shutil.copy(SHIPPED_H100.parent / gpu / "gpu.toml", tmp_path / gpu)
    assert load_tables(tmp_path, gpu="h200").gpu.name == "h200"
    assert load_tables(tmp_path, gpu="H100-SXM").gpu.name == "h100"
    for gpu in ("b200", None):
        with pytest.raises(TableError, match="holds several GPUs: pass gpu= one of h100, h200"):
            load_tables(tmp_path, gpu=gpu)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((None,), {}, "tables are a GPU's name or the path of a folder, got None"),
        ((100,), {}, "got 100"),
        ((b"h100",), {}, "got b'h100'"),
        (("",), {}, "got ''"),
        ((["h100"],), {}, r"got \['h100'\]"),
        (("a\0b",), {}, "unknown GPU"),
        (("x" * 5000,), {}, "unknown GPU"),
        (("/" + "x" * 5000,), {}, "is not a folder"),
        ((Path("x" * 5000),), {}, "is not a folder"),
        (("h100",), {"gpu": 100}, "gpu must be the name of a GPU, got 100"),
        (("h100",), {"gpu": ["h100"]}, "gpu must be the name of a GPU"),
        (("h100",), {"gpu": ""}, "gpu is ''"),
        (("h100",), {"source": 1}, "source must be the name of one"),
        (("h100",), {"source": ["a"]}, "source must be the name of one"),
        (("h100",), {"source": {"gemm": 1}}, "source must be the name of one"),
        (("h100",), {"source": {1: "a"}}, "source must be the name of one"),
        (("h100",), {"source": ""}, "no source ''"),
        (("h100",), {"source": {"gemm": "/" + "x" * 5000}}, "no source"),
        (("h100",), {"source": {"gemm": "/a\0b"}}, "no source"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments: Any, options: Any, words: str) -> None:
    with pytest.raises(FastroofError, match=words):
        load_tables(*arguments, **options)


def test_ignored_files_are_listed(gpu_folder: Path) -> None:
    folder = source(gpu_folder / "a", {"gemm": gemm_rows()})
    (gpu_folder / "serving").mkdir()
    (gpu_folder / "drafts").mkdir()
    (gpu_folder / "README.md").touch()
    (folder / "notes.txt").touch()
    write_csv(folder / "gemms.csv", gemm_rows())
    ignored = load_sources(gpu_folder).ignored
    assert sorted(ignored) == ["README.md", "a/gemms.csv", "a/notes.txt", "drafts", "serving"]
    assert "end to end" in ignored["serving"]


def test_refuses_rows_of_two_gpus(tmp_path: Path) -> None:
    rows = gemm_rows(3, gpu=np.array(["h100", "h100", "h200"], object))
    folder = source(tmp_path / "mixed", {"gemm": rows})
    with pytest.raises(TableError, match=r"gemm.parquet, row 3, column gpu: found 'h200', need 'h100'"):
        load_sources(folder)
    assert (
        load_sources(source(tmp_path / "one", {"gemm": gemm_rows(gpu=np.full(4, "h100", object))})).gpu
        == "h100"
    )


def test_refuses_sources_of_two_gpus(tmp_path: Path, gpu_folder: Path) -> None:
    source(tmp_path / "both" / "a", {"gemm": gemm_rows()})
    source(tmp_path / "both" / "b", {"gemm": gemm_rows()}, gpu="h200")
    with pytest.raises(TableError, match=r"several GPUs: h100 \(a\), h200 \(b\)"):
        load_sources(tmp_path / "both")
    source(gpu_folder / "a", {"gemm": gemm_rows()}, gpu="h200")
    with pytest.raises(TableError, match=r"gpu is 'h200', but .*gpu.toml describes 'h100'"):
        load_sources(gpu_folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "gpu is None; need the name"),
        ("gpu = 5", "gpu is 5; need the name"),
        ("gpu = 'h100", "not TOML"),
        ("gpu = 'h100'\nrank = 'first'", "rank must be an integer"),
        ("gpu = 'h100'\n[operators.gemm]\nrank = true", r"\[operators.gemm\] rank must be an integer .*True"),
        ("gpu = 'h100'\noperators = 3", "operators is 3"),
    ],
)
def test_refuses_a_wrong_provenance(tmp_path: Path, text: str, message: str) -> None:
    folder = source(tmp_path / "a", {"gemm": gemm_rows()})
    (folder / "provenance.toml").write_text(text)
    with pytest.raises(TableError, match=message) as caught:
        load_sources(folder)
    assert "provenance.toml" in str(caught.value)


def test_refuses_one_operator_in_two_formats(tmp_path: Path) -> None:
    folder = source(tmp_path / "a", {"gemm": gemm_rows()})
    write_csv(folder / "gemm.csv", gemm_rows())
    with pytest.raises(TableError, match=r"has gemm.csv and gemm.parquet; keep one"):
        load_sources(folder)


def test_refuses_folders_without_tables(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no such folder"):
        load_sources(tmp_path / "nowhere")
    with pytest.raises(TableError, match="has no source"):
        load_sources(tmp_path)
    folder = source(tmp_path / "a", {"gemm": gemm_rows()})
    (folder / "gemm.parquet").unlink()
    with pytest.raises(TableError, match=r"has no table; need <operator>.parquet"):
        load_sources(folder)


def test_refuses_unknown_dtypes(tmp_path: Path) -> None:
    dtypes = np.array(["bf16", "bf16", "nvfp5", "bf16"], object)  # written last: rows are sorted
    with pytest.raises(TableError, match="row 4, column dtype: unknown 'nvfp5'; use one of bf16"):
        load_sources(source(tmp_path / "a", {"gemm": gemm_rows(dtype=dtypes)}))
    kv = np.array(["bf16", "bfloat16"], object)
    with pytest.raises(TableError, match="column kv_dtype: unknown 'bfloat16'"):
        load_sources(source(tmp_path / "b", {"attention_decode": decode_rows(kv_dtype=kv)}))


def test_refuses_a_dtype_that_the_gpu_has_no_units_for(tmp_path: Path) -> None:
    rows = gemm_rows(dtype=np.full(4, "fp8", object))
    with pytest.raises(TableError, match=r"A100.* has no units for dtype 'fp8'"):
        load_sources(source(tmp_path / "a", {"gemm": rows}, gpu="a100"))


def module_rows(**changes: Any) -> dict[str, Any]:
    words = {"dtype": "bf16", "kv_dtype": "fp8", "attn_dtype": "bf16", "model": "deepseek-v3"}
    sizes = {"num_heads": [16] * 2, "batch_size": [8] * 2, "q_len": [64, 128], "kv_len": [64, 192]}
    columns = {name: np.full(2, word, object) for name, word in words.items()}
    return columns | {n: np.array(v) for n, v in sizes.items()} | {"latency_us": np.full(2, 5e5)} | changes


def test_refuses_what_attention_cannot_compute_in(tmp_path: Path) -> None:
    rows = module_rows()
    assert load_sources(source(tmp_path / "a", {"mla_module_prefill": rows})).gpu == "h100"
    # an fp8 cache has a peak of its own, which is not one that attention computes in
    for name, word, message in (
        ("b", "combine", "row 1, column attn_dtype: unknown 'combine'; use one of bf16"),
        ("c", "nvfp4", "row 1: NVIDIA H100 SXM has no units for attn_dtype 'nvfp4'"),
    ):
        rows = module_rows(attn_dtype=np.full(2, word, object))
        with pytest.raises(TableError, match=message):
            load_sources(source(tmp_path / name, {"mla_module_prefill": rows}))


@pytest.mark.parametrize("operator", ["mla_module_prefill", "attention_prefill"])
def test_refuses_fewer_tokens_attended_to_than_there_are_new_ones(tmp_path: Path, operator: str) -> None:
    rows = module_rows(q_len=np.array([64, 193]))
    heads = {"num_q_heads": 8, "num_kv_heads": 8, "head_dim": 128, "window": 0}
    rows |= {name: np.full(2, value) for name, value in heads.items()}
    rows = {column.name: rows[column.name] for column in OPERATORS[operator].required}
    message = "row 2: q_len is 193, more than kv_len 192: kv_len counts the prefix and the new tokens"
    with pytest.raises(TableError, match=message):
        load_sources(source(tmp_path / "a", {operator: rows}))


def one_gemm(dtype: str, us: float) -> dict[str, Any]:
    return {
        "dtype": np.array([dtype], object),
        **{name: np.array([8192]) for name in "mnk"},
        "latency_us": np.array([us]),
    }


def test_refuses_an_mfu_above_one_of_the_dtypes_own_peak(tmp_path: Path) -> None:
    limit_us = 2 * 8192**3 / 989.5e12 * 1e6
    assert load_sources(source(tmp_path / "a", {"gemm": one_gemm("bf16", limit_us * 1.001)})).gpu == "h100"
    assert load_sources(source(tmp_path / "b", {"gemm": one_gemm("fp8", limit_us * 0.501)})).gpu == "h100"
    for name, dtype, us in (("c", "bf16", limit_us * 0.999), ("d", "fp8", limit_us * 0.499)):
        with pytest.raises(TableError, match=r"row 1 \(m=8192, n=8192, k=8192\): .* MFU of 1.00"):
            load_sources(source(tmp_path / name, {"gemm": one_gemm(dtype, us)}))


def test_attention_is_held_to_the_peak_of_its_kv_dtype_and_its_window(tmp_path: Path) -> None:
    def prefill(kv_dtype: str, window: int, us: float) -> dict[str, Any]:
        row = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": window}
        row |= {"batch_size": 2, "q_len": 6000, "kv_len": 8000, "latency_us": us}
        return {"kv_dtype": np.array([kv_dtype], object)} | {n: np.array([v]) for n, v in row.items()}

    def shortest_us(window: int, kv_dtype: str) -> float:
        pairs = sum(min(window or 8000, position) for position in range(2001, 8001))
        return 4 * 32 * 128 * 2 * pairs / {"bf16": 989.5e12, "fp8": 1979e12}[kv_dtype] * 1e6

    for window in (0, 1, 1024, 2001, 5000, 7999, 8000, 9000):
        for kv_dtype in ("bf16", "fp8"):
            name = f"{kv_dtype}-{window}"
            fast = {"attention_prefill": prefill(kv_dtype, window, shortest_us(window, kv_dtype) * 0.999)}
            slow = {"attention_prefill": prefill(kv_dtype, window, shortest_us(window, kv_dtype) * 1.001)}
            assert load_sources(source(tmp_path / f"slow-{name}", slow)).gpu == "h100"
            with pytest.raises(TableError, match=rf"MFU of 1.001 of the {kv_dtype} peak"):
                load_sources(source(tmp_path / f"fast-{name}", fast))


def test_decode_and_moe_are_held_to_their_peaks(tmp_path: Path) -> None:
    fast = decode_rows(latency_us=np.array([14.0, 4 * 32 * 128 * 64 * 4096 / 989.5e12 * 1e6 * 0.99]))
    with pytest.raises(TableError, match=r"row 2 \(batch_size=64, kv_len=4096\): .* MFU of 1.010"):
        load_sources(source(tmp_path / "a", {"attention_decode": fast}))
    # A window of 128 leaves 1/32 of those FLOPs.
    assert (
        load_sources(source(tmp_path / "b", {"attention_decode": fast | {"window": np.array([0, 128])}})).gpu
        == "h100"
    )
    moe: dict[str, Any] = {"dtype": np.array(["fp8"], object), "distribution": np.array(["balanced"], object)}
    row = {"hidden": 4096, "intermediate": 14336, "topk": 2, "num_experts": 8, "moe_tp": 2, "moe_ep": 2}
    moe |= {n: np.array([v]) for n, v in (row | {"num_tokens": 16384}).items()}
    limit_us = 6 * 16384 * 2 * 4096 * 14336 / 4 / 1979e12 * 1e6
    load_sources(source(tmp_path / "c", {"moe": moe | {"latency_us": np.array([limit_us * 1.01])}}))
    with pytest.raises(TableError, match=r"MFU of 1.010 of the fp8 peak"):
        load_sources(source(tmp_path / "d", {"moe": moe | {"latency_us": np.array([limit_us / 1.01])}}))


@pytest.mark.slow
def test_the_shipped_h100_tables_load() -> None:
    tables = load_sources(SHIPPED_H100)
    assert tables.gpu == "h100"
    assert tables.tables["gemm"].num_rows >= 107_188
    assert {"gemm", "attention_prefill", "attention_decode", "moe", "allreduce", "elementwise"} <= set(
        tables.tables
    )


# -- write ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path, format: Any) -> None:
    rng = np.random.default_rng(7)
    rows = gemm_rows(500, latency_us=rng.uniform(11, 1e5, 500), num_replays=np.full(500, 30))
    shuffled = {
        name: values[rng.permutation(500)] if name == "m" else values for name, values in rows.items()
    }
    folder = write_source(tmp_path / "a", {"gemm": shuffled}, {"gpu": "h100"}, format)
    read = load_sources(folder).tables["gemm"].columns
    order = np.argsort(shuffled["m"])
    for name, values in shuffled.items():
        assert read[name].tolist() == values[order].tolist()


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, format: Any) -> None:
    rows = gemm_rows(50)
    reverse = {name: values[::-1] for name, values in rows.items()}
    first = write_source(tmp_path / "a", {"gemm": rows}, {"gpu": "h100"}, format)
    second = write_source(tmp_path / "b", {"gemm": reverse}, {"gpu": "h100"}, format)
    for name in ("provenance.toml", f"gemm.{format}"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize("repeats", [True, False])
def test_latencies_are_stored_the_smallest_way_and_read_back(tmp_path: Path, repeats: bool) -> None:
    """Ticks of a timer as a dictionary, noise with its bytes split."""
    rows = gemm_rows(4000)
    noise = np.random.default_rng(0).uniform(200.0, 400.0, 4000)
    rows["latency_us"] = np.round(noise, -1) + 0.1 if repeats else noise
    folder = write_source(tmp_path / "a", {"gemm": rows}, {"gpu": "h100"})
    file = pq.ParquetFile(folder / "gemm.parquet")
    column = next(
        c for c in map(file.metadata.row_group(0).column, range(99)) if c.path_in_schema == "latency_us"
    )
    assert ("RLE_DICTIONARY" in column.encodings, "BYTE_STREAM_SPLIT" in column.encodings) == (
        repeats,
        not repeats,
    )
    read = load_sources(folder).tables["gemm"].columns
    assert np.sort(read["latency_us"]).tolist() == np.sort(rows["latency_us"]).tolist()


def test_an_existing_source_is_replaced_only_on_request(tmp_path: Path) -> None:
    folder = source(tmp_path / "a", {"gemm": gemm_rows(2), "attention_decode": decode_rows()})
    with pytest.raises(TableError, match="exists; pass overwrite=True"):
        source(tmp_path / "a", {"gemm": gemm_rows(3)})
    assert load_sources(folder).tables["gemm"].num_rows == 2
    write_source(folder, {"gemm": gemm_rows(3)}, {"gpu": "h100"}, overwrite=True)
    assert load_sources(folder).sources == {"gemm": "a"}
    assert load_sources(folder).tables["gemm"].num_rows == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_folder_without_a_source_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").touch()
    with pytest.raises(TableError, match="is not a source and is not replaced"):
        write_source(tmp_path / "work", {"gemm": gemm_rows()}, {"gpu": "h100"}, overwrite=True)
    assert (tmp_path / "work" / "thesis.tex").exists()


def test_a_failed_write_leaves_the_old_source_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = source(tmp_path / "a", {"gemm": gemm_rows(2)})
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_source(folder, {"gemm": gemm_rows(3)}, {"gpu": "h100"}, overwrite=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_failed_swap_puts_the_old_source_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source(tmp_path / "a", {"gemm": gemm_rows(2)})
    rename = Path.rename

    def only_old_folders(self: Path, target: Path) -> Path:
        if target == folder and (self / "gemm.parquet").stat().st_size != old_size:
            raise OSError("device busy")
        return rename(self, target)

    old_size = (folder / "gemm.parquet").stat().st_size
    # as where the system or the disk cannot exchange two names
    monkeypatch.setattr("fastroof.host.exchange_folders", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", only_old_folders)
    with pytest.raises(OSError, match="device busy"):
        write_source(folder, {"gemm": gemm_rows(300)}, {"gpu": "h100"}, overwrite=True)
    assert load_sources(folder).tables["gemm"].num_rows == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("tables", "provenance", "message"),
    [
        ({"gemms": gemm_rows()}, {"gpu": "h100"}, "unknown operator 'gemms'"),
        ({"gemm": gemm_rows(colour=[1, 2, 3, 4])}, {"gpu": "h100"}, "unknown column colour"),
        ({"gemm": {"m": np.arange(3)}}, {"gpu": "h100"}, "lacks column dtype, n, k, latency_us"),
        ({"gemm": gemm_rows(m=np.arange(3))}, {"gpu": "h100"}, "columns of one length"),
        ({"gemm": gemm_rows(0)}, {"gpu": "h100"}, "columns of one length above 0"),
        ({"gemm": gemm_rows(m=np.array(["a"] * 4, object))}, {"gpu": "h100"}, "column m: need int"),
        ({"gemm": gemm_rows()}, {}, "provenance needs gpu"),
        ({"gemm": gemm_rows()}, {"gpu": "h100", "when": None}, "provenance when must be .* got None"),
    ],
)
def test_refuses_to_write_what_it_could_not_read(
    tmp_path: Path, tables: Any, provenance: Any, message: str
) -> None:
    with pytest.raises(TableError, match=message):
        write_source(tmp_path / "a", tables, provenance)
    assert not list(tmp_path.iterdir())


SCALARS = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)
VALUES = st.recursive(
    SCALARS,
    lambda inside: st.one_of(
        st.lists(inside, max_size=4),
        st.dictionaries(st.text(st.characters(codec="utf-8")), inside, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES, max_size=5))
def test_toml_round_trips(values: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(values)) == values


def test_listing_a_source_names_its_contents(tmp_path: Path) -> None:
    (listed,) = list_sources(source(tmp_path / "a", {"gemm": gemm_rows()}, rank=7))
    assert (listed.name, listed.gpu, listed.rank("gemm"), list(listed.files)) == ("a", "h100", 7, ["gemm"])


def test_one_operator_of_another_source(h100: Tables) -> None:
    other = "aiconfigurator-trtllm-1.3.0rc20"
    mixed = load_tables("h100", source={"allreduce": other})
    assert mixed.sources == {**h100.sources, "allreduce": other}
    assert mixed.content_hash != h100.content_hash
    assert h100.sources["allreduce"].startswith("aiconfigurator-vllm")
    message = {"num_gpus": 8, "message_bytes": 2**20}
    assert mixed.lookup("allreduce", **message).latency_us != h100.lookup("allreduce", **message).latency_us
    with pytest.raises(TableError, match=other):
        load_tables("h100", source={"allreduce": "nobody"})
    with pytest.raises(TableError, match=r"has no mlp; those that have it: aiconfigurator-sglang"):
        load_tables("h100", source={"mlp": other})
