"""Plots: their content, their file formats, and that they are the same each time."""

from __future__ import annotations

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.errors import FastroofError
from fastroof.operators.elementwise import ELEMENTWISE
from fastroof.report import draw_roofline, draw_step, save_figure
from fastroof.report.plots import _spread
from fastroof.report.rooflines import kernel_clouds
from fastroof.report.step_plot import step_stack
from tests.command_line import refused

mpl = pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install fastroof[report]")

CHECKOUT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_num_seqs=512, engine="kernels")


def texts(figure: Any) -> str:
    """Every word on a figure."""
    found = [t.get_text() for t in figure.texts]
    for axes in figure.axes:
        found += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")]
        found += [t.get_text() for t in axes.texts]
        found += [t.get_text() for t in (axes.get_legend().get_texts() if axes.get_legend() else ())]
    return "\n".join(found)


# -- roofline ------------------------------------------------------------------------------------


def test_roofline_shows_roofs_and_kernels(h100: fastroof.Tables) -> None:
    figure = draw_roofline(h100.gpu, h100)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "FLOP per compulsory byte" in axes.get_xlabel()
    assert "TFLOP/s" in axes.get_ylabel()
    words = texts(figure)
    for word in (
        "NVIDIA H100 SXM", "989.5 TFLOP/s", "3.35 TB/s", "2.95 TB/s", "aiconfigurator-vllm-0.25.0", "GEMM",
        "prefill attention", "decode attention",
    ):  # fmt: skip
        assert word in words
    assert "1,979" not in words
    slope, peak, streaming = (line.get_xydata() for line in axes.lines if len(line.get_xdata()))
    assert np.allclose(slope[:, 1] / slope[:, 0], 3.35)
    assert np.allclose(streaming[:, 1] / streaming[:, 0], ELEMENTWISE.streaming(h100).bytes_per_s / 1e12)
    assert np.allclose(peak[:, 1], 989.5)
    assert np.allclose(slope[-1], peak[0])


def test_every_kernel_is_inside_the_picture(h100: fastroof.Tables) -> None:
    figure = draw_roofline(h100.gpu, h100, dtypes=("bf16", "fp8"))
    (axes,) = figure.axes
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    shown = 0
    for cloud in kernel_clouds(h100, ("bf16", "fp8")):
        shown += len(cloud.intensity)
        assert left < cloud.intensity.min()
        assert cloud.intensity.max() < right
        assert bottom < cloud.flops_per_s.min() / 1e12
        assert cloud.flops_per_s.max() / 1e12 < top
    assert f"{shown:,} measured kernels" in texts(figure)
    assert "1,979 TFLOP/s" in texts(figure)


@pytest.mark.parametrize("dtypes", [("bf16",), ("bf16", "fp8", "fp8_block")])
def test_labels_cover_no_kernel_and_no_other_label(h100: fastroof.Tables, dtypes: tuple[str, ...]) -> None:
    figure = draw_roofline(h100.gpu, h100, dtypes=dtypes)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    points = np.concatenate([np.asarray(cloud.get_offsets()) for cloud in axes.collections])
    kernels = axes.transData.transform(points)
    upright = [axes.get_legend().get_window_extent(), *(text.get_window_extent() for text in figure.texts)]
    for text in axes.texts:
        angle = np.radians(text.get_rotation())
        anchor = text.get_transform().transform(text.get_position())
        # the label and the kernels, turned back around the label's anchor
        text.set(rotation=0.0, transform_rotates_text=False)
        box = text.get_window_extent()
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        assert not box.padded(-1).count_contains((kernels - anchor) @ turn.T + anchor), text.get_text()
        if not angle:
            upright.append(box)
    assert not upright[0].count_contains(kernels)
    for a, b in itertools.combinations(upright, 2):
        assert not a.overlaps(b)


def test_clouds_are_the_measured_rows(h100: fastroof.Tables) -> None:
    gemm, prefill, decode = kernel_clouds(h100)
    columns = h100.table("gemm").columns
    assert len(gemm.intensity) == (columns["dtype"] == "bf16").sum()
    row = int(np.flatnonzero((columns["dtype"] == "bf16") & (columns["m"] == 4096))[0])
    m, n, k = (int(columns[name][row]) for name in ("m", "n", "k"))
    found = np.flatnonzero(np.isclose(gemm.flops_per_s, 2 * m * n * k / columns["latency_us"][row] * 1e6))
    assert np.isclose(gemm.intensity[found], m * n * k / (m * k + n * k + m * n)).any()
    # decode attention of an MHA head does one FLOP a byte; of a group of g heads, g
    assert decode.intensity.max() < 97
    assert gemm.flops_per_s.max() < 989.5e12
    assert prefill.flops_per_s.max() < 989.5e12


def test_points_are_thinned_but_none_is_lost(h100: fastroof.Tables) -> None:
    figure = draw_roofline(h100.gpu, h100)
    (axes,) = figure.axes
    for cloud in kernel_clouds(h100):
        points = next(c for c in axes.collections if c.get_gid() == cloud.label).get_offsets()
        assert 500 < len(points) < len(cloud.intensity)
        # every kernel has a drawn point in its own cell of a fortieth of a decade
        kernels = {tuple(c) for c in np.floor(40 * np.log10([cloud.intensity, cloud.flops_per_s])).T}
        drawn = {tuple(c) for c in np.floor(40 * np.log10([points[:, 0], points[:, 1] * 1e12])).T}
        assert len(kernels - drawn) <= 0.01 * len(kernels)  # rounding on the way moves a few


def test_roofline_of_a_gpu_without_tables() -> None:
    figure = draw_roofline(fastroof.load_gpu("b200"), None, dtypes=("bf16", "fp8"))
    assert not figure.axes[0].collections
    assert "no measured tables" in texts(figure)
    assert "4,500 TFLOP/s" in texts(figure)


def test_roofline_without_streaming_kernels(h100: fastroof.Tables) -> None:
    gemm = {"gemm": h100.measured.tables["gemm"]}
    alone = fastroof.Tables(replace(h100.measured, tables=gemm, others={}), h100.gpu)
    words = texts(draw_roofline(alone.gpu, alone))
    assert "GEMM" in words
    assert "streaming" not in words


def test_roofline_refuses_dtypes(h100: fastroof.Tables) -> None:
    with pytest.raises(FastroofError, match="unknown dtype 'fp3'"):
        draw_roofline(h100.gpu, h100, dtypes=("bf16", "fp3"))
    with pytest.raises(FastroofError, match="no peak for dtype 'fp8'"):
        draw_roofline(fastroof.load_gpu("a100"), None, dtypes=("fp8",))


# -- step ----------------------------------------------------------------------------------------


def test_step_stack_adds_up_to_the_step(plan: fastroof.StepPlan) -> None:
    batch, kv_len = np.array([1, 7, 64, 512]), np.array([16, 4096, 4096, 1024])
    stack = step_stack(plan, batch, kv_len)
    assert np.allclose(stack.total_us, plan.decode_us(batch, kv_len), rtol=1e-12, atol=0.0)
    assert "communication" not in stack.parts_us
    assert list(stack.parts_us) == ["linear layers", "decode attention", "norms, rope, activation", "LM head"]


def test_what_the_runtime_adds_is_a_part_of_the_stack(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm-0.12", max_num_seqs=512)
    batch, kv_len = np.array([1, 64]), np.array([4096, 4096])
    stack = step_stack(plan, batch, kv_len)
    assert np.allclose(stack.total_us, plan.decode_us(batch, kv_len), rtol=1e-12, atol=0.0)
    costs = plan.profile.costs
    assert np.allclose(
        stack.parts_us["runtime"], costs.step_us + costs.of_sequence_us(plan.model.vocab) * batch
    )
    figure = draw_step(plan, kv_len=4096)
    assert "runtime" in texts(figure)
    line = figure.axes[0].lines[0].get_xydata()
    assert np.allclose(line[:, 1] * 1e3, plan.decode_us(line[:, 0].astype(int), 4096), rtol=1e-12, atol=0.0)


def test_step_picture(plan: fastroof.StepPlan) -> None:
    figure = draw_step(plan, kv_len=4096, source="somewhere")
    time_axes, share_axes = figure.axes
    assert time_axes.get_ylabel() == "step time (ms)"
    assert share_axes.get_ylabel() == "share of the step (%)"
    assert share_axes.get_ylim() == (0.0, 100.0)
    words = texts(figure)
    full = plan.memory.max_kv_tokens // 4096
    for word in (
        "llama-3.1-8b",
        "kv_len 4,096",
        "somewhere",
        "linear layers",
        "LM head",
        f"KV cache full: {full}",
    ):
        assert word in words
    line = time_axes.lines[0].get_xydata()
    assert np.allclose(line[:, 1] * 1e3, plan.decode_us(line[:, 0].astype(int), 4096), rtol=1e-12, atol=0.0)
    assert {1, 2, 4, 8, 16, 32, 64} <= set(line[:, 0].astype(int))
    assert full < line[-1, 0] <= (full + 1) * 1.3


def test_step_against_context_and_all_reduce(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-70b", "h100", h100, tp=4, engine="kernels")
    figure = draw_step(plan, against="kv_len", batch_size=8)
    assert figure.axes[0].get_xlabel() == "kv_len (tokens)"
    assert "communication" in texts(figure)
    assert "4 x NVIDIA H100 SXM" in texts(figure)
    assert "batch size 8" in texts(figure)


def test_step_of_a_model_that_does_not_fit(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-70b", "h100", h100, max_num_seqs=64, engine="kernels")
    assert "the weights do not fit" in texts(draw_step(plan))
    with pytest.raises(FastroofError, match="against must be"):
        draw_step(plan, against="tp")  # type: ignore[arg-type]


# -- files ---------------------------------------------------------------------------------------


def test_files_have_the_format_of_their_suffix(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    figure = draw_step(plan)
    png, svg = save_figure(figure, tmp_path / "a.png"), save_figure(figure, tmp_path / "a.svg")
    assert png.read_bytes().startswith(PNG)
    width, height = (int.from_bytes(png.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1920, 896)
    root = ET.parse(svg).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert b"dc:date" not in svg.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_same_picture_is_the_same_file(h100: fastroof.Tables, tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        save_figure(draw_roofline(h100.gpu, h100), file)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_readers_own_style_changes_nothing(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    save_figure(draw_step(plan), tmp_path / "a.svg")
    with mpl.rc_context({"font.size": 30.0, "axes.facecolor": "black", "svg.hashsalt": "other"}):
        save_figure(draw_step(plan), tmp_path / "b.svg")
        assert mpl.rcParams["font.size"] == 30.0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_wrong_paths_are_refused(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    figure = draw_step(plan)
    with pytest.raises(FastroofError, match=r"must end in \.png or \.svg"):
        save_figure(figure, tmp_path / "a.pdf")
    with pytest.raises(FastroofError, match="does not exist"):
        save_figure(figure, tmp_path / "absent" / "a.png")


def test_labels_do_not_overlap() -> None:
    assert _spread([0.1, 0.5], 0.1, 0.0, 1.0) == [0.1, 0.5]
    assert _spread([0.50, 0.51, 0.52], 0.1, 0.0, 1.0) == pytest.approx([0.50, 0.60, 0.70])
    assert _spread([0.9, 0.95, 0.99], 0.1, 0.0, 1.0) == pytest.approx([0.8, 0.9, 1.0])
    assert _spread([-0.2, 0.0], 0.1, 0.05, 1.0) == pytest.approx([0.05, 0.15])


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("roofline", "--dtype", "bf16", "--dtype", "fp8"),
        ("step", "--against", "kv-len", "--batch", "16"),
    ],
)
def test_plot_commands(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    file = tmp_path / "[a].png"
    done = CliRunner().invoke(app, ["plot", *arguments, "-o", str(file)])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"wrote {file}\n"
    assert file.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("roofline", "-o", "a.pdf"), "must end in .png or .svg"),
        (("step", "--against", "tp", "-o", "a.png"), "--against is batch or kv-len"),
        (("step", "--kv-len", "1", "-o", "a.png"), "kv_len >= 2"),
        (("step", "--against", "kv-len", "--batch", "0", "-o", "a.png"), "batch_size >= 1"),
        (("step", "--max-batch", "1", "-o", "a.png"), "at least 2"),
        (("step", "--dtype", "fp4", "-o", "a.png"), "dtype must be one of auto, bf16"),
        (("step", "--kv-dtype", "fp4", "-o", "a.png"), "kv_dtype must be one of auto, bf16"),
        (("roofline",), "missing option"),
    ],
)
def test_plot_errors(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = refused("plot", *arguments)
    assert done.startswith("fastroof: error: ")
    assert message in done
    assert done.count("\n") == 1


@pytest.mark.slow
def test_without_matplotlib_the_error_names_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from fastroof.cli import app; "
        f"app(['plot', 'step', '-o', {str(tmp_path / 'a.png')!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "fastroof: error: plots need matplotlib: pip install fastroof[report]\n"


@pytest.mark.slow
def test_report_imports_no_matplotlib_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, fastroof.report; print('matplotlib' in sys.modules)"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
