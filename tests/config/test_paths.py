"""The folder of the user's tables, with and without platformdirs, as on a GPU host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from fastroof.config.paths import user_tables_root
from fastroof.errors import TableError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """platformdirs cannot be imported."""
    monkeypatch.setitem(sys.modules, "platformdirs", None)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only platformdirs knows the folder")
@pytest.mark.parametrize("data", [None, "", "  ", "relative", "/data", "/data/"])
def test_the_folder_is_the_same_without_platformdirs(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, data: str | None
) -> None:
    monkeypatch.delenv("FASTROOF_TABLES", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    if data is None:
        monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_DATA_HOME", data)
    expected = user_tables_root()
    assert expected == Path(platformdirs.user_data_dir("fastroof")) / "tables"
    request.getfixturevalue("absent")
    assert user_tables_root() == expected


def test_without_platformdirs_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch, absent: None) -> None:
    monkeypatch.delenv("FASTROOF_TABLES", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TableError, match=r"platformdirs is not installed: .* or set FASTROOF_TABLES"):
        user_tables_root()


@pytest.mark.parametrize("release", ["answers", "raises"])
def test_no_home(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    def no_home(_: str) -> str:
        if release == "raises":
            raise RuntimeError("could not determine the home directory")
        return "~/.local/share/fastroof"

    monkeypatch.delenv("FASTROOF_TABLES", raising=False)
    monkeypatch.setattr("platformdirs.user_data_dir", no_home)
    with pytest.raises(TableError, match="no home folder for tables; set FASTROOF_TABLES"):
        user_tables_root()


def test_measured_tables_load_by_name_where_it_is_not_installed(tmp_path: Path) -> None:
    """What kernels-bench does on a GPU host."""
    program = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('platformdirs', 'pydantic', 'numba'))\n"
        "from kernels_bench.output.table_sets import load_table_set\n"
        "print(load_table_set('h100:aiconfigurator-vllm-0.25.0').gpu)"
    )
    environment = {"HOME": str(tmp_path), "PATH": "", "FASTROOF_TABLES_IMPORT": "never"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "h100\n", done.stderr
