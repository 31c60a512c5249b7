"""Roofline V2 of the simulator inference-sim, reproduced to the last bit.

It reads the ``mfu`` columns of a bench_data tree, not the latencies. Unmeasured cells count as an MFU of 0
and take part in interpolation; decode attention averages MFUs, not times; GEMMs are looked up unsplit and
divided by tp. The reference is its Go program at commit 487017bc.

Examples
--------
>>> tables = tables_of(
...     gemm={"m": [8, 4096], "k": [4096, 4096], "n": [4096, 4096], "mfu": [0.01, 0.6]},
...     prefill={"32-8-128": {"seq_len": [1024, 4096], "mfu": [0.2, 0.6]}},
...     decode={("32-8-128", 1): {"batch_size": [1, 1], "kv_len": [1024, 4096], "mfu": [0.01, 0.02]}},
... )
>>> prefill_mfu(tables, "32-8-128", [512, 1024, 2560]).round(9).tolist()
[0.2, 0.2, 0.4]
>>> model = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
...          "num_key_value_heads": 8, "intermediate_size": 14336, "bytes_per_param": 2}
>>> hardware = {"TFlopsPeak": 989.5, "BwPeakTBs": 3.35, "bwEfficiencyFactor": 0.82, "perLayerOverhead": 100}
>>> step_us(tables, model, hardware, 1, [([(0, 512)], [1000, 2000]), ([], [4096] * 8)]).round().tolist()
[90880.0, 15354.0]
"""

from fastroof.compat.roofline_v2.steps import StepRequests, step_parts, step_us
from fastroof.compat.roofline_v2.tables import (
    RooflineV2Tables,
    decode_mfu,
    gemm_mfu,
    load,
    nearest_attention,
    prefill_mfu,
    tables_of,
)

__all__ = [
    "RooflineV2Tables",
    "StepRequests",
    "decode_mfu",
    "gemm_mfu",
    "load",
    "nearest_attention",
    "prefill_mfu",
    "step_parts",
    "step_us",
    "tables_of",
]
