"""TOML and JSON of others: read within limits, or refused by the reader's own error, quickly."""

import ast
import json
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import documents
from fastroof.config.gpu import load_gpu
from fastroof.engines.deployments import Recipe
from fastroof.engines.load import load_engine
from fastroof.errors import FastroofError, GpuError, ModelError, PlanError, SweepError, TableError
from fastroof.sweep import load_spec

ROOT = Path(fastroof.__file__).parent.parent

HOSTILE_TOML = {
    "lists in lists": "a = " + "[" * 50_000 + "]" * 50_000,
    "tables in tables": "a = " + "{b = " * 5_000 + "1" + "}" * 5_000,
    "65 lists in lists": "a = " + "[" * 65 + "]" * 65,
    "a key of 100,000 parts": "a" + ".a" * 100_000 + " = 1",
    "a key of 100,000 parts with spaces": "a" + ' . "a"' * 100_000 + " = 1",
    "a table of 100,000 parts": "[a" + ".a" * 100_000 + "]",
    "a key of parts in a table": "a = { b" + ".b" * 100_000 + " = 1 }",
    "a key one part too long": "a" + ".a" * 64 + " = 1",
    "a table and a key, too long together": "[a" + ".a" * 40 + "]\nb" + ".b" * 40 + " = 1",
    "an integer of 5,000 digits": "a = " + "9" * 5_000,
    "a huge hexadecimal": "a = 0x" + "f" * 5_000,
    "an integer of 65 bits": f"a = {2**63}",
    "a huge hexadecimal in a list of tables": "[[a]]\nb = [1, {c = 0x" + "f" * 5_000 + "}]",
    "bytes of no text": b"a = '\xff\xfe'",
    "a NUL": "a = '\x00'",
    "no TOML": "a = ",
    "too many bytes": "# " + "x" * documents.MOST_TOML_BYTES,
}

HOSTILE_JSON = {
    "lists in lists": "[" * 100_000 + "]" * 100_000,
    "objects in objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "65 lists in lists": "[" * 65 + "]" * 65,
    "65 lists in lists beside brackets in text": '["]]]",' + "[" * 64 + "]" * 64 + "]",
    "an integer of 5,000 digits": "[" + "9" * 5_000 + "]",
    "bytes of no text": b'["\xff"]',
    "no JSON": "[1,",
    "nothing": "",
    "too many bytes": '"' + "x" * documents.MOST_JSON_BYTES + '"',
}


@pytest.mark.parametrize("what", HOSTILE_TOML)
def test_toml_beyond_a_limit_is_refused_quickly_by_the_reader_s_error(what):
    began = time.process_time()
    with pytest.raises(GpuError, match=r"^card\.toml "):
        documents.parse_toml(HOSTILE_TOML[what], "card.toml", GpuError)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("what", HOSTILE_JSON)
def test_json_beyond_a_limit_is_refused_quickly_by_the_reader_s_error(what):
    began = time.process_time()
    with pytest.raises(ModelError, match=r"^config\.json "):
        documents.parse_json(HOSTILE_JSON[what], "config.json", ModelError)
    assert time.process_time() - began < 2


def test_what_is_at_the_limit_is_read():
    deep = "[" * 64 + "]" * 64
    assert documents.parse_json(deep, "x") == json.loads(deep)
    assert documents.parse_json(f'{{"text": "{"[" * 500}"}}', "x") == {"text": "[" * 500}
    key = "a" + ".a" * 62 + " = 1"
    assert documents.parse_toml(key, "x") == tomllib.loads(key)
    text = f'a = "{"one.two." * 30}"\nb = {2**63 - 1}\nc = {-(2**63)}\n# {"." * 5000}'
    assert documents.parse_toml(text, "x") == tomllib.loads(text)
    assert documents.parse_toml("a = '''\n" + "x.\n" * 200 + "'''", "x")["a"].count("x") == 200


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_json_within_limits_is_what_python_reads(value):
    text = json.dumps(value)
    assert documents.parse_json(text, "x") == documents.parse_json(text.encode(), "x") == value


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [
        ("[Infinity]", [float("inf")], "Infinity is not valid JSON"),
        ('{"a": 1, "b": {"c": 2, "c": 3}}', {"a": 1, "b": {"c": 3}}, "the key 'c' is given twice"),
    ],
)
def test_strict_json_has_no_constants_of_python_and_no_key_twice(text, value, words):
    assert documents.parse_json(text, "x") == value
    with pytest.raises(FastroofError, match=words):
        documents.parse_json(text, "x", is_strict=True)


def test_a_file_is_read_no_further_than_its_limit(tmp_path):
    with pytest.raises(TableError, match=r"^/dev/zero .* the maximum is 4,194,304 bytes"):
        documents.read_toml(Path("/dev/zero"), TableError)
    with pytest.raises(TableError, match="cannot be read"):
        documents.read_toml(tmp_path / "none.toml", TableError)
    with pytest.raises(TableError, match="cannot be read"):
        documents.read_json(tmp_path, TableError)
    with pytest.raises(TableError, match="cannot be read"):
        documents.read_json(tmp_path / "a\0b", TableError)
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert documents.read_json(tmp_path / "bom.json", TableError) == {"a": 1}


@pytest.mark.parametrize("what", HOSTILE_TOML)
@pytest.mark.parametrize(
    ("reader", "error"), [(load_gpu, GpuError), (load_engine, PlanError), (load_spec, SweepError)]
)
def test_files_of_people_are_refused_by_their_own_error(what, reader, error, tmp_path):
    path = tmp_path / "given.toml"
    content = HOSTILE_TOML[what]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error):
        reader(path)


@pytest.mark.parametrize("what", HOSTILE_TOML)
def test_hostile_provenance_is_a_table_error(what, tmp_path):
    content = HOSTILE_TOML[what]
    (tmp_path / "provenance.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TableError):
        fastroof.load_tables(tmp_path)


@pytest.mark.parametrize("what", HOSTILE_JSON)
def test_a_hostile_config_is_a_model_error(what, tmp_path):
    content = HOSTILE_JSON[what]
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError):
        fastroof.load_model(path)


OWN_PROGRAMS = {
    "fastroof/compiled/shipped_loops.py": "what a wheel was built with; loops import nothing else",
    "fastroof/documents.py": "the one place",
    "kernels_bench/vllm_steps/worker.py": "what the process that started it writes",
}
"""Where TOML and JSON are parsed otherwise, and why."""


def leaves(value, path=()):
    """Paths of all keys whose values are no tables."""
    nested = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in nested:
        if isinstance(one, dict) or (isinstance(one, list) and one and isinstance(one[0], dict)):
            yield from leaves(one, (*path, key))
        elif isinstance(key, str):
            yield (*path, key)


@pytest.mark.parametrize(
    "folder",
    ["fastroof/engines/profiles", "fastroof/engines/recipes", "kernels_bench/grid/grids", "fastroof/load"],
)
def test_the_line_of_a_key_has_the_key(folder):
    paths = sorted((ROOT / folder).glob("*.toml"))
    assert paths
    for path in paths:
        text = path.read_text("utf-8")
        lines = ["", *text.split("\n")]
        every = list(leaves(tomllib.loads(text)))
        for keys in every[:: 1 + len(every) // 40]:
            table = documents._line_of(text, keys[:-1])
            line = documents._line_of(text, keys)
            assert table <= line
            assert any(str(key) in lines[line] for key in keys), keys


ODD = """
title = "a # [x]"  # [y]
list = [
 [1, 2],
 ["b"],
 {a = 1},
]
text = '''
[no.table]
x = 1'''
more = \"\"\"\\\"\"\"
y = 1\"\"\"\"
a . "b c" = 3
[links]
z = { y = 3 }
[[group]]
m = 1
[[group]]
[[group.sub]]
[[group.sub]]
m = 2
[group.sub.deep]
'q' = 1
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("list", 2, "a"), 3), (("text",), 8), (("x",), 0), (("more",), 11), (("y",), 0), (("a", "b c"), 13),
        (("links", "none"), 14), (("links", "z", "y"), 15), (("group", 0, "m"), 17), (("group", 1), 18),
        (("group", 1, "sub", 1, "m"), 21), (("group", 1, "sub", 1, "deep", "q"), 23),
        (("group", 0, "none"), 16),
    ],
)  # fmt: skip
def test_the_line_of_a_key_is_found_whatever_is_around_it(path, line):
    tomllib.loads(ODD)
    assert documents._line_of(ODD, path) == line


def test_a_table_names_the_place_of_an_error():
    table = documents.parse_table('m = 0\n[a]\nn = 1.5\nk = "x"\n[[b]]\nc = ["d", 2]', "file", GpuError)

    def message(read):
        with pytest.raises(GpuError) as caught:
            read()
        return str(caught.value)

    assert message(lambda: table.size("m")).startswith("file, line 1: m must be a whole number from 1 to 1,0")
    assert message(lambda: table.value("x")) == "file: x is missing"
    assert message(lambda: table.table("m")) == "file, line 1: m must be a table, got 0"
    assert message(lambda: table.tables("a")).startswith("file, line 2: a must be a list of tables, got {")
    inner = table.table("a")
    assert (
        message(lambda: inner.number("k", 1, 2)) == "file, line 4: a.k must be a number from 1 to 2, got 'x'"
    )
    assert message(lambda: inner.allow(("nn", "k"))) == (
        "file, line 3: a: unknown key 'n'; did you mean nn? (valid: nn, k)"
    )
    (row,) = table.tables("b")
    assert message(lambda: row.texts("c")).startswith(
        "file, line 6: b 1: c must be text, or a list of texts, got"
    )
    assert message(lambda: row.build(Recipe)).startswith("file, line 6: b 1: unknown key 'c'; valid: engine")
    assert message(lambda: documents.Table([], "it", GpuError)) == "it: must be a table, got []"


def test_collected_problems_are_listed_by_line_up_to_a_number():
    text = "".join(f"k{i} = {i}\n" for i in range(5000))
    table = documents.parse_table(text, "file", GpuError)
    table.problems = []
    table.check()
    table.size("k0")
    table.allow(["k0"])
    with pytest.raises(
        GpuError, match=r"^file, line 1: k0 must .*, got 0; line 2: unknown key 'k1'"
    ) as caught:
        table.check()
    assert str(caught.value).count("; line ") == documents.MOST_PROBLEMS - 1


def test_nothing_else_parses_toml_or_json():
    parsers = {("json", "load"), ("json", "loads"), ("tomllib", "load"), ("tomllib", "loads")}
    places = set()
    for package in ("fastroof", "kernels_bench"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text("utf-8")
            if "json" not in text and "tomllib" not in text:  # parsing all takes seconds
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module in ("json", "tomllib"):
                    places.add(str(path.relative_to(ROOT)))
                is_named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                if is_named and (node.value.id, node.attr) in parsers:
                    places.add(str(path.relative_to(ROOT)))
    assert places == set(OWN_PROGRAMS)
