r"""InferSim's method, reproduced: its table lookups, and its estimate of TTFT and TPOT.

Answers equal those of alibaba/InferSim@f2293da to the last bit, including its questionable choices:
1024 GFLOP/s in a TFLOP/s, GiB instead of GB, measured MFUs applied to other sizes, silent defaults. The
measured tables are read once, and lookups take arrays.

Examples
--------
>>> from fastroof.compat import infersim
>>> text = "m,k,n,latency_us,mfu\n16,4096,6144,60.5,0.1234\n"
>>> tables = infersim.read_files({"gemm/h20/data.csv": text})
>>> infersim.gemm_mfu(tables, "H20", 20, 4096, 6144)
0.123
"""

from __future__ import annotations

from fastroof.compat.infersim.estimate import evaluate
from fastroof.compat.infersim.lookups import (
    attn_decode_mfu,
    attn_prefill_mfu,
    gdn_latency_us,
    gemm_mfu,
    grouped_gemm_mfu,
)
from fastroof.compat.infersim.model import GPUS, InfersimGpu
from fastroof.compat.infersim.tree import InfersimTables, load, read_files

__all__ = [
    "GPUS",
    "InfersimGpu",
    "InfersimTables",
    "attn_decode_mfu",
    "attn_prefill_mfu",
    "evaluate",
    "gdn_latency_us",
    "gemm_mfu",
    "grouped_gemm_mfu",
    "load",
    "read_files",
]
