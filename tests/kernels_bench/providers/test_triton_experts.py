"""Triton's experts in its interpreter on the CPU, against the float64 reference."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is optional: pip install torch")

from kernels_bench.protocol import Point
from kernels_bench.providers import torch_provider
from kernels_bench.providers.device import CPU_DEVICE, Device
from kernels_bench.providers.torch_provider import TorchProvider

SCRIPT = """
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
# The interpreter cuts instead of rounding to bf16, loses carries in rounding to fp8, and multiplies bf16's
# bits as if they were integers: all three are done right here.
convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

def converted(values, of, to, rounding):
    if (of, to) == (tl.float32, tl.bfloat16):
        return torch.tensor(values).bfloat16().view(torch.uint16).numpy()
    if (of, to) == (tl.float32, tl.float8e4nv):
        return torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return convert(values, of, to, rounding)

def multiplied(self, a, b, *rest):
    def single(x):
        if x.dtype != tl.bfloat16:
            return x
        bits = x.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
    return dot(self, single(a), single(b), *rest)

interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = converted, multiplied

from kernels_bench.protocol import Point
from kernels_bench.providers.device import Device
from kernels_bench.providers.triton_experts import prepare_triton_experts
from kernels_bench.run.check import check_result
LAYER = {"hidden": 256, "intermediate": 256, "topk": 2, "num_experts": 8, "moe_tp": 2, "moe_ep": 1,
         "distribution": "power_law_1.2"}
for dtype in ("bf16", "fp8", "fp8_block"):
    odd = {"hidden": 384} if dtype == "fp8_block" else {"hidden": 320, "intermediate": 144}
    for tokens, changes in ((1, {}), (19, {}), (150, {"moe_ep": 2}), (9, odd)):
        point = Point("moe", {"dtype": dtype, **LAYER, **changes, "num_tokens": tokens})
        check = check_result(point, prepare_triton_experts(point, Device("cpu", 300_000), 1, 10**9))
        print(dtype, tokens, changes, check.error, check.passed)
"""


@pytest.mark.slow
def test_experts_in_every_format_match_their_reference():
    pytest.importorskip("triton", reason="triton is optional: it comes with torch for CUDA")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "False" not in found.stdout, found.stdout
    assert found.stdout.count("True") == 12


def test_what_is_for_triton_and_where(monkeypatch):
    monkeypatch.setattr(torch_provider, "_triton_version", lambda: "3.7")

    def refuses(device, **changes):
        layer = {
            "dtype": "fp8_block", "hidden": 256, "intermediate": 256, "topk": 2, "num_experts": 8,
            "moe_tp": 1, "moe_ep": 1, "distribution": "balanced", "num_tokens": 4,
        }  # fmt: skip
        return TorchProvider(device).refuses(Point("moe", {**layer, **changes})) or ""

    hopper = Device("cuda", 50_000_000, (9, 0))
    assert refuses(hopper) == refuses(hopper, dtype="fp8") == refuses(hopper, dtype="bf16") == ""
    assert "needs a GPU" in refuses(CPU_DEVICE)
    assert "8.9" in refuses(Device("cuda", 0, (8, 0)))
    assert "blocks of 128" in refuses(hopper, intermediate=320)
    assert "no mxfp4 experts" in refuses(hopper, dtype="mxfp4")
    monkeypatch.setattr(torch_provider, "_triton_version", lambda: "")
    assert "needs triton" in refuses(hopper)
