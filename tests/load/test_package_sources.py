"""Which sources a system's files make: versions in use, what others add, and where libraries go."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fastroof.config.paths import bench_data_root
from fastroof.errors import TableError
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.load.package_import import (
    PackageSource,
    ShippedFile,
    current_version,
    import_system,
    package_sources,
)
from fastroof.load.package_rows import unread_files
from fastroof.load.shipped import SHIPPED
from fastroof.load.sources import list_sources
from tests.reference.packages import ALLREDUCE, ATTENTION, GEMM, MOE, NCCL, package

SHIPPED_GPUS = {SYSTEMS[source.system] for source in SHIPPED}
NOT_OF_0_25 = ("l40s", "rtx_pro_6000_server")
VERSIONS = """\
# comment: trtllm: {current: "9.9"}
schema_version: 1
defaults:
  trtllm: {current: "1.3.0rc20", previous: null}   # next derives to 1.3.0rc23 today
  vllm: {current: "0.24.0", previous: "0.20.0"}
overrides:
  a100_sxm:
    trtllm: {current: "1.0.0", previous: null}
  b60:
    # vllm: {current: "0.27.0"}
    vllm: {current: '0.26.0', previous: "0.20.0"}
"""


def sources(root: Path, **files: list[dict[str, Any]]) -> list[PackageSource]:
    data = package(root, **files) / "systems" / "data"
    (data.parent / "query_versions.yaml").write_text(VERSIONS)
    return package_sources(data, "h100_sxm")


@pytest.mark.parametrize(
    ("system", "engine", "version"),
    [
        ("h100_sxm", "vllm", "0.24.0"),
        ("h100_sxm", "trtllm", "1.3.0rc20"),
        ("a100_sxm", "trtllm", "1.0.0"),
        ("a100_sxm", "vllm", "0.24.0"),
        ("b60", "vllm", "0.26.0"),
        ("b60", "trtllm", "1.3.0rc20"),
        ("h100_sxm", "sglang", ""),
    ],
)
def test_versions_in_use(tmp_path: Path, system: str, engine: str, version: str) -> None:
    (tmp_path / "query_versions.yaml").write_text(VERSIONS)
    assert current_version(tmp_path / "data", system, engine) == version
    assert current_version(tmp_path / "nowhere" / "data", system, engine) == ""


def test_the_newest_version_of_a_full_campaign_is_in_use(tmp_path: Path) -> None:
    def in_use(**versions: str) -> str:
        root = tmp_path / "".join(versions.values())
        files = {
            file: rows
            for version in versions.values()
            for file, rows in {
                f"gemm/vllm/{version}/gemm_perf": [GEMM],
                f"attention/vllm/{version}/context_attention_perf": [ATTENTION],
                f"attention/vllm/{version}/generation_attention_perf": [ATTENTION],
                f"moe/vllm/{version}/moe_perf": [MOE],
            }.items()
            if not (version == "0.31.0" and file.startswith("attention"))
        }
        data = package(root, **files) / "systems" / "data"
        (data.parent / "query_versions.yaml").write_text(VERSIONS)
        return current_version(data, "h100_sxm", "vllm")

    assert in_use(a="0.24.0", b="0.25.0") == "0.25.0"
    assert in_use(a="0.25.0", b="0.31.0") == "0.25.0"
    assert in_use(a="0.19.0", b="dev-99aa") == "0.24.0", "the package names it"


def test_an_engine_is_the_version_in_use_with_the_nearest_of_what_it_lacks(tmp_path: Path) -> None:
    found = sources(
        tmp_path,
        **{
            "gemm/vllm/0.19.0/gemm_perf": [GEMM],
            "moe/vllm/0.19.0/moe_perf": [MOE],
            "moe/vllm/0.14.0/moe_perf": [MOE],
            "comm/vllm/0.27.0/custom_allreduce_perf": [ALLREDUCE],
        },
    )
    assert [(one.name, one.engine, one.rank, one.is_current) for one in found] == [
        ("aiconfigurator-vllm-0.24.0", "vllm", 200, True),
        ("aiconfigurator-vllm-0.19.0", "vllm", 240, False),
        ("aiconfigurator-vllm-0.14.0", "vllm", 241, False),
    ]
    served = {place.operator: (place.place.version, place.place.requested) for place in found[0].places}
    assert served == {
        "gemm": ("0.24.0", ""),
        "moe": ("0.19.0", "0.24.0"),  # the newest older one
        "moe_nongated": ("0.19.0", "0.24.0"),
        "allreduce": ("0.27.0", "0.24.0"),  # the oldest newer one
    }
    assert [place.operator for place in found[1].places] == ["gemm"]
    assert {place.operator for place in found[2].places} == {"moe", "moe_nongated"}


def test_a_file_that_cannot_be_read_is_absent_and_the_others_are_imported(tmp_path: Path) -> None:
    data = package(tmp_path, moe=[{"num_tokens": 1}]) / "systems" / "data"
    (data.parent / "query_versions.yaml").write_text(VERSIONS)
    options: dict[str, Any] = {"made_from": "", "shipped": tmp_path / "nothing"}
    (tmp_path / "h100").mkdir()
    with pytest.warns(UserWarning, match="tables of h100 lack a file of the package and 1 others: not"):
        names = import_system(data, "h100_sxm", "h100", tmp_path / "h100", **options)
    assert names == ["aiconfigurator-vllm-0.24.0"]
    (source,) = list_sources(tmp_path / "h100")
    assert sorted(source.files) == ["gemm"]
    absent = source.provenance["absent"]
    file = "h100_sxm/moe/vllm/0.24.0/moe_perf.parquet"
    assert set(absent) == {f"{file} (moe)", f"{file} (moe_nongated)"}
    assert absent[f"{file} (moe)"].startswith(f"not read: {file}: missing column ")


def test_a_library_is_a_source_that_every_engine_runs(tmp_path: Path) -> None:
    found = sources(
        tmp_path,
        nccl=[NCCL],
        **{"comm/nccl/2.23/nccl_perf": [NCCL], "gemm/trtllm/1.3.0rc20/gemm_perf": [GEMM]},
    )
    assert [(one.name, one.engine, one.rank) for one in found] == [
        ("aiconfigurator-vllm-0.24.0", "vllm", 200),
        ("aiconfigurator-trtllm-1.3.0rc20", "trtllm", 210),
        ("aiconfigurator-nccl-2.27.3", "", 230),
        ("aiconfigurator-nccl-2.23", "", 240),
    ]
    assert {place.operator for place in found[2].places} >= {"allreduce", "collective"}


def test_what_ships_is_not_wanted_again(tmp_path: Path) -> None:
    data = package(tmp_path, moe=[MOE], nccl=[NCCL]) / "systems" / "data"
    (data.parent / "query_versions.yaml").write_text(VERSIONS)
    name, nccl = "aiconfigurator-vllm-0.24.0", "h100_sxm/comm/nccl/2.27.3/nccl_perf.parquet"
    gemm = ShippedFile(name, "gemm", "h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet")
    found = package_sources(data, "h100_sxm", {gemm, ShippedFile(name, "allreduce", nccl)})
    assert {(one.name, place.operator) for one in found for place in one.places} >= {
        ("aiconfigurator-vllm-0.24.0", "moe"),
        ("aiconfigurator-nccl-2.27.3", "collective"),
    }
    assert not {"gemm", "allreduce"} & {place.operator for one in found for place in one.places}


def test_files_that_ship_with_another_version_belong_to_the_campaign_all_the_same(tmp_path: Path) -> None:
    files = {"gemm": [GEMM], "generation": [ATTENTION], "allreduce": [ALLREDUCE]}
    data = package(tmp_path, **files) / "systems" / "data"
    (data.parent / "query_versions.yaml").write_text(VERSIONS)
    shipped = [
        ShippedFile("aiconfigurator-vllm-0.25.0", operator, f"h100_sxm/{file}.parquet")
        for operator, file in (
            ("attention_decode", "attention/vllm/0.24.0/generation_attention_perf"),
            ("allreduce", "comm/vllm/0.24.0/custom_allreduce_perf"),
        )
    ]
    (campaign,) = package_sources(data, "h100_sxm", shipped)
    assert campaign.name == "aiconfigurator-vllm-0.24.0"
    assert {place.operator for place in campaign.places} == {"gemm", "attention_decode", "allreduce"}


def test_all_of_a_campaign_of_the_older_package_is_read() -> None:
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None:
        pytest.skip("aiconfigurator-core is not installed")
    data = Path(str(spec.origin)).parent / "systems" / "data"
    for system, gpu in SYSTEMS.items():
        shipped = [
            ShippedFile(one.name, operator, file)
            for one in (list_sources(bench_data_root() / gpu) if gpu in SHIPPED_GPUS else ())
            for operator, about in one.provenance["operators"].items()
            for file in about["files"]
        ]
        every = package_sources(data, system, shipped)
        for one in package_sources(data, system):
            if one.is_current and one.engine:
                mine = {place for source in every if source.name == one.name for place in source.places}
                theirs = {(file.operator, file.file) for file in shipped if file.source == one.name}
                lost = [
                    place
                    for place in set(one.places) - mine
                    if (place.operator, place.place.path.relative_to(data).as_posix()) not in theirs
                ]
                assert not lost, (system, one.name)


def test_tables_that_no_operator_reads_are_named(tmp_path: Path) -> None:
    data = package(
        tmp_path,
        **{
            "gemm/vllm/0.24.0/new_kernel_perf": [GEMM],
            "gemm/tgi/3.0.0/gemm_perf": [GEMM],
            "gemm/sglang/dev-1aa0/gemm_perf": [GEMM],
            "comm/vllm/2.27.3/nccl_perf": [NCCL],
        },
    )
    system = data / "systems" / "data" / "h100_sxm"
    (system / "gemm/vllm/0.24.0/old_perf.txt").write_text("framework,version\n")
    (system / "gemm/vllm/0.24.0/collection_meta.yaml").touch()
    (system / "stray.parquet").touch()
    nothing = "not read: no operator has its rows"
    assert unread_files(system) == {
        "aiconfigurator-vllm-0.24.0": {
            "h100_sxm/gemm/vllm/0.24.0/new_kernel_perf.parquet": nothing,
            "h100_sxm/gemm/vllm/0.24.0/old_perf.txt": nothing,
        },
        "aiconfigurator-tgi-3.0.0": {"h100_sxm/gemm/tgi/3.0.0/gemm_perf.parquet": nothing},
        "aiconfigurator-sglang-dev-1aa0": {
            "h100_sxm/gemm/sglang/dev-1aa0/gemm_perf.parquet": "of a commit, not of a release"
        },
        "aiconfigurator-vllm-2.27.3": {"h100_sxm/comm/vllm/2.27.3/nccl_perf.parquet": nothing},
        "aiconfigurator--": {"h100_sxm/stray.parquet": nothing},
    }


def test_every_file_of_the_installed_package_is_in_one_source_at_most() -> None:
    try:
        data = installed_root() / "systems" / "data"
    except TableError as error:
        pytest.skip(str(error))
    for system in SYSTEMS:
        found = package_sources(data, system)
        places = [(place.operator, place.place.path) for one in found for place in one.places]
        assert len(places) == len(set(places)) > 5
        names = [one.name for one in found]
        assert len(names) == len(set(names))
        assert sorted(one.rank for one in found) == [one.rank for one in found]
        in_use = {one.engine: one.version for one in found if one.is_current and one.engine}
        if data.parents[1].name == "aisimulate_core":
            others = {"a100_sxm": "0.14.0", "b60": "0.28.0"} | dict.fromkeys(NOT_OF_0_25, "0.24.0")
            assert in_use["vllm"] == others.get(system, "0.25.0")
        else:
            others = {"a100_sxm": "0.14.0", "b60": "0.26.0"}
            assert in_use["vllm"] == others.get(system, "0.24.0")
        if system not in ("a100_sxm", "b60"):
            assert (in_use["trtllm"], in_use["sglang"]) == ("1.3.0rc20", "0.5.14")
