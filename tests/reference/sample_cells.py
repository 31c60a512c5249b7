"""A row of the sample of aiconfigurator-core, made by hand, and files of such rows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

CELL: Final = {
    "id": "x_h100_sxm_vllm_agg_1024x128_c16_tp2_1", "silicon_data_source": "source_file=/data/x.csv",
    "backend": "vllm", "backend_version": "0.12.0", "model_path": "Qwen/Qwen3-32B", "system": "h100_sxm",
    "precision": "", "mode": "agg", "isl": "1024", "osl": "128", "gemm_quant_mode": "", "batch_size": "16",
    "tp_size": "2", "pp_size": "1", "attention_dp_size": "1", "moe_tp_size": "1", "moe_ep_size": "1",
    "silicon_ttft_ms": "90.5", "silicon_tpot_ms": "12.25", "prefill_num_workers": "",
    "prefill_tp_size": "", "prefill_attention_dp_size": "", "prefill_moe_ep_size": "",
    "decode_num_workers": "", "decode_tp_size": "", "decode_pp_size": "", "decode_attention_dp_size": "",
    "decode_moe_ep_size": "", "decode_batch_size": "",
}  # fmt: skip
"""A run of a dense model behind NVIDIA Dynamo."""

DATED: Final = {
    "silicon_data_source": "source_file=2026-03-01.csv;silicon_concurrency=64;measured=2026-02-20",
    "model_path": "openai/gpt-oss-120b", "precision": "fp4", "gemm_quant_mode": "nvfp4",
}  # fmt: skip
"""What a run of InferenceMAX has in their place, of a mixture of experts."""


def sample_file(folder: Path, *changes: dict[str, str]) -> Path:
    """Write a sample whose rows are :data:`CELL` with these changes."""
    path = folder / "sample.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(CELL))
        writer.writeheader()
        writer.writerows(CELL | change for change in changes)
    return path
