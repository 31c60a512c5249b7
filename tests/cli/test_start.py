"""How a command starts and ends: by itself, at once, with the answers and exit codes of the long way."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.cli import COMMANDS, app_of
from fastroof.cli.completion import fast_arguments

CHECKOUT = Path(__file__).resolve().parents[2]


def environment(**changed: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "COVERAGE_"))}
    return {**kept, "PYTHONPATH": str(CHECKOUT), **changed}


def run(*words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *words],
        env=environment(**changed), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


# -- loops as Python -----------------------------------------------------------------------------

PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama-3.1-8b", {}),
    ("gemma-3-12b", {"tp": 2, "dtype": "fp8", "engine": "vllm"}),
    ("deepseek-v3", {"tp": 8, "ep": 8, "engine": "sglang"}),
    ("qwen3-235b-a22b", {"dp": 8, "ep": 8}),
    ("llama-3.1-70b", {"tp": 2, "pp": 4}),
    ("nemotron-3-nano-30b-a3b", {"tp": 2}),
)
STEPS = (
    [(1, 4095)] * 64,
    [(1, 99), (1, 5000), (1, 70_001)],
    [(2048, 0)],
    [(2048, 0), *[(1, 4000)] * 3, (17, 3), (500, 9000)],
    [(1, 0)],
    [(8192, 1)],
)
HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "kv_dtype": "bf16"}
LOOKUPS = (
    ("gemm", {"m": [1, 77, 5000], "n": 6144, "k": 4096}),
    ("attention_decode", {"batch_size": [1, 40], "kv_len": 3333, **HEADS}),
)
PROGRAM = f"""
import json, sys
from fastroof.compiled.layout import is_plain, run_plain
assert run_plain() and is_plain()
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_start import answers
print(json.dumps(answers()))
assert not {{"numba", "llvmlite"}} & set(sys.modules)
"""


def answers() -> dict[str, list[str]]:
    """Bits of everything above."""
    tables = fastroof.load_tables("h100")
    batch = fastroof.StepBatch.from_requests(STEPS)
    bits: dict[str, list[str]] = {}
    for model, options in PLANS:
        plan = fastroof.compile_plan(model, "h100", tables, **{"engine": "kernels", **options})
        times = plan.run(batch)
        arrays = (plan.arena, times.latency_us, times.origin, *times.components)
        bits[model] = [array.tobytes().hex()[-4000:] for array in arrays]
        bits[model] += [float(plan.cycle_us(batch)).hex(), str(hash(plan.arena.tobytes()))]
    for operator, sizes in LOOKUPS:
        for method in ("roofline", "nearest", "linear_mfu", "floor"):
            answer = tables.lookup(operator, method=method, **sizes)  # type: ignore[arg-type]
            bits[f"{operator} {method}"] = [answer.latency_us.tobytes().hex(), answer.origin.tobytes().hex()]
    return bits


@pytest.mark.slow
def test_plain_loops_answer_to_the_last_bit() -> None:
    done = run("-c", PROGRAM, PYTHONHASHSEED="0")
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    compiled = json.loads(run("-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                              "import json; from test_start import answers; print(json.dumps(answers()))\n"
                              "assert 'numba' in sys.modules", PYTHONHASHSEED="0").stdout)  # fmt: skip
    assert plain == compiled


def test_loops_that_are_compiled_stay_so() -> None:
    done = run(
        "-c",
        "from fastroof.compiled import guides\n"
        "from fastroof.compiled.layout import is_plain, run_plain\n"
        "assert not run_plain() and not is_plain()",
    )
    assert done.returncode == 0, done.stderr


def test_a_program_that_runs_a_command_keeps_compiled_loops() -> None:
    done = run(
        "-c",
        "from typer.testing import CliRunner\n"
        "from fastroof.cli import app\n"
        "from fastroof.compiled.layout import is_plain\n"
        "words = ['step', '--model', 'no-such-model', '--decode', '1x9']\n"
        "assert CliRunner().invoke(app, words).exit_code == 2\n"
        "assert not is_plain()",
    )
    assert done.returncode == 0, done.stderr


# -- a step --------------------------------------------------------------------------------------

STEP = ("-m", "fastroof", "step", "--model", "llama-3.1-8b", "--decode", "64x4096")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--json", "--tp", "2", "--dp", "2", "--prefill", "2048@0"),
        *(
            pytest.param(more, marks=pytest.mark.release)
            for more in (
                ("--json",),
                ("--json", "--pp", "4"),
                ("--engine", "vllm", "--dtype", "fp8"),
                ("--decode", "4096x131072"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_step_of_a_kept_plan_is_printed_like_that_of_a_new_one(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    cache = {"FASTROOF_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home")}
    never = run(*STEP, *more, FASTROOF_KEEP_PLANS="never", **cache)
    assert not [*tmp_path.rglob("*")]
    first, second = (run(*STEP, *more, FASTROOF_KEEP_PLANS="auto", **cache) for _ in range(2))
    assert len([*tmp_path.rglob("*.plan")]) == 2  # and its error
    assert (never.stdout, never.stderr, never.returncode) == (first.stdout, first.stderr, first.returncode)
    assert (never.stdout, never.stderr, never.returncode) == (second.stdout, second.stderr, second.returncode)
    assert never.returncode == 0
    assert never.stdout


@pytest.mark.slow
def test_tables_of_another_gpu_are_refused_after_they_were_taken(tmp_path: Path) -> None:
    kept = {"FASTROOF_CACHE_DIR": str(tmp_path), "FASTROOF_KEEP_PLANS": "auto"}
    tables = ("--tables", str(CHECKOUT / "bench_data" / "h200"))
    taken = run(*STEP, *tables, **kept)
    assert "H200" in taken.stdout
    refused = run(*STEP, *tables, "--gpu", "h100", **kept)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "h200" in refused.stderr


IMPORTED = """
import sys
sys.argv[1:] = {words!r}
from fastroof.cli import main
try:
    main()
finally:
    print("MODULES", *sys.modules)
"""


def modules(*words: str, **changed: str) -> set[str]:
    done = run("-c", IMPORTED.format(words=list(words)), **changed)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("MODULES")[2].split())


@pytest.mark.slow
def test_what_a_simulation_imports() -> None:
    words = ("simulate", "--model", "llama-3.1-8b", "--num-gpu-blocks", "40000", "--rate", "5")
    assert modules(*words).isdisjoint({"pydantic", "matplotlib", "starlette", "ray"})


@pytest.mark.slow
def test_what_a_step_and_a_lookup_import(tmp_path: Path) -> None:
    cache = {"FASTROOF_CACHE_DIR": str(tmp_path), "FASTROOF_KEEP_PLANS": "auto"}
    step = STEP[2:]
    slow = {"numba", "llvmlite", "pyarrow.compute"}
    assert modules(*step, **cache).isdisjoint(slow)
    again = modules(*step, **cache)
    assert again.isdisjoint({"numba", "llvmlite", "pyarrow", "fastroof.plan.compile", "fastroof.load"})
    lookup = ("lookup", "gemm", "--m", "64", "--n", "6144", "--k", "4096")
    assert modules(*lookup, **cache).isdisjoint({"numba", "llvmlite"})


def test_a_command_imports_no_other() -> None:
    names = modules("gpus")
    assert {name for name in COMMANDS if f"fastroof.cli.{name}" in names} == {"gpus"}


def test_every_command_is_a_module_of_its_name() -> None:
    for name in COMMANDS:
        group = typer.main.get_command(app_of((name,)))
        commands = group.commands.values()  # type: ignore[attr-defined]
        assert [command.name for command in commands if not command.hidden] == [name]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=6),
    st.from_regex(r"[+-]?[0-9_]{0,11}(\.[0-9]{0,11})?(e[0-9])?", fullmatch=True),
    st.lists(st.one_of(st.text(max_size=4), st.integers()), max_size=3),
    st.lists(st.text(max_size=4), max_size=3).map(tuple),
)


def every_parameter() -> list[tuple[Any, Any, Any]]:
    """Each kind of parameter of all commands, as typer made it and as it is taken as given."""
    found: dict[Any, tuple[Any, Any, Any]] = {}

    def walk(ours: Any, theirs: Any) -> None:
        for one, other in zip(ours.params, theirs.params, strict=True):
            limits = one.type_descriptor.parameter_info
            kind = (str(one.type_descriptor.annotation), one.multiple, one.nargs, limits.min, limits.max)
            found.setdefault(kind, (one, other, typer.Context(ours)))
        for name, command in getattr(ours, "commands", {}).items():
            walk(command, theirs.commands[name])

    commands = [typer.main.get_command(app_of(COMMANDS)) for _ in range(2)]
    walk(fast_arguments(commands[0]), commands[1])
    return list(found.values())


@given(value=VALUES)
def test_a_word_is_taken_as_typer_takes_it(value: Any) -> None:
    for ours, theirs, context in every_parameter_once():
        answers = []
        # what stands in its place goes with the first word that needs a validator
        kept = ours._runtime_param
        for param in (ours, theirs):
            try:
                made = param.get_runtime_param().coerce(value, param=param, ctx=context)
                answers.append((type(made), repr(made)))
            except typer.BadParameter as error:
                answers.append((typer.BadParameter, error.message))
        ours._runtime_param = kept
        assert answers[0] == answers[1], (ours.name, value)


@functools.cache
def every_parameter_once() -> list[tuple[Any, Any, Any]]:
    return every_parameter()


def test_common_words_need_no_validator(tmp_path: Path) -> None:
    words = (*STEP[2:], "--tp", "2", "--gpu", "h100", "--json")
    kept = {"FASTROOF_CACHE_DIR": str(tmp_path), "FASTROOF_KEEP_PLANS": "auto"}
    modules(*words, **kept)
    assert "pydantic" not in modules(*words, **kept)


# -- an end --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_exit_codes_and_output_are_those_of_the_long_way() -> None:
    program = "import sys; sys.argv = ['fastroof', *{words!r}]; from {module} import main; main()"
    for words in (["--version"], ["gpus"], ["nope"], ["step"], ["gpus", "--nope"], [], ["step", "--help"]):
        short, long = (
            run("-c", program.format(words=words, module=module))
            for module in ("fastroof.__main__", "fastroof.cli")
        )
        assert (short.returncode, short.stdout, short.stderr) == (long.returncode, long.stdout, long.stderr)
        assert short.stdout or short.stderr
    assert run("-m", "fastroof", "--version").stdout == f"fastroof {fastroof.__version__}\n"


END = """
import atexit, sys, threading, time
sys.argv[1:] = {words!r}
import fastroof.__main__ as process
atexit.register(lambda: print("registered"))
{before}
process.main()
"""


def test_what_is_registered_for_the_end_is_done() -> None:
    done = run("-c", END.format(words=["--version"], before=""))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "registered")
    failing = run("-c", END.format(words=["nope"], before="atexit.register(lambda: 1 / 0)"))
    assert failing.returncode == 2
    assert "ZeroDivisionError" in failing.stderr
    assert failing.stdout == "registered\n"


def test_threads_are_waited_for() -> None:
    thread = "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()"
    done = run("-c", END.format(words=["--version"], before=thread))
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["thread", "registered"])


def test_a_profiler_reports() -> None:
    done = run("-m", "cProfile", "-m", "fastroof", "--version")
    assert "function calls" in done.stdout


def test_a_reader_that_has_left_causes_no_traceback() -> None:
    for words in ("gpus", "models"):
        with subprocess.Popen(
            [sys.executable, "-m", "fastroof", words],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.close()
            assert child.stderr.read() == ""
            assert child.wait(60) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to a full disk")
def test_a_full_disk_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastroof", "gpus"],
            env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert "No space left" in done.stderr
