"""A server of two plans, and a client that asks it how much fits.

Run it as ``python -m fastroof.backends.serve.flight_example``. A server of its own is
``fastroof serve --flight HOST:PORT PLAN...``.
"""

from __future__ import annotations

import numpy as np

import fastroof
from fastroof.backends.serve.flight import FlightServer
from fastroof.backends.serve.flight_client import FlightSteps

__all__ = ["main"]


def main() -> None:
    """Find the largest batch that each plan decodes within 20 ms, at several context lengths."""
    tables = fastroof.load_tables("h100")
    plans = {
        "llama-3.1-8b": fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine="kernels"),
        "llama-3.1-70b-tp4": fastroof.compile_plan("llama-3.1-70b", "h100", tables, engine="kernels", tp=4),
    }
    batch_size = np.arange(1, 513)
    kv_len = np.array([1024, 4096, 16384, 65536])
    with FlightServer(plans) as server, FlightSteps(f"grpc://127.0.0.1:{server.port}") as steps:
        for name, about in steps.plans().items():
            print(f"{name} on {about['tp']} x {about['gpu']}, {about['dtype']}")
            step_us = steps.decode_us(name, batch_size[:, None], kv_len)
            for column, kv in enumerate(kv_len):
                fits = batch_size[step_us[:, column] <= 20_000]
                print(f"  kv_len {kv:6}: {f'batch {fits[-1]:3}' if len(fits) else 'none'} within 20 ms")
        mixed = fastroof.StepBatch.from_requests([[(2048, 0), (1, 4095), (1, 1000)]])
        print(f"a prefill of 2048 beside two decodes: {steps.step_us('llama-3.1-8b', mixed)[0]:.1f} us")


if __name__ == "__main__":
    main()
