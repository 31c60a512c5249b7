"""Grids that cannot be: every error names the file, the group and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastroof.errors import MeasureError
from kernels_bench.grid.grid import load_grid

GEMM = 'operator = "gemm"\ndtype = "bf16"\nm = [1, 2]\nn = 64\nk = 32'
DECODE = 'operator = "attention_decode"\nkv_dtype = "bf16"\nbatch_size = [1, 4]\nkv_len = [64, 128]\n'
MODELS = 'models = [{ name = "a", heads = [32, 8, 128], hidden = 4096, intermediate = 14336, vocab = 1000 }]'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


BAD = {
    "unknown key": (GEMM + "\nkk = 1", "line 10: group 1: unknown key 'kk'"),
    "close key": (DECODE + "shapes = [[8, 2, 64]]\nbatch_sise = 1", "did you mean batch_size?"),
    "missing axis": ('operator = "gemm"\ndtype = "bf16"\nm = 1\nn = 8', "line 2: group 1: k is missing"),
    "missing operator": ("m = 1", "line 2: group 1: operator is missing"),
    "unknown operator": ('operator = "conv"', "unknown operator 'conv'; valid: gemm"),
    "unknown dtype": (GEMM.replace("bf16", "fp3"), "unknown dtype 'fp3'; did you mean fp8? (valid: bf16"),
    "text for a size": (GEMM.replace("64", '"64"'), "n is invalid: got '64', need a whole number"),
    "fraction": (GEMM.replace("64", "64.0"), "got 64.0"),
    "bool": (GEMM.replace("64", "true"), "got True"),
    "zero": (GEMM.replace("64", "0"), "need whole numbers from 1 to"),
    "too large": (GEMM.replace("64", str(2**50)), "need whole numbers from 1 to"),
    "empty list": (GEMM.replace("[1, 2]", "[]"), "line 7: group 1: m is invalid: the list is empty"),
    "nested list": (GEMM.replace("[1, 2]", "[[1], 2]"), "got [1]"),
    "number for a text": (GEMM.replace('"bf16"', "16"), "dtype must be text, or a list of texts, got 16"),
    "range key": (GEMM.replace("[1, 2]", "{ start = 1, stop = 4, by = 2 }"), "invalid: unknown key 'by'"),
    "range pace": (GEMM.replace("[1, 2]", "{ start = 1, stop = 4 }"), "need one of step, factor, num"),
    "range order": (GEMM.replace("[1, 2]", "{ start = 5, stop = 4, step = 1 }"), "start 5 is above stop 4"),
    "range factor": (GEMM.replace("[1, 2]", "{ start = 1, stop = 4, factor = 1 }"), "factor must be"),
    "range length": (
        GEMM.replace("[1, 2]", "{ start = 1, stop = 99000000, step = 1 }"), "at most 1,000,000"
    ),
    "too many": (
        GEMM.replace("[1, 2]", "{ start = 1, stop = 2000, step = 1 }")
        .replace("n = 64", "n = { start = 1, stop = 2000, step = 1 }"), "4,000,000 combinations"
    ),
    "limit of another operator": (GEMM + "\nmax_kv_bytes = 1e9", "unknown key 'max_kv_bytes'"),
    "limit not a number": (DECODE + 'shapes = [[8, 2, 64]]\nmax_kv_bytes = "1e9"', "got '1e9'"),
    "limit infinite": (DECODE + "shapes = [[8, 2, 64]]\nmax_kv_bytes = inf", "from 1 to 1e+18, got inf"),
    "limits leave nothing": (DECODE + "shapes = [[8, 2, 64]]\nmax_kv_bytes = 1", "leave none of its 4"),
    "heads not divisible": (DECODE + "shapes = [[30, 8, 64]]", "num_q_heads 30 is not divisible"),
    "short shape": (DECODE + "shapes = [[32, 8]]", "shapes must be [num_q_heads, num_kv_heads, head_dim]"),
    "no shapes": (DECODE + "shapes = []", "shapes is empty"),
    "shapes of another operator": (DECODE + 'shapes = "linear"', "unknown shapes 'linear'; valid are heads"),
    "shapes without models": (DECODE + 'shapes = "heads"', "finds none in the grid's 0 models"),
    "shape twice": (DECODE + "shapes = [[8, 2, 64]]\nhead_dim = 64", "head_dim is given twice"),
    "kv_len of a prefill": (
        DECODE.replace("decode", "prefill") + "shapes = [[8, 2, 64]]\nq_len = 8\nprefix = 0",
        "unknown key 'kv_len'",
    ),
    "topk": (
        'operator = "moe"\ndtype = "bf16"\nshapes = [[64, 64, 9, 8, 1, 1]]\nnum_tokens = 1',
        "topk 9 is above num_experts 8",
    ),
    "models of listed shapes": (
        'operator = "gemm"\ndtype = "bf16"\nshapes = [[64, 64]]\nmodels = ["tiny"]\nm = 1',
        "so models are not used",
    ),
    "an unknown model": (
        'operator = "gemm"\ndtype = "bf16"\nshapes = "linear"\nmodels = ["tiny"]\nm = 1',
        "finds none in the grid's 0 models",
    ),
    "moe_tp": (
        'operator = "moe"\ndtype = "bf16"\nshapes = [[64, 60, 2, 8, 8, 1]]\nnum_tokens = 1',
        "intermediate 60 is not divisible by moe_tp 8",
    ),
    "kind": ('operator = "elementwise"\nkind = "gelu"\nm = 1\nwidth = 8', "unknown kind 'gelu'; valid are"),
    "copy of rows": ('operator = "elementwise"\nkind = "copy"\nm = 2\nwidth = 8', "a copy has one row"),
    "wide launch": ('operator = "elementwise"\nkind = "launch"\nm = 1\nwidth = 8', "an empty launch"),
    "io_bytes": (
        'operator = "elementwise"\nkind = "copy"\nm = 1\nwidth = 8\nio_bytes = 1',
        "unknown key 'io_bytes'",
    ),
    "priority": (GEMM + "\n", "line 4: group 1: priority must be a whole number from 0 to 99, got -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_group_names_the_file_the_group_and_the_key(tmp_path: Path, case: str) -> None:
    text, message = BAD[case]
    priority = -1 if case == "priority" else 1
    path = write(tmp_path, f'title = "t"\n[[group]]\nname = "g1"\npriority = {priority}\n{text}')
    with pytest.raises(MeasureError) as caught:
        load_grid(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "line " in str(caught.value)
    assert "group 1: " in str(caught.value)


BAD_MODELS = {
    "tp does not divide heads": (MODELS.replace("[32, 8", "[28, 4"), "tp 8 does not divide num_q_heads 28"),
    "tp does not divide the MLP": (MODELS.replace("14336", "14332"), "tp 8 does not divide MLP width 14332"),
    "tp and KV heads": (MODELS.replace("[32, 8", "[96, 6"), "tp 8 neither divides num_kv_heads 6"),
    "heads": (MODELS.replace("[32, 8", "[32, 6"), "num_q_heads 32 is not divisible by num_kv_heads 6"),
    "two heads": (MODELS.replace(", 128]", "]"), "heads must be [num_q_heads, num_kv_heads, head_dim]"),
    "no heads": (MODELS.replace("heads = [32, 8, 128], ", ""), "heads is missing"),
    "no hidden": (MODELS.replace("hidden = 4096, ", ""), "line 3: models 1: hidden is missing"),
    "no MLP": (MODELS.replace("intermediate = 14336, ", ""), "need either intermediate"),
    "both MLPs": (MODELS.replace("vocab", "experts = [8, 2, 64], vocab"), "need either intermediate"),
    "experts": (
        MODELS.replace("intermediate = 14336", "experts = [8, 9, 64]"), "topk 9 is above num_experts 8"
    ),
    "unknown key": (MODELS.replace("vocab", "vocabulary = 1, vocab"), "unknown key 'vocabulary'"),
    "twice": (MODELS.replace("}]", "}, " + MODELS[len("models = ["):]), "models has 'a' more than once"),
    "no table": ("models = [3]", "line 3: models 1: must be a table, got 3"),
    "no list": ("models = 3", "models must be a list of tables"),
    "tp": ("tp = 0\n" + MODELS, "line 2: tp is invalid: got 0"),
    "title": ("title = 3", "title must be text"),
    "unknown": ("name = 3", "unknown key 'name'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_model_is_refused(tmp_path: Path, case: str) -> None:
    top, message = BAD_MODELS[case]
    tp = "" if case == "tp" else "tp = [1, 8]\n"
    title = "" if case == "title" else 'title = "t"\n'
    path = write(tmp_path, f'{title}{tp}{top}\n[[group]]\nname = "g"\npriority = 1\n{GEMM}')
    with pytest.raises(MeasureError) as caught:
        load_grid(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_invalid_grid(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="is not TOML"):
        load_grid(write(tmp_path, "title = "))
    with pytest.raises(MeasureError, match=r"has no \[\[group\]\]"):
        load_grid(write(tmp_path, 'title = "t"'))
    with pytest.raises(
        MeasureError, match=r"cannot be read: No such file.*cpu, first_run, h100, moe, rotation"
    ):
        load_grid(tmp_path / "none.toml")
    with pytest.raises(MeasureError, match="cannot be read: Is a directory"):
        load_grid(tmp_path)
    with pytest.raises(MeasureError, match="cannot be read: File name too long"):
        load_grid("a" * 5000)
    (tmp_path / "bytes.toml").write_bytes(b"title = '\xff'")
    with pytest.raises(MeasureError, match="is not TOML"):
        load_grid(tmp_path / "bytes.toml")
    group = f'[[group]]\nname = "g"\npriority = 1\n{GEMM}\n'
    with pytest.raises(MeasureError, match="group has 'g' more than once"):
        load_grid(write(tmp_path, f'title = "t"\n{group * 2}'))
