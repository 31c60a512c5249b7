"""Grids: what a grid file means, and the packaged ones, whose points tests/frozen records."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import MeasureError
from fastroof.load import load_measured
from fastroof.models import load_model
from fastroof.operators.registry import OPERATORS
from kernels_bench.grid.grid import Grid, grid_names, load_grid, shapes_of
from kernels_bench.model_shape import Experts, ModelShape
from kernels_bench.operators.elementwise import elementwise_bytes
from kernels_bench.operators.registry import MEASURED
from kernels_bench.output.table_sets import row_keys
from kernels_bench.protocol import Point
from kernels_bench.sentinels import SOAK
from tests.reference.shards import shard

DENSE = sorted(model.name for model in load_grid().models if not model.experts)


@pytest.fixture(scope="module")
def default() -> Grid:
    return load_grid()


POINTS: dict[str, list[Point]] = {}
"""Points of grids by what the file holds: they take longer to make than to look through."""


def points_of(grid: Grid) -> list[Point]:
    if grid.sha256 not in POINTS:
        POINTS[grid.sha256] = grid.points()
    return POINTS[grid.sha256]


def sizes(grid: Grid, operator: str, *columns: str, **where: object) -> set[tuple[object, ...]]:
    return {
        tuple(point.values[column] for column in columns)
        for point in points_of(grid)
        if point.operator == operator and all(point.values[name] == value for name, value in where.items())
    }


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def grid_of(tmp_path: Path, group: str, top: str = "") -> Grid:
    return load_grid(write(tmp_path, f'title = "t"\n{top}\n[[group]]\nname = "g"\npriority = 1\n{group}'))


GEMM = 'operator = "gemm"\ndtype = "bf16"\nm = [1, 2]\nn = 64\nk = 32'
DECODE = 'operator = "attention_decode"\nkv_dtype = "bf16"\nbatch_size = [1, 4]\nkv_len = [64, 128]\n'
MODELS = 'models = [{ name = "a", heads = [32, 8, 128], hidden = 4096, intermediate = 14336, vocab = 1000 }]'


def test_the_packaged_grids() -> None:
    assert grid_names() == ["cpu", "first_run", "h100", "moe", "rotation", "second_run", "smoke"]


def test_the_first_run_has_the_models_of_the_other_grids(default: Grid) -> None:
    """Those of h100 are held to the presets, so that these are too."""
    others = {model.name: model for grid in (load_grid("moe"), default) for model in grid.models}
    for model in load_grid("first_run").models:
        assert vars(model) == vars(others[model.name]) | {"tp": (1, 2, 4)}


def test_the_first_run_leaves_out_what_shipped_rows_have_but_for_some_that_compare_the_campaigns() -> None:
    grid = load_grid("first_run")
    shipped = load_measured("h100", source="aiconfigurator-vllm-0.25.0").tables
    held = {key for name in MEASURED if name in shipped for key in row_keys(name, shipped[name].columns)}
    assert grid.left_out <= held
    assert len(grid.left_out) > 2500
    kept = [point for point in grid.points() if point.key in held and point.priority]
    assert 100 <= len(kept) <= 170
    assert {"gemm", "attention_decode", "attention_prefill", "moe"} == {point.operator for point in kept}
    assert all(point.key not in grid.left_out for point in grid.points() if point.priority)


def test_the_second_run_has_models_of_other_grids_and_repeats_points_of_the_first() -> None:
    others = {model.name: model for model in load_grid("moe").models}
    second, first = load_grid("second_run"), load_grid("first_run")
    for model in second.models:
        assert vars(model) == vars(others[model.name]) | {"tp": model.tp}
    again = [point for point in second.points() if point.priority in (0, 1, 7, 8)]
    of_first = {point.key for point in first.points()}
    assert {point.key for point in again} <= of_first | first.left_out
    assert {point.key for point in again if point.priority <= 1} <= of_first
    assert len([point for point in again if point.priority == 1]) == 126


@pytest.mark.parametrize("name", grid_names())
def test_every_point_has_its_schema_and_comes_once(name: str) -> None:
    grid = load_grid(name)
    points = grid.points()
    assert points
    assert max(Counter(point.key for point in points).values()) == 1
    for point in points:
        schema = OPERATORS[point.operator]
        assert list(point.values) == [column.name for column in (*schema.keys, *schema.axes)]
        for column in (*schema.keys, *schema.axes):
            value = point.values[column.name]
            assert type(value) is (str if column.kind == "text" else int)
            assert column.kind == "text" or value >= column.minimum
    assert {point.group for point in points} <= {group.name for group in grid.groups}


@pytest.mark.parametrize("name", [name for name in grid_names() if name != "rotation"])
def test_sentinels_are_a_gemm_a_copy_and_a_decode_and_on_a_gpu_a_soak(name: str) -> None:
    sentinels = load_grid(name).sentinels()
    soaks = [point for point in sentinels if point.group == SOAK]
    assert len(soaks) == (name not in ("cpu", "smoke"))
    assert {point.priority for point in sentinels} == {0}
    plain = sorted(point.operator for point in sentinels if point not in soaks)
    assert plain == ["attention_decode", "elementwise", "gemm"]


@pytest.mark.slow
def test_two_readings_give_the_same_points_in_the_same_order(default: Grid) -> None:
    again = load_grid("h100")
    assert [point.key for point in again.points()] == [point.key for point in default.points()]
    assert again.sha256 == hashlib.sha256(default.path.read_bytes()).hexdigest()


def test_the_shapes_of_18_models(default: Grid) -> None:
    assert len(default.models) == 18
    assert len(shapes_of("heads", default.models)) == 27
    assert len(shapes_of("linear", default.models)) == 158
    assert len(shapes_of("lm_head", default.models)) == 53
    assert len(shapes_of("experts", default.models)) == 12
    assert {width for (width,) in shapes_of("hidden", default.models)} == {2048, 3584, 4096, 5120, 7168, 8192}


def test_the_27_head_shapes(default: Grid) -> None:
    listed = (
        "4,4 5,5 8,8 10,10 16,16 20,20 32,32 40,40 4,1 8,2 16,4 32,8 5,1 10,2 20,4 40,8 "
        "7,1 14,2 28,4 56,8 8,1 16,2 32,4 64,8 16,1 32,2 64,4"
    )
    expected = {(int(a), int(b), 128) for a, b in (pair.split(",") for pair in listed.split())}
    assert set(shapes_of("heads", default.models)) == expected
    for operator in ("attention_decode", "attention_prefill"):
        assert sizes(default, operator, "num_q_heads", "num_kv_heads", "head_dim") >= expected


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_have_the_shapes_a_plan_looks_up(default: Grid, name: str) -> None:
    """The TOML repeats presets: it may not differ from them, nor the sharding from a plan's."""
    preset = load_model(name)
    own = {model.name: model for model in default.models}[name]
    for tp in own.tp:
        share = shard(preset, tp)
        assert own.heads(tp) == (share.num_q_heads, share.num_kv_heads, preset.only_kind.attention.head_dim)
        assert own.linear(tp) == [
            (share.qkv_out, preset.hidden),
            (preset.hidden, share.o_in),
            (2 * share.intermediate, preset.hidden),
            (preset.hidden, share.intermediate),
        ]
        assert own.lm_head(tp) == (share.vocab_rows, preset.hidden)


@pytest.mark.slow
def test_priorities_follow_the_order_in_which_minutes_are_given_up(default: Grid) -> None:
    def of(operator: str, **where: object) -> set[int]:
        return {
            point.priority
            for point in default.points()
            if point.operator == operator
            and point.priority > 0
            and all(point.values[name] == value for name, value in where.items())
        }

    order = [
        of("gemm", dtype="bf16"),
        of("attention_decode", kv_dtype="bf16"),
        of("attention_prefill"),
        of("elementwise", kind="copy"),
        of("gemm", dtype="fp8"),
        of("moe"),
        of("mla_decode"),
    ]
    assert [len(level) for level in order] == [1] * 7
    numbers = [min(level) for level in order]
    assert numbers == sorted(set(numbers))


def test_smoke_has_every_operator_of_the_default_grid(default: Grid) -> None:
    def kinds(grid: Grid) -> set[tuple[object, ...]]:
        names = ("dtype", "kv_dtype", "kind")
        return {(p.operator, *(p.values.get(name) for name in names)) for p in grid.points()}

    assert kinds(load_grid("smoke")) == kinds(default) | kinds(load_grid("moe"))


def test_the_cpu_grid_is_tiny_and_has_two_sizes_on_every_axis() -> None:
    points = load_grid("cpu").points()
    assert 24 <= len(points) <= 80
    axes_of = {
        "gemm": "m n k",
        "attention_decode": "batch_size kv_len",
        "attention_prefill": "batch_size q_len kv_len",
        "moe": "num_tokens",
        "mla_decode": "batch_size kv_len",
    }
    for operator, axes in axes_of.items():
        for axis in axes.split():
            assert len({p.values[axis] for p in points if p.operator == operator}) > 1, (operator, axis)
    assert max(p.values.get("io_bytes", 0) for p in points) < 10e6


def test_a_group_may_name_its_models(tmp_path: Path) -> None:
    both = (
        MODELS[:-1] + ', { name = "b", heads = [8, 8, 128], hidden = 512, intermediate = 1024, vocab = 9 }]'
    )
    group = 'operator = "gemm"\ndtype = "bf16"\nshapes = "linear"\nm = 1\nmodels = '
    grid = grid_of(tmp_path, group + '["b"]', both)
    assert {(p.values["n"], p.values["k"]) for p in grid.points()} == set(
        shapes_of("linear", grid.models[1:])
    )
    with pytest.raises(MeasureError, match="unknown models 'c'; valid: a, b"):
        grid_of(tmp_path, group + '"c"', both)


def test_a_group_is_all_combinations_in_order(tmp_path: Path) -> None:
    points = grid_of(tmp_path, 'operator = "gemm"\ndtype = "bf16"\nm = [2, 1]\nn = [64, 32]\nk = 8').points()
    assert [(p.values["m"], p.values["n"], p.values["k"]) for p in points] == [
        (2, 64, 8), (2, 32, 8), (1, 64, 8), (1, 32, 8),
    ]  # fmt: skip
    assert {(p.priority, p.group) for p in points} == {(1, "g")}


def test_ranges(tmp_path: Path) -> None:
    m, k = "{ start = 3, stop = 25, factor = 2 }", "{ start = 1, stop = 6, step = 2 }"
    text = f'operator = "gemm"\ndtype = "bf16"\nm = {m}\nn = 8\nk = {k}'
    points = grid_of(tmp_path, text).points()
    assert sorted({p.values["m"] for p in points}) == [3, 6, 12, 24]
    assert sorted({p.values["k"] for p in points}) == [1, 3, 5]


def test_a_prefix_becomes_a_kv_len(tmp_path: Path) -> None:
    text = DECODE.replace("decode", "prefill").replace("kv_len = [64, 128]", "q_len = 16\nprefix = [0, 32]")
    text = text.replace("[1, 4]", "1") + "shapes = [[8, 2, 64]]"
    assert [p.values["kv_len"] for p in grid_of(tmp_path, text).points()] == [16, 48]


def test_limits_leave_points_out_and_count_them(tmp_path: Path) -> None:
    bounded = grid_of(tmp_path, f"{DECODE}shapes = [[8, 2, 64]]\nmax_kv_bytes = {4 * 64 * 2 * 2 * 64 * 2}")
    inside = [(p.values["batch_size"], p.values["kv_len"]) for p in bounded.points()]
    assert inside == [(1, 64), (1, 128), (4, 64)]
    assert bounded.groups[0].num_beyond_limits == 1
    tokens = grid_of(tmp_path, f"{DECODE}shapes = [[8, 2, 64]]\nmax_kv_tokens = 127")
    assert [(p.values["batch_size"], p.values["kv_len"]) for p in tokens.points()] == [(1, 64)]


def test_a_point_of_two_groups_belongs_to_the_more_important(tmp_path: Path) -> None:
    text = "".join(
        f'[[group]]\nname = "{name}"\npriority = {priority}\n{GEMM.replace("[1, 2]", str(m))}\n'
        for name, priority, m in (("late", 3, [1, 2]), ("first", 1, [2, 4]), ("second", 1, [4, 8]))
    )
    points = load_grid(write(tmp_path, f'title = "t"\n{text}')).points()
    assert [(p.values["m"], p.group, p.priority) for p in points] == [
        (1, "late", 3), (2, "first", 1), (4, "first", 1), (8, "second", 1),
    ]  # fmt: skip


def test_shapes_of_one_model(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, f'{DECODE}shapes = "heads"', f"tp = [1, 16]\n{MODELS}")
    heads = sizes(grid, "attention_decode", "num_q_heads", "num_kv_heads", "head_dim")
    assert heads == {(32, 8, 128), (2, 1, 128)}, "KV heads are replicated where there are fewer than GPUs"


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 6))
def test_a_share_of_a_model_is_at_least_its_part(kv: int, group: int, width: int, hidden: int) -> None:
    """Over tp GPUs the GEMMs hold the whole model's weights, and more only where KV heads are replicated."""
    kv_heads, tp_sizes = 2**kv, (1, 2, 4, 8)
    q_heads = kv_heads * 2 ** (group + 3 - kv) if group + 3 >= kv else kv_heads
    if q_heads % 8:
        return
    model = ModelShape("m", q_heads, kv_heads, 64, 64 * hidden, 1000, intermediate=8 * 2**width, tp=tp_sizes)
    whole = sum(n * k for n, k in model.linear(1))
    for tp in tp_sizes:
        held = tp * sum(n * k for n, k in model.linear(tp))
        replicas = max(1, tp // kv_heads)
        assert held == whole + 2 * (replicas - 1) * kv_heads * 64 * model.hidden
        n, _ = model.lm_head(tp)
        assert n % 64 == 0
        assert 1000 <= n * tp < 1000 + 64 * tp


def test_what_is_measured_has_a_table_in_fastroof() -> None:
    assert list(MEASURED) == [name for name in OPERATORS if name in MEASURED]
    for name, operator in MEASURED.items():
        assert operator.name == name
        assert set(operator.shape_columns) <= set(operator.given_columns())
        assert set(operator.defaults) | set(operator.choices) <= set(operator.given_columns())


def test_a_moe_model_has_a_router_and_no_dense_mlp() -> None:
    model = ModelShape("m", 32, 4, 128, 2048, 1000, experts=Experts(128, 8, 768), tp=(1, 8))
    assert model.linear(8) == [((4 + 2) * 128, 2048), (2048, 4 * 128), (128, 2048)]
    assert shapes_of("experts", [model]) == [(2048, 768, 8, 128, 1, 1), (2048, 768, 8, 128, 8, 1)]
    assert shapes_of("spread_experts", [model]) == [(2048, 768, 8, 128, 1, 1), (2048, 768, 8, 128, 1, 8)]
    few = ModelShape("m", 32, 4, 128, 2048, 1000, experts=Experts(12, 2, 768), tp=(1, 8))
    assert shapes_of("spread_experts", [few]) == [(2048, 768, 2, 12, 1, 1)], "12 experts do not divide by 8"
    dense = ModelShape("m", 32, 4, 128, 2048, 1000, intermediate=768, tp=(1, 8))
    assert shapes_of("experts", [dense]) == shapes_of("spread_experts", [dense]) == []
    assert shapes_of("activations", [model]) == [(96,), (768,)]


@given(st.sampled_from(["rmsnorm_residual", "rope", "silu_and_mul", "kv_write", "fp8_quantise", "copy"]),
       st.integers(1, 10**5), st.integers(1, 10**5))  # fmt: skip
def test_elementwise_bytes_are_tensors_read_and_written(kind: str, m: int, width: int) -> None:
    bf16, fp8 = 2 * m * width, m * width
    expected = {
        "rmsnorm_residual": 4 * bf16,
        "rope": 2 * bf16,
        "silu_and_mul": 3 * bf16,
        "kv_write": 2 * bf16,
        "fp8_quantise": bf16 + fp8,
        "copy": 2 * bf16,
    }
    assert elementwise_bytes(kind, m, width) == expected[kind]
