"""GPU facts: the shipped gpu.toml files, how a GPU is named, and errors of a wrong gpu.toml."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fastroof.config import GpuSpec, gpu_names, load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.errors import GpuError

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared"

VALID = """
title = "Test card"
aliases = ["test_sxm"]
source = "made up"
num_sms = 100
l2_mib = 40

[peak_tflops]
bf16 = 100.5
fp8 = 201

[memory]
hbm_tb_per_s = 2.039
hbm_gib = 80

[links]
nvlink_gb_per_s = 450
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "gpu.toml"
    path.write_text(text)
    return path


def test_h100_has_the_figures_of_the_sxm_card() -> None:
    h100 = load_gpu("h100")
    assert h100.name == "h100"
    assert h100.peak_flops_per_s == {"bf16": 989.5e12, "fp8": 1979e12, "int8": 1979e12}
    assert h100.hbm_bytes_per_s == 3.35e12
    assert h100.hbm_bytes == 80 * 2**30
    assert h100.nvlink_bytes_per_s == 450e9
    assert (h100.num_sms, h100.l2_bytes) == (132, 50 * 2**20)


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "bandwidth", "link", "sms"),
    [
        ("a100", 312e12, None, 2.039e12, 300e9, 108),
        ("h200", 989.5e12, 1979e12, 4.8e12, 450e9, 132),
        ("b200", 2250e12, 4500e12, 7.7e12, 900e9, 148),
        ("l40s", 362.05e12, 733e12, 0.864e12, 32e9, 142),
        ("gb200", 2500e12, 5000e12, 8e12, 900e9, 152),
        ("h20", 148e12, 296e12, 4e12, 450e9, 78),
        ("h800", 989.5e12, 1979e12, 3.35e12, 200e9, 132),
        ("b300", 2250e12, 4500e12, 7.75e12, 900e9, 148),
        ("gb300", 2500e12, 5000e12, 8e12, 900e9, 152),
        ("vr200", 4000e12, 17500e12, 22e12, 1800e9, 224),
        ("rtx_pro_6000", 467.8e12, 935.6e12, 1.597e12, 64e9, 188),
        ("b60", 98.304e12, 98.304e12, 0.456e12, 32e9, 20),
        ("l4", 121e12, 242.5e12, 0.3e12, 32e9, 58),
        ("a30", 165e12, None, 0.933e12, 32e9, 56),
        ("a100_pcie", 312e12, None, 1.935e12, 32e9, 108),
        ("h100_pcie", 756e12, 1513e12, 2e12, 64e9, 114),
        ("mi300x", 1307.4e12, 2614.9e12, 5.3e12, 448e9, 304),
        ("mi325x", 1307.4e12, 2614.9e12, 6e12, 448e9, 304),
        ("mi355x", 2516.6e12, 5033.2e12, 8e12, 537.6e9, 256),
        ("h100_nvl", 835.5e12, 1670.5e12, 3.9e12, 300e9, 132),
        ("h200_nvl", 835.5e12, 1670.5e12, 4.8e12, 450e9, 132),
        ("gh200", 989.5e12, 1979e12, 4e12, 450e9, 132),
        ("h20_3e", 148e12, 296e12, 4.8e12, 450e9, 78),
        ("a100_40gb", 312e12, None, 1.555e12, 300e9, 108),
        ("a100_pcie_40gb", 312e12, None, 1.555e12, 32e9, 108),
        ("a800", 312e12, None, 2.039e12, 200e9, 108),
        ("l40", 181.05e12, 362e12, 0.864e12, 32e9, 142),
        ("l20", 119.5e12, 239e12, 0.864e12, 32e9, 92),
        ("a10", 125e12, None, 0.6e12, 32e9, 72),
        ("a10g", 70e12, None, 0.6e12, 32e9, 80),
        ("a40", 149.7e12, None, 0.696e12, 32e9, 84),
        ("rtx_a6000", 154.8e12, None, 0.768e12, 32e9, 84),
        ("rtx_6000_ada", 364.25e12, 728.5e12, 0.96e12, 32e9, 142),
        ("rtx_pro_6000_workstation", 503.8e12, 1007.6e12, 1.792e12, 64e9, 188),
        ("rtx_pro_6000_max_q", 438.9e12, 877.8e12, 1.792e12, 64e9, 188),
        ("rtx_4090", 203.5e12, 407e12, 1.008e12, 32e9, 128),
        ("rtx_5090", 209.5e12, 419e12, 1.792e12, 64e9, 170),
        ("gb10", 125e12, 250e12, 0.273e12, 25e9, 48),
        ("rtx_3090", 71e12, None, 0.936e12, 32e9, 82),
        ("rtx_3090_ti", 80e12, None, 1.008e12, 32e9, 84),
        ("rtx_3080", 59.5e12, None, 0.76e12, 32e9, 68),
        ("rtx_3060", 25.5e12, None, 0.36e12, 32e9, 28),
        ("rtx_4080", 97.5e12, 194.9e12, 0.7168e12, 32e9, 76),
        ("rtx_4080_super", 104.4e12, 208.9e12, 0.7363e12, 32e9, 80),
        ("rtx_4070_ti_super", 88.2e12, 176.4e12, 0.6723e12, 32e9, 66),
        ("rtx_5080", 112.6e12, 225.1e12, 0.96e12, 64e9, 84),
        ("rtx_5070_ti", 87.9e12, 175.8e12, 0.896e12, 64e9, 70),
        ("rtx_a5000", 111.1e12, None, 0.768e12, 32e9, 64),
        ("rtx_a4500", 94.6e12, None, 0.64e12, 32e9, 56),
        ("rtx_a4000", 76.7e12, None, 0.448e12, 32e9, 48),
        ("rtx_5000_ada", 261.1e12, 522.2e12, 0.576e12, 32e9, 100),
        ("rtx_4500_ada", 158.5e12, 317e12, 0.432e12, 32e9, 60),
        ("rtx_4000_ada", 106.9e12, 213.8e12, 0.36e12, 32e9, 48),
        ("rtx_pro_5000", 258e12, 516e12, 1.344e12, 64e9, 110),
        ("a2", 18e12, None, 0.2e12, 16e9, 10),
        ("a16", 17.9e12, None, 0.2e12, 8e9, 10),
    ],
)
def test_shipped_figures(
    name: str, bf16: float, fp8: float | None, bandwidth: float, link: float, sms: int
) -> None:
    gpu = load_gpu(name)
    assert gpu.peak_flops_per_s["bf16"] == bf16
    assert gpu.peak_flops_per_s.get("fp8") == fp8
    assert (gpu.hbm_bytes_per_s, gpu.nvlink_bytes_per_s, gpu.num_sms) == (bandwidth, link, sms)


def test_cards_with_fp4_units() -> None:
    peaks = {name: load_gpu(name).peak_flops_per_s.get("fp4") for name in gpu_names()}
    assert {name: peak for name, peak in peaks.items() if peak is not None} == {
        "b200": 9e15,
        "b300": 14e15,
        "gb10": 0.5e15,
        "gb200": 10e15,
        "gb300": 15e15,
        "mi355x": 10066.3e12,
        "rtx_5070_ti": 703e12,
        "rtx_5080": 900.4e12,
        "rtx_5090": 1676e12,
        "rtx_pro_5000": 1032e12,
        "rtx_pro_6000": 1871.2e12,
        "rtx_pro_6000_max_q": 1755.5e12,
        "rtx_pro_6000_workstation": 2015.2e12,
        "vr200": 35e15,
    }


def test_no_peak_is_below_that_of_a_wider_dtype() -> None:
    # int8 may be: Blackwell Ultra gave its units to fp4
    for name in gpu_names():
        gpu = load_gpu(name)
        peaks, half = gpu.peak_flops_per_s, gpu.peak("bf16")
        assert half <= peaks.get("fp8", half) <= peaks.get("fp4", float("inf")), name


def test_a_card_without_bf16_units_computes_it_in_fp16(tmp_path: Path) -> None:
    volta = load_gpu("Tesla V100-SXM2-32GB")
    assert (volta.name, volta.half_dtype) == ("v100", "fp16")
    assert volta.peak("bf16") == volta.peak("fp16") == volta.peak("int4_wo") == 125e12
    with pytest.raises(GpuError, match=r"V100 SXM2 32GB has no peak for dtype 'fp8'; valid: fp16, int8$"):
        volta.peak("fp8")
    assert load_gpu("h100").half_dtype == "bf16"
    both = VALID.replace("bf16 = 100.5", "bf16 = 100.5\nfp16 = 100.5")
    with pytest.raises(GpuError, match=r"peak_tflops\.fp16 is for cards without bf16 units"):
        load_gpu(write(tmp_path / "both", both))
    with pytest.raises(GpuError, match=r"peak_flops_per_s must have bf16, or fp16 without bf16 units"):
        dataclasses.replace(volta, peak_flops_per_s={"fp8": 1e15})


@pytest.mark.parametrize("name", ["t4", "rtx_2080_ti", "v100_pcie", "v100_pcie_16gb"])
def test_cards_before_ampere_compute_in_fp16(name: str) -> None:
    assert set(load_gpu(name).peak_flops_per_s) == {"fp16", "int8"}
    assert load_gpu(name).half_dtype == "fp16"


def test_donors_are_measured_cards_that_have_every_unit_of_theirs() -> None:
    donors = {name: load_gpu(name).kernels_of for name in gpu_names()}
    assert {donor for donor in donors.values() if donor} == {"a100", "h100", "h200", "l40s", "rtx_pro_6000"}
    for name, donor in donors.items():
        if donor:
            assert donors[donor] == ""
            assert load_gpu(name).kernel_name == donor
            assert set(load_gpu(name).peak_flops_per_s) == set(load_gpu(donor).peak_flops_per_s)
    assert load_gpu("h100").kernel_name == "h100"


def test_memory_sizes_are_whole_mebibytes() -> None:
    sizes = {name: load_gpu(name).hbm_bytes for name in gpu_names()}
    assert sizes["h200"] == 141 * 2**30
    assert sizes["gb200"] == 189471 * 2**20
    assert sizes["l40s"] == 46068 * 2**20
    assert sizes["b300"] == 275040 * 2**20
    assert sizes["gb300"] == 284208 * 2**20
    assert sizes["rtx_pro_6000"] == 97887 * 2**20
    assert all(isinstance(size, int) and size % 2**20 == 0 for size in sizes.values())


def test_a_file_and_its_folder_load_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "mycard", VALID)
    gpu = load_gpu(path)
    assert load_gpu(gpu) is gpu
    assert gpu == load_gpu(path.parent) == load_gpu(str(path)) == load_gpu(str(path.parent))
    assert gpu == GpuSpec(
        name="mycard",
        title="Test card",
        aliases=("test_sxm",),
        peak_flops_per_s={"bf16": 100.5e12, "fp8": 201e12},
        hbm_bytes_per_s=2.039e12,
        hbm_bytes=80 * 2**30,
        nvlink_bytes_per_s=450e9,
        num_sms=100,
        l2_bytes=40 * 2**20,
        source="made up",
    )


def test_a_mapping_needs_a_name() -> None:
    data = tomllib.loads(VALID)
    with pytest.raises(GpuError, match="name is missing"):
        load_gpu(data)
    assert load_gpu({**data, "name": "mine"}).name == "mine"


def test_the_contents_of_a_shipped_file_give_the_shipped_gpu() -> None:
    with (bench_data_root() / "h100" / "gpu.toml").open("rb") as file:
        assert load_gpu(tomllib.load(file)) == load_gpu("h100")


def test_linked_gpus_and_links_between_nodes(tmp_path: Path) -> None:
    plain = load_gpu(write(tmp_path / "a", VALID))
    assert (plain.linked_gpus, plain.inter_node_bytes_per_s) == (8, 0.0)
    beyond = "nvlink_gb_per_s = 450\nlinked_gpus = 72\ninter_node_gb_per_s = 50.5"
    rack = load_gpu(write(tmp_path / "b", VALID.replace("nvlink_gb_per_s = 450", beyond)))
    assert (rack.linked_gpus, rack.inter_node_bytes_per_s) == (72, 50.5e9)
    half = beyond.replace("72", "7.5")
    with pytest.raises(GpuError, match=r"links.linked_gpus must be a whole number .*, got 7.5"):
        load_gpu(write(tmp_path / "c", VALID.replace("nvlink_gb_per_s = 450", half)))
    assert load_gpu("gb200").linked_gpus == 72
    assert load_gpu("h100").inter_node_bytes_per_s < load_gpu("h100").nvlink_bytes_per_s


def test_optional_keys(tmp_path: Path) -> None:
    text = VALID.replace("l2_mib = 40\n", "").replace('aliases = ["test_sxm"]\n', "")
    gpu = load_gpu(write(tmp_path / "a", text.replace("nvlink_gb", "pcie_gb")))
    assert (gpu.l2_bytes, gpu.aliases, gpu.nvlink_bytes_per_s) == (0, (), 450e9)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('title = "Test card"', "", "title is missing"),
        ('title = "Test card"', "title = 3", "title must be text, got 3"),
        ('title = "Test card"', 'title = " "', "title must be text"),
        ('source = "made up"', "", "source is missing"),
        ('["test_sxm"]', '" "', "aliases must be text, or a list of texts, got"),
        ('["test_sxm"]', "[1]", "aliases must be text, or a list of texts, got"),
        ("num_sms = 100", "", "num_sms is missing"),
        ("num_sms = 100", "num_sms = 100.5", "line 5: num_sms must be a whole number .*, got 100.5"),
        ("num_sms = 100", "num_sms = true", "num_sms must be a whole number from 1 to 1,000,000, got True"),
        ("num_sms = 100", "num_sms = 0", "num_sms must be a whole number from 1 to"),
        ("l2_mib = 40", "l2_mib = -1", "l2_mib must be a number from"),
        ("l2_mib = 40", "l2_mb = 40", "line 6: unknown key 'l2_mb'; did you mean l2_mib\\?"),
        ("bf16 = 100.5", 'bf16 = "fast"', "line 9: peak_tflops.bf16 must be a number .*, got 'fast'"),
        ("bf16 = 100.5", "bf16 = inf", "peak_tflops.bf16 must be a number from"),
        ("bf16 = 100.5", "bf16 = nan", "peak_tflops.bf16 must be a number from"),
        ("bf16 = 100.5", "", "peak_tflops.bf16 is missing"),
        ("fp8 = 201", "fp9 = 201", "line 10: peak_tflops: unknown key 'fp9'; did you mean fp8, fp4"),
        ("[peak_tflops]", "[peaks]", "line 8: unknown key 'peaks'; did you mean peak_tflops"),
        ("hbm_tb_per_s = 2.039", "", "memory.hbm_tb_per_s is missing"),
        ("hbm_tb_per_s = 2.039", "hbm_tb_per_s = -3", "memory.hbm_tb_per_s must be a number from"),
        ("hbm_gib = 80", "hbm_gb = 80", "line 14: memory: unknown key 'hbm_gb'; did you mean hbm_gib\\?"),
        ("hbm_gib = 80", "hbm_gib = [80]", "memory.hbm_gib must be a number"),
        ("nvlink_gb_per_s = 450", "", "links must have one of"),
        ("nvlink_gb_per_s = 450", "nvlink_gb_per_s = 450\npcie_gb_per_s = 32", "links must have one of"),
        ("nvlink_gb_per_s = 450", "nvlink_gb_per_s = 0", "links.nvlink_gb_per_s must be a number from"),
        ('title = "Test card"', "title = ", "is not TOML"),
        ("bf16 = 100.5", "bf16 = 5e-324", "peak_tflops.bf16 must be a number from 0.001 to .*, got 5e-324"),
        ("bf16 = 100.5", "bf16 = 1e308", r"peak_tflops.bf16 must be a number from 0.001 to .*, got 1e\+308"),
        ("bf16 = 100.5", "bf16 = 989500000000000", "peak_tflops.bf16 must be a number from"),
        ("bf16 = 100.5", f"bf16 = 1{'0' * 400}", "has an integer of more than 64 bits"),
        ("num_sms = 100", "num_sms = 10000000", r"num_sms must be a whole number from 1 to 1,000,000, got"),
        ("num_sms = 100", "num_sms = 1e308", r"num_sms must be a whole number from 1 to 1,000,000, got"),
        ("l2_mib = 40", "l2_mib = 1e308", "l2_mib must be a number from"),
        ("hbm_gib = 80", "hbm_gib = 85899345920", "memory.hbm_gib must be a number from"),
        ("hbm_tb_per_s = 2.039", "hbm_tb_per_s = 2.039e12", "memory.hbm_tb_per_s must be a number from"),
        ("nvlink_gb_per_s = 450", "nvlink_gb_per_s = 1e-320", "links.nvlink_gb_per_s must be a number from"),
        (
            VALID,
            "",
            "links must have one of nvlink_gb_per_s and pcie_gb_per_s, got none; memory.hbm_gib is missing; "
            "memory.hbm_tb_per_s is missing; num_sms is missing; peak_tflops.bf16 is missing; "
            "source is missing; title is missing",
        ),
        (VALID, "peak_tflops = 3", "peak_tflops must be a table, got 3"),
    ],
)
def test_an_error_names_the_wrong_key(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in VALID
    path = write(tmp_path / "card", VALID.replace(old, new))
    with pytest.raises(GpuError, match=complaint) as error:
        load_gpu(path)
    assert str(error.value).startswith(str(path))


def test_missing_files_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(GpuError, match=r"does not exist; give a gpu\.toml"):
        load_gpu(tmp_path / "nothing")
    with pytest.raises(GpuError, match="does not exist"):
        load_gpu(tmp_path)
    with pytest.raises(GpuError, match="does not exist"):
        load_gpu("some/where/gpu.toml")
    path = tmp_path / "gpu.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GpuError, match="is not TOML"):
        load_gpu(path)


def test_peak_goes_by_the_units_a_kernel_computes_on() -> None:
    h100 = load_gpu("h100")
    assert h100.peak("fp8_block") == h100.peak("fp8") == 1979e12
    assert h100.peak("int4_wo") == h100.peak("bf16") == h100.peak("fp16") == 989.5e12
    assert h100.peak("w4a16_mxfp4") == h100.peak("int8_wo") == 989.5e12
    assert h100.peak("w4afp8") == h100.peak("sq") == 1979e12
    assert load_gpu("b200").peak("nvfp4") == 2 * load_gpu("b200").peak("w4a8_mxfp4_mxfp8") == 9e15
    with pytest.raises(GpuError, match="no peak for dtype 'nvfp4'"):
        h100.peak("nvfp4")
    with pytest.raises(GpuError, match=r"A100.*no peak for dtype 'fp8'; valid: bf16, int8"):
        load_gpu("a100").peak("fp8")
    with pytest.raises(GpuError, match="no peak for dtype 'fp7'"):
        h100.peak("fp7")


def test_a_gpu_pickles_and_hashes() -> None:
    h100 = load_gpu("h100")
    assert pickle.loads(pickle.dumps(h100)) == h100
    assert len({h100, load_gpu("H100-SXM"), load_gpu("a100")}) == 2


@pytest.mark.parametrize(("theirs", "ours"), [("H100", "h100"), ("A100-SXM", "a100"), ("A100-80", "a100")])
def test_agrees_with_the_hardware_file_of_the_published_tables(theirs: str, ours: str) -> None:
    path = SHARED / "reference" / "h100_roofline_v2" / "hardware_config.json"
    if not path.is_file():
        pytest.skip("no shared reference data beside the checkout")
    figures = json.loads(path.read_text())[theirs]
    gpu = load_gpu(ours)
    assert gpu.peak("bf16") / 1e12 == figures["TFlopsPeak"]
    assert gpu.hbm_bytes_per_s / 1e12 == figures["BwPeakTBs"]
    assert gpu.hbm_bytes / 2**30 == figures["MemoryGiB"]


def test_a_rack_names_the_one_with_its_link():
    rack = load_gpu("gb300")
    assert rack.links_of == "gb200"
    assert (rack.nvlink_bytes_per_s, rack.linked_gpus) == (load_gpu("gb200").nvlink_bytes_per_s, 72)
    assert load_gpu("h100").links_of == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name must be text of one line, got ''"),
        ({"name": "../h100"}, "name must be a folder name, got '../h100'"),
        ({"title": 5}, "title must be text of one line, got 5"),
        ({"aliases": ["h100"]}, r"aliases must be a tuple of names, got \['h100'\]"),
        ({"peak_flops_per_s": {"fp8": 1e15}}, "peak_flops_per_s must have bf16, .*; valid keys are .*fp8"),
        (
            {"peak_flops_per_s": {"bf16": math.nan}},
            "peak of bf16 must be a number from 1e.09 to 1e.19, got nan",
        ),
        ({"hbm_bytes_per_s": True}, "hbm_bytes_per_s must be a number from 1e.08 to 1e.16, got True"),
        ({"hbm_bytes": 80.5 * 2**30 + 0.5}, "hbm_bytes must be a whole number, got 8643"),
        ({"num_sms": 0}, r"num_sms must be a number from 1 to 1e\+06, got 0"),
        ({"l2_bytes": [1]}, r"l2_bytes must be a number from .* got \[1\]"),
        ({"inter_node_bytes_per_s": -1.0}, "inter_node_bytes_per_s must be a number from .* got -1.0"),
    ],
)
def test_a_spec_made_by_hand_is_held_to_what_a_card_may_have(changes, message):
    with pytest.raises(GpuError, match=message):
        dataclasses.replace(load_gpu("h100"), **changes)


def test_numbers_of_a_spec_made_by_hand_are_pythons():
    made = dataclasses.replace(
        load_gpu("h100"), hbm_bytes=np.int64(80 * 2**30), num_sms=np.float32(132), inter_node_bytes_per_s=0
    )
    assert [type(value) for value in (made.hbm_bytes, made.num_sms, made.inter_node_bytes_per_s)] == [
        int, int, float,
    ]  # fmt: skip
    assert load_gpu("h100") == dataclasses.replace(made, inter_node_bytes_per_s=50e9)


@pytest.mark.parametrize(
    "name", ["h100_nvl.toml", "H100 NVL.toml", "h100-pcie-96.toml", "a100_pcie_40gb.toml", "h100.toml"]
)
def test_a_file_that_is_called_like_a_card_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(f'name = "mine"\n{VALID}')
    monkeypatch.chdir(tmp_path)
    assert load_gpu(name) == load_gpu(tmp_path / name)
    assert load_gpu(name).name == "mine"
    with pytest.raises(GpuError, match="does not exist"):
        load_gpu(f"not_{name}")


def test_a_folder_that_is_called_like_another_card_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "h100_nvx", VALID)
    monkeypatch.chdir(tmp_path)
    assert load_gpu("h100_nvx").title == "Test card"
    write(tmp_path / "h100", VALID)
    with pytest.warns(
        UserWarning, match=rf"h100 is the NVIDIA H100 SXM; {tmp_path}/h100/gpu.toml is not read"
    ):
        assert load_gpu("h100").title == "NVIDIA H100 SXM"
    assert load_gpu("./h100").title == "Test card"


def test_all_errors_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    text = VALID.replace("num_sms = 100", "num_sms = 1.5").replace("hbm_gib = 80", "hbm_gb = 80")
    path = write(tmp_path / "card", text.replace('title = "Test card"', "").replace("fp8 = 201", "fp8 = -1"))
    with pytest.raises(GpuError) as error:
        load_gpu(path)
    assert str(error.value) == (
        f"{path}: title is missing; line 5: num_sms must be a whole number from 1 to 1,000,000, got 1.5; "
        "line 10: peak_tflops.fp8 must be a number from 0.001 to 1e+07, got -1; "
        "line 12: memory.hbm_gib is missing; "
        "line 14: memory: unknown key 'hbm_gb'; did you mean hbm_gib? (valid: hbm_tb_per_s, hbm_gib)"
    )


def test_a_name_may_be_that_of_a_file_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h100_nvx.toml").write_text(f'name = "mine"\n{VALID}')
    with pytest.warns(UserWarning, match=f"no GPU is called h100_nvx: it is read from {tmp_path}/"):
        assert load_gpu("h100_nvx").name == "mine"
    # reported once, and not for a path
    assert load_gpu("h100_nvx") == load_gpu("./h100_nvx.toml") == load_gpu("h100_nvx.toml")
    (tmp_path / "h200.toml").write_text(f'name = "mine"\n{VALID}')
    with pytest.warns(UserWarning, match=r"h200 is the NVIDIA H200 SXM; .*not read \(give ./h200.toml to"):
        assert load_gpu("h200").hbm_bytes == 141 * 2**30
    # neither another kind of file nor the same card is worth a word
    (tmp_path / "b200.toml").write_text("models = ['llama-3.1-8b']")
    (tmp_path / "a100.toml").write_bytes((bench_data_root() / "a100" / "gpu.toml").read_bytes())
    assert [load_gpu(name).name for name in ("b200", "a100")] == ["b200", "a100"]


def test_power(tmp_path: Path) -> None:
    known = load_gpu(write(tmp_path / "known", VALID + "\n[power]\ntdp_w = 350\nidle_w = 40.5\n"))
    assert (known.tdp_w, known.idle_w) == (350.0, 40.5)
    assert load_gpu(write(tmp_path / "unknown", VALID)).tdp_w == 0.0
    wrong = {
        "tdp_w = 350": "power.idle_w is missing",
        "tdp_w = 350\nidle_w = 350": "power.idle_w must be below power.tdp_w, got 350 and 350",
        "tdp_w = 350\nidle_w = -1": "power.idle_w must be a number from",
        "tdp_kw = 1": "power: unknown key 'tdp_kw'",
    }
    for text, words in wrong.items():
        with pytest.raises(GpuError, match=words):
            load_gpu(write(tmp_path / "wrong", f"{VALID}\n[power]\n{text}\n"))
    with pytest.raises(GpuError, match="idle_w must be below tdp_w"):
        dataclasses.replace(known, idle_w=400.0)
