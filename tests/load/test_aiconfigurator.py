"""The importer of aiconfigurator-core: the mapping on small packages, and the shipped tables again."""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastroof.errors import TableError
from fastroof.load import aiconfigurator
from fastroof.load.aiconfigurator import (
    SYSTEMS,
    available,
    import_aiconfigurator,
    installed_root,
    write_imported,
)
from fastroof.load.shipped import SHIPPED as SHIPPED_SOURCES
from fastroof.load.shipped import convert_shipped
from fastroof.load.sources import list_sources, load_sources
from fastroof.operators.registry import OPERATORS
from tests.reference.packages import ALLREDUCE, ATTENTION, FILES, GEMM, MOE, NCCL, QUANTISE, RUN, package

SHIPPED = Path(__file__).resolve().parents[2] / "bench_data" / "h100" / "aiconfigurator-vllm-0.25.0"
SHIPPED_TRTLLM = SHIPPED.parent / "aiconfigurator-trtllm-1.3.0rc20"
SHIPPED_PACKAGE = "aisimulate-0.13.0.dev202610270000000085"


def imported(
    root: Path, operator: str, **files: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of one operator as lists, and its provenance."""
    table = import_aiconfigurator("h100_sxm", "vllm", "0.24.0", package(root, **files)).tables[operator]
    return {n: v.tolist() for n, v in table.columns.items()}, table.provenance["operators"][operator]


def left_out(found: dict[str, Any]) -> dict[str, int]:
    (file,) = found["files"].values()
    return dict(file.get("left_out", {}))


def test_gemm_rows_keep_every_bit_and_known_dtypes(tmp_path: Path) -> None:
    odd = 0.1 + 0.2
    rows = [GEMM | {"gemm_dtype": d} for d in ("fp8", "fp8_block", "nvfp5", "int9", "nvfp5")]
    columns, found = imported(tmp_path, "gemm", gemm=[GEMM | {"latency": odd}, *rows])
    assert columns["dtype"] == ["bf16", "fp8", "fp8_block"]
    assert columns["latency_us"] == [odd * 1e3, 0.0025 * 1e3, 0.0025 * 1e3]
    assert (columns["m"], columns["n"], columns["k"]) == ([1] * 3, [8] * 3, [16] * 3)
    assert columns["kernel"] == ["cublas"] * 3
    assert left_out(found) == {"dtype int9": 1, "dtype nvfp5": 2}
    assert (found["rows"], found["points"], found["kernels"]) == (3, 3, ["cublas"])


def test_prefill_attends_to_its_prefix_and_itself(tmp_path: Path) -> None:
    row = ATTENTION | {"isl": 512, "step": 100, "latency": 0.2}
    others = [
        row | {"window_size": 128}, row | {"attn_dtype": "fp8"}, row | {"beam_width": 4},
        row | {"kv_cache_dtype": "int4"}, row | {"kv_cache_dtype": "fp8"},
    ]  # fmt: skip
    columns, found = imported(tmp_path, "attention_prefill", context=[row, *others])
    assert columns["kv_dtype"] == ["bf16", "bf16", "fp8"]
    assert columns["window"] == [0, 128, 0]
    assert (columns["batch_size"], columns["q_len"], columns["kv_len"]) == ([2] * 3, [512] * 3, [612] * 3)
    assert [columns[n][0] for n in ("num_q_heads", "num_kv_heads", "head_dim")] == [32, 8, 128]
    assert left_out(found) == {"computes in fp8": 1, "beam search": 1, "dtype int4": 1}


def test_decode_attends_to_the_past_and_the_new_token(tmp_path: Path) -> None:
    columns, found = imported(tmp_path, "attention_decode", generation=[ATTENTION, ATTENTION | {"isl": 3}])
    assert columns["kv_len"] == [1024]
    assert "q_len" not in columns
    assert left_out(found) == {"more than one new token": 1}


def test_attention_files_without_a_window_column_have_none(tmp_path: Path) -> None:
    row = {name: value for name, value in ATTENTION.items() if name != "window_size"}
    columns, _ = imported(tmp_path, "attention_decode", generation=[row])
    assert columns["window"] == [0]


def test_moe_rows(tmp_path: Path) -> None:
    rows = [MOE, MOE | {"moe_dtype": "w4a16_mxfp4"}, MOE | {"kernel_source": "moe_torch_flow_nongated"}]
    columns, found = imported(tmp_path, "moe", moe=rows)
    assert columns["dtype"] == ["bf16", "w4a16_mxfp4"]
    names = (
        "hidden",
        "intermediate",
        "topk",
        "num_experts",
        "moe_tp",
        "moe_ep",
        "distribution",
        "num_tokens",
    )
    assert [columns[n][0] for n in names] == [4096, 14336, 2, 8, 2, 4, "power_law_1.2", 4]
    assert left_out(found) == {"experts without a gate": 1}
    columns, found = imported(tmp_path, "moe_nongated", moe=rows)
    assert (columns["hidden"], columns["kernel"]) == ([4096], ["moe_torch_flow_nongated"])
    assert left_out(found) == {"experts with a gate": 2}


def test_a_file_that_the_version_lacks_is_taken_from_the_nearest_one(tmp_path: Path) -> None:
    of = {
        v: [MOE | {"version": v, "latency": ms}]
        for v, ms in (("0.9.0", 1.0), ("0.14.0", 2.0), ("0.27.0", 3.0))
    }
    places = {f"moe/vllm/{v}/moe_perf": rows for v, rows in of.items()}
    columns, found = imported(tmp_path / "older", "moe", **places)
    assert columns["latency_us"] == [2000.0]
    assert list(found["files"]) == ["h100_sxm/moe/vllm/0.14.0/moe_perf.parquet"]
    (file,) = found["files"].values()
    assert (file["version"], file["stands_for"]) == ("0.14.0", "0.24.0, which has no such file")
    newer = {"moe/vllm/0.27.0/moe_perf": of["0.27.0"], "moe/vllm/0.30.0/moe_perf": of["0.9.0"]}
    columns, _ = imported(tmp_path / "newer", "moe", **newer)
    assert columns["latency_us"] == [3000.0]
    columns, found = imported(tmp_path / "same", "moe", **places, moe=[MOE])
    assert columns["latency_us"] == [500.0]
    assert "version" not in next(iter(found["files"].values()))


def test_a_version_of_one_file_alone_can_be_chosen(tmp_path: Path) -> None:
    """Versions of an all-reduce differ visibly, and some have no GEMMs."""
    slow = [ALLREDUCE | {"version": "0.19.0", "latency": 0.009}]
    root = package(tmp_path, allreduce=[ALLREDUCE], **{"comm/vllm/0.19.0/custom_allreduce_perf": slow})
    for version, us in (("0.19.0", 9.0), ("0.24.0", 4.5)):
        tables = import_aiconfigurator("h100_sxm", "vllm", version, root, files=["custom_allreduce_perf"])
        assert tables.tables["allreduce"].columns["latency_us"].tolist() == [us]
        assert tables.sources == {"allreduce": f"aiconfigurator-vllm-{version}"}


def test_rows_of_another_engine_in_an_engines_folder_are_named(tmp_path: Path) -> None:
    """The package stands in with TensorRT-LLM's all-reduces where SGLang's were not measured."""
    _, found = imported(
        tmp_path, "allreduce", allreduce=[ALLREDUCE | {"framework": "TRTLLM", "version": "1.2.0"}]
    )
    (file,) = found["files"].values()
    assert (file["framework_in_rows"], file["version_in_rows"]) == ("TRTLLM", "1.2.0")
    _, found = imported(tmp_path / "own", "allreduce", allreduce=[ALLREDUCE], nccl=[NCCL])
    assert all("framework_in_rows" not in file for file in found["files"].values())


def test_a_library_is_of_the_version_that_the_system_is_paired_with(tmp_path: Path) -> None:
    other = [NCCL | {"version": "2.29.2", "latency": 9.0}]
    columns, _ = imported(tmp_path, "allreduce", nccl=[NCCL], **{"comm/nccl/2.29.2/nccl_perf": other})
    assert columns["latency_us"] == [0.0155 * 1e3]
    # the paired version may have no folder, and the file may lie below an engine
    columns, found = imported(tmp_path / "a", "allreduce", **{"comm/nccl/2.26.2/nccl_perf": other})
    (file,) = found["files"].values()
    assert (columns["latency_us"], file["stands_for"][:6]) == ([9000.0], "2.27.3")
    columns, _ = imported(tmp_path / "b", "allreduce", **{"comm/vllm/0.24.0/nccl_perf": other})
    assert columns["latency_us"] == [9000.0]


def test_of_two_kernels_at_one_point_the_faster_stays(tmp_path: Path) -> None:
    rows = [
        MOE | {"latency": 0.5}, MOE | {"latency": 0.7},
        MOE | {"kernel_source": "min_latency", "latency": 0.6},
        MOE | {"num_tokens": 8, "latency": 0.9},
        MOE | {"num_tokens": 8, "kernel_source": "min_latency", "latency": 0.8},
    ]  # fmt: skip
    columns, found = imported(tmp_path, "moe", moe=rows)
    assert columns["num_tokens"] == [4, 4, 8]
    assert columns["kernel"] == ["triton", "triton", "min_latency"]
    assert left_out(found) == {"slower of two kernels for the same sizes": 2}


def test_sglangs_old_rows_with_ep_count_the_slots_that_a_gpu_was_measured_with(tmp_path: Path) -> None:
    """Its GPU had all slots of its tokens: in even routing all up to ep = topk, else those by chance."""
    layer = {"kernel_source": "sglang_fused_moe_triton", "num_tokens": 1024, "topk": 2, "num_experts": 8}
    found_at = {}
    for version, spread, ep in itertools.product(
        ("0.5.10", "0.5.14"), ("balanced", "power_law"), (1, 2, 4, 16)
    ):
        row = (
            MOE
            | layer
            | {"version": version, "distribution": spread, "moe_ep_size": ep, "num_experts": 8 * ep}
        )
        folder = tmp_path / f"{version}-{spread}-{ep}"
        columns, about = imported(folder, "moe", moe=[row, row | {"moe_ep_size": 1}])
        found_at[version, spread, ep] = sorted(columns["num_tokens"])[-1]
        assert (left_out(about) == {}) == (version == "0.5.14" or ep < 16)
        (file,) = about["files"].values()
        assert ("note" in file) == (version == "0.5.10" and ep > 1)
    assert {ep: found_at["0.5.14", "balanced", ep] for ep in (1, 4, 16)} == dict.fromkeys((1, 4, 16), 1024)
    # 2 of 8 experts a GPU of 16, 2 of 32 of a GPU of 4: a token has one of its two there
    assert [found_at["0.5.10", "balanced", ep] for ep in (1, 2, 4)] == [1024, 2048, 2048]
    by_chance = {ep: 1 - (8 * ep - 8) / (8 * ep) * (8 * ep - 9) / (8 * ep - 1) for ep in (2, 4)}
    for ep, share in by_chance.items():
        assert found_at["0.5.10", "power_law", ep] == round(1024 * ep * share)
    few = MOE | layer | {"version": "0.5.10", "distribution": "balanced", "moe_ep_size": 4, "num_experts": 32}
    numbers, _ = imported(tmp_path / "few", "moe", moe=[few | {"num_tokens": number} for number in (8, 64)])
    # 8 tokens reach 13 of the 32 experts' weights, which take the time: more slots would not read them all
    assert sorted(numbers["num_tokens"]) == [8, 128]


def test_custom_allreduce_counts_elements(tmp_path: Path) -> None:
    eager = ALLREDUCE | {"kernel_source": "vLLM_custom_eager", "backend": "vllm_eager", "latency": 0.02}
    columns, _ = imported(tmp_path, "allreduce", allreduce=[ALLREDUCE, eager])
    assert columns["mode"] == ["eager", "graph"]
    assert columns["message_bytes"] == [2048, 2048]
    assert columns["latency_us"] == [0.02 * 1e3, 0.0045 * 1e3]
    assert columns["kernel"] == ["vLLM_custom_eager", "vLLM_custom_graph"]


def test_allreduce_rows_without_a_mode_are_graph_replays(tmp_path: Path) -> None:
    row = {name: value for name, value in ALLREDUCE.items() if name != "backend"}
    columns, _ = imported(tmp_path, "allreduce", allreduce=[row])
    assert columns["mode"] == ["graph"]


def test_nccl_rows_become_allreduce_and_collective(tmp_path: Path) -> None:
    rows = [
        NCCL, NCCL | {"latency": 0.0310}, NCCL | {"nccl_dtype": "int8"},
        *(NCCL | {"op_name": name} for name in ("all_gather", "reduce_scatter", "alltoall")),
    ]  # fmt: skip
    columns, found = imported(tmp_path, "allreduce", nccl=rows)
    assert columns["dtype"] == ["fp16", "fp16", "int8"]
    assert columns["mode"] == ["nccl"] * 3
    assert columns["message_bytes"] == [1024, 1024, 512]
    assert "1 points were measured more than once, the times of one up to 100% apart" in found["repeats"]
    (file,) = found["files"].values()
    assert file["version_in_rows"] == "2.29.2"
    columns, _ = imported(tmp_path, "collective", nccl=rows)
    # What each GPU contributes: a quarter of what an all-gather over 4 ends with.
    assert dict(zip(columns["collective"], columns["message_bytes"], strict=True)) == {
        "all_gather": 256,
        "reduce_scatter": 1024,
        "alltoall": 1024,
    }


def test_oneccl_is_a_library_like_nccl(tmp_path: Path) -> None:
    rows = [NCCL | {"kernel_source": "oneCCL"}, NCCL | {"op_name": "all_gather", "message_size": 1024}]
    places = {"comm/oneccl/2021.15.9/oneccl_perf": rows}
    columns, _ = imported(tmp_path, "allreduce", **places)
    assert (columns["mode"], columns["message_bytes"]) == (["oneccl"], [1024])
    columns, _ = imported(tmp_path / "again", "collective", **places)
    assert (columns["collective"], columns["message_bytes"]) == (["all_gather"], [512])


def test_only_vllms_scales_are_a_difference_of_kernels(tmp_path: Path) -> None:
    place = "quantize/vllm/0.24.0/computescale_perf"
    for kernel, message in (
        ("dynamic_minus_static", "a difference of two kernels"),
        ("torch_ops", "finding the scales"),
    ):
        rows = [QUANTISE | {"kernel_source": kernel, "latency": 0.001}]
        _, found = imported(tmp_path / kernel, "elementwise", quantise=[QUANTISE], **{place: rows})
        assert found["note"].startswith(f"fp8_scale is computescale_perf, {message}")


def test_quantising_is_the_streaming_kernel(tmp_path: Path) -> None:
    rows = [QUANTISE | {"latency": 0.0019}]
    sizes = [(20_000, 20_000), (40_000, 20_000), (80_000, 20_000)]
    # 3.0, 2.8 and 2.9 TB/s.
    for (m, k), rate in zip(sizes, (3.0e12, 2.8e12, 2.9e12), strict=True):
        rows.append(QUANTISE | {"m": m, "k": k, "latency": 3 * m * k / rate * 1e3})
    columns, found = imported(tmp_path, "elementwise", quantise=rows)
    assert columns["kind"] == ["fp8_quantise"] * 4
    assert columns["io_bytes"] == [3 * 2 * 4096, *(3 * m * k for m, k in sizes)]
    assert columns["width"] == [4096, 20_000, 20_000, 20_000]
    assert found["launch_us"] == 0.0019 * 1e3
    assert found["copy_bytes_per_s"] == pytest.approx(2.9e12, rel=1e-12)


def test_a_kernel_far_below_the_memory_bandwidth_gives_no_copy_bandwidth(tmp_path: Path) -> None:
    slow = QUANTISE | {"m": 40_000, "k": 20_000, "latency": 3 * 40_000 * 20_000 / 0.3e12 * 1e3}
    _, found = imported(tmp_path, "elementwise", quantise=[QUANTISE, slow])
    assert not {"launch_us", "copy_bytes_per_s"} & set(found)
    assert "not bound by memory" in found["note"]


def test_fp8_gemm_records_that_it_quantises_its_input(tmp_path: Path) -> None:
    stream = QUANTISE | {"m": 40_000, "k": 20_000, "latency": 0.8}
    gemms = [GEMM | {"gemm_dtype": "fp8", "m": 2, "k": 4096, "latency": us} for us in (0.0021, 0.0019)]
    _, found = imported(tmp_path, "gemm", gemm=gemms, quantise=[QUANTISE, stream])
    assert found["fp8_includes_input_quantisation"] is True
    assert found["evidence"].endswith("; 1 of 2 rows take longer than quantising an m x k input alone")
    _, found = imported(tmp_path / "bf16", "gemm", quantise=[QUANTISE])
    assert "fp8_includes_input_quantisation" not in found


def test_a_few_rows_faster_than_the_peak_are_left_out(tmp_path: Path) -> None:
    rows = [GEMM | {"m": m} for m in range(1, 2001)]
    broken = GEMM | {"m": 4096, "n": 4096, "k": 4096, "latency": 0.1}
    columns, found = imported(tmp_path, "gemm", gemm=[*rows, broken])
    assert len(columns["m"]) == 2000
    assert left_out(found) == {"faster than the peak of h100": 1}


def test_sizes_that_no_call_can_have_are_left_out(tmp_path: Path) -> None:
    columns, found = imported(tmp_path / "a", "moe", moe=[MOE, MOE | {"topk": 9, "latency": 50.0}])
    assert columns["topk"] == [2]
    assert left_out(found) == {"more topk than num_experts": 1}
    alone = ALLREDUCE | {"num_gpus": 1, "latency": 5.0}
    columns, found = imported(tmp_path / "b", "allreduce", allreduce=[ALLREDUCE, alone])
    assert columns["num_gpus"] == [2]
    assert left_out(found) == {"num_gpus below 2": 1}


def test_all_rows_of_a_dtype_that_computes_in_another_are_left_out(tmp_path: Path) -> None:
    # as SGLang 0.5.6's int8_wo on H100, which runs int8 against int8: up to 1.19 of the bf16 peak
    shape = {"gemm_dtype": "int8_wo", "m": 4096, "n": 4096, "k": 4096}
    broken = [GEMM | shape | {"latency": us} for us in (0.1, 0.11, 0.12, 0.13, 0.3)]
    columns, found = imported(tmp_path, "gemm", gemm=[GEMM, *broken])
    assert columns["dtype"] == ["bf16"]
    assert left_out(found) == {"computes in another dtype than int8_wo: 4 rows beat its peak on h100": 5}


def test_a_dtype_that_the_card_has_no_units_for_is_left_out(tmp_path: Path) -> None:
    columns, found = imported(tmp_path, "gemm", gemm=[GEMM, GEMM | {"gemm_dtype": "nvfp4"}])
    assert columns["dtype"] == ["bf16"]
    assert left_out(found) == {"h100 has no units for nvfp4": 1}


def test_provenance_names_source_licence_and_files(tmp_path: Path) -> None:
    root = package(tmp_path)
    path = root / "systems" / "data" / "h100_sxm" / f"{FILES['gemm']}.parquet"
    (path.parent / "collection_meta.yaml").write_text("schema_version: 1\nprovenance: legacy\n")
    tables = import_aiconfigurator("h100_sxm", "vllm", "0.24.0", root)
    found = tables.tables["gemm"].provenance
    assert (found["gpu"], found["licence"], found["package_version"]) == ("h100", "Apache-2.0", "0.9.1")
    assert (found["framework"], found["framework_version"], found["device"]) == (
        "vllm",
        "0.24.0",
        RUN["device"],
    )
    (file,) = found["operators"]["gemm"]["files"].values()
    assert file["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "legacy" in file["timing"]
    assert tables.sources == {"gemm": "aiconfigurator-vllm-0.24.0"}
    absent = "h100_sxm/moe/vllm/moe_perf"
    assert tables.ignored[absent] == found["absent"][absent] == "not in the package, of no version"


def test_what_is_converted_is_what_was_imported(tmp_path: Path) -> None:
    root = package(tmp_path, generation=[ATTENTION], moe=[MOE], nccl=[NCCL], quantise=[QUANTISE])
    tables = import_aiconfigurator("h100_sxm", "vllm", "0.24.0", root)
    folder = write_imported(tables, tmp_path / "bench")
    assert folder == tmp_path / "bench" / "h100" / "aiconfigurator-vllm-0.24.0"
    read = load_sources(folder)
    assert read.content_hash == tables.content_hash
    assert read.tables["gemm"].provenance == tables.tables["gemm"].provenance
    with pytest.raises(TableError, match="exists; pass overwrite=True"):
        write_imported(tables, tmp_path / "bench")


def test_only_the_files_that_are_named_are_read(tmp_path: Path) -> None:
    root = package(tmp_path, allreduce=[ALLREDUCE], nccl=[NCCL])
    run = ("h100_sxm", "vllm", "0.24.0")
    tables = import_aiconfigurator(*run, root, files=["custom_allreduce_perf"])
    assert (list(tables.tables), tables.ignored) == (["allreduce"], {})
    assert tables.tables["allreduce"].columns["mode"].tolist() == ["graph"]
    folder = write_imported(tables, tmp_path / "bench", rank=200, overwrite=True)
    assert [(s.rank("allreduce"), list(s.files)) for s in list_sources(folder)] == [(200, ["allreduce"])]
    with pytest.raises(TableError, match="unknown file gemm; use one of gemm_perf, context_"):
        import_aiconfigurator(*run, root, files=["gemm", "gemm_perf"])
    with pytest.raises(TableError, match=r"nothing to import of vllm .*moe_perf: not in the package"):
        import_aiconfigurator(*run, root, files=["moe_perf"])


def test_a_wrong_row_names_the_packages_file(tmp_path: Path) -> None:
    root = package(tmp_path, gemm=[GEMM, GEMM | {"latency": -1.0}])
    with pytest.raises(
        TableError, match=r"h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet, row 2, column latency"
    ):
        import_aiconfigurator("h100_sxm", "vllm", "0.24.0", root)


@pytest.mark.parametrize("latency_ms", [1.7e308, 1e200, 1.1e6])
def test_a_latency_that_no_table_may_hold_is_refused(tmp_path: Path, latency_ms: float) -> None:
    root = package(tmp_path, gemm=[GEMM, GEMM | {"m": 2, "latency": latency_ms}])
    with pytest.raises(
        TableError, match=r"row 2, column latency: found .* need a number from 0 to 1e\+06 in ms"
    ):
        import_aiconfigurator("h100_sxm", "vllm", "0.24.0", root)


def test_lists_what_can_be_imported(tmp_path: Path) -> None:
    package(tmp_path)
    package(tmp_path, "l40s")
    root = package(tmp_path, "l4")
    assert available(root) == [("h100_sxm", "vllm", "0.24.0"), ("l40s", "vllm", "0.24.0")]


def test_refuses_missing_files(tmp_path: Path) -> None:
    root = package(tmp_path, allreduce=[ALLREDUCE])
    with pytest.raises(TableError, match="no package has tables of l4; they have tables of a100, b200"):
        import_aiconfigurator("l4", "vllm", "0.24.0", root)
    with pytest.raises(TableError, match=r"no table of vllm 0.9.0 for h100_sxm; .*gemm_perf: vllm 0.24.0; "):
        import_aiconfigurator("h100_sxm", "vllm", "0.9.0", root)
    with pytest.raises(TableError, match=r"no table of sglang .*custom_allreduce_perf: vllm 0.24.0"):
        import_aiconfigurator("h100_sxm", "sglang", "0.24.0", root)
    with pytest.raises(TableError, match="has no systems/data"):
        available(root / "systems")
    assert available(tmp_path) == available(root), "the folder of an unpacked wheel"


def test_an_absent_package_names_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator, "MODULES", ("no_such_package_as_this",))
    with pytest.raises(TableError, match=r"is installed: run pip install .fastroof\[tables\]"):
        installed_root()


# -- the tables that fastroof ships --------------------------------------------------------------


def without_flags(folder: Path) -> dict[str, Any]:
    """A source's provenance, but for what tests beside its siblings flag (``fastroof tables flag``)."""
    provenance = tomllib.loads((folder / "provenance.toml").read_text(encoding="utf-8"))
    for about in provenance["operators"].values():
        about.pop("unsound", None)
    return provenance


@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    [
        # the others before a release; tests of lookups and of frozen answers read what ships of the H100
        pytest.param(system, marks=[] if system == "gb200" else [pytest.mark.release])
        for system in sorted({source.system for source in SHIPPED_SOURCES})
    ],
)
def test_converting_again_gives_the_shipped_files(tmp_path: Path, system: str) -> None:
    try:
        root = installed_root()
    except TableError as error:
        pytest.skip(str(error))
    if not list(root.parent.glob(f"{SHIPPED_PACKAGE}.dist-info")):
        pytest.skip(f"the installed package is not {SHIPPED_PACKAGE}")
    # what someone flagged there is kept by a conversion that replaces a folder
    bench_data = SHIPPED.parents[1]
    gpu = SYSTEMS[system]
    for provenance in bench_data.glob(f"{gpu}/*/provenance.toml"):
        kept = tmp_path / provenance.relative_to(bench_data)
        kept.parent.mkdir(parents=True)
        kept.write_bytes(provenance.read_bytes())
    again = convert_shipped(tmp_path, root, systems=[system])
    assert {path.name for path in again} == {
        path.parent.name for path in bench_data.glob(f"{gpu}/*/provenance.toml")
    }
    for folder in again:
        shipped = bench_data / gpu / folder.name
        assert {path.name for path in folder.iterdir()} == {path.name for path in shipped.iterdir()}
        for path in folder.glob("*.parquet"):
            assert path.read_bytes() == (shipped / path.name).read_bytes(), path
        assert without_flags(folder) == without_flags(shipped)


def test_what_ships_is_within_16_mb() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.parents[1].rglob("*") if path.is_file()) < 16_000_000


def test_the_shipped_tables_match_the_bench_data_readme() -> None:
    tables = load_sources(SHIPPED).tables
    rows = {operator: table.num_rows for operator, table in tables.items()}
    readme = (SHIPPED.parents[1] / "README.md").read_text(encoding="utf-8")
    readme = readme[readme.index("| table | rows | from (systems/data/h100_sxm) |") :].split("\n\n")[0]
    listed = dict(re.findall(r"^\| (\w+) \| ([\d,]+) \| ", readme, re.MULTILINE))
    assert rows == {operator: int(count.replace(",", "")) for operator, count in listed.items()}
    gemm = tables["gemm"].columns
    pairs = {}
    for dtype in ("bf16", "fp8", "fp8_block"):
        of = gemm["dtype"] == dtype
        counts = Counter(zip(gemm["n"][of].tolist(), gemm["k"][of].tolist(), strict=True))
        assert set(counts.values()) == {74}
        pairs[dtype] = (len(counts), round(float(gemm["latency_us"][of].min()), 3))
    assert pairs == {"bf16": (507, 2.505), "fp8": (507, 4.93), "fp8_block": (492, 5.941)}
    # Stored at full precision, not rounded to a float32 or to decimals.
    assert (gemm["latency_us"] != gemm["latency_us"].astype(np.float32)).mean() > 0.9


@pytest.mark.slow
def test_the_shipped_all_reduce_of_trtllm_matches_the_bench_data_readme() -> None:
    folder = SHIPPED.parent
    of_vllm = load_sources(folder).tables["allreduce"]
    assert (of_vllm.source, of_vllm.num_rows) == (SHIPPED.name, 390)
    tables = load_sources(folder, source={"allreduce": SHIPPED_TRTLLM.name})
    assert tables.sources["allreduce"] == SHIPPED_TRTLLM.name
    columns = tables.tables["allreduce"].columns
    assert set(zip(columns["dtype"], columns["mode"], strict=True)) >= {("bf16", "graph")}
    columns = {n: v[columns["mode"] == "graph"] for n, v in columns.items()}
    (own, theirs) = (
        dict(zip(zip(c["num_gpus"], c["message_bytes"], strict=True), c["latency_us"], strict=True))
        for c in (columns, {n: v[of_vllm.columns["mode"] == "graph"] for n, v in of_vllm.columns.items()})
    )
    assert set(own) == set(theirs)
    assert len(own) == 69
    ratio = {point: us / theirs[point] for point, us in own.items()}
    small = [r for (_, size), r in ratio.items() if size <= 2**16]
    assert (min(small), max(small)) == pytest.approx((0.61, 0.73), abs=0.005)
    assert [ratio[n, 2**30] for n in (2, 4, 8)] == pytest.approx([1.0] * 3, abs=0.01)
    assert (ratio[4, 2**21], ratio[8, 2**21]) == pytest.approx((1.4, 1.83), abs=0.01)


def test_the_shipped_decode_grid_is_a_staircase() -> None:
    table = load_sources(SHIPPED).tables["attention_decode"]
    group = table.groups()["bf16", 32, 8, 128, 0]
    batch, kv = table.columns["batch_size"][group], table.columns["kv_len"][group]
    longest = [int(kv[batch == b].max()) for b in np.unique(batch)]
    assert longest == [65536] * 4 + [32768, 16384, 8192, 4096, 1024, 512, 256, 128]


def test_every_shipped_table_fits_its_schema() -> None:
    for operator, table in load_sources(SHIPPED).tables.items():
        for column in OPERATORS[operator].required:
            values = table.columns[column.name]
            assert len(values) == table.num_rows
            if column.kind != "text":
                assert np.isfinite(values).all()
