"""The command line of a newcomer: a GPU by its name, and what its tables are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fastroof import run_sweep
from tests.cli.test_cli import good, run
from tests.reference.packages import ALLREDUCE, ATTENTION, install, package
from tests.reference.packages import GEMM as GEMM_ROW

STEP = ("step", "--model", "llama-3.1-8b", "--decode", "8x1024")
GEMM = ("lookup", "gemm", "--m", "1", "--n", "8", "--k", "16", "--json")
NO_PACKAGE = "b300 has no measured tables yet: run pip install 'fastroof[tables]' to get them"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path, monkeypatch)


def done(*arguments: str) -> str:
    """Output of a command that succeeds; on stderr it may report a conversion."""
    code, out, err = run(*arguments)
    assert code == 0, err
    assert all(line.startswith("converting the tables of b300: ") for line in err.splitlines()), err
    return out


def parsed(*arguments: str) -> Any:
    return json.loads(done(*arguments, "--json"))


def refused(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    *before, error = err.splitlines()
    assert all(line.startswith("converting") for line in before)
    return error.removeprefix("fastroof: error: ")


def made(root: Path) -> set[str]:
    return {path.name for path in (root / "b300").iterdir() if path.name != ".imported.json"}


def test_the_first_command_converts_with_progress_and_the_next_does_not(root: Path) -> None:
    code, out, err = run(*GEMM, "--gpu", "b300")
    assert (code, json.loads(out)["rows"][0]["latency_us"]) == (0, 2.5)
    assert err.startswith("converting the tables of b300: ")
    assert err.count("files") == 1
    again = run(*GEMM, "--gpu", "b300")
    assert again == (0, out, "")
    assert len(made(root)) == 4


@pytest.mark.parametrize("name", ["b300", "B300-SXM", "b300_sxm"])
def test_system_is_another_word_for_gpu(root: Path, name: str) -> None:
    assert parsed(*GEMM[:-1], "--system", name) == parsed(*GEMM[:-1], "--gpu", "b300")
    assert parsed("tables", "show", "gemm", "--system", name)["gpu"] == "b300"


@pytest.mark.parametrize(
    "command", [("fit",), ("compare",), ("serving",), ("validate",), ("bench",), ("calibrate",)]
)
def test_every_command_with_a_gpu_takes_a_system(command: tuple[str, ...]) -> None:
    assert "--gpu, --system" in good(*command, "--help").replace("--gpu,--system", "--gpu, --system")


def test_import_by_name_and_by_the_old_options(root: Path, tmp_path: Path) -> None:
    out = done("tables", "import", "aiconfigurator", "b300_sxm")
    assert f"wrote {root / 'b300'}" in out
    assert len(made(root)) == 4
    other = ("tables", "import", "aiconfigurator", "b300", "-o", str(tmp_path / "mine"))
    done(*other)
    assert made(tmp_path / "mine") == made(root)
    one = tmp_path / "one"
    done(
        "tables", "import", "aiconfigurator", "b300_sxm", "--backend", "sglang", "--version",
        "0.5.10", "-o", str(one),
    )  # fmt: skip
    assert (one / "b300" / "aiconfigurator-sglang-0.5.10" / "gemm.parquet").is_file()
    own = ("tables", "import", "aiconfigurator", "b300", "--backend", "sglang")
    assert "exists" in refused(*own)
    done(*own, "--overwrite")
    kinds = {entry["kind"] for entry in parsed("tables", "list", "b300")}
    assert kinds == {"imported"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing argument 'GPU'"),
        (("b30",), "unknown GPU 'b30'; did you mean b300"),
        (("l4",), "no package has tables of l4; they have tables of a100"),
        (("b300", "--version", "0.5.10"), "--version goes with --backend"),
        (("b300", "--backend", "tgi"), "no table of tgi"),
    ],
)
def test_imports_that_cannot_be(root: Path, arguments: tuple[str, ...], message: str) -> None:
    import re

    assert re.search(message, refused("tables", "import", "aiconfigurator", *arguments))


def test_list_imports_nothing_and_prints_what_could_be(root: Path) -> None:
    assert "imported on first use: a100, b300" in done("tables")
    assert refused("tables", "list", "b300") == (
        "b300 has no measured tables yet: run fastroof tables import aiconfigurator b300 to get them"
    )
    assert not root.exists()
    done("tables", "import", "aiconfigurator", "b300")
    text = done("tables")
    assert "b300" in text.partition("datasheet model only")[0]
    assert str(root) in text
    entries: list[dict[str, Any]] = parsed("tables", "list", "--gpu", "b300")
    assert {entry["kind"] for entry in entries} == {"imported"}
    assert "4 sources" in done("gpus")


def test_without_the_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastroof.load.aiconfigurator.MODULES", ("no_such_package",))
    assert refused(*GEMM[:-1], "--gpu", "b300") == NO_PACKAGE
    assert refused("tables", "list", "b300") == NO_PACKAGE
    assert "pip install 'fastroof[tables]'" in refused("tables", "import", "aiconfigurator", "b300")
    code, out, err = run(*STEP, "--gpu", "b300")
    assert code == 0
    assert "modelled" in out
    assert "datasheet model, not from kernels (standard error 22%); run pip install 'fastroof[tables]'" in err
    code, _, err = run(*STEP, "--gpu", "mi300x")
    assert code == 0
    assert err.strip().endswith("from the datasheet model, not from kernels (standard error 45%)")


def test_a_folder_of_the_gpus_name_is_not_the_gpu(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("tables", "import", "aiconfigurator", "b300", "-o", str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path / "mine")
    assert parsed(*GEMM[:-1], "--tables", "./b300")["rows"][0]["latency_us"] == 2.5
    assert not root.exists()


def test_what_a_campaign_lacks_is_listed(root: Path, tmp_path: Path) -> None:
    """A file that nothing reads, one without a column, one of another version, and older versions."""
    faulty = {name: value for name, value in ATTENTION.items() if name != "step"}
    site = tmp_path / "site"
    package(
        site,
        "b300_sxm",
        generation=[faulty],
        **{
            "gemm/vllm/0.24.0/new_kernel_perf": [GEMM_ROW],
            "comm/vllm/0.19.0/custom_allreduce_perf": [ALLREDUCE],
        },
    )
    code, imported, err = run("tables", "import", "aiconfigurator", "b300")
    assert (code, "tables of b300 lack a file of the package" in err) == (0, True)
    vllm = "aiconfigurator-vllm-0.24.0"
    lines = [line for line in imported.splitlines() if line.startswith("incomplete: ")]
    assert [line for line in done("tables", "list", "b300").splitlines() if line in lines] == lines
    assert lines == [
        "incomplete: aiconfigurator-sglang-0.5.10: kernels that other versions have: not converted; "
        "`fastroof tables import aiconfigurator b300 --backend ENGINE --version VERSION` converts all of a "
        "version",
        f"incomplete: {vllm}: b300_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet "
        f"(attention_decode): not read: missing column step; the file has {', '.join(faulty)}",
        f"incomplete: {vllm}: allreduce: rows of 0.19.0, which stand in for 0.24.0",
        f"incomplete: {vllm}: b300_sxm/gemm/vllm/0.24.0/new_kernel_perf.parquet: not read: no operator "
        "has its rows",
    ]
    listed = {entry["source"]: entry["missing"] for entry in parsed("tables", "list", "b300")}
    assert set(listed[vllm]) == {
        "b300_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet (attention_decode)",
        "allreduce",
    }
    assert listed["aiconfigurator-nccl-2.27.3"] == listed["aiconfigurator-sglang-0.5.14"] == {}


def test_another_version_serves_on_request(root: Path, tmp_path: Path) -> None:
    package(tmp_path / "site", "b300_sxm", **{"gemm/vllm/0.19.0/gemm_perf": [GEMM_ROW | {"latency": 0.007}]})
    done("tables", "import", "aiconfigurator", "b300", "--backend", "vllm", "--version", "0.19.0")
    newest = parsed(*GEMM[:-1], "--gpu", "b300")["rows"][0]["latency_us"]
    older = ("--source", "gemm=aiconfigurator-vllm-0.19.0")
    assert (newest, parsed(*GEMM[:-1], "--gpu", "b300", *older)["rows"][0]["latency_us"]) == (2.5, 7.0)


def test_your_own_gpu_from_its_datasheet_to_measured_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "b300-mine/gpu.toml\n" in done("tables", "new", "b300-mine")
    guide = (Path(__file__).parents[2] / "fastroof/load/README.md").read_text()
    for file in tmp_path.rglob("*.toml"):
        assert f"```toml\n{file.read_text()}```" in guide
    for name, why in {"b300-mine": "exists", "h100": "is the NVIDIA H100 SXM", "a/b": "not the name"}.items():
        assert why in refused("tables", "new", name)
    mine = (*STEP[:-1], "64x1024", "--gpu", "b300-mine", "--explain", "--json")
    modelled = json.loads(run(*mine)[1])
    assert (modelled["origin"], modelled["kernels"]) == ("modelled", "datasheet")
    spec = {"models": ["llama-3.1-8b"], "gpus": ["b300-mine"], "isl": 100, "osl": 10, "clients": 1}
    with pytest.warns(UserWarning, match="no measured tables of b300-mine"):
        run_sweep(spec, "rows.parquet")
    assert set(pq.read_table("rows.parquet")["origin"].to_pylist()) == {"modelled"}
    # ten times of rows that reach three quarters of the bandwidth
    header, *rows = Path("b300-mine/measured/gemm.csv.template").read_text().splitlines()
    sizes = [list(map(int, row.split(",")[1:4])) for row in rows]
    times = [2.0 * (m * k + n * k + m * n) / 2.5e6 for m, n, k in sizes]
    filled = [f"{row}{us:.1f}" for row, us in zip(rows, times, strict=True)]
    assert len(filled) == 10
    Path("b300-mine/measured/gemm.csv").write_text("\n".join([header, *filled]))
    _, out, err = run(*mine)
    assert "what was not measured on b300-mine comes from the datasheet model" in err
    measured = json.loads(out)
    origins = {one["name"]: one["origin"] for one in measured["operators"]}
    assert {origins[name] for name in ("qkv", "o", "gate_up", "down", "lm_head")} == {"measured"}
    assert origins["decode attention"] == "modelled"
    assert measured["relative_error"] < modelled["relative_error"]
    with pytest.warns(UserWarning, match="what was not measured on b300-mine"):
        run_sweep(spec, "rows.parquet", restart=True)
    assert pq.read_table("rows.parquet")["kernels"].to_pylist()[0] == "datasheet; gemm from measured"
