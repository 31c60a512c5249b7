"""Small packages laid out as aisimulate is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

RUN = {"framework": "VLLM", "version": "0.24.0", "device": "NVIDIA H100 80GB HBM3"}
GEMM = RUN | {"kernel_source": "cublas", "gemm_dtype": "bfloat16", "m": 1, "n": 8, "k": 16, "latency": 0.0025}
ATTENTION = RUN | {
    "kernel_source": "fa3", "batch_size": 2, "isl": 1, "num_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "beam_width": 1, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
    "step": 1023, "window_size": 0, "latency": 0.015,
}  # fmt: skip
MOE = RUN | {
    "kernel_source": "triton", "moe_dtype": "bfloat16", "num_tokens": 4, "hidden_size": 4096,
    "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 2, "moe_ep_size": 4,
    "distribution": "power_law_1.2", "latency": 0.5,
}  # fmt: skip
ALLREDUCE = RUN | {
    "kernel_source": "vLLM_custom_graph", "allreduce_dtype": "bfloat16", "num_gpus": 2,
    "message_size": 1024, "latency": 0.0045, "backend": "vllm_graph",
}  # fmt: skip
NCCL = {
    "framework": "TRTLLM", "version": "2.29.2", "device": "NVIDIA H100 80GB HBM3", "kernel_source": "NCCL",
    "op_name": "all_reduce", "nccl_dtype": "half", "num_gpus": 4, "message_size": 512, "latency": 0.0155,
}  # fmt: skip
QUANTISE = RUN | {"kernel_source": "static", "m": 2, "k": 4096, "quant_dtype": "fp8", "latency": 0.002}

FILES = {
    "gemm": "gemm/vllm/0.24.0/gemm_perf",
    "context": "attention/vllm/0.24.0/context_attention_perf",
    "generation": "attention/vllm/0.24.0/generation_attention_perf",
    "moe": "moe/vllm/0.24.0/moe_perf",
    "allreduce": "comm/vllm/0.24.0/custom_allreduce_perf",
    "nccl": "comm/nccl/2.27.3/nccl_perf",
    "quantise": "quantize/vllm/0.24.0/scale_matrix_perf",
}


def package(root: Path, system: str = "h100_sxm", **files: list[dict[str, Any]]) -> Path:
    """Write a package that holds these rows, and a GEMM row where none is given.

    Files are families above, or their paths.
    """
    systems = root / "aisimulate_core" / "systems"
    for family, rows in ({"gemm": [GEMM]} | files).items():
        path = systems / "data" / system / f"{FILES.get(family, family)}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    (systems / f"{system}.yaml").write_text("gpu:\n  mem_bw: 1\nmisc:\n  nccl_version: '2.27.3'\n")
    (root / "aisimulate_core" / "__init__.py").touch()
    (root / "aisimulate-0.9.1.dist-info").mkdir(exist_ok=True)
    return root / "aisimulate_core"


LARGE = {"m": 4096, "n": 8192, "k": 8192, "latency": 0.4}
OF_SGLANG = {
    "gemm/sglang/0.5.14/gemm_perf": [GEMM, GEMM | LARGE],
    "moe/sglang/0.5.14/moe_perf": [MOE],
    "moe/sglang/0.5.10/moe_perf": [MOE, MOE | {"topk": 4}],
    "gemm/sglang/0.5.10/gemm_perf": [GEMM],
}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a small package that measured a B300 and an H100, for this test and its processes.

    Tables are imported into the folder that is returned, which is not there yet.
    """
    site = folder / "site"
    package(site, "b300_sxm", generation=[ATTENTION], nccl=[NCCL], **OF_SGLANG)
    systems = package(site, "h100_sxm", allreduce=[ALLREDUCE]) / "systems"
    (systems / "query_versions.yaml").write_text(
        'defaults:\n  vllm: {current: "0.24.0"}\n  sglang: {current: "0.5.14"}\n'
    )
    # another test may have loaded the one that is installed, and its successor would come first
    monkeypatch.delitem(sys.modules, "aisimulate_core", raising=False)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("FASTROOF_TABLES", str(folder / "tables"))
    monkeypatch.delenv("FASTROOF_TABLES_IMPORT")
    return folder / "tables"
