"""A model's steps on the roofline: what the points are, what is refused, and the picture of the README."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.errors import FastroofError
from fastroof.report.model_roofline_plot import draw_model_roofline, model_steps
from tests.command_line import refused

mpl = pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install fastroof[report]")

CHECKOUT = Path(__file__).resolve().parents[2]
PICTURE = CHECKOUT / "fastroof/report/roofline.svg"
README = (CHECKOUT / "fastroof/report/README.md").read_text()
COMMAND = re.search(r"^\$ fastroof (plot roofline --model .*) -o roofline.svg$", README, re.M)[1].split()
BATCHES = (1, 4, 16, 64, 256)


@pytest.fixture(scope="module")
def plans(h100: fastroof.Tables) -> list[fastroof.StepPlan]:
    return [
        fastroof.compile_plan(
            "llama-3.1-70b", "h100", h100, tp=tp, dtype="fp8", max_num_seqs=512, engine="kernels"
        )
        for tp in (1, 4)
    ]


@pytest.mark.slow
def test_steps_are_the_plans_own(plans: list[fastroof.StepPlan]) -> None:
    for plan in plans:
        *decodes, prefill = model_steps(plan, BATCHES, 4096, 8192)
        times = [step.total_us for step in decodes]
        assert times == plan.decode_us(np.array(BATCHES), np.full(len(BATCHES), 4096)).tolist()
        assert prefill.total_us == plan.step_scalar([8192], [0])
        for step in (*decodes, prefill):
            # no step does more than the peak, and little more than its memory allows: L2 serves the rest
            assert step.flops_per_s < plan.gpu.peak("fp8")
            assert step.flops_per_s < 1.05 * step.intensity * plan.gpu.hbm_bytes_per_s
        # weights are read once: a batch of 4 does four times the work of one on hardly more bytes
        assert decodes[1].flops == pytest.approx(4 * decodes[0].flops, rel=0.01)
        assert decodes[1].moved_bytes < 1.2 * decodes[0].moved_bytes
    assert [s.has_room for s in model_steps(plans[1], BATCHES, 4096, 8192)][:3] == [True] * 3
    fits = [plan.memory.max_sequences(4096) for plan in plans]
    for plan, fit in zip(plans, fits, strict=True):
        rooms = [step.has_room for step in model_steps(plan, BATCHES, 4096, 8192)[:-1]]
        assert rooms == [batch <= fit for batch in BATCHES]
    assert fits[0] < 256 <= max(BATCHES)


def test_picture_shows_the_steps(plans: list[fastroof.StepPlan]) -> None:
    figure = draw_model_roofline(plans, batch_sizes=BATCHES, source="somewhere")
    (axes,) = figure.axes
    labels = ["tp 1: one GPU", "tp 4: one of 4 GPUs"]
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    for label, plan in zip(labels, plans, strict=True):
        decodes = model_steps(plan, BATCHES, 4096, 8192)[:-1]
        assert lines[label].tolist() == [[s.intensity, s.flops_per_s / 1e12] for s in decodes]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    words = "\n".join(text.get_text() for text in (*figure.texts, *axes.texts))
    for word in ("llama-3.1-70b in fp8 on NVIDIA H100 SXM", "decodes at kv_len 4,096", "hollow: KV cache",
                 "fp8 1,979 TFLOP/s", "bf16 989.5 TFLOP/s", "HBM 3.35 TB/s", "batch 1", "256", "prefill",
                 "somewhere"):  # fmt: skip
        assert word in words
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in (*figure.texts, *axes.texts)]
    boxes.append(figure.legends[0].get_window_extent())
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    # a line on a slope has an upright box that is larger than it is
    upright = [
        box for box, text in zip(boxes, (*figure.texts, *axes.texts), strict=False) if not text.get_rotation()
    ]
    for a, b in itertools.combinations(upright, 2):
        assert not a.overlaps(b)


def test_batches_are_labelled_where_no_line_is(plans: list[fastroof.StepPlan]) -> None:
    figure = draw_model_roofline(plans, batch_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    (axes,) = figure.axes
    figure.draw_without_rendering()
    # with the radius of a marker around each
    boxes = [text.get_window_extent().padded(4) for text in axes.texts if not text.get_rotation()]
    assert len(boxes) == 13
    for line in axes.lines:
        places = axes.transData.transform(line.get_xydata())
        steps = np.linspace(places[:-1], places[1:], 50).reshape(-1, 2) if len(places) > 1 else places
        for box in boxes:
            assert not box.count_contains(steps), line.get_label()


def test_impossible_plots_are_refused(plans: list[fastroof.StepPlan], h100: fastroof.Tables) -> None:
    with pytest.raises(FastroofError, match="1 to 6 plans, got 0"):
        draw_model_roofline([])
    with pytest.raises(FastroofError, match="1 to 6 plans, got 8"):
        draw_model_roofline(plans * 4)
    other = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    with pytest.raises(FastroofError, match="plans of one model"):
        draw_model_roofline([plans[0], other])
    with pytest.raises(FastroofError, match="kv_len >= 2"):
        draw_model_roofline(plans, kv_len=1)
    with pytest.raises(FastroofError):
        draw_model_roofline(plans, prompt=10**6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "2"), "--tp needs --model"),
        (("--tp", "2", "--batch", "4"), "--tp, --batch need --model"),
        (("--model", "llama-3.1-8b", "--dtype", "bf16", "--dtype", "fp8"), "takes one --dtype"),
        (("--model", "llama-3.1-8b", "--tp", "1,x"), "--tp needs a whole number or a list"),
        (("--model", "llama-3.1-8b", "--tp", "0"), "--tp needs 1 to 6 sizes of at least 1"),
        (("--model", "llama-3.1-8b", "--batch", ",".join(map(str, range(1, 20)))), "--batch needs 1 to 12"),
        (("--model", "llama-3.1-8b", "--kv-len", "1"), "kv_len >= 2"),
    ],
)
def test_command_refuses(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    file = tmp_path / "a.svg"
    done = refused("plot", "roofline", "-o", str(file), *arguments)
    assert message in done
    assert done.count("\n") == 1
    assert not file.exists()


@pytest.mark.slow
def test_the_readmes_picture_is_what_its_command_makes(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    done = CliRunner().invoke(app, [*COMMAND, "-o", str(file)])
    assert (done.exit_code, done.stderr) == (0, "")
    kept, made = PICTURE.read_text(), file.read_text()
    assert "dc:date" not in kept
    assert len(kept) < 150_000
    # on a dark page the picture brings its own ground
    assert 'style="fill: #ffffff"' in kept
    version = re.search(r"Matplotlib v[\d.]+", kept)[0]
    if version != f"Matplotlib v{mpl.__version__}":
        pytest.skip(f"the picture was drawn by {version}: another one draws the same in other paths")
    shape, numbers = _parts(kept)
    made_shape, made_numbers = _parts(made)
    assert made_shape == shape
    # last bits of times differ between processors
    assert np.allclose(made_numbers, numbers, rtol=0.0, atol=0.01)


def _parts(svg: str) -> tuple[str, Any]:
    """A picture without its numbers and the ids made of them, and the numbers."""
    plain = re.sub(r"\b[mp][0-9a-f]{10}\b", "id", svg)
    number = r"-?\d+\.?\d*(?:e-?\d+)?"
    return re.sub(number, "#", plain), np.array([float(found) for found in re.findall(number, plain)])
