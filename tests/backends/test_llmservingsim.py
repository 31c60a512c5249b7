"""The profile for LLMServingSim: what its reader sums from the files, against the plan's own steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

import fastroof
from fastroof.backends.llmservingsim import LAYERS, export_llmservingsim, left_out
from fastroof.errors import BackendError
from tests.backends.interfaces import recorded
from tests.backends.llmservingsim_reader import COLUMNS, HEAD, POST_ATTENTION, PRE_ATTENTION, PROLOGUE, Bundle
from tests.command_line import good, refused
from tests.examples import llmservingsim as llmservingsim_example

Step = list[tuple[int, int]]

PLANS = {
    "llama-3.1-8b": {},
    "qwen3-8b": {"engine": "vllm", "max_num_batched_tokens": 2048, "max_num_seqs": 256},
    "llama-3.1-70b": {"tp": 4, "dtype": "fp8", "kv_dtype": "fp8", "engine": "vllm"},
}


@pytest.fixture(
    scope="module",
    params=[
        # of dense models on one GPU, one in CI
        pytest.param(model, marks=[pytest.mark.release] if model == "qwen3-8b" else [])
        for model in PLANS
    ],
)
def exported(
    request: pytest.FixtureRequest, h100: fastroof.Tables, tmp_path_factory: pytest.TempPathFactory
) -> tuple[fastroof.StepPlan, Path]:
    plan = fastroof.compile_plan(request.param, "h100", h100, **{"engine": "kernels", **PLANS[request.param]})
    return plan, export_llmservingsim(plan, tmp_path_factory.mktemp("perf")).folder


def size(rng: np.random.Generator, least: int, most: int) -> int:
    """A size that is small as often as large."""
    return int(np.exp(rng.uniform(np.log(least), np.log(most + 1))))


def steps(plan: fastroof.StepPlan, kind: str, count: int = 100) -> list[Step]:
    rng = np.random.default_rng(8)
    longest, tokens, seqs = 32_768, plan.max_num_batched_tokens, plan.max_num_seqs

    def decodes(most: int) -> Step:
        return [(1, size(rng, 1, longest)) for _ in range(size(rng, 1, most))]

    def prompts(most: int, context: int) -> Step:
        several = size(rng, 2, 16)
        return [(size(rng, 2, most // several), size(rng, 1, context) - 1) for _ in range(several)]

    kinds: dict[str, Callable[[], Step]] = {
        "equal decodes": lambda: [(1, size(rng, 1, longest))] * size(rng, 1, seqs),
        "decodes": lambda: decodes(seqs),
        "prompt": lambda: [(size(rng, 2, tokens), 0)],
        "chunk": lambda: [(size(rng, 2, tokens), size(rng, 1, longest))],
        "prompts": lambda: prompts(tokens, 1),
        "chunks": lambda: prompts(tokens, longest // 2),
        "mixed": lambda: [*decodes(seqs // 2), (size(rng, 2, tokens // 2), size(rng, 1, longest) - 1)],
    }
    return [kinds[kind]() for _ in range(count)]


def own_us(plan: fastroof.StepPlan, step: Step) -> float:
    """The plan's step without its all-reduces, which are the simulator's network's."""
    explained = plan.explain(step)
    return explained.total_us - sum(o.total_us for o in explained.operators if "all-reduce" in o.name)


def errors(
    plan: fastroof.StepPlan, folder: Path, some: Sequence[Step], *, is_released: bool = False
) -> np.ndarray:
    bundle = Bundle(folder, plan.tp, is_released=is_released)
    return np.array(
        [bundle.step_ns(step, plan.model.num_layers) / 1e3 / own_us(plan, step) - 1 for step in some]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mean", "most"),
    [
        # rows are at the nodes that the plan is linear between: what is left is whole nanoseconds
        ("equal decodes", 5e-5, 1e-4),
        # the mean context is cut to a whole token
        ("decodes", 2e-4, 1e-3),
        # a plan's prefill attention bends between rows
        ("prompt", 5e-4, 3e-3),
        ("chunk", 5e-4, 2e-3),
        ("prompts", 2e-3, 5e-3),
        ("mixed", 5e-4, 2e-3),
        # one number, the key, stands for the lengths and the contexts of all prompts: steps that the plan
        # distinguishes are one to the simulator
        ("chunks", 0.06, 0.25),
    ],
)
def test_steps_add_up(exported: tuple[fastroof.StepPlan, Path], kind: str, mean: float, most: float) -> None:
    plan, folder = exported
    found = np.abs(errors(plan, folder, steps(plan, kind)))
    assert found.mean() < mean
    assert found.max() < most


@pytest.mark.slow
def test_measured_decodes_are_whole_nanoseconds(exported: tuple[fastroof.StepPlan, Path]) -> None:
    plan, folder = exported
    bundle = Bundle(folder, plan.tp)
    layers = plan.model.num_layers
    for batch, kv_len in ((1, 1024), (64, 4096), (256, 16384)):
        step = [(1, kv_len - 1)] * batch
        # half a nanosecond of rounding and one of cutting, in each of at most 12 calls a layer and 4 besides
        assert abs(bundle.step_ns(step, layers) - own_us(plan, step) * 1e3) < 1.5 * (12 * layers + 4)


@pytest.mark.slow
def test_the_layers_are_those_of_the_catalogues(exported: tuple[fastroof.StepPlan, Path]) -> None:
    plan, folder = exported
    bundle = Bundle(folder, plan.tp)
    expected = {*PROLOGUE, *HEAD, *PRE_ATTENTION, *POST_ATTENTION} - {"attention"}
    assert bundle.curves.keys() == (
        expected if plan.model.only_kind.attention.qk_norm else expected - {"qk_norm"}
    )
    own = {name for operators in LAYERS.values() for name in operators}
    others = {"mlp_norm", "kv_write", "attention_allreduce", "mlp_allreduce"}
    assert {curve.operator.role for curve in plan.row_curves} <= own | others


@pytest.mark.slow
def test_times_are_whole_nanoseconds_and_rows_are_unique(exported: tuple[fastroof.StepPlan, Path]) -> None:
    plan, folder = exported
    for name in COLUMNS:
        rows = (folder / f"tp{plan.tp}" / name).read_text().splitlines()[1:]
        assert all(re.fullmatch(r"[0-9]+\.[0-9]{3}", row.rpartition(",")[2]) for row in rows)
        keys = [row.rpartition(",")[0] for row in rows]
        assert len(set(keys)) == len(keys)
    # every pair of prompt tokens and decodes has rows, so that no step takes those of another
    bundle = Bundle(folder, plan.tp)
    pairs = {(chunk, count) for chunk in bundle.chunks for count in bundle.counts} - {(0, 0)}
    assert bundle.slices.keys() == pairs


def test_the_two_norms_of_a_layer_are_one(exported: tuple[fastroof.StepPlan, Path]) -> None:
    curves = {curve.operator.role: curve for curve in exported[0].row_curves}
    first, second = curves["attention_norm"], curves["mlp_norm"]
    assert first.operator.times == second.operator.times
    assert np.array_equal(first.value, second.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mean"), [("prompt", 2e-3), ("prompts", 5e-3), ("mixed", 0.03)])
def test_a_floor_is_part_of_attention(h100: fastroof.Tables, tmp_path: Path, kind: str, mean: float) -> None:
    """What a step lacks to its floor jumps with its GEMMs: near enough between the rows."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="trtllm")
    folder = export_llmservingsim(plan, tmp_path).folder
    assert np.abs(errors(plan, folder, steps(plan, kind))).mean() < mean


def test_a_bundle_of_several_sizes(h100: fastroof.Tables, tmp_path: Path) -> None:
    plans = [
        fastroof.compile_plan(
            "llama-3.1-8b", "h100", h100, tp=tp, max_num_batched_tokens=512, max_num_seqs=64, engine="kernels"
        )
        for tp in (2, 1)
    ]
    bundle = export_llmservingsim(plans, tmp_path / "perf", hardware="H100-SXM")
    assert bundle.folder == tmp_path / "perf" / "H100-SXM" / "meta-llama" / "Llama-3.1-8B" / "bf16"
    meta = yaml.safe_load((bundle.folder / "meta.yaml").read_text())
    assert meta["tp_degrees"] == [1, 2]
    assert meta["engine_effective"] == {"max_num_batched_tokens": 512, "max_num_seqs": 64}
    assert (meta["hardware"], meta["model"], meta["variant"]) == (
        "H100-SXM",
        "meta-llama/Llama-3.1-8B",
        "bf16",
    )
    assert meta["skew_fit"] == {"enabled": True, "alpha_default": 0.0}
    for plan in plans:
        assert np.abs(errors(plan, bundle.folder, [[(1, 1023)] * 64, [(512, 0)]])).max() < 1e-3
    assert bundle.rows == sum(len(p.read_text().splitlines()) - 1 for p in bundle.folder.glob("tp*/*.csv"))
    assert not left_out(plans[1])
    assert "all-reduces" in " ".join(left_out(plans[0]))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "variant"),
    [("fp8", "bf16", "fp8"), ("fp8", "fp8", "fp8-kvfp8"), ("bf16", "fp8", "bf16-kvfp8")],
)
def test_variants_are_named_as_checkpoints(
    h100: fastroof.Tables, tmp_path: Path, dtype: str, kv_dtype: str, variant: str
) -> None:
    plan = fastroof.compile_plan(
        "llama-3.1-8b",
        "h100",
        h100,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_num_batched_tokens=4,
        max_num_seqs=2,
        engine="kernels",
    )
    assert export_llmservingsim(plan, tmp_path).folder.name == variant
    assert export_llmservingsim(plan, tmp_path, variant="mine").folder.name == "mine"


@pytest.mark.parametrize(("tokens", "seqs"), [(1, 1), (2, 1), (3, 8), (64, 1024)])
def test_small_plans(h100: fastroof.Tables, tmp_path: Path, tokens: int, seqs: int) -> None:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=tokens, max_num_seqs=seqs, engine="kernels"
    )
    folder = export_llmservingsim(plan, tmp_path).folder
    some: list[Step] = [[(1, 100)]]
    if tokens > 1:
        some.append([(tokens, 0)])
    assert np.abs(errors(plan, folder, some)).max() < 1e-3


def test_a_gpu_without_tables(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="datasheet"):
        plan = fastroof.compile_plan(
            "llama-3.1-8b", "h20", None, max_num_batched_tokens=256, max_num_seqs=32, engine="kernels"
        )
    folder = export_llmservingsim(plan, tmp_path).folder
    assert np.abs(errors(plan, folder, steps(plan, "decodes", 20))).max() < 5e-3


def test_wrong_plans_and_places_are_refused(h100: fastroof.Tables, tmp_path: Path) -> None:
    one, other = (
        fastroof.compile_plan(
            "llama-3.1-8b", "h100", h100, max_num_batched_tokens=tokens, max_num_seqs=2, engine="kernels"
        )
        for tokens in (4, 8)
    )
    with pytest.raises(BackendError, match="needs a plan"):
        export_llmservingsim([], tmp_path)
    with pytest.raises(BackendError, match="may differ only in tp"):
        export_llmservingsim([one, other], tmp_path)
    with pytest.raises(BackendError, match="one plan a tp"):
        export_llmservingsim([one, one], tmp_path)
    for name in ("..", "", "a//b"):
        with pytest.raises(BackendError, match="becomes a folder"):
            export_llmservingsim(one, tmp_path, hardware=name)
    assert not list(tmp_path.iterdir())


def test_a_bundle_is_written_atomically(
    h100: fastroof.Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=4, max_num_seqs=2, engine="kernels"
    )
    folder = export_llmservingsim(plan, tmp_path).folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BackendError, match="exists: remove it"):
        export_llmservingsim(plan, tmp_path)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    write = Path.write_text

    def full(self: Path, *arguments: object) -> int:
        if self.name == "attention.csv":
            raise OSError(28, "No space left on device")
        return write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BackendError, match="No space left on device"):
        export_llmservingsim(plan, tmp_path, hardware="other")
    assert [path.name for path in tmp_path.iterdir()] == ["H100"]
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BackendError, match="cannot be written"):
        export_llmservingsim(plan, file)


@pytest.mark.slow
def test_the_command_writes_a_bundle(tmp_path: Path) -> None:
    texts = [f"llama-3.1-8b,tp={tp},max_num_batched_tokens=64,max_num_seqs=8" for tp in (1, 2)]
    done = good("export", "llmservingsim", *texts, "-o", str(tmp_path), "--hardware", "mine")
    folder = tmp_path / "mine" / "meta-llama" / "Llama-3.1-8B" / "bf16"
    assert sorted(path.name for path in folder.iterdir()) == ["meta.yaml", "tp1", "tp2"]
    first, second = done.splitlines()
    assert first.startswith(f"wrote {folder}: ")
    assert second == "left out: all-reduces: the simulator times them by its network model"
    again = refused("export", "llmservingsim", *texts, "-o", str(tmp_path), "--hardware", "mine")
    assert "exists" in again


def test_the_example_sums_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    llmservingsim_example.main()
    out = capsys.readouterr().out
    assert "layer,prefill_chunk,prefill_key,kv_prefill,n_decode,kv_decode,decode_q_len,time_us" in out
    files_us, plan_us = map(float, re.findall(r"([0-9.]+) us", out))
    assert files_us == pytest.approx(plan_us, rel=1e-5)


# Release 1.1.0


@pytest.fixture(scope="module")
def released(
    h100: fastroof.Tables, tmp_path_factory: pytest.TempPathFactory
) -> tuple[fastroof.StepPlan, Path]:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, engine="vllm", max_num_batched_tokens=2048, max_num_seqs=256
    )
    return plan, export_llmservingsim(plan, tmp_path_factory.mktemp("perf"), release="1.1").folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mean", "most"),
    [
        # what is linear comes out too slow: up to 0.7 % on the axes of decodes, 1.5 % on that of contexts
        ("equal decodes", 3e-3, 1.5e-2),
        ("decodes", 5e-3, 1.5e-2),
        ("prompt", 1e-3, 5e-3),
        ("chunk", 2e-3, 1.5e-2),
        ("mixed", 5e-3, 1.5e-2),
        # several prompts are one of all their tokens, which attends to more
        ("prompts", 0.03, 0.15),
        # .. after all their contexts
        ("chunks", 2.0, 10.0),
    ],
)
def test_steps_add_up_in_release_1_1(
    released: tuple[fastroof.StepPlan, Path], kind: str, mean: float, most: float
) -> None:
    plan, folder = released
    found = errors(plan, folder, steps(plan, kind), is_released=True)
    assert np.abs(found).mean() < mean
    assert np.abs(found).max() < most
    if kind in ("prompts", "chunks"):
        assert found.min() > -5e-3, "as one prompt they never attend to less"


def test_an_unknown_release_is_refused(released: tuple[fastroof.StepPlan, Path], tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"1.1, unreleased, got '2'"):
        export_llmservingsim(released[0], tmp_path / "perf", release="2")
    assert not (tmp_path / "perf").exists()


def test_the_stand_in_reads_the_recorded_columns() -> None:
    [interface] = [one for one in recorded("llmservingsim") if one.path == "serving/core/trace_generator.py"]
    ours = {f"{name}: {column}" for name, columns in COLUMNS.items() for column in columns}
    assert ours == {*interface.signatures, "attention.csv: kv_prefill"}  # which earlier source reads
