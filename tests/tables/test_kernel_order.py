"""Several sources of one GPU: which of them serves a kernel, and how it is reported."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MEASURED
from fastroof.config import load_gpu
from fastroof.engines import EngineProfile, KernelChoices, OperatorKernel, load_engine
from fastroof.errors import MissingTableError, TableError
from fastroof.load.sources import load_sources
from fastroof.load.write import write_source
from fastroof.plan.curves import kernel_order, row_values
from fastroof.plan.options import PlanOptions
from fastroof.tables import Tables
from fastroof.tables.kernel_order import BY_RANK, KernelOrder

SIZES = {"m": [1, 64, 4096], "n": [4096, 4096, 4096], "k": [4096, 4096, 4096]}


def gemms(scale: float, *dtypes: str) -> dict[str, np.ndarray]:
    rows = len(dtypes) * 3
    return {
        "dtype": np.repeat(np.array(dtypes, object), 3),
        **{name: np.tile(np.array(values, np.int64), len(dtypes)) for name, values in SIZES.items()},
        "latency_us": scale * np.tile([10.0, 20.0, 300.0], len(dtypes))[:rows],
    }


def write(folder: Path, name: str, rows: dict, **provenance: object) -> Path:
    return write_source(folder / "h100" / name, {"gemm": rows}, {"gpu": "h100", **provenance})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GEMMs of three engines, one with a dtype of its own."""
    flat = {"keys": {"dtype": ["fp8_block"]}, "test": "flat", "reason": "55 us at every m", "ratio": 5.0}
    unsound = {"gemm": {"unsound": [flat]}}
    write(tmp_path, "a-vllm", gemms(1.0, "bf16", "fp8", "fp8_block"), framework="vllm", operators=unsound)
    write(tmp_path, "b-sglang", gemms(2.0, "bf16", "fp8_block"), framework="sglang")
    write(tmp_path, "c-trtllm", gemms(3.0, "bf16"), framework="trtllm")
    return tmp_path / "h100"


def at_one(tables: Tables, dtype: str) -> tuple[float, int]:
    answer = tables.lookup("gemm", m=1, n=4096, k=4096, dtype=dtype)
    return float(answer.latency_us), int(answer.origin)


def in_order(folder: Path, *engines: str, **operators: str) -> Tables:
    return fastroof.load_tables(folder).in_order(KernelOrder(engines, tuple(operators.items())))


def test_the_first_source_serves_what_it_has_and_the_next_one_what_it_lacks(folder):
    tables = fastroof.load_tables(folder, source=None)
    assert tables.sources == {"gemm": "a-vllm"}
    assert at_one(tables, "bf16") == (10.0, ORIGIN_MEASURED)
    trtllm = in_order(folder, "trtllm", "sglang")
    assert trtllm.sources == {"gemm": "c-trtllm"}
    assert at_one(trtllm, "bf16") == (30.0, ORIGIN_MEASURED)
    # its own table has no fp8_block: SGLang's comes next, and is another engine's
    assert at_one(trtllm, "fp8_block") == (20.0, ORIGIN_BORROWED)
    assert at_one(trtllm, "fp8") == (10.0, ORIGIN_BORROWED)
    assert trtllm.source_of("gemm", ("fp8_block",)) == "b-sglang"


def test_rows_that_a_test_found_wrong_are_served_where_nothing_else_is(folder):
    tables = fastroof.load_tables(folder)
    assert tables.source_of("gemm", ("fp8_block",)) == "b-sglang"
    assert at_one(tables, "fp8_block") == (20.0, ORIGIN_MEASURED)
    alone = fastroof.load_tables(folder, source="a-vllm")
    assert at_one(alone, "fp8_block") == (10.0, ORIGIN_MEASURED)
    assert at_one(in_order(folder, "vllm"), "fp8_block") == (20.0, ORIGIN_BORROWED)


def test_a_given_source_stays_whatever_the_engine(folder):
    for choice in ("a-vllm", {"gemm": "a-vllm"}):
        tables = fastroof.load_tables(folder, source=choice).in_order(KernelOrder(("trtllm",)))
        assert tables.sources == {"gemm": "a-vllm"}
        assert at_one(tables, "bf16") == (10.0, ORIGIN_BORROWED)
    with pytest.raises(MissingTableError, match="h100 has no gemm table of dtype fp8; measured: bf16"):
        at_one(fastroof.load_tables(folder, source={"gemm": "c-trtllm"}), "fp8")


def test_custom_measurements_come_first_for_every_engine(folder):
    write(folder.parent, "mine", gemms(0.5, "bf16"), rank=50)
    for engines in ((), ("vllm",), ("trtllm", "vllm")):
        tables = fastroof.load_tables(folder).in_order(KernelOrder(engines))
        assert at_one(tables, "bf16") == (5.0, ORIGIN_MEASURED)
    assert at_one(in_order(folder, "trtllm"), "fp8") == (10.0, ORIGIN_BORROWED)


def test_measurements_of_no_engine_that_rank_last_stay_last_for_the_first_engine(folder):
    write(folder.parent, "mine", gemms(0.5, "bf16"), rank=9000)
    assert at_one(in_order(folder, "vllm"), "bf16") == (10.0, ORIGIN_MEASURED)
    # they come before those of the engines after it
    assert at_one(in_order(folder, "another", "vllm"), "bf16") == (5.0, ORIGIN_MEASURED)


def test_an_operator_may_be_read_from_another_engine_by_choice(folder):
    for named in ("sglang", "b-sglang"):
        assert at_one(in_order(folder, "trtllm", gemm=named), "bf16") == (20.0, ORIGIN_MEASURED)


def test_the_given_release_precedes_the_engines_other_versions(folder):
    for name, version, times in (("d-vllm", "0.31.0", 4.0), ("e-vllm", "0.3.0", 5.0)):
        write(
            folder.parent, name, gemms(times, "bf16"), framework="vllm", framework_version=version, rank=299
        )

    def latency_us(release: str, dtype: str = "bf16", **named: str) -> float:
        order = KernelOrder(("vllm", "sglang"), tuple(named.items()), release)
        return at_one(fastroof.load_tables(folder).in_order(order), dtype)[0]

    assert [latency_us(release) for release in ("", "0.31", "0.31.0", "0.3", "0.25.0")] == [
        10.0, 40.0, 40.0, 50.0, 10.0,
    ]  # fmt: skip
    assert latency_us("0.31", "fp8") == 10.0, "what it lacks is another version's"
    assert latency_us("0.31", gemm="sglang") == 20.0, "a profile's own choice comes first"
    write(folder.parent, "mine", gemms(0.5, "bf16"), rank=50)
    assert latency_us("0.31") == 5.0


def test_a_plan_for_a_version_reads_its_tables_first():
    order = kernel_order(load_gpu("h100"), PlanOptions(engine="vllm-0.31").checked())
    assert (order.engines[0], order.release) == ("vllm", "0.31")
    for engine in ("vllm", "vllm-0.12", "kernels", load_engine("vllm-0.31.0")):
        assert kernel_order(load_gpu("h100"), PlanOptions(engine=engine).checked()).release == ""
    again = PlanOptions(engine="vllm-0.31.0").checked().checked()
    assert kernel_order(load_gpu("h100"), again).release == "0.31.0"


def test_an_order_is_made_once_and_shares_what_it_packs(folder):
    tables = fastroof.load_tables(folder)
    vllm, trtllm = (tables.in_order(KernelOrder((engine,))) for engine in ("vllm", "trtllm"))
    assert tables.in_order(BY_RANK) is tables is vllm.in_order(BY_RANK)
    assert tables.in_order(KernelOrder(("vllm",))) is vllm is trtllm.in_order(KernelOrder(("vllm",)))
    gemm = fastroof.operators.registry.OPERATORS["gemm"]
    assert tables.packed(gemm, ("bf16",)) is vllm.packed(gemm, ("bf16",))
    assert tables.packed(gemm, ("bf16",)) is not trtllm.packed(gemm, ("bf16",))
    assert tables.content_hash == vllm.content_hash == trtllm.content_hash
    copy = pickle.loads(pickle.dumps(trtllm))
    assert copy.sources == trtllm.sources
    assert at_one(copy, "fp8") == at_one(trtllm, "fp8")


def test_folders_of_one_gpu_are_read_together_and_the_first_counts(folder, tmp_path):
    other = tmp_path / "users"
    write(other, "b-sglang", gemms(7.0, "bf16", "fp8"), framework="sglang")
    write(other, "d", gemms(9.0, "int8"))
    together = load_sources([folder, other / "h100"], when_needed=True)
    assert [t.source for t in together.candidates("gemm")] == ["a-vllm", "b-sglang", "c-trtllm", "d"]
    tables = Tables(together, together.gpu_spec)
    assert at_one(tables, "int8") == (90.0, ORIGIN_MEASURED)
    # the second folder's source of the same name is no donor: the first one has the operator
    assert tables.source_of("gemm", ("fp8",)) == "a-vllm"
    named = load_sources([folder, other / "h100"], source="b-sglang")
    assert len(named.candidates("gemm")) == 1
    assert set(named.tables["gemm"].columns["dtype"]) == {"bf16", "fp8_block"}


def test_rows_are_read_when_they_are_needed_and_errors_come_then(folder):
    path = folder / "a-vllm" / "gemm.parquet"
    path.write_bytes(b"no Parquet")
    with pytest.raises(TableError, match=r"gemm\.parquet"):
        load_sources(folder)
    lazily = load_sources(folder, when_needed=True)
    assert lazily.sources == {"gemm": "a-vllm"}
    with pytest.raises(TableError, match=r"gemm\.parquet"):
        lazily.tables["gemm"].num_rows  # noqa: B018


def test_the_hash_is_that_of_the_rows_whether_they_are_read_or_not(folder):
    read, lazily = load_sources(folder), load_sources(folder, when_needed=True)
    path = folder / "a-vllm" / "gemm.parquet"
    assert read.content_hash == lazily.content_hash
    other = write(folder.parent, "a-vllm-2", gemms(1.5, "bf16", "fp8", "fp8_block"))
    path.write_bytes((other / "gemm.parquet").read_bytes())
    with pytest.raises(TableError, match="SHA-256"):  # not the one in provenance.toml
        load_sources(folder, "a-vllm", when_needed=True).content_hash  # noqa: B018
    (path.parent / "provenance.toml").write_bytes((other / "provenance.toml").read_bytes())
    assert load_sources(folder, "a-vllm", when_needed=True).content_hash == load_sources(other).content_hash
    assert load_sources(folder, when_needed=True).content_hash != read.content_hash


def test_a_source_may_be_the_path_of_a_folder(folder, tmp_path):
    own = write(tmp_path / "host", "pcie", gemms(4.0, "bf16"))
    tables = fastroof.load_tables(folder, source={"gemm": str(own)})
    assert at_one(tables, "bf16") == (40.0, ORIGIN_MEASURED)
    assert tables.sources == {"gemm": "pcie"}
    with pytest.raises(TableError, match=r"has no source .\./nowhere."):
        fastroof.load_tables(folder, source={"gemm": "./nowhere"})


# -- plans ----------------------------------------------------------------------------------------


def test_a_plan_reads_its_engines_kernels_and_names_them():
    h100 = fastroof.load_tables("h100")
    own_sum = "aiconfigurator-trtllm-1.3.0rc20"
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine="trtllm-1.0")
    by_role = {o.role: o for o in plan.explain([(1, 4096)] * 8).operators}
    assert "runtime" not in by_role, "it adds nothing to its kernels"
    assert {o.source for o in by_role.values()} == {own_sum} == {plan.kernels}
    assert max(o.origin for o in by_role.values()) < ORIGIN_BORROWED
    plain = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine="kernels")
    sources = {o.source for o in plain.explain([(1, 4096)] * 8).operators}
    assert sources == {h100.sources["gemm"], h100.sources["attention_decode"]}
    # attention of an older version comes first, by its rank; the engine's own version keeps its own
    assert h100.sources["attention_decode"] == "aiconfigurator-vllm-0.24.0"
    named = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine="vllm-0.25.0")
    assert {o.source for o in named.explain([(1, 4096)] * 8).operators if o.role[-9:] == "attention"} == {
        "aiconfigurator-vllm-0.25.0"
    }
    kernels = fastroof.load_tables("h100", source={"allreduce": own_sum})
    chosen = fastroof.compile_plan("llama-3.1-8b", "h100", kernels, tp=2, engine="kernels")
    same = {o.role: o.total_us for o in chosen.explain([(1, 4096)] * 8).operators}
    assert same["mlp_allreduce"] == by_role["mlp_allreduce"].total_us


def test_a_profile_names_whose_kernels_stand_for_its_own():
    h100 = fastroof.load_tables("h100")
    mine = OperatorKernel("allreduce", engine="trtllm", reason="this host's switch")
    profile = EngineProfile("mine", "vllm", kernels=KernelChoices(operators=(mine,)))
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine=profile)
    (found,) = {o.source for o in plan.explain([(1, 4096)]).operators if o.role == "mlp_allreduce"}
    assert found == "aiconfigurator-trtllm-1.3.0rc20"
    assert int(plan.run(fastroof.StepBatch.from_requests([[(1, 4095)]])).origin[0]) < ORIGIN_BORROWED


def test_an_engine_with_two_kernels_runs_the_faster_one():
    h100 = fastroof.load_tables("h100")
    both = OperatorKernel("allreduce", faster="trtllm", reason="it has both")
    ours = EngineProfile("mine", "vllm")
    sums = {}
    for name, operators in (
        ("own", ()),
        ("other", (replace(both, faster="", engine="trtllm"),)),
        ("both", (both,)),
    ):
        engine = replace(ours, kernels=KernelChoices(operators=operators))
        plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=8, engine=engine)
        (sums[name],) = [c for c in plan.row_curves if c.operator.role == "mlp_allreduce"]
    rows = np.arange(1, 8193)
    us = {name: row_values(curve, 8192)[0][rows] for name, curve in sums.items()}
    # from the launch that the engine's own table has
    later_us = sums["own"].launch_us - sums["other"].launch_us
    assert later_us > 1.0
    np.testing.assert_allclose(us["both"], np.minimum(us["own"], us["other"] + later_us), rtol=1e-12)
    assert 0.0 < (us["both"] < us["own"]).mean() < 0.9
    assert sums["both"].source == f"{sums['own'].source} or {sums['other'].source}"
    gemms = {o.source for o in plan.explain([(1, 4095)]).operators if o.role == "qkv"}
    assert gemms == {"aiconfigurator-vllm-0.25.0"}


def test_plans_compiled_together_do_not_share_the_faster_kernels_of_one():
    h100 = fastroof.load_tables("h100")
    both = OperatorKernel("allreduce", faster="trtllm", reason="it has both")
    engines = [
        EngineProfile("mine", "vllm", kernels=KernelChoices(operators=operators, engines=("trtllm",)))
        for operators in ((), (both,))
    ]
    requests = [{"model": "llama-3.1-8b", "tp": 8, "engine": engine} for engine in engines]
    together = fastroof.compile_plans(requests, "h100", h100)
    alone = [fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=8, engine=engine) for engine in engines]
    us = [float(plan.decode_us(8, 1024)) for plan in together]
    assert us == [float(plan.decode_us(8, 1024)) for plan in alone]
    assert us[1] < us[0]


@pytest.mark.parametrize("engine", ["vllm", "vllm-0.15.1", "vllm-0.10.2"])
@pytest.mark.parametrize("tp", [4, 8])
def test_sums_of_vllm_on_b200_never_take_a_tenth_longer_than_larger_ones(engine, tp):
    b200 = fastroof.load_tables("b200")
    plan = fastroof.compile_plan("llama-3.1-70b", "b200", b200, tp=tp, dtype="fp8", engine=engine)
    (curve,) = [c for c in plan.row_curves if c.operator.role == "mlp_allreduce"]
    us = row_values(curve, 1024)[0][1:]
    assert (us <= 1.1 * np.minimum.accumulate(us[::-1])[::-1]).all()


def test_packaged_engines_name_the_engines_nearest_to_them():
    for name in ("vllm", "sglang", "trtllm"):
        others = load_engine(name).kernels.engines
        assert {name, *others} == {"vllm", "sglang", "trtllm"}
        assert name not in others


def test_the_datasheet_is_a_source_too():
    with pytest.warns(UserWarning, match="datasheet model"):
        plan = fastroof.compile_plan("llama-3.1-8b", "h100", None, engine="kernels")
    assert {o.source for o in plan.explain([(1, 100), (64, 0)]).operators} == {"datasheet"}


def test_a_borrowed_lookup_reads_no_other_engines_source():
    tables = fastroof.load_tables("h100")
    shape = {"num_q_heads": 32, "num_kv_heads": 32, "head_dim": 128}
    answer = tables.lookup("attention_decode", **shape, batch_size=4, kv_len=1024)
    assert answer.origin == ORIGIN_BORROWED
    first, *others = tables.candidates("attention_decode")
    assert first.columns._columns  # it was read
    # shapes of all versions of the engine may be borrowed
    others = [table for table in others if table.engine != first.engine]
    assert others
    assert not any("_columns" in vars(table.columns) for table in others)


def test_a_missing_table_names_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastroof.load import by_name

    monkeypatch.setattr(by_name, "_installed", lambda: None)
    tables = fastroof.load_tables("h200")
    with pytest.raises(MissingTableError, match=r"no hca_decode table; .*pip install 'fastroof\[tables\]'"):
        tables.table("hca_decode")
    monkeypatch.setattr(by_name, "_installed", lambda: object())
    with pytest.raises(MissingTableError) as found:
        fastroof.load_tables("h100").table("hca_decode")
    assert "pip install" not in str(found.value)
