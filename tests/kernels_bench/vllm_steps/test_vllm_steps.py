"""Whole steps of an engine: what is timed, what a kill or a deadline leaves, and which files follow."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import types
from dataclasses import astuple
from itertools import count

import pytest
from typer.testing import CliRunner

from fastroof.cli import app as fastroof_app
from fastroof.errors import MeasureError
from fastroof.load.steps_file import read_step_rows
from kernels_bench.cli import main
from kernels_bench.protocol import DeviceState
from kernels_bench.vllm_steps import timing
from kernels_bench.vllm_steps.core import _inspect_models_here
from kernels_bench.vllm_steps.model_folder import engine_model
from kernels_bench.vllm_steps.points import TIMED_STEPS, EnginePoint, default_points
from kernels_bench.vllm_steps.record import TYPES, open_journal, read_records, write_files
from kernels_bench.vllm_steps.session import EngineOptions, measure_engine_steps
from kernels_bench.vllm_steps.timing import closed_loop, time_point
from kernels_bench.vllm_steps.worker import Plan, Task, measure_points

FACTS = {
    "kv_tokens": 10**6, "block_size": 16, "kv_cache_dtype": "auto", "max_model_len": 70_000,
    "max_num_seqs": 512, "max_num_batched_tokens": 8192, "dtype": "bfloat16", "quantization": "",
}  # fmt: skip


class FakeEngine:
    """Requests that get a token a step, after a lag as with asynchronous scheduling; no time passes."""

    def __init__(self, lag=0, most=10**6, fails=None, unfit=None, facts=FACTS):
        self.lag, self.most, self.fails, self._unfit = lag, most, fails, unfit or {}
        self.facts = facts
        self.requests, self.steps, self.waiting, self.count = {}, [], [], 0

    def add(self, prompt, cached, max_tokens):
        self.count += 1
        self.requests[f"r{self.count}"] = [prompt, cached, max_tokens]
        return f"r{self.count}"

    def step(self):
        if self.fails and self.count >= self.fails[0]:
            raise self.fails[1]
        batch, got = {}, {}
        for name, request in list(self.requests.items())[: self.most]:
            prompt, cached, left = request
            batch[name] = (prompt - cached, cached)
            got[name] = (1, left == 1)
            request[:] = [prompt + 1, prompt, left - 1]
            if left == 1:
                del self.requests[name]
        self.steps.append(sorted(batch.values()))
        self.waiting.append(got)
        return self.waiting.pop(0) if len(self.waiting) > self.lag else {}

    def abort(self, names):
        for name in names:
            self.requests.pop(name, None)
        self.waiting.clear()

    def synchronize(self):
        pass

    def unfit(self, point):
        return self._unfit.get(point, "")


class Quiet:
    def read(self):
        return DeviceState()


DECODE, PREFILL, MIXED = (
    EnginePoint("decode", (3, 128)),
    EnginePoint("prefill", (64, 32)),
    EnginePoint("mixed", (64, 2, 128)),
)
POINTS = [DECODE, PREFILL, MIXED]


class TestPoints:
    def test_each_once_and_the_first_are_the_most_useful(self):
        points = default_points()
        assert len(set(points)) == len(points) == 40
        assert [str(p) for p in points[:2]] == ["decode 64x4096", "decode 1x1024"]
        assert {p.phase for p in points[:13]} == {"decode", "prefill"}

    @pytest.mark.parametrize("point", default_points(), ids=str)
    def test_a_point_is_the_batch_it_is_called(self, point):
        kv_lens = [sum(request) for request in zip(*astuple(point.batch), strict=True)]
        assert max(kv_lens) <= point.longest
        assert sum(kv_lens) <= point.kv_tokens
        assert point.phase == "prefill" or 1 < point.start_len < point.sizes[-1]


class TestTiming:
    @pytest.mark.parametrize("lag", [0, 1])
    def test_the_middle_step_of_a_decode_reads_its_kv_len(self, lag):
        engine = FakeEngine(lag)
        timing = time_point(engine, DECODE)
        assert timing.num_replays == TIMED_STEPS
        assert 0 < timing.min_us <= timing.p25_us <= timing.latency_us <= timing.p75_us
        timed = [step for step in engine.steps if len(step) == 3][-TIMED_STEPS:]
        assert all(step == [(1, step[0][1])] * 3 for step in timed)
        kv_lens = [new + cached for new, cached in (step[0] for step in timed)]
        assert kv_lens == list(range(kv_lens[0], kv_lens[0] + TIMED_STEPS))
        assert kv_lens[TIMED_STEPS // 2] == 128 + lag
        assert not engine.requests

    def test_a_prefill_is_alone_and_has_its_prefix(self):
        engine = FakeEngine()
        assert time_point(engine, PREFILL).num_replays == 5
        assert [step for step in engine.steps if step] == [[(64, 32)]] * 6

    @pytest.mark.parametrize("lag", [0, 1])
    def test_mixed_steps_are_near_their_kv_len(self, lag):
        engine = FakeEngine(lag)
        assert time_point(engine, MIXED).num_replays == 4
        mixed = [step for step in engine.steps if (64, 0) in step]
        assert len(mixed) == 5
        assert all(len(step) == 3 for step in mixed)
        kv_lens = [sum(step[0]) for step in mixed[1:]]
        assert 128 - 8 <= min(kv_lens) <= 128 <= max(kv_lens) <= 128 + 8
        assert not engine.requests

    @pytest.mark.parametrize("point", [DECODE, MIXED], ids=str)
    def test_a_step_that_leaves_requests_out_is_refused(self, point):
        engine = FakeEngine(most=point.sizes[-2] - 1)
        with pytest.raises(MeasureError, match="leaves requests out"):
            time_point(engine, point)
        assert not engine.requests

    def test_an_engine_without_tokens_ends(self):
        with pytest.raises(MeasureError):
            time_point(FakeEngine(most=0), PREFILL)

    def test_closed_loop_keeps_its_clients_busy(self, monkeypatch):
        ticks = count()
        monkeypatch.setattr(timing, "perf_counter", lambda: 1e-5 * next(ticks))
        engine = FakeEngine()
        seen = closed_loop(engine, 4, 0.05, 400)
        assert all(len(step) == 4 for step in engine.steps[:-1] if step)
        assert seen["num_requests"] == len(seen["requests"]) > 4
        assert all(one["prompt"] + one["tokens"] <= 400 for one in seen["requests"])
        assert {"p50", "p90", "p99", "mean"} == set(seen["step_us"])
        assert not engine.requests


def task(folder, **changes):
    given = {"model": "llama-3.1-8b", "weights": "bf16", "config_folder": "", "max_position": 4096}
    return Task(**{**given, "output": str(folder), **changes})


def measure(folder, engine=None, points=POINTS, loops=(), gpu="h100", seconds=None, clock=None, **changes):
    """What a worker does, after the parent's start line."""
    folder.mkdir(exist_ok=True)
    with open_journal(folder) as journal:
        if not journal.records:
            journal.append({"type": "start", "gpu": gpu, "versions": {"vllm": "0.26.0"}})
        plan = Plan(points, loops, 0.02, seconds)
        given = () if clock is None else (clock,)
        run = task(folder, **changes)
        measure_points(run, engine or FakeEngine(), "0.26.0", journal, Quiet(), plan, *given)


class TestWorker:
    def test_files_follow_from_the_journal(self, tmp_path):
        measure(tmp_path, loops=(2,))
        rows = read_step_rows(tmp_path / "steps.csv")
        assert [row["phase"] for row in rows] == ["decode", "prefill", "mixed"]
        assert {(r["model"], r["gpu"], r["tp"], r["dtype"], r["kv_dtype"], r["provider"]) for r in rows} == {
            ("llama-3.1-8b", "h100", 1, "bf16", "bf16", "vllm 0.26.0 engine")
        }
        assert [row["num_tokens"] for row in rows] == [3, 64, 66]
        assert rows[2]["new_tokens"], rows[2]["context_len"] == ("1x2;64", "127x2;0")
        written = tomllib.loads((tmp_path / "steps.toml").read_text())
        run = written["runs"]["run_1"]
        assert (written["gpu"], run["measured"], run["weights"]) == ("h100", 3, "dummy")
        assert [loop["clients"] for loop in run["closed_loops"]] == [2]
        assert "requests" not in run["closed_loops"][0]
        assert not {record["type"] for record in read_records(tmp_path)} - set(TYPES)

    @pytest.mark.parametrize(
        ("facts", "weights", "dtypes"),
        [
            ({}, "bf16", ("bf16", "bf16")),
            ({"dtype": "float32"}, "bf16", ("fp32", "fp32")),
            ({"quantization": "fp8"}, "fp8_block", ("fp8_block", "bf16")),
            ({"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, "fp8_block", ("fp8_block", "fp8")),
        ],
    )
    def test_formats_are_the_engines(self, tmp_path, facts, weights, dtypes):
        measure(tmp_path, FakeEngine(facts={**FACTS, **facts}), [DECODE], weights=weights, level=2)
        (row,) = read_step_rows(tmp_path / "steps.csv")
        assert (row["dtype"], row["kv_dtype"]) == dtypes
        assert row["provider"] == "vllm 0.26.0 engine, eager"

    @pytest.mark.parametrize("kept", range(len(POINTS)))
    def test_resumes_after_a_failure_at_any_point(self, tmp_path, kept):
        class Dead(Exception):
            pass

        engine = FakeEngine()
        done = []
        engine.unfit = lambda point: done.append(point) or ""

        def step():
            if len(done) > kept:
                raise Dead
            return FakeEngine.step(engine)

        engine.step = step
        with pytest.raises(Dead):
            measure(tmp_path, engine)
        assert kept == 0 or len(read_step_rows(tmp_path / "steps.csv")) == kept
        measure(tmp_path)
        rows = read_step_rows(tmp_path / "steps.csv")
        sizes = {(row["new_tokens"], row["context_len"]) for row in rows}
        assert len(sizes) == len(rows) == len(POINTS)

    def test_a_torn_line_is_measured_again_and_nothing_else(self, tmp_path):
        measure(tmp_path, loops=(2,))
        path = tmp_path / "vllm_steps.jsonl"
        whole = path.read_bytes()
        before = read_records(tmp_path)
        for cut in (1, 40, len(whole.splitlines()[-1])):
            path.write_bytes(whole[:-cut])
            engine = FakeEngine()
            measure(tmp_path, engine, loops=(2,))
            assert [r["type"] for r in read_records(tmp_path)] == [r["type"] for r in before]
            assert not any((64, 32) in step for step in engine.steps)

    def test_other_models_of_a_folder_are_measured_too(self, tmp_path):
        measure(tmp_path)
        measure(tmp_path, model="qwen3-14b-fp8", weights="fp8_block")
        assert len(read_step_rows(tmp_path / "steps.csv")) == 2 * len(POINTS)

    def test_deadline(self, tmp_path):
        now = [0.0]

        def clock():
            now[0] += 1.0
            return now[0]

        measure(tmp_path, seconds=4.5, clock=clock)
        last = read_records(tmp_path)[-1]
        assert (last["type"], last["reason"]) == ("stopped", "deadline: 1 of 3 steps are left")
        assert len(read_step_rows(tmp_path / "steps.csv")) == 2

    def test_what_does_not_fit_is_skipped_with_its_reason(self, tmp_path):
        measure(tmp_path, FakeEngine(unfit={PREFILL: "max_model_len is 64"}, most=2))
        skips = {tuple(r["sizes"]): r["reason"] for r in read_records(tmp_path) if r["type"] == "unfit"}
        assert skips[PREFILL.sizes] == "max_model_len is 64"
        assert "leaves requests out" in skips[DECODE.sizes]
        engine = FakeEngine()
        measure(tmp_path, engine)
        assert not engine.steps

    def test_a_task_survives_json(self, tmp_path):
        given = task(tmp_path, seconds=1.5, engine_args={"max_num_seqs": 8})
        assert Task.from_json(given.to_json()) == given


def test_validate_accepts_the_steps(tmp_path):
    measure(tmp_path, points=default_points()[:6])
    measure(tmp_path, points=[MIXED, PREFILL], model="qwen3-14b-fp8", weights="fp8_block",
            engine=FakeEngine(facts={**FACTS, "quantization": "fp8"}))  # fmt: skip
    done = CliRunner().invoke(
        fastroof_app, ["validate", "--steps", str(tmp_path / "steps.csv"), "--gpu", "h100", "--json"]
    )
    assert not done.exit_code, done.output
    answer = json.loads(done.stdout)
    assert {"decode", "prefill", "mixed"} <= set(json.dumps(answer).replace('"', " ").split())


class FakeWorker:
    """Runs a worker's part at once; ``codes`` are its exit codes by model and level."""

    def __init__(self, engine_of=lambda task: FakeEngine(), codes=None, points=POINTS):
        self.engine_of, self.codes, self.points = engine_of, codes or {}, points
        self.tasks = []

    def __call__(self, task, log):
        self.tasks.append(task)
        code = self.codes.get((task.model, task.level), 0)
        if code == 0:
            with open_journal_of(task) as journal:
                plan = Plan(self.points, (), 0.0, task.seconds)
                measure_points(task, self.engine_of(task), "0.26.0", journal, Quiet(), plan)
        return FakeProcess(code)


def open_journal_of(task):
    from pathlib import Path

    return open_journal(Path(task.output))


class FakeProcess:
    def __init__(self, code):
        self.code, self.killed = code, False

    def wait(self, timeout=None):
        if self.code is None and not self.killed:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.code

    def poll(self):
        return -9 if self.killed else self.code

    def kill(self):
        self.killed = True


def session(folder, worker, *names, **options):
    models = [engine_model(name) for name in names or ("llama-3.1-8b",)]
    return measure_engine_steps(models, folder, EngineOptions(**{"gpu": "cpu", **options}), worker)


class TestSession:
    def test_models_are_measured_once(self, tmp_path):
        names = ("llama-3.1-8b", "qwen3-14b-fp8")
        report = session(tmp_path, FakeWorker(), *names)
        assert (report.measured, report.present, report.problems) == (6, 0, [])
        again = session(tmp_path, FakeWorker(), *names)
        assert (again.measured, again.present) == (0, 6)
        runs = tomllib.loads((tmp_path / "steps.toml").read_text())["runs"]
        assert [run["measured"] for run in runs.values()] == [6, 0]
        assert all(run["finished"] and run["device"] for run in runs.values())

    def test_a_model_that_measures_nothing_is_tried_lower_and_the_next_begins_there(self, tmp_path):
        names = ("llama-3.1-8b", "qwen3-14b-fp8")
        worker = FakeWorker(codes={("llama-3.1-8b", 0): 1, ("llama-3.1-8b", 1): -11})
        report = session(tmp_path, worker, *names)
        assert [(t.model, t.level) for t in worker.tasks] == [(names[0], level) for level in range(3)] + [
            (names[1], 2)
        ]
        assert report.problems == ["llama-3.1-8b: exit code 1", "llama-3.1-8b: exit code -11"]
        assert report.measured == 6
        failures = tomllib.loads((tmp_path / "steps.toml").read_text())["runs"]["run_1"]["failures"]
        assert [one["level"] for one in failures] == [0, 1]

    def test_a_model_that_fails_at_every_level_leaves_the_next_one(self, tmp_path):
        codes = {("llama-3.1-8b", level): 1 for level in range(3)}
        report = session(tmp_path, FakeWorker(codes=codes), "llama-3.1-8b", "qwen3-14b-fp8")
        assert report.measured == 3
        assert {row["model"] for row in read_step_rows(tmp_path / "steps.csv")} == {"qwen3-14b-fp8"}

    def test_the_first_model_gets_half_of_the_time(self, tmp_path):
        worker = FakeWorker()
        names = ("llama-3.1-8b", "qwen3-14b-fp8", "qwen3-0.6b")
        session(tmp_path, worker, *names, deadline_s=300.0)
        shares = [t.seconds for t in worker.tasks]
        assert shares[0] == pytest.approx(150, abs=1)
        assert shares[1] == pytest.approx(150, abs=1)  # the first one took none of its time
        assert shares[2] == pytest.approx(300, abs=2)

    def test_no_model_begins_too_close_to_the_deadline(self, tmp_path):
        worker = FakeWorker()
        report = session(tmp_path, worker, deadline_s=50.0)
        assert not worker.tasks
        assert re.fullmatch(
            "llama-3.1-8b: deadline: (50|49) s left, a model needs 70 s", "".join(report.problems)
        )
        assert session(tmp_path, worker, deadline_s=50.0, least_s=1.0).measured == 3

    def test_a_worker_that_hangs_is_killed(self, tmp_path, monkeypatch):
        from kernels_bench.vllm_steps import session as module

        monkeypatch.setattr(module, "GRACE_S", 0.0)
        processes = []

        def start(task, log):
            processes.append(FakeProcess(None))
            return processes[-1]

        report = session(tmp_path, start, deadline_s=1.0, least_s=0.5, level=2)
        assert [process.killed for process in processes] == [True]
        assert report.problems == ["llama-3.1-8b: killed after its time"]

    def test_an_interrupt_kills_the_worker_and_keeps_the_steps(self, tmp_path):
        class Interrupted(FakeProcess):
            def wait(self, timeout=None):
                if self.killed:
                    return -9
                raise KeyboardInterrupt

        process = Interrupted(None)

        def start(task, log):
            FakeWorker()(task, log)
            return process

        with pytest.raises(KeyboardInterrupt):
            session(tmp_path, start)
        assert process.killed
        assert len(read_step_rows(tmp_path / "steps.csv")) == 3
        assert session(tmp_path, FakeWorker()).present == 3

    def test_another_gpus_folder_and_one_without_an_engine(self, tmp_path):
        measure(tmp_path / "h100")
        with pytest.raises(MeasureError, match="steps of h100, this GPU is cpu"):
            session(tmp_path / "h100", FakeWorker())
        shutil.copy(tmp_path / "h100" / "steps.csv", tmp_path)
        with pytest.raises(MeasureError, match=r"has a steps\.csv without vllm_steps\.jsonl"):
            session(tmp_path, FakeWorker())

    def test_records_are_shown_as_they_come(self, tmp_path):
        shown = []
        session(tmp_path, FakeWorker(), on_record=shown.append)
        assert [r["type"] for r in shown if r["type"] == "step"] == ["step"] * 3


class TestModels:
    @pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b-fp8", "gpt-oss-20b", "qwen2.5-7b"])
    def test_a_preset_becomes_a_whole_config(self, name, tmp_path):
        config = json.loads((engine_model(name).write(tmp_path) / "config.json").read_text())
        assert {"rope_theta", "rms_norm_eps", "hidden_act", "vocab_size", "architectures"} <= set(config)
        assert ("quantization_config" in config) == (name in ("qwen3-30b-a3b-fp8", "gpt-oss-20b"))

    def test_a_config_is_copied_and_named_by_its_path(self, tmp_path):
        config = engine_model("qwen3-0.6b").config
        (tmp_path / "my model.json").write_text(json.dumps(config))
        model = engine_model(str(tmp_path / "my model.json"))
        assert model.name == str(tmp_path / "my model.json")
        folder = model.write(tmp_path / "configs")
        assert folder.name == "my_model"
        assert json.loads((folder / "config.json").read_text()) == config

    def test_a_family_whose_presets_are_incomplete(self):
        with pytest.raises(MeasureError, match=r"give the path of its config\.json"):
            engine_model("deepseek-v3")


class TestCommand:
    def test_grid_needs_no_vllm(self, capsys):
        with pytest.raises(SystemExit) as done:
            main(["steps", "--model", "llama-3.1-8b,qwen3-14b", "--grid"])
        assert not done.value.code
        assert capsys.readouterr().out.splitlines()[0] == "decode 64x4096"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--model", "gpt-5"], "unknown model"),
            (["--model", ","], "names no model"),
            (["--model", "qwen3-8b"], "give -o FOLDER"),
            (["--model", "qwen3-8b", "--engine-args", "[1]"], "JSON object"),
            (["--model", "qwen3-8b", "--engine-args", "{"], "--engine-args"),
            (["--model", "qwen3-8b", "--deadline", "-1"], "above zero"),
        ],
    )
    def test_bad_input_is_one_line(self, arguments, message, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as done:
            main(["steps", *arguments])
        assert done.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_write_files_needs_nothing_but_the_journal(tmp_path):
    measure(tmp_path)
    csv, toml = ((tmp_path / name).read_bytes() for name in ("steps.csv", "steps.toml"))
    for name in ("steps.csv", "steps.toml"):
        (tmp_path / name).unlink()
    write_files(tmp_path, read_records(tmp_path))
    assert (tmp_path / "steps.csv").read_bytes() == csv
    assert (tmp_path / "steps.toml").read_bytes() == toml


class TestCore:
    def test_a_models_class_is_looked_at_without_another_process(self, monkeypatch):
        registry = types.ModuleType("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda function: pytest.fail("in another process")
        monkeypatch.setitem(sys.modules, registry.__name__, registry)
        for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        _inspect_models_here()
        assert registry._run_in_subprocess(lambda: "seen") == "seen"
        del registry._run_in_subprocess
        _inspect_models_here()
        assert not hasattr(registry, "_run_in_subprocess")
