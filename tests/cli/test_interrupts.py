"""Ctrl-C: soon, with exit code 130 and no traceback, whatever a command is doing, and nothing left behind."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastroof.cli import app
from tests.cli.test_start import environment

STOPPED_S = 120.0
"""Less than what is stopped takes, which is minutes."""

PROGRAM = """
import hashlib, importlib.abc, os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fastroof.__main__ as process

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def block():
    "Minutes of one instruction, as compiling is: the main thread acts on no signal."
    threading.Timer(0.3, interrupt).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

class InterruptAt(importlib.abc.MetaPathFinder):
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            interrupt()

sys.argv[1:] = {words!r}
{before}
process.main()
"""


def interrupted(before: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(words=list(words), before=before)],
        env=environment(), capture_output=True, text=True, check=False, timeout=STOPPED_S, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr
    return done


@pytest.mark.parametrize("module", ["fastroof.cli", "typer", "fastroof.cli.gpus", "fastroof.config.gpu"])
def test_while_a_command_is_imported(module: str) -> None:
    assert interrupted(f"sys.meta_path.insert(0, InterruptAt({module!r}))", "gpus").stdout == ""


def test_while_kernels_bench_is_imported() -> None:
    swap = "import kernels_bench.__main__ as process; sys.meta_path.insert(0, InterruptAt('typer'))"
    assert interrupted(swap, "providers").stdout == ""


@pytest.mark.parametrize("module", ["numba", "numba.core.config", "pyarrow", "fastroof.plan.compile"])
def test_while_a_command_imports(module: str) -> None:
    interrupted(
        f"sys.meta_path.insert(0, InterruptAt({module!r}))",
        "serving", "--model", "llama-3.1-8b", "--isl", "9", "--osl", "9", "--clients", "1",
    )  # fmt: skip


def test_where_python_cannot_raise_it() -> None:
    interrupted("""
import fastroof.config
class Late:
    def __del__(self):
        interrupt()
        for _ in range(10**6):
            pass
fastroof.config.gpu_names = lambda: Late() and [block()]
""", "gpus")  # fmt: skip


@pytest.mark.slow
def test_while_the_main_thread_compiles() -> None:
    interrupted("import fastroof.config; fastroof.config.gpu_names = block", "gpus")


@pytest.mark.slow
def test_while_other_threads_compile() -> None:
    interrupted("""
import fastroof.config
def wait():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block).result()
fastroof.config.gpu_names = wait
""", "gpus")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [False, True])
def test_nothing_half_written_stays(is_folder: bool, tmp_path: Path) -> None:
    interrupted(f"""
import fastroof.config
from fastroof.atomic_files import whole_file, whole_folder
def write():
    place = Path("written")
    with (whole_folder if {is_folder} else whole_file)(place) as unfinished:
        (unfinished / "part" if {is_folder} else unfinished).write_text("half")
        assert os.listdir(".")
        block()
fastroof.config.gpu_names = write
""", "gpus", cwd=tmp_path)  # fmt: skip
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sweep", "capacity"])
def test_a_sweep_still_prints_how_to_go_on(command: str, tmp_path: Path) -> None:
    spec = {
        "sweep": 'models = ["llama-3.1-8b"]\nisl = 9\nosl = 9\nclients = [1]\n',
        "capacity": 'models = ["llama-3.1-8b"]\n[slo]\nttft_p99_ms = 9\n'
        "[workload]\nrequests = 9\nisl = 9\nosl = 9\n",
    }[command]
    (tmp_path / "s.toml").write_text(spec)
    (tmp_path / ".o.parquet.parts").mkdir()
    before = "import fastroof.sweep; fastroof.sweep.run_sweep = lambda *_, **__: block()"
    done = interrupted(before, command, "s.toml", "-o", "o.parquet", cwd=tmp_path)
    assert done.stderr.count("To continue: fastroof") == 1
    assert f"fastroof {command} s.toml -o o.parquet --resume" in done.stderr


def test_a_second_one_does_not_wait() -> None:
    done = interrupted("""
import fastroof.config
def stubborn():
    try:
        interrupt()
        signal.pause()
    except KeyboardInterrupt:
        interrupt()
        os.write(1, b"went on")
fastroof.config.gpu_names = stubborn
""", "gpus")  # fmt: skip
    assert done.stdout == ""


def test_a_background_command_that_ignores_it_goes_on() -> None:
    program = PROGRAM.format(words=["gpus"], before="threading.Timer(0.05, interrupt).start()")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(), capture_output=True, text=True, check=False, timeout=120,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "h100" in done.stdout


def test_a_program_that_runs_a_command_keeps_its_own_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert CliRunner().invoke(app, ["gpus"]).exit_code == 0
    assert signal.getsignal(signal.SIGINT) is before
