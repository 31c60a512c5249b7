"""A sweep's spec: what it expands to, and all errors reported at once."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import SweepError
from fastroof.models import execution, load_model, model_names
from fastroof.operators import operator
from fastroof.ranges import MAX_NUMBERS, expand_sizes
from fastroof.sweep import StepSpec, load_spec, run_sweep
from fastroof.sweep.steps import spec as spec_module

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"models": ["llama-3.1-8b"], "batch_size": [1, 8], "kv_len": [128]}


def refused(**changes: Any) -> str:
    with pytest.raises(SweepError) as caught:
        load_spec({**SMALL, **changes})
    return str(caught.value)


def test_the_packaged_spec_is_the_main_job() -> None:
    spec = load_spec()
    assert set(spec.models) <= set(model_names())
    assert len(spec.models) == 15
    assert spec.tp == (1, 2, 4, 8)
    assert spec.dtype == ("bf16", "fp8")
    assert spec.batch_size == tuple(range(1, 513))
    assert len(spec.kv_len) > 512
    assert spec.kv_len[-1] == 131072
    # every power of two is met exactly, the summary's length too
    assert {2**i for i in range(7, 18)} <= set(spec.kv_len)
    assert spec.report_kv_len in spec.kv_len
    assert spec.tpot_ms == 50.0


def test_defaults() -> None:
    spec = load_spec(SMALL)
    assert (spec.gpu, spec.tp, spec.dtype, spec.kv_dtype) == ("h100", (1,), ("auto",), ("auto",))
    assert (spec.tpot_ms, spec.keep, spec.report_kv_len) == (None, "best", 4096)
    assert load_spec(spec) is spec


def test_json_of_a_spec_loads_as_the_same_spec() -> None:
    spec = load_spec({**SMALL, "kv_len": {"start": 100, "stop": 900, "factor": 1.5}, "tpot_ms": 20})
    assert load_spec(json.loads(spec.model_dump_json())) == spec


@pytest.mark.parametrize(
    ("given_", "expanded"),
    [
        (7, (7,)),
        ([8, 1, 8], (1, 8)),
        (range(1, 4), (1, 2, 3)),
        (np.array([2, 1]), (1, 2)),
        ({"start": 1, "stop": 10, "step": 4}, (1, 5, 9)),
        ({"start": 5, "stop": 5, "step": 1}, (5,)),
        ({"start": 1, "stop": 8, "factor": 2}, (1, 2, 4, 8)),
        ({"start": 10, "stop": 40, "factor": 1.5}, (10, 15, 22, 34)),
        ({"start": 1, "stop": 100, "factor": 1000}, (1,)),
        ({"start": 10, "stop": 20, "num": 3}, (10, 15, 20)),
        ({"start": 1, "stop": 3, "num": 9, "scale": "linear"}, (1, 2, 3)),
        ({"start": 128, "stop": 2048, "num": 5, "scale": "log2"}, (128, 256, 512, 1024, 2048)),
    ],
)
def test_sizes(given_: Any, expanded: tuple[int, ...]) -> None:
    assert expand_sizes(given_, 4096) == expanded


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(2, 300), st.sampled_from(["linear", "log2"]))
def test_a_grid_keeps_its_ends_and_rises(start: int, more: int, num: int, scale: str) -> None:
    sizes = expand_sizes({"start": start, "stop": start + more, "num": num, "scale": scale}, 10_000)
    assert (sizes[0], sizes[-1]) == (start, start + more)
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert len(sizes) <= num


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "the list is empty"),
        ("64", "got '64', need a whole number, a list"),
        (None, "got None, need"),
        ([1, 0, -3], "got 0 at position 1, -3 at position 2, need whole numbers from 1 to 65,536"),
        ([1.0], "got 1.0 at position 0"),
        ([True, 1], "got True at position 0"),
        ([0] * 9, "and 6 more"),
        (70_000, "got 70000 at position 0"),
        ({"start": 9, "stop": 2, "step": 1}, "the range is empty: start 9 is above stop 2"),
        ({"start": 0, "stop": 2, "step": 1}, "start must be a whole number from 1 to 65,536, got 0"),
        ({"start": 1, "stop": 2, "step": 0}, "step must be a whole number of at least 1, got 0"),
        ({"start": 1, "stop": 2, "num": 1}, "num must be a whole number of at least 2, got 1"),
        ({"start": 1, "stop": 2, "factor": 1}, "factor must be a number above 1"),
        ({"start": 1, "stop": 2, "factor": float("nan")}, "got nan"),
        ({"start": 1, "stop": 2, "factor": 10**400}, "factor must be"),
        ({"start": 1, "stop": 2}, "need one of step, factor, num, got none"),
        ({"start": 1, "stop": 2, "num": 2, "step": 1}, "got step and num"),
        ({"start": 1, "stop": 2, "step": 1, "scale": "log2"}, "scale needs num"),
        ({"start": 1, "stop": 2, "num": 2, "scale": "log"}, "scale must be linear or log2, got 'log'"),
        ({"start": 1, "end": 2, "step": 1}, "unknown key 'end'; stop is missing"),
        ({"start": 1, "stop": 60_000, "num": 10**15}, "1,000,000,000,000,000 values are too many"),
        ({"start": 1, "stop": 60_000, "factor": 1.0000001}, "are too many, at most 1,048,576"),
    ],
)
def test_wrong_sizes_are_named(value: Any, message: str) -> None:
    answer = refused(batch_size=value)
    assert answer.startswith("sweep spec: batch_size: ")
    assert message in answer


def test_a_list_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="1,048,577 values are too many"):
        expand_sizes(range(1, MAX_NUMBERS + 2), 2**28)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": [1, 3]}, "tp: got 3, need some of 1, 2, 4, 8"),
        ({"tp": [True]}, "tp: got True, need some of 1, 2, 4, 8"),
        ({"tp": [1.0]}, "tp: got 1.0, need"),
        ({"dtype": "fp16"}, "dtype: got 'fp16', need some of auto, bf16, fp8, fp8_block"),
        ({"kv_dtype": []}, "kv_dtype: the list is empty"),
        ({"gpu": "h101"}, "gpu: unknown GPU 'h101'"),
        ({"gpu": 100}, "gpu: got 100, need a GPU's name"),
        ({"models": []}, "models: the list is empty"),
        ({"models": [3]}, "models: got 3, need model names"),
        ({"models": ["llama-3.1-8b", "meta-llama/Llama-3.1-8B"]}, "are both called llama-3.1-8b"),
        ({"engine": "vlm"}, "engine: unknown engine 'vlm'; did you mean vllm?"),
        ({"method": "cubic"}, "method: got 'cubic', need one of roofline"),
        ({"tpot_ms": 0}, "tpot_ms: got 0, need a number of ms above 0"),
        ({"tpot_limit_ms": 50}, "tpot_limit_ms: unknown key; did you mean tpot_ms? "),
        ({"tpot_ms": float("inf")}, "tpot_ms: got inf"),
        ({"tpot_ms": True}, "tpot_ms: got True"),
        ({"report_kv_len": 0}, "report_kv_len: got 0, need a whole number from 1"),
        ({"keep": "some"}, "keep: got 'some', need 'best' or 'all'"),
        ({"batchsize": 3}, "batchsize: unknown key; did you mean batch_size? the keys are models, tables"),
        ({1: 3}, "1: unknown key; the keys are"),
    ],
)
def test_wrong_values_are_named(changes: dict[Any, Any], message: str) -> None:
    with pytest.raises(SweepError) as caught:
        load_spec({**SMALL, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_errors_are_reported_at_once() -> None:
    answer = refused(models=["llama-9", "llama-3.1-8b", "gpt-5"], tp=3, kv_len=[], tensor=1, keep="x")
    assert re.findall(r"(?:^sweep spec: |; )(keep|kv_len|models|tensor|tp): ", answer) == [
        "keep", "kv_len", "models", "tensor", "tp",
    ]  # fmt: skip
    assert "\n" not in answer
    assert "'llama-9'" in answer
    assert "'gpt-5'" in answer
    assert "`fastroof models` lists all" in answer


def test_many_wrong_models_are_cut_short() -> None:
    answer = refused(models=[f"nobody-{i}" for i in range(15)])
    assert "'nobody-9'" in answer
    assert "'nobody-10'" not in answer
    assert "and 5 more" in answer


def test_what_is_missing_is_named() -> None:
    with pytest.raises(SweepError) as caught:
        load_spec({})
    for key in ("models", "batch_size", "kv_len"):
        assert f"{key}: missing, need a list" in str(caught.value)


def test_absurd_counts_are_refused_before_anything_is_made() -> None:
    wide = {"start": 1, "stop": 60_000, "step": 1}
    long = {"start": 1, "stop": 1_000_000, "step": 1}
    answer = refused(models=load_spec().models, tp=[1, 2, 4, 8], batch_size=wide, kv_len=long)
    assert "3,600,000,000,000 evaluations are too many, at most 100,000,000,000" in answer
    assert "15 models x 4 tp x 1 dtype x 1 kv_dtype x 60,000 batch_size x 1,000,000 kv_len" in answer
    assert "cut kv_len to 27,777 values" in answer


def test_too_many_rows_are_refused() -> None:
    wide = {"start": 1, "stop": 50_000, "step": 1}
    kv_len = {"start": 1, "stop": 1000, "step": 1}
    assert load_spec({**SMALL, "batch_size": wide, "kv_len": kv_len}).keep == "best"
    answer = refused(batch_size=wide, kv_len=kv_len, keep="all")
    assert "50,000,000 rows are too many, at most 20,000,000" in answer
    assert "cut batch_size to 20,000 values, or keep = 'best'" in answer
    long = {"start": 1, "stop": 1_000_000, "step": 1}
    answer = refused(models=load_spec().models, tp=[1, 2, 4, 8], kv_len=long)
    assert "60,000,000 rows are too many" in answer


def test_nothing_short_enough_is_suggested_where_one_key_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec_module, "MAX_EVALUATIONS", 3)
    assert "cut batch_size and the next longest" in refused(batch_size=[1, 2, 3], kv_len=[1, 2], tp=[1, 2])


def test_constants_are_the_plans() -> None:
    from fastroof.compiled.request_sums import MAX_KV_LEN
    from fastroof.plan import options as plan

    assert execution.DTYPES == execution.DTYPES
    assert execution.KV_DTYPES == execution.KV_DTYPES
    assert spec_module.MAX_KV_LEN == MAX_KV_LEN
    assert spec_module.MAX_BATCH_SIZE <= plan.MAX_STEP_SIZE
    assert StepSpec.model_fields["method"].annotation.__args__ == operator.METHODS  # type: ignore[union-attr]


def test_a_file_is_read_and_paths_are_relative_to_it(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    path = tmp_path / "my.toml"
    path.write_text(
        'models = ["./tiny", "llama-2-7b"]\nbatch_size = 4\nkv_len = [1, 2]\ntables = "../elsewhere"\n'
    )
    spec = load_spec(str(path))
    assert load_model(spec.models[0]).name == "tiny"
    assert spec.models[1] == "llama-2-7b"
    assert Path(str(spec.tables)) == tmp_path / ".." / "elsewhere"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"models = [", "is not TOML: "),
        (b"\xff\xfe", "is not TOML: "),
        (b"models = 3\n", "my.toml: batch_size: missing, need"),
        (b"tp = 1\nmodels = 3\n", "; line 2: models: got 3"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    with pytest.raises(SweepError) as caught:
        load_spec(path)
    assert message in str(caught.value)
    assert "my.toml" in str(caught.value)


def test_an_error_of_an_option_names_no_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('models = ["llama-3.1-8b"]\nbatch_size = 1\nkv_len = "x"\ntp = 3')
    with pytest.raises(SweepError, match=r"my.toml, line 3: kv_len: got 'x'.*; line 4: tp: got 3"):
        load_spec(path)
    with pytest.raises(SweepError, match=r"my.toml: tp: got 5, .*; line 3: kv_len"):
        load_spec(path, {"tp": 5})


def test_no_file_and_no_spec_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"none\.toml cannot be read \(No such file"):
        load_spec(tmp_path / "none.toml")
    with pytest.raises(SweepError, match="cannot be read"):
        load_spec(tmp_path)
    with pytest.raises(SweepError, match="a dict or the path of a TOML file, got int"):
        load_spec(3)  # type: ignore[arg-type]


def test_a_spec_is_checked_without_numba() -> None:
    code = "import sys, fastroof.sweep as s; s.load_spec(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert {"numba", "torch", "pyarrow"}.isdisjoint(done.stdout.split())


def quantised_model(tmp_path: Path, name: str, quantisation: dict[str, Any] | None) -> str:
    config = json.loads((files("fastroof.models") / "presets" / "qwen3-8b.json").read_text())
    folder = tmp_path / name
    folder.mkdir()
    own = {} if quantisation is None else {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config | own))
    return str(folder)


def test_auto_is_each_models_own_format_and_no_format_comes_twice(tmp_path: Path) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensor = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    models = [
        quantised_model(tmp_path, name, quantisation)
        for name, quantisation in (("plain", None), ("block", block), ("tensor", tensor))
    ]
    spec = StepSpec.model_validate(
        {"models": models, "batch_size": [1], "kv_len": [1024], "dtype": ["auto", "bf16", "fp8"]}
    )
    formats = [tuple(one[:2] for one in spec.formats(model, spec.gpu)) for model in models]
    assert formats == [
        (("bf16", "bf16"), ("fp8", "bf16")),
        (("fp8_block", "bf16"), ("bf16", "bf16"), ("fp8", "bf16")),
        (("fp8", "fp8"), ("bf16", "fp8")),
    ]


def test_rows_of_a_sweep_name_the_format_that_auto_stands_for(tmp_path: Path) -> None:
    model = quantised_model(tmp_path, "block", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    spec = {"models": [model], "batch_size": [1, 8], "kv_len": [1024]}
    run_sweep(spec, tmp_path / "auto.jsonl")
    run_sweep({**spec, "dtype": "fp8_block", "kv_dtype": "bf16"}, tmp_path / "named.jsonl")
    rows = [(tmp_path / f"{name}.jsonl").read_text() for name in ("auto", "named")]
    assert '"fp8_block"' in rows[0]
    assert rows[0] == rows[1]


def test_unmeasured_kernels_are_skipped_or_modelled(tmp_path: Path) -> None:
    spec = {"models": ["llama-3.1-8b"], "dtype": "int8", "batch_size": [1, 8], "kv_len": [1024]}
    with pytest.raises(SweepError, match="no gemm table of dtype int8; measured: bf16, fp8, fp8_block"):
        run_sweep(spec, tmp_path / "measured.jsonl")
    run_sweep({**spec, "allow_modelled": True}, tmp_path / "modelled.jsonl")
    row = json.loads((tmp_path / "modelled.jsonl").read_text().splitlines()[-1])
    assert (row["dtype"], row["origin"]) == ("int8", "modelled")


def test_weight_only_kernels_are_modelled_unasked(tmp_path: Path) -> None:
    model = quantised_model(tmp_path, "awq", {"quant_method": "awq", "bits": 4, "group_size": 128})
    run_sweep({"models": [model], "batch_size": [1, 8], "kv_len": [1024]}, tmp_path / "awq.jsonl")
    row = json.loads((tmp_path / "awq.jsonl").read_text().splitlines()[-1])
    assert (row["dtype"], row["origin"]) == ("int4_wo", "modelled")
