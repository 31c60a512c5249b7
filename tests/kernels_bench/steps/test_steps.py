"""Whole steps: the file, the grid, the step against a naive one, and what a kill leaves."""

import json
import tomllib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fastroof.columns import MEASURED_STEP_COLUMNS
from fastroof.config import load_gpu
from fastroof.errors import MeasureError
from fastroof.models import DenseModel, load_model
from kernels_bench.cli import main
from kernels_bench.protocol import DeviceState, Timing
from kernels_bench.steps.step_points import (
    StepPoint,
    default_steps,
    expected_seconds,
    step_bytes,
    weight_bytes,
)
from kernels_bench.steps.step_rows import append_step, read_steps, step_key

ROW = {
    "model": "m", "gpu": "h100", "tp": 1, "dtype": "bf16", "kv_dtype": "bf16", "phase": "mixed",
    "new_tokens": "1x3;64", "context_len": "99x3;0", "num_requests": 4, "num_tokens": 67,
    "latency_us": 1 / 3, "p25_us": 0.3, "p75_us": 0.4, "min_us": 0.25, "num_replays": 20,
    "provider": "a; b, c",
}  # fmt: skip


class TestFile:
    def test_rows_come_back_to_the_last_bit(self, tmp_path):
        path = tmp_path / "steps.csv"
        append_step(path, ROW)
        append_step(path, {**ROW, "new_tokens": "2"})
        assert read_steps(path) == [ROW, {**ROW, "new_tokens": "2"}]
        assert path.read_text().splitlines()[0] == ",".join(c.name for c in MEASURED_STEP_COLUMNS)

    def test_a_torn_line_is_no_row_and_is_cut_off(self, tmp_path):
        path = tmp_path / "steps.csv"
        append_step(path, ROW)
        whole = path.read_bytes()
        for cut in range(1, len(whole)):
            path.write_bytes(whole[:cut])
            rows = read_steps(path)
            assert rows == []
            append_step(path, ROW)
            assert path.read_bytes() == whole
        append_step(path, {**ROW, "new_tokens": "2"})
        both = path.read_bytes()
        for cut in range(len(whole), len(both)):
            path.write_bytes(both[:cut])
            assert read_steps(path) == [ROW]
            append_step(path, {**ROW, "new_tokens": "2"})
            assert path.read_bytes() == both

    def test_other_columns(self, tmp_path):
        path = tmp_path / "steps.csv"
        path.write_text("a,b\n1,2\n")
        with pytest.raises(MeasureError, match="columns a, b"):
            read_steps(path)
        with pytest.raises(MeasureError, match="provider"):
            append_step(tmp_path / "new.csv", {k: v for k, v in ROW.items() if k != "provider"})

    def test_a_row_that_does_not_fit(self, tmp_path):
        path = tmp_path / "steps.csv"
        append_step(path, ROW)
        path.write_text(path.read_text().replace(",20,", ",twenty,"))
        with pytest.raises(MeasureError, match="line 2"):
            read_steps(path)


class TestGrid:
    def test_phases_and_no_repeats(self):
        points = default_steps()
        assert Counter(p.phase for p in points) == {"decode": 20, "prefill": 12, "mixed": 8, "unequal": 7}
        assert len({(p.new_tokens, p.context_len) for p in points}) == len(points)
        assert points == default_steps()

    @pytest.mark.parametrize(("name", "count"), [("llama-3.1-8b", 44), ("qwen2.5-7b", 46)])
    def test_what_an_h100_holds(self, name, count):
        model, card = DenseModel.of(load_model(name)), load_gpu("h100")
        held = [p for p in default_steps() if step_bytes(p, model) <= 0.97 * card.hbm_bytes]
        assert len(held) == count
        assert sum(expected_seconds(p, model) for p in held) < 90

    def test_memory_is_weights_and_kv(self):
        model = DenseModel.of(load_model("llama-3.1-8b"))
        one, two = (StepPoint("decode", (1,) * b, (4095,) * b) for b in (64, 65))
        assert step_bytes(two, model) - step_bytes(one, model) == pytest.approx(4096 * 131_072, rel=1e-3)
        assert step_bytes(one, model) > 2 * model.num_parameters + 64 * 4096 * 131_072

    def test_fp8_halves_the_layers_and_nothing_else(self):
        model = DenseModel.of(load_model("qwen3-14b-fp8"))
        point = StepPoint("decode", (1,) * 4, (4095,) * 4)
        saved = weight_bytes(model) - weight_bytes(model, "fp8")
        # of 14.8 billion parameters 1.56 are the embedding's and the LM head's
        assert saved == pytest.approx(13.2e9, rel=0.01)
        in_step = step_bytes(point, model) - step_bytes(point, model, weights="fp8")
        assert in_step == pytest.approx(saved, rel=1e-3)
        assert weight_bytes(model, "bf16", 4) == 4 * model.num_parameters
        for phase in (point, StepPoint("prefill", (8192,), (0,))):
            assert expected_seconds(phase, model, "fp8_block") < expected_seconds(phase, model)

    @pytest.mark.parametrize(("new", "context"), [((), ()), ((1,), ()), ((0,), (4,)), ((1,), (-1,))])
    def test_no_step(self, new, context):
        with pytest.raises(MeasureError):
            StepPoint("decode", new, context)

    def test_text_round_trip(self):
        for point in default_steps():
            assert StepPoint.parse(point.phase, point.new_text, point.context_text) == point


def torch_or_skip():
    return pytest.importorskip("torch", reason="a step needs torch: pip install torch")


def tiny(name="qwen2.5-7b", **changes):
    sizes = {
        "num_layers": 2,
        "hidden": 48,
        "intermediate": 80,
        "num_q_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    return replace(DenseModel.of(load_model(name)), **{**sizes, "vocab": 100, **changes})


@pytest.fixture(scope="module")
def backend():
    torch_or_skip()
    from kernels_bench.providers.attention import Heads
    from kernels_bench.steps.step_attention import choose_backend

    return choose_backend(["cpu"], Heads(6, 2, 16))


FP8_SIZES = {"hidden": 128, "intermediate": 256, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}
"""Widths of blocks: 256, 128, 128 and 256."""

POINTS = [
    StepPoint("decode", (1,) * 3, (30,) * 3),
    StepPoint("prefill", (9,), (0,)),
    StepPoint("prefill", (9,), (20,)),
    StepPoint("mixed", (1, 1, 7), (15, 16, 3)),
    StepPoint("unequal", (1, 1, 1), (0, 40, 15)),
    StepPoint("unequal", (4, 4, 9), (0, 0, 0)),
]


class TestStep:
    @pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.phase} {p.new_text} {p.context_text}")
    @pytest.mark.parametrize(
        "changes", [{}, {"qkv_bias": False}, {"o_bias": True, "mlp_bias": True}, {"qk_norm": True}]
    )
    def test_a_naive_step_gives_the_same(self, backend, point, changes):
        from kernels_bench.run.check import relative_error
        from kernels_bench.steps.step_model import StepModel

        step = StepModel(tiny(**changes), backend, 1).prepare(point, 2)
        assert np.isnan(step.result(0)).all()
        step.run(0)
        assert step.result(0).shape == (len(point.new_tokens), 100)
        assert relative_error(step.result(0), step.reference(0)) < 1e-5
        first = step.result(0)
        step.run(0)
        assert (step.result(0) == first).all()

    @pytest.mark.parametrize("weights", ["fp8", "fp8_block"])
    @pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "qkv_bias": False}, {"mlp_bias": True}])
    def test_a_naive_step_in_fp8_gives_the_same(self, backend, weights, changes):
        from kernels_bench.run.check import relative_error
        from kernels_bench.steps.step_linear import PlainFp8
        from kernels_bench.steps.step_model import StepModel

        model = tiny(**FP8_SIZES, **changes)
        step = StepModel(model, replace(backend, fp8=PlainFp8(weights)), 1).prepare(POINTS[3], 2)
        step.run(0)
        reference = step.reference(0)
        # an input that float32 rounds otherwise is now and then quantised to the next number
        assert relative_error(step.result(0), reference) < 2e-3
        first = step.result(0)
        step.run(0)
        assert (step.result(0) == first).all()
        # and it is another model than in bf16: the quantisation is there
        other = StepModel(model, backend, 1).prepare(POINTS[3], 2)
        other.run(0)
        assert 1e-2 < relative_error(other.result(0), reference) < 0.3

    @pytest.mark.parametrize(
        ("weights", "part"),
        [("bf16", "q_norm"), ("bf16", "k_norm"), ("fp8", "k_norm"), ("fp8", "scale"), ("fp8_block", "scale")],
    )
    def test_what_is_not_applied_shows(self, backend, weights, part):
        from kernels_bench.run.check import relative_error
        from kernels_bench.steps.measure import STEP_BOUNDS
        from kernels_bench.steps.step_linear import PlainFp8
        from kernels_bench.steps.step_model import StepModel

        fp8 = None if weights == "bf16" else PlainFp8(weights)
        step = StepModel(tiny(qk_norm=True, **FP8_SIZES), replace(backend, fp8=fp8), 1).prepare(POINTS[3], 2)
        reference = step.reference(0)
        for layer in step._model.weights.layers:
            if part == "scale":
                layer.o.scale.mul_(2.0)
            else:
                getattr(layer, part)[: layer.q_norm.shape[0] // 2] *= 3.0
        step.run(0)
        assert relative_error(step.result(0), reference) > STEP_BOUNDS["fp8"]

    def test_a_chunk_and_its_rest_are_the_whole_prompt(self, backend):
        """What was written to the cache is what a later step reads: no reference is involved."""
        torch = torch_or_skip()
        from kernels_bench.steps.step_model import StepModel

        model = StepModel(tiny(), backend, 1)
        whole = model.prepare(StepPoint("prefill", (20,), (0,)), 5)
        whole.run(0)
        head = model.prepare(StepPoint("prefill", (19,), (0,)), 5)
        head.tokens.copy_(whole.tokens[:19])
        head.run(0)
        rest = model.prepare(StepPoint("decode", (1,), (19,)), 5)
        rest.tokens.copy_(whole.tokens[19:])
        for mine, theirs in zip((*rest.k_pages, *rest.v_pages), (*head.k_pages, *head.v_pages), strict=True):
            mine.flatten(0, 1)[:19] = theirs.flatten(0, 1)[:19]
        rest.run(0)
        assert torch.allclose(rest.logits, whole.logits, atol=1e-4)

    def test_requests_do_not_see_each_other(self, backend):
        torch = torch_or_skip()
        from kernels_bench.steps.step_model import StepModel

        step = StepModel(tiny(), backend, 1).prepare(StepPoint("mixed", (1, 6), (12, 0)), 3)
        step.run(0)
        before = step.logits.clone()
        step.k_pages[0][int(step.batch.pages_of(0)[0]), 3] += 1.0
        step.run(0)
        assert not torch.allclose(step.logits[0], before[0])
        assert torch.equal(step.logits[1], before[1])

    def test_models_with_parts_it_lacks(self, backend):
        from kernels_bench.steps.step_linear import PlainFp8
        from kernels_bench.steps.step_model import StepModel

        for weights, message in (
            ("fp8", r"needs widths in multiples of 16, not MLP 90$"),
            ("fp8_block", r"multiples of 128, not hidden 48, QKV 160, attention output 96, MLP 90$"),
            ("nvfp4", r"no weights in nvfp4; valid are bf16, fp8, fp8_block$"),
        ):
            with pytest.raises(MeasureError, match=message):
                StepModel(tiny(intermediate=90), replace(backend, fp8=PlainFp8(weights)), 0)
        with pytest.raises(MeasureError, match="sliding window"):
            StepModel(tiny(sliding_window=16), backend, 0).prepare(POINTS[0], 0)

    @pytest.mark.slow
    def test_the_check_fails_on_a_wrong_kernel(self, backend):
        from kernels_bench.providers.small_ops import TorchSmallOps
        from kernels_bench.steps.measure import check_step

        class Wrong(TorchSmallOps):
            def rope(self, positions, q, k, head_dim, cos_sin):
                super().rope(positions // 2, q, k, head_dim, cos_sin)

        assert check_step(DenseModel.of(load_model("llama-3.1-8b")), backend, 0) < 1e-5
        with pytest.raises(MeasureError, match="off its float64 reference"):
            check_step(DenseModel.of(load_model("llama-3.1-8b")), replace(backend, ops=Wrong()), 0)

    @pytest.mark.slow
    def test_the_check_in_fp8_holds_other_kernels_to_their_own_bound(self, backend):
        """Queries and keys are near unit length without a norm too: 4 % of the logits, fp8's noise."""
        from kernels_bench.providers.small_ops import TorchSmallOps
        from kernels_bench.steps.measure import check_step
        from kernels_bench.steps.step_linear import PlainFp8

        class NoNormOfHeads(TorchSmallOps):
            def rmsnorm(self, out, x, weight):
                if x.ndim == 3:
                    out.copy_(x * weight)
                else:
                    super().rmsnorm(out, x, weight)

        model = replace(DenseModel.of(load_model("qwen3-8b")), head_dim=32)
        for weights in ("fp8", "fp8_block"):
            right = replace(backend, fp8=PlainFp8(weights))
            # a processor whose sums round otherwise quantises some inputs to e4m3's next number: up to 1.4e-2
            assert check_step(model, right, 0) < 2.6e-2
            with pytest.raises(MeasureError, match="off its float64 reference"):
                check_step(model, replace(right, ops=NoNormOfHeads()), 0)

    def test_a_kernel_that_raises_in_the_check_is_one_line(self, backend):
        from kernels_bench.providers.small_ops import TorchSmallOps
        from kernels_bench.steps.measure import check_step

        class Missing(TorchSmallOps):
            def rope(self, *_):
                raise RuntimeError("no kernel image is available\nmore advice")

        with pytest.raises(MeasureError, match=r"a CPU fails: no kernel image is available$"):
            check_step(DenseModel.of(load_model("qwen3-8b")), replace(backend, ops=Missing()), 0)


class FakeTimer:
    """Times each step as 100 us per token; fails where it is told to."""

    def __init__(self, fails=()):
        self.fails, self.timed = dict(fails), []

    def time(self, step):
        step.run(0)
        count = step.batch.num_tokens
        if count in self.fails:
            raise self.fails[count]
        self.timed.append(count)
        return Timing(100.0 * count, 99.0 * count, 101.0 * count, 98.0 * count, 20)


class Quiet:
    def read(self):
        return DeviceState()

    def facts(self):
        return {}


class Ticks:
    def __init__(self, step_s=0.0):
        self.now, self.step_s = 0.0, step_s

    def seconds(self):
        self.now += self.step_s
        return self.now


def run(folder, backend, timer=None, clock=None, **options):
    from kernels_bench.steps.measure import StepOptions, measure_steps

    options = StepOptions(**{"gpu": "cpu", **options})
    return measure_steps(
        tiny(), POINTS, backend, timer or FakeTimer(), Quiet(), clock or Ticks(), folder, options
    )


class TestMeasuring:
    def test_every_step_once_and_then_none(self, tmp_path, backend):
        assert run(tmp_path, backend).measured == len(POINTS)
        again = FakeTimer()
        report = run(tmp_path, backend, again)
        assert (report.measured, report.present, again.timed) == (0, len(POINTS), [])
        rows = read_steps(tmp_path / "steps.csv")
        assert len({step_key(row) for row in rows}) == len(POINTS)
        for row in rows:
            point = StepPoint.parse(row["phase"], row["new_tokens"], row["context_len"])
            assert point in POINTS
            assert row["latency_us"] == 100.0 * point.num_tokens == 100.0 * row["num_tokens"]
            assert row["num_requests"] == len(point.new_tokens)

    @pytest.mark.parametrize("kept", range(len(POINTS)))
    def test_resumes_after_a_kill_at_any_step(self, tmp_path, backend, kept):
        class Killed(BaseException):
            pass

        class Killer(FakeTimer):
            def time(self, step):
                if len(self.timed) == kept:
                    raise Killed
                return super().time(step)

        with pytest.raises(Killed):
            run(tmp_path, backend, Killer())
        assert len(read_steps(tmp_path / "steps.csv")) == kept
        report = run(tmp_path, backend)
        assert (report.present, report.measured) == (kept, len(POINTS) - kept)
        assert len({step_key(row) for row in read_steps(tmp_path / "steps.csv")}) == len(POINTS)

    @pytest.mark.slow
    def test_order_is_that_of_the_seed(self, tmp_path, backend):
        timers = [FakeTimer() for _ in range(3)]
        for number, (timer, seed) in enumerate(zip(timers, (0, 0, 1), strict=True)):
            run(tmp_path / str(number), backend, timer, seed=seed)
        assert timers[0].timed == timers[1].timed != timers[2].timed

    def test_deadline(self, tmp_path, backend):
        report = run(tmp_path, backend, clock=Ticks(1.0), deadline_s=4.0)
        assert 0 < report.measured < len(POINTS)
        assert "deadline" in report.stopped
        assert run(tmp_path, backend).present == report.measured

    @pytest.mark.parametrize("late", range(len(POINTS)))
    def test_a_step_too_long_for_the_deadline_leaves_the_shorter_ones(
        self, tmp_path, backend, monkeypatch, late
    ):
        from kernels_bench.steps import measure

        seconds = dict.fromkeys(POINTS, 0.1) | {POINTS[late]: 100.0}
        monkeypatch.setattr(measure, "expected_seconds", lambda point, *_: seconds[point])
        report = run(tmp_path, backend, deadline_s=50.0)
        assert report.measured == len(POINTS) - 1
        assert report.stopped == f"deadline: 1 of {len(POINTS)} steps are left"
        done = {
            StepPoint.parse(r["phase"], r["new_tokens"], r["context_len"])
            for r in read_steps(tmp_path / "steps.csv")
        }
        assert done == {*POINTS} - {POINTS[late]}

    def test_memory_errors_and_others_are_skipped(self, tmp_path, backend):
        fails = {3: MemoryError("too much"), 9: RuntimeError("no kernel")}
        report = run(tmp_path, backend, FakeTimer(fails))
        assert Counter(skip.kind for skip in report.skips) == {"oom": 2, "error": 3}
        assert report.measured == len(POINTS) - 5
        assert "too much" in {skip.reason.removeprefix("MemoryError: ") for skip in report.skips}

    def test_a_lost_device_ends_the_run(self, tmp_path, backend):
        timer = FakeTimer({9: RuntimeError("CUDA error: an illegal memory access was encountered")})
        report = run(tmp_path, backend, timer)
        assert "device" in report.stopped
        assert len(report.skips) == 1

    def test_what_cannot_fit_is_not_tried(self, tmp_path, backend):
        report = run(tmp_path, backend, usable_bytes=1000)
        assert [skip.kind for skip in report.skips] == ["oom"] * len(POINTS)
        assert not (tmp_path / "steps.csv").exists()

    def test_another_gpus_folder(self, tmp_path, backend):
        append_step(tmp_path / "steps.csv", ROW)
        with pytest.raises(MeasureError, match="steps of h100, this GPU is cpu"):
            run(tmp_path, backend)

    def test_logits_that_are_not_written_make_no_row(self, tmp_path, backend):
        class Idle(FakeTimer):
            def time(self, step):
                return Timing(1.0, 1.0, 1.0, 1.0, 20)

        report = run(tmp_path, backend, Idle())
        assert report.measured == 0
        assert all("not finite" in skip.reason for skip in report.skips)


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


class TestCommand:
    def test_grid_needs_neither_torch_nor_a_gpu(self, capsys):
        with pytest.raises(SystemExit) as done:
            main(["steps", "--model", "llama-3.1-8b", "--grid"])
        assert not done.value.code
        assert "44 steps fit" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["qwen3-14b"], "qwen3-14b in bf16"),
            (["qwen3-14b-fp8"], "qwen3-14b-fp8 in fp8_block"),
            (["llama-3.1-8b-fp8"], "llama-3.1-8b-fp8 in fp8,"),
            (["qwen3-8b", "--dtype", "fp8"], "qwen3-8b in fp8,"),
        ],
    )
    def test_the_format_is_the_models_or_the_one_that_is_given(self, arguments, words, capsys):
        with pytest.raises(SystemExit) as done:
            main(["steps", "--grid", "--model", *arguments])
        assert not done.value.code
        assert words in capsys.readouterr().out

    @pytest.mark.slow
    def test_qwen3_in_fp8_end_to_end_on_a_cpu(self, tmp_path):
        torch_or_skip()
        config = tmp_path / "tiny.json"
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
        qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes}
        config.write_text(json.dumps({**TINY_CONFIG, **qwen3}))
        out = tmp_path / "out"
        for given in ("fp8_block", "bf16"):
            arguments = ["--model", str(config), "-o", str(out), "--providers", "cpu", "--dtype", given]
            with pytest.raises(SystemExit) as done:
                main(["steps", *arguments])
            assert not done.value.code
        dtypes = Counter((row["dtype"], row["kv_dtype"]) for row in read_steps(out / "steps.csv"))
        assert dtypes == {("fp8_block", "fp32"): 4, ("fp32", "fp32"): 4}
        runs = tomllib.loads((out / "steps.toml").read_text())["runs"]
        assert [run["dtype"] for run in runs.values()] == ["fp8_block", "fp32"]

    @pytest.mark.slow
    def test_end_to_end_on_a_cpu(self, tmp_path, capsys):
        torch_or_skip()
        config = tmp_path / "tiny.json"
        config.write_text(json.dumps(TINY_CONFIG))
        out = tmp_path / "out"
        for expected in ("4 steps measured, 0 were there", "0 steps measured, 4 were there"):
            with pytest.raises(SystemExit) as done:
                main(["steps", "--model", str(config), "-o", str(out), "--providers", "cpu"])
            assert not done.value.code
            assert expected in capsys.readouterr().out
        rows = read_steps(out / "steps.csv")
        assert {row["phase"] for row in rows} == {"decode", "prefill", "mixed", "unequal"}
        assert all(0 < row["min_us"] <= row["latency_us"] for row in rows)
        written = tomllib.loads((out / "steps.toml").read_text())
        assert written["gpu"] == "cpu"
        assert list(written["runs"]) == ["run_1"]
        first = written["runs"]["run_1"]
        assert first["measured"] == 4
        assert first["check_relative_error"] < 1e-5
        assert first["versions"]["torch"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--model", "llama-3.1-8b"], "give -o FOLDER"),
            (["--model", "gpt-5", "--grid"], "unknown model"),
            (
                ["--model", "qwen3-8b", "-o", "x", "--dtype", "int8"],
                "no weights in int8; valid are bf16, fp8",
            ),
            (["--model", "qwen3-8b", "--dtype", "nvfp4", "--grid"], "no weights in nvfp4"),
            (["--model", "llama-3.1-8b", "-o", "x", "--providers", "trt"], "unknown provider trt"),
            (["--model", "llama-3.1-8b", "-o", "x", "--providers", "cpu,vllm"], "cpu alone"),
            (["--model", "llama-3.1-8b", "-o", "x", "--deadline", "0"], "above zero"),
            (["--model", "llama-3.1-8b", "--gpu", "h1000", "--grid"], "h1000"),
        ],
    )
    def test_bad_input_is_one_line(self, arguments, message, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as done:
            main(["steps", *arguments])
        assert done.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("kernels-bench: error: ")
        assert message in error
        assert error.count("\n") == 1
        assert not list(tmp_path.iterdir())

    def test_large_models_on_a_cpu(self, capsys, tmp_path):
        torch_or_skip()
        with pytest.raises(SystemExit):
            main(["steps", "--model", "llama-3.1-8b", "-o", str(tmp_path / "x"), "--providers", "cpu"])
        assert "too large for a CPU" in capsys.readouterr().err
