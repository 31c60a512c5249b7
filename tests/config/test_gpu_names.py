"""Names of GPUs: as drivers print them, other spellings, unknown ones, and accelerators out of scope."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof.config import gpu_names, load_gpu
from fastroof.errors import GpuError


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 120GB", "gh200"),
        ("NVIDIA H20-3e", "h20_3e"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "rtx_a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000_workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx_pro_6000_max_q"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA GB10", "gb10"),
        ("Tesla V100-SXM2-16GB", "v100_16gb"),
        ("Tesla V100-PCIE-32GB", "v100_pcie"),
        ("Tesla V100-PCIE-16GB", "v100_pcie_16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA A2", "a2"),
        ("NVIDIA A16", "a16"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx_2080_ti"),
        ("NVIDIA GeForce RTX 3060", "rtx_3060"),
        ("NVIDIA GeForce RTX 3080", "rtx_3080"),
        ("NVIDIA GeForce RTX 3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx_3090_ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx_4070_ti_super"),
        ("NVIDIA GeForce RTX 4080", "rtx_4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx_4080_super"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx_5070_ti"),
        ("NVIDIA GeForce RTX 5080", "rtx_5080"),
        ("NVIDIA RTX A4000", "rtx_a4000"),
        ("NVIDIA RTX A4500", "rtx_a4500"),
        ("NVIDIA RTX A5000", "rtx_a5000"),
        ("NVIDIA RTX 4000 Ada Generation", "rtx_4000_ada"),
        ("NVIDIA RTX 4500 Ada Generation", "rtx_4500_ada"),
        ("NVIDIA RTX 5000 Ada Generation", "rtx_5000_ada"),
        ("NVIDIA RTX PRO 5000 Blackwell", "rtx_pro_5000"),
    ],
)
def test_names_as_the_driver_reports_them(reported: str, name: str) -> None:
    assert load_gpu(reported).name == name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AMD Instinct MI250X", "other GPUs of AMD"),
        ("Radeon RX 7900 XTX", "other GPUs of AMD"),
        ("gfx1100", "other GPUs of AMD"),
        ("Intel Arc B580", "other GPUs of Intel"),
        ("Gaudi3", "Intel's Gaudi"),
        ("HL-225", "Intel's Gaudi"),
        ("TPU v6e", "Google's TPUs"),
        ("v5e", "Google's TPUs"),
        ("trn2", "AWS's Trainium and Inferentia"),
        ("Ascend910B2", "Huawei's Ascend"),
        ("910B", "Huawei's Ascend"),
        ("Apple M4 Max", "Apple's GPUs"),
        ("NVIDIA Jetson AGX Orin", "NVIDIA's Jetson modules"),
        ("MTT S4000", "accelerators of other makers"),
    ],
)
def test_another_accelerator_is_out_of_scope(name: str, kind: str) -> None:
    supported = (
        r"supported are GPUs of NVIDIA, b60, mi300x, mi325x, mi355x \(`fastroof gpus` lists all \d+\)$"
    )
    with pytest.raises(GpuError, match=rf"^GPU '{name}' is out of scope, as are {kind}: {supported}"):
        load_gpu(name)


def test_a_typing_error_is_not_another_accelerator() -> None:
    for name in ("h1000", "v1000", "a1000", "rtx_9090", "l44", "t40", "m40", "p100"):
        with pytest.raises(GpuError, match=f"^unknown GPU '{name}'"):
            load_gpu(name)


def test_every_folder_has_the_name_in_its_file_and_spellings_are_unique() -> None:
    assert {"h100", "a100", "h200", "b200", "l40s", "gb200", "h20", "h800"} <= set(gpu_names())
    assert gpu_names() == sorted(gpu_names())
    taken: dict[str, str] = {}
    for name in gpu_names():
        gpu = load_gpu(name)
        assert gpu.name == name
        for alias in (name, *gpu.aliases):
            spelling = alias.lower().replace("_", "").replace("-", "")
            assert taken.setdefault(spelling, name) == name
            assert load_gpu(alias) == gpu


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100_sxm", "h100"),
        ("H100-SXM", "h100"),
        ("h100-sxm5", "h100"),
        ("H100", "h100"),
        ("NVIDIA H100 SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100-SXM", "a100"),
        ("A100-80", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("L40S-PCIe", "l40s"),
        ("GB200 NVL72", "gb200"),
        ("nvidia_h200", "h200"),
        ("h100 pcie", "h100_pcie"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("rtx_pro_6000_server", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("GB300 NVL72", "gb300"),
        ("NVIDIA Vera Rubin NVL72", "vr200"),
        ("Intel Arc Pro B60", "b60"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_spelling_does_not_matter(spelling: str, name: str) -> None:
    assert load_gpu(spelling).name == name


@pytest.mark.parametrize("name", ["H100 NVL 188", "h100_188gb_nvl", "H100-PCIe-96", "a100_pcie_16gb"])
def test_a_card_of_the_same_die_is_another_card(name: str) -> None:
    both = r"(?P<die>h100|a100) is the NVIDIA .* SXM.*, (?P=die)_pcie is the NVIDIA .* PCIe"
    with pytest.raises(GpuError, match=f"{both}.*; for another card, give the path of its"):
        load_gpu(name)


def test_a_name_that_only_begins_like_a_card_is_not_its_variant() -> None:
    with pytest.raises(GpuError, match="did you mean l4, l40, ") as error:
        load_gpu("l41_pcie")
    assert "for another card" not in str(error.value)


def test_an_unknown_gpu_suggests_the_closest() -> None:
    with pytest.raises(GpuError, match="unknown GPU 'h100x'; did you mean h100, "):
        load_gpu("h100x")
    with pytest.raises(GpuError, match="unknown GPU 'zzz_v5'") as error:
        load_gpu("zzz_v5")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "\0", "h100\n80"])
def test_odd_names_are_gpu_errors(name: str) -> None:
    with pytest.raises(GpuError, match="unknown GPU"):
        load_gpu(name)


@pytest.mark.parametrize("value", [None, 100, b"h100", ["h100"]])
def test_invalid_names_raise_a_gpu_error(value: Any) -> None:
    with pytest.raises(GpuError, match="a name, a path or a mapping, got"):
        load_gpu(value)
