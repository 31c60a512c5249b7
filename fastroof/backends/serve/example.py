"""``python -m fastroof.backends.serve.example``: plans on a pipe and over HTTP, asked singly and in bulk."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Final

import numpy as np

import fastroof
from fastroof.backends.serve.client import PlanClient
from fastroof.backends.serve.http_server import HttpServer
from fastroof.errors import FastroofError
from fastroof.units import US_PER_S

STEPS: Final = 1_000_000


def ask_on_a_pipe() -> None:
    """Ask ``fastroof serve --stdio``: a line of JSON out, a line back."""
    command = [sys.executable, "-m", "fastroof", "serve", "llama-3.1-8b", "--stdio"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for message in (
            {"batch_size": [1, 64], "kv_len": 4096, "errors": True},
            {"batch_size": 0, "kv_len": 4096},
        ):
            server.stdin.write(json.dumps(message).encode() + b"\n")
            server.stdin.flush()
            reply = json.loads(server.stdout.readline())
            if "error" in reply:
                print(f"{reply['error']}: {reply['message']}")
                continue
            for time_us, error in zip(reply["latency_us"], reply["relative_error"], strict=True):
                print(f"a decode step: {time_us:.1f} us, one standard error {error:.1%}")
        server.stdin.close()  # which ends the server


def ask_over_http() -> None:
    """Find the largest batch that each of two plans decodes within 20 ms, then time a million steps."""
    tables = fastroof.load_tables("h100")
    plans = {
        "llama-3.1-8b": fastroof.compile_plan("llama-3.1-8b", "h100", tables),
        "llama-3.1-70b-tp4": fastroof.compile_plan("llama-3.1-70b", "h100", tables, tp=4),
    }
    batch_size, kv_len = np.arange(1, 513), np.array([1024, 4096, 16384, 65536])
    with HttpServer(plans) as server, PlanClient(f"http://127.0.0.1:{server.port}") as client:
        for name in client.plan_names:
            step_us = client.decode_us(batch_size[:, None], kv_len, name)
            for column, kv in enumerate(kv_len):
                fits = batch_size[step_us[:, column] <= 20_000]
                print(f"{name}, kv_len {kv:6}: {f'batch {fits[-1]:3}' if len(fits) else 'none'} within 20 ms")
        mixed_us = client.step_us([[(2048, 0), (1, 4095), (1, 1000)]], "llama-3.1-8b")[0]
        print(f"a prefill of 2048 with two decodes: {mixed_us:.1f} us")
        try:
            client.decode_us(64, 0, "llama-3.1-8b")
        except FastroofError as error:
            print(f"{type(error).__name__}: {error}")
        rng = np.random.default_rng(0)
        sizes = rng.integers(1, 513, STEPS, dtype=np.int32), rng.integers(2, 8193, STEPS, dtype=np.int32)
        began_s = time.perf_counter()
        client.decode_us(*sizes, "llama-3.1-8b")
        took_s = time.perf_counter() - began_s
        print(f"{STEPS:,} decode steps: {took_s / STEPS * US_PER_S:.3f} us each")


if __name__ == "__main__":
    ask_on_a_pipe()
    ask_over_http()
