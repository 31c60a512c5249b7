"""``python -m fastroof.backends.serve.stdio_example``: a server on a pipe, asked step by step and in bulk."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Final

import numpy as np

from fastroof.backends.serve.client import StdioClient
from fastroof.errors import FastroofError
from fastroof.units import MS_PER_S, US_PER_S

STEPS: Final = 1_000_000


def seconds(call: Callable[[], object], times: int) -> float:
    """Median time of a call."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return median(took)


def main() -> None:
    """Print what a simulator in another process would see."""
    rng = np.random.default_rng(0)
    batch_size = rng.integers(1, 513, STEPS, dtype=np.int32)
    kv_len = rng.integers(2, 8193, STEPS, dtype=np.int32)
    with StdioClient(["llama-3.1-8b", "llama-3.1-70b,tp=4,dtype=fp8"]) as step:
        for number, name in enumerate(step.plan_names):
            decode_us = step.decode_us(64, 4096, plan=name)
            mixed_us = step.step_scalar([2048] + [1] * 64, [0] + [4095] * 64, plan=number)
            print(f"{name}: 64 decodes at kv_len 4096 take {decode_us:,.1f} us, ", end="")
            print(f"with a prompt of 2048 tokens {mixed_us:,.1f} us")
        try:
            step.decode_us(64, 0)
        except FastroofError as error:
            print(f"a wrong step: {type(error).__name__}: {error}")
        one_s = seconds(lambda: step.decode_us(64, 4096), 2000)
        bulk_s = seconds(lambda: step.decode_us(batch_size, kv_len), 7)
    print(f"one step a message: {one_s * US_PER_S:.1f} us to and fro")
    print(f"{STEPS:,} steps a message: {bulk_s * MS_PER_S:.1f} ms, {STEPS / bulk_s:,.3g} steps/s")


if __name__ == "__main__":
    main()
