"""The roster: which of another estimator's combinations plans cover, and of what they are made."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.accuracy import roster, support_matrix
from benchmarks.accuracy.roster import SIZES, RosterRow, in_short, roster_rows, summarise
from benchmarks.accuracy.support_matrix import (
    FORWARD_MATRIX,
    Combination,
    package_of,
    published_models,
    read_support_matrix,
)
from fastroof import FastroofError, compile_plan, load_model, load_tables
from fastroof.errors import TableError

LLAMA = "meta-llama/Llama-3.1-8B"
ODD = "someone/Odd-Heads"
HEADER = (
    "HuggingFaceID", "Architecture", "System", "Backend", "Version", "Mode", "Status", "ErrMsg", "Command",
    "Source",
)  # fmt: skip
MISSING = (
    r"Traceback:\n  File x\nValueError: Unsupported gemm quant mode 'nvfp4' for system='h100_sxm'\n  uv run"
)


def config(**others: object) -> str:
    own = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    return json.dumps({**own, **others})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of three models and a matrix of two systems."""
    root = tmp_path_factory.mktemp("package")
    configs, matrix = root / "model_configs", root / "systems" / "support_matrix"
    configs.mkdir()
    matrix.mkdir(parents=True)
    (configs / "meta-llama--Llama-3.1-8B_config.json").write_text(config(), "utf-8")
    (configs / "someone--Odd-Heads_config.json").write_text(config(head_dim=24), "utf-8")
    quantised = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (configs / "someone--Odd-Heads_hf_quant_config.json").write_text(json.dumps(quantised), "utf-8")
    (configs / "someone--Strange_config.json").write_text(config(model_type="strange"), "utf-8")
    rows = {
        "h100_sxm": [
            (LLAMA, "vllm", "0.1", "agg", "FAIL", MISSING),
            (LLAMA, "vllm", "0.2", "agg", "PASS", ""),
            (LLAMA, "vllm", "0.2", "disagg", "PASS", ""),
            (LLAMA, "sglang", "0.1", "disagg", "PASS", ""),
            (ODD, "vllm", "0.1", "agg", "PASS", ""),
            (ODD, "trtllm", "0.1", "agg", "FAIL", MISSING),
            ("someone/Strange", "vllm", "0.1", "agg", "PASS", ""),
            ("someone/Unheard-of", "vllm", "0.1", "agg", "FAIL", "RuntimeError: too small"),
        ],
        "moon": [(LLAMA, "vllm", "0.1", "agg", "PASS", "")],
    }
    for system, of_system in rows.items():
        with (matrix / f"{system}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(HEADER)
            for model, engine, version, mode, status, error in of_system:
                writer.writerow((model, "", system, engine, version, mode, status, error, "", ""))
    return root


def test_a_combination_is_the_best_of_its_versions(root: Path) -> None:
    assert read_support_matrix(root) == (
        Combination(LLAMA, "h100", "vllm", "PASS"),
        Combination(
            ODD, "h100", "trtllm", "FAIL", "Unsupported gemm quant mode 'nvfp4' for system='h100_sxm'"
        ),
        Combination(ODD, "h100", "vllm", "PASS"),
        Combination("someone/Strange", "h100", "vllm", "PASS"),
        Combination("someone/Unheard-of", "h100", "vllm", "FAIL", "too small"),
        Combination(LLAMA, "moon", "vllm", "PASS"),
    )


@pytest.mark.parametrize(
    ("verdict", "why", "wants"),
    [
        ("FAIL", "Unsupported moe quant mode 'fp8'", True),
        ("FAIL", "sweep_agg: no results: 3 batch point(s) had no answerable perf data", True),
        ("FAIL", "model does not fit in GPU memory", False),
        ("HYBRID_PASS", "", True),
        ("PASS", "", False),
        ("HW_INCOMPATIBLE", "Unsupported gemm quant mode", False),
    ],
)
def test_missing_data_differs_from_other_failures(verdict: str, why: str, wants: bool) -> None:
    assert Combination("a/b", "h100", "vllm", verdict, why).wants_data is wants


def test_configs_are_read_with_what_does_not_load(root: Path) -> None:
    models = published_models(root)
    assert sorted(models) == [LLAMA, ODD, "someone/Strange"]
    assert isinstance(models["someone/Strange"], FastroofError)
    of_odd = models[ODD]
    assert not isinstance(of_odd, FastroofError)
    assert of_odd.checkpoint.dtype == "fp8"


@pytest.fixture(scope="module")
def rows(root: Path) -> list[RosterRow]:
    return list(roster_rows(read_support_matrix(root), published_models(root)))


def test_rows_have_the_origins_of_plans(rows: list[RosterRow]) -> None:
    assert [(row.model, row.gpu, row.engine, row.status, row.is_covered) for row in rows] == [
        (LLAMA, "h100", "vllm", "measured", True),
        (ODD, "h100", "trtllm", "modelled", False),
        (ODD, "h100", "vllm", "modelled", False),
        ("someone/Strange", "h100", "vllm", "refused", False),
        ("someone/Unheard-of", "h100", "vllm", "refused", False),
        (LLAMA, "moon", "vllm", "refused", False),
    ]
    of_llama, _, of_odd, *_ = rows
    assert (of_llama.tp, of_llama.why, of_llama.modelled) == (SIZES[0], "", ())
    assert of_odd.on_request
    assert "head_dim 24" in of_odd.why
    assert {"decode attention", "prefill attention"} <= set(of_odd.modelled)
    assert not of_odd.streams_only
    assert rows[4].why == "no config.json of it"


def test_rows_equal_a_plan_compiled_by_hand(rows: list[RosterRow], root: Path) -> None:
    """A plan compiled by hand is borrowed, modelled or refused alike."""
    path = root / "model_configs" / "someone--Odd-Heads_config.json"
    tables = load_tables("h100")
    with pytest.raises(FastroofError, match="head_dim 24") as refusal:
        compile_plan(load_model(str(path)), "h100", tables, tp=1, engine="vllm")
    assert rows[2].why == str(refusal.value)
    plan = compile_plan(load_model(str(path)), "h100", tables, tp=8, engine="vllm", allow_modelled=True)
    kernels = [part for part in plan.explain([(1, 2047)] * 16).operators if part.role != "runtime"]
    origins = {part.name: part.origin for part in kernels}
    assert {name for name, origin in origins.items() if origin == 4} <= set(rows[2].modelled)


def test_a_summary_counts_each_row_once(rows: list[RosterRow]) -> None:
    summary = summarise(rows)
    assert list(summary.cells) == [("h100", "trtllm"), ("h100", "vllm"), ("moon", "vllm")]
    assert summary.whole[:2] == (6, 1)
    assert sum(cell.total for cell in summary.cells.values()) == summary.whole.total
    assert summary.whole.on_request == 2
    assert sum(map(len, summary.uncovered.values())) == 5
    assert len(next(iter(summary.uncovered.values()))) == 2
    assert summary.modelled["decode attention"] == 2


def test_it_prints_covered_and_missing_models(
    rows: list[RosterRow], root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def known_rows(combinations: Iterable[Combination], models: object) -> list[RosterRow]:
        wanted = {(one.model, one.gpu, one.engine) for one in combinations}
        return [row for row in rows if (row.model, row.gpu, row.engine) in wanted]

    monkeypatch.setattr(roster, "roster_rows", known_rows)
    roster.main(root)
    out = capsys.readouterr().out
    assert out.startswith(
        "2 of 3 config.json files of package0 load.\n\n* someone/Strange: has no plan yet: "
    )
    passes, wants = (part.splitlines() for part in out.split("| no data, by GPU"))
    assert [line for line in passes if line.startswith(("| h100", "| moon", "| together"))] == [
        "| h100 | 1 of 3 | 1 | 0 | 0 | 0 | 1 |",
        "| moon | 0 of 1 | 0 | 0 | 0 | 0 | 0 |",
        "| together | 1 of 4 | 1 | 0 | 0 | 0 | 1 |",
    ]
    assert "| together | 0 of 1 | 0 | 0 | 0 | 0 | 1 |" in wants
    for part, names in ((passes, {"Odd-Heads", "Strange", "Llama-3.1-8B"}), (wants, {"Odd-Heads"})):
        assert "Operators modelled, in so many combinations: decode attention 1, prefill attention 1." in part
        # models by their own names, their publishers left out
        reasons = [line for line in part if line.startswith("* 1 not covered: ")]
        assert {line[line.rindex("(") + 1 : -1] for line in reasons} == names


def test_forward_passes_have_no_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "aisimulate_core"
    columns = "HuggingFaceID,Architecture,System,Backend,Version,Status,ErrMsg,Command"
    rows = [f"{LLAMA},,moon,vllm,0.1,FAIL,no,", f"{LLAMA},,moon,vllm,0.2,PASS,,"]
    for matrix in (support_matrix.MATRIX, FORWARD_MATRIX):
        (root / matrix).mkdir(parents=True)
        (root / matrix / "moon.csv").write_text("\n".join([columns, *rows]), "utf-8")
    assert read_support_matrix(root, FORWARD_MATRIX) == (Combination(LLAMA, "moon", "vllm", "PASS"),)
    (tmp_path / "aisimulate-0.13.0.dist-info").mkdir()
    assert package_of(root) == "aisimulate 0.13.0"
    assert package_of(tmp_path) == tmp_path.name
    roster.main(root)
    out = capsys.readouterr().out
    assert out.startswith("0 of 0 config.json files of aisimulate 0.13.0 load.\n")
    assert "| forward PASS, by GPU | vllm |" in out
    assert out.count("| together | 0 of 1 |") == 2


def test_norms_alone_are_counted_apart() -> None:
    row = RosterRow("a/b", "a100", "vllm", "PASS", 8, "modelled", False, "", (), ("rope",), True)
    cell = summarise([row, row._replace(streams_only=False, modelled=("experts",))]).whole
    assert (cell.covered, cell.streams_modelled, cell.modelled) == (2, 1, 1)


def test_reasons_leave_out_what_is_one_models() -> None:
    of_one = "/x/a--b_config.json has no plan yet: it needs a MLA operator (rank {'a': [0, 1...)"
    of_other = "/x/c--d-FP8_config.json has no plan yet: it needs a MLA operator (rank 4)"
    assert in_short(of_one) == in_short(of_other) == "has no plan yet: it needs a MLA operator"
    assert in_short("no table of m 4; measured: m 5, m 6; allow_modelled=True models it") == "no table of m 4"


def test_invalid_matrices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="holds no support matrix"):
        read_support_matrix(tmp_path)
    folder = tmp_path / "systems" / "support_matrix"
    folder.mkdir(parents=True)
    for text in ("HuggingFaceID,System\na/b,h100_sxm\n", "\xff"):
        (folder / "h100_sxm.csv").write_text(text, "latin-1")
        with pytest.raises(TableError, match=r"h100_sxm\.csv"):
            read_support_matrix(tmp_path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise TableError("aiconfigurator-core is not installed")

    monkeypatch.setattr(support_matrix, "installed_root", missing)
    with pytest.raises(TableError, match="not installed"):
        read_support_matrix()
    with pytest.raises(TableError, match="not installed"):
        published_models()
